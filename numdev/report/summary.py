"""From rows to what a reader wants first: the kernels ranked, the map of the worst one.

Pure functions of report rows. Medians and worst heads are shown rather than pooled errors, because
one head with large values would rule a pooled one. The sentences are made in `answer`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pandas as pd

from numdev.report import (
    AuditSummary,
    DeviationRow,
    Explanation,
    GradientSummary,
    HeadMap,
    KernelSummary,
    PartSummary,
    ProfileRow,
    Record,
    WeightRow,
    WeightSummary,
    WorstRow,
)
from numdev.report.answer import answer
from numdev.report.profile_summary import pooled
from numdev.report.statistics import (
    BIAS_ALPHA,
    BIAS_FORMATS,
    BIAS_SEQUENCES,
    BIAS_ULP,
    holm,
    noise_ratio,
)

METRICS = (
    *("row_rel", "floor_ratio", "baseline_ratio", "expected_ratio", "worst_row"),
    *("flash_vs_precision", "flash_vs_low_precision"),
)
"""Of which a summary has the median over heads, the largest, or where that is."""
NUMBERS = [*METRICS, "mean_abs", "max_abs", "rms", "nonfinite", "elements", "bias_p", "sequences",
           "rows_measured"]  # fmt: skip
WORDS = ["role", "kernel", "format", "tensor", "status", "reason", "ran", "out_format",
         "fa_rule", "case", "head", "phase", "step", "attends"]  # fmt: skip
WHOSE = ("kernel", "options", "role", "format")
PART = ["phase", "step", "attends"]
CALL = attrgetter("layer", "module", "case", "phase", "attends")
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
        profiles=pooled(profiles),
    )


def _table(rows: Sequence[DeviationRow]) -> pd.DataFrame:
    """A line for each row, with the row itself, its options as text, and where it is in words."""
    table = pd.DataFrame({n: [getattr(row, n) for row in rows] for n in (*NUMBERS, *WORDS)})
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
    modules: dict[str, set[str]] = defaultdict(set)
    short = {}
    for layer, module, case, phase, attends in calls:
        name = f"layer {layer}" + (f" {attends}" if differ and attends else "")
        modules[name].add(module)
        short[layer, module, case, phase, attends] = name
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
    base: dict[str, Any] = {
        **{name: getattr(first, name) for name in WHOSE},
        "ok": len(ok),
        "skipped": int((table["status"] == "skipped").sum()),
        "failed": int((table["status"] == "failed").sum()),
        "reasons": _distinct(table[table["status"] != "ok"]["reason"]),
        "ran": _distinct(table["ran"]),
        "out_formats": _distinct(ok["out_format"]),
    }
    if ok.empty:
        return KernelSummary(**base)
    fa_rule = ok["fa_rule"].dropna()
    base |= {
        **_spread(ok, KernelSummary),
        "mean_abs": _power_mean(ok, "mean_abs", 1),
        "max_abs": _or_none(ok["max_abs"].max()),
        "rms": _power_mean(ok, "rms", 2),
        "nonfinite": int(ok["nonfinite"].sum()),
        "fa_rule_heads": int(fa_rule.sum()) if len(fa_rule) else None,
        "gradients": tuple(_gradients(table)),
    }
    return KernelSummary(**base, **_sampled(ok), **_noise(list(table["row"])), **_bias(ok))


def _gradients(table: pd.DataFrame) -> Iterator[GradientSummary]:
    for tensor in ("dq", "dk", "dv"):
        ok = _measured(table, tensor)
        if len(ok):
            lost, spread = int(ok["nonfinite"].sum()), _spread(ok, GradientSummary)
            yield GradientSummary(tensor=tensor, ok=len(ok), nonfinite=lost, **spread)


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
    Of worst rows the largest alone; nothing where no head has a number."""
    spread: dict[str, Any] = {}
    for metric in METRICS:
        values = ok[metric].dropna()
        if values.empty:
            continue
        with np.errstate(over="ignore"):
            median = _or_none(values.median())
        worst = float(values.max())
        spread[metric] = worst if metric == "worst_row" else median
        spread[f"{metric}_worst"] = worst
        spread[f"{metric}_where"] = ok.at[values.idxmax(), "where"]
    return {name: value for name, value in spread.items() if name in record.model_fields}


def _sampled(ok: pd.DataFrame) -> dict[str, Any]:
    """How many rows were measured at most, and how well the worst expected_ratio is known."""
    sampled = ok[[row.sampled for row in ok["row"]]]
    if sampled.empty:
        return {}
    summary: dict[str, Any] = {"rows_measured": int(sampled["rows_measured"].max())}
    if ok["expected_ratio"].notna().any():
        worst: DeviationRow = ok["row"].iloc[int(np.nanargmax(ok["expected_ratio"]))]
        summary["expected_ratio_interval"] = worst.interval.get("expected_ratio")
    return summary


def _noise(rows: Sequence[DeviationRow]) -> dict[str, Any]:
    """The largest noise over heads and tensors, and where; 0 if all were the same bits."""
    noisy = [(noise_ratio(row), row) for row in rows if row.noise is not None]
    sized = [(value, row) for value, row in noisy if value is not None]
    if not sized:
        return {"noise": 0.0} if noisy else {}
    value, row = max(sized, key=itemgetter(0))
    place = f"{row.tensor}, {row.module or row.case} head {row.head}" if value else None
    return {"noise": value, "noise_where": place}


def _bias(ok: pd.DataFrame) -> dict[str, Any]:
    """How many heads are biased, Holm-corrected over the heads of this kernel and format."""
    enough = ok["bias_p"].notna() & (ok["sequences"] >= BIAS_SEQUENCES)
    tested = ok[enough & ok["out_format"].isin(BIAS_FORMATS)]
    if tested.empty:
        return {}
    heads = zip(tested["row"], tested["where"], strict=True)
    significant = compress(heads, holm(list(tested["bias_p"]), BIAS_ALPHA))
    accused = [at for at in significant if abs(at[0].bias_size or 0.0) >= BIAS_ULP]
    summary: dict[str, Any] = {"bias_testable": True, "biased_heads": len(accused)}
    if accused:
        worst, where = max(accused, key=lambda at: abs(at[0].bias_size or 0.0))
        summary["biased_worst"] = worst.bias_size
        summary["biased_where"] = f"{where}, {worst.bias_of}"
    return summary


def _map(ranked: Ranked) -> HeadMap | None:
    """Floor ratios, layer by head, of the kernel under audit that is farthest from the truth, in
    the first format audited (a wider format's floor is so low that it would always win)."""
    measured = [
        (kernel.floor_ratio, kernel, ok)
        for kernel, ok in ranked
        if (kernel.role, kernel.format) == ("kernel", ranked[0][0].format)
        and kernel.floor_ratio is not None
    ]
    if not measured:
        return None
    _, worst, ok = max(measured, key=itemgetter(0))
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
        mean = total / held if held else None
        yield WeightSummary(
            format=name,
            tensors=len(these),
            elements=sum(row.elements for row in these),
            nonfinite=sum(row.nonfinite for row in these),
            max_abs=worst.max_abs if worst else None,
            max_tensor=worst.tensor if worst else None,
            mean_abs=mean,
            w1=mean,
        )


def _or_none(value: float) -> float | None:
    """A float for JSON, None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
