"""Running a Triton kernel, or saying why it cannot be."""

from __future__ import annotations

from typing import Any

import torch

from numdev.errors import Refused


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a Triton kernel where its tensors are, and not on the current device. Raises Refused
    where Triton cannot build it for this one."""
    try:
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)
    except Exception as error:
        if not (type(error).__module__.startswith("triton") or "PassManager" in str(error)):
            raise
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise Refused(f"Triton cannot build it ({first})") from error
