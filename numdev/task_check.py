"""`check` of a submission beside its task's reference, and of a solution beside its
definition's. Their files are Python code, and are executed."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from pydantic import BaseModel
from torch import Tensor

from numdev.errors import UsageError, one_line
from numdev.function_check import (
    at_least_one_seed,
    judged_result,
    match,
    rules_before_runs,
    run_format,
)
from numdev.gate.rules import default_rules_for_functions
from numdev.operations.function.definitions import (
    Definition,
    DefinitionSurroundings,
    Workload,
    by_name,
    calls_of_workloads,
    in_order,
    read_definition,
    read_solution,
    reference_of,
    workloads_of,
)
from numdev.operations.function.inputs import Make, calls_of, parsed_shapes
from numdev.operations.function.process import FunctionProcess
from numdev.operations.function.task_environment import Surroundings
from numdev.operations.function.task_folders import (
    SUBMISSION,
    ImportedTask,
    TaskFolder,
    sizes_text,
)
from numdev.operations.function.trees import Arguments
from numdev.studies.audit.function_for_script import ScriptTarget
from numdev.studies.audit.functions import Asked, RunAll, in_process, run_all
from numdev.studies.audit.tolerance_power import parsed_tolerance
from numdev.system import System
from numdev.testing import CheckResult, Thresholds, rules_of


class BuildMetadata(Protocol):
    """How flashinfer-bench calls a solution that it has built: whether it passes memory
    for the outputs."""

    destination_passing_style: bool


class BuiltSolution(Protocol):
    """A solution that flashinfer-bench has built."""

    metadata: BuildMetadata

    def __call__(self, *arguments: object) -> object:
        """Runs the solution."""


SHOWN = 3  # workloads of a file that a check runs


def check_task(
    submission: str | Path,
    *,
    task: str | Path,
    shapes: str = "",
    seeds: int | Sequence[int] = 0,
    device: str = "auto",
    thresholds: Thresholds = None,
    process: FunctionProcess | None = None,
    power: str | None = None,
    reproducers: str | Path | None = None,
) -> CheckResult:
    """Returns the result of a check whether `custom_kernel` of a submission's file
    computes what `ref_kernel` of a task's folder computes, as exactly as its formats
    allow, on inputs of `generate_input`.

    Runs the smaller of the task's tests, or with `shapes` (`m=64,n=32`) one call of these
    sizes alone. On a CPU "cuda" in these files means the CPU, so that other numbers are
    drawn than on a GPU. `seeds`: added to the tests' own. `thresholds`: a gate file, or
    its content; None: the default rules. `process`: runs the submission; None: this
    process does. `power`, `reproducers`: as of `check_beside`. Raises UsageError for
    wrong arguments and files, for tasks of several GPUs and those that judge outputs by
    their properties, and where all tests are too large; MeasurementError where the
    process does not answer, and where the rules were made for another system."""
    seeds = at_least_one_seed(seeds)
    tolerance = None if power is None else parsed_tolerance(power)
    system = System.probe(device)
    rules = rules_before_runs(thresholds, system, reproducers)
    folder = TaskFolder.read(Path(task))
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        around = folder.unpacked(place, system.device)
        stack.enter_context(around.entered())
        read = ImportedTask.imported(folder, around)
        chosen, remarks = read.chosen(shapes, system.device)
        asked = Asked(
            name=f"{Path(submission).stem}:{SUBMISSION}",
            reference=read.reference,
            make=read.calls(chosen),
            seeds=seeds,
            device=system.device,
            labels=[sizes_text(sizes) for sizes in chosen],
            redraws=False,
            outputs_only=True,
            remarks=remarks,
        )
        run = _runner(f"{submission}:{SUBMISSION}", around, process)
        script = ScriptTarget(file=Path(submission), name=SUBMISSION, folder=place)
        part = run_format(asked, run, script)
        request = {
            "target": str(submission),
            "inputs": f"{folder.path / 'reference.py'}:generate_input",
            "reference": f"{folder.path / 'reference.py'}:ref_kernel",
        }
        return judged_result([part], request, system, rules, tolerance, reproducers)


def check_definition(
    solution: str | Path,
    *,
    definition: str | Path,
    inputs: Callable[..., object] | str | Path | None = None,
    shapes: str = "",
    seeds: int | Sequence[int] = 0,
    device: str = "auto",
    thresholds: Thresholds = None,
    process: FunctionProcess | None = None,
    power: str | None = None,
    reproducers: str | Path | None = None,
) -> CheckResult:
    """Returns the result of a check whether a solution computes what the reference of a
    definition's file computes, as exactly as its formats allow. `solution`: a JSON file
    with sources and an entry point, or `FILE.py:function`, which returns the outputs.

    `inputs`: a file of workloads (.jsonl), of which the first SHOWN are run; or a
    function of a seed, or a safetensors file, as of `check_beside`; None: normal numbers,
    with the definition's variable axes as in `shapes` (`M=64,N=32`). `seeds`: one seed of
    random inputs, or several, at least one. `thresholds`, `process`, `power`,
    `reproducers`: as of `check_beside`. Raises UsageError for wrong arguments and files,
    for solutions that need a build, and for inputs whose meaning a definition does not
    tell; MeasurementError where the process does not answer, and where the rules were
    made for another system."""
    seeds = at_least_one_seed(seeds)
    tolerance = None if power is None else parsed_tolerance(power)
    system = System.probe(device)
    rules = rules_before_runs(thresholds, system, reproducers)
    read = read_definition(Path(definition))
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target, passes_outputs = _unpacked(str(solution), place)
        around = DefinitionSurroundings(
            folder=str(place), modules=(), device=system.device, definition=read,
            passes_outputs=passes_outputs,
        )  # fmt: skip
        stack.enter_context(around.entered())
        reference = _reference(read, around, place)
        make, labels, remarks = _calls(read, inputs, shapes, reference, system.device)
        asked = Asked(
            name=f"{Path(solution).stem}" if passes_outputs else str(solution),
            reference=reference,
            make=make,
            seeds=seeds,
            device=system.device,
            labels=labels,
            redraws=False,
            outputs_only=True,
            remarks=remarks,
        )
        script = _script_of(target, around, place)
        part = run_format(asked, _runner(target, around, process), script)
        request = {
            "target": str(solution),
            "inputs": str(inputs or shapes or "normal numbers"),
            "reference": f"{definition}:run",
        }
        return judged_result([part], request, system, rules, tolerance, reproducers)


def _unpacked(solution: str, folder: Path) -> tuple[str, bool]:
    """Returns the target `FILE.py:NAME` of a solution, and whether it is called with
    memory for its outputs. Of a JSON file the sources are written into a folder; any
    other target is returned as it is, with False. Raises UsageError for a wrong file."""
    if not solution.endswith(".json"):
        return solution, False
    form = read_solution(Path(solution))
    return form.unpacked(folder), form.spec.destination_passing_style


def _script_of(target: str, around: DefinitionSurroundings, folder: Path) -> ScriptTarget:
    """Returns how a reproducer script gets a solution. `folder`: has its sources, where
    it came as JSON."""
    path, _, name = target.rpartition(":")
    read = around.definition

    def memory(arguments: Arguments) -> Sequence[Tensor]:
        """Returns memory for the outputs of a call; empty where the solution returns
        them."""
        inputs = in_order(read, arguments.positional, arguments.named)
        return around.memory(inputs) if around.passes_outputs else ()

    return ScriptTarget(
        file=Path(path),
        name=name,
        source=read.reference,
        folder=folder if Path(path).resolve().is_relative_to(folder.resolve()) else None,
        memory=memory,
        outputs=tuple(read.outputs),
        constants=frozenset(x.value for x in read.axes.values() if x.value),
    )


def _reference(
    definition: Definition, around: DefinitionSurroundings, folder: Path
) -> Callable[..., object]:
    """Returns a definition's reference, a function that takes its inputs by place or by
    name and returns its outputs by name. Raises UsageError where its code cannot be
    run. The reference raises UsageError where it does not return what the definition says
    (`check_outputs`)."""
    plain = Surroundings(folder=str(folder), modules=(), device=around.device)
    run = plain.function_at(reference_of(definition, folder))

    @functools.wraps(run)
    def reference(*arguments: object, **named: object) -> object:
        """Returns the outputs of the definition's code by name. Raises UsageError where
        they are not what the definition says, and what the code raises."""
        inputs = in_order(definition, arguments, named)
        outputs = by_name(definition, run(*inputs))
        around.check_outputs(inputs, outputs)
        return outputs

    return reference


def _calls(
    definition: Definition,
    inputs: Callable[..., object] | str | Path | None,
    shapes: str,
    reference: Callable[..., object],
    device: str,
) -> tuple[Make, Sequence[str], Sequence[str]]:
    """Returns what makes the calls of a seed, the names of the calls (empty: they have
    none), and sentences on workloads that are not run. Raises UsageError for inputs and
    shapes together, for a wrong file, for a name that is no variable axis of the
    definition, and for a size below 1."""
    if inputs is not None and shapes:
        raise UsageError(
            "inputs: expected a function, a file or shapes, got two of these"
        )
    if inputs is not None and not str(inputs).endswith(".jsonl"):
        return calls_of(inputs, reference), (), ()
    sizes = definition.sizes({name: size for name, (size,) in _axes(shapes).items()})
    every = [Workload(axes={name: sizes[name] for name in definition.variable})]
    if inputs is not None:
        every = workloads_of(Path(str(inputs)), definition)
    chosen = every[:SHOWN]
    remarks = [
        f"Not run: {len(every) - SHOWN} of {len(every)} workloads, the later ones."
    ]
    return (
        calls_of_workloads(definition, chosen, device),
        [call.label for call in chosen],
        remarks if len(every) > SHOWN else (),
    )


def _axes(shapes: str) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of axes in `M=64,N=32` by name, each a tuple of one; empty for an
    empty text. Raises UsageError for another form."""
    sizes = parsed_shapes(shapes) if shapes else {}
    for name, size in sizes.items():
        if len(size) != 1:
            raise UsageError(f"shape: expected one number for the axis {name}")
    return sizes


def _runner(target: str, around: Surroundings, process: FunctionProcess | None) -> RunAll:
    """Returns what runs a target in its surroundings on the draws of a plan, without
    gradients: `process`, or this process where that is None. Raises UsageError for a
    target that this process cannot import."""
    if process is not None:
        return in_process(process, target, backward=False, surroundings=around)
    return functools.partial(run_all, around.function_at(target), backward=False)


def output_judge(
    definition: str | Path | Definition, thresholds: Thresholds = None
) -> Callable[[Sequence[object], object], tuple[bool, str]]:
    """Returns a judge of outputs beside a definition's reference, whose source is run
    when the judge is called: (inputs in order, outputs) -> (whether they are right, the
    verdict in one line). Raises UsageError for a file that is no definition, and for
    wrong rules."""
    read = definition
    if not isinstance(read, Definition):
        read = read_definition(Path(read))
    rules_of(thresholds, default_rules_for_functions)

    def judge(inputs: Sequence[object], outputs: object) -> tuple[bool, str]:
        """Returns whether outputs (one, a tuple in order, or a mapping by name) are what
        the reference computes from the inputs, and the verdict in one line; False where
        they cannot be judged, and for an output without numbers in memory (on the device
        meta, sparse). Raises UsageError where the reference's code cannot be run, and for
        inputs without numbers in memory; MeasurementError where the rules were made for
        another system."""
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        with tempfile.TemporaryDirectory() as place:
            around = DefinitionSurroundings(
                folder=place, modules=(), device=device, definition=read
            )
            reference = _reference(read, around, Path(place))
            decide = match(reference, thresholds=thresholds)
            return decide(tuple(inputs), by_name(read, outputs))

    return judge


def bench_correctness(
    definition: BaseModel,
    solution: BuiltSolution,
    inputs: Sequence[Sequence[object]],
    log_path: str,
    device: str,
) -> tuple[object, object]:
    """Returns correctness and evaluation of a solution, as flashinfer-bench's evaluators
    do. It runs on one tuple of inputs after another, up to the first on which it raises
    or its outputs are wrong. Where it passes all, the evaluation is None; where it
    raises, the correctness is None. Each run gets copies of the inputs. `definition`,
    `solution`: objects of that package. Raises ImportError without flashinfer-bench."""
    make_eval = importlib.import_module("flashinfer_bench.bench.utils").make_eval
    data = importlib.import_module("flashinfer_bench.data")
    read = Definition.model_validate(definition.model_dump(mode="json"))
    judge = output_judge(read)
    around = DefinitionSurroundings(folder="", modules=(), device=device, definition=read)
    for each in inputs:
        memory: Sequence[object] = ()
        if solution.metadata.destination_passing_style:
            memory = around.memory(each)
        copies = [x.clone() if isinstance(x, Tensor) else x for x in each]
        try:
            with torch.no_grad():
                returned = solution(*copies, *memory)
        except Exception as error:  # it is foreign code
            status = data.EvaluationStatus.RUNTIME_ERROR
            return None, make_eval(
                status=status, device=device, log_path=log_path,
                extra_msg=one_line(error),
            )  # fmt: skip
        is_right, words = judge(each, memory or returned)
        if not is_right:
            wrong = data.Correctness(extra={"numdev": words})
            return wrong, make_eval(
                status=data.EvaluationStatus.INCORRECT_NUMERICAL, device=device,
                log_path=log_path, correctness=wrong, extra_msg=words,
            )  # fmt: skip
    return data.Correctness(extra={"numdev": "passed"}), None
