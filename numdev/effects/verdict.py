"""From runs to what they mean: shares, the budget, sentences, findings. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numdev.effects.report import Budget, Check, EffectsSummary, Estimate, OutputRow, RunSummary
from numdev.gate.rows import grouped
from numdev.gate.rules import EffectsLimits
from numdev.gate.tests import MODEL, Test
from numdev.metrics.statistics import BIAS_FORMATS, factor
from numdev.report.numbers import labelled, percent, si, three

LEAST = 3  # sequences that an interval is made of
SURELY = 10  # times a limit, without an interval or in one sequence alone
USED = "sdpa-default"  # what a model calls that asks for no backend

# --- numbers ------------------------------------------------------------------------------------

Costs = Mapping[int, float]  # by sequence
LARGEST = ("cost_p999", "cost_max", "log_prob_p999", "log_prob_max")
OVER_ROWS: Mapping[str, Any] = {
    **dict.fromkeys(LARGEST, max), "first_flip": min, "flips": sum, "unexplained": sum
}  # fmt: skip
MEANS = ("log_perplexity", "error", "angle", "apart")
ABOUT = ("kind", "format", "at", "kernel", "options", "site", "layer")


def summarise(rows: Sequence[OutputRow], against: str, *, logits: bool) -> EffectsSummary:
    """The runs over their sequences, the budgets of the formats, the answer, and notes."""
    runs: list[RunSummary] = []
    budgets: list[Budget] = []
    answer: list[str] = []
    for of_output in grouped(rows, lambda row: (row.format, row.at)).values():
        by_run = grouped(of_output, lambda row: row.run)
        costs = {run: _costs(own) for run, own in by_run.items()}
        used = _used(costs, against)
        whole = costs.get(used, {})
        own = [_summary(x, whole, _yardstick(run, costs, against)) for run, x in by_run.items()]
        parts = [c for run, c in costs.items() if run[0] == "site" and c]
        if whole and parts:
            sums = {i: sum(c.get(i, 0.0) for c in parts) for i in whole}
            ratio = sum(sums.values()) / (sum(whole.values()) or 1.0)
            part = (_ratio(sums, whole) or Estimate(mean=ratio)).model_copy(update={"mean": ratio})
            about = {"format": used[1], "kernel": used[3], "adds_up": 0.9 <= ratio <= 1.1}
            budgets.append(Budget(**about, parts=part))
        for main in (run for run in own if run.run == used):
            answer += _answer(main, own, against, budgets[-1] if parts else None, logits=logits)
        runs += own
    off = ", ".join(b.format for b in budgets if not b.adds_up)
    note = f"In {off} the sites do not add up to the whole: draw no conclusion from shares."
    if paints := any(row.at for row in rows):
        note = "In a diffusers pipeline single rounding sites are not tried."
    notes = (note,) if off or paints else ()
    return EffectsSummary(
        answer=tuple(answer), runs=tuple(runs), budgets=tuple(budgets), notes=notes
    )


def _costs(rows: Sequence[OutputRow]) -> Costs:
    return {row.sequence: row.cost for row in rows if row.cost is not None}


def _used(costs: Mapping[Any, Costs], against: str) -> Any:
    """The run of the whole model that stands for what a user runs; None where none ran."""
    wholes = [run for run in costs if run[0] == "whole" and costs[run]]
    rank = {USED: 0, against: 2}
    return min(wholes, key=lambda run: rank.get(run[3], 1), default=None)


def _yardstick(run: Any, costs: Mapping[Any, Costs], against: str) -> Costs:
    """What a run's cost is held against, as `RunSummary.over` says."""
    kind, fmt, at, *which = run
    if kind == "whole":
        return costs.get(("emulated", fmt, at, "", "{}", "", None), {})
    if kind != "attention" or run[-1] is not None:
        return {}
    eager = ("attention", fmt, at, against, "{}", "", None)
    predicted = costs.get(("predicted", fmt, at, *which), {})
    return predicted if any(predicted.values()) else costs.get(eager, {})


def _summary(rows: Sequence[OutputRow], whole: Costs, yardstick: Costs) -> RunSummary:
    about: dict[str, Any] = {name: getattr(rows[0], name) for name in ABOUT}
    about["reason"] = next((row.reason for row in rows if row.reason), None)
    about["failed"] = sum(row.status == "failed" for row in rows)
    ok = [row for row in rows if row.cost is not None]
    if not ok:
        return RunSummary(**about)

    def values(name: str) -> list[Any]:
        return [x for row in ok if (x := getattr(row, name)) is not None]

    numbers: dict[str, Any] = {n: of(x) for n, of in OVER_ROWS.items() if (x := values(n))}
    numbers |= {n: sum(x) / len(x) for n in MEANS if (x := values(n))}
    growth = zip(*(row.growth for row in ok if row.growth), strict=True)
    log_prob = values("log_prob")
    return RunSummary(
        **about,
        **numbers,
        cost=_mean(values("cost")),
        log_prob=_mean(log_prob) if log_prob else None,
        positions=sum(row.positions for row in ok),
        growth=tuple(sum(x) / len(x) for x in growth),
        share=_ratio(_costs(ok), whole),
        over=_ratio(_costs(ok), yardstick),
        over_worst=max(_ratios(_costs(ok), yardstick), default=None),
    )


def _mean(values: Sequence[float]) -> Estimate:
    """The mean of what is above 0, its interval that of logarithms; none of under LEAST values."""
    mean = sum(values) / len(values)
    middle, low, high = factor(values) if len(values) >= LEAST else (1.0, None, None)
    if not middle or low is None or high is None:
        return Estimate(mean=mean)
    return Estimate(mean=mean, low=max(0.0, mean * low / middle), high=mean * high / middle)


def _ratios(above: Costs, below: Costs) -> list[float]:
    return [above[i] / below[i] for i in above if below.get(i, 0.0) > 0]


def _ratio(above: Costs, below: Costs) -> Estimate | None:
    """The ratio of two costs, geometric over the sequences that have both."""
    if not (ratios := _ratios(above, below)):
        return None
    mean, low, high = factor(ratios)
    return Estimate(mean=mean) if len(ratios) < LEAST else Estimate(mean=mean, low=low, high=high)


# --- sentences ----------------------------------------------------------------------------------


def _answer(
    main: RunSummary,
    runs: Sequence[RunSummary],
    against: str,
    budget: Budget | None,
    *,
    logits: bool,
) -> Iterator[str]:
    """What a reader wants to know of one format, the answer first."""
    fmt, name, size = main.format, labelled(main.kernel, main.options), main.error or 1.0
    what, unit = ("logits", " nats a position") if logits else ("final states", "")
    what, where = (main.place, f", {main.place}") if main.at else (what, "")
    alone = _alone(main, runs)
    if main.apart is not None and main.kernel != against and alone and alone.share:
        moved = next((r.apart for r in runs if r.kind == "moved" and r.apart), None)
        ulp = f" (inputs one ulp off: {three(moved / size)} times)" if moved else ""
        share = percent(alone.share.mean) + _range(alone.share, percent)
        far = three(main.apart / size)
        yield (
            f"{fmt}{where}: attention, with its inputs rounded, is {share} of what {fmt} costs; "
            f"{name} in place of {against} changes the {what} by {far} times the error that {fmt} "
            f"makes there{ulp}."
        )
    text = ""
    if main.cost:
        text = f"{fmt}{where}: costs {si(main.cost.mean)}{_range(main.cost)}{unit} in all"
    if budget is not None and budget.adds_up:
        shares = {r.site: r.share.mean for r in runs if r.kind == "site" and r.share}
        first = sorted(shares, key=lambda site: -shares[site])[:3]
        largest = ", ".join(f"{site} {percent(shares[site])}" for site in first)
        text += f"; its sites add up to {three(budget.parts.mean)} of that, the largest: {largest}"
    yield f"{text}."
    if main.flips is not None:
        many, near = f"{main.flips} of {main.positions:,}", main.flips - (main.unexplained or 0)
        yield f"{fmt}: another token is the likeliest at {many} positions, {near} by near ties."


def _range(x: Estimate, write: Callable[[float | None], str] = si) -> str:
    return "" if x.low is None else f" ({write(x.low)} to {write(x.high)})"


# --- findings -----------------------------------------------------------------------------------

INTERFACE = "computes another function than the model's attention interface"
PROPERTIES: Mapping[str, str] = {
    "repeat": "The model gives another output when it runs again (dropout, or a state)",
    "eager": f"The model's eager attention {INTERFACE}",
    "sdpa": f"The model's own call of SDPA {INTERFACE}",
    "causality": "The model is not causal: later tokens change earlier outputs",
    "mask": "The attention mask is ignored: hidden tokens change other outputs",
    "cache": "Decoding with a cache computes another function than one pass over the same tokens",
    "compiled": "The compiled model computes another function",
    "compiled eager": "The compiled model computes another function with eager attention",
}


def tests_of(
    runs: Sequence[RunSummary], checks: Sequence[Check],
    narrower: Mapping[str, Mapping[str, str]], limits: EffectsLimits,
) -> Iterator[Test]:  # fmt: skip
    """Everything that is judged: of the model, then of each kernel in each format."""
    formats = ", ".join(dict.fromkeys(run.format for run in runs))
    about: dict[str, Any] = {"kernel": MODEL, "options": {}, "format": formats}
    for fmt, sites in narrower.items():
        for site, smaller in sites.items():
            text = f"The model's own code computes in {smaller} at `{site}`, not in {fmt}"
            yield Test(about, "format", True, text)
    for check in (check for check in checks if check.holds is not None):
        about = {**about, "format": check.format or formats}
        errs = f"its error is {three(check.difference)} times that of the model as it is"
        all_of = "causality, masks and implementations" if len(checks) > 1 else "two runs"
        text = f"compiled, {errs}" if check.format else f"{all_of} agree in fp64"
        if not check.holds:
            differ = f"in fp64 outputs differ by {three(check.difference)} of their size"
            text = f"{PROPERTIES[check.name]}: {errs if check.format else differ}"
        if check.layer is not None:
            text += f"; layer {check.layer} is the first whose attention differs"
        yield Test(about, check.name, not check.holds, text, check.difference, check.limit)
    for run in (run for run in runs if run.kind == "whole"):
        about = {"kernel": run.kernel, "options": run.options, "format": run.format}
        alone = _alone(run, runs)
        if failed := max(run.failed, alone.failed if alone else 0):
            reason = run.reason or (alone.reason if alone else "")
            yield Test(about, "runs", True, f"failed in {failed} sequences: {reason}")
        if run.cost is None:
            yield Test(about, "runs", False, run.reason or "")
            continue
        predicted = (r.cost for r in runs if r.run == ("predicted", *run.run[1:]))
        said = any(cost.mean for cost in predicted if cost)
        what = "its rounding model makes" if said else "eager attention costs"
        limit = limits.kernel_over_predicted if said else limits.kernel_over_baseline
        if alone and alone.over:
            yield _of_ratio(about, "own share", f"alone costs {{}} what {what}", alone, run, limit)
        narrow = run.format in BIAS_FORMATS
        limit = limits.model_over_sites if narrow else limits.model_over_sites_float32
        if run.over:
            text = "in the model costs {} what all rounding sites make together"
            yield _of_ratio(about, "model", text, run, run, limit)
        if (flips := run.unexplained) is not None:
            text = f"makes another token the likeliest at {flips} of {run.positions:,} positions "
            text, most = f"{text}where no rounding explains it", limits.unexplained_flips
            yield Test(about, "flips", flips > most, text, flips, most)


def _of_ratio(about: Any, rule: str, text: str, run: RunSummary, whole: Any, limit: float) -> Test:
    """A ratio exceeds a limit where the lower end of its interval does, or surely where it has none
    or in one sequence alone, if that has many positions and the model no router."""
    assert run.over is not None
    x, worst = run.over, run.over_worst or 0.0
    judged = x.mean / SURELY if x.low is None else x.low
    numbers = f"{three(x.mean, limit)}×{_range(x, three)}"
    steady = bool(run.growth) and whole.unexplained is not None
    if judged <= limit and worst > SURELY * limit and steady:
        judged, numbers = worst / SURELY, f"{three(worst)}× in one sequence"
    text = f"{text.format(numbers)} at the {run.place} (limit {three(limit)}×)"
    return Test(about, rule, judged > limit, text, judged, limit)


def _alone(whole: RunSummary, runs: Sequence[RunSummary]) -> RunSummary | None:
    return next((r for r in runs if r.run == ("attention", *whole.run[1:])), None)
