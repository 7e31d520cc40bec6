"""`numdev train`, `numdev weights` and `numdev bounds`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.options import AtLeast, device_option, seed_option
from numdev.cli.session import FILE, Session, command, command_line
from numdev.errors import MeasurementError, UsageError

STEPS = "Steps to take instead of the file's."
NULL = (
    "Over steps: a run that differs from A by rounding alone, which says what "
    "chance makes. "
    "Repeatable; two or more."
)
STOP = "Stop after this time with everything saved; the same command resumes."


@command("train configs/train/tiny-ci.yaml")
@click.argument("config", type=FILE)
@click.option("--steps", type=AtLeast(1), metavar="N", help=STEPS)
@click.option(
    "--stop-after",
    type=AtLeast(0, whole=False),
    metavar="SECONDS",
    help=STOP,
)
@seed_option
@device_option
def train(
    config: Path,
    session: Session,
    stop_after: float | None,
    steps: int | None,
    seed: int | None,
    device: str | None,
) -> None:
    """Train small networks side by side, and measure how far their weights drift apart.

    CONFIG is a YAML file. Its variants (another attention kernel, format, seed,
    optimiser, or a difference of rounding alone) start from the same weights and see the
    same batches; at recorded steps their weights are compared with the golden run's. With
    --seed N the seeds are counted from N. The same request with the same --output resumes
    where it stopped, bit for bit."""
    from numdev.studies.training.config import TrainConfig, resolve
    from numdev.yamlfile import read_yaml

    expect_file(config, "train")
    raw = read_yaml(config, TrainConfig)
    request = resolve(raw, config.name, steps=steps, seed=seed, device=device)
    directory = session.begin(config.stem, request.fields_of_numbers())
    from numdev.studies.training.study import train as run

    report = session.run_study(run, request, directory, stop_after=stop_after)
    if report is not None:
        session.hand_over(report, directory)
    else:
        session.say(f"Stopped, and saved in {directory}; continue with the same command.")


@command("weights run-1/checkpoint run-2/checkpoint")
@click.argument("targets", nargs=-1, required=True, metavar="A B [C]...")
@click.option("--null", "nulls", multiple=True, metavar="RUN", help=NULL)
@device_option
def weights(
    targets: tuple[str, ...], nulls: tuple[str, ...], device: str | None, session: Session
) -> None:
    """Compare sets of weights tensor by tensor: B, and any further ones, with A.

    Each is a safetensors file, the index of a sharded one, a .pt, .pth or .bin file, a
    directory of either (of a Hugging Face checkpoint, say), a
    torch.distributed.checkpoint directory, or `demo`. No model is built. Exit code 0
    however far apart they are; 3 where something is damaged, after the rest was compared
    and reported.

    Over the steps of a training, by layer and by kind of tensor beside chance: give the
    directory of a `numdev train` or `numdev bounds` alone, whose checkpoints are compared
    with its golden run's; or a run each, as a directory of checkpoints by step, a list
    `a-step1,a-step2` or a pattern 'a-step*'."""
    if not session.as_json:
        session.say("weights: started")  # a directory is named after what is in them
    from numdev.studies.training.weights.distances_over_steps import weights_over_steps
    from numdev.studies.training.weights.run_checkpoints import has_runs
    from numdev.studies.training.weights.study import weights as compare

    for target in targets:
        expect_file(target, "weights")
    by_step = has_runs(targets)
    if nulls and not by_step:
        what = "--null: expected runs of several steps, got sets of weights"
        raise UsageError(what, hint="give runs as directories of checkpoints by step")
    if len(targets) < 2 and not by_step:
        raise UsageError("weights: expected two sets or more to compare, got one")
    name = Path(targets[0]).stem or "weights"
    asked = {"device": device or "auto"}
    if by_step:
        directory = session.directory(
            f"weights-{name}", [list(targets), list(nulls), device]
        )
        report = session.run_study(
            weights_over_steps, targets, directory, nulls=nulls, **asked
        )
    else:
        directory = session.directory(name, [list(targets), device])
        report = session.run_study(compare, targets, directory, **asked)
    session.hand_over(report, directory)
    if report.damage:
        first = report.damage[0]
        what = f"{first.tensor} {first.words}".strip()
        raise MeasurementError(
            what, hint=f"the rest was compared; see {directory}/report.json"
        )


@command("bounds numdev-reports/proxy-1234abcd")
@click.argument("run", type=FILE)
def bounds(run: Path, session: Session) -> None:
    """Compare how far flash moves weights with low precision, another seed, and chance.

    RUN is the report of a `numdev train`, or its directory. Needs neither torch nor a
    GPU. Distances between weights are proxies."""
    from numdev.studies.training.bounds import study

    expect_file(run, "bounds")
    report = study.bounds(run, command=command_line())
    directory = session.claim_directory(
        f"bounds-{report.request['target']}", report.request
    )
    session.hand_over(report, directory)
