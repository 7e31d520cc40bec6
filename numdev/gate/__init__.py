"""Reports in, verdicts out: rules, comparisons, and what they say."""
