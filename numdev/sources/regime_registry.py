"""What a regime of inputs is: a drawing function, what it stresses, and who met it.

The registry and the shapes are here; the regimes themselves are in `numdev.sources.synthetic` (the
plain one), `numdev.sources.regimes` (inputs that have hurt somebody), `numdev.sources.constructed`
(inputs made to) and `numdev.sources.probes` (probes whose right answer is known without a
reference). Everything is in fp32, and the same bits on all machines (`numdev.sources.draws`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from numdev.cases import AttentionCase
from numdev.sources.draws import Draws

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

    @property
    def out(self) -> tuple[int, ...]:
        """Of the output, and so of grad_out."""
        return (self.batch, self.heads, self.q_len, self.v_dim)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What is drawn for one attention call: `q, k, v = inputs` are those of its forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None = None
    """dO, [batch, heads, q_len, v_dim]. From a regime: None where any will do."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.q, self.k, self.v))


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A named way to draw inputs."""

    function: Callable[..., QKV | Inputs]
    """Of the shapes, draws, and keyword parameters, which may be set in YAML."""
    stresses: str
    """What in a kernel may break on it: a clause."""
    origin: str
    """The public report or paper that has it."""
    answer: Callable[[AttentionCase], Tensor | None] | None = None
    """For a probe: the exact output of a case that was drawn with it (`numdev.sources.probes`)."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its parameters and their defaults."""
        found = list(inspect.signature(self.function).parameters.values())[2:]
        return {parameter.name: parameter.default for parameter in found}

    @property
    def summary(self) -> str:
        return " ".join((self.function.__doc__ or "").split())


REGIMES: dict[str, Regime] = {}


def regime(
    *,
    stresses: str,
    origin: str,
    answer: Callable[[AttentionCase], Tensor | None] | None = None,
) -> Callable[[Callable[..., QKV | Inputs]], Callable[..., QKV | Inputs]]:
    """Register a drawing function under its own name."""

    def register(function: Callable[..., QKV | Inputs]) -> Callable[..., QKV | Inputs]:
        REGIMES[function.__name__] = Regime(
            function=function, stresses=stresses, origin=origin, answer=answer
        )
        return function

    return register


def plain(shapes: Shapes, draws: Draws) -> QKV:
    """q, k and v of independent N(0, 1)."""
    return draws.normal("q", shapes.q), draws.normal("k", shapes.k), draws.normal("v", shapes.v)
