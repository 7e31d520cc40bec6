"""Opening a checkpoint, a state dict with its factory, or a torch.distributed one: what
is stored comes out, all of it or it is said why, and nothing in it is trusted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import resource
import socket
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import factories
import huggingface_hub
import models
import numpy as np
import pytest
import torch
import transformers
from commands import run
from safetensors.torch import load_file, save_file
from stored import Calls, distributed, sharded
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.request_models import AuditRequest, demo_checkpoint
from numdev.sources import containers, tensor_files
from numdev.sources.capture import NAME
from numdev.sources.captured_calls import holds_cases
from numdev.sources.checkpoint import (
    Checkpoint,
    load_tokenizer,
    open_checkpoint,
    open_state_dict,
    read_config,
)
from numdev.sources.containers import StoredTensor, read_tensors
from numdev.sources.distributed_checkpoint import read_metadata
from numdev.sources.prompts import model_inputs, read_text
from numdev.sources.tensor_files import read_json, unpickled
from numdev.studies.logprobs.record_files import read_records
from numdev.studies.training.weights.weight_sets import open_weights

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
    """The same checkpoint stored in this way, a tied weight of a pickle under both
    names."""
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
    fails(lambda: load(directory), kind, *words)


def fails(action: Callable[[], Any], kind: type[NumdevError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_model_has_the_stored_weights_and_answers_alike(llama: Path) -> None:
    """Built here or by transformers, the same weights give the same logits; eval mode, no
    cache."""
    model = load(llama)
    ids = torch.arange(3, 15)[None]
    assert torch.allclose(
        model(ids).logits, models.llama(tie_word_embeddings=True)(ids).logits
    )
    assert model.config._attn_implementation == NAME
    assert not model.training
    assert model(ids).past_key_values is None
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storing_gives_the_same_model(llama: Path, way: str) -> None:
    """And its tensors, of which tied ones come once, though a pickle stores them
    twice."""
    model, tensors = load(llama).state_dict(), load_file(llama / "model.safetensors")
    assert len(stored(llama, way)) == len(tensors) + ("pickle" in way)
    checkpoint = open_checkpoint(llama)
    result = checkpoint.load_model(dtype=torch.float32, device="cpu").state_dict()
    for got, expected in ((result, model), (dict(checkpoint.tensors()), tensors)):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[n], expected[n]) for n in got)
    assert len(checkpoint.files) == (2 if way == "shards" else 1)


def test_opening_says_how_much_the_model_reads() -> None:
    """RoBERTa numbers positions from pad_token_id + 1, so two of its rows are never
    read."""

    def opened(**config: Any) -> Checkpoint:
        return Checkpoint(path=Path(), name="", config=config, containers=())

    roberta = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    for config, length in (
        ({"max_position_embeddings": 512}, 512), ({"n_positions": 1024}, 1024), (roberta, 512),
        ({"text_config": {"max_position_embeddings": 5}}, 5), ({}, None),
    ):  # fmt: skip
        assert opened(**config).max_length == length
    assert opened(text_config={"vocab_size": 7}).vocab_size == 7


def test_loading_never_asks_the_network(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("loading a checkpoint went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(llama)
    assert load_tokenizer(llama) is None


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_safetensors_file(llama: Path, keep: int) -> None:
    """Found by the header's own account, and no weights at all are a usage error."""
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    failure(llama, MeasurementError, "model.safetensors", "not a whole")
    path.unlink()
    failure(llama, UsageError, "no weights", "model.safetensors")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "shard.pkl", ".."]
)
def test_a_shard_that_is_not_a_weight_file_beside_its_index(
    llama: Path, name: str
) -> None:
    """It is not opened; one that is missing is named."""
    stored(llama, "shards")
    (llama / "model-00002-of-00002.safetensors").unlink()
    index = llama / "model.safetensors.index.json"
    failure(
        llama, MeasurementError, index.name, "model-00002-of-00002.safetensors", "missing"
    )
    save_file({"x": torch.zeros(1)}, llama.parent / "secret.safetensors")
    edit(index, weight_map={"x": name})
    failure(
        llama, MeasurementError, index.name, f"{name!r} is not the name of a weight file"
    )


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["torch", "old torch", "plain pickle"])
def test_a_pickle_that_would_run_code_does_not(
    llama: Path, tmp_path: Path, kind: str
) -> None:
    """The payload works when it is let, and is not let: an error that names the file
    instead."""
    state: dict[str, Any] = stored(llama, "pickle")
    path, target = llama / "pytorch_model.bin", tmp_path / "payload"
    payload = Calls(os.mkdir, str(target))
    pickle.loads(pickle.dumps(payload))
    target.rmdir()  # fails unless the payload ran
    state["x"] = payload
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(state))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    failure(llama, MeasurementError, "pytorch_model.bin", "numdev does not unpickle it")
    with pytest.raises(MeasurementError):
        list(open_checkpoint(llama).tensors())
    assert not target.exists()


@pytest.mark.parametrize("is_known", [True, False])
def test_code_that_comes_with_a_checkpoint_is_not_run(
    tmp_path: Path, capsys: Any, is_known: bool
) -> None:
    """Model and tokenizer are transformers' own, where it has them, and this is said."""
    target, demo = tmp_path / "payload", demo_checkpoint()
    llama = models.saved("llama", tmp_path, vocab_size=2048)
    (llama / "evil.py").write_text(f"import os\nos.mkdir({str(target)!r})\n")
    kinds = ("AutoConfig", "AutoModelForCausalLM", "AutoModel")
    auto: dict[str, Any] = {kind: "evil.Evil" for kind in kinds}
    auto["AutoTokenizer"] = ["evil.Slow", "evil.Fast"]
    (llama / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    config_with_code = {
        "tokenizer_class": "PreTrainedTokenizerFast" if is_known else "Evil",
        "auto_map": auto,
    }
    (llama / "tokenizer_config.json").write_text(json.dumps(config_with_code))
    if is_known:
        edit(llama / "config.json", auto_map=auto)
        text = tmp_path / "text"
        text.write_text("ab")
        assert run("audit", llama, "--text", text, *SMALL, "-o", tmp_path / "o") == 0
        source = report(tmp_path / "o")["provenance"]["source"]
        assert source["auto_map"] == "not run"
        assert "the tokenizer's own code is not run" in source["prompt"]
        words = (
            "The checkpoint's own code (auto_map) is not run: it is "
            "LlamaForCausalLM of transf"
        )
        assert words in " ".join(capsys.readouterr().err.split())
    else:
        edit(llama / "config.json", auto_map=auto, model_type="evil")
        failure(llama, MeasurementError, "of type evil", "does not run code", "auto_map")
        fails(lambda: load_tokenizer(llama), MeasurementError, "tokenizer")
    assert not target.exists()


@pytest.mark.parametrize("stream", [False, True])
def test_fp8_weights_are_read_times_their_scales(llama: Path, stream: bool) -> None:
    """Scales of blocks, which do not divide the weight; another way of quantising is
    refused."""
    state, expected = load_file(llama / "model.safetensors"), {}
    for name in [n for n in state if n.endswith("proj.weight")]:
        x = state[name] = state[name].to(torch.float8_e4m3fn)
        scale = state[f"{name}_scale_inv"] = (
            torch.rand(*((n + 23) // 24 for n in x.shape)) + 0.5
        )
        whole = scale.repeat_interleave(24, 0).repeat_interleave(24, 1)
        expected[name] = x.float() * whole[: x.shape[0], : x.shape[1]]
    save_file(state, llama / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [24, 24]}
    edit(llama / "config.json", quantization_config=how)
    opened: Any = open_checkpoint(llama)
    result = load(llama).state_dict()
    if stream:
        streamed = opened.deferred_model(dtype=torch.float32).named_parameters()
        result = {n: x.make(torch.device("cpu")) for n, x in streamed}
    assert all(torch.equal(result[n], x) for n, x in expected.items())
    edit(llama / "config.json", quantization_config={"quant_method": "fp8"})
    failure(llama, MeasurementError, "is fp8 with one scale a tensor or channel")
    edit(llama / "config.json", quantization_config={"quant_method": "gptq"})
    failure(llama, MeasurementError, "quantised by gptq", "expected fp8")


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_holds_no_real_numbers_is_named(tmp_path: Path) -> None:
    """Not read as if it were one; nor is a pickle compressed, which could fill the
    memory."""
    name, x = "h.0.c_proj.weight", state()["h.0.c_proj.weight"]
    for bad, kind in (
        (x.to_sparse(), "sparse_coo"), (x.to_sparse_csr(), "sparse_csr"), (x.to("meta"), "meta"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "qint8"), (x.bool(), "bool"),
        (x.to(torch.complex64), "complex64"), (x.to(torch.int8), "int8"),
    ):  # fmt: skip
        path = torch_saved(tmp_path / "w.pt", {**state(), name: bad})
        fails(
            partial(built, path), MeasurementError, f"{name}: expected real numbers", kind
        )
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "z.pt", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    fails(lambda: built(tmp_path / "z.pt"), MeasurementError, "z.pt", "damaged")


def test_a_config_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Numbers that JSON has no word for are objects there; any other object stays one."""
    stored = {
        "limit": [0.0, {"__float__": "Infinity"}],
        "text_config": {
            "least": {"__float__": "-Infinity"},
            "none": {"__float__": "NaN"},
        },
        "other": [{"__float__": "1.5"}, {"__float__": 3}, {"__float__": "NaN", "x": 1}],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stored))
    read = read_config(path)
    assert read["limit"] == [0.0, math.inf]
    assert read["text_config"]["least"] == -math.inf
    assert math.isnan(read["text_config"]["none"])
    assert read["other"] == stored["other"]
    if hasattr(transformers.PretrainedConfig, "_decode_special_floats"):  # not in 5.17
        assert str(read) == str(transformers.PretrainedConfig._dict_from_json_file(path))


def test_an_unknown_architecture(llama: Path) -> None:
    for value in ("NoSuchModel", "AutoModel"):
        edit(llama / "config.json", architectures=[value])
        failure(llama, MeasurementError, "config.json", f"no model {value} of type llama")
    edit(llama / "config.json", architectures=None)
    failure(llama, MeasurementError, 'config.json: names no model in "architectures"')
    edit(
        llama / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="no_such_type",
    )
    failure(llama, MeasurementError, "config.json", "of type no_such_type")
    edit(llama / "config.json", model_type=None)
    failure(
        llama,
        MeasurementError,
        "expected a config of transformers, got one without model_type",
    )


@pytest.mark.parametrize(("files", "what"), [
    ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "a LoRA adapter (PEFT)"),
    ({"open_clip_config.json": "{}"}, "an open_clip model"),
    ({"params.json": "{}", "consolidated.00.pth": ""}, "a model in Meta's own format"),
    ({"config.json": '{"architecture": "vit", "pretrained_cfg": {}}'}, "a timm model's"),
    ({"config.json": '{"model_type": "llama"}', "model.gguf": ""}, "a GGUF model"),
])  # fmt: skip
def test_a_format_that_is_not_read_is_named(
    tmp_path: Path, files: Any, what: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    fails(lambda: open_checkpoint(tmp_path), NumdevError, what)


def test_a_file_that_is_not_read_is_named(tmp_path: Path) -> None:
    """And weights that need a factory say so, with nothing that is None."""
    for suffix, what in ((".gguf", "a GGUF file"), (".xyz", "a file *.xyz")):
        fails(
            lambda suffix=suffix: open_state_dict(tmp_path / f"w{suffix}", "a:b"),
            UsageError,
            what,
        )
    path = torch_saved(tmp_path / "w.pt", state())
    with pytest.raises(UsageError) as caught:
        open_state_dict(path, None)
    assert caught.value.message.endswith(
        "w.pt: weights alone need --model package.module:factory"
    )


def test_a_small_file_that_cannot_be_opened_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its reader, in its words: whether it is a pointer of git-lfs cannot be told."""

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("a.json", "a.txt", "a.jsonl", "a.safetensors", "a.pt"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(Path, "open", refused)
    for reading, error, words in (
        (lambda: read_json(tmp_path / "a.json"), MeasurementError, "a.json: is not valid JSON: Permis"),
        (lambda: read_text(tmp_path / "a.txt"), UsageError, "a.txt: cannot be read (Permission denied)"),
        (lambda: list(read_records(tmp_path / "a.jsonl")), MeasurementError, "a.jsonl: cannot be read: Perm"),
        (lambda: list(read_records(tmp_path / "b.jsonl")), MeasurementError, "b.jsonl: cannot be read: No s"),
        (lambda: holds_cases(tmp_path / "a.safetensors"), MeasurementError, "is not a whole safetensors"),
        (lambda: unpickled(tmp_path / "a.pt"), MeasurementError, "a.pt: is damaged or holds"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            reading()
        assert words in caught.value.message


def test_a_pointer_of_git_lfs_is_recognised_everywhere(
    llama: Path, tmp_path: Path
) -> None:
    """Weights, shards, configs, pickles, tokenizers, texts, pieces of distributed
    checkpoints."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"
    words = "is a pointer of git-lfs, not the file it stands for"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        before = (llama / name).read_bytes() if (llama / name).exists() else b"{}"
        (llama / name).write_text(text)
        if name == "tokenizer.json":
            fails(lambda: load_tokenizer(llama), MeasurementError, name, words)
        else:
            failure(llama, MeasurementError, name, words)
        (llama / name).write_bytes(before)
    for name in ("w.pt", "w.safetensors", "text.txt"):
        (tmp_path / name).write_text(text)
    for reading in (
        lambda: list(read_tensors(tmp_path / "w.pt")), lambda: list(read_tensors(tmp_path / "w.safetensors")),
        lambda: read_text(tmp_path / "text.txt"),
    ):  # fmt: skip
        fails(reading, MeasurementError, words)
    (tmp_path / ".metadata").write_text(text)
    fails(lambda: read_metadata(tmp_path), MeasurementError, words)


def test_sizes_far_beyond_what_is_stored_are_refused(llama: Path) -> None:
    """Before a model is built, which would take all memory, or forever."""
    for name, words in (("num_hidden_layers", "_layers"), ("hidden_size", "parameters")):
        edit(llama / "config.json", **{"num_hidden_layers": 2, name: 10**9})
        failure(llama, MeasurementError, "config.json", words)


@pytest.mark.parametrize("name", [
    "model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight",
    "model.norm.scale",
])  # fmt: skip
def test_a_weight_the_model_has_no_place_for_is_named(llama: Path, name: str) -> None:
    """One layer too many, a normalisation not applied, an unknown parameter, another
    shape."""
    rewrite(llama, lambda state: state.update({name: torch.zeros(4)}))
    failure(llama, MeasurementError, "does not use", name)
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
    tmp_path: Path, name: str, extra: Any
) -> None:
    """bert-base-uncased stores a pooler and another head too; older files hold causal
    masks."""
    directory = models.save(getattr(models, name)(), tmp_path)
    rewrite(
        directory,
        lambda state: state.update({n: torch.ones(s) for n, s in extra.items()}),
    )
    assert not load(directory).training


def test_identity_is_of_config_and_weights(llama: Path) -> None:
    """A change of either gives another one."""
    first = open_checkpoint(llama).identity()
    assert open_checkpoint(llama).identity() == first
    edit(llama / "config.json", rms_norm_eps=1e-3)
    second = open_checkpoint(llama).identity()
    rewrite(llama, lambda state: state["model.norm.weight"].add_(1))
    assert len({first, second, open_checkpoint(llama).identity()}) == 3


@pytest.mark.parametrize("of_transformers", [True, False])
@pytest.mark.parametrize("of_hub", [True, False])
def test_progress_bars_are_afterwards_as_before(
    of_transformers: bool, of_hub: bool
) -> None:
    """Those of transformers and of huggingface_hub, each by itself; and one group's."""
    switch, hub = transformers.utils.logging, huggingface_hub.utils
    before = switch.is_progress_bar_enabled(), hub.are_progress_bars_disabled()
    try:
        (switch.enable_progress_bar if of_transformers else switch.disable_progress_bar)()
        (hub.enable_progress_bars if of_hub else hub.disable_progress_bars)()
        (hub.disable_progress_bars if of_hub else hub.enable_progress_bars)("a.group")
        with tensor_files.quiet():
            assert hub.are_progress_bars_disabled("a.group")
            assert not switch.is_progress_bar_enabled()
        assert switch.is_progress_bar_enabled() is of_transformers
        assert hub.are_progress_bars_disabled() is not of_hub
        assert hub.are_progress_bars_disabled("a.group") is of_hub
    finally:
        (switch.enable_progress_bar if before[0] else switch.disable_progress_bar)()
        (hub.disable_progress_bars if before[1] else hub.enable_progress_bars)()


def test_a_text_that_no_file_can_be_called_is_one_line() -> None:
    """As the system says it."""
    with pytest.raises(UsageError, match=r"cannot be read \(embedded null byte\)$"):
        read_text(Path("a\0b"))


def test_identity_is_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, of two pieces and a half and of nothing: by name, each piece by its own
    SHA-256; a byte more or another one anywhere is another identity."""
    monkeypatch.setattr(tensor_files, "PIECE", 1000)
    monkeypatch.setattr(tensor_files, "CHUNK", 300)
    content = bytes(range(250)) * 10
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"")
    both = [tmp_path / "a", tmp_path / "b"]
    pieces = [
        ("a", content[:1000]),
        ("a", content[1000:2000]),
        ("a", content[2000:]),
        ("b", b""),
    ]
    text = "".join(
        f"{name} {hashlib.sha256(piece).hexdigest()}\n" for name, piece in pieces
    )
    first = tensor_files.identity(both)
    assert first == hashlib.sha256(text.encode()).hexdigest()
    seen = {first}
    for place in (0, 999, 1000, 2499):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "a").write_bytes(changed)
        seen.add(tensor_files.identity(both))
    (tmp_path / "a").write_bytes(content + b"x")
    assert len(seen | {tensor_files.identity(both)}) == 6
    later = tensor_files.start_identity([tmp_path / "b"])
    assert later() == later()
    (tmp_path / "b").unlink()
    with pytest.raises(FileNotFoundError):
        tensor_files.identity(both)


KERNELS = ("--kernel", "sdpa-math", "--kernel", "sdpa-flash")
SMALL = (*KERNELS, "--length", 16, "--sequences", 2)
GPT = ("--model", "factories:gpt")


def state() -> dict[str, Tensor]:
    return dict(factories.saved_gpt().state_dict())


UNTIED = sorted(state().keys() - {"lm_head.weight"})


def built(path: Path, factory: str = "gpt") -> Any:
    opened = open_state_dict(path, f"factories:{factory}")
    return opened.load_model(dtype=torch.float32, device="cpu")


def torch_saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@dataclass(frozen=True)
class ArraysFile:
    """A kind of file that numdev does not know: a NumPy archive."""

    path: Path
    suffixes: ClassVar[tuple[str, ...]] = (".npz",)
    is_lazy: ClassVar[bool] = False
    is_joined: ClassVar[bool] = False
    has_more: ClassVar[bool] = False
    nesting: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @classmethod
    def holds(cls, path: Path) -> bool:
        return path.suffix in cls.suffixes

    def tensors(self) -> Iterator[StoredTensor]:
        for name, array in np.load(self.path).items():
            x = torch.from_numpy(array)
            yield StoredTensor(name=name, shape=tuple(x.shape), read=x.clone)

    def beside(self) -> None:
        return None


def test_another_container_is_one_class_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name in CONTAINERS a file is opened as a state dict, alone or in a
    directory as weights to compare, and has an identity; without it it is refused by what
    it is."""
    path, expected = tmp_path / "w.npz", state()
    np.savez(path, **{name: x.numpy() for name, x in expected.items()})
    fails(lambda: built(path), UsageError, "got a NumPy archive")
    monkeypatch.setattr(containers, "CONTAINERS", (*containers.CONTAINERS, ArraysFile))
    model = built(path).state_dict()
    assert all(torch.equal(model[name], x) for name, x in expected.items())
    opened = open_state_dict(path, "factories:gpt")
    assert opened.identity() == tensor_files.identity([path])
    for target in (path, tmp_path):
        weights = open_weights(str(target))
        assert weights.files == (path,)
        assert not weights.damage
        assert {n: x.shape for n, x in weights.tensors.items()} == {
            n: x.shape for n, x in expected.items()
        }
        assert all(torch.equal(weights.tensors[n].read(), x) for n, x in expected.items())


def report(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "report.json").read_text())


def nested() -> dict[str, Any]:
    """As training scripts save it, with the optimiser's state beside."""
    moments = {f"state.{n}.exp_avg": x.clone() for n, x in state().items()}
    return {"model": state(), "optim": moments, "step": 3}


def wrapped() -> dict[str, Tensor]:
    return {f"module._orig_mod.{n}": x for n, x in state().items()}


STORED: dict[str, Callable[[Path], Path]] = {
    "": lambda path: torch_saved(path / "w.pt", state()),
    "module._orig_mod.": lambda path: torch_saved(path / "w.pt", wrapped()),
    "sharded": lambda path: sharded(path, {n: state()[n] for n in UNTIED}),
    "model.": lambda path: distributed(path / "d", nested()),
    "state_dict.module._orig_mod.": lambda path: distributed(
        path / "d", {"state_dict": wrapped()}
    ),
}
"""By what stands before the names."""


@pytest.mark.parametrize("way", STORED)
def test_every_way_of_storing_a_state_dict_gives_the_same_model(
    tmp_path: Path, way: str
) -> None:
    """Bit for bit, under the model's names, tied ones of a pickle once; the rest is left
    out."""
    path = STORED[way](tmp_path)
    opened, model = open_state_dict(path, "factories:gpt"), built(path)
    assert not model.training
    assert all(torch.equal(x, state()[n]) for n, x in model.state_dict().items())
    tensors = dict(opened.tensors())
    assert sorted(tensors) == (sorted(state()) if path.name == "d" else UNTIED)
    assert all(torch.equal(x, state()[n]) for n, x in tensors.items())
    assert opened.fitted(model).describe().get("prefix_removed", "sharded") == (
        way or "sharded"
    )


def test_weights_are_not_rounded_to_the_factorys_format(tmp_path: Path) -> None:
    """The factory builds in bfloat16, the weights are fp32, and fp32 is asked for."""
    model = built(STORED[""](tmp_path), "half_gpt")
    assert torch.equal(model.h[0].c_attn.weight, state()["h.0.c_attn.weight"])


def test_a_model_whose_own_names_have_the_prefix_keeps_it(tmp_path: Path) -> None:
    """A wrapper that calls its part `module`: nothing is to be taken off."""
    names = {f"module.{n}": x for n, x in state().items()}
    opened = open_state_dict(torch_saved(tmp_path / "w.pt", names), "factories:gpt")
    holder = torch.nn.Module()
    holder.module = factories.gpt()
    object.__setattr__(opened, "build", lambda: holder)
    assert opened.load_model(dtype=torch.float32, device="cpu") is holder
    assert (opened.prefix, opened.fitted(holder).prefix) == ("module.", "")


def test_a_nanogpt_checkpoint_needs_a_two_line_factory(tmp_path: Path) -> None:
    """The file's model_args make the model; ids go to `idx`, no longer than the block
    size."""
    content = {
        "model": {f"_orig_mod.{n}": x for n, x in state().items()},
        "optimizer": {
            "state": {0: {"exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 1e-3}],
        },
        "model_args": factories.NANO,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": "shakespeare", "batch_size": 12},
    }
    path = torch_saved(tmp_path / "ckpt.pt", content)
    assert (
        run("audit", path, "--model", "factories:nanogpt", *KERNELS, "-o", tmp_path / "o")
        == 0
    )
    result = report(tmp_path / "o")
    source = result["provenance"]["source"]
    assert source["prompt"] == "8 x 24 random token ids, seed 0"
    assert (source["model"], source["prefix_removed"]) == (
        "factories:nanogpt",
        "_orig_mod.",
    )
    cases = [(c["case"], c["is_causal"], c["q_len"]) for c in result["cases"]]
    assert cases == [("h.0#0", True, 24), ("h.1#0", True, 24)]
    assert sorted({w["tensor"] for w in result["weights"]}) == UNTIED


def test_a_models_length_is_known_by_many_names(tmp_path: Path, capsys: Any) -> None:
    """On the model or in its configuration, which may be a dict; else the error names
    --length."""
    weights, model = STORED[""](tmp_path), factories.gpt()
    opened = open_state_dict(weights, "factories:gpt")
    request = AuditRequest(target="x", checkpoint=str(weights), length=99, sequences=2)
    del model.config
    for holder in (
        SimpleNamespace(seq_length=24),
        {"n_ctx": 24},
        {"model": 1, "max_seq_len": 24},
    ):
        for place in ("config", "args", "hparams"):
            setattr(model, place, holder)
            assert model_inputs(request, opened, model).inputs["idx"].shape == (2, 24)
            delattr(model, place)
    model.max_seq_length = 24
    assert model_inputs(request, opened, model).inputs["idx"].shape == (2, 24)
    audit = ("audit", weights, "--model", "factories:hidden_length", "-o", tmp_path / "o")
    assert run(*audit, *KERNELS) == 3
    assert "failed on its inputs: " in (words := capsys.readouterr().err)
    assert "does it take as many tokens as --length" in words


def test_a_soft_cap_of_transformers_is_not_lost(tmp_path: Path) -> None:
    """Out of a factory Gemma 2 attends eagerly, or drops its cap; here it does
    neither."""
    directory = models.save(models.gemma2(), tmp_path / "gemma2")
    arguments = (directory / "model.safetensors", "--model", "factories:gemma2", *SMALL)
    assert run("audit", *arguments, "-o", tmp_path / "o", "-q") == 3
    assert [c["softcap"] for c in report(tmp_path / "o")["cases"]] == [0.5, 0.5]


@pytest.mark.parametrize(("factory", "kind", "words"), [
    ("factories:raises", MeasurementError, ("factories:raises", "KeyError", "no such")),
    ("factories:returns_nothing", UsageError, (("expected a torch.nn.Module, got NoneType"),)),
    ("factories:nanogpt", MeasurementError, ("raised TypeError", "'model_args'")),
    ("no_such_package:build", UsageError, ("no_such_package", "PYTHONPATH")),
    (None, UsageError, ("--model",)),
])  # fmt: skip
def test_a_factory_that_gives_no_model(
    tmp_path: Path, factory: Any, kind: Any, words: Any
) -> None:
    path = STORED[""](tmp_path)
    opened = lambda: open_state_dict(path, factory)  # noqa: E731
    fails(lambda: opened().load_model(dtype=torch.float32, device="cpu"), kind, *words)


def test_missing_left_over_and_misshapen_weights_are_named_together(
    tmp_path: Path,
) -> None:
    """What the model computes may be left over: an older file stores a buffer."""
    path = torch_saved(tmp_path / "w.pt", {**state(), "steps": torch.zeros(24)})
    assert torch.equal(built(path).steps, torch.arange(24))
    changed = state()
    changed["h.7.extra"] = changed.pop("h.1.c_proj.bias")
    changed["wpe.weight"] = torch.zeros(5, 16)
    path = torch_saved(tmp_path / "w.pt", changed)
    words = ("lacks weights h.1.c_proj.bias,", "does not use h.7.extra")
    fails(
        lambda: built(path),
        MeasurementError,
        *words,
        "wpe.weight [5, 16] instead of [24, 16]",
    )


def test_an_audit_gives_the_rows_of_the_state_dict(tmp_path: Path, capsys: Any) -> None:
    """As torch.save's file, but for the source; a prefix is said; a torn save is
    refused."""
    distributed(tmp_path / "d", nested())
    torch_saved(tmp_path / "d.pt", state())
    rows = []
    for target in ("d.pt", "d"):
        assert (
            run(
                "audit", tmp_path / target, *GPT, *SMALL, "-o", tmp_path / f"{target}-out"
            )
            == 0
        )
        result = report(tmp_path / f"{target}-out")
        rows.append([{**row, "source": ""} for row in result["rows"]])
    assert rows[0] == rows[1]
    assert result["provenance"]["source"]["prefix_removed"] == "model."
    assert "stored under names that begin with 'model.'" in capsys.readouterr().err
    (tmp_path / "d" / ".metadata").unlink()
    assert run("audit", tmp_path / "d", *GPT, *SMALL, "-o", tmp_path / "o") == 3
    assert ".metadata is missing" in capsys.readouterr().err


@pytest.mark.parametrize("nest", ["", "model", "state_dict"])
def test_a_config_beside_it_is_model_enough(tmp_path: Path, nest: str) -> None:
    """transformers builds the model, whose own names begin with `model.` here too."""
    model = models.llama()
    state = dict(model.state_dict())
    path = distributed(tmp_path / "d", {nest: state} if nest else state)
    model.config.architectures = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    opened = open_checkpoint(path)
    result = opened.load_model(dtype=torch.float32, device="cpu")
    assert all(torch.equal(x, state[n]) for n, x in result.state_dict().items())
    assert opened.describe().get("prefix_removed", "") == (f"{nest}." if nest else "")
    assert dict(opened.tensors()).keys() == state.keys()


@pytest.mark.parametrize(
    "passed",
    [{"num_labels": 10**9}, {"num_labels": 10**7}, {"text_config": {"num_labels": 10**9}},
     {"vocab_size": 10**9}, {"hidden_size": 10**6}, {"intermediate_size": 10**9},
     {"num_hidden_layers": 10**9}],
    ids=str,
)  # fmt: skip
def test_a_config_far_beyond_its_tensors_is_refused_first(
    passed: dict[str, Any], tmp_path: Path
) -> None:
    """In one line, before transformers makes anything of it: a thousand million labels
    are named one by one."""
    models.save(models.llama(), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **passed}))
    checkpoint = open_checkpoint(tmp_path / "m")
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), before[1]))
    try:
        with pytest.raises(MeasurementError, match=r"config\.json"):
            checkpoint.load_model(dtype=torch.float32, device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
