"""What reaches the weights that make the queries: dW_Q of each head, and what W_Q itself is like.

An error of dQ is an error of dW_Q through the call's `Projection`, which is linear: the error of
dW_Q is the dW_Q of the error. By formula 2 of Qiu & Yao (arXiv 2510.04212) that part of it which an
error of delta makes is

    -alpha sum_T e[T] (P K)[T]^T X[T],   e = delta computed - delta exact,

with (P K)[T] pulled back to W_Q's output. Under a soft cap P here is P times the cap's slope, by
which the error of delta then reaches dQ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.diagnose.statistics import Columns
from numdev.sources.projection import Projection


def weight_gradient(projection: Projection, dq: Tensor) -> Tensor:
    """dW_Q [H, head_dim, width] for a gradient at the call's q [B, H, n, head_dim]."""
    pulled = projection.pull(dq.double()).double()
    rows = pulled.flatten(0, 1).permute(1, 2, 0)  # [H, head_dim, B n]
    return rows @ projection.x.double().flatten(0, 1)


def norm(x: Tensor) -> Tensor:
    """[H]: the Frobenius norm of what each head has, [H, ...]."""
    size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=-1)
    return size


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """[H]: of two [H, ...]."""
    return (x * y).flatten(1).sum(dim=-1) / (norm(x) * norm(y))


def spectral(projection: Projection | None, heads: int, device: torch.device) -> Columns:
    """The largest singular value of each head's rows of W_Q, and that over the heads' median."""
    if projection is None:
        unknown = torch.full((heads,), math.nan, dtype=torch.float64, device=device)
        return {"spectral_norm": unknown, "spectral_ratio": unknown}
    weight = projection.weight.detach().double().reshape(heads, -1, projection.weight.shape[-1])
    finite = weight.isfinite().flatten(1).all(dim=-1)
    weight = torch.where(finite[:, None, None], weight, 0.0)
    largest = torch.linalg.eigvalsh(weight @ weight.mT)[..., -1].clamp(min=0.0).sqrt()
    largest = largest.masked_fill(~finite, math.nan)
    return {"spectral_norm": largest, "spectral_ratio": largest / largest.nanquantile(0.5)}
