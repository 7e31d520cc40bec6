"""Attention over parts of the keys, merged into attention over all of them.

A part s of the keys gives O_s, the output of a softmax over its keys alone, and L_s, the
log-sum-exp of their scores. Together they are the output over all keys:

    L = log sum_s exp(L_s),    O = sum_s exp(L_s - L) O_s.

Flash-decoding merges all parts at once; ring attention (arXiv 2310.01889) merges each as it comes,
by a formula of two states (in ring-flash-attention, and from there in PyTorch's context
parallelism), with sigma the logistic function:

    O <- O - sigma(L_s - L) (O - O_s),    L <- L - log sigma(L - L_s).

A part that hides every key of a row has L_s = -inf, whatever its O_s, and adds nothing; a row
without any key has O = 0 and L = -inf. NaN propagates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from numdev.formats import Format, dtype_of, format_named, format_of
from numdev.kernels.emulation.rounding import rounding

MergeFormat = Literal["float32", "float64", "bfloat16", "float16", "working", "promoted"]
PAIRWISE = ("ring", "zigzag", "sequential")
State = tuple[Tensor, Tensor]
"""O [B, H, rows, v_dim] and L [B, H, rows]."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How partial results become one."""

    order: str
    """`simultaneous`: all at once; `tree`: neighbours, then their results, and so on; any other:
    one after the other, in the order in which they are given."""
    format: str
    """What a running result is stored in between two merges: a format, or `working`. A merge is
    computed in fp32, in fp64 for `float64` and where the working format asks for it. `promoted`: as
    torch promotes a running result in the working format and weights in fp32: the first difference
    O - O_s is rounded, and nothing after it."""
    working: Format

    @property
    def arithmetic(self) -> torch.dtype:
        """What merges are computed in."""
        wide = self.format == "float64" or not format_of(torch.float32).contains(self.working)
        return torch.float64 if wide else torch.float32

    @property
    def between(self) -> Format | None:
        """What a running result is rounded to; None where it is not."""
        if self.format in ("working", "promoted"):
            return self.working
        stored = format_named(self.format)
        return None if stored.contains(format_of(self.arithmetic)) else stored

    @property
    def sums(self) -> torch.dtype:
        """The dtype in which gradients of several parts are added up."""
        return self.arithmetic if self.between is None else dtype_of(self.between)


def merged(parts: Sequence[State], how: Merge) -> State:
    """The parts as one, O in the arithmetic of `how` and L no narrower.

    One part is returned as it is, unrounded. Raises ValueError for none.
    """
    if not parts:
        raise ValueError("there is nothing to merge")
    states = [_ready(part, how) for part in parts]
    if len(states) == 1:
        return states[0]
    step = rounding(how.between, how.arithmetic, "nearest", None)
    store = step if step is not None and how.format != "promoted" else _as_is
    if how.order == "simultaneous":
        O, L = _at_once(states)
        return store(O), L
    if how.order == "tree":
        return _in_a_tree(states, store)
    done = (store(states[0][0]), states[0][1])
    for state in states[1:]:
        done = _pair(done, state, store)
    return done


def _ready(part: State, how: Merge) -> State:
    """A part as it is merged: 0 where it saw no key."""
    O, L = part
    O = O.masked_fill(torch.isneginf(L)[..., None], 0.0)
    keep = how.format == "promoted" and how.order != "simultaneous"
    return (O if keep else O.to(how.arithmetic)), L.to(how.arithmetic)


def _as_is(x: Tensor) -> Tensor:
    return x


def _pair(a: State, b: State, store: Callable[[Tensor], Tensor]) -> State:
    (O, L), (O_b, L_b) = a, b
    nothing, first = torch.isneginf(L_b), torch.isneginf(L)
    weight = torch.sigmoid(L_b - L)[..., None]
    merged_O = torch.where(nothing[..., None], O, O - weight * (O - O_b))
    merged_L = torch.where(first, L_b, L - logsigmoid(L - L_b))
    return store(merged_O), torch.where(nothing, L, merged_L)


def _in_a_tree(states: list[State], store: Callable[[Tensor], Tensor]) -> State:
    states = [(store(O), L) for O, L in states]
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=False)
        left_over = states[len(states) - len(states) % 2 :]
        states = [*(_pair(a, b, store) for a, b in pairs), *left_over]
    return states[0]


def _at_once(states: Sequence[State]) -> State:
    L_s = torch.stack([L for _, L in states])
    L = L_s.logsumexp(dim=0)
    weights = (L_s - L.clamp(min=torch.finfo(L.dtype).min)).exp()
    O = torch.zeros_like(states[0][0])
    for weight, (O_s, _) in zip(weights, states, strict=True):
        O = O + weight[..., None] * O_s
    return O, L
