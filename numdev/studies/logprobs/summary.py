"""Computes the summary of a report of log-probabilities from its rows: each side beside
the truth, the causes that are named, the numbers of dashboards, and the answer. Needs no
torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from numdev.grouping import grouped
from numdev.report import Outcome
from numdev.report.number_text import percent, ratio, three
from numdev.studies.logprobs.causes import AT_PREDICTION, KINDS, PAIR_WORDS, decide
from numdev.studies.logprobs.report import (
    PAIR,
    CauseRow,
    Cost,
    CostRow,
    LogprobsReport,
    LogprobsSummary,
    NamedCause,
    PlannedSide,
    SequenceEstimate,
    SideRow,
    SideSummary,
)
from numdev.studies.logprobs.statistics import (
    SHARE,
    Sums,
    dashboard,
    jackknife,
    smallest_mean,
)
from numdev.studies.logprobs.training_costs import (
    FIXES,
    HALF,
    HEAD,
    NOW,
    ROUNDINGS,
    UNDONE,
)

ALIKE = 3.0  # times as far from the model as from each other, where both err alike


def recomputed_summary(report: LogprobsReport) -> LogprobsSummary:
    """Returns the summary that is made from the plan, rows, remarks and verdicts of a
    report; its stored summary is not read."""
    sides = tuple(side_summary(report, planned) for planned in report.plan.sides)
    pair_causes = tuple(named_causes(report.causes, PAIR))
    return LogprobsSummary(
        answer=tuple(answer(report, sides, pair_causes)),
        sides=sides,
        pair_causes=pair_causes,
        statistics=dashboard(report.pairs, report.plan.clip),
        costs=tuple(costs_of(report)),
        notes=report.remarks,
    )


def with_summary(report: LogprobsReport) -> LogprobsReport:
    """Returns a copy of the report whose summary is made anew from its plan, rows,
    remarks and verdicts."""
    return report.model_copy(update={"summary": recomputed_summary(report)})


def side_rows(report: LogprobsReport, side: str) -> list[SideRow]:
    """Returns the rows of a side that have numbers."""
    return [row for row in report.rows if row.side == side and row.status == "ok"]


def side_sums(rows: Sequence[SideRow]) -> list[Sums]:
    """Returns the sums of each row by name, 0 for None. `rows`: those with numbers."""
    names = (
        *("error", "square", "predicted", "predicted_square", "product"),
        *("tokens", "clipped", "predicted_clipped"),
    )
    return [{name: float(getattr(row, name) or 0) for name in names} for row in rows]


def _clipped_share(sums: Sums) -> float:
    """Returns the share of tokens outside the clip band; `sums`: over sequences. Raises
    ZeroDivisionError without tokens."""
    return sums["clipped"] / sums["tokens"]


def _rms_over_predicted(sums: Sums) -> float:
    """Returns the rms error over the predicted one; `sums`: over sequences. Raises
    ZeroDivisionError where nothing is predicted."""
    return math.sqrt(sums["square"] / sums["predicted_square"])


def rms_ratio(
    rows: Sequence[SideRow], confidence: float = 0.95
) -> SequenceEstimate | None:
    """Returns the rms error of a side over the predicted one, with its interval at
    `confidence`; None without rows, and where nothing is predicted. `rows`: those of a
    side that have numbers."""
    if not rows:
        return None
    sums = side_sums(rows)
    return jackknife(sums, _rms_over_predicted, confidence, within=(0.0, math.inf))


def side_summary(report: LogprobsReport, planned: PlannedSide) -> SideSummary:
    """Returns one side over all its sequences that have numbers; without numbers where
    none has. Means and ratios are over tokens, intervals over sequences."""
    rows = side_rows(report, planned.name)
    plain = SideSummary(
        name=planned.name,
        format=planned.recipe,
        sequences=len(rows),
        tokens=sum(row.tokens for row in rows),
        causes=tuple(named_causes(report.causes, planned.name)),
    )
    if not rows:
        return plain
    sums = side_sums(rows)
    total = {name: math.fsum(row[name] for row in sums) for name in sums[0]}
    tokens = total["tokens"]
    mean = jackknife(sums, lambda s: s["error"] / s["tokens"])
    shares = {name: total[name] / tokens for name in ("clipped", "predicted_clipped")}
    spread = math.sqrt(total["square"] * total["predicted_square"])
    return plain.model_copy(
        update={
            "rms": math.sqrt(total["square"] / tokens),
            "ratio": rms_ratio(rows),
            "mean": mean,
            "expected_mean": -total["predicted_square"] / tokens / 2,
            "correlation": total["product"] / spread if spread else None,
            "resolved": smallest_mean(mean),
            **shares,
        }
    )


def costs_of(report: LogprobsReport) -> Iterator[Cost]:
    """Yields the shares of ratios outside the clip band, of each side and then of the
    pair, each in the order of FIXES. A fix without a row is left out."""
    rows = list(report.costs)
    for side in report.plan.sides:
        for row in side_rows(report, side.name):
            counts = {NOW: row.clipped, ROUNDINGS: row.predicted_clipped}
            rows += [
                CostRow(
                    side=side.name,
                    fix=fix,
                    sequence=row.sequence,
                    tokens=row.tokens,
                    clipped=clipped,
                )
                for fix, clipped in counts.items()
            ]
    by_fix = grouped(rows, lambda row: (row.side, row.fix))
    for name in (*(side.name for side in report.plan.sides), PAIR):
        for of_fix in (by_fix[name, fix] for fix in FIXES if (name, fix) in by_fix):
            sums = [
                {"clipped": float(r.clipped), "tokens": float(r.tokens)} for r in of_fix
            ]
            yield Cost(
                side=name,
                fix=of_fix[0].fix,
                tokens=sum(row.tokens for row in of_fix),
                lost=sum(row.lost for row in of_fix),
                share=jackknife(sums, _clipped_share, within=SHARE),
            )


def named_causes(rows: Sequence[CauseRow], side: str) -> Iterator[NamedCause]:
    """Yields the causes that are named on a side, or on the pair (PAIR), in the order in
    which they were undone."""
    by_cause = grouped((row for row in rows if row.side == side), lambda row: row.cause)
    for of_cause in sorted(by_cause.values(), key=lambda of: of[0].stage):
        decision = decide(of_cause)
        if decision.named:
            kind, dose = KINDS[of_cause[0].cause], of_cause[0].dose
            words = PAIR_WORDS[kind.name] if side == PAIR else kind.words
            yield NamedCause(
                side=side,
                cause=kind.name,
                dose=dose,
                words=words.format(dose=dose),
                share=1 - 1 / decision.cut,
                slope=decision.slope,
                left=_explained_ratio(of_cause, by_size=kind.is_size or kind.in_part),
            )


def _explained_ratio(rows: Sequence[CauseRow], *, by_size: bool) -> float | None:
    """Returns the rms error over the predicted one, a cause accounted for: what undoing
    it leaves, over what is predicted then. With `by_size` it is the rms error as it is
    over the one predicted with the cause's size. None where nothing is predicted with the
    cause undone."""
    names = ("before", "after", "effect", "noise", "noise_left")
    before, after, effect, noise, noise_left = (
        math.fsum(getattr(row, name) for row in rows) for name in names
    )
    if not noise_left:
        return None
    return math.sqrt(before / (noise + effect) if by_size else after / noise_left)


def answer(
    report: LogprobsReport,
    sides: Sequence[SideSummary],
    pair_causes: Sequence[NamedCause],
) -> Iterator[str]:
    """Yields the sentences of the answer. Where the report has an outcome: the verdict
    with every side's error in multiples of what its format explains, other tokens, the
    causes, and whether both sides agree with each other alone. Then costs, and that there
    was no model."""
    verdicts = {verdict.kernel: verdict.outcome for verdict in report.verdicts}
    parts = list(_ratio_clauses(ordered(sides, verdicts)))
    if report.outcome is not None:
        why = causes_clause([c for side in sides for c in side.causes] or pair_causes)
        yield f"{report.outcome.word} {'; '.join(parts)}."
        other = sum(row.unshared > 0 and not row.cut for row in report.pairs)
        if other:
            of = f"{other} of {len(report.pairs)} sequences"
            yield f"Other tokens on both sides in {of}."
        if why:
            yield why
        yield from agreement_sentence(report, sides)
    yield from cost_sentence(list(costs_of(report)), report.plan.clip)
    if report.plan.model is None:
        yield "No model: which side is off is not told; give --model for that."


def agreement_sentence(
    report: LogprobsReport, sides: Sequence[SideSummary]
) -> Iterator[str]:
    """Yields one sentence where both sides are beyond AT_PREDICTION times their predicted
    error without a named cause, and are at least ALIKE times nearer to each other: then
    the model may be another one than they ran. Else nothing."""
    off = [
        side.rms
        for side in sides
        if side.rms and side.ratio and side.ratio.mean > AT_PREDICTION and not side.causes
    ]
    sums = [row.sums for row in report.pairs if row.sums]
    square, tokens = (math.fsum(x[name] for x in sums) for name in ("square", "tokens"))
    if len(off) < 2 or not tokens:
        return
    between = math.sqrt(square / tokens)
    if min(off) >= ALIKE * between:
        times = f"{ratio(min(off) / between)} times" if between else "infinitely"
        name = report.plan.model
        yield f"Both are {times} nearer to each other: is {name} the model that they ran?"


def cost_sentence(costs: Sequence[Cost], clip: tuple[float, float]) -> Iterator[str]:
    """Yields `7.9 % of the ratios lie outside [0.8, 1.2]; predicted: with a head in
    float32 1.5 %, in float16 0 %.`, of the pair. Fixes that were not predicted, or leave
    a token without a finite value, are left out. Nothing where no ratio lies outside, and
    without a pair."""
    words = {
        UNDONE: "with the causes undone",
        ROUNDINGS: "by roundings alone",
        HEAD: "with a head in float32",
        HALF: "in float16",
    }
    of_pair = {
        cost.fix: cost for cost in costs if cost.side == PAIR and cost.share is not None
    }
    now = of_pair[NOW].share if NOW in of_pair else None
    if now is None or not now.mean:
        return
    parts = [
        f"{words[fix]} {percent(of_pair[fix].share.mean)}"  # type: ignore[union-attr]
        for fix in words
        if fix in of_pair and not of_pair[fix].lost
    ]
    low, high = map(three, clip)
    predicted = f"; predicted: {', '.join(parts)}" if parts else ""
    yield f"{percent(now.mean)} of the ratios lie outside [{low}, {high}]{predicted}."


def ordered(
    sides: Sequence[SideSummary], verdicts: dict[str, Outcome]
) -> list[SideSummary]:
    """Returns the sides, those with the gravest verdict first, equal ones in their order.
    `verdicts`: by side; a side without one counts as passed."""
    order = list(Outcome)
    return sorted(
        sides, key=lambda side: order.index(verdicts.get(side.name, Outcome.PASSED))
    )


def _ratio_clauses(sides: Sequence[SideSummary]) -> Iterator[str]:
    """Yields a clause for each side: `rollout: 6.12× what bfloat16 explains`, then
    `trainer 1.02×` where the side before it has the same format and a ratio."""
    before = ""
    for side in sides:
        if side.ratio is not None and side.format == before:
            yield f"{side.name} {ratio(side.ratio.mean)}×"
        else:
            yield f"{side.name}: {ratio_clause(side)}"
        before = side.format if side.ratio is not None else ""


def ratio_clause(side: SideSummary) -> str:
    """Returns `6.12× what bfloat16 explains`. A side without a ratio gives `nothing is
    predicted` if it has tokens, else `not compared with a model`."""
    if side.ratio is None:
        return "not compared with a model" if not side.tokens else "nothing is predicted"
    return f"{ratio(side.ratio.mean)}× what {side.format} explains"


def causes_clause(named: Sequence[NamedCause], *, with_side: bool = True) -> str:
    """Returns the causes in a sentence: `Cause: rollout: temperature 0.7; undoing it
    leaves 1.10×.` or `Causes: A. B.`; without the side where `with_side` is False. Empty
    without a cause."""
    if not named:
        return ""
    texts = []
    for cause in named:
        side = "one side beside the other" if cause.side == PAIR else cause.side
        undone = ""
        if cause.left is not None:
            kind = KINDS[cause.cause]
            by_size = kind.is_size or kind.in_part
            what = "with its size" if by_size else "undoing it leaves"
            undone = f"; {what} {ratio(cause.left)}×"
        texts.append(
            f"{side}: {cause.words}{undone}" if with_side else cause.words + undone
        )
    return f"{'Cause' if len(texts) == 1 else 'Causes'}: {'. '.join(texts)}."
