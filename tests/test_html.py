"""The HTML page: whole in itself, foreign text as mere text, and drawings that can be read."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from numdev.report import (
    AuditReport,
    AuditSummary,
    Axis,
    Curve,
    Figure,
    Finding,
    HeadMap,
    KernelSummary,
    Point,
    Provenance,
    Report,
    SweepReport,
    SweepSummary,
    Tick,
)
from numdev.report.document import charts
from numdev.report.renderers import chart, html

HOSTILE = [
    "<script>alert(1)</script>",
    "</title></svg><img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "' autofocus onfocus='alert(1)",
    "{{ 7 * 7 }}{% include 'x' %}",
    "&lt;b&gt;",
    "javascript:alert(1)",
    "x" * 300,
    "長" * 100,
]
XS = (64.0, 128.0, 256.0, 1024.0)


def axis(scale: Any = "log", labels: tuple[str, ...] = ("64", "128", "256", "1024")) -> Axis:
    places = XS if scale != "category" else range(len(labels))
    ticks = tuple(Tick(x=float(x), label=n) for x, n in zip(places, labels, strict=True))
    return Axis(name="seq_len", title="sequence length", scale=scale, ticks=ticks)


def line(label: str, start: float, role: Any = "kernel", **changes: Any) -> Curve:
    """Falls by half from point to point."""
    points = tuple(
        Point(x=x, label=f"{x:g}", mean=start * 0.5**i, low=start * 0.4 * 0.5**i,
              high=start * 1.6 * 0.5**i, seeds=5)
        for i, x in enumerate(XS)
    )  # fmt: skip
    return Curve(**{"label": label, "role": role, "kernel": label, "points": points, **changes})


def figure(*curves: Curve, **changes: Any) -> Figure:
    fields: dict[str, Any] = {
        "title": "Max error, by sequence length", "metric": "max_abs", "relative": False,
        "y_title": "max error", "y_scale": "log",
    }  # fmt: skip
    return Figure(**{**fields, **changes}, curves=curves)


def provenance(**changes: Any) -> Provenance:
    fields: dict[str, Any] = {
        "numdev": "0", "command": "numdev sweep", "created": "2026-01-01",
        "system": {"cpu": "CPU", "packages": {"torch": "2.13"}}, "source": {"config": "a.yaml"},
    }  # fmt: skip
    return Provenance(**{**fields, **changes})


def sweep(*figures: Figure, name: str = "flash", **summary: Any) -> SweepReport:
    fields: dict[str, Any] = {
        "answer": (f"{name}: grows 2 x",), "axis": axis(), "cells": 4, "seeds": (0, 1),
        "baseline": "baseline", "notes": (f"{name} was skipped",),
    }  # fmt: skip
    drawn = figures or (figure(line(name, 1.0), line("baseline", 2.0, "baseline")),)
    return SweepReport(
        provenance=provenance(command=f"numdev sweep {name}", source={"config": name}),
        request={"target": name, "title": None},
        summary=SweepSummary(**{**fields, **summary}),
        figures=drawn,
        cells=(),
    )


def finding(sentence: str, **changes: Any) -> Finding:
    fields: dict[str, Any] = {
        "rule": "bias", "severity": "exceeded", "sentence": sentence, "kernel": "bad",
        "formats": ("bfloat16",), "count": 1, "judged": 2,
    }  # fmt: skip
    return Finding(**{**fields, **changes})


def audit(name: str = "flash") -> AuditReport:
    kernel = KernelSummary(
        kernel=name, options={"o": name}, role="kernel", format="bfloat16", ok=2, skipped=1,
        failed=0, reasons=(name,), ran=(), floor_ratio=1.23, max_abs=1e-3,
    )  # fmt: skip
    found = HeadMap(kernel=name, format="bfloat16", metric="floor_ratio", layers=(name, "1"),
                    heads=(0, 1), values=((1.0, 4.56), (None, 2.0)))  # fmt: skip
    return AuditReport(
        provenance=provenance(source={"checkpoint": name}),
        request={"target": name},
        summary=AuditSummary(answer=(f"bfloat16: {name}",), kernels=(kernel,), map=found),
        findings=(finding(name), finding(name, metric="suspicion")),
        tested=(name,),
        rows=(),
    )


def drawn(figures: list[Figure], along: Axis, baseline: str) -> list[chart.Chart]:
    """The geometry of figures of one report."""
    return [chart.drawn(each) for each in charts(figures, along, baseline)]


class Seen(HTMLParser):
    """Every element, attribute and text of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


# --- foreign text --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE, ids=lambda n: ascii(n)[:20])
@pytest.mark.parametrize("made", [sweep, audit])
def test_names_are_text(made: Any, name: str) -> None:
    """Whatever stands in a name, a reason or a path: the page has no other element or attribute
    than with an ordinary name, and shows it as it is."""
    plain, hostile = Seen(html.page(made(name="flash"))), Seen(html.page(made(name=name)))
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert name in hostile.text


@pytest.mark.parametrize("found", [sweep(), audit()], ids=["sweep", "audit"])
def test_a_page_loads_nothing(found: Report) -> None:
    """No script, no link, no image, nothing from elsewhere; and its policy forbids them."""
    page = html.page(found)
    assert not Seen(page).tags & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


# --- drawings ------------------------------------------------------------------------------------


def drawings(found: SweepReport) -> list[ET.Element]:
    page = html.page(found)
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_a_drawing_names_every_curve_beside_its_end() -> None:
    """No legend to look things up in; and every point says its number and interval."""
    svg = drawings(sweep())[0]
    texts = {t.text for t in svg.iter("text")}
    assert {"flash", "baseline", "sequence length", "max error", "64", "1024"} <= texts
    titles = [t.text for t in svg.iter("title")]
    assert "flash at 64: 1 [0.4 to 1.6]" in titles


@pytest.mark.parametrize("count", [1, 2, 7, 13])
def test_labels_cover_each_other_nowhere(count: int) -> None:
    """However close the lines end, and however long the names."""
    curves = [line(f"kernel number {i} with block_kv=128", 1.0 + i / 1000) for i in range(count)]
    made = drawn([figure(*curves)], axis(), "baseline")[0]
    spans = sorted(
        (d.label_y - chart.LINE * len(d.label) / 2, d.label_y + chart.LINE * len(d.label) / 2)
        for d in made.drawn
    )
    assert all(above[1] <= below[0] for above, below in itertools.pairwise(spans))
    if count < 10:
        assert spans[0][0] >= 0
    assert spans[-1][1] <= chart.HEIGHT


@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize("across", ["log", "linear", "category"])
def test_everything_is_inside_the_frame(scale: Any, across: Any) -> None:
    """Points, intervals that reach below zero, ticks."""
    low = Point(x=XS[0] if across != "category" else 0.0, label="", mean=1.0, low=-3.0, high=5.0,
                seeds=2)  # fmt: skip
    made = drawn([figure(line("flash", 1.0, points=(low,)), y_scale=scale)], axis(across), "b")[0]
    left, top, wide, high = made.frame
    for curve in made.drawn:
        for dot in curve.dots:
            assert left <= dot.x <= left + wide
            assert all(top <= y <= top + high for y in (dot.y, dot.low, dot.high) if y is not None)
    assert all(left <= x <= left + wide for x, _ in made.x_ticks)
    assert all(top <= y <= top + high for y, _ in made.y_ticks)


def test_a_power_law_is_straight_on_log_axes() -> None:
    """Halving with each doubling: equal steps down for equal steps to the right."""
    made = drawn([figure(line("flash", 1.0))], axis(), "baseline")[0]
    (x0, y0), (x1, y1), (x2, y2), _ = ((d.x, d.y) for d in made.drawn[0].dots)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


def test_figures_of_one_metric_share_their_range() -> None:
    """Else a small effect looks as large as a large one."""
    made = drawn(
        [figure(line("a", 1.0)), figure(line("a", 100.0)), figure(line("a", 5.0), metric="rms")],
        axis(), "baseline",
    )  # fmt: skip
    assert made[0].y_ticks == made[1].y_ticks != made[2].y_ticks


def test_a_kernel_looks_alike_everywhere() -> None:
    """Colour and marker go with the name, not with the place in a figure; two kernels differ."""
    made = drawn(
        [figure(line("a", 1.0), line("b", 2.0)), figure(line("b", 1.0))], axis(), "baseline"
    )
    first = {d.label: (d.style, d.marker) for d in made[0].drawn}
    assert first[("b",)] == (made[1].drawn[0].style, made[1].drawn[0].marker)
    assert len(set(first.values())) == 2


def test_a_constant_runs_all_along() -> None:
    """What the axis does not move is a level, without points that were never measured."""
    point = Point(x=None, label="", mean=1.0, low=None, high=None, seeds=1)
    made = drawn(
        [figure(line("a", 1.0), line("floor", 1.0, "floor", constant=True, points=(point,)))],
        axis(), "baseline",
    )[0].drawn[1]  # fmt: skip
    assert made.path.startswith(f"M{chart.LEFT} ")
    assert f"L{chart.WIDTH - chart.RIGHT} " in made.path
    assert made.dots == ()


@pytest.mark.parametrize("low", [1e-16, 3e-9, 0.02, 0.9, 40.0])
@pytest.mark.parametrize("span", [1.3, 4.0, 90.0, 1e12])
def test_a_log_axis_has_readable_ticks(low: float, span: float) -> None:
    """At least two to read off, and few enough to stand apart."""
    ticks = chart._y_ticks((low, low * span), True)
    assert 2 <= len(ticks) <= 12
    assert all(low <= t <= low * span for t in ticks)


@pytest.mark.parametrize("high", [1e-7, 0.3, 1.0, 17.0, 8e4])
def test_a_linear_axis_has_readable_ticks(high: float) -> None:
    """Round numbers from zero."""
    ticks = chart._y_ticks((0.0, high), False)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 7
    step = ticks[1] / 10 ** math.floor(math.log10(ticks[1]) + 1e-9)
    assert any(step == pytest.approx(s) for s in (1, 2, 5))


@pytest.mark.parametrize(
    ("value", "plain", "shown"),
    [(0.001, False, "10⁻³"), (2e-12, False, "2·10⁻¹²"), (0.5, True, "0.5"), (0, False, "0"),
     (1, False, "1"), (30000.0, False, "3·10⁴")],
)  # fmt: skip
def test_numbers_on_the_axis(value: float, plain: bool, shown: str) -> None:
    """As a person writes them."""
    assert chart._number(value, plain) == shown


def test_words_in_backticks_are_code(tmp_path: Path) -> None:
    """And nothing else is: what stands in them is text as everywhere."""
    bad = finding("the `fa2` roundings, `<b>x</b>` and `two words`")
    page = html.page(audit().model_copy(update={"findings": (bad,)}))
    assert "the <code>fa2</code> roundings" in page
    assert "<code>&lt;b&gt;x&lt;/b&gt;</code> and `two words`" in page


def test_findings_stand_under_the_answer() -> None:
    """And what was tested under them; but a different function comes first."""
    found = audit().model_copy(
        update={
            "findings": (
                finding("It computes a different function.", metric="suspicion"),
                finding("It is biased."),
            ),
            "tested": ("Judged: flash.",),
        }
    )
    text = Seen(html.page(found)).text
    order = ("a different function", "bfloat16: flash", "It is biased", "Judged", "×floor")
    places = [text.index(part) for part in order]
    assert places == sorted(places)
