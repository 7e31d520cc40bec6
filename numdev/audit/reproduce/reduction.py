"""The smallest call that still shows a finding: delta debugging on the axes of attention.

`reduce` takes a call and a question ("does it still show?") that runs the real kernel, and leaves
out heads, sequences, keys and query rows for as long as the answer is yes: halves first, then
smaller pieces (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002).
What a finding needs to show is kept, whatever it is: the question decides, nothing is assumed.

Where causality or a window hides keys, leaving out positions must not move the others. A range of
rows and keys stays the same call with another `causal_offset`; those that keep the offset are tried
first, since a kernel's causal flag can say nothing else and another form may run another kernel.
A call with as many queries as keys keeps as many: where they differ kernels align causality at one
corner or the other, and one that is right about the call could be shown to differ for that alone.
Arbitrary rows and keys need positions as an explicit mask; that form is kept if it is much smaller.

The result is never larger than the input, and it showed whenever it was last asked.
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
from numdev.sources.tensorwriter import storage_order

Shows = Callable[[AttentionCase], bool]
TRIES = 3
"""How often the input, and at the end the result, is asked."""
FLAKY_TRIES = 5
"""How often a candidate is asked where the input did not show every time."""
CUTS = (
    (0, 1, 0, 1),
    (1, 0, 1, 0),
    (0, 1, 0, 0),
    (0, 0, 0, 1),
    (1, 0, 1, 0),
    (0, 0, 1, 0),
    (1, 0, 0, 0),
)
"""Of rows at the start and the end, of keys at the start and the end: which are cut together. The
first two keep a call square."""
PIECES = (4, 32, 1 << 30)
"""Into how many pieces an axis is cut at most, from round to round: all axes become coarsely small
before the budget goes into single keys."""


def reduce(
    case: AttentionCase,
    still_shows: Shows,
    budget_s: float = 60.0,
    *,
    head: int | None = None,
    max_steps: int = 1000,
) -> AttentionCase:
    """The smallest form of `case` found for which `still_shows` holds; deterministic if that is.

    `head` is the query head to begin with. No candidate is begun after `budget_s` seconds or
    `max_steps` candidates. A finding that comes and goes must show in a candidate about as often
    as it did in the input. Raises MeasurementError where it does not show in `case` itself.
    """
    search = _Search(case, still_shows, budget_s, max_steps)
    _heads(search, head)
    if case.mask is not None:
        search.accept(dataclasses.replace(search.best, mask=None))
    for pieces in PIECES:
        _batches(search, pieces)
        if search.best.restricts_positions:
            _ranges(search)
        else:
            _keys(search, pieces)
            _rows(search, pieces)
    if search.best.restricts_positions:
        _by_explicit_mask(search)
    _without_what_hides_nothing(search)
    return search.settled()


class _Search:
    """The best case so far, and the budget."""

    def __init__(self, case: AttentionCase, shows: Shows, budget_s: float, max_steps: int) -> None:
        self._shows, self._steps = shows, max_steps
        self._deadline = time.monotonic() + budget_s
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
        if self._steps <= 0 or time.monotonic() >= self._deadline:
            return False
        self._steps -= 1
        hits = 0
        for left in range(self._tries, 0, -1):
            if hits + left < self._needed:
                return False
            hits += self._shows(candidate)
            if hits >= self._needed:
                self.history.append(candidate)
                return True
        return False

    def settled(self) -> AttentionCase:
        """The last accepted case that shows when it is asked again; else the input."""
        enough = all if self._steady else any
        for case in reversed(self.history[1:]):
            if enough(self._shows(case) for _ in range(TRIES)):
                return case
        return self.history[0]


# --- one axis after another ----------------------------------------------------------------------


def _heads(search: _Search, head: int | None) -> None:
    """The worst head with its kv head; else its group; else as few kv heads as will do; then as
    few query heads of a single kv head."""
    case, group = search.best, search.best.group
    if case.heads == 1:
        return
    if head is not None:
        if search.accept(part(case, head=[head], kv_head=[head // group])):
            return
        if case.kv_heads > 1:
            search.accept(with_kv_heads(case, [head // group]))
    if search.best.kv_heads > 1:
        every = list(range(case.kv_heads))
        _fewest(every, lambda few: search.accept(with_kv_heads(case, few)))
    one = search.best
    if one.kv_heads == 1 and one.heads > 1:
        _fewest(list(range(one.heads)), lambda few: search.accept(part(one, head=few)))


def _batches(search: _Search, pieces: int) -> None:
    case = search.best
    items = list(range(case.q.shape[0]))
    _fewest(items, lambda few: search.accept(part(case, batch=few)), pieces)


def _keys(search: _Search, pieces: int) -> None:
    case = search.best
    rows = range(case.q_len)
    keys = list(range(case.kv_len))
    _fewest(keys, lambda few: search.accept(at_positions(case, rows, few)), pieces)


def _rows(search: _Search, pieces: int) -> None:
    case = search.best
    keys = range(case.kv_len)
    rows = list(range(case.q_len))
    _fewest(rows, lambda few: search.accept(at_positions(case, few, keys)), pieces)


def _ranges(search: _Search) -> None:
    """Rows and keys off the ends: first the cuts that keep the offset (rows and keys together, at
    the end and at the start; then one of them at the end), then those that move it."""
    square = search.best.q_len == search.best.kv_len
    for rows_first, rows_last, keys_first, keys_last in CUTS[: 2 if square else None]:
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
        _keys(search, pieces)
        _rows(search, pieces)
    found = search.best
    if 2 * (found.q_len + found.kv_len) > flagged.q_len + flagged.kv_len:
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


def _fewest(items: list[int], shows: Callable[[list[int]], bool], pieces: int = 1 << 30) -> None:
    """Leave out pieces of `items`, halves first, for as long as `shows` says yes; at most `pieces`
    pieces. Never leaves nothing."""
    smallest = max(1, -(-len(items) // pieces))
    size = (len(items) + 1) // 2
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


# --- parts of a case -----------------------------------------------------------------------------

AXES = {
    "q": ("batch", "head", "row", "feature"),
    "k": ("batch", "kv_head", "key", "feature"),
    "v": ("batch", "kv_head", "key", "feature"),
    "grad_out": ("batch", "head", "row", "feature"),
    "mask": ("batch", "head", "row", "key"),
    "sinks": ("head",),
}
"""The axes of a case's tensors; a mask may have the last ones alone, and broadcast along them."""


def with_kv_heads(case: AttentionCase, kv_heads: Sequence[int]) -> AttentionCase:
    """The call with some kv heads, each with all the query heads that read it."""
    group = case.group
    heads = [h * group + g for h in kv_heads for g in range(group)]
    return part(case, head=heads, kv_head=kv_heads)


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


def part(case: AttentionCase, **kept: Sequence[int]) -> AttentionCase:
    """The call with the given indices of some axes alone, its tensors copied.

    Axes are `batch`, `head`, `kv_head`, `row` and `key`. Heads and kv heads must go together so
    that query head h still reads kv head h // group; positions are the caller's business.
    """
    parts: dict[str, Any] = {}
    for name, axes in AXES.items():
        x: Tensor | None = getattr(case, name)
        if x is None:
            continue
        for dim, axis in enumerate(axes[-x.ndim :]):
            broadcasts = name == "mask" and x.shape[dim] == 1
            if axis in kept and not broadcasts and len(kept[axis]) < x.shape[dim]:
                x = _pick(x, dim, kept[axis])
        parts[name] = x
    return dataclasses.replace(case, **parts)


def _pick(x: Tensor, dim: int, items: Sequence[int]) -> Tensor:
    """Some indices of one axis, dense, in x's own order of axes in memory: kernels choose by it."""
    order = storage_order(x)
    index = torch.tensor(list(items), device=x.device)
    picked = x.detach().permute(order).index_select(order.index(dim), index)
    return picked.permute([order.index(axis) for axis in range(x.ndim)])
