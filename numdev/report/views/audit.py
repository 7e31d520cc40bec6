"""An audit, shown: the kernels ranked, their parts, the map of the worst one, where along its calls
a kernel errs, and which roundings make its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from numdev.report import AuditReport, Explanation, KernelSummary, WeightSummary, WorstRow
from numdev.report import document as doc
from numdev.report.document import Cell, Column, Item, floors, labelled
from numdev.report.numbers import NONE, ratio, shade, short, si, times
from numdev.report.views import along, target_of

GRADIENTS = ("dq", "dk", "dv")
STANDARD = {"floor": "the exact result, rounded once", "baseline": "plain attention"}
REASONS = 3  # that are said of kernels that did not run
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
    yield from along.parts(summary.parts)
    if summary.map is not None:
        worst = summary.map
        title = f"{worst.kernel} in {worst.format}: times the floor, layer by head"
        layers = dict(zip(worst.layers, worst.values, strict=True))
        cell = lambda v: Cell(short(v), shade(v), title=ratio(v))  # noqa: E731
        yield doc.heat_map(title, worst.heads, layers, cell)
    yield from along.positions(summary.profiles)
    yield from _worst_rows(summary.worst_rows, sampled=bool(rows))
    yield from _explanations(summary.explanations)
    yield doc.words(
        ("format", "tensors", "mean change (= W1)", "max change", "in", "not finite"),
        map(_weights, summary.weights),
        title="Stored weights, cast",
    )


# --- the ranking ---------------------------------------------------------------------------------


def _name(k: KernelSummary) -> Cell:
    style: doc.Style = "strong" if k.role == "kernel" else ""
    return Cell(labelled(k.kernel, k.options), style=style, title=STANDARD.get(k.role, ""))


def predicted(value: float | None) -> Cell:
    """The worst head's error over what its roundings predict; far above 1 it stands out."""
    if value is None:
        return Cell(NONE)
    return Cell(ratio(value), style="good" if value <= 1.15 else "warn" if value <= 1.5 else "bad")


def _at_least(k: KernelSummary) -> str:
    """Of sampled rows the maximum is a lower bound."""
    return "" if k.rows_measured is None or k.max_abs is None else "≥"


def _biased(k: KernelSummary) -> Cell:
    if not k.bias_testable or k.role == "floor":
        return Cell(NONE)
    return Cell(f"{k.biased_heads}/{k.ok}", style="warn" if k.biased_heads else "")


RANKING: tuple[tuple[Column, Callable[[KernelSummary], Cell]], ...] = (
    (Column("kernel", align="left"), _name),
    (Column("×floor"), lambda k: floors(k.floor_ratio)),
    (
        Column("worst head", "worst"),
        lambda k: floors(k.floor_ratio_worst, k.floor_ratio_where or ""),
    ),
    (Column("×baseline", "×base"), lambda k: Cell(ratio(k.baseline_ratio))),
    (Column("×predicted", "×pred"), lambda k: predicted(k.expected_ratio_worst)),
    (Column("mean error", "mean err"), lambda k: Cell(si(k.mean_abs))),
    (Column("max error", "max err"), lambda k: Cell(_at_least(k) + si(k.max_abs))),
    (
        Column("×format"),
        lambda k: Cell(ratio(k.flash_vs_precision if k.role == "kernel" else None)),
    ),
    (Column("biased heads", "biased"), _biased),
    (
        Column("not finite", "NaN/inf"),
        lambda k: Cell(str(k.nonfinite), style="bad" if k.nonfinite else ""),
    ),
)


def _format(name: str, kernels: Sequence[KernelSummary]) -> Iterator[doc.Node]:
    """One format: kernels ranked, their gradients, and what the tables need said."""
    shown = [k for k in kernels if k.ok and k.role != "precision" and not _repeats(k, kernels)]
    yield doc.table(
        [column for column, _ in RANKING],
        ([cell(k) for _, cell in RANKING] for k in shown),
        [k.role != "kernel" for k in shown],
        title=f"{name}: kernels, the closest to the truth first",
    )
    names = [c for t in GRADIENTS for c in (f"{t} ×floor", Column("×predicted", "×pred"))]
    backward = [k for k in shown if k.gradients]
    yield doc.table(
        ["kernel", *names, "noise"],
        map(_gradients, backward),
        [k.role != "kernel" for k in backward],
        title=f"{name}: gradients",
    )
    if backward:
        yield doc.Paragraph("noise: between two runs, over the floor's error.", "soft")
    yield doc.Bullets(tuple(_remarks(name, kernels)))


def _gradients(k: KernelSummary) -> Iterator[Cell]:
    yield _name(k)
    for tensor in GRADIENTS:
        g = next((g for g in k.gradients if g.tensor == tensor), None)
        yield floors(g.floor_ratio if g else None)
        yield predicted(g.expected_ratio_worst if g else None)
    yield Cell(si(k.noise))


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
    ratios = ", ".join(
        f"{k.kernel} {times(k.flash_vs_low_precision)}"
        for k in kernels
        if k.role == "kernel" and k.flash_vs_low_precision is not None and not _repeats(k, kernels)
    )
    if ratios:
        way = f"the baseline's own way from float32 to {name}"
        yield Item(f"From the baseline, over {way}: {ratios}.", style="soft")
    for reasons in dict.fromkeys(k.reasons for k in kernels if k.skipped or k.failed):
        these = [k for k in kernels if k.reasons == reasons]
        outcome, style = ("failed", "bad") if these[0].failed else ("skipped", "warn")
        more = f"; and {len(reasons) - REASONS} other reasons" if len(reasons) > REASONS else ""
        lead = f"{', '.join(k.kernel for k in these)} {outcome}:"
        yield Item(f"{'; '.join(reasons[:REASONS])}{more}", lead, style)  # type: ignore[arg-type]


def _repeats(k: KernelSummary, kernels: Sequence[KernelSummary]) -> bool:
    """Whether this is PyTorch's default choice, and another row has its every number."""
    numbers = [o.model_dump(exclude={"kernel", "ran"}) for o in kernels]
    return along.repeats(k.kernel, numbers[kernels.index(k)], numbers)


# --- what stands below it ------------------------------------------------------------------------


def _worst_rows(rows: Sequence[WorstRow], *, sampled: bool) -> Iterator[doc.Node]:
    """The rows that err most, where they stand, and what is special about them."""
    if rows:
        yield doc.Heading("The rows that err most" + (", of those sampled" if sampled else ""))
    items = []
    for w in rows:
        place = f"layer {w.layer}" if w.layer is not None else w.module or w.case
        text = f"({w.format}), {place}, head {w.head}, {w.tensor}: {w.sentence}"
        items.append(Item(text, lead=labelled(w.kernel or w.case, w.options)))
    yield doc.Bullets(tuple(items))


def _explanations(explanations: Sequence[Explanation]) -> Iterator[doc.Node]:
    """Which roundings make each kernel's errors, and what the sites in the table are."""
    left = [Column(name, align="left") for name in ("", "makes the errors of")]
    next_one, shares = Column("next", align="left", width=120), Column("of its squared error",
                                                                       align="left")  # fmt: skip
    yield doc.table(
        ("kernel", *left, "residual", next_one, shares),
        (
            (
                Cell(f"{labelled(e.kernel, e.options)} {e.format}", style="strong"),
                e.tensor,
                Cell(_source(e), style="" if e.known else "warn"),
                ratio(e.residual),
                f"{e.next_preset or NONE} {ratio(e.next_residual)}",
                ", ".join(f"{100 * s.share:.0f} % {s.site}" for s in e.sites),
            )
            for e in explanations
        ),
        title="Which roundings make these errors",
        kind="words",
    )
    sites = {s.site: s.rounds for e in explanations for s in e.sites}
    rounds = "; ".join(f"{site}: {what}" for site, what in sites.items())
    if explanations:
        yield doc.Paragraph(RESIDUAL + (f" {rounds}." if rounds else ""), "soft")


def _source(e: Explanation) -> str:
    """The emulation that makes these errors, or comes nearest."""
    if e.nearest is None:
        return "unknown" if e.calls or e.reason else "no error"
    name = e.nearest.replace("`", "")
    if not e.known:
        return f"unknown; nearest {name}"
    return name + (f" ({e.explained} of {e.calls} calls)" if e.explained < e.calls else "")


def _weights(w: WeightSummary) -> tuple[str, ...]:
    sizes = (si(w.mean_abs), si(w.max_abs))
    return (w.format, str(w.tensors), *sizes, w.max_tensor or NONE, str(w.nonfinite))
