"""Kernels that must not pass, each beside a sound twin, named `verdict_kernels:NAME`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase
from numdev.kernels import Refused, find
from numdev.kernels.reference import attend

FIRST: list[tuple[int, ...]] = []  # the shapes of the first call


def sound(case: AttentionCase) -> Tensor:
    return find("emulated").attend(case, preset="fa2").out


def erring(case: AttentionCase, times: float, **rounded: str) -> Tensor:
    """FlashAttention-2 with so many times its error, in float32."""
    exact = attend(case).out
    own = find("emulated").attend(case, preset="fa2", **rounded).out
    return (exact + times * (own.double() - exact)).float()


def in_float32(case: AttentionCase) -> Tensor:
    """The sound twin of the next: its output stays in float32, so that all it errs is
    scaled."""
    return erring(case, 1.0, out="float32")


def twice(case: AttentionCase) -> Tensor:
    return erring(case, 2.05, out="float32")


def six_times(case: AttentionCase) -> Tensor:
    """At a model's output some 12 times the cost, which is of the second order."""
    return erring(case, 6.0)


def a_hundred_times(case: AttentionCase) -> Tensor:
    return erring(case, 100.0)


def always_nan(case: AttentionCase) -> Tensor:
    return sound(case) * torch.nan


def raises_elsewhere(case: AttentionCase) -> Tensor:
    """OutOfMemoryError, it says, for any shape but the first."""
    shape = (*case.q.shape, *case.k.shape)
    if not FIRST:
        FIRST.append(shape)
    if shape != FIRST[0]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return sound(case)


def speaks_of_memory(case: AttentionCase) -> Tensor:
    raise RuntimeError("OutOfMemoryError is not what this is")


def declines(case: AttentionCase) -> Tensor:
    raise Refused("takes no call")


def short_lse(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """A log-sum-exp of another shape than [batch, heads, q_len]."""
    done = find("emulated").attend(case, preset="fa2")
    assert done.lse is not None
    return done.out, done.lse[..., 1:]


def whole_lse(case: AttentionCase) -> tuple[Tensor, Tensor]:
    done = find("emulated").attend(case, preset="fa2")
    assert done.lse is not None
    return done.out, done.lse


def moving() -> nn.Module:
    """A model whose output moves with its neighbours in the batch: its encoder takes the
    first dimension for the tokens, and is fed [batch, length]."""
    return Encoder(batch_first=False)


def still() -> nn.Module:
    """The same, told which dimension is which."""
    return Encoder(batch_first=True)


def backwards() -> nn.Module:
    """A decoder whose tokens see only themselves and later ones."""
    return Encoder(batch_first=True, ahead=True)


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool, ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ahead = ahead
        self.embed = nn.Embedding(96, 16)
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=batch_first
        )
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, mask = self.embed(input_ids), None
        if self.ahead:
            hidden = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype)
            mask = hidden.tril(-1)
        return self.encoder(x, mask=mask)
