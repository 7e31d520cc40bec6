"""Print the lines of Python by package beside their budget; exit 1 where one is over its limit.

    python scripts/budget.py

A package, and the tests, may be a tenth over their budget; all of numdev/ may not. Docstrings and
blank lines count: a reader meets them too."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = {
    "numdev (top)": 2250,
    "numdev/cli": 1150,
    "numdev/sources": 3400,
    "numdev/kernels": 5600,
    "numdev/metrics": 2060,
    "numdev/explain": 1180,
    "numdev/audit": 3200,
    "numdev/gate": 2240,
    "numdev/training": 3000,
    "numdev/diagnose": 1500,
    "numdev/effects": 1500,
    "numdev/invariance": 1500,
    "numdev/report": 3450,
    "numdev": 33650,
    "tests": 20000,
}
WHOLE = ("numdev",)  # the total has no tenth to spare


def lines(name: str) -> int:
    """The lines of all Python files in a folder; of the top of numdev/, of its own files."""
    if name.endswith("(top)"):
        files = (ROOT / "numdev").glob("*.py")
    else:
        files = (ROOT / name).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> int:
    folders = {f"numdev/{path.parent.name}" for path in (ROOT / "numdev").glob("*/__init__.py")}
    wrong = sorted(folders - BUDGET.keys())
    for name in wrong:
        print(f"{name}: a package without a budget")
    print(f"{'':16}{'lines':>8}{'budget':>8}{'limit':>8}")
    for name, budget in BUDGET.items():
        count = lines(name)
        most = budget if name in WHOLE else budget * 11 // 10
        print(f"{name:16}{count:8}{budget:8}{most:8}{'  over its limit' * (count > most)}")
        wrong += [name] * (count > most)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
