"""Which honest way of rounding explains a kernel that declares none.

Without a word a kernel is held against `fa2`. Sound functions that round elsewhere err beyond that:
plain code by autograd's casts, a wrapper by those of the operator it calls. So where a kernel
declared nothing and a tensor of a call is beyond its limit under `fa2`, other ways that sound
kernels are known to round are tried on the same inputs: the claims of PyTorch's fused operators,
the presets that stand for real code (not `golden2024` and `qiu2025`, which keep running sums in the
working format: that is a fault here), and code in PyTorch with autograd's gradients of it.

A way explains a kernel where what it errs is what the kernel errs, element by element: where the
residual |x - way| / |x - r| of a tensor (`numdev.explain.attribution` has it too, and says why rows
count alike) is at most a half over all tensors of the call, and sqrt(1/2) in one that is beyond its
limit. Errors of the same size, or a prediction that is merely larger, leave 1 and more. A fault
beside a way that is right shows as ever, for the kernel is then held to the same limits beside that
way's errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from numdev.audit.attempt import Failure, attempt
from numdev.audit.bench import Bench
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.explain.attribution import ENOUGH, EXPLAINS, row_weights, weighed
from numdev.formats import Format, round_to
from numdev.gate.rules import Threshold, default_rules
from numdev.kernels import Kernel, Output, sdpa
from numdev.kernels.autograd_styles import WAYS, Way
from numdev.kernels.emulation.predict import returning, unpredictable
from numdev.kernels.output import GRADIENTS
from numdev.metrics.deviation import Metrics, measure
from numdev.metrics.yardstick import Yardstick
from numdev.report import DeviationRow
from numdev.report.statistics import BIAS_ALPHA
from numdev.system import System

Step = Mapping[str, Tensor]  # by tensor, what a way returns for the measured heads and rows
IN_ONE = math.sqrt(0.5)  # the largest residual in a tensor that is beyond its limit
MOST_SCORES = 1 << 25  # ways that are written out keep all scores of a call; no larger one is tried


@dataclass(frozen=True, kw_only=True, eq=False)
class Likeness:
    """A way of rounding that explains a kernel."""

    words: str
    """`as sdpa-flash rounds on this CPU`: the row's claim."""
    expected: Step
    residual: float
    """The root mean square of all tensors'."""


def rule(name: str) -> Threshold:
    """A rule of configs/gate/default.yaml."""
    return next(t for t in default_rules().thresholds if t.name == name)


def beyond(rows: Sequence[DeviationRow]) -> tuple[str, ...]:
    """The tensors of one call that are beyond what the default rules allow them beside `fa2`; none
    where that is no matter of rounding: something is not finite, another function is suspected."""
    if any(row.nonfinite or row.suspicion for row in rows):
        return ()
    tensors = ("out", "dv", "dq", "dk")
    return tuple(t for t in tensors if _beyond([r for r in rows if r.tensor == t]))


def _beyond(rows: Sequence[DeviationRow]) -> bool:
    ratios = [r.expected_ratio for r in rows if r.expected_ratio is not None]
    if not ratios:
        return False
    values = {
        "error": max(ratios),
        "typical head": median(ratios),
        "worst row": max((r.worst_row for r in rows if r.worst_row is not None), default=0.0),
    }
    if any(rule(name).at(rows[0]).excess(value) > 1 for name, value in values.items()):
        return True
    biased = (r for r in rows if r.tensor == "out" and _is_biased(r.bias_size))
    return any(r.bias_p is not None and r.bias_p <= BIAS_ALPHA for r in biased)


def _is_biased(size: float | None) -> bool:
    return rule("bias").excess(size) > 1


def likeness(
    output: Output,
    tensors: Collection[str],
    formats: Mapping[str, Format],
    bench: Bench,
    system: System,
) -> Likeness | None:
    """The way that fits best of those that explain the output, of which `tensors` are beyond their
    limits under `fa2`; `formats` are those of all that came back. None too where an element cannot
    be predicted (in float32). A way that cannot take the call is not tried."""
    names = [n for n in formats if n in bench.by_row]
    if any(unpredictable({"preset": "fa2"}, bench.case.format, formats[n]) for n in names):
        return None
    select = bench.selection.select
    residuals = {n: _residual(select(getattr(output, n), n), bench.yardsticks[n]) for n in names}
    best: Likeness | None = None
    for words, way in _ways(formats, bench, system):
        try:
            expected = way()
        except (Refused, MeasurementError, UsageError):
            continue
        if expected is None:
            continue
        left = {n: residual(expected[n]) for n, residual in residuals.items()}
        together = math.sqrt(sum(x * x for x in left.values()) / len(left))
        explains = together <= EXPLAINS and all(left[n] <= IN_ONE for n in tensors)
        if explains and (best is None or together < best.residual):
            best = Likeness(words=words, expected=expected, residual=together)
        if together <= ENOUGH:
            break
    return best


def with_bias_explained(
    metrics: Sequence[Metrics], like: Likeness, yardstick: Yardstick
) -> list[Metrics]:
    """The metrics of an output; where a large bias is that of the way which explains it (two nearer
    each other than the limit are one), there is none that is the kernel's own, and `nulls` says
    whose it is."""
    if not any(_is_biased(head.get("bias_size")) for head in metrics):
        return list(metrics)
    way = round_to(like.expected["out"], yardstick.format)
    explained = []
    for head, its in zip(metrics, measure(way, yardstick).heads, strict=True):
        size, other = head.get("bias_size"), its.get("bias_size")
        if size and other and _is_biased(size) and not _is_biased(size - other):
            why = f"{size:+.3f} ulp, {like.words}"
            head = {**head, "bias_size": None, "nulls": {**head["nulls"], "bias_size": why}}
        explained.append(head)
    return explained


def _residual(x: Tensor, y: Yardstick) -> Callable[[Tensor], float]:
    """Of what is expected: |x - way| / |x - r|, rows counting alike; where x has no error 0, or
    infinity if the way errs."""
    wide = x.double()
    weight = row_weights(x, y.reference, y.term_scale.norm(dim=-1), y.format)
    size = float(weighed(wide - y.reference, weight).norm())

    def residual(expected: Tensor) -> float:
        left = float(weighed(wide - expected.double(), weight).norm())
        return left / size if size else (math.inf if left else 0.0)

    return residual


def _ways(
    formats: Mapping[str, Format], bench: Bench, system: System
) -> Iterator[tuple[str, Callable[[], Step | None]]]:
    """What is tried, in words, the likeliest first."""
    claims: dict[str, Mapping[str, Any]] = {}
    place = "GPU" if system.device == "cuda" else "CPU"
    for name, operator in sdpa.OPERATORS[system.device].items():
        claims[f"as {name} rounds on this {place}"] = sdpa.claim_of(operator, bench.case, system)
    claims |= {f"as {preset} rounds": {"preset": preset} for preset in ("eager", "fa2-consistent")}
    for words, claim in claims.items():
        yield words, functools.partial(bench.predicted, returning(claim, bench.case, formats))
    if bench.case.working is None and set(formats.values()) == {bench.case.format}:
        for words, way in WAYS.items():
            yield words, functools.partial(_written, way, bench)


def _written(way: Way, bench: Bench) -> Step | None:
    """What a way that is written out returns, and autograd's gradients of it."""
    case = bench.measured
    if case.sinks is not None or case.q.shape[:3].numel() * case.kv_len > MOST_SCORES:
        return None
    key = f"written {way!r}"
    if key not in bench.predictions:
        kernel = Kernel(name="written", function=way, any_rows=True)
        with bench.watch("predictions"):
            output = attempt(kernel, case, {}, gradients="dq" in bench.by_row)
        if isinstance(output, Failure):
            return None
        tensors = {n: getattr(output, n) for n in ("out", *GRADIENTS) if n in bench.by_row}
        bench.predictions[key] = {n: x.float() for n, x in tensors.items() if x is not None}
    return bench.predictions[key]
