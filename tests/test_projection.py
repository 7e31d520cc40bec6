"""Where queries come from: dQ pulled back to W_Q's output, outer what W_Q reads, is dW_Q.

The oracle is an ordinary training step: parameters that learn, `loss.backward()`, and the gradient
that W_Q's parameter then has; dQ is what autograd leaves at the query of each SDPA call. It knows
nothing of numdev. Models are in fp64 but for transformers' own casts (rotary angles, losses from
fp32 logits, norms computed in fp32), which both sides go through, so that they agree to 1e-6 of the
largest element: ten roundings to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.sources.capture import attention_implementation, capture
from numdev.sources.loss import find_upstream
from numdev.sources.projection import Projection, Projections

TOLERANCE = 1e-6
IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(5))


def trained(model: nn.Module, inputs: dict[str, Tensor], monkeypatch: Any) -> list[Tensor]:
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
    grads = [q.grad for q in queries]
    assert all(g is not None for g in grads)
    return [g for g in grads if g is not None]


def captured(
    model: nn.Module, inputs: dict[str, Tensor], *, drawn: bool = False
) -> list[tuple[AttentionCase, Projection]]:
    """Every call of a capture, with its projection. `drawn`: without the model's loss, so that
    cases are handed over in the middle of the forward pass."""
    found = []
    projections = Projections()
    upstream = None if drawn else find_upstream(model, inputs, seed=0)

    def on_call(case: AttentionCase) -> None:
        found.append((case, projections.of(case)))

    capture(model, inputs, on_call, source="test", upstream=upstream, on_met=projections.met)
    return found


def dw_q(projection: Projection, dq: Tensor) -> Tensor:
    """[heads * head_dim, width]."""
    pulled = projection.pull(dq.double()).flatten(2)
    return torch.einsum("bto,btw->ow", pulled, projection.x)


def agrees(a: Tensor, b: Tensor) -> bool:
    """Whether the largest difference is small beside the largest element of b."""
    assert a.shape == b.shape
    error = (a.double() - b.double()).abs().max() / b.double().abs().max()
    return bool(error < TOLERANCE)


def of_rows(name: str) -> Callable[[nn.Module, int], tuple[Tensor, Tensor]]:
    """A W_Q that is a parameter of its own, and its gradient."""

    def read(model: nn.Module, layer: int) -> tuple[Tensor, Tensor]:
        weight = model.get_parameter(name.format(layer))
        assert weight.grad is not None
        return weight.detach(), weight.grad

    return read


def of_gpt2(model: nn.Module, layer: int) -> tuple[Tensor, Tensor]:
    """The first third of the columns of c_attn."""
    weight = model.get_parameter(f"transformer.h.{layer}.attn.c_attn.weight")
    assert weight.grad is not None
    return weight.detach()[:, :32].mT, weight.grad[:, :32].mT


def of_neox(model: nn.Module, layer: int) -> tuple[Tensor, Tensor]:
    """Of every head's 24 rows the first 8."""
    weight = model.get_parameter(f"gpt_neox.layers.{layer}.attention.query_key_value.weight")
    assert weight.grad is not None
    return tuple(x.view(4, 3, 8, 32)[:, 0].reshape(32, 32) for x in (weight.detach(), weight.grad))


LLAMA = of_rows("model.layers.{}.self_attn.q_proj.weight")
MODELS = [
    pytest.param(models.gpt2, of_gpt2, id="gpt2"),
    pytest.param(models.llama, LLAMA, id="llama"),
    pytest.param(
        models.bert, of_rows("bert.encoder.layer.{}.attention.self.query.weight"), id="bert"
    ),
    pytest.param(models.qwen3, LLAMA, id="qwen3"),
    pytest.param(models.olmo2, LLAMA, id="olmo2"),
    pytest.param(models.gpt_neox, of_neox, id="gpt_neox"),
]


def built(
    make: Callable[[], Any], dtype: torch.dtype = torch.float64
) -> tuple[Any, dict[str, Any]]:
    model = make().to(dtype)
    model.set_attn_implementation(attention_implementation(type(model)))
    return model, {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize(("make", "weight"), MODELS)
def test_dw_q_is_that_of_a_training_step(
    make: Callable[[], Any], weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summed over tokens, pull(dQ) outer x is the gradient of W_Q, for every layer."""
    model, inputs = built(make)
    calls = captured(model, inputs)
    grads = trained(model, inputs, monkeypatch)
    assert len(calls) == len(grads) == 2
    for layer, ((case, projection), dq) in enumerate(zip(calls, grads, strict=True)):
        W, dW = weight(model, layer)
        assert projection.weight.dtype == projection.x.dtype == torch.float64
        assert torch.equal(projection.weight, W)
        assert projection.pull(dq).shape == (2, 12, case.heads, case.q.shape[3])
        assert agrees(dw_q(projection, dq), dW)


def test_a_model_is_left_as_it_was() -> None:
    """No hook stays, no parameter changes its place or takes gradients it did not."""
    model, inputs = built(models.llama)
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    captured(model, inputs)
    assert {n: (p.data_ptr(), p.requires_grad) for n, p in model.named_parameters()} == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Low(nn.Module):
    """Queries of a linear layer and of two of low rank beside it, as an adapter adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.down, self.up = nn.Linear(16, 2), nn.Linear(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x) + self.up(self.down(x))
        heads = [
            y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (q, self.k_proj(x), self.v_proj(x))
        ]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class Restless(models.Attending.Layer):
    """Does not compute the same twice."""

    def forward(self, x: Tensor) -> Tensor:
        self.ran = getattr(self, "ran", 0) + 1
        return super().forward(x * self.ran)


class Around(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(96, 16), attention

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.attention(self.embed(input_ids))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Around(Low()), "2 linear layers (q_proj, up)"),
        (Around(Restless("sdpa", 16, 2)), "makes other queries when it is run again"),
        (
            nn.Sequential(
                nn.Embedding(96, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            ),
            "0 linear layers",
        ),
    ],
)
def test_where_there_is_no_projection(model: nn.Module, says: str) -> None:
    """Queries that are not one linear layer's, or not the same ones again, have no projection, and
    the reason names the call."""
    inputs = {"input": IDS} if isinstance(model, nn.Sequential) else {"input_ids": IDS}
    with pytest.raises(MeasurementError) as raised:
        captured(model.double().eval(), inputs, drawn=True)
    assert says in str(raised.value)
