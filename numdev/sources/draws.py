"""What synthetic inputs are drawn with.

Each head of each named tensor has a stream of its own, from seed, label, name and head alone: a
tensor keeps its numbers whatever else is drawn. All is drawn on the host, to the same bits on every
machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """The numbers of one case. A shape is [batch, heads, ...]; one name always gives one draw."""

    seed: int
    label: str = ""  # Cases of one audit have different labels, and with them different numbers

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """N(0, 1) in fp32, drawn in fp64 and rounded: the last bits of the tails' logarithms differ
        between processors, which in fp64 reaches the result once in some 10^8 of them."""
        return self._by_head(name, shape, np.float32, lambda rng, size: rng.standard_normal(size))

    def uniform(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Uniform in [0, 1), fp64."""
        return self._by_head(name, shape, np.float64, lambda rng, size: rng.random(size))

    def integers(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Uniform over low, ..., high - 1, int64."""
        return self._by_head(name, shape, np.int64, lambda rng, size: rng.integers(low, high, size))

    def permutation(self, name: str, count: int) -> Tensor:
        """0, ..., count - 1 in random order, int64 [count]; the same for all heads."""
        return torch.from_numpy(self._stream(name, 0).permutation(count))

    def _by_head(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: type[np.generic],
        draw: Callable[[np.random.Generator, tuple[int, ...]], Any],
    ) -> Tensor:
        batch, heads, *rest = shape
        numbers = np.empty(shape, dtype=dtype)

        def fill(head: int) -> None:
            numbers[:, head] = draw(self._stream(name, head), (batch, *rest))

        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
            list(pool.map(fill, range(heads)))  # numpy draws without holding the interpreter
        return torch.from_numpy(numbers)

    def _stream(self, name: str, head: int) -> np.random.Generator:
        digest = hashlib.sha256(f"{self.label}/{self.seed}/{name}".encode()).digest()
        sequence = np.random.SeedSequence(int.from_bytes(digest[:16], "big"), spawn_key=(head,))
        return np.random.Generator(np.random.PCG64(sequence))


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sizes of one attention call, and the shapes of its tensors; `out` is grad_out's too."""

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
        return (self.batch, self.heads, self.q_len, self.v_dim)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What is drawn for one attention call: `q, k, v = inputs` are those of its forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None = None
    """dO, [batch, heads, q_len, v_dim]. From a regime: None where any will do."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.q, self.k, self.v))


def plain(shapes: Shapes, draws: Draws) -> Inputs:
    """q, k and v of independent N(0, 1)."""
    return of_each(shapes, draws.normal)


def of_each(shapes: Shapes, draw: Callable[[str, tuple[int, ...]], Tensor]) -> Inputs:
    """q, k and v, each drawn alike from its name and shape."""
    return Inputs(*(draw(name, getattr(shapes, name)) for name in "qkv"))
