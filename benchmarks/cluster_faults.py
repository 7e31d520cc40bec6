"""Workers, schedulers and clients killed at random moments: does the report stay the same?

    OMP_NUM_THREADS=1 python benchmarks/cluster_faults.py [--times 10] [--seed 0]

A small sweep on the CPU is run once without workers. Then, `--times` times each, SIGKILL goes to a
worker, to the scheduler, to the client, and to the server that workers are copies of together with
a worker, when the journal has reached a length drawn at random and a random while after that. A run
that ended with what was killed is started again, with the same command. Each report must be the
undisturbed one in everything but times and the command, the journal must have the same entries,
each once, and no process of a killed client may be left.
Prints a table in Markdown; exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

CONFIG = """
cases:
  - {name: normal, heads: 2, seq_len: [64, 96, 128, 160], head_dim: 16, causal: true}
kernels: [sdpa-math, {name: emulated, preset: [golden2024, fa2]}]
formats: [bfloat16]
seeds: 4
x: seq_len
"""
NUMDEV = [sys.executable, "-m", "numdev"]
AT_MOST_S = 600.0


@dataclass
class Trial:
    """One kill: what came of it."""

    killed: str
    at: int
    """How many entries the journal had."""
    code: int
    """The exit code of the run that was hit."""
    kept: int = 0
    """How many entries it left."""
    problems: list[str] = field(default_factory=list)


@dataclass
class Bed:
    """The sweep, and what it comes to undisturbed."""

    folder: Path
    config: Path
    report: dict[str, Any]
    keys: list[str]

    def start(self, out: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [*NUMDEV, "sweep", str(self.config), "--device", "cpu", "-q", "-o", str(out)]
        return subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)

    def problems(self, out: Path) -> list[str]:
        """How a finished run differs from the undisturbed one."""
        keys, found = entries(out), comparable(out)
        different = [part for part in self.report if self.report[part] != found.get(part)]
        return [
            *(f"report differs in {part}" for part in different),
            *(["an entry twice"] if len(keys) != len(set(keys)) else []),
            *(["entries lost"] if set(self.keys) - set(keys) else []),
            *(["entries too many"] if set(keys) - set(self.keys) else []),
        ]


def entries(out: Path) -> list[str]:
    """The keys in a journal, but for a last line that was not finished."""
    try:
        lines = (out / "rows.jsonl").read_text().split("\n")[1:-1]
    except OSError:
        return []
    return [json.loads(line)["task"] for line in lines]


def comparable(out: Path) -> dict[str, Any]:
    """A report without its times and its command; empty where there is none."""
    try:
        found: dict[str, Any] = json.loads((out / "report.json").read_text())
    except OSError:
        return {}
    del found["timings"], found["provenance"]["created"], found["provenance"]["command"]
    return found


def undisturbed(folder: Path) -> Bed:
    config, out = folder / "faults.yaml", folder / "undisturbed"
    config.write_text(CONFIG)
    bed = Bed(folder, config, {}, [])
    if code := bed.start(out).wait():
        sys.exit(f"the undisturbed run ended with {code}")
    return Bed(folder, config, comparable(out), entries(out))


@contextlib.contextmanager
def cluster(port: int) -> Iterator[tuple[psutil.Process, list[psutil.Process]]]:
    """A scheduler with two workers, all started by Dask's own commands."""
    address = f"tcp://127.0.0.1:{port}"
    dask = [sys.executable, "-m", "distributed.cli."]
    where = ["--host", "127.0.0.1", "--no-dashboard"]
    commands = [
        [*dask[:2], dask[2] + "dask_scheduler", *where, "--port", str(port)],
        *[[*dask[:2], dask[2] + "dask_worker", address, "--nthreads", "1", *where]] * 2,
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [psutil.Popen(command, **quiet) for command in commands]
    try:
        yield started[0], started[1:]
    finally:
        ended([p for s in started if s.is_running() for p in (s, *s.children(recursive=True))])


def ended(processes: list[psutil.Process]) -> None:
    """Kill them, and wait."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def listening(port: int) -> None:
    """Wait for somebody to answer there."""
    until = time.monotonic() + AT_MOST_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port}")


def workers_of(client: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The worker processes a client has started: copies of its fork server."""
    return [worker for server in servers_of(client) for worker in server.children()]


def servers_of(client: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Its fork server, while that is there."""
    found = psutil.Process(client.pid).children()
    return [p for p in found if "multiprocessing.forkserver" in " ".join(p.cmdline())]


def reached(client: subprocess.Popen[bytes], out: Path, length: int, pause: float) -> None:
    """Wait until the journal has so many entries, or the client has ended, and a while longer."""
    while client.poll() is None and len(entries(out)) < length:
        time.sleep(0.02)
    time.sleep(pause)


def kill_worker(bed: Bed, out: Path, at: int, draw: random.Random) -> Trial:
    client = bed.start(out, "--workers", "2")
    reached(client, out, at, draw.random() * 0.2)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        draw.choice(workers_of(client)).kill()
    kept = len(entries(out))
    return Trial("a worker", at, client.wait(AT_MOST_S), kept)


def kill_server(bed: Bed, out: Path, at: int, draw: random.Random) -> Trial:
    """What workers are copies of, and a worker, so that another is needed."""
    client = bed.start(out, "--workers", "2")
    reached(client, out, at, draw.random() * 0.2)
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        worker = draw.choice(workers_of(client))
        servers_of(client)[0].kill()
        worker.kill()
    kept = len(entries(out))
    return Trial("the fork server and a worker", at, client.wait(AT_MOST_S), kept)


def kill_client(bed: Bed, out: Path, at: int, draw: random.Random) -> Trial:
    client = bed.start(out, "--workers", "2")
    reached(client, out, at, draw.random() * 0.2)
    left = workers_of(client)
    client.kill()
    trial = Trial("the client", at, client.wait(), len(entries(out)))
    _, alive = psutil.wait_procs(left, timeout=30)
    ended(alive)
    trial.problems += [f"{len(alive)} workers left"] if alive else []
    bed.start(out, "--workers", "2").wait(AT_MOST_S)
    return trial


def kill_scheduler(bed: Bed, out: Path, at: int, draw: random.Random) -> Trial:
    codes = []
    for again in (False, True):
        port = free_port()
        with cluster(port) as (scheduler, _):
            listening(port)
            client = bed.start(out, "--scheduler", f"tcp://127.0.0.1:{port}")
            if not again:
                reached(client, out, at, draw.random() * 0.2)
                scheduler.kill()
                kept = len(entries(out))
            codes.append(client.wait(AT_MOST_S))
    return Trial("the scheduler", at, codes[0], kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    print("| killed | journal at | kept of it | its exit code | afterwards |")
    print("|---|---|---|---|---|")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        bed = undisturbed(Path(folder))
        for kill in (kill_worker, kill_server, kill_scheduler, kill_client):
            for i in range(asked.times):
                out = bed.folder / f"{kill.__name__}-{i}"
                trial = kill(bed, out, draw.randrange(len(bed.keys)), draw)
                trial.problems += bed.problems(out)
                bad += bool(trial.problems)
                said = "; ".join(trial.problems) or "the same report, nothing lost, nothing twice"
                at = f"{trial.at} of {len(bed.keys)}"
                row = (trial.killed, at, trial.kept, trial.code, said)
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
