"""Weights by name from every kind of file, and what damaged and hostile ones come to."""

from __future__ import annotations

import io
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
from stored import distributed, sharded
from torch import Tensor
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from numdev.errors import MeasurementError
from numdev.sources.dcp import read_metadata
from numdev.training.weights.files import open_weights

STATE = {
    "layers.0.w": torch.arange(12, dtype=torch.float32).view(4, 3),
    "layers.0.b": torch.arange(4).to(torch.bfloat16),
    "scale": torch.tensor(2.5, dtype=torch.float64),
}
NESTED = {"model": {f"_orig_mod.module.{k}": x for k, x in STATE.items()}, "step": 3}
OPTIMISER = {"optim": {"x": torch.ones(3)}, "step": 1}
# As PyTorch's tutorial saves it, of a model in DistributedDataParallel.
APP = {"app": {"model": {f"module.{k}": x for k, x in STATE.items()}, **OPTIMISER}}


def values(path: Path | str) -> dict[str, Tensor]:
    """Everything in a set of weights."""
    return {name: stored.read() for name, stored in open_weights(str(path)).tensors.items()}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[k].dtype == x.dtype and torch.equal(found[k], x) for k, x in wanted.items()
    )


def test_every_kind_of_file_gives_its_tensors(tmp_path: Path) -> None:
    """Names, formats and values are those that were saved, without wrappers' prefixes; and the
    comparison rejects another value, format or name."""
    (tmp_path / "lone").mkdir()
    save_file(STATE, tmp_path / "m.safetensors")
    save_file(STATE, tmp_path / "lone" / "adapter_model.safetensors")
    torch.save(STATE, tmp_path / "m.pt")
    torch.save(STATE, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    torch.save(NESTED, tmp_path / "m.pth")
    index = sharded(tmp_path / "sharded", STATE)
    for path in (
        *(tmp_path / name for name in ("m.safetensors", "lone", "m.pt", "m.bin", "m.pth")),
        *(index, index.parent),
        distributed(tmp_path / "d", dict(STATE)),
        distributed(tmp_path / "n", {"model": dict(STATE), **OPTIMISER}),
        distributed(tmp_path / "app", APP),
    ):
        assert same(values(path), STATE), path
    assert not same(STATE, STATE | {"scale": STATE["scale"] + 1e-9})
    assert not same(STATE, STATE | {"scale": STATE["scale"].float()})
    assert not same(STATE, {**STATE, "more": torch.zeros(1)})


def test_tied_weights_of_a_pickle_once(tmp_path: Path) -> None:
    """What shares its storage is listed once, and found under all its names."""
    x = torch.randn(3, 2)
    torch.save({"head": x, "other": x.clone(), "embed": x, "view": x[:2]}, tmp_path / "t.pt")
    found = open_weights(str(tmp_path / "t.pt"))
    assert list(found.tensors) == ["head", "other", "view"]
    assert found.tied == {"embed": "head"}
    assert found.find("embed") is found.tensors["head"]
    assert torch.equal(found.tensors["head"].read(), x)
    assert found.find("none") is None


# --- distributed checkpoints in pieces -----------------------------------------------------------

WHOLE = torch.arange(35, dtype=torch.float32).view(7, 5)
QUARTERS = [
    (slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 5)),
    (slice(4, 7), slice(0, 2)), (slice(4, 7), slice(2, 5)),
]  # fmt: skip


def pieces(directory: Path, blocks: list[tuple[slice, ...]] = QUARTERS) -> Path:
    """A distributed checkpoint of WHOLE as `w`, in blocks, one file each, as several ranks write
    it. Torch's own classes make its metadata."""
    directory.mkdir()
    chunks, storage = [], {}
    for rank, block in enumerate(blocks):
        part, stream = WHOLE[block].clone(), io.BytesIO()
        torch.save(part, stream)
        name, before = f"__{rank}_0.distcp", b"another tensor"
        (directory / name).write_bytes(before + stream.getvalue())
        offset = torch.Size([s.start for s in block])
        chunks.append(torchs.ChunkStorageMetadata(offset, part.shape))
        place = _StorageInfo(name, len(before), len(stream.getvalue()))
        storage[torchs.MetadataIndex("w", offset)] = place
    about = torchs.TensorStorageMetadata(
        torchs.TensorProperties.create_from_tensor(WHOLE), WHOLE.shape, chunks
    )
    written = torchs.Metadata({"w": about}, planner_data={"w": ("w",)}, storage_data=storage)
    (directory / ".metadata").write_bytes(pickle.dumps(written))
    return directory


def test_pieces_are_put_together(tmp_path: Path) -> None:
    """A tensor in four blocks is what torch's own reader makes of the same files."""
    directory = pieces(tmp_path / "d")
    theirs = {"w": torch.zeros(7, 5)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(theirs, checkpoint_id=directory)
    assert same(values(directory), theirs)
    assert same(theirs, {"w": WHOLE})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content, other: content[:-1],
        lambda content, other: b"x" * len(content),
        lambda content, other: other.ljust(len(content), b"\0"),
        None,
    ],
    ids=["truncated", "garbled", "another block", "gone"],
)
def test_a_damaged_piece_is_named(
    spoil: Callable[[bytes, bytes], bytes] | None, tmp_path: Path
) -> None:
    """A tensor one of whose files is spoiled raises, with the tensor's name and the file's."""
    directory = pieces(tmp_path / "d")
    file, other = directory / "__0_0.distcp", directory / "__3_0.distcp"
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes(), other.read_bytes()))
    with pytest.raises(MeasurementError, match=r"w: __0_0.distcp is missing or damaged"):
        values(directory)


@pytest.mark.parametrize("blocks", [QUARTERS[:3], [*QUARTERS[:3], QUARTERS[0]]])
def test_pieces_that_leave_a_gap_are_refused(blocks: Any, tmp_path: Path) -> None:
    """No number is made of memory that no file filled: a block less, and one twice."""
    with pytest.raises(MeasurementError, match="do not make up the tensor"):
        values(pieces(tmp_path / "d", blocks))


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
    path = pieces(tmp_path / "d") / ".metadata"
    written = pickle.loads(path.read_bytes())
    for place in written.storage_data.values():
        place.relative_path = "../" + place.relative_path
    path.write_bytes(pickle.dumps(written))
    with pytest.raises(MeasurementError, match="not the name of a file beside it"):
        read_metadata(path.parent)


def test_a_pickle_with_objects_is_damage(tmp_path: Path) -> None:
    """What torch.save wrote is read without building any object but tensors."""
    torch.save({"w": torch.ones(2), "x": _Runs(os.mkdir, str(tmp_path / "ran"))}, tmp_path / "m.pt")
    found = open_weights(str(tmp_path / "m.pt"))
    assert not found.tensors
    assert "numdev does not unpickle it" in found.damage[0]
    assert not (tmp_path / "ran").exists()
