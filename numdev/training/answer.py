"""The first sentences of a training run's report: distances beside those of runs that re-round at
random, losses, and what went wrong on the way. Means are those of the figures. Nothing is said of
stability: a run is one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report.numbers import si, times
from numdev.training.figures import label_of, mean
from numdev.training.report import DistanceRow, TrainRow, VariantRecord

SAME = "its weights are the golden run's, bit for bit, at every recorded step"
OFF = "its weights are off the golden run's, relatively, by {distances}"
LOSS = "loss {mean:.3f} ({least:.3f} to {most:.3f}) at step {step}"
TROUBLE = "{name}: its loss {what} (step {row.step} of seed {row.seed}; {count} recorded)."


def answer(
    variants: Sequence[VariantRecord], rows: Sequence[TrainRow], distances: Sequence[DistanceRow]
) -> Iterator[str]:
    """Each as `WHAT: what is said of it`; runs that re-round at random are one."""
    labels = {v.name: label_of(v) for v in variants}
    whole = [d for d in distances if (d.group, d.of) == ("all", "weights") and d.step > 0]
    chance = [d for d in whole if labels[d.variant] == "re-rounded at random"]
    for label in dict.fromkeys(labels.values()):
        own = [d for d in whole if labels[d.variant] == label]
        shares = [d.equal for d in own if d.equal is not None]
        said = [SAME] if shares and min(shares) == 1.0 else list(_course(own, chance))
        last = max(row.step for row in rows)
        losses = [r.loss for r in rows if labels[r.variant] == label and r.step == last]
        finite = [loss for loss in losses if loss is not None]
        if finite:
            ends = {"least": min(finite), "most": max(finite)}
            said.append(LOSS.format(mean=mean(finite), step=last, **ends))
        yield f"{label}: {'; '.join(said) or 'nothing is finite'}."
    for name in labels:
        own_rows = [row for row in rows if row.variant == name and row.step > 0]
        for what, which in (
            ("spikes", [row for row in own_rows if row.spike]),
            ("is not finite", [row for row in own_rows if row.loss is None]),
        ):
            if which:
                first = min(which, key=lambda row: row.step)
                yield TROUBLE.format(name=name, what=what, row=first, count=len(which))


def _course(own: Sequence[DistanceRow], chance: Sequence[DistanceRow]) -> Iterator[str]:
    """The relative distance at the first and the last step at which there is one, and beside it
    that of chance."""
    steps = sorted({d.step for d in own if d.rel is not None})
    said = []
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        rels = ([d.rel for d in x if d.step == step and d.rel is not None] for x in (own, chance))
        apart, by_chance = (mean(x) if x else 0.0 for x in rels)
        beside = f" ({times(apart / by_chance)} x re-rounding)" if by_chance else ""
        said.append(f"{si(apart)} at step {step}{beside}")
    if said:
        yield OFF.format(distances=", ".join(said))
