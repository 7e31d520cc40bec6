"""Gradients of norms and of softmax as the terms that they subtract.

    dx = scale (g - sum_j weight_j total_j),    total_j = the sum of terms_j over a group

Of a norm: g is the gradient that comes back times the norm's weight, the totals are those
of g and of g h, h the normalised values. Where g has no part beside the weights dx is 0
in exact arithmetic, and what code computes are its roundings; a total errs once for all
numbers of its group. The gradients of the norm's weight and bias are sums of what comes
back, times h or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from numdev.exact.operator_arguments import operator_argument
from numdev.exact.wide_tensors import widened


@dataclass(frozen=True, kw_only=True, eq=False)
class Subtracted:
    """What a gradient subtracts: `weight` times the sum of `terms` over each group, both
    [groups, numbers of a group]."""

    weight: Tensor
    terms: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class ProjectedGradient:
    """A gradient by groups: tensors are fp64 [groups, numbers of a group] or of a shape
    that expands to it. `ungrouped` returns such a tensor in the gradient's own shape. Of
    a norm alone there are `normalised`, h by groups, and `over`, the axes that the
    gradients of weight and bias sum over."""

    scale: Tensor
    back: Tensor
    parts: Sequence[Subtracted]
    ungrouped: Callable[[Tensor], Tensor]
    normalised: Tensor | None = None
    over: tuple[int, ...] = ()


def projection_of(func: OpOverload, args: Sequence[object]) -> ProjectedGradient | None:
    """Returns the gradient of the input that a backward operator of a norm or a softmax
    computes (PROJECTIONS); None for any other operator, and for a batch norm that takes
    running statistics, which subtracts nothing. `args`: the operator's positional
    arguments."""
    name = func.overloadpacket.__name__
    make = PROJECTIONS.get(name)

    def argument(name: str) -> object:
        """Returns an argument of the operator, a tensor in fp64."""
        return widened(operator_argument(func, tuple(args), {}, name))

    return None if make is None else make(argument)


Read = Callable[[str], object]
"""Returns an argument of an operator by its name, a tensor in fp64."""


def _of_layer_norm(read: Read) -> ProjectedGradient:
    """Returns the gradient of a layer norm's input, or of an RMS norm's, which subtracts
    no mean, from the arguments of PyTorch's backward operator, which `read` returns by
    name. A group is a row: all normalised axes of one place of the others."""
    back, x, rstd = (cast(Tensor, read(n)) for n in ("grad_out", "input", "rstd"))
    mean, weight = read("mean"), read("weight")
    rows = (rstd.numel(), -1)
    leading = x.ndim - len(cast(Sequence[int], read("normalized_shape")))
    g = back * weight if isinstance(weight, Tensor) else back
    centred = x.reshape(rows)
    if isinstance(mean, Tensor):
        centred = centred - mean.reshape(rows)
    return _from_groups(
        g.reshape(rows),
        centred,
        rstd.reshape(rows),
        lambda y: y.reshape(x.shape),
        tuple(range(leading)),
        has_mean=isinstance(mean, Tensor),
    )


def _of_group_norm(read: Read) -> ProjectedGradient:
    """Returns the gradient of a group norm's input, from the arguments of PyTorch's
    backward operator, which `read` returns by name. A group is all numbers of a group of
    channels in one batch entry."""
    back, x = (cast(Tensor, read(n)) for n in ("grad_out", "input"))
    mean, rstd = (cast(Tensor, read(n)) for n in ("mean", "rstd"))
    weight, rows = read("weight"), (mean.numel(), -1)
    g = back * _by_channel(weight, x) if isinstance(weight, Tensor) else back
    return _from_groups(
        g.reshape(rows),
        x.reshape(rows) - mean.reshape(rows),
        rstd.reshape(rows),
        lambda y: y.reshape(x.shape),
        _all_but_channels(x),
    )


def _of_batch_norm(read: Read) -> ProjectedGradient | None:
    """Returns the gradient of the input of a batch norm in training; a group is all
    numbers of a channel. None for one that takes running statistics."""
    if not read("train"):
        return None
    back, x = (cast(Tensor, read(n)) for n in ("grad_out", "input"))
    mean, rstd = (cast(Tensor, read(n)) for n in ("save_mean", "save_invstd"))
    weight, rows = read("weight"), (mean.numel(), -1)
    g = back * _by_channel(weight, x) if isinstance(weight, Tensor) else back
    by_channel = x.transpose(0, 1)
    return _from_groups(
        g.transpose(0, 1).reshape(rows),
        by_channel.reshape(rows) - mean.reshape(rows),
        rstd.reshape(rows),
        lambda y: y.reshape(by_channel.shape).transpose(0, 1),
        _all_but_channels(x),
    )


def _by_channel(weight: Tensor, x: Tensor) -> Tensor:
    """Returns a weight [channels] in a shape that broadcasts against `x`, whose second
    axis has the channels."""
    return weight.reshape(1, -1, *[1] * (x.ndim - 2))


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    """Returns the axes of a tensor without its second one."""
    return tuple(i for i in range(x.ndim) if i != 1)


def _from_groups(
    g: Tensor, centred: Tensor, rstd: Tensor, ungrouped: Callable[[Tensor], Tensor],
    over: tuple[int, ...], *, has_mean: bool = True,
) -> ProjectedGradient:  # fmt: skip
    """Returns the gradient of a norm's input from tensors by groups. g is what comes back
    times the norm's weight, `centred` the input less its mean (the input itself without
    `has_mean`), both [groups, numbers of a group]; `rstd` [groups, 1] is the reciprocal
    of the deviation. `ungrouped` and `over` are passed on."""
    normalised, share = centred * rstd, 1 / g.shape[-1]
    parts = [Subtracted(weight=normalised * share, terms=g * normalised)]
    if has_mean:
        parts.append(Subtracted(weight=torch.full_like(g, share), terms=g))
    return ProjectedGradient(
        scale=rstd, back=g, parts=parts, ungrouped=ungrouped, normalised=normalised,
        over=over,
    )  # fmt: skip


def _of_softmax(read: Read) -> ProjectedGradient:
    """Returns the gradient y (g - sum(g y)) of the input of a softmax y; a group is a
    line along its dimension, or the single number of a 0-d tensor."""
    back, y = (cast(Tensor, read(n)) for n in ("grad_output", "output"))
    dim = cast(int, read("dim"))
    moved = y.movedim(dim, -1)
    rows = (-1, moved.shape[-1:].numel())  # 1 of a 0-d tensor
    g, scale = back.movedim(dim, -1).reshape(rows), moved.reshape(rows)
    part = Subtracted(weight=torch.ones_like(g), terms=g * scale)
    return ProjectedGradient(
        scale=scale, back=g, parts=[part],
        ungrouped=lambda z: z.reshape(moved.shape).movedim(-1, dim),
    )  # fmt: skip


PROJECTIONS: dict[str, Callable[[Read], ProjectedGradient | None]] = {
    "native_layer_norm_backward": _of_layer_norm,
    "_fused_rms_norm_backward": _of_layer_norm,
    "native_group_norm_backward": _of_group_norm,
    "native_batch_norm_backward": _of_batch_norm,
    "_softmax_backward_data": _of_softmax,
}
