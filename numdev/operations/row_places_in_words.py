"""Places of rows in words, of whatever operation: `rows 64 to 99`, `every 64th row`."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 0.5  # of a unit's rows: larger sets are not described


def where(bad: Tensor, rows: Tensor | None, noun: str = "row") -> str | None:
    """Returns in words which rows of a head are bad (bool [B, rows]): `row 5`, `rows 64
    to 99`, `every 64th row from 63`, of two that are no neighbours `2 rows, the first 2,
    the last 9`; and where all lie in one of several batch entries ` of batch entry 1`
    behind it. For unevenly spread rows, and for more than half of the rows, only `batch
    entry 1 alone`; None where these lie in several entries, or there is one entry. None
    without a bad row. `rows`: the positions of these rows in the call, None where all are
    measured; `noun`: what a row is called."""
    entries, of = bad.any(dim=1).nonzero().flatten().tolist(), bad.any(dim=0)
    alone = f"batch entry {entries[0]}" if len(bad) > len(entries) == 1 else ""
    at = of.nonzero().flatten() if rows is None else rows[of]
    if not entries or len(at) > MOST * len(of) or len(at.diff().unique()) > 1:
        return f"{alone} alone" if alone else None
    return f"{in_words(at, noun)} of {alone}" if alone else in_words(at, noun)


STRIDES = (128, 64, 32, 16)  # of rows: tiles


def phrases_for_other_lengths(
    bad: Tensor, rows: Tensor | None, noun: str = "row"
) -> tuple[str, ...]:
    """Returns phrases for a head's bad rows that hold in calls of other lengths too: `row
    5`, `every 64th row from 63`, `all rows from 64 on`. `bad`: bool [B, rows]; a row
    counts that is bad in any batch entry. Empty where `rows` is not None (only some rows
    are measured), and where no phrase holds."""
    of = bad.any(dim=0)
    at = of.nonzero().flatten()
    if rows is not None or not len(at):
        return ()
    first, last, n = int(at[0]), int(at[-1]), len(of)
    phrases = [f"{noun} {first}"] if len(at) == 1 < n else []
    for stride in STRIDES if len(at) <= MOST * n else ():
        every = torch.arange(first, n, stride, device=at.device)
        if first < stride and every.equal(at):
            phrases.append(f"{_every_nth(stride)} {noun} from {first}")
    if last == n - 1 and len(at) == n - first and first >= min(STRIDES):
        phrases.append(f"all {noun}s from {first} on")
    return tuple(phrases)


def _every_nth(stride: int) -> str:
    """Returns `every 1st`, `every 2nd`, `every 64th`, ...: the ordinal of a stride."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(
        stride % 10 * (stride % 100 not in (11, 12, 13))
    )
    return f"every {stride}{ending or 'th'}"


def in_words(at: Tensor, noun: str = "row") -> str:
    """Returns places `at`, int64 [n], ascending and at least one, in words: `row 5`,
    `rows 64 to 99`, `every 64th row from 63`; uneven places, and two that are not
    neighbours, as `3 rows, the first 2, the last 9`."""
    first, last, steps = int(at[0]), int(at[-1]), at.diff().unique().tolist()
    if steps in ([], [1]):
        return f"{noun}s {first} to {last}" if steps else f"{noun} {first}"
    if len(steps) > 1 or len(at) == 2:
        return f"{len(at)} {noun}s, the first {first}, the last {last}"
    return f"{_every_nth(steps[0])} {noun} from {first}"
