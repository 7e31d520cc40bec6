"""The command line: the group of commands, and what becomes of their errors.

stdout carries the result, stderr the rest. This is the only place that catches a
NumdevError and the only one that prints an error."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from numdev.errors import MeasurementError, NumdevError, UsageError, closest, one_line
from numdev.studies.audit.ctrl_c import noticing

EMPTY_OPTION = re.compile(r"--[a-z-]+=")
FOREIGN = "the code of a kernel or a model"
# What the system says where a disk takes no more, or nothing from this user
OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
COMPLETION = "_NUMDEV_COMPLETE"  # set by the shell that asks for completions
# Studies by command: as in SECTIONS
STUDIES = {
    "sweep": (
        "audit",
        "Measure how deviation depends on length, format, tile or kernel.",
    ),
    "effects": (
        "effects",
        "Say what rounding does to a model's output, and which site.",
    ),
    "invariance": (
        "invariance",
        "Ask whether batch, chunks or decode change the numbers.",
    ),
    "logprobs": (
        "logprobs",
        "Say why a trainer's and a server's log-probabilities differ.",
    ),
    "train": (
        "train",
        "Train small networks side by side; measure how far they drift.",
    ),
    "bounds": (
        "train",
        "Compare flash with low precision, another seed, and chance.",
    ),
    "weights": ("train", "Compare sets of weights, tensor by tensor."),
    "diagnose": (
        "diagnose",
        "Find heads whose rounding errors do not cancel, and a cure.",
    ),
}
# The commands as `--help` lists them: the module of `numdev.cli` that has one, and what
# it is for. A module is imported when its command is asked for.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Judge": {
        "check": ("check", "Check one function: is it its reference, or attention?"),
        "audit": (
            "audit",
            "Audit the attention of a model, a pipeline, or stored tensors.",
        ),
        "gate": ("gate", "Judge a finished report by thresholds, for CI."),
        "compare": ("report", "Show what changed between two audits beyond noise."),
    },
    "Study": STUDIES,
    "The rest": {
        "kernels": (
            "kernels",
            "List the kernels: which run here, and why the others cannot.",
        ),
        "report": ("report", "Show a finished report again, or in another form."),
    },
}
COMMANDS = {
    name: module for section in SECTIONS.values() for name, (module, _) in section.items()
}


class _ReaderLeft(Exception):
    """The reader of a pipe we write to is gone, as in `numdev report ... | head`. With
    the exit code that was due: what a gate decided holds whoever reads it."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command, and imports its module; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"numdev.cli.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns what click returns of a known command or an option, and of any word
        while the shell completes. Raises UsageError for any other word: it names the
        nearest command, or the one that takes the file."""
        name = args[0]
        if name in COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        raise UsageError(f"no command {name!r}", hint=_command_for(name))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands in sections, then the options."""
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:10}", words) for name, (_, words) in section.items()]
                )
        click.Command.format_options(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Returns what is left for a command behind numdev's own options, of which --help
        and --version print. Raises _ReaderLeft where a pipe is closed."""
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError as error:
            raise _ReaderLeft(0) from error

    def invoke(self, ctx: click.Context) -> object:
        """Runs a command. Raises _ReaderLeft where a pipe is closed, since click and rich
        make that exit code 1, which here would read as "exceeded"; and MeasurementError
        for a KeyboardInterrupt that foreign code raises, which is not the user's."""
        try:
            with noticing() as is_interrupted:
                try:
                    return super().invoke(ctx)
                except KeyboardInterrupt as error:
                    if is_interrupted():
                        raise
                    raise MeasurementError(
                        f"{FOREIGN} raised {one_line(error)}"
                    ) from error
        except (BrokenPipeError, SystemExit) as error:
            if isinstance(error, BrokenPipeError) or isinstance(
                error.__context__, BrokenPipeError
            ):
                raise _ReaderLeft(ctx.obj or 0) from error
            raise


def _command_for(word: str) -> str:
    """Returns what to type in place of a word that is no command. It is the command that
    takes the word as a target or a file: `numdev check mine.py:f`, `numdev audit demo`,
    or `numdev report a.json takes a report`. Else it is the nearest name, or all where
    none is near: `did you mean 'audit'?; see ...`."""
    from numdev.cli.file_kinds import USES, kind_of_path

    file, colon, _ = word.partition(":")
    if colon and file.endswith(".py"):
        return f"numdev check {word}"
    if kind := kind_of_path(Path(word)):
        return f"{USES[kind].command.format(word)} takes {USES[kind].words}"
    if word == "demo" or Path(word).is_dir():
        return f"numdev audit {word}"
    return f"{closest(word, COMMANDS)}; see `numdev --help`"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog="Example:  numdev audit demo",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False,
    callback=lambda context, parameter, asked: _show_version(context, asked),
    help="Show the version, the commit where it is known, and torch's.",
)  # fmt: skip
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Are my numbers right? Kernels, models and log-probabilities beside exact results.

    numdev computes the exact result of the same inputs in fp64, knows what the rounding
    of a format explains, and names what is left: in a function beside its reference, in a
    model's attention, between a trainer and a server."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _show_version(context: click.Context, asked: bool) -> None:
    """Prints the version where it is asked for, and ends the command."""
    if asked and not context.resilient_parsing:
        from numdev.cli.version_line import version_line

        click.echo(version_line())
        context.exit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code: 0 done or passed (then it returns),
    1 exceeded, 2 usage, 3 could not measure or an unexpected error, 130 interrupted. An
    error is one line on stderr; with `--debug` an unexpected one is raised. Where the
    reader of its output has left, it prints nothing more and exits with the code that was
    due. Where the shell asks for completions it always raises SystemExit. `arguments`:
    None: those of the process."""
    # Read when torch is imported: a thread that waits for another sleeps. One that spins
    # keeps the other from its core where the machine is busy, and an audit took 50 times
    # as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # An empty path would be the directory one stands in.
        if any(word == "" or EMPTY_OPTION.fullmatch(word) for word in typed):
            raise UsageError(
                "an argument is empty", hint="is a variable of the shell not set?"
            )
        code = cli.main(args=arguments, prog_name="numdev", standalone_mode=False)
    except NumdevError as error:
        _exit_with_error(str(error), error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _exit_with_error(
            "interrupted; finished rows are kept; run the same command to resume", 130
        )
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context else ""
        _exit_with_error(_parser_words(error) + hint, 2)
    except _ReaderLeft as left:
        # Say nothing more, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(left.args[0])
    except SystemExit as stop:
        if os.environ.get(COMPLETION):
            raise  # click has answered the shell, and ends the program so
        _exit_with_error(f"{FOREIGN} ended the program (exit code {stop.code})", 3)
    except MemoryError:
        _exit_with_error("out of memory; request less", 3)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        hint = "; is the disk full or not writable?" if error.errno in OF_DISK else ""
        _exit_with_error(f"{where}{error.strerror or error}{hint}", 3)
    except Exception as error:
        if "--debug" in typed:
            raise
        hint = "a bug of numdev; run `numdev --debug ...` for the traceback"
        _exit_with_error(f"unexpected {type(error).__name__}: {error}; {hint}", 3)
    except BaseException as error:  # of a kind that numdev's own code never raises
        _exit_with_error(f"{FOREIGN} raised {one_line(error)}", 3)
    else:
        if code:
            sys.exit(code)


def _parser_words(error: click.ClickException) -> str:
    """Returns what click has against a command line, without its full stop: what was
    expected of an argument or a choice, and of an unknown option the nearest, as `no
    option '--fromat'; did you mean '--format'?`."""
    if isinstance(error, click.NoSuchOption):
        near = ", ".join(map(repr, error.possibilities or ()))
        return f"no option {error.option_name!r}" + f"; did you mean {near}?" * bool(near)
    param = error.param if isinstance(error, click.BadParameter) else None
    if param is not None and isinstance(error, click.MissingParameter):
        return f"expected {param.human_readable_name}, got none"
    if param is not None and isinstance(param.type, click.Choice):
        got = error.message.partition(" is not one of ")[0]
        return f"{param.opts[0]}: expected {' or '.join(param.type.choices)}, got {got}"
    return error.format_message().rstrip(".")


def _exit_with_error(message: str, code: int) -> None:
    """Prints one line on stderr, whatever is in the message (each character that is not
    printable becomes a space), and exits with the code."""
    line = "".join(c if c.isprintable() else " " for c in f"numdev: error: {message}")
    click.echo(line, err=True)
    sys.exit(code)
