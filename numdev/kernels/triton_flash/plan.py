"""From a case and the options of `triton-flash` to what its kernels are compiled for and given.

Plain data, and no triton: the kernels read these tuples by the names of their fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from numdev.cases import AttentionCase

LOG2_E = math.log2(math.e)
FAR = 1 << 30
"""A distance that no two positions have, and whose sum with a position is a 32-bit number."""


class Plan(NamedTuple):
    """What a kernel is compiled for: constants to it."""

    head_dim: int
    v_dim: int
    wide: int
    """head_dim as a power of two of at least 16, which is how matrix products must have it."""
    v_wide: int
    left: bool
    """Whether a row's position hides keys that come before others."""
    right: bool
    """Whether it hides keys that come after others."""
    mask: Literal["none", "bool", "additive"]
    hidden: float
    """What an additive mask holds where a key is hidden."""
    sinks: bool
    binary: bool
    """Whether exp(x) is had as exp2(x log2 e)."""
    folded: bool
    """Whether scores are in units of ln 2, log2 e being part of their scale."""
    round_scores: bool
    round_p: bool
    round_accumulator: bool
    round_row_sum: bool
    round_state: bool
    sum_rounded_p: bool
    descending: bool
    delta_of_p: bool
    round_dp: bool
    guarded: bool
    stabilised: bool
    beta: float
    tie_tolerance: float
    """In the units of the scores."""
    largest_shift: float
    """How far below 0 a row's largest S - m may be, in the units of the scores."""


class Strides(NamedTuple):
    """Of a tensor [batch, heads, rows, columns], in elements."""

    batch: int
    head: int
    row: int
    column: int


class Size(NamedTuple):
    """Of a call. Row i sees keys i + first to i + last, as far as the plan has such a limit."""

    heads: int
    group: int
    q_len: int
    kv_len: int
    first: int
    last: int


class Launch(NamedTuple):
    """The shape of a tile, and how many warps and pipeline stages work on it."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def as_arguments(self) -> dict[str, int]:
        """As a kernel takes it.

        Without fused multiply-adds: where scale · S − m became one, which in tiles with hidden keys
        it cannot, P at the maximum was no longer 1, nor the same in forward and backward. At
        scores of 10,000 that was 5e-4 of P.
        """
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_KV": self.block_kv,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": False,
        }


Table = Mapping[int, Launch]
FORWARD: Table = {
    64: Launch(128, 64, 8, 3),
    128: Launch(128, 64, 8, 3),
    256: Launch(128, 64, 8, 2),
}
OF_QUERIES: Table = {
    64: Launch(128, 64, 8, 3),
    128: Launch(128, 64, 8, 2),
    256: Launch(64, 32, 8, 1),
}
OF_KEYS: Table = {64: Launch(64, 128, 8, 2), 128: Launch(64, 128, 8, 2), 256: Launch(32, 64, 8, 1)}
"""For 16-bit operands, by the largest padded head dimension they are meant for."""
FP32: Table = {128: Launch(32, 32, 4, 1), 256: Launch(16, 32, 4, 1)}
"""Where fp32 operands are multiplied: without tensor cores, and from registers."""


def plan_of(case: AttentionCase, options: Mapping[str, Any]) -> Plan:
    """What a case and all its options in force compile to."""
    first, last = _limits(case)
    mask, additive = case.mask, case.mask is not None and case.mask.dtype != torch.bool
    binary = options["exponential"] == "exp2"
    folded = binary and not additive  # a mask's lowest number, times log2 e, would be -inf
    unit = LOG2_E if folded else 1.0
    p_dtype = torch.float32 if options["p"] == "float32" else case.q.dtype
    return Plan(
        head_dim=case.q.shape[-1],
        v_dim=case.v.shape[-1],
        wide=_padded(case.q.shape[-1]),
        v_wide=_padded(case.v.shape[-1]),
        left=first is not None,
        right=last is not None,
        mask="none" if mask is None else "additive" if additive else "bool",
        hidden=torch.finfo(mask.dtype).min if mask is not None and additive else 0.0,
        sinks=case.sinks is not None,
        binary=binary,
        folded=folded,
        round_scores=options["scores"] == "working",
        round_p=options["p"] == "working",
        round_accumulator=options["accumulator"] == "working",
        round_row_sum=options["row_sum"] == "working",
        round_state=options["loop_order"] == "kv",
        sum_rounded_p=options["l_from"] == "rounded",
        descending=options["kv_order"] == "descending",
        delta_of_p=options["delta_from"] == "dP*P",
        round_dp=options["dp"] == "working",
        guarded=options["softmax"] == "guarded",
        stabilised=options["softmax"] == "stabilised",
        beta=float(options["beta"]),
        tie_tolerance=options["tie_tolerance"] * unit,
        largest_shift=-math.log(torch.finfo(p_dtype).tiny) * unit,
    )


def size_of(case: AttentionCase) -> Size:
    """The call's size, with a distance nobody has where there is no limit."""
    first, last = _limits(case)
    return Size(
        heads=case.heads,
        group=case.group,
        q_len=case.q_len,
        kv_len=case.kv_len,
        first=-FAR if first is None else max(-FAR, min(first, FAR)),
        last=FAR if last is None else max(-FAR, min(last, FAR)),
    )


def _limits(case: AttentionCase) -> tuple[int | None, int | None]:
    """How far from its own number the first and the last key are that a row sees by position."""
    left, right = case.window or (None, None)
    if case.is_causal:
        right = 0 if right is None else min(right, 0)
    first = None if left is None else case.causal_offset - left
    return first, None if right is None else case.causal_offset + right


def _padded(features: int) -> int:
    return max(16, 1 << (features - 1).bit_length())


def forward_tiles(plan: Plan, dtype: torch.dtype, options: Mapping[str, Any]) -> Launch:
    """Those asked for, the rest as they suit the products."""
    narrow = dtype == torch.float32 or not plan.round_p
    default = _of(FP32 if narrow else FORWARD, plan)
    asked = {name: options[name] for name in Launch._fields if options[name] is not None}
    return default._replace(**asked)


def backward_tiles(plan: Plan, dtype: torch.dtype) -> tuple[Launch, Launch]:
    """Of the kernel that computes dQ, and of that for dK and dV."""
    narrow = dtype == torch.float32
    return _of(FP32 if narrow else OF_QUERIES, plan), _of(FP32 if narrow else OF_KEYS, plan)


def _of(table: Table, plan: Plan) -> Launch:
    return next(x for widest, x in table.items() if max(plan.wide, plan.v_wide) <= widest)


def strides_of(x: Tensor) -> Strides:
    """Strides of a tensor with four axes."""
    return Strides(*x.stride())
