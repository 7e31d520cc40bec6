"""Reports as images, to be looked at, and what a browser measures of them: 1280 px and a
phone's 390 px, in light and in dark, and in print.

    python scripts/screenshots.py OUT report.json [report.html ...]

A report.json is rendered anew; without a report, the samples of tests/data/reports are.
Printed for each page, width and theme: by how many px the page is wider than its window,
what sticks out of it, text of a contrast below 4.5 (WCAG 2.2, 1.4.3), numbers and dates
that are broken over lines, tables that scroll in their box, and what is cut: such a table
without a hint, or a cell whose text is wider. The exit code is 1 where a page is wider,
text sticks out, has no contrast or is cut, or a number is broken.
Needs Chromium; a page stands in a frame, since a window cannot be as narrow as a phone.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

WRONG = ("wider", "sticks_out", "faint", "broken", "cut")  # what a page must not have
WIDTHS = (1280, 390)
THEMES = {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}
HEIGHT = 1000
LONGEST = 6000  # px of a page that an image shows
SAMPLES = Path(__file__).parent.parent / "tests" / "data" / "reports"
# Runs beside the framed page, whose own policy lets no other script run.
MEASURE = """<script>addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, style = (e) => frame.contentWindow.getComputedStyle(e);
  const root = page.documentElement, seen = (e) => e.getClientRects().length && style(e).visibility !== "hidden";
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => { pixel.clearRect(0, 0, 1, 1); pixel.fillStyle = "#000"; pixel.fillStyle = colour; pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { const layers = [];
    for (; e; e = e.parentElement) { const c = rgba(style(e).backgroundColor); if (c[3]) layers.push(c); if (c[3] === 1) break; }
    return layers.reverse().reduce((below, c) => below.map((v, i) => c[i] * c[3] + v * (1 - c[3])), [255, 255, 255]); };
  const found = { wider: root.scrollWidth - root.clientWidth, height: root.scrollHeight, sticks_out: [], faint: [], scrolls: [], broken: [], cut: [] };
  const NUMBER = /(?<![\\w.-])(?:\\d{4}-\\d\\d-\\d\\d|[-+±]?\\d[\\d.,]*(?:e-?\\d+)?(?: ?[%×°])?(?: ± [\\d.e-]+)?(?: (?:nats|ulps?|ms|s|min|GB|MB)\\b)?)(?!\\w)/g;
  const WORD = new RegExp(NUMBER.source + /|(?<!\\S)[^\\s-]{2,14}(?!\\S)/.source, "g"); // and a short word, of a cell
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement, words = texts.currentNode.textContent.trim();
    if (!words || e.closest("script, style, option, svg title") || !seen(e)) continue;
    const pair = [light(rgba(e.closest("svg") ? style(e).fill : style(e).color)), light(ground(e))].sort((a, b) => b - a);
    for (const number of texts.currentNode.textContent.matchAll(e.closest("td, th") ? WORD : NUMBER)) {
      const range = page.createRange();
      range.setStart(texts.currentNode, number.index); range.setEnd(texts.currentNode, number.index + number[0].length);
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top / 6)));
      if (lines.size > 1) found.broken.push(number[0]);
    }
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < 4.5) found.faint.push(`${contrast.toFixed(2)} ${e.tagName.toLowerCase()} ${words.slice(0, 30)}`);
  }
  for (const e of page.body.querySelectorAll("*")) {
    if (!seen(e) || e.closest("svg *")) continue;
    const more = e.scrollWidth - e.clientWidth;
    if (e.matches(".scroll") && more > 1) {
      found.scrolls.push(`${e.getAttribute("aria-label")} +${more}`);
      if (frame.contentWindow.getComputedStyle(e, "::before").content === "none") found.cut.push(e.getAttribute("aria-label"));
    }
    if (e.matches("td, th") && e.clientWidth && more > 1) found.cut.push(e.textContent.slice(0, 40));
    if (!e.closest(".scroll, pre") && e.getBoundingClientRect().right > root.clientWidth + 1) found.sticks_out.push(e.outerHTML.slice(0, 60));
  }
  document.body.append(Object.assign(document.createElement("pre"), { id: "measured", textContent: JSON.stringify(found) }));
});</script>"""


def shoot(page: Path, out: Path) -> bool:
    """Write NAME-WIDTH-THEME.png and NAME.pdf, print what was measured; whether the page
    is as wide as its window and all its text has contrast."""
    name = page.parent.name if page.stem == "report" else page.stem
    sound = True
    for width in WIDTHS:
        for theme, how in THEMES.items():
            framed = _framed(page, out, name, width, HEIGHT)
            dom = _chromium(framed, "--dump-dom", "--window-size=1400,1000", *how)
            [text] = re.findall('<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
            measured = json.loads(html.unescape(text))
            high = min(measured.pop("height"), LONGEST)
            framed = _framed(page, out, name, width, high)
            picture = out / f"{name}-{width}-{theme}.png"
            _chromium(
                framed, f"--screenshot={picture}", f"--window-size={width},{high}", *how
            )
            print(f"{name} {width} px {theme}: {measured}", flush=True)
            sound &= not any(measured[name] for name in WRONG)
    framed.unlink()
    _chromium(page, f"--print-to-pdf={out / f'{name}.pdf'}", "--no-pdf-header-footer")
    return sound


def _framed(page: Path, out: Path, name: str, width: int, height: int) -> Path:
    """Write a page in a frame of this size, with the script that measures it."""
    framed = out / f"{name}-framed.html"
    framed.write_text(
        '<meta name="color-scheme" content="light dark"><body style="margin:0">'
        f'<iframe width="{width}" height="{height}" style="border:0" '
        f'srcdoc="{html.escape(page.read_text(encoding="utf-8"))}"></iframe>{MEASURE}',
        encoding="utf-8",
    )
    return framed


def _chromium(page: Path, *options: str) -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit(
            "screenshots.py: expected chromium or google-chrome, got neither"
        )
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    command = [browser, *flags, *options, page.resolve().as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def _rendered(report: Path, out: Path) -> Path:
    """Write a report's page of today; a page stays as it is."""
    if report.suffix != ".json":
        return report
    from numdev.report import read
    from numdev.report.renderers.html import page

    name = report.parent.name if report.stem == "report" else report.stem
    path = out / f"{name}.html"
    path.write_text(page(read(report), report.parent), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder for the images")
    parser.add_argument("reports", type=Path, nargs="*")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reports = options.reports or sorted(SAMPLES.glob("*.json"))
    pages = [_rendered(report, options.out) for report in reports]
    raise SystemExit(not all([shoot(page, options.out) for page in pages]))


if __name__ == "__main__":
    main()
