"""PyTorch's SDPA and FlexAttention: forced alone, certified, refusing in words, and
rounding where they claim to; and what only a GPU can show of them. That they are
attention is in test_oracle.py.

A compiled FlexAttention takes seconds a shape on a CPU, so those tests are few and
small."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_bench import measured_rows
from oracles import (
    EXP_U20,
    FEATURES,
    U32,
    assert_within,
    attention,
    error_bounds,
    make_case,
    step,
)
from recipes import drawn, rms
from torch import Tensor

from numdev import request_models
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import Output, Refused, all_kernels, find, flex, sdpa
from numdev.kernels.emulation.kernel import emulation
from numdev.kernels.reference import attend, floor_of, gradients
from numdev.report.summary import HEADLINE
from numdev.studies.audit.plan import Task
from numdev.system import System

CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ON_CPU = ("sdpa-math", "sdpa-flash", "sdpa-default")
FLEX = find("flex")
H200 = System(device="cuda", gpu="NVIDIA H200", capability=(9, 0), processors=132)
CPU = System(device="cpu")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("causal", [False, True])
def test_forced_alone_and_certified(dtype: torch.dtype, causal: bool) -> None:
    """A forced backend runs its own operator, and the output says which one it was."""
    case = make_case(q_len=8, kv_len=8, dtype=dtype, is_causal=causal)
    ran = {name: find(name).attend(case).ran for name in ON_CPU}
    assert ran == {
        "sdpa-math": "math",
        "sdpa-flash": CPU_FLASH,
        "sdpa-default": CPU_FLASH,
    }


@pytest.mark.parametrize("name", ON_CPU)
def test_inference_mode_hides_no_operator(name: str) -> None:
    """There SDPA reaches the dispatcher as one operator. What runs in it is seen all the
    same, of tensors made in that mode too, with the same bits."""
    case = make_case(q_len=8, kv_len=8, dtype=torch.bfloat16)
    usual = find(name).attend(case)
    with torch.inference_mode():
        inside = dataclasses.replace(case, q=case.q.clone(), v=case.v.clone())
        outputs = [find(name).attend(case), find(name).attend(inside)]
    for output in (*outputs, find(name).attend(inside)):
        assert output.ran == usual.ran
        assert output.out.equal(usual.out)
        assert (output.lse is None) == (usual.lse is None)


@pytest.mark.parametrize("name", ["efficient", "cudnn", "math"])
def test_another_operator_than_forced_is_an_error(name: str, monkeypatch: Any) -> None:
    """If forcing does not take effect, there is no result at all."""
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda backends: contextlib.nullcontext())
    says = rf"{name.upper()}\w* was forced, and {CPU_FLASH} ran instead"
    with pytest.raises(MeasurementError, match=says):
        find(f"sdpa-{name}").attend(make_case())


def test_another_backward_than_forced_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fused forward whose own backward does not run gives no result; the default
    records it."""

    class Unfused(torch.autograd.Function):
        """Runs the fused operator, and another backward."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_of_torch(q, k, v)

        @staticmethod
        def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return dO * 2, dO * 3, dO * 4

    attention_of_torch = torch.nn.functional.scaled_dot_product_attention
    unfused = lambda q, k, v, **_: Unfused.apply(q, k, v)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", unfused)
    case = step(kv_len=4)
    says = f"{CPU_FLASH} ran forward, and math instead of {CPU_FLASH}_backward backward"
    with pytest.raises(MeasurementError, match=says):
        find("sdpa-flash").gradients(case)
    result = find("sdpa-default").gradients(case)
    assert (result.ran, result.ran_backward) == (CPU_FLASH, "math")


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's CPU flash kernel and its backward replaced by others, through the
    registry that is there for it, as the implementation `ZEROS`."""
    from torch.nn.attention import _registry

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(dO: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def register() -> Any:
        library = torch.library.Library("aten", "IMPL")
        library.impl(CPU_FLASH, forward, "CPU")
        library.impl(f"{CPU_FLASH}_backward", backward, "CPU")
        return SimpleNamespace(library=library, remove=library._destroy)

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {"ZEROS": register})
    torch.nn.attention.activate_flash_attention_impl("ZEROS")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_replaced_implementation_is_recorded(replaced: None) -> None:
    """What was activated in place of PyTorch's flash kernels stands in the settings, and
    in what ran of both passes of flash attention; the math path is not touched by it."""
    assert System.probe("cpu").settings["flash_attention_impl"] == "ZEROS"
    for name in ("sdpa-flash", "sdpa-default"):
        result = find(name).gradients(step(kv_len=4))
        assert result.ran == f"{CPU_FLASH} (ZEROS)"
        assert result.ran_backward == f"{CPU_FLASH}_backward (ZEROS)"
        assert not result.out.any()
        assert find(name).claims(step(kv_len=4), result, System.probe("cpu")) == {
            "preset": "fa2"
        }
    assert find("sdpa-math").attend(make_case()).ran == "math"


@pytest.mark.parametrize(("name", "case", "reason"), [
    ("sdpa-flash", make_case(v_dim=7), "requires q,k,v to have the same last dimension"),
    # Of 2 or 4 axes alone
    ("sdpa-flash", make_case(mask=("bool", "hqk")), "attn mask shapes"),
    ("sdpa-efficient", make_case(), "gives no reason"),
])  # fmt: skip
def test_a_refusal_has_pytorchs_own_reason(
    name: str, case: AttentionCase, reason: str
) -> None:
    """The reason is PyTorch's sentence, once, without where in its source it came from;
    where it gives none, that is said. A call is kept as it came."""
    with pytest.raises(Refused, match=reason) as refused:
        find(name).attend(case)
    words = ("Triggered", ".cpp", reason)
    assert [refused.value.message.count(word) for word in words] == [0, 0, 1]


# --- FlexAttention --------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("feature", [
    "one key", "causal, more keys, bottom-right", ("soft cap, causal, additive mask"), "bool mask",
])  # fmt: skip
def test_compiled_flex_equals_the_oracle(feature: str) -> None:
    """Compiled for the CPU in float32 it is within float32's bounds, and was really
    compiled."""
    case = make_case(**{"head_dim": 16, **FEATURES[feature]}, dtype=torch.float32)
    exact, result = attention(case), FLEX.attend(case)
    assert_within(
        result.out, exact.out, error_bounds(case, exact, U32, exp_error=EXP_U20)[0]
    )
    assert result.ran == "flex_attention, compiled for cpu"
    assert result.lse is None


def test_there_is_no_backward_on_a_cpu() -> None:
    """A training step is refused where PyTorch has no backward, compiled or not; nor
    float64."""
    with pytest.raises(Refused, match="takes float16, bfloat16 and float32"):
        FLEX.attend(make_case())
    for compiled in (True, False):
        with pytest.raises(Refused, match="no backward on a CPU"):
            FLEX.gradients(step(dtype=torch.float32), compiled=compiled)


def test_a_compiled_call_that_was_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the compiler switched off the eager path is not passed off as the compiled
    kernel."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex._run_flex)
    with pytest.raises(MeasurementError, match="ran eagerly"):
        FLEX.attend(make_case(dtype=torch.float32))


def test_flex_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's limits are lifted during a call, and as they were after one that
    raised."""
    import torch._dynamo

    def limits() -> tuple[int, int]:
        config = torch._dynamo.config
        return config.recompile_limit, config.accumulated_recompile_limit

    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError(limits())

    before = limits()
    monkeypatch.setattr(flex, "_run_flex", crash)
    with pytest.raises(ZeroDivisionError) as caught:
        FLEX.attend(make_case(), compiled=False)
    assert (caught.value.args, limits()) == (((1_000_000, 1_000_000),), before)


@pytest.mark.parametrize(("fields", "did", "system", "claim"), [
    ({}, {}, H200, {"block_kv": 128}), ({"head_dim": 128}, {}, H200, {"block_kv": 64}),
    ({"head_dim": 80}, {}, H200, {"block_kv": 64}), ({"head_dim": 256}, {}, H200, {"block_kv": 32}),
    ({"dtype": torch.float32}, {}, H200, {"block_kv": 32}),
    ({}, {"BLOCK_N": 16}, H200, {"block_kv": 16}), ({}, {"PRESCALE_QK": True}, H200, None),
    ({"heads": 4}, {}, H200, {"block_kv": 128, "group_sum": "running"}),
    # Decoding: 132 multiprocessors over 2 kv heads, twice.
    ({"q_len": 1}, {}, H200, {"block_kv": 64, "splits": 132}),
    ({}, {}, CPU, {"block_kv": 300}), ({"is_causal": True}, {}, CPU, {"block_kv": 128}),
])  # fmt: skip
def test_claims_of_flex(fields: Any, did: Any, system: System, claim: Any) -> None:
    """FlashAttention-2's arithmetic in the tiles of what ran, on a machine we need not
    have."""
    shape: dict[str, Any] = {"head_dim": 64, "q_len": 300, "kv_len": 300, "kv_heads": 2}
    case = make_case(**{**shape, "dtype": torch.bfloat16, **fields})
    ran = {"compiled": True, "device": system.device, **did}
    result = FLEX.claims(case, Output(out=torch.zeros(1), did=ran), system)
    # What is rounded is Q times scale and log2(e), which no emulation does
    if claim is None:
        assert result is None
        return
    assert result == {"preset": "fa2", **claim}
    # A claim that `emulated` understands
    assert emulation(case, result).shape == case.q.shape


def ratios(name: str, case: AttentionCase, **options: Any) -> list[float]:
    """The size of each head's error by that of its claim."""
    fmt, system = case.format.name, System.probe(case.q.device.type)
    task = Task(case=case.ref, role="kernel", kernel=name, format=fmt, options=options)
    rows = measured_rows(task, find(name), case, system)
    assert not [row.reason for row in rows if row.reason]
    return [row.expected_ratio for row in rows if row.tensor == "out"]


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [{}, {"is_causal": True}])
def test_compiled_flex_rounds_where_it_claims_to(fields: dict[str, Any]) -> None:
    """Compiled for the CPU, each head's error is as large as its claim predicts."""
    assert ratios("flex", drawn(300, **fields)) == pytest.approx([1.0, 1.0], abs=0.05)


# --- on a GPU -------------------------------------------------------------------------

BACKENDS = {"sdpa-math": "math"} | {
    f"sdpa-{x}": f"_scaled_dot_product_{x}_attention"
    for x in ("flash", "efficient", "cudnn")
}
FLEX_FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (50, 0)},
    "soft cap": {"softcap": 5.0},
}


def on_cuda(length: int, regime: str = "normal", **fields: Any) -> AttentionCase:
    return drawn(length, regime, device="cuda", **{"batch": 2, "heads": 4, **fields})


def assert_near_the_truth(
    case: AttentionCase, result: Output, of_out: float = 8.0
) -> None:
    """Gradients are within 8 floors of fp64, and the output within `of_out` in every
    head; the log-sum-exp is too: fp32 sums of so few terms are off by far less than
    1e-4."""
    exact = gradients(case)
    floor = floor_of(exact, case.format)
    for tensor, most in (("out", of_out), ("dq", 8.0), ("dk", 8.0), ("dv", 8.0)):
        r = getattr(exact, tensor)
        error, least = (rms(getattr(x, tensor).double() - r) for x in (result, floor))
        assert (error <= most * least).all(), (tensor, error / least)
    if result.lse is not None and result.lse.shape == exact.lse.shape:
        assert (result.lse.double() - exact.lse).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_a_backend_runs_alone_near_the_truth(
    name: str, dtype: torch.dtype, causal: bool
) -> None:
    """The forced operator and its own backward ran, on whatever thread; only math has no
    lse."""
    case = on_cuda(200, dtype=dtype, is_causal=causal)
    result = find(name).gradients(case)
    assert result.ran == BACKENDS[name]
    assert result.ran_backward == (
        "math" if name == "sdpa-math" else f"{BACKENDS[name]}_backward"
    )
    assert (result.lse is None) == (name == "sdpa-math")
    assert_near_the_truth(case, result, of_out=1.6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "shape", [(1024, 64, True), (1500, 128, False), (1000, 80, True)]
)
@pytest.mark.parametrize("regime", ["normal", "outliers", "sink", "ties"])
def test_backends_round_where_they_claim_to(name: str, shape: Any, regime: str) -> None:
    """Each head's error is within 5 % of its emulation's, and element by element half of
    it or more is the emulation's own: tiles, their order and the splits of small calls
    are right."""
    length, head_dim, causal = shape
    case = on_cuda(length, regime, head_dim=head_dim, is_causal=causal)
    assert ratios(name, case) == pytest.approx([1.0] * 4, abs=0.05)
    result, exact = find(name).attend(case), attend(case).out
    claim = find(name).claims(case, result, System.probe("cuda")) or {}
    error = result.out.double() - exact
    assert (error - (emulation(case, claim) - exact)).norm() <= 0.5 * error.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", FLEX_FEATURES)
def test_flex_rounds_where_it_claims_to_on_a_gpu(
    dtype: torch.dtype, feature: str
) -> None:
    """The fused kernel runs, each head's error within 5 % of what its claim predicts."""
    case = on_cuda(1000, dtype=dtype, **FLEX_FEATURES[feature])
    result = FLEX.attend(case)
    assert result.ran == "flex_attention, compiled for cuda"
    assert (result.lse.double() - attend(case).lse).abs().max() < 1e-4
    for options in ({}, {"block_n": 32}):
        assert ratios("flex", case, **options) == pytest.approx([1.0] * 4, abs=0.05), (
            options
        )


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("feature", FLEX_FEATURES)
def test_backward_of_flex_on_a_gpu(feature: str, compiled: bool) -> None:
    """With grouped heads."""
    case = on_cuda(300, kv_heads=2, **FLEX_FEATURES[feature])
    assert_near_the_truth(case, FLEX.gradients(case, compiled=compiled))


def test_every_backend_is_forced_and_known() -> None:
    """A backend without its line in `OPERATORS` would run PyTorch's own choice under its
    name, one without its line in `FUSED` the math path. One without its claim would be
    held to FlashAttention-2's in its default tiles, one without its line in HEADLINE be
    spoken of as one that was asked for by name."""
    named = {name for name in all_kernels() if name.startswith("sdpa-")} - {
        "sdpa-default"
    }
    assert named == sdpa.OPERATORS["cuda"].keys()
    operators = {op for of in sdpa.OPERATORS.values() for op in of.values()}
    assert operators <= {"math", *sdpa.FUSED}
    assert named <= set(request_models.BACKENDS) == set(HEADLINE)
    on_cpu = {name for name in named if find(name).requires.device is None}
    assert on_cpu == sdpa.OPERATORS["cpu"].keys()
    assert named == BACKENDS.keys()  # what a GPU tests
    case = make_case(q_len=300, kv_len=300, head_dim=64, dtype=torch.bfloat16)
    for system in (CPU, H200):
        for operator in sdpa.OPERATORS[system.device].values():
            assert sdpa.claim_of(operator, case, system) != {"preset": "fa2"}, operator
