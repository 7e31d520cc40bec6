"""The summary: numbers a person can recompute from a handful of rows made by hand, and
sentences that say no more than those numbers do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gate_rows
import pytest
from gate_rows import SOUND

from numdev.gate.rules import default_rules
from numdev.metrics.statistics import BIAS_ALPHA, BIAS_FORMATS, BIAS_SEQUENCES, BIAS_ULP
from numdev.report import (
    AuditSummary,
    DeviationRow,
    Finding,
    KernelSummary,
    KernelVerdict,
)
from numdev.report import document as doc
from numdev.report.number_text import percent, shade, short, si, three
from numdev.report.summary import summarise
from numdev.report.views import verdicts
from numdev.studies.audit.view import maps
from numdev.tensor_properties import ATTENTION_WORDS

# Of 0/0 in pandas: it must not get that far
pytestmark = pytest.mark.filterwarnings("error")
NUMBERS: dict[str, Any] = {
    "elements": 100, "sequences": 8, "empty_rows": 0, "nonfinite": 0, "max_abs": 0.02,
    "mean_abs": 0.01, "rms": 0.012, "row_rel": 0.002, "floor_ratio": 1.5,
    "baseline_ratio": 0.5, "fa_rule": True, "flash_vs_precision": 2.0,
    "bias_p": 1.0, "bias_size": 0.0, "bias_of": "mean",
}  # fmt: skip
EMPTY = {**dict.fromkeys(NUMBERS), "nonfinite": 100, "sequences": 8, "elements": 0}
"""A head that is all NaN."""


def row(head: int | None = 0, layer: int | None = 0, **changes: Any) -> DeviationRow:
    identity = {"case": f"layer{layer}", "layer": layer, "kernel": "sdpa-flash"}
    numbers = NUMBERS if changes.get("status", "ok") == "ok" else {}
    return gate_rows.row(
        head, **{**dict.fromkeys(SOUND), **identity, **numbers, **changes}
    )


def precision(**changes: Any) -> DeviationRow:
    fields = {
        "kernel": "reference",
        "role": "precision",
        "rms": 0.001,
        "mean_abs": 0.0008,
    }
    without = dict.fromkeys(
        ("floor_ratio", "baseline_ratio", "flash_vs_precision", "bias_p")
    )
    return row(**{**without, **fields, **changes})


def baseline(**changes: Any) -> DeviationRow:
    return row(
        **{"kernel": "baseline", "role": "baseline", "floor_ratio": 3.0, **changes}
    )


def of(summary: AuditSummary, kernel: str) -> KernelSummary:
    (result,) = (k for k in summary.kernels if k.kernel == kernel)
    return result


def test_ratios_are_medians_and_the_worst_head_is_named() -> None:
    """The median over heads, the largest value, and the layer and head it is at."""
    ratios = {(0, 0): 1.0, (0, 1): 1.1, (1, 0): 9.0, (1, 1): 1.2, (2, 0): 1.3}
    rows = [
        row(h, l, floor_ratio=x, flash_vs_precision=x) for (l, h), x in ratios.items()
    ]
    k = of(summarise(rows), "sdpa-flash")
    assert (k.floor_ratio, k.floor_ratio_worst, k.floor_ratio_where) == (
        1.2,
        9.0,
        "layer 1 head 0",
    )
    assert k.flash_vs_precision == 1.2


def test_a_head_without_numbers_is_left_out_of_them() -> None:
    """A head that is all NaN adds to nonfinite alone; if it is the only one, nothing is
    known."""
    k = of(summarise([row(0), row(1, **EMPTY)]), "sdpa-flash")
    assert (k.mean_abs, k.floor_ratio, k.nonfinite) == (0.01, 1.5, 100)
    assert k.ok == 2
    summary = summarise([precision(), row(0, **EMPTY)])
    k = of(summary, "sdpa-flash")
    assert (k.mean_abs, k.max_abs, k.floor_ratio, k.nonfinite) == (None, None, None, 100)
    assert summary.answer == ()


def test_the_map_shows_the_worst_kernel_first() -> None:
    """Layer by head, the worst call of each, with a gap where a head was not measured;
    the error over what is expected where that is known of all heads, else over the
    floor."""
    rows = [
        row(0, 0, floor_ratio=1.0),
        row(1, 0, floor_ratio=2.0),
        row(1, 0, floor_ratio=1.5, call=1),
        row(0, 3, floor_ratio=3.0),
        *(
            row(0, l, kernel="better", floor_ratio=9.0, expected_ratio=0.5)
            for l in (0, 3)
        ),
    ]
    first, second = maps(SimpleNamespace(rows=rows, words=ATTENTION_WORDS))
    assert first.title == "sdpa-flash, bfloat16, out: error / floor, layer by head"
    cells = [[cell.text for cell in line.cells] for line in first.rows]
    assert cells == [["0", "1.00", "2.00"], ["3", "3.00", "–"]]
    assert second.title.startswith("better, bfloat16, out: error / expected")
    assert [line.cells[1].text for line in second.rows] == ["0.50", "0.50"]


def test_bias_is_judged_in_16_bits_only() -> None:
    """What counts is what the kernel returned, not what it was given; and fewer than
    eight sequences say nothing, whatever the p."""
    for fmt, count, biased in (
        ("bfloat16", 8, 1),
        ("float32", 8, None),
        ("bfloat16", 7, None),
    ):
        result = summarise(
            [row(bias_p=0.0, bias_size=1.0, out_format=fmt, sequences=count)]
        )
        assert result.kernels[0].biased_heads == biased


def answer(*rows: DeviationRow, **of: Any) -> str:
    """The verdict on the last row's kernel, which passed, and what is said below it."""
    result, last = summarise(rows), rows[-1]
    fields = {"outcome": "passed", "kernel": last.kernel, "format": last.format, **of}
    verdict = KernelVerdict(**fields)
    shown = verdicts(SimpleNamespace(summary=result, verdicts=(verdict,), findings=()))
    return " ".join((*(f"{item.lead}{item.text}" for item in shown), *result.answer))


def test_a_verdict_has_the_numbers_that_matter() -> None:
    """How far from the floor and where most, what was expected, eager attention beside
    it."""
    rows = [
        baseline(),
        row(0, expected_ratio=1.0),
        row(1, floor_ratio=1.7, expected_ratio=1.02),
    ]
    assert answer(precision(), *rows).startswith(
        "PASS  sdpa-flash  bfloat16 median 1.01× expected, 1.60× floor, 0.50× eager; "
        "worst 1.70× floor, layer 0 head 1"
    )
    # Of one head alone there is no median, and no worst
    text = answer(precision(), baseline(), row(0, expected_ratio=1.0))
    assert text.startswith(
        "PASS  sdpa-flash  bfloat16 error 1.00× expected, 1.50× floor, 0.50× eager "
    )
    text = answer(row(), outcome="unmeasured", reason="no GPU")
    assert text.startswith("NOT JUDGED  sdpa-flash  bfloat16 no GPU ")
    crash = {"rule": "runs", "tensor": "out", "reason": "it raised"}
    text = answer(row(), outcome="unmeasured", **crash)
    assert text.startswith("CRASHED  sdpa-flash  bfloat16 it raised ")


def test_what_overflows_is_said() -> None:
    """An overflow of the format, and of eager attention."""
    assert answer(
        precision(nonfinite=5), baseline(nonfinite=7), row(nonfinite=9)
    ).endswith(
        "bfloat16: Rounding q, k, v to bfloat16 overflows: 5 elements of the exact "
        "result are no "
        "longer finite. bfloat16: Eager attention returns 7 elements that are finite, "
        "infinite or NaN unlike the exact result."
    )


@pytest.mark.parametrize(("of", "kernel"), [
    ({}, "sdpa-flash"), ({"formats": ("float16",)}, "mine"), ({"options": {"b": 1}}, "mine"),
    ({"kernel": "sdpa-flash"}, "mine"),
])  # fmt: skip
def test_a_kernel_with_a_finding_is_not_set_beside_the_format(
    of: Any, kernel: str
) -> None:
    """Its own, in this format. One that was asked for by name is spoken of first."""
    fields = {
        "sentence": "",
        "kernel": "mine",
        "formats": ("bfloat16",),
        "rule": "error",
        **of,
    }
    finding = Finding(**fields, severity="exceeded", count=1, judged=1)
    rows = [
        precision(),
        baseline(),
        *(row(kernel=name) for name in ("sdpa-flash", "mine")),
    ]
    (text,) = summarise(rows, [finding]).answer
    assert text.startswith(f"bfloat16: {kernel} and eager attention differ by 2.00× the")


@pytest.mark.parametrize("name", ["floor_ratio", "flash_vs_precision"])
def test_a_multiple_of_fp64_noise_is_not_said(name: str) -> None:
    """Where the exact result needs no rounding, or the format changes nothing; or in one
    head."""
    rows = [precision(), baseline(floor_ratio=1e13)]
    for noisy in ([row(**{name: 1.3e13})], [row(), row(2), row(1, **{name: 1.3e13})]):
        assert "13" not in answer(*rows, *noisy)


def test_planted_faults_are_no_kernels() -> None:
    """Controls are the gate's; the ranking does not know them."""
    control = row(role="control", kernel="control:scale", options={"dose": 0.01})
    assert summarise([row(), control]) == summarise([row()])


def test_in_fp64_nobody_is_closer() -> None:
    """The reference is no more exact than the kernel there, and no ratio is quoted."""
    text = answer(*(created(format="float64") for created in (precision, baseline, row)))
    assert "max difference 0.02 from the reference, which is float64 too" in text
    assert "floor" not in text


@pytest.mark.parametrize(("others", "changes", "words"), [
    ((precision(), baseline()), {"baseline_ratio": 0.4}, ("causes, mostly eager attention's own")),
    ((precision(), baseline()), {"baseline_ratio": 0.6}, ("q, k, v to bfloat16 alone causes.")),
    ((precision(rms=0.0, mean_abs=0.0), baseline()), {"flash_vs_precision": None},
     "Rounding q, k, v to bfloat16 changes nothing: the format costs nothing here."),
    ((precision(), row(None, kernel="baseline", role="baseline", status="failed", reason="no")),
     {"flash_vs_precision": None},
     ("Eager attention did not run: no difference to compare with the cost of the format.")),
    ((precision(), baseline(floor_ratio=None)), {"floor_ratio": None, "max_abs": 0.25},
     "max error 0.25; the exact result needs no rounding"),
], ids=["eager's", "own", "no cost", "no eager", "no floor"])  # fmt: skip
def test_what_a_ratio_is_missing_for(
    others: Any, changes: dict[str, Any], words: str
) -> None:
    """Whose error the difference is (half of eager attention's or less: mostly its own);
    without a ratio its reason: a format that costs nothing, no eager attention, a truth
    of zeros."""
    assert words in answer(*others, row(**changes))


def test_the_table_counts_by_the_rule() -> None:
    """A head is called biased in the table where the gate's rule accuses it."""
    rule = next(t for t in default_rules().thresholds if t.name == "bias")
    assert (rule.at_most, rule.where.out_format) == (BIAS_ULP, BIAS_FORMATS)
    assert (rule.certain.alpha, rule.certain.sequences) == (BIAS_ALPHA, BIAS_SEQUENCES)


@pytest.mark.parametrize(("p", "size", "expected"), [
    (BIAS_ALPHA / 4, BIAS_ULP, 1), (BIAS_ALPHA / 4 * 1.001, BIAS_ULP, 0), (None, None, 0),
    (BIAS_ALPHA / 4, -BIAS_ULP, 1), (BIAS_ALPHA / 4, BIAS_ULP * 0.999, 0), (0.0, 0.0, 0),
])  # fmt: skip
def test_an_accusation_takes_significance_and_size(
    p: Any, size: Any, expected: int
) -> None:
    """Both at their limits accuse, either short of it does not; four heads share the
    error rate."""
    rows = [row(head) for head in range(3)]
    result = of(summarise([*rows, row(3, bias_p=p, bias_size=size)]), "sdpa-flash")
    assert result.biased_heads == expected


def test_errors_are_pooled_over_elements() -> None:
    """mean_abs is weighted by elements, max_abs is the largest."""
    rows = [row(0, elements=300, mean_abs=1.0, max_abs=5.0),
            row(1, elements=100, mean_abs=5.0, max_abs=7.0)]  # fmt: skip
    k = of(summarise(rows), "sdpa-flash")
    assert (k.mean_abs, k.max_abs) == (2.0, 7.0)


def test_a_count_that_is_not_known_is_no_zero() -> None:
    """And its kernel is not spoken of as one whose output is finite."""

    def counts(*nonfinite: int | None) -> tuple[int | None, bool]:
        summary = summarise([row(h, nonfinite=n) for h, n in enumerate(nonfinite)])
        return of(summary, "sdpa-flash").nonfinite, bool(summary.answer)

    assert [counts(*x) for x in ((0, 0), (0, None), (None,), (3, None))] == [
        (0, True), (None, False), (None, False), (3, False),
    ]  # fmt: skip


def test_noise_of_gradients_counts() -> None:
    """A kernel with atomic adds in backward alone is not reproducible: the largest noise,
    over the floor's error; the same bits in every run are 0."""
    still, noisy = row(0, noise=0.0), row(1, tensor="dq", noise=0.024)
    assert of(summarise([still, noisy]), "sdpa-flash").noise == pytest.approx(3.0)
    assert of(summarise([still]), "sdpa-flash").noise == 0.0
    exact = row(1, noise=0.3, floor_ratio=None)  # beside a floor without an error
    assert of(summarise([exact]), "sdpa-flash").noise is None
    assert of(summarise([still, exact]), "sdpa-flash").noise is None
    assert of(summarise([exact, noisy]), "sdpa-flash").noise == pytest.approx(3.0)
    assert of(summarise([row(noise=None)]), "sdpa-flash").noise is None


def test_options_make_a_kernel_of_its_own() -> None:
    """The same name with other options is another line."""
    rows = [
        row(options={"block": 64}),
        row(options={"block": 128}, baseline_ratio=0.7),
        row(),
    ]
    result = [(k.options, k.baseline_ratio) for k in summarise(rows).kernels]
    assert result == [({"block": 64}, 0.5), ({}, 0.5), ({"block": 128}, 0.7)]


def test_numbers_are_written_as_what_they_round_to() -> None:
    assert [si(x) for x in (0.0, 0.0099, 99.4, 99.6, 100.2)] == [
        "0",
        "9.9e-3",
        "99",
        "1.0e2",
        "1.0e2",
    ]
    assert [three(x) for x in (999.4, 999.6, 9570.0, 1e6)] == [
        "999",
        "1000",
        "9570",
        "1e6",
    ]


def test_what_returns_nan_is_ranked_last() -> None:
    """However near the rest of it is; of the others the nearest to the truth is first."""
    nan = row(kernel="nan", baseline_ratio=0.1, nonfinite=1)
    rows = [
        row(kernel="far", baseline_ratio=0.9),
        nan,
        row(kernel="near", baseline_ratio=0.4),
    ]
    assert [k.kernel for k in summarise(rows).kernels] == ["near", "far", "nan"]


def test_of_sampled_rows_the_worst_heads_interval_and_the_largest_sample() -> None:
    """Not the interval of the head that is nearest, nor the smallest sample."""
    heads = ((1.0, (0.9, 1.1), 50), (2.0, (1.8, 2.2), 64), (1.5, (1.4, 1.6), 40))
    rows = [
        row(h, sampled=True, expected_ratio=x, interval={"expected_ratio": ends},
            rows_measured=count, suspects=h)
        for h, (x, ends, count) in enumerate(heads)
    ]  # fmt: skip
    k = of(summarise(rows), "sdpa-flash")
    assert (k.expected_ratio_interval, k.rows_measured, k.suspects) == ((1.8, 2.2), 64, 2)
    assert (k.expected_ratio, k.expected_ratio_worst) == (1.5, 2.0)


def test_shares_multiples_and_shades_are_written_by_their_size() -> None:
    """Both sides of each edge; signs; and a number beside its limit has the digits that
    tell them apart."""
    assert [percent(x) for x in (0.031, -0.42, -4.2, 4.2, 0.996, None)] == [
        "3.1 %", "-42 %", "-420 %", "420 %", "100 %", "–"
    ]  # fmt: skip
    assert [percent(x, sign=True) for x in (0.42, -0.42)] == ["+42 %", "-42 %"]
    assert [short(x) for x in (1.254, 9.994, 9.996, 12.54, 99.94, 99.96, 125.0, 1e4)] == [
        "1.25", "9.99", "10.0", "12.5", "99.9", "100", "125", "1e4"
    ]  # fmt: skip
    assert [shade(x) for x in (1.24, 1.25, 1.99, 2.0, 3.9, 4.0, 15.9, 16.0, None)] == [
        0, 1, 1, 2, 2, 3, 3, 4, None
    ]  # fmt: skip
    assert [three(x, 1.1) for x in (1.1004, 1.1, 1.2004)] == ["1.1004", "1.1", "1.20"]


def test_a_curve_is_of_medians() -> None:
    """Of what there is at each place; a place without a number is none."""
    (curve,) = doc.curve(
        "k", "kernel", {(1, "a"): [1.0, 2.0, 9.0], (2, "b"): [], (3, "c"): [4.0]}
    )
    assert [(p.x, p.label, p.mean) for p in curve.points] == [
        (1, "a", 2.0),
        (3, "c", 4.0),
    ]


def test_lines_of_verdicts_begin_with_what_is_wrong() -> None:
    """Then what is not judged, then what passed; a kernel without sizes shows the number
    nearest to its limit, one with a finding how far it is from the floor."""
    finding = Finding(rule="error", severity="exceeded", sentence="a (bfloat16) errs.", kernel="a",
                      formats=("bfloat16",), tensor="out", count=1, judged=1)  # fmt: skip
    created = [
        KernelVerdict(kernel="c", format="bfloat16", outcome="passed", rule="error",
                      observed=1.05, limit=1.1),
        KernelVerdict(kernel="b", format="bfloat16", outcome="unmeasured", rule="error",
                      reason="why"),
        KernelVerdict(kernel="d", format="bfloat16", outcome="passed", rule="bias",
                      metric="bias_size", observed=0.139, limit=0.05),
        KernelVerdict(kernel="a", format="bfloat16", outcome="exceeded", finding=0, rule="error"),
    ]  # fmt: skip
    heads = [row(h, kernel="a", floor_ratio=1.5 + h, baseline_ratio=0.4) for h in (0, 1)]
    summary = summarise(heads)
    result = SimpleNamespace(
        summary=summary, verdicts=created, findings=(finding,), rows=()
    )
    assert [
        " ".join(f"{item.lead}{item.text} {item.detail}".split())
        for item in verdicts(result)
    ] == [
        "FAIL a bfloat16 errs. Error of its output: median 2.00× floor, 0.40× eager; "
        "worst 2.50× floor, layer 0 head 1.",
        "NOT JUDGED b bfloat16 why",
        "PASS c bfloat16 closest to its limit: rule `error`, 1.05 (limit 1.1)",
        "PASS d bfloat16 closest to its limit: rule `bias`, 0.139 (limit 0.05, beyond it "
        "but not certain)",
    ]


def test_a_finding_in_two_formats_is_one_line() -> None:
    """With both formats before it, and how far off the output is in each; a finding of
    one format alone keeps its line."""
    of: Any = {
        "rule": "function",
        "severity": "exceeded",
        "kernel": "a",
        "count": 1,
        "judged": 2,
    }
    both = Finding(
        sentence="a (bfloat16, float16) errs.", formats=("bfloat16", "float16"), **of
    )
    alone = Finding(sentence="a (float32) errs.", formats=("float32",), **of)
    created = [
        KernelVerdict(
            kernel="a", format=fmt, outcome="exceeded", finding=at, rule="function"
        )
        for fmt, at in (("bfloat16", 0), ("float16", 0), ("float32", 1))
    ]
    sizes = (("bfloat16", 1.5), ("float16", 3.0), ("float32", 2.0))
    summary = summarise(
        [row(kernel="a", format=fmt, floor_ratio=size) for fmt, size in sizes]
    )
    result = SimpleNamespace(
        summary=summary, verdicts=created, findings=(both, alone), rows=()
    )
    assert [
        " ".join(f"{item.lead}{item.text} {item.detail}".split())
        for item in verdicts(result)
    ] == [
        "FAIL a bfloat16, float16 errs. Error of its output: 1.50× floor, 0.50× "
        "eager (bfloat16); 3.00× floor, 0.50× eager (float16).",
        "FAIL a float32 errs. Error of its output: 2.00× floor, 0.50× eager.",
    ]
