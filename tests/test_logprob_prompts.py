"""Responses that a server returned without their prompts, beside the model."""

from __future__ import annotations

from pathlib import Path

import torch
from logprob_files import Sample, write_completions, write_plain

from numdev.report import Outcome
from numdev.request_models import logprobs_request
from numdev.studies.logprobs.study import logprobs_of_files
from numdev.studies.logprobs.truth import ExactModel
from tests.support.logprob_records import drawn_tokens, recorded

PROMPT = 8


def test_a_response_alone_is_not_judged_and_takes_a_trainers_prompt(
    tmp_path: Path,
) -> None:
    """Without a prompt the exact values would be of another context, and a sound server
    accused: it is not judged. With a trainer's file the prompt is there, and it passes."""
    model = ExactModel("demo", device="cpu").source.load(torch.bfloat16)
    drawn = drawn_tokens(model.float(), 6, 48)
    model = model.bfloat16()
    some = []
    for ids in drawn:
        values = recorded(model, ids).logprobs[PROMPT:]
        others = recorded(model, ids, batch=3).logprobs[PROMPT:]
        some.append(Sample(ids[:PROMPT], ids[PROMPT:], values, others))
    server = write_completions(tmp_path / "server.jsonl", some, ids=False)
    trainer = write_plain(tmp_path / "trainer.jsonl", some, "trainer")
    flags = {"model": "demo", "device": "cpu"}
    alone = logprobs_of_files(logprobs_request([str(server)], flags))
    assert alone.outcome is Outcome.NOT_JUDGED
    assert {row.reason for row in alone.rows} == {"its prompt was not recorded"}
    both = logprobs_of_files(logprobs_request([str(server), str(trainer)], flags))
    outcomes = {verdict.kernel: verdict.outcome for verdict in both.verdicts}
    assert outcomes["server"] is Outcome.PASSED
    assert outcomes["trainer"] is Outcome.PASSED
    words = "6 responses on server have no prompt: that on trainer is taken."
    assert words in both.remarks
