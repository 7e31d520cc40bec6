"""Formats and rounding: every code of the small formats, exact rational arithmetic for the rest.

Oracles: gfloat and ml_dtypes (independent implementations), and `exactly`, which rounds in
Python's unbounded rational numbers straight from the definition.
"""

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
from numdev.formats import FORMATS, Format, dtype_of, format_named, format_of, round_to, ulp

nan, inf = math.nan, math.inf

BF16, FP16, FP32 = FORMATS["bfloat16"], FORMATS["float16"], FORMATS["float32"]
E4M3FN, E5M2, FP64 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"], FORMATS["float64"]

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
# Besides the catalogue's small formats: the narrowest, one wider in exponent than float32 with
# few bits, one of float64's own range, and IEEE-style formats for which torch has no dtype.
ENUMERATED = [*ML_DTYPES, "e2m1", "e3m2", "e4m3", "e8m3", "e9m4", "e11m1", "e11m3"]
OTHERS = ["tf32", "float32", "e11m51", "e8m23", "e10m30", "e4m30", "e2m52", "e11m7"]


# --- helpers, and the proof that they reject -------------------------------------------------


def tensor(values, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64)).to(dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_identical(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same dtype, shape and values; NaN is NaN, and the two zeros differ."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    a, e = actual.double().numpy(), expected.double().numpy()
    same = np.where(np.isnan(e), np.isnan(a), (a == e) & (np.signbit(a) == np.signbit(e)))
    bad = np.flatnonzero(~same.ravel())
    assert bad.size == 0, f"{bad.size} differ, first {a.flat[bad[0]]!r} != {e.flat[bad[0]]!r}"


def exactly(x: float, format: Format, mode: str = "nearest") -> float:
    """x rounded by definition, in rational numbers; None of round_to's shortcuts."""
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
    rounded = steps * step
    if rounded > Fraction(format.largest):
        beyond = inf if format.has_infinity else nan
        return math.copysign(format.largest if mode == "toward_zero" else beyond, x)
    return math.copysign(float(rounded), x)


def all_values(name: str) -> np.ndarray:
    """Every value of a small format from +0 to the largest, ascending, as float64.

    Written out from the definition of the encoding: code c has exponent field c >> Y and fraction
    field c & (2^Y - 1). Checked against gfloat and ml_dtypes below.
    """
    format = format_named(name)
    fraction_bits = format.precision - 1
    values = []
    for code in itertools.count():
        field, fraction = code >> fraction_bits, code & ((1 << fraction_bits) - 1)
        implicit = (1 << fraction_bits) if field else 0
        exponent = format.emin + max(field - 1, 0) - fraction_bits
        if format.emin + max(field - 1, 0) > format.emax:
            break
        values.append(math.ldexp(implicit + fraction, exponent))
    return np.array(values if format.has_infinity else values[:-1])


@pytest.mark.parametrize(
    "wrong",
    [
        tensor([1.0, -0.0, nan, math.nextafter(2.0, 3.0)]),  # one bit off
        tensor([1.0, 0.0, nan, 2.0]),  # sign of zero
        tensor([1.0, -0.0, 3.0, 2.0]),  # a number for NaN
        tensor([nan, -0.0, nan, 2.0]),  # NaN for a number
        tensor([1.0, -0.0, nan, -2.0]),
        tensor([1.0, -0.0, nan, inf]),
        tensor([1.0, -0.0, nan]),
        tensor([1.0, -0.0, nan, 2.0], torch.float32),
    ],
)
def test_assert_identical_rejects(wrong: torch.Tensor) -> None:
    """The comparison used throughout notices each of these."""
    right = tensor([1.0, -0.0, nan, 2.0])
    assert_identical(right, right.clone())
    with pytest.raises(AssertionError):
        assert_identical(wrong, right)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_all_values_are_the_decoded_codes(name: str) -> None:
    """The enumeration is what gfloat and ml_dtypes decode, code by code."""
    values = all_values(name)
    codes = np.arange(values.size)
    word = np.uint8 if GFLOAT[name].k == 8 else np.uint16
    assert np.array_equal(codes.astype(word).view(ML_DTYPES[name]).astype(np.float64), values)
    assert np.array_equal(gfloat.decode_ndarray(GFLOAT[name], codes), values)
    assert not np.isfinite(gfloat.decode_float(GFLOAT[name], values.size).fval)


@pytest.mark.parametrize(
    ("x", "mode", "expected"),
    [
        (1 + 2**-9, "nearest", 1.0),
        (1 + 2**-8, "nearest", 1.0),  # tie
        (1 + 3 * 2**-8, "nearest", 1 + 2**-6),  # tie
        (1 + 2**-8 + 2**-40, "nearest", 1 + 2**-7),
        (-1.999999, "toward_zero", -(2 - 2**-7)),
        (2.0**128, "nearest", inf),
        (2.0**128, "toward_zero", BF16.largest),
        (2.0**-134, "nearest", 0.0),
        (3 * 2.0**-134, "nearest", 2.0**-132),
    ],
)
def test_the_rational_oracle_itself(x: float, mode: str, expected: float) -> None:
    """The definition in rational numbers gives what one finds by hand, in bfloat16."""
    assert exactly(x, BF16, mode) == expected


# --- the record and the catalogue --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "unit_roundoff", "largest", "smallest_normal", "smallest_subnormal"),
    [
        ("float64", 53, 2.0**-53, 1.7976931348623157e308, 2.0**-1022, 5e-324),
        ("float32", 24, 2.0**-24, 3.4028234663852886e38, 2.0**-126, 2.0**-149),
        ("tf32", 11, 2.0**-11, 3.4011621342146535e38, 2.0**-126, 2.0**-136),
        ("bfloat16", 8, 2.0**-8, 3.3895313892515355e38, 2.0**-126, 2.0**-133),
        ("float16", 11, 2.0**-11, 65504.0, 2.0**-14, 2.0**-24),
        ("float8_e4m3fn", 4, 2.0**-4, 448.0, 2.0**-6, 2.0**-9),
        ("float8_e5m2", 3, 2.0**-3, 57344.0, 2.0**-14, 2.0**-16),
        ("e4m3", 4, 2.0**-4, 240.0, 2.0**-6, 2.0**-9),
        ("e2m1", 2, 2.0**-2, 3.0, 1.0, 0.5),
    ],
)
def test_derived_properties(
    name: str,
    precision: int,
    unit_roundoff: float,
    largest: float,
    smallest_normal: float,
    smallest_subnormal: float,
) -> None:
    """Everything derived from the four facts is what the standards' tables say."""
    format = format_named(name)
    assert format.precision == precision
    assert format.unit_roundoff == unit_roundoff
    assert format.largest == largest
    assert format.smallest_normal == smallest_normal
    assert format.smallest_subnormal == smallest_subnormal


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tf32"])
def test_properties_agree_with_finfo(name: str) -> None:
    """torch and ml_dtypes (numpy) state the same properties for the same format."""
    format = FORMATS[name]
    torch_says = torch.finfo(dtype_of(format))
    assert format.largest == torch_says.max
    assert format.smallest_normal == torch_says.tiny
    assert 2 * format.unit_roundoff == torch_says.eps
    others = ml_dtypes.finfo(ML_DTYPES.get(name, np.dtype(name) if "8" not in name else None))
    assert format.largest == float(others.max)
    assert format.smallest_subnormal == float(others.smallest_subnormal)
    assert format.precision == others.nmant + 1
    assert format.emin == others.minexp


def test_a_format_is_a_value() -> None:
    """Formats are equal by their fields, hashable, and cannot be changed."""
    again = Format(name="bfloat16", precision=8, emin=-126, emax=127)
    assert again == BF16
    assert hash(again) == hash(BF16)
    with pytest.raises(AttributeError):
        again.precision = 9  # type: ignore[misc]


@pytest.mark.parametrize("name", FORMATS)
def test_catalogue_names_are_found(name: str) -> None:
    """Each entry is filed under its own name, and found by it in any case, torch. or not."""
    assert FORMATS[name].name == name
    assert format_named(name) is FORMATS[name]
    assert format_named(f" torch.{name.upper()} ") is FORMATS[name]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("fp64", "float64"),
        ("double", "float64"),
        ("fp32", "float32"),
        ("single", "float32"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("e4m3fn", "float8_e4m3fn"),
        ("fp8_e4m3fn", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
    ],
)
def test_usual_aliases_are_found(alias: str, name: str) -> None:
    """What people write for a format finds it."""
    assert format_named(alias) is FORMATS[name]


@pytest.mark.parametrize(
    ("generic", "name"),
    [
        ("e8m7", "bfloat16"),
        ("e5m10", "float16"),
        ("e8m10", "tf32"),
        ("e8m23", "float32"),
        ("e11m52", "float64"),
        ("e5m2", "float8_e5m2"),
    ],
)
def test_generic_names_have_the_named_formats_values(generic: str, name: str) -> None:
    """eXmY has the same numbers as the format people call by a name, and rounds alike."""
    format = format_named(generic)
    assert (format.name, format.precision) == (generic, FORMATS[name].precision)
    assert (format.emin, format.emax, format.has_infinity) == (
        FORMATS[name].emin,
        FORMATS[name].emax,
        True,
    )
    x = random_doubles(2000)
    assert_identical(round_to(x, format), round_to(x, FORMATS[name]))


def test_e4m3_is_not_e4m3fn() -> None:
    """The IEEE-style e4m3 ends at 240 with infinity above, OCP's at 448 with NaN above."""
    x = tensor([240.0, 260.0, 448.0, 500.0])
    assert_identical(round_to(x, format_named("e4m3")), tensor([240.0, inf, inf, inf]))
    assert_identical(round_to(x, E4M3FN), tensor([240.0, 256.0, 448.0, nan]))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bfloat61", "'bfloat16'"),
        ("float8_e4m3", "'float8_e4m3fn'"),
        ("fp8_e4m3", "'fp8_e4m3fn'"),
        ("tf23", "'tf32'"),
        ("", "float8_e5m2"),
        ("e8m", "eXmY"),
        ("e12m7", "2 to 11"),
        ("e1m7", "2 to 11"),
        ("e8m53", "1 to 52"),
        ("e8m0", "1 to 52"),
        ("e99999m9", "eXmY"),
    ],
)
def test_unknown_names_are_refused_with_a_hint(name: str, hint: str) -> None:
    """A name that means nothing, or a format too wide, gives a usage error that helps."""
    with pytest.raises(UsageError) as raised:
        format_named(name)
    assert hint in str(raised.value.hint)


@pytest.mark.parametrize(
    "facts",
    [
        {"precision": 54, "emin": -14, "emax": 15},
        {"precision": 1, "emin": -14, "emax": 15},
        {"precision": 8, "emin": -1023, "emax": 15},
        {"precision": 8, "emin": -14, "emax": 1024},
        {"precision": 8, "emin": 3, "emax": 2},
    ],
)
def test_a_format_beyond_float64_cannot_be_made(facts: dict[str, int]) -> None:
    """Nobody can hold a Format that float64 cannot compute with."""
    with pytest.raises(UsageError, match="does not fit in float64"):
        Format(name="odd", **facts)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tf32"])
def test_dtype_and_format_are_inverse(name: str) -> None:
    """Every catalogue format but tf32 has a dtype, and that dtype has this format."""
    assert format_of(dtype_of(FORMATS[name])) is FORMATS[name]


def test_dtype_goes_by_values_not_names() -> None:
    """A generic name for a stored format finds the dtype; IEEE-style e4m3 is not E4M3FN."""
    assert dtype_of(format_named("e8m7")) == torch.bfloat16
    assert dtype_of(format_named("e5m2")) == torch.float8_e5m2


@pytest.mark.parametrize("name", ["tf32", "e8m3", "e4m3", "e11m51"])
def test_formats_without_a_dtype_say_so(name: str) -> None:
    """What torch does not store is a usage error naming the format."""
    with pytest.raises(UsageError, match=name):
        dtype_of(format_named(name))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fnuz])
def test_dtypes_without_a_format_say_so(dtype: torch.dtype) -> None:
    """A dtype outside the catalogue is a usage error naming it."""
    with pytest.raises(UsageError, match=str(dtype)):
        format_of(dtype)


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("float32", "bfloat16", True),
        ("float32", "tf32", True),
        ("tf32", "float16", True),
        ("bfloat16", "float16", False),  # bits
        ("float16", "bfloat16", False),  # range
        ("float16", "float8_e5m2", True),
        ("float16", "float8_e4m3fn", True),
        ("float8_e4m3fn", "e4m3", False),  # infinity
        ("e4m3", "float8_e4m3fn", False),  # range
        ("float64", "e11m52", True),
        ("e9m7", "bfloat16", True),
        ("e9m6", "bfloat16", False),
        ("e6m23", "float16", True),
        ("e5m9", "e4m9", True),
    ],
)
def test_containment(wide: str, narrow: str, expected: bool) -> None:
    """One format contains another when it has its bits, range, subnormals and infinities."""
    assert format_named(wide).contains(format_named(narrow)) is expected
    assert format_named(wide).contains(format_named(wide))


def test_containment_looks_at_the_lower_end() -> None:
    """Bits and range are not enough where the exponents stop short below."""
    shallow = Format(name="shallow", precision=11, emin=-10, emax=15)
    assert not shallow.contains(FP16)
    assert FP16.contains(shallow)


# --- rounding to nearest -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "x", "expected"),
    [
        # bfloat16: spacing 2^-7 in [1, 2)
        (BF16, 1 + 2**-8 + 2**-40, 1.0078125),  # torch's own cast gives 1.0: it rounds twice
        (BF16, 1 + 2**-8, 1.0),
        (BF16, 1 + 3 * 2**-8, 1.015625),
        (BF16, 0.1, 0.10009765625),
        (BF16, math.pi, 3.140625),
        (BF16, -4.703990459442139, -4.71875),  # SCIENCE.md section 2
        (BF16, -4.703125, -4.6875),  # the tie without its residual
        (BF16, 255.5, 256.0),
        (BF16, 2.0**-133, 2.0**-133),
        (BF16, 2.0**-134, 0.0),
        (BF16, -(2.0**-134), -0.0),
        (BF16, 1.0000001 * 2.0**-134, 2.0**-133),
        (BF16, 3.3895313892515355e38, 3.3895313892515355e38),
        (BF16, (2 - 2**-8) * 2.0**127, inf),  # largest + half a spacing: the tie is even
        (BF16, math.nextafter((2 - 2**-8) * 2.0**127, 0), 3.3895313892515355e38),
        (BF16, -1e300, -inf),
        (BF16, 5e-324, 0.0),
        # float16: spacing 32 at the top, 2^-24 at the bottom
        (FP16, 65519.99999, 65504.0),
        (FP16, 65520.0, inf),
        (FP16, -65520.0, -inf),
        (FP16, 2049.0, 2048.0),
        (FP16, 2051.0, 2052.0),
        (FP16, 2049.0000000001, 2050.0),
        (FP16, 2.0**-25, 0.0),
        (FP16, 3 * 2.0**-25, 2.0**-23),
        (FP16, 6.103515625e-05 - 2.0**-25, 6.103515625e-05),  # tie with the smallest normal
        (FP16, 1 / 3, 0.333251953125),
        # float8_e4m3fn: 448 = 1.75 * 2^8 is even, what would be 480 is NaN
        (E4M3FN, 464.0, 448.0),
        (E4M3FN, 464.0000001, nan),
        (E4M3FN, -500.0, nan),
        (E4M3FN, inf, nan),
        (E4M3FN, 17.0, 16.0),
        (E4M3FN, 19.0, 20.0),
        (E4M3FN, 2.0**-10, 0.0),
        (E4M3FN, 3 * 2.0**-10, 2.0**-8),
        # float8_e5m2
        (E5M2, 61440.0, inf),
        (E5M2, 61439.0, 57344.0),
        (E5M2, 9.0, 8.0),
        (E5M2, 11.0, 12.0),
        (E5M2, 2.0**-17, 0.0),
        (E5M2, -1.1 * 2.0**-17, -(2.0**-16)),
        # float32 from float64
        (FP32, 0.1, 0.10000000149011612),
        (FP32, 16777217.0, 16777216.0),
        (FP32, 3.4028235677973366e38, inf),
        (FP32, 3.4028235677973362e38, 3.4028234663852886e38),
        (FP32, 1e-45, 1.401298464324817e-45),
        (FP32, 2.0**-150, 0.0),
        # tf32 keeps float32's range with float16's bits
        (FORMATS["tf32"], 1 + 2**-11, 1.0),
        (FORMATS["tf32"], 1 + 2**-11 + 2**-52, 1 + 2**-10),
        (FORMATS["tf32"], 70000.0, 70016.0),
    ],
)
def test_nearest_by_hand(format: Format, x: float, expected: float) -> None:
    """Ties, double-rounding traps, subnormals and overflow, as one finds them on paper."""
    assert_identical(round_to(tensor([x]), format), tensor([expected]))


@pytest.mark.parametrize("name", [*FORMATS, "e3m2", "e11m3", "e9m20"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "toward_zero", "stochastic"])
def test_special_values(name: str, dtype: torch.dtype, saturate: bool, mode) -> None:
    """Signed zeros, NaN and infinities survive every mode; only a format without infinity turns
    them into NaN, and saturation is for finite values."""
    format = format_named(name)
    top = inf if format.has_infinity else nan
    x = tensor([0.0, -0.0, nan, -nan, inf, -inf], dtype)
    rounded = round_to(x, format, mode, saturate=saturate, generator=seeded())
    assert_identical(rounded, tensor([0.0, -0.0, nan, nan, top, -top], dtype))


@pytest.mark.parametrize("name", ENUMERATED)
def test_every_value_is_left_alone(name: str) -> None:
    """Rounding is the identity on all values of a format, of both signs, in every mode."""
    values = all_values(name)
    x = tensor(np.concatenate([values, -values]))
    for mode in ("nearest", "toward_zero", "stochastic"):
        assert_identical(round_to(x, format_named(name), mode, generator=seeded()), x)


@pytest.mark.parametrize("name", ENUMERATED)
def test_every_midpoint_goes_to_even(name: str) -> None:
    """Halfway between any two neighbours the one with the even code wins; the least amount of
    float64 to either side decides otherwise, which is where rounding twice fails."""
    format = format_named(name)
    values = all_values(name)
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2  # exact: one bit more than the format has
    even = np.where(np.arange(low.size) % 2 == 0, low, high)
    below, above = np.nextafter(middle, -inf), np.nextafter(middle, inf)
    for x, expected in ((middle, even), (below, low), (above, high)):
        assert_identical(round_to(tensor(x), format), tensor(expected))
        assert_identical(round_to(tensor(-x), format), tensor(-expected))


@pytest.mark.parametrize("name", ENUMERATED)
def test_between_neighbours_toward_zero_takes_the_lower(name: str) -> None:
    """Anything strictly between two neighbours goes to the one nearer zero."""
    format = format_named(name)
    values = all_values(name)
    low, high = values[:-1], values[1:]
    for x in (np.nextafter(low, inf), low + (high - low) / 2, np.nextafter(high, 0)):
        assert_identical(round_to(tensor(x), format, "toward_zero"), tensor(low))
        assert_identical(round_to(tensor(-x), format, "toward_zero"), tensor(-low))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "e8m3"])
def test_every_midpoint_in_float32(name: str) -> None:
    """The same midpoints and their float32 neighbours, given as float32, stay float32."""
    format = format_named(name)
    values = all_values(name).astype(np.float32)
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2
    even = np.where(np.arange(low.size) % 2 == 0, low, high)
    below, above = np.nextafter(middle, np.float32(-inf)), np.nextafter(middle, np.float32(inf))
    for x, expected in ((middle, even), (below, low), (above, high)):
        rounded = round_to(torch.from_numpy(x), format)
        assert_identical(rounded, torch.from_numpy(expected))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_float32_agrees_with_the_usual_casts(name: str) -> None:
    """From float32 torch's and ml_dtypes' casts round once, so all three must agree, on a spread
    of float32 bit patterns with all exponents, subnormals, infinities and NaN. (torch 2.13
    saturates in float8_e4m3fn, infinity too, so there it is asked below overflow only.)"""
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=seeded(), dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    rounded = round_to(x, FORMATS[name])
    asked = x.abs() <= 464.0 if name == "float8_e4m3fn" else torch.ones_like(x, dtype=torch.bool)
    assert_identical(rounded[asked], x[asked].to(dtype_of(FORMATS[name])).float())
    with np.errstate(over="ignore", invalid="ignore"):
        cast = x.numpy().astype(ML_DTYPES[name]).astype(np.float32)
    assert_identical(rounded, torch.from_numpy(cast))


# --- against other implementations -------------------------------------------------------------


def random_doubles(n: int, seed: int = 0) -> torch.Tensor:
    """float64 numbers of random bits: every exponent, subnormals, infinities, NaN."""
    low, high = (
        torch.randint(0, 2**32, (n,), generator=seeded(seed + k), dtype=torch.int64) for k in (0, 1)
    )
    return ((high << 32) | low).view(torch.float64)


def random_near(format: Format, n: int, seed: int = 0) -> torch.Tensor:
    """float64 numbers of random significands with exponents from below the format's smallest
    subnormal to beyond its largest value; half of them cut to a bit or two more than the format
    has, where ties are."""
    lowest = max(format.emin - format.precision - 3, -1074)
    exponents = torch.randint(lowest, min(format.emax + 3, 1023), (n,), generator=seeded(seed))
    significand = torch.rand(n, generator=seeded(seed + 1), dtype=torch.float64) + 1.0
    cut = 2.0 ** min(format.precision + 1, 52)
    significand[::2] = (significand[::2] * cut).round() / cut
    sign = 1.0 - 2.0 * torch.randint(0, 2, (n,), generator=seeded(seed + 2))
    half = exponents.double().div(2).floor()
    return sign * significand * torch.exp2(half) * torch.exp2(exponents - half)


@pytest.mark.parametrize("name", [*ENUMERATED, *OTHERS])
@pytest.mark.parametrize("mode", ["nearest", "toward_zero"])
def test_agrees_with_rational_arithmetic(name: str, mode) -> None:
    """Correctly rounded means: what unbounded arithmetic gives, for any float64."""
    format = format_named(name)
    x = torch.cat([random_doubles(1000), random_near(format, 2000)])
    expected = tensor([exactly(value, format, mode) for value in x.tolist()])
    assert_identical(round_to(x, format, mode), expected)


@pytest.mark.parametrize("name", GFLOAT)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "toward_zero"])
def test_agrees_with_gfloat(name: str, saturate: bool, mode) -> None:
    """gfloat's array rounding gives the same, also saturating (finite values: it saturates
    infinity too, numdev does not)."""
    format = FORMATS[name]
    x = torch.cat([random_doubles(20_000), random_near(format, 20_000)])
    x = x[x.isfinite()]
    theirs = gfloat.RoundMode.TiesToEven if mode == "nearest" else gfloat.RoundMode.TowardZero
    with np.errstate(all="ignore"):
        expected = gfloat.round_ndarray(GFLOAT[name], x.numpy(), theirs, saturate)
    assert_identical(round_to(x, format, mode, saturate=saturate), torch.from_numpy(expected))


@pytest.mark.parametrize("name", [*ENUMERATED, "tf32", "float32", "e8m23", "e5m22", "e7m23"])
@pytest.mark.parametrize("mode", ["nearest", "toward_zero", "stochastic"])
def test_float32_input_rounds_as_float64_input(name: str, mode) -> None:
    """The dtype of x decides nothing but the dtype of the result, random draws included."""
    format = format_named(name)
    x = random_near(format, 20_000).float()
    x[::7] = random_near(FP32, 20_000, seed=5).float()[::7]
    x = x[x.abs() < 2.0**127]  # above, e9m4 and e11m3 round to 2^128, tested on its own
    narrow = round_to(x, format, mode, generator=seeded(3))
    wide = round_to(x.double(), format, mode, generator=seeded(3))
    assert narrow.dtype == torch.float32
    assert_identical(narrow.double(), wide)


def test_subnormal_float32_is_not_flushed() -> None:
    """float32 subnormals round as numbers, also to formats whose range goes further down."""
    x = tensor([2.0**-149, 3 * 2.0**-149, 2.0**-134, 3 * 2.0**-134, 0x7FFFFF * 2.0**-149])
    bf16 = tensor([0.0, 0.0, 0.0, 2.0**-132, 2.0**-126])
    e9m1 = tensor([2.0**-149, 3 * 2.0**-149, 2.0**-134, 3 * 2.0**-134, 2.0**-126])
    e9m2 = tensor([5 * 2.0**-149, 9 * 2.0**-149, 11 * 2.0**-149])
    assert_identical(round_to(x.float(), BF16), bf16.float())
    assert_identical(round_to(x.float(), format_named("e9m1")), e9m1.float())
    expected = tensor([5 * 2.0**-149, 8 * 2.0**-149, 12 * 2.0**-149]).float()
    assert_identical(round_to(e9m2.float(), format_named("e9m2")), expected)


def test_a_lopsided_format_is_rounded_from_float32_too() -> None:
    """A format inside float32 whose normals reach into float32's subnormals rounds there."""
    deep = Format(name="deep", precision=4, emin=-140, emax=10)
    x = random_near(deep, 5000).float()
    assert_identical(round_to(x, deep).double(), round_to(x.double(), deep))
    assert float(round_to(tensor([17 * 2.0**-139]).float(), deep)) == 2.0**-135


def test_a_result_float32_cannot_hold_is_refused() -> None:
    """A float32 input with a result outside float32 is a usage error, not a second rounding;
    the same input as float64 rounds."""
    near_top = tensor([3.4e38])
    assert_identical(round_to(near_top, format_named("e9m7")), tensor([2.0**128]))
    with pytest.raises(UsageError, match="float32"):
        round_to(near_top.float(), format_named("e9m7"))
    beyond = tensor([300.0])  # saturates to 256 - 2^-23, which has 31 bits
    assert float(round_to(beyond, format_named("e4m30"), saturate=True)) == (2 - 2.0**-30) * 128
    with pytest.raises(UsageError, match="float64"):
        round_to(beyond.float(), format_named("e4m30"), saturate=True)


def test_overflow_saturates_when_asked() -> None:
    """With saturate, finite values stop at the largest, in every format and mode."""
    for name in [*ENUMERATED, *OTHERS]:
        format = format_named(name)
        if format.emax == 1023:
            continue  # no finite float64 lies beyond
        x = tensor([1.0, -1.0]) * min(2.0 ** (format.emax + 1), 1e308)
        expected = tensor([format.largest, -format.largest])
        for mode in ("nearest", "toward_zero", "stochastic"):
            rounded = round_to(x, format, mode, saturate=True, generator=seeded())
            assert_identical(rounded, expected)
        assert_identical(round_to(x, format, "toward_zero"), expected)


# --- stochastic rounding -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("format", "low", "step"),
    [
        (BF16, 1.0, 2.0**-7),
        (BF16, -1.9921875, -(2.0**-7)),  # up to the next binade
        (BF16, 0.0, 2.0**-133),  # among subnormals
        (FP16, 5 * 2.0**-24, 2.0**-24),
        (E4M3FN, 416.0, 32.0),
        (E5M2, 0.0, -(2.0**-16)),
    ],
)
@pytest.mark.parametrize("fraction", [2.0**-10, 0.25, 0.5, 0.7109375, 1 - 2.0**-10])
def test_stochastic_rounding_is_unbiased(
    format: Format, low: float, step: float, fraction: float, dtype: torch.dtype
) -> None:
    """Only the two neighbours occur, the upper one with probability f, the distance covered.
    Its count is binomial: n f within 6 standard deviations (a chance of 2e-9 to fail, once: the
    seed is fixed)."""
    n = 50_000
    x = torch.full((n,), low + fraction * step, dtype=dtype)
    steps = (round_to(x, format, "stochastic", generator=seeded(11)).double() - low) / step
    assert set(steps.tolist()) <= {0.0, 1.0}
    deviation = abs(float(steps.sum()) - n * fraction)
    assert deviation <= 6 * math.sqrt(n * fraction * (1 - fraction))


def test_the_unbiasedness_test_has_power() -> None:
    """Rounding to nearest, or with a probability off by 8 %, would fail the bound above."""
    n, fraction = 50_000, 0.25
    bound = 6 * math.sqrt(n * fraction * (1 - fraction))
    x = torch.full((n,), 1 + fraction * 2.0**-7, dtype=torch.float64)
    nearest = float((round_to(x, BF16) - 1.0).sum()) * 2**7
    assert abs(nearest - n * fraction) > bound
    skewed = torch.full((n,), 1 + 1.08 * fraction * 2.0**-7, dtype=torch.float64)
    ups = float((round_to(skewed, BF16, "stochastic", generator=seeded(11)) - 1.0).sum()) * 2**7
    assert abs(ups - n * fraction) > bound


def test_stochastic_rounding_of_random_values() -> None:
    """Over many different values the errors average out: their sum is within 6 standard
    deviations, each at most a quarter of the squared spacing in variance."""
    x = torch.randn(200_000, generator=seeded(), dtype=torch.float64)
    for format in (BF16, FP16, E5M2):
        error = round_to(x, format, "stochastic", generator=seeded(1)) - x
        spacing = ulp(x, format)
        assert float((error.abs() / spacing).max()) < 1.0
        assert abs(float((error / spacing).sum())) <= 6 * math.sqrt(x.numel() / 4)


def test_stochastic_rounding_repeats_with_its_seed() -> None:
    """The generator alone decides: the same seed repeats, another differs."""
    x = torch.randn(1000, generator=seeded(), dtype=torch.float64)
    one, same, other = (
        round_to(x, BF16, "stochastic", generator=seeded(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_stochastic_overflow_goes_either_way() -> None:
    """Between the largest value and the next on the grid, overflow has the distance's share;
    from there on it is certain."""
    x = torch.full((10_000,), 65504.0 + 8.0, dtype=torch.float64)  # a quarter of the way to 65536
    rounded = round_to(x, FP16, "stochastic", generator=seeded())
    assert set(rounded.tolist()) == {65504.0, inf}
    assert abs(int(rounded.isinf().sum()) - 2500) < 6 * math.sqrt(10_000 * 0.25 * 0.75)
    sure = round_to(tensor([65536.0] * 100), FP16, "stochastic", generator=seeded())
    assert bool(sure.isinf().all())


def test_stochastic_rounding_needs_its_generator() -> None:
    """Without a generator there is no hidden global one to fall back on."""
    with pytest.raises(UsageError, match="generator"):
        round_to(torch.ones(1), BF16, "stochastic")


# --- the contract around the numbers -----------------------------------------------------------


def test_an_unknown_mode_is_refused() -> None:
    """A misspelt mode is a usage error, also where rounding would change nothing."""
    for format in (BF16, FP64):
        with pytest.raises(UsageError, match="nearst"):
            round_to(torch.ones(1), format, "nearst")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex128])
def test_only_real_floats_round(dtype: torch.dtype) -> None:
    """Integers, booleans and complex numbers are refused."""
    with pytest.raises(UsageError, match=str(dtype)):
        round_to(torch.ones(2, dtype=dtype), BF16)
    with pytest.raises(UsageError, match=str(dtype)):
        ulp(torch.ones(2, dtype=dtype), BF16)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_narrow_inputs_are_widened_to_float32(dtype: torch.dtype) -> None:
    """What comes in narrower comes out as float32, its values rounded as if it had been."""
    x = torch.randn(500, generator=seeded()).to(dtype)
    for format in (E5M2, BF16, FP32):
        assert_identical(round_to(x, format), round_to(x.float(), format))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["float64", "float32", "e11m52", "e8m23"])
def test_rounding_to_a_wider_format_is_the_identity(name: str, dtype: torch.dtype) -> None:
    """A format that contains the dtype changes nothing, and still returns a new tensor."""
    format = format_named(name)
    x = random_near(FP32, 2000).to(dtype).float().to(dtype)
    rounded = round_to(x, format)
    assert_identical(rounded, x)
    assert rounded.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", ["float64", "bfloat16", "e9m7"])
def test_the_input_is_not_modified(name: str) -> None:
    """Neither the tensor nor its gradient graph is touched."""
    for dtype in (torch.float64, torch.float32):
        x = torch.randn(1000, generator=seeded(), dtype=dtype).requires_grad_()
        before = x.detach().clone()
        for mode in ("nearest", "toward_zero", "stochastic"):
            rounded = round_to(x, format_named(name), mode, generator=seeded())
            rounded.add_(1.0)
            assert not rounded.requires_grad
        ulp(x, BF16)
        assert torch.equal(x.detach(), before)


def test_views_scalars_and_empty_tensors() -> None:
    """Any shape and stride gives what its contiguous copy gives."""
    x = torch.randn(6, 8, 10, generator=seeded(), dtype=torch.float64)
    views = [x.transpose(0, 2), x[:, ::3], x[0, 0, :1].expand(5, 4), x[0, 0, 0], x[:0]]
    for view in views:
        assert_identical(round_to(view, BF16), round_to(view.contiguous(), BF16))
        assert_identical(ulp(view, BF16), ulp(view.contiguous(), BF16))
        assert round_to(view, BF16).shape == view.shape


@pytest.mark.parametrize("name", [*ENUMERATED, *OTHERS])
def test_rounding_is_idempotent_monotone_and_odd(name: str) -> None:
    """A rounded value rounds to itself, order is kept, and -x gives the negative."""
    format = format_named(name)
    x = random_near(format, 5000).sort().values
    rounded = round_to(x, format, saturate=True)
    assert_identical(round_to(rounded, format), rounded)
    assert bool((rounded.diff() >= 0).all())
    assert_identical(round_to(-x, format, saturate=True), -rounded)


@pytest.mark.parametrize("name", [*ENUMERATED, *OTHERS])
def test_the_error_is_at_most_half_an_ulp(name: str) -> None:
    """|rounded - x| <= ulp(x) / 2 everywhere below overflow, and <= u |x| among normals."""
    format = format_named(name)
    x = random_near(format, 5000)
    x = x[x.abs() <= format.largest]
    error = (round_to(x, format) - x).abs()
    assert bool((error <= ulp(x, format) / 2).all())
    normal = x.abs() >= format.smallest_normal
    assert bool((error[normal] <= format.unit_roundoff * x[normal].abs()).all())


# --- ulp ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "x", "expected"),
    [
        (BF16, 1.0, 2.0**-7),
        (BF16, -1.0, 2.0**-7),
        (BF16, math.nextafter(1.0, 0.0), 2.0**-8),
        (BF16, math.nextafter(2.0, 0.0), 2.0**-7),
        (BF16, 2.0, 2.0**-6),
        (BF16, 0.0, 2.0**-133),
        (BF16, -0.0, 2.0**-133),
        (BF16, 1e-320, 2.0**-133),
        (BF16, 2.0**-126, 2.0**-133),
        (BF16, 2.0**-125, 2.0**-132),
        (BF16, 1e300, 2.0**120),  # above the largest: the spacing at emax
        (FP16, 1.0, 2.0**-10),
        (FP16, 65504.0, 32.0),
        (FP16, 1e9, 32.0),
        (FP16, 1e-9, 2.0**-24),
        (E4M3FN, 448.0, 32.0),
        (E4M3FN, 1e6, 32.0),
        (E4M3FN, 0.001, 2.0**-9),
        (FP64, 1.0, 2.0**-52),
        (FP64, 0.0, 5e-324),
        (FP64, 1.7976931348623157e308, 2.0**971),
        (FP32, 1.5, 2.0**-23),
        (FP32, nan, nan),
        (FP32, inf, nan),
        (E4M3FN, -inf, nan),
    ],
)
def test_ulp_by_hand(format: Format, x: float, expected: float) -> None:
    """The spacing at a value, from below the smallest subnormal to beyond the largest."""
    assert_identical(ulp(tensor([x]), format), tensor([expected]))


@pytest.mark.parametrize("name", ENUMERATED)
def test_ulp_is_the_distance_to_the_next_value(name: str) -> None:
    """At every value of a format, of either sign, and just below the next one."""
    values = all_values(name)
    low, high = values[:-1], values[1:]
    for x in (low, -low, np.nextafter(high, 0)):
        assert_identical(ulp(tensor(x), format_named(name)), tensor(high - low))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ulp_agrees_with_numpy(dtype: torch.dtype) -> None:
    """numpy's spacing is the ulp in the dtype's own format; it comes as float64."""
    x = random_near(FP32, 10_000).to(dtype)
    x = x[x.isfinite() & (x.abs() < 2.0**127)]
    expected = np.spacing(x.abs().numpy()).astype(np.float64)
    assert_identical(ulp(x, format_of(dtype)), torch.from_numpy(expected))


def test_ulp_of_float32_in_a_finer_format() -> None:
    """The spacing may be far below float32's range and is not flushed."""
    x = torch.tensor([1e-45, 1e-38, 1.0])
    assert_identical(ulp(x, FP64), tensor([2.0**-201, 2.0**-179, 2.0**-52]))


# --- GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", [*ENUMERATED, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gpu_rounds_as_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Every bit agrees between the devices, subnormals and specials included, and so does the
    refusal of float32 results that only float64 can hold."""
    format = format_named(name)
    x = torch.cat([random_doubles(20_000), random_near(format, 20_000), random_near(FP32, 20_000)])
    x = x.to(dtype)
    x = x[~(x.abs() >= 2.0**127)] if dtype == torch.float32 else x
    for mode in ("nearest", "toward_zero"):
        try:
            round_to(x, format, mode)
        except UsageError:
            with pytest.raises(UsageError):
                round_to(x.cuda(), format, mode)
            continue
        on_gpu = round_to(x.cuda(), format, mode)
        assert on_gpu.is_cuda
        assert_identical(on_gpu.cpu(), round_to(x, format, mode))
    assert_identical(ulp(x.cuda(), format).cpu(), ulp(x, format))
    generator = torch.Generator("cuda").manual_seed(0)
    finite = x[x.abs() < format.largest / 2]
    error = round_to(finite.cuda(), format, "stochastic", generator=generator).cpu() - finite
    assert bool((error.abs() < ulp(finite, format)).all())
