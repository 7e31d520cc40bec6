"""Capturing a model's attention: what is handed over is what the model's own attention computed.

The oracles are in `capturing`; kinds of models other than language models are in
`test_capture_more`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from capturing import TOLERANCE, EagerRun, Run, attend, worst
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import find
from numdev.sources.capture import CaptureCount, attention_implementation, capture
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.watch import attention_modules

B, N = 3, 12

Built = Callable[[], "models.PreTrainedModel"]
# The last linear layer of an attention: what it is given is the attention's own output.
OUT = {
    "gpt2": "attn.c_proj",
    "llama": "self_attn.o_proj",
    "bert": "attention.output.dense",
    "t5": "SelfAttention.o",
    "falcon": "self_attention.dense",
    "modernbert": "attn.Wo",
    "gemma2": "self_attn.o_proj",
    "gpt_oss": "self_attn.o_proj",
}


def inputs(padding: str | None) -> dict[str, Tensor]:
    """Three sequences of 12 tokens; with padding, of 12, 7 and 4."""
    ids = torch.randint(3, 96, (B, N), generator=torch.Generator().manual_seed(1))
    if padding is None:
        return {"input_ids": ids}
    mask = torch.zeros(B, N, dtype=torch.int64)
    for row, length in enumerate((12, 7, 4)):
        mask[row, slice(N - length, N) if padding == "left" else slice(0, length)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def both(name: str, build: Built, given: dict[str, Tensor], tmp_path: Path) -> tuple[Run, Run]:
    """The captured run of the saved model and the eager run of the model itself, both in fp64."""
    built = build().double()
    directory = models.save(built, tmp_path / name)
    eager = type(built).from_pretrained(
        directory,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    model = open_checkpoint(directory).load_model(dtype=torch.float64, device="cpu")
    return Run(model, given, OUT[name]), EagerRun(eager, given, OUT[name])


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", list(OUT))
def test_a_captured_call_computes_what_the_models_own_attention_does(
    name: str, padding: str | None, tmp_path: Path
) -> None:
    """Every layer's case, answered here and by the reference, is that layer's eager output."""
    given = inputs(padding)
    real = given.get("attention_mask", torch.ones(B, N)).bool()
    captured, eager = both(name, getattr(models, name), given, tmp_path)
    assert captured.count is not None
    assert captured.count.calls == len(captured.cases) == len(eager.outputs) == 2
    for case, own in zip(captured.cases, eager.outputs, strict=True):
        assert case.q.dtype == torch.float64
        for answer in (attend(case), find("reference").attend(case).out):
            assert worst(answer.transpose(1, 2).flatten(2), own, real) < TOLERANCE
    assert worst(captured.logits, eager.logits, real) < 100 * TOLERANCE


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 0.36},
        {"is_causal": False},
        {"window": (6, 0)},
        {"softcap": 3.0},
        {"sinks": torch.zeros(8)},
    ],
    ids=lambda w: next(iter(w)),
)
def test_the_comparison_rejects_a_wrong_case(wrong: dict[str, object], tmp_path: Path) -> None:
    """A case with any one field wrong is far from the eager output."""
    import dataclasses

    captured, eager = both("llama", models.llama, inputs(None), tmp_path)
    case = dataclasses.replace(captured.cases[0], **wrong)
    assert worst(attend(case).transpose(1, 2).flatten(2), eager.outputs[0]) > 1e-3


def test_calls_come_as_sdpa_would_have_had_them(tmp_path: Path) -> None:
    """Grouped keys stay grouped, with a causal flag; a mask brings them repeated, with no flag."""
    bare, padded = (
        both("llama", models.llama, inputs(p), tmp_path)[0].cases[0] for p in (None, "right")
    )
    assert (bare.kv_heads, bare.is_causal, bare.mask) == (2, True, None)
    assert (padded.kv_heads, padded.is_causal) == (8, False)
    assert padded.mask is not None
    assert padded.mask.dtype == torch.bool


def test_soft_cap_and_window_are_delivered(tmp_path: Path) -> None:
    """Gemma 2's cap is on every call; its window on the sliding layer's, whose mask has it too."""
    first, second = both("gemma2", models.gemma2, inputs(None), tmp_path)[0].cases
    assert (first.softcap, second.softcap) == (0.5, 0.5)
    assert (first.window, second.window) == ((3, 0), None)
    assert first.mask is not None
    assert (second.mask, second.is_causal) == (None, True)


def test_a_window_to_both_sides_is_delivered(tmp_path: Path) -> None:
    first, second = both("modernbert", models.modernbert, inputs(None), tmp_path)[0].cases
    assert (first.window, second.window) == (None, (2, 2))


@pytest.mark.parametrize("length", [3, 4])
def test_a_window_that_hides_nothing_is_none(length: int, tmp_path: Path) -> None:
    """A window of 4 on 3 tokens is a plain causal call, which flash kernels can run."""
    short = {"input_ids": inputs(None)["input_ids"][:, :length]}
    first = both("gemma2", models.gemma2, short, tmp_path)[0].cases[0]
    assert first.window is None
    assert first.is_causal == (first.mask is None) == (length == 3)


def test_a_single_query_keeps_its_heads(tmp_path: Path) -> None:
    """transformers lays grouped heads out as rows when there is one query; the case has heads."""
    given = {"input_ids": torch.tensor([[5], [7]]), "attention_mask": torch.tensor([[1], [0]])}
    for name in ("llama", "gemma2", "gpt_oss"):
        captured, eager = both(name, getattr(models, name), given, tmp_path / name)
        case = captured.cases[0]
        assert case.q.shape[1:3] == (8 if name == "llama" else 4, 1)
        real = given["attention_mask"].bool()
        assert worst(attend(case).transpose(1, 2).flatten(2), eager.outputs[0], real) < TOLERANCE
        assert worst(captured.logits, eager.logits, real) < 100 * TOLERANCE


def test_a_single_query_keeps_its_heads_masks() -> None:
    """A mask per head is laid out like the heads, and is brought back with them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention_implementation(models.llama())

    class Grouped(nn.Module):
        num_key_value_groups = 2

        def forward(self, **qkvm: Tensor) -> Tensor:
            return ALL_ATTENTION_FUNCTIONS["numdev"](self, *qkvm.values(), is_causal=False)[0]

    draw = torch.Generator().manual_seed(0)
    q, k, v, bias = (
        torch.randn(2, heads, n, d, dtype=torch.float64, generator=draw)
        for heads, n, d in ((4, 1, 8), (2, 5, 8), (2, 5, 8), (4, 1, 5))
    )
    cases: list[AttentionCase] = []
    module, given = Grouped(), {"q": q, "k": k, "v": v, "bias": bias}
    capture(module, given, cases.append, source="")
    assert worst(attend(cases[0]).transpose(1, 2), module(**given)) < TOLERANCE
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    assert worst(attend(cases[0]), F.scaled_dot_product_attention(q, k, v, bias)) < TOLERANCE


def test_calls_are_named_by_module_layer_and_prompt(tmp_path: Path) -> None:
    """Names are unique and say where the call was made."""
    model = open_checkpoint(models.save(models.llama(), tmp_path)).load_model(
        dtype=torch.float32, device="cpu"
    )
    refs = []
    for prompt in (0, 1):
        capture(model, inputs(None), lambda c: refs.append(c.ref), source="llama", prompt=prompt)
    assert [r.case for r in refs] == [
        "model.layers.0.self_attn#0",
        "model.layers.1.self_attn#0",
        "model.layers.0.self_attn#0@1",
        "model.layers.1.self_attn#0@1",
    ]
    assert [(r.layer, r.call, r.source) for r in refs[:2]] == [(0, 0, "llama"), (1, 0, "llama")]
    assert attention_modules(model) == [r.module for r in refs[:2]]


def test_capturing_changes_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The logits are those of a run without capture; hooks and modes are gone, also on an error."""
    model = open_checkpoint(models.save(models.gemma2(), tmp_path)).load_model(
        dtype=torch.float32, device="cpu"
    )
    given = inputs("left")
    before = model(**given).logits

    class Stop(Exception):
        pass

    def stop(case: AttentionCase) -> None:
        raise Stop

    with pytest.raises(Stop):
        capture(model, given, stop, source="")
    assert not _get_current_function_mode_stack()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()
    captured = Run(model, given, OUT["gemma2"])
    assert torch.equal(captured.logits, before)
    assert torch.equal(model(**given).logits, before)


def test_a_direct_sdpa_call_is_captured_with_its_defaults() -> None:
    """No transformers involved: the scale is 1/sqrt(d) and the layer a running number."""
    model = models.Attending("sdpa").double()
    cases: list[AttentionCase] = []
    count = capture(model, inputs(None), cases.append, source="mine")
    assert count == CaptureCount(calls=1, modules={"attn": 1})
    assert (cases[0].scale, cases[0].is_causal, cases[0].ref.layer) == (8**-0.5, True, 0)
    own = model(**inputs(None))
    assert worst(attend(cases[0]).transpose(1, 2).flatten(2), own) < TOLERANCE


def test_calls_made_while_handling_a_call_are_not_captured() -> None:
    """`on_call` may run kernels that call SDPA themselves."""
    seen = []

    def measure(case: AttentionCase) -> None:
        F.scaled_dot_product_attention(case.q, case.k, case.v)
        seen.append(case.ref.case)

    capture(models.Attending("sdpa"), inputs(None), measure, source="")
    assert seen == ["attn#0"]


def test_a_model_run_while_handling_a_call_is_itself(tmp_path: Path) -> None:
    """Its soft cap is applied although the mode that sees it is off, and it is not captured."""
    model = open_checkpoint(models.save(models.gemma2(), tmp_path)).load_model(
        dtype=torch.float32, device="cpu"
    )
    alone = model(**inputs(None)).logits
    inside = []
    count = capture(
        models.Attending("sdpa"),
        inputs(None),
        lambda case: inside.append(model(**inputs(None)).logits),
        source="",
    )
    assert count.calls == 1
    assert torch.equal(inside[0], alone)


def test_attention_computed_by_hand_is_an_error() -> None:
    """A model that multiplies its own softmax(qk) v is named, not passed over."""
    with pytest.raises(MeasurementError, match="not seen in attn;"):
        capture(models.Attending("softmax"), inputs(None), lambda c: None, source="")


def test_one_unseen_layer_among_seen_ones_is_an_error() -> None:
    """A shorter report is not an answer: every layer that ran must have made a call."""
    model = nn.Sequential(models.Attending("sdpa"), models.Attending.Layer("softmax", 16, 2))
    model.forward = lambda input_ids: model[1](model[0](input_ids))  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match="not seen in 1;"):
        capture(model, inputs(None), lambda c: None, source="")


def test_every_run_of_a_layer_must_make_a_call() -> None:
    """A layer that is run twice makes two calls, or is named."""
    cases: list[AttentionCase] = []
    capture(models.Twice(lazy=False), inputs(None), cases.append, source="")
    assert [c.ref.case for c in cases] == ["attn#0", "attn#1"]
    with pytest.raises(MeasurementError, match="not seen in attn;"):
        capture(models.Twice(lazy=True), inputs(None), lambda c: None, source="")


def test_projections_in_a_module_of_their_own_count_for_their_parent() -> None:
    """The parent's call is the one expected; without it, the projections' module is named."""
    count = capture(models.Split(attends=True), inputs(None), lambda c: None, source="")
    assert count.modules == {"Split": 1}
    with pytest.raises(MeasurementError, match="project"):
        capture(models.Split(attends=False), inputs(None), lambda c: None, source="")


def test_a_model_without_attention_is_an_error() -> None:
    model = nn.Sequential(nn.Embedding(96, 4))
    model.forward = lambda input_ids: model[0](input_ids)  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match="no attention call"):
        capture(model, inputs(None), lambda c: None, source="")


def test_dropout_is_an_error() -> None:
    with pytest.raises(MeasurementError, match=r"attn: attention with dropout 0\.1"):
        capture(models.Attending("dropout"), inputs(None), lambda c: None, source="")


def test_an_unknown_argument_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Nothing a model passes to its attention is dropped silently."""
    model = open_checkpoint(models.save(models.llama(), tmp_path)).load_model(
        dtype=torch.float32, device="cpu"
    )
    given = {**inputs(None), "tree_bias": torch.zeros(1)}
    with pytest.raises(MeasurementError, match=r"LlamaAttention .* does not know: tree_bias"):
        capture(model, given, lambda c: None, source="")


@pytest.mark.parametrize(
    ("name", "layer", "size", "padding"),
    [
        ("gemma2", 1, 4, None),  # no mask at all
        ("gemma2", 1, 4, "right"),  # a mask without a window
        ("gemma2", 0, 3, None),  # a mask with a window of 4
        ("modernbert", 1, 2, None),  # a mask that reaches one further to both sides
    ],
)
def test_a_window_that_the_mask_lacks_is_an_error(
    name: str, layer: int, size: int, padding: str | None, tmp_path: Path
) -> None:
    """SDPA follows the mask and flash attention the window: numdev does not choose."""
    model = open_checkpoint(models.save(getattr(models, name)(), tmp_path)).load_model(
        dtype=torch.float32, device="cpu"
    )
    model.get_submodule(attention_modules(model)[layer]).sliding_window = size
    with pytest.raises(MeasurementError, match=f"passes a window of {size}"):
        capture(model, inputs(padding), lambda c: None, source="")


@pytest.mark.parametrize(
    ("children", "owns"),
    [
        ("q_proj k_proj v_proj o_proj", True),
        ("query key value", True),
        ("q_lin k_lin v_lin", True),
        ("to_q to_k to_v", True),
        ("Wqkv Wo", True),
        ("c_attn c_proj", True),
        ("query_key_value dense", True),
        ("q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj", True),
        ("q k v o", True),
        ("q_norm k_norm v_norm", False),
        ("q_proj k_proj", False),
        ("in_proj conv1d out_proj", False),
        ("q_proj k_proj v_proj q_conv1d", False),
        ("gate_proj up_proj down_proj", False),
        ("receptance key value", False),
    ],
)
def test_projections_are_known_by_their_names(children: str, owns: bool) -> None:
    module = nn.Module()
    for child in children.split():
        module.add_module(child, nn.Linear(1, 1))
    assert attention_modules(module) == ([""] if owns else [])
