"""The regime `biased_rounding` has the links it claims, by plain loops in fp64 over its numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from numdev.config import CaseConfig, Choice
from numdev.errors import UsageError
from numdev.formats import format_named, round_to
from numdev.sources.opening import ConfigSource
from numdev.sources.synthetic import Inputs, Shapes, draw
from numdev.system import System

SHAPES = Shapes(batch=2, heads=2, kv_heads=1, q_len=12, kv_len=40, head_dim=64, v_dim=16)


def drawn(shapes: Shapes = SHAPES, **options: Any) -> Inputs:
    return draw("biased_rounding", shapes, seed=4, options=options, gradients=True)


def scores(inputs: Inputs, b: int, h: int, i: int) -> list[float]:
    """scale q k of one row, each a plain sum in fp64."""
    q, k = inputs.q[b, h, i].tolist(), inputs.k[b, 0].tolist()
    return [math.fsum(x * y for x, y in zip(q, key, strict=True)) / 8.0 for key in k]


def every_row(inputs: Inputs) -> list[list[float]]:
    return [scores(inputs, b, h, i) for b in range(2) for h in range(2) for i in range(12)]


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_numbers_are_exact_in_both_formats(fmt: str) -> None:
    """Rounding to bf16 or fp16 changes nothing, whatever the size of V."""
    for value in (1.0, 0.125, 8.0, 0.3):
        inputs = drawn(value=value)
        for x in (*inputs, inputs.grad_out):
            assert x is not None
            assert torch.equal(round_to(x, format_named(fmt)), x)


@pytest.mark.parametrize(("count", "level"), [(1, 8.0), (2, -3.0), (5, 0.0), (40, 1.5), (99, 2.0)])
def test_so_many_keys_tie_exactly_at_the_level(count: int, level: float) -> None:
    """In every row the maximum is the level, exactly, and `count` keys have it (at most all)."""
    for row in every_row(drawn(count=count, level=level)):
        assert max(row) == level
        assert [j for j, s in enumerate(row) if s == level] == list(range(min(count, 40)))


@pytest.mark.parametrize("tail", [1e-6, 1e-3, 0.1])
def test_the_tail_weighs_what_was_asked(tail: float) -> None:
    """The mean over rows of sum exp(s - max) beside the ties. Its 38 terms scatter by a factor
    exp(0.25 N(0, 1)), relative 0.25 each and shared by rows that share keys; and the common score
    was rounded to bf16, by at most 2^-8 * 8 = 0.03."""
    weights = [math.fsum(math.exp(s - 8.0) for s in row[2:]) for row in every_row(drawn(tail=tail))]
    assert math.fsum(weights) / len(weights) == pytest.approx(tail, rel=0.25)


def test_no_tail_is_exactly_none() -> None:
    """With `tail` 0 the other keys' exp is 0 in fp64."""
    assert all(math.exp(s - 8.0) == 0.0 for row in every_row(drawn(tail=0.0)) for s in row[2:])


def test_a_share_of_rows_reaches_the_ties() -> None:
    """The rest score 0 there exactly, and have no tied maximum."""
    shapes = dataclasses.replace(SHAPES, q_len=200)
    q = drawn(shapes, share=0.25).q[..., 0]
    assert set(q.flatten().tolist()) == {0.0, 8.0}
    # 800 rows: five standard errors of a share of 0.25 are 0.077.
    assert float((q == 8.0).float().mean()) == pytest.approx(0.25, abs=0.08)
    for row in every_row(drawn(share=0.0)):
        assert row[0] == row[1] == 0.0
        assert max(row) > 0.0


@pytest.mark.parametrize("value", [1.0, 0.125, 8.0])
def test_sizes_and_signs_of_v(value: float) -> None:
    """|V| is in [1, 2), at the ties times `value`; signs are as asked."""
    v = drawn(value=value).v
    tied, others = v[:, :, :2].flatten().tolist(), v[:, :, 2:].flatten().tolist()
    assert all(-2.0 * value < x <= -value for x in tied)
    assert all(-2.0 < x <= -1.0 for x in others)
    v = drawn(tail_sign=-1, v_sign=0, count=20).v
    assert all(1.0 <= x < 2.0 for x in v[:, :, 20:].flatten().tolist())
    # 640 values: five standard errors of a share of one half are 0.1.
    assert float((v[:, :, :20] > 0).float().mean()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    "options", [{"count": 0}, {"tail": -1.0}, {"value": 0.0}, {"share": 1.5}, {"v_sign": 2}]
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    """A parameter out of its range is a usage error."""
    with pytest.raises(UsageError, match="cannot be drawn"):
        drawn(**options)


def test_a_configuration_draws_it() -> None:
    """By name with parameters, as in the YAML of an audit, its own dO included."""
    inputs = Choice(name="biased_rounding", options={"count": 3, "tail": 0.01})
    config = CaseConfig(name="a", heads=2, seq_len=16, head_dim=64, inputs=inputs)
    source = ConfigSource("t", [config], (0,), System.here("cpu"), gradients=True)
    case = source.cases[0].load()
    assert torch.equal(case.k[:, :, 0], case.k[:, :, 2])
    assert not torch.equal(case.k[:, :, 0], case.k[:, :, 3])
    assert case.grad_out is not None
    assert float(case.grad_out.max()) <= -1.0
