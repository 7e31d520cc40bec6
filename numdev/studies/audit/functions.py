"""A check of a function beside its reference: calls, rows, report.

The function runs first, on all calls, before anything of the reference is computed. Then
the reference gives what is exact and what rounding explains
(`numdev.operations.function`), and rows are measured as for every operation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from numdev.cases import CaseRef
from numdev.errors import MeasurementError, NumdevError, UsageError, one_line
from numdev.formats import FORMATS, Format, format_of
from numdev.gate.judgement import Judgement
from numdev.gate.judging import judgement_of, with_conclusions
from numdev.gate.rules import Rules, rules_as_data
from numdev.kernels import Kernel, import_callable, no_claim
from numdev.metrics.finiteness import Outside
from numdev.metrics.yardstick import Yardstick
from numdev.operations.function.causes import causes_of
from numdev.operations.function.function_runs import (
    Cotangents,
    FunctionRun,
    buffers_restored,
    poison,
    private,
    run,
)
from numdev.operations.function.input_influence import (
    LEAST_MOVED,
    Influence,
    influences_of,
    influences_of_numbers,
    numbers_tried,
)
from numdev.operations.function.inputs import (
    Make,
    prepared,
    redrawn,
    trivial_names,
)
from numdev.operations.function.judged_call import (
    FEW,
    FunctionCall,
    Judge,
    other_data,
)
from numdev.operations.function.places import places_that_err
from numdev.operations.function.problem_files import ModuleBuild, forms_of
from numdev.operations.function.process import Answer, FunctionProcess, Work
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.task_environment import Surroundings
from numdev.operations.function.trees import Arguments, Values, as_real, identifier
from numdev.report import (
    AuditSummary,
    BesideReference,
    DeviationRow,
    Extent,
    FormatPower,
    FunctionCallRecord,
    FunctionReport,
    InputRecord,
    PlannedKernel,
    PlanRecord,
    Role,
)
from numdev.studies.audit.case_measurement import measure_task
from numdev.studies.audit.deviation_rows import bare_row
from numdev.studies.audit.function_for_script import ScriptTarget
from numdev.studies.audit.function_reports import NOT_COMPARED
from numdev.studies.audit.guarded_search import (
    GIVEN_UP,
    Named,
    guarded,
    guarded_data,
)
from numdev.studies.audit.isolation import Failure, Runner
from numdev.studies.audit.operation import Distance, Everything
from numdev.studies.audit.plan import Task
from numdev.studies.audit.run import provenance
from numdev.studies.audit.section_timing import Stopwatch
from numdev.studies.audit.tolerance_power import power_of, tolerance_power
from numdev.system import System

FAR_OFF = 2.0  # times what rounding explains: from there on a cause is looked for
HELD_TO_REFERENCE = "a function is judged beside its reference"
ROLES: tuple[tuple[Role, str], ...] = (
    ("precision", "inputs moved by half an ulp"),
    ("floor", "floor"),
    ("baseline", "reference"),
)
LARGEST_FOR_DRAWS = 1 << 22  # numbers of the inputs, above which a call is drawn once
STRIDE = 1000  # from the seed of one draw to the next one's
Runs = Sequence[FunctionRun | Failure]
Rows = list[DeviationRow]
Tensors = Mapping[str, Tensor | None]  # None: of another form than the reference's
Forms = Mapping[str, str]  # in words
RunAll = Callable[[Sequence["Draw"]], Runs]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One draw of a call: the arguments that the function gets, and the seed they were
    made with."""

    call: int  # which call it is a draw of
    seed: int
    arguments: Arguments


@dataclass(frozen=True, kw_only=True)
class FunctionPlan:
    """The calls to be judged, by name, each with its draws and with other data of the
    same arguments."""

    names: tuple[str, ...]
    draws: tuple[Draw, ...]
    others: tuple[Sequence[Arguments], ...]  # of each call: other data, one for each draw
    redrawn: tuple[str, ...]  # arguments of the later calls that were all 0, or all 1

    def of(self, call: int) -> list[Draw]:
        """Returns the draws of a call, by its index, in order; empty for an index that no
        draw has."""
        return [drawn for drawn in self.draws if drawn.call == call]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request of a check in one format: a function by name, its reference, and how
    they are run. Floating-point arguments are rounded to `format`; None: they stay as
    they are made."""

    name: str
    reference: Callable[..., object]
    make: Make
    format: Format | None = None
    backward: bool = False
    seeds: Sequence[int] = (0,)
    device: str
    again: bool = True  # whether a second call is judged
    labels: Sequence[str] = ()  # of the calls of a seed, where they have names
    # Whether arguments that are all 0 or all 1 are redrawn in the second call
    redraws: bool = True
    # Whether what the reference writes into its arguments is no result by itself
    outputs_only: bool = False
    remarks: Sequence[str] = ()  # on what is not judged


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionTensors:
    """The tensors of an implementation as rows, [1, 1, rows, features], by name."""

    tensors: Mapping[str, Tensor]
    ran: str | None = None
    ran_backward: str | None = None


def planned(asked: Asked, draws: int = 1) -> FunctionPlan:
    """Returns the calls of all seeds, each drawn `draws` times (at least 1). With
    `asked.again` each call is followed by a second one, named `... again`, on other data
    of the same shapes. These are the data of the next seed; where it has none of these
    shapes, or the same values, the first call's elements in another order. Arguments that
    are all 0 or all 1 in the first draw of the second call are redrawn in it
    (`asked.redraws`). Raises what making the arguments raises, and IndexError where a
    later draw has fewer calls than the first."""
    calls: list[tuple[str, list[Draw], list[Arguments]]] = []
    dull: dict[str, None] = {}
    for seed in asked.seeds:
        seeds = [seed + STRIDE * i for i in range(draws)]
        first, second = ([_data(asked, s + step) for s in seeds] for step in (0, 1))
        for i in range(len(first[0])):
            name = _call_name(asked, seed, i, len(first[0]))
            at_first = [calls_of_seed[i] for calls_of_seed in first]
            later = [
                other_data(x, others[i : i + 1], s)
                for x, others, s in zip(at_first, second, seeds, strict=True)
            ]
            names = trivial_names(later[0]) if asked.redraws else []
            dull |= dict.fromkeys(names if asked.again else ())
            again = [redrawn(x, names, s) for x, s in zip(later, seeds, strict=True)]
            for called, chosen, others, step in (
                (name, at_first, later, 0),
                (f"{name} again", again, at_first, 1),
            ):
                drawn = [
                    Draw(call=len(calls), seed=s + step, arguments=x)
                    for x, s in zip(chosen, seeds, strict=True)
                ]
                if asked.again or not step:
                    calls.append((called, drawn, others))
    return FunctionPlan(
        names=tuple(name for name, _, _ in calls),
        draws=tuple(drawn for _, of_call, _ in calls for drawn in of_call),
        others=tuple(tuple(others) for _, _, others in calls),
        redrawn=tuple(dull),
    )


def _call_name(asked: Asked, seed: int, index: int, count: int) -> str:
    """Returns the name of a call of a seed, by its index among the `count` calls of that
    seed: `seed 0`, `seed 0 call 2`; where calls have labels the label, with `+ seed 0`
    where there are several seeds."""
    if asked.labels:
        several = len(asked.seeds) > 1
        return asked.labels[index] + (f" + seed {seed}" if several else "")
    return f"seed {seed}" + (f" call {index}" if count > 1 else "")


def _data(asked: Asked, seed: int) -> list[Arguments]:
    """Returns the arguments of all calls for a seed, rounded to the asked format (None:
    as they come) and on the asked device. Raises what `asked.make` raises, and UsageError
    where an argument cannot be rounded to the format."""
    return [prepared(x, asked.format, asked.device) for x in asked.make(seed)]


def is_few(runs: Runs, plan: FunctionPlan) -> bool:
    """Whether a real floating-point output of the first run, or an argument or buffer
    that it wrote into, has fewer than FEW numbers, so that a call must be drawn several
    times. False where that run failed, or for inputs of more than LARGEST_FOR_DRAWS
    numbers. `runs`: at least one."""
    first = runs[0]
    numbers = sum(x.numel() for x in plan.draws[0].arguments.leaves().values())
    if isinstance(first, Failure) or numbers > LARGEST_FOR_DRAWS:
        return False
    results = (*first.outputs.values(), *first.written.values())
    return any(x.numel() < FEW and x.is_floating_point() for x in results)


def run_all(
    function: Callable[..., object], draws: Sequence[Draw], *, backward: bool
) -> list[FunctionRun | Failure]:
    """Returns the results of the function on every draw, in order, run one after another
    in this process; a Failure with the reason where it raises an exception, SystemExit
    included. KeyboardInterrupt passes. A module is copied once for all runs. Its buffers
    are the same at the start of each, as they are for the reference, but one run may
    change other state for the next; arguments are copied for each run. Before each run
    memory of the sizes of its inputs and of the last results is filled with NaN
    (integers: with 1), which an output that the function does not write then shows.
    Raises MeasurementError for a module that cannot be copied."""
    runs: list[FunctionRun | Failure] = []
    function = private(function)
    for drawn in draws:
        last = runs[-1] if runs else None
        outputs = last.outputs if isinstance(last, FunctionRun) else {}
        poison([*drawn.arguments.leaves().values(), *outputs.values()])
        try:
            cotangents = Cotangents(seed=drawn.seed) if backward else None
            with buffers_restored(function):
                ran = run(
                    function, drawn.arguments, seed=drawn.seed, cotangents=cotangents
                )
            runs.append(ran)
        except Exception as error:  # it is foreign code
            runs.append(Failure("failed", _in_one_line(error)))
    return [x.finished() if isinstance(x, FunctionRun) else x for x in runs]


def served(work: Work) -> list[Answer]:
    """Returns the results of a function on every draw, or in place of a failed run its
    reason in words. Called in a process of its own; imports the function in the
    surroundings of `work`. Where a module is built and there is no draw, the only answer
    is the shapes of its parameters and buffers by name, as JSON. Raises UsageError for a
    target that cannot be imported, or makes no module; RuntimeError for a state that does
    not fit the module."""
    around = work.surroundings
    function = (
        import_callable(work.target, "function")
        if around is None
        else around.function_at(work.target)
    )
    if work.build is not None:
        module = function = work.build.module(function)
        if not work.draws:
            return [json.dumps(forms_of(module))]
    draws = [Draw(call=0, seed=seed, arguments=x) for seed, x in work.draws]
    runs = run_all(function, draws, backward=work.backward)
    return [x.reason if isinstance(x, Failure) else x for x in runs]


def in_process(
    process: FunctionProcess,
    target: str,
    *,
    backward: bool,
    build: ModuleBuild | None = None,
    surroundings: Surroundings | None = None,
) -> RunAll:
    """Returns a function that runs the function `target` on all draws in another process;
    with `build` the module that `target` makes. Where the process ends, or gives no
    usable answer, it returns a Failure with the reason for each draw. It raises
    UsageError where the process cannot import or make the function. `surroundings`: those
    of the function in that process; None: none."""

    def run_draws(draws: Sequence[Draw]) -> Runs:
        pairs = tuple((draw.seed, draw.arguments) for draw in draws)
        work = Work(
            target=target, draws=pairs, backward=backward, build=build,
            surroundings=surroundings,
        )  # fmt: skip
        try:
            answers = process.answers(work)
        except MeasurementError as error:
            return [Failure("failed", str(error)) for _ in draws]
        if len(answers) != len(draws):
            why = f"the function's process gave {len(answers)} answers to {len(draws)}"
            return [Failure("failed", why) for _ in draws]
        return [
            Failure("failed", x)
            if isinstance(x, str)
            else x.moved_to(draw.arguments.device)
            for x, draw in zip(answers, draws, strict=True)
        ]

    return run_draws


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedFunction:
    """A call of a function, as a `PreparedCall` with one unit, all of whose rows are
    measured."""

    call: FunctionCall
    format: Format
    watch: Stopwatch = field(default_factory=Stopwatch)
    distances: Mapping[str, Distance] = field(default_factory=dict)
    unscreened: str | None = None
    exact_by: str | None = "fp64"
    selection: Everything = field(default_factory=Everything)
    case: None = None
    restricted: None = None

    @cached_property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the call's first tensor that has numbers: an output, if
        there is one. Raises what the reference raises."""
        return next(iter(self.call.forms.values())).dtype

    @property
    def by_row(self) -> Sequence[str]:
        """Returns the names of all tensors: the measured rows are all rows."""
        return tuple(self.call.judges)

    @cached_property
    def yardsticks(self) -> dict[str, Yardstick]:
        """Returns the yardstick of each tensor, by name. Raises what the reference
        raises."""
        return {name: self._yardstick(judge) for name, judge in self.call.judges.items()}

    def _yardstick(self, judge: Judge) -> Yardstick:
        """Returns the exact result as rows, with its floor and baseline. The terms of an
        element are not known for a function. In place of their size, the term scale is
        the number for which a single rounding errs as much as the operations do; for an
        integer its absolute value."""
        truth = in_rows(judge.truth.double())
        scale = truth.abs()
        if judge.errors is not None:
            root = judge.errors.mean_square.sqrt() * 12**0.5
            scale = in_rows(root / judge.format.unit_roundoff)
        shape = truth.shape[:3]
        return Yardstick(
            reference=truth,
            term_scale=scale,
            empty=torch.zeros(shape, dtype=torch.bool, device=truth.device),
            format=judge.format,
            baseline=_promoting(in_rows(judge.plain)),
            unrounded=truth,
        )

    @cached_property
    def baseline(self) -> FunctionTensors:
        """Returns the tensors of the reference, as PyTorch runs it in the format, as
        rows; integers and bools in float64."""
        judges = self.call.judges
        return self.as_output({name: in_rows(x.plain) for name, x in judges.items()})

    def as_output(
        self, tensors: Mapping[str, Tensor], ran: str | None = None
    ) -> FunctionTensors:
        """Returns these tensors (rows, by name) as an output of the function, those of
        a dtype of no format, as integers, in float64. `ran`: what ran, in words."""
        return FunctionTensors(
            tensors={name: _floating(x) for name, x in tensors.items()}, ran=ran
        )

    def format_of(self, x: Tensor) -> Format:
        """Returns the format of the tensor's dtype. Raises UsageError for a dtype of no
        format."""
        return format_of(x.dtype)

    def unpredicted(self, claim: Mapping[str, object] | None, fmt: Format) -> str:
        """Returns the reason why no rounding model predicts a function's errors; never
        None."""
        return HELD_TO_REFERENCE

    def expected(self, claim: object, output: object) -> Mapping[str, Tensor]:
        """Returns an empty mapping: no rounding model predicts a function's results."""
        return {}

    def outside_sample(self, output: object) -> Mapping[str, Sequence[Outside]]:
        """Returns an empty mapping: all rows are measured."""
        return {}

    def annotate(self, *_: object) -> None:
        """Does nothing: a function's own numbers are put into rows later, by
        `rows_of`."""


class Functions:
    """Functions as an `Operation`: all rows are measured, and causes are searched later,
    by `rows_of`."""

    @staticmethod
    def screened(call: PreparedFunction, output: object) -> PreparedFunction:
        """Returns the call as it is: all rows are measured."""
        return call

    @staticmethod
    def explained(
        kernel: Kernel, options: object, runs: object, measured: object, *_: object
    ) -> object:
        """Returns `measured` as it is."""
        return measured


def _floating(x: Tensor) -> Tensor:
    """Returns a tensor of a dtype that has a format as it is; any other, of integers, of
    bools or of another floating-point dtype (float8_e8m0fnu), in float64."""
    try:
        format_of(x.dtype)
    except UsageError:
        return x.double()
    return x


def _promoting(x: Tensor) -> Tensor:
    """Returns a floating-point tensor as it is, but one of 8 bits in float32, which has
    all of its values, since PyTorch promotes it with no other dtype; integers and bools
    in float64."""
    x = _floating(x)
    return x.float() if x.itemsize == 1 else x


def in_rows(x: Tensor) -> Tensor:
    """Returns a tensor of any shape as [1, 1, rows, features]. Its last axis gives the
    features. A scalar has one row and one feature, an empty tensor no rows and one
    feature."""
    width = x.shape[-1] if x.ndim and x.numel() else x.numel()
    return x.reshape(1, 1, -1, width) if width else x.reshape(1, 1, 0, 1)


def rows_of(
    asked: Asked,
    call: FunctionCall,
    ref: CaseRef,
    runs: Runs,
    system: System,
    watch: Stopwatch,
    fmt: Format,
    earlier: Values,
    run: RunAll,
) -> Iterator[DeviationRow]:
    """Yields the rows of one call: of inputs moved by half an ulp, of the floor, of the
    reference as PyTorch runs it, and of the function. Where the reference raises, each of
    these four has a single row with a reason and no numbers. Where one of the function's
    runs failed, the function alone has such a row. `runs`: the function's, one for each
    draw; `earlier`: the exact results of the call before, by name; `run`: runs the
    function again, in search of a cause."""

    def task(role: Role, name: str) -> Task:
        """Returns the task of a role, whose kernel has this name."""
        return Task(
            case=ref, role=role, kernel=name, format=fmt.name, gradients=asked.backward
        )

    beside = [task(role, name) for role, name in ROLES]
    audited = task("kernel", asked.name)
    try:
        with watch("reference"):
            prepared_call = PreparedFunction(call=call, format=fmt, watch=watch)
            judges = call.judges
    except Exception as error:  # it may be foreign code
        # No failure of the function, and no pass
        why = Failure("skipped", f"the reference: {_in_one_line(error)}")
        yield from (bare_row(each, why) for each in (*beside, audited))
        return
    for each in beside:
        values = _values_of(each.role, judges)
        rows = _measured(each, prepared_call, values, {}, system, _never)
        with watch("names"):
            yield from _named_reference(rows, call.draws[0])
    failed = next((x for x in runs if isinstance(x, Failure)), None)
    if failed is not None:
        yield bare_row(audited, failed, next(iter(judges)))
        return
    ran = [x for x in runs if isinstance(x, FunctionRun)]
    tensors, wrong = call.tensors_of(ran)
    whole = {n: judges[n].floor if x is None else x for n, x in tensors.items()}
    output = prepared_call.as_output({n: in_rows(x) for n, x in whole.items()})
    rows = _measured(audited, prepared_call, tensors, wrong, system, _giving(output))
    rows = [_with_layout(row, call.other_forms(ran)) for row in rows]
    with watch("names"):
        yield from _named(rows, call, ran[0], earlier, run)


def _measured(
    task: Task,
    prepared_call: PreparedFunction,
    tensors: Tensors,
    forms: Forms,
    system: System,
    runner: Runner,
) -> Rows:
    """Returns the rows of a task, with the numbers of its `tensors` beside the reference.
    `forms`: by name, why a tensor has another form than the reference's; `runner`:
    returns the output, or raises for a role without a kernel."""
    kernel = Kernel(name=task.kernel, function=_nothing, claims=no_claim)
    measured = measure_task(
        task, kernel, prepared_call, system, runner, None, Functions()
    )
    judges = prepared_call.call.judges
    return [
        _with_numbers_beside_reference(row, judges, tensors, forms)
        for row in measured.rows
    ]


def _in_one_line(error: Exception) -> str:
    """Returns an exception in words: numdev's own as its message and hint, any other in
    one line with its class."""
    return str(error) if isinstance(error, NumdevError) else one_line(error)


def _named(
    rows: Sequence[DeviationRow],
    call: FunctionCall,
    ran: FunctionRun,
    earlier: Values,
    run: RunAll,
) -> Iterator[DeviationRow]:
    """Yields the rows of a function, in order. A row that is far off gets `errs_in`,
    where a pattern is seen, and as `suspicion` its cause: another function that explains
    its error. That is sought in the run `ran` of the first draw. Else it is sought in a
    new run on its inputs in float32, unless the first search took too long or ended its
    process. Where the first search was not finished and the second names none, `nulls`
    says why. Other rows are yielded as they are."""
    rows = [_with_place(row, call, ran) for row in rows]
    far = [row.tensor for row in rows if _is_far_off(row)]
    causes, why = _causes(call.draws[0], ran, far, earlier)
    # What took too long, or ended its process, does so in float32 too
    again = not (why or "").startswith(GIVEN_UP)
    unnamed = [name for name in far if name not in causes and again]
    finer, _ = _causes_in_float32(call.draws[0], run, unnamed) if unnamed else ({}, None)
    for row in rows:
        cause = causes.get(row.tensor) or finer.get(row.tensor)
        if cause is None:
            lost = {"suspicion": why} if why and row.tensor in far else {}
            yield row.model_copy(update={"nulls": {**row.nulls, **lost}})
            continue
        fields: dict[str, object] = {
            "suspicion": cause.words, "suspicion_cut": cause.cut,
        }  # fmt: skip
        if row.tensor in causes:
            fields["suspicion_share"] = cause.share
        else:
            fields["suspicion_format"] = "float32"
        yield row.model_copy(update=fields)


def _named_reference(rows: Rows, reference: FunctionReference) -> Rows:
    """Returns the rows of one of ROLES, in order. Of the reference as PyTorch runs it, a
    row that errs by more than FAR_OFF times what its operations explain gets a
    `suspicion`: the function that PyTorch computes instead, where one explains the error.
    Other rows are returned as they are."""
    ratios = {
        row.tensor: row.beside_reference.predicted_ratio or 0.0
        for row in rows
        if row.role == "baseline" and row.beside_reference is not None
    }
    far = [name for name, ratio in ratios.items() if ratio > FAR_OFF]
    causes, _ = _causes(reference, reference.plain, far, {}) if far else ({}, None)
    named = {
        name: {"suspicion": x.words, "suspicion_cut": x.cut} for name, x in causes.items()
    }
    return [row.model_copy(update=named.get(row.tensor, {})) for row in rows]


def _with_place(row: DeviationRow, call: FunctionCall, ran: FunctionRun) -> DeviationRow:
    """Returns a row that is far off with `errs_in`: the entries of an axis that err, in
    words, where they are some of the axis and the call has one draw. Other rows are
    returned as they are."""
    if not _is_far_off(row) or len(call.draws) > 1:
        return row
    errors = call.judges[row.tensor].errors
    x = ran.tensors.get(row.tensor)
    if errors is None or x is None:
        return row
    return row.model_copy(
        update={"errs_in": places_that_err(as_real(x).double(), errors)}
    )


def _causes(
    reference: FunctionReference, ran: FunctionRun, names: Sequence[str], earlier: Values
) -> tuple[Named, str | None]:
    """Returns by name the functions that explain the outputs `names` of a run, and None;
    or an empty mapping, and in words why the search was not finished. Empty too where
    nothing explains them, or the run has none of them. `earlier`: exact results of the
    call before, by name."""
    outputs = {name: as_real(ran.tensors[name]) for name in names if name in ran.tensors}
    if not outputs:
        return {}, None
    search = partial(causes_of, reference, outputs, earlier)
    return guarded(search, torch.device(reference.device).type)


def _causes_in_float32(
    reference: FunctionReference, run: RunAll, names: Sequence[str]
) -> tuple[Named, str | None]:
    """Returns by name the functions that explain the outputs `names` of a new run on
    float32 inputs, in which rounding hides less; and why the search was not finished,
    None where it was. Empty where the function fails on these inputs."""
    wide = prepared(reference.arguments, FORMATS["float32"], reference.device)
    [ran] = run([Draw(call=0, seed=reference.seed, arguments=wide)])
    if isinstance(ran, Failure):
        return {}, None
    return _causes(dataclasses.replace(reference, arguments=wide), ran, names, {})


def _is_far_off(row: DeviationRow) -> bool:
    """Whether a row errs by more than FAR_OFF times what rounding explains, over all
    elements or in its worst slice beyond luck; then another function may explain the
    error. False for a row without such numbers."""
    beside = row.beside_reference
    if row.status != "ok" or beside is None or beside.reference_ratio is None:
        return False
    slices = (beside.slice_ratio or 0.0) / (beside.slice_luck or 1.0)
    return max(beside.reference_ratio, slices) > FAR_OFF


def _nothing(case: object) -> None:
    """Returns None. It stands in place of a kernel's function, which is never called."""


def _giving(output: FunctionTensors) -> Runner:
    """Returns a runner that runs no kernel and returns `output`."""
    return cast(Runner, lambda *_, **__: output)


def _never(*_: object, **__: object) -> Failure:
    """A runner for roles without a kernel. Raises MeasurementError when it is called."""
    raise MeasurementError("it runs no kernel")


def _values_of(role: str, judges: Mapping[str, Judge]) -> dict[str, Tensor | None]:
    """Returns the tensors of a role, by name: for `baseline` the reference as PyTorch
    runs it, for another role the floor."""
    if role == "baseline":
        return {name: judge.plain for name, judge in judges.items()}
    return {name: judge.floor for name, judge in judges.items()}


def _with_numbers_beside_reference(
    row: DeviationRow,
    judges: Mapping[str, Judge],
    tensors: Tensors,
    wrong: Forms,
) -> DeviationRow:
    """Returns a row of status `ok` with its numbers beside the reference. The reasons why
    some of these are null are added to `nulls`; `nonfinite` is counted anew, and
    `overflow` too where it is not 0. Where `tensors` has None, for a tensor of another
    form, the row stays `ok` with no elements and no other numbers, and
    `beside_reference.form` says what `wrong` has. Rows that are not `ok`, and those of
    the role `precision`, are returned as they are."""
    if row.status != "ok" or row.role == "precision":
        return row
    x = tensors[row.tensor]
    judge = judges[row.tensor].beside(x)
    numbers, nulls = judge.numbers(x, wrong.get(row.tensor))
    if x is None:
        return _without_numbers(row, numbers, nulls)
    nonfinite, overflow = judge.nonfinite(x)
    changes: dict[str, object] = {
        "beside_reference": numbers,
        "nulls": {**row.nulls, **nulls},
        "nonfinite": nonfinite,
    }
    if overflow:
        changes["overflow"] = overflow
    return row.model_copy(update=changes)


def _with_layout(row: DeviationRow, layouts: Mapping[str, str]) -> DeviationRow:
    """Returns a row with its tensor's clause of `layouts` (how it differs harmlessly in
    layout); as it is where that has none, and without numbers beside the reference."""
    if row.tensor not in layouts or row.beside_reference is None:
        return row
    beside = row.beside_reference.model_copy(update={"layout": layouts[row.tensor]})
    return row.model_copy(update={"beside_reference": beside})


def _without_numbers(
    row: DeviationRow, numbers: BesideReference, nulls: dict[str, str]
) -> DeviationRow:
    """Returns a row that names the tensor, has no elements, and of numbers beside the
    reference only `numbers`."""
    fields = ("case", "source", "module", "layer", "call", "seed", "role", "kernel",
              "options", "format", "head", "tensor", "tensors", "status")  # fmt: skip
    return DeviationRow(
        **{name: getattr(row, name) for name in fields},
        elements=0,
        nonfinite=0,
        beside_reference=numbers,
        nulls=nulls,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class FormatPart:
    """A check in one format: the request, its calls, and the function's runs of them."""

    asked: Asked
    plan: FunctionPlan
    runs: Runs
    run: RunAll
    script: ScriptTarget | None = None  # None: a module has the function by its name

    @property
    def format(self) -> Format:
        """Returns the format that was asked for, else that of the first real
        floating-point argument whose dtype has one; float32 where there is none."""
        return self.asked.format or format_of_inputs(self.plan.draws[0].arguments)


def judge_function_runs(
    parts: Sequence[FormatPart],
    rules: Rules,
    request: Mapping[str, object],
    system: System,
    tolerance: tuple[float, float] | None = None,
) -> tuple[FunctionReport, Judgement]:
    """Returns the report of a function that was run in each format, and its judgement
    under the rules. Computes the reference of every call. Runs the function again, on
    float32 inputs, for each call with a large error that has no cause in its own run.
    `parts`: at least one, of one function; `request`: for the report; `tolerance`: (rtol,
    atol), of which the report then says which wrong kernels it passes on the first call
    of each format, unless the reference raises there."""
    watch = Stopwatch(system.device)
    rows: list[DeviationRow] = []
    records: dict[str, FunctionCallRecord] = {}
    inputs: list[InputRecord] = []
    powers: list[FormatPower] = []
    lacking: dict[str, None] = {}
    for part in parts:
        earlier: Values = {}
        influences: dict[str, InputRecord] = {}
        for number, (call, runs) in enumerate(calls_of_part(part)):
            ref = CaseRef(case=call.name, source="inputs", module=part.asked.name)
            rows += rows_of(
                part.asked, call, ref, runs, system, watch, part.format, earlier, part.run
            )
            records.setdefault(call.name, _record(call, part.format))
            earlier = _exact(call)
            lacking |= dict.fromkeys(_in_float32(call, part.format))
            lacking |= dict.fromkeys(_results_not_compared(call))
            with watch("reference"):
                _update_influences(influences, call, part)
            if tolerance is not None and not number and earlier:
                powers.append(power_of(call, part.format.name, tolerance, rules))
        inputs += influences.values()
    doubts = (*parts[0].asked.remarks, *_doubts(parts[0].plan), *lacking)
    source = {"tensors": request.get("inputs")}
    report = FunctionReport(
        provenance=provenance(system, source, "numdev.check"),
        request=dict(request),
        summary=AuditSummary(answer=(), kernels=()),
        plan=_plan_record(parts),
        cases=tuple(records.values()),
        rows=tuple(rows),
        inputs=tuple(inputs),
        timings=watch.seconds(),
        doubts=doubts,
    )
    power = None if tolerance is None else tolerance_power(powers, tolerance)
    about = {"rules": rules_as_data(rules), "power": power}
    report = report.model_copy(update=about)
    judgement = judgement_of(report, rules)
    return with_conclusions(report, judgement), judgement


def _update_influences(
    influences: dict[str, InputRecord], call: FunctionCall, part: FormatPart
) -> None:
    """Puts a record of each input of a call, and of each number of its reference, into
    `influences`, by name, in place: where there is none yet, where the call shows that it
    is judged, or where it moves the result by more than in calls before. An output's
    memory that moves nothing has none. What earlier calls have shown to be judged is not
    tried again. Does nothing with `part.asked.again` False, or where the reference
    raises."""
    if not part.asked.again:
        return
    left = [name for name, record in influences.items() if not record.is_judged]
    if influences and not left:
        return
    try:
        judges, written = call.judges, call.draws[0].plain.written
        every = [*influences_of(call, left), *_of_numbers(call, left)] if judges else []
    except Exception:  # rows say why
        return
    for one in every:
        if one.name in written and not (one.moved or one.changed):
            continue  # an output's memory
        record = InputRecord(
            format=part.format.name,
            input=one.name if one.is_number else identifier(one.name), case=call.name,
            moved=one.moved, tensor=one.tensor, changed=one.changed,
            needed=LEAST_MOVED, reason=one.why,
        )  # fmt: skip
        before = influences.get(one.name)
        if before is None or record.is_judged or (before.moved or 0) < (one.moved or 0):
            influences[one.name] = record


def _of_numbers(call: FunctionCall, names: Sequence[str]) -> list[Influence]:
    """Returns the influence of each number that the reference computes with, as
    `influences_of_numbers`; empty too where the search fails or takes too long. `names`:
    of these alone (`eps 1e-06 as 1e-05`); empty: of all. Where the reference raises with
    another number, `why` says so."""
    numbers = numbers_tried(call, names)
    if not numbers:
        return []
    device = torch.device(call.draws[0].device).type
    search = lambda: [list(x) for x in influences_of_numbers(call, numbers)]  # noqa: E731
    data, _ = guarded_data(search, device)
    every = cast(Sequence[Sequence[object]], data or ())
    return [Influence(*each) for each in every]  # type: ignore[arg-type]


def calls_of_part(part: FormatPart) -> Iterator[tuple[FunctionCall, Runs]]:
    """Yields each call with its reference, and the function's runs in order of its draws:
    a Failure in place of one that failed. What the reference writes into buffers that
    the first run's function lacks is not judged. Where the reference returns float64 of
    narrower inputs, and the first run float32 or the first argument's dtype, the call is
    judged in the dtypes that this run returned (`FunctionCall.as_returned`)."""
    by_call: dict[int, list[FunctionRun | Failure]] = {}
    for draw, ran in zip(part.plan.draws, part.runs, strict=True):
        by_call.setdefault(draw.call, []).append(ran)
    for number, runs in by_call.items():
        call = _call_of(part.asked, part.plan, number)
        first = runs[0]
        if isinstance(first, FunctionRun):
            with contextlib.suppress(Exception):  # of the reference: its rows say why
                call = call.without_lacking_buffers(first).as_returned(first)
        yield call, runs


def _call_of(asked: Asked, plan: FunctionPlan, number: int) -> FunctionCall:
    """Returns the call whose index in the plan is `number`, with a reference for each
    draw."""
    references = [
        FunctionReference(
            function=asked.reference,
            arguments=drawn.arguments,
            seed=drawn.seed,
            backward=asked.backward,
        )
        for drawn in plan.of(number)
    ]
    others = plan.others[number]
    return FunctionCall(
        name=plan.names[number], draws=references, others=others,
        outputs_only=asked.outputs_only,
    )  # fmt: skip


def format_of_inputs(arguments: Arguments) -> Format:
    """Returns the format of the first real floating-point argument whose dtype has one;
    float32 where there is none."""
    for x in arguments.leaves().values():
        with contextlib.suppress(UsageError):  # a dtype of no format
            if x.is_floating_point():
                return format_of(x.dtype)
    return FORMATS["float32"]


def _exact(call: FunctionCall) -> Values:
    """Returns the exact results of a call's first draw, by name; empty where the
    reference raises an exception. Computed once for the call."""
    try:
        return call.draws[0].truth
    except Exception:  # its rows say why
        return {}


def _in_float32(call: FunctionCall, fmt: Format) -> Iterator[str]:
    """Yields a sentence that names the operators that the reference computes in float32
    in this format, since PyTorch has no kernel of them; nothing where there is no such
    operator, or where the reference raises an exception."""
    try:
        ran = call.draws[0].plain
    except Exception:  # its rows say why
        return
    if ran.in_float32:
        names = ", ".join(ran.in_float32)
        yield (
            f"PyTorch has no {fmt.name} kernel of {names} on {call.draws[0].device}: "
            "there the reference computes in float32, and rounds once."
        )


def _results_not_compared(call: FunctionCall) -> Iterator[str]:
    """Yields a sentence that names the buffers that the reference writes into and the
    function has none of, or others, one that names what the reference returns beside
    tensors, and one that counts other tensors that gradients go back to; nothing where
    there are none, or where the reference raises an exception."""
    try:
        plain = call.draws[0].plain
    except Exception:  # its rows say why
        return
    if lacking := call.draws[0].lacking:
        yield (
            f"{NOT_COMPARED}: what the reference writes into "
            f"{', '.join(sorted(lacking))}, since the function is no module that begins "
            "with the same buffers."
        )
    if plain.unnamed_leaves:
        yield (
            f"{NOT_COMPARED}: the gradients of tensors ({plain.unnamed_leaves}) that are "
            "neither arguments of the reference nor parameters of its module. Make them "
            "arguments, or check the module itself."
        )
    if plain.beside_tensors:
        names = ", ".join(plain.beside_tensors)
        yield f"{NOT_COMPARED}: what the reference returns beside tensors, {names}."


def _record(call: FunctionCall, fmt: Format) -> FunctionCallRecord:
    """Returns the report's record of a call, with the number of rows and features of its
    tensors, by name; where the reference raises an exception, those of an output of one
    row."""
    extents: dict[str, Extent] = {}
    try:
        for name, judge in call.judges.items():
            shape = in_rows(judge.truth).shape
            extents[name] = Extent(units=1, rows=shape[2], width=shape[3])
    except Exception:  # its rows say why
        extents = {"output": Extent(units=1, rows=1)}
    return FunctionCallRecord(
        case=call.name, batch=1, source_format=fmt.name, tensors=extents
    )


def _plan_record(parts: Sequence[FormatPart]) -> PlanRecord:
    """Returns the plan for the report: all roles, the formats, and the calls of the first
    part. `parts`: at least one."""
    asked = parts[0].asked
    roles = [*ROLES, ("kernel", asked.name)]
    return PlanRecord(
        kernels=tuple(PlannedKernel(role=role, kernel=name) for role, name in roles),
        named=True,
        formats=tuple(part.format.name for part in parts),
        calls=tuple((name, None) for name in parts[0].plan.names),
        backward=asked.backward,
    )


def _doubts(plan: FunctionPlan) -> Iterator[str]:
    """Yields a sentence that names the arguments of `plan.redrawn`, all 0 or all 1 in the
    inputs, so that code that leaves them out would pass there; nothing without such
    arguments."""
    if plan.redrawn:
        names = ", ".join(plan.redrawn)
        yield (
            f"All 0 or all 1 in the inputs, so that leaving it out changes nothing: "
            f"{names}. Judged on redrawn numbers in the calls named `again`."
        )
