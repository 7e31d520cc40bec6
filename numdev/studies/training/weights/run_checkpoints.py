"""Finds the checkpoints of several runs over training, by seed and step, beside those of
the run that all others are compared with.

They are the checkpoints of a `numdev train`, whose `training.json` says which variant
each is of, or lists from a user, one for each run. Steps and seeds are those of
`training.json`, else those in names (`...-step500`, `checkpoint-500`, `...-seed1-...`); a
seed that neither has is 0."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numdev import report as reports
from numdev.errors import UsageError
from numdev.sources.containers import SUFFIXES, container_at
from numdev.studies.training.bounds.report import BoundsReport
from numdev.studies.training.hugging_face_writing import FOLDER
from numdev.studies.training.report import VariantRole
from numdev.studies.training.weights.report import RunRecord

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,9})$", re.IGNORECASE)
SEED = re.compile(r"seed[-_]?(\d{1,9})", re.IGNORECASE)
KEEP = "a training keeps them with `checkpoints:` (docs/training.md)"
Place = tuple[int, int]  # a seed and a step


@dataclass(kw_only=True)
class RunCheckpoints:
    """Runs, with the paths of their weights by (seed, step), then by run. The first run
    is the one that the others are compared with. Every seed and step has weights of the
    first run and of another."""

    name: str
    runs: tuple[RunRecord, ...]
    places: Mapping[Place, Mapping[str, str]]
    # A sentence on each seed and step that some run lacks
    missing: list[str] = field(default_factory=list)


def training_step(path: Path) -> int | None:
    """Returns the step of training of a checkpoint: `step` of its `training.json`, else
    the number that ends its name (`-step500`, `checkpoint-500`). None where neither has
    one. Nothing need exist at `path`."""
    step = read_training_json(path).get("step")
    if type(step) is int:  # True is none
        return step
    in_name = STEP.search(path.stem if path.suffix in SUFFIXES else path.name)
    return int(in_name[1]) if in_name else None


def training_seed(path: Path) -> int:
    """Returns the seed of a checkpoint: `seed` of its `training.json`, else that in its
    name (`seed1`); 0 where neither has one. Nothing need exist at `path`."""
    seed = read_training_json(path).get("seed")
    if type(seed) is int:
        return seed
    in_name = SEED.search(path.name)
    return int(in_name[1]) if in_name else 0


def read_training_json(checkpoint: Path) -> Mapping[str, Any]:
    """Returns the object in a checkpoint folder's `training.json`, which `numdev train`
    writes; empty where it is missing, unreadable or no object."""
    try:
        described = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return described if isinstance(described, dict) else {}


def has_runs(targets: Sequence[str]) -> bool:
    """Whether any target is a run (a list of checkpoints, a pattern, a folder of them, a
    training's report) and not one set of weights."""
    return any(target != "demo" and _is_run(target) for target in targets)


def find_runs(targets: Sequence[str], nulls: Sequence[str] = ()) -> RunCheckpoints:
    """Returns the runs of one training (a single target), or of two or more lists of
    checkpoints. `nulls`: lists of runs that differ from the first by rounding alone; they
    count as lists. Raises UsageError where a target is no run, for a single list, a list
    that is named twice, a checkpoint without a step or two of one seed and step, and
    where no step has weights of the first run and of another, and without a target.
    Raises MeasurementError for a report that cannot be read, where the single target's
    report has to say where its run is."""
    if not targets:
        raise UsageError("weights: expected a run, got none")
    if len(targets) == 1 and not nulls:
        return _runs_of_training(Path(targets[0]))
    for target in (*targets, *nulls):
        if not _is_run(target):
            what = f"{target}: expected checkpoints by step, as {targets[0]} has"
            raise UsageError(
                what, hint="give sets of weights alone, or checkpoints by step alone"
            )
    if len(targets) < 2 and not nulls:
        raise UsageError("weights: expected two runs or more to compare, got one")
    return _runs_of_lists(targets, nulls)


# --- a training of numdev -------------------------------------------------------------


def _runs_of_training(path: Path) -> RunCheckpoints:
    """Returns the checkpoints of the variants of one training run, the golden one first.
    Raises UsageError where there is no checkpoint of the golden run or none beside it at
    one step, and for a folder whose `training.json` does not say of which variant, seed
    and step it is."""
    run = _training_folder(path)
    places: dict[Place, dict[str, str]] = {}
    variants: dict[str, RunRecord] = {}
    for checkpoint in sorted((run / FOLDER).iterdir()) if (run / FOLDER).is_dir() else ():
        about = read_training_json(checkpoint)
        try:
            variant, seed, step = about["variant"], int(about["seed"]), int(about["step"])
            times = variant["times"] if variant["role"] == "null_rounding" else None
            record = RunRecord(name=variant["name"], role=variant["role"], times=times)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = "training.json does not say of which variant, seed and step it is"
            hint = "give the checkpoints of each run as a list"
            raise UsageError(f"{checkpoint}: {what}", hint=hint) from error
        variants[record.name] = record
        places.setdefault((seed, step), {})[record.name] = str(checkpoint)
    if not places:
        raise UsageError(f"{path}: keeps no checkpoints", hint=KEEP)
    golden = [name for name, record in variants.items() if record.role == "golden"]
    if not golden:
        raise UsageError(f"{path}: keeps no checkpoint of its golden run", hint=KEEP)
    first = golden[0]
    order = [name for name in _variant_order(places, variants) if name != first]
    return _with_first_run(
        path.name, [variants[name] for name in (first, *order)], places
    )


def _training_folder(path: Path) -> Path:
    """Returns the directory of a training run: the path itself, the parent of a
    report.json, or, where the path has no checkpoints and a bounds report, what that
    report names as its run. Raises what reading a report raises."""
    directory = path.parent if path.name == "report.json" else path
    if not (directory / FOLDER).is_dir() and (directory / "report.json").is_file():
        report = reports.read(directory)
        if isinstance(report, BoundsReport):
            run = Path(report.request["run"])  # a directory, or the report in it
            return run.parent if run.is_file() else run
    return directory


def _variant_order(
    places: Mapping[Place, Mapping[str, str]], variants: Mapping[str, RunRecord]
) -> Iterator[str]:
    """Yields the names of variants that have checkpoints, in the order in which the
    request of the first checkpoint's `training.json` has them, then any others; only
    those where it has no names. `places`: at least one."""
    checkpoint = next(iter(next(iter(places.values())).values()))
    names, ordered = list(variants), list[str]()
    with suppress(KeyError, TypeError):  # the file may say anything
        planned = read_training_json(Path(checkpoint))["request"]["variants"]
        ordered = [v["name"] for v in planned if v["name"] in names]
    yield from dict.fromkeys((*ordered, *variants))


# --- lists of a user ------------------------------------------------------------------


def _runs_of_lists(targets: Sequence[str], nulls: Sequence[str]) -> RunCheckpoints:
    """Returns the checkpoints of lists, each of which is a run. The first is the one that
    the others are compared with. Raises UsageError for a checkpoint without a step, for
    two of one seed and step in a run, for a list that is named twice, for a path that
    does not exist, and where no step has weights of the first run and of another."""
    places: dict[Place, dict[str, str]] = {}
    runs: list[RunRecord] = []
    for target in (*targets, *nulls):
        role: VariantRole = "variant" if runs else "golden"
        runs.append(RunRecord(name=target, role=role, null=target in nulls))
        listed = list(_checkpoints_with_steps(target))
        counts = Counter((training_seed(path), step) for step, path in listed)
        for (seed, step), count in counts.items():
            if step is None or count > 1:
                many = f"{count} checkpoints are from step {step} of seed {seed}"
                what = "a checkpoint's step is not told" if step is None else many
                hint = "name one run, such as 'run/checkpoints/flash-seed*'"
                raise UsageError(f"{target}: {what}", hint=hint)
        for step, path in listed:
            places.setdefault((training_seed(path), step or 0), {})[target] = str(path)
    [(name, count)] = Counter(run.name for run in runs).most_common(1)
    if count > 1:
        raise UsageError(f"{name}: is given twice", hint="name every run once")
    return _with_first_run(targets[0], runs, places)


def _is_run(target: str) -> bool:
    """Whether a target is a run. Where no such path exists it is one if it has `,` or `*`
    in it. A path is one if it is a report.json or a directory with one, or a directory
    that has checkpoints with a step in it or in its `checkpoints`."""
    path = Path(target)
    if not path.exists():
        return "," in target or "*" in target
    is_report = path.name == "report.json" or (path / "report.json").is_file()
    return is_report or (
        path.is_dir() and any(True for _ in _checkpoints_in_folder(path))
    )


def _checkpoints_with_steps(target: str) -> Iterator[tuple[int | None, Path]]:
    """Yields the step (None if it has none) and the path of each checkpoint that a target
    names: those in a directory, or paths and patterns separated by commas. Raises
    UsageError for a path that does not exist, and a pattern that nothing matches."""
    path = Path(target)
    if path.is_dir():
        yield from _checkpoints_in_folder(path)
        return
    for part in filter(None, map(str.strip, target.split(","))):
        names = sorted(glob.glob(part)) if "*" in part else [part]
        if not names:
            raise UsageError(f"{part}: no such file or directory")
        for checkpoint in map(Path, names):
            if not checkpoint.exists():
                raise UsageError(f"{checkpoint}: no such file or directory")
            yield training_step(checkpoint), checkpoint


def _checkpoints_in_folder(path: Path) -> Iterator[tuple[int, Path]]:
    """Yields the step and the path of each checkpoint in a directory, or in its
    `checkpoints` if it has such a folder, sorted by name. Folders without a step or
    without weights are left out."""
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    for directory in sorted(p for p in folder.iterdir() if p.is_dir()):
        step = training_step(directory)
        has_files = any(file.suffix in SUFFIXES for file in directory.iterdir())
        if step is not None and (container_at(directory) is not None or has_files):
            yield step, directory


def _with_first_run(
    name: str, runs: Sequence[RunRecord], weights: Mapping[Place, Mapping[str, str]]
) -> RunCheckpoints:
    """Returns the runs with the seeds and steps that have weights of the first run and of
    another, sorted. `missing` gets a sentence on each seed and step that some run lacks.
    `weights`: paths by (seed, step), then by run. Raises UsageError where no seed and
    step has both."""
    first = runs[0].name
    missing = []
    places = {}
    for seed, step in sorted(weights):
        of_runs = weights[seed, step]
        lacking = [run.name for run in runs if run.name not in of_runs]
        if lacking:
            missing.append(f"step {step}, seed {seed}: not kept of {', '.join(lacking)}")
        if first in of_runs and len(of_runs) > 1:
            places[seed, step] = of_runs
    if not places:
        what = f"{name}: no step has weights of {first} and of another run"
        raise UsageError(what, hint=KEEP)
    return RunCheckpoints(name=name, runs=tuple(runs), places=places, missing=missing)
