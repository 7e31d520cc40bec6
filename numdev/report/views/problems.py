"""What every rendering of a verdict says: what is wrong, a line for each rule, where rules stand.

The terminal, JUnit, and GitHub's summary and annotations take their sentences from here, so that
they cannot say different things. A judgement that did not pass has at least one problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from numdev.gate.rules import Rules
from numdev.gate.verdict import Judgement, Outcome, Verdict
from numdev.gate.wording import label
from numdev.report import Finding

GRAVITY = ("exceeded", "unmeasured", "passed", "untested")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a judgement did not pass."""

    severity: Literal["exceeded", "unmeasured"]
    title: str
    """The kernel, and what is judged."""
    sentence: str
    rule: str | None = None
    """The threshold that says so; None where none does."""


def problems_of(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[Problem]:
    """All of them, the gravest first; none exactly where the judgement passed. `findings` are its
    own (`numdev.findings`); their notes are no problems."""
    for finding in findings:
        if finding.severity == "exceeded":
            title = f"{finding.kernel}: {finding.rule}"
            yield Problem(
                severity="exceeded", title=title, sentence=finding.sentence, rule=finding.rule
            )
    for finding in findings:
        if finding.severity == "unmeasured":
            title = f"{finding.kernel} did not run"
            yield Problem(severity="unmeasured", title=title, sentence=finding.sentence)
    yield from unmeasured(judgement)


def unmeasured(judgement: Judgement) -> Iterator[Problem]:
    """What could not be judged and had to be, but for kernels that failed, which are findings."""
    for name in judgement.missing:
        at = f" ({judgement.file}:{judgement.required_line})" if judgement.required_line else ""
        yield _unmeasured("a required kernel", f"{name} is required and not in this report{at}.")
    if not any(call.ok for call in judgement.calls):
        yield _unmeasured("no kernel", "No kernel under audit was measured.")
    elif not any(v.outcome != "untested" for v in judgement.verdicts):
        yield _unmeasured("nothing judged", "No rule could be applied to any row.")
    lacking: dict[tuple[str, str, tuple[str, ...]], list[Verdict]] = {}  # by what is said
    for v in judgement.verdicts:
        if v.outcome == "unmeasured":
            lacking.setdefault((sourced(v), v.limit, v.reasons), []).append(v)
    for (source, limit, reasons), these in lacking.items():
        rule = these[0].rule
        who = dict.fromkeys(f" of {v.kernel} ({v.tensor}, {v.format})" for v in these if v.kernel)
        heads = sum(v.unjudged for v in these)
        where = f" in {heads} heads{','.join(who)}" if who else ""
        limited = f" ({limit})" if limit else ""
        yield _unmeasured(
            f"{rule} not judged",
            f"{source}{limited} could not be judged{where}: {'; '.join(reasons[:3])}.",
            rule,
        )


def sourced(verdict: Verdict) -> str:
    """The rule and where it stands: `error (ci.yaml:12)`."""
    if verdict.file is None:
        return verdict.rule
    line = "" if verdict.line is None else f":{verdict.line}"
    return f"{verdict.rule} ({verdict.file}{line})"


def _unmeasured(title: str, sentence: str, rule: str | None = None) -> Problem:
    return Problem(severity="unmeasured", title=title, sentence=sentence, rule=rule)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One rule in a table: where it came nearest to its limit, or went beyond."""

    rule: str
    outcome: Outcome
    heads: str
    worst: str
    limit: str
    where: str


def lines_of(judgement: Judgement) -> Iterator[Line]:
    """A line for each rule, in the rules' order."""
    for rule in dict.fromkeys(v.rule for v in judgement.verdicts):
        these = [v for v in judgement.verdicts if v.rule == rule]
        worst = min(these, key=_rank)
        judged = sum(v.judged for v in these)
        bad = sum(v.offending for v in these)
        yield Line(
            rule=rule,
            outcome=worst.outcome,
            heads=f"{bad}/{judged}" if bad else str(judged or "-"),
            worst=number(worst),
            limit=worst.limit.removeprefix(f"{worst.metric} "),
            where=" ".join((worst.kernel or "-", worst.tensor or "", worst.format or "")),
        )


def _rank(verdict: Verdict) -> tuple[int, float]:
    """The gravest outcome first, then by how near to the limit."""
    near = 0.0
    if isinstance(verdict.observed, float):
        near = abs(verdict.observed) / (verdict.bound or 1.0)
    return GRAVITY.index(verdict.outcome), -near


def number(verdict: Verdict) -> str:
    """What was observed, in three digits or in words; - where nothing was."""
    if isinstance(verdict.observed, float):
        return f"{verdict.observed:.3g}"
    return verdict.observed or "-"


def beside(judgement: Judgement) -> Iterator[str]:
    """What is told, and not judged."""
    if judgement.fa_rule is not None:
        passing, heads = judgement.fa_rule
        yield f"flash-attention's own 2 x rule, for comparison: {passing} of {heads} heads pass."
    for call in judgement.calls:
        if not call.ok and call.skipped and not call.required:
            what = " backward" if call.backward else ""
            yield f"{label(call)}{what} ({call.format}) was skipped: {'; '.join(call.reasons[:3])}"


# --- where a rule stands -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A line of a rule file."""

    file: Path
    line: int | None
    """From 1 on."""

    def __str__(self) -> str:
        return f"{self.file}" if self.line is None else f"{self.file}:{self.line}"


def spots_of(rules: Rules, file: Path) -> dict[str, Spot]:
    """Where each threshold of `rules` begins, by its name. `file` is what they were read from, for
    thresholds that do not say it themselves."""
    return {t.name: Spot(file=Path(t.file or file), line=t.line) for t in rules.thresholds}
