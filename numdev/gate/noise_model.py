"""When a number moved: what noise explains of ln(B / A), head by head,

    ln(LEAST) + repeats + max(z sqrt(s_a^2 + s_b^2), t spread)

LEAST: less is nobody's concern. repeats = ln(1 + noise / rms), by the triangle
inequality. s: the standard error of ln rms of a head, whose elements are a sample; z: the
normal quantile at ALPHA over all numbers judged (Bonferroni). spread, where the inputs
are not the same: how far heads scatter, by Student's t at the same level. Derivations and
false alarms: docs/compare.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from numdev.gate.row_groups import NUMBERS, Key, Rows, options_text
from numdev.gate.row_pairs import RowKeys
from numdev.grouping import grouped
from numdev.metrics.metrics_by_name import interval_of, value_of
from numdev.report import CallRecord, DeviationRow, Place
from numdev.tensor_properties import tensor_spec

LEAST = 1.05
ALPHA = 0.01
# The least factor for `worst_row`, an extreme value. How far a row errs whose elements
# share an error (of dq, dk) is luck where tokens look alike (configs/gate/default.yaml).
WORST_SHARED = 4.0
WORST_ELSE = 2.0
THRESHOLD = (
    "A change is beyond noise where chance would show one as large, anywhere among "
    f"the {{tests}} "
    f"numbers judged, in at most {100 * ALPHA:g} % of comparisons. A change below "
    f"{100 * LEAST - 100:g} % never is; in a worst row, none below a factor of "
    f"{WORST_ELSE:g} "
    f"({WORST_SHARED:g} for dq and dk)."
)
HEADS = 4  # a call with fewer is judged by the scatter of all calls' heads
OVERFLOW = 700.0  # e to this is nearly the largest float64
FAR = 100.0  # the excess of what has no ratio
# What is judged, the sharpest first. Multiples of an error that both reports share where
# the inputs are the same. Where they are not, expected_ratio alone is fit, and the next
# only in its place, since it depends on the inputs more than on the kernel.
MULTIPLES = ("expected_ratio", "floor_ratio", "worst_row")
LUCKY = 0.5
# Where expected_ratio is near 1; in float32 it is a bound
PREDICTED = ("bfloat16", "float16")

Inputs = Literal["same", "other"]
"""Whether both rows were measured on the same inputs, told by their floors (the exact
result rounded once): `same` with equal bits, or numbers within NEARLY."""
NEARLY = 1e-4
"""Floors of a model whose own layers differ by an ulp here and there differ by less,
relatively; floors of other inputs by about 1 / sqrt(elements)."""
FLOOR = ("rms", "mean_abs", "max_abs", "rel")
EVIDENCE = ("bits", "ran")
Kernel = tuple[str, str]  # role and name
OF_DATA = ("suspicion_cut", "suspicion_share", "imprecision_share", "overflow")
"""Numbers that are null where there is nothing they could be of."""


@dataclass(eq=False)
class Pair:
    """One head of one tensor that was measured in both reports."""

    a: DeviationRow
    b: DeviationRow
    inputs: Inputs
    width: int  # elements in a row of the tensor

    @property
    def tensor(self) -> Key:
        """Returns the key of the tensor, with its kernel and format."""
        row = self.b
        return (row.role, row.kernel, options_text(row.options), row.format, row.tensor)

    @property
    def call(self) -> Key:
        """Returns the key of the tensor, with its kernel, format, case and seed."""
        return (*self.tensor, self.b.case, self.b.seed)


def audit_keys(a: Rows, b: Rows) -> RowKeys[DeviationRow]:
    """Returns the keys by which rows of two audits or sweeps are paired: by kernel, call,
    tensor and head.

    Options are part of a kernel's name only where it ran with several sets of them, and
    the seed only where there are several: otherwise they may have changed from A to B."""
    sides = [option_sets(rows) for rows in (a, b)]
    with_options = {
        kernel for side in sides for kernel in _kernels_of_several_options(side)
    }
    has_seeds = any(len({row.seed for row in rows}) > 1 for rows in (a, b))

    def kernel(row: DeviationRow) -> Key:
        """Returns the key of the row's kernel and format, with the options where it ran
        with several sets of them."""
        several = (row.role, row.kernel) in with_options
        return (
            row.role,
            row.kernel,
            options_text(row.options) if several else "",
            row.format,
        )

    return RowKeys(
        kernel=kernel,
        call=lambda row: (row.case, row.seed if has_seeds else None),  # and which draw
        part=lambda row: (row.tensor, row.head),
        is_backward=lambda row: tensor_spec(row.tensor).is_gradient,
        lost=_lost_numbers,
        about=lambda row: {**row.who, "tensor": row.tensor},
        place=Place.of,
    )


def _inputs_key(keys: RowKeys[DeviationRow], row: DeviationRow) -> Key:
    """Returns the key of the floor's row that shows whether this row's inputs are the
    same."""
    tensor = tensor_spec(row.tensor).beside or row.tensor
    return (row.format, keys.call(row), tensor, row.head)


def _lost_numbers(a: DeviationRow, b: DeviationRow) -> list[str]:
    """Returns the names of numbers, and of evidence (bits, operator, intervals), that A
    has and B lacks. Numbers of OF_DATA, and the bias of an exact output, do not count."""
    lost = [name for name in NUMBERS if name not in OF_DATA and _has_lost(name, a, b)]
    lost += [name for name in EVIDENCE if getattr(a, name) and not getattr(b, name)]
    return lost + [f"interval of {name}" for name in a.interval if name not in b.interval]


def _has_lost(name: str, a: DeviationRow, b: DeviationRow) -> bool:
    """Whether A has the number and B does not; False for a bias of an exact output, which
    is 0 / 0."""
    if value_of(a, name)[0] is None or value_of(b, name)[0] is not None:
        return False
    return not (b.rms == 0 and name.startswith("bias"))  # 0 / 0


def _kernels_of_several_options(
    options: Mapping[Kernel, Mapping[str, object]],
) -> set[Kernel]:
    """Returns the kernels (role and name) that ran with several sets of options.
    `options`: what `option_sets` returns."""
    return {kernel for kernel, sets in options.items() if len(sets) > 1}


def option_sets(rows: Rows) -> dict[Kernel, dict[str, Mapping[str, object]]]:
    """Returns, by role and kernel, the sets of options that it ran with, each by its
    text."""
    sets: dict[Kernel, dict[str, Mapping[str, object]]] = {}
    for row in rows:
        sets.setdefault((row.role, row.kernel), {}).setdefault(
            options_text(row.options), row.options
        )
    return sets


def paired_rows(a: Rows, b: Rows, cases: Sequence[CallRecord]) -> list[Pair]:
    """Returns the pairs of rows of kernels and baselines that were measured in both
    reports, in B's order. A row that is in a report twice counts once; `cases`: the calls
    of B, which tell how wide the tensors are (1 for an unknown one)."""
    keys = audit_keys(a, b)
    sides = [{keys.row(r): r for r in rows if r.status == "ok"} for rows in (a, b)]
    floors = [
        {_inputs_key(keys, r): r for r in rows.values() if r.role == "floor"}
        for rows in sides
    ]
    width = {(c.case, t): size.width for c in cases for t, size in c.extents().items()}
    return [
        Pair(
            sides[0][key],
            row,
            _compared_inputs(*(floor.get(_inputs_key(keys, row)) for floor in floors)),
            width.get((row.case, row.tensor), 1),
        )
        for key, row in sides[1].items()
        if key in sides[0] and row.role in ("kernel", "baseline")
    ]


def _compared_inputs(a: DeviationRow | None, b: DeviationRow | None) -> Inputs:
    """Returns `same` or `other`: whether two rows were measured on the same inputs, by
    the floor's row of each. Numbers that differ by rounding are `same`, and so is a
    missing floor (None)."""
    if a is None or b is None or has_same_bits(a, b):
        return "same"
    numbers = [(getattr(a, name), getattr(b, name)) for name in FLOOR]
    close = all(
        x == y or (None not in (x, y) and math.isclose(x, y, rel_tol=NEARLY))
        for x, y in numbers
    )
    return "same" if close and a.elements == b.elements else "other"


def has_same_bits(a: DeviationRow, b: DeviationRow) -> bool:
    """Whether both outputs have a checksum, and the same one."""
    return a.bits is not None and a.bits == b.bits


def judged_metrics(pair: Pair) -> tuple[str, ...]:
    """Returns the metrics that are judged of a pair, if it has their numbers. `rms` of a
    tensor without a floor, else all MULTIPLES; where the inputs differ `expected_ratio`
    alone, or without it `floor_ratio`. Empty in float64, where the reference is no more
    exact than a kernel."""
    if pair.b.format == "float64":
        return ()
    if not tensor_spec(pair.b.tensor).has_floor:
        return ("rms",)
    if pair.inputs != "other":
        return MULTIPLES
    return MULTIPLES[1:2] if None in metric_values(pair, MULTIPLES[0]) else MULTIPLES[:1]


def metric_values(pair: Pair, metric: str) -> tuple[float | None, float | None]:
    """Returns a metric of A and of B: None where a row has no number, 0 where there is no
    error to take a multiple of."""
    values = (value_of(row, metric)[0] for row in (pair.a, pair.b))
    a, b = (value if isinstance(value, float) else None for value in values)
    return a, b


def _least_factor(tensor: str, metric: str) -> float:
    """Returns the factor, either way, below which a metric's change is never beyond
    noise; larger for `worst_row`."""
    if metric != "worst_row":
        return LEAST
    return WORST_SHARED if tensor_spec(tensor).rows_share_error else WORST_ELSE


def is_within_scatter(a: int, b: int) -> bool:
    """Whether two counts of what chance makes differ by at most 4 standard deviations of
    their difference, √(a + b)."""
    return abs(a - b) <= 4 * math.sqrt(a + b)


def may_differ_by_chance(a: int, b: int) -> bool:
    """Whether two counts of what no sound kernel makes may differ by chance: they are
    within their scatter, and neither is 0 alone."""
    return (a > 0) == (b > 0) and is_within_scatter(a, b)


def log_ratio(a: float | None, b: float | None) -> float | None:
    """Returns ln(B / A), also where the ratio overflows; None where either is 0 or
    None."""
    return math.log(b) - math.log(a) if a and b else None


def ratio_of_log(log: float | None) -> float | None:
    """Returns e to the power of `log`: the ratio of which it is the logarithm. None where
    `log` is None or beyond OVERFLOW in size."""
    if log is None or abs(log) > OVERFLOW:
        return None
    return math.exp(log)


class Change(NamedTuple):
    """A metric of one pair of rows in A and in B, and what noise explains of its
    change."""

    metric: str
    a: float
    b: float
    # Ln of the factor that noise explains; not finite where it explains anything
    noise: float
    least: float = 0.0  # below this, values count as equal to it

    @property
    def change(self) -> float | None:
        """Returns B / A; None where either is 0, and where its logarithm is beyond
        OVERFLOW."""
        return ratio_of_log(log_ratio(self.a, self.b))

    @property
    def excess(self) -> float:
        """Returns how far the change is beyond noise: above 1 it moved, at most FAR. An
        error where there was none, or the reverse, moved if noise explains no doubling of
        it."""
        if self.a == self.b:
            return 0.0
        a, b = max(self.a, self.least), max(self.b, self.least)
        if not a or not b:
            return FAR if self.noise < math.log(2) else 0.0
        return min(FAR, abs(math.log(b) - math.log(a)) / self.noise)


class NoiseModel:
    """How far noise alone moves the numbers of these pairs, all judged together."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.tests = max(1, sum(len(judged_metrics(pair)) for pair in pairs))
        self._level = 1 - ALPHA / 2 / self.tests
        self.z = float(ndtri(self._level))
        others = [pair for pair in pairs if pair.inputs == "other"]
        self._together = {p: grouped(others, attrgetter(p)) for p in ("call", "tensor")}

    def judged_changes(self, pair: Pair) -> list[Change]:
        """Returns the change of every metric of the pair that both reports have, with
        what noise explains of it."""
        changes = []
        for metric in judged_metrics(pair):
            a, b = metric_values(pair, metric)
            if a is not None and b is not None:
                factor = _least_factor(pair.b.tensor, metric)
                noise = (
                    math.log(factor) + self.explained_log(pair, metric) if a != b else 0.0
                )
                changes.append(Change(metric, a, b, noise, equality_bound(pair, metric)))
        return changes

    def explained_log(self, pair: Pair, metric: str) -> float:
        """Returns ln of the factor, either way, that repeats, the elements' scatter and
        other inputs explain; infinite where they explain anything."""
        rows = zip((pair.a, pair.b), metric_values(pair, metric), strict=True)
        error = math.hypot(
            *(log_standard_error(row, metric, x, pair.width) for row, x in rows)
        )
        luck = self._other_inputs_log(pair, metric) if pair.inputs == "other" else 0.0
        return repeat_noise(pair) + max(self.z * error, luck)

    def _other_inputs_log(self, pair: Pair, metric: str) -> float:
        """Returns ln of the factor that other inputs explain, by how far the other heads
        of the call scatter. Where these have fewer than HEADS degrees of freedom, all
        other heads of the tensor are taken; infinite where they too have fewer than
        two."""
        variance, freedom = 0.0, 0
        for whole, pairs in self._together.items():
            if freedom < HEADS:
                same = pairs[getattr(pair, whole)]
                variance, freedom = _log_scatter(
                    (other for other in same if other is not pair), metric
                )
        if freedom < 2:
            return math.inf
        return float(stdtrit(freedom, self._level)) * math.sqrt(2 * variance)


def _log_scatter(pairs: Iterable[Pair], metric: str) -> tuple[float, int]:
    """Returns the variance of a metric's logarithms about the mean of their call, in one
    report at a time, and its degrees of freedom: few if few calls have nearly all the
    scatter (Satterthwaite). (0, 0) where no call has two numbers."""
    calls: dict[Key, list[float]] = {}
    for pair in pairs:
        if metric not in MULTIPLES or metric in judged_metrics(pair):
            for side, x in zip("ab", metric_values(pair, metric), strict=True):
                if x is not None and (size := max(x, equality_bound(pair, metric))):
                    calls.setdefault((side, *pair.call), []).append(math.log(size))
    several = [values for values in calls.values() if len(values) > 1]
    if not several:
        return 0.0, 0
    each = np.array([len(values) - 1 for values in several])
    squares = np.array([np.var(values) * len(values) for values in several])
    freedom, fourth = int(each.sum()), float((squares**2 / each).sum())
    effective = float(squares.sum()) ** 2 / fourth if fourth else freedom
    return float(squares.sum()) / freedom, int(min(freedom, max(1.0, effective)))


def equality_bound(pair: Pair, metric: str) -> float:
    """Returns the value up to which a metric of the pair counts as equal to it: LUCKY for
    `expected_ratio` of other inputs in a format whose errors are predicted, else 0."""
    lucky = (
        metric == "expected_ratio"
        and pair.inputs == "other"
        and pair.b.format in PREDICTED
    )
    return LUCKY if lucky else 0.0


def repeat_noise(pair: Pair) -> float:
    """Returns ln of the factor by which runs on the same inputs may differ: ln(1 + noise
    / rms), of the larger noise and the smaller rms of A and B. 0 without noise, as of a
    kernel that ran once in both: nothing could excuse it. Infinite where a row has no
    error to compare."""
    noise = max(
        (row.noise for row in (pair.a, pair.b) if row.noise is not None), default=0.0
    )
    errors = [row.rms for row in (pair.a, pair.b) if row.rms]
    if not noise:
        return 0.0
    return math.log1p(noise / min(errors)) if len(errors) == 2 else math.inf


def log_standard_error(
    row: DeviationRow, metric: str, value: float | None, width: int
) -> float:
    """Returns the standard error of ln(value), the value of a row's metric. 0 where
    `value` is None or 0. From the interval of sampled rows if there is one; infinite
    where that begins at 0. Else it is 0 for the metric `worst_row`; of `expected_ratio`
    it is from how far the worst row's exceeds that of all, of any other metric from how
    far the largest error exceeds the rms. Infinite where neither tells, and where the row
    does not say how many elements it has. `width`: elements in a row of the tensor."""
    if not value:
        return 0.0
    ends = interval_of(row, metric)
    if ends is not None:
        return math.log(ends[1] / ends[0]) / 2 / 1.96 if ends[0] > 0 else math.inf
    if metric == "worst_row" and row.elements:
        return 0.0
    if metric == "expected_ratio" and row.elements and row.worst_row is not None:
        times = row.worst_row / value
        strays = abs(times * times - 1)  # where ** overflows, this is infinite
        return strays / 2 / math.sqrt(max(1.0, row.elements / width))
    if (
        metric == "expected_ratio"
        or not row.elements
        or not row.rms
        or row.max_abs is None
    ):
        return math.inf
    return row.max_abs / row.rms / 2 / math.sqrt(row.elements)
