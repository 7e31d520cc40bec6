"""Which heads' rounding errors do not cancel, and what cures them."""
