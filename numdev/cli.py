"""The command line: parse, call one study, write, render.

Each command is options, one call, and what to show of it; everything heavy is imported inside the
command, so that `--help` and shell completion answer at once. stdout carries the result, stderr the
rest. This is the only place that catches a NumdevError and the only one that prints an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from numdev import __version__
from numdev.errors import MeasurementError, NumdevError, UsageError

if TYPE_CHECKING:
    from numdev.config import AuditConfig, AuditRequest, SweepRequest
    from numdev.report import Report

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_KERNELS = ("sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-default")


class _ReaderLeft(Exception):
    """The reader of a pipe we write to is gone, as in `numdev report ... | head`. With the exit
    code that was due: what a gate decided holds whoever reads it."""

    def __init__(self, code: int | None) -> None:
        self.code = code or 0


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """click and rich make a closed pipe exit code 1, which here would read as "exceeded"."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeft(ctx.obj) from error
        except SystemExit as stop:
            if isinstance(stop.__context__, BrokenPipeError):
                raise _ReaderLeft(ctx.obj) from stop
            raise


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog="Example:  numdev audit demo",
)
@click.version_option(__version__, prog_name="numdev")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Are my numbers right? Numeric-deviation audits for attention kernels.

    numdev measures flash attention, the plain baseline and your own kernels against an fp64
    reference on the same inputs, and sets what it finds beside the cost of low precision.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def result_options(function: F) -> F:
    """Options of every command that writes a report."""
    for option in (
        click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors."),
        click.option("--json", "as_json", is_flag=True, help="The report on stdout, nothing else."),
        click.option("--overwrite", is_flag=True, help="Start anew in a directory that is in use."),
        click.option(
            "--output",
            "-o",
            type=click.Path(path_type=Path),
            help="Directory for the results.  [default: numdev-reports/NAME-HASH]",
        ),
    ):
        function = option(function)
    return function


def device_option(function: F) -> F:
    """Where to compute."""
    return click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Where to run.  [auto]"
    )(function)


def output_options(function: F) -> F:
    """Options every measuring command shares."""
    function = result_options(function)
    seed = click.option(
        "--seed", type=click.IntRange(min=0), help="Seed of all drawn numbers.  [0]"
    )
    return device_option(seed(function))


def measuring_options(function: F) -> F:
    """Options of how kernels are run and measured."""
    for option in (
        click.option(
            "--time-limit",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            help="What an isolated kernel may take.  [60]",
        ),
        click.option(
            "--reproducers",
            type=click.IntRange(min=0),
            metavar="N",
            help="Write a script that shows it for the first N findings.  [8]",
        ),
        click.option(
            "--isolate",
            is_flag=True,
            default=None,
            help="Run kernels in a process of their own, so that a crash or a hang costs one row.",
        ),
        click.option(
            "--repeats",
            type=click.IntRange(min=1),
            metavar="N",
            help="Run each kernel N times on the same inputs; from 2 on its noise is measured.  "
            "[2 in audit, 1 in sweep]",
        ),
        click.option(
            "--rows",
            "sampled_rows",
            type=click.IntRange(min=1),
            metavar="N",
            help="Measure N query rows of each head, drawn with the seed and spread over "
            "positions; kernels still run whole. Exact for these rows in the output and dq. With "
            "--backward also N keys, which takes an fp64 forward pass of all queries. Averages get "
            "95 % intervals, maxima are lower bounds.  [all]",
        ),
        click.option(
            "--backward",
            "gradients",
            is_flag=True,
            default=None,
            help="Measure the backward pass too: dq, dk and dv.",
        ),
    ):
        function = option(function)
    return function


@cli.command(epilog="Example:  numdev audit demo --format bfloat16 --format float32")
@click.argument("target", required=False)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="Kernel to audit: a name of `numdev kernels`, or package.module:function. "
    "Repeatable; replaces the default, all SDPA backends.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help="Format to audit, for example bfloat16, float16, float32. Repeatable.  [bfloat16]",
)
@click.option(
    "--model",
    metavar="FACTORY",
    help="For a state dict: package.module:factory, which builds its model. It is called with the "
    "configuration stored in the file if it takes an argument.",
)
@click.option("--model-dtype", metavar="NAME", help="Format the model itself runs in.  [float32]")
@click.option(
    "--text",
    multiple=True,
    type=click.Path(),
    help="Text file the model reads. Repeatable. Without it token ids are drawn.",
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="DIR",
    help="Directory of the tokenizer for --text.  [the checkpoint's]",
)
@click.option(
    "--inputs",
    metavar="FILE",
    help="Safetensors file of further inputs, named as the model's forward names them, for example "
    "pixel_values. What a model needs and nobody gives is drawn.",
)
@click.option(
    "--generate",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let the model write: audit the prefill and N decode steps, with a cache, in place of one "
    "forward pass.",
)
@click.option("--length", type=click.IntRange(min=1), help="Tokens in a sequence.  [256]")
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    help="Independent sequences; a bias needs at least 8.  [8]",
)
@click.option("--layers", metavar="LIST", help="Only these layers, for example 0,3-5.")
@click.option("--heads", metavar="LIST", help="Only these query heads.")
@click.option(
    "--explain",
    is_flag=True,
    default=None,
    help="Find out which roundings make each kernel's errors.",
)
@click.option(
    "--control",
    is_flag=True,
    default=None,
    help="Measure planted faults of growing size too, to show which of them a gate would catch.",
)
@measuring_options
@click.option(
    "--save-cases",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write every attention call, unrounded, to this new directory, which is a TARGET itself.",
)
@output_options
def audit(
    target: str | None,
    output: Path | None,
    save_cases: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Audit the attention of a model, of captured tensors, or of the shapes in a YAML file.

    TARGET is a Hugging Face checkpoint directory, a state dict (.safetensors, its sharded index,
    .pt, .pth, .bin; with --model), a .safetensors file of captured tensors or a directory of them,
    a YAML configuration, or `demo` (the checkpoint that ships with numdev). Without it,
    configs/audit/default.yaml. The same request into the same
    directory continues where it stopped.
    """
    from numdev.execute import digest
    from numdev.studies.audit import audit as run

    request = _audit_request(target, flags)
    name = Path(request.target).stem or "audit"
    directory = output or Path("numdev-reports") / f"{name}-{digest(request.model_dump())[:8]}"
    show = not (quiet or as_json)
    with _measuring(show=show) as progress:
        found = run(
            request,
            directory,
            overwrite=overwrite,
            save_cases=save_cases,
            command=_command(),
            progress=progress,
            say=lambda text: None if quiet else click.echo(text, err=True),
        )
    _hand_over(found, directory, as_json=as_json, quiet=quiet)


@cli.command(epilog="Example:  numdev sweep configs/sweep/ci.yaml --dry-run")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="NAME",
    help="Kernel to sweep: a name of `numdev kernels`, or package.module:function. "
    "Repeatable; replaces the file's.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help="Format, for example bfloat16, or e8m10 for kernels that take any. Repeatable; "
    "replaces the file's.",
)
@measuring_options
@click.option("--dry-run", is_flag=True, help="Say what it would measure and cost, and stop.")
@output_options
def sweep(
    config: Path,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    **flags: Any,
) -> None:
    """Measure how deviation depends on length, format, tile size, inputs or kernel.

    CONFIG is a YAML file. A list where a scalar belongs is an axis of the grid; every cell is
    measured with every seed, and the report gives means with confidence intervals. With --seed N
    the seeds are counted from N. The same request into the same directory continues where it
    stopped.
    """
    from numdev.execute import digest
    from numdev.studies.sweep import plan
    from numdev.studies.sweep import sweep as run

    def say(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    request = _sweep_request(config, flags)
    planned = plan(request)
    if dry_run or not quiet:
        click.echo(planned.cost(), err=not dry_run)
    if dry_run:
        return
    directory = output or Path("numdev-reports") / f"{config.stem}-{digest(request.measured())[:8]}"
    with _measuring(show=not (quiet or as_json)) as progress:
        found = run(
            planned, directory, overwrite=overwrite, command=_command(), progress=progress, say=say
        )
    _hand_over(found, directory, as_json=as_json, quiet=quiet)


@cli.command(epilog="Example:  numdev train configs/train/tiny-ci.yaml")
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps to take, in place of the file's.",
)
@click.option(
    "--stop-after",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Stop then, with everything saved; the same command continues.",
)
@output_options
def train(
    config: Path,
    steps: int | None,
    stop_after: float | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    device: str | None,
) -> None:
    """Train small networks side by side, and measure how far their weights drift apart.

    CONFIG is a YAML file. Its variants (another attention kernel, format, seed, optimiser, or a
    difference of rounding alone) start from the same weights and see the same batches; at recorded
    steps their weights are compared with the golden run's. With --seed N the seeds are counted from
    N. The same request into the same directory continues where it stopped, bit for bit.
    """
    from numdev.config import read_yaml
    from numdev.execute import digest
    from numdev.studies.train import train as run
    from numdev.trainconfig import TrainConfig, resolve

    request = resolve(
        read_yaml(config, TrainConfig), config.name, steps=steps, seed=seed, device=device
    )
    directory = output or Path("numdev-reports") / f"{config.stem}-{digest(request.measured())[:8]}"
    with _measuring(show=not (quiet or as_json)) as progress:
        found = run(
            request,
            directory,
            overwrite=overwrite,
            stop_after=stop_after,
            command=_command(),
            progress=progress,
        )
    if found is not None:
        _hand_over(found, directory, as_json=as_json, quiet=quiet)
    elif not quiet:
        click.echo(f"Stopped, and saved in {directory}; continue with the same command.", err=True)


@cli.command(epilog="Example:  numdev weights run-1/checkpoint run-2/checkpoint")
@click.argument("targets", nargs=-1, required=True, metavar="A B [C]...")
@device_option
@result_options
def weights(
    targets: tuple[str, ...],
    device: str | None,
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare sets of weights tensor by tensor: B, and any further ones, with A.

    Each is a safetensors file, the index of a sharded one, a .pt, .pth or .bin file, a directory of
    either (of a Hugging Face checkpoint, say), a torch.distributed.checkpoint directory, or `demo`.
    No model is built. Exit code 0 however far apart they are; 3 where something is damaged, after
    the rest was compared and reported.
    """
    from numdev.execute import digest
    from numdev.studies.weights import weights as run

    if len(targets) < 2:
        raise UsageError(
            "there is one set of weights and nothing to compare it with", hint="numdev weights A B"
        )
    name = f"{Path(targets[0]).stem or 'weights'}-{digest([list(targets), device])[:8]}"
    directory = output or Path("numdev-reports") / name
    with _measuring(show=not (quiet or as_json)) as progress:
        found = run(
            targets,
            directory,
            device=device or "auto",
            overwrite=overwrite,
            command=_command(),
            progress=progress,
        )
    _hand_over(found, directory, as_json=as_json, quiet=quiet)
    if found.damage:
        first = found.damage[0]
        raise MeasurementError(
            f"{first.tensor + ' ' if first.tensor else ''}{first.words}",
            hint=f"the rest was compared; {directory}/report.json names all that is damaged",
        )


@contextlib.contextmanager
def _measuring(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """The progress callback of a study, while a foreign kernel's prints are kept off stdout and no
    Ctrl-C is lost."""
    from numdev.interrupt import watching
    from numdev.render import terminal

    with (
        contextlib.redirect_stdout(sys.stderr),
        terminal.progress(show=show) as tell,
        watching() as check,
    ):

        def progress(what: str, done: int, total: int) -> None:
            check()
            tell(what, done, total)

        yield progress


def _hand_over(found: Report, directory: Path, *, as_json: bool, quiet: bool) -> None:
    """Write a finished report, and show it as asked. Raises MeasurementError, after that, for one
    in which nothing was measured: that is no success."""
    from numdev import report as reports
    from numdev.render import html, terminal

    reports.write(found, directory)
    html.write(found, directory)
    if as_json:
        click.echo(found.model_dump_json())
    elif not quiet:
        terminal.show(found)
        click.echo(f"Report: {directory / 'report.html'}", err=True)
    if not found.measured:
        raise MeasurementError(found.unmeasured, hint=f"{directory}/report.json says why")


def checkpoint_options(function: F) -> F:
    """A checkpoint for each role that `bounds` knows."""
    for name, role in (
        ("null", "That differs by chance alone: re-rounded at random, or moved by one ulp."),
        ("other-seed", "From another initialisation."),
        ("attention-precision", "As the golden one, with attention alone in another format."),
        ("low-precision", "As the golden one, all of it in another format."),
        ("flash", "As the golden one, with a flash kernel."),
        ("golden", "The checkpoint that distances are taken from, in place of RUN."),
    ):
        function = click.option(
            f"--{name}",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="CHECKPOINT",
            help=f"{role} Repeatable.",
        )(function)
    return function


@cli.command(epilog="Example:  numdev bounds numdev-reports/proxy-1234abcd")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@checkpoint_options
@result_options
def bounds(
    run: Path | None,
    golden: tuple[Path, ...],
    output: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
    **others: tuple[Path, ...],
) -> None:
    """Set how far flash moves weights beside low precision, another seed, and chance.

    RUN is the report of a `numdev train`, or its directory; it needs neither torch nor a GPU. In
    its place checkpoints can be given by role, each several times for several seeds: the k-th of a
    role belongs to the k-th --golden. Distances between weights are proxies.
    """
    import hashlib
    import json

    from numdev.studies.bounds import claim, of_checkpoints, of_run

    roles = {role: paths for role, paths in others.items() if paths}
    if (run is None) == (not golden) or (run is not None and roles):
        raise UsageError(
            "bounds takes the report of a training run, or checkpoints by role",
            hint="give RUN, or --golden with --flash, --low-precision, --other-seed, --null",
        )
    if run is not None:
        found = of_run(run, command=_command())
    elif roles:
        found = of_checkpoints(golden, roles, command=_command())
    else:
        raise UsageError("--golden alone is nothing to compare", hint="give --flash too")
    digest = hashlib.sha256(json.dumps(found.request, sort_keys=True).encode()).hexdigest()
    name = f"bounds-{found.request['target']}-{digest[:8]}"
    directory = output or Path("numdev-reports") / name
    claim(directory, found.request, overwrite=overwrite)
    _hand_over(found, directory, as_json=as_json, quiet=quiet)


@cli.command(epilog="Example:  numdev report numdev-reports/demo-1234abcd")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def report(path: Path, as_json: bool) -> None:
    """Show a finished report again. PATH is a report.json or a directory with one."""
    from numdev import report as reports
    from numdev.render import terminal

    found = reports.read(path)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        terminal.show(found)


@cli.command(epilog="Example:  numdev gate numdev-reports/demo-1234abcd")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--rules",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file of thresholds.  [default: configs/gate/default.yaml]",
)
@click.option("--json", "as_json", is_flag=True, help="The verdicts as JSON.")
@click.pass_context
def gate(context: click.Context, path: Path, rules: Path | None, as_json: bool) -> None:
    """Judge a finished report by rules, for CI. PATH is a report.json or a directory with one.

    Needs neither torch nor a GPU. Exit code 0: passed. 1: a limit is exceeded. 2: a wrong option or
    rule file. 3: something could not be measured or judged, which is never a pass.
    """
    import json

    from numdev import report as reports
    from numdev.findings import findings_of
    from numdev.gate import judge_report
    from numdev.render import verdicts
    from numdev.rules import default_rules, read_rules

    chosen = read_rules(rules) if rules else default_rules()
    found = reports.read(path)
    if not isinstance(found, reports.AuditReport | reports.SweepReport):
        raise UsageError(
            f"{path}: is a report of numdev {found.kind}, which has no rows to judge",
            hint="gate the report of an audit or a sweep",
        )
    judged = judge_report(found, chosen)
    findings, tested = findings_of(found.rows, chosen)
    context.find_root().obj = judged.exit_code
    if as_json:
        parts = judged.model_dump(mode="json") | {"exit_code": judged.exit_code}
        parts["findings"] = [finding.model_dump(mode="json") for finding in findings]
        click.echo(json.dumps(parts))
    else:
        verdicts.show(judged, findings, tested)
    context.exit(judged.exit_code)


@cli.command(epilog="Example:  numdev kernels --check sdpa-flash")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Judge availability on this device.",
)
@click.option(
    "--check",
    "checked",
    metavar="NAME",
    help="Put one kernel, a name or package.module:function, through small cases with known "
    "answers. Exit code 1 if it is wrong somewhere, 3 if it cannot run here.",
)
@click.option("--json", "as_json", is_flag=True, help="The table, or the check, as JSON.")
def kernels(device: str, checked: str | None, as_json: bool) -> None:
    """List the kernels: which can run here, and why the others cannot."""
    if checked is not None:
        _check_kernel(checked, device, as_json)
        return
    import json

    from numdev.kernels import all_kernels
    from numdev.render import terminal
    from numdev.system import System

    system = System.here(device)
    table = [
        {"name": k.name, "missing": k.missing(system), "summary": k.summary, "options": k.options}
        for k in all_kernels().values()
    ]
    if as_json:
        click.echo(json.dumps(table, default=str))
    else:
        terminal.show_kernels(table, system)


def _check_kernel(name: str, device: str, as_json: bool) -> None:
    """Check one kernel's conformance, show it, and exit with 1 if it does not conform."""
    from numdev.conformance import check
    from numdev.kernels import find
    from numdev.render import terminal
    from numdev.system import System

    with contextlib.redirect_stdout(sys.stderr):  # a foreign kernel may print
        found = check(find(name), System.here(device))
    if as_json:
        click.echo(found.model_dump_json())
    else:
        terminal.show_conformance(found)
    if not found.conforms:
        click.get_current_context().exit(1)


def _audit_request(target: str | None, flags: dict[str, Any]) -> AuditRequest:
    """Target, YAML and flags resolved: a flag beats the YAML, the YAML beats the default."""
    from numdev.config import AuditRequest, Choice

    config, name = _target(target)
    given: dict[str, Any] = {
        "kernels": tuple(Choice(name=k) for k in flags.pop("kernels")) or None,
        "formats": flags.pop("formats") or None,
        "text": flags.pop("text") or None,
        "layers": _numbers(flags.pop("layers"), "--layers"),
        "heads": _numbers(flags.pop("heads"), "--heads"),
        **flags,
    }
    merged = {k: v for k, v in config.items() if v is not None}
    merged |= {k: v for k, v in given.items() if v is not None}
    merged.setdefault("kernels", tuple(Choice(name=k) for k in DEFAULT_KERNELS))
    return AuditRequest(target=name, **merged)


def _sweep_request(path: Path, flags: dict[str, Any]) -> SweepRequest:
    """A sweep's YAML and flags resolved, as for an audit."""
    from numdev.config import Choice, SweepConfig, SweepRequest, read_yaml

    given: dict[str, Any] = {k: v for k, v in read_yaml(path, SweepConfig) if v is not None}
    given.setdefault("kernels", tuple(Choice(name=k) for k in DEFAULT_KERNELS))
    if flags["kernels"]:
        given["kernels"] = tuple(Choice(name=k) for k in flags["kernels"])
    if flags["formats"]:
        given["formats"] = flags["formats"]
    same = ("device", "gradients", "repeats", "isolate", "time_limit", "reproducers")
    for name in (*same, "sampled_rows"):
        if flags[name] is not None:
            given[name] = flags[name]
    request = SweepRequest(target=path.name, **given)
    if flags["seed"] is None:
        return request
    seeds = range(flags["seed"], flags["seed"] + len(request.seeds))
    return request.model_copy(update={"seeds": tuple(seeds)})


def _target(target: str | None) -> tuple[dict[str, Any], str]:
    """What the argument names, as configuration values, and what to call it."""
    from numdev.config import AuditConfig, bundled, read_yaml

    path = bundled("audit/default.yaml") if target is None else Path(target)
    if target == "demo":
        return {"checkpoint": "demo"}, "demo"
    if path.suffix in (".yaml", ".yml"):
        config: AuditConfig = read_yaml(path, AuditConfig)
        return dict(config), path.name
    if not path.exists():
        raise UsageError(
            f"{target}: no such file or directory",
            hint="give a checkpoint, a file of captured tensors, a YAML file, or `demo`",
        )
    return {"checkpoint": str(path)}, path.resolve().name


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`0,3-5` as (0, 3, 4, 5)."""
    if text is None:
        return None
    chosen: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not numbers:
            raise UsageError(f"{option} {text!r}: cannot read {part!r}", hint="write 0,3-5")
        chosen += numbers
    return tuple(dict.fromkeys(chosen))


def _command() -> str:
    return " ".join(["numdev", *sys.argv[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done or passed, 1 exceeded, 2 usage, 3 could not measure,
    130 interrupted."""
    try:
        code = cli.main(args=arguments, prog_name="numdev", standalone_mode=False)
    except NumdevError as error:
        _fail(str(error), error.exit_code)
    except click.exceptions.Abort:
        _fail("interrupted; finished rows are kept, run the same command to continue", 130)
    except KeyboardInterrupt:
        _fail("interrupted; finished rows are kept, run the same command to continue", 130)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context else ""
        _fail(error.format_message().rstrip(".") + hint, 2)
    except _ReaderLeft as left:
        # Say nothing more, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(left.code)
    except SystemExit as stop:
        _fail(f"the code of a kernel ended the program (exit code {stop.code})", 3)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; is there room, and may you write there?", 3)
    except Exception as error:
        if "--debug" in (sys.argv[1:] if arguments is None else arguments):
            raise
        hint = "a bug of numdev; run `numdev --debug ...` for the traceback"
        _fail(f"unexpected {type(error).__name__}: {error}; {hint}", 3)
    else:
        if code:
            sys.exit(code)


def _fail(message: str, code: int) -> None:
    """One line on stderr, whatever is in the message: control characters become spaces."""
    line = "".join(c if c.isprintable() else " " for c in f"numdev: error: {message}")
    click.echo(line, err=True)
    sys.exit(code)
