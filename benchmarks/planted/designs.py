"""Sound kernels: those of every rounding design in docs/sites.md, written out in PyTorch
without numdev; eager attention as people spell it; PyTorch's; and emulations in other
tiles, orders and splits than they claim.

A design is a function of q, k and v with forward and backward passes of its own, in tiles
of keys, as the public kernel that it is named after computes: where it takes its maximum,
which exponential it has, what it rounds to the working format before a product, and in
what gradients are added up. None declares how it rounds. Its line in `DESIGNS` is all
that there is to add.

Legend: S scores, P probabilities, m running maximum, l running sum, O output, L
log-sum-exp; d of any of them the gradient with respect to it, delta = rowsum(dO o O).
Everything is in fp32 but what `_Tiled.r` rounds."""

# ruff: noqa: E741

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from numdev.kernels import Kernel, Output, find
from numdev.kernels.baseline import WAYS
from planted.record import plant, planted

LOG2_E = math.log2(math.e)
# Minimax for 2^x on [0, 1): flash_attn/cute/utils.py, POLY_EX2[3].
CUBIC = (
    0.077119089663028717041015625,
    0.227564394474029541015625,
    0.695146143436431884765625,
    1.0,
)


@dataclass(frozen=True, kw_only=True)
class Design:
    """How a kernel rounds, and in which order it sums."""

    tile: int = 128
    last_first: bool = False
    threshold: float = 0.0  # in log2: the maximum moves only when it has grown by more
    cubic: Literal["no", "some", "all"] = "no"  # which elements have exp2 by a polynomial
    sums_rounded_p: bool = False  # l sums P as it meets V
    p_is_rounded: bool = True
    scaled: Literal["scores", "q in forward", "k in backward"] = "scores"
    """Whether Q, or K, is multiplied by scale log2(e) and rounded."""
    parts: int = 1  # of the keys, merged by their log-sum-exp
    # Backward multiplies dP - delta by the P that dO is multiplied with
    one_p: bool = False
    ds_has_scale: bool = False  # before it is rounded
    group: Literal["rounded", "fp32"] = "rounded"
    """In what each query head's dK and dV are kept until its group's are summed."""


DESIGNS = {
    "FlashAttention-2": Design(tile=64, last_first=True),
    "FlashAttention-3": Design(last_first=True, group="fp32"),
    "FlashAttention-4": Design(last_first=True, threshold=8, cubic="some", group="fp32"),
    "a lagging maximum alone": Design(tile=64, threshold=8),
    "exp2 by a polynomial alone": Design(tile=64, cubic="all"),
    "a lagging maximum and a polynomial": Design(tile=32, threshold=8, cubic="all"),
    "cuDNN": Design(ds_has_scale=True),
    "Composable Kernel": Design(),
    "FlashInfer prefill": Design(sums_rounded_p=True),
    "FlashInfer decode": Design(p_is_rounded=False, parts=3, tile=32, group="fp32"),
    "xFormers and CUTLASS": Design(tile=64, one_p=True, ds_has_scale=True),
    "Triton's tutorial": Design(tile=64, scaled="k in backward"),
    "Triton's tutorial of 2023": Design(
        tile=64, scaled="q in forward", ds_has_scale=True
    ),
    "FlexAttention": Design(tile=64, group="fp32"),
    "Pallas": Design(ds_has_scale=True, group="fp32"),
    "MLX": Design(tile=32, p_is_rounded=False, group="fp32"),
}


def kernel(name: str) -> Callable[..., Tensor]:
    """A design as a function that a kernel's author would hand over."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None,
               is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Tensor:  # fmt: skip
        how = q.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = _Tiled.apply(q, k, v, attn_mask, is_causal, how, DESIGNS[name])  # type: ignore[no-untyped-call]
        return out

    return attend


@planted("sound", "The softmax by hand, a row without keys among them, through autograd.")
def through_casts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    S = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
        S = S.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        S = S if attn_mask.dtype == torch.bool else S + attn_mask.masked_fill(hidden, 0.0)
        S = S.masked_fill(hidden, -1e30)
        S = S.masked_fill(hidden.all(dim=-1, keepdim=True), -math.inf)
    m = S.amax(dim=-1, keepdim=True)
    P = (S - m.clamp_min(-1e29)).exp()
    row_sum = P.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    return ((P.to(q.dtype).float() @ v.float()) / row_sum).to(q.dtype)


class _Tiled(torch.autograd.Function):
    """Attention as a design computes it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool,
                scale: float, design: Design) -> Tensor:  # fmt: skip
        def r(x: Tensor) -> Tensor:
            return x.to(q.dtype).float()

        group = q.shape[1] // k.shape[1]
        Q, K, V = q.float(), _repeated(k, group), _repeated(v, group)
        Q_S, by = Q, scale * LOG2_E
        if design.scaled == "q in forward":
            Q_S, by = r(Q * by), 1.0
        parts = []
        for keys in _parts(K.shape[2], design):
            m = Q.new_full((*Q.shape[:3], 1), -math.inf)
            l, O = torch.zeros_like(m), Q.new_zeros(*Q.shape[:3], V.shape[-1])
            for tile in _tiles(keys, design):
                S = _scores(Q_S, K, tile, by, mask, causal)
                higher = torch.maximum(m, S.amax(dim=-1, keepdim=True))
                moves = (higher - m > design.threshold) | (m == -math.inf)
                m_old, m = m, torch.where(moves, higher, m)
                a = torch.exp2(m_old - _safe(m))
                P = _exp2(S - _safe(m), design)
                P_V = r(P) if design.p_is_rounded else P
                l = a * l + (P_V if design.sums_rounded_p else P).sum(
                    dim=-1, keepdim=True
                )
                O = a * O + P_V @ V[:, :, tile]
            parts.append((m + l.log2(), O / torch.where(l == 0, 1.0, l)))
        L2 = torch.stack([L for L, _ in parts])
        top = _safe(L2.amax(dim=0))
        L = top + torch.exp2(L2 - top).sum(dim=0).log2()
        O = sum(torch.exp2(L_p - _safe(L)) * O_p for L_p, O_p in parts)  # type: ignore[assignment]
        out = O.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, L)
        ctx.how = mask, causal, scale, design
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, L), (mask, causal, scale, design) = ctx.saved_tensors, ctx.how

        def r(x: Tensor) -> Tensor:
            return x.to(q.dtype).float()

        group = q.shape[1] // k.shape[1]
        Q, K, V, dO = q.float(), _repeated(k, group), _repeated(v, group), grad.float()
        K_S, by = K, scale * LOG2_E
        if design.scaled == "k in backward":
            K_S, by = r(K * by), 1.0
        delta = (dO * out.float()).sum(dim=-1, keepdim=True)
        dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for tile in _tiles(slice(0, K.shape[2]), design):
            P = torch.exp2(_scores(Q, K_S, tile, by, mask, causal) - _safe(L))
            P_O = r(P)
            dP = dO @ V[:, :, tile].mT
            dS = (P_O if design.one_p else P) * (dP - delta)
            dS = r(dS * scale) if design.ds_has_scale else r(dS)
            dV[:, :, tile] = P_O.mT @ dO
            dK[:, :, tile] = dS.mT @ Q
            # What the tutorial has of K is scaled already, in base 2.
            dQ += dS @ (
                K_S[:, :, tile] if design.scaled == "k in backward" else K[:, :, tile]
            )
        if not design.ds_has_scale:
            dQ *= 1 / LOG2_E if design.scaled == "k in backward" else scale
            dK *= scale
        if design.group == "rounded":
            dK, dV = r(dK), r(dV)
        dK, dV = (x.unflatten(1, (-1, group)).sum(dim=2) for x in (dK, dV))
        return dQ.to(q.dtype), dK.to(q.dtype), dV.to(q.dtype), None, None, None, None


def _repeated(x: Tensor, group: int) -> Tensor:
    return x.float().repeat_interleave(group, dim=1)


def _safe(m: Tensor) -> Tensor:
    return torch.where(m == -math.inf, 0.0, m)


def _parts(n: int, design: Design) -> list[slice]:
    each = -(-n // design.parts)
    return [slice(at, min(at + each, n)) for at in range(0, n, each)]


def _tiles(keys: slice, design: Design) -> list[slice]:
    starts = range(keys.start, keys.stop, design.tile)
    tiles = [slice(at, min(at + design.tile, keys.stop)) for at in starts]
    return tiles[::-1] if design.last_first else tiles


def _scores(Q: Tensor, K: Tensor, tile: slice, by: float, mask: Tensor | None,
            causal: bool) -> Tensor:  # fmt: skip
    """In base 2, -inf where hidden."""
    S = Q @ K[:, :, tile].mT * by
    if causal:
        rows = torch.arange(S.shape[2], device=S.device)[:, None]
        S = S.masked_fill(
            torch.arange(K.shape[2], device=S.device)[tile] > rows, -math.inf
        )
    if mask is None:
        return S
    part = mask[..., tile]
    return (
        S.masked_fill(~part, -math.inf)
        if mask.dtype == torch.bool
        else S + part.float() * LOG2_E
    )


def _exp2(x: Tensor, design: Design) -> Tensor:
    if design.cubic == "no":
        return x.exp2()
    y = x.clamp(min=-127.0)
    n = y.floor()
    power = torch.zeros_like(y)
    for c in CUBIC:
        power = power * (y - n) + c
    power = torch.where(y > -127, torch.ldexp(power, n), 0.0)
    if design.cubic == "all":
        return power
    # Of each tile of 128 its second and third 32, and there the last 4 of 16
    # (softmax.py).
    i = torch.arange(x.shape[-1], device=x.device)
    return torch.where((i // 32 % 4 % 3 > 0) & (i % 16 >= 12), power, x.exp2())


def _slug(words: str) -> str:
    """In kebab-case."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower().replace("'", "")).strip("-")


NAMES = [plant(_slug(name), "sound", name, kernel(name)).name for name in DESIGNS]

# --- eager attention, PyTorch's operators, and emulations ------------------------------

OPERATORS = ("sdpa-flash", "sdpa-math", "sdpa-default", "baseline")
ROUNDS_SUMS = ("eager", "fa2-consistent")
FA3: Mapping[str, Any] = {"dk_partial": "wide", "dv_partial": "wide"}
EMULATED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    # by name, what is claimed and what is run beside it
    "FlashAttention-2, tiles of 16": ({"preset": "fa2"}, {"block_kv": 16, "block_q": 16}),
    "FlashAttention-2, tiles of 32": ({"preset": "fa2"}, {"block_kv": 32}),
    "FlashAttention-2, tiles of 96, last first": (
        {"preset": "fa2"}, {"block_kv": 96, "kv_order": "descending"},
    ),
    "FlashAttention-2, three splits": ({"preset": "fa2"}, {"splits": 3, "block_kv": 32}),
    "FlashAttention-3, tiles of 48": ({"preset": "fa2", **FA3}, {"block_kv": 48}),
    "FlashAttention-3, tiles of 176": ({"preset": "fa2", **FA3}, {"block_kv": 176}),
    "FlashAttention-4, emulated": ({"preset": "fa4"}, {}),
    "fa2-consistent, tiles of 32": ({"preset": "fa2-consistent"}, {"block_kv": 32}),
    "eager": ({"preset": "eager"}, {}),
}  # fmt: skip


def emulating(
    name: str, claim: Mapping[str, Any], ran: Mapping[str, Any], *, declared: bool = True
) -> Kernel:
    """An emulation as a kernel, in fp32 arithmetic. One that rounds its scores or row
    sums returns no log-sum-exp: made of them it would lack the digits that a backward
    pass needs."""
    options = {**claim, **ran, "compute": "float32"}

    def returned(output: Output) -> Output:
        return replace(output, lse=None) if claim["preset"] in ROUNDS_SUMS else output

    claims: dict[str, Any] = (
        {"claims": lambda case, output, system: claim} if declared else {}
    )
    return Kernel(
        name=name,
        function=lambda case: returned(find("emulated").attend(case, **options)),
        backward=lambda case: returned(find("emulated").gradients(case, **options)),
        **claims,
    )


for _name, _way in WAYS.items():
    _short = _slug(_name.removeprefix("as autograd rounds "))
    plant(f"eager-{_short}", "sound", _name, Kernel(name=_name, function=_way))
for _name in OPERATORS:
    # On a CPU its fast exp leans in float16, where maxima tie: exp(0) is 1 - 5.3e-5 (K37)
    _leans = {"formats": ("bfloat16",)} if _name in ("sdpa-flash", "sdpa-default") else {}
    plant(_name, "sound", f"numdev's {_name}.", _name, **_leans)
for _name, (_claim, _ran) in EMULATED.items():
    for _declared in (True, False) if _claim["preset"] == "fa2" else (True,):
        _full = f"{_name}, {'declared' if _declared else 'undeclared'}"
        plant(
            _slug(_full),
            "sound",
            _full,
            emulating(_full, _claim, _ran, declared=_declared),
        )
