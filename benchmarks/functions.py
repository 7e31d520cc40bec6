"""Is what `numdev check --reference` predicts right, does it accuse sound functions, and
which faulty ones does it see?

    PYTHONPATH=benchmarks python benchmarks/functions.py [--format bfloat16 --seeds 5 --more --only matmul]

For each of some fifty small functions (`--more`: of some forty others, by which no limit
was chosen), forward and backward: what PyTorch's own run errs over what the rounding of
its operations explains; how often sound versions fail (`sound`); how often faulty ones do
(`numdev.operations.function.planted_faults`, and errors of some doses), and which of these a
tolerance of 1e-2 passes. `--record FILE` writes all numbers."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from judged_functions import Bench, Judged
from more_functions import MORE
from small_functions import FUNCTIONS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from numdev.exact.result_dtypes import is_floating
from numdev.exact.rounded_results import EveryOperation, Rounding
from numdev.formats import format_of, round_to
from numdev.operations.function.float32_error_model import Arithmetic
from numdev.operations.function.function_runs import FunctionRun, run
from numdev.operations.function.trees import as_real

Function = Callable[..., Any]
aten = torch.ops.aten
DOSES = (1.0, 0.5, 0.25, 0.125)  # of a unit roundoff: by how much an output is scaled
TOLERANCE = 1e-2


# --- sound versions -------------------------------------------------------------------


def inside(function: Function, dtype: torch.dtype) -> Function:
    """All of it in a wider dtype, rounded once."""

    def run_inside(*arguments: Any) -> Any:
        floats = [x for x in arguments if is_floating(x)]
        wide = [x.to(dtype) if is_floating(x) else x for x in arguments]
        out = function(*wide)
        return tree_map(lambda x: as_format(x, floats[0].dtype), out)

    return run_inside


def as_format(x: Any, dtype: torch.dtype) -> Any:
    if not is_floating(x):
        return x
    return x.to(dtype) if x.requires_grad else round_to(x, format_of(dtype)).to(dtype)


class OtherSums(TorchDispatchMode):
    """Sums and products in two parts, whose terms are those at even and at odd places,
    in float32."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        parts = None
        if name in ("mm", "bmm"):
            x, y = (a.float() if a.dtype.itemsize < 4 else a for a in args)
            parts = [x[..., i::2] @ y[..., i::2, :] for i in (0, 1)]
        elif func is aten.sum.dim_IntList and args[1] and args[0].is_floating_point():
            x = args[0].float() if args[0].dtype.itemsize < 4 else args[0]
            axis = args[1][0] % max(1, x.ndim)
            if x.ndim and x.shape[axis] > 1:
                places = [slice(i, None, 2) for i in (0, 1)]
                ahead = (slice(None),) * axis
                parts = [func(x[(*ahead, p)], *args[1:]) for p in places]
        if parts is None:
            return func(*args, **(kwargs or {}))
        return (parts[0] + parts[1]).to(args[0].dtype)


def some_operations(share: int) -> Rounding:
    """Rounds every operation but each `share`-th, as where some are fused."""
    count = iter(range(10**9))
    return EveryOperation(chosen=lambda func, args: next(count) % share != 0)


def emulated(bench: Bench, make: Callable[[int], Rounding]) -> list[FunctionRun]:
    """The reference's runs in fp64 with other roundings, `make(seed of the draw)`."""
    runs = []
    for call in bench.calls:
        for draw in call.draws:
            values = draw.computed(make(draw.seed))
            groups = {}
            for group in ("outputs", "written", "gradients"):
                like = getattr(draw.plain, group)
                groups[group] = {
                    n: _like(values[n], x) for n, x in like.items() if n in values
                }
            runs.append(FunctionRun(**groups, differentiable=draw.plain.differentiable))
    return runs


def _like(values: Tensor, x: Tensor) -> Tensor:
    """Values in fp64 (complex ones as pairs) in the dtype of `x`."""
    if not is_floating(x):
        return values.to(x.dtype)
    real = as_real(x)
    rounded = round_to(values, format_of(real.dtype)).to(real.dtype)
    return torch.view_as_complex(rounded) if x.is_complex() else rounded


def sound(bench: Bench) -> Iterator[tuple[str, Callable[[], list[FunctionRun]]]]:
    """Runs of sound versions of a function, by what they are."""
    function = bench.reference

    def run_within(
        version: Function, mode: Any = None
    ) -> Callable[[], list[FunctionRun]]:
        def runs() -> list[FunctionRun]:
            with mode() if mode else nullcontext():
                return bench.runs_of(version)

        return runs

    yield "the reference", bench.plain
    yield "float32 inside", run_within(inside(function, torch.float32))
    yield "float64 inside", run_within(inside(function, torch.float64))
    yield "other sums", run_within(function, OtherSums)
    yield (
        "other sums, float32 inside",
        run_within(inside(function, torch.float32), OtherSums),
    )
    for share in (2, 3):
        yield (
            f"all but each {share}. rounded",
            lambda share=share: emulated(bench, lambda seed: some_operations(share)),
        )
    for n in (101, 102):
        yield (
            f"rounded at random ({n})",
            lambda n=n: emulated(
                bench, lambda seed: Arithmetic(noise=n + seed, seed=n + seed)
            ),
        )
    yield (
        "rounded to nearest, other sums' errors",
        lambda: emulated(bench, lambda seed: Arithmetic(noise=103 + seed)),
    )


def compiled(bench: Bench) -> list[FunctionRun]:
    torch._dynamo.reset()
    return bench.runs_of(torch.compile(bench.reference))


# --- faulty versions ------------------------------------------------------------------


def scaled(bench: Bench, dose: float) -> list[FunctionRun]:
    """Computed in float64 and scaled by 1 + dose u before it is rounded once."""
    outputs = []
    for drawn in bench.draws:
        wide = drawn.arguments.mapped(lambda _, x: x.double() if is_floating(x) else x)
        like = run(bench.reference, drawn.arguments, seed=drawn.seed).outputs
        out = run(bench.reference, wide, seed=drawn.seed).outputs
        outputs.append({n: _scaled(x, like[n], dose) for n, x in out.items()})
    plain = bench.plain()
    return [
        FunctionRun(**{**vars(p), "outputs": x})
        for p, x in zip(plain, outputs, strict=True)
    ]


def _scaled(x: Tensor, like: Tensor, dose: float) -> Tensor:
    if not is_floating(x):
        return x
    u = format_of(as_real(like).dtype).unit_roundoff
    return _like(as_real(x) * (1 + dose * u), like)


# --- what becomes of them -------------------------------------------------------------


def bench_of(name: str, fmt: str, seed: int, *, backward: bool) -> Bench:
    reference, make = {**FUNCTIONS, **MORE}[name]

    def inputs(seed: int) -> Any:
        return make(torch.Generator().manual_seed(seed))

    return Bench.of(reference, inputs, fmt=fmt, seed=seed, backward=backward)


class Totals:
    """What has been counted over all functions."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rules: Counter[str] = Counter()
        self.doses: Counter[float] = Counter()
        self.outputs: list[float] = []
        self.gradients: list[float] = []
        self.beyond: Counter[str] = Counter()

    def print(self, fmt: str) -> None:
        for what, ratios in (("outputs", self.outputs), ("gradients", self.gradients)):
            if ratios:
                above = sum(ratio > 1.1 for ratio in ratios)
                print(f"{fmt} {what}: PyTorch's own run over what is explained: median "
                      f"{statistics.median(ratios):.2f}, worst {max(ratios):.2f}, above 1.1 "
                      f"{above} of {len(ratios)}")  # fmt: skip
        counts = self.counts
        print(f"accused {counts['accused']} of {counts['sound']} sound runs, and "
              f"{counts['accused beside no yardstick']} whose reference is no yardstick; "
              f"{counts['failed']} failed")  # fmt: skip
        print(f"caught {counts['caught']} of {counts['faults']} faults; a tolerance of 1e-2 "
              f"passes {counts['passed by 1e-2']} of them")  # fmt: skip
        print(f"accused, by version and rule: {dict(self.beyond.most_common())}")
        print(f"first rule of faults: {dict(self.rules.most_common())}")
        print(f"a scale of 1 + dose u seen in: {dict(self.doses)}")


def run_sound(
    name: str,
    bench: Bench,
    seed: int,
    totals: Totals,
    record: list[str],
    *,
    compile_it: bool,
) -> tuple[dict[str, float], list[str]]:
    """The largest error of the reference of each tensor over what is explained, and which
    sound versions are accused, by which rule."""
    versions = dict(sound(bench))
    if compile_it:
        versions["compiled"] = lambda: compiled(bench)
    accused: list[str] = []
    largest: dict[str, float] = {}
    none: set[tuple[str, str]] = set()  # where the reference is no yardstick
    for what, runs in versions.items():
        try:
            judged = list(bench.judged(runs()))
        except Exception as error:
            totals.counts["failed"] += 1
            print(f"<!-- {name}, {what}: {str(error).splitlines()[0][:200]} -->")
            continue
        totals.counts["sound"] += 1
        if what == "the reference":
            none = {
                (x.call, x.tensor) for x in judged if (x.numbers.yardstick or 1.0) < 1.0
            }
        broken = [x for x in judged if x.rule]
        if broken and all((x.call, x.tensor) in none for x in broken):
            totals.counts["accused beside no yardstick"] += 1
        elif broken:
            accused.append(f"{what}, seed {seed}, {broken[0].tensor} ({broken[0].rule})")
            totals.beyond[f"{what}: {broken[0].rule}"] += 1
        record += [line_of(name, what, seed, x) for x in judged]
        if what == "the reference":
            for x in judged:
                ratio = x.numbers.predicted_ratio or 0.0
                largest[x.tensor] = max(largest.get(x.tensor, 0.0), ratio)
    return largest, accused


def line_of(name: str, what: str, seed: int, judged: Judged) -> str:
    numbers = judged.numbers.model_dump()
    return json.dumps(
        {"function": name, "version": what, "seed": seed, "call": judged.call,
         "tensor": judged.tensor, "rule": judged.rule, **numbers}
    )  # fmt: skip


def run_faulty(name: str, fmt: str, totals: Totals, record: list[str]) -> list[str]:
    """Which faulty versions are missed."""
    bench = bench_of(name, fmt, 0, backward=False)
    missed = []
    for words, runs in bench.wrong_versions():
        judged = list(bench.judged(runs))
        record += [line_of(name, f"fault: {words}", 0, x) for x in judged]
        rule = next((x.rule for x in judged if x.rule), "")
        totals.counts["faults"] += 1
        totals.counts["caught"] += bool(rule)
        totals.counts["passed by 1e-2"] += bench.passes_allclose(runs, TOLERANCE)
        totals.rules[rule] += 1
        missed += [] if rule else [words]
    for dose in DOSES:
        judged = list(bench.judged(scaled(bench, dose)))
        record += [line_of(name, f"dose: {dose:g} u", 0, x) for x in judged]
        totals.doses[dose] += any(x.rule for x in judged)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--more", action="store_true", help="the functions of no limit")
    parser.add_argument("--only", choices={**FUNCTIONS, **MORE}, help="one function")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--no-faults", action="store_true", help="sound functions alone")
    parser.add_argument("--no-sound", action="store_true", help="faulty functions alone")
    parser.add_argument("--compiled", action="store_true", help="with Inductor, one seed")
    parser.add_argument("--record", type=Path, help="file for all numbers")
    asked = parser.parse_args()
    totals = Totals()
    names: Sequence[str] = (
        [asked.only] if asked.only else list(MORE if asked.more else FUNCTIONS)
    )
    print(
        "| function | tensor: error / explained | accused | missed |\n|---|---|---|---|"
    )
    for name in names:
        largest: dict[str, float] = {}
        accused: list[str] = []
        record: list[str] = []
        for i in range(0 if asked.no_sound else asked.seeds):
            seed = asked.first + 2 * i
            bench = bench_of(name, asked.format, seed, backward=not asked.forward)
            ratios, wrongly = run_sound(
                name, bench, seed, totals, record, compile_it=asked.compiled and i == 0
            )
            accused += wrongly
            for tensor, ratio in ratios.items():
                largest[tensor] = max(largest.get(tensor, 0.0), ratio)
        totals.counts["accused"] += len(accused)
        totals.outputs += [r for n, r in largest.items() if not n.endswith("_grad")]
        totals.gradients += [r for n, r in largest.items() if n.endswith("_grad")]
        missed = [] if asked.no_faults else run_faulty(name, asked.format, totals, record)
        if asked.record:
            with asked.record.open("a") as file:
                file.writelines(f"{line}\n" for line in record)
        each = ", ".join(f"{tensor} {ratio:.2f}" for tensor, ratio in largest.items())
        print(
            f"| {name} | {each} | {'; '.join(accused)} | {'; '.join(missed)} |",
            flush=True,
        )
    print()
    totals.print(asked.format)


if __name__ == "__main__":
    main()
