"""What a diagnosis is asked to look at: one target, or the checkpoints of a series by step.

A series is several targets, or a directory that holds checkpoints, or that of a `numdev train` with
its `checkpoints/`. Steps are those of `training.json`, which `numdev train` writes beside its
weights, else those in the names of the directories (`...-step500`, `checkpoint-500`). One that
holds NaN or infinity is left out and named."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numdev.errors import MeasurementError, UsageError
from numdev.sources.checkpoint import WHOLE
from numdev.sources.files import some
from numdev.sources.pipeline import is_pipeline
from numdev.sources.tensorfile import holds_cases
from numdev.training.weights.files import Weights, open_weights

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,9})$", re.IGNORECASE)
YAML = (".yaml", ".yml")
GIVE = "give a checkpoint, a directory of checkpoints, a file of captured tensors, or `demo`"
ALONE = "diagnose them one at a time"


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
    checkpoints were left out, and why.

    Raises UsageError for a target that is none, and for two checkpoints of one step,
    MeasurementError where weights are damaged, and where no checkpoint has finite weights."""
    stages = _in_order([stage for target in targets for stage in _stages(target)])
    opened = {stage.name: open_weights(stage.target) for stage in stages if stage.weights}
    for weights in opened.values():
        if weights.damage:
            raise MeasurementError(f"{weights.name}: {weights.damage[0].words}")
    broken = {name: words for name, weights in opened.items() if (words := _not_finite(weights))}
    if len(broken) == len(stages):
        name, words = next(iter(broken.items()))
        raise MeasurementError(f"{name}: {words}", hint="diagnose a checkpoint from before that")
    sound = (
        dataclasses.replace(s, sha256=opened[s.name].identity() if s.weights else None)
        for s in stages
        if s.name not in broken
    )
    return tuple(sound), tuple(f"{name}: {words}; left out." for name, words in broken.items())


def step_of(path: Path) -> int | None:
    """The step of training of a checkpoint; None where nothing tells it."""
    told = _json(path / "training.json").get("step")
    named = STEP.search(path.name)
    return told if isinstance(told, int) else int(named[1]) if named else None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


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
    found = [_stage(path)] if alone else _within(path / "checkpoints") or _within(path)
    # A report is what a directory of numdev's holds beside, or in place of, what it is about.
    report = path / "report.json" if path.is_dir() else path
    kind = _json(report).get("kind") if report.suffix == ".json" else None
    if kind and (alone or not found):
        kept = "; a training keeps checkpoints with `checkpoints:`" if kind == "train" else ""
        raise UsageError(f"{path}: is a report of numdev {kind}, no checkpoint{kept}", hint=GIVE)
    if not found:
        raise UsageError(f"{target}: holds no checkpoint", hint=GIVE)
    return found


def _stage(path: Path) -> Stage:
    return Stage(target=str(path), name=path.resolve().name, step=step_of(path))


def _is_checkpoint(path: Path) -> bool:
    names = (*WHOLE, *(f"{name}.index.json" for name in WHOLE))
    return (path / "config.json").is_file() and any((path / name).is_file() for name in names)


def _within(path: Path) -> list[Stage]:
    """The checkpoints in a directory. Raises UsageError where they are of several series."""
    held = sorted(path.iterdir()) if path.is_dir() else []
    found = [_stage(each) for each in held if _is_checkpoint(each)]
    kinds = sorted({STEP.sub("", stage.name).rstrip("-_") for stage in found})
    if len(kinds) > 1 and any(stage.step is not None for stage in found):
        raise UsageError(
            f"{path}: holds {len(kinds)} series of checkpoints ({some(kinds)})",
            hint=f"name one: numdev diagnose {path}/{kinds[0]}-*",
        )
    return found


def _in_order(stages: Sequence[Stage]) -> list[Stage]:
    """By step where all have one; with the whole path as the name where two are called alike."""
    count = Counter(stage.name for stage in stages)
    stages = [
        dataclasses.replace(stage, name=stage.target) if count[stage.name] > 1 else stage
        for stage in stages
    ]
    if len({stage.target for stage in stages}) < len(stages):
        raise UsageError(f"{stages[0].target}: a checkpoint is given twice")
    steps = [stage.step for stage in stages if stage.step is not None]
    if len(steps) < len(stages):
        return stages
    step, times = Counter(steps).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{stages[0].target}: {times} checkpoints are of step {step}", hint=ALONE)
    return sorted(stages, key=lambda stage: stage.step or 0)


def _not_finite(weights: Weights) -> str | None:
    """The first tensor with NaN or infinity, in words."""
    for name, stored in weights.tensors.items():
        values = stored.read()
        if values.is_floating_point() and (count := int((~values.isfinite()).sum())):
            return f"{name} holds {count} NaN or infinite elements"
    return None
