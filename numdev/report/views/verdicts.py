"""What `numdev gate` prints: the outcome; what is wrong, the worst row first; what passed, in a
line; what could have been caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from numdev.gate.judging import Decided
from numdev.report import Finding, Place
from numdev.report.renderers.terminal import FINDINGS, _text
from numdev.report.views import standing
from numdev.report.views.problems import beside, unmeasured

OUTCOMES = {
    "passed": ("passed", "green"),
    "exceeded": ("EXCEEDED", "bold red"),
    "unmeasured": ("NOT MEASURED", "bold red"),
    "untested": ("not judged", "dim"),
}


def show(
    decided: Decided,
    findings: Sequence[Finding],
    tested: Sequence[str],
    named: Callable[[Place], str],
    console: Console | None = None,
) -> None:
    """Print what was decided; `findings` are its exceeded verdicts in sentences, and `named` says
    what a place is called."""
    out, judgement = console or Console(), decided.judgement
    word, style = OUTCOMES[judgement.outcome]
    out.print()
    out.print(_text(f"{word.upper()}, by the rules {judgement.rules}.", style))
    beyond = standing.offending(decided.judged, named)
    if beyond is not None:
        out.print(beyond)
    for finding in findings:
        sentence = standing.said(finding, judgement.verdicts)
        out.print(_text(sentence, FINDINGS[finding.severity]))
    for problem in unmeasured(judgement):
        out.print(_text(problem.sentence, "yellow"))
    kept = standing.passed(judgement.verdicts)
    if kept:
        out.print(_text(kept, "green"))
    for line in (*tested, *beside(judgement)):
        out.print(_text(line, "dim"))
    curves = standing.doses(judgement.power)
    out.print(curves if curves is not None else _text(NO_POWER, "dim"))


NO_POWER = (
    "No planted faults in this report, so nobody knows what these limits would have caught on this "
    "data: audit with --control."
)
