"""Capturing a model's attention: what is handed over is what it computed. Oracles:
`capturing`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import models
import pytest
import torch
import torch.nn.functional as F
import transformers
from capturing import TOLERANCE, Run, attend, eager, merged, opened, worst
from oracles import normal
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import _get_current_function_mode_stack

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import find
from numdev.request_models import AuditRequest, Choice
from numdev.sources.capture import (
    Unseen,
    attention_implementation,
    attention_modules,
    capture,
    chosen_keys,
    items_from_run,
    run_with_answers,
    unaudited_modules,
)
from numdev.sources.unaudited_mixers import is_mixer, mixers_in_words
from numdev.studies.audit.run import audit

B, N, STEPS = 3, 12, 3
IDS = torch.randint(3, 96, (B, N), generator=torch.Generator().manual_seed(1))
DRAWN = torch.randn(2, B, 3, 12, 12, generator=torch.Generator().manual_seed(2)).double()
PIXELS, FRAMES = (
    {"pixel_values": DRAWN[0]},
    {"input_features": DRAWN[1].reshape(B, -1, 24)[:, :8]},
)
DECODER = {"decoder_input_ids": IDS[:, :6]}


def text(padding: str | None = None) -> dict[str, Tensor]:
    """Three sequences of 12 tokens; with padding, of 12, 7 and 4."""
    if padding is None:
        return {"input_ids": IDS}
    mask = torch.zeros(B, N, dtype=torch.int64)
    for row, length in enumerate((12, 7, 4)):
        mask[row, slice(N - length, N) if padding == "left" else slice(0, length)] = 1
    return {"input_ids": IDS * mask, "attention_mask": mask}


def cases_of(
    model: nn.Module, passed: dict[str, Tensor], **options: Any
) -> list[AttentionCase]:
    cases: list[AttentionCase] = []
    capture(model, passed, cases.append, source="test", **options)
    return cases


def agrees(
    name: str, passed: dict[str, Tensor], tmp_path: Path, steps: int | None = None
) -> list[AttentionCase]:
    """Hold every case, answered here and by the reference, against eager output and
    logits."""
    captured = Run(opened(name, tmp_path), name, passed, steps)
    run = Run(eager(name, tmp_path), name, passed, steps, eager=True)
    assert len(captured.cases) == len(run.outputs) > 0
    mask = passed.get("attention_mask", torch.ones(B, N)).bool()
    for case, expected in zip(captured.cases, run.outputs, strict=True):
        batch, length = case.q.shape[0], case.q_len
        real = mask if mask.shape == (batch, length) else None
        assert case.q.dtype == torch.float64
        for answer in (attend(case), find("reference").attend(case).out):
            expected = expected.reshape(batch, length, -1)
            assert worst(merged(answer), expected, real) < TOLERANCE
    real = mask if mask.shape == captured.logits.shape[:2] else None
    assert worst(captured.logits, run.logits, real) < 100 * TOLERANCE
    return captured.cases


PLAIN = ("gpt2", "llama", "bert", "t5", "falcon", "modernbert", "gemma2", "gpt_oss")
WRITING = ("gpt2", "llama", "gemma2", "gemma3", "gpt_oss", "falcon", "bart")
PREFILL_AND_STEPS = 1 + STEPS
# Model, what it reads, tokens it writes after the first, and calls; an encoder runs once.
CALLS: tuple[tuple[str, dict[str, Tensor], int | None, int], ...] = (
    *((n, text(padding), None, 2) for n in PLAIN for padding in (None, "left", "right")),
    *((n, {**text("right"), **DECODER}, None, 6) for n in ("t5_seq2seq", "bart")),
    *((n, text(), None, 2) for n in ("gemma3", "mistral")),
    *(("splinter", text(padding), None, 2) for padding in (None, "left")),
    *(("nllb_moe", {**text(padding), **DECODER}, None, 6) for padding in (None, "right")),
    ("t5_seq2seq", {**text(), **DECODER}, None, 6),
    ("vit", PIXELS, None, 2),
    ("clip", {**text(), **PIXELS}, None, 4),
    ("whisper", {**FRAMES, **DECODER}, None, 6),
    *((n, text(), STEPS, (2 + 2 * (n == "bart")) * PREFILL_AND_STEPS + 2 * (n == "bart"))
      for n in WRITING),
    *((n, text("left"), STEPS, 2 * PREFILL_AND_STEPS) for n in ("llama", "gemma2", "gpt_oss")),
    ("t5_seq2seq", text("right"), STEPS, 2 + 4 * PREFILL_AND_STEPS),
    ("whisper", FRAMES, STEPS, 2 + 4 * PREFILL_AND_STEPS),
    ("nllb_moe", text(), STEPS, 2 + 4 * PREFILL_AND_STEPS),
    *((n, text("left"), None, calls) for n, calls in (("minimax", 1), ("recurrent_gemma", 1))),
    *(("deepseek_v32", text(padding), steps, 2 + 2 * (steps or 0))
      for padding, steps in ((None, None), ("left", None), (None, STEPS))
      if hasattr(transformers, "DeepseekV32ForCausalLM")),
)  # fmt: skip


@pytest.mark.parametrize(("name", "passed", "steps", "calls"), CALLS)
@pytest.mark.one_in(3)
def test_a_captured_call_computes_what_the_models_own_attention_does(
    name: str, passed: dict[str, Tensor], steps: int | None, calls: int, tmp_path: Path
) -> None:
    """Every call's case is that layer's eager output, in the prefill and in every decode
    step."""
    assert len(agrees(name, passed, tmp_path, steps)) == calls


def test_the_comparison_rejects_a_wrong_case(tmp_path: Path) -> None:
    """A case with any one field wrong is far from the eager output."""
    captured = Run(opened("llama", tmp_path), "llama", text())
    wrong = {"scale": 0.36, "is_causal": False, "window": (6, 0), "softcap": 3.0}
    for name, value in {**wrong, "sinks": torch.zeros(8)}.items():
        case = dataclasses.replace(captured.cases[0], **{name: value})
        assert worst(merged(attend(case)), captured.outputs[0]) > 1e-3


def test_calls_come_as_sdpa_would_have_had_them(tmp_path: Path) -> None:
    """Grouped keys stay grouped, with a causal flag; a mask brings them repeated, with no
    flag."""
    model = opened("llama", tmp_path)
    bare, padded = (cases_of(model, text(p))[0] for p in (None, "right"))
    assert (bare.kv_heads, bare.is_causal, bare.mask) == (2, True, None)
    assert (padded.kv_heads, padded.is_causal) == (8, False)
    assert padded.mask.dtype == torch.bool


def test_soft_cap_and_window_are_delivered(tmp_path: Path) -> None:
    """Gemma 2's cap is on every call; a window that hides nothing is none, so flash can
    run it."""
    model = opened("gemma2", tmp_path)
    first, second = cases_of(model, text())
    assert (first.softcap, second.softcap) == (0.5, 0.5)
    assert (first.window, second.window) == ((3, 0), None)
    assert first.mask is not None
    assert (second.mask, second.is_causal) == (None, True)
    for length in (3, 4):
        case = cases_of(model, {"input_ids": IDS[:, :length]})[0]
        assert case.window is None
        assert case.is_causal == (case.mask is None) == (length == 3)
    both_sides = cases_of(opened("modernbert", tmp_path), text())
    assert [case.window for case in both_sides] == [None, (2, 2)]


def test_a_single_query_keeps_its_heads(tmp_path: Path) -> None:
    """transformers lays its grouped heads out as rows; they and a mask per head come
    back."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    passed = {
        "input_ids": torch.tensor([[5], [7]]),
        "attention_mask": torch.tensor([[1], [0]]),
    }
    for name in ("llama", "gemma2", "gpt_oss"):
        case = agrees(name, passed, tmp_path)[0]
        assert case.q.shape[1:3] == (8 if name == "llama" else 4, 1)
    attention_implementation(models.build("llama"))

    class Grouped(nn.Module):
        num_key_value_groups = 2

        def forward(self, **qkvm: Tensor) -> Tensor:
            return ALL_ATTENTION_FUNCTIONS["numdev"](
                self, *qkvm.values(), is_causal=False
            )[0]

    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 1, 8), (2, 5, 8), (2, 5, 8), (4, 1, 5))
    q, k, v, bias = (
        torch.randn(2, *s, dtype=torch.float64, generator=draw) for s in shapes
    )
    (case,) = cases_of(Grouped(), {"q": q, "k": k, "v": v, "bias": bias})
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    assert worst(attend(case), F.scaled_dot_product_attention(q, k, v, bias)) < TOLERANCE


def test_calls_are_named_by_module_layer_and_phase(tmp_path: Path) -> None:
    """Names are unique; a decode step has one query, and a key more than the one
    before."""
    model = opened("llama", tmp_path)
    refs, name = (
        [case.ref for case in cases_of(model, text())],
        "model.layers.{}.self_attn#{}",
    )
    assert [(r.case, r.layer, r.call) for r in refs] == [
        (name.format(i, 0), i, 0) for i in (0, 1)
    ]
    assert attention_modules(model) == [r.module for r in refs]
    first = [c for c in cases_of(model, text(), generate=2) if c.ref.layer == 0]
    assert [(c.ref.case, c.ref.phase, c.ref.call, c.q_len, c.kv_len) for c in first] == [
        (name.format(0, "0/prefill"), "prefill", 0, N, N),
        (name.format(0, "1/decode"), "decode", 1, 1, N + 1),
        (name.format(0, "2/decode"), "decode", 2, 1, N + 2),
    ]


# --- generations ----------------------------------------------------------------------


def test_the_prefill_is_called_as_a_forward_pass_is(tmp_path: Path) -> None:
    """Ids that happen to be the padding token are read like any other, so that no mask
    appears."""
    passed, model = {"input_ids": IDS % 5}, opened("llama", tmp_path)
    assert (passed["input_ids"] == 0).any()
    for a, b in zip(
        cases_of(model, passed), cases_of(model, passed, generate=1), strict=False
    ):
        assert (a.mask, a.is_causal) == (b.mask, b.is_causal) == (None, True)
        assert torch.equal(a.q, b.q)


def test_a_sliding_layers_cache_holds_its_window(tmp_path: Path) -> None:
    """In a decode step the cache itself is the window, so the case needs none."""
    cases = cases_of(opened("gemma3", tmp_path), text(), generate=1)
    expected = [((3, 0), N), (None, N), (None, 4), (None, N + 1)]
    assert [(c.window, c.kv_len) for c in cases] == expected


def test_a_generation_repeats_itself_and_never_stops_early(tmp_path: Path) -> None:
    """Greedy, even where the end token is the likeliest."""
    model = opened("gpt2", tmp_path)
    # The end token: a huge logit of one sign or the other
    model.lm_head.weight.data[2] = 1e3
    runs = [cases_of(model, text(), generate=4) for _ in "ab"]
    assert len(runs[0]) == 2 * 5
    assert all(torch.equal(a.q, b.q) for a, b in zip(*runs, strict=True))


# --- what capturing leaves alone ------------------------------------------------------


class Stop(BaseException):
    pass


def test_capturing_changes_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The logits are those of a run without capture; hooks and modes are gone, also on an
    error."""
    model, passed = opened("gemma2", tmp_path), text("left")
    before = model(**passed).logits
    with pytest.raises(MeasurementError, match="failed on its inputs: Stop"):
        capture(model, passed, Mock(side_effect=Stop), source="")
    assert not _get_current_function_mode_stack()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()
    assert torch.equal(Run(model, "gemma2", passed).logits, before)
    assert torch.equal(model(**passed).logits, before)


class TwoModels(nn.Module):
    """Two models of transformers in a module written by hand; the second one has a soft
    cap, and does not support SDPA."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = models.llama().model, models.gemma2().model

    def forward(self, input_ids: Tensor) -> Tensor:
        states = self.first(input_ids).last_hidden_state
        out: Tensor = self.second(inputs_embeds=states).last_hidden_state
        return out


def test_every_model_of_transformers_in_a_module_is_met_and_left_as_it_was() -> None:
    """The second one's attention was by hand to numdev, or stayed numdev's afterwards."""
    model = TwoModels().eval()
    configs = [part.config for part in (model.first, model.second)]
    before = [config._attn_implementation for config in configs]
    calls = cases_of(model, text())
    assert [case.softcap for case in calls] == [None, None, 0.5, 0.5]
    assert [config._attn_implementation for config in configs] == before


def test_what_runs_while_a_call_is_handled_is_not_captured(tmp_path: Path) -> None:
    """`on_call` may call SDPA, or run another model, whose soft cap is applied all the
    same."""
    model, inside, seen = opened("gemma2", tmp_path), [], []

    def measure(case: AttentionCase) -> None:
        F.scaled_dot_product_attention(case.q, case.k, case.v)
        inside.append(model(**text()).logits)
        seen.append(case.ref.case)

    calls, drawn = capture(models.Attending("sdpa"), text(), measure, source="")
    assert (calls, drawn, seen) == (1, (), ["attn#0"])
    assert torch.equal(inside[0], model(**text()).logits)


def test_a_run_is_gone_through_item_by_item() -> None:
    """One side runs at a time; an error comes out where it is waited for; leaving early
    ends it."""
    events: list[str] = []

    def run(hand_over: Callable[[int], None]) -> None:
        try:
            for i in range(3):
                events.append(f"made {i}")
                hand_over(i)
            raise Stop
        finally:
            events.append("ended")

    def meet_all() -> None:
        for i in items_from_run(run):
            events.extend([f"met {i}"])

    with pytest.raises(Stop):
        meet_all()
    assert events == [f"{what} {i}" for i in range(3) for what in ("made", "met")] + [
        "ended"
    ]
    events.clear()
    items = items_from_run(run)
    next(items)
    items.close()
    assert events == ["made 0", "ended"]


class Calling(nn.Module):
    """A module that makes q, k and v, [2, 2, tokens, 4], and attends with `call`, whose
    output is in `out`."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.call = nn.Linear(8, 24), call

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        self.out = self.call(q, k, v)
        return self.out


def called(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Any, AttentionCase]:
    """The module that attends with `call`, after its run, and the case of its one SDPA
    call."""
    model = Calling(call).eval()
    (case,) = cases_of(model, {"x": normal(2, 6, 8).float()})
    return model, case


@pytest.mark.parametrize(("bias", "offset"), [
    (causal_upper_left(6, 6), 0), (causal_lower_right(6, 6), 0),
    (causal_upper_left(3, 6), 0), (causal_lower_right(3, 6), 3),
])  # fmt: skip
def test_a_bias_for_causality_is_a_flag_and_an_offset(
    bias: CausalBias, offset: int
) -> None:
    """PyTorch's own bias holds no numbers to add: SDPA reads its variant and lengths."""
    model, case = called(
        lambda q, k, v: F.scaled_dot_product_attention(
            q[:, :, : bias.seq_len_q], k, v, bias
        )
    )
    assert (case.mask, case.is_causal, case.causal_offset) == (None, True, offset)
    assert worst(attend(case), model.out.double()) < 1e-6


def test_a_call_is_in_the_dtype_of_autocast() -> None:
    """As SDPA gets it, and so with an additive mask; not where autocast is off."""
    added = normal(6, 6).float()
    with torch.autocast("cpu", torch.bfloat16):
        model, case = called(
            lambda q, k, v: F.scaled_dot_product_attention(q.float(), k, v, added)
        )
    assert case.mask is not None
    assert {x.dtype for x in (case.q, case.k, case.v, case.mask)} == {torch.bfloat16}
    assert model.out.dtype == torch.bfloat16
    assert worst(attend(case), model.out.double()) < 2.0**-7
    off = torch.autocast("cpu", enabled=False)
    _, case = called(off(F.scaled_dot_product_attention))
    assert case.q.dtype == torch.float32


@pytest.mark.parametrize("call", [
    torch.func.vmap(lambda *qkv: F.scaled_dot_product_attention(*(x[None] for x in qkv))),
    lambda *qkv: F.scaled_dot_product_attention(*(
        torch.nested.nested_tensor([*x.transpose(1, 2)], layout=torch.jagged)
        .transpose(1, 2) for x in qkv
    )),
])  # fmt: skip
def test_tensors_that_hide_an_axis_are_refused(call: Any) -> None:
    """In one line, about them: neither the inputs are to blame nor the arithmetic of
    their lengths."""
    with pytest.raises(MeasurementError, match=r"Calling: attends over nested tensors"):
        called(call)


# --- what cannot be captured ----------------------------------------------------------


BY_HAND = nn.Sequential(
    models.Attending("sdpa"), models.Attending.Layer("softmax", 16, 2)
)


@pytest.mark.parametrize(("model", "says"), [
    (models.Attending("softmax"), "not seen in attn;"), (BY_HAND, "not seen in 1;"),
    (models.Attending("sdpa", "softmax"), "not seen in attn;"),
    (models.Attending("sdpa", "aten"), "not seen in attn;"),
    (nn.Sequential(nn.Embedding(96, 4)), "no attention call"),
    (models.Attending("dropout"), r"attn: attention with dropout 0\.1"),
])  # fmt: skip
def test_attention_that_is_not_seen_or_has_no_one_answer_is_an_error(
    model: Any, says: str
) -> None:
    """A shorter report is not an answer: every run of a layer must have made a call."""
    name = "input" if isinstance(model, nn.Sequential) else "input_ids"
    with pytest.raises(MeasurementError, match=says):
        cases_of(model, {name: IDS})


def by_softmax(scores: Tensor) -> Tensor:
    return F.dropout(scores.softmax(-1, dtype=torch.float64), 0.1, training=False)


def by_exponential(scores: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("weigh", [by_softmax, by_exponential])
@pytest.mark.parametrize("multiply", [
    torch.matmul, torch.Tensor.__matmul__,
    lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, (2, 2)),
    lambda a, b: torch.einsum("bhij,bhjk->bhik", a, b),
])  # fmt: skip
def test_attention_by_hand_is_noticed_by_what_it_computes(
    weigh: Any, multiply: Any
) -> None:
    """In a module with no name of a projection, that also makes a call, beside another
    that makes one."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = multiply(q, k.transpose(-1, -2)) * 0.5
        scores += torch.full(scores.shape[-2:], -math.inf).triu(1)
        weights = weigh(torch.cat([scores, scores], dim=-1))[..., : k.shape[2]]
        seen = F.scaled_dot_product_attention(q, k, v)
        return (seen + multiply(weights.to(v.dtype), v)).transpose(1, 2).flatten(2)

    model = nn.Sequential(Calling(call), Calling(F.scaled_dot_product_attention))
    with pytest.raises(MeasurementError, match="not seen in 0;"):
        cases_of(model.eval(), {"input": normal(2, 6, 8).float()})


def flex(q: Tensor, k: Tensor, v: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # loads the compiler

    return flex_attention(q, k, v)


@pytest.mark.parametrize("operator", [
    flex, torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
])  # fmt: skip
def test_another_operator_that_attends_is_noticed_by_its_name(operator: Any) -> None:
    """In a module that also makes a call, beside another that makes one. A report lacked
    a layer of FlexAttention silently."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = operator(q, k, v)
        out = out if isinstance(out, Tensor) else out[0]
        seen = F.scaled_dot_product_attention(q, k, v)
        return (seen + out).transpose(1, 2).flatten(2)

    model = nn.Sequential(Calling(call), Calling(F.scaled_dot_product_attention))
    with pytest.raises(MeasurementError, match="not seen in 0;"):
        cases_of(model.eval(), {"input": normal(2, 6, 8).float()})


class ByCall(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


class ByProducts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(torch.matmul(x, x.mT), dim=-1), x)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.softmax(x, dim=-1)


@pytest.mark.parametrize("part", [ByCall, ByProducts, Gate])
def test_a_module_of_torchscript_that_attends_is_named(part: type[nn.Module]) -> None:
    """It takes no hook and its calls are not met: its code says whether it attends."""
    attending = Calling(F.scaled_dot_product_attention)
    model = nn.Sequential(torch.jit.script(part()), attending).eval()
    passed = {"input": normal(2, 6, 8).float()}
    if part is Gate:
        assert len(cases_of(model, passed)) == 1
    else:
        with pytest.raises(MeasurementError, match="not seen in 0;"):
            cases_of(model, passed)


def test_a_softmax_that_weighs_no_product_is_no_attention() -> None:
    """A router of experts, experts in one product of matrices, an expectation over bins,
    and gates."""
    experts, bins = nn.Parameter(normal(2, 4, 4).float()), torch.arange(8.0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = torch.bmm(q.flatten(0, 1), experts.repeat(2, 1, 1)).view_as(q)
        k = k * (q @ experts[0]).softmax(-1)
        depth = v.repeat(1, 1, 1, 2).softmax(-1) @ bins
        return F.scaled_dot_product_attention(q, k * depth[..., None].exp(), v)

    _, case = called(call)
    assert case.q.shape == (2, 2, 6, 4)


def test_every_run_of_a_layer_must_make_a_call() -> None:
    """A layer that is run twice makes two calls."""
    twice = cases_of(models.Attending("sdpa", "sdpa"), text())
    assert [c.ref.case for c in twice] == ["attn#0", "attn#1"]


def test_an_unknown_argument_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Nothing a model passes to its attention is dropped silently."""
    with pytest.raises(
        MeasurementError, match=r"LlamaAttention .* does not know: tree_bias"
    ):
        cases_of(opened("llama", tmp_path), {**text(), "tree_bias": torch.zeros(1)})


def test_an_argument_of_the_models_head_is_none_of_attentions(tmp_path: Path) -> None:
    """LLaVA-OneVision passes every argument on, and each layer passes it to attention."""
    passed = {**text(), "logits_to_keep": torch.zeros(1)}
    assert len(cases_of(opened("bert", tmp_path), passed)) == 2


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
    model = opened(name, tmp_path)
    model.get_submodule(attention_modules(model)[layer]).sliding_window = size
    with pytest.raises(MeasurementError, match=f"passes a window of {size}"):
        cases_of(model, text(padding))


def test_inputs_that_do_not_fit_are_an_error_in_one_line(tmp_path: Path) -> None:
    """What the model raises on them is passed on as a message."""
    with pytest.raises(
        MeasurementError, match="ViTForImageClassification: failed on"
    ) as caught:
        cases_of(opened("vit", tmp_path), {"pixel_values": torch.zeros(1, 3, 16, 16)})
    assert "\n" not in str(caught.value)


def test_a_layer_without_a_softmax_is_named_and_refuses_no_model() -> None:
    """A linear attention with projections of its own; by its layer, where names have
    numbers."""

    class LinearAttention(models.Attending.Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q_proj(x).exp(), self.k_proj(x).exp(), self.v_proj(x)
            scores = (
                torch.softmax(q @ k.mT, -1)
                if self.how == "softmax"
                else (q @ k.mT).tril()
            )
            return scores @ v

    layers = nn.ModuleList(
        [LinearAttention("linear", 16, 2), models.Attending.Layer("sdpa", 16, 2)]
    )
    model = nn.Sequential(nn.Embedding(96, 16), *layers)
    assert [case.ref.case for case in cases_of(model, {"input": IDS})] == ["2#0"]
    assert mixers_in_words(unaudited_modules(model)) == "layer 1 (LinearAttention)"
    layers[0].how = "softmax"
    with pytest.raises(Unseen, match="not seen in 1;"):
        cases_of(model, {"input": IDS})


@pytest.mark.parametrize(("name", "others"), [
    ("minimax", "layer 0 (MiniMaxLightningAttention)"),
    ("recurrent_gemma", "layer 0 (RecurrentGemmaRecurrentBlock)"),
    ("mamba2", "layers 0, 1 (Mamba2Mixer)"),
    *((n, "") for n in ("llama", "gpt2", "t5_seq2seq", "wav2vec2", "whisper", "clip", "roformer")),
])  # fmt: skip
def test_what_mixes_tokens_without_a_softmax_is_known(name: str, others: str) -> None:
    assert mixers_in_words(unaudited_modules(models.build(name))) == others


@pytest.mark.parametrize(("module", "mixes"), [
    ("mamba", True), ("models.mamba", True), ("transformers.models.mamba.modeling_mamba", False),
])  # fmt: skip
def test_only_a_family_of_transformers_is_taken_off_a_name(
    module: str, mixes: bool
) -> None:
    """A class of another module has its whole name, that of the module too."""

    class Mamba(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(2, 2)

    Mamba.__module__ = module
    assert is_mixer(Mamba()) is mixes


def test_projections_of_a_part_are_those_of_what_attends() -> None:
    """As where a module's query, key and value are made by a module inside it."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = models.Attending.Layer("none", 16, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x)[:, None] for part in self.maker.children())
            self.maker(x)
            return F.scaled_dot_product_attention(q, k, v)

    outer = Outer()
    outer.maker.forward = lambda x: x
    model = nn.Sequential(nn.Embedding(96, 16), outer)
    assert attention_modules(model) == ["1.maker"]
    assert [case.ref.case for case in cases_of(model, {"input": IDS})] == ["1#0"]


def test_blocks_of_keys_that_a_model_chooses_are_a_mask() -> None:
    """By their numbers, for each group of heads; what is below 0 is none."""
    module = nn.Module()
    module.indexer = Mock(block_size=2)
    query, key = normal(1, 4, 3, 8), normal(1, 2, 5, 8)
    blocks = torch.tensor([[[[0, -1], [2, 1], [1, -1]], [[1, 0], [-1, -1], [2, 2]]]])
    shown = chosen_keys(module, query, key, blocks, blocks=True)
    table = [
        [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0]],
        [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
    ]
    assert shown.int().tolist() == [[table[0], table[0], table[1], table[1]]]


@pytest.mark.parametrize(("children", "owns"), [
    *[(n, True) for n in ("q_proj k_proj v_proj o_proj", "query key value", "Wqkv Wo")],
    *[(n, True) for n in ("c_attn", "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj")],
    ("q_proj k_proj v_proj dt_proj", True),  # an attention that decays by its values
    *[(n, False) for n in ("q_norm k_norm v_norm", "in_proj conv1d out_proj")],
    *[(n, False) for n in ("q_proj k_proj v_proj q_conv1d", "receptance key value")],
])  # fmt: skip
def test_projections_are_known_by_their_names(children: str, owns: bool) -> None:
    module = nn.Module()
    for child in children.split():
        module.add_module(child, nn.Linear(1, 1))
    assert attention_modules(module) == ([""] if owns else [])


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    """`--layers 1,99` audits layer 1, and says once that there is no layer 99."""
    small: dict[str, Any] = {
        "length": 16,
        "sequences": 1,
        "device": "cpu",
        "reproducers": 0,
    }
    demo = {
        "target": "demo",
        "checkpoint": "demo",
        "kernels": (Choice(name="sdpa-math"),),
    }
    request = AuditRequest(**demo, **small, layers=(1, 99))
    notes: list[str] = []
    assert {row.layer for row in audit(request, tmp_path, say=notes.append).rows} == {1}
    assert sum("no attention call in layers 99" in line for line in notes) == 1


# --- PyTorch's own attention modules --------------------------------------------------
# The oracle is the module itself: its output is the projection of what the captured case
# computes.

PAIR, ROW, E, HEADS = 2, 5, 16, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(ROW, dtype=torch.float64)
PADDED = torch.tensor([[False] * ROW, [False] * 3 + [True] * 2])


class One(nn.Module):
    """A multi-head attention, called as `call` says."""

    def __init__(self, call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call or {}
        self.mha = nn.MultiheadAttention(
            E, HEADS, **{"batch_first": True, **options}
        ).double()
        for p in self.mha.parameters():  # biases start at zero, which hides a lost one
            nn.init.normal_(p, std=0.5)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        self.answer = self.mha(x, x, x, **self.call)
        return self.answer


def agrees_projected(model: One) -> None:
    """The module's one call, projected, is its output in a run of its own, and while
    captured."""
    x = normal(PAIR, ROW, E) if model.mha.batch_first else normal(ROW, PAIR, E)
    with torch.no_grad():
        output = model(x)
    cases: list[AttentionCase] = []
    capture(model, {"x": x}, cases.append, source="")
    assert [case.ref.module for case in cases] == ["mha"]
    batch_first = output[0] if model.mha.batch_first else output[0].transpose(0, 1)
    for answer in (attend(cases[0]), find("reference").attend(cases[0]).out):
        assert worst(projected(model, answer), batch_first) < TOLERANCE
    assert worst(model.answer[0], output[0]) < TOLERANCE
    needs = model.call.get("need_weights", True)
    assert (model.answer[1] is not None) == (output[1] is not None) == needs
    if needs:
        assert worst(model.answer[1], output[1]) < TOLERANCE


def projected(model: One, answer: Tensor) -> Tensor:
    """What the module makes of an attention's output: [batch, length, width]."""
    return model.mha.out_proj(answer.transpose(1, 2).flatten(2)).detach()


def mask_of(kind: str) -> Tensor:
    """True hides, as these modules have it; each row sees something."""
    hidden = torch.zeros(ROW, ROW, dtype=torch.bool)
    hidden[0, 1:] = hidden[3, :2] = hidden[4, 4] = True
    if kind == "float":
        return torch.where(hidden, -math.inf, normal(ROW, ROW, seed=9))
    if kind == "3d":
        return hidden.repeat(PAIR * HEADS, 1, 1) & (
            normal(PAIR * HEADS, ROW, 1, seed=4) > 0
        )
    return hidden


@pytest.mark.parametrize("needs_weights", [True, False])
def test_an_answer_is_the_modules_own(needs_weights: bool) -> None:
    """Also where it asks for weights, which is its default, and then multiplies by hand:
    else a kernel that returns zeros would change no model."""
    model, x = One({"need_weights": needs_weights}), normal(PAIR, ROW, E)
    zeros: Any = lambda case: torch.zeros_like(case.q)  # noqa: E731
    with torch.no_grad():
        usual, weights = model(x)
        output, kept_weights = run_with_answers(model, lambda: model(x), zeros)
    assert torch.equal(output, model.mha.out_proj.bias.expand_as(output))
    assert not torch.equal(output, usual)
    assert (kept_weights is None) == (weights is None) == (not needs_weights)


MASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bool mask": {"attn_mask": mask_of("bool")},
    "float mask": {"attn_mask": mask_of("float")},
    "mask of every head": {"attn_mask": mask_of("3d")},
    "padding": {"key_padding_mask": PADDED},
    "padding and mask": {"key_padding_mask": PADDED, "attn_mask": mask_of("bool")},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal and padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask":
        torch.where(PADDED, -math.inf, 0.0).double()},
}  # fmt: skip
OPTIONS = [{}, {"batch_first": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("call", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("options", [*OPTIONS, {"bias": False}], ids=str)
def test_the_case_is_the_modules_own_attention(
    options: Any, call: Any, need_weights: bool
) -> None:
    """Every kind of mask, with every option, with and without the weights asked for."""
    agrees_projected(One({**call, "need_weights": need_weights}, **options))


def test_a_hint_that_belies_its_mask_is_taken_as_the_module_takes_it() -> None:
    """The module with weights applies the mask, whatever the hint says, and so does the
    case."""
    agrees_projected(
        One({"attn_mask": mask_of("bool"), "is_causal": True, "need_weights": True})
    )


class Layers(nn.Module):
    """A stack of encoder layers, as a model of one's own has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            E, HEADS, 32, **{"batch_first": True, **options}
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.double().eval()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(
    "options", [{}, {"batch_first": False}, {"norm_first": True}], ids=str
)
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_an_encoder_makes_a_call_for_every_layer(
    options: dict[str, Any], padding: bool
) -> None:
    """In eval mode, where it would take its fast path and make none."""
    model, x = Layers(**options), normal(PAIR, ROW, E)
    passed = {"x": x if options.get("batch_first", True) else x.transpose(0, 1)}
    if padding:
        passed["padding"] = PADDED
    cases: list[AttentionCase] = []
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda *call: outputs.append(call[2]))
    capture(model, passed, cases.append, source="")
    assert [c.ref.module for c in cases] == [
        f"encoder.layers.{i}.self_attn" for i in (0, 1)
    ]
    assert [c.ref.layer for c in cases] == [0, 1]
    assert all((c.mask is not None) == padding for c in cases)
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        output = model(**passed)
    torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(outputs[0], output)


def test_nothing_of_torch_is_changed() -> None:
    """Neither the function nor the fast path, also after an error in the middle."""
    sdpa, whole = F.scaled_dot_product_attention, F.multi_head_attention_forward
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            with pytest.raises(MeasurementError, match="failed on its inputs: Stop"):
                capture(
                    Layers(),
                    {"x": normal(PAIR, ROW, E)},
                    Mock(side_effect=Stop),
                    source="",
                )
            assert torch.backends.mha.get_fastpath_enabled() == enabled
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert F.scaled_dot_product_attention is sdpa
    assert F.multi_head_attention_forward is whole
    assert whole.__globals__["scaled_dot_product_attention"] is sdpa
