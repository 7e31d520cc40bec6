"""A variant's attention: a registered kernel as the network calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import Kernel
from numdev.kernels.training import attended, crossed
from numdev.training.nulls import rerounded

HERE = CaseRef(case="training")


class Attention:
    """attention(q, k, v, causal), as `numdev.training.network` has it.

    q, k and v are cast to `dtype` where one is given, and the output comes in q's own dtype. With
    `noise` it is then re-rounded at random (`numdev.training.nulls`). A kernel that draws random
    numbers does so from `draws`, on from call to call. With `behind`, a kernel and its options,
    gradients are that one's.
    """

    def __init__(
        self,
        kernel: Kernel,
        options: Mapping[str, Any],
        *,
        dtype: torch.dtype | None = None,
        noise: torch.Generator | None = None,
        draws: torch.Generator | None = None,
        behind: tuple[Kernel, Mapping[str, Any]] | None = None,
    ) -> None:
        self.kernel, self.options, self.dtype = kernel, options, dtype
        self.noise, self.draws, self.behind = noise, draws, behind
        self.ran: str | None = None
        """What the kernel said it ran, once it was asked."""
        self.largest: list[Tensor] | None = None
        """While it is a list, every call adds its largest |score|, a scalar in float32."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        dtype = self.dtype or q.dtype
        case = AttentionCase(
            ref=HERE,
            q=q.to(dtype),
            k=k.to(dtype),
            v=v.to(dtype),
            scale=1 / math.sqrt(q.shape[-1]),
            is_causal=causal,
        )
        if self.largest is not None:
            self.largest.append(largest_score(case))
        if self.ran is None:
            self.ran = self._asked(case)
        out = self._attended(case).to(q.dtype)
        return out if self.noise is None else rerounded(out, self.noise)

    def _attended(self, case: AttentionCase) -> Tensor:
        if self.behind is None:
            return attended(self.kernel, case, self.options, self.draws)
        return crossed(self.kernel, case, self.options, *self.behind)

    def _asked(self, case: AttentionCase) -> str:
        with torch.no_grad(), torch.autocast(case.q.device.type, enabled=False):
            return self.kernel.attend(case, **self.options).ran or ""


@torch.no_grad()
def largest_score(case: AttentionCase) -> Tensor:
    """The largest |scale q·k| that a query sees, a float32 scalar, computed in float32; NaN if any
    is. A sequence at a time, which bounds the memory."""
    found = []
    with torch.autocast(case.q.device.type, enabled=False):
        for q, k in zip(case.q.float(), case.k.float(), strict=True):
            scores = q.unflatten(0, (case.kv_heads, -1)) @ k[:, None].transpose(-1, -2)
            scores = scores.mul_(case.scale).abs_()
            found.append((scores.tril() if case.is_causal else scores).amax())
    return torch.stack(found).amax()
