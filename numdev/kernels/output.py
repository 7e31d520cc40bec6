"""What a kernel returns, and whether it is an output of the case it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """What a kernel returns."""

    out: Tensor
    """[batch, heads, q_len, v_dim]."""
    lse: Tensor | None = None
    """[batch, heads, q_len]: natural-log-sum-exp of the scaled, masked scores, if it offers it."""
    ran: str | None = None
    """Evidence of what really ran, for example the operator the dispatcher chose."""
    dq: Tensor | None = None
    """The gradients, from `Kernel.gradients`: each has the shape of what it is the gradient of,
    so those of k and v have kv heads."""
    dk: Tensor | None = None
    dv: Tensor | None = None
    ran_backward: str | None = None
    """As `ran`, of the backward pass."""


def as_output(result: Any, case: AttentionCase) -> Output:
    """What a kernel function returned, as an Output.

    It may return an Output, a tensor, or a tuple that begins with the output; the tuple's second
    element counts as the log-sum-exp if its shape is [batch, heads, q_len]. Raises
    MeasurementError when that is no output of `case`.
    """
    rows = tuple(case.q.shape[:3])
    if isinstance(result, Output):
        given = result
    else:
        out, *others = result if isinstance(result, tuple) and result else (result,)
        second = others[0] if others else None
        is_lse = isinstance(second, Tensor) and tuple(second.shape) == rows
        given = Output(out=out, lse=second if is_lse else None)
    _check("out", given.out, (*rows, case.v.shape[-1]), case)
    shapes = {"lse": rows, "dq": case.q.shape, "dk": case.k.shape, "dv": case.v.shape}
    for what, shape in shapes.items():
        x = getattr(given, what)
        if x is not None:
            _check(what, x, tuple(shape), case)
    return given


def _check(what: str, x: Any, shape: tuple[int, ...], case: AttentionCase) -> None:
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
        f"it returned {problem} as {what}; expected a floating-point tensor of shape "
        f"{list(shape)} on {case.q.device}"
    )
