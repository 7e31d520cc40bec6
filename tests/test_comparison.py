"""What measuring costs, and that its short ways give what the long ones do."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numdev.formats import FORMATS
from numdev.metrics.arrival import Arrival
from numdev.metrics.comparison import ByHead, Signed, compare
from numdev.metrics.deviation import Yardstick, measure, measure_plain
from numdev.metrics.finiteness import all_finite

BF16 = FORMATS["bfloat16"]
nan, inf = math.nan, math.inf
VIEWS = {"view", "transpose", "slice", "select", "unsqueeze", "expand", "unbind", "detach", "alias"}
WAITS = {"_local_scalar_dense", "equal", "nonzero"}


class Counted(TorchDispatchMode):
    """What reaches the device: operators that are no views, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each time a tensor's values are brought to the host by one of these methods."""
    found: list[str] = []

    def noting(name: str, method: Any) -> Any:
        def noted(self: Tensor, *args: Any) -> Any:
            found.append(name)
            return method(self, *args)

        return noted

    with monkeypatch.context() as patch:
        for name in ("tolist", "cpu", "item", "__bool__", "__float__", "__int__"):
            patch.setattr(Tensor, name, noting(name, getattr(Tensor, name)))
        apart = Arrival._apart
        patch.setattr(Arrival, "_apart", lambda self, x: found.append("arrays") or apart(self, x))
        yield found


def yardstick(shape: tuple[int, int, int, int] = (2, 4, 48, 8), seed: int = 0) -> Yardstick:
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64) * scale

    reference = noise(1.0)
    return Yardstick(
        reference=reference,
        term_scale=reference.abs() + noise(1.0).abs(),
        empty=torch.zeros(shape[:3], dtype=torch.bool),
        format=BF16,
        baseline=(reference + noise(0.01)).bfloat16(),
        unrounded=reference + noise(0.005),
        arithmetic=torch.full(shape[:3], 1e-6, dtype=torch.float64),
    )


def outputs(y: Yardstick) -> tuple[Tensor, Tensor]:
    """An output, and what an emulation predicts for it."""
    g = torch.Generator().manual_seed(7)
    a, b = (torch.randn(y.reference.shape, generator=g, dtype=torch.float64) for _ in range(2))
    return (y.reference + 0.01 * a).bfloat16(), (y.reference + 0.01 * b).float()


def in_full(y: Yardstick, head: int) -> Yardstick:
    """The same, with something that is not finite in one head, so that nothing is taken as read."""
    reference = y.reference.clone()
    reference[0, head, 1, 0] = nan
    return dataclasses.replace(y, reference=reference)


def test_measuring_a_second_output_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """With intervals, bias and a prediction it takes at most 70 launches (beside sorting, which is
    numpy's here) and two waits, whatever the first took."""
    y = yardstick()
    output, expected = outputs(y)
    measure(output, y, expected, of=1000)
    with Counted() as mode, waits(monkeypatch) as waited:
        measure(output + 0.01, y, expected, of=1000)
    assert mode.names.total() <= 70, mode.names
    assert len(waited) == 2
    assert not mode.names.keys() & WAITS


def test_the_count_sees_launches_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is none, an operator is one, and asking for a value is a wait."""
    x = torch.ones(3, 4)
    with Counted() as mode, waits(monkeypatch) as waited:
        bool((x.T + 1).sum() > 0)
    assert mode.names["t"] + mode.names["add"] + mode.names["sum"] >= 2
    assert waited == ["__bool__"]
    assert mode.names.keys() & WAITS


def test_a_yardstick_looks_at_itself_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one sequence its own facts cost one wait, with several two, however many outputs."""
    for batch, most in ((1, 1), (3, 2)):
        y = yardstick((batch, 2, 9, 4))
        output, _ = outputs(y)
        with waits(monkeypatch) as waited:
            for _ in range(3):
                measure(output, y)
        assert len(waited) == 3 * 2 + most


@pytest.mark.parametrize("empty", [False, True])
def test_both_ways_give_the_same_bits(empty: bool) -> None:
    """A head is measured alike whether all is finite, the output is not, the reference is not, or
    the prediction is not, in another head."""
    y = yardstick()
    if empty:
        y.empty[:, :, ::5] = True
    output, expected = outputs(y)
    usual = measure(output, y, expected, of=1000)
    spoiled, strange = output.clone(), expected.clone()
    spoiled[0, 1, 3, 2], strange[1, 1, 4] = inf, nan
    odd = in_full(y, 1)
    for found in (
        measure(spoiled, y, expected, of=1000),
        measure(output, y, strange, of=1000),
        measure(output, odd, expected, of=1000),
        measure(spoiled, odd, strange, of=1000),
    ):
        assert found[1] != usual[1]
        for head in (0, 2, 3):
            assert found[head] == usual[head]


def test_whether_all_is_finite_is_seen() -> None:
    """A NaN or an infinity anywhere in any of several tensors is noticed, in every dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        fine = torch.ones(2, 3, 37).to(dtype)
        assert all_finite([fine, fine])
        for bad in (nan, inf, -inf):
            for place in (0, 18, 36):
                spoiled = torch.ones(2, 3, 37)
                spoiled[1, 2, place] = bad
                assert not all_finite([fine, spoiled.to(dtype)])
    assert all_finite([torch.full((4,), 6e4).half()])


def test_a_yardstick_goes_when_it_is_let_go() -> None:
    """Nothing it keeps refers back to it: its tensors, the largest there are, are not left to the
    garbage collector."""
    gc.disable()
    try:
        y = yardstick()
        measure(outputs(y)[0], y)
        gone = [weakref.ref(y), weakref.ref(y.floor), weakref.ref(y.standard)]
        del y
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_signs_are_counted_along_the_reference() -> None:
    """By hand: two rows of two features, one ulp up and one down, one of them beside a negative
    and one beside a zero."""
    y = Yardstick(
        reference=torch.tensor([[1.0, -1.0], [1.0, 0.0]], dtype=torch.float64).view(1, 1, 2, 2),
        term_scale=torch.ones(1, 1, 2, 2, dtype=torch.float64),
        empty=torch.zeros(1, 1, 2, dtype=torch.bool),
        format=BF16,
    )
    ulps = torch.tensor([[1.0, 1.0], [2.0, 5.0]], dtype=torch.float64).view(1, 1, 2, 2)
    found = Signed.of(ulps * 2.0**-7, y.standard, y)
    assert found.features.tolist() == [[[3.0, 6.0]]]
    assert found.along.tolist() == [[1.0 - 1.0 + 2.0]]
    assert found.counts.tolist() == [[[2.0, 2.0]]]


def test_arithmetic_that_is_no_number_spoils_no_other_row() -> None:
    """A query of NaN has a bound of NaN, and rows that are not usable; the others are judged."""
    y = yardstick((1, 1, 40, 4))
    output, expected = outputs(y)
    assert y.arithmetic is not None
    y.arithmetic[0, 0, 3] = nan
    for x in (y.reference, output, expected, y.unrounded, y.baseline):
        assert x is not None
        x[0, 0, 3] = nan
    (head,) = measure(output, y, expected)
    assert head["expected_ratio"] is not None
    assert math.isfinite(head["worst_row"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_sees_the_same() -> None:
    """NaN and infinities are noticed there too, sampled or not, and every number agrees with the
    CPU's to fp64 rounding of sums of some thousand terms."""
    y = yardstick()
    there = dataclasses.replace(
        y, **{k: v.cuda() for k, v in vars(y).items() if isinstance(v, Tensor)}
    )
    output, expected = outputs(y)
    for bad in (None, nan, inf):
        if bad is not None:
            output[1, 2, 3, 4] = bad
        assert all_finite([output.cuda()]) == (bad is None)
        here = measure(output, y, expected, of=1000)
        found = measure(output.cuda(), there, expected.cuda(), of=1000)
        for a, b in zip(here, found, strict=True):
            assert a.keys() == b.keys()
            for name, value in a.items():
                if isinstance(value, float):
                    assert b[name] == pytest.approx(value, rel=1e-11, abs=1e-12), name
                elif name != "interval":
                    assert b[name] == value, name
    plain = measure_plain(output.cuda(), y.reference.cuda(), y.empty.cuda())
    assert [head["nonfinite"] for head in plain] == [0, 0, 1, 0]
    compared = compare(output.cuda(), there)
    assert isinstance(compared, ByHead)
    assert compared.heads.sums.is_cuda
