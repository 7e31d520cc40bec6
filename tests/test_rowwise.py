"""An output beside a yardstick in one pass: the same as step by step, and who takes it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from interpreted import results_of
from rowwise_cases import (
    DTYPES,
    NARROW,
    SHAPES,
    alike,
    apart,
    by_steps,
    hard,
    made,
    named,
    nearly,
    of_all_kinds,
    rare,
    spoilt,
    tables,
)
from torch import Tensor

from numdev import formats
from numdev.errors import Refused
from numdev.formats import FORMATS, Format, round_to, ulp
from numdev.metrics import comparison, gpucode, rowwise, yardstick
from numdev.metrics.binning import membership
from numdev.metrics.bits import Bits
from numdev.metrics.comparison import compare, compare_precision
from numdev.metrics.rowwise import GROUPS, SUMS, OutputHeads, yardstick_sums
from numdev.metrics.wasserstein import sorting
from numdev.metrics.yardstick import Yardstick

SHAPE = (2, 3, 37, 9)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
REORDERED = 1e-12
"""Sums of at most a million numbers in fp64, in another order."""


@pytest.fixture(scope="session")
def interpreted() -> dict[str, Any]:
    found: dict[str, Any] = results_of("rowwise_cases.py")
    return found


@pytest.mark.slow
def test_one_pass_is_the_same_in_the_interpreter(interpreted: dict[str, Any]) -> None:
    """Of all shapes and formats, with and without a baseline and a prediction."""
    cases = interpreted["cases"]
    assert len(cases) == len(SHAPES) + 4 * len(DTYPES) + 6 + 12
    wrong = {
        (case["name"], name): far
        for case in cases
        for name, far in case["apart"].items()
        if not far <= REORDERED
    }
    assert not wrong


@pytest.mark.slow
def test_rounding_is_the_same_in_the_interpreter(interpreted: dict[str, Any]) -> None:
    bits = interpreted["bits"]
    assert len([name for name in bits if not name.startswith("rare ")]) == 6 * len(NARROW) + 3 * 17
    assert [name for name, same in bits.items() if not same] == []


@pytest.mark.slow
def test_rows_of_zeros_are_the_same_in_the_interpreter(interpreted: dict[str, Any]) -> None:
    """Errors in them too, and a head of which no row has a relative error."""
    rare = {name: same for name, same in interpreted["bits"].items() if name.startswith("rare ")}
    assert {name.split()[-1] for name in rare} >= {"worst_row", "max_ulp", "against", "features"}
    assert [name for name, same in rare.items() if not same] == []


def test_on_a_cpu_there_is_none() -> None:
    y, o, e = made(SHAPE, baseline=True)
    assert comparison._at_once(o, o, e, y) is None
    assert yardstick_sums(y.reference, y.term_scale, y.format) is None
    assert y.known is None


def test_a_format_wider_than_fp32_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where there is a kernel."""
    monkeypatch.setattr(rowwise, "if_possible", lambda device, compute: compute)
    y, _, _ = made(SHAPE, baseline=True)
    assert yardstick_sums(y.reference, y.term_scale, FORMATS["float64"]) is None
    assert yardstick_sums(y.reference, y.term_scale, FORMATS["float32"]) is not None


def changed(y: Yardstick, name: str, value: float) -> Yardstick:
    """With one number of one of its tensors replaced."""
    x = getattr(y, name).clone()
    x[0, 1, 2, 3] = value
    return dataclasses.replace(y, **{name: x})


@pytest.mark.parametrize("name", ["reference", "term_scale", "baseline", "unrounded"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_regular(name: str, value: float) -> None:
    """A yardstick of which something is not finite."""
    y, _, _ = made(SHAPE, baseline=True)
    assert y.regular
    assert not changed(y, name, value).regular


def test_rows_that_do_not_count_are_not_regular() -> None:
    """Those that see no key, and those that repeat another's result."""
    y, _, _ = made(SHAPE, baseline=True)
    empty = y.empty.clone()
    empty[1, 1, 5] = True
    assert not dataclasses.replace(y, empty=empty).regular
    repeated = y.reference.clone()
    repeated[1, 2, 5] = repeated[0, 2, 5]
    assert not dataclasses.replace(y, reference=repeated).regular


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["output", "expected"])
def test_what_is_not_finite_goes_step_by_step(
    of: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one pass says so in its squares, and what comes out is what there was before."""
    y, o, e = made(SHAPE, baseline=True)
    (o if of == "output" else e)[0, 1, 2, 3] = value
    asked: list[bool] = []

    def pretended(o: Tensor, *given: Any, expected: Tensor, baseline: Tensor) -> OutputHeads:
        asked.append(True)
        sums = o.new_zeros(len(SUMS), SHAPE[1], GROUPS)
        for name, x in (("square", o), ("predicted", expected.double())):
            sums[SUMS.index(name)] = (x - y.reference).square().sum(dim=(0, 2, 3))[:, None]
        rows = {f.name: o.new_zeros(4, *SHAPE) for f in dataclasses.fields(OutputHeads)}
        rows |= {"largest": o.new_zeros(4, SHAPE[1]), "w1": o.new_zeros(2, SHAPE[1])}
        return OutputHeads(**{**rows, "sums": sums})

    expected = tables(compare(o, y, e))
    monkeypatch.setattr(comparison, "output_heads", pretended)
    found = tables(compare(o, y, e))
    assert asked
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def in_torch(r: Tensor, t: Tensor, fmt: Format, **beside: Tensor | None) -> rowwise.YardstickSums:
    """What the kernel sums of a yardstick, by PyTorch."""

    def squares(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else (a.double() - b).square().sum(dim=-1)

    unrounded, baseline = beside["unrounded"], beside["baseline"]
    assert unrounded is not None
    floor, gap = round_to(r, fmt), (r - unrounded).abs()
    sums: dict[str, Any] = {
        "off": squares(floor, r),
        "moved": squares(r, unrounded),
        "plain": squares(baseline, r),
        "cast": squares(baseline, beside["fp32"]),
        "lower": squares(baseline, beside["lower"]),
        "plain_from_floor": None if baseline is None else (baseline - floor).abs().amax(dim=-1),
    }
    return rowwise.YardstickSums(
        floor=floor,
        spacing=ulp(t, fmt),
        reference=r.square().sum(dim=-1),
        terms=t.square().sum(dim=-1),
        unrounded=unrounded.square().sum(dim=-1),
        moved_absolute=gap.sum(dim=-1),
        moved_most=gap.amax(dim=-1),
        **sums,
    )


def test_what_is_known_is_of_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of one pass stand for no smaller part: where a row sees no key or repeats another, or
    something is not finite, all is as step by step."""
    monkeypatch.setattr(yardstick, "yardstick_sums", in_torch)
    y, o, e = made(SHAPE, baseline=True)
    assert y.known is not None
    assert y.standard.known is y.known
    assert y.standard.where(y.seen).known is None
    empty, repeated = y.empty.clone(), y.reference.clone()
    empty[1, 1, 5] = True
    repeated[1, 2, 5] = repeated[0, 2, 5]
    for other in (
        changed(y, "baseline_fp32", math.inf),
        changed(y, "baseline_lower", math.nan),
        changed(y, "reference", 1e6),  # beyond the format
        dataclasses.replace(y, empty=empty),
        dataclasses.replace(y, reference=repeated),
    ):
        assert other.known is None
        pairs = [
            (compare(o, other, e), compare(o, by_steps(other), e)),
            (compare_precision(other), compare_precision(by_steps(other))),
        ]
        for pair in pairs:
            found, expected = (tables(one) for one in pair)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_not_finite_where_no_key_is_seen_settles() -> None:
    y, _, _ = made(SHAPE, baseline=True)
    empty = y.empty.clone()
    empty[0, 1, 2] = True
    assert changed(dataclasses.replace(y, empty=empty), "baseline", math.nan).settled
    assert not changed(y, "baseline", math.nan).settled


@pytest.mark.parametrize("name", ["float16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("value", [1e-9, 1e6, math.nan])
@pytest.mark.parametrize("spoiled", ["reference", "baseline"])
def test_the_yardsticks_own_are_not_sorted_again(name: str, value: float, spoiled: str) -> None:
    """Its floor and its baseline come to what copies of them do; the floor of another format is
    none of its own."""
    y, _, e = made(SHAPE, baseline=True)
    y = changed(y, spoiled, value)
    empty = y.empty.clone()
    empty[1, 1, 5] = True
    y = dataclasses.replace(y, empty=empty)
    other = y.for_format(FORMATS[name])
    assert y.baseline is not None
    for own in (other.floor, y.floor, y.baseline):
        found, expected = (tables(compare(x, other, e)) for x in (own, own.clone()))
        for key in expected:
            assert alike(found[key], expected[key]), key


def test_gaps_of_one_pass_are_means(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([[0.0, 2.0, 5.0]])
    expected = sorting.w1_of_sorted(a, b)
    monkeypatch.setattr(sorting, "gap_sums", sorting._gaps_torch)
    assert sorting.w1_of_sorted(a, b).tolist() == expected.tolist() == [1.0]


# --- on a GPU ------------------------------------------------------------------------------------


def moved(y: Yardstick) -> Yardstick:
    """To the GPU."""
    fields = {f.name: getattr(y, f.name) for f in dataclasses.fields(y)}
    there: Any = {name: x.cuda() for name, x in fields.items() if isinstance(x, Tensor)}
    return dataclasses.replace(y, **there)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 1000, 128), (3, 2, 129, 256), (1, 2, 5, 1500)])
def test_one_pass_is_the_same(
    shape: tuple[int, ...], dtype: torch.dtype, baseline: bool, expected: bool
) -> None:
    """Of what it takes; features beyond its width are taken step by step. And twice the same."""
    y, o, e = made(shape, baseline=baseline)
    y = moved(dataclasses.replace(y, format=FORMATS["bfloat16"]))
    given = e.cuda() if expected else None
    x = o.clamp(-400, 400).cuda().to(dtype)
    steps = by_steps(y)
    if shape[-1] > rowwise.WIDEST:
        assert y.known is None
        assert comparison._at_once(x, comparison.widened(x), given, y) is None
        return
    assert y.known is not None
    assert alike(y.floor, steps.floor)
    assert alike(y.spacing, steps.spacing)
    bins = membership(shape[2], torch.arange(shape[2], device="cuda"))
    wide = comparison.widened(x)
    one_pass = comparison._at_once(x, wide, given, y)
    assert one_pass is not None
    pairs = [
        (one_pass, comparison._step_by_step(x, wide, given, steps)),
        (compare_precision(y), compare_precision(steps)),
        (compare(x, y, given), compare(x, y, given)),
    ]
    for i, pair in enumerate(pairs):
        found, other = (named(one.on_host(None if i == 1 else bins).value) for one in pair)
        assert found.keys() == other.keys()
        for name, sums in found.items():
            allowed = 0.0 if i == 2 else REORDERED
            # Signed sums nearly cancel: they are held to what was added up.
            most = 1e3 if name in ("signed features", "signed along") else 1.0
            assert apart(sums, other[name]) <= allowed * most, name


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 3, 37, 9), (1, 8, 5000), (1, 2, 300, 256)])
def test_distances_alone_are_the_same(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    reference = torch.randn(shape, generator=g, dtype=torch.float64).cuda()
    empty = (torch.rand(shape[:3], generator=g) < 0.1).cuda()
    for o, r in ((reference + 0.01, reference), (spoilt(reference), spoilt(reference).flip(2))):
        found = tables(comparison.compare_plain(o.to(dtype), r, empty))
        with monkeypatch.context() as patch:
            patch.setattr(comparison, "plain_heads", lambda *given: None)
            steps = tables(comparison.compare_plain(o.to(dtype), r, empty))
        assert found.keys() == steps.keys()
        for name, sums in found.items():
            assert apart(sums, steps[name]) <= REORDERED, name


@pytest.mark.gpu
@on_gpu
def test_bits_are_the_same() -> None:
    """As on the host, in every bit: checksums, which runs are the same, and what heads begin
    with."""
    tensors = [[x, x.clone(), x.clone()] for x in (*of_all_kinds(), torch.randn(1, 2, 9_000_001))]
    tensors += [runs[-1:] for runs in tensors]
    for i, runs in enumerate(tensors):
        if i % 2 and len(runs) > 1 and runs[2].numel():
            runs[2].view(torch.uint8)[-1, -1, -1] ^= 1
    here = Bits(tensors)
    there = Bits([[x.cuda() for x in runs] for runs in tensors])
    for i in range(len(tensors)):
        assert here.checksums(i) == there.checksums(i)
        assert here.same(i) == there.same(i)
        assert here.begin_finite(i) == there.begin_finite(i)
    assert not all(here.same(i) for i in range(len(tensors)))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", NARROW)
def test_rounding_is_the_same(name: str) -> None:
    x, fmt = hard(), FORMATS[name]
    found = rowwise.compute_yardstick(*(x.cuda(),) * 2, fmt, None, None, None, None)
    assert alike(found.floor.cpu(), round_to(x, fmt))
    assert alike(found.spacing.cpu(), ulp(x, fmt))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NARROW)
def test_many_numbers_are_rounded_alike(
    name: str, dtype: torch.dtype, saturate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU, by its kernel, as on the host; few numbers, and those with gaps, step by step."""
    fmt = FORMATS[name]
    x = torch.cat([hard(n).flatten() for n in range(1500)]).to(dtype)
    expected = round_to(x, fmt, saturate=saturate)
    assert x.numel() > formats.AT_ONCE
    assert alike(round_to(x.cuda(), fmt, saturate=saturate).cpu(), expected)
    asked: list[bool] = []
    monkeypatch.setattr(formats, "_computed", lambda *given: asked.append(True))
    for some in (slice(None, None, 2), slice(0, 1000)):
        assert alike(round_to(x.cuda()[some], fmt, saturate=saturate).cpu(), expected[some])
    assert asked == []


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (8, 100_003), (1, 9_000_001)])
def test_gaps_are_the_same(shape: tuple[int, int]) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(shape, generator=g, device="cuda", dtype=torch.float64) for _ in range(2))
    for x in (b, b.float(), b.half(), b.bfloat16()):
        found = rowwise.gap_sums(a, x)
        assert found is not None
        assert apart(found, sorting._gaps_torch(a, x)) <= REORDERED
    b[0, -1] = math.nan
    found = rowwise.gap_sums(a, b)
    assert found is not None
    assert bool(found[0].isnan())
    assert int(found.isnan().sum()) == 1


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 1e-39), (torch.float16, 1e-6), (torch.float32, 1e-39)]
)
def test_subnormal_numbers_are_read(dtype: torch.dtype, size: float) -> None:
    """Not as zeros: outputs, baselines and predictions may be no more."""
    y, _, _ = made(SHAPE, baseline=True)
    g = torch.Generator().manual_seed(0)
    small, other = (torch.randn(SHAPE, generator=g, dtype=torch.float64) * size for _ in range(2))
    x = small.to(dtype)
    assert bool(x.double().count_nonzero())
    y = moved(dataclasses.replace(y, reference=other, unrounded=other, baseline=x))
    given, steps = x.cuda(), by_steps(y)
    one_pass = comparison._at_once(given, given, given, y)
    assert one_pass is not None
    found, expected = tables(one_pass), tables(comparison._step_by_step(given, given, given, steps))
    for name in ("groups absolute", "largest max_abs", "largest plain_from_floor", "transport w1"):
        assert apart(found[name], expected[name]) <= REORDERED, name
    flat = x.flatten()[None]
    sums = rowwise.gap_sums(flat.cuda(), torch.zeros_like(flat).cuda())
    assert sums is not None
    assert apart(sums.cpu(), flat.double().abs().sum(dim=1)) <= REORDERED


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_rows_of_zeros_are_the_same(name: str, expected: bool) -> None:
    """Errors in them too, and a head of which no row has a relative error. A kernel gets numbers in
    fp32, and what a row may err in fp64 is less than that has."""
    y, o, e = rare(name)
    y, given = moved(y), e.cuda() if expected else None
    at_once = comparison._at_once(o.cuda(), o.cuda(), given, y)
    assert at_once is not None
    found = tables(at_once)
    other = tables(comparison._step_by_step(o.cuda(), o.cuda(), given, by_steps(y)))
    assert found.keys() == other.keys()
    for key in found:
        assert nearly(found[key], other[key], key), key


@pytest.mark.gpu
@on_gpu
def test_where_triton_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once."""
    asked: list[bool] = []

    def refused(*given: Any) -> Any:
        asked.append(True)
        raise Refused("no")

    monkeypatch.setattr(rowwise, "compute_yardstick", refused)
    monkeypatch.setattr(gpucode, "_REFUSED", [])
    y, o, e = made(SHAPE, baseline=True)
    for _ in range(2):
        there = moved(y)
        assert there.known is None
        assert tables(compare(o.cuda(), there, e.cuda()))["largest max_abs"].isfinite().all()
    assert asked == [True]
