"""`numdev gate`: a verdict in the terminal, in files, and on GitHub."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.session import FILE, command
from numdev.errors import UsageError

if TYPE_CHECKING:
    from numdev.gate.rules import Rules
    from numdev.report import Report

INIT = Path("thresholds.yaml")
RULES = "YAML file of thresholds.  [default: configs/gate/default.yaml]"
BEYOND = "Print also which results are beyond a limit, and what was tested."
WHERE = f"Where --init writes.  [default: {INIT}]"
GATE = (
    "Judge the report as `numdev gate` does, and exit with its code. Implied by "
    "the options below."
)
JUNIT = "Write the verdicts as JUnit XML."
SUMMARY = "Write the verdicts as Markdown."
GITHUB = (
    "On GitHub Actions: problems as annotations, and the Markdown in the step's summary "
    "($GITHUB_STEP_SUMMARY)."
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rules, and where the verdict goes beside the terminal."""

    rules: Path | None = None
    junit: Path | None = None
    summary: Path | None = None
    github: bool = False

    @functools.cached_property
    def limits(self) -> Rules:
        """Returns the rules of the file, or the default ones. Raises UsageError for a
        wrong file."""
        from numdev.gate.rules import default_rules, read_rules

        if self.rules is None:
            return default_rules()
        expect_file(self.rules, "--thresholds")
        return read_rules(self.rules)

    def judge_and_show(
        self,
        report: Report,
        show: Literal["page", "json", "nothing"],
        *,
        verbose: bool = False,
    ) -> int:
        """Judges a report and returns the exit code; sets it as that of the running click
        command. Shows the verdict on stdout (`show`: as a page, which is `verbose` or
        not, as JSON, or not), then on GitHub as annotations, and writes it to the files.
        Raises UsageError for wrong rules and a file that cannot be written, which is the
        step's summary too. Raises MeasurementError for what `judge_report` refuses, such
        as a report from a system that the rules do not hold for."""
        from numdev.gate.judging import judge_report
        from numdev.report.renderers import ci, markdown, terminal
        from numdev.report.views.gate import page_of
        from numdev.report_kinds import judged_by

        judged = judge_report(report, self.limits)
        findings, _ = judged_by(report.kind).findings(judged, report)
        click.get_current_context().find_root().obj = judged.exit_code
        page = page_of(judged, report)
        if show == "json":
            data = judged.model_dump(mode="json") | {"exit_code": judged.exit_code}
            data["findings"] = [finding.model_dump(mode="json") for finding in findings]
            click.echo(json.dumps(data))
        elif show == "page":
            # GitHub takes nothing for a command that is printed before it reads a word
            # that nobody can guess: sentences hold names that come from elsewhere.
            word = secrets.token_hex(16)
            if self.github:
                click.echo(f"::stop-commands::{word}")
            terminal.show(page, verbose=verbose)
            if self.github:
                click.echo(f"::{word}::")
        if self.github:
            for line in ci.commands(judged, findings):
                click.echo(line, err=show != "page")  # GitHub reads both streams
        # Afterwards, so that a file that cannot be written hides no verdict.
        if self.junit:
            seconds = sum(report.timings.values())
            _write_whole_file(self.junit, ci.junit(judged, findings, seconds))
        words = markdown.page(page, level=3)
        if self.summary:
            _write_whole_file(self.summary, words)
        if (step := self.step_summary) is not None:
            with naming_file(step), step.open("a", encoding="utf-8") as stream:
                stream.write(words)  # other steps wrote there before
        return judged.exit_code

    @property
    def step_summary(self) -> Path | None:
        """Returns the file of the step's summary on GitHub; None without --github, and
        where the variable is not set or empty."""
        step = os.environ.get("GITHUB_STEP_SUMMARY") if self.github else None
        return Path(step) if step else None

    def expect_files(self) -> None:
        """Raises UsageError for rules that cannot be read and for a file that cannot be
        written, so that a command can ask before it measures. Makes nothing but an empty
        summary of the step."""
        from numdev.report.io import expect_writable_file

        _ = self.limits
        for path in (self.junit, self.summary):
            if path is not None:
                expect_writable_file(path)
        if (step := self.step_summary) is not None:
            with naming_file(step), step.open("a"):
                pass


def verdict_options(
    function: Callable[..., object], *, files: bool = True
) -> Callable[..., object]:
    """Returns a command with the options of a verdict, which it gets as `verdict`.
    `files`: also those that say where it goes beside the terminal."""

    @functools.wraps(function)
    def with_verdict(*args: object, **parameters: Any) -> object:
        """Calls the command with the options of the verdict as one record."""
        names = [x.name for x in fields(Verdict) if x.name in parameters]
        asked = Verdict(**{name: parameters.pop(name) for name in names})
        return function(*args, verdict=asked, **parameters)

    options = [
        click.option("--thresholds", "rules", type=FILE, metavar="FILE", help=RULES)
    ]
    if files:
        options += [
            click.option("--junit", type=FILE, metavar="FILE", help=JUNIT),
            click.option("--summary", type=FILE, metavar="FILE", help=SUMMARY),
            click.option("--github", is_flag=True, help=GITHUB),
        ]
    command_function: Callable[..., object] = with_verdict
    for option in reversed(options):
        command_function = option(command_function)
    return command_function


def gated(
    function: Callable[..., object], *, files: bool = False
) -> Callable[..., object]:
    """Returns a command that measures with `--gate` and the options of a verdict: its
    `verdict` is None where none of these is on the command line. `files`: as for
    `verdict_options`; `numdev gate` writes those of any report."""

    @functools.wraps(function)
    def with_gate(
        *args: object, verdict: Verdict, gate: bool, **parameters: object
    ) -> object:
        """Calls the command with its verdict or None; raises UsageError for a wrong file
        of thresholds, and for a file that cannot be written, before anything is
        measured."""
        asked = gate or any(vars(verdict).values())
        if asked:
            verdict.expect_files()
        return function(*args, verdict=verdict if asked else None, **parameters)

    with_options = verdict_options(with_gate, files=files)
    return click.option("--gate", is_flag=True, help=GATE)(with_options)


@command("gate numdev-reports/demo-1234abcd")
@click.argument("path", type=FILE)
@click.option(
    "--init", is_flag=True, help="Write a file of thresholds fitted to the report."
)
@click.option("-o", "--output", type=FILE, metavar="FILE", help=WHERE)
@click.option("--overwrite", is_flag=True, help="Let --init replace a file.")
@click.option("--json", "as_json", is_flag=True, help="The verdicts as JSON.")
@click.option("--verbose", "-v", is_flag=True, help=BEYOND)
@verdict_options
@click.pass_context
def gate(
    context: click.Context,
    /,
    path: Path,
    verdict: Verdict,
    init: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Judge a finished report by thresholds, for CI. PATH is a report.json or a directory
    with one.

    Needs neither torch nor a GPU. Exit code 0: passed. 1: a limit is exceeded. 2: a wrong
    option or threshold file. 3: something could not be measured or judged, which is never
    a pass."""
    expect_file(path, "gate")
    if init:
        if as_json or any(vars(verdict).values()):
            raise UsageError(
                "--init only writes rules", hint="give it only -o and --overwrite"
            )
        from numdev.gate.fitting import fitted_thresholds
        from numdev.report import read

        file = output or INIT
        if file.exists() and not overwrite:
            raise UsageError(
                f"{file}: already exists", hint="give --overwrite, or another -o"
            )
        _write_whole_file(file, fitted_thresholds(read(path), str(path)))
        click.echo(
            f"{file}: thresholds fitted to {path}; numdev gate {path} --thresholds {file}"
        )
        return
    if output or overwrite:
        raise UsageError("-o and --overwrite are for --init")
    gc.disable()  # a sixth of the time of a large report, whose records all stay
    from numdev.report import read

    report = read(path)
    show: Literal["page", "json"] = "json" if as_json else "page"
    context.exit(verdict.judge_and_show(report, show, verbose=verbose))


def _write_whole_file(path: Path, text: str) -> None:
    """Writes a file that is whole or not there, and makes its directory. Raises
    UsageError where it cannot be written."""
    from numdev.report import replacing

    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Raises UsageError in place of an OSError of the block, which writes the file."""
    from numdev.report.io import refused_file

    try:
        yield
    except OSError as error:
        raise refused_file(path, error) from error
