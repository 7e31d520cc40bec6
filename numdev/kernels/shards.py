"""Who meets which keys, and when: the schedules of attention that is divided over shards.

Keys are divided into shards of one length, the last of which may be shorter (or not be there, where
there are too few keys). In `ring` and `zigzag` queries are divided as well, one part for each rank.
A schedule is a list of steps in the order of time; ranks work side by side, so a step is one
rank's, and those of one round follow each other.

`ring` (Liu et al., arXiv 2310.01889): keys go round. Rank r begins with its own shard, then meets
r - 1, r - 2, and so on. `zigzag`: the same for causal calls with the work balanced, as PyTorch and
ring-flash-attention have it. There are twice as many chunks as ranks, and rank r holds the chunks r
and 2 n - 1 - r, of queries and of keys; what it need not compute it does not. Any other order:
all queries at once meet shard after shard.

A step that no query of can see by causality or window is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.cases import AttentionCase, key_range, mask_block
from numdev.errors import Refused

Slices = tuple[slice, ...]
"""Ranges of one axis, ascending."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Some queries meeting the keys of one shard, or of half of it."""

    rows: Slices
    keys: Slices


def schedule(case: AttentionCase, shards: int, order: str) -> list[Step]:
    """The steps of a case. Raises Refused where an order cannot have it."""
    if order == "zigzag":
        return list(_zigzag(case, shards))
    keys = chunks(case.kv_len, shards)
    rows = chunks(case.q_len, shards) if order == "ring" else [slice(0, case.q_len)]
    steps = (
        Step(rows=(rows[rank],), keys=(keys[(rank - turn) % len(keys)],))
        for turn in range(len(keys))
        for rank in range(len(rows))
    )
    if order != "ring":
        steps = (Step(rows=tuple(rows), keys=(shard,)) for shard in keys)
    return [step for step in steps if _meets(case, step)]


def chunks(length: int, number: int) -> list[slice]:
    """At most so many ranges of one length, the last of which may be shorter."""
    size = -(-length // number)
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def part(case: AttentionCase, step: Step) -> AttentionCase:
    """The call that a step is, without sinks, which are no keys of any shard."""
    rows, keys = step.rows, step.keys
    hides = case.is_causal and keys[-1].stop - 1 > rows[0].start + case.causal_offset
    by_position = hides or case.window is not None
    # The same chunks on both sides keep their order, so that causality stays what it was.
    moved = 0 if rows == keys else rows[0].start - keys[0].start
    return dataclasses.replace(
        case,
        q=taken(case.q, rows),
        k=taken(case.k, keys),
        v=taken(case.v, keys),
        mask=None if case.mask is None else mask_block(case.mask, rows[0], keys[0]),
        is_causal=hides,
        causal_offset=case.causal_offset + moved if by_position else 0,
        sinks=None,
        grad_out=None if case.grad_out is None else taken(case.grad_out, rows),
    )


def taken(x: Tensor, ranges: Slices) -> Tensor:
    """These places of the third axis: a view of one range, a copy of several."""
    if len(ranges) == 1:
        return x[:, :, ranges[0]]
    return torch.cat([x[:, :, places] for places in ranges], dim=2)


def divided(x: Tensor, ranges: Slices) -> Sequence[Tensor]:
    """What `taken` put together, apart again, along the third axis."""
    parts: Sequence[Tensor] = x.split([places.stop - places.start for places in ranges], dim=2)
    return parts


def _meets(case: AttentionCase, step: Step) -> bool:
    seen, keys = key_range(case, step.rows[0]), step.keys[0]
    return bool(max(seen.start, keys.start) < min(seen.stop, keys.stop))


def _zigzag(case: AttentionCase, ranks: int) -> Iterator[Step]:
    plain = case.mask is None and case.window is None and case.causal_offset == 0
    if not (case.is_causal and plain and case.q_len == case.kv_len):
        raise Refused("zigzag balances plain causal calls, with as many queries as keys")
    if case.q_len % (2 * ranks):
        raise Refused(f"zigzag divides a length by {2 * ranks}, and {case.q_len} it does not")
    at = chunks(case.q_len, 2 * ranks)
    held = [(at[rank], at[-1 - rank]) for rank in range(ranks)]
    for turn in range(ranks):
        for rank in range(ranks):
            rows, keys = held[rank], held[rank - turn]
            if turn == 0:
                yield Step(rows=rows, keys=keys)
            elif turn <= rank:
                yield Step(rows=rows, keys=keys[:1])
            else:
                yield Step(rows=rows[1:], keys=keys)
