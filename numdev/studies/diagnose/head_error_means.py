"""Computes means of errors per query head, and how sure they are.

All are over the rows of a head that see more than one key. Rows of a sequence share keys
and values, so a t is of means over blocks of rows: 16 to a sequence, or whole sequences
where there are 16 or more. A number that cannot be formed is NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from numdev.formats import Format, ulp
from numdev.sources.query_projection import Projection
from numdev.studies.training.measure import spectral_norms

# Blocks of rows in a sequence. With as many sequences or more, a sequence is one block
BLOCKS = 16
FEWEST_BLOCKS = 4
# An exact value below its term scale over this is no measure of its own errors
CANCELLED = 16.0
MAX_TOKENS = 2048  # a longer call is sampled at as many, evenly spread
STEPS = 32  # of Lanczos' method; as many as there are tokens give it to fp64 rounding
GRAM_BYTES = 1 << 28  # the Gram matrices of several heads at once take at most this
Columns = Mapping[str, Tensor]  # numbers by name, [H] each


def mean_by_head(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the mean of x [B, H, n] over the rows that count, of all sequences, [H];
    NaN for a head without such a row. `rows`: which count, bool [B, H, n]; what the
    others hold, NaN too, has no effect."""
    return torch.where(rows, x, 0.0).sum(dim=(0, 2)) / rows.sum(dim=(0, 2))


def rms_by_head(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the root of the mean square of x [B, H, n] over the rows that count, of all
    sequences, [H]; NaN for a head without such a row. `rows`: which count, bool [B, H,
    n]."""
    return mean_by_head(x.square(), rows).sqrt()


def norm_by_head(x: Tensor) -> Tensor:
    """Returns the Frobenius norm of each head's part of x [H, ...], [H]."""
    size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=-1)
    return size


def t_by_head(x: Tensor, rows: Tensor, *, step: float = 0.0) -> Tensor:
    """Returns Student's t of the mean of x [B, H, n], [H]: the mean over its standard
    error, from means over blocks of the rows that count (`rows`, bool [B, H, n]).

    `step`: of the grid on which a row's x lies, if there is one, else 0. The spread of
    the blocks is taken as at least half a step of their means, since a smaller one is not
    seen on the grid (as in `numdev.metrics.bias`). NaN for fewer than FEWEST_BLOCKS
    blocks and where they have no spread."""
    sums, counts = _block_sums(torch.where(rows, x, 0.0)), _block_sums(rows.to(x.dtype))
    seen = counts > 0
    n = seen.sum(dim=-1).to(x.dtype)
    means = torch.where(seen, sums / counts, 0.0)
    middle = means.sum(dim=-1) / n
    squares = torch.where(seen, means - middle[:, None], 0.0).square().sum(dim=-1)
    deviation = (squares / (n - 1)).sqrt()
    spread = torch.maximum(deviation, 0.5 * step * n / counts.sum(dim=-1))
    few = (n < FEWEST_BLOCKS) | (spread == 0)
    return (middle / (spread / n.sqrt())).masked_fill(few, math.nan)


def _block_sums(x: Tensor) -> Tensor:
    """Returns the sums of x [B, H, n] over blocks of rows, [H, B · blocks], the first
    sequence's first. A sequence has BLOCKS blocks (at most n), one alone where there are
    BLOCKS sequences or more; its last ones may be short, or empty and 0."""
    batch, heads, n = x.shape
    blocks = min(1 if batch >= BLOCKS else BLOCKS, n)
    width = -(-n // blocks)
    padded = torch.nn.functional.pad(x, (0, blocks * width - n))
    sums: Tensor = padded.unflatten(-1, (blocks, width)).sum(dim=-1)
    return sums.transpose(0, 1).reshape(heads, -1)


def largest_running_sum(error: Tensor, rows: Tensor) -> Tensor:
    """Returns the largest |running sum of errors| of each sequence over rms · sqrt(rows),
    [B, H]: near 1 for errors of random sign. NaN for a sequence without a row that
    counts, and where all errors are 0. `error`, `rows` (which count, bool): [B, H, n]."""
    counted = torch.where(rows, error, 0.0)
    count = rows.sum(dim=-1).to(error.dtype)
    size = (counted.square().sum(dim=-1) / count).sqrt()
    return counted.cumsum(dim=-1).abs().amax(dim=-1) / (size * count.sqrt())


def bias_and_t(
    error: Tensor, exact: Tensor, scale: Tensor, rows: Tensor, fmt: Format
) -> tuple[Tensor, Tensor]:
    """Returns the mean error in ulps along the exact value's sign, and its t, [H] each.
    `error`, `exact`, and `scale`, the term scale sum |P V|: [B, H, n, d]. `rows`: which
    count, bool [B, H, n]. An ulp is that of `fmt` at the exact value, or, where that has
    cancelled, at scale / CANCELLED."""
    ulps = error / ulp(torch.maximum(exact.abs(), scale / CANCELLED), fmt)
    along = (ulps * exact.sign()).mean(dim=-1)
    return mean_by_head(along, rows), t_by_head(along, rows, step=1.0 / error.shape[-1])


Numbers = dict[str, float | None]  # of one head, by name


def numbers_by_head(columns: Columns) -> list[Numbers]:
    """Returns the numbers of each head by name, None for NaN and infinity. `columns`: at
    least one. Waits for the device, once."""
    rows = torch.stack([x.double() for x in columns.values()], dim=-1).tolist()
    return [
        {
            name: x if math.isfinite(x) else None
            for name, x in zip(columns, row, strict=True)
        }
        for row in rows
    ]


# --- of W_Q ---------------------------------------------------------------------------
# Terms of the error of dW_Q are R_T = (P K)[T]^T X[T] of formula 2
# (`numdev.studies.diagnose.bias_chain`), (P K) [T] pulled back to W_Q's output. They are
# matrices of rank 1 and are never made: their Gram matrix is the Hadamard product of that
# of (P K) and that of X. Its trace is the sum of all |R_T|^2, its largest eigenvalue that
# sum along the leading direction.


def spectral_numbers(projection: Projection, heads: int) -> Columns:
    """Returns the largest singular value of each head's rows of W_Q (`spectral_norm`),
    and that value over the heads' median (`spectral_ratio`), [H] each; NaN for a head
    whose rows are not finite. `heads`: how many query heads W_Q has."""
    (largest,) = spectral_norms([projection.weight.unflatten(0, (heads, -1))])
    return {
        "spectral_norm": largest,
        "spectral_ratio": largest / largest.nanquantile(0.5),
    }


def share_in_one_direction(projection: Projection, PK: Tensor) -> Tensor:
    """Returns the share of sum_T |R_T|^2 in one direction, [H], with R_T = (P K)[T]^T
    X[T]. `PK`: P K, [B, H, n, head_dim] in fp64, 0 in rows that do not count. NaN for a
    head where no token has an R_T. Of more than MAX_TOKENS tokens MAX_TOKENS are taken,
    evenly spread."""
    at_weights = projection.pull(PK).double().flatten(0, 1)  # [B n, H, head_dim]
    n = len(at_weights)
    taken = min(n, MAX_TOKENS)
    tokens = torch.arange(taken, device=PK.device) * n // taken
    x = projection.x.double().flatten(0, 1)[tokens]
    heads_at_once = max(1, GRAM_BYTES // (8 * taken**2))
    shares = []
    for a in at_weights[tokens].transpose(0, 1).split(heads_at_once):
        gram = (a @ a.mT).mul_(x @ x.mT)  # [heads, taken, taken]
        shares.append(
            largest_eigenvalue(gram) / gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        )
    return torch.cat(shares)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """Returns the largest eigenvalue, [H], of each of the symmetric positive
    semi-definite matrices [H, n, n] in fp64; NaN for a matrix that is not finite. Random
    numbers are the same in every call. By Lanczos' method with full reorthogonalisation
    (Golub & Van Loan, Matrix Computations, section 10.1): from below, to about 1 % where
    no direction is much stronger than the others."""
    # No element is larger than the largest of the diagonal, nor NaN without one there.
    finite = gram.diagonal(dim1=-2, dim2=-1).isfinite().all(dim=-1)
    matrix = torch.where(finite[:, None, None], gram, 0.0)
    heads, n, _ = matrix.shape
    generator = torch.Generator("cpu").manual_seed(0)
    b = torch.randn(n, 1, generator=generator, dtype=matrix.dtype, device="cpu").to(
        matrix.device
    )
    # An orthonormal basis of span(b, G b, G^2 b, ...); columns are 0 where the space is
    # exhausted.
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
