"""The gate: what passes, what exceeds, and that nothing it could not judge ever passes.

Rows are made by hand; each test of a limit has the numbers on both sides of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gate_rows import SOUND, control, judge, lse, report, row, rule_tests

from numdev.errors import MeasurementError
from numdev.gate.findings import run_findings
from numdev.gate.judgement import Judgement
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules, Threshold, default_rules, default_rules_for_checks
from numdev.metrics.metrics_by_name import interval_of, value_of
from numdev.report import DeviationRow


def rules(**threshold: Any) -> Rules:
    """A rule book with one rule."""
    return Rules(thresholds=(Threshold(**{"name": "r", **threshold}),))


def verdict(judged: Judgement, rule: str, tensor: str | None = "out") -> Any:
    (result,) = (v for v in judged.tests if v.rule == rule and v.tensor == tensor)
    return result


def test_a_sound_kernel_passes() -> None:
    """All that is to be measured was, and within every limit."""
    judged = judge([*(row(h) for h in range(8)), *(lse(h) for h in range(8))])
    assert (judged.outcome, judged.exit_code, judged.fa_rule) == ("passed", 0, (8, 8))
    assert {v.outcome for v in judged.tests} == {"passed"}


@pytest.mark.parametrize(("tensor", "fmt", "metric", "at", "beyond"), [
    ("out", "bfloat16", "expected_ratio", 1.1, 1.11), ("dv", "bfloat16", "worst_row", 5.0, 5.01),
    ("dv", "bfloat16", "expected_ratio", 1.1, 1.11), ("dq", "bfloat16", "worst_row", 20.0, 20.1),
    ("dq", "bfloat16", "expected_ratio", 3, 3.01), ("dk", "bfloat16", "expected_ratio", 3, 3.01),
    ("dq", "bfloat16", "rms_ratio", 3.0, 3.01), ("dv", "float16", "rms_ratio", 1.1, 1.11),
    ("dk", "float32", "expected_ratio", 16.0, 16.1), ("out", "bfloat16", "noise", 0.0, 1e-12),
    # U / sqrt(12) = 1.128e-3 of terms of size 1
    ("dq", "bfloat16", "noise", 1.12e-3, 1.13e-3),
])  # fmt: skip
def test_limits_of_a_tensor(
    tensor: str, fmt: str, metric: str, at: float, beyond: float
) -> None:
    """Each tensor, and float32, has its own: at it passes, beyond it does not."""
    for value, code in ((at, 0), (beyond, 1)):
        limited = row(1, tensor=tensor, format=fmt, **{metric: value})
        assert judge([row(0), limited]).exit_code == code


def test_instead_takes_the_first_that_fits() -> None:
    """And needs a limit that it is instead of."""
    others = ({"tensor": "dq", "at_most": 3}, {"format": "bf*", "at_most": 2})
    wide = rules(metric="rms", at_most=1, instead=others)
    for where, limit in (
        ({"tensor": "dq"}, 3), ({"tensor": "dk"}, 2), ({"tensor": "dk", "format": "float16"}, 1),
    ):  # fmt: skip
        assert judge([row(rms=float(limit), **where)], wide).exit_code == 0
        assert judge([row(rms=limit + 0.01, **where)], wide).exit_code == 1
    with pytest.raises(ValueError, match="need at_most"):
        rules(metric="suspicion", absent=True, instead=others)


def test_the_typical_head_is_the_median() -> None:
    """Half of the heads may be beyond it by luck; when more are, all of those are
    accused. Of four to seven heads the limit is wider, of fewer nothing is said."""
    lucky = [row(h, tensor="dq", expected_ratio=0.8 if h % 2 else 1.2) for h in range(8)]
    assert judge([row(), *lucky]).exit_code == 0
    large = [
        row(h, tensor="dq", expected_ratio=1.0 if h < 3 else 1.06 + h / 100)
        for h in range(8)
    ]
    judged = judge([row(), *large])
    result = verdict(judged, "typical head", "dq")
    assert (result.outcome, result.offending, result.judged) == ("exceeded", 5, 8)
    assert result.observed == pytest.approx(1.09)  # of 1.13 1.12 1.11 1.10 1.09 1 1 1
    assert result.median
    assert result.places[0].head == 7
    few = judge([row(), *large[5:]])
    assert verdict(few, "typical head", "dq").reasons == ("needs 4 results, has 3",)
    four = [row(h, tensor="dq", expected_ratio=1.26) for h in range(4)]
    pooled = [*four, *(row(h, tensor="dq", case="other") for h in range(5))]
    of_check = default_rules_for_checks()  # whose cases are judged each by itself
    assert judge(pooled).exit_code == 0 < judge(pooled, of_check).exit_code
    assert (
        few.exit_code == judge([row(), *large[4:]]).exit_code == 0 < judge(four).exit_code
    )


def test_the_rms_is_judged_by_its_median_too() -> None:
    """Of each tensor at its own limit; a report without the number is no pass. Of sampled
    rows the limit is 1.1, as an interval around 1 contains one that is nearer."""
    for tensor, at in (("out", 1.05), ("dq", 1.015), ("dk", 1.03)):
        for value, code in ((at, 0), (at + 0.001, 1), (None, 3)):
            heads = [row(h, tensor=tensor, rms_ratio=value) for h in range(8)]
            assert judge(heads).exit_code == code, (tensor, value)
    sampled: Any = {"sampled": True}
    for ends, code in (((0.96, 1.04), 0), ((0.96, 1.12), 3), ((1.11, 1.2), 1)):
        interval = dict.fromkeys(("expected_ratio", "noise_ratio", "rms"), (1.0, 1.04))
        sampled |= {
            "interval": {**interval, "rms_ratio": ends},
            "rms_ratio": sum(ends) / 2,
        }
        heads = [row(h, tensor="dq", **sampled) for h in range(8)]
        assert judge(heads).exit_code == code, ends


def test_where_few_rows_are_most_of_the_error_luck_is_theirs() -> None:
    """dq of 8 heads: 1 + 2.5 x 1.25 / sqrt(8 numbers x 10 rows x 8 heads) = 1.1236, of
    100 rows 1.0391; dk's scatter is 6: 1.2965, and 1.0938."""
    for tensor, rows_in_effect, limit in (
        ("dq", 10.0, 1.124), ("dq", 100.0, 1.04), ("dk", 10.0, 1.297), ("dk", 100.0, 1.094),
    ):  # fmt: skip
        for excess, code in ((0.0, 0), (1e-3, 1)):
            of: Any = {"tensor": tensor, "rms_rows": rows_in_effect, "rows_measured": 100}
            heads = [row(h, rms_ratio=limit + excess, **of) for h in range(8)]
            assert judge(heads).exit_code == code, (tensor, rows_in_effect, excess)


def test_an_error_of_a_single_row_is_held_to_the_limit_of_one() -> None:
    """Of dq and dk; an output's rows share no error. A row that does not say of how many
    rows its error is has the lower limit."""
    for tensor, error_rows, ratio, code in (
        ("dk", 1.9, 19.9, 0), ("dk", 1.9, 20.1, 1), ("dk", 2.0, 3.1, 1), ("dk", None, 3.1, 1),
        ("dq", 1.0, 19.9, 0), ("dq", 1.0, 20.1, 1), ("out", 1.0, 1.2, 1), ("dv", 1.0, 1.2, 1),
    ):  # fmt: skip
        of: Any = {"tensor": tensor, "error_rows": error_rows, "rows_measured": 100}
        judged = judge([row(expected_ratio=ratio, **of)])
        assert judged.exit_code == code, (tensor, error_rows, ratio)


@pytest.mark.parametrize(("rms", "rel", "passes"), [
    (1e-4, None, True), (1.1e-4, None, False),  # an exact one of 0
    (1e-3, 1e-4, True), (1e-3, 1.2e-4, False),  # 1e-3 / (1 + 10), / (1 + 8.3)
    (0.0, None, True),
])  # fmt: skip
def test_log_sum_exp(rms: float, rel: float | None, passes: bool) -> None:
    """rms over 1 + the log-sum-exp's own root mean square, here by hand."""
    assert (judge([row(), lse(rms=rms, rel=rel)]).exit_code == 0) == passes


def test_bias_takes_certainty_and_size() -> None:
    """Holm over the four heads: the smallest p is held to alpha / 4. Seven sequences are
    not judged, which is said, and not the kernel's fault."""
    rows = [row(h, bias_p=1.0) for h in range(3)]
    for p, size, outcome in (
        (0.01 / 4, 0.0501, "exceeded"), (0.01 / 4, -0.0501, "exceeded"),
        (0.01 / 4, 0.05, "passed"), (0.01 / 4 * 1.001, 0.05, "passed"),
    ):  # fmt: skip
        judged = judge([*rows, row(3, bias_p=p, bias_size=size, sequences=8)])
        assert verdict(judged, "bias").outcome == outcome
    judged = judge([row(h, sequences=7, bias_p=0.0, bias_size=1.0) for h in range(2)])
    result = verdict(judged, "bias")
    assert (result.standing, result.unjudged) == ("not applicable", 2)
    assert result.reasons == ("needs 8 independent sequences, has 7",)
    assert judged.exit_code == 0


def test_without_a_prediction_plain_attention_is_the_measure() -> None:
    """In fp32, where the row says why nothing is predicted. In fp64 the reference is no
    more exact than the kernel, whose errors are not judged; finiteness still is."""
    lost: Any = dict.fromkeys(("expected_ratio", "worst_row"))
    wide = {**lost, "nulls": dict.fromkeys(lost, "arithmetic is not small in float32")}
    for ratio, code in ((2.0, 0), (2.01, 1)):
        judged = judge([row(**wide, format="float32", baseline_ratio=ratio)])
        assert judged.exit_code == code
        assert verdict(judged, "error").metric == "baseline_ratio"
    for count in (0, 1):
        fp64 = row(**wide, format="float64", baseline_ratio=40.0, nonfinite=count)
        assert judge([fp64]).exit_code == count


def test_an_exact_answer_has_no_ratio_and_passes() -> None:
    """rms 0 beside a yardstick of 0: 0/0 is no reason to doubt it. An error there
    fails."""
    null = dict.fromkeys(("expected_ratio", "worst_row", "baseline_ratio"))
    why = dict.fromkeys(null, "0/0")
    assert judge([row(**null, nulls=why, rms=0.0, noise=0.0)]).exit_code == 0
    assert judge([row(**null, nulls=why, rms=1e-9)]).exit_code == 3


def test_an_exact_answer_is_not_judged_by_what_was_not_measured() -> None:
    """Without a prediction it is judged by the baseline, and nothing by the worst row; a
    tensor without a floor has no multiple of one."""
    why = "no emulation predicts this kernel"
    null = dict.fromkeys(("expected_ratio", "worst_row"))
    exact = row(**null, nulls=dict.fromkeys(null, why), rms=0.0, baseline_ratio=0.0)
    assert (
        value_of(exact, "expected_ratio") == value_of(exact, "worst_row") == (None, why)
    )
    judged = judge([exact])
    assert verdict(judged, "error").metric == "baseline_ratio"
    assert verdict(judged, "worst row").observed is None
    assert value_of(lse(rms=0.0), "floor_ratio") == (None, None)


@pytest.mark.parametrize(("metric", "fields"), [
    ("noise_ratio", {"noise": None}), ("noise_ratio", {"noise": 1e-3, "floor_ratio": None}),
    ("noise_ratio", {"noise": 1e-3, "interval": {"rms": (0.0, 2.0)}}),
    ("lse_error", {"rms": 0.0, "interval": {}}), ("expected_ratio", {"expected_ratio": None}),
    ("worst_row", {}),
])  # fmt: skip
def test_what_a_sample_does_not_estimate_has_no_interval(
    metric: str, fields: dict[str, Any]
) -> None:
    """Not that of the rms either, which is of another quantity."""
    interval = {"rms": (0.5, 2.0), "expected_ratio": (1.0, 1.1)}
    estimate = row(**{"sampled": True, "rms": 1.0, "interval": interval, **fields})
    assert interval_of(estimate, metric) is None


def test_a_rule_that_matches_no_row_is_no_pass() -> None:
    """A misspelt kernel, format or tensor, a head that is not there."""
    for where in ({"kernel": "mien"}, {"format": "bf16"}, {"tensor": "dq"}, {"head": 9}):
        book = rules(metric="nonfinite", at_most=0, where=where)
        judged = judge([row()], book)
        assert judged.exit_code == 3
        assert judged.tests[0].reasons[0].startswith("no row matches")
    assert (
        judge([row()], rules(metric="nonfinite", at_most=0, where={"head": 0})).exit_code
        == 0
    )


def test_nothing_judged_is_no_pass() -> None:
    """Even by rules that may lack everything, and of a report without rows or kernels."""
    lax = rules(metric="noise", at_most=1, may_lack="numbers")
    assert judge([row(noise=None)], lax).exit_code == 3
    for rows in ([], [row(role="floor")], [row(role="precision")], [row(role="control")]):
        assert judge(rows).exit_code == 3


def test_failed_and_required_kernels() -> None:
    """A call that failed is no pass; one that was skipped is none where the kernel is
    required."""
    gone = {"head": None, "case": "d", "reason": "no"}
    assert judge([row(), row(status="failed", **gone)]).exit_code == 3
    assert judge([row(), row(status="skipped", **gone)]).exit_code == 0
    strict = default_rules().model_copy(update={"required": ("mi*",)})
    assert judge([row()], strict).exit_code == 0
    assert judge([row(), row(status="skipped", **gone)], strict).exit_code == 3
    judged = judge([row()], default_rules().model_copy(update={"required": ("other",)}))
    missing = [t.rule for t in judged.tests if t.standing == "missing"]
    assert (judged.exit_code, missing) == (3, ["required other"])


EMPTY = {k: None for k in SOUND if k not in ("nonfinite", "sequences")} | {"elements": 0}


def test_a_head_of_which_nothing_can_be_said_does_not_count() -> None:
    """Fully masked, or overflowing as the floor does: no element left, none missing."""
    assert judge([row(0), row(1, **EMPTY)]).exit_code == 0
    assert judge([row(1, **EMPTY)]).exit_code == 3
    assert judge([row(0), row(1, **EMPTY, nonfinite=3)]).exit_code == 1


@pytest.mark.parametrize("metric", ["max_abs", "max_ulp", "worst_row", "fa_rule"])
def test_a_maximum_over_sampled_rows_never_passes(metric: str) -> None:
    """Not even a tiny one; an average over them may."""
    book = rules(metric=metric, at_most=100)
    assert judge([row(**{metric: 1})], book).exit_code == 0
    assert judge([row(**{metric: 1}, sampled=True)], book).exit_code == 3
    assert (
        judge([estimated(rms=(9e-4, 1.1e-3))], rules(metric="rms", at_most=1)).exit_code
        == 0
    )


def estimated(head: int = 0, **intervals: tuple[float, float]) -> DeviationRow:
    """A row of sampled rows; each metric lies in the middle of its interval."""
    middles = {metric: sum(ends) / 2 for metric, ends in intervals.items()}
    return row(head, **middles, sampled=True, rows_measured=64, interval=intervals)


@pytest.mark.parametrize(("low", "high", "code"), [
    (0.9, 1.1, 0), (0.9, 1.2, 3), (1.11, 1.3, 1), (1.0, 1.5, 3)])  # fmt: skip
def test_an_estimate_is_judged_by_its_interval(
    low: float, high: float, code: int
) -> None:
    """It passes if all of the interval is within the limit, fails if all of it is beyond,
    and is undecided otherwise, whatever may be lacking."""
    for lenient in ("nothing", "rows", "numbers"):
        book = rules(metric="expected_ratio", at_most=1.1, may_lack=lenient)
        judged = judge([estimated(expected_ratio=(low, high))], book)
        assert judged.exit_code == code
        (test,) = rule_tests(judged)
        if code == 3:
            assert test.reasons == (
                f"the interval of expected_ratio, {low:.3g} to {high:.3g}, contains "
                "the limit 1.1: "
                "audit more rows",
            )
            assert test.unjudged == 1


@pytest.mark.parametrize(
    ("ends", "value"),
    [((1.5, 2.0), 0.9), ((2.0, 0.5), 0.9), ((0.2, 0.5), 3.0), ((5.0, 0.1), 3.0)],
)
def test_an_interval_that_contradicts_itself_decides_nothing(
    ends: Any, value: float
) -> None:
    """Beside its own estimate, or with its ends the wrong way round."""
    sampled = row(sampled=True, expected_ratio=value, interval={"expected_ratio": ends})
    assert judge([sampled], rules(metric="expected_ratio", at_most=1.1)).exit_code == 3


def test_a_required_kernel_of_which_nothing_can_be_judged_is_no_pass() -> None:
    """Though it ran in every call."""
    rows = [row(elements=0), row(kernel="b")]
    finite = rules(metric="nonfinite", at_most=0)
    assert judge(rows, finite).exit_code == 0
    required = judge(rows, finite.model_copy(update={"required": ("mine",)}))
    assert required.exit_code == 3
    assert next(t for t in required.tests if t.runs).reasons == (
        "no element of this tensor could be judged",
    )
    (finding,) = run_findings(required.tests)
    words = (
        "mine (bfloat16) is required, but gave no result in 1 of 1 calls. Reason: no el"
    )
    assert words in finding.whole


def test_a_required_kernel_that_no_rule_is_of_is_no_pass() -> None:
    """In any format."""
    rows = [row(), row(kernel="b"), row(kernel="b", format="float16")]
    of_mine = rules(metric="nonfinite", at_most=0, where={"kernel": "mine"})
    few = rules(metric="nonfinite", at_most=0, where={"format": "bfloat16"})
    for by, unjudged in (
        (of_mine, ["b (bfloat16)", "b (float16)"]),
        (few, ["b (float16)"]),
    ):
        assert judge(rows, by).exit_code == 0
        for name in ("b", "*"):
            judged = judge(rows, by.model_copy(update={"required": (name,)}))
            (test,) = (t for t in judged.tests if t.rule == f"required {name}")
            words = "is required, and no rule could be applied to it"
            assert test.reasons == tuple(f"{unit} {words}" for unit in unjudged)
            assert judged.exit_code == 3
    assert judge(rows[:2], few.model_copy(update={"required": ("*",)})).exit_code == 0


def test_an_estimate_without_an_interval_is_not_judged() -> None:
    """A number alone says nothing of rows that were not measured; what is counted in all
    rows, or has a test of its own, needs none. Where no sampled row errs, ratios to what
    is 0 too are 0."""
    for metric, code in (("rms", 3), ("nonfinite", 0), ("noise", 0)):
        assert (
            judge([row(sampled=True)], rules(metric=metric, at_most=1)).exit_code == code
        )
    none = {"expected_ratio": None, "nulls": {"expected_ratio": "0/0"}, "rms": 0.0}
    exact = row(sampled=True, interval={"rms": (0.0, 0.0)}, **none)
    assert judge([exact], rules(metric="expected_ratio", at_most=1.1)).exit_code == 0


@pytest.mark.parametrize(("width", "code"), [(0.02, 0), (0.2, 3)])
def test_the_median_of_estimates_has_the_medians_of_their_ends(
    width: float, code: int
) -> None:
    """Single heads may be undecided where the median is not: one of nine is beyond
    here."""
    centers = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.04, 1.3]
    heads = [
        estimated(h, expected_ratio=(c - width, c + width)) for h, c in enumerate(centers)
    ]
    book = rules(metric="expected_ratio", at_most=1.05, heads=8)
    judged = judge(heads, book)
    assert judged.exit_code == code
    if code == 3:  # of the middle one of nine, 1.0
        assert "of the median expected_ratio, 0.8 to 1.2," in judged.tests[0].reasons[0]
    high = [estimated(h, expected_ratio=(1.1, 1.12)) for h in range(9)]
    assert judge(high, book).exit_code == 1
    # One head that is known well, in the middle, says nothing of the eight that are not.
    lucky = [
        estimated(h, expected_ratio=(0.8, 1.2) if h != 4 else (0.99, 1.01))
        for h in range(9)
    ]
    assert judge(lucky, book).exit_code == 3


def test_the_log_sum_exps_error_has_the_interval_of_its_rms() -> None:
    """lse_error is derived: its ends are those of rms, over the same size."""
    book = rules(metric="lse_error", at_most=1e-4)
    for high, code in ((2e-5, 0), (1e-2, 3)):
        one = lse(sampled=True, interval={"rms": (1e-6, high)})
        assert judge([one], book).exit_code == code
    assert judge([lse(sampled=True)], book).exit_code == 3


def test_a_head_of_which_no_sampled_row_sees_a_key_is_not_passed() -> None:
    """Others of its rows may see some, so that it is not a head without anything to
    judge."""
    nothing = row(1, **EMPTY, sampled=True)
    sound = estimated(expected_ratio=(1.0, 1.05))
    book = rules(metric="expected_ratio", at_most=1.1, may_lack="numbers")
    assert judge([sound, nothing], book).exit_code == 3
    assert (
        judge([sound, nothing.model_copy(update={"sampled": False})], book).exit_code == 0
    )


@pytest.mark.parametrize("seed", range(20))
def test_losing_numbers_never_turns_a_verdict_into_a_pass(seed: int) -> None:
    """Rows that exceed in one head, with random numbers removed elsewhere and there: the
    outcome is exceeded, or could not be measured once the offending number itself is
    gone."""
    draw = random.Random(seed)
    for metric in ("nonfinite", "expected_ratio"):
        rows = [row(h) for h in range(4)]
        rows[2] = row(2, **{metric: 99})
        lost = [{k: None for k in SOUND if draw.random() < 0.3} for _ in rows]
        damaged = [r.model_copy(update=x) for r, x in zip(rows, lost, strict=True)]
        code = judge(damaged).exit_code
        assert code == (3 if getattr(damaged[2], metric) is None else 1)


def test_the_smallest_dose_that_is_caught() -> None:
    """Doses in growing order; caught from the one after the largest that is missed."""
    ratios = {0.03: 9.0, 0.001: 1.0, 0.01: 1.3, 0.003: 1.2, 0.005: 1.1}
    judged = judge([row(), *(control("scale", d, r) for d, r in ratios.items())])
    assert judged.exit_code == 0, "a planted fault is none of the kernel's"
    (power,) = judged.power
    assert [d.dose for d in power.doses] == [0.001, 0.003, 0.005, 0.01, 0.03]
    assert [d.outcome for d in power.doses] == [
        "missed",
        "caught",
        "missed",
        "caught",
        "caught",
    ]
    assert (power.fault, power.format, power.caught_from) == ("scale", "bfloat16", 0.01)
    assert power.doses[-1].by == ("error",)


def test_rules_hold_for_one_system() -> None:
    """Those that say so judge no report from another."""
    book = default_rules().model_copy(update={"holds_for": {"cpu_capability": "AVX*"}})
    assert judge_report(report(row(), cpu_capability="AVX512"), book).exit_code == 0
    for system in ({"cpu_capability": "DEFAULT"}, {}):
        with pytest.raises(MeasurementError, match="hold for cpu_capability"):
            judge_report(report(row(), **system), book)
