"""`numdev logprobs`."""

from __future__ import annotations

from pathlib import Path

import click

from numdev.cli.file_kinds import expect_file
from numdev.cli.gate import Verdict, gated
from numdev.cli.options import options_of
from numdev.cli.session import Session, command, command_line
from numdev.request_models import LogprobsRequest, logprobs_request


@command("logprobs rollout.jsonl trainer.jsonl --model demo")
@click.argument("files", nargs=-1, required=True, metavar="FILE [FILE]")
@options_of(LogprobsRequest)
@gated
def logprobs(
    files: tuple[str, ...], session: Session, verdict: Verdict | None, **flags: object
) -> None:
    """Say whose log-probabilities are off, the trainer's or the server's, and why.

    FILE has what one program recorded, or both: JSON lines (also .zst), parquet,
    safetensors or .pt, and the exports of prime-rl, slime, NeMo-RL, vLLM and SGLang as
    they are; `numdev.dump_logprobs` writes one from any program. With --model each side
    is set beside the exact log-probabilities of its tokens, in multiples of what its
    format's own roundings explain. No text is shown or stored without --show-text."""
    for file in files:
        expect_file(file, "logprobs")
    request = logprobs_request(files, flags)
    data, name = request.model_dump(mode="json"), f"logprobs-{Path(files[0]).stem}"
    session.begin(name, data)
    from numdev.studies.logprobs.study import logprobs_of_files as run

    directory = session.claim_directory(name, data)
    report = session.run_with_progress(
        run,
        request,
        command=command_line(),
        rules=verdict.limits if verdict else None,
    )
    session.hand_over(report, directory, verdict=verdict)
