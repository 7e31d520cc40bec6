"""Measures the chain of biased rounding in one attention call, by Qiu & Yao (arXiv
2510.04212), for every query head: ties, signed errors of P V and O, the error of delta,
and the error of dW_Q.

With S = alpha Q K^T, O = P V, dP = dO V^T, delta = rowsum(dO o O) = rowsum(dP o P), dS =
alpha P o (dP - delta), dQ = dS K, dW_Q = dQ^T X, an error e[T] of delta at row T alone
makes

    error of dQ    = -alpha diag(e) (P K)                          (1)
    error of dW_Q  = -alpha sum_T e[T] (P K)[T]^T X[T]             (2)
    e              = rowsum(dO o (O computed - O exact))           (3)

Where e keeps one sign and the (P K)[T]^T X[T] look alike, the sum (2) does not cancel. A
number that does not exist is null, with its reason, as is one of a row that is not
finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_range
from numdev.kernels.emulation import forward as fwd
from numdev.kernels.emulation.backward import SavedForward
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import Rounder, plain_arithmetic
from numdev.kernels.reference.blocked import nonzero, row_blocks
from numdev.sources.query_projection import Projection
from numdev.studies.diagnose import exact_and_rounded_passes
from numdev.studies.diagnose import head_error_means as stats
from numdev.studies.diagnose.exact_and_rounded_passes import Computed, Truth
from numdev.studies.diagnose.head_error_means import Columns
from numdev.studies.diagnose.report import CallFields, HeadRow

# How far from its row's largest score another is nearly tied, as in the paper
NEAR = 1e-3
WEIGHT_NUMBERS = (
    "moved",
    "dw_q_error",
    "dw_q_norm",
    "similarity",
    "spectral_norm",
    "spectral_ratio",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """One call, computed exactly and as a recipe rounds it, and the numbers of every
    query head."""

    truth: Truth
    rounded: Computed
    heads: tuple[HeadRow, ...]


def diagnose_call(
    case: AttentionCase,
    recipe: Recipe,
    projection: Projection | None = None,
    *,
    checkpoint: str = "",
    step: int | None = None,
) -> Diagnosis:
    """Returns the call computed exactly and as a recipe rounds it, with the numbers of
    the chain for every query head. `checkpoint`, `step`: as the rows state them.

    `case`: with grad_out, and with values of its working format. `projection`: W_Q and
    its input; None: the numbers that need W_Q are None. Raises UsageError for a case
    without grad_out, Refused where the recipe's `compute` dtype cannot represent the
    case."""
    with torch.no_grad(), plain_arithmetic(case.q.device):
        truth, rounded = (
            exact_and_rounded_passes.exact_passes(case, projection),
            exact_and_rounded_passes.rounded_passes(case, recipe),
        )
        columns = {
            "rows": truth.rows.sum(dim=(0, 2)),
            **_tie_numbers(
                exact_and_rounded_passes.rounder_by_site(case, recipe),
                rounded.saved,
                truth,
            ),
            **_bias_numbers(truth, rounded),
            "ds_row_sum": ds_row_sum(truth, rounded),
            **_delta_numbers(truth, rounded),
            **_weight_numbers(truth, rounded),
        }
        numbers = stats.numbers_by_head(columns)
    ref = case.ref
    place: CallFields = {
        "checkpoint": checkpoint, "step": step, "case": ref.case, "module": ref.module,
        "layer": ref.layer, "call": ref.call,
    }  # fmt: skip
    heads = tuple(
        HeadRow.model_validate(
            {**place, "head": head, **row, "nulls": _null_reasons(truth, rounded, row)}
        )
        for head, row in enumerate(numbers)
    )
    return Diagnosis(truth=truth, rounded=rounded, heads=heads)


def _tie_numbers(r: Rounder, saved: SavedForward, truth: Truth) -> Columns:
    """Returns numbers on ties, and on P where it meets V, as means of every head, [H]
    each. `tied`, `ones` and `powers` are over the rows that see several keys,
    `one_signed` over those of them with several keys within NEAR of the largest score.
    NaN without such a row.

    Ties are those of S as the recipe rounds it, over all keys that a row sees. P is as it
    is multiplied with V (site `p`)."""
    blocks = [
        _ties_in_block(r, saved, truth, rows)
        for rows in row_blocks(r.case, exact_and_rounded_passes.BLOCKS_AT_ONCE)
    ]
    tied, near, one_signed, ones, powers = (
        torch.cat(x, 2) for x in zip(*blocks, strict=True)
    )
    rows = truth.rows
    return {
        "tied": stats.mean_by_head((rows & (tied > 1)).double(), rows),
        "ones": stats.mean_by_head((ones > 1).double(), rows),
        "powers": stats.mean_by_head(powers, rows),
        "one_signed": stats.mean_by_head(one_signed, rows & (near > 1)),
    }


def _ties_in_block(
    r: Rounder, saved: SavedForward, truth: Truth, rows: slice
) -> tuple[Tensor, ...]:
    """Returns five numbers of each row of a block, [B, H, rows] each: how many keys have
    the largest S; how many are within NEAR of it; the share of V's features that have one
    sign over the latter; how many keys have P-bar exactly 1; the probability of the keys
    at which P is an exact power of two.

    A key counts as a one only where the maximum that P was taken under is the row's
    largest of all: in a recipe whose every tile has a maximum of its own, each would have
    a one."""
    case, recipe = r.case, r.recipe
    width = recipe.tile(saved.q.shape[-1], case.kv_len)[1]
    seen = key_range(case, rows)
    keys = slice(seen.start - seen.start % width, seen.stop)  # whole tiles
    S, _ = fwd.scores(r, saved.q_s, saved.k, rows, keys)
    P, _, _ = exact_and_rounded_passes.probabilities(case, truth.exact, rows, keys)
    largest = (
        S.amax(dim=-1, keepdim=True) if S.shape[-1] else S.new_zeros(*S.shape[:3], 1)
    )
    shown = -math.inf < S
    tied, near = (((largest - off <= S) & shown).sum(dim=-1) for off in (0.0, NEAR))
    close = ((largest - NEAR <= S) & shown).float()
    signs = fwd.times(case, close, case.v[:, :, keys].double().sign().float())
    one_signed = (signs.abs() == near[..., None]).double().mean(dim=-1)
    # From here on tile by tile in the recipe's order: P-bar as it meets V. Overwrites S.
    best = S.new_full(S.shape[:3], -math.inf)
    ones, powers = torch.zeros_like(best), P.new_zeros(best.shape)
    for split in fwd.splits(r):
        m = fwd.start(r, saved.q[:, :, rows], saved.v, split).m
        starts = range(max(keys.start, split.start), min(keys.stop, split.stop), width)
        for first in fwd.in_order(r, starts):
            tile = slice(first - keys.start, min(first + width, keys.stop) - keys.start)
            tile_maximum = fwd.maximum(r, S[..., tile])
            m = torch.maximum(m, tile_maximum)
            under = tile_maximum if recipe.algorithm == "fa1" else m
            weights = fwd.exponential(r, S[..., tile], under)
            if recipe.algorithm == "plain":
                weights = r("normalised", weights / nonzero(saved.l[:, :, rows, None]))
            weights = r("p", weights)
            count = (weights == 1.0).sum(dim=-1).to(best.dtype)
            ones = torch.where(
                under > best, count, ones + torch.where(under == best, count, 0.0)
            )
            best = torch.maximum(best, under)
            powers += (P[..., tile] * (torch.frexp(weights).mantissa == 0.5)).sum(dim=-1)
    return tied, near, one_signed, ones, powers


def _bias_numbers(truth: Truth, rounded: Computed) -> Columns:
    """Returns the bias of P V by the roundings of that product alone (`pv_bias`), that of
    O by all roundings (`out_bias`), and the t of each (`pv_t`, `out_t`), [H] each.
    `pv_bias` and `pv_t` are NaN where the keys are split."""
    exact, fmt, scale = truth.exact, truth.case.format, truth.exact.term_scale
    error = rounded.out.double() - exact.out
    out_bias, out_t = stats.bias_and_t(error, exact.out, scale, truth.rows, fmt)
    pv_bias, pv_t = torch.full((2, *out_bias.shape), math.nan)
    if rounded.product is not None and rounded.product_exact is not None:
        product = rounded.product_exact.double()
        if rounded.recipe.algorithm != "plain":  # there P-bar is exp(L - m) times P
            scale = scale * (exact.lse - rounded.saved.m.double()).exp()[..., None]
        error = rounded.product.double() - product
        pv_bias, pv_t = stats.bias_and_t(error, product, scale, truth.rows, fmt)
    return {"pv_bias": pv_bias, "pv_t": pv_t, "out_bias": out_bias, "out_t": out_t}


def _delta_numbers(truth: Truth, rounded: Computed) -> Columns:
    """Returns the mean error of delta (`delta_mean`), its t (`delta_t`), and the largest
    over sequences of its running sum (`delta_run`), [H] each. `delta_run` is -inf where
    no sequence has one."""
    error = truth.delta_error(rounded.delta, truth.exact.delta)
    runs = stats.largest_running_sum(error, truth.rows).nan_to_num(-math.inf)
    return {
        "delta_mean": stats.mean_by_head(error, truth.rows),
        "delta_t": stats.t_by_head(error, truth.rows),
        "delta_run": runs.amax(dim=0),
    }


def ds_row_sum(truth: Truth, rounded: Computed) -> Tensor:
    """Returns the rms over rows of the sum of dS, over the rms over rows of the sum of
    |dS|, [H]. NaN in a call with a soft cap or a sink, where the exact sums are not
    zero."""
    sums = (
        rounded.ds if _rows_sum_to_zero(truth) else torch.full_like(rounded.ds, math.nan)
    )
    return stats.rms_by_head(sums, truth.rows) / stats.rms_by_head(
        rounded.ds_size, truth.rows
    )


def _rows_sum_to_zero(truth: Truth) -> bool:
    """Whether rows of an exact dS sum to zero: there is no soft cap and no sink."""
    return truth.case.softcap is None and truth.case.sinks is None


def _weight_numbers(truth: Truth, rounded: Computed) -> Columns:
    """Returns the numbers of WEIGHT_NUMBERS, which need W_Q, [H] each; all NaN without a
    projection."""
    numbers = dict.fromkeys(WEIGHT_NUMBERS, torch.full_like(truth.size, math.nan))
    if truth.projection is None:
        return numbers
    PK = truth.PK.masked_fill(~truth.rows[..., None], 0.0)
    uneven = truth.delta_error(rounded.delta, rounded.even) * truth.size[:, None]
    # Formula 2
    by_delta = truth.dw_q_from(-truth.case.scale * uneven[..., None] * truth.PK)
    return {
        "moved": truth.relative_size(by_delta),
        "dw_q_error": truth.relative_size(truth.dw_q_error(rounded.dq)),
        "dw_q_norm": stats.norm_by_head(truth.dw_q),
        "similarity": stats.share_in_one_direction(truth.projection, PK),
        **stats.spectral_numbers(truth.projection, truth.case.heads),
    }


def _null_reasons(truth: Truth, rounded: Computed, row: stats.Numbers) -> dict[str, str]:
    """Returns, by name, the reason of every number of a head that is None. `row`: the
    head's numbers."""

    def reason(name: str) -> str:
        """Returns why the number `name` of the head is None."""
        if truth.projection is None and name in WEIGHT_NUMBERS:
            return "W_Q is not known: no single linear layer makes the queries"
        if row["rows"] == 0:
            return "no query sees more than one key"
        if name == "ds_row_sum" and not _rows_sum_to_zero(truth):
            return "under a soft cap, or with a sink, rows of dS do not sum to zero"
        if name.startswith("pv") and rounded.product is None:
            return "the keys are split, and each part has a P V of its own"
        if name.endswith("_t"):
            return f"a t needs {stats.FEWEST_BLOCKS} blocks of rows that do not all agree"
        return (
            "what it is made of is not there or not finite, or what it is "
            "relative to is zero"
        )

    return {name: reason(name) for name, x in row.items() if x is None}
