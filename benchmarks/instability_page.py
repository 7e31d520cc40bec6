"""The page that `benchmarks/instability.py` prints: runs, failures, warnings and effects as tables
in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from instability_effects import ON_PLATEAU, Effect, signs
from instability_runs import BROKEN_BY, HOLD, LEARNING, MEAN, Run
from instability_sites import Sites
from instability_warnings import Count, Event, Rule, Tested
from scipy.stats import CensoredData, ecdf

from numdev.report.statistics import Mean, interval

Rules = dict[tuple[str, str], list[Rule]]
"""By setting and what is warned of."""
EVENTS: dict[str, Event] = {
    "left": lambda run: run.left, "broke": lambda run: run.broke, "rose": lambda run: run.rose,
}  # fmt: skip
PAIRS_SHOWN = (ON_PLATEAU, "broke")
"""Responses whose pairs are shown one by one; of the others the means are. With --csv all are
written, and what is of a single
seed or zero in all, and interactions of three."""
LEGEND = (
    f"Left: the loss stayed below {LEARNING} nats for {HOLD} steps, and the run is off the plateau "
    "(marked \\*). Broke: "
    f"{BROKEN_BY} nats or more above its golden run for {HOLD} steps. Rose: its mean over {MEAN} "
    f"steps that much above the least it had been, for {HOLD} steps. One basin: it and its golden "
    "run both left, or both stayed. Intervals are 95 %."
)


def page(
    runs: Sequence[Run], fixed: Rules, found: Sequence[Effect], seeds: Sequence[int],
    stopped: Sequence[str] = (),
) -> str:  # fmt: skip
    """Everything as Markdown. `stopped` says which runs have no report."""
    parts = [LEGEND, *stopped]
    for setting in dict.fromkeys(run.setting for run in runs):
        ours = [run for run in runs if run.setting == setting]
        parts += [f"## {setting}", losses(ours), "Failures", failures(ours)]
        parts += ["Runs that stayed on the plateau, by what they round", by_level(ours)]
        for (of, event), own in fixed.items():
            if of == setting:
                told = f"Warnings of runs that {event}, fixed on seeds {', '.join(map(str, seeds))}"
                parts += [told, warnings(own)]
        parts += ["Effects", contrasts([e for e in found if e.setting == setting])]
    parts += ["## All settings", "Broke, by setting, and the median step", by_setting(runs)]
    parts += ["Signs of the means of pairs, over seeds and settings", sign_tests(found)]
    return "\n\n".join(parts)


# --- what became of the runs ---------------------------------------------------------------------


def losses(runs: Sequence[Run]) -> str:
    """By variant: what it rounds, its last loss by seed, how far above the golden run it ended over
    all seeds, those in which both stayed and those in which both left, and the largest excess that
    a run held."""
    head = (
        "variant", "S", "O", "dP", "delta", "loss by seed", "above golden",
        "both stayed", "both left", "most held",
    )  # fmt: skip
    return table(head, (_loss_row(name, own) for name, own in by_variant(runs).items()))


def _loss_row(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    one = [run for run in runs if run.one_basin]
    return (
        name, *_told(runs[0]),
        " / ".join(number(run.ended) + "\\*" * (run.left is not None) for run in runs),
        _mean([run.late for run in runs]),
        _mean([run.late for run in one if run.left is None]),
        _mean([run.late for run in one if run.left is not None]),
        number(max(run.held for run in runs)),
    )  # fmt: skip


def _told(run: Run) -> tuple[str, ...]:
    """The columns; of a crossed one as forward / backward where the two differ."""
    behind = run.behind if run.crossed else run.sites
    return tuple(_cell(run.sites, behind, name) for name in ("S", "O", "dP", "delta"))


def _cell(own: Sites | None, behind: Sites | None, name: str) -> str:
    first, second = (getattr(sites, name, "?") for sites in (own, behind))
    if name in ("dP", "delta"):  # of backward alone
        return str(second)
    return str(first) if first == second else f"{first} / {second}"


def failures(runs: Sequence[Run]) -> str:
    """By variant: how many left, broke and rose, and of the last two the steps."""
    head = (
        "variant", "left", "at step, median", "broke", "broke in one basin", "at step",
        "median", "rose", "at step", "median",
    )  # fmt: skip
    return table(head, (_failure_row(name, own) for name, own in by_variant(runs).items()))


def _failure_row(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    one = [run for run in runs if run.one_basin]
    left, broke, rose = EVENTS.values()
    return (
        name, count(happened(runs, left)), median_step(runs, left),
        count(happened(runs, broke)), count(happened(one, broke)), *_when(runs, broke),
        count(happened(runs, rose)), *_when(runs, rose),
    )  # fmt: skip


def _when(runs: Sequence[Run], event: Event) -> tuple[str, str]:
    if not happened(runs, event).some:
        return "", median_step(runs, event)
    steps = (f"> {run.last}" if event(run) is None else str(event(run)) for run in runs)
    return " / ".join(steps), median_step(runs, event)


def happened(runs: Sequence[Run], event: Event) -> Count:
    return Count(some=sum(event(run) is not None for run in runs), of=len(runs))


def median_step(runs: Sequence[Run], event: Event = EVENTS["broke"]) -> str:
    """Kaplan and Meier's median: the first step by which it has happened to half of the runs. Of a
    run to which it did not happen, it is known only that it came to its last step."""
    steps = [step for run in runs if (step := event(run)) is not None]
    whole = [run.last for run in runs if event(run) is None]
    left = ecdf(CensoredData(uncensored=steps, right=whole)).sf
    half = [int(q) for q, p in zip(left.quantiles, left.probabilities, strict=True) if p <= 0.5]
    return str(half[0]) if half else f"> {max(whole)}"


def by_setting(runs: Sequence[Run]) -> str:
    """By what is rounded and by setting: how many runs broke, and the median step."""
    settings = list(dict.fromkeys(run.setting for run in runs))
    cells: dict[Sites, dict[str, list[Run]]] = {}
    for run in runs:
        if run.sites is not None and not run.crossed:
            cells.setdefault(run.sites, {}).setdefault(run.setting, []).append(run)
    rows = [
        (
            sites.kernel,
            *_told(next(iter(by.values()))[0]),
            *(_broke(by.get(s, [])) for s in settings),
        )
        for sites, by in cells.items()
        if any(happened(own, EVENTS["broke"]).some for own in by.values())
    ]
    return table(("kernel", "S", "O", "dP", "delta", *settings), rows) if rows else "No run broke."


def _broke(runs: Sequence[Run]) -> str:
    found = happened(runs, EVENTS["broke"])
    return f"{found.some} of {found.of}, {median_step(runs)}" if runs else ""


def by_level(runs: Sequence[Run]) -> str:
    """Of all runs whose sites are known, pooled: how many stayed, and what became of those. Runs of
    one seed are not independent, so these intervals are too narrow."""
    known = [run for run in runs if run.sites is not None and not run.crossed]
    rows = []
    for column in ("S", "O", "dP", "delta"):
        for level in dict.fromkeys(getattr(run.sites, column) for run in known):
            ours = [run for run in known if getattr(run.sites, column) == level]
            stayed = [run for run in ours if run.left is None]
            rows.append(
                (column, level, count(Count(some=len(stayed), of=len(ours))),
                 count(happened(stayed, EVENTS["rose"])), _mean([run.ended for run in stayed]))
            )  # fmt: skip
    return table(("", "", "stayed", "of these rose", "their loss"), rows)


def by_variant(runs: Iterable[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.variant, []).append(run)
    return {name: sorted(own, key=lambda run: run.seed) for name, own in found.items()}


# --- warnings, effects ---------------------------------------------------------------------------


def warnings(found: Sequence[Rule]) -> str:
    """By signal: its threshold, and how it does on both sets of seeds; the chosen one is bold."""
    if not any(rule.fixed.warned.of or rule.tested.warned.of for rule in found):
        return "There were none, or only such runs: there is nothing to fix a rule on."
    head = (
        "signal", "false alarms: none or best", "threshold", "warned of", "lead", "false alarms",
        "tested: warned of", "lead", "false alarms",
    )  # fmt: skip
    rows = (
        (
            f"**{rule.signal}**" if rule.chosen else rule.signal,
            rule.kind, f"{rule.threshold:.3g}",
            count(rule.fixed.warned), _lead(rule.fixed), count(rule.fixed.false),
            count(rule.tested.warned), _lead(rule.tested), count(rule.tested.false),
        )
        for rule in found
    )  # fmt: skip
    return table(head, rows)


def _lead(found: Tested) -> str:
    if found.lead is None:
        return "–"
    return f"{found.lead:g} ({min(found.leads)} to {max(found.leads)})"


def contrasts(found: Sequence[Effect]) -> str:
    shown = [
        e
        for e in found
        if e.seeds > 1
        and any(value for _, value in e.by_seed)
        and e.factor.count(" x ") < 2
        and (e.kind != "pair" or e.response in PAIRS_SHOWN)
        and not (e.kind == "factorial" and " x " not in e.factor)  # the means of pairs say it
    ]
    if not shown:
        return "No two variants of two seeds differ in one of the columns alone."
    rows = ((e.response, e.name, span(e.mean), str(e.seeds), str(e.lost)) for e in shown)
    return table(("response", "effect", "mean", "seeds", "left out"), rows)


def sign_tests(found: Sequence[Effect]) -> str:
    rows = [(s.response, s.name, f"{s.above} of {s.of}", f"{s.p:.2g}") for s in signs(found)]
    return table(("response", "effect", "above zero", "p"), rows) if rows else "There are none."


# --- words ---------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines)


def number(x: float) -> str:
    return f"{x:.3f}" if math.isfinite(x) else ("> all" if x == math.inf else "–")


def _mean(values: Sequence[float]) -> str:
    """With how many they are."""
    if not values or not all(map(math.isfinite, values)):
        return "–"
    return f"{span(interval(values))} ({len(values)})"


def span(found: Mean) -> str:
    mean, low, high = found
    return f"{mean:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def count(found: Count) -> str:
    ends = found.interval
    return f"{found.some} of {found.of}" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")
