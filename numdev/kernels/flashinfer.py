"""FlashInfer's attention of a batch, as serving engines call it, where it is installed.

The keys of a sequence lie behind one another (ragged) or in pages of a cache. The
interface (flashinfer-ai/flashinfer: `flashinfer/prefill.py`): tensors are [tokens of all
sequences, heads, head_dim]; a call is planned, which divides the keys among blocks, and
then run; causality is aligned bottom-right; a mask is flattened, sequence behind
sequence; the log-sum-exp is of base 2. Kernels are compiled with nvcc at their first
use."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase, explicit_mask
from numdev.kernels import Claim, Output, Requirement, kernel
from numdev.kernels.output import Reason, refuse, why_not
from numdev.system import System

WORKSPACE = 256 << 20  # bytes for the parts of split keys
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of Q and V
HALVES = ("float16", "bfloat16")
MERGED = 1024  # features of V that are merged at once


def _unsupported(case: AttentionCase) -> str | None:
    """Returns why FlashInfer cannot run the case; None where it can."""
    return why_not(*_limits(case))


def _limits(case: AttentionCase) -> Iterator[Reason]:
    """Yields each limit of FlashInfer as (whether the case exceeds it, what to say), for
    `why_not`."""
    mask, (left, right) = case.mask, case.window or (None, None)
    offset, head_dims = case.kv_len - case.q_len, (case.q.shape[-1], case.v.shape[-1])
    elsewhere = case.restricts_positions and case.causal_offset != offset
    of_heads = mask is not None and mask.ndim > 2 and mask.shape[-3] > 1
    yield head_dims not in HEAD_DIMS, f"takes head_dim {HEAD_DIMS}"
    yield case.format.name not in HALVES, "takes float16 and bfloat16"
    yield case.sinks is not None, "has no attention sinks"
    yield mask is not None and mask.dtype != torch.bool, "takes masks of bool"
    yield of_heads, "takes one mask for all heads"
    yield (left or 0) < 0 or (right or 0) < 0, "takes no side of a window below 0"
    bounded_right = right is not None and not case.is_causal
    yield bounded_right, "takes the left side of a window alone"
    yield elsewhere, f"aligns bottom-right, an offset of {offset}"


def _claims(case: AttentionCase, output: Output, system: System) -> Claim:
    """Returns how FlashInfer rounds, as options of `emulated`. Backend `fa3`:
    FlashAttention-2's recipe. Backend `fa2`: that with l summed from the rounded P, and
    each split's O in the working format (`prefill.cuh`: `m16k16_rowsum`, `tmp_v`). None
    for another backend; with a soft cap, whose tanh is approximate; and for more splits
    than one pass merges, which rounds again (`cascade.cuh`: `threadblock_sync_state`)."""
    did = output.did or {}
    if case.softcap is not None or did.get("backend") not in ("fa2", "fa3"):
        return None
    if did["splits"] > MERGED // case.v.shape[-1]:
        return None
    if did["backend"] == "fa3":
        return {"preset": "fa2"}
    return {
        "preset": "fa2",
        "l_from": "rounded",
        "merge": "working",
        "splits": did["splits"],
    }


@kernel(
    "flashinfer",
    values={"backend": ("auto", "fa2", "fa3"), "page_size": 1, "fixed_split_size": 1},
    requires=Requirement(device="cuda", package="flashinfer-python", capability=(8, 0)),
    supports=_unsupported,
    claims=_claims,
)
def flashinfer(
    case: AttentionCase, *, backend: str = "auto", page_size: int | None = None,
    fixed_split_size: int | None = None, disable_split_kv: bool = False,
) -> Output:  # fmt: skip
    """FlashInfer's attention of a batch: keys ragged, or in pages of `page_size` tokens.

    Without `page_size` the keys are ragged. `fixed_split_size` (keys of a part) and
    `disable_split_kv` are passed to its plan. Returns out and the natural log-sum-exp,
    and in `did` the backend and the number of splits. Raises Refused for a mask under
    `fa3`."""
    module: Any = importlib.import_module("flashinfer")
    b, n, device = case.q.shape[0], case.q_len, case.q.device
    refuse((backend == "fa3" and case.mask is not None, "its fa3 kernels take no mask"))
    how = _plan_arguments(case) | {
        "fixed_split_size": fixed_split_size,
        "disable_split_kv": disable_split_kv,
    }
    flat = case.q.transpose(1, 2).flatten(0, 1).contiguous()
    if page_size is None:
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(
            _workspace(device), backend=backend
        )
        keys = _plan_ragged(wrapper, case, how)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(device), backend=backend
        )
        keys = _plan_paged(wrapper, case, page_size, how)
    out, lse = wrapper.run(flat, *keys, return_lse=True)
    return Output(
        out=out.unflatten(0, (b, n)).transpose(1, 2),
        lse=lse.unflatten(0, (b, n)).transpose(1, 2) * math.log(2),
        ran=f"flashinfer.{type(wrapper).__name__}",
        did={
            "backend": getattr(wrapper, "_backend", backend),
            "splits": _splits(wrapper, case),
        },
    )


def _plan_arguments(case: AttentionCase) -> dict[str, object]:
    """Returns the keyword arguments of a wrapper's `plan` that do not depend on how keys
    are stored: sizes, dtypes, scale, window, soft cap, and a flattened bool mask, which
    then has causality and window in it."""
    b, n, m = case.q.shape[0], case.q_len, case.kv_len
    left = (case.window or (None, None))[0]
    mask = None if case.mask is None else explicit_mask(case)
    how: dict[str, object] = {
        "head_dim_vo": case.v.shape[-1],
        "causal": case.is_causal,
        "sm_scale": case.scale,
        "window_left": -1 if left is None else left,
        "logits_soft_cap": case.softcap or 0.0,
        "q_data_type": case.q.dtype,
        "kv_data_type": case.k.dtype,
    }
    if mask is not None:  # which holds what positions hide
        shown = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)[:, 0].expand(b, n, m)
        how |= {"custom_mask": shown.flatten(), "causal": False, "window_left": -1}
    return how


def _plan_ragged(
    wrapper: Any, case: AttentionCase, how: Mapping[str, object]
) -> tuple[object, ...]:
    """Plans the call on the wrapper, which changes it, and returns (k, v) with one
    sequence behind the other, [tokens, kv_heads, head_dim]. `how`: further arguments of
    `plan`."""
    b, h, n, d = case.q.shape
    sequences = torch.arange(b + 1, dtype=torch.int32, device=case.q.device)
    rows, tokens = sequences * n, sequences * case.kv_len
    wrapper.plan(rows, tokens, h, case.kv_heads, d, **how)
    k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (case.k, case.v))
    return k, v


def _plan_paged(
    wrapper: Any, case: AttentionCase, page_size: int, how: Mapping[str, object]
) -> tuple[object, ...]:
    """Plans the call on the wrapper, which changes it, and returns a tuple of one pair
    (k, v), each in pages [pages, page_size, kv_heads, head_dim]; each sequence begins a
    new page. `how`: further arguments of `plan`."""
    (b, h, n, d), m, device = case.q.shape, case.kv_len, case.q.device
    sequences = torch.arange(b + 1, dtype=torch.int32, device=device)
    pages, last = -(-m // page_size), (m - 1) % page_size + 1
    lasts = torch.full((b,), last, dtype=torch.int32, device=device)
    places = torch.arange(b * pages, dtype=torch.int32, device=device)
    rows, starts = sequences * n, sequences * pages
    wrapper.plan(rows, starts, places, lasts, h, case.kv_heads, d, page_size, **how)
    k, v = (x.transpose(1, 2) for x in (case.k, case.v))
    return (tuple(_into_pages(x, pages * page_size, page_size) for x in (k, v)),)


def _splits(wrapper: object, case: AttentionCase) -> int:
    """Returns how many parts the keys were divided into, read from a planned wrapper of
    `fa2` (`PrefillPlanInfo` in `scheduler.cuh`): all blocks over those that one part
    takes, rounded down, at least 1. 1 for other backends, and where the plan has fewer
    than four numbers; a longer one is read as one of `fa2`, whatever it is."""
    plan = list(getattr(wrapper, "_plan_info", None) or ())
    if getattr(wrapper, "_backend", None) != "fa2" or len(plan) < 4 or not plan[3]:
        return 1
    blocks, rows = plan[0], plan[3]
    of_a_part = case.q.shape[0] * math.ceil(case.q_len * case.group / rows)
    return max(1, int(blocks // of_a_part))


def _into_pages(x: Tensor, length: int, size: int) -> Tensor:
    """Returns [batch, keys, heads, dim] as [pages, size, heads, dim]; zeros fill each
    sequence up to `length` keys, a multiple of `size`."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))
    return padded.reshape(-1, size, *x.shape[2:])


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Returns the buffer for FlashInfer's partial results, 256 MiB of bytes, one per
    device and process."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
