"""The term scales of the fused reference: in bfloat16, as nothing but a unit for errors. Those of a
backward pass are summed here, that of the output where the output is (`fused_tiles.forward`).

A term scale is a sum of numbers of one sign, so rounding its terms to 8 bits moves it by less than
1 % (docs/method.md), and by much less where there are many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The sums of a backward pass over absolute values, run of rows by run of rows, for one group
    of heads.

    Operands are bfloat16, times powers of two that bring them to at most 1 (the terms of dX to at
    most 2), so that they keep clear of the ends of its range; products accumulate in fp32.
    """

    q: Tensor
    """|Q|, |K| and |dO|, padded as the fp64 ones."""
    k: Tensor
    dO: Tensor
    units: tuple[Tensor, Tensor, Tensor]
    """What q, k and dO were multiplied by."""
    unit: Tensor
    """What the terms of dX are multiplied by."""
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def of(cls, case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, dO: Tensor) -> Terms:
        """Of the fp64 operands of `fused`: q comes with the scale."""
        # |dP| is at most |dO| |V|, and so is delta, an average of dP.
        largest = dO.norm(dim=-1).amax() * v.norm(dim=-1).amax()
        (q, of_q), (k, of_k), (dO, of_dO) = (scaled(x.abs()) for x in (q, k, dO))
        by_key = (case.q.shape[0] * case.kv_heads, case.kv_len)
        return cls(
            q=q,
            k=k.flatten(0, 1),
            dO=dO,
            units=(of_q, of_k, of_dO),
            unit=_unit(largest),
            dq=torch.empty_like(q, dtype=torch.float32),
            dk=q.new_zeros(*by_key, q.shape[-1], dtype=torch.float32),
            dv=q.new_zeros(*by_key, dO.shape[-1], dtype=torch.float32),
        )

    def add(self, case: AttentionCase, rows: slice, keys: slice, P: Tensor, dX: Tensor) -> None:
        """One run of rows, by its P and terms of dX."""
        q, dO = (grouped(case, x[:, :, rows]) for x in (self.q, self.dO))
        dq = _in_fp32(dX, self.k[:, keys])
        self.dq[:, :, rows] = dq.view(*self.dq.shape[:2], -1, q.shape[-1])
        self.dk[:, keys] += _in_fp32(dX.mT, q)
        self.dv[:, keys] += _in_fp32(P.mT, dO)

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """The term scales of dq, dk and dv in fp64, but for the scale of attention."""
        q, k, dO = self.units
        sums, units = (self.dq, self.dk, self.dv), (self.unit * k, self.unit * q, dO)
        dq, dk, dv = (x.double().div_(u) for x, u in zip(sums, units, strict=True))
        return dq, dk, dv


def grouped(case: AttentionCase, x: Tensor) -> Tensor:
    """[B, H, rows, X] as [B * kv_heads, group * rows, X]."""
    return x.reshape(x.shape[0] * case.kv_heads, -1, x.shape[-1])


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices, accumulated and returned in fp32."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in bfloat16, times a power of two that brings it to at most 1, and that power."""
    unit = _unit(x.amax())
    return (x * unit).bfloat16(), unit


def _unit(largest: Tensor) -> Tensor:
    """The power of two that brings `largest` to 1/2 .. 1; 1 for 0."""
    return torch.where(largest > 0, torch.frexp(largest).mantissa / largest, 1.0)
