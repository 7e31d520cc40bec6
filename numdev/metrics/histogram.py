"""How errors are spread: how many elements err by how much, in ulps of the format."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.metrics.metrics_by_name import ULPS
from numdev.metrics.yardstick import Yardstick

LEAST, MOST = ULPS


def by_ulps(output: Tensor, y: Yardstick) -> tuple[int, ...]:
    """Returns how many elements of `output` [B, H, rows, features] err by less than
    2^LEAST ulp, 0 included, then from there to less than twice that, and so on; the last
    of MOST - LEAST + 2 numbers counts all errors of 2^MOST ulp and more. An ulp is that
    of the term scale, as in `max_ulp`. Left out are rows that see no key, and elements
    that are not finite, or whose exact value or term scale is not."""
    error = (output.double() - y.reference).abs() / y.spacing
    counted = y.usable & error.isfinite()
    # frexp: error = m 2^e with m in [0.5, 1), so that e - 1 is the power of two below it
    power = torch.frexp(torch.where(counted, error, 0.0)).exponent.long() - 1
    power = torch.where(error > 0, power, LEAST - 1)[counted]
    return tuple(
        torch.bincount(
            power.clamp(LEAST - 1, MOST) - LEAST + 1, minlength=MOST - LEAST + 2
        ).tolist()
    )
