"""A different function: when a kernel is far off, which named mistake explains it.

An ill-conditioned call reaches any error with sound arithmetic, so an accusation needs a
*named alternative* a, whose own fp64 reference explains the output o ten times better
than attention's r: ||o - a|| <= ||o - r|| / 10, plainly and with every element divided by
its term scale. Alternatives within a factor of two of the best are all named. `far_off`
only saves time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import format_of
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.deviation import Metrics
from numdev.metrics.yardstick import finite
from numdev.operations.attention.explain.alternative_outputs import (
    SOMEWHERE,
    alternatives,
    estimated,
)
from numdev.operations.attention.explain.call_sample import (
    HEAD_KEYS,
    MAX_HEADS,
    Alternative,
    Probe,
)
from numdev.operations.attention.explain.mistakes import scales
from numdev.operations.row_places_in_words import in_words, phrases_for_other_lengths

CUT = 10.0  # how much smaller the residual must be against the alternative's reference
# The least cut in the format of a finding, where a finer one has found its cause
SHRINKS = 1.01
FLOORS, BASELINES = 10.0, 2.0  # from where on a search is worth it
# Alternatives with a residual within this factor of the best one's are not told apart
ALIKE = 2.0


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """What one head of a kernel seems to compute instead."""

    cause: str  # a clause: `the causal mask is ignored`
    cut: float  # how many times smaller the residual is against that
    # Of the rms error in the format that is judged: what goes with it
    share: float | None = None
    # That of the run in which the cut was found, if another
    cut_format: str | None = None
    instances: tuple[tuple[str, ...], ...] = ()
    """Each alternative of the cause, and what it is an instance of in calls of other
    lengths."""
    alternatives: tuple[Alternative, ...] = field(default=(), repr=False, compare=False)
    """What was found, for other calls of the same kernel."""
    words: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """The same of a gradient or the log-sum-exp: its causes, in words."""

    @property
    def fields(self) -> dict[str, object]:
        """Returns the fields of a report's row that describe the suspicion, by name:
        `suspicion`, `suspicion_cut`, `suspicion_share`, `suspicion_format`,
        `suspicion_of`."""
        return {
            "suspicion": self.cause,
            "suspicion_cut": self.cut,
            "suspicion_share": self.share,
            "suspicion_format": self.cut_format,
            "suspicion_of": self.instances,
        }


def far_off(metrics: Metrics) -> bool:
    """Whether a search for a mistake is worth it: the `floor_ratio` is at least FLOORS,
    and the `baseline_ratio`, if there is one, at least BASELINES. False without a
    `floor_ratio`."""
    floors, baselines = metrics.get("floor_ratio"), metrics.get("baseline_ratio")
    return (
        floors is not None
        and floors >= FLOORS
        and (baselines is None or baselines >= BASELINES)
    )


def suspect(
    case: AttentionCase,
    out: Tensor,
    exact: Reference,
    heads: Sequence[int],
    far: Sequence[int],
    rows: Tensor | None = None,
    first: Tensor | None = None,
    hints: Sequence[Alternative] | None = None,
) -> dict[int, Suspicion]:
    """Returns what heads compute instead, by query head, for those heads of `far` that a
    named mistake explains; empty where none explains any.

    `case` and `out` [B, H, q_len, v_dim] are whole. `exact` is the reference of the query
    heads `heads`, in the query rows `rows` (indices; None: in all). `far` is a selection
    of `heads`. `first`: what the kernel returned of the same inputs in a coarser format,
    whose residual has to shrink too. `hints`: mistakes of other calls, which alone are
    tried; None: all mistakes are tried. A cause is sought for at most MAX_HEADS heads
    together, those of `far` first (right ones speak against wrong causes), then for those
    of `far`, then for the worst, then for its worst batch entry alone where nearly all of
    the error is there. The first of these that has a cause decides."""
    case = dataclasses.replace(case, grad_out=None)
    whole = exact.out if len(heads) == case.heads and rows is None else None
    errors = _row_error_norms(out[:, list(heads)], exact, rows)
    sizes = dict(zip(heads, errors.sum(dim=(0, 2)).tolist(), strict=True))
    order = sorted(heads, key=lambda h: (h not in far, -sizes[h]))
    room = max(1, min(MAX_HEADS, HEAD_KEYS // case.kv_len))
    worst = [h for h in order if h in far]
    if not worst:
        return {}
    tried: list[tuple[tuple[int, ...], int | None]]
    tried = [
        (c, None) for c in (tuple(order[:room]), tuple(worst[:room]), tuple(worst[:1]))
    ]
    entries = errors.sum(dim=(1, 2))
    if len(entries) > 1 and float(entries.max()) > ALONE * float(entries.sum()):
        tried.append((tuple(worst[:1]), int(entries.argmax())))
    for chosen, entry in dict.fromkeys(tried):
        at = errors[:, [heads.index(h) for h in chosen]]
        probe = Probe.of(case, out, list(chosen), at, whole, entry=entry)
        explaining = _explaining_alternatives(probe, hints)
        if not explaining:
            continue
        of_head = partial(
            _suspect_head,
            explaining=explaining,
            case=case,
            out=out,
            first=first,
            errors=errors,
            whole=whole,
            heads=heads,
            rows=rows,
            entry=entry,
        )
        return {head: by for head in worst if (by := of_head(head)) is not None}
    return {}


ALONE = 0.98  # of the error: as good as all of it
SURE = 1000.0  # times nearer: what is right leaves the rounding of float32 alone


def _suspect_head(
    head: int,
    explaining: Sequence[tuple[Alternative, float]],
    case: AttentionCase,
    out: Tensor,
    first: Tensor | None,
    errors: Tensor,
    whole: Tensor | None,
    heads: Sequence[int],
    rows: Tensor | None,
    entry: int | None,
) -> Suspicion | None:
    """Returns what one head that is far off computes instead: the best alternative of
    `explaining` (at least one). None where this is not CUT times nearer than attention in
    this head, or where it does not make the residual in `first` more than SHRINKS times
    smaller. `errors` [B, len(heads), q_len]: sizes of rows' errors; `first`: the output
    in a coarser format, or None; `entry`: the batch entry looked at alone, or None; other
    arguments as of `suspect`."""
    row_errors, best = errors[:, [heads.index(head)]], explaining[0][0]
    probe = Probe.of(case, out, [head], row_errors, whole, entry=entry)
    cut = probe.cut(best.answer(probe))
    judged = out if first is None else first
    coarse = Probe.of(case, judged, [head], row_errors, whole, entry=entry, every=True)
    answer = best.answer(coarse)
    if cut < CUT or (first is not None and coarse.cut(answer) <= SHRINKS):
        return None
    zero = (out[:, head] == 0).all(dim=-1)
    wrong = zero & (row_errors[:, 0] > 0) if rows is None else zero
    places = [] if not bool(wrong.any()) else _describe_rows(wrong.any(dim=0))
    which = ["in whole heads"] if bool(zero.all()) else places or [""]
    alone = "" if entry is None else f" (in batch entry {entry} alone)"

    def words(cause: str, place: str = which[0]) -> str:
        return cause.replace(SOMEWHERE, place) + alone

    def mechanisms(x: Alternative) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(words(y, z) for y in (x.cause, *x.also) for z in which)
        )

    named = tuple(x for x, _ in explaining)
    return Suspicion(
        cause=words(", or ".join(x.cause for x in named)),
        cut=cut,
        share=coarse.share(answer),
        cut_format=None if first is None else format_of(out.dtype).name,
        instances=tuple(map(mechanisms, named)),
        alternatives=named,
    )


def _describe_rows(wrong: Tensor) -> list[str]:
    """Returns phrases for the query rows that the mask `wrong`, bool [q_len], has (at
    least one): `in rows 64 to 99`, then phrases that hold in calls of other lengths, as
    `in all rows from 64 on`."""
    general = phrases_for_other_lengths(wrong[None], None)
    phrases = (in_words(wrong.nonzero()[:, 0]), *general)
    return [f"in {words}" for words in dict.fromkeys(phrases)]


def _explaining_alternatives(
    probe: Probe, hints: Sequence[Alternative] | None = None
) -> list[tuple[Alternative, float]]:
    """Returns the alternatives that explain the probe, at most three, the best first,
    each with how many times smaller it makes the residual; empty where none reaches CUT.
    Several wrong scales count as one. Without hints, estimated factors are tried too,
    unless a single other alternative explains nearly everything. `hints`: alternatives of
    other calls, which alone are tried; None: all."""
    tried: Iterable[Alternative] = alternatives(probe)
    if hints is not None:
        general = {hint.cause: hint for hint in hints if hint.general}
        words = {cause for hint in hints for cause in (hint.cause, *hint.also)} - {
            *general
        }
        tried = (a for a in tried if not words.isdisjoint((a.cause, *a.also)))
        tried = (*general.values(), *tried)
    cuts = [(a, probe.cut(a.answer(probe))) for a in tried]
    named = sorted((x for x in cuts if x[1] >= CUT), key=lambda x: -x[1])
    alike = [x for x in named if x[1] >= named[0][1] / ALIKE][:3]
    # Nothing known explains it, or several do, or one that leaves more than a right one
    # would.
    open_ = len(alike) != 1 or alike[0][1] < SURE
    if open_ and hints is None:
        fits = sorted((x for x in estimated(probe) if x[1] >= CUT), key=lambda x: -x[1])
        least = ALIKE * alike[0][1] if alike else CUT
        if fits and fits[0][1] >= least:
            alike = [x for x in fits if x[1] >= fits[0][1] / ALIKE][:3]
    return _merge_scales(alike, probe.case)


def _merge_scales(
    alike: Sequence[tuple[Alternative, float]], case: AttentionCase
) -> list[tuple[Alternative, float]]:
    """Returns `alike` unchanged, unless it has several alternatives that are all wrong
    scales. These become one entry that names all of them, since the factor is unknown
    then."""
    factors = {cause: changes["scale"] for cause, changes in scales(case)}
    wrong = [x.cause for x, _ in alike if x.cause in factors]
    if len(wrong) < 2 or len(wrong) < len(alike):
        return list(alike)
    larger = all(abs(factors[cause]) > abs(case.scale) for cause in wrong)
    how = "too large" if larger else "wrong"
    cause = f"the scale is {how}; the data fit equally well that {', or '.join(wrong)}"
    return [(alike[0][0]._replace(cause=cause), alike[0][1])]


def _row_error_norms(out: Tensor, exact: Reference, rows: Tensor | None) -> Tensor:
    """Returns ||o - r|| of every row, [B, H, q_len], over finite elements; 0 in rows that
    see no key. `rows`: indices of the query rows that `exact` has; other rows get 0.
    None: `exact` has all."""
    if rows is not None:
        sampled = _row_error_norms(out[:, :, rows], exact, None)
        return sampled.new_zeros(out.shape[:3]).index_copy_(2, rows, sampled)
    error = out.double() - exact.out
    usable = finite(error) & ~exact.empty[..., None]
    sizes: Tensor = torch.where(usable, error, 0.0).norm(dim=-1)
    return sizes
