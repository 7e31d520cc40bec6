"""The reading limits count what they say they count."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from loaded import ROOT, load

limits = load("scripts/limits.py")
Counted = Callable[[ast.Module], Iterator[tuple[int, str]]]


def lines_of(count: Counted, code: str) -> list[int]:
    return sorted(line for line, _ in count(ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("found = 1\nrows = 2", [1]),
        ("def said(given, *, kept=0): ...", [1, 1, 1]),
        ("lambda here: here", [1]),
        ("for its in rows: ...", [1]),
        ("FOUND = 1\nclass Held: ...\nx.told = 1\nimport a as _kept", [1, 2, 3, 4]),
        ("HELD = 'held'", []),  # a term of judgements
        ("call(found=1)\nprint(found)\nprint(x.found)", []),  # names of other code
    ],
)
def test_names_that_say_nothing(code: str, lines: list[int]) -> None:
    assert lines_of(limits.banned_names, code) == lines


def test_long_functions() -> None:
    body = "    x = 1\n"
    assert lines_of(limits.long_functions, "def f():\n" + 59 * body) == []
    assert lines_of(limits.long_functions, "def f():\n" + 60 * body) == [1]
    assert lines_of(limits.long_functions, "@triton.jit\ndef f():\n" + 60 * body) == []


@pytest.mark.parametrize(("terms", "count"), [(20, 0), (21, 1)])
def test_large_expressions(terms: int, count: int) -> None:
    """n names, n - 1 additions and as many operators: 58 and 61 nodes."""
    code = "total = " + " + ".join(["a"] * terms)
    assert len(lines_of(limits.large_expressions, code)) == count


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("[x for y in z for x in y]", 0),
        ("[x for x in z if x]", 0),
        ("{x for y in z for x in y if x}", 1),
    ],
)
def test_dense_comprehensions(code: str, count: int) -> None:
    assert len(lines_of(limits.dense_comprehensions, code)) == count


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("from typing import Any, cast\nx: dict[str, Any] = {}", [1, 2]),
        ("import typing\nx: typing.Any = any(y)", [2]),
        ('def f(x: Any) -> Any:\n    """Any value."""', [1, 1, 2]),
        ("AnyTree = object  # Any\nx = anything", [1]),
    ],
)
def test_the_word_any_counts_wherever_it_stands(code: str, lines: list[int]) -> None:
    assert [line for line, _ in limits.untyped(code)] == lines


def test_a_line_counts_with_all_that_stands_in_it() -> None:
    """Ruff lets a line be longer by a remark for a tool."""
    text = f"{'x' * 90}\n{'x' * 80}  # noqa: E501\n{'é' * 90}"
    assert [line for line, _ in limits.long_lines(text)] == [2]


@pytest.mark.slow
def test_a_figure_above_its_limit_is_an_error(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(limits, "places", cache(limits.places))  # the same tree twice
    tighter = tuple(limit._replace(limit=-1) for limit in limits.LIMITS)
    monkeypatch.setattr("sys.argv", ["limits.py"])
    assert limits.main() == 0
    monkeypatch.setattr(limits, "LIMITS", tighter)
    assert limits.main() == 1
    assert "above a reading limit" in capsys.readouterr().err


def test_every_module_is_in_a_layer() -> None:
    """A package that stands in none could import whatever it likes."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = tomllib.loads(text)["tool"]["importlinter"]["contracts"][0]
    layers = {name for layer in contract["layers"] for name in layer.split(" : ")}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "numdev").rglob("*.py")
    }
    placed = {m for m in modules if any(f"{m}.".startswith(f"{x}.") for x in layers)}
    assert modules - placed == {
        *("numdev", "numdev.__main__", "numdev.report", "numdev.studies")
    }
