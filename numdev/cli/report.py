"""`numdev report` and `numdev compare`: finished reports, shown or set side by side."""

from __future__ import annotations

import io
from pathlib import Path

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.session import FILE, VERBOSE, Session, command, command_line
from numdev.errors import MeasurementError

FORMATS = ("terminal", "html", "markdown", "csv", "json")
HELP = (
    "How to show it. html: one page that needs nothing else. markdown: the answer, "
    "the tables, the "
    "findings. csv: the rows.  [terminal]"
)


@command("report numdev-reports/demo-1234abcd --format markdown")
@click.argument("path", type=FILE)
@click.option("--format", "form", type=click.Choice(FORMATS), help=HELP)
@click.option("--verbose", "-v", is_flag=True, help=VERBOSE)
def report(path: Path, form: str | None, verbose: bool) -> None:
    """Show a finished report again. PATH is a report.json or a directory with one."""
    from numdev.report import read, write_csv
    from numdev.report.io import text_of
    from numdev.report.renderers import html, markdown, terminal

    expect_file(path, "report")
    finished = read(path)
    if form == "json":
        text = text_of(finished)
    elif form == "html":
        # Where its scripts are
        text = html.page(finished, path if path.is_dir() else path.parent)
    elif form == "markdown":
        text = markdown.page(finished)
    elif form == "csv":
        file = io.StringIO(newline="")
        write_csv(file, next((rows for rows in finished.tables().values() if rows), ()))
        text = file.getvalue()
    else:
        terminal.show(finished, verbose=verbose)
        return
    click.echo(text, nl=not text.endswith("\n"))


@command("compare reports/torch-2.11 reports/torch-2.13")
@click.argument("reports", type=FILE, nargs=-1, required=True)
@click.option(
    "--allow", multiple=True, metavar="KEY",
    help="Compare even if the requests differ in this key, e.g. seed. Repeatable.",
)  # fmt: skip
@click.option("--by-date", is_flag=True, help="Sort the reports by when they were made.")
@click.pass_context
def compare(
    context: click.Context,
    reports: tuple[Path, ...],
    allow: tuple[str, ...],
    by_date: bool,
    session: Session,
) -> None:
    """Show what changed between reports A and B of audits: across versions, machines or
    kernel commits. Or of two sweeps, both run with `keep: head`; of effects; of
    invariance. Of three or more the last is compared with the one before, and all are
    shown as a history.

    Each is a report.json, or its directory, of the same request. Needs neither torch nor
    a GPU. Exit code 0: no change. 1: a number changed beyond noise, another kernel ran,
    or a row or a number is gone (also where a kernel failed besides). 2: the two are not
    comparable, or a wrong option. 3: a report is unreadable, lacks rows or contradicts
    itself, a kernel failed, or something could not be compared."""
    from numdev.gate.compare import compare as run

    for path in reports:
        expect_file(path, "compare")
    comparison = run(*reports, allow=allow, by_date=by_date, command=command_line())
    directory = session.claim_directory("compare", comparison.request)
    context.find_root().obj = comparison.exit_code
    session.hand_over(comparison, directory)
    if comparison.exit_code == 3:
        if not comparison.failed:
            count = comparison.summary.unjudged
            what = (
                f"{count} row{'s differ' if count != 1 else ' differs'} and "
                "could not be judged"
            )
            raise MeasurementError(what, hint=f"{directory}/report.json says why")
        first = comparison.failed[0]
        raise MeasurementError(f"{first.kernel} failed {first.why}")
    context.exit(comparison.exit_code)
