"""What a kernel returns, whether it is an output of its case, and autograd's
gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
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
    """The result of one kernel call: its tensors, and evidence of what ran."""

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
        """Returns the tensors that are not None, by name: `out`, `lse`, `dq`, `dk`,
        `dv`."""
        every = {
            "out": self.out, "lse": self.lse, "dq": self.dq, "dk": self.dk, "dv": self.dv
        }  # fmt: skip
        return {name: x for name, x in every.items() if x is not None}


Reason = tuple[object, str]  # a condition, and what is wrong where it holds


def why_not(*reasons: Reason) -> str | None:
    """Returns the text of the first of these (condition, text) pairs whose condition is
    true; None where none is."""
    return next((words for holds, words in reasons if holds), None)


def refuse(*reasons: Reason) -> None:
    """Raises Refused with the text of the first of these (condition, text) pairs whose
    condition is true; returns where none is."""
    if words := why_not(*reasons):
        raise Refused(words)


def as_output(result: object, case: AttentionCase) -> Output:
    """Returns the result of a kernel function as an Output. It may be an Output; a
    tensor; or a tuple of the output and the log-sum-exp or None, whose further elements
    are dropped. A second element of the shape of attention weights [batch, heads, q_len,
    kv_len] is dropped too: `not_lse` then says so. Raises MeasurementError where a tensor
    of the Output does not have the shape that the case asks for, is not dense, is not of
    floating point, has a dtype of no format, or is on another device; and for a result of
    another type."""
    rows = tuple(case.q.shape[:3])
    if isinstance(result, Output):
        output = result
    else:
        out, *others = result if isinstance(result, tuple) and result else (result,)
        second = others[0] if others else None
        weights = (*rows, case.k.shape[2])
        if (
            isinstance(second, Tensor)
            and not second.is_nested
            and tuple(second.shape) == weights
        ):
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
    """Raises MeasurementError unless x is a dense floating-point tensor of this shape on
    the case's device, of a dtype that has a format. `what`: its name in the message."""
    if not isinstance(x, Tensor):
        problem = "None" if x is None else type(x).__name__
    elif x.is_nested:  # it may raise where it is asked for its shape
        problem = "a nested tensor"
    elif x.layout is not torch.strided:
        problem = f"a {x.layout} tensor"
    elif tuple(x.shape) != shape:
        problem = f"shape {list(x.shape)}"
    elif not x.is_floating_point() or x.device != case.q.device:
        problem = f"{x.dtype} on {x.device}"
    else:
        try:
            format_of(x.dtype)
        except UsageError:
            problem = f"{x.dtype}, which numdev has no format for"
        else:
            return
    raise MeasurementError(
        f"{what}: expected a floating-point tensor of shape {list(shape)} on "
        f"{case.q.device}, "
        f"got {problem}"
    )


def upstream(case: AttentionCase) -> Tensor:
    """Returns `case.grad_out`, the gradient of the loss by the output, [batch, heads,
    q_len, v_dim]. Raises UsageError for a case without one."""
    if case.grad_out is None:
        what = f"attention case {case.ref.case!r}: gradients need a grad_out, got none"
        raise UsageError(what, hint="use a random one, or take it from the model's loss")
    return case.grad_out


def upstream_in(case: AttentionCase, dtype: torch.dtype) -> Tensor:
    """Returns `case.grad_out`, the gradient of the loss by the output, [batch, heads,
    q_len, v_dim], in `dtype`, rounded once where that is narrower. Raises UsageError for
    a case without one, and for a dtype of no format."""
    dO = upstream(case)
    return dO if dO.dtype == dtype else round_to(dO, format_of(dtype)).to(dtype)


def pull_back(
    outputs: Sequence[Tensor],
    upstream: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    retain_graph: bool = False,
) -> tuple[Tensor, ...]:
    """Returns the gradient of each leaf, in their order: the sum over the outputs of what
    `upstream`, each output's gradient, gives it. 0 where no output depends on a leaf.
    `outputs`: at least one, as many as `upstream` (else ValueError), of the same shapes.
    `retain_graph`: keep the graph for another call. Raises RuntimeError where no output
    is in an autograd graph, and for a leaf that requires no gradient."""
    # As products: to be given gradients, torch imports sympy, which takes a second.
    products = ((x * dx).sum() for x, dx in zip(outputs, upstream, strict=True))
    return torch.autograd.grad(
        functools.reduce(torch.add, products),
        leaves,
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )


def differentiate(
    function: Callable[[AttentionCase], object],
    case: AttentionCase,
    *,
    during_backward: AbstractContextManager[object] | None = None,
) -> Output:
    """Runs a kernel function on the case and returns its output, without a graph, with
    dq, dk and dv as autograd computes them. Autograd begins with `case.grad_out` rounded
    to the output's dtype; the gradients have the dtypes of q, k and v, and are 0 for an
    input that the output does not depend on. `during_backward` is entered for the
    backward pass alone. Raises Refused where the output has no autograd graph,
    MeasurementError for what is no output of the case, UsageError without a grad_out, and
    whatever the function raises."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    with torch.enable_grad():
        done = as_output(function(dataclasses.replace(case, q=q, k=k, v=v)), case)
    if not done.out.requires_grad:
        raise Refused("no backward: output has no autograd graph")
    dO = upstream_in(case, done.out.dtype)
    with during_backward or contextlib.nullcontext(), warnings.catch_warnings():
        # On its own thread autograd is the first to need a CUDA context, and says so.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        dq, dk, dv = pull_back([done.out], [dO], leaves)
    lse = None if done.lse is None else done.lse.detach()
    return dataclasses.replace(done, out=done.out.detach(), lse=lse, dq=dq, dk=dk, dv=dv)
