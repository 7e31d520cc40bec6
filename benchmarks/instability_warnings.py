"""A warning rule on what is recorded besides the loss: fixed on some seeds, tested on others.

What is warned of is either definition of trouble (`instability_runs`): a loss above the golden
run's, or above its own least. A rule for a signal: alarm where its median over the
last TRAIL steps passes a threshold, the warm-up not counted. The threshold is fixed in two ways, by
the largest values that this median reached in each unbroken run of the seeds it is fixed on:

- none: the largest of them, so that none of those runs alarms. Runs that broke have no say in it.
  Of n unbroken runs the next one passes it with a chance of 1 / (n + 1). One run that nearly broke
  decides it, which on the first data left most signals mute; hence
- best: the one with the largest share of broken runs warned of less the share of unbroken ones that
  alarm (Youden's index); of several the largest.

No golden run stands beside a real training run, so none is used for the alarm. What counts is how a
threshold does on the other seeds.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from instability_runs import Run
from scipy.stats import binomtest

from numdev.diagnose.report import DiagnoseReport, HeadRow
from numdev.training.config import folder_of

TRAIL = 30
"""Steps: three rows at a row every 10, so that a single odd one does not alarm; one row where there
are fewer, as of checkpoints."""
Event = Callable[[Run], int | None]
"""When a run came to trouble; None: never."""
T_OF_DELTA = "diagnose: |t| of delta's error"
SHARE_OF_DELTA = "diagnose: delta's part of it, median head"
CHECKPOINT = re.compile(r"(?P<folder>.+)-seed(?P<seed>\d+)-step(?P<step>\d+)/?$")


@dataclass(frozen=True, kw_only=True)
class Count:
    """How many of how many."""

    some: int
    of: int

    @property
    def share(self) -> float:
        return self.some / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, Clopper and Pearson."""
        if not self.of:
            return None
        found = binomtest(self.some, self.of).proportion_ci(0.95, "exact")
        return float(found.low), float(found.high)


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A threshold on a set of runs."""

    warned: Count
    """Runs that broke, with an alarm before."""
    leads: tuple[int, ...]
    """Of these, steps from the alarm to the break."""
    false: Count
    """Unbroken runs, with an alarm."""

    @property
    def index(self) -> float:
        """Youden's."""
        return self.warned.share - self.false.share

    @property
    def lead(self) -> float | None:
        return statistics.median(self.leads) if self.leads else None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One signal's."""

    signal: str
    kind: str
    """How it was fixed: none or best."""
    threshold: float
    fixed: Tested
    """On the seeds it was fixed on."""
    tested: Tested
    chosen: bool = False
    """Whether Youden's index is largest for it on the seeds it was fixed on; of several the one
    that warns earliest."""


def smoothed(signal: pd.Series, warmup: int) -> pd.Series:
    """The median over the last TRAIL steps, from the end of the warm-up on."""
    timed = signal.set_axis(pd.to_timedelta(signal.index, unit="s"))
    found = timed.rolling(f"{TRAIL}s").median().set_axis(signal.index)
    # pandas takes infinity for missing in a rolling median; here it is above everything.
    found = found.where(signal != float("inf"), float("inf"))
    return found[found.index >= warmup]


def alarm(signal: pd.Series, threshold: float, warmup: int) -> int | None:
    """The first step at which the rule alarms."""
    found = smoothed(signal, warmup)
    above = found.index[found > threshold]
    return int(above[0]) if len(above) else None


def tested(runs: Iterable[Run], signal: str, threshold: float, event: Event) -> Tested:
    """How a threshold does on runs that have the signal. An alarm at the step of the event or later
    is none."""
    warned, broken, false, unbroken, leads = 0, 0, 0, 0, []
    for run in runs:
        if signal not in run.signals:
            continue
        trouble, at = event(run), alarm(run.signals[signal], threshold, run.warmup)
        if trouble is None:
            unbroken += 1
            false += at is not None
            continue
        broken += 1
        if at is not None and at < trouble:
            warned += 1
            leads.append(trouble - at)
    return Tested(
        warned=Count(some=warned, of=broken),
        leads=tuple(leads),
        false=Count(some=false, of=unbroken),
    )


def thresholds(runs: Sequence[Run], signal: str, event: Event) -> dict[str, float]:
    """By how they are fixed; empty where no unbroken run has a value."""
    unbroken = (run for run in runs if event(run) is None and signal in run.signals)
    values = [float(smoothed(run.signals[signal], run.warmup).max()) for run in unbroken]
    numbers = sorted({x for x in values if not math.isnan(x)}, reverse=True)
    if not numbers:
        return {}
    best = max(numbers, key=lambda x: tested(runs, signal, x, event).index)
    return {"none": numbers[0], "best": best}


def rules(runs: Sequence[Run], fixed_on: Sequence[int], event: Event) -> list[Rule]:
    """Two for each signal that an unbroken run of these seeds has, tested on all other seeds; one
    where both thresholds are the same."""
    ours = [run for run in runs if run.seed in fixed_on]
    others = [run for run in runs if run.seed not in fixed_on]
    found = []
    for signal in dict.fromkeys(name for run in runs for name in run.signals):
        seen = set()
        for kind, threshold in thresholds(ours, signal, event).items():
            if threshold not in seen:
                fixed, on_others = (tested(s, signal, threshold, event) for s in (ours, others))
                rule = Rule(
                    signal=signal, kind=kind, threshold=threshold, fixed=fixed, tested=on_others
                )
                found.append(rule)
            seen.add(threshold)
    warned = [rule for rule in found if rule.fixed.leads]
    best = max(warned, key=lambda rule: (rule.fixed.index, rule.fixed.lead or 0.0), default=None)
    return [dataclasses.replace(rule, chosen=rule is best) for rule in found]


# --- what diagnose says of checkpoints -----------------------------------------------------------


def place_of(checkpoint: str) -> tuple[str, int, int] | None:
    """Of a checkpoint's directory, VARIANT-seedS-stepN: what it begins with, seed and step."""
    found = CHECKPOINT.search(checkpoint.rstrip("/").rpartition("/")[2])
    return (found["folder"], int(found["seed"]), int(found["step"])) if found else None


def with_diagnosis(runs: Iterable[Run], reports: Iterable[DiagnoseReport]) -> list[Run]:
    """The runs, with signals of their checkpoints' heads where a report has them. A checkpoint goes
    by its directory, so the reports are of checkpoints of these runs; where two settings have a
    variant and seed, of the first."""
    series: dict[tuple[str, int], dict[int, list[HeadRow]]] = {}
    for head in (head for report in reports for head in report.heads):
        place = place_of(head.checkpoint)
        if place:
            series.setdefault(place[:2], {}).setdefault(place[2], []).append(head)
    found = []
    for run in runs:
        steps = series.pop((folder_of(run.variant), run.seed), {})
        signals = run.signals | _of_heads(dict(sorted(steps.items())))
        found.append(dataclasses.replace(run, signals=signals))
    return found


def _of_heads(steps: Mapping[int, Sequence[HeadRow]]) -> dict[str, pd.Series]:
    """The largest over layers and heads, by step, of what has a number at any of them; and the
    median, since a single head's relative error is infinite where its gradient vanishes."""
    found: dict[str, dict[int, float]] = {}
    for step, heads in steps.items():
        numbers = [_numbers(head) for head in heads]
        for name in dict.fromkeys(name for own in numbers for name in own):
            values = [own[name] for own in numbers if name in own]
            found.setdefault(name, {})[step] = max(values)
            found.setdefault(f"{name}, median head", {})[step] = statistics.median(values)
    return {name: pd.Series(values, dtype=float) for name, values in found.items()}


def _numbers(head: HeadRow) -> dict[str, float]:
    run, t = (head.delta[0].run, head.delta[0].t) if head.delta else (None, None)
    share = None
    if head.dw_q_error and head.dw_q_predicted is not None:
        share = head.dw_q_predicted / head.dw_q_error
    given = {
        "diagnose: tied rows": head.tied,
        "diagnose: dS row sum": head.ds_row_sum,
        "diagnose: dW_Q error": head.dw_q_error,
        "diagnose: delta's part of it": share,
        "diagnose: delta's running error": run,
        T_OF_DELTA: None if t is None else abs(t),
    }
    return {name: value for name, value in given.items() if value is not None}
