"""A kernel's backward pass, in the conformance check: its gradients against those of fp64.

A kernel's dq, dk and dv for a drawn upstream gradient are held against those of the fp64 reference.
Right means, for each of the three over all heads: an rms error of at most 8 times the floor's (the
exact gradient rounded once), or 4 times that of plain attention in the same format, or 8 times that
of plain attention in fp32; and less than half of the gradient itself. A gradient that is a multiple
of the right one is said to be that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import round_to
from numdev.kernels import Kernel, Output, find
from numdev.kernels.output import GRADIENTS
from numdev.kernels.reference import floor_of, gradients
from numdev.kernels.reference.results import Gradients

FLOORS, BASELINES, IN_FP32, MOST = 8.0, 4.0, 8.0, 0.5
FACTOR_CUT = 10.0
"""A gradient is called a multiple of the right one when that explains nine tenths of its error."""


def verdict_of(kernel: Kernel, options: Mapping[str, Any], case: AttentionCase) -> tuple[str, str]:
    """`right`, `wrong` or `refuses`, and what there is to say. What the kernel raises comes out."""
    case = dataclasses.replace(case, grad_out=_upstream(case))
    found = kernel.gradients(case, **options)
    exact = gradients(case)
    limits = (
        (FLOORS, floor_of(exact, case.format)),
        (BASELINES, find("baseline").gradients(case)),
        (IN_FP32, find("baseline").gradients(_widened(case))),
    )
    remarks = (_wrong(name, found, exact, limits) for name in GRADIENTS)
    wrong = [words for words in remarks if words]
    return ("wrong", "; ".join(wrong)) if wrong else ("right", "")


def _upstream(case: AttentionCase) -> Tensor:
    """The gradient with respect to the output: N(0, 1), rounded to the case's format."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return round_to(drawn, case.format).to(case.q.dtype).to(case.q.device)


def _widened(case: AttentionCase) -> AttentionCase:
    """The same call in at least fp32, from the same inputs."""
    dtype = torch.promote_types(case.q.dtype, torch.float32)
    parts: dict[str, Any] = {
        f.name: x.to(dtype)
        for f in dataclasses.fields(case)
        if isinstance(x := getattr(case, f.name), Tensor) and x.is_floating_point()
    }
    return dataclasses.replace(case, **parts)


def _wrong(
    name: str, found: Output, exact: Gradients, limits: Sequence[tuple[float, Output]]
) -> str:
    """What is wrong with one gradient, in words; empty if nothing is. `limits` are others' outputs,
    and how many times their error is still right."""
    got, r = getattr(found, name).double(), getattr(exact, name)
    strays = int((~got.isfinite() & r.isfinite()).sum())
    if strays:
        return f"{name} has {strays} elements that are NaN or infinite and should not be"
    error, size = float((got - r).norm()), float(r.norm())
    near = any(
        error <= times * float((getattr(other, name).double() - r).norm())
        for times, other in limits
    )
    if near and error <= MOST * size:
        return ""
    factor = float((got * r).sum()) / size**2 if size else 0.0
    if factor and float((got - factor * r).norm()) * FACTOR_CUT <= error:
        return f"{name} is {factor:.3g} times what it should be"
    if not got.any():
        return f"{name} is 0"
    return f"{name} is off by {100 * error / size:.2g} %, and no known mistake explains it"
