"""Write docs/cli.md from the commands' own help. `make test` fails when the page is
stale."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from numdev.cli.main import COMMANDS, cli
from numdev.cli.options import WHOLE

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"


COMPLETION = """\
## Completion in the shell

Commands, options, kernels, formats, axes, presets and files are completed by the shell; add the line to its start file.

| shell | file | line |
|---|---|---|
| bash, 4.4 or later | `~/.bashrc` | `eval "$(_NUMDEV_COMPLETE=bash_source numdev)"` |
| zsh | `~/.zshrc` | `eval "$(_NUMDEV_COMPLETE=zsh_source numdev)"` |
| fish | `~/.config/fish/config.fish` | `_NUMDEV_COMPLETE=fish_source numdev \\| source` |

Completing imports neither torch nor a model.
"""


class Page(click.HelpFormatter):
    """What a command writes as its help, as Markdown: sections of options are tables, and
    an option has the anchor COMMAND-OPTION."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self.command = command

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Writes one line of code."""
        self.write(f"```text\n{prog} {args}\n```\n\n")

    def write_heading(self, heading: str) -> None:
        """Writes the name of a table, which is no heading of the page."""
        self.write(f"**{heading}**\n\n")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Writes what follows under a heading, without click's indentation."""
        self.write_heading(name)
        yield

    @contextmanager
    def indentation(self) -> Iterator[None]:
        """Writes what follows without click's indentation, which would be code."""
        yield

    def write_paragraph(self) -> None:
        """Writes nothing: each part ends with an empty line."""

    def write_text(self, text: str) -> None:
        """Writes paragraphs, and an example as code."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            line = " ".join(paragraph.replace("\b", "").split())
            example = re.fullmatch(r"Example:\s+(numdev .*)", line)
            self.write(f"```\n{example[1]}\n```\n\n" if example else f"{plain(line)}\n\n")

    def write_dl(
        self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Writes a table, of options or of commands."""
        is_options = any(term.startswith("-") for term, _ in rows)
        self.write(f"| {'option' if is_options else 'command'} |  |\n|---|---|\n")
        for term, text in rows:
            first = self.option(term) if is_options else command_link(term.strip())
            self.write(f"| {first} | {plain(' '.join(text.split()))} |\n")
        self.write("\n")

    def option(self, term: str) -> str:
        """Returns the cell of an option: its names as code, with its anchor."""
        long = re.findall(r"--([a-z][a-z-]*)", term)[0]
        code = " ".join(f"`{part}`" for part in cell_of(term))
        return f'<a id="{self.command}-{long}"></a>{code}'


def cell_of(term: str) -> list[str]:
    """Returns the names of an option, and its value if it takes one."""
    names = re.findall(r"--?[a-z][a-z-]*", term)
    value = term[term.rindex(names[-1]) + len(names[-1]) :].strip()
    return [*names, value.replace("|", "\\|")] if value else names


def command_link(name: str) -> str:
    """Returns a command's name as a link to its part of the page."""
    return f"[`{name}`](#numdev-{name})" if name in COMMANDS else f"`{name}`"


def plain(text: str) -> str:
    """Returns text of a terminal as Markdown that shows the same characters."""
    parts = re.split(r"(`[^`]*`|https?://\S+)", text)
    return "".join(
        part if part.startswith(("`", "http")) else escaped(part) for part in parts
    ).replace("|", "\\|")


def escaped(text: str) -> str:
    """Returns text without anything that Markdown would read as its own."""
    named = re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"`\1`", text)
    return named.replace("*", r"\*").replace("<", "&lt;")


def render() -> str:
    """The page: the group's help, then every command's."""
    parts = [
        "# Command line\n\nWritten by `python scripts/cli_reference.py` from the "
        "commands' own `--help-all`. What is in brackets is the default, or the range.\n\n",
        help_of("numdev", cli),
    ]
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        parts += [f"## numdev {name}\n\n", help_of(f"numdev {name}", command)]
    return "".join([*parts, COMPLETION])


def help_of(path: str, command: click.Command) -> str:
    """Returns a command's help as Markdown."""
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    context.meta[WHOLE] = True
    page = Page(path.removeprefix("numdev").strip() or "numdev")
    command.format_help(context, page)
    return page.getvalue()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
