"""How long does `numdev gate` take on a large report, from the start of Python to its
exit code?

    python benchmarks/gate_speed.py [--rows 10000 100000] [--repeats 5]

Makes reports of so many rows, as an audit of a model of 32 heads writes them: for each
head what the format costs, the floor and the baseline, the output of three kernels under
audit and of two of them the log-sum-exp; five of eight rows are judged. Runs the command
on each, and prints the least wall-clock and processor time of the repeats as Markdown.
Modules are compiled once, into a directory of their own, as an installation has them.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numdev.gate.judging import judged
from numdev.report import (
    AuditReport,
    AuditSummary,
    CaseRecord,
    DeviationRow,
    PlannedKernel,
    PlanRecord,
    Provenance,
)
from numdev.report.io import text_of

HEADS = 32
KERNELS = (
    ("precision", "reference", "out"),
    ("floor", "floor", "out"),
    ("baseline", "baseline", "out"),
    *(("kernel", name, "out") for name in ("sdpa-math", "sdpa-flash", "sdpa-default")),
    *(("kernel", name, "lse") for name in ("sdpa-flash", "sdpa-default")),
)
NUMBERS = (
    *("max_abs", "mean_abs", "rms", "row_rel", "rel", "max_ulp", "from_baseline_rms"),
    *(
        "precision_rms",
        "flash_vs_precision",
        "bias",
        "bias_sign",
        "bias_feature",
        "bias_t",
    ),
)


def rows(count: int) -> Iterator[dict[str, Any]]:
    """So many rows of a sound audit, layer by layer and head by head; whole calls."""
    draw = random.Random(0)
    for i in range(calls(count) * len(KERNELS) * HEADS):
        at, which = divmod(i, len(KERNELS))
        call, head = divmod(at, HEADS)
        role, kernel, tensor = KERNELS[which]
        module = f"model.layers.{call}.self_attn"
        numbers = {name: draw.uniform(1e-4, 2e-4) for name in NUMBERS}
        numbers |= {"mean_abs": 0.5 * numbers["rms"], "max_abs": 9 * numbers["rms"]}
        yield {
            **dict(case=f"{module}#0", source="s", module=module, layer=call, call=0, seed=None),
            **dict(head=head, role=role, kernel=kernel, format="bfloat16", tensor=tensor),
            "tensors": [t for _, k, t in KERNELS if k == kernel],
            **dict(status="ok", ran="aten::_flash", out_format="bfloat16", elements=65536),
            **dict(sequences=8, nonfinite=0, noise=0.0, floor_ratio=1.0, baseline_ratio=0.5),
            **dict(expected_ratio=draw.uniform(0.98, 1.02), worst_row=draw.uniform(1, 2)),
            **dict(rms_ratio=draw.uniform(0.98, 1.02), rms_rows=100.0),
            **dict(fa_rule=True, bias_of="mean", bias_size=0.0, bias_p=draw.random()),
            **numbers,
            **(dict(rms=1e-6, mean_abs=5e-7, rel=1e-6) if tensor == "lse" else {}),
        }  # fmt: skip


def calls(count: int) -> int:
    return -(-count // (len(KERNELS) * HEADS))


def write(directory: Path, count: int) -> Path:
    """A report of so many rows, as `numdev.report.write` has it."""
    report = AuditReport(
        provenance=Provenance(numdev="0", command="", created="", system={}, source={}),
        request={},
        summary=AuditSummary(answer=(), kernels=()),
        plan=PlanRecord(
            kernels=tuple(
                PlannedKernel(role=role, kernel=kernel)
                for role, kernel in dict.fromkeys(each[:2] for each in KERNELS)
            ),
            formats=("bfloat16",),
            calls=tuple((f"model.layers.{i}.self_attn#0", None) for i in range(calls(count))),
        ),
        cases=tuple(
            CaseRecord(
                case=f"model.layers.{i}.self_attn#0", batch=8, heads=HEADS, kv_heads=HEADS,
                q_len=64, kv_len=64, head_dim=128, v_dim=128, source_format="float32", mask="none",
                is_causal=True, causal_offset=0, window=None, softcap=None, sinks=False, scale=0.1,
            )
            for i in range(calls(count))
        ),
        rows=tuple(DeviationRow.model_validate(r) for r in rows(count)),
    )  # fmt: skip
    path = directory / f"{count}.json"
    path.write_text(text_of(judged(report)))
    return path


def run(compiled: Path, *arguments: str) -> tuple[float, float]:
    """Seconds by the clock and of the processor that the command takes; it must pass."""
    environment = {n: x for n, x in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "numdev", "gate", *arguments]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    seconds = time.perf_counter() - start
    if answer.returncode:
        raise SystemExit(f"exit code {answer.returncode}: {answer.stdout}{answer.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| rows | MB | seconds | of the processor |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for count in options.rows:
            path = write(Path(name), count)
            size = path.stat().st_size / 1e6
            timed = [
                run(Path(name) / "compiled", str(path)) for _ in range(options.repeats)
            ]
            wall, used = (min(each) for each in zip(*timed, strict=True))
            print(f"| {count} | {size:.0f} | {wall:.2f} | {used:.2f} |", flush=True)


if __name__ == "__main__":
    main()
