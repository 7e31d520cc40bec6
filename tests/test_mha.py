"""PyTorch's own attention modules: their inner call is captured as they make it.

The oracle is the module itself without capturing: its output is the output projection of what the
captured case computes, answered by the few lines of `capturing.run.attend` in fp64.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import TOLERANCE, attend, worst
from torch import Tensor, nn

from numdev.cases import AttentionCase
from numdev.kernels import find
from numdev.sources.capture import capture

B, N, E, HEADS = 2, 5, 16, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
PADDED = torch.tensor([[False] * N, [False] * 3 + [True] * 2])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class One(nn.Module):
    """A multi-head attention, called as `call` says."""

    def __init__(self, call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call or {}
        self.mha = nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **options}).double()
        for p in self.mha.parameters():  # biases start at zero, which hides a lost one
            nn.init.normal_(p, std=0.5)
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        self.answer = self.mha(x, x, x, **self.call)
        return self.answer


def agrees(model: One) -> None:
    """The module's one call as a case gives, projected, its output in a run of its own; and its
    output while captured is that too."""
    x = normal(B, N, E) if model.mha.batch_first else normal(N, B, E)
    with torch.no_grad():
        own = model(x)
    cases: list[AttentionCase] = []
    capture(model, {"x": x}, cases.append, source="")
    assert [case.ref.module for case in cases] == ["mha"]
    batch_first = own[0] if model.mha.batch_first else own[0].transpose(0, 1)
    for answer in (attend(cases[0]), find("reference").attend(cases[0]).out):
        assert worst(projected(model, answer), batch_first) < TOLERANCE
    assert worst(model.answer[0], own[0]) < TOLERANCE
    needs = model.call.get("need_weights", True)
    assert (model.answer[1] is not None) == (own[1] is not None) == needs
    if needs:
        assert worst(model.answer[1], own[1]) < TOLERANCE


def projected(model: One, answer: Tensor) -> Tensor:
    """What the module makes of an attention's output: [batch, length, width]."""
    return model.mha.out_proj(answer.transpose(1, 2).flatten(2)).detach()


def mask_of(kind: str) -> Tensor:
    """True hides, as these modules have it; each row sees something."""
    hidden = torch.zeros(N, N, dtype=torch.bool)
    hidden[0, 1:] = hidden[3, :2] = hidden[4, 4] = True
    if kind == "float":
        return torch.where(hidden, -math.inf, normal(N, N, seed=9))
    if kind == "3d":
        return hidden.repeat(B * HEADS, 1, 1) & (normal(B * HEADS, N, 1, seed=4) > 0)
    return hidden


CALLS: dict[str, dict[str, Any]] = {
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
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", [*OPTIONS, {"bias": False}], ids=str)
def test_the_case_is_the_modules_own_attention(
    options: dict[str, Any], call: dict[str, Any], need_weights: bool
) -> None:
    """Every kind of mask, with every option, with and without the weights asked for."""
    agrees(One({**call, "need_weights": need_weights}, **options))


def test_a_hint_that_belies_its_mask_is_taken_as_the_module_takes_it() -> None:
    """The module with weights applies the mask, whatever the hint says, and so does the case."""
    agrees(One({"attn_mask": mask_of("bool"), "is_causal": True, "need_weights": True}))


class Layers(nn.Module):
    """A stack of encoder layers, as a model of one's own has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(E, HEADS, 32, **{"batch_first": True, **options})
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.double().eval()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"norm_first": True}], ids=str)
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
def test_an_encoder_makes_a_call_for_every_layer(options: dict[str, Any], padding: bool) -> None:
    """In eval mode, where it would take its fast path and make none."""
    model, x = Layers(**options), normal(B, N, E)
    given = {"x": x if options.get("batch_first", True) else x.transpose(0, 1)}
    if padding:
        given["padding"] = PADDED
    cases: list[AttentionCase] = []
    outputs: list[Tensor] = []
    model.register_forward_hook(lambda *call: outputs.append(call[2]))
    capture(model, given, cases.append, source="")
    assert [c.ref.module for c in cases] == [f"encoder.layers.{i}.self_attn" for i in (0, 1)]
    assert [c.ref.layer for c in cases] == [0, 1]
    assert all((c.mask is not None) == padding for c in cases)
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        own = model(**given)
    torch.backends.mha.set_fastpath_enabled(True)
    assert torch.equal(outputs[0], own)


def test_nothing_of_torch_is_changed() -> None:
    """Neither the function nor the fast path, also after an error in the middle."""

    class Stop(BaseException):
        pass

    def stop(case: AttentionCase) -> None:
        raise Stop

    sdpa, whole = F.scaled_dot_product_attention, F.multi_head_attention_forward
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            with pytest.raises(Stop):
                capture(Layers(), {"x": normal(B, N, E)}, stop, source="")
            assert torch.backends.mha.get_fastpath_enabled() == enabled
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert F.scaled_dot_product_attention is sdpa
    assert F.multi_head_attention_forward is whole
    assert whole.__globals__["scaled_dot_product_attention"] is sdpa
