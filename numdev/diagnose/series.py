"""What a diagnosis is asked to look at: one target, or the checkpoints of a series by step.

A series is several targets, or a directory that holds checkpoints, or that of a `numdev train` with
its `checkpoints/`. Steps are those of `training.json`, which `numdev train` writes beside its
weights, else those in the names of the directories (`...-step500`, `checkpoint-500`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from numdev.errors import MeasurementError, UsageError
from numdev.sources.checkpoint import WHOLE
from numdev.sources.pipeline import is_pipeline
from numdev.sources.tensorfile import holds_cases
from numdev.training.weights.files import Weights, open_weights

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,9})$", re.IGNORECASE)
YAML = (".yaml", ".yml")
GIVE = (
    "give a checkpoint, a directory of checkpoints (a training keeps them with `checkpoints:`), "
    "a file of captured tensors, or `demo`"
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One target: a set of weights, captured tensors, or a configuration that draws its cases."""

    target: str  # as a source takes it: a path, or `demo`
    name: str  # of the directory or file; unique among the stages
    step: int | None = None
    weights: bool = True  # whether it is a set of weights, which a model is built from
    sha256: str | None = None


def series(targets: Sequence[str]) -> tuple[tuple[Stage, ...], tuple[str, ...]]:
    """The stages that targets name, in the order of their steps, or as they were given; and which
    checkpoints were left out because they hold NaN or infinity.

    Raises UsageError for a target that is none, and for two checkpoints of one step,
    MeasurementError where weights are damaged, and where no checkpoint has finite weights."""
    sound, left_out = list[Stage](), list[str]()
    for stage in _in_order([stage for target in targets for stage in _stages(target)]):
        if not stage.weights:
            sound.append(stage)
            continue
        weights = open_weights(stage.target)
        if weights.damage:
            raise MeasurementError(f"{weights.name}: {weights.damage[0]}")
        if words := _not_finite(weights):
            left_out.append(f"{stage.name}: {words}; left out.")
        else:
            sound.append(replace(stage, sha256=weights.identity()))
    if not sound:
        raise MeasurementError(left_out[0], hint="diagnose a checkpoint from before that")
    return tuple(sound), tuple(left_out)


def _stages(target: str) -> list[Stage]:
    path = Path(target)
    if target == "demo":
        return [Stage(target=target, name=target)]
    if not path.exists():
        raise UsageError(f"{target}: no such file or directory", hint=GIVE)
    if is_pipeline(path):  # else its text encoder would be taken for a checkpoint of a series
        raise UsageError(f"{target}: diagnose takes no pipeline", hint="numdev audit takes it")
    if path.suffix in YAML or holds_cases(path):
        return [Stage(target=target, name=path.resolve().name, weights=False)]
    alone = path.is_file() or _is_checkpoint(path)
    held = [path] if alone else _within(path / "checkpoints") or _within(path)
    if not held:
        raise UsageError(f"{target}: holds no checkpoint", hint=GIVE)
    return [Stage(target=str(each), name=each.resolve().name, step=step_of(each)) for each in held]


def _within(path: Path) -> list[Path]:
    return sorted(filter(_is_checkpoint, path.iterdir())) if path.is_dir() else []


def _is_checkpoint(path: Path) -> bool:
    names = (*WHOLE, *(f"{name}.index.json" for name in WHOLE))
    return (path / "config.json").is_file() and any((path / name).is_file() for name in names)


def step_of(path: Path) -> int | None:
    """The step of training of a checkpoint; None where nothing tells it."""
    named = STEP.search(path.name)
    try:
        told = json.loads((path / "training.json").read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        told = None
    return told if isinstance(told, int) else int(named[1]) if named else None


def _in_order(stages: Sequence[Stage]) -> list[Stage]:
    """By step where all have one; with the whole path as the name where two are called alike."""
    if len({stage.target for stage in stages}) < len(stages):
        raise UsageError(f"{stages[0].target}: a checkpoint is given twice")
    names, steps = (Counter(getattr(s, field) for s in stages) for field in ("name", "step"))
    named = [replace(s, name=s.target) if names[s.name] > 1 else s for s in stages]
    if None in steps:
        return named
    step, times = steps.most_common(1)[0]
    if times > 1:
        raise UsageError(
            f"{stages[0].target}: {times} checkpoints are of step {step}",
            hint="name one series, such as run/checkpoints/bf16-seed0-*",
        )
    return sorted(named, key=lambda stage: stage.step or 0)


def _not_finite(weights: Weights) -> str | None:
    """The first tensor with NaN or infinity, in words."""
    for name, stored in weights.tensors.items():
        values = stored.read()
        if values.is_floating_point() and (count := int((~values.isfinite()).sum())):
            return f"{name} holds {count} NaN or infinite elements"
    return None
