"""Tensors in, numbers out: how far an output is from the truth."""
