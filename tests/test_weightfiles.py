"""Weights by name from every kind of file, and what damaged and hostile ones come to."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from numdev.errors import MeasurementError, UsageError
from numdev.sources.dcp import read_metadata
from numdev.training.weights.files import open_weights

STATE = {
    "layers.0.w": torch.arange(12, dtype=torch.float32).view(4, 3),
    "layers.0.b": torch.arange(4).to(torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.float64),
}


def values(path: Path | str) -> dict[str, Tensor]:
    """Everything in a set of weights."""
    return {name: kept.read() for name, kept in open_weights(str(path)).tensors.items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[k].dtype == x.dtype and torch.equal(found[k], x) for k, x in wanted.items()
    )


def sharded(directory: Path, parts: dict[str, dict[str, Tensor]]) -> Path:
    """A checkpoint in several files with an index; its directory."""
    directory.mkdir()
    for file, part in parts.items():
        save_file(part, directory / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def distributed(directory: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        dcp.save(state, checkpoint_id=directory)
    return directory


def two(state: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: state[k]} for k in list(state)[:2]] + [{k: state[k] for k in list(state)[2:]}]


# --- what is read --------------------------------------------------------------------------------


def _safetensors(root: Path) -> Path:
    save_file(STATE, root / "m.safetensors")
    return root / "m.safetensors"


def _lone_directory(root: Path) -> Path:
    (root / "lone").mkdir()
    save_file(STATE, root / "lone" / "adapter_model.safetensors")
    return root / "lone"


def _sharded_directory(root: Path) -> Path:
    a, b, c = two(STATE)
    return sharded(root / "s", {"m-1.safetensors": a, "m-2.safetensors": b | c})


def _index(root: Path) -> Path:
    return _sharded_directory(root) / "model.safetensors.index.json"


def _pickle(root: Path) -> Path:
    torch.save(STATE, root / "m.pt")
    return root / "m.pt"


def _legacy(root: Path) -> Path:
    torch.save(STATE, root / "m.bin", _use_new_zipfile_serialization=False)
    return root / "m.bin"


def _nested(root: Path) -> Path:
    state = {f"_orig_mod.module.{k}": x for k, x in STATE.items()}
    torch.save({"model": state, "step": 3}, root / "m.pth")
    return root / "m.pth"


def _distributed(root: Path) -> Path:
    return distributed(root / "d", dict(STATE))


def _nested_distributed(root: Path) -> Path:
    return distributed(root / "n", {"model": dict(STATE), "optim": {"x": torch.ones(3)}, "step": 1})


def _deeply_nested(root: Path) -> Path:
    """As PyTorch's tutorial saves it, of a model in DistributedDataParallel."""
    inner = {"model": {f"module.{k}": x for k, x in STATE.items()}, "optim": {"x": torch.ones(3)}}
    return distributed(root / "app", {"app": inner})


@pytest.mark.parametrize(
    "make",
    [
        _safetensors, _lone_directory, _sharded_directory, _index, _pickle, _legacy, _nested,
        _distributed, _nested_distributed, _deeply_nested,
    ],
)  # fmt: skip
def test_every_kind_of_file_gives_its_tensors(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """Names, formats and values are those that were saved, without wrappers' prefixes; and the
    comparison rejects another value, format or name."""
    found = values(make(tmp_path))
    assert same(found, STATE)
    assert not same(found, STATE | {"scale": STATE["scale"] + 1e-9})
    assert not same(found, STATE | {"scale": STATE["scale"].float()})
    assert not same(found, {**STATE, "more": torch.zeros(1)})


def test_tied_weights_of_a_pickle_once(tmp_path: Path) -> None:
    """What shares its storage is listed once, and found under all its names."""
    x = torch.randn(3, 2)
    torch.save({"head": x, "other": x.clone(), "embed": x, "view": x[:2]}, tmp_path / "t.pt")
    found = open_weights(str(tmp_path / "t.pt"))
    assert list(found.tensors) == ["head", "other", "view"]
    assert found.tied == {"embed": "head"}
    kept = found.find("embed")
    assert kept is not None
    assert torch.equal(kept.read(), x)
    assert found.find("none") is None


def test_what_is_not_clear_is_a_usage_error(tmp_path: Path) -> None:
    """No such path, no weights, several sets, one name in two files."""
    for name in ("a.pt", "b.pt"):
        torch.save(STATE, tmp_path / name)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "twice").mkdir()
    for name in ("x", "y"):
        save_file(STATE, tmp_path / "twice" / f"{name}.safetensors")
    for path, words in (
        ("nowhere", "no such file"),
        ("", "several sets of weights"),
        ("notes.txt", "no file of weights"),
        ("empty", "no weights that numdev reads"),
        ("twice", "both hold"),
    ):
        with pytest.raises(UsageError, match=words):
            open_weights(str(tmp_path / path))


# --- distributed checkpoints in pieces -----------------------------------------------------------


def pieces(directory: Path, tensor: Tensor, blocks: list[tuple[slice, ...]]) -> Path:
    """A distributed checkpoint of one tensor, `w`, in blocks, one file each, as several ranks write
    it. Torch's own classes make its metadata."""
    directory.mkdir()
    chunks, storage = [], {}
    for rank, block in enumerate(blocks):
        part = tensor[block].clone()
        stream = io.BytesIO()
        torch.save(part, stream)
        name, before = f"__{rank}_0.distcp", b"another tensor"
        (directory / name).write_bytes(before + stream.getvalue())
        offset = torch.Size([s.start for s in block])
        chunks.append(torchs.ChunkStorageMetadata(offset, part.shape))
        place = _StorageInfo(name, len(before), len(stream.getvalue()))
        storage[torchs.MetadataIndex("w", offset)] = place
    about = torchs.TensorStorageMetadata(
        torchs.TensorProperties.create_from_tensor(tensor), tensor.shape, chunks
    )
    written = torchs.Metadata({"w": about}, planner_data={"w": ("w",)}, storage_data=storage)
    (directory / ".metadata").write_bytes(pickle.dumps(written))
    return directory


WHOLE = torch.arange(35, dtype=torch.float32).view(7, 5)
QUARTERS = [
    (slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 5)),
    (slice(4, 7), slice(0, 2)), (slice(4, 7), slice(2, 5)),
]  # fmt: skip


def test_pieces_are_put_together(tmp_path: Path) -> None:
    """A tensor in four blocks is what torch's own reader makes of the same files."""
    directory = pieces(tmp_path / "d", WHOLE, QUARTERS)
    theirs = {"w": torch.zeros(7, 5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(theirs, checkpoint_id=directory)
    assert same(values(directory), theirs)
    assert same(theirs, {"w": WHOLE})


def _truncate(directory: Path) -> None:
    path = directory / "__2_0.distcp"
    os.truncate(path, path.stat().st_size - 1)


def _remove(directory: Path) -> None:
    (directory / "__2_0.distcp").unlink()


def _garble(directory: Path) -> None:
    path = directory / "__2_0.distcp"
    path.write_bytes(b"x" * path.stat().st_size)


def _swap(directory: Path) -> None:
    """The first and the last block are of different shapes."""
    first, last = directory / "__0_0.distcp", directory / "__3_0.distcp"
    kept = first.read_bytes()
    first.write_bytes(last.read_bytes().ljust(len(kept), b"\0"))


@pytest.mark.parametrize("spoil", [_truncate, _remove, _garble, _swap])
def test_a_damaged_piece_is_named(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """A tensor one of whose files is spoiled raises, with the tensor's name and the file's."""
    directory = pieces(tmp_path / "d", WHOLE, QUARTERS)
    spoil(directory)
    with pytest.raises(MeasurementError, match=r"w: __\d_0.distcp is missing or damaged"):
        values(directory)


@pytest.mark.parametrize("blocks", [QUARTERS[:3], [*QUARTERS[:3], QUARTERS[0]]])
def test_pieces_that_leave_a_gap_are_refused(blocks: Any, tmp_path: Path) -> None:
    """No number is made of memory that no file filled: a block less, and one twice."""
    with pytest.raises(MeasurementError, match="do not make up the tensor"):
        values(pieces(tmp_path / "d", WHOLE, blocks))


class _Runs:
    """What a hostile pickle does: call something."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "content",
    [
        _Runs(os.mkdir, "ran"),
        _Runs(eval, "open('ran', 'w')"),
        {"state_dict_metadata": _Runs(os.system, "touch ran")},
        _Runs(torch.load, "x"),
        torch.nn.Linear(2, 2),
    ],
)
def test_metadata_that_asks_for_anything_else_is_refused(
    content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle that would call something, or build any other object, is refused by the name it
    asks for, and nothing runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(MeasurementError, match=r"asks for .*, which is no part of a checkpoint"):
        read_metadata(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".metadata"]
    pickle.loads(pickle.dumps(_Runs(os.mkdir, "ran")))  # plain pickle would have
    assert (tmp_path / "ran").exists()


def test_metadata_changes_none_of_torchs_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instruction that writes into a class it names reaches only a stand-in; plain pickle would
    have changed torch's."""
    monkeypatch.setattr(torchs.Metadata, "version", None)
    # Push the class, then the state (None, {"version": "spoilt"}); BUILD sets attributes by it.
    spoils = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(Vversion\nVspoilt\ndtb."
    (tmp_path / ".metadata").write_bytes(spoils)
    with pytest.raises(MeasurementError, match="is not the metadata"):
        read_metadata(tmp_path)
    assert torchs.Metadata.version is None
    pickle.loads(spoils)
    assert torchs.Metadata.version == "spoilt"


def test_metadata_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """A file outside the checkpoint's directory is never opened."""
    directory = pieces(tmp_path / "d", WHOLE, QUARTERS)
    path = directory / ".metadata"
    written = pickle.loads(path.read_bytes())
    for place in written.storage_data.values():
        place.relative_path = "../" + place.relative_path
    path.write_bytes(pickle.dumps(written))
    with pytest.raises(MeasurementError, match="not the name of a file beside it"):
        read_metadata(directory)


# --- damage that does not stop the rest ----------------------------------------------------------


def test_a_truncated_shard_leaves_the_others(tmp_path: Path) -> None:
    """Its tensors are named as lost, with the file and why; the rest is there."""
    directory = _sharded_directory(tmp_path)
    path = directory / "m-2.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    found = open_weights(str(directory))
    assert list(found.tensors) == ["layers.0.w"]
    (damage,) = found.damage
    assert "m-2.safetensors: is not a whole safetensors file" in damage.words
    assert set(damage.tensors) == {"layers.0.b", "scale"}


def test_a_pickle_with_objects_is_damage(tmp_path: Path) -> None:
    """What torch.save wrote is read without building any object but tensors."""
    torch.save({"w": torch.ones(2), "x": _Runs(os.mkdir, str(tmp_path / "ran"))}, tmp_path / "m.pt")
    found = open_weights(str(tmp_path / "m.pt"))
    assert not found.tensors
    assert "does not unpickle" in found.damage[0].words
    assert not (tmp_path / "ran").exists()
