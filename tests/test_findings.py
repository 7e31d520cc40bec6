"""Findings: each fault once, in a sentence whose every number is a row's, and calm
otherwise."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from gate_rows import control, findings_of, judge, planned, row
from oracles import make_case

import numdev
from numdev.gate import findings as gate_findings
from numdev.gate.judgement import Test
from numdev.gate.row_tests import run_tests
from numdev.gate.rules import Rules, default_rules
from numdev.report import BesideReference, DeviationRow, Finding, Standing


def of_rows(*rows: DeviationRow) -> tuple[Finding, ...]:
    return findings_of(rows)[0]


def test_what_would_have_been_caught() -> None:
    """The smallest dose of each planted fault; and those that nothing catches."""
    doses = {
        ("scale", 0.01): 1.0,
        ("scale", 0.03): 4.0,
        ("tail", 1): 1.0,
        ("tail", 64): 1.0,
    }
    rows = [row(), *(control(*dose, ratio) for dose, ratio in doses.items())]
    findings, tested = findings_of(rows)
    assert findings == ()
    assert tested[1] == (
        "Of the faults planted in this run, these rules catch: scale (bfloat16) "
        "from dose 0.03 on; "
        "tail (bfloat16) at no dose up to 64."
    )


def test_a_finding_stands_where_it_is_worst() -> None:
    """Not where it was met first or last."""
    (finding,) = of_rows(
        *(row(h, expected_ratio=x) for h, x in enumerate((2.0, 9.0, 3.0)))
    )
    assert (finding.place.head, finding.observed, finding.count) == (1, 9.0, 3)
    assert "head 1" in finding.details


def test_a_kernel_that_no_rule_applies_to_is_not_judged() -> None:
    """In its own line: where no row sees a key there is nothing that could pass."""
    for elements, outcome in ((10_000, "passed"), (0, "unmeasured")):
        rows = [row(elements=elements)]
        judgement = judge(rows)
        (verdict,) = gate_findings.kernel_verdicts(judgement, findings_of(rows)[0])
        assert verdict.outcome == outcome


def test_gradients_inherit_a_wrong_output() -> None:
    """They are no findings beside it, but are where the output is right."""
    wrong = row(suspicion="the scale is 1", suspicion_cut=50.0, expected_ratio=9.0)
    (finding,) = of_rows(wrong, row(tensor="dq", expected_ratio=9.0))
    assert finding.details.endswith("Its gradients are wrong for the same reason.")
    assert [f.tensor for f in of_rows(row(), row(tensor="dq", expected_ratio=9.0))] == [
        "dq"
    ]


@pytest.mark.parametrize(("metric", "at_most", "words"), [
    ("baseline_ratio", 2, "has 3.00× eager attention's error in the output (limit 2×)."),
    ("expected_ratio", 0.5, "is inaccurate: error of the output 1.00× expected (limit 0.5×)."),
    ("worst_row", 1.1, ("has a row of the output with 1.2× the expected error (limit 1.1×).")),
    ("mean_abs", 3e-5, ("breaks the rule `mine` in the output: expected mean_abs ≤ 3e-5, got 9e-5")),
])  # fmt: skip
def test_words_follow_the_metric_of_the_rule(
    metric: str, at_most: float, words: str
) -> None:
    """Number and limit, in the words of the metric."""
    limit = {"name": "mine", "metric": metric, "at_most": at_most}
    sized = row(baseline_ratio=3.0, expected_ratio=1.0, worst_row=1.2, mean_abs=9e-5)
    ((finding,), _) = findings_of([sized], Rules.model_validate({"thresholds": [limit]}))
    assert finding.sentence.startswith(f"mine (bfloat16) {words}")


def test_a_kernel_that_passed_shows_the_number_nearest_to_its_limit() -> None:
    """Over its own limit: 1.05 of 1.1 is nearer than 3 of 5, and a number within 0 is not
    near."""
    rows = [row(expected_ratio=1.05, worst_row=3.0)]
    (verdict,) = gate_findings.kernel_verdicts(judge(rows), findings_of(rows)[0])
    assert (verdict.rule, verdict.observed, verdict.limit) == ("error", 1.05, 1.1)
    near = [Test(rule="r", standing=Standing.HELD, observed=x, bound=b)
            for x, b in ((-3.0, 4.0), (1.0, 0.0), (0.0, 0.0), (None, 1.0))]  # fmt: skip
    assert [test.nearness for test in near] == [0.75, float("inf"), 0.0, 0.0]


@pytest.mark.parametrize(("failed", "declined", "words"), [
    (2, 1, "mine (bfloat16) failed in 2 of 6 calls: it raised."),
    (0, 2, "mine (bfloat16) refuses 2 of 5 calls: it declined."),
])  # fmt: skip
def test_calls_are_counted_as_what_became_of_them(
    failed: int, declined: int, words: str
) -> None:
    """Three ran; those that failed are told before those that were declined."""
    bare = [*[("failed", "it raised")] * failed, *[("skipped", "it declined")] * declined]
    rows = [*(row(call=n) for n in range(3)),
            *(row(None, call=3 + n, status=status, reason=why)
              for n, (status, why) in enumerate(bare))]  # fmt: skip
    (finding,) = of_rows(*rows)
    assert finding.sentence == words
    assert (finding.count, finding.judged) == (failed or declined, 3 + failed + declined)
    assert finding.severity == ("unmeasured" if failed else "note")


@pytest.mark.parametrize(("required", "named", "words"), [
    (("mine",), False, "is required, but not run in 1 of 1 calls: no."),
    ((), True, "was requested, but not run in 1 of 1 calls: no."),
])  # fmt: skip
def test_a_kernel_that_never_ran_was_required_or_requested(
    required: tuple[str, ...], named: bool, words: str
) -> None:
    """By the rules, or by whoever asked for it by name."""
    rows = [row(None, status="skipped", reason="no")]
    book = default_rules().model_copy(update={"required": required})
    tests = run_tests(rows, planned(rows, named=named), book)
    assert [f.sentence for f in gate_findings.run_findings(list(tests))] == [
        f"mine (bfloat16) {words}"
    ]


def test_how_many_results_were_checked() -> None:
    """The most that one rule had: 5 heads of the output, of which 4 have a row that is
    judged."""
    rows = [row(h, **({"tensor": "dq"} if h == 4 else {})) for h in range(5)]
    _, (tested, *_) = findings_of(rows)
    assert tested.startswith(
        "All applied rules passed: mine in bfloat16, 5 results (one per head"
    )


def test_overflows_are_counted_in_elements() -> None:
    """Over all heads, not in heads."""
    _, tested = findings_of([row(0, overflow=3), row(1, overflow=4), row(2)])
    assert any("out of mine overflows in 7 elements where" in line for line in tested)


def mistaken(head: int, *alternatives: tuple[str, ...], **changes: Any) -> DeviationRow:
    """A head whose error one of these explains, each with what it is an instance of."""
    fields: dict[str, Any] = {
        "suspicion": ", or ".join(words for words, *_ in alternatives),
        "suspicion_of": alternatives,
        "suspicion_cut": 1000.0,
        "suspicion_share": 0.98,
    }
    return row(head, **{**fields, **changes})


def test_a_mistake_says_what_correcting_it_removes() -> None:
    """Of three heads the median share of the judged error; of a finer run, of which some
    rows were searched, whole nines that hold where all rows leave up to twice as much."""
    cause = ("the scale is 1",)
    wrong = [
        mistaken(h, cause, suspicion_share=x) for h, x in enumerate((0.05, 0.14, 0.9))
    ]
    (finding,) = of_rows(*wrong)
    assert finding.sentence == "mine (bfloat16) is wrong in 3 of 3 heads: the scale is 1."
    assert finding.details == (
        "Worst at layer 0 head 0. Correcting it removes 14 % of the rms "
        "error of the median head."
    )
    finer: dict[str, Any] = {"suspicion_format": "float32", "suspicion_cut": 5000.0}
    (finding,) = of_rows(mistaken(0, cause, suspicion_share=0.14, **finer))
    assert (
        "removes 14 % of the rms error, and at least 99.9 % where the inputs are in"
        in (finding.details)
    )


@pytest.mark.parametrize(("cut", "words"), [
    (10.0, "80 %"), (20.0, "90 %"), (199.0, "90 %"), (201.0, "99 %"), (9e5, "99.999 %"),
    (2.1e6, "99.9999 %"),
])  # fmt: skip
def test_what_a_search_promises_of_all_rows(cut: float, words: str) -> None:
    """Nines, of half the cut that was measured; nothing where the error itself shows the
    cause."""
    finer: dict[str, Any] = {"suspicion_format": "float32", "suspicion_cut": cut}
    (finding,) = of_rows(mistaken(0, ("x",), suspicion_share=0.05, **finer))
    assert f"at least {words} where the inputs are in float32" in finding.details
    (finding,) = of_rows(mistaken(0, ("x",), suspicion_share=0.9, **finer))
    assert "at least" not in finding.details


@pytest.mark.parametrize(("share", "words"), [
    (0.14, "14 %"), (0.98, "98 %"), (0.994, "99.4 %"), (1 - 2e-4, "99.98 %"),
    (1 - 1.9e-6, "99.99981 %"), (1.0, "all"),
])  # fmt: skip
def test_a_share_is_never_rounded_up_to_all(share: float, words: str) -> None:
    """As many digits as tell it from the whole."""
    assert gate_findings.share_in_words(share) == words


def test_instances_of_one_mechanism_are_one_finding() -> None:
    """Heads of calls of 129, 97 and 99 keys, which lose 1, 33 and 35, and what else each
    may be."""
    tile = "keys beyond the last full tile of {} are dropped"
    rows = [
        mistaken(0, ("the last key is dropped", *map(tile.format, (16, 32, 64)))),
        mistaken(1, ("the last 33 keys are dropped", tile.format(64))),
        mistaken(2, ("the last 35 keys are dropped", tile.format(64))),
    ]
    (finding,) = of_rows(*rows)
    assert (finding.cause, finding.count) == (tile.format(64), 3)


def test_alternatives_that_one_call_leaves_open_are_decided_by_another() -> None:
    """The first head may be either, the second is one: both are that. Alone, both are
    said."""
    either, one = mistaken(0, ("a",), ("b",)), mistaken(1, ("b",))
    assert [f.cause for f in of_rows(either, one)] == ["b"]
    assert [f.cause for f in of_rows(either)] == ["a, or b"]


def test_what_a_call_shows_goes_before_what_it_is_an_instance_of() -> None:
    """Where both are true of the same heads."""
    rows = [mistaken(h, ("the last key is dropped", "a tile is")) for h in range(2)]
    assert [f.cause for f in of_rows(*rows)] == ["the last key is dropped"]


def test_a_cause_that_leaves_the_worst_head_unexplained_comes_after_it() -> None:
    """And is the first where it explains it."""
    small = mistaken(0, ("the scale is 1",), expected_ratio=5.0)
    worst = row(1, expected_ratio=500.0, nulls={"suspicion": "nothing"})
    assert [f.metric for f in of_rows(small, worst)] == ["expected_ratio", "suspicion"]
    large = mistaken(0, ("the scale is 1",), expected_ratio=900.0)
    first, second = of_rows(large, worst)
    assert (first.metric, second.count, second.observed) == ("suspicion", 1, 500.0)


def test_heads_that_are_named_do_not_come_again() -> None:
    """In another rule's finding, whose number is that of the heads that are left."""
    rows = [mistaken(h, ("the scale is 1",), expected_ratio=900.0) for h in range(3)]
    _, others = of_rows(*rows, row(3, expected_ratio=2.0))
    assert "error of the output 2.00× expected" in others.sentence
    assert others.details.startswith(
        "In 1 of 4 heads, beside 3 of other findings, worst at layer 0 head 3."
    )


def test_an_imprecise_step_is_the_cause_of_what_it_explains() -> None:
    """With its share of the error, in the finding of the rule that is broken."""
    cause = {"imprecision": "P is in e4m3", "imprecision_share": 0.997}
    rows = [row(h, expected_ratio=4.0, **cause) for h in range(3)]
    (finding,) = of_rows(*rows)
    assert finding.cause == "P is in e4m3"
    assert (
        "Cause: P is in e4m3. That explains 99.7 % of the error in 3 of these heads."
        in (finding.details)
    )


def test_an_imprecise_step_that_leaves_the_worst_head_is_said_with_its_count() -> None:
    """And one that explains fewer than half of the heads is not said."""
    cause = {"imprecision": "P is in e4m3", "imprecision_share": 0.95}
    rows = [
        row(0, expected_ratio=9.0),
        *(row(h, expected_ratio=4.0, **cause) for h in (1, 2)),
    ]
    (finding,) = of_rows(*rows)
    assert finding.details.endswith(
        "That explains 95 % of the error in 2 of these heads, not in the worst."
    )
    assert of_rows(*rows[:2])[0].cause is None


def test_a_place_is_said_where_it_holds() -> None:
    """In words for calls of several lengths, of most of the heads; else of the worst."""
    places = [("row 63", "every 64th row from 63"), ("every 64th row from 63",)]
    rows = [
        row(h, expected_ratio=9.0, errs_in="row 63", errs_in_of=x)
        for h, x in enumerate(places)
    ]
    (finding,) = of_rows(*rows, row(2, expected_ratio=5.0))
    assert "It errs in every 64th row from 63 (2 of 3 heads)." in finding.details
    (finding,) = of_rows(rows[0], row(1, expected_ratio=5.0), row(2, expected_ratio=5.0))
    assert "It errs in row 63 of the worst head." in finding.details


def test_gradients_inherit_a_wrong_output_in_its_own_format_alone() -> None:
    """In another format, where the output is right, they are a finding of their own."""
    wrong = row(suspicion="the scale is 1", suspicion_cut=50.0)
    other = [
        row(format="float16"),
        row(format="float16", tensor="dq", expected_ratio=9.0),
    ]
    assert [(f.tensor, f.formats) for f in of_rows(wrong, *other)] == [
        ("out", ("bfloat16",)), ("dq", ("float16",))
    ]  # fmt: skip
    both = [{"format": fmt, "tensor": "dq", "suspicion": "dq is 0", "suspicion_cut": 30.0}
            for fmt in ("bfloat16", "float16")]  # fmt: skip
    assert [(f.tensor, f.formats) for f in of_rows(wrong, other[0], *(row(**x) for x in both))] == [
        ("out", ("bfloat16",)), ("dq", ("bfloat16", "float16"))
    ]  # fmt: skip


def test_the_number_and_the_limit_of_a_finding_are_not_exchanged() -> None:
    """In its fields, as in its sentence."""
    (finding,) = of_rows(
        *(row(h, expected_ratio=2.5 if h == 3 else 1.0) for h in range(4))
    )
    assert (finding.observed, finding.limit, finding.count, finding.judged) == (
        2.5,
        1.1,
        1,
        4,
    )
    assert finding.sentence == (
        "mine (bfloat16) is inaccurate in 1 of 4 heads: error of the output 2.5× expected "
        "(limit 1.1×)."
    )
    assert finding.details.startswith("Worst at layer 0 head 3.")


def test_a_finding_says_of_which_head_its_number_is() -> None:
    """The largest of several, or the median one; in how many heads where 20 words allow
    it, else in the details."""
    rows = [row(h, expected_ratio=2.0 + h) for h in range(3)]
    (of_all,) = of_rows(*rows)
    assert (
        "in 3 of 3 heads: error of the output up to 4.00× expected (" in of_all.sentence
    )
    (lengthy,) = of_rows(
        *(mistaken(h, ("the scale is 1" + " or 2" * 8,)) for h in range(3))
    )
    assert lengthy.sentence.startswith("mine (bfloat16) is wrong: the scale is 1 or 2")
    assert lengthy.details.startswith("In 3 of 3 heads, worst at layer 0 head 0.")
    medians = [row(h, expected_ratio=1.08) for h in range(16)]
    (typical,) = of_rows(*medians)
    assert "expected in the median of 16 heads (limit" in typical.sentence
    assert typical.details.startswith("In 16 of 16 heads, worst at ")


@pytest.mark.parametrize(("clauses", "least", "line", "details"), [
    ((), 0, "A.", ""), ((), 1, "A.", ""), (("b",), 2, "A: b.", ""), (("b", "c"), 0, "A: b; c.", ""),
    (("b", "c " * 20), 0, "A: b.", "c " * 20 + "."), (("b " * 20, "c"), 1, f"A: {'b ' * 20}.", "c."),
    (("b.", "c."), 1, "A: b; c.", ""), (("b " * 20,), 0, "A.", "b " * 20 + "."),
    (("b " * 20,), 3, f"A: {'b ' * 20}.", ""),
])  # fmt: skip
def test_a_sentence_has_as_many_clauses_as_fit(
    clauses: tuple[str, ...], least: int, line: str, details: str
) -> None:
    """In 20 words, at least so many; of fewer clauses than that all."""
    assert gate_findings.first_clauses("A", clauses, least=least) == (line, details)


FLOOR = {"role": "floor", "kernel": "floor", "expected_ratio": None}
LOST, TURNED, UNLIKE = (
    "NaN or infinite where the exact result is finite",
    "finite where the exact result, rounded once, is not",
    "finite, infinite or NaN unlike the exact result",
)


@pytest.mark.parametrize(("floor", "elements", "changes", "words"), [
    (100, 93, {}, LOST),  # every element that is lost the exact result has
    (100, 90, {"overflow": 3}, LOST),  # as many more where the rounding model has them too
    (100, 96, {}, UNLIKE),  # 4 are NaN, 3 are finite where the exact result is not
    (93, 100, {}, UNLIKE), (93, 93, {}, UNLIKE), (None, 93, {}, UNLIKE),
    (0, 0, {}, TURNED), (0, 0, {"sampled": True, "rows_measured": 4}, UNLIKE),
    (0, 0, {"beside_reference": BesideReference()}, UNLIKE),  # or inf in place of NaN
    (100, 93, {"out_format": "float16"}, UNLIKE),  # of which the floor is another
])  # fmt: skip
def test_elements_unlike_the_exact_result_are_called_what_they_are(
    floor: int | None, elements: int, changes: Any, words: str
) -> None:
    """Seven count, either way: which way is said where the floor's row shows it of all."""
    rows = [row(nonfinite=7, elements=elements, **changes)]
    rows += [row(elements=floor, **FLOOR)] if floor is not None else []
    (finding,) = (
        f for f in findings_of(rows, default_rules())[0] if f.metric == "nonfinite"
    )
    assert (
        finding.sentence
        == f"mine (bfloat16) returns 7 elements of the output that are {words}."
    )
    assert len(finding.sentence.split()) <= 20


def test_heads_that_differ_in_what_is_shown_are_called_by_what_holds_of_all() -> None:
    rows = [row(0, nonfinite=7, elements=93), row(1, nonfinite=7, elements=0)]
    rows += [row(0, elements=100, **FLOOR), row(1, elements=0, **FLOOR)]
    (finding,) = (
        f for f in findings_of(rows, default_rules())[0] if f.metric == "nonfinite"
    )
    assert finding.sentence.endswith(
        f"returns 14 elements of the output that are {UNLIKE}."
    )


def test_finite_numbers_in_place_of_nan_are_not_called_nan() -> None:
    """With all keys NaN the exact result and its log-sum-exp are NaN; PyTorch's fused kernel
    for a CPU returns 0 for the latter, this kernel for both."""
    case = make_case(heads=2, q_len=8, kv_len=8, dtype=torch.float32)
    lost = dataclasses.replace(case, k=torch.full_like(case.k, math.nan))
    kernels = [lambda q, k, v: torch.zeros_like(q), "sdpa-flash"]
    report = numdev.audit(cases=lost, kernels=kernels, formats="bfloat16", device="cpu")
    ends = {
        (f.tensor, f.count, f.sentence.partition(" that are ")[2])
        for f in report.findings
    }
    assert ends == {("out", 2, f"{TURNED}."), ("lse", 2, f"{UNLIKE}.")}
