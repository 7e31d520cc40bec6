"""Reports as images, to be looked at: light, dark, on a phone (390 px), and in print.

    python scripts/screenshots.py OUT report.html [report.html ...]

Needs Chromium. A phone's width is that of a frame, since a window cannot be so narrow;
how far the page is wider than the frame is printed, and should be 0.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import subprocess
from pathlib import Path

PHONE = 390
SIZES = {"light": (1280, 2600), "dark": (1280, 2600), "phone": (PHONE, 3200)}
WIDER = """<script>addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument.documentElement;
  document.title = "wider by " + (page.scrollWidth - page.clientWidth);
});</script>"""


def shoot(page: Path, out: Path) -> None:
    """Write NAME-light.png, NAME-dark.png, NAME-phone.png and NAME.pdf."""
    name = page.parent.name if page.stem == "report" else page.stem
    framed = out / f"{name}-framed.html"
    framed.write_text(
        f'<body style="margin:0"><iframe width="{PHONE}" height="3200" style="border:0" '
        f'srcdoc="{html.escape(page.read_text(encoding="utf-8"))}"></iframe>{WIDER}',
        encoding="utf-8",
    )
    for theme, (wide, high) in SIZES.items():
        source = framed if theme == "phone" else page
        dark = ("--blink-settings=preferredColorScheme=0",) if theme == "dark" else ()
        picture = out / f"{name}-{theme}.png"
        _chromium(
            source, f"--screenshot={picture}", f"--window-size={wide},{high}", *dark
        )
    _chromium(page, f"--print-to-pdf={out / f'{name}.pdf'}", "--no-pdf-header-footer")
    found = re.search(r"wider by (-?\d+)", _chromium(framed, "--dump-dom"))
    print(f"{name}: {found[0] if found else 'width not measured'} px at {PHONE} px")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder for the images")
    parser.add_argument("reports", type=Path, nargs="+")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for path in given.reports:
        shoot(path, given.out)


if __name__ == "__main__":
    main()
