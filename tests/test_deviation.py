"""The metrics, each against its definition recomputed with numpy, and what they must not
do.

`definition` shares no code with numdev: gfloat rounds, scipy has Student's t, and
repeated rows are found by loops. Sums of a few hundred fp64 terms agree to 1e-9; every
deliberate error below is a thousand times larger."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import gfloat
import numpy as np
import pytest
import torch
from oracles import to_cuda
from scipy import stats
from test_formats import GFLOAT
from torch import Tensor

from numdev.formats import FORMATS, dtype_of, round_to
from numdev.metrics.deviation import measure
from numdev.metrics.yardstick import Yardstick

TOLERANCE = 1e-9
# precision, smallest and largest exponent: written down here, not asked of numdev.formats
PARAMETERS = {
    "bfloat16": (8, -126, 127),
    "float16": (11, -14, 15),
    "float32": (24, -126, 127),
}
nan, inf = math.nan, math.inf
EITHER = "either"


# --- the definitions ------------------------------------------------------------------


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gfloat.round_ndarray(GFLOAT[name], np.asarray(x, dtype=np.float64))


def spacing(x: np.ndarray, name: str) -> np.ndarray:
    """The distance of neighbouring values of the format at |x|."""
    precision, emin, emax = PARAMETERS[name]
    exponent = np.where(x == 0, emin, np.clip(np.frexp(np.abs(x))[1] - 1, emin, emax))
    return np.ldexp(1.0, exponent - precision + 1)


def rms(x: np.ndarray) -> float:
    return math.sqrt(np.mean(x * x)) if x.size else nan


def ratio(a: float, b: float) -> float:
    return a / b if b else nan if a == 0 or math.isnan(a) else inf


def definition(output: Tensor, y: Yardstick, head: int) -> dict[str, Any]:
    """Every metric of one head, straight from its definition."""

    def of(x: Tensor | None) -> Any:
        return None if x is None else x[:, head].double().numpy()

    name, norm = y.format.name, np.linalg.norm
    o, r, terms, plain, unrounded, wide = map(
        of, (output, y.reference, y.term_scale, y.baseline, y.unrounded, y.baseline_fp32)
    )
    empty, floor = y.empty[:, head].numpy(), nearest(r, name)
    seen = np.broadcast_to(~empty[..., None], o.shape)
    shown = seen & np.isfinite(r)
    usable, on_grid = shown & np.isfinite(o), shown & np.isfinite(floor)
    e = np.where(usable, o - np.where(usable, r, 0), 0)
    error, true = e[usable], r[usable]
    least = 2.0 ** -PARAMETERS[name][0] * rms(r[on_grid]) / math.sqrt(12)
    sizes = norm(np.where(usable, terms, 0), axis=-1)
    rows = norm(e, axis=-1)[sizes > 0] / sizes[sizes > 0]
    result: dict[str, Any] = {
        "elements": int(usable.sum()),
        "empty_rows": int(empty.sum()),
        "nonfinite": int((np.isfinite(o) != np.isfinite(floor))[seen].sum()),
        "max_abs": float(np.abs(error).max()),
        "mean_abs": float(np.abs(error).mean()),
        "rms": rms(error),
        "row_rel": rms(rows),
        "rel": ratio(norm(error), norm(true)),
        "max_ulp": float((np.abs(error) / spacing(terms, name)[usable]).max()),
        "floor_ratio": ratio(rms(error), max(rms((floor - r)[on_grid]), least)),
    }
    if unrounded is not None:
        at = shown & np.isfinite(unrounded)
        result["precision_rms"] = rms((r - unrounded)[at])
    if plain is not None:
        at, both = shown & np.isfinite(plain), usable & np.isfinite(plain)
        result["baseline_ratio"] = ratio(rms(error), rms((plain - r)[at]))
        result["from_baseline_rms"] = rms((o - plain)[both])
        result["fa_rule"] = flash_attention_rule(
            o, plain, floor, both & np.isfinite(floor), name
        )
        if unrounded is not None:
            result["flash_vs_precision"] = ratio(
                result["from_baseline_rms"], result["precision_rms"]
            )
        if wide is not None:
            result["low_precision_rms"] = cost = rms(
                (plain - wide)[at & np.isfinite(wide)]
            )
            result["flash_vs_low_precision"] = ratio(result["from_baseline_rms"], cost)
    lse = None if y.lse is None else of(y.lse)
    return {
        **result,
        **bias(np.where(usable, o, nan), r, floor, spacing(terms, name), lse),
    }


def flash_attention_rule(
    o: Any, plain: Any, floor: Any, at: Any, name: str
) -> bool | str:
    """max|o - ref| <= 2 max|plain - ref| + 2 max|ref + 0.3 - 0.3 - ref|, in the format.
    Whether 0.3 is rounded first depends on the device; where that decides, either answer
    is right."""
    o, plain, floor = o[at], plain[at], floor[at]
    verdicts = set()
    for shift in (0.3, float(nearest(np.array(0.3), name))):
        up = nearest(floor.astype(np.float32) + np.float32(shift), name)
        back = nearest(up.astype(np.float32) - np.float32(shift), name)
        allowed = 2 * np.abs(plain - floor).max() + 2 * np.abs(back - floor).max()
        verdicts.add(bool(np.abs(o - floor).max() <= allowed))
    return EITHER if len(verdicts) > 1 else verdicts.pop()


def bias(o: Any, r: Any, floor: Any, ulp: Any, lse: Any) -> dict[str, Any]:
    """Means over sequences of the difference from the floor in ulps, without repeated
    rows."""
    d = (
        np.where(np.isfinite(floor), o - np.where(np.isfinite(floor), floor, 0), nan)
        / ulp
    )
    for b, i in np.ndindex(*r.shape[:2]):
        same = [np.array_equal(r[a, i], r[b, i]) for a in range(b)]
        alike = [lse is None or lse[a, i] == lse[b, i] for a in range(b)]
        if any(s and t for s, t in zip(same, alike, strict=True)):
            d[b, i] = nan
    features = d.shape[2]
    members = [d, d * np.sign(r), *(d[..., f : f + 1] for f in range(features))]
    means = [
        [x[~np.isnan(x)].mean() for x in m if not np.isnan(x).all()] for m in members
    ]
    mean = [float(np.mean(m)) if m else 0.0 for m in means]
    result: dict[str, Any] = {
        "sequences": len(means[0]),
        "bias": mean[0],
        "bias_sign": mean[1],
    }
    result["bias_feature"] = max(mean[2:], key=abs)
    if len(means[0]) < 2:
        return {**result, **dict.fromkeys(("bias_t", "bias_p", "bias_size", "bias_of"))}
    costs = [4.0, 4.0, *[2.0 * features] * features]
    tested = [student(x, m) for x, m in zip(means, members, strict=True)]
    p = [min(1.0, cost * q) for cost, (_, q) in zip(costs, tested, strict=True)]
    large = [i for i, x in enumerate(mean) if abs(x) >= 0.05] or range(len(members))
    pick = min(large, key=lambda i: (p[i], -abs(tested[i][0])))
    names = ["mean", "sign", *(f"feature {f}" for f in range(features))]
    result |= {"bias_t": tested[pick][0], "bias_p": p[pick], "bias_size": mean[pick]}
    return {**result, "bias_of": names[pick]}


def student(means: list[float], member: np.ndarray) -> tuple[float, float]:
    """t and two-sided p of the means against 0; the spread is at least half a step of a
    mean."""
    n = len(means)
    if n < 2:
        return (means[0] if means else 0.0), 1.0
    half_step = 0.5 / (int((~np.isnan(member)).sum()) / n)
    t = np.mean(means) / (max(np.std(means, ddof=1), half_step) / math.sqrt(n))
    return float(t), float(2 * stats.t.sf(abs(t), n - 1))


# --- comparing ------------------------------------------------------------------------


def assert_as_defined(output: Tensor, y: Yardstick) -> None:
    """Of every head; None and a reason stand for NaN and infinity."""
    result = measure(output, y).heads
    assert len(result) == output.shape[1]
    for head, metrics in enumerate(result):
        expected = definition(output, y, head)
        assert metrics.keys() == expected.keys() | {"nulls"}
        for name, x in expected.items():
            if x is EITHER:
                assert isinstance(metrics[name], bool)
            elif x is None or (isinstance(x, float) and not math.isfinite(x)):
                assert metrics[name] is None, name
                assert metrics["nulls"][name]
            elif isinstance(x, float):
                assert type(metrics[name]) is float, name
                near = pytest.approx(x, rel=TOLERANCE, abs=1e-300 if x else 1e-15)
                assert metrics[name] == near, name
            else:
                assert (type(metrics[name]), metrics[name]) == (type(x), x), name


def yardstick(
    name: str = "bfloat16", shape: tuple[int, int, int, int] = (3, 2, 5, 4), *, seed: int = 0,
    empty: bool = True,
) -> Yardstick:  # fmt: skip
    """Random references, no attention involved; every third row of the first head is
    empty."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    reference = noise(1.0)
    hidden = torch.zeros(shape[:3], dtype=torch.bool)
    if empty and shape[2] > 1:
        hidden[:, 0, ::3] = True
    u = FORMATS[name].unit_roundoff
    return Yardstick(
        reference=reference, term_scale=reference.abs() + noise(1.0).abs(), empty=hidden,
        format=FORMATS[name], baseline=(reference + noise(3 * u)).to(dtype_of(FORMATS[name])),
        unrounded=reference + noise(2 * u), baseline_fp32=(reference + noise(u)).float(),
    )  # fmt: skip


def output_for(y: Yardstick, *, errors: float = 2.0, seed: int = 1) -> Tensor:
    """The reference with random errors of about `errors` unit roundoffs, in the
    format."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(y.reference.shape, generator=g, dtype=torch.float64)
    return (y.reference + noise * errors * y.format.unit_roundoff).to(dtype_of(y.format))


def changed(y: Yardstick, **parts: Any) -> Yardstick:
    return dataclasses.replace(y, **parts)


# --- every metric against its definition ----------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(
    "shape", [(3, 2, 5, 4), (1, 1, 1, 1), (9, 2, 6, 1), (2, 1, 1, 7), (8, 3, 2, 2)]
)
def test_every_metric_is_its_definition(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    """All metrics, in every format and odd shapes, of an output and of the floor itself,
    with rows that see no key and without."""
    for y in (yardstick(name, shape), yardstick(name, shape, empty=False)):
        assert_as_defined(output_for(y), y)
        assert_as_defined(y.floor, y)


@pytest.mark.parametrize("name", PARAMETERS)
def test_definitions_hold_with_holes(name: str) -> None:
    """With NaN and infinities in output, baseline and references, in whole rows and
    sequences too, and beyond float16, where the floor alone is infinite."""
    y = yardstick(name, (4, 2, 6, 3))
    output = output_for(y)
    holes = {(0, 1, 2, 0): output, (1, 1, 3): output, (2, 1): output}
    for where, x in (*holes.items(), ((0, 1, 0), y.baseline), ((0, 1, 5), y.reference),
                     ((0, 1, 4), y.baseline_fp32)):  # fmt: skip
        x[where] = nan
    y.unrounded[3, 1, 1] = nan
    output[3, 1, 4, 1], output[3, 1, 5, 2] = inf, -inf
    for x, value in (
        (y.reference, 7e4),
        (y.term_scale, 7e4),
        (output, 6e4),
        (y.baseline, 5e4),
    ):
        x[0, 1, 3, 1] = value
    assert_as_defined(output, y)
    assert_as_defined(y.floor, y)


@pytest.mark.parametrize("with_lse", [True, False])
def test_definitions_hold_where_sequences_repeat_each_other(with_lse: bool) -> None:
    """Only the bias leaves repeated rows out; those of another log-sum-exp are none."""
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


# --- what does not count, and what is no number ---------------------------------------


def test_fully_masked_rows_do_not_count() -> None:
    """Whatever they hold; they are counted apart, and no perfect head is made of them."""
    y = yardstick()
    output = output_for(y)
    before = measure(output, y).heads
    assert [(h["empty_rows"], h["elements"]) for h in before] == [(6, 36), (0, 60)]
    for garbage in (nan, inf, 1e30):
        output[:, 0, ::3] = garbage
        assert measure(output, y).heads == before
    head = measure(output, changed(y, empty=torch.ones_like(y.empty))).heads[0]
    assert (head["elements"], head["nonfinite"], head["empty_rows"]) == (0, 0, 15)
    assert (head["rms"], head["floor_ratio"]) == (None, None)


def test_overflow_that_is_right_is_no_fault() -> None:
    """Where float16's floor is infinite a finite output is wrong; where it is NaN, a
    number."""
    y = changed(yardstick("float16", (1, 1, 2, 2), empty=False), baseline=None)
    for value, wrong in ((70000.0, 65504.0), (nan, 1.0)):
        y.reference[0, 0, 0, 0] = y.term_scale[0, 0, 0, 0] = value
        right = round_to(changed(y).reference, y.format).half()
        head = measure(right, changed(y)).heads[0]
        assert (head["nonfinite"], head["elements"], head["floor_ratio"]) == (0, 3, 1.0)
        right[0, 0, 0, 0] = wrong
        assert measure(right, changed(y)).heads[0]["nonfinite"] == 1


def test_relative_error_of_what_cancels_is_undefined() -> None:
    """`rel` is null where the norm of the reference is at most u times that of its
    terms."""
    y = changed(yardstick(empty=False), baseline=None)
    for size, lost in (
        (1e-4, True),
        (0.9 * 2.0**-8, True),
        (1.1 * 2.0**-8, False),
        (0.05, False),
    ):
        r = y.term_scale * size
        head = measure((r * 1.01).bfloat16(), changed(y, reference=r)).heads[1]
        assert (head["rel"] is None) == lost
        assert head["rms"] > 0
        assert (
            not lost or head["nulls"]["rel"] == "the reference is lost in its term scale"
        )


# --- single metrics -------------------------------------------------------------------


def test_representable_values_leave_a_floor_to_divide_by() -> None:
    """V = 1: the truth is 1, its floor errs by 0, and floor_ratio is in units of u /
    sqrt(12)."""
    y = yardstick(shape=(2, 1, 6, 1), empty=False)
    one = torch.ones_like(y.reference)
    y = changed(y, reference=one, term_scale=one, baseline=None, unrounded=None)
    perfect, off = (
        measure(torch.full((2, 1, 6, 1), x), y).heads[0] for x in (1.0, 1 + 2.0**-7)
    )
    assert perfect["floor_ratio"] == 0.0
    assert off["floor_ratio"] == pytest.approx(
        2.0**-7 / (2.0**-8 / math.sqrt(12)), rel=1e-12
    )
    assert off["max_ulp"] == 1.0


def test_an_error_where_no_row_has_terms_is_seen() -> None:
    """V = 0: the worst row is its error over u 2^-100, beside a prediction of none."""
    y = yardstick(empty=False)
    zero = torch.zeros_like(y.reference)
    y = changed(y, reference=zero, term_scale=zero, baseline=None, unrounded=None)
    wrong = zero.bfloat16()
    wrong[2, 0, 1] = 2.0**-10
    first, second = measure(wrong, y, zero.bfloat16()).heads
    size = math.sqrt(4) * 2.0**-10
    assert first["worst_row"] == pytest.approx(size / 2.0**-108, rel=1e-12)
    assert second["worst_row"] == 0.0


def test_flash_attentions_rule_at_its_edge() -> None:
    """Twice the baseline's error plus the allowance still passes, the next number up does
    not."""
    y = yardstick("float32", shape=(1, 1, 1, 3), empty=False)
    exact = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 1, 1, 3)
    plain = exact.float().clone()
    plain[..., 0] += 2.0**-10
    y = changed(y, reference=exact, baseline=plain, unrounded=None)
    # In float32, x + 0.3 - 0.3 misses x by: 1.3 has spacing 2^-23; 0.3's own has 2^-25.
    shifts = [
        np.float32(x) + np.float32(0.3) - np.float32(0.3) - np.float32(x)
        for x in (1, 2, 4)
    ]
    limit = 2 * 2.0**-10 + 2 * max(abs(float(s)) for s in shifts)
    output = exact.clone()
    for factor, passes in ((1, True), (1 + 1e-9, False)):
        output[..., 1] = 2.0 + limit * factor
        assert measure(output, y).heads[0]["fa_rule"] is passes


def test_a_prediction_is_joined_by_what_fp32_may_err() -> None:
    """In squares, row by row: 3 predicted and 4 from arithmetic make 5 expected."""
    y = changed(
        yardstick("float32", (1, 1, 4, 4), empty=False), baseline=None, unrounded=None
    )
    step = torch.full((1, 1, 4, 4), 1e-3, dtype=torch.float64)
    row = 4 * step.norm(dim=-1) / y.term_scale.norm(dim=-1)  # errors of 4 in each element
    y, predicted = changed(y, arithmetic=row), y.reference + 3 * step
    (head,) = measure(y.reference + 5 * step, y, predicted).heads
    assert head["expected_ratio"] == pytest.approx(1.0)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """No metric may divide by zero aloud."""
    with np.errstate(all="raise", under="ignore"):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_measures_what_a_cpu_does(dtype: torch.dtype) -> None:
    """Every metric of every head, the kernel's path and that of an output with a NaN."""
    y = yardstick("float16", (2, 3, 200, 64), empty=False)
    o = (y.reference * (1 + 2.0**-9)).to(dtype)
    e = (y.reference * (1 - 2.0**-9)).float()
    on_gpu = to_cuda(y)
    for spoilt in (False, True):
        if spoilt:
            o[0, 1, 7, 3] = math.nan
        near, far = measure(o, y, e).heads, measure(o.cuda(), on_gpu, e.cuda()).heads
        for a, b in zip(near, far, strict=True):
            floats = {name: x for name, x in a.items() if isinstance(x, float)}
            assert {name: b[name] for name in floats} == pytest.approx(
                floats, rel=1e-9, abs=1e-300
            )
            assert b == a | {name: b[name] for name in floats}
