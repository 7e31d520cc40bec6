"""A report is judged where it holds what its plan says, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from gate_rows import case, lse, planned, row, together, unjudged
from gate_rows import report as report

from numdev.errors import MeasurementError
from numdev.gate import judging
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules, Threshold
from numdev.report import AuditReport, DeviationRow

FINITE = Rules(thresholds=(Threshold(name="r", metric="nonfinite", at_most=0),))


def rows(**changes: Any) -> list[DeviationRow]:
    """Two kernels, two calls of four heads in groups of two, with two seeds, all
    tensors."""
    return together([
        (lse if tensor == "lse" else row)(
            head, **{"kernel": kernel, "case": name, "seed": seed, "tensor": tensor, **changes}
        )
        for kernel, name, seed in itertools.product("ab", "cd", (0, 1))
        for tensor in ("out", "dq", "dk", "dv", "lse")
        for head in range(2 if tensor in ("dk", "dv") else 4)
    ])  # fmt: skip


def audited(result: list[DeviationRow], **plan: Any) -> AuditReport:
    """A report of these rows that was to have all of `rows()`."""
    cases = tuple(case(name, 4, 2) for name in "cd")
    return unjudged(*result).model_copy(
        update={"cases": cases, "plan": planned(rows(), **plan)}
    )


def judged(result: AuditReport) -> int:
    return judge_report(judging.judged(result), FINITE).exit_code


def without(result: list[DeviationRow], **place: Any) -> list[DeviationRow]:
    others = [
        r for r in result if any(getattr(r, name) != x for name, x in place.items())
    ]
    assert len(others) < len(result)
    return others


def test_a_whole_report_is_judged() -> None:
    assert judged(audited(rows())) == 0
    without_lse = together([r for r in rows() if r.tensor != "lse"])
    assert judged(audited(without_lse)) == 0, "it need not be returned"
    with pytest.raises(
        MeasurementError, match="has no rows for one of out, dq, dk, dv, lse"
    ):
        judged(audited([r for r in rows() if r.tensor != "lse"]))


@pytest.mark.parametrize(("place", "words"), [
    ({"head": 3, "tensor": "out"}, ("a (bfloat16) has no row for out head 3, or several of c")),
    ({"head": 1, "tensor": "dv", "kernel": "b"}, "b (bfloat16) has no row for dv head 1"),
    ({"head": 3, "tensor": "lse", "kernel": "a"}, ("a (bfloat16) has no row for lse head 3")),
    ({"tensor": "dk", "kernel": "b"}, "b (bfloat16) has no row for dk head 0"),
    ({"case": "d"}, "a (bfloat16) has no row for out head 0, or several of d, seed 0"),
    ({"case": "d", "seed": 1}, "or several of d, seed 1"),
    ({"kernel": "b"}, "b (bfloat16) has no row for out head 0"),
    ({"kernel": "a", "case": "c", "seed": 1, "tensor": "out", "head": 0}, "of c, seed 1"),
])  # fmt: skip
def test_what_was_planned_and_is_not_there_is_no_pass(
    place: dict[str, Any], words: str
) -> None:
    """A head, a tensor, a call, a seed, a kernel: of one, or of all."""
    with pytest.raises(MeasurementError) as error:
        judged(audited(without(rows(), **place)))
    assert words in str(error.value)


@pytest.mark.parametrize("change", [{"kernel": "emulated"}, {"role": "baseline"},
                                    {"format": "float64"}, {"options": {"b": 1}}])  # fmt: skip
def test_what_goes_by_another_name_is_not_there(change: dict[str, Any]) -> None:
    """A rule that leaves the other name out would judge nothing."""
    result = [r.model_copy(update=change) if r.kernel == "b" else r for r in rows()]
    with pytest.raises(MeasurementError, match="inconsistent report: b "):
        judged(audited(result))


def test_what_was_not_planned_is_refused() -> None:
    """A row that is there twice would have a share of every median; and another kernel's
    rows."""
    for more, words in (
        (row(0, kernel="a", tensor="dq"), "a .* dq head 0, or several of c"),
        (row(9, kernel="a"), "a row too many, out head 9, of c"),
        (row(0, kernel="z"), "were not planned: z"),
    ):
        with pytest.raises(MeasurementError, match=words):
            judged(audited([*rows(), more]))


def test_a_call_is_measured_whole_or_skipped_whole() -> None:
    """A row that says why a call was skipped excuses no row that is missing beside
    measured ones; one of dq stands for all gradients."""
    skipped = row(None, kernel="a", status="skipped", reason="no")
    less = without(rows(), kernel="a", case="c", seed=0, tensor="out", head=3)
    with pytest.raises(MeasurementError, match="a row too many"):
        judged(audited([*less, skipped]))
    at = {"kernel": "a", "case": "c", "seed": 0}
    assert judged(audited([*without(rows(), **at), skipped])) == 0
    is_at = lambda r: all(getattr(r, name) == x for name, x in at.items())  # noqa: E731
    bare = [r for r in rows() if r.tensor in ("out", "lse") or not is_at(r)]
    bare = [
        r.model_copy(update={"tensors": ("out", "lse")}) if is_at(r) else r for r in bare
    ]
    assert judged(audited([*bare, skipped.model_copy(update={"tensor": "dq"})])) == 0


def test_heads_that_were_asked_for() -> None:
    """Head 3 with its gradients takes its group along."""
    some = [
        r
        for r in rows()
        if (r.head == 1 if r.tensor in ("dk", "dv") else r.head in (2, 3))
    ]
    assert judged(audited(some, heads=(3,))) == 0
    with pytest.raises(MeasurementError, match="out head 2"):
        judged(audited(without(some, head=2, tensor="out", kernel="b"), heads=(3,)))


def test_baselines_of_rows_have_no_gradients_of_keys() -> None:
    """Those of kernels are there."""
    plain = [
        r.model_copy(update={"role": "baseline"}) if r.kernel == "b" else r
        for r in rows()
    ]
    less = [r for r in plain if r.kernel != "b" or r.tensor not in ("dk", "dv")]
    plan = planned(plain, rows=64)
    assert judged(audited(together(less)).model_copy(update={"plan": plan})) == 0
    with pytest.raises(MeasurementError, match=r"b .* dk head 0"):
        judged(audited(together(less)).model_copy(update={"plan": planned(plain)}))


@pytest.mark.parametrize(("change", "words"), [
    *(({name: None}, "no error values") for name in ("elements", "rms", "mean_abs", "max_abs")),
    ({"elements": 0}, "has no error values"), ({"elements": 999}, "than the floor"),
    ({"sequences": 1}, "than the floor"), ({"sequences": None}, "than the floor"),
    ({"layer": 1}, "has rows of another call"), ({"rms": 1e-9}, "a mean error above"),
    ({"max_abs": 1e-9}, "an rms above the largest"),
    ({"interval": {"rms": (1.0, 2.0)}}, "an interval of rms without its value"),
    ({"rms_rows": 0.5, "rows_measured": 100}, "an rms of 0.5 rows, of 100"),
    ({"rms_rows": 101.0, "rows_measured": 100}, "an rms of 101 rows, of 100"),
    ({"error_rows": 0.5, "rows_measured": 100}, "an error of 0.5 rows, of 100"),
    ({"error_rows": 101.0, "rows_measured": 100}, "an error of 101 rows, of 100"),
])  # fmt: skip
def test_a_row_that_contradicts_itself_or_its_floor_is_refused(
    change: Any, words: str
) -> None:
    """In one head of one kernel, beside the floor of the same head."""
    for fmt in ("bfloat16", "float16"):
        if fmt == "float16" and "elements" in change:
            continue  # of which fewer may be finite
        floor = [row(h, role="floor", kernel="floor", format=fmt) for h in range(4)]
        sound = [row(h, format=fmt) for h in range(4)]
        assert judge_report(report(*floor, *sound), FINITE).exit_code == 0
        with pytest.raises(MeasurementError, match=words):
            judge_report(report(*floor, *sound[:3], row(3, format=fmt, **change)), FINITE)


@pytest.mark.parametrize("name", ["expected_ratio", "rms_ratio", "worst_row", "noise",
                                  "bias_p", "bias_size", "nonfinite"])  # fmt: skip
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize(
    "reason", [None, "needs at least two sequences", "0/0", "because"]
)
def test_a_number_that_lacks_for_no_reason_is_no_pass(
    name: str, heads: int, reason: Any
) -> None:
    """In one head or in all, whatever reason it gives."""
    nulls = {} if reason is None else {name: reason}
    lacking = [row(h, claim="fa2", **{name: None}, nulls=nulls) for h in range(heads)]
    others = [row(h, claim="fa2") for h in range(heads, 8)]
    assert judge_report(report(*lacking, *others)).exit_code == 3


@pytest.mark.parametrize(("policy", "named", "codes"), [
    ("refused-only", True, (3, 0)), ("refused-only", False, (0, 0)),
    ("never", False, (3, 3)), ("allow", True, (0, 0)),
])  # fmt: skip
def test_what_was_asked_for_and_skipped(
    policy: Any, named: bool, codes: tuple[int, int]
) -> None:
    """A kernel that ran in no call, and one that refused one of two."""
    book = FINITE.model_copy(update={"skipped": policy})
    away = row(None, kernel="away", status="skipped", reason="not installed")
    some = [row(kernel="away", case="d"), away]
    for rows, code in (
        ([away, away.model_copy(update={"case": "d"})], codes[0]),
        (some, codes[1]),
    ):
        result = report(row(), row(case="d"), *rows)
        plan = result.plan.model_copy(update={"named": named})
        again = judging.judged(result.model_copy(update={"plan": plan}), book)
        assert judge_report(again, book).exit_code == code


@pytest.mark.parametrize(("asked", "plan", "words"), [
    ({"repeats": 3}, {"repeats": 2}, "differ in `repeats`"),
    ({"rows": 64}, {}, "differ in `rows`"),
    ({"backward": False}, {}, "differ in `backward`"),
    ({"heads": [1]}, {}, "differ in `heads`"),
    ({"formats": ["bfloat16", "float16"]}, {}, "has other formats than the request"),
])  # fmt: skip
def test_a_plan_is_what_was_requested(asked: Any, plan: Any, words: str) -> None:
    """Of each thing that decides which rows there are."""
    result = audited(rows(), **plan).model_copy(update={"request": asked})
    with pytest.raises(MeasurementError, match=words):
        judged(result)


@pytest.mark.parametrize(("name", "words"), [
    ("kernels", "has a kernel twice"), ("formats", "a format or a call twice"),
    ("calls", "a format or a call twice"),
])  # fmt: skip
def test_nothing_is_planned_twice(name: str, words: str) -> None:
    """A kernel that stands there twice would be judged by half of its rows."""
    result = audited(rows())
    twice = (*getattr(result.plan, name), getattr(result.plan, name)[0])
    plan = result.plan.model_copy(update={name: twice})
    with pytest.raises(MeasurementError, match=words):
        judged(result.model_copy(update={"plan": plan}))
