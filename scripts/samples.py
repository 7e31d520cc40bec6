"""Write the terminal samples of README.md and docs/ anew: what this tree prints.

    python scripts/samples.py [PAGE ...]

In a block ```` ```console ```` a line that begins with `$ ` is a command of the shell, in a
folder with examples/ in it and the files that the page asks to save. What follows it
becomes the verdicts that it prints, as in a terminal of 100 columns, and `...` for the rest;
`<!-- paragraphs: 3 -->` before a block takes as many paragraphs in their place. Commands of
numdev and Python are run; `cd` is heeded, and others stay as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?:<!-- paragraphs: (?P<count>\d+) -->\n\n?)?^```console\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SAVED = re.compile(r"[Ss]ave this as `(\S+\.py)`.*?^```python\n(.*?)^```$", re.M | re.S)
WIDTH = 100


def written_anew(page: str, folder: Path) -> str:
    """A page with the output of its commands."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, code in SAVED.findall(page):
        (folder / name).write_text(code, encoding="utf-8")
    return BLOCK.sub(lambda block: block_anew(block, folder), page)


def block_anew(block: re.Match[str], folder: Path) -> str:
    """A block with the output of its commands."""
    lines: list[str] = []
    for line in block["text"].splitlines():
        if not line.startswith("$ "):
            continue
        lines.append(line)
        command, _, argument = line.removeprefix("$ ").partition(" ")
        if command == "cd":
            folder = folder / argument
        elif command in ("numdev", "python"):
            lines += output_of(command, argument, folder, int(block["count"] or 1))
    start = block.start("text") - block.start()
    return "\n".join([block[0][:start].rstrip("\n"), *lines, "```"])


def output_of(command: str, arguments: str, folder: Path, count: int) -> list[str]:
    """What a command prints, up to what was checked or in so many paragraphs, and `...`
    for the rest."""
    print(command, arguments, flush=True)
    module = " -m numdev" if command == "numdev" else ""
    done = subprocess.run(
        f"{sys.executable}{module} {arguments}",
        shell=True,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": str(WIDTH),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    paragraphs = done.stdout.strip().split("\n\n")
    shown = "\n\n".join(paragraphs[:count])
    if count == 1:
        shown = shown.partition("\nChecked: ")[0]
    is_cut = shown != done.stdout.strip()
    # A folder of its own, whose name is another one each time
    shown = re.sub(r"/tmp/numdev-check-\w+/", ".../", shown)
    return [*shown.splitlines(), *(["..."] if is_cut else [])]


def main() -> None:
    """Runs the commands of every page, and writes it."""
    chosen = [Path(name).resolve() for name in sys.argv[1:]]
    for path in chosen or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page = path.read_text(encoding="utf-8")
        if BLOCK.search(page):
            with tempfile.TemporaryDirectory() as name:
                path.write_text(written_anew(page, Path(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
