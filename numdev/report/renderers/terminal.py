"""The terminal: the answer first, then the kernels ranked, then the map of the worst one.

Result on stdout, progress on stderr. Colour carries nothing that the text does not say. Names and
messages are foreign text: they go through `_text`, never through rich's markup.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from numdev.audit.timing import words
from numdev.report import (
    AuditReport,
    Axis,
    ConformanceReport,
    Curve,
    Explanation,
    Figure,
    GradientSummary,
    HeadMap,
    KernelSummary,
    Report,
    SweepReport,
    WeightSummary,
    WorstRow,
)
from numdev.report.foreign import plain
from numdev.report.renderers import numbers, parts
from numdev.report.renderers.sentences import headed

GRADIENTS = ("dq", "dk", "dv")
LONG = 14
"""Characters of a kernel's name that a table of 80 columns has room for."""
SHADES = ((1.25, "green"), (2.0, "yellow"), (4.0, "dark_orange"), (float("inf"), "bold red"))
"""Up to this multiple of the floor, this colour."""

FINDINGS = {"exceeded": "bold red", "unmeasured": "yellow", "note": "dim"}


@contextmanager
def progress(*, show: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, as the callback the studies take."""
    console = Console(stderr=True)
    if not show or not console.is_terminal:
        yield lambda what, done, total: None
        return
    with Progress(
        TextColumn("{task.description}", style="dim"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("opening", total=None)
        yield lambda what, done, total: bar.update(
            task, description=escape(plain(what)), completed=done, total=total
        )


def show(report: Report, console: Console | None = None) -> None:
    """Print a report of any kind. Others than an audit's and a sweep's have a module of their kind
    beside this one, with a `show`."""
    if isinstance(report, SweepReport):
        show_sweep(report, console)
    elif isinstance(report, AuditReport):
        show_audit(report, console)
    else:
        importlib.import_module(f"numdev.report.views.{report.kind}").show(
            report, console or Console()
        )


def show_sweep(report: SweepReport, console: Console | None = None) -> None:
    """Print a sweep's report: its sentences, then each figure as a table."""
    out = console or Console()
    _answered(report, out)
    for figure in report.figures:
        out.print(_figure(figure, report.summary.axis, out.width))
    lines = [f"Means over {len(report.summary.seeds)} seeds; intervals are in report.html."]
    for line in (*lines, *report.summary.notes, *_last_lines(report)):
        out.print(_text(line, "dim"))


def _figure(figure: Figure, axis: Axis, width: int) -> Group:
    """A row for each curve, a column for each of as many places on the axis as fit."""
    longest = max((len(curve.label) for curve in figure.curves), default=0)
    label = min(longest, max(16, width // 3))
    fitting = max(2, (width - label - 2) // 9)
    ticks = axis.ticks
    if len(ticks) > fitting:
        chosen = sorted({round(i * (len(ticks) - 1) / (fitting - 1)) for i in range(fitting)})
        ticks = tuple(ticks[i] for i in chosen)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("", width=label, overflow="fold")
    for tick in ticks:
        table.add_column(_text(tick.below or tick.label), justify="right", overflow="fold")
    for curve in figure.curves:
        style = "bold" if curve.role == "kernel" else "dim"
        table.add_row(
            _text(curve.label, style), *(_at(curve, tick.x, figure.relative) for tick in ticks)
        )
    return Group(_text(figure.title, "bold"), table, "")


def _at(curve: Curve, x: float, relative: bool) -> Text:
    """A curve's mean at a place; one that the axis does not move has the same everywhere."""
    for point in curve.points:
        if curve.constant or point.x == x:
            return Text(_ratio(point.mean) if relative else _si(point.mean))
    return Text("-", "dim")


def _answer(sentences: Sequence[str], out: Console) -> None:
    out.print()
    for sentence in sentences:
        head, rest = headed(sentence)
        start = Text(overflow="fold").append_text(_text(head, "bold cyan"))
        out.print(start.append_text(_text(f" {rest}" if rest else "")))
    out.print()


def _answered(report: AuditReport | SweepReport, out: Console) -> None:
    """The answer with the findings under it; but that a kernel computes a different function comes
    first, since then the answer is about that function."""
    leading = [f for f in report.findings if f.metric == "suspicion"]
    if leading:
        out.print()
    for finding in leading:
        out.print(_text(finding.sentence, "bold red"))
    _answer(report.summary.answer, out)
    for finding in report.findings:
        if finding not in leading:
            out.print(_text(finding.sentence, FINDINGS[finding.severity]))
    for line in report.tested:
        out.print(_text(line, "dim"))
    if report.findings or report.tested:
        out.print()


def show_audit(report: AuditReport, console: Console | None = None) -> None:
    """Print an audit's report."""
    out = console or Console()
    summary = report.summary
    _answered(report, out)
    for name in dict.fromkeys(k.format for k in summary.kernels):
        out.print(_ranking(name, [k for k in summary.kernels if k.format == name]))
    for grid in parts.grids(summary.parts):
        out.print(_text(grid.title, "bold"), _part_table(grid, out.width), sep="\n")
        for line in _errors_by_step(grid):
            out.print(_text(line, "dim"))
        out.print()
    out.print(*_notes(report), sep="\n")
    for part in _explanations(summary.explanations):
        out.print(part)
    sampled = any(k.rows_measured for k in summary.kernels)
    for row in _worst_rows(summary.worst_rows, sampled=sampled):
        out.print(row)
    if summary.along is not None:
        out.print("", _text(summary.along, "yellow"), sep="\n")
    if summary.map is not None:
        out.print()
        out.print(_head_map(summary.map, out.width))
    out.print()
    for cast in _weights(summary.weights):
        out.print(cast)
    for line in _last_lines(report):
        out.print(_text(line, "dim"))


def show_kernels(table: Sequence[Mapping[str, Any]], system: Any) -> None:
    """Print the table of `numdev kernels`."""
    out = Console()
    title = _text(f"Kernels on {system.gpu or system.cpu}", "italic")
    grid = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("kernel", "here", "what it is"):
        grid.add_column(column, overflow="fold")
    for row in table:
        missing = row["missing"]
        here = _text(f"no: {missing}", "yellow") if missing else Text("available", "green")
        options = f" Options: {', '.join(row['options'])}." if row["options"] else ""
        grid.add_row(_text(row["name"], "bold"), here, _text(row["summary"] + options))
    out.print(grid)


VERDICTS = {
    "right": ("right", "green"),
    "partly": ("right where it runs", "green"),
    "refuses": ("refuses", "yellow"),
    "raises": ("raises", "bold red"),
    "wrong": ("WRONG", "bold red"),
}


def show_conformance(report: ConformanceReport, console: Console | None = None) -> None:
    """Print what `numdev kernels --check` found: the verdict first, then feature by feature."""
    out = console or Console()
    out.print()
    out.print(_text(report.sentence, "green" if report.conforms else "bold red"))
    grid = Table(box=box.SIMPLE_HEAD)
    for column in ("feature", "", "checks", "why"):
        grid.add_column(column, overflow="fold")
    for f in report.features:
        word, style = VERDICTS[f.verdict]
        share = f"{f.right}/{f.checks}"
        grid.add_row(_text(f.feature), Text(word, style), Text(share, "dim"), _text(f.words))
    out.print(grid)


def _ranking(name: str, kernels: Sequence[KernelSummary]) -> Group:
    """Kernels of one format, closest to the truth first; the ones not measured in words below."""
    nonfinite = any(k.nonfinite for k in kernels)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_text(f"{name}: distance from fp64 on the same rounded inputs", "bold"),
        title_justify="left",
        padding=(0, 0 if nonfinite else 1, 0, 0),  # one column more must still fit in 80
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("kernel", overflow="fold")
    shown = [c for c in COLUMNS if nonfinite or c.title != "NaN/inf"]
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    measured = [k for k in kernels if k.ok and k.role != "precision"]
    for k in measured:
        if _repeats(k, measured):
            continue
        table.add_row(_label(k), *(column.cell(k) for column in shown))
    return Group(table, *_remarks(name, kernels), "", *_gradients(name, measured))


def _label(k: KernelSummary) -> Text:
    """A kernel with its options. A long `module:function` is broken after the colon, since a table
    would break it anywhere."""
    style = "bold" if k.role == "kernel" else "dim"
    module, colon, function = (k.kernel + _options(k.options)).partition(":")
    if len(module) + len(function) < LONG or not colon:
        return _text(module + colon + function, style)
    return _text(module + colon, style).append("\n").append_text(_text(function, style))


def _gradients(name: str, kernels: Sequence[KernelSummary]) -> Iterator[RenderableType]:
    """The gradients of one format's kernels, beside the floor and what their roundings predict."""
    measured = [k for k in kernels if k.gradients and not _repeats(k, kernels)]
    if not measured:
        return
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_text(f"{name}: gradients", "bold"),
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("kernel", overflow="fold")
    for tensor in GRADIENTS:
        table.add_column(f"{tensor} ×floor", justify="right", no_wrap=True)
        table.add_column("×pred", justify="right", no_wrap=True)
    table.add_column("noise", justify="right", no_wrap=True)
    for k in measured:
        found: dict[str, GradientSummary] = {g.tensor: g for g in k.gradients}
        cells = []
        for tensor in GRADIENTS:
            g = found.get(tensor)
            cells.append(_shaded(g.floor_ratio if g else None))
            cells.append(_beside_prediction(g.expected_ratio_worst if g else None))
        noise = Text("-", "dim") if k.noise is None else Text(_ratio(k.noise) if k.noise else "0")
        table.add_row(_label(k), *cells, noise)
    yield table
    yield _text(_amplified(measured), "dim")
    yield ""


def _amplified(kernels: Sequence[KernelSummary]) -> str:
    """How ill-conditioned the gradients are, beside how far a kernel is off."""
    roles = ("kernel", "baseline")  # the first whose backward ran
    k = next((k for role in roles for k in kernels if k.role == role), kernels[0])
    known = [g for g in k.gradients if g.amplification is not None]  # of a sample, dq alone
    moved = ", ".join(f"{g.tensor} by {_si(g.amplification)}" for g in known or k.gradients)
    errs = ", ".join(_si(g.row_rel) for g in known or k.gradients)
    return (
        f"  One ulp on every input moves the exact {moved} of their terms; {k.kernel} errs by "
        f"{errs}. noise: between two runs, over the floor's error."
    )


def _remarks(name: str, kernels: Sequence[KernelSummary]) -> Iterator[Text]:
    """What one format's table needs said: its unit, what ran by default, who is missing and why."""
    for k in kernels:
        if k.role == "precision" and k.mean_abs:
            yield _text(
                f"  Rounding q, k, v to {name} alone moved the answer by {_si(k.mean_abs)} on "
                f"average, {_at_least(k)}{_si(k.max_abs)} at most.",
                "dim",
            )
        others = [f for f in k.out_formats if f != name]
        if others:
            yield _text(
                f"  {k.kernel} returned {', '.join(others)}: its floor is that format's.", "dim"
            )
        if k.kernel == "sdpa-default" and k.ran:
            ran = ", ".join(r.removeprefix("_scaled_dot_product_") for r in k.ran)
            same = ", with the numbers above" if _repeats(k, kernels) else ""
            yield _text(f"  sdpa-default ran {ran}{same}.", "dim")
    yield from (_text(line, "dim") for line in _bounds(name, kernels))
    for reasons in dict.fromkeys(k.reasons for k in kernels if k.skipped or k.failed):
        these = [k for k in kernels if k.reasons == reasons]
        word, style = ("failed", "bold red") if these[0].failed else ("skipped", "yellow")
        names = ", ".join(k.kernel for k in these)
        more = f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
        why = _text(f": {'; '.join(reasons[:3])}{more}")
        yield _text(f"  {names} ").append(word, style).append_text(why)


def _bounds(name: str, kernels: Sequence[KernelSummary]) -> Iterator[str]:
    """How far kernels are from the baseline, beside how far a change of format moves it."""
    here = [k for k in kernels if k.role == "kernel" and not _repeats(k, kernels)]
    known = [k for k in here if k.flash_vs_low_precision is not None]
    if known:
        said = ", ".join(
            f"{k.kernel} {_times(k.flash_vs_low_precision)} (W1 "
            f"{_times(k.flash_vs_low_precision_w1)})"
            for k in known
        )
        yield f"  From the baseline, over the baseline's own way from float32 to {name}: {said}."
    known = [k for k in here if k.flash_vs_lower is not None]
    if known:
        said = ", ".join(
            f"{k.kernel} {_times(k.flash_vs_lower)} (W1 {_times(k.flash_vs_lower_w1)})"
            for k in known
        )
        yield f"  Over its way on to {known[0].lower_format}: {said}."


def _repeats(k: KernelSummary, kernels: Sequence[KernelSummary]) -> bool:
    """Whether this is PyTorch's default choice, and another row has its every number."""

    def numbers(of: KernelSummary) -> dict[str, Any]:
        return of.model_dump(exclude={"kernel", "ran"})

    others = (o for o in kernels if o.kernel != k.kernel)
    return k.kernel == "sdpa-default" and any(numbers(o) == numbers(k) for o in others)


@dataclass(frozen=True)
class Column:
    title: str
    cell: Callable[[KernelSummary], Text]


COLUMNS = (
    Column("×floor", lambda k: _shaded(k.floor_ratio)),
    Column("worst", lambda k: _shaded(k.floor_ratio_worst)),
    Column("×base", lambda k: Text(_ratio(k.baseline_ratio))),
    Column("×pred", lambda k: _expected(k)),
    Column("mean err", lambda k: Text(_si(k.mean_abs))),
    Column("max err", lambda k: Text(_at_least(k) + _si(k.max_abs))),
    Column("×format", lambda k: Text(_ratio(_of_kernel(k)))),
    Column("biased", lambda k: _biased(k)),
    Column("NaN/inf", lambda k: Text(str(k.nonfinite), "bold red" if k.nonfinite else "dim")),
)


def _at_least(k: KernelSummary) -> str:
    """Of sampled rows the maximum is a lower bound."""
    return "" if k.rows_measured is None or k.max_abs is None else "≥"


def _of_kernel(k: KernelSummary) -> float | None:
    return k.flash_vs_precision if k.role == "kernel" else None


def _expected(k: KernelSummary) -> Text:
    return _beside_prediction(k.expected_ratio_worst)


def _beside_prediction(value: float | None) -> Text:
    """The worst head's error over what its roundings predict; what is far above 1 stands out."""
    if value is None:
        return Text("-", "dim")
    style = "green" if value <= 1.15 else "yellow" if value <= 1.5 else "bold red"
    return Text(_ratio(value), style)


def _biased(k: KernelSummary) -> Text:
    if not k.bias_testable or k.role == "floor":
        return Text("-", "dim")
    share = f"{k.biased_heads}/{k.ok}"
    return Text(share, "yellow" if k.biased_heads else "dim")


def _notes(report: AuditReport) -> list[Text]:
    lines = [
        "×floor: rms error over that of the exact result rounded once (the floor), median head "
        "and worst head. ×base: over the baseline's, which is plain attention as model code "
        "writes it. ×pred: over what the roundings it claims to make predict, worst head. ×format: "
        "how far the kernel is from the baseline, over how far rounding the inputs moved the "
        "answer. biased: heads with a systematic error, of those judged."
    ]
    rows = max((k.rows_measured or 0 for k in report.summary.kernels), default=0)
    if rows:
        lines.append(
            f"Sampled: {rows} query rows of each head were measured, drawn over all positions. "
            "Averages and ratios are estimates (their 95 % intervals are in the rows of "
            "report.json), maxima lower bounds (≥); the baseline was computed for these rows "
            "alone. What is not finite is counted in all rows."
        )
    lines += _slow_references(report)
    return [_text(line, "dim") for line in lines]


def _slow_references(report: AuditReport) -> list[str]:
    """Where the reference could not go by its fast path, and why."""
    floors = [row for row in report.rows if row.role == "floor" and row.tensor == "out"]
    reasons = {(row.case, row.ran) for row in floors if (row.ran or "").startswith("blocked: ")}
    counts = Counter((ran or "").removeprefix("blocked: ") for _, ran in sorted(reasons))
    return [
        f"The fp64 reference of {count} {'calls' if count > 1 else 'call'} was computed block by "
        f"block, slower and as good: {reason}."
        for reason, count in counts.items()
    ]


def _part_table(grid: parts.Grid, width: int) -> Table:
    """Phases or steps side by side; of more columns than fit, some, evenly."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("kernel", overflow="fold")
    longest = max((len(line.label) for line in grid.lines), default=0)
    fitting = max(2, (width - min(longest, width // 3) - 2) // 6)
    shown = list(range(len(grid.columns)))
    if len(shown) > max(fitting, 6):
        shown = sorted({round(i * (len(shown) - 1) / (fitting - 1)) for i in range(fitting)})
    for at in shown:
        table.add_column(grid.columns[at], justify="right")
    for line in grid.lines:
        label = _text(line.label, "bold" if line.role == "kernel" else "dim")
        table.add_row(label, *(_part_cell(grid.columns[at], line.cells[at]) for at in shown))
    return table


def _errors_by_step(grid: parts.Grid) -> Iterator[str]:
    """How large errors are at the first step and at the last, since the floor moves too."""
    ends = (grid.columns[0], grid.columns[-1])
    found = [
        f"{line.label} {_si(line.errors[0])} at step {ends[0]}, {_si(line.errors[-1])} at {ends[1]}"
        for line in grid.lines
        if line.role == "kernel" and len(line.errors) > 1
    ]
    if found:
        yield f"  Error over the size of a row's terms, median head: {'; '.join(found)}."


def _part_cell(column: str, value: float | None) -> Text:
    return _beside_prediction(value) if column.endswith("×pred") else _shaded(value)


def _explanations(found: Sequence[Explanation]) -> Iterator[RenderableType]:
    """Which roundings make each kernel's errors, and what the sites in the table are."""
    if not found:
        return
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_text("Which roundings make these errors", "bold"),
        title_justify="left",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in ("kernel", "", "makes the errors of"):
        table.add_column(column, overflow="fold")
    table.add_column("residual", justify="right", no_wrap=True)
    table.add_column("of its squared error", overflow="fold")
    formats = {e.format for e in found}
    last = None
    for e in found:
        name = e.kernel + _options(e.options) + (f" {e.format}" if len(formats) > 1 else "")
        shares = ", ".join(f"{100 * s.share:.0f} % {s.site}" for s in e.sites)
        table.add_row(
            _text("" if name == last else name, "bold"),
            _text(e.tensor),
            _text(_by(e), "" if e.known else "yellow"),
            Text("-", "dim") if e.residual is None else Text(f"{e.residual:.2f}"),
            _text(shares),
        )
        last = name
    yield ""
    yield table
    sites = {s.site: s.rounds for e in found for s in e.sites}
    yield _text(f"  {'; '.join(f'{site}: {what}' for site, what in sites.items())}", "dim")
    yield _text(
        "  residual: what is left of the error, element by element; up to 0.5 explains it.", "dim"
    )


def _by(e: Explanation) -> str:
    if e.nearest is None:
        return "no error" if "makes no error" in e.sentence else "unknown"
    name = e.nearest.replace("`", "")
    if not e.known:
        return f"unknown; nearest {name}"
    some = f" ({e.explained} of {e.calls} calls)" if e.explained < e.calls else ""
    return name + some


def _worst_rows(rows: Sequence[WorstRow], *, sampled: bool) -> Iterator[Text]:
    """The rows that err most and what is special about them, under a title."""
    if not rows:
        return
    yield Text("")
    yield _text("The rows that err most" + (", of those sampled" if sampled else ""), "bold")
    for w in rows:
        place = f"layer {w.layer}" if w.layer is not None else w.module or w.case
        rest = f" ({w.format}), {place}, head {w.head}, {w.tensor}: {w.sentence}"
        name = (w.kernel or w.case) + _options(w.options)
        yield Text.assemble(_text(name, "bold"), _text(rest), overflow="fold")


def _head_map(found: HeadMap, width: int) -> Group:
    """The map in as many blocks of heads as the terminal's width asks for."""
    room = max(24, width - 5 * len(found.heads))  # long names may take what the heads leave
    margin = max(5, *(min(len(layer), room) for layer in found.layers))
    fitting = max(1, (width - margin) // 5)
    blocks = [
        _head_block(found, range(start, min(start + fitting, len(found.heads))), margin)
        for start in range(0, len(found.heads), fitting)
    ]
    title = f"{found.kernel} in {found.format}: ×floor by layer (down) and head (across)"
    return Group(_text(title, "bold"), *blocks)


def _head_block(found: HeadMap, columns: Sequence[int], margin: int) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("layer", header_style="dim", style="dim", width=margin, overflow="fold")
    for column in columns:
        table.add_column(str(found.heads[column]), justify="right", header_style="dim", width=4)
    for layer, values in zip(found.layers, found.values, strict=True):
        table.add_row(_text(layer), *(_shaded(values[c], short=True) for c in columns))
    return table


def _weights(weights: Sequence[WeightSummary]) -> Iterator[Text]:
    """What casting the stored weights costs, a line for each format that changes any."""
    for w in weights:
        if w.mean_abs or w.nonfinite:
            lost = f"; {w.nonfinite} not finite" if w.nonfinite else ""
            yield _text(
                f"Stored weights cast to {w.format}: mean change {_si(w.mean_abs)} (= W1), max "
                f"{_si(w.max_abs)} in {w.max_tensor}{lost}"
            )


def _last_lines(report: Report) -> Iterator[str]:
    """Where the numbers come from, and where the time went."""
    yield _source_line(report)
    if report.timings:
        yield words(report.timings)


def _source_line(report: Report) -> str:
    source, system = report.provenance.source, report.provenance.system
    what = source.get("checkpoint") or source.get("tensors") or source.get("config")
    read = f", {source['prompt']}" if "prompt" in source else ""
    if "captured_from" in source:
        read = f", captured from {source['captured_from']}"
    where = system.get("gpu") or f"{system.get('cpu')} ({system.get('cpu_capability')})"
    torch = system.get("packages", {}).get("torch", "?")
    return f"{what}{read}. torch {torch} on {where}. numdev {report.provenance.numdev}."


def _options(options: Mapping[str, Any]) -> str:
    shown = ",".join(f"{k}={v}" for k, v in options.items() if v is not None)
    return f"[{shown}]" if shown else ""


def _shaded(value: float | None, *, short: bool = False) -> Text:
    if value is None:
        return Text("-", "dim")
    style = next(colour for limit, colour in SHADES if value <= limit)
    return Text(numbers.short(value) if short else _ratio(value), style)


def _ratio(value: float | None) -> str:
    return "-" if value is None else numbers.ratio(value)


def _times(value: float | None) -> str:
    """A ratio that may be far below 1."""
    return _ratio(value) if value is None or value == 0 or value >= 0.01 else _si(value)


def _si(value: float | None) -> str:
    """An error: all in one column as powers, but those near 1."""
    if not value:
        return "-" if value is None else "0"
    return f"{value:.1f}" if 0.95 <= value < 100 else numbers.power(f"{value:.1e}")


def _text(content: str, style: str = "") -> Text:
    """Foreign text, as it is: no markup, no control characters, cut nowhere."""
    return Text(plain(content), style, overflow="fold")
