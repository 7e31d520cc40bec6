"""From rows to what a reader wants first: the kernels ranked, the map of the worst one.

Pure functions of report rows. Medians and worst heads are shown rather than pooled errors, because
one head with large values would rule a pooled one. The sentences are made in `answer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import itemgetter
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
    WeightRow,
    WeightSummary,
    WorstRow,
)
from numdev.report.answer import answer
from numdev.report.places import Places, place_of, places_of, where
from numdev.report.profile_summary import pooled, remark
from numdev.report.statistics import (
    BIAS_ALPHA,
    BIAS_FORMATS,
    BIAS_SEQUENCES,
    BIAS_ULP,
    holm,
    noise_ratio,
)

Ranked = Sequence[tuple[KernelSummary, pd.DataFrame]]
"""Kernels in the order they are shown, each with the heads of its output that were measured."""
MEDIAN, WORST, WHERE = 0, 1, 2
"""What is kept of a metric over heads: the median; the largest too; and where that is."""
OF_KERNEL = {
    "row_rel": MEDIAN, "w1": MEDIAN, "floor_ratio": WHERE, "baseline_ratio": WORST,
    "expected_ratio": WHERE, "worst_row": WHERE, "flash_vs_precision": WHERE,
    "flash_vs_precision_w1": MEDIAN, "flash_vs_low_precision": MEDIAN,
    "flash_vs_low_precision_w1": MEDIAN, "flash_vs_lower": MEDIAN, "flash_vs_lower_w1": MEDIAN,
}  # fmt: skip
OF_GRADIENT = {
    "floor_ratio": WHERE, "baseline_ratio": MEDIAN, "expected_ratio": WHERE, "row_rel": MEDIAN,
    "amplification": MEDIAN,
}  # fmt: skip
OF_PART = {
    "row_rel": MEDIAN, "floor_ratio": WHERE, "baseline_ratio": MEDIAN, "expected_ratio": WORST
}  # fmt: skip
NUMBERS = [*{**OF_KERNEL, **OF_GRADIENT}, "mean_abs", "max_abs", "rms", "nonfinite", "elements",
           "bias_p"]  # fmt: skip
COLUMNS = [*NUMBERS, "role", "kernel", "format", "tensor", "status", "reason", "ran", "out_format",
           "lower_format", "fa_rule", "rows_measured", "case", "head", "phase", "step", "attends",
           "sequences"]  # fmt: skip
PART = ["phase", "step", "attends"]


def summarise(
    rows: Sequence[DeviationRow],
    weights: Sequence[WeightRow] = (),
    explanations: Sequence[Explanation] = (),
    worst: Sequence[WorstRow] = (),
    profiles: Sequence[ProfileRow] = (),
) -> AuditSummary:
    """The summary of an audit's rows; raises nothing on rows that are all skipped. Planted faults
    are the gate's business, and left out."""
    rows = [row for row in rows if row.role != "control"]
    places = places_of(rows)
    table = _table(rows)
    groups = table.groupby(["role", "kernel", "chosen", "format"], sort=False)
    kernels = [(_kernel(group, places), _measured(group, "out")) for _, group in groups]
    formats = list(table["format"].unique())
    ranked = sorted(kernels, key=lambda pair: (formats.index(pair[0].format), *_rank(pair[0])))
    summaries = tuple(summary for summary, _ in ranked)
    along = pooled(profiles)
    sequences = table["sequences"].min()
    return AuditSummary(
        answer=answer(summaries),
        kernels=summaries,
        map=_map(ranked, places),
        weights=tuple(map(_weights, *zip(*_by_format(weights), strict=True))) if weights else (),
        sequences=None if pd.isna(sequences) else int(sequences),
        explanations=tuple(explanations),
        worst_rows=tuple(worst),
        parts=tuple(_parts(ranked, places)),
        profiles=along,
        along=remark(along),
    )


def _table(rows: Sequence[Any]) -> pd.DataFrame:
    """A line for each row, with the row itself in `row` and its options as text in `chosen`."""
    table = pd.DataFrame({name: [getattr(row, name) for row in rows] for name in COLUMNS})
    numbers = table[[*NUMBERS, "sequences", "rows_measured"]].astype(float)
    table[numbers.columns] = numbers
    chosen = [str(sorted(row.options.items())) for row in rows]
    return table.assign(chosen=chosen, row=list(rows))


def _rank(kernel: KernelSummary) -> tuple[int, bool, float]:
    """The floor first, then by distance from the truth; what is not finite last.

    Distances are compared through the baseline's, which is the same for kernels that return
    another format than the others.
    """
    order = 0 if kernel.role == "floor" else 2 if kernel.role == "precision" else 1
    ratios = (kernel.baseline_ratio, kernel.floor_ratio)
    return (order, kernel.nonfinite > 0, next((r for r in ratios if r is not None), math.inf))


def _kernel(table: pd.DataFrame, places: Places) -> KernelSummary:
    first: DeviationRow = table["row"].iloc[0]
    ok = _measured(table, "out")
    base: dict[str, Any] = {
        **{name: getattr(first, name) for name in ("kernel", "options", "role", "format")},
        "ok": len(ok),
        "skipped": int((table["status"] == "skipped").sum()),
        "failed": int((table["status"] == "failed").sum()),
        "reasons": _distinct(table[table["status"] != "ok"]["reason"]),
        "ran": _distinct(table["ran"]),
        "out_formats": _distinct(ok["out_format"]),
    }
    if ok.empty:
        return KernelSummary(**base)
    spread = _spread(ok, OF_KERNEL, places)
    if "worst_row" in spread:
        spread["worst_row"] = spread["worst_row_worst"]
    fa_rule = ok["fa_rule"].dropna()
    base |= {
        **{name: x for name, x in spread.items() if name in KernelSummary.model_fields},
        "mean_abs": _power_mean(ok, "mean_abs", 1),
        "max_abs": _or_none(ok["max_abs"].max()),
        "rms": _power_mean(ok, "rms", 2),
        "nonfinite": int(ok["nonfinite"].sum()),
        "lower_format": next(iter(_distinct(ok["lower_format"])), None),
        "fa_rule_heads": int(fa_rule.sum()) if len(fa_rule) else None,
        "gradients": tuple(_gradients(table, places)),
    }
    return KernelSummary(**base, **_sampled(ok), **_noise(list(table["row"])), **_bias(ok, places))


def _parts(ranked: Ranked, places: Places) -> Iterator[PartSummary]:
    """Every kernel's numbers for each phase or step, in the ranking's order; nothing where all
    calls are of one part."""
    whole = [(kernel, ok) for kernel, ok in ranked if kernel.role != "precision" and len(ok)]
    if not whole or len(pd.concat([ok[PART] for _, ok in whole]).drop_duplicates()) < 2:
        return
    for kernel, ok in whole:
        for _, part in ok.groupby(PART, sort=False, dropna=False):
            row: DeviationRow = part["row"].iloc[0]
            yield PartSummary(
                **{name: getattr(kernel, name) for name in ("kernel", "options", "role", "format")},
                **{name: getattr(row, name) for name in PART},
                calls=part["case"].nunique(),
                ok=len(part),
                **_spread(part, OF_PART, places),
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


def _spread(ok: pd.DataFrame, wanted: Mapping[str, int], places: Places) -> dict[str, Any]:
    """Of each metric what is wanted of it over heads; nothing where no head has a number."""
    spread: dict[str, Any] = {}
    for metric, level in wanted.items():
        values = ok[metric].dropna()
        if values.empty:
            continue
        with np.errstate(over="ignore"):
            spread[metric] = _or_none(values.median())
        if level >= WORST:
            spread[f"{metric}_worst"] = float(values.max())
        if level == WHERE:
            spread[f"{metric}_where"] = where(_largest(ok, metric), places)
    return spread


def _largest(ok: pd.DataFrame, metric: str) -> DeviationRow:
    """The row where a metric is largest, the first of several."""
    row: DeviationRow = ok["row"].iloc[int(np.nanargmax(ok[metric]))]
    return row


def _sampled(ok: pd.DataFrame) -> dict[str, Any]:
    """How many rows were measured at most, and how well the worst expected_ratio is known."""
    sampled = ok[[row.sampled for row in ok["row"]]]
    if sampled.empty:
        return {}
    summary: dict[str, Any] = {"rows_measured": int(sampled["rows_measured"].max())}
    if ok["expected_ratio"].notna().any():
        worst = _largest(ok, "expected_ratio")
        summary["expected_ratio_interval"] = worst.interval.get("expected_ratio")
    return summary


def _gradients(table: pd.DataFrame, places: Places) -> Iterator[GradientSummary]:
    for tensor in ("dq", "dk", "dv"):
        ok = _measured(table, tensor)
        if len(ok):
            yield GradientSummary(
                tensor=tensor,
                ok=len(ok),
                **_spread(ok, OF_GRADIENT, places),
                nonfinite=int(ok["nonfinite"].sum()),
            )


def _noise(rows: Sequence[DeviationRow]) -> dict[str, Any]:
    """The largest noise over heads and tensors, and where; 0 if all were the same bits."""
    noisy = [(noise_ratio(row), row) for row in rows if row.noise is not None]
    sized = [(value, row) for value, row in noisy if value is not None]
    if not sized:
        return {"noise": 0.0} if noisy else {}
    value, row = max(sized, key=itemgetter(0))
    place = f"{row.tensor}, {row.module or row.case} head {row.head}" if value else None
    return {"noise": value, "noise_where": place}


def _bias(ok: pd.DataFrame, places: Places) -> dict[str, Any]:
    """How many heads are biased, Holm-corrected over the heads of this kernel and format."""
    enough = ok["bias_p"].notna() & (ok["sequences"] >= BIAS_SEQUENCES)
    tested = ok[enough & ok["out_format"].isin(BIAS_FORMATS)]
    if tested.empty:
        return {}
    significant = compress(tested["row"], holm(list(tested["bias_p"]), BIAS_ALPHA))
    accused = [row for row in significant if abs(row.bias_size or 0.0) >= BIAS_ULP]
    summary: dict[str, Any] = {"bias_testable": True, "biased_heads": len(accused)}
    if accused:
        worst = max(accused, key=lambda row: abs(row.bias_size or 0.0))
        summary["biased_worst"] = worst.bias_size
        summary["biased_where"] = f"{where(worst, places)}, {worst.bias_of}"
    return summary


def _map(ranked: Ranked, places: Places) -> HeadMap | None:
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
    layers = ok["row"].map(lambda row: place_of(row, places).removeprefix("layer "))
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


def _by_format(rows: Sequence[WeightRow]) -> Iterator[tuple[str, list[WeightRow]]]:
    for name in dict.fromkeys(row.format for row in rows):
        yield name, [row for row in rows if row.format == name]


def _weights(name: str, rows: Sequence[WeightRow]) -> WeightSummary:
    sized = [row for row in rows if row.max_abs is not None]
    worst = max(sized, key=lambda row: row.max_abs or 0.0, default=None)
    held = sum(row.elements - row.nonfinite for row in sized)
    total = sum((row.mean_abs or 0.0) * (row.elements - row.nonfinite) for row in sized)
    mean = total / held if held else None
    return WeightSummary(
        format=name,
        tensors=len(rows),
        elements=sum(row.elements for row in rows),
        nonfinite=sum(row.nonfinite for row in rows),
        max_abs=worst.max_abs if worst else None,
        max_tensor=worst.tensor if worst else None,
        mean_abs=mean,
        w1=mean,
    )


def _or_none(value: float) -> float | None:
    """A float for JSON, None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
