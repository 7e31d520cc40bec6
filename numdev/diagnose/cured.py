"""What cures change, and what shows of a real kernel, on the call of a diagnosis.

A cure is a change of the recipe (`numdev.diagnose.cures`); the inputs and the truth stay. A
kernel's sites cannot be reached, so of it there is what its output and its gradients tell: delta is
that of its own output, summed in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.audit.attempt import Failure, attempt
from numdev.diagnose.breaks import broken
from numdev.diagnose.call import Diagnosis, biases, ds_row_sums
from numdev.diagnose.cures import CURES, Cure
from numdev.diagnose.delta import delta_error, delta_errors
from numdev.diagnose.nulls import nulls
from numdev.diagnose.recipe import Computed, computed, products_of
from numdev.diagnose.report import Bias, CureRow, KernelRow
from numdev.diagnose.statistics import Columns, bias, by_head, mean, rms, t_of
from numdev.diagnose.truth import Truth
from numdev.diagnose.weights import norm
from numdev.errors import NumdevError
from numdev.kernels import Kernel, Output
from numdev.kernels.backward import upstream
from numdev.kernels.emulation.rounding import plain_arithmetic
from numdev.kernels.output import GRADIENTS

NONE = "none"
NUMBERS = ("delta_mean", "delta_rms", "delta_t", "ds_row_sum", "dq_rel", "dk_rel", "dv_rel",
           "dw_q_error")  # fmt: skip


def cured(diagnosis: Diagnosis, cures: Mapping[str, Cure] = CURES) -> tuple[CureRow, ...]:
    """The attention as it is and with each cure, one row for every head. Where a cure contradicts
    the recipe, or cannot be computed, all is null and `nulls` says why."""
    rows = list(_rows(diagnosis, NONE, {}, diagnosis.found))
    for name, cure in cures.items():
        try:
            found = computed(diagnosis.case, cure.of(diagnosis.made))
        except NumdevError as error:
            rows += _refused(diagnosis, name, cure.options, str(error))
        else:
            rows += _rows(diagnosis, name, cure.options, found)
    return tuple(rows)


def seen_from_outside(
    diagnosis: Diagnosis, kernel: Kernel, options: Mapping[str, Any]
) -> tuple[KernelRow, ...]:
    """A kernel's forward and backward pass on the call, one row for every head; where it refuses
    the call or fails, the rows say why. Whether this machine has what the kernel needs
    (`Kernel.missing`) is for the caller to ask."""
    truth = diagnosis.truth
    found = attempt(kernel, truth.case, options, gradients=True)
    here: dict[str, Any] = {"kernel": kernel.name, "options": dict(options)}
    if isinstance(found, Failure):
        here |= {"status": found.status, "reason": found.reason}
        parts: list[dict[str, Any]] = [{}] * truth.case.heads
    else:
        here |= {"ran": found.ran}
        with torch.no_grad(), plain_arithmetic(truth.case.q.device):
            parts = _from_outside(truth, found)
    return tuple(
        KernelRow.model_validate({**diagnosis.place(head), **here, **part})
        for head, part in enumerate(parts)
    )


def _rows(
    diagnosis: Diagnosis, name: str, options: Mapping[str, Any], found: Computed
) -> Iterator[CureRow]:
    truth = diagnosis.truth
    with torch.no_grad(), plain_arithmetic(truth.case.q.device):
        numbers = by_head(_numbers(truth, found))
        pv, out = biases(truth, found)
    for head, (fields, p, o) in enumerate(zip(numbers, pv, out, strict=True)):
        null = nulls(truth, found, fields, {"pv": p, "out": o})
        fields.pop("rows")
        why = broken(truth, found, head) if fields["nonfinite"] else ""
        yield CureRow.model_validate({
            **diagnosis.place(head), "cure": name, "options": dict(options), **fields,
            "pv": p, "out": o, "nulls": null, "broken": why,
        })  # fmt: skip


def _refused(
    diagnosis: Diagnosis, name: str, options: Mapping[str, Any], reason: str
) -> Iterator[CureRow]:
    for head in range(diagnosis.case.heads):
        yield CureRow.model_validate({
            **diagnosis.place(head), "cure": name, "options": dict(options), "pv": Bias(),
            "out": Bias(), "nulls": dict.fromkeys(("pv", "out", *NUMBERS), reason),
        })  # fmt: skip


def _numbers(truth: Truth, found: Computed) -> Columns:
    rows, error = truth.rows, delta_error(truth, found.delta)
    broken = [_nonfinite(truth, x) for x in (found.out, found.dq, found.dk, found.dv)]
    return {
        "rows": rows.sum(dim=(0, 2)),
        "delta_mean": mean(error, rows),
        "delta_rms": rms(error, rows),
        "delta_t": t_of(error, rows),
        "ds_row_sum": ds_row_sums(truth, products_of(found))["ds_row_sum"],
        **{f"{name}_rel": _relative(truth, name, getattr(found, name)) for name in GRADIENTS},
        "dw_q_error": _dw_q_error(truth, found.dq),
        "nonfinite": torch.stack(broken).sum(dim=0),
    }


def _from_outside(truth: Truth, found: Output) -> list[dict[str, Any]]:
    assert found.dq is not None
    exact, out = truth.exact, found.out.detach().double()
    delta = (upstream(truth.case).double() * out).sum(dim=-1)
    numbers = by_head({
        "dq_rel": _relative(truth, "dq", found.dq),
        "dw_q_error": _dw_q_error(truth, found.dq),
    })  # fmt: skip
    error = out - exact.out
    outs = bias(error, exact.out, exact.term_scale, truth.rows, truth.case.format)
    deltas = delta_errors(truth, "dO*O", delta_error(truth, delta))
    return [
        {**fields, "out": o, "delta": d} for fields, o, d in zip(numbers, outs, deltas, strict=True)
    ]


def _relative(truth: Truth, name: str, found: Tensor) -> Tensor:
    """[H]: |error| / |exact| of a gradient. Of dk and dv a query head has that of its kv head."""
    exact = _of_query_heads(truth, getattr(truth.exact, name)).transpose(0, 1)
    error = _of_query_heads(truth, found.detach().double()).transpose(0, 1) - exact
    return norm(error) / norm(exact)


def _nonfinite(truth: Truth, x: Tensor) -> Tensor:
    """[H]: how many elements are NaN or infinite."""
    return _of_query_heads(truth, ~x.isfinite()).sum(dim=(0, 2, 3))


def _of_query_heads(truth: Truth, x: Tensor) -> Tensor:
    """What belongs to kv heads, once for every query head; other tensors as they are."""
    repeats = truth.case.heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _dw_q_error(truth: Truth, dq: Tensor) -> Tensor:
    whole = truth.weights(dq.detach().double() - truth.exact.dq)
    if whole is None or truth.dw_q is None:
        return torch.full_like(truth.size, math.nan)
    return norm(whole) / norm(truth.dw_q)
