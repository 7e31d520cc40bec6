"""Suspicion names planted mistakes rightly and leaves sound kernels alone.

The tables of benchmarks/suspicion_rates.py, at a size for every day: its full run is 486 units.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from on_bench import measured_rows
from oracles import make_case

from numdev.audit.plan import Task
from numdev.explain.probe import MAX_ROWS, blocks_of
from numdev.explain.wrong_function import CUT, far_off, suspect
from numdev.formats import format_named, round_to
from numdev.gate.findings import findings_of
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import attend
from numdev.report import DeviationRow
from numdev.system import System


def _rates() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "suspicion_rates.py"
    spec = importlib.util.spec_from_file_location("suspicion_rates", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["suspicion_rates"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


rates = _rates()
CAUSAL = (("is_causal", True),)
LOST_IN_ROUNDING = {("scale x 1.01", "bfloat16")}
"""One bfloat16 rounding of the output is more than a tenth of what this mistake does."""


@pytest.mark.parametrize("fmt", ["bfloat16", "float32"])
@pytest.mark.parametrize("planted", rates.PLANTED, ids=lambda p: p.name)
def test_a_planted_mistake_is_named(planted, fmt: str) -> None:
    """Every planted wrong function is named by its own cause, and by no other."""
    case = rates.make(planted.shape, "normal", fmt, 0)
    out = round_to(planted.wrong(case).double(), case.format).to(case.q.dtype)
    said = rates.judge(case, out, attend(case), always=False)
    hidden = (planted.name, fmt) in LOST_IN_ROUNDING
    assert rates.verdict(planted, said) == ("none" if hidden else "right"), said


@pytest.mark.parametrize("regime", rates.REGIMES)
@pytest.mark.parametrize(
    "shape",
    [
        rates.Shape(batch=1, heads=2, kv_heads=1, q_len=24, kv_len=24, changes=CAUSAL),
        rates.Shape(batch=1, heads=2, kv_heads=2, q_len=5, kv_len=2),
    ],
    ids=["grouped, causal", "two keys"],
)
def test_sound_kernels_are_not_accused(shape, regime: str) -> None:
    """No sound kernel is accused, though the search is forced on every head."""
    case = rates.make(shape, regime, "bfloat16", 7)
    for name in ("sdpa-flash", "baseline"):
        out = find(name).attend(case).out
        assert rates.judge(case, out, attend(case), always=True) == ["none"], name


def test_noise_is_not_a_function() -> None:
    """An output that is far off at random is far off, and nothing is named."""
    case = rates.make(rates.SHAPES["causal"], "normal", "bfloat16", 0)
    exact = attend(case)
    out = exact.out + torch.randn(exact.out.shape, generator=torch.Generator().manual_seed(0))
    assert rates.judge(case, out.to(case.q.dtype), exact, always=False) == ["none"]


def test_what_coincides_is_not_accused() -> None:
    """With one query that sees every key, an ignored causal mask changes nothing."""
    case = rates.make(rates.SHAPES["decode"], "normal", "float32", 0)
    case = dataclasses.replace(case, is_causal=True, causal_offset=case.kv_len - 1)
    out = attend(dataclasses.replace(case, is_causal=False)).out.float()
    assert rates.judge(case, out, attend(case), always=False) == ["not far off"]


def test_causes_that_coincide_are_all_named() -> None:
    """With two kv heads the next one is the previous one: mappings that agree are one cause; and
    one query head per kv head cannot tell a rolled from a reversed order."""
    case = rates.make(rates.Shape(heads=2, kv_heads=2), "normal", "float32", 0)
    out = attend(dataclasses.replace(case, k=case.k.flip(1), v=case.v.flip(1))).out.float()
    assert rates.judge(case, out, attend(case), always=False) == [
        "query heads read the next kv head"
    ]


def test_one_wrong_head_is_the_only_one_accused() -> None:
    """A mistake in one head is found in that head, and the others are cleared."""
    case = rates.make(rates.SHAPES["plain"], "normal", "bfloat16", 0)
    out = rates.one_head(case).to(case.q.dtype)
    every = list(range(case.heads))
    found = suspect(case, out, attend(case), every, every)
    assert list(found) == [2]
    assert found[2].cause == "the scale is 2.000 times what was asked"
    assert found[2].cut >= CUT


def test_outputs_that_are_not_finite() -> None:
    """NaN in some rows does not hide the cause; NaN everywhere names none."""
    case = rates.make(rates.SHAPES["causal"], "normal", "float32", 0)
    out = rates.off_by_one(case, -1)  # row 0 sees nothing and is NaN
    assert out.isnan().any()
    assert "too few" in rates.judge(case, out, attend(case), always=False)[0]
    nothing = torch.full_like(out, math.nan)
    assert suspect(case, nothing, attend(case), [0, 1, 2, 3], [0]) == {}


@pytest.mark.parametrize(
    ("floors", "baselines", "far"),
    [
        (9.9, 100.0, False),
        (150.0, 1.9, False),
        (10.0, 2.0, True),
        (10.0, None, True),
        (None, 5.0, False),
    ],
)
def test_when_a_search_begins(floors: float | None, baselines: float | None, far: bool) -> None:
    """Ten floors are needed for a tenfold cut; what the baseline errs as well is rounding."""
    assert far_off({"floor_ratio": floors, "baseline_ratio": baselines}) == far


@pytest.mark.parametrize("length", [1, 8, 64, 65, 1000])
@pytest.mark.parametrize("worst", [0, 0.5, 1])
def test_the_rows_that_are_looked_at(length: int, worst: float) -> None:
    """At most MAX_ROWS distinct rows, in order, among them the first, the last and the worst."""
    at = int(worst * (length - 1))
    rows = [i for b in blocks_of(length, MAX_ROWS, at) for i in range(b.start, b.stop)]
    assert rows == sorted(set(rows))
    assert len(rows) <= MAX_ROWS
    assert {0, length - 1, at} <= set(rows)


# --- in an audit ---------------------------------------------------------------------------------


def _rows(function, **fields) -> list[DeviationRow]:
    case = make_case(q_len=48, kv_len=48, heads=4, head_dim=16, **fields).rounded_to(
        format_named("bfloat16")
    )
    task = Task(case=case.ref, role="kernel", kernel="mine", format="bfloat16")
    kernel = Kernel(name="mine", function=function)
    return measured_rows(task, kernel, case, System.here("cpu"))


def test_rows_and_the_report_say_it() -> None:
    """Every accused head's row has the cause and the cut; there is one finding."""
    rows = _rows(
        lambda case: Output(out=attend(dataclasses.replace(case, is_causal=False)).out),
        is_causal=True,
    )
    assert [row.suspicion for row in rows] == ["the causal mask is ignored"] * 4
    assert all(row.suspicion_cut and row.suspicion_cut >= CUT for row in rows)
    (finding,) = [f for f in findings_of(rows)[0] if f.rule == "function"]
    assert finding.sentence.startswith(
        "mine computes a different function: the causal mask is ignored (residual "
    )
    assert "4 of 4 heads, bfloat16; first at" in finding.sentence
