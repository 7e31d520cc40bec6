"""Measures the errors of attention before anything is learned: every variant's kernel on
the golden run's own first attention calls, beside the truth and the golden run's kernel.

Distances of weights are effects. Errors of attention, in floors, are their cause, so that
a report shows both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import format_of, round_to, ulp
from numdev.kernels.reference.blocked import attend  # small: a compiler would take longer
from numdev.studies.training.report import AttentionOutputRow
from numdev.studies.training.variant_training import ODDS, Lane, largest_score

OF = ("golden", "flash", "attention_precision", "null_rounding", "variant")
"""Roles whose attention computes something else from the same q, k and v. In the others
q, k and v differ."""

SHARP = 8.0  # the least score of the largest, for calls that are made sharper


def output_rows(
    lanes: Sequence[Lane], golden: Lane, calls: Sequence[AttentionCase], seed: int
) -> Iterator[AttentionOutputRow]:
    """Yields a row for each lane (a variant in training) whose role is in OF and whose
    format is the golden lane's, in the order of `lanes`. `calls`: the golden lane's
    attention calls of one batch, at least one. Raises MeasurementError, which names the
    variant, where a kernel fails."""
    truths = [attend(case).out for case in calls]
    base = golden.attend_calls(calls)
    sharp = [with_larger_scores(case) for case in calls]
    sharp_truths = [attend(case).out for case in sharp]
    for lane in lanes:
        variant = lane.variant
        if variant.role in OF and variant.format == golden.variant.format:
            outs = base if lane is golden else lane.attend_calls(calls)
            row = output_row(outs, base, truths, seed, variant.name)
            error = error_in_floors(lane.attend_calls(sharp), sharp_truths)
            yield row.model_copy(update={"sharp": error})


def with_larger_scores(case: AttentionCase) -> AttentionCase:
    """Returns the call with q times a power of two, which is exact, so that the largest
    score is at least SHARP. Returns the call itself where the largest score is SHARP or
    more, 0, infinite or NaN. Before anything is learned scores are near zero, and no
    output shows a wrong scale."""
    largest = float(largest_score(case))
    if not 0.0 < largest < SHARP:
        return case
    power = 2.0 ** math.ceil(math.log2(SHARP / largest))
    return dataclasses.replace(case, q=case.q * power)


def error_in_floors(outs: Sequence[Tensor], truths: Sequence[Tensor]) -> float | None:
    """Returns the rms error of outputs over all calls, as a multiple of the rms error of
    rounding the exact outputs (`truths`) once to the outputs' dtype. None where an error
    is not finite, where rounding changes nothing, and without calls."""
    errors = floors = 0.0
    for out, truth in zip(outs, truths, strict=True):
        floor = round_to(truth, format_of(out.dtype)).double()
        errors += float((out.double() - truth).square().sum())
        floors += float((floor - truth).square().sum())
    value = math.sqrt(errors / floors) if floors > 0 else math.nan
    return value if math.isfinite(value) else None


def output_row(
    outs: Sequence[Tensor],
    base: Sequence[Tensor],
    truths: Sequence[Tensor],
    seed: int,
    variant: str,
) -> AttentionOutputRow:
    """Returns the errors of a variant's outputs over all calls together, in fp64, but
    `sharp`, which stays None. Every number is None where an element of `outs` is not
    finite. So is one that comes out as NaN or infinity, since an element of `base` or
    `truths` is not finite, and one whose denominator is 0. `nulls` has the reason.
    `outs`, `base`, `truths`: for each call the variant's output, the golden run's, and
    the exact one, [batch, heads, length, head_dim] each; the first two in one format."""
    sums = torch.zeros(8, dtype=torch.float64)
    elements = nonfinite = 0
    for out, golden, truth in zip(outs, base, truths, strict=True):
        fmt = format_of(out.dtype)
        elements += out.numel()
        nonfinite += int((~out.isfinite()).sum())
        error, difference = out.double() - truth, out.double() - golden.double()
        floor = round_to(truth, fmt).double() - truth
        beyond_floor = error - floor
        parts = (
            error.square(),
            difference.square(),
            floor.square(),
            ulp(golden, fmt).square(),
            beyond_floor * truth.sign(),
            ulp(truth, fmt),
            beyond_floor * truth,
            truth.square(),
        )
        sums += torch.stack([part.sum() for part in parts]).cpu()
    errors, differences, floors, spacings, away, ulps, along, squares = sums.tolist()
    values: dict[str, float | None] = {
        "floors": math.sqrt(errors / floors) if floors else None,
        "from_golden": math.sqrt(differences / spacings * ODDS) if spacings else None,
        "bias": away / ulps if ulps else None,
        "slope": along / squares if squares else None,
    }
    nulls = {}
    for name, value in values.items():
        if nonfinite or (value is not None and not math.isfinite(value)):
            nulls[name] = "not finite"
        elif value is None:
            nulls[name] = "the floor has no error"
    values |= dict.fromkeys(nulls)
    return AttentionOutputRow(
        seed=seed,
        variant=variant,
        calls=len(outs),
        elements=elements,
        nonfinite=nonfinite,
        floors=values["floors"],
        from_golden=values["from_golden"],
        bias=values["bias"],
        slope=values["slope"],
        nulls=nulls,
    )
