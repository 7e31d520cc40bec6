"""Which roundings explain a kernel's errors.

The errors of an emulation are compared with the kernel's element by element. What is left, the
*residual* |o - emulation| / |o - r|, is 0 where the emulation makes the kernel's every error and
about 1.4 where it makes errors of the same size and nothing more. An emulation explains a kernel
when the residual is at most one half and clearly below that of every other preset: agreeing in size
is not enough, and a wrong tile correlates too. Otherwise the answer is "unknown", with the nearest.

Rows count alike (each is divided by its term scale), as in row_rel. Where a kernel is explained,
one site at a time is made exact, and the share of the squared error that goes with it is the
site's. Roundings are independent, so shares add up to about 1.

A preset is tried with its own tiles, then over tile sizes, both orders of the keys, and the exps
and rounding modes real kernels have; only then is it called a worse explanation than another.

A gradient depends on the sites of both passes that lead to it. There tiles tell where a sum over
them is rounded from one to the next, so what is tried is where FlashAttention-2 may keep its
sums (in the working format, those of a group apart or not), with tiles, and whence its delta is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.explain.contributions import ends_of, rounding_sites
from numdev.formats import Format
from numdev.kernels.emulation.predict import CASTS, recipe_of

Claim = Mapping[str, Any]
Emulate = Callable[[Claim], Tensor]
"""The tensor in question, as the emulation with these options has it on the kernel's inputs."""

EXPLAINS = 0.5
"""The largest residual of an explanation."""
CLEARLY = 0.8
"""And it is at most this share of the next preset's."""
ENOUGH = 0.1
"""With a residual below this no further variant of the preset is tried."""
PRESETS: Mapping[str, Claim] = {
    "fa2": {"preset": "fa2"},
    "fa2-consistent": {"preset": "fa2-consistent"},
    "eager": {"preset": "eager"},
    "golden2024": {"preset": "golden2024"},
    "qiu2025": {"preset": "qiu2025"},
    "one cast": {"preset": "exact", **dict.fromkeys(CASTS.values(), "working")},
}
"""What is tried, by the name it has in a sentence."""
TILES = (16, 32, 64, 96, 128, 176, 256, 512, 1024)
"""Keys in a tile that are tried with presets that have tiles."""
ROWS = (32, 64, 128, 256, 512)
"""Rows in a tile, tried where dk or dv is rounded after every tile of rows."""
SUMS: tuple[Claim, ...] = tuple(
    {**dict.fromkeys(("dq", "dk", "dv"), "working"), "group_sum": group}
    for group in ("separate", "running")
)
"""Gradients that are summed in the working format."""
WHOLE: Claim = dict.fromkeys(("dk_partial", "dv_partial"), "exact")
"""A group's gradients are summed before they are cast."""
DELTAS: tuple[Claim, ...] = ({"delta_o": "exact"}, {"delta_from": "dP*P"})
"""Other ways to have delta than from the O that is returned."""
FORWARD_VARIED = ("block_kv", "kv_order", "splits", "exponential", "rounding")
VARIED = (*FORWARD_VARIED, "block_q", *SUMS[0], *WHOLE, "delta_o", "delta_from")
SUMMED = ("fa2", "fa2-consistent")
TILED = (*SUMMED, "golden2024", "qiu2025")
WHOLLY = ({"exponential": "fexp_u20"}, {"rounding": "toward_zero"})


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well the best variant of one preset fits."""

    preset: str
    claim: Claim
    residual: float
    ratio: float
    """The kernel's error over the emulation's."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rounding site contributes to the errors of the explanation."""

    site: str
    share: float
    """Of the squared error: what goes when the site is exact."""
    residual: float
    """Of the kernel, when the site is exact."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The best explanation and the next; `why_not` where it is none."""

    best: Fit
    next: Fit
    shares: tuple[Share, ...] = ()
    why_not: str | None = None


def attribute(
    output: Tensor,
    exact: Tensor,
    scale: Tensor,
    fmt: Format,
    claim: Claim | None,
    emulate: Emulate,
    *,
    tensor: str = "out",
    group: int = 1,
) -> Attribution | None:
    """Which roundings explain `output` [B, H, rows, d] against `exact`; None where it has no error.

    `scale` [B, H, rows] is what a row's errors are divided by. Rows where it is 0 are left out, and
    those where it is below the format's smallest normal: such errors are no roundings but what the
    format, or fp32, has no room for, and one of them outweighs all others. `fmt` is the working
    format. `claim` is tried first, under its preset's name. `tensor` says
    what it is: out, dq, dk or dv, of `group` query heads to a kv head.
    """
    weight = row_weights(output, exact, scale, fmt)
    error = weighed(output.double() - exact, weight)
    size = float(error.norm())
    if size == 0 or not math.isfinite(size):
        return None

    def fit(name: str, tried: Claim) -> Fit:
        predicted = weighed(emulate(tried).double() - exact, weight)
        norm = float(predicted.norm())
        return Fit(
            preset=name,
            claim=tried,
            residual=float((error - predicted).norm()) / size,
            ratio=size / norm if norm else math.inf,
        )

    ranked = _search(claim, fit, tensor, group)
    best, other = ranked[0], ranked[1]
    why_not = _why_not(best, other)
    if why_not:
        return Attribution(best=best, next=other, why_not=why_not)
    base = weighed(emulate(best.claim).double() - exact, weight)
    shares = []
    for site, together in rounding_sites(best.claim, fmt, tensor, group).items():
        without = {**best.claim, **dict.fromkeys(together, "exact")}
        left = weighed(emulate(without).double() - exact, weight)
        shares.append(
            Share(
                site=site,
                share=1 - float(left.square().sum() / base.square().sum()),
                residual=float((error - left).norm()) / size,
            )
        )
    shares.sort(key=lambda s: -s.share)
    return Attribution(best=best, next=other, shares=tuple(shares))


def row_weights(output: Tensor, exact: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """[B, H, rows, 1]: 1 / scale of every row that is compared, and 0 of the others, as `attribute`
    has it."""
    usable = (
        (scale >= fmt.smallest_normal)
        & output.double().isfinite().all(-1)
        & exact.isfinite().all(-1)
    )
    return torch.where(usable, 1 / torch.where(usable, scale, 1.0), 0.0)[..., None]


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    """x times the rows' weights, and 0 where that is 0, whatever x is there."""
    return torch.where(weight > 0, x * weight, 0.0)


def _search(
    claim: Claim | None, fit: Callable[[str, Claim], Fit], tensor: str, group: int
) -> list[Fit]:
    """The best variant found of every preset, best preset first.

    Where some preset fits as it is, the others get its tiles, order and exp too, so that it wins
    by how it rounds. Else sums, tiles and orders are tried, and then the exps and modes.
    """
    best = {name: fit(name, _start(name, claim)) for name in PRESETS}

    def better(name: str, tried: Claim) -> None:
        if best[name].residual > ENOUGH and dict(tried) != dict(best[name].claim):
            best[name] = min(best[name], fit(name, tried), key=_residual)

    first = min(best.values(), key=_residual)
    if first.residual > ENOUGH:
        for name in SUMMED:
            for variant in _sums(_start(name, claim), tensor, group):
                better(name, variant)
        for name in TILED:
            for variant in _tiles(best[name].claim, tensor):
                better(name, variant)
        for name in PRESETS:
            for change in WHOLLY:  # with its own tiles too: under another exp no tile fitted well
                better(name, {**_start(name, claim), **change})
                better(name, {**best[name].claim, **change})
        first = min(best.values(), key=_residual)
    same = {k: v for k, v in first.claim.items() if k in VARIED}
    for name in TILED:
        better(name, {**best[name].claim, **same})
    return sorted(best.values(), key=_residual)


def _sums(claim: Claim, tensor: str, group: int) -> Iterator[Claim]:
    """Where FlashAttention-2's sums and its delta may come from, with the tiles that tell then."""
    if tensor == "out":
        return
    grouped = tensor != "dq" and group > 1
    for change in SUMS if grouped else SUMS[:1]:
        yield {**claim, **change}
        yield from _tiles({**claim, **change}, tensor)
    if grouped:
        yield {**claim, **WHOLE}
    for change in DELTAS if tensor != "dv" else ():
        yield {**claim, **change}


def _residual(fit: Fit) -> float:
    return fit.residual


def _start(name: str, claim: Claim | None) -> Claim:
    """A preset as it is, or as the kernel claims to be it."""
    base = PRESETS[name]
    same = claim is not None and claim.get("preset", "fa2") == base["preset"]
    return {**base, **(claim or {})} if same else base


def _tiles(claim: Claim, tensor: str) -> Iterator[Claim]:
    """The tiles that can matter to a tensor: in a gradient, those its sum is rounded after."""
    made = recipe_of(claim)
    summed = tensor == "out" or any(made.sites[s] == "working" for s in ends_of(tensor)[:2])
    if not summed:
        return
    if tensor in ("dk", "dv"):
        for rows in ROWS:
            yield {**claim, "block_q": rows}
        return
    rest = {k: v for k, v in claim.items() if k not in ("memory", "block_kv", "kv_order", "splits")}
    for order in ("ascending", "descending"):
        for tile in TILES:
            yield {**rest, "block_kv": tile, "kv_order": order}


def _why_not(best: Fit, other: Fit) -> str | None:
    if best.residual > EXPLAINS:
        return "no known way of rounding makes these errors"
    if best.residual > CLEARLY * other.residual:
        return (
            f"`{best.preset}` and `{other.preset}` fit these data equally well (residuals "
            f"{best.residual:.2f} and {other.residual:.2f})"
        )
    return None
