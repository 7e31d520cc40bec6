"""What cures change in a diagnosis, and what of it a real kernel shows from outside."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_chain import (
    assert_same,
    drawn,
    numbers,
    plain_projection,
    tying,
)

from numdev.cases import AttentionCase
from numdev.diagnose.chain import Diagnosis, diagnosed
from numdev.diagnose.cures import CURES, NONE, Cure, cured, seen_from_outside
from numdev.diagnose.report import CureRow
from numdev.kernels import Kernel, Output, find
from numdev.kernels.emulation.recipe import recipe


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


def test_gradients_err_as_those_of_the_kernel(found: Diagnosis, rows: tuple[CureRow, ...]) -> None:
    """|error| / |exact| of dq, dk and dv of `emulated`; of a kv head for each that reads it."""
    case = found.truth.case
    given, exact = (find(n).gradients(case, **o) for n, o in
                    (("emulated", {"preset": "qiu2025"}), ("reference", {})))  # fmt: skip
    for head in range(4):
        expected = []
        for name, place in (("dq", head), ("dk", head // 2), ("dv", head // 2)):
            a, b = (getattr(x, name)[:, place].double() for x in (given, exact))
            expected.append(float((a - b).norm() / b.norm()))
        assert_same(numbers(of(rows, NONE, head), "dq_rel", "dk_rel", "dv_rel"), expected)


def test_a_contradiction_has_its_reason() -> None:
    """Plain attention has no rounded row sum to take."""
    case = drawn(q_len=12, kv_len=12)
    row = of(cured(diagnosed(case, recipe("eager"))), "l from rounded P", 1)
    assert row.pv.mean is row.out.mean is row.delta_rms is None
    assert "divides P by l" in (row.reason or "")
    assert row.options == {"l_from": "rounded"}


def test_where_a_cure_breaks_it_is_counted() -> None:
    """Large tied scores: the stabilised softmax loses every row, of O, dq, dk and dv."""
    case = dataclasses.replace(drawn(q_len=6, kv_len=6), scale=1.0)
    ones = torch.ones_like(case.q)
    case = dataclasses.replace(case, q=ones * 8, k=ones * 8)  # all scores 512
    rows = cured(diagnosed(case, recipe("qiu2025")))
    broken = of(rows, "stabilised, exact ties")
    assert broken.nonfinite == 4 * 6 * 8
    assert broken.out.mean is broken.dq_rel is broken.reason is None
    assert of(rows, NONE).nonfinite == 0


def test_delta_from_dp_makes_rows_of_ds_sum_to_zero() -> None:
    """Under qiu2025 too, where dS itself is not rounded: that takes l in fp32 and products in fp32
    beside the formula, each of which alone leaves rows that do not."""
    case = drawn(q_len=32, kv_len=32)
    case = dataclasses.replace(case, v=case.v.abs() + 1, grad_out=case.grad_out.abs())  # type: ignore[union-attr]
    made = recipe("qiu2025", sites={"ds": "exact"})
    options = CURES["delta from dP"].options
    less = {name: {n: x for n, x in options.items() if n != name} for name in options}
    parts = {name: Cure(breaks="", options=rest) for name, rest in less.items()}
    rows = cured(diagnosed(case, made), {**parts, "all": CURES["delta from dP"]})
    for head in range(case.heads):
        sums = {name: of(rows, name, head).ds_row_sum or 0.0 for name in (NONE, "all", *parts)}
        whole = sums.pop("all")
        assert whole < 1e-5
        assert min(sums.values()) > 20 * whole


# --- kernels -------------------------------------------------------------------------------------


def test_a_kernel_that_cannot_or_does_not_has_its_reason(found: Diagnosis) -> None:
    """Refused is skipped, an exception is failed; one row for each head all the same."""

    def raises(case: AttentionCase) -> Output:
        raise ValueError("no")

    forward_only = dataclasses.replace(find("floor"), name="forward", backward=None)
    for kernel, status, reason in (
        (Kernel(name="mine", function=raises), "failed", "ValueError: no"),
        (forward_only, "skipped", "it has no backward"),
    ):
        rows = seen_from_outside(found, kernel, {})
        assert [row.head for row in rows] == [0, 1, 2, 3]
        assert {(row.status, row.reason) for row in rows} == {(status, reason)}
        assert all(row.out.mean is row.delta is row.dq_rel is None for row in rows)
