"""Triton's kernels on a GPU: where they can be built, and what happens where they cannot."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable, Mapping, Sequence
from subprocess import CalledProcessError
from typing import Any, TypeVar

import torch

from numdev.errors import Refused

__all__ = ["if_possible", "launch", "on_nvidia", "shared_memory"]


def on_nvidia(device: torch.device) -> bool:
    """Whether a device is an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None


T = TypeVar("T")
_REFUSED: list[str] = []
"""Why Triton builds no kernel here."""


def if_possible(device: torch.device, compute: Callable[[], T]) -> T | None:
    """What is computed by Triton's kernels; None where there are none: elsewhere than on an NVIDIA
    GPU, without Triton, or where it could not build one, once."""
    if not on_nvidia(device) or not _with_triton() or _REFUSED:
        return None
    try:
        return compute()
    except Refused as error:
        _REFUSED.append(str(error))
        return None


@functools.cache
def _with_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_NOT_BUILT: dict[Hashable, str] = {}
"""What Triton could not build, and why. To try takes seconds, and it prints pages."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a Triton kernel where its tensors are, and not on the current device. Raises Refused
    where Triton cannot build it for this one; what it could not once is not tried again."""
    if _NOT_BUILT and (why := _NOT_BUILT.get(_built(kernel, arguments, options))):
        raise Refused(why)
    try:
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)
    except Exception as error:
        of_triton = type(error).__module__.startswith("triton") or "PassManager" in str(error)
        # It has a C compiler build what starts its kernels.
        of_compiler = "C compiler" in str(error) or isinstance(error, CalledProcessError)
        if not (of_triton or of_compiler):
            raise
        first = (str(error).strip() or repr(error)).splitlines()[0]
        why = f"Triton cannot build it ({first})"
        _NOT_BUILT[_built(kernel, arguments, options)] = why
        raise Refused(why) from error


def _built(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Hashable:
    """What is the same where the same is built."""
    kinds = (str(x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in arguments)
    return (kernel, arguments[0].device, *kinds, repr(sorted(options.items())))


def shared_memory(device: int) -> int:
    """What a block may have of it, in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
