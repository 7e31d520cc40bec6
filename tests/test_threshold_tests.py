"""What thresholds can ask for, planted faults; and that what is not passed is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import run
from gate_rows import (
    control,
    findings_of,
    judge,
    planned,
    report,
    row,
    rule_tests,
    together,
    unjudged,
)
from test_gate import estimated, rules

from numdev.errors import MeasurementError, UsageError
from numdev.gate import judging
from numdev.gate.judgement import Judgement
from numdev.gate.row_tests import power_of, run_tests
from numdev.gate.rules import Limit, default_rules, read_rules
from numdev.report import NOT_PREDICTED, write
from numdev.yamlfile import bundled_path


def only(judgement: Judgement) -> Any:
    (result,) = rule_tests(judgement)
    return result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("metric: rsm, at_most: 1", "no metric 'rsm'; did you mean 'rms'"),
        ("metric: rms", "give one of"),
        ("metric: suspicion, at_most: 1, absent: true", "give one of"),
        ("metric: rms, below: 1", "unknown key"),
        ("metric: rms, at_most: .nan", "at_most"),
        ("metric: rms, at_most: -1", "at_most"),
        ("metric: rms, absent: true", "suspicion"),
        ("metric: rms, at_most: 1, where: {kernl: x}", ("0.where.kernl'; did you mean 'kernel'")),
        ("metric: rms, at_most: 1}, {name: a, metric: rms, at_most: 2", "two thresholds are named"),
        ("metric: rms / rel, at_most: 1", "no metric 'rms / rel'"),
        ("metric: rms, at_most: 1, line: 3", "unknown key"),
        ("metric: rms, at_most: 1, where: {tensor: dQ}, may_lack: rows", "unknown name 'dQ'"),
        ("metric: rms, at_most: 1, where: {tensor: [out, '!d']}", "unknown name 'd'"),
        ("metric: rms, at_most: 1, where: {phase: decoding}", "did you mean 'decode'?"),
        ("metric: expected_ratio, at_most: 0.5, certain: {p: 1}", "certain.p"),
        ("metric: expected_ratio, at_most: 0.5, certain: {}", ("expected a metric of bias")),
        ("metric: suspicion, absent: true, scatter: 4", "`scatter` need at_most"),
        ("metric: rms, at_most: 1, instead: [{tensor: o, at_most: 2}]", "unknown name 'o'"),
        ("metric: rms, at_most: 1, at_most: 5", ("line 1: not valid YAML: the key 'at_most' is")),
    ],
)  # fmt: skip
def test_a_wrong_threshold_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """Exit code 2, saying what is known."""
    (tmp_path / "t.yaml").write_text(f"thresholds: [{{name: a, {text}}}]")
    with pytest.raises(UsageError) as error:
        read_rules(tmp_path / "t.yaml")
    assert words in str(error.value)


def test_a_file_without_thresholds_has_the_default_ones(tmp_path: Path) -> None:
    """An empty list, which would pass whatever it is given, is refused, as a misspelt key
    is."""
    (tmp_path / "t.yaml").write_text("required: [mine]")
    result = read_rules(tmp_path / "t.yaml")
    assert (result.thresholds, result.required) == (default_rules().thresholds, ("mine",))
    for text in ("thresholds: []", "threshold: [{name: a, metric: rms, at_most: 1}]"):
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(UsageError, match="thresholds"):
            read_rules(tmp_path / "t.yaml")


def test_a_key_may_stand_twice_where_it_is_merged(tmp_path: Path) -> None:
    """A mapping that takes another's keys may say its own."""
    (tmp_path / "t.yaml").write_text(
        "thresholds: [&a {name: a, metric: rms, at_most: 1},\n"
        "  {<<: *a, name: b}, {<<: [*a], name: c, at_most: 2}]\n"
    )
    result = read_rules(tmp_path / "t.yaml").thresholds
    assert [(t.name, t.at_most) for t in result] == [("a", 1), ("b", 1), ("c", 2)]


@pytest.mark.parametrize(("elements", "heads", "limit"), [
    (128, 1, 1.354), (64, 1, 1.5), (1600, 1, 1.1), (10**6, 1, 1.1), (128, 8, 1.157)])  # fmt: skip
def test_a_limit_knows_how_many_numbers_it_holds(
    elements: int, heads: int, limit: float
) -> None:
    """4/√n above 1 where that is more than the limit; 1.25/√N of it for a median of N
    heads. Two rows of dq, which share the errors of their deltas, are 16 numbers."""
    of = {"heads": heads} if heads > 1 else {}
    book = rules(metric="expected_ratio", at_most=1.1, scatter=4, **of)
    for excess, outcome in ((-0.001, "passed"), (0.001, "exceeded")):
        result = dict(expected_ratio=limit + excess, elements=elements)
        assert (
            only(judge([row(head, **result) for head in range(heads)], book)).outcome
            == outcome
        )
    of_dq = dict(tensor="dq", elements=elements, rows_measured=2, expected_ratio=1.99)
    single = rules(metric="expected_ratio", at_most=1.1, scatter=4)
    assert only(judge([row(**of_dq)], single)).outcome == "passed"


@pytest.mark.parametrize(("doses", "why"), [
    ({0.001: 1.0, 0.01: 9.0}, ()),
    ({0.001: 1.0, 0.01: 1.0, 0.03: 9.0}, ("caught: scale (bfloat16) from dose 0.03 on",)),
    ({0.01: 1.0}, ("caught: scale (bfloat16) at no dose up to 0.01",)),
    ({}, ("no such planted fault in this report: audit with --control",)),
])  # fmt: skip
def test_a_gate_can_be_asked_to_prove_what_it_catches(doses: Any, why: Any) -> None:
    """A fault that is not there, or only caught when it is larger, is no pass."""
    book = default_rules().model_copy(update={"catches": {"scale": 0.01}})
    judged = judge([row(), *(control("scale", d, r) for d, r in doses.items())], book)
    assert judged.exit_code == (3 if why else 0)
    proofs = [v for v in judged.tests if v.rule == "catches scale"]
    assert [reason for v in proofs for reason in v.reasons] == [*why]


def test_the_ci_file_is_the_default_rules_and_asks_for_proof() -> None:
    """The thresholds are the same, word for word."""
    ci, faults = (
        read_rules(bundled_path("gate/ci.yaml")),
        "scale p-bits l-rounded truncated",
    )
    assert ci.thresholds == default_rules().thresholds
    assert ci.required == ("sdpa-flash",)
    assert set(ci.catches) == {*faults.split(), "keys-dropped", "one-head"}


FILE = """\
required: [mine]
catches: {scale: 0.01}
thresholds:
  - {name: first, metric: nonfinite, at_most: 0}
  - {name: second, where: {head: 0}, metric: row_rel, at_most: 1.0}
"""


@pytest.mark.parametrize(("rows", "words"), [
    ([row(nonfinite=None)], "first (nonfinite ≤ 0) could not be judged"),
    ([row(1)], "second could not be judged: no row matches"),
    ([row(row_rel=None)], "second (row_rel ≤ 1) could not be judged"),
    ([row(kernel="b")], "mine is required and not in this report"),
    ([row(kernel="b", status="skipped", reason="x", head=None)], "no row matches"),
    ([], "No kernel under audit was measured."),
    ([row()], "catches scale (caught from 0.01) could not be judged"),
    ([row(nonfinite=7)], "returns 7 elements of the output that are finite, infinite or NaN"),
])  # fmt: skip
def test_what_is_not_passed_is_said(
    tmp_path: Path, capsys: Any, rows: Any, words: str
) -> None:
    """In the terminal, with an exit code of its own."""
    (tmp_path / "t.yaml").write_text(FILE)
    write(report(*rows), tmp_path)
    code = run("gate", tmp_path, "--thresholds", tmp_path / "t.yaml")
    assert code == (1 if any(r.nonfinite for r in rows) else 3)
    assert "".join(words.split()) in "".join(capsys.readouterr().out.split())


def test_a_number_that_is_none_never_passes() -> None:
    """NaN that came in past validation is beyond every limit; what is infinite is said in
    words."""
    for value in (float("nan"), float("inf")):
        rows = [
            row(h).model_copy(update={"rms": value if h == 1 else 1.0}) for h in range(3)
        ]
        result = judge(rows, rules(metric="rms", at_most=2))
        assert (result.exit_code, only(result).observed) == (1, str(value))


def test_the_example_in_the_documentation_is_a_threshold_file(tmp_path: Path) -> None:
    """As docs/gate.md has it."""
    page, path = Path(__file__).parents[1] / "docs" / "gate.md", tmp_path / "example.yaml"
    path.write_text(page.read_text().split("```yaml\n")[1].split("```")[0])
    assert len(read_rules(path).thresholds) >= 3


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ()),
    ({"overflows": {"float8_e5m2": 5}}, ()),
    ({"overflows": {"float16": 5}}, (("layer 0: 5 elements of the inputs overflow float16"),)),
    ({"nonfinite": {"v": 3}}, ("layer 0: v holds 3 elements that are NaN or infinite",)),
])  # fmt: skip
def test_inputs_that_are_not_finite_are_told_and_no_pass(
    changes: Any, words: Any
) -> None:
    """As they came, or rounded to a format of the report; how many elements of what, and
    where."""
    created = unjudged(*together([row(), row(format="float16")]))
    of_calls = tuple(one.model_copy(update=changes) for one in created.cases)
    judged = judging.judgement_of(
        created.model_copy(update={"cases": of_calls}), default_rules()
    )
    (result,) = (test for test in judged.tests if test.rule == "finite inputs")
    assert (result.reasons, judged.exit_code) == (words, 3 if words else 0)


@pytest.mark.parametrize(("source", "why"), [
    ({}, None),
    ({"sequences_asked": 8, "sequences_read": 8, "tokens_asked": 256, "tokens_read": 256}, ""),
    ({"sequences_asked": 8, "sequences_read": 9}, ""),
    ({"sequences_asked": 8, "sequences_read": 7},
     "7 sequences were read where 8 sequences were asked for"),
    ({"sequences_asked": 8, "sequences_read": 8, "tokens_asked": 256, "tokens_read": 255},
     "8 x 255 tokens were read where 8 x 256 tokens were asked for"),
    ({"sequences_asked": 8, "sequences_read": 1, "tokens_asked": 256, "tokens_read": 256},
     "1 x 256 tokens were read where 8 x 256 tokens were asked for"),
])  # fmt: skip
def test_less_text_than_asked_for_is_told_and_no_pass(
    source: Any, why: str | None
) -> None:
    """Fewer sequences, or shorter ones: what was read first, then what was asked for."""
    created = unjudged(*together([row()]))
    provenance = created.provenance.model_copy(update={"source": source})
    judged = judging.judgement_of(created.model_copy(update={"provenance": provenance}),
                                  default_rules())  # fmt: skip
    reasons = [test.reasons for test in judged.tests if test.rule == "reading"]
    assert reasons == ([] if why is None else [(why,) if why else ()])
    assert judged.exit_code == (3 if why else 0)


def test_few_heads_never_lower_a_limit() -> None:
    """The limit of few heads counts where it is above the kernel's own, and that where it
    is."""
    for limit_of_kernel, of_few, limit in ((3.0, 5.0, 5.0), (3.0, 2.0, 3.0)):
        book = rules(metric="rms", at_most=1, heads=8, few=(4, of_few),
                     instead=[{"tensor": "out", "at_most": limit_of_kernel}])  # fmt: skip
        for value, outcome in ((limit, "passed"), (1.01 * limit, "exceeded")):
            result = only(judge([row(h, rms=value) for h in range(4)], book))
            assert (result.outcome, result.bound) == (outcome, limit)


def test_what_may_be_lacking_is_what_the_rule_says() -> None:
    """No number for a good reason: of `numbers` alone; no row at all: of `rows` too."""
    lacks = [row(0, noise=None), row(1)]
    for lenient, code in (("nothing", 3), ("rows", 3), ("numbers", 0)):
        book = rules(metric="noise", at_most=1, may_lack=lenient)
        assert judge(lacks, book, repeats=1).exit_code == code
        assert judge(lacks, book, repeats=2).exit_code == 3, (
            "the plan has what the row lacks"
        )
        absent = only(judge([row()], rules(metric="rms", at_most=1, may_lack=lenient,
                                           where={"tensor": "lse"})))  # fmt: skip
        assert absent.standing == (
            "missing" if lenient == "nothing" else "not applicable"
        )


def test_a_rule_of_gradients_says_nothing_where_none_were_planned() -> None:
    """Unless they are asked for: of `nothing` that may lack."""
    for lenient, count in (("nothing", 1), ("rows", 0), ("numbers", 0)):
        book = rules(metric="rms", at_most=1, may_lack=lenient, where={"tensor": "d*"})
        assert len(rule_tests(judge([row()], book))) == count
        trained = judge(
            [row(), row(tensor="dv"), row(tensor="dk"), row(tensor="dq")], book
        )
        assert len(rule_tests(trained)) == 3


def test_an_undecided_head_beside_others_is_no_pass() -> None:
    """It is shown, not the one that is held; each is counted as what it is."""
    ends = ((1.0, 1.05), (1.04, 1.5), (0.9, 1.0))
    book = rules(metric="expected_ratio", at_most=1.1)
    result = only(
        judge([estimated(h, expected_ratio=x) for h, x in enumerate(ends)], book)
    )
    assert (result.standing, result.observed, result.interval) == (
        "undecided",
        1.27,
        (1.04, 1.5),
    )
    assert (result.judged, result.offending, result.unjudged) == (2, 0, 1)
    assert result.places[0].head == 1
    assert "expected_ratio, 1.04 to 1.5, contains the limit 1.1" in result.reasons[0]


def test_another_metric_stands_in_for_a_number_that_says_why_it_is_none() -> None:
    """Not for one that nobody measured; nor is one excused that an emulation stands
    for."""
    book = rules(metric="expected_ratio", at_most=1.1,
                 otherwise=[{"metric": "baseline_ratio", "at_most": 2}])  # fmt: skip
    for nulls, standing in (({"expected_ratio": "why"}, "held"), ({}, "missing")):
        assert (
            only(judge([row(expected_ratio=None, nulls=nulls)], book)).standing
            == standing
        )
    lone = rules(metric="worst_row", at_most=5, may_lack="numbers")
    for claim, standing in ((None, "not applicable"), ("fa2", "missing")):
        bare = row(
            claim=claim, expected_ratio=None, worst_row=None, nulls={"worst_row": "why"}
        )
        assert only(judge([bare], lone)).standing == standing
    predicted = rules(metric="expected_ratio", at_most=5, may_lack="numbers")
    for why, standing in (
        (NOT_PREDICTED, "not applicable"),
        ("another reason", "missing"),
    ):
        keys = row(tensor="dk", sampled=True, expected_ratio=None, claim="fa2",
                   nulls={"expected_ratio": why})  # fmt: skip
        assert only(judge([keys], predicted)).standing == standing


def test_a_median_at_its_limit_is_within() -> None:
    """Of eight heads the fifth from above is the median, the less bad of the two in the
    middle; beyond the limit it accuses all heads that are."""
    book = rules(metric="rms", at_most=1.5, heads=8)
    for middle, outcome, offending in ((1.5, "passed", 0), (1.51, "exceeded", 5)):
        sizes = (2.0, 2.0, 2.0, 1.6, middle, 1.0, 1.0, 1.0)
        result = only(judge([row(h, rms=x) for h, x in enumerate(sizes)], book))
        assert (result.outcome, result.observed, result.offending) == (
            outcome,
            middle,
            offending,
        )


def test_a_p_of_0_is_the_smallest() -> None:
    """A bias that is certain beyond what a float can say is certain."""
    biased = row(bias_p=0.0, bias_size=0.2)
    assert judge([biased, row(1, bias_p=1.0)]).exit_code == 1


def test_calls_are_told_apart_by_case_call_and_seed() -> None:
    """A failure outweighs what else became of its call, and no other."""
    bad: dict[str, Any] = {"status": "failed", "reason": "raised", "head": None}
    for name in ("case", "call", "seed"):
        values = ("c", "d") if name == "case" else (0, 1)
        rows = [row(**{name: values[0]}), row(**{name: values[1], **bad})]
        (ran,) = run_tests(rows, planned(rows), default_rules())
        assert (ran.judged, ran.offending, ran.unjudged) == (1, 1, 0), name
    declined = row(status="skipped", reason="declined", head=None)
    (ran,) = run_tests([declined, row(**bad)], planned([declined]), default_rules())
    assert (ran.judged, ran.offending, ran.unjudged, ran.reasons) == (
        0,
        1,
        0,
        ("raised",),
    )


def test_what_was_asked_for_may_be_declined_in_some_calls_and_not_in_all() -> None:
    """A kernel by name; gradients always; one that nobody named may decline all."""
    for tensor, named, asked in (
        ("out", True, True),
        ("out", False, False),
        ("dq", False, True),
    ):
        declined = row(case="d", head=None, status="skipped", reason="no", tensor=tensor)
        some, none = [row(tensor=tensor), declined], [declined]
        for rows, missing in ((some, False), (none, asked)):
            (ran,) = run_tests(rows, planned(rows, named=named), default_rules())
            assert ran.standing == ("missing" if missing else "not applicable")


def test_a_kernel_without_an_element_to_judge_ran() -> None:
    """It is missing only where the rules require it."""
    empty = row(elements=0)
    for required, standing in (((), "held"), (("mine",), "missing")):
        book = default_rules().model_copy(update={"required": required})
        (ran,) = run_tests([empty], planned([empty]), book)
        assert ran.standing == standing


def test_a_planted_fault_that_no_rule_judges_was_not_missed() -> None:
    """Nor was it caught: it is left out of the doses from which on all are caught."""
    unknown = {"metric": "expected_ratio", "at_most": 1.1, "may_lack": "numbers"}
    rows = [
        row(),
        control("f", 0.1, 9.0),
        control("f", 0.2, 9.0),
        control("f", 0.3, None),
    ]
    (power,) = power_of(rows, planned(rows), rules(**unknown))
    assert [d.outcome for d in power.doses] == ["caught", "caught", "unmeasured"]
    assert power.caught_from == 0.1


@pytest.mark.parametrize(("dose", "formats", "why"), [
    (0.01, ("bfloat16",), ()), (0.0099, ("bfloat16",), ("caught: scale (bfloat16) from dose 0.01 "
                                                         "on",)),
    (0.01, ("bfloat16", "float16"), ("not planted in float16",)),
])  # fmt: skip
def test_a_fault_is_to_be_caught_from_its_dose_on_in_every_format(
    dose: float, formats: Any, why: Any
) -> None:
    """The dose itself is enough; a format without the fault is not."""
    book = default_rules().model_copy(update={"catches": {"scale": dose}})
    judged = judge(
        [*(row(format=fmt) for fmt in formats), control("scale", 0.01, 9.0)], book
    )
    (proof,) = (test for test in judged.tests if test.rule == "catches scale")
    assert (proof.reasons, judged.exit_code) == (why, 3 if why else 0)


def test_a_kernel_that_declined_all_is_nothing_judged() -> None:
    """Though rules are applied to yardsticks beside it."""
    where = {"role": ["kernel", "baseline"]}
    book = rules(metric="nonfinite", at_most=0, where=where)
    rows = [row(role="baseline", kernel="baseline"),
            row(head=None, status="skipped", reason="no")]  # fmt: skip
    judged = judge(rows, book)
    assert (judged.exit_code, judged.tests[-1].reasons) == (
        3, ("No kernel under audit was measured",)
    )  # fmt: skip


def test_other_rules_judge_again_and_the_first_are_held_to_the_report(
    tmp_path: Path,
) -> None:
    """A stored report passes by its own rules and fails by stricter ones."""
    stored = report(row())
    assert judging.judge_report(stored).exit_code == 0
    strict = rules(metric="expected_ratio", at_most=1.01)
    judged = judging.judge_report(stored, strict)
    assert (judged.exit_code, [t.rule for t in judged.tests][:1]) == (1, ["r"])
    for name in ("verdicts", "tested"):
        edited = stored.model_copy(update={name: getattr(stored, name)[:0]})
        with pytest.raises(
            MeasurementError, match=f"its {name} does not follow from its rows"
        ):
            judging.judge_report(edited)


def test_a_report_that_does_not_say_where_it_is_from_is_from_elsewhere() -> None:
    """A rule for a GPU holds for no report that names none."""
    book = default_rules().model_copy(update={"holds_for": {"gpu": "*"}})
    assert judging.judge_report(report(row(), gpu="H100"), book).exit_code == 0
    with pytest.raises(MeasurementError, match="hold for gpu"):
        judging.judge_report(report(row(), gpu=None), book)


def test_a_limits_excess() -> None:
    """The size over the limit; infinite beyond a limit of 0, and of what is no number."""
    limit, none = (
        Limit(metric="bias_size", at_most=0.5),
        Limit(metric="nonfinite", at_most=0),
    )
    assert [limit.excess(x) for x in (-1.0, 0.25, None)] == [2.0, 0.5, 0.0]
    assert limit.excess(float("nan")) == float("inf")
    assert [none.excess(x) for x in (0.0, 1e-9)] == [0.0, float("inf")]


def test_rows_of_dk_share_the_errors_of_their_delta() -> None:
    """As those of dq: 8 numbers a row; those of dv do not. 1 + 4/√16 is 2, 1 + 4/√128 is
    1.354."""
    book = rules(metric="expected_ratio", at_most=1.1, scatter=4)
    for tensor, limit in (("dq", 2.0), ("dk", 2.0), ("dv", 1.354), ("out", 1.354)):
        sized = row(tensor=tensor, elements=128, rows_measured=2, expected_ratio=1.0)
        assert only(judge([sized], book)).bound == limit


def test_a_finding_counts_the_heads_of_all_its_formats() -> None:
    """One function that is wrong in two formats is one finding: 3 of 7 heads."""
    wrong = {"suspicion": "the scale is 1", "suspicion_cut": 50.0}
    rows = [*(row(h, **(wrong if h < 2 else {})) for h in range(4)),
            *(row(h, format="float16", **(wrong if h < 1 else {})) for h in range(3))]  # fmt: skip
    ((finding, *_), _) = findings_of(rows)
    assert (finding.count, finding.judged, finding.formats) == (
        3,
        7,
        ("bfloat16", "float16"),
    )
    assert " is wrong in 3 of 7 heads: " in finding.sentence


def test_what_a_correction_removes_is_said_by_format() -> None:
    """Of each format its own median: the one over all heads, 70 %, would be of
    neither."""
    wrong = {"suspicion": "the scale is 1", "suspicion_cut": 50.0}
    of_format = {"bfloat16": (0.5, 0.6, 0.7), "float16": (0.94, 0.95, 0.96)}
    rows = [
        row(head, format=fmt, suspicion_share=share, **wrong)
        for fmt, shares in of_format.items()
        for head, share in enumerate(shares)
    ]
    ((finding, *_), _) = findings_of(rows)
    words = (
        "removes 60 % of the rms error of the median head in bfloat16, 95 % in float16"
    )
    assert words in finding.details
    ((alone, *_), _) = findings_of(rows[:3])
    assert "removes 60 % of the rms error of the median head." in alone.details


def test_the_interval_of_a_median_is_told_from_its_lower_to_its_upper_end() -> None:
    """The medians of the ends of nine heads, which are those of two different heads."""
    ends = [(0.8, 1.0), (0.81, 1.01), (0.82, 1.02), (0.83, 1.5), (0.9, 1.3), (0.91, 1.04),
            (0.92, 1.2), (0.93, 1.6), (0.94, 1.7)]  # fmt: skip
    heads = [estimated(h, expected_ratio=x) for h, x in enumerate(ends)]
    result = only(judge(heads, rules(metric="expected_ratio", at_most=1.1, heads=8)))
    assert result.standing == "undecided"
    assert (
        "the interval of the median expected_ratio, 0.9 to 1.2, contains"
        in result.reasons[0]
    )
