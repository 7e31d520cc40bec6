"""Why two forms differ: which two tilings, splits or orders of the keys make the same
difference.

The emulation of either form is asked with every candidate, and of all pairs the one is
taken whose difference is nearest to the kernel's, element by element. It is the cause
where no more than a tenth of the difference is left. What the emulation gets wrong in
both forms alike cancels."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.audit.bench import part
from numdev.cases import AttentionCase, visible
from numdev.errors import NumdevError
from numdev.invariance.axes import Call, Part
from numdev.invariance.differences import Forms, Ran, differs
from numdev.invariance.report import Cause, InvarianceRow
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


def explained(
    row: InvarianceRow, forms: Forms, system: System, *, search: bool
) -> dict[str, Any]:
    """The fields of a row that differs in `out` which say why: two operators that ran,
    else two tilings. The kernel's claims are tried alone, and with `search` then all
    candidates."""
    for ran in forms.others:
        both = (forms.first.output.did, ran.output.did)
        did = [dict(x) if isinstance(x, Mapping) else {} for x in both]
        if all(did) and did[0] != did[1]:
            return {"cause": Cause(base=did[0], variant=did[1])}
    calls = () if row.nonfinite else zip(forms.variant.calls, forms.others, strict=True)
    for call, other in calls:
        if looked := _looked_at(call, forms.first, other):
            cases, difference = looked
            break
    else:
        return {}
    claims = [_claim(ran, system) for ran in (forms.first, other)]
    few = int((difference != 0).sum()) < FEW
    found: dict[str, Any] = {}
    for searched in (False, True) if search and not few else (False,):
        pairs = zip(cases, claims, strict=True)
        made = [list(_emulated(case, claim, searched=searched)) for case, claim in pairs]
        if not all(made):
            break
        (one, a), (two, b) = (
            ([o for o, _ in m], torch.stack([x for _, x in m])) for m in made
        )
        left = (
            torch.stack([(difference - (b - x)).norm(dim=1) for x in a])
            / difference.norm()
        )
        if not bool(left.isfinite().all()):
            break
        best = float(left.min())
        if searched:
            found = {"closest": best, "tried": left.numel()}
        if best <= EXPLAINS:
            near = (left <= max(1.02 * best, best + 1e-3)).nonzero().tolist()
            # Of pairs that say the same the base's simplest, and what changes least.
            i, j = min(
                near,
                key=lambda x: (x[0], len(one[x[0]].items() - two[x[1]].items()), x[1]),
            )
            named = Cause(
                base=one[i],
                variant=two[j],
                moved=call.moves_keys,
                residual=float(left[i, j]),
            )
            return {**found, "closest": best, "cause": named}
    return found


def _claim(ran: Ran, system: System) -> Claim:
    """How the kernel says that it computes; FlashAttention-2's way where it does not."""
    kernel = ran.planned.kernel
    if kernel.name == "emulated":
        return {
            name: value
            for name, value in ran.planned.options.items()
            if value is not None
        }
    # A claim is foreign code, and reads what was returned
    with contextlib.suppress(Exception):
        return dict(kernel.claims(ran.case, ran.output, system) or {"preset": "fa2"})
    return {"preset": "fa2"}


def _looked_at(
    call: Call, first: Ran, other: Ran
) -> tuple[tuple[AttentionCase, AttentionCase], Tensor] | None:
    """Both forms' calls restricted to some rows that differ, of all sequences and heads
    where these are few, else of one kv head; and the difference there, fp64 [elements].
    None where none do."""
    base, there, here = first.case, call.there, call.here
    a: Any = there.of("out", first.output.out)
    b: Any = here.of("out", other.output.out)
    sequences = kv_heads = heads = slice(None)
    moved = differs(a, b)
    if not bool(moved.any()):
        return None
    if a.shape[:2].numel() * base.kv_len > MOST_KEYS:
        at, head = moved.any(dim=3).any(dim=2).nonzero()[0].tolist()
        kv = head // base.group
        sequences, kv_heads = slice(at, at + 1), slice(kv, kv + 1)
        heads = slice(kv * base.group, (kv + 1) * base.group)
    one, two = a[sequences, heads], b[sequences, heads]
    moved = moved[sequences, heads].any(dim=3).flatten(0, 1).any(dim=0)
    one, two = one.double(), two.double()
    finite = (one.isfinite() & two.isfinite()).all(dim=3).flatten(0, 1).all(dim=0)
    rows = (moved & finite).nonzero()[:, 0]
    rows = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    if not len(rows):
        return None

    def restricted(case: AttentionCase, of: Part) -> AttentionCase:
        batch = range(case.q.shape[0])[of.batch][sequences]
        small = part(
            case, batch=batch, kv_head=range(case.kv_heads)[of.kv_head][kv_heads]
        )
        small = dataclasses.replace(small, grad_out=None)
        return small.select_rows(rows + (of.row.start or 0))

    cases = restricted(base, there), restricted(call.case, here)
    return cases, (two[:, :, rows] - one[:, :, rows]).flatten()


def _emulated(
    case: AttentionCase, claim: Claim, *, searched: bool
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """What the claim, and every candidate, returns, with the options that cut the keys,
    fp64 [elements]."""
    shown = visible(case, slice(0, case.q_len), slice(0, case.kv_len))
    seen = case.kv_len if shown is None else int(shown.sum(dim=-1).amax())
    for options in _candidates(case, claim) if searched else (claim,):
        with contextlib.suppress(NumdevError):
            made, out = recipe_of(options), emulation(case, options)
            cut = {
                "splits": 1,
                **{n: x for n in CUT if (x := getattr(made, n)) is not None},
            }
            if "block_kv" not in cut:  # by the rule of the preset; None: all keys at once
                cut["block_kv"] = TILINGS[made.tiling][1](case.q.shape[-1], made.memory)[
                    1
                ]
            if (cut["block_kv"] or seen) >= seen:  # however large it is
                cut["block_kv"] = None
            yield cut, out.double().flatten()


def _candidates(case: AttentionCase, claim: Claim) -> Iterator[dict[str, Any]]:
    """The claim itself, then its tiles, orders and splits changed, the simple ones
    first."""
    yield dict(claim)
    rest = {n: x for n, x in claim.items() if n not in ("memory", *CUT)}
    tiles = [t for t in TILES if t < 2 * case.kv_len and case.kv_len <= t * MOST_TILES]
    for splits, order, tile in itertools.product(
        SPLITS, ("ascending", "descending"), tiles
    ):
        parts = -(-case.kv_len // tile)
        if splits <= parts and (parts > 1 or order == "ascending"):
            yield {**rest, "block_kv": tile, "kv_order": order, "splits": splits}
