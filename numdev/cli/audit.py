"""`numdev audit` and `numdev sweep`."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.gate import Verdict, gated
from numdev.cli.options import cluster_options, options_of, seed_option
from numdev.cli.session import FILE, Session, command
from numdev.errors import UsageError
from numdev.request_models import (
    AuditConfig,
    AuditRequest,
    SweepConfig,
    audit_request,
    sweep_request,
)
from numdev.studies.audit.worker_lifetime import started


@command("audit demo --format bfloat16 --format float32")
@click.argument("target", required=False)
@options_of(AuditConfig)
@cluster_options
@click.option(
    "--save-cases", type=FILE, metavar="DIR",
    help="Write every attention call, unrounded, to this new directory: a TARGET.",
)  # fmt: skip
@click.option(
    "--effects", type=FILE, metavar="DIR",
    help="Report of `numdev effects` on the same checkpoint: its answer is repeated.",
)  # fmt: skip
@functools.partial(gated, files=True)
def audit(
    target: str | None,
    session: Session,
    verdict: Verdict | None,
    save_cases: Path | None,
    effects: Path | None,
    workers: int | None,
    scheduler: str | None,
    **flags: object,
) -> None:
    """Audit the attention of a model, of captured tensors, or of the shapes in a YAML
    file.

    TARGET is a Hugging Face checkpoint directory, the name of a model in the local cache
    of Hugging Face (org/model), a state dict (.safetensors, its sharded index, .pt, .pth,
    .bin, or a torch.distributed.checkpoint directory; with --model), a diffusers
    pipeline's directory, a .safetensors file of captured tensors or a directory of them,
    a YAML configuration, or `demo` (the checkpoint that ships with numdev). Default:
    configs/audit/default.yaml. The same request with the same --output resumes where it
    stopped."""
    if target is not None:
        expect_file(target, "audit")
    request = audit_request(target, flags)
    answer = None if effects is None else _effects_answer(effects, request)
    directory = session.begin(Path(request.target).stem or "audit", request.model_dump())
    isolated = request.isolate and workers is None and scheduler is None
    with started(wanted=isolated) as process:  # it imports torch meanwhile
        from numdev.studies.audit.dask_workers import cluster_of, sharing
        from numdev.studies.audit.early_failure_messages import EarlyFailures
        from numdev.studies.audit.run import audit as run
        from numdev.studies.audit.run import reproducers, running

        cluster = cluster_of(workers, scheduler)
        tell = EarlyFailures(verdict.limits if verdict else None, session.say)
        more = {
            "workers": cluster,
            "save_cases": save_cases,
            "say": session.say,
            "tell": tell,
        }
        with running(request, cluster, process) as runner:
            with sharing(cluster, request.device):
                report = session.run_judged_study(
                    verdict, run, request, directory, runner=runner, **more
                )
            if answer:
                summary = report.summary.model_copy(update={"effects": answer})
                report = report.model_copy(update={"summary": summary})
            scripts = functools.partial(reproducers, request=request, runner=runner)
            session.hand_over(report, directory, scripts, verdict)


def _effects_answer(path: Path, request: AuditRequest) -> tuple[str, ...]:
    """Returns the answer of a report of `numdev effects`. Raises UsageError for a report
    of another command or checkpoint, and where there is none; MeasurementError for one
    that cannot be read."""
    from numdev.report import read
    from numdev.studies.effects.report import EffectsReport

    expect_file(path, "--effects")
    other = read(path)
    if not isinstance(other, EffectsReport):
        raise UsageError(
            f"--effects {path}: expected a report of effects, got one of {other.kind}"
        )
    audited, measured = request.checkpoint, other.request["checkpoint"]
    if not audited or (
        audited != measured and Path(audited).resolve() != Path(measured).resolve()
    ):
        raise UsageError(
            f"--effects {path}: is of checkpoint {measured}, and this audit of {audited}"
        )
    return tuple(other.summary.answer)


@command("sweep configs/sweep/ci.yaml --dry-run")
@click.argument("config", type=FILE)
@options_of(SweepConfig, without="reproducers time_limit repeats")
@cluster_options
@click.option(
    "--dry-run", is_flag=True, help="Say how many tasks there are and how long they take."
)
@seed_option
@gated
def sweep(
    config: Path,
    session: Session,
    verdict: Verdict | None,
    dry_run: bool,
    workers: int | None,
    scheduler: str | None,
    **flags: object,
) -> None:
    """Measure how deviation depends on length, format, tile size, inputs or kernel.

    CONFIG is a YAML file. A list where a scalar belongs is an axis of the grid; every
    cell is measured with every seed, and the report gives means with confidence
    intervals. With --seed N the seeds are counted from N. The same request with the same
    --output resumes where it stopped."""
    expect_file(config, "sweep")
    request = sweep_request(config, flags)
    name, measured = config.stem, request.measured()
    directory = Path() if dry_run else session.begin(name, measured)
    isolated = request.isolate and workers is None and scheduler is None
    with started(wanted=isolated) as process:  # it imports torch meanwhile
        from numdev.studies.audit.dask_workers import cluster_of, sharing
        from numdev.studies.audit.early_failure_messages import EarlyFailures
        from numdev.studies.audit.run import reproducers, running
        from numdev.studies.audit.sweep import estimate, plan
        from numdev.studies.audit.sweep import sweep as run

        cluster = cluster_of(workers, scheduler)
        with running(request, cluster, process) as runner:
            with sharing(cluster, request.device):
                planned = plan(request)
                if dry_run or not session.quiet:
                    click.echo(planned.size, err=not dry_run)
                if dry_run:
                    click.echo(estimate(planned, runner))
                    return
                tell = EarlyFailures(verdict.limits if verdict else None, session.say)
                more = {"workers": cluster, "say": session.say, "tell": tell}
                report = session.run_judged_study(
                    verdict, run, planned, directory, runner=runner, **more
                )
            opened = planned.source, planned.plan
            scripts = functools.partial(
                reproducers, request=planned.request, opened=opened, runner=runner
            )
            session.hand_over(report, directory, scripts, verdict)
