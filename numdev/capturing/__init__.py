"""A model runs, and every attention call it makes is handed over."""
