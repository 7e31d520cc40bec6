"""The gate: what passes, what exceeds, and that nothing it could not judge ever passes.

Rows are made by hand; each test of a limit has the numbers on both sides of it.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from gate_rows import SOUND, control, lse, report, row

from numdev.cli.main import main
from numdev.errors import MeasurementError, UsageError
from numdev.gate.findings import _not_run
from numdev.gate.judging import judge, judge_report
from numdev.gate.rules import Rules, Threshold, default_rules, read_rules
from numdev.gate.verdict import Judgement, Verdict
from numdev.report import NOT_PREDICTED, DeviationRow, write
from numdev.report.statistics import BIAS_ALPHA, BIAS_FORMATS, BIAS_SEQUENCES, BIAS_ULP
from numdev.yamlfile import bundled


def rules(**threshold: Any) -> Rules:
    """A rule book with one rule."""
    return Rules(thresholds=(Threshold(**{"name": "r", **threshold}),))


def verdict(judged: Judgement, rule: str, tensor: str | None = "out") -> Verdict:
    (found,) = (v for v in judged.verdicts if v.rule == rule and v.tensor == tensor)
    return found


# --- the default rules ---------------------------------------------------------------------------


def test_a_sound_kernel_passes() -> None:
    """All that is to be measured was, and within every limit."""
    judged = judge([*(row(h) for h in range(8)), *(lse(h) for h in range(8))])
    assert (judged.outcome, judged.exit_code) == ("passed", 0)
    assert {v.outcome for v in judged.verdicts} == {"passed"}
    assert judged.fa_rule == (8, 8)


@pytest.mark.parametrize(
    ("where", "at", "beyond"),
    [
        ({"tensor": "out"}, {"expected_ratio": 1.1}, {"expected_ratio": 1.11}),
        ({"tensor": "dv"}, {"expected_ratio": 1.1}, {"expected_ratio": 1.11}),
        ({"tensor": "dq"}, {"expected_ratio": 3.0}, {"expected_ratio": 3.01}),
        ({"tensor": "dk"}, {"expected_ratio": 3.0}, {"expected_ratio": 3.01}),
        ({"tensor": "dk", "format": "float32"}, {"expected_ratio": 16.0}, {"expected_ratio": 16.1}),
        ({"tensor": "dv"}, {"worst_row": 5.0}, {"worst_row": 5.01}),
        ({"tensor": "dq"}, {"worst_row": 20.0}, {"worst_row": 20.1}),
        ({"tensor": "out"}, {"noise": 0.0}, {"noise": 1e-12}),
        # u / sqrt(12) = 1.128e-3 of terms of size 1
        ({"tensor": "dq"}, {"noise": 1.12e-3}, {"noise": 1.13e-3}),
    ],
)
def test_limits_of_a_tensor(
    where: dict[str, Any], at: dict[str, Any], beyond: dict[str, Any]
) -> None:
    """Each tensor, and float32, has its own: at it passes, beyond it does not."""
    assert judge([row(0), row(1, **where, **at)]).exit_code == 0
    assert judge([row(0), row(1, **where, **beyond)]).exit_code == 1


def test_instead_takes_the_first_that_fits() -> None:
    """And needs a limit that it is instead of."""
    others = ({"tensor": "dq", "at_most": 3}, {"format": "bf*", "at_most": 2})
    wide = rules(metric="rms", at_most=1, instead=others)
    for where, limit in (
        ({"tensor": "dq"}, 3), ({"tensor": "dk"}, 2), ({"tensor": "dk", "format": "float16"}, 1),
    ):  # fmt: skip
        assert judge([row(rms=float(limit), **where)], wide).exit_code == 0
        assert judge([row(rms=limit + 0.01, **where)], wide).exit_code == 1
    with pytest.raises(ValueError, match="there is none"):
        rules(metric="rms", below=1, instead=others)


def test_the_typical_head_is_the_median() -> None:
    """Half of the heads may be beyond it by luck; when more are, all of those are accused. Of fewer
    than eight heads nothing is said."""
    lucky = [row(h, tensor="dq", expected_ratio=0.8 if h % 2 else 1.2) for h in range(8)]
    assert judge([row(), *lucky]).exit_code == 0
    large = [row(h, tensor="dq", expected_ratio=1.0 if h < 3 else 1.06 + h / 100) for h in range(8)]
    judged = judge([row(), *large])
    found = verdict(judged, "typical head", "dq")
    assert (found.outcome, found.offending, found.judged) == ("exceeded", 5, 8)
    assert found.observed == pytest.approx(1.09)  # of 1.13 1.12 1.11 1.10 1.09 1 1 1
    assert found.median
    assert found.places[0].head == 7
    few = judge([row(), *large[3:]])
    assert verdict(few, "typical head", "dq").reasons == ("heads: 5, and it takes 8",)
    assert few.exit_code == 0


@pytest.mark.parametrize(("rms", "rel", "passes"), [
    (1e-4, None, True), (1.1e-4, None, False),  # an exact one of 0
    (1e-3, 1e-4, True), (1e-3, 1.2e-4, False),  # 1e-3 / (1 + 10), / (1 + 8.3)
    (0.0, None, True),
])  # fmt: skip
def test_log_sum_exp(rms: float, rel: float | None, passes: bool) -> None:
    """rms over 1 + the log-sum-exp's own root mean square, here by hand."""
    assert (judge([row(), lse(rms=rms, rel=rel)]).exit_code == 0) == passes


@pytest.mark.parametrize(
    ("p", "size", "sequences", "outcome"),
    [
        (0.01 / 4, 0.05, 8, "exceeded"),
        (0.01 / 4 * 1.001, 0.05, 8, "passed"),
        (0.01 / 4, -0.05, 8, "exceeded"),
        (0.01 / 4, 0.0499, 8, "passed"),
    ],
)
def test_bias_takes_certainty_and_size(p: float, size: float, sequences: int, outcome: str) -> None:
    """Holm over the four heads: the smallest p is held to alpha / 4."""
    rows = [row(h, bias_p=1.0) for h in range(3)]
    judged = judge([*rows, row(3, bias_p=p, bias_size=size, sequences=sequences)])
    assert verdict(judged, "bias").outcome == outcome


def test_a_large_bias_that_is_not_certain_hides_none_that_is() -> None:
    """What is shown is the worst that offends, not the largest."""
    rows = [row(0, bias_p=0.9, bias_size=5.0), row(1, bias_p=1e-6, bias_size=-0.2)]
    found = verdict(judge(rows), "bias")
    assert (found.observed, found.places[0].head) == (-0.2, 1)


def test_too_few_sequences_are_no_verdict() -> None:
    """Seven sequences: not judged, which is said, and not the kernel's fault."""
    judged = judge([row(h, sequences=7, bias_p=0.0, bias_size=1.0) for h in range(2)])
    found = verdict(judged, "bias")
    assert (found.outcome, found.unjudged) == ("untested", 2)
    assert found.reasons == ("independent sequences: 7, and it takes 8",)
    assert judged.exit_code == 0


def test_the_file_and_the_summary_agree_on_bias() -> None:
    """The summary counts biased heads by the constants, the gate by the file."""
    (bias,) = (t for t in default_rules().thresholds if t.name == "bias")
    assert bias.certain is not None
    assert (bias.certain.alpha, bias.certain.sequences) == (BIAS_ALPHA, BIAS_SEQUENCES)
    assert (bias.below, bias.where.out_format) == (BIAS_ULP, BIAS_FORMATS)


WIDE = {
    "format": "float32",
    "expected_ratio": None,
    "worst_row": None,
    "nulls": dict.fromkeys(("expected_ratio", "worst_row"), "arithmetic is not small in float32"),
}


@pytest.mark.parametrize(("ratio", "code"), [(2.0, 0), (2.01, 1)])
def test_without_a_prediction_plain_attention_is_the_measure(ratio: float, code: int) -> None:
    """In fp32, where the row says why nothing is predicted."""
    judged = judge([row(**WIDE, baseline_ratio=ratio)])
    assert judged.exit_code == code
    assert verdict(judged, "error").metric == "baseline_ratio"


def test_in_fp64_errors_are_not_judged() -> None:
    """The reference is no more exact than the kernel; finiteness still is."""
    changes = {**WIDE, "format": "float64", "baseline_ratio": 40.0}
    assert judge([row(**changes)]).exit_code == 0
    assert judge([row(**changes, nonfinite=1)]).exit_code == 1


def test_an_exact_answer_has_no_ratio_and_passes() -> None:
    """rms 0 beside a yardstick of 0: 0/0 is no reason to doubt it. A kernel that errs there does
    not pass."""
    null = dict.fromkeys(("expected_ratio", "worst_row", "baseline_ratio"))
    why = dict.fromkeys(null, "0/0")
    assert judge([row(**null, nulls=why, rms=0.0, noise=0.0)]).exit_code == 0
    assert judge([row(**null, nulls=why, rms=1e-9)]).exit_code == 3


# --- it fails closed -----------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["expected_ratio", "nonfinite"])
def test_a_number_that_was_not_measured_is_no_pass(metric: str) -> None:
    """Null without a reason in one head of four; the plain baseline excuses nothing then."""
    judged = judge([*(row(h) for h in range(3)), row(3, **{metric: None})])
    assert judged.exit_code == 3
    (found,) = (v for v in judged.verdicts if v.outcome == "unmeasured")
    assert (found.unjudged, found.reasons) == (1, ("not measured",))
    assert found.places[0].head == 3


def test_a_rule_that_matches_no_row_is_no_pass() -> None:
    """A misspelt kernel, format or tensor, a head that is not there."""
    for where in ({"kernel": "mien"}, {"format": "bf16"}, {"tensor": "dq"}, {"head": 9}):
        book = rules(metric="nonfinite", equals=0, where=where)
        judged = judge([row()], book)
        assert judged.exit_code == 3
        assert judged.verdicts[0].reasons[0].startswith("no row matches")
    assert judge([row()], rules(metric="nonfinite", equals=0, where={"head": 0})).exit_code == 0


def test_nothing_judged_is_no_pass() -> None:
    """Even by rules that may lack everything, and of a report without rows or kernels."""
    lax = rules(metric="noise", at_most=1, may_lack="numbers")
    assert judge([row(noise=None)], lax).exit_code == 3
    for rows in ([], [row(role="floor")], [row(role="precision")], [row(role="control")]):
        assert judge(rows).exit_code == 3


def test_failed_and_required_kernels() -> None:
    """A call that failed is no pass; one that was skipped is none where the kernel is required."""
    gone = {"head": None, "case": "d", "reason": "no"}
    assert judge([row(), row(status="failed", **gone)]).exit_code == 3
    assert judge([row(), row(status="skipped", **gone)]).exit_code == 0
    strict = default_rules().model_copy(update={"required": ("mi*",)})
    assert judge([row()], strict).exit_code == 0
    assert judge([row(), row(status="skipped", **gone)], strict).exit_code == 3
    judged = judge([row()], default_rules().model_copy(update={"required": ("other",)}))
    assert (judged.exit_code, judged.missing) == (3, ("other",))


def test_a_head_of_which_nothing_can_be_said_does_not_count() -> None:
    """Fully masked, or overflowing as the floor does: no element left, none missing."""
    empty = {k: None for k in SOUND if k not in ("nonfinite", "sequences", "elements")}
    nothing = row(1, **empty, elements=0)
    assert judge([row(0), nothing]).exit_code == 0
    assert judge([nothing]).exit_code == 3
    assert judge([row(0), row(1, **empty, elements=0, nonfinite=3)]).exit_code == 1


@pytest.mark.parametrize("metric", ["max_abs", "max_ulp", "worst_row", "fa_rule"])
def test_a_maximum_over_sampled_rows_never_passes(metric: str) -> None:
    """Not even a tiny one; an average over them may."""
    book = rules(metric=metric, at_most=100)
    assert judge([row(**{metric: 1})], book).exit_code == 0
    assert judge([row(**{metric: 1}, sampled=True)], book).exit_code == 3
    assert judge([estimated(rms=(9e-4, 1.1e-3))], rules(metric="rms", at_most=1)).exit_code == 0


@pytest.mark.parametrize("metric", ["max_abs", "max_ulp", "worst_row"])
def test_a_maximum_over_sampled_rows_fails_beyond_its_limit(metric: str) -> None:
    """It is a lower bound: what it exceeds, all rows exceed. Also where the rule may lack it."""
    for lenient in ("nothing", "numbers"):
        book = rules(metric=metric, at_most=100, may_lack=lenient)
        assert judge([row(**{metric: 101}, sampled=True)], book).exit_code == 1
    assert judge([row(sampled=True)], rules(metric="fa_rule", at_most=0)).exit_code == 3


def estimated(head: int = 0, **intervals: tuple[float, float]) -> DeviationRow:
    """A row of sampled rows; each metric lies in the middle of its interval."""
    middles = {metric: sum(ends) / 2 for metric, ends in intervals.items()}
    return row(head, **middles, sampled=True, rows_measured=64, interval=intervals)


@pytest.mark.parametrize(
    ("low", "high", "code"), [(0.9, 1.1, 0), (0.9, 1.2, 3), (1.11, 1.3, 1), (1.0, 1.5, 3)]
)
def test_an_estimate_is_judged_by_its_interval(low: float, high: float, code: int) -> None:
    """It passes if all of the interval is within the limit, fails if all of it is beyond, and is
    undecided otherwise, whatever may be lacking."""
    for lenient in ("nothing", "rows", "sampled", "numbers"):
        book = rules(metric="expected_ratio", at_most=1.1, may_lack=lenient)
        judged = judge([estimated(expected_ratio=(low, high))], book)
        assert judged.exit_code == code
        (said,) = judged.verdicts
        if code == 3:
            assert said.reasons == (
                f"the interval of expected_ratio, {low:.3g} to {high:.3g}, contains the limit 1.1: "
                "audit more rows",
            )
            assert said.unjudged == 1


@pytest.mark.parametrize(
    ("ends", "value"),
    [((1.5, 2.0), 0.9), ((2.0, 0.5), 0.9), ((0.2, 0.5), 3.0), ((5.0, 0.1), 3.0)],
)
def test_an_interval_that_contradicts_itself_decides_nothing(
    ends: tuple[float, float], value: float
) -> None:
    """Beside its own estimate, or with its ends the wrong way round."""
    sampled = row(sampled=True, expected_ratio=value, interval={"expected_ratio": ends})
    assert judge([sampled], rules(metric="expected_ratio", at_most=1.1)).exit_code == 3


def test_a_required_kernel_of_which_nothing_can_be_judged_is_no_pass() -> None:
    """Though it ran in every call."""
    rows = [row(elements=0), row(kernel="b")]
    finite = rules(metric="nonfinite", equals=0)
    assert judge(rows, finite).exit_code == 0
    required = judge(rows, finite.model_copy(update={"required": ("mine",)}))
    assert (required.exit_code, required.calls[0].reasons) == (
        3, ("no element of it could be judged",)
    )  # fmt: skip
    (finding,) = _not_run(required.calls)
    assert "has nothing to judge in 1 of 1 calls (bfloat16): no element of it" in finding.sentence


def test_what_is_exceeded_for_certain_outweighs_what_is_undecided() -> None:
    """One head beyond its limit is exit code 1, beside others that are not decided."""
    book = rules(metric="rms", at_most=1)
    heads = [estimated(0, rms=(0.5, 2)), estimated(1, rms=(1.5, 2)), estimated(2, rms=(0.1, 0.2))]
    judged = judge(heads, book)
    assert judged.exit_code == 1
    assert (judged.verdicts[0].judged, judged.verdicts[0].offending) == (2, 1)
    assert judge([heads[0], heads[2]], book).exit_code == 3


def test_an_estimate_without_an_interval_is_not_judged() -> None:
    """A number alone says nothing of the rows that were not measured; but what is counted in all
    rows, or has a test of its own, needs none."""
    assert judge([row(sampled=True)], rules(metric="rms", at_most=1)).exit_code == 3
    assert judge([row(sampled=True)], rules(metric="nonfinite", equals=0)).exit_code == 0
    assert judge([row(sampled=True)], rules(metric="noise", at_most=0)).exit_code == 0


def test_sampled_rows_without_any_error_pass() -> None:
    """Where no sampled row errs, ratios to what is 0 too are 0, as they are of whole rows."""
    none = {"expected_ratio": None, "nulls": {"expected_ratio": "0/0"}, "rms": 0.0}
    exact = row(sampled=True, interval={"rms": (0.0, 0.0)}, **none)
    assert judge([exact], rules(metric="expected_ratio", at_most=1.1)).exit_code == 0


@pytest.mark.parametrize(("width", "code"), [(0.02, 0), (0.2, 3)])
def test_the_median_of_estimates_is_judged_by_the_medians_of_their_ends(
    width: float, code: int
) -> None:
    """Single heads may be undecided where the median is not: one of nine is beyond here."""
    centers = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.04, 1.3]
    heads = [estimated(h, expected_ratio=(c - width, c + width)) for h, c in enumerate(centers)]
    book = rules(metric="expected_ratio", at_most=1.05, heads=8)
    judged = judge(heads, book)
    assert judged.exit_code == code
    if code == 3:  # of the middle one of nine, 1.0
        assert (
            "the interval of the median expected_ratio, 0.8 to 1.2,"
            in judged.verdicts[0].reasons[0]
        )
    high = [estimated(h, expected_ratio=(1.1, 1.12)) for h in range(9)]
    assert judge(high, book).exit_code == 1


def test_the_log_sum_exps_error_has_the_interval_of_its_rms() -> None:
    """lse_error is derived: its ends are those of rms, over the same size."""
    book = rules(metric="lse_error", at_most=1e-4)
    for high, code in ((2e-5, 0), (1e-2, 3)):
        one = lse(sampled=True, interval={"rms": (1e-6, high)})
        assert judge([one], book).exit_code == code
    assert judge([lse(sampled=True)], book).exit_code == 3


def test_only_what_no_sample_has_may_be_lacking_in_one() -> None:
    """`may_lack: sampled`: a key's gradient without a prediction is let pass, and a row that lacks
    one for another reason is not."""
    book = rules(metric="expected_ratio", at_most=1.1, may_lack="sampled")
    judged = estimated(expected_ratio=(1.0, 1.05))
    for why, code in ((NOT_PREDICTED, 0), ("no emulation stands for this kernel", 3)):
        lacks = {"expected_ratio": None, "nulls": {"expected_ratio": why}, "sampled": True}
        assert judge([judged, row(1, tensor="dk", **lacks)], book).exit_code == code
    strict = rules(metric="expected_ratio", at_most=1.1, may_lack="rows")
    lacks["nulls"] = {"expected_ratio": NOT_PREDICTED}
    assert judge([judged, row(1, tensor="dk", **lacks)], strict).exit_code == 3


def test_a_head_of_which_no_sampled_row_sees_a_key_is_not_passed() -> None:
    """Others of its rows may see some, so that it is not a head without anything to judge."""
    empty = {k: None for k in SOUND if k not in ("nonfinite", "sequences", "elements")}
    nothing = row(1, **empty, elements=0, sampled=True)
    sound = estimated(expected_ratio=(1.0, 1.05))
    book = rules(metric="expected_ratio", at_most=1.1, may_lack="sampled")
    assert judge([sound, nothing], book).exit_code == 3
    assert judge([sound, nothing.model_copy(update={"sampled": False})], book).exit_code == 0


@pytest.mark.parametrize("seed", range(20))
def test_losing_numbers_never_turns_a_verdict_into_a_pass(seed: int) -> None:
    """Rows that exceed in one head, with random numbers removed elsewhere and there: the outcome
    is exceeded, or could not be measured once the offending number itself is gone."""
    draw = random.Random(seed)
    for metric in ("nonfinite", "expected_ratio"):
        rows = [row(h) for h in range(4)]
        rows[2] = row(2, **{metric: 99})
        damaged = [
            r.model_copy(update={k: None for k in SOUND if draw.random() < 0.3}) for r in rows
        ]
        code = judge(damaged).exit_code
        assert code == (3 if getattr(damaged[2], metric) is None else 1)


# --- selectors and files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "heads"),
    [
        ({}, {0, 1, 2, 3}),
        ({"kernel": "m*"}, {0, 1, 2, 3}),
        ({"kernel": "!m*"}, set()),
        ({"kernel": ["m*", "!mine"]}, set()),
        ({"case": "a"}, {0, 1}),
        ({"case": ["a", "b"]}, {0, 1, 2, 3}),
        ({"module": "enc.*"}, {1, 3}),
        ({"layer": 1}, {2, 3}),
        ({"layer": [0, 1], "head": 3}, {3}),
        ({"phase": "decode"}, {3}),
        ({"phase": "!decode"}, {0, 1, 2}),
    ],
)
def test_selectors(where: dict[str, Any], heads: set[int]) -> None:
    """Every field narrows, patterns are a shell's, ! excludes."""
    cells = itertools.product(("a", "b"), ("dec.0", "enc.0"))
    rows = [
        row(h, case=case, module=module, layer=int(case == "b"), phase="decode" if h == 3 else None)
        for h, (case, module) in enumerate(cells)
    ]
    (threshold,) = rules(metric="rms", at_most=1, where=where).thresholds
    assert {r.head for r in threshold.where.of(rows)} == heads


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("thresholds: []", "thresholds"),
        ("threshold: []", "did you mean 'thresholds'"),
        ("thresholds: [{name: a, metric: rsm, at_most: 1}]", "no metric 'rsm'; did you mean 'rms'"),
        ("thresholds: [{name: a, metric: w1, at_most: 1}]", "no metric 'w1'"),
        ("thresholds: [{name: a, metric: rms}]", "exactly one of"),
        ("thresholds: [{name: a, metric: rms, at_most: 1, below: 1}]", "exactly one of"),
        ("thresholds: [{name: a, metric: rms, at_most: .nan}]", "at_most"),
        ("thresholds: [{name: a, metric: rms, at_most: -1}]", "at_most"),
        ("thresholds: [{name: a, metric: rms, absent: true}]", "suspicion"),
        ("thresholds: [{name: a, metric: suspicion, at_most: 1}]", "suspicion"),
        (
            "thresholds: [{name: a, metric: rms, at_most: 1, where: {kernl: x}}]",
            "unknown key 'thresholds.0.where.kernl'; did you mean 'kernel'",
        ),
        (
            "thresholds: [{name: a, metric: rms, at_most: 1}, {name: a, metric: rms, at_most: 2}]",
            "two thresholds are called 'a'",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """Exit code 2, with the key and what it may have been meant to be."""
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        read_rules(tmp_path / "rules.yaml")
    assert said in str(error.value)


# --- planted faults ------------------------------------------------------------------------------


def test_the_smallest_dose_that_is_caught() -> None:
    """Doses in growing order however they stand in the report; caught from the one after the
    largest that is missed."""
    ratios = {0.03: 9.0, 0.001: 1.0, 0.01: 1.3, 0.003: 1.2, 0.005: 1.1}
    judged = judge([row(), *(control("scale", d, r) for d, r in ratios.items())])
    assert judged.exit_code == 0, "a planted fault is none of the kernel's"
    (power,) = judged.power
    assert [d.dose for d in power.doses] == [0.001, 0.003, 0.005, 0.01, 0.03]
    assert [d.outcome for d in power.doses] == ["missed", "caught", "missed", "caught", "caught"]
    assert (power.fault, power.format, power.caught_from) == ("scale", "bfloat16", 0.01)
    assert power.doses[-1].by == ("error",)


# --- the command ---------------------------------------------------------------------------------


def gate(*arguments: str) -> int:
    try:
        main(["gate", *arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({}, 0, "PASSED"),
        ({"nonfinite": 2}, 1, "EXCEEDED"),
        ({"expected_ratio": None}, 3, "NOT MEASURED"),
    ],
)
def test_exit_codes(
    tmp_path: Path, capsys: Any, changes: dict[str, Any], code: int, word: str
) -> None:
    """Of the command, in words and as JSON."""
    write(report(row(), row(1, **changes)), tmp_path)
    assert gate(str(tmp_path)) == code
    printed = capsys.readouterr()
    assert printed.out.strip().startswith(word)
    assert printed.err == ""
    assert gate(str(tmp_path / "report.json"), "--json") == code
    data = json.loads(capsys.readouterr().out)
    assert (data["exit_code"], len(data["findings"])) == (code, int(code == 1))


def test_the_table_shows_the_worst_of_a_rule(tmp_path: Path, capsys: Any) -> None:
    """The second kernel's number where it is the worse one; passed, the nearest to its limit."""
    for second, shown in ((1.31, "exceeded 1/2 1.31"), (1.09, "passed 2 1.09")):
        write(report(row(), row(kernel="other", expected_ratio=second)), tmp_path)
        gate(str(tmp_path))
        assert f"error {shown} ≤ 1.1 other out" in " ".join(capsys.readouterr().out.split())


def test_the_rules_can_be_given(tmp_path: Path, capsys: Any) -> None:
    """In a file, whose name the verdict bears; without one that is there, exit code 2."""
    write(report(row()), tmp_path)
    rules_file = tmp_path / "tight.yaml"
    rules_file.write_text("thresholds: [{name: tight, metric: rms, at_most: 1.0e-9}]")
    assert gate(str(tmp_path), "--rules", str(rules_file)) == 1
    assert "tight.yaml" in capsys.readouterr().out
    assert gate(str(tmp_path), "--rules", str(tmp_path / "none.yaml")) == 2
    assert gate(str(tmp_path / "nowhere")) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"schema_version":2', '"schema_version":3'),
        lambda text: text.replace('"kind":"audit"', '"kind":"riddle"'),
        lambda text: text.replace('"rms":0.001', '"rms":NaN'),
        lambda text: text.replace('"rms":0.001', '"rms":1e999'),
        lambda text: text.replace('"nonfinite":0', '"nonfinite":"none"'),
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
    ],
)
def test_a_report_that_is_not_understood_is_no_pass(tmp_path: Path, damage: Any) -> None:
    """An unknown schema, a number JSON does not have, half a file."""
    write(report(row()), tmp_path)
    path = tmp_path / "report.json"
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    assert gate(str(path)) == 3


@pytest.mark.parametrize("name", ["nonfinite", "elements", "sequences"])
@pytest.mark.parametrize("count", [-1, 2**63, 10**400, -(10**400)])
def test_a_count_is_a_count(tmp_path: Path, name: str, count: int) -> None:
    """JSON has integers of any size and sign."""
    write(report(row()), tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    data["rows"][0][name] = count
    for text in (json.dumps(data), json.dumps(data, separators=(",", ":"))):
        (tmp_path / "report.json").write_text(text)
        assert gate(str(tmp_path)) == 3


def test_a_dose_of_any_size_is_no_error() -> None:
    """One that no float holds is none."""
    assert judge([row(), control("scale", 10**400, 9.0)]).exit_code == 0


def test_rules_hold_for_one_system() -> None:
    """Those that say so judge no report from another."""
    book = default_rules().model_copy(update={"holds_for": {"cpu_capability": "AVX*"}})
    assert judge_report(report(row(), cpu_capability="AVX512"), book).exit_code == 0
    for system in ({"cpu_capability": "DEFAULT"}, {}):
        with pytest.raises(MeasurementError, match="hold for cpu_capability"):
            judge_report(report(row(), **system), book)


def test_the_default_file_is_bundled_and_read() -> None:
    """The rules everybody gets are the file's, whose name does not depend on where it lies."""
    here, default = read_rules(bundled("gate/default.yaml")), default_rules()
    assert [t.model_dump() for t in here.thresholds] == [t.model_dump() for t in default.thresholds]
    assert {t.file for t in default.thresholds} == {"configs/gate/default.yaml"}


def test_a_verdict_knows_the_line_of_its_rule(tmp_path: Path) -> None:
    """Rules and verdicts name their file, as it was given, and the line where the entry begins;
    also a rule that nothing met. One made in Python has neither."""
    text = "# limits\nthresholds:\n\n  - name: a\n    metric: rms\n    at_most: 1\n  # next\n"
    text += "  -\n    metric: rms\n    name: b\n    at_most: 1\n    where: {kernel: none}\n"
    path = tmp_path / "tight.yaml"
    path.write_text(text)
    book = read_rules(path)
    places = [(t.name, t.file, t.line) for t in book.thresholds]
    assert places == [("a", str(path), 4), ("b", str(path), 9)]
    assert [(v.rule, v.file, v.line) for v in judge([row()], book).verdicts] == places
    (made,) = judge([row()], rules(metric="rms", at_most=1)).verdicts
    assert (made.file, made.line) == (None, None)


def test_a_dose_that_could_not_be_measured_does_not_hide_those_that_are_caught() -> None:
    """Sixty-four keys cannot be dropped of forty; that sixteen are caught is known all the same."""
    rows = [
        row(),
        control("tail", 1, 1.0),
        control("tail", 16, 5.0),
        control("tail", 64, None, status="skipped", reason="it has 40 keys"),
    ]
    (power,) = judge(rows).power
    assert [d.outcome for d in power.doses] == ["missed", "caught", "unmeasured"]
    assert power.caught_from == 16.0
