"""The HTML page: whole in itself, foreign text as mere text, and readable by everybody:
contrast, lines that differ by more than colour, drawings."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_rows import planned, row
from test_github import NAMES

from numdev import report as reports
from numdev.report import Axis, Curve, Figure, Finding, Point, Provenance, Tick
from numdev.report.document import Figures
from numdev.report.renderers import html, svg_chart
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
@pytest.mark.parametrize("made", [sweep, audit])
def test_names_are_text(made: Any, name: str) -> None:
    """Whatever stands in a name, a reason or a path: the page has no other element or
    attribute than with an ordinary name, and shows it as it is (in backticks as code). A
    name cannot turn the text around it: U+202E is shown, not obeyed, in drawings too."""
    page = html.page(made(name=name))
    assert Seen(page).names == Seen(html.page(made(name="flash"))).names
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
PAIRS = [("ink", "paper", 4.5), ("soft", "paper", 4.5), ("ink", "panel", 4.5),
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
    (point,) = dots(svg)
    assert bool(ends) == (across == "category")
    assert svg_chart.LEFT <= point[0] <= svg_chart.RIGHT
    assert all(svg_chart.TOP <= y <= svg_chart.BOTTOM for y in (point[1], *ends))


def test_a_constant_runs_all_along() -> None:
    """What the axis does not move is a level, without points that were never measured."""
    point = Point(x=None, label="", mean=1.0, low=None, high=None)
    level = line("floor", 1.0, "floor", points=(point,))
    path, *_ = drawn(figure(line("a", 1.0), level)).findall("g")[1].iter("path")
    assert re.fullmatch(
        rf"M{svg_chart.LEFT:g} ([\d.]+)L{svg_chart.RIGHT:g} \1", path.get("d", "")
    )


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
