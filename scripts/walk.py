"""How far a reader walks through the smallest audit: how many functions of numdev it
enters, in how many files, how deep.

    python scripts/walk.py            the three figures, and an error where one is above its limit
    python scripts/walk.py --list     the deepest path, and functions by file

What imports run is not counted, nor are comprehensions."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import numdev

PACKAGE = str(Path(numdev.__file__).parent)
LIMITS = {"functions": 400, "files": 59, "deep": 19}
AIMS = {"functions": 400, "files": 60, "deep": 19}
PASSED_OVER = (
    "<module>",
    "<listcomp>",
    "<genexpr>",
    "<dictcomp>",
    "<setcomp>",
    "<lambda>",
)


class Walk:
    """A profile function: the functions entered, and the deepest path to one of them."""

    def __init__(self) -> None:
        self.entered: set[tuple[str, str]] = set()
        self.deepest: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_counted(frame):
            return
        path = path_to(frame)
        if not path:  # run by an import
            return
        code = frame.f_code
        self.entered.add((code.co_filename, code.co_qualname))
        if len(path) > len(self.deepest):
            self.deepest = path


def is_counted(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename.startswith(PACKAGE) and code.co_name not in PASSED_OVER


def path_to(frame: FrameType | None) -> list[str]:
    """numdev's functions that are running, the outermost first; none while one is
    imported."""
    path: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(PACKAGE):
            return []
        if is_counted(frame):
            path.append(
                f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
            )
        frame = frame.f_back
    return path[::-1]


def walked() -> Walk:
    """The smallest audit: one kernel in one format on one head of one drawn call."""
    for module in pkgutil.walk_packages(numdev.__path__, "numdev."):
        if "triton" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "smallest.yaml")
        config.write_text(
            "cases: [{name: one, heads: 1, seq_len: 8, head_dim: 8}]\n", encoding="utf-8"
        )
        sys.setprofile(walk)
        try:
            numdev.audit(config, kernels=["sdpa-math"], formats=["bfloat16"], repeats=1)
        finally:
            sys.setprofile(None)
    return walk


def main() -> int:
    parser = argparse.ArgumentParser(description="Walk through the smallest audit.")
    parser.add_argument("--list", action="store_true", help="the path and the functions")
    show_all = parser.parse_args().list
    walk = walked()
    figures = {
        "functions": len(walk.entered),
        "files": len({file for file, _ in walk.entered}),
        "deep": len(walk.deepest),
    }
    for name, figure in figures.items():
        print(f"{name:12}{figure:6}  limit {LIMITS[name]}, aim {AIMS[name]}")
    if show_all:
        print(*walk.deepest, "", sep="\n")
        for file, name in sorted(walk.entered):
            print(f"{Path(file).relative_to(PACKAGE)}: {name}")
    return int(any(figure > LIMITS[name] for name, figure in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
