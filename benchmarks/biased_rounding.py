"""What of the second paper's biased rounding (Qiu & Yao, arXiv 2510.04212) can be seen?

    python benchmarks/biased_rounding.py [--seeds 24] [--part vector] [--part kernels] ...

Parts, all by default: `vector`, the paper's sum bit for bit through the emulation of its code;
`closed`, its closed form by simulation and by exact enumeration; `presets`, the bias of P V and O
by ties, tails and sizes of V; `levels`, of O under softmaxes that shift by the tied score;
`backward`, what rounding dP and O each do to delta and dQ; `leads`, a line for each claim with the
number that decides it; `kernels`, the real kernels on the same inputs, on the CPU and, where there
is one, on the GPU. Prints Markdown.

Inputs are the regime `biased_rounding`, |V| uniform over one binade. Errors of P V and O are in
ulps of bf16, positive away from zero; brackets are 95 % intervals, one observation a seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import biased_kernels
import torch
from biased_measures import (
    REGIME,
    case_of,
    delta_from,
    delta_size,
    head,
    outward,
    per_sequence,
    product,
    relative,
    row,
    step,
    text,
)
from tied_sums import closed_form, mean_error

from numdev.cases import AttentionCase, CaseRef
from numdev.diagnose.cures import CURES
from numdev.formats import format_named
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.recipe import Recipe, changed, recipe
from numdev.kernels.reference import gradients
from numdev.kernels.reference.results import Gradients
from numdev.metrics.bias import MIN_BIAS_ULP
from numdev.report.statistics import interval

BF16 = format_named("bfloat16")
TIES = (1, 2, 3, 4, 8, 64)
TAILS = (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1)
VALUES = (1.0, 0.125, 8.0)
LEVELS = (0.5, 8.0)
"""The tied score of the first and of the last seed: it matters where softmax is not invariant."""
Values = list[float]
Options = tuple[tuple[str, Any], ...]


L_IN_FP32 = {"row_sum": "float32"}


def attentions() -> dict[str, Recipe]:
    """What is compared, by name."""
    paper = recipe("qiu2025")
    return {
        "qiu2025": paper,
        "qiu2025, l in fp32": changed(paper, sites=L_IN_FP32),
        "eager": recipe("eager"),
        "fa2": recipe("fa2"),
        "one correct cast": recipe("exact", sites={"out": "working"}),
        **{
            f"qiu2025, {cure.name}": cure.of(paper)
            for cure in CURES.values()
            if "softmax" in cure.options
        },
    }


# --- the exact sum -------------------------------------------------------------------------------


def vector(*, residual: bool) -> AttentionCase:
    """One row that meets -2.40625 and -2.296875 with P = 1 exactly; the residual is a third key,
    33 * 2^-16 * -55 * 2^-5 = -1815 * 2^-21. Scores are 8, 8 and 0.40625, all exact, and exp of
    -7.59375 rounds to 33 * 2^-16 in bf16."""
    scores = [8.0, 8.0, 0.40625][: 3 if residual else 2]
    values = [-2.40625, -2.296875, -1.71875][: len(scores)]
    q, k = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, len(scores), 64)
    q[..., 0], k[0, 0, :, 0] = 8.0, torch.tensor(scores)
    v = torch.tensor(values)[None, None, :, None]
    return AttentionCase(ref=CaseRef(case="vector"), q=q, k=k, v=v, scale=0.125).rounded_to(BF16)


def show_vector() -> None:
    head("", "P V exactly", "in bf16", "error", "the paper's error, bit for bit")
    for residual, paper in ((True, -0.014759540557861328), (False, 0.015625)):
        before, after = (x.item() for x in product(vector(residual=residual), recipe("qiu2025")))
        name = "with the residual" if residual else "without it"
        row(name, repr(before), repr(after), repr(after - before), after - before == paper)


# --- the closed form -----------------------------------------------------------------------------


def show_closed(seeds: Sequence[int]) -> None:
    """Simulated through `emulated`'s `qiu2025`, enumerated over all significands, and as a formula.
    The simulated tail is that of its rows; the formula takes its mean, in ulps."""
    head("tied keys", "tail, ulp", "enumerated", "1/4 ulp - tail", "simulated")
    for count in (2, 3, 4, 8):
        for tail in (1e-6, 1e-4, 1e-3):
            errors, tau = simulated(count, tail, tuple(seeds))
            units = Fraction(tau) * 128
            exact = mean_error(count, units)
            formula = f"{float(closed_form(units / 2)):.4f}" if count == 2 else ""
            row(count, f"{float(units) / 2:.4f}", f"{float(exact):.4f}", formula, text(errors, 4))


def simulated(count: int, tail: float, seeds: tuple[int, ...]) -> tuple[Values, float]:
    """The error of P V, and the mean tail in units of |V|."""
    case = drawn((("count", count), ("tail", tail)), seeds)
    before, after = product(case, recipe("qiu2025"))
    tied = case.v[:, :, None, :count].double().sum(dim=3)
    return outward(after, before, BF16), float((before - tied).abs().mean())


# --- presets -------------------------------------------------------------------------------------


@functools.cache
def drawn(options: Options, seeds: tuple[int, ...], regime: str = REGIME) -> AttentionCase:
    """A case with a sequence for each seed. Tied scores go over LEVELS."""
    given = dict(options)
    if regime != REGIME:
        return case_of(given, regime=regime, seeds=seeds)
    first, last = LEVELS
    apart = (last - first) / max(1, len(seeds) - 1)
    parts = [
        case_of({"level": first + apart * i, **given}, seeds=[seed]) for i, seed in enumerate(seeds)
    ]
    return joined(parts)


@functools.cache
def exactly(case: AttentionCase) -> Gradients:
    return gradients(case)


def joined(parts: Sequence[AttentionCase]) -> AttentionCase:
    """Sequences of several cases as one case."""
    tensors = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("q", "k", "v", "grad_out")
    }
    return dataclasses.replace(parts[0], **tensors)


def pv_bias(name: str, seeds: tuple[int, ...], **options: Any) -> Values:
    """Of rounding P V, by sequence."""
    case = drawn(tuple(options.items()), seeds)
    before, after = product(case, attentions()[name])
    return outward(after, before, BF16)


def out_bias(name: str, seeds: tuple[int, ...], **options: Any) -> Values:
    """Of O against the exact one, by sequence."""
    return out_of(drawn(tuple(options.items()), seeds), attentions()[name])


def show_presets(seeds: tuple[int, ...]) -> None:
    grids: Iterable[tuple[str, Callable[..., Values], str, Sequence[Any], Mapping[str, Any]]] = (
        ("P V by tied keys (all: 64), tail 1e-4", pv_bias, "count", TIES, {"tail": 1e-4}),
        ("O by tied keys, tail 1e-4", out_bias, "count", TIES, {"tail": 1e-4}),
        ("P V by the tail's mass, two tied keys", pv_bias, "tail", TAILS, {}),
        ("O by the tail's mass, two tied keys", out_bias, "tail", TAILS, {}),
        ("O by |V| at the tied keys over that of the others, tail 1e-4", out_bias, "value", VALUES,
         {"tail": 1e-4}),
        ("O with V of random sign at tied keys (0), and with a tail of the other sign (-1), tail "
         "1e-4, |V| at the tied keys 1/8", signed, "sign", (1, 0, -1), {"tail": 1e-4}),
    )  # fmt: skip
    for title, measure, axis, places, fixed in grids:
        print(f"\n{title}:\n")
        head(axis, *(f"{place:g}" for place in places))
        for name in attentions():
            row(name, *(text(measure(name, seeds, **fixed, **{axis: p})) for p in places))


def signed(name: str, seeds: tuple[int, ...], *, sign: int, **options: Any) -> Values:
    signs = {"v_sign": 0, "tail_sign": 0} if sign == 0 else {"tail_sign": sign}
    return out_bias(name, seeds, value=0.125, **signs, **options)


def show_levels(seeds: tuple[int, ...]) -> None:
    """Where P at the ties is exp(-(beta - 1) r), rounded, O has the rounding error of P over l's,
    which is one for all of a row and changes with r: by tied score, not on average."""
    paper, lead = recipe("qiu2025"), {"tail": 1e-4}
    print(
        "\nO by the tied score r, under a softmax that is shifted by it, tail 1e-4: the mean over"
    )
    print("scores, and the mean size and largest size at one score.\n")
    head("attention", "keys", "mean", "mean size", "largest")
    cures = [cure for cure in CURES.values() if "softmax" in cure.options]
    for cure in cures:
        made = cure.of(paper)
        for name, changes in (
            ("", {}),
            (", l in fp32", {"sites": L_IN_FP32}),
            (", l from rounded P, in fp32", {"sites": L_IN_FP32, "l_from": "rounded"}),
        ):
            for count in (2, 3):
                case = drawn((("count", count), *lead.items()), seeds)
                values = out_of(case, changed(made, **changes))
                sizes = [abs(x) for x in values]
                row(f"{cure.name}{name}", count, text(values), text(sizes), f"{max(sizes):.2f}")


def out_of(case: AttentionCase, made: Recipe) -> Values:
    out, _ = attend(case, made)
    return outward(out, exactly(case).out, BF16)


# --- backward ------------------------------------------------------------------------------------

INPUTS: Mapping[str, tuple[str, Options]] = {
    "two ties, |V| there 1/8 of the others', tail 1e-3": (
        REGIME,
        (("value", 0.125), ("tail", 1e-3)),
    ),
    "two ties, tail 0.1": (REGIME, (("tail", 0.1),)),
    "`one_signed_gradient`, no ties": ("one_signed_gradient", (("count", 0),)),
    "`one_signed_gradient`, two ties": ("one_signed_gradient", (("count", 2),)),
}
O_CAST = {"out": "working", "delta_o": "working"}
ROUNDED: Mapping[str, Mapping[str, str]] = {
    "dP": {"dp": "working"},
    "O, cast once": O_CAST,
    "P V and O": {"pv": "working", **O_CAST},
    "dP and O": {"dp": "working", **O_CAST},
}
"""What alone is rounded, everything else being exact."""

FORMULAS = ("dO*O", "dP*P")
CONSISTENT = {**L_IN_FP32, "delta_product": "float32"}
"""What keeps the rows of dS at zero where delta is made of dP o P."""


def show_backward(seeds: tuple[int, ...]) -> None:
    recipes = {
        **{f"only {n}": recipe("exact", sites=dict(s)) for n, s in ROUNDED.items()},
        **{name: recipe(name) for name in ("qiu2025", "fa2", "eager")},
        "qiu2025, l in fp32": recipe("qiu2025", sites=L_IN_FP32),
        "qiu2025, l and the products of delta in fp32": recipe("qiu2025", sites=CONSISTENT),
    }
    for title, (regime, options) in INPUTS.items():
        print(f"\n{title}:\n")
        head("rounded", *(f"{f}: {x}" for f in FORMULAS for x in ("delta", "pushed", "dQ")))
        for name, made in recipes.items():
            found = [x for f in FORMULAS for x in backward_of(made, f, options, seeds, regime)]
            digits = (5, 5, 3) * len(FORMULAS)
            row(name, *(text(x, d) for x, d in zip(found, digits, strict=True)))


def backward_of(
    made: Recipe,
    formula: str,
    options: Options,
    seeds: tuple[int, ...],
    regime: str = REGIME,
) -> tuple[Values, Values, Values]:
    """With delta by a formula, by sequence: the mean error of delta, the mean error that dQ has as
    if delta were off by it (`biased_kernels.pushed`), both relative; and |dQ error| / |dQ|."""
    case = drawn(options, seeds, regime)
    exact = exactly(case)
    found = step(case, changed(made, delta_from=formula))
    size = delta_size(case, exact)
    wrong = (found.delta - delta_from(case, exact.out)) / size
    along = biased_kernels.pushed(case, exact, found.dq) / size
    return per_sequence(wrong), per_sequence(along), relative(found.dq, exact.dq)


# --- leads ---------------------------------------------------------------------------------------


NONE = (-MIN_BIAS_ULP, MIN_BIAS_ULP)
SOME = (MIN_BIAS_ULP, 1.0)


def show_leads(seeds: tuple[int, ...]) -> None:
    """Each claim, the number, and whether it holds: a bias is one from MIN_BIAS_ULP on."""
    pv, out = functools.partial(pv_bias, seeds=seeds), functools.partial(out_bias, seeds=seeds)
    head("claim", "number", "")
    for claim, values, between in (
        ("un-normalised bf16 P V, two ties, tiny tail: 0.2 ulp", pv("qiu2025", tail=1e-4),
         (0.15, 0.25)),
        ("the same without a tail: none", pv("qiu2025", tail=0.0), NONE),
        ("one cast after fp32 sums, V alike: none", out("fa2", tail=1e-4), NONE),
        ("one cast, V at the ties 1/8: there again", out("fa2", tail=1e-4, value=0.125), SOME),
        ("correct rounding does not have it there",
         out("one correct cast", tail=1e-4, value=0.125), NONE),
        ("it needs ties: one key with V 1/8 has none",
         out("one correct cast", tail=1e-4, value=0.125, count=1), NONE),
        ("it is always away from zero: V at the ties 8 times", out("fa2", tail=1e-4, value=8.0),
         (0.0, 1.0)),
        ("plain attention's forward has it", out("eager", tail=1e-4), SOME),
        ("stabilised, beta 2: none in P V", pv("qiu2025, stabilised", tail=1e-4), NONE),
        ("stabilised, beta 7: none in P V", pv("qiu2025, stabilised, exact ties", tail=1e-4), NONE),
    ):  # fmt: skip
        row(claim, text(values), verdict(values, *between))
    shifted = changed(CURES["stabilised"].of(recipe("qiu2025")), sites=L_IN_FP32)
    sizes = [abs(x) for x in out_of(drawn((("tail", 1e-4),), seeds), shifted)]
    claim = "stabilised, beta 2, l in fp32: 0.2 to 0.4 ulp of either sign in O, mean size"
    row(claim, text(sizes), verdict(sizes, 0.2, 0.4))
    for formula, between in (("dP*P", (-1e-4, 1e-4)), ("dO*O", (1e-4, 1.0))):
        wrong, *_ = backward_of(recipe("eager"), formula, (("tail", 1e-4),), seeds)
        what = "no bias" if formula == "dP*P" else "bias"
        row(f"eager's delta by {formula}: {what}", text(wrong, 5), verdict(wrong, *between))


def verdict(values: Sequence[float], low: float, high: float) -> str:
    """Whether the mean lies in [low, high]: so with all of its interval, not so, or undecided."""
    _, lower, upper = interval(values)
    if lower is None or upper is None:
        return "one observation"
    if low <= lower and upper <= high:
        return "holds"
    return "does not hold" if upper < low or lower > high else "undecided"


# --- all -----------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="What of biased rounding can be seen?")
    parser.add_argument("--seeds", type=int, default=24)
    parts: dict[str, Callable[[tuple[int, ...]], None]] = {
        "vector": lambda seeds: show_vector(),
        "closed": show_closed,
        "presets": show_presets,
        "levels": show_levels,
        "backward": show_backward,
        "leads": show_leads,
        "kernels": biased_kernels.show,
    }
    parser.add_argument("--part", action="append", choices=tuple(parts))
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {given.seeds} seeds, bf16 unless said otherwise")
    for name, part in parts.items():
        if given.part is None or name in given.part:
            start = time.perf_counter()
            print(f"\n## {name}\n")
            part(tuple(range(given.seeds)))
            print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
