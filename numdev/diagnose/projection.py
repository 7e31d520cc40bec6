"""What reaches the weights that make the queries: dW_Q of each head, whether the terms of its error
look alike, and what W_Q itself is like.

By formula 2 of Qiu & Yao (arXiv 2510.04212) the error of dW_Q that an error e[T] of delta makes is
-alpha sum_T e[T] R_T, R_T = (P K)[T]^T X[T], with (P K)[T] pulled back to W_Q's output. The R_T are
matrices of rank 1 and are never made: their Gram matrix is the Hadamard product of that of (P K)
and that of X. Its trace is the sum of all |R_T|^2, its largest eigenvalue that sum along the
leading direction, found by Lanczos' method (Golub & Van Loan, Matrix Computations, section 10.1,
with full reorthogonalisation): from below, and to about one part in a hundred where no direction
stands out."""

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


def similarity(projection: Projection, PK: Tensor) -> Columns:
    """`similarity`, `similarity_cos` and `similarity_tokens` of every head, [H] each, for P K
    [B, H, n, head_dim] in fp64, 0 in rows that do not count. NaN where no token has an R_T, the
    cosine also where only one has."""
    at_weights = projection.pull(PK).double().flatten(0, 1)  # [B n, H, head_dim]
    n = len(at_weights)
    taken = min(n, MOST_TOKENS)
    tokens = torch.arange(taken, device=PK.device) * n // taken
    x = projection.x.double().flatten(0, 1)[tokens]
    pieces = at_weights[tokens].transpose(0, 1).split(max(1, GRAM_BYTES // (8 * taken**2)))
    parts = [_of_heads(piece, x @ x.mT) for piece in pieces]
    return {name: torch.cat([columns[name] for columns in parts]) for name in parts[0]}


def _of_heads(a: Tensor, of_x: Tensor) -> Columns:
    """Of a [H, n, head_dim] and the Gram matrix of X."""
    gram = (a @ a.mT).mul_(of_x)  # [H, n, n]
    squares = gram.diagonal(dim1=-2, dim2=-1)
    n = (squares > 0).sum(dim=-1)
    inverse = torch.where(squares > 0, squares.rsqrt(), 0.0)
    alike = (inverse[:, None] @ gram @ inverse[..., None])[:, 0, 0]
    return {
        "similarity": largest_eigenvalue(gram) / squares.sum(dim=-1),
        "similarity_cos": (alike - n) / (n * (n - 1)),
        "similarity_tokens": n.double(),
    }


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
