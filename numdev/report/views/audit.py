"""An audit, shown: the kernels ranked, their parts, the map of the worst one, where along its calls
a kernel errs, and which roundings make its errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from numdev.report import AuditReport, Explanation, KernelSummary, WeightSummary, WorstRow
from numdev.report import document as doc
from numdev.report.document import Cell, Column, Item, floors, labelled
from numdev.report.numbers import NONE, ratio, shade, short, si, times
from numdev.report.views import parts, positions, target_of

GRADIENTS = ("dq", "dk", "dv")
STANDARD = {"floor": "the exact result, rounded once", "baseline": "plain attention"}
REASONS = 3
"""Reasons that are said of kernels that did not run."""
COLUMNS = (
    Column("kernel", align="left"),
    Column("×floor"),
    Column("worst head", "worst"),
    Column("×baseline", "×base"),
    Column("×predicted", "×pred"),
    Column("mean error", "mean err"),
    Column("max error", "max err"),
    Column("×format"),
    Column("biased heads", "biased"),
    Column("not finite", "NaN/inf"),
)
LEGEND = (
    "×floor: rms error over that of the exact result rounded once (the floor), median head and "
    "worst head; darker from 1.25, 2, 4 and 16 on. ×baseline: over plain attention as model code "
    "writes it. ×predicted: over what the roundings it claims to make predict, worst head. "
    "×format: how far the kernel is from the baseline, over how far rounding the inputs moved the "
    "answer. biased: heads with a systematic error, of those judged."
)
SAMPLED = (
    "Sampled: {} query rows of each head were measured, drawn over all positions. Averages and "
    "ratios are estimates (their 95 % intervals are in the rows of report.json), maxima lower "
    "bounds (≥); the baseline was computed for these rows alone. What is not finite is counted in "
    "all rows."
)
RESIDUAL = (
    "residual: what is left of the error, element by element, when the emulation's own is taken "
    "away; up to 0.5 explains it. next: the residual of the next preset."
)


def title(report: AuditReport) -> str:
    return f"Audit: {target_of(report)}"


def line(report: AuditReport) -> str:
    return "Distance from the fp64 reference of the same rounded inputs."


def blocks(report: AuditReport) -> Iterator[doc.Node]:
    summary = report.summary
    for name in dict.fromkeys(k.format for k in summary.kernels):
        yield from _format(name, [k for k in summary.kernels if k.format == name])
    rows = max((k.rows_measured or 0 for k in summary.kernels), default=0)
    yield from doc.notes((LEGEND, SAMPLED.format(rows) if rows else ""))
    yield from doc.notes(_slow_references(report), doc.TERMINAL)
    yield from parts.blocks(summary.parts)
    if summary.map is not None:
        found = summary.map
        title = f"{found.kernel} in {found.format}: times the floor, layer by head"
        layers = dict(zip(found.layers, found.values, strict=True))
        yield doc.heat_map(title, found.heads, layers, short, ratio, shade)
    yield from positions.along(summary.profiles, summary.along)
    yield from _worst_rows(summary.worst_rows, sampled=bool(rows))
    yield from _explanations(summary.explanations)
    yield from _weights(summary.weights)


# --- the ranking ---------------------------------------------------------------------------------


def _format(name: str, kernels: Sequence[KernelSummary]) -> Iterator[doc.Node]:
    """One format: kernels ranked, their gradients, and what the tables need said."""
    measured = [k for k in kernels if k.ok and k.role != "precision"]
    shown = [k for k in measured if not _repeats(k, measured)]
    title = f"{name}: kernels, the closest to the truth first"
    yield doc.table(COLUMNS, map(_ranked, shown), [k.role != "kernel" for k in shown], title=title)
    with_gradients = [k for k in shown if k.gradients]
    names = [c for t in GRADIENTS for c in (f"{t} ×floor", Column("×predicted", "×pred"))]
    yield doc.table(
        ["kernel", *names, "noise"],
        map(_gradients, with_gradients),
        [k.role != "kernel" for k in with_gradients],
        title=f"{name}: gradients",
    )
    if with_gradients:
        yield doc.Paragraph(_amplified(with_gradients), "soft")
    yield doc.Bullets(tuple(_remarks(name, kernels)))


def _name(k: KernelSummary) -> Cell:
    return Cell(
        labelled(k.kernel, k.options),
        style="strong" if k.role == "kernel" else "",
        title=STANDARD.get(k.role, ""),
    )


def _ranked(k: KernelSummary) -> tuple[Cell, ...]:
    judged = k.bias_testable and k.role != "floor"
    biased = f"{k.biased_heads}/{k.ok}" if judged else NONE
    return (
        _name(k),
        floors(k.floor_ratio),
        floors(k.floor_ratio_worst, k.floor_ratio_where or ""),
        Cell(ratio(k.baseline_ratio)),
        predicted(k.expected_ratio_worst),
        Cell(si(k.mean_abs)),
        Cell(_at_least(k) + si(k.max_abs)),
        Cell(ratio(k.flash_vs_precision if k.role == "kernel" else None)),
        Cell(biased, style="warn" if judged and k.biased_heads else ""),
        Cell(str(k.nonfinite), style="bad" if k.nonfinite else ""),
    )


def predicted(value: float | None) -> Cell:
    """The worst head's error over what its roundings predict; far above 1 it stands out."""
    if value is None:
        return Cell(NONE)
    style: doc.Style = "good" if value <= 1.15 else "warn" if value <= 1.5 else "bad"
    return Cell(ratio(value), style=style)


def _at_least(k: KernelSummary) -> str:
    """Of sampled rows the maximum is a lower bound."""
    return "" if k.rows_measured is None or k.max_abs is None else "≥"


def _gradients(k: KernelSummary) -> tuple[Cell, ...]:
    cells = [_name(k)]
    for tensor in GRADIENTS:
        g = next((g for g in k.gradients if g.tensor == tensor), None)
        cells += [floors(g.floor_ratio if g else None)]
        cells += [predicted(g.expected_ratio_worst if g else None)]
    return (*cells, Cell(si(k.noise)))


def _amplified(kernels: Sequence[KernelSummary]) -> str:
    """How ill-conditioned the gradients are, beside how far a kernel is off."""
    k = next((k for role in ("kernel", "baseline") for k in kernels if k.role == role), kernels[0])
    known = [g for g in k.gradients if g.amplification is not None] or k.gradients
    moved = ", ".join(f"{g.tensor} by {si(g.amplification)}" for g in known)
    errors = ", ".join(si(g.row_rel) for g in known)
    return (
        f"One ulp on every input moves the exact {moved} of their terms; {k.kernel} errs by "
        f"{errors}. noise: between two runs, over the floor's error."
    )


def _remarks(name: str, kernels: Sequence[KernelSummary]) -> Iterator[Item]:
    """What one format's tables need said: their unit, what ran by default, who is missing."""
    for k in kernels:
        if k.role == "precision" and k.mean_abs:
            yield Item(
                f"Rounding q, k, v to {name} alone moved the answer by {si(k.mean_abs)} on "
                f"average, {_at_least(k)}{si(k.max_abs)} at most.",
                style="soft",
            )
        others = [f for f in k.out_formats if f != name]
        if others:
            text = f"{k.kernel} returned {', '.join(others)}: its floor is that format's."
            yield Item(text, style="soft")
        if k.kernel == "sdpa-default" and k.ran:
            ran = ", ".join(r.removeprefix("_scaled_dot_product_") for r in k.ran)
            same = ", with the numbers of another row" if _repeats(k, kernels) else ""
            yield Item(f"sdpa-default ran {ran}{same}.", style="soft")
    yield from _bounds(name, kernels)
    for reasons in dict.fromkeys(k.reasons for k in kernels if k.skipped or k.failed):
        these = [k for k in kernels if k.reasons == reasons]
        outcome = "failed" if these[0].failed else "skipped"
        more = f"; and {len(reasons) - REASONS} other reasons" if len(reasons) > REASONS else ""
        names = ", ".join(k.kernel for k in these)
        yield Item(
            f"{'; '.join(reasons[:REASONS])}{more}",
            lead=f"{names} {outcome}:",
            style="bad" if these[0].failed else "warn",
        )


def _bounds(name: str, kernels: Sequence[KernelSummary]) -> Iterator[Item]:
    """How far kernels are from the baseline, beside how far a change of format moves it."""
    here = [k for k in kernels if k.role == "kernel" and not _repeats(k, kernels)]
    before = {
        "flash_vs_low_precision": f"the baseline's own way from float32 to {name}",
        "flash_vs_lower": "its way on to {}",
    }
    for metric, way in before.items():
        known = [k for k in here if getattr(k, metric) is not None]
        if known:
            ratios = ", ".join(
                f"{k.kernel} {times(getattr(k, metric))} (W1 {times(getattr(k, f'{metric}_w1'))})"
                for k in known
            )
            way = way.format(known[0].lower_format)
            yield Item(f"From the baseline, over {way}: {ratios}.", style="soft")


def _repeats(k: KernelSummary, kernels: Sequence[KernelSummary]) -> bool:
    """Whether this is PyTorch's default choice, and another row has its every number."""
    own = {"kernel", "ran"}
    return k.kernel == "sdpa-default" and any(
        o.model_dump(exclude=own) == k.model_dump(exclude=own)
        for o in kernels
        if o.kernel != k.kernel
    )


def _slow_references(report: AuditReport) -> Iterator[str]:
    """Where the reference could not go by its fast path, and why."""
    floor_rows = [row for row in report.rows if row.role == "floor" and row.tensor == "out"]
    calls = {(row.case, row.ran) for row in floor_rows if (row.ran or "").startswith("blocked: ")}
    counts = Counter((ran or "").removeprefix("blocked: ") for _, ran in sorted(calls))
    for reason, count in counts.items():
        yield (
            f"The fp64 reference of {count} {'calls' if count > 1 else 'call'} was computed block "
            f"by block, slower and as good: {reason}."
        )


# --- what stands below it ------------------------------------------------------------------------


def _worst_rows(rows: Sequence[WorstRow], *, sampled: bool) -> Iterator[doc.Node]:
    """The rows that err most, where they stand, and what is special about them."""
    if not rows:
        return
    yield doc.Heading("The rows that err most" + (", of those sampled" if sampled else ""))
    note = "Where along its call each of the rows below stands, 0 % being the first."
    figures = positions.of_worst(rows)
    yield doc.Figures(doc.charts(figures, positions.SHARE, seeds="", note=note), doc.PAGE)
    yield doc.Bullets(
        tuple(
            Item(
                f"({w.format}), "
                f"{f'layer {w.layer}' if w.layer is not None else w.module or w.case}, head "
                f"{w.head}, {w.tensor}: {w.sentence}",
                lead=labelled(w.kernel or w.case, w.options),
            )
            for w in rows
        )
    )


def _explanations(found: Sequence[Explanation]) -> Iterator[doc.Node]:
    """Which roundings make each kernel's errors, and what the sites in the table are."""
    if not found:
        return
    yield doc.table(
        (
            "kernel",
            Column("", align="left"),
            Column("makes the errors of", align="left"),
            "residual",
            Column("next", align="left", width=120),
            Column("of its squared error", align="left"),
        ),
        (
            (
                Cell(f"{labelled(e.kernel, e.options)} {e.format}", style="strong"),
                e.tensor,
                Cell(_source(e), style="" if e.known else "warn"),
                ratio(e.residual),
                f"{e.next_preset or NONE} {ratio(e.next_residual)}",
                ", ".join(f"{100 * s.share:.0f} % {s.site}" for s in e.sites),
            )
            for e in found
        ),
        title="Which roundings make these errors",
        kind="words",
    )
    sites = {s.site: s.rounds for e in found for s in e.sites}
    rounds = "; ".join(f"{site}: {what}" for site, what in sites.items())
    yield from doc.notes((RESIDUAL + (f" {rounds}." if rounds else ""),))


def _source(e: Explanation) -> str:
    """The emulation that makes these errors, or comes nearest."""
    if e.nearest is None:
        return "unknown" if e.calls or e.reason else "no error"
    name = e.nearest.replace("`", "")
    if not e.known:
        return f"unknown; nearest {name}"
    return name + (f" ({e.explained} of {e.calls} calls)" if e.explained < e.calls else "")


def _weights(found: Sequence[WeightSummary]) -> Iterator[doc.Node]:
    """What casting the stored weights costs."""
    changed = [w for w in found if w.mean_abs or w.nonfinite]
    yield doc.bullets(
        (
            f"Stored weights cast to {w.format}: mean change {si(w.mean_abs)} (= W1), max "
            f"{si(w.max_abs)} in {w.max_tensor}"
            + (f"; {w.nonfinite} not finite" if w.nonfinite else "")
            for w in changed
        ),
        doc.TERMINAL,
    )
    names = ("format", "tensors", "mean change (= W1)", "max change", "in", "not finite")
    yield doc.words(
        names,
        (
            (w.format, str(w.tensors), si(w.mean_abs), si(w.max_abs), w.max_tensor or NONE,
             str(w.nonfinite))
            for w in found
        ),
        title="Stored weights, cast",
        only=doc.TEXT,
    )  # fmt: skip
