"""PyTorch's `scaled_dot_product_attention`, each backend forced alone, and its default
choice.

Which operator really ran, forward and backward, is observed in the dispatcher during the
measured call itself, and a forced backend whose operator did not run is an error. What
operators claim (tiles and orders are those of their sources) agrees with their errors
element by element."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from numdev.cases import AttentionCase, explicit_mask
from numdev.errors import MeasurementError
from numdev.kernels import NOTHING, Output, Refused, Requirement, kernel
from numdev.kernels.output import differentiate, why_not
from numdev.system import System

FUSED = {
    "_scaled_dot_product_flash_attention": SDPBackend.FLASH_ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu": SDPBackend.FLASH_ATTENTION,
    "_scaled_dot_product_efficient_attention": SDPBackend.EFFICIENT_ATTENTION,
    "_scaled_dot_product_cudnn_attention": SDPBackend.CUDNN_ATTENTION,
    "_scaled_dot_product_fused_attention_overrideable": SDPBackend.OVERRIDEABLE,
}
"""The operators of fused backends; when none of them runs, it was the math path."""
OPERATORS: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "sdpa-flash": "_scaled_dot_product_flash_attention_for_cpu",
        "sdpa-math": "math",
    },
    "cuda": {
        "sdpa-flash": "_scaled_dot_product_flash_attention",
        "sdpa-efficient": "_scaled_dot_product_efficient_attention",
        "sdpa-cudnn": "_scaled_dot_product_cudnn_attention",
        "sdpa-math": "math",
    },
}
"""The kernels of this module by device, and the operator that each is."""
REFUSALS = ("no available kernel", "no viable backend")
FAST_EXP = {"AVX2": 8, "AVX512": 16}
"""Instruction sets under which PyTorch's CPU kernel uses its fast exp, and how many keys
it takes at once: those left over in a tile get the exact one."""
Claim = Mapping[str, Any]


class OperatorLog(TorchDispatchMode):
    """A mode that lists in `ran` the names of the operators that run in it, in their
    order, and stores in `returned` what the last fused attention operator (of FUSED)
    returned; None where none ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []
        self.returned: object = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing in this mode is compiled, and True would make PyTorch
        import its compiler, which takes three seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Without autograd's dispatch keys, as in inference mode, SDPA itself comes here
        # as one operator, and what it calls would pass unseen below the mode.
        with self:
            parts: object = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.ran.append(name)
        if name in FUSED:
            self.returned = result
        return result

    def first(self, names: Container[str]) -> str:
        """Returns the name of the first operator that ran and is one of `names`; `math`
        if none did."""
        return next((name for name in self.ran if name in names), "math")


def mask_arguments(case: AttentionCase) -> tuple[Tensor | None, bool]:
    """Returns the `attn_mask` and `is_causal` of an SDPA call on a whole case (without
    `positions`). These are None and True for a case that is causal from the top left and
    has no mask and no window, not even one without limits. Else it is one mask with all
    that the case hides or adds (None where it is nothing), and False. Soft cap and sinks
    are not read."""
    by_flag = (
        case.is_causal
        and case.mask is None
        and not case.window
        and not case.causal_offset
    )
    return (None if by_flag else explicit_mask(case)), by_flag


def backend_of(kernel: str) -> SDPBackend | None:
    """Returns the backend that a kernel of this module forces; None for `sdpa-default`,
    which leaves PyTorch its choice, and for an unknown name."""
    operator = OPERATORS["cuda"].get(kernel)
    return None if operator is None else FUSED.get(operator, SDPBackend.MATH)


def forced_backend(backend: SDPBackend | None) -> AbstractContextManager[None]:
    """Returns a context in which SDPA may use this backend alone; one without effect for
    None."""
    return contextlib.nullcontext() if backend is None else sdpa_kernel([backend])


def _call_sdpa(case: AttentionCase) -> Tensor:
    """Returns the output of one SDPA call on the case, with whichever backends are
    allowed."""
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


def _attend(case: AttentionCase, backend: SDPBackend | None) -> Output:
    """Runs one SDPA call with this backend alone (None: PyTorch's choice). Returns out;
    lse [batch, heads, q_len], without the rows that an operator pads and without an axis
    of 1 behind them, None where it returned no such numbers; and the name of the
    operator, `math` where no fused one ran, in `ran` and `did["operator"]`. Raises
    Refused with PyTorch's reasons where no backend takes the case, MeasurementError where
    another backend ran than the forced one. What else PyTorch raises passes."""
    with (
        warnings.catch_warnings(record=True) as caught,
        forced_backend(backend),
        OperatorLog() as log,
    ):
        warnings.simplefilter("always")
        try:
            out = _call_sdpa(case)
        except RuntimeError as error:
            if not any(words in str(error).lower() for words in REFUSALS):
                raise
            # PyTorch's own reasons, which it gives as warnings, without source locations
            # and without the backends that are off only because another one is forced.
            texts = [
                str(w.message).split(" (Triggered internally")[0].strip() for w in caught
            ]
            reasons = [
                t for t in texts if not t.endswith(("because:", "runtime disabled."))
            ]
            none = "PyTorch refuses this case and gives no reason"
            raise Refused(" ".join(dict.fromkeys(reasons)) or none) from error
    ran = log.first(FUSED)
    chosen = FUSED.get(ran, SDPBackend.MATH)
    if backend is not None and chosen != backend:
        raise MeasurementError(f"{backend.name} was forced, and {ran} ran instead")
    ran, returned = _operator_in_words(ran), log.returned
    lse = returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None
    # cuDNN adds an axis, and efficient pads to a multiple of 32 rows
    if isinstance(lse, Tensor):
        lse = (lse.squeeze(-1) if lse.ndim == 4 else lse)[..., : out.shape[2]]
    whole = isinstance(lse, Tensor) and lse.shape == out.shape[:3]
    return Output(out=out, lse=lse if whole else None, ran=ran, did={"operator": ran})


def _gradients(case: AttentionCase, backend: SDPBackend | None) -> Output:
    """Runs forward and backward of one SDPA call with this backend alone (None: PyTorch's
    choice) and returns out, lse (or None), dq, dk and dv. Raises Refused where no backend
    takes the case; MeasurementError where an operator of another backend than the forced
    one ran, forward or backward; UsageError without a grad_out."""
    log = OperatorLog()
    done = differentiate(lambda c: _attend(c, backend), case, during_backward=log)
    forward = (done.ran or "").partition(" ")[0]
    expected = f"{forward}_backward" if forward in FUSED else "math"
    ran = log.first({f"{name}_backward" for name in FUSED})
    if backend is not None and ran != expected:
        raise MeasurementError(
            f"{forward} ran forward, and {ran} instead of {expected} backward"
        )
    return dataclasses.replace(done, ran_backward=_operator_in_words(ran))


def _operator_in_words(operator: str) -> str:
    """Returns an operator's name as evidence of what ran. Where another implementation is
    active in place of PyTorch's FlashAttention, a flash operator's name is followed by
    it: `_scaled_dot_product_flash_attention (FA4)`."""
    active = current_flash_attention_impl()
    flash = FUSED.get(operator.removesuffix("_backward")) == SDPBackend.FLASH_ATTENTION
    return f"{operator} ({active})" if active and flash else operator


# --- what the operators compute like --------------------------------------------------


def claim_of(operator: str, case: AttentionCase, system: System) -> Claim:
    """Returns how an SDPA operator rounds on this case, forward and backward, as options
    of `emulated`. `operator`: its name, or `math`. Any other name gives `{"preset":
    "fa2"}`."""
    match operator:
        case "math":  # 16-bit inputs are computed with in fp32, a group's sums included
            casts = ("out", "dq_out", "dk_out", "dv_out")
            return {"preset": "exact", **dict.fromkeys(casts, "working")}
        case "_scaled_dot_product_flash_attention_for_cpu":
            return _flash_on_cpu(case, system)
        case "_scaled_dot_product_flash_attention":
            return flash_attention_2(case, system)
        case "_scaled_dot_product_efficient_attention":
            # Backward keeps P in the working format for both products, and scales dS as
            # cuDNN's.
            tile, late = 64 if case.v.shape[-1] <= 64 else 128, {"p_for_ds": "working"}
            return {"preset": "fa2", "block_kv": tile, "ds_scale": "before", **late}
        case "_scaled_dot_product_cudnn_attention":
            return {"preset": "fa2", "block_kv": 128, "ds_scale": "before"}
    return {"preset": "fa2"}


def _flash_on_cpu(case: AttentionCase, system: System) -> Claim:
    """Returns how PyTorch's flash kernel for CPUs rounds, as options of `emulated`.
    Forward has PyTorch's fast exp on a CPU with AVX2 or AVX-512, where there are at least
    as many keys as lanes. Backward has the exact exp; it adds every tile to the gradients
    in the working format, in forward's tiles, and goes from one query head of a group to
    the next."""
    lanes = max(
        (n for name, n in FAST_EXP.items() if name in system.cpu_capability), default=0
    )
    return {
        "preset": "fa2",
        **dict.fromkeys(("dq", "dk", "dv"), "working"),
        **({"group_sum": "running"} if case.group > 1 else {}),
        "block_q": 256 if case.q_len >= 768 else 64 if case.q_len >= 192 else 32,
        "block_kv": 512,
        "exponential": f"fexp_u20x{lanes}" if 0 < lanes <= case.kv_len else "exact",
    }


def flash_attention_2(case: AttentionCase, system: System) -> Claim:
    """Returns how FlashAttention-2 on CUDA rounds, as options of `emulated`: its tile,
    keys from the last tile to the first, and the number of splits on this GPU."""
    d = case.q.shape[-1]
    wide = 256 if d <= 64 else 128 if d <= 128 else 64
    splits = _num_splits(case, wide, system.processors or 1)
    tile = wide if splits > 1 else 128 if d <= 64 else 64
    return {"preset": "fa2", "block_kv": tile, "kv_order": "descending", "splits": splits}


def _num_splits(case: AttentionCase, tile: int, processors: int) -> int:
    """Returns how many parts the keys are divided into, by FlashAttention-2's
    `num_splits_heuristic`: 1 where blocks of 64 rows keep 80 % of the GPU busy, else the
    fewest parts that use it at least 85 % as well as the best number does. `tile`: keys
    of a tile; `processors`: of the GPU, at least 1."""
    work = case.q.shape[0] * case.heads * -(-case.q_len // 64)
    # The query heads of a group become its rows
    if case.q_len == 1 and case.window is None:
        work = case.q.shape[0] * case.kv_heads * -(-case.group // 64)
    slots, tiles = 2 * processors, -(-case.kv_len // tile)
    if work >= 0.8 * slots:
        return 1

    def used(parts: int) -> float:
        """Returns the share of the GPU that this many parts keep busy; 0 where one part
        less would have parts of as many tiles."""
        again = parts > 1 and -(-tiles // parts) == -(-tiles // (parts - 1))
        waves = work * parts / slots
        return 0.0 if again else waves / -(-work * parts // slots)

    candidates = range(1, min(128, slots, tiles) + 1)
    best = max(used(parts) for parts in candidates)
    return next(parts for parts in candidates if used(parts) >= 0.85 * best)


# --- the kernels ----------------------------------------------------------------------


def _register(name: str, summary: str, requires: Requirement = NOTHING) -> None:
    """Registers one kernel of this module under `name`, with the backend that
    `backend_of` gives it. `summary`: its description, one sentence."""
    backend = backend_of(name)

    def attend(case: AttentionCase) -> Output:
        """Returns the output of the SDPA call with this kernel's backend."""
        return _attend(case, backend)

    def gradients(case: AttentionCase) -> Output:
        """Returns the output and gradients of the SDPA call with this kernel's
        backend."""
        return _gradients(case, backend)

    def trained(case: AttentionCase) -> Tensor:
        """Returns the output in autograd's graph, without a record of what ran."""
        # Unwatched: whoever trains has seen with `attend` what runs
        with forced_backend(backend):
            return _call_sdpa(case)

    attend.__doc__, attend.__qualname__ = summary, name
    kernel(
        name,
        requires=requires,
        supports=lambda case: why_not(
            (case.softcap is not None, "PyTorch's SDPA has no soft cap"),
            (case.sinks is not None, "PyTorch's SDPA has no attention sinks"),
        ),
        claims=lambda case, output, system: claim_of(
            (output.did or {}).get("operator", ""), case, system
        ),
        backward=gradients,
        training=trained,
    )(attend)


CUDA, AMPERE = Requirement(device="cuda"), Requirement(device="cuda", capability=(8, 0))
_register("sdpa-math", "PyTorch's unfused path: 16 bits in fp32, with one cast.")
_register("sdpa-flash", "FlashAttention-2; on a CPU PyTorch's own.")
_register("sdpa-efficient", "Memory-efficient attention.", CUDA)
_register("sdpa-cudnn", "cuDNN's fused attention.", AMPERE)
_register("sdpa-default", "What PyTorch picks for this call by default.")
