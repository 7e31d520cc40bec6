"""Print the lines of Python by package. Lines are reported, not limited: growth must be
worth reading.

    python scripts/budget.py"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lines(files: list[Path]) -> int:
    """Docstrings and blank lines count: a reader meets them too."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main() -> int:
    package = ROOT / "numdev"
    print(f"{'numdev (top)':20}{lines([*package.glob('*.py')]):8}")
    for folder in sorted(path.parent for path in package.glob("*/__init__.py")):
        print(f"{f'numdev/{folder.name}':20}{lines([*folder.rglob('*.py')]):8}")
    print(f"{'numdev':20}{lines([*package.rglob('*.py')]):8}")
    print(f"{'tests':20}{lines([*(ROOT / 'tests').rglob('*.py')]):8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
