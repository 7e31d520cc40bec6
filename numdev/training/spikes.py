"""Which recorded losses are spikes: far above their recent past.

The rule: above 1.2 times the median of the run's last 20 recorded losses, and above that median by
more than 6 times their median absolute deviation. The first 3 recorded losses are never spikes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median

from numdev.training.report import TrainRow

PAST, LEAST = 20, 3
TIMES, DEVIATIONS = 1.2, 6.0


def marked(rows: Iterable[TrainRow]) -> tuple[TrainRow, ...]:
    """The rows with `spike` set by the rule. Rows of one run come in the order of their steps; a
    loss that is None is no spike, and no past for others."""
    pasts: dict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=PAST))
    found = []
    for row in rows:
        past = pasts[row.seed, row.variant]
        spike = row.loss is not None and is_spike(row.loss, past)
        found.append(row.model_copy(update={"spike": spike}))
        if row.loss is not None:
            past.append(row.loss)
    return tuple(found)


def is_spike(loss: float, past: Iterable[float]) -> bool:
    """Whether a loss stands far above those before it."""
    before = list(past)
    if len(before) < LEAST:
        return False
    middle = median(before)
    deviation = median(abs(x - middle) for x in before)
    return loss > TIMES * middle and loss > middle + DEVIATIONS * deviation
