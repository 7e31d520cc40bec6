"""Attention: softmax(scale Q K^T + mask) V."""
