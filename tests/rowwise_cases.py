"""Runs the kernels of `numdev.metrics.rowwise` in Triton's interpreter, on the CPU, and prints as JSON how
far what they sum is from what PyTorch sums step by step, relative to the largest of each.

    TRITON_INTERPRET=1 python tests/rowwise_cases.py

`test_rowwise.py` starts it once and asserts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from interpreted import prepare
from torch import Tensor

from numdev import formats
from numdev.formats import FORMATS, Format, round_to, ulp
from numdev.metrics import bits as bits_of_runs
from numdev.metrics import comparison, rowwise, yardstick
from numdev.metrics.binning import membership
from numdev.metrics.comparison import Comparison, Totals, compare_precision
from numdev.metrics.wasserstein import sorting
from numdev.metrics.yardstick import Yardstick

SHAPES = ((1, 1, 1, 1), (2, 3, 37, 9), (1, 2, 150, 16), (1, 1, 9, 200))
DTYPES = (torch.float16, torch.float32, torch.float64)
NARROW = ("float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def made(shape: tuple[int, ...], *, baseline: bool) -> tuple[Yardstick, Tensor, Tensor]:
    """A regular yardstick, an output and what is expected of it. Some of the reference is 0."""
    g = torch.Generator().manual_seed(sum(shape))

    def noise(size: float) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * size

    reference = noise(1.0)
    reference.flatten()[::7] = 0.0
    y = Yardstick(
        reference=reference,
        term_scale=reference.abs() + noise(1.0).abs() + 0.01,
        empty=torch.zeros(shape[:3], dtype=torch.bool),
        format=FORMATS["float16"],
        baseline=(reference + noise(0.01)).half() if baseline else None,
        unrounded=reference + noise(0.005),
        arithmetic=torch.full(shape[:3], 1e-6, dtype=torch.float64),
        baseline_fp32=(reference + noise(0.001)).float() if baseline else None,
        baseline_lower=(reference + noise(0.02)).half() if baseline else None,
        lower=FORMATS["float8_e4m3fn"] if baseline else None,
    )
    return y, reference + noise(0.003), (reference + noise(0.004)).float()


def tables(found: Comparison) -> dict[str, Tensor]:
    """All that comes to the host, by what it is and its name."""
    return named(found.on_host().value)


def named(found: Totals) -> dict[str, Tensor]:
    signed = dict(zip(("features", "along", "counts"), found.signed, strict=False))
    by_kind = {
        "groups": found.groups,
        "largest": found.largest,
        "transport": found.transport,
        "signed": signed,
        "bins": found.along,
    }
    return {
        f"{kind} {name}": torch.from_numpy(x)
        for kind, some in by_kind.items()
        for name, x in some.items()
    }


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest there is."""
    if not a.isfinite().all():
        return math.inf
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def by_steps(y: Yardstick) -> Yardstick:
    """The same, of which nothing is known."""
    other = dataclasses.replace(y)
    other.__dict__["_at_once"] = None
    return other


def beside(y: Yardstick, o: Tensor, e: Tensor | None) -> dict[str, float]:
    """How far one pass is from steps: the output, and the yardstick's own precision deviation."""
    steps, bins = by_steps(y), membership(o.shape[2], torch.arange(o.shape[2]))
    at_once = comparison._at_once(o, o, e, y)
    assert at_once is not None
    assert y.known is not None
    assert steps.known is None
    pairs = [
        (at_once, comparison._step_by_step(o, o, e, steps)),
        (compare_precision(y), compare_precision(steps)),
    ]
    found = {}
    for i, (one, other) in enumerate(pairs):
        a, b = (named(x.on_host(None if i else bins).value) for x in (one, other))
        assert a.keys() == b.keys()
        found |= {f"{name} {i}": apart(a[name], b[name]) for name in a}
    return found


def case(
    shape: tuple[int, ...], dtype: torch.dtype, expected: bool, baseline: bool
) -> dict[str, Any]:
    y, o, e = made(shape, baseline=baseline)
    o = o.to(dtype)
    if shape[2] == 150:  # as models have it
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    name = f"{list(shape)} {dtype} {expected} {baseline}"
    return {"name": name, "apart": beside(y, o, e if expected else None)}


def rare(fmt: str) -> tuple[Yardstick, Tensor, Tensor]:
    """With rows of which all is 0, in one head nothing but, and a head too small for a relative
    error; the output errs in them. In fp64 an ulp of such a row has no inverse."""
    y, o, e = made((1, 3, 37, 9), baseline=True)
    assert y.unrounded is not None
    assert y.baseline is not None
    for x in (y.reference, y.term_scale, y.unrounded, y.baseline, e):
        x[:, :, 3] = 0.0
        x[:, 2] = 0.0
        x[:, 1] *= 1e-35
    assert y.arithmetic is not None
    y.arithmetic[:, 0] = 1e-40
    o[:, :, 3] = 1e-20
    o[:, 2, ::2] = 0.0
    return dataclasses.replace(y, format=FORMATS[fmt]), o, e


def rarely() -> Iterator[dict[str, bool]]:
    """Whether they come to the same, where numbers mean nothing too."""
    for fmt in ("float16", "float32", "float64"):
        for expected in (True, False):
            y, o, e = rare(fmt)
            y = by_steps(y) if fmt == "float64" else y  # of which no kernel makes a yardstick
            given = (o, o, e if expected else None)
            at_once = comparison._at_once(*given, y)
            assert at_once is not None
            found = tables(at_once)
            other = tables(comparison._step_by_step(*given, by_steps(y)))
            assert found.keys() == other.keys()
            for name in found:
                yield {f"rare {fmt} {expected} {name}": nearly(found[name], other[name], name)}


def nearly(a: Tensor, b: Tensor, name: str) -> bool:
    """Signed sums nearly cancel: they are held to the largest."""
    most = float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()) if name.startswith("signed ") else 0.0
    return torch.allclose(a, b, rtol=1e-12, atol=1e-11 * most, equal_nan=True)


def hard(count: int = 1) -> Tensor:
    """[1, 1, 1, n]: numbers of all sizes, halves between two of a format, and its ends."""
    g = torch.Generator().manual_seed(count)
    sizes = torch.randint(-160, 160, (400,), generator=g).double()
    drawn = torch.randn(400, generator=g, dtype=torch.float64) * torch.exp2(sizes)
    few = torch.randint(0, 64, (400,), generator=g).double() / 32 * torch.exp2(sizes % 20 - 10)
    ends = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        448.0,
        464.0,
        465.0,
        65504.0,
        65519.9,
        65520.0,
    ]
    ends += [
        57344.0,
        61440.0,
        2.0**-9,
        2.0**-10,
        1.5 * 2.0**-10,
        5e-324,
        1.7e308,
        3.5e38,
        2.0**-149,
    ]
    return torch.cat([drawn, few, torch.tensor(ends, dtype=torch.float64)])[None, None, None]


def rounded(fmt: Format) -> dict[str, bool]:
    """Whether floor and spacing are those of `numdev.formats`, in every bit."""
    x = hard()
    found = rowwise.compute_yardstick(x, x.flip(-1), fmt, None, None, None, None)
    bits = {
        f"floor {fmt.name}": alike(found.floor, round_to(x, fmt)),
        f"spacing {fmt.name}": alike(found.spacing, ulp(x.flip(-1), fmt)),
    }
    for saturate in (False, True):
        for dtype in (torch.float32, torch.float64):
            given = x.to(dtype)
            one = formats._computed(given, fmt, saturate)
            other = formats._rounded(given, fmt, "nearest", saturate, None)
            bits[f"rounded {fmt.name} {dtype} {saturate}"] = alike(one, other)
    return bits


def alike(a: Tensor, b: Tensor) -> bool:
    """The same numbers, the signs of zeros included; NaN is like NaN."""
    same = (a == b) & (a.signbit() == b.signbit())
    return bool((same | (a.isnan() & b.isnan())).all())


def gaps() -> Iterator[dict[str, float]]:
    for n, m in ((1, 1), (3, 1000), (2, 5000)):
        a, b = (torch.randn(n, m, dtype=torch.float64).sort(dim=1).values for _ in range(2))
        b = b.half()
        for others in ((b,), (b, b.flip(0) + 1)):
            found = rowwise.compute_gaps(a, *others).sum(dim=2)
            expected = torch.stack([sorting._gaps_torch(a, other) for other in others])
            yield {f"gaps {n} {m} {len(others)}": apart(found, expected)}


def spoilt(x: Tensor) -> Tensor:
    """Some of it not finite."""
    x = x.clone()
    for first, value in ((0, math.nan), (7, math.inf), (11, -math.inf)):
        x.view(-1)[first::23] = value
    return x


def plain() -> Iterator[dict[str, float]]:
    """Distances alone: of an output and of log-sum-exps, with rows that are empty and numbers that
    are not finite."""
    for shape in ((2, 3, 37, 9), (2, 2, 700)):
        y, o, _ = made((*shape[:2], shape[2], shape[3] if len(shape) == 4 else 1), baseline=False)
        reference, o = (x.reshape(shape) for x in (y.reference, o))
        empty = torch.zeros(shape[:3], dtype=torch.bool)
        empty[1, 1, 3:9] = True
        for some in (o, spoilt(o).float(), o.half()):
            for r in (reference, spoilt(reference).flip(2)):
                with_kernel = comparison.compare_plain(some, r, empty)
                given, comparison.plain_heads = comparison.plain_heads, lambda *given: None
                by_steps = comparison.compare_plain(some, r, empty)
                comparison.plain_heads = given
                a, b = tables(with_kernel), tables(by_steps)
                assert a.keys() == b.keys()
                yield {f"{name} {shape}": apart(a[name], b[name]) for name in a}


def bits_of(tensors: Iterator[Tensor]) -> Iterator[dict[str, bool]]:
    """Checksums, by the kernel and step by step."""
    for x in tensors:
        runs = [x, x.clone(), x.clone()]
        if x.numel():
            runs[1][-1, -1, -1] = 3.0
        for tensors in ([runs[:1]], [runs[::2]], [runs]):
            found = [how(tensors) for how in (bits_of_runs.by_kernel, bits_of_runs.by_steps)]
            name = f"bits {x.dtype} {list(x.shape)} {len(tensors[0])} {tensors[0][-1] is runs[2]}"
            yield {name: looked_at(found[0], x) == looked_at(found[1], x)}


def looked_at(found: bits_of_runs.Found, x: Tensor) -> list[list[int]]:
    """Checksums, whether any run is another, and what comes first."""
    sums = found.pairs[0][0].sum(dim=(0, 2)).tolist()
    differ = [int(pair[1].any()) for pair in found.pairs]
    return [sums, differ, found.pairs[0][2, 0, :, 0].tolist() if x.numel() else []]


def of_all_kinds() -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    for shape in ((1, 1, 1), (2, 3, 37, 9), (1, 2, 3000), (3, 2, 0, 4)):
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2):
            yield x.to(dtype)
    yield torch.randn(2, 30, 4, 8, generator=g).half().transpose(1, 2)


def main() -> None:
    prepare()
    comparison.output_heads = lambda *given, expected, baseline: rowwise.compute_output(
        *given, expected, baseline
    )
    comparison.plain_heads = rowwise.compute_plain
    yardstick.yardstick_sums = lambda r, t, f, **beside: rowwise.compute_yardstick(
        r, t, f, *(beside[name] for name in ("unrounded", "baseline", "fp32", "lower"))
    )
    rowwise.ELEMENTS, rowwise.BLOCKS, rowwise.ROWS = 512, 2, 32
    grid = [(shape, torch.float16, True, True) for shape in SHAPES]
    grid += [(SHAPES[1], dtype, e, b) for dtype in DTYPES for e in (0, 1) for b in (0, 1)]
    cases = [case(*which) for which in grid]
    cases += [{"name": "gaps", "apart": found} for found in gaps()]
    cases += [{"name": "plain", "apart": found} for found in plain()]
    bits = [rounded(FORMATS[name]) for name in NARROW]
    bits += bits_of(of_all_kinds())
    bits += rarely()
    json.dump(
        {"cases": cases, "bits": {k: x for found in bits for k, x in found.items()}}, sys.stdout
    )


if __name__ == "__main__":
    main()
