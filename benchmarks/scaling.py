"""The same sweep with one worker and with several: is the report the same, and how much
faster?

    python benchmarks/scaling.py [--workers 2] [--device cuda] [--length 16384]
        [--seeds 6 | --seconds 300]

Sweeps heavy cells of nearly one size, whose time goes to drawing, an emulation and fp64
references, by `numdev sweep --workers 1` and `--workers N`. A first run of a cell for
each of N workers (not counted) fills the caches of compilers, and has a virtual machine
give out the memory they take; with --seconds another, of four cells, tells how many seeds
keep one worker busy for so long, and several of them equally. Of each run the whole time
is taken, around the command, and the rate of jobs once every worker has done one. The
rate leaves out what happens once however long a sweep is: the start of Python and of the
workers, torch's import and the start of CUDA on each, and the report. Prints Markdown;
exits with 1 where the reports differ in anything but times and the command.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numdev.report import read

NUMDEV = [sys.executable, "-m", "numdev"]
DEFAULTS = {"cuda": (16384, 16, 128), "cpu": (1024, 4, 64)}
"""By device: length, heads and head_dim of cells that take a few seconds each."""


@dataclass(frozen=True)
class Timed:
    """A sweep that was run."""

    whole: float
    """Seconds by the clock."""
    rate: float
    """Jobs a second, from when there was one done for each worker."""
    count: int
    report: dict[str, Any]


def config(
    device: str, length: int, heads: int, head_dim: int, seeds: int
) -> dict[str, Any]:
    kernel = "sdpa-flash" if device == "cuda" else "sdpa-math"
    cell = {
        "heads": heads,
        "seq_len": [length - 64, length],
        "head_dim": head_dim,
        "causal": True,
    }
    return {
        "cases": [{"name": "normal", **cell}],
        "kernels": [kernel, {"name": "emulated", "preset": "fa2"}],
        "formats": ["bfloat16"],
        "seeds": seeds,
        "device": device,
        "x": "seq_len",
        "reproducers": 0,
    }


def run(file: Path, out: Path, workers: int) -> Timed:
    """Sweep; raises CalledProcessError where that fails."""
    command = [
        *NUMDEV,
        "sweep",
        str(file),
        "-q",
        "-o",
        str(out),
        "--workers",
        str(workers),
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    seen: list[tuple[float, int]] = []
    while process.poll() is None:
        time.sleep(0.02)
        jobs = finished(out)
        if jobs >= workers and (not seen or jobs != seen[-1][1]):
            seen.append((time.perf_counter(), jobs))
    whole = time.perf_counter() - began
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    (first, before), (last, count) = seen[0], seen[-1]
    rate = (count - before) / (last - first) if last > first else float("nan")
    return Timed(whole, rate, count, comparable(out))


def finished(out: Path) -> int:
    """How many jobs are in the journal: each has one entry of the floor."""
    try:
        lines = (out / "rows.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return sum('"role":"floor"' in line for line in lines)


def comparable(out: Path) -> dict[str, Any]:
    """A report without its times and its command, nor its digest, which is of these
    too."""
    report = read(out).model_dump(mode="json")
    del (
        report["timings"],
        report["provenance"]["created"],
        report["provenance"]["command"],
    )
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=DEFAULTS)
    for name in ("length", "heads", "head-dim"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--seconds", type=float)
    asked = parser.parse_args(arguments)
    device = asked.device or _device()
    shape = (asked.length, asked.heads, asked.head_dim)
    length, heads, head_dim = (
        x or y for x, y in zip(shape, DEFAULTS[device], strict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        file, first = Path(folder) / "scaling.yaml", Path(folder) / "first.yaml"
        each = math.ceil(asked.workers / 2)  # of two lengths
        first.write_text(json.dumps(config(device, length, heads, head_dim, each)))
        run(first, Path(folder) / "first", asked.workers)
        seeds = asked.seeds
        if asked.seconds:
            first.write_text(json.dumps(config(device, length, heads, head_dim, 2)))
            rate = run(first, Path(folder) / "second", 1).rate
            each = math.ceil(asked.seconds * rate / asked.workers)
            seeds = math.ceil(each * asked.workers / 2)  # of two lengths each
        file.write_text(json.dumps(config(device, length, heads, head_dim, seeds)))
        print(
            f"{2 * seeds} jobs: {heads} heads of {head_dim}, {length} tokens, on "
            f"{device}.\n"
        )
        print("| workers | whole command, s | jobs a second |\n|---|---|---|", flush=True)
        times = []
        for n in (1, asked.workers):
            times.append(run(file, Path(folder) / str(n), n))
            print(f"| {n} | {times[-1].whole:.1f} | {times[-1].rate:.3f} |", flush=True)
    one, several = times
    same = one.report == several.report
    print(f"| ratio | {one.whole / several.whole:.2f} | {several.rate / one.rate:.2f} |")
    print(f"\nThe reports are {'the same' if same else 'NOT the same'}.")
    return 0 if same else 1


def _device() -> str:
    """Asked of another process, since this one should not hold a GPU."""
    ask = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
