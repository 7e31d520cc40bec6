"""Upstream gradients out of a running model are autograd's own, or said to be drawn.

The oracle is an ordinary training step: eager attention in fp64, parameters that learn,
and the gradient at the input of the attention's output layer. transformers computes
losses from fp32 logits, so gradients agree to 1e-5; models written here to 1e-12."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from capturing import OUT, DoubleSoftmax, eager, merged, opened
from torch import Tensor, nn

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError
from numdev.sources.capture import attention_implementation, capture
from numdev.sources.query_projection import Projection, Projections
from numdev.sources.upstream_gradients import (
    LANGUAGE,
    MODEL_LOSS,
    Upstream,
    find_upstream,
    with_drawn_gradient,
)

B, N = 2, 8
FP32, FP64 = 1e-5, 1e-12
TRAINED = ("gpt2", "llama", "bert", "falcon", "gemma2", "gpt_oss", "t5_seq2seq", "bart")
DECODERS = ("t5_seq2seq", "bart")


def text(padding: bool = False) -> dict[str, Tensor]:
    """Two sequences of 8 tokens, the second 5 long with padding."""
    ids = torch.randint(3, 96, (B, N), generator=torch.Generator().manual_seed(1))
    if not padding:
        return {"input_ids": ids}
    mask = torch.ones(B, N, dtype=torch.int64)
    mask[1, 5:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def task(name: str, padding: bool) -> tuple[dict[str, Tensor], Tensor]:
    """What a model reads, and its labels: -100 where there is none, a decoder's last
    too."""
    passed = text(padding)
    labels = passed["input_ids"].clone()
    if padding:
        labels[passed["attention_mask"] == 0] = -100
    if name in DECODERS:
        labels[:, -1] = -100
        for part, first in (("input_ids", 2), ("attention_mask", 1)):
            if part in passed:
                start = torch.full((B, 1), first)
                passed[f"decoder_{part}"] = torch.cat(
                    [start, passed[part][:, :-1]], dim=1
                )
    return passed, labels


def trained(
    model: nn.Module,
    passed: dict[str, Tensor],
    out: str | tuple[str, ...],
    loss: Callable[..., Any],
) -> list[Tensor]:
    """The gradients at the attentions' outputs, [batch, length, width], of one training
    step."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        outputs.append(args[0])

    hooks = [
        m.register_forward_pre_hook(keep)
        for name, m in model.named_modules()
        if name.endswith(out)
    ]
    with DoubleSoftmax():
        loss(model(**passed)).backward()
    for hook in hooks:
        hook.remove()
    return [x.grad for x in outputs]


def handed_over(
    model: nn.Module, passed: dict[str, Tensor], seed: int = 0
) -> tuple[list[AttentionCase], tuple[str, ...], Upstream]:
    cases: list[AttentionCase] = []
    upstream = find_upstream(model, passed, seed)
    calls, drawn = capture(model, passed, cases.append, source="", upstream=upstream)
    assert calls == len(cases)
    return cases, drawn, upstream


def distance(case: AttentionCase, by_autograd: Tensor) -> float:
    return (
        (merged(case.grad_out).double() - by_autograd).norm() / by_autograd.norm()
    ).item()


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_a_training_step(
    name: str, padding: bool, tmp_path: Path
) -> None:
    """Of language models of every kind, padded or not, every call's grad_out is
    autograd's."""
    model = opened(name, tmp_path)
    passed, labels = task(name, padding)
    by_autograd = trained(
        eager(name, tmp_path),
        {**passed, "labels": labels},
        OUT[name],
        lambda answer: answer.loss,
    )
    cases, drawn, upstream = handed_over(model, passed)
    assert upstream.loss == LANGUAGE
    assert torch.equal(upstream.arguments["labels"], labels)
    assert drawn == ()
    for case, gradient in zip(cases, by_autograd, strict=True):
        assert (case.grad_out_from, case.grad_out.dtype) == (LANGUAGE, torch.float64)
        assert distance(case, gradient) < FP32
        assert not any(x.requires_grad for x in (case.q, case.k, case.v, case.grad_out))


class Scored(nn.Module):
    """A hand-written attention and a loss; `how` the loss comes back, and what else
    happens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed = nn.Embedding(96, 16)
        self.first, self.second = (models.Attending.Layer("sdpa", 16, 2) for _ in "ab")

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        with torch.set_grad_enabled(self.how != "no_grad" and torch.is_grad_enabled()):
            y = self.first(x)
            if self.how == "in_place":
                y.mul_(3.0)
            x = x if self.how == "unused" else x + y
        x = x + self.second(x)
        loss = (x**3).mean()
        if self.how == "nan":
            loss = loss * math.nan
        shapes = {
            "dict": {"loss": loss},
            "tuple": (x, loss),
            "none": x,
            "list": [x, x.sum(), loss],
        }
        return shapes.get(self.how, loss)


def test_an_output_that_is_overwritten_keeps_its_own_gradient() -> None:
    """The gradient is that of the attention's output, three times that of what it
    became."""
    model = Scored("in_place").double()
    cases, drawn, _ = handed_over(model, text())
    assert drawn == ()
    x = model.embed(text()["input_ids"]).detach()
    o = model.first(x).detach().requires_grad_()
    y = x + 3 * o
    ((y + model.second(y)) ** 3).mean().backward()
    assert distance(cases[0], o.grad) < FP64


@pytest.mark.parametrize("how", ["no_grad", "unused"])
def test_a_call_the_loss_does_not_reach_is_not_lost(how: str) -> None:
    """Its gradient is drawn and said to be; the other's is the loss's."""
    cases, drawn, _ = handed_over(Scored(how).double(), text(), seed=3)
    assert drawn == ("first#0",)
    assert [c.grad_out_from for c in cases] == ["random from N(0, 1), seed 3", MODEL_LOSS]
    assert all(c.grad_out is not None for c in cases)


@pytest.mark.parametrize(("how", "times"), [("zero", 0.0), ("overflow", math.inf)])
def test_a_gradient_of_zeros_or_that_is_not_finite_is_of_no_use(
    how: str, times: float
) -> None:
    """A contrastive loss of one pair is constant; in float16 a gradient may overflow."""

    def scaled(model: nn.Module, inputs: Any, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * times)

    model = Scored("scalar")
    model.register_forward_hook(scaled)
    cases, drawn, upstream = handed_over(model, text())
    assert upstream.loss == MODEL_LOSS
    assert drawn == ("first#0", "second#0")
    assert {c.grad_out_from for c in cases} == {"random from N(0, 1), seed 0"}


@pytest.mark.parametrize(
    ("how", "why"),
    [("none", ""), ("list", ""), ("nan", " (the model's own loss is nan)")],
)
def test_without_a_usable_loss_gradients_are_drawn(how: str, why: str) -> None:
    """No number, more than one, or none that is finite: N(0, 1) from the seed, and why is
    said."""
    model = Scored(how)
    cases, drawn, upstream = handed_over(model, text(), seed=5)
    assert upstream.loss is None
    assert upstream.describe() == "random from N(0, 1), seed 5" + why
    assert drawn == ()
    assert [c.grad_out_from for c in cases] == ["random from N(0, 1), seed 5"] * 2
    again, _, _ = handed_over(model, text(), seed=5)
    other, _, _ = handed_over(model, text(), seed=6)
    for a, b, c in zip(cases, again, other, strict=True):
        assert torch.equal(a.grad_out, b.grad_out)
        assert not torch.equal(a.grad_out, c.grad_out)
        assert a.grad_out.dtype == torch.float32
    assert not torch.equal(cases[0].grad_out, cases[1].grad_out)


def test_drawn_gradients_are_normal_and_in_the_cases_format() -> None:
    """Mean 0 and variance 1 within five standard errors; bfloat16 values for a bfloat16
    case."""
    q = torch.zeros(2, 4, 512, 16, dtype=torch.bfloat16)
    case = with_drawn_gradient(
        AttentionCase(ref=CaseRef(case="c"), q=q, k=q, v=q, scale=1.0), 0
    )
    assert case.grad_out.dtype == torch.bfloat16
    x = case.grad_out.double()
    assert abs(x.mean().item()) < 5 / math.sqrt(x.numel())
    assert abs(x.var().item() - 1) < 5 * math.sqrt(2 / x.numel())


def test_what_the_model_overwrites_is_an_error() -> None:
    """A case whose q is written to before its gradient is there would not be the call."""

    class Overwrites(Scored):
        def forward(self, input_ids: Tensor) -> Any:
            q = self.embed(input_ids).unflatten(-1, (2, 8)).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, q, q)
            q.zero_()
            return out.square().sum()

    model = Overwrites("")
    model.first = model.second = nn.Identity()
    with pytest.raises(MeasurementError, match="overwrites what it attended over"):
        handed_over(model, text())


def test_calls_are_dropped_once_handed_over(tmp_path: Path) -> None:
    """When a call comes, nothing of the earlier ones is alive, and no activation of the
    model's."""
    model = opened("llama", tmp_path, torch.float32)
    upstream = find_upstream(model, text(), 0)
    seen: list[weakref.ref[Tensor]] = []
    for name, m in model.named_modules():
        if name.endswith(("mlp", "o_proj", "lm_head")):
            m.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))

    def look(case: AttentionCase) -> None:
        gc.collect()
        assert [r for r in seen if r() is not None] == []
        seen.extend(weakref.ref(x) for x in (case.q, case.k, case.v, case.grad_out))

    capture(model, text(), look, source="", upstream=upstream)
    assert len(seen) == 8 + 5


FP32_TEN = 1e-6  # of the largest element: ten roundings to fp32
IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(5))


def stepped(
    model: nn.Module, inputs: dict[str, Tensor], monkeypatch: Any
) -> list[Tensor]:
    """One training step: dQ of every call in order, and gradients in the parameters."""
    queries: list[Tensor] = []
    original = F.scaled_dot_product_attention

    def noting(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query.retain_grad()
        queries.append(query)
        return original(query, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noting)
        model(**inputs).loss.backward()
    return [q.grad for q in queries]


def captured(
    model: nn.Module, inputs: dict[str, Tensor], *, drawn: bool = False
) -> list[tuple[AttentionCase, Projection]]:
    """Every call with its projection. `drawn`: without a loss, amid the forward pass."""
    result = []
    projections = Projections()
    upstream = None if drawn else find_upstream(model, inputs, seed=0)

    def on_call(case: AttentionCase) -> None:
        result.append((case, projections.take(case)))

    capture(
        model,
        inputs,
        on_call,
        source="test",
        upstream=upstream,
        on_met=projections.record_call,
    )
    return result


SELF_ATTN = "model.layers.{}.self_attn.q_proj"
MODELS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    **{name: (SELF_ATTN, lambda x: x) for name in ("llama", "qwen3", "olmo2")},
    "bert": ("bert.encoder.layer.{}.attention.self.query", lambda x: x),
    # The first third of the columns; of every head's 24 rows the first 8.
    "gpt2": ("transformer.h.{}.attn.c_attn", lambda x: x[:, :32].mT),
    "gpt_neox": (
        "gpt_neox.layers.{}.attention.query_key_value",
        lambda x: x.view(4, 3, 8, 32)[:, 0].reshape(32, 32),
    ),
}
"""The parameter that holds W_Q, and what of it W_Q is."""


def built(name: str) -> tuple[Any, dict[str, Any]]:
    model = models.build(name).double()
    model.set_attn_implementation(attention_implementation(type(model)))
    return model, {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("name", MODELS)
def test_dw_q_is_that_of_a_training_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summed over tokens, pull(dQ) outer x is the gradient of W_Q, and the model is as
    before."""
    model, inputs = built(name)
    before = {
        name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()
    }
    calls = captured(model, inputs)
    assert {
        n: (p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()
    } == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    grads = stepped(model, inputs, monkeypatch)
    assert len(calls) == len(grads) == 2
    at, part = MODELS[name]
    for layer, ((case, projection), dq) in enumerate(zip(calls, grads, strict=True)):
        weight = model.get_parameter(f"{at.format(layer)}.weight")
        W, dW = part(weight.detach()), part(weight.grad)
        assert projection.weight.dtype == projection.x.dtype == torch.float64
        assert torch.equal(projection.weight, W)
        pulled = projection.pull(dq.double())
        assert pulled.shape == (2, 12, case.heads, case.q.shape[3])
        ours = torch.einsum("bto,btw->ow", pulled.flatten(2), projection.x)
        assert (ours - dW).abs().max() < FP32_TEN * dW.abs().max()


class Low(nn.Module):
    """Queries of a linear layer and of two of low rank beside it, as an adapter adds
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.down, self.up = nn.Linear(16, 2), nn.Linear(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x) + self.up(self.down(x))
        heads = [
            y.unflatten(-1, (2, 8)).transpose(1, 2)
            for y in (q, self.k_proj(x), self.v_proj(x))
        ]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Restless(models.Attending.Layer):
    """Does not compute the same twice."""

    def forward(self, x: Tensor) -> Tensor:
        self.ran = getattr(self, "ran", 0) + 1
        return super().forward(x * self.ran)


@pytest.mark.parametrize(("attention", "says"), [
    (Low(), "2 linear layers (q_proj, up)"),
    (Restless("sdpa", 16, 2), "makes other queries when it is run again"),
    (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), "0 linear layers"),
])  # fmt: skip
def test_where_there_is_no_projection(attention: nn.Module, says: str) -> None:
    """Queries that are not one linear layer's, or not the same again; the reason names
    the call."""
    model = nn.Sequential(nn.Embedding(96, 16), attention).double().eval()
    with pytest.raises(MeasurementError, match=re.escape(says)):
        captured(model, {"input": IDS}, drawn=True)
