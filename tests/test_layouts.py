"""Layouts: views hold the same numbers, and their strides outlive rounding and copying."""

from __future__ import annotations

import pytest
import torch
from on_bench import prepare
from torch import Tensor

from numdev.audit.plan import Task
from numdev.audit.task import measure_task
from numdev.cases import AttentionCase, CaseRef
from numdev.formats import format_named
from numdev.kernels import Kernel, Output
from numdev.layouts import laid_out, transposed
from numdev.system import System

B, H, N, D = 2, 4, 5, 8
STRIDES = {
    "contiguous": ((H * N * D, N * D, D, 1), (H // 2 * N * D, N * D, D, 1)),
    "transposed": ((N * H * D, D, H * D, 1), (N * H // 2 * D, D, H // 2 * D, 1)),
    "packed": ((N * 2 * H * D, D, 2 * H * D, 1),) * 2,
}


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, N, D, generator=g) for h in (H, H // 2, H // 2)]


def case_in(layout: str) -> AttentionCase:
    q, k, v = laid_out(layout, *tensors())
    grad_out = transposed(torch.ones(B, H, N, D))
    return AttentionCase(ref=CaseRef(case="c"), q=q, k=k, v=v, scale=1.0, grad_out=grad_out)


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
    """What a kernel under audit is given is laid out as the case, and is a copy of its own."""
    case = case_in(layout)
    met = []

    def attend(case: AttentionCase) -> Output:
        met.append((case.q.stride(), case.k.stride()))
        case.k.zero_()
        return Output(out=torch.zeros(B, H, N, D, dtype=torch.bfloat16))

    kernel = Kernel(name="k", function=attend)
    task = Task(case=case.ref, role="kernel", kernel="k", options={}, format="bfloat16")
    bench = prepare(case, "bfloat16")
    (row, *_) = measure_task(task, kernel, bench, System.here("cpu")).rows
    assert row.status == "ok", row.reason
    assert met == [STRIDES[layout]]
    assert bool(bench.case.k.any())
