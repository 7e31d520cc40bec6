"""Opening a checkpoint: what is stored comes out, and nothing in it is trusted."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources.capture import NAME
from numdev.sources.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny Llama on disk, its embedding tied to its head."""
    return models.save(models.llama(tie_word_embeddings=True), tmp_path / "llama")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return open_checkpoint(directory).load_model(dtype=dtype, device="cpu")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def as_pickle(directory: Path, *, zipped: bool = True) -> dict[str, Tensor]:
    """The same checkpoint with pytorch_model.bin, its tied weight stored under both names."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return state


def as_shards(directory: Path) -> Path:
    """The same checkpoint in two shards with an index, whose path is returned."""
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: state[n] for n in part}, directory / shard)
        weight_map.update(dict.fromkeys(part, shard))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def failure(directory: Path, kind: type[NumdevError], *words: str, load_it: bool = False) -> None:
    """Opening (or loading) fails with this error, in one line that has these words and a hint."""
    with pytest.raises(kind) as caught:
        load(directory) if load_it else open_checkpoint(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.hint
    for word in words:
        assert word in message


def test_the_model_has_the_stored_weights_and_answers_alike(llama: Path) -> None:
    """Built here or by transformers, the same weights give the same logits; eval mode, no cache."""
    model = load(llama)
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(model(ids).logits, models.llama(tie_word_embeddings=True)(ids).logits)
    assert model.config._attn_implementation == NAME
    assert not model.training
    assert model(ids).past_key_values is None
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("stored", ["whole", "shards", "pickle", "old pickle"])
def test_every_way_of_storing_gives_the_same_model(llama: Path, stored: str) -> None:
    expected = load(llama).state_dict()
    if stored == "shards":
        as_shards(llama)
    elif stored != "whole":
        as_pickle(llama, zipped=stored == "pickle")
    checkpoint = open_checkpoint(llama)
    got = checkpoint.load_model(dtype=torch.float32, device="cpu").state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    assert len(checkpoint.files) == (2 if stored == "shards" else 1)


@pytest.mark.parametrize("stored", ["whole", "shards", "pickle", "old pickle"])
def test_tensors_gives_every_stored_weight_once(llama: Path, stored: str) -> None:
    """Tied weights, stored under two names in a pickle, come once."""
    expected = load_file(llama / "model.safetensors")
    if stored == "shards":
        as_shards(llama)
    elif stored != "whole":
        assert len(as_pickle(llama, zipped=stored == "pickle")) == len(expected) + 1
    got = dict(open_checkpoint(llama).tensors())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)


def test_opening_says_how_much_the_model_reads() -> None:
    """RoBERTa numbers positions from pad_token_id + 1, so two of its rows are never read."""

    def opened(**config: Any) -> Checkpoint:
        return Checkpoint(path=Path(), name="", config=config, files=())

    assert opened(max_position_embeddings=512, vocab_size=9).max_length == 512
    assert opened(n_positions=1024).max_length == 1024
    assert (
        opened(model_type="roberta", max_position_embeddings=514, pad_token_id=1).max_length == 512
    )
    assert opened(text_config={"vocab_size": 7, "max_position_embeddings": 5}).vocab_size == 7
    assert opened().max_length is None


def test_nothing_is_said_and_nothing_stays_switched_off(
    llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading prints and logs nothing, and leaves log level, bars and warnings as they were."""
    import transformers.utils.logging as chatter

    logger, logged = logging.getLogger("transformers"), []
    monkeypatch.setattr(logger, "handlers", [Listener(logged)])
    monkeypatch.setattr(logger, "level", logging.INFO)
    chatter.enable_progress_bar()
    before = warnings.filters[:]
    # A head left over: transformers would report it.
    rewrite(llama, lambda state: state.update({"score.weight": torch.zeros(2, 32)}))
    capfd.readouterr()
    load(llama)
    edit(llama / "config.json", architectures=["NoSuchModel"])
    failure(llama, MeasurementError, load_it=True)
    assert (capfd.readouterr(), logged) == (("", ""), [])
    assert (logger.level, chatter.is_progress_bar_enabled()) == (logging.INFO, True)
    assert warnings.filters[:] == before
    logger.warning("heard")
    assert logged == ["heard"]


class Listener(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def test_loading_never_asks_the_network(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("loading a checkpoint went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(llama)
    assert open_checkpoint(llama).tokenizer() is None


# --- what is wrong with the path ---------------------------------------------------------------


def test_no_weights(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "other.safetensors")
    failure(llama, UsageError, "no weights", "other.safetensors", "model.safetensors")


# --- what is wrong with the files --------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file(llama: Path, keep: int) -> None:
    """Found on opening, by the header's own account, before any weight is read."""
    content = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(content[:keep])
    failure(llama, MeasurementError, "model.safetensors", "not a whole")


def test_a_missing_shard(llama: Path) -> None:
    index = as_shards(llama)
    (llama / "model-00002-of-00002.safetensors").unlink()
    failure(llama, MeasurementError, index.name, "model-00002-of-00002.safetensors", "missing")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "shard.pkl", ".."])
def test_a_shard_that_is_not_a_weight_file_beside_its_index(llama: Path, name: str) -> None:
    index = as_shards(llama)
    save_file({"x": torch.zeros(1)}, llama.parent / "secret.safetensors")
    edit(index, weight_map={"x": name})
    failure(llama, MeasurementError, index.name, f"{name!r} is not the name of a weight file")


# --- what would run code -----------------------------------------------------------------------


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
    state: dict[str, Any] = as_pickle(llama)
    path, target = llama / "pytorch_model.bin", tmp_path / "payload"
    pickle.loads(pickle.dumps(Payload(target)))
    target.rmdir()  # fails unless the payload ran
    state["x"] = Payload(target)
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    failure(llama, MeasurementError, "pytorch_model.bin", "unpickle", load_it=True)
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
        open_checkpoint(llama).tokenizer()
    edit(llama / "config.json", auto_map=auto)
    failure(llama, UsageError, "config.json", "auto_map", "delete")
    assert not target.exists()


# --- what does not fit the model ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "no_such_type"}, "no_such_type"),
        ({"model_type": None}, "model type"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"architectures": ["AutoModel"]}, "AutoModel"),
        ({"architectures": None}, "no architecture"),
    ],
)
def test_an_unknown_architecture(llama: Path, change: dict[str, Any], word: str) -> None:
    edit(llama / "config.json", **change)
    failure(llama, MeasurementError, "config.json", word, load_it=True)


def rewrite(directory: Path, change: Any) -> None:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_weight_is_named(llama: Path) -> None:
    """transformers would draw it at random and say so on a log nobody reads."""
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(llama, lambda state: state.pop(name))
    failure(llama, MeasurementError, "LlamaForCausalLM", name, load_it=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.scale",
    ],
)
def test_a_weight_the_model_has_no_place_for_is_named(llama: Path, name: str) -> None:
    """One layer too many, a normalisation that would not be applied, an unknown parameter."""
    rewrite(llama, lambda state: state.update({name: torch.zeros(4)}))
    failure(llama, MeasurementError, "no place", name, load_it=True)


def test_heads_that_the_model_lacks_are_passed_over(tmp_path: Path) -> None:
    """bert-base-uncased names BertForMaskedLM and stores a pooler and a next-sentence head too."""
    directory = models.save(models.bert(), tmp_path)
    extra = {
        "bert.pooler.dense.weight": torch.zeros(32, 32),
        "cls.seq_relationship.weight": torch.zeros(2, 32),
    }
    rewrite(directory, lambda state: state.update(extra))
    assert type(load(directory)).__name__ == "BertForMaskedLM"


def test_stored_causal_masks_are_passed_over(tmp_path: Path) -> None:
    """Older files hold them in every layer; models compute them now."""
    directory = models.save(models.gpt2(), tmp_path)
    masks = {"bias": torch.ones(1, 1, 64, 64), "masked_bias": torch.tensor(-1e4)}
    extra = {f"transformer.h.0.attn.{name}": mask for name, mask in masks.items()}
    rewrite(directory, lambda state: state.update(extra))
    assert type(load(directory)).__name__ == "GPT2LMHeadModel"
