"""Why two forms differ: which two tilings, splits or orders of the keys make the same difference.

The emulation of either form is asked with every candidate, and of all pairs the one is taken whose
difference is nearest to the kernel's, element by element. It is the cause where no more than a
tenth of the difference is left. What the emulation gets wrong in both forms alike cancels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from numdev.audit.bench import part
from numdev.audit.plan import Planned
from numdev.cases import AttentionCase, visible
from numdev.errors import NumdevError
from numdev.invariance.axes import Call, Part
from numdev.invariance.differences import differs
from numdev.invariance.report import Cause
from numdev.kernels import Output
from numdev.kernels.emulation.kernel import emulation, recipe_of
from numdev.kernels.emulation.recipe import TILINGS
from numdev.system import System

EXPLAINS = 0.1  # the residual of a cause
ROWS = 48  # rows that are looked at
FEW = 16  # elements: where fewer differ, some pair of thousands fits by chance
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 176, 192, 256, 512, 1024)
SPLITS = (1, 2, 3, 4, 8, 16)
MOST_KEYS = 1 << 13  # of all sequences and heads together, where all are looked at
MOST_TILES = 64  # of the keys: smaller tiles are not tried
CUT = ("block_kv", "splits", "kv_order")
Claim = Mapping[str, Any]


def claim_of(
    planned: Planned, case: AttentionCase, output: Output, system: System
) -> dict[str, Any]:
    """How the kernel says that it computes; FlashAttention-2's way where it does not."""
    kernel = planned.kernel
    if kernel.name == "emulated":
        return {name: value for name, value in planned.options.items() if value is not None}
    with contextlib.suppress(Exception):  # a claim is foreign code, and reads what was returned
        return dict(kernel.claims(case, output, system) or {"preset": "fa2"})
    return {"preset": "fa2"}


def by_operator(base: Output, variant: Output) -> Cause | None:
    """Two operators that ran, where both are known."""
    a, b = (dict(x.did) if isinstance(x.did, Mapping) else {} for x in (base, variant))
    return Cause(base=a, variant=b) if a and b and a != b else None


class Explained(NamedTuple):
    """Fields of a row: the pair that explains a difference, the residual of the best pair, and of
    how many pairs; None where no two forms can be emulated."""

    cause: Cause | None = None
    closest: float | None = None
    tried: int | None = None


def by_tiling(
    call: Call, base_case: AttentionCase, base: Output, variant: Output,
    first: tuple[int, int, int, int], claims: Sequence[Claim], *, search: bool,
) -> Explained:  # fmt: skip
    """What explains how `out` of a call differs from the base's, around the `first` row. The claims
    are tried alone, and with `search` then all candidates."""
    looked = _looked_at(call, base_case, base, variant, first)
    if looked is None:
        return Explained()
    cases, difference = looked
    size, best, tried = difference.norm(), None, None
    few = int((difference != 0).sum()) < FEW
    for searched in (False, True)[: 2 if search and not few else 1]:
        pairs = [
            list(_emulated(x, c, searched=searched)) for x, c in zip(cases, claims, strict=True)
        ]
        if not all(pairs):
            break
        (one, a), (two, b) = (([o for o, _ in p], torch.stack([x for _, x in p])) for p in pairs)
        left = torch.stack([(difference - (b - x)).norm(dim=1) for x in a]) / size
        if not bool(left.isfinite().all()):
            break
        best, tried = float(left.min()), left.numel() if searched else None
        if best <= EXPLAINS:
            near = (left <= max(1.02 * best, best + 1e-3)).nonzero().tolist()
            # Of pairs that say the same the base's simplest, and what changes least.
            i, j = min(near, key=lambda x: (x[0], _changes(one[x[0]], two[x[1]]), x[1]))
            found = Cause(base=one[i], variant=two[j], residual=float(left[i, j]))
            return Explained(found, best, tried)
    return Explained(closest=best if tried else None, tried=tried)


def _changes(one: Claim, two: Claim) -> int:
    return sum(one.get(n) != two.get(n) for n in CUT)


def _looked_at(
    call: Call,
    base_case: AttentionCase,
    base: Output,
    variant: Output,
    first: tuple[int, int, int, int],
) -> tuple[tuple[AttentionCase, AttentionCase], Tensor] | None:
    """Both forms' calls restricted to some rows that differ, of all sequences and heads where these
    are few, else of those of the `first` row; and the difference there, fp64 [elements]."""
    there, here, group = call.there, call.here, base_case.group
    a: Any = there.of("out", base.out)
    b: Any = here.of("out", variant.out)
    sequences, kv_heads = range(a.shape[0]), range(a.shape[1] // group)
    if a.shape[:2].numel() * base_case.kv_len > MOST_KEYS:
        at, head = first[0] - (there.batch.start or 0), first[1] - (there.head.start or 0)
        sequences, kv_heads = range(at, at + 1), range(head // group, head // group + 1)
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    one, two = (x[sequences.start : sequences.stop, heads] for x in (a, b))
    rows = differs(one, two).any(dim=3).flatten(0, 1).any(dim=0)
    one, two = one.double(), two.double()
    rows &= (one.isfinite() & two.isfinite()).all(dim=3).flatten(0, 1).all(dim=0)
    rows = rows.nonzero()[:, 0]
    rows = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    difference = two[:, :, rows] - one[:, :, rows]
    if not len(rows):
        return None

    def restricted(case: AttentionCase, of: Part) -> AttentionCase:
        at, kv = of.batch.start or 0, of.kv_head.start or 0
        small = part(
            case,
            batch=range(at + sequences.start, at + sequences.stop),
            kv_head=range(kv + kv_heads.start, kv + kv_heads.stop),
        )
        small = dataclasses.replace(small, grad_out=None)
        return small.select_rows(rows + (of.row.start or 0))

    cases = restricted(base_case, there), restricted(call.case, here)
    return cases, difference.flatten()


def _emulated(
    case: AttentionCase, claim: Claim, *, searched: bool
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """What the claim, and every candidate, returns, with the options that cut the keys, fp64
    [elements]."""
    shown = visible(case, slice(0, case.q_len), slice(0, case.kv_len))
    seen = case.kv_len if shown is None else int(shown.sum(dim=-1).amax())
    for options in _candidates(case, claim) if searched else (claim,):
        with contextlib.suppress(NumdevError):
            made, out = recipe_of(options), emulation(case, options)
            cut = {"splits": 1, **{n: x for n in CUT if (x := getattr(made, n)) is not None}}
            if "block_kv" not in cut:  # by the rule of the preset; None: all keys at once
                cut["block_kv"] = TILINGS[made.tiling][1](case.q.shape[-1], made.memory)[1]
            if (cut["block_kv"] or seen) >= seen:  # however large it is
                cut["block_kv"] = None
            yield cut, out.double().flatten()


def _candidates(case: AttentionCase, claim: Claim) -> Iterator[dict[str, Any]]:
    """The claim itself, then its tiles, orders and splits changed, the simple ones first."""
    yield dict(claim)
    rest = {n: x for n, x in claim.items() if n not in ("memory", *CUT)}
    tiles = [t for t in TILES if t < 2 * case.kv_len and case.kv_len <= t * MOST_TILES]
    for splits in SPLITS:
        for order in ("ascending", "descending"):
            for tile in tiles:
                parts = -(-case.kv_len // tile)
                if splits <= parts and (parts > 1 or order == "ascending"):
                    yield {**rest, "block_kv": tile, "kv_order": order, "splits": splits}
