"""The options of `triton-flash`, what goes together, what `emulated` calls it; and from a case and
these to what its kernels are compiled for and given.

Plain data, and no triton: the kernels read these tuples by the names of their fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.kernels import Output, options_of
from numdev.kernels.emulation.recipe import STABILISED, check_stabilised
from numdev.system import System

FORMATS = ("working", "float32")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "loop_order": ("q", "kv"),
    "kv_order": ("ascending", "descending"),
    "scores": FORMATS,
    "p": FORMATS,
    "accumulator": FORMATS,
    "row_sum": FORMATS,
    "l_from": ("unrounded", "rounded"),
    "delta_from": ("dO*O", "dP*P"),
    "delta_o": FORMATS,
    "dp": FORMATS,
    "exponential": ("exp2", "exp"),
    "softmax": ("plain", "stabilised", "guarded"),
}
"""Options that are one of several words."""
EMULATED = (
    "block_q", "block_kv", "loop_order", "kv_order", "scores", "p", "accumulator", "row_sum",
    "l_from", "delta_from", "delta_o", "dp", "softmax",
)  # fmt: skip
"""Options that `emulated` has too, by the same name and with the same values. exp and exp2 differ
in their last bits alone, which no emulation knows of."""
SMALLEST = {"block_q": 16, "block_kv": 16, "num_warps": 1, "num_stages": 1}
"""Of sizes; 16 is what Triton's matrix products need."""


def check(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that means nothing, or would mean nothing beside the rest."""
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            raise UsageError(
                f"{name} is {options[name]!r}", hint=closest(str(options[name]), choices)
            )
    for name, smallest in SMALLEST.items():
        value = options[name]
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            hint = f"expected a whole number from {smallest} on"
            raise UsageError(f"{name} is {value!r}", hint=hint)
        if name != "num_stages" and value & (value - 1):
            raise UsageError(f"{name} is {value}", hint="Triton needs a power of two")
    if options["delta_o"] != "working" and options["delta_from"] != "dO*O":
        raise UsageError("delta_o is of delta from dO*O", hint="leave out one of the two")
    check_stabilised(options)


def in_force(given: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """All options of the kernel's function, as given or as it has them. Raises as `check` does."""
    options = {**options_of(function), **given}
    check(options)
    for name, value in STABILISED.items():
        options[name] = value if options[name] is None else options[name]
    return options


def claims(case: AttentionCase, output: Output, system: System) -> Mapping[str, Any] | None:
    """What `emulated` calls the options in force. None with the stabilised softmax: which rows it
    shifts is decided by the last bits of their scores, which no emulation has. (The guarded one
    asks no score.)

    A group's dK and dV are kept in fp32 until they are summed.
    """
    did = output.did or {}
    if did["softmax"] == "stabilised":
        return None
    named = {name: did[name] for name in EMULATED}
    return {"preset": "fa2", **named, "dk_partial": "float32", "dv_partial": "float32"}


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
