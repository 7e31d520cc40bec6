"""Whether the terms of dW_Q's error look alike: R_T = (P K)[T]^T X[T], one for every token T.

The error of dW_Q is a sum of R_T, each times an error of delta (formula 2 of Qiu & Yao, arXiv
2510.04212). Terms that look alike add up where those errors have one sign.

The R_T are matrices of rank 1, head_dim * width numbers each, and are never made: the inner product
of two is that of their (P K)[T] times that of their X[T], so that the Gram matrix of all is the
Hadamard product of two small ones. Its trace is the sum of all |R_T|^2, its largest eigenvalue that
sum along the leading direction, found by Lanczos' method (Golub & Van Loan, Matrix Computations,
section 10.1, with full reorthogonalisation): from below, and to about one part in a hundred where
no direction stands out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from numdev.diagnose.statistics import Columns
from numdev.sources.projection import Projection

MOST_TOKENS = 2048
"""Of more, as many are taken, evenly spread over the call."""
STEPS = 32
"""Of Lanczos' method. As many as there are tokens give the eigenvalue to fp64 rounding."""
GRAM_BYTES = 1 << 28
"""How large the Gram matrices of the heads taken at once may be. Memory only."""


def similarity(projection: Projection, PK: Tensor) -> Columns:
    """`similarity`, `similarity_cos` and `similarity_tokens` of every head, [H] each, for P K
    [B, H, n, head_dim] in fp64, 0 in rows that do not count. NaN where no token has an R_T, the
    cosine also where only one has."""
    at_weights = projection.pull(PK).double().flatten(0, 1)  # [B n, H, head_dim]
    chosen = spread_tokens(len(at_weights), at_weights.device)
    a = at_weights[chosen].transpose(0, 1)
    x = projection.x.double().flatten(0, 1)[chosen]
    found = [_of_heads(part, x @ x.mT) for part in _pieces(a)]
    return {name: torch.cat([columns[name] for columns in found]) for name in found[0]}


def spread_tokens(n: int, device: torch.device) -> Tensor:
    """The tokens that are taken, of n."""
    taken = min(n, MOST_TOKENS)
    return torch.arange(taken, device=device) * n // taken


def _pieces(a: Tensor) -> Iterator[Tensor]:
    yield from a.split(max(1, GRAM_BYTES // (8 * a.shape[1] ** 2)))


def _of_heads(a: Tensor, of_x: Tensor) -> Columns:
    """Of a [H, n, head_dim] and the Gram matrix of X."""
    gram = (a @ a.mT).mul_(of_x)  # [H, n, n]
    squares = gram.diagonal(dim1=-2, dim2=-1)
    there = squares > 0
    n = there.sum(dim=-1)
    share = largest_eigenvalue(gram) / squares.sum(dim=-1)
    inverse = torch.where(there, squares.rsqrt(), 0.0)
    alike = (inverse[:, None] @ gram @ inverse[..., None])[:, 0, 0]
    cosines = (alike - n) / (n * (n - 1))
    return {"similarity": share, "similarity_cos": cosines, "similarity_tokens": n.double()}


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """[H]: of symmetric matrices [H, n, n] without negative eigenvalues, in fp64; NaN for one that
    is not finite."""
    # No element is larger than the largest of the diagonal, nor NaN without one there.
    finite = gram.diagonal(dim1=-2, dim2=-1).isfinite().all(dim=-1)
    matrix = gram if bool(finite.all()) else torch.where(finite[:, None, None], gram, 0.0)
    basis = _krylov(matrix)
    small = basis.mT @ (matrix @ basis)
    return torch.where(finite, torch.linalg.eigvalsh(small)[..., -1], math.nan)


def _krylov(matrix: Tensor) -> Tensor:
    """An orthonormal basis of span(b, G b, G^2 b, ...), [H, n, STEPS], for a random b; columns are
    0 where the space is exhausted."""
    heads, n, _ = matrix.shape
    generator = torch.Generator("cpu").manual_seed(0)
    b = torch.randn(n, 1, generator=generator, dtype=matrix.dtype, device="cpu").to(matrix.device)
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
    return basis
