"""What a kernel returns, whether it is an output of its case, and autograd's
gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import format_of, round_to

GRADIENTS = ("dq", "dk", "dv")
NAMES = {"lse": "log-sum-exp"}  # of tensors, in messages


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """What a kernel returns."""

    out: Tensor  # [batch, heads, q_len, v_dim]
    lse: Tensor | None = None
    """[batch, heads, q_len]: natural-log-sum-exp of the scaled, masked scores, if it
    offers it."""
    not_lse: str | None = None  # what came in the log-sum-exp's place, in words
    ran: str | None = None
    """Evidence of what really ran, in words, for example the operator the dispatcher
    chose."""
    did: Any = None  # the same as data, a mapping, for `Kernel.claims`
    # From `Kernel.gradients`, as dk and dv: of the shape of q, k and v
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    ran_backward: str | None = None  # as `ran`, of the backward pass

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that were returned, by name."""
        every = {
            "out": self.out, "lse": self.lse, "dq": self.dq, "dk": self.dk, "dv": self.dv
        }  # fmt: skip
        return {name: x for name, x in every.items() if x is not None}


Reason = tuple[object, str]  # a condition, and what is wrong where it holds


def why_not(*reasons: Reason) -> str | None:
    """The words behind the first condition that holds; None where none does."""
    return next((words for holds, words in reasons if holds), None)


def refuse(*reasons: Reason) -> None:
    """Raises Refused with the words behind the first condition that holds."""
    if words := why_not(*reasons):
        raise Refused(words)


def as_output(result: object, case: AttentionCase) -> Output:
    """What a kernel function returned, an Output, a tensor, or a tuple that begins with
    the output, as an Output. A tuple's second element, if not None, is the log-sum-exp;
    attention weights [batch, heads, q_len, kv_len] in its place are none, and `not_lse`
    says so. Raises MeasurementError when that is no output of `case`, or its log-sum-exp
    is none."""
    rows = tuple(case.q.shape[:3])
    if isinstance(result, Output):
        output = result
    else:
        out, *others = result if isinstance(result, tuple) and result else (result,)
        second = others[0] if others else None
        if isinstance(second, Tensor) and tuple(second.shape) == (*rows, case.k.shape[2]):
            words = (
                f"attention weights {list(second.shape)}, expected the "
                f"log-sum-exp {list(rows)}"
            )
            output = Output(out=out, not_lse=words)
        else:
            output = Output(out=out, lse=second)
    shapes = {"lse": rows, "dq": case.q.shape, "dk": case.k.shape, "dv": case.v.shape}
    _check("out", output.out, (*rows, case.v.shape[-1]), case)
    for what, shape in shapes.items():
        if getattr(output, what) is not None:
            _check(NAMES.get(what, what), getattr(output, what), tuple(shape), case)
    return output


def _check(what: str, x: object, shape: tuple[int, ...], case: AttentionCase) -> None:
    if not isinstance(x, Tensor):
        problem = type(x).__name__
    elif tuple(x.shape) != shape:
        problem = f"shape {list(x.shape)}"
    elif x.layout is not torch.strided:
        problem = f"a {x.layout} tensor"
    elif not x.is_floating_point() or x.device != case.q.device:
        problem = f"{x.dtype} on {x.device}"
    else:
        return
    raise MeasurementError(
        f"{what}: expected a floating-point tensor of shape {list(shape)} on "
        f"{case.q.device}, "
        f"got {problem}"
    )


def upstream(case: AttentionCase) -> Tensor:
    """The gradient of the output, [batch, heads, q_len, v_dim]. Raises UsageError without
    one."""
    if case.grad_out is None:
        what = f"attention case {case.ref.case!r}: gradients need a grad_out, got none"
        raise UsageError(what, hint="use a random one, or take it from the model's loss")
    return case.grad_out


def upstream_in(case: AttentionCase, dtype: torch.dtype) -> Tensor:
    """`upstream` in a dtype, rounded once where that is narrower."""
    dO = upstream(case)
    return dO if dO.dtype == dtype else round_to(dO, format_of(dtype)).to(dtype)


def differentiate(
    function: Callable[[AttentionCase], object],
    case: AttentionCase,
    *,
    during_backward: AbstractContextManager[object] | None = None,
) -> Output:
    """The function's output and its gradients; `during_backward` is entered for the
    backward pass. dO is brought to the output's dtype. The gradient of an input the
    output does not depend on is 0. Raises Refused where autograd cannot follow the
    function, and whatever the function raises.
    """
    q, k, v = leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    with torch.enable_grad():
        done = as_output(function(dataclasses.replace(case, q=q, k=k, v=v)), case)
    if not done.out.requires_grad:
        raise Refused("no backward: output has no autograd graph")
    # As a product: to be given dO itself, torch imports sympy, which takes a second.
    loss = (done.out * upstream_in(case, done.out.dtype)).sum()
    with during_backward or contextlib.nullcontext(), warnings.catch_warnings():
        # On its own thread autograd is the first to need a CUDA context, and says so.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        dq, dk, dv = torch.autograd.grad(
            loss, leaves, allow_unused=True, materialize_grads=True
        )
    lse = None if done.lse is None else done.lse.detach()
    return dataclasses.replace(done, out=done.out.detach(), lse=lse, dq=dq, dk=dk, dv=dv)
