"""Cases large enough for statistics, gradients by autograd, and what is rounded at each
site."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import step, with_grad
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef, visible
from numdev.formats import format_named, round_to
from numdev.kernels.emulation.rounding import Rounder
from numdev.sources.input_regimes import Shapes, draw

FIELDS = {field.name for field in dataclasses.fields(AttentionCase)}
REGIMES: dict[str, dict[str, Any]] = {
    **{"normal": {}, "logits x4": {"logits": 4.0}, "logits x16": {"logits": 16.0}},
    **{name: {"regime": name} for name in ("ties", "sink", "outliers")},
    "one sign": {"one_sign": True},
}


def drawn(
    length: int, regime: str = "normal", *, batch: int = 1, heads: int = 2,
    kv_heads: int | None = None, rows: int | None = None, head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0, one_sign: bool = False,
    **others: Any,
) -> AttentionCase:  # fmt: skip
    """A case of a regime with dO; `one_sign`: V and dO > 0. `others`: of case and
    regime."""
    shapes = Shapes(
        batch=batch, heads=heads, kv_heads=kv_heads or heads, q_len=rows or length, kv_len=length,
        head_dim=head_dim, v_dim=head_dim,
    )  # fmt: skip
    fields = {name: others.pop(name) for name in FIELDS & others.keys()}
    q, k, v = draw(regime, shapes, seed=seed, options=others)
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v.abs() + 0.5 if one_sign else v))
    fields = {"scale": head_dim**-0.5, **fields}
    return with_grad(
        AttentionCase(ref=CaseRef(case="x"), q=q, k=k, v=v, **fields), one_sign
    )


def everything(**fields: Any) -> AttentionCase:
    """A bfloat16 case in which every step of both passes has something to do."""
    shape = {
        "heads": 4,
        "kv_heads": 2,
        "q_len": 9,
        "kv_len": 11,
        "head_dim": 8,
        "logits": 3.0,
    }
    more = {"softcap": 3.0, "mask": ("holes", "bhqk"), "sinks": True}
    return step(dtype=torch.bfloat16, **shape, **more, **fields)


def dense(
    case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, delta: float = 1.0
) -> Tensor:
    """softmax(S) V of fp64 q, k and v, without numdev's passes. A row that sees no key is
    0."""
    k, v = (x.repeat_interleave(case.group, dim=1) for x in (k, v))
    S = q @ k.mT * case.scale
    if case.softcap is not None:
        S = case.softcap * torch.tanh(S / case.softcap)
    if case.mask is not None and case.mask.dtype != torch.bool:
        S = S + case.mask.double()
    shown = visible(case, slice(0, case.q_len), slice(0, case.kv_len))
    S = S if shown is None else S.masked_fill(~shown, -math.inf)
    if case.sinks is not None:
        sink = case.sinks.double()[None, :, None, None].expand(*S.shape[:3], 1)
        S = torch.cat([S, sink], dim=-1)
    m = S.detach().amax(dim=-1, keepdim=True)
    P = (S - m.masked_fill(m == -math.inf, 0.0)).exp()
    l = P.sum(dim=-1, keepdim=True)
    l = delta * l + (1 - delta) * l.detach()
    return (P / l.masked_fill(l == 0, 1.0))[..., : case.kv_len] @ v


def autograd(case: AttentionCase, delta: float = 1.0) -> dict[str, Tensor]:
    """`dense` as out, and dq, dk and dv by autograd; `delta` scales rowsum(dO o O) in
    dS."""
    leaves = [x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)]
    O = dense(case, *leaves, delta)
    result = (O.detach(), *torch.autograd.grad(O, leaves, case.grad_out.double()))
    return dict(zip(("out", "dq", "dk", "dv"), result, strict=True))


def rms(x: Tensor) -> Tensor:
    """Root mean square per head."""
    return (x.double() ** 2).mean(dim=(0, 2, 3)).sqrt()


def is_representable(x: Tensor, name: str) -> bool:
    return bool(torch.equal(round_to(x, format_named(name)), x))


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, Tensor]]]:
    """What the rounder returns at every site, in order."""
    values: list[tuple[str, Tensor]] = []
    original = Rounder.__call__

    def look(self: Rounder, site: str, x: Tensor) -> Tensor:
        result = original(self, site, x)
        values.append((site, result.clone()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rounder, "__call__", look)
        yield values
