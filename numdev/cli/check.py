"""`numdev check`: one kernel on small cases, and what is wrong with it."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from numdev.cli.diagnose import attention_options
from numdev.cli.file_kinds import expect_file
from numdev.cli.options import DEVICES, AtLeast
from numdev.cli.session import FILE, command, say
from numdev.errors import MeasurementError, UsageError

if TYPE_CHECKING:
    from numdev.report.document import Document
    from numdev.testing import CheckResult

SHOWN = 4  # findings
CODES = {"PASS": 0, "FAIL": 1, "NOT JUDGED": 3}
CASE = (
    "Case to run: a name in configs/check/default.yaml, an input regime "
    "(docs/hazards.md), a "
    "YAML file of cases, or captured tensors. Repeatable.  [default: "
    "configs/check/default.yaml]"
)
BACKWARD = "Whether dq, dk and dv are checked too.  [default: if autograd supports it]"
RULES = (
    "YAML file of thresholds.  [default: configs/gate/check.yaml and default.yaml; with "
    "--reference configs/gate/function.yaml]"
)
REFERENCE = (
    "What TARGET is to compute, FILE.py:function: any function of PyTorch. Its exact "
    "result is the truth, and its own rounding the yardstick."
)
INPUTS = (
    "With --reference: FILE.py:function of a seed that returns the arguments, or a "
    "safetensors file of them by name. With --definition also a .jsonl of workloads."
)
PROBLEM = (
    "Problem file: a class Model, get_inputs and get_init_inputs. TARGET is then a file "
    "with a class ModelNew. Both files are run."
)
TASK = (
    "Task folder: task.yml, and reference.py with generate_input and ref_kernel. TARGET "
    "is then a file with custom_kernel. Its files are run."
)
DEFINITION = (
    "Definition file: JSON with axes, inputs, outputs and the source of a reference. "
    "TARGET is then a solution, JSON with sources or FILE.py:function. Both are run."
)
SHAPE = (
    "With --reference, in place of --inputs: normal numbers, x=256x1024,w=1024. With "
    "--task the arguments of generate_input, with --definition its axes: m=64,n=32."
)
POWER = (
    "Beside a reference of any kind: a tolerance, 1e-2 or RTOL,ATOL. Says which of "
    "fourteen wrong kernels it passes on these inputs, beside numdev."
)
OUTPUT = "Directory for failure scripts.  [default: a temporary folder]"
DEVICE = "Where to run.  [default: auto]"
CLAIM = (
    "The kernel's intended rounding, as an `emulated` option: preset=eager. "
    "Repeatable.  [default: "
    "as declared, else preset=fa2]"
)


@command("check mine.py:attend --format float16 --no-backward")
@click.argument("target")
@click.option("--case", "cases", multiple=True, metavar="NAME|FILE", help=CASE)
@click.option(
    "--format", "formats", multiple=True, metavar="NAME",
    help="Format of the inputs. Repeatable.  [default: bfloat16 and float16]",
)  # fmt: skip
@click.option("--backward/--no-backward", default=None, help=BACKWARD)
@click.option("-o", "--output", type=FILE, metavar="DIR", help=OUTPUT)
@click.option("--claim", "claims", multiple=True, metavar="NAME=VALUE", help=CLAIM)
@click.option("--thresholds", type=FILE, metavar="FILE", help=RULES)
@click.option(
    "--seed", "seeds", multiple=True, type=AtLeast(0), metavar="N",
    help="Seed for random inputs. Repeatable.  [default: 0]",
)  # fmt: skip
@click.option("--device", type=click.Choice(DEVICES), default="auto", help=DEVICE)
@click.option("--reference", metavar="FILE:NAME", help=REFERENCE)
@click.option("--problem", type=FILE, metavar="FILE", help=PROBLEM)
@click.option("--task", type=FILE, metavar="DIR", help=TASK)
@click.option("--definition", type=FILE, metavar="FILE", help=DEFINITION)
@click.option("--inputs", metavar="FILE[:NAME]", help=INPUTS)
@click.option("--shape", "shapes", default="", metavar="NAME=AxB,...", help=SHAPE)
@click.option("--power", metavar="TOL", help=POWER)
@click.option(
    "--json", "as_json", is_flag=True, help="The verdict and the report as JSON."
)
@click.pass_context
def check(
    context: click.Context,
    target: str,
    cases: tuple[str, ...],
    formats: tuple[str, ...],
    backward: bool | None,
    output: Path | None,
    claims: tuple[str, ...],
    thresholds: Path | None,
    seeds: tuple[int, ...],
    device: str,
    reference: str | None,
    problem: Path | None,
    task: Path | None,
    definition: Path | None,
    inputs: str | None,
    shapes: str,
    power: str | None,
    as_json: bool,
) -> None:
    """Check one kernel on small cases: is it attention, and as exact as its format
    allows? With --reference, any function: is it its reference?

    TARGET is FILE.py:function, package.module:function (the current folder is searched
    too) or a name of `numdev kernels`. Prints the verdict, what is wrong and where, what
    was not tested, and a standalone script that reproduces the failure. Exit code 0:
    passed. 1: a limit is exceeded. 2: a wrong option, or a function that cannot be
    imported. 3: nothing could be judged (not a pass)."""
    gc.disable()  # a tenth of the time, most of it while torch is imported
    beside = CheckedAgainst(
        reference=reference, problem=problem, task=task, definition=definition
    )
    beside.expect_files(thresholds)
    if output is not None:
        from numdev.report.io import expect_directory

        expect_directory(output)
    if not as_json:
        say(f"check: started on {target}")
    if beside.options():
        if cases or claims:
            raise UsageError("--case and --claim are of attention alone")
        beside.check_options(inputs, shapes, formats, backward)
        result = check_function(
            target, beside, inputs, shapes=shapes, formats=formats,
            backward=backward, device=device, seeds=seeds or 0, thresholds=thresholds,
            output=output, power=power,
        )  # fmt: skip
    else:
        if inputs or shapes:
            raise UsageError("--inputs and --shape need a --reference")
        if power is not None:
            raise UsageError("--power needs a --reference")
        result = check_attention_kernel(
            target, cases, formats, claims, backward=backward, device=device,
            seeds=seeds, thresholds=thresholds, output=output,
        )  # fmt: skip
    show_check(result, as_json=as_json)
    context.find_root().obj = code = CODES[result.verdict]
    context.exit(code)


def show_check(result: CheckResult, *, as_json: bool) -> None:
    """Prints a check on stdout: as JSON (`check_as_data`) in one line, or as a page for
    the terminal (`check_document`)."""
    from numdev.report.renderers import terminal

    if as_json:
        click.echo(json.dumps(check_as_data(result)))
    else:
        terminal.show(check_document(result))


def check_attention_kernel(
    target: str,
    cases: tuple[str, ...],
    formats: tuple[str, ...],
    claims: tuple[str, ...],
    *,
    backward: bool | None,
    device: str,
    seeds: tuple[int, ...],
    thresholds: Path | None,
    output: Path | None,
) -> CheckResult:
    """Returns the check of a kernel of attention. Empty `cases`, `formats`, `claims` and
    `seeds` stand for the defaults of `numdev check`; so does None for any other argument.
    What the kernel prints goes to stderr. Raises MeasurementError where the kernel cannot
    run here; UsageError for an unknown kernel, one that cannot be imported, and wrong
    options."""
    from numdev.kernels import find
    from numdev.system import System
    from numdev.testing import check as run

    for case in cases:
        expect_file(case, "--case")
    with contextlib.redirect_stdout(sys.stderr):  # a foreign kernel may print
        kernel = find(target)
        if missing := kernel.missing(System.probe(device)):
            raise MeasurementError(f"{kernel.name} cannot run here: {missing}")
        return run(
            kernel,
            cases=cases or None,
            formats=formats or ("bfloat16", "float16"),
            backward="auto" if backward is None else backward,
            device=device,
            seeds=seeds or 0,
            thresholds=thresholds,
            claims=attention_options(None, claims, "--claim") if claims else None,
            reproducers=output,
        )


@dataclass(frozen=True, kw_only=True)
class CheckedAgainst:
    """What a target is checked beside: one of these options, or where all are None,
    nothing."""

    reference: str | None
    problem: Path | None
    task: Path | None
    definition: Path | None

    def options(self) -> list[str]:
        """Returns the options that are set, as they are written: `--reference`."""
        return [f"--{name}" for name, value in vars(self).items() if value is not None]

    def expect_files(self, thresholds: Path | None) -> None:
        """Raises UsageError for a file of another kind than its option takes. A path that
        does not exist passes, and so does a file whose kind nothing tells; `reference` is
        not looked at. `thresholds`: the file of `--thresholds` or None."""
        paths = {**vars(self), "thresholds": thresholds}
        for name, path in paths.items():
            if isinstance(path, Path):
                expect_file(path, f"--{name}")

    def check_options(
        self,
        inputs: str | None,
        shapes: str,
        formats: tuple[str, ...],
        backward: bool | None,
    ) -> None:
        """Raises UsageError where more than one of these options is set; for `inputs` or
        `shapes` beside a problem; for `inputs` beside a task; for `formats`, or
        `backward` True, beside a task or a definition. Empty ones pass."""
        several = self.options()
        if len(several) > 1:
            raise UsageError(f"expected one of {' and '.join(several)}, got both")
        if self.problem is not None and (inputs or shapes):
            raise UsageError("--inputs and --shape: a problem has inputs of its own")
        if self.task is not None and inputs:
            raise UsageError("--inputs: a task has inputs of its own; --shape sizes them")
        has_formats = self.task is not None or self.definition is not None
        if has_formats and (formats or backward):
            raise UsageError(
                f"--format and --backward: what {several[0]} names has formats of its "
                "own, and no gradients"
            )


def check_function(
    target: str,
    beside: CheckedAgainst,
    inputs: str | None,
    *,
    shapes: str,
    formats: tuple[str, ...],
    backward: bool | None,
    device: str,
    seeds: int | tuple[int, ...],
    thresholds: Path | None,
    output: Path | None,
    power: str | None,
) -> CheckResult:
    """Returns the check of a function beside its reference, or of what solves a problem,
    a task or a definition. The function is imported and run in a process of its own, in
    which nothing of the reference is. Writes the report into the directory `output`, if
    there is one, and a failure's script there, else into a new temporary folder. Raises
    UsageError and MeasurementError as `check_beside` does."""
    from numdev.function_check import check_beside, check_problem
    from numdev.kernels import import_callable
    from numdev.operations.function.process import FunctionProcess
    from numdev.studies.audit.functions import served
    from numdev.task_check import check_definition, check_task

    scripts = output or tempfile.mkdtemp(prefix="numdev-check-")
    with (
        FunctionProcess(run=served, starts_cuda=_may_use_cuda(device)) as process,
        contextlib.redirect_stdout(sys.stderr),
    ):
        source = _source_of_inputs(inputs)
        if beside.problem is not None:
            result = check_problem(
                target, problem=beside.problem, formats=formats, backward=bool(backward),
                seeds=seeds, device=device, thresholds=thresholds, process=process,
                power=power, reproducers=scripts,
            )  # fmt: skip
        elif beside.task is not None:
            result = check_task(
                target, task=beside.task, shapes=shapes, seeds=seeds, device=device,
                thresholds=thresholds, process=process, power=power, reproducers=scripts,
            )  # fmt: skip
        elif beside.definition is not None:
            result = check_definition(
                target, definition=beside.definition, inputs=source, shapes=shapes,
                seeds=seeds, device=device, thresholds=thresholds, process=process,
                power=power, reproducers=scripts,
            )  # fmt: skip
        else:
            reference = import_callable(str(beside.reference), "reference")
            result = check_beside(
                target, reference=reference, inputs=source, shapes=shapes,
                formats=formats, backward=backward, seeds=seeds, device=device,
                thresholds=thresholds, process=process, power=power,
                reproducers=scripts,
            )  # fmt: skip
    if output is not None:
        write_report(result, output)
    return result


def _source_of_inputs(inputs: str | None) -> Callable[..., object] | str | None:
    """Imports and returns the function that FILE:NAME names; text without a colon, and
    None, is returned as it is. Raises UsageError where the function cannot be
    imported."""
    from numdev.kernels import import_callable

    if inputs is None or ":" not in inputs:
        return inputs
    return import_callable(inputs, "function of inputs")


def write_report(result: CheckResult, output: Path) -> None:
    """Writes the report of a check into a directory, as report.json, tables and page, and
    makes the directory where it is missing. Raises UsageError where that cannot be made,
    OSError where a file cannot be written."""
    from numdev import report as reports
    from numdev.report.io import make_directory
    from numdev.report.renderers import html

    make_directory(output)
    reports.write(result.report, output)
    html.write(result.report, output)


def _may_use_cuda(device: str) -> bool:
    """Whether another device than `cpu` is asked for (`auto`, `cuda`), and Linux has the
    device files of a GPU. PyTorch is not asked, since a fork could not use CUDA then."""
    return device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))


def check_as_data(result: CheckResult) -> dict[str, object]:
    """Returns a check as plain data: first what a program asks for (`passed`, `verdict`,
    `findings`, `not_tested`), and under `report` the whole report."""
    from numdev.report import Places

    name, findings = Places(result.report.rows, result.report.words), []
    for f in result.report.findings:
        data = f.model_dump(
            include={
                "sentence",
                "details",
                "severity",
                "rule",
                "metric",
                "limit",
                "cause",
            }
        )
        place = f.place and name(f.place)
        findings.append({**data, "number": f.observed, "place": place})
    return {
        "kernel": result.kernel,
        "passed": result.passed,
        "verdict": result.verdict,
        "findings": findings,
        "not_tested": result.skipped,
        "notes": result.notes,
        "reproducer": result.reproducer and str(result.reproducer),
        "report": result.report.model_dump(mode="json"),
    }


def check_document(result: CheckResult) -> Document:
    """Returns a check as a document for the terminal: the verdict, at most SHOWN further
    findings that a limit is exceeded and how many more there are, what was tested and
    what not, and the script that reproduces a failure. A check that was not judged,
    without a crash, has its reason in short as the only verdict."""
    from numdev.report import FunctionReport
    from numdev.report.document import Bullets, Document, Item, Paragraph, notes
    from numdev.report.views import verdicts
    from numdev.studies.audit.function_reports import power_blocks

    report, lines = result.report, tuple(verdicts(result.report))
    # No crash
    if result.verdict == "NOT JUDGED" and all(line.style != "bad" for line in lines):
        lead = f"NOT JUDGED  {result.kernel}"
        lines = (Item(result.in_short, lead=lead, style="warn"),)
    led = {v.finding for v in report.verdicts}
    every = enumerate(report.findings)
    others = [f for i, f in every if f.severity == "exceeded" and i not in led]
    more = [Item(finding.sentence, detail=finding.details) for finding in others[:SHOWN]]
    if len(others) > SHOWN:
        more.append(Item(f"And {len(others) - SHOWN} more findings."))
    judged = f"Checked: {result.in_short}" if result.passed else ""
    script = f"To reproduce: python {result.reproducer}" if result.reproducer else ""
    asked = power_blocks(report) if isinstance(report, FunctionReport) else ()
    return Document(
        f"numdev check {result.kernel}",
        (
            Bullets(lines, "verdicts"),
            Bullets(tuple(more), "findings"),
            *notes((judged, *result.notes, *result.skipped)),
            *asked,
            Paragraph(script),
        ),
    )
