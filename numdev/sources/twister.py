"""PyTorch's CPU normals, drawn on an NVIDIA GPU: the same numbers, thirty times sooner.

On a CPU, `torch.randn` in fp64 takes two outputs of a Mersenne Twister (Matsumoto and Nishimura
1998) for each uniform number u = (w_1 2^32 + w_2 mod 2^53) 2^-53, and makes 16 of these into 16
normals by Box and Muller: with u and u' eight places apart,

    sqrt(-2 ln(1 - u)) cos(2 pi u')   and   sqrt(-2 ln(1 - u)) sin(2 pi u').

The generator's next 624 words follow from its last 624 alone, 227 at a time: one block of threads
makes them in its multiprocessor's own memory, and the rest of the GPU what is made of them.

A GPU's logarithm and sine may differ in their last bit from the host's. What is wanted is the
number rounded to fp32, which that nearly never changes; where it might, the number is computed
again on the host. So a seed means the same bits wherever it is drawn.
"""

from __future__ import annotations

import functools
import math
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from numdev.kernels.gpucode import compiled, on_nvidia

__all__ = ["Twister", "seeded"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint32]]
Kernels = tuple[Any, Any]
"""`twist` and `normals`."""

FEWEST = 1 << 20
"""Fewer numbers are drawn by the host before the GPU's code is compiled."""
STATE = 624
"""Words of the generator's state, of which it gives one out at a time."""
_LEFT, _NEXT, _WORDS = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * STATE)
"""Which bytes of a generator's state, as PyTorch hands it out, hold how many words are left (plus
one), which is next, and the words."""
_BYTES = 5056
THREADS = 256
_AT_ONCE = 1 << 24
"""Numbers: 128 MiB of words."""
_MOST_UNSURE = 1 << 12
"""Of so many numbers some four are expected."""

_SOURCE = r"""
// Of one block of 224 threads: `count` words after the 624 of `state`, tempered, and the last 624
// as the new state. The ring holds the latest 1024 words: those that are read and those that are
// written at one time are 848.
extern "C" __global__ void twist(unsigned int* state, unsigned int* words, int count) {
  __shared__ unsigned int ring[1024];
  for (int i = threadIdx.x; i < 624; i += 224) ring[i] = state[i];
  __syncthreads();
  for (int first = 0; first < count; first += 224) {
    const int i = first + threadIdx.x;
    if (i < count) {
      const unsigned int y =
          (ring[i & 1023] & 0x80000000u) | (ring[(i + 1) & 1023] & 0x7fffffffu);
      unsigned int x = ring[(i + 397) & 1023] ^ (y >> 1) ^ ((y & 1u) ? 0x9908b0dfu : 0u);
      ring[(i + 624) & 1023] = x;
      x ^= x >> 11;
      x ^= (x << 7) & 0x9d2c5680u;
      x ^= (x << 15) & 0xefc60000u;
      words[i] = x ^ (x >> 18);
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < 624; i += 224) state[i] = ring[(count + i) & 1023];
}

// Of each 16 uniform numbers of two words, 16 normals. Where fp32 might round them otherwise than
// from the host's logarithm and sine, their place and their two uniform numbers go to `unsure`, of
// which `unsures` counts those that there are.
extern "C" __global__ void normals(const uint2* words, float* out, int count, double first,
                                   double* unsure, int* unsures, int most) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  const int place = (pair >> 3) * 16 + (pair & 7);
  if (place + 8 >= count) return;
  double u[2];
  for (int half = 0; half < 2; ++half) {
    const uint2 w = words[place + 8 * half];
    const unsigned long long bits = ((unsigned long long)w.x << 32) | w.y;
    u[half] = (double)(bits & 0x1fffffffffffffULL) * 0x1p-53;
  }
  const double radius = sqrt(-2.0 * log(1.0 - u[0]));
  const double angle = 2.0 * 3.14159265358979323846 * u[1];
  const double x[2] = {radius * cos(angle), radius * sin(angle)};
  for (int half = 0; half < 2; ++half) {
    out[place + 8 * half] = (float)x[half];
    if ((float)(x[half] * (1.0 - 0x1p-47)) != (float)(x[half] * (1.0 + 0x1p-47))) {
      const int k = atomicAdd(unsures, 1);
      if (k < most) {
        unsure[3 * k] = first + place + 8 * half;
        unsure[3 * k + 1] = u[0];
        unsure[3 * k + 2] = u[1];
      }
    }
  }
}
"""


class Twister(Generator):
    """A generator of the host whose normals a GPU draws; all else it gives as any other does."""

    device_of_normals: torch.device
    stays: bool
    """Whether normals stay there; else they are brought to the host."""

    def randn(self, shape: tuple[int, ...]) -> Tensor:
        """`torch.randn` in fp64, rounded to fp32: on the GPU if its numbers are to stay there, else
        on the host."""
        where = self.device_of_normals if self.stays else torch.device("cpu")
        count, before = math.prod(shape), self.get_state()
        if count >= FEWEST and before.numel() == _BYTES:
            with torch.cuda.device(self.device_of_normals), suppress(torch.OutOfMemoryError):
                kernels = _compiled(torch.cuda.current_device())
                found = None if kernels is None else self._drawn(count, before.numpy(), kernels)
                if found is not None:
                    return found.view(shape).to(where)
            self.set_state(before)
        drawn = torch.randn(shape, generator=self, dtype=torch.float64, device="cpu")
        return drawn.float().to(where)

    def _drawn(self, count: int, before: Bytes, kernels: Kernels) -> Tensor | None:
        """[count]; None where too many numbers are unsure."""
        device, (twist, normals) = self.device_of_normals, kernels
        state, left = _read(before)
        pending = _tempered(state[STATE + 1 - left :])
        last = torch.from_numpy(state.view(np.int32)).to(device)
        out = torch.empty(count, device=device)
        whole = count // 16 * 16
        words = torch.empty(2 * min(whole, _AT_ONCE), dtype=torch.int32, device=device)
        unsure = torch.empty(_MOST_UNSURE, 3, dtype=torch.float64, device=device)
        unsures = torch.zeros(1, dtype=torch.int32, device=device)
        words[: len(pending)] = torch.from_numpy(pending.view(np.int32)).to(device)
        known = len(pending)
        for first in range(0, whole, _AT_ONCE):
            numbers = min(_AT_ONCE, whole - first)
            _next(twist, last, words[known : 2 * numbers])
            known = 0
            normals(
                grid=(-(-numbers // (2 * THREADS)), 1, 1),
                block=(THREADS, 1, 1),
                args=[words, out[first:], numbers, float(first), unsure, unsures, _MOST_UNSURE],
            )
        if whole < count:
            # PyTorch then draws the last 16 again, after as many uniform numbers as there are.
            rest = torch.empty(2 * (count - whole + 16), dtype=torch.int32, device=device)
            _next(twist, last, rest)
            uniform = _uniform(rest[-32:].cpu().numpy().view(np.uint32)).tolist()
            last_16 = [_normal(uniform[i % 8], uniform[i % 8 + 8], i < 8) for i in range(16)]
        found = int(unsures)
        if found > _MOST_UNSURE:
            return None
        _settle(out, unsure[:found])
        if whole < count:
            out[-16:] = torch.tensor(last_16, dtype=torch.float64).float()
        self.set_state(_written(before, last.cpu().numpy().view(np.uint32)))
        return out


def _next(twist: Any, last: Tensor, words: Tensor) -> None:
    """Fill `words` with a generator's next, and move its state on."""
    twist(block=(224, 1, 1), args=[last, words, words.numel()])


def _settle(out: Tensor, unsure: Tensor) -> None:
    """Have the host compute the numbers that are unsure."""
    if not len(unsure):
        return
    host = [
        _normal(one, other, place % 16 < 8)
        for place, one, other in ((int(x), one, other) for x, one, other in unsure.tolist())
    ]
    places = unsure[:, 0].long()
    out[places] = torch.tensor(host, dtype=torch.float64).float().to(out.device)


def seeded(
    seed: int, device: torch.device | str | None = None, *, stays: bool = False
) -> Generator:
    """A generator of the host, whose normals `device` draws if it can; they `stay` there, or are
    brought to the host."""
    where = torch.device(device or "cpu")
    if not on_nvidia(where):
        return Generator().manual_seed(seed)
    made = Twister()
    made.device_of_normals, made.stays = where, stays
    return made.manual_seed(seed)


@functools.cache
def _compiled(index: int) -> Kernels | None:
    """For the current device, of that index."""
    twist, normals = (compiled(_SOURCE, name) for name in ("twist", "normals"))
    return None if twist is None or normals is None else (twist, normals)


def _read(state: Bytes) -> tuple[Words, int]:
    """The words of a generator's state, and how many are left, plus one."""
    words = state[_WORDS].view(np.uint64).astype(np.uint32)
    return words, int(state[_LEFT].view(np.int32)[0])


def _written(before: Bytes, words: Words) -> Tensor:
    """A generator's state of which all of these words were given out."""
    after = before.copy()
    after[_WORDS] = words.astype(np.uint64).view(np.uint8)
    after[_LEFT] = np.array([1], np.int32).view(np.uint8)
    after[_NEXT] = np.array([0], np.uint64).view(np.uint8)
    return torch.from_numpy(after)


def _tempered(words: Words) -> Words:
    """What the generator gives out for words of its state."""
    x = words ^ (words >> 11)
    x ^= (x << 7) & 0x9D2C5680
    x ^= (x << 15) & 0xEFC60000
    return np.asarray(x ^ (x >> 18), np.uint32)


def _uniform(words: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniform numbers, of two words each."""
    pairs = words.astype(np.uint64).reshape(-1, 2)
    bits = (pairs[:, 0] << 32 | pairs[:, 1]) & (2**53 - 1)
    return np.asarray(bits * 2.0**-53, np.float64)


def _normal(u: float, v: float, first: bool) -> float:
    """The normal of two uniform numbers that the host's mathematics makes, as PyTorch's CPU does:
    the first or the second of the two."""
    radius, angle = math.sqrt(-2.0 * math.log(1.0 - u)), 2.0 * math.pi * v
    return radius * (math.cos(angle) if first else math.sin(angle))
