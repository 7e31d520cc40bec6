"""One task: a kernel on a prepared case, and its rows.

`run_task` turns a task into its rows, and nothing that goes wrong inside a kernel, or in measuring
what it returned, reaches the other tasks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from numdev.audit.attempt import Failure, attempt, one_line
from numdev.audit.bench import Bench, Prepared
from numdev.audit.beside import (
    with_bits,
    with_empty_rows,
    with_noise,
    with_nulls,
    with_suspicion,
    with_the_rest,
)
from numdev.audit.journal import Task
from numdev.audit.records import recorded
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.explain.undeclared import Likeness, beyond, likeness, with_bias_explained
from numdev.formats import Format, format_of
from numdev.kernels import Kernel, Output
from numdev.kernels.emulation.predict import returning, unexpected
from numdev.kernels.output import GRADIENTS
from numdev.metrics import deviation
from numdev.metrics.bits import Bits, checksums
from numdev.metrics.deviation import Measured, Metrics
from numdev.metrics.finiteness import Elsewhere, all_finite, elsewhere
from numdev.metrics.lazy import Lazy
from numdev.metrics.noise import Noise, in_runs, noise
from numdev.report import NOT_PREDICTED, DeviationRow
from numdev.system import System

COUNTED = (RuntimeError, TypeError, ValueError, MeasurementError, UsageError)
"""What measuring may raise on strange outputs, and costs the row, not the audit."""


BESIDE = ("precision", "floor", "baseline")
"""Who always runs beside the kernels."""
T = TypeVar("T")
Make = Callable[[], list[Metrics]]
"""Makes the metrics of a tensor, one dict per head: of what is on the host."""


class Runner(Protocol):
    """Where a kernel is run: `numdev.audit.attempt.attempt`, or a process of its own."""

    def __call__(
        self,
        kernel: Kernel,
        case: AttentionCase,
        options: Mapping[str, Any],
        *,
        gradients: bool = False,
    ) -> Output | Failure: ...


def run_task(
    task: Task, kernel: Kernel, bench: Bench, system: System, run: Runner = attempt
) -> Sequence[DeviationRow]:
    """The rows of one task: one per head and tensor, or a single one that says why there is none.
    Those of what always runs beside the kernels are made when they are looked at. Once the bench is
    settled they need neither it nor the device.

    A kernel that is missing or declines is `skipped`; one that raises, or whose output cannot be
    measured, is `failed`. So is every task of a case too large for its reference. Where the forward
    pass runs and a training step does not, the output is measured, and one row of dq says why there
    is no gradient.
    """
    missing = kernel.missing(system)
    if missing:
        return [bare_row(task, Failure("skipped", missing))]
    try:
        with bench.watch("metrics"):
            rows = _task_rows(task, kernel, bench, system, run)
    except COUNTED as error:
        bench.along = None
        return _unmeasured(task, error)
    return rows if isinstance(rows, list) else Lazy(functools.partial(_made, task, rows))


def _made(task: Task, make: Callable[[], list[DeviationRow]]) -> list[DeviationRow]:
    try:
        return make()
    except COUNTED as error:
        return _unmeasured(task, error)


def _unmeasured(task: Task, error: Exception) -> list[DeviationRow]:
    return [bare_row(task, Failure("failed", f"while measuring: {one_line(error)}"))]


def _task_rows(
    task: Task, kernel: Kernel, bench: Bench, system: System, run: Runner
) -> list[DeviationRow] | Callable[[], list[DeviationRow]]:
    prepared = bench.at(task.format)
    runs = _runs(task, kernel, prepared, bench, run)
    lacking: Failure | None = None
    if isinstance(runs, Failure) and task.gradients and task.role == "kernel":
        alone = dataclasses.replace(task, gradients=False)
        forward = _runs(alone, kernel, prepared, bench, run)
        if not isinstance(forward, Failure):
            lacking, runs = runs, forward
    if isinstance(runs, Failure):
        return [bare_row(task, runs)]
    claim = kernel.claims(prepared.case, runs[0], system)
    bench.last = (task.key, runs[0], None)
    if task.role in BESIDE:
        return _measured_rows(task, runs, prepared, bench, claim)
    rows = _measured_rows(task, runs, prepared, bench, claim)()
    if task.role == "kernel" and not kernel.declares and (wrong := beyond(rows)):
        formats = formats_of(runs[0], prepared)
        like = likeness(runs[0], wrong, formats, prepared, bench, system)
        if like is not None:
            bench.last = (task.key, runs[0], like.expected)
            rows = _measured_rows(task, runs, prepared, bench, claim, like)()
    return rows if lacking is None else [*rows, _without_gradients(task, lacking)]


def _runs(
    task: Task, kernel: Kernel, prepared: Prepared, bench: Bench, run: Runner
) -> list[Output] | Failure:
    """What the task's kernel returns, as often as asked; what is prepared already, once."""
    exact, gradients = prepared.reference, {}
    if task.role == "baseline":
        return prepared.baseline if isinstance(prepared.baseline, Failure) else [prepared.baseline]
    if task.role in ("precision", "floor"):
        gradients = {n: getattr(exact, n) for n in GRADIENTS if task.gradients}
        if task.role == "floor":
            gradients = {n: prepared.yardsticks[n].floor for n in gradients}
            return [
                Output(
                    out=prepared.yardstick.floor, ran=exact.by, ran_backward=exact.by, **gradients
                )
            ]
        return [Output(out=exact.out, **gradients)]
    case = prepared.measured if task.role == "control" else prepared.case
    bench.settle()  # whatever a kernel under audit does to the device
    runs = []
    with prepared.watch("other" if task.role == "control" else "kernels"):
        for _ in range(max(1, task.repeats)):
            output = run(kernel, case, given(task, kernel), gradients=task.gradients)
            if isinstance(output, Failure):
                return output
            runs.append(output)
    return runs


def _measured_rows(
    task: Task,
    runs: Sequence[Output],
    prepared: Prepared,
    bench: Bench,
    claim: Mapping[str, Any] | None,
    like: Likeness | None = None,
) -> Callable[[], list[DeviationRow]]:
    """What makes the rows of a task, when they are wanted. What that needs of the device has begun.
    Once that is settled (`Bench.settle`) no tensor is kept of what runs beside the kernels."""
    output, exact = runs[0], prepared.reference
    # Only of a kernel under audit somebody asks before its rows are made.
    audited = task.role == "kernel"
    bits, noises = _of_runs(runs, bench) if audited else ({}, {})
    formats = formats_of(output, prepared)
    rest = _elsewhere(task, output, formats, prepared, bench)
    trained = any(getattr(output, name) is not None for name in GRADIENTS)
    # What was computed of sampled queries alone has no dk and dv.
    given = prepared.by_row if task.role in ("baseline", "control") else prepared.tensors
    along: dict[str, Measured] = {}
    made: list[Callable[[], list[DeviationRow]]] = []
    for tensor in given if trained else ("out",):
        x = getattr(output, tensor)
        if x is None:
            raise MeasurementError(f"it returned no {tensor}")
        chosen = bench.select(x, tensor)
        if task.role == "precision":
            found = deviation.measured_precision(
                prepared.yardsticks[tensor], of=bench.sampled_from(tensor)
            )
            bench.under_way.append(found.wait)
            made.append(_rows(task, tensor, _metrics_of(found), output, bench))
            continue
        fmt = prepared.yardstick.format if task.role == "floor" else returned(x, prepared.case)
        measure = functools.partial(
            _metrics, task, tensor, chosen, fmt, prepared, bench, claim, formats, like
        )
        held_to = (str(x.dtype), fmt.name, repr(claim), repr(formats))
        make, along[tensor] = _once(
            prepared, tensor, bits if like is None else {}, held_to, measure
        )
        bench.under_way.append(along[tensor].wait)
        if tensor in rest:
            make = functools.partial(_with_the_rest, make, rest[tensor])
        if audited and tensor == "out":
            make = functools.partial(_with_doubts, make, chosen, output, prepared, bench)
        beside = functools.partial(
            _with_beside,
            *(make, tensor, bits, noises.get(tensor, ())),
            prepared.amplification.get(tensor),
        )
        made.append(_rows(task, tensor, beside, output, bench, fmt))
    if output.lse is not None and task.role not in ("precision", "control"):
        measure_lse = functools.partial(
            deviation.measured_plain,
            *(bench.select(output.lse), exact.lse, exact.empty),
            of=bench.sampled_from("lse"),
        )
        found = _once(prepared, "lse", bits, (str(output.lse.dtype),), measure_lse)
        bench.under_way.append(found.wait)
        make = _metrics_of(found)
        if "lse" in rest:
            make = functools.partial(_with_the_rest, make, rest["lse"])
        beside = functools.partial(_with_beside, make, "lse", bits, noises.get("lse", ()))
        made.append(_rows(task, "lse", beside, output, bench))
    bench.along = (task.key, along)
    if not audited:
        bits |= _bits(task, output, prepared, bench)
    bench.under_way += [functools.partial(len, some) for some in bits.values()]
    return lambda: [row for make in made for row in make()]


def _with_the_rest(make: Make, rest: Sequence[Elsewhere]) -> list[Metrics]:
    return with_the_rest(make(), rest)


def _with_doubts(
    make: Make, chosen: Tensor, output: Output, prepared: Prepared, bench: Bench
) -> list[Metrics]:
    metrics = with_empty_rows(make(), chosen, prepared)
    return with_suspicion(metrics, output, prepared, bench)


def _metrics_of(found: Measured) -> Make:
    return lambda: found.metrics


def _with_beside(
    make: Make,
    tensor: str,
    bits: Mapping[str, Sequence[str]],
    noises: Sequence[Noise],
    amplification: Sequence[float | None] | None = None,
) -> list[Metrics]:
    metrics = with_noise(with_bits(make(), bits, tensor), noises)
    if amplification is None:
        return metrics
    return [
        {**head, "amplification": response}
        for head, response in zip(metrics, amplification, strict=True)
    ]


def _metrics(
    task: Task,
    tensor: str,
    x: Tensor,
    fmt: Format,
    prepared: Prepared,
    bench: Bench,
    claim: Mapping[str, Any] | None,
    formats: Mapping[str, Format],
    like: Likeness | None,
) -> tuple[Make, Measured]:
    """What makes one tensor's metrics, beside what the kernel's roundings predict (its claim's, or
    those of the way that it was found to round in); and what they are made of."""
    yardstick = prepared.yardsticks[tensor].for_format(fmt)
    against = functools.partial(
        deviation.measured, of=bench.sampled_from(tensor), bins=bench.bins_of(tensor)
    )
    if task.role == "floor":
        found = against(x, yardstick)
        return _metrics_of(found), found
    why = unexpected(claim, prepared.case.format, fmt)
    if tensor not in prepared.by_row:
        found = against(x, yardstick)
        lacking = ("expected_ratio", "worst_row", "baseline_ratio", "amplification")
        return functools.partial(_without, found, lacking, NOT_PREDICTED), found
    if why is not None:
        found = against(x, yardstick)
        return functools.partial(_without, found, ("expected_ratio", "worst_row"), why), found
    if like is not None:
        expected, whose = like.expected[tensor], like.words
    else:
        yardstick.look()  # before there is much that the device has to do first
        expected = prepared.predicted(returning(claim, prepared.case, formats))[tensor]
        whose = str((claim or {}).get("preset", "fa2"))
    found = against(x, yardstick, expected)
    make = _metrics_of(found)
    if like is not None and tensor == "out":
        explained = with_bias_explained(found.metrics, like, yardstick)
        make = functools.partial(list, explained)
    return functools.partial(_with_claim, make, whose), found


def _without(found: Measured, names: Sequence[str], why: str) -> list[Metrics]:
    return [with_nulls(head, names, why) for head in found.metrics]


def _with_claim(make: Make, whose: str) -> list[Metrics]:
    return [{**head, "claim": whose} for head in make()]


def _elsewhere(
    task: Task,
    output: Output,
    formats: Mapping[str, Format],
    prepared: Prepared,
    bench: Bench,
) -> dict[str, list[Elsewhere]]:
    """What of a kernel's tensors is not finite in the rows that are not measured, by tensor;
    nothing where all that came back is finite, as it should be."""
    if task.role != "kernel" or not prepared.sampled:
        return {}
    formats = dict(formats)
    if output.lse is not None:
        formats["lse"] = format_of(output.lse.dtype)
    whole = {name: bench.select_heads(getattr(output, name), name) for name in formats}
    if prepared.inputs_finite and all_finite(whole.values()):
        return {}
    case = bench.selected(prepared.case)
    return {
        name: elsewhere(x, name, case, bench.rows_of(name), formats[name])
        for name, x in whole.items()
    }


def _of_runs(
    runs: Sequence[Output], bench: Bench
) -> tuple[dict[str, Sequence[str]], dict[str, Sequence[Noise]]]:
    """What runs of a kernel under audit come to to the bit, by tensor, in the measured heads: the
    checksums of the first, of whole heads; and their noise, if there are several."""
    found = in_runs(runs)
    tensors = list(found.values())
    seen = Bits(tensors)
    bits = {
        name: _of(bench, name, Lazy(functools.partial(seen.checksums, i)))
        for i, name in enumerate(found)
    }
    if len(runs) < 2:
        return bits, {}
    noises = zip(found, noise(tensors, seen), strict=True)
    return bits, {name: _of(bench, name, some) for name, some in noises}


def _bits(task: Task, output: Output, prepared: Prepared, bench: Bench) -> dict[str, Sequence[str]]:
    """The checksums of what always runs beside the kernels, by tensor."""
    if task.role in ("precision", "control"):
        return {}
    there = {name: getattr(output, name) for name in (*prepared.tensors, "lse")}
    heads = {n: bench.select_heads(x, n) for n, x in there.items() if x is not None}
    return checksums(heads)


def _once(
    prepared: Prepared,
    tensor: str,
    bits: Mapping[str, Sequence[str]],
    held_to: tuple[str, ...],
    measure: Callable[[], T],
) -> T:
    """What a tensor comes to; of one that came back before with the same bits, and is held to the
    same, what it came to then."""
    if tensor not in bits:
        return measure()
    alike = prepared.known.setdefault((tensor, *held_to), [])
    for others, found in alike:  # where there is none, nobody waits for these bits
        if others == bits[tensor]:
            known: T = found
            return known
    alike.append((bits[tensor], measured := measure()))
    return measured


def _of(bench: Bench, tensor: str, found: Sequence[T]) -> Sequence[T]:
    """Of the measured heads, when it is looked at."""
    heads = bench.heads_of(tensor)
    return Lazy(lambda: list(found) if len(found) == len(heads) else [found[h] for h in heads])


def returned(out: Tensor, case: AttentionCase) -> Format:
    """The format an output is in: its dtype's, unless it came in the dtype that stores the case's
    working format. (What a kernel computes in a wider one it must then return in a wider dtype.)"""
    return case.format if out.dtype == case.q.dtype else format_of(out.dtype)


def formats_of(output: Output, prepared: Prepared) -> dict[str, Format]:
    """The format of every tensor that came back."""
    given = {name: getattr(output, name) for name in prepared.tensors}
    return {name: returned(x, prepared.case) for name, x in given.items() if x is not None}


def given(task: Task, kernel: Kernel) -> dict[str, Any]:
    """The options to call the kernel with: those that are not its defaults."""
    defaults = recorded(kernel.options)
    return {k: v for k, v in task.options.items() if k not in defaults or v != defaults[k]}


def _rows(
    task: Task,
    tensor: str,
    metrics: Make,
    output: Output,
    bench: Bench,
    out_format: Format | None = None,
) -> Callable[[], list[DeviationRow]]:
    """What makes a tensor's rows of their metrics."""
    limited = task.format == "float64" and task.role != "precision"
    backward = tensor in GRADIENTS
    shared = {
        **identity(task),
        "tensor": tensor,
        "status": "ok",
        "reason": "reference-limited" if limited else None,
        "ran": output.ran_backward if backward else output.ran,
        "out_format": out_format.name if out_format else None,
        **_sampling(bench, tensor),
    }
    return functools.partial(_row_by_head, shared, bench.heads_of(tensor), metrics)


def _row_by_head(
    shared: Mapping[str, Any], heads: Sequence[int], metrics: Make
) -> list[DeviationRow]:
    return [
        DeviationRow.model_validate({**shared, "head": head, **values})
        for head, values in zip(heads, metrics(), strict=True)
    ]


def _sampling(bench: Bench, tensor: str) -> dict[str, Any]:
    """The fields that say of how many rows a row's numbers are."""
    rows = bench.rows_of(tensor)
    if rows is None or bench.sampled_from(tensor) is None:
        return {}
    return {"sampled": True, "rows_measured": len(rows)}


def bare_row(task: Task, failure: Failure) -> DeviationRow:
    """The only row of a task without a result."""
    return DeviationRow(
        **identity(task), head=None, tensor="out", status=failure.status, reason=failure.reason
    )


def _without_gradients(task: Task, failure: Failure) -> DeviationRow:
    """A kernel whose output was measured, and which has no gradients."""
    where = "in a training step: " if failure.status == "failed" else ""
    row = bare_row(task, Failure(failure.status, where + failure.reason))
    return row.model_copy(update={"tensor": "dq"})


def identity(task: Task) -> dict[str, Any]:
    """The fields of a row that say what the task was."""
    ref = task.case
    return {
        "case": ref.case,
        "source": ref.source,
        "module": ref.module,
        "layer": ref.layer,
        "call": ref.call,
        "seed": ref.seed,
        "phase": ref.phase,
        "step": ref.step,
        "attends": ref.attends,
        "role": task.role,
        "kernel": task.kernel,
        "options": dict(task.options),
        "format": task.format,
    }
