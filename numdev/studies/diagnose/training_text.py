"""Writes the text that a checkpoint of `numdev train` was trained on as input ids, where
it reads bytes, for its diagnosis to read.

Such a checkpoint has no tokenizer, so that without this its diagnosis would read random
ids, of which it learned nothing: heads would be judged on inputs that training never
had."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from numdev.errors import UsageError
from numdev.request_models import DiagnoseRequest
from numdev.studies.diagnose.diagnosis_targets import Stage
from numdev.studies.training.config import DataConfig, ModelConfig
from numdev.studies.training.token_batches import load_tokens
from numdev.studies.training.weights.run_checkpoints import read_training_json

NEVER_SEEN = 0  # a step of which training had no batch: they are counted from 1
READS = "{name} reads {count} × {length} bytes of what it was trained on, {what}."
RANDOM = "{name} reads random bytes: {why}; give --text or --inputs."


def write_training_text(
    request: DiagnoseRequest, stage: Stage, path: Path
) -> tuple[Path | None, str | None]:
    """Writes input ids [sequences, length] from the text of a checkpoint's training to a
    safetensors file at `path`. Returns that path and a sentence on it, which also says
    where the text is another one now. Returns (None, None), and writes nothing, where the
    request says what to read, where the checkpoint is not from `numdev train`, and where
    training read no bytes. Where the text is gone, or training.json does not say which it
    was, nothing is written either; the sentence beside None says why."""
    record = read_training_json(Path(stage.target))
    if request.text or request.inputs or "request" not in record:
        return None, None
    try:
        model = ModelConfig.model_validate(record["request"]["model"])
        data = DataConfig.model_validate(record["request"]["data"])
        if data.tokenizer != "bytes":
            return None, None
        tokens = load_tokens(data, model, request.sequences, torch.device("cpu"))
    except (KeyError, TypeError, ValidationError):
        return None, RANDOM.format(
            name=stage.name, why="training.json does not say what it learned"
        )
    except UsageError as error:
        return None, RANDOM.format(name=stage.name, why=error.message)
    batch = tokens.batch(request.seed, NEVER_SEEN)
    ids = batch["inputs"][:, : request.length].contiguous()
    save_file({"input_ids": ids}, path)
    what = tokens.about["prompt"]
    trained_on = record.get("data")
    if not isinstance(trained_on, dict):
        what += " as they are here; training.json does not say which they were"
    elif tokens.about["data_sha256"] != trained_on.get("data_sha256"):
        what += " as they are here, which are not those of its training"
    count, length = ids.shape
    return path, READS.format(name=stage.name, count=count, length=length, what=what)
