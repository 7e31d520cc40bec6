"""PyTorch's SDPA on the CPU: forced alone, certified, and refusing in words.

That it is attention is in test_oracle.py, and what only a GPU can show in test_gpu.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import make_case, step
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import Refused, find, sdpa
from numdev.system import System

CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ON_CPU = ("sdpa-math", "sdpa-flash", "sdpa-default")


# --- what runs is what was asked for -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_forced_alone_and_certified(dtype: torch.dtype, causal: bool) -> None:
    """A forced backend runs its own operator, and the output says which one it was."""
    case = make_case(q_len=8, kv_len=8, dtype=dtype, is_causal=causal)
    ran = {name: find(name).attend(case).ran for name in ON_CPU}
    assert ran == {"sdpa-math": "math", "sdpa-flash": CPU_FLASH, "sdpa-default": CPU_FLASH}


@pytest.mark.parametrize("name", ["efficient", "cudnn", "math"])
def test_another_operator_than_forced_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If forcing does not take effect, there is no result at all."""
    monkeypatch.setattr(sdpa, "sdpa_kernel", lambda backends: contextlib.nullcontext())
    says = rf"{name.upper()}\w* was forced, and {CPU_FLASH} ran instead"
    with pytest.raises(MeasurementError, match=says):
        find(f"sdpa-{name}").attend(make_case())


# --- the backward pass ---------------------------------------------------------------------------


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


# --- refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("sdpa-flash", make_case(v_dim=7), "requires q,k,v to have the same last dimension"),
        ("sdpa-flash", make_case(mask=("bool", "hqk")), "attn mask shapes"),  # of 2 or 4 axes alone
        ("sdpa-efficient", make_case(), "gives no reason"),
    ],
)
def test_a_refusal_has_pytorchs_own_reason(name: str, case: AttentionCase, reason: str) -> None:
    """The reason is PyTorch's sentence, once, without where in its source it came from; where it
    gives none, that is said. A call is kept as it came."""
    with pytest.raises(Refused, match=reason) as refused:
        find(name).attend(case)
    message = refused.value.message
    assert "Triggered" not in message
    assert ".cpp" not in message
    assert message.count(reason) == 1
