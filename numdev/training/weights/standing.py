"""Where a run's weights stand out, by layer and kind: its distance from the first run
beside what chance makes of the same tensors, in the same seed at the same step.

Chance are null runs of at most one floor: attention's output re-rounded, or every weight
moved by an ulp. The rule is about the farthest of them, in every seed: it needs two in
each of three seeds. What is judged are the tensors of one kind in one layer; layers and
kinds as wholes are shown."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import pandas as pd

from numdev.grouping import grouped
from numdev.report.numbers import si, times
from numdev.sources.files import some
from numdev.training.bounds.ladder import saturation
from numdev.training.bounds.report import FEWEST_SEEDS, Saturation
from numdev.training.weights.report import ALL, CellRow, Layer, RunRecord, Standing

Metric = Literal["mean_abs", "mean_w1", "max_abs"]
LIMITS: Mapping[Metric, float] = {"mean_abs": 1.5, "mean_w1": 1.5, "max_abs": 3.0}
"""Over the farthest null, in every seed, beyond which a distance stands out. Of nulls
re-rounded at one floor, each set beside the others, 0 of 168 sets of three seeds stood
out anywhere; of single seeds 20 of 24 did (benchmarks/log, 2026-11-27)."""
NAMES: Mapping[Metric, str] = {
    "mean_abs": "mean |difference|",
    "mean_w1": "mean W1 (of tensors)",
    "max_abs": "largest |difference|",
}
IN: Mapping[Metric, str] = {
    "mean_abs": "in the mean",
    "mean_w1": "in mean W1",
    "max_abs": "in the largest",
}
FEWEST_NULLS = 2
SHOWN_BESIDE = ("flash", "attention_precision", "low_precision", "variant", "other_seed")
JUDGED = SHOWN_BESIDE[:-1]
ANOTHER = "another initialisation, which is no small difference"
WHOLE = "a whole, whose parts are judged"
FEW_SEEDS = "{n} seed{s}, and the rule needs {least}"
FEW = (
    "{n} null run{s} of at most one floor {move} it in a seed, and the rule needs {least}"
)
SAME_THERE = "no seed has a distance above 0"


def is_chance(run: RunRecord) -> bool:
    small = run.role == "null_rounding" and (run.times or 1.0) <= 1.0
    return small or run.null or run.role == "null_ulp"


def marks(runs: Sequence[RunRecord], cells: Iterable[CellRow]) -> Saturation:
    """Which steps are early, as `numdev bounds` has it, by all weights together."""
    of = {run.name: run for run in runs}
    lines = [
        (of[c.of].role, of[c.of].times or 1.0, c.seed, c.step, c.mean_abs)
        for c in cells
        if c.layer == ALL and c.kind == ALL and c.mean_abs is not None
    ]
    return saturation(
        pd.DataFrame(lines, columns=["role", "times", "seed", "step", "value"])
    )


def standings(runs: Sequence[RunRecord], cells: Sequence[CellRow]) -> Iterator[Standing]:
    """Of every run that is none of chance, in every layer and kind, at every step."""
    chance = {run.name for run in runs if is_chance(run)}
    one = {
        run.name
        for run in runs
        if run.role == "null_rounding" and (run.times or 1.0) == 1.0
    }
    places = grouped(cells, lambda c: (c.step, c.layer, c.kind))
    for run in (run for run in runs if run.role in SHOWN_BESIDE and not run.null):
        for (step, layer, kind), here in places.items():
            own = {c.seed: c for c in here if c.of == run.name}
            nulls = grouped((c for c in here if c.of in chance), lambda c: c.seed)
            place: dict[str, Any] = {"variant": run.name, "role": run.role, "step": step}
            place |= {"layer": layer, "kind": kind}
            for metric in LIMITS if own else ():
                yield _standing(own, nulls, one or chance, metric, **place)


def _standing(
    own: Mapping[int, CellRow],
    nulls: Mapping[int, Sequence[CellRow]],
    usually: Collection[str],
    metric: Metric,
    **place: Any,
) -> Standing:
    """`usually`: the nulls that a ratio is over; a margin is over the farthest of all. A
    distance of 0 has no ratio, and does not stand out."""
    values = {seed: x for seed, c in own.items() if (x := getattr(c, metric))}
    beside: dict[int, list[float]] = {}
    usual: dict[int, float] = {}
    for seed in own:
        moved = [(c.of, x) for c in nulls.get(seed, ()) if (x := getattr(c, metric))]
        beside[seed] = [x for _, x in moved]
        base = [x for name, x in moved if name in usually]
        if base and seed in values:
            usual[seed] = statistics.geometric_mean(base)
    ratios = [values[seed] / usual[seed] for seed in usual]
    fewest = min(map(len, beside.values()))
    margin = None
    if fewest:
        margin = min(values.get(seed, 0.0) / max(x) for seed, x in beside.items())
    why: str | None = None
    if place["role"] not in JUDGED:
        why = ANOTHER
    elif ALL in (place["layer"], place["kind"]):
        why = WHOLE
    elif fewest < FEWEST_NULLS:
        few = {"s": "", "move": "moves"} if fewest == 1 else {"s": "s", "move": "move"}
        why = FEW.format(n=fewest, **few, least=FEWEST_NULLS) if values else SAME_THERE
    elif len(own) < FEWEST_SEEDS:
        why = FEW_SEEDS.format(n=len(own), s="s" * (len(own) > 1), least=FEWEST_SEEDS)
    return Standing(
        **place,
        metric=metric,
        value=statistics.geometric_mean(values.values()) if values else None,
        null=statistics.geometric_mean(usual.values()) if usual else None,
        ratio=statistics.geometric_mean(ratios) if ratios else None,
        least=min(ratios, default=None),
        most=max(ratios, default=None),
        margin=margin,
        stands_out=margin > LIMITS[metric]
        if why is None and margin is not None
        else None,
        why=why,
    )


# --- words ----------------------------------------------------------------------------

STANDS = (
    "{name} stands out in {where}: at step {step} it is at least {margin} times as "
    "far from "
    "{first} as the farthest null there, {metric}, in every seed; {n} of {all} "
    "places (the tensors "
    "of one kind in one layer) stand out, at {steps}."
)
NONE_STANDS = (
    "{name} stands out nowhere: in none of {all} places (the tensors of one kind in "
    "one layer) is "
    "it farther from {first} than chance by the rule, at {steps}."
)
NOT_JUDGED = "{name}: where it stands out is not judged: {why}."
UNMOVED = (
    "{name} moves {where} by at most {most}, where fewer than {least} nulls "
    "do: not judged there."
)
BY_CHANCE = (
    "{name} beside chance, {when}: {ranges} times as far, over places (geometric "
    "means over the "
    "seeds and steps at which both moved)."
)
OVER = "{name} over {other}, {when}: {ranges}, over places, where both moved ({seeds})."
SAME = (
    "{name} has {first}'s weights at every step: every element of the tensors that "
    "are not 0 in "
    "both{zeros}."
)


def answer(
    runs: Sequence[RunRecord],
    cells: Sequence[CellRow],
    found: Sequence[Standing],
    early: Sequence[int],
) -> Iterator[str]:
    """Where runs stand out, flash first; how far they are beside chance, and beside each
    other, over early steps; and which are the first run itself."""
    first = runs[0].name
    order = sorted(runs[1:], key=lambda run: _rank(run))
    same = [run for run in order if _is_same(run, cells)]
    judged = [run for run in order if run.role in JUDGED and run not in same]
    for run in judged:
        yield _where(run, first, [s for s in found if s.variant == run.name])
    for run in judged:
        yield from _unmoved(run, found)
    for run in judged:
        yield from _beside_chance(run, found, early)
    for run in (run for run in judged if run.role == "flash"):
        for other in (other for other in judged if other.role == "low_precision"):
            yield from _over(run, other, cells, early)
    for run in same:
        zeros = max(c.zeros for c in cells if c.of == run.name)
        words = f" ({zeros} are)" if zeros else ""
        yield SAME.format(name=run.name, first=first, zeros=words)


def _rank(run: RunRecord) -> int:
    return SHOWN_BESIDE.index(run.role) if run.role in SHOWN_BESIDE else len(SHOWN_BESIDE)


def _is_same(run: RunRecord, cells: Iterable[CellRow]) -> bool:
    own = [c for c in cells if c.of == run.name and c.layer == ALL and c.kind == ALL]
    return bool(own) and all(c.equal == 1 and not c.nonfinite_of for c in own)


T = TypeVar("T", CellRow, Standing)


def finest(some: Iterable[T]) -> list[T]:
    """Those of one kind in one layer, or in none."""
    return [x for x in some if ALL not in (x.layer, x.kind)]


def label_of(layer: Layer, kind: str) -> str:
    """`layer 2 attention`, `embedding outside layers`, `attention`, `layer 2`, `all
    weights`."""
    if layer == ALL:
        return "all weights" if kind == ALL else kind
    if layer == "none":
        return f"{'weights' if kind == ALL else kind} outside layers"
    return f"layer {layer}" + ("" if kind == ALL else f" {kind}")


def _where(run: RunRecord, first: str, found: Sequence[Standing]) -> str:
    tested = finest(found)
    judged = [s for s in tested if s.stands_out is not None]
    if not judged:
        why = next((s.why for s in tested if s.why), "it was kept at no step")
        return NOT_JUDGED.format(name=run.name, why=why)
    places = dict.fromkeys((s.layer, s.kind) for s in judged)
    out = [s for s in judged if s.stands_out]
    steps = _steps({s.step for s in out or judged})
    if not out:
        return NONE_STANDS.format(
            name=run.name, first=first, all=len(places), steps=steps
        )
    worst = max(out, key=lambda s: (s.margin or 0.0) / LIMITS[s.metric])
    n = len(dict.fromkeys((s.layer, s.kind) for s in out))
    return STANDS.format(
        name=run.name,
        first=first,
        where=label_of(worst.layer, worst.kind),
        step=worst.step,
        metric=IN[worst.metric],
        margin=times(worst.margin),
        n=n,
        all=len(places),
        steps=steps,
    )


def _unmoved(run: RunRecord, found: Sequence[Standing]) -> Iterator[str]:
    """Places that a run moves and chance does not, where there are others that are
    judged."""
    own = [s for s in finest(found) if s.variant == run.name and s.metric == "max_abs"]
    alone = [s for s in own if s.stands_out is None and s.value is not None]
    if alone and any(s.stands_out is not None for s in own):
        where = some(list(dict.fromkeys(label_of(s.layer, s.kind) for s in alone)))
        most = si(max(s.value or 0.0 for s in alone))
        yield UNMOVED.format(name=run.name, where=where, most=most, least=FEWEST_NULLS)


def _steps(steps: Iterable[int]) -> str:
    ends = sorted(steps)
    span = " to ".join(dict.fromkeys(map(str, (ends[0], ends[-1]))))
    return f"step{'s' * (ends[0] != ends[-1])} {span}"


def _ranges(values: Mapping[Metric, Sequence[float]]) -> str:
    """`0.9 to 1.1 in the mean, ...`; of each metric the ends."""
    parts = []
    for metric, own in values.items():
        ends = dict.fromkeys((times(min(own)), times(max(own))))
        parts.append(f"{' to '.join(ends)} {IN[metric]}")
    return ", ".join(parts)


def _beside_chance(
    run: RunRecord, found: Sequence[Standing], early: Sequence[int]
) -> Iterator[str]:
    """The ends over places of a run's ratios to chance, of each place the mean over
    steps."""
    values: dict[Metric, list[float]] = {}
    steps: set[int] = set()
    own = finest(s for s in found if s.variant == run.name and s.step in early)
    for (metric, _, _), here in grouped(
        own, lambda s: (s.metric, s.layer, s.kind)
    ).items():
        ratios = {s.step: s.ratio for s in here if s.ratio is not None}
        if ratios:
            values.setdefault(metric, []).append(
                statistics.geometric_mean(ratios.values())
            )
            steps |= set(ratios)
    if values:
        when = f"at {_steps(steps)}"
        yield BY_CHANCE.format(name=run.name, when=when, ranges=_ranges(values))


def _over(
    run: RunRecord, other: RunRecord, cells: Sequence[CellRow], early: Sequence[int]
) -> Iterator[str]:
    """One run's distance over another's of the same seed, step, layer and kind."""
    values: dict[Metric, list[float]] = {}
    steps: set[int] = set()
    seeds: set[int] = set()
    places = grouped(finest(cells), lambda c: (c.layer, c.kind))
    for metric in LIMITS:
        for here in places.values():
            both = {
                name: {(c.seed, c.step): x for c in here
                       if c.of == name and c.step in early and (x := getattr(c, metric))}
                for name in (run.name, other.name)
            }  # fmt: skip
            shared = both[run.name].keys() & both[other.name].keys()
            if shared:
                ratios = (
                    both[run.name][at] / both[other.name][at] for at in sorted(shared)
                )
                values.setdefault(metric, []).append(statistics.geometric_mean(ratios))
                seeds |= {seed for seed, _ in shared}
                steps |= {step for _, step in shared}
    if values:
        count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
        yield OVER.format(
            name=run.name,
            other=other.name,
            when=f"at {_steps(steps)}",
            ranges=_ranges(values),
            seeds=count,
        )
