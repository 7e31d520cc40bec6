"""Attention with hooks: kernels that compute another function, or lose digits in one step.

Each is a plain function of all that a call may ask for, with fp32 sums and P rounded to
the inputs' format, as flash attention has them, and one thing changed; autograd makes its
gradients. Of inputs in fp64 it computes in fp64 and rounds nothing: `exactly` is what a
fault returns but for rounding. A fault is a line of the tables below: its name, what is
wrong, calls of `CALLS` that show it in an audit, default cases that show it in a check,
the pattern of its cause, and what stands in place of a hook.
"""

# ruff: noqa: E741

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels import Kernel
from planted.flash import PLAIN
from planted.record import Planted, plant

Hooks = Mapping[str, Any]
LN2 = math.log(2)
SHAPE = {"heads": 4, "head_dim": 64}
CAPPED = {"softcap": 2.0, "inputs": {"name": "normal", "logits": 4.0}}
CALLS: dict[str, dict[str, Any]] = {
    "full": {"batch": 2, "seq_len": 200},
    "causal": {"batch": 2, "seq_len": 256, "causal": True},
    "grouped": {"batch": 2, "seq_len": 150, "kv_heads": 2, "causal": True},
    "long": {"seq_len": 333},
    "uneven": {"seq_len": 64, "kv_len": 200, "causal": True},
    "queries": {"seq_len": 200, "kv_len": 64, "causal": True},
    "padding": {"batch": 2, "seq_len": 160, "mask": "padding"},
    "random": {"seq_len": 160, "mask": "mostly_masked"},
    "bias": {"seq_len": 160, "mask": "bias"},
    "capped": {"seq_len": 160, **CAPPED},
    "capped-bias": {"seq_len": 160, "mask": "bias", **CAPPED},
    "window": {"seq_len": 192, "window": 33, "causal": True},
    "window-both": {"seq_len": 192, "window": 33},
    "sinks": {"seq_len": 160, "sinks": True},
}


def calls_of(entry: Planted) -> list[dict[str, Any]]:
    """The calls that show a fault, as cases of an audit."""
    return [{"name": name, **SHAPE, **CALLS[name]} for name in entry.calls]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for beside q, k and v."""

    mask: Tensor | None
    causal: bool
    scale: float
    window: tuple[int, int]
    softcap: float
    sinks: Tensor | None


def attention(q: Tensor, k: Tensor, v: Tensor, asked: Asked, wrong: Hooks) -> Any:
    """The output, and beside it the log-sum-exp where that has a hook."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = wrong.get("inputs", lambda *x: x)(q, k, v)
    heads, kv, group = q.shape[1], k.shape[1], q.shape[1] // k.shape[1]
    read = wrong.get("kv_head", lambda h, group, kv: h // group)
    index = [read(h, group, kv) for h in range(heads)]
    scale = wrong.get("scale", lambda s: s)(asked.scale)
    Q, K, V = q.to(wide), k.to(wide)[:, index], v.to(wide)[:, index]
    S = wrong.get("scores", lambda S: S)((Q @ K.mT) * scale)
    mask, shift = asked.mask, wrong.get("mask", lambda x, s: x)
    mask = None if mask is None else shift(mask, scale)
    hidden = _hidden(S, asked, wrong)
    bias: Any = 0.0
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        bias = mask.to(wide)
    cap = wrong.get("cap", lambda S, c, s: torch.tanh(S / c) * c)
    if asked.softcap and wrong.get("cap_last"):
        S = cap(S + bias, asked.softcap, scale)
    else:
        S = (cap(S, asked.softcap, scale) if asked.softcap else S) + bias
    S = S.masked_fill(hidden, -math.inf)
    sink = None if asked.sinks is None else asked.sinks.to(wide)[None, :, None, None]
    top = S.amax(-1, keepdim=True).detach()
    top = (top if sink is None else torch.maximum(top, sink)).nan_to_num(neginf=0.0)
    top = wrong.get("maximum", lambda top: top)(top)
    P = (S - top).exp()
    keys = P.sum(-1, keepdim=True)
    total = keys
    if sink is not None:
        total = total + wrong.get("sink", lambda s, top: (s - top).exp())(sink, top)
    total = torch.where(total == 0, 1.0, total)
    lse = wrong.get("lse", lambda total, keys, top: None)(total, keys, top)
    P = wrong.get("p", lambda P, S, top: P.to(dtype).to(wide))(P, S, top)
    O = (P @ V) / wrong.get("total", lambda x, S, top: x)(total, S, top)
    O = wrong.get("out", lambda O: O)(O).to(dtype)
    return O if lse is None else (O, lse[..., 0])


def _hidden(S: Tensor, asked: Asked, wrong: Hooks) -> Tensor:
    """bool [q_len, kv_len]: what causality and a window hide."""
    n, m = S.shape[2:]
    i, j = torch.arange(n, device=S.device)[:, None], torch.arange(m, device=S.device)
    hidden = torch.zeros(n, m, dtype=torch.bool, device=S.device)
    if wrong.get("causal", lambda causal, mask: causal)(asked.causal, asked.mask):
        hidden = hidden | (j > i + wrong.get("offset", lambda n, m: 0)(n, m))
    left, right = wrong.get("window", lambda x: x)(tuple(asked.window))
    rows, keys = wrong.get("tiles", (1, 1))  # of which a window sees all or nothing
    (i0, i1), (j0, j1) = (
        (x // n * n, x // n * n + n - 1) for x, n in ((i, rows), (j, keys))
    )
    if left >= 0:
        hidden = hidden | (j1 < i0 - left)
    if right >= 0:
        hidden = hidden | (j0 > i1 + right)
    hidden |= wrong.get("hide", lambda n, m, i, j: torch.tensor(False))(n, m, i, j)
    return hidden


class _Backward(torch.autograd.Function):
    """The gradients of another function than that of forward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, other: Any
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.other = other
        with torch.no_grad():
            return out(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.other(q, k, v)
        return (*torch.autograd.grad(out, (q, k, v), grad), None, None)


class _Changed(torch.autograd.Function):
    """The identity, with changed gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, change: Any
    ) -> tuple[Tensor, ...]:
        ctx.change = change
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.change(*grads), None)


def _kernel(forward: Hooks, backward: Hooks | None, grads: Any) -> Callable[..., Any]:
    """A function with a fault of forward, which its gradients share, of backward, or of
    the gradients alone."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Any:
        used = q.shape[-1] ** -0.5 if scale is None else scale
        left, right = window_size
        asked = Asked(mask=attn_mask, causal=is_causal, scale=used, window=(left, right),
                      softcap=softcap, sinks=sinks)  # fmt: skip

        def run(wrong: Hooks) -> Callable[..., Any]:
            return lambda q, k, v: attention(q, k, v, asked, wrong)

        if grads is not None:
            q, k, v = _Changed.apply(q, k, v, lambda *x: grads(*x, used))
        if backward is not None:
            return _Backward.apply(q, k, v, run(forward), run(backward))
        return run(forward)(q, k, v)

    return kernel


def exactly(entry: Planted, case: AttentionCase) -> Tensor:
    """The fp64 output of a function of q, k and v on a case: the fault without roundings.
    That causality is aligned otherwise than top-left cannot be told to it."""
    assert not isinstance(entry.function, Kernel | str)
    window = [-1 if x is None else x for x in case.window or (None, None)]
    asked = {"attn_mask": case.mask, "is_causal": case.is_causal, "scale": case.scale,
             "window_size": window, "softcap": case.softcap or 0.0, "sinks": case.sinks}  # fmt: skip
    taken = inspect.signature(entry.function).parameters
    out: Any = entry.function(
        *(x.double() for x in (case.q, case.k, case.v)),
        **{name: x for name, x in asked.items() if name in taken},
    )
    return out[0] if isinstance(out, tuple) else out


def _fault(
    family: str,
    name: str,
    what: str,
    calls: str,
    check: str,
    says: str | None,
    forward: Hooks | None = None,
    *,
    backward: Hooks | None = None,
    grads: Any = None,
    format: str = "bfloat16",
    **fields: Any,
) -> None:
    tensors = fields.pop("tensors", "out dq dk dv")
    plant(name, family, what, _kernel(forward or {}, backward, grads), says=says,
          tensors=tuple(tensors.split()), calls=tuple(calls.split()),
          check=tuple(check.split()), formats=(format,), **fields)  # fmt: skip


# --- what stands in place of hooks -----------------------------------------------------


def reread(x: Tensor) -> Tensor:
    """[batch, length, heads, dim] in memory, read as [batch, heads, length, dim]."""
    return x.transpose(1, 2).reshape(x.shape)


def reshaped(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    return x.reshape(b, n, h, d).transpose(1, 2)


def padded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    more = (0, 0, 0, -k.shape[2] % 64)
    return q, torch.nn.functional.pad(k, more), torch.nn.functional.pad(v, more)


def padded_mask(mask: Tensor, scale: float) -> Tensor:
    shown = True if mask.dtype == torch.bool else 0.0
    return torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 64), value=shown)


def put(O: Tensor, at: Any, value: Any) -> Tensor:
    O = O.clone()
    O[at] = value
    return O


def rows(start: int, stop: int | None, step: int | None, value: Callable[[Tensor], Any]) -> Hooks:  # fmt: skip
    """Some rows of the output are something else."""
    at = (..., slice(start, stop, step), slice(None))
    return {"out": lambda O: put(O, at, value(O[at]))}


def boolean(mask: Tensor) -> bool:
    return mask.dtype == torch.bool


def tail(tile: int) -> Hooks:
    """The keys after the last whole tile are lost."""
    return {"hide": lambda n, m, i, j: (j >= m - m % tile) & (m > tile and m % tile > 0)}


def scaled(factor: float) -> Hooks:
    return {"scale": lambda s: s * factor}


def in_head_1(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return put(q, (slice(None), 1), q[:, 1] * 1.03125), k, v


def in_entry_1(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (put(q, 1, q[1] * 1.0625) if len(q) > 1 else q), k, v


def doubled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """K, which is then doubled where it stands."""
    copy = k.clone()
    k.data.mul_(2)
    return q, copy, v


def first_of_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """dK and dV come from the first query head of a group alone."""
    group = q.shape[1] // k.shape[1]
    first = (torch.arange(q.shape[1], device=q.device) % group == 0)[:, None, None]
    wide = (x.repeat_interleave(group, 1) for x in (k, v))
    return (q, *(torch.where(first, x, x.detach()) for x in wide))


def stale(S: Tensor, top: Tensor, tile: int = 32) -> Tensor:
    """How much too large weights are where nothing is rescaled as the running maximum
    moves."""
    first = (torch.arange(S.shape[-1], device=S.device) // tile + 1) * tile - 1
    seen = S.detach().cummax(-1).values[..., first.clamp(max=S.shape[-1] - 1)]
    return torch.where(S.isfinite(), (top - seen).exp(), 0.0)


def merging(width: int, less: float) -> Hooks:
    """Parts of so many keys are merged wrongly: their weights are multiplied by
    exp(-less times their log-sum-exp)."""

    def factor(S: Tensor, top: Tensor) -> Tensor:
        parts = [
            x.logsumexp(-1, keepdim=True).expand(x.shape)
            for x in (S - top).split(width, -1)
        ]
        weight = (-less * torch.cat(parts, -1)).nan_to_num(neginf=0.0).exp()
        return torch.where(S.isfinite(), weight, 0.0)

    def total(x: Tensor, S: Tensor, top: Tensor) -> Tensor:
        return ((S - top).exp() * factor(S, top)).sum(-1, keepdim=True)

    return {"p": lambda P, S, top: P * factor(S, top), "total": total}


def in_bits(bits: int) -> Callable[[Tensor], Tensor]:
    """Rounding to so many significant bits, which autograd does not see."""

    def rounded(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x.detach().double())
        near = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent).to(x.dtype)
        return x + (near - x).detach()

    return rounded


def cut(x: Tensor, bits: int, half: int = 0) -> Tensor:
    """fp32 without its last bits, which autograd does not see: truncated, or with `half`
    of the last bit that stays rounded, ties away from zero, as cvt.rna does."""
    stays = (x.detach().float().view(torch.int32) + half) & -(1 << bits)
    return x + (stays.view(torch.float32) - x).detach()


in_tf32 = functools.partial(cut, bits=13, half=1 << 12)


def noisy(size: float, at: Any) -> Hooks:
    """Noise that is the same in every run, relative to the output."""

    def out(O: Tensor) -> Tensor:
        draw = torch.randn(O.shape, generator=torch.Generator().manual_seed(7)).to(O)
        return put(O, at, (O + size * O[at].detach().abs().mean() * draw)[at])

    return {"out": out}


TURN = itertools.count()


def uneven(O: Tensor) -> Tensor:
    """Two results, in turn."""
    draw = torch.randn(O.shape, generator=torch.Generator().manual_seed(next(TURN) % 2))
    return O * (1 + 2e-4 * draw.to(O))


# --- the kernels ----------------------------------------------------------------------

ALL = slice(None)
FULL = " ".join(PLAIN)
LARGER = "|scale is too large"  # is true of a call in which a wrong scale saturates rows
TAIL = r"last (\d+ keys are|key is) dropped"
_function, _mask, _grouping, _place, _lse, _gradient, _rounding = (
    functools.partial(_fault, family) for family in
    ("function", "mask", "grouping", "place", "lse", "gradient", "rounding")
)  # fmt: skip
plant("sound-by-autograd", "sound", "A softmax by hand, P cast for its product, gradients by autograd.",
      _kernel({}, None, None))  # fmt: skip

# fmt: off
# Scales, sums and keys
_function("scale-ignored", "The scale is 1/8, whatever is asked for.", "", "scale", "scale", {"scale": lambda s: 0.125})
_function("scale-forgotten", "The scores are not scaled.", FULL, "full", "not scaled" + LARGER, {"scale": lambda s: 1.0})
_function("scale-twice", "The scale is applied twice.", FULL, "full", "twice|1/head_dim", {"scale": lambda s: s * s})
_function("scale-double", "The scale is 2 times what it should be.", FULL, "full", r"scale is (2\.00|1\.99)" + LARGER, scaled(2.0))
_function("scale-ln2", "The exponential is to base 2, and the scale lacks log2(e).", FULL, "full", r"base 2|scale is 0\.69", scaled(LN2))
_function("scale-101", "The scale is 1 % too large.", FULL, "full", r"scale is 1\.0(10|09)", scaled(1.01))
_function("scale-1005", "The scale is 0.5 % too large.", FULL, "full", r"scale is 1\.00[456]", scaled(1.005))
_function("scale-1001", "The scale is 0.1 % too large.", FULL, "full", r"scale is 1\.00(1|09)", scaled(1.001))
_function("scale-095", "The scale is 5 % too small.", FULL, "full", r"scale is 0\.9(50|49)", scaled(0.95))
_place("scale-of-one-head", "Head 1 has 1.03 times the scale.", FULL, "full", r"scale is 1\.0[34]", {"inputs": in_head_1})
_place("entry-1-scaled", "Batch entry 1 has 1.06 times the scale.", "full causal", "grouped", r"scale is 1\.06.* entry 1 alone", {"inputs": in_entry_1})
for _size in (64, 80, 96, 128, 192):
    _function(f"tail-{_size}", f"The keys after the last multiple of {_size} are dropped.", "long", "long causal", rf"{TAIL}|last full tile of {_size} are dropped", tail(_size))
_function("writes-into-k", "The answer is right, and K is twice what it was.", "", "", None, {"inputs": doubled})
_function("two-faults", "The scale is 1 % too large, and the keys after the last multiple of 64 are dropped.", "long", "long", rf"scale is 1\.0|{TAIL}|last full tile of 64", {**scaled(1.01), **tail(64)})
_function("last-key", "The last key is dropped.", FULL, "full", TAIL, {"hide": lambda n, m, i, j: j == m - 1})
_function("first-key", "The first key is dropped.", "full", "full", "first key", {"hide": lambda n, m, i, j: (j == 0) & (m > 1)})
_function("key-37", "Key 37 is dropped.", FULL, "full", "key 37 ", {"hide": lambda n, m, i, j: (j == 37) & (i != 37) & (m > 40)})
_function("padding-counts", "Keys are padded with zeros to tiles of 64, which take part.", "full long", "full", "padded with zeros", {"inputs": padded, "mask": padded_mask})
_function("output-101", "The output is 1 % too large.", FULL, "full", r"output is 1\.01", {"out": lambda O: O * 1.01})
_function("output-1002", "The output is 0.2 % too large.", FULL, "full", r"output is 1\.00[123]", {"out": lambda O: O * 1.002})
_function("output-10000", "The output is 10,000 times what it should be.", FULL, "full", "output is", {"out": lambda O: O * 1e4})
_function("no-row-sum", "The output is not divided by the row sum.", FULL, "full", "row sum", {"total": lambda x, S, top: torch.ones_like(x)})
_function("epsilon-1e1", "0.1 is added to the row sum.", FULL, "full", r"row sum is 0\.1 ", {"total": lambda x, S, top: x + 0.1})
_function("epsilon-1e2", "0.01 is added to the row sum.", FULL, "full", r"row sum is 0\.01 ", {"total": lambda x, S, top: x + 0.01})
_function("epsilon-1e3", "0.001 is added to the row sum.", FULL, "default", r"row sum is 0\.001", {"total": lambda x, S, top: x + 1e-3})
_function("no-maximum", "The exponential is taken without its maximum, and overflows.", "", "high-scores", None, {"maximum": torch.zeros_like}, rule="finiteness")
_function("stale-output", "The accumulator is not rescaled as the running maximum moves.", FULL, "full", "the accumulator is not rescaled", {"p": lambda P, S, top: (P * stale(S, top)).to(torch.bfloat16).float()})
_function("stale-sum", "The row sum is not rescaled as the running maximum moves.", FULL, "full", "the row sum is not rescaled", {"total": lambda x, S, top: ((S - top).exp() * stale(S, top)).sum(-1, keepdim=True)})
_function("parts-base-2", "Parts of 64 keys are merged with powers of 2.", FULL, "full", "powers of 2", merging(64, 1 - LN2))
_function("parts-alike", "Parts of 64 keys count alike.", FULL, "full", "count alike", merging(64, 1.0))
# Layouts
_function("v-misread", "V is read in another layout.", FULL, "full", r"v is (read|wrongly stored) as", {"inputs": lambda q, k, v: (q, k, reread(v))})
_function("q-misread", "Q is read in another layout.", FULL, "full", r"q is (read|wrongly stored) as", {"inputs": lambda q, k, v: (reread(q), k, v)})
_function("v-reshaped", "V is reshaped where it should be transposed.", FULL, "full", r"v is (read|wrongly stored) as", {"inputs": lambda q, k, v: (q, k, reshaped(v))})
_function("out-misread", "The output is stored in another layout.", FULL, "full", "output is stored as", {"out": reread})
_function("all-misread", "All tensors are walked as [batch, length, heads, dim].", FULL, "length-of-head-dim", "and the output are stored", {"inputs": lambda *x: tuple(map(reshaped, x)), "out": lambda O: O.transpose(1, 2).reshape(O.shape)})
_function("heads-for-length", "The axes of heads and of length are exchanged.", "", "length-of-head-dim", "heads' axis", {"inputs": lambda *x: tuple(y.transpose(1, 2) for y in x), "out": lambda O: O.transpose(1, 2)})
_function("v-shifted", "Keys read the value of the one before.", FULL, "full", "V is shifted", {"inputs": lambda q, k, v: (q, k, v.roll(1, 2))})
_function("v-reversed", "V is read in reverse.", FULL, "full", "V is read in reverse", {"inputs": lambda q, k, v: (q, k, v.flip(2))})
# Soft caps
_function("cap-ignored", "The soft cap is ignored.", "capped", "soft-cap", "soft cap is ignored", {"cap": lambda S, c, s: S})
_function("cap-last", "The soft cap is applied after the mask is added.", "capped-bias", "", "soft cap is applied after", {"cap_last": True})
_function("cap-before-scale", "The soft cap is applied before the scale.", "capped", "soft-cap", "before the scale", {"cap": lambda S, c, s: torch.tanh(S / s / c) * c * s})
_function("cap-tanh-product", "The soft cap multiplies a score by the tanh of it over the cap.", "capped", "soft-cap", "by the tanh of it over", {"cap": lambda S, c, s: S * (S / c).tanh()})
_function("cap-own-tanh", "The soft cap multiplies a score by its tanh.", "capped", "soft-cap", "by its tanh", {"cap": lambda S, c, s: S * S.tanh()})
_function("cap-not-divided", "Scores are not divided by the soft cap.", "capped", "soft-cap", "not divided by the soft cap", {"cap": lambda S, c, s: c * S.tanh()})
_function("cap-not-multiplied", "The tanh is not multiplied by the soft cap.", "capped", "soft-cap", "not multiplied by", {"cap": lambda S, c, s: (S / c).tanh()})
_function("cap-clamped", "Scores are clamped at the soft cap.", "capped", "soft-cap", "clamped", {"cap": lambda S, c, s: S.clamp(-c, c)})
# Sinks
_function("sinks-ignored", "The sinks are ignored.", "sinks", "sinks", "sinks are ignored", {"sink": lambda s, top: 0.0})
_function("sinks-twice", "The sinks are counted twice.", "sinks", "sinks", "counted twice", {"sink": lambda s, top: 2 * (s - top).exp()})
_function("sinks-ln2", "The sinks lack log2(e) before an exponential to base 2.", "sinks", "sinks", "sink lacks log2", {"sink": lambda s, top: (s * LN2 - top).exp()})
_function("sinks-of-next-head", "Heads get the sink of the next one.", "sinks", "sinks", "sinks? of the (next|previous)", {"sink": lambda s, top: (s.roll(-1, 1) - top).exp()})
_function("sinks-of-head-0", "All heads get head 0's sink.", "sinks", "sinks", "head 0's sink", {"sink": lambda s, top: (s[:, :1] - top).exp()})
_function("sinks-of-head-2", "All heads get head 2's sink.", "sinks", "sinks", "head 2's sink", {"sink": lambda s, top: (s[:, 2:3] - top).exp()})
_function("sinks-reversed", "The sinks are read in reverse order.", "sinks", "sinks", "reverse order", {"sink": lambda s, top: (s.flip(1) - top).exp()})
_function("sinks-constant", "Every sink is 1.", "sinks", "sinks", r"a sink of 1\.00, not its own", {"sink": lambda s, top: (1.0 - top).exp()})
_function("sinks-zero", "Every sink is 0.", "sinks", "sinks", r"a sink of 0\.00, not its own", {"sink": lambda s, top: (-top).exp()})
_function("sinks-one", "A sink adds 1 to the row sum, whatever the maximum is.", "sinks", "sinks", "row sum is (0.9|1)", {"sink": lambda s, top: 1.0}, is_named=False)
_function("sinks-every-tile", "A sink is counted in each of three tiles.", "sinks", "", "counted in every tile of 64", {"sink": lambda s, top: 3 * (s - top).exp()})
_function("sink-unasked", "There is a sink of 0 that nobody asked for.", FULL, "full", r"a sink of (0\.00, which was not requested|\S+ not its own)", {"total": lambda x, S, top: x + (-top).exp()})
# Masks
_mask("causal-plus1", "Each query sees one key too many.", "causal grouped", "causal", "too many", {"offset": lambda n, m: 1})
_mask("causal-minus1", "Each query sees one key too few.", "causal grouped", "causal", "too few|too narrow on the right", {"offset": lambda n, m: -1})
_mask("causal-ignored", "Causality is ignored.", "causal grouped", "causal", "causal mask is ignored|causal mask are both", {"causal": lambda causal, mask: False})
_mask("causal-ignored-beside-mask", "Causality is ignored where there is a mask.", "", "bias-by-head", "causal mask is ignored", {"causal": lambda causal, mask: causal and mask is None})
_mask("causal-always", "Every call is causal.", "full long", "full", "causal mask is applied|aligned top-left", {"causal": lambda causal, mask: True})
_mask("causal-bottom-right", "The causal mask is aligned bottom-right.", "uneven", "causal-cross", "bottom-right", {"offset": lambda n, m: m - n})
_mask("causal-top-left", "The causal mask is aligned top-left, whatever is asked for.", "", "", "top-left")
_mask("bottom-right-more-queries", "The causal mask of more queries than keys is aligned bottom-right.", "queries", "", "bottom-right", {"offset": lambda n, m: m - n})
_mask("window-plus1", "The window is one key too wide on the left.", "window", "window", "too wide", {"window": lambda w: (w[0] + (w[0] >= 0), w[1])})
_mask("window-minus1", "The window is one key too narrow on the left.", "window", "window", "too narrow", {"window": lambda w: (w[0] - (w[0] >= 0), w[1])})
_mask("window-ignored", "The window is ignored.", "window", "window", "window is ignored", {"window": lambda w: (-1, -1)})
_mask("window-left-ignored", "The window is ignored on the left.", "window-both", "window-both", "ignored on the left|window is ignored", {"window": lambda w: (-1, w[1])})
_mask("window-right-ignored", "The window is ignored on the right.", "", "window-both", "ignored on the right|window is ignored", {"window": lambda w: (w[0], -1)})
_mask("window-tiles", "The window shows whole tiles of 64 rows and keys.", "window window-both", "window", "in tiles (of 64|that cover)", {"tiles": (64, 64)})
_mask("window-key-tiles", "The window shows whole tiles of 32 keys.", "window window-both", "window", "in tiles of 32", {"tiles": (1, 32)})
_mask("mask-ignored", "The mask is ignored.", "padding random", "padding", "mask is ignored|masks? are both", {"mask": lambda x, s: None})
_mask("mask-inverted", "The mask is inverted, or subtracted.", "padding random", "padding", "inverted|subtracted", {"mask": lambda x, s: ~x if boolean(x) else -x})
_mask("mask-transposed", "The mask is transposed.", "random bias", "empty-rows", "transposed", {"mask": lambda x, s: x.mT if x.shape[-1] == x.shape[-2] else x})
_mask("mask-as-numbers", "A boolean mask is added as 0 and 1.", "padding random", "padding", "as 0 and 1", {"mask": lambda x, s: x.float()})
_mask("mask-scaled", "The mask is scaled like the scores.", "bias", "bias-by-head", "scaled like", {"mask": lambda x, s: x if boolean(x) else x * s})
_mask("mask-ln2", "The mask lacks log2(e) before an exponential to base 2.", "bias", "bias-by-head", "mask lacks log2", {"mask": lambda x, s: x if boolean(x) else x * LN2})
_mask("mask-of-batch-0", "Every batch entry gets entry 0's mask.", "padding", "padding", "entry 0's mask", {"mask": lambda x, s: x[:1] if x.ndim == 4 else x})
_mask("mask-of-head-0", "Every head gets head 0's mask.", "bias", "bias-by-head", "head 0's mask", {"mask": lambda x, s: x[:, :1] if x.ndim == 4 else x})
_mask("mask-of-next-head", "Heads get the mask of the next one.", "bias", "bias-by-head", "mask of the next", {"mask": lambda x, s: x.roll(-1, 1) if x.ndim == 4 and x.shape[1] > 1 else x})
_mask("mask-of-next-entry", "Batch entries get the mask of the next one.", "padding", "padding", "mask of the (next|previous)", {"mask": lambda x, s: x.roll(-1, 0) if x.ndim == 4 else x})
# Heads and batch entries
_grouping("kv-modulo", "Query head h reads kv head h % kv_heads.", "grouped", "grouped", "% kv_heads", {"kv_head": lambda h, group, kv: h % kv})
_grouping("kv-first", "Every query head reads kv head 0.", "grouped", "grouped", "kv head 0", {"kv_head": lambda h, group, kv: 0})
_grouping("kv-next", "Query heads read the next kv head.", FULL, "full", r"(next|previous) kv head|% kv_heads", {"kv_head": lambda h, group, kv: (h // group + 1) % kv})
_grouping("heads-exchanged", "The outputs of heads 2i and 2i + 1 are exchanged.", FULL, "full", r"2i and 2i \+ 1|of the (next|previous) one|reverse order", {"out": lambda O: O[:, [h ^ 1 for h in range(O.shape[1])]] if O.shape[1] > 1 else O})
_grouping("heads-rolled", "Query heads return the output of the next one.", FULL, "full", "output of the (next|previous)|2i and 2i|reverse", {"out": lambda O: O.roll(-1, 1)})
_grouping("kv-by-the-wrong-divisor", "Query head h reads kv head h // kv_heads.", "", "six-on-two", "instead of h // group", {"kv_head": lambda h, group, kv: h // (kv if group > 1 else 1) % kv})
_grouping("batch-1", "Batch entry 1 is entry 0's.", "full causal", "grouped", "entry 0's q, k and v|entry 0's output", {"out": lambda O: put(O, 1, O[0]) if len(O) > 1 else O})
_grouping("batch-kv-0", "Every batch entry reads entry 0's keys and values.", "full causal", "grouped", "entry 0's k and v", {"inputs": lambda q, k, v: (q, k[:1].expand(k.shape), v[:1].expand(v.shape))})
_grouping("batch-kv-next", "Batch entries read the keys and values of the next one.", "full causal", "grouped", "k and v of the (next|previous)", {"inputs": lambda q, k, v: (q, k.roll(1, 0), v.roll(1, 0))})
_grouping("one-of-group", "dK and dV are of the first query head of each group.", "grouped", "grouped", "query head of each group", {"inputs": first_of_group}, tensors="dk dv")
# Places
_place("rows-16th", "Every 16th row is 0.", "long", "full", "0 in every 16th row from (15|31)", rows(15, None, 16, lambda x: 0.0))
_place("rows-64th", "Every 64th row is 0.", "long", "full", "0 in (every 64th row|row 63|2 rows, the first 63)", rows(63, None, 64, lambda x: 0.0))
_place("rows-after-64", "Rows from 64 on are 0.", "long", "full", r"0 in (rows? 64|\d+ rows, the first 64|all rows from 64 on)", rows(64, None, None, lambda x: 0.0))
_place("head-1", "Head 1 is 0.", FULL, "full", "0 in whole heads", {"out": lambda O: put(O, (ALL, slice(1, 2)), 0.0)})
_place("four-heads-at-once", "Query heads from 4 on are never written.", "", "six-on-two", "the output is 0 in whole heads", {"out": lambda O: put(O, (ALL, slice(4, None)), 0.0)})
_place("as-many-queries-as-keys", "Rows from the number of keys on are never written.", "", "more-queries causal-more-queries", "the output is 0 in all rows from 48", {"p": lambda P, S, top: P * (torch.arange(S.shape[2], device=P.device) < S.shape[3])[:, None]})
_place("transposed-where-square", "K is transposed where its length is head_dim.", "", "length-of-head-dim", None, {"inputs": lambda q, k, v: (q, k.mT if k.shape[2] == k.shape[3] else k, v)})
_place("entry-1-zero", "Batch entry 1 is 0.", "full causal", "grouped", "0 in whole heads|0 in .*", {"out": lambda O: put(O, 1, 0.0) if len(O) > 1 else O})
_place("nan-without-keys", "Rows that see no key are 0/0.", "", "empty-rows", None, {"total": lambda x, S, top: torch.where(S.isfinite().any(-1, keepdim=True), x, 0.0)}, place="in fully masked rows")
_place("nan-row-0", "Row 0 is NaN.", FULL, "full", None, rows(0, 1, None, lambda x: math.nan), place="row 0")
_place("nan-64th", "Every 64th row is NaN.", "long", "full", None, rows(63, None, 64, lambda x: math.nan), place="row 63|64th row from 63")
_place("nan-tail", "Rows from 128 on are NaN.", "long", "long", None, rows(128, None, None, lambda x: math.nan), place="rows? (from )?128")
_place("rows-64th-off", "Every 64th row is off by its mean size.", "long", "long", None, rows(63, None, 64, lambda x: x + x.abs().mean()), place="row 63|64th row from 63")
_place("row-0-off", "Row 0 is reversed.", FULL, "full", None, rows(0, 1, None, lambda x: x.flip(-1)), place="in row 0")
_place("rows-from-128-off", "Rows from 128 on have a tenth of another feature.", "long", "long", None, rows(128, None, None, lambda x: x + 0.1 * x.roll(1, -1)), place="rows? (from )?128")
_place("rows-from-100-noisy", "Rows from 100 on are noisy.", "long", "long", None, noisy(0.3, (ALL, ALL, slice(100, None))), place="rows? (from )?100")
_place("head-1-noisy", "Head 1 errs 3 times as much.", FULL, "full", None, noisy(0.008, (ALL, slice(1, 2))), place="head 1")
_place("row-5-of-entry-1", "Row 5 of batch entry 1 is noise.", "full causal", "grouped", None, noisy(1.0, (slice(1, 2), ALL, slice(5, 6))), place="row 5")
# The log-sum-exp
_lse("lse-base-2", "The log-sum-exp is to base 2.", FULL, "full", "to base 2", {"lse": lambda x, keys, top: (top + x.log()) / LN2}, tensors="lse")
_lse("lse-without-maximum", "The log-sum-exp lacks the maximum.", FULL, "full", "maximum", {"lse": lambda x, keys, top: x.log()}, tensors="lse")
_lse("lse-is-maximum", "The log-sum-exp is the maximum.", FULL, "full", "maximum", {"lse": lambda x, keys, top: top}, tensors="lse")
_lse("lse-without-sinks", "The log-sum-exp ignores the sinks.", "sinks", "sinks", "sinks are ignored", {"lse": lambda x, keys, top: top + keys.log()}, tensors="lse")
_lse("lse-constant", "0.1 is added to the log-sum-exp.", FULL, "full", r"\+0\.1 is added", {"lse": lambda x, keys, top: top + x.log() + 0.1}, tensors="lse")
_lse("lse-maximum-base-2", "The maximum in the log-sum-exp is to base 2.", FULL, "full", "maximum is added in base 2", {"lse": lambda x, keys, top: top / LN2 + x.log()}, tensors="lse")
_lse("lse-sum-base-2", "The row sum in the log-sum-exp is to base 2.", FULL, "full", "row sum is to base 2", {"lse": lambda x, keys, top: top + x.log() / LN2}, tensors="lse")
# Gradients
_gradient("dq-unscaled", "dQ lacks the scale.", FULL, "full", "dq lacks the scale", grads=lambda dq, dk, dv, s: (dq / s, dk, dv), tensors="dq")
_gradient("dk-unscaled", "dK lacks the scale.", FULL, "full", "dk lacks the scale", grads=lambda dq, dk, dv, s: (dq, dk / s, dv), tensors="dk")
_gradient("dq-scaled-twice", "dQ has the scale twice.", FULL, "full", "dq has the scale twice", grads=lambda dq, dk, dv, s: (dq * s, dk, dv), tensors="dq")
_gradient("dk-ln2", "dK is ln 2 times what it should be.", FULL, "full", "dk is ln 2", grads=lambda dq, dk, dv, s: (dq, dk * LN2, dv), tensors="dk")
_gradient("dq-log2e", "dQ is log2(e) times what it should be.", FULL, "full", r"dq is log2\(e\)", grads=lambda dq, dk, dv, s: (dq / LN2, dk, dv), tensors="dq")
_gradient("dv-double", "dV is 2 times what it should be.", FULL, "full", "dv is 2 times", grads=lambda dq, dk, dv, s: (dq, dk, dv * 2), tensors="dv")
_gradient("dv-102", "dV is 2 % too large.", FULL, "full", r"dv is 1\.02", grads=lambda dq, dk, dv, s: (dq, dk, dv * 1.02), tensors="dv")
_gradient("dk-10000", "dK is 10,000 times what it should be.", FULL, "full", "dk is", grads=lambda dq, dk, dv, s: (dq, dk * 1e4, dv), tensors="dk")
_gradient("dq-zero", "dQ is 0.", FULL, "full", "dq is 0", grads=lambda dq, dk, dv, s: (dq * 0, dk, dv), tensors="dq")
_gradient("dq-dk-swapped", "dQ and dK are swapped.", FULL, "full", "swapped", grads=lambda dq, dk, dv, s: (dk, dq, dv) if dq.shape == dk.shape else (dq, dk, dv), tensors="dq dk")
_gradient("dk-from-64", "dK of keys from 64 on is off by half.", FULL, "full", None, grads=lambda dq, dk, dv, s: (dq, put(dk, (..., slice(64, None), ALL), 1.5 * dk[..., 64:, :]), dv), tensors="dk", place="keys? (from )?64")
_gradient("backward-mask-ignored", "Backward ignores the mask.", "padding random", "padding", "mask is ignored|masks? are both", backward={"mask": lambda x, s: None})
_gradient("backward-causal-plus1", "Backward sees one key too many.", "causal grouped", "causal", "too many", backward={"offset": lambda n, m: 1})
_gradient("backward-causal-ignored", "Backward ignores causality.", "causal grouped", "causal", "causal mask is ignored|causal mask are both", backward={"causal": lambda causal, mask: False})
_gradient("backward-scale", "Backward has 1.05 times the scale.", FULL, "full", r"scale is 1\.05", backward=scaled(1.05))
_gradient("backward-tail", "Backward drops the keys after the last multiple of 64.", "long", "long", rf"{TAIL}|last full tile of 64 are dropped", backward=tail(64))
_gradient("backward-kv-modulo", "In backward query head h reads kv head h % kv_heads.", "grouped", "grouped", "% kv_heads", backward={"kv_head": lambda h, group, kv: h % kv})
_gradient("backward-without-sinks", "Backward ignores the sinks.", "sinks", "sinks", "sinks are ignored", backward={"sink": lambda s, top: 0.0})
_gradient("backward-without-cap", "Backward ignores the soft cap.", "capped", "soft-cap", "soft cap is ignored", backward={"cap": lambda S, c, s: S})
_gradient("backward-without-slope", "Backward lacks the slope of the soft cap.", "capped", "soft-cap", "slope", backward={"cap": lambda S, c, s: S + (torch.tanh(S / c) * c - S).detach()})
_gradient("backward-window-tiles", "In backward the window shows whole tiles of 64 rows and keys.", "window window-both", "window", "in tiles (of 64|that cover)", backward={"tiles": (64, 64)})
# Digits
_rounding("scores-in-bfloat16", "The scores are rounded to bfloat16, and gradients are of these.", FULL, "full", "S is rounded to bfloat16", {"scores": lambda S: S.bfloat16().float()})
_rounding("p-in-e4m3", "P is rounded to e4m3.", FULL, "full", "float8_e4m3fn", {"p": lambda P, S, top: P.to(torch.float8_e4m3fn).float()})
_rounding("p-in-e5m2", "P is rounded to e5m2.", FULL, "full", "float8_e5m2", {"p": lambda P, S, top: P.to(torch.float8_e5m2).float()})
_rounding("p-in-bfloat16", "P is rounded to bfloat16.", FULL, "full", "P is rounded to bfloat16", {"p": lambda P, S, top: P.bfloat16().float()}, format="float16")
_rounding("p-in-6-bits", "P has 6 significant bits.", FULL, "full", "6 significant bits", {"p": lambda P, S, top: in_bits(6)(P)})
_rounding("out-in-bfloat16", "The output is rounded to bfloat16.", FULL, "full", None, {"out": lambda O: O.bfloat16().float()}, format="float16")
_rounding("out-truncated", "The output is truncated.", FULL, "full", "output is truncated", {"out": lambda O: cut(O, 16)})
_rounding("values-in-float16", "V passes through float16, where it overflows.", "", "large-values", None, {"inputs": lambda q, k, v: (q, k, v.half().to(v.dtype))}, rule="finiteness")
_rounding("not-reproducible", "The output changes from run to run.", FULL, "full", None, {"out": uneven}, rule="reproducibility")
_rounding("dv-in-6-bits", "dV has 6 significant bits.", FULL, "full", None, grads=lambda dq, dk, dv, s: (dq, dk, in_bits(6)(dv)), tensors="dv")
_rounding("products-in-tf32", "The products are in TF32.", FULL, "full", "TF32", {"inputs": lambda *x: tuple(map(in_tf32, x)), "p": lambda P, S, top: in_tf32(P)}, format="float32")
# fmt: on
