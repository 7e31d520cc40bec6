"""Whose directory it is: results that take no journal, and are written over those of the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numdev import report as reports
from numdev.errors import UsageError


def claim(directory: Path, kind: str, request: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the directory of the results. Raises UsageError where it holds another report: one of
    another command always, of another request unless `overwrite`."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "report.json").exists():
        return
    there = reports.read(directory)
    if there.kind != kind:
        raise UsageError(
            f"{directory}: holds the report of a numdev {there.kind}, which would be lost",
            hint="give another --output",
        )
    if there.request != request and not overwrite:
        raise UsageError(
            f"{directory}: holds the {kind} of something else",
            hint="give another --output, or --overwrite",
        )
