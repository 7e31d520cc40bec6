"""What every command does around its study: where results go, progress, handing over the report."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numdev.errors import MeasurementError

if TYPE_CHECKING:
    from numdev.report import Report


@dataclass(frozen=True, kw_only=True)
class Results:
    """What the user wants to have of a report."""

    output: Path | None
    overwrite: bool
    as_json: bool
    quiet: bool

    def directory(self, name: str, request: Any) -> Path:
        """Where results go: the same request where it went."""
        text = json.dumps(request, sort_keys=True, separators=(",", ":"), default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return self.output or Path("numdev-reports") / f"{name}-{digest}"

    def say(self, text: str) -> None:
        """A sentence on stderr, unless nothing is to be said."""
        if not self.quiet:
            click.echo(text, err=True)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Callable[[str, int, int], None]]:
        """The progress callback of a study, while a foreign kernel's prints are kept off stdout and
        no Ctrl-C is lost."""
        from numdev.audit.interrupt import watching
        from numdev.report.renderers import terminal

        with (
            contextlib.redirect_stdout(sys.stderr),
            terminal.progress(show=not (self.quiet or self.as_json)) as tell,
            watching() as check,
        ):

            def progress(what: str, done: int, total: int) -> None:
                check()
                tell(what, done, total)

            yield progress

    def study(self, run: Callable[..., Any], *asked: Any, **more: Any) -> Any:
        """What a study comes to, which is told what all of them want to know."""
        with self.measuring() as progress:
            same = {"overwrite": self.overwrite, "command": command_line(), "progress": progress}
            return run(*asked, **same, **more)

    def hand_over(self, found: Report, directory: Path) -> None:
        """Write a finished report, and show it as asked. Raises MeasurementError, after that, for
        one in which nothing was measured: that is no success."""
        from numdev import report as reports
        from numdev.report.foreign import json_text
        from numdev.report.renderers import html, terminal

        reports.write(found, directory)
        html.write(found, directory)
        if self.as_json:
            click.echo(json_text(found.model_dump_json()))
        elif not self.quiet:
            terminal.show(found)
        if not self.as_json:
            self.say(f"Report: {directory / 'report.html'}")
        if not found.measured:
            raise MeasurementError(found.unmeasured, hint=f"{directory}/report.json says why")


def result_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that writes a report, as its parameter `results`."""

    @functools.wraps(function)
    def command(
        *args: Any, output: Path | None, overwrite: bool, as_json: bool, quiet: bool, **options: Any
    ) -> Any:
        results = Results(output=output, overwrite=overwrite, as_json=as_json, quiet=quiet)
        return function(*args, results=results, **options)

    for option in (
        click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors."),
        click.option("--json", "as_json", is_flag=True, help="The report on stdout, nothing else."),
        click.option("--overwrite", is_flag=True, help="Start anew in a directory that is in use."),
        click.option(
            "--output",
            "-o",
            type=click.Path(path_type=Path),
            help="Directory for the results.  [default: numdev-reports/NAME-HASH]",
        ),
    ):
        command = option(command)
    return command


def command_line() -> str:
    """What was typed."""
    return " ".join(["numdev", *sys.argv[1:]])
