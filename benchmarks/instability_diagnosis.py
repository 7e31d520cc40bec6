"""What `numdev diagnose` says of checkpoints, beside what their variants are known to round and
what became of them.

A checkpoint's number is the median over its heads, since a head whose gradient vanishes has any
relative error; a variant's is the median over seeds. Part of delta's error: what the error of delta
alone makes of dW_Q's, by the second paper's formula 2, over the whole error. Near 1 its chain's
second link is what happens; where it is small something else is, and where it is large other
roundings take it back.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from instability_page import EVENTS, by_variant, median_step, table
from instability_runs import Run
from instability_warnings import SHARE_OF_DELTA, T_OF_DELTA

CERTAIN = 4.0
"""|t| from which an error of delta counts as of one sign: `numdev.diagnose.heads` has it so."""
SHOWN = {
    "dS row sum": "diagnose: dS row sum, median head",
    "dW_Q error": "diagnose: dW_Q error, median head",
    "part of delta's error": SHARE_OF_DELTA,
    "tied rows": "diagnose: tied rows, median head",
}


def said(runs: Sequence[Run]) -> str:
    """By variant with diagnosed checkpoints: the series of each signal, and what became of it."""
    ours = {
        name: own
        for name, own in by_variant(run for run in runs if T_OF_DELTA in run.signals).items()
    }
    if not ours:
        return "No checkpoint is of these runs."
    steps = sorted({int(s) for own in ours.values() for s in own[0].signals[T_OF_DELTA].index})
    parts = []
    for word, signal in SHOWN.items():
        rows = (_row(name, own, signal, steps) for name, own in ours.items())
        head = ("variant", "S", "O", "dP", "delta", *(f"step {s}" for s in steps), "broke, median")
        parts += [f"**{word}**", table(head, rows)]
    return "\n\n".join([*parts, _of_one_sign(ours)])


def _row(name: str, runs: Sequence[Run], signal: str, steps: Sequence[int]) -> tuple[str, ...]:
    sites = [str(getattr(runs[0].sites, column, "?")) for column in ("S", "O", "dP", "delta")]
    series = [run.signals[signal] for run in runs if signal in run.signals]
    values = ([float(own[s]) for own in series if s in own.index] for s in steps)
    shown = (f"{statistics.median(found):.2g}" if found else "" for found in values)
    return name, *sites, *shown, median_step(runs, EVENTS["broke"])


def _of_one_sign(runs: Mapping[str, Sequence[Run]]) -> str:
    found = [x for own in runs.values() for run in own for x in run.signals[T_OF_DELTA]]
    some = sum(x >= CERTAIN for x in found)
    return (
        f"Of {len(found)} checkpoints {some} have a head whose error of delta is of one sign "
        f"(|t| of {CERTAIN:g} or more); the largest |t| is {max(found):.1f}."
    )
