"""The baseline: exact attention in float64, and in 16 bits what its rounding sites account for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import FEATURES, U32, assert_within, attention, error_bounds, make_case
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS
from numdev.kernels import find
from numdev.kernels.reference import attend


def baseline(case: AttentionCase) -> Tensor:
    output = find("baseline").attend(case)
    assert output.out.dtype == case.q.dtype
    assert output.lse is None
    return output.out


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_oracle(name: str, dtype: torch.dtype) -> None:
    """In float64 and float32 every feature is computed within the bounds of that format. Rows that
    see nothing are a convention (an additive mask of -inf gives NaN there, as model code does)."""
    case = make_case(dtype=dtype, **FEATURES[name])
    exact = attention(case)
    bound, _ = error_bounds(case, exact, *(() if dtype == torch.float64 else (U32,)))
    out = baseline(case)
    if case.mask is not None and case.mask.dtype != torch.bool:
        out = out.masked_fill(torch.tensor(exact.empty)[..., None], 0.0)
    assert_within(out, exact.out, bound)


REGIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"kv_heads": 2},
    "soft cap": {"softcap": 3.3, "logits": 4.0},
    "additive mask": {"mask": ("float", "bhqk")},
    "bool mask": {"mask": ("bool", "bhqk")},
    "sinks": {"sinks": True},
    "wide logits": {"logits": 8.0},
}


def left_over(fmt: str, regime: str, **sites: str) -> float:
    """What the preset `eager` leaves of the baseline's error, in rms."""
    fields = {"heads": 4, "q_len": 96, "kv_len": 96, "head_dim": 48, **REGIMES[regime]}
    case = make_case(dtype=torch.float32, **fields).rounded_to(FORMATS[fmt])
    real, emulated = baseline(case), find("emulated").attend(case, preset="eager", **sites).out
    error = (real.double() - attend(case).out).norm()
    return float((real.double() - emulated.double()).norm() / error)


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_its_rounding_sites_account_for_its_error(fmt: str, regime: str) -> None:
    """The emulation explains the baseline's error: what it leaves over comes from float32 sums,
    which differ by 2^-24 of their terms and so turn few roundings; a tenth of the error is
    generous (a site left out leaves a third or more, see below). Of wide logits in float16, where a
    processor multiplies in it (AVX-512 FP16), one score in 1500 turns, and is large: 0.20."""
    assert left_over(fmt, regime) < (0.25 if (fmt, regime) == ("float16", "wide logits") else 0.1)


@pytest.mark.parametrize(
    ("site", "regime"),
    [
        ("scores", "causal"),
        ("scaled", "causal"),
        ("p", "causal"),
        ("out", "causal"),
        ("softcap", "soft cap"),
        ("bias", "additive mask"),
    ],
)
def test_every_site_is_seen(site: str, regime: str) -> None:
    """Without any one of its sites the emulation does not explain the error any more."""
    assert left_over("bfloat16", regime, **{site: "exact"}) > 0.3
