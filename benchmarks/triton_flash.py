"""How long does triton-flash take beside sdpa-flash?

    python benchmarks/triton_flash.py [--repeats 30] [--tiles]

Causal self-attention in bfloat16 on CUDA, 16 heads, 16384 tokens in a call. For each shape the two
take turns, so that the clock's moods meet both, and the median of CUDA-event timings stands for
each. Backward is timed alone, as what a whole training step takes beyond its forward pass. With
--tiles the forward pass of triton-flash is timed with other tiles than its own as well. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.kernels.triton_flash.options import in_force
from numdev.kernels.triton_flash.plan import forward_tiles, plan_of

SHAPES = tuple(itertools.product((64, 128), (4096, 16384)))
"""(head_dim, length)"""
HEADS, TOKENS = 16, 16384
OTHER_TILES = tuple(
    {"block_q": block_q, "block_kv": block_kv, "num_warps": warps, "num_stages": stages}
    for block_q, block_kv, warps, stages in (
        *((64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 64, 4, 2)),
        *((128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 4, 2)),
        *((128, 128, 8, 2), (128, 128, 8, 3)),
    )
)


def main() -> None:
    parser = argparse.ArgumentParser(description="triton-flash beside sdpa-flash")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tiles", action="store_true", help="time other tiles too")
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, causal\n")
    compared(given.repeats)
    if given.tiles:
        print()
        tiles(given.repeats)


def compared(repeats: int) -> None:
    """The table of both kernels."""
    print("| head_dim | length | pass | sdpa-flash, ms | TFLOP/s | triton-flash, ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    pair = [find("sdpa-flash"), find("triton-flash")]
    for head_dim, length in SHAPES:
        case = case_of(head_dim, length)
        forward = medians([partial(kernel.attend, case) for kernel in pair], repeats)
        steps = medians([partial(kernel.gradients, case) for kernel in pair], repeats)
        backward = [step - pass_ for step, pass_ in zip(steps, forward, strict=True)]
        for name, (sdpa, triton), products in (("forward", forward, 2), ("backward", backward, 5)):
            rate = products * work(case) / sdpa / 1e9
            row = f"| {head_dim} | {length} | {name} | {sdpa:.3f} | {rate:.0f} | {triton:.3f} "
            print(f"{row}| {triton / sdpa:.2f} |", flush=True)


def tiles(repeats: int) -> None:
    """The forward pass by tiles; those that do not fit are left out, with the reason."""
    print("| head_dim | tile | warps | stages | ms, length 16384 | |")
    print("|---|---|---|---|---|---|")
    kernel = find("triton-flash")
    for head_dim in (64, 128):
        case = case_of(head_dim, 16384)
        for options in OTHER_TILES:
            label = "{block_q} x {block_kv} | {num_warps} | {num_stages}".format(**options)
            mark = "default" if options == defaults(case) else ""
            try:
                (took,) = medians([partial(kernel.attend, case, **options)], repeats)
            except Exception as error:  # what a compiler says of too large a tile is its affair
                print(f"| {head_dim} | {label} | | {type(error).__name__} |")
                continue
            print(f"| {head_dim} | {label} | {took:.3f} | {mark} |", flush=True)


def defaults(case: AttentionCase) -> dict[str, Any]:
    """The kernel's own tiles for a case."""
    options = in_force({}, find("triton-flash").function)
    return forward_tiles(plan_of(case, options), case.q.dtype, options)._asdict()


def case_of(head_dim: int, length: int) -> AttentionCase:
    made = torch.Generator("cuda").manual_seed(0)
    shape = (TOKENS // length, HEADS, length, head_dim)
    q, k, v, grad_out = (
        torch.randn(shape, generator=made, device="cuda").to(torch.bfloat16) for _ in "qkvo"
    )
    return AttentionCase(
        ref=CaseRef(case="timed"),
        q=q,
        k=k,
        v=v,
        grad_out=grad_out,
        scale=head_dim**-0.5,
        is_causal=True,
    )


def work(case: AttentionCase) -> float:
    """Floating-point operations of one product of a causal pass."""
    batch, heads, length, head_dim = case.q.shape
    return batch * heads * length * length * head_dim


def medians(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of each call, the median over repeats in which they take turns. Something else
    keeps the GPU busy while a call is prepared: what is timed is the device alone."""
    other = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for call in calls:
        for _ in range(3):  # compiles, and warms up
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
            torch.mm(other, other)
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    main()
