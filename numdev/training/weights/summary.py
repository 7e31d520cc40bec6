"""From the rows of `numdev weights` to its summary and first sentences.

The sentence sets the mean difference beside what one cast of the same tensors would have changed,
and W1 beside the mean difference, since W1 does not know which value stands where. What could not
be compared follows, damage first.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from numdev.formats import FORMATS
from numdev.sources.files import some
from numdev.training.weights.pairs import BEYOND, CASTS
from numdev.training.weights.report import (
    GroupRow,
    Matter,
    PairSummary,
    Remark,
    SourceRecord,
    TensorRow,
    WeightsSummary,
)

BLIND = 0.25
"""Below this share of the mean difference, W1 needs the word that it is blind to pairing."""
LISTED: tuple[Matter, ...] = (
    "damaged", "not finite", "reshaped", "missing", "extra", "not compared"
)  # fmt: skip
UNKNOWN = "{p.of} and {p.against}: no element could be compared."
EQUAL = (
    "{p.of} equals {p.against}: every finite element of the {p.tensors} tensors compared "
    "({p.elements:,})."
)
DIFFERS = (
    "{p.of} differs from {p.against} by {p.mean_abs:.1e} on average: {beside} At most "
    "{p.max_abs:.1e}, in {p.max_tensor}; {p.identical} of {p.tensors} tensors are equal."
)
NO_CAST = "no cast is coarser than how {p.against} is stored."
NO_CHANGE = "a cast to {p.yardstick} would have changed nothing."
BESIDE = (
    "{median} x what one cast to {p.yardstick} would have changed (median tensor), largest in "
    "{p.times_tensor} ({largest} x)."
)
BAGS = "W1 of {p.of}: {w1:.1e}, {share:.2g} of the mean difference (mean of its tensors).{blind}"
IS_BLIND = (
    " W1 is blind to pairing: it compares bags of values, is 0 for a permuted tensor, and takes "
    "two seeds for one cast. The mean difference is what the weights differ by."
)
STORED = (
    "Formats: {count} tensor{are} stored in {its} in {of} and in {others} in {against}; their "
    "values were compared."
)
NO_RATIO = (
    "{p.of}: {count} of {p.tensors} tensors have no ratio to a cast to {p.yardstick}, which "
    "changes nothing in them, or had no element to compare ({some})."
)


def summarise(
    rows: Sequence[TensorRow],
    groups: Sequence[GroupRow],
    remarks: Sequence[Remark],
    sources: Sequence[SourceRecord],
) -> WeightsSummary:
    """The pairs in the order of the sources, and sentences on them."""
    totals = [g for g in groups if g.group == "all"]
    pairs = [_pair(total, [row for row in rows if row.of == total.of]) for total in totals]
    answer = [
        sentence
        for pair, total in zip(pairs, totals, strict=True)
        for sentence in _sentences(pair, total.nulls.get("mean_abs"))
    ]
    return WeightsSummary(
        answer=(*answer, *_remarked(remarks), *_formats(rows)),
        notes=tuple(_notes(rows, pairs, sources, remarks)),
        pairs=tuple(pairs),
    )


def _pair(total: GroupRow, rows: Sequence[TensorRow]) -> PairSummary:
    """The yardstick is the first of CASTS coarser than what most tensors of `against` are stored
    in: a cast to what they are in already changes nothing, to a finer format next to nothing."""
    halves = [FORMATS[row.stored_against].precision for row in rows]
    coarser = {name: sum(FORMATS[name].precision < p for p in halves) for name in CASTS}
    cast: Any = next((name for name, count in coarser.items() if 2 * count > len(rows)), None)
    times = {r.tensor: x for r in rows if cast and (x := r.times(cast)) is not None}
    largest = max(times, key=lambda name: times[name], default=None)
    apart = {r.tensor: r.max_abs for r in rows if r.max_abs is not None}
    finite = [r for r in rows if not (r.nonfinite_of or r.nonfinite_against)]
    same = ("of", "against", "elements", "max_abs", "mean_abs", "rel", "mean_w1")
    return PairSummary(
        **total.model_dump(include=set(same)),
        tensors=len(rows),
        identical=sum(row.equal == 1 for row in finite),
        max_tensor=max(apart, key=lambda name: apart[name], default=None),
        yardstick=cast,
        times_median=statistics.median(times.values()) if times else None,
        times_largest=times[largest] if largest is not None else None,
        times_tensor=largest,
    )


def _sentences(p: PairSummary, null: str | None) -> Iterator[str]:
    """How far apart, in units of a cast; then the same as bags of values."""
    if null == BEYOND:
        yield f"{p.of} differs from {p.against} by a mean that {BEYOND}."
    elif p.mean_abs is None or p.max_abs == 0:
        yield (UNKNOWN if p.mean_abs is None else EQUAL).format(p=p)
    else:
        beside = NO_CAST if p.yardstick is None else NO_CHANGE
        if p.times_median is not None:
            beside = BESIDE
        median, largest = (_times(x or 0.0) for x in (p.times_median, p.times_largest))
        yield DIFFERS.format(p=p, beside=beside.format(p=p, median=median, largest=largest))
        w1 = p.mean_w1 or 0.0
        blind = IS_BLIND if w1 / p.mean_abs < BLIND else ""
        yield BAGS.format(p=p, w1=w1, share=w1 / p.mean_abs, blind=blind)


def _times(value: float) -> str:
    if value == 0 or 0.01 <= value < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1e}"


def _remarked(remarks: Sequence[Remark]) -> Iterator[str]:
    """A sentence for each matter and each set: names alone where no more is to be said."""
    for what in LISTED:
        for source in dict.fromkeys(r.source for r in remarks if r.what == what):
            these = [r for r in remarks if r.what == what and r.source == source]
            if what in ("missing", "extra"):
                names = some([r.tensor or r.words for r in these])
                listed = f"{len(these)} tensor{'s' if len(these) > 1 else ''}, {names}"
            else:
                said = [f"{r.tensor} {r.words}" if r.tensor else r.words for r in these]
                more = [f"and {len(said) - 4} more"] if len(said) > 4 else []
                listed = "; ".join([*said[:4], *more])
            yield f"{what.capitalize()} in {source}: {listed}."


def _formats(rows: Sequence[TensorRow]) -> Iterator[str]:
    """Where the two are stored in different formats; that alone is no deviation."""
    counts = Counter((r.of, r.against, r.stored_of, r.stored_against) for r in rows)
    for (of, against, its, others), count in counts.items():
        if its != others:
            places = {"of": of, "against": against, "its": its, "others": others}
            yield STORED.format(count=count, are="s are" if count > 1 else " is", **places)


def _notes(
    rows: Sequence[TensorRow],
    pairs: Sequence[PairSummary],
    sources: Sequence[SourceRecord],
    remarks: Sequence[Remark],
) -> Iterator[str]:
    for p in pairs:
        same = [r.tensor for r in rows if r.of == p.of and f"{p.yardstick}_times" in r.nulls]
        if same:
            yield NO_RATIO.format(p=p, count=len(same), some=some(same))
    for s in sources:
        if s.prefix_removed:
            yield f"{s.name}: all names began with {s.prefix_removed!r}; it was taken off."
        if s.tied:
            shared = some([f"{name} = {first}" for name, first in s.tied.items()])
            yield f"{s.name}: stores shared weights once ({shared})."
    yield from (
        f"{r.source}: {r.tensor} {r.words}." for r in remarks if r.what in ("tied", "empty")
    )
