"""The error of delta = rowsum(dO o O) = rowsum(dP o P), by one formula or the other: whether it has
one sign over tokens, and what it makes of dW_Q."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from numdev.diagnose.recipe import Computed, Products
from numdev.diagnose.report import DeltaError, Formula, Imbalance
from numdev.diagnose.statistics import Columns, by_head, mean, rms, t_of
from numdev.diagnose.truth import Truth
from numdev.diagnose.weights import norm

MOST_TOKENS = 200
"""Of a running sum, as it is reported."""


def delta_error(truth: Truth, delta: Tensor) -> Tensor:
    """[B, H, q_len] in fp64: computed less exact, over `Truth.size`; 0 in rows that see no key."""
    error = (delta.double() - truth.exact.delta) / truth.size[:, None]
    return error.masked_fill(truth.exact.empty, 0.0)


def imbalance(truth: Truth, found: Computed, products: Products) -> Tensor:
    """[B, H, q_len], as `delta_error`: delta less that with which rows of dS sum to zero. Only this
    part of its error is one against what it is subtracted from."""
    apart = (found.delta.double() - products.even) / truth.size[:, None]
    return apart.masked_fill(truth.exact.empty, 0.0)


def predicted(truth: Truth, error: Tensor) -> Tensor | None:
    """The error of dW_Q [H, head_dim, width] that an error of delta, of `delta_error`, alone makes
    by formula 2 of Qiu & Yao (`numdev.diagnose.weights`); None where the projection is not
    known."""
    absolute = error * truth.size[:, None]
    return truth.weights(-truth.case.scale * absolute[..., None] * truth.PK)


def numbers(truth: Truth, error: Tensor) -> Columns:
    """The fields of a `DeltaError`, [H] each, NaN where they are null."""
    rows, found = truth.rows, predicted(truth, error)
    unknown = torch.full_like(truth.size, math.nan)
    return {
        "mean": mean(error, rows),
        "rms": rms(error, rows),
        "t": t_of(error, rows),
        "run": runs_of(error, rows).nan_to_num(-math.inf).amax(dim=0),
        "dw_q": unknown if found is None or truth.dw_q is None else norm(found) / norm(truth.dw_q),
    }


def delta_errors(truth: Truth, formula: Formula, error: Tensor) -> list[DeltaError]:
    """Of every head."""
    return [DeltaError(formula=formula, **found) for found in by_head(numbers(truth, error))]


def imbalances(truth: Truth, error: Tensor) -> tuple[list[Imbalance], Columns]:
    """Of every head the fields of a `HeadRow` that are made of `imbalance`."""
    found = dict(numbers(truth, error))
    moved = found.pop("dw_q")
    return [Imbalance(**part) for part in by_head(found)], {"dw_q_unbalanced": moved}


def running(
    truth: Truth, head: int, errors: Sequence[tuple[Formula, Tensor]]
) -> list[dict[str, object]]:
    """For each formula the fields of a `RunningError` but for its place: of the sequence whose
    `run` is largest by the first formula, every row that counts, or MOST_TOKENS of them evenly
    spread and the last among them. Nothing where no row counts, or an error is not finite."""
    rows = truth.rows[:, head]
    runs = runs_of(errors[0][1], truth.rows)[:, head].nan_to_num(-math.inf)
    worst = int(runs.argmax())
    tokens = rows[worst].nonzero()[:, 0]
    n = len(tokens)
    shown = torch.arange(1, min(n, MOST_TOKENS) + 1) * n // max(1, min(n, MOST_TOKENS)) - 1
    found: list[dict[str, object]] = []
    for formula, error in errors:
        sums = (error[worst, head, tokens].cumsum(dim=0) / math.sqrt(max(n, 1))).cpu()[shown]
        if n and bool(sums.isfinite().all()):
            at = tuple(tokens.cpu()[shown].tolist())
            found.append({"formula": formula, "tokens": at, "sums": tuple(sums.tolist())})
    return found


def runs_of(error: Tensor, rows: Tensor) -> Tensor:
    """`DeltaError.run` of every sequence, [B, H]; NaN where it has no row or no error."""
    kept = torch.where(rows, error, 0.0)
    count = rows.sum(dim=-1).to(error.dtype)
    size = (kept.square().sum(dim=-1) / count).sqrt()
    return kept.cumsum(dim=-1).abs().amax(dim=-1) / (size * count.sqrt())
