"""Everything else a kernel may have computed, each with what would come out at a probe's elements.

Most alternatives are another case (`numdev.explain.mistakes`). Here are those that none describes:
an output not divided by the row sum, memory read in another order, and factors of the scale and of
the output, estimated from what the kernel returned. `numdev.explain.wrong_function` judges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.explain.mistakes import variants, without
from numdev.explain.probe import Alternative, Probe
from numdev.kernels.reference import attend
from numdev.kernels.reference.blocked import Reference, scores
from numdev.metrics.yardstick import finite

WHOLE = 1 << 22  # up to so many scores a whole reference is computed where all rows are mixed
SOMEWHERE = "in some rows"  # which: `numdev.explain.wrong_function` sees all
LEAST_ROWS = 8  # it takes to estimate a factor on one half and judge it on the other


def alternatives(probe: Probe) -> Iterator[Alternative]:
    """Every named mistake that is possible in this call and would change what is computed."""
    case = probe.case
    for cause, variant in variants(case):
        yield cause, partial(Probe.answer, case=variant)
    if bool((probe.out == 0).all(-1).any()):
        yield f"the output is 0 {SOMEWHERE}", lambda p: p.multiplied((p.out != 0).any(-1, True))
    cause = "the output is not divided by the row sum"
    yield cause, lambda p: p.multiplied(_row_sum(p)[..., None])
    yield from _layouts(probe)


def _row_sum(p: Probe) -> Tensor:
    """sum_j exp(S_j - max S) [b, h, rows]."""
    tops = [all_scores(p.part(p.case, rows)).amax(dim=-1) for rows in p.blocks]
    total: Tensor = (p.exact.lse - torch.cat(tops, dim=2)).exp()
    return total


# --- layouts -------------------------------------------------------------------------------------


def _layouts(probe: Probe) -> Iterator[Alternative]:
    """[batch, heads, length, dim] taken for [batch, length, heads, dim], in shape or in memory."""
    case, same = probe.case, probe.case.q_len == probe.case.kv_len
    cheap = case.q.shape[:3].numel() * case.kv_len <= WHOLE
    if case.heads == 1 and case.kv_heads == 1:
        return
    if same and case.mask is None and case.sinks is None and case.heads == case.kv_heads:
        yield "the heads' axis is taken for the sequence's", _across_heads
    memory = "[batch, length, heads, dim] in memory"
    for words in ("q is", "k is", "v is", "k and v are", "q, k and v are"):
        for how, order in {"read as": _reread, "laid out as": _relaid}.items():
            named = [n for n in "qkv" if n in words.replace(",", "").split()]
            changed: Any = {n: order(getattr(case, n)) for n in named}
            one = dataclasses.replace(case, **changed)
            yield f"{words} {how} {memory}", partial(Probe.answer, case=one)
            if cheap and len(named) == 3 and order is _reread:
                cause = f"q, k, v and the output have {memory}"
                yield cause, partial(_rewritten, case=one)
    if case.heads > 1 and case.q_len > 1 and (cheap or probe.whole is not None):
        cause = "the output is laid out as [batch, length, heads, dim]"
        yield cause, partial(_rewritten, case=case)


def _across_heads(p: Probe) -> Reference:
    rows = [i for block in p.blocks for i in range(block.start, block.stop)]
    q, k, v = (x.transpose(1, 2) for x in (p.case.q, p.case.k, p.case.v))
    found = attend(dataclasses.replace(p.case, q=q, k=k, v=v).select_heads(rows))
    names = ("out", "lse", "term_scale", "empty")
    back = {n: getattr(found, n).transpose(1, 2)[p.batch][:, p.heads] for n in names}
    return Reference(**back)


def _reread(x: Tensor) -> Tensor:
    """Memory of [B, H, N, D] read as [B, N, H, D]."""
    return x.reshape(x.transpose(1, 2).shape).transpose(1, 2)


def _relaid(x: Tensor) -> Tensor:
    """Written as [B, N, H, D], read as [B, H, N, D]."""
    return x.transpose(1, 2).reshape(x.shape)


def _rewritten(p: Probe, case: AttentionCase) -> Reference:
    whole = p.whole if case is p.case and p.whole is not None else attend(case).out
    return p.with_out(p.take(_relaid(whole)))


NEAR = 20.0  # residuals so many times smaller than at 1 need no search farther away

# --- factors -------------------------------------------------------------------------------------


def estimated(probe: Probe) -> Iterator[tuple[Alternative, float]]:
    """The factors of the scale and of the output that fit every other row, with their cuts on the
    rest. A factor within two roundings of the scores (2u) of 1 is none."""
    shape = probe.exact.empty.shape
    if int((~probe.exact.empty).sum()) < LEAST_ROWS:
        return
    index = torch.arange(math.prod(shape), device=probe.out.device).reshape(shape)
    fit, judge = index % 2 == 0, index % 2 == 1
    least = 2 * probe.case.format.unit_roundoff
    for factor, words, apply in (
        (_scale_factor(probe, fit), "the scale is {} times what was asked", Probe.scaled),
        (_out_factor(probe, fit), "the output is {} times too large", Probe.multiplied),
    ):
        if factor is not None and abs(factor - 1) > least:
            places = 4 if factor > 10 or abs(factor - 1) < 2e-3 else 3
            shown = f"{factor:.{places}f}" if factor >= 0.1 else f"{factor:.3g}"
            again = partial(apply, factor=factor)
            yield (words.format(shown), again), probe.cut(again(probe), judge)
    if probe.case.mask is None or probe.case.mask.dtype == torch.bool:
        key = _lost_key(probe)
        one = dataclasses.replace(probe.case, **without(probe.case, key))
        again = partial(Probe.answer, case=one)
        yield (f"key {key} is dropped", again), probe.cut(again(probe))


def _lost_key(p: Probe) -> int:
    """The key without which rows would err most as they do: by w (o_i - V_j), w = P / (1 - P)."""
    parts = [p.part(p.case, rows) for rows in p.blocks]
    V, o = parts[0].v.double().mT, torch.where(p.usable, p.exact.out, 0.0)
    e = torch.where(p.usable, p.out, 0.0) - o
    P = (torch.cat([all_scores(part) for part in parts], dim=2) - p.exact.lse[..., None]).exp()
    w = torch.where(p.usable[..., :1], P / (1 - P).clamp_min(1e-6), 0.0)
    fits = (w * ((e * o).sum(-1, keepdim=True) - e @ V)).sum(dim=(0, 1, 2))
    apart = o.square().sum(-1, keepdim=True) - 2 * o @ V + V.square().sum(-2, keepdim=True)
    sizes = (w.square() * apart).sum(dim=(0, 1, 2))
    return int((fits.clamp_min(0.0).square() / sizes.clamp_min(1e-300)).argmax())


def all_scores(part: AttentionCase) -> Tensor:
    """S [B, H, q_len, kv_len] of as many kv heads, fp64."""
    X = (part.q.double() @ part.k.double().mT) * part.scale
    return scores(part, X, slice(0, part.q_len), slice(0, part.kv_len))


def _out_factor(p: Probe, fit: Tensor) -> float | None:
    """The least-squares factor between the exact output and the kernel's."""
    where = p.usable & fit[..., None]
    r, o = (torch.where(where, x, 0.0) for x in (p.exact.out, p.out))
    size = float((r * r).sum())
    return float((r * o).sum()) / size if size > 0 else None


def _scale_factor(p: Probe, fit: Tensor) -> float | None:
    """The factor of the scale that leaves the least residual, by Gauss-Newton steps from 1; where
    these find none, from the best point of a grid. None where the scale is 0 or no row can be
    compared."""
    where = p.usable & fit[..., None]
    if p.case.scale == 0 or not bool(where.any()):
        return None
    step = 0.25 * math.log(2)

    def error(logarithm: float) -> Tensor:
        x = p.scaled(math.exp(logarithm)).out
        return torch.where(where & finite(x), (p.out - x) / p.unit, 0.0)

    def refined(at: float) -> float:
        for _ in range(4):
            here = error(at)
            rise = (error(at + 1e-5) - here) / 1e-5
            size = float((rise * rise).sum())
            move = -float((rise * here).sum()) / size if size > 0 else 0.0
            at += move if abs(move) < step else 0.0
        return at

    near = refined(0.0)
    if float(error(near).norm()) > float(error(0.0).norm()) / NEAR:
        best = min(range(-20, 21), key=lambda i: float(error(i * step).norm()))
        near = refined(best * step) if best else near
    return math.exp(near)
