"""The first sentences of a report: its numbers in words, one paragraph for each format.

That nothing was measured comes first, or what cannot be counted; then how far from fp64 the kernel
is beside the plain baseline, then flash deviation beside the deviation of low precision. Every
number is one of the summary's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.report import KernelSummary
from numdev.report.statistics import BIAS_FORMATS

HEADLINE = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-default", "sdpa-math")
"""Whom the paragraph speaks of: a kernel that is none of these, since it was asked for by name;
else the first of these that ran."""


def answer(ranked: Sequence[KernelSummary]) -> tuple[str, ...]:
    """`FORMAT: sentences`, for each format in the order given."""
    formats = dict.fromkeys(k.format for k in ranked)
    return tuple(f"{f}: {_paragraph([k for k in ranked if k.format == f])}" for f in formats)


def headline_kernel(kernels: Sequence[KernelSummary]) -> KernelSummary | None:
    """The kernel the paragraph speaks of; None when none could be measured."""
    measured = [k for k in kernels if k.role == "kernel" and k.max_abs is not None]
    named = [k for k in measured if k.kernel not in HEADLINE]
    usual = sorted(
        (k for k in measured if k.kernel in HEADLINE), key=lambda k: HEADLINE.index(k.kernel)
    )
    return next(iter(named or usual), None)


def _paragraph(here: Sequence[KernelSummary]) -> str:
    kernel = headline_kernel(here)
    precision = next((k for k in here if k.role == "precision"), None)
    baseline = next((k for k in here if k.role == "baseline" and k.max_abs is not None), None)
    sentences = [*_not_finite(here, precision)]
    if kernel is None:
        sentences.insert(0, "No kernel under audit could be measured.")
    else:
        sentences += [_distance(kernel, baseline), _beside_precision(kernel, baseline, precision)]
    return " ".join(sentences)


def _not_finite(here: Sequence[KernelSummary], precision: KernelSummary | None) -> Iterator[str]:
    if precision is not None and precision.nonfinite:
        yield (
            f"Rounding q, k, v to {precision.format} overflows: {precision.nonfinite} elements of "
            "the exact result are no longer finite."
        )
    for k in here:  # a kernel's are a finding
        if k.role == "baseline" and k.nonfinite:
            yield f"{k.kernel} has {k.nonfinite} elements that are not finite and should be."


def _distance(kernel: KernelSummary, baseline: KernelSummary | None) -> str:
    """How far from fp64, in units of the least error possible."""
    if kernel.floor_ratio is None:
        return f"The exact result is 0 everywhere; {kernel.kernel} is off by {kernel.max_abs:.1e}."
    if kernel.format == "float64":
        return "In float64 the reference is no more exact than a kernel; read absolute errors."
    beside = ""
    if baseline is not None and baseline.floor_ratio is not None:
        beside = f", the plain baseline {baseline.floor_ratio:.2f} x"
    return (
        f"{kernel.kernel} errs {kernel.floor_ratio:.2f} x the floor, the least error possible "
        f"(worst {kernel.floor_ratio_worst:.2f}, {kernel.floor_ratio_where}){beside}."
        f"{_expected(kernel)}"
    )


def _expected(kernel: KernelSummary) -> str:
    """Its error beside what the roundings it claims to make predict."""
    if kernel.expected_ratio is None or kernel.expected_ratio_worst is None:
        return ""
    if kernel.format not in BIAS_FORMATS:  # what its arithmetic may err is a bound, no prediction
        return ""
    ends = kernel.expected_ratio_interval
    known = f" [{ends[0]:.2f} to {ends[1]:.2f}]" if ends else ""
    return (
        f" That is {kernel.expected_ratio:.2f} x what its roundings predict "
        f"(worst {kernel.expected_ratio_worst:.2f}{known}, {kernel.expected_ratio_where})."
    )


def _beside_precision(
    kernel: KernelSummary, baseline: KernelSummary | None, precision: KernelSummary | None
) -> str:
    """Flash deviation beside the deviation of low precision."""
    if kernel.flash_vs_precision is None:
        if precision is not None and precision.rms == 0:
            return f"The inputs are {kernel.format} already, so the format itself costs nothing."
        return (
            f"The baseline did not run, so {kernel.kernel} cannot be set beside the format's cost."
        )
    ratio = kernel.baseline_ratio if baseline is not None else None
    whose = ", mostly the baseline's own error" if ratio is not None and ratio < 0.5 else ""
    return (
        f"It differs from the baseline by {kernel.flash_vs_precision:.2f} x what rounding q, k, v "
        f"to {kernel.format} costs{whose}."
    )
