"""The rows that err most, and what is special about them."""
