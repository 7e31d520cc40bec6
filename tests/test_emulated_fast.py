"""Predictions in large blocks: the same recipe as tile by tile, up to fp32 rounding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from oracles import normal, poisoned, to_cuda
from recipes import drawn as drawn_case
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import format_named, ulp
from numdev.kernels.emulation import backward as emulated_backward
from numdev.kernels.emulation import forward as tile_by_tile
from numdev.kernels.emulation.kernel import emulated_step, emulation, recipe_of
from numdev.kernels.emulation.recipe import FORWARD
from numdev.kernels.emulation.rounding import Rounder
from numdev.kernels.reference import attend, gradients

ROWS, KEYS, HEADS = 150, 330, 4
RMS = 1e-3
BEFORE_CAST = {"bfloat16": 1e-2, "float16": 4e-2}
"""How far apart outputs may lie before their cast, in rms and relative to the error. fp32
sums of n terms in two orders lie about sqrt(n) 2^-24, 1e-6, of the term scale apart, and
an error is about u / 3 of it: 1.3e-3 in bf16 and 1.6e-4 in fp16. That is 1e-3 and 6e-3;
the rest is for roundings inside that fall on two sides of a boundary."""
CARRIED = {"bfloat16": 1e-3, "float16": 5e-3}
"""The share of outputs whose cast may go to the other side: that distance over a spacing,
of which it is as large a part as of an error, or less."""


noise = functools.partial(normal, seed=3)


def drawn(
    regime: str = "normal", *, fmt: str = "bfloat16", **others: Any
) -> AttentionCase:
    shape = {"batch": 2, "heads": HEADS, "kv_heads": 2, "rows": ROWS, "head_dim": 32}
    length = others.pop("keys", KEYS)
    case = drawn_case(length, regime, dtype=torch.float64, **{**shape, **others})
    return dataclasses.replace(case, grad_out=noise(*case.q.shape)).rounded_to(
        format_named(fmt)
    )


CAUSAL = {"is_causal": True, "causal_offset": KEYS - ROWS}
CASES: Mapping[str, Callable[[str], AttentionCase]] = {
    "plain": lambda fmt: drawn(fmt=fmt), "causal": lambda fmt: drawn(fmt=fmt, **CAUSAL),
    "window": lambda fmt: drawn(fmt=fmt, window=(70, 30), causal_offset=100),
    "bool mask": lambda fmt: drawn(fmt=fmt, mask=noise(2, 1, ROWS, KEYS) > 0.5),
    "additive mask": lambda fmt: drawn(fmt=fmt, mask=2 * noise(1, HEADS, ROWS, KEYS)),
    "sinks": lambda fmt: drawn(fmt=fmt, sinks=4 * noise(HEADS)),
    "soft cap": lambda fmt: drawn(fmt=fmt, softcap=2.0),
    "some rows": lambda fmt: drawn(fmt=fmt, **CAUSAL).restrict(rows=torch.arange(3, ROWS, 7)),
    "ties": lambda fmt: drawn("ties", fmt=fmt), "outliers": lambda fmt: drawn("outliers", fmt=fmt),
}  # fmt: skip
"""Everything that makes a call's scores, and inputs that have hurt somebody."""


RECIPES: Mapping[str, Mapping[str, Any]] = {
    "tiles of 64": {"block_kv": 64},
    "tiles of 128, descending": {"block_kv": 128, "kv_order": "descending"},
    "splits": {"block_kv": 64, "splits": 4},
    "splits, descending": {"block_kv": 32, "splits": 7, "kv_order": "descending"},
    "l from rounded P": {"preset": "fa2-consistent", "block_kv": 64},
    "rounded inside": {
        "block_kv": 64,
        "scale_in": "q",
        **{"scores": "e8m10", "bias": "e8m10", "max": "working", "exp": "e8m12"},
        **{"normalised": "e8m12", "merge": "e8m12", "splits": 2},
    },
    "fast exp": {"block_kv": 128, "exponential": "fexp_u20"},
    "one cast": {"preset": "exact", "out": "working"},
    "a lagging maximum": {"preset": "fa4", "block_kv": 32, "max_lag": 1},
    "it lags, ascending": {
        "block_kv": 32,
        "splits": 2,
        "max_lag": 2,
        "exponential": "cubic",
    },
}


@pytest.fixture(params=[False, True], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as on a GPU, or of few rows and few tiles of keys."""
    for module in (tile_by_tile, emulated_backward):
        size = 1 << 17 if request.param else 1 << 28
        monkeypatch.setattr(module, "WIDE_BYTES", {"cpu": size})
    monkeypatch.setattr(tile_by_tile, "MIN_BLOCK_ROWS", 30)


def is_at_once(case: AttentionCase, claim: Mapping[str, Any]) -> bool:
    return tile_by_tile.is_at_once(Rounder(recipe_of(claim), case))


def distance(result: Tensor, tiled: Tensor, error: Tensor) -> float:
    return float((result.double() - tiled.double()).norm() / error.norm())


def assert_same(case: AttentionCase, claim: Mapping[str, Any]) -> None:
    """The claim in blocks is that tile by tile: elements differ by a cast that goes to
    the other side, one ulp, and the largest P that does, 2 u of the term scale."""
    reference, fmt = attend(case), case.format
    tiled = tile_by_tile.attend(case, recipe_of(claim))[0].double()
    result = emulation(case, claim).double()
    error = tiled - reference.out
    assert float((result - reference.out).norm() / error.norm()) == pytest.approx(
        1.0, abs=RMS
    )
    largest = ulp(torch.maximum(result.abs(), tiled.abs()), fmt)
    assert (
        (result - tiled).abs() <= largest + 2 * fmt.unit_roundoff * reference.term_scale
    ).all()
    assert (result != tiled).double().mean() <= CARRIED[fmt.name]
    exact_out = {**claim, "out": "exact"}
    tiled = tile_by_tile.attend(case, recipe_of(exact_out))[0]
    assert distance(emulation(case, exact_out), tiled, error) <= BEFORE_CAST[fmt.name]


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("fmt", CARRIED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(5)
def test_blocks_are_the_tiles_up_to_fp32_rounding(name: str, fmt: str) -> None:
    """Every recipe with plain sums, on every feature of a call."""
    case = CASES[name](fmt)
    for claim in RECIPES.values():
        assert is_at_once(case, claim)
        assert_same(case, claim)


@pytest.mark.parametrize(("claim", "fmt"), [
    ({"preset": "qiu2025"}, "bfloat16"), ({"preset": "eager"}, "bfloat16"),
    ({"rounding": "stochastic", "seed": 3}, "bfloat16"), ({"rounding": "toward_zero"}, "bfloat16"),
    ({"exponent": "working"}, "bfloat16"), ({"loop_order": "kv"}, "bfloat16"),
    ({"block_kv": 64}, "float32"),
])  # fmt: skip
def test_what_is_rounded_between_tiles_goes_tile_by_tile(claim: Any, fmt: str) -> None:
    """To the bit; and so does all in float32, where fp32 arithmetic is what is
    predicted."""
    case = drawn(fmt=fmt, rows=40, keys=100, is_causal=True)
    assert not is_at_once(case, claim)
    assert torch.equal(
        emulation(case, claim), tile_by_tile.attend(case, recipe_of(claim))[0]
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_spreads_as_tile_by_tile(name: str, value: float) -> None:
    """A number that is none reaches the rows it reaches tile by tile, and no others."""
    case, claim = poisoned(drawn(**CAUSAL), name, (0, 1, -10, 3), value), {"block_kv": 64}
    tiled = tile_by_tile.attend(case, recipe_of(claim))[0]
    assert 0 < tiled.isnan().sum() < tiled.numel() / 4
    assert torch.equal(emulation(case, claim).nan_to_num(7e4), tiled.nan_to_num(7e4))


STEPS: Mapping[str, Mapping[str, Any]] = {
    "fa2": {"block_kv": 64, "kv_order": "descending"},
    "grouped": {"block_kv": 64, "group_sum": "running", "ds_scale": "before"},
    "one kind of delta": {"block_kv": 64, "delta_from": "dP*P", "p_for_ds": "working"},
    "scale in q": {"scale_in": "q", "splits": 2, "dp": "working", "s": "e8m12"},
    "scale in k": {"scale_in": "q_log2", "scale_again": "k_log2"},
    "eager": {"preset": "eager"},
    "delta tile by tile": {"delta_from": "dP*P", "delta": "working", "block_kv": 64},
}


STEP_APART = 0.15
"""Relative to the error: what 2e-3 of the last casts make when they go to the other side.
That is an ulp each, sqrt(12) times the rms of a rounding."""
RMS_OF_FEW = 2e-2
FEW = ("ties", "sink")
"""Here a few keys carry all of dk, and one O that is carried over moves delta in all of
it."""


def assert_same_step(case: AttentionCase, claim: Mapping[str, Any], rms: float) -> None:
    """What differs is a small part of the error, in every tensor, and its rms is the
    same."""
    exact = gradients(case)
    O, _, *gradient = emulated_backward.gradients(case, recipe_of(claim))
    tiled = dict(zip(("out", "dq", "dk", "dv"), (O, *gradient), strict=True))
    for name, result in emulated_step(case, claim).items():
        reference = getattr(exact, name)
        error = tiled[name].double() - reference
        ratio = (result.double() - reference).norm() / error.norm()
        assert float(ratio) == pytest.approx(1.0, abs=rms), name
        assert distance(result, tiled[name], error) <= STEP_APART, name


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("name", ["causal", "soft cap", "ties"])
@pytest.mark.one_in(3)
def test_a_step_in_blocks_is_that_in_tiles(name: str) -> None:
    """Both passes, every way to gradients."""
    for claim in STEPS.values():
        assert_same_step(
            CASES[name]("bfloat16"), claim, RMS_OF_FEW if name in FEW else RMS
        )


def test_a_step_of_what_is_not_finite_is_that_in_tiles() -> None:
    """An upstream gradient that overflowed reaches what it reaches in `emulated`."""
    case = poisoned(drawn(is_causal=True), "grad_out", (0, 0, 5, 0), float("inf"))
    tiled = emulated_backward.gradients(case, recipe_of({}))
    result = emulated_step(case, {})
    for x, y in zip(result.values(), (tiled[0], *tiled[2:]), strict=True):
        assert torch.equal(x.nan_to_num(7e4), y.nan_to_num(7e4))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_tiles_on_a_gpu(name: str) -> None:
    """The same on a GPU, in both passes, with the blocks it has there."""
    case = to_cuda(CASES[name]("bfloat16"))
    for claim in RECIPES.values():
        assert_same(case, claim)
    for claim in STEPS.values():
        assert_same_step(case, claim, RMS_OF_FEW if name in FEW else RMS)


def test_each_part_is_rounded_before_it_is_merged() -> None:
    """Four splits handed over in bfloat16: but for a few roundings that turn, the same
    numbers."""
    case, claim = drawn(), {"block_kv": 64, "splits": 4, "merge": "working"}
    tiled = tile_by_tile.attend(case, recipe_of(claim))[0]
    assert (emulation(case, claim) != tiled).double().mean() < 0.01


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("site", FORWARD)
def test_no_site_is_left_out_in_blocks(site: str) -> None:
    """What a site's rounding moves, it moves in blocks of many tiles too, or the tiles
    go one by one."""
    case = drawn(fmt="bfloat16", rows=40, keys=300)
    claim = {"preset": "fa2", "block_kv": 64, site: "e8m2"}
    tiled, plain = (
        tile_by_tile.attend(case, recipe_of(options))[0]
        for options in (claim, {**claim, site: "wide"})
    )
    if tiled.equal(plain):
        pytest.skip("no such site in this call: no soft cap, mask or split")
    moved = (tiled.double() - plain.double()).norm()
    left_out = (emulation(case, claim).double() - tiled.double()).norm()
    assert left_out <= 0.1 * moved
