"""Write docs/cli.md from the commands' own help. `make test` fails when the page is
stale."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.main import COMMANDS, cli

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"


COMPLETION = """\
## Completion in the shell

Commands and options are completed by the shell; add the line to its start file.

| shell | file | line |
|---|---|---|
| bash, 4.4 or later | `~/.bashrc` | `eval "$(_NUMDEV_COMPLETE=bash_source numdev)"` |
| zsh | `~/.zshrc` | `eval "$(_NUMDEV_COMPLETE=zsh_source numdev)"` |
| fish | `~/.config/fish/config.fish` | `_NUMDEV_COMPLETE=fish_source numdev \\| source` |

Completing imports neither torch nor a model.
"""


def render() -> str:
    """The page: the group's help, then every command's."""
    parts = [
        "# Command line",
        "",
        "Written by `python scripts/cli_reference.py` from the commands' own `--help`.",
        "",
        _block("numdev", cli),
    ]
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts += [f"## numdev {name}", "", _block(f"numdev {name}", command)]
    return "\n".join([*parts, COMPLETION])


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
