"""Runs the fused fp64 reference in Triton's interpreter, on the CPU, and prints as JSON how far it
is from the blocked one, in shares of the bounds that `fused_bounds` derives.

    TRITON_INTERPRET=1 python tests/fused_cases.py

`test_fused.py` starts it once and asserts. The path is asked for where it would decline, on a CPU;
tiles are small, so that there are several, and tanh, which the interpreter lacks, is numpy's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import torch
import triton
import triton.language as tl
from fused_bounds import bounds, shares
from interpreted import multiply_bfloat16, prepare
from oracles import FEATURES, step
from triton.runtime.interpreter import TensorHandle

from numdev.cases import AttentionCase
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference import fused_triton as fused_tiles
from numdev.kernels.reference.fused_triton import exp2

SINGLE, HALF = torch.float32, torch.float16
SMALL = fused.Tile(32, 32, 1, 1)
LARGE = {"heads": 2, "q_len": 40, "kv_len": 50, "head_dim": 12, "v_dim": 9}
ENDLESS = 2**31 - 1


class Libdevice:
    """What stands for Triton's library here."""

    @staticmethod
    def tanh(x: Any) -> Any:
        handle = TensorHandle(np.tanh(x.handle.data), x.handle.dtype)
        return tl.core.tensor(handle, x.type)


# --- the cases -----------------------------------------------------------------------------------


def large(dtype: torch.dtype = SINGLE, **changes: Any) -> AttentionCase:
    """A case of several tiles, none of them whole."""
    return step(**{**LARGE, "dtype": dtype, **changes})


def shown(*shape: int) -> torch.Tensor:
    """A bool mask in which two rows see nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 7, :] = mask[..., 23, :] = False
    return mask


def lowest() -> torch.Tensor:
    """[2, 40, 50]: numbers, the lowest one and -inf here and there, and all along some rows."""
    mask = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(2))
    mask[:, :, ::7], mask[:, 5:, 20:30] = torch.finfo(SINGLE).min, -math.inf
    mask[0, 11], mask[1, 17] = torch.finfo(SINGLE).min, -math.inf
    return mask


def laid_out_otherwise() -> AttentionCase:
    """Views whose heads lie behind their rows, as models make them, that require gradients."""
    made = large(batch=2, heads=4, kv_heads=2, sinks=True, mask=("float", "1hqk"))
    names = ("q", "k", "v", "grad_out")
    views = {x: getattr(made, x).transpose(1, 2).contiguous().transpose(1, 2) for x in names}
    mask = made.mask.mT.contiguous().mT.requires_grad_()
    q, k, v, dO = (x.requires_grad_() for x in views.values())
    sinks = made.sinks.requires_grad_()
    return dataclasses.replace(made, q=q, k=k, v=v, grad_out=dO, mask=mask, sinks=sinks)


def in_eight_bits() -> AttentionCase:
    made = large()
    narrow = {x: getattr(made, x).to(torch.float8_e4m3fn) for x in ("q", "k", "v", "grad_out")}
    return dataclasses.replace(made, **narrow)


def some_rows(**changes: Any) -> AttentionCase:
    """Rows of a longer call, each at its own position."""
    rows = torch.tensor([0, 1, 5, 6, 7, 18, 19, 30, 31, 32, 33, 50, 51, 52, 53, 57, 58, 59, 66])
    return large(q_len=67, kv_len=70, **changes).select_rows(rows)


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
    yield "window, far and back", large(window=(10**12 + 9, -(10**12)), causal_offset=10**12)
    yield "causal window", large(q_len=70, kv_len=70, is_causal=True, window=(20, 8))
    yield "positions, causal", some_rows(is_causal=True, causal_offset=3)
    yield "positions, window", some_rows(window=(9, 4), causal_offset=-2)


def masked_cases() -> Iterator[tuple[str, AttentionCase]]:
    """Masks of every rank and layout, sinks, and rows that see nothing."""
    yield "bool mask per head", of_mask(shown(1, 2, 40, 50), is_causal=True)
    yield "bool mask per key of a head", large(mask=("bool", "1h1k"))
    yield "bool mask, expanded", of_mask(shown(1, 1, 40, 50).expand(2, 2, 40, 50), batch=2)
    yield "additive mask", of_mask(lowest())
    yield "additive mask, nothing seen", large(mask=torch.full((50,), torch.finfo(SINGLE).min))
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


def every_case() -> Iterator[tuple[str, AttentionCase]]:
    for dtype in (SINGLE, HALF):
        for name, fields in FEATURES.items():
            yield f"{name}, {dtype}", step(**fields, dtype=dtype)
    for name, made in large_cases():
        yield f"large: {name}", made


def large_cases() -> Iterator[tuple[str, AttentionCase]]:
    yield from far_cases()
    yield from masked_cases()
    yield from shaped_cases()


# --- what is printed -----------------------------------------------------------------------------


def accuracy() -> Iterator[dict[str, Any]]:
    """Shares of the bounds for every case, and those of planted mistakes."""
    for name, made in every_case():
        exact = blocked.gradients(made)
        limits = bounds(made, exact)
        found = fused.gradients(made)
        yield {
            "case": name,
            "shares": shares(made, found, exact, limits),
            "bounded": fused._Operands.of(made).bounded(made),
            "empty": int(exact.empty.sum()),
            "in empty rows": float(found.out[exact.empty].abs().sum()),
            "by": found.by,
            "planted": {
                mistake: shares(made, blocked.gradients(wrong), exact, limits)
                for mistake, wrong in planted(made)
            },
        }


def planted(case: AttentionCase) -> Iterator[tuple[str, AttentionCase]]:
    """What a path that is nearly right would compute."""
    for name, scale in (
        ("scale", case.scale * (1 + 1e-9)),
        ("scale in fp32", float(np.float32(case.scale))),
    ):
        if scale != case.scale:
            yield name, dataclasses.replace(case, scale=scale)
    if case.is_causal and abs(case.causal_offset) < 30:
        yield "one key more", dataclasses.replace(case, causal_offset=case.causal_offset + 1)


PARTED = ("grouped", "one kv head", "positions, causal", "additive mask", "bool mask per head",
          "sinks, empty rows", "causal, rows without keys", "another layout")  # fmt: skip


def divided() -> Iterator[dict[str, Any]]:
    """Shares of the forward pass where every program takes one block of keys."""
    named, before = dict(large_cases()), (fused.PROGRAMS, fused.LEAST_BLOCKS)
    fused.PROGRAMS, fused.LEAST_BLOCKS = 1 << 20, 1
    for name in PARTED:
        made = named[name]
        exact, found = blocked.gradients(made), fused.attend(made)
        yield {
            "case": name,
            "parts": -(-made.kv_len // fused._span(made, SMALL, made.q.shape[0] * made.heads)),
            "shares": shares(made, found, exact, bounds(made, exact)),
        }
    fused.PROGRAMS, fused.LEAST_BLOCKS = before


@triton.jit
def powers(X, Y, SIZE: tl.constexpr, SMALL_ONES: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(Y + at, exp2(tl.load(X + at), SMALL_ONES))


def arguments() -> torch.Tensor:
    """Over all the range, near whole numbers and halves, and tiny: 8192 of them."""
    made = torch.Generator().manual_seed(3)
    wide = (torch.rand(4096, generator=made, dtype=torch.float64) - 0.5) * 2042
    whole = torch.arange(-1021, 1022, dtype=torch.float64).repeat(2)[:2048]
    noise = torch.randn(1536, generator=made, dtype=torch.float64) * 2.0**-10
    beside = whole[:1536] + 0.5 * (1 + noise)
    tiny = torch.logspace(-300, 0, 512, dtype=torch.float64) * (-1) ** torch.arange(512)
    return torch.cat([wide, whole, beside.clamp(-1021, 1021), tiny])


def exponentials() -> Iterator[dict[str, Any]]:
    """The largest relative error of exp2 in units of 2^-53, beside mpmath, and some values."""
    for small in (False, True):
        x = arguments()
        y = torch.empty_like(x)
        powers[(len(x) // 1024,)](x, y, 1024, small)
        edges = torch.zeros(1024, dtype=torch.float64)
        edges[:6] = torch.tensor([-math.inf, -1e300, -1021.5, -1021.0, 1021.0, 0.0])
        values = torch.empty_like(edges)
        powers[(1,)](edges, values, 1024, small)
        yield {"small": small, "worst": worst(x, y), "values": values[:6].tolist()}


def worst(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest relative error of y as 2^x, over 2^-53."""
    with mpmath.workdps(40):
        pairs = zip(map(mpmath.mpf, x.tolist()), map(mpmath.mpf, y.tolist()), strict=True)
        return float(max(abs(b / mpmath.power(2, a) - 1) for a, b in pairs) * 2**53)


def main() -> None:
    prepare()
    multiply_bfloat16()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # numpy's, of log(0) and -inf - -inf, which are meant
    fused.accept = lambda case: None
    fused_tiles.libdevice = Libdevice
    fused.FORWARD, fused.BACKWARD = {256: SMALL}, SMALL
    parts = {f.__name__: list(f()) for f in (accuracy, divided, exponentials)}
    json.dump(parts, sys.stdout)


if __name__ == "__main__":
    main()
