"""What rounding costs at the clip band, and what a wider head, float16 or an undone cause
would leave: predictions beside programs that have them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from numdev.errors import UsageError
from numdev.gate.judging import judge_report
from numdev.request_models import logprobs_request
from numdev.studies.logprobs.causes import share_on_grid
from numdev.studies.logprobs.records import RecordedSequence, RecordedSettings
from numdev.studies.logprobs.report import PAIR, LogprobsReport
from numdev.studies.logprobs.study import fixed_recipes, logprobs
from numdev.studies.logprobs.training_costs import cost_row, evenly_spread
from numdev.studies.logprobs.truth import (
    ExactModel,
    ProgramRecipe,
    Support,
    exact_values,
    predicted_errors,
)
from tests.support import models
from tests.support.logprob_records import (
    drawn_tokens,
    joined,
    recorded,
    side,
    with_head_in,
)

COUNT, LENGTH = 6, 48
CHANGES = {"sliding_window": 8, "attn_logit_softcapping": 20.0, "initializer_range": 0.2}


@cache
def opened(path: str) -> tuple[ExactModel, tuple[np.ndarray, ...]]:
    """A model, and sequences that it samples."""
    model = ExactModel(path, device="cpu")
    return model, tuple(drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH))


@cache
def gemma2(folder: Path) -> str:
    return str(models.saved("gemma2", folder, **CHANGES))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    return gemma2(tmp_path_factory.mktemp("gemma2"))


def program(model: ExactModel, recipe: ProgramRecipe) -> nn.Module:
    """The model as transformers runs it by a recipe."""
    used = model.source.load(getattr(torch, recipe.format))
    used.set_attn_implementation(recipe.attention)
    if recipe.head is not None:
        with_head_in(used, getattr(torch, recipe.head))
    return used


def errors(path: str, recipe: ProgramRecipe) -> tuple[np.ndarray, np.ndarray]:
    """The errors of a program, and those predicted of it, float64 [tokens]."""
    model, tokens = opened(path)
    used, real, predicted = program(model, recipe), [], []
    for ids in tokens:
        record = recorded(used, ids)
        exact = exact_values(model, record, Support()).logprobs
        real.append((record.logprobs - exact)[1:])
        predicted.append(predicted_errors(model, record, exact, Support(), recipe)[1:])
    return np.concatenate(real), np.concatenate(predicted)


def rms(x: np.ndarray) -> float:
    return math.sqrt(np.square(x).mean())


def share(x: np.ndarray, width: float) -> float:
    return float((np.abs(np.exp(x) - 1) > width).mean())


def test_the_head_and_float16_are_predicted(gemma: str) -> None:
    """Gemma 2 in bfloat16, with a head in float32, in float16, and in float32 with a head
    in bfloat16: the rms error to a twentieth, and the share of ratios outside ±1 % to two
    tokens in a hundred, which tells each of them from the others."""
    recipes = [ProgramRecipe("bfloat16", "eager", head) for head in (None, "float32")]
    recipes += [
        ProgramRecipe("float32", "eager", "bfloat16"),
        ProgramRecipe("float16", "eager"),
    ]
    shares = []
    for recipe in recipes:
        real, predicted = errors(gemma, recipe)
        assert rms(real) == pytest.approx(rms(predicted), rel=0.05), recipe.words
        assert share(real, 0.01) == pytest.approx(share(predicted, 0.01), abs=0.02)
        shares.append(share(real, 0.01))
    assert shares == sorted(shares, reverse=True)
    assert np.diff(shares).max() < -0.04


def test_a_narrow_head_is_predicted_token_by_token() -> None:
    """Where all before a head in bfloat16 is in float32, its errors are no chance."""
    real, predicted = errors("demo", ProgramRecipe("float32", "sdpa", "bfloat16"))
    assert np.corrcoef(real, predicted)[0, 1] > 0.99
    assert rms(real) > 0.005


@cache
def sides(
    head: str | None = None, dtype: str = "bfloat16"
) -> list[list[RecordedSequence]]:
    """What two programs record of the demo model's tokens, SDPA and eager."""
    model, tokens = opened("demo")
    settings = RecordedSettings(dtype=dtype, head=head)
    return [
        [recorded(used, ids, settings=settings) for ids in tokens]
        for used in (
            program(model, ProgramRecipe(dtype, attention, head))
            for attention in ("sdpa", "eager")
        )
    ]


def report_of(
    both: list[list[RecordedSequence]], **flags: object
) -> LogprobsReport:  # fmt: skip
    band = {"clip_low": 0.98, "clip_high": 1.02}
    request = logprobs_request(["both.jsonl"], {"device": "cpu", "model": "demo", **band, **flags})  # fmt: skip
    two = [side(name, of) for name, of in zip(("rollout", "trainer"), both, strict=False)]
    pairs = joined(*two) if len(two) == 2 else None
    report = logprobs(request, two, pairs, open_model=lambda _: opened("demo")[0])
    assert judge_report(report).outcome == report.outcome
    return report


def shares(report: LogprobsReport) -> Iterator[tuple[tuple[str, str], float]]:
    for cost in report.summary.costs:
        assert cost.share is not None
        yield (cost.side, cost.fix), cost.share.mean


@pytest.mark.slow
def test_the_cost_of_each_fix_is_in_the_report() -> None:
    """What a head in float32 and float16 would leave of the ratios outside [0.98, 1.02]
    is what programs leave that have them: 6 in a hundred off at most, 2 standard errors
    of a share of 0.3 of 282 tokens."""
    report = report_of(sides())
    predicted = dict(shares(report))
    wider, half = (dict(shares(report_of(x))) for x in (sides("float32"), sides(None, "float16")))  # fmt: skip
    for name in ("rollout", "trainer", PAIR):
        now = predicted[name, "now"]
        assert predicted[name, "roundings alone"] == pytest.approx(now, abs=0.06)
        assert predicted[name, "head in float32"] == pytest.approx(wider[name, "now"], abs=0.06)  # fmt: skip
        assert predicted[name, "float16"] == pytest.approx(half[name, "now"], abs=0.02)
        assert now > 0.2
        assert predicted[name, "float16"] < 0.02
    low = f"{100 * predicted[PAIR, 'now']:.0f} % of the ratios lie outside [0.98, 1.02]"
    assert report.summary.answer[1].startswith(low)
    assert "with a head in float32" in report.summary.answer[1]
    assert (PAIR, "head in float32") not in wider
    assert report_of(sides(), clip_low=0.5, clip_high=2.0).costs[0].fix == "now"


@pytest.mark.slow
def test_a_side_is_held_to_the_head_that_it_says() -> None:
    """With a head in float32 a program errs less than bfloat16 explains: it is held to
    what it says, or to --head, and the report says so."""
    plain = [[replace_settings(s) for s in side_of] for side_of in sides("float32")]
    for report in (report_of(sides("float32")), report_of(plain, head="float32")):
        planned = report.plan.sides[0]
        assert planned.head == "float32"
        assert planned.recipe == "bfloat16 with a head in float32"
        assert "bfloat16 with a head in float32 explains" in report.summary.answer[0]
        for summary in report.summary.sides:
            assert summary.ratio is not None
            assert 0.85 < summary.ratio.mean < 1.2
    assert report_of(plain).plan.sides[0].head is None
    with pytest.raises(UsageError, match="--head: expected one of"):
        report_of(plain, head="single")


def replace_settings(s: RecordedSequence) -> RecordedSequence:
    from dataclasses import replace

    return replace(s, settings=RecordedSettings(dtype="bfloat16"))


@pytest.mark.slow
def test_undoing_a_filter_brings_the_ratios_back() -> None:
    """A rollout that is renormalised over top_p 0.8: the mean ratio of its tokens is the
    mean mass that is left, to three standard errors; undone, the share of ratios outside
    the band is that of two sound sides, whose tokens are no others."""
    model, _ = opened("demo")
    at = Support(top_p=0.8)
    tokens = drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH, support=at)
    used = program(model, ProgramRecipe("bfloat16"))
    eager = program(model, ProgramRecipe("bfloat16", "eager"))
    trainer = [recorded(eager, ids) for ids in tokens]
    report = report_of([[recorded(used, ids, at) for ids in tokens], trainer])
    costs, plain = (
        dict(shares(report)),
        dict(shares(report_of([[recorded(used, ids) for ids in tokens], trainer]))),
    )
    assert costs[PAIR, "now"] > 0.5
    assert costs[PAIR, "causes undone"] == pytest.approx(plain[PAIR, "now"], abs=0.02)
    assert costs["rollout", "causes undone"] == pytest.approx(plain["rollout", "now"], abs=0.02)  # fmt: skip
    assert ("trainer", "causes undone") not in costs
    ratios, masses = [], []
    for ids, of_trainer in zip(tokens, trainer, strict=True):
        exact = exact_values(model, recorded(used, ids, at), Support(), (at,))
        inside = np.isfinite(exact.log_mass[at])
        masses.append(np.exp(exact.log_mass[at][inside]))
        of_rollout = recorded(used, ids, at).logprobs
        ratios.append(np.exp((of_trainer.logprobs - of_rollout)[inside]))
    r, mass = np.concatenate(ratios), np.concatenate(masses)
    r, mass = r[np.isfinite(r)], mass[np.isfinite(r)]
    error = (r - mass).std() / math.sqrt(len(r))
    assert r.mean() == pytest.approx(mass.mean(), abs=max(3 * error, 0.005))
    assert mass.mean() < 0.95


def test_logits_of_a_model_lie_on_the_grid_of_their_format() -> None:
    """bfloat16 logits do to the last; those of float32, and of bfloat16 with a head in
    float32, are there by chance."""
    model, tokens = opened("demo")
    on_grid = []
    for recipe in (
        ProgramRecipe("bfloat16"), ProgramRecipe("float32"), ProgramRecipe("bfloat16", "sdpa", "float32"),
    ):  # fmt: skip
        used = program(model, recipe)
        tops = [recorded(used, ids, top=4).top_logprobs for ids in tokens[:3]]
        on_grid.append(share_on_grid([x for x in tops if x is not None]))
    bfloat16, single, wide_head = on_grid
    assert bfloat16 is not None
    assert bfloat16 > 0.95
    for other in (single, wide_head):
        assert other is not None
        assert other < 0.05


def test_costs_by_hand() -> None:
    """Ratios 0.5, 1, 2 and one without a value, of the band [0.8, 2]."""
    row = cost_row("a", "now", 3, np.log([0.5, 1.0, 2.0, np.nan]), (0.8, 2.0 + 1e-12))
    assert (row.tokens, row.lost, row.clipped) == (3, 1, 1)
    assert row.square == pytest.approx(2 * math.log(2) ** 2)
    assert evenly_spread(3, 16) == [0, 1, 2]
    assert evenly_spread(10, 5) == [0, 2, 4, 6, 8]


def test_the_fixes_of_each_recipe() -> None:
    """A head in float32 where it is not, float16 for bfloat16; nothing for float32."""
    table = [
        (ProgramRecipe("bfloat16"), {"head in float32", "float16"}),
        (ProgramRecipe("bfloat16", head="float32"), {"float16"}),
        (ProgramRecipe("float16"), {"head in float32"}),
        (ProgramRecipe("float16", head="float32"), set()),
        (ProgramRecipe("float32"), set()),
        (ProgramRecipe("float32", head="bfloat16"), {"head in float32"}),
    ]
    for recipe, expected in table:
        assert {*fixed_recipes(recipe)} == expected, recipe.words
