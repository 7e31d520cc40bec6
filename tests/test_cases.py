"""Attention cases: what they refuse, which keys a query sees, rounding, and choosing
heads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from on_bench import prepare, rows_on
from oracles import FEATURES, make_case, poisoned, sees, with_grad
from torch import Tensor

from numdev.cases import (
    AXES,
    AttentionCase,
    CaseChanges,
    CaseRef,
    laid_out,
    transposed,
    visible,
)
from numdev.errors import UsageError
from numdev.formats import FORMATS, format_named
from numdev.gate.compare import SHAPE
from numdev.kernels import Kernel, Output
from numdev.operations.attention.finiteness import nonfinite_inputs
from numdev.report.records.measurements import CallRecord, CaseRecord
from numdev.sources import captured_calls

BF16, FP16, FP32 = (FORMATS[n] for n in ("bfloat16", "float16", "float32"))
zeros = torch.zeros


@pytest.mark.parametrize(("change", "says"), [
    ({"q": zeros(2, 4, 4)}, (r"q: expected \[batch, heads, length, head_dim\], got \[2, 4, 4\]")),
    ({"v": zeros(1, 2, 5, 0)}, "v: expected"),
    ({"q": zeros(1, 2, 4, 4, dtype=torch.float64)}, "expected one floating-point dtype"),
    ({"q": zeros(3, 2, 4, 4)}, "do not fit together"),
    ({"q": zeros(1, 2, 4, 8)}, "q and k differ in head_dim: 8 and 4"),
    ({"q": zeros(1, 3, 4, 4)}, "3 query heads are not a multiple of 2 kv heads"),
    ({"scale": math.nan}, "scale: expected a finite number, got nan"),
    ({"softcap": 0.0}, "softcap: expected a positive number, got 0.0"),
    ({"sinks": zeros(3)}, r"sinks: expected \[2\], one per head, got \[3\]"),
    ({"grad_out": zeros(1, 2, 4, 3)}, r"grad_out: .* got \[1, 2, 4, 3\]"),
    ({"positions": torch.tensor([0, 1])}, r"positions: expected int64 \[4\]"),
    ({"mask": zeros(4, 4)}, (r"mask has shape \[4, 4\], which does not broadcast to \[1, 2")),
    ({"mask": zeros(1, 1, 1, 4, 5)}, "does not broadcast"),
    ({"mask": zeros(4, 5, dtype=torch.int64)}, "mask: expected bool .* got torch.int64"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_named(change: dict[str, Any], says: str) -> None:
    """A case that makes no sense is refused with its name and what is wrong with it."""
    with pytest.raises(UsageError, match=f"attention case 'test': .*{says}"):
        dataclasses.replace(make_case(dtype=torch.float32), **change)


def test_every_part_of_a_case_stands_wherever_parts_are_listed() -> None:
    """What is missing in a list is not restricted, stored, or compared with another
    report's, and a call without it is taken for the same call."""
    parts = {f.name: str(f.type) for f in dataclasses.fields(AttentionCase)}
    tensors = {name for name, kind in parts.items() if "Tensor" in kind} - {"positions"}
    about = {"ref", "working", "grad_out_from", "positions"}
    assert tensors == AXES.keys()
    assert CaseChanges.__annotations__.keys() == parts.keys() - about | {"positions"}
    assert {*captured_calls.REQUIRED, *captured_calls.OPTIONAL} == tensors
    assert {*captured_calls.OF_CASE} == parts.keys() - tensors - about
    recorded = CaseRecord.model_fields.keys()
    assert parts.keys() - about - {"q", "k", "v"} <= recorded
    assert {*SHAPE} == recorded - CallRecord.model_fields.keys() | {"batch"}


@pytest.mark.parametrize("name", AXES)
def test_every_tensor_of_a_case_is_looked_at(name: str) -> None:
    """On another device it is refused, and a NaN in it is counted among the inputs."""
    case = with_grad(make_case(mask=("float", "qk"), sinks=True))
    with pytest.raises(UsageError, match="expected a dense tensor on"):
        dataclasses.replace(case, **{name: getattr(case, name).to("meta")})
    first = (0,) * getattr(case, name).ndim
    assert nonfinite_inputs(poisoned(case, name, first, math.nan)) == {name: 1}


@pytest.mark.parametrize("name", FEATURES)
def test_a_wrong_kernel_is_judged_whatever_a_call_has(name: str) -> None:
    """The search for its mistake makes other calls of the call, and raises nothing."""
    case = with_grad(make_case(**FEATURES[name], dtype=torch.bfloat16))
    kernel = Kernel(name="wrong", function=lambda case: Output(out=case.grad_out * 3))
    rows = rows_on(prepare(case), kernel)
    assert {(row.status, row.reason) for row in rows} == {("ok", None)}


def brute_force(case: AttentionCase, rows: slice, keys: slice) -> torch.Tensor:
    """Visibility by causality, window and a bool mask, one pair at a time."""
    b, h, _, _ = case.q.shape
    r, c = range(rows.start, rows.stop), range(keys.start, keys.stop)
    if case.mask is not None and case.mask.dtype != torch.bool:
        case = dataclasses.replace(case, mask=None)
    seen = [
        [[[sees(case, x, y, i, j) for j in c] for i in r] for y in range(h)]
        for x in range(b)
    ]
    return torch.tensor(seen, dtype=torch.bool).reshape(b, h, len(r), len(c))


@pytest.mark.parametrize("name", FEATURES)
def test_visible_is_what_the_definition_says(name: str) -> None:
    """Whole and in blocks, `visible` agrees with the definition; None means
    everything."""
    case = make_case(**FEATURES[name])
    n, m = case.q_len, case.kv_len
    for rows, keys in (
        (slice(0, n), slice(0, m)), (slice(n - 1, n), slice(m // 2, m)), (slice(0, 1), slice(1, 1)),
    ):  # fmt: skip
        expected, shown = brute_force(case, rows, keys), visible(case, rows, keys)
        whole = torch.ones_like(expected) if shown is None else shown.expand_as(expected)
        assert torch.equal(whole, expected)


def test_rounding_rounds_every_tensor_once() -> None:
    """Correctly; a bool mask is kept; what is out of range overflows, as in a model. A
    call in the format is returned as it is, unless it is in autograd's graph."""
    twice = 1 + 2.0**-8 + 2.0**-40  # through float32 this becomes a tie, and then 1.0
    names = ("q", "k", "v", "mask", "sinks", "grad_out")
    grad_out = torch.zeros(1, 2, 4, 4, dtype=torch.float64)
    case = make_case(mask=("float", "qk"), sinks=True, grad_out=grad_out)
    filled = {name: torch.full_like(getattr(case, name), twice) for name in names}
    rounded = dataclasses.replace(case, **filled).rounded_to(BF16)
    for name in names:
        x = getattr(rounded, name)
        assert x.dtype == torch.bfloat16
        assert (x == 1.0078125).all()
    assert rounded.rounded_to(BF16) is rounded
    tracked = dataclasses.replace(rounded, k=rounded.k.clone().requires_grad_())
    assert not tracked.rounded_to(BF16).k.requires_grad
    shown = make_case(mask=("bool", "qk"))
    assert shown.rounded_to(BF16).mask is shown.mask
    shown.q[..., 0] = 1e6
    assert shown.rounded_to(FP16).q[..., 0].isinf().all()


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32])
@pytest.mark.parametrize("wide", [torch.float64, torch.float32])
def test_the_lowest_number_in_a_mask_stays_finite(fmt: Any, wide: torch.dtype) -> None:
    """The way models write "hidden" must not become -inf, and -inf must not become
    finite."""
    row = torch.tensor([torch.finfo(wide).min, -math.inf, 0.0, 0.0, 0.0], dtype=wide)
    rounded = make_case(mask=row, dtype=wide).rounded_to(fmt).mask
    assert rounded.tolist() == [-fmt.largest, -math.inf, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["e5m4", "e8m10"])
def test_what_a_mask_hides_stays_hidden_in_a_wider_dtype(name: str) -> None:
    """A format that is stored in fp32: hidden is then the lowest number of fp32, not of
    it."""
    row = torch.tensor(
        [torch.finfo(torch.float64).min, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64
    )
    rounded = make_case(mask=row).rounded_to(format_named(name))
    shown = visible(rounded, slice(0, 4), slice(0, 5))
    assert not shown[..., 0].any()
    assert shown[..., 1:].all()


B, H, N, D = 2, 4, 5, 8
STRIDES = {
    "contiguous": ((H * N * D, N * D, D, 1), (H // 2 * N * D, N * D, D, 1)),
    "transposed": ((N * H * D, D, H * D, 1), (N * H // 2 * D, D, H // 2 * D, 1)),
    "packed": ((N * 2 * H * D, D, 2 * H * D, 1),) * 2,
    "strided": ((2 * H * N * D, 2 * N * D, 2 * D, 2), (H * N * D, 2 * N * D, 2 * D, 2)),
}


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, N, D, generator=g) for h in (H, H // 2, H // 2)]


def case_in(layout: str) -> AttentionCase:
    q, k, v = laid_out(layout, *tensors())
    grad_out = transposed(torch.ones(B, H, N, D))
    return AttentionCase(
        ref=CaseRef(case="c"), q=q, k=k, v=v, scale=1.0, grad_out=grad_out
    )


@pytest.mark.parametrize("layout", STRIDES)
def test_a_layout_changes_strides_and_nothing_else(layout: str) -> None:
    """And rounding keeps them, in every format, whether it has anything to do or not."""
    before = case_in(layout)
    for x, y in zip((before.q, before.k, before.v), tensors(), strict=True):
        assert torch.equal(x, y)
    assert (before.q.stride(), before.k.stride()) == STRIDES[layout]
    for fmt in ("bfloat16", "float32", "float64", "float8_e4m3fn", "e8m10"):
        after = before.rounded_to(format_named(fmt))
        for name in ("q", "k", "v", "grad_out"):
            assert getattr(after, name).stride() == getattr(before, name).stride()
        contiguous = case_in("contiguous").rounded_to(format_named(fmt))
        assert torch.equal(after.k.double(), contiguous.k.double())


@pytest.mark.parametrize("layout", STRIDES)
def test_a_kernel_sees_the_strides(layout: str) -> None:
    """What a kernel under audit is given is laid out as the case, and is a copy of its
    own."""
    case = case_in(layout)
    met = []

    def attend(case: AttentionCase) -> Output:
        met.append((case.q.stride(), case.k.stride()))
        case.k.zero_()
        return Output(out=torch.zeros(B, H, N, D, dtype=torch.bfloat16))

    kernel = Kernel(name="k", function=attend)
    bench = prepare(case, "bfloat16")
    (row, *_) = rows_on(bench, kernel)
    assert (row.status, row.reason) == ("failed", "writes into its inputs (k)")
    assert met == [STRIDES[layout]]
    assert bool(bench.case.k.any())
