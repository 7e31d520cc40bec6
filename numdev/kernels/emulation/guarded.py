"""The guarded softmax: plain online softmax whose P is never 1 at a row's maximum.

Equal maxima have P = exp(0) = 1 exactly in plain softmax. 1 · V keeps the zero low bits of V, and
sums of such terms of one sign are rounded to one side (Qiu & Yao, arXiv 2510.04212). Here

    P = w exp(S - m),  l = rowsum P,  O = P V / l,  L = m + log(l / w),

with m the row's true maximum, and w a weight of the row: one of the 64 odd numbers 129, 131 ... 255
over 256. w has 8 significant bits, so bfloat16 and float16 hold it exactly and P at the maximum is
not rounded; it is odd, so a product with V fills low bits that were zero. O / l and L do not hear
of it. No score is asked whether it is tied: ties of any number, within a tile, across tiles or with
a sink, are met alike, and nothing depends on m, so a shift of all scores changes nothing.

Which w: that of number frac(place / phi) of 64, phi the golden ratio (Fibonacci hashing), where
place = the row's position + kv_len. So w goes evenly through all 64 in any stretch of rows, also in
every second or 64th, and in decoding, where a row stands at 0 and kv_len grows. One w for all rows
would spare the sum its common sign, but where the tied keys have the same V in every row (sinks) it
would round alike in every row: the error of a feature would not average out (docs/method.md has
both, measured).

Its limits. It changes how P V is rounded, and nothing after it: the last cast of O errs as the
floor does, which is one-sided too where rows are alike. Where P V is summed in fp32 there is
nothing to gain. Other rows' w say nothing of a row: an error of one row is as large as ever. Rows
of one position share w over batches and heads. The smallest P lose at most one binade. In backward
P is normalised (exp(S - L)), and is what it is in plain softmax, a power of two included; with
`algorithm: plain` it is so in forward, and w would cancel before P meets V: that is refused. So are
formats for P of fewer than 8 bits, which round w.

`triton-flash` has the same in `numdev.kernels.triton_flash.tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.formats import Format

BITS = 8
"""Significant bits of a weight."""
GOLDEN = 2654435769
"""2^32 / phi."""


def weights(case: AttentionCase, dtype: torch.dtype) -> Tensor:
    """w of each row: [q_len]."""
    at = case.positions
    at = torch.arange(case.q_len, device=case.q.device) if at is None else at
    number = ((at + case.kv_len) * GOLDEN & 0xFFFFFFFF) >> 26
    return (2 * number + 129).to(dtype) / 256


def check(formats: dict[str, Format | None]) -> None:
    """Raises Refused where a site's format does not hold the weights."""
    for site, fmt in formats.items():
        if fmt is not None and fmt.precision < BITS:
            raise Refused(f"the guarded softmax needs {BITS} bits, and {site} is in {fmt.name}")
