"""`numdev bounds`: flash's distance in weights beside low precision's, another seed's and chance's,
from the report of a training run. Needs neither torch nor a GPU."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import numdev
from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.report import Provenance
from numdev.training import figures
from numdev.training.bounds import tables
from numdev.training.bounds.answer import answer, missing
from numdev.training.bounds.report import BoundsReport, BoundsSummary
from numdev.training.bounds.saturation import saturation
from numdev.training.report import TrainReport


def bounds(path: Path, *, command: str = "") -> BoundsReport:
    """The bounds of a training run: a report.json of `numdev train`, or a directory with one.

    Raises UsageError where there is none or it is of another command, MeasurementError where no
    weights were compared in it.
    """
    run = reports.read(path)
    if not isinstance(run, TrainReport):
        raise UsageError(
            f"{path}: expected the report of a training run, got one of {run.kind}",
            hint="give the directory of a `numdev train`",
        )
    others = {v.name for v in run.variants if v.role != "golden"}
    if not any(d.variant in others and d.of == "weights" for d in run.distances):
        raise MeasurementError(
            f"{path}: holds no distance between weights",
            hint="did the run record a step with more than one variant?",
        )
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    tracks = tables.tracks_of(run.variants, run.distances)
    weights = [t for t in tracks if t.of == "weights"]
    groups = dict.fromkeys(t.group for t in weights)
    marks = [saturation(g, tables.of_group(weights, g)) for g in groups]
    null_runs = tuple(tables.null_rows(tracks))
    repeats = [n.largest for n in null_runs if n.role == "null_repeat"]
    steps = sorted({s for t in weights for s in t.steps if s > 0})
    axis = figures.axis_of(steps, all_named=True) if len(steps) > 1 else None
    kinds = tuple(tables.kinds_of(run.variants, run.distances))
    summary = BoundsSummary(
        answer=(),
        seeds=tuple(sorted({row.seed for row in run.distances})),
        variants=kinds,
        missing=missing(kinds),
        deterministic=max(repeats) == 0 if repeats else None,
        axis=axis,
    )
    report = BoundsReport(
        provenance=Provenance(
            numdev=numdev.__version__,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            system=run.provenance.system,
            source={"config": str(path), "sha256": sha256, "run": run.provenance.source},
        ),
        request={"run": str(path), "sha256": sha256, "target": path.resolve().name},
        summary=summary,
        saturations=tuple(marks),
        comparisons=tuple(tables.comparisons(tracks, tables.windows(marks))),
        null_runs=null_runs,
        figures=figures.of_bounds(weights, run.rows, run.variants, axis) if axis else (),
    )
    sentences = tuple(answer(report, tables.lost(run.variants, run.distances)))
    return report.model_copy(update={"summary": summary.model_copy(update={"answer": sentences})})
