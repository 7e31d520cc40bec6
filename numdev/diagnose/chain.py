"""The chain of biased rounding in one attention call, by Qiu & Yao (arXiv 2510.04212), for every
query head: ties, signed errors of P V and O, the error of delta, and the error of dW_Q.

With S = alpha Q K^T, O = P V, dP = dO V^T, delta = rowsum(dO o O) = rowsum(dP o P),
dS = alpha P o (dP - delta), dQ = dS K, dW_Q = dQ^T X, an error e[T] of delta at row T alone makes

    error of dQ    = -alpha diag(e) (P K)                          (1)
    error of dW_Q  = -alpha sum_T e[T] (P K)[T]^T X[T]             (2)
    e              = rowsum(dO o (O computed - O exact))           (3)

Where e keeps one sign and the (P K)[T]^T X[T] look alike, the sum (2) does not cancel. A number
that does not exist is null, with its reason, as is one of a row that is not finite. Tensors may be
on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.diagnose.passes import Computed, Truth, computed, delta_by, rounder, truth_of
from numdev.diagnose.projection import similarity, spectral
from numdev.diagnose.report import Formula, HeadRow, RunningError
from numdev.diagnose.statistics import (
    FEWEST_BLOCKS,
    Columns,
    bias,
    by_head,
    longest_run,
    mean,
    norm,
    rms,
    t_of,
)
from numdev.diagnose.ties import ties
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import plain_arithmetic
from numdev.sources.projection import Projection

FORMULAS: tuple[Formula, Formula] = ("dO*O", "dP*P")
MOST_TOKENS = 200  # of a running sum in a report
OF_WEIGHTS = ("similarity", "spectral_norm", "spectral_ratio")


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """A call, what the recipe makes of it, and its numbers."""

    truth: Truth
    found: Computed
    errors: Mapping[Formula, Tensor]  # of delta, by the recipe's formula and then by the other
    heads: tuple[HeadRow, ...]

    def running(self, head: int) -> tuple[RunningError, ...]:
        """The running sum of delta's error by both formulas, in the sequence where it runs furthest
        by the recipe's own: at most MOST_TOKENS of the rows that count, evenly spread, the last
        among them. A formula whose error is not finite is left out."""
        rows = self.truth.rows
        runs = longest_run(next(iter(self.errors.values())), rows)[:, head]
        worst = int(runs.nan_to_num(-math.inf).argmax())
        tokens = rows[worst, head].nonzero()[:, 0]
        n = len(tokens)
        count = min(n, MOST_TOKENS)
        shown = torch.arange(1, count + 1) * n // max(1, count) - 1
        place, lines = self.heads[head].place, []
        for formula, error in self.errors.items():
            sums = (error[worst, head, tokens].cumsum(dim=0) / math.sqrt(max(n, 1))).cpu()[shown]
            if n and bool(sums.isfinite().all()):
                at = tuple(tokens.cpu()[shown].tolist())
                values = tuple(sums.tolist())
                lines.append(RunningError(**place, formula=formula, tokens=at, sums=values))
        return tuple(lines)


def diagnosed(
    case: AttentionCase,
    made: Recipe,
    projection: Projection | None = None,
    *,
    checkpoint: str = "",
    step: int | None = None,
) -> Diagnosis:
    """The chain of every head of a call, as a recipe would compute it.

    The case holds values of its working format, and grad_out. Raises UsageError for one without
    grad_out, Refused where the recipe's `compute` dtype does not hold the case."""
    with torch.no_grad(), plain_arithmetic(case.q.device):
        truth, found = truth_of(case, projection), computed(case, made)
        other = FORMULAS[made.delta_from == FORMULAS[0]]
        deltas = {made.delta_from: found.delta, other: delta_by(case, found.given, other)}
        errors = {name: truth.off(delta, truth.exact.delta) for name, delta in deltas.items()}
        uneven = delta_numbers(truth, truth.off(found.delta, found.even))
        numbers = by_head({
            "": {
                "rows": truth.rows.sum(dim=(0, 2)),
                **ties(rounder(case, made), found.kept, truth),
                "ds_row_sum": ds_row_sum(truth, found),
                **_of_weights(truth, found, errors[made.delta_from]),
                "dw_q_unbalanced": uneven.pop("dw_q"),
            },
            **biases(truth, found),
            **{formula: delta_numbers(truth, error) for formula, error in errors.items()},
            "delta_unbalanced": uneven,
        })  # fmt: skip
    ref = case.ref
    place = {"checkpoint": checkpoint, "step": step, "case": ref.case, "module": ref.module,
             "layer": ref.layer, "call": ref.call}  # fmt: skip
    heads = []
    for head, groups in enumerate(numbers):
        reasons = _nulls(truth, found, groups)
        delta = [{"formula": formula, **groups.pop(formula)} for formula in errors]
        row = {**place, "head": head, **groups.pop(""), **groups, "delta": delta, "nulls": reasons}
        heads.append(HeadRow.model_validate(row))
    return Diagnosis(truth=truth, found=found, errors=errors, heads=tuple(heads))


def biases(truth: Truth, found: Computed) -> dict[str, Columns]:
    """The bias of P V by its own roundings, and of O by all."""
    exact, fmt, scale = truth.exact, truth.case.format, truth.exact.term_scale
    out = bias(found.out.double() - exact.out, exact.out, scale, truth.rows, fmt)
    if found.product is None or found.product_exact is None:
        return {"pv": {name: torch.full_like(x, math.nan) for name, x in out.items()}, "out": out}
    product = found.product_exact.double()
    if found.made.algorithm != "plain":  # there P-bar is exp(L - m) times P
        scale = scale * (exact.lse - found.kept.m.double()).exp()[..., None]
    return {
        "pv": bias(found.product.double() - product, product, scale, truth.rows, fmt),
        "out": out,
    }


def delta_numbers(truth: Truth, error: Tensor) -> dict[str, Tensor]:
    """The numbers of a `DeltaError`, of an error [B, H, q_len] in its unit."""
    rows = truth.rows
    return {
        "mean": mean(error, rows),
        "rms": rms(error, rows),
        "t": t_of(error, rows),
        "run": longest_run(error, rows).nan_to_num(-math.inf).amax(dim=0),
        "dw_q": truth.moved(_formula_2(truth, error)),
    }


def _formula_2(truth: Truth, error: Tensor) -> Tensor:
    """The error of dW_Q that an error of delta alone makes."""
    absolute = error * truth.size[:, None]
    return truth.weights(-truth.case.scale * absolute[..., None] * truth.PK)


def ds_row_sum(truth: Truth, found: Computed) -> Tensor:
    """[H]: the rms sum of a row of dS over that of |dS|; NaN where it is not zero to begin with."""
    sums = found.ds if _zero_sums(truth) else torch.full_like(found.ds, math.nan)
    return rms(sums, truth.rows) / rms(found.ds_size, truth.rows)


def _zero_sums(truth: Truth) -> bool:
    """Whether rows of an exact dS sum to zero."""
    return truth.case.softcap is None and truth.case.sinks is None


def _of_weights(truth: Truth, found: Computed, error: Tensor) -> Columns:
    """The numbers of W_Q; NaN without a projection."""
    whole, part = truth.dw_q_error(found.dq), _formula_2(truth, error)
    numbers = dict.fromkeys(OF_WEIGHTS, torch.full_like(truth.size, math.nan))
    if truth.projection is not None:
        PK = truth.PK.masked_fill(~truth.rows[..., None], 0.0)
        numbers = {"similarity": similarity(truth.projection, PK)}
        numbers |= spectral(truth.projection, truth.case.heads)
    return {
        **numbers,
        "dw_q_error": truth.moved(whole),
        "dw_q_cos": (part * whole).flatten(1).sum(dim=-1) / (norm(part) * norm(whole)),
        "dw_q_norm": norm(truth.dw_q),
    }


def _nulls(truth: Truth, found: Computed, groups: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """The reason of every number of a head that is null, by its name: `pv` where the whole record
    is missing, `pv.t` where only its t is."""
    missing = set()
    for group, numbers in groups.items():
        name = "delta" if group in FORMULAS else group
        lacking = {f"{name}.{part}".strip(".") for part, x in numbers.items() if x is None}
        missing |= {name} if name and numbers["mean"] is None else lacking

    def reason(name: str) -> str:
        last = name.rpartition(".")[-1]
        if truth.projection is None and (last in OF_WEIGHTS or last.startswith("dw_q")):
            return "W_Q is not known: no single linear layer makes the queries"
        if groups[""]["rows"] == 0:
            return "no query sees more than one key"
        if name == "ds_row_sum" and not _zero_sums(truth):
            return "under a soft cap, or with a sink, rows of dS do not sum to zero"
        if name == "pv" and found.product is None:
            return "the keys are split, and each part has a P V of its own"
        if last == "t":
            return f"a t needs {FEWEST_BLOCKS} blocks of rows that do not all agree"
        return "what it is made of is not there or not finite, or what it is relative to is zero"

    return {name: reason(name) for name in sorted(missing)}
