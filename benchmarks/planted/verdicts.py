"""Kernels of a known error, of none, and without an answer: what no verdict may take for
another."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Refused, find
from numdev.kernels.reference import attend
from planted.record import planted

FIRST: list[tuple[int, ...]] = []  # the shapes of the first call


def sound(case: AttentionCase) -> Tensor:
    return find("emulated").attend(case, preset="fa2").out


def erring(case: AttentionCase, times: float, **rounded: str) -> Tensor:
    """FlashAttention-2 with so many times its error, in float32."""
    exact = attend(case).out
    rounded_out = find("emulated").attend(case, preset="fa2", **rounded).out
    return (exact + times * (rounded_out.double() - exact)).float()


@planted(
    "verdict",
    "FlashAttention-2 whose output stays in float32: the sound twin of `twice`.",
)
def in_float32(case: AttentionCase) -> Tensor:
    """The sound twin of the next: its output stays in float32, so that all it errs is
    scaled."""
    return erring(case, 1.0, out="float32")


@planted("verdict", "2.05 times the error of FlashAttention-2.")
def twice(case: AttentionCase) -> Tensor:
    return erring(case, 2.05, out="float32")


@planted("verdict", "6 times its error.")
def six_times(case: AttentionCase) -> Tensor:
    """At a model's output some 12 times the cost, which is of the second order."""
    return erring(case, 6.0)


@planted("verdict", "100 times its error.")
def a_hundred_times(case: AttentionCase) -> Tensor:
    return erring(case, 100.0)


@planted("verdict", "NaN, everywhere.")
def always_nan(case: AttentionCase) -> Tensor:
    return sound(case) * torch.nan


@planted("verdict", "Runs out of memory for any shape but the first.")
def raises_elsewhere(case: AttentionCase) -> Tensor:
    """OutOfMemoryError, it says, for any shape but the first."""
    shape = (*case.q.shape, *case.k.shape)
    if not FIRST:
        FIRST.append(shape)
    if shape != FIRST[0]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return sound(case)


@planted("verdict", "Raises an error whose words name another.")
def speaks_of_memory(case: AttentionCase) -> Tensor:
    raise RuntimeError("OutOfMemoryError is not what this is")


@planted("verdict", "Declines every call.")
def declines(case: AttentionCase) -> Tensor:
    raise Refused("takes no call")


@planted("verdict", "A log-sum-exp of another shape than [batch, heads, q_len].")
def short_lse(case: AttentionCase) -> tuple[Tensor, Tensor]:
    done = find("emulated").attend(case, preset="fa2")
    assert done.lse is not None
    return done.out, done.lse[..., 1:]


@planted("verdict", "The right one: the sound twin of `short_lse`.")
def whole_lse(case: AttentionCase) -> tuple[Tensor, Tensor]:
    done = find("emulated").attend(case, preset="fa2")
    assert done.lse is not None
    return done.out, done.lse
