"""The search for rows of a call that stand out, where only a sample of its rows is
measured.

A sample seldom has a fault of a few rows. A kernel runs whole, so all its rows are
compared with a second output of the call: on CUDA that of another fused operator, where
one takes the call, else plain attention in float32. The query rows that differ most, and
the keys whose dk and dv do, are measured exactly, as a stratum of their own. They are
chosen by rank: a sound kernel has such rows too, and in it they are sound."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import empty_rows
from numdev.errors import one_line
from numdev.kernels import Output, find
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.row_samples import Strata
from numdev.metrics.yardstick import finite, row_norm, widened
from numdev.studies.audit.deviation_rows import FAILS_ONE_ROW
from numdev.studies.audit.isolation import attempt
from numdev.studies.audit.prepared_attention import KV_TENSORS, Bench

SUSPECTS = 32  # rows of a call, and as many keys
# Of a selection, whose rows these are
BY = {"queries": ("out", "lse", "dq"), "keys": KV_TENSORS}
FUSED = {"cuda": ("sdpa-efficient", "sdpa-flash"), "cpu": ()}


def screened(bench: Bench, output: Output) -> Bench:
    """Returns the bench with more rows measured: beside the sampled query rows and keys,
    up to SUSPECTS of each, those in which the output differs most from a second
    computation of the call. Keys are added where not all are measured and the output has
    dk. Where that fails, the same bench with the reason in `unscreened`."""
    select, strata, places = bench.selection, dict[str, Strata](), dict[str, Any]()
    try:
        with bench.watch("reference"):
            beside = second(bench, output)
            for axis, tensors in BY.items():
                drawn, length = getattr(select, axis), select.length_of(tensors[0])
                if len(drawn) < length and getattr(output, tensors[0]) is not None:
                    suspicions = suspicion(bench, output, beside, tensors)
                    rows = suspicions.argsort(descending=True, stable=True)[:SUSPECTS]
                    places[axis], why = Strata.joined(drawn, rows, length)
                    strata |= dict.fromkeys(tensors, why)
            select = dataclasses.replace(select, strata=strata, **places)
            exact = select.exact(select.case)
        return Bench.of(select, bench.format, exact, bench.watch)
    except FAILS_ONE_ROW as error:
        return dataclasses.replace(
            bench, unscreened=f"rows were not screened: {one_line(error)}"
        )


def suspicion(
    bench: Bench, output: Output, beside: Output | Reference, tensors: Sequence[str]
) -> Tensor:
    """Returns how far each row of the whole call is from the second output, fp32 [rows].
    The distance is relative to the row's size and the head's median size, and a multiple
    of the head's median of that; of the tensors, heads and sequences the largest counts.
    0 where the second output is not finite and in rows that see no key; infinite where
    the first one alone is not finite. `beside`: the second output; `tensors`: their
    names, of which at least one besides lse must be in `output`."""
    select, most = bench.selection, []
    for tensor in (n for n in tensors if n != "lse" and getattr(output, n) is not None):
        x, y = (
            select.select(getattr(o, tensor), tensor, all_rows=True)
            for o in (output, beside)
        )
        y = widened(y).float()
        size, distance = row_norm(y), row_norm(widened(x).float() - y)
        relative = distance / (size + size.nanmedian(dim=-1, keepdim=True).values)
        right = (distance == 0) | ~finite(size)
        if tensor not in KV_TENSORS:
            right |= empty_rows(select.restricted(bench.case, all_rows=True))
        relative = _nan_as_infinity(relative.masked_fill(right, 0.0))
        usual = relative.median(dim=-1, keepdim=True).values
        # The median is infinite too where most rows are not finite
        multiple = relative / usual.clamp_min(bench.format.unit_roundoff / 16)
        most.append(_nan_as_infinity(multiple).amax(dim=(0, 1)))
    return torch.stack(most).amax(dim=0)


def _nan_as_infinity(x: Tensor) -> Tensor:
    """Returns x with infinity in place of each NaN."""
    return x.masked_fill(x.isnan(), math.inf)


def second(bench: Bench, output: Output) -> Output | Reference:
    """Returns the call, in all its rows, computed by another operator than `output`'s: on
    CUDA the first of FUSED that runs it as another operator (an Output, of all heads),
    else plain attention in float32 (a Reference, of the measured heads alone). FUSED is
    not tried for a mask, a window or a causal offset."""
    case, trained = bench.case, bench.selection.gradients
    square = case.mask is None and case.window is None and not case.causal_offset
    # Others get a mask of all scores
    for name in FUSED[case.q.device.type] if square else ():
        other = attempt(find(name), case, {}, gradients=trained)
        if isinstance(other, Output) and other.ran != output.ran:
            return other
    return bench.in_float32
