"""Does the bias statistic accuse the guilty, and only them?

    python benchmarks/bias_calibration.py [--format bfloat16] [--reports 8] [--device cuda]
    python benchmarks/bias_calibration.py --power [--sequences 8] [--length 128]

`--power` measures nothing and draws errors instead: of correct rounding plus one ulp in a
share of the elements of one of 64 features, or of all, alone and beside errors of flash
attention's size to either side. How many heads are missed, of 16 and of 1024 judged
together.

Every report is an audit of fresh inputs with `--heads` heads and `--sequences` sequences,
and its verdict is the report's own: `numdev.summary` with its error rate, its least size
and its least number of sequences. The table counts the heads accused over all reports.

Kernels, by what is known of them beforehand:

- sound: `sdpa-math` and `fp32` (attention in fp32 and one correct rounding). They must go free; the
  error rate is 1 % of the reports.
- guilty: `unnormalised` (P = exp(S - m) in the working format, PV exact but rounded before it is
  divided by l, then rounded again; the second paper's mechanism, which needs tied maxima),
  `truncated` (the exact result cut instead of rounded) and `drift` (the exact result rounded, one
  element in ten an ulp too high).
- judged: production kernels, about which the table says something new. `stochastic` belongs here:
  it is without bias against the truth, and biased against correct rounding wherever that itself
  leans to one side, as it does on ties.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from planted import CATALOGUE

from numdev.formats import format_named
from numdev.kernels import Kernel
from numdev.metrics.bias import bias
from numdev.metrics.statistics import BIAS_ALPHA, BIAS_ULP, holm
from numdev.report import DeviationRow
from numdev.report.summary import summarise
from numdev.request_models import CaseConfig, Choice
from numdev.sources.case_sources import Drawn
from numdev.studies.audit.case_measurement import bench_of, measure_task
from numdev.studies.audit.plan import Task
from numdev.system import System

REGIMES: Mapping[str, Choice] = {
    "normal": Choice(name="normal"),
    "normal, logits x 4": Choice(name="normal", options={"logits": 4.0}),
    "outliers": Choice(name="outliers"),
    "sink": Choice(name="sink"),
    "sink, strength 16": Choice(name="sink", options={"strength": 16.0}),
    "ties": Choice(name="ties"),
    "ties, strength 16": Choice(name="ties", options={"strength": 16.0}),
}


SOUND, GUILTY, JUDGED = (
    [CATALOGUE[name].kernel for name in names]
    for names in (
        ("sdpa-math", "fp32"),
        ("unnormalised", "truncated", "drift"),
        ("sdpa-flash", "baseline", "stochastic"),
    )
)


# --- counting -------------------------------------------------------------------------


@dataclass
class Tally:
    """What several reports said of one kernel."""

    heads: int = 0
    accused: int = 0
    sizes: list[float] = field(default_factory=list)

    def add(self, rows: Sequence[DeviationRow]) -> None:
        (summary,) = summarise(rows).kernels
        assert summary.biased_heads is not None, [row.reason for row in rows]
        self.heads += summary.ok
        self.accused += summary.biased_heads
        self.sizes += [abs(row.bias_size or 0.0) for row in rows if row.tensor == "out"]


def calibrate(
    regime: Choice,
    format_name: str,
    kernels: Sequence[Kernel],
    *,
    reports: int = 8,
    heads: int = 16,
    sequences: int = 8,
    length: int = 128,
    head_dim: int = 64,
    causal: bool = False,
    device: str = "cpu",
) -> dict[str, Tally]:
    """Kernel name to what `reports` independent reports say of it."""
    tallies = {kernel.name: Tally() for kernel in kernels}
    system = System.probe(device)
    for seed in range(reports):
        config = CaseConfig(
            name="calibration",
            batch=sequences,
            heads=heads,
            seq_len=length,
            head_dim=head_dim,
            causal=causal,
            inputs=regime,
        )
        case = Drawn(config=config, seed=seed, source="calibration", device=device)
        bench = bench_of(case.load(), format_name)
        for kernel in kernels:
            task = Task(
                case=case.ref, role="kernel", kernel=kernel.name, format=format_name
            )
            tallies[kernel.name].add(measure_task(task, kernel, bench, system).rows)
    return tallies


# Of elements: an rms error of 1.25 floors, all else an ulp up or down
FLASH = (1.25**2 - 1) / 12


def missed(
    bias_ulp: float,
    heads: int,
    sequences: int,
    length: int,
    features: int,
    unbiased: float = 0.0,
) -> float:
    """The share of heads whose errors of `bias_ulp` in the first `features` of 64 are
    missed, where a share of all elements (`unbiased`) is an ulp off to either side
    besides."""
    rng = np.random.default_rng(0)
    sums, shape = np.zeros((sequences, heads, 64)), (sequences, heads, 64)
    sums[..., :features] = rng.binomial(length, bias_ulp, (sequences, heads, features))
    moved = sums.sum(axis=-1)
    for sign in (1, -1):
        either = rng.binomial(length, unbiased / 2, shape)
        sums += sign * either
        moved += either.sum(axis=-1)
    along = rng.normal(size=(sequences, heads)) * np.sqrt(moved)  # signs are random
    metrics = bias(sums, along, np.full(sums.shape, float(length)))
    sure = holm([head["bias_p"] for head in metrics], BIAS_ALPHA)
    judged = zip(metrics, sure, strict=True)
    return sum(not ok or abs(h["bias_size"]) < BIAS_ULP for h, ok in judged) / heads


def power(sequences: int, length: int) -> None:
    print(f"{sequences} sequences of {length} rows; heads missed, in %\n")
    print(
        "| bias, ulp; beside it | one feature, 16 heads | 1024 heads | all, 16 "
        "heads | 1024 heads |"
    )
    print("|---|---|---|---|---|")
    for size, (words, unbiased) in itertools.product(
        (0.05, 0.1, 0.25, 0.5), (("nothing", 0.0), ("flash attention's errors", FLASH))
    ):
        where = itertools.product((1, 64), (16, 1024))
        shares = (missed(size, n, sequences, length, k, unbiased) for k, n in where)
        print(
            f"| {size}; {words} |",
            " | ".join(f"{100 * share:.0f}" for share in shares),
            "|",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Does the bias statistic accuse only the guilty?"
    )
    parser.add_argument("--format", action="append", dest="formats")
    for name, default in (
        ("reports", 8),
        ("heads", 16),
        ("sequences", 8),
        ("length", 128),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--power", action="store_true")
    options = parser.parse_args()
    if options.power:
        power(options.sequences, options.length)
        return
    counts = {n: getattr(options, n) for n in ("reports", "heads", "sequences", "length")}
    kernels = [*SOUND, *GUILTY, *JUDGED]
    print(f"{counts}, head_dim 64; torch {torch.__version__} on {options.device}")
    print("Heads accused of heads, and the median size of what was tested, in ulps.\n")
    start = time.perf_counter()
    for format_name in options.formats or ["bfloat16"]:
        print(
            f"| {format_named(format_name).name} |",
            " | ".join(k.name for k in kernels),
            "|",
        )
        print("|---|", "---|" * len(kernels), sep="")
        for causal in (False, True):
            for name, regime in REGIMES.items():
                rates = calibrate(
                    regime,
                    format_name,
                    kernels,
                    causal=causal,
                    device=options.device,
                    **counts,
                )
                cells = (_cell(rates[kernel.name]) for kernel in kernels)
                print(f"| {name}{', causal' if causal else ''} |", *cells, flush=True)
        print()
    print(f"{time.perf_counter() - start:.0f} s")


def _cell(tally: Tally) -> str:
    return f"{tally.accused}/{tally.heads} ({statistics.median(tally.sizes):.3f}) |"


if __name__ == "__main__":
    main()
