"""`numdev schema`."""

from __future__ import annotations

import click

NAMES = ("config", "sweep", "train", "thresholds", "report")


@click.command(
    short_help="Print the JSON Schema of a file numdev reads or writes.",
    epilog="Example:  numdev schema sweep",
)
@click.argument("name", metavar="WHAT", type=click.Choice(NAMES))
def schema(name: str) -> None:
    """Print the JSON Schema of a file that numdev reads or writes, for editors.

    WHAT is config (a YAML file for audit and diagnose), sweep, train, thresholds (of the gate), or
    report (report.json of any kind).
    """
    import json

    from numdev.cli.schemas import schema_of

    click.echo(json.dumps(schema_of(name), indent=1, ensure_ascii=False))
