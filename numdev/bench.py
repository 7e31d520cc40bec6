"""One case on the bench: prepared in a format, put through kernels, measured.

What the tasks of one case share (the references, the floor, the baseline) is nearly all the cost of
an audit, so it is computed once per format and all the case's tasks follow each other. `run_task`
turns one task into its rows, and nothing that goes wrong inside a kernel, or in measuring what it
returned, reaches the other tasks.

Kernels always see the whole call. A selection of heads restricts what is measured: the reference is
computed for those heads alone, and outputs are cut down to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from numdev import deviation
from numdev.cases import AttentionCase, CaseRef
from numdev.deviation import Metrics, Yardstick
from numdev.errors import MeasurementError, Refused
from numdev.execute import Task
from numdev.formats import Format, format_named, format_of, round_to
from numdev.kernels import Kernel, Output, find
from numdev.kernels.reference import Reference, attend
from numdev.report import CaseRecord, DeviationRow, Status, WeightRow
from numdev.suspicion import far_off, suspect
from numdev.system import System


@dataclass(frozen=True)
class Failure:
    """Why there is no output. Plain words: an exception would keep the kernel's tensors alive."""

    status: Status
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A case in one format, with everything its kernels are measured against."""

    case: AttentionCase
    """Whole: what kernels are given."""
    unrounded: Reference
    reference: Reference
    """Of the selected heads, as are all that follow."""
    baseline: Output | Failure
    yardstick: Yardstick


class Bench:
    """One case. Loads it when first needed, and prepares one format at a time."""

    def __init__(
        self, ref: CaseRef, load: Callable[[], AttentionCase], heads: Sequence[int] | None = None
    ) -> None:
        self.ref, self._load, self._heads = ref, load, heads
        self._at: Prepared | None = None

    @cached_property
    def case(self) -> AttentionCase:
        return self._load()

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """The query heads that are measured, in the order of the case."""
        chosen = self._heads
        return tuple(h for h in range(self.case.heads) if chosen is None or h in chosen)

    @cached_property
    def _unrounded(self) -> Reference:
        return attend(self._selected(self.case))

    def at(self, format_name: str) -> Prepared:
        """The case prepared in a format."""
        fmt = format_named(format_name)
        if self._at is None or self._at.yardstick.format != fmt:
            self._at = None  # free one format's tensors before making the next one's
            self._at = self._prepare(fmt)
        return self._at

    def select(self, x: Tensor) -> Tensor:
        """The measured heads of a tensor [batch, heads, ...]."""
        return x if len(self.heads) == self.case.heads else x[:, list(self.heads)]

    def _selected(self, case: AttentionCase) -> AttentionCase:
        whole = len(self.heads) == case.heads
        return case if whole else case.select_heads(list(self.heads))

    def _prepare(self, fmt: Format) -> Prepared:
        case = self.case.rounded_to(fmt)
        unchanged = fmt.contains(self.case.format)
        reference = self._unrounded if unchanged else attend(self._selected(case))
        baseline = _attempt(find("baseline"), case)
        return Prepared(
            case=case,
            unrounded=self._unrounded,
            reference=reference,
            baseline=baseline,
            yardstick=Yardstick(
                reference=reference.out,
                term_scale=reference.term_scale,
                empty=reference.empty,
                format=fmt,
                lse=reference.lse,
                baseline=self.select(baseline.out) if isinstance(baseline, Output) else None,
                unrounded=self._unrounded.out,
            ),
        )


def run_task(task: Task, kernel: Kernel, bench: Bench, system: System) -> list[DeviationRow]:
    """The rows of one task: one per head and tensor, or a single one that says why there is none.

    A kernel that is missing or declines is `skipped`; one that raises, or whose output cannot be
    measured, is `failed`. So is every task of a case too large for its reference.
    """
    missing = kernel.missing(system)
    if missing:
        return [_bare_row(task, Failure("skipped", missing))]
    try:
        prepared = bench.at(task.format)
        output = _output_of(task, kernel, prepared)
        if isinstance(output, Failure):
            return [_bare_row(task, output)]
        return _measured_rows(task, output, prepared, bench)
    except (RuntimeError, TypeError, ValueError, MeasurementError) as error:
        return [_bare_row(task, Failure("failed", f"while measuring: {_one_line(error)}"))]


def case_record(case: AttentionCase, axes: Mapping[str, Any] | None = None) -> CaseRecord:
    """What a case is, in plain data, for the report."""
    mask: Literal["none", "bool", "additive"] = "none"
    if case.mask is not None:
        mask = "bool" if case.mask.dtype == torch.bool else "additive"
    return CaseRecord(
        case=case.ref.case,
        batch=case.q.shape[0],
        heads=case.heads,
        kv_heads=case.kv_heads,
        q_len=case.q_len,
        kv_len=case.kv_len,
        head_dim=case.q.shape[3],
        v_dim=case.v.shape[3],
        source_format=case.format.name,
        mask=mask,
        is_causal=case.is_causal,
        causal_offset=case.causal_offset,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks is not None,
        scale=case.scale,
        axes=dict(axes or {}),
    )


def weight_row(name: str, tensor: Tensor, fmt: Format) -> WeightRow:
    """What casting a stored tensor to a format costs.

    Elements the format cannot hold, or that were not finite to begin with, are counted and left
    out of the averages.
    """
    wide = tensor.double()
    error = round_to(wide, fmt) - wide
    usable = error.isfinite()
    size, norm = error[usable].abs(), float(wide[usable].norm())
    mean = float(size.mean()) if size.numel() else None
    return WeightRow(
        tensor=name,
        shape=tuple(tensor.shape),
        stored=str(tensor.dtype).removeprefix("torch."),
        format=fmt.name,
        elements=tensor.numel(),
        nonfinite=int((~usable).sum()),
        max_abs=float(size.max()) if size.numel() else None,
        mean_abs=mean,
        rel=float(size.norm()) / norm if size.numel() and norm else None,
        w1=mean,
    )


def recorded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a report can hold them: what JSON has no word for (a dtype, infinity) by name."""
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


def _given(task: Task, kernel: Kernel) -> dict[str, Any]:
    """The options to call the kernel with: those that are not its defaults."""
    defaults = recorded(kernel.options)
    return {k: v for k, v in task.options.items() if k not in defaults or v != defaults[k]}


def _attempt(kernel: Kernel, case: AttentionCase, **options: Any) -> Output | Failure:
    """The kernel's output, or what went wrong: a kernel is foreign code, anything may come out.

    It gets a copy of the inputs, so that writing into them spoils no other kernel's.
    """
    try:
        with torch.no_grad():
            output = kernel.attend(_copy(case), **options)
        if case.q.is_cuda:
            torch.cuda.synchronize()  # a fault of this kernel comes out here, not in the next one
        return output
    except Refused as refusal:
        return Failure("skipped", refusal.message)
    except Exception as error:
        return Failure("failed", _one_line(error))
    except SystemExit as stop:
        return Failure("failed", f"it ended the program (exit code {stop.code})")


def _copy(case: AttentionCase) -> AttentionCase:
    parts: dict[str, Any] = {
        f.name: x.clone()
        for f in dataclasses.fields(case)
        if isinstance(x := getattr(case, f.name), Tensor)
    }
    return dataclasses.replace(case, **parts)


def _output_of(task: Task, kernel: Kernel, prepared: Prepared) -> Output | Failure:
    """What the task's kernel computes; reference, floor and baseline are prepared already."""
    if task.role == "precision":
        return Output(out=prepared.reference.out)
    if task.role == "floor":
        return Output(out=prepared.yardstick.floor)
    if task.role == "baseline":
        return prepared.baseline
    return _attempt(kernel, prepared.case, **_given(task, kernel))


def _measured_rows(
    task: Task, output: Output, prepared: Prepared, bench: Bench
) -> list[DeviationRow]:
    exact = prepared.reference
    if task.role == "precision":
        metrics = deviation.measure_plain(exact.out, prepared.unrounded.out, exact.empty)
        return _rows(task, "out", metrics, output, bench)
    if task.role == "floor":  # float64 values of the case's format, of the selected heads already
        metrics = deviation.measure(output.out, prepared.yardstick)
        return _rows(task, "out", metrics, output, bench, prepared.yardstick.format)
    fmt = _returned(output.out, prepared.case)
    metrics = deviation.measure(bench.select(output.out), prepared.yardstick.for_format(fmt))
    if task.role == "kernel":
        metrics = _with_suspicion(metrics, output, prepared, bench)
    rows = _rows(task, "out", metrics, output, bench, fmt)
    if output.lse is not None:
        lse = deviation.measure_plain(bench.select(output.lse), exact.lse, exact.empty)
        rows += _rows(task, "lse", lse, output, bench)
    return rows


def _with_suspicion(
    metrics: Sequence[Metrics], output: Output, prepared: Prepared, bench: Bench
) -> list[Metrics]:
    """The metrics, and for heads that are far off what the kernel seems to compute instead."""
    far = [h for h, head in zip(bench.heads, metrics, strict=True) if far_off(head)]
    if not far:
        return list(metrics)
    found = suspect(prepared.case, output.out, prepared.reference, bench.heads, far)
    return [
        {**head, "suspicion": found[h].cause, "suspicion_cut": found[h].cut} if h in found else head
        for h, head in zip(bench.heads, metrics, strict=True)
    ]


def _returned(out: Tensor, case: AttentionCase) -> Format:
    """The format an output is in: its dtype's, unless it came in the dtype that stores the case's
    working format. (What a kernel computes in a wider one it must then return in a wider dtype.)"""
    return case.format if out.dtype == case.q.dtype else format_of(out.dtype)


def _rows(
    task: Task,
    tensor: str,
    metrics: Sequence[Metrics],
    output: Output,
    bench: Bench,
    out_format: Format | None = None,
) -> list[DeviationRow]:
    limited = task.format == "float64" and task.role != "precision"
    shared = {
        **_identity(task),
        "tensor": tensor,
        "status": "ok",
        "reason": "reference-limited" if limited else None,
        "ran": output.ran,
        "out_format": out_format.name if out_format else None,
    }
    return [
        DeviationRow.model_validate({**shared, "head": head, **values})
        for head, values in zip(bench.heads, metrics, strict=True)
    ]


def _bare_row(task: Task, failure: Failure) -> DeviationRow:
    return DeviationRow(
        **_identity(task), head=None, tensor="out", status=failure.status, reason=failure.reason
    )


def _identity(task: Task) -> dict[str, Any]:
    ref = task.case
    return {
        "case": ref.case,
        "source": ref.source,
        "module": ref.module,
        "layer": ref.layer,
        "call": ref.call,
        "seed": ref.seed,
        "phase": ref.phase,
        "role": task.role,
        "kernel": task.kernel,
        "options": dict(task.options),
        "format": task.format,
    }


def _one_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
