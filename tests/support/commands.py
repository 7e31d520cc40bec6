"""Commands run as a user runs them, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from numdev.cli.main import COMMANDS, cli, main
from numdev.errors import UsageError

STARTED = ": started; results in "


def run(*arguments: object) -> int:
    """The exit code of `numdev ARGUMENTS`."""
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def ran(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """The exit code of `numdev ARGUMENTS`, and what it printed on stdout and stderr."""
    code = run(*arguments)
    return code, *capsys.readouterr()


def unstarted(err: str) -> str:
    """What is on stderr without the line by which a command says that it has begun."""
    first, _, more = err.partition("\n")
    return more if ": started" in first else err


def refused(arguments: list[str]) -> str | None:
    """What the program's own parser has against a command line; None where it takes
    it."""
    name, *options = arguments
    if name not in COMMANDS:
        return f"no command {name}"
    # A command keeps how its help was asked for
    group = click.Context(cli, **cli.context_settings)
    command = cli.get_command(group, name)
    try:
        with command.make_context(name, options, parent=group):
            return None
    except click.ClickException as error:
        return error.format_message()
    except UsageError as error:
        return str(error)


def refusal(capsys: Any, code: int, target: Path, *flags: str) -> str:
    """The one line that refuses to audit a target, with this exit code."""
    capsys.readouterr()  # saving a model shows a progress bar
    result, _, err = ran(
        capsys, "audit", target, *flags, "--output", target.parent / "refused"
    )
    err = unstarted(err)
    assert result == code, err
    assert err.count("\n") == 1
    assert "unexpected" not in err
    assert not (target.parent / "refused").exists()
    return err
