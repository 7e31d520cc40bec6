"""Hold the reading limits of numdev's code, and print its lines by package.

    python scripts/limits.py            the figures, and an error where one is above its limit
    python scripts/limits.py --list     each place that counts

Lines are reported, not limited: growth must be worth reading. Where a figure is not yet at
its aim, its limit is what it was when last lowered: it only goes down."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = ("tests", "benchmarks", "scripts", "examples")  # beside the package
# They say only that something is there.
BANNED = frozenset(
    [
        "found",
        "given",
        "held",
        "kept",
        "known",
        "made",
        "said",
        "there",
        "told",
        "own",
        "apart",
        "rest",
        "here",
        "its",
    ]
)
# `Standing.HELD` is a result: a judgement says so of a number that is within its limit
TERMS = frozenset(["HELD"])
MAX_COLUMNS = 90  # of a line, with all that stands in it
MAX_LINES = 60  # of a function
MAX_NODES = 60  # of an expression


class Limit(NamedTuple):
    """What is counted, how often it may be there, and how often it should."""

    name: str
    limit: int
    aim: int


BESIDE = "the same in tests, benchmarks, scripts"
LIMITS = (
    Limit("names that say nothing", 0, 0),
    Limit(BESIDE, 0, 0),
    Limit("lines over 90 columns", 0, 0),
    Limit("classes of one name", 0, 0),
    Limit("`Any`", 300, 300),
    Limit("functions over 60 lines", 0, 0),
    Limit("expressions over 60 nodes", 0, 0),
    Limit("comprehensions of two `for` and a condition", 0, 0),
)


def banned_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Such names of variables, constants, arguments, attributes, functions, classes and
    imports where they are given, with their lines; whatever their case and underscores
    at their ends."""
    for node in ast.walk(tree):
        for line, name in defined_names(node):
            if name.strip("_").lower() in BANNED and name not in TERMS:
                yield line, name


def defined_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the names that a node gives to something, with their lines."""
    match node:
        case ast.arg():
            yield node.lineno, node.arg
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.lineno, node.name
        case ast.Name(ctx=ast.Store()):
            yield node.lineno, node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.lineno, node.attr
        case ast.ImportFrom() | ast.Import():
            yield from ((node.lineno, each.asname or "") for each in node.names)
        case ast.ExceptHandler(name=str(name)):
            yield node.lineno, name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield node.lineno, name


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a GPU kernel, which cannot be cut without being another one."""
    return any(
        ast.unparse(mark).startswith("triton.jit") for mark in function.decorator_list
    )


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_LINES and not is_triton(node):
                yield node.lineno, f"{node.name}: {lines} lines"


def large_expressions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Whole expressions of a statement, not what they are made of."""
    for statement in (node for node in ast.walk(tree) if isinstance(node, ast.stmt)):
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                nodes = [
                    n for n in ast.walk(child) if not isinstance(n, ast.expr_context)
                ]
                if len(nodes) > MAX_NODES:
                    yield child.lineno, f"{len(nodes)} nodes"


def dense_comprehensions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    kinds = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for node in ast.walk(tree):
        if not isinstance(node, kinds):
            continue
        has_condition = any(generator.ifs for generator in node.generators)
        if len(node.generators) > 1 and has_condition:
            yield node.lineno, f"{len(node.generators)} `for` and a condition"


def untyped(text: str) -> Iterator[tuple[int, str]]:
    """The word `Any` wherever it stands: in code, imports and prose, as `grep -w` counts
    it."""
    for number, line in enumerate(text.splitlines(), start=1):
        yield from ((number, "Any") for _ in re.findall(r"\bAny\b", line))


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns"


def class_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name


def places(package: Path) -> dict[str, list[str]]:
    """By limit, each place that counts."""
    every: dict[str, list[str]] = {limit.name: [] for limit in LIMITS}
    in_text = {"`Any`": untyped, "lines over 90 columns": long_lines}
    counted = {
        "names that say nothing": banned_names,
        "functions over 60 lines": long_functions,
        "expressions over 60 nodes": large_expressions,
        "comprehensions of two `for` and a condition": dense_comprehensions,
    }
    classes: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        tree = ast.parse(text)
        for name, count in counted.items():
            every[name] += [f"{file}:{line}: {what}" for line, what in count(tree)]
        for name, count_in in in_text.items():
            every[name] += [f"{file}:{line}: {what}" for line, what in count_in(text)]
        for line, name in class_names(tree):
            classes.setdefault(name, []).append(f"{file}:{line}: {name}")
    shared = [" and ".join(where) for where in classes.values() if len(where) > 1]
    every["classes of one name"] = shared
    for path in (p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))):
        names = banned_names(ast.parse(path.read_text(encoding="utf-8")))
        file = path.relative_to(ROOT)
        every[BESIDE] += [f"{file}:{line}: {name}" for line, name in names]
    return every


def lines_by_package() -> Counter[str]:
    """Docstrings and blank lines count: a reader meets them too."""
    lines: Counter[str] = Counter()
    for path in (*(ROOT / "numdev").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        folder = path.relative_to(ROOT).parent.parts
        lines["/".join(folder[:2])] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the reading limits.")
    parser.add_argument("--list", action="store_true", help="each place that counts")
    show_places = parser.parse_args().list
    for package, lines in sorted(lines_by_package().items()):
        print(f"{package:44}{lines:8}")
    above = 0
    print(f"\n{'':44}{'figure':>8}{'limit':>8}{'aim':>8}")
    figures = places(ROOT / "numdev")
    for limit in LIMITS:
        figure = len(figures[limit.name])
        above += figure > limit.limit
        print(f"{limit.name:44}{figure:8}{limit.limit:8}{limit.aim:8}")
        if show_places:
            print(*figures[limit.name], sep="\n")
    if above:
        print(
            "\nabove a reading limit: see `python scripts/limits.py --list`",
            file=sys.stderr,
        )
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
