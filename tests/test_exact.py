"""Tensors that say a format and hold fp64: the exact run, the rounded run, and what is
refused.

The oracle is PyTorch itself: the same function on fp64 tensors, and on tensors of the
format."""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loaded import load
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numdev.errors import UsageError
from numdev.exact.evaluation import Computing, computing, evaluate
from numdev.exact.rounded_results import EveryOperation
from numdev.exact.unsupported_operations import Unsupported
from numdev.exact.wide_copies import wide_arguments
from numdev.exact.wide_tensors import Wide, narrowed, widened
from numdev.formats import FORMATS, round_to

FUNCTIONS = load("benchmarks/small_functions.py").FUNCTIONS
predictions = load("benchmarks/exact_predictions.py")
BF16 = torch.bfloat16
TENTH = 0.10009765625  # 0.1 in bfloat16
# Functions whose exact run is no other computation than fp64's, and yet not bit by bit.
NOT_BITWISE = {
    "rms_norm": 1e-8,  # PyTorch turns eps into float32 before any operator
    # Autograd takes a formula that is safe for zeros with tensors of a subclass
    "product": 1e-14,
}
# Where PyTorch's own kernel for a CPU errs more than one rounding of its result, and so
# than what is predicted; and where it adds up in bfloat16, one term after another.
ROUNDS_INSIDE = {
    "product": "multiplies in bfloat16",
    "rms_norm_by_hand": "rsqrt rounds its root where elements fill no vector",
    "layer_norm": "adds up the gradients of weight and bias in bfloat16",
    "batch_norm": "keeps its statistics in bfloat16",
    "log_softmax": "keeps its logarithm in bfloat16",
    "cross_entropy": "log_softmax",
    "divergence": "log_softmax",
    "embedding": "adds up gradients of a repeated token in bfloat16",
    "gather": "adds up gradients of a repeated index in bfloat16",
    "index_put": "adds up repeated indices in bfloat16",
}


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(BF16)


def rounded(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    """The output of a run with every operation rounded, as ordinary tensors."""
    output = evaluate(function, *arguments, rounding=EveryOperation(), **how).output
    return narrowed(output)


# --- both runs, forward and backward --------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_exact_run_is_fp64s(name: str) -> None:
    """Output and gradients equal those of the same function on fp64 tensors, bit by
    bit."""
    arguments = predictions.inputs_of(name, 0, BF16)
    truth = predictions.plain(name, predictions.cast(arguments, torch.float64), BF16)
    exact = predictions.computed(name, arguments, BF16)
    for value, expected in zip(
        predictions.flat(exact), predictions.flat(truth), strict=True
    ):
        assert value.dtype == torch.float64
        if name in NOT_BITWISE:
            torch.testing.assert_close(value, expected, rtol=NOT_BITWISE[name], atol=0)
        else:
            assert torch.equal(value, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rounded_run_errs_as_pytorchs_own(name: str) -> None:
    """The rms error of PyTorch's bfloat16 output and gradients, over that of the rounded
    run."""
    _, ratios = predictions.ratios_of(name, 1, BF16)
    for ratio in (ratio for ratio in ratios if not math.isnan(ratio)):  # neither errs
        if name in ROUNDS_INSIDE:
            assert 0.9 < ratio < 10
        else:
            assert ratio == pytest.approx(1, abs=0.03)


class Noting(TorchDispatchMode):
    """What PyTorch calls, and the dtypes of the results; without views, of which tensors
    of a subclass get more after a write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be loaded, for three seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.noted(func, func(*args, **(kwargs or {})))

    def noted(self, func: Any, result: Any) -> Any:
        if not func.is_view:
            dtypes = [x.dtype for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.calls.append((str(func), dtypes))
        return result


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_are_pytorchs_and_say_its_dtypes(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward call the same operators in the same order as in the format."""
    function, arguments = FUNCTIONS[name][0], predictions.inputs_of(name, 0, dtype)
    leaves = [x for x in arguments if x.is_floating_point()]
    back = torch.ones_like(function(*arguments))
    plain, wide = Noting(), Noting()
    with plain, sdpa_kernel(SDPBackend.MATH):
        torch.autograd.grad(function(*arguments), leaves, back)
    original = Computing.__torch_dispatch__

    def dispatch(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return wide.noted(func, original(self, func, types, args, kwargs))

    monkeypatch.setattr(Computing, "__torch_dispatch__", dispatch)
    evaluate(function, *arguments, cotangent=lambda *_: back)
    assert wide.calls == plain.calls


def test_gradients_of_a_module_are_named_and_exact() -> None:
    """Those of parameters and arguments, also where weights are of another dtype than
    inputs."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    model.to(BF16)[1].float()
    x = torch.randn(5, 8).to(BF16).requires_grad_()
    back = torch.randn(5, 4).to(BF16)
    exact = evaluate(model, x, cotangent=lambda *_: back).gradients
    twin, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    expected = torch.autograd.grad(twin(x64), [x64, *twin.parameters()], back.double())
    assert list(exact) == ["[0]", *(name for name, _ in model.named_parameters())]
    for value, truth in zip(exact.values(), expected, strict=True):
        assert value is not None
        assert torch.equal(value, truth)


def test_an_input_that_the_output_does_not_depend_on_has_no_gradient(x: Tensor) -> None:
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    gradients = evaluate(lambda a, b: a * 2, *inputs, cotangent=lambda _, y: y).gradients
    assert gradients["[1]"] is None
    assert torch.equal(gradients["[0]"], 4 * x.double())


def test_a_cotangent_of_another_shape_is_refused(x: Tensor) -> None:
    with pytest.raises(
        UsageError, match=r"cotangent of output 0: expected the shape \[\], got \["
    ):
        evaluate(lambda a: a.sum(), x.clone().requires_grad_(), cotangent=lambda *_: x)


# --- what rounds, and how -------------------------------------------------------------

CARRY = {
    "clamp": lambda x: x.clamp(0.1, 0.1),
    "where": lambda x: torch.where(x == x, 0.1, x),
    "pad": lambda x: F.pad(x, (1, 0), value=0.1)[:, :1],
    "masked_fill": lambda x: x.masked_fill(x == x, 0.1),
    "full": lambda x: torch.full((2, 2), 0.1, dtype=x.dtype),
    "fill_": lambda x: x.clone().fill_(0.1),
    "copy_": lambda x: torch.empty_like(x).copy_(torch.full(x.shape, 0.1)),
    "cast": lambda x: torch.full((2, 2), 0.1, dtype=torch.float64).to(x.dtype),
    "slice": lambda x: torch.zeros_like(x).index_fill(0, torch.arange(64), 0.1),
    "out=": lambda x: torch.mul(torch.ones_like(x), 0.1, out=torch.empty_like(x)),
    "foreach": lambda x: torch._foreach_mul([torch.ones_like(x)], 0.1)[0],
}


@pytest.mark.parametrize("name", CARRY)
def test_numbers_that_operators_carry_are_rounded(name: str, x: Tensor) -> None:
    """Also by those that only move values otherwise; the exact run keeps them."""
    output = evaluate(CARRY[name], x, rounding=EveryOperation()).output
    assert set(widened(output).flatten().tolist()) == {TENTH}
    unrounded = widened(evaluate(CARRY[name], x).output)
    assert set(unrounded.flatten().tolist()) == {0.1}


def test_what_adds_up_while_it_moves_is_rounded(x: Tensor) -> None:
    twice = torch.zeros(2, dtype=torch.int64)

    def put(x: Tensor) -> Tensor:
        return x.index_put((twice,), x[1:3] * 0.01, accumulate=True)

    output = evaluate(put, x, rounding=EveryOperation()).output
    assert torch.equal(output.exact, round_to(output.exact, FORMATS["bfloat16"]))


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: 0.7 * x,
    "quotient": lambda x: x / 0.7,
    "reciprocal": lambda x: 0.7 / x,
    "sum": lambda x: x + 0.7,
    "in place": lambda x: x.clone().add_(0.7),
    "difference": lambda x: 0.7 - x,
    "alpha": lambda x: torch.add(x, x.flip(0), alpha=0.7),
    "power": lambda x: x.abs() ** -0.7,
    "base": lambda x: 0.7**x,
    "remainder": lambda x: torch.remainder(x, 0.7),
    "comparison": lambda x: (x.round(decimals=1) == 0.7) * x,
    "slope": lambda x: F.leaky_relu(x, 0.7),
    "integer": lambda x: x + 1001,
    "of integers": lambda x: torch.arange(1, 49) * 0.7,
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NUMBERS)
def test_python_numbers_are_read_as_kernels_read_them(
    name: str, dtype: torch.dtype, x: Tensor
) -> None:
    """The rounded run is PyTorch's own, element by element, but for its powers of
    float32."""
    x = x.to(dtype)
    same = rounded(NUMBERS[name], x) == NUMBERS[name](x)
    least = 0.95 if name in ("power", "base") and dtype == torch.float32 else 1
    assert same.float().mean() >= least


def test_rounding_at_random_is_unbiased_and_repeats(x: Tensor) -> None:
    """To one of the two neighbours; over 400 seeds the mean is within 5 standard
    errors."""

    x = x[:8]

    def runs(seed: int) -> Tensor:
        return widened(
            evaluate(lambda x: x / 3, x, rounding=EveryOperation(seed=seed)).output
        )

    exact, drawn = x.double() / 3, torch.stack([runs(seed) for seed in range(400)])
    assert torch.equal(runs(7), drawn[7])
    assert (
        int(torch.tensor([len(column.unique()) for column in drawn[:, 0].T]).max()) == 2
    )
    error = (drawn - exact).mean() / (drawn - exact).std() * math.sqrt(drawn.numel())
    assert abs(float(error)) < 5


def test_only_chosen_operations_round(x: Tensor) -> None:
    def is_product(func: Any, args: Any) -> bool:
        return func.overloadpacket.__name__ == "mul"

    output = evaluate(
        lambda x: (x * 0.3).exp(), x, rounding=EveryOperation(chosen=is_product)
    )
    once = round_to(x.double() * 0.3, FORMATS["bfloat16"])
    assert torch.equal(output.output.exact, once.exp())


def test_attention_and_logsumexp_are_their_own_formulas(x: Tensor) -> None:
    """Rounded where PyTorch's formula rounds: attention in float32, `logsumexp` at each
    step. (By its kernel's steps attention rounds more.)"""
    q = x.reshape(1, 4, 16, 48)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    formula = EveryOperation(as_kernels=False)
    narrow = narrowed(evaluate(attend, q, rounding=formula).output).double()
    truth = widened(evaluate(attend, q).output)
    assert not formula.kernels_taken
    floor = round_to(truth, FORMATS["bfloat16"])
    assert (narrow != floor).double().mean() < 1e-3
    assert torch.equal(rounded(lambda x: x.logsumexp(-1), x), x.logsumexp(-1))
    with_axes = evaluate(lambda x: x.logsumexp((0, 1), keepdim=True), x).output
    assert torch.equal(with_axes.exact, x.double().logsumexp((0, 1), keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("dim", [1, (0, 1), ()])
@pytest.mark.parametrize("shape", [(2, 0), (0, 2), (2, 3)])
def test_logsumexp_of_no_numbers_and_of_complex_ones_is_pytorchs(
    shape: tuple[int, ...], dim: Any, dtype: torch.dtype
) -> None:
    """-inf of no numbers."""
    x = torch.ones(shape, dtype=dtype)

    def function(x: Tensor) -> Tensor:
        return torch.logsumexp(x, dim, keepdim=True)

    torch.testing.assert_close(rounded(function, x), function(x))


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.tril(3).triu(-20))


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all keys": F.scaled_dot_product_attention,
    "causal": partial(F.scaled_dot_product_attention, is_causal=True, scale=0.3),
    "masked": masked,
    "added": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, q.mean() * q @ k.mT),
    "shared keys": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], enable_gqa=True
    ),
}


def kernel_errors(
    function: Callable[..., Tensor], arguments: Sequence[Tensor], rounding: Any
) -> tuple[list[float], list[float]]:
    """The rms errors of the output and of each gradient: PyTorch's, and those of a
    rounded run."""
    back = torch.ones_like(function(*arguments))

    def results(**how: Any) -> list[Tensor]:
        ran = evaluate(function, *arguments, cotangent=lambda *_: back, **how)
        gradients = (x for x in ran.gradients.values() if x is not None)
        return [x.detach() for x in (widened(ran.output), *gradients)]

    exact, by_steps = results(), results(rounding=rounding)
    out = function(*arguments)
    plain = [x.double() for x in (out, *torch.autograd.grad(out, arguments, back))]

    def errors(run: Sequence[Tensor]) -> list[float]:
        pairs = zip(run, exact, strict=True)
        return [float((x.detach() - y).square().mean().sqrt()) for x, y in pairs]

    return errors(plain), errors(by_steps)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_errs_as_the_kernel_that_pytorch_takes(
    name: str, dtype: torch.dtype, device: str
) -> None:
    """Where q, k and v are not negative the gradient of q errs many times as much as the
    formula's: row sums are taken from the rounded output."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, n, 32) for n in (48, 64, 64)]
    arguments = [torch.rand(shape, generator=generator) for shape in shapes]
    arguments = [x.to(device, dtype).requires_grad_() for x in arguments]
    if name == "causal":
        arguments = [x[:, :, :48].detach().requires_grad_() for x in arguments]
    rounding = EveryOperation()
    plain, by_steps = kernel_errors(ATTENTIONS[name], arguments, rounding)
    assert (
        rounding.kernels_taken or name == "added"
    )  # a mask with a gradient has no kernel
    for ours, theirs in zip(by_steps, plain, strict=True):
        assert 0.8 < theirs / ours < 1.35  # blocks of queries add up in the format
    formula = EveryOperation(as_kernels=False)
    _, by_formula = kernel_errors(ATTENTIONS[name], arguments, formula)
    assert by_steps[1] > 4 * by_formula[1] or name == "added"


def test_weights_dropped_by_a_kernel_are_refused() -> None:
    """It draws them by numbers of its own. (On a CPU PyTorch takes the formula then.)"""
    q = torch.rand(1, 2, 8, 8).to(BF16)
    call = torch.ops.aten._scaled_dot_product_flash_attention.default
    with pytest.raises(Unsupported, match="random, by numbers of its own"):
        evaluate(lambda x: call(x, x, x, 0.5)[0], q, rounding=EveryOperation(), seed=0)


@pytest.mark.parametrize(
    ("chosen", "steps"),
    [("Cudnn", 2), ("SlowDilated3d", 2), ("Slow2d", 1), ("Mkldnn", 1)],
)
def test_a_bias_is_added_as_the_kernel_adds_it(
    chosen: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU to a rounded result, mostly; without a bias there is one step."""
    backend = getattr(torch._C._ConvBackend, chosen)
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_: backend)
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(BF16)
        for shape in ((2, 4, 8, 8), (6, 4, 3, 3), (6,))
    )
    exact = F.conv2d(x.double(), weight.double())
    result, fmt = exact, FORMATS["bfloat16"]
    if steps == 2:
        result = round_to(result, fmt)
    result = round_to(result + bias.double().reshape(6, 1, 1), fmt)
    assert torch.equal(rounded(F.conv2d, x, weight, bias).double(), result)
    assert torch.equal(rounded(F.conv2d, x, weight).double(), round_to(exact, fmt))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 8])
def test_a_bias_is_added_as_on_a_gpu(groups: int) -> None:
    """Of a convolution by cuDNN to a rounded result, of one by channels not."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 8, 16, 16), (8, 8 // groups, 3, 3), (8,))
    x, weight, bias = (
        torch.randn(shape, generator=generator).to("cuda", BF16) for shape in shapes
    )
    convolve = partial(F.conv2d, groups=groups)
    ours = rounded(convolve, x, weight, bias)
    assert (ours != convolve(x, weight, bias)).double().mean() < 1e-3


def test_switches_of_pytorch_are_as_before(x: Tensor) -> None:
    """After a run, also one that fails: fast paths, default dtype and generators."""

    def state() -> tuple[Any, ...]:
        fast = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
        return (*fast, torch._C._get_cudnn_enabled(), torch.get_default_dtype())

    def looked(x: Tensor) -> Tensor:
        assert state()[:3] == (False, False, False)
        raise ArithmeticError

    before, drawn = state(), torch.random.get_rng_state()
    with pytest.raises(ArithmeticError):
        evaluate(looked, x, seed=3)
    assert state() == before
    assert torch.equal(torch.random.get_rng_state(), drawn)


# --- writes, views, copies ------------------------------------------------------------


def test_views_share_storage_and_writes_reach_them(x: Tensor) -> None:
    def write(x: Tensor) -> tuple[Tensor, ...]:
        base = x * 0.3
        column, turned = base[:, 0], base.t()
        column.zero_()
        turned[1].copy_(x[:, 0])
        base.view(-1)[2::48].add_(1)
        turned.t_().unsqueeze_(0)
        return base, column, turned

    base, column, turned = (widened(y) for y in evaluate(write, x).output)
    expected = write(x.double())
    for value, truth in zip((base, column, turned), expected, strict=True):
        assert torch.equal(value, truth)
        assert value.stride() == truth.stride()
    assert base.untyped_storage().data_ptr() == turned.untyped_storage().data_ptr()


def test_an_output_argument_is_written_and_grows(x: Tensor) -> None:
    """`out=` of the right shape, and empty; results are the very tensors."""

    def write(x: Tensor, out: Tensor) -> Tensor:
        assert torch.add(x, 0.7, out=out) is out
        return torch.matmul(x, x.mT, out=torch.empty(0, dtype=x.dtype))

    result = evaluate(write, x, torch.empty_like(x))
    assert result.output.shape == (64, 64)
    assert torch.equal(result.output.exact, x.double() @ x.double().mT)
    assert torch.equal(result.arguments[1].exact, x.double() + 0.7)


def test_arguments_are_copied_and_share_storage_as_they_did(x: Tensor) -> None:
    """In any tree, with their strides; what the caller has stays as it was."""
    before = x.clone()
    tree = {
        "rows": x[::2],
        "all": x,
        "turned": x.t(),
        "many": x[:1].expand(4, 48),
        "n": 3,
    }

    def write(tree: dict[str, Any]) -> tuple[Any, ...]:
        tree["rows"][0, 0] = 7.0
        strides = {name: y.stride() for name, y in tree.items() if isinstance(y, Tensor)}
        return tree["all"], tree["turned"], tree["many"], strides

    whole, turned, many, strides = evaluate(write, tree).output
    assert whole[0, 0].item() == turned[0, 0].item() == many[3, 0].item() == 7.0
    assert strides == {
        name: y.stride() for name, y in tree.items() if isinstance(y, Tensor)
    }
    assert torch.equal(x, before)


def lazy_pairs() -> dict[str, tuple[Tensor, ...]]:
    z = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    n = torch.arange(4)
    return {
        "conjugate": (z, z.conj()),
        "conjugate first": (z.conj(), z),
        "negative": (z.imag, z.conj().imag),
        "parts of a conjugate": (z.conj()[:3], z.conj()[2:]),
        "integers": (n, torch._neg_view(n)),
    }


@pytest.mark.parametrize("name", lazy_pairs())
def test_a_tensor_beside_its_lazy_conjugate_or_negative_is_copied(name: str) -> None:
    """Each has values of its own, though one memory holds both."""
    originals = lazy_pairs()[name]
    for x, y in zip(originals, wide_arguments(originals), strict=True):
        assert isinstance(y, Tensor)
        assert torch.equal(widened(y), widened(x.resolve_conj().resolve_neg()))


class Attributes(nn.Module):
    """A module with tensors everywhere, some of which it writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.scales = [torch.tensor([0.1, 0.2, 0.3, 0.4]).to(BF16)]
        self.state = {"seen": torch.zeros(4)}
        self.tied = nn.Linear(4, 4)
        self.other = self.tied

    def forward(self, x: Tensor) -> Tensor:
        self.state["seen"] += x.float().mean(0) / 3
        return self.other(self.tied(self.norm(x * self.scales[0]))) + self.state["seen"]


def test_a_tensor_is_copied_in_a_run_as_in_pytorch(x: Tensor) -> None:
    """As a cache is by the code that is to leave it alone; the copy is written into."""

    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        b = copy.deepcopy({"a": a})["a"]
        return b.mul_(2), a

    doubled, same = evaluate(function, x).output
    assert (type(doubled.exact), doubled.dtype) == (Tensor, x.dtype)
    assert doubled.exact.equal(x.double() * 2)
    assert same.exact.equal(x.double())


def test_a_modules_own_tensors_are_copied_too() -> None:
    """Parameters, buffers, attributes in lists and dicts; the module itself stays as it
    was."""
    model = Attributes()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(8, 4)
    output = evaluate(model, x).output.exact
    twin = copy.deepcopy(model).double()
    twin.scales, twin.state = (
        [model.scales[0].double()],
        {"seen": torch.zeros(4).double()},
    )
    twin.float = twin.double  # type: ignore[method-assign]
    x64 = x.double()
    seen = x64.mean(0) / 3
    expected = twin.other(twin.tied(twin.norm(x64 * twin.scales[0]))) + seen
    assert torch.equal(output, expected)
    assert not model.state["seen"].any()
    assert all(torch.equal(y, before[name]) for name, y in model.state_dict().items())


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_are_written_in_training_alone(
    training: bool, x: Tensor
) -> None:
    """Otherwise they stay, unrounded too."""
    third = torch.full((48,), 1 / 3, dtype=torch.float64)
    mean, variance = Wide.of(third.clone(), BF16), Wide.of(third.clone(), BF16)
    wide = Wide.of(x.double(), BF16)
    with computing(EveryOperation()):
        F.batch_norm(wide, mean, variance, training=training)
    expected = round_to(0.9 * third + 0.1 * x.double().mean(0), FORMATS["bfloat16"])
    assert torch.equal(mean.exact, expected if training else third)


@pytest.mark.parametrize(
    "function",
    [
        lambda z: z * z.conj(),
        lambda z: z.conj().imag * 2,
        lambda z: z[:, None].mH @ z[:, None],
        lambda z: torch.vdot(z, z),
        lambda z: z * z.conj().resolve_conj(),
        lambda z: z * torch.ones(5, dtype=torch.complex64).mul(1j).conj(),
    ],
)
def test_a_lazy_conjugate_is_computed(function: Callable[[Tensor], Tensor]) -> None:
    """It is a view with a bit, which kernels below a dispatch mode do not read."""
    z = torch.randn(5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    for x in (z, z.conj()):
        out, wide = evaluate(function, x).output, function(x.to(torch.complex128))
        torch.testing.assert_close(widened(out), wide.resolve_conj().resolve_neg())


def written_after(
    view: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns a function that takes a view of a copy of its argument, writes into the
    copy, and returns both."""

    def function(z: Tensor) -> tuple[Tensor, Tensor]:
        copy = z * 1
        lazy = view(copy)
        write(copy)
        return lazy * 1, lazy + copy.sum()

    return function


@pytest.mark.parametrize(
    "view",
    [
        torch.conj,
        lambda z: z.conj()[1:],
        lambda z: z[1:].conj(),
        lambda z: z.conj().imag,
        lambda z: z.mH,
        lambda z: torch._neg_view(z).conj(),
        lambda z: torch._neg_view(z.conj().imag),
    ],
)
@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.add_(1 + 2j),
        lambda z: z[1].mul_(3j),
        lambda z: torch.mul(z, 2, out=z),
        lambda z: z.real.zero_(),
        lambda z: torch.view_as_real(z).normal_(generator=torch.manual_seed(5)),
    ],
)
def test_a_lazy_conjugate_follows_what_is_written_into_its_tensor(
    view: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]
) -> None:
    """As PyTorch's does, which is a view."""
    z = torch.randn(4, 4, dtype=torch.complex128, generator=torch.manual_seed(0))
    function = written_after(view, write)
    for exact, plain in zip(evaluate(function, z).output, function(z), strict=True):
        torch.testing.assert_close(widened(exact), plain.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.conj().mul_(2),
        lambda z: z.conj()[1:].mul_(2),
        lambda z: z.conj().imag.zero_(),
        lambda z: z.mH.normal_(generator=torch.manual_seed(5)),
    ],
)
def test_a_write_into_a_lazy_conjugate_is_refused(
    write: Callable[[Tensor], object],
) -> None:
    """PyTorch carries it into the original."""
    z = torch.ones(3, 3, dtype=torch.complex64)
    with pytest.raises(Unsupported, match="it writes into a lazy conjugate"):
        evaluate(lambda z: (write(z), z + 1)[1], z)


def test_a_gradient_of_lazy_zeros_has_memory(x: Tensor) -> None:
    """The gradient of `sgn` is a tensor of zeros without any, at which kernels crash."""
    ones = x.float().requires_grad_()
    done = evaluate(
        torch.sgn, ones, rounding=EveryOperation(), cotangent=lambda i, y: y.detach()
    )
    assert not widened(done.gradients["[0]"]).any()


def test_complex_numbers_are_rounded_part_by_part() -> None:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))

    def turn(x: Tensor) -> Tensor:
        return torch.view_as_real(
            torch.view_as_complex(x) * torch.polar(x[:, 0].abs(), x[:, 1])
        )

    assert torch.equal(widened(evaluate(turn, x).output), turn(x.double()))
    rounded_parts = evaluate(turn, x, rounding=EveryOperation()).output
    assert rounded_parts.dtype == torch.float32
    assert torch.equal(rounded_parts.exact, rounded_parts.exact.float().double())


# --- random draws ---------------------------------------------------------------------

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "randn_like": lambda x: torch.randn_like(x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "float32": lambda x: torch.rand(3, 5).to(x.dtype),
    "permutation": lambda x: x[torch.randperm(64)],
    "samples": lambda x: x.float().softmax(-1).multinomial(3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_draws_what_it_draws_in_the_format(name: str, x: Tensor) -> None:
    draws = rounded(DRAWS[name], x, seed=5)
    torch.manual_seed(5)
    assert torch.equal(draws, DRAWS[name](x))


@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [(64, torch.float32), (0, torch.float32), (0, torch.float8_e4m3fn)],
)
def test_native_dropout_is_pytorchs(
    numbers: int, dtype: torch.dtype, train: bool | None
) -> None:
    """None is training; the mask of no numbers has their dtype."""
    x = torch.ones(numbers).to(dtype)
    done = evaluate(lambda x: torch.native_dropout(x, 0.5, train), x, seed=3)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        output, mask = torch.native_dropout(x.float(), 0.5, train)
    assert torch.equal(widened(done.output[0]), output.double())
    assert torch.equal(done.output[1].bool(), mask.bool())


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_without_a_seed_is_refused(name: str, x: Tensor) -> None:
    with pytest.raises(Unsupported, match="it draws random numbers, and no seed was set"):
        evaluate(DRAWS[name], x)


def test_a_generator_of_ones_own_is_a_seed() -> None:
    def draw() -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(1))

    assert torch.equal(narrowed(evaluate(draw).output), draw())


# --- what is refused ------------------------------------------------------------------


def square(x: Tensor) -> Tensor:
    return x.float()[:8, :8] @ x.float()[:8, :8].mT


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "aten._linalg_eigh.default": (
        lambda x: torch.linalg.eigh(square(x))[1] * 2,
        (
            "its vectors are no function of the input: they are free in sign, order or "
            "rotation"
        ),
    ),
    "aten._linalg_svd.default": (
        lambda x: torch.linalg.svd(square(x))[0],
        (
            "its vectors are no function of the input: they are free in sign, order or "
            "rotation"
        ),
    ),
    "aten.view.dtype": (
        lambda x: x.view(torch.int16),
        "it reads the bits of a format, and the values are held in fp64",
    ),
    "aten.nextafter.default": (
        lambda x: torch.nextafter(x, x + 1),
        "it reads the bits of a format, and the values are held in fp64",
    ),
    "aten.rrelu_with_noise.default": (
        lambda x: F.rrelu(x, training=True),
        "it draws random numbers inside, which cannot be told from what it computes",
    ),
    "aten._to_sparse.default": (
        lambda x: x.to_sparse(),
        "it makes a tensor of the layout sparse_coo",
    ),
    "Tensor.numpy": (
        lambda x: x.numpy(),
        "it leaves PyTorch for NumPy, and what is computed there cannot be followed",
    ),
    "numpy.asarray": (
        lambda x: np.exp(x),
        "it leaves PyTorch for NumPy, and what is computed there cannot be followed",
    ),
    "Tensor.data_ptr": (
        lambda x: x.data_ptr(),
        "it reads memory by its address, and what is computed there cannot be followed",
    ),
}


def test_a_format_without_rounding_is_refused_where_it_would_be_rounded(
    x: Tensor,
) -> None:
    def cast(x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fnuz)

    assert evaluate(cast, x).output.dtype == torch.float8_e4m3fnuz
    reason = r"aten._to_copy.default at .*numdev has no format for torch.float8_e4m3fnuz$"
    with pytest.raises(Unsupported, match=reason):
        evaluate(cast, x, rounding=EveryOperation())


def test_operators_without_an_own_formula_are_refused(x: Tensor) -> None:
    """Those that PyTorch fills by address, those of functions, and those without fp64."""
    losses = x.float()[:8, None].log_softmax(-1), torch.tensor([[1, 2, 3]]), [8], [3]
    with pytest.raises(Unsupported, match="it reads memory by its address"):
        evaluate(F.ctc_loss, *losses)
    with pytest.raises(Unsupported, match="PyTorch has no fp64 kernel of it here"):
        evaluate(lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), x)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.lock = threading.Lock()
    with pytest.raises(
        Unsupported, match=r"Linear at .*: it cannot be copied: cannot pickle"
    ):
        evaluate(model, torch.randn(2, 3))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_result_is_refused_by_name_and_line(
    name: str, x: Tensor
) -> None:
    function, reason = REFUSED[name]
    line = inspect.getsourcelines(function)[1]
    source = Path(__file__).read_text(encoding="utf-8").splitlines()[line - 1].strip()
    with pytest.raises(Unsupported) as refusal:
        evaluate(function, x)
    assert str(refusal.value) == f"{name} at {__file__}:{line} ({source}): {reason}"


def test_values_without_vectors_are_a_function(x: Tensor) -> None:
    """Eigenvalues and singular values, also backward, where vectors may be used."""
    x = x.float().requires_grad_()
    for function in (torch.linalg.eigvalsh, torch.linalg.svdvals):
        exact_run = evaluate(
            lambda a, f=function: f(square(a)), x, cotangent=lambda _, y: torch.ones(8)
        )
        twin = x.detach().double().requires_grad_()
        small = twin[:8, :8]
        values = function(small @ small.mT)
        expected = torch.autograd.grad(values.sum(), twin)[0]
        torch.testing.assert_close(
            exact_run.output.exact, values.detach(), rtol=1e-12, atol=1e-12
        )
        torch.testing.assert_close(
            exact_run.gradients["[0]"], expected, rtol=1e-10, atol=1e-10
        )


def test_a_users_own_error_stays_as_it_is(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        evaluate(lambda x: x @ x, x)


def test_in_a_context_of_ones_own(x: Tensor) -> None:
    """`computing` is the run without copies; a tensor prints, and goes on to Python."""
    wide = Wide.of(x.double(), BF16)
    with computing(EveryOperation()) as mode:
        third = wide / 3
    assert isinstance(mode, Computing)
    assert third.tolist() == (x / 3).tolist()
    assert str(third[0, :1]).startswith("Wide(torch.bfloat16, tensor([")
    assert torch.equal(copy.copy(third).exact, copy.deepcopy(third).exact)
    assert f"{third[0, 0]:.3f}" == f"{third[0, 0].item():.3f}"
