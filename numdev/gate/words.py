"""Verdicts in words: a template for each metric, filled with a subject, a number, its limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from numdev.gate.verdict import Verdict
from numdev.report import DeviationRow

# How a row's claim begins where the kernel declared none and was found to round so.
FOUND = "as "
# Formats in which an exact result may rightly be infinite once it is rounded.
OVERFLOWS = ("float16", "float8_e4m3fn", "float8_e5m2")
BEYOND = "errs beyond what {format} explains"
# What is wrong, by metric, as the rest of a sentence that begins with the kernel.
WRONG = {
    "nonfinite": "has {nonfinite} elements of {tensor} that are not finite where the exact result, "
    "rounded once, is{reverse}",
    "empty_nonfinite": "returns NaN or infinity in rows that see no key: {empty_nonfinite} "
    "elements in {empty_rows} such rows of {tensor}, where 0 is expected; 0 times that is NaN, "
    "which spreads to dk and dv",
    "suspicion": "computes a different function: {suspicion} (residual {cut} x smaller against "
    "that)",
    "expected_ratio": BEYOND + ": {tensor}{median} is off by {number} x what {claim} roundings "
    "predict, and {bound} x is the limit",
    "baseline_ratio": BEYOND + ": {tensor} is off by {number} x as much as plain attention, and "
    "{bound} x is the limit",
    "worst_row": BEYOND + " in single{sampled} rows: one of {tensor} is off by {number} x what is "
    "predicted for it, and {bound} x is the limit",
    "bias_size": "is biased: {tensor} lies to one side of the exact result, rounded once, by up "
    "to {bias:+.3f} ulp ({bias_of}) over {sequences} sequences; such an error does not average out",
    "noise_ratio": "is not reproducible: {tensor} changes between runs on the same inputs by "
    "{number} x what rounding it once changes, and {allowed}",
    "lse_error": "returns a log-sum-exp that is off by {number} (over 1 + its size), and {bound} "
    "is the limit; what is built on it, the backward pass too, inherits that",
    "": "breaks the rule {rule} in {tensor}: {number}, {limit}",
}


def wrong(verdict: Verdict, rows: Sequence[DeviationRow], where: str) -> str:
    """What is wrong in `rows`, the worst first, and `where`: the rest of a sentence that begins
    with the kernel."""
    worst, metric = rows[0], verdict.metric or ""
    bound = "" if verdict.bound is None else f"{verdict.bound:g}"
    observed = verdict.observed
    sums = {
        name: sum(getattr(row, name) or 0 for row in rows)
        for name in ("nonfinite", "empty_nonfinite", "empty_rows")
    }
    sentence = WRONG[metric if metric in WRONG else ""].format(
        **sums,
        rule=verdict.rule,
        format=verdict.format,
        limit=verdict.limit,
        bound=bound,
        number=short(observed) if isinstance(observed, float) else f"{observed}",
        tensor={"out": "the output", "lse": "the log-sum-exp"}.get(
            verdict.tensor or "", verdict.tensor or ""
        ),
        reverse=", or the reverse" if verdict.format in OVERFLOWS else "",
        median=" of the median head" if verdict.median else "",
        sampled=" sampled" if worst.sampled else "",
        claim=_whose(rows),
        suspicion=worst.suspicion,
        cut=short(statistics.median(row.suspicion_cut or 0.0 for row in rows)),
        bias=worst.bias_size or 0.0,
        bias_of=worst.bias_of,
        sequences=worst.sequences,
        allowed=f"{bound} x is the limit" if verdict.bound else "it should be the same bits",
    )
    return f"{sentence[:-1]}; {where})" if sentence.endswith(")") else f"{sentence} ({where})"


def _whose(rows: Sequence[DeviationRow]) -> str:
    """Whose roundings were expected: the emulation the kernel claims, or is taken, to be; or, as a
    clause, the way in which one that claims nothing was found to round."""
    claim = next((row.claim for row in rows if row.claim), None)
    if claim and claim.startswith(FOUND):
        return f"its own ({claim})"
    return f"the `{claim}`" if claim else "the kernel's own"


def found_to_round(rows: Iterable[DeviationRow]) -> Iterator[str]:
    """Of every kernel that declared no claim and was found to round in another way than `fa2`: in
    which, and in how many calls."""
    calls: dict[str, dict[str, set[tuple[object, ...]]]] = {}
    for row in rows:
        if row.role == "kernel" and row.claim:
            call = (row.case, row.module, row.call, row.seed, row.step, row.format)
            calls.setdefault(row.kernel, {}).setdefault(row.claim, set()).add(call)
    for kernel, by_claim in calls.items():
        every = len(set().union(*by_claim.values()))
        ways = [
            f"{claim} ({len(these)} of {every} calls)"
            for claim, these in by_claim.items()
            if claim.startswith(FOUND)
        ]
        if ways:
            yield (
                f"{kernel} declares no claim and errs beyond `fa2`; its errors are explained, "
                f"element by element, and judged {listed(ways)}."
            )


class Optioned(Protocol):
    """A verdict, calls, a group of a comparison: whatever is about a kernel with its options."""

    @property
    def kernel(self) -> str | None: ...

    @property
    def options(self) -> dict[str, Any]: ...


def label(of: Optioned) -> str:
    """`mine[block=64]`."""
    shown = ",".join(f"{k}={v}" for k, v in of.options.items() if v is not None)
    return f"{of.kernel}[{shown}]" if shown else str(of.kernel)


def listed(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def short(value: float) -> str:
    """Three digits; 9570 and not 9.57e+03."""
    text = f"{value:.3g}"
    return f"{float(text):.0f}" if 1e3 <= abs(value) < 1e6 else text
