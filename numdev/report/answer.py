"""The first sentences of a report: its numbers in words, one paragraph for each format.

That nothing was measured comes first, or what cannot be counted; then how far from fp64 the kernel
is beside the plain baseline, then flash deviation beside the deviation of low precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.metrics.statistics import BIAS_FORMATS
from numdev.report import KernelSummary

# A kernel that is none of these was asked for by name, and is spoken of before the first of them.
HEADLINE = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-default", "sdpa-math")


def answer(ranked: Sequence[KernelSummary]) -> tuple[str, ...]:
    """`FORMAT: sentences`, for each format in the order given."""
    formats = dict.fromkeys(k.format for k in ranked)
    return tuple(f"{f}: {' '.join(_of([k for k in ranked if k.format == f]))}" for f in formats)


def _of(here: Sequence[KernelSummary]) -> Iterator[str]:
    measured = [k for k in here if k.role == "kernel" and k.max_abs is not None]
    usual = {name: place for place, name in enumerate(HEADLINE)}
    kernel = min(measured, key=lambda k: usual.get(k.kernel, -1), default=None)
    precision = next((k for k in here if k.role == "precision"), None)
    baseline = next((k for k in here if k.role == "baseline" and k.max_abs is not None), None)
    if precision is not None and precision.nonfinite:
        yield (
            f"Rounding q, k, v to {precision.format} overflows: {precision.nonfinite} elements of "
            "the exact result are no longer finite."
        )
    for k in here:  # a kernel's are a finding
        if k.role == "baseline" and k.nonfinite:
            yield f"{k.kernel} has {k.nonfinite} elements that are not finite and should be."
    if kernel is None:
        yield "No kernel under audit could be measured."
        return
    if kernel.floor_ratio is None:
        yield f"The exact result is 0 everywhere; {kernel.kernel} is off by {kernel.max_abs:.1e}."
    elif kernel.format == "float64":
        yield "In float64 the reference is no more exact than a kernel; read absolute errors."
    else:
        yield _distance(kernel, baseline)
    if kernel.flash_vs_precision is not None:
        share = kernel.baseline_ratio if baseline is not None else None
        whose = ", mostly the baseline's own error" if share is not None and share < 0.5 else ""
        yield (
            f"It differs from the baseline by {kernel.flash_vs_precision:.2f} x what rounding q, "
            f"k, v to {kernel.format} costs{whose}."
        )
    elif precision is not None and precision.rms == 0:
        yield f"The inputs are {kernel.format} already, so the format itself costs nothing."
    else:
        yield f"The baseline did not run, so {kernel.kernel} stands beside no cost of the format."


def _distance(kernel: KernelSummary, baseline: KernelSummary | None) -> str:
    """How far from fp64, in units of the least error possible and of what roundings predict."""
    text = (
        f"{kernel.kernel} errs {kernel.floor_ratio:.2f} x the floor, the least error possible "
        f"(worst {kernel.floor_ratio_worst:.2f}, {kernel.floor_ratio_where})"
    )
    if baseline is not None and baseline.floor_ratio is not None:
        text += f", the plain baseline {baseline.floor_ratio:.2f} x"
    # In other formats what a kernel's arithmetic may err is a bound, no prediction.
    if kernel.expected_ratio is None or kernel.format not in BIAS_FORMATS:
        return f"{text}."
    ends = kernel.expected_ratio_interval
    interval = f" [{ends[0]:.2f} to {ends[1]:.2f}]" if ends else ""
    return (
        f"{text}. That is {kernel.expected_ratio:.2f} x what its roundings predict "
        f"(worst {kernel.expected_ratio_worst:.2f}{interval}, {kernel.expected_ratio_where})."
    )
