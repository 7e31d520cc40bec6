"""The numbers of two tensors and of many: against numpy and scipy on all their values at once."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor

from numdev.training.weights.pairs import CASTS, cast_costs, compare, numbers, pooled
from numdev.training.weights.study import KINDS, kind_of

RELATIVE = 1e-12
"""Sums of 10^4 fp64 terms, in whichever order: n u = 10^4 * 1.1e-16."""


def normal(*shape: int, seed: int, size: float = 0.02) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(of: Tensor, against: Tensor) -> dict[str, Any]:
    return numbers(compare(of, against, cast_costs(against)))


def expected(of: Tensor, against: Tensor) -> dict[str, float]:
    """The same by numpy and scipy, from the values."""
    a, b = (x.double().flatten().numpy() for x in (of, against))
    cast = b.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    return {
        "max_abs": np.abs(a - b).max(),
        "mean_abs": np.abs(a - b).mean(),
        "rel": np.linalg.norm(a - b) / np.linalg.norm(b),
        "equal": (a == b).mean(),
        "w1": wasserstein_distance(a, b),
        # W1 of a cast is its mean change, since rounding keeps the order.
        "bfloat16_times": np.abs(a - b).mean() / wasserstein_distance(cast, b),
    }


def agree(found: dict[str, Any], wanted: dict[str, float]) -> bool:
    return all(math.isclose(found[k], v, rel_tol=RELATIVE) for k, v in wanted.items())


def test_one_tensor_against_numpy_and_scipy() -> None:
    """All numbers of a tensor pair are those of numpy and scipy, W1 of a cast among them; and the
    comparison rejects a number that is off by 1e-9."""
    b = normal(100, 70, seed=0)
    a = b + normal(100, 70, seed=1, size=1e-4) * (torch.arange(70) % 2)
    found, wanted = measured(a, b), expected(a, b)
    assert agree(found, wanted)
    for name in wanted:
        assert not agree(found | {name: found[name] * (1 + 1e-9)}, wanted)
    assert found["nulls"] == {}


def test_a_group_is_its_tensors_laid_end_to_end() -> None:
    """Every paired number of several tensors is that of their concatenation; W1 is the mean of
    theirs, which is never below W1 of the concatenation."""
    pairs = [(normal(40, n, seed=n), normal(40, n, seed=n + 1, size=0.1)) for n in (3, 50, 77)]
    pairs.append((torch.zeros(7), torch.zeros(7)))
    found = numbers(pooled([compare(a, b, cast_costs(b)) for a, b in pairs]))
    a, b = (torch.cat([p[i].flatten() for p in pairs]) for i in (0, 1))
    wanted = expected(a, b)
    of_all = wanted.pop("w1")
    assert agree(found, wanted)
    each = [
        (x.numel(), wasserstein_distance(x.flatten().numpy(), y.flatten().numpy()))
        for x, y in pairs
    ]
    mean = sum(n * w for n, w in each) / sum(n for n, _ in each)
    assert found["w1"] == pytest.approx(mean, rel=1e-6)  # scipy adds float32 up in float32
    assert found["w1"] >= of_all


def test_formats_of_8_bits_and_of_64() -> None:
    """Weights stored in float8 and float64 are compared like any."""
    b = normal(30, 30, seed=6, size=1.0)
    found = measured(b.to(torch.float8_e4m3fn), b.double())
    assert found["max_abs"] == (b.to(torch.float8_e4m3fn).double() - b.double()).abs().max()
    assert found["float8_e4m3fn_times"] == pytest.approx(1, rel=RELATIVE)
    assert measured(b, b.to(torch.float8_e4m3fn))["nulls"].keys() == {"float8_e4m3fn_times"} | {
        f"{name}_times" for name in CASTS
    }


KINDS_OF = {
    "embedding": "transformer.wte.weight patch_embed.proj.weight",
    "attention": "transformer.h.3.attn.c_attn.weight blocks.11.attn.qkv.weight "
    "encoder.layers.0.self_attn.in_proj_weight model.layers.10.self_attn.q_proj.weight "
    "layers.0.attention.wk.weight bert.encoder.layer.1.attention.output.dense.weight "
    "encoder.block.0.layer.0.SelfAttention.o.weight",
    "mlp": "transformer.h.3.mlp.c_proj.weight "
    "model.layers.10.mlp.experts.7.down_proj.weight "
    "layers.0.feed_forward.w2.weight bert.encoder.layer.1.output.dense.weight "
    "blocks.11.mlp.fc1.weight decoder.block.0.layer.2.DenseReluDense.wo.weight",
    "norm": "transformer.h.3.ln_1.weight model.layers.10.self_attn.k_norm.weight "
    "bert.embeddings.LayerNorm.weight vit.encoder.layer.0.layernorm_before.weight",
    "other": "model.layers.0.self_attn.rotary_emb.inv_freq 0.weight",
    "head": "lm_head.weight output.weight cls.predictions.transform.dense.weight head.weight",
}
"""Names of GPT-2, Llama, BERT, ViT, timm, T5 and PyTorch's Transformer."""


@pytest.mark.parametrize("kind", KINDS_OF)
def test_kinds_by_common_names(kind: str) -> None:
    assert kind in KINDS
    assert {kind_of(name) for name in KINDS_OF[kind].split()} == {kind}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_left_out(bad: float) -> None:
    """NaN and infinity of either side are counted for it, and the rest gives the numbers that the
    finite pairs give alone."""
    a, b = normal(50, seed=4), normal(50, seed=5)
    clean = measured(a[3:], b[3:])
    a[0] = a[1] = b[1] = b[2] = bad
    found = measured(a, b)
    assert (found["nonfinite_of"], found["nonfinite_against"], found["elements"]) == (2, 2, 50)
    same = ("max_abs", "mean_abs", "rel", "w1", "equal")
    assert {k: found[k] for k in same} == {k: clean[k] for k in same}
