"""What a function computes in place of its reference, named without knowing what that is.

Other functions are made from the reference: of changed inputs (`faults`), with another
number in place of one that it computes with (an eps, a slope), with n - 1 for n; from the
exact result itself: scaled, shifted, transposed, rows in other places; and from other
data: an earlier call's, an input handed through. One is named where it leaves at most a
tenth of the error. Its place is that of the call's first draw."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from numdev.exact.rounding import Unrounded
from numdev.exact.wide_tensors import UNROUNDED, widened
from numdev.operations.function.faults import (
    faults_of_inputs,
    mean_along_last,
    shifted_rows,
    transposed,
)
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Values

TENFOLD = 10.0
WORK = 1 << 26  # numbers of inputs, times how many other functions are tried
TIMES = (0.0, 2.0, 0.5, 10.0, 0.1)  # of a number that the reference computes with
LARGEST_EPS = 1e-2  # of a number that may be an eps, for which there are others
DECADES = [10.0**-k for k in (5, 6, 8, 3, 4, 12, 7, 10, 2, 1)]
ROWS = 64  # that err, up to which other rows are looked for in their places
TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class OtherFunction:
    """What explains an output better than its reference does."""

    words: str  # a clause: `the last 32 of 1024 places of axis 1 of x are left out`
    cut: float  # how many times less is left of the error
    share: float  # of the rms error, what goes


Alternative = tuple[str, Tensor]  # in words, and what would come out


def causes_of(
    reference: FunctionReference, outputs: Mapping[str, Tensor], earlier: Values
) -> dict[str, OtherFunction]:
    """Returns the function that explains each output best, by the output's name; outputs
    that none explains are left out. To explain one it must leave at most a tenth of its
    rms error. `outputs`: an implementation's, of the shapes of the reference's;
    `earlier`: the exact results of a call before, may be empty. Runs the reference many
    times, and raises what it raises on the call's own arguments."""
    best: dict[str, OtherFunction] = {}
    truth = reference.truth
    for name, x in outputs.items():
        if truth[name].is_floating_point() and x.shape == truth[name].shape:
            for words, other in _of_results(name, x.double(), reference, earlier):
                _consider(best, name, words, other, x, truth[name])
    for words, values in _of_references(reference):
        for name, x in outputs.items():
            changed = values.get(name)
            if changed is not None and changed.shape == x.shape:
                _consider(best, name, words, changed, x, truth[name])
    return best


def _consider(
    best: dict[str, OtherFunction],
    name: str,
    words: str,
    other: Tensor,
    x: Tensor,
    truth: Tensor,
) -> None:
    """Puts an alternative into `best` under `name` where it leaves at most a tenth of
    the rms error of `x`, and less than the one there. Elements that are not finite in
    `x`, the alternative `other` or `truth` do not count; an `x` without an error has no
    explanation."""
    usable = truth.isfinite() & other.isfinite() & x.isfinite()
    left, error = (
        float(torch.where(usable, x.double() - y, 0.0).square().sum().sqrt())
        for y in (other, truth)
    )
    cut = min(error / max(left, TINY), 1e300)
    if error and cut >= TENFOLD and (name not in best or cut > best[name].cut):
        best[name] = OtherFunction(words=words, cut=cut, share=1 - 1 / cut)


# --- from the exact result ------------------------------------------------------------


def _of_results(
    name: str, x: Tensor, reference: FunctionReference, earlier: Values
) -> Iterator[Alternative]:
    """Yields alternatives to an output, (words, fp64 tensor of its shape): the exact
    result changed, the result of an earlier call, and arguments of the same shape. Of an
    output `x` that is 0 wherever it is finite only 0 itself."""
    truth = reference.truth[name]
    finite = truth.isfinite() & x.isfinite()
    t, o = (torch.where(finite, y, 0.0) for y in (truth, x))
    yield "it is 0 everywhere", torch.zeros_like(truth)
    if not bool(o.any()):
        return
    scale = float((o * t).sum() / (t * t).sum().clamp_min(TINY))
    yield f"it is {scale:.4g} times what it should be", scale * truth
    offset = float((o - t).sum() / finite.sum().clamp_min(1))
    yield f"{offset:.4g} is added to it", truth + offset
    yield "it is one constant", torch.full_like(truth, float(o.sum() / finite.sum()))
    if truth.ndim:
        yield "it is the mean along its last axis", mean_along_last(truth)
    if truth.ndim >= 2:
        yield "its rows are shifted by one", shifted_rows(truth)
        yield "its rows are shifted by one", truth.roll(-1, 0)
    if truth.ndim >= 2 and truth.shape[-1] == truth.shape[-2] > 1:
        yield "its last two axes are exchanged", transposed(truth)
    if name in earlier and earlier[name].shape == truth.shape:
        yield "it is the result of an earlier call", earlier[name].double()
    for argument, value in reference.arguments.leaves().items():
        if value.shape == truth.shape:
            yield f"it is the argument {argument}", value.detach().double()
    yield from _other_rows(o, truth)


def _other_rows(x: Tensor, truth: Tensor) -> Iterator[Alternative]:
    """Yields at most one alternative: the exact result in which each row of axis 0 that
    errs most is replaced by the exact row nearest to what stands there, or by 0 where
    that is as near. These rows have over 100 times the median's squared error; nothing
    without one, for more than ROWS of them, and for fewer than two axes. A tile that was
    not written, or written twice, leaves such rows."""
    if truth.ndim < 2:
        return
    rows, out = truth.flatten(1), x.flatten(1)
    off = (out - rows).square().sum(dim=1)
    typical = float(off.median())
    wrong = (off > 100 * max(typical, TINY)).nonzero().flatten().tolist()
    if not wrong or len(wrong) > ROWS:
        return
    changed, sources = rows.clone(), []
    for i in wrong:
        distance = (rows - out[i]).square().sum(dim=1)
        source = int(distance.argmin())
        nothing = float(out[i].square().sum()) <= float(distance[source])
        sources.append("0" if nothing else f"row {source}")
        changed[i] = 0.0 if nothing else rows[source]
    which = _rows_in_words(wrong)
    what = sources[0] if len(set(sources)) == 1 else "others"
    yield f"{which} of axis 0 hold {what}", changed.reshape(truth.shape)


def _rows_in_words(rows: Sequence[int]) -> str:
    """Returns row numbers in words: `row 3`, `rows 3 to 7`, or `5 rows, the first 3,`
    where some between are missing. `rows`: ascending, at least one."""
    if len(rows) == 1:
        return f"row {rows[0]}"
    if rows[-1] - rows[0] + 1 == len(rows):
        return f"rows {rows[0]} to {rows[-1]}"
    return f"{len(rows)} rows, the first {rows[0]},"


# --- from the reference ---------------------------------------------------------------


class _OtherNumber(Unrounded):
    """Rounds nothing; puts `other` in place of the number `value` (None: of none)
    wherever an operator reads it. `met` has the numbers that operators read, in the
    order in which they first came."""

    def __init__(self, value: float | None = None, other: float = 0.0) -> None:
        self.value, self.other = value, other
        self.met: dict[float, None] = {}

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """Returns `other` in place of `value`, any other number as it is; notes the
        number in `met`."""
        self.met.setdefault(value)
        return self.other if value == self.value else value


def _of_references(reference: FunctionReference) -> Iterator[tuple[str, Values]]:
    """Yields (words, exact results by name) of functions made from the reference; a
    result is empty where that function raises. Their number is at most WORK over the
    number of input elements, but 8 where that is fewer. Raises what the reference raises
    on the call's own arguments."""
    size = sum(x.numel() for x in reference.arguments.leaves().values())
    tries = max(8, WORK // max(size, 1))
    others = chain(
        _with_other_inputs(reference),
        _with_other_parameters(reference),
        _with_other_sums(reference),
        _with_other_numbers(reference),
    )
    for words, make in islice(others, tries):
        yield words, make()


Make = Callable[[], Values]


def _with_other_numbers(reference: FunctionReference) -> Iterator[tuple[str, Make]]:
    """Yields (words, a function that computes the results) for each number that the
    reference computes with, replaced by 0 and by 2, 1/2, 10 and 1/10 times itself; a
    positive one up to LARGEST_EPS also by powers of ten. None for the number 0. Runs the
    reference once to find its numbers, and raises what it raises."""
    notes = _OtherNumber()
    reference.computed(notes)
    for value in notes.met:
        others = [value * times for times in TIMES]
        if 0 < value <= LARGEST_EPS:
            others += DECADES
        for other in dict.fromkeys(others):
            if other != value:
                words = f"it computes with {other:.4g} in place of {value:.4g}"
                yield words, partial(_computed, reference, _OtherNumber(value, other))


def _with_other_parameters(reference: FunctionReference) -> Iterator[tuple[str, Make]]:
    """Yields (words, a function that computes the results) for each floating-point
    parameter and buffer of a module, filled with 0 and with 1 where it is not that
    already; nothing where the reference is no module."""
    module = reference.function
    if not isinstance(module, nn.Module):
        return
    for name, x in module.state_dict().items():
        for value in (0.0, 1.0):
            if x.is_floating_point() and not bool((x == value).all()):
                other = copy.deepcopy(module)
                other.state_dict()[name].fill_(value)
                changed = dataclasses.replace(reference, function=other)
                yield f"{name} is taken for {value:g}", partial(_computed, changed)


class _OtherSums(Unrounded):
    """Rounds nothing; sums and matrix products leave out their last terms, or, with
    `less`, means alone divide by that much less than their count. `left_out`: of a
    number of terms, how many of the last are left out."""

    def __init__(self, left_out: Callable[[int], int], less: int = 0) -> None:
        self.left_out, self.less = left_out, less

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns an operator's values with the last terms left out, or with another
        divisor of a mean; unchanged for any other operator, for sums over several axes,
        for fewer than two terms, and where none or all of the terms would be left
        out."""
        name = func.overloadpacket.__name__
        if name not in ("sum", "mean", "mm", "bmm", "addmm", "baddbmm"):
            return values
        first = 1 if name.endswith("addmm") or name == "baddbmm" else 0
        x = widened(cast(Tensor, args[first]))  # of these operators
        count = _terms(name, x, args)
        if count < 2:
            return values
        if self.less:
            return values * count / (count - self.less) if name == "mean" else values
        last = self.left_out(count)
        if not 0 < last < count:
            return values
        if name in ("sum", "mean"):
            [axis] = [d % x.ndim for d in args[1]]  # type: ignore[attr-defined]
            shorter = x.narrow(axis, 0, count - last)
            result: Tensor = func(shorter, *args[1:3])
            return result.reshape(values.shape)
        y = widened(cast(Tensor, args[first + 1]))
        tail: Tensor = x[..., count - last :] @ y[..., count - last :, :]
        return values - tail


def _terms(name: str, x: Tensor, args: tuple[object, ...]) -> int:
    """Returns how many terms each sum of an operator has; 0 for a sum or mean over
    several axes, or over all. `x`: the tensor that it adds up, or the left factor of a
    product."""
    if name not in ("sum", "mean"):
        return int(x.shape[-1])
    axes = args[1] if len(args) > 1 else None
    if not isinstance(axes, list | tuple) or len(axes) != 1:
        return 0
    return int(x.shape[axes[0]])


def _with_other_sums(reference: FunctionReference) -> Iterator[tuple[str, Make]]:
    """Yields (words, a function that computes the results) for means that divide by n -
    1, and for sums without their last terms: one, a share of them, or those that fill no
    block of threads."""
    ways: dict[str, Unrounded] = {
        "means divide by n - 1": _OtherSums(lambda n: 0, less=1),
        "sums leave out their last term": _OtherSums(lambda n: 1),
    }
    for share in (16, 8, 4, 2):
        words = f"sums leave out the last 1/{share} of their terms"
        ways[words] = _OtherSums(partial(_share, of=share))
    for block in (16, 32, 64, 128):
        words = f"sums leave out what fills no block of {block} terms"
        ways[words] = _OtherSums(partial(_partial_block, of=block))
    for words, rounding in ways.items():
        yield words, partial(_computed, reference, rounding)


def _share(n: int, of: int) -> int:
    """Returns the `of`-th part of n, rounded down."""
    return n // of


def _partial_block(n: int, of: int) -> int:
    """Returns how many of n terms fill no block of `of`: n modulo `of`."""
    return n % of


def _computed(reference: FunctionReference, rounding: Unrounded = UNROUNDED) -> Values:
    """Returns the results of the reference on its own arguments, by name, rounded as
    `rounding` says; empty where it raises."""
    try:
        return reference.computed(rounding)
    except Exception:  # the reference is foreign, and this is no run of its own
        return {}


def _with_other_inputs(reference: FunctionReference) -> Iterator[tuple[str, Make]]:
    """Yields (words, a function that computes the results) for the reference on each
    wrong input of `faults_of_inputs`."""
    for fault in faults_of_inputs(reference.arguments):
        changed = fault.applied(reference.arguments)
        yield fault.words, partial(reference.computed_exactly, changed)
