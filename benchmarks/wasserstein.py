"""How fast is the exact Wasserstein distance, beside scipy's and beside the sorting it
needs?

    python benchmarks/wasserstein.py [--repeats 3] [--count 4000000]

Everything is a ratio within one run, of medians; what is compared takes turns.

- On the CPU: 4 M values in float32 and in bfloat16 against `scipy.stats.wasserstein_distance` of
  the same values.
- With CUDA: 200 M float32 values against the two calls of `torch.sort` alone; bfloat16, of normal
  values and of a single one, against float32; with the memory each takes beyond its inputs.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy
import torch
from scipy.stats import wasserstein_distance

from numdev.metrics.wasserstein import w1
from numdev.system import System

FEW, MANY = 4_000_000, 200_000_000
Ways = dict[str, Callable[[], Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--count", type=int, default=FEW, help="values on the CPU")
    options = parser.parse_args()
    tables = [
        on_cpu(options.repeats, options.count),
        *([on_cuda(options.repeats)] if torch.cuda.is_available() else []),
    ]
    for table in tables:
        print(f"{next(table)[0]}\n")
        for row in table:
            print("| " + " | ".join(row) + " |", flush=True)
        print()


def on_cpu(repeats: int, count: int) -> Iterator[tuple[str, ...]]:
    """Against scipy."""
    system = System.probe("cpu")
    versions = (
        f"numpy {np.__version__}, scipy {scipy.__version__}, torch {torch.__version__}"
    )
    yield (f"{system.cpu}, {system.threads} threads, {versions}",)
    a, b = (normal(count, seed, "cpu") for seed in (0, 1))
    pairs = {
        f"{count / 1e6:g} M and {count / 1e6:g} M, float32": (a, b),
        f"{count / 1e6:g} M and {count / 1e6:g} M, bfloat16": (
            a.bfloat16(),
            b.bfloat16(),
        ),
    }
    yield "values", "`w1`, ms", "scipy, ms", "times as fast", "relative difference"
    yield ("---",) * 5
    for name, (x, y) in pairs.items():
        u, v = x.float().numpy(), y.float().numpy()
        ways: Ways = {
            "ours": lambda x=x, y=y: w1(x, y),
            "scipy": lambda u=u, v=v: wasserstein_distance(u, v),
        }
        taken, distances = in_turn(ways, repeats, lambda: None)
        difference = abs(distances["ours"] / distances["scipy"] - 1)
        factor = taken["scipy"] / taken["ours"]
        yield (
            name,
            ms(taken["ours"]),
            ms(taken["scipy"]),
            f"{factor:.0f}",
            f"{difference:.0e}",
        )


def on_cuda(repeats: int) -> Iterator[tuple[str, ...]]:
    """Against the sorts, and against float32."""
    yield (f"{torch.cuda.get_device_name()}, torch {torch.__version__}",)
    a, b = (normal(MANY, seed, "cuda") for seed in (0, 1))
    a16, b16 = a.bfloat16(), b.bfloat16()
    zeros = torch.zeros_like(a16)
    ways: Ways = {
        "two `torch.sort` of float32": lambda: (
            torch.sort(a).values,
            torch.sort(b).values,
        ),
        "`w1`, float32": lambda: w1(a, b),
        "`w1`, bfloat16": lambda: w1(a16, b16),
        "`w1`, bfloat16, all zero": lambda: w1(zeros, zeros),
        "`w1`, bfloat16 and float32": lambda: w1(a16, b),
    }
    taken, _ = in_turn(ways, repeats, torch.cuda.synchronize)
    yield (
        "200 M values each",
        "ms",
        "of the two sorts",
        "of `w1`, float32",
        "beyond inputs, GB",
    )
    yield ("---",) * 5
    sorts, plain = list(taken.values())[:2]
    for name, way in ways.items():
        ratios = [f"{taken[name] / reference:.2f}" for reference in (sorts, plain)]
        yield name, ms(taken[name]), *ratios, f"{beyond(way) / 1e9:.1f}"


def normal(count: int, seed: int, device: str) -> torch.Tensor:
    """Values as weights have them."""
    drawn = torch.Generator(device).manual_seed(seed)
    return 0.02 * torch.randn(count, generator=drawn, device=device)


def in_turn(
    ways: Ways, repeats: int, wait: Callable[[], object]
) -> tuple[dict[str, float], dict[str, Any]]:
    """The median seconds of each way over rounds of all, after one that does not count;
    and what each returned."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Any] = {}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            wait()
            begin = time.perf_counter()
            results[name] = way()
            wait()
            taken[name].append(time.perf_counter() - begin)
    return {
        name: statistics.median(seconds[1:]) for name, seconds in taken.items()
    }, results


def beyond(way: Callable[[], object]) -> int:
    """The most memory `way` holds at once on the GPU, beyond what is there, in bytes."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way()
    return torch.cuda.max_memory_allocated() - before


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


if __name__ == "__main__":
    main()
