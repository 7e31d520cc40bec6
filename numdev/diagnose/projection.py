"""The gradient of the weights that make the queries, whether the terms of its error look alike, and
the spectral norms of W_Q.

The terms are R_T = (P K)[T]^T X[T] of formula 2 (`numdev.diagnose.chain`), (P K)[T] pulled back to
W_Q's output. They are matrices of rank 1 and are never made: their Gram matrix is the Hadamard
product of that of (P K) and that of X. Its trace is the sum of all |R_T|^2, its largest eigenvalue
that sum along the leading direction, found by Lanczos' method (Golub & Van Loan, Matrix
Computations, section 10.1, with full reorthogonalisation): from below, and to about one part in a
hundred where no direction stands out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from numdev.diagnose.statistics import Columns
from numdev.sources.projection import Projection

MOST_TOKENS = 2048  # of more, as many are taken, evenly spread over the call
STEPS = 32  # of Lanczos' method; as many as there are tokens give it to fp64 rounding
GRAM_BYTES = 1 << 28  # of the Gram matrices of the heads taken at once


def weight_gradient(projection: Projection, dq: Tensor) -> Tensor:
    """dW_Q [H, head_dim, width] for a gradient at the call's q [B, H, n, head_dim]."""
    pulled = projection.pull(dq.double()).double()
    rows = pulled.flatten(0, 1).permute(1, 2, 0)  # [H, head_dim, B n]
    return rows @ projection.x.double().flatten(0, 1)


def spectral(projection: Projection, heads: int) -> Columns:
    """The largest singular value of each head's rows of W_Q, and that over the heads' median; NaN
    for a head whose rows are not finite."""
    weight = projection.weight.detach().double().reshape(heads, -1, projection.weight.shape[-1])
    finite = weight.isfinite().flatten(1).all(dim=-1)
    weight = torch.where(finite[:, None, None], weight, 0.0)
    largest = torch.linalg.eigvalsh(weight @ weight.mT)[..., -1].clamp(min=0.0).sqrt()
    largest = largest.masked_fill(~finite, math.nan)
    return {"spectral_norm": largest, "spectral_ratio": largest / largest.nanquantile(0.5)}


def similarity(projection: Projection, PK: Tensor) -> Tensor:
    """[H]: the share of sum_T |R_T|^2 in one direction, for P K [B, H, n, head_dim] in fp64, 0 in
    rows that do not count. NaN where no token has an R_T."""
    at_weights = projection.pull(PK).double().flatten(0, 1)  # [B n, H, head_dim]
    n = len(at_weights)
    taken = min(n, MOST_TOKENS)
    tokens = torch.arange(taken, device=PK.device) * n // taken
    x = projection.x.double().flatten(0, 1)[tokens]
    shares = []
    for a in at_weights[tokens].transpose(0, 1).split(max(1, GRAM_BYTES // (8 * taken**2))):
        gram = (a @ a.mT).mul_(x @ x.mT)  # [heads, taken, taken]
        shares.append(largest_eigenvalue(gram) / gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1))
    return torch.cat(shares)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """[H]: of symmetric matrices [H, n, n] without negative eigenvalues, in fp64; NaN for one that
    is not finite."""
    # No element is larger than the largest of the diagonal, nor NaN without one there.
    finite = gram.diagonal(dim1=-2, dim2=-1).isfinite().all(dim=-1)
    matrix = torch.where(finite[:, None, None], gram, 0.0)
    heads, n, _ = matrix.shape
    generator = torch.Generator("cpu").manual_seed(0)
    b = torch.randn(n, 1, generator=generator, dtype=matrix.dtype, device="cpu").to(matrix.device)
    # An orthonormal basis of span(b, G b, G^2 b, ...); columns are 0 where the space is exhausted.
    basis = matrix.new_zeros(heads, n, min(STEPS, n))
    vector = b.expand(heads, n, 1)
    scale = matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[:, None, None]
    size = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    for i in range(basis.shape[-1]):
        basis[..., i : i + 1] = vector = torch.where(size > 0, vector / size, 0.0)
        vector = matrix @ vector
        for _ in range(2):  # once more: what the first pass leaves is rounding
            vector = vector - basis @ (basis.mT @ vector)
        size = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
        size = torch.where(size > 1e-14 * scale, size, 0.0)
    eigenvalues = torch.linalg.eigvalsh(basis.mT @ (matrix @ basis))
    return torch.where(finite, eigenvalues[..., -1], math.nan)
