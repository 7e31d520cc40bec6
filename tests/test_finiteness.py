"""What of a call's inputs is not finite, as it came and in other formats."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import all_finite, format_named
from numdev.metrics.finiteness import count_nonfinite
from numdev.operations.attention.finiteness import nonfinite_inputs, overflowing_inputs

FORMATS = [
    format_named(n) for n in ("float64", "float32", "bfloat16", "float16", "float8_e5m2")
]


def case_of(**changed: Any) -> AttentionCase:
    q, k, v = (torch.ones(1, 2, 3, 4) for _ in range(3))
    case = AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=1.0)
    return dataclasses.replace(case, **changed)


def ones_but(*values: float, shape: tuple[int, ...] = (1, 2, 3, 4)) -> Tensor:
    x = torch.ones(shape)
    x.view(-1)[: len(values)] = torch.tensor(values)
    return x


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(("changed", "counts"), [
    ({}, {}),
    ({"q": ones_but(NAN)}, {"q": 1}),
    ({"k": ones_but(INF, -INF, NAN), "v": ones_but(INF)}, {"k": 3, "v": 1}),
    ({"mask": ones_but(-INF, -INF, shape=(3, 3))}, {}),
    ({"mask": ones_but(-INF, INF, NAN, shape=(3, 3))}, {"mask": 2}),
    ({"mask": torch.ones(3, 3, dtype=torch.bool)}, {}),
    ({"grad_out": ones_but(NAN, NAN)}, {"grad_out": 2}),
    ({"sinks": torch.tensor([0.0, INF])}, {"sinks": 1}),
])  # fmt: skip
def test_elements_of_inputs_that_are_not_finite_are_counted(
    changed: dict[str, Tensor], counts: dict[str, int]
) -> None:
    """By tensor; -inf in an additive mask hides, and is sound."""
    assert nonfinite_inputs(case_of(**changed)) == counts


@pytest.mark.parametrize(("changed", "counts"), [
    ({}, {}),
    # 65504 + 16 is the tie between the largest number of float16 and the next, which is
    # infinity.
    ({"q": ones_but(65519.0)}, {"float8_e5m2": 1}),
    ({"q": ones_but(-65520.0)}, {"float16": 1, "float8_e5m2": 1}),
    ({"q": ones_but(1e5, NAN, INF), "v": ones_but(1e6)}, {"float16": 2, "float8_e5m2": 2}),
    ({"k": ones_but(3.4e38)}, {"bfloat16": 1, "float16": 1, "float8_e5m2": 1}),
    ({"mask": ones_but(-3.4e38, 1e5, shape=(3, 3))}, {}),
    ({"grad_out": ones_but(NAN)}, {}),
])  # fmt: skip
def test_finite_elements_that_a_format_cannot_hold_are_counted(
    changed: dict[str, Tensor], counts: dict[str, int]
) -> None:
    """By format, over all tensors but the mask, which saturates."""
    assert overflowing_inputs(case_of(**changed), FORMATS) == counts


@pytest.mark.parametrize(("tensors", "finite"), [
    ([], True),
    ([torch.empty(0)], True),
    ([ones_but(2.0), torch.ones(2, dtype=torch.float16)], True),
    ([ones_but(2.0), ones_but(NAN)], False),
    ([ones_but(INF)], False),
    ([ones_but(-INF).requires_grad_()], False),
    ([ones_but(INF, -INF).double()], False),
    # Finite, and their sum is not
    ([torch.full((4,), 6e4, dtype=torch.float16)], True),
    ([torch.full((4,), -3e38), torch.full((4,), 1e308, dtype=torch.float64)], True),
    ([torch.full((4,), 3e38), ones_but(NAN)], False),
    ([ones_but(2.0).to(torch.float8_e5m2)], True),
    ([ones_but(INF).to(torch.float8_e5m2)], False),
])  # fmt: skip
def test_one_element_that_is_not_finite_is_seen(
    tensors: list[Tensor], finite: bool
) -> None:
    """Of any tensor and dtype, whatever the elements add up to."""
    assert all_finite(tensors) is finite


def test_a_tensor_of_any_dtype_and_size_is_counted() -> None:
    """A stored weight may be of 8 bits, or empty."""
    assert count_nonfinite(torch.empty(0)) == 0
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn):
        assert count_nonfinite(torch.tensor([NAN, 1.0, NAN]).to(dtype)) == 2
