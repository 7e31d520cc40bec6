"""How many planted faults of functions are named, and are the names true?

    PYTHONPATH=benchmarks python benchmarks/function_names.py [--format bfloat16 --only matmul --gradients --list]

Of each of some fifty small functions wrong ones are made: of wrong arguments and results
(`planted_faults`), of each number that it computes with times 1.37, of every fifth other function
that `causes` knows; and four that have no name (noise, rows in random order, columns
scaled at random, one element). Each is computed exactly, rounded once to the format, and
named as a check names it: in the format, else in float32. What errs by less than twice
the error of one rounding is not counted: a check names nothing there.

A name is true where it is true of other data too: of another seed's arguments, the first
of which at least three numbers err, the function that it names leaves at most a tenth of
the planted fault's exact error. It is wrong otherwise, and for a fault without a name
always."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from small_functions import FUNCTIONS
from torch import Tensor

from numdev.exact.result_dtypes import is_floating
from numdev.formats import format_named, round_to
from numdev.operations.function import substituted_references as others
from numdev.operations.function.causes import LEAST_NUMBERS, TENFOLD, Search, causes_of
from numdev.operations.function.planted_faults import faults_of_inputs, faults_of_outputs
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.substituted_numbers import numbers_of
from numdev.operations.function.substituted_results import other_results
from numdev.operations.function.trees import Values, arguments_of

TIMES = 1.37
EVERY = 5
OTHER_SEEDS = (1, 2, 3)
Wrong = Callable[[FunctionReference], Values]  # exact results


class Plant(NamedTuple):
    what: str
    wrong: Wrong
    has_name: bool = True


def reference_of(name: str, fmt: str, seed: int, *, backward: bool) -> FunctionReference:
    function, make = FUNCTIONS[name]
    dtype = getattr(torch, fmt)
    data = make(torch.Generator().manual_seed(seed))
    data = tuple(x.to(dtype) if is_floating(x) else x for x in data)
    return FunctionReference(
        function=function, arguments=arguments_of(data, function), seed=seed,
        backward=backward,
    )  # fmt: skip


def plants(of: FunctionReference) -> Iterator[Plant]:
    for fault in faults_of_inputs(of.arguments):
        yield Plant(fault.words, lambda r, f=fault: r.computed_exactly(f.applied(r.arguments)))  # fmt: skip
    for fault in faults_of_outputs():
        yield Plant(fault.words, lambda r, f=fault: {n: f.change(x) for n, x in r.truth.items()})  # fmt: skip
    for number in numbers_of(of):
        what = number.words(number.value * TIMES)

        def other_number(r: FunctionReference, value: float = number.value) -> Values:
            same = next(n for n in numbers_of(r) if n.value == value)
            return same.results(value * TIMES)

        yield Plant(what, other_number)
    every = list(others.other_references(of))
    for i, (words, _) in enumerate(every):
        if i % EVERY == 0:
            yield Plant(words, lambda r, words=words: named_reference(words, r))
    yield Plant("noise", with_noise, False)
    yield Plant("rows in random order", in_random_order, False)
    yield Plant("columns scaled at random", with_scaled_columns, False)
    yield Plant("one element", with_one_element, False)


def named_reference(words: str, of: FunctionReference) -> Values:
    every = (*others.simplest_references(of), *others.other_references(of))
    return next((run() for name, run in every if name == words), {})


def normal(x: Tensor, shape: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def with_noise(r: FunctionReference) -> Values:
    return {n: x * (1 + 0.3 * normal(x, x.shape, r.seed)) for n, x in r.truth.items()}


def in_random_order(r: FunctionReference) -> Values:
    generator = torch.Generator().manual_seed(100 + r.seed)
    return {n: x[torch.randperm(len(x), generator=generator)] for n, x in r.truth.items()}


def with_scaled_columns(r: FunctionReference) -> Values:
    return {n: x * normal(x, x.shape[-1:], 7 + r.seed) for n, x in r.truth.items()}


def with_one_element(r: FunctionReference) -> Values:
    changed = {n: x.clone() for n, x in r.truth.items()}
    for x in changed.values():
        x.view(-1)[x.numel() // 3] += 3 * x.std()
    return changed


def name_of(
    plant: Plant, name: str, fmt: str, *, backward: bool
) -> tuple[str | None, str]:
    """What a check says, and in which format; `unseen` where it says nothing by design."""
    for each in dict.fromkeys((fmt, "float32")):
        of = reference_of(name, each, 0, backward=backward)
        wanted = of.plain.gradients if backward else of.truth
        outputs = {
            n: round_to(x, format_named(each)).to(getattr(torch, each))
            for n, x in plant.wrong(of).items()
            if x.is_floating_point() and n in wanted and x.shape == of.truth[n].shape
        }
        outputs = {n: x for n, x in outputs.items() if x.numel() >= LEAST_NUMBERS}
        search = Search(of, outputs)
        far = {
            n: outputs[n] for n in search.wrong if search.errors[n] > 2 * search.floors[n]
        }
        if not far:
            return None, "unseen"
        named = causes_of(of, far, {})
        if named:
            return next(iter(named.values())).words, each
    return None, fmt


def is_true(
    words: str, plant: Plant, name: str, fmt: str, *, backward: bool
) -> bool | None:
    """Whether the name explains the fault on other data; None where of no other seed's
    data three numbers err."""
    for seed in OTHER_SEEDS:
        answer = is_true_of(
            words, plant, reference_of(name, fmt, seed, backward=backward)
        )
        if answer is not None:
            return answer
    return None


def is_true_of(words: str, plant: Plant, of: FunctionReference) -> bool | None:
    wanted = of.plain.gradients or of.truth
    wrong = {n: x for n, x in plant.wrong(of).items() if n in wanted and x.is_floating_point()}  # fmt: skip
    search = Search(of, wrong)
    if not search.wrong:
        return None
    for n in search.wrong:
        candidates: list[Tensor | None] = [named_reference(words, of).get(n)]
        if scale := re.fullmatch(r"it is (\S+) times what it should be", words):
            candidates.append(float(scale[1]) * of.truth[n])
        candidates += [
            x.values for x in other_results(n, wrong[n], of, {}, 0.0) if x.words == words
        ]
        for number in numbers_of(of):
            fit = re.search(r"(\S*\d\S*) in place of", words)
            if fit and number.words(float(fit[1])) == words:
                candidates.append(number.results(float(fit[1])).get(n))
        for other in candidates:
            left, _ = search.wrong[n].left_by(other)
            if left * TENFOLD <= search.errors[n]:
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--only", choices=FUNCTIONS, help="one function")
    parser.add_argument("--gradients", action="store_true", help="name these alone")
    parser.add_argument("--list", action="store_true", help="each fault with its name")
    asked = parser.parse_args()
    total: Counter[str] = Counter()
    print(
        "| function | faults seen | named | not named | wrongly named |\n|---|---|---|---|---|"
    )
    for name in [asked.only] if asked.only else FUNCTIONS:
        counts: Counter[str] = Counter()
        bad: list[str] = []
        backward = asked.gradients
        for plant in plants(reference_of(name, asked.format, 0, backward=backward)):
            words, fmt = name_of(plant, name, asked.format, backward=backward)
            if fmt == "unseen":
                counts["unseen"] += 1
                continue
            if words is None:
                what = "not named" if plant.has_name else "rightly without a name"
            else:
                is_right = plant.has_name and is_true(
                    words, plant, name, fmt, backward=backward
                )
                what = "named" if is_right else "wrongly named"
                what = "other data cannot tell" if is_right is None else what
            counts[what] += 1
            if what in ("not named", "wrongly named"):
                bad.append(f"{what}: {plant.what} -> {words} ({fmt})")
            if asked.list:
                print(f"    {what}: {plant.what} -> {words} ({fmt})")
        total += counts
        seen = counts["named"] + counts["not named"] + counts["wrongly named"]
        print(f"| {name} | {seen} | {counts['named']} | {counts['not named']} | "
              f"{counts['wrongly named']} |", flush=True)  # fmt: skip
        for line in bad:
            print(f"    {line}", flush=True)
    nameable = total["named"] + total["not named"]
    print(f"\n{asked.format}: named {total['named']} of {nameable + total['wrongly named']}, wrongly "
          f"{total['wrongly named']}; other data cannot tell {total['other data cannot tell']}; rightly without a name "
          f"{total['rightly without a name']}; "
          f"below twice one rounding {total['unseen']}")  # fmt: skip


if __name__ == "__main__":
    main()
