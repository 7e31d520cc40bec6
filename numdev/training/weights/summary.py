"""From the rows of `numdev weights` to its summary and first sentences.

The sentence sets the mean difference beside what one cast of the same tensors would have changed,
and W1 beside the mean difference, since W1 does not know which value stands where. What could not
be compared follows, damage first.
"""

from __future__ import annotations

import statistics
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


def summarise(
    rows: Sequence[TensorRow],
    groups: Sequence[GroupRow],
    remarks: Sequence[Remark],
    sources: Sequence[SourceRecord],
) -> WeightsSummary:
    """The pairs in the order of the sources, and sentences on them."""
    pairs = [
        _pair(total, [row for row in rows if row.of == total.of])
        for total in groups
        if total.group == "all"
    ]
    nulls = {g.of: g.nulls.get("mean_abs", "") for g in groups if g.group == "all"}
    answer = [s for pair in pairs for s in _sentences(pair, nulls[pair.of])]
    answer += _remarked(remarks)
    answer += _formats(rows)
    return WeightsSummary(
        answer=tuple(answer), notes=tuple(_notes(rows, pairs, sources, remarks)), pairs=tuple(pairs)
    )


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
    found = [(row.times(cast), row.tensor) for row in rows] if cast else []
    times = [(value, name) for value, name in found if value is not None]
    largest = max(times, key=lambda t: t[0], default=None)
    apart = [row for row in rows if row.max_abs is not None]
    worst = max(apart, key=lambda row: row.max_abs or 0.0, default=None)
    return PairSummary(
        of=total.of,
        against=total.against,
        tensors=len(rows),
        identical=sum(_identical(row) for row in rows),
        elements=total.elements,
        max_abs=total.max_abs,
        max_tensor=worst.tensor if worst else None,
        mean_abs=total.mean_abs,
        rel=total.rel,
        mean_w1=total.mean_w1,
        yardstick=cast,
        times_median=statistics.median([value for value, _ in times]) if times else None,
        times_largest=largest[0] if largest else None,
        times_tensor=largest[1] if largest else None,
    )


def _identical(row: TensorRow) -> bool:
    return row.equal == 1 and not (row.nonfinite_of or row.nonfinite_against)


def _sentences(pair: PairSummary, null: str) -> Iterator[str]:
    """How far apart, in units of a cast; then the same as bags of values."""
    if null == BEYOND:
        yield f"{pair.of} differs from {pair.against} by a mean that {BEYOND}."
    elif pair.mean_abs is None:
        yield f"{pair.of} and {pair.against}: no element could be compared."
    elif pair.max_abs == 0:
        yield (
            f"{pair.of} equals {pair.against}: every finite element of the {pair.tensors} tensors "
            f"compared ({pair.elements:,})."
        )
    else:
        yield (
            f"{pair.of} differs from {pair.against} by {pair.mean_abs:.1e} on average: "
            f"{_beside_cast(pair)} At most {pair.max_abs:.1e}, in {pair.max_tensor}; "
            f"{pair.identical} of {pair.tensors} tensors are equal."
        )
        yield _as_bags(pair, pair.mean_abs)


def _beside_cast(pair: PairSummary) -> str:
    if pair.yardstick is None:
        return f"no cast is coarser than how {pair.against} is stored."
    if pair.times_median is None or pair.times_largest is None:
        return f"a cast to {pair.yardstick} would have changed nothing."
    return (
        f"{_times(pair.times_median)} x what one cast to {pair.yardstick} would have changed "
        f"(median tensor), largest in {pair.times_tensor} ({_times(pair.times_largest)} x)."
    )


def _times(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value == 0 or value >= 0.01 else f"{value:.1e}"


def _as_bags(pair: PairSummary, mean: float) -> str:
    share = (pair.mean_w1 or 0.0) / mean
    said = (
        f"W1 of {pair.of}: {pair.mean_w1 or 0.0:.1e}, {share:.2g} of the mean difference (mean of "
        "the tensors' W1)."
    )
    if share >= BLIND:
        return said
    return said + (
        " W1 is blind to pairing: it compares bags of values, is 0 for a permuted tensor, and "
        "takes two seeds for one cast. The mean difference is what the weights differ by."
    )


_TITLES: tuple[tuple[Matter, str], ...] = (
    ("damaged", "Damaged"),
    ("not finite", "Not finite"),
    ("reshaped", "Reshaped"),
    ("missing", "Missing"),
    ("extra", "Extra"),
    ("not compared", "Not compared"),
)


def _remarked(remarks: Sequence[Remark]) -> Iterator[str]:
    """A sentence for each matter and each set of weights."""
    for what, title in _TITLES:
        for source in dict.fromkeys(r.source for r in remarks if r.what == what):
            these = [r for r in remarks if r.what == what and r.source == source]
            yield f"{title} in {source}: {_listed(these)}."


def _listed(these: Sequence[Remark]) -> str:
    """Tensors alone where it says nothing more than their names."""
    if these[0].what in ("missing", "extra"):
        count = f"{len(these)} tensor{'s' if len(these) > 1 else ''}"
        return f"{count}, {some([r.tensor or r.words for r in these])}"
    said = [f"{r.tensor} {r.words}" if r.tensor else r.words for r in these]
    more = f"; and {len(said) - 4} more" if len(said) > 4 else ""
    return "; ".join(said[:4]) + more


def _formats(rows: Sequence[TensorRow]) -> Iterator[str]:
    """Where the two are stored in different formats; that alone is no deviation."""
    different = {(r.of, r.against, r.stored_of, r.stored_against): 0 for r in rows}
    for r in rows:
        different[r.of, r.against, r.stored_of, r.stored_against] += 1
    for (of, against, its, others), count in different.items():
        if its != others:
            plural = "s are" if count > 1 else " is"
            yield (
                f"Formats: {count} tensor{plural} stored in {its} in {of} and in {others} in "
                f"{against}; their values were compared."
            )


def _notes(
    rows: Sequence[TensorRow],
    pairs: Sequence[PairSummary],
    sources: Sequence[SourceRecord],
    remarks: Sequence[Remark],
) -> Iterator[str]:
    for pair in pairs:
        name = pair.yardstick
        same = [r for r in rows if name and r.of == pair.of and f"{name}_times" in r.nulls]
        if same:
            yield (
                f"{pair.of}: {len(same)} of {pair.tensors} tensors have no ratio to a cast to "
                f"{name}, which changes nothing in them, or had no element to compare "
                f"({some([r.tensor for r in same])})."
            )
    for source in sources:
        if source.prefix_removed:
            taken = source.prefix_removed
            yield f"{source.name}: all names began with {taken!r}; it was taken off."
        if source.tied:
            shared = [f"{name} = {first}" for name, first in source.tied.items()]
            yield f"{source.name}: stores shared weights once ({some(shared)})."
    for remark in remarks:
        if remark.what in ("tied", "empty"):
            yield f"{remark.source}: {remark.tensor} {remark.words}."
