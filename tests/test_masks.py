"""Masks by name: what each hides, and that configurations and the registry know the same ones."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.config import MaskKind
from numdev.sources.synthetic import MASKS, Shapes, draw_mask

SHAPES = Shapes(batch=3, heads=4, kv_heads=2, q_len=64, kv_len=100, head_dim=8, v_dim=8)
LOWEST = torch.finfo(torch.float32).min


def test_configurations_know_every_mask() -> None:
    """What YAML may name is what can be drawn."""
    assert get_args(MaskKind) == tuple(MASKS)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 100), (1, 1), (1, 33), (33, 1), (2, 2)])
def test_a_mask_fits_its_case(kind: str, q_len: int, kv_len: int) -> None:
    """It broadcasts to the scores, is bool or additive fp32, and has a seed."""
    shapes = dataclasses.replace(SHAPES, q_len=q_len, kv_len=kv_len)
    mask = draw_mask(kind, shapes, seed=1)
    q, k, v = (torch.zeros(shape) for shape in (shapes.q, shapes.k, shapes.v))
    AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=1.0, mask=mask)
    assert mask.dtype == (torch.float32 if kind.startswith("bias") else torch.bool)
    assert torch.equal(mask, draw_mask(kind, shapes, seed=1))
    seen = mask if mask.dtype == torch.bool else mask > LOWEST
    assert bool(seen.any()) or mask.numel() == 3  # a random one may hide all of three keys


def test_all_true_and_causal() -> None:
    """One hides nothing, the other what causality (top-left) hides."""
    assert bool(draw_mask("all_true", SHAPES, seed=0).all())
    i, j = torch.arange(64)[:, None], torch.arange(100)[None, :]
    assert torch.equal(draw_mask("causal", SHAPES, seed=0)[0, 0], j <= i)


def test_random() -> None:
    """6 in 10 keys of the rows that see any; some rows see none, a first row always does."""
    mask = draw_mask("random", SHAPES, seed=0)
    empty = ~mask.any(dim=-1)
    assert bool(empty[:, :, 32].all())
    assert not bool(empty[:, :, 0].any())
    assert 3 <= int(empty.sum()) <= 40  # 3 for certain, of 192 rows a tenth more
    assert float(mask[~empty].double().mean()) == pytest.approx(0.6, abs=0.02)


def test_mostly_masked() -> None:
    """About 2 keys in 100, at least one in every row, which a causal mask leaves."""
    mask = draw_mask("mostly_masked", SHAPES, seed=0)
    assert float(mask.double().mean()) == pytest.approx(0.03, abs=0.01)
    assert bool(mask.tril().any(dim=-1).all())


def test_padding() -> None:
    """Per batch entry another length: 25, 50 and 75 of 100 keys."""
    mask = draw_mask("padding", SHAPES, seed=0)
    assert mask.shape == (3, 1, 1, 100)
    assert mask.sum(dim=-1).flatten().tolist() == [25, 50, 75]
    assert bool((mask.long().diff(dim=-1) <= 0).all())


def test_additive() -> None:
    """A finite bias per head; -inf in 4 of 10 places but not in a whole row; the lowest number."""
    bias = draw_mask("bias", SHAPES, seed=0)
    assert bias.shape == (1, 4, 64, 100)
    assert bool(bias.isfinite().all())
    holes = draw_mask("bias_inf", SHAPES, seed=0)
    assert not bool((holes == -math.inf).all(dim=-1).any())
    assert float((holes == -math.inf).double().mean()) == pytest.approx(0.4, abs=0.02)
    lowest = draw_mask("bias_lowest", SHAPES, seed=0)
    assert set(lowest.unique().tolist()) == {0.0, LOWEST}
    assert bool((lowest == LOWEST).all(dim=-1).any())
