"""`check` of a function beside a reference: does it compute what the reference computes,
as exactly as its format allows? `numdev.testing.check_function` asserts it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from numdev.errors import MeasurementError, UsageError
from numdev.formats import Format, dtype_of, format_named
from numdev.gate.judgement import Judgement
from numdev.gate.judging import check_system
from numdev.gate.rules import Rules, default_rules_for_functions
from numdev.kernels import import_callable
from numdev.operations.function.inputs import calls_of, parameters_of
from numdev.operations.function.judged_call import DRAWS
from numdev.operations.function.problem_files import (
    SOLUTION,
    ModuleBuild,
    ProblemFile,
    forms_of,
    redrawn_state,
)
from numdev.operations.function.process import FunctionProcess, Work
from numdev.operations.function.reference import parameters_of_module
from numdev.operations.function.trees import Arguments
from numdev.report import FunctionReport, Outcome
from numdev.report.io import expect_directory
from numdev.studies.audit.finding_reproducers import FOLDER
from numdev.studies.audit.function_for_script import ScriptTarget
from numdev.studies.audit.function_reports import not_judged
from numdev.studies.audit.function_reproducer import reproducer_of
from numdev.studies.audit.functions import (
    Asked,
    FormatPart,
    RunAll,
    in_process,
    is_few,
    judge_function_runs,
    planned,
    run_all,
)
from numdev.studies.audit.reproducer_script import name_of
from numdev.studies.audit.tolerance_power import parsed_tolerance
from numdev.system import System
from numdev.testing import CheckResult, Thresholds, filled_text, rules_of

NOTHING = "no test could be judged"
OTHER_STATE = (
    "ModelNew has parameters of other names or shapes than Model: each has its own, "
    "drawn with one seed, and no gradients of them are compared."
)


def check_beside(
    function: Callable[..., object] | str,
    *,
    reference: Callable[..., object],
    inputs: Callable[..., object] | str | Path | None = None,
    shapes: str = "",
    formats: str | Sequence[str] = (),
    backward: bool | None = None,
    seeds: int | Sequence[int] = 0,
    device: str = "auto",
    thresholds: Thresholds = None,
    name: str | None = None,
    process: FunctionProcess | None = None,
    power: str | None = None,
    reproducers: str | Path | None = None,
) -> CheckResult:
    """Returns the result of a check whether a function computes what its reference
    computes, as exactly as its format allows. There is no tolerance: errors are held to
    what the reference errs itself where its operations are rounded.

    `inputs`: a function of a seed, which returns the arguments of one call, or those of
    several calls in a list of tuples; or the path of a safetensors file of named
    arguments; None: normal numbers in `shapes` (`x=256x1024,w=1024`). `seeds`: one seed,
    or several, at least one. `formats`: to which floating-point arguments are rounded;
    empty: as they come (those of `shapes` in bfloat16). `backward`: whether gradients are
    checked; None: where an argument of the first seed requires one. `thresholds`: a gate
    file, or its content; None: the default rules. `name`: the function's in the report;
    None: what it is called. `process`: runs a function that is a name to import; None:
    this process does, before anything of the reference is computed. `power`: a tolerance,
    `1e-2` or `rtol,atol`; the report then says how many wrong kernels it passes.
    `reproducers`: a directory for the script of a failed check; None: none is written.

    Raises UsageError for wrong arguments, as a file for `reproducers`; MeasurementError
    where the process does not answer, and where the rules were made for another
    system."""
    seeds = at_least_one_seed(seeds)
    tolerance = None if power is None else parsed_tolerance(power)
    make = calls_of(inputs, reference, shapes=shapes)
    system = System.probe(device)
    rules = rules_before_runs(thresholds, system, reproducers)
    first = make(seeds[0])
    asked = Asked(
        name=name or (function if isinstance(function, str) else name_of(function)),
        reference=reference,
        make=make,
        backward=_wants_gradients(first) if backward is None else backward,
        seeds=seeds,
        device=system.device,
        remarks=_unseen_sentences(first),
    )
    run = _runner(function, process, backward=asked.backward)
    wanted = [
        dataclasses.replace(asked, format=x) for x in _formats_to_check(formats, inputs)
    ]
    parts = [run_format(each, run) for each in wanted]
    source = name_of(inputs) if callable(inputs) else inputs and str(inputs)
    request = {"target": asked.name, "inputs": source or shapes}
    return judged_result(parts, request, system, rules, tolerance, reproducers)


def at_least_one_seed(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """Returns seeds, or a single one, as a tuple in order. Raises UsageError for none."""
    every = (seeds,) if isinstance(seeds, int) else tuple(seeds)
    if not every:
        raise UsageError("seeds: expected at least 1, got 0")
    return every


def rules_before_runs(
    thresholds: Thresholds, system: System, reproducers: str | Path | None
) -> Rules:
    """Returns the rules of a check of a function; `thresholds`: a gate file, or its
    content; None: the default rules. Raises, so that nothing runs in vain, UsageError for
    wrong rules and where the directory `reproducers`, unless that is None, is no place
    for a script; MeasurementError where the rules were made for another system."""
    if reproducers is not None:
        expect_directory(Path(reproducers) / FOLDER, "reproducers")
    rules = rules_of(thresholds, default_rules_for_functions)
    check_system(system.as_dict(), rules)
    return rules


def _with_reproducer(
    result: CheckResult,
    parts: Sequence[FormatPart],
    rules: Rules,
    directory: str | Path | None,
) -> CheckResult:
    """Returns a result with a script that shows its gravest finding of which one can be
    written. Where none can be, the reason is among its notes, if there was a finding to
    show. A result that passed, and any without a directory (None), is returned as it
    is."""
    if directory is None or result.passed:
        return result
    target, directory = parts[0].asked.name, Path(directory)
    findings = result.report.findings
    script, why = reproducer_of(findings, parts, rules, target, directory)
    if script is None:
        notes = (*result.notes, why) if why else result.notes
        return dataclasses.replace(result, notes=notes)
    return dataclasses.replace(result, reproducer=script)


def check_problem(
    solution: str | Path,
    *,
    problem: str | Path,
    formats: str | Sequence[str] = (),
    backward: bool = False,
    seeds: int | Sequence[int] = 0,
    device: str = "auto",
    thresholds: Thresholds = None,
    process: FunctionProcess | None = None,
    power: str | None = None,
    reproducers: str | Path | None = None,
) -> CheckResult:
    """Returns the result of a check whether the class ModelNew of a solution's file
    computes what the class Model of a problem's file computes, on its `get_inputs`, as
    exactly as its format allows. `formats`: those of arguments and modules; empty: as
    they are made. `backward`: whether gradients are checked. `seeds`: one seed, or
    several, at least one. `thresholds`: a gate file, or its content; None: the default
    rules. `process`: runs the solution; None: this process does. `power`, `reproducers`:
    as of `check_beside`. Raises UsageError for wrong arguments and files;
    MeasurementError where the process does not answer, and where the rules were made for
    another system."""
    seeds = at_least_one_seed(seeds)
    tolerance = None if power is None else parsed_tolerance(power)
    system = System.probe(device)
    rules = rules_before_runs(thresholds, system, reproducers)
    read = ProblemFile.read(Path(problem), system.device)
    parts: list[FormatPart] = []
    for fmt in _formats_to_check(formats, read.get_inputs):
        dtype = None if fmt is None else dtype_of(fmt)
        build = dataclasses.replace(read.build, dtype=dtype)
        reference, run, build = _modules(
            solution, read, build, process, backward=backward
        )
        has_own_state = build.state is None and bool(parameters_of_module(reference))
        asked = Asked(
            name=f"{Path(solution).stem}:{SOLUTION}",
            reference=reference,
            make=calls_of(read.inputs, reference),
            format=fmt,
            backward=backward,
            seeds=seeds,
            device=system.device,
            remarks=(OTHER_STATE,) if has_own_state else (),
        )
        script = ScriptTarget(file=Path(solution), name=SOLUTION, build=build)
        parts.append(run_format(asked, run, script))
    request = {"target": str(solution), "inputs": f"{read.path.name}:get_inputs"}
    return judged_result(parts, request, system, rules, tolerance, reproducers)


def _modules(
    solution: str | Path,
    problem: ProblemFile,
    build: ModuleBuild,
    process: FunctionProcess | None,
    *,
    backward: bool,
) -> tuple[Callable[..., object], RunAll, ModuleBuild]:
    """Returns the reference, what runs the solution, and how the solution's module is
    made. Where parameters and buffers of both have the same names and shapes, both get
    the problem's values, of which tensors of only 0 or only 1 are drawn anew. Else each
    has its own values; the parameters are then no arguments of the reference, and have no
    gradients. `build`: how a module is made of a class. Raises UsageError where the
    solution's class cannot be imported, or the class of either cannot be made."""
    target = f"{solution}:{SOLUTION}"
    if process is not None:
        forms = _forms_in(process, target, build)
    else:
        make = import_callable(target, "solution")
        forms = forms_of(build.module(make))
    reference = build.module(problem.model).requires_grad_(False)
    if forms == forms_of(reference):
        plain = dataclasses.replace(build, dtype=None).module(problem.model)
        build = dataclasses.replace(build, state=redrawn_state(plain)[0])
        reference = build.module(problem.model)
    if process is not None:
        run = in_process(process, target, backward=backward, build=build)
        return reference, run, build
    return reference, partial(run_all, build.module(make), backward=backward), build


def _forms_in(
    process: FunctionProcess, target: str, build: ModuleBuild
) -> dict[str, list[int]]:
    """Returns the shapes of the parameters and buffers, by name, of the module that a
    process makes. Empty where the process does not answer: its runs will say why. Raises
    UsageError where the module cannot be made."""
    work = Work(target=target, draws=(), backward=False, build=build)
    try:
        [answer] = process.answers(work)
    except MeasurementError:
        return {}
    forms: dict[str, list[int]] = json.loads(str(answer))
    return forms


def judged_result(
    parts: Sequence[FormatPart],
    source: Mapping[str, object],
    system: System,
    rules: Rules,
    tolerance: tuple[float, float] | None = None,
    reproducers: str | Path | None = None,
) -> CheckResult:
    """Returns the result of runs, judged by the rules. `parts`: the runs in each format,
    at least one; `source`: further keys of the report's request; `tolerance`: rtol and
    atol, of which the report says what they pass; `reproducers`: a directory for the
    script of a failed check; None: none is written."""
    asked = parts[0].asked
    request = {
        "reference": name_of(asked.reference),
        **source,
        "formats": [part.format.name for part in parts],
        "seeds": list(asked.seeds),
        "backward": asked.backward,
        "rules": rules.name,
    }
    judged = judge_function_runs(parts, rules, request, system, tolerance)
    result = _result_of_report(*judged, asked.remarks)
    return _with_reproducer(result, parts, rules, reproducers)


def _result_of_report(
    report: FunctionReport, judgement: Judgement, not_run: Sequence[str]
) -> CheckResult:
    """Returns the result of a check, its verdict in words. `passed` is whether the
    judgement's outcome is PASSED. `not_run`: sentences among the report's on what was not
    run. They go into `skipped`, with those on what was not judged; all others of the
    report go into `notes`."""
    open_ones = (*not_run, *not_judged(report))
    return CheckResult(
        kernel=str(report.request["target"]),
        passed=judgement.outcome is Outcome.PASSED,
        report=report,
        judgement=judgement,
        notes=tuple(note for note in report.tested if note not in open_ones),
        skipped=open_ones,
        words=filled_text(_verdict_lines(report), (), report.tested),
    )


def match(
    reference: Callable[..., object], *, thresholds: Thresholds = None
) -> Callable[[object, object], tuple[bool, str]]:
    """Returns a judge of single outputs, for task files that call one with a task's data
    and the output of a submission: (data, output) -> (whether the output is right, the
    verdict in one line).

    `data` is a tuple of the reference's arguments; anything else is its only argument,
    and so is a tuple of several where the reference takes one argument. Only the output
    is judged, not what was written into the data. `thresholds`: a gate file, or its
    content; None: the default rules. Raises UsageError for wrong rules."""
    rules = rules_of(thresholds, default_rules_for_functions)

    def judge(data: object, output: object) -> tuple[bool, str]:
        """Returns whether the output is what the reference computes from the data, and
        the verdict in one line; False where it cannot be judged, as where the reference
        raises, and for an output without numbers in memory (on the device meta, sparse).
        Raises MeasurementError where the rules were made for another system, UsageError
        for data without numbers in memory."""
        whole = not isinstance(data, tuple) or (len(data) > 1 and takes_one(reference))
        arguments = (data,) if whole else data
        system = System.probe(_device_of(arguments))
        asked = Asked(
            name="the output",
            reference=reference,
            make=calls_of(lambda: arguments, reference),
            device=system.device,
            again=False,
            outputs_only=True,
        )
        check_system(system.as_dict(), rules)
        run = partial(run_all, lambda *_, **__: output, backward=False)
        part = run_format(asked, run)
        result = judged_result([part], {"target": asked.name}, system, rules)
        return result.passed, result.in_short

    return judge


def takes_one(function: Callable[..., object]) -> bool:
    """Whether a function has exactly one parameter without a default, and takes that by
    position. False where it takes any number of arguments (`*data`), where it also needs
    a keyword, and where its signature cannot be read."""
    parameters = (parameters_of(function) or {}).values()
    needed = [
        p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    return len(needed) == 1 and needed[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )


def _device_of(tree: object) -> str:
    """Returns the type of the device (`cuda`) of the first tensor in a tree; `cpu`
    without a tensor."""
    tensors = (x for x in tree_leaves(tree) if isinstance(x, Tensor))
    return next((x.device.type for x in tensors), "cpu")


def _runner(
    function: Callable[..., object] | str,
    process: FunctionProcess | None,
    *,
    backward: bool,
) -> RunAll:
    """Returns what runs the function on the draws of a plan: `process` for the name of a
    function, if there is one, else this process. `backward`: with gradients. Raises
    UsageError for a name that this process is to import and cannot."""
    if isinstance(function, str):
        if process is None:
            function = import_callable(function, "function")
        else:
            return in_process(process, function, backward=backward)
    return partial(run_all, function, backward=backward)


def run_format(
    asked: Asked, run: RunAll, script: ScriptTarget | None = None
) -> FormatPart:
    """Runs the function on all calls, before anything of the reference is computed, and
    returns its runs with their plan. Where a result has few numbers, and with
    `asked.again`, it runs again on DRAWS draws for each call, and only these runs are
    returned. `script`: how a script gets the function."""
    plan = planned(asked)
    outputs = run(plan.draws)
    if asked.again and is_few(outputs, plan):
        plan = planned(asked, DRAWS)
        outputs = run(plan.draws)
    return FormatPart(asked=asked, plan=plan, runs=outputs, run=run, script=script)


def _wants_gradients(calls: Sequence[Arguments]) -> bool:
    """Whether an argument of one of the calls requires a gradient."""
    return any(x.requires_grad for call in calls for x in call.leaves().values())


def _unseen_sentences(calls: Sequence[Arguments]) -> list[str]:
    """Returns a sentence for each class of objects among the inputs that have tensors:
    numdev does not look into them."""
    names = dict.fromkeys(name for call in calls for name in call.unseen())
    return [
        f"Tensors in {name}, an object among the inputs, come as they are: they are not "
        "rounded, differentiated or tried with other numbers, and what is written into "
        "them is not compared."
        for name in names
    ]


def _formats_to_check(names: str | Sequence[str], inputs: object) -> list[Format | None]:
    """Returns the formats that arguments are rounded to, in order; None stands for
    arguments as they come. Without `names`: None alone, or bfloat16 where `inputs` is
    None. Raises UsageError for an unknown name."""
    asked = (names,) if isinstance(names, str) else tuple(names)
    if not asked:
        return [None if inputs is not None else format_named("bfloat16")]
    return [format_named(name) for name in asked]


def _verdict_lines(report: FunctionReport) -> list[str]:
    """Returns a line with each verdict, `PASS mine (bfloat16): ...`, then the sentences
    of findings that are no notes; NOTHING alone where there are neither."""
    lines = [
        f"{verdict.outcome.word} {verdict.kernel} ({verdict.format})"
        + (f": {verdict.reason}" if verdict.reason else "")
        for verdict in report.verdicts
    ]
    wrong = [f.whole for f in report.findings if f.severity != "note"]
    return [*lines, *wrong] or [NOTHING]
