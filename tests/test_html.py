"""The HTML page: whole in itself, foreign text as mere text, and readable by everybody:
contrast, lines that differ by more than colour, drawings."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_rows import planned, row
from test_github import NAMES

from numdev import report as reports
from numdev.errors import UsageError
from numdev.report import Axis, Curve, Figure, Finding, Point, Provenance, Tick
from numdev.report.document import (
    Cell,
    Column,
    Details,
    Document,
    Figures,
    Paragraph,
    Row,
    StackedBars,
    Table,
    heat_map,
    table,
)
from numdev.report.renderers import html, markdown, svg_chart, terminal
from numdev.report.safe_text import plain

XS = (64.0, 128.0, 256.0, 1024.0)
SAMPLES = sorted((Path(__file__).parent / "data" / "reports").glob("*.json"))
CSS = (Path(html.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")


def sample(kind: str) -> Path:
    return next(path for path in SAMPLES if path.stem == kind)


def axis(
    scale: Any = "log", labels: tuple[str, ...] = ("64", "128", "256", "1024")
) -> Axis:
    places = XS if scale != "category" else range(len(labels))
    ticks = tuple(Tick(x=float(x), label=n) for x, n in zip(places, labels, strict=True))
    return Axis(name="seq_len", title="sequence length", scale=scale, ticks=ticks)


def line(label: str, start: float, role: Any = "kernel", **changes: Any) -> Curve:
    """Falls by half from point to point."""
    means = ((x, start * 0.5**i) for i, x in enumerate(XS))
    points = tuple(
        Point(x=x, label=f"{x:g}", mean=y, low=0.4 * y, high=1.6 * y) for x, y in means
    )
    return Curve(**{"label": label, "role": role, "points": points, **changes})


def figure(*curves: Curve, **changes: Any) -> Figure:
    fields: dict[str, Any] = {
        "metric": "max_abs",
        "y_title": "max error",
        "y_scale": "log",
    }
    title = "Max error, by sequence length"
    return Figure(**{"title": title, **fields, **changes}, curves=curves)


def provenance(**changes: Any) -> Provenance:
    system = {"cpu": "CPU", "packages": {"torch": "2.13"}}
    fields: dict[str, Any] = {"command": "c", "system": system, "source": {"config": "a"}}
    return Provenance(numdev="0", created="2026-01-01", **{**fields, **changes})


def sweep(*figures: Figure, name: str = "flash", **summary: Any) -> reports.SweepReport:
    fields: dict[str, Any] = {
        "answer": (f"{name}: max error 1 to 2",), "axis": axis(), "seeds": (0, 1),
        "baseline": "baseline", "notes": (f"{name} was skipped",),
    }  # fmt: skip
    drawn = figures or (figure(line(name, 1.0), line("baseline", 2.0, "baseline")),)
    return reports.SweepReport(
        provenance=provenance(command=f"numdev sweep {name}", source={"config": name}),
        request={"target": name, "title": None},
        summary=reports.SweepSummary(**{**fields, **summary}),
        figures=drawn,
        plan=planned(()),
        cells=(),
    )


def finding(sentence: str, **changes: Any) -> Finding:
    fields: dict[str, Any] = {
        "rule": "bias", "severity": "exceeded", "sentence": sentence, "kernel": "bad",
        "formats": ("bfloat16",), "count": 1, "judged": 2,
    }  # fmt: skip
    return Finding(**{**fields, **changes})


def audit(name: str = "flash", **changes: Any) -> reports.AuditReport:
    kernel = reports.KernelSummary(
        kernel=name, options={"o": name}, role="kernel", format="bfloat16", ok=2, skipped=1,
        failed=0, reasons=(name,), ran=(), floor_ratio=1.23, max_abs=1e-3,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "provenance": provenance(source={"checkpoint": name}), "request": {"target": name},
        "summary": reports.AuditSummary(answer=(f"bfloat16: {name}",), kernels=(kernel,)),
        "findings": (finding(name), finding(name, metric="suspicion")), "tested": (name,),
        "plan": planned(()),
        "rows": (row(kernel=name, case=name, layer=None, expected_ratio=4.56),),
    }  # fmt: skip
    return reports.AuditReport(**{**fields, **changes})


class Seen(HTMLParser):
    """The elements, attributes and text of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names, self.text = set[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names |= {tag, *(f"@{name}" for name, _ in attrs)}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "name", [n for n in NAMES if "`" not in n], ids=lambda n: ascii(n)[:20]
)
@pytest.mark.parametrize("created", [sweep, audit])
def test_names_are_text(created: Any, name: str) -> None:
    """Whatever stands in a name, a reason or a path: the page has no other element or
    attribute than with an ordinary name, and shows it as it is (in backticks as code). A
    name cannot turn the text around it: U+202E is shown, not obeyed, in drawings too."""
    page = html.page(created(name=name))
    assert Seen(page).names == Seen(html.page(created(name="flash"))).names
    assert plain(name, keep="\n") in Seen(page).text
    assert "\u202e" not in page


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_a_page_loads_nothing(path: Path) -> None:
    """No link, no image, nothing from elsewhere, and its policy forbids them; of scripts
    it allows its own, by its hash."""
    page = html.page(reports.read(path))
    assert not Seen(page).names & {"link", "img", "iframe", "object", "use", "image"}
    assert not re.search(r'src=|href="(?!#)|url\(|@import', page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        in page
    )


LINES = [f"c{i}" for i in range(6)]
GROUNDS = ("same", "moved", "beyond")  # of a grid's cells
PAIRS = [*(("ink", name, 4.5) for name in GROUNDS), ("ink", "paper", 4.5), ("soft", "paper", 4.5), ("ink", "panel", 4.5),
         ("exceeded", "panel", 4.5), ("passed", "panel", 4.5), ("warned", "panel", 4.5),
         *(("on-h", f"h{i}", 4.5) for i in range(1, 5)),
         *((name, "paper", 3.0) for name in (*LINES, "focus"))]  # fmt: skip


def colours(theme: str) -> dict[str, str]:
    """The custom properties of a theme: those of the light one, and what the dark one
    changes."""
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    chosen = "".join(blocks[:1] if theme == "light" else blocks)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", chosen))


def linear(colour: str) -> np.ndarray[Any, Any]:
    """sRGB without its gamma, as WCAG 2.2 defines relative luminance."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """(L1 + 0.05) / (L2 + 0.05), the lighter first."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground", "least"), PAIRS)
def test_text_has_contrast(theme: str, text: str, ground: str, least: float) -> None:
    """WCAG 2.2: text at least 4.5 (1.4.3), lines 3 (1.4.11), in both themes. By the
    published values black on white has 21, and #777 on white misses 4.5."""
    of = colours(theme)
    assert contrast(of[text], of[ground]) >= least
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_map_can_be_read_at_every_heat(theme: str) -> None:
    """Ink on a mix of the panel's colour and the darkest shade, in sRGB as `color-mix`
    has it, in all hundred steps."""
    of = colours(theme)
    ends = [[int(of[name][i : i + 2], 16) for i in (1, 3, 5)] for name in ("panel", "h4")]
    for heat in range(101):
        mixed = ((a * (100 - heat) + b * heat) / 100 for a, b in zip(*ends, strict=True))
        ground = "#" + "".join(f"{round(x):02x}" for x in mixed)
        assert contrast(of["ink"], ground) >= 4.5, heat


class Layout(HTMLParser):
    """What stands in what on a page: for each table, drawing and script its ancestors, as
    `tag.class`; and the text that buttons copy."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.around: list[tuple[str, list[str]]] = []
        self.copied: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        fields = dict(attrs)
        if tag in ("table", "svg", "pre"):
            self.around.append((tag, list(self.open)))
        if "data-markdown" in fields:
            self.copied.append(fields["data-markdown"])
        if tag not in ("meta", "br"):
            self.open.append(f"{tag}.{fields.get('class') or ''}")

    def handle_endtag(self, tag: str) -> None:
        while self.open and not self.open.pop().startswith(f"{tag}."):
            pass


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_nothing_is_wider_than_the_page(path: Path) -> None:
    """By the page and its styles: a table scrolls in a box of its own, which the keyboard
    reaches; a drawing shrinks with its figure; long words break in all that does not
    scroll. A browser shows what comes of it: scripts/screenshots.py."""
    page = html.page(reports.read(path))
    for tag, around in Layout(page).around:
        inside = " ".join(around)
        assert tag != "table" or "div.scroll" in around, inside
        assert tag != "svg" or "figure." in inside, inside
    assert page.count('class="scroll"') == page.count('class="scroll" tabindex="0"')
    assert "max-width: calc(900px + 2.5rem)" in CSS
    for rule in (
        r"\.scroll \{ overflow-x: auto",
        r"svg \{ width: 100%; height: auto",
        r"pre \{ padding: .75rem; overflow-x: auto",
        r"h1, h2, h3, p, li, figcaption \{ overflow-wrap: anywhere",
        r"code.run \{[^}]*overflow-wrap: anywhere",
    ):
        assert re.search(rule, CSS), rule


def test_the_main_table_is_copied_as_markdown() -> None:
    """The first that is no map, as it stands, and that one alone; what would be markup in
    Markdown, or the end of the button's attribute, is text in it."""
    rows = [("x|y", "1"), ('"><script>', "2")]
    first = table(("kernel", "error"), rows, title="Errors")
    nodes = (heat_map("a map", [0], {"0": [Cell("1")]}), first, table(("b",), [("3",)]))
    (copied,) = Layout(html.page(Document("d", nodes))).copied
    assert copied == (
        "**Errors**\n\n| kernel | error |\n|---|---:|\n| x\\|y | 1 |\n"
        '| "\\>\\<script\\> | 2 |\n'
    )
    assert not Layout(html.page(Document("d", nodes[:1]))).copied


def test_a_map_of_many_heads_is_laid_out_in_parts() -> None:
    """80 heads are three maps below each other, 27 wide, each with its layers' names; no
    cell is lost."""
    heads = range(80)
    cells = {str(n): [Cell(f"{n}x{head}") for head in heads] for n in range(2)}
    page = html.page(Document("d", (heat_map("m", list(heads), cells),)))
    parts = re.findall(r"<table class=\"map dense\">(.*?)</table>", page, re.DOTALL)
    widths = [part.split("</thead>")[0].count("<th ") - 1 for part in parts]
    assert widths == [27, 27, 26]
    assert all(part.count(">0</th>") + part.count(">1</th>") >= 2 for part in parts)
    for n in range(2):
        result = [x for part in parts for x in re.findall(rf">({n}x\d+)<", part)]
        assert result == [f"{n}x{head}" for head in heads]


def test_a_heading_of_rows_spans_the_table() -> None:
    """In other media its text is the first cell of a row of empty ones."""
    rows = (Row((Cell("group"), Cell("")), heading=True), Row((Cell("a"), Cell("1"))))
    document = Document("d", (Table((Column("axis"), Column("k")), rows, kind="grid"),))
    assert "<th scope=rowgroup colspan=2>group</th></tr>" in html.page(document)
    assert "| group |   |\n| a | 1 |" in markdown.page(document)


def test_details_are_closed_on_a_page_and_open_elsewhere() -> None:
    """What a medium does not show is in none; details of nothing are nowhere."""
    inside = (Paragraph("seen"), Paragraph("of a terminal", only=("terminal",)))
    nodes = (Details("More", inside), Details("Empty", inside[1:], only=("html",)))
    document = Document("d", nodes)
    page = html.page(document)
    assert '<details class="section"><summary>More</summary>' in page
    assert "of a terminal" not in page
    assert "Empty" not in page
    assert "seen" in markdown.page(document)
    assert [type(node) for node in document.shown_in("terminal")] == [Paragraph] * 2


def test_many_sentences_on_what_was_tested_open_on_request() -> None:
    """Two stand on the page; of three a line counts them, and other media show all."""
    for count, closed in ((2, False), (3, True)):
        created = audit(tested=tuple(f"Sentence {i}." for i in range(count)))
        page = html.page(created)
        assert ("What was tested, and what was not (3)" in page) == closed
        assert all(f"Sentence {i}." in page for i in range(count))
        assert "Sentence 1." in markdown.page(created)


def several(count: int, **changes: Any) -> Figures:
    """Figures of one metric at places of another axis, each with a line ten times as
    high."""
    figures = (
        figure(line("a", 10.0**i), line("b", 20.0**i), place={"tile": str(i)}, **changes)
        for i in range(count)
    )
    return Figures(tuple(figures), axis())


def test_many_figures_of_a_metric_are_panels_of_one() -> None:
    """Sixteen with one legend, one title and one range, so that they can be compared: the
    same ticks stand beside each."""
    (group,) = svg_chart.panels_of(several(16))
    assert (group.wide, group.columns, len(group.panels)) == (None, 3, 16)
    assert [title for title, _ in group.panels[:2]] == ["tile 0", "tile 1"]
    assert [line.label for line in group.legend] == ["a", "b"]
    ticks = {
        tuple(t.text for t in ET.fromstring(svg).iter("text") if t.get("text-anchor") == "end")
        for _, svg in group.panels
    }  # fmt: skip
    assert len(ticks) == 1
    page = html.page(Document("d", (several(16),)))
    assert page.count("<figure>") == 1
    assert page.count('class="legend"') == 1


def test_figures_that_cannot_be_compared_stand_by_themselves() -> None:
    """Two metrics, or many names on the axis. Each is drawn twice: as wide as the page,
    names at the lines' ends, and for a phone with a legend below; only the first has
    tooltips."""
    two = Figures((figure(line("a", 1.0)), figure(line("a", 1.0), metric="rms")), axis())
    names = tuple(f"regime {i}" for i in range(8))
    crowded = replace(several(4), axis=Axis(
        name="inputs", title="inputs", scale="category",
        ticks=tuple(Tick(x=float(i), label=n) for i, n in enumerate(names)),
    ))  # fmt: skip
    for of in (two, crowded):
        groups = list(svg_chart.panels_of(of))
        assert len(groups) == len(of.figures)
        for group in groups:
            assert group.wide is not None
            assert "<title>" in group.wide
            assert "<title>" not in group.panels[0][1]
    three = Figures((*two.figures, figure(line("a", 1.0), metric="mean_abs")), axis())
    (together,) = svg_chart.panels_of(three)
    assert (together.columns, together.title) == (3, "")


def test_a_bar_is_as_long_as_its_parts() -> None:
    """The longest sum fills the page; parts keep one order and one look in all bars; more
    than six are told apart by hatching."""
    many = {f"s{i}": 0.1 for i in range(8)}
    bars = StackedBars((("k", {"a": 0.5, "b": 1.5}), ("l", many)), "Budget")
    assert (bars.longest, bars.names[:3]) == (2.0, ["b", "a", "s0"])
    page = html.page(Document("d", (bars,)))
    widths = re.findall(r'<span class="(c\d(?: hatched)?)" style="width:([\d.]+)%"', page)
    assert widths[:2] == [("c0", "75.000"), ("c1", "25.000")]
    assert widths[-1] == ("c3 hatched", "5.000")
    assert 'title="b: 150 %"' in page
    alone = html.page(Document("d", (StackedBars(bars.bars[:1], "Budget"),)))
    assert "<span>b 150 %</span>" in alone
    assert "<span>b</span>" in page
    assert StackedBars((), "Budget").longest == 1.0


def drawn(figure: Figure, along: Axis | None = None) -> ET.Element:
    return ET.fromstring(svg_chart.svg(figure, Figures((figure,), along or axis())))


def dots(svg: ET.Element) -> list[list[float]]:
    """Where the points are."""
    moved = filter(None, (path.get("transform") for path in svg.iter("path")))
    return [list(map(float, re.findall(r"[-\d.]+", each))) for each in moved]


@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize("across", ["log", "linear", "category"])
def test_everything_is_inside_the_frame(scale: Any, across: Any) -> None:
    """Points, intervals that reach below zero, ticks."""
    low = Point(
        x=XS[0] if across != "category" else 0.0, label="", mean=1.0, low=-3.0, high=5.0
    )
    svg = drawn(figure(line("flash", 1.0, points=(low,)), y_scale=scale), axis(across))
    bars = [p.get("d", "") for p in svg.iter("path") if p.get("class") == "bar"]
    ends = [float(y) for bar in bars for y in re.findall(r" ([\d.]+)", bar)]
    (point,), wide = dots(svg), svg_chart.WIDE
    assert bool(ends) == (across == "category")
    assert wide.left <= point[0] <= wide.right
    assert all(wide.top <= y <= wide.bottom for y in (point[1], *ends))


def test_a_constant_runs_all_along() -> None:
    """What the axis does not move is a level, without points that were never measured."""
    point = Point(x=None, label="", mean=1.0, low=None, high=None)
    level = line("floor", 1.0, "floor", points=(point,))
    path, *_ = drawn(figure(line("a", 1.0), level)).findall("g")[1].iter("path")
    wide = svg_chart.WIDE
    assert re.fullmatch(rf"M{wide.left:g} ([\d.]+)L{wide.right:g} \1", path.get("d", ""))


def test_lines_are_told_apart_by_everybody() -> None:
    """No two of 8 kernels have the same marker and dash, no two of 24 these and the
    colour."""
    lines = drawn(figure(*(line(f"k{i}", 1.0 + i) for i in range(24)))).findall("g")
    markers = [next(p.get("d") for p in group if p.get("transform")) for group in lines]
    looks = [
        (*str(g.get("class")).split(), m) for g, m in zip(lines, markers, strict=True)
    ]
    assert len({look[1:] for look in looks[:8]}) == 8
    assert len({*looks}) == 24


def test_an_endless_interval_does_not_flatten_the_lines() -> None:
    """Two seeds can make an interval of twenty decades; the axis stays with the means."""
    wild = tuple(p.model_copy(update={"high": 1e18}) for p in line("a", 1.0).points)
    ends = [y for _, y in dots(drawn(figure(line("a", 1.0, points=wild))))]
    assert max(ends) - min(ends) > 100


@pytest.mark.parametrize(("text", "unbroken"), [
    ("errs 2.0e-3× in all", ["2.0e-3×"]), ("95 % interval", ["95 %"]),
    ("on 2026-11-28 at -3 % of it", ["2026-11-28", "-3 %"]), ("0.5 ulp, 3 s", ["0.5 ulp", "3 s"]),
    ("1.00× and 7 tokens", []), ("sdpa-2 heads 'x' 3-4", []), ("6.1e-5 ± 2 %", ["6.1e-5 ± 2 %"]),
])  # fmt: skip
def test_no_line_ends_within_a_number_and_its_unit(
    text: str, unbroken: list[str]
) -> None:
    """Nor within a date, or what follows ±; a name that has digits may be broken."""
    shown = html.page(Document("t", (Paragraph(text),)))
    assert re.findall('<span class="one">(.*?)</span>', shown) == unbroken


@pytest.mark.parametrize(
    "path", [p for p in SAMPLES if p.stem not in ("audit", "sweep")], ids=lambda p: p.stem
)
def test_a_report_without_rows_by_head_draws_no_figure(path: Path) -> None:
    """In one line, whatever its rows are, and whether matplotlib is installed or not."""
    with pytest.raises(UsageError, match=r"plot: no row of out in .* has floor_ratio"):
        reports.read(path).plot()


@pytest.mark.parametrize(("system", "line"), [
    ({"packages": {"torch": "2.13"}, "cpu": "EPYC", "cpu_capability": "AVX2"}, "torch 2.13 on EPYC (AVX2). "),
    ({"packages": {"torch": "2.13"}, "cpu": "EPYC"}, "torch 2.13 on EPYC. "),
    ({"packages": {"torch": "2.13"}, "cpu_capability": "AVX2"}, "torch 2.13 on AVX2. "),
    ({"packages": {"torch": "2.13"}}, "torch 2.13. "), ({"gpu": "H200"}, "H200. "), ({}, ""),
])  # fmt: skip
def test_an_origin_says_what_is_known(
    system: dict[str, object], line: str, capsys: Any
) -> None:
    """A report of a machine of which some or all is not known."""
    shown = reports.read(sample("bounds"))
    origin = shown.provenance.model_copy(update={"system": system, "source": {}})
    shown = shown.model_copy(update={"provenance": origin})
    terminal.show(shown)
    assert f"\n{line}numdev {origin.numdev}." in capsys.readouterr().out
    page = html.page(shown)
    assert "None" not in page
    assert ("<td>CPU" in page or "CPU</th>" in page) == ("cpu" in str(system))
