"""Kill a sweep with SIGKILL at random moments, run it again each time, and compare the end.

    python scripts/kill_and_resume.py configs/sweep/ci.yaml --kills 10
    python scripts/kill_and_resume.py configs/sweep/ci.yaml --kills 10 --workers 2
    python scripts/kill_and_resume.py configs/sweep/ci.yaml --kills 10 --workers 2 --only-workers

A process of its own runs `numdev sweep`. It is killed as soon as the journal has grown by a random
number of lines, and a random fraction of a task later. After the last kill the sweep runs to its
end. With `--only-workers` the sweep itself lives on, and one of its workers is killed at each of
these moments; each case survives one such death, so kills are spread over the sweep.
The report must equal that of an undisturbed run, also made with `--workers`, in everything but the
time it was made, its timings and the command.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from numdev import report
from numdev.audit.journal import JOURNAL


def start(config: Path, directory: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """`numdev sweep`, in a process of its own."""
    command = [sys.executable, "-m", "numdev", "sweep", str(config), "-o", str(directory), "-q"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--device", "cpu", *options], env=one_thread)


def lines(directory: Path) -> int:
    path = directory / JOURNAL
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(process: subprocess.Popen[bytes], directory: Path, goal: int, rest_s: float) -> bool:
    """Wait for `goal` lines in the journal and `rest_s` more; whether the process still runs."""
    while process.poll() is None and lines(directory) < goal:
        time.sleep(0.002)
    time.sleep(rest_s)
    return process.poll() is None


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The Dask workers of a sweep: its children that multiprocessing started."""
    children = psutil.Process(process.pid).children(recursive=True)
    alive = (child for child in children if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]


def kill_sweeps(
    config: Path, directory: Path, options: Sequence[str], kills: int, whole: int
) -> int:
    """Start a sweep and kill it, `kills` times; how many were still running."""
    hit = 0
    for _ in range(kills):
        goal = lines(directory) + random.randint(0, max(1, whole // kills))
        process = start(config, directory, options)
        if wait_until(process, directory, goal, random.uniform(0.0, 0.02)):
            process.send_signal(signal.SIGKILL)
            hit += 1
        process.wait()
        print(f"killed with {lines(directory)} of {whole} lines", flush=True)
    return hit


def kill_workers(
    config: Path, directory: Path, options: Sequence[str], kills: int, whole: int
) -> int:
    """Start one sweep and kill one of its workers, up to `kills` times; how many were killed."""
    process, hit = start(config, directory, options), 0
    for goal in sorted(random.sample(range(1, whole), min(kills, whole - 1))):
        if not wait_until(process, directory, goal, random.uniform(0.0, 0.02)):
            break
        if workers := workers_of(process):
            random.choice(workers).kill()
            hit += 1
            print(f"a worker killed with {lines(directory)} of {whole} lines", flush=True)
    process.wait()
    return hit


def finish(config: Path, directory: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run it to its end; the report, without what may differ."""
    if start(config, directory, options).wait() != 0:
        raise SystemExit("the sweep failed")
    return comparable(report.read(directory))


def comparable(found: report.AnyReport) -> dict[str, Any]:
    """A report without the time it was made, its timings and the command."""
    plain = found.model_dump(mode="json")
    del plain["timings"]
    del plain["provenance"]["created"], plain["provenance"]["command"]
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--workers", type=int, help="Dask workers of the sweep")
    parser.add_argument("--only-workers", action="store_true", help="kill workers, not the sweep")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random.seed(given.seed)
    options = ["--workers", str(given.workers)] if given.workers else []
    kill = kill_workers if given.only_workers else kill_sweeps
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = finish(given.config, Path(scratch) / "undisturbed", options)
        whole = lines(Path(scratch) / "undisturbed")
        directory = Path(scratch) / "killed"
        hit = kill(given.config, directory, options, given.kills, whole)
        same = finish(given.config, directory, options) == undisturbed
    print(f"{hit} kills; the report is {'the same' if same else 'DIFFERENT'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
