"""From rows to what a reader wants first: the kernels ranked, the map of the worst one, the error
by position over all calls of one length.

Pure functions of report rows. Medians and worst heads are shown rather than pooled errors, because
one head with large values would rule a pooled one. The sentences are made in `answer`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from numdev.metrics.statistics import (
    BIAS_ALPHA,
    BIAS_FORMATS,
    BIAS_SEQUENCES,
    BIAS_ULP,
    holm,
    noise_ratio,
)
from numdev.report import (
    AuditSummary,
    DeviationRow,
    Explanation,
    GradientSummary,
    HeadMap,
    KernelSummary,
    PartSummary,
    ProfileRow,
    ProfileSummary,
    Record,
    WeightRow,
    WeightSummary,
    WorstRow,
)
from numdev.report.answer import answer

METRICS = ["row_rel", "floor_ratio", "baseline_ratio", "expected_ratio", "flash_vs_precision",
           "flash_vs_low_precision"]  # fmt: skip
"""Of which a summary has the median over heads, the largest, or where that is."""
NUMBERS = [*METRICS, "mean_abs", "max_abs", "rms", "nonfinite", "elements", "bias_p", "bias_size",
           "sequences", "rows_measured"]  # fmt: skip
WHOSE = ("kernel", "options", "role", "format")
PART = ["phase", "step", "attends"]
CALL = attrgetter("layer", "module", "case", "phase", "attends")
LENGTHS = 3  # of call whose profiles are kept, for each format, tensor and kind of attention
TENSORS = ("out", "dq", "dk", "dv")
Ranked = Sequence[tuple[KernelSummary, pd.DataFrame]]
"""Kernels in the order they are shown, each with the heads of its output that were measured."""


def summarise(
    rows: Sequence[DeviationRow],
    weights: Sequence[WeightRow] = (),
    explanations: Sequence[Explanation] = (),
    worst: Sequence[WorstRow] = (),
    profiles: Sequence[ProfileRow] = (),
) -> AuditSummary:
    """The summary of an audit's rows; raises nothing on rows that are all skipped. Planted faults
    are the gate's business, and left out."""
    table = _table([row for row in rows if row.role != "control"])
    groups = table.groupby(["role", "kernel", "chosen", "format"], sort=False)
    kernels = [(_kernel(group), _measured(group, "out")) for _, group in groups]
    formats = list(table["format"].unique())
    ranked = sorted(kernels, key=lambda pair: (formats.index(pair[0].format), *_rank(pair[0])))
    summaries = tuple(summary for summary, _ in ranked)
    sequences = table["sequences"].min()
    return AuditSummary(
        answer=answer(summaries),
        kernels=summaries,
        map=_map(ranked),
        weights=tuple(_weights(weights)),
        sequences=None if pd.isna(sequences) else int(sequences),
        explanations=tuple(explanations),
        worst_rows=tuple(worst),
        parts=tuple(_parts(ranked)),
        profiles=tuple(_profiles(profiles)),
    )


def _table(rows: Sequence[DeviationRow]) -> pd.DataFrame:
    """A line for each row, with the row itself, its options as text, and where it is in words."""
    table = pd.DataFrame(list(map(vars, rows)), columns=list(DeviationRow.model_fields))
    table[NUMBERS] = table[NUMBERS].astype(float)
    names = _places(rows)
    places = [names[CALL(row)] for row in rows]
    steps = ["" if row.step is None else f" step {row.step}" for row in rows]
    heads = zip(places, steps, rows, strict=True)
    return table.assign(
        row=pd.Series(rows, dtype=object),
        chosen=[str(sorted(row.options.items())) for row in rows],
        place=places,
        where=[f"{place}{step} head {row.head}" for place, step, row in heads],
    )


def _places(rows: Sequence[DeviationRow]) -> dict[tuple[Any, ...], str]:
    """What each call is named: `layer 3`, with what it attends to where calls differ in that and
    its phase; the module where several modules would be called so, the case without a layer."""
    calls = list(dict.fromkeys(map(CALL, rows)))
    differ = len({attends for *_, attends in calls} - {None}) > 1
    short = {call: f"layer {call[0]}" + (f" {call[-1]}" if differ and call[-1] else "")
             for call in calls}  # fmt: skip
    modules = defaultdict(set)
    for call, name in short.items():
        modules[name].add(call[1])
    names = {}
    for call, name in short.items():
        layer, module, case, phase, _ = call
        own = case if layer is None else name if len(modules[name]) == 1 else module
        names[call] = own + (f" {phase}" if phase else "")
    return names


def _rank(kernel: KernelSummary) -> tuple[int, bool, float]:
    """The floor first, then by distance from the truth; what is not finite last.

    Distances are compared through the baseline's, which is the same for kernels that return
    another format than the others.
    """
    order = 0 if kernel.role == "floor" else 2 if kernel.role == "precision" else 1
    ratios = (kernel.baseline_ratio, kernel.floor_ratio)
    return (order, kernel.nonfinite > 0, next((r for r in ratios if r is not None), math.inf))


def _kernel(table: pd.DataFrame) -> KernelSummary:
    first, ok = table["row"].iloc[0], _measured(table, "out")
    summary: dict[str, Any] = {
        **{name: getattr(first, name) for name in WHOSE},
        "ok": len(ok),
        "skipped": int((table["status"] == "skipped").sum()),
        "failed": int((table["status"] == "failed").sum()),
        "reasons": _distinct(table[table["status"] != "ok"]["reason"]),
        "ran": _distinct(table["ran"]),
        "out_formats": _distinct(ok["out_format"]),
    }
    if ok.empty:
        return KernelSummary(**summary)
    summary |= {
        **_spread(ok, KernelSummary),
        "mean_abs": _power_mean(ok, "mean_abs", 1),
        "max_abs": _or_none(ok["max_abs"].max()),
        "rms": _power_mean(ok, "rms", 2),
        "nonfinite": int(ok["nonfinite"].sum()),
        "noise": _noise(list(table["row"])),
    }
    if ok["sampled"].any():
        summary["rows_measured"] = int(ok["rows_measured"].max())
        if ok["expected_ratio"].notna().any():
            worst: DeviationRow = ok["row"].iloc[int(np.nanargmax(ok["expected_ratio"]))]
            summary["expected_ratio_interval"] = worst.interval.get("expected_ratio")
    summary["gradients"] = []
    for tensor in TENSORS[1:]:
        own = _measured(table, tensor)
        if len(own):
            lost, spread = int(own["nonfinite"].sum()), _spread(own, GradientSummary)
            one = {"tensor": tensor, "ok": len(own), "nonfinite": lost, **spread}
            summary["gradients"].append(one)
    return KernelSummary(**summary, **_bias(ok))


def _measured(table: pd.DataFrame, tensor: str) -> pd.DataFrame:
    return table[(table["tensor"] == tensor) & (table["status"] == "ok")]


def _distinct(column: pd.Series[Any]) -> tuple[str, ...]:
    """The values of a column, each once, in the order they first came."""
    return tuple(column.dropna().unique())


def _power_mean(ok: pd.DataFrame, metric: str, power: int) -> float | None:
    """The power mean of a metric over all elements; None when no head has a number."""
    known = ok[ok[metric].notna()]
    if known.empty:
        return None
    values, weight = known[metric].to_numpy(), known["elements"].fillna(0).to_numpy()
    with np.errstate(over="ignore"):
        mean = (values**power * weight).sum() / weight.sum()
    return _or_none(mean ** (1 / power))


def _spread(ok: pd.DataFrame, record: type[Record]) -> dict[str, Any]:
    """Of each metric what the record has of it over heads: the median, the largest, where that is.
    Nothing where no head has a number."""
    spread: dict[str, Any] = {}
    for metric in METRICS:
        values = ok[metric].dropna()
        if len(values):
            with np.errstate(over="ignore"):
                spread[metric] = _or_none(values.median())
            spread[f"{metric}_worst"] = float(values.max())
            spread[f"{metric}_where"] = ok.at[values.idxmax(), "where"]
    return {name: value for name, value in spread.items() if name in record.model_fields}


def _noise(rows: Sequence[DeviationRow]) -> float | None:
    """The largest noise over heads and tensors, over the floor's error; 0 if all were the same
    bits, None if there was a single run."""
    noisy = [noise_ratio(row) for row in rows if row.noise is not None]
    return max((x for x in noisy if x is not None), default=0.0) if noisy else None


def _bias(ok: pd.DataFrame) -> dict[str, Any]:
    """How many heads are biased, Holm-corrected over the heads of this kernel and format."""
    enough = ok["bias_p"].notna() & (ok["sequences"] >= BIAS_SEQUENCES)
    tested = ok[enough & ok["out_format"].isin(BIAS_FORMATS)]
    if tested.empty:
        return {}
    certain = tested[holm(list(tested["bias_p"]), BIAS_ALPHA)]
    accused = int((certain["bias_size"].abs() >= BIAS_ULP).sum())
    return {"bias_testable": True, "biased_heads": accused}


def _parts(ranked: Ranked) -> Iterator[PartSummary]:
    """Every kernel's numbers for each phase or step, in the ranking's order; nothing where all
    calls are of one part."""
    whole = [(kernel, ok) for kernel, ok in ranked if kernel.role != "precision" and len(ok)]
    if not whole or len(pd.concat([ok[PART] for _, ok in whole]).drop_duplicates()) < 2:
        return
    for kernel, ok in whole:
        for _, part in ok.groupby(PART, sort=False, dropna=False):
            yield PartSummary(
                **{name: getattr(kernel, name) for name in WHOSE},
                **{name: getattr(part["row"].iloc[0], name) for name in PART},
                calls=part["case"].nunique(),
                ok=len(part),
                **_spread(part, PartSummary),
            )


def _map(ranked: Ranked) -> HeadMap | None:
    """Floor ratios, layer by head, of the kernel under audit that is farthest from the truth, in
    the first format audited (a wider format's floor is so low that it would always win)."""
    measured = [
        (kernel, ok)
        for kernel, ok in ranked
        if (kernel.role, kernel.format) == ("kernel", ranked[0][0].format)
        and kernel.floor_ratio is not None
    ]
    if not measured:
        return None
    worst, ok = max(measured, key=lambda pair: pair[0].floor_ratio or 0.0)
    layers = ok["place"].str.removeprefix("layer ")
    largest = ok.groupby([layers, "head"])["floor_ratio"].max().dropna().unstack()
    named = [layer for layer in layers.unique() if layer in largest.index]
    return HeadMap(
        kernel=worst.kernel,
        format=worst.format,
        metric="floor_ratio",
        layers=tuple(named),
        heads=tuple(map(int, largest.columns)),
        values=tuple(tuple(map(_or_none, line)) for line in largest.loc[named].to_numpy()),
    )


def _weights(rows: Sequence[WeightRow]) -> Iterator[WeightSummary]:
    """The stored tensors together, format by format; means are over elements that it can hold."""
    for name in dict.fromkeys(row.format for row in rows):
        these = [row for row in rows if row.format == name]
        sized = [row for row in these if row.max_abs is not None]
        worst = max(sized, key=lambda row: row.max_abs or 0.0, default=None)
        held = sum(row.elements - row.nonfinite for row in sized)
        total = sum((row.mean_abs or 0.0) * (row.elements - row.nonfinite) for row in sized)
        yield WeightSummary(
            format=name,
            tensors=len(these),
            elements=sum(row.elements for row in these),
            nonfinite=sum(row.nonfinite for row in these),
            max_abs=worst.max_abs if worst else None,
            max_tensor=worst.tensor if worst else None,
            mean_abs=total / held if held else None,
        )


def _profiles(rows: Sequence[ProfileRow]) -> Iterator[ProfileSummary]:
    """One summary for each kernel, tensor and length, kernels in the order of the rows: of the
    lengths that most calls have, the most frequent first. The report's `profiles` have all."""
    groups: dict[tuple[Any, ...], dict[str, list[ProfileRow]]] = {}
    for row in rows:
        kernel = f"{row.role} {row.kernel} {sorted(row.options.items())}"
        group = groups.setdefault((row.format, row.attends, row.tensor), {})
        group.setdefault(kernel, []).append(row)
    formats = list(dict.fromkeys(fmt for fmt, _, _ in groups))
    for key in sorted(groups, key=lambda key: (formats.index(key[0]), TENSORS.index(key[2]))):
        kernels = groups[key].values()
        calls = Counter(n for n, _ in {(row.length, row.case) for own in kernels for row in own})
        for length in sorted(calls, key=lambda n: (-calls[n], -n))[:LENGTHS]:
            for own in kernels:
                if of_length := [row for row in own if row.length == length]:
                    yield _profile(of_length)


def _profile(rows: Sequence[ProfileRow]) -> ProfileSummary:
    """Of one kernel in calls of one length, which count equally: the median, least and largest of
    every bin. Its error over what is predicted is taken call by call."""
    predicted = [(row.errors, row.predicted) for row in rows if row.predicted is not None]
    ratios = [
        [None if e is None or not p else e / p for e, p in zip(*pair, strict=True)]
        for pair in predicted
    ]
    errors, lows, highs = _over_calls([row.errors for row in rows])
    over, over_lows, over_highs = _over_calls(ratios)
    shared = (*WHOSE, "tensor", "attends", "length", "starts")
    return ProfileSummary(
        **{name: getattr(rows[0], name) for name in shared},
        calls=len({row.case for row in rows}),
        counts=tuple(map(sum, zip(*(row.counts for row in rows), strict=True))),
        errors=errors,
        lows=lows,
        highs=highs,
        predicted=_over_calls([own for _, own in predicted])[0],
        ratios=over,
        ratio_lows=over_lows,
        ratio_highs=over_highs,
    )


def _over_calls(calls: Sequence[Sequence[float | None]]) -> tuple[tuple[float | None, ...], ...]:
    """Median, least and largest of each bin, to four digits, over the calls that have a number."""
    bins = [[x for x in own if x is not None] for own in zip(*calls, strict=True)]
    return tuple(
        tuple(float(f"{of(own):.4g}") if own else None for own in bins) for of in (median, min, max)
    )


def _or_none(value: float) -> float | None:
    """A float for JSON, None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
