"""From the rows of `numdev weights` to its summary and first sentences.

The sentence sets the mean difference beside what one cast of the same tensors would have changed,
and W1 beside the mean difference, since W1 does not know which value stands where. What could not
be compared follows, damage first.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

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
BAGS = "W1 of {p.of}: {w1:.1e}, {share:.2g} of the mean difference (mean of the tensors' W1)."
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
    pairs: list[PairSummary] = []
    answer: list[str] = []
    for total in (g for g in groups if g.group == "all"):
        pairs.append(_pair(total, [row for row in rows if row.of == total.of]))
        answer += _sentences(pairs[-1], total.nulls.get("mean_abs", ""))
    answer += [*_remarked(remarks), *_formats(rows)]
    notes = tuple(_notes(rows, pairs, sources, remarks))
    return WeightsSummary(answer=tuple(answer), notes=notes, pairs=tuple(pairs))


def yardstick(rows: Sequence[TensorRow]) -> str | None:
    """The first of CASTS coarser than what most tensors of `against` are stored in: a cast to what
    they are in already changes nothing, and one to a finer format next to nothing."""
    for name in CASTS:
        coarser = [FORMATS[name].precision < FORMATS[r.stored_against].precision for r in rows]
        if 2 * sum(coarser) > len(coarser):
            return name
    return None


def _pair(total: GroupRow, rows: Sequence[TensorRow]) -> PairSummary:
    cast = yardstick(rows)
    times = {r.tensor: x for r in rows if cast and (x := r.times(cast)) is not None}
    largest = max(times, key=lambda name: times[name], default=None)
    apart = {r.tensor: r.max_abs for r in rows if r.max_abs is not None}
    whole = [r for r in rows if not (r.nonfinite_of or r.nonfinite_against)]
    return PairSummary(
        of=total.of,
        against=total.against,
        tensors=len(rows),
        identical=sum(row.equal == 1 for row in whole),
        elements=total.elements,
        max_abs=total.max_abs,
        max_tensor=max(apart, key=lambda name: apart[name], default=None),
        mean_abs=total.mean_abs,
        rel=total.rel,
        mean_w1=total.mean_w1,
        yardstick=cast,
        times_median=statistics.median(times.values()) if times else None,
        times_largest=times[largest] if largest is not None else None,
        times_tensor=largest,
    )


def _sentences(p: PairSummary, null: str) -> Iterator[str]:
    """How far apart, in units of a cast; then the same as bags of values."""
    if null == BEYOND:
        yield f"{p.of} differs from {p.against} by a mean that {BEYOND}."
    elif p.mean_abs is None:
        yield UNKNOWN.format(p=p)
    elif p.max_abs == 0:
        yield EQUAL.format(p=p)
    else:
        beside = NO_CAST if p.yardstick is None else NO_CHANGE
        median, largest = (_times(x) for x in (p.times_median, p.times_largest))
        if p.times_median is not None:
            beside = BESIDE
        beside = beside.format(p=p, median=median, largest=largest)
        yield DIFFERS.format(p=p, beside=beside)
        w1 = p.mean_w1 or 0.0
        share = w1 / p.mean_abs
        yield BAGS.format(p=p, w1=w1, share=share) + (IS_BLIND if share < BLIND else "")


def _times(value: float | None) -> str:
    if value is None or value == 0 or 0.01 <= value < 100:
        return f"{value or 0.0:.2f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1e}"


def _remarked(remarks: Sequence[Remark]) -> Iterator[str]:
    """A sentence for each matter and each set of weights: names alone where no more is to be
    said."""
    for what in LISTED:
        for source in dict.fromkeys(r.source for r in remarks if r.what == what):
            these = [r for r in remarks if r.what == what and r.source == source]
            if what in ("missing", "extra"):
                names = some([r.tensor or r.words for r in these])
                listed = f"{len(these)} tensor{'s' if len(these) > 1 else ''}, {names}"
            else:
                said = [f"{r.tensor} {r.words}" if r.tensor else r.words for r in these]
                more = f"; and {len(said) - 4} more" if len(said) > 4 else ""
                listed = "; ".join(said[:4]) + more
            yield f"{what.capitalize()} in {source}: {listed}."


def _formats(rows: Sequence[TensorRow]) -> Iterator[str]:
    """Where the two are stored in different formats; that alone is no deviation."""
    counts = Counter((r.of, r.against, r.stored_of, r.stored_against) for r in rows)
    for (of, against, its, others), count in counts.items():
        if its != others:
            are = "s are" if count > 1 else " is"
            yield STORED.format(
                count=count, are=are, its=its, of=of, others=others, against=against
            )


def _notes(
    rows: Sequence[TensorRow],
    pairs: Sequence[PairSummary],
    sources: Sequence[SourceRecord],
    remarks: Sequence[Remark],
) -> Iterator[str]:
    for p in pairs:
        null = f"{p.yardstick}_times"
        same = [r.tensor for r in rows if r.of == p.of and null in r.nulls]
        if same:
            yield NO_RATIO.format(p=p, count=len(same), some=some(same))
    for source in sources:
        if source.prefix_removed:
            taken = source.prefix_removed
            yield f"{source.name}: all names began with {taken!r}; it was taken off."
        if source.tied:
            shared = some([f"{name} = {first}" for name, first in source.tied.items()])
            yield f"{source.name}: stores shared weights once ({shared})."
    for remark in remarks:
        if remark.what in ("tied", "empty"):
            yield f"{remark.source}: {remark.tensor} {remark.words}."
