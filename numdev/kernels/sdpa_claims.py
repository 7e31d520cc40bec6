"""How PyTorch's fused operators are known to round: the emulation each claims to be.

A claim is of both passes. What none of the operators on CUDA needs to say, since it is so in `fa2`:
P and dS in the working format for their products, delta from the O that was returned, gradients
summed in fp32 and cast once. With grouped heads FlashAttention-2 and cuDNN write dK and dV of every
query head in the working format before the group is summed (`dk_partial`, `dv_partial`), which is
so in `fa2` too; the efficient backend takes no grouped heads.

Tiles and orders are those of the operators' sources, and the errors of the emulation agree with the
operators' own element by element (docs/log.md has the residuals). Where a later version divides its
work another way, the size of its errors hardly changes and the residual shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numdev.cases import AttentionCase
from numdev.kernels import Output
from numdev.system import System

FAST_EXP = {"AVX2": 8, "AVX512": 16}
"""Instruction sets under which PyTorch's CPU kernel uses its fast exp, and how many keys it takes
at once: those left over in a tile get the exact one."""
IN_WORKING = {"dq": "working", "dk": "working", "dv": "working"}
Claim = Mapping[str, Any]


def claims(case: AttentionCase, output: Output, system: System) -> Claim:
    """What the operator that ran computes like, with the backward pass that belongs to it."""
    known = {
        "math": _math,
        "_scaled_dot_product_flash_attention_for_cpu": _flash_on_cpu,
        "_scaled_dot_product_flash_attention": flash_attention_2,
        "_scaled_dot_product_efficient_attention": efficient_attention,
        "_scaled_dot_product_cudnn_attention": _cudnn,
    }
    return known.get(output.ran or "", _fused)(case, system)


def _math(case: AttentionCase, system: System) -> Claim:
    """16-bit inputs are computed with in fp32, a group's sums included."""
    casts = ("out", "dq_out", "dk_out", "dv_out")
    return {"preset": "exact", **dict.fromkeys(casts, "working")}


def _fused(case: AttentionCase, system: System) -> Claim:
    return {"preset": "fa2"}


def _flash_on_cpu(case: AttentionCase, system: System) -> Claim:
    """Its backward adds every tile to the gradients in the working format, in the tiles of forward,
    and goes on from one query head of a group to the next. There exp is the exact one."""
    lanes = max((n for name, n in FAST_EXP.items() if name in system.cpu_capability), default=0)
    return {
        "preset": "fa2",
        **IN_WORKING,
        **({"group_sum": "running"} if case.group > 1 else {}),
        "block_q": 256 if case.q_len >= 768 else 64 if case.q_len >= 192 else 32,
        "block_kv": 512,
        "exponential": "fexp_u20" if 0 < lanes <= case.kv_len else "exact",
    }


def efficient_attention(case: AttentionCase, system: System) -> Claim:
    """Its backward keeps P in the working format for both products, and scales dS before it is
    rounded."""
    tile = 64 if case.v.shape[-1] <= 64 else 128
    return {"preset": "fa2", "block_kv": tile, "p_for_ds": "working", "ds_scale": "before"}


def _cudnn(case: AttentionCase, system: System) -> Claim:
    """It scales dS before it is rounded."""
    return {"preset": "fa2", "block_kv": 128, "ds_scale": "before"}


def flash_attention_2(case: AttentionCase, system: System) -> Claim:
    """FlashAttention-2, which begins with the last tile. A call too small to fill the GPU divides
    its keys, and then its tiles are larger."""
    d = case.q.shape[-1]
    wide = 256 if d <= 64 else 128 if d <= 128 else 64
    splits = _splits(case, wide, system.processors or 1)
    tile = wide if splits > 1 else 128 if d <= 64 else 64
    return {"preset": "fa2", "block_kv": tile, "kv_order": "descending", "splits": splits}


def _splits(case: AttentionCase, tile: int, processors: int) -> int:
    """FlashAttention-2's `num_splits_heuristic`: the fewest parts of the keys that use the GPU at
    least 85 % as well as the best number, if whole heads in blocks of 64 rows leave 20 % idle."""
    work = case.q.shape[0] * case.heads * -(-case.q_len // 64)
    if case.q_len == 1 and case.window is None:  # the query heads of a group become its rows
        work = case.q.shape[0] * case.kv_heads * -(-case.group // 64)
    slots, tiles = 2 * processors, -(-case.kv_len // tile)
    if work >= 0.8 * slots:
        return 1

    def used(parts: int) -> float:
        again = parts > 1 and -(-tiles // parts) == -(-tiles // (parts - 1))
        waves = work * parts / slots
        return 0.0 if again else waves / -(-work * parts // slots)

    candidates = range(1, min(128, slots, tiles) + 1)
    best = max(used(parts) for parts in candidates)
    return next(parts for parts in candidates if used(parts) >= 0.85 * best)
