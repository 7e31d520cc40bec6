"""`numdev logprobs`: which of two programs is off, and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from numdev.errors import MeasurementError, UsageError
from numdev.gate.judging import judge_report
from numdev.report import Outcome
from numdev.request_models import logprobs_request
from numdev.studies.logprobs.causes import decide, share_on_grid
from numdev.studies.logprobs.records import RecordedSequence, RecordedSettings
from numdev.studies.logprobs.report import CauseRow, LogprobsReport, PairRow, PlannedSide
from numdev.studies.logprobs.side_settings import recipe_of, settings_remarks
from numdev.studies.logprobs.statistics import dashboard, jackknife, pair_sums
from numdev.studies.logprobs.study import logprobs
from numdev.studies.logprobs.truth import ExactModel, Support, exact_values
from tests.support.logprob_records import changed, drawn_tokens, joined, recorded, side

COUNT, LENGTH = 6, 48
Change = Callable[[RecordedSequence], RecordedSequence]


@cache
def sound() -> tuple[list[RecordedSequence], list[RecordedSequence]]:
    """What transformers records of the demo model in bfloat16, with SDPA and eager; the
    tokens are the model's own, with four alternatives."""
    model = ExactModel("demo", device="cpu")
    tokens = drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH)
    both = []
    for attention in ("sdpa", "eager"):
        used = model.source.load(torch.bfloat16)
        used.set_attn_implementation(attention)
        both.append([recorded(used, ids, top=4) for ids in tokens])
    return both[0], both[1]


def run(
    rollout: list[RecordedSequence], trainer: list[RecordedSequence] | None = None,
    **flags: object,
) -> LogprobsReport:  # fmt: skip
    flags = {"model": "demo", "device": "cpu", **flags}
    request = logprobs_request(["both.jsonl"], flags)
    sides = [side("rollout", rollout)]
    if trainer is not None:
        sides.append(side("trainer", trainer))
    pairs = joined(*sides) if trainer is not None else None
    report = logprobs(request, sides, pairs)
    assert judge_report(report).outcome == report.outcome
    return report


def planted(change: Change, **flags: object) -> LogprobsReport:
    rollout, trainer = sound()
    return run([change(s) for s in rollout], trainer, **flags)


def verdicts(report: LogprobsReport) -> dict[str, Outcome]:
    return {verdict.kernel: verdict.outcome for verdict in report.verdicts}


def named(report: LogprobsReport, name: str = "rollout") -> list[str]:
    side = next(s for s in report.summary.sides if s.name == name)
    return [cause.cause for cause in side.causes]


def test_two_sound_sides_pass() -> None:
    """Each is at what bfloat16 explains, and nothing is named."""
    report = planted(lambda s: s)
    assert report.outcome is Outcome.PASSED
    assert {*verdicts(report).values()} == {Outcome.PASSED}
    for summary in report.summary.sides:
        assert summary.ratio is not None
        assert 0.7 < summary.ratio.mean < 1.4
        assert summary.causes == ()
    assert report.summary.answer[0].startswith("PASS rollout: ")


CAUSES: dict[str, tuple[Change, str]] = {
    "shift": (lambda s: changed(s, lambda x: np.roll(x, 1)), "shift"),
    "base 2": (lambda s: changed(s, lambda x: x / math.log(2)), "other base"),
    "probabilities": (lambda s: changed(s, np.exp), "other base"),
    "sign": (lambda s: changed(s, lambda x: -x), "other base"),
    "forced": (
        lambda s: changed(s, lambda x: np.where(np.arange(len(x)) % 9 == 4, 0.0, x)),
        "forced tokens",
    ),
}


@pytest.mark.parametrize("name", [
    *("shift", "base 2", "forced"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("probabilities", "sign")),
])  # fmt: skip
def test_a_cause_is_named_and_undone(name: str) -> None:
    """The rollout fails with the cause, which undone leaves what bfloat16 explains; the
    trainer passes."""
    change, cause = CAUSES[name]
    report = planted(change)
    assert verdicts(report) == {
        "rollout": Outcome.EXCEEDED, "trainer": Outcome.PASSED, "pair": Outcome.PASSED,
    }  # fmt: skip
    assert named(report) == [cause]
    assert named(report, "trainer") == []
    left = report.summary.sides[0].causes[0].left
    assert left is not None
    assert left < 1.5
    assert "FAIL rollout" in report.summary.answer[0]
    assert "undoing it leaves" in report.summary.answer[1]


@pytest.mark.slow
@pytest.mark.parametrize("top", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_temperature_is_told(top: bool) -> None:
    """From the alternatives to a thousandth; from the chosen tokens alone to a
    hundredth."""
    model = ExactModel("demo", device="cpu")
    used = model.source.load(torch.bfloat16)
    _, trainer = sound()
    at = Support(temperature=0.7)
    rollout = [recorded(used, s.token_ids, at, top=4 * top) for s in trainer]
    report = run(rollout, trainer)
    assert named(report) == ["temperature"]
    dose = float(report.summary.sides[0].causes[0].dose)
    assert dose == pytest.approx(0.7, abs=0.002 if top else 0.01)
    meant = [
        replace(s, settings=RecordedSettings(dtype="bfloat16", temperature=0.7))
        for s in rollout
    ]
    assert run(meant, trainer).outcome is Outcome.PASSED


@pytest.mark.slow
def test_a_temperature_beside_what_each_record_says() -> None:
    """Records of two temperatures, of which the program has 0.8 times each: named by its
    ratio, and each record is held to its own when it is undone."""
    used = ExactModel("demo", device="cpu").source.load(torch.bfloat16)
    warm = [
        replace(
            recorded(used, s.token_ids, Support(0.8 * t)),
            settings=RecordedSettings(dtype="bfloat16", temperature=t),
        )
        for s, t in zip(sound()[1], [0.75, 1.25] * 3, strict=True)
    ]
    report = run(warm)
    (cause,) = report.summary.sides[0].causes
    dose, words = cause.dose.split(" ", 1)
    assert float(dose) == pytest.approx(0.8, abs=0.01)
    assert words == "times what its records say"
    assert cause.left is not None
    assert 0.8 < cause.left < 1.3


@pytest.mark.slow
def test_causes_stack() -> None:
    """Two causes of one side are named in the order in which undoing them takes away
    most: base 2 of values that are shifted, a temperature behind a filter."""
    report = planted(lambda s: changed(s, lambda x: np.roll(x, 1) / math.log(2)))
    assert named(report) == ["shift", "other base"]
    model, at = ExactModel("demo", device="cpu"), Support(temperature=0.7, top_p=0.9)
    tokens = drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH, support=at)
    used = model.source.load(torch.bfloat16)
    report = run([recorded(used, ids, at, top=4) for ids in tokens])
    assert {*named(report)} == {"temperature", "truncated support"}
    doses = {cause.cause: cause.dose for cause in report.summary.sides[0].causes}
    assert float(doses["temperature"]) == pytest.approx(0.7, abs=0.005)
    assert doses["truncated support"] == "top_p 0.9"


def test_weights_in_int4_are_told_and_the_truth_stays() -> None:
    """A model whose weights are quantised for a cause does not change the exact one."""
    model = ExactModel("demo", device="cpu")
    ids = sound()[0][0].token_ids
    before = model.exact_logits(ids).clone()
    after = model.exact_logits(ids, "int4")
    assert float((before - after).abs().max()) > 0.01
    again = ExactModel("demo", device="cpu").exact_logits(ids)
    model._logits.clear()
    assert torch.equal(model.exact_logits(ids), before)
    assert torch.equal(again, before)


@pytest.mark.slow
def test_a_truncated_support_is_told() -> None:
    """Values renormalised over top_p 0.8, of tokens sampled from there; under
    --top-p 0.8 they are what they are meant to be."""
    model = ExactModel("demo", device="cpu")
    at = Support(top_p=0.8)
    used = model.source.load(torch.bfloat16)
    tokens = drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH, support=at)
    rollout = [recorded(used, ids, at) for ids in tokens]
    trainer = [recorded(used, ids) for ids in tokens]
    report = run(rollout, trainer)
    assert named(report) == ["truncated support"]
    assert report.summary.sides[0].causes[0].dose == "top_p 0.8"
    assert named(report, "trainer") == []
    assert verdicts(run(rollout, top_p=0.8))["rollout"] is not Outcome.EXCEEDED


@pytest.mark.slow
def test_stale_and_quantised_weights_are_told(tmp_path: Path) -> None:
    """An earlier checkpoint by --previous; weights in int8 without being asked."""
    model = ExactModel("demo", device="cpu")
    older = model.source.load(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in older.parameters():
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
    older.save_pretrained(tmp_path / "older")
    _, trainer = sound()
    stale = ExactModel(str(tmp_path / "older"), device="cpu").source.load(torch.bfloat16)
    rollout = [recorded(stale, s.token_ids) for s in trainer]
    report = run(rollout, trainer, previous=str(tmp_path / "older"))
    assert named(report) == ["stale weights"]
    slope = report.summary.sides[0].causes[0].slope
    assert slope is not None
    assert slope.mean == pytest.approx(1, abs=0.1)
    without = run(rollout, trainer)
    assert named(without) == []
    assert verdicts(without)["rollout"] is Outcome.EXCEEDED
    assert "none of those that were looked for" in without.findings[0].details


def test_without_a_model_no_side_is_accused() -> None:
    """Two sound sides are not judged; what one is beside the other is named of both."""
    report = planted(lambda s: s, model=None)
    assert report.outcome is Outcome.NOT_JUDGED
    assert verdicts(report)["rollout"] is Outcome.NOT_JUDGED
    assert "give --model" in report.summary.answer[1]
    for change, cause in CAUSES.values():
        report = planted(change, model=None)
        assert verdicts(report)["pair"] is Outcome.EXCEEDED
        assert [c.cause for c in report.summary.pair_causes] == [cause]
        assert verdicts(report)["rollout"] is Outcome.NOT_JUDGED


@pytest.mark.slow
def test_bfloat16_that_says_float32_is_asked_about() -> None:
    """No cause is named, since another one may be as large."""
    settings = RecordedSettings(dtype="float32")
    bare = [replace(s, top_ids=None, top_logprobs=None) for s in sound()[0]]
    report = run([replace(s, settings=settings) for s in bare])
    assert report.outcome is Outcome.EXCEEDED
    (note,) = report.remarks
    assert note.endswith("does it compute in bfloat16, and not in float32?")
    assert not any("compute in" in x for x in run(bare).remarks)


def test_a_copy_and_other_tokens_are_no_pass() -> None:
    """Values that are equal bit by bit compare one program with itself; other tokens are
    the first finding."""
    rollout, _ = sound()
    report = run(rollout, rollout)
    assert report.outcome is Outcome.NOT_JUDGED
    assert "copy of the other" in str(report.verdicts[0].reason)
    sides = side("rollout", rollout), side("trainer", rollout)
    pairs = joined(*sides)
    cut = slice(4, LENGTH - 2)
    other = replace(pairs.pairs[0], at_a=cut, at_b=cut)
    request = logprobs_request(["both.jsonl"], {"model": "demo", "device": "cpu"})
    report = logprobs(request, sides, replace(pairs, pairs=(other, *pairs.pairs[1:])))
    assert verdicts(report)["pair"] is Outcome.EXCEEDED
    assert report.findings[0].sentence == (
        f"pair (bfloat16) has other tokens in 1 of {COUNT} sequences."
    )
    words = f"Other tokens on both sides in 1 of {COUNT} sequences."
    assert report.summary.answer[1] == words


def test_minus_infinity_is_no_pass() -> None:
    """A side that says that its own tokens are impossible fails, however exact its other
    values are."""
    rollout, trainer = sound()
    odd = [changed(s, lambda x: np.where(np.arange(len(x)) == 5, -np.inf, x)) for s in rollout]  # fmt: skip
    report = run(odd, trainer)
    assert verdicts(report)["rollout"] is Outcome.EXCEEDED
    assert report.findings[0].sentence == (
        f"rollout (bfloat16) says minus infinity of {COUNT} tokens that the model can say."
    )


def test_mixed_weights_and_few_tokens_are_not_judged() -> None:
    """Sequences sampled under several versions have no numbers; too few tokens or
    sequences decide nothing."""
    rollout, trainer = sound()
    mixed = [replace(s, weights_versions=("1", "2")) for s in rollout]
    report = run(mixed, trainer)
    assert verdicts(report)["rollout"] is Outcome.NOT_JUDGED
    assert "several versions" in report.rows[0].reason
    short = [replace(s, mask=np.arange(LENGTH) < 20) for s in rollout]
    assert verdicts(run(short))["rollout"] is Outcome.NOT_JUDGED
    assert verdicts(run(rollout[:2]))["rollout"] is Outcome.NOT_JUDGED


INVENTED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "appended": (
        lambda x: np.append(x[:-1], -0.001 - 0.01 * abs(x[-1])),
        "the last token of a sequence",
    ),
    "filled in": (
        lambda x: np.where(np.arange(len(x)) % 16 == 9, -9999.0, x),
        "tokens with the value -9999",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["filled in", pytest.param("appended", marks=pytest.mark.thorough)]
)
def test_values_that_nobody_computed(name: str) -> None:
    """An end that was appended with some value, and a stand-in: named, with a model and
    beside the other side; without these tokens the side is at its prediction."""
    change, dose = INVENTED[name]
    rollout, trainer = sound()
    ends = [replace(s, top_ids=None, top_logprobs=None) for s in rollout]
    if name == "appended":  # a token that was not sampled, and is far from likely
        ends = [
            replace(s, token_ids=np.append(s.token_ids[:-1], 2047 - i))
            for i, s in enumerate(ends)
        ]
        used = ExactModel("demo", device="cpu").source.load(torch.bfloat16)
        ends = trainer = [recorded(used, s.token_ids) for s in ends]
    off = [changed(s, change) for s in ends]
    report = run(off, trainer)
    (cause,) = report.summary.sides[0].causes
    assert (cause.cause, cause.dose) == ("invented values", dose)
    assert cause.left is not None
    assert cause.left < 1.3
    assert named(report, "trainer") == []
    beside = run(off, trainer, model=None)
    assert [c.cause for c in beside.summary.pair_causes] == ["invented values"]
    few = run([*off[:2], *ends[2:]], trainer)
    if name == "appended":  # two ends may be chance
        assert named(few) == []


def test_a_mean_ratio_is_the_mass_that_a_filter_keeps() -> None:
    """Of tokens that the filtered side sampled: the mean of exp(exact - filtered) is the
    mean mass that the filter keeps, exactly so token by token."""
    model, at = ExactModel("demo", device="cpu"), Support(top_p=0.8)
    tokens = drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH, support=at)
    ratios, masses = [], []
    for ids in tokens:
        record = RecordedSequence(ids, np.zeros(LENGTH), np.ones(LENGTH, dtype=bool))
        full = exact_values(model, record, Support(), [at])
        filtered = exact_values(model, record, at)
        inside = np.isfinite(filtered.logprobs)  # but for a token at the filter's edge
        assert inside.sum() >= LENGTH - 2
        ratios.append(np.exp(full.logprobs - filtered.logprobs)[inside])
        masses.append(np.exp(full.log_mass[at])[inside])
    np.testing.assert_allclose(np.concatenate(ratios), np.concatenate(masses), rtol=1e-9)
    assert 0.8 < np.concatenate(masses).mean() < 0.95


ONE = {  # what half of the records say, the other half, and what is said of it
    "versions": (
        {"weights_version": "3"},
        {"weights_version": "4"},
        "its records are of 2 versions of the weights (3, 4), and the model is of one",
    ),
    "steps": (
        {"step": 7},
        {"step": 8},
        "its records are of 2 steps of training (7, 8), and the model is of one",
    ),
    "formats": (
        {"dtype": "bf16"},
        {"dtype": "torch.float32"},
        "its records are in 2 formats (bfloat16, float32), and noise is predicted in one",
    ),
    "heads": (
        {"head": None},
        {"head": "float32"},
        "its records have heads in 2 formats (bfloat16, float32), and noise is predicted "
        "with one",
    ),
}


def with_settings(
    records: list[RecordedSequence], *says: dict[str, object]
) -> list[RecordedSequence]:
    """The records with settings, by turns."""
    return [
        replace(s, settings=replace(s.settings, **says[i % len(says)]))
        for i, s in enumerate(records)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.thorough) if x in ("steps", "heads") else x
        for x in ONE
    ],
)
def test_a_side_of_two_kinds_is_not_judged(name: str) -> None:
    """However near its values are: one model and one prediction cannot be both of what
    its records say. Nor is it accused."""
    rollout, trainer = sound()
    first, second, words = ONE[name]
    report = run(with_settings(rollout, first, second), trainer)
    assert verdicts(report)["rollout"] is Outcome.NOT_JUDGED
    assert verdicts(report)["trainer"] is Outcome.PASSED
    assert words in str(report.verdicts[0].reason)
    off = [changed(s, lambda x: x + 0.7 * np.sin(np.arange(len(x)))) for s in rollout]
    assert (
        verdicts(run(with_settings(off, first, second)))["rollout"] is Outcome.NOT_JUDGED
    )
    alike = with_settings(rollout, first)
    assert verdicts(run(alike))["rollout"] is not Outcome.NOT_JUDGED


@pytest.mark.slow
def test_what_sides_say_of_themselves_is_compared() -> None:
    """Steps of one version are one; engines are judged together, and said; so are a
    format that is not predicted, other versions of both sides, and other supports."""
    rollout, trainer = sound()
    of_steps = with_settings(rollout, {"weights_version": "3", "step": 7, "engine": "x"},
                    {"weights_version": "3", "step": 8, "engine": "y"})  # fmt: skip
    other = with_settings(
        trainer, {"weights_version": "4", "dtype": "fp8", "temperature": 1.25}
    )
    report = run(of_steps, other)
    assert verdicts(report)["rollout"] is Outcome.PASSED
    assert report.remarks[:4] == (
        "rollout: its records are of 2 engines (x, y), and judged together.",
        "trainer: roundings to 'fp8', which it says, are not predicted: it is held to "
        "bfloat16.",
        "rollout says version 3 of the weights, trainer 4: one model cannot be both.",
        "rollout is held to temperature 1, all tokens, trainer to temperature 1.25, all "
        "tokens: their ratios are not about 1 where both are exact.",
    )


def test_tokens_of_another_model_are_refused() -> None:
    """An id beyond the vocabulary names the model, and what it has."""
    beyond = [replace(s, token_ids=s.token_ids + 2048) for s in sound()[0]]
    with pytest.raises(MeasurementError, match=r"demo: expected token ids below 2,048"):
        run(beyond)
    request = logprobs_request(["a.jsonl"], {})
    with pytest.raises(UsageError, match="of one program alone"):
        logprobs(request, [side("rollout", sound()[0])])


def test_ids_beside_the_tokens_are_checked_too() -> None:
    """Alternatives and kept tokens beyond the vocabulary are refused, with the record."""
    rollout = [replace(s, place="a.jsonl line 1") for s in sound()[0]]
    every = np.arange(LENGTH + 1)
    words = "expected token ids below 2,048, got 9,999"
    for name, fields in {
        "top_ids": {"top_ids": np.full((LENGTH, 4), 9999)},
        "kept_ids": {"kept_ids": np.full(LENGTH, 9999), "kept_offsets": every},
    }.items():
        with pytest.raises(MeasurementError, match=f"a.jsonl line 1: {name}: {words}"):
            run([replace(s, **fields) for s in rollout])


NEUTRAL: dict[str, dict[str, object]] = {
    "all tokens": {"top_k": -1, "top_p": 1.0, "min_p": 0.0},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_settings_that_leave_all_tokens_as_they_are(name: str) -> None:
    """Are no filter and no temperature; a greedy one is said."""
    says = {"logprobs_mode": "processed_logprobs", **NEUTRAL[name]}
    report = run(with_settings(sound()[0], says))
    assert report.plan.sides[0].support == "temperature 1, all tokens"
    assert report.outcome is Outcome.PASSED
    greedy = "rollout: 6 of 6 records say temperature 0: they are held to temperature 1."
    assert (greedy in report.remarks) is (name == "greedy")


def test_the_numbers_of_dashboards() -> None:
    """A table that a person can check: ratios 2, 1/2 and 1, of probabilities 0.5."""
    q = np.log([0.25, 0.5, 0.5])
    p = np.log([0.5, 0.25, 0.5])
    row = PairRow(sequence=0, tokens=3, sums=pair_sums(p, q, (0.8, 1.2)))
    numbers = {s.name: s.value.mean for s in dashboard([row], (0.8, 1.2)) if s.value}
    ln2 = math.log(2)
    expected = {
        "mean |d|": 2 * ln2 / 3,
        "k1": 0,
        "k3": (2 + 0.5 - 2) / 3,
        "multiplicative error": 5 / 3,
        "mean ratio": 3.5 / 3,
        "chi-squared": 5.25 / 3 - 1,
        "effective sample size": (3.5 / 3) ** 2 / (5.25 / 3),
        "outside the clip band": 2 / 3,
        "outside ±1 %": 2 / 3,
        "mean |p - q|": 1 / 6,
        "Pearson of probabilities": -0.5,
        "chi-squared by sequence": 0,
        "outside by sequence, product": 0,
    }
    for name, value in expected.items():
        assert numbers[name] == pytest.approx(value, abs=1e-12), name


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    """Of a plain mean over sequences it is the usual one; without three sequences there
    is none, nor where it is not finite, and no number where one is not finite."""
    values = [1.0, 2.0, 4.0, 5.0]
    sums = [{"x": x, "n": 1.0} for x in values]
    estimate = jackknife(sums, lambda s: s["x"] / s["n"])
    assert estimate is not None
    half = 3.1824463 * np.std(values, ddof=1) / 2
    assert estimate.mean == 3
    assert estimate.high == pytest.approx(3 + half, abs=1e-6)
    two = jackknife(sums[:2], lambda s: s["x"] / s["n"])
    assert two is not None
    assert two.low is None
    within = jackknife(sums, lambda s: s["x"] / s["n"], within=(2.9, 3.1))
    assert within is not None
    assert (within.mean, within.low, within.high) == (3, 2.9, 3.1)
    beyond = jackknife(sums, lambda s: s["x"] / s["n"], within=(0.0, 1.0))
    assert beyond is not None
    assert (beyond.low, beyond.high) == (pytest.approx(estimate.low), 3.0)
    assert jackknife([{"x": math.inf, "n": 1.0}], lambda s: s["x"]) is None
    huge = jackknife([{"x": x} for x in (1e300, 1.0, 1.0)], lambda s: s["x"])
    assert huge is not None
    assert (huge.mean, huge.low, huge.high) == (1e300, None, None)


def cause_row(**fields: float) -> CauseRow:
    plain = {"before": 100.0, "after": 1.0, "effect": 99.0, "product": 99.0, "noise": 1.0}
    return CauseRow(side="a", cause="stale weights", sequence=0, tokens=100, **plain | fields)  # fmt: skip


def test_what_names_a_cause() -> None:
    """Tenfold; or a slope of 1, which needs an interval; nothing on a side at its
    prediction, nor what is below a quarter of its noise."""
    assert decide([cause_row()]).named
    assert not decide([cause_row(noise=50.0)]).named
    assert not decide([cause_row(after=20.0)]).named
    half = [
        cause_row(
            before=10 + i / 10, after=5.0, effect=5.0, product=5 + i / 20, noise=1.0
        )
        for i in range(8)
    ]
    assert decide(half).named
    assert not decide([row.model_copy(update={"fitted": True}) for row in half]).named
    off = [row.model_copy(update={"product": row.product / 2}) for row in half]
    assert not decide(off).named
    assert not decide([row.model_copy(update={"noise": 100.0}) for row in half]).named


def test_logits_in_16_bits_lie_on_a_grid() -> None:
    """Differences of bfloat16 logits do, those of float32's are there by chance."""
    logits = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)) * 6
    exact = logits.double()
    coarse = logits.bfloat16().double()
    shares = [share_on_grid([x.log_softmax(-1).numpy()]) for x in (exact, coarse)]
    assert shares[0] is not None
    assert shares[1] is not None
    assert shares[0] < 0.05
    assert shares[1] > 0.7
    assert share_on_grid([]) is None


@pytest.mark.parametrize(
    "says", [{"dtype": "float8_e4m3fn"}, {"dtype": "tf32"}, {"head": "float8_e5m2"}]
)
def test_a_format_that_no_model_is_built_in_is_not_predicted(
    says: dict[str, str],
) -> None:
    """PyTorch builds no model in 8 bits: what an engine says of itself is no error."""
    settings = [RecordedSettings(**says)]
    request = logprobs_request(["both.jsonl"], {"model": "demo"})
    recipe = recipe_of(settings, request)
    assert (recipe.format, recipe.head) == ("bfloat16", None)
    of_side = PlannedSide(
        name="rollout",
        file="both.jsonl",
        layout="numdev",
        sequences=1,
        format=recipe.format,
        attention=recipe.attention,
        support="temperature 1",
    )
    [remark] = settings_remarks([of_side], [settings])
    [name] = says.values()
    assert f"roundings to '{name}', which it says, are not predicted" in remark


@pytest.mark.parametrize("option", ["format", "head"])
def test_roundings_to_8_bits_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"--{option}: expected one of float64, float32"):
        run(sound()[0], **{option: "float8_e4m3fn"})
