"""`triton-flash`: flash attention in Triton, with the choices that decide its numbers as
options.

It is a kernel to audit and an experiment at once: where a published result is about a
rounding, here is GPU code that rounds there, or does not. Its options (docs/kernels.md)
are named as in `emulated`, and it claims to compute as those there say. The code that
runs on the device is in `forward` and `backward` beside this module, which needs no
triton. Tiles given as options are those of the forward pass; backward has its own, which
decide nothing but the order of fp32 sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from numdev.cases import FAR, AttentionCase, key_limits
from numdev.errors import UsageError
from numdev.kernels import Output, Requirement, kernel
from numdev.kernels.emulation.recipe import STABILISED, check_stabilised
from numdev.kernels.output import upstream_in, why_not
from numdev.system import System

FORMATS = ("working", "float32")
SIZES: Mapping[str, object] = dict.fromkeys(
    ("block_q", "block_kv"),
    tuple(1 << n for n in range(4, 11)),  # 16 is what Triton's matrix products need
)
"""Options that are None by default: as it suits the head dimension and the products."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "loop_order": ("q", "kv"),
    "kv_order": ("ascending", "descending"),
    "scores": ("float32", "working"),
    "p": FORMATS,
    "accumulator": ("float32", "working"),
    "row_sum": ("float32", "working"),
    "l_from": ("unrounded", "rounded"),
    "delta_from": ("dO*O", "dP*P"),
    "delta_o": FORMATS,
    "dp": ("float32", "working"),
    "exponential": ("exp2", "exp"),
    "softmax": ("plain", "stabilised", "guarded"),
}
"""Options that are one of several words, the default first."""
OPTIONS: Mapping[str, object] = {
    **dict.fromkeys(SIZES),
    **{name: words[0] for name, words in CHOICES.items()},
    **dict.fromkeys(STABILISED),
}
EMULATED = ("block_q", "block_kv", *(name for name in CHOICES if name != "exponential"))
"""Options that `emulated` has too, by the same name and with the same values. exp and
exp2 differ in their last bits alone, which no emulation knows of."""
LARGEST_HEAD = 256
LOG2_E = math.log2(math.e)


# --- what follows from a case and its options -----------------------------------------


# Constants of the kernels that an option decides: which one, by which word.
FLAGS: Mapping[str, tuple[str, str]] = {
    "binary": ("exponential", "exp2"),  # exp(x) is had as exp2(x log2 e)
    "round_scores": ("scores", "working"),
    "round_p": ("p", "working"),
    "round_accumulator": ("accumulator", "working"),
    "round_row_sum": ("row_sum", "working"),
    "round_state": ("loop_order", "kv"),
    "sum_rounded_p": ("l_from", "rounded"),
    "descending": ("kv_order", "descending"),
    "delta_of_p": ("delta_from", "dP*P"),
    "round_dp": ("dp", "working"),
    "guarded": ("softmax", "guarded"),
    "stabilised": ("softmax", "stabilised"),
}


class KernelPlan(NamedTuple):
    """What a kernel is compiled for: constants to it."""

    head_dim: int
    v_dim: int
    wide: int  # a power of two of at least 16, as matrix products must have it
    v_wide: int
    left: bool  # whether a row's position hides keys that come before others
    right: bool  # the same of keys that come after others
    mask: str  # none, bool or additive
    hidden: float  # what an additive mask holds where a key is hidden
    sinks: bool
    folded: bool  # scores are in units of ln 2, log2 e being part of their scale
    beta: float
    tie_tolerance: float  # in the units of scores, as the next
    largest_shift: float  # how far below 0 a row's largest S - m may be
    # As FLAGS says
    binary: bool
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


def plan_of(case: AttentionCase, options: Mapping[str, Any]) -> KernelPlan:
    """Returns the constants that a kernel is compiled for, from a case and from all its
    options in force, of which `beta` and `tie_tolerance` are numbers."""
    first, last = key_limits(case)
    mask, additive = case.mask, case.mask is not None and case.mask.dtype != torch.bool
    # A mask's lowest number, times log2 e, would be -inf.
    folded = options["exponential"] == "exp2" and not additive
    unit = LOG2_E if folded else 1.0
    p_dtype = torch.float32 if options["p"] == "float32" else case.q.dtype
    hidden = torch.finfo(mask.dtype).min if mask is not None and additive else 0.0
    largest_shift = -math.log(torch.finfo(p_dtype).tiny) * unit
    kind = "none" if mask is None else "additive" if additive else "bool"
    head_dim, v_dim = case.q.shape[-1], case.v.shape[-1]
    flags = {flag: options[name] == word for flag, (name, word) in FLAGS.items()}
    return KernelPlan(
        head_dim=head_dim,
        v_dim=v_dim,
        wide=_padded_width(head_dim),
        v_wide=_padded_width(v_dim),
        left=first is not None,
        right=last is not None,
        mask=kind,
        hidden=hidden,
        sinks=case.sinks is not None,
        folded=folded,
        beta=float(options["beta"]),
        tie_tolerance=options["tie_tolerance"] * unit,
        largest_shift=largest_shift,
        **flags,
    )


def _padded_width(dim: int) -> int:
    """Returns the power of two, 16 or more, that a matrix product takes in place of
    `dim`."""
    return max(16, 1 << (dim - 1).bit_length())


class Strides(NamedTuple):
    """The strides of a tensor [batch, heads, rows, columns], in elements."""

    batch: int
    head: int
    row: int
    column: int


class Size(NamedTuple):
    """The sizes of a call. Row i sees keys i + first to i + last, as far as the plan has
    such a limit."""

    heads: int
    group: int
    q_len: int
    kv_len: int
    first: int
    last: int

    @classmethod
    def of(cls, case: AttentionCase) -> Size:
        """Returns the sizes of a case. Where it has no limit of keys on a side, `first`
        is -FAR or `last` is FAR, more than any distance between positions."""
        first, last = key_limits(case)
        first, last = -FAR if first is None else first, FAR if last is None else last
        return cls(case.heads, case.group, case.q_len, case.kv_len, first, last)


class Launch(NamedTuple):
    """The shape of a tile, and how many warps and pipeline stages work on it."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def as_arguments(self) -> dict[str, int]:
        """Returns the tile as a kernel's keyword arguments, with fused multiply-adds off:
        where scale · S − m became one, which in tiles with hidden keys it cannot, P at
        the maximum was no longer 1, nor the same in forward and backward. At scores of
        10,000 that was 5e-4 of P."""
        names = ("BLOCK_Q", "BLOCK_KV", "num_warps", "num_stages")
        return {**dict(zip(names, self, strict=True)), "enable_fp_fusion": False}


# For 16-bit operands, by pass and by the largest padded head dimension they are meant
# for.
TILES: Mapping[str, Mapping[int, Launch]] = {
    "forward": {128: Launch(128, 64, 8, 3), 256: Launch(128, 64, 8, 2)},
    "of_queries": {
        64: Launch(128, 64, 8, 3),
        128: Launch(128, 64, 8, 2),
        256: Launch(64, 32, 8, 1),
    },
    "of_keys": {128: Launch(64, 128, 8, 2), 256: Launch(32, 64, 8, 1)},
}
# Where fp32 operands are multiplied: without tensor cores, and from registers.
FP32 = {128: Launch(32, 32, 4, 1), 256: Launch(16, 32, 4, 1)}


def tiles(kernel: str, plan: KernelPlan, dtype: torch.dtype) -> Launch:
    """Returns the tile, warps and stages that suit the width and dtype of a kernel's
    products. `kernel`: `forward`, `of_queries` or `of_keys`; `dtype`: of q. Raises
    StopIteration for heads wider than LARGEST_HEAD."""
    narrow = dtype == torch.float32 or (kernel == "forward" and not plan.round_p)
    table = FP32 if narrow else TILES[kernel]
    return next(x for widest, x in table.items() if max(plan.wide, plan.v_wide) <= widest)


# --- one call on the device -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelCall:
    """A case and its options, as the device code takes them."""

    case: AttentionCase
    mask: Tensor | None
    """Expanded to [B, H, q_len, kv_len], without being copied; a bool mask as bytes."""
    plan: KernelPlan
    options: Mapping[str, object]  # in force, tiles included
    launch: Launch

    @classmethod
    def of(cls, case: AttentionCase, options: Mapping[str, Any]) -> KernelCall:
        """Returns the call of a case. `options` are all of the kernel's; those that are
        None (tiles, `beta`, `tie_tolerance`) are chosen here."""
        options = {
            n: STABILISED[n] if x is None and n in STABILISED else x
            for n, x in options.items()
        }
        plan = plan_of(case, options)
        launch = tiles("forward", plan, case.q.dtype)
        launch = launch._replace(**{n: x for n in SIZES if (x := options[n]) is not None})
        options |= {n: getattr(launch, n) for n in SIZES}
        mask = case.mask
        if mask is not None:
            mask = mask.detach().expand(*case.q.shape[:3], case.kv_len)
            mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        return cls(
            case=case.detached(), mask=mask, plan=plan, options=options, launch=launch
        )

    def forward(self) -> tuple[Output, Tensor]:
        """Runs the forward pass and returns its Output, and the O that backward reads:
        the same in the case's dtype, or with `delta_o: float32` as it was before its
        cast."""
        from numdev.kernels.triton_flash.forward import forward

        q, k, v = self.case.q, self.case.k, self.case.v
        dtype = torch.float32 if self.options["delta_o"] == "float32" else q.dtype
        O = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        forward[self._programs(self.launch.block_q, q)](
            q,
            k,
            v,
            O,
            lse,
            self.case.sinks,
            self.mask,
            *strides(q, k, v, O, self.mask),
            Size.of(self.case),
            self._scores_scale,
            PLAN=self.plan,
            **self.launch.as_arguments(),
        )
        ran = " ".join(f"{name}={value}" for name, value in self.options.items())
        return Output(out=O.to(q.dtype), lse=lse, ran=ran, did=self.options), O

    def backward(
        self, O: Tensor, lse: Tensor | None, dO: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs the backward pass and returns dQ, dK and dV in the inputs' dtype. `O`,
        `lse`: what forward returned, never None. Contributions of a group's query heads
        are summed in fp32, then rounded."""
        from numdev.kernels.triton_flash.backward import of_keys, of_queries

        case, q, k, v = self.case, self.case.q, self.case.k, self.case.v
        first, second = (
            tiles(name, self.plan, q.dtype) for name in ("of_queries", "of_keys")
        )
        sum_dtype = q.dtype if case.group == 1 else torch.float32
        delta = q.new_empty(q.shape[:3], dtype=torch.float32)
        dQ = q.new_empty(q.shape)
        dK, dV = (
            q.new_empty(*q.shape[:2], *x.shape[2:], dtype=sum_dtype) for x in (k, v)
        )
        scales = (Size.of(case), case.scale, self._scores_scale)
        of_queries[self._programs(first.block_q, q)](
            q, k, v, O, dO, lse, delta, dQ, self.mask,
            *strides(q, k, v, O, dO, dQ, self.mask), *scales,
            PLAN=self.plan, **first.as_arguments(),
        )  # fmt: skip
        of_keys[self._programs(second.block_kv, k)](
            q, k, v, dO, lse, delta, dK, dV, self.mask,
            *strides(q, k, v, dO, dK, dV, self.mask), *scales,
            PLAN=self.plan, **second.as_arguments(),
        )  # fmt: skip
        if case.group > 1:
            grouped = (x.unflatten(1, (case.kv_heads, case.group)) for x in (dK, dV))
            dK, dV = (x.sum(dim=2).to(q.dtype) for x in grouped)
        return dQ, dK, dV

    @property
    def _scores_scale(self) -> float:
        """Returns the factor of Q Kᵀ in the plan's units: the case's scale, times log2 e
        where scores are in units of ln 2."""
        return self.case.scale * (LOG2_E if self.plan.folded else 1.0)

    def _programs(self, block: int, of: Tensor) -> tuple[int]:
        """Returns a grid of one axis with a program for every `block` rows of `of` and
        every query head; the other axes of a grid end at 65535."""
        return (self.case.q.shape[0] * self.case.heads * -(-of.shape[2] // block),)


def strides(*tensors: Tensor | None) -> list[Strides]:
    """Returns the strides of each tensor; zeros for None."""
    return [Strides(0, 0, 0, 0) if x is None else Strides(*x.stride()) for x in tensors]


# --- the kernel -----------------------------------------------------------------------


def _unsupported(case: AttentionCase) -> str | None:
    """Returns why the kernel cannot run the case; None where it can."""
    largest = max(case.q.shape[-1], case.v.shape[-1])
    wide_mask = case.mask is not None and case.mask.dtype == torch.float64
    return why_not(
        (case.softcap is not None, "no soft cap"),
        (
            case.q.dtype == torch.float64,
            "takes float16, bfloat16 and float32, not float64",
        ),
        (wide_mask, "computes in float32, and the mask is in float64"),
        (largest > LARGEST_HEAD, f"heads have at most {LARGEST_HEAD} features"),
    )


def _check(options: Mapping[str, object]) -> None:
    """Raises UsageError for options that contradict each other, and for values of the
    stabilised softmax that it cannot have."""
    if options["delta_o"] != "working" and options["delta_from"] != "dO*O":
        raise UsageError("delta_o is of delta from dO*O", hint="leave out one of the two")
    check_stabilised(options)


def _claims(
    case: AttentionCase, output: Output, system: System
) -> Mapping[str, object] | None:
    """Returns the options in force as those of `emulated`; a group's dK and dV stay in
    fp32 until they are summed. None with the stabilised softmax: which rows it shifts is
    decided by the last bits of their scores, which no emulation has. (The guarded one
    depends on no score.)"""
    did = output.did or {}
    if did["softmax"] == "stabilised":
        return None
    named = {name: did[name] for name in EMULATED}
    return {"preset": "fa2", **named, "dk_partial": "float32", "dv_partial": "float32"}


def training_step(case: AttentionCase, **options: object) -> Output:
    """Runs both passes of a training step and returns out, lse, dq, dk and dv. dO is
    brought to the inputs' dtype. `options`: all of the kernel's. Raises UsageError for a
    case without grad_out."""
    dO = upstream_in(case, case.q.dtype)
    call = KernelCall.of(case, options)
    done, O = call.forward()
    dq, dk, dv = call.backward(O, done.lse, dO)
    return dataclasses.replace(done, dq=dq, dk=dk, dv=dv, ran_backward=done.ran)


class _TrainedContext(Protocol):
    """What autograd stores of a call between its two passes."""

    call: KernelCall
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Trained(torch.autograd.Function):
    """One operation of autograd's graph: forward stores its output and log-sum-exp, so
    that backward need not run it again."""

    @staticmethod
    def forward(
        ctx: _TrainedContext, q: Tensor, k: Tensor, v: Tensor, call: KernelCall
    ) -> Tensor:
        """Returns the output of the call, and stores in `ctx` what backward reads."""
        done, O = call.forward()
        ctx.save_for_backward(O, done.lse)
        ctx.call = call
        return done.out

    @staticmethod
    def backward(ctx: _TrainedContext, *upstreams: Tensor) -> object:
        """Returns dq, dk and dv, and None for `call`."""
        O, lse = ctx.saved_tensors
        return *ctx.call.backward(O, lse, upstreams[0]), None


@kernel(
    "triton-flash",
    options=OPTIONS,
    values={**SIZES, **CHOICES},
    requires=Requirement(device="cuda", package="triton"),
    supports=_unsupported,
    validate=_check,
    claims=_claims,
    backward=training_step,
    training=lambda case, **options: _Trained.apply(  # type: ignore[no-untyped-call]
        case.q, case.k, case.v, KernelCall.of(case, options)
    ),
)
def triton_flash(case: AttentionCase, **options: object) -> Output:
    """Flash attention in Triton, with its roundings and orders as options.

    Options: OPTIONS, described in docs/kernels.md. Returns out and lse; `did` and `ran`
    have all options in force."""
    return KernelCall.of(case, options).forward()[0]
