"""Everything else a kernel may have computed, each with what would come out at a probe's elements.

Most alternatives are another case (`numdev.explain.mistakes`), answered by its fp64 reference.
The rest are here: no case describes an output that was not divided by the row sum, or memory read
in another order than it was written in; their answers are made from references. What an alternative
explains, and which of several is named, is for `numdev.explain.wrong_function` to judge.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, visible
from numdev.explain.mistakes import variants
from numdev.explain.probe import Alternative, Probe
from numdev.kernels.reference import attend
from numdev.kernels.reference.results import Reference

WHOLE = 1 << 22
"""Up to this many scores a whole reference is computed for an alternative that mixes all rows."""


def alternatives(probe: Probe) -> Iterator[Alternative]:
    """Every named mistake that is possible in this call and would change what is computed."""
    case = probe.case
    for cause, variant in variants(case):
        yield cause, lambda p, variant=variant: p.answer(variant)  # type: ignore[misc]
    yield "the output is 0 everywhere", lambda p: p.with_out(p.exact.out * 0)
    yield "the output is not divided by the row sum", lambda p: _times(p, _row_sum(p))
    yield (
        "the output is not divided by the sum of exponentials",
        lambda p: _times(p, p.exact.lse.exp()),
    )
    yield from _layouts(case)


def _layouts(case: AttentionCase) -> Iterator[Alternative]:
    """[batch, heads, length, dim] taken for [batch, length, heads, dim], in shape or in memory."""
    same = case.q_len == case.kv_len
    if case.heads == 1 and case.kv_heads == 1:
        return
    if same and case.mask is None and case.sinks is None and case.heads == case.kv_heads:
        yield "the heads' axis is taken for the sequence's", _across_heads
    for names, words in (
        (("q",), "q"),
        (("k",), "k"),
        (("v",), "v"),
        (("k", "v"), "k and v"),
        (("q", "k", "v"), "q, k and v"),
    ):
        changed: dict[str, Any] = {n: _reread(getattr(case, n)) for n in names}
        if all(torch.equal(x, getattr(case, n)) for n, x in changed.items()):
            continue
        variant = dataclasses.replace(case, **changed)
        verb = "is" if len(names) == 1 else "are"
        cause = f"{words} {verb} read as [batch, length, heads, dim] in memory"
        yield cause, lambda p, variant=variant: p.answer(variant)  # type: ignore[misc]
        if len(names) == 3 and _scores_of(case) <= WHOLE:
            yield (
                "q, k, v and the output have [batch, length, heads, dim] in memory",
                lambda p, variant=variant: p.with_out(  # type: ignore[misc]
                    p.take(_rewritten(attend(variant).out))
                ),
            )
    if case.heads > 1 and case.q_len > 1:
        yield (
            "the output is laid out as [batch, length, heads, dim]",
            lambda p: p.with_out(p.take(_rewritten(_whole(p)))),
        )


def _across_heads(p: Probe) -> Reference:
    case = p.case
    rows = [i for block in p.blocks for i in range(block.start, block.stop)]
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
    found = attend(dataclasses.replace(case, q=q, k=k, v=v).select_heads(rows))

    def back(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[p.batch][:, p.heads]

    return Reference(
        out=back(found.out),
        lse=back(found.lse),
        term_scale=back(found.term_scale),
        empty=back(found.empty),
    )


def _reread(x: Tensor) -> Tensor:
    """Memory of [B, H, N, D] read as [B, N, H, D]."""
    b, h, n, d = x.shape
    return x.reshape(b, n, h, d).transpose(1, 2)


def _rewritten(x: Tensor) -> Tensor:
    """Written as [B, N, H, D], read as [B, H, N, D]."""
    return x.transpose(1, 2).reshape(x.shape)


def _whole(p: Probe) -> Tensor:
    """The whole call's reference; NaN, which explains nothing, where it would be too expensive."""
    if p.whole is not None:
        return p.whole
    if _scores_of(p.case) <= WHOLE:
        return attend(p.case).out
    return torch.full((*p.case.q.shape[:3], p.case.v.shape[-1]), math.nan, dtype=torch.float64).to(
        p.case.q.device
    )


def _scores_of(case: AttentionCase) -> int:
    return case.q.shape[0] * case.heads * case.q_len * case.kv_len


def _times(p: Probe, factor: Tensor) -> Reference:
    """The exact output, every row multiplied; unlike the exact one only where the factor is."""
    return p.with_out(p.exact.out * factor[..., None])


def _row_sum(p: Probe) -> Tensor:
    """sum_j exp(S_j - max S) [b, h, rows]."""
    tops = []
    for rows in p.blocks:
        part = p.part(p.case, rows)
        all_rows, keys = slice(0, part.q_len), slice(0, part.kv_len)
        S = (part.q.double() @ part.k.double().transpose(-1, -2)) * part.scale
        if part.softcap is not None:
            S = torch.tanh(S / part.softcap) * part.softcap
        bias, shown = additive(part, all_rows, keys), visible(part, all_rows, keys)
        S = S if bias is None else S + bias.double()
        S = S if shown is None else S.masked_fill(~shown, -math.inf)
        tops.append(S.amax(dim=-1))
    total: Tensor = (p.exact.lse - torch.cat(tops, dim=2)).exp()
    return total
