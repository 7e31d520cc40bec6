"""The fused fp64 reference on CUDA: how a case is laid out for its Triton kernels, and run.

The same mathematics as the blocked path of `numdev.kernels.reference`, which is the check on this
one and runs wherever this cannot. Results are those of that path to fp64 rounding (docs/method.md
has the bound), and the same from run to run. What this path cannot take (`refusal`) the blocked one
computes, so that a refusal costs time and no digit.

Forward is one kernel, `fused_triton.forward`: two products in fp64, and one for the term scale of
the output. Backward is the five matrix products that every backward pass makes, in fp64, and three
for the term scales of dq, dk and dv. Those for term scales are in bfloat16: these are what errors
are measured in, sums of numbers of one sign, and good to 1 % (docs/method.md).
S and dP stay in registers until they have become P, dX and the terms of dX
(`fused_triton.score_gradients`); these are written for a run of query rows at a time, and the other
six are the library's products of large matrices.

Memory is bounded: operands are cast to fp64 a few kv heads at a time (`OPERAND_BYTES`), and runs of
rows are as long as SCRATCH_BYTES allows. All heads of such a group share every launch.

Legend as in the reference: S scores, P probabilities, L log-sum-exp, delta rowsum(dO O), dX the
gradient of the scaled products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_range
from numdev.errors import Refused
from numdev.kernels.output import upstream
from numdev.kernels.reference.results import Gradients, Reference

LARGEST = 2.0**44
"""No score may reach this. Sums of so large terms are off by about 1, since fp64 has 2^53; and P
would be any number where the two passes, which sum in another order, disagree by that."""
TOO_LARGE = "where fp64 has no digits left"
WIDEST = 256
MOST_HEADS = 65535
"""Of all batch entries: the most that CUDA takes along a grid's second and third axis."""
MASK_BYTES = 1 << 30
"""What a mask may take in fp64."""
OPERAND_BYTES = 1 << 30
SCRATCH_BYTES = 3 << 30
PROGRAMS, LEAST_BLOCKS = 512, 8
"""Fewer programs leave a GPU idle: then keys are divided, into parts of so many blocks at least."""
LEAST_ROWS = 16
"""In a run, whatever they take."""
RUNS = 16
"""Under causality a run computes with all keys its last row sees: there are at least so many runs,
if they have LEAST_ROWS."""
LOG2E, LN2 = 1 / math.log(2), math.log(2)
BOUND = 80.0
"""In units of log 2: scores up to this size need no maximum subtracted. P and its sums stay well
within what bfloat16 and fp32 hold, for term scales, whose |V| comes times a power of two that
brings it to at most 1."""
FAR = (1 << 30) - 1
"""Beyond every row and key, and yet int32 holds the sum of such a number and a position."""
BY_QUERY = ("out", "term_scale", "lse", "empty", "dq", "dq_terms", "delta")
"""Results of query heads; the others are of kv heads."""


@dataclass(frozen=True)
class Tile:
    """The shape of a program, chosen by measurement on an H200 (docs/log.md)."""

    block_q: int
    block_kv: int
    warps: int
    stages: int


FORWARD = {64: Tile(64, 32, 4, 3), 128: Tile(64, 16, 4, 3), 256: Tile(16, 32, 4, 1)}
"""By the width of the widest operand, for 16 and 8 bits. fp32, whose operands take twice the room,
has one stage less."""
ELSEWHERE = {128: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 1)}
"""Where those cannot be: on GPUs whose blocks have less shared memory than ROOM, and on Blackwell,
for which Triton 3.6 builds no fp64 product of 64 rows. Not measured."""
ROOM = 120 << 10
"""Bytes of shared memory that FORWARD takes, at most."""
BLACKWELL = 10
"""Its compute capability, which has two numbers: the first."""
BACKWARD = Tile(32, 64, 4, 3)
BLOCK_D = 16
"""How much of S's and dP's inner axis a step of the backward kernel takes."""


def attend(case: AttentionCase) -> Reference:
    """See `reference.attend`. Raises Refused where this path cannot take the case."""
    accept(case)
    return Reference(**_attend(case), by="fused")


def gradients(case: AttentionCase) -> Gradients:
    """See `reference.gradients`. Raises Refused where this path cannot take the case, UsageError
    for a case without grad_out."""
    upstream(case)
    accept(case)
    found = _attend(case)
    accept_scores(found)
    whole: dict[str, Tensor] = {}
    for part, heads, kv_heads in _parts(case):
        backward = _Backward.of(part, {n: found[n][:, heads] for n in ("out", "lse", "empty")})
        for rows in _runs(part):
            backward.add(rows)
        here = backward.found()
        if part is case:
            return Gradients(**found, **here, by="fused")
        whole = whole or {name: _like(case, name, x) for name, x in here.items()}
        for name, x in here.items():
            whole[name][:, heads if name in BY_QUERY else kv_heads] = x
    return Gradients(**found, **whole, by="fused")


def _attend(case: AttentionCase) -> dict[str, Tensor]:
    """out, lse, term_scale and empty."""
    whole: dict[str, Tensor] = {}
    for part, heads, _ in _parts(case):
        here = _forward(part)
        if part is case:
            return here
        whole = whole or {name: _like(case, name, x) for name, x in here.items()}
        for name, x in here.items():
            whole[name][:, heads] = x
    return whole


def _like(case: AttentionCase, name: str, part: Tensor) -> Tensor:
    """Room for all heads of what `part` is for some."""
    heads = case.heads if name in BY_QUERY else case.kv_heads
    return part.new_empty(part.shape[0], heads, *part.shape[2:])


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """A group of heads as the kernels take it: contiguous, fp64, padded to powers of two."""

    q: Tensor
    """[B, H, q_len, D], times scale and, without a soft cap, log2(e)."""
    k: Tensor
    v: Tensor
    masks: tuple[Any, ...]
    """low and high of `_limits`, and the mask's strides."""
    pointers: tuple[Tensor, Tensor, Tensor]
    """The mask, the positions of query rows, the soft cap."""
    flags: Mapping[str, bool]

    @classmethod
    def of(cls, case: AttentionCase) -> _Operands:
        unit = case.scale * (1.0 if case.softcap else LOG2E)
        q, k, v = (_padded(x.detach().double()) for x in (case.q, case.k, case.v))
        return cls(q=q.mul_(unit), k=k, v=v, **_hiding(case))

    def bounded(self, case: AttentionCase) -> bool:
        """Whether no score leaves BOUND, by Cauchy and Schwarz or the soft cap. Waits for the
        device."""
        if is_additive(case):
            return False
        if case.softcap is not None:
            return case.softcap * LOG2E <= BOUND
        largest = (x.norm(dim=-1).amax() for x in (self.q, self.k))
        return bool(math.prod(largest) <= BOUND)


def _forward(case: AttentionCase) -> dict[str, Tensor]:
    """The forward kernel on one group of heads."""
    from numdev.kernels.reference.fused_triton import forward

    at, tile = _Operands.of(case), _forward_tile(case)
    options = _forward_options(case, at, tile)
    b, h, n = case.q.shape[:3]
    grid = (-(-n // tile.block_q), b * h)
    span = _span(case, tile, math.prod(grid))
    parts = -(-case.kv_len // span)
    d, d_v = at.q.shape[-1], at.v.shape[-1]
    out, terms = (_room(at.q, parts, b, h, n, d_v) for _ in range(2))
    lse = _room(at.q, parts, b, h, n)
    empty = torch.empty(parts, b, h, n, dtype=torch.int8, device=at.q.device)
    sinks = at.q if case.sinks is None else case.sinks.detach().double() * LOG2E
    k, v = (_upper(x) if options["UPPER"] else x for x in (at.k, at.v))
    size, unit = scaled(at.v.abs())
    launch(
        forward,
        (*grid, parts),
        at.q, k, v, size, unit, *at.pointers, sinks, out, terms, lse, empty,
        h, case.group, n, case.kv_len, span, *at.masks,
        D=d, D_V=d_v, **options,
    )  # fmt: skip
    out, terms, lse = _merged(out, terms, lse)
    width = case.v.shape[-1]
    return {
        "out": out[..., :width],
        "term_scale": terms[..., :width],
        "lse": lse,
        "empty": empty.bool().all(dim=0),
    }


def _forward_options(case: AttentionCase, at: _Operands, tile: Tile) -> dict[str, Any]:
    """How the forward kernel is compiled, but for widths."""
    upper, bounded, d_v = _is_short(case), at.bounded(case), at.v.shape[-1]
    return {
        "BLOCK_Q": tile.block_q,
        "BLOCK_KV": tile.block_kv,
        "STAGES": tile.stages if upper else max(1, tile.stages - 1),
        "num_warps": tile.warps,
        "BOUNDED": bounded,
        # Pays with tiles of few keys.
        "WHOLE": bounded and not at.flags["MASKED"] and tile.block_kv < 32,
        "SINK": case.sinks is not None,
        "UPPER": upper,
        "PART": d_v // 2 if d_v == 128 else d_v,
        **at.flags,
    }


def _is_short(case: AttentionCase) -> bool:
    """Whether the lower halves of K and V in fp64 are 0: formats of 16 and 8 bits have at most 11
    significant bits, and fp64 has 21 in the upper half."""
    return max(x.element_size() for x in (case.k, case.v)) <= 2


def _upper(x: Tensor) -> Tensor:
    """The upper 32 bits of fp64 numbers."""
    return x.view(torch.int32)[..., 1::2].contiguous()


def _forward_tile(case: AttentionCase) -> Tile:
    widest, device = max(_width(case.q), _width(case.v)), case.q.device
    tiles = FORWARD if not _on_nvidia(device) or suits(*_of_gpu(device)) else ELSEWHERE
    return next(tile for width, tile in tiles.items() if widest <= width)


def suits(shared: int, capability: int) -> bool:
    """Whether FORWARD is for a GPU with so much shared memory for a block, and of a compute
    capability with this first number."""
    return shared >= ROOM and capability < BLACKWELL


@functools.cache
def _of_gpu(device: torch.device) -> tuple[int, int]:
    """What `suits` asks, of a tensor's device, an NVIDIA GPU."""
    properties: Any = torch.cuda.get_device_properties(device.index)
    shared = int(properties.shared_memory_per_block_optin)
    return shared, torch.cuda.get_device_capability(device)[0]


def _on_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _span(case: AttentionCase, tile: Tile, programs: int) -> int:
    """How many keys a program takes: all, unless there are too few programs to fill the device."""
    blocks, wanted = -(-case.kv_len // tile.block_kv), -(-PROGRAMS // programs)
    parts = min(wanted, max(1, blocks // LEAST_BLOCKS))
    return -(-blocks // parts) * tile.block_kv


def _merged(out: Tensor, terms: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What parts of the keys give together, weighted by their log-sum-exp (the first axis)."""
    if lse.shape[0] == 1:
        return out[0], terms[0], lse[0]
    whole = lse.logsumexp(dim=0)
    weight = (lse - whole.masked_fill(whole == -math.inf, 0.0)).exp_()[..., None]
    return (out * weight).sum(dim=0), (terms * weight).sum(dim=0), whole


@dataclass(frozen=True, kw_only=True)
class _Backward:
    """The sums of a backward pass over runs of query rows, for one group of heads."""

    case: AttentionCase
    at: _Operands
    dO: Tensor
    lse: Tensor
    """In units of log 2."""
    delta: Tensor
    dq: Tensor
    """[B, H, q_len, D]"""
    dk: Tensor
    """[B * kv_heads, kv_len, D]"""
    dv: Tensor
    """[B * kv_heads, kv_len, D_V]"""
    terms: Terms
    seen: Tensor
    """[B * kv_heads, kv_len]: not 0 for keys that a row was seen to see, where that is counted."""

    @classmethod
    def of(cls, case: AttentionCase, forward: Mapping[str, Tensor]) -> _Backward:
        at = _Operands.of(case)
        empty, pairs = forward["empty"], case.q.shape[0] * case.kv_heads
        dO = upstream(case).detach().double()
        delta = (dO * forward["out"]).sum(dim=-1).masked_fill_(empty, 0.0)
        dO = _padded(dO)
        return cls(
            case=case,
            at=at,
            dO=dO,
            lse=(forward["lse"] * LOG2E).masked_fill_(empty, 0.0),
            delta=delta,
            dq=torch.empty_like(at.q),
            dk=torch.zeros_like(at.k).flatten(0, 1),
            dv=torch.zeros_like(at.v).flatten(0, 1),
            terms=Terms.of(case, at.q, at.k, at.v, dO),
            seen=torch.zeros(pairs, case.kv_len, dtype=torch.int32, device=at.k.device),
        )

    def add(self, rows: slice) -> None:
        """One run of rows: its dq, and its part of dk and dv."""
        case, keys = self.case, _keys(self.case, rows)
        P, dX, P16, dX_terms = self._scores(rows, keys)
        q, dO = (grouped(case, x[:, :, rows]) for x in (self.at.q, self.dO))
        dq = torch.bmm(dX, self.at.k.flatten(0, 1)[:, keys])
        self.dq[:, :, rows] = dq.view(*self.dq.shape[:2], -1, q.shape[-1])
        self.dk[:, keys].baddbmm_(dX.mT, q)
        self.dv[:, keys].baddbmm_(P.mT, dO)
        self.terms.add(case, rows, keys, P16, dX_terms)

    def _scores(self, rows: slice, keys: slice) -> tuple[Tensor, ...]:
        """P and dX, fp64, and P and the terms of dX times `Terms.unit`, bfloat16: each
        [B * kv_heads, group * rows, keys]."""
        from numdev.kernels.reference.fused_triton import score_gradients

        case, at, tile = self.case, self.at, BACKWARD
        count, width = rows.stop - rows.start, keys.stop - keys.start
        pairs, heads = case.q.shape[0] * case.kv_heads, case.q.shape[0] * case.heads
        shape = (2, pairs, case.group * count, width)
        found = (*_room(at.q, *shape), *at.q.new_empty(shape, dtype=torch.bfloat16))
        launch(
            score_gradients,
            (-(-width // tile.block_kv), -(-count // tile.block_q), heads),
            at.q, at.k, at.v, self.dO, self.lse, self.delta, *at.pointers, self.terms.unit, *found,
            self.seen,
            case.heads, case.group, rows.start, count, case.q_len, keys.start, width, case.kv_len,
            *at.masks,
            D=at.q.shape[-1], D_V=at.v.shape[-1], BLOCK_Q=tile.block_q, BLOCK_KV=tile.block_kv,
            BLOCK_D=BLOCK_D, STAGES=tile.stages, num_warps=tile.warps, **at.flags,
        )  # fmt: skip
        return found

    def found(self) -> dict[str, Tensor]:
        """dq, dk, dv, their term scales, delta and unseen, of the shapes of q, k and v."""
        case, d, d_v = self.case, self.case.q.shape[-1], self.case.v.shape[-1]
        # Q came scaled, for the scores: this is what remains of the scale in dK = scale dX^T Q.
        rest = 1.0 if case.softcap else LN2
        dq_terms, dk_terms, dv_terms = self.terms.found()
        return {
            "dq": self.dq.mul_(case.scale)[..., :d],
            "dq_terms": dq_terms.mul_(abs(case.scale))[..., :d],
            "dk": self.dk.mul_(rest).view_as(self.at.k)[..., :d],
            "dk_terms": dk_terms.mul_(rest).view_as(self.at.k)[..., :d],
            "dv": self.dv.view_as(self.at.v)[..., :d_v],
            "dv_terms": dv_terms.view_as(self.at.v)[..., :d_v],
            "delta": self.delta,
            "unseen": self._unseen(),
        }

    def _unseen(self) -> Tensor:
        """The keys that no row sees: counted where a mask or positions decide it, otherwise
        those that are i + low to i + high for no row i."""
        case, flags = self.case, self.at.flags
        if flags["MASKED"] or flags["AT"]:
            return (self.seen == 0).view(case.k.shape[:3])
        low, high = _limits(case)
        j = torch.arange(case.kv_len, device=case.k.device)
        first = j.new_zeros(()) if high is None else (j - high).clamp_(min=0)
        last = case.q_len - 1 if low is None else (j - low).clamp_(max=case.q_len - 1)
        return (first > last).expand(case.k.shape[:3]).clone()


def _parts(case: AttentionCase) -> Iterator[tuple[AttentionCase, slice, slice]]:
    """The case in groups of kv heads whose fp64 operands fit OPERAND_BYTES: the part, its query
    heads and its kv heads."""
    d, d_v = (_width(x) for x in (case.q, case.v))
    rows, columns = d + 2 * d_v, d + d_v  # of q, out and terms; of k and v
    if case.grad_out is not None:  # dO, dq, dk and dv, and in lower precision their terms
        rows, columns = rows + 2 * d + 2 * d_v, columns + 2 * d + 2 * d_v
    one = 8 * case.q.shape[0] * (case.group * case.q_len * rows + case.kv_len * columns)
    step = max(1, min(case.kv_heads, OPERAND_BYTES // one))
    for first in range(0, case.kv_heads, step):
        last = min(first + step, case.kv_heads)
        whole = last - first == case.kv_heads
        part = case if whole else case.select_groups(list(range(first, last)))
        yield part, slice(first * case.group, last * case.group), slice(first, last)


def _runs(case: AttentionCase) -> list[slice]:
    """Runs of query rows whose P and dX, P again and terms, 20 bytes a score, fit SCRATCH_BYTES."""
    n, per_row = case.q_len, 20 * case.q.shape[0] * case.heads * case.kv_len
    few = -(-n // RUNS) if case.restricts_positions else n
    step = max(LEAST_ROWS, min(few, SCRATCH_BYTES // per_row) // LEAST_ROWS * LEAST_ROWS)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _keys(case: AttentionCase, rows: slice) -> slice:
    """The keys a run of rows can see; one, where it sees none, which spares every step the case of
    nothing at all."""
    keys = key_range(case, rows)
    if keys.stop > keys.start:
        return keys
    first = min(keys.start, case.kv_len - 1)
    return slice(first, first + 1)


def _hiding(case: AttentionCase) -> dict[str, Any]:
    """What hides keys, as the kernels take it."""
    mask, positions = case.mask, case.positions
    low, high = _limits(case)
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = _in_fp64(mask.detach())
        mask = mask.expand(*case.q.shape[:3], case.kv_len)
        strides = mask.stride()
    cap = torch.tensor(case.softcap or 1.0, dtype=torch.float64, device=case.q.device)
    return {
        "masks": (low or 0, high or 0, *strides),
        "pointers": (
            case.q if mask is None else mask,
            case.q if positions is None else positions.int(),
            cap,
        ),
        "flags": {
            "LOW": low is not None,
            "HIGH": high is not None,
            "MASKED": mask is not None,
            "SOFTCAP": case.softcap is not None,
            "AT": positions is not None,
        },
    }


def _limits(case: AttentionCase) -> tuple[int | None, int | None]:
    """low and high: causality and window let a query at position i see the keys i + low to
    i + high; None: no limit there. At most FAR: there a limit hides all or nothing."""
    left, right = case.window or (None, None)
    ends = [case.causal_offset] if case.is_causal else []
    ends += [] if right is None else [case.causal_offset + right]
    low = None if left is None else _near(case.causal_offset - left)
    return low, _near(min(ends)) if ends else None


def _near(limit: int) -> int:
    return max(-FAR, min(limit, FAR))


def _in_fp64(mask: Tensor) -> Tensor:
    """A mask as what is added to scores: -inf for what a bool one hides, and for the lowest number
    of an additive one's own dtype."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float64).masked_fill_(~mask, -math.inf)
    return mask.double().masked_fill_(mask == torch.finfo(mask.dtype).min, -math.inf)


def _padded(x: Tensor) -> Tensor:
    """Contiguous, the last axis filled up with zeros to a power of two of 16 or more."""
    more = _width(x) - x.shape[-1]
    return (torch.nn.functional.pad(x, (0, more)) if more else x).contiguous()


def _width(x: Tensor) -> int:
    return max(16, 1 << (x.shape[-1] - 1).bit_length())


def _room(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=like.device)


# --- Triton's kernels on a GPU -------------------------------------------------------------------


_NOT_BUILT: dict[Hashable, str] = {}
"""What Triton could not build, and why. To try takes seconds, and it prints pages."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs a Triton kernel where its tensors are, and not on the current device. Raises Refused
    where Triton cannot build it for this one; what it could not once is not tried again."""
    if _NOT_BUILT and (why := _NOT_BUILT.get(_built(kernel, arguments, options))):
        raise Refused(why)
    try:
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **options)
    except Exception as error:
        of_triton = type(error).__module__.startswith("triton") or "PassManager" in str(error)
        # It has a C compiler build what starts its kernels.
        of_compiler = "C compiler" in str(error) or isinstance(error, CalledProcessError)
        if not (of_triton or of_compiler):
            raise
        first = (str(error).strip() or repr(error)).splitlines()[0]
        why = f"Triton cannot build it ({first})"
        _NOT_BUILT[_built(kernel, arguments, options)] = why
        raise Refused(why) from error


def _built(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Hashable:
    """What is the same where the same is built."""
    kinds = (str(x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in arguments)
    return (kernel, arguments[0].device, *kinds, repr(sorted(options.items())))


# --- term scales ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The sums of a backward pass over absolute values, run of rows by run of rows, for one group
    of heads: a unit for errors. Rounding terms of one sign to 8 bits moves a sum by less than 1 %
    (docs/method.md), and by much less where there are many.

    Operands are bfloat16, times powers of two that bring them to at most 1 (the terms of dX to at
    most 2), so that they keep clear of the ends of its range; products accumulate in fp32.
    """

    q: Tensor
    """|Q|, |K| and |dO|, padded as the fp64 ones."""
    k: Tensor
    dO: Tensor
    units: tuple[Tensor, Tensor, Tensor]
    """What q, k and dO were multiplied by."""
    unit: Tensor
    """What the terms of dX are multiplied by."""
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @classmethod
    def of(cls, case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, dO: Tensor) -> Terms:
        """Of the fp64 operands of `fused`: q comes with the scale."""
        # |dP| is at most |dO| |V|, and so is delta, an average of dP.
        largest = dO.norm(dim=-1).amax() * v.norm(dim=-1).amax()
        (q, of_q), (k, of_k), (dO, of_dO) = (scaled(x.abs()) for x in (q, k, dO))
        by_key = (case.q.shape[0] * case.kv_heads, case.kv_len)
        return cls(
            q=q,
            k=k.flatten(0, 1),
            dO=dO,
            units=(of_q, of_k, of_dO),
            unit=_unit(largest),
            dq=torch.empty_like(q, dtype=torch.float32),
            dk=q.new_zeros(*by_key, q.shape[-1], dtype=torch.float32),
            dv=q.new_zeros(*by_key, dO.shape[-1], dtype=torch.float32),
        )

    def add(self, case: AttentionCase, rows: slice, keys: slice, P: Tensor, dX: Tensor) -> None:
        """One run of rows, by its P and terms of dX."""
        q, dO = (grouped(case, x[:, :, rows]) for x in (self.q, self.dO))
        dq = _in_fp32(dX, self.k[:, keys])
        self.dq[:, :, rows] = dq.view(*self.dq.shape[:2], -1, q.shape[-1])
        self.dk[:, keys] += _in_fp32(dX.mT, q)
        self.dv[:, keys] += _in_fp32(P.mT, dO)

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """The term scales of dq, dk and dv in fp64, but for the scale of attention."""
        q, k, dO = self.units
        sums, units = (self.dq, self.dk, self.dv), (self.unit * k, self.unit * q, dO)
        dq, dk, dv = (x.double().div_(u) for x, u in zip(sums, units, strict=True))
        return dq, dk, dv


def grouped(case: AttentionCase, x: Tensor) -> Tensor:
    """[B, H, rows, X] as [B * kv_heads, group * rows, X]."""
    return x.reshape(x.shape[0] * case.kv_heads, -1, x.shape[-1])


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices, accumulated and returned in fp32."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in bfloat16, times a power of two that brings it to at most 1, and that power."""
    unit = _unit(x.amax())
    return (x * unit).bfloat16(), unit


def _unit(largest: Tensor) -> Tensor:
    """The power of two that brings `largest` to 1/2 .. 1; 1 for 0."""
    return torch.where(largest > 0, torch.frexp(largest).mantissa / largest, 1.0)


# --- what it cannot take -------------------------------------------------------------------------


def accept(case: AttentionCase) -> None:
    """Raises Refused with the reason of `refusal`, where there is one."""
    reason = refusal(case)
    if reason is not None:
        raise Refused(reason)


def accept_scores(forward: Mapping[str, Tensor]) -> None:
    """Raises Refused where P is not to be had from L for a backward pass. An additive mask can lift
    every score of a row beyond LARGEST: L then says nothing of the differences between them, and
    only a softmax that subtracts their maximum, as the blocked path's, still does."""
    size = forward["lse"].abs().masked_fill(forward["empty"], 0.0).amax().item()
    if size > LARGEST:
        raise Refused(f"a row's scores are all about {size:.1g}, {TOO_LARGE}")


def refusal(case: AttentionCase) -> str | None:
    """Why this path cannot take the case, as a sentence; None when it can. Reads the inputs, and
    waits for the device."""
    if not case.q.is_cuda:
        return "the fused one runs on CUDA"
    return _unfit(case) or _missing() or _out_of_range(case)


def is_additive(case: AttentionCase) -> bool:
    return case.mask is not None and case.mask.dtype != torch.bool


@functools.cache
def _missing() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return None


def _unfit(case: AttentionCase) -> str | None:
    """Why shapes and formats do not suit it."""
    tensors = [x for x in (*_factors(case), case.mask) if x is not None]
    widest = max(case.q.shape[-1], case.v.shape[-1])
    heads = case.q.shape[0] * case.heads
    masked = 0 if case.mask is None else case.mask.numel()
    if any(x.dtype == torch.float64 for x in tensors):
        return "in float64 sums may leave the range the fused one counts on"
    if widest > WIDEST:
        return f"the fused one takes operands up to {WIDEST} wide, not {widest}"
    if heads > MOST_HEADS:
        return f"the fused one takes up to {MOST_HEADS} heads of all batch entries, not {heads}"
    if 8 * masked > MASK_BYTES:
        return f"the mask has {masked:.2g} elements, too many to hold in float64"
    return None


def _out_of_range(case: AttentionCase) -> str | None:
    """Why the numbers in the inputs do not suit it."""
    largest = [_wide(x).abs().amax().double() for x in _factors(case)]
    if case.mask is not None and is_additive(case):  # -inf hides; NaN and +inf spoil
        largest.append(_wide(case.mask).clamp_min(0.0).amax().double())
    q, k, *others = torch.stack(largest).tolist()
    if not all(map(math.isfinite, (q, k, *others))):
        return "an input is not finite"
    # At least 1 each: nor may Q times scale leave the range where K is nothing.
    size = abs(case.scale) * case.q.shape[-1] * max(q, 1.0) * max(k, 1.0)
    return f"scores may reach {size:.1g}, {TOO_LARGE}" if size > LARGEST else None


def _factors(case: AttentionCase) -> list[Tensor]:
    """q and k first."""
    found = (case.q, case.k, case.v, case.sinks, case.grad_out)
    return [x for x in found if x is not None]


def _wide(x: Tensor) -> Tensor:
    """In a format that torch computes in: it does not in those of 8 bits."""
    return x.detach().float() if x.element_size() == 1 else x.detach()
