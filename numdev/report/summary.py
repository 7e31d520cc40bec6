"""From rows to what a reader wants first: the kernels ranked and in words.

Pure functions of report rows. Medians and worst heads are shown rather than pooled errors, because
one head with large values would rule a pooled one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    Finding,
    KernelSummary,
    PartSummary,
    Places,
    Record,
    WorstRow,
)
from numdev.report.numbers import MOST, ratio

METRICS = ["floor_ratio", "baseline_ratio", "expected_ratio", "flash_vs_precision"]
"""Of which a summary has the median over heads, the largest, or where that is."""
NUMBERS = [*METRICS, "mean_abs", "max_abs", "nonfinite", "elements", "bias_p", "bias_size",
           "sequences"]  # fmt: skip
# A kernel that is none of these was asked for by name, and is spoken of before the first of them.
HEADLINE = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-default", "sdpa-math")


def summarise(
    rows: Sequence[DeviationRow],
    findings: Sequence[Finding] = (),
    explanations: Sequence[Explanation] = (),
    worst: Sequence[WorstRow] = (),
) -> AuditSummary:
    """The summary of an audit's rows, all of them skipped or not; planted faults are left out."""
    rows = [row for row in rows if row.role != "control"]
    table = pd.DataFrame(list(map(vars, rows)), columns=list(DeviationRow.model_fields))
    table[NUMBERS] = table[NUMBERS].astype(float)
    places = Places(rows)
    table = table.assign(
        row=pd.Series(rows, dtype=object),
        chosen=[str(sorted(row.options.items())) for row in rows],
        layer=[places.layer(row).removeprefix("layer ") for row in rows],
        where=list(map(places, rows)),
    )
    formats = list(table["format"].unique())
    groups = table.groupby(["role", "kernel", "chosen", "format"], sort=False)
    kernels = tuple(
        sorted(
            (_kernel(group) for _, group in groups),
            key=lambda k: (formats.index(k.format), *_rank(k)),
        )
    )
    return AuditSummary(
        answer=tuple(
            f"{name}: {sentence}"
            for name in formats
            for sentence in _answer([k for k in kernels if k.format == name], findings)
        ),
        kernels=kernels,
        explanations=tuple(explanations),
        worst_rows=tuple(worst),
    )


def _rank(kernel: KernelSummary) -> tuple[int, bool, float]:
    """The floor first, then by distance from the truth over the baseline's (which is the same for
    kernels that return another format than the others); what is not finite last."""
    order = 0 if kernel.role == "floor" else 2 if kernel.role == "precision" else 1
    ratios = (kernel.baseline_ratio, kernel.floor_ratio)
    return (order, kernel.nonfinite > 0, next((r for r in ratios if r is not None), math.inf))


def _kernel(table: pd.DataFrame) -> KernelSummary:
    first, ok = table["row"].iloc[0], _measured(table, "out")
    worst = max(ok["row"], key=lambda row: row.expected_ratio or 0.0, default=first)
    noise = [noise_ratio(row) for row in table["row"] if row.noise is not None]
    gradients = ((tensor, _measured(table, tensor)) for tensor in ("dq", "dk", "dv"))
    return KernelSummary(
        **first.model_dump(include={"role", "kernel", "options", "format"}),
        **_over_heads(ok, KernelSummary),
        skipped=int((table["status"] == "skipped").sum()),
        failed=int((table["status"] == "failed").sum()),
        reasons=tuple(table[table["reason"] != "reference-limited"]["reason"].dropna().unique()),
        ran=tuple(table["ran"].dropna().unique()),
        mean_abs=_mean(ok),
        max_abs=_or_none(ok["max_abs"].max()),
        rows_measured=max((r.rows_measured or 0 for r in ok["row"] if r.sampled), default=None),
        suspects=max((row.suspects or 0 for row in ok["row"]), default=0) or None,
        expected_ratio_interval=worst.interval.get("expected_ratio"),
        # 0 where all runs gave the same bits
        noise=max((x for x in noise if x is not None), default=0.0) if noise else None,
        biased_heads=_biased(ok),
        gradients=tuple(_part(own, tensor=tensor) for tensor, own in gradients if len(own)),
        phases=tuple(_part(own, phase=name) for name, own in ok.groupby("phase", sort=False)),
    )


def _part(own: pd.DataFrame, **of: Any) -> PartSummary:
    return PartSummary(**of, **_over_heads(own, PartSummary))


def _measured(table: pd.DataFrame, tensor: str) -> pd.DataFrame:
    return table[(table["tensor"] == tensor) & (table["status"] == "ok")]


def _mean(ok: pd.DataFrame) -> float | None:
    """The mean error of all elements; None where no head has a number."""
    known = ok[ok["mean_abs"].notna()]
    values, weight = known["mean_abs"].to_numpy(), known["elements"].fillna(0).to_numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        return _or_none((values * weight).sum() / weight.sum())


def _over_heads(ok: pd.DataFrame, record: type[Record]) -> dict[str, Any]:
    """Of each metric what the record has of it over heads: the median, the largest, where that is.
    Nothing where no head has a number."""
    fields: dict[str, Any] = {"ok": len(ok), "nonfinite": int(ok["nonfinite"].sum())}
    for metric in METRICS:
        values = ok[metric].dropna()
        if len(values):
            with np.errstate(over="ignore"):
                fields[metric] = _or_none(values.median())
            fields[f"{metric}_worst"] = float(values.max())
            fields[f"{metric}_where"] = ok.at[values.idxmax(), "where"]
    return {name: value for name, value in fields.items() if name in record.model_fields}


def _biased(ok: pd.DataFrame) -> int | None:
    """How many heads of a kernel in a format are biased, Holm-corrected; None if none is judged."""
    enough = ok["bias_p"].notna() & (ok["sequences"] >= BIAS_SEQUENCES)
    tested = ok[enough & ok["out_format"].isin(BIAS_FORMATS)]
    if tested.empty:
        return None
    certain = tested[holm(list(tested["bias_p"]), BIAS_ALPHA)]
    return int((certain["bias_size"].abs() >= BIAS_ULP).sum())


def _or_none(value: float) -> float | None:
    """A float for JSON, None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def _answer(kernels: Sequence[KernelSummary], findings: Sequence[Finding]) -> Iterator[str]:
    """One format in sentences: what overflows, and flash deviation beside what the format costs. Of
    a kernel with a finding nothing is said: its verdict says it."""
    standard = {k.role: k for k in kernels}
    precision, plain = standard.get("precision"), standard.get("baseline")
    usual = {name: place for place, name in enumerate(HEADLINE)}
    accused = {(f.kernel, str(f.options), name) for f in findings for name in f.formats}
    kernel = min(
        (k for k in kernels if k.role == "kernel" and k.max_abs is not None and not k.nonfinite
         and (k.kernel, str(k.options), k.format) not in accused),
        key=lambda k: usual.get(k.kernel, -1),
        default=None,
    )  # fmt: skip
    if precision is not None and precision.nonfinite:
        yield (
            f"Rounding q, k, v to {precision.format} overflows: {precision.nonfinite} elements of "
            "the exact result are no longer finite."
        )
    if plain is not None and plain.nonfinite:
        yield f"Eager attention returns {plain.nonfinite} elements that are NaN or infinite."
    if kernel is None:
        return
    multiple = kernel.flash_vs_precision
    if multiple is not None and multiple <= MOST:
        share = kernel.baseline_ratio
        whose = ", mostly eager attention's own error" if share is not None and share < 0.5 else ""
        yield (
            f"{kernel.kernel} and eager attention differ by {ratio(multiple)}× "
            f"the error that rounding q, k, v to {kernel.format} alone causes{whose}."
        )
    elif plain is None or plain.max_abs is None:
        yield "Eager attention did not run: no difference to compare with the cost of the format."
    else:
        yield f"Rounding q, k, v to {kernel.format} changes nothing: the format costs nothing here."
