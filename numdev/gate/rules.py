"""The rule book: what is judged, by which number, up to where. Data; `numdev.gate` applies it.

A threshold is a selector, a metric and a limit. The defaults are `configs/gate/default.yaml`, which
the gate and the findings of every report share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, WithJsonSchema, field_validator, model_validator

from numdev.errors import closest
from numdev.gate.selecting import Over, Selector, Tensors, matches, whose
from numdev.report import Count, DeviationRow
from numdev.report.statistics import BIAS_ALPHA, BIAS_SEQUENCES, noise_ratio
from numdev.yamlfile import Names, Strict, bundled, lines_of, read_yaml

Value = float | str | None


def lse_error(row: DeviationRow) -> float | None:
    """rms over 1 + the root mean square of the exact log-sum-exp, which is rms / rel: relative
    where it is large, absolute where it is near 0."""
    if not row.rms:
        return row.rms
    return row.rms / (1 + (row.rms / row.rel if row.rel else 0.0))


DERIVED: dict[str, Callable[[DeviationRow], float | None]] = {
    "noise_ratio": noise_ratio,
    "lse_error": lse_error,
}
MAXIMA = frozenset({"max_abs", "max_ulp", "worst_row", "fa_rule"})
"""Extreme values: over sampled rows they are lower bounds, and so never pass."""
ESTIMATED = frozenset(
    {"mean_abs", "rms", "rel", "row_rel", "floor_ratio", "baseline_ratio", "expected_ratio"}
    | {"precision_rms", "from_baseline_rms", "flash_vs_precision", "lse_error"}
    | {"low_precision_rms", "flash_vs_low_precision", "lower_rms", "flash_vs_lower"}
)
"""What sampled rows give an estimate of, to be judged by its interval. What else a row holds is of
the whole output (nonfinite, noise), or has a test of its own (bias)."""
ERRORS = frozenset({"expected_ratio", "worst_row", "floor_ratio", "baseline_ratio"})
"""Multiples of an error, and so 0 where there is none, whatever the denominator."""
_NUMBERS = (float | None, int | None, Count | None, bool | None)
_FIELDS = frozenset(
    name for name, field in DeviationRow.model_fields.items() if field.annotation in _NUMBERS
) - {"layer", "seed", "head"}
METRICS = frozenset(n for n in _FIELDS if not n.endswith("w1")) | {"suspicion", *DERIVED}
"""What can be judged. Not W1, which is blind to permutation."""


def value_of(row: DeviationRow, metric: str) -> tuple[Value, str | None]:
    """A metric of a row, or a ratio of two as `a / b`; and where it is None, why: the row's own
    reason, else None again. 0 over anything is 0; a number over 0 is None."""
    derived = DERIVED.get(metric)
    if derived is None and "/" in metric:
        return _ratio(row, *parts_of(metric))
    value: Value = derived(row) if derived else getattr(row, metric)
    if value is None and metric in ERRORS and row.rms == 0:
        return 0.0, None
    return value, row.nulls.get(metric)


@lru_cache(maxsize=256)
def parts_of(metric: str) -> tuple[str, ...]:
    """Both metrics of `a / b`; the one of any other."""
    return tuple(part.strip() for part in metric.split("/"))


def _ratio(row: DeviationRow, over: str, under: str) -> tuple[Value, str | None]:
    (value, why), (divisor, why_not) = (value_of(row, name) for name in (over, under))
    if value is None or divisor is None:
        return None, why if value is None else why_not
    if not value:
        return 0.0, None
    if not divisor:
        return None, f"{under} is 0"
    return float(value) / float(divisor), None


def interval_of(row: DeviationRow, metric: str) -> tuple[float, float] | None:
    """The interval of a metric that is estimated from sampled rows, where it has one. As in
    `value_of`, a multiple of an error is 0 where there is none."""
    if metric in ERRORS and row.rms == 0:
        return row.interval.get("rms")
    if metric != "lse_error":
        return row.interval.get(metric)
    ends, value = row.interval.get("rms"), lse_error(row)
    if ends is None or value is None or not row.rms:
        return ends
    return ends[0] * value / row.rms, ends[1] * value / row.rms


def _completed(names: Collection[str]) -> dict[str, Any]:
    """The JSON Schema of a metric: a known name, or a ratio of two."""
    either = "|".join(sorted(set(names) - {"suspicion"}))
    return {
        "anyOf": [
            {"enum": sorted(names)},
            {
                "type": "string",
                "pattern": rf"^\s*({either})\s*/\s*({either})\s*$",
                "examples": ["from_baseline_rms / precision_rms"],
            },
        ]
    }


Metric = Annotated[str, WithJsonSchema(_completed(METRICS))]


class Limit(Strict):
    """What one metric may be. Exactly one of the four. A signed number is judged by its size."""

    metric: Metric
    """Of a row, or two as `a / b`."""
    over: Over | None = None
    """What it is divided by; None: nothing."""
    at_most: Annotated[float, Field(ge=0)] | None = None
    below: Annotated[float, Field(gt=0)] | None = None
    equals: float | None = None
    absent: Literal[True] | None = None
    """There may be no such statement: of `suspicion`."""

    @field_validator("metric")
    @classmethod
    def _known(cls, name: str) -> str:
        parts = parts_of(name)
        for part in parts:
            if part not in METRICS:
                raise ValueError(f"no metric {part!r}; {closest(part, METRICS)}")
        if len(parts) > 2 or (len(parts) == 2 and "suspicion" in parts):
            raise ValueError(f"{name!r} is no ratio of two numbers; write `a / b`")
        return " / ".join(parts)

    @model_validator(mode="after")
    def _one(self) -> Limit:
        given = [
            n for n in ("at_most", "below", "equals", "absent") if getattr(self, n) is not None
        ]
        if len(given) != 1:
            raise ValueError("give exactly one of at_most, below, equals, absent")
        if (self.absent is not None) != (self.metric == "suspicion"):
            raise ValueError("`absent` is for suspicion, and the only limit for it")
        if self.absent and self.over is not None:
            raise ValueError("`over` divides a number, and suspicion is none")
        return self

    @property
    def named(self) -> str:
        """The metric and what it is divided by: `rms over the floor's`."""
        return self.metric if self.over is None else f"{self.metric} over {whose(self.over)}"

    @property
    def bound(self) -> float | None:
        """The number of the limit; None where it is none."""
        given = (self.at_most, self.below, self.equals)
        return next((x for x in given if x is not None), None)

    def excess(self, value: Value) -> float:
        """How far on the way to the limit: above 1 it is exceeded; infinite where there is none
        to be near to."""
        if self.absent:
            return 0.0 if value is None else math.inf
        size = abs(float(value or 0.0))
        if math.isnan(size):
            return math.inf
        if self.equals is not None:
            return 0.0 if float(value or 0.0) == self.equals else math.inf
        if self.below is not None:
            return size / self.below if size < self.below else max(size / self.below, _ABOVE)
        limit = self.at_most or 0.0
        return size / limit if limit else (math.inf if size else 0.0)

    def __str__(self) -> str:
        if self.absent:
            return "none"
        for sign, limit in (("≤", self.at_most), ("<", self.below), ("=", self.equals)):
            if limit is not None:
                return f"{self.named} {sign} {limit:g}"
        raise AssertionError


_ABOVE = math.nextafter(1.0, 2.0)


class Certain(Strict):
    """A metric that counts only where it is significant."""

    p: Literal["bias_p"] = "bias_p"
    alpha: Annotated[float, Field(gt=0, lt=1)] = BIAS_ALPHA
    """Family-wise, over the heads of a kernel in a format, by Holm's procedure."""
    sequences: Annotated[int, Field(ge=2)] = BIAS_SEQUENCES


class Instead(Strict):
    """Another limit for some kernels, formats or tensors."""

    kernel: Names = ()
    format: Names = ()
    tensor: Tensors = ()
    at_most: Annotated[float, Field(ge=0)]

    def holds_for(self, row: DeviationRow) -> bool:
        shared = (
            (self.kernel, row.kernel),
            (self.format, row.format),
            (self.tensor, row.tensor),
        )
        return all(matches(patterns, value) for patterns, value in shared)


class Threshold(Limit):
    """A selector, a metric and its limit."""

    name: Annotated[str, Field(min_length=1)]
    where: Selector = Selector()
    otherwise: tuple[Limit, ...] = ()
    """In this order where the metric is null and the row says why."""
    instead: tuple[Instead, ...] = ()
    """Of these the first that holds for a row has the limit; otherwise the threshold's own."""
    certain: Certain | None = None
    heads: Annotated[int, Field(ge=2)] | None = None
    """The limit is for the median over all heads of a tensor, of which there must be so many."""
    may_lack: Literal["nothing", "rows", "sampled", "numbers"] = "nothing"
    """`sampled`: as `rows`, and dk and dv may lack the number where rows were sampled."""
    _file: str | None = PrivateAttr(default=None)
    _line: int | None = PrivateAttr(default=None)

    @property
    def file(self) -> str | None:
        """The gate file it was read from, as that was given; None of one made in Python."""
        return self._file

    @property
    def line(self) -> int | None:
        """The line of that file, from 1, where it begins."""
        return self._line

    def standing(self, file: str, line: int) -> Threshold:
        """The same, and known to stand there."""
        copy = self.model_copy()
        copy._file, copy._line = file, line
        return copy

    @property
    def limits(self) -> tuple[Limit, ...]:
        return (self, *self.otherwise)

    @model_validator(mode="after")
    def _at_most(self) -> Threshold:
        if self.instead and self.at_most is None:
            raise ValueError("`instead` changes at_most, and there is none")
        if self.heads is not None and (self.certain or self.absent):
            raise ValueError("`heads` takes the median of a number, without `certain`")
        if self.certain and not self.metric.startswith("bias"):
            raise ValueError(f"`certain` is for a bias, and {self.metric} is none")
        if self.over == "before" and (self.otherwise or self.certain):
            raise ValueError("`over: before` goes without `otherwise` and `certain`")
        if any(limit.over == "before" for limit in self.otherwise):
            raise ValueError("`over: before` is for a threshold, not for `otherwise`")
        return self

    def at(self, row: DeviationRow) -> Threshold:
        """As it is for rows of this one's kernel, format and tensor."""
        other = next((each for each in self.instead if each.holds_for(row)), None)
        return self if other is None else self.model_copy(update={"at_most": other.at_most})


class Rules(Strict):
    """A gate file."""

    name: str = "default"
    holds_for: dict[str, str] = Field(default_factory=dict)
    """Keys of the report's system, for example cpu_capability or gpu, with a pattern for each: a
    report from elsewhere is not judged."""
    required: Names = ()
    """Kernels that must have been measured in every call."""
    catches: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Planted faults, and a dose of each from which on these thresholds must catch it."""
    thresholds: Annotated[tuple[Threshold, ...], Field(min_length=1)]

    @field_validator("thresholds")
    @classmethod
    def _distinct(cls, thresholds: tuple[Threshold, ...]) -> tuple[Threshold, ...]:
        names = [t.name for t in thresholds]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise ValueError(f"two thresholds are called {twice!r}")
        return thresholds

    _file: str | None = PrivateAttr(default=None)
    _lines: dict[str, tuple[int, ...]] = PrivateAttr(default_factory=dict)

    @property
    def file(self) -> str | None:
        """The gate file, as it was given; None of rules made in Python."""
        return self._file

    def line(self, key: str, entry: int = -1) -> int | None:
        """The line of the file, from 1, of one of its keys; or of an entry of that."""
        return (*self._lines.get(key, ()), None)[entry + 1 if key in self._lines else 0]

    def standing(self, file: str, lines: Mapping[str, tuple[int, ...]]) -> Rules:
        """The same, and known to stand there; `lines` as of `yamlfile.lines_of`."""
        begin = lines.get("thresholds", ())[1:] or (1,) * len(self.thresholds)
        placed = [t.standing(file, n) for t, n in zip(self.thresholds, begin, strict=True)]
        copy = self.model_copy(update={"thresholds": tuple(placed)})
        copy._file, copy._lines = file, dict(lines)
        return copy

    @property
    def about_changes(self) -> bool:
        """Whether any of them needs an older report."""
        return any(t.over == "before" for t in self.thresholds)

    @property
    def about_kernels_alone(self) -> bool:
        """Whether no other row is judged, or divided by."""
        limits = [limit for t in self.thresholds for limit in t.limits]
        roles = {role for t in self.thresholds for role in t.where.role}
        return roles == {"kernel"} and all(x.over in (None, "before") for x in limits)


def read_rules(path: Path) -> Rules:
    """A gate file; raises UsageError that names the file and the key."""
    rules = read_yaml(path, Rules)
    name = rules.name if "name" in rules.model_fields_set else path.name
    return rules.model_copy(update={"name": name}).standing(str(path), lines_of(path))


@lru_cache(maxsize=1)
def default_rules() -> Rules:
    """configs/gate/default.yaml."""
    return _bundled_rules("gate/default.yaml").model_copy(update={"name": "default"})


def default_rules_against() -> Rules:
    """The default rules, and those of configs/gate/change.yaml, for an older report beside."""
    rules, more = default_rules(), _bundled_rules("gate/change.yaml")
    return rules.model_copy(update={"thresholds": (*rules.thresholds, *more.thresholds)})


def default_rules_for_checks() -> Rules:
    """The default rules, after those of configs/gate/check.yaml."""
    rules, more = default_rules(), _bundled_rules("gate/check.yaml")
    return rules.model_copy(update={"thresholds": (*more.thresholds, *rules.thresholds)})


def _bundled_rules(name: str) -> Rules:
    """By a name that does not depend on where the package is installed."""
    path = bundled(name)
    return read_yaml(path, Rules).standing(f"configs/{name}", lines_of(path))
