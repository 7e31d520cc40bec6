"""Which faults are caught and named, in `audit` and in `check_attention`?

    python benchmarks/names.py [--only NAME,...] [--doors check,audit] [--jobs N]

Faults are those of `planted` that have calls of an audit. One counts as named where a
finding of it has a cause, or its place, and as named wrongly where the cause of any finding
lacks the pattern that the catalogue has."""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from planted import CATALOGUE, Planted
from planted.function import calls_of

from numdev.report import AuditReport
from numdev.request_models import audit_request
from numdev.studies.audit.run import audit
from numdev.testing import CheckFailed, check_attention


def checked(one: Planted, folder: Path) -> AuditReport:
    """By the default cases, or where these have none that shows it, by its own calls."""
    cases: Any = calls_of(one) if one.says and not one.check else None
    try:
        how: Any = {"cases": cases, "formats": one.formats, "reproducers": folder}
        return check_attention(one.function, **how).report
    except CheckFailed as failed:
        return failed.result.report


def audited(one: Planted, folder: Path) -> AuditReport:
    (folder / "cases.yaml").write_text(yaml.safe_dump({"cases": calls_of(one)}))
    flags = {"kernels": (one.address,), "backward": True, "reproducers": 0,
             "formats": one.formats}  # fmt: skip
    return audit(audit_request(str(folder / "cases.yaml"), flags), folder / "out")


DOORS = {"check": checked, "audit": audited}


def judged(name: str, door: str) -> tuple[str, str, str, list[str], float]:
    """How a door named a fault: `named`, `unnamed`, `WRONG`, `passed`."""
    torch.set_num_threads(1)
    one, start = CATALOGUE[name], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = DOORS[door](one, Path(folder))
    findings = [f for f in report.findings if f.severity == "exceeded"]
    causes = sorted({f.cause for f in findings if f.cause})
    verdict = "unnamed" if findings else "passed"
    if findings and one.place and not causes:
        verdict = "named" if re.search(one.place, findings[0].whole) else "unnamed"
    if causes:
        right = [
            one.says is not None and bool(re.search(one.says, cause)) for cause in causes
        ]
        verdict = "named" if all(right) else "WRONG"
        causes = (
            causes
            if all(right)
            else [c for c, r in zip(causes, right, strict=True) if not r]
        )
    return name, door, verdict, causes, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of faults, with commas")
    parser.add_argument("--doors", default="check,audit")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    every = [entry.name for entry in CATALOGUE.values() if entry.calls]
    names = options.only.split(",") if options.only else every
    doors = options.doors.split(",")
    totals: dict[tuple[str, bool], Counter[str]] = {}
    print("| fault | door | verdict | s | names, of which the wrong ones if there are |")
    print("|---|---|---|---|---|")
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        pairs = [(name, door) for name in names for door in doors]
        for name, door, verdict, causes, seconds in pool.map(
            judged, *zip(*pairs, strict=True)
        ):
            words = "; ".join(causes)
            print(
                f"| {name} | {door} | {verdict} | {seconds:.1f} | {words} |", flush=True
            )
            another = bool(CATALOGUE[name].says or CATALOGUE[name].place)
            totals.setdefault((door, another), Counter())[verdict] += 1
    for (door, another), counts in totals.items():
        what = "to be named" if another else "without a name, or sound"
        words = ", ".join(
            f"{counts[v]} {v}" for v in ("named", "unnamed", "WRONG", "passed")
        )
        print(f"\n{door}, {what}, {sum(counts.values())}: {words}")


if __name__ == "__main__":
    main()
