"""`numdev kernels`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from numdev.cli.options import DEVICES
from numdev.cli.session import command

if TYPE_CHECKING:
    from numdev.report.document import Document


@command("kernels --device cpu")
@click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True,
    help="Judge availability on this device.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Name their options too.")
def kernels(device: str, as_json: bool, verbose: bool) -> None:
    """List the kernels: which can run here, and why the others cannot."""
    from numdev.kernels import all_kernels
    from numdev.report.renderers import terminal
    from numdev.system import System

    system = System.probe(device)
    table = [
        {
            "name": k.name,
            "missing": k.missing(system),
            "summary": k.summary,
            "options": k.options,
        }
        for k in all_kernels().values()
    ]
    if as_json:
        click.echo(json.dumps(table, default=str))
    else:
        shown = table if verbose else [{**kernel, "options": ()} for kernel in table]
        terminal.show(kernels_document(shown, system.gpu or system.cpu))


def kernels_document(kernels: Sequence[Mapping[str, Any]], machine: str) -> Document:
    """Returns a document on every kernel: whether it runs on this machine, and what it
    is. `kernels`: mappings with name, missing (None: it runs), summary and options."""
    from numdev.report.document import Cell, Document, text_table

    title = f"Kernels on {machine}"
    rows = []
    for kernel in kernels:
        missing = kernel["missing"]
        availability = (
            Cell(f"no: {missing}", style="warn")
            if missing
            else Cell("available", style="good")
        )
        options = (
            f" Options: {', '.join(kernel['options'])}." if kernel["options"] else ""
        )
        name = Cell(kernel["name"], style="strong")
        rows.append((name, availability, Cell(kernel["summary"] + options)))
    return Document(
        title, (text_table(("kernel", "here", "what it is"), rows, title=title),)
    )
