"""How far from the truth: the metrics, per head.

`measure` compares one output with a `Yardstick`: the fp64 reference of the same rounded inputs,
beside which stand the floor (the reference rounded once to the output's format), the baseline, and
the reference of the unrounded inputs. It knows nothing of kernels and chooses nothing; what the
numbers mean is set down in docs/method.md, and a verdict on them is the gate's business.

Three rules hold for every metric. Fully masked rows are left out. An element that is not finite is
counted (`nonfinite`), never averaged. A ratio whose denominator means nothing is None, with the
reason in `nulls`.

Everything is computed on the tensors' device for all heads at once and crosses to the host once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from numdev.formats import Format, dtype_of, round_to, ulp
from numdev.wasserstein import w1_rows

MIN_BIAS_ULP = 0.05
"""A bias below this size, in ulps at the term scale, is not worth an accusation."""

SMALLEST_SCALE = 2.0**-100
"""A row whose terms are smaller is left out of relative errors: its products are numbers that fp32
keeps as subnormals, as zero, or (where the hardware flushes) either, and a key that hardly anybody
sees would be 100 % wrong. Its errors are still held to rounding something of this size
(`row_ratios`), so that a number where nothing belongs is seen."""

Numbers = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Metrics = dict[str, Any]
"""Metric name to value for one head; the names are the fields of `report.DeviationRow`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Yardstick:
    """What outputs of one case in one format are measured against. Shapes [B, H, q_len, v_dim]."""

    reference: Tensor
    """fp64, from the same rounded inputs the kernel sees; never rounded back."""
    term_scale: Tensor
    """fp64, sum_j P_ij |V_jd|: what is added up before anything cancels."""
    empty: Tensor
    """bool [B, H, q_len]: fully masked rows."""
    format: Format
    """The output's format."""
    lse: Tensor | None = None
    """fp64 [B, H, q_len], the reference's log-sum-exp: tells which rows repeat others."""
    baseline: Tensor | None = None
    arithmetic: Tensor | None = None
    """fp64 [B, H, rows]: what fp32 arithmetic may err, relative to a row's term scale. Beside what
    an emulation predicts, which leaves it out or makes it in another order."""
    unrounded: Tensor | None = None
    """fp64, the reference of the inputs before they were rounded to the audited format."""

    @cached_property
    def floor(self) -> Tensor:
        return round_to(self.reference, self.format)

    @cached_property
    def shown(self) -> Tensor:
        """Elements in a row that sees a key, where the reference is finite."""
        return ~self.empty[..., None] & finite(self.reference)

    @cached_property
    def floor_finite(self) -> Tensor:
        return finite(self.floor)

    @cached_property
    def repeated(self) -> Tensor:
        """bool [B, H, q_len]: rows whose exact result an earlier sequence has at the same place.

        Sequences with a common beginning, or the same text twice, are no independent observations.
        Results alone can agree by chance (with V = 1 all are 1); the log-sum-exp does not.
        """
        r, found = self.reference, torch.zeros_like(self.empty)
        for shift in range(1, r.shape[0]):
            same = r[shift:, ..., 0] == r[:-shift, ..., 0]
            if self.lse is not None:
                same &= self.lse[shift:] == self.lse[:-shift]
            if bool(same.any()):  # rarely: sparing the comparison of all features
                same &= (r[shift:] == r[:-shift]).all(dim=-1)
            found[shift:] |= same
        return found

    @cached_property
    def spacing(self) -> Tensor:
        """One ulp of the format at the term scale."""
        return ulp(self.term_scale, self.format)

    @cached_property
    def floor_rms(self) -> Tensor:
        usable = self.shown & self.floor_finite
        return _rms(torch.where(usable, self.floor - self.reference, 0.0), _sum(usable))

    @cached_property
    def rounding_rms(self) -> Tensor:
        """u * rms(reference) / sqrt(12), the least a rounding floor may count as: it is below the
        floor of values that fill their binades, and stands in where all are exactly representable
        (V = 1, or float64) and the floor itself is 0."""
        usable = self.shown & self.floor_finite
        size = _rms(torch.where(usable, self.reference, 0.0), _sum(usable))
        return size * (self.format.unit_roundoff / math.sqrt(12))

    @cached_property
    def plain(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The baseline in fp64, where it is usable, and its rms; None without a baseline."""
        if self.baseline is None:
            return None
        wide = self.baseline.double()
        usable = self.shown & finite(wide)
        return wide, usable, _rms(torch.where(usable, wide - self.reference, 0.0), _sum(usable))

    @cached_property
    def precision(self) -> tuple[Tensor, Tensor] | None:
        """rms and W1 of reference(rounded inputs) - reference(unrounded inputs), per head."""
        if self.unrounded is None:
            return None
        return _distance(self.reference, self.unrounded, self.shown & finite(self.unrounded))

    def for_format(self, fmt: Format) -> Yardstick:
        """The same yardstick for an output in another format: its own floor."""
        return self if fmt == self.format else dataclasses.replace(self, format=fmt)


def finite(x: Tensor) -> Tensor:
    """Where x is neither NaN nor infinite (several times faster than isfinite on a CPU)."""
    return x.abs() < math.inf


def measure(output: Tensor, yardstick: Yardstick, expected: Tensor | None = None) -> list[Metrics]:
    """All metrics of `output` [B, H, q_len, v_dim] against `yardstick`, one dict per head.

    `expected` is the output of the emulation the kernel claims to be, on the same inputs; without
    it there is no expected_ratio and no worst_row.
    """
    y, o = yardstick, output.detach().double()
    here = finite(o)
    usable = y.shown & here
    count = _sum(usable)
    o = torch.where(usable, o, 0.0)
    r = torch.where(usable, y.reference, 0.0)
    error = o - r
    size = error.abs()
    rms = _rms(error, count)
    columns = {
        "elements": count,
        "empty_rows": y.empty.sum(dim=(0, 2)),
        "nonfinite": _sum((here != y.floor_finite) & ~y.empty[..., None]),
        "max_abs": _amax(size),
        "mean_abs": _sum(size) / count,
        "rms": rms,
        "row_rel": _row_rel(error, usable, y),
        "rel": _norm(error) / _norm(r),
        "max_ulp": _amax(torch.where(usable, size / y.spacing, 0.0)),
        "floor_ratio": rms / torch.maximum(y.floor_rms, y.rounding_rms),
        "w1": _w1(o, r, count),
        "lost": _norm(r) <= y.format.unit_roundoff * _norm(torch.where(usable, y.term_scale, 0.0)),
    }
    columns |= _against_baseline(o, usable, y, rms)
    if expected is not None:
        columns |= _against_expected(error, expected.double() - y.reference, usable, y)
    metrics = _per_head(columns)
    for head, bias in zip(metrics, _bias(o, usable & y.floor_finite, y), strict=True):
        head.update(bias)
    return [_with_reasons(head) for head in metrics]


def measure_plain(output: Tensor, reference: Tensor, empty: Tensor) -> list[Metrics]:
    """Distances alone, for what has no rounding floor of its own: the log-sum-exp, and the
    reference of rounded inputs against that of unrounded ones.

    Shapes [B, H, q_len] or [B, H, q_len, v_dim]; `empty` as in `Yardstick`.
    """
    if output.ndim == 3:
        output, reference = output[..., None], reference[..., None]
    o = output.detach().double()
    seen = ~empty[..., None]
    here, there = finite(o), finite(reference)
    usable = seen & here & there
    count = _sum(usable)
    a, b = (torch.where(usable, x, 0.0) for x in (o, reference))
    columns = {
        "elements": count,
        "empty_rows": empty.sum(dim=(0, 2)),
        "nonfinite": _sum((here != there) & seen),
        "max_abs": _amax((a - b).abs()),
        "mean_abs": _sum((a - b).abs()) / count,
        "rms": _rms(a - b, count),
        "rel": _norm(a - b) / _norm(b),
        "w1": _w1(a, b, count),
        "lost": torch.zeros_like(count),
    }
    return [_with_reasons(head) for head in _per_head(columns)]


def _against_baseline(o: Tensor, usable: Tensor, y: Yardstick, rms: Tensor) -> dict[str, Tensor]:
    """The columns that need the baseline, the precision deviation, or both."""
    columns: dict[str, Tensor] = {}
    if y.precision is not None:
        columns["precision_rms"], columns["precision_w1"] = y.precision
    if y.plain is None:
        return columns
    baseline, baseline_usable, baseline_rms = y.plain
    both = usable & baseline_usable
    columns["baseline_ratio"] = rms / baseline_rms
    columns["from_baseline_rms"], columns["from_baseline_w1"] = _distance(o, baseline, both)
    if dtype_of(y.format).itemsize > 1:  # PyTorch has no arithmetic in 8-bit formats
        columns["fa_rule"] = _fa_rule(o, baseline, both & y.floor_finite, y)
    if y.precision is not None:
        columns["flash_vs_precision"] = columns["from_baseline_rms"] / y.precision[0]
        columns["flash_vs_precision_w1"] = columns["from_baseline_w1"] / y.precision[1]
    return columns


def _fa_rule(o: Tensor, baseline: Tensor, usable: Tensor, y: Yardstick) -> Tensor:
    """flash-attention's own test, per head: its reference is the exact answer cast to the working
    format, and max|o - ref| <= 2 max|plain - ref| + 2 max|((ref + 0.3) - 0.3) - ref|."""
    ref = torch.where(usable, y.floor, 0.0)
    cast = ref.to(dtype_of(y.format))  # exact: the floor is representable
    allowance = 2 * _amax((cast + 0.3 - 0.3 - cast).abs()).double()
    error, plain = (_amax(torch.where(usable, x - ref, 0.0).abs()) for x in (o, baseline))
    return error <= 2 * plain + allowance


def _against_expected(
    error: Tensor, predicted: Tensor, usable: Tensor, y: Yardstick
) -> dict[str, Tensor]:
    """The errors beside those an emulation predicts for the same inputs.

    expected_ratio is row_rel over the predicted row_rel, which is at least that of an error of
    u |r_i| / sqrt(12), as for the floor; worst_row is the largest of `row_ratios`. What fp32
    arithmetic may err (`Yardstick.arithmetic`) joins what is predicted, in squares.
    """
    both = usable & finite(predicted)
    error, predicted = (torch.where(both, x, 0.0) for x in (error, predicted))
    typical = typical_row(predicted, both, y)
    return {
        "expected_ratio": _row_rel(error, both, y) / typical,
        "worst_row": row_ratios(error, predicted, typical, both, y).amax(dim=(0, 2)),
    }


def typical_row(predicted: Tensor, usable: Tensor, y: Yardstick) -> Tensor:
    """[H]: the predicted row_rel, or that of an error of u |r_i| / sqrt(12) if it is larger."""
    scale, least = _scale(usable, y), _least(usable, y).norm(dim=-1)
    expected = _relative_rms(_expected(predicted, scale, y), scale)
    return torch.maximum(expected, _relative_rms(least, scale))


def row_ratios(
    error: Tensor, predicted: Tensor, typical: Tensor, usable: Tensor, y: Yardstick
) -> Tensor:
    """[B, H, rows]: |error_i| over what is predicted for the row; 0 in a row without an error.

    What is predicted is at least typical of the head (`typical_row` times |term scale_i|): that
    one row's roundings happen to cancel is no prediction. It is also at least u |r_i| / sqrt(12),
    and u SMALLEST_SCALE.
    `error` and `predicted` are 0 where they are not usable.
    """
    scale = _scale(usable, y)
    allowed = torch.maximum(_expected(predicted, scale, y), typical[None, :, None] * scale)
    allowed = torch.maximum(allowed, _least(usable, y).norm(dim=-1))
    allowed = allowed.clamp_min(y.format.unit_roundoff * SMALLEST_SCALE)
    size = error.norm(dim=-1)
    return torch.where(size > 0, size / allowed, 0.0)


def _scale(usable: Tensor, y: Yardstick) -> Tensor:
    """[B, H, rows]: |term scale_i| over usable elements."""
    scale: Tensor = torch.where(usable & finite(y.term_scale), y.term_scale, 0.0).norm(dim=-1)
    return scale


def _expected(predicted: Tensor, scale: Tensor, y: Yardstick) -> Tensor:
    """[B, H, rows]: the size of a row's predicted error, with what fp32 arithmetic may err."""
    size: Tensor = predicted.norm(dim=-1)
    return size if y.arithmetic is None else torch.hypot(size, scale * y.arithmetic)


def _least(usable: Tensor, y: Yardstick) -> Tensor:
    """u r / sqrt(12), with the sign of r: the least an error may be predicted to be."""
    return torch.where(usable, y.reference, 0.0) * (y.format.unit_roundoff / math.sqrt(12))


def _distance(a: Tensor, b: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """rms of a - b and W1 between their values, per head, over usable elements."""
    a, b = (torch.where(usable, x, 0.0) for x in (a, b))
    count = _sum(usable)
    return _rms(a - b, count), _w1(a, b, count)


def _row_rel(error: Tensor, usable: Tensor, y: Yardstick) -> Tensor:
    """Root mean square over rows of |error_i| / |term scale_i|, both over the row's usable
    elements; rows without terms, or without a usable element, are left out."""
    scale = torch.where(usable, y.term_scale, 0.0).norm(dim=-1)
    return _relative_rms(error.norm(dim=-1), scale)


def _relative_rms(size: Tensor, scale: Tensor) -> Tensor:
    """Per head, over rows [B, H, rows] with a finite scale of SMALLEST_SCALE or more, the rms of
    size / scale."""
    rows = (scale >= SMALLEST_SCALE) & finite(scale)
    ratio = torch.where(rows, size / torch.where(rows, scale, 1.0), 0.0)
    mean_square: Tensor = (ratio**2).sum(dim=(0, 2)) / rows.sum(dim=(0, 2))
    return mean_square.sqrt()


def _bias(o: Tensor, usable: Tensor, y: Yardstick) -> list[Metrics]:
    """Signed error relative to the floor's, in ulps at the term scale, with an honest statistic.

    The unit of observation is a sequence (a batch entry), since the rows of one sequence share
    their keys and values. Rows that repeat an earlier sequence's are no observation. Within a head
    the family is: the plain mean, the mean along sign(r) (shrinkage), and the mean of every
    feature.
    """
    usable = usable & ~y.repeated[..., None]
    d = torch.where(usable, (o - y.floor) / y.spacing, 0.0)
    columns = torch.cat([_overall(d), _overall(d * y.reference.sign()), d.sum(dim=2)], dim=-1)
    used = usable.double()
    counts = torch.cat([_overall(used), _overall(used), used.sum(dim=2)], dim=-1)
    sums, sizes = columns.cpu().numpy(), counts.cpu().numpy()  # [B, H, 2 + v_dim]
    return [_bias_of_head(sums[:, head], sizes[:, head]) for head in range(sums.shape[1])]


def _overall(x: Tensor) -> Tensor:
    """Summed over rows and features: [B, H, q_len, v_dim] to [B, H, 1]."""
    return x.sum(dim=(2, 3))[..., None]


def _bias_of_head(sums: Numbers, counts: Numbers) -> Metrics:
    """Bias of one head from its sequences' sums and element counts, [sequences, 2 + features].

    A sequence without a usable element says nothing and is no observation. `bias_p` is corrected
    for the family (Bonferroni with weights, so that the 64 or 128 features do not drown the two
    overall means: these get a quarter of the error rate each, the features share the other half).
    The correction over heads is made where heads are seen together. Members of at least
    MIN_BIAS_ULP are preferred, so that a tiny but certain bias does not hide a large one.
    """
    seen = counts > 0
    n = seen.sum(axis=0)
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=seen)
    mean = means.sum(axis=0) / np.maximum(n, 1)
    found: Metrics = {
        "sequences": int(n[0]),
        "bias": float(mean[0]),
        "bias_sign": float(mean[1]),
        "bias_feature": float(mean[2 + int(np.abs(mean[2:]).argmax())]),
    }
    if n[0] < 2:
        return {**found, "bias_t": None, "bias_p": None, "bias_size": None, "bias_of": None}
    t = mean / _standard_error(means, counts, seen)
    p = np.minimum(1.0, _two_sided_p(t, n - 1) * _corrections(len(mean)))
    large = np.abs(mean) >= MIN_BIAS_ULP
    # The smallest p; among equal ones, as many that are 1, the largest t.
    order = np.lexsort((-np.abs(t), p, ~large))
    pick = int(order[0])
    return {
        **found,
        "bias_t": float(t[pick]),
        "bias_p": float(p[pick]),
        "bias_size": float(mean[pick]),
        "bias_of": ("mean", "sign")[pick] if pick < 2 else f"feature {pick - 2}",
    }


def _standard_error(means: Numbers, counts: Numbers, seen: Flags) -> Numbers:
    """Of the mean over sequences, from their spread; 1 where fewer than two were seen.

    Outputs lie on a grid of about one ulp, so the mean of k elements moves in steps of 1/k ulp. A
    spread below half a step is not measured but missed, and does not count as smaller: eight
    sequences of one row that all round a feature up are no certainty.
    """
    n = seen.sum(axis=0)
    mean = means.sum(axis=0) / np.maximum(n, 1)
    spread = np.sqrt(np.where(seen, (means - mean) ** 2, 0.0).sum(axis=0) / np.maximum(n - 1, 1))
    half_step = 0.5 * n / np.maximum(counts.sum(axis=0), 1)
    return np.where(n < 2, 1.0, np.maximum(spread, half_step) / np.sqrt(np.maximum(n, 1)))


def _corrections(family: int) -> Numbers:
    """By how much each member's p is multiplied: the mean, the mean along the sign, the features.

    The reciprocals sum to 1, which keeps the error rate of the whole family.
    """
    features = family - 2
    return np.array([4.0, 4.0, *[2.0 * features] * features])


def _two_sided_p(t: Numbers, degrees: Numbers) -> Numbers:
    """Of Student's t; 1 where there are no degrees of freedom."""
    from scipy.special import stdtr

    p: Numbers = np.where(degrees < 1, 1.0, 2 * stdtr(np.maximum(degrees, 1), -np.abs(t)))
    return p


def _per_head(columns: dict[str, Tensor]) -> list[Metrics]:
    """Columns of [H] tensors as one dict per head; the only transfer to the host."""
    table = torch.stack([c.double() for c in columns.values()]).cpu().T.tolist()
    return [dict(zip(columns, row, strict=True)) for row in table]


def _with_reasons(head: Metrics) -> Metrics:
    """Counts as integers, and None with a reason for every number that means nothing."""
    nulls: dict[str, str] = {}
    lost = head.pop("lost")
    for name in ("elements", "empty_rows", "nonfinite"):
        head[name] = int(head[name])
    if "fa_rule" in head:
        head["fa_rule"] = bool(head["fa_rule"])
    if head["elements"] == 0:
        why = "no finite element in a row that sees a key"
        counts = ("elements", "empty_rows", "nonfinite", "sequences")
        nulls |= {k: why for k, v in head.items() if v is not None and k not in counts}
    elif lost:
        nulls["rel"] = "the reference is lost in its term scale"
    if head.get("precision_rms") == 0:
        why = "rounding the inputs to this format changes nothing"
        nulls |= {"flash_vs_precision": why, "flash_vs_precision_w1": why}
    if head.get("sequences", 2) < 2:
        judged = ("bias_t", "bias_p", "bias_size", "bias_of")
        nulls |= dict.fromkeys(judged, "needs at least two sequences")
    for name, value in head.items():
        if isinstance(value, float) and not math.isfinite(value):
            nulls.setdefault(name, "0/0" if math.isnan(value) else "the denominator is zero")
    head.update(dict.fromkeys(nulls))
    head["nulls"] = nulls
    return head


def _w1(a: Tensor, b: Tensor, count: Tensor) -> Tensor:
    """W1 per head over `count` usable elements. The others are 0 in both, which only dilutes the
    distance: adding the same points to both samples scales W1 by used / all."""
    flat = [x.transpose(0, 1).flatten(1) for x in (a, b)]
    return w1_rows(*flat) * (flat[0].shape[1] / count)


def _sum(x: Tensor) -> Tensor:
    """Per head, in fp64; of a bool tensor, the count."""
    return x.sum(dim=(0, 2, 3), dtype=torch.float64)


def _amax(x: Tensor) -> Tensor:
    return x.amax(dim=(0, 2, 3))


def _norm(x: Tensor) -> Tensor:
    return _sum(x**2).sqrt()


def _rms(x: Tensor, count: Tensor) -> Tensor:
    """Root mean square over `count` elements; the others must be 0 in x."""
    return (_sum(x**2) / count).sqrt()
