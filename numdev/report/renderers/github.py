"""A judgement where people look on GitHub: annotations, and a step's summary.

Annotations are workflow commands, lines that begin with `::`; how they are escaped is that of
GitHub's own toolkit (actions/toolkit, packages/core/src/command.ts). Names of kernels and
layers come from elsewhere: they cannot end a line or a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.gate.verdict import Judgement
from numdev.report import Finding
from numdev.report.foreign import plain
from numdev.report.views.gate import problems_of

ERRORS = 10  # so many error annotations of a step GitHub shows, and so many warnings


def commands(judgement: Judgement, findings: Sequence[Finding]) -> Iterator[str]:
    """A line for each problem, at most ten; then one that says how many more there are, a warning,
    since of errors GitHub would not show it."""
    problems = list(problems_of(judgement, findings))
    for problem in problems[:ERRORS]:
        yield _command("error", problem.title, problem.sentence)
    more = len(problems) - ERRORS
    if more > 0:
        text = f"{more} more, in the log of this step: GitHub shows {ERRORS} errors of one."
        yield _command("warning", "numdev gate", text)


def _command(name: str, title: str, message: str) -> str:
    title = _data(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{name} title={title}::{_data(message)}"


def _data(text: str) -> str:
    """No line break is left after `plain`; % has to be escaped for itself."""
    return plain(text).replace("%", "%25")
