"""What tests of capturing hold a captured call against.

The oracle is the model itself with its eager attention in fp64, and dense attention
(`attend`). Both answers must agree to 1e-12: outputs of order 1 are sums of at most 16
terms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models
import torch
import torch.nn.functional as F
from recipes import dense
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from numdev.cases import AttentionCase
from numdev.sources.capture import capture, decode
from numdev.sources.checkpoint import open_checkpoint

TOLERANCE = 1e-12
# The last linear layer of an attention, by model: what it reads is the attention's own
# output.
OUT = {
    "gpt2": ("attn.c_proj",), "bert": ("attention.output.dense",), "t5": ("SelfAttention.o",),
    "t5_seq2seq": ("SelfAttention.o", "EncDecAttention.o"), "falcon": ("self_attention.dense",),
    "nllb_moe": ("self_attn.out_proj", "cross_attention.out_proj"),
    "splinter": ("attention.output.dense",), "modernbert": ("attn.Wo",), "vit": ("attention.o_proj",),
    **dict.fromkeys(("bart", "clip", "whisper"), ("attn.out_proj",)),
    **dict.fromkeys(
        ("llama", "gemma2", "gemma3", "gpt_oss", "mistral", "deepseek_v32", "minimax"),
        ("self_attn.o_proj",),
    ),
    "recurrent_gemma": ("temporal_block.o_proj",),
}  # fmt: skip


class Run:
    """A model run in fp64: its cases, what its attentions' output layers read, its
    logits; `eager`: by its own attention. With `generate` it writes that many tokens
    after the first."""

    def __init__(
        self, model: nn.Module, name: str, inputs: dict[str, Tensor], generate: int | None = None,
        *, eager: bool = False,
    ) -> None:  # fmt: skip
        self.cases: list[AttentionCase] = []
        self.outputs: list[Tensor] = []
        self.logits = torch.empty(0)
        hooks = [
            m.register_forward_pre_hook(
                lambda _, args: self.outputs.append(args[0].clone())
            )
            for at, m in model.named_modules()
            if at.endswith(OUT[name])
        ]
        hooks.append(
            model.register_forward_hook(lambda *call: setattr(self, "logits", call[2][0]))
        )
        if not eager:
            capture(model, inputs, self.cases.append, source="test", generate=generate)
        else:
            with torch.no_grad(), DoubleSoftmax():
                model(**inputs) if generate is None else decode(model, inputs, generate)
        for hook in hooks:
            hook.remove()


class DoubleSoftmax(TorchFunctionMode):
    """Eager attention upcasts its softmax to float32, which from fp64 is a downcast: undo
    that."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is F.softmax and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def opened(name: str, directory: Path, dtype: torch.dtype = torch.float64) -> Any:
    """A model of `models`, saved and loaded to be captured."""
    saved = models.save(models.build(name).to(dtype), directory / name)
    return open_checkpoint(saved).load_model(dtype=dtype, device="cpu")


def eager(name: str, directory: Path) -> Any:
    """The same with its eager attention, in fp64."""
    built = models.build(name).double()
    return type(built).from_pretrained(
        models.save(built, directory / name), dtype=torch.float64, local_files_only=True,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip


def attend(case: AttentionCase) -> Tensor:
    """softmax(scores) V in fp64, as the case's fields say."""
    return dense(case, *(x.double() for x in (case.q, case.k, case.v)))


def merged(x: Tensor) -> Tensor:
    """[batch, heads, length, dim] as [batch, length, width]."""
    return x.transpose(1, 2).flatten(2)


def worst(a: Tensor, b: Tensor, real: Tensor | None = None) -> float:
    """The largest difference over the rows [batch, position] that are `real`; NaN counts
    as inf."""
    assert a.shape == b.shape
    difference = (a.double() - b.double()).abs().nan_to_num(nan=math.inf)
    return (difference if real is None else difference[real]).max().item()
