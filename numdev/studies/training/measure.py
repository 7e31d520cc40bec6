"""Measures a lane at a recorded step and its distances from the golden lane, and marks
the losses that are spikes. A number that is not finite is None, with the reason in
`nulls`."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from numdev.metrics.tensor_distances import paired
from numdev.studies.training.report import DistanceRow, TrainRow
from numdev.studies.training.variant_training import Lane

NOT_YET = "before the first update"
NOT_FINITE = "not finite"
NOT_NOTED = "attention noted no scores"
UNDEFINED = "undefined: one of the two is zero"
DISTANCES = ("max_abs", "mean_abs", "rel", "w1", "equal")
# The rule of a spike, see `is_spike`
PAST, LEAST = 20, 3
TIMES, DEVIATIONS = 1.2, 6.0


def train_row(lane: Lane, seed: int, step: int) -> TrainRow:
    """Returns the row of a lane at `step`, after its last update. A number that is not
    finite is None. At step 0 there was no update, and all numbers but the spectral norm
    are None. The largest score is None too where attention did not note scores. `nulls`
    has a reason for each number that is None."""
    scores = lane.attention.largest
    norms = spectral_norms(list(lane.network.query_weights()))
    values: dict[str, float | None] = {
        "loss": finite_or_none(lane.loss),
        "grad_norm": finite_or_none(lane.norm),
        "lr": lane.lr,
        "max_logit": finite_or_none(torch.stack(scores).amax()) if scores else None,
        "spectral_norm": finite_or_none(norms.amax()),
    }
    reasons = dict.fromkeys(values, NOT_FINITE if step else NOT_YET)
    reasons["spectral_norm"] = NOT_FINITE  # of the weights, which are always there
    if step and not scores:
        reasons["max_logit"] = NOT_NOTED
    nulls = {name: reasons[name] for name, value in values.items() if value is None}
    return TrainRow(
        seed=seed,
        variant=lane.variant.name,
        step=step,
        loss=values["loss"],
        grad_norm=values["grad_norm"],
        lr=values["lr"],
        max_logit=values["max_logit"],
        spectral_norm=values["spectral_norm"],
        nulls=nulls,
    )


def distance_row(
    ours: Mapping[str, Tensor],
    golden: Mapping[str, Tensor],
    *,
    of: Literal["weights", "gradient"],
    seed: int,
    variant: str,
    step: int,
) -> DistanceRow:
    """Returns the distance between two sets of parameters (or gradients, as `of` says),
    all tensors together, as a row. `ours` has every name of `golden`, in the same shape;
    other names are ignored. `golden`: at least one tensor. `rel` is relative to `golden`.
    All distances are None where an element of either set is not finite; one that divides
    by zero is None too."""
    a, b = (torch.cat([x[name].reshape(-1) for name in golden]) for x in (ours, golden))
    difference = paired(a, b)
    values = {name: getattr(difference, name) for name in DISTANCES}
    if difference.nonfinite:
        values = dict.fromkeys(values)
    why = NOT_FINITE if difference.nonfinite else UNDEFINED
    nulls = {name: why for name, value in values.items() if value is None}
    return DistanceRow(
        of=of,
        seed=seed,
        variant=variant,
        step=step,
        elements=difference.elements,
        nonfinite=difference.nonfinite,
        nulls=nulls,
        **values,
    )


@torch.no_grad()
def spectral_norms(weights: list[Tensor]) -> Tensor:
    """Returns the spectral norm of every head's part W of W_Q, [layers, heads] in fp64:
    the root of the largest eigenvalue of W Wᵀ, good to about 1e-15. NaN where W Wᵀ is not
    finite. `weights`: [heads, head_dim, width] for each layer, at least one, all of one
    shape."""
    # [layers, heads, head_dim, width]
    stacked = torch.stack([w.double() for w in weights])
    squares = stacked @ stacked.transpose(-1, -2)
    finite = squares.isfinite().all(dim=(-1, -2))
    squares = squares.where(finite[..., None, None], 0.0)
    largest = torch.linalg.eigvalsh(squares)[..., -1].clamp(min=0.0).sqrt()
    norms: Tensor = largest.where(finite, math.nan)
    return norms


def finite_or_none(x: Tensor | float | None) -> float | None:
    """Returns the value of a scalar; None for None, NaN and infinity."""
    value = math.nan if x is None else float(x)
    return value if math.isfinite(value) else None


def with_spikes(rows: Iterable[TrainRow]) -> Iterator[TrainRow]:
    """Yields the rows, as copies, with `spike` set by `is_spike`. The rows of a seed and
    variant are to come in the order of their steps. A loss that is None is no spike, and
    is left out of the losses that later ones are compared with."""
    pasts: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=PAST))
    for row in rows:
        past = pasts[row.seed, row.variant]
        spike = row.loss is not None and is_spike(row.loss, past)
        yield row.model_copy(update={"spike": spike})
        if row.loss is not None:
            past.append(row.loss)


def is_spike(loss: float, past: Iterable[float]) -> bool:
    """Whether a loss is above both 1.2 times the median of the losses before it, and that
    median by more than 6 times their median absolute deviation. False with fewer than 3
    losses before it. `past`: the losses before it, all finite, of which `with_spikes`
    gives the last 20."""
    before = list(past)
    if len(before) < LEAST:
        return False
    middle = median(before)
    deviation = median(abs(x - middle) for x in before)
    return loss > TIMES * middle and loss > middle + DEVIATIONS * deviation
