"""The fused fp64 reference on CUDA: how a case is laid out for its Triton kernels, and
run.

The blocked path of `numdev.kernels.reference` is the check on this one, and computes what
this one refuses (`refuse_unfit`). Results agree to fp64 rounding (docs/derivations.md has
the bound), and are the same from run to run.

Forward is one kernel. Backward is the five matrix products that every backward pass
makes, in fp64, and three for the term scales of dq, dk and dv: S and dP stay in registers
until they have become P, dX and the terms of dX (`fused_triton.score_gradients`), written
for a run of query rows at a time; the other six are the library's products of large
matrices. Memory is bounded (`OPERAND_BYTES`, `SCRATCH_BYTES`).

Term scales are sums in bfloat16: a unit for errors. Rounding terms of one sign to 8 bits
moves a sum by less than 1 % (docs/derivations.md). Operands are scaled by powers of two
that bring them to at most 1 (the terms of dX to at most 2), so that they keep clear of
the ends of bfloat16's range.

Legend as in the reference; dX is the gradient of the scaled products."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_limits, key_range
from numdev.errors import Refused
from numdev.kernels.output import refuse, upstream, why_not
from numdev.kernels.reference.blocked import Gradients, Reference
from numdev.metrics.yardstick import widened

LARGEST = 2.0**44
"""No score may reach this. Sums of so large terms are off by about 1, since fp64 has
2^53; and P would be any number where the two passes, which sum in another order, disagree
by that."""
TOO_LARGE = "where fp64 has no digits left"
WIDEST = 256
# Of all batch entries: CUDA's limit along a grid's second and third axis
MOST_HEADS = 65535
MASK_BYTES = 1 << 30  # of a mask in fp64
OPERAND_BYTES = 1 << 30
SCRATCH_BYTES = 3 << 30
PROGRAMS, LEAST_BLOCKS = 512, 8
"""Fewer programs leave a GPU idle: then keys are divided, into parts of so many blocks at
least."""
LEAST_ROWS = 16  # in a run, whatever they take
# Under causality or a window a range has at most this part of the rows, since a run
# computes with all keys that its last row sees
RUNS = 16
LOG2E, LN2 = 1 / math.log(2), math.log(2)
BOUND = 80.0
"""Scores up to this, in units of log 2, need no maximum subtracted: bfloat16 and fp32
hold their P."""
# Of query heads
BY_QUERY = ("out", "term_scale", "lse", "empty", "dq", "dq_terms", "delta")
Results = dict[str, Tensor]


class Tile(NamedTuple):
    """The shape of a program, chosen by measurement on an H200 (benchmarks/log)."""

    block_q: int
    block_kv: int
    warps: int
    stages: int


FORWARD = {64: Tile(64, 32, 4, 3), 128: Tile(64, 16, 4, 3), 256: Tile(16, 32, 4, 1)}
"""Tiles by the width of the widest operand, for 16 and 8 bits. fp32 has one stage
less."""
ELSEWHERE = {128: Tile(32, 32, 4, 2), 256: Tile(16, 16, 4, 1)}
"""Tiles where those cannot be: on GPUs whose blocks have less shared memory than ROOM,
and on Blackwell, for which Triton 3.6 builds no fp64 product of 64 rows. Not measured."""
ROOM = 120 << 10  # bytes of shared memory that FORWARD takes, at most
BLACKWELL = 10  # the first number of its compute capability
BACKWARD = Tile(32, 64, 4, 3)
BLOCK_D = 16  # how much of S's and dP's inner axis a step of the backward kernel takes


def attend(case: AttentionCase) -> Reference:
    """Returns the forward reference by the fused path. Raises Refused where this path
    cannot take the case."""
    refuse_unfit(case)
    return Reference(
        by="fused", **_join_head_groups(case, lambda part, heads: _forward(part))
    )


def gradients(case: AttentionCase) -> Gradients:
    """Returns the forward reference and the gradients by the fused path. Raises Refused
    where this path cannot take the case, UsageError for a case without grad_out."""
    upstream(case)
    refuse_unfit(case)
    forward = _join_head_groups(case, lambda part, heads: _forward(part))
    refuse_large_scores(forward)
    names = ("out", "lse", "empty")
    backward = _join_head_groups(
        case, lambda part, heads: _backward(part, *(forward[n][:, heads] for n in names))
    )
    return Gradients(by="fused", **forward, **backward)


def _join_head_groups(
    case: AttentionCase, compute: Callable[[AttentionCase, slice], Results]
) -> Results:
    """Returns the tensors of `compute(part, query heads)` for each group of heads, joined
    along the head axis, by name. Where one group is all, what `compute` returns."""
    whole: Results = {}
    for part, heads, kv_heads in _head_groups(case):
        of_part = compute(part, heads)
        if part is case:
            return of_part
        for name, x in of_part.items():
            by_query = name in BY_QUERY
            if name not in whole:
                count = case.heads if by_query else case.kv_heads
                whole[name] = x.new_empty(x.shape[0], count, *x.shape[2:])
            whole[name][:, heads if by_query else kv_heads] = x
    return whole


def _head_groups(case: AttentionCase) -> Iterator[tuple[AttentionCase, slice, slice]]:
    """Yields (case of some kv heads, slice of its query heads, slice of its kv heads),
    such that the fp64 operands of each case fit OPERAND_BYTES; but a case has at least
    one kv head. Yields the case itself, alone, where all its heads fit."""
    d, d_v = (_width(x) for x in (case.q, case.v))
    rows, columns = d + 2 * d_v, d + d_v  # of q, out and terms; of k and v
    if case.grad_out is not None:  # dO, dq, dk and dv, and in lower precision their terms
        rows, columns = rows + 2 * d + 2 * d_v, columns + 2 * d + 2 * d_v
    one = 8 * case.q.shape[0] * (case.group * case.q_len * rows + case.kv_len * columns)
    step = max(1, min(case.kv_heads, OPERAND_BYTES // one))
    for first in range(0, case.kv_heads, step):
        last = min(first + step, case.kv_heads)
        whole = last - first == case.kv_heads
        part = case if whole else case.restrict(kv_heads=list(range(first, last)))
        yield part, slice(first * case.group, last * case.group), slice(first, last)


# --- what the kernels take ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """A group of heads as the kernels take it: contiguous, fp64, padded to powers of
    two."""

    q: Tensor  # [B, H, q_len, D], times scale and, without a soft cap, log2(e)
    k: Tensor
    v: Tensor
    masks: tuple[int, ...]  # low and high of `key_limits`, and the mask's strides
    # The mask, the positions of query rows, the soft cap
    pointers: tuple[Tensor, Tensor, Tensor]
    flags: Mapping[str, bool]

    @classmethod
    def of(cls, case: AttentionCase) -> _Operands:
        """Returns the operands of a case, in fp64. No tensor of it may be in float64: q
        would be scaled in place. A bool mask becomes 0 and -inf, and the lowest number of
        an additive one -inf; without a mask or positions another tensor stands in their
        place, which the flags keep from being read."""
        q, k, v = (_padded(x.detach().double()) for x in (case.q, case.k, case.v))
        mask, positions, (low, high) = case.mask, case.positions, key_limits(case)
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            # -inf for what a bool one hides, and for an additive one's own lowest number.
            additive = _is_additive(case)
            hidden = mask == torch.finfo(mask.dtype).min if additive else ~mask
            mask = mask.detach().double() if additive else torch.zeros_like(mask).double()
            mask = mask.masked_fill_(hidden, -math.inf).expand(
                *case.q.shape[:3], case.kv_len
            )
            strides = mask.stride()
        cap = torch.tensor(case.softcap or 1.0, dtype=torch.float64, device=case.q.device)
        at = case.q if positions is None else positions.int()
        flags = {
            "LOW": low is not None,
            "HIGH": high is not None,
            "MASKED": mask is not None,
            "SOFTCAP": case.softcap is not None,
            "AT": positions is not None,
        }
        return cls(
            q=q.mul_(case.scale * (1.0 if case.softcap else LOG2E)),
            k=k,
            v=v,
            masks=(low or 0, high or 0, *strides),
            pointers=(case.q if mask is None else mask, at, cap),
            flags=flags,
        )

    def has_bounded_scores(self, case: AttentionCase) -> bool:
        """Whether no score can leave BOUND, by Cauchy and Schwarz or the soft cap; False
        with an additive mask. Waits for the device."""
        if _is_additive(case):
            return False
        if case.softcap is not None:
            return case.softcap * LOG2E <= BOUND
        largest = (x.norm(dim=-1).amax() for x in (self.q, self.k))
        return bool(math.prod(largest) <= BOUND)


def _padded(x: Tensor) -> Tensor:
    """Returns x contiguous, its last axis padded with zeros to a power of two of 16 or
    more; x itself where it is so already."""
    more = _width(x) - x.shape[-1]
    return (torch.nn.functional.pad(x, (0, more)) if more else x).contiguous()


def _width(x: Tensor) -> int:
    """Returns the smallest power of two, 16 or more, that the last axis of x fits in."""
    return max(16, 1 << (x.shape[-1] - 1).bit_length())


def _scaled_to_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns |x| in bfloat16, multiplied by one power of two for the whole tensor that
    brings its largest element to [1/2, 1], and that power, of no dimension (1 if all is
    0)."""
    x = x.abs()
    unit = _scale_to_one(x.amax())
    return (x * unit).bfloat16(), unit


def _scale_to_one(largest: Tensor) -> Tensor:
    """Returns the power of two that brings `largest` into [1/2, 1); 1 for 0."""
    return torch.where(largest > 0, torch.frexp(largest).mantissa / largest, 1.0)


# --- forward --------------------------------------------------------------------------


def _forward(case: AttentionCase) -> Results:
    """Returns `out`, `term_scale`, `lse` and `empty` of one group of heads, by the Triton
    kernel. Raises Refused where Triton cannot build it."""
    from numdev.kernels.reference.fused_triton import forward

    at, tile = _Operands.of(case), _forward_tile(case)
    b, h, n = case.q.shape[:3]
    grid = (-(-n // tile.block_q), b * h)
    span = _keys_per_program(case, tile, math.prod(grid))
    parts, d_v = -(-case.kv_len // span), at.v.shape[-1]
    out, terms = (at.q.new_empty(parts, b, h, n, d_v) for _ in range(2))
    lse = at.q.new_empty(parts, b, h, n)
    empty = torch.empty(parts, b, h, n, dtype=torch.int8, device=at.q.device)
    sinks = at.q if case.sinks is None else case.sinks.detach().double() * LOG2E
    # Formats of 16 and 8 bits have at most 11 significant bits, and fp64 has 21 in the
    # upper half: the lower halves of K and V are 0.
    upper = max(x.element_size() for x in (case.k, case.v)) <= 2
    k, v = at.k, at.v
    if upper:
        k, v = (x.view(torch.int32)[..., 1::2].contiguous() for x in (k, v))
    bounded, stages = (
        at.has_bounded_scores(case),
        tile.stages if upper else max(1, tile.stages - 1),
    )
    # Pays with few keys
    whole = bounded and not at.flags["MASKED"] and tile.block_kv < 32
    operands = (
        at.q,
        k,
        v,
        *_scaled_to_one(at.v),
        *at.pointers,
        sinks,
        out,
        terms,
        lse,
        empty,
    )
    sizes = (h, case.group, n, case.kv_len, span, *at.masks)
    launch(
        forward,
        (*grid, parts),
        *operands,
        *sizes,
        D=at.q.shape[-1], D_V=d_v, BLOCK_Q=tile.block_q, BLOCK_KV=tile.block_kv,
        STAGES=stages, num_warps=tile.warps,
        BOUNDED=bounded, SINK=case.sinks is not None, UPPER=upper, WHOLE=whole,
        PART=d_v // 2 if d_v == 128 else d_v, **at.flags,
    )  # fmt: skip
    out, terms, lse = _merge_key_parts(out, terms, lse)
    width = case.v.shape[-1]
    return {
        "out": out[..., :width],
        "term_scale": terms[..., :width],
        "lse": lse,
        "empty": empty.bool().all(dim=0),
    }


def _forward_tile(case: AttentionCase) -> Tile:
    """Returns the forward kernel's tile for the case's width and GPU. Raises
    StopIteration for heads wider than WIDEST, which `refuse_unfit` excludes."""
    widest, device = max(_width(case.q), _width(case.v)), case.q.device
    on_nvidia = device.type == "cuda" and torch.version.hip is None
    tiles = (
        FORWARD
        if not on_nvidia or suits_forward_tiles(*_gpu_limits(device))
        else ELSEWHERE
    )
    return next(tile for width, tile in tiles.items() if widest <= width)


def suits_forward_tiles(shared: int, capability: int) -> bool:
    """Whether the tiles FORWARD fit a GPU: not one from Blackwell on. `shared`: bytes of
    shared memory that a block may have; `capability`: the major number of its compute
    capability."""
    return shared >= ROOM and capability < BLACKWELL


@functools.cache
def _gpu_limits(device: torch.device) -> tuple[int, int]:
    """Returns the bytes of shared memory that a block may have on this NVIDIA GPU, and
    its major compute capability."""
    properties: Any = torch.cuda.get_device_properties(device.index)
    shared = int(properties.shared_memory_per_block_optin)
    return shared, torch.cuda.get_device_capability(device)[0]


def _keys_per_program(case: AttentionCase, tile: Tile, programs: int) -> int:
    """Returns how many keys a program takes: whole tiles, and all keys where at least
    PROGRAMS `programs` run. Fewer programs leave the GPU idle: then keys are divided into
    parts, of LEAST_BLOCKS tiles at least, the last one perhaps of fewer."""
    blocks, wanted = -(-case.kv_len // tile.block_kv), -(-PROGRAMS // programs)
    parts = min(wanted, max(1, blocks // LEAST_BLOCKS))
    return -(-blocks // parts) * tile.block_kv


def _merge_key_parts(
    out: Tensor, terms: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, terms [..., rows, v_dim] and log-sum-exp [..., rows] of all keys. The
    arguments have those of each part of the keys, along one more axis, the first; parts
    are weighted by exp(lse - total). A row that sees no key has lse = -inf and stays
    0."""
    if lse.shape[0] == 1:
        return out[0], terms[0], lse[0]
    whole = lse.logsumexp(dim=0)
    weight = (lse - whole.masked_fill(whole == -math.inf, 0.0)).exp_()[..., None]
    return (out * weight).sum(dim=0), (terms * weight).sum(dim=0), whole


# --- backward -------------------------------------------------------------------------


def _backward(case: AttentionCase, out: Tensor, lse: Tensor, empty: Tensor) -> Results:
    """Returns `dq`, `dk`, `dv`, their term scales, `delta` and `unseen` of one group of
    heads. `out`, `lse` and `empty` are what forward returned for it. Raises Refused where
    Triton cannot build the kernel."""
    at, dO = _Operands.of(case), upstream(case).detach().double()
    pairs, d, d_v = case.q.shape[0] * case.kv_heads, case.q.shape[-1], case.v.shape[-1]
    delta = (dO * out).sum(dim=-1).masked_fill_(empty, 0.0)
    dO, lse = _padded(dO), (lse * LOG2E).masked_fill_(empty, 0.0)
    # |dP| is at most |dO| |V|, and so is delta, an average of dP.
    unit = _scale_to_one(dO.norm(dim=-1).amax() * at.v.norm(dim=-1).amax())
    (q16, of_q), (k16, of_k), (dO16, of_dO) = (
        _scaled_to_one(x) for x in (at.q, at.k, dO)
    )
    k, v, k16 = (x.flatten(0, 1) for x in (at.k, at.v, k16))
    dq, dk, dv = torch.empty_like(at.q), torch.zeros_like(k), torch.zeros_like(v)
    dq_terms, dk_terms, dv_terms = (
        torch.zeros_like(x, dtype=torch.float32) for x in (dq, dk, dv)
    )
    # Not 0 for keys that a row was seen to see, where that is counted.
    seen = torch.zeros(pairs, case.kv_len, dtype=torch.int32, device=k.device)
    for rows in _row_runs(case):
        keys = _visible_keys(case, rows)
        operands = (dO, lse, delta, *at.pointers, unit)
        P, dX, P16, dX16 = _score_gradients(case, at, operands, seen, rows, keys)
        q_i, dO_i, q16_i, dO16_i = (
            x[:, :, rows].reshape(pairs, -1, x.shape[-1]) for x in (at.q, dO, q16, dO16)
        )
        dq[:, :, rows] = torch.bmm(dX, k[:, keys]).view_as(dq[:, :, rows])
        dk[:, keys].baddbmm_(dX.mT, q_i)
        dv[:, keys].baddbmm_(P.mT, dO_i)
        dq_terms[:, :, rows] = _in_fp32(dX16, k16[:, keys]).view_as(dq[:, :, rows])
        dk_terms[:, keys] += _in_fp32(dX16.mT, q16_i)
        dv_terms[:, keys] += _in_fp32(P16.mT, dO16_i)
        # Else the next run's are made beside them, at twice the memory
        del P, dX, P16, dX16
    # Q came scaled, for the scores: this is what remains of the scale in dK = scale dX^T
    # Q.
    scale_left = 1.0 if case.softcap else LN2
    dq_terms = dq_terms.double().div_(unit * of_k).mul_(abs(case.scale))
    dk_terms = dk_terms.double().div_(unit * of_q).mul_(scale_left)
    dv_terms = dv_terms.double().div_(of_dO)
    results = {
        "dq": dq.mul_(case.scale),
        "dq_terms": dq_terms,
        "dk": dk.mul_(scale_left).view_as(at.k),
        "dk_terms": dk_terms.view_as(at.k),
        "dv": dv.view_as(at.v),
        "dv_terms": dv_terms.view_as(at.v),
    }
    results = {name: x[..., : d_v if "dv" in name else d] for name, x in results.items()}
    return {**results, "delta": delta, "unseen": _unseen(case, at, seen)}


def _score_gradients(
    case: AttentionCase,
    at: _Operands,
    operands: Sequence[Tensor],
    seen: Tensor,
    rows: slice,
    keys: slice,
) -> tuple[Tensor, ...]:
    """Returns P and dX in fp64, then P and the terms of dX in bfloat16, of a run of rows
    and the keys that it can see, each [B * kv_heads, group * rows, keys]. `operands`: dO,
    L, delta, the pointers of `at`, and the factor of the terms. Marks in `seen` the keys
    that a row sees, in place, with a mask or positions."""
    from numdev.kernels.reference.fused_triton import score_gradients

    tile, count, width = BACKWARD, rows.stop - rows.start, keys.stop - keys.start
    shape = (2, case.q.shape[0] * case.kv_heads, case.group * count, width)
    results = (*at.q.new_empty(shape), *at.q.new_empty(shape, dtype=torch.bfloat16))
    heads = case.q.shape[0] * case.heads
    of_rows = (rows.start, count, case.q_len)
    of_keys = (keys.start, width, case.kv_len)
    grid = (-(-width // tile.block_kv), -(-count // tile.block_q), heads)
    tensors = (at.q, at.k, at.v, *operands, *results, seen)
    launch(
        score_gradients,
        grid,
        *tensors,
        *(case.heads, case.group, *of_rows, *of_keys, *at.masks),
        D=at.q.shape[-1],
        D_V=at.v.shape[-1],
        BLOCK_Q=tile.block_q,
        BLOCK_KV=tile.block_kv,
        BLOCK_D=BLOCK_D,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **at.flags,
    )
    return results


def _in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Returns the batched product [N, I, K] of bfloat16 matrices `a` [N, I, J] and `b`
    [N, J, K], accumulated and returned in fp32."""
    return (
        torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
    )


def _unseen(case: AttentionCase, at: _Operands, seen: Tensor) -> Tensor:
    """Returns bool [batch, kv_heads, kv_len]: keys that no row sees. With a mask or
    positions it reads the counts in `seen`, else it follows from causality and window."""
    if at.flags["MASKED"] or at.flags["AT"]:
        return (seen == 0).view(case.k.shape[:3])
    low, high = key_limits(case)
    j = torch.arange(case.kv_len, device=case.k.device)
    first = j.new_zeros(()) if high is None else (j - high).clamp_(min=0)
    last = case.q_len - 1 if low is None else (j - low).clamp_(max=case.q_len - 1)
    return (first > last).expand(case.k.shape[:3]).clone()


def _row_runs(case: AttentionCase) -> list[slice]:
    """Returns ranges of query rows that cover the case, in order. The intermediate
    results of a range, 20 bytes a score, fit SCRATCH_BYTES. With causality or a window a
    range has at most a RUNS-th of the rows. But a range has LEAST_ROWS rows at least, and
    a multiple of that; the last one may have fewer."""
    n, per_row = case.q_len, 20 * case.q.shape[0] * case.heads * case.kv_len
    few = -(-n // RUNS) if case.restricts_positions else n
    step = max(LEAST_ROWS, min(few, SCRATCH_BYTES // per_row) // LEAST_ROWS * LEAST_ROWS)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _visible_keys(case: AttentionCase, rows: slice) -> slice:
    """Returns the range of keys that these rows can see by position; one key where they
    see none, since a kernel needs one."""
    keys = key_range(case, rows)
    if keys.stop > keys.start:
        return keys
    first = min(keys.start, case.kv_len - 1)
    return slice(first, first + 1)


# --- Triton's kernels on a GPU --------------------------------------------------------


_NOT_BUILT: dict[Hashable, str] = {}
"""What Triton could not build, and why. To try takes seconds, and it prints pages."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    first: Tensor,
    /,
    *others: object,
    **options: object,
) -> None:
    """Runs a Triton kernel on the device of `first`, with this grid, arguments and
    compile-time options. Raises Refused where Triton or its C compiler cannot build it;
    the reason is remembered for these types and options, and not tried again in this
    process. Other exceptions propagate."""
    arguments = (first, *others)
    kinds = (str(x.dtype) if isinstance(x, Tensor) else type(x) for x in arguments)
    built = (kernel, first.device, *kinds, repr(sorted(options.items())))
    if built in _NOT_BUILT:
        raise Refused(_NOT_BUILT[built])
    try:
        with torch.cuda.device_of(first):
            kernel[grid](*arguments, **options)
    except Exception as error:
        of_triton = type(error).__module__.startswith("triton") or "PassManager" in str(
            error
        )
        # It has a C compiler build what starts its kernels.
        of_compiler = "C compiler" in str(error) or isinstance(error, CalledProcessError)
        if not (of_triton or of_compiler):
            raise
        line = (str(error).strip() or repr(error)).splitlines()[0]
        _NOT_BUILT[built] = f"Triton cannot build it ({line})"
        raise Refused(_NOT_BUILT[built]) from error


# --- what it cannot take --------------------------------------------------------------


def refuse_unfit(case: AttentionCase) -> None:
    """Raises Refused where the fused path cannot take the case: another device than CUDA,
    shapes and formats, no Triton, or numbers out of range. Waits for the device."""
    refuse((not case.q.is_cuda, "the fused one runs on CUDA"))
    refuse((reason := _unfit_reason(case), str(reason)))
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Refused(f"Triton cannot be imported ({error})") from error
    refuse((reason := _out_of_range_reason(case), str(reason)))


def refuse_large_scores(forward: Mapping[str, Tensor]) -> None:
    """Raises Refused where the log-sum-exp of a row that sees a key is beyond LARGEST in
    magnitude, as where an additive mask moves all its scores: L then says nothing of the
    differences between them, and P cannot be computed from it. `forward` has `lse` and
    `empty`."""
    size = forward["lse"].abs().masked_fill(forward["empty"], 0.0).amax().item()
    refuse((size > LARGEST, f"a row's scores are all about {size:.1g}, {TOO_LARGE}"))


def _unfit_reason(case: AttentionCase) -> str | None:
    """Returns why the case's shapes or formats do not suit the fused path; None where
    they do."""
    tensors = [x for x in (*_factors(case), case.mask) if x is not None]
    widest = max(case.q.shape[-1], case.v.shape[-1])
    heads = case.q.shape[0] * case.heads
    masked = 0 if case.mask is None else case.mask.numel()
    float64, most = (
        any(x.dtype == torch.float64 for x in tensors),
        "the fused one takes up to",
    )
    return why_not(
        (float64, "in float64 sums may leave the range the fused one counts on"),
        (
            widest > WIDEST,
            f"the fused one takes operands up to {WIDEST} wide, not {widest}",
        ),
        (
            heads > MOST_HEADS,
            f"{most} {MOST_HEADS} heads of all batch entries, not {heads}",
        ),
        (
            8 * masked > MASK_BYTES,
            f"the mask has {masked:.2g} elements, too many for float64",
        ),
    )


def _out_of_range_reason(case: AttentionCase) -> str | None:
    """Returns why the numbers in the inputs do not suit the fused path (NaN or infinity,
    or scores that may exceed LARGEST); None where they do. A -inf in an additive mask
    suits it. Waits for the device."""
    largest = [widened(x).abs().amax().double() for x in _factors(case)]
    if case.mask is not None and _is_additive(case):  # -inf hides; NaN and +inf spoil
        largest.append(widened(case.mask).clamp_min(0.0).amax().double())
    q, k, *others = torch.stack(largest).tolist()
    if not all(map(math.isfinite, (q, k, *others))):
        return "an input is not finite"
    # At least 1 each: nor may Q times scale leave the range where K is nothing.
    size = abs(case.scale) * case.q.shape[-1] * max(q, 1.0) * max(k, 1.0)
    return f"scores may reach {size:.1g}, {TOO_LARGE}" if size > LARGEST else None


def _factors(case: AttentionCase) -> list[Tensor]:
    """Returns those of q, k, v, sinks and grad_out that the case has, in this order."""
    tensors = (case.q, case.k, case.v, case.sinks, case.grad_out)
    return [x for x in tensors if x is not None]


def _is_additive(case: AttentionCase) -> bool:
    """Whether the case has a mask that is added to scores, and not a bool one."""
    return case.mask is not None and case.mask.dtype != torch.bool
