"""Random numbers of drawn inputs: each head of each named tensor has a stream of its own.

A stream follows from seed, label, name and head alone, so a tensor keeps its numbers whatever else
is drawn and in whatever order: gradients and masks change no q, k or v, and a head keeps its
numbers if others are added. Everything is drawn on the host, to the same bits on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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
    label: str = ""
    """Cases of one audit have different labels, and with them different numbers."""

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """N(0, 1) in fp32.

        Drawn in fp64 and rounded: the tails need logarithms, whose last bits differ between
        processors, and in fp64 that reaches no bit of the result but once in some 10^8 of them.
        """
        return self._by_head(name, shape, np.float32, lambda rng, size: rng.standard_normal(size))

    def uniform(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Uniform in [0, 1), fp64."""
        return self._by_head(name, shape, np.float64, lambda rng, size: rng.random(size))

    def integers(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Uniform over low, ..., high - 1, int64."""
        return self._by_head(
            name, shape, np.int64, lambda rng, size: rng.integers(low, high, size=size)
        )

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
