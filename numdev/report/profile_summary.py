"""Error by position, over all calls of one length: the median, least and largest of every bin.

Calls count equally, and the kinds of attention of a diffusion pipeline stay apart. Only the
lengths that most calls have are summarised; the report's `profiles` have every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from numdev.report import ProfileRow, ProfileSummary

LENGTHS = 3  # of call that are kept, for each format, tensor and kind of attention
TENSORS = ("out", "dq", "dk", "dv")


def pooled(rows: Iterable[ProfileRow]) -> tuple[ProfileSummary, ...]:
    """One summary for each kernel, tensor and length: the most frequent lengths first, kernels in
    the order of the rows."""
    whole = _grouped(rows, lambda row: (row.format, row.attends, row.tensor))
    formats = list(dict.fromkeys(fmt for fmt, _, _ in whole))
    summaries = []
    for key in sorted(whole, key=lambda key: (formats.index(key[0]), TENSORS.index(key[2]))):
        calls = _grouped({(r.length, r.case): r for r in whole[key]}.values(), lambda r: r.length)
        kernels = _grouped(whole[key], lambda r: (r.role, r.kernel, str(sorted(r.options.items()))))
        for length in sorted(calls, key=lambda n: (-len(calls[n]), -n))[:LENGTHS]:
            groups = ([row for row in own if row.length == length] for own in kernels.values())
            summaries += [_summary(group) for group in groups if group]
    return tuple(summaries)


def _grouped(
    rows: Iterable[ProfileRow], key: Callable[[ProfileRow], Any]
) -> dict[Any, list[ProfileRow]]:
    groups: dict[Any, list[ProfileRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _summary(rows: Sequence[ProfileRow]) -> ProfileSummary:
    """Of one kernel in calls of one length."""
    predicted = [(row.errors, row.predicted) for row in rows if row.predicted is not None]
    ratios = [
        [None if e is None or not p else e / p for e, p in zip(*pair, strict=True)]
        for pair in predicted
    ]
    errors, lows, highs = _over_calls([row.errors for row in rows])
    over, over_lows, over_highs = _over_calls(ratios)
    shared = ("kernel", "options", "role", "format", "tensor", "attends", "length", "starts")
    return ProfileSummary(
        **{name: getattr(rows[0], name) for name in shared},
        calls=len({row.case for row in rows}),
        counts=tuple(map(sum, zip(*(row.counts for row in rows), strict=True))),
        errors=errors,
        lows=lows,
        highs=highs,
        predicted=_over_calls([own for _, own in predicted])[0],
        ratios=over,
        ratio_lows=over_lows,
        ratio_highs=over_highs,
    )


def _over_calls(calls: Sequence[Sequence[float | None]]) -> tuple[tuple[float | None, ...], ...]:
    """Median, least and largest of each bin, to four digits, over the calls that have a number."""
    bins = [[x for x in own if x is not None] for own in zip(*calls, strict=True)]
    return tuple(
        tuple(float(f"{of(own):.4g}") if own else None for own in bins) for of in (median, min, max)
    )
