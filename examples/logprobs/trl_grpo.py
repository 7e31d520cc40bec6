"""TRL: both sides of every batch that a GRPOTrainer generates, as files for
`numdev logprobs`. Use this class in place of GRPOTrainer, with vLLM as its engine.

    numdev logprobs logprobs-rank0.jsonl --model path/to/checkpoint"""

from typing import Any

from trl import GRPOTrainer

import numdev


class RecordingTrainer(GRPOTrainer):
    """A GRPOTrainer that appends the log-probabilities of each sample to a file."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Generates as TRL does, and records what both programs gave."""
        batch = super()._generate_and_score_completions(inputs)
        record_batch(
            batch,
            f"logprobs-rank{self.accelerator.process_index}.jsonl",
            temperature=self.temperature,
            step=self.state.global_step,
        )
        return batch


def record_batch(batch: dict[str, Any], path: str, **settings: object) -> None:
    """Appends each row without its padding: prompts are padded on the left, completions
    on the right. `tool_mask` is 0 for what a tool wrote."""
    counts = batch["completion_mask"].bool()
    if "tool_mask" in batch:
        counts = counts & batch["tool_mask"].bool()
    for i in range(len(batch["completion_ids"])):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        whole = batch["completion_mask"][i].bool()
        numdev.dump_logprobs(
            path,
            prompt + batch["completion_ids"][i][whole].tolist(),
            rollout_logprobs=batch["sampling_per_token_logps"][i][whole],
            trainer_logprobs=batch["old_per_token_logps"][i][whole],
            mask=counts[i][whole],
            **settings,
        )
