"""PyTorch's FlexAttention as a kernel: compiled, as its users run it, or eager.

Every shape is compiled for itself (seconds each), since a compiler that may generalise
gives a case another kernel according to the cases before it.

On both devices the compiled kernel rounds as FlashAttention-2, but that a group's dK and
dV are summed before they are cast; with PRESCALE_QK what is rounded first is Q times the
scale and log2(e), for which no emulation stands. Blocks of 128 keys that the mask cuts
come before those that it shows whole: the emulation's ascending order shows in the
residual, not in the size of errors. Sources, of PyTorch 2.13:
torch/_inductor/kernel/flex, torch/_inductor/template_heuristics and
torch/_inductor/codegen/cpp_flex_attention_template.py."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    flex_attention,
)

from numdev.cases import AttentionCase, key_limits
from numdev.errors import MeasurementError, UsageError
from numdev.kernels import Output, kernel, like_fa2
from numdev.kernels.output import refuse, why_not
from numdev.system import System

VALUES: Mapping[str, tuple[object, ...]] = {
    "compiled": (True, False),
    "block_n": (None, 16, 32, 64, 128),
    "prescale_qk": (None, True, False),
}
"""The options, their defaults first. All but the first are PyTorch's `kernel_options` of
the same names in capitals; None leaves PyTorch's own."""
SPARSE_BLOCK = 128  # the keys of a block mask's block
SHORT = 128  # with fewer queries CUDA runs the kernel for decoding, which splits the keys
DECODING_TILE = 64
TILES_16_BIT: Mapping[int, Mapping[int, int]] = {
    8: {64: 64, 128: 64, 192: 32, 256: 64},
    9: {64: 128, 128: 64, 256: 32},
    10: {64: 128, 128: 64, 192: 128, 256: 32},
}
"""Keys of a tile by head_dim, for a compute capability; 64 for others."""
TILES_32_BIT: Mapping[int, Mapping[int, int]] = {
    8: {64: 32, 128: 32, 256: 16},
    9: {64: 32, 128: 64, 192: 64, 256: 32},
    10: {64: 32, 128: 64, 192: 64, 256: 32},
}
"""The same of formats with more than 16 bits."""
LEAST_HEAD_DIM = 16  # of a matrix product in Triton
NO_LIMITS = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), 1_000_000)
Modification = Callable[..., Tensor]


def _check(options: Mapping[str, object]) -> None:
    """Raises UsageError where `compiled` is False and any other option is not None: those
    are of the compiled kernel, and eager mode ignores them."""
    asked = [n.upper() for n, x in options.items() if n != "compiled" and x is not None]
    if not options["compiled"] and asked:
        raise UsageError(f"eager FlexAttention ignores {', '.join(asked)}")


def _claims(
    case: AttentionCase, output: Output, system: System
) -> Mapping[str, object] | None:
    """Returns how the FlexAttention that ran rounds, in both passes, as options of
    `emulated`. None where `output.did` has PRESCALE_QK on CUDA, which no emulation
    covers. `output`: of `flex`, whose `did` has `compiled`, `device` and the options that
    were set."""
    did, d = output.did or {}, case.q.shape[-1]
    # Scores in fp32 from widened inputs, P rounded for its product
    if not did["compiled"]:
        return {
            "preset": "eager",
            **dict.fromkeys(("scores", "scaled", "softcap", "bias"), "wide"),
        }
    if did["device"] != "cuda":  # without a block mask all keys are one tile
        cut = (
            case.restricts_positions or _four_axes(case.mask, bool_mask=True) is not None
        )
        return {"preset": "fa2", "block_kv": SPARSE_BLOCK if cut else case.kv_len}
    if did.get("PRESCALE_QK"):
        return None
    claim = like_fa2(case, output, system)
    if _runs_decoding_kernel(case):
        parts = (system.processors or 1) // (case.q.shape[0] * case.kv_heads) * 2
        return {
            **claim,
            "block_kv": did.get("BLOCK_N", DECODING_TILE),
            "splits": max(parts, 1),
        }
    sixteen, major = (
        case.q.dtype != torch.float32,
        min((system.capability or (0, 0))[0], 10),
    )
    tiles = TILES_16_BIT if sixteen else TILES_32_BIT
    tile = tiles.get(major, {}).get(d, 64)
    if d > 256:
        tile = 32 if sixteen else 16
    return {**claim, "block_kv": did.get("BLOCK_N", tile)}


def _runs_decoding_kernel(case: AttentionCase) -> bool:
    """Whether CUDA runs FlexAttention's kernel for decoding: fewer than 128 queries, and
    a power of two of query heads to a kv head. It does not where a bool mask differs by
    head and several query heads share a kv head."""
    mask = _four_axes(case.mask, bool_mask=True)
    by_head = mask is not None and mask.shape[1] > 1 and case.group > 1
    return case.q_len < SHORT and case.group & (case.group - 1) == 0 and not by_head


@kernel(
    "flex",
    options={name: values[0] for name, values in VALUES.items()},
    values=VALUES,
    supports=lambda case: why_not(
        (case.sinks is not None, "FlexAttention has no attention sinks")
    ),
    validate=_check,
    claims=_claims,
)
def flex(case: AttentionCase, *, compiled: bool, **options: object) -> Output:
    """PyTorch's FlexAttention, compiled into one kernel.

    `compiled` False runs it eagerly. The other options, `block_n` and `prescale_qk`, are
    PyTorch's `kernel_options`; None leaves PyTorch's choice. Returns out, and lse except
    from the compiled CPU kernel; `did` has `compiled`, `device` and the options that were
    set. Raises Refused for gradients or `kernel_options` on a CPU, and compiled for
    float64 and on CUDA for heads below LEAST_HEAD_DIM. Raises MeasurementError where it
    ran eagerly and should not. What PyTorch raises passes."""
    asked = {name.upper(): x for name, x in options.items() if x is not None}
    device, on_cuda = case.q.device.type, case.q.is_cuda
    float64 = compiled and case.q.dtype == torch.float64
    narrow = (
        min(case.q.shape[-1], case.v.shape[-1]) < LEAST_HEAD_DIM and compiled and on_cuda
    )
    refuse(
        (case.q.requires_grad and not on_cuda, "FlexAttention has no backward on a CPU"),
        (float64, "compiled FlexAttention takes float16, bfloat16 and float32"),
        (
            narrow,
            f"compiled FlexAttention takes head dimensions from {LEAST_HEAD_DIM} on",
        ),
        (
            asked and not on_cuda,
            f"{', '.join(asked)}: options of FlexAttention's kernel for CUDA",
        ),
    )
    from torch._dynamo import config

    with config.patch(NO_LIMITS), warnings.catch_warnings():
        # Said once a process where it is eager, which `ran` says of every call.
        warnings.filterwarnings(
            "ignore", message="flex_attention called without torch.compile"
        )
        out, lse, was_compiled = (_compiled() if compiled else _run_flex)(
            *(case.q, case.k, case.v),
            with_lse=device == "cuda" or not compiled,  # the C++ kernel has none to give
            score_mod=_score_mod(case),
            block_mask=_block_mask(case),
            scale=case.scale,
            enable_gqa=case.group > 1,
            kernel_options=asked or None,
        )
    if compiled and not was_compiled:
        raise MeasurementError(
            "flex_attention ran eagerly: is torch.compile switched off?"
        )
    how = f"compiled for {device}" if compiled else "eager"
    ran = ", ".join(["flex_attention", how, *(f"{n}={x}" for n, x in asked.items())])
    did = {"compiled": compiled, "device": device, **asked}
    return Output(out=out, lse=lse, ran=ran, did=did)


def _run_flex(
    *qkv: Tensor, with_lse: bool, **arguments: object
) -> tuple[Tensor, Tensor | None, bool]:
    """Runs FlexAttention on q, k and v with these `arguments` of `flex_attention`.
    Returns the output, the log-sum-exp (None without `with_lse`), and whether this call
    was compiled: a constant that the compiler sets."""
    attend: Callable[..., Any] = flex_attention
    compiled = torch.compiler.is_dynamo_compiling()
    if not with_lse:
        return attend(*qkv, **arguments), None, compiled
    out, more = attend(*qkv, return_aux=AuxRequest(lse=True), **arguments)
    return out, more.lse, compiled


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None, bool]]:
    """Returns `_run_flex` compiled, the same function in every call of a process, which
    keeps one kernel for each shape it meets."""
    return torch.compile(_run_flex, fullgraph=True, dynamic=False)


def _score_mod(case: AttentionCase) -> Modification | None:
    """Returns FlexAttention's `score_mod` for the soft cap and then the additive mask;
    None where the case has neither."""
    cap, bias = case.softcap, _four_axes(case.mask, bool_mask=False)
    if cap is None and bias is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Returns the score of query i and key j, soft-capped and with the additive
        mask."""
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + _mask_entry(bias, b, h, i, j)

    return changed


def _block_mask(case: AttentionCase) -> object:
    """Returns FlexAttention's block mask from causality, window and bool mask, for as
    many batch entries and heads as the mask has; None where the case has none of the
    three."""
    mask, (low, high) = _four_axes(case.mask, bool_mask=True), key_limits(case)
    if mask is None and not case.restricts_positions:
        return None

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query i may attend to key j."""
        shown = j >= 0
        if low is not None:
            shown = shown & (j >= i + low)
        if high is not None:
            shown = shown & (j <= i + high)
        return shown if mask is None else shown & _mask_entry(mask, b, h, i, j)

    batches, heads = (None, None) if mask is None else mask.shape[:2]
    n, m, device = case.q_len, case.kv_len, case.q.device.type
    return create_block_mask(seen, batches, heads, n, m, device=device)


def _four_axes(mask: Tensor | None, *, bool_mask: bool) -> Tensor | None:
    """Returns a view of the mask with four axes, missing ones of length 1, if it is of
    this kind (bool or additive); None for the other kind or no mask."""
    if mask is None or (mask.dtype == torch.bool) != bool_mask:
        return None
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _mask_entry(mask: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Returns the mask's entry for batch b, head h, query i and key j; an axis of length
    1 is read at 0."""
    places = zip((b, h, i, j), mask.shape, strict=True)
    return mask[tuple(at if length > 1 else torch.zeros_like(b) for at, length in places)]
