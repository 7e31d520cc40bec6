"""Run the CPU tests in as many processes as there are processors.

    python scripts/run_tests.py [FILE...]

Files are dealt to groups, and a process with one thread takes the next group whenever one is done:
tests are small, and threads of several processes would only wait for each other. What a process
says is printed when it ends. Exits with 1 where a group fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent
GROUPS = 8
"""More than there are processors, so that none waits long for the last."""
MOST = 4
"""Processes at a time: each takes up to 2 GB."""


def dealt(files: Sequence[str]) -> list[list[str]]:
    """The files in groups, neighbours in different ones: what belongs together takes as long."""
    return [group for i in range(GROUPS) if (group := list(files[i::GROUPS]))]


def run(files: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu", *files]
    threads = {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def main(arguments: Sequence[str]) -> int:
    files = list(arguments) or sorted(str(p) for p in (ROOT / "tests").glob("test_*.py"))
    groups = dealt(files)
    processes = min(os.cpu_count() or 1, MOST, len(groups))
    print(f"{len(files)} files in {len(groups)} groups, {processes} at a time", flush=True)
    failed = 0
    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(run, group) for group in groups]):
            found = done.result()
            print(found.stdout, flush=True)
            failed += found.returncode not in (0, 5)  # 5: every test of the group is for a GPU
    print(f"{failed} of {len(groups)} groups failed" if failed else "all groups passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
