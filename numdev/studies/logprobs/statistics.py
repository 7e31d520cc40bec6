"""The numbers by which frameworks watch two sets of log-probabilities, and estimates over
sequences. Needs no torch.

d is the trainer's log-probability less the rollout's, r = exp(d) the importance ratio.
Tokens of a sequence share their context, so that intervals are over sequences: each is
left out once (jackknife)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from numdev.metrics.statistics import CONFIDENCE
from numdev.studies.logprobs.report import PairRow, SequenceEstimate, Statistic

FEWEST = 3  # sequences that an interval takes
# By its name, a term whose sum over tokens is stored; d as above, p and q the
# probabilities by trainer and rollout
Term = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of log p and log q
BANDS = {"1%": (0.99, 1.01), "5%": (0.95, 1.05), "opd": (0.999, 1.002)}
CEILING = 2.0  # that ratios are clamped to before the effective sample size
Sums = Mapping[str, float]
ANY = (-math.inf, math.inf)
SHARE = (0.0, 1.0)


def pair_sums(
    p: np.ndarray, q: np.ndarray, clip: tuple[float, float]
) -> dict[str, float]:
    """Returns the sums over tokens of every term that the statistics are made of, by
    name; `p`, `q`: log-probabilities by trainer and rollout, float64 [tokens], finite. A
    term beyond float64 is infinite, and so is its sum: exp(2d) above d = 354. Where
    probabilities themselves are infinite, their difference may be NaN. `clip`: the least
    and the largest ratio within the band. Without tokens each sum is 0."""
    d = p - q
    with np.errstate(over="ignore"):
        r = np.exp(d)
        clamped = np.minimum(r, CEILING)
        terms = {"tokens": np.ones_like(d), "d": d, "abs": np.abs(d), "square": d**2}
        terms |= {"ratio": r, "k3": np.expm1(d) - d, "multiple": np.exp(np.abs(d))}
        terms |= {"ratio_square": np.exp(2 * d), "outside": outside(r, clip)}
        terms |= {"clamped": clamped, "clamped_square": clamped**2}
        terms |= {f"band_{name}": outside(r, band) for name, band in BANDS.items()}
        a, b = np.exp(p), np.exp(q)
    terms |= {"probability": np.abs(a - b), "a": a, "b": b}
    terms |= {"aa": a * a, "bb": b * b, "ab": a * b}
    return {name: float(term.sum()) for name, term in terms.items()}


def outside(ratio: np.ndarray, band: tuple[float, float]) -> np.ndarray:
    """Returns 1 where a ratio lies outside a band, 0 within or on its edge, and for NaN;
    float64."""
    return ((ratio < band[0]) | (ratio > band[1])).astype(np.float64)


class Formula(NamedTuple):
    """A number of a dashboard, by the sums of tokens or of sequences."""

    name: str
    formula: str
    shown_by: str
    of: Callable[[Sums], float]
    within: tuple[float, float] = (0.0, math.inf)  # the least and the most it can be


def _mean(term: str) -> Callable[[Sums], float]:
    """Returns the function that gives the mean of a term over tokens, from sums by name.
    It raises ZeroDivisionError without tokens."""
    return lambda sums: sums[term] / sums["tokens"]


def _pearson(sums: Sums) -> float:
    """Returns the correlation of the two sides' probabilities; NaN where the variance of
    one comes out as 0 or less. Raises ZeroDivisionError without tokens."""
    n = sums["tokens"]
    a, b = sums["a"] / n, sums["b"] / n
    spread = (sums["aa"] / n - a * a) * (sums["bb"] / n - b * b)
    return (sums["ab"] / n - a * b) / math.sqrt(spread) if spread > 0 else math.nan


def _sample_size(sums: Sums) -> float:
    """Returns the effective sample size of clamped ratios, as a share of the tokens.
    Raises ZeroDivisionError where no ratio is above 0."""
    n = sums["tokens"]
    mean = sums["clamped"] / n
    return mean * mean / (sums["clamped_square"] / n)


_OF_LOGARITHMS = (
    Formula("mean |d|", "mean |log p - log q|", "verl and others", _mean("abs")),
    Formula("k1", "mean (log q - log p)", "k1",
            lambda sums: -sums["d"] / sums["tokens"], ANY),
    Formula("k3", "mean (r - 1 - d)",
            "verl k3_kl, prime-rl mismatch_kl, NeMo-RL gen_kl_error", _mean("k3")),
    Formula("multiplicative error", "mean exp |d|",
            "NeMo-RL (above 1.05 it asks for a look)", _mean("multiple"),
            (1.0, math.inf)),
)  # fmt: skip
_OF_RATIOS = (
    Formula("mean ratio", "mean r",
            "prime-rl importance_ratio, TRL importance_sampling_ratio", _mean("ratio")),
    Formula("chi-squared", "mean r² - 1", "",
            lambda sums: sums["ratio_square"] / sums["tokens"] - 1, (-1.0, math.inf)),
    Formula("effective sample size", "1 / mean w², w = min(r, 2) over its mean",
            "", _sample_size, SHARE),
)  # fmt: skip
_OF_SHARES = (
    Formula("outside the clip band", "share of r", "clip fractions", _mean("outside"),
            SHARE),
    Formula("outside ±1 %", "share of r outside [0.99, 1.01]", "", _mean("band_1%"),
            SHARE),
    Formula("outside ±5 %", "share of r outside [0.95, 1.05]", "", _mean("band_5%"),
            SHARE),
    Formula("outside [0.999, 1.002]", "share of r", "", _mean("band_opd"), SHARE),
)  # fmt: skip
_OF_PROBABILITIES = (
    Formula("mean |p - q|", "mean |exp(log p) - exp(log q)|",
            "verl", _mean("probability"), SHARE),
    Formula("Pearson of probabilities", "correlation of p and q",
            "verl", _pearson, (-1.0, 1.0)),
)  # fmt: skip
TOKENS = (*_OF_LOGARITHMS, *_OF_RATIOS, *_OF_SHARES, *_OF_PROBABILITIES)
SEQUENCES = (
    Formula("chi-squared by sequence", "mean over sequences of (product of r)² - 1",
            "", lambda sums: sums["product_square"] / sums["sequences"] - 1,
            (-1.0, math.inf)),
    Formula("outside by sequence, product", "share of sequences, product of r",
            "",
            lambda sums: sums["product_outside"] / sums["sequences"], SHARE),
    Formula("outside by sequence, geometric", "share of sequences, geometric mean of r",
            "", lambda sums: sums["geometric_outside"] / sums["sequences"], SHARE),
)  # fmt: skip


def dashboard(
    rows: Sequence[PairRow], clip: tuple[float, float]
) -> tuple[Statistic, ...]:
    """Returns the numbers of the two sides as frameworks show them; none without a token.
    The value of a number that is not finite is None."""
    measured = [row for row in rows if row.tokens]
    by_sequence = [{**row.sums, **_sequence_sums(row, clip)} for row in measured]
    if not by_sequence:
        return ()
    return tuple(
        Statistic(
            name=each.name,
            formula=each.formula,
            shown_by=each.shown_by,
            value=jackknife(by_sequence, each.of, within=each.within),
        )
        for each in (*TOKENS, *SEQUENCES)
    )


def _sequence_sums(row: PairRow, clip: tuple[float, float]) -> dict[str, float]:
    """Returns the terms of one sequence as a whole, by name. A product of ratios of e^700
    or more is infinite, and its square where the product is e^350 or more. The row has at
    least one token."""
    total, n = row.sums["d"], row.sums["tokens"]
    product = math.exp(total) if total < 700 else math.inf
    square = math.exp(2 * total) if total < 350 else math.inf
    geometric = math.exp(min(700.0, total / n))
    return {
        "sequences": 1.0,
        "product_square": square,
        "product_outside": float(not clip[0] <= product <= clip[1]),
        "geometric_outside": float(not clip[0] <= geometric <= clip[1]),
    }


def jackknife(
    sequences: Sequence[Sums], of: Callable[[Sums], float],
    confidence: float = CONFIDENCE, within: tuple[float, float] = ANY,
) -> SequenceEstimate | None:  # fmt: skip
    """Returns a number made of sums over sequences, and its interval: each sequence is
    left out once, and Student's t is taken of what that changes. Without an interval for
    fewer than FEWEST sequences, where some sequence cannot be left out, and for one that
    is not finite. None where the number, or a sum of a sequence, is not finite.
    `sequences`: at least one. `within`: the least and the most that the number can be,
    where the interval ends: what is impossible is left out, which changes no coverage.

    Efron and Stein, "The jackknife estimate of variance" (1981); Mandelkern, "Setting
    confidence intervals for bounded parameters", Statist. Sci. 17 (2002)."""
    names = list(sequences[0])
    table = np.array([[sums[name] for name in names] for sums in sequences])
    if not np.isfinite(table).all():
        return None

    def value(row: np.ndarray) -> float:
        """Returns the number of a row of sums; NaN where it divides by 0."""
        try:
            return of(dict(zip(names, row.tolist(), strict=True)))
        except ZeroDivisionError:
            return math.nan

    total, n = table.sum(axis=0), len(table)
    mean = value(total)
    if not math.isfinite(mean):
        return None
    if n < FEWEST:
        return SequenceEstimate(mean=mean)
    without = np.array([value(total - row) for row in table])
    if not np.isfinite(without).all():
        return SequenceEstimate(mean=mean)
    with np.errstate(over="ignore"):
        spread = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    if not math.isfinite(spread):
        return SequenceEstimate(mean=mean)
    half = student(n - 1, confidence) * spread
    # Of values that are no log-probabilities the number itself may be impossible
    low = min(max(within[0], mean - half), mean)
    high = max(min(within[1], mean + half), mean)
    return SequenceEstimate(mean=mean, low=low, high=high)


UPPER_BITS = 18  # of a number of 64: sign, exponent and six bits of its significand


def median(parts: Sequence[np.ndarray]) -> float | None:
    """Returns the median of numbers that are finite and not negative, float64, of all
    parts together, as numpy's; None of none. The parts are gone through twice: to count
    numbers by their UPPER_BITS, and for the different ones that have those of the
    middle."""

    def upper(part: np.ndarray) -> np.ndarray:
        """Returns the upper bits of numbers, which are in order as they are."""
        return np.asarray(part.view(np.uint64) >> np.uint64(64 - UPPER_BITS), np.int64)

    counts = np.zeros(1 << UPPER_BITS, np.int64)
    for part in parts:
        np.add.at(counts, upper(part), 1)
    below = counts.cumsum()
    if not below[-1]:
        return None
    ranks = np.unique([(below[-1] - 1) // 2, below[-1] // 2])
    first, last = np.searchsorted(below, ranks[[0, -1]], side="right")
    near = []
    for part in parts:
        bits = upper(part)
        middle = part[(first <= bits) & (bits <= last)]
        near.append(np.unique(middle, return_counts=True))
    values, times = (np.concatenate(x) for x in zip(*near, strict=True))
    order = values.argsort()
    up_to = below[first] - counts[first] + times[order].cumsum()
    return float(values[order][np.searchsorted(up_to, ranks, side="right")].mean())


def student(freedom: int, confidence: float) -> float:
    """Returns the two-sided quantile of Student's t with `freedom` degrees of freedom, at
    a `confidence` of 0 to 1."""
    from scipy.special import stdtrit  # a third of a second that a gate need not wait for

    return float(stdtrit(freedom, (1 + confidence) / 2))


def smallest_mean(estimate: SequenceEstimate | None) -> float | None:
    """Returns the smallest mean that would be told from 0, four times in five, at 95 %:
    2.8 / 1.96 of half the interval. None without an interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return None
    return (estimate.high - estimate.low) / 2 * 2.8 / 1.96
