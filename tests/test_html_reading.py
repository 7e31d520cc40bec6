"""A page that everybody can read: contrast, colours that stay apart, the keyboard, paper, size."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_html import audit, finding, line, sweep

from numdev import report as reports
from numdev.report import AuditReport, Curve, Figure, HeadMap, Report, WorstRow
from numdev.report.renderers import html
from numdev.report.views import positions

SAMPLES = sorted((Path(__file__).parent / "data" / "reports").glob("*.json"))
CSS = (Path(html.__file__).parent / "templates" / "style.css").read_text(encoding="utf-8")
TEXT = [("ink", "paper"), ("soft", "paper"), ("ink", "panel"), ("exceeded", "paper"),
        *(("on-h", f"h{i}") for i in range(1, 5))]  # fmt: skip
LINES = [f"c{i}" for i in range(6)]
# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as seen by dichromats.
SEEN = {
    "everybody": np.eye(3),
    "protanopes": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopes": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopes": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip


def colours(theme: str) -> dict[str, str]:
    """The custom properties of a theme: those of the light one, and what the dark one changes."""
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    chosen = blocks[:1] if theme == "light" else blocks
    pairs = (re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block) for block in chosen)
    return dict(itertools.chain.from_iterable(pairs))


def linear(colour: str) -> np.ndarray[Any, Any]:
    """sRGB without its gamma, as WCAG 2.2 defines relative luminance."""
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """(L1 + 0.05) / (L2 + 0.05), the lighter first."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(rgb: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """CIE L*a*b* (D65) of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
                       [0.0193, 0.1192, 0.9505]])  # fmt: skip
    t = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(colours: list[str]) -> float:
    """The least distance (CIE76) between any two, to whomever sees them as most alike."""
    return min(
        float(np.linalg.norm(lab(m @ linear(a)) - lab(m @ linear(b))))
        for m in SEEN.values()
        for a, b in itertools.combinations(colours, 2)
    )


def read(path: Path) -> Report:
    return reports.read(path)


class Reader(HTMLParser):
    """What a page has to be used with the keyboard and read aloud."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.elements if tag in tags]


# --- colours -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "known"),
    [("#000000", "#ffffff", 21.0), ("#777777", "#ffffff", 4.478), ("#123456", "#123456", 1.0)],
)
def test_contrast_is_that_of_wcag(a: str, b: str, known: float) -> None:
    """Published values: black on white is 21, #777 on white misses 4.5."""
    assert contrast(a, b) == pytest.approx(known, abs=1e-3)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), TEXT)
def test_text_has_contrast(theme: str, text: str, ground: str) -> None:
    """WCAG 2.2, 1.4.3: at least 4.5, in both themes, on shaded cells too."""
    found = colours(theme)
    assert contrast(found[text], found[ground]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", [*LINES, "soft", "focus"])
def test_lines_have_contrast(theme: str, name: str) -> None:
    """WCAG 2.2, 1.4.11: what is drawn has at least 3."""
    found = colours(theme)
    assert contrast(found[name], found["paper"]) >= 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_are_told_apart_by_everybody(theme: str) -> None:
    """Any two lines, the baseline among them, are at least 20 apart to dichromats of each kind;
    and a red beside a green of the same lightness, which are not, are refused."""
    found = colours(theme)
    assert apart([found[name] for name in (*LINES, "ink")]) >= 20
    assert apart(["#d55e00", "#b8860b"]) < 20


def test_every_colour_of_a_rule_is_a_custom_property() -> None:
    """So none escapes the tests above, or the theme."""
    rules = re.sub(r":root \{.*?\}|/\*.*?\*/", "", CSS, flags=re.DOTALL)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl", rules)


# --- the keyboard, and reading without a mouse ---------------------------------------------------


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_whatever_scrolls_can_be_focused(path: Path) -> None:
    """A wide table scrolls in its box, which the keyboard reaches and a screen reader names."""
    page = html.page(read(path))
    boxes = [a for a in Reader(page).all("div") if a.get("class") == "scroll"]
    assert boxes
    assert all(b["tabindex"] == "0" and b["role"] == "region" and b["aria-label"] for b in boxes)
    assert all(a.get("tabindex") == "0" for a in Reader(page).all("pre"))
    outside = re.sub(r'<div class="scroll".*?</div>', "", page, flags=re.DOTALL)
    assert "<table" not in outside
    assert "<svg" not in outside


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_a_drawing_has_its_numbers_beside_it(path: Path) -> None:
    """What pointing at a drawing shows is in a table too, but for the running sums, whose ends the
    text gives."""
    page = html.page(read(path))
    figures = [f for f in re.findall(r"<figure>.*?</figure>", page, re.DOTALL) if "<svg" in f]
    for drawn in figures:
        assert "<summary>The numbers</summary>" in drawn or "Running sum" in drawn
        assert re.search(r'<svg [^>]*role="img" aria-label="[^"]+"', drawn)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.stem)
def test_the_answer_is_the_first_sentence(path: Path) -> None:
    """After the heading, before any explanation."""
    found: Any = read(path)
    page = html.page(found)
    said = re.findall(r"<(h1|li|p)\b", page[page.index("<body") :])
    assert said[:2] == ["h1", "li"]
    assert re.findall("<h2>(.*?)</h2>", page)[-1] == "Where this comes from"


# --- the map, positions, reproducers -------------------------------------------------------------


def test_a_large_audit_is_a_small_page() -> None:
    """32 layers of 32 heads, eight kernels in three formats, 20 findings: under 2 MB."""
    rng = random.Random(0)
    values = tuple(tuple(rng.lognormvariate(0.3, 2) for _ in range(32)) for _ in range(32))
    big = HeadMap(
        kernel="k", format="bfloat16", metric="floor_ratio", values=values,
        layers=tuple(f"model.decoder.layers.{i}" for i in range(32)), heads=tuple(range(32)),
    )  # fmt: skip
    found = audit()
    kernel = found.summary.kernels[0]
    kernels = [
        kernel.model_copy(update={"kernel": f"kernel-{i}", "format": name})
        for i in range(8)
        for name in ("bfloat16", "float16", "float32")
    ]
    summary = found.summary.model_copy(update={"map": big, "kernels": tuple(kernels)})
    page = html.page(
        found.model_copy(update={"summary": summary, "findings": (finding("x" * 400),) * 20})
    )
    assert page.count("<td") > 1024
    assert len(page.encode()) < 300_000


def worst(**changes: Any) -> WorstRow:
    fields: dict[str, Any] = {
        "case": "c", "source": "s", "module": "m", "layer": 3, "call": 0, "seed": 0, "kernel": "k",
        "format": "bfloat16", "tensor": "out", "head": 1, "batch": 0, "row": 25, "rows": 101,
        "nonfinite": 0, "error": 1.0, "ratio": 7.0, "predicted": True, "cancellation": 1.0,
        "sees": 1, "position": 1, "max_probability": 1.0, "sentence": "row 25",
    }  # fmt: skip
    return WorstRow(**{**fields, **changes})


def test_where_rows_stand() -> None:
    """By their share of the way, first row 0 %, last 100 %; ratios to different things apart."""
    drawn = positions.of_worst(
        [worst(), worst(row=100, tensor="dq"), worst(row=0, rows=1, predicted=False)]
    )
    assert [[c.points[0].x for c in f.curves] for f in drawn] == [[25.0, 100.0], [0.0]]
    assert drawn[0].curves[0].points[0].mean == 7.0


def test_a_row_without_a_ratio_is_not_drawn() -> None:
    """One that is not finite has none; it is in the list all the same."""
    assert positions.of_worst([worst(ratio=None)]) == ()
    summary = audit().summary.model_copy(update={"worst_rows": (worst(ratio=None),)})
    assert "row 25" in html.page(audit().model_copy(update={"summary": summary}))


def test_a_finding_has_its_reproducer(tmp_path: Path) -> None:
    """The command to copy, and the script, escaped; a finding without one has neither."""
    with_one = finding("first", kernel="mine", tensor="out")
    folder = tmp_path / "reproducers" / with_one.folder
    folder.mkdir(parents=True)
    (folder / "reproduce.py").write_text("print('<b>')\n")
    found = audit().model_copy(update={"findings": (with_one, finding("second"))})
    page = html.page(found, tmp_path)
    assert f"python reproducers/{with_one.folder}/reproduce.py" in page
    assert "print(&#39;&lt;b&gt;&#39;)" in page
    assert page.count("To see it again") == 1
    assert "To see it again" not in html.page(found)


@pytest.mark.parametrize("name", ["..", "../x", "/etc/passwd", "a/../../b", "."])
def test_a_reproducer_is_looked_for_nowhere_else(tmp_path: Path, name: str) -> None:
    """A kernel's name is no path: what lies beside the folder of reproducers is not shown."""
    (tmp_path / "reproducers").mkdir()
    (tmp_path / "reproduce.py").write_text("secret")
    bad = finding("s", kernel=name, rule="", formats=())
    assert "/" not in bad.folder
    assert "secret" not in html.page(audit().model_copy(update={"findings": (bad,)}), tmp_path)


# --- drawings that used to fail ------------------------------------------------------------------


@pytest.mark.parametrize(
    "drawn",
    [
        Figure(title="none", metric="m", relative=False, y_title="y", y_scale="log", curves=()),
        Figure(title="no points", metric="m", relative=False, y_title="y", y_scale="linear",
               curves=(Curve(label="a", role="kernel", kernel="a", points=()),)),
        Figure(title="huge", metric="m", relative=True, y_title="y", y_scale="log",
               curves=(line("a", 1e308), line("b", 5e-324))),
    ],
    ids=lambda f: f.title,
)  # fmt: skip
def test_a_figure_of_nothing_or_everything(drawn: Figure) -> None:
    """No curve, no point, and the largest and smallest doubles are drawn, in the terminal too."""
    from io import StringIO

    from rich.console import Console

    from numdev.report.renderers import terminal

    assert "<svg" in html.page(sweep(drawn))
    terminal.show(sweep(drawn), Console(file=StringIO()))


def test_an_endless_interval_does_not_flatten_the_lines() -> None:
    """Two seeds can make an interval of twenty decades; the axis stays with the means."""
    from test_html import axis, drawn, figure

    curve = line("a", 1.0)
    wild = tuple(p.model_copy(update={"high": 1e18}) for p in curve.points)
    made = drawn([figure(curve.model_copy(update={"points": wild}))], axis(), "b")[0]
    heights = [dot.y for dot in made.drawn[0].dots]
    assert max(heights) - min(heights) > 100
    assert dataclasses.asdict(made)["height"] >= max(heights)


def test_marks_of_direction_are_spelled_out() -> None:
    """A name cannot turn the text around it: U+202E is shown, not obeyed."""
    page = html.page(audit(name="flash\u202egnp"))
    assert "\u202e" not in page
    assert "\\u202e" in page


def test_samples_are_of_every_kind() -> None:
    """So that the tests above are about all of them."""
    assert {json.loads(p.read_text())["kind"] for p in SAMPLES} == set(reports.KINDS)
    assert isinstance(read(SAMPLES[0]), AuditReport)
