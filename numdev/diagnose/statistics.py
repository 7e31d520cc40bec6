"""Means, and how sure they are: what the numbers of a diagnosis share.

All is per query head, over its rows that see more than one key. Rows of a sequence share keys and
values, so a t is of means over blocks of rows, sixteen to a sequence, or the sequences themselves
where there are sixteen or more. A number is NaN where it means nothing, and not finite where what
it is made of is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.diagnose.report import Bias
from numdev.formats import Format, ulp

BLOCKS = 16  # of rows, in a sequence; of as many sequences each is one block
FEWEST_BLOCKS = 4
CANCELLED = 16.0  # an exact value below its term scale over this is no measure of its own errors
Columns = Mapping[str, Tensor]  # numbers by name, [H] each


def mean(x: Tensor, rows: Tensor) -> Tensor:
    """[H]: the mean of [B, H, n] over the rows that count; NaN where there is none."""
    return torch.where(rows, x, 0.0).sum(dim=(0, 2)) / rows.sum(dim=(0, 2))


def rms(x: Tensor, rows: Tensor) -> Tensor:
    """[H]: the root of the mean square."""
    return mean(x.square(), rows).sqrt()


def norm(x: Tensor) -> Tensor:
    """[H]: the Frobenius norm of what each head has, [H, ...]."""
    size: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=-1)
    return size


def t_of(x: Tensor, rows: Tensor, *, step: float = 0.0) -> Tensor:
    """[H]: the mean of [B, H, n] over its standard error, from means over blocks of rows.

    `step` is that of the grid on which a row's x lies, if it lies on one: a spread of the blocks
    below half a step of their means is missed, not small (as in `numdev.metrics.bias`). NaN for
    fewer than FEWEST_BLOCKS blocks and where they have no spread."""
    sums, counts = _in_blocks(torch.where(rows, x, 0.0)), _in_blocks(rows.to(x.dtype))
    seen = counts > 0
    n = seen.sum(dim=-1).to(x.dtype)
    means = torch.where(seen, sums / counts, 0.0)
    middle = means.sum(dim=-1) / n
    apart = torch.where(seen, means - middle[:, None], 0.0).square().sum(dim=-1)
    spread = torch.maximum((apart / (n - 1)).sqrt(), 0.5 * step * n / counts.sum(dim=-1))
    few = (n < FEWEST_BLOCKS) | (spread == 0)
    return (middle / (spread / n.sqrt())).masked_fill(few, math.nan)


def _in_blocks(x: Tensor) -> Tensor:
    """[B, H, n] as sums over blocks, [H, blocks]."""
    batch, heads, n = x.shape
    blocks = min(1 if batch >= BLOCKS else BLOCKS, n)
    width = -(-n // blocks)
    padded = torch.nn.functional.pad(x, (0, blocks * width - n))
    sums: Tensor = padded.unflatten(-1, (blocks, width)).sum(dim=-1)
    return sums.transpose(0, 1).reshape(heads, -1)


def bias(error: Tensor, exact: Tensor, scale: Tensor, rows: Tensor, fmt: Format) -> list[Bias]:
    """The bias of each head, of errors [B, H, n, d] of exact values; `scale` is their term scale,
    sum |P V|. An ulp is that of `fmt` at the exact value, or where that has cancelled, at
    scale / CANCELLED."""
    ulps = error / ulp(torch.maximum(exact.abs(), scale / CANCELLED), fmt)
    count = rows.sum(dim=(0, 2))
    features = torch.where(rows[..., None], ulps, 0.0).sum(dim=(0, 2)) / count[:, None]  # [H, d]
    worst = features.abs().argmax(dim=-1)
    along = (ulps * exact.sign()).mean(dim=-1)
    feature = features.gather(-1, worst[:, None])[:, 0]
    columns = {
        "mean": features.mean(dim=-1),
        "rms": mean(ulps.square().mean(dim=-1), rows).sqrt(),
        "t": t_of(along, rows, step=1.0 / error.shape[-1]),
        "outward": mean(along, rows),
        "feature": feature,
        "worst_feature": worst.double().masked_fill(~feature.isfinite(), math.nan),
    }
    return [Bias.model_validate(numbers) for numbers in by_head(columns)]


def by_head(columns: Columns) -> list[dict[str, Any]]:
    """The numbers of each head by name, None for NaN and infinity. Waits for the device, once."""
    table = torch.stack([x.double() for x in columns.values()], dim=-1).tolist()
    return [
        {name: x if math.isfinite(x) else None for name, x in zip(columns, row, strict=True)}
        for row in table
    ]
