"""How often the 95 % intervals of sampled rows hold what all rows give.

A kernel is measured whole on one case; then many samples of its rows are drawn, and each metric's
interval is held against the whole's value, head by head. Printed: the share that holds it to 0.1 %,
and the median half width in per cent. Wanted is 90 to 99 %. (Where errors are nearly the predicted
ones bit for bit, or all rows alike, a ratio is known to 0.1 % and its interval is narrower still.
What is predicted here is the kernel in other tiles than its own, whose errors are other ones.)

    python benchmarks/sampling_coverage.py [--length 2048] [--samples 200]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.emulation.predict import emulation
from numdev.kernels.reference import attend
from numdev.metrics.deviation import Metrics, Yardstick, measure
from numdev.metrics.intervals import FORMULAS
from numdev.metrics.sampling import draw as draw_rows
from numdev.sources.synthetic import Shapes, draw

REGIMES: dict[str, dict[str, Any]] = {
    "normal": {},
    "sink": {},
    "outliers": {},
    "correlated": {},
}
COUNTS = (32, 64, 256)


def cases(length: int) -> Iterator[tuple[str, AttentionCase]]:
    """Even and uneven rows: all keys, and a causal mask."""
    shapes = Shapes(
        batch=1, heads=4, kv_heads=2, q_len=length, kv_len=length, head_dim=64, v_dim=64
    )
    for regime, options in REGIMES.items():
        drawn = draw(regime, shapes, seed=0, options=options)
        case = AttentionCase(ref=CaseRef(case=regime), q=drawn.q, k=drawn.k, v=drawn.v, scale=1 / 8)
        yield regime, case
        yield f"{regime}, causal", dataclasses.replace(case, is_causal=True)


def part(y: Yardstick, rows: torch.Tensor) -> Yardstick:
    """A yardstick's rows."""
    changes = {
        f.name: x[:, :, rows]
        for f in dataclasses.fields(y)
        if isinstance(x := getattr(y, f.name), torch.Tensor)
    }
    return dataclasses.replace(y, **changes)


def measured(case: AttentionCase) -> tuple[torch.Tensor, Yardstick, torch.Tensor]:
    """What PyTorch's flash returns in bf16, and what it is measured against."""
    fmt = FORMATS["bfloat16"]
    here, kernel = case.rounded_to(fmt), find("sdpa-flash")
    output = kernel.attend(here)
    exact, claim = attend(here), {"preset": "fa2", "block_kv": 96, "kv_order": "descending"}
    y = Yardstick(
        reference=exact.out,
        term_scale=exact.term_scale,
        empty=exact.empty,
        format=fmt,
        lse=exact.lse,
        baseline=find("baseline").attend(here).out,
        unrounded=attend(case).out,
    )
    return output.out, y, emulation(here, claim)


def coverage(case: AttentionCase, count: int, samples: int) -> dict[str, tuple[float, float]]:
    """Metric to how often its interval holds the whole's value, and its median half width."""
    out, y, expected = measured(case)
    whole: list[Metrics] = measure(out, y, expected)
    inside: dict[str, list[bool]] = defaultdict(list)
    width: dict[str, list[float]] = defaultdict(list)
    for seed in range(samples):
        rows = draw_rows(case.q_len, count, seed, "queries")
        assert rows is not None
        found = measure(out[:, :, rows], part(y, rows), expected[:, :, rows], of=case.q_len)
        for head, truth in zip(found, whole, strict=True):
            for metric in FORMULAS:
                low, high = head["interval"].get(metric, (math.nan, math.nan))
                inside[metric].append(low * 0.999 <= truth[metric] <= high * 1.001)
                width[metric].append(50 * (high - low) / truth[metric])
    return {m: (sum(inside[m]) / len(inside[m]), median(width[m])) for m in FORMULAS}


def main() -> None:
    """Print a table for each sample size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=200)
    given = parser.parse_args()
    print(f"{'':22}" + "".join(f"{m[:15]:>16}" for m in FORMULAS))
    for name, case in cases(given.length):
        for count in COUNTS:
            found = coverage(case, count, given.samples)
            cells = "".join(f"{f'{100 * c:.1f} ({w:.1f})':>16}" for c, w in found.values())
            print(f"{f'{name} {count}':22}{cells}")


if __name__ == "__main__":
    main()
