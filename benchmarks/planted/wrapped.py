"""PyTorch's scaled_dot_product_attention as people wrap it, and faults around it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Output, find
from planted.record import planted


@planted(
    "sound",
    "PyTorch's own choice, which on a CPU sums gradients in the working format.",
    formats=("bfloat16",),  # in float16 it leans where maxima tie (K37)
)
def wrapper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


@planted("place", "Off by more and more towards the last row: by 5 % of its output there.",
         tensors=("out",), check=("long",), place="row")  # fmt: skip
def late(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    out = wrapper(q, k, v, is_causal=is_causal).float()
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    share = torch.linspace(0, 1, out.shape[2], device=out.device)[:, None] ** 6
    return (out * (1 + 0.05 * share * noise)).to(q.dtype)


@planted("place", "Head 1 has 1.01 times the scale.", tensors=("out",), formats=("float32",), check=("full",),
         says=r"scale is 1\.0(10|09)")  # fmt: skip
def one_head_off(case: AttentionCase) -> Output:
    factor = torch.where(torch.arange(case.heads, device=case.q.device) == 1, 1.01, 1.0)[
        :, None, None
    ]
    return find("sdpa-math").attend(dataclasses.replace(case, q=case.q * factor))
