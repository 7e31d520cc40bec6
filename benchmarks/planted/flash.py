"""Flash attention with forward and backward passes of its own, sound but for one fault.

Each is a plain function of q, k and v, as a kernel's author would hand it over: the same
FlashAttention-2 (Algorithms 1 and 2, in tiles of 64 keys: sums in fp32, P and dS rounded to
the working format, one cast at the end). `sound` has no fault. Written for faults, not for
speed: whole rows of queries at once. A fault is a step of `_Flash`, by its name, and its
line in the table below.

Legend: S scores, P probabilities, m running maximum, l running sum, O output, L
log-sum-exp, a = exp(m_old - m); d of any of them the gradient with respect to it, delta =
rowsum(dO o O).
"""

# ruff: noqa: E741

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format, format_of, round_to
from planted.record import TENSORS, Planted, plant

TILE = 64
FAULTS: list[Planted] = []


def _kernel(fault: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return _flash(q, k, v, is_causal, scale, fault)

    return kernel


def _fault(family: str, name: str, what: str, tensors: str, check: str = "", says: str | None = None,
           **fields: Any) -> None:  # fmt: skip
    """A kernel with the fault that `_flash` knows by this name, with underscores."""
    fields |= {"tensors": tuple(tensors.split()), "check": tuple(check.split())}
    kernel = _kernel(name.replace("-", "_"))
    FAULTS.append(plant(name, family, what, kernel, says=says, calls=PLAIN, **fields))


# --- sound attention, and where its faults are planted --------------------------------


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, fault: str = ""
) -> tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if fault == "scale_off":
        scale *= 1.01
    if fault == "kv_heads_shifted":
        k, v = k.roll(1, dims=1), v.roll(1, dims=1)
    out, lse = _Flash.apply(q, k, v, causal, scale, fault)
    return out, lse


class _Flash(torch.autograd.Function):
    """Attention with one fault, or none (`""`)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, fault: str
    ) -> tuple[Tensor, Tensor]:
        r = functools.partial(_rounded, dtype=q.dtype)
        truncated = functools.partial(_truncated, fmt=format_of(q.dtype))
        Q, K, V = (_wide(x) for x in (q, k, v))
        m = Q.new_full(Q.shape[:3], -math.inf)
        l, O = torch.zeros_like(m), Q.new_zeros(*Q.shape[:3], V.shape[-1])
        for keys in _tiles(K.shape[2], fault):
            S = _scores(Q, K, keys, causal, scale, fault)
            m_old, m = m, torch.maximum(m, S.amax(dim=-1))
            a = (m_old - _finite(m)).exp()
            if fault == "stale_maximum":
                a = torch.where(a > 0, 1.0, a)
            P = (S - _finite(m)[..., None]).exp()
            P_V = truncated(P) if fault == "p_truncated" else r(P)
            if fault == "p_in_4_bits":
                P_V = round_to(P, Format(name="P", precision=4, emin=-14, emax=15))
            l = a * l + P.sum(dim=-1)
            O = a[..., None] * O + P_V @ V[:, :, keys]
            if fault == "row_sum_rounded":
                l = r(l)
            if fault == "accumulator_rounded":
                O = r(O)
        O = O / torch.where(l == 0, 1.0, l)[..., None]
        L = m + l.log()
        if fault == "output_larger":
            O = O * (1 + 1 / 256)
        if fault == "zeros":
            O = torch.zeros_like(O)
        out = O.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, L, m)
        ctx.how = (causal, scale, fault)
        ctx.mark_non_differentiable(L)
        return out, L / math.log(2) if fault == "lse_in_base_2" else L

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, L, m = ctx.saved_tensors
        causal, scale, fault = ctx.how
        r = functools.partial(_rounded, dtype=q.dtype)
        truncated = functools.partial(_truncated, fmt=format_of(q.dtype))
        Q, K, V, O, dO = (_wide(x) for x in (q, k, v, out, grad))
        delta = (dO * O).sum(dim=-1)
        if fault == "delta_rounded":
            delta = r(delta)
        if fault == "delta_missing":
            delta = torch.zeros_like(delta)
        if fault == "delta_of_the_next_row":
            delta = delta.roll(-1, dims=2)
        dQ, dK, dV = (torch.zeros_like(x) for x in (Q, K, V))
        for keys in _tiles(K.shape[2], fault):
            S = _scores(Q, K, keys, causal, scale, fault)
            P = (S - _finite(L)[..., None]).exp()
            P_V = truncated(P) if fault == "p_truncated" else r(P)
            if fault == "dv_unnormalised":
                P_V = r((S - _finite(m)[..., None]).exp())
            dV[:, :, keys] += P_V.transpose(-1, -2) @ dO
            dP = dO @ V[:, :, keys].transpose(-1, -2)
            dS = P * (dP - delta[..., None])
            dS = truncated(dS) if fault == "ds_truncated" else r(dS)
            dQ += (1.0 if fault == "dq_without_scale" else scale) * (dS @ K[:, :, keys])
            dK[:, :, keys] += scale * (dS.transpose(-1, -2) @ Q)
            if fault == "dq_accumulator_rounded":
                dQ = r(dQ)
        return dQ.to(q.dtype), dK.to(k.dtype), dV.to(v.dtype), None, None, None


def _scores(
    Q: Tensor, K: Tensor, keys: slice, causal: bool, scale: float, fault: str
) -> Tensor:
    """S of one tile [B, H, q_len, keys], -inf where hidden."""
    S = (Q @ K[:, :, keys].transpose(-1, -2)) * scale
    if fault == "one_head_wrong":
        S[:, -1] *= 1.03
    if fault == "scores_rounded":
        S = S.to(torch.bfloat16).to(S.dtype)
    if causal:
        i = torch.arange(Q.shape[2], device=Q.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=Q.device)
        S = S.masked_fill(j > i + (1 if fault == "causal_off_by_one" else 0), -math.inf)
    return S


def _tiles(length: int, fault: str) -> Iterator[slice]:
    """The tiles of keys in their order."""
    if fault == "last_tile_dropped" and length > TILE:
        length -= length % TILE
    if fault == "last_keys_dropped" and length > 8:
        length -= 8
    starts = list(range(0, length, TILE))
    if fault == "non_deterministic":
        starts = [starts[i] for i in torch.randperm(len(starts)).tolist()]
    return (slice(start, min(start + TILE, length)) for start in starts)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the working format and back: one rounding, since x is in fp32 or in that
    format."""
    return x.to(dtype).to(x.dtype)


def _truncated(x: Tensor, fmt: Format) -> Tensor:
    return round_to(x, fmt, "toward_zero")


def _finite(m: Tensor) -> Tensor:
    return torch.where(m == -math.inf, 0.0, m)


# --- the kernels ----------------------------------------------------------------------


def _narrow(case: AttentionCase) -> bool:
    """The format is narrower than that of the sums."""
    return case.format.precision < FORMATS["float32"].precision


def _tiled(case: AttentionCase) -> bool:
    return case.kv_len > TILE


def _uneven(case: AttentionCase) -> bool:
    return _tiled(case) and case.kv_len % TILE > 0


def _narrow_tiles(case: AttentionCase) -> bool:
    return _narrow(case) and _tiled(case)


PLAIN = ("full", "causal", "grouped")
ALL = " ".join(TENSORS)
plant("sound", "sound", "FlashAttention-2 in tiles of 64 keys.", _kernel(""), calls=PLAIN)
# fmt: off
_fault("function", "scale-off", "The scale is 1 % too large.", ALL, "full", r"scale is 1\.0(10|09)")
_fault("mask", "causal-off-by-one", "Under a causal mask every row sees one key too many.", ALL,
       "causal", "causal mask is off by one", shows=lambda case: case.is_causal and case.kv_len > 1)
_fault("function", "last-tile-dropped", "The keys after the last multiple of 64 are dropped.", ALL,
       "full", "the last", shows=_uneven)
_fault("function", "last-keys-dropped", "The last 8 keys are dropped.", ALL, "full", "the last 8 keys",
       shows=lambda case: case.kv_len > 8)
_fault("grouping", "kv-heads-shifted", "Every query head reads the keys and values of the head before.",
       ALL, "full", "kv head", shows=lambda case: case.kv_heads > 1)
_fault("rounding", "p-truncated", "P is truncated to the working format, not rounded.", "out dv",
       "full", "P is truncated", shows=_narrow)
_fault("rounding", "p-in-4-bits", "P is rounded to 4 significant bits.", "out dq dk", "full",
       "4 significant bits")
_fault("rounding", "row-sum-rounded", "The row sum is kept in the working format.", ALL, "tied-maxima",
       "row sum is kept in bfloat16 over tiles of 64", shows=_narrow)
_fault("rounding", "accumulator-rounded", "The running output is kept in the working format.", "out",
       "full", "O is summed in bfloat16 over tiles of 64", shows=_narrow)
_fault("rounding", "scores-rounded", "The scores are rounded to bf16.", ALL, "full",
       "S is rounded to bfloat16")
_fault("function", "stale-maximum",
       "What was summed under an old maximum is not rescaled to the new one.", ALL, "full", "maximum",
       shows=_tiled)
_fault("function", "zeros", "The output is 0.", "out dq dk", "full", "0 in whole heads")
_fault("function", "output-larger", "The output is 1/256 too large.", "out", "full", r"output is 1\.00[34]")
_fault("place", "one-head-wrong", "The scores of the last head are 3 % too large.", ALL, "full",
       r"scale is 1\.0[23]")
_fault("lse", "lse-in-base-2", "The log-sum-exp is returned in base 2.", "lse", "full",
       "the logarithm is to base 2")
_fault("rounding", "non-deterministic",
       "Tiles come in an order that is drawn anew in every run: it shows between runs only.",
       "out dq dk dv", "causal", rule="reproducibility", shows=_tiled)
_fault("gradient", "dq-without-scale", "dQ lacks the scale.", "dq", "full", "dq lacks the scale")
_fault("gradient", "delta-missing", "dS is P o dP, without delta.", "dq dk", "full", "dO·O, is left out")
_fault("gradient", "delta-of-the-next-row", "Every row takes the delta of the next.", "dq dk", "full",
       "is the next row's", shows=lambda case: case.q_len > 1)
_fault("gradient", "dv-unnormalised", "dV is of P before it is divided by the row sum.", "dv", "full",
       "dv is computed from P before its division", shows=lambda case: case.kv_len > 1)
_fault("rounding", "ds-truncated", "dS is truncated to the working format, not rounded.", "dq dk",
       "full", "dS is truncated", shows=_narrow)
_fault("rounding", "dq-accumulator-rounded", "The running dQ is kept in the working format.", "dq",
       "default", "dQ is summed in bfloat16 over tiles of 64", shows=_narrow_tiles)
_fault("rounding", "delta-rounded", "delta is kept in the working format.", "dq dk", "default",
       "delta, the row sum of dO·O, is rounded to bfloat16", shows=_narrow)
# fmt: on
