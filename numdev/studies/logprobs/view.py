"""Shows a report of log-probabilities: sides, causes, the numbers of dashboards, where in
sequences a side is off, and the worst tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import assert_never

from numdev.gate.rules import rules_from_data
from numdev.grouping import grouped
from numdev.report import Outcome, Standing
from numdev.report import document as doc
from numdev.report.number_text import NONE, percent, ratio, si, three
from numdev.studies.logprobs.report import (
    Bin,
    Cost,
    LogprobsReport,
    NamedCause,
    SequenceEstimate,
    SideSummary,
)
from numdev.studies.logprobs.verdict import NOISE, tests

LEGEND = (
    "rms: of the log-probability less the exact one, nats a token. × predicted: that "
    "over what rounding each operation to nearest gives on the same tokens; its 95 % "
    "interval over sequences, cut to what can be. expected mean: -rms²/2 of the "
    "predicted error; the mean of a sound side lies within that size of 0. resolved: the "
    "smallest mean that so many tokens tell from 0, four times in five. outside clip: "
    "ratios to the exact probability outside the clip band, and those that the roundings "
    "alone put there."
)
COSTS = (
    "now: as recorded. roundings alone, head in float32, float16: as predicted; of one "
    "side from its own tokens' predicted errors, of both from each token's difference, "
    "scaled by the predicted errors. Fixes are predicted on up to 16 sequences."
)
PAIRED = (
    "d is the log-probability of the second side less that of the first, r = exp(d). "
    "Intervals: 95 %, over sequences; they end at what such a number can be."
)


def styles(report: LogprobsReport) -> tuple[doc.Style, ...]:
    """Returns the style of the first sentence of the answer, by the outcome: `bad`,
    `warn` (not judged) or `good`; empty where the report has no outcome."""
    match report.outcome:
        case Outcome.EXCEEDED:
            return ("bad",)
        case Outcome.NOT_JUDGED:
            return ("warn",)
        case Outcome.PASSED:
            return ("good",)
        case None:
            return ()
        case _:
            assert_never(report.outcome)


def blocks(report: LogprobsReport) -> Iterator[doc.Node]:
    """Yields what is shown below the verdicts: sides, causes, costs, the difference of
    the two sides, errors by range, the worst tokens, notes."""
    summary = report.summary
    measured = [side for side in summary.sides if side.tokens]
    yield _side_table(measured, _noise_styles(report))
    yield from doc.notes((LEGEND,) if measured else (), doc.ON_REQUEST)
    support = "; ".join(f"{s.name}: {s.support}, {s.recipe}" for s in report.plan.sides)
    yield from doc.notes((f"Held to: {support}.",))
    named = [cause for side in summary.sides for cause in side.causes]
    yield _cause_table([*named, *summary.pair_causes])
    yield _cost_table(report)
    yield from doc.notes((COSTS,) if summary.costs else (), doc.ON_REQUEST)
    yield doc.table(
        ("the two sides", "value", doc.Column("interval", width=100),
         doc.Column("formula", "left", 120), doc.Column("shown by", "left", 140)),
        (
            [s.name, three(s.value.mean if s.value else None), _ends(s.value), s.formula,
             s.shown_by]
            for s in summary.statistics
        ),
        title="The difference of the two sides",
    )  # fmt: skip
    yield from doc.notes((PAIRED,) if summary.statistics else (), doc.ON_REQUEST)
    by_range = grouped(report.bins, lambda b: (b.side, b.by)).items()
    bins = tuple(_bin_table(side, by, of_range) for (side, by), of_range in by_range)
    yield doc.Details("By position, entropy and probability", bins, doc.TEXT)
    worst = _worst_table(report)
    yield doc.Details(worst.title, (worst,) if worst.rows else (), doc.TEXT)
    yield from doc.notes(summary.notes)


def _ends(estimate: SequenceEstimate | None) -> str:
    """Returns the ends of an interval: `0.97 to 1.07`. A dash without an interval, and
    for one of width 0: sequences that do not scatter tell nothing of others."""
    if estimate is None or estimate.low is None or estimate.low == estimate.high:
        return NONE
    return f"{three(estimate.low)} to {three(estimate.high)}"


def _noise_styles(report: LogprobsReport) -> Mapping[str, doc.Style]:
    """Returns by side the style of its error over the predicted one: `bad` where it
    exceeds the limit, `warn` where it is undecided, as without a model, else empty. No
    side where the report has no rules."""
    rules = rules_from_data(report.rules)
    styles: dict[Standing, doc.Style] = {
        Standing.EXCEEDED: "bad",
        Standing.UNDECIDED: "warn",
    }
    return {
        test.kernel or "": styles.get(test.standing, "")
        for test in (tests(report, rules) if rules else ())
        if test.rule == NOISE
    }


def _side_table(
    sides: Sequence[SideSummary], styles: Mapping[str, doc.Style]
) -> doc.Table:
    """Returns the table of sides beside the exact model. `styles`: as `_noise_styles`
    returns them."""
    columns = (
        *("side", "tokens", "rms", "× predicted", "interval"),
        *(doc.Column("mean", width=100), doc.Column("expected mean", width=110)),
        doc.Column("resolved", width=120),
        doc.Column("outside clip", width=130),
    )

    def cells(side: SideSummary) -> Iterator[str | doc.Cell]:
        """Yields the cells of a side, one for each column."""
        yield doc.Cell(f"{side.name} {side.format}", style="strong")
        yield f"{side.tokens:,}"
        yield si(side.rms)
        error = ratio(side.ratio.mean if side.ratio else None)
        yield doc.Cell(error, style=styles.get(side.name, ""))
        yield _ends(side.ratio)
        yield si(side.mean.mean if side.mean else None)
        yield si(side.expected_mean)
        yield si(side.resolved)
        yield f"{percent(side.clipped)} ({percent(side.predicted_clipped)})"

    return doc.table(columns, map(cells, sides), title="Each side beside the exact model")


def _cause_table(named: Sequence[NamedCause]) -> doc.Table:
    """Returns the table of the causes that are named."""
    return doc.text_table(
        ("side", "cause", "what it is", "takes away", "slope", "leaves"),
        (
            (c.side, doc.Cell(c.cause, style="bad"), c.words, percent(c.share),
             ratio(c.slope.mean if c.slope else None), ratio(c.left))
            for c in named
        ),
        title="Causes, in the order in which they were undone",
    )  # fmt: skip


def _cost_table(report: LogprobsReport) -> doc.Table:
    """Returns the table of the shares of ratios outside the clip band, of each side and
    of the pair, as recorded and with each fix."""
    low, high = map(three, report.plan.clip)

    def cells(cost: Cost) -> Iterator[str]:
        """Yields the cells of a share, one for each column."""
        yield cost.side
        yield cost.fix
        yield f"{cost.tokens:,}{f' ({cost.lost:,} overflow)' if cost.lost else ''}"
        yield percent(cost.share.mean if cost.share else None)
        yield _ends(cost.share)

    return doc.text_table(
        ("side", "fix", "tokens", "outside clip", "interval"),
        map(tuple, map(cells, report.summary.costs)),
        title=f"Ratios outside [{low}, {high}]",
    )


def _bin_table(side: str, by: str, bins: Sequence[Bin]) -> doc.Table:
    """Returns the table of a side's errors by `by`: position, entropy or probability, one
    line a bin, in order. Each bin has at least one token."""
    unit = {"entropy": "entropy, nats", "probability": "exact probability"}.get(by, by)
    rows = []
    for each in bins:
        predicted = each.predicted_square
        over = math.sqrt(each.square / predicted) if predicted else None
        rms = math.sqrt(each.square / each.tokens)
        rows.append([each.label, f"{each.tokens:,}", si(rms), ratio(over)])
    columns = (unit, "tokens", "rms", "× predicted")
    return doc.table(columns, rows, title=f"{side} by {by}", only=doc.TEXT)


def _worst_table(report: LogprobsReport) -> doc.Table:
    """Returns the table of the worst tokens, as ids; with their texts where these were
    asked for."""
    text = any(token.text is not None for token in report.worst)
    columns = ("side", "sequence", "position", "token", *(("text",) if text else ()))
    return doc.text_table(
        (*columns, "error", "exact", "entropy"),
        (
            (w.side, str(w.sequence), str(w.position), str(w.token),
             *((repr(w.text or ""),) if text else ()), si(w.error), si(w.exact),
             si(w.entropy))
            for w in report.worst
        ),
        title="The tokens that are farthest off",
        only=doc.TEXT,
    )  # fmt: skip
