"""Two files to try `numdev logprobs` on, from the model that ships with numdev. Tokens
are sampled at temperature 0.8, and the server says so; the trainer forgets it.

    python examples/logprobs/from_demo.py
    numdev logprobs rollout.jsonl trainer.jsonl --model demo"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import numdev
from numdev.request_models import demo_checkpoint

TEMPERATURE = 0.8
PROMPT, RESPONSE, SEQUENCES = 16, 64, 16


def load(attention: str) -> torch.nn.Module:
    """The demo model in bfloat16."""
    return AutoModelForCausalLM.from_pretrained(
        demo_checkpoint(), dtype=torch.bfloat16, attn_implementation=attention
    )


def values(model: torch.nn.Module, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of the responses, [sequences, RESPONSE]."""
    logits = model(ids).logits[:, PROMPT - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]


@torch.no_grad()
def main() -> None:
    """Writes rollout.jsonl and trainer.jsonl into the current folder."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint())
    text = (demo_checkpoint() / "prompt.txt").read_text()[:2000]
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
    prompts = tokens[: SEQUENCES * PROMPT].view(SEQUENCES, PROMPT)
    server, trainer = load("sdpa"), load("eager")
    ids = server.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        min_new_tokens=RESPONSE,
        max_new_tokens=RESPONSE,
    )
    sides = {
        "rollout": values(server, ids, TEMPERATURE),
        "trainer": values(trainer, ids, 1.0),  # the mistake
    }
    for side, logprobs in sides.items():
        path = Path(f"{side}.jsonl")
        path.unlink(missing_ok=True)
        for row, value in zip(ids, logprobs, strict=True):
            numdev.dump_logprobs(
                path, row, value, temperature=TEMPERATURE, dtype="bfloat16"
            )


if __name__ == "__main__":
    main()
