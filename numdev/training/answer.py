"""The first sentences of a training run's report: how far each variant ends up from the golden run,
beside runs that re-round at random, and what went wrong on the way. Means are those of the
figures. Nothing is said of stability: a run is one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report.numbers import si, times
from numdev.training.figures import label_of, mean
from numdev.training.report import DistanceRow, TrainRow, VariantRecord

SAME = "{label}: its weights are the golden run's, bit for bit, at every recorded step."
OFF = (
    "{label}: its weights are off the golden run's, relatively, by {apart} at step {step}{beside}."
)
TROUBLE = "{name}: its loss {what} (step {row.step} of seed {row.seed}; {count} recorded)."


def answer(
    variants: Sequence[VariantRecord], rows: Sequence[TrainRow], distances: Sequence[DistanceRow]
) -> Iterator[str]:
    """Each as `WHAT: what is said of it`; runs that re-round at random are one."""
    whole = [d for d in distances if (d.group, d.of) == ("all", "weights") and d.step > 0]
    names: dict[str, list[str]] = {}
    for v in variants:
        names.setdefault(label_of(v), []).append(v.name)
    chance = [d for d in whole if d.variant in names.get("re-rounded at random", ())]
    for label, members in names.items():
        own = [d for d in whole if d.variant in members]
        shares = [d.equal for d in own if d.equal is not None]
        if shares and min(shares) == 1.0:
            yield SAME.format(label=label)
        elif step := max((d.step for d in own if d.rel is not None), default=0):
            apart, by_chance = (
                mean([d.rel for d in x if d.step == step and d.rel is not None] or [0.0])
                for x in (own, chance)
            )
            beside = f" ({times(apart / by_chance)} x re-rounding)" if by_chance else ""
            yield OFF.format(label=label, apart=si(apart), step=step, beside=beside)
    for name in (v.name for v in variants):
        own_rows = [row for row in rows if row.variant == name and row.step > 0]
        for what, which in (
            ("spikes", [row for row in own_rows if row.spike]),
            ("is not finite", [row for row in own_rows if row.loss is None]),
        ):
            if which:
                first = min(which, key=lambda row: row.step)
                yield TROUBLE.format(name=name, what=what, row=first, count=len(which))
