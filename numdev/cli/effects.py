"""`numdev effects`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.gate import Verdict, gated
from numdev.cli.options import cluster_options, options_of
from numdev.cli.session import Session, command
from numdev.request_models import EffectsRequest, effects_request


@command("effects demo")
@click.argument("target", metavar="CHECKPOINT")
@options_of(EffectsRequest)
@cluster_options
@gated
def effects(
    target: str, session: Session, verdict: Verdict | None, workers: int | None,
    scheduler: str | None, **flags: object,
) -> None:  # fmt: skip
    """Say what rounding does to a model's output, and how much of that is attention's.

    CHECKPOINT is a directory (also of a diffusers pipeline), a state dict, the name of a
    model in the local Hugging Face cache, or `demo`. The whole model in fp64 is the
    truth; beside it stand the model in each format with each kernel, attention alone, and
    one rounding site at a time. The same request into the same directory continues where
    it stopped."""
    expect_file(target, "effects")
    request = effects_request(target, flags)
    name = f"effects-{Path(request.target).stem or 'model'}"
    directory = session.begin(name, request.model_dump(mode="json"))
    from numdev.studies.audit.dask_workers import cluster_of, sharing
    from numdev.studies.effects.model_properties import reproducers
    from numdev.studies.effects.study import effects as run

    cluster = cluster_of(workers, scheduler)
    with sharing(cluster, request.device):
        report = session.run_judged_study(
            verdict, run, request, directory, workers=cluster, say=session.say
        )
    session.hand_over(report, directory, reproducers, verdict)
