"""PyTorch's SDPA on the CPU: forced alone, certified, refusing in words, and right.

What only a GPU can show is in test_gpu.py.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gradient_oracle import NAMES, step
from gradient_oracle import gradients as exact_gradients
from oracles import FEATURES, U32, U64, assert_within, attention, error_bounds, make_case
from torch import Tensor
from torch.nn.attention import SDPBackend

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import Refused, find, sdpa
from numdev.kernels.reference import attend
from numdev.sources.synthetic import Shapes, draw
from numdev.system import System

CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ON_CPU = ("sdpa-math", "sdpa-flash", "sdpa-default")
ALL = (*ON_CPU, "sdpa-efficient", "sdpa-cudnn")
UNSUPPORTED = {name for name, fields in FEATURES.items() if fields.keys() & {"softcap", "sinks"}}
# PyTorch's CPU kernel uses exp_u20 in float32: within 20 ulp, that is 40 u.
EXP_U20 = 40 * U32


# --- what runs is what was asked for -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_forced_alone_and_certified(dtype: torch.dtype, causal: bool) -> None:
    """A forced backend runs its own operator, and the output says which one it was."""
    case = make_case(q_len=8, kv_len=8, dtype=dtype, is_causal=causal)
    ran = {name: find(name).attend(case).ran for name in ON_CPU}
    assert ran == {"sdpa-math": "math", "sdpa-flash": CPU_FLASH, "sdpa-default": CPU_FLASH}


def test_the_default_says_what_it_chose() -> None:
    """Where flash cannot run the case, PyTorch's own choice is the math path, and recorded."""
    assert find("sdpa-default").attend(make_case(v_dim=7)).ran == "math"


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, f"EFFICIENT_ATTENTION was forced, and {CPU_FLASH} ran"),
        (SDPBackend.CUDNN_ATTENTION, f"CUDNN_ATTENTION was forced, and {CPU_FLASH} ran instead"),
        (SDPBackend.MATH, f"MATH was forced, and {CPU_FLASH} ran instead"),
    ],
)
def test_another_operator_than_forced_is_an_error(
    backend: SDPBackend, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If forcing does not take effect, there is no result at all."""
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda backends: contextlib.nullcontext())
    with pytest.raises(MeasurementError, match=says):
        sdpa._attend(make_case(), backend)


def test_the_math_path_for_a_fused_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falling back to the math path is caught like any other substitution."""
    forced = sdpa.sdpa_kernel
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda backends: forced([SDPBackend.MATH]))
    with pytest.raises(MeasurementError, match="FLASH_ATTENTION was forced, and math ran instead"):
        find("sdpa-flash").attend(make_case())


def test_global_switches_are_as_before() -> None:
    """Neither a result nor a refusal leaves PyTorch's backend switches or warnings changed."""

    def switches() -> list[Any]:
        cuda = torch.backends.cuda
        enabled = [cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
        return [*enabled, cuda.mem_efficient_sdp_enabled(), list(warnings.filters)]

    before = switches()
    find("sdpa-flash").attend(make_case())
    with pytest.raises(Refused):
        find("sdpa-flash").attend(make_case(v_dim=7))
    assert switches() == before


# --- the backward pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [{}, {"is_causal": True, "heads": 4}, {"mask": ("float", "qk")}])
def test_backward_is_certified(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    """A forced backend's own backward runs, and the output says which; lse is still recorded."""
    case = step(q_len=8, kv_len=8, kv_heads=2, dtype=dtype, **fields)
    steps = {name: find(name).gradients(case) for name in ON_CPU}
    ran = {name: (found.ran, found.ran_backward) for name, found in steps.items()}
    fused = (CPU_FLASH, f"{CPU_FLASH}_backward")
    assert ran == {"sdpa-math": ("math", "math"), "sdpa-flash": fused, "sdpa-default": fused}
    for name, found in steps.items():
        forward = find(name).attend(case)
        assert torch.equal(found.out, forward.out)
        assert (found.lse is None) == (name == "sdpa-math")
        assert not found.out.requires_grad


@pytest.mark.parametrize("feature", sorted(FEATURES.keys() - UNSUPPORTED))
@pytest.mark.parametrize("name", ON_CPU)
def test_gradients_equal_the_oracle(name: str, feature: str) -> None:
    """In float64 every feature's gradients are within the reference's own bounds, doubled where
    the backward rebuilds P from the log-sum-exp, which is rounded too. An additive -inf over whole
    rows is a convention."""
    case = step(**FEATURES[feature])
    try:
        found = find(name).gradients(case)
    except Refused:
        assert name == "sdpa-flash"
        return
    exact = exact_gradients(case)
    for x in NAMES:
        assert_within(getattr(found, x), getattr(exact, x), 2 * exact.bounds[x])


def test_the_backward_of_the_math_path_is_seen_as_such() -> None:
    """Where the default falls back to the math path, so does its backward."""
    found = find("sdpa-default").gradients(step(v_dim=7))
    assert (found.ran, found.ran_backward) == ("math", "math")


def test_another_backward_than_forced_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused forward whose own backward does not run gives no result; the default records it."""

    class Unfused(torch.autograd.Function):
        """Runs the fused operator, and another backward."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention_of_torch(q, k, v)

        @staticmethod
        def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return dO * 2, dO * 3, dO * 4

    attention_of_torch = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **_: Unfused.apply(q, k, v),
    )
    case = step(kv_len=4)
    says = f"{CPU_FLASH} ran forward, and math instead of {CPU_FLASH}_backward backward"
    with pytest.raises(MeasurementError, match=says):
        find("sdpa-flash").gradients(case)
    found = find("sdpa-default").gradients(case)
    assert (found.ran, found.ran_backward) == (CPU_FLASH, "math")


@pytest.mark.parametrize("field", ["softcap", "sinks"])
def test_what_forward_refuses_backward_refuses(field: str) -> None:
    """A step declines the cases the forward declines, in the same words."""
    case = step(**{field: 5.0 if field == "softcap" else True})
    with pytest.raises(Refused, match="PyTorch's SDPA has no"):
        find("sdpa-flash").gradients(case)
    with pytest.raises(Refused, match="same last dimension"):
        find("sdpa-flash").gradients(step(v_dim=7))


# --- replaced implementations --------------------------------------------------------------------


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's CPU flash kernel and its backward replaced by others, through the registry that is
    there for it, as the implementation `ZEROS`."""
    from torch.nn.attention import _registry

    class Handle:
        def __init__(self, library: torch.library.Library) -> None:
            self.library = library

        def remove(self) -> None:
            self.library._destroy()

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    def backward(dO: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    def register() -> Handle:
        library = torch.library.Library("aten", "IMPL")
        library.impl(CPU_FLASH, forward, "CPU")
        library.impl(f"{CPU_FLASH}_backward", backward, "CPU")
        return Handle(library)

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {"ZEROS": register})
    torch.nn.attention.activate_flash_attention_impl("ZEROS")
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_replaced_implementation_is_recorded(replaced: None) -> None:
    """What was activated in place of PyTorch's flash kernels stands in the settings, and in what
    ran of both passes of flash attention; the math path is not touched by it."""
    assert System.here("cpu").settings["flash_attention_impl"] == "ZEROS"
    for name in ("sdpa-flash", "sdpa-default"):
        found = find(name).gradients(step(kv_len=4))
        assert found.ran == f"{CPU_FLASH} (ZEROS)"
        assert found.ran_backward == f"{CPU_FLASH}_backward (ZEROS)"
        assert not found.out.any()
        assert find(name).claims(step(kv_len=4), found, System.here("cpu")) == {"preset": "fa2"}
    assert find("sdpa-math").attend(make_case()).ran == "math"


def test_pytorchs_own_implementation_needs_no_word() -> None:
    """Nothing is said of an implementation that was not replaced, also after one was."""
    assert System.here("cpu").settings["flash_attention_impl"] is None
    assert find("sdpa-flash").attend(make_case(kv_len=4)).ran == CPU_FLASH


# --- refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("field", "says"), [("softcap", "soft cap"), ("sinks", "attention sinks")])
def test_what_sdpa_has_no_word_for_is_refused(name: str, field: str, says: str) -> None:
    """A soft cap or sinks would be dropped silently; every backend refuses them."""
    fields: dict[str, Any] = {"softcap": {"softcap": 5.0}, "sinks": {"sinks": True}}[field]
    with pytest.raises(Refused, match=f"PyTorch's SDPA has no {says}"):
        find(name).attend(make_case(**fields))


def test_a_refusal_has_pytorchs_own_reason() -> None:
    """The reason is PyTorch's sentence, once, without where in its source it came from."""
    with pytest.raises(Refused, match="requires q,k,v to have the same last dimension") as refused:
        find("sdpa-flash").attend(make_case(v_dim=7))
    reason = refused.value.message
    assert "Triggered" not in reason
    assert ".cpp" not in reason
    assert reason.count("same last dimension") == 1


def test_a_mask_of_three_axes_is_refused_by_flash() -> None:
    """A call is kept as it came: PyTorch's flash kernel takes masks of two or four axes only."""
    case = make_case(mask=("bool", "hqk"))
    with pytest.raises(Refused, match="attn mask shapes"):
        find("sdpa-flash").attend(case)
    assert find("sdpa-default").attend(case).ran == "math"


def test_a_silent_refusal_still_has_a_reason() -> None:
    """Where PyTorch gives none, that is said."""
    with pytest.raises(Refused, match="gives no reason"):
        find("sdpa-efficient").attend(make_case())


def test_other_errors_are_not_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash inside PyTorch comes out as it is, so that its row is `failed`, not `skipped`."""

    def crash(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", crash)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        find("sdpa-math").attend(make_case())


# --- the right function --------------------------------------------------------------------------


@pytest.mark.parametrize("feature", sorted(FEATURES.keys() - UNSUPPORTED))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ON_CPU)
def test_equals_the_oracle(name: str, dtype: torch.dtype, feature: str) -> None:
    """Windows, offsets, masks and grouped heads reach PyTorch right: every backend is within the
    bounds of its format, or refuses (flash does, for V of another width)."""
    case = make_case(dtype=dtype, **FEATURES[feature])
    if name == "sdpa-flash" and case.v.shape[-1] != case.q.shape[-1]:
        with pytest.raises(Refused):
            find(name).attend(case)
        return
    exact, output = attention(case), find(name).attend(case)
    u, exp_error = (U64, 0.0) if dtype == torch.float64 else (U32, EXP_U20)
    out_bound, lse_bound = error_bounds(case, exact, u, exp_error=exp_error)
    empty = torch.tensor(exact.empty)
    assert_within(output.out.masked_fill(empty[..., None], 0.0), exact.out, out_bound)
    if output.lse is not None:
        expected = exact.lse.copy()
        expected[exact.empty] = 0
        assert_within(output.lse.masked_fill(empty, 0.0), expected, lse_bound)


@pytest.mark.parametrize("feature", ["causal", "causal, more keys, bottom-right", "bool mask"])
def test_comparing_rejects_the_neighbouring_function(feature: str) -> None:
    """The test above fails on a kernel that is given the wrong restriction."""
    case, wrong = make_case(**FEATURES[feature]), make_case(**{**FEATURES[feature], "mask": None})
    wrong = (
        wrong if feature == "bool mask" else make_case(**{**FEATURES[feature], "causal_offset": 1})
    )
    exact = attention(case)
    out = find("sdpa-math").attend(wrong).out.masked_fill(torch.tensor(exact.empty)[..., None], 0.0)
    with pytest.raises(AssertionError, match="are off"):
        assert_within(out, exact.out, error_bounds(case, exact, U32)[0])


@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_cost_a_few_roundings(name: str, dtype: torch.dtype) -> None:
    """Both paths keep P or less in 16 bits: the error is below 4 u of the term scale."""
    case = make_case(q_len=64, kv_len=200, head_dim=32, dtype=dtype, is_causal=True)
    answer = attend(case)
    error = (find(name).attend(case).out.double() - answer.out).abs()
    assert (error <= 4 * case.format.unit_roundoff * answer.term_scale).all()


# --- the log-sum-exp -----------------------------------------------------------------------------


def drawn(regime: str, dtype: torch.dtype) -> AttentionCase:
    """64 queries and 700 keys (two tiles of PyTorch's CPU kernel), with a restriction."""
    shapes = Shapes(batch=2, heads=2, kv_heads=2, q_len=64, kv_len=700, head_dim=16, v_dim=16)
    q, k, v = (x.to(dtype) for x in draw(regime, shapes, seed=0, options={}))
    ref = make_case().ref
    return AttentionCase(ref=ref, q=q, k=k, v=v, scale=0.25, is_causal=True, causal_offset=636)


@pytest.mark.parametrize("regime", ["normal", "sink", "ties", "outliers"])
@pytest.mark.parametrize(
    ("dtype", "allowance"),
    [
        (torch.float64, 0.0),
        (torch.float32, EXP_U20),
        # For 16-bit inputs PyTorch's CPU kernel has a coarser exponential still, of about 2^-14
        # (measured, torch 2.13: lse off by up to 6e-5 with AVX2 and AVX-512).
        (torch.bfloat16, 2.0**-13),
        (torch.float16, 2.0**-13),
    ],
)
def test_flash_lse_is_the_reference(regime: str, dtype: torch.dtype, allowance: float) -> None:
    """The log-sum-exp taken from the flash operator is natural, of the scaled and masked scores,
    one for every row. Its bound is `oracles.error_bounds` with A taken from the tensors."""
    case = drawn(regime, dtype)
    lse = find("sdpa-flash").attend(case).lse
    assert lse is not None
    assert lse.shape == (2, 2, 64)
    size = float((case.q.double().abs() @ case.k.double().abs().mT).max() * case.scale)
    u = U64 if dtype == torch.float64 else U32
    bound = (16 + 14) * u * size + (700 + 8) * u + allowance
    assert (lse.double() - attend(case).lse).abs().max() <= bound
    assert bound < 0.01


def test_the_math_path_has_none() -> None:
    """The unfused path does not offer a log-sum-exp, and none is made up."""
    assert find("sdpa-math").attend(make_case()).lse is None


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((1, 2, 4), True),
        ((1, 2, 4, 1), True),  # cuDNN
        ((1, 2, 32), True),  # padded to a multiple of 32 by the efficient backend
        ((1, 2, 0), False),
        ((1, 2, 3), False),
        ((2, 4), False),
        ((1, 4, 2, 5), False),
    ],
)
def test_lse_of_every_layout(shape: tuple[int, ...], kept: bool) -> None:
    """What backends return beside the output is brought to [batch, heads, q_len], or left out."""
    out = torch.zeros(1, 2, 4, 8)
    returned = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    lse = sdpa._lse((out, returned), out)
    if kept:
        assert lse is not None
        expected = returned.reshape(1, 2, -1)[..., :4]
        assert torch.equal(lse, expected)
    else:
        assert lse is None


@pytest.mark.parametrize("returned", [None, torch.zeros(3), (torch.zeros(1),), (torch.zeros(1), 3)])
def test_no_lse_where_none_was_returned(returned: Any) -> None:
    """A single tensor, or something else in second place, is no log-sum-exp."""
    assert sdpa._lse(returned, torch.zeros(1, 2, 4, 8)) is None
