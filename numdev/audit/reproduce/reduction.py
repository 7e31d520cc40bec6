"""The smallest call that still shows a finding: delta debugging on the axes of attention.

`reduce` leaves out heads, sequences, keys and query rows for as long as the question "does it still
show?", which runs the real kernel, is answered yes: halves first, then smaller pieces (Zeller and
Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002).

Where causality or a window hides keys, a range of rows and keys is the same call with another
`causal_offset`, and only ranges are tried. Cuts that keep the offset come first, since a kernel may
be wrong at one alignment only. A call with as many queries as keys keeps as many: where they differ
kernels align causality at one corner or the other, and a kernel that is right could be shown to
differ for that alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, visible
from numdev.errors import MeasurementError
from numdev.sources.tensorfile import storage_order

Shows = Callable[[AttentionCase], bool]
TRIES = 3  # how often the input and the result are asked: a kernel may differ from run to run
# Which are cut together: rows at the start, rows at the end, keys at the start, keys at the end.
SQUARE_CUTS = ((0, 1, 0, 1), (1, 0, 1, 0))
CUTS = (*SQUARE_CUTS, (0, 1, 0, 0), (0, 0, 0, 1), (1, 0, 1, 0), (0, 0, 1, 0), (1, 0, 0, 0))
# Into how many pieces an axis is cut, round by round: all axes become coarsely small first.
ALL = 1 << 30
PIECES = (4, 32, ALL)
# The axes of a case's tensors; a mask may have the last ones alone, and broadcast along them.
AXES = {
    "q": ("batch", "head", "row", "feature"),
    "k": ("batch", "kv_head", "key", "feature"),
    "v": ("batch", "kv_head", "key", "feature"),
    "grad_out": ("batch", "head", "row", "feature"),
    "mask": ("batch", "head", "row", "key"),
    "sinks": ("head",),
}


def reduce(
    case: AttentionCase, still_shows: Shows, budget_s: float = 60.0, *, head: int | None = None
) -> AttentionCase:
    """The smallest form of `case` for which `still_shows` holds; deterministic if that is.

    `head` is the query head to begin with. No candidate is begun after `budget_s` seconds. Raises
    MeasurementError where the finding does not show in `case` itself.
    """
    if not any(still_shows(case) for _ in range(TRIES)):
        raise MeasurementError(
            f"the finding does not show again in case {case.ref.case!r}, {TRIES} times asked"
        )
    search = _Search(case, still_shows, time.monotonic() + budget_s)
    search.heads(head)
    if case.mask is not None:
        search.accept(dataclasses.replace(search.best, mask=None))
    for pieces in PIECES:
        search.fewer("batch", pieces)
        if case.restricts_positions:
            search.ranges()
        else:
            search.fewer("key", pieces)
            search.fewer("row", pieces)
    search.drop_idle_restrictions()
    return search.best if any(still_shows(search.best) for _ in range(TRIES)) else case


@dataclasses.dataclass
class _Search:
    """The smallest case so far that shows."""

    best: AttentionCase
    shows: Shows
    deadline: float

    def accept(self, candidate: AttentionCase) -> bool:
        """Make the candidate the best case if it shows; False once the budget is spent."""
        if time.monotonic() >= self.deadline or not self.shows(candidate):
            return False
        self.best = candidate
        return True

    def fewer(self, axis: str, pieces: int = ALL) -> None:
        """Leave out indices of an axis of the best case."""
        case = self.best
        size = {"batch": len(case.q), "row": case.q_len, "key": case.kv_len, "head": case.heads}
        _fewest(size[axis], lambda few: self.accept(part(case, **{axis: few})), pieces)

    def heads(self, head: int | None) -> None:
        """The given head with its kv head; else its group; else as few kv heads as will do; then
        as few query heads of a single kv head."""
        case, group = self.best, self.best.group

        def groups(kv_heads: Sequence[int]) -> bool:
            heads = [h * group + g for h in kv_heads for g in range(group)]
            return self.accept(part(case, head=heads, kv_head=kv_heads))

        if head is not None and case.heads > 1:
            if self.accept(part(case, head=[head], kv_head=[head // group])):
                return
            groups([head // group])
        if self.best.kv_heads > 1:
            _fewest(case.kv_heads, groups)
        if self.best.kv_heads == 1:
            self.fewer("head")

    def ranges(self) -> None:
        """Cut rows and keys off the ends, by bisection."""
        square = self.best.q_len == self.best.kv_len
        for rows_first, rows_last, keys_first, keys_last in SQUARE_CUTS if square else CUTS:
            case = self.best
            n, m = case.q_len, case.kv_len
            moves_rows, moves_keys = rows_first or rows_last, keys_first or keys_last
            most = min(n if moves_rows else m, m if moves_keys else n) - 1
            dropped, step = 0, (most + 1) // 2
            while step:
                t = dropped + step
                rows = range(rows_first * t, n - rows_last * t)
                keys = range(keys_first * t, m - keys_last * t)
                if t <= most and self.accept(at_positions(case, rows, keys)):
                    dropped = t
                step //= 2

    def drop_idle_restrictions(self) -> None:
        """Drop causality and a window that hide no key, and a mask that changes no score."""
        case = self.best
        rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
        everywhere = visible(dataclasses.replace(case, mask=None), rows, keys)
        if everywhere is not None and bool(everywhere.all()):
            self.accept(dataclasses.replace(case, is_causal=False, causal_offset=0, window=None))
        mask = self.best.mask
        if mask is not None and bool((mask if mask.dtype == torch.bool else mask == 0).all()):
            self.accept(dataclasses.replace(self.best, mask=None))


def _fewest(size: int, shows: Callable[[list[int]], bool], pieces: int = ALL) -> None:
    """Leave out pieces of `size` items, halves first, for as long as `shows` says yes; at most
    `pieces` pieces. Never leaves nothing."""
    items = list(range(size))
    smallest = max(1, -(-size // pieces))
    size = (size + 1) // 2
    while len(items) > 1:
        start = 0
        while start < len(items):
            fewer = items[:start] + items[start + size :]
            if fewer and shows(fewer):
                items = fewer
            else:
                start += size
        if size <= smallest:
            return
        size = max(smallest, min(size, len(items)) // 2)


def at_positions(case: AttentionCase, rows: range, keys: range) -> AttentionCase:
    """The call with a range of query rows and of keys, each row seeing what it saw among them.

    Of rows from r and keys from k, j <= i + offset becomes j' + k <= i' + r + offset, so the offset
    moves by r - k.
    """
    moved = rows[0] - keys[0] if case.restricts_positions else 0
    smaller = part(case, row=rows, key=keys)
    return dataclasses.replace(smaller, causal_offset=case.causal_offset + moved)


def part(case: AttentionCase, **indices: Sequence[int]) -> AttentionCase:
    """The call with the given indices of some axes alone (`batch`, `head`, `kv_head`, `row`,
    `key`), its tensors copied, dense, in their own order of axes in memory: kernels choose by it.

    Heads and kv heads must go together so that query head h still reads kv head h // group;
    positions are the caller's business.
    """
    parts: dict[str, Any] = {}
    for name, axes in AXES.items():
        x: Tensor | None = getattr(case, name)
        if x is None:
            continue
        for dim, axis in enumerate(axes[-x.ndim :]):
            broadcasts = name == "mask" and x.shape[dim] == 1
            if axis in indices and not broadcasts and len(indices[axis]) < x.shape[dim]:
                order = storage_order(x)
                index = torch.tensor(list(indices[axis]), device=x.device)
                picked = x.detach().permute(order).index_select(order.index(dim), index)
                x = picked.permute([order.index(axis) for axis in range(x.ndim)])
        parts[name] = x
    return dataclasses.replace(case, **parts)
