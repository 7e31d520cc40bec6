"""Numbers on their way from a GPU to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]


class Arrival:
    """Tensors of one device and one dtype, copied to the host in one piece, behind all that the
    device has to do already. Nobody waits for them before they are looked at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [x.shape for x in tensors]
        parts = [x.detach().flatten() for x in tensors]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._flat: Tensor | None = flat.to("cpu", non_blocking=True, copy=True)
        self._arrays: list[Array] | None = None
        self._there: torch.cuda.Event | None = None
        if flat.is_cuda:
            with torch.cuda.device_of(flat):
                self._there = torch.cuda.Event()
                self._there.record()

    @property
    def arrays(self) -> list[Array]:
        """What they hold, in their order. Raises RuntimeError for a fault of the device."""
        if self._arrays is None and self._there is not None:
            self._there.synchronize()
        flat = self._flat
        if flat is not None:
            self._arrays = self._apart(flat.numpy().copy())
            self._flat = None  # the memory it came in is used again
        assert self._arrays is not None
        return self._arrays

    def _apart(self, whole: Array) -> list[Array]:
        found, at = [], 0
        for shape in self._shapes:
            end = at + shape.numel()
            found.append(whole[at:end].reshape(shape))
            at = end
        return found
