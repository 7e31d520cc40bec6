"""Opening what users have: weights, tensors, text, pipelines."""
