"""A kernel inside a network that learns: one operation of autograd's graph.

`Kernel.gradients` takes a whole training step at once, for measuring. In a network forward comes
long before backward, so `attended` gives the output alone, and gradients reach q, k and v when the
network's backward pass does. How: by the kernel's own training form where it was registered with
one (`training=`), which keeps from forward what backward reads; through its function where autograd
follows that; and else by running the kernel's whole training step in backward, which computes
forward twice.

Autocast is off in here, in both passes: it would cast matrix products in a custom function's
forward and not in its backward, so that the two disagree about what was computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.kernels.output import as_output

if TYPE_CHECKING:
    from numdev.kernels import Kernel


def attended(
    kernel: Kernel,
    case: AttentionCase,
    options: Mapping[str, Any],
    generator: torch.Generator | None = None,
) -> Tensor:
    """The kernel's output for the case, [batch, heads, q_len, v_dim], connected to its q, k and v.

    A kernel that `draws` does so from the generator, if there is one, in both passes.
    Raises Refused where the kernel declines the case, has no backward, or autograd cannot follow
    it, MeasurementError where what it returned is no output of this case.
    """
    kernel.accept(case)
    if kernel.backward is None:
        raise Refused("it has no backward")
    with torch.autocast(case.q.device.type, enabled=False):
        if kernel.training is not None:
            drawn = {"generator": generator} if kernel.draws(options) else {}
            out = kernel.training(case, **drawn, **options)
        elif kernel.backward == "autograd":
            out = as_output(kernel.function(case, **options), case).out
        else:
            tensors = (case.q, case.k, case.v)
            out = _WholeStep.apply(*tensors, kernel, case, options)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() and case.q.requires_grad and not out.requires_grad:
        raise Refused("it cannot be trained with: autograd cannot follow it")
    found: Tensor = out
    return found


def crossed(
    kernel: Kernel,
    case: AttentionCase,
    options: Mapping[str, Any],
    behind: Kernel,
    behind_options: Mapping[str, Any],
) -> Tensor:
    """The output of one kernel with the gradients of another: those of its whole training step on
    the same q, k and v, from an output of its own and not from the one that is returned.

    Raises Refused where either declines the case, or the other one cannot be trained with.
    """
    kernel.accept(case)
    behind.accept(case)
    if behind.backward is None:
        raise Refused(f"{behind.name} has no backward")
    tensors = (case.q, case.k, case.v)
    with torch.autocast(case.q.device.type, enabled=False):
        out: Tensor = _Crossed.apply(  # type: ignore[no-untyped-call]
            *tensors, kernel, case, options, behind, behind_options
        )
    return out


class _Crossed(torch.autograd.Function):
    """Forward runs one kernel; backward trains with another, forward pass and all."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Any, case: Any, options: Any,
        behind: Any, behind_options: Any,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v)
        ctx.behind, ctx.options = behind, behind_options
        ctx.case = dataclasses.replace(case, q=q.detach(), k=k.detach(), v=v.detach())
        out: Tensor = kernel.attend(ctx.case, **options).out
        return out

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (dO,) = given
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        case = dataclasses.replace(ctx.case, q=q, k=k, v=v)
        with torch.enable_grad():
            out = attended(ctx.behind, case, ctx.options)
        return *torch.autograd.grad(out, (q, k, v), dO.to(out.dtype)), *[None] * 5


class _WholeStep(torch.autograd.Function):
    """Forward runs the kernel; backward its whole training step."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Any, case: Any, options: Any
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.kernel, ctx.options = kernel, options
        ctx.case = dataclasses.replace(case, q=q.detach(), k=k.detach(), v=v.detach())
        out: Tensor = kernel.attend(ctx.case, **options).out
        return out

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        (dO,) = given
        case = dataclasses.replace(ctx.case, grad_out=dO)
        with torch.autocast(dO.device.type, enabled=False):
            done = ctx.kernel.gradients(case, **ctx.options)
        needed = zip((done.dq, done.dk, done.dv), ctx.saved_tensors, strict=True)
        return *(gradient.to(x.dtype) for gradient, x in needed), None, None, None
