"""From a sweep's rows to its curves, its words and its cost."""
