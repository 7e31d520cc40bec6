"""What explains the errors of a measured kernel: a known way of rounding, its rounding
sites, the rows that err most, and where along a call errors are.

The errors of a kernel without a declared claim are compared with `fa2`. Where they are
beyond that, other ways of rounding of sound code are tried (`likenesses`). The running
sums of `golden2024` and `qiu2025` are a fault here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, Refused, UsageError
from numdev.formats import Format, all_finite, round_to
from numdev.gate.rules import Threshold, default_rules
from numdev.grouping import grouped
from numdev.kernels import Kernel, Output, sdpa
from numdev.kernels.baseline import OnlineSoftmax, Way, written_ways
from numdev.kernels.emulation import kernel as emulator
from numdev.kernels.reference import attend, gradients
from numdev.kernels.reference.blocked import Gradients, Reference
from numdev.metrics.deviation import Metrics, measure
from numdev.metrics.histogram import by_ulps
from numdev.metrics.metrics_by_name import lse_error
from numdev.metrics.row_samples import starts
from numdev.metrics.row_sums import Numbers
from numdev.metrics.statistics import BIAS_ALPHA
from numdev.metrics.yardstick import Yardstick
from numdev.operations.attention.explain import attribution as fits
from numdev.operations.attention.worst_rows import worst_rows
from numdev.operations.row_places_in_words import phrases_for_other_lengths, where
from numdev.report import AttributionRow, DeviationRow, ProfileRow, WorstRow
from numdev.studies.audit.deviation_rows import FAILS_ONE_ROW, Measured, identity
from numdev.studies.audit.isolation import Failure, attempt
from numdev.studies.audit.plan import Task
from numdev.studies.audit.prepared_attention import KV_TENSORS, TERMS, Bench
from numdev.system import System
from numdev.yamlfile import Strict, bundled_path, read_yaml

# --- a known way of rounding -----------------------------------------------------------

# By tensor, what a way returns for the measured heads and rows
Step = Mapping[str, Tensor]
# Computes a way's step, with `forward=True` the output alone; None where the way cannot
# take the call
Tried = Callable[..., Step | None]
IN_ONE = math.sqrt(0.5)  # the largest residual in a tensor that is beyond its limit
# Ways that are written out keep all scores of a call; no larger one is tried
MOST_SCORES = 1 << 25


@dataclass(frozen=True, kw_only=True, eq=False)
class Likeness:
    """A known way of rounding that explains a kernel's errors in some tensors."""

    words: str  # `as sdpa-flash rounds on this CPU`: the row's claim
    expected: Step
    residual: float  # the root mean square of those of the tensors it explains
    residuals: Mapping[str, float]  # by tensor, of all that it was compared with

    def without_its_bias(
        self, metrics: Sequence[Metrics], yardstick: Yardstick
    ) -> list[Metrics]:
        """Returns the metrics of an output's heads, without a large bias that the way of
        rounding has too: `bias_size` is then None, and `nulls` has the bias and the way's
        words. Two biases are one where they differ by no more than the limit. `metrics`
        is not changed."""
        beyond_limit = functools.partial(excess, "bias_size")
        if not any(beyond_limit(head.get("bias_size")) > 1 for head in metrics):
            return list(metrics)
        way = round_to(self.expected["out"], yardstick.format)
        explained = []
        for head, way_head in zip(metrics, measure(way, yardstick).heads, strict=True):
            size, other = head.get("bias_size"), way_head.get("bias_size")
            if size and other and beyond_limit(size) > 1 >= beyond_limit(size - other):
                why = f"{size:+.3f} ulp, {self.words}"
                head = {
                    **head,
                    "bias_size": None,
                    "nulls": {**head["nulls"], "bias_size": why},
                }
            explained.append(head)
        return explained


@functools.cache
def _default_limits(name: str, *, median: bool) -> tuple[tuple[Threshold, ...], float]:
    """Returns the default thresholds of a metric, and the smallest of their limits (0
    without a threshold). `median`: those on medians over heads, else those on single
    heads."""
    every = (t for t in default_rules().thresholds if t.metric == name)
    limits = tuple(t for t in every if bool(t.heads) == median)
    ends = [t.at_most or 0.0 for t in limits] + [
        x.at_most for t in limits for x in t.instead
    ]
    return limits, min(ends, default=0.0)


def excess(
    name: str, value: float | None, row: DeviationRow | None = None, n: int = 0
) -> float:
    """Returns a metric's value as a multiple of its default limit: above 1 it is beyond.
    With `n` the value is a median over n heads, and the limit that of medians. 0 for
    None, and for a value of at most the smallest of the metric's limits in size. `row`:
    decides which limit holds, and how far sampling widens it; None: the first limit.
    Raises IndexError for a metric without such a limit, unless its value is None or 0."""
    limits, least = _default_limits(name, median=bool(n))
    if value is None or abs(value) <= least:
        return 0.0
    limit = next((t for t in limits if row is None or t.where.fits(row)), limits[0])
    if row is not None:
        limit = limit.for_row(row).widened_for_sample_size(row, n or 1)
    return limit.excess(value)


def _is_judged(name: str, row: DeviationRow) -> bool:
    """Whether a default rule limits this metric of a row like `row`."""
    return any(t.metric == name and t.where.fits(row) for t in default_rules().thresholds)


def beyond(rows: Sequence[DeviationRow], *, narrow: bool = True) -> tuple[str, ...]:
    """Returns the names of the tensors of one call whose errors are beyond the default
    rules on rounding, in the order out, dq, dk, dv. Rows with a suspicion are left out,
    and tensors of which nothing is predicted or an element is not finite. Empty where a
    row of the output has a suspicion or such an element. `rows`: those of the call;
    `narrow`: whether sums in 16 bits count too, which no way of rounding excuses."""
    if any(row.tensor == "out" and (row.nonfinite or row.suspicion) for row in rows):
        return ()
    tensors: list[str] = []
    for tensor in TERMS:
        of_tensor = [row for row in rows if row.tensor == tensor]
        heads = [row for row in of_tensor if not row.suspicion]
        predicted = [r for r in heads if r.worst_row is not None]
        if not predicted or any(row.nonfinite for row in of_tensor):
            continue
        # Of the heads together, then of each
        sizes = [_excess_in_median(predicted)]
        sizes += [excess("expected_ratio", r.expected_ratio, r) for r in predicted]
        if _is_judged("rms_ratio", heads[0]):
            sizes += [excess("rms_ratio", r.rms_ratio, r) for r in predicted]
        sizes += [excess("worst_row", r.worst_row, r) for r in predicted]
        if narrow:
            sizes += [excess("narrow_sum", r.narrow_sum, r, n=1) for r in predicted]
        if tensor == "out":
            sure = (r for r in heads if r.bias_p is not None and r.bias_p <= BIAS_ALPHA)
            sizes += [excess("bias_size", r.bias_size) for r in sure]
        if max(sizes) > 1:
            tensors.append(tensor)
    return tuple(tensors)


def wrong_tensors(rows: Sequence[DeviationRow]) -> tuple[str, ...]:
    """Returns the names of the tensors of one call that are beyond their limits, in the
    order out, dq, dk, dv, lse. Where the output is among them it stands alone: gradients
    inherit its mistake. Without a tensor of which an element is not finite. Where a row
    of the output has a suspicion or such an element, only the lse may be among them. The
    lse is looked at only where no row has a suspicion."""
    wrong = beyond(rows)
    named = any(row.suspicion for row in rows)
    of_lse = [row for row in rows if row.tensor == "lse" and not named]
    if any(excess("lse_error", lse_error(row), row) > 1 for row in of_lse):
        wrong += ("lse",)
    return wrong[:1] if wrong[:1] == ("out",) else wrong


def _excess_in_median(predicted: Sequence[DeviationRow]) -> float:
    """Returns the median over rows of one tensor of `expected_ratio`, each as a multiple
    of its default limit on medians, widened by the row's sampling; that of `rms_ratio`
    where it is larger and judged. `predicted`: at least one row."""
    heads = len(predicted)
    sizes = [excess("expected_ratio", r.expected_ratio, r, heads) for r in predicted]
    if not _is_judged("rms_ratio", predicted[0]):
        return median(sizes)
    by_size = [excess("rms_ratio", r.rms_ratio, r, heads) for r in predicted]
    return max(median(sizes), median(by_size))


SEVERAL = 4  # heads, of which the default rules take a median


def excess_in_median(rows: Sequence[DeviationRow]) -> dict[str, float]:
    """Returns by tensor the median over the heads of all `rows`, which may be of several
    calls, as a multiple of the default limit on medians. A tensor with fewer than SEVERAL
    heads of which something is predicted is left out."""
    predicted = (r for r in rows if r.worst_row is not None)
    by_tensor = grouped(predicted, lambda r: r.tensor)
    return {
        tensor: _excess_in_median(heads)
        for tensor, heads in by_tensor.items()
        if len(heads) >= SEVERAL
    }


def locate(measured: Measured[Bench], bench: Bench) -> None:
    """Writes `errs_in` and `errs_in_of` into rows of `measured`, in place: in which rows
    of the head the error is beyond the default limit of a single row, or not finite, in
    words. They stay None where these rows form no pattern. A report row whose head is
    within that limit is left alone, and so is one of a tensor without a prediction."""
    select = (measured.bench or bench).selection
    for at, row in enumerate(measured.rows):
        ratios = (
            measured.along[row.tensor].ratios if row.tensor in measured.along else None
        )
        if ratios is not None and (
            row.nonfinite or excess("worst_row", row.worst_row, row) > 1
        ):
            limit = next(
                t for t in default_rules().thresholds if t.metric == "worst_row"
            ).for_row(row)
            bad = ratios[:, select.units(row.tensor).index(row.head or 0)] > (
                limit.at_most or 0
            )
            noun = "key" if row.tensor in KV_TENSORS else "row"
            rows = select.row_indices(row.tensor)
            places = {
                "errs_in": where(bad, rows, noun),
                "errs_in_of": phrases_for_other_lengths(bad, rows, noun),
            }
            measured.rows[at] = row.model_copy(update=places)


def likenesses(
    output: Output,
    tensors: Collection[str],
    formats: Mapping[str, Format],
    bench: Bench,
    system: System,
    words: str | None = None,
) -> dict[str, Likeness]:
    """Returns by tensor the known way of rounding that best explains an output whose
    `tensors` are beyond their limits under `fa2`. One way for all tensors that came back
    comes first, else one for the output and one for the gradients. Where a way explains
    all of dk or of dv alone, as to how the query heads of a group are summed, both get
    it. `formats`: by tensor that came back; `words`: the only way that is tried; None:
    all are. Empty where no way explains a tensor, and where no element can be predicted
    (in float32)."""
    select = bench.selection.select
    returned = {n: select(getattr(output, n), n) for n in formats if n in bench.by_row}
    names = [n for n, x in returned.items() if n == "out" or all_finite([x])]
    if any(
        emulator.unpredictable({"preset": "fa2"}, bench.case.format, formats[n])
        for n in names
    ):
        return {}
    search = _Search(returned, names, tensors, bench)
    ways = (
        (name, way)
        for name, way in _known_ways(formats, bench, system)
        if words in (None, name)
    )
    unlike = search.try_whole_step(ways)
    if search.whole is not None:
        return dict.fromkeys(names, search.whole)
    search.try_gradients(unlike)
    explained = search.by_tensor()
    if words is None and "out" in tensors and "out" not in explained:
        like = _find_partial_cubic(returned["out"], formats, bench)
        explained |= {} if like is None else {"out": like}
    return explained


Part = tuple[str, ...]  # tensors that one way is to explain together


class _Search:
    """The search for the known way of rounding that explains one output. It keeps the
    best way for each part of its tensors: all, the output, the gradients, and dk or dv
    alone where they are sums over a group of heads."""

    def __init__(
        self,
        returned: Step,
        names: Sequence[str],
        tensors: Collection[str],
        bench: Bench,
    ) -> None:
        self.tensors = frozenset(tensors)  # those beyond their limits
        self.residuals = {
            n: _residual_function(returned[n], bench.yardsticks[n]) for n in names
        }
        self.every, self.output, self.gradients = (
            tuple(names),
            tuple(names[:1]),
            tuple(names[1:]),
        )
        self.steps = [
            part
            for part in (self.output, self.gradients)
            if not self.tensors.isdisjoint(part)
        ]
        self.group_sums: list[Part] = [
            (n,)
            for n in names
            if n in KV_TENSORS and n in tensors and bench.case.group > 1
        ]
        self.best: dict[Part, Likeness] = {}

    @property
    def whole(self) -> Likeness | None:
        """Returns the way that best explains all tensors together; None where no way
        does."""
        return self.best.get(self.every)

    def try_whole_step(
        self, ways: Iterable[tuple[str, Tried]]
    ) -> list[tuple[str, Tried]]:
        """Tries ways, in order, until one explains all tensors nearly wholly. Returns the
        ways whose output rules them out, for `try_gradients`. `ways`: each with its
        words."""
        unlike: list[tuple[str, Tried]] = []
        for words, way in ways:
            if self._has_other_output(way):
                unlike.append((words, way))
                continue
            self._note_way(words, way, self.every, *self.steps, *self.group_sums)
            if self.whole is not None and self.whole.residual <= fits.ENOUGH:
                break
        return unlike

    def try_gradients(self, ways: Iterable[tuple[str, Tried]]) -> None:
        """Tries ways whose output is ruled out for the gradients alone. Does nothing
        where no gradient is beyond its limit; nor where the output is and no way explains
        it, since its gradients inherit its mistake."""
        is_output_settled = "out" not in self.tensors or self.output in self.best
        if self.gradients in self.steps and is_output_settled:
            for words, way in ways:
                self._note_way(words, way, self.gradients, *self.group_sums)

    def by_tensor(self) -> dict[str, Likeness]:
        """Returns the best way of each tensor that a way explains. To be called once: it
        removes from `best` the ways of dk or dv alone."""
        summed = [self.best.pop(part) for part in self.group_sums if part in self.best]
        explained = {n: like for part, like in self.best.items() for n in part}
        # Their rounding shows in dv wherever the tiles begin; dk has that of the output
        # too.
        nearest = min(summed, key=lambda like: like.residual, default=None)
        if nearest is not None and nearest.residual <= fits.ENOUGH:
            explained = {n: nearest for n in KV_TENSORS if n in self.every} | explained
        return explained

    def _has_other_output(self, way: Tried) -> bool:
        """Whether a way's output rules the way out, so that its backward pass, which
        costs most, need not be computed. That is where it does not explain the output, or
        is so far off that the way cannot come nearer than the best one for all
        tensors."""
        most = IN_ONE if "out" in self.tensors else math.inf
        if self.whole is not None:
            most = min(most, self.whole.residual * math.sqrt(len(self.every)))
        step = way(forward=True) if most < math.inf else None
        return step is not None and self.residuals["out"](step["out"]) > most

    def _note_way(self, words: str, way: Tried, *parts: Part) -> None:
        """Notes the way in `best` for each of `parts` that it explains, and better than
        the ways before it. Does nothing for a way that cannot take the call."""
        if (expected := way()) is None:
            return
        left = {
            n: self.residuals[n](expected[n]) for n in {n for part in parts for n in part}
        }
        for part in parts:
            together = math.sqrt(sum(left[n] ** 2 for n in part) / len(part))
            fits_all = all(left[n] <= IN_ONE for n in {*part} & self.tensors)
            is_better = part not in self.best or together < self.best[part].residual
            if fits_all and is_better and together <= fits.EXPLAINS:
                self.best[part] = Likeness(
                    words=words,
                    expected=expected,
                    residual=together,
                    residuals=left,
                )


# Unit roundoffs below it: the cubic's 8.8e-5 is nothing beside bfloat16's
CUBIC_SHOWS = 1e-3
# Of the exponential's own squared error, beside which half of it is left on each side
PARTLY = 1.6
TILES_AND_ORDERS = tuple(
    itertools.product((128, 64, 32), ("descending", "ascending"), (8, None))
)


def _find_partial_cubic(
    x: Tensor, formats: Mapping[str, Format], bench: Bench
) -> Likeness | None:
    """Returns the explanation that a kernel computes some keys of each tile, unknown
    which, with FlashAttention-4's cubic exponential. None where its output x does not lie
    between the output with the cubic nowhere and the one with it everywhere, and in
    formats too coarse to show it.

    Let a and b be the differences of x from these two outputs. Where x lies between them,
    |a|² + |b|² is |a - b|²; rounding to the format makes up to the root of two of that,
    which PARTLY allows."""
    if bench.format.unit_roundoff > CUBIC_SHOWS or "out" not in formats:
        return None
    y, best = bench.yardsticks["out"], None
    weight = fits.row_weights(x, y.reference, y.term_scale.norm(dim=-1), y.format)
    error = float(fits.weighed(x.double() - y.reference, weight).norm())
    for tile, order, lag in TILES_AND_ORDERS:
        claim: dict[str, object] = {"preset": "fa2", "block_kv": tile, "kv_order": order}
        claim |= {} if lag is None else {"max_lag": lag}
        ways = [
            _predict_by_claim({**claim, "exponential": exp}, formats, bench, forward=True)
            for exp in ("exact", "cubic")
        ]
        if (none := ways[0]) is None or (every := ways[1]) is None:
            continue
        difference = float(
            fits.weighed((none["out"] - every["out"]).double(), weight).square().sum()
        )
        sides = [
            fits.weighed(x.double() - way["out"].double(), weight)
            for way in (none, every)
        ]
        left = [float(side.square().sum()) for side in sides]
        if sum(left) <= PARTLY * difference and (best is None or sum(left) < best[0]):
            nearer = none if left[0] <= left[1] else every
            best = (
                sum(left),
                math.sqrt(min(left)) / error if error else 0.0,
                nearer,
                tile,
            )
    if best is None:
        return None
    words = (
        f"as FlashAttention-4 rounds (block_kv {best[3]}), with its exponential "
        "in part of P"
    )
    return Likeness(
        words=words, expected=best[2], residual=best[1], residuals={"out": best[1]}
    )


def held_to(
    words: str,
    names: Collection[str],
    formats: Mapping[str, Format],
    bench: Bench,
    system: System,
) -> dict[str, Likeness]:
    """Returns by tensor, of those of `names` that the bench's `by_row` has, the way of
    rounding that has these words, whether or not it explains the call: it explains the
    kernel in other calls. Empty where the way cannot take this call, and where no way has
    these words."""
    for each, way in _known_ways(formats, bench, system):
        if each == words and (step := way()) is not None:
            tensors = [n for n in names if n in step and n in bench.by_row]
            like = Likeness(
                words=words,
                expected=step,
                residual=1.0,
                residuals=dict.fromkeys(tensors, 1.0),
            )
            return dict.fromkeys(tensors, like)
    return {}


def _residual_function(x: Tensor, y: Yardstick) -> Callable[[Tensor], float]:
    """Returns a function from a way's tensor to |x - way| / |x - r|, r the exact tensor
    of `y`, in norms in which all rows count alike. Where fp32 arithmetic alone may err
    more than x does, as in a gradient that is exactly 0, that stands in place of
    |x - r|: no way has its own noise. Where both are 0 the residual is 0 if the way's
    tensor equals x, else infinity."""
    wide = x.double()
    weight = fits.row_weights(x, y.reference, y.term_scale.norm(dim=-1), y.format)
    size = float(fits.weighed(wide - y.reference, weight).norm())
    if y.arithmetic is not None:  # relative to the rows' scales, as these norms are
        noise = torch.where(weight[..., 0] > 0, y.arithmetic, 0.0)
        size = max(size, float(noise.norm()))

    def residual(expected: Tensor) -> float:
        """Returns the residual of a way's tensor."""
        left = float(fits.weighed(wide - expected.double(), weight).norm())
        return left / size if size else (math.inf if left else 0.0)

    return residual


def _known_ways(
    formats: Mapping[str, Format], bench: Bench, system: System
) -> Iterator[tuple[str, Tried]]:
    """Yields the known ways of rounding that are tried, each with its words (`as eager
    rounds`) and the function that computes it, the likeliest first. Ways that are
    functions of PyTorch come last, and only where all tensors came back in the case's
    format."""
    place = "GPU" if system.device == "cuda" else "CPU"
    claims: dict[str, Mapping[str, object]] = {
        f"as {name} rounds on this {place}": sdpa.claim_of(operator, bench.case, system)
        for name, operator in sdpa.OPERATORS[system.device].items()
    }
    claims["as eager rounds"] = {"preset": "eager"}
    for design in designs():
        for more in design.get("tried", ()):
            options = ", ".join(f"{name} {value}" for name, value in more.items())
            words = f"as {design['kernel']} rounds{options and f' ({options})'}"
            claims[words] = {**design["claim"], "group_sum": "running", **more}
    # As FlashAttention-2 does, and autograd where k and v are repeated
    if bench.case.group > 1:
        bases = {"as fa2 rounds": {"preset": "fa2"}, **claims}
        per_query_head = {
            "group_sum": "separate",
            "dk_partial": "working",
            "dv_partial": "working",
        }
        claims |= {f"{words}, dk and dv of each query head": {**claim, **per_query_head}
                   for words, claim in bases.items()}  # fmt: skip
    for words, claim in claims.items():
        yield words, functools.partial(_predict_by_claim, claim, formats, bench)
    if bench.case.working is None and set(formats.values()) == {bench.case.format}:
        last: dict[object, Mapping[str, Output]] = {}
        for words, way in written_ways(bench.case).items():
            yield words, functools.partial(_run_written_way, way, bench, last)


class _Designs(Strict):
    """The file of public designs, configs/designs.yaml."""

    designs: tuple[dict[str, object], ...]


@functools.cache
def designs() -> tuple[dict[str, Any], ...]:
    """Returns how public kernels round, from configs/designs.yaml. Each has `kernel` (its
    name), `claim` (options of `emulated`), and may have `tried` (further options, each a
    variant)."""
    return read_yaml(bundled_path("designs.yaml"), _Designs).designs


def _predict_by_claim(
    claim: Mapping[str, object],
    formats: Mapping[str, Format],
    bench: Bench,
    *,
    forward: bool = False,
) -> Step | None:
    """Returns by name the tensors that a claim (options of `emulated`) predicts, rounded
    to `formats`; with `forward` the output alone. None where the call or the claim is
    refused (Refused, MeasurementError, UsageError)."""
    with contextlib.suppress(Refused, MeasurementError, UsageError):
        return bench.predicted(
            emulator.returning(claim, bench.case, formats), forward=forward
        )
    return None


def _run_written_way(
    way: Way,
    bench: Bench,
    last: dict[object, Mapping[str, Output]],
    *,
    forward: bool = False,
) -> Step | None:
    """Returns by name, in float32, the tensors of a way that is a function of PyTorch,
    with autograd's gradients where these are measured and not `forward`. None where it
    fails, and for a call with more than MOST_SCORES scores. `last`: a cache that ways of
    the online softmax share."""
    case = bench.restricted
    if case.q.shape[:3].numel() * case.kv_len > MOST_SCORES:
        return None
    kernel = Kernel(name="written", function=way, any_rows=True)
    if isinstance(way, OnlineSoftmax):
        kernel = dataclasses.replace(
            kernel,
            function=functools.partial(_shared_output, way, last),
            backward=functools.partial(_shared_step, way, last),
        )
    with bench.watch("predictions"):
        trained = "dq" in bench.by_row and not forward
        output = attempt(kernel, case, {}, gradients=trained)
    if isinstance(output, Failure):
        return None
    return {n: x.float() for n in bench.by_row if (x := getattr(output, n)) is not None}


def _shared_step(
    way: OnlineSoftmax, last: dict[object, Mapping[str, Output]], case: AttentionCase
) -> Output:
    """Returns the output and gradients of an online softmax. They are taken from `last`
    where the one that ran last differs in its maximum alone; else they are computed for
    all maxima, and replace what is in `last`."""
    alike = dataclasses.replace(way, maximum="")
    if way.maximum not in last.get(alike, {}):
        last.clear()
        last[alike] = way.steps(case)
    return last[alike][way.maximum]


def _shared_output(
    way: OnlineSoftmax, last: dict[object, Mapping[str, Output]], case: AttentionCase
) -> Output:
    """Returns the output of an online softmax, taken from `last` where the one that ran
    last differs at most in its maximum, which changes no output; else computed, in place
    of what is in `last`."""
    alike = dataclasses.replace(way, maximum="")
    if alike not in last:
        last.clear()
        last[alike] = {"": Output(out=way(case))}
    return next(iter(last[alike].values()))


# --- rounding sites -------------------------------------------------------------------

# How many heads are compared: a kernel rounds alike in all of them, and each costs
# emulations.
MOST_HEADS = 4
# How much of the emulations is kept; the first are what tensors share
KEPT_BYTES = 1 << 30


def explain(
    task: Task, kernel: Kernel, measured: Measured[Bench], bench: Bench, system: System
) -> list[AttributionRow]:
    """Returns which roundings make the errors of a measured task: a row for each tensor
    with a yardstick (not the log-sum-exp) that its kernel returned; empty where it
    returned nothing. A row has a reason instead where emulations predict nothing, as in
    float32, and where the attempt fails. Where the whole attempt breaks off, one last row
    has the reason."""
    output, rows = measured.output, list[AttributionRow]()
    if output is None:
        return rows
    try:
        claim = (
            kernel.claims(bench.case, output, system)
            if kernel.declares
            else {"preset": "fa2"}
        )
        compared = _Compared(bench, output)
        for tensor in compared.formats:
            of = {**identity(task), "tensor": tensor, "heads": compared.heads[tensor]}
            rows.append(AttributionRow(**of, **compared.attribution(tensor, claim)))
            if tensor == "out":
                claim = _with_tiles_of_output(claim, rows[-1])
    except FAILS_ONE_ROW as error:
        of = {**identity(task), "heads": chosen(bench.selection.heads)}
        rows.append(AttributionRow(**of, reason=f"it could not be tried ({error})"))
    return rows


class _Compared:
    """Up to MOST_HEADS heads of a kernel's output, in the measured rows, with their exact
    results and emulations."""

    def __init__(self, bench: Bench, output: Output) -> None:
        case, select, self.output = bench.case, bench.selection, output
        self.select = select
        self.formats = bench.formats_of(output)
        if backward := "dq" in self.formats:
            heads, kv_heads = whole_groups(select.heads, case.group)
            some = case.restrict(kv_heads=list(kv_heads), rows=select.queries)
        else:
            heads, kv_heads = chosen(select.heads), ()
            some = case.restrict(heads=list(heads), rows=select.queries)
        self.heads = {t: kv_heads if t in KV_TENSORS else heads for t in emulator.SITE_OF}
        self.rows = select.queries
        self.case = some
        self.exact: Reference | Gradients = (gradients if backward else attend)(self.case)
        self.steps: dict[str, dict[str, Tensor]] = {}  # emulated, by recipe

    def attribution(self, tensor: str, claim: fits.Claim | None) -> dict[str, Any]:
        """Returns the fields, by name, of an `AttributionRow` that say which roundings
        explain one tensor. Where none does, `explained_by` is None, `reason` says why,
        and the others tell of the nearest. The field `reason` alone where nothing can be
        compared; no field where the tensor has no error. `claim`: the kernel's; None:
        that of `fa2`."""
        case, fmt = self.case, self.formats[tensor]
        if self.rows is not None and tensor in KV_TENSORS:
            why = "query rows are sampled, and a key's gradient is a sum over all of them"
            return {"reason": why}
        if unknown := emulator.unpredictable(
            claim or {"preset": "fa2"}, case.format, fmt
        ):
            return {"reason": unknown}
        places = [self.select.units(tensor).index(head) for head in self.heads[tensor]]
        x = self.select.select(getattr(self.output, tensor), tensor)[:, places]
        exact, terms = (getattr(self.exact, name) for name in (tensor, TERMS[tensor]))
        emulated = functools.partial(self.emulated, tensor)
        more: dict[str, Any] = {"tensor": tensor, "group": case.group}
        try:
            size = terms.norm(dim=-1)
            fit = fits.attribute(x, exact, size, case.format, claim, emulated, **more)
        except FAILS_ONE_ROW as error:
            return {"reason": f"it could not be tried ({error})"}
        if fit is None:  # there is no error
            return {}
        return {
            "explained_by": None if fit.why_not else fit.best.preset,
            "reason": fit.why_not,
            "nearest": fit.best.preset,
            "recipe": dict(fit.best.claim),
            "residual": fit.best.residual,
            "size": fit.best.ratio,
            "next_preset": fit.next.preset,
            "next_residual": fit.next.residual,
            "sites": fit.sites,
        }

    def emulated(self, tensor: str, tried: fits.Claim) -> Tensor:
        """Returns a tensor of the emulation with the options `tried`, for the compared
        heads. One emulation of the backward pass serves all three gradients; emulations
        are cached up to KEPT_BYTES."""
        recipe = emulator.returning(tried, self.case, self.formats)
        key = f"{tensor == 'out'} {sorted(recipe.items())!r}"
        if key in self.steps:
            return self.steps[key][tensor]
        if tensor == "out":
            step = {"out": emulator.emulation(self.case, recipe)}
        else:
            step = {
                t: x
                for t, x in emulator.emulated_step(self.case, recipe).items()
                if t != "out"
            }
        if sum(x.nbytes for s in self.steps.values() for x in s.values()) < KEPT_BYTES:
            self.steps[key] = step
        return step[tensor]


def _with_tiles_of_output(
    claim: fits.Claim | None, out: AttributionRow
) -> fits.Claim | None:
    """Returns the claim with the tiles that explain the output, where the claim's preset
    explains it; else the claim as it is. `out`: the row of the output."""
    if claim is None or not out.explained_by:
        return claim
    if out.recipe.get("preset") != claim.get("preset", "fa2"):
        return claim
    unvaried = {k: v for k, v in claim.items() if k not in fits.FORWARD_VARIED}
    return unvaried | {k: v for k, v in out.recipe.items() if k in fits.FORWARD_VARIED}


def chosen(heads: tuple[int, ...], most: int = MOST_HEADS) -> tuple[int, ...]:
    """Returns at most `most` of the heads, from the first on at equal steps of len(heads)
    // most; all of them where there are no more: of 9 heads and 4 at most, numbers 0, 2,
    4 and 6."""
    return heads[:: max(1, len(heads) // most)][:most]


def whole_groups(
    heads: tuple[int, ...], group: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns about MOST_HEADS query heads in whole groups, at least one group, and the
    kv heads that these read. The groups are those of `heads`; all heads of a group are
    returned. `group`: query heads per kv head."""
    kv = chosen(
        tuple(dict.fromkeys(h // group for h in heads)), max(1, MOST_HEADS // group)
    )
    return tuple(h * group + i for h in kv for i in range(group)), kv


# --- the rows that err most -----------------------------------------------------------

SHOWN = 3  # rows in a report's summary
# From this multiple of what is predicted for it a row is shown. In sound kernels on a
# model's own inputs the worst is at 1.01 in forward and 1.42 in backward (the demo,
# bfloat16); the smallest limit of the rules is 5 (`worst row`), and what comes near it is
# to be seen.
NOTABLE = 2.0
PLACE = ("case", "layer", "call", "tensor", "head", "batch", "row")


def examine(
    task: Task, kernel: Kernel, measured: Measured[Bench], bench: Bench, system: System
) -> list[WorstRow]:
    """Returns the worst rows of each tensor of a measured task, compared with what its
    roundings predict. Empty where the kernel returned nothing, and where no row is near
    enough to its limit for `most`. dk and dv are left out where not all heads are
    measured. An error on the way is not raised: the rows until then are returned."""
    bench = measured.bench or bench
    output, held_to, select = measured.output, measured.held_to, bench.selection
    worst: list[WorstRow] = []
    of_heads = [
        row for row in measured.rows if row.status == "ok" and row.tensor != "lse"
    ]
    notable = (r.worst_row is None or r.worst_row > 0.9 * NOTABLE for r in of_heads)
    if output is None or not (any(notable) or any(row.nonfinite for row in of_heads)):
        return worst
    with contextlib.suppress(*FAILS_ONE_ROW):
        claim = kernel.claims(bench.case, output, system)
        formats = bench.formats_of(output)
        for tensor, fmt in formats.items():
            if tensor in KV_TENSORS and len(select.heads) != bench.case.heads:
                # What a key receives comes from query heads that are not measured
                continue
            predicted = None
            if bench.unpredicted(claim, fmt) is None:
                step = bench.expected(claim, output)
                predicted = held_to.get(tensor, step[tensor])
            worst += worst_rows(
                bench.case,
                select.select(getattr(output, tensor), tensor),
                bench.yardsticks[tensor].for_format(fmt),
                select.units(tensor),
                predicted=predicted,
                tensor=tensor,
                lse=bench.lse if tensor in KV_TENSORS else None,
                rows=select.row_indices(tensor),
                identity=identity(task),
            )
    return worst


def most(rows: Iterable[WorstRow]) -> tuple[WorstRow, ...]:
    """Returns the rows for a report's summary, at most SHOWN, each place once: first
    those with elements that are not finite, the most such elements first; then those
    whose ratio to what is predicted is NOTABLE or more, the largest first."""
    notable = [
        r for r in rows if r.nonfinite or (r.predicted and (r.ratio or 0.0) >= NOTABLE)
    ]
    unique: dict[tuple[object, ...], WorstRow] = {}
    for row in sorted(notable, key=lambda row: (-row.nonfinite, -(row.ratio or 0.0))):
        unique.setdefault(tuple(getattr(row, name) for name in PLACE), row)
    return tuple(list(unique.values())[:SHOWN])


# --- along a call ---------------------------------------------------------------------

OF_PROFILE = ("case", "layer", "attends", "role", "kernel", "options", "format")


def profile(task: Task, measured: Measured[Bench], bench: Bench) -> Sequence[ProfileRow]:
    """Returns how each tensor errs along its call, by bin of positions. Empty for a call
    too short for bins, and for planted faults. Errors are root mean squares of `row_rel`:
    they are no multiples of the floor, which is 0 where a row sees one key, as its result
    is a row of V and needs no rounding."""
    rows: list[ProfileRow] = []
    about = {name: x for name, x in identity(task).items() if name in OF_PROFILE}
    for tensor, deviation in measured.along.items():
        along, length = deviation.along, bench.selection.length_of(tensor)
        if not along or task.role == "control":
            continue
        shown = {"tensor": tensor, "length": length, "starts": starts(length)}
        shown["counts"] = [int(n) for n in along["counted"]]
        shown["errors"] = _rms_by_bin(along["relative"], along["counted"])
        if deviation.compared is not None:
            output, yardstick, expected = deviation.compared
            shown["ulps"] = by_ulps(output, yardstick)
            shown["ulps_predicted"] = (
                None if expected is None else by_ulps(expected, yardstick)
            )
        if task.role == "kernel" and "predicted" in along:
            # As in expected_ratio
            least = np.maximum(along["predicted"], along["least_row"])
            shown["predicted"] = _rms_by_bin(least, along["expected_count"])
        rows.append(ProfileRow.model_validate({**about, **shown}))
    return rows


def _rms_by_bin(squares: Numbers, counts: Numbers) -> tuple[float | None, ...]:
    """Returns the root of squares / counts for each bin, to four digits; None for a bin
    without rows, and where that is not finite. `squares`: sums over the bin's rows."""
    with np.errstate(all="ignore"):
        values = np.sqrt(squares / counts)
    return tuple(float(f"{x:.4g}") if math.isfinite(x) else None for x in values)
