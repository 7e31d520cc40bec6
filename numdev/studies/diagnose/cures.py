"""Computes a call with cures of biased rounding and with real kernels, for its diagnosis.

A cure changes one thing in an attention: what Qiu & Yao (arXiv 2510.04212) tried, what
follows from their chain, and what others have proposed. It is options of the kernel
`emulated`. The rounding sites of a real kernel are out of reach: it is measured by its
output and its gradients, with delta that of its own output, summed in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numdev.errors import NumdevError
from numdev.kernels import Kernel
from numdev.kernels.emulation.recipe import changed
from numdev.kernels.emulation.rounding import plain_arithmetic
from numdev.kernels.output import upstream
from numdev.studies.audit.isolation import Failure, attempt
from numdev.studies.diagnose.bias_chain import Diagnosis
from numdev.studies.diagnose.exact_and_rounded_passes import (
    Computed,
    Truth,
    rounded_passes,
)
from numdev.studies.diagnose.head_error_means import (
    Numbers,
    bias_and_t,
    mean_by_head,
    norm_by_head,
    numbers_by_head,
    t_by_head,
)
from numdev.studies.diagnose.report import CureRow, KernelRow

NONE = "none"


class Cure(NamedTuple):
    """A change of one thing in an attention, which may remove a bias of its roundings."""

    breaks: str  # where it fails, or what it costs
    options: Mapping[str, Any]  # of `emulated`


OTHER_SOFTMAX: Mapping[str, Cure] = {
    # The stabilised softmax of the paper's first runs, and of its later ones.
    "stabilised, exact ties": Cure(
        "not invariant under a shift of the scores; rows are lost where (beta - 1) "
        "r_m passes what P's format holds; nothing changes at r_m = 0",
        {"softmax": "stabilised", "beta": 7.0, "tie_tolerance": 0.0},
    ),
    "stabilised": Cure(
        "as with exact ties, but only above a larger r_m",
        {"softmax": "stabilised", "beta": 2.0, "tie_tolerance": 1e-3},
    ),
    # P times a number of the row's own, one of 64 between 1/2 and 1 with odd
    # significands, which O / l takes back: no P is 1, whatever is tied.
    "guarded": Cure(
        "changes how P V is rounded, not the last cast of O; rows at one position "
        "have the same number in all heads and batches; P is normalised in backward "
        "as without this cure",
        {"softmax": "guarded"},
    ),
    "l from rounded P": Cure(
        "costs nothing; leaves the error of the product P V as it is",
        {"l_from": "rounded"},
    ),
}

_PV = dict.fromkeys(("pv", "accumulator", "state", "merge", "normalised"), "float32")

WIDER_FORMAT: Mapping[str, Cure] = {
    # P V, its sum over tiles and its normalisation; O is still cast.
    "P V in fp32": Cure("an accumulator twice as large", _PV),
    "O in fp32": Cure(
        "O is stored twice, or in fp32", {**_PV, "out": "float32", "delta_o": "float32"}
    ),
    "dP in fp32": Cure(
        "what fused kernels do; a stored dP needs twice the memory", {"dp": "float32"}
    ),
}

CURES: Mapping[str, Cure] = {
    **OTHER_SOFTMAX,
    **WIDER_FORMAT,
    # delta = rowsum(dP o P): from the dP and P that it is subtracted from, in fp32, as
    # are S - m and l, so that P sums to 1 and each row of dS to zero.
    "delta from dP": Cure(
        "needs all of a row before any dS: one more pass over the keys",
        {
            "delta_from": "dP*P",
            "delta_product": "wide",
            "exponent": "wide",
            "row_sum": "wide",
        },
    ),
    "stochastic rounding": Cure(
        "no bias, but larger errors: up to twice where values lie anywhere, many "
        "times where they lie next to a number of the format, as at ties; l and the S "
        "of forward and backward no longer fit; not the same bits twice",
        {"rounding": "stochastic"},
    ),
}


def cure_rows(
    diagnosis: Diagnosis, cures: Mapping[str, Cure] = CURES
) -> tuple[CureRow, ...]:
    """Returns the rows of the attention as it is (cure `none`), then those of each cure,
    one for every head. Where a cure contradicts the recipe, or cannot be computed, its
    rows have the reason and no numbers."""
    truth, recipe = diagnosis.truth, diagnosis.rounded.recipe
    rows = []
    for name, cure in {NONE: Cure("", {}), **cures}.items():
        options = dict(cure.options)
        try:
            rounded = (
                rounded_passes(truth.case, changed(recipe, **cure.options))
                if name in cures
                else diagnosis.rounded
            )
        except NumdevError as error:
            why = str(error)
            rows += [
                CureRow(**h.place, cure=name, options=options, reason=why)
                for h in diagnosis.heads
            ]
            continue
        numbers = _seen_numbers(truth, rounded.out, rounded.dq, rounded.delta)
        for head, columns, count in zip(
            diagnosis.heads,
            numbers,
            _count_nonfinite(rounded, truth.case.heads),
            strict=True,
        ):
            fields = {"cure": name, "options": options, "nonfinite": count}
            rows.append(CureRow.model_validate({**head.place, **fields, **columns}))
    return tuple(rows)


def _count_nonfinite(rounded: Computed, heads: int) -> list[int]:
    """Returns for each query head how many elements of O and the gradients are NaN or
    infinite. Elements of dK and dV count for every query head of their group."""
    counts = [
        (~x.isfinite()).sum((0, 2, 3)).repeat_interleave(heads // x.shape[1])
        for x in (rounded.out, rounded.dq, rounded.dk, rounded.dv)
    ]
    total: list[int] = torch.stack(counts).sum(dim=0).tolist()
    return total


def kernel_rows(
    diagnosis: Diagnosis, kernel: Kernel, options: Mapping[str, object]
) -> tuple[KernelRow, ...]:
    """Runs a kernel's forward and backward pass on the call and returns one row for every
    head. Where the kernel refuses the call or fails, rows have the reason and no numbers;
    nothing is raised. Whether the kernel can run on this system is not checked."""
    truth = diagnosis.truth
    output = attempt(kernel, truth.case, options, gradients=True)
    chosen = dict(options)
    if isinstance(output, Failure):
        return tuple(
            KernelRow(**h.place, kernel=kernel.name, options=chosen, reason=output.reason)
            for h in diagnosis.heads
        )
    assert output.dq is not None
    out = output.out.detach().double()
    delta = (upstream(truth.case).double() * out).sum(dim=-1)
    numbers = _seen_numbers(truth, out, output.dq, delta)
    fields = {"kernel": kernel.name, "options": chosen, "ran": output.ran}
    return tuple(
        KernelRow.model_validate({**head.place, **fields, **columns})
        for head, columns in zip(diagnosis.heads, numbers, strict=True)
    )


def _seen_numbers(truth: Truth, out: Tensor, dq: Tensor, delta: Tensor) -> list[Numbers]:
    """Returns the numbers of a `SeenRow` for every head, by name. `out`, `dq`: as
    computed, [B, H, q_len, head_dim]; `delta`: [B, H, q_len]."""
    with torch.no_grad(), plain_arithmetic(truth.case.q.device):
        exact, rows = truth.exact, truth.rows
        error = truth.delta_error(delta, exact.delta)
        off = out.double() - exact.out
        dq_error = (dq.detach().double() - exact.dq).transpose(0, 1)
        return numbers_by_head(
            {
                "delta_mean": mean_by_head(error, rows),
                "delta_t": t_by_head(error, rows),
                "out_bias": bias_and_t(
                    off, exact.out, exact.term_scale, rows, truth.case.format
                )[0],
                "dq_rel": norm_by_head(dq_error) / norm_by_head(exact.dq.transpose(0, 1)),
                "dw_q_error": truth.relative_size(truth.dw_q_error(dq)),
            }
        )
