"""The metrics, each against its definition recomputed in plain Python, and what they must not do.

`definition` shares no code with numdev: it walks over elements one at a time, rounds with exact
fractions, sums with `math.fsum` and sorts with Python. numdev's own fp64 sums run over a few
hundred terms of one sign or of bounded cancellation, so both agree to well within 1e-9; every
deliberate error below is a thousand times larger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS, dtype_of, round_to
from numdev.kernels.reference import attend
from numdev.metrics.deviation import measure, measure_plain
from numdev.metrics.yardstick import Yardstick

TOLERANCE = 1e-9
# precision, smallest and largest exponent: written down here, not asked of numdev.formats
PARAMETERS = {"bfloat16": (8, -126, 127), "float16": (11, -14, 15), "float32": (24, -126, 127)}
nan, inf = math.nan, math.inf
EITHER = "either"
Cell = tuple[int, int, int]


# --- the definitions, element by element ---------------------------------------------------------


def spacing(x: float, name: str) -> Fraction:
    """The distance of neighbouring values of the format at |x|."""
    precision, emin, emax = PARAMETERS[name]
    exponent = emin if x == 0 else min(max(math.frexp(abs(x))[1] - 1, emin), emax)
    return Fraction(2) ** (exponent - precision + 1)


def nearest(x: float, name: str) -> float:
    """x rounded to the nearest value of the format, ties to even; infinite beyond its range."""
    if not math.isfinite(x):
        return x
    precision, _, emax = PARAMETERS[name]
    step = spacing(x, name)
    rounded = round(Fraction(x) / step) * step  # Python rounds halves to even
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** emax
    return math.copysign(inf, x) if abs(rounded) > largest else float(rounded)


def rms(values: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values)) if values else nan


def norm(values: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


def transport(a: list[float], b: list[float]) -> float:
    return math.fsum(abs(x - y) for x, y in zip(sorted(a), sorted(b), strict=True)) / len(a)


def ratio(a: float, b: float) -> float:
    return a / b if b else nan if a == 0 or math.isnan(a) else inf


class Head:
    """One head of an output, with everything it is measured against, as nested indexing."""

    def __init__(self, output: Tensor, y: Yardstick, head: int) -> None:
        self.name = y.format.name
        self.o, self.r, self.scale = (
            x[:, head].double().numpy() for x in (output, y.reference, y.term_scale)
        )
        self.empty = y.empty[:, head].numpy()
        self.baseline = None if y.baseline is None else y.baseline[:, head].double().numpy()
        self.unrounded = None if y.unrounded is None else y.unrounded[:, head].numpy()
        self.lse = None if y.lse is None else y.lse[:, head].numpy()
        self.seen = [c for c in np.ndindex(*self.o.shape) if not self.empty[c[:2]]]
        self.floor = {c: nearest(float(self.r[c]), self.name) for c in np.ndindex(*self.o.shape)}
        self.shown = [c for c in self.seen if math.isfinite(self.r[c])]
        self.usable = [c for c in self.shown if math.isfinite(self.o[c])]

    def errors(self, cells: list[Cell], x: Any, reference: Any) -> list[float]:
        return [float(x[c]) - float(reference[c]) for c in cells]


def definition(output: Tensor, y: Yardstick, head: int) -> dict[str, Any]:
    """Every metric of one head, straight from its definition."""
    h = Head(output, y, head)
    usable, r = h.usable, h.r
    error = h.errors(usable, h.o, r)
    on_grid = [c for c in h.shown if math.isfinite(h.floor[c])]
    u = 2.0 ** -PARAMETERS[h.name][0]
    least = u * rms([float(r[c]) for c in on_grid]) / math.sqrt(12)
    floor_rms = rms(h.errors(on_grid, h.floor, r))
    found = {
        "elements": len(usable),
        "empty_rows": int(h.empty.sum()),
        "nonfinite": sum(math.isfinite(h.o[c]) != math.isfinite(h.floor[c]) for c in h.seen),
        "max_abs": max(map(abs, error)),
        "mean_abs": math.fsum(map(abs, error)) / len(error),
        "rms": rms(error),
        "row_rel": row_rel(h),
        "rel": ratio(norm(error), norm([float(r[c]) for c in usable])),
        "max_ulp": max(
            abs(e) / spacing(h.scale[c], h.name) for e, c in zip(error, usable, strict=True)
        ),
        "floor_ratio": ratio(rms(error), max(floor_rms, least)),
        "w1": transport([h.o[c] for c in usable], [r[c] for c in usable]),
    }
    return {**found, **beside_baseline(h, rms(error)), **bias(h)}


def row_rel(h: Head) -> float:
    """Root mean square over rows of |error_i| / |term scale_i|."""
    rows = []
    for b, i in np.ndindex(*h.empty.shape):
        cells = [c for c in h.usable if c[:2] == (b, i)]
        size = norm([float(h.scale[c]) for c in cells])
        if size > 0:
            rows.append(norm(h.errors(cells, h.o, h.r)) / size)
    return rms(rows)


def beside_baseline(h: Head, error: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if h.unrounded is not None:
        cells = [c for c in h.shown if math.isfinite(h.unrounded[c])]
        found["precision_rms"] = rms(h.errors(cells, h.r, h.unrounded))
        found["precision_w1"] = transport([h.r[c] for c in cells], [h.unrounded[c] for c in cells])
    if h.baseline is None:
        return found
    plain = [c for c in h.shown if math.isfinite(h.baseline[c])]
    both = [c for c in h.usable if math.isfinite(h.baseline[c])]
    found["baseline_ratio"] = ratio(error, rms(h.errors(plain, h.baseline, h.r)))
    found["from_baseline_rms"] = rms(h.errors(both, h.o, h.baseline))
    found["from_baseline_w1"] = transport([h.o[c] for c in both], [h.baseline[c] for c in both])
    found["fa_rule"] = flash_attention_rule(h, both)
    if h.unrounded is not None:
        for metric, part in (("flash_vs_precision", "rms"), ("flash_vs_precision_w1", "w1")):
            found[metric] = ratio(found[f"from_baseline_{part}"], found[f"precision_{part}"])
    return found


def flash_attention_rule(h: Head, cells: list[Cell]) -> bool | str:
    """max|o - ref| <= 2 max|plain - ref| + 2 max|ref + 0.3 - 0.3 - ref|, ref cast to the format and
    the shifts computed in it. Whether PyTorch rounds the 0.3 to the format first depends on the
    device; where that decides, either answer is right."""
    cells = [c for c in cells if math.isfinite(h.floor[c])]
    verdicts = {rule_with_shift(h, cells, x) for x in (0.3, nearest(0.3, h.name))}
    return EITHER if len(verdicts) > 1 else verdicts.pop()


def rule_with_shift(h: Head, cells: list[Cell], shift: float) -> bool:
    allowance = 0.0
    for c in cells:
        up = nearest(float(np.float32(h.floor[c]) + np.float32(shift)), h.name)
        back = nearest(float(np.float32(up) - np.float32(shift)), h.name)
        allowance = max(allowance, abs(back - h.floor[c]))
    error = max(abs(float(h.o[c]) - h.floor[c]) for c in cells)
    plain = max(abs(float(h.baseline[c]) - h.floor[c]) for c in cells)
    return error <= 2 * plain + 2 * allowance


def repeats(h: Head, b: int, i: int) -> bool:
    """Whether an earlier sequence has the very same exact row at this place."""
    return any(
        all(h.r[e, i, d] == h.r[b, i, d] for d in range(h.r.shape[2]))
        and (h.lse is None or h.lse[e, i] == h.lse[b, i])
        for e in range(b)
    )


def bias(h: Head) -> dict[str, Any]:
    """Means over sequences of the signed difference from the floor, in ulps at the term scale."""
    cells = [c for c in h.usable if math.isfinite(h.floor[c]) and not repeats(h, *c[:2])]
    d = {
        c: float((Fraction(h.o[c]) - Fraction(h.floor[c])) / spacing(h.scale[c], h.name))
        for c in cells
    }
    sequences = sorted({c[0] for c in cells})
    signed = {c: d[c] * math.copysign(1, h.r[c]) if h.r[c] else 0.0 for c in cells}
    whole = [[x[c] for c in cells if c[0] == b] for b in sequences for x in (d,)]
    along = [[signed[c] for c in cells if c[0] == b] for b in sequences]
    features = [
        [[d[c] for c in cells if c[0] == b and c[2] == f] for b in sequences]
        for f in range(h.o.shape[2])
    ]
    members = [whole, along, *features]
    mean = [mean_of_means(m) for m in members]
    found: dict[str, Any] = {
        "sequences": len(sequences),
        "bias": mean[0],
        "bias_sign": mean[1],
        "bias_feature": max(mean[2:], key=abs),
    }
    if len(sequences) < 2:
        return {**found, "bias_t": None, "bias_p": None, "bias_size": None, "bias_of": None}
    costs = [4.0, 4.0, *[2.0 * len(features)] * len(features)]
    tested = [student(m) for m in members]
    p = [min(1.0, cost * q) for cost, (_, q) in zip(costs, tested, strict=True)]
    large = [i for i, x in enumerate(mean) if abs(x) >= 0.05] or range(len(members))
    pick = min(large, key=lambda i: (p[i], -abs(tested[i][0])))
    names = ["mean", "sign", *(f"feature {f}" for f in range(len(features)))]
    return {
        **found,
        "bias_t": tested[pick][0],
        "bias_p": p[pick],
        "bias_size": mean[pick],
        "bias_of": names[pick],
    }


def mean_of_means(sequences: list[list[float]]) -> float:
    means = [math.fsum(s) / len(s) for s in sequences if s]
    return math.fsum(means) / len(means) if means else 0.0


def student(sequences: list[list[float]]) -> tuple[float, float]:
    """t and two-sided p of the sequences' means against 0; a spread below half a step of a mean of
    that many elements counts as half a step."""
    means = [math.fsum(s) / len(s) for s in sequences if s]
    n = len(means)
    if n < 2:
        return mean_of_means(sequences), 1.0
    half_step = 0.5 / (sum(map(len, sequences)) / n)
    t = np.mean(means) / (max(np.std(means, ddof=1), half_step) / math.sqrt(n))
    return float(t), float(2 * stats.t.sf(abs(t), n - 1))


# --- comparing -----------------------------------------------------------------------------------


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of the metrics that are not as expected; None and a reason stand for NaN and inf."""
    wrong = [name for name in expected if not same(found, name, expected[name])]
    return wrong + sorted(found.keys() - expected.keys() - {"nulls"})


def same(found: dict[str, Any], name: str, expected: Any) -> bool:
    value = found.get(name)
    if expected is EITHER:
        return isinstance(value, bool)
    if expected is None or (isinstance(expected, float) and not math.isfinite(expected)):
        return value is None and bool(found["nulls"][name])
    if not isinstance(expected, float):
        return type(value) is type(expected) and value == expected
    return isinstance(value, float) and math.isclose(
        value, expected, rel_tol=TOLERANCE, abs_tol=1e-300 if expected else 1e-15
    )


def assert_as_defined(output: Tensor, y: Yardstick) -> None:
    found = measure(output, y).heads
    assert len(found) == output.shape[1]
    for head, metrics in enumerate(found):
        assert differences(metrics, definition(output, y, head)) == []


def yardstick(
    name: str = "bfloat16",
    shape: tuple[int, int, int, int] = (3, 2, 5, 4),
    *,
    seed: int = 0,
    empty: bool = True,
) -> Yardstick:
    """Random references, no attention involved; every third row of the first head is empty."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    reference = noise(1.0)
    hidden = torch.zeros(shape[:3], dtype=torch.bool)
    if empty and shape[2] > 1:
        hidden[:, 0, ::3] = True
    u = FORMATS[name].unit_roundoff
    return Yardstick(
        reference=reference,
        term_scale=reference.abs() + noise(1.0).abs(),
        empty=hidden,
        format=FORMATS[name],
        baseline=(reference + noise(3 * u)).to(dtype_of(FORMATS[name])),
        unrounded=reference + noise(2 * u),
    )


def output_for(y: Yardstick, *, errors: float = 2.0, seed: int = 1) -> Tensor:
    """The reference with random errors of about `errors` unit roundoffs, in the format."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(y.reference.shape, generator=g, dtype=torch.float64)
    return (y.reference + noise * errors * y.format.unit_roundoff).to(dtype_of(y.format))


def changed(y: Yardstick, **parts: Any) -> Yardstick:
    return dataclasses.replace(y, **parts)


# --- the oracle and the comparison themselves ----------------------------------------------------


def test_nearest_by_hand() -> None:
    """The oracle's rounding: bf16 steps of 2^-7 at 1, ties to even, infinity beyond the range."""
    assert nearest(1 + 2**-8, "bfloat16") == 1.0
    assert nearest(1 + 3 * 2**-8, "bfloat16") == 1 + 2**-6
    assert nearest(1 + 2**-8 + 2**-40, "bfloat16") == 1 + 2**-7
    assert nearest(65519.0, "float16") == 65504
    assert nearest(-65520.0, "float16") == -inf
    assert nearest(2.0**-25, "float16") == 0.0
    assert spacing(1.5, "bfloat16") == Fraction(1, 128)
    assert spacing(0.0, "float16") == Fraction(1, 2**24)


def test_comparison_rejects_every_wrong_metric() -> None:
    """A metric that is off by a millionth, of another type, or null is noticed, each one."""
    y = yardstick()
    output = output_for(y)
    right, expected = measure(output, y).heads[1], definition(output, y, 1)
    assert differences(right, expected) == []
    for name, value in right.items():
        if name == "nulls":
            continue
        wrong = value + "x" if isinstance(value, str) else (value or 1e-12) * (1 + 1e-6)
        assert differences({**right, name: wrong}, expected) == [name]
        assert differences({**right, name: None, "nulls": {}}, expected) == [name]
    assert differences({**right, "new": 1.0}, expected) == ["new"]


# --- every metric against its definition ---------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(
    "shape", [(3, 2, 5, 4), (1, 1, 1, 1), (9, 2, 6, 1), (2, 1, 1, 7), (8, 3, 2, 2)]
)
def test_every_metric_is_its_definition(name: str, shape: tuple[int, int, int, int]) -> None:
    """All metrics equal an element-by-element recomputation, in every format and odd shapes."""
    y = yardstick(name, shape)
    assert_as_defined(output_for(y), y)


@pytest.mark.parametrize("name", PARAMETERS)
def test_definitions_hold_with_holes(name: str) -> None:
    """The same with NaN and infinities in the output, the baseline and the references, also where
    whole rows and whole sequences are lost."""
    y = yardstick(name, (4, 2, 6, 3))
    output = output_for(y)
    for tensor, where in (
        (output, (0, 1, 2, 0)),
        (output, (1, 1, 3)),
        (output, (2, 1)),
        (y.baseline, (0, 1, 0)),
        (y.reference, (0, 1, 5)),
        (y.unrounded, (3, 1, 1)),
    ):
        assert tensor is not None
        tensor[where] = nan
    output[3, 1, 4, 1], output[3, 1, 5, 2] = inf, -inf
    # beyond float16: its floor is infinite, while the output and the baseline are not
    for tensor, value in (
        (y.reference, 7e4),
        (y.term_scale, 7e4),
        (output, 6e4),
        (y.baseline, 5e4),
    ):
        assert tensor is not None
        tensor[0, 1, 3, 1] = value
    assert_as_defined(output, y)


@pytest.mark.parametrize("with_lse", [True, False])
def test_definitions_hold_where_sequences_repeat_each_other(with_lse: bool) -> None:
    """Repeated rows enter every average, and only the bias leaves them out; where the log-sum-exp
    differs, equal results are no repetition."""
    y = yardstick(shape=(4, 2, 5, 3), empty=False)
    y.reference[2, :, :3] = y.reference[0, :, :3]
    y.reference[3] = y.reference[1]
    lse = torch.arange(40.0, dtype=torch.float64).view(4, 2, 5)
    lse[2, :, :2] = lse[0, :, :2]
    y = changed(y, lse=lse if with_lse else None)
    output = output_for(y)
    assert_as_defined(output, y)
    assert int(y.repeated.sum()) == (4 if with_lse else 16)
    assert measure(output, y).heads[0]["sequences"] == (4 if with_lse else 3)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(PARAMETERS)), st.integers(-12, 12))
def test_definitions_hold_at_any_size(seed: int, name: str, exponent: int) -> None:
    """Also for values far from 1, among float16's subnormals and close to its largest."""
    y = yardstick(name, (2, 1, 3, 2), seed=seed)
    factor = 2.0**exponent
    parts = {
        n: getattr(y, n) * factor for n in ("reference", "term_scale", "unrounded", "baseline")
    }
    y = changed(y, **parts)
    output = (y.reference * (1 + 2.0**-7)).to(dtype_of(y.format))
    assert_as_defined(output, y)


# --- the three rules -----------------------------------------------------------------------------


def test_fully_masked_rows_do_not_count() -> None:
    """Whatever an empty row holds (NaN included), no metric changes; they are counted apart."""
    y = yardstick()
    output = output_for(y)
    before = measure(output, y).heads
    assert [h["empty_rows"] for h in before] == [6, 0]
    assert [h["elements"] for h in before] == [3 * 3 * 4, 3 * 5 * 4]
    for garbage in (nan, inf, 1e30, 0.0):
        output[:, 0, ::3] = garbage
        assert measure(output, y).heads == before


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_nonfinite_elements_are_counted_and_not_averaged(bad: float) -> None:
    """An element that is not finite leaves every average as if it were not there."""
    y = yardstick(empty=False)
    output = output_for(y)
    output[0, 0, 2, 1] = bad
    first, second = measure(output, y).heads
    assert (first["nonfinite"], first["elements"]) == (1, 59)
    assert (second["nonfinite"], second["elements"]) == (0, 60)
    assert first["max_abs"] < 0.1
    # the same with that element hidden from the reference too: nothing but the count may differ
    reference = y.reference.clone()
    reference[0, 0, 2, 1] = nan
    hidden = measure(output, changed(y, reference=reference)).heads[0]
    assert hidden["nonfinite"] == 0  # the floor is not finite there either
    for metric in ("rms", "mean_abs", "row_rel", "w1", "max_ulp", "bias", "bias_t"):
        assert first[metric] == hidden[metric], metric


def test_an_output_that_is_all_nan_has_no_numbers() -> None:
    """Every number is null with the reason; the counts remain."""
    y = yardstick()
    head = measure(torch.full_like(output_for(y), nan), y).heads[1]
    assert (head["elements"], head["nonfinite"], head["sequences"]) == (0, 60, 0)
    numbers = head.keys() - {"elements", "nonfinite", "sequences", "empty_rows", "nulls"}
    assert all(head[n] is None for n in numbers)
    assert set(head["nulls"]) == numbers
    assert set(head["nulls"].values()) <= {
        "no finite element in a row that sees a key",
        "needs at least two sequences",
    }


def test_a_head_without_a_row_to_show_has_no_numbers() -> None:
    """A head all of whose rows are masked is not a perfect one."""
    y = yardstick()
    head = measure(output_for(y), changed(y, empty=torch.ones_like(y.empty))).heads[0]
    assert (head["elements"], head["nonfinite"], head["empty_rows"]) == (0, 0, 15)
    assert head["rms"] is None
    assert head["floor_ratio"] is None


def test_overflow_that_is_right_is_no_fault() -> None:
    """In float16 a reference of 70000 rounds to infinity: an infinite output is right there, and a
    finite one is the fault."""
    y = changed(yardstick("float16", (1, 1, 2, 2), empty=False), baseline=None)
    y.reference[0, 0, 0, 0] = 70000.0
    y.term_scale[0, 0, 0, 0] = 70000.0
    right = round_to(y.reference, y.format).half()
    assert right[0, 0, 0, 0] == inf
    head = measure(right, y).heads[0]
    assert (head["nonfinite"], head["elements"]) == (0, 3)
    assert head["floor_ratio"] == 1.0
    right[0, 0, 0, 0] = 65504.0
    head = measure(right, y).heads[0]
    assert (head["nonfinite"], head["elements"]) == (1, 4)
    assert head["max_abs"] == 70000 - 65504


def test_nan_in_the_reference_asks_for_nan() -> None:
    """Where the inputs make the truth NaN, a NaN is no fault and a number is one."""
    y = yardstick(empty=False)
    y.reference[0, 0, 0] = nan
    output = output_for(changed(y, reference=torch.nan_to_num(y.reference)))
    assert measure(output, y).heads[0]["nonfinite"] == 4
    output[0, 0, 0] = nan
    assert measure(output, y).heads[0]["nonfinite"] == 0


# --- ratios that mean nothing --------------------------------------------------------------------


def test_no_cost_of_precision_means_no_ratio_to_it() -> None:
    """Inputs that rounding leaves alone give precision 0 and no flash_vs_precision."""
    y = yardstick()
    head = measure(output_for(y), changed(y, unrounded=y.reference)).heads[1]
    assert head["precision_rms"] == 0
    for metric in ("flash_vs_precision", "flash_vs_precision_w1"):
        assert head[metric] is None
        assert head["nulls"][metric] == "rounding the inputs to this format changes nothing"
    assert head["from_baseline_rms"] > 0


def test_a_perfect_baseline_is_no_denominator() -> None:
    """baseline_ratio is null with a reason, and the absolute number stands."""
    y = yardstick()
    exact = changed(y, baseline=y.reference)
    head = measure(output_for(y), exact).heads[1]
    assert head["baseline_ratio"] is None
    assert head["nulls"]["baseline_ratio"] == "the denominator is zero"
    assert head["rms"] > 0
    both = measure(y.reference.clone(), exact).heads[1]
    assert both["nulls"]["baseline_ratio"] == "0/0"


def test_relative_error_of_what_cancels_is_undefined() -> None:
    """Where the reference is lost in its term scale, `rel` is null with the reason."""
    y = yardstick()
    tiny = y.reference * 1e-4
    lost = changed(y, reference=tiny, term_scale=torch.ones_like(tiny), baseline=None)
    head = measure(tiny.bfloat16(), lost).heads[1]
    assert head["rel"] is None
    assert head["nulls"]["rel"] == "the reference is lost in its term scale"
    assert head["rms"] > 0
    held = changed(lost, term_scale=tiny.abs())
    assert measure(tiny.bfloat16(), held).heads[1]["rel"] == pytest.approx(2**-9, rel=0.5)


def test_a_reference_of_zeros_has_no_floor() -> None:
    """floor_ratio and rel are null; an output of zeros is right and one of ones is off by 1."""
    y = yardstick(empty=False)
    zero = changed(y, reference=torch.zeros_like(y.reference), baseline=None, unrounded=None)
    right, wrong = (measure(torch.full_like(output_for(y), x), zero).heads[0] for x in (0.0, 1.0))
    assert (right["max_abs"], right["floor_ratio"], right["rel"]) == (0.0, None, None)
    assert (wrong["max_abs"], wrong["floor_ratio"], wrong["rel"]) == (1.0, None, None)


def test_one_sequence_says_nothing_of_bias() -> None:
    """With one sequence the size stands and the statistic is null with a reason."""
    y = yardstick(shape=(1, 1, 5, 4), empty=False)
    head = measure(output_for(y), y).heads[0]
    assert head["sequences"] == 1
    assert isinstance(head["bias"], float)
    for metric in ("bias_t", "bias_p", "bias_size", "bias_of"):
        assert head[metric] is None
        assert head["nulls"][metric] == "needs at least two sequences"


def test_without_a_baseline_nothing_is_set_beside_it() -> None:
    """No baseline, no baseline metric; the rest is the same."""
    y = yardstick()
    output = output_for(y)
    with_it, without = (
        measure(output, y).heads[1],
        measure(output, changed(y, baseline=None)).heads[1],
    )
    missing = with_it.keys() - without.keys()
    assert missing == {
        "baseline_ratio",
        "from_baseline_rms",
        "from_baseline_w1",
        "fa_rule",
        "flash_vs_precision",
        "flash_vs_precision_w1",
    }
    assert all(with_it[k] == without[k] for k in without)


# --- the floor -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_floor_is_its_own_unit(name: str) -> None:
    """The reference rounded once: floor_ratio 1, at most half an ulp off, no bias, nothing lost."""
    y = yardstick(name, (8, 2, 16, 8))
    for head in measure(y.floor, y).heads:
        assert head["floor_ratio"] == pytest.approx(1.0, rel=1e-12)
        assert head["max_ulp"] <= 0.5
        assert (head["bias"], head["bias_sign"], head["bias_feature"]) == (0.0, 0.0, 0.0)
        assert (head["bias_t"], head["bias_p"], head["nonfinite"]) == (0.0, 1.0, 0)
        assert head["fa_rule"] is True


def test_representable_values_leave_a_floor_to_divide_by() -> None:
    """V = 1: the truth is 1, its floor errs by 0, and floor_ratio stays a number in units of
    u / sqrt(12)."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 1, 6, 8, generator=g) for _ in range(2))
    case = case_of(q, k, torch.ones(2, 1, 6, 1)).rounded_to(FORMATS["bfloat16"])
    exact = attend(case)
    # fp64 division leaves at most an ulp of 2^-52: 1e-15 of bf16's own 2^-7
    assert (exact.out - 1).abs().max() < 1e-15
    y = changed(
        yardstick(shape=(2, 1, 6, 1), empty=False),
        reference=torch.ones_like(exact.out),
        term_scale=torch.ones_like(exact.out),
        baseline=None,
        unrounded=None,
    )
    perfect, off = (measure(torch.full((2, 1, 6, 1), x), y).heads[0] for x in (1.0, 1 + 2.0**-7))
    assert perfect["floor_ratio"] == 0.0
    assert off["floor_ratio"] == pytest.approx(2.0**-7 / (2.0**-8 / math.sqrt(12)), rel=1e-12)
    assert off["max_ulp"] == 1.0


def test_an_output_in_another_format_gets_that_formats_floor() -> None:
    """A kernel that returns fp32 for bf16 inputs is held to fp32's floor, not to bf16's."""
    y = yardstick("bfloat16", empty=False)
    rounded = round_to(y.reference, FORMATS["bfloat16"]).float()
    as_bf16 = measure(rounded, y).heads[0]
    as_fp32 = measure(rounded, y.for_format(FORMATS["float32"])).heads[0]
    assert as_bf16["floor_ratio"] == pytest.approx(1.0)
    assert as_fp32["floor_ratio"] > 1e4  # 2^16 times the spacing
    assert as_fp32["max_ulp"] > 1e4
    assert_as_defined(rounded, y.for_format(FORMATS["float32"]))
    assert y.for_format(FORMATS["bfloat16"]) is y


# --- the pooling ---------------------------------------------------------------------------------


def test_a_fault_stays_in_its_head() -> None:
    """With grouped heads, metrics are per query head: a fault in one leaves the others alone."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, 5, 8, generator=g)
    k, v = (torch.randn(2, 2, 5, 8, generator=g) for _ in range(2))
    case = case_of(q, k, v).rounded_to(FORMATS["float16"])
    exact = attend(case)
    y = Yardstick(
        reference=exact.out,
        term_scale=exact.term_scale,
        empty=exact.empty,
        format=FORMATS["float16"],
    )
    output = y.floor.clone()
    clean = measure(output, y).heads
    assert len(clean) == 6
    output[:, 4] *= 1.01
    hurt = measure(output, y).heads
    assert [h["floor_ratio"] > 2 for h in hurt] == [False] * 4 + [True, False]
    assert [a == b for a, b in zip(clean, hurt, strict=True)] == [True] * 4 + [False, True]


def test_the_batch_is_pooled() -> None:
    """Squares add over the batch, the max is the larger one, counts add."""
    y = yardstick(shape=(2, 1, 4, 3), empty=False)
    output = output_for(y)
    parts = ("reference", "term_scale", "empty", "baseline", "unrounded")
    halves = [
        measure(
            output[i : i + 1], changed(y, **{n: getattr(y, n)[i : i + 1] for n in parts})
        ).heads[0]
        for i in range(2)
    ]
    whole = measure(output, y).heads[0]
    assert whole["rms"] ** 2 == pytest.approx(sum(h["rms"] ** 2 for h in halves) / 2)
    assert whole["row_rel"] ** 2 == pytest.approx(sum(h["row_rel"] ** 2 for h in halves) / 2)
    assert whole["mean_abs"] == pytest.approx(sum(h["mean_abs"] for h in halves) / 2)
    assert whole["max_abs"] == max(h["max_abs"] for h in halves)
    assert whole["elements"] == sum(h["elements"] for h in halves)


# --- single metrics: what they are blind to and what not -----------------------------------------


def test_w1_is_blind_to_order_and_the_paired_metrics_are_not() -> None:
    """The rows of the answer in another order: W1 of 0, and an rms as large as the values."""
    y = yardstick("float32", shape=(1, 1, 6, 4), empty=False)
    exact = y.floor
    y = changed(y, reference=exact)
    head = measure(exact.flip(2), y).heads[0]
    assert head["w1"] == 0.0
    assert head["rms"] > 0.5


def test_w1_ignores_what_is_left_out() -> None:
    """Hidden rows do not dilute it: half the rows hidden, the same distance in the others."""
    y = changed(yardstick("float32", shape=(1, 1, 8, 4), empty=False), baseline=None)
    output = (y.reference + 0.25).float()
    before = measure(output, y).heads[0]["w1"]
    hidden = y.empty.clone()
    hidden[:, :, ::2] = True
    after = measure(output, changed(y, empty=hidden)).heads[0]["w1"]
    assert before == pytest.approx(0.25, rel=1e-6)
    assert after == pytest.approx(0.25, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_known_inequalities(seed: int) -> None:
    """w1 <= mean_abs <= rms <= max_abs, whatever the output."""
    y = yardstick(seed=seed)
    for head in measure(output_for(y, errors=10.0, seed=seed), y).heads:
        slack = 1 + 1e-12
        assert head["w1"] <= head["mean_abs"] * slack
        assert head["mean_abs"] <= head["rms"] * slack
        assert head["rms"] <= head["max_abs"] * slack


def test_row_rel_weighs_rows_alike() -> None:
    """A row with values a thousand times larger does not drown the others, as it does in rms."""
    y = yardstick("float32", shape=(1, 1, 4, 4), empty=False)
    factor = torch.tensor([1000.0, 1.0, 1.0, 1.0], dtype=torch.float64)[None, None, :, None]
    y = changed(y, reference=y.reference * factor, term_scale=y.term_scale * factor)
    wrong_small = y.reference.clone()
    wrong_small[:, :, 1:] *= 1.01
    wrong_large = y.reference.clone()
    wrong_large[:, :, :1] *= 1.01
    small, large = (measure(x, y).heads[0] for x in (wrong_small, wrong_large))
    assert small["rms"] < large["rms"] / 100
    assert small["row_rel"] > large["row_rel"]


def test_ulps_are_those_of_the_term_scale() -> None:
    """An element that cancels to nearly 0 does not make a common error look infinite."""
    y = yardstick(shape=(1, 1, 1, 1), empty=False)
    reference = torch.full_like(y.reference, 1e-20)
    y = changed(y, reference=reference, term_scale=torch.full_like(reference, 1.5), baseline=None)
    head = measure(torch.full((1, 1, 1, 1), 2.0**-8).bfloat16(), y).heads[0]
    assert head["max_ulp"] == pytest.approx(0.5)


def test_flash_attentions_rule_at_its_edge() -> None:
    """Twice the baseline's error plus the allowance still passes, the next number up does not."""
    y = yardstick("float32", shape=(1, 1, 1, 3), empty=False)
    exact = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 1, 1, 3)
    plain = exact.float().clone()
    plain[..., 0] += 2.0**-10
    y = changed(y, reference=exact, baseline=plain, unrounded=None)
    # In float32, x + 0.3 - 0.3 misses x by: 1.3 has spacing 2^-23; 0.3's own has 2^-25.
    shifts = [np.float32(x) + np.float32(0.3) - np.float32(0.3) - np.float32(x) for x in (1, 2, 4)]
    limit = 2 * 2.0**-10 + 2 * max(abs(float(s)) for s in shifts)
    output = exact.clone()
    output[..., 1] = 2.0 + limit
    assert measure(output, y).heads[0]["fa_rule"] is True
    output[..., 1] = 2.0 + limit * (1 + 1e-9)
    assert measure(output, y).heads[0]["fa_rule"] is False


def test_measuring_changes_nothing() -> None:
    """The output and the yardstick come out as they went in, and measuring again gives the same."""
    y = yardstick()
    output = output_for(y)
    output[0, 1, 0, 0] = nan
    tensors = [output, y.reference, y.term_scale, y.baseline, y.unrounded]
    before = [x.clone() for x in tensors if x is not None]
    first = measure(output, y).heads
    assert measure(output, changed(y)).heads == first
    for a, b in zip(before, tensors, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# --- distances alone -----------------------------------------------------------------------------


def test_log_sum_exp_is_measured_plainly() -> None:
    """Absolute errors over visible rows, in the units of the values; nothing about floors."""
    reference = torch.tensor([[[1.0, 2.0, -inf, 4.0]]], dtype=torch.float64)
    empty = torch.tensor([[[False, False, True, False]]])
    output = torch.tensor([[[1.5, 2.0, 99.0, 3.0]]])
    (head,) = measure_plain(output, reference, empty).heads
    assert head == {
        "elements": 3,
        "empty_rows": 1,
        "nonfinite": 0,
        "max_abs": 1.0,
        "mean_abs": 0.5,
        "rms": pytest.approx(math.sqrt(1.25 / 3)),
        "rel": pytest.approx(math.sqrt(1.25 / 21)),
        "w1": pytest.approx(0.5),
        "nulls": {},
    }


def test_log_sum_exp_that_is_not_finite_is_counted() -> None:
    """-inf where the reference has a number is a fault, and is not averaged."""
    reference = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64)
    empty = torch.zeros(1, 1, 2, dtype=torch.bool)
    (head,) = measure_plain(torch.tensor([[[-inf, 2.0]]]), reference, empty).heads
    assert (head["nonfinite"], head["elements"], head["max_abs"]) == (1, 1, 0.0)
    (none,) = measure_plain(torch.full((1, 1, 2), nan), reference, empty).heads
    assert (none["nonfinite"], none["elements"], none["rms"]) == (2, 0, None)
    assert none["nulls"]["rms"] == "no finite element in a row that sees a key"


# --- helpers -------------------------------------------------------------------------------------


def case_of(q: Tensor, k: Tensor, v: Tensor) -> AttentionCase:
    return AttentionCase(ref=CaseRef(case="test"), q=q, k=k, v=v, scale=q.shape[-1] ** -0.5)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """No metric may divide by zero aloud."""
    with np.errstate(all="raise", under="ignore"):
        yield
