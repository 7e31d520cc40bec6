"""FlashAttention 2, 3 and 4 as kernels: the packages' own calls, where they are installed.

The differences of their interfaces (Dao-AILab/flash-attention: `flash_attn_interface.py`, in the
folder `hopper` for version 3, and `flash_attn/cute/interface.py`) are data (`Version`). Tensors are
[batch, length, heads, head_dim], or packed [batch * length, heads, head_dim], with the places where
each sequence begins. All align causality and windows bottom-right: query i stands at key
i + kv_len - q_len.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, Requirement, kernel
from numdev.kernels.output import why_not
from numdev.kernels.sdpa import flash_attention_2
from numdev.system import System

MOST_HEAD_DIM = 256
HALVES = ("float16", "bfloat16")
SPLITS: Mapping[str, Any] = {"num_splits": 1, "pack_gqa": None}


@dataclass(frozen=True, kw_only=True)
class Version:
    """What one version has of its own."""

    number: int
    module: str
    capability: tuple[int, int]
    summary: str
    more: Mapping[str, Any]  # its options beside `deterministic` and `varlen`, with their defaults
    multiple: int = 8
    """Of head dimensions, since loads are of 16 bytes. Version 2 pads."""
    unlimited: int | None = -1  # a window's side without a limit
    with_lse: str = "return_attn_probs"

    def unsupported(self, case: AttentionCase) -> str | None:
        """Why it cannot run the case. (What version 4 cannot do on one generation of GPUs alone it
        says itself.)"""
        d, d_v = case.q.shape[-1], case.v.shape[-1]
        sinks = None if case.sinks is None else case.sinks.dtype
        package = f"flash-attn {self.number}"
        return why_not(
            (sinks and self.number != 4, f"{package} has no attention sinks"),
            (sinks != torch.bfloat16 and sinks, f"{package} takes sinks in bfloat16 only"),
            (self.multiple == 1 and d_v != d, f"{package} takes V of the head dimension of Q"),
            (d % self.multiple or d_v % self.multiple, f"{package} takes multiples of 8 features"),
            (case.format.name not in HALVES, f"{package} takes float16 and bfloat16"),
            (case.mask is not None, f"{package} takes no mask"),
            (d > MOST_HEAD_DIM, f"{package} takes head dimensions up to {MOST_HEAD_DIM}"),
        ) or misaligned(case, package)

    def attend(self, case: AttentionCase, *, varlen: bool, **options: Any) -> Output:
        """One call, on the whole batch or on its sequences packed."""
        package = importlib.import_module(self.module)
        arguments: dict[str, Any] = {
            "softmax_scale": case.scale,
            "causal": case.is_causal,
            "window_size": self.window(case),
            "softcap": case.softcap or 0.0,
            self.with_lse: True,
            **({"learnable_sink": case.sinks} if self.number == 4 else {}),
            **options,
        }
        q, k, v = map(lengths_first, (case.q, case.k, case.v))
        if not varlen:
            name = "flash_attn_func"
            out, lse, *_ = package.flash_attn_func(q, k, v, **arguments)
        else:
            name, batch = "flash_attn_varlen_func", case.q.shape[0]
            starts = torch.arange(batch + 1, dtype=torch.int32, device=case.q.device)
            out, lse, *_ = package.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=starts * case.q_len,
                cu_seqlens_k=starts * case.kv_len,
                max_seqlen_q=case.q_len,
                max_seqlen_k=case.kv_len,
                **arguments,
            )
            out = out.unflatten(0, (batch, -1))
            lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)  # from [heads, batch * length]
        ran = f"{self.module}.{name}"
        return Output(out=lengths_first(out), lse=lse, ran=ran, did={"packed": varlen})

    def window(self, case: AttentionCase) -> tuple[int | None, int | None]:
        """The window (left, right) in its words. Causality closes the right side."""
        window = case.window or (None, None)
        left, right = (self.unlimited if side is None else side for side in window)
        return left, 0 if case.window and case.is_causal else right

    def claims(
        self, case: AttentionCase, output: Output, system: System
    ) -> Mapping[str, Any] | None:
        """Version 2 as PyTorch's copy of it, but that packed calls divide the keys in decoding
        alone; the others' tiles depend on the GPU and on more than is documented.

        With a soft cap no emulation stands for it: its tanh is the GPU's approximate one, off by
        2^-11 of the value, which is more than rounding P makes of scores of that size.
        """
        if case.softcap is not None:
            return None
        if self.number != 2:
            return {"preset": "fa2"}
        whole = {"splits": 1} if (output.did or {}).get("packed") and case.q_len > 1 else {}
        return {**flash_attention_2(case, system), **whole}


def lengths_first(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] to [batch, length, heads, head_dim] and back: a view."""
    return x.transpose(1, 2)


def misaligned(case: AttentionCase, package: str) -> str | None:
    """Why a package that aligns bottom-right cannot say which keys a query sees by position, as a
    sentence; None when it can."""
    own = case.kv_len - case.q_len
    elsewhere = case.restricts_positions and case.causal_offset != own
    return why_not(
        (elsewhere, f"{package} aligns bottom-right, an offset of {own}, not {case.causal_offset}"),
        (
            any(side is not None and side < 0 for side in case.window or ()),
            f"{package} takes a side of a window below 0 for one without a limit",
        ),
    )


def _register(version: Version) -> None:
    def attend(case: AttentionCase, **options: Any) -> Output:
        return version.attend(case, **options)

    name = f"flash-attn-{version.number}"
    attend.__doc__, attend.__qualname__ = version.summary, name
    package = "flash-attn" if version.number == 2 else name
    kernel(
        name,
        options={**version.more, "deterministic": False, "varlen": False},
        values={"num_splits": 0},  # 0 lets it choose
        requires=Requirement(device="cuda", package=package, capability=version.capability),
        supports=version.unsupported,
        claims=version.claims,
    )(attend)


for _version in (
    Version(
        number=2,
        module="flash_attn",
        capability=(8, 0),
        summary="FlashAttention-2, from the package flash-attn.",
        more={},
        multiple=1,
    ),
    Version(
        number=3,
        module="flash_attn_interface",
        capability=(9, 0),
        summary="FlashAttention-3, from the package flash-attn-3, for Hopper.",
        more=SPLITS,
    ),
    Version(
        number=4,
        module="flash_attn.cute",
        capability=(9, 0),
        summary="FlashAttention-4, from the package flash-attn-4, for Hopper and Blackwell.",
        more=SPLITS,
        unlimited=None,
        with_lse="return_lse",
    ),
):
    _register(_version)
