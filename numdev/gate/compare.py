"""`numdev compare`: two audits of the same request, or two sweeps, on two versions, machines or
commits.

Needs neither torch nor a GPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numdev
from numdev.errors import UsageError, closest
from numdev.gate.comparable import MUST, Difference, Measured, changes, differences
from numdev.gate.compare_audits import compared
from numdev.gate.compare_report import CompareReport, CompareSummary, Side
from numdev.gate.compare_words import answer, notes, threshold
from numdev.gate.presence import news
from numdev.report import AuditReport, Provenance, SweepReport, read


def compare(a: Path, b: Path, *, allow: Collection[str] = (), command: str = "") -> CompareReport:
    """B beside A, each a report.json of an audit or a sweep, or a directory with one.

    Raises UsageError where either is none, or they differ in a key of `MUST` that is not in
    `allow`; MeasurementError for a report that cannot be understood.
    """
    for key in allow:
        if key not in MUST:
            raise UsageError(f"--allow {key}: no such key", hint=closest(key, MUST))
    old, new = (_measured(path) for path in (a, b))
    apart = differences(old, new)
    _refuse([d for d in apart if d.root not in allow])
    found = compared(old, new)
    told = news(old, new, found.moves)
    return CompareReport(
        provenance=_provenance(b, new, command),
        request={
            **{name: str(path) for name, path in (("a", a), ("b", b))},
            "sha256": [_sha256(path) for path in (a, b)],
            "allow": sorted(allow),
        },
        summary=CompareSummary(
            answer=answer(found, apart, told, new.rows),
            notes=tuple(notes(found)),
            inputs={str(k): v for k, v in found.inputs.items()},
            threshold=threshold(found),
        ),
        a=_side(a, old),
        b=_side(b, new),
        allowed=apart,
        changes=changes(old, new),
        ran=found.ran,
        groups=found.groups,
        moves=found.moves,
        presences=found.presences,
        news=told,
        failed=found.failed,
    )


def _measured(path: Path) -> Measured:
    found = read(path)
    if not isinstance(found, AuditReport | SweepReport):
        raise UsageError(
            f"{path}: is a report of numdev {found.kind}, and compare takes audits or sweeps",
            hint="give reports of `numdev audit` or `numdev sweep`",
        )
    if isinstance(found, SweepReport) and not found.rows:
        raise UsageError(
            f"{path}: is a sweep that kept cells, and no rows of heads to compare",
            hint="sweep with `rows: head`",
        )
    return found


def _refuse(apart: Sequence[Difference]) -> None:
    if apart:
        words = ", ".join(f"{d.key} ({d.a} in A, {d.b} in B)" for d in apart)
        allow = " ".join(dict.fromkeys(f"--allow {d.root}" for d in apart if d.root in MUST))
        raise UsageError(
            f"the two do not measure the same: they differ in {words}",
            hint=f"measure the same{f', or {allow}' if allow else ''}",
        )


def _side(path: Path, report: Measured) -> Side:
    where = report.provenance
    return Side(
        path=str(path),
        numdev=where.numdev,
        command=where.command,
        created=where.created,
        rows=len(report.rows),
    )


def _provenance(path: Path, report: Measured, command: str) -> Provenance:
    return Provenance(
        numdev=numdev.__version__,
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        system=report.provenance.system,
        source={"config": str(path), "run": report.provenance.source},
    )


def _sha256(path: Path) -> str:
    with (path / "report.json" if path.is_dir() else path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
