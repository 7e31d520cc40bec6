"""Power and false alarms in brief: `benchmarks/power.py` has the rates, this keeps them honest.

The default rules on sound kernels and on kernels that are wrong on purpose, judged as a report
would be. Sound kernels meet the regimes whose gradients once had them accused.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from on_bench import prepare

from numdev.audit import rows as audit_rows
from numdev.formats import format_named
from numdev.kernels import find
from numdev.report import DeviationRow
from numdev.system import System

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
IN_MANY_HEADS = ("ds_truncated", "dq_accumulator_rounded")
"""Faults too small for the scatter of a single head."""


@pytest.fixture(scope="module")
def power() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("power")


@pytest.fixture(scope="module")
def place(power: ModuleType) -> Any:
    """(regime, shape, format, seed) to where units are measured."""

    @functools.cache
    def at(regime: str, shape: str, fmt: str, seed: int = 0) -> Any:
        case = power.drawn(regime, shape, seed)
        bench = prepare(case, fmt, gradients=True)
        rounded = case.rounded_to(format_named(fmt))
        system = System.here("cpu")
        return power.Place(bench=bench, case=rounded, format=fmt, system=system, pooled={})

    return at


def faulty(power: ModuleType, name: str, on: Any) -> list[DeviationRow]:
    with patch.object(audit_rows, "suspect", return_value={}):
        rows: list[DeviationRow] = power.measured(find(f"planted:{name}"), on)
    return rows


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("regime", ["normal", "sink 24", "correlated", "low rank"])
def test_sound_kernels_are_cleared(power: ModuleType, place: Any, regime: str, fmt: str) -> None:
    """Six kernels, among them PyTorch's own and emulations in other tiles than they claim."""
    units = list(power.sound_units(place(regime, "65 causal, grouped", fmt)))
    assert len(units) == 6
    assert [(u["kernel"], u["why"]) for u in units if u["why"]] == []


def test_every_planted_fault_is_caught(power: ModuleType, place: Any) -> None:
    """In a single unit of plain inputs, or over the heads of four; and in a tensor in which the
    fault shows."""
    torch.manual_seed(0)  # one fault is an order of tiles that is drawn, and may be drawn twice
    on = place("normal", "200 causal", "bfloat16")
    missed = []
    for fault in power.planted.PLANTED:
        assert fault.shows(on.case), fault.name
        rows = faulty(power, fault.name, on)
        if fault.name in IN_MANY_HEADS:
            for seed in (1, 2, 3):
                rows += faulty(power, fault.name, place("normal", "200 causal", "bfloat16", seed))
        unit = power.judged(rows)
        if not any(tensor in fault.tensors for _, tensor, *_ in unit["why"]):
            missed.append(fault.name)
    assert missed == []


def test_the_same_heads_without_a_fault_are_cleared(power: ModuleType, place: Any) -> None:
    """What catches the smallest faults accuses nobody on the same four cases."""
    cases = [place("normal", "200 causal", "bfloat16", seed) for seed in range(4)]
    for kernel in power.sound_kernels():
        rows = [row for on in cases for row in power.measured(kernel, on)]
        assert power.judged(rows)["why"] == [], kernel.name


def test_the_bound_on_a_rate() -> None:
    """Clopper and Pearson's, where it is known: no alarm in n bounds the rate at 1 - 0.05^(1/n);
    20 units at 14 %, as the science says."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        bound = importlib.import_module("power_tables").bound
    assert bound(0, 20) == pytest.approx(1 - 0.05 ** (1 / 20), rel=1e-9)
    assert bound(0, 20) == pytest.approx(0.139, abs=1e-3)
    assert bound(3, 100) == pytest.approx(0.0757, abs=5e-4)  # P(X <= 3) is 0.05 there
    assert bound(5, 5) == 1.0
