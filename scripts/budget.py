"""Print the lines of Python by package beside their budget; exit 1 where one grows past its limit.

    python scripts/budget.py

The budget is what a package is to come to. Until it has, its limit is what it came to when the
limit was last lowered, so that nothing grows on the way; then a tenth above the budget. Docstrings
and blank lines count: a reader meets them too."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Budget, and today's limit where that is still above it.
BUDGET: dict[str, tuple[int, int | None]] = {
    "numdev (top)": (1800, None),
    "numdev/cli": (900, None),
    "numdev/sources": (3400, None),
    "numdev/kernels": (5600, 5730),
    "numdev/metrics": (2200, None),
    "numdev/explain": (1100, None),
    "numdev/audit": (3100, None),
    "numdev/gate": (1900, None),
    "numdev/training": (3000, None),
    "numdev/diagnose": (1500, None),
    "numdev/report": (2900, None),
    "numdev": (28000, 29130),
    "tests": (20000, None),
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
    for name, (budget, limit) in BUDGET.items():
        count = lines(name)
        most = limit or int(budget * (1.0 if name in WHOLE else 1.1))
        note = "  over its limit" if count > most else "" if limit is None else "  to shrink"
        print(f"{name:16}{count:8}{budget:8}{most:8}{note}")
        wrong += [name] * (count > most)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
