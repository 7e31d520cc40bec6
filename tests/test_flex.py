"""FlexAttention: the right function eager and compiled, what ran, and how it says that it rounds.

The compiled kernel on a CPU takes seconds a shape, so those tests are few and small; what Triton
makes of it only a GPU can show.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from on_bench import measured_rows
from oracles import FEATURES, U32, assert_within, attention, error_bounds, make_case, step

from numdev.audit.plan import Task
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, Refused
from numdev.kernels import Output, find, flex
from numdev.kernels.emulation.predict import emulation
from numdev.kernels.reference import attend, floor_of, gradients
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

FLEX = find("flex")
# The C++ kernel's exponential is good to 20 ulp, that is 40 u.
EXP_U20 = 40 * U32
H200 = System(device="cuda", gpu="NVIDIA H200", capability=(9, 0), processors=132)
CPU = System(device="cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def ran(device: str, **options: Any) -> Output:
    return Output(out=torch.zeros(1), did={"compiled": True, "device": device, **options})


# --- the right function --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature",
    ["one key", "causal, more keys, bottom-right", "soft cap, causal, additive mask", "bool mask"],
)
def test_compiled_equals_the_oracle(feature: str) -> None:
    """Compiled for the CPU in float32 it is within float32's bounds, and was really compiled."""
    case = make_case(**{"head_dim": 16, **FEATURES[feature]}, dtype=torch.float32)
    exact, found = attention(case), FLEX.attend(case)
    assert_within(found.out, exact.out, error_bounds(case, exact, U32, exp_error=EXP_U20)[0])
    assert found.ran == "flex_attention, compiled for cpu"
    assert found.lse is None


# --- what it refuses -----------------------------------------------------------------------------


def test_there_is_no_backward_on_a_cpu() -> None:
    """A training step is refused where PyTorch has no backward, compiled or not; and so is float64,
    compiled."""
    with pytest.raises(Refused, match="takes float16, bfloat16 and float32"):
        FLEX.attend(make_case())
    for compiled in (True, False):
        with pytest.raises(Refused, match="no backward on a CPU"):
            FLEX.gradients(step(dtype=torch.float32), compiled=compiled)


def test_a_compiled_call_that_was_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler switched off the eager path is not passed off as the compiled kernel."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex._call)
    with pytest.raises(MeasurementError, match="ran eagerly"):
        FLEX.attend(make_case(dtype=torch.float32))


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's limits are lifted during a call, and as they were after one that raised."""
    import torch._dynamo

    config = torch._dynamo.config
    during = []

    def crash(*_: Any, **__: Any) -> None:
        during.append((config.recompile_limit, config.accumulated_recompile_limit))
        raise ZeroDivisionError

    before = (config.recompile_limit, config.accumulated_recompile_limit)
    monkeypatch.setattr(flex, "_call", crash)
    with pytest.raises(ZeroDivisionError):
        FLEX.attend(make_case(), compiled=False)
    assert during == [(flex.UNLIMITED, flex.UNLIMITED)]
    assert (config.recompile_limit, config.accumulated_recompile_limit) == before


# --- how it rounds -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "did", "system", "claim"),
    [
        ({}, {"device": "cuda"}, H200, {"block_kv": 128}),
        ({"head_dim": 128}, {"device": "cuda"}, H200, {"block_kv": 64}),
        ({"head_dim": 80}, {"device": "cuda"}, H200, {"block_kv": 64}),
        ({"head_dim": 256}, {"device": "cuda"}, H200, {"block_kv": 32}),
        ({"dtype": torch.float32}, {"device": "cuda"}, H200, {"block_kv": 32}),
        ({}, {"device": "cuda", "BLOCK_N": 16}, H200, {"block_kv": 16}),
        ({"heads": 4}, {"device": "cuda"}, H200, {"block_kv": 128, "group_sum": "running"}),
        ({}, {"device": "cuda", "BACKEND": "FLASH"}, H200, {}),
        ({}, {"device": "cuda", "PRESCALE_QK": True}, H200, None),
        # Decoding: 132 multiprocessors over 2 kv heads, twice.
        ({"q_len": 1}, {"device": "cuda"}, H200, {"block_kv": 64, "splits": 132}),
        ({"q_len": 1}, {"device": "cuda", "BACKEND": "TRITON"}, H200, {"block_kv": 128}),
        ({}, {"device": "cpu"}, CPU, {"block_kv": 300}),
        ({"is_causal": True}, {"device": "cpu"}, CPU, {"block_kv": 128}),
    ],
)
def test_claims(
    fields: dict[str, Any], did: dict[str, Any], system: System, claim: dict[str, Any] | None
) -> None:
    """FlashAttention-2's arithmetic in the tiles of what ran, on a machine we need not have."""
    shape: dict[str, Any] = {"head_dim": 64, "q_len": 300, "kv_len": 300, "kv_heads": 2}
    case = make_case(**{**shape, "dtype": torch.bfloat16, **fields})
    found = FLEX.claims(case, ran(**did), system)
    if claim is None:  # what is rounded is Q times scale and log2(e), which no emulation does
        assert found is None
        return
    assert found == {"preset": "fa2", **claim}
    assert emulation(case, found).shape == case.q.shape  # a claim that `emulated` understands


def drawn(device: str, dtype: torch.dtype, length: int = 300, **fields: Any) -> AttentionCase:
    shapes = Shapes(
        batch=2, heads=4, kv_heads=4, q_len=length, kv_len=length, head_dim=64, v_dim=64
    )
    q, k, v = (x.to(dtype).to(device) for x in draw("normal", shapes, seed=3, options={}))
    return AttentionCase(ref=CaseRef(case="flex"), q=q, k=k, v=v, scale=0.125, **fields)


def ratios(case: AttentionCase, **options: Any) -> list[float]:
    """The size of each head's error by that of its claim."""
    name = case.format.name
    task = Task(case=case.ref, role="kernel", kernel="flex", format=name, options=options)
    system = System.here(case.q.device.type)
    rows = measured_rows(task, FLEX, case, system)
    assert not [row.reason for row in rows if row.reason]
    return [row.expected_ratio for row in rows if row.tensor == "out"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}])
def test_compiled_rounds_where_it_claims_to(fields: dict[str, Any]) -> None:
    """So is it compiled for the CPU."""
    for ratio in ratios(drawn("cpu", torch.bfloat16, **fields)):
        assert ratio == pytest.approx(1.0, abs=0.05)


# --- on a GPU ------------------------------------------------------------------------------------


ON_GPU: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (50, 0)},
    "soft cap": {"softcap": 5.0},
}


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", ON_GPU)
def test_the_triton_kernel_rounds_where_it_claims_to(dtype: torch.dtype, feature: str) -> None:
    """The fused kernel runs, and each head's error is within 5 % of what its claim predicts,
    whatever its tiles."""
    case = drawn("cuda", dtype, 1000, **ON_GPU[feature])
    found = FLEX.attend(case)
    assert found.ran == "flex_attention, compiled for cuda"
    assert found.lse is not None
    # fp32 sums of 1000 terms, and a base changed twice: far below 1e-4.
    assert (found.lse.double() - attend(case).lse).abs().max() < 1e-4
    for options in ({}, {"block_m": 64, "block_n": 32}, {"backend": "TRITON"}):
        for ratio in ratios(case, **options):
            assert ratio == pytest.approx(1.0, abs=0.05), options


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("feature", ON_GPU)
def test_backward_on_a_gpu(feature: str, compiled: bool) -> None:
    """Gradients are within 8 floors of fp64, with grouped heads."""
    case = drawn("cuda", torch.bfloat16, **ON_GPU[feature])
    dO = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(1)).to(case.q)
    case = dataclasses.replace(case, k=case.k[:, :2], v=case.v[:, :2], grad_out=dO)
    found, exact = FLEX.gradients(case, compiled=compiled), gradients(case)
    floor = floor_of(exact, case.format)
    for tensor in ("dq", "dk", "dv"):
        r = getattr(exact, tensor)
        error, least = ((getattr(x, tensor).double() - r).norm() for x in (found, floor))
        assert error <= 8 * least, (tensor, float(error / least))
