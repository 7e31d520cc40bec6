"""Probes: their known answers against the fp64 reference, and against a wrong one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import format_named
from numdev.kernels.reference import attend
from numdev.sources.masks import MASKS, draw_mask
from numdev.sources.synthetic import REGIMES, Shapes, answer, draw

PROBES = [name for name, regime in REGIMES.items() if regime.answer is not None]
SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=101, head_dim=32, v_dim=24)
SQUARE = dataclasses.replace(SHAPES, q_len=65, kv_len=65)


def probe(
    name: str, shapes: Shapes = SHAPES, fmt: str = "bfloat16", **fields: Any
) -> AttentionCase:
    """A case of the probe in a format; `options` are the regime's, the rest the case's."""
    options = fields.pop("options", {})
    q, k, v = draw(name, shapes, seed=3, options=options)
    scale = fields.pop("scale", shapes.head_dim**-0.5)
    case = AttentionCase(ref=CaseRef(case=name), q=q, k=k, v=v, scale=scale, **fields)
    return case.rounded_to(format_named(fmt))


def assert_known(name: str, case: AttentionCase) -> Tensor:
    """The answer and the reference differ by no more than fp64 arithmetic over kv_len terms, and
    the weight of the other keys (e^-40 each for the coded probes)."""
    known, exact = answer(name, case), attend(case)
    assert known is not None
    assert known.dtype == torch.float64
    n = case.kv_len
    tolerance = (2 * n * 2**-53 + n * math.exp(-40)) * float(case.v.double().abs().max())
    assert known.shape == exact.out.shape
    assert float((known - exact.out).abs().max()) <= tolerance
    return known


def test_the_probes() -> None:
    """V = 1, one key, equal scores, one key each and two keys each."""
    assert sorted(PROBES) == ["one_hot", "one_key", "ones", "two_hot", "uniform"]


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
@pytest.mark.parametrize("name", PROBES)
def test_answers_hold_in_every_format(name: str, fmt: str) -> None:
    """The answer is that of the rounded numbers."""
    assert_known(name, probe(name, fmt=fmt))


@pytest.mark.parametrize(
    "fields",
    [
        {"is_causal": True},
        {"is_causal": True, "causal_offset": 31},
        {"window": (5, 5)},
        {"is_causal": True, "window": (5, 0)},
    ],
)
@pytest.mark.parametrize("name", PROBES)
def test_answers_hold_where_position_hides_keys(name: str, fields: dict[str, Any]) -> None:
    """Under causality and windows, with more keys than queries and the other way round."""
    assert_known(name, probe(name, **fields))
    assert_known(name, probe(name, dataclasses.replace(SHAPES, q_len=101, kv_len=70), **fields))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", PROBES)
def test_answers_under_masks(name: str, kind: str) -> None:
    """Known under every mask that only hides; a bias on the scores takes away all answers but those
    that do not depend on the scores. Rows that see nothing are 0."""
    mask = draw_mask(kind, SQUARE, seed=0)
    case = probe(name, SQUARE, mask=mask)
    if kind in ("bias", "bias_inf") and name not in ("ones", "one_key"):
        assert answer(name, case) is None
        return
    known = assert_known(name, case)
    empty = attend(case).empty
    assert bool((known[empty] == 0).all())
    assert bool(empty.any()) == (kind in ("random", "bias_lowest"))


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize(
    ("q_len", "kv_len", "dim"), [(1, 1, 1), (3, 3, 1), (5, 2, 2), (1, 300, 80), (129, 129, 256)]
)
def test_answers_at_the_edges(name: str, q_len: int, kv_len: int, dim: int) -> None:
    """One query, one key, one feature, and more keys than there are sign patterns."""
    shapes = Shapes(
        batch=1, heads=2, kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=dim, v_dim=dim
    )
    assert_known(name, probe(name, shapes))


@pytest.mark.parametrize("name", PROBES)
def test_unknown_answers_are_not_given(name: str) -> None:
    """Sinks take probability away; a scale or a soft cap of one's own moves coded scores."""
    assert answer(name, dataclasses.replace(probe(name), sinks=torch.zeros(4))) is None
    coded = name in ("one_hot", "two_hot")
    for changed in ({"softcap": 2.0}, {"scale": 0.01}):
        case = probe(name, **changed)
        if coded:
            assert answer(name, case) is None
        else:
            assert_known(name, case)


def test_no_answer_for_other_regimes() -> None:
    """A regime that is no probe has none."""
    q, k, v = draw("normal", SHAPES, seed=0, options={})
    case = AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=1.0)
    assert answer("normal", case) is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("uniform", {"causal_offset": 30}),
        ("one_hot", {"causal_offset": 30}),
        ("two_hot", {"causal_offset": 30}),
        ("uniform", {"is_causal": False}),
    ],
)
def test_a_misaligned_mask_contradicts_the_answer(name: str, fault: dict[str, Any]) -> None:
    """The comparison can fail: with another causal mask the answer is another. (That it is dropped
    altogether `one_hot` does not show: its keys are all visible.)"""
    case = probe(name, is_causal=True, causal_offset=31)
    wrong = attend(dataclasses.replace(case, **fault)).out
    assert float((answer(name, case) - wrong).abs().max()) > 0.01


def test_one_hot_targets() -> None:
    """One key each, of many; every one visible under a bottom-right causal mask; and the margin is
    at least what was asked and less than twice that."""
    case = probe("one_hot", options={"margin": 30.0}, fmt="float64")
    s = case.q @ case.k.repeat_interleave(2, dim=1).transpose(-1, -2) * case.scale
    top = s.topk(2, dim=-1)
    margin = top.values[..., 0] - top.values[..., 1]
    assert 30.0 <= float(margin.min()) == float(margin.max()) < 60.0
    target = top.indices[..., 0]
    assert bool((target <= torch.arange(70) + 31).all())
    assert len(target.unique()) > 50


def test_two_hot_pairs() -> None:
    """Each query has two keys of the same score, half the length apart."""
    shapes = dataclasses.replace(SHAPES, kv_len=100)
    case = probe("two_hot", shapes, fmt="float64")
    s = case.q @ case.k.repeat_interleave(2, dim=1).transpose(-1, -2)
    tied = s == s.amax(dim=-1, keepdim=True)
    assert bool((tied.sum(dim=-1) == 2).all())
    first, last = tied.long().argmax(dim=-1), 99 - tied.flip(-1).long().argmax(dim=-1)
    assert bool((last - first == 50).all())


@pytest.mark.parametrize("name", ["ones", "uniform"])
def test_gradients_that_vanish(name: str) -> None:
    """With V = 1 dQ and dK are 0 in exact arithmetic, with equal keys dQ is: autograd in fp64 finds
    no more than its rounding."""
    q, k, v = (x.double().requires_grad_() for x in draw(name, SQUARE, seed=0, options={}))
    kk, vv = (x.repeat_interleave(2, dim=1) for x in (k, v))
    p = (q @ kk.transpose(-1, -2) * 32**-0.5).softmax(dim=-1)
    (p @ vv).backward(torch.ones(2, 4, 65, 24, dtype=torch.float64))
    assert float(q.grad.abs().max()) <= 1e-13
    if name == "ones":
        assert float(k.grad.abs().max()) <= 1e-13
