"""`numdev bounds`: flash's distance in weights beside low precision's, another seed's and chance's.

From the report of a training run, which needs neither torch nor a GPU, or from checkpoints by role,
whose distances are made as rows like those of a training run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numdev
from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.report import Provenance
from numdev.training import figures
from numdev.training.bounds import tables
from numdev.training.bounds.answer import answer, missing
from numdev.training.bounds.report import BoundsReport, BoundsSummary
from numdev.training.bounds.saturation import saturation
from numdev.training.bounds.tables import WHOLE, Span
from numdev.training.report import DistanceRow, TrainReport, VariantRecord, VariantRole

if TYPE_CHECKING:
    from numdev.training.weights.files import Weights

ROLES: Mapping[str, VariantRole] = {
    "flash": "flash",
    "low_precision": "low_precision",
    "attention_precision": "attention_precision",
    "other_seed": "other_seed",
    "null": "null_rounding",
}
"""Options of the command line to the role of their checkpoints."""
STEP = 1
"""Of all rows of checkpoints: which step they are of, nobody says."""


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
    if not any(d.variant in others and d.of == "weights" for d in run.distances):
        raise MeasurementError(
            f"{path}: holds no distance between weights",
            hint="did the run record a step with more than one variant?",
        )
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    return _report(
        run.variants,
        run.distances,
        sorted({row.seed for row in run.distances}),
        request={"run": str(path), "sha256": sha256, "target": path.resolve().name},
        run=run,
        command=command,
        system=run.provenance.system,
        source={"config": str(path), "sha256": sha256, "run": run.provenance.source},
    )


def of_checkpoints(
    golden: Sequence[Path], by_role: Mapping[str, Sequence[Path]], *, command: str = ""
) -> BoundsReport:
    """The bounds of checkpoints, one step of nobody knows which; weights are read tensor by tensor.

    Of each role the k-th checkpoint belongs to the k-th golden one, and counting starts again
    where there are more. Raises UsageError for a role without a checkpoint for every golden one,
    and for weights that are not of one model, MeasurementError for damaged ones.
    """
    from numdev.system import System
    from numdev.training.weights.files import open_weights

    named = {ROLES[role]: paths for role, paths in by_role.items()}
    opened = {p: open_weights(str(p)) for paths in (golden, *named.values()) for p in paths}
    blank: dict[str, Any] = {"kernel": "", "format": "", "attention_format": ""}
    variants = [VariantRecord(name="golden", role="golden", **blank)]
    distances: list[DistanceRow] = []
    for role, paths in named.items():
        if len(paths) % len(golden):
            raise UsageError(
                f"{len(paths)} checkpoints of {role.replace('_', ' ')} for {len(golden)} golden",
                hint="give one for each golden checkpoint, in their order",
            )
        for i, path in enumerate(paths):
            turn, seed = divmod(i, len(golden))
            name = f"{role}-{turn + 1}" if turn else role
            if seed == 0:
                variants.append(VariantRecord(name=name, role=role, **blank))
            distances += _distances(opened[path], opened[golden[seed]], seed, name)
    identities = {str(path): weights.identity() for path, weights in opened.items()}
    names = {role: [str(p) for p in paths] for role, paths in {"golden": golden, **by_role}.items()}
    return _report(
        variants,
        distances,
        list(range(len(golden))),
        request={"target": golden[0].resolve().name, **names},
        command=command,
        system=System.here("cpu").as_dict(),
        source={"checkpoint": str(golden[0]), "identities": identities},
    )


def _distances(a: Weights, b: Weights, seed: int, variant: str) -> Iterator[DistanceRow]:
    """a against b: all weights, and by kind. W1 of a group is the mean of its tensors' by their
    sizes; a group in which anything is not finite has no distance."""
    from numdev.sources.kinds import kind_of
    from numdev.training.weights import pairs
    from numdev.training.weights.study import Comparison

    parts: dict[str, list[pairs.Sums]] = {}
    both = Comparison([b, a], "cpu")
    for name, _, of, against in both.tensors():
        for group in (WHOLE, kind_of(name).split()[0]):
            parts.setdefault(group, []).append(pairs.compare(of, against))
    for r in both.remarks:
        if r.what in ("damaged", "missing", "extra", "reshaped"):
            wrong = MeasurementError if r.what == "damaged" else UsageError
            raise wrong(f"{a.name} and {b.name} cannot be compared: {r.tensor or ''} {r.words}")
    if not parts:
        raise MeasurementError(f"{a.name}: has no floating-point weights to compare")
    for group, these in parts.items():
        found = pairs.numbers(sums := pairs.pooled(these))
        lost = sums["elements"] - sums["compared"]
        reasons = dict.fromkeys(pairs.METRICS, "not finite") if lost else found["nulls"]
        yield DistanceRow(
            seed=seed, variant=variant, step=STEP, of="weights", group=group,
            elements=sums["elements"], nonfinite=lost,
            **{name: None if lost else found[name] for name in pairs.METRICS},
            nulls={name: why for name, why in reasons.items() if name in pairs.METRICS},
        )  # fmt: skip


def _report(
    variants: Sequence[VariantRecord],
    distances: Sequence[DistanceRow],
    seeds: Sequence[int],
    *,
    request: dict[str, Any],
    run: TrainReport | None = None,
    **origin: Any,
) -> BoundsReport:
    """What distances come to; those of no `run` are of one step, and nothing merges."""
    curves = run is not None
    tracks = tables.tracks_of(variants, distances)
    weights = [t for t in tracks if t.of == "weights"]
    groups = list(dict.fromkeys(t.group for t in weights))
    marks = [saturation(g, tables.of_group(weights, g)) for g in groups] if curves else []
    spans = [Span("weights", group, "given", (STEP,)) for group in groups]
    null_runs = tuple(tables.null_rows(tracks, curves=curves))
    repeats = [n.largest for n in null_runs if n.role == "null_repeat"]
    steps = sorted({s for t in weights for s in t.steps if s > 0})
    axis = figures.axis_of(steps, all_named=True) if curves and len(steps) > 1 else None
    kinds = tuple(tables.kinds_of(variants, distances))
    summary = BoundsSummary(
        answer=(),
        seeds=tuple(seeds),
        variants=kinds,
        missing=missing(kinds, curves=curves),
        deterministic=max(repeats) == 0 if repeats else None,
        axis=axis,
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    report = BoundsReport(
        provenance=Provenance(numdev=numdev.__version__, created=created, **origin),
        request=request,
        summary=summary,
        saturations=tuple(marks),
        comparisons=tuple(tables.comparisons(tracks, tables.windows(marks) if curves else spans)),
        delays=tuple(tables.delayed(weights, marks)),
        null_runs=null_runs,
        figures=figures.of_bounds(weights, run.rows, run.variants, axis) if run and axis else (),
    )
    said = tuple(answer(report, tables.lost(variants, distances)))
    return report.model_copy(update={"summary": summary.model_copy(update={"answer": said})})
