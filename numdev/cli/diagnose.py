"""`numdev diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import yaml

from numdev.cli.file_kinds import expect_file
from numdev.cli.options import options_of
from numdev.cli.session import Session, command
from numdev.errors import UsageError
from numdev.request_models import DiagnoseRequest
from numdev.target_names import name_of
from numdev.yamlfile import Scalar, validated


@command("diagnose demo --preset qiu2025")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET [TARGET]...")
@click.option(
    "--preset",
    metavar="NAME",
    help=(
        "The attention to diagnose: a preset of `emulated`. qiu2025 is the "
        "paper's.  [fa2]"
    ),
)
@click.option(
    "--attention",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another option of `emulated`, e.g. pv=bfloat16 or delta_from=dP*P. Repeatable.",
)
@options_of(DiagnoseRequest, without="tokenizer inputs")
def diagnose(
    targets: tuple[str, ...],
    session: Session,
    preset: str | None,
    attention: tuple[str, ...],
    **flags: object,
) -> None:
    """Find the heads whose rounding errors do not cancel, show why, and what each cure
    changes.

    TARGET is what `numdev audit` takes: a checkpoint, `demo`, or captured tensors with
    grad_out. Several checkpoints, or a directory of them such as that of a `numdev
    train`, are a series over training. The same request with the same --output resumes
    where it stopped."""
    for target in targets:
        expect_file(target, "diagnose")
    first = targets[0]
    asked = {
        **flags,
        "target": first if first == "demo" else name_of(Path(first)),
        "targets": targets,
        "attention": attention_options(preset, attention),
        "kernels": flags["kernels"] or None,
    }
    request = validated(asked, DiagnoseRequest, "numdev diagnose")
    name = f"diagnose-{Path(request.target).stem or 'series'}"
    directory = session.begin(name, request.model_dump(mode="json"))
    from numdev.studies.diagnose.study import diagnose as run

    session.hand_over(
        session.run_study(run, request, directory, say=session.say), directory
    )


def attention_options(
    preset: str | None, pairs: Sequence[str], flag: str = "--attention"
) -> dict[str, Scalar]:
    """Returns a preset and the `pairs` NAME=VALUE of a `flag`, as options of `emulated`;
    the values are read as YAML (a number, true, a word; None for nothing). The preset is
    fa2 where neither `preset` nor a pair names one. Raises UsageError for what is no such
    pair, for a list or mapping, and for two different values of one name."""
    options: dict[str, Scalar] = {} if preset is None else {"preset": preset}
    for item in pairs:
        name, equals, value = map(str.strip, item.partition("="))
        try:
            chosen = yaml.safe_load(value)  # a number, true, or a word
        except yaml.YAMLError:
            chosen = [value]
        if not name or not equals or isinstance(chosen, list | dict):
            raise UsageError(f"{flag}: expected NAME=VALUE, got {item!r}")
        if options.setdefault(name, chosen) != chosen:
            raise UsageError(
                f"{flag}: {name} is given twice ({options[name]} and {chosen})"
            )
    return {"preset": "fa2", **options}
