"""Does `numdev logprobs` tell a sound serving engine from one with stale weights, or with
another temperature than it says?

    PYTHONPATH=. python benchmarks/logprobs_engine.py DIRECTORY
        [--steps 20 --prompts 24 --tokens 48 --server auto --width 256 --layers 4]
        [--judged 24 --record-every 10]

A tiny Llama of random weights is trained by policy gradients, in float32, on what the
server samples; the server runs its weights in bfloat16, and so does the trainer where it
computes log-probabilities. The server is transformers' continuous batching (a paged
cache, requests that come and go), or where that does not run `generate()` with its
cache; the output says which. While it trains, both sides are recorded by
`numdev.dump_logprobs` every so many steps, and after the last one in three more runs:
the server a few steps behind; the server at temperature 0.7, which it does not say; and
the same, said. The exit code is 0 where the sound runs pass, and the other two fail with
their cause, of the server alone. Seconds of serving, training and judging are printed.

The model is random, so that its answers mean nothing; what is measured is arithmetic."""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import numdev
from numdev.studies.logprobs.report import LogprobsReport

VOCABULARY, PROMPT = 512, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Answer(NamedTuple):
    """What a server returns for one prompt."""

    token_ids: list[int]  # prompt and response
    logprobs: list[float]  # of the response


Server = Callable[[nn.Module, Sequence[list[int]], float, int], list[Answer]]


def by_continuous_batching(
    model: Any, prompts: Sequence[list[int]], temperature: float, tokens: int
) -> list[Answer]:
    """Answers of transformers' continuous batching, which records the log-probabilities
    of what it sampled."""
    from transformers import ContinuousBatchingConfig

    asked = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
        max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    # Graphs and a cache of many gigabytes would be made anew for each batch of prompts
    config = ContinuousBatchingConfig(
        return_logprobs=True, max_memory_percent=0.02, use_cuda_graph=False
    )
    served = copy.deepcopy(model)
    answers = served.generate_batch(
        list(prompts), generation_config=asked, continuous_batching_config=config
    )
    if len(answers) < len(prompts) or any(x.error for x in answers.values()):
        raise RuntimeError(next((x.error for x in answers.values() if x.error), "lost"))
    every = [
        Answer([*x.prompt_ids, *x.generated_tokens], list(x.logprobs))
        for x in answers.values()
    ]
    if any(len(x.logprobs) != tokens for x in every):
        raise RuntimeError("it returned no log-probabilities")
    return every


def by_generate(
    model: Any, prompts: Sequence[list[int]], temperature: float, tokens: int
) -> list[Answer]:
    """Answers of `generate()`, in batches of 8, token by token with its cache."""
    answers = []
    for start in range(0, len(prompts), 8):
        ids = torch.tensor(prompts[start : start + 8], device=DEVICE)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0,
            temperature=temperature, max_new_tokens=tokens, eos_token_id=None,
            pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        values = torch.stack(out.scores, dim=1).float().log_softmax(-1)
        chosen = values.gather(-1, out.sequences[:, ids.shape[1] :, None])[..., 0]
        answers += [
            Answer(row.tolist(), logprobs.tolist())
            for row, logprobs in zip(out.sequences, chosen, strict=True)
        ]
    return answers


SERVERS: dict[str, Server] = {
    "continuous batching": by_continuous_batching,
    "generate": by_generate,
}


def server_named(name: str, model: nn.Module) -> tuple[str, Server]:
    """The server that is asked for, or the first that runs here."""
    for each, serve in SERVERS.items():
        if name not in ("auto", each):
            continue
        try:
            serve(model, [[1] * PROMPT, [2] * PROMPT], 1.0, 4)
            return each, serve
        except Exception as error:  # whatever an engine of another version raises
            print(f"{each} does not run here: {type(error).__name__}: {error}")
    raise SystemExit("no server runs here")


def token_logprobs(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """The log-probabilities of the last `count` tokens of each row, [rows, count]."""
    logits = model(input_ids=ids).logits[:, -count - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, -count:, None])[..., 0]


class Run:
    """A model in training, and its server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.tokens, self.folder = options.tokens, Path(options.directory)
        config = LlamaConfig(
            hidden_size=options.width, intermediate_size=2 * options.width,
            num_hidden_layers=options.layers, num_attention_heads=options.width // 32,
            num_key_value_heads=options.width // 64, vocab_size=VOCABULARY,
            max_position_embeddings=1024, initializer_range=0.08,
        )  # fmt: skip
        torch.manual_seed(0)
        self.master = LlamaForCausalLM(config).to(DEVICE)
        self.prompts = torch.randint(3, VOCABULARY, (options.prompts, PROMPT)).tolist()
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=options.rate)
        self.serving = 0.0  # seconds
        self.name, self.serve = server_named(options.server, self.in_bfloat16())

    def in_bfloat16(self) -> nn.Module:
        """The weights as they are now, as server and trainer run them."""
        return copy.deepcopy(self.master).to(torch.bfloat16).eval()

    def step(self) -> float:
        """One step of policy gradients on what the server samples; the mean reward, the
        share of tokens with an even id."""
        begun = time.perf_counter()
        answers = self.serve(self.in_bfloat16(), self.prompts, 1.0, self.tokens)
        self.serving += time.perf_counter() - begun
        ids = torch.tensor([answer.token_ids for answer in answers], device=DEVICE)
        reward = (ids[:, PROMPT:] % 2 == 0).float().mean(-1)
        logprobs = token_logprobs(self.master, ids, self.tokens)
        loss = -((reward - reward.mean())[:, None] * logprobs).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(reward.mean())

    def record(
        self, name: str, server: nn.Module, temperature: float, *, is_declared: bool
    ) -> list[str]:
        """Samples from the server, and records both sides; their files."""
        answers = self.serve(server, self.prompts, temperature, self.tokens)
        files = [self.folder / f"{name}-{side}.jsonl" for side in ("rollout", "trainer")]
        for file in files:
            file.unlink(missing_ok=True)
        trainer = self.in_bfloat16()
        warm = {"temperature": temperature} if is_declared else {}
        for uid, answer in enumerate(answers):
            ids = torch.tensor([answer.token_ids], device=DEVICE)
            with torch.no_grad():
                logprobs = token_logprobs(trainer, ids, self.tokens)[0]
            values = (answer.logprobs, logprobs)
            engines, settings = (self.name, "trainer"), (warm, {})
            for file, of_side, engine, more in zip(
                files, values, engines, settings, strict=True
            ):
                numdev.dump_logprobs(
                    file, answer.token_ids, of_side, uid=str(uid), dtype="bfloat16",
                    engine=engine, **more,
                )  # fmt: skip
        return [str(file) for file in files]


def shown(name: str, report: LogprobsReport, expected: list[str]) -> bool:
    """Prints what was said of a run; whether it is what was planted."""
    causes = {
        s.name.partition("-")[2]: [c.cause for c in s.causes]
        for s in report.summary.sides
    }
    words = {v.kernel.partition("-")[2]: v.outcome.word for v in report.verdicts}
    is_as_planted = causes == {"rollout": expected, "trainer": []}
    is_as_planted &= words["trainer"] == "PASS"
    is_as_planted &= words["rollout"] == ("FAIL" if expected else "PASS")
    print(
        "as planted" if is_as_planted else "NOT AS PLANTED",
        f" {name} ({report.timings['total']:.1f} s):",
        *report.summary.answer,
        flush=True,
    )
    return is_as_planted


class Experiment:
    """A run in training, judged as it goes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.run = options, Run(options)
        self.previous = str(self.run.folder / "previous")
        self.results: list[bool] = []

    def train(self) -> nn.Module:
        """Trains, and judges a sound recording every so many steps and after the last
        one; the server's weights a few steps before the end."""
        steps, stale = self.options.steps, self.run.in_bfloat16()
        begun = time.perf_counter()
        for step in range(1, steps + 1):
            if step == steps - self.options.behind + 1:
                stale = self.run.in_bfloat16()
                self.run.master.save_pretrained(self.previous)
            reward = self.run.step()
            print(f"step {step}: reward {reward:.3f}", flush=True)
            if step % self.options.record_every == 0 or step == steps:
                spent = time.perf_counter() - begun
                print(f"{spent:.1f} s, of which {self.run.serving:.1f} s served")
                self.judge(f"step {step}", self.run.in_bfloat16(), [])
                begun, self.run.serving = time.perf_counter(), 0.0
        return stale

    def judge(
        self, name: str, server: nn.Module, expected: list[str],
        temperature: float = 1.0, *, is_declared: bool = False,
    ) -> None:  # fmt: skip
        """Records both sides, the trainer as it is now, and judges them."""
        current = self.run.folder / "current"
        self.run.master.save_pretrained(current)
        files = self.run.record(
            name.replace(" ", "_"), server, temperature, is_declared=is_declared
        )
        report = numdev.logprobs(
            *files, model=str(current), sequences=self.options.judged,
            previous=self.previous if Path(self.previous).exists() else None,
        )  # fmt: skip
        self.results.append(shown(name, report, expected))


def main() -> int:
    """Trains, serves, records and judges; 0 where every run is judged as planted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--behind", type=int, default=4, help="steps of the stale server")
    parser.add_argument("--record-every", type=int, default=10, help="steps")
    parser.add_argument("--judged", type=int, default=24, help="sequences of each side")
    parser.add_argument("--server", choices=("auto", *SERVERS), default="auto")
    options = parser.parse_args()
    Path(options.directory).mkdir(parents=True, exist_ok=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    experiment = Experiment(options)
    print(f"server: {experiment.run.name}; torch {torch.__version__}, transformers "
          f"{transformers.__version__}, {DEVICE}")  # fmt: skip
    stale = experiment.train()
    model = experiment.run.in_bfloat16()
    experiment.judge("stale", stale, ["stale weights"])
    experiment.judge("temperature", model, ["temperature"], 0.7)
    experiment.judge("temperature said", model, [], 0.7, is_declared=True)
    return 0 if all(experiment.results) else 1


if __name__ == "__main__":
    sys.exit(main())
