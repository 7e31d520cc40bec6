"""`numdev invariance`."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from numdev.cli.gate import Verdict, gated
from numdev.cli.options import options_of
from numdev.cli.session import Session, command
from numdev.config import InvarianceConfig, invariance_request


@command("invariance demo --axis batch --axis decode")
@click.argument("target")
@options_of(InvarianceConfig)
@gated
def invariance(
    target: str, session: Session, verdict: Verdict | None, **flags: object
) -> None:
    """Ask whether the same tokens give the same numbers another way, and if not, why.

    TARGET is what `numdev audit` takes: a checkpoint, `demo`, captured tensors, or a YAML
    file of cases such as configs/invariance/decode.yaml. Every attention call is computed
    again in another batch, in chunks, row by row, padded, laid out another way, with
    poison around it, and compared bit by bit. The same request into the same directory
    continues where it stopped."""
    request = invariance_request(target, flags)
    name = f"invariance-{Path(request.target).stem}"
    directory = session.begin(name, request.model_dump(mode="json"))
    from numdev.studies.invariance.study import invariance as run
    from numdev.studies.invariance.study import reproducers

    report = session.run_judged_study(verdict, run, request, directory, say=session.say)
    scripts = functools.partial(reproducers, request=request)
    session.hand_over(report, directory, scripts, verdict)
