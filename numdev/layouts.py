"""How tensors lie in memory: views as models make them, and copies that lie as the original does.
Which backends can run a call, and by which path, depends on strides."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same [batch, heads, length, dim] tensors as views.

    `contiguous`: as they are. `transposed`: [batch, length, heads, dim] in memory. `packed`: slices
    of one tensor [batch, length, heads + 2 kv_heads, dim], as one projection makes them."""
    if layout == "contiguous":
        return q, k, v
    if layout == "transposed":
        return transposed(q), transposed(k), transposed(v)
    packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2).transpose(1, 2)
    q, k, v = packed.split([x.shape[1] for x in (q, k, v)], dim=1)
    return q, k, v


def transposed(x: Tensor) -> Tensor:
    """[batch, heads, length, dim] that is [batch, length, heads, dim] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided_as(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `like`, which has its shape.

    PyTorch keeps the order of the axes by itself, but closes the gaps of a slice (q, k, v in one
    packed tensor). Where elements of `like` share memory (an expanded mask), `x` is returned as it
    is."""
    if x.stride() == like.stride() or _overlaps(like):
        return x
    empty = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
    return empty.copy_(x)


def _overlaps(x: Tensor) -> bool:
    """Whether two elements may be one place in memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
