"""Two reports of one request: what they must have in common, and a metric held to its own past.

A cell's number is the mean over its seeds, and the change is the ratio of the two means. The mean
moves from one set of seeds to another without anything having changed, and from run to run where a
kernel sums in no fixed order. So a change counts only beyond

    t s sqrt(1 / n + 1 / m) + 2 noise

with s the standard deviation over the m seeds of the old report, n the seeds of the new one, and t
the 97.5 % point of Student's t with m - 1 degrees of freedom: the prediction interval for the mean
of n further seeds (G. Hahn and W. Meeker, "Statistical Intervals", 1991, section 4.8). `noise` is
what repeated runs on the same inputs differ by, in the same share of the mean as of rms (a norm
moves by no more: ||o' - r| - |o - r|| <= |o' - o|), once for either report. Spread and noise are
the old report's alone, so that a new one in which a seed goes wrong, or that is noisier, does not
excuse itself. From fewer than SEEDS seeds a spread is not known, and nothing is excused by it.

A cell that is in one of the reports alone is lacking, whichever it is.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from numdev.errors import MeasurementError
from numdev.gate.rows import NOT_MEASURED, Measured, grouped
from numdev.gate.rules import ERRORS, ESTIMATED, MAXIMA, Threshold, parts_of, value_of
from numdev.gate.verdict import Held
from numdev.report import DeviationRow, Record

# --- what two reports must have in common --------------------------------------------------------

MUST = (
    *("checkpoint", "model", "text", "inputs", "cases", "formats", "model_dtype", "seed", "seeds"),
    *("generate", "length", "sequences", "layers", "heads", "gradients", "sampled_rows"),
)
"""Keys of a request that must be the same, and are what `--allow` takes. An audit has a `seed`, a
sweep `seeds`."""
APART = ("formats", "seed", "seeds", "layers", "heads", "gradients")
"""Of these what rows say themselves: where they differ rows are not found in the other report, or,
of other seeds, are other draws of the same cells."""
HASHES = {"checkpoint": "sha256", "text": "prompt_sha256"}
"""Keys that name files, and where their hashes are in a report's source."""
PROMPT = ("text", "length", "sequences")
"""What the hash of the prompt covers: the same text may come from another file."""


class Difference(Record):
    """Something the two do not have in common: a key, and both values, shortened to be read."""

    key: str
    """With the first place in it where they differ, as in `cases.0.seq_len`."""
    a: str
    b: str

    @property
    def root(self) -> str:
        """The key of the request itself."""
        return self.key.partition(".")[0]


def differences(a: Measured, b: Measured, keys: Sequence[str] = MUST) -> tuple[Difference, ...]:
    """What differs of what must be the same; of an audit and a sweep that they are that."""
    if a.kind != b.kind:
        return (Difference(key="kind", a=a.kind, b=b.kind),)
    sources = [report.provenance.source for report in (a, b)]
    prompt = all(source.get(HASHES["text"]) for source in sources)
    apart: list[Difference] = []
    for key in keys:
        hashes = [source.get(HASHES.get(key, "")) for source in sources]
        if any(hashes):
            apart += unequal(key, *(str(x or "not told")[:16] for x in hashes))
        elif not (prompt and key in PROMPT):
            apart += unequal(key, a.request.get(key), b.request.get(key))
    return tuple(apart)


def unequal(key: str, a: Any, b: Any) -> list[Difference]:
    """The first place at which two values differ; none where they do not."""
    if a == b or (a or None) == (b or None):
        return []
    sides = [dict(flat(x, key)) for x in (a, b)]
    at = next(k for k in (*sides[1], *sides[0]) if sides[0].get(k) != sides[1].get(k))
    return [Difference(key=at, a=_shown(sides[0].get(at)), b=_shown(sides[1].get(at)))]


def flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The leaves of mappings and of lists of mappings, each with its path."""
    items: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple) and all(isinstance(x, Mapping) for x in value):
        items = enumerate(value)
    if not items:
        yield key, value
    for name, inner in items:
        yield from flat(inner, f"{key}.{name}")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse_other(new: Measured, old: Measured) -> None:
    """Raises MeasurementError unless both are about the same inputs. The seeds may be others."""
    apart = differences(old, new, [key for key in MUST if key not in APART])
    if apart:
        what = ", ".join(f"{d.key} ({d.a} in the older, {d.b} now)" for d in apart)
        raise MeasurementError(
            f"the older report is about something else: the two differ in {what}",
            hint="give --against a report of the same request",
        )


# --- a cell held to its past ---------------------------------------------------------------------

SEEDS = 3
GONE = "measured in the old report, and not in this one"
NEW = "not measured in the old report"


def allowance(old: Sequence[float], new: int) -> float:
    """How far the mean of `new` more seeds may lie from that of the old ones, by chance."""
    if len(old) < SEEDS:
        return 0.0
    from scipy.special import stdtrit  # which reading a report, and its schema, need not wait for

    spread = float(stdtrit(len(old) - 1, 0.975)) * statistics.stdev(old)
    return spread * math.sqrt(1 / new + 1 / len(old))


def changes(
    threshold: Threshold, rows: Sequence[DeviationRow], older: Sequence[DeviationRow]
) -> tuple[list[Held], list[tuple[DeviationRow, str]]]:
    """Each cell of a kernel held to the same one in the older report; and what is in one alone, or
    lacks the number there. All rows share kernel, options, format and tensor."""
    held: list[Held] = []
    lacking: list[tuple[DeviationRow, str]] = []
    place = attrgetter("case", "module", "layer", "call", "phase", "head")
    now, before = grouped(rows, place), grouped(older, place)
    for key, mine in now.items():
        change = _change(threshold, mine, before.pop(key, []))
        if isinstance(change, str):
            lacking += [(row, change) for row in mine]
        else:
            held.append(change)
    gone = [row for theirs in before.values() for row in theirs]
    return held, [*lacking, *((row, GONE) for row in gone)]


def _change(
    threshold: Threshold, mine: Sequence[DeviationRow], theirs: Sequence[DeviationRow]
) -> Held | str:
    """A cell's change; or why there is none."""
    metric = threshold.metric
    if not theirs:
        return NEW
    sampled = any(row.sampled for row in (*mine, *theirs))
    if sampled and not (ESTIMATED | MAXIMA).isdisjoint(parts_of(metric)):
        return f"{threshold.named} of sampled rows has no interval"
    new, old = (_sizes(metric, side) for side in (mine, theirs))
    if isinstance(new, str):
        return new
    if isinstance(old, str):
        return f"in the old report: {old}"
    # In units of the largest, so that no sum or quotient overflows.
    unit = max(*new, *old) or 1.0
    now, before = (statistics.fmean([x / unit for x in side]) for side in (new, old))
    worst = mine[new.index(max(new))]
    if now and not before:
        value: float | str = f"{now * unit:.3g}, from 0"
        excess = math.inf
    else:
        value = now / before if before else 1.0
        excess = threshold.excess(value)
    if excess > 1:
        room = allowance([x / unit for x in old], len(new))
        if metric in (ESTIMATED | MAXIMA | ERRORS) - {"precision_rms", "fa_rule"}:
            # It grows as the error does, so noise is a share of it: at most all.
            shares = [row.noise / row.rms for row in theirs if row.noise and row.rms]
            room += 2 * before * min(1.0, max(shares, default=0.0))
        if abs(now - before) <= room:
            return Held(worst, threshold, value, 1.0, excused=True)
    return Held(worst, threshold, value, excess)


def _sizes(metric: str, rows: Sequence[DeviationRow]) -> list[float] | str:
    """Of every seed; or why one has none."""
    read = [value_of(row, metric) for row in rows]
    why = next((why or NOT_MEASURED for value, why in read if value is None), None)
    return why or [abs(float(value or 0.0)) for value, _ in read]
