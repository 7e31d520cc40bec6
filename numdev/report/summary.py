"""From rows to what a reader wants first: the kernels ranked, the map of the worst one.

Pure functions of report rows. Medians and worst heads are shown rather than pooled errors, because
one head with large values would rule a pooled one. The sentences are made in
`numdev.report.answer`.

Rows are gone through as they are: a table of them costs more to make than all that is asked of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import attrgetter, itemgetter
from statistics import median
from typing import Any

import numpy as np

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

Rows = Sequence[DeviationRow]
Ranked = Sequence[tuple[KernelSummary, Rows]]
"""Kernels in the order they are shown, each with the heads of its output that were measured."""
_PART = attrgetter("phase", "step", "attends")


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
    groups = _grouped(rows, _kernel_of).values()
    kernels = [(_kernel(group, places), _measured(group, "out")) for group in groups]
    formats = list(dict.fromkeys(row.format for row in rows))
    ranked = sorted(kernels, key=lambda pair: (formats.index(pair[0].format), *_rank(pair[0])))
    summaries = tuple(summary for summary, _ in ranked)
    along = pooled(profiles)
    return AuditSummary(
        answer=answer(summaries),
        kernels=summaries,
        map=_map(ranked, places),
        weights=tuple(_weights(weights)),
        sequences=min(_known(rows, "sequences"), default=None),
        explanations=tuple(explanations),
        worst_rows=tuple(worst),
        parts=tuple(_parts(ranked, places)),
        profiles=along,
        along=remark(along),
    )


def _kernel_of(row: DeviationRow) -> tuple[str, ...]:
    """Whose row it is: role, kernel, options and format."""
    options = str(sorted(row.options.items())) if row.options else ""
    return row.role, row.kernel, options, row.format


def _grouped(
    rows: Sequence[DeviationRow], key: Callable[[DeviationRow], Any]
) -> dict[Any, list[DeviationRow]]:
    """Rows of equal keys, in the order they first came."""
    groups: dict[Any, list[DeviationRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _rank(kernel: KernelSummary) -> tuple[int, bool, float]:
    """The floor first, then by distance from the truth; what is not finite last.

    Distances are compared through the baseline's, which is the same for kernels that return
    another format than the others.
    """
    order = 0 if kernel.role == "floor" else 2 if kernel.role == "precision" else 1
    ratios = (kernel.baseline_ratio, kernel.floor_ratio)
    return (order, kernel.nonfinite > 0, next((r for r in ratios if r is not None), math.inf))


def _kernel(rows: Rows, places: Places) -> KernelSummary:
    first = rows[0]
    status = Counter(row.status for row in rows)
    ok = _measured(rows, "out")
    base: dict[str, Any] = {
        "kernel": first.kernel,
        "options": first.options,
        "role": first.role,
        "format": first.format,
        "ok": len(ok),
        "skipped": status["skipped"],
        "failed": status["failed"],
        "reasons": _distinct([row for row in rows if row.status != "ok"], "reason"),
        "ran": _distinct(rows, "ran"),
        "out_formats": _distinct(ok, "out_format"),
    }
    if not ok:
        return KernelSummary(**base)
    fa_rule = _known(ok, "fa_rule")
    return KernelSummary(
        **base,
        mean_abs=_pooled(ok, "mean_abs"),
        max_abs=max(_known(ok, "max_abs"), default=None),
        rms=_pooled(ok, "rms", power=2),
        **_spread(ok, "row_rel"),
        **_spread(ok, "w1"),
        nonfinite=sum(_known(ok, "nonfinite")),
        **_spread(ok, "floor_ratio", worst=True, named=places),
        **_spread(ok, "baseline_ratio", worst=True),
        **_spread(ok, "expected_ratio", worst=True, named=places),
        **_sampled(ok),
        **_worst_row(ok, places),
        **_noise(rows),
        gradients=tuple(_gradients(rows, places)),
        **_spread(ok, "flash_vs_precision", worst=True, named=places),
        **_spread(ok, "flash_vs_precision_w1"),
        **_bounds(ok),
        fa_rule_heads=sum(fa_rule) if fa_rule else None,
        **_bias(ok, places),
    )


def _parts(ranked: Ranked, places: Places) -> Iterator[PartSummary]:
    """Every kernel's numbers for each phase or step, in the ranking's order; nothing where all
    calls are of one part."""
    whole = [(kernel, ok) for kernel, ok in ranked if kernel.role != "precision"]
    if len({_PART(row) for _, ok in whole for row in ok}) > 1:
        for kernel, ok in whole:
            for part in _grouped(ok, _PART).values():
                yield _part(kernel, part, places)


def _part(kernel: KernelSummary, ok: Rows, places: Places) -> PartSummary:
    first = ok[0]
    return PartSummary(
        kernel=kernel.kernel,
        options=kernel.options,
        role=kernel.role,
        format=kernel.format,
        phase=first.phase,
        step=first.step,
        attends=first.attends,
        calls=len({row.case for row in ok}),
        ok=len(ok),
        **_spread(ok, "row_rel"),
        **_spread(ok, "floor_ratio", worst=True, named=places),
        **_spread(ok, "baseline_ratio"),
        **_spread(ok, "expected_ratio", worst=True),
    )


def _measured(rows: Rows, tensor: str) -> Rows:
    return [row for row in rows if row.tensor == tensor and row.status == "ok"]


def _known(rows: Rows, name: str) -> list[Any]:
    """The values of a field where it has one."""
    return [value for value in map(attrgetter(name), rows) if value is not None]


def _distinct(rows: Rows, name: str) -> tuple[str, ...]:
    """The same, each once, in the order they first came."""
    return tuple(dict.fromkeys(_known(rows, name)))


def _pooled(ok: Rows, metric: str, *, power: int = 1) -> float | None:
    """The power mean of a metric over all elements; None when no head has a number."""
    known = [row for row in ok if getattr(row, metric) is not None]
    if not known:
        return None
    # Not summed in Python: its order, and with it the last bit, is NumPy's.
    values = np.array(_known(known, metric))
    weight = np.array([row.elements or 0 for row in known], dtype=float)
    with np.errstate(over="ignore"):
        mean = (values**power * weight).sum() / weight.sum()
    return _number(mean ** (1 / power))


def _spread(
    ok: Rows, metric: str, *, worst: bool = False, named: Places | None = None
) -> dict[str, Any]:
    """The median of a metric over heads, and on request its largest value and where that is."""
    known = [(value, row) for row in ok if (value := getattr(row, metric)) is not None]
    if not known:
        return {}
    largest, there = max(known, key=itemgetter(0))
    found: dict[str, Any] = {metric: _number(median(value for value, _ in known))}
    if worst:
        found[f"{metric}_worst"] = largest
    if named is not None:
        found[f"{metric}_where"] = where(there, named)
    return found


def _bounds(ok: Rows) -> dict[str, Any]:
    """How far a kernel is from the baseline, beside what a change of format does to the latter."""
    lower = _known(ok, "lower_format")
    found = {"lower_format": lower[0]} if lower else {}
    for metric in ("flash_vs_low_precision", "flash_vs_lower"):
        found |= _spread(ok, metric) | _spread(ok, f"{metric}_w1")
    return found


def _sampled(ok: Rows) -> dict[str, Any]:
    """How many rows were measured at most, and how well the worst expected_ratio is known."""
    sampled = [row for row in ok if row.sampled]
    if not sampled:
        return {}
    found: dict[str, Any] = {"rows_measured": max(_known(sampled, "rows_measured"))}
    known = [row for row in ok if row.expected_ratio is not None]
    if known:
        worst = max(known, key=attrgetter("expected_ratio"))
        found["expected_ratio_interval"] = worst.interval.get("expected_ratio")
    return found


def _gradients(rows: Rows, places: Places) -> Iterator[GradientSummary]:
    for tensor in ("dq", "dk", "dv"):
        ok = _measured(rows, tensor)
        if ok:
            yield GradientSummary(
                tensor=tensor,
                ok=len(ok),
                **_spread(ok, "floor_ratio", worst=True, named=places),
                **_spread(ok, "baseline_ratio"),
                **_spread(ok, "expected_ratio", worst=True, named=places),
                **_spread(ok, "row_rel"),
                **_spread(ok, "amplification"),
                nonfinite=sum(_known(ok, "nonfinite")),
            )


def _noise(rows: Rows) -> dict[str, Any]:
    """The largest noise over heads and tensors, and where; 0 if all were the same bits."""
    found = [(noise_ratio(row), row) for row in rows if row.noise is not None]
    sized = [(value, row) for value, row in found if value is not None]
    if not sized:
        return {"noise": 0.0} if found else {}
    value, row = max(sized, key=itemgetter(0))
    place = f"{row.tensor}, {row.module or row.case} head {row.head}" if value else None
    return {"noise": value, "noise_where": place}


def _worst_row(ok: Rows, places: Places) -> dict[str, Any]:
    found = _spread(ok, "worst_row", worst=True, named=places)
    if not found:
        return {}
    return {"worst_row": found["worst_row_worst"], "worst_row_where": found["worst_row_where"]}


def _bias(ok: Rows, places: Places) -> dict[str, Any]:
    """How many heads are biased, Holm-corrected over the heads of this kernel and format."""
    tested = [
        row
        for row in ok
        if row.bias_p is not None
        and (row.sequences or 0) >= BIAS_SEQUENCES
        and row.out_format in BIAS_FORMATS
    ]
    if not tested:
        return {}
    significant = compress(tested, holm(_known(tested, "bias_p"), BIAS_ALPHA))
    accused = [row for row in significant if abs(row.bias_size or 0.0) >= BIAS_ULP]
    found: dict[str, Any] = {"bias_testable": True, "biased_heads": len(accused)}
    if accused:
        worst = max(accused, key=lambda row: abs(row.bias_size or 0.0))
        found["biased_worst"] = worst.bias_size
        found["biased_where"] = f"{where(worst, places)}, {worst.bias_of}"
    return found


def _map(ranked: Ranked, places: Places) -> HeadMap | None:
    """Floor ratios, layer by head, of the kernel under audit that is farthest from the truth, in
    the first format audited (a wider format's floor is so low that it would always win)."""
    first = ranked[0][0].format
    measured = [
        (k.floor_ratio, k, ok)
        for k, ok in ranked
        if k.role == "kernel" and k.format == first and k.floor_ratio is not None
    ]
    if not measured:
        return None
    _, worst, ok = max(measured, key=itemgetter(0))
    grid: dict[str, dict[int, float]] = {}
    for row in ok:
        line = grid.setdefault(place_of(row, places).removeprefix("layer "), {})
        if row.head is not None and row.floor_ratio is not None:
            line[row.head] = max(row.floor_ratio, line.get(row.head, 0.0))
    lines = {place: line for place, line in grid.items() if line}
    heads = sorted({head for line in lines.values() for head in line})
    return HeadMap(
        kernel=worst.kernel,
        format=worst.format,
        metric="floor_ratio",
        layers=tuple(lines),
        heads=tuple(heads),
        values=tuple(tuple(map(line.get, heads)) for line in lines.values()),
    )


def _weights(rows: Sequence[WeightRow]) -> list[WeightSummary]:
    summaries = []
    for name in dict.fromkeys(row.format for row in rows):
        here = [row for row in rows if row.format == name]
        elements = sum(row.elements for row in here)
        sized = [row for row in here if row.max_abs is not None]
        worst = max(sized, key=lambda row: row.max_abs or 0.0, default=None)
        held = sum(row.elements - row.nonfinite for row in sized)
        mean = sum((row.mean_abs or 0.0) * (row.elements - row.nonfinite) for row in sized)
        summaries.append(
            WeightSummary(
                format=name,
                tensors=len(here),
                elements=elements,
                nonfinite=sum(row.nonfinite for row in here),
                max_abs=worst.max_abs if worst else None,
                max_tensor=worst.tensor if worst else None,
                mean_abs=mean / held if held else None,
                w1=mean / held if held else None,
            )
        )
    return summaries


def _number(value: float) -> float | None:
    """A float for JSON, None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None
