"""The chain of biased rounding in one attention call (Qiu & Yao, arXiv 2510.04212): ties, signed
errors of P V and O, the error of delta = rowsum(dO o O) = rowsum(dP o P), and what reaches the
gradient of W_Q, for every query head.

What does not exist is null, with its reason; so is what has a part in a row that is not finite.
Tensors may be on any device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.diagnose.passes import Computed, Truth, computed, delta_by, rounder, truth_of
from numdev.diagnose.projection import similarity, spectral
from numdev.diagnose.report import Bias, DeltaError, Formula, HeadRow, Imbalance, RunningError
from numdev.diagnose.statistics import FEWEST_BLOCKS, Columns, bias, by_head, mean, norm, rms, t_of
from numdev.diagnose.ties import ties
from numdev.kernels.emulation.recipe import Recipe
from numdev.kernels.emulation.rounding import plain_arithmetic
from numdev.report import Record
from numdev.sources.projection import Projection

FORMULAS: tuple[Formula, Formula] = ("dO*O", "dP*P")
MOST_TOKENS = 200  # of a running sum, as it is reported


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
        runs = runs_of(next(iter(self.errors.values())), rows)[:, head].nan_to_num(-math.inf)
        worst = int(runs.argmax())
        tokens = rows[worst, head].nonzero()[:, 0]
        n = len(tokens)
        shown = torch.arange(1, min(n, MOST_TOKENS) + 1) * n // max(1, min(n, MOST_TOKENS)) - 1
        at = tuple(tokens.cpu()[shown].tolist())
        lines = []
        for formula, error in self.errors.items():
            sums = (error[worst, head, tokens].cumsum(dim=0) / math.sqrt(max(n, 1))).cpu()[shown]
            if n and bool(sums.isfinite().all()):
                line = RunningError(
                    **self.heads[head].place, formula=formula, tokens=at, sums=tuple(sums.tolist())
                )
                lines.append(line)
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
        errors = {formula: truth.delta_error(delta) for formula, delta in deltas.items()}
        own = errors[made.delta_from]
        unbalanced = (found.delta.double() - found.even) / truth.size[:, None]
        uneven = delta_numbers(truth, unbalanced.masked_fill(truth.exact.empty, 0.0))
        dp_error, dp = (mean(x, truth.rows) for x in (found.dp_error, found.dp))
        numbers = by_head({
            "rows": truth.rows.sum(dim=(0, 2)),
            **ties(rounder(case, made), found.kept, truth),
            **_sink(truth),
            "dp_rel": (dp_error / dp).sqrt(),
            **ds_row_sums(truth, found),
            **_of_weights(truth, found, own),
            "dw_q_unbalanced": uneven.pop("dw_q"),
        })  # fmt: skip
        pv, out = biases(truth, found)
        pairs = zip(*(delta_errors(truth, *pair) for pair in errors.items()), strict=True)
        apart = [Imbalance.model_validate(x) for x in by_head(uneven)]
    ref = case.ref
    place = {"checkpoint": checkpoint, "step": step, "case": ref.case, "module": ref.module,
             "layer": ref.layer, "call": ref.call}  # fmt: skip
    heads = []
    for head, (fields, p, o, delta, u) in enumerate(
        zip(numbers, pv, out, pairs, apart, strict=True)
    ):
        reasons = nulls(truth, found, fields, pv=[p], out=[o], delta=delta, delta_unbalanced=[u])
        parts = {"pv": p, "out": o, "delta": delta, "delta_unbalanced": u, "nulls": reasons}
        heads.append(HeadRow.model_validate({**place, "head": head, **fields, **parts}))
    return Diagnosis(truth=truth, found=found, errors=errors, heads=tuple(heads))


def biases(truth: Truth, found: Computed) -> tuple[list[Bias], list[Bias]]:
    """The bias of P V by its own roundings, and of O, of every head."""
    exact, fmt, scale = truth.exact, truth.case.format, truth.exact.term_scale
    out = bias(found.out.double() - exact.out, exact.out, scale, truth.rows, fmt)
    if found.product is None or found.product_exact is None:
        return [Bias()] * truth.case.heads, out
    product = found.product_exact.double()
    if found.made.algorithm != "plain":  # there P-bar is exp(L - m) times P
        scale = scale * (exact.lse - found.kept.m.double()).exp()[..., None]
    return bias(found.product.double() - product, product, scale, truth.rows, fmt), out


def delta_numbers(truth: Truth, error: Tensor) -> dict[str, Tensor]:
    """The numbers of a `DeltaError`, [H] each, NaN where they are null."""
    rows = truth.rows
    return {
        "mean": mean(error, rows),
        "rms": rms(error, rows),
        "t": t_of(error, rows),
        "run": runs_of(error, rows).nan_to_num(-math.inf).amax(dim=0),
        "dw_q": truth.moved(_predicted(truth, error)),
    }


def delta_errors(truth: Truth, formula: Formula, error: Tensor) -> list[DeltaError]:
    """Of every head."""
    return [DeltaError(formula=formula, **x) for x in by_head(delta_numbers(truth, error))]


def _predicted(truth: Truth, error: Tensor) -> Tensor | None:
    """The error of dW_Q that an error of delta alone makes, by formula 2."""
    absolute = error * truth.size[:, None]
    return truth.weights(-truth.case.scale * absolute[..., None] * truth.PK)


def runs_of(error: Tensor, rows: Tensor) -> Tensor:
    """`DeltaError.run` of every sequence, [B, H]; NaN where it has no row or no error."""
    counted = torch.where(rows, error, 0.0)
    count = rows.sum(dim=-1).to(error.dtype)
    size = (counted.square().sum(dim=-1) / count).sqrt()
    return counted.cumsum(dim=-1).abs().amax(dim=-1) / (size * count.sqrt())


def zero_sums(truth: Truth) -> bool:
    """Whether rows of an exact dS sum to zero."""
    return truth.case.softcap is None and truth.case.sinks is None


def ds_row_sums(truth: Truth, found: Computed) -> Columns:
    """The sums of the rows of dS, [H] each; NaN where they are not zero to begin with."""
    sums = found.ds if zero_sums(truth) else torch.full_like(found.ds, math.nan)
    return {
        "ds_row_sum": rms(sums, truth.rows) / rms(found.ds_size, truth.rows),
        "ds_row_sum_t": t_of(sums, truth.rows),
    }


def _of_weights(truth: Truth, found: Computed, error: Tensor) -> Columns:
    """What hangs on W_Q, [H] each; NaN without a projection."""
    whole, part = truth.dw_q_error(found.dq), _predicted(truth, error)
    if truth.projection is None or whole is None or part is None or truth.dw_q is None:
        # `dw_q` and `dw_q_unbalanced` are named by their own records.
        return dict.fromkeys(OF_WEIGHTS[:-2], torch.full_like(truth.size, math.nan))
    return {
        **similarity(truth.projection, truth.PK.masked_fill(~truth.rows[..., None], 0.0)),
        "dw_q_error": truth.moved(whole),
        "dw_q_predicted": truth.moved(part),
        "dw_q_cos": (part * whole).flatten(1).sum(dim=-1) / (norm(part) * norm(whole)),
        "dw_q_norm": norm(truth.dw_q),
        **spectral(truth.projection, truth.case.heads),
    }


def _sink(truth: Truth) -> Columns:
    """The key that receives most probability, its share of the rows that see it, and its |V| over
    the median of the keys that anybody sees, mean over sequences; [H] each."""
    case, everywhere = truth.case, truth.received.sum(dim=0)  # [H, kv_len]
    key = everywhere.argmax(dim=-1)
    at = key[:, None]
    mass = (everywhere.gather(-1, at) / truth.seen_by.sum(dim=0).gather(-1, at))[:, 0]
    sizes = torch.linalg.vector_norm(case.v.double(), dim=-1)
    sizes = sizes.masked_fill(truth.exact.unseen, math.nan).repeat_interleave(case.group, dim=1)
    size = sizes.gather(-1, key[None, :, None].expand(len(sizes), -1, 1))[..., 0]
    return {
        "sink_key": key.double().masked_fill(mass.isnan(), math.nan),
        "sink_mass": mass,
        "sink_v": (size / sizes.nanmedian(dim=-1).values).nanmean(dim=0),
    }


# --- why a number is null ------------------------------------------------------------------------

OF_WEIGHTS = (
    *("similarity", "similarity_cos", "similarity_tokens", "spectral_norm", "spectral_ratio"),
    *("dw_q_error", "dw_q_predicted", "dw_q_cos", "dw_q_norm", "dw_q", "dw_q_unbalanced"),
)


def nulls(
    truth: Truth,
    found: Computed,
    fields: Mapping[str, float | None],
    **parts: Sequence[Record],
) -> dict[str, str]:
    """The reason of every number of one head that is null, by its name: `pv` where there is nothing
    of that record, `pv.t` where only its t is missing."""
    missing = {name for name, x in fields.items() if x is None}
    for name, records in parts.items():
        for numbers in map(vars, records):
            lacking = {f"{name}.{part}" for part, x in numbers.items() if x is None}
            missing |= {name} if numbers["mean"] is None else lacking

    def reason(name: str) -> str:
        last = name.rpartition(".")[-1]
        if last in OF_WEIGHTS and truth.projection is None:
            return "W_Q is not known: no single linear layer makes the queries"
        if fields["rows"] == 0:
            return "no query sees more than one key"
        if name.startswith("ds_row_sum") and not zero_sums(truth):
            return "under a soft cap, or with a sink, rows of dS do not sum to zero"
        if name == "pv" and found.product is None:
            return "the keys are split, and each part has a P V of its own"
        if last == "t" or name.endswith("_t"):
            return f"a t needs {FEWEST_BLOCKS} blocks of rows that do not all agree"
        return "what it is made of is not there or not finite, or what it is relative to is zero"

    return {name: reason(name) for name in sorted(missing)}
