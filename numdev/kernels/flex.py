"""PyTorch's FlexAttention as a kernel: compiled, as its users run it, or eager.

FlexAttention takes what a case adds to plain attention as two functions that a compiler puts into
its kernel: `score_mod` changes a score (here the soft cap, and an additive mask), `mask_mod` says
which are seen (causality, window and a bool mask, from which a block mask is made beforehand).
Compiled it is a fused kernel, in Triton on CUDA and in C++ on a CPU; eager it materialises all
scores. Which of the two ran is known from inside the call, and a compiled call that was not
compiled is an error, not a result.

Every shape is compiled for itself (seconds each), since a compiler that may generalise gives a case
another kernel according to the cases before it. For the time of a call the compiler's limit on that
is lifted. A block mask is made from the whole mask, q_len x kv_len booleans.

Where compilation fails, the row is failed.

How it rounds. On both devices the compiled kernel is FlashAttention-2's arithmetic: scores,
maximum, sums and output in fp32, P in the working format for its product with V, one cast at the
end. Backward as well, but that a group's dK and dV are summed before they are cast. Its exponential
is to the base 2 on CUDA and good to 20 ulp on a CPU, which no format of 16 bits shows. With
PRESCALE_QK what is rounded first is Q times the scale and log2(e), for which no emulation stands:
without the latter, a scale that is a power of two would round nothing. Sources: the templates in
torch/_inductor/kernel/flex and torch/_inductor/codegen/cpp_flex_attention_template.py, and the
tiles in torch/_inductor/template_heuristics, of PyTorch 2.13. With a block mask the blocks of 128
keys that the mask cuts come before those that it shows whole, in an order of its own for every row;
the emulation knows ascending order only, which is seen in the residual, not in the size of errors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError, closest
from numdev.kernels import Output, Refused, kernel
from numdev.system import System

BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")
OF_THE_KERNEL = ("backend", "block_m", "block_n", "prescale_qk", "rows_guaranteed_safe")
"""The options that PyTorch knows as `kernel_options`, by the same names in capitals. None, as all
are by default, leaves PyTorch's own."""
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
UNLIMITED = 1_000_000
LEAST_HEAD_DIM = 16
"""Of a matrix product in Triton."""
COMPILED_FORMATS = (torch.float16, torch.bfloat16, torch.float32)
Modification = Callable[..., Tensor]


def _unsupported(case: AttentionCase) -> str | None:
    if case.sinks is not None:
        return "FlexAttention has no attention sinks"
    return None


def _check(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option of the wrong kind, and for one that would be ignored."""
    if options["backend"] not in (None, *BACKENDS):
        hint = closest(str(options["backend"]), BACKENDS)
        raise UsageError(f"flex has no backend {options['backend']!r}", hint=hint)
    for name in ("block_m", "block_n"):
        size = options[name]
        if size is not None and size not in (16, 32, 64, 128):
            raise UsageError(f"{name} is {size!r}", hint="16, 32, 64 or 128")
    for name in ("compiled", "prescale_qk", "rows_guaranteed_safe"):
        if not isinstance(options[name], bool | None):
            raise UsageError(f"{name} is {options[name]!r}", hint="true or false")
    if not options["compiled"] and _kernel_options(options):
        raise UsageError(
            f"eager FlexAttention ignores {', '.join(_kernel_options(options))}",
            hint="leave that out, or leave it compiled",
        )


def _kernel_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What of the options is set, in PyTorch's names."""
    return {n.upper(): options[n] for n in OF_THE_KERNEL if options[n] is not None}


def _claims(case: AttentionCase, output: Output, system: System) -> Mapping[str, Any] | None:
    """What the FlexAttention that ran computes like, in both passes."""
    did, d = output.did or {}, case.q.shape[-1]
    if not did[
        "compiled"
    ]:  # scores in fp32 from widened inputs, P rounded for a product in 16 bits
        return {"preset": "eager", **dict.fromkeys(("scores", "scaled", "softcap", "bias"), "wide")}
    if did["device"] != "cuda":  # without a block mask all keys are one tile
        cut = case.restricts_positions or (case.mask is not None and case.mask.dtype == torch.bool)
        return {"preset": "fa2", "block_kv": SPARSE_BLOCK if cut else case.kv_len}
    if did.get("PRESCALE_QK"):
        return None
    if did.get("BACKEND") == "FLASH":
        return {"preset": "fa2"}
    claim: dict[str, Any] = {"preset": "fa2"}
    if case.group > 1:
        claim["group_sum"] = "running"
    if _decodes(case, did.get("BACKEND")):
        parts = (system.processors or 1) // (case.q.shape[0] * case.kv_heads) * 2
        return {**claim, "block_kv": did.get("BLOCK_N", DECODING_TILE), "splits": max(parts, 1)}
    sixteen, major = case.q.dtype != torch.float32, min((system.capability or (0, 0))[0], 10)
    tile = TILES.get((major, sixteen), {}).get(d, PLAIN_TILE)  # without autotuning
    if d > 256:
        tile = 32 if sixteen else 16
    return {**claim, "block_kv": did.get("BLOCK_N", tile)}


def _decodes(case: AttentionCase, backend: str | None) -> bool:
    """Whether the kernel for decoding runs: few queries, and a group that is a power of two. A mask
    that differs by head must do so for every query head, and none may be grouped."""
    if backend is not None:
        return backend == "TRITON_DECODE"
    mask = case.mask
    by_head = mask is not None and mask.dtype == torch.bool and mask.ndim >= 3
    by_head = by_head and mask is not None and mask.shape[-3] > 1 and case.group > 1
    return case.q_len < SHORT and case.group & (case.group - 1) == 0 and not by_head


@kernel("flex", supports=_unsupported, validate=_check, claims=_claims)
def flex(
    case: AttentionCase,
    *,
    compiled: bool = True,
    backend: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    prescale_qk: bool | None = None,
    rows_guaranteed_safe: bool | None = None,
) -> Output:
    """PyTorch's FlexAttention, compiled into one kernel."""
    asked = _kernel_options(locals())  # keep this the first line
    refusal = _refusal(case, compiled, asked)
    if refusal:
        raise Refused(refusal)
    device = case.q.device.type
    with _unlimited_recompilation(), warnings.catch_warnings():
        # Said once a process where it is eager, which `ran` says of every call.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, lse, was_compiled = (_compiled() if compiled else _call)(
            case.q,
            case.k,
            case.v,
            _score_mod(case),
            _block_mask(case),
            case.scale,
            case.group > 1,
            asked or None,
            device == "cuda" or not compiled,  # the C++ kernel has no log-sum-exp to give
        )
    if compiled and not was_compiled:
        raise MeasurementError("flex_attention ran eagerly: is torch.compile switched off?")
    how = f"compiled for {device}" if compiled else "eager"
    ran = ", ".join(["flex_attention", how, *(f"{n}={x}" for n, x in asked.items())])
    did = {"compiled": compiled, "device": device, **asked}
    return Output(out=out, lse=lse, ran=ran, did=did)


def _refusal(case: AttentionCase, compiled: bool, asked: Mapping[str, Any]) -> str | None:
    """What FlexAttention cannot do here, by device and by how it is run."""
    on_cuda = case.q.is_cuda
    if case.q.requires_grad and not on_cuda:
        return "FlexAttention has no backward on a CPU"
    if not compiled:
        return None
    if case.q.dtype not in COMPILED_FORMATS:
        return "compiled FlexAttention takes float16, bfloat16 and float32"
    if on_cuda and min(case.q.shape[-1], case.v.shape[-1]) < LEAST_HEAD_DIM:
        return f"compiled FlexAttention takes head dimensions from {LEAST_HEAD_DIM} on"
    if asked and not on_cuda:
        return f"{', '.join(asked)}: options of FlexAttention's kernel for CUDA"
    return None


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Modification | None,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    kernel_options: Any,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None, bool]:
    """Output, log-sum-exp, and whether this is compiled: a constant that the compiler sets."""
    here = torch.compiler.is_dynamo_compiling()
    found: Any = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        kernel_options=kernel_options,
        return_aux=AuxRequest(lse=True) if with_lse else None,
    )
    return (found[0], found[1].lse, here) if with_lse else (found, None, here)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor | None, bool]]:
    """The one compiled function, which keeps a kernel for every shape it has met."""
    return torch.compile(_call, fullgraph=True, dynamic=False)


def _unlimited_recompilation() -> Any:
    """A context in which one function may be compiled for any number of shapes."""
    import torch._dynamo

    return torch._dynamo.config.patch(
        recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED
    )


def _score_mod(case: AttentionCase) -> Modification | None:
    """Soft cap, then additive mask; None where a score stays as it is."""
    cap, bias = case.softcap, _four_axes(case.mask, bool_mask=False)
    if cap is None and bias is None:
        return None

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + _at(bias, b, h, i, j)

    return changed


def _mask_mod(case: AttentionCase) -> Modification | None:
    """Which keys are seen, by causality, window and a bool mask; None where all are."""
    mask, offset, is_causal = (
        _four_axes(case.mask, bool_mask=True),
        case.causal_offset,
        case.is_causal,
    )
    left, right = case.window or (None, None)
    if mask is None and not case.restricts_positions:
        return None

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        shown = j >= 0
        if is_causal:
            shown = shown & (j <= i + offset)
        if left is not None:
            shown = shown & (j >= i + (offset - left))
        if right is not None:
            shown = shown & (j <= i + (offset + right))
        return shown if mask is None else shown & _at(mask, b, h, i, j)

    return seen


def _block_mask(case: AttentionCase) -> Any:
    """The block mask of a case, for as many batches and heads as its mask distinguishes."""
    seen, mask = _mask_mod(case), _four_axes(case.mask, bool_mask=True)
    if seen is None:
        return None
    batches, heads = (None, None) if mask is None else mask.shape[:2]
    return create_block_mask(
        seen, batches, heads, case.q_len, case.kv_len, device=case.q.device.type
    )


def _four_axes(mask: Tensor | None, *, bool_mask: bool) -> Tensor | None:
    """A mask of this kind with all its axes, those of length 1 as they are; None for another."""
    if mask is None or (mask.dtype == torch.bool) != bool_mask:
        return None
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _at(mask: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A broadcasting mask's entry: an axis of length 1 is read at 0."""
    first = torch.zeros_like(b)
    b, h, i, j = (
        place if length > 1 else first
        for place, length in zip((b, h, i, j), mask.shape, strict=True)
    )
    return mask[b, h, i, j]
