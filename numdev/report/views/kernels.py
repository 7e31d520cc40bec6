"""The table of `numdev kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numdev.report.document import Cell, Document, words


def table(kernels: Sequence[Mapping[str, Any]], machine: str) -> Document:
    """Every kernel: whether it runs on this machine, and what it is."""
    title = f"Kernels on {machine}"
    rows = []
    for kernel in kernels:
        missing = kernel["missing"]
        here = Cell(f"no: {missing}", style="warn") if missing else Cell("available", style="good")
        options = f" Options: {', '.join(kernel['options'])}." if kernel["options"] else ""
        name = Cell(kernel["name"], style="strong")
        rows.append((name, here, Cell(kernel["summary"] + options)))
    return Document(title, (words(("kernel", "here", "what it is"), rows, title=title),))
