"""PyTorch's `scaled_dot_product_attention`, each backend forced alone, and its default choice.

Forcing alone means that PyTorch may not fall back: a backend that cannot run a case refuses, and
its own words become the reason. Which operator really ran is observed in the dispatcher during the
measured call itself, and a forced backend whose operator did not run is an error, not a result.
So it is with the backward pass: every fused operator has one of its own, called as the forward is
with `_backward` behind it, and autograd shows its dispatch also where a thread of its own runs it.
Where PyTorch's flash kernels were replaced (`activate_flash_attention_impl`) the operator keeps its
name, and what stands in its place is part of what ran.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from numdev.cases import AttentionCase, explicit_mask
from numdev.errors import MeasurementError
from numdev.kernels import Output, Refused, Requirement, kernel
from numdev.kernels.backward import differentiate
from numdev.kernels.sdpa_claims import claims
from numdev.system import flash_attention_impl

FUSED = {
    "_scaled_dot_product_flash_attention": SDPBackend.FLASH_ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu": SDPBackend.FLASH_ATTENTION,
    "_scaled_dot_product_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
    "_scaled_dot_product_cudnn_attention": SDPBackend.CUDNN_ATTENTION,
    "_scaled_dot_product_fused_attention_overrideable": SDPBackend.OVERRIDEABLE,
}
"""The operators of fused backends; when none of them runs, it was the math path."""
FUSED_BACKWARD = {f"{name}_backward" for name in FUSED}
REFUSALS = ("no available kernel", "no viable backend")


class OperatorLog(TorchDispatchMode):
    """Records the operators below it, and keeps what a fused attention operator returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []
        self.returned: Any = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.ran.append(name)
        if name in FUSED:
            self.returned = result
        return result

    def first(self, names: Container[str]) -> str:
        """The first of these operators that ran; `math` if none did."""
        return next((name for name in self.ran if name in names), "math")


def _unsupported(case: AttentionCase) -> str | None:
    if case.softcap is not None:
        return "PyTorch's SDPA has no soft cap"
    if case.sinks is not None:
        return "PyTorch's SDPA has no attention sinks"
    return None


def _attend(case: AttentionCase, backend: SDPBackend | None) -> Output:
    """One SDPA call on `backend` alone (None: PyTorch's own choice). Raises Refused."""
    with (
        warnings.catch_warnings(record=True) as said,
        contextlib.nullcontext() if backend is None else sdpa_kernel([backend]),
        OperatorLog() as log,
    ):
        warnings.simplefilter("always")
        try:
            out = _called(case)
        except RuntimeError as error:
            if any(words in str(error).lower() for words in REFUSALS):
                raise Refused(_reasons(said)) from error
            raise
    ran = log.first(FUSED)
    chosen = FUSED.get(ran, SDPBackend.MATH)
    if backend is not None and chosen != backend:
        raise MeasurementError(f"{backend.name} was forced, and {ran} ran instead")
    return Output(out=out, lse=_lse(log.returned, out), ran=_named(ran))


def mask_arguments(case: AttentionCase) -> tuple[Tensor | None, bool]:
    """What an SDPA call is given as its mask, and as `is_causal`."""
    by_flag = case.is_causal and case.mask is None and not case.window and not case.causal_offset
    return (None if by_flag else explicit_mask(case)), by_flag


def _called(case: AttentionCase) -> Tensor:
    mask, by_flag = mask_arguments(case)
    return torch.nn.functional.scaled_dot_product_attention(
        case.q,
        case.k,
        case.v,
        attn_mask=mask,
        is_causal=by_flag,
        scale=case.scale,
        enable_gqa=case.group > 1,
    )


def _step(backend: SDPBackend | None) -> Callable[[AttentionCase], Output]:
    """Forward and backward of one SDPA call on `backend` alone (None: PyTorch's own choice)."""

    def step(case: AttentionCase) -> Output:
        log = OperatorLog()
        found = differentiate(lambda c: _attend(c, backend), case, during_backward=log)
        forward = (found.ran or "").partition(" ")[0]
        own = f"{forward}_backward" if forward in FUSED else "math"
        ran = log.first(FUSED_BACKWARD)
        if backend is not None and ran != own:
            raise MeasurementError(f"{forward} ran forward, and {ran} instead of {own} backward")
        return dataclasses.replace(found, ran_backward=_named(ran))

    return step


def _training(backend: SDPBackend | None) -> Callable[[AttentionCase], Tensor]:
    """The call alone, in a network that learns, without watching the dispatcher: whoever trains
    has seen with `attend` what runs. Forced alone, a backend cannot be replaced there either."""

    def trained(case: AttentionCase) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel([backend]):
            return _called(case)

    return trained


def _named(operator: str) -> str:
    """An operator as evidence: a flash operator with what was activated in its place, as in
    `_scaled_dot_product_flash_attention (FA4)`. Nothing is claimed of how that rounds."""
    active = flash_attention_impl()
    flash = FUSED.get(operator.removesuffix("_backward")) == SDPBackend.FLASH_ATTENTION
    return f"{operator} ({active})" if active and flash else operator


def _lse(returned: Any, out: Tensor) -> Tensor | None:
    """The log-sum-exp a fused operator computed beside its output, where it did."""
    if not isinstance(returned, tuple) or len(returned) < 2:
        return None
    lse = returned[1]
    if not isinstance(lse, Tensor) or lse.numel() == 0:
        return None
    if lse.ndim == 4 and lse.shape[-1] == 1:
        lse = lse.squeeze(-1)
    # The efficient backend pads the length to a multiple of 32.
    if lse.ndim == 3 and lse.shape[-1] >= out.shape[2]:
        lse = lse[..., : out.shape[2]]
    return lse if lse.shape == out.shape[:3] else None


def _reasons(said: Sequence[warnings.WarningMessage]) -> str:
    """PyTorch's own reasons, which it gives as warnings, without source locations and without
    the backends that are off only because another one is forced."""
    sentences = []
    for warning in said:
        text = str(warning.message).split(" (Triggered internally")[0].strip()
        if text.endswith(("because:", "runtime disabled.")) or text in sentences:
            continue
        sentences.append(text)
    return " ".join(sentences) or "PyTorch refuses this case and gives no reason"


@kernel(
    "sdpa-math",
    supports=_unsupported,
    claims=claims,
    backward=_step(SDPBackend.MATH),
    training=_training(SDPBackend.MATH),
)
def sdpa_math(case: AttentionCase) -> Output:
    """PyTorch's unfused path; for 16-bit inputs it computes in fp32 and casts once."""
    return _attend(case, SDPBackend.MATH)


@kernel(
    "sdpa-flash",
    supports=_unsupported,
    claims=claims,
    backward=_step(SDPBackend.FLASH_ATTENTION),
    training=_training(SDPBackend.FLASH_ATTENTION),
)
def sdpa_flash(case: AttentionCase) -> Output:
    """PyTorch's flash attention: FlashAttention-2 on CUDA, its own tiled kernel on CPU."""
    return _attend(case, SDPBackend.FLASH_ATTENTION)


@kernel(
    "sdpa-efficient",
    requires=Requirement(device="cuda"),
    supports=_unsupported,
    claims=claims,
    backward=_step(SDPBackend.EFFICIENT_ATTENTION),
    training=_training(SDPBackend.EFFICIENT_ATTENTION),
)
def sdpa_efficient(case: AttentionCase) -> Output:
    """PyTorch's memory-efficient attention (from xFormers)."""
    return _attend(case, SDPBackend.EFFICIENT_ATTENTION)


@kernel(
    "sdpa-cudnn",
    requires=Requirement(device="cuda", capability=(8, 0)),
    supports=_unsupported,
    claims=claims,
    backward=_step(SDPBackend.CUDNN_ATTENTION),
    training=_training(SDPBackend.CUDNN_ATTENTION),
)
def sdpa_cudnn(case: AttentionCase) -> Output:
    """cuDNN's fused attention through PyTorch."""
    return _attend(case, SDPBackend.CUDNN_ATTENTION)


@kernel(
    "sdpa-default",
    supports=_unsupported,
    claims=claims,
    backward=_step(None),
    training=_training(None),
)
def sdpa_default(case: AttentionCase) -> Output:
    """Whatever PyTorch picks for this call: what a user's own call would hit."""
    return _attend(case, None)
