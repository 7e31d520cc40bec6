"""Kill a sweep with SIGKILL at random moments, run it again each time, and compare the end.

    python scripts/kill_and_resume.py configs/sweep/ci.yaml --kills 10

A process of its own runs `numdev sweep`; as soon as the journal has grown by a random number of
lines, and a random fraction of a task later, it is killed, in whatever it was doing. After the last
kill the sweep runs to its end. Its report must equal that of an undisturbed run in everything but
the time it was made, what took how long, and the command.
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
from pathlib import Path
from typing import Any

from numdev import report
from numdev.audit.journal import JOURNAL


def start(config: Path, directory: Path) -> subprocess.Popen[bytes]:
    """`numdev sweep`, in a process of its own."""
    command = [sys.executable, "-m", "numdev", "sweep", str(config), "-o", str(directory), "-q"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--device", "cpu"], env=one_thread)


def lines(directory: Path) -> int:
    path = directory / JOURNAL
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed(config: Path, directory: Path, chance: random.Random, most: int) -> int | None:
    """Start it and kill it; returns how many lines it left, None if it was finished first."""
    goal = lines(directory) + chance.randint(0, most)
    process = start(config, directory)
    while process.poll() is None and lines(directory) < goal:
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.02))
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return lines(directory)


def finish(config: Path, directory: Path) -> dict[str, Any]:
    """Run it to its end; the report, without what may differ."""
    if start(config, directory).wait() != 0:
        raise SystemExit("the sweep failed")
    return comparable(report.read(directory))


def comparable(found: report.AnyReport) -> dict[str, Any]:
    """A report but for the time it was made, what took how long, and the command."""
    plain = found.model_dump(mode="json")
    del plain["timings"]
    del plain["provenance"]["created"], plain["provenance"]["command"]
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed = finish(given.config, Path(scratch) / "undisturbed")
        whole = lines(Path(scratch) / "undisturbed")
        directory, hit = Path(scratch) / "killed", 0
        for _ in range(given.kills):
            left = killed(given.config, directory, chance, max(1, whole // given.kills))
            hit += left is not None
            print(f"killed with {left} of {whole} lines" if left is not None else "finished first")
        same = finish(given.config, directory) == undisturbed
    print(f"{hit} kills; the report is {'the same' if same else 'DIFFERENT'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
