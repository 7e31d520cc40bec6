"""What is seen of gradients that are summed in 16 bits over tiles, in kernels that do and
in kernels that do not.

    OMP_NUM_THREADS=1 python benchmarks/narrow_sums.py [--seeds 1] [--first 0] [--only NAME]
    OMP_NUM_THREADS=1 python benchmarks/narrow_sums.py --planted

Of the sound kernels of `planted`, none of which the measurement
knows, every regime of inputs in 256 tokens, with and without a causal mask and grouped
heads, and the long cases of `numdev check`, in both formats: the row's `narrow_sum`, which
the rule of that name allows so much. Printed for each kernel: how many rows, the largest,
and how many are beyond the limit. `--planted`: of kernels with one running sum in the
inputs' format, by its tile, order and what is rounded: in how many rows that show it is
seen, and the smallest and the median number."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from false_alarms import FORMATS
from planted import of_family
from planted.narrow import NARROW

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.gate.rules import default_rules
from numdev.kernels import Kernel
from numdev.sources.input_regimes import REGIMES
from numdev.studies.audit.case_measurement import bench_of, measure_task
from numdev.studies.audit.kernel_check import CheckSource
from numdev.studies.audit.plan import Task
from numdev.system import System

SYSTEM = System.probe("cpu")
LONG = ("causal", "six-on-two", "long")  # default cases that are long enough
SHAPES = (
    {"heads": 2, "seq_len": 256, "head_dim": 64, "causal": True},
    {"heads": 2, "seq_len": 256, "head_dim": 64},
    {
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "seq_len": 200,
        "head_dim": 32,
        "causal": True,
    },
)
NOTABLE = 0.05  # shown at once
LIMIT = next(t.at_most for t in default_rules().thresholds if t.metric == "narrow_sum")


def cases(seed: int) -> Iterator[AttentionCase]:
    """All of one seed."""
    drawn = [
        {"name": f"{name} {number}", "inputs": name, **shape}
        for number, shape in enumerate(SHAPES)
        for name in REGIMES
    ]
    source = CheckSource([*LONG, *drawn], (seed,), "cpu", gradients=True)
    for located in source:
        yield located.load()


def measured(
    case: AttentionCase, fmt: str, tried: list[Kernel]
) -> Iterator[tuple[Kernel, str, float]]:
    """By kernel and tensor, the numbers of one case."""
    try:
        bench = bench_of(case, fmt, gradients=True)
    except MeasurementError:
        return
    for kernel in tried:
        task = Task(
            case=case.ref, role="kernel", kernel=kernel.name, options={}, format=fmt,
            gradients=True,
        )  # fmt: skip
        for row in measure_task(task, kernel, bench, SYSTEM, later=[]).rows:
            if row.narrow_sum is not None:
                yield kernel, row.tensor, row.narrow_sum


def sound(first: int, seeds: int, only: str) -> None:
    tried = [each.kernel for each in of_family("sound") if only in each.name]
    numbers: dict[str, list[tuple[float, str]]] = {kernel.name: [] for kernel in tried}
    for seed in range(first, first + seeds):
        for case in cases(seed):
            for fmt in FORMATS:
                for kernel, tensor, number in measured(case, fmt, tried):
                    where = f"{case.ref.case}, seed {seed}, {fmt}, {tensor}"
                    numbers[kernel.name].append((number, where))
                    if number > NOTABLE:
                        print(f"  {kernel.name}: {number:.3f} ({where})", flush=True)
            print(f"  done: {case.ref.case}, seed {seed}", flush=True)
    every = sorted(pair for pairs in numbers.values() for pair in pairs)
    for name, pairs in (*numbers.items(), ("all", every)):
        beyond = sum(number > (LIMIT or 0.0) for number, _ in pairs)
        largest = max(pairs, default=(0.0, "none"))
        print(
            f"{name}: {len(pairs)} rows, largest {largest[0]:.3f} ({largest[1]}), "
            f"{beyond} beyond {LIMIT}",
            flush=True,
        )


# --- planted --------------------------------------------------------------------------


def planted(first: int, seeds: int) -> None:
    for how, entry in NARROW.items():
        seen = partial(_seen, entry.kernel, how.tensors)
        numbers = [x for n in range(first, first + seeds) for x in seen(n)]
        caught = sum(x > (LIMIT or 0.0) for x in numbers)
        print(
            f"{entry.what}: {caught} of {len(numbers)}, least {min(numbers):.2f}, "
            f"median {statistics.median(numbers):.2f}",
            flush=True,
        )


def _seen(kernel: Kernel, tensors: tuple[str, ...], seed: int) -> Iterator[float]:
    for name in ("normal", "long", "causal"):
        case = {"name": name, "inputs": name, **SHAPES[0]} if name == "normal" else name
        source = CheckSource([case], (seed,), "cpu", gradients=True)
        for located in source:
            for fmt in FORMATS:
                for _, tensor, number in measured(located.load(), fmt, [kernel]):
                    if tensor in tensors:
                        yield number


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What is seen of gradients that are summed in 16 bits over tiles?"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--planted", action="store_true", help="kernels that do sum so")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.planted:
        planted(options.first, options.seeds)
    else:
        sound(options.first, options.seeds, options.only)


if __name__ == "__main__":
    main()
