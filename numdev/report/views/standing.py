"""The parts of a printed verdict: who is beyond which limit, what passed, what would be caught."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.table import Table

from numdev.gate.held import Held
from numdev.gate.judging import Judged
from numdev.gate.verdict import Dose, Power, Verdict
from numdev.gate.wording import label
from numdev.report import Finding, Place
from numdev.report.renderers.terminal import _text
from numdev.report.views.problems import sourced

SHOWN = 12
"""So many offending rows are shown, the worst of all rules first."""


def offending(judged: Iterable[Judged], named: Callable[[Place], str]) -> Table | None:
    """A line for each row that is beyond a limit, the one farthest beyond first; None without."""
    beyond = [(held, each.verdict) for each in judged for held in each.beyond]
    if not beyond:
        return None
    beyond.sort(key=lambda pair: -pair[0].excess)
    table = _table("over", "kernel", "in", "where", "number", "limit", "rule")
    for held, verdict in beyond[:SHOWN]:
        table.add_row(
            *map(
                _text,
                (
                    f"{held.excess:.3g} x" if math.isfinite(held.excess) else "-",
                    label(verdict),
                    f"{verdict.tensor} {verdict.format}",
                    named(Place.of(held.row)),
                    _number(held),
                    str(held.limit),
                    verdict.rule,
                ),
            )
        )
    if len(beyond) > SHOWN:
        table.caption = f"and {len(beyond) - SHOWN} more"
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    table.caption_justify = "left"
    return table


def _number(held: Held) -> str:
    value = held.row.suspicion if held.limit.absent else held.value
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def said(finding: Finding, verdicts: Sequence[Verdict]) -> str:
    """A finding, with where its rule stands."""
    rule = next((v for v in verdicts if v.rule == finding.rule), None)
    return finding.sentence if rule is None else f"{finding.sentence} Rule: {sourced(rule)}."


def passed(verdicts: Sequence[Verdict]) -> str:
    """One line: the rules that passed, each where it came nearest to its limit; empty if none."""
    rules = dict.fromkeys(v.rule for v in verdicts)
    said = []
    for rule in rules:
        these = [v for v in verdicts if v.rule == rule]
        if any(v.outcome == "passed" for v in these) and all(
            v.outcome in ("passed", "untested") for v in these
        ):
            said.append(f"{rule}{_nearest([v for v in these if v.outcome == 'passed'])}")
    return f"Passed: {'; '.join(said)}." if said else ""


def _nearest(verdicts: Sequence[Verdict]) -> str:
    """The number nearest to its limit, in brackets, and what was excused."""
    worst = max(verdicts, key=_nearness)
    excused = sum(v.excused for v in verdicts)
    words = []
    if isinstance(worst.observed, float | int):
        words.append(f"{worst.observed:.3g}, {worst.limit.removeprefix(f'{worst.metric} ')}")
    if excused:
        words.append(f"{excused} beyond it, within the old seeds' spread or noise")
    return f" ({'; '.join(words)})" if words else ""


def _nearness(verdict: Verdict) -> float:
    if not isinstance(verdict.observed, float | int):
        return 0.0
    return abs(verdict.observed) / (verdict.bound or 1.0)


def doses(power: Sequence[Power]) -> Table | None:
    """A line for each planted fault in each format: its doses, what caught them; None without."""
    if not power:
        return None
    table = _table("planted fault", "format", "missed", "caught", "caught from", "by")
    for each in power:
        by = dict.fromkeys(rule for dose in each.doses for rule in dose.by)
        known = any(dose.outcome != "unmeasured" for dose in each.doses)
        never = "at no dose" if known else "not measured"
        table.add_row(
            *map(
                _text,
                (
                    each.fault,
                    each.format,
                    " ".join(_sizes(each.doses, "missed")),
                    " ".join(_sizes(each.doses, "caught")),
                    never if each.caught_from is None else f"{each.caught_from:g}",
                    ", ".join(by),
                ),
            )
        )
    return table


def _sizes(tried: Iterable[Dose], outcome: str) -> Iterator[str]:
    return (f"{dose.dose:g}" for dose in tried if dose.outcome == outcome)
