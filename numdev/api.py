"""The public functions that are no test, with signatures that stay. docs/api.md has
examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from numdev import report as reports
from numdev.argument_checks import checked
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, UsageError
from numdev.gate import compare as comparing
from numdev.gate.compare_report import CompareReport
from numdev.kernels import Kernel, Output, kernel_of_function
from numdev.report import AuditReport, DeviationRow, Report
from numdev.report.io import claim_directory, refuse_other_kind
from numdev.report.renderers import html
from numdev.request_models import AuditRequest, audit_request
from numdev.sources import capture as capturing
from numdev.sources.case_sources import (
    CallsSource,
    CheckpointSource,
    Source,
    open_source,
)
from numdev.sources.checkpoint import InMemory
from numdev.sources.upstream_gradients import find_upstream
from numdev.studies.audit import run
from numdev.studies.audit.case_measurement import measure_one
from numdev.studies.audit.dask_workers import cluster_of, sharing
from numdev.studies.audit.isolation import copied
from numdev.studies.audit.plan import Task
from numdev.studies.audit.reproducer_script import name_of
from numdev.studies.effects.report import EffectsReport
from numdev.studies.invariance.report import InvarianceReport
from numdev.studies.logprobs.report import LogprobsReport
from numdev.system import System, expect_device

R = TypeVar("R", bound=Report)
# Of a forward pass, by name or in order
Inputs = Mapping[str, object] | Tensor | Sequence[Tensor]
Target = str | Path | nn.Module | AttentionCase | Sequence[AttentionCase]
Cases = (
    AttentionCase
    | Mapping[str, object]
    | Sequence[AttentionCase]
    | Sequence[Mapping[str, object]]
)
# What names a kernel, or is one
Named = str | Mapping[str, object] | Callable[..., object] | Kernel


@checked
def audit(
    target: Target | None = None,
    inputs: Inputs | str | Path | None = None,
    *,
    cases: Cases | None = None,
    kernels: Named | Sequence[Named] = (),
    formats: str | Sequence[str] = (),
    backward: bool | None = None,
    layers: Sequence[int] | None = None,
    rows: int | None = None,
    device: str | None = None,
    seed: int | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    workers: int | None = None,
    scheduler: str | None = None,
    save_cases: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    **options: object,
) -> AuditReport:
    """Measures every attention call through every kernel against fp64, as `numdev audit`.

    `target`: a model in memory, which reads `inputs` (as of `capture`); attention calls
    in memory, as `capture` returns them; else a checkpoint directory, a state dict,
    captured tensors, a YAML file, or `demo`, the default. `cases`, in place of a target:
    calls in memory, or mappings with the keys of a YAML case. `kernels`: names of `numdev
    kernels`, `package.module:function`, functions of q, k and v (docs/kernels.md), or
    mappings of a `name` and options; empty: the target's own, or PyTorch's backends.
    `formats`: empty: the target's own, or bfloat16. `backward`: dq, dk and dv too.
    `layers`: only these. `rows`: so many query rows of each head; None: all. `device`:
    None: that of the model or calls, else a GPU if there is one. `output`: a directory
    for the report, its page and tables, in which the same request continues (unless
    `overwrite`). `workers`, `scheduler`: so many Dask workers, or those of an address,
    measure. `save_cases`: a new directory for the calls. `say` gets messages that are not
    in the report. `options`: all other keys of an audit's YAML file (`heads`, `explain`).

    Returns the report: a row for each head, tensor, kernel and format of each call
    (`report.rows`), `report.findings`, the ranking (`report.summary`). Errors are in the
    units of the tensors; a number that means nothing is None, and `nulls` says why.
    Raises UsageError for a request that cannot be run here, MeasurementError where calls
    cannot be captured or none be measured, OSError where a file cannot be written."""
    audited = _audit_subject(target, cases, inputs)
    named, functions = _named_kernels(kernels)
    flags = {
        **_nonempty_options(options), "backward": backward, "rows": rows, "seed": seed,
        "device": device or audited.device, "inputs": audited.inputs,
        "kernels": named, "formats": tuple(_as_list(formats)),
        "layers": tuple(layers or ()),
        "reproducers": 0 if output is None else options.get("reproducers"),
    }  # fmt: skip
    request = audit_request(audited.name, flags, audited.fields)
    directory = _output_directory(output, "audit")
    cluster = cluster_of(workers, scheduler)
    with nullcontext() if cluster is None else sharing(cluster, request.device):
        report = run.audit(
            request, directory, command="numdev.audit", say=say, overwrite=overwrite,
            unregistered=functions, workers=cluster,
            opened=audited.opened, save_cases=Path(save_cases) if save_cases else None,
        )  # fmt: skip
    return _write_and_require_measured(report, directory)


def _nonempty_options(options: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the options as they are. Raises UsageError for a value that is an empty
    string, or a list or tuple that has one."""
    for name, value in options.items():
        if value == "" or (isinstance(value, list | tuple) and "" in value):
            raise UsageError(f"{name}: expected a value, got an empty string")
    return options


def _named_kernels(
    kernels: Named | Sequence[Named],
) -> tuple[tuple[str | Mapping[str, object], ...], dict[str, Kernel]]:
    """Returns kernels as a request names them, names and mappings as they are, functions
    and `Kernel`s by their names; and these as kernels by name. `kernels`: one or several.
    Raises UsageError for a function that cannot be a kernel, and where two functions or
    `Kernel`s have one name."""
    chosen = [
        x if isinstance(x, str | Mapping | Kernel) else kernel_of_function(name_of(x), x)
        for x in _as_list(kernels)
    ]
    functions = [x for x in chosen if isinstance(x, Kernel)]
    names = [kernel.name for kernel in functions]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise UsageError(f"kernels: two functions are named {twice!r}", hint="rename one")
    named = tuple(x.name if isinstance(x, Kernel) else x for x in chosen)
    return named, {kernel.name: kernel for kernel in functions}


@dataclass(frozen=True, kw_only=True)
class _Audited:
    """The subject of an audit, as a request names it, and the function that opens it."""

    name: str
    fields: Mapping[str, object] | None = None  # the request's; None: `name` has them
    inputs: str | None = None  # a file of what the model reads
    device: str | None = None  # where it is
    opened: Callable[[AuditRequest, System], Source] = open_source


def _audit_subject(
    target: Target | None, cases: Cases | None, inputs: Inputs | str | Path | None
) -> _Audited:
    """Returns the subject of an audit as a request names it. The types of `target` and
    `cases` tell a model in memory, a path or name, attention calls, and mappings of
    cases. A mapping without a name gets `case 0`, `case 1` and so on, by its index. None
    of both: `demo`. Raises UsageError for both together, for inputs beside calls or
    mappings, for a path target with inputs that are no path, and for a model without
    inputs, or with ones that do not fit its forward's arguments."""
    if target is not None and cases is not None:
        raise UsageError("audit: expected a target or cases, got both")
    subject = target if cases is None else cases
    if isinstance(subject, nn.Module):
        memory = InMemory(model=subject, inputs=named_inputs(subject, inputs))
        return _Audited(
            name=type(subject).__name__,
            fields={"checkpoint": memory.name},
            device=next((p.device.type for p in subject.parameters()), None),
            opened=partial(CheckpointSource, in_memory=memory),
        )
    if subject is None or isinstance(subject, str | Path):
        if not isinstance(inputs, str | Path | None):
            what = "inputs: expected a file of tensors beside a target that is no model"
            raise UsageError(f"{what}, got a {type(inputs).__name__}")
        file = None if inputs is None else str(inputs)
        return _Audited(name=str(subject or "demo"), inputs=file)
    if inputs is not None:
        raise UsageError(
            "inputs: expected none beside attention calls, which have their own"
        )
    several = _as_list(subject)
    if several and isinstance(several[0], AttentionCase):
        name = "calls in memory"
        return _Audited(
            name=name,
            fields={"checkpoint": name},
            device=several[0].q.device.type,
            opened=partial(CallsSource, calls=several),
        )
    named = [{"name": f"case {i}", **x} for i, x in enumerate(several)]
    return _Audited(name="cases", fields={"cases": named})


def _as_list(argument: Any) -> list[Any]:
    """Returns kernels, cases or names as a list. A single string, mapping, case, kernel
    or function becomes a list of one."""
    alone = isinstance(argument, str | Mapping | AttentionCase | Kernel) or callable(
        argument
    )
    return [argument] if alone else list(argument)


def named_inputs(model: nn.Module, inputs: Inputs | str | Path | None) -> dict[str, Any]:
    """Returns a model's inputs, by the names of its forward's arguments. A mapping is
    copied, and its names are not checked; a tensor, or a sequence of tensors, is taken in
    the order of forward's arguments. Raises UsageError for more tensors than arguments,
    for a required argument that gets none, for a forward without a signature, as a
    scripted model's, for a path, and for None."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if inputs is None or isinstance(inputs, str | Path):
        what = "inputs: expected the model's inputs (token ids or tensors)"
        raise UsageError(f"{what}, got {'none' if inputs is None else repr(str(inputs))}")
    positional = (inputs,) if isinstance(inputs, Tensor) else inputs
    try:
        return dict(inspect.signature(model.forward).bind(*positional).arguments)
    except (TypeError, ValueError) as error:
        hint = "give tensors in the order of forward's arguments, or a mapping"
        raise UsageError(f"inputs: {error}", hint=hint) from error


@checked
def capture(
    model: nn.Module, inputs: Inputs, *, backward: bool = False, seed: int = 0
) -> list[AttentionCase]:
    """Returns the attention calls that a model makes of `inputs` (forward's arguments by
    name, or tensors in its order), in their order, as copies of its tensors.

    A call of `torch.nn.functional.scaled_dot_product_attention` is captured, whoever
    makes it. Its q is [batch, heads, q_len, head_dim], in the model's own format. With
    `backward` the cases carry grad_out: that of the model's own loss where it returns one
    that is finite, else each drawn from N(0, 1) with `seed`. All calls are in memory
    together: for a large model use `audit` on its checkpoint.

    Raises UsageError for tensors in order that do not fit forward's arguments;
    MeasurementError for a call that is no function of its inputs (dropout: use
    `model.eval()`), where the model raises, as for a name that forward lacks, where it
    makes no attention call, and where a module with query, key and value projections
    computes attention in another way. Attention by hand in a module without them is left
    out, unless there is no call at all."""
    calls: list[AttentionCase] = []
    inputs = named_inputs(model, inputs)
    upstream = find_upstream(model, inputs, seed) if backward else None
    keep = lambda case: calls.append(copied(case))  # noqa: E731
    capturing.capture(model, inputs, keep, source=type(model).__name__, upstream=upstream)
    return calls


@checked
def compare(
    *reports: str | Path | Report, allow: Sequence[str] = (), by_date: bool = False
) -> CompareReport:
    """Returns what moved beyond noise from one report to another of the same request, as
    `numdev compare` shows it. Each is a report, its file or its directory, the oldest
    first. Of three or more, audits or sweeps, the last two are compared, with the history
    of all. `allow` names the keys in which the requests may differ; `by_date` sorts the
    reports by their dates.

    Raises UsageError for fewer than two reports, a path that does not exist, a kind that
    cannot be compared, and reports that do not measure the same; MeasurementError for a
    report that cannot be parsed, is not whole or contradicts itself."""
    sides = (Path(x) if isinstance(x, str) else x for x in reports)
    return comparing.compare(
        *sides, allow=allow, by_date=by_date, command="numdev.compare"
    )


@checked
def logprobs(
    *files: str | Path,
    model: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    **options: object,
) -> LogprobsReport:
    """Says whose log-probabilities are off, and why, as `numdev logprobs` does.

    `files`: one with what both programs recorded, one of each (the rollout's first), or
    with a `model` one alone. `model`: the checkpoint that was sampled and trained, or
    `demo`. `output`: a directory for the report and its tables; None keeps nothing.
    `overwrite`: replaces the report of another request in `output`. `options`: every
    other option of the command (`temperature`, `top_p`, `previous`).

    Returns the report: one row for each sequence of each side (`report.rows`), both sides
    together (`report.pairs`), the causes (`report.summary.sides`). Raises UsageError for
    a request that cannot be run here and an `output` that cannot be made,
    MeasurementError for files that cannot be parsed and where no token can be compared,
    OSError where a file of the report cannot be written."""
    from numdev.request_models import logprobs_request
    from numdev.studies.logprobs.study import logprobs_of_files

    checkpoint = None if model is None else str(model)
    flags = {**_nonempty_options(options), "model": checkpoint}
    request = logprobs_request([str(file) for file in files], flags)
    data = request.model_dump(mode="json")
    if output is not None:
        claim_directory(Path(output), "logprobs", data, overwrite=overwrite)
    report = logprobs_of_files(request, command="numdev.logprobs")
    return _write_and_require_measured(report, None if output is None else Path(output))


@checked
def invariance(
    target: str | Path,
    *,
    kernels: str | Mapping[str, object] | Sequence[str | Mapping[str, object]] = (),
    formats: str | Sequence[str] = (),
    axes: str | Sequence[str] = (),
    require: str | Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
    **options: object,
) -> InvarianceReport:
    """Says along which axes kernels are bit-identical, as `numdev invariance` does.

    `target`: a checkpoint, `demo`, captured tensors, or a YAML file of cases. `kernels`:
    names of `numdev kernels`, `package.module:function`, or mappings of a `name` and
    options; empty: PyTorch's backends. `formats`: empty: bfloat16. `axes`: those to test;
    empty: the required ones, or all but `compiled`. `require`: axes along which every
    kernel must be bit-identical, or the report does not pass. `output`: a directory for
    the report and its tables, in which the same request continues where it stopped; None
    keeps nothing. `overwrite`: replaces earlier results there. `options`: every other key
    of its YAML file (`backward`, `layers`, `device`, `logits`).

    Returns the report: one row for each tensor, call and variant (`report.rows`), the
    verdicts, and whether it passed (`report.passed`). Raises UsageError for a request
    that cannot be run here, MeasurementError where no kernel ran along any axis, OSError
    where a file cannot be written."""
    from numdev.request_models import invariance_request
    from numdev.studies.invariance import study

    flags = {
        **_nonempty_options(options), "kernels": tuple(_as_list(kernels)),
        "formats": tuple(_as_list(formats)), "axes": tuple(_as_list(axes)),
        "require": tuple(_as_list(require)),
    }  # fmt: skip
    request = invariance_request(str(target), flags)
    directory = _output_directory(output, "invariance")
    report = study.invariance(
        request, directory, command="numdev.invariance", overwrite=overwrite
    )
    return _write_and_require_measured(report, directory)


@checked
def effects(
    target: str | Path,
    *,
    kernels: str | Mapping[str, object] | Sequence[str | Mapping[str, object]] = (),
    formats: str | Sequence[str] = (),
    output: str | Path | None = None,
    overwrite: bool = False,
    **options: object,
) -> EffectsReport:
    """Says what rounding does to a model's output, as `numdev effects` does.

    `target`: a checkpoint, the name of a model in the local Hugging Face cache, or
    `demo`. `kernels`, `formats`, `output` and `overwrite`: as of `invariance`. `options`:
    every other option of the command (`sequences`, `length`, `by_layer`, `sites`,
    `device`).

    Returns the report: each run over all sequences (`report.summary.runs`: KL in `cost`,
    nats a token, the change of the loss in `log_perplexity`), the budget of rounding
    sites, and the checks of the model. Raises UsageError for a request that cannot be run
    here, MeasurementError where the model cannot be run exactly, OSError where a file
    cannot be written."""
    from numdev.request_models import effects_request
    from numdev.studies.effects import study

    flags = {
        **_nonempty_options(options), "kernels": tuple(_as_list(kernels)),
        "formats": tuple(_as_list(formats)),
    }  # fmt: skip
    request = effects_request(str(target), flags)
    directory = _output_directory(output, "effects")
    report = study.effects(
        request, directory, command="numdev.effects", overwrite=overwrite
    )
    return _write_and_require_measured(report, directory)


def _output_directory(output: str | Path | None, kind: str) -> Path | None:
    """Returns `output` as a path; None, where no report is kept, as None. Makes no
    directory. Raises UsageError where the directory holds the report of another command
    than `kind`."""
    if output is None:
        return None
    refuse_other_kind(Path(output), kind)
    return Path(output)


def _write_and_require_measured(report: R, directory: Path | None) -> R:
    """Returns the report; writes it, its tables and its page into a directory first,
    unless that is None. Raises OSError where one of these cannot be written;
    MeasurementError where nothing could be measured, after the report is written."""
    if directory is not None:
        reports.write(report, directory)
        html.write(report, directory)
    if not report.measured:
        raise MeasurementError(report.unmeasured, hint="the rows' reasons say why")
    return report


@checked
def measure(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[DeviationRow, ...]:
    """Returns how far `out` is from attention of q, k and v in fp64: one row for each
    head, as in a report.

    q is [batch, heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim], v [batch,
    kv_heads, kv_len, v_dim], all in one format; `out` [batch, heads, q_len, v_dim] in
    that or another one. `scale`: 1 / sqrt(head_dim) if None. `is_causal`: query i sees
    keys up to i. `mask`: bool (True: may attend) or additive, broadcasting to [batch,
    heads, q_len, kv_len].

    `max_abs`, `mean_abs` and `rms` are in the units of `out`, `max_ulp` in units of its
    format's spacing; `floor_ratio` is the rms over that of the exact result rounded once,
    `baseline_ratio` over plain attention's, `expected_ratio` over what FlashAttention-2's
    roundings predict. NaN and infinity are counted (`nonfinite`), never averaged; rows
    that see no key are left out. A number that means nothing is None, with the reason in
    `nulls`.

    Raises UsageError for tensors that do not fit together or are neither on a CPU nor on
    CUDA, MeasurementError for an `out` of another shape or device, or without
    floating-point numbers."""
    case = AttentionCase(
        ref=CaseRef(case="call"),
        q=q.detach(),
        k=k.detach(),
        v=v.detach(),
        scale=max([1, *q.shape[-1:]]) ** -0.5 if scale is None else scale,
        is_causal=is_causal,
        mask=mask,
    )
    kernel = Kernel(
        name="output",
        function=lambda case: Output(out=out.detach()),
        any_format=True,
        claims=lambda case, output, system: {"preset": "fa2"},
    )
    expect_device("q", q.device.type)
    fmt = case.format.name
    task = Task(case=case.ref, role="kernel", kernel=kernel.name, format=fmt)
    rows = measure_one(task, kernel, case, System.probe("cpu"))
    if rows[0].status != "ok":
        raise MeasurementError(f"out cannot be measured: {rows[0].reason}")
    return tuple(rows)
