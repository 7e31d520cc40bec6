"""Synthetic cases: q, k, v (and dO) of a named regime, and masks as models make them. All is drawn
in fp32, and rounded to the audited format afterwards."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from numdev.cases import AttentionCase, additive, visible
from numdev.config import MaskKind
from numdev.errors import UsageError, closest
from numdev.sources.regimes import REGIMES, Draws, Inputs, Shapes

MASKS: tuple[str, ...] = get_args(MaskKind)
__all__ = ["MASKS", "REGIMES", "Inputs", "Shapes", "answer", "check", "draw", "draw_mask"]


def check(name: str, options: Mapping[str, Any]) -> Callable[..., Inputs]:
    """The regime `name`, when it takes these options; UsageError, naming the closest, when not."""
    regime = REGIMES.get(name)
    if regime is None:
        raise UsageError(f"unknown input regime {name!r}", hint=closest(name, REGIMES))
    parameters = list(inspect.signature(regime).parameters)[2:]
    for option in options:
        if option not in parameters:
            hint = closest(option, parameters)
            raise UsageError(f"input regime {name} has no parameter {option!r}", hint=hint)
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
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        what = f"input regime {name} cannot be drawn with {given}: {error}"
        raise UsageError(what, hint="give its parameters numbers") from error
    if not gradients:
        return dataclasses.replace(inputs, grad_out=None)
    if inputs.grad_out is None:
        return dataclasses.replace(inputs, grad_out=draws.normal("grad_out", shapes.out))
    return inputs


def answer(name: str, case: AttentionCase) -> Tensor | None:
    """The exact output, in fp64, of a case drawn with the probe `name`, after any rounding; 0 in
    rows that see no key. None where the regime is no probe, or mask, soft cap, scale or sinks take
    the answer away. Memory is q_len * kv_len."""
    check(name, {})
    if name not in ("ones", "one_key", "uniform", "one_hot", "two_hot") or case.sinks is not None:
        return None
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    seen = torch.ones((*case.q.shape[:3], case.kv_len), dtype=torch.bool, device=case.q.device)
    if (shown := visible(case, rows, keys)) is not None:
        seen = seen & shown
    if (scores := additive(case, rows, keys)) is not None:
        seen = seen & (scores != -math.inf)
    k, v = (x.double().repeat_interleave(case.group, dim=1) for x in (case.k, case.v))
    if name in ("ones", "one_key"):  # all values are alike
        return torch.where(seen.any(dim=-1, keepdim=True), v[:, :, :1], 0.0)
    if scores is not None and bool((scores.masked_fill(~seen, 0.0) != 0).any()):
        return None
    if name != "uniform":
        # Scores are whole multiples of one step, which is large: the keys that match a query in
        # most signs, among those it sees, share all the weight.
        usual = math.isclose(case.scale, case.q.shape[-1] ** -0.5, rel_tol=1e-12)
        if case.softcap is not None or not usual:
            return None
        matches = case.q.double().sign() @ k.sign().transpose(-1, -2)
        matches = matches.masked_fill(~seen, -math.inf)
        seen = seen & (matches == matches.amax(dim=-1, keepdim=True))
    return seen.double() @ v / seen.sum(dim=-1, keepdim=True).clamp_min(1)


def draw_mask(kind: str, shapes: Shapes, *, seed: int, label: str = "") -> Tensor:
    """The mask called `kind` (docs/hazards.md), on the CPU: it broadcasts to [batch, heads, q_len,
    kv_len]; bool (True: seen), or additive in fp32."""
    draws, rows, keys = Draws(seed, label), torch.arange(shapes.q_len), torch.arange(shapes.kv_len)
    if kind == "padding":  # entry b of B sees the first (b + 1) / (B + 1) of the keys
        entry = torch.arange(shapes.batch)[:, None, None, None]
        lengths = (shapes.kv_len * (entry + 1) + shapes.batch) // (shapes.batch + 1)
        return torch.arange(shapes.kv_len) < lengths
    if kind in ("all_true", "causal"):
        whole = torch.ones((1, 1, len(rows), len(keys)), dtype=torch.bool, device="cpu")
        return whole if kind == "all_true" else whole.tril()
    if kind == "bias":
        return draws.normal("mask", (1, shapes.heads, len(rows), len(keys)))
    chance = draws.uniform("mask seen", (shapes.batch, 1, len(rows), len(keys)))
    if kind in ("random", "bias_lowest"):
        empty = draws.uniform("mask empty", (shapes.batch, 1, len(rows), 1)) < 0.1
        if len(rows) > 1:  # the middle row sees no key for certain, the first some
            empty[:, :, len(rows) // 2] = True
            empty[:, :, 0] = False
        seen = (chance < 0.6) & ~empty
        if kind == "random":
            return seen
        lowest = torch.finfo(torch.float32).min  # as transformers writes it
        return torch.zeros(seen.shape, dtype=torch.float32, device="cpu").masked_fill(~seen, lowest)
    # One key in each row is seen, which a causal mask leaves too.
    choice = draws.uniform("mask key", (shapes.batch, 1, len(rows)))
    key = (choice * (rows.clamp_max(len(keys) - 1) + 1)).long()
    seen = (chance < (0.02 if kind == "mostly_masked" else 0.6)) | (key[..., None] == keys)
    if kind == "mostly_masked":
        return seen
    return draws.normal("mask", tuple(seen.shape)).masked_fill(~seen, -math.inf)  # bias_inf
