"""How a number is written where there is no more room than a table's cell. None is a dash."""

from __future__ import annotations

NONE = "–"
SHADES = (1.25, 2.0, 4.0, 16.0)
"""From these multiples of the floor on a cell is darker."""


def si(value: float | None) -> str:
    """An error, with two digits."""
    if value is None:
        return NONE
    return f"{value:.2g}" if value == 0 or 0.01 <= abs(value) < 100 else power(f"{value:.1e}")


def power(number: str) -> str:
    """As Python writes it, without zeros in the exponent: 1.2e-3, 1.2e3."""
    return number.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def ratio(value: float | None) -> str:
    """A multiple, with two decimals or three digits."""
    if value is None:
        return NONE
    if value < 100:
        return f"{value:.2f}"
    return f"{float(f'{value:.3g}'):.0f}" if value < 1e5 else power(f"{value:.2e}")


def short(value: float | None) -> str:
    """A multiple in four characters: 1.25, 12.5, 125, 1e4."""
    if value is None:
        return NONE
    for limit, digits in ((9.995, 2), (99.95, 1), (999.5, 0)):
        if value < limit:
            return f"{value:.{digits}f}"
    return power(f"{value:.0e}")


def shade(value: float | None) -> int:
    """How dark a multiple of the floor is shown, 0 to 4."""
    return 0 if value is None else sum(value > limit for limit in SHADES)
