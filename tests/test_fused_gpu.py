"""What only a GPU can show of the fused fp64 reference: that its kernels compile for every width
and feature, agree with the blocked path there to within the bounds that `fused_bounds` derives,
and keep to the memory they promise. The interpreter has the rest (`test_fused.py`)."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_bounds import bounds, shares
from oracles import FEATURES, step
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from numdev.cases import AttentionCase
from numdev.kernels import find, reference
from numdev.kernels.reference import blocked, fused
from numdev.kernels.reference.results import Gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
FORMATS = (torch.bfloat16, torch.float16, torch.float32)
GIB = 1 << 30


def on_gpu(case: AttentionCase) -> AttentionCase:
    """The case with all its tensors there."""
    held = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    moved: dict[str, Any] = {n: x.cuda() for n, x in held.items() if isinstance(x, Tensor)}
    return dataclasses.replace(case, **moved)


def large(**fields: Any) -> AttentionCase:
    """4 query heads on 2 kv heads, in several tiles of which the last are not whole, on the GPU."""
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 333, "kv_len": 471, "head_dim": 64}
    return on_gpu(step(**{**shape, "dtype": torch.bfloat16, **fields}))


def assert_agree(case: AttentionCase) -> Gradients:
    """Both passes came by the fused path, and are the blocked path's to within their bounds."""
    found, forward = reference.gradients(case), reference.attend(case)
    assert (found.by, forward.by) == ("fused", "fused")
    exact = blocked.gradients(case)
    limits = bounds(case, exact)
    for answer in (found, forward):
        for name, share in shares(case, answer, exact, limits).items():
            assert share <= 1.0, (name, share)
    return found


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_in_every_format(name: str) -> None:
    """Each feature by itself and combined, soft cap included, in bf16, fp16 and fp32."""
    for dtype in FORMATS:
        assert_agree(on_gpu(step(**FEATURES[name], dtype=dtype)))


LARGE: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, bottom-right": {"is_causal": True, "causal_offset": 138},
    "additive mask": {"mask": ("holes", "1hqk"), "is_causal": True},
    "sinks": {"sinks": True, "window": (30, None)},
}


def test_views_are_read_where_they_lie() -> None:
    """Heads that lie behind their rows, rows behind features, a transposed mask, leaves of a
    graph."""
    made = large(mask=("bool", "qk"), sinks=True)
    names = ("q", "k", "v", "grad_out")
    views = {x: getattr(made, x).mT.contiguous().mT.requires_grad_() for x in names}
    mask = made.mask.mT.contiguous().mT
    assert not mask.is_contiguous()
    assert_agree(dataclasses.replace(made, mask=mask, **views))
    swapped = {x: getattr(made, x).transpose(1, 2).contiguous().transpose(1, 2) for x in names}
    assert_agree(dataclasses.replace(made, mask=mask, **swapped))


def test_groups_of_heads_and_runs_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kv head at a time and 16 rows at a time: the same forward bit by bit, and gradients
    within the bounds."""
    case = large(is_causal=True, sinks=True)
    whole = reference.attend(case)
    monkeypatch.setattr(fused, "OPERAND_BYTES", 1)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", 1)
    assert len(list(fused._parts(case))) == 2
    assert len(fused._runs(case)) > 5
    found = assert_agree(case)
    for name in ("out", "lse", "term_scale", "empty"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name


@pytest.mark.parametrize("name", LARGE)
def test_runs_are_bitwise_reproducible(name: str) -> None:
    """No sum depends on which program comes first."""
    case = large(**LARGE[name])
    a, b = reference.gradients(case), reference.gradients(case)
    for field in dataclasses.fields(Gradients):
        if field.name != "by":
            assert torch.equal(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda case: {"v": nan_at(case.v)}, "an input is not finite"),
        (lambda case: {"grad_out": nan_at(case.grad_out)}, "an input is not finite"),
        (lambda case: {"mask": nan_at(torch.zeros(333, 471, device="cuda"))}, "not finite"),
        (lambda case: {"q": case.q.float() * 1e20, "k": case.k.float(), "v": case.v.float()},
         "scores may reach"),
        (lambda case: {x: getattr(case, x).double() for x in "qkv"}, "in float64"),
    ],
)  # fmt: skip
def test_what_it_refuses_is_blocked(spoil: Callable[[AttentionCase], Any], words: str) -> None:
    """The result says why, and is the blocked path's, NaN included."""
    case = large()
    case = dataclasses.replace(case, **spoil(case))
    found, exact = reference.gradients(case), blocked.gradients(case)
    assert found.by.startswith("blocked: ")
    assert words in found.by
    assert reference.attend(case).by == found.by
    assert find("reference").attend(case).ran == found.by
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(
            getattr(found, name).nan_to_num(7.0), getattr(exact, name).nan_to_num(7.0)
        )


def nan_at(x: Tensor) -> Tensor:
    spoilt = x.clone()
    spoilt.view(-1)[5] = float("nan")
    return spoilt


def peak(call: Callable[[], Any]) -> int:
    """What a call takes of the GPU's memory at once, its result included, beyond what is held."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_bounded() -> None:
    """At length 8192 with 8 heads of 128, attend takes less than 1 GiB, and a tenth of what PyTorch
    takes for the same in fp64; gradients less than 6 GiB: operands, results and a run of rows."""
    shape = {"batch": 1, "heads": 8, "kv_heads": 8, "q_len": 8192, "kv_len": 8192}
    case = large(**shape, head_dim=128)
    wide = [x.double() for x in (case.q, case.k, case.v)]
    plain = peak(lambda: scaled_dot_product_attention(*wide))
    mine = peak(lambda: fused.attend(case))
    assert mine < GIB
    assert 10 * mine < plain
    assert peak(lambda: fused.gradients(case)) < 6 * GIB
