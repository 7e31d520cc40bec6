"""The rows of a report: those of one measured kernel.

They are made in the same way for every operation: what is measured, and what it is
measured against, comes from a `PreparedCall`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from torch import Tensor

from numdev.errors import MeasurementError, UsageError
from numdev.formats import Format, format_of
from numdev.kernels import Kernel
from numdev.metrics.bit_checksums import checksums
from numdev.metrics.deviation import (
    Deviation,
    Metrics,
    measure,
    measure_plain,
    nullify,
)
from numdev.metrics.finiteness import Outside
from numdev.metrics.row_samples import Strata
from numdev.metrics.run_to_run import Noise, noise
from numdev.report import NOT_PREDICTED, DeviationRow
from numdev.studies.audit.isolation import Failure
from numdev.studies.audit.operation import Call, Returned
from numdev.studies.audit.plan import Task, recorded
from numdev.tensor_properties import FIRST_OUTPUT, tensor_spec

if TYPE_CHECKING:
    from numdev.studies.audit.explanations import Likeness

# Over all rows, beside what is predicted
AVERAGES = ("expected_ratio", "error_rows", "rms_ratio", "rms_rows")
# What measuring may raise on strange outputs, and costs the row, not the audit.
FAILS_ONE_ROW = (RuntimeError, TypeError, ValueError, MeasurementError, UsageError)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured(Generic[Call]):
    """The rows of a measured task, and what was measured for them."""

    # One per unit and tensor, or a single one that says why there is none
    rows: list[DeviationRow]
    # What the kernel returned first; None where it returned nothing
    output: Any = None
    held_to: Mapping[str, Tensor] = field(default_factory=dict)
    """The way of rounding each tensor was held to, where that is not its claim's."""
    along: Mapping[str, Deviation] = field(default_factory=dict)
    """The deviation of each tensor, with sums by bin of positions."""
    bench: Call | None = None  # that it was measured on


@dataclass(frozen=True, eq=False)
class Runs(Generic[Call]):
    """The runs of a task, and the roundings that their errors are compared with: of a
    tensor in `likes` those of that known way of rounding, else those of the kernel's
    claim."""

    task: Task
    runs: Sequence[Any]  # what each returned; the first one's is measured
    bench: Call
    claim: Mapping[str, object] | None
    likes: Mapping[str, Likeness] = field(default_factory=dict)
    repeats: dict[str, tuple[list[str], list[Noise]]] = field(
        default_factory=dict, repr=False
    )
    """The first run's checksums and how far runs differ, by tensor; the same whatever the
    runs are held to."""

    def measured(self) -> Measured[Call]:
        """Returns the rows of the first run's tensors, with what was measured for them:
        one row for each tensor that has a yardstick or a distance, and each measured
        unit. Gradients are left out where none came back, and a tensor with a distance
        alone where it did not. A baseline or planted fault on sampled rows has no row for
        a tensor outside `by_row`; a planted fault has none for a distance alone. For the
        role `precision` the rows compare the exact results of rounded and unrounded
        inputs. Raises MeasurementError where one run lacks a tensor that is measured, and
        UsageError for a tensor in a dtype of no format."""
        task, bench, select = self.task, self.bench, self.bench.selection
        output: Returned = self.runs[0]
        present = output.tensors
        outside = bench.outside_sample(output) if task.role == "kernel" else {}
        tensors = self._tensors_to_measure()
        by_distance = {
            name: distance
            for name, distance in bench.distances.items()
            if name in present and task.role not in ("precision", "control")
        }
        # All that are measured, each in its own rows
        shared = {**identity(task), "tensors": (*tensors, *by_distance)}
        rows: list[DeviationRow] = []
        along: dict[str, Deviation] = {}
        for tensor in tensors:
            if tensor not in present:
                raise MeasurementError(f"the kernel returned no {tensor}")
            if task.role == "precision":
                rows += self._rows_of_input_rounding(tensor, shared)
                continue
            chosen = select.select(present[tensor], tensor)
            fmt = (
                bench.format if task.role == "floor" else bench.format_of(present[tensor])
            )
            along[tensor] = self.deviation(tensor, chosen, fmt)
            units = along[tensor].heads
            if tensor in self.likes and not tensor_spec(tensor).is_gradient:
                yardstick = bench.yardsticks[tensor].for_format(fmt)
                units = self.likes[tensor].without_its_bias(units, yardstick)
            if task.role == "kernel":
                bench.annotate(output, tensor, units, along[tensor], chosen)
            self._add_metrics_of_all_rows(units, tensor, outside)
            rows += self._make_rows(tensor, units, shared, fmt)
        for tensor, distance in by_distance.items():
            chosen = select.select(present[tensor], tensor)
            of = select.sampled_from(tensor)
            units = measure_plain(chosen, distance.exact, distance.empty, of=of).heads
            self._add_metrics_of_all_rows(units, tensor, outside)
            rows += self._make_rows(tensor, units, shared)
        held_to = {name: like.expected[name] for name, like in self.likes.items()}
        return Measured(
            rows=rows,
            output=output,
            held_to=held_to,
            along=along,
            bench=bench,
        )

    def _tensors_to_measure(self) -> tuple[str, ...]:
        """Returns the names of the tensors to be compared with rounding. Gradients are
        among them only where at least one came back. A baseline or planted fault on
        sampled rows has those alone that the measured rows give."""
        alone = self.task.role in ("baseline", "control")
        tensors = self.bench.by_row if alone else self.bench.yardsticks
        trained = any(tensor_spec(name).is_gradient for name in self.runs[0].tensors)
        return tuple(t for t in tensors if trained or not tensor_spec(t).is_gradient)

    def _rows_of_input_rounding(
        self, tensor: str, shared: Mapping[str, object]
    ) -> list[DeviationRow]:
        """Returns rows on how far the exact result of the rounded inputs is from that of
        the inputs as they came. `shared`: fields of all rows of the task."""
        yardstick = self.bench.yardsticks[tensor]
        assert yardstick.unrounded is not None
        moved = measure_plain(
            yardstick.reference,
            yardstick.unrounded,
            yardstick.empty,
            of=self.bench.selection.sampled_from(tensor),
        )
        return self._make_rows(tensor, moved.heads, shared)

    def deviation(self, tensor: str, x: Tensor, fmt: Format) -> Deviation:
        """Returns one tensor's metrics, compared with what is predicted for it. `x`: its
        measured units and rows; `fmt`: the format it counts as. For the role `floor`
        there is no comparison with a prediction, and no metric that needs one. Where
        nothing is predicted, AVERAGES and `worst_row` are None with the reason in
        `nulls`. AVERAGES and `baseline_ratio` are None too for a tensor that is not in
        `by_row`, as dk in sampled keys. An element that is not finite where the
        prediction is not finite either, though the exact result fits the format, is
        counted in `overflow` in place of `nonfinite`."""
        bench, select = self.bench, self.bench.selection
        yardstick = bench.yardsticks[tensor].for_format(fmt)
        of, bins = select.sampled_from(tensor), select.bins(tensor)
        measured = functools.partial(measure, x, yardstick, of=of, bins=bins)
        if self.task.role == "floor":
            return measured()
        # Of sampled keys single rows alone are judged, for no other way of rounding is
        # tried there.
        lacking = () if tensor in bench.by_row else (*AVERAGES, "baseline_ratio")
        why = bench.unpredicted(self.claim, fmt)
        if why is not None:
            deviation = measured()
            for unit in deviation.heads:
                nullify(unit, (*AVERAGES, "worst_row"), why)
                nullify(unit, lacking, NOT_PREDICTED)
            return deviation
        if (like := self.likes.get(tensor)) is None:
            expected = bench.expected(self.claim, self.runs[0])[tensor]
            claim = str((self.claim or {}).get("preset", "fa2"))
        else:
            expected, claim = like.expected[tensor], like.words
        deviation = measured(expected)
        for unit in deviation.heads:
            unit["claim"] = claim
            if lacking:
                nullify(unit, lacking, NOT_PREDICTED)
        if any(unit["nonfinite"] for unit in deviation.heads):
            # Where its rounding sites overflow too, that is its format's limit.
            over = yardstick.floor_finite & ~yardstick.empty[..., None]
            over &= ~x.isfinite() & ~expected.isfinite()
            counts = over.sum(dim=(0, 2, 3)).tolist()
            for unit, count in zip(deviation.heads, counts, strict=True):
                unit["nonfinite"], unit["overflow"] = unit["nonfinite"] - count, count
        return deviation

    def _add_metrics_of_all_rows(
        self,
        units: Sequence[Metrics],
        tensor: str,
        outside: Mapping[str, Sequence[Outside]],
    ) -> None:
        """Writes into each unit's metrics, in place, what concerns all its rows, measured
        or not: `nonfinite` (None with a reason where it is unknown), the first run's
        checksum (`bits`), and for several runs how far they differ (`noise`). For a
        planted fault it is `nonfinite` alone. `outside`: by tensor, what is not finite in
        rows that are not measured. Raises MeasurementError where a run lacks the tensor,
        or runs differ in its shape or dtype, unless it is a planted fault."""
        for unit, beyond in zip(units, outside.get(tensor, ()), strict=False):
            count = unit["nonfinite"] + beyond.nonfinite
            unit["nonfinite"] = count
            if beyond.unknown and not count:
                unit["nonfinite"] = None
                nullify(unit, ("nonfinite",), beyond.unknown)
        if self.task.role == "control":
            return
        if any(tensor not in run.tensors for run in self.runs):
            raise MeasurementError(
                f"runs on the same inputs differ in the kind of {tensor}"
            )
        if tensor not in self.repeats:
            whole = [
                self.bench.selection.select(r.tensors[tensor], tensor, all_rows=True)
                for r in self.runs
            ]
            noises = noise(whole) if len(whole) > 1 else []
            self.repeats[tensor] = checksums(whole[0]), noises
        sums, noises = self.repeats[tensor]
        for unit, bits in zip(units, sums, strict=True):
            unit["bits"] = bits
        for unit, differ in zip(units, noises, strict=False):
            unit["noise"] = None if differ.flickering else differ.noise
            if differ.flickering:
                why = (
                    f"{differ.flickering} elements are finite in some runs and not in "
                    "others"
                )
                nullify(unit, ("noise",), why)
            elif differ.noise is None:
                nullify(unit, ("noise",), "no element is finite")

    def _make_rows(
        self,
        tensor: str,
        units: Sequence[Metrics],
        shared: Mapping[str, object],
        out_format: Format | None = None,
    ) -> list[DeviationRow]:
        """Returns the report's rows of one tensor, one for each unit's metrics. `shared`:
        fields of all rows of the task; `out_format`: the format the tensor counts as;
        None where only its distance is measured."""
        task, bench, select = self.task, self.bench, self.bench.selection
        output: Returned = self.runs[0]
        x, is_gradient = output.tensors[tensor], tensor_spec(tensor).is_gradient
        limited = task.format == "float64" and task.role != "precision"
        fields: dict[str, object] = {
            **shared,
            "tensor": tensor,
            "status": "ok",
            "reason": bench.unscreened or ("reference-limited" if limited else None),
            "ran": output.ran_backward if is_gradient else output.ran,
            "out_format": out_format.name if out_format else None,
            "rows_measured": x.shape[0] * x.shape[2],
        }
        came_wider = out_format is bench.format and x.dtype != bench.dtype
        if task.role == "kernel" and came_wider:
            fields["came_in"] = format_of(x.dtype).name
        of = select.sampled_from(tensor)
        if of is not None and (drawn := select.drawn_rows(tensor)) is not None:
            fields |= {"sampled": True, "rows_measured": len(drawn)}
        if isinstance(of, Strata):
            fields["suspects"] = int(of.suspects.sum())
        return [
            DeviationRow.model_validate({**fields, "head": unit, **values})
            for unit, values in zip(select.units(tensor), units, strict=True)
        ]


def bare_row(task: Task, failure: Failure, tensor: str = FIRST_OUTPUT) -> DeviationRow:
    """Returns the single row, without numbers, of a task that gave no result. `tensor`: a
    gradient, where the task gave no gradients."""
    return DeviationRow(
        **identity(task),
        head=None,
        tensor=tensor,
        status=failure.status,
        reason=failure.reason,
    )


def identity(task: Task) -> dict[str, Any]:
    """Returns the fields of a row that name the task: those of its case, and role,
    kernel, format and options."""
    return {
        **vars(task.case),
        **{name: getattr(task, name) for name in ("role", "kernel", "format")},
        "options": dict(task.options),
    }


def options_set(options: Mapping[str, object], kernel: Kernel) -> dict[str, object]:
    """Returns the options to call the kernel with: those that differ from its defaults.
    `options`: as `recorded` returns them."""
    defaults = recorded(kernel.options)
    return {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}
