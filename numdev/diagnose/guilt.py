"""Which heads meet which conditions of the chain from a tied maximum to a wrong dW_Q.

The chain is that of Qiu & Yao (arXiv 2510.04212; docs/method.md): weights that are powers of two
meet values of one sign, so that the errors of P V and O have one sign; then those of delta have,
and where the terms of dW_Q look alike across tokens they add up. A condition is a number of a
`HeadRow` beyond a limit that is named here with its reason. What is null meets no condition and
lacks none. The order of heads is that of one number, not of how many conditions they meet: a
condition is a lead, and dW_Q's error is what does harm. It is the error as measured, by all
roundings, since no part of it that delta explains tells better whose cure changes most
(benchmarks/guilt.py), and relative to the whole layer's dW_Q, since a head with hardly any gradient
has the largest error relative to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from numdev.diagnose.report import Bias, CureRow, DeltaError, HeadRow, Place, Ranked

TIED = 0.05
"""Share of rows. Ties err by a quarter of an ulp on average; in fewer rows than these that is lost
in the scatter of some hundred rows, 0.3 ulp / sqrt(rows)."""
POWERS = 0.5
"""Share of probability at powers of two: half of the output then comes from products without
rounding. By chance, in bfloat16, it is 1 / 128."""
ONE_SIGNED = 0.75
"""Share of features: well above one half, which is chance for two keys."""
BIASED = TIED / 4
"""Ulps, away from or towards zero: what the fewest ties that count would make."""
T = 4.0
"""A t that chance gives one head in sixteen thousand, and so hardly any model."""
RUN = 4.0
"""A running sum over rms sqrt(rows). A random walk gets as far once in eight thousand sequences."""
SIMILAR = 0.1
"""Share of energy in one direction: the errors of a few hundred rows of one sign then add up along
it to tens of times what errors of random sign leave."""
MOVED = 2.0**-8
"""|dW_Q error| / |dW_Q| of the head: rounding dW_Q itself to bfloat16 may change it by as much."""
LOUDER = 1.5
"""Spectral norm over the median of the layer's heads, which differ by a few per cent before
training."""
HALF = 0.5
"""What a cure has to leave at most."""
MEAN = "delta's mean error"

TIES = "tied maxima"
EXACT = "weights at powers of two"
SIGN = "V of one sign"
OUTPUT = "biased output"
DELTA = "delta error of one sign"
ALIKE = "similar terms of dW_Q"
WRONG = "dW_Q moved"
NORM = "large spectral norm"
CONDITIONS = (TIES, EXACT, SIGN, OUTPUT, DELTA, ALIKE, WRONG, NORM)
"""In the order of the chain."""


def ranked(heads: Sequence[HeadRow], cures: Sequence[CureRow]) -> tuple[Ranked, ...]:
    """Every head, the one that moves its layer's dW_Q most first.

    Heads whose W_Q is not known come after those whose is, by their delta's mean error. Equals are
    in the order of checkpoint, layer, call and head. `heads` are all heads of their calls, as a
    layer is the sum of them. `cures` are rows of the same heads, and may be of some of them or
    none; where one gives NaN or infinity it is no cure.
    """
    layers = _layers(heads)
    scored = [(head, score(head, layers[head.checkpoint, head.case])) for head in heads]
    ordered = sorted(scored, key=lambda found: _order(*found))
    return tuple(_ranked(i, *found, cures) for i, found in enumerate(ordered, start=1))


def score(head: HeadRow, layer: float) -> float:
    """|dW_Q error| of a head over |dW_Q| of its layer; else |delta's mean error|; else 0."""
    if head.dw_q_error is not None and head.dw_q_norm is not None and layer > 0:
        return head.dw_q_error * head.dw_q_norm / layer
    used = used_delta(head)
    return 0.0 if used is None else abs(used.mean or 0.0)


def _layers(heads: Sequence[HeadRow]) -> Mapping[tuple[str, str], float]:
    """|dW_Q| of every call, by checkpoint and case: the root of the sum of its heads' squares."""
    sizes: dict[tuple[str, str], list[float]] = {}
    for head in heads:
        sizes.setdefault((head.checkpoint, head.case), []).append(head.dw_q_norm or 0.0)
    return {call: math.hypot(*of_heads) for call, of_heads in sizes.items()}


def moved(head: HeadRow) -> float | None:
    """|dW_Q error| / |dW_Q| of the head, of which the error of delta is the cause: the part of it
    that its own dP and P do not share, where that was measured. None where W_Q is not known."""
    used = used_delta(head)
    whole = None if used is None else used.dw_q
    return whole if head.dw_q_unbalanced is None else head.dw_q_unbalanced


def used_delta(head: HeadRow) -> DeltaError | None:
    """The error of delta by the formula that the attention uses."""
    return head.delta[0] if head.delta else None


def met(head: HeadRow) -> Mapping[str, bool]:
    """Which conditions a head meets, in the order of the chain; those that could not be measured
    are left out."""
    found = {name: test(head) for name, test in _TESTS.items()}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def at_fault(conditions: Sequence[str], missing: Sequence[str]) -> bool:
    """Whether a head's errors do not cancel, and reach dW_Q where that is known."""
    return DELTA in conditions and WRONG not in missing


def judged(ranked: Ranked) -> bool:
    """Whether it is known if the head's error of delta has one sign."""
    return DELTA in ranked.conditions or DELTA in ranked.missing


def leading(ranking: Sequence[Ranked]) -> Ranked:
    """The head that an answer is about: the first whose errors do not cancel, else the first of
    which that is known, else the first."""
    faulty = (r for r in ranking if at_fault(r.conditions, r.missing))
    return next(faulty, next(filter(judged, ranking), ranking[0]))


def suspects(heads: Sequence[HeadRow]) -> tuple[HeadRow, ...]:
    """Heads in the order in which they are looked at: those at fault, then the others, each by
    their score."""
    places = ranked(heads, ())
    faulty = [r for r in places if at_fault(r.conditions, r.missing)]
    ordered = [*faulty, *(r for r in places if r not in faulty)]
    return tuple(next(h for h in heads if same_head(h, r)) for r in ordered)


def same_head(a: Place, b: Place) -> bool:
    """Whether two rows are of one head of one checkpoint."""
    return (a.checkpoint, a.case, a.head) == (b.checkpoint, b.case, b.head)


def remaining(cure: CureRow, without: CureRow) -> float | None:
    """What a cure leaves of a head's trouble, as a share: of the error of dW_Q, or of delta's mean
    error if it is less and that error had one sign. None where neither can be told, or the cure
    breaks."""
    return min(shares(cure, without).values(), default=None)


def shares(cure: CureRow, without: CureRow) -> Mapping[str, float]:
    """What a cure leaves of each number that `remaining` looks at, by what it is."""
    if cure.nonfinite:
        return {}
    found = {"dW_Q's error": _share(cure.dw_q_error, without.dw_q_error)}
    if without.delta_t is not None and abs(without.delta_t) >= T:
        found[MEAN] = _share(cure.delta_mean, without.delta_mean)
    return {what: share for what, share in found.items() if share is not None}


def _order(head: HeadRow, scored: float) -> tuple[bool, float, str, int, str, int, int]:
    unknown = head.dw_q_error is None or head.dw_q_norm is None
    layer = -1 if head.layer is None else head.layer
    return unknown, -scored, head.checkpoint, layer, head.case, head.call, head.head


def _ranked(rank: int, head: HeadRow, scored: float, cures: Sequence[CureRow]) -> Ranked:
    found = met(head)
    place = ("checkpoint", "step", "case", "module", "layer", "call", "head")
    return Ranked(
        **{name: getattr(head, name) for name in place},
        rank=rank,
        score=scored,
        conditions=tuple(name for name, verdict in found.items() if verdict),
        missing=tuple(name for name, verdict in found.items() if not verdict),
        cured_by=_cured_by([c for c in cures if same_head(c, head)]),
        evidence=evidence(head),
    )


def _cured_by(rows: Sequence[CureRow]) -> tuple[str, ...]:
    without = next((row for row in rows if row.cure == "none"), None)
    if without is None:
        return ()
    left = [(remaining(row, without), row.cure) for row in rows if row is not without]
    return tuple(name for share, name in sorted((s, n) for s, n in left if _less(s)))


def _less(share: float | None) -> bool:
    return share is not None and share < HALF


def _share(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else abs(value) / abs(of)


# --- the conditions ------------------------------------------------------------------------------


def _at_least(limit: float, *values: float | None) -> bool | None:
    """Whether the largest is; None where none is known."""
    known = [value for value in values if value is not None]
    return max(known) >= limit if known else None


def _both(*verdicts: bool | None) -> bool | None:
    """Whether all hold that are known; None where none is."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return all(known) if known else None


def _either(*verdicts: bool | None) -> bool | None:
    known = [verdict for verdict in verdicts if verdict is not None]
    return any(known) if known else None


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)


def _biased(bias: Bias) -> bool | None:
    return _both(_at_least(BIASED, _size(bias.outward)), _at_least(T, _size(bias.t)))


def _one_way(head: HeadRow) -> bool | None:
    """None too without a t, in rows so few that no running sum gets far either."""
    used = used_delta(head)
    if used is None or used.mean is None:
        return None
    if used.rms == 0:
        return False
    far = _at_least(RUN, used.run)
    return None if used.t is None and not far else _both(_at_least(T, _size(used.t)), far)


def _moved(head: HeadRow) -> bool | None:
    return _at_least(MOVED, moved(head))


_TESTS: Mapping[str, Callable[[HeadRow], bool | None]] = {
    TIES: lambda head: _at_least(TIED, head.tied, head.ones),
    EXACT: lambda head: _at_least(POWERS, head.powers),
    SIGN: lambda head: _at_least(ONE_SIGNED, head.one_signed),
    OUTPUT: lambda head: _either(_biased(head.pv), _biased(head.out)),
    DELTA: _one_way,
    ALIKE: lambda head: _at_least(SIMILAR, head.similarity),
    WRONG: _moved,
    NORM: lambda head: _at_least(LOUDER, head.spectral_ratio),
}


# --- the evidence --------------------------------------------------------------------------------


def evidence(head: HeadRow) -> str:
    """What was measured, link by link, as one sentence."""
    said = [*_forward(head), *_backward(head)]
    return "; ".join(said) + "." if said else "Nothing could be measured."


def _forward(head: HeadRow) -> list[str]:
    said = []
    if head.tied is not None:
        keys = f" ({head.tied_keys:.2g} keys each)" if head.tied and head.tied_keys else ""
        said.append(f"maxima are tied in {percent(head.tied)} of rows{keys}")
    if head.one_signed is not None:
        said.append(f"V has one sign there in {percent(head.one_signed)} of features")
    if head.out.outward is not None:
        way = "away from zero" if head.out.outward > 0 else "towards zero"
        said.append(f"O errs by {abs(head.out.outward):.2g} ulp {way}{_t(head.out.t)}")
    return said


def _backward(head: HeadRow) -> list[str]:
    said = []
    used = used_delta(head)
    if used is not None and used.mean is not None:
        run = "" if used.run is None else f", running sum {used.run:.2g} (random signs: near 1)"
        said.append(f"delta is off by {signed_percent(used.mean)}{_t(used.t)}{run}{_moving(head)}")
    if head.similarity is not None:
        said.append(f"{percent(head.similarity)} of the terms of dW_Q point one way")
    return said


def _moving(head: HeadRow) -> str:
    by_delta = moved(head)
    if by_delta is None:
        return ""
    of = "" if head.dw_q_error is None else f" (all roundings: {percent(head.dw_q_error)})"
    return f", which moves dW_Q by {percent(by_delta)}{of}"


def _t(t: float | None) -> str:
    return "" if t is None else f" (t = {t:.{0 if abs(t) >= 9.95 else 1}f})".replace("-", "−")


def percent(share: float) -> str:
    """`3.1 %`: two digits, of what is below 0.01 % or from 100,000 % one."""
    value = 100 * share
    if value == 0:
        return "0 %"
    if not 0.01 <= abs(value) < 1e5:
        digits, _, power = f"{value:.1g}".partition("e")
        return f"{digits}e{int(power)} %".replace("e-", "e−") if power else f"{digits} %"
    return f"{value:#.2g} %" if abs(value) < 9.95 else f"{value:.0f} %"


def signed_percent(share: float) -> str:
    """`−3.1 %`."""
    return ("+" if share > 0 else "") + percent(share).replace("-", "−", 1)
