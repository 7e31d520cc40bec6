"""Is what `numdev check --reference` predicts right, does it accuse sound functions, and
which faulty ones does it see?

    PYTHONPATH=benchmarks python benchmarks/functions.py [--format bfloat16 --seeds 5 --only matmul]

For each of some fifty small functions, forward and backward: what PyTorch's own run errs
over what the rounding of its operations explains; how often sound functions fail (the
reference itself, all of it in float32 or float64 and rounded once, every operation rounded
otherwise, halves of a batch computed by themselves where that is the same); how often
faulty ones do (`numdev.operations.function.faults`, and errors of some doses)."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from small_functions import FUNCTIONS
from torch import Tensor
from torch.utils._pytree import tree_map

import numdev
from numdev.exact.dtypes import is_floating
from numdev.exact.evaluation import evaluate
from numdev.exact.rounding import EveryOperation
from numdev.exact.wide_tensors import narrowed
from numdev.formats import format_of, round_to
from numdev.operations.function.faults import faults_of_inputs, faults_of_outputs
from numdev.operations.function.trees import arguments_of

Function = Callable[..., Any]
DOSES = (1.0, 0.5, 0.25, 0.125)  # of a unit roundoff: by how much an output is scaled


def inside(function: Function, dtype: torch.dtype) -> Function:
    """All of it in a wider dtype, rounded once."""

    def run(*arguments: Any) -> Any:
        floats = [x for x in arguments if is_floating(x)]
        wide = [x.to(dtype) if is_floating(x) else x for x in arguments]
        out = function(*wide)
        return tree_map(lambda x: as_format(x, floats[0].dtype), out)

    return run


def as_format(x: Any, dtype: torch.dtype) -> Any:
    if not is_floating(x):
        return x
    return x.to(dtype) if x.requires_grad else round_to(x, format_of(dtype)).to(dtype)


def otherwise(function: Function) -> Function:
    """Every operation rounded to one of the two next numbers, at random."""

    def run(*arguments: Any) -> Any:
        rounding = EveryOperation(seed=12345)
        return tree_map(
            narrowed, evaluate(function, *arguments, rounding=rounding).output
        )

    return run


def sound(function: Function, *, backward: bool) -> Iterator[tuple[str, Function]]:
    yield "the reference", function
    yield "float32 inside", inside(function, torch.float32)
    yield "float64 inside", inside(function, torch.float64)
    if not backward:
        yield "rounded at random", otherwise(function)


def faulty(
    function: Function, arguments: tuple[Any, ...]
) -> Iterator[tuple[str, Function]]:
    for fault in faults_of_inputs(arguments_of(arguments, function)):

        def wrong(*given: Any, fault: Any = fault) -> Any:
            return function(*fault.applied(arguments_of(given, function)).positional)

        yield fault.words, wrong
    for fault in faults_of_outputs():

        def changed(*given: Any, fault: Any = fault) -> Any:
            return tree_map(
                lambda x: fault.change(x) if is_floating(x) else x, function(*given)
            )

        yield fault.words, changed


def scaled(function: Function, dose: float) -> Function:
    """Computed in float64 and scaled by 1 + dose u before it is rounded once."""

    def run(*arguments: Any) -> Any:
        dtype = next(x.dtype for x in arguments if is_floating(x))
        factor = 1 + dose * format_of(dtype).unit_roundoff
        out = function(*(x.double() if is_floating(x) else x for x in arguments))
        return as_format((out * factor).detach(), dtype)

    return run


def check(name: str, function: Function, fmt: str, seed: int, *, backward: bool) -> Any:
    reference, make = FUNCTIONS[name]
    return numdev.check(
        function, reference=reference, formats=fmt, seeds=seed, backward=backward,
        inputs=lambda seed: make(torch.Generator().manual_seed(seed)),
    )  # fmt: skip


def broken(result: Any) -> str:
    """The first rule that is exceeded; empty where none is."""
    return next((t.rule for t in result.judgement.tests if t.standing == "exceeded"), "")


def predicted(name: str, fmt: str, seeds: range, *, backward: bool) -> dict[str, float]:
    """Of each tensor, the largest error of the reference as PyTorch runs it over what its
    operations explain."""
    largest: dict[str, float] = {}
    for seed in seeds:
        report = check(name, FUNCTIONS[name][0], fmt, 2 * seed, backward=backward).report
        for row in report.rows:
            if row.role == "baseline" and row.beside_reference is not None:
                ratio = row.beside_reference.predicted_ratio or 0.0
                largest[row.tensor] = max(largest.get(row.tensor, 0.0), ratio)
    return largest


def in_format(name: str, fmt: str) -> tuple[Tensor, ...]:
    _, make = FUNCTIONS[name]
    data = make(torch.Generator().manual_seed(0))
    dtype = getattr(torch, fmt)
    return tuple(x.to(dtype) if is_floating(x) else x for x in data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=FUNCTIONS, help="one function")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--no-faults", action="store_true", help="sound functions alone")
    asked = parser.parse_args()
    fmt, backward, seeds = asked.format, not asked.forward, range(asked.seeds)
    print(
        "| function | tensor: error / explained | accused | missed |\n|---|---|---|---|"
    )
    ratios: list[float] = []
    counts: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    dose_seen: Counter[float] = Counter()
    for name in [asked.only] if asked.only else FUNCTIONS:
        reference = FUNCTIONS[name][0]
        largest = predicted(name, fmt, seeds, backward=backward)
        ratios += largest.values()
        accused, missed = [], []
        for what, function in sound(reference, backward=backward):
            for seed in seeds:
                result = check(name, function, fmt, 2 * seed, backward=backward)
                counts["sound"] += 1
                if rule := broken(result):
                    accused.append(f"{what} ({rule})")
                elif not result.passed:
                    counts["not judged"] += 1
        counts["accused"] += len(accused)
        if not asked.no_faults:
            for what, function in faulty(reference, in_format(name, fmt)):
                result = check(name, function, fmt, 0, backward=False)
                counts["faults"] += 1
                rules[rule := broken(result)] += 1
                missed += [] if rule else [what]
            for dose in DOSES:
                result = check(name, scaled(reference, dose), fmt, 0, backward=False)
                dose_seen[dose] += bool(broken(result))
        counts["missed"] += len(missed)
        each = ", ".join(f"{tensor} {ratio:.2f}" for tensor, ratio in largest.items())
        print(
            f"| {name} | {each} | {'; '.join(accused)} | {'; '.join(missed)} |",
            flush=True,
        )
    middle, worst = statistics.median(ratios), max(ratios)
    above = sum(ratio > 1.1 for ratio in ratios)
    print(f"\n{fmt}: error of PyTorch's own run over what is explained: median {middle:.2f}, "
          f"worst {worst:.2f}, above 1.1 {above} of {len(ratios)}")  # fmt: skip
    print(f"accused {counts['accused']} of {counts['sound']} sound runs, not judged "
          f"{counts['not judged']}")  # fmt: skip
    print(f"caught {counts['faults'] - counts['missed']} of {counts['faults']} faults; "
          f"first rule: {dict(rules.most_common())}")  # fmt: skip
    print(f"a scale of 1 + dose u seen in: {dict(dose_seen)}")


if __name__ == "__main__":
    main()
