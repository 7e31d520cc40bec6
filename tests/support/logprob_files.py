"""Files of log-probabilities in each layout that numdev reads, written from arrays.

The layouts follow the field names of the programs that write them; what such a program
fills in where nothing was predicted, these write too: padding, first entries, zeros for a
prompt."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

VOCABULARY = 1000
PAD = 0


@dataclass
class Sample:
    """One sequence: a prompt and a response, with both sides' log-probabilities of the
    response's tokens. `tops` are alternatives: ids [response, k] and values."""

    prompt: np.ndarray  # int64 [p]
    response: np.ndarray  # int64 [r]
    rollout: np.ndarray  # float64 [r]
    trainer: np.ndarray  # float64 [r]
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [*self.prompt.tolist(), *self.response.tolist()]

    @property
    def mask(self) -> list[int]:
        """1 for tokens of the response."""
        return [0] * len(self.prompt) + [1] * len(self.response)

    def whole(self, side: str, fill: float | None = None) -> list[float | None]:
        """A side's values of all tokens, `fill` for the prompt's; null for NaN."""
        values = getattr(self, side).tolist()
        return [fill] * len(self.prompt) + [None if math.isnan(x) else x for x in values]


def samples(
    count: int = 4, seed: int = 0, *, length: int = 12, k: int = 0, noise: float = 0.03
) -> list[Sample]:
    """Random sequences whose sides differ by normal noise. Float32 values, so that every
    layout holds them exactly."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        p, r = int(rng.integers(2, 6)), int(rng.integers(length // 2, length + 1))
        rollout = -rng.exponential(1, r).astype(np.float32).astype(float)
        trainer = (rollout + rng.normal(0, noise, r)).astype(np.float32).astype(float)
        sample = Sample(
            prompt=rng.integers(1, VOCABULARY, p),
            response=rng.integers(1, VOCABULARY, r),
            rollout=rollout,
            trainer=np.minimum(trainer, 0),
        )
        if k:
            others = np.stack(
                [rng.choice(VOCABULARY, k, replace=False) for _ in range(r)]
            )
            others[:, 0] = sample.response
            values = -np.sort(rng.exponential(2, (r, k)).astype(np.float32), axis=1)
            values[:, 0] = rollout
            sample.top_ids, sample.top_logprobs = others, values.astype(float)
        drawn.append(sample)
    return drawn


def write_plain(
    path: Path, some: Sequence[Sample], side: str | None = None, **settings: object
) -> Path:
    """numdev's own layout: one side, or both of one file for None. `.gz` and `.zst` are
    compressed."""
    records = []
    for number, sample in enumerate(some):
        record: dict[str, object] = {"token_ids": sample.ids, "mask": sample.mask}
        for name in ("rollout", "trainer") if side is None else (side,):
            record["logprobs" if side else f"{name}_logprobs"] = sample.whole(name)
        if sample.top_ids is not None and sample.top_logprobs is not None:
            before = [[]] * len(sample.prompt)
            record["top_ids"] = [*before, *sample.top_ids.tolist()]
            record["top_logprobs"] = [*before, *sample.top_logprobs.tolist()]
        records.append({"uid": f"s{number}", **record, **settings, **sample.extra})
    return write_lines(path, records)


def write_lines(path: Path, records: Sequence[object]) -> Path:
    """Objects as JSON, one a line."""
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix == ".gz":
        text = gzip.compress(text)
    if path.suffix == ".zst":
        from backports import zstd

        text = zstd.compress(text)
    path.write_bytes(text)
    return path


def write_parquet(path: Path, some: Sequence[Sample], side: str) -> Path:
    """numdev's layout, a sequence a row."""
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [
        {
            "uid": f"s{number}",
            "token_ids": sample.ids,
            "logprobs": sample.whole(side),
            "mask": sample.mask,
            "temperature": 1.0,
        }
        for number, sample in enumerate(some)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def rectangles(some: Sequence[Sample], side: str) -> dict[str, torch.Tensor]:
    """One side as rectangles, padded on the right, with `lengths`."""
    width = max(len(sample.ids) for sample in some)
    shape = (len(some), width)
    ids = torch.full(shape, PAD, dtype=torch.int64)
    values = torch.full(shape, math.nan, dtype=torch.float32)
    masks = torch.zeros(shape, dtype=torch.bool)
    for i, sample in enumerate(some):
        n = len(sample.ids)
        ids[i, :n] = torch.tensor(sample.ids)
        values[i, len(sample.prompt) : n] = torch.tensor(getattr(sample, side))
        masks[i, :n] = torch.tensor(sample.mask).bool()
    lengths = torch.tensor([len(sample.ids) for sample in some])
    return {"token_ids": ids, "logprobs": values, "mask": masks, "lengths": lengths}


def flat(some: Sequence[Sample], side: str) -> dict[str, torch.Tensor]:
    """One side as flat arrays with `offsets`."""
    ids = [token for sample in some for token in sample.ids]
    values = [x for sample in some for x in sample.whole(side, math.nan)]
    lengths = [len(sample.ids) for sample in some]
    return {
        "token_ids": torch.tensor(ids),
        "logprobs": torch.tensor(values, dtype=torch.float32),
        "mask": torch.tensor([x for sample in some for x in sample.mask]).bool(),
        "offsets": torch.tensor([0, *np.cumsum(lengths).tolist()]),
    }


def write_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], **metadata: str
) -> Path:
    """Tensors, and settings as metadata."""
    save_file(tensors, path, metadata=metadata)
    return path


def write_prime_rl(folder: Path, some: Sequence[Sample], *, stable: bool = True) -> Path:
    """prime-rl's token exports of one step, by two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(2):
        records = []
        for index, sample in enumerate(some[rank::2]):
            n = len(sample.ids)
            trainer = sample.whole("trainer", 0.0)
            trainer[0] = -math.log(VOCABULARY)
            records.append(
                {
                    "schema_version": 1,
                    "step": 7,
                    "rank": rank,
                    "micro_step": 0,
                    "micro_sequence_idx": index,
                    "export_sequence_idx": index,
                    "env_name": "sums",
                    "token_ids": sample.ids,
                    "position_ids": list(range(n)),
                    "loss_mask": [bool(x) for x in sample.mask],
                    "advantages": [0.5] * n,
                    "inference_logprobs": sample.whole("rollout", 0.0),
                    "trainer_logprobs": trainer,
                    "entropy": [math.log(VOCABULARY)] + [1.0] * (n - 1),
                    "mismatch_kl": [None] * n,
                    "is_masked": [False] * n,
                }
            )
        write_lines(folder / f"rank_{rank}.jsonl", records)
    if stable:
        (folder / "STABLE").touch()
    return folder


def write_nemo_rl(path: Path, some: Sequence[Sample]) -> Path:
    """NeMo-RL's train data: rectangles of one row a line, padded on the right; index 0 is
    a filling, and a sample may not count."""
    width = max(len(sample.ids) for sample in some)

    def row(values: Sequence[object], fill: object) -> list[list[object]]:
        """Values in a rectangle of one row."""
        return [[*values, *[fill] * (width - len(values))]]

    records = [
        {
            "content": ["…"],
            "rewards": [1.0],
            "input_lengths": [len(sample.ids)],
            "token_ids": row(sample.ids, PAD),
            "token_loss_mask": row(sample.mask, 0),
            "sample_loss_mask": [float(number % 3 != 2)],
            "advantages": row([0.1] * len(sample.ids), 0.0),
            "generation_logprobs": row(sample.whole("rollout", 0.0), 0.0),
            "prev_logprobs": row(sample.whole("trainer", 0.0), 0.0),
            "idx": number,
        }
        for number, sample in enumerate(some)
    ]
    return write_lines(path, records)


def write_slime(path: Path, some: Sequence[Sample], **more: object) -> Path:
    """slime's debug dump of training data, format 2: response-only arrays, kept sets of
    two tokens a position, experts of all tokens but the last."""
    dumped = []
    for number, sample in enumerate(some):
        n, r = len(sample.ids), len(sample.response)
        kept_ids = np.stack([sample.response, np.full(r, 5)], axis=1).reshape(-1)
        dumped.append(
            {
                "data_parallel_rank": 0,
                "sample_index": number,
                "rollout_position": number,
                "tokens": torch.tensor(sample.ids),
                "response_lengths": r,
                "total_lengths": n,
                "loss_masks": torch.ones(r, dtype=torch.int32),
                "rollout_log_probs": torch.tensor(sample.rollout, dtype=torch.float32),
                "log_probs": torch.tensor(sample.trainer, dtype=torch.float32),
                "entropy": torch.ones(r),
                "rollout_top_p_token_ids": torch.tensor(kept_ids, dtype=torch.int32),
                "rollout_top_p_token_offsets": torch.arange(0, 2 * r + 1, 2),
                "rollout_routed_experts": torch.zeros(n - 1, 2, 3, dtype=torch.int32),
                "weight_versions": ["4"],
                **sample.extra,
            }
        )
    torch.save(
        {"format_version": 2, "rollout_id": 3, "rank": 0, "samples": dumped, **more}, path
    )
    return path


def write_slime_rollout(path: Path, some: Sequence[Sample]) -> Path:
    """slime's debug dump of rollouts."""
    dumped = [
        {
            "index": number,
            "prompt": "",
            "tokens": sample.ids,
            "response_length": len(sample.response),
            "loss_mask": None,
            "weight_versions": ["4", "5"],
            "rollout_log_probs": sample.rollout.tolist(),
            "remove_sample": number == 1,
            "status": "completed",
        }
        for number, sample in enumerate(some)
    ]
    torch.save({"rollout_id": 3, "samples": dumped}, path)
    return path


def write_completions(
    path: Path, some: Sequence[Sample], *, ids: bool = True, **more: object
) -> Path:
    """vLLM's completions, a response a line; with `ids` their ids beside the texts, else
    in place of them."""
    records = []
    for number, sample in enumerate(some):
        tops = None
        if sample.top_ids is not None and sample.top_logprobs is not None:
            tops = [
                {f"token_id:{i}": x for i, x in zip(row, values, strict=True)}
                for row, values in zip(sample.top_ids, sample.top_logprobs, strict=True)
            ]
        choice = {
            "index": 0,
            "text": "…",
            "logprobs": {
                "text_offset": [0] * len(sample.response),
                "token_logprobs": sample.whole("rollout")[len(sample.prompt) :],
                "tokens": [f"token_id:{i}" for i in sample.response],
                "top_logprobs": tops,
            },
            "prompt_logprobs": None,
        }
        if ids:
            choice["token_ids"] = sample.response.tolist()
            choice["prompt_token_ids"] = sample.prompt.tolist()
            choice["logprobs"]["tokens"] = ["…"] * len(sample.response)  # type: ignore[index]
        response = {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "choices": [choice],
        }
        records.append({**response, **more})
    return write_lines(path, records)


def write_chat(path: Path, some: Sequence[Sample]) -> Path:
    """vLLM's chat, with alternatives where a sample has them, and ids of the prompt."""
    records = []
    for number, sample in enumerate(some):
        content = []
        for at, token in enumerate(sample.response.tolist()):
            tops = []
            if sample.top_ids is not None and sample.top_logprobs is not None:
                pairs = zip(sample.top_ids[at], sample.top_logprobs[at], strict=True)
                tops = [{"token": f"token_id:{i}", "logprob": x} for i, x in pairs]
            value = {"token": f"token_id:{token}", "logprob": sample.rollout[at]}
            content.append({**value, "bytes": None, "top_logprobs": tops})
        choice = {
            "index": 0,
            "message": {"role": "assistant"},
            "logprobs": {"content": content},
        }
        ids = {"prompt_token_ids": sample.prompt.tolist()}
        records.append({"id": f"chat-{number}", "choices": [choice], **ids})
    return write_lines(path, records)


def write_prompt_logprobs(path: Path, some: Sequence[Sample]) -> Path:
    """vLLM's `prompt_logprobs` of whole sequences, as one asks it to score them."""
    records = []
    for number, sample in enumerate(some):
        values = sample.whole("rollout", -2.0)
        entries = [
            {str(token): {"logprob": x, "rank": 1}, str(VOCABULARY): {"logprob": -9.0}}
            for token, x in zip(sample.ids, values, strict=True)
        ]
        choice = {
            "index": 0,
            "logprobs": None,
            "token_ids": [7],
            "prompt_token_ids": sample.ids,
            "prompt_logprobs": [None, *entries[1:]],
        }
        records.append({"id": f"cmpl-{number}", "choices": [choice]})
    return write_lines(path, records)


def write_sglang(path: Path, some: Sequence[Sample], *, prompts: bool = True) -> Path:
    """SGLang's responses in one list, with values of the prompts or without."""
    records = []
    for number, sample in enumerate(some):
        values = zip(sample.rollout.tolist(), sample.response.tolist(), strict=True)
        meta: dict[str, object] = {
            "id": f"r{number}",
            "prompt_tokens": len(sample.prompt),
            "weight_version": "12",
            "output_token_logprobs": [[x, token, None] for x, token in values],
        }
        if prompts:
            inputs = [[-1.5, token, None] for token in sample.prompt.tolist()]
            inputs[0][0] = None
            meta["input_token_logprobs"] = inputs
        if sample.top_ids is not None and sample.top_logprobs is not None:
            meta["output_top_logprobs"] = [
                [[x, int(i), None] for i, x in zip(row, tops, strict=True)]
                for row, tops in zip(sample.top_ids, sample.top_logprobs, strict=True)
            ]
        records.append({"text": "…", "meta_info": meta})
    path.write_text(json.dumps(records))
    return path
