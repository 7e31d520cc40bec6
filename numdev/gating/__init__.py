"""What `numdev gate` decides by: rules, the rows they speak of, and the records of a verdict."""
