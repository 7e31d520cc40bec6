"""Computes the summary of a report of effects from its rows: runs over all sequences,
their shares, the budget of sites, and the answer in sentences. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numdev.grouping import grouped
from numdev.metrics.statistics import factor
from numdev.report.number_text import label, percent, si, three
from numdev.studies.effects.report import (
    Beside,
    Budget,
    EffectsReport,
    EffectsSummary,
    Estimate,
    Fields,
    OutputRow,
    RunSummary,
    rank_for_use,
)

LEAST = 3  # sequences that an interval takes
ABOUT = ("kind", "format", "at", "kernel", "options", "site", "layer")
Costs = Mapping[int, float]  # by sequence
Runs = Sequence[RunSummary]


def recomputed_summary(report: EffectsReport) -> EffectsSummary:
    """Returns the summary that the rows and the plan of a report give; the report's
    stored summary is not read."""
    return summarise(report.rows, report.plan.against, logits=report.plan.logits)


def with_summary(report: EffectsReport) -> EffectsReport:
    """Returns a copy of the report with the summary that its rows give."""
    return report.model_copy(update={"summary": recomputed_summary(report)})


def summarise(rows: Sequence[OutputRow], against: str, *, logits: bool) -> EffectsSummary:
    """Returns the summary of rows: every run over its sequences, of each format whether
    the costs of its single rounding sites add up to the whole model's (`budgets`, where
    sites ran), the answer in sentences, and notes. Without rows all are empty. `against`:
    the kernel that others are compared with; `logits`: whether costs are of logits."""
    by_output = grouped(rows, lambda row: (row.format, row.at)).values()
    outputs = [
        OutputRuns(rows_of_output, against, logits=logits) for rows_of_output in by_output
    ]
    budgets = tuple(x.budget for x in outputs if x.budget)
    notes: tuple[str, ...] = ()
    if off := ", ".join(budget.format for budget in budgets if not budget.adds_up):
        note = "the sites do not add up to the whole: draw no conclusion from shares."
        notes = (f"In {off} {note}",)
    if any(row.at for row in rows):
        notes = ("In a diffusers pipeline single rounding sites are not tried.",)
    runs = tuple(run for x in outputs for run in x.runs)
    answer = tuple(line for x in outputs for line in x.answer())
    return EffectsSummary(answer=answer, runs=runs, budgets=budgets, notes=notes)


class OutputRuns:
    """All runs of one output of the model in one format. `rows`: at least one."""

    def __init__(self, rows: Sequence[OutputRow], against: str, *, logits: bool) -> None:
        self.against, self.logits = against, logits
        by_run = grouped(rows, lambda row: row.run)
        self.costs = {run: _costs(of_run) for run, of_run in by_run.items()}
        # The run of the whole model that stands for what a user runs; None where none
        # ran.
        wholes = [
            of_run[0]
            for run, of_run in by_run.items()
            if run[0] == "whole" and self.costs[run]
        ]
        used = min(
            wholes, key=lambda row: rank_for_use(row.kernel, against), default=None
        )
        self.whole: Costs = self.costs[used.run] if used else {}
        self.runs = [self._summarise_run(of_run) for of_run in by_run.values()]
        self.main = next((run for run in self.runs if used and run.run == used.run), None)
        self.sites = [run for run in self.runs if run.kind == "site" and run.cost]
        self.budget = self._budget(self.main) if self.main and self.sites else None

    def _summarise_run(self, rows: Sequence[OutputRow]) -> RunSummary:
        """Returns one run over its sequences, each number made as OVER_SEQUENCES says.
        `rows`: its rows, at least one. Numbers are over the sequences that have a cost,
        and empty (null, or 0 `positions`) where none has. How many sequences failed, how
        many are not finite, and the first reason are of all rows."""
        fields: Fields = {name: getattr(rows[0], name) for name in ABOUT}
        for name, over_sequences in OVER_SEQUENCES.items():
            values = [getattr(row, name) for row in rows if row.cost is not None]
            if values := [x for x in values if x not in (None, ())]:
                fields[name] = over_sequences(values)
        costs = self.costs[rows[0].run]
        beside, expected = self._compared_run(rows[0])
        ratios = _ratios_by_sequence(costs, expected)
        unmatched = [i for i, cost in costs.items() if cost and not expected.get(i)]
        fields |= {
            "reason": next((row.reason for row in rows if row.reason), None),
            "failed": sum(row.status == "failed" for row in rows),
            "nonfinite": sum(row.nonfinite > 0 for row in rows),
        }
        fields |= {
            "unmatched": len(unmatched) if beside else 0,
            "share": _geometric_mean(_ratios_by_sequence(costs, self.whole)),
            "beside": beside,
            "over": _geometric_mean(ratios),
            "over_worst": max(ratios, default=None),
        }
        return RunSummary.model_validate(fields)

    def _compared_run(self, run: OutputRow) -> tuple[Beside | None, Costs]:
        """Returns the name, as in `RunSummary.beside`, and the costs by sequence of what
        a run is compared with: for the whole model all sites together, for attention
        alone what its rounding model predicts. Where that has no cost above 0 it is
        attention alone with the kernel `against`, named so. The costs are empty
        where such a run has none. (None, {}) for any other run."""

        def of(**changes: object) -> Costs:
            """Returns the costs by sequence of the run that differs from `run` in these
            fields; empty if there is none."""
            return self.costs.get(run.model_copy(update=changes).run, {})

        if run.kind == "whole":
            return "sites", of(kind="emulated", kernel="", options={})
        if run.kind != "attention" or run.layer is not None:
            return None, {}
        predicted = of(kind="predicted")
        if any(predicted.values()):
            return "predicted", predicted
        return "against", of(kernel=self.against, options={})

    def _budget(self, main: RunSummary) -> Budget:
        """Returns the sum of the sites' costs over that of the whole model, each summed
        over the sequences in which the whole model has a cost. Its interval is that of
        the geometric mean of each sequence's ratio. The sites add up where the sum is
        from 0.9 to 1.1."""
        sites = [self.costs[run.run] for run in self.sites]
        sums = {i: sum(costs.get(i, 0.0) for costs in sites) for i in self.whole}
        ratio = sum(sums.values()) / (sum(self.whole.values()) or 1.0)
        parts = _geometric_mean(_ratios_by_sequence(sums, self.whole)) or Estimate(
            mean=ratio
        )
        parts, adds_up = parts.model_copy(update={"mean": ratio}), 0.9 <= ratio <= 1.1
        return Budget(
            format=main.format, kernel=main.kernel, parts=parts, adds_up=adds_up
        )

    def answer(self) -> Iterator[str]:
        """Yields the sentences on the run that stands for what a user runs: how large the
        error is; for logits, how often the top token changes; attention's part and the
        largest sites; how far the output is from that of the kernel `against`. Sentences
        without a number are left out; nothing where no run of the whole model has a
        cost."""
        main = self.main
        if main is None or main.cost is None:
            return
        attention = attention_alone(main, self.runs)
        share = attention.share if attention else None
        yield self._cost_sentence(main, main.cost)
        if main.flips is not None:
            yield self._flips_sentence(main)
        if parts := "; ".join(self._part_clauses(share)):
            yield f"{self._run_name(main)}: {parts}."
        if main.from_against is not None and main.kernel != self.against:
            yield self._difference_sentence(main, main.from_against)

    def _run_name(self, main: RunSummary) -> str:
        """Returns the run in words: `bfloat16 with sdpa-flash`, of a pipeline with its
        output, `, image`."""
        fmt = f"{main.format} with {label(main)}"
        return f"{fmt}, {main.place}" if main.at else fmt

    def _part_clauses(self, share: Estimate | None) -> Iterator[str]:
        """Yields a clause on attention's share of the error, if that is known: `24 % of
        the error is from attention alone`; then, if the sites' errors add up to the
        whole, one on the (at most three) sites that make most of it."""
        if share is not None:
            yield f"{_with_range(share, percent)} of the error is from attention alone"
        if (budget := self.budget) and budget.adds_up:
            shares = {run.site: run.share.mean for run in self.sites if run.share}
            first = sorted(shares, key=lambda site: -shares[site])[:3]
            largest = ", ".join(f"{site} {percent(shares[site])}" for site in first)
            yield f"largest sites: {largest}"

    def _difference_sentence(self, main: RunSummary, difference: float) -> str:
        """Returns the sentence on how far the output is from that of the kernel
        `against`, as a multiple of the error. In brackets it has what inputs one or two
        ulps off change, unless that is 0 or unknown. `difference`: over the rms of the
        exact output."""
        size = main.error or 1.0
        again = (r.from_against for r in self.runs if r.kind == "moved")
        moved = next(filter(None, again), None)
        ulp = f" (inputs 1 or 2 ulps off: {three(moved / size)}×)" if moved else ""
        kernel = label(main)
        return (
            f"{self._run_name(main)}: {kernel} and {self.against} differ by "
            f"{three(difference / size)}× the error{ulp}."
        )

    def _cost_sentence(self, main: RunSummary, cost: Estimate) -> str:
        """Returns the sentence on the size of the error: of logits the KL divergence, and
        the changes of loss and perplexity where they are known; of states or a pipeline's
        output the squared relative error."""
        if not self.logits:
            what = main.place if main.at else "final states"
            size = f"squared relative error of the {what} {_with_range(cost)}"
            return f"{self._run_name(main)}: {size}."
        text = f"{self._run_name(main)}: KL {_with_range(cost)} nats/token"
        if main.log_perplexity is not None:
            loss = f"{'+' * (main.log_perplexity > 0)}{si(main.log_perplexity)}"
            perplexity = percent(math.expm1(main.log_perplexity), sign=True)
            text += f", loss {loss} nats, perplexity {perplexity}"
        return f"{text}."

    def _flips_sentence(self, main: RunSummary) -> str:
        """Returns the sentence on how often the top token changes; in brackets how often
        it does in the first other run of the whole model, unless that changes none or has
        no number."""
        other = next((r for r in self.runs if r.kind == "whole" and r is not main), None)
        beside = f" ({other.flips} with {other.kernel})" if other and other.flips else ""
        return f"{self._run_name(main)}: {flips_in_words(main)}{beside}."


def _costs(rows: Sequence[OutputRow]) -> Costs:
    """Returns the cost by the number of the sequence, of the rows that have one."""
    return {row.sequence: row.cost for row in rows if row.cost is not None}


def _ratios_by_sequence(above: Costs, below: Costs) -> list[float]:
    """Returns above / below for each sequence of `above` where `below` is more than 0."""
    return [above[i] / below[i] for i in above if below.get(i, 0.0) > 0]


def _geometric_mean(values: Sequence[float]) -> Estimate | None:
    """Returns the geometric mean of ratios, none below 0, with its 95 % interval; the
    arithmetic mean where a value is 0. The ends are None for fewer than LEAST values, and
    for an interval beyond float64. None without a value."""
    mean, low, high = factor(values) if values else (0.0, None, None)
    low, high = (low, high) if len(values) >= LEAST else (None, None)
    return Estimate(mean=mean, low=low, high=high) if values else None


def _mean_with_interval(values: Sequence[float]) -> Estimate:
    """Returns the arithmetic mean of costs; its interval is that of the geometric mean,
    in proportion, but that of the arithmetic mean where a cost is 0. None for the ends
    where there are fewer than LEAST values, or all are 0, or the interval is beyond
    float64. `values`: at least one, none below 0."""
    mean, middle = _average(values), _geometric_mean(values)
    if not middle or not middle.mean or middle.low is None or middle.high is None:
        return Estimate(mean=mean)
    low, high = (mean * end / middle.mean for end in (middle.low, middle.high))
    return Estimate(mean=mean, low=max(0.0, low), high=high)


def _average(values: Sequence[float]) -> float:
    """Returns the arithmetic mean. `values`: at least one."""
    return sum(values) / len(values)


# How a number of a run is made of those of its sequences
OVER_SEQUENCES: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("cost", "log_prob"), _mean_with_interval),
    **dict.fromkeys(("log_perplexity", "error", "angle", "from_against"), _average),
    **dict.fromkeys(("cost_p999", "cost_max", "log_prob_p999", "log_prob_max"), max),
    **dict.fromkeys(("positions", "flips", "unexplained"), sum),
    "first_flip": min,
    "growth": lambda sequences: tuple(map(_average, zip(*sequences, strict=True))),
}


def attention_alone(whole: RunSummary, runs: Runs) -> RunSummary | None:
    """Returns the run with attention alone in the format that has the kernel, options,
    format and output of `whole`; None where there is none."""
    return next((run for run in runs if run.run == ("attention", *whole.run[1:])), None)


def interval_in_words(x: Estimate, write: Callable[[float | None], str]) -> str:
    """Returns the ends of an interval, each written by `write`; empty without an
    interval, and where both ends are written alike."""
    low, high = write(x.low), write(x.high)
    return "" if x.low is None or low == high else f"{low} to {high}"


def _with_range(x: Estimate, write: Callable[[float | None], str] = si) -> str:
    """Returns the mean, then its interval in brackets, `1.02 (0.97 to 1.07)`, if it has
    one whose ends are not written alike; each number written by `write`."""
    within = interval_in_words(x, write)
    return write(x.mean) + (f" ({within})" if within else "")


def flips_in_words(run: RunSummary) -> str:
    """Returns a clause on how often a run changes the top token: `changes no top token
    (64 positions)`, or `changes the top token at 3 of 64 positions`. To the latter it
    adds `, 1 of them not near ties` or `, all of them near ties`, where that is known.
    `run`: one of logits, whose `flips` is not None."""
    if run.flips == 0:
        return f"changes no top token ({run.positions:,} positions)"
    text = f"changes the top token at {run.flips} of {run.positions:,} positions"
    if run.unexplained:
        return f"{text}, {run.unexplained} of them not near ties"
    all_near_ties = run.flips and run.unexplained == 0
    return f"{text}, all of them near ties" if all_near_ties else text
