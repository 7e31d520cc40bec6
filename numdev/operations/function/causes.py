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
    """Of each output of the reference's call that some other function explains, the one
    that explains it best. `earlier`: the exact results of a call before."""
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
    """Keep an alternative where it explains an output tenfold, and better than others."""
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
    """The exact result with other rows in the places of those that err most: what a tile
    that was not written, or written twice, leaves."""
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
    if len(rows) == 1:
        return f"row {rows[0]}"
    if rows[-1] - rows[0] + 1 == len(rows):
        return f"rows {rows[0]} to {rows[-1]}"
    return f"{len(rows)} rows, the first {rows[0]},"


# --- from the reference ---------------------------------------------------------------


class _OtherNumber(Unrounded):
    """A run without rounding, in which one number stands for another, and operators of
    variance divide by another count. It notes the numbers that it meets."""

    def __init__(self, value: float | None = None, other: float = 0.0) -> None:
        self.value, self.other = value, other
        self.met: dict[float, None] = {}

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        self.met.setdefault(value)
        return self.other if value == self.value else value


def _of_references(reference: FunctionReference) -> Iterator[tuple[str, Values]]:
    """The exact results of functions beside the reference, as many as `WORK` allows."""
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
    """Of a module, each parameter and buffer left out."""
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
    """A run without rounding in which sums and products leave out their last terms, or
    means divide by another count."""

    def __init__(self, left_out: Callable[[int], int], less: int = 0) -> None:
        self.left_out, self.less = left_out, less

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
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
    """How many terms each sum has; 0 of one over several axes, or over all."""
    if name not in ("sum", "mean"):
        return int(x.shape[-1])
    axes = args[1] if len(args) > 1 else None
    if not isinstance(axes, list | tuple) or len(axes) != 1:
        return 0
    return int(x.shape[axes[0]])


def _with_other_sums(reference: FunctionReference) -> Iterator[tuple[str, Make]]:
    """Sums without their last terms: one, a share, or what fills no block of threads."""
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
    return n // of


def _partial_block(n: int, of: int) -> int:
    return n % of


def _computed(reference: FunctionReference, rounding: Unrounded = UNROUNDED) -> Values:
    try:
        return reference.computed(rounding)
    except Exception:  # the reference is foreign, and this is no run of its own
        return {}


def _with_other_inputs(reference: FunctionReference) -> Iterator[tuple[str, Make]]:
    for fault in faults_of_inputs(reference.arguments):
        changed = fault.applied(reference.arguments)
        yield fault.words, partial(reference.computed_exactly, changed)
