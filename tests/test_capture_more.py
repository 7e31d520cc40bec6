"""Capturing models of every kind, and models that write: each call is what the model's own
attention computed, under the right name.

Language models in one forward pass, and what capturing leaves alone, are in `test_capture`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from capturing import TOLERANCE, EagerRun, Run, attend, worst
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.kernels import find
from numdev.sources.capture import capture
from numdev.sources.checkpoint import open_checkpoint

B, N, STEPS = 2, 9, 3


def ids(low: int = 3) -> Tensor:
    return torch.randint(low, 96, (B, N), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> dict[str, Tensor]:
    mask = torch.ones(B, N, dtype=torch.int64)
    mask[1, slice(0, 4) if side == "left" else slice(5, N)] = 0
    return {"input_ids": ids() * mask, "attention_mask": mask}


def normal(*shape: int) -> Tensor:
    return torch.randn(B, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


PIXELS = {"pixel_values": normal(3, 12, 12)}
FRAMES = {"input_features": normal(8, 24)}
DECODER = {"decoder_input_ids": ids()[:, :6]}
T5_OUT = ("SelfAttention.o", "EncDecAttention.o")
CALLS = {"t5_seq2seq": 6, "bart": 6, "whisper": 6, "clip": 4}
"""Calls of one pass: two layers, in an encoder-decoder model of three attentions."""

# name of the model, its attention's output layers, its inputs
ONE_PASS: list[tuple[str, Any, dict[str, Tensor]]] = [
    ("t5_seq2seq", T5_OUT, {"input_ids": ids(), **DECODER}),
    ("t5_seq2seq", T5_OUT, {**padded("right"), **DECODER}),
    ("bart", "attn.out_proj", {"input_ids": ids(), **DECODER}),
    ("bart", "attn.out_proj", {**padded("right"), **DECODER}),
    ("vit", "attention.o_proj", PIXELS),
    ("clip", "attn.out_proj", {"input_ids": ids(), **PIXELS}),
    ("whisper", "attn.out_proj", {**FRAMES, **DECODER}),
    ("gemma3", "self_attn.o_proj", {"input_ids": ids()}),
    ("mistral", "self_attn.o_proj", {"input_ids": ids()}),
]
WRITING: list[tuple[str, Any, dict[str, Tensor]]] = [
    ("gpt2", "attn.c_proj", {"input_ids": ids()}),
    ("llama", "self_attn.o_proj", {"input_ids": ids()}),
    ("gemma2", "self_attn.o_proj", {"input_ids": ids()}),
    ("gemma3", "self_attn.o_proj", {"input_ids": ids()}),
    ("gpt_oss", "self_attn.o_proj", {"input_ids": ids()}),
    ("falcon", "self_attention.dense", {"input_ids": ids()}),
    ("t5_seq2seq", T5_OUT, padded("right")),
    ("bart", "attn.out_proj", {"input_ids": ids()}),
    ("whisper", "attn.out_proj", FRAMES),
]


def opened(name: str, directory: Path) -> torch.nn.Module:
    saved = models.save(getattr(models, name)(), directory / name)
    return open_checkpoint(saved).load_model(dtype=torch.float64, device="cpu")


def both(
    name: str, out: Any, given: dict[str, Tensor], directory: Path, steps: int | None = None
) -> tuple[Run, Run]:
    """The captured run of the saved model and the eager run of the model itself, both in fp64."""
    built = getattr(models, name)().double()
    eager = type(built).from_pretrained(
        models.save(built, directory / name),
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    model = open_checkpoint(directory / name).load_model(dtype=torch.float64, device="cpu")
    return Run(model, given, out, steps), EagerRun(eager, given, out, steps)


def check(captured: Run, eager: Run, calls: int, real: Tensor | None = None) -> None:
    """Every case, answered here and by the reference, is the eager output of that call."""
    assert captured.count is not None
    assert captured.count.calls == len(captured.cases) == len(eager.outputs) == calls
    for case, own in zip(captured.cases, eager.outputs, strict=True):
        rows = real if real is not None and real.shape[1] == case.q_len else None
        for answer in (attend(case), find("reference").attend(case).out):
            assert worst(
                answer.transpose(1, 2).flatten(2), own.reshape(B, case.q_len, -1), rows
            ) < (TOLERANCE)


@pytest.mark.parametrize(("name", "out", "given"), ONE_PASS)
def test_a_call_computes_what_the_models_own_attention_does(
    name: str, out: Any, given: dict[str, Tensor], tmp_path: Path
) -> None:
    """Self and cross attention, position biases, towers and windows: all as the model has them."""
    check(*both(name, out, given, tmp_path), calls=CALLS.get(name, 2))


@pytest.mark.parametrize(("name", "out", "given"), WRITING)
def test_a_call_of_a_generation_computes_what_the_models_own_attention_does(
    name: str, out: Any, given: dict[str, Tensor], tmp_path: Path
) -> None:
    """In the prefill and in every decode step; an encoder runs once."""
    encoder = 2 if name in CALLS else 0
    calls = encoder + (CALLS.get(name, 2) - encoder) * (1 + STEPS)
    check(*both(name, out, given, tmp_path, STEPS), calls=calls)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_generation_from_padded_text(name: str, tmp_path: Path) -> None:
    """The padding stays hidden from every step."""
    given = padded("left")
    runs = both(name, "self_attn.o_proj", given, tmp_path, STEPS)
    check(*runs, calls=2 * (1 + STEPS), real=given["attention_mask"].bool())
    last = runs[0].cases[-1]
    assert last.mask is not None
    assert last.mask.shape[-1] == N + STEPS


def test_prefill_and_decode_are_told_apart(tmp_path: Path) -> None:
    """By phase and by name; a decode step has one query, and a key more than the one before."""
    cases: list[AttentionCase] = []
    given = {"input_ids": ids()}
    capture(opened("llama", tmp_path), given, cases.append, source="", generate=2)
    first = [c for c in cases if c.ref.layer == 0]
    assert [(c.ref.case, c.ref.phase, c.q_len, c.kv_len) for c in first] == [
        ("model.layers.0.self_attn#0/prefill", "prefill", N, N),
        ("model.layers.0.self_attn#1/decode", "decode", 1, N + 1),
        ("model.layers.0.self_attn#2/decode", "decode", 1, N + 2),
    ]
    assert [c.ref.call for c in first] == [0, 1, 2]


def test_the_prefill_is_called_as_a_forward_pass_is(tmp_path: Path) -> None:
    """Ids that happen to be the padding token are read like any other, so that no mask appears."""
    given = {"input_ids": ids(low=0) % 5}
    assert (given["input_ids"] == 0).any()
    model = opened("llama", tmp_path)
    forward, writing = [], []
    capture(model, given, forward.append, source="")
    capture(model, given, writing.append, source="", generate=1)
    for a, b in zip(forward, writing, strict=False):
        assert (a.mask, a.is_causal) == (b.mask, b.is_causal) == (None, True)
        assert torch.equal(a.q, b.q)


def test_a_sliding_layers_cache_holds_its_window(tmp_path: Path) -> None:
    """In a decode step the cache itself is the window, so the case needs none."""
    cases: list[AttentionCase] = []
    given = {"input_ids": ids()}
    capture(opened("gemma3", tmp_path), given, cases.append, source="", generate=1)
    assert [(c.window, c.kv_len) for c in cases] == [((3, 0), N), (None, N), (None, 4), (None, 10)]


def test_a_generation_repeats_itself_and_never_stops_early(tmp_path: Path) -> None:
    """Greedy, even where the end token is the likeliest."""
    model = opened("gpt2", tmp_path)
    model.lm_head.weight.data[2] = 1e3  # the end token: a huge logit of one sign or the other
    runs = [[], []]
    for run in runs:
        capture(model, {"input_ids": ids()}, run.append, source="", generate=4)
    assert len(runs[0]) == 2 * 5
    assert all(torch.equal(a.q, b.q) for a, b in zip(*runs, strict=True))


def test_a_model_that_does_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ViTForImageClassification does not generate text"):
        capture(opened("vit", tmp_path), PIXELS, lambda c: None, source="", generate=1)


def test_inputs_that_do_not_fit_are_an_error_in_one_line(tmp_path: Path) -> None:
    """What the model raises on them is passed on as a message; what `on_call` raises, as it is."""
    model = opened("vit", tmp_path)
    with pytest.raises(MeasurementError, match="ViTForImageClassification failed on") as caught:
        capture(model, {"pixel_values": normal(3, 16, 16)}, lambda c: None, source="")
    assert "\n" not in str(caught.value)

    def fail(case: AttentionCase) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        capture(model, PIXELS, fail, source="")
