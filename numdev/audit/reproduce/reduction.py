"""The smallest call that still shows a finding: delta debugging on the axes of attention.

`reduce` leaves out heads, sequences, keys and query rows for as long as the question "does it still
show?", which runs the real kernel, is answered yes: halves first, then smaller pieces (Zeller and
Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002).

Where causality or a window hides keys, leaving out positions must not move the others. A range of
rows and keys stays the same call with another `causal_offset`; cuts that keep the offset come
first, since a causal flag can say nothing else and another form may run another kernel. A call with
as many queries as keys keeps as many: where they differ kernels align causality at one corner or
the other, and a kernel that is right could be shown to differ for that alone. Arbitrary rows and
keys need positions as an explicit mask; that form is kept if it is much smaller.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask, visible
from numdev.errors import MeasurementError
from numdev.sources.tensorfile import storage_order

Shows = Callable[[AttentionCase], bool]
TRIES = 3  # how often the input, and at the end the result, is asked
FLAKY_TRIES = 5  # how often a candidate is, where the input did not show every time
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

    `head` is the query head to begin with. No candidate is begun after `budget_s` seconds. A
    finding that comes and goes must show in a candidate about as often as it did in the input.
    Raises MeasurementError where it does not show in `case` itself.
    """
    search = _Search(case, still_shows, budget_s)
    _heads(search, head)
    if case.mask is not None:
        search.accept(dataclasses.replace(search.best, mask=None))
    for pieces in PIECES:
        search.fewer("batch", pieces)
        if search.best.restricts_positions:
            _ranges(search)
        else:
            search.fewer("key", pieces)
            search.fewer("row", pieces)
    if search.best.restricts_positions:
        _by_explicit_mask(search)
    _without_what_hides_nothing(search)
    return search.settled()


class _Search:
    """The best case so far, and the budget."""

    def __init__(self, case: AttentionCase, shows: Shows, budget_s: float) -> None:
        self._shows, self._deadline = shows, time.monotonic() + budget_s
        self.history = [case]
        hits = sum(shows(case) for _ in range(TRIES))
        if not hits:
            raise MeasurementError(
                f"the finding does not show again in case {case.ref.case!r}, {TRIES} times asked"
            )
        self._steady = hits == TRIES
        self._needed, self._tries = (1, 1) if self._steady else (hits + 1, FLAKY_TRIES)

    @property
    def best(self) -> AttentionCase:
        return self.history[-1]

    def accept(self, candidate: AttentionCase) -> bool:
        """Make the candidate the best case if it shows; False once the budget is spent."""
        if time.monotonic() >= self._deadline:
            return False
        if sum(self._shows(candidate) for _ in range(self._tries)) < self._needed:
            return False
        self.history.append(candidate)
        return True

    def fewer(self, axis: str, pieces: int = ALL) -> None:
        """Leave out indices of an axis of the best case."""
        case = self.best
        size = {"batch": len(case.q), "row": case.q_len, "key": case.kv_len, "head": case.heads}
        _fewest(size[axis], lambda few: self.accept(part(case, **{axis: few})), pieces)

    def settled(self) -> AttentionCase:
        """The last accepted case that shows when it is asked again; else the input."""
        enough = all if self._steady else any
        for case in reversed(self.history[1:]):
            if enough(self._shows(case) for _ in range(TRIES)):
                return case
        return self.history[0]


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


def _heads(search: _Search, head: int | None) -> None:
    """The worst head with its kv head; else its group; else as few kv heads as will do; then as
    few query heads of a single kv head."""
    case, group = search.best, search.best.group

    def groups(kv_heads: Sequence[int]) -> bool:
        heads = [h * group + g for h in kv_heads for g in range(group)]
        return search.accept(part(case, head=heads, kv_head=kv_heads))

    if head is not None and case.heads > 1:
        if search.accept(part(case, head=[head], kv_head=[head // group])):
            return
        if case.kv_heads > 1:
            groups([head // group])
    if search.best.kv_heads > 1:
        _fewest(case.kv_heads, groups)
    if search.best.kv_heads == 1:
        search.fewer("head")


def _ranges(search: _Search) -> None:
    """Rows and keys off the ends, cut by cut."""
    square = search.best.q_len == search.best.kv_len
    for rows_first, rows_last, keys_first, keys_last in SQUARE_CUTS if square else CUTS:
        case = search.best
        n, m = case.q_len, case.kv_len
        moves_rows, moves_keys = rows_first or rows_last, keys_first or keys_last
        most = min(n if moves_rows else m, m if moves_keys else n) - 1
        dropped, step = 0, (most + 1) // 2
        while step:
            t = dropped + step
            rows = range(rows_first * t, n - rows_last * t)
            keys = range(keys_first * t, m - keys_last * t)
            if t <= most and search.accept(at_positions(case, rows, keys)):
                dropped = t
            step //= 2


def _by_explicit_mask(search: _Search) -> None:
    """Positions as a mask, so that any rows and keys can go; undone unless that halves the call."""
    flagged, length = search.best, len(search.history)
    if flagged.q_len * flagged.kv_len <= 1 or not search.accept(with_explicit_mask(flagged)):
        return
    for pieces in PIECES:
        search.fewer("key", pieces)
        search.fewer("row", pieces)
    best = search.best
    if 2 * (best.q_len + best.kv_len) > flagged.q_len + flagged.kv_len:
        del search.history[length:]


def _without_what_hides_nothing(search: _Search) -> None:
    """A causal flag, a window or a mask that no longer hides a key or adds anything."""
    case = search.best
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    everywhere = visible(dataclasses.replace(case, mask=None), rows, keys)
    if everywhere is not None and bool(everywhere.all()):
        search.accept(dataclasses.replace(case, is_causal=False, causal_offset=0, window=None))
    mask = search.best.mask
    if mask is not None and bool((mask if mask.dtype == torch.bool else mask == 0).all()):
        search.accept(dataclasses.replace(search.best, mask=None))


def at_positions(case: AttentionCase, rows: Sequence[int], keys: Sequence[int]) -> AttentionCase:
    """The call with some query rows and keys, each row seeing what it saw among them.

    Where causality or a window hides keys both must be ranges: of rows from r and keys from k,
    j <= i + offset becomes j' + k <= i' + r + offset, so the offset moves by r - k.
    """
    moved = rows[0] - keys[0] if case.restricts_positions else 0
    smaller = part(case, row=rows, key=keys)
    return dataclasses.replace(smaller, causal_offset=case.causal_offset + moved)


def with_explicit_mask(case: AttentionCase) -> AttentionCase:
    """The same call with causality and window written into its mask."""
    mask = explicit_mask(case)
    return dataclasses.replace(case, mask=mask, is_causal=False, causal_offset=0, window=None)


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
