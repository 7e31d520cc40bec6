"""Floating-point formats, and rounding to them correctly.

torch converts float64 to its 16-bit and 8-bit dtypes by way of float32, so the value is
rounded twice: 1 + 2^-8 + 2^-40 first loses its 2^-40, then looks like a tie, and becomes
1.0 instead of 1.0078125. And there are formats for which torch has no dtype at all.

`round_to` writes |x| = s * 2^(e - p + 1), where p is the precision and 2^e the binade |x|
lies in, but never below the format's smallest one (so much for subnormals), and rounds s
to an integer: the one inexact step, in which the three modes differ. It scales in two
steps, |x| / 2^e and then times 2^(p - 1), since one factor would overflow for the formats
with the widest exponents. Then what exceeds the largest value overflows, and the sign
goes back on. Values are rounded, never encoded.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch

from numdev.errors import UsageError, closest

RoundingMode = Literal["nearest", "toward_zero", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format with subnormals, signed zeros and NaN.

    `precision` counts the significant bits including the implicit one; `emin` and `emax`
    are the exponents of the smallest and the largest normal binade (a normal number is m
    * 2^e with 1 <= m < 2). A format without infinity gives up its topmost value for NaN,
    as OCP E4M3 does. Raises `UsageError` for a format whose values float64 cannot all
    hold: all is computed there."""

    name: str
    precision: int
    emin: int
    emax: int
    has_infinity: bool = True

    def __post_init__(self) -> None:
        if not (2 <= self.precision <= 53 and -1022 <= self.emin <= self.emax <= 1023):
            raise UsageError(
                f"format {self.name!r} does not fit in float64",
                hint="2 to 53 significant bits and exponents from -1022 to 1023 do",
            )

    @property
    def unit_roundoff(self) -> float:
        """Returns u = 2^-precision. The relative error of rounding a value of the normal
        range to nearest is below it."""
        return math.ldexp(1.0, -self.precision)

    @cached_property
    def largest(self) -> float:
        """Returns the largest finite value: all significand bits set, less one step
        without infinity."""
        steps = 1 if self.has_infinity else 2
        return math.ldexp(2.0 - math.ldexp(steps, 1 - self.precision), self.emax)

    @property
    def smallest_normal(self) -> float:
        """Returns 2^emin, the smallest value with full precision."""
        return math.ldexp(1.0, self.emin)

    @cached_property
    def smallest_subnormal(self) -> float:
        """Returns 2^(emin - precision + 1), the smallest value above zero and the spacing
        next to it."""
        return math.ldexp(1.0, self.emin - self.precision + 1)

    def contains(self, other: Format) -> bool:
        """Whether every value of `other`, infinities included, is a value of this format;
        NaN is left out."""
        return (
            self.precision >= other.precision
            and self.largest >= other.largest
            and self.smallest_subnormal <= other.smallest_subnormal
            and self.has_infinity >= other.has_infinity
        )


# float8_e4m3fn: bias 7 as an IEEE format of that shape would have, but the top exponent
# is used for numbers, all but its last code (OCP OFP8, section 5): hence emax 8, no
# infinity, largest 448.
FLOAT8_E4M3FN = Format(
    name="float8_e4m3fn", precision=4, emin=-6, emax=8, has_infinity=False
)
FLOAT8_E5M2 = Format(name="float8_e5m2", precision=3, emin=-14, emax=15)
FLOAT16 = Format(name="float16", precision=11, emin=-14, emax=15)
BFLOAT16 = Format(name="bfloat16", precision=8, emin=-126, emax=127)
TF32 = Format(name="tf32", precision=11, emin=-126, emax=127)
FLOAT32 = Format(name="float32", precision=24, emin=-126, emax=127)
FLOAT64 = Format(name="float64", precision=53, emin=-1022, emax=1023)
# Messages list them in this order
_CATALOGUE = (FLOAT64, FLOAT32, TF32, BFLOAT16, FLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2)
FORMATS: Mapping[str, Format] = {format.name: format for format in _CATALOGUE}

# Bare "fp8", "fp8_e4m3" and "float8_e4m3" are left out on purpose: they mean different
# formats to different people (in ml_dtypes the last one is the IEEE-style format with
# largest value 240).
AMBIGUOUS = re.compile(r"(fp|float|f)_?8")
_WRITTEN = {
    "float64": "fp64 f64 double",
    "float32": "fp32 f32 single float",
    "tf32": "tensorfloat32",
    "bfloat16": "bf16",
    "float16": "fp16 f16 half",
    "float8_e4m3fn": "e4m3fn fp8_e4m3fn",
    "float8_e5m2": "fp8_e5m2",
}
_ALIASES = {
    alias: name for name, written in _WRITTEN.items() for alias in written.split()
}


# tf32 is how a GPU multiplies float32 values, not how it stores them.
_DTYPES: Mapping[str, torch.dtype] = {
    n: getattr(torch, n) for n in FORMATS if n != "tf32"
}
_BY_DTYPE: Mapping[torch.dtype, Format] = {
    dtype: FORMATS[name] for name, dtype in _DTYPES.items()
}


def format_named(name: str) -> Format:
    """Returns the format a person means by `name`, in any case: one of the catalogue, a
    usual alias (`bf16`, `fp32`, `half`, `torch.float16`), or `eXmY`.

    That is X exponent and Y fraction bits in the style of IEEE 754 (section 3.4, bias =
    emax = 2^(X-1) - 1), with infinities and subnormals: `e8m7` has the values of
    bfloat16, but `e4m3` is the format with largest value 240, not OCP's `float8_e4m3fn`.
    Raises `UsageError` for an unknown name, and for an `eXmY` that float64 cannot hold:
    it takes X from 2 to 11, and Y from 1 to 52."""
    key = name.strip().lower().removeprefix("torch.")
    key = _ALIASES.get(key, key)
    if key in FORMATS:
        return FORMATS[key]
    if match := re.fullmatch(r"e(\d{1,4})m(\d{1,4})", key):
        exponent, fraction = int(match[1]), int(match[2])
        if not (2 <= exponent <= 11 and 1 <= fraction <= 52):
            raise UsageError(
                f"format {key!r} does not fit in float64",
                hint=(
                    "eXmY takes X from 2 to 11 exponent bits and Y from 1 to 52 "
                    "fraction bits"
                ),
            )
        bias = 2 ** (exponent - 1) - 1
        name = f"e{exponent}m{fraction}"
        return Format(name=name, precision=fraction + 1, emin=1 - bias, emax=bias)
    hint = f"{closest(key, [*FORMATS, *_ALIASES])}"
    if AMBIGUOUS.fullmatch(key):
        hint = "give float8_e4m3fn or float8_e5m2: the name stands for both"
    elif "did you mean" not in hint:
        hint = f"known: {', '.join(FORMATS)}, and eXmY for others"
    raise UsageError(f"unknown format {name!r}", hint=hint)


def format_of(dtype: torch.dtype) -> Format:
    """Returns the format of a torch dtype's values. Raises UsageError where the catalogue
    has none."""
    if dtype not in _BY_DTYPE:
        raise UsageError(f"{dtype}: expected one of {', '.join(map(str, _BY_DTYPE))}")
    return _BY_DTYPE[dtype]


@functools.cache
def dtype_of(format: Format) -> torch.dtype:
    """Returns the torch dtype that stores exactly the values of `format`, whatever its
    name: `e8m7` gives `torch.bfloat16`. Raises `UsageError` where torch has no dtype of
    these values (tf32)."""
    for name, dtype in _DTYPES.items():
        if FORMATS[name].contains(format) and format.contains(FORMATS[name]):
            return dtype
    raise UsageError(f"torch has no dtype that stores {format.name}")


def round_to(
    x: torch.Tensor,
    format: Format,
    mode: RoundingMode = "nearest",
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Returns the values of `x`, of any shape, correctly rounded to `format`, once, as a
    new tensor on the same device, without gradient; float64 stays float64, all else is
    widened exactly to float32.

    Modes, following IEEE 754, section 4.3:

    - `nearest`: to the nearest value, ties to the one with an even significand.
    - `toward_zero`: to the nearest value no larger in magnitude.
    - `stochastic`: to one of the two neighbours, so that the mean is `x` (to within 2^-53
      of the spacing). `generator` supplies one uniform number per element, whatever the
      dtype.

    A magnitude that rounds beyond the largest value, on the grid continued upwards,
    becomes infinity, or NaN in a format without infinity (OCP's non-saturating mode): in
    `nearest` from largest + half a spacing onwards; in float8_e4m3fn that very tie (464)
    still goes to 448, which is even. `toward_zero` gives the largest value instead.

    Zeros and values that round to zero keep the sign of `x`. NaN stays NaN. Infinity
    stays; in a format without infinity it becomes NaN. Empty gives empty. On a CPU set to
    flush subnormals (`torch.set_flush_denormal`), subnormals of the dtype of `x` are
    zero.

    Raises `UsageError` for a tensor that is not real floating-point, an unknown mode,
    stochastic rounding without a generator on the device of `x`, and a float32 `x` with a
    result that only float64 can hold (3.4e38 to e9m7 is 2^128)."""
    wide = _widened(x)
    modes = get_args(RoundingMode)
    if mode not in modes:
        raise UsageError(
            f"unknown rounding mode {mode!r}", hint=closest(str(mode), modes)
        )
    device = wide.device.type
    if mode == "stochastic" and (generator is None or generator.device.type != device):
        raise UsageError(f"stochastic rounding: expected a generator on {device}")
    storage = format_of(wide.dtype)
    if format.contains(storage):
        return wide.clone()
    uniform = None
    # 53 random bits, whatever the dtype of x, so that it changes none
    if mode == "stochastic":
        shape, on = wide.shape, wide.device
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=on)
    if storage.contains(format) and storage.emin <= format.emin:
        return _rounded(wide, format, mode, uniform)
    # A float32 x and a format with more bits or exponents, on either side, than float32
    # has.
    rounded = _rounded(wide.double(), format, mode, uniform)
    narrow = rounded.to(wide.dtype)
    # It would be rounded twice
    if not bool(((narrow == rounded) | rounded.isnan()).all()):
        what = f"rounded to {format.name}, some values do not fit in {wide.dtype}"
        raise UsageError(what, hint="pass the tensor as float64")
    return narrow


def ulp(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns the spacing of `format` at |x|, as float64 in the shape of `x`.

    That is 2^(e - precision + 1) for 2^e <= |x| < 2^(e+1) (Goldberg's ulp, taken upwards
    at a power of two), whether or not `x` is a value of the format. At zero and among
    subnormals it is the smallest subnormal, above the largest value the spacing at emax;
    NaN and infinity give NaN. Raises `UsageError` for a tensor that is not real
    floating-point."""
    # Always float64: a spacing can be far below the range of the dtype of x.
    magnitude = _widened(x).double().abs()
    spacing = _binade(magnitude, format).mul_(math.ldexp(1.0, 1 - format.precision))
    return spacing.masked_fill_(~(magnitude < math.inf), math.nan)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no element of any tensor is NaN or infinite. True for no tensors and for
    empty ones. `tensors`: real, all on one device."""
    return all(each_finite(tensors))


def each_finite(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Returns for each tensor whether none of its elements is NaN or infinite; True for
    an empty one. `tensors`: real, all on one device, which is waited for once where all
    sums are finite."""
    # PyTorch has no arithmetic in 8 bits
    wide = [x.detach() if x.element_size() > 1 else x.detach().float() for x in tensors]
    if not wide:
        return []
    # A sum is finite only if every element is: one pass and no mask, a fifteenth of the
    # time of `isfinite` on a CPU. A sum of finite elements may overflow; then each is
    # looked at. On a CPU `dtype` would cast all elements first.
    sums = torch.stack(
        [x.sum(dtype=torch.float64) if x.is_cuda else x.sum().double() for x in wide]
    )
    return [
        math.isfinite(total) or bool((x.abs() < math.inf).all())
        for total, x in zip(sums.tolist(), wide, strict=True)
    ]


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Returns x as float64 if it is that, else as float32, exactly and without autograd.
    Raises UsageError for a tensor that is not real floating-point."""
    if not x.is_floating_point():
        raise UsageError(f"only real floating-point tensors have a format, not {x.dtype}")
    return x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _rounded(
    x: torch.Tensor,
    format: Format,
    mode: RoundingMode,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """Returns x rounded, in its dtype, which must have all values of the format: grid,
    then overflow, then sign. `uniform`: for stochastic rounding, one number in [0, 1) per
    element; None for the other modes."""
    magnitude = x.abs()
    # To the format's spacing, as if the top binade went on for ever; exact but for the
    # rounding.
    binade = _binade(magnitude, format)
    unit = math.ldexp(1.0, format.precision - 1)
    significand = magnitude.div(binade).mul_(unit)
    if mode == "nearest":
        on_grid = significand.round_()  # torch rounds halves to even
    else:
        on_grid = significand.floor()
        if uniform is not None:
            # Up with probability `fraction`. Not floor(significand + uniform): that sum
            # is rounded, and would now and then move a value that needs no rounding. 1 -
            # fraction is exact but for bits of the fraction below 2^-53, which is the
            # resolution of `uniform`.
            fraction = significand.sub_(on_grid).double()
            on_grid.add_(uniform >= 1.0 - fraction)
    on_grid.mul_(1.0 / unit).mul_(binade)
    beyond = math.inf if format.has_infinity else math.nan
    overflow = format.largest if mode == "toward_zero" else beyond
    on_grid.masked_fill_(on_grid > format.largest, overflow)
    if overflow != beyond:  # what was infinite before rounding has not overflowed
        on_grid.masked_fill_(magnitude == math.inf, beyond)
    return on_grid.copysign_(x)


def _binade(magnitude: torch.Tensor, format: Format) -> torch.Tensor:
    """Returns 2^e with 2^e <= magnitude < 2^(e+1), clamped to the format's 2^emin and
    2^emax, as a new tensor.

    Reads the exponent field, so it is exact; log2 is not. Zero, and subnormals of the
    dtype, have an empty field, which reads as 0.0 and becomes 2^emin; infinity and NaN
    become 2^emax."""
    if magnitude.dtype == torch.float64:
        field = (magnitude.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    else:
        field = (magnitude.view(torch.int32) & 0x7F80_0000).view(torch.float32)
    return field.clamp_(math.ldexp(1.0, format.emin), math.ldexp(1.0, format.emax))
