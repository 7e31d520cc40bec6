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
from numdev.sources.synthetic import MASKS, Shapes, answer, draw, draw_mask

PROBES = ("ones", "one_key", "uniform", "one_hot", "two_hot")
CODED = ("one_hot", "two_hot")
SHAPES = Shapes(batch=2, heads=4, kv_heads=2, q_len=70, kv_len=101, head_dim=32, v_dim=24)
SQUARE = dataclasses.replace(SHAPES, q_len=65, kv_len=65)


def probe(
    name: str, shapes: Shapes = SHAPES, fmt: str = "bfloat16", **fields: Any
) -> AttentionCase:
    """A case of the probe in a format; `options` are the regime's, the rest the case's."""
    q, k, v = draw(name, shapes, seed=3, options=fields.pop("options", {}))
    scale = fields.pop("scale", shapes.head_dim**-0.5)
    case = AttentionCase(ref=CaseRef(case=name), q=q, k=k, v=v, scale=scale, **fields)
    return case.rounded_to(format_named(fmt))


def assert_known(name: str, case: AttentionCase) -> Tensor:
    """The answer and the reference differ by no more than fp64 arithmetic over kv_len terms, and
    the weight of the other keys (e^-40 each for the coded probes)."""
    known, exact = answer(name, case), attend(case)
    assert known is not None
    assert (known.dtype, known.shape) == (torch.float64, exact.out.shape)
    n = case.kv_len
    tolerance = (2 * n * 2**-53 + n * math.exp(-40)) * float(case.v.double().abs().max())
    assert float((known - exact.out).abs().max()) <= tolerance
    return known


@pytest.mark.parametrize("name", PROBES)
def test_answers_hold_in_every_format(name: str) -> None:
    """Of the rounded numbers; under causality and windows, with more keys than queries and the
    other way round; with one query, one key, one feature, and more keys than sign patterns."""
    for fmt in ("bfloat16", "float16", "float8_e4m3fn", "float64"):
        assert_known(name, probe(name, fmt=fmt))
    causal = {"is_causal": True}
    for fields in (causal, {**causal, "causal_offset": 31}, {"window": (5, 5)}, {"window": (5, 0)}):
        assert_known(name, probe(name, **fields))
        assert_known(name, probe(name, dataclasses.replace(SHAPES, q_len=101, kv_len=70), **fields))
    for q_len, kv_len, dim in ((1, 1, 16), (1, 2, 1), (1, 300, 80), (129, 129, 256)):
        sizes = {"q_len": q_len, "kv_len": kv_len, "head_dim": dim, "v_dim": dim}
        assert_known(name, probe(name, Shapes(batch=1, heads=2, kv_heads=2, **sizes)))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", PROBES)
def test_answers_under_masks(name: str, kind: str) -> None:
    """Known under every mask that only hides; a bias on the scores takes away all answers but those
    that do not depend on the scores. Rows that see nothing are 0."""
    case = probe(name, SQUARE, mask=draw_mask(kind, SQUARE, seed=0))
    if kind in ("bias", "bias_inf") and name not in ("ones", "one_key"):
        assert answer(name, case) is None
        return
    known, empty = assert_known(name, case), attend(case).empty
    assert bool((known[empty] == 0).all())
    assert bool(empty.any()) == (kind in ("random", "bias_lowest"))


@pytest.mark.parametrize("name", PROBES)
def test_unknown_answers_are_not_given(name: str) -> None:
    """Sinks take probability away; a scale or a soft cap of one's own moves coded scores. And the
    comparison can fail: under another causal mask the answer is another."""
    assert answer(name, dataclasses.replace(probe(name), sinks=torch.zeros(4))) is None
    for changed in ({"softcap": 2.0}, {"scale": 0.01}):
        case = probe(name, **changed)
        if name in CODED:
            assert answer(name, case) is None
        else:
            assert_known(name, case)
    assert answer("normal", probe(name)) is None
    if name in ("uniform", *CODED):
        case = probe(name, is_causal=True, causal_offset=31)
        wrong = attend(dataclasses.replace(case, causal_offset=30)).out
        assert float((answer(name, case) - wrong).abs().max()) > 0.01
