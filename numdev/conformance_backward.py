"""A kernel's backward pass, in the conformance check: its gradients against those of fp64.

A kernel that autograd can follow has a backward; its dq, dk and dv for a drawn upstream gradient
are held against fp64's, which are those of plain attention in float64 differentiated by autograd.
Right means, for each of the three over all heads: an rms error of at most 8 times the floor's (the
exact gradient rounded once), or 4 times that of plain attention in the same format, or 8 times that
of plain attention in fp32; and less than half of the gradient itself. A gradient that is a multiple
of the right one is said to be that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import Format, round_to
from numdev.kernels import Kernel, find

FLOORS, BASELINES, IN_FP32, MOST = 8.0, 4.0, 8.0, 0.5
NAMES = ("dq", "dk", "dv")
FACTOR_CUT = 10.0
"""A gradient is called a multiple of the right one when that explains nine tenths of its error."""
Gradients = dict[str, Tensor]


def verdict_of(kernel: Kernel, options: Mapping[str, Any], case: AttentionCase) -> tuple[str, str]:
    """`right`, `wrong` or `refuses`, and what there is to say. What the kernel raises comes out."""
    upstream = _upstream(case)
    found = gradients(lambda c: kernel.attend(c, **options).out, case, upstream)
    if found is None:
        return "refuses", "it has no backward: autograd cannot follow it"
    plain = find("baseline")
    exact = _plain(plain, case, upstream, torch.float64)
    in_format = _plain(plain, case, upstream, case.q.dtype)
    in_fp32 = _plain(plain, case, upstream, torch.promote_types(case.q.dtype, torch.float32))
    wrong = [
        words
        for name in NAMES
        if (
            words := _wrong(
                name, found[name], exact[name], case.format, in_format[name], in_fp32[name]
            )
        )
    ]
    return ("wrong", "; ".join(wrong)) if wrong else ("right", "")


def gradients(
    attend: Callable[[AttentionCase], Tensor], case: AttentionCase, upstream: Tensor
) -> Gradients | None:
    """dq, dk and dv of `attend` for the upstream gradient; None where autograd cannot follow it."""
    leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
    with torch.enable_grad():
        out = attend(dataclasses.replace(case, q=leaves[0], k=leaves[1], v=leaves[2]))
        if not out.requires_grad:
            return None
        got = torch.autograd.grad(out, leaves, upstream.to(out.dtype), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for name, leaf, g in zip(NAMES, leaves, got, strict=True)
    }


def _upstream(case: AttentionCase) -> Tensor:
    """The gradient with respect to the output: N(0, 1), rounded to the case's format."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return round_to(drawn, case.format).to(case.q.dtype).to(case.q.device)


def _plain(plain: Kernel, case: AttentionCase, upstream: Tensor, dtype: torch.dtype) -> Gradients:
    """The gradients of plain attention computed in `dtype`, from the same inputs."""
    parts: dict[str, Any] = {
        f.name: x.to(dtype)
        for f in dataclasses.fields(case)
        if isinstance(x := getattr(case, f.name), Tensor) and x.is_floating_point()
    }
    found = gradients(lambda c: plain.attend(c).out, dataclasses.replace(case, **parts), upstream)
    assert found is not None  # the baseline is made of differentiable operations
    return found


def _wrong(
    name: str, got: Tensor, exact: Tensor, fmt: Format, in_format: Tensor, in_fp32: Tensor
) -> str:
    """What is wrong with one gradient, in words; empty if nothing is."""
    got = got.double()
    strays = int((~got.isfinite() & exact.isfinite()).sum())
    if strays:
        return f"{name} has {strays} elements that are NaN or infinite and should not be"
    error = float((got - exact).norm())
    limits = (
        (FLOORS, round_to(exact, fmt)),
        (BASELINES, in_format.double()),
        (IN_FP32, in_fp32.double()),
    )
    size = float(exact.norm())
    near = any(error <= times * float((other - exact).norm()) for times, other in limits)
    if near and error <= MOST * size:
        return ""
    factor = float((got * exact).sum()) / size**2 if size else 0.0
    if factor and float((got - factor * exact).norm()) * FACTOR_CUT <= error:
        return f"{name} is {factor:.3g} times what it should be"
    if not got.any():
        return f"{name} is 0"
    return f"{name} is off by {100 * error / size:.2g} %, and no known mistake explains it"
