"""A judgement where people look on GitHub: annotations, and a step's summary.

Annotations are workflow commands, lines that begin with `::`; how they are escaped is that of
GitHub's own toolkit (actions/toolkit, packages/core/src/command.ts). A summary is Markdown. Names
of kernels and layers come from elsewhere: in neither can they end a line, a cell or a command, nor
begin markup of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from numdev.gate.verdict import Judgement
from numdev.report import Finding
from numdev.report.foreign import plain
from numdev.report.views.problems import Line, Problem, Spot, beside, lines_of, problems_of

ERRORS = 10
"""So many error annotations of a step GitHub shows, and so many warnings."""
SENTENCES = 50
"""A summary longer than 1 MiB is not shown at all."""
OUTCOMES = {
    "passed": "✅ passed",
    "exceeded": "❌ exceeded",
    "unmeasured": "⚠️ not measured",
    "untested": "➖ not judged",
}


# --- annotations ---------------------------------------------------------------------------------


def commands(
    judgement: Judgement,
    findings: Sequence[Finding],
    spots: Mapping[str, Spot] | None = None,
    root: Path | None = None,
) -> Iterator[str]:
    """A line for each problem, at most ten; then one that says how many more there are, a warning,
    since of errors GitHub would not show it. Those of a rule in a file under `root`, the
    repository, point at its line."""
    problems = problems_of(judgement, findings)
    for problem in islice(problems, ERRORS):
        spot = (spots or {}).get(problem.rule or "")
        yield _command("error", problem.title, problem.sentence, _properties(spot, root))
    more = sum(1 for _ in problems)
    if more:
        text = f"{more} more, in the log of this step: GitHub shows {ERRORS} errors of one."
        yield _command("warning", "numdev gate", text, {})


def _properties(spot: Spot | None, root: Path | None) -> dict[str, str]:
    """Without the file where it is outside of the repository, since there is no page of it."""
    if spot is None or root is None:
        return {}
    file, top = spot.file.resolve(), root.resolve()
    if not file.is_file() or not file.is_relative_to(top):
        return {}
    line = {} if spot.line is None else {"line": str(spot.line)}
    return {"file": file.relative_to(top).as_posix(), **line}


def _command(name: str, title: str, message: str, properties: Mapping[str, str]) -> str:
    given = ",".join(f"{k}={_property(v)}" for k, v in {**properties, "title": title}.items())
    return f"::{name} {given}::{_data(message)}"


def _data(text: str) -> str:
    """Line breaks cannot be left after `plain`; % has to be escaped for itself."""
    return plain(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# --- the summary of a step -----------------------------------------------------------------------


def summary(judgement: Judgement, findings: Sequence[Finding], tested: Sequence[str] = ()) -> str:
    """The judgement as Markdown: the outcome, what is wrong, a table of rules, what was judged."""
    problems = list(problems_of(judgement, findings))
    parts = [f"### numdev gate: {OUTCOMES[judgement.outcome]}", *_wrong(problems)]
    parts.append(_table(list(lines_of(judgement))))
    notes = [finding.sentence for finding in findings if finding.severity == "note"]
    by = f"By the rules {judgement.rules}."
    parts += [f"- {markdown(line)}" for line in (by, *notes, *tested, *beside(judgement))]
    return _joined(parts)


def _wrong(problems: Sequence[Problem]) -> Iterator[str]:
    for problem in problems[:SENTENCES]:
        yield f"- {OUTCOMES[problem.severity].split()[0]} {markdown(problem.sentence)}"
    if len(problems) > SENTENCES:
        yield f"- and {len(problems) - SENTENCES} more"


def _joined(parts: Sequence[str]) -> str:
    """A blank line between a list and what is none."""
    lines: list[str] = []
    for part in parts:
        if lines and not (part.startswith("- ") and lines[-1].startswith("- ")):
            lines.append("")
        lines.append(part)
    return "\n".join(lines) + "\n"


def _table(lines: Sequence[Line]) -> str:
    head = "| rule | | heads | worst | limit | in |\n|---|---|--:|--:|---|---|"
    rows = (_row(line) for line in lines)
    return "\n".join((head, *(f"| {' | '.join(row)} |" for row in rows)))


def _row(line: Line) -> tuple[str, ...]:
    numbers = map(markdown, (line.heads, line.worst, line.limit, line.where))
    return (markdown(line.rule), OUTCOMES[line.outcome], *numbers)


_MARKUP = re.compile(r"[\\`*_\[\]<>|~&$]|(?<=[A-Za-z]):(?=//)|(?<=[Ww]{3})\.")
_FIRST = re.compile(r"^ *(\d*)(?=[-+#.)](?:[-# ]|$))")
"""What begins a list or a heading where it stands first."""
_LATER = re.compile(r"@|:(?=[\w+-]+:)")
"""What begins a mention or an emoji. GitHub looks for these in the finished page, where backslashes
are gone, but not across the place of a comment."""


def markdown(text: str) -> str:
    """Foreign text as itself within a line of Markdown, GitHub's own: no block, emphasis, code,
    link, HTML, formula, emoji or cell border begins in it, and nobody is mentioned."""
    escaped = _MARKUP.sub(r"\\\g<0>", plain(text))
    first = _FIRST.sub(r"\1\\", escaped).lstrip(" ")
    return _LATER.sub(r"\g<0><!-- -->", first)
