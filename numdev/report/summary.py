"""From rows to what a reader wants first: the kernels ranked and in words.

Pure functions of report rows. Medians and worst heads are shown rather than pooled
errors, because one head with large values would rule a pooled one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from numdev.grouping import grouped
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
    Finding,
    KernelSummary,
    PartSummary,
    Places,
    Record,
)
from numdev.report.number_text import MOST, ratio
from numdev.tensor_properties import ATTENTION_WORDS, Words, tensor_spec

METRICS = ["floor_ratio", "baseline_ratio", "expected_ratio", "flash_vs_precision"]
"""Metrics of which a summary has the median over heads, the largest, or where that is."""
# A kernel that is none of these was asked for by name, and is spoken of before the first
# of them.
HEADLINE = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-default", "sdpa-math")


def summarise(
    rows: Sequence[DeviationRow],
    findings: Sequence[Finding] = (),
    words: Words = ATTENTION_WORDS,
) -> AuditSummary:
    """Returns the summary of an audit's rows, whether ok, skipped or failed: its
    `kernels` and `answer`. Planted faults are left out. The answer, sentences as
    `bfloat16: ...`, says nothing of a kernel that a finding is on. `words`: of the
    operation."""
    groups = grouped(
        (row for row in rows if row.role != "control"),
        lambda r: (r.role, r.kernel, str(sorted(r.options.items())), r.format),
    )
    places = Places([row for group in groups.values() for row in group], words)
    formats = list(dict.fromkeys(fmt for *_, fmt in groups))
    kernels = tuple(
        sorted(
            (_kernel_summary(group, places) for group in groups.values()),
            key=lambda k: (formats.index(k.format), *_rank_in_format(k)),
        )
    )
    return AuditSummary(
        answer=tuple(
            f"{name}: {sentence}"
            for name in formats
            for sentence in _answer_sentences(
                [k for k in kernels if k.format == name], findings, words
            )
        ),
        kernels=kernels,
    )


def _rank_in_format(kernel: KernelSummary) -> tuple[int, bool, float]:
    """Returns the order of a kernel among those of its format: the floor first, the cost
    of the format (the role `precision`) last. Between them kernels come by their error
    over the baseline's, or over the floor's where that is missing; those with elements
    that are not finite, or may not be, after the others. The baseline's is the same for
    kernels that return another format."""
    order = 0 if kernel.role == "floor" else 2 if kernel.role == "precision" else 1
    ratios = (kernel.baseline_ratio, kernel.floor_ratio)
    return (
        order,
        kernel.nonfinite != 0,
        next((r for r in ratios if r is not None), math.inf),
    )


def _kernel_summary(rows: Sequence[DeviationRow], places: Places) -> KernelSummary:
    """Returns the summary of one kernel in one format: of its output over all heads, of
    each gradient, and of each phase of a generation. `rows`: all of the kernel's, at
    least one; those that are not ok are only counted."""
    ok = [row for row in rows if row.status == "ok" and tensor_spec(row.tensor).is_output]
    worst = max(ok, key=lambda row: row.expected_ratio or 0.0, default=rows[0])
    ran = dict.fromkeys(row.ran for row in rows if row.ran is not None)
    statuses = [row.status for row in rows]
    whys = (row.reason for row in rows if row.reason != "reference-limited")
    reasons = dict.fromkeys(why for why in whys if why is not None)
    # Over the floor's error; 0 where all runs gave the same bits, None where they did not
    # in a head whose floor has no error
    ratios = [noise_ratio(row) for row in rows if row.noise is not None]
    noise = max((x for x in ratios if x is not None), default=None)
    if noise == 0 and None in ratios:
        noise = None
    largest = max((row.max_abs for row in ok if row.max_abs is not None), default=None)
    sampled = max((row.rows_measured or 0 for row in ok if row.sampled), default=None)
    suspects = max((row.suspects or 0 for row in ok), default=0)
    by_tensor = grouped(
        (r for r in rows if r.status == "ok" and tensor_spec(r.tensor).is_gradient),
        attrgetter("tensor"),
    )
    by_phase = grouped((r for r in ok if r.phase is not None), attrgetter("phase"))
    gradients = tuple(
        PartSummary(tensor=tensor, **_fields_over_heads(part, PartSummary, places))
        for tensor, part in by_tensor.items()
    )
    phases = tuple(
        PartSummary(phase=phase, **_fields_over_heads(part, PartSummary, places))
        for phase, part in by_phase.items()
    )
    return KernelSummary(
        **rows[0].who,
        **_fields_over_heads(ok, KernelSummary, places),
        skipped=statuses.count("skipped"),
        failed=statuses.count("failed"),
        reasons=tuple(reasons),
        ran=tuple(ran),
        mean_abs=_mean_error(ok),
        max_abs=largest,
        rows_measured=sampled,
        suspects=suspects or None,
        expected_ratio_interval=worst.interval.get("expected_ratio"),
        noise=noise,
        biased_heads=_biased_head_count(ok),
        gradients=gradients,
        phases=phases,
    )


def _mean_error(ok: Sequence[DeviationRow]) -> float | None:
    """Returns the mean |error| of all elements; None where no head has a number and
    elements, or the mean overflows."""
    measured = (row for row in ok if row.mean_abs is not None)
    weighted = [(row.mean_abs, row.elements or 0) for row in measured]
    values, weight = np.array(weighted, dtype=float).reshape(-1, 2).T
    with np.errstate(over="ignore", invalid="ignore"):
        return _finite_or_none((values * weight).sum() / weight.sum())


def _fields_over_heads(
    ok: Sequence[DeviationRow], record: type[Record], places: Places
) -> dict[str, Any]:
    """Returns the fields of `record` that are over heads: of each of METRICS the median,
    the largest (`_worst`), and the layer and head that have it (`_where`), and the counts
    `ok` and `nonfinite`. A metric of which no head has a number is left out. `ok`:
    measured rows."""
    counts = [row.nonfinite for row in ok]
    nonfinite = sum(count or 0 for count in counts)
    fields: dict[str, object] = {
        "ok": len(ok),
        "nonfinite": None if nonfinite == 0 and None in counts else nonfinite,
    }
    for metric in METRICS:
        values = {
            i: x for i, row in enumerate(ok) if (x := getattr(row, metric)) is not None
        }
        if values:
            worst = max(values, key=values.__getitem__)
            fields[metric] = _finite_or_none(statistics.median(values.values()))
            fields[f"{metric}_worst"] = values[worst]
            fields[f"{metric}_where"] = places(ok[worst])
    return {name: value for name, value in fields.items() if name in record.model_fields}


def _biased_head_count(ok: Sequence[DeviationRow]) -> int | None:
    """Returns how many heads of a kernel in a format are biased, Holm-corrected; None if
    none can be judged: it takes BIAS_SEQUENCES sequences and one of BIAS_FORMATS. Biases
    below BIAS_ULP do not count."""
    tested = [
        (row.bias_p, abs(row.bias_size or 0.0))
        for row in ok
        if row.bias_p is not None
        and (row.sequences or 0) >= BIAS_SEQUENCES
        and row.out_format in BIAS_FORMATS
    ]
    if not tested:
        return None
    certain = holm([p for p, _ in tested], BIAS_ALPHA)
    return sum(
        sure and size >= BIAS_ULP for sure, (_, size) in zip(certain, tested, strict=True)
    )


def _finite_or_none(value: float) -> float | None:
    """Returns a float for JSON: None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def _answer_sentences(
    kernels: Sequence[KernelSummary], findings: Sequence[Finding], words: Words
) -> Iterator[str]:
    """Yields sentences on one format: what overflows, and how far one kernel is from
    eager attention, or what else is the baseline by the `words` of the operation, beside
    what the format costs. A kernel with a finding, or one whose output is not finite or
    may not be, is not spoken of: its verdict says it. Of several kernels it is the first
    that is not in HEADLINE, else the first of HEADLINE."""
    standard = {k.role: k for k in kernels}
    precision, plain = standard.get("precision"), standard.get("baseline")
    usual = {name: place for place, name in enumerate(HEADLINE)}
    accused = {(f.kernel, str(f.options), name) for f in findings for name in f.formats}
    kernel = min(
        (
            k
            for k in kernels
            if k.role == "kernel"
            and k.max_abs is not None
            and k.nonfinite == 0
            and (k.kernel, str(k.options), k.format) not in accused
        ),
        key=lambda k: usual.get(k.kernel, -1),
        default=None,
    )
    baseline = words.plain[0].upper() + words.plain[1:]
    if precision is not None and precision.nonfinite:
        yield (
            f"Rounding {words.inputs} to {precision.format} overflows: "
            f"{precision.nonfinite} elements of "
            "the exact result are no longer finite."
        )
    if plain is not None and plain.nonfinite:
        yield (
            f"{baseline} returns {plain.nonfinite} elements that are finite, infinite or "
            "NaN unlike the exact result."
        )
    if kernel is None:
        return
    multiple = kernel.flash_vs_precision
    if multiple is not None and multiple <= MOST:
        share = kernel.baseline_ratio
        whose = (
            f", mostly {words.plain}'s own error"
            if share is not None and share < 0.5
            else ""
        )
        yield (
            f"{kernel.kernel} and {words.plain} differ by {ratio(multiple)}× "
            f"the error that rounding q, k, v to {kernel.format} alone causes{whose}."
        )
    elif plain is None or plain.max_abs is None:
        yield (
            f"{baseline} did not run: no difference to compare with the cost "
            "of the format."
        )
    else:
        yield (
            f"Rounding q, k, v to {kernel.format} changes nothing: the format "
            "costs nothing here."
        )
