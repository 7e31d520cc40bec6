"""Causes of log-probabilities that differ: each planted, named and undone, and what is
like it is not named; of two sides alone, and of mistakes that the model is run with."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import numdev
from numdev.errors import UsageError
from numdev.formats import format_named
from numdev.request_models import logprobs_request
from numdev.studies.logprobs.cause_search import CauseSearch
from numdev.studies.logprobs.causes import (
    KINDS,
    PAIR_CAUSES,
    Observed,
    decide,
    on_grid,
    stored_in_16_bits,
)
from numdev.studies.logprobs.mistaken_models import (
    cached,
    linear_layers,
    quantised,
    read_adapter,
)
from numdev.studies.logprobs.pair_causes import (
    Alternatives,
    constants,
    shared_alternatives,
    sign_of,
    slope_sums,
)
from numdev.studies.logprobs.records import RecordedSequence, RecordedSettings
from numdev.studies.logprobs.report import CauseRow, LogprobsReport
from numdev.studies.logprobs.study import logprobs
from numdev.studies.logprobs.summary import named_causes
from numdev.studies.logprobs.truth import ExactModel, ExactValues, Support
from tests.support import models
from tests.support.logprob_records import (
    changed,
    drawn_tokens,
    joined,
    recorded,
    side,
    write_adapter,
)

COUNT, LENGTH, TOKENS = 6, 48, 300


@cache
def demo() -> tuple[ExactModel, tuple[np.ndarray, ...]]:
    model = ExactModel("demo", device="cpu")
    return model, tuple(drawn_tokens(model.source.load(torch.float32), COUNT, LENGTH))


def report_of(
    records: list[RecordedSequence], path: str = "demo", **flags: object
) -> LogprobsReport:
    request = logprobs_request(["a.jsonl"], {"device": "cpu", "model": path, **flags})
    opened = (lambda _: demo()[0]) if path == "demo" and "adapter" not in flags else None
    return logprobs(request, [side("rollout", records)], open_model=opened)


def named(report: LogprobsReport) -> list[tuple[str, str]]:
    return [(cause.cause, cause.dose) for cause in report.summary.sides[0].causes]


# Two sides alone


def two_sides(
    scale: float = 1.0, support: Support | None = None, noise: float = 0.003,
    seed: int = 0,
) -> list[Observed]:  # fmt: skip
    """Four sequences of TOKENS positions of a vocabulary of 12: the first side's exact
    log-probabilities, and the second's at an inverse temperature, under a filter; both
    with the four likeliest tokens of the first."""
    sequences = []
    for number in range(4):
        rng = np.random.default_rng(seed + number)
        logits = 2 * rng.normal(size=(TOKENS, 12))
        x = torch.from_numpy(logits).log_softmax(-1)
        noisy = torch.from_numpy(logits + noise * rng.normal(size=logits.shape))
        y = (scale * noisy).log_softmax(-1)
        if support is not None:
            from numdev.studies.logprobs.truth import kept_tokens

            y = y.masked_fill(~kept_tokens(y, support), -torch.inf).log_softmax(-1)
        chosen = torch.multinomial(y.exp(), 1)
        top = x.topk(4).indices
        other = (top != chosen).numpy()
        shared = []
        for values in (x, y):
            those = values.gather(1, top).numpy()
            shared.append(np.where(other & np.isfinite(those), those, np.nan))
        valid = np.isfinite(shared[0]) & np.isfinite(shared[1])
        a, b = (v.gather(1, chosen)[:, 0].numpy() for v in (x, y))
        everything = np.ones(TOKENS, dtype=bool)
        sequences.append(
            Observed(
                sequence=number,
                record=RecordedSequence(chosen[:, 0].numpy(), b, everything),
                values=b,
                counts=everything,
                reference=a,
                shared=Alternatives(*(np.where(valid, z, np.nan) for z in shared)),
            )
        )
    return sequences


def pair_causes(sequences: list[Observed]) -> list[tuple[str, str]]:
    search = CauseSearch("pair", sequences)
    for stage in (0, 1):
        search.undo_all([kind for kind in PAIR_CAUSES if kind.stage == stage])
    return [(cause.cause, cause.dose) for cause in named_causes(search.rows, "pair")]


def test_two_sides_alone_tell_a_temperature_and_a_filter() -> None:
    """From the alternatives of both: the temperature's ratio to a thousandth, and which
    side has fewer tokens. Sound sides, 20 of them, are told nothing."""
    for seed in range(20):
        assert pair_causes(two_sides(seed=10 * seed)) == []
    for scale in (0.5, 0.9, 1.1, 2.0):
        ((cause, dose),) = pair_causes(two_sides(scale))
        assert cause == "temperature"
        assert float(dose) == pytest.approx(1 / scale, rel=0.005)
    for support in (Support(top_p=0.8), Support(top_k=3)):
        sequences = two_sides(support=support)
        assert pair_causes(sequences) == [("truncated support", "fewer tokens")]
        swapped = [
            replace(
                s, values=s.reference, reference=s.values,
                record=replace(s.record, logprobs=s.reference),
                shared=Alternatives(s.shared.y, s.shared.x),  # type: ignore[union-attr]
            )
            for s in sequences
        ]  # fmt: skip
        assert pair_causes(swapped) == [("truncated support", "more tokens")]
    without = [replace(s, shared=None) for s in two_sides(2.0)]
    assert "temperature" not in dict(pair_causes(without))


def test_alternatives_that_both_sides_have() -> None:
    """By their ids, in the second side's order, without the token itself and without what
    is minus infinity on either side."""
    ids = np.array([5, 6])
    plain = RecordedSequence(ids, np.zeros(2), np.ones(2, dtype=bool))
    a = replace(
        plain,
        top_ids=np.array([[-1, -1, -1], [6, 7, 8]]),
        top_logprobs=np.array([[np.nan] * 3, [-1.0, -2.0, -3.0]]),
    )
    b = replace(
        plain,
        top_ids=np.array([[-1, -1, -1], [8, 6, 9]]),
        top_logprobs=np.array([[np.nan] * 3, [-3.5, -1.5, -0.5]]),
    )
    pair = joined(side("a", [a]), side("b", [b])).pairs[0]
    shared = shared_alternatives(pair)
    assert shared is not None
    assert np.isnan(shared.x[0]).all()
    np.testing.assert_array_equal(shared.x[1], [-3.0, np.nan, np.nan])
    np.testing.assert_array_equal(shared.y[1], [-3.5, np.nan, np.nan])
    empty = replace(
        plain, top_ids=np.empty((2, 0), np.int64), top_logprobs=np.empty((2, 0))
    )
    for x, y in ((plain, b), (empty, b), (b, empty), (empty, empty)):
        none = joined(side("a", [x]), side("b", [y])).pairs[0]
        assert shared_alternatives(none) is None


def test_slopes_and_constants_by_hand() -> None:
    """y = 2 x + 1 at one position, y = 2 x - 3 at another."""
    x = np.array([[0.0, 1.0], [2.0, 4.0], [1.0, np.nan]])
    y = np.array([[1.0, 3.0], [1.0, 5.0], [np.nan, np.nan]])
    chosen = np.array([3.0, 1.0, np.nan]), np.array([7.0, -1.0, np.nan])
    product, square, other = slope_sums(Alternatives(x, y), chosen)
    assert product / square == pytest.approx(2)
    assert square == pytest.approx(14 / 3 + 14 / 3)
    assert other == pytest.approx(4 * square)
    np.testing.assert_allclose(constants(Alternatives(x, y), 2.0), [1, -3, np.nan])
    assert sign_of([np.array([1.0, 2.0]), np.array([-0.1, np.nan])]) == 1
    assert sign_of([np.array([-1.0, 0.1])]) == -1
    assert sign_of([np.array([1.0, -0.5])]) == 0
    assert sign_of([np.array([0.0, np.nan])]) == 0


# What names a cause


def row(cause: str, **fields: float) -> CauseRow:
    plain = {"before": 9.0, "after": 6.0, "effect": 8.0, "product": 5.5, "noise": 1.0}
    return CauseRow(side="a", cause=cause, sequence=0, tokens=100, **plain | fields)  # type: ignore[arg-type]


def several(cause: str, **fields: float) -> list[CauseRow]:
    return [
        row(cause, **fields).model_copy(
            update={"product": fields.get("product", 5.5) + i / 20}
        )
        for i in range(8)
    ]


def test_a_cause_that_is_undone_in_part_is_named_by_size_and_slope() -> None:
    """A quantised cache whose size explains the error and whose slope is far from 0, if
    not 1; not one whose size does not, whose slope could be 0, or that cuts little. The
    same numbers name no weights, whose slope must be 1."""
    assert decide(several("quantised cache")).named
    assert not decide(several("quantised weights")).named
    assert not decide(several("quantised cache", before=30.0, after=20.0)).named
    assert not decide(several("quantised cache", after=8.0)).named
    wide = [r.model_copy(update={"product": 5.5 * (-1) ** i}) for i, r in enumerate(several("quantised cache"))]  # fmt: skip
    assert not decide(wide).named
    on = [r.model_copy(update={"count": 100, "after": 9.0}) for r in several("narrow head")]  # fmt: skip
    assert decide(on).named
    assert not decide([r.model_copy(update={"count": 99}) for r in on]).named


def test_a_size_is_named_where_it_explains_the_error() -> None:
    """Every token has the sign, and noise and size together come to the error, within
    1.5."""
    for cause in ("stored in 16 bits", "not repeatable", "logits in 16 bits"):
        assert KINDS[cause].is_size
        assert decide([row(cause, count=100)]).named
        assert not decide([row(cause, count=99)]).named
        assert not decide([row(cause, count=100, before=21.0)]).named
        assert not decide([row(cause, count=100, before=2.0)]).named
        assert not decide([row(cause, count=100, noise=0.0)]).named


def test_a_slope_near_1_of_alternatives_is_no_temperature() -> None:
    """However much a fit of the chosen tokens takes away."""
    fields = {"after": 0.5, "top_square": 100.0}
    near = several("temperature", top_product=100.5, **fields)
    assert not decide(near).named
    assert decide(several("temperature", top_product=110.0, **fields)).named


def test_alternatives_that_err_on_both_sides() -> None:
    """What the reference's own err lowers a slope on them: it names no temperature where
    the slope the other way round is on the other side of 1, or at it."""
    fields = {"after": 0.5, "top_square": 100.0, "top_product": 96.0}
    for other, is_named in ((90.0, True), (95.8, False), (97.0, False)):
        rows = several("temperature", top_other=other, **fields)
        assert decide(rows).named is is_named


def test_a_cut_of_all_that_roundings_do_not_explain() -> None:
    """From 2 times the prediction to 1 no error can be cut tenfold; what is above the
    prediction can. Not with one sequence, nor where one of many makes the cut."""
    fields = {"before": 4.0, "after": 1.2, "effect": 3.0, "product": 2.9}
    rows = several("temperature", noise_left=1.0, fitted=True, **fields)
    assert decide(rows).named
    assert not decide(rows[:1]).named
    assert not decide([r.model_copy(update={"after": 1.4}) for r in rows]).named
    wide = [
        r.model_copy(update={"after": 0.3, "product": 24.0 * (i == 0)})
        for i, r in enumerate(rows)
    ]
    assert not decide(wide).named


def test_a_slope_that_leaves_more_than_it_explains() -> None:
    """Names nothing: something larger moves the same tokens."""
    fields = {"before": 20.0, "after": 12.0, "effect": 8.0, "noise_left": 1.0}
    assert not decide(several("quantised weights", product=8.0, **fields)).named
    fields |= {"after": 8.5}
    assert decide(several("quantised weights", product=8.0, **fields)).named


def two_hidden(first: float, second: float) -> CauseSearch:
    """Eight sequences that err by so much of two causes whose effects are alike."""
    rng, sequences = np.random.default_rng(0), []
    for number in range(8):
        n = 60
        x, y, noise = rng.normal(size=(3, n))
        a, b = 5 * x, 5 * (0.6 * x + 0.8 * y)
        exact = np.full(n, -40.0)
        values = exact + first * a + second * b + noise
        record = RecordedSequence(np.arange(n), values, np.ones(n, dtype=bool))
        instead = {("stale weights", "old"): exact + a, ("adapter", "absent"): exact + b}
        sequences.append(
            Observed(number, record, values, record.mask, exact,
                     predicted=np.ones(n), instead=instead)
        )  # fmt: skip
    return CauseSearch("a", sequences)


def test_causes_that_hide_each_other() -> None:
    """Alone neither has the slope 1, since a part of the other looks like it; each is
    named once the other is undone. One alone hides nothing, and so does half of it."""
    kinds = [KINDS["stale weights"], KINDS["adapter"]]
    search = two_hidden(1.0, 1.0)
    alone = search.copied()
    alone.undo_all(kinds)
    assert [c.cause for c in named_causes(alone.rows, "a")] == []
    both = search.undo_hidden(kinds)
    assert both is not None
    assert both.at_prediction
    named = list(named_causes(both.rows, "a"))
    assert {c.cause for c in named} == {"stale weights", "adapter"}
    assert all(c.left == pytest.approx(1.0, abs=0.1) for c in named)
    assert len(both.rows) == 16
    assert search.rows == []
    for shares in ((1.0, 0.0), (1.0, 0.4), (0.5, 0.5)):
        assert two_hidden(*shares).undo_hidden(kinds) is None


def observed(top: np.ndarray, logits: np.ndarray, temperature: float = 1.0) -> Observed:
    n = len(top)
    empty = np.full(n, -1.0)
    exact = ExactValues(empty, empty, np.zeros((n, 1)), empty, empty > 0, top_logits=logits)  # fmt: skip
    record = RecordedSequence(np.arange(n), empty, empty < 0, top_logprobs=top)
    return Observed(
        0, record, empty, empty < 0, empty, exact=exact, support=Support(temperature)
    )


def test_logits_lie_on_the_grid_of_one_format() -> None:
    """bfloat16's are multiples of its own spacing, also below a temperature; float16's
    are eight times as fine, and float32's anywhere."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(200, 4, generator=generator)
    for temperature in (1.0, 0.7):
        for name in ("bfloat16", "float16", "float32"):
            rounded = logits.to(getattr(torch, name)).double()
            top = (rounded / temperature).log_softmax(-1).float().double().numpy()
            seen = [observed(top, logits.double().numpy(), temperature)]
            assert on_grid(seen, "bfloat16") == (name == "bfloat16")
            assert on_grid(seen, "float16") == (name != "float32")
    assert not on_grid([observed(top[:3], logits.double().numpy()[:3])], "bfloat16")


def test_values_stored_in_16_bits() -> None:
    """All of them equal their cast; the size is that of rounding to nearest, spacing over
    the square root of 12; one that does not is enough for none."""
    values = torch.linspace(-9, -0.1, 64).bfloat16().double().numpy()
    seen = observed(np.zeros((64, 2)), np.zeros((64, 2)))
    seen = replace(seen, record=replace(seen.record, logprobs=values), values=values + 1)
    (effects,) = stored_in_16_bits([seen], [np.zeros(64)])
    assert effects.dose == "bfloat16"
    assert effects.effects[0][0] == pytest.approx(2.0**-4 / math.sqrt(12))  # of -9
    other = values.copy()
    other[5] += 2.0**-12
    seen = replace(seen, record=replace(seen.record, logprobs=other))
    (effects,) = stored_in_16_bits([seen], [np.zeros(64)])
    assert not effects.effects[0].any()


# Mistakes that the model is run with


def test_weights_and_caches_in_8_bits_by_hand() -> None:
    """Rows of a scale each; e4m3 has three bits of mantissa."""
    x = torch.tensor([[127.0, 1.4], [0.5, -0.25], [0.0, 0.0]], dtype=torch.float64)
    got = quantised(x, 1, "int8")
    assert got[0].tolist() == [127.0, 1.0]
    assert got[1, 1] == pytest.approx(-0.5 * 64 / 127)
    assert got[2].tolist() == [0.0, 0.0]
    assert quantised(x.T, 0, "int4")[:, 0].tolist() == [127.0, 0.0]
    e4m3 = quantised(torch.tensor([[448.0, 17.0, 0.9]], dtype=torch.float64), 1, "e4m3")
    assert e4m3[0].tolist() == [448.0, 16.0, 0.875]
    keys = torch.tensor([1000.0, 17.0, -0.9], dtype=torch.float64)
    assert cached(keys, "e4m3 cache").tolist() == [448.0, 16.0, -0.875]
    assert cached(keys, "int8 cache")[1] == pytest.approx(1000 * 2 / 127)
    assert format_named("float8_e4m3fn").precision == 4


@pytest.mark.slow
def test_a_quantised_cache_is_named() -> None:
    """Keys and values in e4m3, of transformers in float16; by its size, in one sentence,
    and nothing after it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    def attend(module, q, k, v, mask, **more):  # type: ignore[no-untyped-def]
        k, v = (cached(x.double(), "e4m3 cache").to(x.dtype) for x in (k, v))
        return sdpa_attention_forward(module, q, k, v, mask, **more)

    AttentionInterface.register("in_e4m3", attend)
    MASKS.register("in_e4m3", MASKS["sdpa"])
    model, tokens = demo()
    used = model.source.load(torch.float16)
    used.set_attn_implementation("in_e4m3")
    settings = RecordedSettings(dtype="float16")
    report = report_of([recorded(used, ids, settings=settings) for ids in tokens])
    assert named(report) == [("quantised cache", "e4m3 cache")]
    assert "keys and values in an e4m3 cache; with its size" in report.summary.answer[1]
    left = report.summary.sides[0].causes[0].left
    assert left is not None
    assert 0.8 < left < 1.25


@pytest.mark.slow
def test_a_narrow_head_is_named() -> None:
    """A program in float32 whose head is in bfloat16, by its slope; one in bfloat16 that
    says float32 of its head is at its prediction, and nothing is named."""
    model, tokens = demo()
    from tests.support.logprob_records import with_head_in

    used = with_head_in(model.source.load(torch.float32), torch.bfloat16)
    settings = RecordedSettings(dtype="float32")
    report = report_of([recorded(used, ids, settings=settings) for ids in tokens])
    assert named(report) == [("narrow head", "bfloat16")]
    slope = report.summary.sides[0].causes[0].slope
    assert slope is not None
    assert slope.mean == pytest.approx(1, abs=0.01)
    says = RecordedSettings(dtype="bfloat16", head="float32")
    plain = model.source.load(torch.bfloat16)
    report = report_of([recorded(plain, ids, top=4, settings=says) for ids in tokens])
    assert named(report) == []
    assert any("its logits have 16 bits" in note for note in report.remarks)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt2")
    return str(models.saved("gpt2", folder, initializer_range=0.2))


@pytest.mark.slow
def test_packs_are_told(gpt2: str) -> None:
    """Sequences that see each other, and positions that go on; rotary angles do not
    change by the latter, learned positions do."""
    from numdev.studies.logprobs.truth import exact_values, token_logprobs

    model = ExactModel(gpt2, device="cpu")
    used = model.source.load(torch.bfloat16)
    tokens = drawn_tokens(model.source.load(torch.float32), 6, 24)
    packs = [np.concatenate(tokens[i : i + 2]) for i in range(5)]
    lengths = np.array([24, 24])
    together = []
    for ids in packs:
        values = recorded(used, ids).logprobs.copy()
        values[24] = np.nan
        record = replace(recorded(used, ids), logprobs=values, sequence_lengths=lengths)
        together.append(record)
    flags = {"path": gpt2}
    assert named(report_of(together, **flags)) == [("packing", "see each other")]
    onward = []
    for record in together:
        parts = []
        for start in (0, 24):
            ids, at = (
                record.token_ids[start : start + 24],
                torch.arange(start, start + 24),
            )
            with torch.no_grad():
                tensor = torch.from_numpy(ids)[None]
                logits = used(input_ids=tensor, position_ids=at[None]).logits[0].double()
            parts.append(token_logprobs(logits, ids, Support()))
        onward.append(replace(record, logprobs=np.concatenate(parts)))
    report = report_of(onward, **flags)
    assert named(report) == [("packing", "continue each other's positions")]
    long = np.tile(packs[0], 2)
    exact = exact_values(model, recorded_as(long, np.full(4, 24)), Support())
    assert np.isfinite(exact.logprobs).sum() == 4 * 23


def recorded_as(ids: np.ndarray, lengths: np.ndarray) -> RecordedSequence:
    n = len(ids)
    return RecordedSequence(
        ids, np.full(n, -1.0), np.ones(n, dtype=bool), sequence_lengths=lengths
    )


def test_padding_counts_as_tokens(gpt2: str) -> None:
    """32 rows of padding with the logit 0 beside a vocabulary of 96."""
    from numdev.studies.logprobs.truth import token_logprobs

    model = ExactModel(gpt2, device="cpu")
    used = model.source.load(torch.float32)
    records = []
    for ids in drawn_tokens(used, 6, 40):
        with torch.no_grad():
            logits = used(input_ids=torch.from_numpy(ids)[None]).logits[0].double()
        padded = torch.nn.functional.pad(logits, (0, 32))
        values = token_logprobs(padded, ids, Support())
        says = RecordedSettings(dtype="float32")
        everything = np.ones(40, dtype=bool)
        records.append(RecordedSequence(ids, values, everything, settings=says))
    assert named(report_of(records, gpt2)) == [("padded vocabulary", "32 rows")]


# A second run


def test_two_runs_of_a_side(tmp_path: Path) -> None:
    """Whose difference explains the error: named by its size, and said; where it is
    small, said alone. Without a second run it was not looked for."""
    model, tokens = demo()
    used = model.source.load(torch.bfloat16)
    rng = np.random.default_rng(0)
    sound = [recorded(used, ids) for ids in tokens]
    shaken = [changed(s, lambda x: x + 0.2 * rng.normal(size=len(x))) for s in sound]

    def written(name: str, records: list[RecordedSequence]) -> str:
        path = tmp_path / f"{name}.jsonl"
        for i, s in enumerate(records):
            numdev.dump_logprobs(path, s.token_ids, s.logprobs, uid=str(i))
        return str(path)

    again = [changed(s, lambda x: x + 0.2 * rng.normal(size=len(x))) for s in sound]
    report = report_of(shaken, repeat=written("again", again))
    assert named(report) == [("not repeatable", "")]
    assert "two runs of it differ as much" in report.summary.answer[1]
    (remark,) = (note for note in report.remarks if "two runs" in note)
    assert remark.startswith("rollout: two runs of it differ by 0.")
    nearly = [changed(s, lambda x: x + 0.001 * rng.normal(size=len(x))) for s in sound]
    report = report_of(sound, repeat=written("nearly", nearly))
    assert named(report) == []
    assert "0.03" in next(note for note in report.remarks if "two runs" in note)
    assert "--repeat" in report_of(sound).plan.sides[0].untested["not repeatable"]
    other = [replace(s, token_ids=s.token_ids + 1) for s in sound]
    with pytest.raises(UsageError, match="none of its sequences is one of rollout"):
        report_of(sound, repeat=written("other", other))


# Adapters, and weights that stay on disk


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(demo()[0].source.load(torch.float32), folder)
    return folder


def with_adapter(folder: Path, times: float) -> torch.nn.Module:
    used = demo()[0].source.load(torch.float32)
    layers = {name: module for name, module, _ in linear_layers(used)}
    for name, delta in read_adapter(str(folder)).deltas.items():
        layers[name].weight.data += times * delta.float()
    return used


@pytest.mark.slow
def test_an_adapter_is_part_of_the_truth(adapter: Path) -> None:
    """Added to the weights it is what a model that is merged by hand is, to float32's
    resolution; absent and added twice are named, and merged on bfloat16's grid is what
    bfloat16 explains."""
    tokens = demo()[1][:5]
    model = ExactModel("demo", device="cpu", adapter=str(adapter))
    merged = with_adapter(adapter, 1)
    with torch.no_grad():
        logits = merged(input_ids=torch.from_numpy(tokens[0])[None]).logits[0]
    exact = model.exact_logits(tokens[0])
    assert float((exact - logits.double()).abs().max()) < 1e-4
    assert float((demo()[0].exact_logits(tokens[0]) - exact).abs().max()) > 0.1
    for times, expected in ((0, "absent"), (2, "added twice")):
        used = with_adapter(adapter, times).to(torch.bfloat16)
        report = report_of([recorded(used, i) for i in tokens], adapter=str(adapter))
        assert named(report) == [("adapter", expected)]
    used = merged.to(torch.bfloat16)
    report = report_of([recorded(used, i) for i in tokens], adapter=str(adapter))
    assert named(report) == []
    assert report.outcome is not None
    assert report.outcome.word == "PASS"


def test_an_adapter_that_cannot_be_read(adapter: Path, tmp_path: Path) -> None:
    """Each in one line: no files, another kind, half a pair, another model's."""
    with pytest.raises(UsageError, match="expected a directory with adapter_config"):
        read_adapter(str(tmp_path))
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    (tmp_path / weights).write_bytes((adapter / weights).read_bytes())
    (tmp_path / config).write_text('{"peft_type": "LOHA"}')
    with pytest.raises(UsageError, match="expected LoRA, got LOHA"):
        read_adapter(str(tmp_path))
    (tmp_path / config).write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        read_adapter(str(tmp_path))
    for text, says in (
        ("[]", "adapter_config.json: expected an object, got a list of 0"),
        ("null", "adapter_config.json: expected an object, got null"),
        ('{"peft_type": "LORA"}', "lora_alpha: expected a number, got null"),
        (
            '{"peft_type": "LORA", "lora_alpha": "x"}',
            "lora_alpha: expected a number, got 'x'",
        ),
        (
            '{"peft_type": "LORA", "lora_alpha": true}',
            "lora_alpha: expected a number, got true",
        ),
        (
            '{"peft_type": "LORA", "lora_alpha": NaN}',
            "lora_alpha: expected a number, got nan",
        ),
        (
            '{"peft_type": "LORA", "lora_alpha": 1%s}' % ("0" * 400),
            "lora_alpha: expected a number",
        ),
    ):
        (tmp_path / config).write_text(text)
        with pytest.raises(UsageError, match=says):
            read_adapter(str(tmp_path))
    (tmp_path / config).write_text('{"peft_type": "LORA", "lora_alpha": 8, "r": 4}')
    double = read_adapter(str(tmp_path)).deltas
    plain = read_adapter(str(adapter)).deltas
    for name, delta in plain.items():
        assert torch.equal(double[name], 2 * delta)
    (tmp_path / config).write_text('{"peft_type": "LORA", "lora_alpha": 4, "use_rslora": true}')  # fmt: skip
    assert torch.equal(read_adapter(str(tmp_path)).deltas[name], 2 * plain[name])
    other = {"base_model.model.nowhere.lora_A.weight": torch.ones(1, 2)}
    from safetensors.torch import save_file

    save_file(other, tmp_path / weights)
    with pytest.raises(UsageError, match="nowhere is no pair of matrices"):
        read_adapter(str(tmp_path))
    none = {
        f"nowhere.lora_{x}.weight": torch.ones(shape)
        for x, shape in (("A", (0, 2)), ("B", (2, 0)))
    }
    save_file(none, tmp_path / weights)
    with pytest.raises(UsageError, match="nowhere: expected rank >= 1, got 0"):
        read_adapter(str(tmp_path))
    other["base_model.model.nowhere.lora_B.weight"] = torch.ones(2, 1)
    save_file(other, tmp_path / weights)
    model = ExactModel("demo", device="cpu", adapter=str(tmp_path))
    with pytest.raises(UsageError, match="nowhere is not one linear layer"):
        model.exact_logits(demo()[1][0])


def test_weights_that_stay_on_disk_give_the_same(adapter: Path) -> None:
    """--stream: the truth, its mistakes and the predictions, bit for bit."""
    from numdev.studies.logprobs.truth import ProgramRecipe

    ids = demo()[1][0][:12]
    both = [
        ExactModel("demo", device="cpu", stream=stream, adapter=str(adapter))
        for stream in (False, True)
    ]
    for variant in ("sdpa", "int4", "e4m3", "absent", "added twice", "e4m3 cache"):
        one, other = (model.exact_logits(ids, variant) for model in both)
        assert torch.equal(one, other), variant
    for recipe in (
        ProgramRecipe("bfloat16"), ProgramRecipe("bfloat16", "eager", "float32"),
        ProgramRecipe("float32", head="bfloat16"),
    ):  # fmt: skip
        one, other = (model.rounded_logits(ids, recipe) for model in both)
        assert torch.equal(one, other), recipe.words
