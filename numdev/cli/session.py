"""What every command does around its study: where results go, progress, handing over the
report."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from numdev.cli.completion_candidates import with_completions
from numdev.cli.options import Grouped
from numdev.errors import MeasurementError

if TYPE_CHECKING:
    from numdev.cli.gate import Verdict
    from numdev.report import Report

R = TypeVar("R")

FILE = click.Path(path_type=Path)
PIPE = 120  # characters of a line in a file or a pipe, where $COLUMNS says no other
VERBOSE = "Print also what the columns mean, and more tables."
OUTPUT = "Directory for the results.  [default: numdev-reports/NAME-HASH]"


@dataclass(frozen=True, kw_only=True)
class Session:
    """One run of a command that writes a report: where it goes, and what is shown."""

    output: Path | None
    overwrite: bool
    as_json: bool
    quiet: bool
    verbose: bool

    def directory(self, name: str, request: object) -> Path:
        """Returns the directory of the results, which is not made here: --output, else
        `numdev-reports/NAME-1a2b3c4d` by `name` and a hash of the request, so that the
        same request goes where it went. Raises UsageError where another command's report
        is there, and where no results can be."""
        from numdev.report.io import expect_directory, refuse_other_kind

        text = json.dumps(request, sort_keys=True, separators=(",", ":"), default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        directory = self.output or Path("numdev-reports") / f"{name}-{digest}"
        expect_directory(directory)
        refuse_other_kind(directory, str(click.get_current_context().info_name))
        return directory

    def begin(self, name: str, request: object) -> Path:
        """Returns the directory of the results of a study that takes a while, as
        `directory` does. Says on stderr at once, before torch is imported, that the study
        has begun, unless --json or --quiet is set."""
        directory = self.directory(name, request)
        if not (self.as_json or self.quiet):
            command = click.get_current_context().info_name
            click.echo(f"{command}: started; results in {directory}", err=True)
        return directory

    def say(self, text: str) -> None:
        """Prints a sentence on stderr, unless --quiet."""
        if not self.quiet:
            say(text)

    def run_study(self, run: Callable[..., R], *asked: object, **more: object) -> R:
        """Returns what a study returns, with its progress shown. `run` is called with
        `asked` and `more`, and with `overwrite`, `command` and `progress`."""
        same = {"overwrite": self.overwrite, "command": command_line()}
        return self.run_with_progress(run, *asked, **same, **more)

    def run_judged_study(
        self,
        verdict: Verdict | None,
        run: Callable[..., R],
        *asked: object,
        **more: object,
    ) -> R:
        """Returns the report of a study, judged by the rules of the `verdict`; None: by
        the default ones. `run` is called with `asked` and `more`, and with `rules` (None:
        the default ones), `overwrite`, `command` and `progress`. Raises UsageError for a
        wrong file of rules."""
        return self.run_study(
            run, *asked, rules=verdict.limits if verdict else None, **more
        )

    def run_with_progress(
        self, run: Callable[..., R], *asked: object, **more: object
    ) -> R:
        """Returns what a function returns, with its progress shown unless --json or
        --quiet is set; kernels' prints go to stderr, and no Ctrl-C is lost. `run` is
        called with `asked` and `more`, and with `progress`."""
        from numdev.report.renderers import terminal

        with (
            contextlib.redirect_stdout(sys.stderr),
            terminal.progress(show=not (self.quiet or self.as_json)) as tell,
            raising_lost_interrupts() as check,
        ):

            def progress(what: str, done: int, total: int) -> None:
                """Shows how much is done of what; raises KeyboardInterrupt where one came
                and was lost."""
                check()
                tell(what, done, total)

            return run(*asked, progress=progress, **more)

    def claim_directory(self, name: str, request: Mapping[str, object]) -> Path:
        """Makes and returns the directory of a report that is made at once. `name`: what
        the directory is called, which begins with the command's, as `bounds-tiny`. Raises
        UsageError where no results can be, where it holds the report of another command,
        and unless --overwrite that of another request. Raises MeasurementError, unless
        --overwrite, for an older report that cannot be read."""
        from numdev.report.io import claim_directory

        directory = self.directory(name, request)
        claim_directory(
            directory, name.partition("-")[0], request, overwrite=self.overwrite
        )
        return directory

    def hand_over(
        self,
        report: Report,
        directory: Path,
        scripts: Callable[..., list[Path]] | None = None,
        verdict: Verdict | None = None,
        *,
        exits: bool = False,
    ) -> None:
        """Writes a finished report and its page. Shows the report, or the `verdict` on
        it, as asked, then has the `scripts` of its findings written. Exits with the
        verdict's code, or with `exits` with that of the report's outcome; returns without
        these. Raises MeasurementError for a report in which nothing was measured, which
        is no success, unless that code says that a limit is exceeded; OSError where a
        file cannot be written; and what `judge_and_show` raises."""
        from numdev import report as reports
        from numdev.report import Outcome
        from numdev.report.io import text_of
        from numdev.report.renderers import html, terminal

        code: int | None = None
        reports.write(report, directory)
        html.write(report, directory)
        if self.as_json:
            click.echo(text_of(report))
        elif not self.quiet and not verdict:
            terminal.show(report, verbose=self.verbose)
        if verdict:
            code = verdict.judge_and_show(
                report,
                "nothing" if self.quiet or self.as_json else "page",
                verbose=self.verbose,
            )
        elif exits and report.outcome is not None:
            code = report.outcome.exit_code
            click.get_current_context().find_root().obj = code
        if scripts and self.run_with_progress(
            scripts, report, directory=directory, say=self.say
        ):
            html.write(report, directory)  # which shows them
        if not self.as_json:
            self.say(f"Report: {directory / 'report.html'}")
        failed = code == Outcome.EXCEEDED.exit_code  # which is certain
        if not report.measured and not failed:
            raise MeasurementError(
                report.unmeasured, hint=f"{directory}/report.json says why"
            )
        if code is not None:
            click.get_current_context().exit(code)


@contextlib.contextmanager
def raising_lost_interrupts() -> Iterator[Callable[[], None]]:
    """Yields a function to be called at every task. It raises KeyboardInterrupt where a
    Ctrl-C came since the block began, even one that was lost: a native extension that
    calls back into Python may clear the error. In a thread other than the main one it
    raises nothing."""
    from numdev.studies.audit.ctrl_c import handling

    came = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        """Notes the signal, calls the handler that was set before, and raises
        KeyboardInterrupt."""
        came.set()
        if callable(before):
            before(number, frame)
        raise KeyboardInterrupt

    def check() -> None:
        """Raises KeyboardInterrupt where a signal came."""
        if came.is_set():
            raise KeyboardInterrupt

    with handling(remember) as before:
        yield check


def say(text: str) -> None:
    """Prints a sentence on stderr, in lines as wide as the terminal, or without one of
    PIPE characters; a word that is wider, as a path may be, stays whole."""
    columns, _ = shutil.get_terminal_size((PIPE, 24))
    lines = textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)
    click.echo("\n".join(lines), err=True)


def command(example: str) -> Callable[[Callable[..., object]], click.Command]:
    """Returns a decorator that makes a function a command of `numdev`. `example`: what
    its help ends with, after `numdev`. A function with the parameter `session` gets the
    options of those that write a report."""

    def decorate(function: Callable[..., object]) -> click.Command:
        """Returns the function as a click command."""
        as_command = click.command(cls=Grouped, epilog=f"Example:  numdev {example}")
        if "session" not in inspect.signature(function).parameters:
            return with_completions(as_command(function))

        @functools.wraps(function)
        def with_session(*args: object, **parameters: Any) -> object:
            """Calls the function with the options of a report as one `session`. Raises
            UsageError before that where no results can be in --output."""
            session = Session(
                **{part.name: parameters.pop(part.name) for part in fields(Session)}
            )
            if session.output is not None:
                from numdev.report.io import expect_directory

                expect_directory(session.output)
            return function(*args, session=session, **parameters)

        report_command = as_command(with_session)
        report_command.params += [
            click.Option(["--output", "-o"], type=FILE, metavar="DIR", help=OUTPUT),
            click.Option(
                ["--overwrite"], is_flag=True, help="Replace the directory's results."
            ),
            click.Option(
                ["--json", "as_json"], is_flag=True, help="Print only the JSON report."
            ),
            click.Option(
                ["--quiet", "-q"], is_flag=True, help="Print nothing but errors."
            ),
            click.Option(["--verbose", "-v"], is_flag=True, help=VERBOSE),
        ]
        return with_completions(report_command)

    return decorate


def command_line() -> str:
    """Returns the command line of this process, as reports record it."""
    return " ".join(["numdev", *sys.argv[1:]])
