"""Attention with a format at every rounding site."""
