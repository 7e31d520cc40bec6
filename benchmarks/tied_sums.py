"""The closed form of biased rounding, exactly: sums of tied values of V, over all significands.

k values of bf16 with one exponent and one sign, and a tail of the same sign that is below half an
ulp of their sum, are added exactly and rounded once. Everything is in units of the last bit of the
values: these are integers 128 to 255, all equally likely, so the sum's distribution is a
convolution of counts, and every mean here is a rational number without an error.

For two values the mean error is a quarter of an ulp less the tail, away from zero: an even sum
loses the tail, an odd one is lifted over the middle by it. Where the sum drops b bits, the tail
turns the one tie among 2^b remainders, which leaves 2^-(b+1) ulp.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

BITS = 8
SIGNIFICANDS = range(1 << (BITS - 1), 1 << BITS)


def sums(count: int) -> Counter[int]:
    """Sum of `count` significands to how many tuples of them have it."""
    found = Counter({0: 1})
    for _ in range(count):
        further: Counter[int] = Counter()
        for total, ways in found.items():
            for significand in SIGNIFICANDS:
                further[total + significand] += ways
        found = further
    return found


def spacing(x: Fraction) -> Fraction:
    """The ulp of x > 0 in 8 bits without limits on exponents."""
    step = Fraction(1)
    while x >= step * (1 << BITS):
        step *= 2
    while x < step * (1 << (BITS - 1)):
        step /= 2
    return step


def nearest(x: Fraction) -> Fraction:
    """x > 0 rounded to 8 bits, ties to even: `round` of a Fraction is exact and does that."""
    step = spacing(x)
    return round(x / step) * step


def error(total: int, tail: Fraction) -> Fraction:
    """Of rounding total + tail, in ulps, positive away from zero."""
    x = total + tail
    return (nearest(x) - x) / spacing(x)


def mean_error(count: int, tail: Fraction) -> Fraction:
    """Over all tuples of `count` significands, in ulps of each sum; `tail` is in units of the last
    bit of the values."""
    found = sums(count)
    weighted = sum((error(s, tail) * ways for s, ways in found.items()), Fraction(0))
    return weighted / found.total()


def closed_form(tail_in_ulps: Fraction) -> Fraction:
    """Of two values: 1/4 ulp less the tail, away from zero (in the paper's sign, with V negative,
    -(1/4) ulp + tau)."""
    return Fraction(1, 4) - tail_in_ulps
