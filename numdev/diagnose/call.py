"""The chain of biased rounding in one attention call: ties, signed errors of P V and O, the error
of delta, and what reaches the gradient of W_Q, for every query head.

`diagnosed` computes the call in fp64 (`numdev.diagnose.truth`) and as a recipe of `emulated` has it
(`numdev.diagnose.recipe`), and fills a `HeadRow` for each head. The numbers are defined by the
records of `numdev.diagnose.report`; the parts are made by the modules named `chain_*`. What follows
from them, and what cures change, is for others (`numdev.diagnose.cured`).

What does not exist is null, with its reason: what hangs on W_Q without a projection; the row sums
of dS under a soft cap or with a sink, where they are not zero; a t of too few blocks of rows. A
head of which a row that counts is not finite has null wherever that row has a part. Tensors may be
on any device; memory is a few blocks of scores beyond what has the shape of q, k, v and the output,
and the Gram matrices of `numdev.diagnose.similarity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.diagnose import delta as chain_delta
from numdev.diagnose import ties as chain_ties
from numdev.diagnose.delta import delta_error, delta_errors, predicted
from numdev.diagnose.nulls import nulls
from numdev.diagnose.recipe import Computed, Products, computed, delta_by, products_of, rounder
from numdev.diagnose.report import Bias, Formula, HeadRow, RunningError
from numdev.diagnose.similarity import similarity
from numdev.diagnose.statistics import Columns, bias, by_head, mean, rms, t_of
from numdev.diagnose.truth import Truth, sink, truth_of
from numdev.diagnose.weights import cosine, norm, spectral
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import plain_arithmetic
from numdev.sources.projection import Projection

FORMULAS: tuple[Formula, Formula] = ("dO*O", "dP*P")


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """A call, the truth of it, and what was found."""

    truth: Truth
    made: Recipe
    checkpoint: str
    step: int | None
    found: Computed
    errors: tuple[tuple[Formula, Tensor], ...]
    """The error of delta by the recipe's formula and by the other, as `delta_error` has it."""
    heads: tuple[HeadRow, ...]

    @property
    def case(self) -> AttentionCase:
        return self.truth.case

    def place(self, head: int) -> dict[str, object]:
        """The fields of a `Place`."""
        return place(self.case, self.checkpoint, self.step, head)

    def running(self, head: int) -> tuple[RunningError, ...]:
        """The running sum of delta's error by both formulas, in the sequence where it runs furthest
        by the recipe's own: at most 200 tokens. A formula whose error is not finite is left out."""
        found = chain_delta.running(self.truth, head, self.errors)
        return tuple(RunningError.model_validate({**self.place(head), **x}) for x in found)


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
    grad_out, Refused where the recipe's `compute` dtype does not hold the case.
    """
    with torch.no_grad(), plain_arithmetic(case.q.device):
        truth = truth_of(case, projection)
        found = computed(case, made)
        errors = _delta_errors(truth, found)
        return Diagnosis(
            truth=truth,
            made=made,
            checkpoint=checkpoint,
            step=step,
            found=found,
            errors=errors,
            heads=tuple(_rows(truth, found, errors, checkpoint, step)),
        )


def place(case: AttentionCase, checkpoint: str, step: int | None, head: int) -> dict[str, object]:
    """Where a head is, as the fields of a `Place`."""
    ref = case.ref
    return {"checkpoint": checkpoint, "step": step, "case": ref.case, "module": ref.module,
            "layer": ref.layer, "call": ref.call, "head": head}  # fmt: skip


def biases(truth: Truth, found: Computed) -> tuple[list[Bias], list[Bias]]:
    """The bias of P V by its own roundings, and of O, of every head."""
    exact, fmt = truth.exact, truth.case.format
    out = bias(found.out.double() - exact.out, exact.out, exact.term_scale, truth.rows, fmt)
    if found.product is None or found.product_exact is None:
        return [Bias()] * truth.case.heads, out
    product = found.product_exact.double()
    scale = exact.term_scale
    if found.made.algorithm != "plain":  # there P-bar is exp(L - m) times P
        scale = scale * (exact.lse - found.kept.m.double()).exp()[..., None]
    error = found.product.double() - product
    return bias(error, product, scale, truth.rows, fmt), out


def ds_row_sums(truth: Truth, products: Products) -> Columns:
    """The sums of the rows of dS, [H] each; NaN where they are not zero to begin with."""
    exist = truth.case.softcap is None and truth.case.sinks is None
    sums = products.ds if exist else torch.full_like(products.ds, math.nan)
    return {
        "ds_row_sum": rms(sums, truth.rows) / rms(products.ds_size, truth.rows),
        "ds_row_sum_t": t_of(sums, truth.rows),
    }


def _dp_rel(truth: Truth, products: Products) -> Tensor:
    error, size = (mean(x, truth.rows) for x in (products.dp_error, products.dp))
    return (error / size).sqrt()


def _of_weights(truth: Truth, found: Computed, error: Tensor) -> Columns:
    """What the error of dQ, and of delta alone, makes of dW_Q, [H] each."""
    whole, part = truth.weights(found.dq.double() - truth.exact.dq), predicted(truth, error)
    if whole is None or part is None or truth.dw_q is None:
        unknown = torch.full_like(truth.size, math.nan)
        return dict.fromkeys(("dw_q_error", "dw_q_predicted", "dw_q_cos"), unknown)
    size = norm(truth.dw_q)
    return {
        "dw_q_error": norm(whole) / size,
        "dw_q_predicted": norm(part) / size,
        "dw_q_cos": cosine(part, whole),
    }


def _delta_errors(truth: Truth, found: Computed) -> tuple[tuple[Formula, Tensor], ...]:
    used = found.made.delta_from
    (other,) = (formula for formula in FORMULAS if formula != used)
    delta = delta_by(truth.case, found.given, other)
    return (used, delta_error(truth, found.delta)), (other, delta_error(truth, delta))


def _similarity(truth: Truth) -> Columns:
    if truth.projection is None:
        unknown = torch.full_like(truth.size, math.nan)
        names = ("similarity", "similarity_cos", "similarity_tokens")
        return dict.fromkeys(names, unknown)
    PK = truth.PK.masked_fill(~truth.rows[..., None], 0.0)
    return similarity(truth.projection, PK)


def _rows(
    truth: Truth,
    found: Computed,
    errors: tuple[tuple[Formula, Tensor], ...],
    checkpoint: str,
    step: int | None,
) -> list[HeadRow]:
    case = truth.case
    ties = chain_ties.ties_of(rounder(case, found.made), found.kept, truth)
    products = products_of(found)
    apart, moved = chain_delta.imbalances(truth, chain_delta.imbalance(truth, found, products))
    numbers = by_head({
        "rows": truth.rows.sum(dim=(0, 2)),
        **chain_ties.columns(ties, truth.rows),
        **sink(truth),
        "dp_rel": _dp_rel(truth, products),
        **ds_row_sums(truth, products),
        **_similarity(truth),
        **_of_weights(truth, found, errors[0][1]),
        **moved,
        "dw_q_norm": truth.size * math.nan if truth.dw_q is None else norm(truth.dw_q),
        **spectral(truth.projection, case.heads, case.q.device),
    })  # fmt: skip
    pv, out = biases(truth, found)
    deltas = zip(*(delta_errors(truth, *pair) for pair in errors), strict=True)
    parts = zip(numbers, pv, out, deltas, apart, strict=True)
    return [
        HeadRow.model_validate({
            **place(case, checkpoint, step, head), **fields, "pv": p, "out": o, "delta": delta,
            "delta_unbalanced": uneven,
            "nulls": nulls(truth, found, fields, {"pv": p, "out": o}, delta, uneven),
        })
        for head, (fields, p, o, delta, uneven) in enumerate(parts)
    ]  # fmt: skip
