"""The input of an attention kernel: one call, with everything that defines its result.

Shapes, throughout the project: q is [batch, heads, q_len, head_dim], k is [batch,
kv_heads, kv_len, head_dim], v is [batch, kv_heads, kv_len, v_dim]. With grouped-query
attention query head h reads kv head h // (heads // kv_heads). A case may have some of a
call's query rows alone (`restrict`): a row of attention depends on its own query and on
no other."""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from numdev.argument_checks import expect_fields
from numdev.errors import UsageError
from numdev.formats import Format, dtype_of, format_of, round_to

Window = tuple[int | None, int | None]
EMPTY_BLOCK = 1024
FAR = (1 << 30) - 1
"""Larger than any distance between positions, and safe to add to one in int32."""
Phase = Literal["prefill", "decode"]
Attends = Literal["self", "cross", "joint"]
Places = slice | Tensor  # rows or keys of a case: a range, or int64 indices


@dataclass(frozen=True, kw_only=True)
class CaseRef:
    """The name of a case and where it comes from: enough to open it again, without
    torch."""

    case: str  # unique within one audit
    source: str = ""  # the checkpoint, configuration or file it came from
    module: str = ""  # that made the call, for example `model.layers.3.self_attn`
    layer: int | None = None
    call: int = 0  # counts the calls of one module within one run of the model
    seed: int | None = None
    # Of a generation: its first pass, or a later one, a token each
    phase: Phase | None = None
    step: int | None = None  # of a diffusion pipeline: the denoising step, from 0
    # Of a diffusion pipeline: to the image itself, to the text alone, or to both as one.
    attends: Attends | None = None


class CaseChanges(TypedDict, total=False):
    """Fields of an AttentionCase by name, for `dataclasses.replace`: those in which one
    call differs from another."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None
    is_causal: bool
    causal_offset: int
    window: Window | None
    softcap: float | None
    sinks: Tensor | None
    grad_out: Tensor | None
    positions: Tensor | None


# The axes of a case's tensors; a mask may have the last ones alone, and broadcast along
# them.
AXES = {
    "q": ("batch", "head", "row", "feature"),
    "k": ("batch", "kv_head", "key", "feature"),
    "v": ("batch", "kv_head", "key", "feature"),
    "grad_out": ("batch", "head", "row", "feature"),
    "mask": ("batch", "head", "row", "key"),
    "sinks": ("head",),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCase:
    """One attention call. Raises UsageError for parts of wrong types, those of `ref` too,
    for shapes, dtypes or devices that do not fit together, and for a size of 0. The
    tensors' values are not checked: NaN and infinity may be among them."""

    ref: CaseRef
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    # bool (True: may attend) or additive in q's format; broadcasts to [B, H, q_len,
    # kv_len].
    mask: Tensor | None = None
    is_causal: bool = False
    # Query i sees keys j <= i + causal_offset. 0 aligns top-left as PyTorch does, kv_len
    # - q_len bottom-right as flash-attention does.
    causal_offset: int = 0
    # (left, right): query i sees keys i + causal_offset - left <= j <= i + causal_offset
    # + right; None on a side means no limit there.
    window: Window | None = None
    # Scores become softcap * tanh(scores / softcap), after scaling and before masking.
    softcap: float | None = None
    # [heads]: one extra logit per head that takes probability and contributes no value.
    # Its lse includes the sink.
    sinks: Tensor | None = None
    grad_out: Tensor | None = None
    grad_out_from: str | None = None  # in words; None where nobody said
    # The format of the tensors' values where torch has no dtype for it: they are then
    # stored in a wider dtype. None: the format is that of the dtype.
    working: Format | None = None
    # int64 [q_len], ascending: where in the call each query stands. None: query i at
    # position i, as in every whole call.
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        expect_fields(self)
        expect_fields(self.ref)
        problem = next(_problems(self), None)
        if problem:
            raise UsageError(f"attention case {self.ref.case!r}: {problem}")

    @property
    def heads(self) -> int:
        """Returns the number of query heads."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """Returns the number of heads of k and of v."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Returns the number of query heads per kv head; 1 without grouped-query
        attention."""
        return self.heads // self.kv_heads

    @property
    def q_len(self) -> int:
        """Returns the number of queries in this case; of a case with some rows of a call,
        the number of these rows."""
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        """Returns the number of keys."""
        return self.k.shape[2]

    @property
    def format(self) -> Format:
        """Returns the working format: that of the values in q, k and v. Raises UsageError
        for a dtype without a format in the catalogue."""
        return self.working or format_of(self.q.dtype)

    @property
    def restricts_positions(self) -> bool:
        """Whether the case is causal or has a window, even one without limits; the mask
        does not count."""
        return self.is_causal or self.window is not None

    @cached_property
    def places(self) -> list[int] | None:
        """Returns `positions` as a list on the host (one transfer for all tiles); None
        for a whole call."""
        return None if self.positions is None else self.positions.tolist()

    def rounded_to(self, fmt: Format) -> AttentionCase:
        """Returns the same call, without autograd, with q, k, v (and an additive mask,
        sinks, grad_out) rounded once to `fmt`; itself where all of these are stored in it
        already, and none requires a gradient.

        Rounding is correct (`formats.round_to`). Bool masks stay. An additive mask
        saturates: models write "hidden" as the lowest number of the dtype, which becomes
        the lowest of the new dtype and never -inf, which would change fully masked rows.
        A format that torch has no dtype for is kept in float32, or float64 where float32
        cannot hold it, with `working` saying what it is. Strides stay, but of an expanded
        tensor."""
        dtype, working = _storage_dtype(fmt)
        parts = (self.q, self.k, self.v, self.mask, self.sinks, self.grad_out)
        numbers = [x for x in parts if x is not None and x.dtype != torch.bool]
        is_stored = all(x.dtype == dtype and not x.requires_grad for x in numbers)
        if is_stored and self.working == working:
            return self

        def cast(x: Tensor, *, saturate: bool = False) -> Tensor:
            """Returns a tensor rounded to the format, with its strides; a bool one as it
            is. With `saturate` finite values stay finite."""
            if x.dtype == torch.bool:
                return x
            wide = x.double() if dtype == torch.float64 or saturate else x
            if saturate:
                wide = torch.where(x.isinf(), wide, wide.clamp(-fmt.largest, fmt.largest))
            return strided_as(round_to(wide, fmt).to(dtype), x)

        mask = None if self.mask is None else cast(self.mask, saturate=True)
        if self.mask is not None and mask is not None and mask.dtype != torch.bool:
            # What was hidden (`visible`) is the lowest number of the new dtype, which for
            # a format that is stored in a wider one is another than the format's.
            hidden = self.mask == torch.finfo(self.mask.dtype).min
            mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        return dataclasses.replace(
            self,
            q=cast(self.q),
            k=cast(self.k),
            v=cast(self.v),
            mask=mask,
            sinks=None if self.sinks is None else cast(self.sinks),
            grad_out=None if self.grad_out is None else cast(self.grad_out),
            working=working,
        )

    def restrict(
        self,
        *,
        batch: Places | list[int] | None = None,
        heads: slice | list[int] | None = None,
        kv_heads: list[int] | None = None,
        rows: Tensor | None = None,
    ) -> AttentionCase:
        """Returns the same call restricted along some axes, by indices or slices; None:
        an axis stays as it is.

        With `kv_heads` all query heads that read them stay, and `heads` is ignored. With
        a list of query `heads` each gets a kv head of its own, a copy of the one it
        reads. With a slice of query heads all kv heads stay, and head h reads kv head h
        // (heads left / kv heads): the caller chooses slices for which that is right.
        `rows`: int64 indices of the case's rows, from 0, ascending. Each row sees what it
        saw before: dq is that of these rows, dk and dv are sums over them alone. Raises
        UsageError for other rows, where nothing stays of an axis, and for query heads
        that are no multiple of the kv heads; IndexError for an index that does not
        exist."""
        if rows is not None:
            are_indices = rows.ndim == 1 and rows.dtype == torch.int64
            before = torch.tensor([-1], device=rows.device)
            if not are_indices or not bool((rows.diff(prepend=before) > 0).all()):
                raise UsageError(
                    f"attention case {self.ref.case!r}: rows: expected ascending int64 "
                    f"indices from 0, got {reprlib.repr(rows.tolist())}"
                )
            rows = rows.to(self.q.device)
        if kv_heads is not None:
            heads = [kv * self.group + i for kv in kv_heads for i in range(self.group)]
        elif isinstance(heads, list):
            kv_heads = [h // self.group for h in heads]
        chosen = {"batch": batch, "head": heads, "kv_head": kv_heads, "row": rows}
        parts: dict[str, Any] = {}
        for name, axes in AXES.items():
            x = getattr(self, name)
            for dim, axis in enumerate(() if x is None else axes[-x.ndim :]):
                broadcasts = name == "mask" and x.shape[dim] == 1
                if (places := chosen.get(axis)) is not None and not broadcasts:
                    x = x[(slice(None),) * dim + (places,)]
            parts[name] = x
        at = self.positions
        if rows is not None:
            at = rows if at is None else at[rows]
        return dataclasses.replace(self, **parts, positions=at)

    def detached(self, device: str | None = None) -> AttentionCase:
        """Returns the same call without autograd, its tensors on `device`; None: where
        they are. (A model's sinks are parameters.)"""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        tensors: Any = {
            n: x.detach().to(device) for n, x in values if isinstance(x, Tensor)
        }
        return dataclasses.replace(self, **tensors)


def expect_values(case: AttentionCase, named: str) -> None:
    """Raises UsageError for a case of tensors without values, on the device meta.
    `named`: the case in the message."""
    if case.q.is_meta:
        raise UsageError(f"{named}: expected tensors with values, got {case.q.device}")


def _storage_dtype(fmt: Format) -> tuple[torch.dtype, Format | None]:
    """Returns the dtype in which values of `fmt` are stored, and None; where torch has no
    dtype of `fmt`, the narrowest of float32 and float64 that has all its values, and
    `fmt`."""
    try:
        return dtype_of(fmt), None
    except UsageError:
        narrow = format_of(torch.float32).contains(fmt)
        return torch.float32 if narrow else torch.float64, fmt


def key_limits(case: AttentionCase) -> tuple[int | None, int | None]:
    """Returns (low, high): by causality, offset and window the query at position i sees
    keys i + low to i + high. None on a side without a limit. A limit is cut to -FAR to
    FAR, where it hides all keys or none."""
    left, right = case.window or (None, None)
    ends = [0] * case.is_causal + ([] if right is None else [right])
    low = None if left is None else case.causal_offset - left
    high = case.causal_offset + min(ends) if ends else None
    low, high = (None if x is None else max(-FAR, min(x, FAR)) for x in (low, high))
    return low, high


def key_range(case: AttentionCase, rows: slice) -> slice:
    """Returns the range of keys outside of which none of the query rows [start, stop)
    sees a key by causality and window; it may be empty. Where the case lacks rows between
    these, it may hold keys that none of them sees. `rows`: at least one."""
    return keys_from(case, position_span(case, rows))


def keys_from(case: AttentionCase, positions: slice) -> slice:
    """Returns the range of keys outside of which no query at positions [start, stop) of
    the call sees a key by causality and window; it may be empty."""
    low, high = key_limits(case)
    first = 0 if low is None else min(max(positions.start + low, 0), case.kv_len)
    last = case.kv_len if high is None else min(positions.stop + high, case.kv_len)
    return slice(first, max(first, last))


def position_span(case: AttentionCase, rows: slice) -> slice:
    """Returns the range from the position of the first of these rows to one behind that
    of the last. `rows`: a slice with both ends, of at least one row."""
    if case.places is None:
        return rows
    return slice(case.places[rows.start], case.places[rows.stop - 1] + 1)


def visible(case: AttentionCase, rows: Places, keys: Places) -> Tensor | None:
    """Returns which keys each row may attend to, by causality, window and mask together:
    a bool tensor that broadcasts to [batch, heads, rows, keys]; None where the case has
    no causality, window or mask.

    Rows and keys are ranges with both ends, or int64 indices in any order. In an additive
    mask the lowest number of its dtype means hidden: models write it so, and a row of
    nothing else is a fully masked row, whose value is a convention. A -inf counts as
    visible: added to a score, it hides by itself."""
    shown = _visible_by_position(case, rows, keys)
    if case.mask is None:
        return shown
    mask = mask_block(case.mask, rows, keys)
    open_ = mask if mask.dtype == torch.bool else mask != torch.finfo(mask.dtype).min
    return open_ if shown is None else shown & open_


def empty_rows(case: AttentionCase) -> Tensor:
    """Returns bool [batch, heads, q_len]: whether a row sees no key, so that a convention
    decides its value. Keys are hidden by position, by a bool mask, and by -inf, NaN or
    the lowest number of its dtype in an additive mask. Sinks are no keys."""
    b, h, n = case.q.shape[:3]
    empty = torch.zeros(b, h, n, dtype=torch.bool, device=case.q.device)
    if case.mask is None and not case.restricts_positions:
        return empty
    for first in range(0, n, EMPTY_BLOCK):
        rows, keys = slice(first, min(first + EMPTY_BLOCK, n)), slice(0, case.kv_len)
        shown, added = visible(case, rows, keys), additive(case, rows, keys)
        if added is not None:
            above = added > -math.inf
            shown = above if shown is None else shown & above
        if shown is not None:
            empty[:, :, rows] = ~shown.any(dim=-1)
    return empty


def additive(case: AttentionCase, rows: Places, keys: Places) -> Tensor | None:
    """Returns the block of the additive mask for these rows and keys, which broadcasts to
    [batch, heads, rows, keys]; None where the case has no mask or a bool one."""
    if case.mask is None or case.mask.dtype == torch.bool:
        return None
    return mask_block(case.mask, rows, keys)


def explicit_mask(case: AttentionCase) -> Tensor | None:
    """Returns causality, window and mask as one mask, which broadcasts to [batch, heads,
    q_len, kv_len], for kernels that take a mask alone. It is bool (True: may attend)
    without an additive mask, else the additive mask with -inf where position hides a key.
    None where the case has no causality, window or mask."""
    rows, keys = slice(0, case.q_len), slice(0, case.kv_len)
    added = additive(case, rows, keys)
    if added is None:
        return visible(case, rows, keys)
    shown = _visible_by_position(case, rows, keys)
    return added if shown is None else added.masked_fill(~shown, -math.inf)


def _visible_by_position(
    case: AttentionCase, rows: Places, keys: Places
) -> Tensor | None:
    """Returns bool [rows, keys]: whether causality, offset and window let a row see a
    key; None without causality and window."""
    if not case.restricts_positions:
        return None
    device = case.q.device
    i, j = (
        x if isinstance(x, Tensor) else torch.arange(x.start, x.stop, device=device)
        for x in (rows if case.positions is None else case.positions[rows], keys)
    )
    i, j, (low, high) = i[:, None], j[None, :], key_limits(case)
    shown = torch.ones(i.shape[0], j.shape[1], dtype=torch.bool, device=device)
    if low is not None:
        shown &= j >= i + low
    if high is not None:
        shown &= j <= i + high
    return shown


def mask_kind(mask: Tensor | None) -> Literal["none", "bool", "additive"]:
    """Returns the kind of a mask, as files and reports name it: `none` for None, `bool`,
    or `additive`."""
    return "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"


def mask_block(mask: Tensor, rows: Places, keys: Places) -> Tensor:
    """Returns the block of a mask for these rows and keys. An axis of length 1, which
    broadcasts, stays as it is."""
    if mask.ndim >= 2 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.shape[-1] > 1 else mask


def laid_out(
    layout: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, each [batch, heads, length, dim], with the same values in
    another memory layout.

    `contiguous`: the tensors as they are. `transposed`, and any other name: as
    `transposed`, [batch, length, heads, dim] in memory. `packed`: slices of one new
    tensor [batch, length, heads + 2 kv_heads, dim], as one projection makes them.
    `strided`: every second number of the last dimension of new tensors. Raises
    RuntimeError for `packed` where lengths or dims differ."""
    if layout == "contiguous":
        return q, k, v
    if layout == "strided":
        q, k, v = (torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v))
        return q, k, v
    if layout == "packed":
        packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2).transpose(1, 2)
        q, k, v = packed.split([x.shape[1] for x in (q, k, v)], dim=1)
        return q, k, v
    return transposed(q), transposed(k), transposed(v)


def transposed(x: Tensor) -> Tensor:
    """Returns x [batch, heads, length, dim] with the same shape and values, [batch,
    length, heads, dim] in memory: a copy, or a view of `x` where its memory is so
    already."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def strided_as(x: Tensor, like: Tensor) -> Tensor:
    """Returns `x` with the strides of `like`, which has the same shape: a copy, or `x`
    itself where it has these strides already.

    PyTorch alone keeps the order of the axes, but closes the gaps of a slice (q, k, v in
    one packed tensor). Where elements of `like` may share memory (an expanded mask), `x`
    is returned as it is."""
    if x.stride() == like.stride() or may_overlap(like.shape, like.stride()):
        return x
    empty = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device)
    return empty.copy_(x)


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor of this shape and these strides may share memory,
    as those of an expanded axis (stride 0) do. Axes of one place do not count."""
    # Of the axes of smaller strides: what meets the next stride may overlap with it
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _problems(case: AttentionCase) -> Iterator[str]:
    """Yields clauses on what is wrong with a case's parts. Only the first counts: the
    checks behind it may then be wrong themselves, or raise."""
    q, k, v, at = case.q, case.k, case.v, case.positions
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            yield (
                f"{name}: expected [batch, heads, length, head_dim], got {list(x.shape)}"
            )
    for name in ("q", "k", "v", "mask", "sinks", "grad_out", "positions"):
        part: Tensor | None = getattr(case, name)
        if part is not None and (
            part.layout is not torch.strided or part.device != q.device
        ):
            got = f"{part.layout} on {part.device}"
            yield f"{name}: expected a dense tensor on {q.device}, as q is, got {got}"
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        yield (
            f"q, k, v: expected one floating-point dtype, got {q.dtype}, "
            f"{k.dtype}, {v.dtype}"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        yield (
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not "
            "fit together"
        )
    if q.shape[3] != k.shape[3]:
        yield f"q and k differ in head_dim: {q.shape[3]} and {k.shape[3]}"
    if q.shape[1] % k.shape[1]:
        yield f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} kv heads"
    if any(
        n is not None and abs(n) > 1 << 60
        for n in (case.causal_offset, *(case.window or ()))
    ):
        yield f"causal_offset {case.causal_offset} or window {case.window} is beyond 2^60"
    if not math.isfinite(case.scale):
        yield f"scale: expected a finite number, got {case.scale}"
    if case.softcap is not None and not (
        math.isfinite(case.softcap) and case.softcap > 0
    ):
        yield f"softcap: expected a positive number, got {case.softcap}"
    if case.sinks is not None and case.sinks.shape != (q.shape[1],):
        yield (
            f"sinks: expected [{q.shape[1]}], one per head, got {list(case.sinks.shape)}"
        )
    if case.grad_out is not None and case.grad_out.shape != (*q.shape[:3], v.shape[3]):
        yield f"grad_out: expected the output's shape, got {list(case.grad_out.shape)}"
    if at is not None and (at.shape != (q.shape[2],) or at.dtype != torch.int64):
        yield f"positions: expected int64 [{q.shape[2]}], got {at.dtype} {list(at.shape)}"
    if case.mask is not None:
        yield from _mask_problems(case, case.mask)


def _mask_problems(case: AttentionCase, mask: Tensor) -> Iterator[str]:
    """Yields clauses on what is wrong with a mask: its shape, then its dtype. Nothing for
    a mask of bool or floating-point numbers, of 1 to 4 axes, that broadcasts to [B, H,
    q_len, kv_len]."""
    full = (*case.q.shape[:3], case.kv_len)
    padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = all(m in (1, f) for m, f in zip(padded, full, strict=False))
    if not (1 <= mask.ndim <= 4 and fits):
        yield (
            f"mask has shape {list(mask.shape)}, which does not broadcast to {list(full)}"
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        yield f"mask: expected bool or an additive floating-point mask, got {mask.dtype}"
