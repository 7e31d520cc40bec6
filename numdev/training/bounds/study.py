"""`numdev bounds`: flash's distance in weights beside low precision's, another seed's and chance's.

From the report of a training run, which needs neither torch nor a GPU, or from checkpoints by role.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numdev
from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.report import Axis, Figure, Provenance
from numdev.training import figures
from numdev.training.bounds.answer import answer, missing
from numdev.training.bounds.report import BoundsReport, BoundsSummary
from numdev.training.bounds.roles import Found, found
from numdev.training.report import TrainReport, VariantRole

ROLES: Mapping[str, VariantRole] = {
    "flash": "flash",
    "low_precision": "low_precision",
    "attention_precision": "attention_precision",
    "other_seed": "other_seed",
    "null": "null_rounding",
}
"""Options of the command line to the role of their checkpoints."""


def of_run(path: Path, *, command: str = "") -> BoundsReport:
    """The bounds of a training run: a report.json of `numdev train`, or a directory with one.

    Raises UsageError where there is none or it is of another command, MeasurementError where no
    weights were compared in it.
    """
    run = reports.read(path)
    if not isinstance(run, TrainReport):
        raise UsageError(
            f"{path}: is a report of numdev {run.kind}, not of a training run",
            hint="give the directory of a `numdev train`, or checkpoints with --golden",
        )
    others = {v.name for v in run.variants if v.role != "golden"}
    if len(others) == len(run.variants):
        raise MeasurementError(
            f"{path}: has no golden run, from which distances are taken",
            hint="train with a variant of role golden",
        )
    if not any(d.variant in others and d.of == "weights" for d in run.distances):
        raise MeasurementError(
            f"{path}: holds no distance between weights",
            hint="did the run record a step with more than one variant?",
        )
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    facts = found(run.variants, run.distances)
    steps = sorted({s for t in facts.tracks if t.of == "weights" for s in t.steps if s > 0})
    along = figures.axis_of(steps, all_named=True) if len(steps) > 1 else None
    return _report(
        facts,
        sorted({row.seed for row in run.distances}),
        command=command,
        system=run.provenance.system,
        source={"config": str(path), "sha256": sha256, "run": run.provenance.source},
        request={"run": str(path), "sha256": sha256, "target": path.resolve().name},
        axis=along,
        drawn=figures.of_bounds(facts.tracks, run.rows, run.variants, along) if along else (),
    )


def of_checkpoints(
    golden: Sequence[Path], by_role: Mapping[str, Sequence[Path]], *, command: str = ""
) -> BoundsReport:
    """The bounds of checkpoints, one step of nobody knows which; weights are read tensor by tensor.

    Of each role the k-th checkpoint belongs to the k-th golden one, and counting starts again
    where there are more. Raises UsageError for a role without a checkpoint for every golden one,
    and for weights that cannot be paired.
    """
    from numdev.system import System
    from numdev.training.bounds.checkpoints import paired_up

    variants, distances, identities = paired_up(golden, {ROLES[r]: p for r, p in by_role.items()})
    names = {role: [str(p) for p in paths] for role, paths in {"golden": golden, **by_role}.items()}
    return _report(
        found(variants, distances, curves=False),
        list(range(len(golden))),
        command=command,
        system=System.here("cpu").as_dict(),
        source={"checkpoint": str(golden[0]), "identities": identities},
        request={"target": golden[0].resolve().name, **names},
        curves=False,
    )


def _report(
    facts: Found,
    seeds: Sequence[int],
    *,
    axis: Axis | None = None,
    curves: bool = True,
    drawn: tuple[Figure, ...] = (),
    request: dict[str, Any],
    **origin: Any,
) -> BoundsReport:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    lacking = missing(facts, curves=curves)
    return BoundsReport(
        provenance=Provenance(numdev=numdev.__version__, created=created, **origin),
        request=request,
        summary=BoundsSummary(
            answer=answer(facts, seeds, lacking),
            seeds=tuple(seeds),
            variants=facts.variants,
            missing=lacking,
            deterministic=facts.deterministic,
            axis=axis,
        ),
        saturations=facts.saturations,
        comparisons=facts.comparisons,
        delays=facts.delays,
        null_runs=facts.null_runs,
        figures=drawn,
    )
