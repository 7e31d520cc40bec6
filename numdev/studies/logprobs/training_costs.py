"""What a difference of log-probabilities costs training: the share of ratios outside the
clip band, now, with the named causes undone, and as predicted with a wider head or in
float16. Needs no torch: the predicted errors come from `truth`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numdev.studies.logprobs.report import PAIR, CostRow
from numdev.studies.logprobs.statistics import outside

if TYPE_CHECKING:
    from numdev.studies.logprobs.causes import Observed
    from numdev.studies.logprobs.records import SequencePair

NOW, UNDONE, ROUNDINGS = "now", "causes undone", "roundings alone"
HEAD, HALF = "head in float32", "float16"
FIXES = (NOW, UNDONE, ROUNDINGS, HEAD, HALF)  # in the order in which they are shown
MOST_SEQUENCES = 16  # of a side, for which other formats are predicted


class SideErrors(NamedTuple):
    """The errors of one side, float64 [n] for each of its sequences; NaN where a token
    does not count."""

    name: str
    sequences: Sequence[Observed]
    numbers: Sequence[int]  # of these among the sequences of the side
    left: Sequence[np.ndarray]  # as the side's named causes leave them
    has_causes: bool
    # By fix, and by the place in `sequences`: the errors predicted with it
    predicted: Mapping[str, Mapping[int, np.ndarray]]

    def predicted_with(self, fix: str, at: int) -> np.ndarray | None:
        """Returns the predicted errors, float64 [n], of the sequence at the place `at` in
        `sequences`, with a fix; None where they were not computed. For a fix that
        `predicted` does not have: those of the side as it is."""
        if fix in self.predicted:
            return self.predicted[fix].get(at)
        return self.sequences[at].predicted


def evenly_spread(count: int, most: int = MOST_SEQUENCES) -> list[int]:
    """Returns at most `most` of the numbers below `count`, evenly spread from 0 on,
    ascending; all of them where there are no more than `most`."""
    if count <= most:
        return list(range(count))
    return [i * count // most for i in range(most)]


def side_cost_rows(side: SideErrors, clip: tuple[float, float]) -> Iterator[CostRow]:
    """Yields the rows of one side, sequence by sequence: of each sequence one with its
    causes undone, where some are named, then one for each fix that was predicted for
    it."""
    for at, seen in enumerate(side.sequences):
        if side.has_causes:
            errors = side.left[at][seen.counts]
            yield cost_row(side.name, UNDONE, seen.sequence, errors, clip)
        for fix, predicted in side.predicted.items():
            if at in predicted:
                errors = predicted[at][seen.counts]
                yield cost_row(side.name, fix, seen.sequence, errors, clip)


def cost_row(
    side: str, fix: str, sequence: int, errors: np.ndarray, clip: tuple[float, float]
) -> CostRow:
    """Returns the row of one sequence. `errors`, float64 [tokens]: logarithms of ratios;
    one that is not finite is counted in `lost`, and in no other number of the row.
    `clip`: the least and the largest ratio that are not clipped."""
    finite = errors[np.isfinite(errors)]
    with np.errstate(over="ignore"):
        clipped = int(outside(np.exp(finite), clip).sum())
    return CostRow(
        side=side,
        fix=fix,
        sequence=sequence,
        tokens=len(finite),
        lost=len(errors) - len(finite),
        clipped=clipped,
        square=float((finite**2).sum()),
    )


class PairErrors(NamedTuple):
    """The tokens of one pair of sequences that have numbers on both sides, m of them."""

    number: int
    now: np.ndarray  # float64 [m], log of the ratio
    meant: np.ndarray  # [m], of the exact values that both sides are held to
    left: np.ndarray  # [m], difference of the errors as the causes leave them
    # By fix: sums of squared errors of both sides, now and as predicted
    squares: Mapping[str, tuple[float, float]]


def pair_cost_rows(
    pairs: Sequence[SequencePair], a: SideErrors, b: SideErrors,
    clip: tuple[float, float],
) -> Iterator[CostRow]:  # fmt: skip
    """Yields the rows (PAIR) of the ratio that training takes, of the second side over
    the first, fix by fix: NOW, then UNDONE where a side has causes, then ROUNDINGS and
    each other fix that a side has predictions for. UNDONE is the exact ratio with the
    difference of the errors that the causes leave. All after it have this difference
    scaled by the predicted rms error of both sides with the fix over what they err: tails
    are those of the tokens, and not of a normal. They have no row of a pair that lacks
    predictions, and none at all where no error is left."""
    measured = list(_paired(pairs, a, b))
    for each in measured:
        yield cost_row(PAIR, NOW, each.number, each.now, clip)
    if a.has_causes or b.has_causes:
        for each in measured:
            ratios = each.meant + each.left
            yield cost_row(PAIR, UNDONE, each.number, ratios, clip)
    for fix in (ROUNDINGS, *(f for f in FIXES if f in a.predicted or f in b.predicted)):
        those = [each for each in measured if fix in each.squares]
        errs = math.fsum(each.squares[fix][0] for each in those)
        if not errs:
            continue
        scale = math.sqrt(math.fsum(each.squares[fix][1] for each in those) / errs)
        for each in those:
            ratios = each.meant + scale * each.left
            yield cost_row(PAIR, fix, each.number, ratios, clip)


def _paired(
    pairs: Sequence[SequencePair], a: SideErrors, b: SideErrors
) -> Iterator[PairErrors]:
    """Yields the pairs of which both sequences are among those of `a` and `b`, at the
    tokens that count on both sides and still have an error where causes are undone;
    without pairs that have no such token."""
    at_of = [{number: i for i, number in enumerate(x.numbers)} for x in (a, b)]
    for number, pair in enumerate(pairs):
        i, j = (at.get(of_side) for at, of_side in zip(at_of, pair.numbers, strict=True))
        if i is None or j is None:
            continue
        first, second = a.sequences[i], b.sequences[j]
        both = np.isfinite(a.left[i])[pair.at_a] & np.isfinite(b.left[j])[pair.at_b]
        both &= first.counts[pair.at_a] & second.counts[pair.at_b]
        at = np.flatnonzero(both)
        at_a, at_b = pair.at_a.start + at, pair.at_b.start + at
        if not len(at):
            continue
        squares = {}
        for fix in (ROUNDINGS, *a.predicted, *b.predicted):
            x, y = a.predicted_with(fix, i), b.predicted_with(fix, j)
            if x is not None and y is not None:
                errs = _squares(a.left[i][at_a]) + _squares(b.left[j][at_b])
                squares[fix] = errs, _squares(x[at_a]) + _squares(y[at_b])
        yield PairErrors(
            number=number,
            now=second.values[at_b] - first.values[at_a],
            meant=second.reference[at_b] - first.reference[at_a],
            left=b.left[j][at_b] - a.left[i][at_a],
            squares=squares,
        )


def _squares(x: np.ndarray) -> float:
    """Returns the sum of the squares of an array, NaN left out."""
    return float(np.nansum(x**2))
