"""What does `numdev check --problem` make of a set of public problem files?

    PYTHONPATH=benchmarks python benchmarks/public_problems.py DIRECTORY [--format float32 --every 4 --compiled 8]

DIRECTORY holds problem files (`Model`, `get_inputs`, `get_init_inputs`), in subfolders or
not. Every `--every`-th problem is run small, forward and backward: is it taken, does the
reference itself pass, how many known-wrong versions of it are caught, and how many of
these does a tolerance of 1e-2 pass? `--compiled N` compiles every N-th of these too.

Sizes are shrunk by a rule: integers among a file's own names (its constants, and
those in tuples) are divided by one power of two, rounded down, but those above 16 never
below 16 (or 8, or 4, where that is not enough): the lowest power for which the model
runs, has at most ELEMENTS numbers in all results of its operations, parameters included,
and MULTIPLICATIONS in its products. Equal sizes stay equal. Where the rounded-down sizes do not fit each other (a channel count that groups do
not divide) the next power is tried. A file without such names, or that nothing makes
small enough, is reported and not run."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from judged_functions import Bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from numdev.errors import UsageError
from numdev.formats import dtype_of, format_named
from numdev.operations.function.observed_calls import private
from numdev.operations.function.problem_files import (
    ModuleBuild,
    ProblemFile,
    module_of,
    redrawn_state,
)

LEAST = (16, 8, 4)  # a size that is not made smaller; the next where that is not enough
MOST_HALVINGS = 20
ELEMENTS = 1 << 20
MULTIPLICATIONS = 1 << 27
TOLERANCE = 1e-2


class Elements(TorchDispatchMode):
    """Counts the elements of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        if self.count > 4096 * ELEMENTS:
            raise OverflowError("too large")
        return out


def smaller(value: Any, halvings: int, least: int) -> Any:
    """An integer, or a tuple or list of such, made smaller by the rule."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value > least:
        return max(least, value >> halvings)
    if isinstance(value, tuple | list):
        return type(value)(smaller(x, halvings, least) for x in value)
    return value


def sizes_of(module: Any) -> dict[str, Any]:
    """What of a file's own names is, or holds, a size that can be made smaller."""
    names = {n: v for n, v in vars(module).items() if not n.startswith("__")}
    return {n: v for n, v in names.items() if smaller(v, MOST_HALVINGS, LEAST[-1]) != v}


def cost(path: Path) -> tuple[int, int]:
    """How many numbers a problem's operations return, and how many multiplications its
    products have, on tensors without values."""
    module = module_of(path)
    with torch.device("meta"), FlopCounterMode(display=False) as flops, Elements() as n:
        model = module.Model(*module.get_init_inputs())
        model(*module.get_inputs())
    return n.count, flops.get_total_flops() // 2


def shrunk(path: Path, folder: Path) -> tuple[Path, int]:
    """A copy of a problem that is small enough, with its own model as a solution, and how
    often its sizes were halved. Raises UsageError where there is none."""
    text = path.read_text()
    sizes = sizes_of(module_of(path))
    why = "it does not run without values"
    steps = [(n, least) for least in LEAST for n in range(MOST_HALVINGS)]
    for halvings, least in steps if sizes else [(0, LEAST[0])]:
        small = folder / f"{path.parent.name}_{path.stem}.py"
        changed = {n: smaller(v, halvings, least) for n, v in sizes.items()}
        lines = [f"{name} = {value!r}" for name, value in changed.items()]
        small.write_text("\n".join([text, *lines, "ModelNew = Model", ""]))
        try:
            numbers, products = cost(small)
        except Exception as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            continue
        why = f"{numbers} numbers, {products} multiplications"
        if numbers <= ELEMENTS and products <= MULTIPLICATIONS:
            try:
                tried(small)
            except Exception as error:
                why = str(error).splitlines()[0]
                continue
            return small, halvings
    raise UsageError(f"nothing makes it small enough ({why})")


def tried(path: Path) -> None:
    """Runs a problem once, as PyTorch does."""
    module = module_of(path)
    with torch.no_grad():
        module.Model(*module.get_init_inputs())(*module.get_inputs())


def bench_of(path: Path, fmt: str) -> tuple[Bench, torch.nn.Module]:
    """The calls of a problem in a format, as `numdev check --problem` makes them."""
    read = ProblemFile.read(path, "cpu")
    plain = read.build.module(read.model)
    build: ModuleBuild = replace(
        read.build, dtype=dtype_of(format_named(fmt)), state=redrawn_state(plain)[0]
    )
    model = build.module(read.model)
    return Bench.of(model, read.inputs, fmt=fmt, seed=0, backward=True), model


def judged_problem(
    path: Path, fmt: str, *, compiled: bool, counts: Counter[str]
) -> dict[str, Any]:
    """Everything about one problem in one format."""
    begin = time.process_time()
    bench, model = bench_of(path, fmt)
    judged = list(bench.judged(bench.plain()))
    outputs = [x for x in judged if x.tensor in bench.plain()[0].outputs]
    ratios = [x.numbers.predicted_ratio for x in judged]
    row: dict[str, Any] = {
        "reference": max((r for r in ratios if r is not None), default=0.0),
        "accused": sorted({f"{x.tensor} ({x.rule})" for x in judged if x.rule}),
        "moved": min((x.numbers.moved or 0.0 for x in outputs), default=0.0),
        "wrong": 0,
        "passed": 0,
        "taken_s": time.process_time() - begin,
    }
    counts["problems"] += 1
    counts["reference accused"] += bool(row["accused"])
    blind = any(x.numbers.moved is not None and x.numbers.moved < 3 for x in outputs)
    counts["inputs cannot judge"] += blind
    missed = []
    for words, runs in bench.wrong_versions():
        if blind:
            counts["wrong where inputs cannot judge"] += 1
            continue
        caught = bool(bench.outputs_break(runs))
        row["wrong"] += 1
        row["passed"] += bench.passes_allclose(runs, TOLERANCE)
        counts["wrong"] += 1
        counts["caught"] += caught
        missed += [] if caught else [words]
    row["missed"] = missed
    counts["passed by 1e-2"] += row["passed"]
    if compiled:
        counts["compiled"] += 1
        torch._dynamo.reset()
        quick = torch.compile(private(model))
        try:
            row["compiled"] = sorted(
                {
                    f"{x.tensor} ({x.rule})"
                    for x in bench.judged(bench.runs_of(quick))
                    if x.rule
                }
            )
        except Exception as error:
            row["compiled"] = [f"not compiled: {str(error).splitlines()[0]}"]
        counts["compiled accused"] += bool(row["compiled"])
    row["all_s"] = time.process_time() - begin
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--every", type=int, default=1, help="every N-th problem")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--compiled", type=int, default=0, help="every N-th is compiled")
    parser.add_argument(
        "--trace", action="store_true", help="show where one is not taken"
    )
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    ratios: list[float] = []
    seconds: list[float] = []
    paths = sorted(asked.directory.rglob("*.py"))[asked.first :: asked.every]
    print(
        "| problem | halved | reference / explained | accused | wrong, passed by 1e-2, missed | missed ones | seconds |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for i, path in enumerate(paths):
            short = f"{path.parent.name}/{path.stem}"[:48]
            counts["files"] += 1
            try:
                small, halvings = shrunk(path, Path(name))
            except Exception as error:
                counts["cannot be shrunk"] += 1
                print(f"| {short} | | cannot be shrunk: {error} | | | |", flush=True)
                continue
            compiled = bool(asked.compiled) and i % asked.compiled == 0
            try:
                row = judged_problem(
                    small, asked.format, compiled=compiled, counts=counts
                )
            except Exception as error:
                is_foreign = "not implemented for" in str(error)
                counts["PyTorch lacks it" if is_foreign else "not taken"] += 1
                why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                print(f"| {short} | {halvings} | not taken: {why} | | | |", flush=True)
                if asked.trace:
                    traceback.print_exc(file=sys.stdout)
                continue
            ratios.append(row["reference"])
            seconds.append(row["taken_s"])
            words = "; ".join(
                row["accused"] + [f"compiled: {x}" for x in row.get("compiled", [])]
            )
            print(f"| {short} | {halvings} | {row['reference']:.2f} (moved {row['moved']:.0f}) | {words} | {row['wrong']}, {row['passed']}, {len(row['missed'])} | "
                  f"{'; '.join(row['missed'])} | {row['taken_s']:.1f}, {row['all_s']:.1f} |", flush=True)  # fmt: skip
    print(f"\n{asked.format}: {dict(counts)}")
    if ratios:
        print(f"error of the reference over what is explained: median {statistics.median(ratios):.2f}, "
              f"worst {max(ratios):.2f}; above 1.3: {sum(x > 1.3 for x in ratios)}; "
              f"seconds of CPU a problem: median {statistics.median(seconds):.1f}, worst {max(seconds):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
