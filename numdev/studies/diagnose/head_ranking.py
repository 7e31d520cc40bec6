"""Ranks heads by what their rounding errors do, says which conditions of the chain from a
tied maximum to a wrong dW_Q each meets (Qiu & Yao, arXiv 2510.04212;
docs/derivations.md), and writes the answer.

A number that is null meets no condition and lacks none. Heads are ordered by dW_Q's
error, not by how many conditions they meet: a condition is a lead, and that error is what
does harm. No sentence says what will become of a training run: neither the paper nor
these numbers show that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

from numdev.grouping import grouped
from numdev.report.number_text import percent, si
from numdev.studies.diagnose.report import CureRow, HeadRow, Ranked

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


def meets_condition(head: HeadRow, condition: str) -> bool | None:
    """Whether a head meets a condition, one of CONDITIONS (another raises KeyError). It
    does where in one of the condition's lines all numbers that are not None, at least
    one, reach their limits in size. It does not where it meets no line, and in a line all
    numbers are there. None where neither holds."""
    verdicts = []
    for limits in CONDITIONS[condition]:
        numbers = {name: getattr(head, name) for name in limits}
        reached = [abs(x) >= limits[name] for name, x in numbers.items() if x is not None]
        if reached and (all(reached) or len(reached) == len(limits)):
            verdicts.append(all(reached))
    return any(verdicts) if verdicts else None


# --- the order ------------------------------------------------------------------------


def rank_heads(heads: Sequence[HeadRow], cures: Sequence[CureRow]) -> tuple[Ranked, ...]:
    """Returns every head, the one that moves its layer's dW_Q most first. The score is
    |dW_Q error| of a head over |dW_Q| of its layer, the root of the sum of the squares of
    all heads of its call. Where the head's dW_Q is unknown, or |dW_Q| of its layer is 0,
    it is |delta's mean error|, or 0 without one. Heads with an unknown dW_Q come last.
    Equals are in the order of checkpoint, layer (None as 0), case, call and head.
    `heads`: all heads of their calls; `cures`: rows of some heads, or none."""
    layers: dict[tuple[str, str], list[float]] = {}
    for head in heads:
        layers.setdefault((head.checkpoint, head.case), []).append(head.dw_q_norm or 0.0)

    def score(head: HeadRow) -> tuple[bool, float]:
        """Returns whether the error of the head's dW_Q is unknown, and the head's
        score."""
        error, norm = head.dw_q_error, head.dw_q_norm
        layer = math.hypot(*layers[head.checkpoint, head.case])
        if error is None or norm is None:
            return True, _delta_error_size(head)
        return False, error * norm / layer if layer > 0 else _delta_error_size(head)

    ordered = sorted(
        heads, key=lambda h: (h.checkpoint, h.layer or 0, h.case, h.call, h.head)
    )
    ordered.sort(key=lambda h: (score(h)[0], -score(h)[1]))  # equals stay in this order
    cures_of_head = grouped(cures, attrgetter("key"))
    ranking = []
    for rank, head in enumerate(ordered, start=1):
        verdicts = {name: meets_condition(head, name) for name in CONDITIONS}
        ranking.append(
            Ranked(
                **head.place,
                rank=rank,
                score=score(head)[1],
                conditions=tuple(n for n, is_met in verdicts.items() if is_met),
                missing=tuple(n for n, is_met in verdicts.items() if is_met is False),
                cured_by=_helpful_cures(cures_of_head.get(head.key, ())),
            )
        )
    return tuple(ranking)


def _delta_error_size(head: HeadRow) -> float:
    """Returns |mean error of delta|; 0 where that is None."""
    return abs(head.delta_mean or 0.0)


def is_at_fault(ranked: Ranked) -> bool:
    """Whether a head's errors of delta have one sign, so that they do not cancel, and
    move its dW_Q; where it is unknown whether they move it, the sign alone decides."""
    return DELTA in ranked.conditions and WRONG not in ranked.missing


def does_harm(ranked: Ranked) -> bool:
    """Whether a head is at fault, or its score is DROWNED or more, whatever the signs of
    its errors. Where its dW_Q is known, rounding then changes half of its layer's."""
    return is_at_fault(ranked) or ranked.score >= DROWNED


def is_judged(ranked: Ranked, condition: str = DELTA) -> bool:
    """Whether a condition could be measured at a head, met or not. `condition`: one of
    CONDITIONS; by default that its error of delta has one sign."""
    return condition in (*ranked.conditions, *ranked.missing)


def leading_head(ranking: Sequence[Ranked]) -> Ranked:
    """Returns the head that an answer is about: in the order of the ranking the first at
    fault; without one the first whose error of delta could be judged; without one the
    first. `ranking`: at least one."""
    candidates = list(filter(is_at_fault, ranking)) or list(filter(is_judged, ranking))
    return candidates[0] if candidates else ranking[0]


def shares_left(cure: CureRow, without: CureRow) -> Mapping[str, float]:
    """Returns by name the shares that a cure leaves: of the error of dW_Q (`dW_Q's
    error`), and of delta's mean error (`delta's mean error`) if that had one sign, by |t|
    of at least T. A share that is unknown or divides by zero is left out. Empty where the
    cure gives NaN or infinity. `without`: the row of the attention as it is."""
    pairs = {"dW_Q's error": (cure.dw_q_error, without.dw_q_error)}
    if without.delta_t is not None and abs(without.delta_t) >= T:
        pairs["delta's mean error"] = (cure.delta_mean, without.delta_mean)
    return {
        what: abs(value) / abs(uncured)
        for what, (value, uncured) in pairs.items()
        if value is not None and uncured and not cure.nonfinite
    }


def _helpful_cures(rows: Sequence[CureRow]) -> tuple[str, ...]:
    """Returns the cures of one head that leave less than HALF of an error, best first.
    Empty where the rows lack that of the attention as it is."""
    without = next((row for row in rows if row.cure == "none"), None)
    if without is None:
        return ()
    left = [
        (min(shares_left(r, without).values(), default=1.0), r.cure)
        for r in rows
        if r != without
    ]
    return tuple(name for share, name in sorted(left) if share < HALF)


# --- the words ------------------------------------------------------------------------


def answer_sentences(
    ranking: Sequence[Ranked],
    heads: Sequence[HeadRow],
    cures: Sequence[CureRow],
) -> tuple[str, ...]:
    """Returns the first sentences of a report. They are on the heads at fault with the
    best cure. Without one they are on the leading head, where rounding changes half of
    its layer's dW_Q; else that no judged head is at fault. A sentence follows on heads
    that could not be judged. Without a ranking it is one sentence, that nothing was
    diagnosed. `heads`: the rows of the ranked heads."""
    if not ranking:
        return ("Nothing was diagnosed: no attention call was measured.",)
    first = leading_head(ranking)
    rows = {head.key: head for head in heads}
    judged_rows = [rows[r.key] for r in ranking if is_judged(r)]
    if is_at_fault(first):
        sentences = [
            *_fault_sentences(first, rows[first.key], ranking),
            *_cure_sentences(first, cures),
        ]
    elif _has_half_changed(first):
        sentences = [
            *_drowned_sentences(first, rows[first.key], ranking),
            *_cure_sentences(first, cures),
        ]
    elif judged_rows:
        sentences = [*_no_fault_sentences(judged_rows, len(ranking))]
    else:
        sentences = []
    if len(judged_rows) < len(ranking):
        sentences.append(
            _not_judged_sentence(
                [rows[r.key] for r in ranking if not is_judged(r)], ranking
            )
        )
    return tuple(sentences)


def _fault_sentences(
    first: Ranked, row: HeadRow, ranking: Sequence[Ranked]
) -> tuple[str, ...]:
    """Returns four strings: how many heads are at fault; what the errors of `first` do;
    how it ranks; which conditions of the chain hold. `row`: the numbers of `first`."""
    # A head that attends to one key has P at 1 without any tie: then only a biased
    # output shows that rounding P V to one side is where it begins.
    peaked = {EXACT, OUTPUT} <= set(first.conditions)
    forward = (TIES in first.conditions or peaked) and SIGN not in first.missing
    origin = "It begins in forward" if forward else "Not the published cause"
    count = sum(map(is_at_fault, ranking))
    verdict = (
        f"{count} of {len(ranking)} heads at fault: {first.brief}'s rounding errors have "
        f"one sign, and move its dW_Q by {percent(row.moved)}."
    )
    effect = (
        f"{first.brief} is at fault: rounding shifts its delta by "
        f"{percent(row.delta_mean, sign=True)} (t = {si(row.delta_t)}), and so its dW_Q "
        f"by {percent(row.moved)}."
    )
    rank = (
        f"The shift is to one side, of what delta is summed from. Rank {first.rank} of "
        f"{len(ranking)}."
    )
    cause = (
        f"{origin}: {_names_in_words(first.conditions)}; "
        f"missing conditions: {_names_in_words(first.missing)}; "
        f"rows of dS sum to {percent(row.ds_row_sum)} of their size."
    )
    return verdict, effect, rank, cause


def is_faultless(ranking: Sequence[Ranked]) -> bool:
    """Whether every head was judged, none is at fault, and rounding changes half of no
    layer's dW_Q; False without a head."""
    off = any(is_at_fault(ranked) or _has_half_changed(ranked) for ranked in ranking)
    return bool(ranking) and all(map(is_judged, ranking)) and not off


def _has_half_changed(ranked: Ranked) -> bool:
    """Whether a head's W_Q is known, and rounding changes DROWNED, half, or more of the
    dW_Q of its layer."""
    return ranked.score >= DROWNED and is_judged(ranked, WRONG)


def _drowned_sentences(
    first: Ranked, row: HeadRow, ranking: Sequence[Ranked]
) -> tuple[str, str]:
    """Returns two sentences: how many heads lose half a gradient to rounding, and by how
    much `first` changes its layer's dW_Q; then the numbers which show that its errors
    have both signs. `row`: the numbers of `first`."""
    return (
        f"{sum(map(_has_half_changed, ranking))} of {len(ranking)} heads lose half a "
        f"gradient to rounding: {first.brief} changes its layer's dW_Q by "
        f"{percent(first.score)}.",
        f"The errors have no consistent sign (t = {si(row.delta_t)}); "
        f"rows of dS sum to {percent(row.ds_row_sum)} of their size, not to 0.",
    )


def _no_fault_sentences(judged_rows: Sequence[HeadRow], heads: int) -> tuple[str, str]:
    """Returns how many heads are not at fault; then the largest |t| of delta's error, and
    how far that error moves a dW_Q at most. `judged_rows`: rows of the heads that could
    be judged, at least one; `heads`: how many heads there are."""
    count = len(judged_rows)
    start = "Nothing wrong: no head of" if count == heads else "No judged head of"
    shifted = [head for head in judged_rows if meets_condition(head, DELTA)]
    worst = max(
        shifted or judged_rows,
        key=lambda head: (head.moved or 0.0, _delta_error_size(head)),
    )
    top = max(judged_rows, key=lambda head: abs(head.delta_t or 0.0))
    return (
        f"{start} {count} is at fault; delta's error has one sign in {len(shifted)} of "
        "them.",
        f"Largest |t|: {si(abs(top.delta_t or 0.0))} ({top.brief}). Delta's error moves "
        f"a dW_Q by at most {percent(worst.moved)} ({worst.brief}, mean error "
        f"{percent(worst.delta_mean, sign=True)}).",
    )


def _not_judged_sentence(heads: Sequence[HeadRow], ranking: Sequence[Ranked]) -> str:
    """Returns how many of the ranked heads have no known sign of delta's error, with the
    reason of the first: `NOT JUDGED: 2 of 72 heads, ...`. `heads`: those heads, at least
    one."""
    nulls = heads[0].nulls
    why = nulls.get("delta_mean") or nulls.get("delta_t") or "not measured"
    count = f"{len(heads)} of {len(ranking)} heads"
    return f"NOT JUDGED: {count}, whose sign of delta's error is not known: {why}."


def _cure_sentences(first: Ranked, cures: Sequence[CureRow]) -> list[str]:
    """Returns a list of one string: what the best cure of the head `first` leaves of its
    error, or that none helps. Empty where no cure was run."""
    rows = {cure.cure: cure for cure in cures if cure.key == first.key}
    if not rows:
        return []
    nonfinite = [name for name, row in rows.items() if row.nonfinite]
    broken = f"NaN or infinity: {_names_in_words(nonfinite)}."
    if not first.cured_by:
        return [f"No cure that was tried takes half of it away: see the table. {broken}"]
    best, *also = first.cured_by[:NAMED]
    without, row = rows["none"], rows[best]
    share, what = min((share, what) for what, share in shares_left(row, without).items())
    return [
        f"Best cure on the same inputs: {best} leaves {percent(share)} of {what}; "
        f"dW_Q is then off by {percent(row.dw_q_error)}, "
        f"without it by {percent(without.dw_q_error)}. "
        f"Below half too: {_names_in_words(also)}. {broken}"
    ]


def _names_in_words(names: Sequence[str]) -> str:
    """Returns names joined by commas; `none` without a name."""
    return ", ".join(names) or "none"
