"""Distances between weights over training, beside nulls."""
