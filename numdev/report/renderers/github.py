"""A judgement where people look on GitHub: annotations, and a step's summary.

Annotations are workflow commands, lines that begin with `::`; how they are escaped is that of
GitHub's own toolkit (actions/toolkit, packages/core/src/command.ts). Names of kernels and
layers come from elsewhere: they cannot end a line or a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from numdev.gate.verdict import Judgement
from numdev.report import Finding
from numdev.report.foreign import plain
from numdev.report.views.gate import Spot, problems_of

ERRORS = 10  # so many error annotations of a step GitHub shows, and so many warnings


def commands(
    judgement: Judgement,
    findings: Sequence[Finding],
    spots: Mapping[str, Spot] | None = None,
    root: Path | None = None,
) -> Iterator[str]:
    """A line for each problem, at most ten; then one that says how many more there are, a warning,
    since of errors GitHub would not show it. Those of a rule in a file under `root`, the
    repository, point at its line."""
    problems = list(problems_of(judgement, findings))
    for problem in problems[:ERRORS]:
        where = _where((spots or {}).get(problem.rule or ""), root)
        yield _command("error", where | {"title": problem.title}, problem.sentence)
    more = len(problems) - ERRORS
    if more > 0:
        text = f"{more} more, in the log of this step: GitHub shows {ERRORS} errors of one."
        yield _command("warning", {"title": "numdev gate"}, text)


def _where(spot: Spot | None, root: Path | None) -> dict[str, str]:
    """Without the file where it is outside of the repository, since there is no page of it."""
    if spot is None or root is None:
        return {}
    file, top = spot.file.resolve(), root.resolve()
    if not file.is_file() or not file.is_relative_to(top):
        return {}
    return {"file": file.relative_to(top).as_posix()} | (
        {} if spot.line is None else {"line": str(spot.line)}
    )


def _command(name: str, properties: Mapping[str, str], message: str) -> str:
    pairs = {k: _data(v).replace(":", "%3A").replace(",", "%2C") for k, v in properties.items()}
    return f"::{name} {','.join(f'{k}={v}' for k, v in pairs.items())}::{_data(message)}"


def _data(text: str) -> str:
    """No line break is left after `plain`; % has to be escaped for itself."""
    return plain(text).replace("%", "%25")
