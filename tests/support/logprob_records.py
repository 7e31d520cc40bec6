"""Records of log-probabilities for tests: tokens of a tiny model, and what one program or
another, sound or with a planted cause, would have recorded of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from numdev.studies.logprobs.mistaken_models import linear_layers
from numdev.studies.logprobs.records import (
    Joined,
    RecordedSequence,
    RecordedSettings,
    SequencePair,
    Side,
)
from numdev.studies.logprobs.truth import Support, kept_tokens, token_logprobs

FULL = Support()
BFLOAT16 = RecordedSettings(dtype="bfloat16")


def drawn_tokens(
    model: nn.Module, count: int, length: int, *, seed: int = 0, support: Support = FULL
) -> list[np.ndarray]:  # fmt: skip
    """Sequences that a model samples, int64 [length] each, in its own dtype."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (count, 1), generator=generator)
    with torch.no_grad():
        for _ in range(length - 1):
            logits = model(input_ids=ids).logits[:, -1].double() / support.temperature
            logprobs = logits.log_softmax(-1)
            logprobs = logprobs.masked_fill(~kept_tokens(logprobs, support), -torch.inf)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
            ids = torch.cat([ids, drawn], dim=1)
    return list(ids.numpy())


def recorded(
    model: nn.Module, ids: np.ndarray, support: Support = FULL, *, batch: int = 1,
    top: int = 0, settings: RecordedSettings = BFLOAT16,
) -> RecordedSequence:  # fmt: skip
    """What a model records of tokens: one pass, in its own dtype, softmax in fp64, the
    sequence alone or in a batch of copies; with `top` alternatives."""
    inputs = torch.from_numpy(ids)[None].repeat(batch, 1)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits[batch - 1].double()
    values = token_logprobs(logits, ids, support)
    fields: dict[str, object] = {}
    if top:
        logprobs = (logits[:-1] / support.temperature).log_softmax(-1)
        if not support.is_full:  # as servers record it: renormalised over what is left
            left = kept_tokens(logprobs, support)
            logprobs = logprobs.masked_fill(~left, -torch.inf).log_softmax(-1)
        best = logprobs.topk(top)
        empty = np.full((1, top), np.nan)
        fields["top_logprobs"] = np.concatenate([empty, best.values.numpy()])
        fields["top_ids"] = np.concatenate([np.full((1, top), -1), best.indices.numpy()])
    return RecordedSequence(
        token_ids=ids, logprobs=values, mask=np.ones(len(ids), dtype=bool),
        settings=settings, **fields,
    )  # fmt: skip


@contextmanager
def routed_experts(model: nn.Module) -> Iterator[list[np.ndarray]]:
    """A context in which a Mixtral runs once; a list of the experts that it chooses,
    [n, k] of each layer."""
    experts: list[np.ndarray] = []
    with ExitStack() as stack:
        for layer in model.model.layers:
            hook = layer.mlp.gate.register_forward_hook(
                lambda _gate, _args, out: experts.append(out[2].numpy())
            )
            stack.callback(hook.remove)
        yield experts


def recorded_with_experts(
    model: nn.Module, ids: np.ndarray, support: Support = FULL
) -> RecordedSequence:
    """What a Mixtral records of tokens, with its experts."""
    with routed_experts(model) as experts:
        s = recorded(model, ids, support)
    return replace(s, routed_experts=np.stack(experts, axis=1))


@contextmanager
def router_moved(model: nn.Module, size: float) -> Iterator[None]:
    """A context in which the scores of a Mixtral's routers are off by a random number of
    so many times their standard deviation: another router than the trainer's, which still
    weighs the chosen experts by its own scores."""
    generator = torch.Generator().manual_seed(0)

    def move(_gate: nn.Module, _args: object, out: tuple) -> tuple:
        logits, weights, indices = out
        noise = size * logits.std() * torch.randn(logits.shape, generator=generator)
        indices = (logits.float() + noise).topk(indices.shape[-1]).indices
        weights = logits.float().softmax(-1).gather(-1, indices)
        return logits, weights / weights.sum(-1, keepdim=True), indices

    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.callback(layer.mlp.gate.register_forward_hook(move).remove)
        yield


def with_head_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with a head of its own in another dtype, from its own weights; in
    place."""
    old = model.get_output_embeddings()
    head = nn.Linear(old.in_features, old.out_features, bias=False)
    head.weight = nn.Parameter(old.weight.detach().to(dtype), requires_grad=False)
    head.register_forward_pre_hook(lambda _head, args: (args[0].to(dtype),))
    model.set_output_embeddings(head)
    return model


def write_adapter(model: nn.Module, folder: Path, rank: int = 4) -> None:
    """Writes an adapter (LoRA) of a model's linear layers, as PEFT does: random, of a
    tenth of their weights' size."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, module, axis in linear_layers(model):
        size = module.weight.shape if axis == 1 else module.weight.shape[::-1]
        scale = 0.1 * float(module.weight.detach().std()) / rank**0.5
        stem = f"base_model.model.{name}"
        up, down = (
            torch.randn(shape, generator=generator)
            for shape in ((size[0], rank), (rank, size[1]))
        )
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": scale * up}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def side(name: str, sequences: Sequence[RecordedSequence]) -> Side:
    numbered = (replace(s, uid=str(i)) for i, s in enumerate(sequences))
    return Side(
        name=name, path=Path(f"{name}.jsonl"), layout="plain", sequences=tuple(numbered)
    )


def changed(
    s: RecordedSequence, change: Callable[[np.ndarray], np.ndarray]
) -> RecordedSequence:
    """The sequence with other values."""
    return replace(s, logprobs=change(s.logprobs))


def joined(a: Side, b: Side) -> Joined:
    """Pairs in order, of sequences with the same tokens."""
    every = [slice(0, len(x)) for x in a.sequences]
    both = zip(a.sequences, b.sequences, every, strict=True)
    pairs = [
        SequencePair(x, y, at, at, "uid", (number, number))
        for number, (x, y, at) in enumerate(both)
    ]
    return Joined(a=a, b=b, pairs=tuple(pairs), alone_in_a=(), alone_in_b=())
