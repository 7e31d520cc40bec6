"""A kernel that loses precision: which single step, coarser than it should be, makes its
errors.

Everything else is as FlashAttention-2 has it, in fp32 arithmetic: P and dS in the working
format, one cast at the end. A step explains a head if the error that is left is a tenth
at most, element by element and rows counting alike; so tiles and their format have to be
right as well. These are faults and no designs:
`numdev.studies.audit.explanations.likenesses` has ways that sound code rounds.

Legend: S scores, P probabilities, m row maximum, l row sum, O output, a rescales, L
log-sum-exp."""

# ruff: noqa: E741

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format, dtype_of, format_named, round_to
from numdev.kernels.output import upstream
from numdev.kernels.reference.blocked import Reference, nonzero
from numdev.operations.attention.explain.call_sample import all_scores

EXPLAINS = 0.1  # the largest share of a head's error that is left
MOST_SCORES = 1 << 22  # of a call; no larger one is tried
TILES = (64, 128, 32, 16, 256)
TF32 = format_named("e8m10")
Step = Literal[
    "p", "accumulator", "row_sum", "scores", "products", "out",
    "dq", "dkv", "ds", "p_for_dv", "delta", "lse",
]  # fmt: skip
FORWARD = ("p", "accumulator", "row_sum", "scores", "products", "out")


@dataclass(frozen=True)
class Loss:
    """One step of attention in a coarser format than it should have: `words` say which,
    as a clause. Called with an fp32 tensor it returns the tensor rounded so."""

    step: Step
    format: Format
    words: str
    tile: int | None = None  # of keys, or of queries for dk and dv; None: all at once
    toward_zero: bool = False
    each: bool = False  # whether a running sum is rounded before and after it is added to
    normalised: bool = False  # whether P is divided by its sum before it is rounded

    @property
    def tensors(self) -> tuple[str, ...]:
        """Returns the names of the tensors in which the loss shows: `out` alone for a
        step of the forward pass, else those of dq, dk and dv that the step enters."""
        of = {"dq": ("dq",), "dkv": ("dk", "dv"), "ds": ("dq", "dk"), "p_for_dv": ("dv",)}
        of |= {"delta": ("dq", "dk"), "lse": ("dq", "dk", "dv")}
        return of.get(self.step, ("out",))

    def __call__(self, x: Tensor) -> Tensor:
        return rounded(x, self.format, toward_zero=self.toward_zero)


def rounded(x: Tensor, fmt: Format, *, toward_zero: bool = False) -> Tensor:
    """Returns x, fp32 of any shape, rounded to the nearest value of the format, or toward
    zero; the dtype stays."""
    if not toward_zero and fmt.name in ("bfloat16", "float16"):
        return x.to(dtype_of(fmt)).to(x.dtype)
    return round_to(x, fmt, "toward_zero" if toward_zero else "nearest")


# --- what is tried --------------------------------------------------------------------


def losses(case: AttentionCase) -> Iterator[Loss]:
    """Yields the single steps of the forward pass that may be coarser in a call of this
    format, the likeliest first. For fp32 these are products in TF32; for wider formats
    there are none."""
    working, wide = case.format, FORMATS["float32"]
    if working == wide:
        for zero in (False, True):
            words = f"the products are computed in TF32{' (truncated)' * zero}"
            for tile in (None, *TILES[:3]):
                yield Loss("products", TF32, words, tile, toward_zero=zero)
        return
    if working.precision >= wide.precision:
        return
    tiles = (*(tile for tile in TILES if tile < case.kv_len), None)
    named = [FORMATS[n] for n in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")]
    narrow = [f for f in named if f.precision <= working.precision]
    coarser = [f for f in narrow if f != working]
    bits = [format_named(f"e8m{n - 1}") for n in range(2, working.precision)]
    for fmt, tile in itertools.product([f for f in coarser if f.precision < 8], tiles):
        yield Loss("p", fmt, f"P is rounded to {fmt.name} before P V", tile)
    for fmt in (f for f in narrow if f.precision >= 8):
        for tile, each in itertools.product(tiles[:-1], (False, True)):
            words = f"O is summed in {fmt.name} over tiles of {tile} keys"
            yield Loss("accumulator", fmt, words, tile, each=each)
        for tile in tiles[:-1]:
            words = f"the row sum is kept in {fmt.name} over tiles of {tile} keys"
            yield Loss("row_sum", fmt, words, tile)
        yield Loss("row_sum", fmt, f"the row sum is rounded to {fmt.name}")
        for tile in tiles:
            yield Loss("scores", fmt, f"S is rounded to {fmt.name}", tile)
        if fmt != working:
            yield Loss("p", fmt, f"P is rounded to {fmt.name} before P V")
    for fmt in (f for f in coarser if f.precision < 8):
        words = f"P is rounded to {fmt.name} before P V"
        yield Loss("p", fmt, words, normalised=True)
    yield Loss("out", working, "the output is truncated, not rounded", toward_zero=True)
    for tile in tiles:
        words = f"P is truncated to {working.name}, not rounded"
        yield Loss("p", working, words, tile, toward_zero=True)
    for fmt, tile in itertools.product(bits, tiles):
        if fmt.precision not in {f.precision for f in coarser if f.name.startswith("bf")}:
            words = f"P is rounded to {fmt.precision} significant bits before P V"
            yield Loss("p", fmt, words, tile)


def gradient_losses(case: AttentionCase) -> Iterator[Loss]:
    """Yields the single steps of the backward pass that may be coarser in a call of this
    format; nothing for fp32 and wider."""
    working = case.format
    if working.precision >= FORMATS["float32"].precision:
        return
    named = [FORMATS[n] for n in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")]
    for fmt in (f for f in named if 8 <= f.precision <= working.precision):
        for tile, each in itertools.product(TILES, (False, True)):
            if tile < case.kv_len:
                words = f"dQ is summed in {fmt.name} over tiles of {tile} keys"
                yield Loss("dq", fmt, words, tile, each=each)
            if tile < case.q_len:
                words = f"dK and dV are summed in {fmt.name} over tiles of {tile} queries"
                yield Loss("dkv", fmt, words, tile, each=each)
        yield Loss("delta", fmt, f"delta, the row sum of dO·O, is rounded to {fmt.name}")
        yield Loss("lse", fmt, f"backward reads the log-sum-exp in {fmt.name}")
    for fmt in (f for f in named if f.precision < working.precision):
        yield Loss("ds", fmt, f"dS is rounded to {fmt.name}")
        yield Loss("p_for_dv", fmt, f"P is rounded to {fmt.name} before Pᵀ dO")
    words = f"dS is truncated to {working.name}, not rounded"
    yield Loss("ds", working, words, toward_zero=True)
    words = f"P is truncated to {working.name} before Pᵀ dO, not rounded"
    yield Loss("p_for_dv", working, words, toward_zero=True)


# --- what would come out --------------------------------------------------------------


def forward(case: AttentionCase, loss: Loss, S: Tensor) -> Tensor:
    """Returns O [B, H, q_len, v_dim], fp32 rounded to the working format, of
    FlashAttention-2's forward pass with one step coarser. S: the call's scores [B, H,
    q_len, kv_len], fp32."""
    working = case.format
    if loss.step == "products":
        S = _scores_of_rounded_inputs(case, loss)
    S = loss(S) if loss.step == "scores" else S
    V = case.v.repeat_interleave(case.group, 1).float()
    V = loss(V) if loss.step == "products" else V
    m, l = S.new_full((*S.shape[:3], 1), -math.inf), S.new_zeros(*S.shape[:3], 1)
    if case.sinks is not None:
        m = case.sinks.float()[None, :, None, None].expand(m.shape)
        l = torch.ones_like(m)
    O = S.new_zeros(*S.shape[:3], V.shape[-1])
    step, width = loss.step, loss.tile or S.shape[-1]
    for part, values in zip(S.split(width, -1), V.split(width, 2), strict=True):
        m_old, m = m, torch.maximum(m, part.amax(-1, keepdim=True))
        base = m.clamp(min=torch.finfo(m.dtype).min)
        a, P = (m_old - base).exp(), (part - base).exp()
        l = a * l + P.sum(-1, keepdim=True)
        if loss.normalised:
            P = P / nonzero(l)
        P = loss(P) if step in ("p", "products") else rounded(P, working)
        l = loss(l) if step == "row_sum" else l
        if step == "accumulator":
            O = (
                loss(loss(a * O) + loss(P @ values))
                if loss.each
                else loss(a * O + P @ values)
            )
        else:
            O = a * O + P @ values
    O = O if loss.normalised else O / nonzero(l)
    return loss(O) if step == "out" else rounded(O, working)


def _scores_of_rounded_inputs(case: AttentionCase, loss: Loss) -> Tensor:
    """Returns the scores of the call, fp32, from q and k rounded to the loss's format."""
    return all_scores(dataclasses.replace(case, q=loss(case.q), k=loss(case.k))).float()


@dataclass(frozen=True, eq=False)
class Backward:
    """The inputs of a call's backward pass: its scores [B, H, q_len, kv_len], exact
    log-sum-exp [B, H, q_len], and the output that a kernel returned."""

    case: AttentionCase
    S: Tensor
    lse: Tensor
    out: Tensor

    @cached_property
    def slope(self) -> Tensor | float:
        """Returns the slope of the soft cap at each score, fp32 [B, H, q_len, kv_len]:
        the derivative of cap * tanh(x / cap), 1 - tanh² = 1 / cosh²; 1 without a soft
        cap."""
        case = self.case
        if case.softcap is None:
            return 1.0
        bare = dataclasses.replace(
            case, softcap=None, mask=None, window=None, is_causal=False
        )
        return (all_scores(bare) / case.softcap).cosh().square().reciprocal().float()

    def step(self, loss: Loss) -> dict[str, Tensor]:
        """Returns dq, dk and dv, by name, of FlashAttention-2's backward pass with one
        step coarser: fp32 tensors rounded to the working format. dk and dv of the query
        heads of a group are summed in fp32. Raises UsageError for a case without
        grad_out."""
        case, working, tile = self.case, self.case.format, loss.tile
        Q, dO = case.q.float(), upstream(case).float()
        K, V = (x.repeat_interleave(case.group, 1).float() for x in (case.k, case.v))
        L = loss(self.lse) if loss.step == "lse" else self.lse
        P = torch.where(self.S.isfinite(), (self.S - L[..., None]).exp(), 0.0)
        delta = (dO * self.out.float()).sum(-1, keepdim=True)
        delta = loss(delta) if loss.step == "delta" else delta
        dS = P * (dO @ V.mT - delta) * self.slope
        dS = loss(dS) if loss.step == "ds" else rounded(dS, working)
        P_V = loss(P) if loss.step == "p_for_dv" else rounded(P, working)
        scale = case.scale
        if loss.step == "dq" and tile is not None:
            dQ = torch.zeros_like(Q)
            for weights, keys in zip(dS.split(tile, -1), K.split(tile, 2), strict=True):
                dQ = _add_rounded(loss, dQ, scale * (weights @ keys))
        else:
            dQ = scale * (dS @ K)
        dK, dV = torch.zeros_like(K), torch.zeros_like(V)
        rows = tile if loss.step == "dkv" and tile is not None else case.q_len
        parts = (x.split(rows, 2) for x in (dS, P_V, Q, dO))
        for of_ds, of_p, q, d in zip(*parts, strict=True):
            new = (scale * (of_ds.mT @ q), of_p.mT @ d)
            if loss.step == "dkv":
                dK, dV = (
                    _add_rounded(loss, x, y) for x, y in zip((dK, dV), new, strict=True)
                )
            else:
                dK, dV = dK + new[0], dV + new[1]
        dK, dV = (x.unflatten(1, (case.kv_heads, case.group)).sum(2) for x in (dK, dV))
        return {n: rounded(x, working) for n, x in {"dq": dQ, "dk": dK, "dv": dV}.items()}


def _add_rounded(loss: Loss, total: Tensor, new: Tensor) -> Tensor:
    """Returns the running sum after `new` is added, rounded to the loss's format; with
    `loss.each` the new term is rounded first."""
    return loss(total + (loss(new) if loss.each else new))


def residuals(x: Tensor, exact: Tensor, terms: Tensor, tried: Tensor) -> Tensor:
    """Returns for each head of x [B, H, rows, d] the share of its error against `exact`
    that is left against `tried`, [H]. The share is a ratio of norms, taken plainly and
    with every row divided by the norm of its `terms`; the larger of the two is returned.
    It is infinite in a head without an error, or without one in rows that have terms.
    Elements that are not finite in x, `exact` or `tried` are left out."""
    usable = x.isfinite() & exact.isfinite() & tried.isfinite()
    size = terms.norm(dim=-1, keepdim=True)
    shares = []
    for unit in (torch.ones_like(size), torch.where(size > 0, size, math.inf)):
        left, error = (
            torch.where(usable, (x.double() - y.double()) / unit, 0.0)
            .square()
            .sum((0, 2, 3))
            for y in (tried, exact)
        )
        share = (left / error.clamp_min(1e-300)).sqrt()
        shares.append(torch.where(error > 0, share, math.inf))
    return torch.maximum(*shares)


# --- the search -----------------------------------------------------------------------


def imprecision(
    case: AttentionCase,
    returned: Mapping[str, Tensor],
    exact: Reference,
    terms: Mapping[str, Tensor],
    wrong: tuple[str, ...],
    hints: tuple[Loss, ...] | None = None,
) -> dict[tuple[str, int], tuple[Loss, float]]:
    """Returns by tensor and head the step that explains a kernel's errors, and the share
    of them that it explains (at least 1 - EXPLAINS); a head that no step explains is left
    out. Empty for calls of more than MOST_SCORES scores or formats without a dtype. Steps
    are tried in the order of `losses` or `gradient_losses`, and no more after one that
    explains more than 97 % of some head; of those tried the best is taken. `returned`:
    whole tensors of the call, `out` and those of `wrong`; `exact`: its reference;
    `terms`: the term scale by tensor; `wrong`: what to explain, `("out",)` alone or
    gradients, at least one; `hints`: the steps of other calls, which alone are tried, all
    that show in `wrong` and whose tiles are smaller than the call; None: all."""
    if case.q.shape[:3].numel() * case.kv_len > MOST_SCORES or case.working is not None:
        return {}
    S = all_scores(case).float()
    tried = losses(case) if wrong[0] == "out" else gradient_losses(case)
    backward = Backward(case, S, exact.lse.float(), returned["out"])
    explained: dict[tuple[str, int], tuple[Loss, float]] = {}
    for loss in tried if hints is None else hints:
        names = [n for n in loss.tensors if n in wrong]
        if not names or (
            loss.tile is not None and loss.tile >= max(case.kv_len, case.q_len)
        ):
            continue
        step = (
            {"out": forward(case, loss, S)}
            if loss.step in FORWARD
            else backward.step(loss)
        )
        for n in names:
            left = residuals(returned[n], getattr(exact, n), terms[n], step[n])
            for head, share in enumerate(left.tolist()):
                if (
                    share <= EXPLAINS
                    and share < 1 - explained.get((n, head), (loss, 0.0))[1]
                ):
                    explained[n, head] = (loss, 1 - share)
        if hints is None and explained and max(x for _, x in explained.values()) > 0.97:
            break
    return explained
