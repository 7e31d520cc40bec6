"""What only a GPU can show of `triton-flash`: bfloat16, its real tiles, and that it rounds there as
it says. The interpreter has the rest (`test_triton_flash.py`)."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.kernels import find
from numdev.kernels.emulation.predict import emulated_step
from numdev.kernels.reference import floor_of, gradients
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
KERNEL = find("triton-flash")
HALVES = (torch.bfloat16, torch.float16)
TENSORS = ("out", "dq", "dk", "dv")
SHAPES = {
    "whole tiles": {"q_len": 512, "kv_len": 512, "head_dim": 128, "v_dim": 128},
    "ragged": {"q_len": 333, "kv_len": 471, "head_dim": 80, "v_dim": 48},
    "wide heads": {"q_len": 200, "kv_len": 200, "head_dim": 256, "v_dim": 256},
    "narrow heads": {"q_len": 300, "kv_len": 300, "head_dim": 16, "v_dim": 8},
    "decode": {"q_len": 1, "kv_len": 1000, "head_dim": 64, "v_dim": 64},
}


def case(
    shape: str = "whole tiles", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> AttentionCase:
    """4 query heads on 2 kv heads, on the GPU, with an upstream gradient."""
    shapes = Shapes(batch=2, heads=4, kv_heads=2, **SHAPES[shape])
    drawn = draw("normal", shapes, seed=11, options={})
    dO = torch.randn(2, 4, shapes.q_len, shapes.v_dim, generator=torch.Generator().manual_seed(1))
    q, k, v, grad_out = (x.to(dtype).cuda() for x in (*drawn, dO))
    fields = {"scale": shapes.head_dim**-0.5, "grad_out": grad_out, **changes}
    return AttentionCase(ref=CaseRef(case="gpu"), q=q, k=k, v=v, **fields)


def mask_of(kind: str, here: AttentionCase) -> torch.Tensor:
    made = torch.Generator().manual_seed(2)
    shown = torch.rand(1, 4, here.q_len, here.kv_len, generator=made) < 0.6
    shown[:, :, 5:6] = False
    if kind == "bool":
        return shown.cuda()
    added = torch.randn(shown.shape, generator=made).to(here.q.dtype)
    return added.masked_fill(~shown, torch.finfo(here.q.dtype).min).cuda()


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_offset": 138},
    "window": {"window": (70, 9), "causal_offset": 20},
    "bool": {"mask": "bool"},
    "additive": {"mask": "additive", "is_causal": True},
}
FEW = ("causal", "window")


def masked(shape: str, mask: str, dtype: torch.dtype) -> AttentionCase:
    changes = dict(MASKS[mask])
    if "mask" in changes:
        changes["mask"] = mask_of(changes["mask"], case(shape, dtype))
    return case(shape, dtype, **changes)


def norms(found: Any, other: Any) -> dict[str, float]:
    """Of the differences, by tensor."""
    return {
        x: float((getattr(found, x).double() - getattr(other, x).double()).norm()) for x in TENSORS
    }


def arithmetic(exact: Any) -> dict[str, float]:
    """What fp32 arithmetic may err in norm, by tensor: 32 roundings of the term scale."""
    scales = (exact.term_scale, exact.dq_terms, exact.dk_terms, exact.dv_terms)
    return {x: 32 * 2.0**-24 * float(s.norm()) for x, s in zip(TENSORS, scales, strict=True)}


# Compiling is what takes time here: unusual heads meet few masks.
UNUSUAL = [(shape, mask) for shape in ("wide heads", "narrow heads", "decode") for mask in FEW]


@pytest.mark.parametrize(
    ("shape", "mask", "dtype"),
    [
        *itertools.product(("whole tiles", "ragged"), MASKS, HALVES),
        *((shape, mask, torch.bfloat16) for shape, mask in UNUSUAL),
    ],
)
def test_halves_are_near_the_floor(shape: str, mask: str, dtype: torch.dtype) -> None:
    """The output errs at most 2 floors in rms and gradients 8
    beside fp32 arithmetic; rows without keys are 0, and lse is that of fp64 to 1e-4."""
    here = masked(shape, mask, dtype)
    found, exact = KERNEL.gradients(here), gradients(here)
    floor = floor_of(exact, here.format)
    errors, least, spared = norms(found, exact), norms(floor, exact), arithmetic(exact)
    for tensor, limit in zip(TENSORS, (2, 8, 8, 8), strict=True):
        assert errors[tensor] <= limit * least[tensor] + spared[tensor], (tensor, errors, least)
    assert not found.out[exact.empty].any()
    full = ~exact.empty
    assert (found.lse.double() - exact.lse)[full].abs().max() < 1e-4
    assert torch.equal(found.lse == -torch.inf, exact.empty)


@pytest.mark.parametrize(
    ("shape", "mask"),
    [*(("ragged", mask) for mask in MASKS), ("narrow heads", "causal"), ("wide heads", "causal")],
)
def test_float32_is_in_float32(shape: str, mask: str) -> None:
    """fp32 inputs are multiplied in fp32: TF32, which keeps 11 bits, would not pass."""
    here = masked(shape, mask, torch.float32)
    found, exact = KERNEL.gradients(here), gradients(here)
    spared = arithmetic(exact)
    for tensor, error in norms(found, exact).items():
        assert error <= spared[tensor], (tensor, error, spared)


# The interpreter has each option by itself.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"block_q": 64, "block_kv": 32, "num_warps": 4, "p": "float32", "delta_o": "float32"},
    {"softmax": "guarded", "dp": "working", "delta_from": "dP*P"},
    {"scores": "working", "accumulator": "working", "row_sum": "working", "loop_order": "kv",
     "kv_order": "descending", "l_from": "rounded", "delta_from": "dP*P", "exponential": "exp"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((given, torch.bfloat16) for given in OPTIONS), (OPTIONS[-1], torch.float16)],
    ids=str,
)
def test_options_compute_what_they_claim(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Every option's error has the size of its emulation's, to 3 %, and element by element half of
    it or more is the emulation's own in bfloat16. (In float16 boundaries are eight times as dense,
    and fp32 arithmetic carries more over them.)"""
    here = case("whole tiles", dtype, is_causal=True)
    found, exact = KERNEL.gradients(here, **options), gradients(here)
    claim = KERNEL.claims(here, found, System.here())
    for tensor, expected in emulated_step(here, claim).items():
        r = getattr(exact, tensor)
        error, predicted = (x.double() - r for x in (getattr(found, tensor), expected))
        assert float(error.norm() / predicted.norm()) == pytest.approx(1.0, abs=0.03), tensor
        if dtype == torch.bfloat16:
            residual = float((error - predicted).norm() / predicted.norm())
            assert residual < 0.5, (tensor, residual)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_of_one_key_has_no_gradient(is_causal: bool) -> None:
    """Scores of 10,000 on the diagonal and 0 beside it: P is 1 there, whatever the tile, so O is V,
    delta is dP, and dS is 0 to the last bits of two sums in another order. Where scale S - m is one
    fused step, P is 1 only to 5e-4, and dq to 0.1."""
    made = torch.Generator().manual_seed(7)
    v, dO = (torch.randn(2, 3, n, 64, generator=made).bfloat16().cuda() for n in (192, 64))
    q = (114.0 * torch.eye(64)).bfloat16().cuda().expand(2, 3, 64, 64).contiguous()
    k = torch.zeros_like(v)
    k[:, :, 64:128] = q  # one whole tile of forward
    one = AttentionCase(
        ref=CaseRef(case="one key"), q=q, k=k, v=v, scale=0.77, grad_out=dO,
        is_causal=is_causal, causal_offset=128,
    )  # fmt: skip
    found = KERNEL.gradients(one, **KERNEL.with_options({"delta_o": "float32"}))
    assert found.dq.abs().max() < 1e-3


def test_runs_are_bitwise_reproducible() -> None:
    """No sum depends on which program comes first."""
    here = case("ragged", is_causal=True)
    a, b = KERNEL.gradients(here), KERNEL.gradients(here)
    assert all(torch.equal(getattr(a, x), getattr(b, x)) for x in (*TENSORS, "lse"))


def test_large_strides_reach_beyond_32_bits() -> None:
    """A head that begins more than 2^31 elements into a tensor is read where it is."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    space = torch.empty(2, 2**27 + 64, 16, device="cuda", dtype=torch.bfloat16)
    x = space[None, :, -64:]  # the second head lies 2^31 + 1024 elements behind the first
    x.copy_(torch.randn(x.shape, device="cuda"))
    here = AttentionCase(ref=CaseRef(case="far"), q=x, k=x, v=x, scale=0.25, grad_out=x)
    near = {name: x.contiguous() for name in ("q", "k", "v", "grad_out")}
    expected = KERNEL.gradients(AttentionCase(ref=here.ref, scale=0.25, **near))
    found = KERNEL.gradients(here)
    assert all(torch.equal(getattr(found, x), getattr(expected, x)) for x in TENSORS)
