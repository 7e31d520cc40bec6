"""Verdicts, summaries and costs of log-probabilities from rows alone: tables that a person
can check."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from numdev.gate.judging import judge_report, judged
from numdev.gate.rules import default_rules
from numdev.report import Outcome
from numdev.report.io import read
from numdev.studies.logprobs.causes import KINDS, Observed, decide, forced, shifted
from numdev.studies.logprobs.records import RecordedSequence
from numdev.studies.logprobs.report import (
    PAIR,
    CauseRow,
    Cost,
    LogprobsReport,
    PairRow,
    SequenceEstimate,
    SideRow,
)
from numdev.studies.logprobs.statistics import jackknife
from numdev.studies.logprobs.summary import (
    agreement_sentence,
    cost_sentence,
    named_causes,
    side_summary,
)
from numdev.studies.logprobs.training_costs import (
    HALF,
    HEAD,
    NOW,
    ROUNDINGS,
    UNDONE,
    SideErrors,
    pair_cost_rows,
    side_cost_rows,
)
from tests.support.logprob_records import joined, side

STORED = Path(__file__).parent / "data" / "reports" / "logprobs.json"


def one_side(rows: list[SideRow]) -> LogprobsReport:
    """A report of one side with these rows, judged."""
    report = read(STORED)
    assert isinstance(report, LogprobsReport)
    planned = report.plan.sides[0].model_copy(
        update={
            "name": "a", "sequences": len(rows), "causes": (), "fixes": (),
            "untested": dict.fromkeys(KINDS, "not here"),
        }
    )  # fmt: skip
    plan = report.plan.model_copy(update={"sides": (planned,), "pairs": 0})
    fields = {"plan": plan, "rows": tuple(rows), "pairs": (), "causes": (), "costs": ()}
    return judged(report.model_copy(update=fields), default_rules())


def side_row(sequence: int, square: float, **fields: float) -> SideRow:
    plain = {
        "tokens": 100, "error": -2.0, "square": square, "largest": square**0.5,
        "predicted": 0.5, "predicted_square": 1.0, "product": 0.5,
    }  # fmt: skip
    return SideRow(side="a", sequence=sequence, **plain | fields)  # type: ignore[arg-type]


def test_a_side_in_numbers() -> None:
    """Four sequences of 100 tokens with a squared error of 4 each, of which 1 is
    predicted."""
    report = one_side(
        [side_row(i, 4.0, clipped=20, predicted_clipped=10) for i in range(4)]
    )
    summary = side_summary(report, report.plan.sides[0])
    assert summary.ratio is not None
    assert summary.mean is not None
    assert summary.ratio.mean == pytest.approx(2)
    assert summary.rms == pytest.approx(0.2)
    assert summary.mean.mean == pytest.approx(-0.02)
    assert summary.expected_mean == pytest.approx(-0.005)
    assert summary.correlation == pytest.approx(0.25)
    assert (summary.clipped, summary.predicted_clipped) == (0.2, 0.1)
    assert report.outcome is Outcome.EXCEEDED
    assert report.verdicts[0].kernel == "a"
    assert "errs 2.00× what bfloat16 explains" in report.findings[0].sentence


@pytest.mark.parametrize(("square", "count", "says"), [
    (1.0, 2, ["Both are 4.00 times nearer to each other: is"]),
    (0.0, 2, ["Both are infinitely nearer to each other: is"]),
    (4.0, 2, []),  # twice as near
    (1.0, 1, []),
])  # fmt: skip
def test_sides_that_are_off_alike_may_be_of_another_model(
    square: float, count: int, says: list[str]
) -> None:
    """Both err 0.2 nats; the pair's squares are of 400 tokens."""
    report = one_side([side_row(i, 4.0) for i in range(4)])
    pair = PairRow(sequence=0, sums={"square": square, "tokens": 400.0})
    report = report.model_copy(update={"pairs": (pair,)})
    sides = [side_summary(report, report.plan.sides[0])] * count
    sentences = list(agreement_sentence(report, sides))
    assert [words.partition(": is")[0] + ": is" for words in sentences] == says


@pytest.mark.parametrize(("squares", "outcome"), [
    ([4.0, 4.1, 4.0, 3.9, 4.0, 4.1], Outcome.EXCEEDED),
    ([1.0, 1.1, 1.0, 0.9, 1.0, 1.1], Outcome.PASSED),
    ([0.5, 6.0, 2.0, 4.0, 1.0, 3.0], Outcome.NOT_JUDGED),  # 1.66, of 0.9 to 2.4
    ([400.0, 400.0], Outcome.EXCEEDED),  # without an interval, 20 times
    ([100.0, 100.0], Outcome.NOT_JUDGED),
], ids=lambda value: str(value)[:24])  # fmt: skip
def test_a_side_is_accused_where_the_end_of_its_interval_is(
    squares: list[float], outcome: Outcome
) -> None:
    """Of the 99 % interval over sequences, by Student's t; without one from ten times the
    limit on."""
    report = one_side([side_row(i, square) for i, square in enumerate(squares)])
    assert report.outcome is outcome
    noise = next(test for test in judge_report(report).tests if test.rule == "noise")
    if len(squares) >= 3:
        sums = [{"s": x, "p": 1.0} for x in squares]
        wanted = jackknife(sums, lambda s: math.sqrt(s["s"] / s["p"]), 0.99)
        assert wanted is not None
        assert noise.interval == pytest.approx((wanted.low, wanted.high))
    else:
        assert noise.interval is None


def test_nothing_is_named_on_a_side_at_its_prediction() -> None:
    """Up to 1.5 times, however much the cause takes away; what it leaves decides."""

    def row(before: float, after: float) -> CauseRow:
        return CauseRow(
            side="a", cause="stale weights", sequence=0, tokens=100, before=before,
            after=after, effect=before, product=before, noise=1.0, noise_left=1.0,
        )  # fmt: skip

    assert not decide([row(1.49**2, 0.01)]).named
    assert decide([row(1.51**2, 0.01)]).named
    assert not decide([row(9.0, 9.0)]).named
    assert decide([row(9.0, 0.8)]).named
    assert decide([row(9.0, 0.8)]).cut == pytest.approx(9 / 0.8)
    assert not decide([row(9.0, 1.0)]).named  # a tenth would be 0.9
    (cause,) = named_causes([row(9.0, 0.64)], "a")
    assert cause.left == pytest.approx(0.8)
    assert cause.share == pytest.approx(1 - 0.64 / 9)


def test_a_slope_needs_to_be_far_from_0() -> None:
    """1 within a wide interval is none: six standard errors, at least."""
    rows = [
        CauseRow(
            side="a", cause="stale weights", sequence=i, tokens=100, before=9.0,
            after=5.0, effect=5.0, product=5.0 + x, noise=1.0, noise_left=1.0,
        )
        for i, x in enumerate([-1, 1] * 4)
    ]  # fmt: skip
    assert decide(rows).named
    assert decide(rows).slope.mean == pytest.approx(1)  # type: ignore[union-attr]
    steep = [row.model_copy(update={"product": row.product + 2.0}) for row in rows]
    assert decide(steep).slope.mean == pytest.approx(1.4)  # type: ignore[union-attr]
    assert not decide(steep).named
    wide = [row.model_copy(update={"product": 5 + 3 * (row.product - 5)}) for row in rows]
    assert not decide(wide).named


def observed(values: np.ndarray, reference: np.ndarray) -> Observed:
    n = len(values)
    record = RecordedSequence(np.arange(n), values, np.ones(n, dtype=bool))
    return Observed(0, record, values, record.mask, reference, predicted=np.full(n, 0.1))


def test_a_shift_says_which_way() -> None:
    """Value i belongs to token i + 1: it is early; and the other way round."""
    rng = np.random.default_rng(0)
    exact = -np.abs(rng.normal(size=80)) * 3
    for step, words in ((-1, "one token early"), (1, "one token late")):
        seen = observed(np.roll(exact, step), exact)
        (effects,) = shifted([seen], [seen.errors])
        assert effects.dose == words
        left = seen.errors - effects.effects[0]
        assert np.nanmax(np.abs(left)) < 1e-12


def test_an_error_is_value_less_reference() -> None:
    """NaN where the token does not count; a 0 is forced where the reference is not."""
    seen = observed(np.array([-1.0, 0.0, -3.0]), np.array([-1.5, -2.0, -3.0]))
    assert seen.errors.tolist() == [0.5, 2.0, 0.0]
    (effects,) = forced([seen], [seen.errors])
    assert list(effects.counts) == [1]
    assert np.isnan(effects.effects[0]).tolist() == [False, True, False]


# Costs


def errors_of(
    name: str, records: list[RecordedSequence], values: list[float],
    left: list[float], predicted: list[float], fixed: list[float],
) -> SideErrors:  # fmt: skip
    """A side of one sequence whose exact log-probabilities are -1."""
    n = len(values)
    seen = Observed(
        0, records[0], np.array(values), np.ones(n, dtype=bool), np.full(n, -1.0),
        predicted=np.array(predicted),
    )  # fmt: skip
    predicted_with = {HALF: {0: np.array(fixed)}}
    return SideErrors(name, [seen], [0], [np.array(left)], True, predicted_with)


def test_the_ratio_of_both_by_hand() -> None:
    """The second side over the first, in [0.9, 1.3]: now 1.22, 0.74 and 1.0; with the
    causes undone half of each logarithm, of both sides; with a fix that halves the
    predicted errors (a quarter of the squares) half of that."""
    values = [-1.0, -0.7, -1.0], [-0.8, -1.0, -1.0]
    records = [
        RecordedSequence(np.arange(3), np.array(x), np.ones(3, dtype=bool))
        for x in values
    ]
    sides = [side(name, [r]) for name, r in zip("ab", records, strict=True)]
    pairs = joined(*sides).pairs
    left = [0.0, 0.15, 0.0], [0.1, 0.0, 0.0]
    noise = math.sqrt((0.15**2 + 0.1**2) / 2 / 3)  # of each token: as much as is left
    a, b = (
        errors_of(name, [pair], of_side, others, [noise] * 3, [noise / 2] * 3)
        for name, pair, of_side, others in zip(
            "ab", (pairs[0].a, pairs[0].b), values, left, strict=True
        )
    )
    rows = {row.fix: row for row in pair_cost_rows(pairs, a, b, (0.9, 1.3))}
    assert set(rows) == {NOW, UNDONE, ROUNDINGS, HALF}
    assert {fix: row.clipped for fix, row in rows.items()} == {
        NOW: 1, UNDONE: 1, ROUNDINGS: 1, HALF: 0,
    }  # fmt: skip
    assert rows[NOW].square == pytest.approx(0.2**2 + 0.3**2)
    assert rows[UNDONE].square == pytest.approx(0.1**2 + 0.15**2)
    assert rows[ROUNDINGS].square == pytest.approx(rows[UNDONE].square)
    assert rows[HALF].square == pytest.approx(rows[UNDONE].square / 4)
    assert all(row.tokens == 3 and row.side == PAIR for row in rows.values())
    of_a = {row.fix: row for row in side_cost_rows(a, (0.9, 1.3))}
    assert of_a[UNDONE].square == pytest.approx(0.15**2)
    assert of_a[HALF].square == pytest.approx(3 * (noise / 2) ** 2)


def test_the_sentence_of_costs() -> None:
    """Each fix with its own share; one that overflows is left out; nothing where no ratio
    is outside."""

    def cost(fix: str, share: float, lost: int = 0) -> Cost:
        return Cost(
            side=PAIR, fix=fix, tokens=100, lost=lost, share=SequenceEstimate(mean=share)
        )

    costs = [cost(NOW, 0.08), cost(ROUNDINGS, 0.07), cost(HEAD, 0.015), cost(HALF, 0.0)]
    assert list(cost_sentence(costs, (0.8, 1.2))) == [
        "8 % of the ratios lie outside [0.8, 1.2]; predicted: by roundings alone 7 %, "
        "with a head in float32 1.5 %, in float16 0 %."
    ]
    lossy = [cost(NOW, 0.08), cost(HALF, 0.0, lost=2)]
    (sentence,) = cost_sentence(lossy, (0.8, 1.2))
    assert sentence == "8 % of the ratios lie outside [0.8, 1.2]."
    assert list(cost_sentence([cost(NOW, 0.0)], (0.8, 1.2))) == []
