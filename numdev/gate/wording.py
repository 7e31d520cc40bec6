"""What each metric means when it is beyond its limit, in words."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

from numdev.gate.verdict import Calls, Verdict
from numdev.report import DeviationRow

TENSORS = {"out": "the output", "lse": "the log-sum-exp"}
FOUND = "as "
"""How a row's claim begins where the kernel declared none and was found to round so."""
OVERFLOWS = ("float16", "float8_e4m3fn", "float8_e5m2")
"""Formats in which an exact result may rightly be infinite once it is rounded."""


def wrong(verdict: Verdict, rows: Sequence[DeviationRow], where: str) -> str:
    """What is wrong in `rows`, the worst first, and `where`: the rest of a sentence that begins
    with the kernel."""
    words = WORDS.get(verdict.metric or "", _generic)(verdict, rows)
    return f"{words[:-1]}; {where})" if words.endswith(")") else f"{words} ({where})"


def label(of: Verdict | Calls) -> str:
    shown = ",".join(f"{k}={v}" for k, v in of.options.items() if v is not None)
    return f"{of.kernel}[{shown}]" if shown else str(of.kernel)


def _tensor(verdict: Verdict) -> str:
    return TENSORS.get(verdict.tensor or "", verdict.tensor or "")


def _number(verdict: Verdict) -> str:
    return (
        _short(verdict.observed) if isinstance(verdict.observed, float) else f"{verdict.observed}"
    )


def _short(value: float) -> str:
    """Three digits; 9570 and not 9.57e+03."""
    text = f"{value:.3g}"
    return f"{float(text):.0f}" if 1e3 <= abs(value) < 1e6 else text


def found_to_round(rows: Iterable[DeviationRow]) -> Iterator[str]:
    """Of every kernel that declared no claim and was found to round in another way than `fa2`: in
    which, and in how many calls."""
    calls: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        if row.role == "kernel" and row.claim:
            call = f"{row.case} {row.module} {row.call} {row.seed} {row.step} {row.format}"
            calls.setdefault(row.kernel, {}).setdefault(row.claim, set()).add(call)
    for kernel, by_claim in calls.items():
        every = len(set().union(*by_claim.values()))
        found = {c: len(these) for c, these in by_claim.items() if c.startswith(FOUND)}
        if found:
            ways = listed(f"{claim} ({n} of {every} calls)" for claim, n in found.items())
            yield (
                f"{kernel} declares no claim and errs beyond `fa2`; its errors are explained, "
                f"element by element, and judged {ways}."
            )


def listed(words: Iterable[str]) -> str:
    *most, last = list(words) or [""]
    return f"{', '.join(most)} and {last}" if most else last


Words = Callable[[Verdict, Sequence[DeviationRow]], str]


def _nonfinite(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    count = sum(r.nonfinite or 0 for r in rows)
    reverse = ", or the reverse" if verdict.format in OVERFLOWS else ""
    return (
        f"has {count} elements of {_tensor(verdict)} that are not finite where the exact result, "
        f"rounded once, is{reverse}"
    )


def _without_keys(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    count, of = sum(r.empty_nonfinite or 0 for r in rows), sum(r.empty_rows or 0 for r in rows)
    return (
        f"returns NaN or infinity in rows that see no key: {count} elements in {of} such rows of "
        f"{_tensor(verdict)}, where 0 is expected; 0 times that is NaN, which spreads to dk and dv"
    )


def _expected(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    return (
        f"errs beyond what {verdict.format} explains: {_tensor(verdict)}"
        f"{' of the median head' if verdict.median else ''} is off by {_number(verdict)} x what "
        f"{_whose(rows)} roundings predict, and {verdict.bound:g} x is the limit"
    )


def _whose(rows: Sequence[DeviationRow]) -> str:
    """Whose roundings were expected: the emulation the kernel claims, or is taken, to be; or, as a
    clause, the way in which one that claims nothing was found to round."""
    claim = next((row.claim for row in rows if row.claim), None)
    if claim and claim.startswith(FOUND):
        return f"its own ({claim})"
    return f"the `{claim}`" if claim else "the kernel's own"


def _baseline(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    return (
        f"errs beyond what {verdict.format} explains: {_tensor(verdict)} is off by "
        f"{_number(verdict)} x as much as plain attention, and {verdict.bound:g} x is the limit"
    )


def _worst_row(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    of = " sampled" if rows and rows[0].sampled else ""
    return (
        f"errs beyond what {verdict.format} explains in single{of} rows: one of "
        f"{_tensor(verdict)} is off by {_number(verdict)} x what is predicted for it, and "
        f"{verdict.bound:g} x is the limit"
    )


def _bias(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    worst = rows[0]
    return (
        f"is biased: {_tensor(verdict)} lies to one side of the exact result, rounded once, by up "
        f"to {worst.bias_size or 0.0:+.3f} ulp ({worst.bias_of}) over {worst.sequences} "
        "sequences; such an error does not average out"
    )


def _noise(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    limit = f"{verdict.bound:g} x is the limit" if verdict.bound else "it should be the same bits"
    return (
        f"is not reproducible: {_tensor(verdict)} changes between runs on the same inputs by "
        f"{_number(verdict)} x what rounding it once changes, and {limit}"
    )


def _lse(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    return (
        f"returns a log-sum-exp that is off by {_number(verdict)} (over 1 + its size), and "
        f"{verdict.bound:g} is the limit; what is built on it, the backward pass too, inherits that"
    )


def _function(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    cut = _short(statistics.median(r.suspicion_cut or 0.0 for r in rows))
    return (
        f"computes a different function: {rows[0].suspicion} (residual {cut} x smaller against "
        "that)"
    )


def _generic(verdict: Verdict, rows: Sequence[DeviationRow]) -> str:
    return (
        f"breaks the rule {verdict.rule} in {_tensor(verdict)}: {_number(verdict)}, {verdict.limit}"
    )


WORDS: dict[str, Words] = {
    "nonfinite": _nonfinite,
    "empty_nonfinite": _without_keys,
    "suspicion": _function,
    "expected_ratio": _expected,
    "baseline_ratio": _baseline,
    "worst_row": _worst_row,
    "bias_size": _bias,
    "noise_ratio": _noise,
    "lse_error": _lse,
}
"""Metric to what is wrong, as the rest of a sentence that begins with the kernel."""
