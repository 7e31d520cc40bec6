"""Commands run once for several tests: what they printed, their exit code, and the
report."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import run

from numdev.report import Report, read


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def report(self) -> Any:
        report = read(self.folder)
        assert isinstance(report, Report)
        return report

    @property
    def words(self) -> str:
        """What was printed, on a line."""
        return " ".join((self.out + self.err).split())

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()


def called(*arguments: object) -> tuple[int, str, str]:
    """The exit code of `numdev ARGUMENTS`, and what it printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(*arguments)
    return code, out.getvalue(), err.getvalue()


def measured(folder: Path, *arguments: object) -> Ran:
    """A command that writes a report there."""
    return Ran(*called(*arguments, "--device", "cpu", "-o", folder), folder)


def gated(folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code of `numdev gate` on the report there, and its verdict; empty where it
    is refused in one line."""
    code, out, err = called("gate", folder, "--json", *arguments)
    if not out:
        assert err.startswith("numdev: error: "), err
        assert err.count("\n") == 1, err
        return code, {}
    return code, json.loads(out)


def having(verdict: dict[str, Any], **which: Any) -> list[dict[str, Any]]:
    """The tests of a verdict that have these values."""
    return [t for t in verdict["tests"] if all(t[name] == x for name, x in which.items())]
