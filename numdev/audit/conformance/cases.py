"""The small cases on which a kernel is checked, as data, and the known answers of some.

`CHECKS` is the list, one feature at a time. Most are judged against the fp64 reference; where the
answer is known without computing (equal scores give the mean of V), it comes with the case.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import format_named
from numdev.kernels.reference import attend
from numdev.sources.synthetic import Shapes, draw


@dataclass(frozen=True, kw_only=True)
class Check:
    """One small case, and what is special about it."""

    feature: str
    name: str
    batch: int = 1
    heads: int = 2
    kv_heads: int | None = None
    q_len: int = 64
    kv_len: int | None = None
    dim: int = 64
    v_dim: int | None = None
    inputs: str = "normal"
    options: Mapping[str, Any] = field(default_factory=dict)
    twist: str | None = None
    """A name in TWISTS: what is done to the drawn case, and the answer if it is known."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the AttentionCase."""
    runs: int = 1
    backward: bool = False
    """Whether its gradients are checked, and not its output."""


def case_of(check: Check, fmt: str, device: str = "cpu") -> Twisted:
    """A check's case in a format, and its answer where it is known."""
    kv_heads = check.kv_heads or check.heads
    shapes = Shapes(
        batch=check.batch,
        heads=check.heads,
        kv_heads=kv_heads,
        q_len=check.q_len,
        kv_len=check.kv_len or check.q_len,
        head_dim=check.dim,
        v_dim=check.v_dim or check.dim,
    )
    label = f"{check.feature}/{check.name}"
    q, k, v = draw(check.inputs, shapes, seed=0, options=check.options, label=label)
    case = AttentionCase(
        ref=CaseRef(case=label),
        q=q.to(device),
        k=k.to(device),
        v=v.to(device),
        scale=check.dim**-0.5,
    )
    case = dataclasses.replace(case.rounded_to(format_named(fmt)), **check.changes)
    return TWISTS[check.twist](case) if check.twist else (case, None)


# --- twists: a drawn case, changed; and its known answer, or None for the reference's ------------

Twisted = tuple[AttentionCase, Tensor | None]


def _equal(case: AttentionCase) -> Twisted:
    k = case.k[:, :, :1].expand_as(case.k).contiguous()
    mean = case.v.double().mean(dim=2, keepdim=True)
    return dataclasses.replace(case, k=k), mean.expand(*case.q.shape[:3], -1)


def _dominating(case: AttentionCase) -> Twisted:
    """One key's score is 64 above the others, so that they weigh e^-64."""
    key = case.kv_len // 3
    k = torch.zeros_like(case.k)
    k[:, :, key] = 8.0
    changed = dataclasses.replace(case, q=torch.ones_like(case.q), k=k)
    return changed, case.v[:, :, key : key + 1].double().expand(*case.q.shape[:3], -1)


def _ones(case: AttentionCase) -> Twisted:
    v = torch.ones_like(case.v)
    return dataclasses.replace(case, v=v), torch.ones_like(case.v[:, :1]).double().expand_as(v)


def _one_key(case: AttentionCase) -> Twisted:
    return case, case.v.double().expand(*case.q.shape[:3], -1)


def _permuted(case: AttentionCase) -> Twisted:
    order = torch.arange(case.kv_len, device=case.q.device).flip(0)
    changed = dataclasses.replace(case, k=case.k[:, :, order], v=case.v[:, :, order])
    return changed, attend(case).out


def _shifted(case: AttentionCase, by: float = 8.0) -> Twisted:
    """`by` is added to every score: one feature of q is 1, and that of k holds by / scale."""
    q, k = case.q.clone(), case.k.clone()
    q[..., 0], k[..., 0] = 1.0, 0.0
    plain = dataclasses.replace(case, q=q, k=k)
    k = k.clone()
    k[..., 0] = by / case.scale
    return dataclasses.replace(case, q=q, k=k), attend(plain).out


def _far_below(by: float, split: float = 1.0) -> Callable[[AttentionCase], Twisted]:
    """All scores moved down to about `by`, as a product of two numbers the format can hold."""

    def twist(case: AttentionCase) -> Twisted:
        q, k = case.q.clone(), case.k.clone()
        q[..., 0], k[..., 0] = split, by / case.scale / split
        return dataclasses.replace(case, q=q, k=k), None

    return twist


def _transposed_views(case: AttentionCase) -> Twisted:
    """[batch, length, heads, dim] in memory, as a projection makes it."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v))
    return dataclasses.replace(case, q=q, k=k, v=v), None


def _packed_views(case: AttentionCase) -> Twisted:
    """Three slices of one tensor [batch, length, 3, heads, dim]."""
    packed = torch.stack([case.q, case.k, case.v], dim=0).permute(1, 3, 0, 2, 4).contiguous()
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    return dataclasses.replace(case, q=q, k=k, v=v), None


def _bool(case: AttentionCase) -> Tensor:
    mask = torch.rand(case.q_len, case.kv_len, generator=_generator()) < 0.6
    mask[:, 0] = True
    return mask.to(case.q.device)


def _mask(make: Callable[[AttentionCase], Tensor]) -> Callable[[AttentionCase], Twisted]:
    return lambda case: (dataclasses.replace(case, mask=make(case)), None)


def _bias(case: AttentionCase, heads: int = 1) -> Tensor:
    full = (1, heads, case.q_len, case.kv_len)
    return torch.randn(full, generator=_generator()).to(case.q)


def _padding(case: AttentionCase) -> Tensor:
    keys = torch.arange(case.kv_len, device=case.q.device)
    lengths = torch.tensor([case.kv_len - 7 * (b + 1) for b in range(case.q.shape[0])])
    shown: Tensor = keys < lengths.to(case.q.device)[:, None, None, None]
    return shown


def _some_rows_masked(case: AttentionCase) -> Tensor:
    mask = _bool(case)
    mask[3:7] = False
    return mask


def _sinks(case: AttentionCase) -> Twisted:
    sinks = torch.linspace(1.0, 4.0, case.heads).to(case.q)
    return dataclasses.replace(case, sinks=sinks), None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


TWISTS: Mapping[str, Callable[[AttentionCase], Twisted]] = {
    "equal": _equal,
    "dominating": _dominating,
    "ones": _ones,
    "one key": _one_key,
    "permuted": _permuted,
    "shifted": _shifted,
    "lse -120": _far_below(-120.0),
    "lse -5e4": _far_below(-5e4, split=64.0),
    "transposed views": _transposed_views,
    "packed views": _packed_views,
    "bool": _mask(_bool),
    "all true": _mask(lambda case: torch.ones_like(_bool(case))),
    "padding": _mask(_padding),
    "rows masked": _mask(_some_rows_masked),
    "bias": _mask(_bias),
    "bias per head": _mask(lambda case: _bias(case, case.heads)),
    "holes": _mask(lambda case: _bias(case).masked_fill(~_bool(case), -math.inf)),
    "sinks": _sinks,
}

CAUSAL = {"is_causal": True}
LENGTHS = (1, 9, 63, 64, 65, 127, 128, 129, 192)
CHECKS: tuple[Check, ...] = (
    Check(feature="known answers", name="equal scores give the mean of V", twist="equal"),
    Check(feature="known answers", name="one dominating score gives its V", twist="dominating"),
    Check(feature="known answers", name="V = 1 gives 1", twist="ones"),
    Check(feature="known answers", name="one key gives its V", kv_len=1, twist="one key"),
    Check(feature="known answers", name="permuting keys changes nothing", twist="permuted"),
    Check(feature="known answers", name="adding 8 to all scores changes nothing", twist="shifted"),
    *(Check(feature="lengths", name=f"length {n}", q_len=n) for n in LENGTHS),
    *(
        Check(feature="q_len unlike kv_len", name=f"{n} queries, {m} keys", q_len=n, kv_len=m)
        for n, m in ((1, 100), (64, 129), (129, 64))
    ),
    Check(feature="batches", name="3 batch entries", batch=3, runs=3),
    Check(feature="views", name="[batch, length, heads, dim] in memory", twist="transposed views"),
    Check(feature="views", name="slices of packed q, k, v", batch=2, twist="packed views"),
    *(
        Check(feature="head_dim", name=f"head_dim {d}", dim=d)
        for d in (32, 64, 80, 96, 128, 192, 256)
    ),
    Check(feature="V of another head_dim", name="head_dim 64, V's 32", v_dim=32),
    Check(feature="scale", name="scale 0.3", changes={"scale": 0.3}),
    *(
        Check(feature="grouped heads", name=f"{h} query, {kv} kv heads", heads=h, kv_heads=kv)
        for h, kv in ((4, 2), (7, 1), (14, 2))
    ),
    *(
        Check(feature="causal", name=f"length {n}", q_len=n, changes=CAUSAL)
        for n in (1, 9, 64, 65, 129)
    ),
    Check(feature="causal", name="grouped heads", heads=4, kv_heads=2, changes=CAUSAL),
    *(
        Check(
            feature=f"causal, {where}, q_len unlike kv_len",
            name=f"{n} queries, {m} keys",
            q_len=n,
            kv_len=m,
            changes={**CAUSAL, "causal_offset": offset},
        )
        for n, m, where, offset in (
            (40, 100, "top-left", 0),
            (100, 40, "top-left", 0),
            (40, 100, "bottom-right", 60),
            (1, 100, "bottom-right", 99),
        )
    ),
    Check(feature="bool mask", name="random", twist="bool"),
    Check(feature="bool mask", name="all true", twist="all true"),
    Check(feature="bool mask", name="padding, per batch entry", batch=2, twist="padding"),
    Check(feature="bool mask", name="random, causal", twist="bool", changes=CAUSAL),
    Check(feature="additive mask", name="one for all heads", twist="bias"),
    Check(feature="additive mask", name="per head", twist="bias per head"),
    Check(feature="additive mask", name="with -inf", twist="holes"),
    Check(feature="fully masked rows", name="4 of 64 rows", twist="rows masked"),
    Check(feature="window", name="both sides", q_len=129, changes={"window": (16, 16)}),
    Check(feature="window", name="causal", q_len=129, changes={**CAUSAL, "window": (16, 0)}),
    Check(feature="soft cap", name="cap 2", options={"logits": 4.0}, changes={"softcap": 2.0}),
    Check(feature="attention sinks", name="one per head", heads=4, twist="sinks"),
    Check(feature="large logits", name="logits x 16", options={"logits": 16.0}),
    Check(feature="large logits", name="log-sum-exp near -120", twist="lse -120"),
    Check(feature="large logits", name="log-sum-exp near -5e4", twist="lse -5e4"),
    Check(feature="large logits", name="tied maxima", inputs="ties"),
    Check(feature="large logits", name="rare outliers", inputs="outliers"),
    Check(feature="backward", name="plain", backward=True),
    Check(feature="backward", name="causal, length 129", q_len=129, changes=CAUSAL, backward=True),
    Check(feature="backward", name="96 queries, 160 keys", q_len=96, kv_len=160, backward=True),
    Check(feature="backward", name="scale 0.25", changes={"scale": 0.25}, backward=True),
    Check(feature="backward, grouped heads", name="4 to 2", heads=4, kv_heads=2, backward=True),
    Check(feature="backward, bool mask", name="random", twist="bool", backward=True),
)
