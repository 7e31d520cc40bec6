"""An output beside a yardstick in one pass: the same as step by step, and who takes it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from interpreted import results_of
from rowwise_cases import DTYPES, SHAPES, apart, tables, yardstick
from torch import Tensor

from numdev import comparison, rowwise
from numdev.comparison import compare
from numdev.errors import Refused
from numdev.formats import FORMATS
from numdev.rowwise import row_sums
from numdev.yardstick import Yardstick

SHAPE = (2, 3, 37, 9)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
REORDERED = 1e-13
"""Sums of at most some thousand numbers in fp64, in another order."""


@pytest.mark.slow
def test_one_pass_is_the_same_in_the_interpreter() -> None:
    """Of all shapes and formats, with and without a baseline and a prediction."""
    found: list[dict[str, Any]] = results_of("rowwise_cases.py")
    assert len(found) == len(SHAPES) * len(DTYPES) * 4
    wrong = {
        (case["name"], name): far
        for case in found
        for name, far in case["apart"].items()
        if not far <= REORDERED
    }
    assert not wrong


def test_on_a_cpu_there_is_none() -> None:
    y, o, e = yardstick(SHAPE, baseline=True)
    assert row_sums(o, y, e) is None


def changed(y: Yardstick, name: str, value: float) -> Yardstick:
    """With one number of one of its tensors replaced."""
    x = getattr(y, name).clone()
    x[0, 1, 2, 3] = value
    return dataclasses.replace(y, **{name: x})


@pytest.mark.parametrize("name", ["reference", "term_scale", "baseline", "unrounded"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_regular(name: str, value: float) -> None:
    """A yardstick of which something is not finite."""
    y, _, _ = yardstick(SHAPE, baseline=True)
    assert y.regular
    assert not changed(y, name, value).regular


def test_rows_that_do_not_count_are_not_regular() -> None:
    """Those that see no key, and those that repeat another's result."""
    y, _, _ = yardstick(SHAPE, baseline=True)
    empty = y.empty.clone()
    empty[1, 1, 5] = True
    assert not dataclasses.replace(y, empty=empty).regular
    repeated = y.reference.clone()
    repeated[1, 2, 5] = repeated[0, 2, 5]
    assert not dataclasses.replace(y, reference=repeated).regular


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["output", "expected"])
def test_what_is_not_finite_goes_step_by_step(
    of: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one pass says so in its squares, and what comes out is what there was before."""
    y, o, e = yardstick(SHAPE, baseline=True)
    (o if of == "output" else e)[0, 1, 2, 3] = value
    asked: list[bool] = []

    def pretended(o: Tensor, y: Yardstick, expected: Tensor | None) -> rowwise.RowSums:
        asked.append(True)
        assert expected is not None
        rows = {f.name: o.new_zeros(SHAPE[:3]) for f in dataclasses.fields(rowwise.RowSums)}
        rows["square"] = (o - y.reference).square().sum(dim=-1)
        rows["predicted"] = (expected.double() - y.reference).square().sum(dim=-1)
        return rowwise.RowSums(**rows)

    expected = tables(compare(o, y, e))
    monkeypatch.setattr(comparison, "row_sums", pretended)
    found = tables(compare(o, y, e))
    assert asked
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- on a GPU ------------------------------------------------------------------------------------


def moved(y: Yardstick) -> Yardstick:
    """To the GPU."""
    fields = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
    return Yardstick(**{k: x.cuda() if isinstance(x, Tensor) else x for k, x in fields.items()})


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 1000, 128), (3, 2, 129, 256), (1, 2, 5, 1500)])
def test_one_pass_is_the_same(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    baseline: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what it takes; features beyond its width are taken step by step."""
    y, o, e = yardstick(shape, baseline=baseline)
    y = moved(dataclasses.replace(y, format=FORMATS["bfloat16"]))
    given = e.cuda() if expected else None
    x = o.cuda().to(dtype)
    sums = row_sums(comparison.widened(x), y, given)
    assert (sums is None) == (shape[-1] > rowwise.WIDEST)
    found = tables(compare(x, y, given))
    again = tables(compare(x, y, given))
    monkeypatch.setattr(comparison, "row_sums", lambda *given: None)
    steps = tables(compare(x, y, given))
    assert found.keys() == steps.keys()
    for name, sum_of in found.items():
        assert apart(sum_of, steps[name]) <= REORDERED, name
        assert torch.equal(sum_of, again[name]), name


@pytest.mark.gpu
@on_gpu
def test_where_triton_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once."""
    asked: list[bool] = []

    def refused(*given: Any) -> Any:
        asked.append(True)
        raise Refused("no")

    monkeypatch.setattr(rowwise, "computed", refused)
    monkeypatch.setattr(rowwise, "_REFUSED", [])
    y, o, e = yardstick(SHAPE, baseline=True)
    y = moved(y)
    for _ in range(2):
        assert row_sums(o.cuda(), y, e.cuda()) is None
    assert asked == [True]
