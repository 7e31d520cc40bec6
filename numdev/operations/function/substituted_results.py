"""What comes out in place of an exact result, made from that result alone: scaled, moved,
averaged, other places in the places of some, another call's, an argument."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from numdev.operations.function.planted_faults import mean_along_last, transposed
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Values
from numdev.operations.row_places_in_words import in_words

MAX_ENTRIES = 64  # of an axis that err, up to which others are looked for in their places
LEAST_WIDTH = 16  # numbers of an entry: fewer may be another's by luck
FAR = 100.0  # times the median's squared error: an entry that is another
TILES = (16, 32, 64, 128)
MAX_TILES = 4096
DIGITS = 4
AS_GOOD = 1.1  # times the squared error that the best number leaves, or a rounding
TINY = 1e-300


class OtherResult(NamedTuple):
    """What would come out instead, fp64, and a clause that says so: `it is 0
    everywhere`."""

    words: str
    values: Tensor
    # Whether other arguments may have it as their effect in this call, and say more:
    # entries in the midst that hold 0 are a row of a table that was left out
    is_effect: bool = False
    is_fitted: bool = False  # whether a number in it was chosen to leave the least error


def other_results(
    name: str, x: Tensor, reference: FunctionReference, earlier: Values, floor: float
) -> Iterator[OtherResult]:
    """Yields what may stand in place of an output: the exact result changed, the exact
    result of an earlier call, and arguments of the same shape, fp64 of its shape. Of an
    output `x` that is 0 wherever it and the exact result are finite only 0 itself is
    yielded. `name`: of an output that the reference has; `x`: fp64; `earlier`: exact
    results of another call, by name; `floor`: the rms error of the exact result rounded
    once. Raises what the reference raises."""
    truth = reference.truth[name]
    finite = truth.isfinite() & x.isfinite()
    t, o = (torch.where(finite, y, 0.0) for y in (truth, x))
    yield OtherResult("it is 0 everywhere", torch.zeros_like(truth))
    if not bool(o.any()):
        return
    yield from _linear(o, t, truth, int(finite.sum()), floor)
    yield OtherResult(
        "it is one constant", torch.full_like(truth, float(o.sum() / finite.sum()))
    )
    if name in earlier and earlier[name].shape == truth.shape:
        yield OtherResult("it is the result of an earlier call", earlier[name].double())
    for argument, value in reference.arguments.leaves().items():
        if value.shape == truth.shape:
            yield OtherResult(f"it is the argument {argument}", value.detach().double())
    yield from _rearranged(truth)
    for axis in range(truth.ndim):
        yield from _other_entries(o, truth, axis)
    yield from _other_tiles(o, truth)


def _linear(
    o: Tensor, t: Tensor, truth: Tensor, count: int, floor: float
) -> Iterator[OtherResult]:
    """Yields the exact result times the factor that fits the output `o` best, and plus
    the number that does, each in as few digits as fit as well. `t`: the exact result;
    both are 0 at elements where one is not finite, and `count` elements are left.
    `floor`: the rms error of the exact result rounded once."""
    enough = AS_GOOD * count * floor**2
    power = float((t * t).sum())
    scale = float((o * t).sum()) / max(power, TINY)
    left = float((o - scale * t).square().sum())
    scale = _in_few_digits(scale, power, left, enough)
    words = f"it is {scale:.4g} times what it should be"
    yield OtherResult(words, scale * truth, is_fitted=True)
    offset = float((o - t).sum()) / max(1, count)
    left = float((o - t - offset).square().sum())
    offset = _in_few_digits(offset, count, left, enough)
    yield OtherResult(f"{offset:.4g} is added to it", truth + offset, is_fitted=True)


def _in_few_digits(value: float, power: float, left: float, enough: float) -> float:
    """Returns the shortest decimal of two to four digits near `value`, a factor of
    something of the squared size `power`, that leaves little error: at most AS_GOOD times
    the squared error `left` of the best, or at most `enough`. `value` itself where none
    does."""
    for digits in range(1, DIGITS):
        short = float(f"{value:.{digits}e}")
        if left + (short - value) ** 2 * power <= max(AS_GOOD * left, enough):
            return short
    return value


def _rearranged(truth: Tensor) -> Iterator[OtherResult]:
    """Yields the exact result averaged, shifted, reversed or constant along an axis, and
    with axes exchanged, in its shape or in memory. Axes of fewer than two places are
    passed over, but for the mean along the last; of a scalar nothing is yielded."""
    if truth.ndim:
        yield OtherResult("it is the mean along its last axis", mean_along_last(truth))
    for axis in range(truth.ndim):
        if truth.shape[axis] < 2:
            continue
        if axis < truth.ndim - 1:
            mean = truth.mean(axis, keepdim=True).expand_as(truth)
            yield OtherResult(f"it is the mean along axis {axis}", mean)
        what = f"places along axis {axis}" if axis else "rows"
        for step in (1, -1):
            yield OtherResult(f"its {what} are shifted by one", truth.roll(step, axis))
        yield OtherResult(f"its {what} are in reverse order", truth.flip(axis))
        if truth.ndim > 1:
            first = truth.narrow(axis, 0, 1).expand_as(truth)
            yield OtherResult(f"its {what} all hold place 0", first)
    if truth.ndim >= 2 and truth.shape[-1] == truth.shape[-2] > 1:
        yield OtherResult("its last two axes are exchanged", transposed(truth))
    elif truth.ndim >= 2 and 1 not in truth.shape[-2:]:
        words = "its last two axes are exchanged in memory"
        yield OtherResult(words, truth.mT.reshape(truth.shape))
    for i in range(truth.ndim - 1):
        for j in range(i + 1, truth.ndim):
            is_last = (i, j) == (truth.ndim - 2, truth.ndim - 1)
            if truth.shape[i] == truth.shape[j] > 1 and not is_last:
                yield OtherResult(
                    f"its axes {i} and {j} are exchanged", truth.transpose(i, j)
                )


def _other_entries(x: Tensor, truth: Tensor, axis: int) -> Iterator[OtherResult]:
    """Yields at most one alternative: the exact result in which each entry of an axis
    whose squared error is more than FAR times the median entry's is replaced by the exact
    entry nearest to what stands in its place, or by 0 where that is as near. Where one of
    these is all 0 in `x`, every other entry that is all 0 and should not be is replaced
    too. Of entries of fewer than LEAST_WIDTH numbers 0 alone, since another's few numbers
    are in its place by luck. Nothing where no entry errs so, or more than MAX_ENTRIES do.
    `x`: finite, of the shape of `truth`. A tile that was not written, or written twice,
    leaves such entries."""
    if not truth.numel():
        return
    size = truth.shape[axis]
    entries, out = (y.movedim(axis, 0).reshape(size, -1) for y in (truth, x))
    noun = "row" if axis == 0 else "place"
    changed = _with_others(entries, out, noun)
    if changed is not None:
        shape = truth.movedim(axis, 0).shape
        words = changed.words.replace(" hold", f" of axis {axis} hold")
        other = changed.values.reshape(shape).movedim(0, axis)
        yield OtherResult(words, other, changed.is_effect)


def _other_tiles(x: Tensor, truth: Tensor) -> Iterator[OtherResult]:
    """Yields, for square tiles of each size of TILES in the last two axes, what
    `_other_entries` does for entries of an axis: the exact result with tiles that err
    replaced by the nearest exact tile, or by 0. Nothing for fewer than two axes, where
    tiles do not fill the axes, where one tile does, or for more than MAX_TILES tiles."""
    if truth.ndim < 2:
        return
    for size in TILES:
        height, width = truth.shape[-2:]
        if height % size or width % size or height * width == size * size:
            continue
        if truth.numel() // size**2 > MAX_TILES:
            continue
        shape = (-1, height // size, size, width // size, size)
        tiles, out = (y.reshape(shape).transpose(2, 3) for y in (truth, x))
        changed = _with_others(
            tiles.reshape(-1, size**2), out.reshape(-1, size**2), "tile"
        )
        if changed is not None:
            whole = changed.values.reshape(tiles.shape).transpose(2, 3)
            words = changed.words.replace(" hold", f" of {size} × {size} places hold")
            yield OtherResult(words, whole.reshape(truth.shape))


def _with_others(entries: Tensor, out: Tensor, noun: str) -> OtherResult | None:
    """Returns exact entries [n, width], flattened, in which those that err are replaced
    by the nearest other exact entry or 0. Where one that errs is all 0 in the output,
    others that are and should not be count as such. `is_effect` where all are replaced by
    0 and they are not the last ones. None for fewer than two entries, where none errs FAR
    times as the median does, or more than MAX_ENTRIES do, and for entries of fewer than
    LEAST_WIDTH numbers unless those in the output are 0. What is not finite counts as 0.
    `out`: the output's entries; `noun`: what one is called."""
    if len(entries) < 2:
        return None
    entries = torch.where(entries.isfinite(), entries, 0.0)
    off = (out - entries).square().sum(dim=1)
    is_wrong = off > FAR * max(float(off.median()), TINY)
    is_zero = (out == 0).all(dim=1) & (entries != 0).any(dim=1)
    if bool((is_wrong & is_zero).any()):  # also where 0 is nearly right
        is_wrong = is_wrong | is_zero
    wrong = is_wrong.nonzero().flatten().tolist()
    if not wrong or len(wrong) > MAX_ENTRIES:
        return None
    if entries.shape[1] < LEAST_WIDTH and not bool(is_zero[wrong].all()):
        return None
    changed, sources = entries.clone(), []
    for i in wrong:
        distance = (entries - out[i]).square().sum(dim=1)
        distance[i] = math.inf
        source = int(distance.argmin())
        is_nothing = float(out[i].square().sum()) <= float(distance[source])
        sources.append("0" if is_nothing else f"{noun} {source}")
        changed[i] = 0.0 if is_nothing else entries[source]
    what = _sources_in_words(sources, wrong, noun)
    holds = "holds" if len(wrong) == 1 else "hold"
    words = f"{in_words(torch.tensor(wrong), noun)} {holds} {what}"
    is_last = wrong == list(range(len(entries) - len(wrong), len(entries)))
    return OtherResult(words, changed, is_effect=what == "0" and not is_last)


def _sources_in_words(sources: Sequence[str], wrong: Sequence[int], noun: str) -> str:
    """Returns what stands in wrong places: the one source of all (`0`, `row 3`), `the row
    before` or `the row after` where it is the neighbour of each, else `others`."""
    if len(set(sources)) == 1:
        return sources[0]
    for step, words in ((-1, "before"), (1, "after")):
        if all(s == f"{noun} {i + step}" for s, i in zip(sources, wrong, strict=True)):
            return f"the {noun} {words}"
    return "others"
