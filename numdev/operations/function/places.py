"""Where a function errs: places of an axis that err while the others do not, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.operations.function.yardstick import Errors
from numdev.operations.row_places_in_words import MOST, in_words

BEYOND = 3.0  # times what is explained, and what the median place errs
NEARLY_ALL = 0.9  # of the squared error
LEAST_PLACES = 4  # of an axis, below which most of them say nothing


def places_that_err(output: Tensor, errors: Errors) -> str | None:
    """Returns in words which places of one axis err: `row 3 of axis 0`, `every 16th place
    from 15 of axis 1`, of two that are no neighbours `2 rows, the first 2, the last 9 of
    axis 0`. The places are at most half of the axis, one after another or evenly spread,
    and have at least NEARLY_ALL of the squared error. Of several such axes the one whose
    places have most of it is named. None where no axis has such places, as where all err;
    axes of fewer than LEAST_PLACES places are not looked at. `output`: fp64, of the
    truth's shape; an element that is not finite counts as without an error."""
    error = torch.where(errors.usable & output.isfinite(), output - errors.truth, 0.0)
    allowed = torch.maximum(errors.mean_square, errors.allowed_plain)
    total = error.square().sum()
    best: tuple[float, str] | None = None
    for axis, size in enumerate(error.shape):
        if size < LEAST_PLACES:
            continue
        bad = _bad_places(error, allowed, axis)
        if not len(bad) or len(bad) > MOST * size or len(bad.diff().unique()) > 1:
            continue
        share = float(error.index_select(axis, bad).square().sum() / total)
        if share >= NEARLY_ALL and (best is None or share > best[0]):
            noun = "place" if axis else "row"
            best = (share, f"{in_words(bad, noun)} of axis {axis}")
    return None if best is None else best[1]


def _bad_places(error: Tensor, allowed: Tensor, axis: int) -> Tensor:
    """Returns the places of an axis, ascending, int64, whose rms error is more than
    BEYOND times the allowed one, and more than BEYOND times the median place's ratio of
    the two. `allowed`: mean squares, of the shape of `error`."""
    others = [i for i in range(error.ndim) if i != axis]
    allowed = allowed.clamp_min(1e-300)
    square, limit = (x.sum(others) if others else x for x in (error.square(), allowed))
    ratio = (square / limit).sqrt()
    typical = max(1.0, float(ratio.median()))
    return (ratio > BEYOND * typical).nonzero().flatten()
