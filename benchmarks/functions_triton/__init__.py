"""Triton kernels of common functions, apart from files that tests import: Triton reads
TRITON_INTERPRET when it is imported."""
