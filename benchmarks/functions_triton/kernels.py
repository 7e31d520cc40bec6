"""Sound and faulty Triton kernels of common functions, with their references; no
benchmark itself (`functions_gpu.py` runs them).

A fault is a flag of a sound kernel, so that both are the same code but for the mistake.
Under TRITON_INTERPRET=1 all of them run on a CPU; the interpreter needs constant bounds
of loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

Function = Callable[..., Any]
LOG2_E = tl.constexpr(1.4426950408889634)


# --- norms ----------------------------------------------------------------------------


@triton.jit
def _rms_norm(x, w, out, inverse, n, count, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v, axis=0) / count + 1e-6)
    tl.store(inverse + row, scale)
    y = v * scale
    if WEIGHTED:
        y *= tl.load(w + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _rms_norm_backward(
    x, w, back, inverse, dx, parts, n, BLOCK: tl.constexpr, CENTRED: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    scale = tl.load(inverse + row)
    unit = tl.load(x + row * n + at, mask=inside, other=0.0).to(tl.float32) * scale
    g = tl.load(back + row * n + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + row * n + at, g * unit, mask=inside)
    g *= tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        g -= unit * (tl.sum(g * unit, axis=0) / n)
    tl.store(dx + row * n + at, (g * scale).to(dx.dtype.element_ty), mask=inside)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, count: int, weighted: bool, centred: bool) -> Tensor:  # fmt: skip
        rows, n = x.shape
        out, inverse = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        block = triton.next_power_of_2(n)
        _rms_norm[(rows,)](x, w, out, inverse, n, count, BLOCK=block, WEIGHTED=weighted)
        ctx.save_for_backward(x, w, inverse)
        ctx.centred = centred
        return out

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor | None, ...]:
        x, w, inverse = ctx.saved_tensors
        rows, n = x.shape
        dx, parts = torch.empty_like(x), x.new_empty(rows, n, dtype=torch.float32)
        _rms_norm_backward[(rows,)](
            x, w, back.contiguous(), inverse, dx, parts, n,
            BLOCK=triton.next_power_of_2(n), CENTRED=ctx.centred,
        )  # fmt: skip
        return dx, parts.sum(0).to(w.dtype), None, None, None


def rms_norm(x: Tensor, w: Tensor, *, block_mean: bool = False, weighted: bool = True, centred: bool = True) -> Tensor:  # fmt: skip
    n = x.shape[-1]
    count = triton.next_power_of_2(n) if block_mean else n
    out: Tensor = _RMSNorm.apply(x, w, count, weighted, centred)
    return out


def rms_norm_reference(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6))


@triton.jit
def _layer_norm(x, w, b, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    centred = v - tl.sum(v, axis=0) / n
    if MASKED:
        centred = tl.where(at < n, centred, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + 1e-5)
    weight = tl.load(w + at, mask=at < n, other=0.0).to(tl.float32)
    bias = tl.load(b + at, mask=at < n, other=0.0).to(tl.float32)
    y = centred * scale * weight + bias
    tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=at < n)


def layer_norm(x: Tensor, w: Tensor, b: Tensor, *, masked: bool = True) -> Tensor:
    rows, n = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(n)
    _layer_norm[(rows,)](x, w, b, out, n, BLOCK=block, MASKED=masked)
    return out


def layer_norm_reference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


# --- softmax and cross-entropy --------------------------------------------------------


@triton.jit
def _softmax(x, out, n: tl.constexpr, end: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    largest, total = -float("inf"), 0.0
    for begin in range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, mask=at < n, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(v, axis=0))
        total = total * tl.exp2((largest - new) * LOG2_E)
        total += tl.sum(tl.exp2((v - new) * LOG2_E), axis=0)
        largest = new
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, mask=at < n, other=-float("inf")).to(tl.float32)
        y = tl.exp2((v - largest) * LOG2_E) / total
        tl.store(out + row * n + at, y.to(out.dtype.element_ty), mask=at < n)


def softmax(x: Tensor, *, tail: bool = True, last_row: bool = True) -> Tensor:
    rows, n = x.shape
    out = torch.empty_like(x)
    end = n if tail else n // 256 * 256
    _softmax[(rows if last_row else rows - 1,)](x, out, n, end, BLOCK=256)
    return out


def softmax_reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


@triton.jit
def _cross_entropy(x, target, out, n, end: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    largest, total = -float("inf"), 0.0
    for begin in range(0, end, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, mask=at < n, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(v, axis=0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(v - new), axis=0)
        largest = new
    chosen = tl.load(x + row * n + tl.load(target + row)).to(tl.float32)
    loss = largest + tl.log(total) - chosen
    tl.store(out + row, loss.to(out.dtype.element_ty))


def cross_entropy(x: Tensor, target: Tensor, *, tail: bool = True) -> Tensor:
    rows, n = x.shape
    out = x.new_empty(rows)
    end = n if tail else n // 1024 * 1024
    _cross_entropy[(rows,)](x, target, out, n, end, BLOCK=1024)
    return out


def cross_entropy_reference(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target, reduction="none")


# --- elementwise ----------------------------------------------------------------------


@triton.jit
def _swiglu(gate, up, out, n, STEEPNESS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=at < n, other=0.0).to(tl.float32)
    y = g / (1 + tl.exp(-STEEPNESS * g)) * u
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < n)


def swiglu(gate: Tensor, up: Tensor, *, exchanged: bool = False, steepness: float = 1.0) -> Tensor:  # fmt: skip
    out = torch.empty_like(gate)
    n = gate.numel()
    first, second = (up, gate) if exchanged else (gate, up)
    grid = (triton.cdiv(n, 1024),)
    _swiglu[grid](first, second, out, n, STEEPNESS=steepness, BLOCK=1024)
    return out


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@triton.jit
def _rope(x, cos, sin, out, length, later, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    row = tl.program_id(0)
    place = tl.minimum(row % length + later, length - 1)
    at = tl.arange(0, HALF)
    first = 2 * at if INTERLEAVED else at
    second = 2 * at + 1 if INTERLEAVED else at + HALF
    a = tl.load(x + row * 2 * HALF + first).to(tl.float32)
    b = tl.load(x + row * 2 * HALF + second).to(tl.float32)
    c = tl.load(cos + place * HALF + at).to(tl.float32)
    s = tl.load(sin + place * HALF + at).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + row * 2 * HALF + first, (a * c - b * s).to(dtype))
    tl.store(out + row * 2 * HALF + second, (b * c + a * s).to(dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, later: int = 0) -> Tensor:  # fmt: skip
    batch, heads, length, width = x.shape
    out = torch.empty_like(x)
    _rope[(batch * heads * length,)](
        x, cos, sin, out, length, later, HALF=width // 2, INTERLEAVED=interleaved
    )
    return out


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * torch.cat((cos, cos), -1) + turned * torch.cat((sin, sin), -1)


# --- products -------------------------------------------------------------------------


@triton.jit
def _matmul(
    x, y, out, m, n, k, part: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, NARROW: tl.constexpr,
    PRECISION: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    first = tl.program_id(2) * part
    total = tl.zeros((TILE, TILE), dtype=tl.float16 if NARROW else tl.float32)
    for step in range(0, part, STEP):
        terms = first + step + tl.arange(0, STEP)
        a = tl.load(
            x + rows[:, None] * k + terms[None, :],
            mask=(rows[:, None] < m) & (terms[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            y + terms[:, None] * n + columns[None, :],
            mask=(terms[:, None] < k) & (columns[None, :] < n),
            other=0.0,
        )
        if NARROW:
            total += tl.dot(a, b, out_dtype=tl.float16)
        else:
            total += tl.dot(a, b, input_precision=PRECISION)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    place = rows[:, None] * n + columns[None, :]
    if ATOMIC:
        tl.atomic_add(out + place, total, mask=inside)
    else:
        to = out + tl.program_id(2).to(tl.int64) * m * n + place
        tl.store(to, total.to(out.dtype.element_ty), mask=inside)


def _launched(x: Tensor, y: Tensor, out: Tensor, parts: int, *, steps: int, narrow: bool = False, precision: str = "ieee", atomic: bool = False) -> None:  # fmt: skip
    """Adds `steps` steps of 32 terms in each of `parts` parts of the sum."""
    (m, k), n = x.shape, y.shape[1]
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64), parts)
    _matmul[grid](
        x, y, out, m, n, k, 32 * steps, TILE=64, STEP=32, NARROW=narrow,
        PRECISION=precision, ATOMIC=atomic,
    )  # fmt: skip


def matmul(x: Tensor, y: Tensor, *, narrow: bool = False, tail: bool = True, precision: str = "ieee") -> Tensor:  # fmt: skip
    k = x.shape[1]
    out = x.new_empty(x.shape[0], y.shape[1])
    steps = triton.cdiv(k, 32) if tail else k // 32
    narrow = narrow and x.dtype == torch.float16
    _launched(x, y, out, 1, steps=steps, narrow=narrow, precision=precision)
    return out


def split_matmul(x: Tensor, y: Tensor, *, parts: int = 4, zeroed: bool = True) -> Tensor:
    """Sums of float32 parts, added by atomics."""
    make = torch.zeros if zeroed else torch.empty
    out = make(x.shape[0], y.shape[1], dtype=torch.float32, device=x.device)
    steps = triton.cdiv(triton.cdiv(x.shape[1], 32), parts)
    _launched(x, y, out, parts, steps=steps, atomic=True)
    return out.to(x.dtype)


def split_matmul_in_16_bits(x: Tensor, y: Tensor, *, parts: int = 8) -> Tensor:
    """Sums of parts that are stored in the format of the inputs."""
    out = x.new_empty(parts, x.shape[0], y.shape[1])
    steps = triton.cdiv(triton.cdiv(x.shape[1], 32), parts)
    _launched(x, y, out, parts, steps=steps)
    return out.sum(0)


def matmul_reference(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


# --- who is what ----------------------------------------------------------------------


def normal(*shapes: tuple[int, ...], mean: float = 0.0) -> Function:
    """A function of a seed that draws normal numbers in these shapes."""

    def inputs(seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        return (drawn[0] + mean, *drawn[1:])

    return inputs


def logits_and_targets(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(64, 5000, generator=generator)
    return x, torch.randint(5000, (64,), generator=generator)


def heads_and_angles(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 50, 64, generator=generator)
    angle = torch.arange(50)[:, None] * 1e4 ** (-torch.arange(32) / 32)
    return x, angle.cos(), angle.sin()


@dataclass(frozen=True, kw_only=True)
class Version:
    """A kernel, sound or faulty, beside its reference."""

    name: str
    function: Function
    reference: Function
    inputs: Function
    fault: str = ""  # what is wrong; empty: it is sound
    formats: tuple[str, ...] = ("bfloat16", "float16")
    backward: bool = False
    gpu: bool = False  # the interpreter does not show the fault


ROWS = normal((64, 1000), (1000,))
WITH_BIAS = normal((64, 1000), (1000,), (1000,), mean=1.0)
PRODUCT = normal((128, 520), (520, 200))
# The memory of x in 16 bits is that of the float32 sums: poison is seen in them
SQUARE = normal((128, 512), (512, 256))
LONG = normal((64, 32768), (32768, 64))


def _of(what: str, function: Function, reference: Function, inputs: Function, **flags: Any) -> Version:  # fmt: skip
    """A version; `flags` beside the fields of `Version` are the kernel's."""
    fields = {
        n: flags.pop(n) for n in ("fault", "formats", "backward", "gpu") if n in flags
    }

    def run(*arguments: Any) -> Any:
        return function(*arguments, **flags)

    return Version(
        name=what,
        function=run,
        reference=reference,
        inputs=inputs,
        **fields,
    )


def versions() -> list[Version]:
    """All of them, sound ones first."""
    norm = (rms_norm, rms_norm_reference, ROWS)
    layer = (layer_norm, layer_norm_reference, WITH_BIAS)
    soft = (softmax, softmax_reference, normal((64, 1000)))
    loss = (cross_entropy, cross_entropy_reference, logits_and_targets)
    gated = (swiglu, swiglu_reference, normal((50, 1000), (50, 1000)))
    turned = (rope, rope_reference, heads_and_angles)
    product = (matmul, matmul_reference, PRODUCT)
    split = (split_matmul, matmul_reference, SQUARE)
    single = ("float32",)
    return [
        _of("rms_norm", *norm, backward=True),
        _of("layer_norm", *layer),
        _of("softmax, online", *soft),
        _of("cross_entropy, online", *loss),
        _of("swiglu", *gated),
        _of("rope", *turned),
        _of("matmul, float32 sums", *product),
        _of("matmul, float32", *product, formats=single),
        _of("split-K, float32 parts", *split),
        _of("rms_norm", *norm, block_mean=True, fault="mean over the block, not the row"),
        _of("rms_norm", *norm, weighted=False, fault="weight left out"),
        _of("rms_norm", *norm, centred=False, backward=True,
            fault="gradient without the mean's term"),
        _of("layer_norm", *layer, masked=False, fault="variance counts the padding"),
        _of("softmax", *soft, tail=False, fault="last partial block not in the sum"),
        _of("softmax", *soft, last_row=False, fault="last row not written"),
        _of("cross_entropy", *loss, tail=False, fault="last partial block not in the sum"),
        _of("swiglu", *gated, exchanged=True, fault="gate and value exchanged"),
        _of("swiglu", *gated, steepness=1.702, fault="GELU's sigmoid in place of SiLU"),
        _of("rope", *turned, interleaved=True, fault="pairs side by side"),
        _of("rope", *turned, later=1, fault="positions one too far"),
        _of("matmul", *product, tail=False, fault="last partial step of K dropped"),
        _of("matmul", *product, narrow=True, formats=("float16",),
            fault="sums in float16"),
        _of("matmul", *product, precision="tf32", formats=single, gpu=True,
            fault="float32 inputs read in TF32"),
        _of("split-K", *split, zeroed=False, fault="sums begin with what memory held"),
    ]  # fmt: skip


def by_design() -> list[Version]:
    """What is less exact than the reference on purpose."""
    return [
        _of("split-K of 32,768 terms, float32 parts", split_matmul, matmul_reference, LONG, parts=8),
        _of("split-K of 32,768 terms, parts in 16 bits", split_matmul_in_16_bits, matmul_reference, LONG),
    ]  # fmt: skip
