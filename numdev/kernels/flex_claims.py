"""How FlexAttention is known to round: the emulation it claims to be.

On both devices the compiled kernel is FlashAttention-2's arithmetic: scores, maximum, sums and
output in fp32, P in the working format for its product with V, one cast at the end. Backward as
well, but that a group's dK and dV are summed before they are cast. Its exponential is to the base 2
on CUDA and good to 20 ulp on a CPU, which no format of 16 bits shows. With PRESCALE_QK what is
rounded first is Q times the scale and log2(e), for which no emulation stands: without the latter,
a scale that is a power of two would round nothing. Sources: the templates in
torch/_inductor/kernel/flex and torch/_inductor/codegen/cpp_flex_attention_template.py, and the
tiles in torch/_inductor/template_heuristics, of PyTorch 2.13.

With a block mask the blocks of 128 keys that the mask cuts come before those that it shows whole,
in an order of its own for every row; the emulation knows ascending order only, and what that makes
of a difference is seen in the residual, not in the size of the errors.

What ran is a sentence of `described`, and a claim reads it again: options that change the tiles or
the rounding are part of what ran.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from numdev.cases import AttentionCase
from numdev.kernels import Output
from numdev.system import System

SPARSE_BLOCK = 128
"""The keys of a block mask's block."""
SHORT = 128
"""With fewer queries CUDA runs the kernel for decoding, which splits the keys."""
DECODING_TILE = 64
PLAIN_TILE = 64
TILES: Mapping[tuple[int, bool], Mapping[int, int]] = {
    (8, True): {64: 64, 128: 64, 192: 32, 256: 64},
    (9, True): {64: 128, 128: 64, 256: 32},
    (10, True): {64: 128, 128: 64, 192: 128, 256: 32},
    (8, False): {64: 32, 128: 32, 256: 16},
    (9, False): {64: 32, 128: 64, 192: 64, 256: 32},
    (10, False): {64: 32, 128: 64, 192: 64, 256: 32},
}
"""Keys of a tile by head_dim, for (compute capability, 16-bit format); PLAIN_TILE for others."""
Claim = Mapping[str, Any] | None


def described(compiled: bool, device: str, options: Mapping[str, Any]) -> str:
    """What ran, for example `flex_attention, compiled for cuda, BLOCK_N=32`."""
    how = f"compiled for {device}" if compiled else "eager"
    return ", ".join(["flex_attention", how, *(f"{n}={x}" for n, x in options.items())])


def claims(case: AttentionCase, output: Output, system: System) -> Claim:
    """What the FlexAttention that ran computes like, in both passes."""
    ran = output.ran or ""
    if "eager" in ran:
        return _EAGER
    if "cuda" not in ran:
        return _on_cpu(case)
    if "PRESCALE_QK=True" in ran:
        return None
    if "BACKEND=FLASH" in ran:
        return {"preset": "fa2"}
    grouped = {"group_sum": "running"} if case.group > 1 else {}
    return {"preset": "fa2", **grouped, **_tiles(case, ran, system)}


_EAGER: Claim = {
    "preset": "eager",
    **dict.fromkeys(("scores", "scaled", "softcap", "bias"), "wide"),
}
"""Scores in fp32 from widened inputs, softmax in fp32, P rounded for a product in the working
format."""


def _on_cpu(case: AttentionCase) -> Claim:
    """Without a block mask all keys are one tile."""
    cut = case.restricts_positions or (case.mask is not None and case.mask.dtype == torch.bool)
    return {"preset": "fa2", "block_kv": SPARSE_BLOCK if cut else case.kv_len}


def _tiles(case: AttentionCase, ran: str, system: System) -> Mapping[str, int]:
    """The keys of a tile, and into how many parts they are split."""
    given = re.search(r"BLOCK_N=(\d+)", ran)
    if not _decodes(case, ran):
        return {"block_kv": int(given[1]) if given else _tile(case, system)}
    parts = (system.processors or 1) // (case.q.shape[0] * case.kv_heads) * 2
    return {"block_kv": int(given[1]) if given else DECODING_TILE, "splits": max(parts, 1)}


def _tile(case: AttentionCase, system: System) -> int:
    """What PyTorch takes without autotuning."""
    d = case.q.shape[-1]
    if d > 256:
        return 16 if case.q.dtype == torch.float32 else 32
    major = min((system.capability or (0, 0))[0], 10)
    sixteen = case.q.dtype != torch.float32
    return TILES.get((major, sixteen), {}).get(d, PLAIN_TILE)


def _decodes(case: AttentionCase, ran: str) -> bool:
    """Whether the kernel for decoding runs: few queries, and a group that is a power of two. A mask
    that differs by head must do so for every query head, and none may be grouped."""
    if "BACKEND=" in ran:
        return "BACKEND=TRITON_DECODE" in ran
    return case.q_len < SHORT and case.group & (case.group - 1) == 0 and not _grouped_mask(case)


def _grouped_mask(case: AttentionCase) -> bool:
    mask = case.mask
    if mask is None or mask.dtype != torch.bool or case.group == 1:
        return False
    return mask.ndim >= 3 and mask.shape[-3] > 1
