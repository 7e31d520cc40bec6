"""What form a result may have beside its reference's: dtype, shape and device."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import function_examples as examples
import pytest
import torch
from torch import Tensor

from numdev.errors import UsageError
from numdev.function_check import check_beside
from numdev.operations.function.definitions import read_definition
from numdev.operations.function.judged_call import FunctionCall
from numdev.operations.function.problem_files import ProblemFile
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
    is_noted = any("output is float32, not float64" in note for note in result.notes)
    assert is_noted == (form == torch.float32)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1,), ()), pytest.param((), (1, 1), marks=pytest.mark.slow)],
)
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


def positive(x: Tensor) -> Tensor:
    return x > 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: ~(x <= 0), ""),
        (lambda x: x >= -0.5, "returns other integers than the reference"),
        (lambda x: (x > 0).int(), "it is int32, not bool"),
        (lambda x: (x > 0).float(), "it is float32, not bool"),
        (lambda x: x.argmax(-1), "it has the shape [48], not [48, 300]"),
    ],
)
def test_a_mask_is_judged_as_integers_are(
    function: Callable[[Tensor], Tensor], words: str
) -> None:
    result = check_beside(function, reference=positive, inputs=rows)
    assert result.passed == (not words)
    assert words in result.in_short


def with_nothing_beside(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x[:0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: (x + x, x[:0].clone()), ""),
        (lambda x: (x + x, x[:0, :1]), "output_1: it has the shape [0, 1], not [0, 300]"),
        (lambda x: (x + x, x[:0].int()), "output_1: it is int32, not float32"),
        (lambda x: (x + x,), "output_1: it is missing; what is returned: output_0"),
    ],
)
def test_an_empty_tensor_has_a_form_and_no_numbers(
    function: Callable[[Tensor], object], words: str
) -> None:
    result = check_beside(function, reference=with_nothing_beside, inputs=rows)
    assert result.passed == (not words)
    assert words in result.in_short
    assert {row.tensor for row in result.report.rows} == {"output_0"}


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (lambda x: x[:0], "tensors without numbers alone (output [0, 300])"),
        (lambda x: float(x.sum()), "a value of type float"),
        (lambda x: None, "None"),
    ],
)
def test_a_reference_without_numbers_judges_nothing(
    reference: Callable[[Tensor], object], why: str
) -> None:
    result = check_beside(lambda x: x, reference=reference, inputs=rows)
    assert result.verdict == "NOT JUDGED"
    assert f"it returns {why}, of which nothing can be judged" in result.in_short


def test_where_the_reference_raises_nothing_is_judged_and_the_function_did_not_fail() -> (
    None
):
    def sometimes(x: Tensor) -> Tensor:
        """Raises for one of the two calls' data."""
        if float(x[0, 0]) < 0:
            raise ValueError("no negative numbers")
        return x * 2

    def some(seed: int) -> tuple[Tensor]:
        return (rows(0)[0].abs() * (1 - 2 * (seed % 2)),)

    result = check_beside(lambda x: x * 2, reference=sometimes, inputs=some)
    assert result.verdict == "NOT JUDGED"
    assert "not judged in 1 of 2 calls" in result.in_short
    assert "the reference: ValueError: no negative numbers" in result.in_short


def test_finite_numbers_in_place_of_nan_are_told_as_that() -> None:
    def with_nan(seed: int) -> tuple[Tensor]:
        (x,) = rows(seed)
        x[3, 5] = torch.nan
        return (x,)

    result = check_beside(
        lambda x: x.nan_to_num() * 2, reference=lambda x: x * 2, inputs=with_nan
    )
    assert "that are finite, infinite or NaN unlike the exact result" in result.in_short


def test_a_function_that_leaves_the_program_is_told_with_its_code() -> None:
    def leaves(x: Tensor) -> Tensor:
        raise SystemExit(3)

    result = check_beside(leaves, reference=lambda x: x * 2, inputs=rows)
    assert result.verdict == "NOT JUDGED"
    assert "failed in 2 of 2 calls: ended the program (exit code 3)" in result.in_short


QUANTIZED = torch._empty_affine_quantized(
    (3,), scale=0.1, zero_point=0, dtype=torch.qint8
)


@dataclasses.dataclass
class Pair:
    total: Tensor
    parts: tuple[Tensor, ...]


def in_a_pair(x: Tensor) -> Pair:
    return Pair(x.sum(-1), (x.exp(), x * 3))


@pytest.mark.slow
def test_the_fields_of_a_dataclass_are_outputs() -> None:
    """With their gradients, also where it holds others or tuples."""
    call = {"reference": in_a_pair, "inputs": rows, "backward": True, "device": "cpu"}
    sound = check_beside(lambda x: {"p": in_a_pair(x)}["p"], **call)
    assert sound.passed, sound.in_short
    names = {row.tensor for row in sound.report.rows}
    assert names == {"output_total", "output_parts_0", "output_parts_1", "x_grad"}
    wrong = check_beside(lambda x: Pair(x.sum(-1), (x.exp(), x * 3.1)), **call)
    assert wrong.verdict == "FAIL"
    assert wrong.report.findings[0].tensor == "output_parts_1"


def test_tensors_in_a_dataclass_among_the_inputs_are_said_to_be_as_they_come() -> None:
    def inputs(seed: int) -> tuple[Pair, Tensor]:
        return in_a_pair(rows(seed)[0]), rows(seed + 1)[0]

    def weighted(p: Pair, x: Tensor) -> Tensor:
        return p.parts[1] * x

    same = {"reference": weighted, "inputs": inputs, "device": "cpu"}
    result = check_beside(weighted, **same)
    assert result.passed, result.in_short
    assert any("Tensors in Pair" in line for line in result.skipped)
    wrong = check_beside(lambda p, x: p.parts[1] * x * 1.01, **same)
    assert wrong.verdict == "FAIL"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: torch.empty(x.shape, device="meta"), "on the device meta"),
        (lambda x: (x * 2).to_sparse(), "a sparse_coo tensor"),
        (lambda x: torch.nested.nested_tensor([x * 2, x]), "nested"),
        (lambda x: torch.empty_quantized(x.shape, QUANTIZED), "quantized"),
        (lambda x: torch.empty(x.shape, dtype=torch.uint4), "uint4, with which"),
    ],
)
def test_an_output_without_a_number_for_each_element_is_named(
    function: Callable[[Tensor], Tensor], kind: str
) -> None:
    """PyTorch raises errors of its own for these, or crashes."""
    result = check_beside(function, reference=lambda x: x * 2, inputs=rows, device="cpu")
    assert result.verdict == "NOT JUDGED"
    assert f"each element, got a tensor that is {kind}" in result.in_short


NO_NUMBERS = {
    "float4_e2m1fn_x2": torch.float4_e2m1fn_x2,
    "bits8": torch.bits8,
    "bits2x4": torch.bits2x4,
    "uint1": torch.uint1,
    "uint7": torch.uint7,
    "int4": torch.int4,
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_an_argument_of_bits_alone_is_refused(name: str) -> None:
    """PyTorch cannot convert them: it raises errors of its own."""
    words = f"of x, got a tensor that is {name}, with which PyTorch does not compute$"
    data = torch.zeros(4, 8, dtype=torch.uint8).view(NO_NUMBERS[name])
    with pytest.raises(UsageError, match=f"expected a number for each element {words}"):
        check_beside(lambda x: x, reference=lambda x: x, inputs=lambda: (data,))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fnuz])
def test_a_result_in_a_dtype_of_no_format_has_another_form(dtype: torch.dtype) -> None:
    """Such numbers as an argument are judged: they are exact in float64."""

    def narrowed(x: Tensor) -> Tensor:
        return (x.abs() * 3).to(dtype)

    result = check_beside(narrowed, reference=lambda x: x.abs() * 3, inputs=rows)
    assert result.verdict == "FAIL"
    name = str(dtype).removeprefix("torch.")
    assert f"output: it is {name}, not float32" in str(result).replace("\n", " ")
    double = lambda x: x.float() * 2  # noqa: E731
    assert check_beside(
        double, reference=double, inputs=lambda seed: (narrowed(rows(seed)[0]),)
    ).passed


def test_integers_that_no_data_change_judge_nothing() -> None:
    """A constant is as right as the reference on all data that there are."""

    def places(x: Tensor) -> Tensor:
        return torch.arange(x.shape[-1]) * (x.shape[0] > 3)

    result = check_beside(places, reference=places, inputs=rows, device="cpu")
    assert result.verdict == "NOT JUDGED"
    assert "another seed's data move the result by only 0" in result.in_short
    largest = check_beside(
        lambda x: x.argmax(-1), reference=lambda x: x.argmax(-1), inputs=rows
    )
    assert largest.passed, largest.in_short


@pytest.mark.parametrize("data", [None, "abc", iter([torch.ones(3)])])
def test_what_cannot_be_arguments_is_refused(data: object) -> None:
    with pytest.raises(UsageError, match=r"inputs: expected a tensor, .* got "):
        check_beside(lambda x: x, reference=lambda x: x, inputs=lambda: data)


@pytest.mark.parametrize("shape", ["1000000x1000000x1000", "99999999999999999999"])
def test_a_shape_that_memory_cannot_hold_is_refused(shape: str) -> None:
    with pytest.raises(UsageError, match=f"expected x to fit into memory, got {shape}"):
        check_beside(lambda x: x, reference=lambda x: x, shapes=f"x={shape}")


def test_results_in_8_bits_are_judged() -> None:
    """A cast to float8, which PyTorch promotes with no other dtype."""

    def quantised(x: Tensor, scale: float = 2.0) -> Tensor:
        return (x * scale).to(torch.float8_e4m3fn)

    for function, verdict, words in (
        (lambda x: quantised(x.double()), "PASS", ""),
        (lambda x: quantised(x, 2.2), "FAIL", "1.1 times what it should be"),
        (lambda x: (x * 2).to(torch.float8_e5m2), "FAIL", "it is float8_e5m2, not"),
    ):
        result = check_beside(function, reference=quantised, inputs=rows, device="cpu")
        assert result.verdict == verdict
        assert words in result.in_short


def test_the_largest_number_of_8_bits_is_finite() -> None:
    """In float8_e4m3fn, which has no infinity, PyTorch says that 448 equals infinity."""

    def quantised(x: Tensor, w: Tensor) -> Tensor:
        return (x * w * w * w).to(torch.float8_e4m3fn)

    def rounded_once(x: Tensor, w: Tensor) -> Tensor:
        return (x.double() * w * w * w).to(torch.float8_e4m3fn)

    def to_largest(seed: int) -> tuple[Tensor, Tensor]:
        """Products up to 448, many of them near 432, above which a cast gives 448."""
        generator = torch.Generator().manual_seed(seed)
        w = torch.rand(128, 64, generator=generator) + 0.5
        near = torch.rand(64, 64, generator=generator) * 20 + 420
        products = torch.cat([torch.randn(64, 64, generator=generator) * 100, near])
        return (products / w**3).bfloat16(), w.bfloat16()

    result = check_beside(rounded_once, reference=quantised, inputs=to_largest)
    plain, ours = (f(*to_largest(0)).double() for f in (quantised, rounded_once))
    assert bool(((plain == 416) & (ours == 448)).any())
    assert result.passed, str(result)
    assert "overflow" not in str(result)


def test_a_reference_or_inputs_that_end_the_program_are_no_verdict() -> None:
    """Exit code 0 would be a pass."""

    def leaves(x: object) -> Tensor:
        raise SystemExit(0)

    result = check_beside(lambda x: x * 2, reference=leaves, inputs=rows, device="cpu")
    assert result.verdict == "NOT JUDGED"
    assert "the reference: ended the program (exit code 0)" in result.in_short
    with pytest.raises(UsageError, match="the function raised SystemExit: 0"):
        check_beside(lambda x: x, reference=lambda x: x, inputs=leaves, device="cpu")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("3", "expected a list of arguments, got int"),
        ("{'n': 3}", "expected a list of arguments, got dict"),
        ("1 / 0", "get_init_inputs raised ZeroDivisionError: division by zero"),
        ("exit(0)", "get_init_inputs raised SystemExit: 0"),
    ],
)
def test_what_a_problem_makes_its_model_of_is_a_list(
    tmp_path: Path, body: str, why: str
) -> None:
    file = tmp_path / "problem.py"
    file.write_text(
        "from torch import nn\nclass Model(nn.Module): pass\n"
        f"def get_inputs(): return None\ndef get_init_inputs(): return {body}\n"
    )
    with pytest.raises(UsageError, match=re.escape(why)):
        ProblemFile.read(file, "cpu")
    file.write_text(file.read_text().replace(f"return {body}", "return []"))
    with pytest.raises(UsageError, match=r"get_inputs: expected a list .* got NoneType"):
        ProblemFile.read(file, "cpu").inputs()


@pytest.mark.parametrize(
    ("axes", "why"),
    [
        ({"m": {"type": "var"}}, "x: expected axes of m, got n"),
        ({"m": {"type": "var"}, "n": {"type": "const", "value": -4}},
         "axes.n: expected a positive size, got -4"),
    ],
)  # fmt: skip
def test_axes_of_a_definition_are_its_own_and_positive(
    tmp_path: Path, axes: dict[str, object], why: str
) -> None:
    tensor = {"shape": ["m", "n"], "dtype": "float32"}
    file = tmp_path / "definition.json"
    file.write_text(json.dumps({
        "name": "scale", "axes": axes, "inputs": {"x": tensor}, "outputs": {},
        "reference": "def run(x): return x",
    }))  # fmt: skip
    with pytest.raises(UsageError, match=re.escape(why)):
        read_definition(file)


def test_complex_numbers_in_place_of_real_ones_are_another_dtype() -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def as_complex(x: Tensor) -> Tensor:
        return (x * 2).to(torch.complex64)

    result = check_beside(as_complex, reference=twice, shapes="x=4x6", device="cpu")
    assert "output: it is complex64, not bfloat16" in result.in_short
    result = check_beside(
        lambda x: as_complex(x).real, reference=as_complex, shapes="x=4x6", device="cpu"
    )
    assert "output: it is float32, not complex64" in result.in_short


@pytest.mark.parametrize(
    "dtype", [torch.complex64, pytest.param(torch.complex128, marks=pytest.mark.slow)]
)
def test_a_function_without_its_conjugate_is_another_one(dtype: torch.dtype) -> None:
    """Forward and backward, where PyTorch's conjugates are views with a bit."""

    def inputs(seed: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(24, 40, dtype=dtype, generator=generator),)

    def spectrum(z: Tensor) -> Tensor:
        return z * z.conj() * (1 + 2j)

    same = {"reference": spectrum, "inputs": inputs, "backward": True, "device": "cpu"}
    sound = check_beside(lambda z: z.conj() * z * (1 + 2j), **same)
    assert sound.passed, sound.in_short
    assert check_beside(lambda z: z * z * (1 + 2j), **same).verdict == "FAIL"


class Fused(torch.autograd.Function):
    """Two outputs of a kernel, of which autograd takes both for differentiable."""

    @staticmethod
    def forward(ctx: object, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return x.logsumexp(-1), x * factor

    @staticmethod
    def backward(ctx: object, _: Tensor, back: Tensor) -> tuple[Tensor, None]:
        return back * ctx.factor, None


@pytest.mark.parametrize(("factor", "passes"), [(3.0, True), (3.01, False)])
def test_a_gradient_comes_back_into_an_output_whichever_others_have_one(
    factor: float, passes: bool
) -> None:
    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.detach().logsumexp(-1), x * 3.0

    options = {"reference": reference, "inputs": rows, "backward": True, "device": "cpu"}
    result = check_beside(lambda x: Fused.apply(x, factor), **options)
    assert result.passed == passes, str(result)


@dataclasses.dataclass
class Turned:
    """What `mapping` returns, its fields in another order."""

    b: Tensor
    a: Tensor


@pytest.mark.parametrize(("factor", "passes"), [(2.0, True), (2.02, False)])
@pytest.mark.parametrize("kind", [dict, Turned])
def test_a_gradient_comes_back_into_an_output_in_whatever_order(
    kind: Callable[..., object], factor: float, passes: bool
) -> None:
    def reference(x: Tensor) -> dict[str, Tensor]:
        return {"a": x * 2, "b": x.exp()}

    def turned(x: Tensor) -> object:
        return kind(b=x.exp(), a=x * factor)

    options = {"reference": reference, "inputs": rows, "backward": True, "device": "cpu"}
    result = check_beside(turned, **options)
    assert result.passed == passes, str(result)


def test_a_mistake_names_its_tensor_where_there_are_others() -> None:
    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.exp()

    def wrong(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.exp() * 1.1

    result = check_beside(wrong, reference=reference, inputs=rows, device="cpu")
    words = "is wrong in 2 of 2 results: it is 1.1 times what it should be (output_1)."
    assert words in result.in_short


class InOrder(torch.autograd.Function):
    """x * 3, backward by code that reads memory from a tensor's first number on."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 3.0

    @staticmethod
    def backward(ctx: object, back: Tensor) -> Tensor:
        memory = torch.empty_strided(back.shape, back.new_empty(back.shape).stride())
        return memory.copy_(back.as_strided(memory.shape, memory.stride())) * 3.0


def test_what_comes_back_need_not_be_contiguous() -> None:
    result = check_beside(
        InOrder.apply,
        reference=lambda x: x * 3.0,
        inputs=rows,
        backward=True,
        device="cpu",
    )
    assert result.verdict == "FAIL"
    failing = {f.place.case for f in result.report.findings if f.place is not None}
    assert failing == {"seed 0 again"}
