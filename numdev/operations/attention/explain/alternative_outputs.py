"""Everything else a kernel may have computed, each with what would come out at a probe's
elements.

Most alternatives are another case (`numdev.operations.attention.explain.mistakes`). Here
are those that none describes: an output not divided by the row sum, memory read in
another order, and factors of the scale and of the output, estimated from what the kernel
returned. `numdev.operations.attention.explain.wrong_function` judges."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.kernels.reference import attend
from numdev.kernels.reference.blocked import Reference
from numdev.metrics.yardstick import finite
from numdev.operations.attention.explain.call_sample import Alternative, Probe, rescored
from numdev.operations.attention.explain.mistakes import (
    PADDED,
    SINK_TILES,
    filled,
    instances,
    variants,
    without,
)
from numdev.report.number_text import power

# Up to so many scores a whole reference is computed where all rows are mixed
WHOLE = 1 << 22
# Which: `numdev.operations.attention.explain.wrong_function` sees all
SOMEWHERE = "in some rows"
LEAST_ROWS = 8  # it takes to estimate a factor on one half and judge it on the other


def alternatives(probe: Probe) -> Iterator[Alternative]:
    """Yields the named mistakes that are possible in this call, without the factors,
    which `estimated` has. An alternative's `answer` is not computed until it is
    called."""
    case, of = probe.case, instances(probe.case)
    for cause, variant in variants(case):
        answer = partial(Probe.answer, case=variant)
        yield Alternative(cause, answer, of.get(cause, ()))
    if bool((probe.out == 0).all(-1).any()):
        cause = f"the output is 0 {SOMEWHERE}"
        yield Alternative(cause, lambda p: p.multiplied((p.out != 0).any(-1, True)))
    cause = "the output is not divided by the row sum"
    yield Alternative(cause, lambda p: p.multiplied(_row_sum(p)))
    for tile, what in itertools.product(STALE_TILES, STALE):
        if tile < case.kv_len:
            cause = (
                f"{what} not rescaled when the running maximum moves (tiles of "
                f"{tile} keys)"
            )
            yield Alternative(cause, partial(_with_stale_sums, tile=tile, what=what))
    yield from _merging_mistakes(probe)
    yield from _repeated_sink_mistakes(probe)
    yield from _layout_mistakes(probe)


PARTS = (2, 4, 8)  # of the keys
PART_WIDTHS = (64, 128, 256, 512)
MERGED = {
    "are merged with powers of 2 in place of e": 1 - math.log(2),
    "count alike, whatever their log-sum-exp is": 1.0,
}


def _merging_mistakes(probe: Probe) -> Iterator[Alternative]:
    """Yields mistakes in merging: results of parts of the keys, each right, are merged
    with other weights than exp(their log-sum-exp). Parts are 2, 4 or 8 of the call, or of
    64 to 512 keys; those that are the whole call are left out."""
    n = probe.case.kv_len
    widths = {f"{count} parts of the keys": -(-n // count) for count in PARTS}
    widths |= {f"parts of {width} keys": width for width in PART_WIDTHS}
    for words, width in widths.items():
        for how, less in MERGED.items():
            if width < n:
                cause = f"{words} {how}"
                yield Alternative(
                    cause,
                    partial(_with_parts_merged, width=width, less=less),
                    general=True,
                )


def _with_parts_merged(p: Probe, width: int, less: float) -> Reference:
    """Returns the result where parts of `width` keys are merged with weights exp((1 -
    less) L), L being the log-sum-exp of a part; `less` = 0 is exact attention."""
    S = p.scores
    sums = torch.cat(
        [x.logsumexp(-1, keepdim=True).expand(x.shape) for x in S.split(width, -1)],
        dim=-1,
    )
    S = torch.where(S.isfinite(), S - less * sums, S)
    return attend(dataclasses.replace(p.measured, **rescored(p.measured, S)))


def _repeated_sink_mistakes(probe: Probe) -> Iterator[Alternative]:
    """Yields the mistake that a sink is counted in every tile of keys that a row sees by
    causality, for each of SINK_TILES that is less than kv_len; nothing without sinks or
    without a causal mask."""
    case = probe.case
    if case.sinks is None or not case.is_causal:
        return
    for tile in SINK_TILES:
        if tile < case.kv_len:
            cause = (
                f"the attention sink is counted in every tile of {tile} keys "
                "that a row sees"
            )
            yield Alternative(
                cause, partial(_with_repeated_sinks, tile=tile), general=True
            )


def _with_repeated_sinks(p: Probe, tile: int) -> Reference:
    """Returns the result where a sink is counted once more for each whole tile of keys
    that lies before the row's last visible key. The case must have sinks."""
    assert p.case.sinks is not None
    last = (p.rows + p.case.causal_offset).clamp(0, p.case.kv_len - 1)
    more = (last // tile).double()[:, None]
    sinks = p.case.sinks[p.heads].double()[:, None, None]
    return p.multiplied(1 / (1 + more * (sinks - p.exact.lse[..., None]).exp()))


STALE_TILES = (16, 32, 64, 128)
STALE = ("the accumulator is", "the row sum is", "accumulator and row sum are")


def _with_stale_sums(p: Probe, tile: int, what: str) -> Reference:
    """Returns the result where what was summed before the running maximum moved is too
    large by exp(last maximum - maximum at that time). `what`: one of STALE, which says
    whether accumulator, row sum or both are; KeyError for another. Results of a tile size
    are cached in `p.stale`."""
    if tile not in p.stale:
        S = p.scores
        ends = torch.arange(S.shape[-1], device=S.device) // tile * tile + tile - 1
        seen = S.cummax(dim=-1).values[..., ends.clamp(max=S.shape[-1] - 1)]
        more = torch.where(S.isfinite(), S.amax(dim=-1, keepdim=True) - seen, 0.0)
        p.stale[tile] = attend(
            dataclasses.replace(p.measured, **rescored(p.measured, S + more))
        )
    both, right = p.stale[tile], p.exact
    ratio = (both.lse - right.lse).exp()[..., None]
    outs = (both.out * ratio, right.out / ratio, both.out)
    return p.with_out(dict(zip(STALE, outs, strict=True))[what])


# --- layouts --------------------------------------------------------------------------


def _layout_mistakes(probe: Probe) -> Iterator[Alternative]:
    """Yields mistakes of layout: [batch, heads, length, dim] taken for [batch, length,
    heads, dim], in shape or in memory. Mistakes that need the whole call's output are
    left out of calls of more than WHOLE scores, unless the probe has that output. Nothing
    for a call of one head."""
    case, same = probe.case, probe.case.q_len == probe.case.kv_len
    cheap = case.q.shape[:3].numel() * case.kv_len <= WHOLE
    if case.heads == 1 and case.kv_heads == 1:
        return
    if same and case.mask is None and case.sinks is None and case.heads == case.kv_heads:
        yield Alternative(
            "the heads' axis is taken for the sequence's", _with_heads_as_sequence
        )
    memory = "[batch, length, heads, dim]"
    for words in ("q is", "k is", "v is", "k and v are", "q, k and v are"):
        for how, order in {
            "read as if": _read_transposed,
            "wrongly": _write_transposed,
        }.items():
            named = [n for n in "qkv" if n in words.replace(",", "").split()]
            q, k, v = (order(getattr(case, n)) if n in named else getattr(case, n)
                       for n in "qkv")  # fmt: skip
            one = dataclasses.replace(case, q=q, k=k, v=v)
            cause = f"{words} {how} stored as {memory}"
            yield Alternative(cause, partial(Probe.answer, case=one))
            if cheap and len(named) == 3 and order is _read_transposed:
                cause = f"q, k, v and the output are stored as {memory}"
                yield Alternative(cause, partial(_with_output_transposed, case=one))
    if case.heads > 1 and case.q_len > 1 and (cheap or probe.whole is not None):
        cause = f"the output is stored as {memory}"
        yield Alternative(cause, partial(_with_output_transposed, case=case))


def _with_heads_as_sequence(p: Probe) -> Reference:
    """Returns the result where the heads' axis of q, k and v is taken for the sequence's,
    and the output's axes are exchanged back. For calls with q_len = kv_len and heads =
    kv_heads."""
    q, k, v = (x.transpose(1, 2) for x in (p.case.q, p.case.k, p.case.v))
    across = attend(
        dataclasses.replace(p.case, q=q, k=k, v=v).restrict(heads=p.rows.tolist())
    )
    return p.with_out(across.out.transpose(1, 2)[p.batch][:, p.heads])


def _read_transposed(x: Tensor) -> Tensor:
    """Returns x [B, H, N, D] as it comes out where its memory is read as [B, N, H, D]."""
    return x.reshape(x.transpose(1, 2).shape).transpose(1, 2)


def _write_transposed(x: Tensor) -> Tensor:
    """Returns x [B, H, N, D] as it comes out where it is written as [B, N, H, D] and read
    as [B, H, N, D]."""
    return x.transpose(1, 2).reshape(x.shape)


def _with_output_transposed(p: Probe, case: AttentionCase) -> Reference:
    """Returns the reference of `case` where its output is written as [B, N, H, D] and
    read as [B, H, N, D], at the probe's elements. Computes the whole call, unless `case`
    is the probe's and the probe has its output."""
    whole = p.whole if case is p.case and p.whole is not None else attend(case).out
    return p.with_out(p.take(_write_transposed(whole)))


STEP = 0.25 * math.log(2)  # of the scale's logarithm
NEAR = 20.0  # residuals so many times smaller than at 1 need no search farther away

# --- factors ---------------------------------------------------------------------------


class _Estimate(NamedTuple):
    """A factor estimated from what the kernel returned."""

    factor: float | None  # None: nothing could be estimated
    neutral: float  # the value that changes nothing
    words: str  # a cause, with the factor in words {0} and as a number {1}
    apply: Callable[..., Reference]  # what would come out of a probe with this `factor`
    also: tuple[str, ...] = ()


def estimated(probe: Probe) -> Iterator[tuple[Alternative, float]]:
    """Yields the mistakes that are a factor (of the scale, the output, the row sum, a
    sink), and the single dropped key that fits best. Each comes with how many times
    smaller it makes the residual. Factors are estimated on every other row and judged on
    the remaining ones; the dropped key is judged on all. Left out are factors that cannot
    be estimated, or are within 2u of the value that changes nothing. Nothing is yielded
    where fewer than LEAST_ROWS rows see a key."""
    shape = probe.exact.empty.shape
    if int((~probe.exact.empty).sum()) < LEAST_ROWS:
        return
    index = torch.arange(math.prod(shape), device=probe.out.device).reshape(shape)
    fit, judge = index % 2 == 0, index % 2 == 1
    for factor, neutral, words, apply, also in _estimated_factors(probe, fit):
        least = 2 * probe.case.format.unit_roundoff
        if factor is not None and abs(factor - neutral) > least:
            places = 4 if abs(factor - 1) < 2e-3 else 3
            near_one = 0.1 <= round(factor, places) < 10
            shown = f"{factor:.{places}f}" if near_one else in_digits(factor)
            again = partial(apply, factor=factor)
            cause = words.format(shown, factor)
            alternative = Alternative(cause, again, also, general=True)
            yield alternative, probe.cut(again(probe), judge)
    key = _likeliest_lost_key(probe)
    lost = Alternative(
        f"key {key} is dropped", partial(_without_key, key=key), general=True
    )
    yield lost, probe.cut(lost.answer(probe))


def _estimated_factors(probe: Probe, fit: Tensor) -> Iterator[_Estimate]:
    """Yields four estimates in the order in which they are tried: the scale, the output,
    the row sum, a sink. `fit`: bool [b, h, rows], the rows that they are estimated on."""
    o, r = probe.out, probe.exact.out
    sink = _estimate_sink(probe, fit)
    scale = _estimate_scale_factor(probe, fit)
    yield _Estimate(scale, 1, "the scale is {0} times the requested one", Probe.scaled)
    output = _least_squares_factor(probe, fit, r, o)
    words = "the output is {0} times the exact one"
    yield _Estimate(output, 1, words, Probe.multiplied)
    excess = _least_squares_factor(probe, fit, o / _row_sum(probe), r - o)
    words = "the row sum is {1:.2g} too large"
    yield _Estimate(excess, 0, words, _with_added_row_sum)
    yield sink


def _estimate_sink(probe: Probe, fit: Tensor) -> _Estimate:
    """Returns the sink logit that fits the rows `fit` (bool [b, h, rows]) best. A call
    without a sink whose estimate is n times exp(0), n a whole number of at least 2, may
    have n keys padded with zeros: the cause names these too."""
    o, r = probe.out, probe.exact.out
    lse, sinks = probe.exact.lse[..., None], probe.case.sinks
    share: float | Tensor = 0.0  # of the call's sink in the row sum
    if sinks is not None:
        share = (sinks[probe.heads].double()[:, None, None] - lse).exp()
    sink = _least_squares_factor(probe, fit, o * (-lse).exp(), r - o * (1 - share))
    whose = "which was not requested" if sinks is None else "not its own"
    also: tuple[str, ...] = ()
    if sinks is None and sink > 1.5 and abs(sink - round(sink)) < 0.01 * sink:
        whose += f", or {round(sink)} keys padded with zeros are counted"
        also = tuple(filled(t) for t in PADDED if -probe.case.kv_len % t == round(sink))
    logarithm = math.log(max(sink, 1e-99))
    words = f"it has a sink of {{1:z.2f}}, {whose}"
    return _Estimate(logarithm, math.inf, words, _with_sink, also)


def _with_added_row_sum(p: Probe, factor: float) -> Reference:
    """Returns the exact result where `factor` is added to the row sum l = sum_j exp(S_j -
    max S): O times l / (l + factor), the log-sum-exp unchanged."""
    return p.multiplied(1 / (1 + factor / _row_sum(p)))


def in_digits(factor: float) -> str:
    """Returns an estimated factor rounded to four significant digits, three below 0.1,
    without zeros at the end of a fraction: 11.31, 0.0312, 12350 for 12345.6; with an
    exponent below 1e-4 and from 1e9 on."""
    shown = f"{factor:.4g}" if abs(factor) >= 0.1 else f"{factor:.3g}"
    # The rounded one: 9999.8 and 10000.2 are the same factor in words
    rounded = float(shown)
    return f"{rounded:.0f}" if 1e4 <= abs(rounded) < 1e9 else power(shown)


def _least_squares_factor(p: Probe, fit: Tensor, x: Tensor, y: Tensor) -> float:
    """Returns the least-squares factor from x to y [b, h, rows, v_dim], over the usable
    elements of the rows `fit` (bool [b, h, rows]) that are finite in both; 0 where x is 0
    in all of them."""
    where = p.usable & fit[..., None] & finite(x) & finite(y)
    x, y = (torch.where(where, z, 0.0) for z in (x, y))
    return float((x * y).sum()) / (float((x * x).sum()) or 1.0)


def _row_sum(p: Probe) -> Tensor:
    """Returns sum_j exp(S_j - max S), fp64 [b, h, rows, 1], in which a sink counts. NaN
    or infinite in a row that sees no key."""
    return (p.exact.lse - p.scores.amax(dim=-1)).exp()[..., None]


def _with_sink(p: Probe, factor: float) -> Reference:
    """Returns the result of the probe's case with a sink of the logit `factor` in every
    head, in place of the case's sinks."""
    sinks = p.out.new_full((p.case.heads,), factor)
    return p.answer(dataclasses.replace(p.case, sinks=sinks))


def _without_key(p: Probe, key: int) -> Reference:
    """Returns the result with the key of this index hidden; the exact one in a call that
    has no such key."""
    if key >= p.case.kv_len:
        return p.exact
    return p.answer(dataclasses.replace(p.case, **without(p.case, key)))


def _likeliest_lost_key(p: Probe) -> int:
    """Returns the index of the key whose loss explains the rows' errors best, by least
    squares: without key j a row errs by w (o_i - V_j), w = P / (1 - P)."""
    V, o = p.measured.v.double().mT, torch.where(p.usable, p.exact.out, 0.0)
    e = torch.where(p.usable, p.out, 0.0) - o
    P = (p.scores - p.exact.lse[..., None]).exp()
    w = torch.where(p.usable[..., :1], P / (1 - P).clamp_min(1e-6), 0.0)
    fits = (w * ((e * o).sum(-1, keepdim=True) - e @ V)).sum(dim=(0, 1, 2))
    distances = (
        o.square().sum(-1, keepdim=True) - 2 * o @ V + V.square().sum(-2, keepdim=True)
    )
    sizes = (w.square() * distances).sum(dim=(0, 1, 2))
    return int((fits.clamp_min(0.0).square() / sizes.clamp_min(1e-300)).argmax())


def _estimate_scale_factor(p: Probe, fit: Tensor) -> float | None:
    """Returns the factor of the scale that leaves the least residual in the rows `fit`
    (bool [b, h, rows]), by Gauss-Newton steps from 1; where these leave more than 1 /
    NEAR of the residual, from the best point of a grid (2^-5 to 2^5). None where the
    scale is 0 or no row can be compared."""
    where = p.usable & fit[..., None]
    if p.case.scale == 0 or not bool(where.any()):
        return None

    def error(logarithm: float) -> Tensor:
        x = p.scaled(math.exp(logarithm)).out
        return torch.where(where & finite(x), (p.out - x) / p.unit, 0.0)

    near = refined(error)
    if float(error(near).norm()) > float(error(0.0).norm()) / NEAR:
        best = min(range(-20, 21), key=lambda i: float(error(i * STEP).norm()))
        near = refined(error, best * STEP) if best else near
    return math.exp(near)


def refined(error: Callable[[float], Tensor], at: float = 0.0) -> float:
    """Returns about where the norm of `error` (a function of one number that returns a
    tensor of fixed shape) is least near `at`, after four Gauss-Newton steps from there;
    steps of STEP or more are not taken."""
    for _ in range(4):
        error_at = error(at)
        rise = (error(at + 1e-5) - error_at) / 1e-5
        size = float((rise * rise).sum())
        move = -float((rise * error_at).sum()) / size if size > 0 else 0.0
        at += move if abs(move) < STEP else 0.0
    return at
