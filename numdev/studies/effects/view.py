"""Shows a report of effects: the kernels, the budget of sites, how the error grows with
position, layers, and the model's own checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from numdev.grouping import grouped
from numdev.report import document as doc
from numdev.report.number_text import NONE, labelled, percent, ratio, si
from numdev.studies.effects.report import Check, EffectsReport, Estimate, RunSummary

LOGITS = (
    "cost: the error as Kullback-Leibler divergence from the exact distribution of the "
    "next token, nats a position. |Δ log p|: change of the log-probability of the text's "
    "own tokens. flips: positions where the top token changes."
)
STATES = (
    "cost: the squared relative error of the {}, a mean over positions. error: their rms "
    "error over the exact rms, of all positions together. angle: between these and the "
    "exact ones."
)
BOTH = (
    "attention alone: its cost with all else in fp64, of the whole's; its inputs are "
    "rounded, which the sites q, k, v and rotary count too. × predicted: that over what "
    "the kernel's own rounding model predicts; × eager: where nothing is predicted, over "
    "that of eager attention. apart: rms difference of the output from that with {}, of "
    "the exact output's rms."
)
SITES = (
    "attention scores, P and output: as {} rounds; in calls for which it has no rounding "
    "model, as the next kernel that has one, or FlashAttention-2."
)
STANDARD = {
    "repeat": "{}, again", "moved": "{}, inputs one ulp off",
    "emulated": "all sites together", "random": "all sites, rounded at random",
}  # fmt: skip
BESIDE = {"predicted": "× predicted", "eager": "× eager"}
BAR = 24  # the width of the longest bar


def blocks(report: EffectsReport) -> Iterator[doc.Node]:
    """Yields what is shown below the verdicts: for each format and output a table of
    kernels, then of sites, layers and positions if they were measured, and of checks."""
    runs, logits = report.summary.runs, report.output == "logits"
    for (fmt, at), of_output in grouped(runs, lambda run: (run.format, run.at)).items():
        place = f"{of_output[0].place.capitalize()} in {fmt}" if at else fmt
        yield _kernel_table(fmt, of_output, f"{place} beside fp64", logits=logits)
    what = "latents, or image" if any(run.at for run in runs) else "final states"
    legend = (
        f"{LOGITS if logits else STATES.format(what)} "
        f"{BOTH.format(report.request.get('against'))}"
    )
    yield from doc.notes((legend,) if any(run.cost for run in runs) else ())
    for budget in report.summary.budgets:
        sites = [r for r in runs if r.format == budget.format and r.kind == "site"]
        title = (
            f"One site alone in {budget.format}, of the whole with {budget.kernel}; "
            f"together {ratio(budget.parts.mean)}"
        )
        yield _site_table(sites, title)
    if report.summary.budgets:
        yield from doc.notes((SITES.format(report.plan.sites_of),))
    yield from doc.notes(report.summary.notes)
    layers = [run for run in runs if run.layer is not None and run.cost]
    for fmt, of_format in grouped(layers, lambda run: run.format).items():
        yield doc.table(
            ("layer", "of the whole", "cost"),
            (
                [str(r.layer), _share_cell(r), si(_mean_or_none(r.cost))]
                for r in of_format
            ),
            title=f"{of_format[0].kernel} in {fmt} in one layer, all else in fp64",
        )
    grown = [run for run in runs if run.growth and run.kind in ("whole", "emulated")]
    parts = len(grown[0].growth) if grown else 0
    yield doc.table(
        ("part of the sequence", *(str(i + 1) for i in range(parts))),
        ([f"{r.format} {_run_name(r)}", *map(si, r.growth)] for r in grown),
        [run.kind != "whole" for run in grown],
        title="Cost by position, in equal parts of the sequence",
        kind="series",
    )
    yield doc.text_table(
        ("the model in fp64", "", "largest difference", ""),
        (
            (f"{c.name} {c.format}".strip(), _check_cell(c), si(c.difference), c.reason)
            for c in report.checks
        ),
        title="Two ways to compute one thing",
    )


def _mean_or_none(x: Estimate | None) -> float | None:
    """Returns the mean of an estimate; None without one."""
    return None if x is None else x.mean


def _run_name(run: RunSummary) -> str:
    """Returns what a run is called in a table: its kernel with options, or what it is
    otherwise."""
    return STANDARD.get(run.kind, "{}").format(labelled(run.kernel, run.options))


def _share_cell(run: RunSummary | None) -> str:
    """Returns a run's share of the whole error in per cent; a dash without one."""
    return NONE if run is None or run.share is None else percent(run.share.mean)


def _check_cell(check: Check) -> doc.Cell:
    """Returns the result of a check as a cell: `agree`, `DIFFER`, `COULD NOT BE TRIED`,
    or `not tested` for one that does not apply."""
    if check.holds is None:
        word = "COULD NOT BE TRIED" if check.applies else "not tested"
        return doc.Cell(word, style="warn" if check.applies else "soft")
    holds = check.holds
    return doc.Cell("agree", style="good") if holds else doc.Cell("DIFFER", style="bad")


def _kernel_table(
    fmt: str, runs: Sequence[RunSummary], title: str, *, logits: bool
) -> doc.Table:
    """Returns the table of the model with each kernel in a format, and below them the
    runs that they are compared with. Runs of the whole model without numbers are left
    out. `runs`: those of one output; `logits`: whether it is logits, and not final
    states."""
    alone = {r.run[1:]: r for r in runs if r.kind == "attention"}
    wholes = [run for run in runs if run.kind == "whole" and run.cost]
    present = {alone[r.run[1:]].beside for r in wholes if r.run[1:] in alone}
    beside = [what for what in BESIDE if what in present]
    by_kind = grouped(runs, lambda run: str(run.kind))
    standards = [run for kind in STANDARD for run in by_kind.get(kind, ())]
    shown = [*wholes, *standards]

    def cells(run: RunSummary) -> Iterator[str | doc.Cell]:
        """Yields the cells of a run, one for each column."""
        attention = alone.get(run.run[1:]) if run.kind == "whole" else None
        yield doc.Cell(_run_name(run), style="strong", title=run.reason or "")
        yield si(_mean_or_none(run.cost))
        yield si(_mean_or_none(run.log_prob)) if logits else si(run.error)
        if logits:
            yield NONE if run.flips is None else f"{run.flips:,}"
        else:
            yield NONE if run.angle is None else f"{si(run.angle)}°"
        yield _share_cell(attention)
        yield from (_ratio_cell(attention, what) for what in beside)
        yield si(run.from_against)

    numbers = ("cost", "|Δ log p|", "flips") if logits else ("cost", "error", "angle")
    ratios = (BESIDE[what] for what in beside)
    columns = (f"the model in {fmt} with", *numbers, "attention alone", *ratios, "apart")
    standard = [run.kind != "whole" for run in shown]
    return doc.table(columns, map(cells, shown), standard, title=title)


def _ratio_cell(run: RunSummary | None, what: str) -> str:
    """Returns a run's cost over that of the run it is compared with, if that is `what`; a
    dash otherwise."""
    return ratio(run.over.mean) if run and run.over and run.beside == what else NONE


def _site_table(runs: Sequence[RunSummary], title: str) -> doc.Table:
    """Returns the table of sites with their shares as bars, the largest first. Those
    below 0.005 % are left out."""
    shares = {
        run.site: run.share.mean for run in runs if run.share and run.share.mean >= 5e-5
    }
    longest = max(shares.values(), default=1.0)
    rows = (
        (site, percent(x), doc.Cell("█" * max(1, round(BAR * x / longest)), style="soft"))
        for site, x in sorted(shares.items(), key=lambda item: -item[1])
    )
    bar = doc.Column("", align="left")
    return doc.table(("site", doc.Column("share"), bar), rows, title=title)
