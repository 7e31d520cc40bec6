"""How synthetic q, k and v are drawn: named regimes with parameters.

A regime is a function of the shapes and a generator, registered by name; its keyword parameters may
be set in YAML. Random normals hide most real errors, so each further regime stands for inputs that
have hurt somebody. Tensors are drawn in fp32 on the CPU whatever the audit's device, so that a seed
means the same numbers everywhere; they are rounded to the audited format afterwards, as a model's
activations are.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from numdev.errors import UsageError, closest

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of one attention call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int

    @property
    def q(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.q_len, self.head_dim)

    @property
    def k(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.kv_len, self.head_dim)

    @property
    def v(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads, self.kv_len, self.v_dim)


REGIMES: dict[str, Callable[..., QKV]] = {}


def regime(function: Callable[..., QKV]) -> Callable[..., QKV]:
    """Register a drawing function under its own name."""
    REGIMES[function.__name__] = function
    return function


def check(name: str, options: Mapping[str, Any]) -> Callable[..., QKV]:
    """The drawing function of the regime `name`, when it takes these options.

    Raises UsageError for an unknown regime or parameter, naming the closest.
    """
    function = REGIMES.get(name)
    if function is None:
        raise UsageError(f"unknown input regime {name!r}", hint=closest(name, REGIMES))
    known = list(inspect.signature(function).parameters)[2:]
    for option in options:
        if option not in known:
            raise UsageError(
                f"input regime {name} has no parameter {option!r}", hint=closest(option, known)
            )
    return function


def draw(
    name: str, shapes: Shapes, *, seed: int, options: Mapping[str, Any], label: str = ""
) -> QKV:
    """q, k and v of the regime `name`; `label` gives cases of one audit different draws.

    Raises UsageError for an unknown regime or parameter, and for values it cannot draw with.
    """
    function = check(name, options)
    digest = hashlib.sha256(f"{label}/{seed}".encode()).digest()
    generator = Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    try:
        return function(shapes, generator, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise UsageError(
            f"input regime {name} cannot be drawn with {given}: {error}",
            hint="give its parameters numbers",
        ) from error


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """N(0, 1), drawn in fp64 and rounded: PyTorch's fp32 normals differ in their last bits from
    one instruction set to the next."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").float()


@regime
def normal(shapes: Shapes, generator: Generator, *, logits: float = 1.0) -> QKV:
    """Independent N(0, 1). `logits` multiplies q, and so the spread of the scores."""
    q, k, v = (_normal(s, generator) for s in (shapes.q, shapes.k, shapes.v))
    return q * logits, k, v


@regime
def outliers(
    shapes: Shapes, generator: Generator, *, rate: float = 0.001, variance: float = 100.0
) -> QKV:
    """N(0, 1) plus N(0, `variance`) in a fraction `rate` of the entries, as activations have."""

    def one(shape: tuple[int, ...]) -> Tensor:
        rare = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") < rate
        extra = _normal(shape, generator) * math.sqrt(variance)
        return _normal(shape, generator) + rare * extra

    return one(shapes.q), one(shapes.k), one(shapes.v)


@regime
def sink(shapes: Shapes, generator: Generator, *, strength: float = 8.0, value: float = 0.1) -> QKV:
    """An attention sink: every query meets key 0 with a score higher by about `strength`, and that
    key's V is small (`value` times N(0, 1)), as models keep their first token. The other keys are
    orthogonal to the direction that makes the difference, so that none of them gains by it."""
    q, k, v = normal(shapes, generator)
    direction = torch.full(
        (shapes.head_dim,), shapes.head_dim**-0.5, dtype=torch.float32, device="cpu"
    )
    q = q + direction * strength
    k = k - (k @ direction)[..., None] * direction
    k[:, :, 0] = direction * shapes.head_dim**0.5
    v[:, :, 0] *= value
    return q, k, v


@regime
def ties(shapes: Shapes, generator: Generator, *, count: int = 2, strength: float = 8.0) -> QKV:
    """The row maximum is attained by `count` identical keys (the first ones), above all others by
    about `strength`, and V is of one sign there: P = 1 exactly, and same-signed sums carry."""
    if count < 1:
        raise ValueError("count must be at least 1")
    q, k, v = sink(shapes, generator, strength=strength, value=1.0)
    tied = min(count, shapes.kv_len)
    k[:, :, :tied] = k[:, :, :1]
    v[:, :, :tied] = -(v[:, :, :tied].abs() + 1.0)
    return q, k, v
