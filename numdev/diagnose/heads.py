"""Which heads meet which conditions of the chain from a tied maximum to a wrong dW_Q (Qiu
& Yao, arXiv 2510.04212; docs/derivations.md), in which order they are named, and what the
answer says.

A number that is null meets no condition and lacks none. Heads are ordered by dW_Q's
error, not by how many conditions they meet: a condition is a lead, and that error is what
does harm. No sentence says what will become of a training run: neither the paper nor
these numbers show that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

from numdev.diagnose.report import CureRow, HeadRow, Ranked
from numdev.grouping import grouped
from numdev.report.numbers import percent, si

# Share of rows. Ties err by a quarter of an ulp on average; in fewer rows than these that
# is lost in the scatter of some hundred rows, 0.3 ulp / sqrt(rows).
TIED = 0.05
# Share of probability at powers of two; by chance, in bfloat16, it is 1 / 128
POWERS = 0.5
ONE_SIGNED = 0.75  # share of features: well above one half, which is chance for two keys
BIASED = TIED / 4  # ulps, to either side: what the fewest ties that count would make
T = 4.0  # a t over 16 blocks that chance gives one head in 860
# Running sum over rms sqrt(rows); one random walk in eight thousand gets as far
RUN = 4.0
# Share of energy in one direction: the errors of a few hundred rows of one sign then add
# up along it to tens of times what errors of random sign leave.
SIMILAR = 0.1
# |dW_Q error| / |dW_Q|: rounding dW_Q itself to bfloat16 may change it as much
MOVED = 2.0**-8
# Spectral norm over the layer's median: untrained heads differ by a few per cent
LOUDER = 1.5
HALF = 0.5  # what a cure has to leave at most
# |dW_Q error| of a head over |dW_Q| of its layer: half a gradient, from rounding
DROWNED = 0.5
NAMED = 4  # cures that are named


# --- the conditions -------------------------------------------------------------------

TIES, EXACT, SIGN = "tied maxima", "weights at powers of two", "V of one sign"
OUTPUT, DELTA = "biased output", "delta error of one sign"
ALIKE, WRONG, NORM = "similar terms of dW_Q", "dW_Q moved", "large spectral norm"
# In the order of the chain. A condition is met where in any line every number reaches its
# limit.
CONDITIONS: Mapping[str, tuple[Mapping[str, float], ...]] = {
    TIES: ({"tied": TIED}, {"ones": TIED}),
    EXACT: ({"powers": POWERS},),
    SIGN: ({"one_signed": ONE_SIGNED},),
    OUTPUT: ({"pv_bias": BIASED, "pv_t": T}, {"out_bias": BIASED, "out_t": T}),
    DELTA: ({"delta_t": T, "delta_run": RUN},),
    ALIKE: ({"similarity": SIMILAR},),
    WRONG: ({"moved": MOVED},),
    NORM: ({"spectral_ratio": LOUDER},),
}


def meets(head: HeadRow, condition: str) -> bool | None:
    """Whether a head meets a condition. None where that could not be measured: no line of
    it has a number, or one lacks a number and those it has fall short."""
    verdicts = []
    for limits in CONDITIONS[condition]:
        numbers = {name: getattr(head, name) for name in limits}
        reached = [abs(x) >= limits[name] for name, x in numbers.items() if x is not None]
        if reached and (all(reached) or len(reached) == len(limits)):
            verdicts.append(all(reached))
    return any(verdicts) if verdicts else None


# --- the order ------------------------------------------------------------------------


def ranked(heads: Sequence[HeadRow], cures: Sequence[CureRow]) -> tuple[Ranked, ...]:
    """Every head, the one that moves its layer's dW_Q most first.

    The score is |dW_Q error| of a head over |dW_Q| of its layer, the root of the sum of
    its heads' squares; else |delta's mean error|; else 0. Heads whose W_Q is not known
    come after those whose is. Equals are in the order of checkpoint, layer, call and
    head. `heads` are all heads of their calls; `cures` may be of some of them or none."""
    layers: dict[tuple[str, str], list[float]] = {}
    for head in heads:
        layers.setdefault((head.checkpoint, head.case), []).append(head.dw_q_norm or 0.0)

    def score(head: HeadRow) -> tuple[bool, float]:
        error, norm = head.dw_q_error, head.dw_q_norm
        layer = math.hypot(*layers[head.checkpoint, head.case])
        if error is None or norm is None:
            return True, _mean_of(head)
        return False, error * norm / layer if layer > 0 else _mean_of(head)

    places = sorted(
        heads, key=lambda h: (h.checkpoint, h.layer or 0, h.case, h.call, h.head)
    )
    places.sort(key=lambda h: (score(h)[0], -score(h)[1]))  # equals stay in this order
    ordered, of_head = [], grouped(cures, attrgetter("key"))
    for rank, head in enumerate(places, start=1):
        verdicts = {name: meets(head, name) for name in CONDITIONS}
        met, missing = (
            tuple(n for n, v in verdicts.items() if v is x) for x in (True, False)
        )
        ordered.append(
            Ranked(
                **head.place,
                rank=rank,
                score=score(head)[1],
                conditions=met,
                missing=missing,
                cured_by=_cured_by(of_head.get(head.key, ())),
            )
        )
    return tuple(ordered)


def _mean_of(head: HeadRow) -> float:
    """|Mean error of delta|; 0 where it is not known."""
    return abs(head.delta_mean or 0.0)


def at_fault(ranked: Ranked) -> bool:
    """Whether a head's errors do not cancel, and reach dW_Q where that is known."""
    return DELTA in ranked.conditions and WRONG not in ranked.missing


def harms(ranked: Ranked) -> bool:
    """Whether a head is at fault, or moves half of its layer's dW_Q however its errors
    lie."""
    return at_fault(ranked) or ranked.score >= DROWNED


def judged(ranked: Ranked, condition: str = DELTA) -> bool:
    """Whether it is known if a head meets a condition: that its error of delta has one
    sign."""
    return condition in (*ranked.conditions, *ranked.missing)


def leading(ranking: Sequence[Ranked]) -> Ranked:
    """The head that an answer is about: the first whose errors do not cancel, else the
    first of which that is known, else the first."""
    return next(
        (r for test in (at_fault, judged) for r in ranking if test(r)), ranking[0]
    )


def shares(cure: CureRow, without: CureRow) -> Mapping[str, float]:
    """The shares that a cure leaves, of the error of dW_Q, and of delta's mean error if
    that had one sign. None where the cure gives NaN or infinity."""
    pairs = {"dW_Q's error": (cure.dw_q_error, without.dw_q_error)}
    if without.delta_t is not None and abs(without.delta_t) >= T:
        pairs["delta's mean error"] = (cure.delta_mean, without.delta_mean)
    return {
        what: abs(value) / abs(of)
        for what, (value, of) in pairs.items()
        if value is not None and of and not cure.nonfinite
    }


def _cured_by(rows: Sequence[CureRow]) -> tuple[str, ...]:
    without = next((row for row in rows if row.cure == "none"), None)
    if without is None:
        return ()
    left = [
        (min(shares(r, without).values(), default=1.0), r.cure)
        for r in rows
        if r != without
    ]
    return tuple(name for share, name in sorted(left) if share < HALF)


# --- the words ------------------------------------------------------------------------


def answer(
    ranking: Sequence[Ranked],
    heads: Sequence[HeadRow],
    cures: Sequence[CureRow],
) -> tuple[str, ...]:
    """The first sentences of a report. `heads` are those that were ranked."""
    if not ranking:
        return ("Nothing was diagnosed: no attention call was measured.",)
    first = leading(ranking)
    rows = {head.key: head for head in heads}
    pairs, row = [(r, rows[r.key]) for r in ranking], rows[first.key]
    known = [head for r, head in pairs if judged(r)]
    t, sums = si(row.delta_t), percent(row.ds_row_sum)
    said = []
    if at_fault(first):
        # A head that attends to one key has P at 1 without any tie: then only a biased
        # output shows that rounding P V to one side is where it begins.
        peaked = {EXACT, OUTPUT} <= set(first.conditions)
        forward = (TIES in first.conditions or peaked) and SIGN not in first.missing
        said = [
            f"{first.brief}: rounding shifts its delta to one side, by "
            f"{percent(row.delta_mean, sign=True)} of what it is summed from (t = "
            f"{t}); that "
            f"alone moves its dW_Q by {percent(row.moved)}. Rank {first.rank} of "
            f"{len(ranking)}; "
            f"heads at fault: {sum(map(at_fault, ranking))}.",
            f"{'It begins in forward' if forward else 'Not the published cause'}: "
            f"{_listed(first.conditions)}; missing conditions: "
            f"{_listed(first.missing)}; rows of "
            f"dS sum to {sums} of their size.",
            *_cure(first, cures),
        ]
    elif first.score >= DROWNED and judged(first, WRONG):
        loud = sum(r.score >= DROWNED and judged(r, WRONG) for r in ranking)
        said = [
            f"{first.brief}: rounding changes its layer's dW_Q by "
            f"{percent(first.score)} ({loud} "
            f"of {len(ranking)} heads ≥ {percent(DROWNED)}); the errors have no "
            "consistent sign "
            f"(t = {t}); rows of dS sum to {sums} of their size, not to 0.",
            *_cure(first, cures),
        ]
    elif known:
        shifted = [head for head in known if meets(head, DELTA)]
        row = max(shifted or known, key=lambda head: (head.moved or 0.0, _mean_of(head)))
        top = max(known, key=lambda head: abs(head.delta_t or 0.0))
        said = [
            f"No head of {len(known)} is at fault: delta's error has one sign in "
            f"{len(shifted)} of "
            f"{len(known)} heads (largest |t|: {si(abs(top.delta_t or 0.0))}, "
            f"{top.brief}); it "
            f"moves a dW_Q by at most {percent(row.moved)} ({row.brief}, mean error "
            f"{percent(row.delta_mean, sign=True)})."
        ]
    if len(known) < len(ranking):
        unknown = next(head for r, head in pairs if not judged(r))
        why = (
            unknown.nulls.get("delta_mean")
            or unknown.nulls.get("delta_t")
            or "not measured"
        )
        count = len(ranking) - len(known)
        said.append(
            f"Sign of delta's error not known in {count} of {len(ranking)}: {why}."
        )
    return tuple(said)


def _cure(first: Ranked, cures: Sequence[CureRow]) -> list[str]:
    rows = {cure.cure: cure for cure in cures if cure.key == first.key}
    if not rows:
        return []
    broken = (
        f"NaN or infinity: {_listed([r.cure for r in rows.values() if r.nonfinite])}."
    )
    if not first.cured_by:
        return [f"No cure that was tried takes half of it away: see the table. {broken}"]
    best, *also = first.cured_by[:NAMED]
    without, row = rows["none"], rows[best]
    share, what = min((share, what) for what, share in shares(row, without).items())
    return [
        f"Best cure on the same inputs: {best} leaves {percent(share)} of {what}; "
        "dW_Q is then off "
        f"by {percent(row.dw_q_error)}, without it by "
        f"{percent(without.dw_q_error)}. Below half "
        f"too: {_listed(also)}. {broken}"
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
