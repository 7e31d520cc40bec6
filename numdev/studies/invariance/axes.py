"""The axes along which a call can change while the exact answer of some rows stays, as
data.

An axis gives variants of a case: one or more calls, and which of their rows are compared
with which rows of the base. The base is the case itself or, where that has too little
around it (one sequence has no order), a larger call of the variant's own. The study
checks in fp64 that the rows' answer is the same. What is added around a sequence (other
sequences, tokens) is the case's own, rolled along its length with alternating sign:
numbers of the same size, the same on every machine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from numdev.cases import AttentionCase, CaseChanges, explicit_mask, key_limits
from numdev.studies.audit.isolation import Within
from numdev.studies.audit.prepared_attention import part, settled
from numdev.studies.invariance import call_layouts

SIZES = (1, 2, 8, 64)  # sequences in a batch
LARGEST = 1 << 33  # scores of a call that is larger than the case, on a GPU
LARGEST_CPU = 1 << 24
PLAIN: Within = contextlib.nullcontext  # the call laid out and run as it is
AROUND = 4  # sequences of a batch whose order or neighbours change
PAD = 37  # tokens: no multiple of a tile
EXTEND = 16  # tokens that are added to a cache at once
LARGE = 4.0  # a neighbour's values times this are exact in every format


class Part(NamedTuple):
    """The place of rows in a call, as indices of its axes. With `key` None dk and dv are
    not compared: they are sums over other queries."""

    batch: slice = slice(None)
    head: slice = slice(None)
    kv_head: slice = slice(None)
    row: slice = slice(None)
    key: slice | None = slice(None)

    def select(self, tensor: str, x: Tensor | None) -> Tensor | None:
        """Returns the part of a tensor `x` named `tensor` (`out`, `lse`, `dq`, `dk` or
        `dv`), a view. None for None; None also for dk and dv where `key` is None."""
        at = (self.kv_head, self.key) if tensor in ("dk", "dv") else (self.head, self.row)
        return None if x is None or at[1] is None else x[self.batch, *at]

    def select_query_rows(self, x: Tensor) -> Tensor:
        """Returns the part of `x` [batch, heads, q_len, ...], such as `out`: a view."""
        return x[self.batch, self.head, self.row]


WHOLE = Part()


class VariantCall(NamedTuple):
    """One call of a variant, with the place of the compared rows in it and in the
    base."""

    case: AttentionCase
    in_call: Part = WHOLE  # the place of the compared rows in this call
    in_base: Part = WHOLE  # and in the base
    first_key: int = 0  # the first of the base's keys that this call has

    @property
    def moves_keys(self) -> bool:
        """Whether the same keys begin at another index in this call than in the base."""
        keys, keys_of_base = self.in_call.key, self.in_base.key
        start = keys.start or 0 if keys else 0
        start_in_base = keys_of_base.start or 0 if keys_of_base else 0
        return self.first_key != 0 or start != start_in_base


class Variant(NamedTuple):
    """One way to compute the base's rows again: calls whose rows are compared with the
    base's. It is not tried where it has a `reason`."""

    name: str
    calls: tuple[VariantCall, ...]
    base: AttentionCase | None = None  # None: the case itself
    within: Within = PLAIN  # how the calls are laid out in memory, and run
    base_within: Within = PLAIN
    options: Mapping[str, object] = MappingProxyType({})  # of the kernel, beside its own
    wrap: Literal["graph", "compiled"] | None = None  # what the kernel is run as
    reason: str = ""  # why it is not tried
    part: str = ""  # what of the case it is about, where that is not all

    def adds_mask(self, case: AttentionCase) -> bool:
        """Whether a call, or the base, has a mask, and the case has none."""
        called = (self.base or case, *(call.case for call in self.calls))
        return case.mask is None and any(c.mask is not None for c in called)


class VariantFields(TypedDict, total=False):
    """Fields of a `Variant` other than its name and calls."""

    base: AttentionCase | None
    within: Within
    base_within: Within
    options: Mapping[str, object]
    wrap: Literal["graph", "compiled"] | None
    reason: str
    part: str


Variants = Iterator[Variant]


def single_call_variant(
    name: str,
    case: AttentionCase,
    in_call: Part = WHOLE,
    in_base: Part = WHOLE,
    **fields: Unpack[VariantFields],
) -> Variant:
    """Returns a variant of one call, whose rows `in_call` are compared with the rows
    `in_base` of the base. `fields`: other fields of the variant."""
    return Variant(name=name, calls=(VariantCall(case, in_call, in_base),), **fields)


def with_memory_order(x: Tensor, like: Tensor) -> Tensor:
    """Returns the values of `x`, dense, with its axes in memory in the order of those of
    `like`, since kernels choose by that order. `like`: a tensor with as many axes; its
    shape does not matter. The result may share memory with `x`."""
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda dim: (-strides[dim], dim))
    back = [order.index(dim) for dim in range(like.ndim)]
    return x.permute(order).contiguous().permute(back)


def select_sequences(case: AttentionCase, sequences: Sequence[int]) -> AttentionCase:
    """Returns the batch of these sequences of the case, numbered from 0, duplicates
    included. A number i of count sequences or more gives a neighbour: q, k, v and
    grad_out of sequence i mod count, each rolled along its length by i // count, and with
    the other sign where i // count is odd. Masks of sequences are selected, not
    rolled."""
    count = case.q.shape[0]

    def one(x: Tensor, index: int) -> Tensor:
        """Returns one sequence of a tensor, [1, ...]."""
        sequence, times = x[index % count : index % count + 1], index // count
        return sequence.roll(times, dims=2) * (-1.0) ** times if times else sequence

    def several(x: Tensor) -> Tensor:
        """Returns the chosen sequences of a tensor, with its order of axes in memory."""
        return with_memory_order(torch.cat([one(x, i) for i in sequences]), x)

    mask = case.mask
    if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
        mask = mask[[i % count for i in sequences]]
    return dataclasses.replace(
        case,
        q=several(case.q),
        k=several(case.k),
        v=several(case.v),
        grad_out=None if case.grad_out is None else several(case.grad_out),
        mask=mask,
    )


def with_more_tokens(
    case: AttentionCase,
    *,
    rows: tuple[int, int] = (0, 0),
    keys: tuple[int, int] = (0, 0),
    hidden: bool = False,
) -> AttentionCase:
    """Returns the case with more query rows and keys, rolled copies of its own with
    alternating sign. `rows`, `keys`: how many before and how many behind. The case's rows
    see the keys that they saw by causality, window and mask. With `hidden` a mask hides
    the new keys from all rows; but it shows each new row before the case's the first key
    of the call, new or not. Without `hidden` rows see a new key too where positions do
    not hide it, and there is no mask or one without an axis of keys. The gradient of the
    output is 0 in new rows."""

    def around(x: Tensor, before: int, behind: int, *, zero: bool = False) -> Tensor:
        """Returns a tensor with new tokens before and behind its own: rolled copies with
        alternating sign, or zeros."""
        times = -(-max(before, behind) // x.shape[2])
        other = [x.roll(i, dims=2) * (-1.0) ** i for i in range(1, times + 1)]
        tokens = torch.cat([x[:, :, :0], *other], dim=2) * float(not zero)
        whole = torch.cat([tokens[:, :, :before], x, tokens[:, :, :behind]], dim=2)
        return with_memory_order(whole, x)

    mask = None if case.mask is None else _grow_mask(case.mask, rows, keys)
    if hidden:
        place = torch.arange(sum(keys) + case.kv_len, device=case.q.device) - keys[0]
        shown = ((place >= 0) & (place < case.kv_len))[None, None, None]
        # One that sees no key would return what is a convention, NaN in some kernels
        if rows[0]:
            shown = shown.repeat(1, 1, sum(rows) + case.q_len, 1)
            shown[:, :, : rows[0], 0] = True
        mask = _combine_masks(mask, shown)
    grad_out = case.grad_out
    shift = keys[0] - rows[0] if case.restricts_positions else 0
    return dataclasses.replace(
        case,
        q=around(case.q, *rows),
        k=around(case.k, *keys),
        v=around(case.v, *keys),
        grad_out=None if grad_out is None else around(grad_out, *rows, zero=True),
        mask=mask,
        causal_offset=case.causal_offset + shift,
    )


def _grow_mask(mask: Tensor, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """Returns a mask, with 4 axes, for more rows and keys; `rows`, `keys`: how many
    before and behind. New rows see every old key; no row sees a new key. An additive mask
    hides by the lowest number of its dtype. An axis of length 1 stays so, and then holds
    for new rows or keys as for old ones."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    bool_ = mask.dtype == torch.bool
    if mask.shape[-1] > 1:
        value = False if bool_ else torch.finfo(mask.dtype).min
        mask = torch.nn.functional.pad(mask, keys, value=value)
    if mask.shape[-2] > 1:
        mask = torch.nn.functional.pad(mask, (0, 0, *rows), value=True if bool_ else 0.0)
    return mask


def _combine_masks(mask: Tensor | None, shown: Tensor) -> Tensor:
    """Returns a mask that hides what `mask` hides and what is not `shown`, a bool tensor.
    It is bool where `mask` is bool or None. Else it is an additive mask, which hides by
    the lowest number of its dtype."""
    if mask is None or mask.dtype == torch.bool:
        return shown if mask is None else mask & shown
    return torch.where(shown, mask, torch.finfo(mask.dtype).min)


def without_positions(case: AttentionCase) -> AttentionCase:
    """Returns the case without causality and window, so that every row sees every key
    that its mask shows."""
    return dataclasses.replace(case, is_causal=False, causal_offset=0, window=None)


def _some_rows(case: AttentionCase) -> list[int]:
    """Returns the indices of up to three rows of n, ascending: the last one, the one that
    begins the tile with row 2 n // 3, and n // 3 + 1, or the next where that begins a
    tile. A tile has 128 rows in a call of more than 256, else 16."""
    n, tile = case.q_len, 128 if case.q_len > 256 else 16
    amid = n // 3 + 1
    amid += amid % tile == 0
    return sorted({n - 1, 2 * n // 3 // tile * tile, amid} & set(range(n)))


def _rows_alone(
    case: AttentionCase, first: int, last: int, keys: range | None = None
) -> VariantCall:
    """Returns the call of the rows from `first` up to, not including, `last`, with the
    keys `keys` alone (None: all). dk and dv are compared only where these are all
    rows."""
    ranges = {"row": range(first, last)} | ({} if keys is None else {"key": keys})
    whole = (first, last) == (0, case.q_len)
    in_base = Part(row=slice(first, last), key=slice(None) if whole else None)
    return VariantCall(
        case=part(case, **ranges), in_base=in_base, first_key=keys.start if keys else 0
    )


def _as_last_row(
    case: AttentionCase, name: str, rows: int, **changed: Unpack[CaseChanges]
) -> Variant:
    """Returns the variant in which the case's single row is the last of `rows` rows, with
    other fields of the case changed (`changed`). dk and dv are not compared."""
    whole = dataclasses.replace(with_more_tokens(case, rows=(rows - 1, 0)), **changed)
    return single_call_variant(
        name, whole, Part(row=slice(rows - 1, rows), key=None), Part(key=None)
    )


def _part_of_case(case: AttentionCase, rows: int = 0, keys: int = 0) -> Part:
    """Returns the place of the case's rows and keys in a call that has `rows` new rows
    and `keys` new keys before them."""
    return Part(row=slice(rows, rows + case.q_len), key=slice(keys, keys + case.kv_len))


def same_call_variants(
    case: AttentionCase, *, ways: Mapping[str, VariantFields]
) -> Variants:
    """Yields for each item of `ways` a variant that is the same call, laid out or run
    another way. `ways`: fields of a Variant by its name."""
    for name, how in ways.items():
        yield single_call_variant(name, case, **how)


def batch_variants(case: AttentionCase) -> Variants:
    """Yields a variant for each size of SIZES other than the case's: the first sequences
    in a batch of this size, with neighbours where the case has fewer. In a batch of 1
    they are the first and the last sequence alone. Of a large call the first kv head
    alone is taken. A call that would still be too large is a variant with a reason and no
    calls."""
    count, largest = case.q.shape[0], LARGEST if case.q.is_cuda else LARGEST_CPU
    one = case.q.shape[2] * case.kv_len  # scores of one head of one sequence
    base, compared = None, ""
    if max(SIZES) * one * case.heads > largest and case.kv_heads > 1:
        base, compared = part(case, kv_head=range(1)), "kv head 0 alone"
    whole = base or case
    for size in (size for size in SIZES if size != count):
        name, scores = f"{size} in place of {count}", size * one * whole.heads
        if scores > largest:
            why = (
                f"{scores:.1e} scores are more than are computed for it here "
                f"({largest:.1e})"
            )
            yield Variant(name=name, calls=(), reason=why, part=compared)
            continue
        calls = []
        for first in [0, count - 1] if size == 1 else [0]:
            shared = min(size, count - first)
            calls.append(
                VariantCall(
                    select_sequences(whole, range(first, first + size)),
                    in_call=Part(batch=slice(0, shared)),
                    in_base=Part(batch=slice(first, first + shared)),
                )
            )
        yield Variant(name=name, calls=tuple(calls), base=base, part=compared)


def order_variants(case: AttentionCase) -> Variants:
    """Yields two variants of a batch of AROUND sequences: its first sequence stands
    second, then last. Each is compared with the batch in which it stands first. Where the
    case has fewer sequences, the others are neighbours as in `select_sequences`."""
    base = select_sequences(case, range(AROUND))
    for places in ((1, 0, 2, 3), (3, 2, 1, 0)):
        at = places.index(0)
        in_call, in_base = (Part(batch=slice(i, i + 1)) for i in (at, 0))
        name = f"as number {at + 1} of {AROUND}"
        yield single_call_variant(
            name, select_sequences(case, places), in_call, in_base, base=base
        )


def neighbour_variants(case: AttentionCase) -> Variants:
    """Yields the first sequence in a batch of AROUND whose other sequences have other
    values of q, k and v: LARGE times as large, zero, or each of `call_layouts.POISONS`.
    The base is the batch with the usual values. With POISONS dk and dv are not
    compared."""
    base, first = select_sequences(case, range(AROUND)), Part(batch=slice(0, 1), key=None)
    for name, factor in (("larger", LARGE), ("zero", 0.0), *call_layouts.POISONS.items()):
        changed = {tensor: getattr(base, tensor).clone() for tensor in ("q", "k", "v")}
        for x in changed.values():
            x[1:] = factor if name in call_layouts.POISONS else x[1:] * factor
        other = dataclasses.replace(base, **changed)
        compared_part = first if name in call_layouts.POISONS else Part(batch=slice(0, 1))
        yield single_call_variant(
            f"neighbours {name}", other, compared_part, compared_part, base=base
        )


def length_variants(case: AttentionCase) -> Variants:
    """Yields the first sequence with others of other lengths. In a batch a mask of keys
    makes the lengths, and the base is the batch of full lengths. Packed into one
    sequence, which needs as many keys as rows and no mask, a mask that is diagonal in
    blocks separates them. A packed call that would be too large is a variant with a
    reason and no calls."""
    around, n, m = select_sequences(case, range(AROUND)), case.q_len, case.kv_len

    def padded(*others: int) -> AttentionCase:
        """Returns a batch in which a mask leaves the first sequence all keys, and the
        others the first keys, `others` of them."""
        shown = torch.arange(m) < torch.tensor([m, *others])[:, None]
        shown = shown[:, None, None].to(case.q.device)
        return settled(
            dataclasses.replace(around, mask=_combine_masks(around.mask, shown))
        )

    base, first = padded(m, m, m), Part(batch=slice(0, 1))
    for name, others in (
        ("shorter", (m // 2, 1, m - 1)),
        ("one of them empty", (m, 0, m)),
    ):
        yield single_call_variant(
            f"neighbours {name}", padded(*others), first, first, base=base
        )
    if n != m or case.mask is not None:
        return
    if 9 * n * n * case.heads > (LARGEST if case.q.is_cuda else LARGEST_CPU):
        yield Variant(
            name="packed", calls=(), reason="the call is too large for a mask of it here"
        )
        return
    base, in_base = (
        _pack_sequences(case, (n, n, n), 0),
        Part(row=slice(0, n), key=slice(0, n)),
    )
    for name, sizes, start in (
        ("packed, neighbours of other lengths", (n, n // 2, n + n // 2), 0),
        ("packed, behind another", (n // 2 + 1, n, n + n // 2 - 1), n // 2 + 1),
    ):
        place = slice(start, start + n)
        packed = _pack_sequences(case, sizes, int(start > 0))
        yield single_call_variant(
            name, packed, Part(row=place, key=place), in_base, base=base
        )


def _pack_sequences(case: AttentionCase, sizes: Sequence[int], at: int) -> AttentionCase:
    """Returns the case with each sequence of its batch packed with others into one, of
    lengths `sizes`. The case's own stands at number `at` of them, whose size is its
    length; no row sees the keys of another one. Causality and window become part of the
    mask. `case`: one with as many keys as rows, and no mask."""
    around = sum(sizes[:at]), sum(sizes[at + 1 :])
    whole = with_more_tokens(without_positions(case), rows=around, keys=around)
    numbers = torch.repeat_interleave(torch.tensor(sizes))
    low, high = key_limits(case)
    shown, place = numbers[:, None] == numbers, torch.arange(len(numbers))
    if high is not None:
        shown &= place <= place[:, None] + high
    if low is not None:
        shown &= place >= place[:, None] + low
    return dataclasses.replace(whole, mask=shown.to(case.q.device))


def padding_variants(case: AttentionCase) -> Variants:
    """Yields four variants: 1 or PAD keys behind or before the case's, which a mask
    hides. Where the case has as many rows as keys, as many rows are added."""
    for side in ("right", "left"):
        for amount in (1, PAD):
            keys = (amount, 0) if side == "left" else (0, amount)
            rows = keys if case.q_len == case.kv_len else (0, 0)
            in_call = _part_of_case(case, rows[0], keys[0])
            more = with_more_tokens(case, rows=rows, keys=keys, hidden=True)
            yield single_call_variant(f"{amount} on the {side}", more, in_call)


def head_variants(case: AttentionCase) -> Variants:
    """Yields the first and the last kv head alone, each with its query heads; nothing for
    a case of one kv head."""
    for g in sorted({0, case.kv_heads - 1}) if case.kv_heads > 1 else ():
        of_group = slice(g * case.group, (g + 1) * case.group)
        in_base = Part(head=of_group, kv_head=slice(g, g + 1))
        yield single_call_variant(
            f"kv head {g} alone", part(case, kv_head=range(g, g + 1)), in_base=in_base
        )


def row_variants(case: AttentionCase) -> Variants:
    """Yields each of `_some_rows` alone, and the last EXTEND rows where the case has
    more. A case of a single row without causality and window gives that row as the last
    of EXTEND; with either, nothing."""
    n = case.q_len
    for i in _some_rows(case) if n > 1 else ():
        yield Variant(name=f"row {i} alone", calls=(_rows_alone(case, i, i + 1),))
    if n > EXTEND:
        yield Variant(
            name=f"the last {EXTEND} rows", calls=(_rows_alone(case, n - EXTEND, n),)
        )
    elif n == 1 and not case.restricts_positions:
        yield _as_last_row(case, f"the last of {EXTEND} rows", EXTEND)


def longer_variants(case: AttentionCase) -> Variants:
    """Yields the case with 1, PAD and kv_len more keys behind its own, which causality
    hides from its rows. Where the last row stands at the last key, as many rows are
    added. Nothing where a row would see a new key."""
    high = key_limits(case)[1]
    if high is None or case.q_len - 1 + high > case.kv_len - 1:
        return
    text = case.q_len + case.causal_offset == case.kv_len
    for more in (1, PAD, case.kv_len):
        whole = with_more_tokens(case, rows=(0, more if text else 0), keys=(0, more))
        yield single_call_variant(f"{more} tokens behind", whole, _part_of_case(case))


def chunk_variants(case: AttentionCase) -> Variants:
    """Yields the rows in chunks, each with the keys up to the last one that causality and
    window show its last row, at least one key. Chunks have half, three eighths of the
    rows, or 64; a size that would make one chunk alone, or more than 16, is left out.
    Nothing below 32 rows."""
    n, high = case.q_len, key_limits(case)[1]
    for size in sorted({n // 2, 3 * n // 8, 64} if n >= 32 else ()):
        calls = []
        for first in range(0, n, size):
            last = min(first + size, n)
            stop = case.kv_len if high is None else min(case.kv_len, max(1, last + high))
            calls.append(_rows_alone(case, first, last, range(stop)))
        if 1 < len(calls) <= 16:
            yield Variant(name=f"chunks of {size}", calls=tuple(calls))


def decode_variants(case: AttentionCase) -> Variants:
    """Yields variants of a case of several rows in which causality, or a window, limits
    the keys behind a row. Each of `_some_rows` stands alone, with the keys that positions
    show it and without causality and window; one that is shown none is left out. Then the
    last EXTEND rows stand together, with causality, where the case has more, there is no
    limit on keys before, and the last key that each may see is there. A case of a single
    row without causality, window and mask, and with several keys, gives that row as the
    last of a causal prefill of EXTEND (at most kv_len) and of kv_len rows. Nothing of
    other cases."""
    n, m, (low, high) = case.q_len, case.kv_len, key_limits(case)
    if n > 1 and high is not None:
        for i in _some_rows(case):
            start, stop = 0 if low is None else max(0, i + low), min(i + 1 + high, m)
            if start < stop:
                cut = _rows_alone(case, i, i + 1, range(start, stop))
                bare = cut._replace(case=without_positions(cut.case))
                yield Variant(name=f"row {i} by itself", calls=(bare,))
        if n > EXTEND and n - EXTEND + high >= 0 and low is None and n + high <= m:
            last = _rows_alone(case, n - EXTEND, n, range(n + high))
            yield Variant(name=f"the last {EXTEND} by themselves", calls=(last,))
    elif n == 1 and m > 1 and not case.restricts_positions and case.mask is None:
        for rows in sorted({min(EXTEND, m), m}):
            name, offset = f"in a prefill of {rows}", m - rows
            yield _as_last_row(case, name, rows, is_causal=True, causal_offset=offset)


def mask_variants(case: AttentionCase) -> Variants:
    """Yields the case without causality and window, with all that they and its mask hide
    in one mask. The first is that mask, where it is another form than the case's. The
    second, only of a bool mask, adds 0 or -inf to the scores."""
    shown, plain = explicit_mask(case), without_positions(case)
    if shown is None:
        shown = torch.ones(
            case.q_len, case.kv_len, dtype=torch.bool, device=case.q.device
        )
    if case.restricts_positions or case.mask is None:
        yield single_call_variant("a tensor", dataclasses.replace(plain, mask=shown))
    if shown.dtype == torch.bool:
        zero = torch.zeros(shown.shape, dtype=case.q.dtype, device=shown.device)
        added = zero.masked_fill(~shown, -math.inf)
        yield single_call_variant(
            "a tensor that is added", dataclasses.replace(plain, mask=added)
        )


def stride_variants(case: AttentionCase) -> Variants:
    """Yields the same values in other memory layouts: LAYOUTS, and PACKED where q, k and
    v have one length and one dimension. Last, keys and values that two sequences share
    with stride 0, compared with copies of them; left out where sequences have masks of
    their own."""
    alike = case.q.shape[2:] == case.k.shape[2:] == case.v.shape[2:]
    yield from same_call_variants(case, ways=LAYOUTS | (PACKED if alike else {}))
    if case.mask is None or case.mask.ndim < 4 or case.mask.shape[0] == 1:
        several = select_sequences(case, half := range(AROUND // 2))
        k, v = (x[:1].repeat(len(half), 1, 1, 1) for x in (case.k, case.v))
        same = dataclasses.replace(several, k=k, v=v)
        within = partial(
            call_layouts.with_changed_tensors,
            by=call_layouts.share_first_sequence,
            of="kv",
        )
        yield single_call_variant("stride 0", same, base=same, within=within)


def thread_variants(case: AttentionCase) -> Variants:
    """Yields the same call on 1, 2 and 3 CPU threads, without the present number. Nothing
    for tensors on a GPU."""
    current = torch.get_num_threads()
    for count in sorted({1, 2, 3} - {current}) if not case.q.is_cuda else ():
        within = partial(call_layouts.on_threads, count=count)
        yield single_call_variant(f"{count} in place of {current}", case, within=within)


def hidden_key_variants(case: AttentionCase, *, poison: str) -> Variants:
    """Yields the case with PAD keys more behind its own, which a mask hides, and with a
    poison, one of `call_layouts.POISONS`, in them: in K and V, in K alone, in V alone.
    Each is compared with the same call without the poison, in the case's own part. Where
    there are as many query rows as keys, as many rows are added."""
    more = (0, PAD if case.q_len == case.kv_len else 0)
    base, part_of_case = (
        with_more_tokens(case, rows=more, keys=(0, PAD), hidden=True),
        _part_of_case(case),
    )
    for tensors in ("kv", "k", "v"):
        changed = {}
        for tensor in tensors:
            changed[tensor] = x = getattr(base, tensor).clone()
            x[:, :, case.kv_len :] = call_layouts.POISONS[poison]
        other = dataclasses.replace(base, **changed)
        yield single_call_variant(
            f"{poison} in {' and '.join(tensors)}",
            other,
            part_of_case,
            part_of_case,
            base=base,
        )


def _layout(
    by: Callable[..., Tensor],
    of: Sequence[str] = call_layouts.FEATURES,
    **arguments: object,
) -> Within:
    """Returns the layout of a call in which `by`, with these arguments, makes each tensor
    of `of` anew."""
    return partial(call_layouts.with_changed_tensors, by=partial(by, **arguments), of=of)


def _layout_fields(base: Within, **ways: Within) -> dict[str, VariantFields]:
    """Returns the fields of variants by name: each is laid out by one of `ways`, and
    compared with the case laid out by `base`."""
    return {
        name: {"within": within, "base_within": base} for name, within in ways.items()
    }


LAYOUTS = _layout_fields(PLAIN, **{
    "transposed": _layout(call_layouts.in_layout, layout="transposed"),
    "sliced": _layout(call_layouts.slice_of_larger, value=0.0),
    "every second": _layout(call_layouts.in_layout, layout="strided"),
})  # fmt: skip
PACKED = _layout_fields(PLAIN, packed=call_layouts.with_packed_tensors)
PAGES = {
    f"pages of {n}": _layout(call_layouts.gather_pages, "kv", size=n) for n in (16, 64)
}
BEYOND = {
    f"{name} there": _layout(call_layouts.slice_of_larger, value=x)
    for name, x in call_layouts.POISONS.items()
}
BEFORE = {
    f"{name} before": partial(call_layouts.fill_new_memory, value=x)
    for name, x in call_layouts.POISONS.items()
}

# Options that cut the keys, or order them; the study leaves out those that a kernel has
# not.
TILINGS: Mapping[str, VariantFields] = {
    f"{name}={value}": {"options": {name: value}}
    for name, values in call_layouts.TILINGS.items()
    for value in values
}

# By axis the variants that are the same call, laid out or run another way
SAME_CALL: Mapping[str, Mapping[str, VariantFields]] = {
    "repeat": {"again": {}, "a third time": {}},
    "paged": _layout_fields(PLAIN, **PAGES),
    "graph": {"CUDA graph": {"wrap": "graph"}},
    "compiled": {"torch.compile": {"wrap": "compiled"}},
    "tiles": TILINGS,
    "beyond": _layout_fields(_layout(call_layouts.slice_of_larger, value=None), **BEYOND),
    "unwritten": _layout_fields(
        partial(call_layouts.fill_new_memory, value=0.0), **BEFORE
    ),
}
# By the names of `request_models.AXES`
VARIANTS: Mapping[str, Callable[[AttentionCase], Variants]] = {
    "batch": batch_variants,
    "order": order_variants,
    "neighbours": neighbour_variants,
    "lengths": length_variants,
    "padding": padding_variants,
    "heads": head_variants,
    "rows": row_variants,
    "longer": longer_variants,
    "chunks": chunk_variants,
    "decode": decode_variants,
    "mask": mask_variants,
    "strides": stride_variants,
    "threads": thread_variants,
    "hidden": partial(hidden_key_variants, poison="large numbers"),
    "hidden-nan": partial(hidden_key_variants, poison="NaN"),
    **{name: partial(same_call_variants, ways=ways) for name, ways in SAME_CALL.items()},
}
