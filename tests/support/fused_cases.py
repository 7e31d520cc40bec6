"""In Triton's interpreter, on the CPU: the fused fp64 reference against the blocked one,
and the kernel of row sums against PyTorch.

    TRITON_INTERPRET=1 python -m pytest tests/support/fused_cases.py

A process of its own, since triton reads that variable when it is imported;
`test_triton.py` starts it. Tiles are small, so that there are several; tanh, which the
interpreter lacks, is numpy's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fused_bounds import BACKWARD, FORWARD, bounds, shares
from interpreted import multiply_bfloat16, prepare
from oracles import FEATURES, heads_behind_rows, step
from test_deviation import yardstick
from triton.runtime.interpreter import TensorHandle

from numdev.cases import AttentionCase, empty_rows
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference import fused_triton as fused_tiles
from numdev.kernels.reference.fused_triton import exp2
from numdev.metrics import row_sums, row_sums_triton

prepare()
multiply_bfloat16()
pytestmark = pytest.mark.filterwarnings("ignore")  # numpy's, of log(0) and -inf - -inf
SINGLE, HALF = torch.float32, torch.float16
SMALL = fused.Tile(32, 32, 1, 1)
SHAPE = {"heads": 2, "q_len": 40, "kv_len": 50, "head_dim": 12, "v_dim": 9}
ENDLESS = 2**31 - 1


class Libdevice:
    """What stands for Triton's library here."""

    @staticmethod
    def tanh(x: Any) -> Any:
        handle = TensorHandle(np.tanh(x.handle.data), x.handle.dtype)
        return tl.core.tensor(handle, x.type)


# --- the cases ------------------------------------------------------------------------


def large(dtype: torch.dtype = SINGLE, **changes: Any) -> AttentionCase:
    """A case of several tiles, none of them whole."""
    return step(**{**SHAPE, "dtype": dtype, **changes})


def shown(*shape: int) -> torch.Tensor:
    """A bool mask in which two rows see nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 7, :] = mask[..., 23, :] = False
    return mask


def lowest() -> torch.Tensor:
    """[2, 40, 50]: numbers, the lowest one and -inf here and there, and all along some
    rows."""
    mask = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(2))
    mask[:, :, ::7], mask[:, 5:, 20:30] = torch.finfo(SINGLE).min, -math.inf
    mask[0, 11], mask[1, 17] = torch.finfo(SINGLE).min, -math.inf
    return mask


def laid_out_otherwise() -> AttentionCase:
    """Such views, and a transposed mask, that require gradients."""
    created = large(batch=2, heads=4, kv_heads=2, sinks=True, mask=("float", "1hqk"))
    created = dataclasses.replace(
        heads_behind_rows(created), mask=created.mask.mT.contiguous().mT
    )
    for x in (
        created.q,
        created.k,
        created.v,
        created.grad_out,
        created.mask,
        created.sinks,
    ):
        x.requires_grad_()
    return created


def in_eight_bits() -> AttentionCase:
    created = large()
    narrow = {
        x: getattr(created, x).to(torch.float8_e4m3fn)
        for x in ("q", "k", "v", "grad_out")
    }
    return dataclasses.replace(created, **narrow)


def some_rows(**changes: Any) -> AttentionCase:
    """Rows of a longer call, each at its own position."""
    rows = torch.tensor(
        [0, 1, 5, 6, 7, 18, 19, 30, 31, 32, 33, 50, 51, 52, 53, 57, 58, 59, 66]
    )
    return large(q_len=67, kv_len=70, **changes).restrict(rows=rows)


def of_mask(mask: torch.Tensor, **changes: Any) -> AttentionCase:
    return large(mask=mask, **changes)


def far_cases() -> Iterator[tuple[str, AttentionCase]]:
    """Who sees whom by position."""
    yield "causal", large(is_causal=True)
    yield "causal, bottom-right", large(is_causal=True, causal_offset=10)
    yield "causal, rows without keys", large(is_causal=True, causal_offset=-18)
    yield "causal, nothing seen", large(is_causal=True, causal_offset=-ENDLESS)
    yield "window", large(window=(9, 3), causal_offset=4)
    yield "window, not of itself", large(window=(-3, 9))
    yield (
        "window, far and back",
        large(window=(10**12 + 9, -(10**12)), causal_offset=10**12),
    )
    yield "causal window", large(q_len=70, kv_len=70, is_causal=True, window=(20, 8))
    yield "positions, causal", some_rows(is_causal=True, causal_offset=3)
    yield "positions, window", some_rows(window=(9, 4), causal_offset=-2)


def masked_cases() -> Iterator[tuple[str, AttentionCase]]:
    """Masks of every rank and layout, sinks, and rows that see nothing."""
    yield "bool mask per head", of_mask(shown(1, 2, 40, 50), is_causal=True)
    yield "bool mask per key of a head", large(mask=("bool", "1h1k"))
    yield (
        "bool mask, expanded",
        of_mask(shown(1, 1, 40, 50).expand(2, 2, 40, 50), batch=2),
    )
    yield "additive mask", of_mask(lowest())
    yield (
        "additive mask, nothing seen",
        large(mask=torch.full((50,), torch.finfo(SINGLE).min)),
    )
    yield "additive mask, far", of_mask(700 * torch.randn(1, 2, 40, 50), logits=40.0)
    yield "additive mask, lowered rows", of_mask(-1e9 * (~shown(40, 50)).float())
    yield "sinks, everything", large(sinks=torch.tensor([1e9, 88.0]), logits=9.0)
    yield "sinks, empty rows", of_mask(shown(2, 1, 40, 50), batch=2, sinks=True)
    yield "sinks, empty rows, online", of_mask(lowest(), sinks=torch.tensor([-40.0, 3.0]))


def shaped_cases() -> Iterator[tuple[str, AttentionCase]]:
    """Shapes, sizes of scores, and formats."""
    yield "float16", large(HALF, is_causal=True)
    yield "bfloat16", large(torch.bfloat16, is_causal=True)
    yield "float8", in_eight_bits()
    yield "two halves of v, online", large(v_dim=128, logits=300.0, sinks=True)
    yield "grouped", large(batch=2, heads=4, kv_heads=2, q_len=33, is_causal=True)
    yield "one kv head", large(heads=3, kv_heads=1, q_len=19, window=(5, None))
    yield "whole tiles", large(q_len=32, kv_len=48, head_dim=16, v_dim=16)
    yield "wide", large(head_dim=40, v_dim=70, q_len=17, kv_len=18)
    yield "online", large(logits=300.0)
    yield "huge scores", large(logits=1e7)
    yield "soft cap", large(softcap=2.0, logits=5.0, is_causal=True)
    yield "soft cap, saturated", large(softcap=30.0, logits=5000.0)
    yield "another layout", laid_out_otherwise()


LARGE = {**dict(far_cases()), **dict(masked_cases()), **dict(shaped_cases())}
CASES = {
    **{name: step(**fields, dtype=SINGLE) for name, fields in FEATURES.items()},
    **{f"large: {name}": case_fields for name, case_fields in LARGE.items()},
}


# --- in the interpreter ---------------------------------------------------------------


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "refuse_unfit", lambda case: None)
    monkeypatch.setattr(fused_tiles, "libdevice", Libdevice)
    monkeypatch.setattr(fused, "FORWARD", {256: SMALL})
    monkeypatch.setattr(fused, "BACKWARD", SMALL)


def planted(case: AttentionCase) -> Iterator[AttentionCase]:
    """What a path that is nearly right would compute."""
    for scale in (case.scale * (1 + 1e-9), float(np.float32(case.scale))):
        if scale != case.scale:
            yield dataclasses.replace(case, scale=scale)
    if case.is_causal and abs(case.causal_offset) < 30:
        yield dataclasses.replace(case, causal_offset=case.causal_offset + 1)


USUAL = {
    f"large: {x}" for x in ("causal", "window", "grouped", "additive mask", "float16")
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(8)
def test_both_paths_agree(name: str) -> None:
    """Every tensor is the blocked path's to within its bound, and empty rows are the
    same; a scale off by 1e-9 or rounded to fp32, or one key more, is beyond a bound, in
    USUAL cases far."""
    case = CASES[name]
    exact, result = blocked.gradients(case), fused.gradients(case)
    limits = bounds(case, exact)
    off = shares(case, result, exact, limits)
    assert result.by == "fused"
    assert set(off) == {*FORWARD, *BACKWARD, "empty", "unseen"}
    assert max(off.values()) <= 1.0, off
    assert not result.out[exact.empty].any()
    for wrong in () if exact.empty.all() else planted(case):
        off = shares(case, blocked.gradients(wrong), exact, limits)
        assert max(off.values()) > 1.0, wrong.scale
        if name in USUAL:
            assert min(off[x] for x in ("out", "lse", "dq", "dk", "dv")) > 100.0, off


def test_both_ways_to_a_softmax_are_taken() -> None:
    """Some cases are bounded and subtract no maximum, others go online; some rows have no
    keys."""
    met = [
        (fused._Operands.of(x).has_bounded_scores(x), bool(empty_rows(x).any()))
        for x in CASES.values()
    ]
    for bounded in (True, False):
        assert sum(way == bounded for way, _ in met) > 10
        assert (bounded, True) in met


PARTED = ("grouped", "one kv head", "positions, causal", "additive mask", "bool mask per head",
          "sinks, empty rows", "causal, rows without keys", "another layout")  # fmt: skip


@pytest.mark.parametrize("name", PARTED)
@pytest.mark.one_in(4)
def test_divided_keys_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are merged; a sink counts once, and a row may see nothing in a part or in
    any."""
    monkeypatch.setattr(fused, "PROGRAMS", 1 << 20)
    monkeypatch.setattr(fused, "LEAST_BLOCKS", 1)
    case = LARGE[name]
    assert (
        fused._keys_per_program(case, SMALL, case.q.shape[0] * case.heads) < case.kv_len
    )
    exact, result = blocked.gradients(case), fused.attend(case)
    off = shares(case, result, exact, bounds(case, exact))
    assert max(off.values()) <= 1.0, off


@triton.jit
def powers(X, Y, SIZE: tl.constexpr, SMALL_ONES: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(Y + at, exp2(tl.load(X + at), SMALL_ONES))


def power(x: torch.Tensor, small: bool) -> torch.Tensor:
    y = torch.empty_like(x)
    powers[(len(x) // 1024,)](x, y, 1024, small)
    return y


@pytest.mark.parametrize("small", [False, True])
def test_exp2_is_as_good_as_it_says(small: bool) -> None:
    """To a relative 2^-52 from -1021 to 1021; exact at whole numbers, and 0 below
    that."""
    created = torch.Generator().manual_seed(3)
    wide = (torch.rand(4096, generator=created, dtype=torch.float64) - 0.5) * 2042
    whole = torch.arange(-1021, 1022, dtype=torch.float64).repeat(2)[:2048]
    noise = torch.randn(1536, generator=created, dtype=torch.float64) * 2.0**-10
    beside = whole[:1536] + 0.5 * (1 + noise)
    tiny = torch.logspace(-300, 0, 512, dtype=torch.float64) * (-1) ** torch.arange(512)
    x = torch.cat([wide, whole, beside.clamp(-1021, 1021), tiny])
    with mpmath.workdps(40):
        pairs = zip(
            *(map(mpmath.mpf, z.tolist()) for z in (x, power(x, small))), strict=True
        )
        assert 1.0 < max(abs(b / mpmath.power(2, a) - 1) for a, b in pairs) * 2**53 < 2.0
    edges = torch.zeros(1024, dtype=torch.float64)
    edges[:6] = torch.tensor([-1021.0, 1021.0, 0.0, -math.inf, -1e300, -1021.5])
    values = power(edges, small)[:6].tolist()
    assert values[:3] == [2.0**-1021, 2.0**1021, 1.0]
    assert small or values[3:] == [0.0, 0.0, 0.0]


SHAPES = [(1, 1, 1, 1), (2, 3, 37, 9), (1, 2, 130, 64), (1, 1, 5, 80), (3, 1, 17, 128)]


@pytest.mark.parametrize("dtype", [torch.float64, SINGLE, HALF])  # bfloat16 is wrong here
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.one_in(4)
def test_row_sums_are_pytorchs(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Maxima are equal, sums of up to 10^6 fp64 numbers those of another order."""
    created = dataclasses.replace(
        yardstick("float16", shape, empty=False), unrounded=None
    )
    for expects, baseline in ((True, created.baseline), (False, None)):
        y = dataclasses.replace(created, baseline=baseline, baseline_fp32=None)
        o = (y.reference * 1.001).to(dtype)
        e = (y.reference * 0.999).float() if expects else None
        beside = None if baseline is None else y.usable
        steps = row_sums.element_sums(o, e, y, y.usable, beside, y.usable)
        result = vars(row_sums_triton.element_sums(o, e, y))
        for name, x in vars(steps).items():
            assert (x is None) == (result[name] is None), name
            if x is not None:
                most = 0.0 if name in ("max_abs", "max_ulp", "from_floor") else 1e-12
                assert (x - result[name]).abs().max() <= most * x.abs().max(), name
