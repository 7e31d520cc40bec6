"""How fast is the fp64 reference, and how much memory does it take, on this GPU?

    python benchmarks/reference.py [--repeats 5] [--long]

Everything is a ratio within one run, of medians of CUDA-event timings.

- Forward and backward of causal self-attention, 8 heads, bfloat16, against the rate of an 8192^3
  fp64 matrix product. Attention counts 2 matrix products forward and 5 backward, as papers count
  them (Dao et al., arXiv 2205.14135); the reference makes 3 and 8, for the term scales, and its
  rate by those is given too.
- The same calls by the blocked path, and by `scaled_dot_product_attention` on fp64 inputs, which is
  what one would do without numdev; with the memory each takes beyond its inputs and outputs.
- Sampled rows against all rows.
- With --long, 131072 tokens: all rows, and 256 of each head beside the kernels audited.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.row_samples import Sample

SIDE, HEADS = 8192, 8
Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((64, 8192), (64, 16384), (128, 8192), (128, 16384))
"""(head_dim, length)"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long", action="store_true", help="131072 tokens as well")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("reference.py: expected a CUDA GPU, got none")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, causal, "
        f"{HEADS} heads, bf16"
    )
    tables = [rates(options.repeats), others(options.repeats), sampled(options.repeats)]
    for table in (*tables, *([long(options.repeats)] if options.long else [])):
        print()
        for row in table:
            print("| " + " | ".join(row) + " |", flush=True)


def rates(repeats: int) -> Iterator[tuple[str, ...]]:
    """The rate of the reference as a part of that of a matrix product."""
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.float64, device="cuda") for _ in range(2))
    peak = 2 * SIDE**3 / seconds(lambda: a @ b, repeats)
    title = f"of the {SIDE}^3 fp64 product's {peak / 1e12:.1f} TFLOP/s"
    yield (
        "head_dim",
        "length",
        "forward, ms",
        title,
        "by 3 products",
        "step, ms",
        "backward",
        "by 8",
    )
    yield ("---",) * 8
    for head_dim, length in SHAPES:
        case = case_of(head_dim, length)
        product = HEADS * length**2 * head_dim  # causal: half of 2 n^2 d
        forward = seconds(lambda case=case: fused.attend(case), repeats)
        step = seconds(lambda case=case: fused.gradients(case), repeats)
        one = product / peak
        yield (
            f"{head_dim}",
            f"{length}",
            f"{1e3 * forward:.1f}",
            f"{2 * one / forward:.2f}",
            f"{3 * one / forward:.2f}",
            f"{1e3 * step:.1f}",
            f"{5 * one / (step - forward):.2f}",
            f"{8 * one / (step - forward):.2f}",
        )


def others(repeats: int) -> Iterator[tuple[str, ...]]:
    """The other ways to have an fp64 answer."""
    yield "head_dim", "length", "by", "ms", "times as long", "beyond in and out, MB"
    yield ("---",) * 6
    for head_dim, length in SHAPES:
        case = replace(case_of(head_dim, length), grad_out=None)
        wide = [x.double() for x in (case.q, case.k, case.v)]
        ways: dict[str, Callable[[], object]] = {
            "fused": lambda case=case: fused.attend(case),
            "blocked": lambda case=case: blocked.attend(case),
            "SDPA": lambda case=case, wide=wide: (
                torch.nn.functional.scaled_dot_product_attention(
                    *wide, is_causal=True, scale=case.scale
                )
            ),
        }
        first = None
        for name, way in ways.items():
            try:
                memory = beyond(way)
                time = seconds(way, repeats)
            except torch.OutOfMemoryError:
                yield f"{head_dim}", f"{length}", name, "out of memory", "", ""
                continue
            first = first or time
            cells = (f"{1e3 * time:.1f}", f"{time / first:.1f}", f"{memory / 1e6:.0f}")
            yield f"{head_dim}", f"{length}", name, *cells


def sampled(repeats: int) -> Iterator[tuple[str, ...]]:
    """256 rows of each head against all."""
    yield "head_dim", "length", "all rows, ms", "256 rows, ms", "ratio"
    yield ("---",) * 5
    for head_dim, length in SHAPES:
        case = replace(case_of(head_dim, length), grad_out=None)
        some = rows_of(case, 256)
        whole = seconds(lambda case=case: fused.attend(case), repeats)
        part = seconds(lambda some=some: fused.attend(some), repeats)
        times = (f"{1e3 * whole:.1f}", f"{1e3 * part:.2f}", f"{whole / part:.1f}")
        yield f"{head_dim}", f"{length}", *times


def long(repeats: int) -> Iterator[tuple[str, ...]]:
    """131072 tokens, head_dim 128."""
    case = replace(case_of(128, 131072), grad_out=None)
    yield "131072 tokens, head_dim 128", "s", "beyond in and out, MB"
    yield ("---",) * 3
    some = rows_of(case, 256)
    ways: dict[str, Callable[[], object]] = {
        "reference, all rows": lambda: fused.attend(case),
        "reference, 256 rows of each head": lambda: fused.attend(some),
        **{
            name: lambda name=name: find(name).attend(case)
            for name in ("sdpa-flash", "sdpa-cudnn", "triton-flash")
        },
    }
    for name, way in ways.items():
        memory = beyond(way)
        yield name, f"{seconds(way, max(1, repeats // 2)):.3f}", f"{memory / 1e6:.0f}"


def case_of(head_dim: int, length: int) -> AttentionCase:
    generator = torch.Generator(device="cuda").manual_seed(length + head_dim)
    shape = (1, HEADS, length, head_dim)
    q, k, v, dO = (
        torch.randn(
            shape, generator=generator, device="cuda", dtype=torch.float32
        ).bfloat16()
        for _ in range(4)
    )
    ref = CaseRef(case=f"{length}x{head_dim}")
    return AttentionCase(
        ref=ref, q=q, k=k, v=v, scale=head_dim**-0.5, is_causal=True, grad_out=dO
    )


def rows_of(case: AttentionCase, count: int) -> AttentionCase:
    rows = Sample(count=count).draw(case.q_len, case.ref.case)
    assert rows is not None
    return case.restrict(rows=rows.to(case.q.device))


def seconds(way: Callable[[], object], repeats: int) -> float:
    """The median time of `way`, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        way()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def beyond(way: Callable[[], object]) -> float:
    """The most memory `way` holds at once, beyond what is there and what it returns, in
    bytes."""
    way()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    answer = way()
    torch.cuda.synchronize()
    parts = vars(answer).values() if isinstance(answer, Reference) else [answer]
    tensors = [
        x if isinstance(x, torch.Tensor) else getattr(x, "out", None) for x in parts
    ]
    returned = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    return torch.cuda.max_memory_allocated() - before - returned


if __name__ == "__main__":
    main()
