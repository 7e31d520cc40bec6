"""What makes a program's log-probabilities differ from others of the same tokens: causes
as functions of arrays, and the rule by which one is named.

A cause has an effect, in nats a token: undone, an error d becomes d - effect. It is named
where undoing it cuts tenfold the squared error, or what that has above the predicted one;
or, if the effect was computed without looking at the errors (the exact model under that
cause, less the exact model), where the slope of the error on it is 1 within its interval,
0 is far outside, and no more is left than it explains. On a side that is at its
prediction nothing is named. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numdev.report.number_text import percent
from numdev.studies.logprobs.lazy_sequences import Mapped
from numdev.studies.logprobs.pair_causes import (
    Alternatives,
    constants,
    sign_of,
    slope_sums,
)
from numdev.studies.logprobs.report import CauseRow, SequenceEstimate
from numdev.studies.logprobs.statistics import jackknife, median

if TYPE_CHECKING:
    from numdev.studies.logprobs.records import RecordedSequence
    from numdev.studies.logprobs.truth import ExactValues, ProgramRecipe, Support

TENFOLD = 10.0
LEAST_CUT = 1.3  # of the squared error, by a cause that its slope names
LEAST_TEMPERATURE = 0.01  # by which a slope of alternatives must be off 1
FAR = 6.0  # standard errors between a slope and 0
NEAR_ONE = 0.05  # by which a slope's interval may miss 1
CONFIDENCE = 0.99  # of the slope's interval
# Below a quarter of the noise an effect is not resolved: a sixteenth of its square.
RESOLVED = 1 / 16
AT_PREDICTION = 1.5  # rms over predicted up to which nothing is named
FEWEST_TOKENS = 32  # for a cause by the values' own form
ALIGNED = 5.0  # times as well as the tokens' own values do others fit that are shifted
WELL = 0.2  # of the variance that such a line leaves, at most; the tokens' own, at least
FEWEST_DROPPED = 3  # tokens, by whose value or place a cause is known
FORCED = -0.1  # an exact log-probability below which a recorded 0 is no rounding
LN2, LN10 = math.log(2), math.log(10)
PADDINGS = (8, 64, 128, 256)  # multiples that vocabularies are padded to
CHANCE = 0.5  # share of differences on a grid from which they lie on it; by chance 1 %
GRID = 2.0**-8
GRID_BITS = {"bfloat16": 8, "float16": 11}  # significant bits
ON_GRID = 0.02  # of a step: float32's resolution; by chance 4 % are as near


class Rerouted(NamedTuple):
    """A sequence of n tokens with the experts that it recorded in place of the exact
    model's."""

    values: np.ndarray  # float64 [n], exact log-probabilities
    predicted: np.ndarray  # float64 [n], the predicted error
    other: int  # how many of the recorded experts are not the exact model's
    recorded: int  # and of how many


@dataclass(frozen=True, eq=False)
class Observed:
    """One sequence of n tokens as one side recorded it, beside what it is held to."""

    sequence: int
    record: RecordedSequence
    values: np.ndarray  # float64 [n], as recorded
    counts: np.ndarray  # bool [n], where value and reference are finite and count
    # float64 [n]: the exact log-probability, or that of the other side
    reference: np.ndarray
    predicted: np.ndarray | None = None  # float64 [n], the predicted error
    exact: ExactValues | None = None
    vocabulary: int = 0
    support: Support | None = None  # that `reference` is under
    recipe: ProgramRecipe | None = None  # that `predicted` is by
    again: np.ndarray | None = None  # float64 [n], values of a second run
    shared: Alternatives | None = None  # of both sides, where `reference` is the other's
    rerouted: Rerouted | None = None  # None also where experts do not fit the model
    # float64 [n]: exact log-probabilities under a cause, by cause and dose
    instead: Mapping[tuple[str, str], np.ndarray] = field(default_factory=dict)

    @property
    def errors(self) -> np.ndarray:
        """Returns value less reference, float64 [n]; NaN where the token does not
        count."""
        d = np.full(len(self.values), np.nan)
        d[self.counts] = self.values[self.counts] - self.reference[self.counts]
        return d


class Effects(NamedTuple):
    """A cause of one dose on every sequence."""

    dose: str
    # float64 [n] each, computed when asked for; NaN where undoing leaves no value
    effects: Sequence[np.ndarray]
    scale: float = 1.0  # by which the cause multiplies the errors of the format
    counts: Sequence[int] = ()  # tokens with the cause's own sign; by sequence
    fitted: bool = False  # the dose was chosen by the errors themselves
    # Of a temperature, by sequence: sums of which the slope of alternatives is made
    alternatives: Sequence[tuple[float, float, float]] = ()
    # float64 [n] each: the predicted error once the cause is undone, where that is other
    predicted: Sequence[np.ndarray] = ()


Sequences = Sequence[Observed]
# The errors as far as other causes are undone, float64 [n] each
Errors = Sequence[np.ndarray]


class CauseKind(NamedTuple):
    """A cause, and how it is looked for."""

    name: str
    words: str  # in a sentence on a side; {dose} stands for its dose
    find: Callable[[Sequences, Errors], Iterable[Effects]]  # one for each dose tried
    by_slope: bool = False  # the effect does not depend on the errors
    counted: bool = False  # named by its own sign, wherever a token has it
    stage: int = 1  # those of stage 0 are undone before others are looked for
    is_size: bool = False  # known by its size alone: it cannot be undone
    drops: bool = False  # tokens without a value once it is undone count no more
    # It rounds to few bits: the format's noise turns some of its roundings over, so that
    # it is undone in part, and known by its size too
    in_part: bool = False


def shifted(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns one effect, over all sequences, of values that belong to the token before
    or after; its dose says which. It is 0 in a sequence unless that is far off, has
    FEWEST_TOKENS / 2 values to compare, and a line through the moved values fits well and
    ALIGNED times better. A line, since another base or temperature may come on top."""
    steps, counts, names = [], [], set[str]()
    for seen, d in zip(sequences, errors, strict=True):
        step, count = 0, 0
        for tried, name in ((1, "one token early"), (-1, "one token late")):
            values, both = _moved(seen, d, tried)
            as_it_is, moved = (
                _scatter(x[both], seen.reference[both]) for x in (seen.values, values)
            )
            fits = moved <= WELL <= as_it_is and as_it_is >= ALIGNED * moved
            is_off = _squares(d[both]) > both.sum() * FORCED**2
            if fits and is_off and both.sum() >= FEWEST_TOKENS / 2:
                step, count = tried, int(both.sum())
                names.add(name)
        steps.append(step)
        counts.append(count)

    def effect(seen: Observed, d: np.ndarray, step: int) -> np.ndarray:
        """Returns the effect on a sequence with the errors `d` [n] of values that are
        `step` tokens early, float64 [n]: 0 for `step` 0, NaN where values cannot be
        compared."""
        if not step:
            return np.zeros_like(d)
        values, both = _moved(seen, d, step)
        return np.where(both, seen.values - values, np.nan)

    effects = Mapped(effect, sequences, errors, steps)
    return [Effects(" or ".join(sorted(names)), effects, counts=counts)]


def _moved(seen: Observed, d: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a sequence's values moved to `step` tokens later, float64 [n], NaN at both
    ends; and which of them can be compared, bool [n]: where these, the reference and the
    errors `d` are finite."""
    values = np.full(len(d), np.nan)
    inner = slice(1, -1)
    values[inner] = np.roll(seen.values, step)[inner]
    return values, np.isfinite(values - seen.reference) & np.isfinite(d)


def _scatter(y: np.ndarray, x: np.ndarray) -> float:
    """Returns the share of the variance of y that a line in x does not explain: 1 - r²; 1
    where either is constant, and where they are empty."""
    y, x = y - y.mean() if len(y) else y, x - x.mean() if len(x) else x
    squares = float((y * y).sum() * (x * x).sum())
    return 1 - float((x * y).sum()) ** 2 / squares if squares else 1.0


def forced(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns one effect, of tokens that err by more than -FORCED where the recorded
    value or the reference is exactly 0: nobody sampled them, or they are masked. Undone
    they have no value; elsewhere the effect is 0. Where the model is known, only in
    sequences in which one of them is not the likeliest token: of that one a filter may
    have left it alone. Where both sides recorded alternatives, only tokens for which
    these have some in common."""
    return [_of_signs("", Mapped(_is_forced, sequences, errors))]


def _is_forced(seen: Observed, d: np.ndarray) -> np.ndarray:
    """Returns where tokens of a sequence are forced, bool [n]: they count, value or
    reference is exactly 0, and the error in `d` is larger than -FORCED in size. No token
    is where a filter may have left them alone."""
    zero = (seen.record.logprobs == 0) | (seen.reference == 0)
    sign: np.ndarray = seen.counts & zero & (np.abs(np.nan_to_num(d)) > -FORCED)
    if seen.exact is not None and seen.exact.likeliest[sign].all():
        sign = np.zeros_like(sign)
    if seen.shared is not None:  # without another token, a filter left it alone
        sign &= np.isfinite(seen.shared.x).any(axis=1)
    return sign


def _of_signs(dose: str, signs: Sequence[np.ndarray]) -> Effects:
    """Returns the effects of tokens that have no value once they are undone: NaN at
    these, 0 at others, and how many they are. `signs`: where they are, bool [n] each."""
    effects = Mapped(lambda sign: np.where(sign, np.nan, 0.0), signs)
    return Effects(dose, effects, counts=Mapped(lambda sign: int(sign.sum()), signs))


def invented(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effects of tokens whose value no program computed, one for each dose.
    First that of the last token that counts in each sequence, as an end of sequence that
    was appended. Then that of the value other than 0 that most tokens have, which was
    filled in; without a model also by the other side's values. Only tokens that are far
    off are meant: by more than -FORCED and TENFOLD times the median. Undone they have no
    value. A 0 is a forced token's. `sequences`: at least one."""
    middle = median(Mapped(lambda d: np.abs(d[np.isfinite(d)]), errors))
    limit = math.inf if middle is None else max(-FORCED, TENFOLD * middle)

    def is_far(d: np.ndarray) -> np.ndarray:
        """Returns where tokens are far off, bool [n]; not where an error is NaN."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(d) > limit)

    def is_last(d: np.ndarray) -> np.ndarray:
        """Returns where the last token that counts is, if it is far off, bool [n]."""
        at = np.flatnonzero(np.isfinite(d))[-1:]
        sign = np.zeros(len(d), np.bool_)
        sign[at] = is_far(d)[at]
        return sign

    def is_filled(value: float, x: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Returns where tokens that are far off have this value, bool [n]."""
        return np.asarray(is_far(d) & (x == value))

    tried = {"the last token of a sequence": Mapped(is_last, errors)}
    recorded = [Mapped(lambda s: s.values, sequences)]
    if sequences[0].exact is None:  # the other side's may be the ones
        recorded.append(Mapped(lambda s: s.reference, sequences))
    for of_side in recorded:
        parts = (x[is_far(d)] for x, d in zip(of_side, errors, strict=True))
        values = np.concatenate([x[x != 0] for x in parts])
        names, times = np.unique(values, return_counts=True)
        if len(names):
            name = float(names[times.argmax()])
            signs = Mapped(partial(is_filled, name), of_side, errors)
            tried[f"tokens with the value {name:.6g}"] = signs
    return [_of_signs(dose, signs) for dose, signs in tried.items()]


def other_base(sequences: Sequences, errors: Errors) -> Iterator[Effects]:
    """Yields the effects of probabilities in place of their logarithms, of logarithms
    with another sign, and of those to the bases 2 and 10. Beside another side also those
    of its having probabilities, or another base, itself. A token that has no value then
    is NaN. `sequences`: at least one; `errors` are not read."""

    def logarithm(values: np.ndarray) -> np.ndarray:
        """Returns ln of positive values; NaN for others."""
        return np.log(np.where(values > 0, values, np.nan))

    forms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "probabilities": logarithm,
        "another sign": lambda values: -values,
        "to the base 2": lambda values: values * LN2,
        "to the base 10": lambda values: values * LN10,
    }
    if sequences[0].exact is None:
        forms |= {
            "logarithms of the other side's probabilities": np.exp,
            "to the base e, the other side's to the base 2": lambda v: v / LN2,
            "to the base e, the other side's to the base 10": lambda v: v / LN10,
        }

    def effect(form: Callable[[np.ndarray], np.ndarray], seen: Observed) -> np.ndarray:
        """Returns the effect of a form on a sequence."""
        with np.errstate(invalid="ignore", over="ignore"):  # of minus infinity
            return np.asarray(seen.values - form(seen.values))

    for name, form in forms.items():
        yield Effects(name, Mapped(partial(effect, form), sequences))


def temperature(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effect of another temperature, from the recorded alternatives by least
    squares, and from the chosen tokens alone where there are none. Empty where a sequence
    has no exact values or is held to a filter, where no temperature fits best, and where
    it would be below 0.25 or above 4. `sequences`: at least one."""
    usable = [seen for seen in sequences if seen.exact is not None]
    if len(usable) < len(sequences) or any(not _is_full(seen) for seen in sequences):
        return []
    of_alternatives = slope_of_alternatives(sequences)
    beta = of_alternatives or _chosen_slope(sequences, errors)
    effects = []
    for seen in sequences:
        assert seen.exact is not None
        assert seen.support is not None
        if beta is None or not 0.25 <= seen.support.temperature / beta <= 4:
            return []
        at = seen.support.temperature / beta
        effects.append(seen.exact.at_temperature(at) - seen.reference)
    assert beta is not None
    first = sequences[0].support
    assert first is not None
    several = len({s.support.temperature for s in sequences if s.support}) > 1
    dose = f"{1 / beta:.3g} times what its records say"
    dose = dose if several else f"{first.temperature / beta:.3g}"
    fitted = of_alternatives is None
    tops = () if fitted else tuple((*_alternatives(s), 0.0) for s in sequences)
    return [Effects(dose, effects, scale=beta, fitted=fitted, alternatives=tops)]


def other_temperature(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effect of another temperature than the other side's, by the
    alternatives of both: a factor for all tokens, and at each position the constant that
    its alternatives have besides, its normalisation's. NaN at a token without shared
    alternatives. Empty where a side recorded no alternatives of some sequence, and where
    their slope is not above 0."""
    if any(seen.shared is None for seen in sequences):
        return []

    def of_alternatives(seen: Observed) -> tuple[float, float, float]:
        """Returns the sums of which the slope of alternatives is made."""
        assert seen.shared is not None
        return slope_sums(seen.shared, (seen.reference, seen.values))

    sums = list(map(of_alternatives, sequences))
    product, square = (math.fsum(each[i] for each in sums) for i in (0, 1))
    if product <= 0:
        return []
    slope = product / square

    def effect(seen: Observed) -> np.ndarray:
        """Returns the effect on a sequence."""
        assert seen.shared is not None
        return np.asarray((slope - 1) * seen.reference + constants(seen.shared, slope))

    effects = Mapped(effect, sequences)
    return [Effects(f"{1 / slope:.3g}", effects, alternatives=sums)]


def other_normalisation(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effect of a support with fewer tokens, or more, than the other side's.
    By the alternatives of both it is a constant at each position; of a token that is
    certain on one side and has no shared alternative it is the whole difference; NaN at
    other tokens without shared alternatives. Constants and differences have one sign over
    all sequences, but for a share ONE_SIGN of their squares; else the effect is 0 at
    every token. Empty where a side recorded no alternatives of some sequence."""
    if any(seen.shared is None for seen in sequences):
        return []

    def effect(seen: Observed, d: np.ndarray) -> np.ndarray:
        """Returns the effect on a sequence."""
        assert seen.shared is not None
        alone = (seen.values == 0) | (seen.reference == 0)  # all that a filter left
        alone &= ~np.isfinite(seen.shared.x).any(axis=1)
        return np.where(alone, d, constants(seen.shared, 1.0))

    effects: Sequence[np.ndarray] = Mapped(effect, sequences, errors)
    sign = sign_of(effects)
    if not sign:
        return [Effects("", Mapped(np.zeros_like, errors))]
    return [Effects("fewer tokens" if sign > 0 else "more tokens", effects)]


def _is_full(seen: Observed) -> bool:
    """Whether the reference of a sequence is known to be under all tokens."""
    return seen.support is not None and seen.support.is_full


def slope_of_alternatives(sequences: Sequences) -> float | None:
    """Returns the slope of recorded alternatives' log-probabilities on the exact ones,
    each less its mean over the alternatives of a position: the inverse temperature over
    that of the support. None where no position has two alternatives, or all are equal."""
    sums = [_alternatives(seen) for seen in sequences]
    product, square = (math.fsum(each[i] for each in sums) for i in (0, 1))
    return product / square if square else None


def _alternatives(seen: Observed) -> tuple[float, float]:
    """Returns two sums over a sequence's recorded alternatives, of exact times recorded
    log-probability and of the exact one squared; both are taken less their means over the
    alternatives of a position. Positions with fewer than two finite ones are left out; 0
    without any, and without exact values."""
    top, exact = seen.record.top_logprobs, seen.exact
    if top is None or exact is None or exact.top_logits is None or seen.support is None:
        return 0.0, 0.0
    both = np.isfinite(top) & np.isfinite(exact.top_logits)
    both &= (both.sum(axis=1) >= 2)[:, None]
    y, x = (
        _centred(top, both),
        _centred(exact.top_logits / seen.support.temperature, both),
    )
    return float((x * y).sum()), float((x * x).sum())


def _centred(values: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Returns values less their mean over the valid ones of a row, 0 where they are not
    valid; float64 [n, k]."""
    count = np.maximum(1, valid.sum(axis=1, keepdims=True))
    plain = np.where(valid, values, 0.0)
    return np.where(valid, plain - plain.sum(axis=1, keepdims=True) / count, 0.0)


def _chosen_slope(sequences: Sequences, errors: Errors) -> float | None:
    """Returns the inverse temperature, over the support's, at which exact
    log-probabilities of the chosen tokens are nearest to the recorded ones. None where
    that is an end of what can be tried, and where the supports' temperatures lie too far
    apart for that. The sequences, at least one, have exact values and a support."""

    def squares(log_beta: float) -> float:
        """Returns the squared error at an inverse temperature."""
        total = 0.0
        for seen, d in zip(sequences, errors, strict=True):
            assert seen.exact is not None
            assert seen.support is not None
            at = seen.support.temperature / math.exp(log_beta)
            effect = seen.exact.at_temperature(at) - seen.reference
            total += float(np.nansum((d - effect) ** 2))
        return total

    temperatures = [s.support.temperature for s in sequences if s.support is not None]
    low, high = math.log(max(temperatures) / 3.9), math.log(min(temperatures) / 0.26)
    if low >= high:  # they lie too far from each other
        return None
    tries = np.linspace(low, high, 23)
    best = int(np.argmin([squares(x) for x in tries]))
    if best in (0, len(tries) - 1):
        return None
    low, high = tries[best - 1], tries[best + 1]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(24):  # golden section: to 1e-6
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if squares(a) < squares(b) else (a, high)
    return math.exp((low + high) / 2)


def other_support(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effects of values renormalised over the tokens that a filter keeps: of
    the recorded kept tokens, where all sequences have them, and of every support whose
    mass is known of the first sequence, which all must have then. Where the references
    are themselves under a filter, that of all tokens in place of these. Empty where none
    applies. `sequences`: at least one."""
    tried: list[Effects] = []
    if all(s.exact is not None and s.exact.recorded_mass is not None for s in sequences):
        masses = [s.exact.recorded_mass for s in sequences if s.exact is not None]
        effects = [-m for m in masses if m is not None]
        tried.append(Effects("the recorded kept tokens", effects))
    first = sequences[0].exact
    for support in first.log_mass if first is not None else ():
        effects = [-s.exact.log_mass[support] for s in sequences if s.exact is not None]
        if all(map(_is_full, sequences)):
            tried.append(Effects(support.words.partition(", ")[2], effects))
        elif support == sequences[0].support:
            tried.append(Effects("all tokens", [-effect for effect in effects]))
    return tried


def padded_vocabulary(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effects of rows of padding with the logit 0 that count as tokens, for
    each number of rows that padding to a multiple of PADDINGS adds, ascending; 0 rows are
    left out. Empty where the size of the vocabulary is unknown, or a sequence has no
    exact values, or values under a filter. `sequences`: at least one."""
    size = sequences[0].vocabulary
    rows = {-size % multiple for multiple in PADDINGS} - {0} if size else set()
    tried = []
    for count in sorted(rows):
        effects = []
        for seen in sequences:
            if seen.exact is None or not _is_full(seen):
                return []
            partition = seen.exact.token_logits - seen.exact.at_temperature(1.0)
            effects.append(-np.log1p(count * np.exp(-partition)))
        tried.append(Effects(f"{count} rows", effects))
    return tried


def instead_of(name: str) -> Callable[[Sequences, Errors], Sequence[Effects]]:
    """Returns the function that gives the effects of the cause `name`, whose exact values
    were computed (`Observed.instead`), one for each of its doses that all sequences have.
    The function takes at least one sequence."""

    def find(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
        """Returns the effects by dose; a dose that a sequence lacks is left out."""
        doses = [dose for cause, dose in sequences[0].instead if cause == name]
        return [
            Effects(dose, [s.instead[name, dose] - s.reference for s in sequences])
            for dose in doses
            if all((name, dose) in s.instead for s in sequences)
        ]

    return find


def other_experts(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effect of the experts that were recorded, in place of those that the
    exact model chooses; its dose is the share that differs, which may be 0. Empty where a
    sequence has none that fit the model."""
    every = [s.rerouted for s in sequences if s.rerouted is not None]
    if len(every) < len(sequences):
        return []
    share = sum(each.other for each in every) / max(1, sum(e.recorded for e in every))
    effects = [e.values - s.reference for e, s in zip(every, sequences, strict=True)]
    return [Effects(percent(share), effects, predicted=[e.predicted for e in every])]


def stored_in_16_bits(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns one effect: where every recorded value that counts has no more significant
    bits than bfloat16, else than float16, what rounding to these errs, half a unit in the
    last place over the square root of 3, rms. Else an effect of 0."""
    for dose, bits in GRID_BITS.items():
        # As recorded: other causes may be undone in `values`
        if all(_is_cast(s.record.logprobs[s.counts], bits) for s in sequences):
            effects = [
                _spacing(s.record.logprobs, bits) / math.sqrt(12) for s in sequences
            ]
            counts = [int(seen.counts.sum()) for seen in sequences]
            return [Effects(dose, effects, counts=counts)]
    return [Effects("", [np.zeros_like(d) for d in errors])]


def not_repeatable(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the size by which one run of a side scatters, from the difference of two:
    that over the square root of 2. Empty where a sequence has no second run."""
    runs = [seen.again for seen in sequences if seen.again is not None]
    if len(runs) < len(sequences):
        return []
    effects = [
        (again - seen.record.logprobs) / math.sqrt(2)
        for seen, again in zip(sequences, runs, strict=True)
    ]
    counts = [
        int((np.isfinite(x) & np.isfinite(d)).sum())
        for x, d in zip(effects, errors, strict=True)
    ]
    return [Effects("", effects, counts=counts)]


def _spacing(values: np.ndarray, bits: int) -> np.ndarray:
    """Returns the distance between numbers of `bits` significant bits at each value, of
    any exponent, in the shape of `values`; NaN where a value is not finite. That at 0 is
    as at 1/2."""
    finite = np.where(np.isfinite(values), values, np.nan)
    exponent = np.frexp(np.abs(np.nan_to_num(finite)))[1]
    return np.asarray(np.ldexp(1.0, exponent - bits) + finite * 0)


def _is_cast(values: np.ndarray, bits: int) -> bool:
    """Whether all values have at most `bits` significant bits, with any exponent;
    infinity has. True without a value, False with NaN."""
    mantissa = np.frexp(values)[0] * 2.0**bits
    return bool((mantissa == np.rint(mantissa)).all())


def share_on_grid(
    tops: Iterable[np.ndarray], temperatures: Sequence[float] = (1.0,)
) -> float | None:
    """Returns the share of differences between alternatives of a position, each from the
    first, that are multiples of 2^-8 (to 0.005 of that) once they are multiplied by a
    temperature: logits in bfloat16 of size 1/2 and more give 1, float32's some 0.01. The
    largest over `temperatures`, at least one; None with fewer than FEWEST_TOKENS finite
    differences. `tops`: float64 [n, k] each, NaN where there is none."""
    every, on_it = 0, dict.fromkeys(temperatures, 0)
    for top in tops:
        differences = (top[:, 1:] - top[:, :1]).ravel()
        differences = differences[np.isfinite(differences)]
        every += len(differences)
        for t in temperatures:
            steps = differences * t / GRID
            on_it[t] += int((np.abs(steps - np.rint(steps)) < 0.005).sum())
    return None if every < FEWEST_TOKENS else max(on_it.values()) / every


def on_grid(sequences: Sequences, fmt: str) -> bool:
    """Whether the recorded alternatives say that logits are in a format of 16 bits: most
    of their differences, at the support's temperature or as they are, are multiples of
    the distance between its numbers at the smaller of the two exact logits. False with
    fewer than FEWEST_TOKENS differences. `fmt`: a key of GRID_BITS; another raises
    KeyError. `sequences`: at least one."""
    steps = [_steps(seen, GRID_BITS[fmt]) for seen in sequences]
    shares = []
    for of_side in zip(*steps, strict=True):
        values = np.concatenate(of_side)
        if len(values) < FEWEST_TOKENS:
            return False
        shares.append(float((np.abs(values - np.rint(values)) < ON_GRID).mean()))
    return max(shares) > CHANCE


def _steps(seen: Observed, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the differences of recorded alternatives from the first of a position, in
    units of the distance between numbers of so many bits, flat: as recorded, and times
    the support's temperature. Those that are not finite, or where an exact logit is 0,
    are left out. Empty without alternatives, exact logits or a support."""
    top, exact, support = seen.record.top_logprobs, seen.exact, seen.support
    if top is None or exact is None or exact.top_logits is None or support is None:
        return np.zeros(0), np.zeros(0)
    sizes = np.abs(exact.top_logits)
    smaller = np.minimum(sizes[:, 1:], sizes[:, :1])
    differences = top[:, 1:] - top[:, :1]
    finite = np.isfinite(differences) & (smaller > 0)
    plain = differences[finite] / _spacing(smaller[finite], bits)
    return plain, plain * support.temperature


def narrow_head(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effects of heads narrower than is meant, one for each format in which
    all sequences have such values; with all tokens counted where the alternatives lie on
    its grid."""
    tried = instead_of("narrow head")(sequences, errors)
    return [_with_grid(effects, sequences) for effects in tried]


def logits_in_16_bits(sequences: Sequences, errors: Errors) -> Sequence[Effects]:
    """Returns the effect of a head in the model's own format where a wider one is meant;
    with all tokens counted where the alternatives lie on its grid. Empty where a sequence
    has no such values, as where the head is meant to be like that."""
    tried = instead_of("logits in 16 bits")(sequences, errors)
    return [_with_grid(effects, sequences) for effects in tried]


def _with_grid(effects: Effects, sequences: Sequences) -> Effects:
    """Returns the effects of a head in the format that is their dose, with the tokens
    counted where recorded alternatives lie on its grid, else none."""
    is_on_grid = on_grid(sequences, effects.dose)
    counts = [int(seen.counts.sum()) * is_on_grid for seen in sequences]
    return effects._replace(counts=counts)


_INVENTED = CauseKind(
    "invented values",
    "{dose}: forced, appended or filled in, with a value that was not computed",
    invented,
    drops=True,
)
_STRUCTURAL = (
    CauseKind("shift", "values belong to the neighbouring token ({dose})", shifted,
              counted=True, stage=0),
    CauseKind("forced tokens", "tokens with the log-probability 0 count: forced, of the "
              "prompt or of a tool", forced, counted=True),
    _INVENTED,
    CauseKind("other base", "values are {dose}", other_base, stage=0),
)  # fmt: skip
_OF_THE_DISTRIBUTION = (
    CauseKind("temperature", "temperature {dose}", temperature, by_slope=True),
    CauseKind("truncated support", "normalised over {dose}", other_support,
              by_slope=True),
    CauseKind("padded vocabulary", "{dose} of padding count as tokens", padded_vocabulary,
              by_slope=True),
)  # fmt: skip
_OF_THE_MODEL = (
    CauseKind("stale weights", "weights of {dose}", instead_of("stale weights"),
              by_slope=True),
    CauseKind("window, cap or scale", "computed without {dose}",
              instead_of("window, cap or scale"), by_slope=True),
    CauseKind("packing", "sequences of a pack {dose}", instead_of("packing"),
              by_slope=True),
    CauseKind("routing of experts", "tokens go to other experts than the model's own "
              "({dose} of them)", other_experts, by_slope=True),
    CauseKind("adapter", "the adapter is {dose}", instead_of("adapter"), by_slope=True),
    CauseKind("quantised weights", "weights in {dose}", instead_of("quantised weights"),
              by_slope=True),
)  # fmt: skip
_OF_THE_FORMAT = (
    CauseKind("quantised cache", "keys and values in an {dose}",
              instead_of("quantised cache"), by_slope=True, in_part=True),
    CauseKind("narrow head", "a head in {dose}", narrow_head, by_slope=True,
              in_part=True),
    CauseKind("logits in 16 bits", "logits in {dose}, where a wider head is meant",
              logits_in_16_bits, is_size=True),
    CauseKind("not repeatable", "two runs of it differ as much: dropout, or other chance",
              not_repeatable, is_size=True),
    CauseKind("stored in 16 bits", "values stored, or a softmax computed, in {dose}",
              stored_in_16_bits, is_size=True),
)  # fmt: skip
SIDE_CAUSES = (
    *_STRUCTURAL, *_OF_THE_DISTRIBUTION, *_OF_THE_MODEL, *_OF_THE_FORMAT,
)  # fmt: skip
# Without a model, what one side is beside the other
PAIR_CAUSES = (
    *_STRUCTURAL,
    CauseKind("temperature", "temperature {dose} times the other side's, a filter on top "
              "of it not told apart", other_temperature, by_slope=True),
    CauseKind("truncated support", "normalised over {dose} than the other side",
              other_normalisation),
)  # fmt: skip
KINDS = {kind.name: kind for kind in SIDE_CAUSES}
PAIR_WORDS = {kind.name: kind.words for kind in PAIR_CAUSES}


def cause_rows(
    side: str, kind: CauseKind, sequences: Sequences, errors: Errors,
    noise: Sequence[float], before: int = 0,
) -> tuple[list[CauseRow], Effects] | None:  # fmt: skip
    """Returns the rows of a cause, one for each sequence, of the dose that leaves least
    squared error, and its effects; None where no dose of it can be tried. `noise`: by
    sequence the sum of the predicted error's square; `before`: how many causes are undone
    already."""
    tried = list(kind.find(sequences, errors))
    if not tried:
        return None
    effects = tried[0] if len(tried) == 1 else _best(kind, errors, tried)
    return _rows(side, kind, sequences, errors, noise, effects, before), effects


def _best(kind: CauseKind, errors: Errors, tried: Sequence[Effects]) -> Effects:
    """Returns that of `tried`, the effects of each dose of a cause, which leaves least
    squared error; the first of several. The sequences are gone through once for all
    doses: each may have to be read."""
    left: list[list[float]] = [[] for _ in tried]
    for i, d in enumerate(errors):
        for effects, of_dose in zip(tried, left, strict=True):
            of_dose.append(_squares(_changed(kind, d, effects.effects[i])[2]))
    sums = list(map(math.fsum, left))
    return tried[sums.index(min(sums))]


def _changed(
    kind: CauseKind, d: np.ndarray, effect: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns of the tokens of a sequence whose error in `d` is finite, float64 [tokens]
    each: the error, by how much undoing the cause `kind` changes it, and what is left
    (all of it, for a cause of `is_size`). A token that has no value once the cause is
    undone keeps its error, or is left 0 where the cause is known by such tokens
    (`counted`, `drops`)."""
    finite = np.isfinite(d)
    lost = d if kind.counted or kind.drops else 0.0  # of a token that has no value then
    change = np.where(np.isfinite(effect), effect, lost)[finite]
    return d[finite], change, d[finite] if kind.is_size else d[finite] - change


def _rows(
    side: str, kind: CauseKind, sequences: Sequences, errors: Errors,
    noise: Sequence[float], effects: Effects, stage: int,
) -> list[CauseRow]:  # fmt: skip
    """Returns the rows of a cause, one for each sequence, of the dose that has these
    `effects`. `noise`: by sequence the sum of the predicted error's square; `stage`: how
    many causes are undone already."""
    rows = []
    counts = effects.counts or [0] * len(sequences)
    tops = effects.alternatives or [(0.0, 0.0, 0.0)] * len(sequences)
    parts = zip(sequences, errors, effects.effects, noise, counts, tops, strict=True)
    for i, (seen, d, effect, square, count, top) in enumerate(parts):
        now, change, left = _changed(kind, d, effect)
        product = float((now * change).sum())
        noise_left = square * effects.scale**2
        if effects.predicted:
            noise_left = _squares(np.nan_to_num(effects.predicted[i][np.isfinite(d)]))
        rows.append(
            CauseRow(
                side=side,
                cause=kind.name,
                dose=effects.dose,
                sequence=seen.sequence,
                tokens=len(now),
                count=count,
                before=_squares(now),
                after=_squares(left),
                product=product,
                effect=_squares(change),
                noise=square,
                noise_left=noise_left,
                fitted=effects.fitted,
                top_product=top[0],
                top_square=top[1],
                top_other=top[2],
                stage=stage,
            )
        )
    return rows


def _squares(x: np.ndarray) -> float:
    """Returns the sum of squares of an array."""
    return float((x**2).sum())


def undone(errors: Errors, effects: Effects) -> Errors:
    """Returns the errors with a cause undone, computed when they are asked for; a token
    that has no value then has NaN, and counts no more."""
    return Mapped(np.subtract, errors, effects.effects)


class Decision(NamedTuple):
    """Whether a cause is named, by its rows."""

    named: bool
    cut: float  # the squared error over what undoing leaves; infinite for nothing left
    slope: SequenceEstimate | None = None


def decide(rows: Sequence[CauseRow]) -> Decision:
    """Returns whether the cause of these rows is named, how many times less squared error
    it leaves, and its slope. That is None where the decision needed none, or it is not
    finite. `rows`: at least one, all of one side and one cause, one for each sequence;
    nothing else is read. A side that errs as predicted, up to AT_PREDICTION, has no cause
    but those known by single tokens (`counted`). Raises KeyError for a cause that is none
    of KINDS."""
    kind = KINDS[rows[0].cause]
    before, after, effect, noise = (
        math.fsum(getattr(row, name) for row in rows)
        for name in ("before", "after", "effect", "noise")
    )
    tokens, count = sum(row.tokens for row in rows), sum(row.count for row in rows)
    cut = before / after if after else math.inf if before else 1.0
    if kind.counted:
        return Decision(count > 1, cut)
    if noise and before <= AT_PREDICTION**2 * noise:
        return Decision(False, cut)
    if kind.is_size:
        whole = count == tokens >= FEWEST_TOKENS and noise > 0
        explained = before <= AT_PREDICTION**2 * (noise + effect)
        return Decision(whole and explained, cut)
    if effect <= RESOLVED * noise or tokens < FEWEST_TOKENS:
        return Decision(False, cut)
    if kind.drops:
        return Decision(count >= FEWEST_DROPPED and cut >= TENFOLD, cut)
    slope = _slope(rows)
    of_tops = [_slope_of_alternatives(rows), _slope_of_the_other(rows)]
    tops = [each for each in of_tops if each is not None]
    if not all(_is_other(each, LEAST_TEMPERATURE) for each in tops):
        return Decision(False, cut, slope)
    if len({each.mean > 1 for each in tops}) > 1:
        return Decision(False, cut, slope)
    if cut > 1 and tops and all(map(_has_other_slope, tops)):
        return Decision(True, cut, slope)
    # A cut that one sequence alone makes says nothing: its slope may be 0.
    low = slope.low if slope is not None else None
    if cut >= TENFOLD and (low is None or low > 0):
        return Decision(True, cut, slope)
    if cut >= LEAST_CUT and low is not None and low > 0 and _takes_the_excess(rows):
        return Decision(True, cut, slope)
    # Without a prediction, two sound sides share noise with what is taken from both.
    by_slope = kind.by_slope and noise > 0 and not any(row.fitted for row in rows)
    size = before / (noise + effect)
    if by_slope and kind.in_part and 1 / AT_PREDICTION**2 <= size <= AT_PREDICTION**2:
        by_sign = count == tokens  # as the grid of a head's logits
        return Decision(by_sign or (cut >= LEAST_CUT and _is_far(slope)), cut, slope)
    by_slope = by_slope and cut >= LEAST_CUT and _is_one(slope)
    return Decision(by_slope and _excess(rows)[1] <= effect, cut, slope)


def _excess(rows: Sequence[CauseRow]) -> tuple[float, float]:
    """Returns by how much the squared error, summed over all rows, is above the predicted
    one, before the cause is undone and after, with what is predicted then. A number is
    below 0 where the error is less."""
    before, after, noise, left = (
        math.fsum(getattr(row, name) for row in rows)
        for name in ("before", "after", "noise", "noise_left")
    )
    return before - noise, after - left


def _takes_the_excess(rows: Sequence[CauseRow]) -> bool:
    """Whether what the squared error has above the predicted one is, once the cause is
    undone, at most a tenth of what it was; False where none is predicted."""
    before, after = _excess(rows)
    return any(row.noise for row in rows) and after <= before / TENFOLD


def _slope(rows: Sequence[CauseRow]) -> SequenceEstimate | None:
    """Returns the slope of the errors on the cause's effect, with its interval where
    there is one. None where the slope is not finite, as without an effect."""
    sums = [{"product": row.product, "effect": row.effect} for row in rows]
    return jackknife(sums, lambda s: s["product"] / s["effect"], CONFIDENCE)


def _slope_of_alternatives(rows: Sequence[CauseRow]) -> SequenceEstimate | None:
    """Returns the slope of the recorded alternatives on the exact ones, or on the other
    side's, with its interval where there is one; None where the slope is not finite, as
    without alternatives."""
    sums = [{"product": row.top_product, "square": row.top_square} for row in rows]
    return jackknife(sums, lambda s: s["product"] / s["square"], CONFIDENCE)


def _slope_of_the_other(rows: Sequence[CauseRow]) -> SequenceEstimate | None:
    """Returns the same slope where it is the other side's alternatives that err: what is
    erred in those that a slope is taken on lowers it, so that the true one lies between
    the two. None where they do not err, or it is not finite."""
    sums = [{"product": row.top_product, "square": row.top_other} for row in rows]
    if not any(each["square"] for each in sums):
        return None
    return jackknife(sums, lambda s: s["square"] / s["product"], CONFIDENCE)


def _is_other(slope: SequenceEstimate, least: float) -> bool:
    """Whether a slope of alternatives is off 1 by more than `least`."""
    return abs(slope.mean - 1) > least


def _has_other_slope(slope: SequenceEstimate) -> bool:
    """Whether the recorded alternatives have a slope on the exact ones that is off 1 by
    more than LEAST_TEMPERATURE and by FAR standard errors of its 99 % interval: another
    temperature, whatever else is wrong, since a filter or a constant adds the same to all
    alternatives of a position. False without an interval."""
    if slope.low is None or slope.high is None:
        return False
    half = (slope.high - slope.low) / 2
    return _is_other(slope, max(LEAST_TEMPERATURE, FAR / 2.576 * half))


def _is_one(slope: SequenceEstimate | None) -> bool:
    """Whether a slope's interval has 1 in it, or misses it by at most NEAR_ONE, and 0 is
    FAR standard errors below the slope. False without an interval."""
    if slope is None or slope.low is None or slope.high is None:
        return False
    return slope.low - NEAR_ONE <= 1 <= slope.high + NEAR_ONE and _is_far(slope)


def _is_far(slope: SequenceEstimate | None) -> bool:
    """Whether a slope lies more than FAR standard errors, by its 99 % interval, above 0;
    False without an interval."""
    if slope is None or slope.low is None or slope.high is None:
        return False
    # The half of a 99 % interval is 2.6 standard errors and more.
    return slope.mean > FAR / 2.576 * (slope.high - slope.low) / 2
