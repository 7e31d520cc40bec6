"""Means, and how sure they are: what the numbers of a diagnosis share.

Everything is per query head and over its rows that see more than one key. Rows of a sequence share
keys and values, so that the errors of neighbours are not independent. A t is therefore of means
over blocks of rows: sixteen to a sequence, or the sequences themselves where there are sixteen or
more. That takes away what binds near rows, not what binds a whole sequence: the t says whether a
mean is more than the scatter of these rows, and not that other text would show it. Sequences that
begin alike are counted as if they did not.

A number is NaN where it means nothing; what is made of something that is not finite is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from numdev.diagnose.report import Bias
from numdev.formats import Format, ulp

BLOCKS = 16
"""Of rows, in a sequence; where there are as many sequences, each is one block."""
FEWEST_BLOCKS = 4
CANCELLED = 16.0
"""An exact value below its term scale over this has cancelled: it is no measure of its own errors.
"""
Columns = Mapping[str, Tensor]
"""Numbers by name, [H] each."""


def mean(x: Tensor, rows: Tensor) -> Tensor:
    """[H]: the mean of [B, H, n] over the rows that count; NaN where there is none."""
    return _kept(x, rows).sum(dim=(0, 2)) / rows.sum(dim=(0, 2))


def rms(x: Tensor, rows: Tensor) -> Tensor:
    """[H]: the root of the mean square."""
    return mean(x.square(), rows).sqrt()


def t_of(x: Tensor, rows: Tensor, *, step: float = 0.0) -> Tensor:
    """[H]: the mean of [B, H, n] over its standard error, from means over blocks of rows.

    `step` is that of the grid on which a row's x lies, if it lies on one: a spread of the blocks
    below half a step of their means is not measured but missed, and does not count as smaller (as
    in `numdev.metrics.bias`). NaN for fewer than FEWEST_BLOCKS blocks and where they have no
    spread."""
    sums, counts = _in_blocks(_kept(x, rows)), _in_blocks(rows.to(x.dtype))
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


def _kept(x: Tensor, rows: Tensor) -> Tensor:
    return torch.where(rows, x, 0.0)


def bias(error: Tensor, exact: Tensor, scale: Tensor, rows: Tensor, fmt: Format) -> list[Bias]:
    """The bias of each head, of errors [B, H, n, d] of exact values; `scale` is their term scale,
    sum |P V|. An ulp is that of `fmt` at the exact value, or where that has cancelled, at
    scale / CANCELLED."""
    ulps = error / ulp(torch.maximum(exact.abs(), scale / CANCELLED), fmt)
    outward = ulps * exact.sign()
    count = rows.sum(dim=(0, 2))
    features = _kept(ulps, rows[..., None]).sum(dim=(0, 2)) / count[:, None]  # [H, d]
    worst = features.abs().argmax(dim=-1)
    along = outward.mean(dim=-1)
    columns = {
        "mean": features.mean(dim=-1),
        "rms": mean(ulps.square().mean(dim=-1), rows).sqrt(),
        "t": t_of(along, rows, step=1.0 / error.shape[-1]),
        "outward": mean(along, rows),
        "feature": features.gather(-1, worst[:, None])[:, 0],
        "worst_feature": worst,
    }
    return [_bias(found) for found in by_head(columns)]


def _bias(found: dict[str, float | None]) -> Bias:
    feature = found.pop("worst_feature")
    known = feature is not None and found["feature"] is not None
    return Bias(**found, worst_feature=int(feature) if feature is not None and known else None)


def by_head(columns: Columns) -> list[dict[str, float | None]]:
    """The numbers of each head by name, None for NaN and infinity. Waits for the device, once."""
    table = torch.stack([x.double() for x in columns.values()], dim=-1).tolist()
    return [
        {name: x if math.isfinite(x) else None for name, x in zip(columns, row, strict=True)}
        for row in table
    ]
