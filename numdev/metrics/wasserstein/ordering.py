"""The rows of a 16-bit tensor in ascending order on an NVIDIA GPU, by counting.

A row of 16-bit numbers has at most 65,536 different ones. Two blocks take a row, one the negative
numbers and one the others: each counts its patterns in its multiprocessor's own memory, adds up how
many lie below each, and writes each number as often as it was there. That reads a row twice and
writes it once, where sorting moves it, with the places its numbers came from, half a dozen times.

CUDA C for the reason that `wasserstein.histogram` has. Where there is no such kernel, or not enough
shared memory for half of the patterns, `ordered` says so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from numdev.metrics.gpucode import compiled, on_nvidia, shared_memory

__all__ = ["ordered"]

LEAST = 1 << 14
"""Shorter rows are sorted as soon."""
HALF = 1 << 15
"""Patterns of one sign."""
THREADS = 1024
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

_SOURCE = r"""
// Bins are in the order of numbers: of the negative ones, the largest magnitude is in bin 0. NaN of
// either sign comes after all others.
extern "C" __global__ void order(const unsigned short* x, unsigned short* out, int length,
                                 int vectors, int infinity) {
  extern __shared__ unsigned int bins[];  // 32768 counts, which become the places they begin at
  __shared__ unsigned int below[33];
  const long long first = (long long)blockIdx.x * length;
  const unsigned int negative = blockIdx.y == 0;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < 32768; i += 1024) bins[i] = 0;
  __syncthreads();
  auto add = [&](unsigned int pattern) {
    const unsigned int size = pattern & 0x7fffu;
    const unsigned int here = pattern >> 15 && size <= infinity;
    if (here == negative) atomicAdd(&bins[negative ? 32767u - size : size], 1u);
  };
  const uint4* eights = (const uint4*)(x + first);
  for (int i = threadIdx.x; i < vectors; i += 1024) {
    const uint4 eight = eights[i];
    const unsigned int pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      add(pairs[k] & 0xffffu);
      add(pairs[k] >> 16);
    }
  }
  for (int i = 8 * vectors + threadIdx.x; i < length; i += 1024) add(x[first + i]);
  __syncthreads();
  // A warp has 1024 bins: what is in all of them, and then how many lie below each.
  unsigned int total = 0;
  for (int i = lane; i < 1024; i += 32) total += bins[1024 * warp + i];
  for (int far = 16; far; far >>= 1) total += __shfl_xor_sync(0xffffffffu, total, far);
  if (lane == 0) below[warp + 1] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
    below[0] = 0;
    for (int i = 1; i <= 32; ++i) below[i] += below[i - 1];
  }
  __syncthreads();
  unsigned int running = below[warp];
  for (int i = lane; i < 1024; i += 32) {
    const unsigned int count = bins[1024 * warp + i];
    unsigned int upto = count;
    for (int far = 1; far < 32; far <<= 1) {
      const unsigned int other = __shfl_up_sync(0xffffffffu, upto, far);
      if (lane >= far) upto += other;
    }
    bins[1024 * warp + i] = running + upto - count;
    running += __shfl_sync(0xffffffffu, upto, 31);
  }
  __syncthreads();
  const unsigned int all = below[32];
  unsigned short* to = out + first + (negative ? 0 : length - all);
  for (int bin = warp; bin < 32768; bin += 32) {
    const unsigned int start = bins[bin], end = bin < 32767 ? bins[bin + 1] : all;
    const unsigned short pattern = negative ? 0x8000 | (32767 - bin) : bin;
    for (unsigned int i = start + lane; i < end; i += 32) to[i] = pattern;
  }
}
"""


def ordered(x: Tensor) -> Tensor | None:
    """Each row of [n, m] in ascending order, NaN last and of positive sign, as a new tensor. None
    where it cannot be had so."""
    length = x.shape[1]
    if not on_nvidia(x.device) or x.dtype not in _INFINITY or not LEAST <= length < 2**31:
        return None
    with torch.cuda.device_of(x):
        kernel = _kernel(torch.cuda.current_device())
        if kernel is None:
            return None
        x = x.contiguous()
        aligned = length % 8 == 0 and x.data_ptr() % 16 == 0
        found = torch.empty_like(x)
        kernel(
            grid=(x.shape[0], 2, 1),
            block=(THREADS, 1, 1),
            args=[x, found, length, length // 8 if aligned else 0, _INFINITY[x.dtype]],
            shared_mem=4 * HALF,
        )
    return found


@functools.cache
def _kernel(device: int) -> Any:
    """For the current device, of that index."""
    if shared_memory(device) < 4 * HALF + 1024:
        return None
    return compiled(_SOURCE, "order", shared=4 * HALF)
