"""CUDA C, compiled when it is first needed by what PyTorch brings along.

For the few things that Triton cannot say: threads that share counters, or one state, in a
multiprocessor's own memory. Where there is no compiler, `compiled` says so, and its callers have
another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["compiled", "on_nvidia", "shared_memory"]


def on_nvidia(device: torch.device) -> bool:
    """Whether a device is one that runs CUDA C."""
    return device.type == "cuda" and torch.version.hip is None


def compiled(source: str, name: str, *, shared: int = 0) -> Any:
    """The kernel `name` of a source without includes, for the current device, where blocks may have
    `shared` bytes of shared memory; None where it cannot be compiled. Called with grid, block, args
    and shared_mem; integers among args arrive as `int`."""
    try:
        with _without_toolkit():
            kernel = torch.cuda._compile_kernel(source, name)
        if shared:
            kernel.set_shared_memory_config(shared)
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None
    return kernel


def shared_memory(device: int) -> int:
    """What a block may have of it, in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@contextlib.contextmanager
def _without_toolkit() -> Iterator[None]:
    """PyTorch looks for the headers of an installed CUDA toolkit before it compiles, and raises
    OSError where there is none, as where it came from pip; the kernels here include no header."""
    from torch.utils import cpp_extension

    found = cpp_extension.CUDA_HOME
    if found is None:
        cpp_extension.CUDA_HOME = "/usr"  # whose headers it leaves to the compiler
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = found
