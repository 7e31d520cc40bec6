"""Rows of a diagnosis as tests make them up: a head that does what the chain says, and one that
rounds without harm."""

from __future__ import annotations

from typing import Any

from numdev.diagnose.report import (
    Bias,
    CureRow,
    DeltaError,
    HeadRow,
    Imbalance,
    KernelRow,
    RunningError,
)


def delta(**changes: Any) -> DeltaError:
    made = {"formula": "dO*O", "mean": -0.004, "rms": 0.005, "t": -14.0, "run": 12.0, "dw_q": 0.03}
    return DeltaError(**{**made, **changes})


def guilty(
    layer: int = 3, head: int = 5, *, moved: float | None = 0.031, **changes: Any
) -> HeadRow:
    """Every condition met."""
    module = f"layers.{layer}.self_attn"
    other = delta(formula="dP*P", mean=1e-5, rms=0.001, t=0.4, run=1.1, dw_q=0.0004)
    made: dict[str, Any] = {
        "checkpoint": "run-step100", "step": 100, "case": f"{module}#0", "module": module,
        "layer": layer, "head": head, "rows": 2040, "tied": 0.42, "ones": 0.42, "powers": 0.81,
        "one_signed": 0.9, "pv": Bias(mean=-0.1, rms=0.3, t=-11.0, outward=0.11),
        "out": Bias(mean=-0.09, rms=0.3, t=12.0, outward=0.09), "ds_row_sum": 0.004,
        "delta": (delta(dw_q=moved), other), "similarity": 0.55,
        "dw_q_error": None if moved is None else 1.2 * moved,
        "dw_q_cos": None if moved is None else 0.93, "dw_q_unbalanced": moved,
        "delta_unbalanced": Imbalance(mean=-0.004, rms=0.005, t=-13.0, run=11.0),
        "dw_q_norm": None if moved is None else 2.0, "spectral_norm": 31.0, "spectral_ratio": 2.6,
    }  # fmt: skip
    return HeadRow(**{**made, **changes})


def innocent(
    layer: int = 0, head: int = 0, *, moved: float | None = 3e-4, **changes: Any
) -> HeadRow:
    """No condition met, but the usual rounding."""
    own = delta(mean=2e-5, rms=0.002, t=0.6, run=1.2, dw_q=moved)
    made: dict[str, Any] = {
        "tied": 0.0, "ones": 0.0, "powers": 0.06, "one_signed": None,
        "pv": Bias(mean=0.001, rms=0.29, t=0.3, outward=0.001),
        "out": Bias(mean=0.001, rms=0.29, t=-0.7, outward=-0.002), "ds_row_sum": 0.001,
        "delta": (own, own.model_copy(update={"formula": "dP*P"})),
        "similarity": 0.04, "dw_q_error": moved, "spectral_norm": 12.0, "spectral_ratio": 1.0,
        "nulls": {"one_signed": "no row is tied"},
    }  # fmt: skip
    return guilty(layer, head, moved=moved, **{**made, **changes})


def cured(name: str, row: HeadRow, left: float, **changes: Any) -> CureRow:
    """A cure that leaves this share of the head's trouble."""
    used = row.delta[0]
    made: dict[str, Any] = {
        "pv": row.pv, "out": row.out, "delta_mean": (used.mean or 0.0) * left,
        "delta_rms": used.rms, "delta_t": (used.t or 0.0) * left, "ds_row_sum": row.ds_row_sum,
        "dq_rel": 0.01 * left, "dk_rel": 0.01, "dv_rel": 0.003,
        "dw_q_error": None if row.dw_q_error is None else row.dw_q_error * left,
    }  # fmt: skip
    return CureRow(**row.place, cure=name, **{**made, **changes})


def real(name: str, row: HeadRow, **changes: Any) -> KernelRow:
    """A real kernel that errs as the head does."""
    made: dict[str, Any] = {"out": row.out, "delta": row.delta[0], "dq_rel": 0.01}
    return KernelRow(**row.place, kernel=name, **{**made, **changes})


def running(row: HeadRow, drift: float) -> tuple[RunningError, ...]:
    """A running sum that drifts, and one that does not."""
    tokens = tuple(range(0, 256, 4))
    sums = {"dO*O": tuple(drift * t / 256 for t in tokens), "dP*P": (0.01,) * len(tokens)}
    return tuple(RunningError(**row.place, formula=f, tokens=tokens, sums=sums[f]) for f in sums)
