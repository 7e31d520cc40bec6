"""What casting stored weights to a format costs."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.formats import FORMATS, Format, format_of, round_to
from numdev.report import WeightRow

WEIGHTS_AT_ONCE = 1 << 24


def weight_row(name: str, tensor: Tensor, fmt: Format) -> WeightRow:
    """Returns the report's row on what casting a stored tensor to a format costs.
    `max_abs` and `mean_abs` are of the errors' magnitudes, `rel` is the norm of the
    errors over that of the tensor. All three are None for a tensor without a usable
    element, and `rel` also for one of zeros. Raises UsageError for a dtype without a
    format, as of integers.

    Elements that are not finite in the format, such as those beyond its largest value,
    are counted in `nonfinite` and left out of all three. Sums are fp64; WEIGHTS_AT_ONCE
    elements at a time bound memory."""
    lossless = fmt.contains(format_of(tensor.dtype))
    parts = tensor.detach().reshape(-1).split(WEIGHTS_AT_ONCE) if tensor.numel() else ()
    sums = [_cast_sums(part, None if lossless else fmt) for part in parts]
    usable, largest, total, squares, norm = (
        torch.stack(sums).unbind(dim=1) if sums else torch.zeros(5, 1)
    )
    count = int(usable.sum())
    mean = float(total.sum()) / count if count else None
    size = float(norm.sum()) ** 0.5
    return WeightRow(
        tensor=name,
        shape=tuple(tensor.shape),
        stored=str(tensor.dtype).removeprefix("torch."),
        format=fmt.name,
        elements=tensor.numel(),
        nonfinite=tensor.numel() - count,
        max_abs=float(largest.max()) if count else None,
        mean_abs=mean,
        rel=float(squares.sum()) ** 0.5 / size if count and size else None,
    )


def _cast_sums(part: Tensor, fmt: Format | None) -> Tensor:
    """Returns fp64 [5]: how many elements stay finite in the cast to `fmt` (None: to a
    format that holds all, which changes nothing), the largest error, and the sums of
    |error|, error^2 and x^2 over these elements. `part`: at least one element."""
    wide = part.double()
    # What float32 holds is rounded there, in a third of the time and to the same values.
    small = fmt and part.dtype != torch.float64 and FORMATS["float32"].contains(fmt)
    error = (wide if fmt is None else round_to(part if small else wide, fmt)) - wide
    usable = error.isfinite()
    error, x = (torch.where(usable, y, 0.0) for y in (error.abs_(), wide))
    return torch.stack(
        [
            usable.sum().double(),
            error.max(),
            error.sum(),
            error.square().sum(),
            x.square().sum(),
        ]
    )
