"""From the rows of `numdev weights` to its summary and first sentences: the mean difference beside
what one cast of the same tensors would have changed, W1 beside the mean difference, since W1 does
not know which value stands where, and what could not be compared, damage first."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from numdev.formats import FORMATS
from numdev.report.numbers import times
from numdev.sources.files import some
from numdev.training.weights.pairs import CASTS
from numdev.training.weights.report import (
    GroupRow,
    Matter,
    PairSummary,
    Remark,
    TensorRow,
    WeightsSummary,
)

BLIND = 0.25
"""Below this share of the mean difference, W1 needs the word that it is blind to pairing."""
SAID: tuple[Matter, ...] = (
    *("damaged", "not finite", "reshaped", "missing", "extra", "not compared"),
)
UNKNOWN = "{p.of} and {p.against}: the mean difference is not known ({null})."
EQUAL = (
    "{p.of} equals {p.against}: every finite element of the {p.tensors} tensors compared "
    "({p.elements:,})."
)
DIFFERS = (
    "{p.of} differs from {p.against} by {p.mean_abs:.1e} on average: {beside} At most "
    "{p.max_abs:.1e}, in {p.max_tensor}; {p.identical} of {p.tensors} tensors are equal."
)
NO_CAST = "no cast that would have changed anything is coarser than how {p.against} is stored."
BESIDE = (
    "{median} x what one cast to {p.yardstick} would have changed (median tensor), largest in "
    "{p.times_tensor} ({largest} x)."
)
BAGS = "W1 of {p.of}: {p.mean_w1:.1e}, {share:.2g} of the mean difference.{blind}"
IS_BLIND = (
    " W1 is blind to pairing: it compares bags of values, is 0 for a permuted tensor, and takes "
    "two seeds for one cast. The mean difference is what the weights differ by."
)


def summarise(
    rows: Sequence[TensorRow], groups: Sequence[GroupRow], remarks: Sequence[Remark]
) -> WeightsSummary:
    """The pairs in the order of the sources, and sentences on them."""
    totals = [g for g in groups if g.group == "all"]
    pairs = [_pair(total, [row for row in rows if row.of == total.of]) for total in totals]
    answer: list[str] = []
    for pair, total in zip(pairs, totals, strict=True):
        answer += _sentences(pair, total.nulls.get("mean_abs"))
    for what in SAID:
        for source in dict.fromkeys(r.source for r in remarks if r.what == what):
            these = [r for r in remarks if (r.what, r.source) == (what, source)]
            listed = some([f"{r.tensor} {r.words}" if r.tensor else r.words for r in these])
            answer.append(f"{what.capitalize()} in {source}: {listed}.")
    asides = [f"{r.source}: {r.tensor} {r.words}." for r in remarks if r.what in ("tied", "empty")]
    return WeightsSummary(answer=tuple(answer), notes=tuple(asides), pairs=tuple(pairs))


def _pair(total: GroupRow, rows: Sequence[TensorRow]) -> PairSummary:
    """The yardstick is the first of CASTS coarser than what most tensors of `against` are stored
    in: a cast to what they are in already changes nothing, to a finer format next to nothing."""
    stored = [FORMATS[row.stored_against].precision for row in rows]
    coarser = {name: sum(FORMATS[name].precision < p for p in stored) for name in CASTS}
    cast: Any = next((name for name, count in coarser.items() if 2 * count > len(rows)), None)
    ratios = {r.tensor: x for r in rows if cast and (x := r.times(cast)) is not None}
    largest = max(ratios, key=lambda name: ratios[name], default=None)
    apart = {r.tensor: r.max_abs for r in rows if r.max_abs is not None}
    same = {"of", "against", "elements", "max_abs", "mean_abs", "rel", "mean_w1"}
    return PairSummary(
        **total.model_dump(include=same),
        tensors=len(rows),
        identical=sum(r.equal == 1 and not (r.nonfinite_of or r.nonfinite_against) for r in rows),
        max_tensor=max(apart, key=lambda name: apart[name], default=None),
        yardstick=cast,
        times_median=statistics.median(ratios.values()) if ratios else None,
        times_largest=ratios[largest] if largest is not None else None,
        times_tensor=largest,
    )


def _sentences(p: PairSummary, null: str | None) -> Iterator[str]:
    if p.mean_abs is None or p.max_abs == 0:
        yield (UNKNOWN if p.mean_abs is None else EQUAL).format(p=p, null=null)
    else:
        beside = NO_CAST if p.times_median is None else BESIDE
        ratios = {"median": times(p.times_median), "largest": times(p.times_largest)}
        yield DIFFERS.format(p=p, beside=beside.format(p=p, **ratios))
        share = (p.mean_w1 or 0.0) / p.mean_abs
        yield BAGS.format(p=p, share=share, blind=IS_BLIND if share < BLIND else "")
