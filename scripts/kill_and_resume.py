"""Kill a study with SIGKILL at random moments, run it again each time, and compare the
end.

    python scripts/kill_and_resume.py --kills 100
    python scripts/kill_and_resume.py --kills 20 --only "audit --isolate" --only train
    python scripts/kill_and_resume.py configs/sweep/ci.yaml --kills 10 --workers 2
    python scripts/kill_and_resume.py configs/sweep/ci.yaml --kills 10 --workers 2 --only-workers

A process of its own runs the study: those of `STUDIES` in turn, or a sweep by its file.
Most often it is killed as soon as its journal has grown by a random number of lines, and
a random fraction of a task later; else at a random moment since its start. Once it comes
to its end, the next run begins in another directory. Each report must equal that of an
undisturbed run in everything but the time it was made, its timings and the command, and
its directory must hold the same files; the folder for temporary files must end up as
undisturbed runs leave it, and no process may outlive its study.

With `--only-workers` the sweep itself lives on, and one of its workers is killed at each
of these moments; each case survives one such death, so kills are spread over the sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from numdev import report
from numdev.studies.audit.journal import JOURNAL

ROOT = Path(__file__).parents[1]
AUDIT = "audit demo --length 24 --sequences 2 --kernel sdpa-math --kernel sdpa-flash"
SWEEP = f"sweep {ROOT}/configs/sweep/ci.yaml"
EFFECTS = "effects demo --length 16 --sequences 3 --kernel sdpa-math --no-sites"
INVARIANCE = (
    "invariance demo --length 16 --kernel sdpa-math --axis repeat --axis "
    "batch --axis chunks"
)
STUDIES = {
    "audit": AUDIT,
    "audit --isolate": f"{AUDIT} --isolate",
    "audit --workers 2": f"{AUDIT} --workers 2",
    "audit --backward": f"{AUDIT} --backward --explain",
    "sweep": SWEEP,
    "sweep --isolate": f"{SWEEP} --isolate",
    "sweep --workers 2": f"{SWEEP} --workers 2",
    "effects": EFFECTS,
    "effects --isolate": f"{EFFECTS} --isolate",
    "effects --workers 2": f"{EFFECTS} --workers 2",
    "invariance": INVARIANCE,
    "invariance --isolate": f"{INVARIANCE} --isolate",
    "train": f"train {ROOT}/configs/train/tiny-ci.yaml",
}
PATIENCE_S = 60.0  # for what a killed study leaves running to end


@dataclass
class Result:
    """What came of the kills of one study."""

    kills: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Study:
    """A command line of numdev that runs in a folder of its own."""

    arguments: Sequence[str]
    folder: Path

    def start(self, directory: Path) -> subprocess.Popen[bytes]:
        """Run it into a directory. Temporary files go into this study's folder."""
        command = [
            sys.executable,
            "-m",
            "numdev",
            *self.arguments,
            "-o",
            str(directory),
            "-q",
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen([*command, "--device", "cpu"], env=env, cwd=self.folder)

    @property
    def temporary(self) -> Path:
        path = self.folder / "temporary"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, directory: Path) -> dict[str, Any]:
        """Run it to its end; the report, without what may differ."""
        if self.start(directory).wait() != 0:
            raise SystemExit(f"numdev {' '.join(self.arguments)}: failed")
        return comparable(report.read(directory))


def comparable(finished: report.AnyReport) -> dict[str, Any]:
    """A report without the time it was made, its timings and the command."""
    plain = finished.model_dump(mode="json")
    plain.pop("timings", None)
    del plain["provenance"]["created"], plain["provenance"]["command"]
    return plain


def names(folder: Path) -> set[str]:
    """The files and folders in it."""
    return {path.name for path in folder.iterdir()}


def lines(directory: Path) -> int:
    path = directory / JOURNAL
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(
    process: subprocess.Popen[bytes], directory: Path, goal: int, later_s: float
) -> bool:
    """Wait for `goal` lines in the journal and `later_s` more; whether the process still
    runs."""
    while process.poll() is None and lines(directory) < goal:
        time.sleep(0.002)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(later_s)
    return process.poll() is None


def kill(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Kill a study; what it started and is still there when its time to end is over."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    return alive


def kill_study(study: Study, kills: int) -> Result:
    """Kill a study so often, and let each directory's last run come to its end."""
    began = time.monotonic()
    undisturbed = study.folder / "undisturbed"
    expected = study.finish(undisturbed)
    whole_s, whole = time.monotonic() - began, lines(undisturbed)
    files, usual = names(undisturbed), names(study.temporary) | {undisturbed.name}
    result = Result()
    for number in itertools.count():
        directory = study.folder / f"killed-{number}"
        while result.kills < kills and not (directory / "report.html").exists():
            by_time = random.random() < 0.25
            goal = (
                0 if by_time else lines(directory) + random.randint(1, max(1, whole // 4))
            )
            process = study.start(directory)
            later_s = random.uniform(0, whole_s) if by_time else random.uniform(0, 0.05)
            if not wait_until(process, directory, goal, later_s):
                break
            result.kills += 1
            result.problems += [
                f"lives on: {' '.join(p.cmdline())}" for p in kill(process)
            ]
        same = study.finish(directory) == expected
        result.compared += 1
        if not same:
            result.problems.append(f"{directory.name}: the report is different")
        if strays := names(directory) - files:
            result.problems.append(f"{directory.name}: {', '.join(sorted(strays))}")
        if result.kills >= kills:
            break
    usual |= {path.name for path in study.folder.glob("killed-*")} | {"temporary"}
    for strays in (names(study.temporary) - usual, names(study.folder) - usual):
        result.problems += [f"stays: {name}" for name in sorted(strays)]
    return result


# --- workers of a sweep ---------------------------------------------------------------


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The Dask workers of a sweep: its children that multiprocessing started."""
    children = psutil.Process(process.pid).children(recursive=True)
    alive = (child for child in children if child.status() != psutil.STATUS_ZOMBIE)
    return [child for child in alive if "spawn_main" in " ".join(child.cmdline())]


def kill_workers(study: Study, kills: int) -> Result:
    """Start one sweep and kill one of its workers, up to `kills` times."""
    expected = study.finish(study.folder / "undisturbed")
    whole = lines(study.folder / "undisturbed")
    directory, result = study.folder / "killed", Result()
    process = study.start(directory)
    for goal in sorted(random.sample(range(1, whole), min(kills, whole - 1))):
        if not wait_until(process, directory, goal, random.uniform(0.0, 0.02)):
            break
        if workers := workers_of(process):
            random.choice(workers).kill()
            result.kills += 1
            print(f"a worker killed with {lines(directory)} of {whole} lines", flush=True)
    process.wait()
    result.compared = 1
    if study.finish(directory) != expected:
        result.problems.append("the report is different")
    return result


def studies(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Names and arguments of what is to be killed."""
    if options.config is not None:
        workers = ["--workers", str(options.workers)] if options.workers else []
        yield "sweep", ["sweep", str(options.config.absolute()), *workers]
        return
    for name in options.only or STUDIES:
        yield name, STUDIES[name].split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "config", type=Path, nargs="?", help="sweep to kill, for all STUDIES"
    )
    parser.add_argument("--kills", type=int, default=10, help="of all studies together")
    parser.add_argument("--only", action="append", choices=STUDIES, help="study to kill")
    parser.add_argument("--workers", type=int, help="Dask workers of the sweep")
    parser.add_argument(
        "--only-workers", action="store_true", help="kill workers, not the sweep"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    chosen = list(studies(options))
    shares = Counter(i % len(chosen) for i in range(options.kills))
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for i, (name, arguments) in enumerate(chosen):
            study = Study(arguments, Path(scratch) / str(i))
            result = (kill_workers if options.only_workers else kill_study)(
                study, shares[i]
            )
            print(
                f"{name}: {result.kills} kills, {result.compared} reports compared",
                flush=True,
            )
            for problem in result.problems:
                print(f"  {problem}", flush=True)
            results.append(result)
    kills, compared = sum(r.kills for r in results), sum(r.compared for r in results)
    wrong = sum(len(r.problems) for r in results)
    same = "the report is the same" if not wrong else f"{wrong} PROBLEMS"
    print(f"{kills} kills, {compared} reports compared; {same}")
    sys.exit(0 if not wrong else 1)


if __name__ == "__main__":
    main()
