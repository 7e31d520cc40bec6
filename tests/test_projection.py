"""Where queries come from: dQ pulled back to W_Q's output, outer what W_Q reads, is dW_Q.

The oracle is an ordinary training step: `loss.backward()`, and the gradient that W_Q's parameter
then has; dQ is what autograd leaves at the query of each SDPA call. Models are in fp64 but for
transformers' own casts (rotary angles, losses from fp32 logits, norms computed in fp32), so that
both agree to 1e-6 of the largest element: ten roundings to fp32.
"""

from __future__ import annotations

import re
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
    return [q.grad for q in queries]


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
def test_dw_q_is_that_of_a_training_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed over tokens, pull(dQ) outer x is the gradient of W_Q, for every layer."""
    model, inputs = built(name)
    calls = captured(model, inputs)
    grads = trained(model, inputs, monkeypatch)
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
        assert (ours - dW).abs().max() < TOLERANCE * dW.abs().max()


def test_a_model_is_left_as_it_was() -> None:
    """No hook stays, no parameter changes its place or takes gradients it did not."""
    model, inputs = built("llama")
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
        (Around(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)), "0 linear layers"),
    ],
)
def test_where_there_is_no_projection(model: nn.Module, says: str) -> None:
    """Queries that are not one linear layer's, or not the same ones again, have no projection, and
    the reason names the call."""
    with pytest.raises(MeasurementError, match=re.escape(says)):
        captured(model.double().eval(), {"input_ids": IDS}, drawn=True)
