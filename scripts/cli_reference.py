"""Write docs/cli.md from the commands' own help. `make test` fails when the page is stale."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.main import cli

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"


def render() -> str:
    """The page: the group's help, then every command's."""
    parts = [
        "# Command line",
        "",
        "Written by `python scripts/cli_reference.py` from the commands' own `--help`.",
        "",
        _block("numdev", cli),
    ]
    for name, command in sorted(cli.commands.items()):
        parts += [f"## numdev {name}", "", _block(f"numdev {name}", command)]
    return "\n".join(parts)


def _block(path: str, command: click.Command) -> str:
    context = click.Context(
        command,
        info_name=path,
        max_content_width=100,
        terminal_width=100,
        help_option_names=["-h", "--help"],
    )
    return f"```\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
