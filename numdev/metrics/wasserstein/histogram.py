"""How often each 16-bit pattern occurs in a tensor on an NVIDIA GPU, counted in shared memory.

A multiprocessor's own memory adds to a counter in about a cycle, and many threads to one counter at
once, where the device's memory makes them wait for each other. All 65,536 counters do not fit, so a
block keeps a part of them and passes over what belongs to the others': each pattern is read once
for each part, which the caches serve.

The kernel is CUDA C, since Triton has no counters of its own in shared memory, and is compiled when
first needed by what PyTorch brings along. Where that cannot be, `counted` says so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from numdev.metrics.gpucode import compiled, on_nvidia, shared_memory

__all__ = ["counted"]

PATTERNS = 1 << 16
THREADS = 1024
MOST = 1 << 30
"""Elements at a time: positions and a block's counts are 32-bit integers."""

_SOURCE = r"""
extern "C" __global__ void count(const uint4* x, const unsigned short* rest, int vectors,
                                 int remaining, unsigned long long* counts, int bins) {
  extern __shared__ unsigned int here[];
  const unsigned int first = blockIdx.y * bins;
  for (int i = threadIdx.x; i < bins; i += blockDim.x) here[i] = 0;
  __syncthreads();
  auto add = [&](unsigned int pattern) {
    const unsigned int bin = pattern - first;  // far too large below the part
    if (bin < bins) atomicAdd(&here[bin], 1u);
  };
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
    const uint4 eight = x[i];
    const unsigned int pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      add(pairs[k] & 0xffffu);
      add(pairs[k] >> 16);
    }
  }
  if (blockIdx.x == 0 && threadIdx.x < remaining) add(rest[threadIdx.x]);
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += blockDim.x)
    if (here[i]) atomicAdd(&counts[first + i], (unsigned long long)here[i]);
}
"""


def counted(bits: Tensor) -> Tensor | None:
    """The count of each pattern of [n] int16, by its unsigned number: int64 [65536] where `bits`
    are. None where it cannot be counted so: not on CUDA, or there is no compiler."""
    if not on_nvidia(bits.device):
        return None
    with torch.cuda.device_of(bits):
        kernel = _kernel(bits.device.index)
        if kernel is None:
            return None
        counts = torch.zeros(PATTERNS, dtype=torch.int64, device=bits.device)
        for part in bits.contiguous().split(MOST):
            _launch(kernel, part, counts)
    return counts


def _launch(kernel: Any, bits: Tensor, counts: Tensor) -> None:
    if bits.data_ptr() % 16:  # read eight at a time
        bits = bits.clone()
    parts = _parts(shared_memory(bits.device.index))
    bins = PATTERNS // parts
    processors = torch.cuda.get_device_properties(bits.device).multi_processor_count
    vectors, remaining = divmod(bits.numel(), 8)
    kernel(
        grid=(max(1, processors // parts), parts, 1),
        block=(THREADS, 1, 1),
        args=[bits, bits[8 * vectors :], vectors, remaining, counts, bins],
        shared_mem=4 * bins,
    )


def _parts(shared_memory: int) -> int:
    """Into how many parts the counters, 4 bytes each, are divided to fit: a power of two."""
    parts = 1
    while 4 * PATTERNS // parts > shared_memory:
        parts *= 2
    return parts


@functools.cache
def _kernel(device: int) -> Any:
    """For the current device, of that index."""
    return compiled(_SOURCE, "count", shared=4 * PATTERNS // _parts(shared_memory(device)))
