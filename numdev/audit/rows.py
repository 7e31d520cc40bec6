"""The rows of a report: those of one measured kernel, and of a case."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from numdev.audit.bench import Bench
from numdev.audit.isolation import Failure
from numdev.audit.plan import Task, recorded
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.explain.wrong_function import far_off, suspect
from numdev.formats import Format, format_of
from numdev.kernels import Kernel, Output
from numdev.kernels.emulation.kernel import returning, unexpected
from numdev.kernels.output import GRADIENTS
from numdev.metrics.bits import checksums
from numdev.metrics.deviation import Deviation, Metrics, measure, measure_plain
from numdev.metrics.finiteness import all_finite
from numdev.metrics.noise import Noise, noise
from numdev.metrics.sampling import Strata
from numdev.operations.attention.finiteness import (
    Elsewhere,
    elsewhere,
    inputs_finite,
    nonfinite_inputs,
    overflowing_inputs,
)
from numdev.report import NOT_PREDICTED, CaseRecord, DeviationRow
from numdev.sources.tensorfile import kind_of

if TYPE_CHECKING:
    from numdev.audit.explanations import Likeness

# Over all rows, beside what is predicted
AVERAGES = ("expected_ratio", "rms_ratio", "rms_rows")
# What measuring may raise on strange outputs, and costs the row, not the audit.
FAILS_ONE_ROW = (RuntimeError, TypeError, ValueError, MeasurementError, UsageError)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    # One per head and tensor, or a single one that says why there is none
    rows: list[DeviationRow]
    # What the kernel returned first; None where it returned nothing
    output: Output | None = None
    held_to: Mapping[str, Tensor] = field(default_factory=dict)
    """By tensor, the way of rounding it was held to, where that is not its claim's."""
    along: Mapping[str, Deviation] = field(default_factory=dict)
    """By tensor, with sums by bin of positions."""
    bench: Bench | None = None  # that it was measured on


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a task, and what they are held to: what the kernel's roundings predict,
    its claim's, or those of the way of `likes` that explains it."""

    task: Task
    runs: Sequence[Output]
    bench: Bench
    claim: Mapping[str, Any] | None
    likes: Mapping[str, Likeness] = field(default_factory=dict)
    repeats: dict[str, tuple[list[str], list[Noise]]] = field(
        default_factory=dict, repr=False
    )
    """By tensor, the first run's checksums and how far runs differ: whatever they are
    held to."""

    def measured(self) -> Measured:
        """Rows of every tensor of the first run. MeasurementError where one is
        lacking."""
        task, output, bench, select = (
            self.task,
            self.runs[0],
            self.bench,
            self.bench.selection,
        )
        rest = self.elsewhere()
        trained = any(getattr(output, name) is not None for name in GRADIENTS)
        # What was computed of sampled queries alone has no dk and dv.
        tensors = (
            bench.by_row if task.role in ("baseline", "control") else (*bench.yardsticks,)
        )
        tensors = tuple(tensors) if trained else ("out",)
        lse = None if task.role in ("precision", "control") else output.lse
        every = (*tensors, *(() if lse is None else ("lse",)))
        rows: list[DeviationRow] = []
        along: dict[str, Deviation] = {}
        for tensor in tensors:
            x, y = getattr(output, tensor), bench.yardsticks[tensor]
            if x is None:
                raise MeasurementError(f"the kernel returned no {tensor}")
            if task.role == "precision":
                assert y.unrounded is not None
                of = select.sampled_from(tensor)
                moved = measure_plain(y.reference, y.unrounded, y.empty, of=of)
                rows += self.shown(tensor, moved.heads)
                continue
            chosen = select.select(x, tensor)
            fmt = bench.format if task.role == "floor" else returned(x, bench.case)
            along[tensor] = self.deviation(tensor, chosen, fmt)
            heads = along[tensor].heads
            if tensor == "out" and tensor in self.likes:
                heads = self.likes[tensor].without_its_bias(heads, y.for_format(fmt))
            if task.role == "kernel" and tensor == "out":
                self.suspect(heads, chosen)
                for head in heads if output.not_lse else ():
                    why = f"the kernel returned {output.not_lse}"
                    head["nulls"] = {**head["nulls"], "lse_error": why}
            if task.role == "kernel" and tensor == "dq":
                self.count_in_empty_rows(heads, chosen)
            self.finish(heads, tensor, rest)
            rows += self.shown(tensor, heads, fmt)
        if lse is not None:
            exact, lse = bench.reference, select.select(lse)
            heads = measure_plain(
                lse, exact.lse, exact.empty, of=select.sampled_from("lse")
            ).heads
            self.finish(heads, "lse", rest)
            rows += self.shown("lse", heads)
        held_to = {name: like.expected[name] for name, like in self.likes.items()}
        rows = [row.model_copy(update={"tensors": every}) for row in rows]
        return Measured(
            rows=rows, output=output, held_to=held_to, along=along, bench=bench
        )

    def deviation(self, tensor: str, x: Tensor, fmt: Format) -> Deviation:
        """One tensor's metrics beside what is predicted of it."""
        bench, select = self.bench, self.bench.selection
        y, bins = bench.yardsticks[tensor].for_format(fmt), select.bins_of(tensor)
        measured = functools.partial(
            measure, x, y, of=select.sampled_from(tensor), bins=bins
        )
        if self.task.role == "floor":
            return measured()
        # Of sampled keys single rows alone are judged, for no other way of rounding is
        # tried there.
        lacking = () if tensor in bench.by_row else (*AVERAGES, "baseline_ratio")
        why = unexpected(self.claim, bench.case.format, fmt)
        if why is not None:
            deviation = measured()
            for head in deviation.heads:
                _null(head, (*AVERAGES, "worst_row"), why)
                _null(head, lacking, NOT_PREDICTED)
            return deviation
        if (like := self.likes.get(tensor)) is None:
            changed = returning(self.claim, bench.case, formats_of(self.runs[0], bench))
            expected = bench.predicted(changed)[tensor]
            whose = str((self.claim or {}).get("preset", "fa2"))
        else:
            expected, whose = like.expected[tensor], like.words
        deviation = measured(expected)
        for head in deviation.heads:
            head["claim"] = whose
            _null(head, lacking, NOT_PREDICTED)
        if any(head["nonfinite"] for head in deviation.heads):
            over = y.floor_finite & y.seen & ~x.isfinite() & ~expected.isfinite()
            for head, count in zip(
                deviation.heads, over.sum(dim=(0, 2, 3)).tolist(), strict=True
            ):
                head["nonfinite"], head["overflow"] = head["nonfinite"] - count, count
        return deviation

    def elsewhere(self) -> dict[str, list[Elsewhere]]:
        """What of a kernel's tensors is not finite in the rows that are not measured, by
        tensor; nothing where all that came back is finite, as it should be."""
        bench, output, select = self.bench, self.runs[0], self.bench.selection
        if self.task.role != "kernel" or select.queries is None:
            return {}
        formats = formats_of(output, bench)
        if output.lse is not None:
            formats["lse"] = format_of(output.lse.dtype)
        whole = {
            name: select.select_heads(getattr(output, name), name) for name in formats
        }
        if all_finite(whole.values()) and inputs_finite(bench.case):
            return {}
        case = select.with_heads(bench.case)
        return {
            name: elsewhere(x, name, case, select.drawn_rows(name), formats[name])
            for name, x in whole.items()
        }

    def suspect(self, heads: Sequence[Metrics], x: Tensor) -> None:
        """How much is not finite in rows without a key; what heads far off seem to
        compute."""
        bench, select = self.bench, self.bench.selection
        if any(head["empty_rows"] for head in heads):
            wrong = ~x.isfinite() & bench.yardsticks["out"].empty[..., None]
            for head, count in zip(heads, wrong.sum(dim=(0, 2, 3)).tolist(), strict=True):
                head["empty_nonfinite"] = count
        far = [h for h, head in zip(select.heads, heads, strict=True) if far_off(head)]
        if not far or not bench.watch.searching:
            return
        out, exact = self.runs[0].out, bench.reference
        with bench.watch("names"):
            causes = suspect(bench.case, out, exact, select.heads, far, select.queries)
        for h, head in zip(select.heads, heads, strict=True):
            if h in causes:
                head.update(causes[h].fields)

    def count_in_empty_rows(self, heads: Sequence[Metrics], dq: Tensor) -> None:
        """Adds to `nonfinite` what is not finite of dq in rows that see no key: what such
        a row returns is a convention, but nothing that follows depends on its query,
        whose gradient is 0. It reaches the weights that make the query."""
        wrong = ~dq.isfinite() & self.bench.yardsticks["dq"].empty[..., None]
        for head, count in zip(heads, wrong.sum(dim=(0, 2, 3)).tolist(), strict=True):
            head["nonfinite"] += count

    def finish(
        self,
        heads: Sequence[Metrics],
        tensor: str,
        rest: Mapping[str, Sequence[Elsewhere]],
    ) -> None:
        """What holds of all rows: `nonfinite`, the first run's checksum, how far runs
        differ."""
        for head, there in zip(heads, rest.get(tensor, ()), strict=False):
            count = head["nonfinite"] + there.nonfinite
            head["nonfinite"] = count
            if there.unknown and not count:
                head["nonfinite"] = None
                _null(head, ("nonfinite",), there.unknown)
        if self.task.role == "control":
            return
        tensors = [getattr(run, tensor) for run in self.runs]
        if any(x is None for x in tensors):
            raise MeasurementError(
                f"runs on the same inputs differ in the kind of {tensor}"
            )
        if tensor not in self.repeats:
            whole = [self.bench.selection.select_heads(x, tensor) for x in tensors]
            noises = noise(whole) if len(whole) > 1 else []
            self.repeats[tensor] = checksums(whole[0]), noises
        sums, noises = self.repeats[tensor]
        for head, bits in zip(heads, sums, strict=True):
            head["bits"] = bits
        for head, its in zip(heads, noises, strict=False):
            head["noise"] = None if its.flickering else its.noise
            if its.flickering:
                why = (
                    f"{its.flickering} elements are finite in some runs and not in others"
                )
                _null(head, ("noise",), why)
            elif its.noise is None:
                _null(head, ("noise",), "no element is finite")

    def shown(
        self, tensor: str, heads: Sequence[Metrics], out_format: Format | None = None
    ) -> list[DeviationRow]:
        task, output, select = self.task, self.runs[0], self.bench.selection
        its = getattr(output, tensor)
        limited = task.format == "float64" and task.role != "precision"
        shared = {
            **identity(task),
            "tensor": tensor,
            "status": "ok",
            "reason": self.bench.unscreened or ("reference-limited" if limited else None),
            "ran": output.ran_backward if tensor in GRADIENTS else output.ran,
            "out_format": out_format.name if out_format else None,
            "rows_measured": its.shape[0] * its.shape[2],
        }
        case = self.bench.case
        if (
            task.role == "kernel"
            and out_format is case.format
            and its.dtype != case.q.dtype
        ):
            shared["came_in"] = format_of(its.dtype).name
        rows, of = select.drawn_rows(tensor), select.sampled_from(tensor)
        if rows is not None and of is not None:
            shared |= {"sampled": True, "rows_measured": len(rows)}
        if isinstance(of, Strata):
            shared["suspects"] = int(of.suspects.sum())
        return [
            DeviationRow.model_validate({**shared, "head": head, **values})
            for head, values in zip(select.heads_of(tensor), heads, strict=True)
        ]


def _null(head: Metrics, names: Sequence[str], why: str) -> None:
    head.update(dict.fromkeys(names))
    head["interval"] = {
        k: v for k, v in head.get("interval", {}).items() if k not in names
    }
    head["nulls"] = {**head["nulls"], **dict.fromkeys(names, why)}


def bare_row(
    task: Task, failure: Failure, tensor: Literal["out", "dq"] = "out"
) -> DeviationRow:
    """The only row of a task, or of its gradients, without a result."""
    return DeviationRow(
        **identity(task),
        head=None,
        tensor=tensor,
        status=failure.status,
        reason=failure.reason,
    )


def identity(task: Task) -> dict[str, Any]:
    """The fields of a row that say what the task was."""
    return {
        **vars(task.case),
        **{name: getattr(task, name) for name in ("role", "kernel", "format")},
        "options": dict(task.options),
    }


def returned(out: Tensor, case: AttentionCase) -> Format:
    """The format an output is in: its dtype's, unless it came in the dtype that stores
    the case's working format, or in a wider one and holds numbers of the working format
    alone. (What a kernel computes in a wider one it must then return in a wider
    dtype.)"""
    narrow, wide = case.q.dtype, format_of(out.dtype)
    if out.dtype != narrow and case.working is None and wide.contains(case.format):
        same = out.to(narrow).to(out.dtype) == out
        return case.format if bool((same | out.isnan()).all()) else wide
    return case.format if out.dtype == narrow else wide


def formats_of(output: Output, bench: Bench) -> dict[str, Format]:
    """The format of every tensor that came back."""
    tensors = {name: getattr(output, name) for name in bench.yardsticks}
    return {name: returned(x, bench.case) for name, x in tensors.items() if x is not None}


def given(options: Mapping[str, Any], kernel: Kernel) -> dict[str, Any]:
    """The options to call the kernel with: those that are not its defaults."""
    defaults = recorded(kernel.options)
    return {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}


def case_record(
    case: AttentionCase,
    axes: Mapping[str, Any] | None = None,
    formats: Sequence[Format] = (),
) -> CaseRecord:
    """What a call was, all of its heads; `formats`: those that its inputs are rounded
    to."""
    same = (
        "heads",
        "kv_heads",
        "q_len",
        "kv_len",
        "is_causal",
        "causal_offset",
        "window",
    )
    return CaseRecord(
        case=case.ref.case,
        batch=case.q.shape[0],
        head_dim=case.q.shape[3],
        v_dim=case.v.shape[3],
        source_format=case.format.name,
        mask=kind_of(case.mask),
        sinks=case.sinks is not None,
        grad_out=case.grad_out_from or ("given" if case.grad_out is not None else None),
        threads=None if case.q.is_cuda else torch.get_num_threads(),
        axes=dict(axes or {}),
        nonfinite=nonfinite_inputs(case),
        overflows=overflowing_inputs(case, formats),
        **{name: getattr(case, name) for name in (*same, "softcap", "scale")},
    )
