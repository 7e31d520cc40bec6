"""Weights by name, wherever they are stored, and how far two sets of them are apart."""
