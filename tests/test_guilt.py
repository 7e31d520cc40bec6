"""Which heads are ranked where, and which conditions they are said to meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
from diagnosed_rows import cured, guilty, innocent

from numdev.diagnose import guilt
from numdev.diagnose.guilt import at_fault, evidence, percent, ranked, remaining, signed_percent
from numdev.diagnose.report import Bias, DeltaError, HeadRow


def delta(**changes: Any) -> tuple[DeltaError, ...]:
    made = {"formula": "dO*O", "mean": -0.004, "rms": 0.005, "t": -14.0, "run": 12.0, "dw_q": 0.03}
    return (DeltaError(**{**made, **changes}),)


def test_a_head_that_does_what_the_chain_says_meets_every_condition() -> None:
    """All of them, in the order of the chain, and lacks none."""
    (found,) = ranked([guilty()], ())
    assert found.conditions == guilt.CONDITIONS
    assert found.missing == ()
    assert found.score == pytest.approx(1.2 * 0.031)
    assert at_fault(found.conditions, found.missing)


def test_a_head_that_rounds_without_harm_meets_none() -> None:
    """What could not be measured (V at ties, without ties) is neither met nor missing."""
    (found,) = ranked([innocent()], ())
    assert found.conditions == ()
    assert found.missing == tuple(name for name in guilt.CONDITIONS if name != guilt.SIGN)
    assert not at_fault(found.conditions, found.missing)


@pytest.mark.parametrize(
    ("name", "beyond", "below"),
    [
        (guilt.TIES, {"tied": 0.05, "ones": None}, {"tied": 0.049, "ones": None}),
        (guilt.TIES, {"tied": 0.0, "ones": 0.05}, {"tied": 0.0, "ones": 0.049}),
        (guilt.EXACT, {"powers": 0.5}, {"powers": 0.49}),
        (guilt.SIGN, {"one_signed": 0.75}, {"one_signed": 0.74}),
        (
            guilt.OUTPUT,
            {"pv": Bias(outward=-0.0125, t=-4.0), "out": Bias(outward=1.0, t=3.9)},
            {"pv": Bias(outward=0.012, t=9.0), "out": Bias(outward=1.0, t=3.9)},
        ),
        (guilt.DELTA, {"delta": delta(t=4.0, run=4.0)}, {"delta": delta(t=3.9)}),
        (guilt.DELTA, {"delta": delta(t=None, run=4.0)}, {"delta": delta(run=3.9)}),
        (guilt.ALIKE, {"similarity": 0.1}, {"similarity": 0.09}),
        (guilt.NORM, {"spectral_ratio": 1.5}, {"spectral_ratio": 1.49}),
        (
            guilt.WRONG,
            {"dw_q_unbalanced": 2.0**-8, "delta": delta(dw_q=0.0)},
            {"dw_q_unbalanced": 0.0039, "delta": delta(dw_q=1.0)},
        ),
        (
            guilt.WRONG,
            {"dw_q_unbalanced": None, "delta": delta(dw_q=2.0**-8)},
            {"dw_q_unbalanced": None, "delta": delta(dw_q=0.0039)},
        ),
    ],
)
def test_limits(name: str, beyond: dict[str, Any], below: dict[str, Any]) -> None:
    """A condition is met from its limit on, and just below it is missing."""
    (found,) = ranked([guilty(**beyond)], ())
    assert name in found.conditions
    (found,) = ranked([guilty(**below)], ())
    assert name in found.missing


def test_heads_are_ranked_by_how_far_they_move_dw_q() -> None:
    """Largest first, whatever conditions they meet."""
    heads = [innocent(0, 0), guilty(1, 1, moved=0.01), innocent(2, 2, moved=0.05), guilty(3, 5)]
    found = ranked(heads, ())
    assert [(r.layer, r.head) for r in found] == [(2, 2), (3, 5), (1, 1), (0, 0)]
    assert [r.rank for r in found] == [1, 2, 3, 4]


def test_a_head_is_held_against_its_whole_layer() -> None:
    """|dW_Q error| over the root of the layer's squares, of one call and one checkpoint: a head of
    hardly any gradient comes last, however large its error is beside it."""
    tiny = innocent(1, 0, dw_q_error=5.0, dw_q_norm=0.003)
    small = innocent(1, 1, dw_q_error=0.01, dw_q_norm=3.0)
    large = innocent(1, 2, dw_q_error=0.02, dw_q_norm=4.0)
    alone = innocent(2, 0, dw_q_error=0.015, dw_q_norm=1e-6)
    before = innocent(1, 2, dw_q_error=0.5, dw_q_norm=4.0, checkpoint="run-step50")
    found = ranked([tiny, small, large, alone, before], ())
    assert [(r.checkpoint, r.layer, r.head) for r in found] == [
        ("run-step50", 1, 2),
        ("run-step100", 1, 2),
        ("run-step100", 2, 0),
        ("run-step100", 1, 1),
        ("run-step100", 1, 0),
    ]
    size = math.sqrt(9.0 + 16.0 + 9e-6)
    expected = [0.5, 0.08 / size, 0.015, 0.03 / size, 0.015 / size]
    assert [r.score for r in found] == pytest.approx(expected, rel=1e-12)


def test_equals_are_in_the_order_of_layer_and_head() -> None:
    """However the rows came; layer 10 after layer 9."""
    places = [(10, 0), (9, 1), (0, 2), (9, 0), (0, 3), (10, 1)]
    for order in (places, places[::-1]):
        found = ranked([innocent(layer, head) for layer, head in order], ())
        assert [(r.layer, r.head) for r in found] == sorted(places)


def test_without_w_q_the_mean_error_of_delta_decides() -> None:
    """Such heads come after those whose W_Q is known; a head without delta comes last, at 0."""
    heads = [
        guilty(0, 0, delta=()),
        guilty(0, 1, moved=None),
        guilty(0, 2, delta=delta(dw_q=None, mean=-0.02)),
        innocent(0, 3),
    ]
    unknown = {"dw_q_error": None, "dw_q_unbalanced": None, "dw_q_norm": None}
    heads = [*(head.model_copy(update=unknown) for head in heads[:3]), heads[3]]
    found = ranked(heads, ())
    assert [r.head for r in found] == [3, 2, 1, 0]
    assert [r.score for r in found] == [3e-4, 0.02, 0.004, 0.0]
    assert guilt.WRONG not in (*found[2].conditions, *found[2].missing)
    assert at_fault(found[2].conditions, found[2].missing)


def test_cures_that_take_more_than_half_are_named_best_first() -> None:
    """Half is not enough, another head's cure is none, and one that gives NaN is none."""
    head, other = guilty(3, 5), guilty(3, 6)
    rows = [
        cured("none", head, 1.0),
        cured("good", head, 0.3),
        cured("better", head, 0.1),
        cured("half", head, 0.5),
        cured("worse", head, 2.0),
        cured("broken", head, 0.0, nonfinite=3),
        cured("elsewhere", other, 0.0),
    ]
    found = ranked([head, other], rows)
    assert {(r.head, r.cured_by) for r in found} == {(5, ("better", "good")), (6, ())}


def test_a_mean_error_that_chance_makes_is_not_cured() -> None:
    """Only where delta's error had one sign does less of it count; dW_Q's counts always."""
    head = innocent()
    without = cured("none", head, 1.0)
    assert remaining(cured("c", head, 0.1, dw_q_error=head.dw_q_error), without) == 1.0
    assert remaining(cured("c", head, 0.1, dw_q_error=None), without) is None
    assert remaining(cured("c", head, 0.1), without) == pytest.approx(0.1)
    shifted = guilty()
    less = cured("c", shifted, 0.1, dw_q_error=shifted.dw_q_error)
    assert remaining(less, cured("none", shifted, 1.0)) == pytest.approx(0.1)


def test_evidence_names_what_was_measured() -> None:
    """Every link with its number; nothing about what is null."""
    said = evidence(guilty())
    for words in ("42 % of rows (2.3 keys each)", "90 % of features", "0.090 ulp away from zero"):
        assert words.replace("0.090", "0.09") in said
    assert (
        "delta is off by −0.40 % (t = −14), running sum 12 (random signs: near 1), which moves "
        "dW_Q by 3.1 %"
    ) in said
    assert "(all roundings: 3.7 %); 55 % of the terms" in said
    assert "moves dW_Q" not in evidence(guilty(moved=None))
    bare = HeadRow(
        checkpoint="c", case="a#0", head=0, rows=0, pv=Bias(), out=Bias(), nulls={"tied": "why"}
    )
    assert evidence(bare) == "Nothing could be measured."


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.031, "3.1 %"), (0.42, "42 %"), (0.0995, "10 %"), (3e-4, "0.030 %"), (0.0, "0 %"),
     (2e-7, "2e−5 %"), (1.7, "170 %"), (3.43e39, "3e41 %")],
)  # fmt: skip
def test_shares_in_words(value: float, said: str) -> None:
    """Two digits, powers of ten where there would be many zeros."""
    assert percent(value) == said
    assert signed_percent(-value or 0.0).lstrip("−") == said


def test_a_running_sum_as_far_as_the_limit_is_rare() -> None:
    """RUN's reason: the largest |running sum| of a random walk over sqrt(rows) passes x with a
    probability of at most 4 (1 - Phi(x)) (reflection), which at 4 is one in 7,900."""
    assert 1 / (2 * math.erfc(guilt.RUN / math.sqrt(2))) == pytest.approx(7893, rel=0.01)
    assert 1 / math.erfc(guilt.T / math.sqrt(2)) == pytest.approx(15787, rel=0.01)
