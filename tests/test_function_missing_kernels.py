"""A reference that calls an operator without a kernel of the format on this device is
judged by what the operator computes in float32, and the report says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import numdev
from numdev.operations.function.operators_without_kernel import MissingKernels


@torch.library.custom_op("numdev_tests::third", mutates_args=())
def third(x: Tensor) -> Tensor:
    """A third of x; PyTorch's words where x is in bfloat16."""
    if x.dtype == torch.bfloat16:
        raise RuntimeError("\"third\" not implemented for 'BFloat16'")
    return x / 3


third.register_fake(torch.empty_like)
third.register_autograd(lambda _, back: third(back))


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return third(x) * weight


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (32, 1))
    return x.requires_grad_(), weight


def in_float32(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() / 3 * weight.float()).to(x.dtype)


def times_a_hundredth_more(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() / 3 * weight.float() * 1.01).to(x.dtype)


def test_the_reference_without_a_kernel_judges_and_the_report_names_the_operator() -> (
    None
):
    result = numdev.check(
        in_float32, reference=reference, inputs=inputs, formats="bfloat16"
    )
    assert result.passed
    assert {row.tensor for row in result.report.rows} == {
        "output",
        "x_grad",
        "weight_grad",
    }
    [note] = [x for x in result.notes if "kernel of" in x]
    assert note == (
        "PyTorch has no bfloat16 kernel of third on cpu: there the reference computes in "
        "float32, and rounds once."
    )


def test_a_wrong_kernel_fails_beside_it_by_name() -> None:
    result = numdev.check(
        times_a_hundredth_more, reference=reference, inputs=inputs, formats="bfloat16"
    )
    assert not result.passed
    assert "it is 1.01 times what it should be" in result.in_short


def test_nothing_is_said_where_pytorch_has_the_kernel() -> None:
    result = numdev.check(
        in_float32, reference=reference, inputs=inputs, formats="float32"
    )
    assert result.passed
    assert not [x for x in result.notes if "kernel of" in x]


def test_the_function_under_test_gets_no_such_help() -> None:
    result = numdev.check(
        reference, reference=reference, inputs=inputs, formats="bfloat16"
    )
    assert not result.passed
    assert "\"third\" not implemented for 'BFloat16'" in result.in_short


def test_results_are_those_of_float32_rounded_once() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    with MissingKernels() as mode:
        y = third(x)
    assert torch.equal(y, (x.float() / 3).bfloat16())
    assert list(mode.names) == ["third"]


def test_other_errors_of_an_operator_come_through() -> None:
    @torch.library.custom_op("numdev_tests::broken", mutates_args=())
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("broken for a reason of its own")

    with (
        MissingKernels() as mode,
        pytest.raises(RuntimeError, match="reason of its own"),
    ):
        broken(torch.ones(3).bfloat16())
    assert not mode.names
