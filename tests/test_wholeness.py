"""Rows left out of a report, or there twice, are no pass; what numdev leaves out itself is."""

from __future__ import annotations

from typing import Any

import pytest
from compared_reports import case
from gate_rows import control, lse, report, row

from numdev.errors import MeasurementError
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules, Threshold
from numdev.report import AuditReport, DeviationRow

FINITE = Rules(thresholds=(Threshold(name="r", metric="nonfinite", equals=0),))


def rows(*, kernels: tuple[str, ...] = ("a", "b"), **changes: Any) -> list[DeviationRow]:
    """Two kernels, two calls of four heads, all tensors."""
    return [
        lse(head, kernel=kernel, case=name)
        if tensor == "lse"
        else row(head, kernel=kernel, case=name, tensor=tensor, **changes)
        for kernel in kernels
        for name in ("c", "d")
        for tensor in ("out", "dq", "dk", "dv", "lse")
        for head in range(2 if tensor in ("dk", "dv") else 4)
    ]


def told(found: list[DeviationRow], **request: Any) -> AuditReport:
    """A report that says what its calls were: four heads, two kv heads."""
    cases = tuple(case(name).model_copy(update={"kv_heads": 2}) for name in ("c", "d"))
    return report(*found).model_copy(update={"cases": cases, "request": request})


def judged(found: AuditReport) -> int:
    return judge_report(found, FINITE).exit_code


def without(found: list[DeviationRow], **place: Any) -> list[DeviationRow]:
    kept = [r for r in found if any(getattr(r, name) != x for name, x in place.items())]
    assert len(kept) < len(found)
    return kept


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"head": 3, "tensor": "out"}, "no kernel has a row for out of c head 3"),
        ({"head": 1, "tensor": "dv"}, "no kernel has a row for dv of c head 1"),
        ({"head": 3, "tensor": "out", "kernel": "a"}, "a (bfloat16) has no row for out of c head"),
        ({"head": 3, "tensor": "lse", "kernel": "a"}, "a (bfloat16) has no row for lse of c head"),
        ({"case": "d", "kernel": "b"}, "b (bfloat16) has no row for out of d head 0"),
        ({"tensor": "dk", "kernel": "b"}, "b (bfloat16) has no row for dk of c head 0"),
        ({"case": "d"}, "no kernel has a row for the case d"),
    ],
)
def test_a_row_that_is_missing_is_no_pass(place: dict[str, Any], said: str) -> None:
    """A head of one kernel or of all, a call, a gradient."""
    with pytest.raises(MeasurementError) as error:
        judged(told(without(rows(), **place)))
    assert said in str(error.value)


def test_a_row_that_is_there_twice_is_no_pass() -> None:
    """Nor where it is sound: it would have a share of every median."""
    with pytest.raises(MeasurementError, match="several rows for dq of c head 0"):
        judged(report(*rows(), row(0, kernel="a", tensor="dq")))


def test_a_seed_of_a_sweep_that_is_missing_is_no_pass() -> None:
    """The one in which all went wrong, say."""
    both = [row(h, case=c, seed=s) for h in range(4) for c in ("c", "d") for s in (0, 1)]
    assert judged(told(both, seeds=[0, 1])) == 0
    with pytest.raises(MeasurementError, match="the case d, seed 1"):
        judged(told(without(both, case="d", seed=1), seeds=[0, 1]))


@pytest.mark.parametrize("tensor", ["out", "dq"])
@pytest.mark.parametrize("status", ["skipped", "failed"])
def test_a_call_that_says_why_it_has_no_rows_is_whole(status: str, tensor: str) -> None:
    """One row stands for all of the pass: skipped calls pass, failed ones do not."""
    lost = ("out", "dq", "dk", "dv", "lse") if tensor == "out" else ("dq", "dk", "dv")
    kept = [r for r in rows() if (r.kernel, r.case) != ("b", "d") or r.tensor not in lost]
    bare = row(None, kernel="b", case="d", tensor=tensor, status=status, reason="why")
    assert judged(told([*kept, bare])) == (0 if status == "skipped" else 3)


def test_what_need_not_be_there() -> None:
    """The log-sum-exp of a kernel that returns none, heads that were not asked for, and dk and dv
    of planted faults where rows are sampled."""
    assert judged(told(without(rows(), kernel="a", tensor="lse"))) == 0
    two = [r for r in rows() if r.head is None or r.head < 1]
    assert judged(told(two, heads=[0])) == 0
    planted = [
        control("scale", dose, 5.0, head=h, case=c, tensor=t)
        for dose in (0.01, 0.03) for h in range(4) for c in ("c", "d") for t in ("out", "dq")
    ]  # fmt: skip
    assert judged(told([*rows(), *planted])) == 0
    with pytest.raises(MeasurementError, match="control:scale"):
        judged(told([*rows(), *planted[:-1]]))


def test_the_older_report_must_be_whole_too() -> None:
    """Else what it lacks would be new, and what it has twice would narrow its spread."""
    change = Rules(thresholds=(Threshold(name="r", metric="rms", over="before", at_most=1.1),))
    found = told(rows())
    assert judge_report(found, change, found).exit_code == 0
    with pytest.raises(MeasurementError, match="the older report is not whole"):
        judge_report(found, change, told(without(rows(), head=3, tensor="out")))


def test_a_call_of_a_strange_number_of_heads_is_not_whole() -> None:
    """At once, whatever the number is."""
    found = told(rows())
    many = tuple(c.model_copy(update={"heads": 10**30}) for c in found.cases)
    with pytest.raises(MeasurementError, match="no kernel has a row for out of c head 4"):
        judged(found.model_copy(update={"cases": many}))


@pytest.mark.parametrize("seeds", [None, 3, "x", [], ["x", {}], [[0]], {"a": 1}])
def test_a_strange_request_is_no_error(seeds: Any) -> None:
    """It is whatever a file says."""
    assert judged(told(rows(), seeds=seeds, heads=None)) == 0


def test_a_call_out_of_a_model_has_no_seed() -> None:
    """A request that says seeds for what it draws does not ask for them of captured calls."""
    found = told(rows(seed=None), seeds=[0])
    assert judged(found) == 0
