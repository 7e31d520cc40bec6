"""The stabilised softmax of Qiu & Yao (arXiv 2510.04212): its options, and by what it shifts a row.

Where several scores of a row and a tile are its maximum r, P would be exactly 1 for each of them,
and same-signed sums of such rows of V are rounded to one side. The row is therefore shifted by
beta r if r > 0 and by 0 if not, and online softmax goes on with that as the tile's maximum. (The
printed algorithm takes the running maximum of unadjusted ones, which undoes it; here as in the
authors' code.) Softmax is invariant under a shift, so only roundings change.

Its limits. P is at most exp(-(beta - 1) r). The authors' code keeps l above 1e-10, and so is wrong,
silently, from (beta - 1) r = 23 on; here the row becomes NaN where its largest P would be below
`smallest`, the smallest normal number of the formats P goes through. Where r < 0, P is at most
exp(r), and is lost as those formats lose it: a row whose l is 0 is NaN. One tied tile is enough to
shift the whole row by 0. At r = 0 nothing changes.

`triton-flash` and `emulated` mean the same by these options. The former does it on the device, in
`numdev.kernels.triton_flash.forward`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.errors import UsageError

DEFAULTS: Mapping[str, float] = {"beta": 2.0, "tie_tolerance": 1e-3}
"""As the authors' later runs have them."""
LEAST: Mapping[str, float] = {"beta": 1.0, "tie_tolerance": 0.0}


def check(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a beta or a tie tolerance that is no such number, or is given beside
    another `softmax`. None is none given."""
    for name, least in LEAST.items():
        value = options[name]
        if value is None:
            continue
        if options["softmax"] != "stabilised":
            raise UsageError(f"{name} is of the stabilised softmax", hint="softmax: stabilised")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and least <= value < math.inf):
            raise UsageError(f"{name} is {value!r}", hint=f"expected a number from {least} on")


def shift(S: Tensor, *, beta: float, tie_tolerance: float, smallest: float) -> Tensor:
    """By what each row of a tile wants to be shifted: [...] of scores [..., keys].

    Its maximum r; or, where more than one score lies within the tolerance of r, beta r if r > 0 and
    0 if not, and NaN where exp(-(beta - 1) r) < smallest. A row whose every score is -inf has -inf,
    one with a NaN has NaN.
    """
    r = S.amax(dim=-1)
    tied = ((r - tie_tolerance)[..., None] <= S).sum(dim=-1) > 1
    shifted = torch.where(r > 0, beta * r, 0.0)
    shifted = shifted.masked_fill_((beta - 1.0) * r > -math.log(smallest), math.nan)
    return torch.where(tied & (r > -math.inf), shifted, r)
