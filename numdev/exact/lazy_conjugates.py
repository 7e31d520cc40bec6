"""Lazy conjugates and negatives, computed into memory of their own.

Such a view (a conjugate, or the imaginary part of one) has a bit that no kernel below a
dispatch mode reads. Its storage remembers the computed one, which is computed again when
something is written there, as PyTorch's view would show it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VIEWS = "numdev_computed_views"  # of a storage: what was computed, by `_View`
IS_COMPUTED = "numdev_is_computed"  # of the storage of what was computed


class _View(NamedTuple):
    """A lazy view of a storage. Not the tensor, which would keep its storage for ever."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    is_conjugate: bool
    is_negative: bool

    def compute(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns the values that the view shows of a storage now, in new memory."""
        stored = torch.empty(0, dtype=self.dtype, device=storage.device)
        values = stored.set_(storage, self.offset, self.shape, self.strides)
        if self.is_conjugate:
            values = torch.conj_physical(values)
        return torch.neg(values) if self.is_negative else values


def computed_view(values: Tensor) -> Tensor:
    """Returns the values of a lazy conjugate or negative, in memory that all lazy views
    of the same elements share and that follows what is written into their storage, once
    `update_views` is called; the tensor itself where it is neither."""
    if not (values.is_conj() or values.is_neg()):
        return values
    storage = values.untyped_storage()
    if not hasattr(storage, VIEWS):
        setattr(storage, VIEWS, {})
    views: dict[_View, Tensor] = getattr(storage, VIEWS)
    view = _View(
        dtype=values.dtype,
        shape=values.shape,
        strides=values.stride(),
        offset=int(values.storage_offset()),
        is_conjugate=values.is_conj(),
        is_negative=values.is_neg(),
    )
    if view not in views:
        views[view] = view.compute(storage)
        setattr(views[view].untyped_storage(), IS_COMPUTED, True)
    return views[view].detach()


def is_computed_view(values: Tensor) -> bool:
    """Whether a tensor has the memory of a lazy view that was computed: what is written
    there does not reach the tensor that PyTorch would write into."""
    return hasattr(values.untyped_storage(), IS_COMPUTED)


def update_views(written: Tensor) -> None:
    """Computes all lazy views of the storage of a tensor, into which something was
    written, again, and the lazy views of these."""
    storage = written.untyped_storage()
    for view, values in getattr(storage, VIEWS, {}).items():
        values.copy_(view.compute(storage))
        update_views(values)
