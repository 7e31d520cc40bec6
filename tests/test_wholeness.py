"""Rows left out of a report, or there twice, are no pass; what numdev leaves out itself is."""

from __future__ import annotations

from typing import Any

import pytest
from compared_reports import case
from gate_rows import lse, report, row

from numdev.errors import MeasurementError
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules, Threshold
from numdev.report import AuditReport, DeviationRow

FINITE = Rules(thresholds=(Threshold(name="r", metric="nonfinite", at_most=0),))


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


def test_a_skipped_row_among_measured_ones_excuses_none() -> None:
    """A kernel measures all heads of a call, or skips it whole and says why."""
    skipped = row(None, kernel="a", case="c", status="skipped", reason="no")
    less = without(rows(), kernel="a", case="c", tensor="out", head=3)
    with pytest.raises(MeasurementError, match="has no row for out of c head 3"):
        judged(told([*less, skipped]))
    none = [r for r in rows() if (r.kernel, r.case) != ("a", "c")]
    assert judged(told([*none, skipped])) == 0


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
