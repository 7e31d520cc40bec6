"""What `numdev gate` prints: the outcome, what is wrong, then a line for each rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from numdev.render.terminal import FINDINGS, _text
from numdev.report import Finding
from numdev.verdict import Judgement, Verdict

OUTCOMES = {
    "passed": ("passed", "green"),
    "exceeded": ("EXCEEDED", "bold red"),
    "unmeasured": ("NOT MEASURED", "bold red"),
    "untested": ("not judged", "dim"),
}
GRAVITY = ("exceeded", "unmeasured", "passed", "untested")


def show(
    judgement: Judgement,
    findings: Sequence[Finding],
    tested: Sequence[str],
    console: Console | None = None,
) -> None:
    """Print a judgement; `findings` are its exceeded verdicts in sentences."""
    out = console or Console()
    word, style = OUTCOMES[judgement.outcome]
    out.print()
    out.print(_text(f"{word.upper()}, by the rules {judgement.rules}.", style))
    for finding in findings:
        out.print(_text(finding.sentence, FINDINGS[finding.severity]))
    for line in _unmeasured(judgement):
        out.print(_text(line, "yellow"))
    out.print(_table(judgement))
    for line in (*tested, *_beside(judgement)):
        out.print(_text(line, "dim"))


def _table(judgement: Judgement) -> Table:
    """A line for each rule: where it came nearest to its limit, or went beyond."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in ("rule", "", "heads", "worst", "limit", "in"):
        right = column in ("heads", "worst")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    for rule in dict.fromkeys(v.rule for v in judgement.verdicts):
        these = [v for v in judgement.verdicts if v.rule == rule]
        worst = min(these, key=_rank)
        word, style = OUTCOMES[worst.outcome]
        judged = sum(v.judged for v in these)
        bad = sum(v.offending for v in these)
        table.add_row(
            _text(rule),
            Text(word, style),
            f"{bad}/{judged}" if bad else str(judged or "-"),
            _text(_number(worst)),
            _text(worst.limit.removeprefix(f"{worst.metric} ")),
            _text(" ".join((worst.kernel or "-", worst.tensor or "", worst.format or ""))),
        )
    return table


def _rank(verdict: Verdict) -> tuple[int, float]:
    """The gravest outcome first, then by how near to the limit."""
    near = 0.0
    if isinstance(verdict.observed, float):
        near = abs(verdict.observed) / (verdict.bound or 1.0)
    return GRAVITY.index(verdict.outcome), -near


def _number(verdict: Verdict) -> str:
    if isinstance(verdict.observed, float):
        return f"{verdict.observed:.3g}"
    return verdict.observed or "-"


def _unmeasured(judgement: Judgement) -> Iterator[str]:
    """What could not be judged and had to be."""
    for name in judgement.missing:
        yield f"{name} is required and not in this report."
    if not any(call.ok for call in judgement.calls):
        yield "No kernel under audit was measured."
    lacking: dict[tuple[str, str, tuple[str, ...]], list[Verdict]] = {}
    for v in judgement.verdicts:
        if v.outcome == "unmeasured":
            lacking.setdefault((v.rule, v.limit, v.reasons), []).append(v)
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
