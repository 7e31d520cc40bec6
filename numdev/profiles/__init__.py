"""Errors against the position of the row."""
