"""What `numdev compare` makes of two audits."""
