"""verl: both sides of a training batch, as a file for `numdev logprobs`. Call
`record_batch(batch, "logprobs.jsonl", temperature=...)` in the trainer where
`old_log_probs` were just computed, with `calculate_log_probs` on in the rollout's
configuration. In bypass mode `old_log_probs` are the rollout's: nothing is to compare.

    numdev logprobs logprobs.jsonl --model path/to/checkpoint"""

from typing import Any

import numdev


def record_batch(data: Any, path: str, **settings: object) -> None:
    """Appends each row of a DataProto without its padding: prompts are padded on the
    left, responses on the right; `response_mask` is 0 for what a tool wrote."""
    batch = data.batch
    width = batch["responses"].shape[1]
    for i in range(len(batch["responses"])):
        attended = batch["attention_mask"][i].bool()
        prompt = batch["prompts"][i][attended[:-width]].tolist()
        whole = attended[-width:]
        numdev.dump_logprobs(
            path,
            prompt + batch["responses"][i][whole].tolist(),
            rollout_logprobs=batch["rollout_log_probs"][i][whole],
            trainer_logprobs=batch["old_log_probs"][i][whole],
            mask=batch["response_mask"][i][whole],
            **settings,
        )
