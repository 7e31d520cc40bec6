"""Where the stabilised softmax breaks on a call, in words.

It shifts a row by beta r where its maximum r > 0 is tied in a tile, and by 0 where r < 0 is. Every
P of the row is then at most exp(-(beta - 1) r), or exp(r), and may be below what P's format holds
(`numdev.kernels.emulation.stabilised`).
"""

from __future__ import annotations

import math

from numdev.diagnose.recipe import Computed
from numdev.diagnose.truth import Truth
from numdev.kernels.emulation.forward import smallest_weight


def broken(truth: Truth, found: Computed, head: int) -> str:
    """How many rows of a head lose every weight so, and from which maximum on; empty where none
    does."""
    made, kept = found.made, found.kept
    if made.beta is None:
        return ""
    seen = ~truth.exact.empty[:, head] & truth.exact.lse[:, head].isfinite()
    above = seen & kept.m[:, head].isnan()
    below = seen & ~above & kept.l[:, head].isnan()
    deepest = -math.log(smallest_weight(made, kept.case, kept.O.dtype))
    said = []
    if above.any() and made.beta > 1:
        said.append(
            f"in {int(above.sum())} rows of {int(seen.sum())} tied maxima r exceed "
            f"{deepest / (made.beta - 1):.3g}, and exp(-(beta - 1) r) is no normal number of P's "
            f"format (beta {made.beta:g})"
        )
    if below.any():
        said.append(
            f"in {int(below.sum())} rows of {int(seen.sum())} a maximum r < 0 is tied, the shift "
            "is 0, and every exp(S) is lost"
        )
    return "; ".join(said)
