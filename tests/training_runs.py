"""Training runs made by hand: distances that grow as chaos does, with everything known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numdev.report import Provenance
from numdev.training.report import DistanceRow, TrainReport, TrainRow, TrainSummary, VariantRecord

STEPS = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100, 150, 200, 300, 400)
RATE = 0.1
"""Growth per step."""
LEVEL = 1e-2
"""Where every distance ends."""


def chaotic(start: float, rate: float = RATE, level: float = LEVEL) -> Callable[[int], float]:
    """Exponential growth from `start` that levels off: the logistic curve."""

    def at(step: int) -> float:
        grown = math.exp(rate * step)
        return level * start * grown / (level + start * (grown - 1))

    return at


STARTS: Mapping[str, float] = {
    "flash": 3e-7,
    "low-precision": 1e-6,
    "attention-precision": 5e-7,
    "null-rounding-1": 2e-9,
    "null-rounding-2": 4e-9,
    "null-ulp": 1e-9,
}
ROLES = {
    "golden": "golden",
    "flash": "flash",
    "low-precision": "low_precision",
    "attention-precision": "attention_precision",
    "other-seed": "other_seed",
    "null-repeat": "null_repeat",
    "null-rounding-1": "null_rounding",
    "null-rounding-2": "null_rounding",
    "null-ulp": "null_ulp",
}


def variant(name: str) -> VariantRecord:
    role = ROLES[name]
    return VariantRecord(
        name=name,
        role=role,
        kernel="sdpa-flash" if role == "flash" else "baseline",
        format="float32" if role == "low_precision" else "bfloat16",
        attention_format="float32" if "precision" in role else "bfloat16",
    )


def distance(variant: str, step: int, mean: float, **changes: Any) -> DistanceRow:
    """W1 is nine tenths of the paired mean, the largest ten times it."""
    fields: dict[str, Any] = {
        "seed": 0, "variant": variant, "step": step, "of": "weights", "group": "all",
        "elements": 1000, "max_abs": 10 * mean, "mean_abs": mean, "rel": 5 * mean, "cosine": 1.0,
        "w1": 0.9 * mean, "spread": 0.02, "equal": float(mean == 0),
    }  # fmt: skip
    return DistanceRow(**{**fields, **changes})


def curves(
    starts: Mapping[str, float] = STARTS, steps: Sequence[int] = STEPS, **changes: Any
) -> list[DistanceRow]:
    """Every perturbed run by its start; another seed, far away from the first step; a repeat."""
    found = []
    for step in steps:
        for name, start in starts.items():
            mean = chaotic(start)(step) if step else 0.0
            found.append(distance(name, step, mean, **changes))
        found.append(distance("other-seed", step, 2 * LEVEL, **changes))
        found.append(distance("null-repeat", step, 0.0, **changes))
    return found


def report(
    distances: Sequence[DistanceRow], names: Sequence[str] = tuple(ROLES), **changes: Any
) -> TrainReport:
    """A run with these distances; without the rows of runs that are not named."""
    kept = tuple(d for d in distances if d.variant in names)
    seeds = tuple(sorted({d.seed for d in kept}))
    rows = tuple(
        TrainRow(
            seed=seed, variant=name, step=step, loss=3 * 0.99**step + 0.01 * seed, grad_norm=1.0,
            lr=1e-3, max_logit=1.0, spectral_norm=1.0,
        )
        for seed in seeds for name in names for step in STEPS
    )  # fmt: skip
    fields: dict[str, Any] = {
        "provenance": Provenance(
            numdev="0", command="numdev train", created="2026-01-01",
            system={"cpu": "CPU", "packages": {"torch": "2.13"}}, source={"config": "a.yaml"},
        ),
        "request": {"target": "a"},
        "summary": TrainSummary(
            answer=("a",), steps=max(STEPS), seeds=seeds, parameters=1000, model="gpt", data="d"
        ),
        "variants": tuple(variant(name) for name in names),
        "rows": rows,
        "distances": kept,
    }  # fmt: skip
    return TrainReport(**{**fields, **changes})
