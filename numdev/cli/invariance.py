"""`numdev invariance`."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.gate import Verdict, gated
from numdev.cli.options import options_of
from numdev.cli.session import Session, command
from numdev.request_models import InvarianceConfig, invariance_request


@command("invariance demo --require batch")
@click.argument("target")
@options_of(InvarianceConfig, without="text tokenizer inputs")
@gated
def invariance(
    target: str, session: Session, verdict: Verdict | None, **flags: object
) -> None:
    """Say along which axes a kernel is bit-identical: batch, chunks, decode, padding.

    TARGET is what `numdev audit` takes: a checkpoint, `demo`, captured tensors, or a YAML
    file of cases such as configs/invariance/decode.yaml. Every attention call is computed
    again in another batch, in chunks, row by row, padded, laid out another way, with
    poison around it, and compared bit by bit. With --require the exit code is 0 where
    every kernel is bit-identical along these axes, 1 where one is not, 3 where that could
    not be tested. The same request into the same directory continues where it
    stopped."""
    expect_file(target, "invariance")
    request = invariance_request(target, flags)
    name = f"invariance-{Path(request.target).stem}"
    directory = session.begin(name, request.model_dump(mode="json"))
    from numdev.studies.invariance.study import invariance as run
    from numdev.studies.invariance.study import reproducers

    report = session.run_judged_study(verdict, run, request, directory, say=session.say)
    scripts = functools.partial(reproducers, request=request)
    required = bool(request.require)
    session.hand_over(report, directory, scripts, verdict, exits=required)
