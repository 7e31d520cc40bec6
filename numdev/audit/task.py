"""One kernel on one case: its output, and the rows that say how far it is from the truth.

Nothing that goes wrong inside a kernel, or in measuring what it returned, reaches other tasks: it
becomes a row with a reason.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from numdev.audit.attempt import Failure, attempt, one_line
from numdev.audit.bench import Bench
from numdev.audit.plan import Task
from numdev.audit.records import recorded
from numdev.audit.undeclared import Likeness, beyond, likeness, with_bias_explained
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.explain.wrong_function import far_off, suspect
from numdev.formats import Format, format_of
from numdev.kernels import Kernel, Output
from numdev.kernels.emulation.predict import returning, unexpected
from numdev.kernels.output import GRADIENTS
from numdev.metrics.bits import checksums
from numdev.metrics.deviation import Deviation, Metrics, measure, measure_plain, measure_precision
from numdev.metrics.finiteness import Elsewhere, all_finite, elsewhere
from numdev.metrics.noise import noise
from numdev.report import NOT_PREDICTED, DeviationRow
from numdev.system import System

# What measuring may raise on strange outputs, and costs the row, not the audit.
COUNTED = (RuntimeError, TypeError, ValueError, MeasurementError, UsageError)
RETURNED = ("out", "lse", *GRADIENTS)


class Runner(Protocol):
    """Where a kernel is run: `attempt` here, or in a process of its own."""

    def __call__(
        self,
        kernel: Kernel,
        case: AttentionCase,
        options: Mapping[str, Any],
        *,
        gradients: bool = False,
    ) -> Output | Failure: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What came of one task."""

    rows: list[DeviationRow]
    """One per head and tensor, or a single one that says why there is none."""
    output: Output | None = None
    """What the kernel returned first; None where it returned nothing."""
    held_to: Mapping[str, Tensor] | None = None
    """By tensor, the way of rounding the output was held to, where its claim predicts another."""
    along: Mapping[str, Deviation] = dataclasses.field(default_factory=dict)
    """By tensor, with sums by bin of positions."""


def measure_task(
    task: Task, kernel: Kernel, bench: Bench, system: System, run: Runner = attempt
) -> Measured:
    """A kernel on a prepared case.

    A kernel that is missing or declines is `skipped`; one that raises, or whose output cannot be
    measured, is `failed`. Where the forward pass runs and a training step does not, the output is
    measured, and one row of dq says why there is no gradient.
    """
    missing = kernel.missing(system)
    if missing:
        return Measured(rows=[bare_row(task, Failure("skipped", missing))])
    try:
        with bench.watch("metrics"):
            return _measured(task, kernel, bench, system, run)
    except COUNTED as error:
        failure = Failure("failed", f"while measuring: {one_line(error)}")
        return Measured(rows=[bare_row(task, failure)])


def _measured(task: Task, kernel: Kernel, bench: Bench, system: System, run: Runner) -> Measured:
    runs = _runs(task, kernel, bench, run)
    lacking: Failure | None = None
    if isinstance(runs, Failure) and task.gradients and task.role == "kernel":
        forward = _runs(dataclasses.replace(task, gradients=False), kernel, bench, run)
        if not isinstance(forward, Failure):
            lacking, runs = runs, forward
    if isinstance(runs, Failure):
        return Measured(rows=[bare_row(task, runs)])
    claim = kernel.claims(bench.case, runs[0], system)
    measured = _rows_of(task, runs, bench, claim, None)
    if task.role == "kernel" and not kernel.declares and (wrong := beyond(measured.rows)):
        like = likeness(runs[0], wrong, formats_of(runs[0], bench), bench, system)
        if like is not None:
            measured = _rows_of(task, runs, bench, claim, like)
    if lacking is None:
        return measured
    return dataclasses.replace(measured, rows=[*measured.rows, _no_gradients(task, lacking)])


def _runs(task: Task, kernel: Kernel, bench: Bench, run: Runner) -> list[Output] | Failure:
    """What the task's kernel returns, as often as asked; what is prepared already, once."""
    exact, y = bench.reference, bench.yardsticks
    names = [n for n in GRADIENTS if task.gradients]
    if task.role == "precision":
        return [Output(out=exact.out, **{n: getattr(exact, n) for n in names})]
    if task.role == "floor":
        floors = {n: y[n].floor for n in names}
        return [Output(out=y["out"].floor, ran=exact.by, ran_backward=exact.by, **floors)]
    if task.role == "baseline":
        return bench.baseline if isinstance(bench.baseline, Failure) else [bench.baseline]
    case = bench.measured if task.role == "control" else bench.case
    runs = []
    with bench.watch("other" if task.role == "control" else "kernels"):
        for _ in range(max(1, task.repeats)):
            output = run(kernel, case, given(task, kernel), gradients=task.gradients)
            if isinstance(output, Failure):
                return output
            runs.append(output)
    return runs


def _rows_of(
    task: Task,
    runs: Sequence[Output],
    bench: Bench,
    claim: Mapping[str, Any] | None,
    like: Likeness | None,
) -> Measured:
    """Rows of every tensor of the first run, beside what the kernel's roundings predict: its
    claim's, or those of the way `like` that explains it."""
    output, exact, selection = runs[0], bench.reference, bench.selection
    formats = formats_of(output, bench)
    rest = _elsewhere(task, output, formats, bench)
    trained = any(getattr(output, name) is not None for name in GRADIENTS)
    # What was computed of sampled queries alone has no dk and dv.
    tensors = bench.by_row if task.role in ("baseline", "control") else bench.tensors
    rows: list[DeviationRow] = []
    along: dict[str, Deviation] = {}
    for tensor in tensors if trained else ("out",):
        x = getattr(output, tensor)
        if x is None:
            raise MeasurementError(f"it returned no {tensor}")
        chosen = selection.select(x, tensor)
        if task.role == "precision":
            y = bench.yardsticks[tensor]
            heads = measure_precision(y, of=selection.sampled_from(tensor)).heads
            rows += _rows(task, tensor, heads, output, bench)
            continue
        fmt = bench.format if task.role == "floor" else returned(x, bench.case)
        heads, along[tensor] = _heads(task, tensor, chosen, fmt, bench, claim, formats, like)
        if tensor in rest:
            heads = _with_the_rest(heads, rest[tensor])
        if task.role == "kernel" and tensor == "out":
            heads = _with_empty_rows(heads, chosen, bench)
            heads = _with_suspicion(heads, output, bench)
        heads = _with_bits_and_noise(heads, task, tensor, runs, bench)
        if (response := bench.amplification.get(tensor)) is not None:
            pairs = zip(heads, response, strict=True)
            heads = [{**head, "amplification": its} for head, its in pairs]
        rows += _rows(task, tensor, heads, output, bench, fmt)
    if output.lse is not None and task.role not in ("precision", "control"):
        lse = selection.select(output.lse)
        of = selection.sampled_from("lse")
        heads = measure_plain(lse, exact.lse, exact.empty, of=of).heads
        if "lse" in rest:
            heads = _with_the_rest(heads, rest["lse"])
        heads = _with_bits_and_noise(heads, task, "lse", runs, bench)
        rows += _rows(task, "lse", heads, output, bench)
    return Measured(
        rows=rows,
        output=output,
        held_to=None if like is None else like.expected,
        along=along,
    )


def _heads(
    task: Task,
    tensor: str,
    x: Tensor,
    fmt: Format,
    bench: Bench,
    claim: Mapping[str, Any] | None,
    formats: Mapping[str, Format],
    like: Likeness | None,
) -> tuple[list[Metrics], Deviation]:
    """One tensor's metrics beside what is predicted of it."""
    y = bench.yardsticks[tensor].for_format(fmt)
    of, bins = bench.selection.sampled_from(tensor), bench.selection.bins_of(tensor)
    measured = functools.partial(measure, x, y, of=of, bins=bins)
    if task.role == "floor":
        deviation = measured()
        return deviation.heads, deviation
    if tensor not in bench.by_row:
        deviation = measured()
        sampled = ("expected_ratio", "worst_row", "baseline_ratio", "amplification")
        return [_with_nulls(head, sampled, NOT_PREDICTED) for head in deviation.heads], deviation
    why = unexpected(claim, bench.case.format, fmt)
    if why is not None:
        deviation = measured()
        lacking = ("expected_ratio", "worst_row")
        return [_with_nulls(head, lacking, why) for head in deviation.heads], deviation
    if like is not None:
        expected, whose = like.expected[tensor], like.words
    else:
        expected = bench.predicted(returning(claim, bench.case, formats))[tensor]
        whose = str((claim or {}).get("preset", "fa2"))
    deviation = measured(expected)
    heads = deviation.heads
    if like is not None and tensor == "out":
        heads = with_bias_explained(heads, like, y)
    return [{**head, "claim": whose} for head in heads], deviation


# --- what rows say beside their metrics ----------------------------------------------------------


def _elsewhere(
    task: Task, output: Output, formats: Mapping[str, Format], bench: Bench
) -> dict[str, list[Elsewhere]]:
    """What of a kernel's tensors is not finite in the rows that are not measured, by tensor;
    nothing where all that came back is finite, as it should be."""
    if task.role != "kernel" or not bench.sampled:
        return {}
    formats = dict(formats)
    if output.lse is not None:
        formats["lse"] = format_of(output.lse.dtype)
    select = bench.selection
    whole = {name: select.select_heads(getattr(output, name), name) for name in formats}
    if bench.inputs_finite and all_finite(whole.values()):
        return {}
    case = select.with_heads(bench.case)
    return {
        name: elsewhere(x, name, case, select.rows_of(name), formats[name])
        for name, x in whole.items()
    }


def _with_the_rest(heads: Sequence[Metrics], rest: Sequence[Elsewhere]) -> list[Metrics]:
    """`nonfinite` over all rows; where those that are not measured leave it open, why."""
    completed = []
    for head, there in zip(heads, rest, strict=True):
        count = head["nonfinite"] + there.nonfinite
        if there.unknown and not count:
            head = _with_nulls({**head, "nonfinite": None}, ("nonfinite",), there.unknown)
            completed.append(head)
        else:
            completed.append({**head, "nonfinite": count})
    return completed


def _with_empty_rows(heads: list[Metrics], x: Tensor, bench: Bench) -> list[Metrics]:
    """Of each head how much is not finite in rows that see no key."""
    if not any(head["empty_rows"] for head in heads):
        return heads
    wrong = ~x.isfinite() & bench.yardsticks["out"].empty[..., None]
    counts = wrong.sum(dim=(0, 2, 3)).tolist()
    return [{**head, "empty_nonfinite": n} for head, n in zip(heads, counts, strict=True)]


def _with_suspicion(heads: list[Metrics], output: Output, bench: Bench) -> list[Metrics]:
    """For heads that are far off, what the kernel seems to compute instead."""
    select = bench.selection
    far = [h for h, head in zip(select.heads, heads, strict=True) if far_off(head)]
    if not far:
        return heads
    causes = suspect(bench.case, output.out, bench.reference, select.heads, far, select.queries)
    return [
        {**head, "suspicion": causes[h].cause, "suspicion_cut": causes[h].cut}
        if h in causes
        else head
        for h, head in zip(select.heads, heads, strict=True)
    ]


def _with_bits_and_noise(
    heads: list[Metrics], task: Task, tensor: str, runs: Sequence[Output], bench: Bench
) -> list[Metrics]:
    """The checksum of each whole head of the first run, and how far runs differ."""
    if task.role in ("precision", "control"):
        return heads
    tensors = [getattr(run, tensor) for run in runs]
    if any(x is None for x in tensors):
        raise MeasurementError(f"runs on the same inputs differ in the kind of {tensor}")
    whole = [bench.selection.select_heads(x, tensor) for x in tensors]
    bits = checksums(whole[0])
    heads = [{**head, "bits": its} for head, its in zip(heads, bits, strict=True)]
    if len(runs) < 2:
        return heads
    noisy = []
    for head, its in zip(heads, noise(whole), strict=True):
        head = {**head, "noise": its.noise}
        if its.flickering:
            why = f"{its.flickering} elements are finite in some runs and not in others"
            head = _with_nulls({**head, "noise": None}, ("noise",), why)
        elif its.noise is None:
            head = _with_nulls(head, ("noise",), "no element is finite")
        noisy.append(head)
    return noisy


def _with_nulls(head: Metrics, names: Sequence[str], why: str) -> Metrics:
    return {**head, "nulls": {**head["nulls"], **dict.fromkeys(names, why)}}


# --- rows ----------------------------------------------------------------------------------------


def _rows(
    task: Task,
    tensor: str,
    heads: Sequence[Metrics],
    output: Output,
    bench: Bench,
    out_format: Format | None = None,
) -> list[DeviationRow]:
    limited = task.format == "float64" and task.role != "precision"
    shared = {
        **identity(task),
        "tensor": tensor,
        "status": "ok",
        "reason": "reference-limited" if limited else None,
        "ran": output.ran_backward if tensor in GRADIENTS else output.ran,
        "out_format": out_format.name if out_format else None,
    }
    rows = bench.selection.rows_of(tensor)
    if rows is not None and bench.selection.sampled_from(tensor) is not None:
        shared |= {"sampled": True, "rows_measured": len(rows)}
    return [
        DeviationRow.model_validate({**shared, "head": head, **values})
        for head, values in zip(bench.selection.heads_of(tensor), heads, strict=True)
    ]


def bare_row(task: Task, failure: Failure) -> DeviationRow:
    """The only row of a task without a result."""
    return DeviationRow(
        **identity(task), head=None, tensor="out", status=failure.status, reason=failure.reason
    )


def _no_gradients(task: Task, failure: Failure) -> DeviationRow:
    """A kernel whose output was measured, and which has no gradients."""
    where = "in a training step: " if failure.status == "failed" else ""
    row = bare_row(task, Failure(failure.status, where + failure.reason))
    return row.model_copy(update={"tensor": "dq"})


def identity(task: Task) -> dict[str, Any]:
    """The fields of a row that say what the task was."""
    names = ("case", "source", "module", "layer", "call", "seed", "phase", "step", "attends")
    return {
        **{name: getattr(task.case, name) for name in names},
        "role": task.role,
        "kernel": task.kernel,
        "options": dict(task.options),
        "format": task.format,
    }


def returned(out: Tensor, case: AttentionCase) -> Format:
    """The format an output is in: its dtype's, unless it came in the dtype that stores the case's
    working format. (What a kernel computes in a wider one it must then return in a wider dtype.)"""
    return case.format if out.dtype == case.q.dtype else format_of(out.dtype)


def formats_of(output: Output, bench: Bench) -> dict[str, Format]:
    """The format of every tensor that came back."""
    tensors = {name: getattr(output, name) for name in bench.tensors}
    return {name: returned(x, bench.case) for name, x in tensors.items() if x is not None}


def given(task: Task, kernel: Kernel) -> dict[str, Any]:
    """The options to call the kernel with: those that are not its defaults."""
    defaults = recorded(kernel.options)
    return {k: v for k, v in task.options.items() if k not in defaults or v != defaults[k]}
