"""The backward pass of a kernel that is made of operations autograd knows.

One training step is taken: forward from fresh leaves, then the gradients of q, k and v for the
case's upstream gradient. What a kernel's own backward does is its affair: a
`torch.autograd.Function`, PyTorch's fused operators and plain tensor code are all followed alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import Refused, UsageError
from numdev.formats import format_of, round_to
from numdev.kernels.output import Output, as_output


def upstream(case: AttentionCase) -> Tensor:
    """The gradient with respect to the output, [batch, heads, q_len, v_dim]. Raises UsageError for
    a case without one."""
    if case.grad_out is None:
        raise UsageError(
            f"attention case {case.ref.case!r} has no grad_out, so it has no gradients",
            hint="draw one, or take it from the model's loss",
        )
    return case.grad_out


def differentiate(
    function: Callable[[AttentionCase], Any],
    case: AttentionCase,
    *,
    during_backward: AbstractContextManager[Any] | None = None,
) -> Output:
    """The function's output and its gradients; `during_backward` is entered for the backward pass.

    dO is brought to the output's dtype, rounded once where that is narrower. The gradient of an
    input the output does not depend on is 0, as it is to autograd. Raises Refused where autograd
    cannot follow the function, and whatever the function raises.
    """
    dO = upstream(case)
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    q, k, v = leaves
    with torch.enable_grad():
        given = as_output(function(dataclasses.replace(case, q=q, k=k, v=v)), case)
    if not given.out.requires_grad:
        raise Refused("it has no backward: autograd cannot follow it")
    dtype = given.out.dtype
    dO = dO if dO.dtype == dtype else round_to(dO, format_of(dtype)).to(dtype)
    with during_backward or contextlib.nullcontext(), warnings.catch_warnings():
        # On its own thread autograd is the first to need a CUDA context, and says so.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        found = torch.autograd.grad(given.out, leaves, dO, allow_unused=True)
    dq, dk, dv = (
        torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)
    )
    lse = None if given.lse is None else given.lse.detach()
    return dataclasses.replace(given, out=given.out.detach(), lse=lse, dq=dq, dk=dk, dv=dv)
