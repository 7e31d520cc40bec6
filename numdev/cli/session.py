"""What every command does around its study: progress, what was typed, handing over the report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numdev.errors import MeasurementError

if TYPE_CHECKING:
    from numdev.report import Report


@contextlib.contextmanager
def measuring(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """The progress callback of a study, while a foreign kernel's prints are kept off stdout and no
    Ctrl-C is lost."""
    from numdev.audit.interrupt import watching
    from numdev.report.renderers import terminal

    with (
        contextlib.redirect_stdout(sys.stderr),
        terminal.progress(show=show) as tell,
        watching() as check,
    ):

        def progress(what: str, done: int, total: int) -> None:
            check()
            tell(what, done, total)

        yield progress


def hand_over(found: Report, directory: Path, *, as_json: bool, quiet: bool) -> None:
    """Write a finished report, and show it as asked. Raises MeasurementError, after that, for one
    in which nothing was measured: that is no success."""
    from numdev import report as reports
    from numdev.report.foreign import json_text
    from numdev.report.renderers import html, terminal

    reports.write(found, directory)
    html.write(found, directory)
    if as_json:
        click.echo(json_text(found.model_dump_json()))
    elif not quiet:
        terminal.show(found)
        click.echo(f"Report: {directory / 'report.html'}", err=True)
    if not found.measured:
        raise MeasurementError(found.unmeasured, hint=f"{directory}/report.json says why")


def command_line() -> str:
    return " ".join(["numdev", *sys.argv[1:]])
