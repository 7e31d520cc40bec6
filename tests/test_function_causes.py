"""What a function computes in place of its reference: named where it explains the error
tenfold, with the number that fits, and not named where nothing does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import numdev
from numdev.errors import MeasurementError
from numdev.exact.wide_tensors import Wide, widened
from numdev.formats import FORMATS, round_to
from numdev.function_check import check_beside
from numdev.operations.function import substituted_references
from numdev.operations.function.causes import causes_of
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.substituted_operations import OperatorCall, truncated
from numdev.operations.function.substituted_references import references_of_other_inputs
from numdev.operations.function.trees import arguments_of
from numdev.report.number_text import three

Function = Callable[..., Tensor]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def cause(reference: Function, wrong: Function, *arguments: object) -> str | None:
    """What is named of a wrong function, which is computed in float64 and rounded once."""
    of = FunctionReference(
        function=reference, arguments=arguments_of(arguments, reference), seed=0,
        backward=False,
    )  # fmt: skip
    floats = [x for x in arguments if isinstance(x, Tensor) and x.is_floating_point()]
    wide = [x.double() if any(x is y for y in floats) else x for x in arguments]
    output = wrong(*wide).to(floats[0].dtype)
    named = causes_of(of, {"output": output}, {})
    return named["output"].words if named else None


def layer_norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, eps=eps)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.0884) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * scale).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


SMALL = [x * 1e-3 for x in drawn((48, 128))] + drawn((128,))


@pytest.mark.parametrize(
    ("reference", "wrong", "arguments", "words"),
    [
        (rms_norm, lambda x, w: rms_norm(x, w, 1e-5), SMALL,
         "eps is 1e-05 in place of 1e-06"),
        (layer_norm, lambda x, w: layer_norm(x, w, 3e-5), SMALL,
         "eps is 3e-05 in place of 1e-05"),
        (attention, lambda q, k, v: attention(q, k, v, 0.125),
         drawn((2, 24, 32), (2, 24, 32), (2, 24, 32)),
         "scale is 0.125 in place of 0.0884"),
        (lambda x: F.softplus(x, beta=1.5), lambda x: F.softplus(x, beta=1.7),
         drawn((48, 128)), "beta is 1.7 in place of 1.5"),
        (lambda x: F.leaky_relu(x, 0.01), lambda x: F.leaky_relu(x, 0.2),
         drawn((48, 128)), "negative_slope is 0.2 in place of 0.01"),
        (lambda x: x * 0.37 + x.square(), lambda x: x * 0.41 + x.square(),
         drawn((48, 128)), "it multiplies by 0.41 in place of 0.37"),
    ],
)  # fmt: skip
def test_the_number_that_stands_in_place_of_another_is_fitted(
    reference: Function, wrong: Function, arguments: list[Tensor], words: str
) -> None:
    assert cause(reference, wrong, *arguments) == words


@pytest.mark.parametrize(
    ("reference", "wrong", "shapes", "words"),
    [
        (F.gelu, lambda x: F.gelu(x, approximate="tanh"), [(48, 128)],
         "it computes GELU by tanh in place of gelu"),
        (gelu_by_hand, lambda x: F.gelu(x, approximate="tanh"), [(48, 128)],
         "it computes the tanh of GELU by tanh in place of erf"),
        (F.gelu, F.silu, [(48, 128)], "it computes SiLU in place of gelu"),
        (layer_norm, lambda x, w: rms_norm(x, w, 1e-5), [(48, 12), (12,)],
         "native_layer_norm does not take the mean away, as RMSNorm"),
        (lambda x: x.var(-1), lambda x: x.var(-1, correction=0), [(48, 32)],
         "means divide by n - 1, or a sample variance by n"),
        (lambda x: x.log_softmax(-1), lambda x: x.log_softmax(-1) / math.log(2),
         [(48, 32)], "logarithms are to the base 2"),
        (lambda x: x.softmax(-1), lambda x: x.softmax(0), [(48, 32)],
         "softmax goes along axis 0"),
        (lambda x: x.cumsum(-1), lambda x: x.cumsum(-1) - x, [(48, 32)],
         "cumsum leaves out the place itself"),
        (attention, lambda q, k, v: (q @ k.mT * 0.0884).softmax(-1) @ v,
         [(2, 24, 32)] * 3, "masked_fill is left out"),
        (lambda x, y: x + F.silu(y), lambda x, y: x + y, [(48, 32)] * 2,
         "silu is left out"),
        (lambda x, y: x - y / 3, lambda x, y: y - x / 3, [(48, 32)] * 2,
         "x and y are exchanged"),
        (lambda x, w: x * w, lambda x, w: x * (1 + w), [(48, 32), (32,)],
         "+1 is added to w"),
        (lambda x: x.mean(-1), lambda x: x.mean(-1) * 32 / 31, [(48, 32)],
         "means divide by n - 1, or a sample variance by n"),
        (torch.matmul, lambda x, y: (x @ y).mean(0, keepdim=True).expand(24, 32),
         [(24, 40), (40, 32)], "it is the mean along axis 0"),
    ],
)  # fmt: skip
def test_a_known_twin_is_named(
    reference: Function, wrong: Function, shapes: list[tuple[int, ...]], words: str
) -> None:
    assert cause(reference, wrong, *drawn(*shapes)) == words


def in_blocks(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], y.shape[1], dtype=torch.float64)
    for a, b in zip(x.split(32, 1), y.split(32), strict=True):
        total = round_to(total + a @ b, FORMATS["bfloat16"])
    return total


def first_bits(x: Tensor, count: int) -> Tensor:
    """The values of float32 with their first bits alone, the others 0."""
    bits = x.float().view(torch.int32) & -(1 << (32 - count))
    return bits.view(torch.float32).to(x.dtype)


@pytest.mark.parametrize(
    ("wrong", "dtype", "words"),
    [
        (in_blocks, torch.float32, "sums are accumulated in bfloat16, 32 terms at a time"),
        (in_blocks, torch.bfloat16,
         "sums are accumulated in bfloat16, 32 terms at a time"),
        (lambda x, y: round_to(x, FORMATS["tf32"]) @ round_to(y, FORMATS["tf32"]),
         torch.float32, "the factors of products are in tf32"),
        (lambda x, y: first_bits(x, 19) @ first_bits(y, 19), torch.float32,
         "the factors of products are cut to tf32"),
        (lambda x, y: first_bits(x, 16) @ first_bits(y, 16), torch.float32,
         "the factors of products are cut to bfloat16"),
        (lambda x, y: round_to(x, FORMATS["float16"]) @ y, torch.float32,
         "argument_0 is read in tf32"),
        (lambda x, y: x[:, :-1] @ y[:-1], torch.bfloat16,
         "sums leave out their last term"),
        (lambda x, y: x[:, 1:] @ y[1:], torch.bfloat16, "sums leave out their first term"),
    ],
)  # fmt: skip
def test_coarser_sums_and_factors_are_named(
    wrong: Function, dtype: torch.dtype, words: str
) -> None:
    """In bfloat16 the output's own rounding hides most of the error, and the alternative
    is compared rounded too."""
    arguments = drawn((32, 256), (256, 48), dtype=dtype)
    assert cause(torch.matmul, wrong, *arguments) == words


class ReadInTF32(torch.autograd.Function):
    """A convolution as cuDNN computes it in float32 where TF32 is allowed."""

    @staticmethod
    def forward(context: Any, x: Tensor, w: Tensor) -> Tensor:
        factors = [first_bits(x, 19), first_bits(w, 19)]
        context.save_for_backward(*factors)
        return F.conv1d(*factors)

    @staticmethod
    def backward(context: Any, back: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = context.saved_tensors
        back = first_bits(back, 19)
        return (
            torch.nn.grad.conv1d_input(x.shape, w, back),
            torch.nn.grad.conv1d_weight(x, w.shape, back),
        )


def coarse_convolution(x: Tensor, w: Tensor) -> Tensor:
    """A reference that PyTorch runs coarser than its operations explain."""
    return F.conv1d(x, w) if isinstance(x, Wide) else ReadInTF32.apply(x, w)


@pytest.mark.slow
def test_what_the_reference_itself_errs_by_is_named() -> None:
    """On an H200 the convolutions of a reference in float32 erred by up to 68,000 times
    what their operations explain, and the report said no more than that."""
    checked = numdev.check(
        F.conv1d,
        reference=coarse_convolution,
        inputs=lambda seed: tuple(drawn((2, 8, 40), (6, 8, 3))),
        formats=["bfloat16", "float32"],
        seeds=0,
        backward=True,
    )
    words = "the factors of products are cut to tf32"
    rows = [row for row in checked.report.rows if row.role == "baseline"]
    errors = {
        (row.case, row.format, row.tensor): row.beside_reference.predicted_ratio or 0.0
        for row in rows
        if row.beside_reference is not None
    }
    named = {(row.tensor, row.format) for row in rows if row.suspicion == words}
    assert named == {(name, "float32") for name in ("output", "x_grad", "w_grad")}
    (case, fmt, _), worst = max(errors.items(), key=lambda item: item[1])
    notes = [note for note in checked.notes if note.startswith("The reference errs")]
    assert notes == [
        f"The reference errs in output, x_grad and w_grad by up to {three(worst)}× what "
        f"its operations explain, as PyTorch runs it here ({case}, {fmt}): {words}; it "
        "is no yardstick. PyTorch leaves TF32 alone with "
        "`torch.backends.cudnn.allow_tf32 = False` (matrix products: "
        "`torch.backends.cuda.matmul`) in the reference's file."
    ]
    assert checked.passed


@pytest.mark.gpu
def test_bits_are_cut_on_a_gpu_as_on_a_cpu() -> None:
    """An alternative that raises there would silently be none: on an H200 Triton's TF32
    had no name."""
    x = torch.randn(64, dtype=torch.float64)
    on_gpu = widened(truncated(x.cuda(), FORMATS["tf32"]))
    assert on_gpu.cpu().equal(first_bits(x.float(), 19).double())


def with_places(change: Callable[[Tensor], None]) -> Function:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        out = x @ y
        change(out)
        return out

    return wrong


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out[3].copy_(out[2]), "row 3 of axis 0 holds row 2"),
        (lambda out: out[60:].zero_(), "rows 60 to 63 of axis 0 hold 0"),
        (lambda out: out[15::16].copy_(out[14::16].clone()),
         "every 16th row from 15 of axis 0 hold the row before"),
        (lambda out: out[:, 5].copy_(out[:, 9]), "place 5 of axis 1 holds place 9"),
        (lambda out: out[16:32, 32:48].copy_(out[:16, :16]),
         "tile 6 of 16 × 16 places holds tile 0"),
    ],
)  # fmt: skip
def test_stale_places_are_named(change: Callable[[Tensor], None], words: str) -> None:
    arguments = drawn((64, 40), (40, 64), dtype=torch.bfloat16)
    assert cause(torch.matmul, with_places(change), *arguments) == words


def test_places_of_one_number_are_named_where_they_are_0_alone() -> None:
    """Another's single number stands anywhere by luck."""
    [x] = drawn((256, 64))

    def without_last(x: Tensor) -> Tensor:
        out = x.mean(-1)
        out[240:] = 0
        return out

    def stale(x: Tensor) -> Tensor:
        out = x.mean(-1)
        out[3] = out[9]
        return out

    def mean(x: Tensor) -> Tensor:
        return x.mean(-1)

    assert cause(mean, without_last, x) == "rows 240 to 255 of axis 0 hold 0"
    assert cause(mean, stale, x) is None


def test_a_batch_entry_that_is_anothers_is_named() -> None:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x[:3] @ y[:3], x[:1] @ y[:1]))

    arguments = drawn((4, 24, 32), (4, 32, 16))
    assert cause(torch.bmm, wrong, *arguments) == "row 3 of axis 0 holds row 0"


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
def test_noise_and_sound_results_have_no_cause(size: float) -> None:
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(9)
        noise = torch.randn(x.shape, generator=generator)
        return rms_norm(x, w) * (1 + size * noise)

    arguments = drawn((48, 128), (128,), dtype=torch.bfloat16)
    assert cause(rms_norm, noisy, *arguments) is None
    assert cause(rms_norm, rms_norm, *arguments) is None


def test_a_batch_norm_without_running_statistics_does_not_crash() -> None:
    """In evaluation PyTorch would read statistics that are not there."""
    [x] = drawn((16, 8, 12))

    def norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    def wrong(x: Tensor) -> Tensor:
        return norm(x) + 0.3 * torch.sin(37 * x)

    assert cause(norm, wrong, x) is None


def test_an_alternative_that_is_not_finite_explains_nothing() -> None:
    """x to the power 0.2 is NaN for half of the numbers, and no explanation of them."""
    arguments = drawn((48, 128))
    named = cause(lambda x: x**2 + 1, lambda x: x.abs() ** 1.5 + 1.3, *arguments)
    assert named is None


def test_a_reference_that_does_not_run_again_costs_the_name_alone() -> None:
    runs = []

    def reference(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) > 2:
            raise RuntimeError("once only")
        return x * 3 + x.exp()

    [x] = drawn((16, 16))
    of = FunctionReference(
        function=reference, arguments=arguments_of((x,), reference), seed=0,
        backward=False,
    )  # fmt: skip
    words = r"could not be computed here, the first `means .*\(RuntimeError: once only\)"
    with pytest.raises(MeasurementError, match=words):
        causes_of(of, {"output": x * 3}, {})


def eight_bits(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("reference", "arguments"),
    [
        (lambda x: torch.fft.fft(x).abs(), drawn((8, 32))),
        (lambda x: (x.cfloat() @ x.cfloat().mT).sum(-1).abs(), drawn((16, 32))),
        (lambda x: x.cfloat().tanh().logsumexp(-1).real, drawn((16, 32))),
        (lambda x: x.float() * 3, [eight_bits(x) for x in drawn((8, 32))]),
    ],
)
def test_every_alternative_to_complex_and_8_bit_numbers_can_be_computed(
    reference: Function, arguments: list[Tensor]
) -> None:
    """Where none explains an output, that is no failure."""
    of = FunctionReference(
        function=reference, arguments=arguments_of(arguments, reference), seed=0,
        backward=False,
    )  # fmt: skip
    truth = of.truth["output"]
    [noise] = drawn(tuple(truth.shape))
    assert causes_of(of, {"output": truth + noise}, {}) == {}


def test_a_float8_argument_is_read_with_other_numbers() -> None:
    x = torch.tensor([0.5, 1.0, -2.0, 448.0])
    others = dict(substituted_references._other_values("x", eight_bits(x)))
    for words, wanted in (
        ("+1 is added to x", x + 1),
        ("x is read with the other sign", -x),
    ):
        assert torch.equal(others[words].float(), eight_bits(wanted).float())


def test_an_alternative_that_cannot_be_computed_is_no_silent_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TF32 had no name on a GPU, since its alternative raised there and counted as one
    that explains nothing. Where another function explains the output, nothing is said."""

    def broken(*_: object, **__: object) -> object:
        raise NotImplementedError("not on this device")

    monkeypatch.setattr(substituted_references, "narrow_factors", broken)
    arguments = drawn((32, 64), (64, 48))
    with pytest.raises(MeasurementError, match=r"factors of products .*not on this"):
        cause(
            torch.matmul, lambda x, y: first_bits(x, 19) @ first_bits(y, 19), *arguments
        )
    halved = cause(torch.matmul, lambda x, y: x[:, :-1] @ y[:-1], *arguments)
    assert halved == "sums leave out their last term"


def test_rows_of_a_table_that_are_left_out_are_named_for_the_table() -> None:
    """Which rows of the output are 0 for it is a matter of these tokens; rows that a
    kernel did not write are named as what they are."""
    [table] = drawn((96, 32))
    tokens = torch.randint(0, 96, (64,), generator=torch.Generator().manual_seed(0))

    def embed(table: Tensor, tokens: Tensor) -> Tensor:
        return table[tokens] * 5.5

    def unwritten(table: Tensor, tokens: Tensor) -> Tensor:
        return embed(table, tokens).index_fill(0, torch.arange(7, 9), 0.0)

    words = "the last 6 of 96 places of axis 0 of table are left out"

    def without_six(table: Tensor, tokens: Tensor) -> Tensor:
        return embed(table.index_fill(0, torch.arange(90, 96), 0.0), tokens)

    assert cause(embed, without_six, table, tokens) == words
    assert cause(embed, unwritten, table, tokens) == "rows 7 to 8 of axis 0 hold 0"


def in_memory(x: Tensor) -> Tensor:
    """The numbers of x in the order of its memory, in its shape."""
    return torch.as_strided(x, (x.numel(),), (1,)).reshape(x.shape)


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """What memory that is written in x's order holds for strides of `like`."""
    return torch.as_strided(x.contiguous(), x.shape, like.stride())


@pytest.mark.parametrize("axes", [(1, 0), (0, 2, 1), (2, 0, 1)])
def test_code_that_takes_an_argument_for_contiguous_is_named(
    axes: tuple[int, ...],
) -> None:
    x, w = drawn((16, 24, 40)[: len(axes)], (16, 24, 40))
    x = x.permute(axes)
    w = w.flatten()[: x.shape[-1]]
    words = "x is read as if it were contiguous"
    assert cause(rms_norm, lambda x, w: rms_norm(in_memory(x), w), x, w) == words

    def writes_so(x: Tensor, w: Tensor) -> Tensor:
        return laid_out_as(rms_norm(in_memory(x), w), x)

    both = f"{words}, and the result is written so"
    assert cause(rms_norm, writes_so, x, w) == both


def test_an_argument_with_gaps_in_its_memory_has_no_other_order() -> None:
    x, w = drawn((32, 96), (48,))
    of = FunctionReference(
        function=rms_norm, arguments=arguments_of((x[:, ::2], w), rms_norm), seed=0,
        backward=False,
    )  # fmt: skip
    words = [each.words for each in references_of_other_inputs(of)]
    assert words
    assert not [x for x in words if "contiguous" in x]


def exp_in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(w)
    y.add_(x)
    return y


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x, w: x.exp() * w, "add is left out"),
        (lambda x, w: x.exp() + x, "w is taken for 1"),  # mul is left out
        (lambda x, w: x.exp() * w + 2 * x, None),  # added twice
        (lambda x, w: exp_in_place(x, w.where(w > 0, 0.0)), None),
    ],
)
def test_operations_in_place_run_once_and_can_be_left_out(
    wrong: Function, words: str | None
) -> None:
    named = cause(exp_in_place, wrong, *drawn((24, 32), (24, 32)))
    if words is None:
        assert named is None or "left out" not in named
    else:
        assert named == words


def test_blocks_of_a_product_keep_its_factors() -> None:
    def reference(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, x, y, beta=0.5, alpha=2.0)

    def wrong(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        total = torch.zeros_like(c)
        for a, b in zip(x.split(16, -1), y.split(16, -2), strict=True):
            total = round_to(total + a @ b, FORMATS["float16"])
        return 2 * total + 0.5 * c

    words = "sums are accumulated in float16, 16 terms at a time"
    assert cause(reference, wrong, *drawn((24, 96), (96, 24), (24, 24))) == words


def test_few_numbers_are_explained_by_luck() -> None:
    """One number fits seven of nearly one size; eight are enough to tell."""
    for count, words in ((7, None), (8, "it is 1.37 times what it should be")):
        x = torch.linspace(1, 2, count)
        assert cause(lambda x: x.sin(), lambda x: 1.37 * x.sin(), x) == words


def test_a_term_that_is_left_out_is_no_exponent_with_which_it_vanishes() -> None:
    """Of -300, the fit of a power that was not added."""

    def loss(x: Tensor) -> Tensor:
        size = torch.logsumexp(x, -1)
        return size - x[:, 0] + 1e-2 * size**2

    def without(x: Tensor) -> Tensor:
        return torch.logsumexp(x, -1) - x[:, 0]

    result = check_beside(without, reference=loss, shapes="x=40x64", formats="float32")
    assert "exponent" not in str(result), str(result)
    assert any(x in str(result) for x in ("multiplies by 0", "add is left out"))


def test_a_number_that_takes_most_of_another_functions_error_is_no_name() -> None:
    """A vector that is nearly constant is added: the constant takes 97 % of that, and what
    is left is far more than rounding."""
    (x,) = drawn((64, 48))
    bias = 0.5 + 0.02 * torch.linspace(-3, 3, 48).sin()
    named = {}
    for width, added in (("whole", bias), ("constant", torch.tensor(0.5))):

        def wrong(x: Tensor, added: Tensor = added) -> Tensor:
            return x.tanh() + added

        checked = numdev.check(
            wrong, reference=torch.tanh, inputs=lambda seed: (x,), formats=["float32"]
        )
        named[width] = {row.suspicion for row in checked.report.rows} - {None}
    assert named == {"whole": set(), "constant": {"0.5 is added to it"}}


def test_where_the_formula_errs_less_than_pytorchs_kernels_it_is_told() -> None:
    """Beside attention whose q, k and v are not negative: with what kernels do, and not as
    a cause of an error."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def inputs(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.rand(1, 2, 64, 32, generator=generator) for _ in range(3))

    checked = numdev.check(
        attend, reference=attend, inputs=inputs, formats=["bfloat16"], backward=True
    )
    assert checked.passed
    rows = [row for row in checked.report.rows if row.role == "baseline"]
    ratios = {
        (row.tensor, row.case): row.beside_reference.formula_ratio or 0.0
        for row in rows
        if row.beside_reference is not None
    }
    (tensor, case), worst = max(ratios.items(), key=lambda item: item[1])
    assert (tensor, worst > 4) == ("q_grad", True)
    notes = [
        note for note in checked.notes if "what the reference's formula does" in note
    ]
    assert notes == [
        f"In q_grad the steps of PyTorch's kernels err by up to {three(worst)}× what the "
        f"reference's formula does, and a function may err as much ({case}, bfloat16): "
        "attention is one kernel here, which takes the row sums of its gradients from the "
        "rounded output."
    ]
    assert not any(row.suspicion for row in checked.report.rows)


def test_an_operator_that_writes_and_returns_another_tensor_is_no_writer() -> None:
    """Of one that is, such as `add_`, the replacement is written into its argument."""
    twice = torch.library.Library("numdev_test", "FRAGMENT")
    twice.define("scale_and_double(Tensor(a!) x) -> Tensor")
    double = torch.ops.numdev_test.scale_and_double.default
    x = torch.ones(2)
    assert not OperatorCall(double, (x,), {}).is_writer
    assert OperatorCall(torch.ops.aten.add_.Tensor, (x, x), {}).is_writer
    assert not OperatorCall(torch.ops.aten.add.Tensor, (x, x), {}).is_writer
