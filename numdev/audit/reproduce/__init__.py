"""A finding as a script that shows it with PyTorch alone."""
