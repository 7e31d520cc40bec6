"""What sets a row that errs apart from the usual rows of its head, in words.

A property stands out when it lies from the median of the usual rows by at least three
standard deviations, taken from the median absolute deviation (1.4826 MAD), and by at
least a step worth mentioning. Of a normal property some 0.3 % of rows do by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from numdev.report import WorstRow
from numdev.report.number_text import power
from numdev.tensor_properties import tensor_spec

# Usual rows it takes to say what is unusual; a tie is one beside any number of them
LEAST = 8
DEVIATIONS = 3 * 1.4826
NOTHING = "nothing stands out"


@dataclass(frozen=True)
class Property:
    """When a property of a row counts as unusual, and the phrase that describes it."""

    step: float  # nats for lse and entropy; a factor of two where `logarithmic`
    # Template of the row's fields and `usual`, their median; empty: not mentioned
    query: str = ""
    key: str = ""
    logarithmic: bool = False
    side: int = 0  # 1: only above what is usual, -1: only below
    hides: tuple[str, ...] = ()  # properties that need no mention beside it

    def on_scale(self, x: float) -> float:
        """Returns a value on the scale of `step`: for a logarithmic property its binary
        logarithm, in which it counts as at least 2^-60; else the value itself."""
        return math.log2(max(x, 2.0**-60)) if self.logarithmic else x


SHARP = ("max_probability", "entropy")
CANCELS = "its terms cancel to {cancellation:.2g} of their size (median {usual:.3g})"
LARGEST = "its largest P is {max_probability:.2g} (median {usual:.3g})"
TIES = {
    "tied": Property(
        1.0,
        "{tied} keys share its maximum, P = {max_probability:.2g} each",
        side=1,
        hides=("nearly_tied", *SHARP),
    ),
    "nearly_tied": Property(
        1.0, ("{nearly_tied} keys are within 0.001 of its maximum"), side=1
    ),
    # Together with a tie this makes rounding errors of P one-sided (arXiv 2510.04212).
    "one_sign": Property(
        0.2,
        "V keeps one sign ({one_sign:.2f}; median "
        "{usual:.2f}) at the "
        "{carriers} keys that carry 90 % of it",
        side=1,
    ),
}
SHARES = {
    "first_key": Property(
        0.1, ("key 0 has P = {first_key:.2g} (median {usual:.3g})"), hides=SHARP
    ),
    "sink": Property(
        0.1, "the sink has P = {sink:.2g} (median {usual:.3g})", hides=SHARP
    ),
    "mass": Property(
        1.0,
        "",
        "it receives P = {mass:.3g} in all (median "
        "{usual:.3g}), 90 % of it "
        "from {carriers} of the queries",
        logarithmic=True,
        hides=("carriers",),
    ),
    "carriers": Property(
        1.0,
        "",
        "queries that give 90 % of its probability: {carriers} (median {usual:.3g})",
        logarithmic=True,
    ),
    "max_probability": Property(0.1, LARGEST, LARGEST, hides=("entropy",)),
    "entropy": Property(0.5, "its entropy is {entropy:.3g} nats (median {usual:.3g})"),
}
SIZES = {
    "lse": Property(1.0, "its log-sum-exp is {lse:.4g} (median {usual:.3g})"),
    "cancellation": Property(1.0, CANCELS, CANCELS, logarithmic=True, side=-1),
    "sees": Property(
        1.0,
        "keys that it sees: {sees} (median {usual:.3g})",
        "queries that see it: {sees} (median {usual:.3g})",
        logarithmic=True,
    ),
}
PROPERTIES = TIES | SHARES | SIZES  # named in this order
Rows = Sequence[Mapping[str, float | None]]  # the numbers of rows, by name


def sentence(row: WorstRow, usual: Rows) -> str:
    """Returns a sentence on how much the row errs, and which of its properties are
    unusual: `row 5 (of 64; batch entry 0) has 12× the error predicted for it: 3 keys
    share its maximum, P = 0.3 each.` `usual`: the numbers of usual rows of its head.
    Where nothing is unusual it says `nothing stands out`, and with fewer than LEAST usual
    rows how many there were. Of a row that sees nothing it names no other property."""
    is_key = tensor_spec(row.tensor).sums_over_rows
    if row.sees == 0:
        properties = ["no query sees it" if is_key else "it sees no key"]
    else:
        fields, medians = row.model_dump(), outstanding(row, usual)
        templates = {n: p.key if is_key else p.query for n, p in PROPERTIES.items()}
        hidden = {other for name in medians for other in PROPERTIES[name].hides}
        properties = [
            templates[name].format(**fields, usual=middle)
            for name, middle in medians.items()
            if templates[name] and name not in hidden
        ]
    few = f" (with {len(usual)} rows to compare it with)" if len(usual) < LEAST else ""
    name = (
        f"{'key' if is_key else 'row'} {row.row} (of {row.rows}; batch entry {row.batch})"
    )
    return power(
        f"{name} {_error_in_words(row)}: {'; '.join(properties) or NOTHING + few}."
    )


def outstanding(row: WorstRow, usual: Rows) -> dict[str, float]:
    """Returns the properties of a row that are unusual, by name, in the order in which
    they are mentioned, each with its median over the usual rows. A property is unusual
    that is at least three standard deviations and its own `step` from the median, on the
    `side` that counts for it. A property with fewer than LEAST usual values is left out,
    but for `tied`, whose usual value is 1 then."""
    medians = {}
    for name, rule in PROPERTIES.items():
        value = getattr(row, name)
        others = [x for other in usual if (x := other.get(name)) is not None]
        if name == "tied" and len(others) < LEAST:
            others = [1.0]  # scores are seldom equal by chance
        elif len(others) < LEAST:
            continue
        if value is None:
            continue
        usual_sizes = [rule.on_scale(x) for x in others]
        middle = median(usual_sizes)
        spread = median(abs(x - middle) for x in usual_sizes)
        away = rule.on_scale(value) - middle
        if abs(away) >= max(DEVIATIONS * spread, rule.step) and away * rule.side >= 0:
            medians[name] = median(others)
    return medians


def _error_in_words(row: WorstRow) -> str:
    """Returns a verb phrase on how much a row errs: `is not finite in 3 elements where
    the exact result is`, `has 12× the error predicted for it`, or where none is predicted
    `has an error of 0.02 of the size of its terms`. Without a ratio the error is stated
    as it is."""
    if row.nonfinite:
        return f"is not finite in {row.nonfinite} elements where the exact result is"
    if row.ratio is None:
        return f"has an error of {row.error or 0.0:.2g} where none is predicted or summed"
    if row.predicted:
        return f"has {row.ratio:.3g}× the error predicted for it"
    return f"has an error of {row.ratio:.2g} of the size of its terms"
