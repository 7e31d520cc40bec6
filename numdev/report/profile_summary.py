"""How kernels err along their calls: calls of one length together, and what is remarkable of it.

Calls count alike: of every bin the median over them, the least and the largest are kept. So are a
diffusion pipeline's kinds of attention apart. Where calls are of many lengths, those that most
calls have are kept; the rows of the report have all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from numdev.report import ProfileRow, ProfileSummary
from numdev.report.statistics import BIAS_FORMATS

LENGTHS = 3
"""How many lengths of call are kept, for each format, tensor and kind of attention."""
TENSORS = ("out", "dq", "dk", "dv")
NOTABLE = 2.0
"""An end of the call is remarkable from this multiple of the middle bin on."""
ROWS = 16
"""A bin of fewer rows, all calls together, is judged by nobody: one row's roundings are chance."""
BINS = 3
"""What has fewer bins has no ends and middle."""

Numbers = Sequence[float | None]


def pooled(rows: Iterable[ProfileRow]) -> tuple[ProfileSummary, ...]:
    """A summary of every kernel and tensor for each length that is kept, the length that most calls
    have first; kernels in the order they came."""
    whole: dict[Any, list[ProfileRow]] = {}
    for row in rows:
        whole.setdefault((row.format, row.attends, row.tensor), []).append(row)
    formats = list(dict.fromkeys(fmt for fmt, _, _ in whole))
    order = sorted(whole, key=lambda key: (formats.index(key[0]), TENSORS.index(key[2])))
    return tuple(
        _summary([row for row in own if row.length == length])
        for key in order
        for length in _lengths(whole[key])
        for own in _by_kernel(whole[key])
        if any(row.length == length for row in own)
    )


def remark(summaries: Iterable[ProfileSummary]) -> str | None:
    """The first or last bin that stands out most from the middle one, as a sentence, each error
    being taken over what is predicted there; None where none does."""
    found = (end for s in summaries for end in _ends(s))
    worst = max(found, key=lambda end: end.ratio / end.usual, default=None)
    return None if worst is None else worst.sentence


@dataclass(frozen=True)
class _End:
    of: ProfileSummary
    bin: int
    ratio: float
    middle: float

    @property
    def usual(self) -> float:
        """What is less than half of what is predicted counts as half: an end that errs no more than
        predicted is none to speak of."""
        return max(self.middle, 1 / NOTABLE)

    @property
    def sentence(self) -> str:
        s = self.of
        options = "".join(f" {k}={v}" for k, v in s.options.items() if v is not None)
        first, last = s.starts[self.bin], s.ends[self.bin]
        what = "key" if s.tensor in ("dk", "dv") else "row"
        where = f"{what}s {first} to {last}" if last > first else f"{what} {first}"
        verb = "err" if last > first else "errs"
        return (
            f"Along its calls of {s.length} {what}s {s.kernel}{options} ({s.format}, {s.tensor}) "
            f"does not err evenly: {where} {verb} {self.ratio:.2g} x what is predicted there, the "
            f"median bin {self.middle:.2g} x."
        )


def _ends(s: ProfileSummary) -> Iterator[_End]:
    """The first bin that errs and the last, where they stand out, and not only because next to
    nothing is predicted there: they must err more than is predicted of the median bin, too. (dq of
    a row that sees one key is 0 exactly, and what a kernel errs there is fp32's.) In formats whose
    predictions are bounds rather than predictions none does."""
    if s.role != "kernel" or s.format not in BIAS_FORMATS:
        return
    judged = [
        (i, ratio)
        for i, (ratio, count) in enumerate(zip(s.ratios, s.counts if s.ratios else (), strict=True))
        if ratio is not None and count >= ROWS
    ]
    erring = [at for at in judged if at[1] > 0]
    if len(judged) < BINS or not erring:
        return
    middle = median(ratio for _, ratio in judged)
    typical = median(s.predicted[i] or 0.0 for i, _ in judged)
    for i, ratio in dict.fromkeys((erring[0], judged[-1])):
        end = _End(s, i, ratio, middle)
        if ratio > NOTABLE * end.usual and (s.errors[i] or 0.0) > NOTABLE * end.usual * typical:
            yield end


def _lengths(rows: Sequence[ProfileRow]) -> list[int]:
    """Those that most calls have, of as many the longest."""
    calls: dict[int, set[str]] = {}
    for row in rows:
        calls.setdefault(row.length, set()).add(row.case)
    return sorted(calls, key=lambda n: (-len(calls[n]), -n))[:LENGTHS]


def _by_kernel(rows: Sequence[ProfileRow]) -> Iterable[list[ProfileRow]]:
    groups: dict[Any, list[ProfileRow]] = {}
    for row in rows:
        groups.setdefault((row.role, row.kernel, repr(sorted(row.options.items()))), []).append(row)
    return groups.values()


def _summary(rows: Sequence[ProfileRow]) -> ProfileSummary:
    """Of one kernel in calls of one length."""
    first = rows[0]
    ratios = [_over(row.errors, row.predicted) for row in rows if row.predicted is not None]
    errors, lows, highs = _over_calls([row.errors for row in rows])
    over, over_lows, over_highs = _over_calls(ratios)
    predicted, _, _ = _over_calls([row.predicted for row in rows if row.predicted is not None])
    return ProfileSummary(
        kernel=first.kernel,
        options=first.options,
        role=first.role,
        format=first.format,
        tensor=first.tensor,
        attends=first.attends,
        length=first.length,
        calls=len({row.case for row in rows}),
        starts=first.starts,
        counts=tuple(map(sum, zip(*(row.counts for row in rows), strict=True))),
        errors=errors,
        lows=lows,
        highs=highs,
        predicted=predicted,
        ratios=over,
        ratio_lows=over_lows,
        ratio_highs=over_highs,
    )


def _over(errors: Numbers, predicted: Numbers) -> list[float | None]:
    return [None if e is None or not p else e / p for e, p in zip(errors, predicted, strict=True)]


def _over_calls(calls: Sequence[Numbers]) -> tuple[tuple[float | None, ...], ...]:
    """Median, least and largest of each bin, to four digits, over the calls that have a number."""
    bins = [[x for x in own if x is not None] for own in zip(*calls, strict=True)]
    return tuple(
        tuple(float(f"{of(own):.4g}") if own else None for own in bins) for of in (median, min, max)
    )
