"""Looks for why two forms differ: which two tilings, splits or orders of the keys make
the same difference.

Either form is emulated with every candidate, and of all pairs the one is taken whose
difference is nearest to the kernel's, element by element. It is the cause where no more
than a tenth of the difference is left. What the emulation gets wrong in both forms alike
cancels."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from numdev.cases import AttentionCase, visible
from numdev.errors import NumdevError
from numdev.kernels.emulation.kernel import emulation, recipe_of
from numdev.kernels.emulation.recipe import TILINGS
from numdev.studies.audit.prepared_attention import part
from numdev.studies.invariance.axes import Part, VariantCall
from numdev.studies.invariance.differences import Forms, KernelRun, differs
from numdev.studies.invariance.report import Cause, InvarianceRow
from numdev.system import System

EXPLAINS = 0.1  # the residual of a cause
ROWS = 48  # rows that are emulated
FEW = 16  # elements: where fewer differ, some pair of thousands fits by chance
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 176, 192, 256, 512, 1024)
SPLITS = (1, 2, 3, 4, 8, 16)
# Keys of all sequences and heads together, up to which all of them are emulated
MOST_KEYS = 1 << 13
MOST_TILES = 64  # smaller tiles, which would be more, are not tried
CUT = ("block_kv", "splits", "kv_order")
Claim = Mapping[str, object]
Cut = dict[str, object]  # how an emulation cuts and orders the keys, by CUT
Emulated = tuple[Cut, Tensor]  # and its output, fp64 [elements]


def cause_fields(
    row: InvarianceRow, forms: Forms, system: System, *, search: bool
) -> dict[str, object]:
    """Returns those fields of a row that differs in `out` that say why it differs.
    `cause`: two operators that ran, or else two tilings that leave at most EXPLAINS of
    the difference. `closest`: the smallest residual, where there are such tilings or all
    candidates were tried. `tried`: how many pairs of tilings were tried, where all
    candidates were. Empty where none of this is known, as with NaN. Of a variant's calls
    it is the first in which finite rows differ. What the kernels claim of themselves is
    tried first. Then, with `search` and where at least FEW elements differ, all
    candidates are."""
    if operators := _operator_cause(forms):
        return {"cause": operators}
    calls = () if row.nonfinite else zip(forms.variant.calls, forms.others, strict=True)
    for call, other in calls:
        if restricted := _restrict_to_differing_rows(call, forms.first, other):
            cases, difference = restricted
            break
    else:
        return {}
    claims = [_claimed_options(ran, system) for ran in (forms.first, other)]
    few = int((difference != 0).sum()) < FEW
    fields: dict[str, object] = {}
    for searched in (False, True) if search and not few else (False,):
        base, variant = (
            list(_emulations(case, claim, searched=searched))
            for case, claim in zip(cases, claims, strict=True)
        )
        if not base or not variant:
            break
        residuals = _residuals(difference, base, variant)
        if not bool(residuals.isfinite().all()):
            break
        best = float(residuals.min())
        if searched:
            fields = {"closest": best, "tried": residuals.numel()}
        if best <= EXPLAINS:
            one, two, residual = _simplest_pair(residuals, base, variant)
            cause = Cause(base=one, variant=two, moved=call.moves_keys, residual=residual)
            return {**fields, "closest": best, "cause": cause}
    return fields


def _operator_cause(forms: Forms) -> Cause | None:
    """Returns the cause where two operators ran, by what the kernel said of both forms
    (`output.did`), of the first of the variant's calls in which that differs. None where
    it said nothing of one form, or the same of both."""
    for ran in forms.others:
        both = (forms.first.output.did, ran.output.did)
        did = [dict(x) if isinstance(x, Mapping) else {} for x in both]
        if all(did) and did[0] != did[1]:
            return Cause(base=did[0], variant=did[1])
    return None


def _residuals(
    difference: Tensor, base: Sequence[Emulated], variant: Sequence[Emulated]
) -> Tensor:
    """Returns [base, variant]: for each pair of emulations the norm of what their
    difference leaves of `difference`, fp64 [elements], over the norm of `difference`,
    which is not 0."""
    of_variant = torch.stack([out for _, out in variant])
    left = [(difference - (of_variant - out)).norm(dim=1) for _, out in base]
    residuals: Tensor = torch.stack(left) / difference.norm()
    return residuals


def _simplest_pair(
    residuals: Tensor, base: Sequence[Emulated], variant: Sequence[Emulated]
) -> tuple[Cut, Cut, float]:
    """Returns the tilings of the base and of the variant, and the residual, of one pair:
    of the pairs that explain about as much as the best, that with the earliest tiling of
    the base; then that in which the variant's changes the fewest options; then the
    earliest."""
    best = float(residuals.min())
    near = (residuals <= max(1.02 * best, best + 1e-3)).nonzero().tolist()

    def complexity(pair: list[int]) -> tuple[int, int, int]:
        """Returns the sort key of a pair of indices: of the base's tiling, the number of
        changed options, of the variant's tiling."""
        i, j = pair
        changed = len(base[i][0].items() - variant[j][0].items())
        return i, changed, j

    i, j = min(near, key=complexity)
    return base[i][0], variant[j][0], float(residuals[i, j])


def _claimed_options(ran: KernelRun, system: System) -> Claim:
    """Returns the options of the kernel `emulated` by which a kernel says that it rounds
    and tiles; of `emulated` its own, without those that are None. Where another says
    nothing, or raises, it is FlashAttention-2's preset."""
    kernel = ran.planned.kernel
    if kernel.name == "emulated":
        return {n: x for n, x in ran.planned.options.items() if x is not None}
    # A claim is foreign code, and reads what was returned
    with contextlib.suppress(Exception):
        return dict(kernel.claims(ran.case, ran.output, system) or {"preset": "fa2"})
    return {"preset": "fa2"}


def _restrict_to_differing_rows(
    call: VariantCall, first: KernelRun, other: KernelRun
) -> tuple[tuple[AttentionCase, AttentionCase], Tensor] | None:
    """Returns the calls of both forms, restricted to at most ROWS rows that differ and
    are finite, and the difference there, fp64 [elements]. All sequences and heads stay
    where these have at most MOST_KEYS keys together; else one kv head of one sequence
    does, the first that differs. A row counts where it differs in any head that stays and
    is finite in all. None where no row does."""
    base, in_base, in_call = first.case, call.in_base, call.in_call
    a, b = (
        in_base.select_query_rows(first.output.out),
        in_call.select_query_rows(other.output.out),
    )
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

    def with_rows(case: AttentionCase, place: Part) -> AttentionCase:
        """Returns a form's call with the chosen rows, sequences and heads alone."""
        batch = range(case.q.shape[0])[place.batch][sequences]
        kv_head = range(case.kv_heads)[place.kv_head][kv_heads]
        small = part(case, batch=batch, kv_head=kv_head)
        small = dataclasses.replace(small, grad_out=None)
        return small.restrict(rows=rows + (place.row.start or 0))

    cases = with_rows(base, in_base), with_rows(call.case, in_call)
    return cases, (two[:, :, rows] - one[:, :, rows]).flatten()


def _emulations(
    case: AttentionCase, claim: Claim, *, searched: bool
) -> Iterator[Emulated]:
    """Yields (tiling, output) of the emulation by the claim, or with `searched` by every
    candidate. What the emulation refuses is left out, the claim too. The output is fp64
    [elements]."""
    shown = visible(case, slice(0, case.q_len), slice(0, case.kv_len))
    seen = case.kv_len if shown is None else int(shown.sum(dim=-1).amax())
    for options in _candidates(case, claim) if searched else (claim,):
        with contextlib.suppress(NumdevError):
            recipe, out = recipe_of(options), emulation(case, options)
            tile = recipe.block_kv
            if tile is None:  # by the rule of the preset; None: all keys at once
                tile = TILINGS[recipe.tiling][1](case.q.shape[-1], recipe.memory)[1]
            cut: Cut = {"splits": 1 if recipe.splits is None else recipe.splits}
            if recipe.block_kv is not None:
                cut["block_kv"] = recipe.block_kv
            cut["kv_order"] = recipe.kv_order
            # None as well where one tile takes all, however large it is
            cut["block_kv"] = tile if (tile or seen) < seen else None
            yield cut, out.double().flatten()


def _candidates(case: AttentionCase, claim: Claim) -> Iterator[dict[str, object]]:
    """Yields the options of the kernel `emulated` to try: the claim first, then the claim
    with every tile of TILES, order and number of SPLITS that the case's keys allow, the
    simple ones first. These have no option `memory`."""
    yield dict(claim)
    unchanged = {n: x for n, x in claim.items() if n not in ("memory", *CUT)}
    tiles = [t for t in TILES if t < 2 * case.kv_len and case.kv_len <= t * MOST_TILES]
    for splits, order, tile in itertools.product(
        SPLITS, ("ascending", "descending"), tiles
    ):
        parts = -(-case.kv_len // tile)
        if splits <= parts and (parts > 1 or order == "ascending"):
            yield {**unchanged, "block_kv": tile, "kv_order": order, "splits": splits}
