"""A sweep's report: its rows by cell, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from numdev.report.records.base import Record, Role
from numdev.report.records.report import Report
from numdev.report.records.rows import CaseRecord, DeviationRow


class CellRow(Record):
    """One metric of one kernel in one cell of a sweep: heads pooled, then the mean over seeds with
    its 95 % interval from a t-distribution, null for a single seed."""

    case: str
    axes: dict[str, Any] = Field(default_factory=dict)
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    format: str
    metric: str
    seeds: int  # with a number
    mean: float | None
    low: float | None
    high: float | None
    ratio: float | None  # to the baseline's, seed by seed, and then the mean
    ratio_low: float | None
    ratio_high: float | None


class Tick(Record):
    x: float
    label: str
    below: str = ""  # a second line, for example the usual name of a format


class Axis(Record):
    """What curves run along."""

    name: str
    title: str
    scale: Literal["linear", "log", "category"]
    ticks: Annotated[tuple[Tick, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _drawable(self) -> Axis:
        if self.scale == "log" and min(tick.x for tick in self.ticks) <= 0:
            raise ValueError("a place on a logarithmic axis is above 0")
        return self


class Point(Record):
    """A curve at one place: the mean over seeds and its 95 % interval."""

    x: float | None  # null on a curve that the axis does not move
    label: str
    mean: float
    low: float | None
    high: float | None
    seeds: int
    limited: bool = False  # whether the reference is no more exact than what it judges


class Curve(Record):
    label: str
    role: Role
    kernel: str
    options: dict[str, Any] = Field(default_factory=dict)
    constant: bool = False  # one point, which holds all along the axis
    points: tuple[Point, ...]


class Figure(Record):
    """One metric along the axis, at one place of all other axes."""

    title: str
    metric: str
    relative: bool  # whether it is the ratio to the baseline
    place: dict[str, str] = Field(default_factory=dict)
    y_title: str
    y_scale: Literal["linear", "log"]
    curves: tuple[Curve, ...]


class SweepSummary(Record):
    answer: tuple[str, ...]
    notes: tuple[str, ...] = ()  # who could not be measured where, and why
    axis: Axis
    cells: int
    seeds: tuple[int, ...]
    baseline: str


class SweepReport(Report):
    """The result of `numdev sweep`."""

    kind: Literal["sweep"] = "sweep"
    summary: SweepSummary
    tested: tuple[str, ...] = ()
    figures: tuple[Figure, ...]
    cells: tuple[CellRow, ...]
    cases: tuple[CaseRecord, ...] = ()
    rows: tuple[DeviationRow, ...] = ()  # empty where only cells were asked for

    @property
    def measured(self) -> bool:
        """As in an audit: whether a kernel has a number, or nobody lacks one."""
        return any(cell.role == "kernel" for cell in self.cells) or not self.summary.notes

    def tables(self) -> dict[str, Sequence[Record]]:
        return {"rows": self.rows, **({"cells": self.cells} if self.cells else {})}
