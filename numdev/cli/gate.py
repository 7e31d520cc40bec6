"""`numdev gate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from numdev.cli.places import Places, write_file
from numdev.errors import UsageError

if TYPE_CHECKING:
    from numdev.gate.comparable import Measured

FILE = click.Path(path_type=Path)
INIT = Path("thresholds.yaml")


@click.command(
    short_help="Judge a finished report by thresholds, for CI.",
    epilog="Example:  numdev gate numdev-reports/demo-1234abcd",
)
@click.argument("path", type=FILE)
@click.option(
    "--thresholds",
    "--rules",
    "rules",
    type=FILE,
    metavar="FILE",
    help="YAML file of thresholds.  [default: configs/gate/default.yaml]",
)
@click.option(
    "--against",
    type=FILE,
    metavar="OLD",
    help="An older report of the same request, for limits on what changed.",
)
@click.option("--init", is_flag=True, help="Write a file of thresholds fitted to the report.")
@click.option(
    "-o", "--output", type=FILE, metavar="FILE", help=f"Where --init writes.  [default: {INIT}]"
)
@click.option("--overwrite", is_flag=True, help="Let --init replace a file.")
@click.option("--json", "as_json", is_flag=True, help="The verdicts as JSON.")
@click.option("--junit", type=FILE, metavar="FILE", help="Write the verdicts as JUnit XML too.")
@click.option("--summary", type=FILE, metavar="FILE", help="Write them as Markdown too.")
@click.option(
    "--github",
    is_flag=True,
    help="On GitHub Actions: errors as annotations at the lines of the rule file, and the "
    "Markdown in the step's summary ($GITHUB_STEP_SUMMARY).",
)
@click.pass_context
def gate(
    context: click.Context,
    /,
    path: Path,
    rules: Path | None,
    against: Path | None,
    init: bool,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    **places: Any,
) -> None:
    """Judge a finished report by thresholds, for CI. PATH is a report.json or a directory with one.

    Needs neither torch nor a GPU. Exit code 0: passed. 1: a limit is exceeded. 2: a wrong option or
    threshold file. 3: something could not be measured or judged, which is never a pass.
    """
    if init:
        if rules or against or as_json or any(places.values()):
            raise UsageError("--init judges nothing", hint="give it -o and --overwrite alone")
        _init(path, output or INIT, overwrite=overwrite)
        return
    if output or overwrite:
        raise UsageError("-o and --overwrite are for --init", hint="add --init, or leave them out")
    from numdev.gate import findings as sentences
    from numdev.gate.judging import decide_report
    from numdev.gate.rules import default_rules, default_rules_against, read_rules
    from numdev.report.renderers.terminal import print_document
    from numdev.report.views.gate import document
    from numdev.yamlfile import bundled

    chosen = default_rules_against() if against else default_rules()
    if rules:
        chosen = read_rules(rules)
        if against and not chosen.about_changes:
            raise UsageError(
                f"{rules}: has no threshold on a change, so --against would be ignored",
                hint="give one `over: before`, or leave --against out",
            )
    found = _read(path)
    decided = decide_report(found, chosen, _read(against) if against else None)
    judged, elsewhere = decided.judgement, Places(**places)
    findings, tested = sentences.findings_in(decided, found.rows)
    context.find_root().obj = judged.exit_code
    if as_json:
        parts: dict[str, Any] = judged.model_dump(mode="json") | {"exit_code": judged.exit_code}
        parts["findings"] = [finding.model_dump(mode="json") for finding in findings]
        click.echo(json.dumps(parts))
    else:
        with elsewhere.printing():
            print_document(document(decided, findings, tested, sentences.Places(found.rows)))
    # Afterwards, so that a file that cannot be written hides no verdict.
    file = rules or bundled("gate/default.yaml")
    for line in elsewhere.write(judged, findings, tested, rules=chosen, file=file):
        click.echo(line, err=as_json)  # GitHub reads both streams
    context.exit(judged.exit_code)


def _read(path: Path) -> Measured:
    from numdev.report import AuditReport, SweepReport, read

    found = read(path)
    if not isinstance(found, AuditReport | SweepReport):
        raise UsageError(
            f"{path}: is a report of numdev {found.kind}, which has no rows to judge",
            hint="gate the report of an audit or a sweep",
        )
    return found


def _init(path: Path, file: Path, *, overwrite: bool) -> None:
    from numdev.gate.fitting import fitted

    if file.exists() and not overwrite:
        raise UsageError(f"{file}: is there already", hint="give --overwrite, or -o another file")
    text = fitted(_read(path), str(path))
    write_file(file, text)
    click.echo(f"{file}: thresholds fitted to {path}; numdev gate {path} --thresholds {file}")
