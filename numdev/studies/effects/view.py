"""Shows a report of effects: the kernels, the budget of sites, how the error grows with
position, layers, and the model's own checks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from numdev.grouping import grouped
from numdev.report import Axis, Curve, Figure, Role, Tick
from numdev.report import document as doc
from numdev.report.document import Column
from numdev.report.number_text import NONE, label, percent, ratio, si
from numdev.studies.effects.report import (
    Check,
    EffectsReport,
    Estimate,
    RunSummary,
    against_in_words,
)

LOGITS = (
    "KL: Kullback-Leibler divergence from the exact distribution of the next token, a "
    "mean over positions. Perplexity and loss (nats a token): how they change on the "
    "text, with their sign. |Δ logprob|: the mean change of the text's own tokens, in "
    "nats. Tokens changed: positions where another token becomes the likeliest."
)
STATES = (
    "Squared error: the squared relative error of the {}, a mean over positions. Error: "
    "their rms error over the exact rms, of all positions together. Angle: between these "
    "and the exact ones."
)
BOTH = (
    "Attention's share: of {0}, with attention alone in the format, all else in fp64; "
    "its inputs are rounded, which the sites q, k, v and rotary count too. Attention / "
    "expected: that over what the kernel's own rounding model predicts; attention / "
    "{1}: where nothing is predicted, over that of {1} attention. From {2}: rms "
    "difference of the output from that with {2}, over the exact output's rms."
)
SITES = (
    "attention scores, P and output: as {} rounds; in calls for which it has no rounding "
    "model, as the next kernel that has one, or FlashAttention-2."
)
STANDARD = {
    "repeat": "{}, again", "moved": "{}, inputs 1 or 2 ulps off",
    "emulated": "all sites together", "random": "all sites, rounded at random",
}  # fmt: skip
BESIDE = {"predicted": "attention / expected", "against": "attention / {}"}
BAR = 24  # the width of the longest bar
MIN_SHARE = 5e-5  # of the whole that a site must make to be shown
NOT_ON_PAGE: tuple[doc.Medium, ...] = ("terminal", "markdown")


def blocks(report: EffectsReport) -> Iterator[doc.Node]:
    """Yields what is shown below the verdicts: for each format and output a table of
    kernels; then notes, tables of sites, layers and positions if they were measured, and
    of checks. On a page sites are bars with their tables behind them, layers and
    positions lines."""
    runs, logits = report.summary.runs, report.output == "logits"
    against = str(report.request.get("against"))
    failed = _failed_shares(report)
    for (fmt, at), of_output in grouped(runs, lambda run: (run.format, run.at)).items():
        place = f"{of_output[0].place.capitalize()} in {fmt}" if at else fmt
        columns = KernelColumns(of_output, against, failed, logits=logits)
        yield columns.table(f"{place} beside fp64")
    what = "latents, or image" if any(run.at for run in runs) else "final states"
    cost = "KL" if logits else "the squared error"
    legend = (
        f"{LOGITS if logits else STATES.format(what)} "
        f"{BOTH.format(cost, against_in_words(against), against)}"
    )
    yield from doc.notes(
        (legend,) if any(run.cost for run in runs) else (), doc.ON_REQUEST
    )
    yield from _budget_blocks(report)
    yield from doc.notes(report.summary.notes)
    yield from _layer_blocks(runs, error_name(logits=logits))
    yield from _position_blocks(runs, error_name(logits=logits))
    yield from _check_blocks(report.checks)


def error_name(*, logits: bool) -> str:
    """Returns what a run's `cost` is, with its unit: `KL, nats/token` for logits, else
    `squared error`."""
    return "KL, nats/token" if logits else "squared error"


def _budget_blocks(report: EffectsReport) -> Iterator[doc.Node]:
    """Yields the budgets of sites, if there are any: for a page bars of all formats, then
    a table for each format behind them, which other media show openly. Sites that make
    less than MIN_SHARE of the error are left out."""
    tables, bars = [], []
    for budget in report.summary.budgets:
        sites = [
            run
            for run in report.summary.runs
            if run.format == budget.format and run.kind == "site"
        ]
        whole = ratio(budget.parts.mean)
        title = (
            f"Share of the error by site, {budget.format} with {budget.kernel} "
            f"(sum {whole})"
        )
        shares = _site_shares(sites)
        tables.append(_site_table(shares, title))
        label = f"{budget.kernel}, {budget.format}: sites together {whole} of the error"
        bars.append((label, shares))
    if not tables:
        return
    title = "Which roundings make the error: each site alone, of the whole"
    yield doc.StackedBars(tuple(bars), title)
    note = doc.notes((SITES.format(report.plan.sites_of),), doc.ON_REQUEST)
    yield doc.Details("Site by site", (*tables, *note))


def _layer_blocks(runs: Sequence[RunSummary], error: str) -> Iterator[doc.Node]:
    """Yields how much of the error attention in each layer alone makes: on a page one
    figure with a line for each format, elsewhere a table for each format. The figure is
    missing where no format has two layers. Nothing where no layer was run alone, or has a
    cost. `error`: the name of a cost, from `error_name`."""
    layers = [run for run in runs if run.layer is not None and run.cost]
    tables: list[doc.Table] = []
    curves: list[Curve] = []
    for fmt, of_format in grouped(layers, lambda run: run.format).items():
        tables.append(
            doc.table(
                ("layer", "of the whole", error),
                (
                    [str(r.layer), _share_cell(r), si(_mean_or_none(r.cost))]
                    for r in of_format
                ),
                title=f"{of_format[0].kernel} in {fmt} in one layer, all else in fp64",
                only=NOT_ON_PAGE,
            )
        )
        costs = {
            (r.layer or 0, f"layer {r.layer}"): [r.cost.mean] for r in of_format if r.cost
        }
        curves += doc.curve(f"{of_format[0].kernel} {fmt}", "kernel", costs)
    yield from tables
    numbers = sorted({run.layer for run in layers if run.layer is not None})
    yield from _figure_blocks("layer", "Attention in one layer alone", curves,
                              [(n, str(n)) for n in numbers], error)  # fmt: skip


def _position_blocks(runs: Sequence[RunSummary], error: str) -> Iterator[doc.Node]:
    """Yields how the error grows along the sequence: on a page a figure with a line for
    each run, elsewhere a table with a row for each. Runs are those of kind `whole` or
    `emulated` that have `growth`; without any it is a table without rows, and no figure.
    `error`: the name of a cost, from `error_name`."""
    grown = [run for run in runs if run.growth and run.kind in ("whole", "emulated")]
    parts = len(grown[0].growth) if grown else 0
    yield doc.table(
        ("part of the sequence", *(str(i + 1) for i in range(parts))),
        ([f"{r.format} {_run_name(r)}", *map(si, r.growth)] for r in grown),
        [run.kind != "whole" for run in grown],
        title=f"{error} by position, in equal parts of the sequence",
        kind="series",
        only=NOT_ON_PAGE,
    )
    curves: list[Curve] = []
    for run in grown:
        costs = {
            (i + 1, f"part {i + 1} of {parts}"): [x] for i, x in enumerate(run.growth)
        }
        role: Role = "kernel" if run.kind == "whole" else "precision"
        at = f" {run.place}" * bool(run.at)
        curves += doc.curve(f"{_run_name(run)} {run.format}{at}", role, costs)
    ticks = [(i + 1, str(i + 1)) for i in range(parts)]
    yield from _figure_blocks("part of the sequence", "Error by position", curves, ticks,
                              error)  # fmt: skip


def _figure_blocks(
    axis: str,
    title: str,
    curves: Sequence[Curve],
    ticks: Sequence[tuple[int, str]],
    error: str,
) -> Iterator[doc.Node]:
    """Yields one figure for a page; nothing unless a curve has two points. `axis`: the
    title of the axis; `ticks`: places on it with their names; `error`: what is drawn."""
    if not any(len(curve.points) > 1 for curve in curves):
        return
    means = [point.mean for curve in curves for point in curve.points]
    figure = Figure(
        title=f"{title}: {error}",
        metric="cost",
        y_title=error,
        y_scale="log" if max(means) >= 4 * min(means) > 0 else "linear",
        curves=tuple(curves),
    )
    places = tuple(Tick(x=x, label=name) for x, name in ticks)
    along = Axis(name=axis, title=axis, scale="linear", ticks=places)
    yield doc.Figures((figure,), along, "", doc.PAGE)


def _check_blocks(checks: Sequence[Check]) -> Iterator[doc.Node]:
    """Yields the table of the model's own checks; nothing without checks. On a page it
    stands behind a line that counts those that agree, unless a check that applies failed
    or could not be tried."""
    table = doc.text_table(
        ("the model in fp64", "", "largest difference", ""),
        (
            (f"{c.name} {c.format}".strip(), _check_cell(c), si(c.difference), c.reason)
            for c in checks
        ),
        title="Two ways to compute one thing",
    )
    if any(check.applies and not check.holds for check in checks):
        yield table
    elif checks:
        agree = sum(check.holds is True for check in checks)
        yield doc.Details(f"The model's own checks: {agree} agree", (table,))


def _failed_shares(report: EffectsReport) -> set[tuple[str, str, str | None]]:
    """Returns (kernel with its options, format, output) of each finding by the rule `own
    share`: attention alone errs too many times what it is held against."""
    refused = (f for f in report.findings if f.rule == "own share")
    return {(label(f), fmt, f.tensor) for f in refused for fmt in f.formats}


def _mean_or_none(x: Estimate | None) -> float | None:
    """Returns the mean of an estimate; None without one."""
    return None if x is None else x.mean


def _run_name(run: RunSummary) -> str:
    """Returns what a run is called in a table: its kernel with options, `KERNEL, again`,
    `KERNEL, inputs 1 or 2 ulps off`, `all sites together` or `all sites, rounded at
    random`."""
    return STANDARD.get(run.kind, "{}").format(label(run))


def _share_cell(run: RunSummary | None) -> str:
    """Returns a run's share of the whole error in per cent, as text; a dash where it has
    none, and for None."""
    return NONE if run is None or run.share is None else percent(run.share.mean)


def _check_cell(check: Check) -> doc.Cell:
    """Returns the result of a check as a cell: `agree`, `DIFFER`, `COULD NOT BE TRIED`,
    or `not tested` for one that does not apply."""
    if check.holds is None:
        word = "COULD NOT BE TRIED" if check.applies else "not tested"
        return doc.Cell(word, style="warn" if check.applies else "soft")
    holds = check.holds
    return doc.Cell("agree", style="good") if holds else doc.Cell("DIFFER", style="bad")


class KernelColumns:
    """The table of the model with each kernel in a format, and below the kernels the runs
    that these are compared with."""

    def __init__(
        self,
        runs: Sequence[RunSummary],
        against: str,
        failed: Collection[tuple[str, str, str | None]],
        *,
        logits: bool,
    ) -> None:
        self.against, self.failed, self.logits = against, failed, logits
        self.alone = {r.run[1:]: r for r in runs if r.kind == "attention"}
        # Runs of the whole model without numbers are left out.
        wholes = [run for run in runs if run.kind == "whole" and run.cost]
        by_kind = grouped(runs, lambda run: str(run.kind))
        standards = [run for kind in STANDARD for run in by_kind.get(kind, ())]
        self.shown = [*wholes, *standards]
        present = {
            self.alone[run.run[1:]].beside for run in wholes if run.run[1:] in self.alone
        }
        # By what ratios are over, the titles of their columns
        self.beside = {
            what: title.format(against_in_words(against))
            for what, title in BESIDE.items()
            if what in present
        }

    def table(self, title: str) -> doc.Table:
        """Returns the table under a title, with a row for each run that is shown."""
        numbers = [
            Column("relative error"),
            Column("angle"),
        ]
        if self.logits:
            numbers = [
                Column("perplexity change"),
                Column("loss change", width=110),
                Column("|Δ logprob|", width=120),
                Column("tokens changed"),
            ]
        columns = (
            Column("kernel", align="left"),
            Column(error_name(logits=self.logits)),
            *numbers,
            Column("attention's share"),
            *map(Column, self.beside.values()),
            Column(f"from {self.against}", width=100),
        )
        standard = [run.kind != "whole" for run in self.shown]
        return doc.table(columns, map(self._cells, self.shown), standard, title=title)

    def _cells(self, run: RunSummary) -> Iterator[str | doc.Cell]:
        """Yields the cells of a run, one for each column; a dash where the run has no
        number."""
        attention = self.alone.get(run.run[1:]) if run.kind == "whole" else None
        yield doc.Cell(_run_name(run), style="strong", title=run.reason or "")
        yield si(_mean_or_none(run.cost))
        if self.logits:
            change = run.log_perplexity
            yield percent(None if change is None else math.expm1(change), sign=True)
            yield NONE if change is None else f"{'+' * (change > 0)}{si(change)}"
            yield si(_mean_or_none(run.log_prob))
            yield NONE if run.flips is None else f"{run.flips:,}"
        else:
            yield si(run.error)
            yield NONE if run.angle is None else f"{si(run.angle)}°"
        yield _share_cell(attention)
        yield from (self._ratio_cell(attention, what) for what in self.beside)
        yield si(run.from_against)

    def _ratio_cell(self, run: RunSummary | None, what: str) -> doc.Cell:
        """Returns the cost of attention alone over that of the run it is compared with,
        red where the rule `own share` refuses it. A dash where `run` is None, has no
        ratio, or is compared with another run than `what`."""
        if run is None or run.over is None or run.beside != what:
            return doc.Cell(NONE)
        is_refused = (label(run), run.format, run.at or "output") in self.failed
        style: doc.Style = "bad" if is_refused else ""
        return doc.Cell(ratio(run.over.mean), style=style)


def _site_shares(runs: Sequence[RunSummary]) -> dict[str, float]:
    """Returns the share of each site in the whole error by name, the largest first;
    shares below MIN_SHARE are left out."""
    shares = {run.site: run.share.mean for run in runs if run.share}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return {site: share for site, share in ordered if share >= MIN_SHARE}


def _site_table(shares: Mapping[str, float], title: str) -> doc.Table:
    """Returns the table of sites with their shares as bars."""
    longest = max(shares.values(), default=1.0)
    rows = (
        (site, percent(x), doc.Cell("█" * max(1, round(BAR * x / longest)), style="soft"))
        for site, x in shares.items()
    )
    bar = doc.Column("", align="left")
    return doc.table(("site", doc.Column("share"), bar), rows, title=title)
