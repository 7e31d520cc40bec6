"""Which heads of a diagnosis are ranked where, which conditions they meet, what is said
of them and how it is shown: of records alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_html import sample
from test_shown import on_terminal

from numdev.report import read
from numdev.studies.diagnose import head_ranking
from numdev.studies.diagnose.head_ranking import (
    answer_sentences,
    is_at_fault,
    rank_heads,
    shares_left,
)
from numdev.studies.diagnose.report import (
    CureRow,
    DiagnoseReport,
    DiagnoseSummary,
    HeadRow,
)


def guilty(
    layer: int = 3, head: int = 5, *, moved: Any = 0.031, **changes: Any
) -> HeadRow:
    """A head that meets every condition."""
    created: dict[str, Any] = {
        "checkpoint": "run-step100", "step": 100, "case": f"layers.{layer}#0", "layer": layer,
        "head": head, "rows": 2040, "tied": 0.42, "ones": 0.42, "powers": 0.81, "one_signed": 0.9,
        "pv_bias": 0.11, "pv_t": -11.0, "out_bias": 0.09, "out_t": 12.0, "ds_row_sum": 0.004,
        "delta_mean": -0.004, "delta_t": -14.0, "delta_run": 12.0, "moved": moved,
        "similarity": 0.55,
        "dw_q_error": None if moved is None else 1.2 * moved,
        "dw_q_norm": None if moved is None else 2.0, "spectral_norm": 31.0, "spectral_ratio": 2.6,
    }  # fmt: skip
    return HeadRow(**{**created, **changes})


def innocent(
    layer: int = 0, head: int = 0, *, moved: Any = 3e-4, **changes: Any
) -> HeadRow:
    """A head that meets no condition, but rounds as usual."""
    created: dict[str, Any] = {
        "tied": 0.0, "ones": 0.0, "powers": 0.06, "one_signed": None,
        "pv_bias": 0.001, "pv_t": 0.3, "out_bias": -0.002, "out_t": -0.7,
        "delta_mean": 2e-5, "delta_t": 0.6, "delta_run": 1.2,
        "similarity": 0.04, "dw_q_error": moved, "spectral_ratio": 1.0,
    }  # fmt: skip
    return guilty(layer, head, moved=moved, **{**created, **changes})


def cured(name: str, row: HeadRow, left: float, **changes: Any) -> CureRow:
    """A cure that leaves this share of the head's trouble."""
    created: dict[str, Any] = {
        "delta_mean": (row.delta_mean or 0.0) * left, "delta_t": row.delta_t,
        "dw_q_error": None if row.dw_q_error is None else row.dw_q_error * left,
    }  # fmt: skip
    return CureRow(**row.place, cure=name, **{**created, **changes})


NO_DELTA: dict[str, Any] = dict.fromkeys(("delta_mean", "delta_t", "delta_run"))
BEYOND = {"out_bias": 1.0, "out_t": 3.9}


@pytest.mark.parametrize(
    ("name", "beyond", "below"),
    [
        (head_ranking.TIES, {"tied": 0.05, "ones": None}, {"tied": 0.049, "ones": None}),
        (head_ranking.TIES, {"tied": 0.0, "ones": 0.05}, {"tied": 0.0, "ones": 0.049}),
        (head_ranking.EXACT, {"powers": 0.5}, {"powers": 0.49}),
        (head_ranking.SIGN, {"one_signed": 0.75}, {"one_signed": 0.74}),
        (head_ranking.OUTPUT, {"pv_bias": -0.0125, "pv_t": -4.0, **BEYOND},
         {"pv_bias": 0.012, "pv_t": 9.0, **BEYOND}),
        (head_ranking.DELTA, {"delta_t": 4.0, "delta_run": 4.0}, {"delta_t": 3.9}),
        (head_ranking.DELTA, {"delta_t": None, "delta_run": 4.0}, {"delta_run": 3.9}),
        (head_ranking.ALIKE, {"similarity": 0.1}, {"similarity": 0.09}),
        (head_ranking.NORM, {"spectral_ratio": 1.5}, {"spectral_ratio": 1.49}),
        (head_ranking.WRONG, {"moved": 2.0**-8}, {"moved": 0.0039}),
    ],
)  # fmt: skip
def test_limits(name: str, beyond: dict[str, Any], below: dict[str, Any]) -> None:
    """A condition is met from its limit on, and just below it is missing."""
    assert name in rank_heads([guilty(**beyond)], ())[0].conditions
    assert name in rank_heads([guilty(**below)], ())[0].missing


def test_a_running_sum_as_far_as_the_limit_is_rare() -> None:
    """RUN's reason: the largest |running sum| of a random walk over sqrt(rows) passes x
    with a probability of at most 4 (1 - Phi(x)) (reflection), which at 4 is one in
    7,900."""
    assert 1 / (2 * math.erfc(head_ranking.RUN / math.sqrt(2))) == pytest.approx(
        7893, rel=0.01
    )
    assert 1 / math.erfc(head_ranking.T / math.sqrt(2)) == pytest.approx(15787, rel=0.01)


def test_a_head_is_held_against_its_whole_layer() -> None:
    """|dW_Q error| over the root of the layer's squares, of one call and one checkpoint:
    a head of hardly any gradient comes last, however large its error is beside it."""
    result = rank_heads([
        innocent(1, 0, dw_q_error=5.0, dw_q_norm=0.003),
        innocent(1, 1, dw_q_error=0.01, dw_q_norm=3.0),
        innocent(1, 2, dw_q_error=0.02, dw_q_norm=4.0),
        innocent(2, 0, dw_q_error=0.015, dw_q_norm=1e-6),
        innocent(1, 2, dw_q_error=0.5, dw_q_norm=4.0, checkpoint="before"),
    ], ())  # fmt: skip
    places = [
        ("before", 1, 2),
        *(("run-step100", *p) for p in ((1, 2), (2, 0), (1, 1), (1, 0))),
    ]
    assert [(r.checkpoint, r.layer, r.head) for r in result] == places
    size = math.sqrt(9.0 + 16.0 + 9e-6)
    expected = [0.5, 0.08 / size, 0.015, 0.03 / size, 0.015 / size]
    assert [r.score for r in result] == pytest.approx(expected, rel=1e-12)
    assert [r.rank for r in result] == [1, 2, 3, 4, 5]


def test_without_w_q_the_mean_error_of_delta_decides() -> None:
    """Such heads come after those whose W_Q is known; a head without delta comes last, at
    0."""
    rows = [
        guilty(0, 0, moved=None, **NO_DELTA),
        guilty(0, 1, moved=None),
        guilty(0, 2, moved=None, delta_mean=-0.02),
        innocent(0, 3),
    ]
    result = rank_heads(rows, ())
    assert [(r.head, r.score) for r in result] == [
        (3, 3e-4),
        (2, 0.02),
        (1, 0.004),
        (0, 0.0),
    ]
    assert head_ranking.WRONG not in (*result[2].conditions, *result[2].missing)
    assert is_at_fault(result[2])


def test_cures_that_take_more_than_half_are_named_best_first() -> None:
    """Half is not enough, another head's cure is none, and one that gives NaN is none."""
    head, other = guilty(3, 5), guilty(3, 6)
    left = {"none": 1.0, "good": 0.3, "better": 0.1, "half": 0.5, "worse": 2.0}
    rows = [cured(name, head, share) for name, share in left.items()]
    rows += [cured("broken", head, 0.0, nonfinite=3), cured("elsewhere", other, 0.0)]
    result = rank_heads([head, other], rows)
    assert {(r.head, r.cured_by) for r in result} == {(5, ("better", "good")), (6, ())}


def test_a_mean_error_that_chance_makes_is_not_cured() -> None:
    """Only where delta's error had one sign does less of it count; dW_Q's counts
    always."""
    for head, least in ((innocent(), 1.0), (guilty(), pytest.approx(0.1))):
        without = cured("none", head, 1.0)
        cure = cured("c", head, 0.1, dw_q_error=head.dw_q_error)
        assert min(shares_left(cure, without).values()) == least
    assert (
        shares_left(
            cured("c", innocent(), 0.1, dw_q_error=None), cured("none", innocent(), 1)
        )
        == {}
    )


def answer(rows: list[HeadRow], cures: list[CureRow] | None = None) -> str:
    return "\n".join(answer_sentences(rank_heads(rows, cures or ()), rows, cures or ()))


NULL = innocent(1, 0, **NO_DELTA, nulls={"delta_mean": "no query sees more than one key"})
LOUD = innocent(1, 0, moved=0.01, dw_q_error=40.0, dw_q_norm=1.0, ds_row_sum=0.98)
STILL = dict.fromkeys(("pv_bias", "pv_t", "out_bias", "out_t"), 0.0)
PEAKED = {"tied": 0.0, "ones": 0.0}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([innocent(), guilty(3, 5), guilty(3, 7, moved=0.01)],
         ("L3H5 is at fault: rounding shifts its delta by -0.4 % (t = -14), and so its dW_Q by "
          "3.1 %.", "of what delta is summed from. Rank 1 of 3.",
          "2 of 3 heads at fault: L3H5's rounding errors have one sign, and move its dW_Q by 3.1 %.",
          "It begins in forward: tied maxima, weights at powers of two, V of one sign, ",
          "; missing conditions: none; rows of dS sum to 0.4 % of their size.")),
        ([innocent(0, 0, moved=0.2), guilty(3, 5)], ("L3H5 is", "Rank 2 of 2.")),
        ([guilty(moved=None)], ("and so its dW_Q by –.",)),
        ([guilty(layer=3).model_copy(update={"layer": None, "module": "", "case": "a"})],
         ("a H5 is at fault: rounding",)),
        ([guilty(**PEAKED, powers=0.1, one_signed=None)],
         ("Not the published cause: ", ("missing conditions: tied maxima, weights at powers of "))),
        ([innocent(0, 1), innocent(2, 3, moved=1e-3)],
         ("Nothing wrong: no head of 2 is at fault; delta's error has one sign in 0 of them.",
          "Largest |t|: 0.6 (L2H3). Delta's error moves a dW_Q by at most 0.1 % (L2H3, mean "
          "error +2.0e-3 %).")),
        ([guilty(1, 1, moved=1e-4), innocent(moved=0.2)],
         ("has one sign in 1 of them.", "Largest |t|: 14 (L1H1). ", ("0.01 % (L1H1, mean error -"))),
        ([NULL], (("NOT JUDGED: 1 of 1 heads, whose sign of delta's error is not known: no query sees more than one key."),)),
        ([LOUD, innocent(1, 1, dw_q_error=0.01, dw_q_norm=1.0)],
         ("1 of 2 heads lose half a gradient to rounding: L1H0 changes its layer's dW_Q by 2.8e3 %.",
          "The errors have no consistent sign (t = 0.6); rows of dS sum to 98 % of their size, not to 0.",)),
    ],
    ids=["found", "ranked 2", "no W_Q", "no layer", "backward", "nothing", "no harm", "not known",
         "drowned"],
)  # fmt: skip
def test_the_answer(rows: list[HeadRow], words: tuple[str, ...]) -> None:
    """The first head at fault, whether it begins in forward; else how far the largest
    goes. What is not known is not called harmless."""
    result = answer(rows)
    for part in words:
        assert part in result


def test_a_peaked_head_begins_in_forward_only_with_a_biased_output() -> None:
    """P is 1 wherever a row attends to one key: without ties that alone is no cause."""
    assert "It begins in forward" in answer([guilty(**PEAKED)])
    assert "It begins in forward" not in answer([guilty(**PEAKED, **STILL)])


def test_the_cure_that_helps_most() -> None:
    """With what it leaves, what becomes of dW_Q, which others help, and which give
    NaN."""
    head = guilty()
    left = {"none": 1.0, "delta from dP": 0.02, "O": 0.3, "weak": 0.7}
    rows = [cured(name, head, share) for name, share in left.items()]
    broken = cured("shifted", head, 0.0, nonfinite=4)
    assert answer([head], [*rows, broken]).endswith(
        "Best cure on the same inputs: delta from dP leaves 2 % of dW_Q's error; "
        "dW_Q is then "
        "off by 0.074 %, without it by 3.7 %. Below half too: O. NaN or infinity: "
        "shifted."
    )
    assert "takes half of it away" in answer([head], [rows[0], rows[3]])
    drawn = answer(
        [head], [rows[0], cured("drawn", head, 2.0, delta_mean=0.0, dw_q_error=0.1)]
    )
    assert "leaves 0 % of delta's mean error; dW_Q is then off by 10 %," in drawn


def report(*rows: HeadRow) -> DiagnoseReport:
    ranking = rank_heads(rows, ())
    summary = DiagnoseSummary(answer=answer_sentences(ranking, rows, ()), ranking=ranking)
    return read(sample("diagnose")).model_copy(update={"heads": rows, "summary": summary})


def test_a_report_without_anything() -> None:
    """It can be shown, and says that nothing was measured."""
    result = report()
    assert not result.measured
    assert "Nothing was diagnosed" in on_terminal(result, 100)
    assert report(NULL).unmeasured.endswith(
        "could be measured: no query sees more than one key"
    )


def test_conditions_that_could_not_be_judged_are_not_counted() -> None:
    """`meets` is of those that are known."""
    result = report(guilty(moved=None, similarity=None, spectral_ratio=None))
    assert "5 of 5" in on_terminal(result, 200)
