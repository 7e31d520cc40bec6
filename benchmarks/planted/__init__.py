"""The one catalogue of kernels that tests, benchmarks and scripts plant: faulty ones,
and sound ones beside them.

    PYTHONPATH=benchmarks numdev audit demo --kernel planted:row_sum_rounded

A file holds kernels that share code, and says how to add one; `record.py` says what the
catalogue knows of each. `planted.CATALOGUE` has all by name, `planted.of_family` those of
a family, and `planted.NAME` is a kernel's function."""

from __future__ import annotations

from typing import Any

from planted import (  # noqa: F401
    designs,
    flash,
    function,
    hostile,
    invariance,
    leaning,
    narrow,
    processes,
    spellings,
    verdicts,
    wrapped,
)
from planted.record import CATALOGUE, FAMILIES, Planted, of_family

__all__ = ["CATALOGUE", "FAMILIES", "Planted", "of_family"]


def __getattr__(name: str) -> Any:
    entry = CATALOGUE.get(name.replace("_", "-"))
    if entry is None or entry.attribute != name:
        raise AttributeError(name)
    return entry.function
