"""How many numbers an operator adds for each of its results, and the sum of their
squares: of that follows what a sum in float32 errs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from numdev.exact.operator_arguments import parameters_of
from numdev.exact.result_dtypes import is_floating
from numdev.exact.wide_tensors import widened

aten = torch.ops.aten
# Linear in each of their floating-point arguments by itself, or in all together: what
# they add is known from themselves, on squares and on ones.
LINEAR = frozenset(
    ("trace", "addbmm", "_trilinear", "put", "index_put", "_index_put_impl",
     "_unsafe_index_put")
)  # fmt: skip
# Linear in their first argument, the gradient that comes back; weights are at most 1, or
# little more.
SPREAD_GRADIENTS = frozenset(
    """embedding_dense_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    col2im""".split()  # noqa: SIM905
)
# Means with weights that add up to 1, of two places along each axis, or four (bicubic).
INTERPOLATIONS = frozenset(
    ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
     "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
)  # fmt: skip
# What the rounding of a coordinate along an axis of L places adds, as terms over L^2: the
# weights of an interpolation err by as much as the coordinate that they come from.
OF_COORDINATE = 2.0
# Fourier transforms, and roundings of a number in each of their log2 N stages, as fitted
# to PyTorch's own errors
TRANSFORMS = frozenset(("_fft_r2c", "_fft_c2c", "_fft_c2r"))
PER_STAGE = 1.5
NORMALISED = {0: 0.0, 1: 0.5, 2: 1.0}  # by which power of N, by PyTorch's number for it
PAIRED = ("mm", "bmm", "mv", "dot")
WITH_ADDEND = ("addmm", "baddbmm", "addmv")
PRODUCTS = frozenset((*PAIRED, *WITH_ADDEND))
AVERAGES = frozenset(
    ("avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
     "_adaptive_avg_pool3d")
)  # fmt: skip
AVERAGED_GRADIENTS = frozenset(
    """avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d_backward""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Terms:
    """What a sum adds: how many numbers (one count for all results, or one for each),
    and the sum of their squares for each result."""

    count: float | Tensor
    squares: Tensor


Arguments = Sequence[object]
TermsOf = Callable[[OpOverload, Arguments, Tensor], Terms]


def _reduced(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns how many terms a sum along dimensions adds, or a mean, whose terms are
    divided by their number, and the sum of their squares for each result. `args`: the
    tensor, then the operator's next two arguments; `values`: the exact result."""
    x = cast(Tensor, widened(args[0]))
    count = max(1.0, x.numel() / values.numel())
    total = func(x.square(), *args[1:3])
    if "mean" in func.overloadpacket.__name__:
        total = total / count
    return Terms(count, total.reshape(values.shape))


def _along(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of running sums: the i-th place along the axis (from 0) adds i +
    1 of them. A 0-d tensor has one term."""
    x, dim = cast(Tensor, widened(args[0])), cast(int, args[1])
    if not x.ndim:
        return Terms(1.0, x.square())
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    count = torch.arange(1, x.shape[dim] + 1, dtype=x.dtype, device=x.device)
    return Terms(count.reshape(shape), x.square().cumsum(dim))


def _product(first: int) -> Callable[[OpOverload, Arguments, Tensor], Terms]:
    """Returns a function that returns the terms of a product of matrices or vectors.
    `first`: the index of the left factor among the operator's arguments; the right factor
    is the next one. An addend before them is not among the terms, and a factor `alpha`
    counts as 1."""

    def terms(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
        """Returns the terms of the product: as many as the left factor's last axis is
        long."""
        left, right = (cast(Tensor, widened(x)) for x in args[first : first + 2])
        squares = left.square() @ right.square()
        return Terms(float(left.shape[-1]), squares.expand(values.shape))

    return terms


def _convolution(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of a convolution without its bias: as many as an output channel
    has weights; of a transposed one, kernel elements times input channels."""
    x, weight = (cast(Tensor, widened(x)) for x in args[:2])
    transposed = bool(args[6])
    count = weight[:, 0].numel() if transposed else weight[0].numel()
    squares = func(x.square(), weight.square(), None, *args[3:])
    return Terms(float(count), squares)


def _convolution_backward(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of one gradient of a convolution: of the input's where `values`
    has the input's shape, else of the weight's where it has that one's, else of the
    bias's. `args`: the gradient that comes back, input, weight, then the operator's
    others."""
    back, x, weight = (cast(Tensor, widened(each)) for each in args[:3])
    which = 0 if values.shape == x.shape else 1 if values.shape == weight.shape else 2
    mask = [i == which for i in range(3)]
    squares = func(back.square(), x.square(), weight.square(), *args[3:-1], mask)[which]
    per_weight = back.numel() / back.shape[1]
    count = (weight[0].numel(), per_weight, per_weight)[which]
    return Terms(float(max(1, count)), squares)


def _pooled(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of averages over windows, divided by their number: the window's
    elements, padding included, or of an adaptive operator the input's elements for each
    result."""
    x = cast(Tensor, widened(args[0]))
    count = max(1.0, _window(func, args, x, values))
    return Terms(count, func(x.square(), *args[1:]) / count)


def _interpolated(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of an interpolation: of each axis but the first two, two places
    (bicubic: four), and what its coordinates add. The weights count once in the squares,
    which makes these too large where they are at most 1."""
    x = cast(Tensor, widened(args[0]))
    count = _places(func) ** (x.ndim - 2) + _of_coordinates(func, args, x, values)
    return Terms(count, func(x.square(), *args[1:]).abs())


def _places(func: OpOverload) -> float:
    """Returns how many places along an axis an interpolation weighs."""
    return 4.0 if "bicubic" in func.overloadpacket.__name__ else 2.0


def _of_coordinates(func: OpOverload, args: Arguments, x: Tensor, out: Tensor) -> float:
    """Returns how many terms the rounded coordinates of an interpolation of `x` [batch,
    channels, ...] in the places of `out` add to its result; 0 where no coordinate is
    rounded, as for twice as many places."""
    place = parameters_of(func).get("align_corners")
    is_aligned = place is not None and bool(args[place.place])
    count = 0.0
    for sizes in zip(x.shape[2:], out.shape[2:], strict=True):
        step = Fraction(*(max(1, size - is_aligned) for size in sizes))
        if step.denominator & (step.denominator - 1):  # no power of two
            count += OF_COORDINATE * sizes[0] ** 2
    return count


def _sampled(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of samples of a grid [batch, channels, ...] at given places: two
    places of each axis, and what the coordinates add."""
    x, options = cast(Tensor, widened(args[0])), args[2:]
    places = cast(Tensor, widened(args[1]))
    count = 2.0 ** (x.ndim - 2) + _of_places(x)
    return Terms(count, func(x.square(), places, *options).abs())


def _sampled_backward(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of one gradient of samples of a grid: of the grid where `values`
    has its shape, else of the places, as many as channels times the grid's numbers that a
    sample weighs. `args`: what comes back, the grid, the places, then the operator's
    others."""
    back, x, places = (cast(Tensor, widened(each)) for each in args[:3])
    if values.shape == x.shape:
        squares = func(back.square(), x, places, *args[3:-1], [True, False])[0]
        count = func(torch.ones_like(back), x, places, *args[3:-1], [True, False])[0]
        return Terms(count.clamp_min(1) + _of_places(x), squares.abs())
    weighed = 2.0 ** (x.ndim - 2)
    sampler = getattr(aten, func.overloadpacket.__name__.removesuffix("_backward"))
    of_grid = sampler(x.square(), places, *args[3:-1]).abs()
    squares = (back.square() * of_grid).sum(1).unsqueeze(-1) * weighed
    scale = [(size / 2) ** 2 for size in reversed(x.shape[2:])]
    return Terms(
        weighed * x.shape[1] + _of_places(x), squares * squares.new_tensor(scale)
    )


def _of_places(x: Tensor) -> float:
    """Returns how many terms the rounded coordinates of samples of a grid add."""
    return OF_COORDINATE * sum(size**2 for size in x.shape[2:])


def _spread(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of the gradient of an operator that picks, repeats or
    interpolates. `func`: the operator of the backward pass; `args`: what comes back, then
    its other arguments; `values`: the exact result. The terms of a place are the numbers
    that come back to it; of an interpolation (but a nearest one) times the places along
    an axis that it weighs, and what its coordinates add. A weight counts once in the
    squares, not squared, which makes these too large where weights are from 0 to 1."""
    back, *others = map(widened, args)
    back = cast(Tensor, back)
    count = func(torch.ones_like(back), *others).clamp_min(1)
    squares = func(back.square(), *others).abs()
    name = func.overloadpacket.__name__
    if "upsample" not in name or "nearest" in name:
        return Terms(count, squares)
    of_coordinates = _of_coordinates(func, args, values, back)
    if of_coordinates:  # a weight of nearly 0 errs as much as another
        squares = squares.clamp_min(back.square().mean())
    return Terms(count * _places(func) + of_coordinates, squares)


def _averaged(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of the gradient of averages over windows. A place has a term for
    each window that contains it: what comes back for the window, divided by the number of
    its elements. That number is taken as the same for all windows, the average one."""
    back, *others = map(widened, args)
    back, x = cast(Tensor, back), cast(Tensor, others[0])
    shares = func(torch.ones_like(back), *others)
    size = max(1.0, _window(func, args, x, back))
    return Terms((shares * size).clamp_min(1), func(back.square(), *others) / size)


def _window(func: OpOverload, args: Arguments, x: Tensor, averages: Tensor) -> float:
    """Returns how many elements an average is over: those of the window, padding
    included; of an adaptive operator the elements of the input `x` for each element of
    `averages`."""
    if "adaptive" in func.overloadpacket.__name__:
        return x.numel() / averages.numel()
    names = [parameter.name for parameter in func._schema.arguments]
    size = cast(Sequence[int], args[names.index("kernel_size")])
    dims = int(func.overloadpacket.__name__.removesuffix("_backward")[-2])
    return float(math.prod(size if len(size) == dims else [size[0]] * dims))


def _added_at(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of values that are added into places of a tensor: the number that
    a place held, and each number that is added there. `args`: the tensor, an axis, the
    places, the values added."""
    x, axis, places, added = map(widened, args[:4])
    x, added = cast(Tensor, x), cast(Tensor, added)
    count = func(torch.ones_like(x), axis, places, torch.ones_like(added))
    return Terms(count, func(x.square(), axis, places, added.square()))


def _linear(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of an operator in LINEAR: products of numbers of its
    floating-point arguments, and numbers of one that are added to these."""
    floats = [is_floating(x) for x in args]
    pairs = list(zip(map(widened, args), floats, strict=True))
    squares = func(*(cast(Tensor, x).square() if is_f else x for x, is_f in pairs))
    ones = func(*(torch.ones_like(cast(Tensor, x)) if is_f else x for x, is_f in pairs))
    return Terms(ones.clamp_min(1), squares)


def _transformed(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns a Fourier transform's terms as those of a sum that errs as much: since each
    of the N numbers along its axes is rounded PER_STAGE times in each of log2 N stages,
    `count` is 2 PER_STAGE log2 N, not N, with N at least 2; `squares` is the sum of the N
    squares, normalised as the transform is. `args`: the input, its axes, PyTorch's number
    of the normalisation, and of `_fft_c2r`, whose input is half of a spectrum, the length
    of the last axis in the result; `values`: the exact result, of which the shape alone
    counts."""
    x, axes = cast(Tensor, widened(args[0])), cast(Sequence[int], args[1])
    size = float(math.prod(x.shape[axis] for axis in axes))
    squares = x.abs().square().sum(list(axes), keepdim=True)
    if func.overloadpacket.__name__ == "_fft_c2r":  # half of a spectrum
        last = cast(int, args[3])
        size, squares = size / x.shape[axes[-1]] * last, 2 * squares
    squares = squares * size ** (-2 * NORMALISED[cast(int, args[2])])
    count = 2 * PER_STAGE * math.log2(max(2.0, size))
    return Terms(count, squares.expand(values.shape))


def _bagged(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of sums or means of rows of a table, of bags of one size; all
    results but the sums themselves have one term."""
    table, places, bags = (cast(Tensor, widened(x)) for x in args[:3])
    size = places.numel() / max(1, bags.numel())
    squares = func(table.square(), *args[1:])[0]
    if squares.shape != values.shape:
        return Terms(1.0, values.square())
    is_mean = len(args) > 4 and args[4] == 1
    return Terms(max(1.0, size), squares / size if is_mean else squares)


def _bagged_backward(func: OpOverload, args: Arguments, values: Tensor) -> Terms:
    """Returns the terms of the gradient of a table whose rows are summed, or averaged, in
    bags of one size: of each row as many as bags that hold it."""
    back, places, bags = (cast(Tensor, widened(x)) for x in args[:3])
    mode = parameters_of(func)["mode"].place
    of_sums = [*args[:mode], 0, *args[mode + 1 :]]
    count = func(torch.ones_like(back), *of_sums[1:])
    shares = places.numel() / max(1, bags.numel()) if args[mode] == 1 else 1.0
    squares = func(back.square(), *of_sums[1:]) / shares**2
    return Terms(count.clamp_min(1), squares)


Table = Sequence[tuple[Iterable[str], TermsOf]]
OF_NUMBERS: Table = (
    (("sum", "mean", "nansum"), _reduced),
    (("cumsum",), _along),
    (PAIRED, _product(0)),
    (WITH_ADDEND, _product(1)),
    (LINEAR, _linear),
    (TRANSFORMS, _transformed),
    (("index_add", "scatter_add"), _added_at),
    (("_embedding_bag", "_embedding_bag_forward_only"), _bagged),
    (("_embedding_bag_backward",), _bagged_backward),
)
OF_PLANES: Table = (
    (("convolution",), _convolution),
    (("convolution_backward",), _convolution_backward),
    (AVERAGES, _pooled),
    (AVERAGED_GRADIENTS, _averaged),
    (INTERPOLATIONS, _interpolated),
    (SPREAD_GRADIENTS, _spread),
    (("grid_sampler_2d", "grid_sampler_3d"), _sampled),
    (("grid_sampler_2d_backward", "grid_sampler_3d_backward"), _sampled_backward),
)
# Of an operator, its arguments (tensors may be `Wide`) and its exact result
TERMS: Mapping[str, TermsOf] = {
    name: of for names, of in (*OF_NUMBERS, *OF_PLANES) for name in names
}
