"""Is every sentence of a check true? Faulty kernels, and each sentence recomputed.

    python benchmarks/true_words.py [--only NAME,...] [--keep DIR]

Faulty kernels of `planted` are checked as `numdev check` checks them. Every sentence that its user
reads (the lines of the verdict, the findings, the notes) is taken apart, and each number
and claim in it is computed again from the call's inputs and the kernel, by plain PyTorch
in fp64 that shares nothing with numdev: `computed` is attention and its gradients,
`rounded_step` what FlashAttention-2's roundings make of them, `CAUSES` what each named
cause would return, `coarse` what a coarser step would. The report tells one thing: to
which way of rounding a call was held. Printed are sentences that do not hold or cannot be
computed here, then how many claims of each kind hold. With `--keep` what checks said is
kept in a folder, and read from there the next time."""

# ruff: noqa: E741

from __future__ import annotations

import argparse
import functools
import inspect
import io
import itertools
import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from planted import CATALOGUE, Planted
from planted.function import in_bits
from torch import Tensor

# --- kernels --------------------------------------------------------------------------

KERNELS = {  # of `planted`, by the formats in which they are checked
    ("bfloat16",): "scale-1005 scale-of-one-head causal-plus1 tail-96 sinks-of-next-head "
    "sinks-twice heads-exchanged cap-before-scale mask-of-next-entry output-1002 output-10000 "
    "lse-constant padding-counts rows-from-100-noisy head-1-noisy p-in-e4m3 p-in-6-bits "
    "scores-in-bfloat16 out-truncated not-reproducible dv-102 dq-zero dk-from-64 dv-in-6-bits "
    "dk-10000 backward-causal-plus1 delta-rounded ds-truncated dq-accumulator-rounded two-faults",
    (
        "float16",
    ): "scale-twice entry-1-scaled causal-minus1 key-37 sinks-zero cap-own-tanh "
    "mask-of-head-0 epsilon-1e2 parts-base-2 lse-base-2 nan-row-0 row-5-of-entry-1 p-in-e5m2 "
    "dk-unscaled backward-scale delta-missing backward-tail",
    (
        "bfloat16",
        "float16",
    ): "scale-095 causal-ignored tail-64 kv-modulo window-plus1 rows-64th "
    "accumulator-rounded dv-double",
    ("float32",): "products-in-tf32",
}
FAULTY: dict[str, Planted] = {
    name: replace(CATALOGUE[name], formats=formats)
    for formats, names in KERNELS.items()
    for name in names.split()
}


# --- a call, in fp64 and by itself ----------------------------------------------------

TENSORS = ("out", "dq", "dk", "dv")
NAMES = {
    "the output": "out",
    "the log-sum-exp": "lse",
    **{n: n for n in ("dq", "dk", "dv")},
}
Step = dict[str, Tensor]
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True, eq=False)
class Call:
    """The inputs of one call, as tensors in the format; nothing here is numdev's."""

    name: str
    format: str
    q: Tensor
    k: Tensor
    v: Tensor
    dO: Tensor
    scale: float
    mask: Tensor | None
    causal: bool
    offset: int
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.format)
        return dtype

    @functools.cached_property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @functools.cached_property
    def shown(self) -> Tensor:
        """bool [B or 1, H or 1, rows, keys]: who sees whom."""
        return seen(self, self.q.shape[2], self.k.shape[2], self.mask)

    @functools.cached_property
    def upstream(self) -> Tensor:
        """dO, 0 in rows that see no key."""
        return self.dO.masked_fill(~self.shown.any(-1, keepdim=True), 0.0)

    @functools.cached_property
    def right(self) -> Step:
        return computed(self)

    @functools.cached_property
    def terms(self) -> Step:
        """What is summed up before anything cancels."""
        q, k, v, dO = (x.double() for x in (self.q, self.k, self.v, self.upstream))
        K, V = (x.repeat_interleave(self.group, 1) for x in (k, v))
        P, out = probabilities(self, q, K), self.right["out"]
        D = P * ((dO @ V.mT).abs() + (dO * out).sum(-1, keepdim=True).abs())
        if self.softcap:
            raw = q @ K.mT * self.scale
            D = D * (1 - (raw / self.softcap).tanh() ** 2)
        by_head = (abs(self.scale) * D.mT @ q.abs(), P.mT @ dO.abs())
        dk, dv = (x.unflatten(1, (k.shape[1], self.group)).sum(2) for x in by_head)
        return {
            "out": P @ V.abs(),
            "dq": abs(self.scale) * D @ K.abs(),
            "dk": dk,
            "dv": dv,
        }

    @functools.cached_property
    def arithmetic(self) -> Step:
        """What fp32 arithmetic may err, relative to the terms of a row."""
        u = 2.0**-24 * math.sqrt(self.q.shape[-1]) / 3 * abs(self.scale)
        q, k = (x.double().norm(dim=-1) for x in (self.q, self.k))
        queries = u * q * k.amax(-1, keepdim=True).repeat_interleave(self.group, 1)
        most = q.unflatten(1, (k.shape[1], self.group)).amax((2, 3))
        keys = u * k * most[..., None]
        return {"out": queries, "dq": queries, "dk": keys, "dv": keys}


def seen(call: Call, n: int, m: int, mask: Tensor | None) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(m)[None]
    shown = torch.ones(1, 1, n, m, dtype=torch.bool)
    if call.causal:
        shown = shown & (j <= i + call.offset)
    if call.window is not None:
        left, right = call.window
        shown = shown & (True if left is None else j >= i + call.offset - left)
        shown = shown & (True if right is None else j <= i + call.offset + right)
    if mask is not None:
        shown = shown & (
            mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        )
    return shown


def probabilities(call: Call, q: Tensor, K: Tensor) -> Tensor:
    S = all_scores(call, q, K)
    if call.sinks is not None:
        sink = call.sinks.to(S.dtype)[None, :, None, None].expand(*S.shape[:3], 1)
        S = torch.cat([S, sink], -1)
    P = S.softmax(-1)[..., : K.shape[2]]
    return torch.where(call.shown.expand(P.shape), P, 0.0)


def all_scores(call: Call, q: Tensor, K: Tensor) -> Tensor:
    S = q @ K.mT * call.scale
    if call.softcap:
        S = call.softcap * (S / call.softcap).tanh()
    if call.mask is not None and call.mask.dtype != torch.bool:
        S = S + torch.where(call.shown, call.mask.to(S.dtype), 0.0)
    return S.masked_fill(~call.shown, -math.inf)


def computed(
    call: Call,
    *,
    scale: float = 1.0,
    q_factor: Tensor | None = None,
    hidden: Callable[[Tensor, Tensor, int], Tensor] | None = None,
    kv: Callable[[int, int, int], int] | None = None,
    zeros: int = 0,
    cap: Callable[[Tensor, float, float], Tensor] | None = None,
    rescored: Callable[[Tensor], Tensor] | None = None,
    more: float = 0.0,
    out: Callable[[Tensor], Tensor] | None = None,
    no_sum: bool = False,
) -> Step:
    """What comes out in fp64: `scale` times the call's, queries times a factor, keys
    hidden, kv heads chosen, so many zeros after the keys, another soft cap, other scores,
    `more` in the row sum, the output changed."""
    leaves = [x.double().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = leaves
    H, group = q.shape[1], call.group
    index = [h // group if kv is None else kv(h, group, k.shape[1]) for h in range(H)]
    K, V = k[:, index], v[:, index]
    q = q if q_factor is None else q * q_factor
    shown = call.shown
    if zeros:
        K, V = (torch.nn.functional.pad(x, (0, 0, 0, zeros)) for x in (K, V))
        wide = torch.ones(*shown.shape[:3], zeros, dtype=torch.bool)
        # Else the mask says it
        if (call.causal or call.window is not None) and not call.offset:
            wide = seen(replace(call, mask=None), q.shape[2], K.shape[2], None)[
                ..., -zeros:
            ]
            wide = wide.expand(*shown.shape[:3], zeros)
        shown = torch.cat([shown, wide], -1)
    S = q @ K.mT * (call.scale * scale)
    if call.softcap:
        S = (cap or (lambda S, c, s: c * (S / c).tanh()))(S, call.softcap, call.scale)
    if call.mask is not None and call.mask.dtype != torch.bool:
        bias = torch.where(call.shown, call.mask.double(), 0.0)
        S = S + torch.nn.functional.pad(bias, (0, zeros))
    if hidden is not None:
        i, j = torch.arange(S.shape[2])[:, None], torch.arange(S.shape[3])[None]
        shown = shown & ~hidden(i, j, S.shape[3])
    S = S.masked_fill(~shown, -math.inf)
    if rescored is not None:
        S = rescored(S)
    empty = ~shown.any(-1, keepdim=True)
    top = S.amax(-1, keepdim=True).detach().masked_fill(empty, 0.0)
    e = (S - top).exp()
    exact_part = e.sum(-1, keepdim=True)
    total = exact_part + more
    if call.sinks is not None:
        total = total + (call.sinks.double()[None, :, None, None] - top).exp()
    O = e @ V if no_sum else e @ V / torch.where(total == 0, 1.0, total)
    O = O if out is None else out(O)
    step: Step = {"out": O.detach(), "lse": (top + total.log())[..., 0].detach()}
    dO = call.upstream.double()
    grads = torch.autograd.grad(
        (O * dO).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    return step | dict(zip(TENSORS[1:], grads, strict=True))


def cast(x: Tensor, fmt: str) -> Tensor:
    """From fp64, rounded once: by way of fp32 rounded to odd."""
    if fmt == "float32":
        return x.float().double()
    near = x.float()
    error = x - near.double()
    toward = torch.where(
        error * near.sign() < 0, near.view(torch.int32) - 1, near.view(torch.int32)
    )
    odd = torch.where((error != 0) & near.isfinite(), toward | 1, near.view(torch.int32))
    return odd.view(torch.float32).to(getattr(torch, fmt)).double()


def rounded_step(call: Call, *, together: bool = True) -> Step:
    """What FlashAttention-2's roundings give: P rounded beside the running maximum of its
    tile, the output once; backward P and dS rounded, delta of the rounded output; a
    group's dk and dv summed before they are rounded."""
    dtype, group = call.dtype, call.group
    r = lambda x: x.to(dtype).float()  # noqa: E731
    q, dO = call.q.float(), call.upstream.float()
    K, V = (x.float().repeat_interleave(group, 1) for x in (call.k, call.v))
    S = all_scores(call, call.q.double(), K.double())
    tile = 128 if call.q.shape[-1] <= 64 else 64
    m = S.new_full((*S.shape[:3], 1), -math.inf)
    l, O = torch.zeros_like(m), S.new_zeros(*S.shape[:3], V.shape[-1])
    for part, values in zip(S.split(tile, -1), V.split(tile, 2), strict=True):
        before, m = m, torch.maximum(m, part.amax(-1, keepdim=True))
        base = m.clamp(min=-1e300)
        a, P = (before - base).exp(), (part - base).exp()
        l, O = (
            a * l + P.sum(-1, keepdim=True),
            a * O + cast(P, call.format) @ values.double(),
        )
    if call.sinks is not None:
        l = l + (call.sinks.double()[None, :, None, None] - m.clamp(min=-1e300)).exp()
    O = cast(O / torch.where(l == 0, 1.0, l), call.format)
    lse = call.right["lse"].float()[..., None]
    S = S.float()
    P = torch.where(S.isfinite(), (S - lse).exp(), 0.0)
    delta = (dO * O.float()).sum(-1, keepdim=True)
    dS = P * (dO @ V.mT - delta)
    if call.softcap:
        dS = dS * (1 - (q @ K.mT * call.scale / call.softcap).tanh() ** 2)
    dS = r(dS)
    dq, dk, dv = call.scale * (dS @ K), call.scale * (dS.mT @ q), r(P).mT @ dO
    dk, dv = (x if together else r(x) for x in (dk, dv))
    dk, dv = (x.unflatten(1, (call.k.shape[1], group)).sum(2) for x in (dk, dv))
    return {"out": O} | {
        n: r(x).double() for n, x in {"dq": dq, "dk": dk, "dv": dv}.items()
    }


SUMMED = ", dk and dv summed in fp32"


def plain_step(call: Call, words: str) -> Step | None:
    """What code as people write it gives, with autograd's gradients; None for words that
    are of no such code."""
    dtype = call.dtype
    leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = leaves
    together = words.endswith(SUMMED)  # a group's dk and dv, before they are rounded
    words = words.removesuffix(SUMMED)
    K, V = (x.float() if together else x for x in (k, v))
    K, V = (x.repeat_interleave(call.group, 1) for x in (K, V))
    online = re.fullmatch(
        r"as autograd rounds exp\(S - m\), cast before P V(?: in tiles of (\d+) keys)?, "
        r"(the maximum detached|the maximum's gradient included|the gradient of the "
        r"first .*)",
        words,
    )
    if online:
        S = all_scores(call, q.float(), K.float()).clamp(min=-1e30)
        tile = int(online[1] or S.shape[-1])
        m = S.new_full((*S.shape[:3], 1), -1e30)
        l, O = torch.zeros_like(m), S.new_zeros(*S.shape[:3], V.shape[-1])
        for part, values in zip(S.split(tile, -1), V.split(tile, 2), strict=True):
            if "first" in online[2]:
                top = part.max(-1, keepdim=True).values
            else:
                top = (part.detach() if "detached" in online[2] else part).amax(
                    -1, keepdim=True
                )
            before, m = m, torch.maximum(m, top)
            a, P = (before - m).exp(), (part - m).exp()
            l = a * l + P.sum(-1, keepdim=True)
            O = a * O + P.to(dtype).float() @ values.float()
        if call.sinks is not None:
            l = l + (call.sinks.float()[:, None, None] - m).exp()
        out = (O / l).to(dtype)
    else:
        wide = {
            "as autograd rounds all in fp32": (True, True, True),
            "as autograd rounds a softmax in fp32, cast before P V": (True, True, False),
            "as autograd rounds a softmax in the working format": (False, False, False),
            "as autograd rounds S in the working format and the rest in fp32": (
                False,
                True,
                True,
            ),
        }.get(words)
        if wide is None:
            return None
        S = all_scores(call, *((q.float(), K.float()) if wide[0] else (q, K)))
        S = S.clamp(min=torch.finfo(S.dtype).min)
        if call.sinks is not None:
            sink = call.sinks.to(S.dtype)[None, :, None, None].expand(*S.shape[:3], 1)
            S = torch.cat([S, sink], -1)
        P = (S.float() if wide[1] else S).softmax(-1)[..., : K.shape[2]]
        out = ((P @ V.float()) if wide[2] else (P.to(dtype) @ V)).to(dtype)
    out = out.masked_fill(~call.shown.any(-1, keepdim=True), 0.0)
    grads = torch.autograd.grad((out * call.upstream).sum(), leaves)
    step = {"out": out.detach(), **dict(zip(TENSORS[1:], grads, strict=True))}
    return {n: x.double() for n, x in step.items()}


def eager_error(call: Call) -> Tensor:
    """The error of plain code's output, each product in the format and the softmax in
    float32."""
    K, V = (x.repeat_interleave(call.group, 1) for x in (call.k, call.v))
    S = all_scores(call, call.q, K)
    if call.sinks is not None:
        sink = call.sinks.to(S.dtype)[None, :, None, None].expand(*S.shape[:3], 1)
        S = torch.cat([S, sink], -1)
    P = S.float().softmax(-1).to(call.dtype)[..., : K.shape[2]]
    out = (P.masked_fill(~call.shown, 0.0) @ V).double()
    return out - call.right["out"]


# --- what a kernel returned, and how far it is off ------------------------------------


@dataclass(frozen=True, eq=False)
class Ran:
    """A kernel's step of a call, and its errors."""

    call: Call
    kernel: Callable[..., Any]

    @functools.cached_property
    def step(self) -> Step:
        return run(self.call, self.kernel)

    @functools.cached_property
    def wide(self) -> Step:
        """Of the same inputs in float32."""
        c = self.call
        named = ("q", "k", "v", "dO", "mask", "sinks")
        floats = {n: x.float() for n in named
                  if (x := getattr(c, n)) is not None and x.dtype != torch.bool}  # fmt: skip
        return run(replace(c, format="float32", **floats), self.kernel)

    @functools.cached_property
    def predicted(self) -> Step:
        """Without a parameter for it k and v are repeated outside the function, and what
        each query head gives is rounded before it is summed."""
        return rounded_step(self.call, together=takes(self.kernel, "enable_gqa"))

    def usable(self, tensor: str) -> Tensor:
        x, right = self.step[tensor], self.call.right[tensor]
        fine = x.isfinite() & right.isfinite()
        if tensor in ("out", "dq"):
            fine = fine & self.call.shown.any(-1, keepdim=True)
        return fine

    def error(self, tensor: str, than: Tensor | None = None) -> Tensor:
        """Of each element, against the right result or another; 0 where none counts."""
        other = self.call.right[tensor] if than is None else than
        fine = self.usable(tensor)
        return torch.where(fine & other.isfinite(), self.step[tensor] - other, 0.0)

    def sums(self, tensor: str, expected: Step | None = None) -> dict[str, Tensor]:
        """By row [B, H, rows]: the error, its prediction, the least it may be, terms, the
        floor."""
        call, fine = self.call, self.usable(tensor)
        right, u = call.right[tensor], UNIT[call.format]
        keep = lambda x: torch.where(fine, x, 0.0)  # noqa: E731
        terms = keep(call.terms[tensor]).norm(dim=-1)
        step = self.predicted if expected is None else expected
        predicted = keep(step[tensor] - right).nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
        floor = (
            keep(cast(right, call.format) - right).nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
        )
        return {
            "error": self.error(tensor).norm(dim=-1),
            "predicted": torch.hypot(predicted, terms * call.arithmetic[tensor]),
            "least": keep(right).norm(dim=-1) * u / math.sqrt(12),
            "terms": torch.where(terms >= SMALLEST_SCALE, terms, math.inf),
            "floor": floor,
        }

    def ratios(self, tensor: str, metric: str, expected: Step | None = None) -> Tensor:
        """[H] of a metric; of worst_row [B, H, rows]."""
        x = self.sums(tensor, expected)
        over = lambda name: (x[name] / x["terms"]).square()  # noqa: E731
        if metric == "error_rows":  # how many rows share a head's error
            squares = over("error")
            return squares.sum((0, 2)).square() / squares.square().sum((0, 2))
        if metric == "expected_ratio":
            least = torch.maximum(
                over("predicted").sum((0, 2)), over("least").sum((0, 2))
            )
            return (over("error").sum((0, 2)) / least).sqrt()
        total = {n: y.square().sum((0, 2)) for n, y in x.items()}
        allowed = UNIT[self.call.format] * SMALLEST_SCALE
        if metric == "floor_ratio":
            return (total["error"] / torch.maximum(total["floor"], total["least"])).sqrt()
        if metric == "baseline_ratio":
            plain = torch.where(self.usable(tensor), eager_error(self.call), 0.0)
            return (total["error"] / plain.square().sum((0, 2, 3))).sqrt()
        if metric == "rms_ratio":
            least = x["least"].clamp_min(allowed).square().sum((0, 2))
            return (total["error"] / torch.maximum(total["predicted"], least)).sqrt()
        judged = x["terms"].isfinite().sum((0, 2))
        typical = [(over(n).sum((0, 2)) / judged).sqrt() for n in ("predicted", "least")]
        unit = torch.maximum(*typical)[None, :, None] * x["terms"].masked_fill(
            x["terms"].isinf(), 0.0
        )
        rows = torch.stack([x["predicted"], unit, x["least"]]).amax(0).clamp_min(allowed)
        return torch.where(x["error"] > 0, x["error"] / rows, 0.0)


def takes(kernel: Callable[..., Any], *names: str) -> bool:
    return {*names} <= {*inspect.signature(kernel).parameters}


def run(call: Call, kernel: Callable[..., Any]) -> Step:
    """The kernel's output and its gradients, both as fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v)]
    q, k, v = leaves
    asked: dict[str, Any] = {"scale": call.scale, "is_causal": call.causal}
    if takes(kernel, "enable_gqa"):
        asked["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(call.group, 1) for x in (k, v))
    if call.offset or (call.window is not None and not takes(kernel, "window_size")):
        asked["is_causal"] = False  # which cannot say it: all is in the mask
        asked["attn_mask"] = call.shown
        if call.mask is not None and call.mask.dtype != torch.bool:
            asked["attn_mask"] = call.mask.masked_fill(~call.shown, -math.inf)
    else:
        asked |= {} if call.mask is None else {"attn_mask": call.mask}
        if call.window is not None:
            asked["window_size"] = tuple(-1 if x is None else x for x in call.window)
    asked |= {"softcap": call.softcap} if call.softcap else {}
    asked |= {"sinks": call.sinks} if call.sinks is not None else {}
    out = kernel(q, k, v, **asked)
    out, lse = out if isinstance(out, tuple) else (out, None)
    step = {"out": out}
    if out.requires_grad:
        grads = torch.autograd.grad((out * call.upstream).sum(), leaves)
        step |= dict(zip(TENSORS[1:], grads, strict=True))
    step |= {} if lse is None else {"lse": lse}
    return {n: x.detach().double() for n, x in step.items()}


@functools.cache
def calls(fmt: str) -> dict[str, Call]:
    """The default cases of `numdev check`: their tensors are all that comes from
    numdev."""
    from numdev.formats import FORMATS
    from numdev.studies.audit.kernel_check import CheckSource

    by_name = {}
    for located in CheckSource(None, (0,), "cpu", gradients=True):
        case = located.load().rounded_to(FORMATS[fmt])
        by_name[located.ref.case] = Call(
            name=located.ref.case,
            format=fmt,
            q=case.q,
            k=case.k,
            v=case.v,
            dO=case.grad_out,
            scale=case.scale,
            mask=case.mask,
            causal=case.is_causal,
            offset=case.causal_offset,
            window=case.window,
            softcap=case.softcap,
            sinks=case.sinks,
        )
    return by_name


# --- causes, and what each would return -----------------------------------------------

LN2 = math.log(2)


def _hide(what: Callable[[Tensor, Tensor, int], Tensor]) -> dict[str, Any]:
    return {"hidden": what}


def _by_entry(call: Call, change: Callable[[Call], Step], entry: int) -> Step:
    """The change in one batch entry alone."""
    changed, step = change(call), {n: x.clone() for n, x in call.right.items()}
    for n in step:
        if entry < len(step[n]):
            step[n][entry] = changed[n][entry]
    return step


def _masked(call: Call, mask: Tensor | None) -> Step:
    return computed(replace(call, mask=mask))


def _heads(call: Call, order: Sequence[int]) -> Step:
    return computed(call, out=lambda O: O[:, list(order)])


def _parts(width: int, less: float) -> Callable[[Tensor], Tensor]:
    def rescored(S: Tensor) -> Tensor:
        parts = [
            x.logsumexp(-1, keepdim=True).expand(x.shape) for x in S.split(width, -1)
        ]
        return torch.where(S.isfinite(), S - less * torch.cat(parts, -1), -math.inf)

    return rescored


def _shift_causal(call: Call, by: int) -> Step:
    window = call.window and (
        None if call.window[0] is None else call.window[0] + by,
        None,
    )
    return computed(replace(call, offset=call.offset + by, window=window))


def _no_delta(call: Call) -> Step:
    q, k, v, dO = (x.double() for x in (call.q, call.k, call.v, call.upstream))
    K, V = (x.repeat_interleave(call.group, 1) for x in (k, v))
    dS = probabilities(call, q, K) * (dO @ V.mT)
    dk = call.scale * dS.mT @ q
    dk = dk.unflatten(1, (k.shape[1], call.group)).sum(2)
    return {**call.right, "dq": call.scale * dS @ K, "dk": dk}


def _times(call: Call, tensor: str, factor: float) -> Step:
    return {**call.right, tensor: factor * call.right[tensor]}


def _zero_rows(call: Call, words: str) -> Step:
    return computed(
        call, out=lambda O: O.masked_fill(places(words, O.shape[2])[:, None], 0.0)
    )


def _lse(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Step]:
    def step(call: Call, *_: str) -> Step:
        K = call.k.double().repeat_interleave(call.group, 1)
        top = all_scores(call, call.q.double(), K).amax(-1)
        lse = call.right["lse"]
        return {**call.right, "lse": torch.where(lse.isfinite(), change(lse, top), lse)}

    return step


def _window(call: Call, left: int, right: int) -> Step:
    if call.window is None:
        return call.right
    sides = [
        None if x is None else x + y
        for x, y in zip(call.window, (left, right), strict=True)
    ]
    return computed(replace(call, window=(sides[0], sides[1])))


NEXT = {"next": -1, "previous": 1}
TAIL = _hide
CAUSES: dict[str, Callable[..., Step]] = {
    r"the scale is ([\d.e+-]+) times the requested one": lambda c, x: computed(
        c, scale=float(x)
    ),
    r"the scale is applied twice": lambda c: computed(c, scale=c.scale),
    r"the scale is 1/head_dim": lambda c: computed(c, scale=1 / c.q.shape[-1] / c.scale),
    r"the scores are not scaled": lambda c: computed(c, scale=1 / c.scale),
    r"the output is ([\d.e+-]+) times the exact one": lambda c, x: computed(
        c, out=lambda O: O * float(x)
    ),
    r"the row sum is ([\d.e+-]+) too large": lambda c, x: computed(c, more=float(x)),
    r"the causal mask is ignored": lambda c: computed(replace(c, causal=False)),
    r"the causal mask is off by one: each query sees one key too (many|few)": lambda c, x: (
        _shift_causal(c, {"many": 1, "few": -1}[x])
    ),
    r"the mask and the causal mask are both ignored": lambda c: computed(
        replace(c, causal=False, mask=None)
    ),
    r"the mask is ignored": lambda c: _masked(c, None),
    r"keys beyond the last full tile of (\d+) are dropped": lambda c, x: computed(
        c, hidden=lambda i, j, m: (j >= m - m % int(x)) & (m > int(x))
    ),
    r"the last (?:(\d+) keys are|key is) dropped": lambda c, x: computed(
        c, hidden=lambda i, j, m: j >= m - int(x or 1)
    ),
    r"key (\d+) is dropped": lambda c, x: computed(c, hidden=lambda i, j, m: j == int(x)),
    r"the keys are padded with zeros to (\d+), and the padding takes part": lambda c, x: (
        computed(c, zeros=max(0, int(x) - c.k.shape[2]))
    ),
    r"the keys are padded with zeros to a multiple of (\d+), which take part": lambda c, x: (
        computed(c, zeros=-c.k.shape[2] % int(x))
    ),
    r"(\d+) keys padded with zeros are counted": lambda c, x: computed(
        replace(
            c, sinks=torch.full((c.q.shape[1],), math.log(int(x)), dtype=torch.float64)
        )
    ),
    r"query head h reads kv head h % kv_heads instead of h // group": lambda c: computed(
        c, kv=lambda h, group, kv: h % kv
    ),
    r"kv heads are read in reverse order": lambda c: computed(
        c, kv=lambda h, group, kv: kv - 1 - h // group
    ),
    r"query heads read the (next|previous) kv head": lambda c, x: computed(
        c, kv=lambda h, group, kv: (h // group - NEXT[x]) % kv
    ),
    r"the outputs of heads 2i and 2i \+ 1 are exchanged": lambda c: _heads(
        c, [min(h ^ 1, c.q.shape[1] - 1) for h in range(c.q.shape[1])]
    ),
    r"query heads return the output of the (next|previous) one": lambda c, x: _heads(
        c, [(h - NEXT[x]) % c.q.shape[1] for h in range(c.q.shape[1])]
    ),
    r"the outputs of the heads come in reverse order": lambda c: _heads(
        c, range(c.q.shape[1])[::-1]
    ),
    r"batch entries get the mask of the (next|previous) one": lambda c, x: _masked(
        c, None if c.mask is None else c.mask.roll(NEXT[x], 0)
    ),
    r"every batch entry gets entry 0's mask": lambda c: _masked(
        c, None if c.mask is None else c.mask[:1]
    ),
    r"every head gets head 0's mask": lambda c: _masked(
        c, None if c.mask is None else c.mask[:, :1]
    ),
    r"query heads get the sink of the (next|previous) one": lambda c, x: computed(
        replace(c, sinks=None if c.sinks is None else c.sinks.roll(NEXT[x]))
    ),
    r"the attention sinks are counted twice": lambda c: computed(
        replace(c, sinks=None if c.sinks is None else c.sinks.double() + LN2)
    ),
    r"the attention sinks are ignored": lambda c: computed(replace(c, sinks=None)),
    r"it has a sink of (-?[\d.]+), (?:not its own|which was not .*)": lambda c, x: (
        computed(
            replace(c, sinks=torch.full((c.q.shape[1],), float(x), dtype=torch.float64))
        )
    ),
    r"the window is one key too (wide|narrow) on the left": lambda c, x: _window(
        c, {"wide": 1, "narrow": -1}[x], 0
    ),
    r"the soft cap is applied before the scale": lambda c: computed(
        c, cap=lambda S, cap, s: s * cap * (S / s / cap).tanh()
    ),
    r"the soft cap multiplies a score by its tanh": lambda c: computed(
        c, cap=lambda S, cap, s: S * S.tanh()
    ),
    r"parts of (\d+) keys are merged with powers of 2 in place of e": lambda c, x: (
        computed(c, rescored=_parts(int(x), 1 - LN2))
    ),
    r"(\d+) parts of the keys are merged with powers of 2 in place of e": lambda c, x: (
        computed(c, rescored=_parts(-(-c.k.shape[2] // int(x)), 1 - LN2))
    ),
    r"the output is 0 (?:in )?(.*)": _zero_rows,
    r"(d[qkv]) lacks the scale": lambda c, t: _times(c, t, 1 / c.scale),
    r"(d[qkv]) has the scale twice": lambda c, t: _times(c, t, c.scale),
    r"(d[qkv]) is 0": lambda c, t: _times(c, t, 0.0),
    r"(d[qkv]) is ([\d.e+-]+) times what it should be": lambda c, t, x: _times(
        c, t, float(x)
    ),
    r"delta, the row sum of dO·O, is left out": _no_delta,
    r"([+-][\d.e+-]+) is added": lambda c, x: _lse(lambda L, top: L + float(x))(c),
    r"the logarithm is to base 2": _lse(lambda L, top: L / LN2),
}


def places(words: str, length: int) -> Tensor:
    """bool [length]: the rows or keys that these words name."""
    at, noun = torch.zeros(length, dtype=torch.bool), "(?:row|key)"
    if words.startswith("in whole heads"):
        at[:] = True
    elif every := re.match(rf"(?:in )?every (\d+)\w\w {noun} from (\d+)", words):
        at[int(every[2]) :: int(every[1])] = True
    elif from_ := re.match(rf"(?:in )?all {noun}s from (\d+) on", words):
        at[int(from_[1]) :] = True
    elif run_ := re.match(rf"(?:in )?{noun}s (\d+) to (\d+)", words):
        at[int(run_[1]) : int(run_[2]) + 1] = True
    elif one := re.match(rf"(?:in )?{noun} (\d+)", words):
        at[int(one[1]) : int(one[1]) + 1] = True
    elif few := re.match(rf"(?:in )?2 {noun}s, the first (\d+), the last (\d+)", words):
        for row in few.groups():
            at[int(row) : int(row) + 1] = True
    else:
        raise LookupError(words)
    return at


def under(cause: str, call: Call) -> Step:
    """What would come out if the cause were so; LookupError for one that is not known
    here."""
    cause = cause.removeprefix("in the backward pass, ").removeprefix(
        "in the log-sum-exp, "
    )
    cause = re.sub(r" \(tried on its first \d+ keys\)$", "", cause)
    alone = re.search(r" \(in batch entry (\d+) alone\)$", cause)
    cause = cause[: alone.start()] if alone else cause
    for pattern, step in CAUSES.items():
        if match := re.fullmatch(pattern, cause):
            variant = functools.partial(
                lambda c, step, parts: step(c, *parts), step=step, parts=match.groups()
            )
            return _by_entry(call, variant, int(alone[1])) if alone else variant(call)
    raise LookupError(cause)


def plain_causes() -> Iterator[str]:
    """Every cause in whose words no number stands that depends on the kernel."""
    for pattern in CAUSES:
        words = pattern.replace("\\+", "+").replace("d[qkv]", "dq|dk|dv")
        one = re.fullmatch(r"([^()]*)\(([\w|]+)\)([^()]*)", words)
        if one is not None:
            yield from (f"{one[1]}{x}{one[3]}" for x in one[2].split("|"))
        elif "(" not in words:
            yield words


# --- steps that are too coarse --------------------------------------------------------


def rounder(fmt: str) -> Callable[[Tensor], Tensor]:
    dtype = getattr(torch, fmt)
    return lambda x: x.float().to(dtype).to(x.dtype)


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Toward zero, in bfloat16 or float16."""
    near = x.to(dtype)
    beyond = near.float().abs() > x.abs()
    step = near.view(torch.int16) - beyond.to(torch.int16)
    return step.view(dtype).float()


# Of keys, in which a kernel may go through a call: that alone changes how it rounds
TILES = (1 << 30, 64, 128, 32)


def coarse(words: str, call: Call, tile: int) -> Step:
    """FlashAttention-2's roundings in tiles of so many keys with one step coarser, in
    fp32. LookupError for other words."""
    rounded, dtype = rounder(call.format), call.dtype
    q, dO = call.q.float(), call.upstream.float()
    K, V = (x.float().repeat_interleave(call.group, 1) for x in (call.k, call.v))
    p, scores, out, product = rounded, lambda x: x, rounded, lambda x: x
    ds = pv = rounded
    delta, dq_tile = lambda x: x, None
    if by := re.fullmatch(r"P is rounded to (float\w+|bfloat16) before P V", words):
        p = rounder(by[1])
    elif by := re.fullmatch(r"P is rounded to (\d+) significant bits before P V", words):
        p = in_bits(int(by[1]))
    elif by := re.fullmatch(r"P is truncated to \w+, not rounded", words):
        p = lambda x: truncated(x, dtype)  # noqa: E731
    elif by := re.fullmatch(r"O is summed in (\w+) over tiles of (\d+) keys", words):
        product, tile = rounder(by[1]), int(by[2])
    elif by := re.fullmatch(r"S is rounded to (\w+)", words):
        scores = rounder(by[1])
    elif words == "the output is truncated, not rounded":
        out = lambda x: truncated(x, dtype)  # noqa: E731
    elif words == "the products are computed in TF32":
        q, K, V, p, out = (
            in_bits(11)(q),
            in_bits(11)(K),
            in_bits(11)(V),
            in_bits(11),
            lambda x: x,
        )
    elif by := re.fullmatch(r"dS is truncated to \w+, not rounded", words):
        ds = lambda x: truncated(x, dtype)  # noqa: E731
    elif by := re.fullmatch(r"delta, the row sum of dO·O, is rounded to (\w+)", words):
        delta = rounder(by[1])
    elif by := re.fullmatch(r"dQ is summed in (\w+) over tiles of (\d+) keys", words):
        dq_tile = (rounder(by[1]), int(by[2]))
    else:
        raise LookupError(words)
    S = scores(all_scores(call, q.double(), K.double()).float())
    m = S.amax(-1, keepdim=True).clamp(min=-1e30)
    l = (S - m).exp().sum(-1, keepdim=True)
    if call.sinks is not None:
        l = l + (call.sinks.float()[None, :, None, None] - m).exp()
    O = torch.zeros(*S.shape[:3], V.shape[-1])
    top = S.new_full(m.shape, -math.inf)
    for part, values in zip(S.split(tile, -1), V.split(tile, 2), strict=True):
        before, top = top, torch.maximum(top, part.amax(-1, keepdim=True))
        base = top.clamp(min=-1e30)
        O = product((before - base).exp() * O + p((part - base).exp()) @ values)
    O = out(O / torch.where(l == 0, 1.0, l))
    P = torch.where(S.isfinite(), (S - call.right["lse"].float()[..., None]).exp(), 0.0)
    dS = ds(P * (dO @ V.mT - delta((dO * rounded(O)).sum(-1, keepdim=True))))
    if dq_tile is None:
        dq = call.scale * (dS @ K)
    else:
        dq = torch.zeros_like(q)
        for weights, keys in zip(
            dS.split(dq_tile[1], -1), K.split(dq_tile[1], 2), strict=True
        ):
            dq = dq_tile[0](dq + call.scale * (weights @ keys))
    dk, dv = call.scale * (dS.mT @ q), pv(P).mT @ dO
    dk, dv = (x.unflatten(1, (call.k.shape[1], call.group)).sum(2) for x in (dk, dv))
    step = {"out": O, "dq": rounded(dq), "dk": rounded(dk), "dv": rounded(dv)}
    return {n: x.double() for n, x in step.items()}


# --- claims ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One thing that a sentence says: what of, what was said, what comes out here."""

    kind: str
    stated: str
    computed: str
    holds: bool | None  # None: it cannot be computed here


Head = tuple[str, str, str, int]  # format, case, tensor, head


def near(a: float, b: float, by: float = 0.03) -> bool:
    return abs(a - b) <= by * max(abs(a), abs(b)) or (not math.isfinite(a) and a == b)


PLACE = r"It errs in ([^:(]+?)(?: of the worst head)?(?: \((\d+) of (\d+) heads\))?\."
# Of a line, then of the details: in how many heads, and which is worst
WHERE = re.compile(
    r"(?:(?: in (\d+) of (\d+) heads: .*)?\bWorst at"
    r"|In (\d+) of (\d+) heads(?:, beside (\d+) of other findings)?, worst at)"
    r" (\S+) head (\d+)\."
)
# Where a sentence of the details begins
BEGINS = (
    r"(?<=\.) (?=It errs |In \d+ of |Worst at |Expected: |Correcting |Or: |Cause: |Cause unknown"
    r"|The same heads |For that cause |Its gradients |Of the error that |They should "
    r"|Bias of |Reason: )"
)
UNKNOWN = {
    "none of the mistakes that numdev knows explains the error": True,
    "its cause was not searched in this call, but in others": False,
}
FORMATS = r"(?:bfloat16|float16|float32)"
ERROR = re.compile(
    r"((?:[\d.e]+× \w+(?:, )?)+)(?:; worst ([\d.e]+)× floor, (\S+) head (\d+))?"
    rf"(?: \(({FORMATS})\))?(?:; |$)"
)
LSE_LIMIT = 1e-4


class Checked:
    """A kernel, all its calls, and the rows of its report, of which only which call was
    held to which way of rounding is taken."""

    def __init__(self, one: Planted, report: Mapping[str, Any]) -> None:
        self.one, self.rows = one, report["rows"]
        self.causes = sum(f["metric"] == "suspicion" for f in report["findings"])
        self.ran: dict[tuple[str, str], Ran] = {}
        self.failed: dict[tuple[str, str], str] = {}
        for fmt in one.formats:
            for name, call in calls(fmt).items():
                if self.lacking(call):
                    continue
                ran = Ran(call, one.function)
                try:
                    ran.step  # noqa: B018
                    self.ran[fmt, name] = ran
                except Exception as error:
                    self.failed[fmt, name] = f"{type(error).__name__}: {error}"
        self.ways = {
            (r["format"], r["case"], r["tensor"]): r["claim"]
            for r in self.rows
            if r["role"] == "kernel" and r["claim"]
        }
        self._steps: dict[tuple[str, str, str], Step] = {}
        self._coarse: dict[tuple[str, str, str], list[Step]] = {}

    def lacking(self, call: Call) -> str | None:
        """Why the kernel is not given the call."""
        by_mask = not takes(self.one.function, "attn_mask")
        if by_mask and call.window is not None:
            return "the function takes no window"
        if by_mask and (call.mask is not None or call.offset):
            return "the function takes no mask"
        if call.softcap and not takes(self.one.function, "softcap"):
            return "the function takes no softcap"
        if call.sinks is not None and not takes(self.one.function, "sinks"):
            return "the function takes no sinks"
        if bool(call.v.isinf().any()):
            return f"V is beyond the largest number of {call.format}"
        return None

    def heads(self, tensor: str, *formats: str) -> list[Head]:
        return [
            (fmt, name, tensor, head)
            for (fmt, name), ran in self.ran.items()
            if fmt in formats and tensor in ran.step
            for head in range(ran.step[tensor].shape[1])
        ]

    def expected(self, fmt: str, case: str, tensor: str) -> Step | None:
        """What the way of rounding returns that the call was held to; None: `fa2`'s."""
        words = self.ways.get((fmt, case, tensor), "fa2")
        if words in ("fa2", None):
            return None
        if words == "as fa2 rounds, dk and dv of each query head":
            return rounded_step(self.ran[fmt, case].call, together=False)
        if (fmt, case, words) not in self._steps:
            step = plain_step(self.ran[fmt, case].call, words)
            if step is None:
                raise LookupError(words)
            self._steps[fmt, case, words] = step
        return self._steps[fmt, case, words]

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def of_call(self, fmt: str, case: str, tensor: str, metric: str) -> Tensor:
        ran = self.ran[fmt, case]
        return ran.ratios(tensor, metric, self.expected(fmt, case, tensor))

    def ratio(self, head: Head, metric: str) -> float:
        fmt, case, tensor, h = head
        if tensor == "lse":  # beside its size
            ran = self.ran[fmt, case]
            right = ran.call.right["lse"][:, h]
            seen = ran.call.shown.any(-1).expand(ran.call.right["lse"].shape)[:, h]
            off = (ran.step["lse"][:, h] - right)[seen].square().mean().sqrt()
            return float(off / (1 + right[seen].square().mean().sqrt()))
        x = self.of_call(fmt, case, tensor, metric)
        return float(x[:, h].max() if metric == "worst_row" else x[h])

    # --- causes ------------------------------------------------------------------------

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def shares(
        self, cause: str, fmt: str, case: str, tensor: str
    ) -> list[tuple[float, float, float]]:
        """By head: the cut in the run in float32, in all rows together, these beside
        their terms, or in the median row, whichever is largest; the shares of the error
        removed there, and in the format."""
        ran = self.ran[fmt, case]
        tried, right = under(cause, ran.call)[tensor], ran.call.right[tensor]

        def by_row(x: Tensor, y: Tensor) -> Tensor:
            fine = (
                ran.usable(tensor) & y.isfinite() & x.isfinite()
                if tensor != "lse"
                else y.isfinite()
            )
            error = torch.where(fine, x - y, 0.0).transpose(0, 1)
            return error.norm(dim=-1).flatten(1) if tensor != "lse" else error.flatten(1)

        def sizes(x: Tensor, y: Tensor) -> Tensor:
            return by_row(x, y).norm(dim=1)

        wide = [sizes(ran.wide[tensor], y) for y in (right, tried)]
        in_format = [sizes(ran.step[tensor], y) for y in (right, tried)]
        floor = sizes(cast(tried, "float32"), tried).clamp_min(1e-300)
        cut = wide[0] / torch.maximum(wide[1], floor)
        rows = [by_row(ran.wide[tensor], y).abs() for y in (right, tried)]
        least = by_row(cast(tried, "float32"), tried).abs().clamp_min(1e-300)
        typical = (rows[0] / torch.maximum(rows[1], least)).median(dim=1).values
        terms = by_row(ran.call.terms[tensor], torch.zeros(1)) if tensor != "lse" else 1.0
        beside = [(x / terms).nan_to_num(0.0, 0.0, 0.0).norm(dim=1) for x in rows]
        relative = beside[0] / beside[1].clamp_min(1e-300)
        cut = torch.stack([cut, typical, relative]).amax(0)
        shares = [1 - b / a.clamp_min(1e-300) for a, b in (wide, in_format)]
        return list(
            zip(cut.tolist(), shares[0].tolist(), shares[1].tolist(), strict=True)
        )

    def explained(
        self,
        cause: str,
        tensors: Sequence[str],
        formats: Sequence[str],
        least: float = 10.0,
    ) -> dict[Head, Any]:
        """Heads in which the cause explains the error so many times in float32, and a
        part of it in the format: with the shares."""
        heads = {}
        for tensor in tensors:
            for fmt, case in self.ran:
                if fmt in formats and tensor in self.ran[fmt, case].step:
                    for h, (cut, wide, in_format) in enumerate(
                        self.shares(cause, fmt, case, tensor)
                    ):
                        if cut >= least and in_format > 0.005:
                            heads[fmt, case, tensor, h] = (wide, in_format)
        return heads

    # --- sentences ---------------------------------------------------------------------

    def claims(self, report: Mapping[str, Any]) -> Iterator[tuple[str, list[Claim]]]:
        """Every sentence, with its claims."""
        data = report["json"]
        for finding, full in zip(data["findings"], report["findings"], strict=True):
            yield from self.of_finding(finding, full)
        yield from self.of_terminal(report["terminal"], data)
        for note in (*data["notes"], *data["not_tested"]):
            if not note.startswith("No reproducer"):
                yield note, self.of_note(note)

    def of_finding(
        self, finding: Mapping[str, str], full: Mapping[str, Any]
    ) -> Iterator[tuple[str, list[Claim]]]:
        """The line of a finding, then each sentence of its details."""
        details = [x for x in re.split(BEGINS, finding["details"]) if x]
        for sentence in (finding["sentence"], *details):
            try:
                yield sentence, list(self.of_sentence(sentence, finding, full))
            except LookupError as error:
                yield sentence, [Claim("unknown", sentence, f"{error}", None)]

    def of_terminal(
        self, text: str, data: Mapping[str, Any]
    ) -> Iterator[tuple[str, list[Claim]]]:
        """What the lines of the verdict say beside the findings: how far off the output
        is. A line that is neither a finding's nor of errors is not computed."""
        lines = [f["sentence"].split(") ", 1)[1] for f in data["findings"]]
        details = [f["details"] for f in data["findings"]]
        verdict = rf"[A-Z ]+  {re.escape(data['kernel'])}  ({FORMATS}(?:, {FORMATS})*)  "
        shown = text.splitlines()
        for at, line in enumerate(shown):
            if (match := re.match(verdict, line)) is None:
                continue
            stated, formats = line[match.end() :], match[1].split(", ")
            below = shown[at + 1].strip() if at + 1 < len(shown) else ""
            if stated in lines:
                more = below.removeprefix(details[lines.index(stated)]).strip()
                if more.startswith("Error of its output: "):
                    sizes = more.split(": ", 1)[1][:-1].replace("median ", "")
                    yield more, self.of_errors(sizes, formats)
                elif below not in details:
                    yield below, [Claim("unknown", below, "", None)]
            elif stated.startswith(("error ", "median error ")):
                yield stated, self.of_errors(stated.split("error ", 1)[1], formats)
                if below and shown[at + 1].startswith(" "):
                    yield below, [Claim("unknown", below, "", None)]
            else:
                yield stated, [Claim("unknown", stated, "", None)]

    def of_sentence(
        self, text: str, finding: Mapping[str, str], full: Mapping[str, Any]
    ) -> Iterator[Claim]:
        """Yields the claims of one sentence of a finding."""
        if full["rule"] in ("runs", "refuses"):
            yield from self.of_calls(text, finding, full)
            return
        where = WHERE.search(f"{finding['sentence']} {finding['details']}")
        if where is None:
            raise LookupError(text)
        count, judged = where[1] or where[3], where[2] or where[4]
        stated = (int(count), int(judged), int(where[5] or 0))
        place = (where[6], int(where[7]))
        if text == finding["sentence"]:
            yield from self.of_line(text, full, stated, place)
        elif WHERE.match(text):
            yield from self.of_where(full, stated, place)
        elif match := re.fullmatch(PLACE, text):
            tensor, (fmt, *_) = self.tensors(full)[0], full["formats"]
            yield from self.of_place(match[1], tensor, fmt, place, match[2])
        elif text.startswith("Expected: "):
            yield from self.of_model(text, full, place)
        elif text.startswith("Correcting it removes "):
            yield from self.of_removed(text, full)
        elif text.startswith("Or: "):
            for other in text.removeprefix("Or: ").rstrip(".").split("; or "):
                alike = self.explained(other, self.tensors(full), full["formats"], 7.0)
                yield Claim(
                    "alternative cause", other, f"{len(alike)} heads",
                    len(alike) >= stated[0],
                )  # fmt: skip
        elif text.startswith("They should be 0"):
            yield from self.of_empty(text, full, place)
        elif text.startswith("Bias of "):
            yield from self.of_bias_detail(text, full, place)
        else:
            yield from self.of_rest(text, full, place)

    def of_line(
        self,
        text: str,
        full: Mapping[str, Any],
        stated: tuple[int, int, int],
        place: tuple[str, int],
    ) -> Iterator[Claim]:
        """Yields the claims of a finding's line."""
        start = re.match(rf"\S+ \(({FORMATS}(?:, {FORMATS})*)\) ", text)
        formats = start[1].split(", ") if start else []
        of = list(self.one.formats)
        yield Claim(
            "formats", f"{formats}", f"{of}", bool(formats) and {*formats} <= {*of}
        )
        metric = full["metric"]
        if metric == "suspicion":
            named = re.search(r"\) is wrong(?: in \d+ of \d+ heads)?: (.*)\.$", text)
            cause = named[1] if named else ""
            for fmt in formats:
                heads = self.explained(cause, self.tensors(full), [fmt])
                yield Claim(
                    "cause", f"{cause} ({fmt})", f"{len(heads)} heads", len(heads) > 0
                )
        elif metric in ("expected_ratio", "rms_ratio", "worst_row"):
            yield from self.of_ratio(text, full, place)
        elif metric == "nonfinite":
            yield from self.of_nonfinite(text, full)
        elif metric == "empty_nonfinite":
            yield from self.of_empty(text, full, place)
        elif metric == "bias_size":
            yield from self.of_bias(text, full, place)
        elif metric == "lse_error":
            number = re.search(r"error ([\d.e-]+) × .*\(limit ([\d.e-]+)\)", text)
            if number is None:
                raise LookupError(text)
            mine = self.ratio((formats[0], place[0], "lse", place[1]), "lse_error")
            yield Claim(
                "log-sum-exp", number[1], f"{mine:.4g}",
                near(float(number[1]), mine) and mine > float(number[2]) == LSE_LIMIT,
            )  # fmt: skip
        elif metric == "noise_ratio":
            yield from self.of_noise(text, full, place)
        else:
            raise LookupError(text)

    def of_calls(
        self, text: str, finding: Mapping[str, str], full: Mapping[str, Any]
    ) -> Iterator[Claim]:
        """Yields the claims on calls that a kernel refused, or in which it failed."""
        (fmt,) = full["formats"]
        every = calls(fmt).values()
        if full["rule"] == "refuses":
            reasons = [why for call in every if (why := self.lacking(call))]
        else:
            reasons = [why for key, why in self.failed.items() if key[0] == fmt]
        first = re.search(
            r" (?:refuses|failed in) (\d+) of (\d+) calls(?:: (.*))?\.$",
            finding["sentence"],
        )
        if first is None:
            raise LookupError(text)
        further = finding["details"].removeprefix("Reason: ").removesuffix(".")
        parts = [x for x in "; ".join(filter(None, (first[3], further))).split("; ") if x]
        wanted = min(3, len(set(reasons)))  # the first three are told
        if text == finding["sentence"]:
            yield Claim(
                "calls refused or failed",
                f"{first[1]} of {first[2]}",
                f"{len(reasons)} of {len(every)}",
                [int(first[1]), int(first[2])] == [len(reasons), len(every)],
            )
            yield Claim(
                "reasons", f"{len(parts)}", f"{len(set(reasons))}", len(parts) == wanted
            )
        if first[3] or text != finding["sentence"]:
            named = {
                next((why for why in reasons if part.startswith(why)), part)
                for part in parts
            }
            yield Claim(
                "reason", f"{named}", f"{sorted(set(reasons))}", named <= set(reasons)
            )

    def tensors(self, full: Mapping[str, Any]) -> list[str]:
        """Of which tensors a finding speaks; a mistake in the backward pass is of all
        gradients, a factor of one."""
        cause = full["cause"] or ""
        if full["metric"] != "suspicion" or full["tensor"] == "out":
            return [full["tensor"]]
        if "log-sum-exp" in cause:
            return ["lse"]
        match = re.match(r"(d[qkv]) ", cause)
        return [match[1]] if match else ["dq", "dk", "dv"]

    def of_where(
        self,
        full: Mapping[str, Any],
        stated: tuple[int, int, int],
        place: tuple[str, int],
    ) -> Iterator[Claim]:
        """Yields the claims on how many heads a finding is of, and which is the worst."""
        metric = full["metric"]
        if metric == "suspicion":
            yield from self.of_explained(full, stated, place)
        elif metric in ("expected_ratio", "rms_ratio", "worst_row"):
            yield from self.of_beyond(full, stated, place)
        else:
            (fmt,), tensor = full["formats"], full["tensor"]
            limit, slack = full["limit"] or 0.0, 1.0
            if metric == "nonfinite":
                sizes = {h: float(x) for h, x in self.nonfinite(tensor, fmt).items()}
            elif metric == "empty_nonfinite":
                sizes = {h: float(x) for h, (x, _) in self.empty(fmt).items()}
            elif metric == "lse_error":
                sizes = {h: self.ratio(h, metric) for h in self.heads(tensor, fmt)}
            elif metric == "noise_ratio":
                sizes, slack = self.noise(tensor, fmt), 1.6  # two runs of random sums
            elif metric == "bias_size":
                sizes = {
                    h: max(map(abs, self.bias_there(fmt, (h[1], h[3])).values()))
                    for h in self.heads(tensor, fmt)
                }
            else:
                raise LookupError(metric)
            over = sum(x > limit / slack for x in sizes.values())
            sure = sum(x > limit * slack for x in sizes.values())
            if metric == "bias_size":
                sure = 0  # those that are certain alone
            yield Claim(
                "heads beyond a limit", f"{stated[0]} + {stated[2]}", f"{sure} to {over}",
                sure <= stated[0] + stated[2] <= over,
            )  # fmt: skip
            at = sizes.get((fmt, place[0], tensor, place[1]), 0.0)
            worst = max(sizes.values(), default=0.0)
            least = limit if metric == "bias_size" else worst * 0.95 / slack
            yield Claim(
                "place", f"{place}", f"{worst:.4g}; there {at:.4g}", at >= least > 0
            )
            if metric != "bias_size":  # of those with sequences enough
                every = len(sizes if "empty" in metric else self.heads(tensor, fmt))
                yield Claim(
                    "heads judged", f"{stated[1]}", f"{every}", stated[1] == every
                )

    def of_explained(
        self,
        full: Mapping[str, Any],
        stated: tuple[int, int, int],
        place: tuple[str, int],
    ) -> Iterator[Claim]:
        """Yields the claims on which heads a cause explains. A name takes ten times
        beside the terms of each row too, which is not computed here."""
        formats, cause = full["formats"], full["cause"].split(", or ")[0]
        tensors = self.tensors(full)
        heads = self.explained(cause, tensors, formats)
        clear = [h for h, (wide, _) in heads.items() if wide > 0.95]
        small = [
            h for h in clear if (h[2] == "lse" or self.far(h)) and not self.is_broken(h)
        ]
        least = 0 if self.causes > 1 else len(small)  # others may have a part of these
        yield Claim(
            "heads of a cause",
            f"{stated[0]} of {stated[1]}",
            f"{len(small)} far off, {len(heads)} explained",
            # numdev asks for ten times of a sample of rows, which may be seven of all
            least <= stated[0] + stated[2]
            and stated[0] <= len(self.explained(cause, tensors, formats, 7.0)),
        )
        counts = [len(self.heads(t, *formats)) for t in tensors]
        sums = {sum(x) for n in (1, 2, 3) for x in itertools.combinations(counts, n)}
        yield Claim("heads judged", f"{stated[1]}", f"{counts}", stated[1] in sums)
        if self.causes > 1:  # which heads are this finding's is not said
            within = {(case, h) for _, case, _, h in heads}
            shown = f"{len(within)} heads"
            yield Claim(
                "place of a cause", f"{place[0]} head {place[1]}", shown, place in within
            )
        else:
            yield self.worst_of("place of a cause", heads, "expected_ratio", place)

    def of_removed(self, text: str, full: Mapping[str, Any]) -> Iterator[Claim]:
        """Yields the claims on how much of the error a cause makes."""
        formats, cause = full["formats"], full["cause"].split(", or ")[0]
        heads = self.explained(cause, self.tensors(full), formats)
        by_format: dict[str, list[float]] = {}
        for (fmt, *_), (_, removed) in heads.items():
            by_format.setdefault(fmt, []).append(removed)
        shares = re.findall(
            r"(?:removes|,) ([\d.]+ %|all)(?: of the rms error)?(?: of the median "
            rf"head)?(?: in ({FORMATS}))?",
            text,
        )
        for share, fmt in shares:
            of_heads = by_format.get(fmt or formats[0], [])
            if not of_heads:
                yield Claim("share removed", share, "in no head", False)
                continue
            mine = statistics.median(of_heads)
            value = 1.0 if share == "all" else float(share[:-2]) / 100
            right = near(1 - value, 1 - mine, 0.1) or abs(value - mine) < 0.011
            if self.causes > 1:  # the median is of some of these
                right = right or min(of_heads) - 0.011 <= value <= max(of_heads) + 0.011
            yield Claim(
                "share removed",
                f"{share} in {fmt or formats[0]}",
                f"{100 * mine:.6g} %",
                right,
            )
        finer = re.search(r"at least ([\d.]+) % where the inputs are in float32", text)
        if finer and heads:
            mine = statistics.median(wide for wide, _ in heads.values())
            yield Claim(
                "share removed in float32",
                f"at least {finer[1]} %",
                f"{100 * mine:.8g} %",
                mine >= float(finer[1]) / 100,
            )

    def of_model(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        """Yields the claims on what was expected: by which way of rounding, and how the
        errors are set beside it."""
        model = re.fullmatch(
            r"Expected: what (?:the rounding model `(\w+)`|its inferred rounding model "
            r"\((.*?)\)) predicts(.*)\.",
            text,
        )
        if model is None:
            raise LookupError(text)
        words, (fmt,) = model[1] or model[2], full["formats"]
        way = self.ways.get((fmt, place[0], full["tensor"]))
        yield Claim("rounding model there", words, f"{way}", words == way)
        beside = {
            "expected_ratio": ", beside the size of each row's terms",
            "worst_row": " for that row",
            "rms_ratio": "",
        }[full["metric"]]
        yield Claim("expected beside", model[3], beside, model[3] == beside)

    def is_broken(self, head: Head) -> bool:
        """Whether a head has NaN or infinities, of which another finding tells."""
        fmt, case, tensor, h = head
        return not bool(self.ran[fmt, case].step[tensor][:, h].isfinite().all())

    def far(self, head: Head) -> bool:
        try:
            return self.ratio(head, "expected_ratio") > 3.5
        except LookupError:
            return False

    def worst_of(
        self,
        kind: str,
        heads: Any,
        metric: str,
        place: tuple[str, int],
        limits: Any = None,
    ) -> Claim:
        sizes = {h: self.ratio(h, metric) / (limits[h] if limits else 1.0) for h in heads}
        if not sizes:
            return Claim(kind, f"{place}", "no head", False)
        worst = max(sizes, key=lambda h: sizes[h])
        at = max((x for h, x in sizes.items() if (h[1], h[3]) == place), default=0.0)
        return Claim(
            kind,
            f"{place[0]} head {place[1]}",
            f"{worst[1]} head {worst[3]} ({worst[0]}, "
            f"{worst[2]}): {sizes[worst]:.4g}; there {at:.4g}",
            at >= 0.95 * sizes[worst],
        )

    def of_ratio(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        """Yields the claims of a line on an error beside what is expected."""
        metric, (fmt,) = full["metric"], full["formats"]
        error = r"error of ([\w -]+?) (?:up to )?([\d.e]+)× expected"
        stated = re.search(
            {
                "expected_ratio": rf": {error}",
                "rms_ratio": rf" rms {error}",
                "worst_row": r"has a row of ([\w -]+?) with ([\d.e]+)× the expected error",
            }[metric]
            + r"( in the median (?:head|of \d+ heads))? \(limit ([\d.e]+)×\)\.$",
            text,
        )
        if stated is None:
            raise LookupError(text)
        tensor, number, bound = full["tensor"], float(stated[2]), float(stated[4])
        yield Claim("tensor", stated[1], tensor, NAMES.get(stated[1]) == tensor)
        sizes = {h: self.ratio(h, metric) for h in self.heads(tensor, fmt)}
        if stated[3]:
            of = [
                x
                for h, x in sizes.items()
                if "case" not in full["rule"] or h[1] == place[0]
            ]
            # The head in the middle is the one of which each is set beside its own limit,
            # wider where few numbers stand behind it: among those around the middle.
            low, _, high = statistics.quantiles(sorted(of)[len(of) // 3 :], n=4)
            mine, kind = statistics.median(of), "median ratio"
            if low <= number <= high:
                mine = number
        else:
            mine, kind = sizes[fmt, place[0], tensor, place[1]], f"ratio ({metric})"
        yield Claim(
            kind,
            f"{stated[2]} at {place}",
            f"{mine:.4g}",
            near(number, mine, 0.05),
        )
        least, typical = self.least_limit(full), full["rule"].startswith("typical")
        few_rows = 20.0 if tensor in ("dq", "dk") else least
        right = least <= bound < 1.3 if typical else bound in (least, few_rows)
        yield Claim("limit", stated[4], f"{least}", right)
        yield Claim(
            "beyond its limit", f"{stated[2]} > {stated[4]}", f"{mine:.4g}",
            number > bound and mine > bound * 0.98,
        )  # fmt: skip

    def of_beyond(
        self,
        full: Mapping[str, Any],
        stated: tuple[int, int, int],
        place: tuple[str, int],
    ) -> Iterator[Claim]:
        """Yields the claims on how many heads are beyond a limit, and which is worst."""
        metric, tensor, (fmt,) = full["metric"], full["tensor"], full["formats"]
        bound, least = full["limit"], self.least_limit(full)
        every = self.heads(tensor, fmt)
        sizes = {h: self.ratio(h, metric) for h in every}
        over = [h for h, x in sizes.items() if x > least * 0.99]
        limits = {h: self.limit(h, bound) for h in every}
        sure = [
            h for h, x in sizes.items()
            if x > max(limits[h] * 1.02, 1 + 5 / self.root(h))
        ]  # fmt: skip
        typical = full["rule"].startswith("typical")
        few = len(sure) if metric != "rms_ratio" and not typical else 0
        yield Claim(
            "heads beyond a limit",
            f"{stated[0]} + {stated[2]}",
            f"{few} to {len(over)}",
            few <= stated[0] + stated[2] <= len(over),
        )
        yield Claim(
            "heads judged", f"{stated[1]}", f"{len(every)}", stated[1] == len(every)
        )
        # Beside its own limit, which is wider where few numbers stand behind a ratio.
        luck = 0.0 if metric == "worst_row" else 4.0
        if typical:  # that of a median of so many heads
            luck = {"dq": 2.5}.get(tensor, 6.0) if metric == "rms_ratio" else 4.0
            luck *= 1.25 / math.sqrt(len(every))
        limits = {h: max(least, 1 + luck / self.root(h)) for h in over or every}
        if not stated[2]:
            yield self.worst_of("place of a ratio", over or every, metric, place, limits)
        else:  # which heads other findings have is not said
            at = sizes.get((fmt, place[0], tensor, place[1]), 0.0)
            yield Claim("place of a ratio", f"{place}", f"{at:.4g}", at > least * 0.98)

    def least_limit(self, full: Mapping[str, Any]) -> float:
        """The least limit that a head of a finding may have: that of a median is told as
        the limit of the head in the middle, and others have their own."""
        rule, tensor = full["rule"], full["tensor"]
        rare, float32 = tensor in ("dq", "dk"), full["formats"] == ["float32"]
        if rule.startswith("typical rms"):
            return {"out": 1.05, "dq": 1.015, "dk": 1.03, "dv": 1.03}[tensor]
        if rule.startswith("typical"):
            return 1.05
        if rule.startswith("worst row"):
            return (50.0 if float32 else 20.0) if rare else 5.0
        if rule.startswith("error") and float32:
            return 16.0
        return 3.0 if rare else 1.1

    def limit(self, head: Head, bound: float) -> float:
        """The limit of a head's error: of dq and dk a wider one where the errors of fewer
        than two rows are most of it."""
        if head[2] in ("dq", "dk") and bound == 3:
            return 20.0 if self.ratio(head, "error_rows") < 2 else bound
        return bound

    def root(self, head: Head) -> float:
        """Of how many numbers stand behind a ratio."""
        x = self.ran[head[0], head[1]].step[head[2]]
        width = x.shape[3] if head[2] in ("out", "dv") else min(8, x.shape[3])
        return math.sqrt(x.shape[0] * x.shape[2] * width)

    def of_place(
        self, words: str, tensor: str, fmt: str, place: tuple[str, int], count: str | None
    ) -> Iterator[Claim]:
        limit = 5.0 if tensor in ("out", "dv") else 20.0
        limit = 50.0 if fmt == "float32" and tensor in ("dq", "dk") else limit
        entry = re.search(r"(?:of )?batch entry (\d+)(?: alone)?", words)
        more = words.replace(entry[0], "").strip() if entry else words
        holding = 0
        shown = ""
        for head in self.heads(tensor, fmt):
            ran = self.ran[fmt, head[1]]
            bad = self.of_call(fmt, head[1], tensor, "worst_row")[:, head[3]] > limit
            bad = bad | (~ran.step[tensor][:, head[3]].isfinite()).any(-1)
            if not bool(bad.any()):
                continue
            rows = bad.any(0)
            same = not more or bool((places(more, len(rows)) == rows).all())
            if entry:
                same = same and bad.any(1).nonzero().flatten().tolist() == [int(entry[1])]
            holding += same
            if (head[1], head[3]) == place:
                at, entries = (x.nonzero().flatten().tolist() for x in (rows, bad.any(1)))
                shown = f"rows {at[:8]} of entries {entries}"
                if count is None:
                    yield Claim("rows", words, shown, same)
        if count is not None:
            yield Claim(
                "rows, in heads",
                f"{words} ({count})",
                f"{holding}; {shown}",
                int(count) <= holding,
            )

    def nonfinite(self, tensor: str, fmt: str) -> dict[Head, int]:
        """Of each head how many elements are finite where they should not be, or the
        reverse; heads without one are left out."""
        bad = {}
        for head in self.heads(tensor, fmt):
            ran = self.ran[fmt, head[1]]
            x, right = (y[tensor][:, head[3]] for y in (ran.step, ran.call.right))
            wrong = x.isfinite() != cast(right, fmt).isfinite()
            if tensor == "out":
                wrong = (
                    wrong
                    & ran.call.shown.any(-1).expand(ran.step["out"].shape[:3])[
                        :, head[3], :, None
                    ]
                )
            if n := int(wrong.sum()):
                bad[head] = n
        return bad

    def empty(self, fmt: str) -> dict[Head, tuple[int, int]]:
        """Of each head of a call in which a row sees no key: how many elements of the
        output are not finite in such rows, and in how many rows."""
        bad = {}
        for head in self.heads("out", fmt):
            ran = self.ran[fmt, head[1]]
            rows = ~ran.call.shown.any(-1).expand(ran.step["out"].shape[:3])[:, head[3]]
            if bool(rows.any()):
                wrong = ~ran.step["out"][:, head[3]].isfinite() & rows[..., None]
                bad[head] = (int(wrong.sum()), int(wrong.any(-1).sum()))
        return bad

    def of_empty(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        """Yields the claims on rows that see no key."""
        (fmt,) = full["formats"]
        if text == "They should be 0; NaN there can spread to dk and dv.":
            ran = self.ran[fmt, place[0]]
            empty = ~ran.call.shown.any(-1).expand(ran.step["out"].shape[:3])
            right = ran.call.right["out"][empty]
            yield Claim("zero", "0", f"{right.abs().max():.3g}", not bool(right.any()))
            spread = [t for t in ("dk", "dv") if bool(ran.step[t].isnan().any())]
            yield Claim("NaN in gradients", "can", f"{spread}", True if spread else None)
            return
        stated = re.search(r"rows of the output: (\d+) elements in (\d+) rows\.$", text)
        if stated is None:
            raise LookupError(text)
        sums = [sum(x[n] for x in self.empty(fmt).values()) for n in (0, 1)]
        yield Claim(
            "elements not finite", f"{stated[1]} in {stated[2]}", f"{sums}",
            [int(stated[1]), int(stated[2])] == sums,
        )  # fmt: skip

    def of_nonfinite(self, text: str, full: Mapping[str, Any]) -> Iterator[Claim]:
        tensor, (fmt,) = full["tensor"], full["formats"]
        count = re.search(
            r"returns (\d+) elements of ([\w -]+?) that are (NaN or infinite where the "
            r"exact result is finite|finite where the exact result, rounded once, is not"
            r"|finite, infinite or NaN unlike the exact result)\.$",
            text,
        )
        if count is None:
            raise LookupError(text)
        yield Claim("tensor", count[2], tensor, NAMES.get(count[2]) == tensor)
        bad = sum(self.nonfinite(tensor, fmt).values())
        yield Claim("elements not finite", count[1], f"{bad}", int(count[1]) == bad)

    def bias_there(self, fmt: str, place: tuple[str, int]) -> dict[str, float]:
        """Means in ulps: over `mean` all, along the `sign`, and of each feature by its
        number."""
        ran = self.ran[fmt, place[0]]
        right, terms = (x["out"][:, place[1]] for x in (ran.call.right, ran.call.terms))
        bits = {"bfloat16": 7, "float16": 10}[fmt]
        ulp = 2.0 ** (torch.frexp(terms)[1].double() - 1 - bits)
        d = (ran.step["out"][:, place[1]] - cast(right, fmt)) / ulp
        d = d.masked_fill(
            ~ran.call.shown.any(-1).expand(ran.step["out"].shape[:3])[
                :, place[1], :, None
            ],
            0.0,
        )
        features = d.mean((0, 1)).tolist()
        return {
            "mean": float(d.mean()),
            "sign": float((d * right.sign()).mean()),
            **{str(n): x for n, x in enumerate(features)},
        }

    def of_bias(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        """Yields the claims of a line on a bias."""
        stated = re.search(
            r"mean error of the output ([+-][\d.]+) ulp, (.*) \(limit ([\d.]+) ulp\)\.$",
            text,
        )
        if stated is None:
            raise LookupError(text)
        number, sizes = float(stated[1]), self.bias_there(full["formats"][0], place)
        sign = stated[2] in ("away from zero", "toward zero")
        mine = [x for n, x in sizes.items() if (n == "sign") == sign]
        closest = min(mine, key=lambda x: abs(x - number))
        yield Claim("bias", stated[1], f"{closest:+.3f}", near(number, closest, 0.1))
        up = stated[2] in ("away from zero", "upward")
        yield Claim("direction", stated[2], f"{closest:+.3f}", up == (closest > 0))
        yield Claim(
            "beyond its limit", stated[3], stated[1], abs(closest) > float(stated[3])
        )

    def of_bias_detail(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        """Yields the claims on what leans, over how many sequences, and how certain that
        is. Its p is of a t-test over sequences, which is not computed here."""
        stated = re.match(r"Bias of (mean|sign|feature (\d+)) over (\d+) sequences", text)
        if stated is None:
            raise LookupError(text)
        fmt = full["formats"][0]
        name = stated[2] or stated[1]
        size = self.bias_there(fmt, place).get(name, 0.0)
        yield Claim("what leans", stated[1], f"{size:+.3f}", abs(size) > 0.05)
        batch = self.ran[fmt, place[0]].call.q.shape[0]
        yield Claim("sequences", stated[3], f"{batch}", int(stated[3]) == batch)
        yield Claim("p", text, "", None)

    def noise(self, tensor: str, fmt: str) -> dict[Head, float]:
        """How far two runs differ, over the error of one rounding: of the result, or of
        the terms that it is a sum of where that is more."""
        sizes = {}
        for head in self.heads(tensor, fmt):
            ran = self.ran[fmt, head[1]]
            x, y = (run(ran.call, ran.kernel)[tensor][:, head[3]] for _ in range(2))
            floor = cast(ran.call.right[tensor], fmt) - ran.call.right[tensor]
            terms = ran.call.terms[tensor][:, head[3]].nan_to_num(0.0, 0.0, 0.0)
            once = torch.maximum(
                floor[:, head[3]].nan_to_num().norm().clamp_min(1e-30),
                terms.norm() * UNIT[fmt] / math.sqrt(12),
            )
            sizes[head] = float((x - y).nan_to_num().norm() / once)
        return sizes

    def of_noise(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        """Yields the claims of a line on two runs that differ."""
        stated = re.search(
            r"not reproducible(?: in \d+ of \d+ heads)?: ([\w -]+?) changes between runs by ([\d.e]+)× one "
            r"rounding's error \((?:limit ([\d.]+)×|expected: identical bits)\)\.$",
            text,
        )
        if stated is None:
            raise LookupError(text)
        tensor, (fmt,) = full["tensor"], full["formats"]
        yield Claim("tensor", stated[1], tensor, NAMES.get(stated[1]) == tensor)
        sizes = self.noise(tensor, fmt)
        mine = max(sizes.values())
        yield Claim("noise", stated[2], f"{mine:.4g}", near(float(stated[2]), mine, 0.3))
        yield Claim(
            "beyond its limit", stated[2], stated[3] or "0",
            float(stated[2]) > float(stated[3] or 0),
        )  # fmt: skip

    def of_rest(
        self, text: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Iterator[Claim]:
        formats = full["formats"]
        if text.startswith("The same heads also fail"):
            for rule in re.findall(r"`([^`]+)`", text):
                yield self.of_rule(rule, full)
        elif text.startswith("Its gradients are wrong"):
            over = [h for t in TENSORS[1:] for h in self.heads(t, *formats)
                    if self.ratio(h, "expected_ratio") > 1.1]  # fmt: skip
            yield Claim(
                "gradients wrong",
                "for the same reason",
                f"{len(over)} heads",
                len(over) > 0,
            )
        elif match := re.fullmatch(r"Cause unknown: (.*)\.", text):
            yield self.of_unknown(match[1], full, place)
        elif more := re.match(r"For that cause (\d+) more heads? fails? `[^`]+`", text):
            shares = self.by_step(full["cause"], full)
            total, good = int(more[1]), sum(x > 0.88 for x in shares.values())
            yield Claim(
                "more heads of a step", f"{total}", f"{good}", total <= 1.03 * good
            )
        elif text.startswith("Cause: "):
            stated = re.fullmatch(
                r"Cause: (.*)\. That explains ([\d.]+ %|all) of the error in (\d+) "
                r"of these heads"
                r"(, not in the worst)?\.",
                text,
            )
            if stated is None:
                raise LookupError(text)
            yield from self.of_step(stated, full)
        else:
            raise LookupError(text)

    def of_unknown(
        self, why: str, full: Mapping[str, Any], place: tuple[str, int]
    ) -> Claim:
        """Whether each mistake that has no number of its own leaves the worst head
        unexplained; where it was not searched there, cannot be told from here."""
        if not UNKNOWN.get(why):
            return Claim("no cause", why, "", None)
        tensor, (fmt,) = full["tensor"], full["formats"]
        explains = []
        for words in plain_causes():
            _, wide, in_format = self.shares(words, fmt, place[0], tensor)[place[1]]
            if wide > 0.9 and in_format > 0.3:  # ten times in all rows together
                explains.append(words)
        return Claim("no cause", why, f"{explains}", not explains)

    def by_step(self, words: str, full: Mapping[str, Any]) -> dict[Head, float]:
        """Of each head the share of the error that a coarser step makes."""
        shares = {}
        (fmt,), tensor = full["formats"], full["tensor"]
        for head in self.heads(tensor, fmt):
            ran = self.ran[fmt, head[1]]
            key = (fmt, head[1], words)
            if key not in self._coarse:
                self._coarse[key] = [coarse(words, ran.call, tile) for tile in TILES]
            a = ran.error(tensor, None)[:, head[3]].norm()
            left = (
                ran.error(tensor, step[tensor])[:, head[3]].norm()
                for step in self._coarse[key]
            )
            shares[head] = float(1 - min(left) / a) if a else 0.0
        return shares

    def of_step(self, stated: re.Match[str], full: Mapping[str, Any]) -> Iterator[Claim]:
        shares = self.by_step(stated[1], full)
        explained = [x for x in shares.values() if x > 0.88]
        # Where scores are in the hundreds, sums of fp32 in another order make a third
        likely = [x for x in shares.values() if x > 0.65]
        mine = statistics.median(explained) if explained else 0.0
        value = 1.0 if stated[2] == "all" else float(stated[2][:-2]) / 100
        yield Claim(
            "share of a coarse step",
            stated[2],
            f"{100 * mine:.3g} %",
            abs(value - mine) < 0.04,
        )
        yield Claim(
            "heads of a coarse step",
            stated[3],
            f"{len(explained)} to {len(likely)}",
            int(stated[3]) <= len(likely),
        )

    def of_rule(self, rule: str, full: Mapping[str, Any]) -> Claim:
        formats, tensor = full["formats"], full["tensor"]
        tensors = (tensor,) if tensor in ("out",) else ("dq", "dk", "dv")
        metric = {
            "error": "expected_ratio",
            "rms": "rms_ratio",
            "worst row": "worst_row",
        }.get(rule)
        bounds = {"out": 1.1, "dv": 1.1, "dq": 3, "dk": 3}
        if metric:
            rows = {"out": 5, "dv": 5, "dq": 20, "dk": 20}
            limit = rows if rule == "worst row" else bounds
            over = [
                h
                for t in tensors
                for h in self.heads(t, *formats)
                if self.ratio(h, metric) > limit[t]
            ]
            return Claim("also fails", rule, f"{len(over)} heads", len(over) > 0)
        if rule.startswith("typical"):
            metric = "expected_ratio" if "head" in rule else "rms_ratio"
            medians = []
            for fmt, t in itertools.product(formats, tensors):
                heads = self.heads(t, fmt)
                by_case = (
                    {c: [h for h in heads if h[1] == c] for _, c, *_ in heads}
                    if "case" in rule
                    else {"": heads}
                )
                medians += [
                    statistics.median(self.ratio(h, metric) for h in of_case)
                    for of_case in by_case.values()
                ]
            return Claim("also fails", rule, f"{max(medians):.4g}", max(medians) > 1.015)
        if rule == "bias":
            most = max(
                abs(x)
                for fmt in formats
                for h in (0, 1)
                for x in self.bias_there(fmt, ("tied-maxima", h)).values()
            )
            return Claim("also fails", rule, f"{most:.3g} ulp", most >= 0.05)
        if rule == "reproducibility":
            heads = self.noise("out" if tensor == "out" else "dq", formats[0])
            return Claim(
                "also fails", rule, f"{max(heads.values()):.3g}", max(heads.values()) > 0
            )
        if rule == "log-sum-exp":
            most = max(self.ratio(h, "lse_error") for h in self.heads("lse", *formats))
            return Claim("also fails", rule, f"{most:.4g}", most > LSE_LIMIT)
        raise LookupError(rule)

    def of_errors(self, text: str, formats: Sequence[str]) -> list[Claim]:
        """The claims on how far off the output is, as multiples of what is expected, of
        the floor and of plain code, in the median head; and the worst over the floor."""
        claims: list[Claim] = []
        metrics = {
            "expected": "expected_ratio",
            "floor": "floor_ratio",
            "eager": "baseline_ratio",
        }
        parts = list(ERROR.finditer(text))
        if "".join(part[0] for part in parts) != text:
            return [Claim("unknown", text, "", None)]
        for part in parts:
            fmt = part[5] or formats[0]
            for number, name in re.findall(r"([\d.e]+)× (\w+)", part[1]):
                metric = metrics[name]
                try:
                    if metric == "expected_ratio":
                        of = [self.ratio(h, metric) for h in self.heads("out", fmt)]
                    else:  # beside which no way of rounding stands
                        of = [
                            float(self.ran[h[0], h[1]].ratios("out", metric)[h[3]])
                            for h in self.heads("out", fmt)
                        ]
                except LookupError as error:  # no code here for its way of rounding
                    claims.append(Claim(f"median over {name}", number, f"{error}", None))
                    continue
                mine = statistics.median(of)
                right = near(float(number), mine, 0.03)
                claims.append(Claim(f"median over {name}", number, f"{mine:.4g}", right))
            if part[2]:
                claims += self.of_worst_over_floor(part[2], (part[3], int(part[4])), fmt)
        return claims

    def of_worst_over_floor(
        self, number: str, place: tuple[str, int], fmt: str
    ) -> Iterator[Claim]:
        """Yields the claims on the worst head of the output, beside the floor."""
        sizes = {
            h: float(self.ran[h[0], h[1]].ratios("out", "floor_ratio")[h[3]])
            for h in self.heads("out", fmt)
        }
        worst = max(sizes, key=lambda h: sizes[h])
        at, most = sizes[fmt, place[0], "out", place[1]], sizes[worst]
        yield Claim("worst over the floor", number, f"{most:.4g}",
                    near(float(number), most))  # fmt: skip
        yield Claim(
            "place over the floor", f"{place}", f"{worst}; there {at:.4g}",
            at >= 0.95 * most,
        )  # fmt: skip

    def of_note(self, text: str) -> list[Claim]:
        function = self.one.function
        if text.startswith("Not tested, since the function has no parameter for it: "):
            named = text.split(": ", 1)[1].rstrip(".").split(", ")
            lacking = [n for n in ("softcap", "sinks") if not takes(function, n)]
            # One that takes a mask can be told a window by it
            lacking += [] if takes(function, "attn_mask") else ["mask", "window"]
            right = set(named) == set(lacking)
            return [Claim("no parameter", ", ".join(named), ", ".join(lacking), right)]
        if stated := re.fullmatch(
            r"Skipped: (\d+) of (\d+) calls \((.*)\): (.*)\.", text
        ):
            every = [(f, c) for f in self.one.formats for c in calls(f).values()]
            skipped = [c.name for f, c in every if bool(c.v.isinf().any())]
            right = [int(stated[1]), int(stated[2]), stated[3]] == [
                len(skipped),
                len(every),
                ", ".join(skipped),
            ]
            return [
                Claim(
                    "calls skipped",
                    f"{stated[1]} of {stated[2]} ({stated[3]})",
                    f"{len(skipped)} of {len(every)} {skipped}",
                    right,
                )
            ]
        if stated := re.fullmatch(
            r"Not tested: fewer kv heads than query heads \((.*)\)\. k and v were "
            r"repeated, since no parameter is named enable_gqa\.",
            text,
        ):
            shared = {c.call.name for c in self.ran.values() if c.call.group > 1}
            right = set(stated[1].split(", ")) == shared and not takes(
                function, "enable_gqa"
            )
            return [Claim("heads repeated", stated[1], f"{sorted(shared)}", right)]
        if stated := re.fullmatch(r"Not tested: the gradients of (.*) \((.*)\)\.", text):
            some = {
                c.call.name
                for c in self.ran.values()
                if (c.call.mask is not None and c.call.mask.dtype != torch.bool)
                or c.call.sinks is not None
            }
            return [
                Claim(
                    "gradients not tested",
                    stated[2],
                    f"{sorted(some)}",
                    set(stated[2].split(", ")) == some,
                )
            ]
        if stated := re.fullmatch(
            r"\S+ declares no rounding model\. Of its (\d+) calls these are judged (.*?)"
            r"(; the rest as `fa2`)?\.",
            text,
        ):
            return self.of_models(stated)
        return [Claim("unknown", text, "", None)]

    def of_models(self, stated: re.Match[str]) -> list[Claim]:
        """A way is nearer than `fa2` to a tensor of some call at least: others are held
        to it because it explains that one."""
        claims = [
            Claim("calls", stated[1], f"{len(self.ran)}", int(stated[1]) == len(self.ran))
        ]
        for words, _, count in re.findall(
            r"(as .+?) \(((?:out|d[qkv]|,| and| )+) in (\d+)\)", stated[2]
        ):
            words = words.removeprefix("and ").strip()
            tensors = [key for key, way in self.ways.items() if way == words]
            of_calls = {key[:2] for key in tensors}
            claims.append(
                Claim(
                    "calls of a model",
                    f"{count}: {words}",
                    f"{len(of_calls)}",
                    int(count) == len(of_calls),
                )
            )
            try:
                nearer = 0
                for key in tensors:
                    ran, way = self.ran[key[:2]], self.expected(*key)
                    if way is not None:
                        left = [
                            float(ran.error(key[2], x[key[2]]).norm())
                            for x in (way, ran.predicted)
                        ]
                        nearer += left[0] <= left[1]
                near_to = f"nearer than fa2 in {nearer} of {len(tensors)} tensors"
                claims.append(Claim("model of a kernel", words, near_to, nearer > 0))
            except LookupError:
                claims.append(Claim("model of a kernel", words, "", None))
        return claims


# --- running --------------------------------------------------------------------------


def checked_report(one: Planted) -> dict[str, Any]:
    """What a user of the command reads of a kernel, on the terminal and as JSON."""
    from rich.console import Console

    from numdev.cli.check import check_as_data, check_document
    from numdev.report.renderers import terminal
    from numdev.testing import check

    with tempfile.TemporaryDirectory() as folder:
        result = check(one.function, formats=one.formats, reproducers=folder)
    data, text = check_as_data(result), io.StringIO()
    terminal.show(check_document(result), Console(file=text, width=100_000))
    report = data.pop("report")
    rows = [r for r in report["rows"] if r["role"] == "kernel" and r["status"] == "ok"]
    names = ("role", "format", "case", "tensor", "head", "claim")
    few = [{n: row[n] for n in names} for row in rows]
    return {
        "terminal": text.getvalue(),
        "json": data,
        "findings": report["findings"],
        "rows": few,
    }


def checked(one: Planted, keep: Path | None) -> dict[str, Any]:
    """What was said of a kernel, now or when it was kept."""
    path = None if keep is None else keep / f"{one.name}.json"
    if path is not None and path.exists():
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report
    report = checked_report(one)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report), encoding="utf-8")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="names of kernels, with commas")
    parser.add_argument("--keep", type=Path, help="folder for what checks said")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else list(FAULTY)
    kinds: dict[str, Counter[str]] = {}
    sentences: Counter[str] = Counter()
    for name in names:
        report = checked(FAULTY[name], options.keep)
        for sentence, claims in Checked(FAULTY[name], report).claims(report):
            words = {True: "holds", False: "FALSE", None: "not computed"}
            claims = claims or [Claim("unknown", sentence, "", None)]
            verdicts = [words[claim.holds] for claim in claims]
            worst = next((x for x in ("FALSE", "not computed") if x in verdicts), "holds")
            sentences[worst] += 1
            for claim, verdict in zip(claims, verdicts, strict=True):
                kinds.setdefault(claim.kind, Counter())[verdict] += 1
            if worst != "holds":
                print(f"\n{name}, {worst}: {sentence}")
                for claim, verdict in zip(claims, verdicts, strict=True):
                    if verdict != "holds":
                        print(
                            f"  {claim.kind}: said {claim.stated}; computed "
                            f"{claim.computed}"
                        )
    print("\n| what is said | claims | hold | false | not computed |")
    print("|---|---|---|---|---|")
    for kind, counts in sorted(kinds.items()):
        of = (counts[x] for x in ("holds", "FALSE", "not computed"))
        print(f"| {kind} | {sum(counts.values())} | {' | '.join(map(str, of))} |")
    shown = ", ".join(f"{sentences[x]} {x}" for x in ("holds", "FALSE", "not computed"))
    print(f"\n{sum(sentences.values())} sentences of {len(names)} kernels: {shown}")


if __name__ == "__main__":
    main()
