"""Which faults are caught and named, in `audit` and in `check_attention`?

    python benchmarks/names.py [--only NAME,...] [--doors check,audit] [--jobs N]

Every fault is a plain function of q, k and v, with fp32 sums and P rounded to the inputs'
format, as flash attention has them, and one thing changed. `says` is a pattern that every
cause in the findings of it must have; `place` one that the first finding must have, where
the fault is no mistake that could be named but stands in certain rows. A fault without
either must not be named. It counts as named where one finding of it has a cause (its
place), and as named wrongly where the cause of any finding lacks the pattern."""

# ruff: noqa: E741

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import planted
import torch
import yaml
from torch import Tensor

from numdev.config import audit_request
from numdev.report import AuditReport
from numdev.studies.audit.run import audit
from numdev.testing import CheckFailed, check_attention

# What is changed: a hook of `attention` to what stands in its place
F = Mapping[str, Any]
LN2 = math.log(2)
SHAPE = {"heads": 4, "head_dim": 64}
CAPPED = {"softcap": 2.0, "inputs": {"name": "normal", "logits": 4.0}}
CASES: dict[str, dict[str, Any]] = {
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
PLAIN = "full causal grouped"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One faulty kernel."""

    name: str
    says: str | None  # None: a loss of precision, which has no name
    cases: str  # the calls of an audit that show it, of CASES
    own: bool  # `check_attention` is given these too: its default set has none
    function: Callable[..., Any]
    place: str | None = None
    format: str = "bfloat16"


FAULTS: dict[str, Fault] = {}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    window: Sequence[int],
    softcap: float,
    sinks: Tensor | None,
    wrong: F,
) -> Any:
    """Attention with hooks; with that of the log-sum-exp, it too."""
    dtype, heads = q.dtype, q.shape[1]
    q, k, v = wrong.get("inputs", lambda *x: x)(q, k, v)
    kv, group = k.shape[1], heads // k.shape[1]
    read = wrong.get("kv_head", lambda h, group, kv: h // group)
    index = [read(h, group, kv) for h in range(heads)]
    scale = wrong.get("scale", lambda s: s)(scale)
    Q, K, V = q.float(), k[:, index].float(), v[:, index].float()
    S = (Q @ K.mT) * scale
    n, m = S.shape[2:]
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)
    hidden = torch.zeros(n, m, dtype=torch.bool, device=q.device)
    if wrong.get("causal", lambda asked: asked)(causal):
        hidden = hidden | (j > i + wrong.get("offset", lambda n, m: 0)(n, m))
    left, right = wrong.get("window", lambda x: x)(tuple(window))
    rows, keys = wrong.get("tiles", (1, 1))  # of which a window sees all or nothing
    (i0, i1), (j0, j1) = (
        (x // n * n, x // n * n + n - 1) for x, n in ((i, rows), (j, keys))
    )
    hidden = (
        hidden
        | (j1 < i0 - left if left >= 0 else False)
        | (j0 > i1 + right if right >= 0 else False)
    )
    hidden = hidden | wrong.get("hide", lambda n, m, i, j: False)(n, m, i, j)
    mask = wrong.get("mask", lambda x, s: x)(mask, scale) if mask is not None else None
    bias: Any = 0.0
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        bias = mask.float()
    cap = wrong.get("cap", lambda S, c, s: torch.tanh(S / c) * c)
    if softcap and wrong.get("cap_last"):
        S = cap(S + bias, softcap, scale)
    else:
        S = (cap(S, softcap, scale) if softcap else S) + bias
    S = S.masked_fill(hidden, -math.inf)
    sink = None if sinks is None else sinks.float()[None, :, None, None]
    top = S.amax(-1, keepdim=True).detach()
    top = (top if sink is None else torch.maximum(top, sink)).nan_to_num(neginf=0.0)
    P = (S - top).exp()
    total = P.sum(-1, keepdim=True)
    if sink is not None:
        total = total + wrong.get("sink", lambda s, top: (s - top).exp())(sink, top)
    total = torch.where(total == 0, 1.0, total)
    lse = wrong.get("lse", lambda total, own, top: None)(
        total, P.sum(-1, keepdim=True), top
    )
    P = wrong.get("p", lambda P, S, top: P.to(dtype).float())(P, S, top)
    O = (P @ V) / wrong.get("total", lambda x, S, top: x)(total, S, top)
    O = wrong.get("out", lambda O: O)(O).to(dtype)
    return O if lse is None else (O, lse[..., 0])


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


def fault(
    name: str,
    says: str | None,
    cases: str,
    forward: F | None = None,
    *,
    backward: F | None = None,
    grads: Callable[..., Any] | None = None,
    own: bool = False,
    place: str | None = None,
    format: str = "bfloat16",
) -> None:
    """A fault of forward, which its gradients share, of backward, or of the gradients
    alone."""

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

        def run(wrong: F) -> Callable[..., Any]:
            given = (attn_mask, is_causal, used, window_size, softcap, sinks)
            return lambda q, k, v: attention(q, k, v, *given, wrong)

        if grads is not None:
            q, k, v = _Changed.apply(q, k, v, lambda *x: grads(*x, used))
        if backward is not None:
            return _Backward.apply(q, k, v, run(forward or {}), run(backward))
        return run(forward or {})(q, k, v)

    kernel.__name__ = kernel.__qualname__ = name
    globals()[name] = kernel
    FAULTS[name] = Fault(name=name, says=says, cases=cases, own=own, function=kernel,
                         place=place, format=format)  # fmt: skip


# --- faults of forward ----------------------------------------------------------------


def reread(x: Tensor) -> Tensor:
    """[batch, length, heads, dim] in memory, read as [batch, heads, length, dim]."""
    return x.transpose(1, 2).reshape(x.shape)


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


def boolean(mask: Tensor) -> bool:
    return mask.dtype == torch.bool


def tail(tile: int) -> F:
    """The keys after the last whole tile are lost."""
    return {"hide": lambda n, m, i, j: (j >= m - m % tile) & (m > tile and m % tile > 0)}


def scaled(factor: float) -> F:
    return {"scale": lambda s: s * factor}


# What is true of a call in which a wrong scale saturates every row.
LARGER = r"|scale is too large"
TAIL = r"last (\d+ keys are|key is) dropped"

fault("causal_plus1", "too many", "causal grouped", {"offset": lambda n, m: 1})
fault(
    "causal_minus1",
    "too few|too narrow on the right",
    "causal grouped",
    {"offset": lambda n, m: -1},
)
fault(
    "causal_ignored",
    r"causal mask is ignored|causal mask are both",
    "causal grouped",
    {"causal": lambda x: False},
)
fault(
    "causal_always",
    r"causal mask is applied|aligned top-left",
    "full long",
    {"causal": lambda x: True},
)
fault(
    "causal_bottom_right",
    "bottom-right",
    "uneven",
    {"offset": lambda n, m: m - n},
    own=True,
)
fault("scale_forgotten", "not scaled" + LARGER, PLAIN, {"scale": lambda s: 1.0})
fault("scale_twice", r"twice|1/head_dim", PLAIN, {"scale": lambda s: s * s})
fault("scale_double", r"scale is (2\.00|1\.99)" + LARGER, PLAIN, scaled(2.0))
fault("scale_ln2", r"base 2|scale is 0\.69", PLAIN, scaled(LN2))
fault("scale_1005", r"scale is 1\.00[456]", PLAIN, scaled(1.005))
fault("scale_1001", r"scale is 1\.00(1|09)", PLAIN, scaled(1.001))
fault("scale_095", r"scale is 0\.9(50|49)", PLAIN, scaled(0.95))
fault(
    "scale_of_one_head",
    r"scale is 1\.0[34]",
    PLAIN,
    {
        "inputs": lambda q, k, v: (
            put(q.clone(), (slice(None), 1), q[:, 1] * 1.03125),
            k,
            v,
        )
    },
)
fault("cap_ignored", "soft cap is ignored", "capped", {"cap": lambda S, c, s: S})
fault(
    "cap_last", r"soft cap is applied after", "capped-bias", {"cap_last": True}, own=True
)
fault(
    "cap_before_scale",
    "before the scale",
    "capped",
    {"cap": lambda S, c, s: torch.tanh(S / s / c) * c * s},
)
fault(
    "window_plus1", "too wide", "window", {"window": lambda w: (w[0] + (w[0] >= 0), w[1])}
)
fault(
    "window_minus1",
    "too narrow",
    "window",
    {"window": lambda w: (w[0] - (w[0] >= 0), w[1])},
)
fault("window_ignored", "window is ignored", "window", {"window": lambda w: (-1, -1)})
fault(
    "mask_ignored",
    "mask is ignored|masks? are both",
    "padding random",
    {"mask": lambda x, s: None},
)
fault(
    "mask_inverted",
    "inverted|subtracted",
    "padding random",
    {"mask": lambda x, s: ~x if boolean(x) else -x},
)
fault(
    "mask_transposed",
    "transposed",
    "random bias",
    {"mask": lambda x, s: x.mT if x.shape[-1] == x.shape[-2] else x},
)
fault(
    "mask_scaled",
    "scaled like",
    "bias",
    {"mask": lambda x, s: x if boolean(x) else x * s},
)
fault(
    "mask_ln2",
    r"mask lacks log2",
    "bias",
    {"mask": lambda x, s: x if boolean(x) else x * LN2},
)
fault(
    "mask_of_batch_0",
    "entry 0's mask",
    "padding",
    {"mask": lambda x, s: x[:1] if x.ndim == 4 else x},
)
fault(
    "mask_of_head_0",
    "head 0's mask",
    "bias",
    {"mask": lambda x, s: x[:, :1] if x.ndim == 4 else x},
    own=True,
)
fault("kv_modulo", "% kv_heads", "grouped", {"kv_head": lambda h, group, kv: h % kv})
fault("kv_first", "kv head 0", "grouped", {"kv_head": lambda h, group, kv: 0})
fault(
    "kv_next",
    r"(next|previous) kv head|% kv_heads",
    PLAIN,
    {"kv_head": lambda h, group, kv: (h // group + 1) % kv},
)
fault(
    "v_misread",
    r"v is (read|wrongly stored) as",
    PLAIN,
    {"inputs": lambda q, k, v: (q, k, reread(v))},
)
fault(
    "q_misread",
    r"q is (read|wrongly stored) as",
    PLAIN,
    {"inputs": lambda q, k, v: (reread(q), k, v)},
)
fault("out_misread", "output is stored as", PLAIN, {"out": reread})
for size in (64, 80, 96, 128, 192):
    fault(
        f"tail_{size}",
        rf"{TAIL}|last full tile of {size} are dropped",
        "long",
        tail(size),
    )
fault("first_key", "first key", "full", {"hide": lambda n, m, i, j: (j == 0) & (m > 1)})
fault(
    "key_37",
    "key 37 ",
    PLAIN,
    {"hide": lambda n, m, i, j: (j == 37) & (i != 37) & (m > 40)},
)
fault(
    "batch_1",
    r"entry 0's q, k and v|entry 0's output",
    "full causal",
    {"out": lambda O: put(O, 1, O[0]) if len(O) > 1 else O},
)
fault(
    "rows_64th",
    r"0 in (every 64th row|row 63|2 rows, the first 63)",
    "long",
    {"out": lambda O: put(O, (..., slice(63, None, 64), slice(None)), 0.0)},
)
fault(
    "rows_after_64",
    r"0 in (rows? 64|\d+ rows, the first 64|all rows from 64 on)",
    "long",
    {"out": lambda O: put(O, (..., slice(64, None), slice(None)), 0.0)},
)
fault(
    "head_1",
    "0 everywhere",
    PLAIN,
    {"out": lambda O: put(O, (slice(None), slice(1, 2)), 0.0)},
)
fault("output_101", r"output is 1\.01", PLAIN, {"out": lambda O: O * 1.01})
fault("output_1002", r"output is 1\.00[123]", PLAIN, {"out": lambda O: O * 1.002})
fault("sinks_ignored", "sinks are ignored", "sinks", {"sink": lambda s, top: 0.0})
fault(
    "sinks_twice", "counted twice", "sinks", {"sink": lambda s, top: 2 * (s - top).exp()}
)
fault(
    "sinks_ln2",
    "sink lacks log2",
    "sinks",
    {"sink": lambda s, top: (s * LN2 - top).exp()},
)
fault(
    "padding_counts",
    "padded with zeros",
    "full long",
    {"inputs": padded, "mask": padded_mask},
)
fault(
    "v_shifted", "V is shifted", PLAIN, {"inputs": lambda q, k, v: (q, k, v.roll(1, 2))}
)
fault("no_row_sum", "row sum", PLAIN, {"total": lambda x, S, top: torch.ones_like(x)})
fault(
    "window_tiles",
    "in tiles (of 64|that cover)",
    "window window-both",
    {"tiles": (64, 64)},
)
fault("window_key_tiles", "in tiles of 32", "window window-both", {"tiles": (1, 32)})
fault(
    "window_left_ignored",
    "ignored on the left|window is ignored",
    "window-both",
    {"window": lambda w: (-1, w[1])},
)
fault(
    "sinks_of_next_head",
    "sinks? of the (next|previous)",
    "sinks",
    {"sink": lambda s, top: (s.roll(-1, 1) - top).exp()},
)
fault(
    "sinks_of_head_0",
    "head 0's sink",
    "sinks",
    {"sink": lambda s, top: (s[:, :1] - top).exp()},
)
fault(
    "sinks_constant",
    r"a sink of 1\.00, not its own",
    "sinks",
    {"sink": lambda s, top: (1.0 - top).exp()},
)
fault(
    "sinks_zero",
    r"a sink of 0\.00, not its own",
    "sinks",
    {"sink": lambda s, top: (-top).exp()},
)
fault("sinks_one", "row sum is 0.9", "sinks", {"sink": lambda s, top: 1.0})
fault(
    "sink_unasked",
    r"a sink of (0\.00, which was not requested|\S+ not its own)",
    PLAIN,
    {"total": lambda x, S, top: x + (-top).exp()},
)
fault("epsilon_1e1", r"row sum is 0\.1 ", PLAIN, {"total": lambda x, S, top: x + 0.1})
fault("epsilon_1e2", r"row sum is 0\.01 ", PLAIN, {"total": lambda x, S, top: x + 0.01})
fault("epsilon_1e3", r"row sum is 0\.001", PLAIN, {"total": lambda x, S, top: x + 1e-3})
fault(
    "v_reshaped",
    r"v is (read|wrongly stored) as",
    PLAIN,
    {
        "inputs": lambda q, k, v: (
            *(q, k),
            v.reshape(v.shape[0], v.shape[2], v.shape[1], -1).transpose(1, 2),
        )
    },
)


def stale(S: Tensor, top: Tensor, tile: int = 32) -> Tensor:
    """How much too large weights are where nothing is rescaled as the running maximum
    moves."""
    first = (torch.arange(S.shape[-1]) // tile + 1) * tile - 1
    seen = S.detach().cummax(-1).values[..., first.clamp(max=S.shape[-1] - 1)]
    return torch.where(S.isfinite(), (top - seen).exp(), 0.0)


fault(
    "stale_output",
    "the accumulator is not rescaled",
    PLAIN,
    {"p": lambda P, S, top: (P * stale(S, top)).to(torch.bfloat16).float()},
)
fault(
    "stale_sum",
    "the row sum is not rescaled",
    PLAIN,
    {"total": lambda x, S, top: ((S - top).exp() * stale(S, top)).sum(-1, keepdim=True)},
)
fault(
    "lse_base_2", "to base 2", PLAIN, {"lse": lambda x, own, top: (top + x.log()) / LN2}
)
fault("lse_without_maximum", "maximum", PLAIN, {"lse": lambda x, own, top: x.log()})
fault("lse_is_maximum", "maximum", PLAIN, {"lse": lambda x, own, top: top})
fault(
    "lse_without_sinks",
    "sinks are ignored",
    "sinks",
    {"lse": lambda x, own, top: top + own.log()},
)

# --- faults of the gradients -----------------------------------------------------------

fault(
    "dq_unscaled",
    "dq lacks the scale",
    PLAIN,
    grads=lambda dq, dk, dv, s: (dq / s, dk, dv),
)
fault(
    "dk_unscaled",
    "dk lacks the scale",
    PLAIN,
    grads=lambda dq, dk, dv, s: (dq, dk / s, dv),
)
fault(
    "dq_scaled_twice",
    "dq has the scale twice",
    PLAIN,
    grads=lambda dq, dk, dv, s: (dq * s, dk, dv),
)
fault("dk_ln2", "dk is ln 2", PLAIN, grads=lambda dq, dk, dv, s: (dq, dk * LN2, dv))
fault(
    "dq_log2e", r"dq is log2\(e\)", PLAIN, grads=lambda dq, dk, dv, s: (dq / LN2, dk, dv)
)
fault("dv_double", "dv is 2 times", PLAIN, grads=lambda dq, dk, dv, s: (dq, dk, dv * 2))
fault("dv_102", r"dv is 1\.02", PLAIN, grads=lambda dq, dk, dv, s: (dq, dk, dv * 1.02))
fault("dq_zero", "dq is 0", PLAIN, grads=lambda dq, dk, dv, s: (dq * 0, dk, dv))
fault(
    "dq_dk_swapped",
    "swapped",
    PLAIN,
    grads=lambda dq, dk, dv, s: (dk, dq, dv) if dq.shape == dk.shape else (dq, dk, dv),
)
fault(
    "backward_mask_ignored",
    "mask is ignored|masks? are both",
    "padding random",
    backward={"mask": lambda x, s: None},
)
fault(
    "backward_causal_plus1",
    "too many",
    "causal grouped",
    backward={"offset": lambda n, m: 1},
)
fault(
    "backward_causal_ignored",
    "causal mask is ignored|causal mask are both",
    "causal grouped",
    backward={"causal": lambda x: False},
)
fault("backward_scale", r"scale is 1\.05", PLAIN, backward=scaled(1.05))
fault(
    "backward_tail",
    rf"{TAIL}|last full tile of 64 are dropped",
    "long",
    backward=tail(64),
)
fault(
    "backward_kv_modulo",
    "% kv_heads",
    "grouped",
    backward={"kv_head": lambda h, group, kv: h % kv},
)
fault(
    "backward_without_sinks",
    "sinks are ignored",
    "sinks",
    backward={"sink": lambda s, top: 0.0},
)
fault(
    "backward_without_cap",
    "soft cap is ignored",
    "capped",
    backward={"cap": lambda S, c, s: S},
)
fault(
    "backward_without_slope",
    "slope",
    "capped",
    backward={"cap": lambda S, c, s: S + (torch.tanh(S / c) * c - S).detach()},
)
fault(
    "backward_window_tiles",
    "in tiles (of 64|that cover)",
    "window window-both",
    backward={"tiles": (64, 64)},
)


def first_of_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """dK and dV come from the first query head of a group alone."""
    group = q.shape[1] // k.shape[1]
    first = (torch.arange(q.shape[1], device=q.device) % group == 0)[:, None, None]
    wide = (x.repeat_interleave(group, 1) for x in (k, v))
    return (q, *(torch.where(first, x, x.detach()) for x in wide))


fault("one_of_group", "query head of each group", "grouped", {"inputs": first_of_group})


def of_planted(name: str, says: str | None, cases: str) -> None:
    """One of benchmarks/planted.py."""
    kernel = getattr(planted, name)
    FAULTS[name] = Fault(name=name, says=says, cases=cases, own=False, function=kernel)


of_planted("delta_missing", "dO·O, is left out", PLAIN)
of_planted("delta_of_the_next_row", "is the next row's", PLAIN)
of_planted("dv_unnormalised", "row sum", PLAIN)
of_planted("stale_maximum", "maximum", PLAIN)

# --- more of forward -------------------------------------------------------------------

fault(
    "cap_tanh_product",
    "by the tanh of it over",
    "capped",
    {"cap": lambda S, c, s: S * (S / c).tanh()},
)
fault("cap_own_tanh", "by its tanh", "capped", {"cap": lambda S, c, s: S * S.tanh()})
fault(
    "cap_not_divided",
    "not divided by the soft cap",
    "capped",
    {"cap": lambda S, c, s: c * S.tanh()},
)
fault(
    "cap_not_multiplied",
    "not multiplied by",
    "capped",
    {"cap": lambda S, c, s: (S / c).tanh()},
)
fault("cap_clamped", "clamped", "capped", {"cap": lambda S, c, s: S.clamp(-c, c)})
fault(
    "sinks_reversed",
    "reverse order",
    "sinks",
    {"sink": lambda s, top: (s.flip(1) - top).exp()},
)
fault(
    "sinks_of_head_2",
    "head 2's sink",
    "sinks",
    {"sink": lambda s, top: (s[:, 2:3] - top).exp()},
)
fault(
    "sinks_every_tile",
    "counted in every tile of 64",
    "sinks",
    {"sink": lambda s, top: 3 * (s - top).exp()},
    own=True,
)
fault(
    "mask_of_next_head",
    "mask of the next",
    "bias",
    {"mask": lambda x, s: x.roll(-1, 1) if x.ndim == 4 and x.shape[1] > 1 else x},
)
fault(
    "mask_of_next_entry",
    "mask of the (next|previous)",
    "padding",
    {"mask": lambda x, s: x.roll(-1, 0) if x.ndim == 4 else x},
)
fault(
    "heads_exchanged",
    r"2i and 2i \+ 1|of the (next|previous) one|reverse order",
    PLAIN,
    {"out": lambda O: O[:, [h ^ 1 for h in range(O.shape[1])]] if O.shape[1] > 1 else O},
)
fault(
    "heads_rolled",
    r"output of the (next|previous)|2i and 2i|reverse",
    PLAIN,
    {"out": lambda O: O.roll(-1, 1)},
)
fault(
    "batch_kv_next",
    "k and v of the (next|previous)",
    "full causal",
    {"inputs": lambda q, k, v: (q, k.roll(1, 0), v.roll(1, 0))},
)


def in_entry_1(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return (put(q, 1, q[1] * 1.0625) if len(q) > 1 else q), k, v


fault(
    "entry_1_scaled",
    r"scale is 1\.06.* entry 1 alone",
    "full causal",
    {"inputs": in_entry_1},
)
fault(
    "bottom_right_more_queries",
    "bottom-right",
    "queries",
    {"offset": lambda n, m: m - n},
    own=True,
)


def merged(S: Tensor, top: Tensor, width: int, less: float) -> Tensor:
    """What weights of parts of the keys are multiplied with where these are merged
    wrongly."""
    parts = [
        x.logsumexp(-1, keepdim=True).expand(x.shape) for x in (S - top).split(width, -1)
    ]
    return torch.where(
        S.isfinite(), (-less * torch.cat(parts, -1)).nan_to_num(neginf=0.0).exp(), 0.0
    )


def merging(width: int, less: float) -> F:
    return {
        "p": lambda P, S, top: P * merged(S, top, width, less),
        "total": lambda x, S, top: ((S - top).exp() * merged(S, top, width, less)).sum(
            -1, keepdim=True
        ),
    }


fault("parts_base_2", "powers of 2", PLAIN, merging(64, 1 - LN2))
fault("parts_alike", "count alike", PLAIN, merging(64, 1.0))
fault(
    "lse_constant",
    r"\+0\.1 is added",
    PLAIN,
    {"lse": lambda x, own, top: top + x.log() + 0.1},
)
fault(
    "lse_maximum_base_2",
    "maximum is added in base 2",
    PLAIN,
    {"lse": lambda x, own, top: top / LN2 + x.log()},
)
fault(
    "lse_sum_base_2",
    "row sum is to base 2",
    PLAIN,
    {"lse": lambda x, own, top: top + x.log() / LN2},
)
fault(
    "entry_1_zero",
    r"0 everywhere|0 in .*",
    "full causal",
    {"out": lambda O: put(O, 1, 0.0) if len(O) > 1 else O},
)

# --- faults that stand in a place ------------------------------------------------------


def wrong_rows(start: int, step: int | None, value: Callable[[Tensor], Any]) -> F:
    """Some rows are something else."""
    at = (..., slice(start, None, step), slice(None))
    return {"out": lambda O: put(O, at, value(O[at]))}


fault("nan_row_0", None, PLAIN, wrong_rows(0, 10**6, lambda x: math.nan), place="row 0")
fault(
    "nan_64th",
    None,
    "long",
    wrong_rows(63, 64, lambda x: math.nan),
    place="row 63|64th row from 63",
)
fault(
    "nan_tail",
    None,
    "long",
    wrong_rows(128, None, lambda x: math.nan),
    place="rows? (from )?128",
)
fault(
    "rows_64th_off",
    None,
    "long",
    wrong_rows(63, 64, lambda x: x + x.abs().mean()),
    place="row 63|64th row from 63",
)
fault(
    "row_0_off", None, PLAIN, wrong_rows(0, 10**6, lambda x: x.flip(-1)), place="in row 0"
)
fault(
    "rows_from_128_off",
    None,
    "long",
    wrong_rows(128, None, lambda x: x + 0.1 * x.roll(1, -1)),
    place="rows? (from )?128",
)

# --- losses of precision ---------------------------------------------------------------

fault(
    "p_in_e4m3",
    "float8_e4m3fn",
    PLAIN,
    {"p": lambda P, S, top: P.to(torch.float8_e4m3fn).float()},
)
fault(
    "p_in_e5m2",
    "float8_e5m2",
    PLAIN,
    {"p": lambda P, S, top: P.to(torch.float8_e5m2).float()},
)
fault(
    "p_in_bfloat16",
    "P is rounded to bfloat16",
    PLAIN,
    {"p": lambda P, S, top: P.bfloat16().float()},
    format="float16",
)
fault(
    "out_in_bfloat16",
    None,
    PLAIN,
    {"out": lambda O: O.bfloat16().float()},
    format="float16",
)
TF32 = -(1 << 13)  # what keeps 10 of 23 bits


def tf32(x: Tensor) -> Tensor:
    """To the nearest number with 11 significant bits, ties away from zero, as cvt.rna
    does."""
    return ((x.detach().float().view(torch.int32) + (1 << 12)) & TF32).view(torch.float32)


def in_tf32(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(x + (tf32(x) - x).detach() for x in (q, k, v))


fault(
    "products_in_tf32",
    "TF32",
    PLAIN,
    {"inputs": in_tf32, "p": lambda P, S, top: P + (tf32(P) - P).detach()},
    format="float32",
)
LOSSES = {
    "p_truncated": "P is truncated", "p_in_4_bits": "4 significant bits",
    "row_sum_rounded": "row sum is kept in bfloat16 over tiles of 64",
    "accumulator_rounded": "O is summed in bfloat16 over tiles of 64",
    "scores_rounded": "S is rounded to bfloat16", "ds_truncated": "dS is truncated",
    "dq_accumulator_rounded": "dQ is summed in bfloat16 over tiles of 64",
}  # fmt: skip
for one, words in LOSSES.items():
    of_planted(one, words, PLAIN)
of_planted("sound", None, PLAIN)


# --- measuring ------------------------------------------------------------------------


def cases_of(names: str) -> list[dict[str, Any]]:
    return [{"name": name, **SHAPE, **CASES[name]} for name in names.split()]


def checked(one: Fault, folder: Path) -> AuditReport:
    cases: Any = cases_of(one.cases) if one.own else None
    try:
        how: Any = {"cases": cases, "formats": one.format, "reproducers": folder}
        return check_attention(one.function, **how).report
    except CheckFailed as failed:
        return failed.result.report


def audited(one: Fault, folder: Path) -> AuditReport:
    (folder / "cases.yaml").write_text(yaml.safe_dump({"cases": cases_of(one.cases)}))
    module = one.function.__module__.replace("__main__", "names").replace(
        "__mp_main__", "names"
    )
    flags = {"kernels": (f"{module}:{one.name}",), "backward": True, "reproducers": 0,
             "formats": (one.format,)}  # fmt: skip
    return audit(audit_request(str(folder / "cases.yaml"), flags), folder / "out")


DOORS = {"check": checked, "audit": audited}


def judged(name: str, door: str) -> tuple[str, str, str, list[str], float]:
    """How a door named a fault: `named`, `unnamed`, `WRONG`, `passed`."""
    torch.set_num_threads(1)
    one, start = FAULTS[name], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = DOORS[door](one, Path(folder))
    findings = [f for f in report.findings if f.severity == "exceeded"]
    causes = sorted({f.cause for f in findings if f.cause})
    verdict = "unnamed" if findings else "passed"
    if findings and one.place and not causes:
        verdict = "named" if re.search(one.place, findings[0].sentence) else "unnamed"
    if causes:
        right = [
            one.says is not None and bool(re.search(one.says, cause)) for cause in causes
        ]
        verdict = "named" if all(right) else "WRONG"
        causes = (
            causes
            if all(right)
            else [c for c, r in zip(causes, right, strict=True) if not r]
        )
    return name, door, verdict, causes, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of faults, with commas")
    parser.add_argument("--doors", default="check,audit")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(FAULTS)
    doors = given.doors.split(",")
    totals: dict[tuple[str, bool], Counter[str]] = {}
    print("| fault | door | verdict | s | names, of which the wrong ones if there are |")
    print("|---|---|---|---|---|")
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        pairs = [(name, door) for name in names for door in doors]
        for name, door, verdict, causes, seconds in pool.map(
            judged, *zip(*pairs, strict=True)
        ):
            said = "; ".join(causes)
            print(f"| {name} | {door} | {verdict} | {seconds:.1f} | {said} |", flush=True)
            another = FAULTS[name].says is not None or FAULTS[name].place is not None
            totals.setdefault((door, another), Counter())[verdict] += 1
    for (door, another), counts in totals.items():
        what = "to be named" if another else "without a name, or sound"
        said = ", ".join(
            f"{counts[v]} {v}" for v in ("named", "unnamed", "WRONG", "passed")
        )
        print(f"\n{door}, {what}, {sum(counts.values())}: {said}")


if __name__ == "__main__":
    main()
