"""How synthetic q, k, v (and dO) are drawn: named regimes with parameters.

A regime is a function of the shapes and of `Draws`, registered by name
(`numdev.sources.regime_registry`); its keyword parameters may be set in YAML. Random normals hide
most real errors, so each further regime stands for inputs that have hurt somebody
(`numdev.sources.regimes`), is made to (`numdev.sources.constructed`), or has an answer that is
known without a reference (`numdev.sources.probes`). Tensors are drawn in fp32, and a seed means the
same numbers whatever the audit's device; they are rounded to the audited format afterwards, as a
model's activations are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.sources import constructed
from numdev.sources import probes as exact
from numdev.sources import regimes as hazards
from numdev.sources.draws import Draws
from numdev.sources.regime_registry import (
    QKV,
    REGIMES,
    Inputs,
    Regime,
    Shapes,
    plain,
    regime,
)

__all__ = [
    "REGIMES",
    "Inputs",
    "Shapes",
    "answer",
    "check",
    "constructed",
    "draw",
    "exact",
    "hazards",
    "normal",
]


@regime(
    stresses="at 0.25 the scores are nearly uniform and many small terms add up, at 16 one key has "
    "nearly all the weight and dS is a small difference",
    origin="N(0, 1) is what Golden et al. draw (arXiv 2405.02803)",
)
def normal(shapes: Shapes, draws: Draws, *, logits: float = 1.0) -> QKV:
    """Independent N(0, 1). `logits` multiplies q, and so the spread of the scores."""
    q, k, v = plain(shapes, draws)
    return q * logits, k, v


def check(name: str, options: Mapping[str, Any]) -> Regime:
    """The regime `name`, when it takes these options.

    Raises UsageError for an unknown regime or parameter, naming the closest.
    """
    found = REGIMES.get(name)
    if found is None:
        raise UsageError(f"unknown input regime {name!r}", hint=closest(name, REGIMES))
    for option in options:
        if option not in found.parameters:
            raise UsageError(
                f"input regime {name} has no parameter {option!r}",
                hint=closest(option, found.parameters),
            )
    return found


def draw(
    name: str,
    shapes: Shapes,
    *,
    seed: int,
    options: Mapping[str, Any],
    label: str = "",
    gradients: bool = False,
) -> Inputs:
    """The inputs of the regime `name`; `label` gives cases of one audit different draws.

    On the CPU. With `gradients` also grad_out, which changes no q, k or v: the regime's own, else
    N(0, 1). Raises UsageError for an unknown regime or parameter, and for values it cannot
    draw with.
    """
    found = check(name, options)
    draws = Draws(seed, label)
    try:
        drawn = found.function(shapes, draws, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"input regime {name} cannot be drawn with {given}: {error}",
            hint="give its parameters numbers",
        ) from error
    if not isinstance(drawn, Inputs):
        q, k, v = drawn
        drawn = Inputs(q=q, k=k, v=v)
    if not gradients:
        return dataclasses.replace(drawn, grad_out=None)
    if drawn.grad_out is None:
        return dataclasses.replace(drawn, grad_out=draws.normal("grad_out", shapes.out))
    return drawn


def answer(name: str, case: AttentionCase) -> Tensor | None:
    """The exact output, in fp64, of a case drawn with the regime `name`, after any rounding.

    Rows that see no key are 0, as in the reference. None where the regime is no probe, or where
    the case's mask, soft cap, scale or sinks take the known answer away.
    """
    found = check(name, {})
    if found.answer is None or case.sinks is not None:
        return None
    return found.answer(case)
