"""What is measured of a lane at a recorded step: its row, and its distances from the golden lane.

Whatever is not finite becomes None, and the row's `nulls` says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.metrics.paired import paired
from numdev.training.lane import Lane, groups_of
from numdev.training.report import DistanceRow, TrainRow

NOT_YET = "before the first update"
NOT_FINITE = "not finite"
UNDEFINED = "undefined: one of the two is zero"


def row_of(lane: Lane, seed: int, step: int) -> TrainRow:
    """The row of a lane that has just made update `step`; at step 0 of one that made none."""
    seen = lane.attention.largest
    updated = step > 0
    loss = number(lane.loss) if updated else None
    grad_norm = number(lane.norm) if updated else None
    max_logit = number(torch.stack(seen).amax()) if updated and seen else None
    norms = spectral_norms(list(lane.network.query_weights()))
    where = _largest(norms)
    of_updates = {"loss": loss, "grad_norm": grad_norm, "max_logit": max_logit}
    why = NOT_FINITE if updated else NOT_YET
    nulls = {name: why for name, value in of_updates.items() if value is None}
    return TrainRow(
        seed=seed,
        variant=lane.variant.name,
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        lr=lane.lr if updated else None,
        max_logit=max_logit,
        spectral_norm=norms[where[0]][where[1]] if where else None,
        spectral_where=f"layer {where[0]} head {where[1]}" if where else None,
        spectral_norms=tuple(map(tuple, norms)) if where else (),
        nulls={
            **nulls,
            **({} if updated else {"lr": NOT_YET}),
            **({} if where else {"spectral_norm": NOT_FINITE}),
        },
    )


def distances(
    ours: Mapping[str, Tensor],
    golden: Mapping[str, Tensor],
    *,
    seed: int,
    variant: str,
    step: int,
    of: Literal["weights", "gradient"],
) -> Iterator[DistanceRow]:
    """Rows of all groups of parameters, whose names are those of both. Of a group in which anything
    is not finite no distance is given: it would be that of what is left."""
    for group, names in groups_of(list(golden)).items():
        a, b = (torch.cat([x[name].reshape(-1) for name in names]) for x in (ours, golden))
        found = dataclasses.asdict(paired(a, b))
        counts: dict[str, Any] = {name: found.pop(name) for name in ("elements", "nonfinite")}
        lost = bool(counts["nonfinite"])
        values: dict[str, Any] = {name: None if lost else value for name, value in found.items()}
        why = NOT_FINITE if lost else UNDEFINED
        nulls = {name: why for name, value in values.items() if value is None}
        named: dict[str, Any] = {"seed": seed, "variant": variant, "step": step, "of": of}
        yield DistanceRow(**named, group=group, nulls=nulls, **counts, **values)


@torch.no_grad()
def spectral_norms(weights: list[Tensor]) -> list[list[float]]:
    """The spectral norm of every head's [head_dim, width] part of W_Q, by layer and head: the root
    of the largest eigenvalue of W Wᵀ, in fp64, good to about 1e-15. NaN where W is not finite."""
    stacked = torch.stack([w.double() for w in weights])  # [layers, heads, head_dim, width]
    squares = stacked @ stacked.transpose(-1, -2)
    finite = squares.isfinite().all(dim=(-1, -2))
    squares = squares.where(finite[..., None, None], 0.0)
    largest = torch.linalg.eigvalsh(squares)[..., -1].clamp(min=0.0).sqrt()
    found: list[list[float]] = largest.where(finite, math.nan).tolist()
    return found


def _largest(norms: list[list[float]]) -> tuple[int, int] | None:
    """Layer and head of the largest; None where any is NaN."""
    places = [(n, layer, head) for layer, row in enumerate(norms) for head, n in enumerate(row)]
    if any(math.isnan(n) for n, _, _ in places):
        return None
    _, layer, head = max(places, key=lambda place: place[0])
    return layer, head


def number(x: Tensor | None) -> float | None:
    """A scalar's value; None where there is none, or it is not finite."""
    value = math.nan if x is None else float(x)
    return value if math.isfinite(value) else None
