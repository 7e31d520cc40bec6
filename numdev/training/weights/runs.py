"""Sets of weights that were kept over training: of each run one at a step, beside those
of the run that all others are compared with.

They are the checkpoints of a `numdev train`, whose `training.json` says which variant
each is of, or lists that a user gives, a run each. Steps are those of `training.json`,
else those in names (`...-step500`, `checkpoint-500`), and so are seeds (`...-seed1-...`),
0 where nothing tells."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numdev import report as reports
from numdev.errors import UsageError
from numdev.sources.containers import SUFFIXES, container_at
from numdev.training.bounds.report import BoundsReport
from numdev.training.checkpoints import FOLDER
from numdev.training.report import VariantRole
from numdev.training.weights.report import RunRecord

STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d{1,9})$", re.IGNORECASE)
SEED = re.compile(r"seed[-_]?(\d{1,9})", re.IGNORECASE)
KEEP = "a training keeps them with `checkpoints:` (docs/training.md)"
Place = tuple[int, int]  # a seed and a step


@dataclass(kw_only=True)
class Kept:
    """Runs, the first of them the one that the others are compared with, and where their
    weights are: by seed and step, by run. Every place has the first run and another."""

    name: str
    runs: tuple[RunRecord, ...]
    places: Mapping[Place, Mapping[str, str]]
    missing: list[str] = field(default_factory=list)  # what has no place, in words


def step_of(path: Path) -> int | None:
    """The step of training of a checkpoint; None where nothing tells it."""
    named = STEP.search(path.stem if path.suffix in SUFFIXES else path.name)
    step = training_of(path).get("step")
    return step if isinstance(step, int) else int(named[1]) if named else None


def seed_of(path: Path) -> int:
    """The seed of a checkpoint: what `training.json` says, else the name's; 0 where
    neither."""
    named = SEED.search(path.name)
    seed = training_of(path).get("seed")
    return seed if isinstance(seed, int) else int(named[1]) if named else 0


def training_of(checkpoint: Path) -> Mapping[str, Any]:
    """What `numdev train` wrote beside the weights; empty where it did not."""
    try:
        described = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


def is_over_steps(targets: Sequence[str]) -> bool:
    """Whether targets name runs, and not sets of weights."""
    return any(target != "demo" and _is_run(target) for target in targets)


def kept(targets: Sequence[str], nulls: Sequence[str] = ()) -> Kept:
    """The runs of one training, or of two lists and more, and `nulls`: lists of runs that
    differ from the first by rounding alone. Raises UsageError where there are none to
    compare."""
    if len(targets) == 1 and not nulls:
        return _of_training(Path(targets[0]))
    for target in (*targets, *nulls):
        if not _is_run(target):
            what = f"{target}: expected checkpoints by step, as {targets[0]} has"
            raise UsageError(
                what, hint="give sets of weights alone, or checkpoints by step alone"
            )
    if len(targets) < 2 and not nulls:
        raise UsageError("weights: expected two runs or more to compare, got one")
    return _of_lists(targets, nulls)


# --- a training of numdev -------------------------------------------------------------


def _of_training(path: Path) -> Kept:
    run = _trained(path)
    found: dict[Place, dict[str, str]] = {}
    variants: dict[str, RunRecord] = {}
    for checkpoint in sorted((run / FOLDER).iterdir()) if (run / FOLDER).is_dir() else ():
        about = training_of(checkpoint)
        try:
            variant, seed, step = about["variant"], int(about["seed"]), int(about["step"])
            times = variant["times"] if variant["role"] == "null_rounding" else None
            record = RunRecord(name=variant["name"], role=variant["role"], times=times)
        except (KeyError, TypeError, ValueError) as error:
            what = (
                f"{checkpoint}: training.json does not say of which variant, "
                "seed and step it is"
            )
            raise UsageError(
                what, hint="give the checkpoints of each run as a list"
            ) from error
        variants[record.name] = record
        found.setdefault((seed, step), {})[record.name] = str(checkpoint)
    if not found:
        raise UsageError(f"{path}: keeps no checkpoints", hint=KEEP)
    first = next(
        (name for name, record in variants.items() if record.role == "golden"), None
    )
    if first is None:
        raise UsageError(f"{path}: keeps no checkpoint of its golden run", hint=KEEP)
    order = [name for name in _order(found, variants) if name != first]
    return _paired(path.name, [variants[name] for name in (first, *order)], found)


def _trained(path: Path) -> Path:
    """The directory of a training run: itself, or the one that a bounds report is of."""
    directory = path.parent if path.name == "report.json" else path
    if not (directory / FOLDER).is_dir() and (directory / "report.json").is_file():
        report = reports.read(directory)
        if isinstance(report, BoundsReport):
            return Path(report.request["run"])
    return directory


def _order(
    found: Mapping[Place, Mapping[str, str]], variants: Mapping[str, RunRecord]
) -> Iterator[str]:
    """Names of variants as the run's file has them, of those that were kept."""
    checkpoint = next(iter(next(iter(found.values())).values()))
    asked = training_of(Path(checkpoint)).get("request", {}).get("variants", ())
    named = [v["name"] for v in asked if v["name"] in variants]
    yield from dict.fromkeys((*named, *variants))


# --- lists of a user ------------------------------------------------------------------


def _of_lists(targets: Sequence[str], nulls: Sequence[str]) -> Kept:
    found: dict[Place, dict[str, str]] = {}
    runs: list[RunRecord] = []
    for target in (*targets, *nulls):
        role: VariantRole = "variant" if runs else "golden"
        runs.append(RunRecord(name=target, role=role, null=target in nulls))
        listed = list(_checkpoints(target))
        counts = Counter((seed_of(path), step) for step, path in listed)
        for (seed, step), count in counts.items():
            if step is None or count > 1:
                many = f"{count} checkpoints are from step {step} of seed {seed}"
                what = "a checkpoint's step is not told" if step is None else many
                hint = "name one run, such as 'run/checkpoints/flash-seed*'"
                raise UsageError(f"{target}: {what}", hint=hint)
        for step, path in listed:
            found.setdefault((seed_of(path), step or 0), {})[target] = str(path)
    if (twice := Counter(run.name for run in runs).most_common(1)[0])[1] > 1:
        raise UsageError(f"{twice[0]}: is given twice", hint="name every run once")
    return _paired(targets[0], runs, found)


def _is_run(target: str) -> bool:
    """A list or a pattern, or a directory that holds checkpoints by step and is none
    itself."""
    path = Path(target)
    if not path.exists():
        return "," in target or "*" in target
    is_report = path.name == "report.json" or (path / "report.json").is_file()
    return is_report or (path.is_dir() and any(True for _ in _inside(path)))


def _checkpoints(target: str) -> Iterator[tuple[int | None, Path]]:
    path = Path(target)
    if path.is_dir():
        yield from _inside(path)
        return
    for part in filter(None, map(str.strip, target.split(","))):
        places = sorted(glob.glob(part)) if "*" in part else [part]
        if not places:
            raise UsageError(f"{part}: no such file or directory")
        for place in map(Path, places):
            if not place.exists():
                raise UsageError(f"{place}: no such file or directory")
            yield step_of(place), place


def _inside(path: Path) -> Iterator[tuple[int, Path]]:
    """The checkpoints in a directory, or in its `checkpoints`."""
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        step = step_of(place)
        holds = container_at(place) is not None or any(
            x.suffix in SUFFIXES for x in place.iterdir()
        )
        if step is not None and holds:
            yield step, place


def _paired(
    name: str, runs: Sequence[RunRecord], found: Mapping[Place, Mapping[str, str]]
) -> Kept:
    """Those places that have the first run and another; what has none is said."""
    first = runs[0].name
    missing = []
    for seed, step in sorted(found):
        lacking = [run.name for run in runs if run.name not in found[seed, step]]
        if lacking:
            missing.append(f"step {step}, seed {seed}: not kept of {', '.join(lacking)}")
    places = {
        at: found[at] for at in sorted(found) if first in found[at] and len(found[at]) > 1
    }
    if not places:
        what = f"{name}: no step has weights of {first} and of another run"
        raise UsageError(what, hint=KEEP)
    return Kept(name=name, runs=tuple(runs), places=places, missing=missing)
