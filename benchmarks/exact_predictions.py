"""Does a run that rounds every operation predict what PyTorch's own 16-bit code errs, and
is the run without roundings that of plain fp64?

    PYTHONPATH=benchmarks python benchmarks/exact_predictions.py [--format bfloat16 --seeds 4]

For each of some fifty small functions, forward and backward: whether the exact run equals
the same function on fp64 tensors bit by bit, and the rms error of PyTorch's own run over
that of the run with every operation rounded to nearest, of all seeds together."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any, NamedTuple

import torch
from small_functions import FUNCTIONS
from torch import Tensor
from torch.utils._pytree import tree_leaves

from numdev.exact.evaluation import evaluate
from numdev.exact.result_dtypes import is_floating
from numdev.exact.rounded_results import EveryOperation
from numdev.exact.wide_tensors import widened
from numdev.formats import dtype_of, format_named


class Answers(NamedTuple):
    """What a function gives, in fp64."""

    output: Tensor
    gradients: list[Tensor]


class Comparison(NamedTuple):
    """Square errors, and whether the exact run was that of fp64."""

    equal: bool
    errors: list[float]  # of PyTorch's own run: of the output, and of each gradient
    predicted: list[float]


def inputs_of(name: str, seed: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of a function: floating-point ones in a dtype, and with a
    gradient."""
    _, make = FUNCTIONS[name]
    return cast(make(torch.Generator().manual_seed(seed)), dtype)


def cast(arguments: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Floating-point arguments as leaves of this dtype."""
    return tuple(
        x.detach().to(dtype).requires_grad_() if is_floating(x) else x for x in arguments
    )


def cotangent_of(output: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that comes back into an output, in fp64: values of a dtype."""
    generator = torch.Generator().manual_seed(1000)
    return torch.randn(output.shape, generator=generator).to(dtype).double()


def plain(name: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> Answers:
    """A function as PyTorch runs it on these arguments; `dtype`: of the cotangent's
    values."""
    output = FUNCTIONS[name][0](*arguments)
    leaves = [x for x in arguments if is_floating(x)]
    back = cotangent_of(output, dtype).to(output.dtype)
    gradients = torch.autograd.grad(output, leaves, back)
    return Answers(output.detach().double(), [x.double() for x in gradients])


def computed(
    name: str, arguments: tuple[Any, ...], dtype: torch.dtype, **how: Any
) -> Answers:
    """A function as numdev computes it; `how`: further arguments of `evaluate`."""
    of = evaluate(
        FUNCTIONS[name][0],
        *arguments,
        cotangent=lambda _, x: cotangent_of(x, dtype),
        **how,
    )
    [output] = tree_leaves(of.output)
    return Answers(widened(output), [x for x in of.gradients.values() if x is not None])


def compared(name: str, seed: int, dtype: torch.dtype) -> Comparison:
    arguments = inputs_of(name, seed, dtype)
    truth = plain(name, cast(arguments, torch.float64), dtype)
    exact = computed(name, arguments, dtype)
    rounded = computed(name, arguments, dtype, rounding=EveryOperation())
    return Comparison(
        all(torch.equal(a, b) for a, b in zip(flat(truth), flat(exact), strict=True)),
        square_errors(plain(name, arguments, dtype), exact),
        square_errors(rounded, exact),
    )


def flat(answers: Answers) -> list[Tensor]:
    return [answers.output, *answers.gradients]


def square_errors(answers: Answers, exact: Answers) -> list[float]:
    pairs = zip(flat(answers), flat(exact), strict=True)
    return [float((x - truth).square().sum()) for x, truth in pairs]


def ratios_of(name: str, seeds: int, dtype: torch.dtype) -> tuple[bool, list[float]]:
    """Whether all exact runs equal fp64's, and PyTorch's rms error over the predicted
    one, of the output and of each gradient: NaN where neither errs."""
    runs = [compared(name, seed, dtype) for seed in range(seeds)]
    ratios: list[float] = []
    for i in range(len(runs[0].errors)):
        total = sum(run.errors[i] for run in runs)
        predicted = sum(run.predicted[i] for run in runs)
        ratios.append(
            math.sqrt(total / predicted) if predicted else math.inf if total else math.nan
        )
    return all(run.equal for run in runs), ratios


def shown(ratio: float) -> str:
    return "exact" if math.isnan(ratio) else f"{ratio:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", choices=FUNCTIONS, help="one function")
    asked = parser.parse_args()
    dtype = dtype_of(format_named(asked.format))
    print("| function | exact run is fp64's | output | gradients |\n|---|---|---|---|")
    outputs: list[float] = []
    gradients: list[float] = []
    for name in [asked.only] if asked.only else FUNCTIONS:
        equal, (of_output, *of_gradients) = ratios_of(name, asked.seeds, dtype)
        same, backward = "yes" if equal else "no", ", ".join(map(shown, of_gradients))
        print(f"| {name} | {same} | {shown(of_output)} | {backward} |", flush=True)
        outputs.append(of_output)
        gradients += of_gradients
    for what, ratios in (("outputs", outputs), ("gradients", gradients)):
        finite = [ratio for ratio in ratios if math.isfinite(ratio)]
        near = sum(abs(ratio - 1) <= 0.02 for ratio in finite)
        middle = statistics.median(finite) if finite else math.nan
        print(f"{what}: median {middle:.3f}, {near} of {len(finite)} within 2 %")


if __name__ == "__main__":
    main()
