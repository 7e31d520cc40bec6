"""Attention divided over shards of the keys, as ring attention and flash-decoding divide
it.

Each shard is computed by another kernel (`inner`), and the partial results (O,
log-sum-exp) are merged, all in one process; the same over several GPUs is
`numdev.kernels.context_parallel`.

Merging. A part s of the keys gives O_s, the output of a softmax over its keys alone, and
L_s, the log-sum-exp of their scores. Together they are the output over all keys:

    L = log sum_s exp(L_s),    O = sum_s exp(L_s - L) O_s.

Flash-decoding merges all parts at once; ring attention (arXiv 2310.01889) merges each as
it comes, by a formula of two states (in ring-flash-attention, and from there in PyTorch's
context parallelism), with sigma the logistic function:

    O <- O - sigma(L_s - L) (O - O_s),    L <- L - log sigma(L - L_s).

A part that hides every key of a row has L_s = -inf, whatever its O_s, and adds nothing; a
row without any key has O = 0 and L = -inf. NaN propagates.

Who meets which keys is the `order` (docs/kernels.md). A step that no query can see by
position is left out.

Backward is ring attention's: from the merged O as it is returned, and the merged
log-sum-exp, so with P = exp(S - L) and delta of the whole row, shards' gradients are
added up, in the format of the merge."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from numdev.cases import AttentionCase, empty_rows, key_range, mask_block
from numdev.errors import MeasurementError, UsageError
from numdev.formats import Format, dtype_of, format_named, format_of, round_to
from numdev.kernels import Output, find, kernel
from numdev.kernels.emulation import backward as emulation
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.emulation.rounding import rounding
from numdev.kernels.output import refuse, upstream
from numdev.kernels.sdpa import claim_of, mask_arguments
from numdev.system import System

VALUES: Mapping[str, Sequence[str]] = {
    "inner": ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "emulated"),
    "order": ("ring", "zigzag", "sequential", "tree", "simultaneous"),
    "merge_format": ("float32", "float64", "bfloat16", "float16", "working", "promoted"),
    "partial_format": ("working", "float32"),
}
"""Options beside `shards`, their defaults first."""
Slices = tuple[slice, ...]  # ranges of one axis, ascending
Step = tuple[Slices, Slices]  # some rows meeting the keys of one shard, or of half of it
State = tuple[Tensor, Tensor]  # O [B, H, rows, v_dim] and L [B, H, rows]
Gradients = tuple[Tensor, Tensor, Tensor]


# --- merging --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How partial results, each the output of a softmax over some of the keys, become
    one."""

    order: str
    """`simultaneous`: all at once; `tree`: neighbours, then their results, and so on; any
    other: one after the other, in the order in which they are given."""
    format: str
    """What a running result is stored in between two merges: a format, or `working`. A
    merge is computed in fp32, in fp64 for `float64` and where the working format asks for
    it. `promoted`: as torch promotes: the first difference O - O_s, in the working
    format, alone is rounded."""
    working: Format

    @property
    def arithmetic(self) -> torch.dtype:
        """Returns the dtype that merges are computed in: float64 for the merge format
        float64 and for a working format that float32 does not contain, else float32."""
        wide = self.format == "float64" or not format_of(torch.float32).contains(
            self.working
        )
        return torch.float64 if wide else torch.float32

    @property
    def between(self) -> Format | None:
        """Returns the format that a running result is rounded to between two merges: of
        `working` and `promoted` the working format, else the one that `format` names.
        None where it holds all that the arithmetic's dtype does, so that nothing is
        rounded. Raises UsageError for an unknown name."""
        is_working = self.format in ("working", "promoted")
        fmt = self.working if is_working else format_named(self.format)
        return None if fmt.contains(format_of(self.arithmetic)) else fmt


def merge_parts(parts: Sequence[State], how: Merge) -> State:
    """Returns one State (O, L) for one or more parts, merged as `how` says. O [B, H,
    rows, v_dim] and L [B, H, rows] are in the dtype of its arithmetic; with `promoted`
    (but not with the order `simultaneous`) O is as torch promotes. A single part is
    converted to that dtype, and not rounded further. A part adds nothing to rows where
    its L is -inf, whatever its O has."""
    keep = how.format == "promoted" and how.order != "simultaneous"
    states = []
    for O, L in parts:
        O = O.masked_fill(torch.isneginf(L)[..., None], 0.0)
        states.append((O if keep else O.to(how.arithmetic), L.to(how.arithmetic)))
    if len(states) == 1:
        return states[0]
    step = rounding(how.between, how.arithmetic, "nearest", None)
    store = step if step is not None and how.format != "promoted" else (lambda x: x)
    if how.order == "simultaneous":
        L_s = torch.stack([L for _, L in states])
        L = L_s.logsumexp(dim=0)
        weights = (L_s - L.clamp(min=torch.finfo(L.dtype).min)).exp()
        O = torch.zeros_like(states[0][0])
        for weight, (O_s, _) in zip(weights, states, strict=True):
            O = O + weight[..., None] * O_s
        return store(O), L
    if how.order == "tree":
        states = [(store(O), L) for O, L in states]
        while len(states) > 1:
            pairs = zip(states[::2], states[1::2], strict=False)
            left_over = states[len(states) - len(states) % 2 :]
            states = [*(_merge_pair(store, a, b) for a, b in pairs), *left_over]
        return states[0]
    first = (store(states[0][0]), states[0][1])
    return functools.reduce(functools.partial(_merge_pair, store), states[1:], first)


def _merge_pair(store: Callable[[Tensor], Tensor], a: State, b: State) -> State:
    """Returns the State (O, L) of the two parts a and b, merged by the logistic form of
    the merge; `store` rounds the new O. Where the L of one part is -inf, its O must be 0,
    and the result is the other part's."""
    (O, L), (O_b, L_b) = a, b
    nothing = torch.isneginf(L_b)
    weight = torch.sigmoid(L_b - L)[..., None]
    merged_O = torch.where(nothing[..., None], O, O - weight * (O - O_b))
    merged_L = torch.where(torch.isneginf(L), L_b, L - logsigmoid(L - L_b))
    return store(merged_O), torch.where(nothing, L, merged_L)


# --- who meets which keys -------------------------------------------------------------


def schedule(case: AttentionCase, shards: int, order: str) -> list[Step]:
    """Returns the steps that cover a case, each (rows, keys), in the order in which they
    are merged; steps in which no query sees a key by position are left out. `order`: with
    `ring`, rows are divided as keys are, and part r begins with the keys of shard r; with
    `zigzag` a shard is two chunks, one from each end; with any other name all rows meet
    the shards of keys in turn. Raises Refused where `zigzag` cannot take the case."""
    zigzag, ring = order == "zigzag", order in ("zigzag", "ring")
    if zigzag:
        plain = case.mask is None and case.window is None and case.causal_offset == 0
        fits = case.is_causal and plain and case.q_len == case.kv_len
        refuse(
            (
                not fits,
                "zigzag balances plain causal calls, with as many queries as keys",
            ),
            (
                case.q_len % (2 * shards),
                f"length {case.q_len} is not a multiple of {2 * shards}",
            ),
        )
        at = chunks(case.q_len, 2 * shards)
        keys_of: list[Slices] = [(at[rank], at[-1 - rank]) for rank in range(shards)]
        rows_of = keys_of
    else:
        keys_of = [(x,) for x in chunks(case.kv_len, shards)]
        rows_of = [(x,) for x in chunks(case.q_len, shards if ring else 1)]
    steps: list[Step] = []
    for turn, (rank, rows) in itertools.product(range(len(keys_of)), enumerate(rows_of)):
        keys = keys_of[(rank - turn if ring else turn) % len(keys_of)]
        if zigzag and turn:  # half of the pairs are hidden, and are not computed
            rows, keys = (rows, keys[:1]) if turn <= rank else (rows[1:], keys)
        seen = key_range(case, rows[-1])
        if max(seen.start, keys[0].start) < min(seen.stop, keys[-1].stop):
            steps.append((rows, keys))
    return steps


def chunks(length: int, number: int) -> list[slice]:
    """Returns at most `number` ranges of equal length that cover [0, length), ascending;
    the last may be shorter. Both arguments are at least 1."""
    size = -(-length // number)
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def step_case(case: AttentionCase, step: Step) -> AttentionCase:
    """Returns the case of one step: its rows and its keys, with mask and grad_out cut to
    these. With a mask, rows and keys are one range each. It is causal only where
    causality hides one of these keys. It has no sinks, which are added at the merge."""
    rows, keys = step
    hides = case.is_causal and keys[-1].stop - 1 > rows[0].start + case.causal_offset
    by_position = hides or case.window is not None
    # The same chunks on both sides keep their order, so that causality stays what it was.
    moved = 0 if rows == keys else rows[0].start - keys[0].start
    mask, grad_out = case.mask, case.grad_out
    if mask is not None:
        mask = mask_block(mask, rows[0], keys[0])
    if grad_out is not None:
        grad_out = select_ranges(grad_out, rows)
    return dataclasses.replace(
        case,
        q=select_ranges(case.q, rows),
        k=select_ranges(case.k, keys),
        v=select_ranges(case.v, keys),
        mask=mask,
        is_causal=hides,
        causal_offset=case.causal_offset + moved if by_position else 0,
        sinks=None,
        grad_out=grad_out,
    )


def select_ranges(x: Tensor, ranges: Slices) -> Tensor:
    """Returns the elements of x in these ranges of the third axis: a view for one range,
    a copy for several."""
    parts = [x[:, :, places] for places in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def split_ranges(x: Tensor, ranges: Slices) -> Sequence[Tensor]:
    """Returns x split along the third axis into one view for each range, the reverse of
    `select_ranges`."""
    parts: Sequence[Tensor] = x.split(
        [places.stop - places.start for places in ranges], dim=2
    )
    return parts


# --- the kernel -----------------------------------------------------------------------


def _check(options: Mapping[str, object]) -> None:
    """Raises UsageError for partial results in float32 from a kernel other than
    `emulated`."""
    if options["partial_format"] == "float32" and options["inner"] != "emulated":
        what = f"{options['inner']} hands over its output in the working format"
        raise UsageError(what, hint="leave out partial_format, or take inner: emulated")


def claims(
    case: AttentionCase, output: Output, system: System
) -> Mapping[str, object] | None:
    """Returns how the merged shards round, as options of `emulated`; for a single shard
    (`output.did` has no `shards`) the claim of the operator that ran. None where no
    emulation covers it: a running result that its `merge_format` rounds between two
    merges (`Merge.between`), gradients that it rounds as they are added up, a rounded
    difference (`promoted`), and `zigzag`, whose shards are two chunks each.

    A recipe has splits of the keys, merged in full precision: each split's O is rounded
    at `merge` as it is handed over, its dQ at `dq_partial`; where queries are divided too
    (`q_splits`), each part's dK and dV at `dk_partial` and `dv_partial`. Within a shard
    it is the inner kernel's claim."""
    did = output.did or {}
    if "shards" not in did:  # a single shard: the inner kernel itself
        return claim_of(did.get("operator", ""), case, system)
    shards, order, partial = did["shards"], did["order"], did["partial_format"]
    merge = Merge(order=order, format=did["merge_format"], working=case.format)
    one_merge = shards == 2 or order == "simultaneous"
    matters = output.dq is not None or not one_merge or merge.format == "promoted"
    if order == "zigzag" or (merge.between is not None and matters):
        return None
    first = step_case(case, schedule(case, shards, order)[0])
    claim = dict(claim_of(did["each"].get("operator", ""), first, system))
    # Splits that are the shards. Where a shard is no whole number of the inner kernel's
    # tiles it is one tile: P is then rounded relative to another maximum, which its size
    # hardly shows.
    fields = {"block_kv": claim["block_kv"]} if "block_kv" in claim else {}
    width = chunks(case.kv_len, shards)[0].stop
    _, tile = recipe(claim.get("preset", "fa2"), **fields).tile(
        case.q.shape[-1], case.kv_len
    )
    claim |= {"splits": shards, "block_kv": width if width % tile else tile}
    claim |= {"merge": partial, "dq_partial": partial}
    if order == "ring":
        claim |= {"q_splits": shards, "dk_partial": partial, "dv_partial": partial}
    return claim


def describe_shards(did: Mapping[str, object], each: str) -> str:
    """Returns in words how shards were computed and merged: `2 shards, ring, merged in
    float32, handed over in working, each by OPERATOR`. `did` has `shards`, `order`,
    `merge_format` and `partial_format`; `each` is the operator of one shard."""
    return (
        f"{did['shards']} shards, {did['order']}, merged in {did['merge_format']}, "
        "handed over in "
        f"{did['partial_format']}, each by {each}"
    )


@kernel(
    "sharded",
    options={"shards": 2, **{name: values[0] for name, values in VALUES.items()}},
    values={"shards": 1, **VALUES},
    validate=_check,
    claims=claims,
    backward=lambda case, **options: _run_shards(case, options, with_gradients=True),
)
def sharded(case: AttentionCase, **options: object) -> Output:
    """Attention over shards of the keys, merged as ring attention and flash-decoding
    merge.

    Options: `shards`, and VALUES. One shard is the inner kernel's call. Returns out and
    lse of the whole call, and in `did` the options and, as `each`, the inner kernel's
    `did`. Raises Refused where the order or the inner kernel cannot take the case,
    MeasurementError where the inner kernel returns no log-sum-exp."""
    return _run_shards(case, options, with_gradients=False)


def _run_shards(
    case: AttentionCase, options: Mapping[str, Any], *, with_gradients: bool
) -> Output:
    """Returns the output of the sharded call, with dq, dk and dv where `with_gradients`;
    the case has a grad_out then. `options` are all of the kernel's. Raises Refused where
    the order or the inner kernel cannot take the case, MeasurementError where the inner
    kernel returns no log-sum-exp. One shard is the inner kernel's own call."""
    inner, shards, order = options["inner"], options["shards"], options["order"]
    if shards == 1:
        return (find(inner).gradients if with_gradients else find(inner).attend)(case)
    wide = inner == "emulated" and options["partial_format"] == "float32"
    casts = dict.fromkeys(("out", *emulation.CASTS), "float32") if wide else {}
    how = Merge(order=order, format=options["merge_format"], working=case.format)
    steps = schedule(case, shards, order)
    (O, L), last = _forward_shards(case, steps, how, inner, casts)
    did = {**{n: x for n, x in options.items() if n != "inner"}, "each": last.did or {}}
    done = Output(
        out=_cast_to_working(O, case),
        lse=L,
        ran=describe_shards(did, last.ran or inner),
        did=did,
    )
    if not with_gradients:
        return done
    dtype = how.arithmetic if how.between is None else dtype_of(how.between)
    sums = [torch.zeros_like(x, dtype=dtype) for x in (case.q, case.k, case.v)]
    for rows, keys in steps:
        shard = step_case(case, (rows, keys))
        partial = _backward_shard(
            inner, shard, select_ranges(done.out, rows), select_ranges(L, rows), casts
        )
        for total, x, places in zip(sums, partial, (rows, keys, keys), strict=True):
            for at, y in zip(places, split_ranges(x, places), strict=True):
                total[:, :, at] += y
    dq, dk, dv = (_cast_to_working(x, case) for x in sums)
    return dataclasses.replace(done, dq=dq, dk=dk, dv=dv, ran_backward=done.ran)


def _forward_shards(
    case: AttentionCase,
    steps: Sequence[Step],
    how: Merge,
    inner: str,
    casts: Mapping[str, str],
) -> tuple[State, Output]:
    """Returns the State (O, L) of all rows in the merge's arithmetic, and the inner
    kernel's last output, which has evidence of what ran; without `steps` an Output with q
    in place of one. `casts`: options of the inner kernel. Raises MeasurementError where
    it returns no log-sum-exp."""
    last, states = Output(out=case.q), defaultdict(list)
    for rows, keys in steps:
        shard = step_case(case, (rows, keys))
        last = find(inner).attend(shard, **casts)
        if last.lse is None:
            raise MeasurementError(f"{inner} gave no log-sum-exp, which a merge needs")
        # PyTorch's CPU kernel has a log-sum-exp of 0 for such a row
        empty = empty_rows(shard)
        O_s = last.out.masked_fill(empty[..., None], 0.0)
        L_s = last.lse.masked_fill(empty, -math.inf)
        # Chunks of one rank are merged apart: one of them may meet fewer shards.
        for at, O_at, L_at in zip(
            rows, split_ranges(O_s, rows), split_ranges(L_s, rows), strict=True
        ):
            states[at.start, at.stop].append((O_at, L_at))
    shape = (*case.q.shape[:3], case.v.shape[-1])
    O = case.q.new_zeros(shape, dtype=how.arithmetic)
    L = O.new_full(shape[:3], -math.inf)
    if case.sinks is not None:  # a key without a value, met before all others
        L = case.sinks.to(L.dtype)[None, :, None].expand(shape[:3]).clone()
    for (start, stop), parts in states.items():
        sink = [] if case.sinks is None else [(O[:, :, start:stop], L[:, :, start:stop])]
        O[:, :, start:stop], L[:, :, start:stop] = merge_parts([*sink, *parts], how)
    return (O, L), last


def _cast_to_working(x: Tensor, case: AttentionCase) -> Tensor:
    """Returns x rounded once to the case's working format, in the dtype of its q."""
    return (x if x.dtype == torch.float32 else round_to(x, case.format)).to(case.q.dtype)


# --- the backward pass of one shard ---------------------------------------------------


def _backward_shard(
    inner: str, case: AttentionCase, O: Tensor, L: Tensor, casts: Mapping[str, str]
) -> Gradients:
    """Returns the parts of dq, dk and dv that come through the keys of one shard
    (`case`), from the O and L of all keys for the case's rows. `casts`: for `emulated`,
    formats of its sites; other kernels ignore them. `case` has a grad_out. Raises Refused
    where the inner kernel has no such backward pass."""
    # What has no key anywhere has scores of -inf: any finite L then gives P = 0, and not
    # NaN.
    L = L.masked_fill(torch.isneginf(L), 0.0)
    if inner == "emulated":
        r = emulation.rounder(case, recipe("fa2", sites=casts))
        sites = zip(emulation.CASTS, emulation.from_forward(r, O, L), strict=True)
        dq, dk, dv = (r.stored(site, x, case.q.dtype) for site, x in sites)
        return dq, dk, dv
    aten, (mask, by_flag), on_cuda = torch.ops.aten, mask_arguments(case), case.q.is_cuda
    tensors = (upstream(case), case.q, case.k, case.v)
    L = L.to(torch.promote_types(case.q.dtype, torch.float32))
    if inner == "sdpa-flash" and not on_cuda:
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=case.q.dtype).masked_fill_(
                ~mask, -math.inf
            )
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, O, L, 0.0, by_flag, attn_mask=mask, scale=case.scale
        )
        return dq, dk, dv
    # It is given other head dimensions padded.
    odd = case.q.shape[-1] % 8 or case.v.shape[-1] != case.q.shape[-1]
    refuse(
        (inner != "sdpa-flash", f"{inner} has no backward over shards"),
        (mask is not None, "backward over shards takes no mask on CUDA"),
        (odd, "backward over shards takes head dimensions divisible by 8"),
    )
    # Of a dropout that is off
    seed = torch.zeros(2, dtype=torch.uint64, device=case.q.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        *tensors,
        O,
        L.contiguous(),
        None,
        None,
        case.q_len,
        case.kv_len,
        0.0,
        by_flag,
        seed,
        seed[0],
        scale=case.scale,
    )
    return dq, dk, dv
