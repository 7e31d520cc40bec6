"""`numdev kernels`, and its check of one kernel."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from numdev.cli.options import DEVICES
from numdev.cli.session import command
from numdev.errors import MeasurementError

if TYPE_CHECKING:
    from numdev.kernels import Kernel
    from numdev.report.document import Document
    from numdev.system import System

CHECK = (
    "Check one kernel, a name or package.module:function, on small cases, one feature each, by the "
    "gate's rules. Exit code 1 if it exceeds a limit, 3 if it cannot run here."
)


@command(
    "List the kernels: which run here, and why the others cannot.",
    "kernels --check sdpa-flash",
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
    help="Judge availability on this device.",
)  # fmt: skip
@click.option("--check", "checked", metavar="NAME", help=CHECK)
@click.option("--json", "as_json", is_flag=True, help="The table, or the check, as JSON.")
def kernels(device: str, checked: str | None, as_json: bool) -> None:
    """List the kernels: which can run here, and why the others cannot."""
    from numdev.kernels import all_kernels, find
    from numdev.report.renderers import terminal
    from numdev.system import System

    system = System.here(device)
    if checked is not None:
        click.get_current_context().exit(_check(find(checked), system, as_json=as_json))
    table = [
        {"name": k.name, "missing": k.missing(system), "summary": k.summary, "options": k.options}
        for k in all_kernels().values()
    ]
    if as_json:
        click.echo(json.dumps(table, default=str))
    else:
        terminal.show(shown(table, system.gpu or system.cpu))


def shown(kernels: Sequence[Mapping[str, Any]], machine: str) -> Document:
    """Every kernel: whether it runs on this machine, and what it is."""
    from numdev.report.document import Cell, Document, words

    title = f"Kernels on {machine}"
    rows = []
    for kernel in kernels:
        missing = kernel["missing"]
        here = Cell(f"no: {missing}", style="warn") if missing else Cell("available", style="good")
        options = f" Options: {', '.join(kernel['options'])}." if kernel["options"] else ""
        name = Cell(kernel["name"], style="strong")
        rows.append((name, here, Cell(kernel["summary"] + options)))
    return Document(title, (words(("kernel", "here", "what it is"), rows, title=title),))


def _check(kernel: Kernel, system: System, *, as_json: bool) -> int:
    """Print what the check of a kernel found; the exit code."""
    from numdev.audit.check import FEATURES
    from numdev.report.foreign import json_text
    from numdev.testing import CheckFailed, check_attention

    if missing := kernel.missing(system):
        raise MeasurementError(f"{kernel.name} cannot run here: {missing}")
    with contextlib.redirect_stdout(sys.stderr):  # a foreign kernel may print
        try:
            result = check_attention(kernel, cases=FEATURES, device=system.device)
        except CheckFailed as failed:
            result = failed.result
    if as_json:
        found = {"kernel": result.kernel, "passed": result.passed, "skipped": result.skipped}
        report = json.loads(result.report.model_dump_json())
        click.echo(json_text(json.dumps({**found, "words": str(result), "report": report})))
    else:
        click.echo(str(result))
    return result.judgement.exit_code
