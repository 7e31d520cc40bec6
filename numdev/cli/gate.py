"""`numdev gate`: a verdict in the terminal, in files, and on GitHub."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numdev.cli.session import FILE, command
from numdev.errors import UsageError

if TYPE_CHECKING:
    from numdev.gate.rows import Measured

INIT = Path("thresholds.yaml")
RULES = "YAML file of thresholds.  [default: configs/gate/default.yaml]"
WHERE = f"Where --init writes.  [default: {INIT}]"
GITHUB = (
    "On GitHub Actions: problems as annotations, and the Markdown in the step's summary "
    "($GITHUB_STEP_SUMMARY)."
)


@command("gate numdev-reports/demo-1234abcd")
@click.argument("path", type=FILE)
@click.option("--thresholds", "rules", type=FILE, metavar="FILE", help=RULES)
@click.option("--init", is_flag=True, help="Write a file of thresholds fitted to the report.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help=WHERE)
@click.option("--overwrite", is_flag=True, help="Let --init replace a file.")
@click.option("--json", "as_json", is_flag=True, help="The verdicts as JSON.")
@click.option("--junit", type=FILE, metavar="FILE", help="Write the verdicts as JUnit XML too.")
@click.option("--summary", type=FILE, metavar="FILE", help="Write them as Markdown too.")
@click.option("--github", is_flag=True, help=GITHUB)
@click.pass_context
def gate(
    context: click.Context,
    /,
    path: Path,
    rules: Path | None,
    init: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    junit: Path | None,
    summary: Path | None,
    github: bool,
) -> None:
    """Judge a finished report by thresholds, for CI. PATH is a report.json or a directory with one.

    Needs neither torch nor a GPU. Exit code 0: passed. 1: a limit is exceeded. 2: a wrong option or
    threshold file. 3: something could not be measured or judged, which is never a pass."""
    if init:
        if rules or as_json or junit or summary or github:
            raise UsageError("--init judges nothing", hint="give it -o and --overwrite alone")
        from numdev.gate.fitting import fitted

        file = output or INIT
        if file.exists() and not overwrite:
            raise UsageError(f"{file}: is there already", hint="give --overwrite, or -o another")
        _write(file, fitted(_read(path), str(path)))
        click.echo(f"{file}: thresholds fitted to {path}; numdev gate {path} --thresholds {file}")
        return
    if output or overwrite:
        raise UsageError("-o and --overwrite are for --init")
    from numdev.gate import findings as sentences
    from numdev.gate.judging import judge_report
    from numdev.gate.rules import default_rules, read_rules
    from numdev.report import Places
    from numdev.report.renderers import ci, markdown, terminal
    from numdev.report.views.gate import document

    chosen = read_rules(rules) if rules else default_rules()
    found = _read(path)
    judged = judge_report(found, chosen)
    findings, tested = sentences.findings_in(judged, found.rows)
    context.find_root().obj = judged.exit_code
    page = document(judged, findings, tested, Places(found.rows))
    if as_json:
        told = [finding.model_dump(mode="json") for finding in findings]
        verdicts = judged.model_dump(mode="json")
        click.echo(json.dumps({**verdicts, "exit_code": judged.exit_code, "findings": told}))
    else:
        # GitHub takes nothing for a command that is printed before it reads a word that nobody can
        # guess: sentences hold names that come from elsewhere.
        word = secrets.token_hex(16)
        if github:
            click.echo(f"::stop-commands::{word}")
        terminal.show(page)
        if github:
            click.echo(f"::{word}::")
    # Afterwards, so that a file that cannot be written hides no verdict.
    if junit:
        _write(junit, ci.junit(judged, findings))
    words = markdown.page(page, level=3)
    if summary:
        _write(summary, words)
    if github:
        if step := os.environ.get("GITHUB_STEP_SUMMARY"):  # other steps wrote there before
            with Path(step).open("a", encoding="utf-8") as stream:
                stream.write(words)
        for line in ci.commands(judged, findings):
            click.echo(line, err=as_json)  # GitHub reads both streams
    context.exit(judged.exit_code)


def _read(path: Path) -> Measured:
    from numdev.report import AuditReport, SweepReport, read

    found = read(path)
    if not isinstance(found, AuditReport | SweepReport):
        what = f"{path}: expected the report of an audit or a sweep, got one of {found.kind}"
        raise UsageError(what)
    return found


def _write(path: Path, text: str) -> None:
    """A file that is whole or not there, in a directory that need not be there."""
    from numdev.report import replacing

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from error
