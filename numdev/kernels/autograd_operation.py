"""A kernel inside a network that learns: one operation of autograd's graph.

Gradients come from the kernel's own training form (`Kernel.training`), through its
function where autograd follows that, and else from its whole training step in backward,
which computes forward twice. Autocast is off in here, in both passes: it would cast
matrix products in a custom function's forward and not in its backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused
from numdev.kernels import Kernel
from numdev.kernels.output import Output, as_output

Options = Mapping[str, object]


def attend_in_graph(
    kernel: Kernel,
    case: AttentionCase,
    options: Options,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns the kernel's output for the case, [batch, heads, q_len, v_dim], connected
    by autograd to the case's q, k and v. `options` take the place of the kernel's
    defaults. A kernel that draws random numbers in `training` takes them from `generator`
    in both passes; None: from its own seed.

    Raises UsageError for options as `Kernel.with_options` does. Raises Refused where the
    kernel declines the case, has no backward pass, or returns no autograd graph although
    q requires gradients and they are enabled. Raises MeasurementError where what the
    kernel returned is no output of this case; what `training` returns is not checked."""
    options = kernel.with_options(options)
    kernel.accept(case)
    if kernel.backward is None:
        raise Refused("no backward pass")
    with torch.autocast(case.q.device.type, enabled=False):
        if kernel.training is not None:
            drawn = {"generator": generator} if kernel.draws(options) else {}
            out = kernel.training(case, **drawn, **options)
        elif kernel.backward == "autograd":
            out = as_output(kernel.function(case, **options), case).out
        else:

            def whole_step(case: AttentionCase, dO: Tensor) -> tuple[Tensor | None, ...]:
                """Returns dq, dk and dv for the output's gradient dO, from the kernel's
                forward and backward on the case: forward is computed again."""
                done = kernel.gradients(dataclasses.replace(case, grad_out=dO), **options)
                return done.dq, done.dk, done.dv

            out = _apply_step(kernel, case, options, whole_step)
    if torch.is_grad_enabled() and case.q.requires_grad and not out.requires_grad:
        raise Refused("cannot train with it: no autograd graph")
    return out


def attend_with_gradients_of(
    kernel: Kernel,
    case: AttentionCase,
    options: Options,
    behind: Kernel,
    behind_options: Options,
) -> Tensor:
    """Returns the output of `kernel`, [batch, heads, q_len, v_dim], connected by autograd
    to the case's q, k and v. The gradients are those of the kernel `behind`, which runs
    its own forward and backward in the backward pass; what it raises there comes then.
    Raises Refused where either declines the case or `behind` has no backward pass,
    UsageError for wrong `options`, MeasurementError where what `kernel` returned is no
    output of the case."""
    behind.accept(case)
    if behind.backward is None:
        raise Refused(f"{behind.name} has no backward")

    def trained(case: AttentionCase, dO: Tensor) -> tuple[Tensor, ...]:
        """Returns dq, dk and dv for the output's gradient dO, from forward and backward
        of the kernel `behind`."""
        q, k, v = (x.detach().requires_grad_() for x in (case.q, case.k, case.v))
        with torch.enable_grad():
            out = attend_in_graph(
                behind, dataclasses.replace(case, q=q, k=k, v=v), behind_options
            )
        return torch.autograd.grad(out, (q, k, v), dO.to(out.dtype))

    return _apply_step(kernel, case, options, trained)


def _apply_step(
    kernel: Kernel, case: AttentionCase, options: Options, behind: Callable[..., object]
) -> Tensor:
    """Returns the kernel's output [batch, heads, q_len, v_dim] as one operation of
    autograd's graph, with autocast off. `behind(case, dO)` returns its gradients dq, dk
    and dv, and is called in the backward pass."""
    with torch.autocast(case.q.device.type, enabled=False):
        out: Tensor = _Step.apply(  # type: ignore[no-untyped-call]
            case.q, case.k, case.v, case, lambda c: kernel.attend(c, **options), behind
        )
    return out


class _Step(torch.autograd.Function):
    """One operation of autograd's graph: forward runs one kernel, and the gradients are
    what a function of case and dO returns."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        case: AttentionCase,
        run: Callable[[AttentionCase], Output],
        behind: object,
    ) -> Tensor:
        """Returns the tensor out of `run(case)`, without a graph, and stores what
        backward needs in `ctx`. `behind`: called in backward with the case and dO."""
        ctx.save_for_backward(q, k, v)
        ctx.behind = behind
        ctx.case = dataclasses.replace(case, q=q.detach(), k=k.detach(), v=v.detach())
        return run(ctx.case).out

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> object:
        """Returns dq, dk and dv in the dtypes of q, k and v, and None for the other three
        arguments."""
        with torch.autocast(upstreams[0].device.type, enabled=False):
            gradients = zip(
                ctx.behind(ctx.case, upstreams[0]), ctx.saved_tensors, strict=True
            )
            return *(gradient.to(x.dtype) for gradient, x in gradients), None, None, None
