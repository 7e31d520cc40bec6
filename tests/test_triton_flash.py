"""The kernel `triton-flash`: what of it needs no triton, and what only a GPU can show:
bfloat16, its real tiles, and that it rounds as it says. `triton_flash_cases.py` has the
rest."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from interpreted import on_cuda
from oracles import step, to_cuda

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused, UsageError
from numdev.kernels import find
from numdev.kernels.emulation.kernel import emulated, emulated_step
from numdev.kernels.output import Output
from numdev.kernels.reference import floor_of, gradients
from numdev.kernels.triton_flash.host import KernelCall, tiles
from numdev.system import System

KERNEL = find("triton-flash")


def case(**changes: Any) -> AttentionCase:
    shapes = {"q": (1, 2, 6, 20), "k": (1, 1, 9, 20), "v": (1, 1, 9, 4)}
    dtype = changes.pop("dtype", torch.bfloat16)
    tensors = {name: torch.ones(*shape, dtype=dtype) for name, shape in shapes.items()}
    return AttentionCase(
        ref=CaseRef(case="small"), **{"scale": 0.5, **tensors, **changes}
    )


def call(case: AttentionCase, **options: Any) -> KernelCall:
    return KernelCall.of(case, KERNEL.with_options(options))


@pytest.mark.parametrize(("options", "words"), [
    ({"scores": "bfloat16"}, "scores"), ({"delta_from": "dP*P", "delta_o": "float32"}, "delta_o"),
    ({"softmax": "stable"}, "did you mean"), ({"block_q": 8}, "block_q"),
    ({"block_kv": 48}, "block_kv"), ({"block_kv": 64.0}, "block_kv"),
    ({"softmax": "guarded", "beta": 2.0}, "of the stabilised softmax"),
    ({"tie_tolerance": 0.0}, "of the stabilised softmax"),
    ({"softmax": "stabilised", "beta": 0.5}, "at least 1.0"),
    ({"softmax": "stabilised", "tie_tolerance": -1.0}, "at least 0.0"),
    ({"softmax": "stabilised", "beta": math.nan}, "at least 1.0"),
])  # fmt: skip
def test_senseless_options_are_refused(options: dict[str, Any], words: str) -> None:
    """Before anything runs, with the option's name and what it could be."""
    with pytest.raises(UsageError, match=words):
        KERNEL.with_options(options)


def test_the_claim_is_what_ran() -> None:
    """Every option in force is said, tiles included, and the claim is read off it; a case
    can be emulated under it. Which rows the stabilised softmax shifts hangs on the last
    bits of their scores, so nothing is claimed; the guarded one asks none."""

    def claim(**options: Any) -> Any:
        ran = Output(out=torch.zeros(1), did=call(case(), **options).options)
        return KERNEL.claims(case(), ran, System(device="cuda"))

    result = claim(scores="working", block_kv=16, kv_order="descending")
    expected = {
        "scores": "working",
        "block_kv": 16,
        "block_q": 128,
        "kv_order": "descending",
    }
    assert (
        result.items() >= {**expected, "p": "working", "accumulator": "float32"}.items()
    )
    emulated(case(), **result)
    assert claim(softmax="stabilised") is None
    asked = {"softmax": "guarded", "dp": "working"}
    assert claim(**asked).items() >= asked.items()


@pytest.mark.parametrize(("changes", "reason"), [
    ({"softcap": 5.0}, "soft cap"), ({"dtype": torch.float64}, "not float64"),
    ({"mask": torch.zeros(9, dtype=torch.float64)}, "mask is in float64"),
    ({"v": torch.ones(1, 1, 9, 257, dtype=torch.bfloat16)}, "at most 256 features"),
])  # fmt: skip
def test_what_it_cannot_do_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    """A case it cannot run is declined in words; the rest is not."""
    with pytest.raises(Refused, match=reason):
        KERNEL.attend(case(**changes))
    KERNEL.accept(case(sinks=torch.zeros(2), dtype=torch.float32))


def test_heads_are_padded_to_powers_of_two() -> None:
    """20 features take 32 places, 4 take 16, which is the least. fp32 products have small
    tiles, also where only P is fp32, and what is asked for is taken."""
    plan = call(case()).plan
    assert (plan.head_dim, plan.wide, plan.v_dim, plan.v_wide) == (20, 32, 4, 16)
    wide = call(case(v=torch.ones(1, 1, 9, 129, dtype=torch.bfloat16))).plan
    assert tiles("of_queries", wide, torch.bfloat16)[:2] == (64, 32)
    assert tiles("of_keys", plan, torch.float32)[:2] == (32, 32)
    assert tiles("of_keys", plan, torch.bfloat16)[:2] == (64, 128)

    def sizes(**options: Any) -> tuple[int, int]:
        chosen = call(case(), **options).options
        return chosen["block_q"], chosen["block_kv"]

    assert sizes() == (128, 64)
    assert sizes(p="float32") == (32, 32)
    assert sizes(block_q=16) == (16, 64)


# --- on a GPU -------------------------------------------------------------------------

HALVES = (torch.bfloat16, torch.float16)
TENSORS = ("out", "dq", "dk", "dv")
SHAPES = {
    "whole tiles": {"q_len": 512, "kv_len": 512, "head_dim": 128, "v_dim": 128},
    "ragged": {"q_len": 333, "kv_len": 471, "head_dim": 80, "v_dim": 48},
    "wide heads": {"q_len": 200, "kv_len": 200, "head_dim": 256, "v_dim": 256},
    "narrow heads": {"q_len": 300, "kv_len": 300, "head_dim": 16, "v_dim": 8},
    "decode": {"q_len": 1, "kv_len": 1000, "head_dim": 64, "v_dim": 64},
}


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_offset": 138},
    "window": {"window": (70, 9), "causal_offset": 20},
    "bool": {"mask": ("bool", "1hqk")},
    "additive": {"mask": ("holes", "1hqk"), "is_causal": True},
}
# Compiling is what takes time here: unusual heads meet few masks.
UNUSUAL = itertools.product(
    ("wide heads", "narrow heads", "decode"), ("causal", "window")
)


def on_gpu(
    shape: str, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> AttentionCase:
    """4 query heads on 2 kv heads, on the GPU, with an upstream gradient."""
    return to_cuda(
        step(batch=2, heads=4, kv_heads=2, dtype=dtype, **SHAPES[shape], **changes)
    )


def norms(result: Any, other: Any) -> dict[str, float]:
    """Of the differences, by tensor."""
    pairs = {x: [getattr(y, x).double() for y in (result, other)] for x in TENSORS}
    return {x: float((a - b).norm()) for x, (a, b) in pairs.items()}


def arithmetic(exact: Any) -> dict[str, float]:
    """What fp32 arithmetic may err in norm, by tensor: 32 roundings of the term scale."""
    scales = (exact.term_scale, exact.dq_terms, exact.dk_terms, exact.dv_terms)
    return {
        x: 32 * 2.0**-24 * float(s.norm()) for x, s in zip(TENSORS, scales, strict=True)
    }


@on_cuda
@pytest.mark.parametrize(
    ("shape", "mask", "dtype"),
    [
        *itertools.product(("whole tiles", "ragged"), MASKS, HALVES),
        *((shape, mask, torch.bfloat16) for shape, mask in UNUSUAL),
        *(("ragged", mask, torch.float32) for mask in MASKS),
        *((shape, "causal", torch.float32) for shape in ("narrow heads", "wide heads")),
    ],
)
def test_errors_are_near_the_floor(shape: str, mask: str, dtype: torch.dtype) -> None:
    """The output errs at most 2 floors in rms and gradients 8 beside fp32 arithmetic, in
    float32 by that alone (TF32 would not pass); rows without keys are 0, and lse is
    fp64's to 1e-4."""
    case = on_gpu(shape, dtype, **MASKS[mask])
    result, exact = KERNEL.gradients(case), gradients(case)
    floor = floor_of(exact, case.format)
    errors, least, spared = norms(result, exact), norms(floor, exact), arithmetic(exact)
    limits = (0, 0, 0, 0) if dtype == torch.float32 else (2, 8, 8, 8)
    for tensor, limit in zip(TENSORS, limits, strict=True):
        assert errors[tensor] <= limit * least[tensor] + spared[tensor], (
            tensor,
            errors,
            least,
        )
    assert not result.out[exact.empty].any()
    full = ~exact.empty
    assert (result.lse.double() - exact.lse)[full].abs().max() < 1e-4
    assert torch.equal(result.lse == -torch.inf, exact.empty)


# The interpreter has each option by itself.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"block_q": 64, "block_kv": 32, "p": "float32", "delta_o": "float32"},
    {"softmax": "guarded", "dp": "working", "delta_from": "dP*P"},
    {"scores": "working", "accumulator": "working", "row_sum": "working", "loop_order": "kv",
     "kv_order": "descending", "l_from": "rounded", "delta_from": "dP*P", "exponential": "exp"},
)  # fmt: skip


@on_cuda
@pytest.mark.parametrize(
    ("options", "dtype"),
    [*((passed, torch.bfloat16) for passed in OPTIONS), (OPTIONS[-1], torch.float16)],
    ids=str,
)
def test_options_compute_what_they_claim(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Every option's error has the size of its emulation's, to 3 %, and element by
    element half of it or more is the emulation's own in bfloat16. (In float16 boundaries
    are eight times as dense, and fp32 arithmetic carries more over them.)"""
    case = on_gpu("whole tiles", dtype, is_causal=True)
    result, exact = KERNEL.gradients(case, **options), gradients(case)
    claim = KERNEL.claims(case, result, System.probe())
    for tensor, expected in emulated_step(case, claim).items():
        r = getattr(exact, tensor)
        error, predicted = (x.double() - r for x in (getattr(result, tensor), expected))
        assert float(error.norm() / predicted.norm()) == pytest.approx(1.0, abs=0.03), (
            tensor
        )
        if dtype == torch.bfloat16:
            residual = float((error - predicted).norm() / predicted.norm())
            assert residual < 0.5, (tensor, residual)


@on_cuda
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_of_one_key_has_no_gradient(is_causal: bool) -> None:
    """Scores of 10,000 on the diagonal and 0 beside it: P is 1 there, whatever the tile,
    so O is V, delta is dP, and dS is 0 to the last bits of two sums in another order.
    Where scale S - m is one fused step, P is 1 only to 5e-4, and dq to 0.1."""
    created = torch.Generator().manual_seed(7)
    v, dO = (
        torch.randn(2, 3, n, 64, generator=created).bfloat16().cuda() for n in (192, 64)
    )
    q = (114.0 * torch.eye(64)).bfloat16().cuda().expand(2, 3, 64, 64).contiguous()
    k = torch.zeros_like(v)
    k[:, :, 64:128] = q  # one whole tile of forward
    one = AttentionCase(
        ref=CaseRef(case="one key"), q=q, k=k, v=v, scale=0.77, grad_out=dO,
        is_causal=is_causal, causal_offset=128,
    )  # fmt: skip
    result = KERNEL.gradients(one, **KERNEL.with_options({"delta_o": "float32"}))
    assert result.dq.abs().max() < 1e-3


@on_cuda
def test_runs_are_bitwise_reproducible() -> None:
    """No sum depends on which program comes first."""
    case = on_gpu("ragged", is_causal=True)
    a, b = KERNEL.gradients(case), KERNEL.gradients(case)
    assert all(torch.equal(getattr(a, x), getattr(b, x)) for x in (*TENSORS, "lse"))


@on_cuda
def test_large_strides_reach_beyond_32_bits() -> None:
    """A head that begins more than 2^31 elements into a tensor is read where it is."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    space = torch.empty(2, 2**27 + 64, 16, device="cuda", dtype=torch.bfloat16)
    x = space[None, :, -64:]  # the second head lies 2^31 + 1024 elements behind the first
    x.copy_(torch.randn(x.shape, device="cuda"))
    case = AttentionCase(ref=CaseRef(case="far"), q=x, k=x, v=x, scale=0.25, grad_out=x)
    near = {name: x.contiguous() for name in ("q", "k", "v", "grad_out")}
    expected = KERNEL.gradients(AttentionCase(ref=case.ref, scale=0.25, **near))
    result = KERNEL.gradients(case)
    assert all(torch.equal(getattr(result, x), getattr(expected, x)) for x in TENSORS)
