"""Which honest way of rounding explains a kernel that declares none.

Without a word a kernel is held against `fa2`. Sound functions that round elsewhere err beyond that:
plain code by autograd's casts, a wrapper by those of the operator it calls. So where a kernel
declared nothing and a tensor of a call is beyond its limit under `fa2`, and only there, other ways
that sound kernels are known to round are tried on the same inputs:

- the claims of PyTorch's fused operators on this device (`numdev.kernels.sdpa_claims`),
- the presets that stand for real code: `eager`, `fa2-consistent`. Not `golden2024` and `qiu2025`,
  which keep running sums in the working format: that is a fault here,
- code in PyTorch and autograd's gradients of it (`numdev.kernels.written`).

A way explains a kernel where what it errs is what the kernel errs, element by element: the residual
|x - way| / |x - r| is at most one half in every tensor of the call (`numdev.attribution`, which also
says why rows count alike), and smaller than that of `fa2`. Errors of the same size, or a prediction
that is merely larger, leave 1 and more. The kernel is then held to the same limits beside that way's
errors; where none explains it, beside those of `fa2`, as before.

Nothing is tried where an element cannot be predicted (in float32), or where something is not finite
or another function is suspected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from numdev.attempt import Failure, attempt
from numdev.attribution import ENOUGH, EXPLAINS, row_weights, weighed
from numdev.bench import Bench, Prepared
from numdev.deviation import Metrics, Yardstick, measure
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.expectation import CASTS, returning, unpredictable
from numdev.formats import Format, round_to
from numdev.kernels import Kernel, Output, sdpa_claims
from numdev.kernels.output import GRADIENTS
from numdev.kernels.written import WAYS, Way
from numdev.report import DeviationRow
from numdev.system import System

Claim = Mapping[str, Any]
Step = Mapping[str, Tensor]
"""By tensor, what a way returns for the measured heads and rows."""
TYPICAL = 1.05
"""The limits of configs/gate/default.yaml on `expected_ratio` of the median head; of a single one,
and on `worst_row`, by tensor."""
LARGEST: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("out", "dv"), (1.1, 5.0)),
    **dict.fromkeys(("dq", "dk"), (3.0, 20.0)),
}
BIAS = 0.05
"""The limit on `bias_size`, in ulps: two that are nearer each other than this are one."""
MOST_SCORES = 1 << 25
"""Ways that are written out keep all scores of a call; larger calls are not tried by them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Likeness:
    """A way of rounding that explains a kernel."""

    words: str
    """`as sdpa-flash rounds on this CPU`: the row's claim."""
    expected: Step
    residual: float
    """The largest of all tensors'."""


def beyond(rows: Sequence[DeviationRow]) -> bool:
    """Whether a tensor of one call is beyond what the default rules allow it beside `fa2`, and by
    rounding: all is finite, and no other function is suspected."""
    if any(row.nonfinite or row.suspicion for row in rows):
        return False
    return any(_beyond(tensor, [r for r in rows if r.tensor == tensor]) for tensor in LARGEST)


def _beyond(tensor: str, rows: Sequence[DeviationRow]) -> bool:
    ratios = [r.expected_ratio for r in rows if r.expected_ratio is not None]
    worst = [r.worst_row for r in rows if r.worst_row is not None]
    most, most_in_a_row = LARGEST[tensor]
    return bool(ratios) and (
        max(ratios) > most or median(ratios) > TYPICAL or max(worst, default=0.0) > most_in_a_row
    )


def likeness(
    output: Output, formats: Mapping[str, Format], prepared: Prepared, bench: Bench, system: System
) -> Likeness | None:
    """The way that fits best, if it explains all tensors that came back; `formats` are theirs.

    A way that cannot take the call (a sink, too many scores) is not tried.
    """
    given = {n: bench.select(getattr(output, n), n) for n in formats if n in prepared.by_row}
    working = prepared.case.format
    if any(unpredictable({"preset": "fa2"}, working, formats[n]) for n in given):
        return None
    fa2 = prepared.predicted(returning({"preset": "fa2"}, prepared.case, formats))
    least = _residual(given, fa2, prepared)
    best: Likeness | None = None
    for words, made in _ways(formats, prepared, system):
        expected = _tried(made)
        if expected is None:
            continue
        left = _residual(given, expected, prepared)
        if left <= EXPLAINS and left < least:
            best, least = Likeness(words=words, expected=expected, residual=left), left
        if left <= ENOUGH:
            break
    return best


def with_bias_explained(
    metrics: Sequence[Metrics], like: Likeness, yardstick: Yardstick
) -> list[Metrics]:
    """The metrics of an output; where a large bias is that of the way which explains it, there is
    none that is the kernel's own, and `nulls` says whose it is."""
    if all(abs(head.get("bias_size") or 0.0) < BIAS for head in metrics):
        return list(metrics)
    way = round_to(like.expected["out"], yardstick.format)
    found = []
    for head, its in zip(metrics, measure(way, yardstick), strict=True):
        size, other = head.get("bias_size"), its.get("bias_size")
        if size and other and abs(size) >= BIAS and abs(size - other) < BIAS:
            why = f"{size:+.3f} ulp, {like.words}"
            head = {**head, "bias_size": None, "nulls": {**head["nulls"], "bias_size": why}}
        found.append(head)
    return found


def _tried(made: Callable[[], Step | None]) -> Step | None:
    try:
        return made()
    except (Refused, MeasurementError, UsageError):
        return None


def _residual(given: Step, expected: Step, prepared: Prepared) -> float:
    """The largest over tensors of |x - way| / |x - r|, rows counting alike; 0 where there is no
    error at all."""
    return max(_of_tensor(x, expected[n], prepared, n) for n, x in given.items())


def _of_tensor(x: Tensor, expected: Tensor, prepared: Prepared, tensor: str) -> float:
    y = prepared.yardsticks[tensor]
    weight = row_weights(x, y.reference, y.term_scale.norm(dim=-1), y.format)
    error = weighed(x.double() - y.reference, weight)
    size = float(error.norm())
    left = float(weighed(x.double() - expected.double(), weight).norm())
    return left / size if size else (math.inf if left else 0.0)


def _ways(
    formats: Mapping[str, Format], prepared: Prepared, system: System
) -> Iterator[tuple[str, Callable[[], Step | None]]]:
    """What is tried, in words, the likeliest first."""
    for words, claim in _claims(prepared, system):
        changed = returning(claim, prepared.case, formats)
        yield words, lambda changed=changed: prepared.predicted(changed)
    if prepared.case.working is None and set(formats.values()) == {prepared.case.format}:
        for words, way in WAYS.items():
            yield words, lambda way=way: _written(way, prepared)


def _claims(prepared: Prepared, system: System) -> Iterator[tuple[str, Claim]]:
    """The claims of operators on this device, and the presets that are real code."""
    for name, operator in OPERATORS[system.device].items():
        ran = Output(out=prepared.case.q, ran=operator)
        place = "GPU" if system.device == "cuda" else "CPU"
        yield f"as {name} rounds on this {place}", sdpa_claims.claims(prepared.case, ran, system)
    for preset in ("eager", "fa2-consistent"):
        yield f"as {preset} rounds", {"preset": preset}


OPERATORS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"sdpa-flash": "_scaled_dot_product_flash_attention_for_cpu", "sdpa-math": "math"},
    "cuda": {
        "sdpa-flash": "_scaled_dot_product_flash_attention",
        "sdpa-efficient": "_scaled_dot_product_efficient_attention",
        "sdpa-cudnn": "_scaled_dot_product_cudnn_attention",
        "sdpa-math": "math",
    },
}
"""By device, PyTorch's kernels and the operator that each is."""


def _written(way: Way, prepared: Prepared) -> Step | None:
    """What a way that is written out returns, and autograd's gradients of it."""
    case = prepared.measured
    if case.sinks is not None or case.q.shape[:3].numel() * case.kv_len > MOST_SCORES:
        return None
    key = f"written {way!r}"
    if key not in prepared.predictions:
        kernel = Kernel(name="written", function=way, any_rows=True)
        with prepared.watch("predictions"):
            found = attempt(kernel, case, {}, gradients="dq" in prepared.by_row)
        if isinstance(found, Failure):
            return None
        tensors = {n: getattr(found, n) for n in ("out", *GRADIENTS)}
        kept = {n: x.float() for n, x in tensors.items() if x is not None}
        prepared.predictions[key] = {n: x for n, x in kept.items() if n in prepared.by_row}
    return prepared.predictions[key]
