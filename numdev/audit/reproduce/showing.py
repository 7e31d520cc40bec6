"""Whether a finding shows in a call: the question that a reduction asks again and again.

A kernel's tensor is held against the exact one by `numdev.metrics.deviation.measure`, with the
figure the finding is about. What runs and what is exact come as functions, so that outputs,
log-sum-exps and gradients are asked in the same way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.audit.attempt import copied
from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.formats import format_of
from numdev.kernels import Kernel
from numdev.kernels.reference import attend
from numdev.metrics.deviation import measure
from numdev.metrics.yardstick import Yardstick
from numdev.report.statistics import BIAS_ALPHA, BIAS_SEQUENCES

ENOUGH = 0.5
"""A smaller call shows a finding if its figure is at least this part of the one reported."""
BIASES = ("bias", "bias_sign", "bias_feature")
FIGURES = (
    *("nonfinite", "max_abs", "mean_abs", "rms", "rel", "row_rel", "max_ulp", "floor_ratio"),
    *BIASES,
)
"""Metrics that stand on a kernel's tensor and the exact one alone."""
_STANDS_FOR: Mapping[str, str] = {
    "expected_ratio": "row_rel",
    "worst_row": "row_rel",
    "baseline_ratio": "rms",
    "fa_rule": "max_abs",
    "w1": "mean_abs",
    "suspicion": "rel",
}
_BIAS_OF = {"mean": "bias", "sign": "bias_sign"}
_ABOUT_BIAS = ("bias_size", "bias_p", "bias_t")


@dataclass(frozen=True, kw_only=True, eq=False)
class Exact:
    """The exact tensor, fp64 [batch, heads, rows, features]."""

    value: Tensor
    terms: Tensor | None = None
    """The size of what is added up, same shape; None: the size of the value itself."""
    empty: Tensor | None = None
    """bool [batch, heads, rows]: rows whose value is a convention, left out."""
    lse: Tensor | None = None


Run = Callable[[AttentionCase], tuple[Tensor, str | None]]
"""A kernel's tensor for a case, and what ran."""
Seen = tuple[Tensor, Yardstick, str | None]
Evaluate = Callable[[AttentionCase], Seen]
"""A kernel's tensor, what to measure it against, and what ran."""


def figure_for(metric: str, bias_of: str | None = None) -> str:
    """The figure in which a finding about `metric` is shown.

    Where the metric needs more than the kernel's and the exact tensor it is the absolute one it is
    a ratio of. `bias_of` is the report's word for whose bias it is. Raises UsageError for a metric
    that is neither.
    """
    if metric in _ABOUT_BIAS:
        return _BIAS_OF.get(bias_of or "mean", "bias_feature")
    figure = _STANDS_FOR.get(metric, metric)
    if figure not in (*FIGURES, "noise"):
        known = [*FIGURES, *_STANDS_FOR, *_ABOUT_BIAS, "noise"]
        raise UsageError(f"no finding is about {metric!r}", hint=closest(metric, known))
    return figure


def forward(kernel: Kernel, options: Mapping[str, Any], tensor: str = "out") -> Evaluate:
    """How to see a kernel's `out` or `lse` of a case.

    A case with grad_out is the forward pass of a training step: its inputs require gradients, by
    which PyTorch may choose another operator.
    """

    def run(case: AttentionCase) -> tuple[Tensor, str | None]:
        training = case.grad_out is not None
        if training:
            q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
            case = dataclasses.replace(case, q=q, k=k, v=v)
        with torch.set_grad_enabled(training):
            output = kernel.attend(case, **options)
        got = output.out if tensor == "out" else output.lse
        if got is None:
            raise UsageError(f"kernel {kernel.name} returns no {tensor}")
        got = got.detach()
        return (got if got.ndim == 4 else got[..., None]), output.ran

    def exact(case: AttentionCase) -> Exact:
        r = attend(case)
        if tensor == "lse":
            return Exact(value=r.lse[..., None], empty=r.empty)
        return Exact(value=r.out, terms=r.term_scale, empty=r.empty, lse=r.lse)

    return against(run, exact)


def against(run: Run, exact: Callable[[AttentionCase], Exact]) -> Evaluate:
    """How to see what `run` returns, with `exact` as the truth; gradients are seen so.

    `run` gets a copy of the case. A script of `numdev.audit.reproduce.reproducer` leaves out the
    empty rows of out, lse and dq, and no row of dk and dv: so should `exact`, for the figures to be
    the same."""

    def evaluate(case: AttentionCase) -> Seen:
        got, ran = run(copied(case))
        truth = exact(case)
        nothing = torch.zeros(truth.value.shape[:3], dtype=torch.bool, device=got.device)
        yardstick = Yardstick(
            reference=truth.value,
            term_scale=truth.value.abs() if truth.terms is None else truth.terms,
            empty=nothing if truth.empty is None else truth.empty,
            format=case.format if got.dtype == case.q.dtype else format_of(got.dtype),
            lse=truth.lse,
        )
        return got, yardstick, ran

    return evaluate


def worst(seen: Seen, figure: str) -> tuple[int, float]:
    """The head with the largest figure, and that figure (a bias with its sign)."""
    heads = [_value(head, figure) for head in measure(seen[0], seen[1]).heads]
    at = max(range(len(heads)), key=lambda h: abs(heads[h]))
    return at, heads[at]


def shows(
    evaluate: Evaluate, figure: str, observed: float, *, limit: float | None = None
) -> Callable[[AttentionCase], bool]:
    """Whether any head of a case has a figure of at least `limit`, by default half of `observed`.

    A single element whose finiteness is wrong shows. A bias must have the sign it had, and be
    certain over at least eight sequences. Once it showed, the same thing must run: another backend
    is another finding. A kernel that refuses a case, or fails, does not show anything in it.
    """
    least = 1.0 if figure == "nonfinite" else ENOUGH * abs(observed) if limit is None else limit
    first: list[str | None] = []

    def answer(case: AttentionCase) -> bool:
        try:
            seen = evaluate(case)
            heads = measure(seen[0], seen[1]).heads
        except Exception:  # a kernel is foreign code, and odd lengths are what it is asked for
            return False
        if first and seen[2] != first[0]:
            return False
        found = any(_is_there(head, figure, least, observed) for head in heads)
        if found and not first:
            first.append(seen[2])
        return found

    return answer


def differs(run: Run, runs: int = 4) -> Callable[[AttentionCase], bool]:
    """Whether repeated runs of a case differ in a bit."""

    def answer(case: AttentionCase) -> bool:
        try:
            first = run(copied(case))[0]
            again = [run(copied(case))[0] for _ in range(runs - 1)]
        except Exception:
            return False
        return not all(torch.equal(first.nan_to_num(), x.nan_to_num()) for x in again)

    return answer


def _is_there(head: Mapping[str, Any], figure: str, least: float, observed: float) -> bool:
    value = _value(head, figure)
    if figure not in BIASES:
        return value >= least
    p = head["bias_p"]
    # What a bias needs to remain one: rounding a single row is biased by nature.
    certain = p is not None and p <= BIAS_ALPHA and head["sequences"] >= BIAS_SEQUENCES
    return certain and value * math.copysign(1.0, observed) >= least


def _value(head: Mapping[str, Any], figure: str) -> float:
    """0 for a figure that means nothing here."""
    value = head.get(figure)
    return 0.0 if value is None else float(value)
