"""`triton-flash`: flash attention in Triton, with the choices that decide its numbers as options.

It is a kernel to audit and an experiment at once: where a published result is about a rounding,
here is GPU code that rounds there, or does not. What its options do is named as in `emulated`
(`numdev.kernels.emulation.recipe`), and it claims to compute as those options there say.

This module registers the kernel and launches it. What the options mean, and what follows from them
and a case, is in `triton_flash.plan`; the code that runs on the device is in `forward` and
`backward` beside it, imported when it runs: this module needs no triton. It is meant to be fast for
16-bit inputs; products of fp32 operands do not use tensor cores, and take long.

The tiles given as options are those of the forward pass. Backward has its own, which decide nothing
but the order of fp32 sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import format_of, round_to
from numdev.kernels import Output, Requirement, kernel
from numdev.kernels.output import upstream
from numdev.kernels.triton_flash.plan import (
    LOG2_E,
    Launch,
    Plan,
    Size,
    Strides,
    backward_tiles,
    check,
    claims,
    forward_tiles,
    in_force,
    plan_of,
    size_of,
    strides_of,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256


def _unsupported(case: AttentionCase) -> str | None:
    if case.softcap is not None:
        return "it has no soft cap"
    if case.q.dtype not in DTYPES:
        return f"it takes float16, bfloat16 and float32, not {case.format.name}"
    if case.mask is not None and case.mask.dtype == torch.float64:
        return "it computes in float32, and the mask is in float64"
    largest = max(case.q.shape[-1], case.v.shape[-1])
    return f"its heads have at most {LARGEST_HEAD} features" if largest > LARGEST_HEAD else None


def step(case: AttentionCase, **options: Any) -> Output:
    """Both passes of a training step under the options of `triton-flash`, those not given being
    its defaults: out, lse, dq, dk and dv.

    dO is brought to the inputs' dtype, rounded once where that is narrower. Raises UsageError for
    options that do not go together, and for a case without grad_out.
    """
    dO = upstream(case)
    call = _call(case, options)
    done, O = _forward(call)
    dtype = case.q.dtype
    dO = dO if dO.dtype == dtype else round_to(dO, format_of(dtype)).to(dtype)
    dq, dk, dv = _backward(call, O, done.lse, dO)
    first, second = backward_tiles(call.plan, dtype)
    ran = (
        f"delta from {'dP*P' if call.plan.delta_of_p else 'dO*O'}, "
        f"dP {'rounded' if call.plan.round_dp else 'in float32'}, dq in tiles {first.block_q} x "
        f"{first.block_kv}, dk and dv in tiles {second.block_q} x {second.block_kv}"
    )
    return dataclasses.replace(done, dq=dq, dk=dk, dv=dv, ran_backward=ran)


class _Trained(torch.autograd.Function):
    """Forward leaves its output and log-sum-exp to backward, which launches nothing else again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        done, O = _forward(call)
        ctx.save_for_backward(O, done.lse)
        ctx.call = call
        return done.out

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (dO,) = given
        O, lse = ctx.saved_tensors
        return *_backward(ctx.call, O, lse, dO), None


def trained(case: AttentionCase, **options: Any) -> Tensor:
    """The output inside a network that learns, under the options of `triton-flash`."""
    call = _call(case, options)
    out: Tensor = _Trained.apply(case.q, case.k, case.v, call)  # type: ignore[no-untyped-call]
    return out


@kernel(
    "triton-flash",
    requires=Requirement(device="cuda", package="triton"),
    supports=_unsupported,
    validate=check,
    claims=claims,
    backward=step,
    training=trained,
)
def triton_flash(
    case: AttentionCase,
    *,
    block_q: int | None = None,
    block_kv: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    loop_order: str = "q",
    kv_order: str = "ascending",
    scores: str = "float32",
    p: str = "working",
    accumulator: str = "float32",
    row_sum: str = "float32",
    l_from: str = "unrounded",
    delta_from: str = "dO*O",
    delta_o: str = "working",
    dp: str = "float32",
    exponential: str = "exp2",
    softmax: str = "plain",
    beta: float | None = None,
    tie_tolerance: float | None = None,
) -> Output:
    """Flash attention in Triton, with its roundings and orders as options.

    docs/kernels.md says what each does. Sizes that are None follow from the head dimension and the
    dtype. Rows that see no key are 0, with lse -inf or the sink. NaN and infinity propagate as the
    arithmetic has it. Raises UsageError for options that do not go together.
    """
    given = locals()  # the arguments and nothing else: keep this the first line
    return _forward(_call(case, {name: x for name, x in given.items() if name != "case"}))[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Call:
    """A case and its options, as the device code takes them."""

    case: AttentionCase
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """Expanded to [B, H, q_len, kv_len], without being copied; a bool mask as bytes."""
    mask_strides: Strides
    size: Size
    plan: Plan
    launch: Launch
    scores_scale: float
    wide_o: bool
    """Whether backward reads O from before its cast."""
    options: Mapping[str, Any]
    """In force, tiles included."""


def _call(case: AttentionCase, given: Mapping[str, Any]) -> _Call:
    options = in_force(given, triton_flash)
    plan = plan_of(case, options)
    launch = forward_tiles(plan, case.q.dtype, options)
    mask = case.mask
    if mask is not None:
        mask = mask.detach().expand(*case.q.shape[:3], case.kv_len)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return _Call(
        case=case,
        q=case.q.detach(),
        k=case.k.detach(),
        v=case.v.detach(),
        mask=mask,
        mask_strides=Strides(0, 0, 0, 0) if mask is None else strides_of(mask),
        size=size_of(case),
        plan=plan,
        launch=launch,
        scores_scale=case.scale * (LOG2_E if plan.folded else 1.0),
        wide_o=options["delta_o"] == "float32",
        options={**options, **launch._asdict()},
    )


def _forward(call: _Call) -> tuple[Output, Tensor]:
    """What forward returns, and the O that backward reads: the same, or from before its cast."""
    from numdev.kernels.triton_flash.forward import forward

    case, q, k, v = call.case, call.q, call.k, call.v
    dtype = torch.float32 if call.wide_o else q.dtype
    O = torch.empty(*q.shape[:3], v.shape[-1], dtype=dtype, device=q.device)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    forward[_programs(case, case.q_len, call.launch.block_q)](
        q, k, v, O, lse, case.sinks, call.mask,
        *map(strides_of, (q, k, v, O)), call.mask_strides, call.size, call.scores_scale,
        PLAN=call.plan, **call.launch.as_arguments(),
    )  # fmt: skip
    ran = " ".join(f"{name}={value}" for name, value in call.options.items())
    return Output(out=O.to(q.dtype), lse=lse, ran=ran, did=call.options), O


def _backward(
    call: _Call, O: Tensor, lse: Tensor | None, dO: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV. What the query heads of a group have is summed in fp32 and then rounded."""
    from numdev.kernels.triton_flash.backward import of_keys, of_queries

    case, q, k, v = call.case, call.q, call.k, call.v
    first, second = backward_tiles(call.plan, q.dtype)
    kept = q.dtype if case.group == 1 else torch.float32
    delta = q.new_empty(q.shape[:3], dtype=torch.float32)
    dQ = q.new_empty(q.shape)
    dK, dV = (q.new_empty(*q.shape[:2], *x.shape[2:], dtype=kept) for x in (k, v))
    of_queries[_programs(case, case.q_len, first.block_q)](
        q, k, v, O, dO, lse, delta, dQ, call.mask,
        *map(strides_of, (q, k, v, O, dO, dQ)), call.mask_strides,
        call.size, case.scale, call.scores_scale, PLAN=call.plan, **first.as_arguments(),
    )  # fmt: skip
    of_keys[_programs(case, case.kv_len, second.block_kv)](
        q, k, v, dO, lse, delta, dK, dV, call.mask,
        *map(strides_of, (q, k, v, dO, dK, dV)), call.mask_strides,
        call.size, case.scale, call.scores_scale, PLAN=call.plan, **second.as_arguments(),
    )  # fmt: skip
    return dQ, _summed(dK, case), _summed(dV, case)


def _programs(case: AttentionCase, lines: int, block: int) -> tuple[int]:
    """One for every block of every query head. On one axis: the others end at 65535."""
    return (case.q.shape[0] * case.heads * -(-lines // block),)


def _summed(x: Tensor, case: AttentionCase) -> Tensor:
    """[B, kv_heads, ...] in the inputs' dtype, of [B, heads, ...]."""
    if case.group == 1:
        return x
    of_groups: Tensor = x.unflatten(1, (case.kv_heads, case.group))
    return of_groups.sum(dim=2).to(case.q.dtype)
