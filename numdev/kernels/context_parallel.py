"""PyTorch's context parallelism as a kernel: one attention call over several GPUs.

`torch.distributed.tensor.experimental.context_parallel` divides queries, keys and values over the
ranks of a process group, and turns an SDPA call into ring attention: each rank computes attention
over its own keys, then over those of the other ranks as they come round, and merges. Numdev starts
the ranks (`numdev.kernels.ranks`), hands each the whole call and takes the whole result, in its
natural order. What of it is PyTorch's is everything between (`numdev.kernels.rank`).

What it computes is what `sharded` computes with as many shards, `order: zigzag` where the load is
balanced and `ring` where not, and `merge_format: promoted` without `convert_to_f32`; its claim is
the same.

A rank that crashes or hangs is one failed row. On a CPU, where PyTorch has the ring but no way into
it, ranks are processes that call it themselves, over gloo. No audit takes that for the kernel,
whose requirement is CUDA devices, but it can be called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError, closest
from numdev.kernels import Output, Refused, Requirement, kernel
from numdev.kernels.ranks import together
from numdev.kernels.shard_claims import claims, described

OPERATORS = {
    "sdpa-flash": "_scaled_dot_product_flash_attention",
    "sdpa-efficient": "_scaled_dot_product_efficient_attention",
    "sdpa-cudnn": "_scaled_dot_product_cudnn_attention",
}
ROTATIONS = ("allgather", "alltoall")


def _unsupported(case: AttentionCase) -> str | None:
    if case.softcap is not None or case.sinks is not None:
        return "PyTorch's SDPA has no soft cap and no attention sinks"
    if case.mask is not None or case.window is not None or case.causal_offset:
        return "PyTorch's context parallelism has causality from the top left, and no masks"
    if case.is_causal and case.q_len != case.kv_len:
        return "PyTorch's context parallelism takes causal calls with as many queries as keys alone"
    return None


def _check(options: Mapping[str, Any]) -> None:
    world = options["world"]
    if not isinstance(world, int) or isinstance(world, bool) or world < 2:
        raise UsageError(f"world is {world!r}", hint="how many devices, from 2 on")
    for name, known in (("inner", tuple(OPERATORS)), ("rotate", ROTATIONS)):
        if options[name] not in known:
            hint = closest(str(options[name]), known)
            raise UsageError(f"context-parallel: {name} is {options[name]!r}", hint=hint)
    for name, allowed in (("convert_to_f32", bool), ("load_balance", bool | None)):
        if not isinstance(options[name], allowed):
            raise UsageError(f"{name} is {options[name]!r}", hint="true or false")


def gradients(
    case: AttentionCase,
    *,
    world: int = 2,
    inner: str = "sdpa-flash",
    rotate: str = "allgather",
    convert_to_f32: bool = True,
    load_balance: bool | None = None,
) -> Output:
    """A training step, under the options of `context-parallel`."""
    assert case.grad_out is not None
    dO = {"grad_out": case.grad_out.to(case.q.dtype)}
    return _together(case, world, inner, rotate, convert_to_f32, load_balance, dO)


@kernel(
    "context-parallel",
    requires=Requirement(device="cuda", devices=2),
    supports=_unsupported,
    validate=_check,
    claims=claims,
    backward=gradients,
)
def context_parallel(
    case: AttentionCase,
    *,
    world: int = 2,
    inner: str = "sdpa-flash",
    rotate: str = "allgather",
    convert_to_f32: bool = True,
    load_balance: bool | None = None,
) -> Output:
    """PyTorch's context parallelism: one call over several GPUs, as ring attention.

    `load_balance`: None balances causal calls, and no other can be.
    """
    return _together(case, world, inner, rotate, convert_to_f32, load_balance, {})


def _together(
    case: AttentionCase,
    world: int,
    inner: str,
    rotate: str,
    convert_to_f32: bool,
    load_balance: bool | None,
    upstream: Mapping[str, Tensor],
) -> Output:
    balanced = case.is_causal if load_balance is None else load_balance
    refusal = _refusal(case, world, inner, balanced)
    if refusal:
        raise Refused(refusal)
    tensors = {"q": case.q, "k": case.k, "v": case.v, **upstream}
    answers = together(world, case.q.device.type).ask(
        {
            **{name: x.detach().cpu().contiguous() for name, x in tensors.items()},
            "scale": case.scale,
            "is_causal": case.is_causal,
            "inner": inner,
            "rotate": rotate,
            "convert_to_f32": convert_to_f32,
            "load_balance": balanced,
        }
    )
    if "refused" in answers[0]:
        raise Refused(str(answers[0]["refused"]))
    found = {name: x.to(case.q.device) for name, x in answers[0].items()}
    if "out" not in found:
        raise MeasurementError("rank 0 returned no output")
    says = f"context parallelism, {rotate}: " + described(
        world,
        "zigzag" if balanced else "ring",
        "float32" if convert_to_f32 else "promoted",
        "working",
        _operator(case, inner),
    )
    return Output(**found, ran=says, ran_backward=says if upstream else None)


def _refusal(case: AttentionCase, world: int, inner: str, balanced: bool) -> str | None:
    """What of the options does not go with this case here."""
    there = torch.cuda.device_count()
    if case.q.is_cuda and there < world:
        return f"needs {world} CUDA devices, found {there}"
    if not case.q.is_cuda and inner != "sdpa-flash":
        return f"{inner} is not there on a CPU"
    if balanced and not case.is_causal:
        return "PyTorch balances the load of causal calls alone"
    parts = 2 * world if balanced else world
    if case.q_len % parts or case.kv_len % parts:
        return f"the lengths {case.q_len} and {case.kv_len} are no multiples of {parts}"
    return None


def _operator(case: AttentionCase, inner: str) -> str:
    """The operator that PyTorch was left to choose from."""
    return OPERATORS[inner] + ("" if case.q.is_cuda else "_for_cpu")
