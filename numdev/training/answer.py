"""The first sentences of a training run's report: losses, distances beside those of nulls, and what
went wrong on the way. Means are those of the figures. Nothing here is said of stability: a run is
one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.training.figures import mean
from numdev.training.report import DistanceRow, TrainRow, VariantRecord

SAME = "its weights are the golden run's, bit for bit, at every recorded step."
NO_DISTANCE = "its weights have no distance from the golden run's."
OFF = "weights are off the golden run's, relatively, by {distances}."
REPEATED = "bit for bit the run it repeats, at every recorded step{until}."
NOT_REPEATED = "differs from the run it repeats from step {step} on."


def answer(
    variants: Sequence[VariantRecord], rows: Sequence[TrainRow], distances: Sequence[DistanceRow]
) -> tuple[str, ...]:
    """Each as `WHAT: what is said of it`; how far those that differ are from the golden run, beside
    chance, then that run's loss, then the nulls, then spikes and losses that were lost."""
    weights: dict[str, list[DistanceRow]] = {v.name: [] for v in variants}
    for d in distances:
        if d.variant in weights and d.group == "all" and d.of == "weights" and d.step > 0:
            weights[d.variant].append(d)
    rerounded = [v.name for v in variants if v.role == "null_rounding"]
    chance = [d for name in rerounded for d in weights[name]]
    said, nulls = [], []
    for v in variants:
        if v.role == "golden":
            golden = f"{v.name}, the golden run: {_loss(v.name, rows)}"
        elif v.role == "null_repeat":
            nulls.append(f"{v.name}: {_repeated(weights[v.name])}")
        elif v.role == "null_ulp":
            nulls.append(f"{v.name}: {_course(weights[v.name])}")
        elif v.role != "null_rounding":
            loss = _loss(v.name, rows)
            course = _course(weights[v.name], chance)
            said.append(f"{v.name}: {course} {loss[:1].upper()}{loss[1:]}")
    if rerounded:
        count = f" ({len(rerounded)} runs a seed)" if len(rerounded) > 1 else ""
        nulls.append(f"re-rounded at random{count}: {_course(chance)}")
    return (*said, golden, *nulls, *_trouble(variants, rows))


def _loss(variant: str, rows: Sequence[TrainRow]) -> str:
    """The loss at the last step: the mean over seeds, and its range."""
    last = max(row.step for row in rows if row.variant == variant)
    found = [row.loss for row in rows if row.variant == variant and row.step == last]
    finite = sorted(x for x in found if x is not None)
    if not finite:
        return f"the loss at step {last} is not finite."
    several = f" ({finite[0]:.3f} to {finite[-1]:.3f})" if len(finite) > 1 else ""
    missing = len(found) - len(finite)
    lost = f"; {missing} of {len(found)} not finite" if missing else ""
    return f"loss {mean(finite):.3f}{several} at step {last}{lost}."


def _repeated(found: Sequence[DistanceRow]) -> str:
    """Whether a repeat is one. Of weights that are not finite nothing is known."""
    apart = [d.step for d in found if d.equal is not None and d.equal != 1.0]
    if apart:
        return NOT_REPEATED.format(step=min(apart))
    lost = [d.step for d in found if d.equal is None]
    until = f" before step {min(lost)}, where weights are not finite" if lost else ""
    return REPEATED.format(until=until)


def _course(found: Sequence[DistanceRow], chance: Sequence[DistanceRow] = ()) -> str:
    """The relative distance at the first and the last step at which there is one, and beside it
    that of chance."""
    if found and all(d.equal == 1.0 for d in found):
        return SAME
    steps = sorted({d.step for d in found if d.rel is not None and d.step > 0})
    if not steps:
        return NO_DISTANCE
    said = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        rels = ([d.rel for d in x if d.step == step and d.rel is not None] for x in (found, chance))
        apart, by_chance = (mean(x) if x else 0.0 for x in rels)
        times = apart / by_chance if by_chance else 0.0
        short = f"{times:.2g}" if times < 100 else f"{times:.0f}"
        beside = f" ({short} x re-rounding)" if by_chance else ""
        said.append(f"{f'{apart:.1e}' if apart else '0'} at step {step}{beside}")
    return OFF.format(distances=", ".join(said))


def _trouble(variants: Sequence[VariantRecord], rows: Sequence[TrainRow]) -> Iterator[str]:
    """Spikes of the loss, and where it was lost."""
    for v in variants:
        own = [row for row in rows if row.variant == v.name and row.step > 0]
        spikes = [f"step {r.step} of seed {r.seed}" for r in own if r.spike]
        if spikes:
            yield f"{v.name}: its loss spikes at {_some(spikes)}."
        lost = {row.seed: row.step for row in reversed(own) if row.loss is None}
        if lost:
            where = [f"step {step} of seed {seed}" for seed, step in reversed(lost.items())]
            yield f"{v.name}: its loss is not finite from {_some(where)} on."


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + more
