"""What a diagnosis is asked to look at: one target, or the checkpoints of a series by step.

A series is several targets, or a directory that holds checkpoints: that of a `numdev train` with
its `checkpoints/`, or any other. Its steps are those that `training.json` tells, which `numdev
train` writes beside its weights, else those in the names of the directories (`...-step500`,
`checkpoint-500`). Checkpoints of a series have the same tensors. One that holds NaN or infinity,
as training that broke leaves it, is left out and named.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numdev.errors import MeasurementError, UsageError
from numdev.sources.checkpoint import WHOLE
from numdev.sources.files import some
from numdev.sources.pipeline import is_pipeline
from numdev.sources.tensorfile import holds_cases
from numdev.training.weights.files import Weights, open_weights

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,9})$", re.IGNORECASE)
YAML = (".yaml", ".yml")
GIVE = "give a checkpoint, a directory of checkpoints, a file of captured tensors, or `demo`"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One target: a set of weights, captured tensors, or a configuration that draws its cases."""

    target: str
    """As a source takes it: a path, or `demo`."""
    name: str
    """Of the directory or file; unique among the stages."""
    step: int | None = None
    weights: bool = True
    """Whether it is a set of weights, which a model is built from."""
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Stages in the order of their steps, or as they were given."""

    stages: tuple[Stage, ...]
    left_out: tuple[str, ...] = ()
    """Which checkpoints are not among them, and why."""


def series(targets: Sequence[str]) -> Series:
    """The stages that targets name, looked into as far as their weights' shapes and finiteness.

    Raises UsageError for a target that is none, for one that is a report, and for checkpoints that
    are no series: of different shapes, of one step twice. Raises MeasurementError where weights are
    damaged, and where no checkpoint has finite weights.
    """
    found = [stage for target in targets for stage in _stages(target)]
    found = _by_step(_named_apart(found))
    opened = [(stage, open_weights(stage.target)) for stage in found if stage.weights]
    _check_alike(opened)
    damaged = {stage: words for stage, weights in opened if (words := _not_finite(stage, weights))}
    if len(damaged) == len(found):
        raise MeasurementError(
            f"{next(iter(damaged.values()))}: nothing can be diagnosed",
            hint="diagnose a checkpoint from before that",
        )
    known = {stage: weights.identity() for stage, weights in opened}
    return Series(
        stages=tuple(
            dataclasses.replace(stage, sha256=known.get(stage))
            for stage in found
            if stage not in damaged
        ),
        left_out=tuple(f"{words}; it was left out." for words in damaged.values()),
    )


def step_of(path: Path) -> int | None:
    """The step of training of a checkpoint; None where nothing tells it."""
    try:
        told = json.loads((path / "training.json").read_text(encoding="utf-8"))["step"]
        if isinstance(told, int):
            return told
    except (OSError, ValueError, KeyError, TypeError):
        pass
    named = STEP.search(path.name)
    return int(named[1]) if named else None


def _stages(target: str) -> list[Stage]:
    if target == "demo":
        return [Stage(target=target, name=target)]
    path = Path(target)
    if not path.exists():
        raise UsageError(f"{target}: no such file or directory", hint=GIVE)
    if is_pipeline(path):  # else its text encoder would be taken for a checkpoint of a series
        raise UsageError(
            f"{target}: is a diffusers pipeline, which a diagnosis does not take",
            hint="numdev audit takes it",
        )
    if path.suffix in YAML or holds_cases(path):
        return [Stage(target=target, name=path.resolve().name, weights=False)]
    if path.is_file() or _is_checkpoint(path):
        _refuse_report(path)
        return [_stage(path)]
    within = _within(path / "checkpoints") or _within(path)
    if not within:
        _refuse_report(path)
        raise UsageError(f"{target}: holds no checkpoint", hint=GIVE)
    return within


def _stage(path: Path) -> Stage:
    return Stage(target=str(path), name=path.resolve().name, step=step_of(path))


def _is_checkpoint(path: Path) -> bool:
    names = (*WHOLE, *(f"{name}.index.json" for name in WHOLE))
    return (path / "config.json").is_file() and any((path / name).is_file() for name in names)


def _within(path: Path) -> list[Stage]:
    """The checkpoints in a directory. Raises UsageError where they are of several series."""
    if not path.is_dir():
        return []
    found = [_stage(held) for held in sorted(path.iterdir()) if _is_checkpoint(held)]
    kinds = sorted({STEP.sub("", stage.name).rstrip("-_") for stage in found})
    if len(kinds) > 1 and any(stage.step is not None for stage in found):
        raise UsageError(
            f"{path}: holds {len(kinds)} series of checkpoints ({some(kinds)})",
            hint=f"name one: numdev diagnose {path}/{kinds[0]}-*",
        )
    return found


def _refuse_report(path: Path) -> None:
    """A report is what a directory of numdev's holds beside, or in place of, what it is about."""
    file = path / "report.json" if path.is_dir() else path
    if file.suffix != ".json" or file.name.endswith(".index.json") or not file.is_file():
        return
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("kind")
    except (ValueError, AttributeError):
        kind = None
    what = f"is the report of numdev {kind}" if kind else "is no checkpoint"
    hint = "give the checkpoint itself"
    if kind == "train":
        hint = "it kept no checkpoints; train with `checkpoints:` in its configuration"
    raise UsageError(f"{path}: {what}", hint=hint)


def _named_apart(stages: Sequence[Stage]) -> list[Stage]:
    """With the whole path as the name where two directories are called alike."""
    twice = next((t for t, n in Counter(s.target for s in stages).items() if n > 1), None)
    if twice is not None:
        raise UsageError(f"{twice}: is given twice", hint="name every checkpoint once")
    count = Counter(stage.name for stage in stages)
    return [
        dataclasses.replace(stage, name=stage.target) if count[stage.name] > 1 else stage
        for stage in stages
    ]


def _by_step(stages: Sequence[Stage]) -> list[Stage]:
    """In the order of their steps, where all have one."""
    steps = [stage.step for stage in stages]
    if len(stages) < 2 or None in steps:
        return list(stages)
    twice = next((step for step, n in Counter(steps).items() if n > 1), None)
    if twice is not None:
        both = [stage.target for stage in stages if stage.step == twice]
        raise UsageError(
            f"{both[0]} and {both[1]} are both of step {twice}",
            hint="diagnose one series at a time",
        )
    return sorted(stages, key=lambda stage: stage.step or 0)


def _check_alike(opened: Sequence[tuple[Stage, Weights]]) -> None:
    """Raises UsageError unless all have the same tensors."""
    for stage, weights in opened:
        if weights.damage:
            raise MeasurementError(f"{stage.target}: {weights.damage[0].words}")
        first, of_first = opened[0]
        for name in sorted(weights.tensors.keys() | of_first.tensors.keys()):
            a, b = (w.find(name) for w in (of_first, weights))
            if a is None or b is None or a.shape != b.shape:
                shapes = " and ".join(
                    "missing" if x is None else str(list(x.shape)) for x in (a, b)
                )
                raise UsageError(
                    f"{first.name} and {stage.name} are no series: {name} is {shapes}",
                    hint="diagnose them one at a time",
                )


def _not_finite(stage: Stage, weights: Weights) -> str | None:
    """The first tensor with NaN or infinity, in words."""
    for name, stored in weights.tensors.items():
        values = stored.read()
        if values.is_floating_point() and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            return f"{stage.name}: {name} holds {count} NaN or infinite elements"
    return None
