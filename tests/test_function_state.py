"""What a function keeps from call to call: buffers of a module are results, and the same
at the start of each call."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import numdev
from numdev.errors import MeasurementError
from numdev.function_check import check_beside, check_problem
from numdev.kernels import import_callable
from numdev.operations.function.process import FunctionProcess
from numdev.operations.function.trees import Arguments
from numdev.studies.audit.functions import served
from numdev.testing import CheckResult

CHANNELS = 24


def inputs(seed: int) -> Tensor:
    return torch.randn(32, CHANNELS, generator=torch.Generator().manual_seed(seed)) + 1


class BatchNorm(nn.Module):
    """A batch norm in training, by operations; `biased` forgets that the variance that it
    remembers is over n - 1, `forgets` remembers nothing."""

    def __init__(self, *, biased: bool = False, forgets: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)
        self.biased, self.forgets = biased, forgets

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=0, correction=0)
        if not self.forgets:
            n = 1 if self.biased else len(x) / (len(x) - 1)
            with torch.no_grad():
                self.norm.running_mean.lerp_(mean, 0.1)
                self.norm.running_var.lerp_(variance * n, 0.1)
                self.norm.num_batches_tracked += 1
        y = (x - mean) * torch.rsqrt(variance + self.norm.eps)
        return y * self.norm.weight + self.norm.bias


class Reference(BatchNorm):
    """The same by PyTorch's operator."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Scaled(nn.Module):
    """Divides by a mean of the largest numbers so far; `anew` puts a new tensor into the
    buffer, in place of writing into it."""

    def __init__(self, *, anew: bool = False) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(CHANNELS))
        self.anew = anew

    def forward(self, x: Tensor) -> Tensor:
        now = x.abs().amax(0)
        if self.anew:
            self.largest = 0.5 * self.largest + 0.5 * now
        else:
            self.largest.mul_(0.5).add_(0.5 * now)
        return x / self.largest


@pytest.mark.parametrize("backward", [False, True])
def test_what_a_module_writes_into_its_buffers_is_a_result(backward: bool) -> None:
    """A count too, which no data move."""
    options = {"reference": Reference(), "inputs": inputs, "backward": backward}
    assert numdev.check(BatchNorm(), **options).passed
    result = numdev.check(BatchNorm(biased=True), **options)
    exceeded = [x for x in result.judgement.tests if x.standing == "exceeded"]
    assert {x.tensor for x in exceeded} == {"norm.running_var"}
    result = numdev.check(BatchNorm(forgets=True), **options)
    words = "norm.running_mean: it is not written into, as the reference does"
    assert words in str(result.report.findings[0].whole)


def test_a_function_without_the_buffers_is_judged_by_its_outputs() -> None:
    """And it is said what is not compared."""

    def function(x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)

    result = numdev.check(function, reference=Reference(), inputs=inputs)
    assert result.passed
    assert result.skipped[0] == (
        "Not compared: what the reference writes into norm.num_batches_tracked, "
        "norm.running_mean, norm.running_var, since the function is no module that begins "
        "with the same buffers."
    )


def test_a_modules_buffers_of_its_own_are_no_inputs() -> None:
    """As memory to work in."""

    class Working(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(32, CHANNELS), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.memory.copy_(x).exp()

    assert numdev.check(Working(), reference=torch.exp, inputs=inputs).passed


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_a_module_begins_each_call_with_the_same_buffers(
    anew: bool, backward: bool
) -> None:
    """As the reference does, of which each call has a copy."""
    options = {"reference": Scaled(), "inputs": inputs, "backward": backward}
    assert numdev.check(Scaled(anew=anew), **options).passed


def test_a_scripted_module_has_buffers() -> None:
    """In no dict, unlike others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.BatchNorm1d(CHANNELS))
    result = numdev.check(scripted, reference=nn.BatchNorm1d(CHANNELS), inputs=inputs)
    assert result.passed, str(result)
    tensors = {row.tensor for row in result.report.rows if row.role == "kernel"}
    assert "running_var" in tensors


def test_buffers_that_begin_otherwise_are_not_compared() -> None:
    """As of a module that was called before."""
    warm = nn.BatchNorm1d(CHANNELS)
    warm(inputs(5))
    result = numdev.check(warm, reference=nn.BatchNorm1d(CHANNELS), inputs=inputs)
    assert result.passed, str(result)
    words = "Not compared: what the reference writes into num_batches_tracked, running_me"
    assert result.skipped[0].startswith(words)


def test_a_module_that_cannot_be_copied_is_one_line() -> None:
    with pytest.raises(MeasurementError, match=r"^LazyBatchNorm1d cannot be copied: Val"):
        numdev.check(nn.LazyBatchNorm1d(), reference=torch.exp, inputs=inputs)


def test_weights_that_the_first_call_packs_stay_packed() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.arange(24.0).view(4, 6))
            self.is_packed = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_packed:
                self.weight, self.is_packed = self.weight.t().contiguous(), True
            return x[:, :6] @ self.weight

    class Plain(Packed):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :6] @ self.weight.t()

    assert numdev.check(Packed(), reference=Plain(), inputs=inputs).passed


def test_buffers_come_back_from_a_process(tmp_path: Path) -> None:
    text = (
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('total', torch.zeros(20))\n"
        "    def forward(self, x):\n"
        "        self.total += FACTOR * x.sum(0)\n"
        "        return x - self.total\n"
        "get_inputs = lambda: [torch.randn(16, 20)]\n"
        "get_init_inputs = lambda: []\n"
    )
    (tmp_path / "problem.py").write_text(text.replace("FACTOR", "1"))
    solution = text.replace("Model", "ModelNew").replace("FACTOR", "1")
    wrong = solution.replace("return x - self.total", "y = x - self.total\n        self.total *= 2\n        return y")  # fmt: skip
    outcomes = []
    for name, each in (("right", solution), ("wrong", wrong)):
        (tmp_path / f"{name}.py").write_text(each)
        with FunctionProcess(run=served) as process:
            problem = tmp_path / "problem.py"
            result = check_problem(
                tmp_path / f"{name}.py", problem=problem, process=process
            )
        outcomes.append(result.passed)
        tensors = {x.tensor for x in result.report.rows if x.role == "kernel"}
        assert tensors == {"output", "total"}
    assert outcomes == [True, False]


# --- objects among the arguments ------------------------------------------------------


class Cache:
    """Keys of earlier calls."""

    def __init__(self) -> None:
        self.keys = torch.ones(3, CHANNELS)

    def with_more(self, keys: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, keys])
        return self.keys


def test_each_call_gets_a_copy_of_a_cache() -> None:
    """It would be longer each time, and what runs first would change what comes later."""

    def sums(x: Tensor, cache: Cache) -> Tensor:
        return cache.with_more(x).cumsum(0)

    options = {"reference": sums, "inputs": lambda seed: (inputs(seed), Cache())}
    for fmt in ("float32", "bfloat16"):
        result = numdev.check(sums, **options, formats=fmt, backward=True)
        assert result.passed, str(result)
    assert result.skipped[0] == (
        "Tensors in Cache, an object among the inputs, come as they are: they are not "
        "rounded, differentiated or tried with other numbers, and what is written into "
        "them is not compared."
    )
    wrong = numdev.check(lambda x, cache: sums(x, cache) * 1.001, **options)
    assert wrong.report.findings[0].cause == "it is 1.001 times what it should be"


def test_each_call_gets_a_copy_of_a_generator() -> None:
    def dropped(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * (torch.rand(x.shape, generator=generator) > 0.5)

    result = numdev.check(
        dropped,
        reference=dropped,
        inputs=lambda seed: (inputs(seed), torch.Generator().manual_seed(seed + 7)),
    )
    assert result.passed, str(result)


def test_a_tensor_in_an_object_too_is_one_tensor_in_the_copy() -> None:
    x = inputs(0)
    cache = Cache()
    cache.keys = x
    arguments = Arguments(positional=(x, [cache], open))
    first, [copied], function = arguments.copied(gradients=False).positional
    assert (copied is cache, copied.keys is first, function) == (False, True, open)
    assert first is not x


# --- references that keep something ---------------------------------------------------

AGAIN = (
    "it returns another output when it is called again with the same arguments: it keeps "
    "something from call to call, or draws numbers without PyTorch's seed"
)


def counting() -> Callable[[Tensor], Tensor]:
    """A step counter that outlives the call, as that of a bias correction."""
    steps = itertools.count(1000)
    return lambda x: x * (1 + 1e-4 * next(steps))


def drawing() -> Callable[[Tensor], Tensor]:
    drawn = random.Random(0)
    return lambda x: x * drawn.random()


class Counting(nn.Module):
    """Whose state is no buffer, so that each run of a copy begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * self.steps


class Argmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x.argmax(-1) + self.steps


@pytest.mark.parametrize("make", [counting, drawing, Counting, Argmax])
def test_a_reference_that_returns_something_else_again_judges_nothing(
    make: Callable[[], Callable[[Tensor], Tensor]],
) -> None:
    """What it keeps would count as rounding: beside a scale that grows by 1e-4 with each
    run, one that is 1e-3 off passed in float32."""
    result = numdev.check(lambda x: x * 1.1012, reference=make(), inputs=inputs)
    assert result.verdict == "NOT JUDGED"
    reasons = {row.reason for row in result.report.rows if row.role == "kernel"}
    assert reasons == {f"the reference: {AGAIN}"}


def test_a_module_of_8_bits_is_called_twice_too() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float8_e4m3fn)

    assert numdev.check(Narrow(), reference=Narrow(), inputs=inputs).passed


def test_a_reference_may_keep_what_changes_nothing() -> None:
    """Running statistics that it does not read, or a table that it makes once."""
    norm, tables = nn.BatchNorm1d(CHANNELS), {}

    def reference(x: Tensor) -> Tensor:
        table = tables.setdefault(x.dtype, torch.linspace(0, 1, CHANNELS))
        return norm(x) * table

    assert numdev.check(reference, reference=reference, inputs=inputs).passed


# --- scripts that show it -------------------------------------------------------------


def printed(result: CheckResult) -> tuple[int, str]:
    """Exit code and output of a failed check's script."""
    assert result.reproducer is not None, result.notes
    command = [sys.executable, str(result.reproducer)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


PROBLEM = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(20))
    def forward(self, x):
        y = x - self.total
        self.total += x.sum(0)
        return y
get_inputs = lambda: [torch.randn(16, 20)]
get_init_inputs = lambda: []
"""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pass", "total is not written into"),
        ("self.total += 1.01 * x.sum(0)", "The error shows: the limit is"),
    ],
)
def test_a_script_shows_what_is_wrong_with_a_buffer(
    line: str, words: str, tmp_path: Path
) -> None:
    wrong = PROBLEM.replace("self.total += x.sum(0)", line)
    problem, solution = tmp_path / "summing.py", tmp_path / "summing_solution.py"
    problem.write_text(PROBLEM)
    solution.write_text(wrong.replace("Model", "ModelNew"))
    result = check_problem(solution, problem=problem, reproducers=tmp_path)
    code, out = printed(result)
    assert (code, words in out) == (1, True), out


def test_a_script_shows_that_an_argument_is_not_written_into(tmp_path: Path) -> None:
    text = "def kernel(x):\n    return x + 1\ndef reference(x):\n    return x.add_(1)\n"
    (tmp_path / "unwritten.py").write_text(text)
    target = f"{tmp_path / 'unwritten.py'}:kernel"
    result = check_beside(
        target,
        reference=import_callable(target.replace("kernel", "reference"), "reference"),
        inputs=inputs,
        reproducers=tmp_path,
    )
    code, out = printed(result)
    assert (code, "x is not written into" in out) == (1, True), out


# --- results that are not compared ----------------------------------------------------


def test_what_is_returned_beside_tensors_is_said_not_to_be_compared() -> None:
    def reference(x: Tensor) -> dict[str, object]:
        return {"y": x.exp(), "loss": x.mean().item(), "no": None, "count": len(x)}

    result = numdev.check(
        lambda x: {"y": x.exp(), "loss": 3.0}, reference=reference, inputs=inputs
    )
    assert result.passed
    assert result.skipped[0] == (
        "Not compared: what the reference returns beside tensors, output_loss (float), "
        "output_count (int)."
    )


@pytest.mark.parametrize("right", [True, False])
def test_elements_where_the_reference_overflows_are_not_judged(right: bool) -> None:
    """Their exact result is finite, and so is what the function returns: what is near it
    is right without a yardstick."""

    def large(seed: int) -> Tensor:
        x = inputs(seed)
        return torch.cat([x[:16], x[16:] * 100])

    def norm(x: Tensor) -> Tensor:
        norms = x.float().square().sum(-1).sqrt().to(x.dtype)
        if not right:
            norms[16:] = 1
        return norms

    result = numdev.check(
        norm,
        reference=lambda x: x.square().sum(-1).sqrt(),
        inputs=large,
        formats="float16",
    )
    assert result.verdict == ("PASS" if right else "NOT JUDGED")
    sentence = (
        "Not compared: 16 of 32 elements of output (seed 0, float16), where the exact "
        "result is finite and the reference in this format is not."
    )
    assert (sentence in result.skipped) != right
    reason = "a share of only 0.5 of its elements is compared"
    assert (reason in " ".join(str(result).split())) != right


class TwiceBack(torch.autograd.Function):
    """x * w, with a gradient of w that is `factor` times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return back * w, (back * x).sum(0) * ctx.factor, None


class Counting(nn.Module):
    """Scales rows, and counts its calls."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        numbers = torch.randn(32, generator=torch.Generator().manual_seed(3))
        self.w = nn.Parameter(numbers)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, plus: float = 0.0) -> Tensor:
        self.calls += 1
        return TwiceBack.apply(x, self.w, self.factor) + plus

    def encode(self, x: Tensor) -> Tensor:
        return self(x, 2.0)


FUNCTIONS_OF_MODULES: dict[str, Callable[[nn.Module], Callable[..., object]]] = {
    "itself": lambda module: module,
    "its forward": lambda module: module.forward,
    "another method": lambda module: module.encode,
    "partly called": lambda module: partial(module, plus=1.0),
    "a method, partly called": lambda module: partial(module.forward, plus=1.0),
}


@pytest.mark.parametrize("of", [
    *("its forward", "partly called"),
    *(pytest.param(name, marks=pytest.mark.slow)
      for name in ("itself", "another method", "a method, partly called")),
])  # fmt: skip
def test_a_method_and_a_partial_have_the_state_of_their_module(of: str) -> None:
    """Parameters have gradients, buffers begin alike, and the module itself is copied."""
    function = FUNCTIONS_OF_MODULES[of]

    def inputs(seed: int) -> tuple[Tensor]:
        return (torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)),)

    modules = Counting(), Counting(2.0), Counting()
    sound, wrong, reference = map(function, modules)
    options = {"reference": reference, "inputs": inputs, "backward": True}
    result = check_beside(sound, **options)
    assert result.passed, str(result)
    assert {row.tensor for row in result.report.rows} >= {"w_grad", "calls", "output"}
    result = check_beside(wrong, **options)
    assert result.verdict == "FAIL"
    assert [int(module.calls) for module in modules] == [0, 0, 0]


def test_gradients_of_parameters_out_of_reach_are_said_not_to_be_compared() -> None:
    module = Counting()

    def closed(x: Tensor) -> Tensor:
        return x * module.w

    def inputs(seed: int) -> tuple[Tensor]:
        return (torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)),)

    for backward, words in (
        (True, "Not compared: the gradients of tensors (1)"),
        (False, ""),
    ):
        result = check_beside(closed, reference=closed, inputs=inputs, backward=backward)
        assert result.passed
        assert words in "".join(result.skipped)
        assert ("gradients of tensors" in "".join(result.skipped)) == backward
