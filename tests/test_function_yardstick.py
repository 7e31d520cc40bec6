"""What the rounding of a reference explains, and how far beyond it an error is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from numdev.exact.evaluation import evaluate
from numdev.exact.wide_tensors import widened
from numdev.formats import FORMATS, round_to
from numdev.function_check import check_beside
from numdev.operations.function.float32_error_model import (
    READ,
    Arithmetic,
    of_sum,
    returning_of,
    variance_of,
)
from numdev.operations.function.judged_call import Judge
from numdev.operations.function.reference import (
    FunctionReference,
    moved_by_half_an_ulp,
)
from numdev.operations.function.shapes_and_dtypes import Form
from numdev.operations.function.summed_term_counts import TERMS
from numdev.operations.function.trees import (
    Arguments,
    arguments_of,
    as_real,
    outputs_of,
)
from numdev.operations.function.yardstick import Errors, Lean

aten = torch.ops.aten
U = 2.0**-24
BFLOAT16 = FORMATS["bfloat16"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors_of(truth: Tensor, size: float = 1.0, runs: int = 7) -> Errors:
    """Of a tensor in bfloat16 whose runs err by normal numbers of a size."""
    every = [truth + size * drawn(*truth.shape, seed=i + 1).double() for i in range(runs)]
    plain = truth + size * drawn(*truth.shape, seed=99).double()
    return Errors.of(truth, BFLOAT16, every[: runs - 2], every[runs - 2 :], plain)


# --- the arithmetic of sums -----------------------------------------------------------


def in_order(terms: Tensor) -> Tensor:
    """The float32 sum along the first axis, one term after another."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


PLANE, PLACES = (1, 2, 6, 6), torch.tensor([[0, 2, 2], [1, 2, 0]])
OVERLAPPING = [[3, 3], [1, 1], [1, 1], [1, 1]]
# Of each kind of operator that adds what comes back: its arguments behind that
SPREAD: dict[str, tuple[object, ...]] = {
    "avg_pool2d_backward": (drawn(*PLANE), [3, 3], [1, 1], [1, 1], False, True, None),
    "avg_pool3d_backward": (drawn(1, 2, 4, 4, 4), [2], [1], [0], False, True, None),
    "_adaptive_avg_pool2d_backward": (drawn(1, 2, 7, 5),),
    "max_pool2d_with_indices_backward": (
        drawn(*PLANE), *OVERLAPPING, False,
        torch.nn.functional.max_pool2d(
            drawn(*PLANE), 3, 1, 1, return_indices=True
        )[1],
    ),
    "embedding_dense_backward": (PLACES, 4, -1, False),
    "upsample_nearest2d_backward": ([9, 7], PLANE, None, None),
    "upsample_bilinear2d_backward": ([9, 7], PLANE, False, None, None),
    "reflection_pad2d_backward": (drawn(*PLANE), [2, 1, 1, 2]),
    "col2im": ([6, 6], [3, 3], [1, 1], [1, 1], [1, 1]),
}  # fmt: skip
COMES_BACK = {
    "avg_pool3d_backward": (1, 2, 3, 3, 3),
    "_adaptive_avg_pool2d_backward": (1, 2, 3, 2),
    "embedding_dense_backward": (2, 3, 5),
    "upsample_nearest2d_backward": (1, 2, 9, 7),
    "upsample_bilinear2d_backward": (1, 2, 9, 7),
    "reflection_pad2d_backward": (1, 2, 9, 9),
    "col2im": (1, 18, 36),
}


@pytest.mark.parametrize("name", SPREAD)
def test_terms_of_what_comes_back_are_those_of_its_matrix(name: str) -> None:
    """The operator is linear in its first argument: row by row of its matrix, terms are
    the products that are not 0. Compiled averages in float32 were accused, whose sums of
    27 shares nobody had counted."""
    func = getattr(aten, name).default
    back = drawn(*COMES_BACK.get(name, PLANE)).double()
    others = [
        x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in SPREAD[name]
    ]
    result = func(back, *others)
    unit = torch.eye(back.numel(), dtype=torch.float64).reshape(-1, *back.shape)
    matrix = torch.stack([func(x, *others) for x in unit], -1)
    terms = matrix * back.flatten()
    torch.testing.assert_close(terms.sum(-1), result)
    of = TERMS[name](func, (back, *others), result)
    squares, count = terms.square().sum(-1), (matrix != 0).sum(-1).double()
    if "linear" in name:  # weights below 1 count as 1 in the squares
        assert bool((of.squares >= squares - 1e-12).all())
        assert float(of.squares.sum() / squares.sum()) < 4
    elif "adaptive" in name:  # windows of several sizes
        torch.testing.assert_close(of.squares.sum(), squares.sum(), rtol=1.0, atol=0)
    else:
        torch.testing.assert_close(of.squares, squares)
        expected = count.clamp_min(1)
        torch.testing.assert_close(of.count * torch.ones_like(expected), expected)


def test_terms_of_what_is_added_into_places_are_counted() -> None:
    x, source = drawn(3, 4).double(), drawn(5, 4, seed=1).double()
    index = torch.tensor([0, 2, 2, 2, 0])
    func = aten.index_add.default
    of = TERMS["index_add"](func, (x, 0, index, source), func(x, 0, index, source))
    assert of.count[:, 0].tolist() == [3, 1, 4]
    torch.testing.assert_close(of.squares[2], x[2].square() + source[1:4].square().sum(0))


@pytest.mark.parametrize("lean", [0.0, 3.0])
def test_a_sum_in_order_errs_as_its_variance_says(lean: float) -> None:
    """Of terms that cancel, and of terms of one sign: the rms over 2,000 sums of 200
    terms is within a factor of 2 of the model, which is no bound."""
    terms = drawn(200, 2000) + lean
    exact = terms.double().sum(0)
    variance = of_sum(exact, 200.0, terms.double().square().sum(0))
    ratio = float((in_order(terms) - exact).square().mean() / variance.mean())
    assert 0.25 < ratio < 2


def test_one_term_has_no_error_of_a_sum() -> None:
    assert float(of_sum(torch.tensor(3.0), 1.0, torch.tensor(9.0))) == 0


@pytest.mark.parametrize(
    ("func", "args", "count"),
    [
        (aten.mm.default, (drawn(6, 50), drawn(50, 4)), 50),
        (aten.bmm.default, (drawn(2, 6, 50), drawn(2, 50, 4)), 50),
        (aten.addmm.default, (drawn(4), drawn(6, 50), drawn(50, 4)), 50),
        (aten.sum.dim_IntList, (drawn(6, 50), [1]), 50),
    ],
)
def test_products_and_sums_have_the_squares_of_their_terms(
    func: torch._ops.OpOverload, args: tuple[object, ...], count: int
) -> None:
    wide = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
    result = func(*wide)
    variance = variance_of(func, wide, result)
    assert variance is not None
    assert variance.shape == result.shape
    scale = U * math.sqrt(0.09 * count * count)  # o^2 K / 3 + (S - o^2 / K) K / 2, S ~ K
    assert 0.2 < float(variance.mean().sqrt()) / scale < 2


def test_a_gradient_of_a_convolution_has_the_terms_of_its_own() -> None:
    x, w = drawn(2, 3, 8, 8).double(), drawn(5, 3, 3, 3).double()
    back = drawn(2, 5, 6, 6).double()
    args = (back, x, w, [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3)
    results = aten.convolution_backward.default(*args)
    for result, count in zip(results, (27, 72, 72), strict=True):
        variance = variance_of(aten.convolution_backward.default, args, result)
        assert variance is not None
        assert variance.shape == result.shape
        assert float(variance.mean()) > (0.3 * U) ** 2 * float(result.square().mean()), (
            count
        )


def test_the_gradient_of_a_norms_bias_has_the_terms_of_its_sum() -> None:
    """300 numbers that cancel: the result says nothing of the error. Those of the weight
    are times the normalised values, here all 2."""
    back = drawn(150).double().repeat_interleave(2).view(300, 1, 1)
    back[1::2] *= -1
    x, one = torch.full((300, 1, 1), 2.0, dtype=torch.float64), torch.ones(1).double()
    args = (back, x, one, None, None, 0 * one, one, True, 0.0, [True, True, True])
    bias = aten.native_batch_norm_backward.default(*args)[2]
    assert float(bias) == 0
    variance = variance_of(aten.native_batch_norm_backward.default, args, bias)
    assert variance is not None
    torch.testing.assert_close(variance, of_sum(bias, 300.0, 4 * back.square().sum()))


PLACES = torch.arange(4000) % 7
LEFT, RIGHT, MOVED = drawn(7, 900), drawn(900, 5), drawn(4000, 5, seed=2)


@pytest.mark.parametrize(
    ("returns", "writes"),
    [
        (
            lambda out: out.index_add(0, PLACES, MOVED),
            lambda out: out.index_add_(0, PLACES, MOVED),
        ),
        (
            lambda out: out.scatter_add(0, PLACES[:, None].expand(-1, 5), MOVED),
            lambda out: out.scatter_add_(0, PLACES[:, None].expand(-1, 5), MOVED),
        ),
        (
            lambda out: out.index_put((PLACES,), MOVED, accumulate=True),
            lambda out: out.index_put_((PLACES,), MOVED, accumulate=True),
        ),
        (lambda out: out.addmm(LEFT, RIGHT), lambda out: out.addmm_(LEFT, RIGHT)),
        (lambda out: out.add(LEFT @ RIGHT), lambda out: out.add_(LEFT @ RIGHT)),
        (lambda out: LEFT @ RIGHT, lambda out: torch.mm(LEFT, RIGHT, out=out)),
        (
            lambda out: out + MOVED.cumsum(0)[-7:],
            lambda out: out + MOVED.clone().cumsum_(0)[-7:],
        ),
        (
            lambda out: out + (1 + MOVED / 999).cumprod(0)[-7:],
            lambda out: out + (1 + MOVED / 999).cumprod_(0)[-7:],
        ),
        (
            lambda out: out + LEFT.sum(1, keepdim=True),
            lambda out: torch.sum(LEFT, 1, keepdim=True, out=out[:, :1].clone()) + out,
        ),
    ],
)
def test_a_sum_errs_as_much_where_it_is_written_into_memory(
    returns: Callable[[Tensor], Tensor], writes: Callable[[Tensor], Tensor]
) -> None:
    """The arguments count as they are before the operator writes into one of them."""
    out = drawn(7, 5, seed=3)
    truth = widened(evaluate(returns, out).output)

    def error(function: Callable[[Tensor], Tensor], seed: int) -> float:
        ran = evaluate(function, out, rounding=Arithmetic(noise=seed, seed=seed))
        return float((widened(ran.output) - truth).square().mean())

    sizes = [
        sum(error(f, seed) for seed in range(4)) ** 0.5
        / 2
        / U
        / float(truth.abs().mean())
        for f in (returns, writes)
    ]
    assert sizes[0] > 2  # far beyond a rounding of the result
    assert sizes[1] == pytest.approx(sizes[0], rel=0.3)


def test_operators_that_write_have_one_that_returns() -> None:
    """But for those of a batch norm, whose model runs no operator."""
    lacking = []
    for name in READ:
        for packet in (getattr(aten, name, None), getattr(aten, f"{name}_", None)):
            for overload in packet.overloads() if packet is not None else ():
                func = getattr(packet, overload)
                if returning_of(func)._schema.is_mutable and "hacked" not in overload:
                    lacking.append(name)
    assert set(lacking) == {"_native_batch_norm_legit"}
    assert returning_of(aten.sum.IntList_out) is aten.sum.dim_IntList
    assert returning_of(aten.index_add_.default) is aten.index_add.default
    assert returning_of(aten.mm.default) is aten.mm.default


def test_a_sound_kernel_passes_beside_a_reference_that_accumulates_in_place() -> None:
    """Its runs were rounded alone, so that PyTorch itself erred beyond it."""

    def inputs(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(0, 8, (4096,), generator=generator)
        return places, torch.randn(4096, 16, generator=generator)

    def reference(places: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(8, 16).index_add_(0, places, x)

    def backwards(places: Tensor, x: Tensor) -> Tensor:
        return x.new_zeros(8, 16).index_add(0, places.flip(0), x.flip(0))

    result = check_beside(backwards, reference=reference, inputs=inputs, device="cpu")
    assert result.passed, result.in_short


@pytest.mark.parametrize(("x", "size"), [(-20.0, 10.0), (20.0, 20.0)])
def test_gelu_far_below_0_errs_as_its_sum_of_1_and_erf(x: float, size: float) -> None:
    """Its gradient too, of which 1 + erf is times half of what comes back."""
    at = torch.tensor([x], dtype=torch.float64)
    out = variance_of(aten.gelu.default, (at,), nn.functional.gelu(at))
    assert out is not None
    torch.testing.assert_close(out, torch.tensor([(0.6 * U * size) ** 2]).double())
    gradient = aten.gelu_backward.default(at, at)
    back = variance_of(aten.gelu_backward.default, (at, at), gradient)
    torch.testing.assert_close(back, out)


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda x: x.softmax(0), (), torch.float32),
        (lambda x: x.log_softmax(0), (), torch.float32),
        (nn.LayerNorm(3), (3,), torch.float32),
        (nn.LayerNorm(3), (0, 3), torch.float32),
        (nn.LayerNorm(0), (2, 0), torch.float32),
        (nn.GroupNorm(1, 2), (0, 2, 3), torch.float32),
        (nn.GroupNorm(1, 2), (2, 2, 0), torch.float32),
        (torch.prod, (0,), torch.float32),
        (torch.std, (4, 8), torch.complex64),
        (torch.linalg.vector_norm, (1,), torch.complex64),
    ],
)
def test_a_single_row_no_numbers_and_complex_ones_have_an_arithmetic(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Forward and backward, within a few unit roundoffs of what PyTorch computes."""
    of = FunctionReference(
        function=function, arguments=arguments_of(drawn(*shape).to(dtype), function),
        seed=0, backward=True,
    )  # fmt: skip
    for name, x in of.rounded[0].items():
        plain = as_real(of.plain.tensors[name]).double()
        for y in (of.truth[name], plain):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_is_not_finite_and_what_only_moves_has_no_arithmetic() -> None:
    infinite = torch.tensor([math.inf, math.nan, 1.0], dtype=torch.float64)
    variance = variance_of(aten.exp.default, (infinite,), infinite)
    assert variance is not None
    assert variance.tolist() == [0.0, 0.0, pytest.approx((0.6 * U) ** 2)]
    assert variance_of(aten.add.Tensor, (infinite, infinite), infinite) is None


@pytest.mark.parametrize("masked", [-1e9, -3.4e38])
def test_what_is_masked_adds_nothing_to_the_errors_of_other_logarithms(
    masked: float,
) -> None:
    """Of a log-softmax of a few units they stay some unit roundoffs."""
    x = drawn(16, 64).double()
    x[:, 40:] = masked
    exact = x.log_softmax(-1)
    args = (x, -1, False)
    variance = variance_of(aten._log_softmax.default, args, exact)
    assert variance is not None
    assert 0.1 * U < float(variance[:, :40].mean().sqrt()) < 40 * U


def test_runs_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    x = drawn(20, 300)
    reference = FunctionReference(
        function=lambda x: x.sum(-1), arguments=Arguments(positional=(x,)), seed=0,
        backward=False,
    )  # fmt: skip
    first, again, other = (
        reference.computed(Arithmetic(noise=seed))["output"] for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)


# --- the yardstick --------------------------------------------------------------------


def test_an_error_of_the_yardsticks_size_is_one_and_the_rounding_is_the_least() -> None:
    truth = drawn(64, 128).double()
    errors = errors_of(truth)
    excess = errors.beside(truth + drawn(64, 128, seed=50).double())
    assert excess.ratio == pytest.approx(1 / math.sqrt(1.1), abs=0.05)
    assert excess.effective is not None
    assert 0 <= (excess.luck or 0) - math.exp(1.5 / math.sqrt(excess.effective)) < 0.03
    exact = errors_of(truth, 0.0)
    least = round_to(truth, BFLOAT16) - truth
    assert 0.5 < float(least.square().mean() / exact.mean_square.mean()) < 1.5


def test_a_bad_row_is_a_slice_and_a_bad_element_an_element() -> None:
    truth = drawn(64, 128).double()
    errors = errors_of(truth)
    row, element = (truth + drawn(64, 128, seed=50).double() for _ in range(2))
    row[17] += 4 * drawn(128, seed=5).double()
    element[3, 5] += 40
    slice_of_row = errors.beside(row).worst_slice
    assert slice_of_row is not None
    assert slice_of_row.place == "place 17 of axis 0"
    # At least exp(sqrt(2 ln 64 / n)) of 64 rows of n numbers in effect, n at most 128
    assert math.exp(math.sqrt(2 * math.log(64) / 128)) < slice_of_row.luck < 1.8
    assert slice_of_row.ratio > 1.1 * slice_of_row.luck
    worst = errors.beside(element).worst_element
    assert worst is not None
    assert worst.place == (3, 5)
    assert worst.ratio > 20


def test_a_last_partial_block_is_a_slice() -> None:
    truth = drawn(8, 200).double()
    errors = errors_of(truth)
    output = truth + drawn(8, 200, seed=50).double()
    output[:, 192:] += 3
    worst = errors.beside(output).worst_slice
    assert worst is not None
    assert worst.place in ("block 12 of 16 of axis 1", "block 1 of 128 of axis 1")


def test_a_scale_is_a_slope_and_a_constant_is_a_shift() -> None:
    truth = drawn(64, 128).double()
    errors = errors_of(truth, 0.01)
    noise = 0.01 * drawn(64, 128, seed=50).double()
    u = BFLOAT16.unit_roundoff
    scaled = errors.beside(truth * (1 + u) + noise).slope
    shifted = errors.beside(truth + u + noise).shift
    assert isinstance(scaled, Lean)
    assert isinstance(shifted, Lean)
    assert scaled.size == pytest.approx(1, abs=0.1)
    assert shifted.size == pytest.approx(1, abs=0.1)
    assert min(scaled.t, shifted.t) > 10
    sound = errors.beside(truth + noise)
    assert sound.slope is not None
    assert abs(sound.slope.t) < 5


def test_a_plain_reference_that_errs_more_may_be_equalled_up_to_three_times() -> None:
    truth = drawn(64, 128).double()
    every = [truth + drawn(64, 128, seed=i).double() for i in range(7)]
    large, far = (truth + k * drawn(64, 128, seed=9).double() for k in (2.0, 9.0))
    noisy = Errors.of(truth, BFLOAT16, every[:5], every[5:], large)
    assert noisy.beside(large).ratio == pytest.approx(1)
    no_yardstick = Errors.of(truth, BFLOAT16, every[:5], every[5:], far)
    assert no_yardstick.plain_ratio > 3
    assert (no_yardstick.beside(far).yardstick or 9) < 1


def test_what_is_not_finite_is_left_out_and_an_empty_tensor_is_not_judged() -> None:
    truth = drawn(8, 8).double()
    truth[0, 0], truth[1, 1] = math.inf, math.nan
    errors = errors_of(truth)
    output = truth.clone()
    output[2, 2] = math.nan
    assert errors.beside(output).ratio == 0
    nothing = errors_of(torch.zeros(0, 4, dtype=torch.float64)).beside(torch.zeros(0, 4))
    assert nothing.ratio is None
    assert "no element is finite" in nothing.nulls["reference_ratio"]


# --- the reference --------------------------------------------------------------------


def reference(
    function: object, *arguments: object, backward: bool = False
) -> FunctionReference:
    assert callable(function)
    return FunctionReference(
        function=function, arguments=arguments_of(arguments, function), seed=3,
        backward=backward,
    )  # fmt: skip


def test_truth_rounded_runs_and_pytorchs_have_the_same_names() -> None:
    def norm(x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        r = x.square().mean(-1, keepdim=True).rsqrt()
        return {"n": x * r * weight, "r": r[:, 0]}

    of = reference(norm, drawn(8, 16).bfloat16(), drawn(16).bfloat16(), backward=True)
    names = ["output_n", "output_r", "x_grad", "weight_grad"]
    assert list(of.plain.tensors) == names
    for values in (of.truth, *of.rounded, *of.sound):
        assert list(values) == names
    wide = {n: x.double() for n, x in of.plain.tensors.items()}
    for name, truth in of.truth.items():
        off = float(
            (wide[name] - truth).square().mean().sqrt() / truth.square().mean().sqrt()
        )
        assert 1e-4 < off < 1e-2, name


def test_a_module_is_differentiated_with_respect_to_its_parameters_too() -> None:
    layer = nn.Linear(16, 4).bfloat16()
    of = reference(layer, drawn(8, 16).bfloat16(), backward=True)
    assert list(of.plain.tensors) == ["output", "input_grad", "weight_grad", "bias_grad"]
    assert list(of.truth) == list(of.plain.tensors)


def test_an_argument_that_is_written_into_is_an_output() -> None:
    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 3)

    of = reference(fill, drawn(8).bfloat16(), torch.zeros(8).bfloat16())
    assert list(of.plain.tensors) == ["out"]
    assert of.truth["out"].equal(drawn(8).bfloat16().double() * 3)


def test_dropout_of_a_seed_drops_the_same_everywhere() -> None:
    of = reference(lambda x: nn.functional.dropout(x, 0.5), torch.ones(1000))
    assert of.truth["output"].equal(of.plain.outputs["output"].double())


def test_half_an_ulp_moves_floating_point_inputs_alone() -> None:
    x, index = drawn(100).bfloat16(), torch.arange(4)
    moved = moved_by_half_an_ulp(Arguments(positional=(x, index)), 1)
    wide, same = moved.positional
    assert same is index
    off = (wide.exact - x.double()).abs() / x.double().abs()  # type: ignore[attr-defined]
    assert 0 < float(off.max()) <= 2.0**-8


def test_trees_have_names_that_are_identifiers() -> None:
    x = drawn(2)
    names = ["output_0", "output_1_a_b", "output_2"]
    assert list(outputs_of((x, {"a b": drawn(3)}, x, 7))) == names
    assert list(outputs_of(x)) == ["output"]


def test_an_argument_in_two_places_has_the_name_of_its_first() -> None:
    x, y = drawn(2), drawn(1)
    inputs = Arguments(positional=(x, [y, x]), named={"k": y, "v": x}, names=("q",))
    assert list(inputs.leaves()) == ["q", "argument_1_0"]
    assert list(Arguments(named={"k": x, "v": y}).leaves()) == ["k", "v"]


def test_a_scalar_that_a_row_shares_counts_as_few_numbers() -> None:
    """Of errors that are one number times each row: luck is what the runs' own sizes
    scatter, not that of as many numbers as there are elements."""
    truth = drawn(16, 512).double()
    every = [truth * (1 + 0.01 * drawn(16, 1, seed=i).double()) for i in range(8)]
    shared = Errors.of(truth, BFLOAT16, every[:5], every[5:7], every[7])
    free = errors_of(truth)
    assert shared.luck_of_runs > 1.2
    assert free.luck_of_runs < 1.05
    assert (shared.beside(every[7]).luck or 0) == shared.luck_of_runs


def test_each_run_is_set_beside_the_others() -> None:
    """One run of eight has a row of its own: beside a D that the run is part of, the row
    errs at most sqrt(5) times as much as is explained; beside D of the others as many
    times as it really does."""
    truth = drawn(32, 64).double()
    every = [truth + drawn(32, 64, seed=i).double() for i in range(8)]
    every[2][7] += 20 * drawn(64, seed=70).double()
    errors = Errors.of(truth, BFLOAT16, every[:5], every[5:7], every[7])
    z, largest = errors.of_runs
    assert largest > 40
    assert math.exp(z * math.sqrt(2 * math.log(32) / 64)) > 2 * math.sqrt(5)
    sound = errors.beside(truth + drawn(32, 64, seed=50).double())
    assert sound.element_luck == largest
    assert sound.worst_slice is not None
    assert sound.worst_slice.ratio < 1.3 * sound.worst_slice.luck


def test_one_run_has_no_others() -> None:
    truth = drawn(32, 64).double()
    errors = Errors.of(truth, BFLOAT16, [truth + 1], [], truth)
    assert errors.of_runs == (0.0, 0.0)
    assert errors.luck_of_runs == 1.0


def judge_of(runs: Sequence[Tensor], further: Callable[[], Sequence[Tensor]]) -> Judge:
    truth = torch.zeros(64, 32, dtype=torch.float64) + 1.1
    errors = Errors.of(truth, FORMATS["bfloat16"], runs[:5], runs[5:], truth)
    form = Form(shape=tuple(truth.shape), dtype=torch.bfloat16)
    return Judge(
        form=form, truth=truth, plain=truth, rounded=runs[:5], errors=errors,
        further=further,
    )  # fmt: skip


def test_a_closer_look_knows_a_decision_that_few_runs_do_not() -> None:
    """One row of the output is another: wrong by seven runs, one of 16 more has it."""
    generator = torch.Generator().manual_seed(0)

    def run(row: int | None = None) -> Tensor:
        x = torch.full((64, 32), 1.1, dtype=torch.float64)
        x = x + 1e-3 * torch.randn(64, 32, generator=generator, dtype=torch.float64)
        return x if row is None else x.index_fill(0, torch.tensor([row]), 3.0)

    looks = []

    def further() -> Sequence[Tensor]:
        looks.append("closer")
        return [run(5 if i == 3 else None) for i in range(16)]

    judge = judge_of([run() for _ in range(7)], further)
    sound, flipped, wrong = run(), run(5), run(6)
    assert judge.beside(sound) is judge
    assert not looks
    first, closer = judge.numbers(flipped, None)[0], judge.beside(flipped)
    assert (first.slice_ratio or 0) > 2 * (first.slice_luck or 0)
    second = closer.numbers(flipped, None)[0]
    assert (second.slice_ratio or 9) < (second.slice_luck or 0)
    third = judge.beside(wrong).numbers(wrong, None)[0]
    assert (third.reference_ratio or 0) > 1.5 * (third.reference_luck or 0)
    assert looks == ["closer"]


def test_integers_of_a_closer_look_are_the_references_too() -> None:
    truth = torch.arange(16)
    seen = truth.clone()
    seen[3] = 4
    judge = Judge(
        form=Form(shape=(16,), dtype=torch.int64), truth=truth, plain=truth,
        rounded=[truth], errors=None, further=lambda: [seen, truth],
    )  # fmt: skip
    assert judge.mismatches(seen) == 1
    assert judge.beside(seen).mismatches(seen) == 0
    wrong = truth + (truth == 7)
    assert judge.beside(wrong).mismatches(wrong) == 1


def test_calls_that_are_judged_together_share_no_random_numbers() -> None:
    """Else what they err in common would count as what one of them errs."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    runs = [
        FunctionReference(
            function=torch.mean, arguments=Arguments(positional=(x,)), seed=seed,
            backward=False,
        ).rounded
        for seed in (0, 1000)
    ]  # fmt: skip
    for one, other in zip(*runs, strict=True):
        assert one["output"] != other["output"]


def test_what_errs_as_a_reference_that_is_no_yardstick_is_not_judged() -> None:
    """Beyond the operations it is no pass, and below ten times the reference no failure:
    other draws of errors that nobody explains are as far apart."""
    truth = drawn(32, 64).double()
    runs = [truth + 0.01 * drawn(32, 64, seed=i + 1).double() for i in range(7)]
    plain = truth + 0.2 * drawn(32, 64, seed=9).double()
    errors = Errors.of(truth, BFLOAT16, runs[:5], runs[5:], plain)
    assert 10 < errors.plain_ratio < 30
    same = errors.beside(plain)
    assert same.ratio is None
    limit = 3 * math.exp(1.5 / math.sqrt(errors.effective))
    assert same.yardstick == limit / errors.plain_ratio
    words = f"the reference itself errs by {errors.plain_ratio:.3g}×"
    assert same.nulls["reference_ratio"].startswith(words)
    other = errors.beside(truth + 0.6 * drawn(32, 64, seed=10).double())
    assert (other.ratio, other.yardstick) == (None, same.yardstick)
    sound, worse = errors.beside(runs[6]), errors.beside(truth + 20 * (plain - truth))
    assert (sound.yardstick, worse.yardstick) == (1, 1)
    assert (sound.ratio or 9) < 1.1
    assert (worse.ratio or 0) > 200


def test_a_lean_that_a_reference_without_yardstick_has_too_is_not_judged() -> None:
    """Few numbers that all lean, in a tensor whose size errs no more than explained."""
    truth = drawn(32, 64).double()
    runs = [truth + 0.01 * drawn(32, 64, seed=i + 1).double() for i in range(7)]
    plain = truth + 0.2 * drawn(32, 64, seed=9).double()
    errors = Errors.of(truth, BFLOAT16, runs[:5], runs[5:], plain)
    leaning = errors.beside(truth * 1.005)
    assert not errors._beyond(truth * 1.005).is_doubtful
    assert leaning.slope is None
    assert (leaning.yardstick or 1) < 0.2


@pytest.mark.parametrize(("count", "is_one"), [(16, True), (4096, False)])
def test_few_numbers_may_err_more_by_luck_and_still_be_a_yardstick(
    count: int, is_one: bool
) -> None:
    """The reference errs by 4 times what its operations explain."""
    truth = drawn(count).double()
    runs = [truth + 0.01 * drawn(count, seed=i + 1).sign().double() for i in range(7)]
    plain = truth + 0.042 * drawn(count, seed=9).sign().double()
    errors = Errors.of(truth, BFLOAT16, runs[:5], runs[5:], plain)
    assert 3.8 < errors.plain_ratio < 4.1
    assert errors.is_yardstick is is_one
    assert (errors.beside(plain).yardstick == 1) is is_one


# --- gradients whose terms cancel -----------------------------------------------------


def shifted(x: Tensor, b: Tensor) -> Tensor:
    return x + b.view(1, -1, 1, 1)


def group_norm(x: Tensor, b: Tensor) -> Tensor:
    return nn.functional.group_norm(shifted(x, b), 8).mean((2, 3))


def channel_norm(x: Tensor, b: Tensor) -> Tensor:
    y = nn.functional.batch_norm(shifted(x, b), None, None, training=True)
    return y.mean((0, 2, 3))


def layer_norm(x: Tensor, b: Tensor) -> Tensor:
    return nn.functional.layer_norm(shifted(x, b), x.shape[2:]).mean((2, 3))


def softmax(x: Tensor, b: Tensor) -> Tensor:
    return shifted(x, b).flatten(2).softmax(-1).sum(-1)


@pytest.mark.parametrize("function", [group_norm, channel_norm, layer_norm, softmax])
def test_a_gradient_whose_terms_cancel_errs_as_its_terms(
    function: Callable[..., Tensor],
) -> None:
    """A shift before a norm has the gradient 0. In float32 PyTorch's own errors are those
    that are explained, within a factor, and not larger than the terms make them."""
    errors = gradient_errors(function)
    assert float(errors.truth.abs().max()) < 1e-12
    assert 0.1 < errors.plain_ratio < 2
    of_terms = 8 * 144 * U  # of a channel, each of up to 1
    assert errors.rms < of_terms


def gradient_errors(function: Callable[..., Tensor]) -> Errors:
    """What may be erred in the gradient of a function's second argument, float32 [8], of
    which each element shifts a channel of the first one, [8, 8, 12, 12]."""
    of = reference(function, drawn(8, 8, 12, 12), drawn(8, seed=1), backward=True)
    name = "b_grad"
    runs = [[x[name] for x in each] for each in (of.rounded, of.sound)]
    plain = of.plain.tensors[name].double()
    return Errors.of(of.truth[name], FORMATS["float32"], *runs, plain)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, None, None, weight, bias, training=True)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In two passes, each of a float32 sum over 9,216 numbers."""
    mean = x.mean((0, 2, 3), keepdim=True)
    variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
    scale = torch.rsqrt(variance + 1e-5) * weight.view(1, -1, 1, 1)
    return (x - mean) * scale + bias.view(1, -1, 1, 1)


def images(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((16, 8, 24, 24), (8,), (8,))
    )
    return x + 2, weight, bias


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_channel_of_a_batch_norm_shares_the_errors_of_its_statistics(seed: int) -> None:
    """All of a channel leans as its deviation does, in sound code too; 200 roundings more
    are no luck."""
    same = {"reference": batch_norm, "inputs": images, "seeds": seed, "device": "cpu"}
    result = check_beside(by_hand, **same)
    assert result.passed, result.in_short
    scaled = check_beside(lambda *x: by_hand(*x) * (1 + 200 * 2.0**-24), **same)
    assert scaled.verdict == "FAIL"


# --- what elements share --------------------------------------------------------------


def test_equal_values_err_alike() -> None:
    """A kernel computes the same from the same: of a clamped tensor, half of which is 1,
    that is one draw and not thousands. Compiled code was accused of it."""
    x = drawn(64, 64).clamp(-1, 1).double()
    wide = Arithmetic(noise=1).result(aten.exp.default, (x,), x.exp(), torch.float32)
    error = (wide - x.exp())[x == 1]
    assert len(error) > 100
    assert len(error.unique()) == 1
    others = (wide - x.exp())[x.abs() < 1]
    assert len(others.unique()) > 0.9 * len(others)
    again = Arithmetic(noise=1)._drawn_by_value(x)
    other = Arithmetic(noise=2)._drawn_by_value(x)
    assert abs(float(torch.corrcoef(torch.stack([again[0], other[0]]))[0, 1])) < 0.5


@pytest.mark.parametrize("count", [100, 100_000])
def test_numbers_by_value_are_standard_normal_and_new_for_each_operation(
    count: int,
) -> None:
    arithmetic, values = Arithmetic(noise=5), drawn(count).double()
    one, two = (arithmetic._drawn_by_value(values) for _ in range(2))
    bound = 5 / math.sqrt(count)
    for x in (one, two):
        assert abs(float(x.mean())) < bound
        assert abs(float(x.square().mean()) - 1) < 2 * bound
    assert abs(float((one * two).mean())) < bound
    assert len(one.unique()) > 0.9 * count


def test_a_norms_elements_share_the_errors_of_their_statistics() -> None:
    """A group with a mean of 50 times its spread loses it in float32, the others not; and
    what it loses is one shift for all of it."""
    x = drawn(4, 6, 8, 8).double()
    x[:, 2:4] += 50
    args = (x, None, None, 4, 6, 64, 3, 1e-5)
    result = aten.native_group_norm.default(*args)[0]
    runs = [
        Arithmetic(noise=i).result(
            aten.native_group_norm.default, args, result, torch.float32
        )
        - result
        for i in range(20)
    ]
    errors = torch.stack(runs).reshape(20, 4, 3, -1)
    shift, spread = errors.mean(-1), errors.std(-1)
    by_group = shift.square().mean((0, 1)).sqrt()
    assert float(by_group[1] / by_group[0]) > 10
    assert float((shift[:, :, 1].abs() / spread[:, :, 1]).median()) > 3


def separable(x: Tensor) -> Tensor:
    """Twice as large by linear interpolation, axis by axis, in the dtype of x."""
    for axis in (2, 3):
        size = x.shape[axis]
        place = ((torch.arange(2 * size) + 0.5) / 2 - 0.5).clamp(0, size - 1)
        low = place.floor().long()
        high = (low + 1).clamp(max=size - 1)
        weight = (place - low).reshape([-1] + [1] * (3 - axis))
        x = x.index_select(axis, low) * (1 - weight) + x.index_select(axis, high) * weight
    return x


def doubled(x: Tensor) -> Tensor:
    return torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear")


def by_parts(x: Tensor, y: Tensor) -> Tensor:
    """A complex product by four real ones: a part may cancel."""
    real = x.real @ y.real - x.imag @ y.imag
    return torch.complex(real, x.real @ y.imag + x.imag @ y.real)


@pytest.mark.parametrize("seed", [0, 30])
def test_sound_code_in_another_order_is_not_accused(seed: int) -> None:
    """Both were, in float32: neither weighted means nor the parts of complex sums had
    more than the rounding of their results."""

    def pair(seed: int) -> tuple[Tensor, Tensor]:
        parts = torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(seed))
        return torch.complex(*parts[:2]), torch.complex(*parts[2:])

    def plane(seed: int) -> Tensor:
        return torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(seed))

    for function, reference, inputs in (
        (separable, doubled, plane),
        (by_parts, torch.matmul, pair),
    ):
        result = check_beside(
            function, reference=reference, inputs=inputs, seeds=seed, formats="float32"
        )
        assert result.passed, str(result)


GRID = 0.6 * drawn(2, 9, 8, 2, seed=4)
BAGS = torch.randint(0, 50, (20, 16), generator=torch.Generator().manual_seed(3))
# Of operators that add inside: a function of them, and its arguments
ADDING: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "addbmm": (
        torch.addbmm,
        (drawn(32, 32), drawn(16, 32, 64), drawn(16, 64, 32, seed=1)),
    ),
    "bilinear": (
        torch.nn.functional.bilinear,
        (drawn(32, 24), drawn(32, 20), drawn(16, 24, 20)),
    ),
    "trace": (lambda x: torch.stack([p.trace() for p in x]), (drawn(9, 300, 300),)),
    "put": (
        lambda x, y: x.put(torch.arange(4096) % 64, y, accumulate=True),
        (drawn(64), drawn(4096)),
    ),
    "index_put": (
        lambda x, y: x.index_put((torch.arange(4096) % 64,), y, accumulate=True),
        (drawn(64), drawn(4096)),
    ),
    "embedding_bag": (
        lambda w: torch.nn.functional.embedding_bag(BAGS, w, mode="sum"),
        (drawn(50, 32),),
    ),
    "embedding_bag, means": (
        lambda w: torch.nn.functional.embedding_bag(BAGS, w, mode="mean"),
        (drawn(50, 32),),
    ),
    "fft": (lambda x: torch.view_as_real(torch.fft.fft(x)), (drawn(16, 256),)),
    "rfft and irfft": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho"), n=250),
        (drawn(16, 256),),
    ),
    "fft2": (lambda x: torch.fft.fft2(x, norm="forward").real, (drawn(4, 32, 24),)),
    "grid_sample": (
        partial(torch.nn.functional.grid_sample, align_corners=False),
        (drawn(2, 4, 16, 14), GRID),
    ),
    **{
        f"interpolated {mode} {size}": (
            partial(
                torch.nn.functional.interpolate,
                size=[size, size],
                mode=mode,
                antialias=antialias,
            ),
            (drawn(2, 4, 16, 16),),
        )
        for mode in ("bilinear", "bicubic")
        for size, antialias in ((32, False), (7, False), (41, False), (9, True))
    },
}


@pytest.mark.parametrize("name", ADDING)
def test_pytorch_errs_as_explained_in_what_adds_inside(name: str) -> None:
    """Output and gradients, in float32. A reference that errs by more than three times
    that is no yardstick, and a sound function beside it may be accused."""
    function, tensors = ADDING[name]
    leaves = [x.clone().requires_grad_() for x in tensors]
    arguments = Arguments(
        positional=tuple(leaves),
        named={},
        names=tuple(f"x{i}" for i in range(len(leaves))),
    )
    reference = FunctionReference(
        function=function, arguments=arguments, seed=0, backward=True
    )
    assert len(reference.truth) == 1 + len(leaves)
    for each, exact in reference.truth.items():
        runs = [x[each] - exact for x in reference.rounded]
        explained = float(torch.stack(runs).square().mean().sqrt())
        plain = reference.plain.tensors[each].double() - exact
        assert float(plain.square().mean().sqrt()) <= 1.5 * explained, each
