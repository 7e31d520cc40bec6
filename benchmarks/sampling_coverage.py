"""How often do the 95 % intervals of sampled rows hold what all rows give?

    OMP_NUM_THREADS=1 python benchmarks/sampling_coverage.py [--length 2048] [--samples 100]

A kernel is measured whole on one case; then many samples of its rows are drawn, and each
metric's interval is held against the whole's value, head by head. Printed: the share that
holds it to 0.1 %, and the median half width, both in per cent. What is predicted is the
kernel in other tiles than its own, whose errors are other ones. In `two bad rows` the
output of two rows is 3 % too large: what few rows make, a sample without them cannot
tell.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from statistics import median

import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.emulation.kernel import emulation
from numdev.kernels.reference import attend
from numdev.metrics.deviation import measure
from numdev.metrics.row_samples import Sample
from numdev.metrics.yardstick import Yardstick
from numdev.sources.input_regimes import Shapes, draw

REGIMES = ("normal", "sink", "outliers", "correlated")
COUNTS = (32, 64, 256)
BAD = "two bad rows"
METRICS = (
    "mean_abs",
    "rms",
    "row_rel",
    "floor_ratio",
    "baseline_ratio",
    "expected_ratio",
)


def cases(length: int) -> Iterator[tuple[str, AttentionCase]]:
    """Even and uneven rows: all keys, and a causal mask."""
    sizes = {"q_len": length, "kv_len": length, "head_dim": 64, "v_dim": 64}
    shapes = Shapes(batch=1, heads=4, kv_heads=2, **sizes)
    for regime in (*REGIMES, BAD):
        q, k, v = draw("normal" if regime == BAD else regime, shapes, seed=0, options={})
        case = AttentionCase(ref=CaseRef(case=regime), q=q, k=k, v=v, scale=1 / 8)
        yield regime, case
        yield f"{regime}, causal", dataclasses.replace(case, is_causal=True)


def part(y: Yardstick, rows: torch.Tensor) -> Yardstick:
    """A yardstick's rows."""
    fields = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
    chosen = {n: x[:, :, rows] for n, x in fields.items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(y, **chosen)


def coverage(case: AttentionCase, counts: tuple[int, ...], samples: int) -> Iterator[str]:
    """For each number of rows the cells of METRICS: how often, and how wide."""
    fmt = FORMATS["bfloat16"]
    rounded = case.rounded_to(fmt)
    out, exact = find("sdpa-flash").attend(rounded).out, attend(rounded)
    if case.ref.case == BAD:
        out[:, :, [case.q_len // 3, case.q_len // 2]] *= 1.03
    expected = emulation(
        rounded, {"preset": "fa2", "block_kv": 96, "kv_order": "descending"}
    )
    y = Yardstick(
        reference=exact.out,
        term_scale=exact.term_scale,
        empty=exact.empty,
        format=fmt,
        lse=exact.lse,
        baseline=find("baseline").attend(rounded).out,
    )
    whole = measure(out, y, expected).heads
    for count in counts:
        inside: dict[str, list[bool]] = defaultdict(list)
        width: dict[str, list[float]] = defaultdict(list)
        for seed in range(samples):
            rows = Sample(count=count, seed=seed).draw(case.q_len, "queries")
            assert rows is not None
            measured = measure(
                out[:, :, rows], part(y, rows), expected[:, :, rows], of=case.q_len
            )
            for head, truth in zip(measured.heads, whole, strict=True):
                for metric in METRICS:
                    low, high = head["interval"][metric]
                    inside[metric].append(low * 0.999 <= truth[metric] <= high * 1.001)
                    width[metric].append(50 * (high - low) / truth[metric])
        shares = {m: 100 * sum(inside[m]) / len(inside[m]) for m in METRICS}
        cells = (f"{shares[m]:.0f} (± {median(width[m]):.1f})" for m in METRICS)
        yield f"{count} | " + " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How often do intervals of sampled rows hold?"
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=100)
    options = parser.parse_args()
    print("| inputs | rows |", " | ".join(METRICS), "|")
    print("|---" * (2 + len(METRICS)), "|", sep="")
    for name, case in cases(options.length):
        for cells in coverage(case, COUNTS, options.samples):
            print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
