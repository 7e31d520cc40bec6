"""A diagnosis in words: the finding, its evidence, the cure that helps most, what came first.

Every sentence is a function of the report's records. None says what will become of a training run:
neither the paper nor these numbers show that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numdev.diagnose.curves import Onset
from numdev.diagnose.guilt import (
    DELTA,
    EXACT,
    MEAN,
    OUTPUT,
    SIGN,
    TIES,
    WRONG,
    at_fault,
    judged,
    leading,
    moved,
    percent,
    same_head,
    shares,
    signed_percent,
    used_delta,
)
from numdev.diagnose.report import CureRow, DeltaError, HeadRow, KernelRow, Place, Ranked

NAMED = 3
"""Further heads that are named."""
DROWNED = 0.5
"""|dW_Q error| of a head over |dW_Q| of its layer: half a gradient, from one head's rounding."""


def answer(
    ranking: Sequence[Ranked],
    heads: Sequence[HeadRow],
    cures: Sequence[CureRow],
    kernels: Sequence[KernelRow],
    costs: Mapping[str, str],
    onsets: Sequence[Onset] = (),
) -> tuple[str, ...]:
    """The first sentences of a report: what stands before `: ` in each is its heading.

    `heads` are those that were ranked. `costs` says of each cure where it fails or what it takes.
    """
    if not ranking:
        return ("Nothing was diagnosed: no attention call was measured.",)
    faulty = [r for r in ranking if at_fault(r.conditions, r.missing)]
    first = leading(ranking)
    row = next(head for head in heads if same_head(head, first))
    known = [r for r in ranking if judged(r)]
    drowned = not faulty and first.score >= DROWNED and _weights_known(first)
    said = [_nothing(known, heads)] if known and not drowned else []
    if drowned:
        said = [*_drowned(first, row, ranking)]
        said += [f"Evidence: {_capital(first.evidence)}"]
        said += _cure(first, [c for c in cures if same_head(c, first)], costs)
    if faulty:
        said = [_finding(first, row, len(faulty))]
        said += [f"Evidence: {_capital(first.evidence)}", *_origin(first, row), *_others(faulty)]
        said += _cure(first, [c for c in cures if same_head(c, first)], costs)
    said += [*_unjudged(ranking, heads), *_kernels([k for k in kernels if same_head(k, first)])]
    return (*said, *_first_moves(onsets))


def named(place: Place) -> str:
    """`layer 3, head 5`; the module's name where it has no number."""
    where = place.module or place.case if place.layer is None else f"layer {place.layer}"
    call = f" (call {place.call})" if place.call else ""
    return f"{where}{call}, head {place.head}"


def _finding(first: Ranked, row: HeadRow, count: int) -> str:
    used = used_delta(row)
    assert used is not None
    by_delta = moved(row)
    effect = (
        f" and that alone moves its dW_Q by {percent(by_delta)}"
        if by_delta is not None
        else "; its W_Q is not known, so what that does to dW_Q is not"
    )
    most = "loses most" if count > 1 else "is alone in this"
    if first.rank > 1:
        most = "has errors that do not cancel"
    after = (
        f" It is number {first.rank} by how far it moves its layer's dW_Q; in the heads before it "
        "delta's errors have random signs, or are not what moves it."
        if first.rank > 1
        else ""
    )
    return (
        f"{_place(first)} {most}: rounding shifts its delta to one side, by "
        f"{signed_percent(used.mean or 0.0)} of what it is summed from{_t(used)}{effect}.{after}"
    )


def _nothing(ranking: Sequence[Ranked], heads: Sequence[HeadRow]) -> str:
    """No head meets what it takes: whose errors come closest, and how far."""
    shifted = [r for r in ranking if DELTA in r.conditions]
    others = [r for r in ranking if DELTA not in r.conditions]
    random = _largest(others, heads) if others else ""
    if shifted:
        return (
            f"Errors of one sign move no dW_Q by more than rounding it would: delta's error has "
            f"one sign in {_count(len(shifted), 'head')} of {len(ranking)}, where "
            f"{_largest(shifted, heads)}{'; with random signs ' * bool(others)}{random}."
        )
    return (
        f"No head of {len(ranking)} has an error of delta of one sign: with random signs {random}."
    )


def _drowned(first: Ranked, row: HeadRow, ranking: Sequence[Ranked]) -> list[str]:
    """Rounding as large as the gradient, though of random signs; and whether delta is why."""
    loud = sum(r.score >= DROWNED and _weights_known(r) for r in ranking)
    others = f", and {loud} of {len(ranking)} heads move theirs by half or more" * (loud > 1)
    said = [
        f"{_place(first)} drowns in rounding: it moves dW_Q of its layer by {percent(first.score)}"
        f"{others}, with errors of no common sign{_t_or_nothing(row)}."
    ]
    part, whole = row.dw_q_unbalanced, row.dw_q_error
    if part is not None and whole and part >= whole / 2 and row.ds_row_sum is not None:
        said.append(
            "Delta does not fit the dP and P that it is subtracted from: rows of dS sum to "
            f"{percent(row.ds_row_sum)} of their size, not to 0, and that makes "
            f"{percent(min(part / whole, 1.0))} of the head's error."
        )
    return said


def _weights_known(ranked: Ranked) -> bool:
    return WRONG in ranked.conditions or WRONG in ranked.missing


def _t_or_nothing(row: HeadRow) -> str:
    used = used_delta(row)
    return "" if used is None else _t(used)


def _largest(found: Sequence[Ranked], heads: Sequence[HeadRow]) -> str:
    """How far the errors of a head go, which go furthest."""
    row = _closest([next(h for h in heads if same_head(h, r)) for r in found])
    return f"{_effect(row)} at most {_size(row)} ({named(row)}{_comma_t(used_delta(row))})"


def _unjudged(ranking: Sequence[Ranked], heads: Sequence[HeadRow]) -> list[str]:
    """Of which heads the sign of the errors is not known, and why of the first."""
    unknown = [r for r in ranking if not judged(r)]
    if not unknown:
        return []
    row = next(head for head in heads if same_head(head, unknown[0]))
    why = row.nulls.get("delta") or row.nulls.get("delta.t") or "it was not measured"
    among = "" if len(ranking) == 1 else f", {named(row)} among them"
    count = f"{len(unknown)} of {_count(len(ranking), 'head')}"
    return [f"Whether delta's error has one sign is not known in {count}{among} ({why})."]


def _closest(heads: Sequence[HeadRow]) -> HeadRow:
    """Whose dW_Q the error of delta moves most; where W_Q is known for none, whose delta has the
    largest mean error."""
    known = [head for head in heads if moved(head) is not None]
    return max(known, key=lambda h: moved(h) or 0.0) if known else max(heads, key=_mean)


def _mean(row: HeadRow) -> float:
    used = used_delta(row)
    return 0.0 if used is None else abs(used.mean or 0.0)


def _effect(row: HeadRow) -> str:
    return "its mean is" if moved(row) is None else "it moves a dW_Q by"


def _size(row: HeadRow) -> str:
    by_delta = moved(row)
    if by_delta is not None:
        return percent(by_delta)
    return "nothing known" if used_delta(row) is None else percent(_mean(row))


def _origin(first: Ranked, row: HeadRow) -> list[str]:
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
        return [f"It begins in forward: {_listed(forward)}; {rest}."]
    sums = ""
    if row.ds_row_sum is not None:
        t = "" if row.ds_row_sum_t is None else f" (t = {_number(row.ds_row_sum_t)})"
        sums = f"; the rows of its dS sum to {percent(row.ds_row_sum)} of their size{t}, not to 0"
    return [f"Not the published cause: it lacks {_listed(lacking)}{sums}."]


def _others(faulty: Sequence[Ranked]) -> list[str]:
    more = faulty[1:]
    if not more:
        return []
    names = "; ".join(f"{named(r)}, {_scored(r)}" for r in more[:NAMED])
    rest = f"; and {len(more) - NAMED} more" if len(more) > NAMED else ""
    do = "does" if len(more) == 1 else "do"
    return [f"So {do} {_count(len(more), 'other head')}: {names}{rest}."]


def _scored(ranked: Ranked) -> str:
    known = WRONG in ranked.conditions
    return percent(ranked.score) + (" of its layer's dW_Q" if known else "")


def _cure(first: Ranked, rows: Sequence[CureRow], costs: Mapping[str, str]) -> list[str]:
    without = next((row for row in rows if row.cure == "none"), None)
    if without is None:
        return []
    broken = sorted(_breaking(row) for row in rows if row.nonfinite)
    lost = f" On these inputs {_listed(broken)} gives NaN or infinity." if broken else ""
    if not first.cured_by:
        return [f"No cure that was tried takes half of it away:{lost or ' see the table.'}"]
    best = first.cured_by[0]
    row = next(row for row in rows if row.cure == best)
    share, what = min((share, what) for what, share in shares(row, without).items())
    also = first.cured_by[1 : 1 + NAMED]
    others = f" Less than half is also left by {_listed(also)}." if also else ""
    cost = f" ({costs[best]})" if best in costs else ""
    return [
        f"What helps most on the same inputs: {best} leaves {percent(share)} of {what}"
        f"{cost}{_gradient(row, without) if what == MEAN else ''}.{others}{lost}"
    ]


def _gradient(cure: CureRow, without: CureRow) -> str:
    """What becomes of the gradient: less of one sign may be more in all."""
    for name, now, before in (
        ("dW_Q", cure.dw_q_error, without.dw_q_error),
        ("dQ", cure.dq_rel, without.dq_rel),
    ):
        if now is not None and before is not None:
            return f"; {name} is then off by {percent(now)}, without by {percent(before)}"
    return ""


def _breaking(row: CureRow) -> str:
    return f"{row.cure} ({row.broken})" if row.broken else row.cure


def _kernels(rows: Sequence[KernelRow]) -> list[str]:
    """What real kernels do on the head that was named."""
    said = [
        f"{row.kernel} shifts its delta by {signed_percent(row.delta.mean)}{_t(row.delta)}"
        for row in rows
        if row.delta is not None and row.delta.mean is not None
    ]
    said += [f"{row.kernel} did not run ({row.reason})" for row in rows if row.status != "ok"]
    return [f"Real kernels on the same inputs: {'; '.join(said)}."] if said else []


def _first_moves(onsets: Sequence[Onset]) -> list[str]:
    """In which order its numbers passed their limits, over training."""
    passed = sorted((o for o in onsets if o.step is not None), key=lambda o: o.step or 0)
    if not onsets:
        return []
    never = [o.what for o in onsets if o.step is None]
    if not passed:
        return [f"Over training: {_listed(never)} never passed their limits."]
    order = ", then ".join(
        f"{_listed([o.what for o in passed if o.step == step])} at step {step}"
        for step in dict.fromkeys(o.step for o in passed)
    )
    rest = f"; {_listed(never)} never did" if never else ""
    return [f"Over training, limits were passed in this order: {order}{rest}."]


def _t(error: DeltaError) -> str:
    return "" if error.t is None else f" (t = {_number(error.t)})"


def _comma_t(error: DeltaError | None) -> str:
    return "" if error is None or error.t is None else f", t = {_number(error.t)}"


def _number(t: float) -> str:
    return f"{t:.{0 if abs(t) >= 9.95 else 1}f}".replace("-", "−")


def _place(place: Place) -> str:
    """At the start of a sentence; the name of a module or case stays as it is."""
    return named(place) if place.layer is None else _capital(named(place))


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
