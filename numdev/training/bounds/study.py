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
from numdev.report import Provenance
from numdev.training.bounds.figures import axis, figures
from numdev.training.bounds.proxies import answer, missing
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
    _check(path, run)
    file = path / "report.json" if path.is_dir() else path
    facts = found(run.variants, run.distances)
    along = axis(facts)
    source = {"config": str(path), "sha256": _sha256(file), "run": run.provenance.source}
    return _report(
        facts,
        sorted({row.seed for row in run.distances}),
        Provenance(
            numdev=numdev.__version__,
            command=command,
            created=_now(),
            system=run.provenance.system,
            source=source,
        ),
        request={"run": str(path), "sha256": source["sha256"], "target": path.resolve().name},
        axis=along,
        figures=() if along is None else figures(facts, run.rows, run.variants, along),
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
    from numdev.training.weights.checkpoints import paired_up

    variants, distances, identities = paired_up(golden, {ROLES[r]: p for r, p in by_role.items()})
    facts = found(variants, distances, curves=False)
    names = {"golden": golden, **by_role}
    return _report(
        facts,
        list(range(len(golden))),
        Provenance(
            numdev=numdev.__version__,
            command=command,
            created=_now(),
            system=System.here("cpu").as_dict(),
            source={"checkpoint": str(golden[0]), "identities": identities},
        ),
        request={
            "target": golden[0].resolve().name,
            **{role: [str(p) for p in paths] for role, paths in names.items()},
        },
        axis=None,
        figures=(),
        curves=False,
    )


def _report(
    facts: Found,
    seeds: Sequence[int],
    provenance: Provenance,
    *,
    curves: bool = True,
    **fields: Any,
) -> BoundsReport:
    lacking = missing(facts, curves=curves)
    along = fields.pop("axis")
    return BoundsReport(
        provenance=provenance,
        summary=BoundsSummary(
            answer=answer(facts, seeds, lacking),
            seeds=tuple(seeds),
            variants=facts.variants,
            missing=lacking,
            deterministic=facts.deterministic,
            axis=along,
        ),
        saturations=facts.saturations,
        comparisons=facts.comparisons,
        delays=facts.delays,
        null_runs=facts.null_runs,
        **fields,
    )


def _check(path: Path, run: TrainReport) -> None:
    if not any(v.role == "golden" for v in run.variants):
        raise MeasurementError(
            f"{path}: has no golden run, from which distances are taken",
            hint="train with a variant of role golden",
        )
    others = {v.name for v in run.variants if v.role != "golden"}
    if not any(d.variant in others and d.of == "weights" for d in run.distances):
        raise MeasurementError(
            f"{path}: holds no distance between weights",
            hint="did the run record a step with more than one variant?",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
