"""What form a result may have beside its reference's: dtype, shape and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import function_examples as examples
import pytest
import torch
from torch import Tensor

from numdev.function_check import check_beside
from numdev.operations.function.judged import FunctionCall
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import arguments_of


def sums_in(dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Running sums, computed and returned in a dtype; None: in the argument's."""
    return lambda x: x.to(dtype or x.dtype).cumsum(-1)


def sums_of(x: Tensor) -> Tensor:
    """A reference that says what is exact, whatever its argument's format."""
    return x.double().cumsum(-1)


def rows(seed: int) -> tuple[Tensor]:
    return (torch.randn(48, 300, generator=torch.Generator().manual_seed(seed)),)


@pytest.mark.parametrize("form", [torch.float32, torch.float64])
def test_a_reference_in_float64_says_what_is_exact(form: torch.dtype) -> None:
    """A kernel returns the format of the call, or float64, and is held to that."""
    result = check_beside(sums_in(form), reference=sums_of, inputs=rows)
    assert result.passed, result.in_short
    said = any("output is float32, not float64" in note for note in result.notes)
    assert said == (form == torch.float32)


def test_in_place_of_float64_it_errs_as_its_own_dtype_may() -> None:
    """float32 sums called float64 are no float64 sums; bfloat16 is not the format of a
    float32 call; ten percent more is wrong in any."""
    for wrong, rule in (
        (lambda x: sums_in(None)(x).double(), "error"),
        (lambda x: sums_in(None)(x).bfloat16(), "form"),
        (lambda x: 1.1 * sums_in(None)(x), "error"),
    ):
        result = check_beside(wrong, reference=sums_of, inputs=rows)
        exceeded = [t for t in result.judgement.tests if t.standing == "exceeded"]
        assert rule in {test.rule for test in exceeded}


def test_sound_code_in_float64_is_not_held_to_the_bits_of_fp64() -> None:
    """The exact result is fp64 itself: other sums err as much as it does."""

    def product(x: Tensor) -> Tensor:
        return torch.sigmoid(x) @ x.T

    def in_halves(x: Tensor) -> Tensor:
        half = 1 / (1 + torch.exp(-x))
        return half[:, ::2] @ x[:, ::2].T + half[:, 1::2] @ x[:, 1::2].T

    def wide(seed: int) -> tuple[Tensor]:
        return (rows(seed)[0].double(),)

    def wrong(x: Tensor) -> Tensor:
        return in_halves(x) * (1 + 1e-13)

    assert check_beside(in_halves, reference=product, inputs=wide).passed
    assert not check_beside(wrong, reference=product, inputs=wide).passed


@pytest.mark.parametrize(("shape", "expected"), [((1,), ()), ((), (1, 1))])
def test_one_number_may_have_another_shape(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    def reference(x: Tensor) -> Tensor:
        return x.square().mean().reshape(expected)

    def same(x: Tensor) -> Tensor:
        return x.square().mean().reshape(shape)

    result = check_beside(same, reference=reference, inputs=rows)
    assert result.passed, result.in_short
    words = f"output has the shape {list(shape)}, not {list(expected)}"
    assert any(note.startswith(words) for note in result.notes)
    wrong = check_beside(lambda x: 1.01 * same(x), reference=reference, inputs=rows)
    assert wrong.verdict == "FAIL"


def test_an_output_on_another_device_has_another_form() -> None:
    """As a CUDA kernel's that returns what it copied to the CPU."""
    reference = FunctionReference(
        function=examples.rms_norm, arguments=arguments_of(examples.inputs(0), examples.rms_norm),
        seed=0, backward=False,
    )  # fmt: skip
    call = FunctionCall(name="a call", draws=[reference])
    ran = dataclasses.replace(reference.plain, devices={"output": "cuda"})
    tensors, wrong = call.tensors_of([ran])
    assert wrong == {"output": "it is on cuda, not on cpu"}
    assert tensors["output"] is not None
