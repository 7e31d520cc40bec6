"""Finds what a diagnosis is asked to look at: one target, or the checkpoints of a series
by step.

A series is several targets, or a directory that has checkpoints, or that of a `numdev
train` with its `checkpoints/`. Steps are those of `training.json`, which `numdev train`
writes beside its weights, else those in the names of the directories (`...-step500`,
`checkpoint-500`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from numdev.errors import MeasurementError, UsageError
from numdev.metrics.yardstick import widened
from numdev.request_models import demo_checkpoint
from numdev.sources.captured_calls import holds_cases, open_cases
from numdev.sources.checkpoint import WHOLE
from numdev.sources.diffusers_pipeline import is_pipeline
from numdev.sources.prompts import PROMPT
from numdev.sources.tensor_files import identity, naming
from numdev.studies.training.weights.run_checkpoints import training_step
from numdev.studies.training.weights.weight_sets import WeightSet, open_weights
from numdev.target_names import name_of

YAML = (".yaml", ".yml")
# Weights: what a model is built by, and what the demo reads
BESIDE = ("config.json", PROMPT)
GIVE = (
    "give a checkpoint, a directory of checkpoints (a training keeps them with "
    "`checkpoints:`), a file of captured tensors, or `demo`"
)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One target: a set of weights, captured tensors, or a YAML file that draws its
    cases."""

    target: str  # as a source takes it: a path, or `demo`
    name: str  # of the directory or file; the whole path where two are called alike
    step: int | None = None
    sha256: str | None = None  # of weights
    files: tuple[Path, ...] = ()  # what else decides which calls it has

    def identifying_hashes(self) -> list[str | int | None]:
        """Returns the values by which two targets at one path can be told apart: the hash
        of the weights, that of the other files, and the step, since rows name their
        step."""
        return [self.sha256, identity(self.files), self.step]


def find_stages(targets: Sequence[str]) -> tuple[tuple[Stage, ...], tuple[str, ...]]:
    """Returns the stages that targets name, and a sentence on each checkpoint that was
    left out because it has NaN or infinity. Stages are in the order of their steps if all
    have one, else as they were named. Reads all weights.

    Raises UsageError without a target, for one that does not exist or has no checkpoint,
    for a path that is named twice, and, where all checkpoints have a step, for two of one
    step. Raises MeasurementError where weights are damaged or cannot be tested for NaN,
    and where no checkpoint has finite weights."""
    if not targets:
        raise UsageError("diagnose: expected a target, got none", hint=GIVE)
    paths = [path for target in targets for path in _checkpoints_of_target(target)]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{targets[0]}: a checkpoint is given twice")
    names = Counter(name_of(path) for path in paths)
    steps = {path: training_step(path) for path in paths}
    (step, times), *_ = Counter(steps.values()).most_common(1)
    if None not in steps.values():
        if times > 1:
            what = f"{targets[0]}: {times} checkpoints are from step {step}"
            raise UsageError(
                what, hint="name one series, such as run/checkpoints/bf16-seed0-*"
            )
        paths.sort(key=lambda path: steps[path] or 0)
    sound, left_out = list[Stage](), list[str]()
    for path in paths:
        name = name_of(path)
        stage = Stage(
            target=str(path),
            name=name if names[name] == 1 else str(path),
            step=steps[path],
        )
        if path.suffix in YAML:
            sound.append(replace(stage, files=(path,)))
        elif holds_cases(path):
            sound.append(replace(stage, files=open_cases(path).files))
        else:
            weights = open_weights(str(path))
            if weights.damage:
                raise MeasurementError(f"{weights.name}: {weights.damage[0]}")
            if broken := _nonfinite_tensor_clause(weights):
                left_out.append(f"{stage.name}: {broken}; left out.")
            else:
                hashes, files = identity(weights.files), _files_beside(path)
                sound.append(replace(stage, sha256=hashes, files=files))
    if not sound:
        raise MeasurementError(left_out[0], hint="diagnose a checkpoint from before that")
    return tuple(sound), tuple(left_out)


def _nonfinite_tensor_clause(weights: WeightSet) -> str | None:
    """Returns a clause on the first tensor with NaN or infinite elements: `lm_head.weight
    holds 3 NaN or infinite elements`. None where all are finite. Raises MeasurementError
    where a tensor cannot be read, and for one of a dtype or layout that PyTorch does not
    compute with, as a packed float4 or a quantised one."""
    for name, stored in weights.tensors.items():
        x = stored.read()
        what = f"{x.dtype}, {x.layout} cannot be tested for NaN"
        with naming(f"{weights.name}: {name}", what, None):
            count = int((~widened(x).isfinite()).sum())
        if count:
            return f"{name} holds {count} NaN or infinite elements"
    return None


def _files_beside(path: Path) -> tuple[Path, ...]:
    """Returns those of config.json and the demo's prompt that exist in a checkpoint's
    folder `path`, or for `demo` in the demo's: they decide which calls it has."""
    directory = demo_checkpoint() if str(path) == "demo" else path
    return tuple(file for name in BESIDE if (file := directory / name).is_file())


def _checkpoints_of_target(target: str) -> list[Path]:
    """Returns the target itself, where it is `demo`, a file, a checkpoint or captured
    tensors; else the checkpoints in a directory (in its `checkpoints`, else in itself),
    sorted by name. Raises UsageError for a path that does not exist, a pipeline, and a
    directory without a checkpoint."""
    path = Path(target)
    if target == "demo":
        return [path]
    if not path.exists():
        raise UsageError(f"{target}: no such file or directory", hint=GIVE)
    # Else its text encoder would be taken for a checkpoint of a series
    if is_pipeline(path):
        raise UsageError(
            f"{target}: diagnose takes no pipeline", hint="numdev audit takes it"
        )
    if path.is_file() or _is_checkpoint_folder(path) or holds_cases(path):
        return [path]
    for pattern in ("checkpoints/*", "*"):
        if checkpoints := sorted(filter(_is_checkpoint_folder, path.glob(pattern))):
            return checkpoints
    raise UsageError(f"{target}: holds no checkpoint", hint=GIVE)


def _is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder has config.json and model.safetensors, pytorch_model.bin or the
    index of either; False for a file or nothing."""
    names = (*WHOLE, *(f"{name}.index.json" for name in WHOLE))
    return (path / "config.json").is_file() and any(
        (path / name).is_file() for name in names
    )
