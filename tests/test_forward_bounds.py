"""The audit's forward bounds: a kernel's distance from the baseline, beside the baseline's own
change from float32 to the format, and on to the next lower format.

The oracle is numpy and scipy on plain attention written out again.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from on_bench import prepare
from oracles import make_case
from test_deviation import changed, output_for, yardstick
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, format_named, next_lower, round_to
from numdev.metrics.deviation import measure

RATIOS = ("flash_vs_low_precision", "flash_vs_lower")
NEW = (*RATIOS, "low_precision_rms", "lower_rms")


def plain(case: AttentionCase, dtype: torch.dtype, fmt: str | None = None) -> Tensor:
    """Attention as eager code writes it, the products in `dtype`, of inputs rounded to `fmt`."""
    q, k, v = (
        (x if fmt is None else round_to(x.double(), FORMATS[fmt])).to(dtype)
        for x in (case.q, case.k, case.v)
    )
    s = q @ k.transpose(-1, -2) * case.scale
    if case.is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
    return torch.softmax(s, dim=-1, dtype=torch.float32).to(dtype) @ v


def drawn(**changes: Any) -> AttentionCase:
    case = make_case(batch=2, heads=2, q_len=12, kv_len=12, head_dim=8, is_causal=True)
    return dataclasses.replace(case, **changes)


def rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())


def test_the_next_lower_format() -> None:
    """A literal table; each has fewer significant bits."""
    table = {
        "float64": "float32",
        "float32": "bfloat16",
        "float16": "float8_e4m3fn",
        "bfloat16": "float8_e4m3fn",
        "float8_e5m2": None,
        "e8m10": None,
    }
    for name, lower in table.items():
        fmt = format_named(name)
        found = next_lower(fmt)
        assert (found and found.name) == lower
        assert found is None or found.precision < fmt.precision


def test_what_overflows_below_is_left_out_there_alone() -> None:
    """NaN of a lower format costs those elements in its own metrics, and changes no other."""
    y = yardstick(empty=False)
    low = y.reference + 0.1
    broken = low.clone()
    broken[0, 1, 2] = math.nan
    lower = FORMATS["float8_e4m3fn"]
    sound = changed(y, baseline_lower=low, lower=lower)
    output = output_for(y)
    found = measure(output, changed(y, baseline_lower=broken, lower=lower)).heads[1]
    usable = ~broken[:, 1].isnan()
    assert y.baseline is not None
    there = [x[:, 1][usable] for x in (broken, y.baseline)]
    assert found["lower_rms"] == pytest.approx(rms(*there), rel=1e-9)
    before = measure(output, sound).heads[1]
    assert all(found[k] == before[k] for k in before if k not in NEW and k != "nulls")
    nothing = changed(y, baseline_lower=torch.full_like(low, math.nan), lower=lower)
    lost = measure(output, nothing).heads[1]
    assert lost["lower_rms"] is None
    assert lost["nulls"]["lower_rms"] == "0/0"


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.half)])
def test_the_bench_runs_the_baseline_in_both(name: str, dtype: torch.dtype) -> None:
    """In float32 of the unrounded inputs; and in the format itself of inputs that were rounded,
    once and from the unrounded ones, to 8 bits."""
    case = drawn()
    y = prepare(case, name).yardsticks["out"]
    assert y.baseline_fp32 is not None
    assert y.baseline_lower is not None
    exact = plain(case, torch.float32)
    assert torch.allclose(y.baseline_fp32, exact, rtol=1e-5, atol=1e-6)
    low = plain(case, dtype, "float8_e4m3fn")
    assert y.baseline_lower.dtype == dtype
    assert torch.allclose(y.baseline_lower.double(), low.double(), rtol=0, atol=0)
    here = plain(case, dtype, name)
    assert not torch.allclose(here.double(), low.double(), rtol=0, atol=1e-3)


def test_float32_goes_down_to_bfloat16_and_up_to_nothing() -> None:
    """There is no wider format to come from; below it PyTorch computes, in bfloat16 itself."""
    case = drawn()
    y = prepare(case, "float32").yardsticks["out"]
    assert y.baseline_fp32 is None
    assert y.lower == FORMATS["bfloat16"]
    assert y.baseline_lower is not None
    low = plain(case, torch.bfloat16, "bfloat16")
    assert torch.equal(y.baseline_lower, low)
