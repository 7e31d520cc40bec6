"""What benchmarks of biased rounding measure, one number for each sequence: sequences are drawn
from seeds of their own and are the observations that intervals are made from.

Errors of P V and O are in ulps at the exact value and *outward*: positive away from zero. Errors of
delta are relative to the rms over rows of rowsum|dO o O|.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import Format, format_named, ulp
from numdev.kernels.emulation import backward, forward
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic
from numdev.kernels.reference.results import Gradients
from numdev.report.statistics import interval
from numdev.sources.synthetic import Shapes, draw

REGIME = "biased_rounding"


def case_of(
    options: Mapping[str, Any],
    *,
    regime: str = REGIME,
    seeds: Sequence[int] = range(24),
    heads: int = 8,
    rows: int = 8,
    keys: int = 64,
    dim: int = 64,
    fmt: str = "bfloat16",
    device: str = "cpu",
) -> AttentionCase:
    """One sequence for each seed, in one call without a mask."""
    sizes = Shapes(
        batch=1, heads=heads, kv_heads=heads, q_len=rows, kv_len=keys, head_dim=dim, v_dim=dim
    )
    drawn = [draw(regime, sizes, seed=s, options=options, gradients=True) for s in seeds]
    q, k, v, grad_out = (
        torch.cat([getattr(x, name) for x in drawn]).to(device)
        for name in ("q", "k", "v", "grad_out")
    )
    ref = CaseRef(case=regime)
    case = AttentionCase(ref=ref, q=q, k=k, v=v, grad_out=grad_out, scale=dim**-0.5)
    return case.rounded_to(format_named(fmt))


class Recording(Rounder):
    """A rounder that keeps what it was given and gave at some sites."""

    def __init__(self, made: Recipe, case: AttentionCase, *sites: str) -> None:
        super().__init__(made, case, forward.dtype_of(made))
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {site: [] for site in sites}

    def __call__(self, site: str, x: Tensor) -> Tensor:
        before = x.clone() if site in self.seen else None
        rounded = super().__call__(site, x)
        if before is not None:
            self.seen[site].append((before, rounded.clone()))
        return rounded


def product(case: AttentionCase, made: Recipe) -> tuple[Tensor, Tensor]:
    """P V before and after it is rounded, [B, H, rows, v_dim], as `emulated` computes it on its way
    to O. Of a case that a recipe takes in one tile of keys."""
    r = Recording(made, case, "pv")
    with torch.no_grad(), plain_arithmetic(case.q.device):
        q, k, v = (x.to(forward.dtype_of(made)) for x in (case.q, case.k, case.v))
        forward.forward(r, case, made, forward.scaled_q(r, case, made, q), k, v)
    before, after = (torch.cat(x, dim=2) for x in zip(*r.seen["pv"], strict=True))
    assert before.shape[2] == case.q_len, "more than one tile of keys"
    return before, after


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What a training step gave."""

    out: Tensor
    dq: Tensor
    delta: Tensor
    """[B, H, rows]."""


def step(case: AttentionCase, made: Recipe) -> Step:
    """A training step under a recipe, as `emulated` computes it."""
    r = Recording(made, case, "delta")
    assert case.grad_out is not None
    with torch.no_grad(), plain_arithmetic(case.q.device):
        given, _ = backward.read(r, case, made, forward.forward)
        delta = backward.delta_of(r, given, [(slice(0, case.q_len), slice(0, case.kv_len))])
        dq, _, _ = backward.cast(r, *backward.backward(r, given))
        return Step(out=r("out", given.O), dq=dq, delta=delta)


def per_sequence(x: Tensor) -> list[float]:
    """The mean of each sequence."""
    return [float(mean) for mean in x.flatten(1).mean(dim=1)]


def outward(computed: Tensor, exact: Tensor, fmt: Format) -> list[float]:
    """Mean error of each sequence, in ulps and away from zero."""
    e = exact.double()
    return per_sequence((computed.double() - e) * e.sign() / ulp(e, fmt))


def delta_size(case: AttentionCase, exact: Gradients) -> Tensor:
    """The rms over rows of rowsum|dO o O|, [B, 1, 1]."""
    assert case.grad_out is not None
    sums = (case.grad_out.double() * exact.out).abs().sum(dim=-1)
    return sums.square().mean(dim=(1, 2), keepdim=True).sqrt()


def delta_from(case: AttentionCase, out: Tensor) -> Tensor:
    """rowsum(dO o O) of some O, the sum in fp64."""
    assert case.grad_out is not None
    return (case.grad_out.double() * out.double()).sum(dim=-1)


def relative(computed: Tensor, exact: Tensor) -> list[float]:
    """|error| / |exact| of each sequence, Frobenius norms."""
    e = exact.double().flatten(1)
    return ((computed.double().flatten(1) - e).norm(dim=1) / e.norm(dim=1)).tolist()


def text(values: Sequence[float], digits: int = 3) -> str:
    """The mean and its 95 % interval over sequences."""
    mean, low, high = interval(values)
    if low is None or high is None:
        return f"{mean:+.{digits}f}"
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    row(*("---" for _ in cells))
