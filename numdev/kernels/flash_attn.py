"""FlashAttention 2, 3 and 4 as kernels: the packages' own calls, where they are installed.

The three have nearly the same interface (`flash_attn_interface.py` in the repository
Dao-AILab/flash-attention, in its folder `hopper` for version 3, and `flash_attn/cute/interface.py`
for version 4); what differs is how a window without a limit is written, how the log-sum-exp is
asked for, and the options. None of them takes a mask. A package is imported when its kernel runs,
never to learn whether it exists (`Requirement`). What version 4 cannot do on one generation of
GPUs and can on another it says itself, and the row is failed with its words.

Gradients are autograd's, through the package's own backward, and every step of the way there and
back: numdev's tensors are [batch, heads, length, head_dim], the packages' [batch, length, heads,
head_dim], or all sequences of a batch in a row, [batch * length, heads, head_dim], with the places
where each begins. All align causality and windows bottom-right: query i stands at key i + kv_len -
q_len.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import UsageError
from numdev.kernels import Output, Requirement, kernel
from numdev.kernels.sdpa import flash_attention_2
from numdev.system import System

MOST_HEAD_DIM = 256
FLASH_4 = "FlashAttention-4"
Claim = Mapping[str, Any] | None


def lengths_first(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] to [batch, length, heads, head_dim] and back: a view."""
    return x.transpose(1, 2)


def pack(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] to [batch * length, heads, head_dim], one sequence after the
    other."""
    return lengths_first(x).flatten(0, 1)


def unpack(x: Tensor, batch: int) -> Tensor:
    """The inverse of `pack`."""
    return lengths_first(x.unflatten(0, (batch, -1)))


def unpack_lse(lse: Tensor, batch: int) -> Tensor:
    """[heads, batch * length], as packed calls return it, to [batch, heads, length]."""
    rows: Tensor = lse.unflatten(1, (batch, -1))
    return rows.transpose(0, 1)


def starts(batch: int, length: int, device: torch.device) -> Tensor:
    """int32 [batch + 1]: where each of the packed sequences begins, and where the last one ends."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def misaligned(case: AttentionCase, package: str) -> str | None:
    """Why a package that aligns bottom-right cannot say which keys a query sees by position, as a
    sentence; None when it can."""
    own = case.kv_len - case.q_len
    if case.restricts_positions and case.causal_offset != own:
        return (
            f"{package} aligns causality and windows bottom-right, which is an offset of {own} "
            f"here, and the case has {case.causal_offset}"
        )
    if any(side is not None and side < 0 for side in case.window or ()):
        return f"{package} takes a side of a window below 0 for one without a limit"
    return None


def window_of(case: AttentionCase, unlimited: int | None) -> tuple[int | None, int | None]:
    """The window (left, right) in a package's words for a side without a limit. Causality closes
    the right side, whatever the window leaves open there."""
    if case.window is None:
        return unlimited, unlimited
    left, right = (unlimited if side is None else side for side in case.window)
    return left, 0 if case.is_causal else right


def _unsupported(package: str, *, multiple: int = 1) -> Callable[[AttentionCase], str | None]:
    """What no version can do. Version 2 pads a head dimension that is no multiple of 8; the others'
    loads are of 16 bytes."""

    def reason(case: AttentionCase) -> str | None:
        d, d_v = case.q.shape[-1], case.v.shape[-1]
        if case.sinks is not None and package != FLASH_4:
            return f"{package} has no attention sinks"
        if case.sinks is not None and case.sinks.dtype != torch.bfloat16:
            return f"{package} takes attention sinks in bfloat16 only"
        if multiple == 1 and d_v != d:
            return f"{package} takes V of the same head dimension as Q and K"
        if d % multiple or d_v % multiple:
            return f"{package} takes head dimensions that are multiples of {multiple}"
        if case.q.dtype not in (torch.float16, torch.bfloat16):
            return f"{package} takes float16 and bfloat16"
        if case.mask is not None:
            return f"{package} takes no mask"
        if d > MOST_HEAD_DIM:
            return f"{package} takes head dimensions up to {MOST_HEAD_DIM}"
        return misaligned(case, package)

    return reason


def _positive_splits(options: Mapping[str, Any]) -> None:
    """0 lets the package choose; below that nothing is meant."""
    splits = options["num_splits"]
    if not isinstance(splits, int) or isinstance(splits, bool) or splits < 0:
        raise UsageError(f"num_splits is {splits!r}", hint="a whole number; 0 lets it choose")


def _claim_of_2(case: AttentionCase, output: Output, system: System) -> Claim:
    """As PyTorch's copy of it, but that packed calls divide the keys in decoding alone.

    With a soft cap no emulation stands for it: its tanh is the GPU's approximate one, off by 2^-11
    of the value, which is more than rounding P makes of scores of that size.
    """
    if case.softcap is not None:
        return None
    claim = flash_attention_2(case, system)
    packed = (output.did or {}).get("packed", False)
    return {**claim, "splits": 1} if packed and case.q_len > 1 else claim


def _claim_of_others(case: AttentionCase, output: Output, system: System) -> Claim:
    """Their tiles depend on the GPU and on more than is documented; a soft cap as in version 2."""
    return None if case.softcap is not None else {"preset": "fa2"}


def _attend(
    module: str, case: AttentionCase, packed: bool, unlimited: int | None, **more: Any
) -> Output:
    """One call of the package in `module`, on the whole batch or on its sequences `packed`;
    `unlimited` is how it writes a window's side without a limit."""
    package = importlib.import_module(module)
    arguments = {
        "softmax_scale": case.scale,
        "causal": case.is_causal,
        "window_size": window_of(case, unlimited),
        "softcap": case.softcap or 0.0,
        **more,
    }
    if not packed:
        q, k, v = (lengths_first(x) for x in (case.q, case.k, case.v))
        out, lse, *_ = package.flash_attn_func(q, k, v, **arguments)
        ran, did = f"{module}.flash_attn_func", {"packed": False}
        return Output(out=lengths_first(out), lse=lse, ran=ran, did=did)
    batch, device = case.q.shape[0], case.q.device
    out, lse, *_ = package.flash_attn_varlen_func(
        pack(case.q),
        pack(case.k),
        pack(case.v),
        cu_seqlens_q=starts(batch, case.q_len, device),
        cu_seqlens_k=starts(batch, case.kv_len, device),
        max_seqlen_q=case.q_len,
        max_seqlen_k=case.kv_len,
        **arguments,
    )
    whole, rows = unpack(out, batch), unpack_lse(lse, batch)
    ran, did = f"{module}.flash_attn_varlen_func", {"packed": True}
    return Output(out=whole, lse=rows, ran=ran, did=did)


@kernel(
    "flash-attn-2",
    requires=Requirement(device="cuda", package="flash-attn", capability=(8, 0)),
    supports=_unsupported("flash-attn 2"),
    claims=_claim_of_2,
)
def flash_attn_2(
    case: AttentionCase, *, deterministic: bool = False, varlen: bool = False
) -> Output:
    """FlashAttention-2, from the package flash-attn."""
    return _attend(
        "flash_attn", case, varlen, -1, deterministic=deterministic, return_attn_probs=True
    )


@kernel(
    "flash-attn-3",
    requires=Requirement(device="cuda", package="flash-attn-3", capability=(9, 0)),
    supports=_unsupported("flash-attn 3", multiple=8),
    validate=_positive_splits,
    claims=_claim_of_others,
)
def flash_attn_3(
    case: AttentionCase,
    *,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    varlen: bool = False,
) -> Output:
    """FlashAttention-3, from the package flash-attn-3, for Hopper."""
    return _attend(
        "flash_attn_interface",
        case,
        varlen,
        -1,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_attn_probs=True,
    )


@kernel(
    "flash-attn-4",
    requires=Requirement(device="cuda", package="flash-attn-4", capability=(9, 0)),
    supports=_unsupported(FLASH_4, multiple=8),
    validate=_positive_splits,
    claims=_claim_of_others,
)
def flash_attn_4(
    case: AttentionCase,
    *,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    varlen: bool = False,
) -> Output:
    """FlashAttention-4, from the package flash-attn-4, for Hopper and Blackwell."""
    return _attend(
        "flash_attn.cute",
        case,
        varlen,
        None,
        learnable_sink=case.sinks,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_lse=True,
    )
