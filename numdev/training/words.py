"""The first sentences of a training run's report: losses, distances beside those of nulls, and what
went wrong on the way. Means are those of the figures. Nothing here is said of stability: a run is
one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.training.curves import mean
from numdev.training.report import DistanceRow, TrainRow, VariantRecord


def sentences(
    variants: Sequence[VariantRecord],
    rows: Sequence[TrainRow],
    distances: Sequence[DistanceRow],
) -> tuple[str, ...]:
    """Each as `WHAT: what is said of it`; how far those that differ are from the golden run, beside
    chance, then that run's loss, then the nulls."""
    golden = next(v for v in variants if v.role == "golden")
    others = [v for v in variants if v is not golden and not v.role.startswith("null")]
    chance = _re_rounded(variants, distances)
    return (
        *(f"{v.name}: {_said(v, rows, distances, chance)}" for v in others),
        f"{golden.name}, the golden run: {_loss(golden, rows)}",
        *_nulls(variants, distances),
        *_trouble(variants, rows),
    )


def _said(
    variant: VariantRecord,
    rows: Sequence[TrainRow],
    distances: Sequence[DistanceRow],
    chance: Sequence[DistanceRow],
) -> str:
    return f"{_course(_weights(variant.name, distances), chance)} {_begun(_loss(variant, rows))}"


def _loss(variant: VariantRecord, rows: Sequence[TrainRow]) -> str:
    """The loss at the last step: the mean over seeds, and its range."""
    of_it = [row for row in rows if row.variant == variant.name]
    last = max(row.step for row in of_it)
    found = [row.loss for row in of_it if row.step == last]
    finite = sorted(x for x in found if x is not None)
    if not finite:
        return f"the loss at step {last} is not finite."
    several = f" ({finite[0]:.3f} to {finite[-1]:.3f})" if len(finite) > 1 else ""
    lost = f"; {len(found) - len(finite)} of {len(found)} not finite"
    return (
        f"loss {mean(finite):.3f}{several} at step {last}"
        f"{lost if len(finite) < len(found) else ''}."
    )


def _nulls(variants: Sequence[VariantRecord], distances: Sequence[DistanceRow]) -> Iterator[str]:
    """What differs by nothing, or by roundings alone, and how far apart it drifts."""
    for v in variants:
        if v.role == "null_repeat":
            yield f"{v.name}: {_repeated(_weights(v.name, distances))}"
        elif v.role == "null_ulp":
            yield f"{v.name}: {_course(_weights(v.name, distances))}"
    rounding = [v for v in variants if v.role == "null_rounding"]
    if rounding:
        count = f" ({len(rounding)} runs a seed)" if len(rounding) > 1 else ""
        yield f"re-rounded at random{count}: {_course(_re_rounded(variants, distances))}"


def _re_rounded(
    variants: Sequence[VariantRecord], distances: Sequence[DistanceRow]
) -> list[DistanceRow]:
    """The distances of all runs that re-round at random."""
    rounding = [v for v in variants if v.role == "null_rounding"]
    return [d for v in rounding for d in _weights(v.name, distances)]


def _repeated(found: Sequence[DistanceRow]) -> str:
    """Whether a repeat is one. Of weights that are not finite nothing is known."""
    apart = [d.step for d in found if d.equal is not None and d.equal != 1.0]
    if apart:
        return f"differs from the run it repeats from step {min(apart)} on."
    lost = [d.step for d in found if d.equal is None]
    until = f" before step {min(lost)}, where weights are not finite" if lost else ""
    return f"bit for bit the run it repeats, at every recorded step{until}."


def _course(found: Sequence[DistanceRow], chance: Sequence[DistanceRow] = ()) -> str:
    """The relative distance at the first and the last step at which there is one, and beside it
    that of chance."""
    if found and all(d.equal == 1.0 for d in found):
        return "its weights are the golden run's, bit for bit, at every recorded step."
    steps = sorted({d.step for d in found if d.rel is not None and d.step > 0})
    if not steps:
        return "its weights have no distance from the golden run's."
    said = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        apart, by_chance = (_middle([d.rel for d in x if d.step == step]) for x in (found, chance))
        times = f" ({_times(apart / by_chance)} x re-rounding)" if by_chance else ""
        said.append(f"{_number(apart)} at step {step}{times}")
    return f"weights are off the golden run's, relatively, by {', '.join(said)}."


def _begun(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _middle(values: Sequence[float | None]) -> float:
    """Their mean; 0 where there is none."""
    known = [x for x in values if x is not None]
    return mean(known) if known else 0.0


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 100 else f"{ratio:.0f}"


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _weights(variant: str, distances: Sequence[DistanceRow]) -> list[DistanceRow]:
    return [
        d
        for d in distances
        if d.variant == variant and d.group == "all" and d.of == "weights" and d.step > 0
    ]


def _trouble(variants: Sequence[VariantRecord], rows: Sequence[TrainRow]) -> Iterator[str]:
    """Spikes of the loss, and where it was lost."""
    for v in variants:
        of_it = [row for row in rows if row.variant == v.name and row.step > 0]
        spikes = [f"step {r.step} of seed {r.seed}" for r in of_it if r.spike]
        if spikes:
            yield f"{v.name}: its loss spikes at {_some(spikes)}."
        lost: dict[int, int] = {}
        for row in of_it:
            if row.loss is None:
                lost.setdefault(row.seed, row.step)
        if lost:
            where = [f"step {step} of seed {seed}" for seed, step in lost.items()]
            yield f"{v.name}: its loss is not finite from {_some(where)} on."


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + more
