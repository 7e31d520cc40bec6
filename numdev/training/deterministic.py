"""Runs that come out the same twice: PyTorch's deterministic algorithms, for as long as they are
wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(*, wanted: bool) -> Iterator[None]:
    """Deterministic algorithms alone, an error from operators that have none; everything as before
    afterwards. cuBLAS reads its setting when CUDA starts, so enter this before. Where it is not
    wanted nothing is changed.

    Memory is not filled before its use, as PyTorch would: nothing here reads what it did not write.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    workspace = os.environ.get(WORKSPACE)
    try:
        os.environ.setdefault(WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
