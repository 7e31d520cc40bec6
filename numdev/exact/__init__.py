"""Tensors that say a format and hold fp64: any PyTorch code as its own truth, and its
gradients.

A tensor says that it is bfloat16 and holds fp64 values (`wide_tensors.Wide`), so code
that runs on it takes the path, casts and dtypes that it takes in bfloat16, while every
operation computes in fp64. What is rounded, and how, is a `rounded_results.Rounding`:
nothing (the truth), every operation, or chosen ones. `evaluation.evaluate` runs a
function or a module so, forward and backward."""
