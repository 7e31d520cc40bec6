"""What does `numdev check --problem` make of a set of public problem files?

    PYTHONPATH=benchmarks python benchmarks/public_problems.py DIRECTORY [--format float32 --every 4 --compiled 8 --jobs 16]

DIRECTORY holds problem files (`Model`, `get_inputs`, `get_init_inputs`), in subfolders or
not. Every `--every`-th problem is run small, forward and backward: is it taken, does the
reference itself pass, how many known-wrong versions of it are caught, and how many of
these does a tolerance of 1e-2 pass? `--compiled N` compiles every N-th of these too.
Each problem has a process of its own, `--jobs` at a time, which ends after `--seconds`.

The reference itself is sound where it breaks no rule. Where it errs by more than three
times what its operations explain it is no yardstick: what errs by less than ten times as
much is not judged.

Sizes are shrunk by a rule: integers among a file's own names (its constants, and
those in tuples) are divided by one power of two, rounded down, but those above 16 never
below 16 (or 8, or 4, where that is not enough): the lowest power for which the model
runs, has at most ELEMENTS numbers in all results of its operations, parameters included,
and MULTIPLICATIONS in its products. Equal sizes stay equal. Where the rounded-down sizes do not fit each other (a channel count that groups do
not divide) the next power is tried. Where no power makes it small enough, integers written in `get_inputs` are divided
too. What even that does not make small enough is reported and not run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from judged_functions import Bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from numdev.errors import UsageError, one_line
from numdev.formats import dtype_of, format_named
from numdev.operations.function.function_runs import private
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


class Literals(ast.NodeTransformer):
    """Makes the integers written in `get_inputs` smaller by the rule."""

    def __init__(self, halvings: int, least: int) -> None:
        self.halvings, self.least = halvings, least

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self.generic_visit(node) if node.name == "get_inputs" else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(smaller(node.value, self.halvings, self.least))


def with_sizes(
    text: str, sizes: dict[str, Any], halvings: int, least: int, *, literals: bool
) -> str:
    """The text of a problem with smaller sizes and its own model as a solution."""
    if literals:
        tree = ast.parse(text)
        tree.body = [
            Literals(halvings, least).visit(node)
            if isinstance(node, ast.FunctionDef)
            else node
            for node in tree.body
        ]
        text = ast.unparse(ast.fix_missing_locations(tree))
    changed = {n: smaller(v, halvings, least) for n, v in sizes.items()}
    lines = [f"{name} = {value!r}" for name, value in changed.items()]
    return "\n".join([text, *lines, "ModelNew = Model", ""])


def shrunk(path: Path, folder: Path) -> tuple[Path, int]:
    """A copy of a problem that is small enough, with its own model as a solution, and how
    often its sizes were halved. Raises UsageError where there is none."""
    text = path.read_text()
    sizes = sizes_of(module_of(path))
    why = "it does not run without values"
    every = [(n, least) for least in LEAST for n in range(MOST_HALVINGS)]
    steps = [(*step, False) for step in (every if sizes else every[:1])]
    for halvings, least, literals in steps + [(*step, True) for step in every]:
        small = folder / f"{path.parent.name}_{path.stem}.py"
        small.write_text(with_sizes(text, sizes, halvings, least, literals=literals))
        try:
            numbers, products = cost(small)
        except Exception as error:
            why = one_line(error)
            continue
        why = f"{numbers} numbers, {products} multiplications"
        if numbers <= ELEMENTS and products <= MULTIPLICATIONS:
            try:
                tried(small)
            except Exception as error:
                why = one_line(error)
                continue
            return small, halvings
    raise UsageError(f"nothing makes it small enough ({why})")


def tried(path: Path) -> None:
    """Runs a problem once, as PyTorch does."""
    module = module_of(path)
    with torch.no_grad():
        module.Model(*module.get_init_inputs())(*module.get_inputs())


def bench_of(path: Path, fmt: str, device: str) -> tuple[Bench, torch.nn.Module]:
    """The calls of a problem in a format, as `numdev check --problem` makes them."""
    read = ProblemFile.read(path, device)
    plain = read.build.module(read.model)
    build: ModuleBuild = replace(
        read.build, dtype=dtype_of(format_named(fmt)), state=redrawn_state(plain)[0]
    )
    model = build.module(read.model)
    bench = Bench.of(model, read.inputs, fmt=fmt, seed=0, backward=True, device=device)
    return bench, model


@dataclass(kw_only=True)
class Row:
    """What became of one problem in one format."""

    problem: str
    halvings: int = -1  # how often sizes were halved; -1: it could not be shrunk
    why: str = ""  # it was not taken; empty: it was
    gradients: int = 0  # how many of its results are gradients
    reference: float = 0.0  # the largest error of a result over what is explained
    accused: list[str] = field(default_factory=list)
    no_yardstick: list[str] = field(default_factory=list)
    moved: float = 0.0  # the least that other data moves an output
    wrong: int = 0
    passed: int = 0  # of these by the tolerance
    missed: list[str] = field(default_factory=list)  # of these by numdev
    not_judged: int = 0  # wrong versions where the inputs cannot judge
    compiled: list[str] | None = None  # what is accused of it; None: not compiled
    not_compiled: str = ""  # why it could not be
    seconds: float = 0.0  # to be taken
    all_seconds: float = 0.0


def judged_problem(path: Path, row: Row, job: Job) -> None:
    """Fills in everything about one problem in one format."""
    begin = time.process_time()
    bench, model = bench_of(path, job.format, job.device)
    judged = list(bench.judged(bench.plain()))
    outputs = [x for x in judged if x.tensor in bench.plain()[0].outputs]
    row.gradients = len({x.tensor for x in judged}) - len({x.tensor for x in outputs})
    # Of what is no yardstick for itself there is no other number
    beyond = [x for x in judged if (x.numbers.yardstick or 1.0) < 1.0]
    row.reference = max((x.numbers.predicted_ratio or 0.0 for x in judged), default=0.0)
    row.accused = sorted({f"{x.tensor} ({x.rule})" for x in judged if x.rule})
    row.no_yardstick = sorted({x.tensor for x in beyond})
    row.moved = min((x.numbers.moved or 0.0 for x in outputs), default=0.0)
    row.seconds = time.process_time() - begin
    blind = any(x.numbers.moved is not None and x.numbers.moved < 3 for x in outputs)
    for words, runs in bench.wrong_versions():
        if blind:
            row.not_judged += 1
            continue
        row.wrong += 1
        row.passed += bench.passes_allclose(runs, TOLERANCE)
        row.missed += [] if bench.outputs_break(runs) else [words]
    if job.compiled:
        torch._dynamo.reset()
        try:
            runs = bench.runs_of(torch.compile(private(model)))
            rules = {f"{x.tensor} ({x.rule})" for x in bench.judged(runs) if x.rule}
            row.compiled = sorted(rules)
        except Exception as error:
            row.not_compiled = one_line(error)
    row.all_seconds = time.process_time() - begin


@dataclass(frozen=True, kw_only=True)
class Job:
    """One problem to be judged in a process of its own."""

    path: Path
    format: str
    device: str
    compiled: bool
    trace: bool

    @property
    def problem(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"[:48]

    def run(self, answer: Connection) -> None:
        """Sends the problem's row."""
        torch.set_num_threads(1)
        row = Row(problem=self.problem)
        with tempfile.TemporaryDirectory() as name:
            try:
                small, row.halvings = shrunk(self.path, Path(name))
                judged_problem(small, row, self)
            except Exception as error:
                row.why = f"{type(error).__name__}: {one_line(error)}"
                if self.trace:
                    traceback.print_exc()
        answer.send(row)


def rows_of(jobs: Sequence[Job], at_once: int, seconds: float) -> Iterator[Row]:
    """The rows of all jobs, as they end."""
    fork = multiprocessing.get_context("fork")
    waiting = list(reversed(jobs))
    running: dict[Connection, tuple[Job, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop()
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=job.run, args=(sender,))
            process.start()
            sender.close()
            running[receiver] = (job, process, time.monotonic() + seconds)
        for ready in wait(list(running), timeout=1.0):
            job, process, _ = running.pop(ready)  # type: ignore[index]
            try:
                yield ready.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                yield Row(
                    problem=job.problem, why=f"its process ended ({process.exitcode})"
                )
            process.join()
        late = [c for c, (*_, end) in running.items() if time.monotonic() > end]
        for connection in late:
            job, process, _ = running.pop(connection)
            process.kill()
            process.join()
            yield Row(problem=job.problem, why=f"it took more than {seconds:g} s")


def line(row: Row) -> str:
    """A problem's line of the table."""
    if row.why:
        halved = "" if row.halvings < 0 else row.halvings
        return f"| {row.problem} | {halved} | not taken: {row.why} | | | | |"
    words = row.accused + [f"{x}: no yardstick" for x in row.no_yardstick]
    words += [f"compiled: {x}" for x in row.compiled or ()]
    words += [f"not compiled: {row.not_compiled}"] if row.not_compiled else []
    return (f"| {row.problem} | {row.halvings} | {row.reference:.2f} (moved {row.moved:.0f}) | "
            f"{'; '.join(words)} | {row.wrong}, {row.passed}, {len(row.missed)} | "
            f"{'; '.join(row.missed)} | {row.seconds:.1f}, {row.all_seconds:.1f} |")  # fmt: skip


def counts_of(rows: Sequence[Row]) -> dict[str, str]:
    """What became of all problems, in words."""
    taken = [row for row in rows if not row.why]
    wrong, missed = sum(r.wrong for r in taken), sum(len(r.missed) for r in taken)
    compiled = [row for row in taken if row.compiled is not None]
    sound = [row for row in taken if not row.accused]
    why = Counter(
        "cannot be shrunk" if r.halvings < 0 else "not taken" for r in rows if r.why
    )

    def share(part: int, whole: int) -> str:
        return f"{part} of {whole}" + (f" ({part / whole:.1%})" if whole else "")

    return {
        "taken, forward and backward": share(len(taken), len(rows)),
        "of these without gradients": str(sum(not row.gradients for row in taken)),
        **{words: str(count) for words, count in why.items()},
        "reference not accused": share(len(sound), len(taken)),
        "of these no yardstick for a result": str(sum(bool(r.no_yardstick) for r in sound)),
        "inputs cannot judge an output": str(sum(bool(r.not_judged) for r in taken)),
        "wrong versions caught": share(wrong - missed, wrong),
        "wrong versions passed by 1e-2": share(sum(r.passed for r in taken), wrong),
        "wrong versions where inputs cannot judge": str(sum(r.not_judged for r in taken)),
        "compiled, not accused": share(sum(not r.compiled for r in compiled), len(compiled)),
        "not compiled": str(sum(bool(r.not_compiled) for r in taken)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--format", default="bfloat16")
    parser.add_argument("--device", default="cpu", help="where they run: cpu, cuda")
    parser.add_argument("--every", type=int, default=1, help="every N-th problem")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="problems whose path has this in it")
    parser.add_argument("--compiled", type=int, default=0, help="every N-th is compiled")
    parser.add_argument("--jobs", type=int, default=1, help="problems at a time")
    parser.add_argument("--seconds", type=float, default=600, help="of one problem")
    parser.add_argument(
        "--trace", action="store_true", help="show where one is not taken"
    )
    asked = parser.parse_args()
    paths = sorted(p for p in asked.directory.rglob("*.py") if asked.only in str(p))
    jobs = [
        Job(
            path=path,
            format=asked.format,
            device=asked.device,
            compiled=bool(asked.compiled) and i % asked.compiled == 0,
            trace=asked.trace,
        )
        for i, path in enumerate(paths[asked.first :: asked.every])
    ]
    print(
        "| problem | halved | reference / explained | accused | wrong, passed by 1e-2, missed | missed ones | seconds |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for row in rows_of(jobs, asked.jobs, asked.seconds):
            rows.append(row)
            print(line(row), flush=True)
    print(f"\n{asked.format} on {asked.device}, {len(rows)} of {len(jobs)} files")
    for words, count in counts_of(rows).items():
        print(f"- {words}: {count}")
    taken = [row for row in rows if not row.why]
    if taken:
        ratios, seconds = [x.reference for x in taken], [x.seconds for x in taken]
        print(f"- error of the reference over what is explained: median {statistics.median(ratios):.2f}, "
              f"worst {max(ratios):.2f}; above 1.3: {sum(x > 1.3 for x in ratios)}\n"
              f"- seconds of CPU a problem: median {statistics.median(seconds):.1f}, worst {max(seconds):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
