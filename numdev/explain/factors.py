"""Factors of the scale and of the output, estimated from what a kernel returned.

An estimate gives the data a say in the alternative; so it is made on every other row and judged on
the rest, and a factor that differs from 1 by no more than two roundings of the scores (2u) is none.
Wrong scales that have a name need no estimate: they are in `numdev.explain.mistakes`. Which cut
accuses is said in `numdev.explain.wrong_function`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from numdev.explain.probe import Alternative, Probe
from numdev.kernels.reference.results import Reference
from numdev.metrics.yardstick import finite

LEAST_ROWS = 8
"""Rows it takes to estimate a factor on one half and judge it on the other."""
LESS, ALONG = 0.5, 0.1
"""The grid's best point must leave less than the first of the residual of what was asked, or the
second part of its square must lie along the slope: next to a right factor nearly all does, of
another mistake hardly anything."""


def estimated(probe: Probe) -> Iterator[tuple[Alternative, float]]:
    """The factors of the scale and of the output that fit every other row, with their cuts on the
    rest."""
    shape = probe.exact.empty.shape
    if int((~probe.exact.empty).sum()) < LEAST_ROWS:
        return
    index = torch.arange(math.prod(shape), device=probe.out.device).reshape(shape)
    fit, judge = index % 2 == 0, index % 2 == 1
    least = 2 * probe.case.format.unit_roundoff
    for factor, words, apply in (
        (_scale_factor(probe, fit), "the scale is {} times what was asked", _scaled),
        (_out_factor(probe, fit), "the output is {} times too large", _multiplied),
    ):
        if factor is None or abs(factor - 1) <= least:
            continue

        def again(p: Probe, factor: float = factor, apply: Any = apply) -> Reference:
            found: Reference = apply(p, factor)
            return found

        digits = 3 if 0.1 <= factor < 10 else 4
        shown = f"{factor:.{digits}f}" if factor >= 0.1 else f"{factor:.3g}"
        yield (words.format(shown), again), probe.cut(again(probe), judge)


def _scaled(p: Probe, factor: float) -> Reference:
    return p.scaled(factor)


def _multiplied(p: Probe, factor: float) -> Reference:
    return p.with_out(p.exact.out * factor)


def _out_factor(p: Probe, fit: Tensor) -> float | None:
    """The least-squares factor between the exact output and the kernel's."""
    where = p.usable & fit[..., None]
    r, o = (torch.where(where, x, 0.0) for x in (p.exact.out, p.out))
    size = float((r * r).sum())
    return float((r * o).sum()) / size if size > 0 else None


def _scale_factor(p: Probe, fit: Tensor) -> float | None:
    """The factor of the scale that leaves the least residual: a coarse grid, a golden-section
    search around its best point, and three Gauss-Newton steps. None where no factor nearby would
    leave much less."""
    where = p.usable & fit[..., None]
    if p.case.scale == 0 or not bool(where.any()):
        return None

    def error(logarithm: float) -> Tensor:
        x = _scaled(p, math.exp(logarithm)).out
        unit = torch.where(p.exact.term_scale > 0, p.exact.term_scale, math.inf)
        return torch.where(where & finite(x), (p.out - x) / unit, 0.0)

    def residual(logarithm: float) -> float:
        return float(error(logarithm).norm())

    step = 0.5 * math.log(2)

    def slope(at: float, here: Tensor) -> tuple[float, float]:
        """The product of the residual `here` with its derivative, and the latter squared."""
        rise = (error(at + 1e-5) - here) / 1e-5
        return float((rise * here).sum()), float((rise * rise).sum())

    best = min((i * step for i in range(-10, 11)), key=residual)
    here = error(best)
    left = float(here.norm())
    if left >= LESS * residual(0.0):
        along, size = slope(best, here)
        if along**2 < ALONG * size * left**2:
            return None
    at = _golden(residual, best - step, best + step)
    for _ in range(3):
        along, size = slope(at, error(at))
        move = -along / size if size > 0 else 0.0
        if abs(move) > step or residual(at + move) > residual(at):
            break
        at += move
    return math.exp(at)


def _golden(f: Callable[[float], float], low: float, high: float, *, steps: int = 14) -> float:
    """Where f is least between low and high, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(steps):
        if fa <= fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = f(b)
    return a if fa <= fb else b
