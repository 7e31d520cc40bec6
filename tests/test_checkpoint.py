"""Opening a checkpoint: what is stored comes out, and nothing in it is trusted."""

from __future__ import annotations

import json
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from stored import sharded
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources.capture import NAME
from numdev.sources.checkpoint import Checkpoint, load_tokenizer, open_checkpoint

WAYS = ["whole", "shards", "pickle", "old pickle"]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny Llama on disk, its embedding tied to its head."""
    return models.save(models.llama(tie_word_embeddings=True), tmp_path / "llama")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return open_checkpoint(directory).load_model(dtype=dtype, device="cpu")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(directory: Path, change: Any) -> None:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def stored(directory: Path, way: str) -> dict[str, Tensor]:
    """The same checkpoint stored in this way, a tied weight of a pickle under both names."""
    state = load_file(directory / "model.safetensors")
    if way == "whole":
        return state
    (directory / "model.safetensors").unlink()
    if way == "shards":
        sharded(directory, state)
    else:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        path, zipped = directory / "pytorch_model.bin", way == "pickle"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
    return state


def failure(directory: Path, kind: type[NumdevError], *words: str) -> None:
    """Loading fails with this error, in one line that has these words and a hint."""
    with pytest.raises(kind) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_model_has_the_stored_weights_and_answers_alike(llama: Path) -> None:
    """Built here or by transformers, the same weights give the same logits; eval mode, no cache."""
    model = load(llama)
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(model(ids).logits, models.llama(tie_word_embeddings=True)(ids).logits)
    assert model.config._attn_implementation == NAME
    assert not model.training
    assert model(ids).past_key_values is None
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storing_gives_the_same_model(llama: Path, way: str) -> None:
    """And its tensors, of which tied ones come once, though a pickle stores them twice."""
    model, tensors = load(llama).state_dict(), load_file(llama / "model.safetensors")
    assert len(stored(llama, way)) == len(tensors) + ("pickle" in way)
    checkpoint = open_checkpoint(llama)
    found = checkpoint.load_model(dtype=torch.float32, device="cpu").state_dict()
    for got, expected in ((found, model), (dict(checkpoint.tensors()), tensors)):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[n], expected[n]) for n in got)
    assert len(checkpoint.files) == (2 if way == "shards" else 1)


def test_opening_says_how_much_the_model_reads() -> None:
    """RoBERTa numbers positions from pad_token_id + 1, so two of its rows are never read."""

    def opened(**config: Any) -> Checkpoint:
        return Checkpoint(path=Path(), name="", config=config, files=())

    roberta = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    for config, length in (
        ({"max_position_embeddings": 512}, 512), ({"n_positions": 1024}, 1024), (roberta, 512),
        ({"text_config": {"max_position_embeddings": 5}}, 5), ({}, None),
    ):  # fmt: skip
        assert opened(**config).max_length == length
    assert opened(text_config={"vocab_size": 7}).vocab_size == 7


def test_loading_never_asks_the_network(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("loading a checkpoint went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(llama)
    assert load_tokenizer(llama) is None


# --- what is damaged, or leads elsewhere ---------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file(llama: Path, keep: int) -> None:
    """Found by the header's own account, and no weights at all are a usage error."""
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    failure(llama, MeasurementError, "model.safetensors", "not a whole")
    path.unlink()
    failure(llama, UsageError, "no weights", "model.safetensors")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "shard.pkl", ".."])
def test_a_shard_that_is_not_a_weight_file_beside_its_index(llama: Path, name: str) -> None:
    """It is not opened; one that is missing is named."""
    stored(llama, "shards")
    (llama / "model-00002-of-00002.safetensors").unlink()
    index = llama / "model.safetensors.index.json"
    failure(llama, MeasurementError, index.name, "model-00002-of-00002.safetensors", "missing")
    save_file({"x": torch.zeros(1)}, llama.parent / "secret.safetensors")
    edit(index, weight_map={"x": name})
    failure(llama, MeasurementError, index.name, f"{name!r} is not the name of a weight file")


# --- what would run code -------------------------------------------------------------------------


class Payload:
    """Unpickling this makes a directory."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["torch", "old torch", "plain pickle"])
def test_a_pickle_that_would_run_code_does_not(llama: Path, tmp_path: Path, kind: str) -> None:
    """The payload works when it is let, and is not let: an error that names the file instead."""
    state: dict[str, Any] = stored(llama, "pickle")
    path, target = llama / "pytorch_model.bin", tmp_path / "payload"
    pickle.loads(pickle.dumps(Payload(target)))
    target.rmdir()  # fails unless the payload ran
    state["x"] = Payload(target)
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    failure(llama, MeasurementError, "pytorch_model.bin", "does not unpickle")
    with pytest.raises(MeasurementError):
        list(open_checkpoint(llama).tensors())
    assert not target.exists()


def test_a_config_that_brings_code_is_refused(llama: Path, tmp_path: Path) -> None:
    """Neither the model's code nor the tokenizer's is imported."""
    target = tmp_path / "payload"
    (llama / "evil.py").write_text(f"import os\nos.mkdir({str(target)!r})\n")
    auto = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Slow", None]}
    (llama / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto}))
    with pytest.raises(UsageError, match=r"tokenizer_config\.json.*auto_map"):
        load_tokenizer(llama)
    edit(llama / "config.json", auto_map=auto)
    failure(llama, UsageError, "config.json", "auto_map", "delete")
    assert not target.exists()


# --- what does not fit the model -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("model_type", "no_such_type", "no_such_type"),
        ("model_type", None, "model type"),
        ("architectures", ["NoSuchModel"], "NoSuchModel"),
        ("architectures", ["AutoModel"], "AutoModel"),
        ("architectures", None, "expected an architecture"),
    ],
)
def test_an_unknown_architecture(llama: Path, key: str, value: Any, word: str) -> None:
    edit(llama / "config.json", **{key: value})
    failure(llama, MeasurementError, "config.json", word)


def test_a_missing_weight_is_named(llama: Path) -> None:
    """transformers would draw it at random and say so on a log nobody reads."""
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(llama, lambda state: state.pop(name))
    failure(llama, MeasurementError, "LlamaForCausalLM", "needs", name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.scale",
    ],
)
def test_a_weight_the_model_has_no_place_for_is_named(llama: Path, name: str) -> None:
    """One layer too many, a normalisation that would not be applied, an unknown parameter; and one
    of another shape."""
    rewrite(llama, lambda state: state.update({name: torch.zeros(4)}))
    failure(llama, MeasurementError, "no place", name)
    rewrite(llama, lambda state: state.update({"model.norm.weight": torch.zeros(4)}))
    failure(llama, MeasurementError, "model.norm.weight [4] instead of [32]")


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("bert", {"bert.pooler.dense.weight": (32, 32), "cls.seq_relationship.weight": (2, 32)}),
        ("gpt2", {"transformer.h.0.attn.bias": (64, 64), "transformer.h.0.attn.masked_bias": ()}),
    ],
)  # fmt: skip
def test_what_changes_nothing_may_be_left_over(
    tmp_path: Path, name: str, extra: dict[str, tuple[int, ...]]
) -> None:
    """bert-base-uncased names BertForMaskedLM and stores a pooler and a next-sentence head too;
    older files hold causal masks in every layer, which models compute now."""
    directory = models.save(getattr(models, name)(), tmp_path)
    rewrite(directory, lambda state: state.update({n: torch.ones(s) for n, s in extra.items()}))
    assert not load(directory).training


def test_identity_is_of_config_and_weights(llama: Path) -> None:
    """A change of either gives another one."""
    first = open_checkpoint(llama).identity()
    assert open_checkpoint(llama).identity() == first
    edit(llama / "config.json", rms_norm_eps=1e-3)
    second = open_checkpoint(llama).identity()
    rewrite(llama, lambda state: state["model.norm.weight"].add_(1))
    assert len({first, second, open_checkpoint(llama).identity()}) == 3
