"""Experts that a program recorded, put in the place of those that the exact model
chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from numdev.errors import MeasurementError
from numdev.request_models import logprobs_request
from numdev.studies.logprobs.records import RecordedSequence
from numdev.studies.logprobs.report import LogprobsReport
from numdev.studies.logprobs.routing_replay import NotReplayed, count_other
from numdev.studies.logprobs.study import logprobs
from numdev.studies.logprobs.truth import ExactModel
from tests.support import models
from tests.support.logprob_records import (
    drawn_tokens,
    joined,
    recorded_with_experts,
    router_moved,
    side,
)

EIGHT = {
    "num_local_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
NAME = "routing of experts"


class Mixtral(NamedTuple):
    path: str
    exact: ExactModel
    tokens: list[np.ndarray]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Mixtral:
    """Two layers of eight experts, two for each token."""
    path = str(models.saved("mixtral", tmp_path_factory.mktemp("mixtral"), **EIGHT))
    exact = ExactModel(path, device="cpu")
    return Mixtral(path, exact, drawn_tokens(exact.source.load(torch.float32), 4, 54))


@contextmanager
def choosing(model: nn.Module, experts: np.ndarray) -> Iterator[None]:
    """A context in which a plain Mixtral takes experts, [n, layers, k]."""
    hooks = []
    for i, layer in enumerate(model.model.layers):

        def force(_gate: nn.Module, _args: object, out: tuple, at: int = i) -> tuple:
            indices = torch.from_numpy(experts[:, at])
            weights = out[0].double().softmax(-1).gather(-1, indices)
            return out[0], weights / weights.sum(-1, keepdim=True), indices

        hooks.append(layer.mlp.gate.register_forward_hook(force))
    yield
    for hook in hooks:
        hook.remove()


def report_of(
    mixtral: Mixtral, records: list[RecordedSequence], **flags: object
) -> LogprobsReport:
    request = logprobs_request(
        ["a.jsonl"], {"device": "cpu", "model": mixtral.path, **flags}
    )
    one = [side("rollout", records)]
    return logprobs(request, one, open_model=lambda _: mixtral.exact)


def test_a_models_own_experts_change_no_bit(mixtral: Mixtral) -> None:
    """Those that the exact model chooses are those of transformers in fp64, and told to
    take them it gives the same logits."""
    ids = mixtral.tokens[0]
    single = mixtral.exact.source.load(torch.float64)
    experts = recorded_with_experts(single, ids).routed_experts
    assert experts is not None
    routing = mixtral.exact.routing(ids, 2)
    assert count_other(experts, routing.experts) == (0, experts.size)
    alone = mixtral.exact.exact_logits(ids)
    assert torch.equal(mixtral.exact.exact_logits(ids, experts=routing.experts), alone)
    nothing = np.full_like(experts, -1)
    assert torch.equal(mixtral.exact.exact_logits(ids, experts=nothing), alone)


def test_other_experts_are_taken(mixtral: Mixtral) -> None:
    """As transformers computes them where its routers are told to; it casts to float32,
    so that it is 1e-6 off."""
    ids = mixtral.tokens[1]
    alone = mixtral.exact.routing(ids, 2).experts
    other = (alone + 3) % 8
    plain = mixtral.exact.source.load(torch.float64)
    with choosing(plain, other), torch.no_grad():
        expected = plain(input_ids=torch.from_numpy(ids)[None]).logits[0]
    got = mixtral.exact.exact_logits(ids, experts=other)
    scale = float(expected.abs().max())
    assert float((got - expected).abs().max()) < 1e-5 * scale
    assert float((mixtral.exact.exact_logits(ids) - expected).abs().max()) > 0.1 * scale


@cache
def moved(path: str, exact: ExactModel, size: float) -> tuple[RecordedSequence, ...]:
    """What Mixtral in bfloat16 records where its routers are off."""
    model = exact.source.load(torch.bfloat16)
    tokens = drawn_tokens(exact.source.load(torch.float32), 4, 54)
    with router_moved(model, size):
        return tuple(recorded_with_experts(model, ids) for ids in tokens)


def test_other_experts_on_a_side_are_named(mixtral: Mixtral) -> None:
    """Undone, what is left is what the format errs with the experts that were taken."""
    report = report_of(mixtral, list(moved(mixtral.path, mixtral.exact, 0.3)))
    (summary,) = report.summary.sides
    assert [cause.cause for cause in summary.causes] == [NAME]
    assert summary.ratio.mean > 2
    left = summary.causes[0].left
    assert left is not None
    assert 0.8 < left < 1.25
    assert "tokens go to other experts" in " ".join(report.summary.answer)
    assert any("recorded experts are not those" in note for note in report.remarks)


def test_without_recorded_experts_it_is_said_what_to_record(mixtral: Mixtral) -> None:
    records = moved(mixtral.path, mixtral.exact, 0.3)
    report = report_of(mixtral, [replace(s, routed_experts=None) for s in records[:3]])
    assert report.outcome is not None
    assert report.outcome.word != "PASS"
    assert not report.summary.sides[0].causes
    assert "routed_experts" in report.plan.sides[0].untested[NAME]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:, :1], "in 1 layers, the model chooses 2 in 2 of 2"),
        (lambda x: x[..., :1], "no layer of the model chooses 1 experts"),
        (lambda x: x + 6, "a layer has 8 experts"),
    ],
)
def test_experts_of_another_model_are_not_replayed(
    mixtral: Mixtral, change: object, words: str
) -> None:
    """Nothing is named then, and the report says why."""
    records = moved(mixtral.path, mixtral.exact, 0.3)
    others = [replace(s, routed_experts=change(s.routed_experts)) for s in records[:3]]
    with pytest.raises(NotReplayed):
        mixtral.exact.exact_logits(others[0].token_ids, experts=others[0].routed_experts)
    report = report_of(mixtral, others)
    assert not report.summary.sides[0].causes
    assert words in report.plan.sides[0].untested[NAME]


def test_a_model_that_fails_while_it_chooses_is_named(mixtral: Mixtral) -> None:
    """As one that fails with the experts chosen: in one line, and not as experts that do
    not fit."""

    def fail(*_: object) -> None:
        raise ValueError("no room")

    layer = mixtral.exact._subject("float64", "sdpa").wide.model.layers[0]
    hook = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(MeasurementError, match=r"failed on the tokens: .*no room"):
            mixtral.exact.routing(np.array([3, 5, 7]), 2)
    finally:
        hook.remove()


def test_experts_of_layers_without_a_router_are_left_out(tmp_path: Path) -> None:
    """DeepSeek's first layer has none; its keys, and groups of experts, are chosen by
    `topk` too. Engines record all layers, or those with a router."""
    path = models.saved("deepseek_v32", tmp_path)
    exact = ExactModel(str(path), device="cpu")
    ids = np.random.default_rng(0).integers(3, exact.vocabulary, 12)
    routing = exact.routing(ids, 1)
    assert routing.experts.shape == (12, 1, 1)
    assert (routing.of, routing.layers) == (4, 2)
    every = np.concatenate([np.full((12, 1, 1), -1), routing.experts], axis=1)
    alone = exact.exact_logits(ids)
    for experts in (routing.experts, every):
        assert torch.equal(exact.exact_logits(ids, experts=experts), alone)
    others = exact.exact_logits(ids, experts=(routing.experts + 1) % 4)
    assert not torch.equal(others, alone)


def test_two_sides_alone_say_how_many_experts_differ(mixtral: Mixtral) -> None:
    model = mixtral.exact.source.load(torch.bfloat16)
    sound = [recorded_with_experts(model, ids) for ids in mixtral.tokens]
    others = list(moved(mixtral.path, mixtral.exact, 0.3))
    a, b = side("rollout", others), side("trainer", sound)
    request = logprobs_request(["a.jsonl"], {"device": "cpu"})
    report = logprobs(request, [a, b], joined(a, b))
    (note,) = (x for x in report.remarks if "experts" in x)
    assert note.endswith("recorded experts are not those of trainer.")
    counts = [
        count_other(x.routed_experts, y.routed_experts)
        for x, y in zip(others, sound, strict=True)
    ]
    assert sum(x for x, _ in counts) > 0
    assert f"{sum(n for _, n in counts):,}" in note


def test_experts_are_counted_by_token_and_layer() -> None:
    """In any order; a token without recorded experts does not count."""
    a = np.array([[[0, 1]], [[2, 3]], [[-1, -1]], [[4, 5]]])
    b = np.array([[[1, 0]], [[2, 4]], [[0, 1]], [[-1, -1]]])
    assert count_other(a, b) == (1, 4)
