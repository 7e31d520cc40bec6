"""Synthetic cases: q, k, v (and dO) of a named regime, and masks as models make them.

A mask has streams of its own, so q, k and v are the same with it and without. All is drawn in fp32
and rounded to the audited format afterwards, as a model's activations are.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.sources import regimes
from numdev.sources.draws import Draws, Inputs, Shapes
from numdev.sources.probes import ANSWERS

__all__ = ["MASKS", "REGIMES", "Inputs", "Shapes", "answer", "check", "draw", "draw_mask"]

_ALL: tuple[Callable[..., Inputs], ...] = (
    regimes.normal, regimes.outliers, regimes.sink, regimes.ties, regimes.one_signed_gradient,
    regimes.one_sign, regimes.far_below, regimes.massive_channel, regimes.near_constant_keys,
    regimes.low_rank, regimes.correlated, regimes.near_overflow, regimes.biased_rounding,
    *ANSWERS,
)  # fmt: skip
REGIMES = {regime.__name__: regime for regime in _ALL}


def check(name: str, options: Mapping[str, Any]) -> Callable[..., Inputs]:
    """The regime `name`, when it takes these options; UsageError, naming the closest, when not."""
    regime = REGIMES.get(name)
    if regime is None:
        raise UsageError(f"unknown input regime {name!r}", hint=closest(name, REGIMES))
    parameters = list(inspect.signature(regime).parameters)[2:]
    for option in options:
        if option not in parameters:
            what = f"input regime {name} has no parameter {option!r}"
            raise UsageError(what, hint=closest(option, parameters))
    return regime


def draw(
    name: str,
    shapes: Shapes,
    *,
    seed: int,
    options: Mapping[str, Any],
    label: str = "",
    gradients: bool = False,
) -> Inputs:
    """The inputs of the regime `name`, on the CPU; `label` gives cases of one audit different
    draws. With `gradients` also grad_out, which changes no q, k or v: the regime's own, else N(0,
    1). Raises UsageError for an unknown regime or parameter, and values it cannot draw with."""
    regime, draws = check(name, options), Draws(seed, label)
    try:
        inputs = regime(shapes, draws, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        what = f"input regime {name} cannot be drawn with {given}: {error}"
        raise UsageError(what, hint="give its parameters numbers") from error
    if not gradients:
        return dataclasses.replace(inputs, grad_out=None)
    if inputs.grad_out is None:
        return dataclasses.replace(inputs, grad_out=draws.normal("grad_out", shapes.out))
    return inputs


def answer(name: str, case: AttentionCase) -> Tensor | None:
    """The exact output, in fp64, of a case drawn with the regime `name`, after any rounding; 0 in
    rows that see no key. None where the regime is no probe, or mask, soft cap, scale or sinks take
    the answer away."""
    known = ANSWERS.get(check(name, {}))
    return known(case) if known and case.sinks is None else None


# --- masks: each broadcasts to [batch, heads, q_len, kv_len], and True means seen


def draw_mask(kind: str, shapes: Shapes, *, seed: int, label: str = "") -> Tensor:
    """The mask called `kind`, on the CPU; additive ones in fp32."""
    return MASKS[kind](shapes, Draws(seed, label))


def all_true(shapes: Shapes, draws: Draws) -> Tensor:
    """bool, hides nothing, and yet keeps a kernel from its path without a mask."""
    return torch.ones((1, 1, shapes.q_len, shapes.kv_len), dtype=torch.bool, device="cpu")


def causal(shapes: Shapes, draws: Draws) -> Tensor:
    """bool, key j <= query i: what `causal` means, as a tensor."""
    return all_true(shapes, draws).tril()


def random(shapes: Shapes, draws: Draws) -> Tensor:
    """bool, 6 keys in 10 seen; about a tenth of the rows see none (the middle one for certain), at
    least one of several sees some."""
    empty = draws.uniform("mask empty", (shapes.batch, 1, shapes.q_len, 1)) < 0.1
    if shapes.q_len > 1:
        empty[:, :, shapes.q_len // 2] = True
        empty[:, :, 0] = False
    return _at_rate(shapes, draws, 0.6) & ~empty


def mostly_masked(shapes: Shapes, draws: Draws) -> Tensor:
    """bool, 2 keys in 100 seen, and at least one in every row (no later than the query itself)."""
    return _at_rate(shapes, draws, 0.02) | _one_in_each_row(shapes, draws)


def padding(shapes: Shapes, draws: Draws) -> Tensor:
    """bool [batch, 1, 1, kv_len]: entry b of B sees the first (b + 1) / (B + 1) of the keys."""
    entry = torch.arange(shapes.batch)[:, None, None, None]
    lengths = (shapes.kv_len * (entry + 1) + shapes.batch) // (shapes.batch + 1)
    return torch.arange(shapes.kv_len) < lengths


def bias(shapes: Shapes, draws: Draws) -> Tensor:
    """additive, N(0, 1), another for every head: finite everywhere."""
    return draws.normal("mask", (1, shapes.heads, shapes.q_len, shapes.kv_len))


def bias_inf(shapes: Shapes, draws: Draws) -> Tensor:
    """additive, N(0, 1), and -inf for 4 keys in 10, though not for all of a row."""
    seen = _at_rate(shapes, draws, 0.6) | _one_in_each_row(shapes, draws)
    return draws.normal("mask", tuple(seen.shape)).masked_fill(~seen, -math.inf)


def bias_lowest(shapes: Shapes, draws: Draws) -> Tensor:
    """additive, 0 or the lowest finite number, as transformers writes it; rows as in `random`."""
    hidden = ~random(shapes, draws)
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(hidden.shape, dtype=torch.float32, device="cpu").masked_fill(hidden, lowest)


MASKS: dict[str, Callable[[Shapes, Draws], Tensor]] = {
    mask.__name__: mask
    for mask in (all_true, causal, random, mostly_masked, padding, bias, bias_inf, bias_lowest)
}


def _at_rate(shapes: Shapes, draws: Draws, rate: float) -> Tensor:
    """bool [batch, 1, q_len, kv_len], true at the given rate."""
    return draws.uniform("mask seen", (shapes.batch, 1, shapes.q_len, shapes.kv_len)) < rate


def _one_in_each_row(shapes: Shapes, draws: Draws) -> Tensor:
    """bool [batch, 1, q_len, kv_len], one key in each row: one that a causal mask leaves."""
    last = torch.arange(shapes.q_len).clamp_max(shapes.kv_len - 1)
    choice = draws.uniform("mask key", (shapes.batch, 1, shapes.q_len))
    key = (choice * (last + 1)).long()
    return key[..., None] == torch.arange(shapes.kv_len)
