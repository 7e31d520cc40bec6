"""Attention with one cast, of which gradients are summed in the inputs' format from tile to
tile: in these tiles and orders, and with each tile's product rounded too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planted.record import Planted, plant


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """Which gradients are summed so, and how."""

    tensors: tuple[str, ...]
    tile: int
    last_first: bool
    products: bool

    @property
    def name(self) -> str:
        words = ("narrow", *self.tensors, str(self.tile))
        last_first = ("last-first",) if self.last_first else ()
        return "-".join(words + last_first + (("products",) if self.products else ()))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, how: Narrow
    ) -> Tensor:
        S = scale * (q.double() @ k.double().mT)
        if causal:
            hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
            S = S.masked_fill(hidden, -torch.inf)
        out = (S.softmax(dim=-1) @ v.double()).to(q.dtype)
        ctx.save_for_backward(q, k, v, S, out)
        ctx.how = scale, how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, S, out), (scale, how) = ctx.saved_tensors, ctx.how

        def r(x: Tensor) -> Tensor:
            return x.to(q.dtype).float()

        def summed(name: str, left: Tensor, right: Tensor) -> Tensor:
            total = left.new_zeros(*left.shape[:-1], right.shape[-1])
            starts = list(range(0, left.shape[-1], how.tile))
            for i in reversed(starts) if how.last_first else starts:
                new = left[..., i : i + how.tile] @ right[:, :, i : i + how.tile]
                if name in how.tensors:
                    total = r(total + (r(new) if how.products else new))
                else:
                    total = total + new
            return total.to(q.dtype)

        dO, P = grad.float(), S.softmax(dim=-1).float()
        dS = r(P * (dO @ v.float().mT - (dO * out.float()).sum(dim=-1, keepdim=True)))
        dq = summed("dq", dS, scale * k.float())
        dk = summed("dk", dS.mT, scale * q.float())
        dv = summed("dv", r(P).mT, dO)
        return dq, dk, dv, None, None, None


def _kernel(how: Narrow) -> Callable[..., Tensor]:
    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = _Summed.apply(q, k, v, is_causal, scale, how)  # type: ignore[no-untyped-call]
        return out

    return kernel


TENSORS = (("dq",), ("dk", "dv"))
TILES = (16, 32, 48, 64, 96, 128)
WAYS = ((False, False), (True, False), (False, True))
NARROW: dict[Narrow, Planted] = {}
for _tensors, _tile, (_last_first, _products) in itertools.product(TENSORS, TILES, WAYS):
    _how = Narrow(
        tensors=_tensors, tile=_tile, last_first=_last_first, products=_products
    )
    _what = f"{' and '.join(_tensors)} summed in 16 bits, tiles of {_tile}"
    _what += ", last first" * _last_first + ", products too" * _products
    NARROW[_how] = plant(_how.name, "rounding", _what, _kernel(_how), tensors=_tensors,
                         rule="narrow sum")  # fmt: skip
