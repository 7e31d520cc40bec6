"""Formats and rounding: every code of the small formats, exact rational arithmetic for
the rest.

Oracles: gfloat, ml_dtypes, and `exactly`, which rounds in rational numbers, from the
definition."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gformats

from numdev.errors import UsageError
from numdev.formats import (
    FORMATS,
    Format,
    dtype_of,
    format_named,
    format_of,
    round_to,
    ulp,
)

nan, inf = math.nan, math.inf

BF16, FP16, FP32 = FORMATS["bfloat16"], FORMATS["float16"], FORMATS["float32"]
E4M3FN, E5M2, FP64 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"], FORMATS["float64"]
MODES = ("nearest", "toward_zero", "stochastic")

GFLOAT = {
    "float32": gformats.format_info_binary32,
    "bfloat16": gformats.format_info_bfloat16,
    "float16": gformats.format_info_binary16,
    "float8_e4m3fn": gformats.format_info_ocp_e4m3,
    "float8_e5m2": gformats.format_info_ocp_e5m2,
}
ML_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
# Besides the catalogue's small formats: the narrowest, one wider in exponent than float32
# with few bits, one of float64's own range, and IEEE-style formats for which torch has no
# dtype.
ENUMERATED = [*ML_DTYPES, "e2m1", "e3m2", "e4m3", "e8m3", "e9m4", "e11m1", "e11m3"]
OTHERS = ["tf32", "float32", "e11m51", "e8m23", "e10m30", "e4m30", "e2m52", "e11m7"]


# --- helpers, and the proof that they reject ------------------------------------------


def tensor(values, dtype=torch.float64):
    return torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same dtype, shape and values; NaN is NaN, and the two zeros differ."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    a, e = actual.double().numpy(), expected.double().numpy()
    same = np.where(np.isnan(e), np.isnan(a), (a == e) & (np.signbit(a) == np.signbit(e)))
    bad = np.flatnonzero(~same.ravel())
    assert bad.size == 0, (
        f"{bad.size} differ, first {a.flat[bad[0]]!r} != {e.flat[bad[0]]!r}"
    )


def exactly(x: float, format: Format, mode: str = "nearest") -> float:
    """x rounded by definition, in rational numbers; none of round_to's shortcuts."""
    if math.isnan(x) or (math.isinf(x) and not format.has_infinity):
        return nan
    if math.isinf(x) or x == 0.0:
        return x
    magnitude = abs(Fraction(x))
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, format.emin) - format.precision + 1)
    # Python rounds a Fraction to the nearest integer with ties to even.
    steps = round(magnitude / step) if mode == "nearest" else magnitude // step
    if (rounded := steps * step) > Fraction(format.largest):
        beyond = inf if format.has_infinity else nan
        return math.copysign(format.largest if mode == "toward_zero" else beyond, x)
    return math.copysign(float(rounded), x)


def all_values(name: str) -> np.ndarray:
    """Every value of a small format from +0 to the largest, ascending, as float64: code c
    has exponent field c >> Y and fraction field c & (2^Y - 1)."""
    format = format_named(name)
    fraction_bits = format.precision - 1
    values = []
    for code in itertools.count():
        field, fraction = code >> fraction_bits, code & ((1 << fraction_bits) - 1)
        exponent = format.emin + max(field - 1, 0)
        if exponent > format.emax:
            break
        implicit = (1 << fraction_bits) if field else 0
        values.append(math.ldexp(implicit + fraction, exponent - fraction_bits))
    return np.array(values if format.has_infinity else values[:-1])


def random_doubles(n: int) -> torch.Tensor:
    """float64 numbers of random bits: every exponent, subnormals, infinities, NaN."""
    low, high = (torch.randint(0, 2**32, (n,), generator=seeded(k)) for k in (0, 1))
    return ((high << 32) | low).view(torch.float64)


def random_near(format: Format, n: int, seed: int = 0) -> torch.Tensor:
    """Random significands, half of them cut to where ties are, over all exponents of the
    format."""
    lowest = max(format.emin - format.precision - 3, -1074)
    exponents = torch.randint(
        lowest, min(format.emax + 3, 1023), (n,), generator=seeded(seed)
    )
    significand = torch.rand(n, generator=seeded(seed + 1), dtype=torch.float64) + 1.0
    cut = 2.0 ** min(format.precision + 1, 52)
    significand[::2] = (significand[::2] * cut).round() / cut
    sign = 1.0 - 2.0 * torch.randint(0, 2, (n,), generator=seeded(seed + 2))
    half = exponents.double().div(2).floor()
    return sign * significand * torch.exp2(half) * torch.exp2(exponents - half)


def test_assert_identical_rejects() -> None:
    """One bit off, another sign, NaN or infinity; another shape or dtype."""
    right = [1.0, -0.0, nan, 2.0]
    assert_identical(tensor(right), tensor(right))
    others = (
        (3, math.nextafter(2.0, 3.0)),
        (1, 0.0),
        (2, 3.0),
        (0, nan),
        (3, -2.0),
        (3, inf),
    )
    wrong = [tensor([*right[:i], x, *right[i + 1 :]]) for i, x in others]
    for x in (*wrong, tensor(right[:3]), tensor(right, torch.float32)):
        with pytest.raises(AssertionError):
            assert_identical(x, tensor(right))


@pytest.mark.parametrize("name", ML_DTYPES)
def test_all_values_are_the_decoded_codes(name: str) -> None:
    """The enumeration is what gfloat and ml_dtypes decode, code by code."""
    values = all_values(name)
    codes = np.arange(values.size)
    word = np.uint8 if GFLOAT[name].k == 8 else np.uint16
    assert np.array_equal(
        codes.astype(word).view(ML_DTYPES[name]).astype(np.float64), values
    )
    assert np.array_equal(gfloat.decode_ndarray(GFLOAT[name], codes), values)
    assert not np.isfinite(gfloat.decode_float(GFLOAT[name], values.size).fval)


# --- the record and the catalogue -----------------------------------------------------


@pytest.mark.parametrize(("name", "precision", "largest", "normal", "subnormal"), [
    ("float64", 53, 1.7976931348623157e308, 2.0**-1022, 5e-324),
    ("float32", 24, 3.4028234663852886e38, 2.0**-126, 2.0**-149),
    ("tf32", 11, 3.4011621342146535e38, 2.0**-126, 2.0**-136),
    ("bfloat16", 8, 3.3895313892515355e38, 2.0**-126, 2.0**-133),
    ("float16", 11, 65504.0, 2.0**-14, 2.0**-24), ("float8_e4m3fn", 4, 448.0, 2.0**-6, 2.0**-9),
    ("float8_e5m2", 3, 57344.0, 2.0**-14, 2.0**-16), ("e4m3", 4, 240.0, 2.0**-6, 2.0**-9),
    ("e2m1", 2, 3.0, 1.0, 0.5),
])  # fmt: skip
def test_derived_properties(name, precision, largest, normal, subnormal) -> None:
    """Everything derived from the four facts is what the standards' tables say, and
    torch's."""
    format = format_named(name)
    assert (format.precision, format.unit_roundoff) == (precision, 2.0**-precision)
    assert (format.largest, format.smallest_normal) == (largest, normal)
    assert format.smallest_subnormal == subnormal
    if name in FORMATS and name != "tf32":
        says = torch.finfo(dtype_of(format))
        assert (says.max, says.tiny, says.eps) == (largest, normal, 2 * 2.0**-precision)


REFUSED = {
    "bfloat61": "'bfloat16'", "float8_e4m3": "'float8_e4m3fn'", "fp8_e4m3": "'fp8_e4m3fn'",
    "": "float8_e5m2", "e12m7": "2 to 11", "e1m7": "2 to 11", "e8m53": "1 to 52", "e8m0": "1 to 52",
    "e99999m9": "eXmY",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_names_are_refused_with_a_hint(name: str) -> None:
    """A name that means nothing, or a format too wide, gives a usage error that helps."""
    with pytest.raises(UsageError) as raised:
        format_named(name)
    assert REFUSED[name] in str(raised.value.hint)


def test_a_format_beyond_float64_cannot_be_made() -> None:
    """Nobody can hold a Format that float64 cannot compute with."""
    for p, low, high in (
        (54, -14, 15),
        (1, -14, 15),
        (8, -1023, 15),
        (8, -14, 1024),
        (8, 3, 2),
    ):
        with pytest.raises(UsageError, match="does not fit in float64"):
            Format(name="odd", precision=p, emin=low, emax=high)


def test_formats_without_a_dtype_say_so() -> None:
    """What torch does not store, or the catalogue has not, is a usage error that names
    it."""
    for name in ("tf32", "e8m3", "e4m3", "e11m51"):
        with pytest.raises(UsageError, match=name):
            dtype_of(format_named(name))
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fnuz):
        with pytest.raises(UsageError, match=str(dtype)):
            format_of(dtype)


def test_containment_looks_at_the_lower_end() -> None:
    """Bits and range are not enough where exponents stop short below, nor without
    infinity."""
    shallow = Format(name="shallow", precision=11, emin=-10, emax=15)
    assert not shallow.contains(FP16)
    assert FP16.contains(shallow)
    inside = (
        "float32 bfloat16, tf32 float16, float16 float8_e4m3fn, e9m7 bfloat16, e5m9 e4m9"
    )
    bits, reach = (
        "bfloat16 float16, e9m6 bfloat16",
        "float16 bfloat16, e4m3 float8_e4m3fn",
    )
    for pairs, expected in ((inside, True), (bits, False), (reach, False)):
        for pair in pairs.split(", "):
            wide, narrow = map(format_named, pair.split())
            assert wide.contains(narrow) is expected
            assert wide.contains(wide)
    assert not E4M3FN.contains(format_named("e4m3"))  # infinity


# --- rounding -------------------------------------------------------------------------


BY_HAND = {
    # torch's own cast gives 1.0 for the first: it rounds twice. The spacing in [1, 2) is
    # 2^-7; at the largest number and half a spacing the tie is even, and so beyond.
    "bfloat16": [
        (1 + 2**-8 + 2**-40, 1.0078125), (1 + 2**-8, 1.0), (1 + 3 * 2**-8, 1.015625),
        (math.pi, 3.140625), (-4.703990459442139, -4.71875), (-4.703125, -4.6875),
        (-(2.0**-134), -0.0), (1.0000001 * 2.0**-134, 2.0**-133), ((2 - 2**-8) * 2.0**127, inf),
        (math.nextafter((2 - 2**-8) * 2.0**127, 0), 3.3895313892515355e38),
    ],
    # Spacing 32 at the top, 2^-24 at the bottom; the last is a tie with the smallest
    # normal.
    "float16": [
        (65519.99999, 65504.0), (-65520.0, -inf), (2049.0, 2048.0), (2049.0000000001, 2050.0),
        (3 * 2.0**-25, 2.0**-23), (2.0**-14 - 2.0**-25, 2.0**-14),
    ],
    # 448 = 1.75 * 2^8 is even, what would be 480 is NaN.
    "float8_e4m3fn": [
        (464.0, 448.0), (464.0000001, nan), (-500.0, nan), (inf, nan), (3 * 2.0**-10, 2.0**-8),
    ],
    # The IEEE-style format ends at 240, with infinity above.
    "e4m3": [(240.0, 240.0), (247.0, 240.0), (260.0, inf), (448.0, inf)],
    "float8_e5m2": [(61440.0, inf), (61439.0, 57344.0), (-1.1 * 2.0**-17, -(2.0**-16))],
    "float32": [(16777217.0, 16777216.0), (3.4028235677973366e38, inf), (1e-45, 2.0**-149)],
    "tf32": [(1 + 2**-11, 1.0), (1 + 2**-11 + 2**-52, 1 + 2**-10), (70000.0, 70016.0)],
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_nearest_by_hand(name: str) -> None:
    """As one finds them on paper; the rational oracle finds the same."""
    x, expected = zip(*BY_HAND[name], strict=True)
    assert_identical(round_to(tensor(x), format_named(name)), tensor(expected))
    assert_identical(
        tensor([exactly(one, format_named(name)) for one in x]), tensor(expected)
    )


@pytest.mark.parametrize("name", [*FORMATS, "e3m2", "e11m3", "e9m20"])
def test_special_values(name: str) -> None:
    """They survive every mode; only a format without infinity turns it into NaN."""
    format = format_named(name)
    top = inf if format.has_infinity else nan
    for mode, dtype in itertools.product(MODES, (torch.float64, torch.float32)):
        x = tensor([0.0, -0.0, nan, -nan, inf, -inf], dtype)
        rounded = round_to(x, format, mode, generator=seeded())
        assert_identical(rounded, tensor([0.0, -0.0, nan, nan, top, -top], dtype))


@pytest.mark.parametrize("name", ENUMERATED)
def test_every_value_is_left_alone(name: str) -> None:
    """Rounding is the identity on all values of a format, of both signs, in every
    mode."""
    values = all_values(name)
    x = tensor(np.concatenate([values, -values]))
    for mode in MODES:
        assert_identical(round_to(x, format_named(name), mode, generator=seeded()), x)


@pytest.mark.parametrize("name", ENUMERATED)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_midpoint_goes_to_even(name: str, dtype: type) -> None:
    """The least amount to either side decides otherwise, which is where rounding twice
    fails."""
    format = format_named(name)
    if dtype is np.float32 and not FP32.contains(format):
        pytest.skip("beyond float32")
    values = all_values(name).astype(dtype)
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2  # exact: one bit more than the format has
    even = np.where(np.arange(low.size) % 2 == 0, low, high)
    below, above = np.nextafter(middle, dtype(-inf)), np.nextafter(middle, dtype(inf))
    for x, expected in ((middle, even), (below, low), (above, high)):
        for sign in (1, -1):
            passed = torch.from_numpy(sign * x)
            assert_identical(round_to(passed, format), torch.from_numpy(sign * expected))
            lower = torch.from_numpy(sign * low)
            assert_identical(round_to(passed, format, "toward_zero"), lower)


@pytest.mark.parametrize("name", [*ENUMERATED, *OTHERS])
@pytest.mark.parametrize("mode", ["nearest", "toward_zero"])
def test_agrees_with_rational_arithmetic(name: str, mode) -> None:
    """Correctly rounded means: what unbounded arithmetic gives, for any float64."""
    format = format_named(name)
    x = torch.cat([random_doubles(1000), random_near(format, 2000)])
    expected = tensor([exactly(value, format, mode) for value in x.tolist()])
    assert_identical(round_to(x, format, mode), expected)


@pytest.mark.parametrize(
    "name", [*ENUMERATED, "tf32", "float32", "e8m23", "e5m22", "e7m23"]
)
@pytest.mark.parametrize("mode", MODES)
def test_float32_input_rounds_as_float64_input(name: str, mode) -> None:
    """The dtype of x decides only that of the result; what is narrower is widened to
    float32."""
    format = format_named(name)
    x = random_near(format, 20_000).float()
    x[::7] = random_near(FP32, 20_000, seed=5).float()[::7]
    x = x[x.abs() < 2.0**127]  # above, e9m4 and e11m3 round to 2^128, tested on its own
    narrow = round_to(x, format, mode, generator=seeded(3))
    wide = round_to(x.double(), format, mode, generator=seeded(3))
    assert narrow.dtype == torch.float32
    assert_identical(narrow.double(), wide)
    half = x[:500].clamp(-400, 400).bfloat16()
    one, other = (
        round_to(y, format, mode, generator=seeded(3)) for y in (half, half.float())
    )
    assert_identical(one, other)


def test_a_result_float32_cannot_hold_is_refused() -> None:
    """A usage error, not a second rounding; the same input as float64 rounds."""
    near_top = tensor([3.4e38])
    assert_identical(round_to(near_top, format_named("e9m7")), tensor([2.0**128]))
    with pytest.raises(UsageError, match="float32"):
        round_to(near_top.float(), format_named("e9m7"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("format", "low", "step"),  # up to the next binade, among subnormals, up to overflow
    [
        (BF16, -1.9921875, -(2.0**-7)),
        (BF16, 0.0, 2.0**-133),
        (E4M3FN, 416.0, 32.0),
        (E5M2, 0.0, -(2.0**-16)),
        (FP16, 65504.0, 32.0),
    ],
)
@pytest.mark.parametrize("fraction", [2.0**-10, 0.25, 0.7109375])
def test_stochastic_rounding_is_unbiased(format, low, step, fraction, dtype) -> None:
    """The upper neighbour has probability f, the distance covered: n f within 6 standard
    deviations. Rounding to nearest, or a probability off by 8 %, would fail at f =
    1/4."""
    n = 50_000
    x = torch.full((n,), low + fraction * step, dtype=dtype)
    rounded = round_to(x, format, "stochastic", generator=seeded(11)).double()
    steps = ((rounded - low) / step).nan_to_num(posinf=1.0)
    assert set(steps.tolist()) <= {0.0, 1.0}
    bound = 6 * math.sqrt(n * fraction * (1 - fraction))
    assert abs(float(steps.sum()) - n * fraction) <= bound
    assert fraction != 0.25 or 0.08 * fraction * n > bound
    again, other = (
        round_to(x, format, "stochastic", generator=seeded(s)) for s in (11, 12)
    )
    assert torch.equal(rounded, again.double())
    assert not torch.equal(rounded, other.double())


def test_what_cannot_be_rounded_is_refused() -> None:
    """Integers, a misspelt mode though nothing would change, stochastic without a
    generator."""
    for dtype in (torch.int64, torch.bool, torch.complex128):
        for function in (round_to, ulp):
            with pytest.raises(UsageError, match=str(dtype)):
                function(torch.ones(2, dtype=dtype), BF16)
    for format in (BF16, FP64):
        with pytest.raises(UsageError, match="nearst"):
            round_to(torch.ones(1), format, "nearst")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="generator"):
        round_to(torch.ones(1), BF16, "stochastic")


# --- ulp ------------------------------------------------------------------------------


ULPS = {
    "bfloat16": [
        (-1.0, 2.0**-7), (math.nextafter(1.0, 0.0), 2.0**-8), (math.nextafter(2.0, 0.0), 2.0**-7),
        (2.0, 2.0**-6), (-0.0, 2.0**-133), (1e-320, 2.0**-133), (2.0**-125, 2.0**-132),
        (1e300, 2.0**120),  # above the largest: the spacing at emax
    ],
    "float16": [(65504.0, 32.0), (1e-9, 2.0**-24)],
    "float8_e4m3fn": [(1e6, 32.0), (0.001, 2.0**-9), (-inf, nan)],
    "float64": [(0.0, 5e-324), (1e-45, 2.0**-202), (1.7976931348623157e308, 2.0**971), (nan, nan)],
}  # fmt: skip


@pytest.mark.parametrize("name", ULPS)
def test_ulp_by_hand(name: str) -> None:
    """The spacing at a value, from below the smallest subnormal to beyond the largest."""
    x, expected = zip(*ULPS[name], strict=True)
    assert_identical(ulp(tensor(x), FORMATS[name]), tensor(expected))


@pytest.mark.parametrize("name", ENUMERATED)
def test_ulp_is_the_distance_to_the_next_value(name: str) -> None:
    """At every value of a format, of either sign, and just below the next one."""
    values = all_values(name)
    low, high = values[:-1], values[1:]
    for x in (low, -low, np.nextafter(high, 0)):
        assert_identical(ulp(tensor(x), format_named(name)), tensor(high - low))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ENUMERATED, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gpu_rounds_as_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Every bit agrees between the devices, subnormals and specials included."""
    format = format_named(name)
    x = torch.cat(
        [random_doubles(20_000), random_near(format, 20_000), random_near(FP32, 20_000)]
    )
    if dtype == torch.float32:  # what only float64 can hold is refused
        x = x.float()
        x = x[(x.abs() < 2.0**127) & (FP32.contains(format) | (x.double() == x))]
    for mode in ("nearest", "toward_zero"):
        try:
            expected = round_to(x, format, mode)
        except UsageError:
            continue
        assert_identical(round_to(x.cuda(), format, mode).cpu(), expected)
    assert_identical(ulp(x.cuda(), format).cpu(), ulp(x, format))
    generator = torch.Generator("cuda").manual_seed(0)
    finite = x[x.abs() < format.largest / 2]
    error = (
        round_to(finite.cuda(), format, "stochastic", generator=generator).cpu() - finite
    )
    assert bool((error.abs() < ulp(finite, format)).all())
