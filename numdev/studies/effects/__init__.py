"""What rounding does to a model's output: `numdev effects`."""
