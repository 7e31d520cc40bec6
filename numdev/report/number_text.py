"""The one way in which a report writes numbers. None is a dash."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

NONE = "–"
MOST = 1e9  # a larger multiple is of a rounding error of the fp64 reference, and not said
# Multiples of the floor above which a cell is one step darker
SHADES = (1.25, 2.0, 4.0, 16.0)


def si(value: float | None) -> str:
    """Returns an error in two digits at most: 0.012, 3.4, 3 for 3.0; in size from 99.5 on
    and below 0.01 as a power of two digits (1.2e-5, 1.0e2). 0 for 0, a dash for None,
    `nan` for NaN, `inf` for infinity."""
    if value is None:
        return NONE
    return (
        f"{value:.2g}"
        if value == 0 or 0.01 <= abs(value) < 99.5
        else power(f"{value:.1e}")
    )


def percent(share: float | None, *, sign: bool = False) -> str:
    """Returns a share as a percentage of two digits at most, `3.1 %`, `-42 %`, `2.0e-3
    %`; in size from 99.5 % to 1000 % a whole one, beyond that a power (`1.0e3 %`). With
    `sign` also `+3.1 %`. A dash for None."""
    if share is None:
        return NONE
    number = f"{100 * share:.0f}" if 0.995 <= abs(share) < 10 else si(100 * share)
    return f"{'+' if sign and share > 0 else ''}{number} %"


def power(number: str) -> str:
    """Returns a number's text, as Python writes it, without zeros or a plus in the
    exponent: `1.2e-3` for `1.2e-03`, `1.2e3` for `1.2e+03`. Text without an exponent
    stays."""
    return re.sub(r"(?<=\d)e(?:\+|(-))0*(?=\d)", r"e\1", number)


def three(value: float | None, beside: float | None = None) -> str:
    """Returns a number in three digits, or in more where it would read as the limit
    `beside` that it is not equal to; 9570 and not 9.57e3, but a power from 1e6 on and
    below 1e-4. What was rounded shows its zeros: 1.00, where 1 is exactly 1. A dash for
    None."""
    if value is None:
        return NONE
    digits = 3
    while float(f"{value:.{digits}g}") == beside != value:
        digits += 1
    text = f"{value:.{digits}g}"
    if float(text) != value:
        text = f"{value:#.{digits}g}".rstrip(".")
    return f"{float(text):.0f}" if 1e3 <= abs(float(text)) < 1e6 else power(text)


def multiple(value: float | None, beside: float | None = None) -> str:
    """Returns a ratio as `three` writes it, but that a whole number below 100 has its
    zeros: 1.00, since a ratio is measured and never exactly 1 by definition. `beside`: as
    of `three`. A dash for None."""
    if value is not None and float(value).is_integer() and abs(value) < 100:
        return f"{value:.2f}"
    return three(value, beside)


class Labelled(Protocol):
    """A record of a kernel with its options."""

    @property
    def kernel(self) -> str | None: ...
    @property
    def options(self) -> Mapping[str, object]: ...


def label(of: Labelled) -> str:
    """Returns a record's kernel with the options that are not None:
    `emulated[preset=fa2,block_kv=64]`; the name alone without any, and empty where there
    is neither."""
    options = of.options.items()
    chosen = ((n, f"{x:g}" if isinstance(x, float) else x) for n, x in options)
    text = ",".join(f"{name}={value}" for name, value in chosen if value is not None)
    return (of.kernel or "") + (f"[{text}]" if text else "")


def ratio(value: float | None) -> str:
    """Returns a multiple, without ×: below 0.1 in two significant digits (0.031, 4.0e-3),
    up to 100 with two decimals, then in three digits, without a point (1230), from 1e5 on
    as a power; 0.00 for 0, a dash for None. A negative one has two decimals from -0.1
    downwards."""
    if value is None:
        return NONE
    if 0 < abs(value) < 0.1:
        return power(f"{value:#.2g}" if abs(value) >= 0.01 else f"{value:.1e}")
    if value < 100:
        return f"{value:.2f}"
    return f"{float(f'{value:.3g}'):.0f}" if value < 1e5 else power(f"{value:.2e}")


def short(value: float | None) -> str:
    """Returns a positive multiple in a few characters: 1.25, 12.5, 125, from 999.5 on a
    power (1e3); a dash for None."""
    if value is None:
        return NONE
    digits = 2 - (value >= 9.995) - (value >= 99.95)
    return f"{value:.{digits}f}" if value < 999.5 else power(f"{value:.0e}")


def shade(value: float | None, limits: Sequence[float] = SHADES) -> int | None:
    """Returns how dark a number is shown: how many of the ascending `limits` it reaches,
    0 to 4 with SHADES, which are for a multiple of the floor. None for None."""
    return None if value is None else sum(value >= limit for limit in limits)
