"""How kernels err along their calls: calls of one length together, and what is remarkable of it.

Calls count alike: of every bin the median over them, the least and the largest are kept. So are a
diffusion pipeline's kinds of attention apart. Where calls are of many lengths, those that most
calls have are kept; the rows of the report have all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from numdev.report import ProfileRow, ProfileSummary
from numdev.report.statistics import BIAS_FORMATS

LENGTHS = 3  # of call that are kept, for each format, tensor and kind of attention
TENSORS = ("out", "dq", "dk", "dv")
NOTABLE = 2.0  # an end of the call is remarkable from this multiple of the middle bin on
ROWS = 16
"""A bin of fewer rows, all calls together, is judged by nobody: one row's roundings are chance."""
BINS = 3  # what has fewer bins has no ends and middle


def pooled(rows: Iterable[ProfileRow]) -> tuple[ProfileSummary, ...]:
    """A summary of every kernel and tensor for each length that is kept, the length that most calls
    have first; kernels in the order they came."""
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


def remark(summaries: Iterable[ProfileSummary]) -> str | None:
    """The first or last bin that stands out most from the middle one, as a sentence, each error
    being taken over what is predicted there; None where none does."""
    ends = (end for summary in summaries for end in _ends(summary))
    return max(ends, key=lambda end: end[0], default=(0.0, None))[1]


def _ends(s: ProfileSummary) -> Iterator[tuple[float, str]]:
    """The first bin that errs and the last, where they stand out, and by how much. They must err
    more than is predicted of the median bin, too: dq of a row that sees one key is 0 exactly, and
    what a kernel errs there is fp32's. In formats whose predictions are bounds none does."""
    if s.role != "kernel" or s.format not in BIAS_FORMATS or not s.ratios:
        return
    judged = [(i, r) for i, r in enumerate(s.ratios) if r is not None and s.counts[i] >= ROWS]
    erring = [at for at in judged if at[1] > 0]
    if len(judged) < BINS or not erring:
        return
    middle = median(ratio for _, ratio in judged)
    typical = median(s.predicted[i] or 0.0 for i, _ in judged)
    # A middle below half of what is predicted counts as half: an end that errs no more than
    # predicted is none to speak of.
    limit = NOTABLE * max(middle, 1 / NOTABLE)
    options = "".join(f" {k}={v}" for k, v in s.options.items() if v is not None)
    what = "key" if s.tensor in ("dk", "dv") else "row"
    for i, ratio in dict.fromkeys((erring[0], judged[-1])):
        if ratio > limit and (s.errors[i] or 0.0) > limit * typical:
            yield (
                ratio / limit,
                f"{s.kernel}{options} ({s.format}, {s.tensor}), calls of {s.length} {what}s: "
                f"{what}s {s.starts[i]} to {s.ends[i]} err {ratio:.2g} x what is predicted there, "
                f"the median bin {middle:.2g} x.",
            )
