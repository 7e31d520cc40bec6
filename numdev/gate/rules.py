"""The rule book: which rows are judged, by which number, up to where. Data; `judging`
applies it.

A threshold is a selector, a metric and a limit. All of numdev's limits stand in
`configs/gate/`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from numdev.errors import closest
from numdev.metrics.metrics_by_name import METRICS, Value, value_of
from numdev.metrics.statistics import BIAS_ALPHA, BIAS_SEQUENCES
from numdev.report import DeviationRow, Phase
from numdev.report.number_text import power
from numdev.report_kinds import REGISTERED, kind_of
from numdev.tensor_properties import TENSORS, tensor_spec
from numdev.yamlfile import Names, Strict, as_list, bundled_path, parse_bundled, read_yaml

Judgeable = Literal["kernel", "baseline", "floor", "precision"]
STATEMENTS = ("suspicion", "form")  # metrics that are words


Numbers = Annotated[tuple[int, ...] | None, BeforeValidator(as_list)]


def _patterns_among(names: tuple[str, ...]) -> AfterValidator:
    """Returns a validator of patterns that raises ValueError for one that fits none of
    these names: a misspelt one would leave a rule without a row. A leading ! does not
    count."""

    def check(patterns: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the patterns as they are; raises ValueError for one that fits no
        name."""
        for pattern in patterns:
            bare = pattern.removeprefix("!")
            if not any(fnmatchcase(name, bare) for name in names):
                raise ValueError(f"unknown name {bare!r}; {closest(bare.lower(), names)}")
        return patterns

    return AfterValidator(check)


Tensors = Annotated[Names, _patterns_among(tuple(TENSORS))]
Phases = Annotated[Names, _patterns_among(get_args(Phase))]


@lru_cache(maxsize=1 << 16)
def matches_patterns(patterns: tuple[str, ...], text: str | None) -> bool:
    """Whether none of the patterns that begin with ! excludes a text, and one of the
    others, if there are any, fits it. True without patterns. Patterns are the shell's,
    and capitals count; a text of None counts as empty."""
    if any(fnmatchcase(text or "", p[1:]) for p in patterns if p.startswith("!")):
        return False
    wanted = [p for p in patterns if not p.startswith("!")]
    return not wanted or any(fnmatchcase(text or "", p) for p in wanted)


class Patterns(Strict):
    """Shell patterns for the kernel, format and tensor of a row; a leading ! excludes. A
    field without patterns fits all."""

    kernel: Names = ()
    format: Names = ()
    tensor: Tensors = ()

    def fits(self, row: DeviationRow) -> bool:
        """Whether the row's kernel, format and tensor each fit their patterns; no pattern
        fits all."""
        names = ("kernel", "format", "tensor")
        return all(
            matches_patterns(getattr(self, name), getattr(row, name)) for name in names
        )


class Selector(Patterns):
    """Which rows a threshold is for: by role (`kernel` by default), kernel, format and
    tensor, and by where they were measured. Another field without patterns or numbers
    fits all."""

    role: Annotated[tuple[Judgeable, ...], BeforeValidator(as_list)] = ("kernel",)
    out_format: Names = ()
    case: Names = ()
    module: Names = ()
    phase: Phases = ()
    layer: Numbers = None
    head: Numbers = None

    def select(self, rows: list[DeviationRow]) -> list[DeviationRow]:
        """Returns the rows that fit every pattern, in order; empty where none does.
        `rows`: at least one, all of one role, kernel, format and tensor, of which the
        first one speaks for all."""
        if rows[0].role not in self.role or not self.fits(rows[0]):
            return []
        for name in ("out_format", "case", "module", "phase"):
            if patterns := getattr(self, name):
                rows = [
                    row for row in rows if matches_patterns(patterns, getattr(row, name))
                ]
        for name in ("layer", "head"):
            numbers = getattr(self, name)
            if numbers is not None:
                rows = [row for row in rows if getattr(row, name) in numbers]
        return rows


def _checked_metric(metric: str) -> str:
    """Returns the name of a metric as it is; raises ValueError for an unknown one."""
    if metric not in METRICS:
        raise ValueError(f"no metric {metric!r}; {closest(metric, METRICS)}")
    return metric


Metric = Annotated[str, AfterValidator(_checked_metric)]


class Limit(Strict):
    """The limit of one metric: `at_most` a number, by its size if it is signed, or
    `absent`."""

    metric: Metric
    at_most: Annotated[float, Field(ge=0)] | None = None
    absent: Literal[True] | None = None  # there may be no such statement
    at_least: Annotated[float, Field(gt=0)] | None = None
    """What the number has to be for the row to tell anything: below it nothing is
    decided."""

    @model_validator(mode="after")
    def _has_one_limit(self) -> Limit:
        """Returns the limit; raises ValueError unless it has exactly one of `at_most`,
        `at_least` and `absent`, which is `absent` for statements and for no other
        metric."""
        if sum(x is not None for x in (self.at_most, self.absent, self.at_least)) != 1:
            raise ValueError("give one of at_most, at_least and absent")
        if (self.absent is not None) != (self.metric in STATEMENTS):
            which = " and ".join(STATEMENTS)
            raise ValueError(f"`absent` is for {which}, and the only limit for them")
        return self

    def excess(self, value: Value) -> float:
        """Returns the size of a number as a multiple of its limit: above 1 the limit is
        exceeded. None counts as 0, and so does everything under a lower limit
        (`at_least`), which accuses nobody. Infinite for NaN, for any number but 0 where
        the limit is 0, and for a statement where there may be none."""
        if self.absent:
            return 0.0 if value is None else math.inf
        if self.at_least is not None:
            return 0.0  # it accuses nobody
        size = abs(float(value or 0.0))
        if size != size:
            return math.inf
        return size / self.at_most if self.at_most else (math.inf if size else 0.0)

    def __str__(self) -> str:
        if self.absent:
            return "none"
        sign, limit = "≤", self.at_most
        if self.at_least is not None:
            sign, limit = "≥", self.at_least
        return f"{self.metric} {sign} {power(f'{limit:g}')}"


class Certain(Strict):
    """A bias counts only where it is significant, by `bias_p`."""

    alpha: Annotated[float, Field(gt=0, lt=1)] = BIAS_ALPHA
    """Family-wise, over the heads of a kernel in a format, by Holm's procedure."""
    sequences: Annotated[int, Field(ge=2)] = BIAS_SEQUENCES


class Instead(Patterns):
    """Another limit for some kernels, formats or tensors, and optionally another
    scatter, or another limit where few rows make the error."""

    at_most: Annotated[float, Field(ge=0)]
    scatter: Annotated[float, Field(ge=0)] | None = None
    few_rows: tuple[Annotated[float, Field(ge=1)], float] | None = None


class Threshold(Limit):
    """A selector, a metric and its limit."""

    name: Annotated[str, Field(min_length=1)]
    where: Selector = Selector()
    # In this order where the metric is null and the row says why
    otherwise: tuple[Limit, ...] = ()
    instead: tuple[Instead, ...] = ()
    """Of these the first that holds for a row has the limit; otherwise the threshold's
    own."""
    certain: Certain | None = None
    heads: Annotated[int, Field(ge=2)] | None = None
    """The limit is for the median over all heads of a tensor, of which there must be so
    many."""
    by_case: bool = False  # case by case: where calls are not alike, one may hide another
    # Of fewer: how many, and a limit
    few: tuple[Annotated[int, Field(ge=2)], float] | None = None
    sampled: Annotated[float, Field(ge=0)] | None = None
    """The limit of sampled rows: an interval around a sound number would often contain a
    limit as near to it as that of all rows, and decide nothing."""
    scatter: Annotated[float, Field(ge=0)] = 0
    """Standard deviations of luck that a ratio may be above 1, whatever the limit."""
    few_rows: tuple[Annotated[float, Field(ge=1)], float] | None = None
    """Where an error is of fewer rows than this, in effect (`error_rows`): the limit of
    a single row."""
    times: Metric | None = None
    """A number of the row by which the limit is multiplied: how far luck may raise what
    is judged."""
    only_where: dict[Metric, float] = Field(default_factory=dict)
    """Numbers of the row that have to be above these for it to offend: a lean that is
    not certain accuses nobody."""
    may_lack: Literal["nothing", "rows", "numbers"] = "nothing"
    """`numbers`: as `rows`, and a row may lack the number for a reason that the row bears
    out."""

    @model_validator(mode="after")
    def _fits_together(self) -> Threshold:
        """Returns the threshold; raises ValueError for fields that do not go together:
        `instead`, `sampled` and `scatter` need `at_most`, `heads` excludes `certain` and
        `absent`, and `certain` is for metrics of bias."""
        if (
            self.instead or self.scatter or self.sampled is not None
        ) and self.at_most is None:
            raise ValueError("`instead`, `sampled` and `scatter` need at_most")
        if self.heads is not None and (self.certain or self.absent):
            raise ValueError("`heads` takes the median of a number, without `certain`")
        if self.certain and not self.metric.startswith("bias"):
            raise ValueError(f"`certain`: expected a metric of bias, got {self.metric}")
        return self

    def for_row(self, row: DeviationRow, heads: int | None = None) -> Threshold:
        """Returns the threshold with the limit that it has for rows of this one's kernel,
        format and tensor. That is `sampled` for sampled rows, if the rule has it, else
        the limit of the first of `instead` that fits, else its own. For fewer `heads`
        than the rule asks for, `few` says how many there must be, and its limit holds
        where it is higher; None: there are enough. Itself where nothing changes."""
        changes: dict[str, object] = {}
        if row.sampled and self.sampled is not None:
            changes = {"at_most": self.sampled}
        elif other := next((each for each in self.instead if each.fits(row)), None):
            changes = {
                name: value
                for name in ("at_most", "scatter", "few_rows")
                if (value := getattr(other, name)) is not None
            }
        usual = self.model_copy(update=changes) if changes else self
        if heads is None or self.few is None or heads >= (self.heads or 0):
            return usual
        least, most = self.few
        return usual.model_copy(
            update={"heads": least, "at_most": max(usual.at_most or 0.0, most)}
        )

    def raised_by_luck(self, row: DeviationRow) -> Threshold:
        """Returns the threshold for a row, its limit raised by the row's own luck. Where
        fewer rows than `few_rows` says make the error, the limit there holds if it is
        higher. Else the limit is multiplied by the row's number `times`, and rounded up
        to a thousandth. Itself where the rule has neither, or the row no such number."""
        if self.few_rows and row.error_rows is not None:
            few, limit = self.few_rows
            if row.error_rows < few:
                most = max(limit, self.at_most or 0.0)
                return self.model_copy(update={"at_most": most})
        luck = value_of(row, self.times)[0] if self.times else None
        if self.at_most is None or not isinstance(luck, float):
            return self
        limit = math.ceil(1000 * self.at_most * luck) / 1000
        return self.model_copy(update={"at_most": limit})

    def is_certain(self, row: DeviationRow) -> bool:
        """Whether the numbers of `only_where` are large enough in this row that it may
        break the rule; True where the rule has none."""
        numbers = {metric: value_of(row, metric)[0] for metric in self.only_where}
        return all(
            abs(float(numbers[metric] or 0.0)) > least
            for metric, least in self.only_where.items()
        )

    def widened_for_sample_size(self, row: DeviationRow, heads: int = 1) -> Threshold:
        """Returns the threshold for a row, or for the median over `heads` of them, with a
        limit of at least 1 + `scatter` standard deviations of luck. Of a ratio of root
        mean squares of n numbers that is 1/√n or less; of a median of N, 1.25/√N of that.
        Itself where its limit is that high, for a rule without `scatter`, a row without
        elements, and for sampled rows, whose interval has luck. n counts 8 numbers at
        most for each row whose elements share an error (`rows_share_error`), and of
        `rms_ratio` only the rows that count in effect (`rms_rows`)."""
        if not (self.scatter and row.elements) or row.sampled:
            return self
        n, rows = float(row.elements), float(row.rows_measured or 0)
        if self.metric == "rms_ratio" and row.rms_rows and rows:
            n, rows = n * row.rms_rows / rows, row.rms_rows
        if tensor_spec(row.tensor).rows_share_error and rows:
            n = min(n, 8 * rows)
        luck = (1.25 if heads > 1 else 1.0) / math.sqrt(n * heads)
        allowed = math.ceil(1000 * (1 + self.scatter * luck)) / 1000
        higher = allowed > (self.at_most or 0.0)
        return self.model_copy(update={"at_most": allowed}) if higher else self


# Of a limit of a kind of report (`numdev.report_kinds`)
AtMost = Annotated[float, Field(ge=0)]


class Rules(Strict):
    """All by which reports are judged: thresholds of rows, limits of other kinds of
    reports, and what must have been measured, planted and caught."""

    name: str = "default"
    holds_for: dict[str, str] = Field(default_factory=dict)
    """Keys of the report's system, for example cpu_capability or gpu, with a pattern for
    each: a report from elsewhere is not judged."""
    required: Names = ()  # kernels that must have been measured in every call
    skipped: Literal["allow", "refused-only", "never"] = "refused-only"
    """What may be skipped: everything; single calls of a kernel that was asked for by
    name, and all of one that was not; nothing."""
    catches: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Planted faults, and a dose of each from which on these thresholds must catch it."""
    thresholds: Annotated[tuple[Threshold, ...], Field(min_length=1)] = ()
    """Where a file does not say any, those of configs/gate/default.yaml; so with each of
    the keys of `effects` and `invariance`."""
    limits: dict[str, dict[str, object]] = Field(default_factory=dict)
    """By kind of report, its own limits where they are not the default ones, as plain
    data; a file has them under the kind's name."""

    @model_validator(mode="before")
    @classmethod
    def _with_default_limits(cls, values: object) -> object:
        """Returns the values of a file with the default thresholds where it has none, and
        the limits of kinds of reports gathered under `limits`; what is no mapping as it
        is. Raises ValueError for limits that are wrong."""
        if not isinstance(values, Mapping):
            return values
        whole = dict(values)
        if "thresholds" not in whole:
            whole["thresholds"] = default_rules().thresholds
        whole["limits"] = _take_limits(whole)
        return whole

    def limits_of(self, kind: str) -> Any:
        """Returns the limits of a kind of report beside the thresholds, as that kind's
        model: its class is `Kind.limits`. The default ones where the rules have no
        others. `kind`: one that has limits."""
        model: Any = kind_of(kind).limits
        return model.model_validate(self.limits.get(kind) or default_limits()[kind])

    @field_validator("thresholds")
    @classmethod
    def _with_distinct_names(
        cls, thresholds: tuple[Threshold, ...]
    ) -> tuple[Threshold, ...]:
        """Returns the thresholds; raises ValueError for two of one name."""
        names = [t.name for t in thresholds]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise ValueError(f"two thresholds are named {twice!r}")
        return thresholds


@lru_cache(maxsize=1)
def default_limits() -> Mapping[str, Mapping[str, object]]:
    """Returns the limits of configs/gate/default.yaml by kind of report, as plain
    data."""
    raw = parse_bundled("gate/default.yaml")
    return {name: raw[name] for name in REGISTERED if name in raw}


def _take_limits(values: dict[str, Any]) -> dict[str, object]:
    """Takes the limits of kinds of reports out of the values of a file (in place), checks
    them, and returns those that are not the default ones, each whole. Raises pydantic's
    ValidationError for an unknown key or value, and ValueError where `limits` is no
    mapping."""
    by_kind = values.pop("limits", None) or {}
    if not isinstance(by_kind, Mapping):
        raise ValueError(f"limits: expected a mapping, got {by_kind!r}")
    limits: dict[str, object] = dict(by_kind)
    limits |= {name: values.pop(name) for name in REGISTERED if name in values}
    usual = default_limits()
    for name, changed in limits.items():
        if isinstance(changed, Mapping):
            limits[name] = {**usual.get(name, {}), **changed}
    limits = {name: limit for name, limit in limits.items() if limit != usual.get(name)}
    models = {name: kind_of(name).limits for name in limits if name in REGISTERED}
    typed: Any = {
        name: (model, ...) for name, model in models.items() if model is not None
    }
    whole = create_model("Limits", __base__=Strict, **typed)
    checked: dict[str, object] = whole.model_validate(limits).model_dump(mode="json")
    return checked


def rules_from_data(data: Mapping[str, object] | None) -> Rules | None:
    """Returns the rules that a report says it was judged by, as `rules_as_data` wrote
    them; None where there are none, or they are none of this version."""
    if data is None:
        return None
    try:
        return Rules.model_validate(data)
    except ValidationError:
        return None


def rules_as_data(rules: Rules) -> dict[str, object]:
    """Returns the rules as plain data, all but default values, as a report has them."""
    return rules.model_dump(mode="json", exclude_defaults=True)


def read_rules(path: Path) -> Rules:
    """Returns the rules in a YAML gate file; their name is the file's unless it has one.
    Raises UsageError that names the file, and the line and the key where one is at fault;
    also for a file that cannot be read."""
    rules = read_yaml(path, Rules)
    if "name" in rules.model_fields_set:
        return rules
    return rules.model_copy(update={"name": path.name})


@lru_cache(maxsize=1)
def default_rules() -> Rules:
    """Returns the rules of configs/gate/default.yaml."""
    return read_yaml(bundled_path("gate/default.yaml"), Rules)


def default_rules_for_checks() -> Rules:
    """Returns the rules of configs/gate/check.yaml, then the default ones. What these
    limit as a median over heads is limited for each case too, since in the median of all
    an error hides that half of the cases have."""
    rules, more = default_rules(), read_yaml(bundled_path("gate/check.yaml"), Rules)
    each = (
        t.model_copy(update={"name": f"{t.name} of a case", "by_case": True})
        for t in rules.thresholds
        if t.heads
    )
    return rules.model_copy(
        update={"thresholds": (*more.thresholds, *rules.thresholds, *each)}
    )


@lru_cache(maxsize=1)
def default_rules_for_functions() -> Rules:
    """Returns the rules of configs/gate/function.yaml."""
    return read_yaml(bundled_path("gate/function.yaml"), Rules)
