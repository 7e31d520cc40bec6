"""OpenRLHF: both sides of an Experience, as a file for `numdev logprobs`. Call
`record_experience(experience, "logprobs.jsonl", temperature=...)` where the trainer gets
its experiences, with the engine's log-probabilities recorded.

    numdev logprobs logprobs.jsonl --model path/to/checkpoint"""

from typing import Any

import numdev


def record_experience(experience: Any, path: str, **settings: object) -> None:
    """Appends each row without its padding. Log-probabilities and `action_mask` are one
    shorter than `sequences`: value i belongs to token i + 1."""
    for i in range(len(experience.sequences)):
        whole = experience.attention_mask[i].bool()
        tokens = experience.sequences[i][whole]
        # Of a row with padding on the left, the first token has a value too, after a pad.
        at = whole[1:].nonzero()[:, 0][1 - len(tokens) :]
        numdev.dump_logprobs(
            path,
            tokens,
            rollout_logprobs=experience.rollout_log_probs[i][at],
            trainer_logprobs=experience.action_log_probs[i][at],
            mask=experience.action_mask[i][at],
            **settings,
        )
