"""Which heads meet which conditions of the chain from a tied maximum to a wrong dW_Q (Qiu & Yao,
arXiv 2510.04212; docs/method.md), in which order they are named, and what is said of them.

What is null meets no condition and lacks none. Heads are ordered by dW_Q's error, not by how many
conditions they meet: a condition is a lead, and that error is what does harm. No sentence says what
will become of a training run: neither the paper nor these numbers show that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from numdev.diagnose.report import Bias, CureRow, DeltaError, HeadRow, KernelRow, Place, Ranked
from numdev.report.numbers import NONE

# Share of rows. Ties err by a quarter of an ulp on average; in fewer rows than these that is lost
# in the scatter of some hundred rows, 0.3 ulp / sqrt(rows).
TIED = 0.05
POWERS = 0.5  # share of probability at powers of two; by chance, in bfloat16, it is 1 / 128
ONE_SIGNED = 0.75  # share of features: well above one half, which is chance for two keys
BIASED = TIED / 4  # ulps, to either side: what the fewest ties that count would make
T = 4.0  # a t that chance gives one head in sixteen thousand, and so hardly any model
RUN = 4.0  # running sum over rms sqrt(rows); one random walk in eight thousand gets as far
# Share of energy in one direction: the errors of a few hundred rows of one sign then add up along
# it to tens of times what errors of random sign leave.
SIMILAR = 0.1
MOVED = 2.0**-8  # |dW_Q error| / |dW_Q|: rounding dW_Q itself to bfloat16 may change it as much
LOUDER = 1.5  # spectral norm over the layer's median: untrained heads differ by a few per cent
HALF = 0.5  # what a cure has to leave at most
DROWNED = 0.5  # |dW_Q error| of a head over |dW_Q| of its layer: half a gradient, from rounding
NAMED = 3  # further heads that are named
MEAN = "delta's mean error"
CONDITIONS = (
    *("tied maxima", "weights at powers of two", "V of one sign", "biased output"),
    *("delta error of one sign", "similar terms of dW_Q", "dW_Q moved", "large spectral norm"),
)
"""In the order of the chain."""
TIES, EXACT, SIGN, OUTPUT, DELTA, ALIKE, WRONG, NORM = CONDITIONS


def used_delta(head: HeadRow) -> DeltaError | None:
    """The error of delta by the formula that the attention uses."""
    return head.delta[0] if head.delta else None


def mean_of(head: HeadRow) -> float:
    """|Mean error of delta|; 0 where it is not known."""
    used = used_delta(head)
    return 0.0 if used is None else abs(used.mean or 0.0)


def moved(head: HeadRow) -> float | None:
    """|dW_Q error| / |dW_Q| of the head, of which the error of delta is the cause: the part of it
    that its own dP and P do not share, where that was measured. None where W_Q is not known."""
    used = used_delta(head)
    whole = None if used is None else used.dw_q
    return whole if head.dw_q_unbalanced is None else head.dw_q_unbalanced


# --- the conditions ------------------------------------------------------------------------------


def _known(judge: Callable[[Iterable[bool]], bool], *verdicts: bool | None) -> bool | None:
    """`all` or `any` of the verdicts that are known; None where none is."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return judge(known) if known else None


def _beyond(limit: float, *values: float | None) -> bool | None:
    """Whether the largest is; None where none is known."""
    return _known(any, *(None if x is None else abs(x) >= limit for x in values))


def _one_way(head: HeadRow) -> bool | None:
    """None too without a t, in rows so few that no running sum gets far either."""
    used = used_delta(head)
    if used is None or used.mean is None:
        return None
    if used.rms == 0:
        return False
    far = _beyond(RUN, used.run)
    return None if used.t is None and not far else _known(all, _beyond(T, used.t), far)


def _verdicts(head: HeadRow) -> dict[str, bool | None]:
    """Whether a head meets each condition; None where that could not be measured."""
    tests = (
        _beyond(TIED, head.tied, head.ones),
        _beyond(POWERS, head.powers),
        _beyond(ONE_SIGNED, head.one_signed),
        _known(any, *(_known(all, _beyond(BIASED, b.outward), _beyond(T, b.t))
                      for b in (head.pv, head.out))),
        _one_way(head),
        _beyond(SIMILAR, head.similarity),
        _beyond(MOVED, moved(head)),
        _beyond(LOUDER, head.spectral_ratio),
    )  # fmt: skip
    return dict(zip(CONDITIONS, tests, strict=True))


# --- the order -----------------------------------------------------------------------------------


def ranked(heads: Sequence[HeadRow], cures: Sequence[CureRow]) -> tuple[Ranked, ...]:
    """Every head, the one that moves its layer's dW_Q most first.

    The score is |dW_Q error| of a head over |dW_Q| of its layer, the root of the sum of its heads'
    squares; else |delta's mean error|; else 0. Heads whose W_Q is not known come after those whose
    is. Equals are in the order of checkpoint, layer, call and head. `heads` are all heads of their
    calls. `cures` are rows of the same heads, and may be of some of them or none; where one gives
    NaN or infinity it is no cure.
    """
    layers: dict[tuple[str, str], list[float]] = {}
    for head in heads:
        layers.setdefault((head.checkpoint, head.case), []).append(head.dw_q_norm or 0.0)

    def score(head: HeadRow) -> tuple[bool, float]:
        error, norm = head.dw_q_error, head.dw_q_norm
        layer = math.hypot(*layers[head.checkpoint, head.case])
        if error is None or norm is None:
            return True, mean_of(head)
        return False, error * norm / layer if layer > 0 else mean_of(head)

    def order(head: HeadRow) -> tuple[bool, float, str, int, str, int, int]:
        unknown, value = score(head)
        layer = -1 if head.layer is None else head.layer
        return unknown, -value, head.checkpoint, layer, head.case, head.call, head.head

    ordered = []
    for rank, head in enumerate(sorted(heads, key=order), start=1):
        verdicts = _verdicts(head)
        row: dict[str, Any] = {
            "conditions": tuple(name for name, verdict in verdicts.items() if verdict),
            "missing": tuple(name for name, verdict in verdicts.items() if verdict is False),
            "cured_by": _cured_by([c for c in cures if c.is_of(head)]),
            "evidence": evidence(head),
        }
        ordered.append(Ranked(**head.place, rank=rank, score=score(head)[1], **row))
    return tuple(ordered)


def at_fault(ranked: Ranked) -> bool:
    """Whether a head's errors do not cancel, and reach dW_Q where that is known."""
    return DELTA in ranked.conditions and WRONG not in ranked.missing


def judged(ranked: Ranked, condition: str = DELTA) -> bool:
    """Whether it is known if a head meets a condition: that its error of delta has one sign."""
    return condition in (*ranked.conditions, *ranked.missing)


def leading(ranking: Sequence[Ranked]) -> Ranked:
    """The head that an answer is about: the first whose errors do not cancel, else the first of
    which that is known, else the first."""
    return next((r for test in (at_fault, judged) for r in ranking if test(r)), ranking[0])


def suspects(heads: Sequence[HeadRow]) -> tuple[HeadRow, ...]:
    """Heads in the order in which they are looked at: those at fault, then the others, each by
    their score."""
    ordered = sorted(ranked(heads, ()), key=lambda r: not at_fault(r))
    return tuple(next(h for h in heads if h.is_of(r)) for r in ordered)


def shares(cure: CureRow, without: CureRow) -> Mapping[str, float]:
    """What a cure leaves of a head's trouble, by what it is a share of: the error of dW_Q, and
    delta's mean error if that had one sign. Nothing where the cure breaks."""
    pairs = {"dW_Q's error": (cure.dw_q_error, without.dw_q_error)}
    if without.delta_t is not None and abs(without.delta_t) >= T:
        pairs[MEAN] = (cure.delta_mean, without.delta_mean)
    return {
        what: abs(value) / abs(of)
        for what, (value, of) in pairs.items()
        if value is not None and of and not cure.nonfinite
    }


def _cured_by(rows: Sequence[CureRow]) -> tuple[str, ...]:
    without = next((row for row in rows if row.cure == "none"), None)
    if without is None:
        return ()
    left = [(min(shares(r, without).values(), default=1.0), r.cure) for r in rows if r != without]
    return tuple(name for share, name in sorted(left) if share < HALF)


# --- the words -----------------------------------------------------------------------------------


def percent(share: float | None, *, sign: bool = False) -> str:
    """`3.1 %`: two digits, of what is below 0.01 % or from 100,000 % one; with `sign` also `+`."""
    if share is None:
        return NONE
    value = abs(100 * share)
    before = "−" if share < 0 else "+" if sign and share > 0 else ""
    if value == 0:
        return f"{before}0 %"
    if not 0.01 <= value < 1e5:
        digits, _, power = f"{value:.1g}".partition("e")
        return f"{before}{digits}{f'e{int(power)}' if power else ''} %".replace("e-", "e−")
    return before + (f"{value:#.2g} %" if value < 9.95 else f"{value:.0f} %")


def t_in_words(t: float | None) -> str:
    """A t with one decimal, from 10 on without."""
    return NONE if t is None else f"{t:.{0 if abs(t) >= 9.95 else 1}f}".replace("-", "−")


def evidence(head: HeadRow) -> str:
    """What was measured, link by link, as one sentence."""
    used, by_delta, outward = used_delta(head), moved(head), head.out.outward
    keys = f" ({head.tied_keys:.2g} keys each)" if head.tied and head.tied_keys else ""
    way = "away from zero" if (outward or 0.0) > 0 else "towards zero"
    run = whole = moves = ""
    if used and used.run is not None:
        run = f", running sum {used.run:.2g} (random signs: near 1)"
    if head.dw_q_error is not None:
        whole = f" (all roundings: {percent(head.dw_q_error)})"
    if by_delta is not None:
        moves = f", which moves dW_Q by {percent(by_delta)}{whole}"
    mean = used.mean if used else None
    links = (
        (head.tied, f"maxima are tied in {percent(head.tied)} of rows{keys}"),
        (head.one_signed, f"V has one sign there in {percent(head.one_signed)} of features"),
        (outward, f"O errs by {abs(outward or 0.0):.2g} ulp {way}{_t(head.out)}"),
        (mean, f"delta is off by {percent(mean, sign=True)}{_t(used)}{run}{moves}"),
        (head.similarity, f"{percent(head.similarity)} of the terms of dW_Q point one way"),
    )
    words = "; ".join(words for number, words in links if number is not None)
    return f"{words}." if words else "Nothing could be measured."


def answer(
    ranking: Sequence[Ranked],
    heads: Sequence[HeadRow],
    cures: Sequence[CureRow],
    kernels: Sequence[KernelRow],
    costs: Mapping[str, str],
    onsets: Mapping[str, int | None] | None = None,
) -> tuple[str, ...]:
    """The first sentences of a report: what stands before `: ` in each is its heading.

    `heads` are those that were ranked. `costs` says of each cure where it fails or what it takes.
    `onsets` are those of `numdev.diagnose.curves`.
    """
    if not ranking:
        return ("Nothing was diagnosed: no attention call was measured.",)
    faulty, first = [r for r in ranking if at_fault(r)], leading(ranking)
    rows = {r.rank: next(head for head in heads if head.is_of(r)) for r in ranking}
    known = [r for r in ranking if judged(r)]
    evident = [f"Evidence: {first.evidence[:1].upper()}{first.evidence[1:]}"]
    cure = _cure(first, [c for c in cures if c.is_of(first)], costs)
    if faulty:
        said = [_finding(first, rows[first.rank], len(faulty)), *evident]
        said += [_origin(first, rows[first.rank]), *_others(faulty), *cure]
    elif first.score >= DROWNED and judged(first, WRONG):
        said = [*_drowned(first, rows[first.rank], ranking), *evident, *cure]
    else:
        said = [_nothing(known, rows)] if known else []
    said += _unjudged(ranking, rows)
    said += _kernels([k for k in kernels if k.is_of(first)])
    return (*said, *_first_moves(onsets or {}))


def named(place: Place) -> str:
    """`layer 3, head 5`; the module's name where it has no number."""
    where = place.module or place.case if place.layer is None else f"layer {place.layer}"
    call = f" (call {place.call})" if place.call else ""
    return f"{where}{call}, head {place.head}"


def _finding(first: Ranked, row: HeadRow, count: int) -> str:
    used, by_delta = used_delta(row), moved(row)
    effect = f" and that alone moves its dW_Q by {percent(by_delta)}"
    if by_delta is None:
        effect = "; its W_Q is not known, so what that does to dW_Q is not"
    most, after = "loses most" if count > 1 else "is alone in this", ""
    if first.rank > 1:
        most = "has errors that do not cancel"
        after = (
            f" It is number {first.rank} by how far it moves its layer's dW_Q; in the heads before "
            "it delta's errors have random signs, or are not what moves it."
        )
    return (
        f"{_subject(first)} {most}: rounding shifts its delta to one side, by "
        f"{percent(used.mean if used else None, sign=True)} of what it is summed from{_t(used)}"
        f"{effect}.{after}"
    )


def _nothing(known: Sequence[Ranked], rows: Mapping[int, HeadRow]) -> str:
    """No head meets what it takes: whose errors come closest, and how far."""
    shifted = [rows[r.rank] for r in known if DELTA in r.conditions]
    others = [rows[r.rank] for r in known if DELTA not in r.conditions]
    random = f"with random signs {_largest(others)}" if others else ""
    if not shifted:
        return f"No head of {len(known)} has an error of delta of one sign: {random}."
    return (
        "Errors of one sign move no dW_Q by more than rounding it would: delta's error has one "
        f"sign in {len(shifted)} head{'s' * (len(shifted) > 1)} of {len(known)}, where "
        f"{_largest(shifted)}{'; ' * bool(others)}{random}."
    )


def _largest(heads: Sequence[HeadRow]) -> str:
    """How far the errors of the head go whose go furthest: whose dW_Q the error of delta moves
    most; where W_Q is known for none, whose delta has the largest mean error."""
    known = [head for head in heads if moved(head) is not None]
    row = max(known, key=lambda h: moved(h) or 0.0) if known else max(heads, key=mean_of)
    effect = "it moves a dW_Q by" if known else "its mean is"
    size = moved(row) if known else mean_of(row)
    return f"{effect} at most {percent(size)} ({named(row)}{_t(used_delta(row), ', t = {}')})"


def _drowned(first: Ranked, row: HeadRow, ranking: Sequence[Ranked]) -> list[str]:
    """Rounding as large as the gradient, though of random signs; and whether delta is why."""
    loud = sum(r.score >= DROWNED and judged(r, WRONG) for r in ranking)
    others = f", and {loud} of {len(ranking)} heads move theirs by half or more" * (loud > 1)
    said = [
        f"{_subject(first)} drowns in rounding: it moves dW_Q of its layer by "
        f"{percent(first.score)}{others}, with errors of no common sign{_t(used_delta(row))}."
    ]
    part, whole = row.dw_q_unbalanced, row.dw_q_error
    if part is not None and whole and part >= whole / 2 and row.ds_row_sum is not None:
        said.append(
            "Delta does not fit the dP and P that it is subtracted from: rows of dS sum to "
            f"{percent(row.ds_row_sum)} of their size, not to 0, and that makes "
            f"{percent(min(part / whole, 1.0))} of the head's error."
        )
    return said


def _unjudged(ranking: Sequence[Ranked], rows: Mapping[int, HeadRow]) -> list[str]:
    """Of which heads the sign of the errors is not known, and why of the first."""
    unknown = [r for r in ranking if not judged(r)]
    if not unknown:
        return []
    row = rows[unknown[0].rank]
    why = row.nulls.get("delta") or row.nulls.get("delta.t") or "it was not measured"
    among = "" if len(ranking) == 1 else f", {named(row)} among them"
    count = f"{len(unknown)} of {len(ranking)} head{'s' * (len(ranking) > 1)}"
    return [f"Whether delta's error has one sign is not known in {count}{among} ({why})."]


def _origin(first: Ranked, row: HeadRow) -> str:
    """Whether the links before delta are there too: what the error of delta comes from."""
    forward = [name for name in (TIES, EXACT, SIGN) if name in first.conditions]
    lacking = [name for name in first.missing if name != WRONG]
    # A head that attends to one key has P at 1 without any tie: then only a biased output shows
    # that rounding P V to one side is where it begins.
    peaked = EXACT in forward and OUTPUT in first.conditions
    if (TIES in forward or peaked) and SIGN not in first.missing:
        rest = f"of the other conditions it lacks {_listed(lacking)}"
        if not lacking:
            rest = f"it meets all {len(first.conditions)} conditions that could be judged"
        return f"It begins in forward: {_listed(forward)}; {rest}."
    sums = t = ""
    if row.ds_row_sum_t is not None:
        t = f" (t = {t_in_words(row.ds_row_sum_t)})"
    if row.ds_row_sum is not None:
        sums = f"; the rows of its dS sum to {percent(row.ds_row_sum)} of their size{t}, not to 0"
    return f"Not the published cause: it lacks {_listed(lacking)}{sums}."


def _others(faulty: Sequence[Ranked]) -> list[str]:
    more = faulty[1:]
    if not more:
        return []
    of = " of its layer's dW_Q"
    scores = (f"{named(r)}, {percent(r.score)}{of * (WRONG in r.conditions)}" for r in more[:NAMED])
    rest = f"; and {len(more) - NAMED} more" if len(more) > NAMED else ""
    do, heads = ("does", "head") if len(more) == 1 else ("do", "heads")
    return [f"So {do} {len(more)} other {heads}: {'; '.join(scores)}{rest}."]


def _cure(first: Ranked, rows: Sequence[CureRow], costs: Mapping[str, str]) -> list[str]:
    without = next((row for row in rows if row.cure == "none"), None)
    if without is None:
        return []
    broken = sorted(f"{r.cure} ({r.broken})" if r.broken else r.cure for r in rows if r.nonfinite)
    lost = f" On these inputs {_listed(broken)} gives NaN or infinity." if broken else ""
    if not first.cured_by:
        return [f"No cure that was tried takes half of it away:{lost or ' see the table.'}"]
    best = first.cured_by[0]
    row = next(row for row in rows if row.cure == best)
    share, what = min((share, what) for what, share in shares(row, without).items())
    also = first.cured_by[1 : 1 + NAMED]
    others = f" Less than half is also left by {_listed(also)}." if also else ""
    cost = f" ({costs[best]})" if best in costs else ""
    pairs = {"dW_Q": (row.dw_q_error, without.dw_q_error), "dQ": (row.dq_rel, without.dq_rel)}
    known = [(name, pair) for name, pair in pairs.items() if None not in pair and what == MEAN]
    gradient = ""
    for name, (now, before) in known[:1]:  # less of one sign may be more in all
        gradient = f"; {name} is then off by {percent(now)}, without by {percent(before)}"
    return [
        f"What helps most on the same inputs: {best} leaves {percent(share)} of {what}{cost}"
        f"{gradient}.{others}{lost}"
    ]


def _kernels(rows: Sequence[KernelRow]) -> list[str]:
    """What real kernels do on the head that was named."""
    said = [
        f"{row.kernel} shifts its delta by {percent(row.delta.mean, sign=True)}{_t(row.delta)}"
        for row in rows
        if row.delta is not None and row.delta.mean is not None
    ]
    said += [f"{row.kernel} did not run ({row.reason})" for row in rows if row.status != "ok"]
    return [f"Real kernels on the same inputs: {'; '.join(said)}."] if said else []


def _first_moves(onsets: Mapping[str, int | None]) -> list[str]:
    """In which order its numbers passed their limits, over training."""
    steps = sorted({step for step in onsets.values() if step is not None})
    passed = {step: [name for name, at in onsets.items() if at == step] for step in steps}
    never = _listed([name for name, at in onsets.items() if at is None])
    if not passed:
        return [f"Over training: {never} never passed their limits."] if onsets else []
    order = ", then ".join(f"{_listed(names)} at step {step}" for step, names in passed.items())
    rest = f"; {never} never did" if never else ""
    return [f"Over training, limits were passed in this order: {order}{rest}."]


def _t(error: Bias | DeltaError | None, words: str = " (t = {})") -> str:
    return "" if error is None or error.t is None else words.format(t_in_words(error.t))


def _subject(place: Place) -> str:
    """At the start of a sentence; the name of a module or case stays as it is."""
    return named(place) if place.layer is None else f"L{named(place)[1:]}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
