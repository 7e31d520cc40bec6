"""Does `numdev check --reference` accuse sound Triton kernels, and does it see faulty
ones? And how long does a check of a large product take from a cold start?

    PYTHONPATH=. python benchmarks/functions_gpu.py [--seeds 3 --only softmax]
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/functions_gpu.py --device cpu

Prints a table and ends with status 1 where a sound kernel is accused or a faulty one is
not. In Triton's interpreter bfloat16 is left out, a fault that only hardware has, and times.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import numdev

if TYPE_CHECKING:
    from functions_triton.kernels import Version

FOLDER = Path(__file__).resolve().parent
TOO_LONG_S = 10.0


def matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6))


def checked(version: Version, fmt: str, seed: int, device: str) -> Any:
    return numdev.check(
        version.function,
        reference=version.reference,
        inputs=version.inputs,
        formats=fmt,
        seeds=seed,
        backward=version.backward,
        device=device,
    )


def in_words(result: Any) -> str:
    """The rule that is exceeded, and what else the function computes, if that is named."""
    broken = [t.rule for t in result.judgement.tests if t.standing == "exceeded"]
    rules = ", ".join(dict.fromkeys(broken))
    rows = [r for r in result.report.rows if r.role == "kernel"]
    causes = dict.fromkeys(r.suspicion for r in rows if r.suspicion)
    failed = [r.reason for r in rows if r.status != "ok"]
    return "; ".join(filter(None, [rules, *causes, *map(str, failed[:1])]))


def largest(result: Any) -> float:
    """The largest error over what is explained."""
    beside = [r.beside_reference for r in result.report.rows if r.role == "kernel"]
    return max((x.reference_ratio or 0.0 for x in beside if x is not None), default=0.0)


def table(chosen: list[Version], seeds: range, device: str) -> int:
    """Prints a line for each version and format, and returns how many are judged
    wrongly."""
    wrong = 0
    print("| kernel | format | what is wrong | verdict | error / explained | rules, cause | seconds |")  # fmt: skip
    print("|---|---|---|---|---|---|---|", flush=True)
    for version in chosen:
        for fmt in version.formats:
            begin = time.perf_counter()
            results = [checked(version, fmt, 2 * seed, device) for seed in seeds]
            seconds = (time.perf_counter() - begin) / len(seeds)
            passed = sum(result.passed for result in results)
            is_right = passed == (0 if version.fault else len(seeds))
            wrong += not is_right
            words = dict.fromkeys(filter(None, map(in_words, results)))
            print(f"| {version.name} | {fmt} | {version.fault or 'sound'} | "
                  f"{passed} of {len(seeds)} pass{'' if is_right else ' — WRONG'} | "
                  f"{max(map(largest, results)):.3g} | {' / '.join(words)} | {seconds:.2f} |", flush=True)  # fmt: skip
    return wrong


def cold(reference: str, shape: str, fmt: str) -> None:
    """Prints what a check from the command line takes, imports included, and its
    verdict."""
    beside = f"{FOLDER / 'functions_gpu.py'}:{reference}"
    target = f"{FOLDER / 'functions_triton' / 'kernels.py'}:{reference}"
    command = [sys.executable, "-m", "numdev", "check", target, "--reference", beside,
               "--shape", shape, "--format", fmt, "--device", "cuda"]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    first = (done.stdout or done.stderr).strip().splitlines()[:1]
    print(f"cold check of {reference}, {shape}, {fmt}: {seconds:.1f} s (aim {TOO_LONG_S:g}), "
          f"{cpu:.1f} s of CPU, exit {done.returncode}: {''.join(first)}", flush=True)  # fmt: skip
    if done.returncode:
        print("\n".join((done.stdout + done.stderr).splitlines()[:25]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="kernels whose name begins so")
    parser.add_argument("--no-times", action="store_true")
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("functions_gpu.py: expected a CUDA GPU, got none")
    import triton
    from functions_triton.kernels import by_design, versions

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    where = "interpreter" if interpreted else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, Triton {triton.__version__}")
    chosen = [v for v in versions() if v.name.startswith(asked.only)]
    if interpreted:
        # Its conversion to bfloat16 truncates, and its products of bfloat16 are wrong
        formats = {v: tuple(f for f in v.formats if f != "bfloat16") for v in chosen}
        chosen = [replace(v, formats=formats[v]) for v in chosen if not v.gpu]
    wrong = table(chosen, range(asked.seeds), asked.device)
    print(f"\njudged wrongly: {wrong} of {sum(len(v.formats) for v in chosen)}")
    if not asked.only:
        print("\nLess exact by design (no verdict is asked of these):")
        table(
            [replace(v, formats=("float16",)) for v in by_design()],
            range(1),
            asked.device,
        )
    if not interpreted and not asked.no_times:
        print()
        cold("matmul", "x=4096x4096,y=4096x4096", "bfloat16")
        cold("matmul", "x=4096x4096,y=4096x4096", "float32")
        cold("rms_norm", "x=4096x4096,w=4096", "bfloat16")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
