"""Where in sequences a side is off: by position, by entropy and by probability, and the
worst tokens. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from numdev.studies.logprobs.causes import Observed
from numdev.studies.logprobs.report import Bin, WorstToken

MOST = 20  # worst tokens of a side
POSITIONS = (0, 16, 64, 256, 1024, 4096, math.inf)
ENTROPIES = (0, 0.1, 0.5, 1, 2, 4, math.inf)  # nats
PROBABILITIES = (0, 1e-6, 1e-4, 0.01, 0.1, 0.5, 1.0)
By = Literal["position", "entropy", "probability"]


def bins_of(side: str, sequences: Sequence[Observed]) -> Iterator[Bin]:
    """Yields the errors of one side by position, by entropy and by the exact probability
    of the token; in this order, from the lowest range up; ranges without a token are left
    out. A range has its lower end, not its upper one; the last range of probabilities has
    both. Sequences without exact values are left out; the others need predicted errors. A
    probability above 1 counts as 1, an entropy below 0 as 0."""
    edges: dict[By, tuple[float, ...]] = {
        "position": POSITIONS, "entropy": ENTROPIES, "probability": PROBABILITIES,
    }  # fmt: skip
    parts = [_columns(seen) for seen in sequences if seen.exact is not None]
    if not parts:
        return
    table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    for by, ends in edges.items():
        for low, high in itertools.pairwise(ends):
            upper = table[by] <= high if high == ends[-1] else table[by] < high
            chosen = (table[by] >= low) & upper
            if chosen.any():
                d, e = table["error"][chosen], table["predicted"][chosen]
                yield Bin(
                    side=side,
                    by=by,
                    label=f"{low:g} to {high:g}" if high < math.inf else f"from {low:g}",
                    tokens=int(chosen.sum()),
                    square=float((d**2).sum()),
                    predicted_square=float((e**2).sum()),
                )


def _columns(seen: Observed) -> dict[str, np.ndarray]:
    """Returns numbers of the tokens that count, float64 [tokens] each, by name:
    `position`, `entropy` (nats, at least 0), `probability` (exact, at most 1), `error`
    and `predicted`. The sequence has exact values and predicted errors."""
    assert seen.exact is not None
    assert seen.predicted is not None
    counts = seen.counts
    return {
        "position": np.flatnonzero(counts).astype(np.float64),
        "entropy": np.maximum(0.0, seen.exact.entropy[counts]),
        "probability": np.minimum(1.0, np.exp(seen.reference[counts])),
        "error": seen.errors[counts],
        "predicted": seen.predicted[counts],
    }


def worst_tokens(side: str, sequences: Iterable[Observed]) -> list[WorstToken]:
    """Returns the tokens with the largest |error| of all tokens that count, the largest
    first, at most MOST; of equal ones the earlier first. Empty where none counts."""
    worst: list[WorstToken] = []
    for seen in sequences:
        size = np.where(seen.counts, np.abs(seen.errors), -1.0)
        least = abs(worst[-1].error) if len(worst) == MOST else -1.0
        at = np.flatnonzero(size > least)
        at = at[np.argsort(-size[at], kind="stable")[:MOST]]
        worst += [_worst_token(side, seen, i) for i in at.tolist()]
        worst = sorted(worst, key=lambda token: -abs(token.error))[:MOST]
    return worst


def _worst_token(side: str, seen: Observed, at: int) -> WorstToken:
    """Returns the record of the token at position `at` of a sequence, which counts.
    `exact` is the reference there, be it the other side's; `entropy` is None without
    exact values."""
    return WorstToken(
        side=side,
        sequence=seen.sequence,
        position=at,
        token=int(seen.record.token_ids[at]),
        error=float(seen.values[at] - seen.reference[at]),
        exact=float(seen.reference[at]),
        entropy=None if seen.exact is None else float(seen.exact.entropy[at]),
    )
