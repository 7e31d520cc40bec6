"""Training on a GPU: recorded steps are the steps themselves, and runs come out the same
twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import test_train
import torch
from test_train import GOLDEN, OTHERS

from numdev.errors import MeasurementError
from numdev.studies.training.config import TrainRequest
from numdev.studies.training.side_by_side_training import deterministic
from numdev.studies.training.study import train
from numdev.studies.training.token_batches import load_tokens
from numdev.studies.training.variant_training import FIRST, Lane

pytestmark = pytest.mark.gpu

NAMED = {variant["name"]: variant for variant in OTHERS}
VARIANTS: list[dict[str, Any]] = [
    GOLDEN, NAMED["flash"], {"name": "triton", "kernel": "triton-flash"}, NAMED["noise"],
    NAMED["ulp"], {"name": "fp32", "role": "low_precision", "format": "float32"},
    *(NAMED[name] for name in ("half", "pure", "repeat", "sgd")),
    {"name": "emulated", "kernel": {"name": "emulated", "compute": "float32"}},
]  # fmt: skip
MODEL = dict(kind="llama", layers=2, width=64, heads=4, kv_heads=2, context=64)
STEPS = {"batch": 4, "steps": FIRST + 12, "record": [1, FIRST + 4, FIRST + 12]}


def request(tmp_path: Path, *variants: dict[str, Any]) -> TrainRequest:
    path = test_train.config(tmp_path, model=MODEL, variants=list(variants), **STEPS)
    return test_train.request(path, device="cuda")


ROUNDED = {**dict.fromkeys(("scores", "pv", "dp"), "working"), "delta_from": "dP*P"}
PRESETS = {name: {"preset": name} for name in ("qiu2025", "eager")}
LADDER: list[dict[str, Any]] = [
    {"name": f"noise at {times:g}", "role": "null_rounding", "times": times}
    for times in (0.25, 16.0)
]
EMULATED: list[dict[str, Any]] = [
    {"name": f"emulated, {name}", "attention_format": "bfloat16",
     "kernel": {"name": "emulated", "compute": "float32", **options}}
    for name, options in {"fa2": {}, "rounded products": ROUNDED, **PRESETS}.items()
]  # fmt: skip


@pytest.mark.parametrize("name", [v["name"] for v in (*VARIANTS[:6], *LADDER, *EMULATED)])
def test_replayed_steps_are_the_steps(tmp_path: Path, name: str) -> None:
    """Weights, loss and norm after steps of which most were replayed from a recording,
    with one that was watched in between, are those of steps that all ran as they are: the
    same bits."""
    asked = request(tmp_path, *VARIANTS[:6], *LADDER, *EMULATED)
    variant = next(v for v in asked.variants if v.name == name)
    device = torch.device("cuda")
    data = load_tokens(asked.data, asked.model, asked.batch, device)
    with deterministic(wanted=True):
        replayed, plain = (
            Lane(variant, asked.model, data.vocabulary, 0, device) for _ in range(2)
        )
        assert plain.replay is not None
        plain.replay = None
        for step in range(1, asked.steps + 1):
            for lane in (replayed, plain):
                lane.attention.largest = [] if step in asked.recorded else None
                lane.take_step(data.batch(0, step), step, asked.steps)
            assert torch.equal(replayed.loss, plain.loss), step
            assert torch.equal(replayed.norm, plain.norm), step
    assert_replayed(replayed, plain)


def assert_replayed(lane: Any, plain: Any) -> None:
    """It was recorded, and has the same weights as one that was not."""
    assert lane.replay.graph is not None
    for (key, x), y in zip(lane.weights().items(), plain.weights().values(), strict=True):
        assert torch.equal(x, y), key


def test_a_loaded_lane_goes_on_from_what_was_loaded(tmp_path: Path) -> None:
    """Its recording had the addresses of the optimiser's old state: it is made anew."""
    asked = request(tmp_path, VARIANTS[0])
    device, steps = torch.device("cuda"), asked.steps
    data = load_tokens(asked.data, asked.model, asked.batch, device)
    with deterministic(wanted=True):
        lane, other = (Lane(asked.golden, asked.model, 256, 0, device) for _ in range(2))
        for step in range(1, FIRST + 3):
            lane.take_step(data.batch(0, step), step, steps)
        lane.load_state(copy.deepcopy(lane.state()))
        other.load_state(copy.deepcopy(lane.state()))
        other.replay = None
        for step in range(FIRST + 3, steps + 1):
            for each in (lane, other):
                each.take_step(data.batch(0, step), step, steps)
    assert_replayed(lane, other)


def waits(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    float(q.sum())
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def test_a_recording_that_fails_names_its_variant(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A kernel that waits for the device, taken for one that does not. Random numbers can
    be drawn afterwards, and are those that would have been."""
    name = f"{__name__}:waits"
    monkeypatch.setattr("numdev.studies.training.variant_training.RECORDABLE", {name})
    asked = request(tmp_path, {**VARIANTS[0], "kernel": name})
    with pytest.raises(MeasurementError, match="variant golden"):
        train(asked, tmp_path / "out")
    torch.cuda.manual_seed(3)
    drawn = torch.randn(5, device="cuda")
    other = torch.randn(
        5, device="cuda", generator=torch.Generator("cuda").manual_seed(3)
    )
    assert torch.equal(drawn, other)


def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    """What was recorded after the stop equals what an undisturbed run recorded."""
    asked = request(tmp_path, *VARIANTS)
    whole: Any = train(asked, tmp_path / "whole")
    assert train(asked, tmp_path / "parts", stop_after=0.0) is None
    parts = (train(asked, tmp_path / "parts", stop_after=0.5) for _ in range(40))
    result = next(part for part in parts if part is not None)
    assert (result.rows, result.distances) == (whole.rows, whole.distances)
