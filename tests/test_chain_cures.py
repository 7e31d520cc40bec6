"""What cures change in a diagnosis, and what of it a real kernel shows from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_chain import (
    assert_same,
    drawn,
    plain_projection,
    tying,
)

from numdev.cases import AttentionCase
from numdev.diagnose.chain import Diagnosis, diagnosed
from numdev.diagnose.cures import CURES, NONE, cured, seen_from_outside
from numdev.diagnose.report import CureRow
from numdev.kernels import Kernel, Output, find
from numdev.kernels.emulation.recipe import changed, recipe


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    case = tying(heads=4, kv_heads=2, is_causal=True)
    return diagnosed(case, recipe("qiu2025"), plain_projection(case), checkpoint="c", step=7)


@pytest.fixture(scope="module")
def rows(found: Diagnosis) -> tuple[CureRow, ...]:
    return cured(found)


def of(rows: tuple[CureRow, ...], cure: str, head: int = 0) -> CureRow:
    (row,) = (row for row in rows if (row.cure, row.head) == (cure, head))
    return row


def test_dq_errs_as_that_of_the_kernel(found: Diagnosis, rows: tuple[CureRow, ...]) -> None:
    """|error| / |exact| of dq of `emulated`."""
    case = found.truth.case
    given, exact = (find(n).gradients(case, **o).dq.double() for n, o in
                    (("emulated", {"preset": "qiu2025"}), ("reference", {})))  # fmt: skip
    for head in range(4):
        a, b = given[:, head], exact[:, head]
        assert_same([of(rows, NONE, head).dq_rel], [float((a - b).norm() / b.norm())])


def test_a_contradiction_has_its_reason() -> None:
    """Plain attention has no rounded row sum to take."""
    case = drawn(q_len=12, kv_len=12)
    row = of(cured(diagnosed(case, recipe("eager"))), "l from rounded P", 1)
    assert row.out_bias is row.delta_mean is None
    assert "divides P by l" in (row.reason or "")
    assert row.options == {"l_from": "rounded"}


def test_where_a_cure_breaks_it_is_counted() -> None:
    """Large tied scores of one kv head: the stabilised softmax loses every row of its two query
    heads, of O, dq, dk and dv, and none of the others'."""
    case = dataclasses.replace(drawn(q_len=6, kv_len=6, heads=4, kv_heads=2), scale=1.0)
    q, k = torch.ones_like(case.q) * 8, torch.ones_like(case.k)
    k[:, 1] = 8  # scores 64 and 512
    rows = cured(diagnosed(dataclasses.replace(case, q=q, k=k * 1.0), recipe("qiu2025")))
    counts = [of(rows, "stabilised", head).nonfinite for head in range(4)]
    assert counts == [0, 0, 4 * 6 * 8, 4 * 6 * 8]
    broken = of(rows, "stabilised", 3)
    assert broken.out_bias is broken.dq_rel is broken.reason is None
    assert of(rows, NONE, 3).nonfinite == 0


def test_delta_from_dp_makes_rows_of_ds_sum_to_zero() -> None:
    """Under qiu2025 too, where dS itself is not rounded: that takes l in fp32 and products in fp32
    beside the formula, each of which alone leaves rows that do not."""
    case = drawn(q_len=32, kv_len=32)
    case = dataclasses.replace(case, v=case.v.abs() + 1, grad_out=case.grad_out.abs())  # type: ignore[union-attr]
    made = recipe("qiu2025", sites={"ds": "exact"})
    options = CURES["delta from dP"].options

    def sums(options: Mapping[str, Any]) -> list[float]:
        rows = diagnosed(case, changed(made, **options)).heads
        return [row.ds_row_sum or 0.0 for row in rows]

    whole = max(sums(options))
    assert whole < 1e-5
    for left_out in options:
        assert min(sums({n: x for n, x in options.items() if n != left_out})) > 20 * whole


# --- kernels -------------------------------------------------------------------------------------


def test_a_kernel_that_cannot_or_does_not_has_its_reason(found: Diagnosis) -> None:
    """One row for each head all the same."""

    def raises(case: AttentionCase) -> Output:
        raise ValueError("no")

    forward_only = dataclasses.replace(find("floor"), name="forward", backward=None)
    for kernel, reason in (
        (Kernel(name="mine", function=raises), "ValueError: no"),
        (forward_only, "it has no backward"),
    ):
        rows = seen_from_outside(found, kernel, {})
        assert [row.head for row in rows] == [0, 1, 2, 3]
        assert {row.reason for row in rows} == {reason}
        assert all(row.out_bias is row.delta_mean is row.dq_rel is None for row in rows)
