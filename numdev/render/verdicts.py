"""What `numdev gate` prints: the outcome; what is wrong, the worst row first; what passed, in a
line; what could have been caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console

from numdev.gate import Decided
from numdev.render import standing
from numdev.render.terminal import FINDINGS, _text
from numdev.report import Finding, Place
from numdev.verdict import Judgement, Verdict

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
    for line in _unmeasured(judgement):
        out.print(_text(line, "yellow"))
    kept = standing.passed(judgement.verdicts)
    if kept:
        out.print(_text(kept, "green"))
    for line in (*tested, *_beside(judgement)):
        out.print(_text(line, "dim"))
    curves = standing.doses(judgement.power)
    out.print(curves if curves is not None else _text(NO_POWER, "dim"))


NO_POWER = (
    "No planted faults in this report, so nobody knows what these limits would have caught on this "
    "data: audit with --control."
)


def _unmeasured(judgement: Judgement) -> Iterator[str]:
    """What could not be judged and had to be."""
    for name in judgement.missing:
        at = f" ({judgement.file}:{judgement.required_line})" if judgement.required_line else ""
        yield f"{name} is required and not in this report{at}."
    if not any(call.ok for call in judgement.calls):
        yield "No kernel under audit was measured."
    lacking: dict[tuple[str, str, tuple[str, ...]], list[Verdict]] = {}  # by what is said
    for v in judgement.verdicts:
        if v.outcome == "unmeasured":
            lacking.setdefault((standing.sourced(v), v.limit, v.reasons), []).append(v)
    for (rule, limit, reasons), these in lacking.items():
        who = dict.fromkeys(f" of {v.kernel} ({v.tensor}, {v.format})" for v in these if v.kernel)
        heads = sum(v.unjudged for v in these)
        where = f" in {heads} heads{','.join(who)}" if who else ""
        limited = f" ({limit})" if limit else ""
        yield f"{rule}{limited} could not be judged{where}: {'; '.join(reasons[:3])}."


def _beside(judgement: Judgement) -> Iterator[str]:
    """What is told, and not judged."""
    if judgement.fa_rule is not None:
        passing, heads = judgement.fa_rule
        yield f"flash-attention's own 2 x rule, for comparison: {passing} of {heads} heads pass."
    for call in judgement.calls:
        if not call.ok and call.skipped and not call.required:
            what = " backward" if call.backward else ""
            yield f"{call.kernel}{what} ({call.format}) was skipped: {'; '.join(call.reasons[:3])}"
