"""Attention divided over shards of the keys, as ring attention and flash-decoding divide it.

Each shard is computed by another kernel (`inner`), and the partial results (O, log-sum-exp) are
merged (`numdev.kernels.merging`) in an order (`numdev.kernels.shards`). All of it happens in one
process, so that what a division does to the numbers can be seen on any machine; the same over
several GPUs is `numdev.kernels.context_parallel`.

Backward is ring attention's: from the merged O as it is returned, and the merged log-sum-exp, each
shard's operator computes gradients in the working format, and these are added up in the format of
the merge. In `ring` and `zigzag` queries are divided as well, so that dk and dv are sums over ranks
and dq is one over shards; in the other orders dk and dv are each shard's own.

With one shard nothing is merged: it is the inner kernel.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.formats import Format, round_to
from numdev.kernels import Output, find, kernel
from numdev.kernels.merging import Merge, State, merged
from numdev.kernels.shard_claims import claims, described
from numdev.kernels.shard_inner import INNER, backward, forward, options_of
from numdev.kernels.shards import Slices, Step, divided, part, schedule, taken

ORDERS = ("ring", "zigzag", "sequential", "tree", "simultaneous")
MERGE_FORMATS = ("float32", "float64", "bfloat16", "float16", "working", "promoted")
PARTIAL_FORMATS = ("working", "float32")


def _check(options: Mapping[str, Any]) -> None:
    shards = options["shards"]
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise UsageError(f"shards is {shards!r}", hint="a whole number from 1 on")
    choices: Mapping[str, Sequence[str]] = {
        "inner": INNER,
        "order": ORDERS,
        "merge_format": MERGE_FORMATS,
        "partial_format": PARTIAL_FORMATS,
    }
    for name, known in choices.items():
        if options[name] not in known:
            hint = closest(str(options[name]), known)
            raise UsageError(f"sharded: {name} is {options[name]!r}", hint=hint)
    if options["partial_format"] == "float32" and options["inner"] != "emulated":
        raise UsageError(
            f"{options['inner']} hands over its output in the working format",
            hint="leave out partial_format, or take inner: emulated",
        )


def gradients(
    case: AttentionCase,
    *,
    shards: int = 2,
    inner: str = "sdpa-flash",
    order: str = "ring",
    merge_format: str = "float32",
    partial_format: str = "working",
) -> Output:
    """A training step, under the options of `sharded`. Raises Refused where the inner kernel has no
    backward over shards."""
    options = options_of(inner, partial_format)
    if shards == 1:
        return find(inner).gradients(case)
    how = Merge(order=order, format=merge_format, working=case.format)
    steps = schedule(case, shards, order)
    (O, L), ran = _forward(case, steps, how, inner, options)
    out = _cast(O, case)
    sums = [torch.zeros_like(x, dtype=how.sums) for x in (case.q, case.k, case.v)]
    for step in steps:
        found = backward(
            inner, part(case, step), taken(out, step.rows), taken(L, step.rows), options
        )
        for total, partial, places in zip(
            sums, found, (step.rows, step.keys, step.keys), strict=True
        ):
            _add(total, partial, places)
    dq, dk, dv = (_cast(x, case) for x in sums)
    says = described(shards, order, merge_format, partial_format, ran)
    return Output(out=out, lse=L, dq=dq, dk=dk, dv=dv, ran=says, ran_backward=says)


@kernel("sharded", validate=_check, claims=claims, backward=gradients)
def sharded(
    case: AttentionCase,
    *,
    shards: int = 2,
    inner: str = "sdpa-flash",
    order: str = "ring",
    merge_format: str = "float32",
    partial_format: str = "working",
) -> Output:
    """Attention over shards of the keys, merged as ring attention and flash-decoding merge."""
    options = options_of(inner, partial_format)
    if shards == 1:
        return find(inner).attend(case)
    how = Merge(order=order, format=merge_format, working=case.format)
    (O, L), ran = _forward(case, schedule(case, shards, order), how, inner, options)
    says = described(shards, order, merge_format, partial_format, ran)
    return Output(out=_cast(O, case), lse=L, ran=says)


def _forward(
    case: AttentionCase,
    steps: Sequence[Step],
    how: Merge,
    inner: str,
    options: Mapping[str, Any],
) -> tuple[State, str]:
    """O and L of all rows in the arithmetic of the merge, and what the inner kernel ran."""
    ran, states = inner, defaultdict(list)
    for step in steps:
        (O, L), ran = forward(inner, part(case, step), options)
        # Chunks of one rank are merged apart: one of them may meet fewer shards.
        for rows, O_rows, L_rows in zip(
            step.rows, divided(O, step.rows), divided(L, step.rows), strict=True
        ):
            states[rows.start, rows.stop].append((O_rows, L_rows))
    shape = (*case.q.shape[:3], case.v.shape[-1])
    O = case.q.new_zeros(shape, dtype=how.arithmetic)
    L = O.new_full(shape[:3], -math.inf)
    if case.sinks is not None:  # a key without a value, met before all others
        L = case.sinks.to(L.dtype)[None, :, None].expand(shape[:3]).clone()
    for (start, stop), parts in states.items():
        sink = [] if case.sinks is None else [(O[:, :, start:stop], L[:, :, start:stop])]
        O[:, :, start:stop], L[:, :, start:stop] = merged([*sink, *parts], how)
    return (O, L), ran


def _add(total: Tensor, partial: Tensor, places: Slices) -> None:
    """Add what belongs to these places of the third axis; in the format of the total."""
    for at, x in zip(places, divided(partial, places), strict=True):
        total[:, :, at] += x


def _cast(x: Tensor, case: AttentionCase) -> Tensor:
    """x rounded once to the working format."""
    fmt: Format = case.format
    return x.to(case.q.dtype) if x.dtype == torch.float32 else round_to(x, fmt).to(case.q.dtype)
