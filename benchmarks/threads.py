"""Is one thread, or are all, faster for work of this size, and does numdev choose well?

    python benchmarks/threads.py [--times 7] [--load 1] [--threads 16] [--train] [--small]

Calls of three sizes (with gradients, bfloat16, sdpa-flash and `emulated`), measured as
`numdev audit` measures them; with --train three networks, a few steps of each with all
that is recorded. On one thread, on all, and by default, in turn, so that what else runs
on the machine meets all alike. Shown are medians in seconds of wall time, and the default
over the better of the two others: at most 1.3. `--load` starts so many processes that
multiply matrices on one thread each. Set OMP_WAIT_POLICY=PASSIVE, as the command line
does.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from numdev.request_models import AuditRequest, CaseConfig, Choice
from numdev.studies.audit.run import audit
from numdev.studies.training import study
from numdev.studies.training.config import TrainConfig, resolve
from numdev.system import System

BURN = (
    "import torch; torch.set_num_threads(1); x = torch.randn(700, 700)\nwhile True: x @ x"
)
CALLS = {
    "128 tokens, 4 heads": (128, 4),
    "512 tokens, 4 heads": (512, 4),
    "1536, 4": (1536, 4),
}
NETWORKS = {
    "width 32, context 32": (32, 32),
    "128, 128": (128, 128),
    "256, 256": (256, 256),
}


def an_audit(length: int, heads: int) -> Callable[[Path], Any]:
    case = CaseConfig(name="call", heads=heads, seq_len=length, head_dim=64, causal=True)
    kernels = (Choice(name="sdpa-flash"), Choice(name="emulated"))
    asked = AuditRequest(
        target="threads", cases=(case,), kernels=kernels, formats=("bfloat16",),
        backward=True, device="cpu", reproducers=0,
    )  # fmt: skip
    return lambda directory: audit(asked, directory)


def a_training(width: int, context: int) -> Callable[[Path], Any]:
    config: dict[str, Any] = {
        "title": "threads", "data": {"source": "stdlib"}, "batch": 4, "steps": 4, "record": "log",
        "model": {"kind": "llama", "layers": 2, "width": width, "heads": 4, "context": context},
        "variants": [
            {"name": "baseline", "role": "golden", "kernel": "baseline", "format": "bfloat16"},
            {"name": "flash", "role": "flash", "kernel": "sdpa-flash"},
        ],
    }  # fmt: skip
    request = resolve(TrainConfig.model_validate(config), "threads", device="cpu")
    return lambda directory: study.train(request, directory)


def seconds(run: Callable[[Path], Any], threads: int | None) -> float:
    """How long a run takes on so many threads; None: by default."""
    chosen: Any = contextlib.nullcontext()
    if threads is not None:
        module = "numdev.studies.audit.isolation.SMALL"
        chosen = mock.patch(module, 0 if threads > 1 else sys.maxsize)
    with tempfile.TemporaryDirectory() as directory, chosen:
        start = time.perf_counter()
        run(Path(directory))
        return time.perf_counter() - start


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """So many busy processes beside this one."""
    busy = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        time.sleep(10 if busy else 0)
        yield
    finally:
        for process in busy:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--small", action="store_true", help="the first size alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    system = System.probe("cpu")
    print(
        f"{system.cpu}, {options.threads} threads, torch {torch.__version__}, load "
        f"{options.load}\n"
    )
    print("| what | one | all | default | over the better |\n|---|---|---|---|---|")
    make, sizes = (a_training, NETWORKS) if options.train else (an_audit, CALLS)
    with beside(options.load):
        for name, size in list(sizes.items())[: 1 if options.small else None]:
            run = make(*size)
            seconds(run, None)  # what the first use costs
            ways = (1, options.threads, None)
            taken = [[seconds(run, way) for way in ways] for _ in range(options.times)]
            one, every, default = map(statistics.median, zip(*taken, strict=True))
            ratio = default / min(one, every)
            print(
                f"| {name} | {one:.2f} | {every:.2f} | {default:.2f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
