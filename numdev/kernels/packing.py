"""What kernels of other packages are given: their layout, packed sequences, and how they align.

numdev's tensors are [batch, heads, length, head_dim]. The packages' are [batch, length, heads,
head_dim], or all sequences of a batch in a row, [batch * length, heads, head_dim], with the places
where each begins. Autograd follows every step of the way there and back.

All of them align causality and windows bottom-right: query i stands at key i + kv_len - q_len.
Which package takes what else is said where its kernel is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.cases import AttentionCase


def lengths_first(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] to [batch, length, heads, head_dim] and back: a view."""
    return x.transpose(1, 2)


def pack(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] to [batch * length, heads, head_dim], one sequence after the
    other."""
    return lengths_first(x).flatten(0, 1)


def unpack(x: Tensor, batch: int) -> Tensor:
    """The inverse of `pack`."""
    return lengths_first(x.unflatten(0, (batch, -1)))


def unpack_lse(lse: Tensor, batch: int) -> Tensor:
    """[heads, batch * length], as packed calls return it, to [batch, heads, length]."""
    rows: Tensor = lse.unflatten(1, (batch, -1))
    return rows.transpose(0, 1)


def starts(batch: int, length: int, device: torch.device) -> Tensor:
    """int32 [batch + 1]: where each of the packed sequences begins, and where the last one ends."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def misaligned(case: AttentionCase, package: str) -> str | None:
    """Why a package that aligns bottom-right cannot say which keys a query sees by position, as a
    sentence; None when it can."""
    own = case.kv_len - case.q_len
    if case.restricts_positions and case.causal_offset != own:
        return (
            f"{package} aligns causality and windows bottom-right, which is an offset of {own} "
            f"here, and the case has {case.causal_offset}"
        )
    if any(side is not None and side < 0 for side in case.window or ()):
        return f"{package} takes a side of a window below 0 for one without a limit"
    return None


def window_of(case: AttentionCase, unlimited: int | None) -> tuple[int | None, int | None]:
    """The window (left, right) in a package's words for a side without a limit. Causality closes
    the right side, whatever the window leaves open there."""
    if case.window is None:
        return unlimited, unlimited
    left, right = (unlimited if side is None else side for side in case.window)
    return left, 0 if case.is_causal else right
