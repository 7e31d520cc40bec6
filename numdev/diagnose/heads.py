"""Which heads meet which conditions of the chain from a tied maximum to a wrong dW_Q (Qiu & Yao,
arXiv 2510.04212; docs/method.md), in which order they are named, and what is said of them.

What is null meets no condition and lacks none. Heads are ordered by dW_Q's error, not by how many
conditions they meet: a condition is a lead, and that error is what does harm. No sentence says what
will become of a training run: neither the paper nor these numbers show that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from numdev.diagnose.report import Bias, CureRow, DeltaError, HeadRow, Place, Ranked
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
NAMED = 3  # further cures that are named
MEAN = "delta's mean error"
CONDITIONS = (  # in the order of the chain
    *("tied maxima", "weights at powers of two", "V of one sign", "biased output"),
    *("delta error of one sign", "similar terms of dW_Q", "dW_Q moved", "large spectral norm"),
)
TIES, EXACT, SIGN, OUTPUT, DELTA, ALIKE, WRONG, NORM = CONDITIONS


def mean_of(head: HeadRow) -> float:
    """|Mean error of delta|; 0 where it is not known."""
    return abs(float(head.at("used.mean") or 0.0))


# --- the conditions ------------------------------------------------------------------------------


def _known(judge: Callable[[Iterable[bool]], bool], *verdicts: bool | None) -> bool | None:
    """`all` or `any` of the verdicts that are known; None where none is."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return judge(known) if known else None


def _beyond(limit: float, *values: float | None) -> bool | None:
    """Whether the largest is; None where none is known."""
    return _known(any, *(None if x is None else abs(x) >= limit for x in values))


def _biased(bias: Bias) -> bool | None:
    return _known(all, _beyond(BIASED, bias.outward), _beyond(T, bias.t))


def _one_way(head: HeadRow) -> bool | None:
    """None too without a t, in rows so few that no running sum gets far either."""
    used = head.used
    if used is None or used.mean is None:
        return None
    far = _beyond(RUN, used.run)
    if used.rms == 0:
        return False
    return None if used.t is None and not far else _known(all, _beyond(T, used.t), far)


def _verdicts(head: HeadRow) -> dict[str, bool | None]:
    """Whether a head meets each condition; None where that could not be measured."""
    return {
        TIES: _beyond(TIED, head.tied, head.ones),
        EXACT: _beyond(POWERS, head.powers),
        SIGN: _beyond(ONE_SIGNED, head.one_signed),
        OUTPUT: _known(any, _biased(head.pv), _biased(head.out)),
        DELTA: _one_way(head),
        ALIKE: _beyond(SIMILAR, head.similarity),
        WRONG: _beyond(MOVED, head.moved),
        NORM: _beyond(LOUDER, head.spectral_ratio),
    }


# --- the order -----------------------------------------------------------------------------------


def ranked(heads: Sequence[HeadRow], cures: Sequence[CureRow]) -> tuple[Ranked, ...]:
    """Every head, the one that moves its layer's dW_Q most first.

    The score is |dW_Q error| of a head over |dW_Q| of its layer, the root of the sum of its heads'
    squares; else |delta's mean error|; else 0. Heads whose W_Q is not known come after those whose
    is. Equals are in the order of checkpoint, layer, call and head. `heads` are all heads of their
    calls; `cures` may be of some of them or none."""
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
        ranked_head = Ranked(
            **head.place,
            rank=rank,
            score=score(head)[1],
            conditions=tuple(name for name, verdict in verdicts.items() if verdict),
            missing=tuple(name for name, verdict in verdicts.items() if verdict is False),
            cured_by=_cured_by([c for c in cures if c.is_of(head)]),
            evidence=evidence(head),
        )
        ordered.append(ranked_head)
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
    """Heads at fault, then the others, each by their score."""
    ordered = sorted(ranked(heads, ()), key=lambda r: not at_fault(r))
    return tuple(next(h for h in heads if h.is_of(r)) for r in ordered)


def shares(cure: CureRow, without: CureRow) -> Mapping[str, float]:
    """What a cure leaves of a head's trouble, by what it is a share of: the error of dW_Q, and
    delta's mean error if that had one sign. Nothing where the cure gives NaN or infinity."""
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
    """What was measured, link by link."""
    links = (
        ("tied maxima in {} of rows", percent, "tied"),
        ("V of one sign there in {}", percent, "one_signed"),
        ("O off by {} ulp along its sign" + _t(head.out), "{:+.2g}".format, "out.outward"),
        ("delta off by {}" + _t(head.used), _signed, "used.mean"),
        ("its running sum {} (random signs: near 1)", "{:.2g}".format, "used.run"),
        ("that moves dW_Q by {}", percent, "moved"),
        ("all roundings by {}", percent, "dw_q_error"),
        ("terms of dW_Q in one direction {}", percent, "similarity"),
    )
    values = ((words, write, head.at(path)) for words, write, path in links)
    words = "; ".join(words.format(write(x)) for words, write, x in values if x is not None)
    return f"{words or 'nothing could be measured'}.".replace("-", "−")


def answer(
    ranking: Sequence[Ranked],
    heads: Sequence[HeadRow],
    cures: Sequence[CureRow],
    costs: Mapping[str, str],
    onsets: Mapping[str, int | None] | None = None,
) -> tuple[str, ...]:
    """The first sentences of a report: what stands before `: ` in each is its heading.

    `heads` are those that were ranked. `costs` says of each cure where it fails or what it takes,
    `onsets` at which step each number passed its limit."""
    if not ranking:
        return ("Nothing was diagnosed: no attention call was measured.",)
    first, count = leading(ranking), len(ranking)
    row = next(head for head in heads if head.is_of(first))
    known = [head for r in ranking if judged(r) for head in heads if head.is_of(r)]
    more = [f"Evidence: {first.evidence}", *_cure(first, cures, costs)]
    if at_fault(first):
        said = [_finding(first, row, sum(map(at_fault, ranking))), _origin(first, row), *more]
    elif first.score >= DROWNED and judged(first, WRONG):
        said = [_drowned(first, row, ranking), *more]
    else:
        said = [_nothing(known)] if known else []
    if len(known) < count:
        unknown = next(head for r in ranking if not judged(r) for head in heads if head.is_of(r))
        why = unknown.nulls.get("delta") or unknown.nulls.get("delta.t") or "not measured"
        said.append(f"Sign of delta's error not known in {count - len(known)} of {count}: {why}.")
    return (*said, *_first_moves(onsets or {}))


def named(place: Place) -> str:
    """`Layer 3, head 5`; the name of the module or call where it has no number."""
    where = place.module or place.case if place.layer is None else f"Layer {place.layer}"
    call = f" (call {place.call})" if place.call else ""
    return f"{where}{call}, head {place.head}"


def _finding(first: Ranked, row: HeadRow, count: int) -> str:
    effect = "its W_Q is not known"
    if row.moved is not None:
        effect = f"that alone moves its dW_Q by {percent(row.moved)}"
    rank = f" By dW_Q's whole error it ranks {first.rank}." if first.rank > 1 else ""
    others = f" Heads of which this holds: {count}." if count > 1 else ""
    return (
        f"{named(first)}: rounding shifts its delta to one side, by "
        f"{_signed(row.at('used.mean'))} of what it is summed from{_t(row.used)}; "
        f"{effect}.{rank}{others}"
    )


def _origin(first: Ranked, row: HeadRow) -> str:
    """Whether the links before delta are there too: what the error of delta comes from."""
    forward = [name for name in (TIES, EXACT, SIGN) if name in first.conditions]
    lacking = _listed([name for name in first.missing if name != WRONG]) or "none"
    # A head that attends to one key has P at 1 without any tie: then only a biased output shows
    # that rounding P V to one side is where it begins.
    peaked = EXACT in forward and OUTPUT in first.conditions
    if (TIES in forward or peaked) and SIGN not in first.missing:
        return f"It begins in forward: {_listed(forward)}; missing conditions: {lacking}."
    sums = ""
    if row.ds_row_sum is not None:
        t = "" if row.ds_row_sum_t is None else f" (t = {t_in_words(row.ds_row_sum_t)})"
        sums = f"; rows of dS sum to {percent(row.ds_row_sum)} of their size{t}, not to 0"
    return f"Not the published cause: missing conditions: {lacking}{sums}."


def _drowned(first: Ranked, row: HeadRow, ranking: Sequence[Ranked]) -> str:
    """Rounding as large as the gradient, though of random signs."""
    loud = sum(r.score >= DROWNED and judged(r, WRONG) for r in ranking)
    sums = ""
    if row.ds_row_sum is not None:
        sums = f"; rows of dS sum to {percent(row.ds_row_sum)} of their size, not to 0"
    return (
        f"{named(first)}: rounding changes its layer's dW_Q by {percent(first.score)} ({loud} of "
        f"{len(ranking)} heads ≥ {percent(DROWNED)}); the errors have no consistent "
        f"sign{_t(row.used)}{sums}."
    )


def _nothing(known: Sequence[HeadRow]) -> str:
    """No head meets what it takes: how far the errors of one sign go, else those of random sign."""
    shifted = [head for head in known if _one_way(head)]
    row = max(shifted or known, key=lambda head: (head.moved or 0.0, mean_of(head)))
    effect = f"its mean is at most {percent(mean_of(row))}"
    if row.moved is not None:
        effect = f"it moves a dW_Q by at most {percent(row.moved)}"
    return (
        f"No head of {len(known)} is at fault: delta's error has one sign in {len(shifted)}; "
        f"{effect} ({named(row)}{_t(row.used, ', t = {}')})."
    )


def _cure(first: Ranked, cures: Sequence[CureRow], costs: Mapping[str, str]) -> list[str]:
    rows = {cure.cure: cure for cure in cures if cure.is_of(first)}
    without = rows.get("none")
    if without is None:
        return []
    broken = sorted(f"{r.cure} ({r.broken})" if r.broken else r.cure for r in rows.values()
                    if r.nonfinite)  # fmt: skip
    lost = f" NaN or infinity: {_listed(broken)}." if broken else ""
    if not first.cured_by:
        return [f"No cure that was tried takes half of it away: see the table.{lost}"]
    best, *also = first.cured_by[: 1 + NAMED]
    row = rows[best]
    share, what = min((share, what) for what, share in shares(row, without).items())
    others = f" Below half too: {_listed(also)}." if also else ""
    cost = f" ({costs[best]})" if best in costs else ""
    gradient = ""  # less of one sign may be more in all
    if what == MEAN and row.dw_q_error is not None:
        now, before = percent(row.dw_q_error), percent(without.dw_q_error)
        gradient = f"; dW_Q is then off by {now}, without it by {before}"
    return [
        f"Best cure on the same inputs: {best} leaves {percent(share)} of {what}{cost}{gradient}."
        f"{others}{lost}"
    ]


def _first_moves(onsets: Mapping[str, int | None]) -> list[str]:
    """In which order its numbers passed their limits, over training."""
    if not onsets:
        return []
    passed = sorted((step, name) for name, step in onsets.items() if step is not None)
    never = [f"{name} never" for name, step in onsets.items() if step is None]
    order = ", ".join([*(f"{name} at step {step}" for step, name in passed), *never])
    return [f"Limits passed over training: {order}."]


def _signed(share: float | None) -> str:
    return percent(share, sign=True)


def _t(error: Bias | DeltaError | None, words: str = " (t = {})") -> str:
    return "" if error is None or error.t is None else words.format(t_in_words(error.t))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
