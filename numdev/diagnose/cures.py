"""Cures of biased rounding, each as a change of one thing in an attention: what Qiu & Yao (arXiv
2510.04212) tried, what follows from their chain, and what others have proposed.

A cure is options of the kernel `emulated`, so `numdev audit`, `sweep` and `train` take it as any
kernel's options. What it does to bias, gradients and cost is measured, not said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numdev.kernels.emulation.recipe import Recipe, changed
from numdev.kernels.emulation.site_list import SITES


@dataclass(frozen=True, kw_only=True)
class Cure:
    """One change of an attention."""

    name: str
    about: str
    """What is changed."""
    breaks: str
    """Where it fails, or what it costs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `emulated`: a field of a recipe or a site, to its value."""

    def of(self, made: Recipe) -> Recipe:
        """The recipe with this cure; raises UsageError where the two contradict one another."""
        sites = {name: value for name, value in self.options.items() if name in SITES}
        fields = {name: value for name, value in self.options.items() if name not in SITES}
        return changed(made, sites=sites, **fields)


def _cure(name: str, about: str, breaks: str, **options: Any) -> Cure:
    return Cure(name=name, about=about, breaks=breaks, options=options)


_PV = dict.fromkeys(("pv", "accumulator", "state", "merge", "normalised"), "float32")

CURES: Mapping[str, Cure] = {
    cure.name: cure
    for cure in (
        _cure(
            "stabilised, exact ties",
            "the stabilised softmax of the paper's first runs: beta 7, where maxima are equal",
            "not invariant under a shift of the scores; rows are lost where (beta - 1) r_m passes "
            "what P's format holds; nothing changes at r_m = 0",
            softmax="stabilised",
            beta=7.0,
            tie_tolerance=0.0,
        ),
        _cure(
            "stabilised",
            "the same as in its later runs: beta 2, where maxima lie within 1e-3",
            "as with exact ties, but from a larger r_m on",
            softmax="stabilised",
            beta=2.0,
            tie_tolerance=1e-3,
        ),
        _cure(
            "guarded",
            "P times a number of the row's own, one of 64 between 1/2 and 1 with odd significands, "
            "which O / l takes back: no P is 1, whatever is tied",
            "changes how P V is rounded, not the last cast of O; rows at one position have the "
            "same number in all heads and batches; backward has P normalised, as ever",
            softmax="guarded",
        ),
        _cure(
            "l from rounded P",
            "the row sum adds P as it is multiplied with V, so that the weights sum to 1",
            "costs nothing; leaves the error of the product P V as it is",
            l_from="rounded",
        ),
        _cure(
            "P V in fp32",
            "P V, its sum over tiles and its normalisation in fp32; O is still cast",
            "an accumulator twice as large",
            **_PV,
        ),
        _cure(
            "O in fp32",
            "the same, and delta reads O from before its cast",
            "O is stored twice, or in fp32",
            **_PV,
            out="float32",
            delta_o="float32",
        ),
        _cure(
            "dP in fp32",
            "dP = dO V^T is not rounded before delta is taken from it",
            "what fused kernels do; where dP is stored it takes twice the room",
            dp="float32",
        ),
        _cure(
            "delta from dP",
            "delta = rowsum(dP o P): from the dP and P that it is subtracted from, in fp32, as are "
            "S - m and l, so that P sums to 1 and each row of dS to zero",
            "needs all of a row before any dS: one more pass over the keys",
            delta_from="dP*P",
            delta_product="wide",
            exponent="wide",
            row_sum="wide",
        ),
        _cure(
            "stochastic rounding",
            "every rounding up or down at random, with the exact value as its mean",
            "no bias, but larger errors: up to twice where values lie anywhere, many times where "
            "they lie next to a number of the format, as at ties; l and the S of forward and "
            "backward no longer fit; not the same bits twice",
            rounding="stochastic",
        ),
    )
}
