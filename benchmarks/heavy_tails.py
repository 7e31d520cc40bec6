"""How often do 95 % intervals of sampled rows hold the value of all rows, where few rows
rule it?

    python benchmarks/heavy_tails.py [--length 2048 --samples 1000]

Errors of rows are drawn, of tails from light to heavy, and measured as an audit does: a
sample alone, and beside it the rows that look most suspicious (`numdev.studies.audit.row_screening`).
Suspicion is the error times a log-normal factor, since the second output that tells of it
errs too: of 1 % (float32) or of 50 % (another kernel in the same format). Printed are how
often the interval of the rms holds, how often the value lies above it, and the interval's
median ratio of upper to lower end."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from numdev.metrics.deviation import measure_plain
from numdev.metrics.row_samples import Sample, Strata
from numdev.studies.audit.row_screening import SUSPECTS

Draw = Callable[[Tensor], Tensor]


def few(count: int) -> Draw:
    """Errors of size 1, but for a few rows of 1000."""

    def errors(u: Tensor) -> Tensor:
        bad = torch.zeros_like(u).scatter(0, u.argsort()[:count], 1000.0)
        return 0.5 + u + bad

    return errors


TAILS: dict[str, Draw] = {
    "uniform": lambda u: 0.5 + u,
    "log-normal 1": lambda u: torch.erfinv(2 * u - 1).mul(2**0.5).exp(),
    "Pareto 3": lambda u: u ** (-1 / 3),
    "Pareto 1.5": lambda u: u ** (-1 / 1.5),
    "2 bad rows": few(2),
    "every 512th": lambda u: torch.where(
        torch.arange(len(u)) % 512 == 3, 1000.0, 0.5 + u
    ),
    "every 32nd": lambda u: torch.where(torch.arange(len(u)) % 32 == 3, 1000.0, 0.5 + u),
}


def measured(errors: Tensor, rows: Tensor, of: int | Strata) -> tuple[float, float]:
    """The interval of the rms of these rows; nothing is NaN."""
    x = errors[rows][None, None, :, None].double()
    empty = torch.zeros(x.shape[:3], dtype=torch.bool)
    (head,) = measure_plain(x, torch.zeros_like(x), empty, of=of).heads
    low, high = head["interval"].get("rms", (float("nan"), float("nan")))
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    length, samples = options.length, options.samples
    print(
        f"{'errors':14}{'rows':>5}  {'suspicion':12}{'holds':>7}{'above':>7}{'ends':>7}"
    )
    for name, tail in TAILS.items():
        for count in (n for n in (64, 256) if n < length):
            for off in (None, 0.01, 0.5):
                results = []
                for seed in range(samples):
                    generator = torch.Generator().manual_seed(seed)
                    errors = tail(
                        torch.rand(length, generator=generator, dtype=torch.float64)
                    )
                    sample = Sample(count=count, seed=seed)
                    rows, of = sample.draw(length, "queries"), length
                    if rows is not None and off is not None:
                        factor = torch.randn(length, generator=generator).mul(off).exp()
                        suspects = (errors * factor).topk(SUSPECTS).indices
                        rows, of = Strata.joined(rows, suspects, length)
                    rms = float(errors.square().mean().sqrt())
                    low, high = measured(errors, rows, of)
                    results.append(
                        (low * 0.999 <= rms <= high * 1.001, rms > high, high / low)
                    )
                holds, above, ends = torch.tensor(results, dtype=torch.float64).unbind(
                    dim=1
                )
                words = "none" if off is None else f"off by {off:.0%}"
                shares = f"{float(holds.mean()):7.3f}{float(above.mean()):7.3f}"
                print(
                    f"{name:14}{count:5}  {words:12}{shares}{float(ends.nanmedian()):7.2f}"
                )


if __name__ == "__main__":
    main()
