"""`torch.distributed.checkpoint` directories, read without their code.

A tensor is stored in pieces, each a byte range of a `__RANK_N.distcp` file that
torch.save wrote, and the pickle `.metadata` says where. It is read by an unpickler that
refuses every name such metadata is not made of, and builds empty records in place of
torch's classes."""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.sources.tensor_files import DISTRUST, FETCH, NESTED, naming
from numdev.sources.unsupported_files import refuse_pointer

METADATA = ".metadata"
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *(
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,  # where the checkpoint was saved to
    "pathlib._local": _PATHS,
}
_VALUES = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a tensor: where it begins, its shape, and the bytes of a file that hold
    it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str  # Beside the metadata
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class SplitTensor:
    """A tensor of a distributed checkpoint; its values are read by `read`, each time from
    disk."""

    directory: Path
    name: str
    # The keys that lead to it in the saved dict, else the name alone
    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self) -> Tensor:
        """Returns the whole tensor, in its stored format. Raises MeasurementError where a
        piece is missing or damaged, which it names, and where the pieces do not make up
        the tensor."""
        if not _covers_exactly(self.shape, self.pieces):
            what = f"{self.directory}: {self.name}: its pieces do not make up the tensor"
            raise MeasurementError(what, hint=FETCH)
        parts = [self._read_piece(piece) for piece in self.pieces]
        if len(parts) == 1:
            return parts[0]
        whole = torch.empty(self.shape, dtype=self.dtype)
        for piece, part in zip(self.pieces, parts, strict=True):
            block = zip(piece.start, piece.shape, strict=True)
            whole[tuple(slice(a, a + n) for a, n in block)] = part
        return whole

    def _read_piece(self, piece: Piece) -> Tensor:
        """Returns the tensor of one piece. Raises MeasurementError where its file is
        missing or damaged, or holds another shape or dtype."""
        refuse_pointer(self.directory / piece.file)
        with naming(self.directory, f"{self.name}: {piece.file} is missing or damaged"):
            with (self.directory / piece.file).open("rb") as file:
                file.seek(piece.offset)
                stored = file.read(piece.length)
            if len(stored) < math.prod(piece.shape) * self.dtype.itemsize:
                raise ValueError("cut short, or compressed")
            tensor = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
            if (tuple(tensor.shape), tensor.dtype) != (piece.shape, self.dtype):
                raise ValueError(
                    f"expected {list(piece.shape)}, got {list(tensor.shape)}"
                )
            return torch.as_tensor(tensor)


def refuse_unfinished(path: Path) -> None:
    """Raises MeasurementError for a directory with pieces of tensors but no metadata,
    which is written last; returns for every other path."""
    if path.is_dir() and not (path / METADATA).is_file() and any(path.glob("*.distcp")):
        what = f"{path}: .metadata is missing, the last file of a distributed checkpoint"
        raise MeasurementError(what, hint=f"{FETCH}, or take one whose save has ended")


def open_distributed(
    directory: Path,
) -> tuple[str, dict[str, SplitTensor], tuple[Path, ...]]:
    """Returns three things: the keys that stood before the names, as `app.model.`; the
    tensors of a distributed checkpoint by name, those behind these keys, or all where
    there are none; and its files, the metadata first. The keys are a path up to the first
    key of NESTED that any tensor has before its last key, else up to `app`. Raises
    MeasurementError for damaged or missing metadata."""
    stored = read_metadata(directory)
    head = _leading_keys([x.path for x in stored])
    inside = [x for x in stored if x.path[: len(head)] == head]
    names = {".".join(x.path[len(head) :]) if head else x.name: x for x in inside}
    files = (directory / METADATA, *sorted(directory.glob("*.distcp")))
    return "".join(f"{key}." for key in head), names, files


def _leading_keys(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the keys that lead to the model's weights. The keys of NESTED, then `app`,
    are looked for in this order: the first that stands before the last key of a path
    gives the first such path up to and with it. Empty where no key does."""
    for key in (*NESTED, "app"):
        for path in paths:
            if key in path[:-1]:
                return path[: path.index(key) + 1]
    return ()


def _covers_exactly(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
    """Whether the pieces are blocks within the shape that cover it exactly once. False
    without pieces, and for pieces of other dimensions."""
    if not pieces or any({len(p.start), len(p.shape)} != {len(shape)} for p in pieces):
        return False
    blocks = [list(zip(p.start, p.shape, strict=True)) for p in pieces]
    within = all(a + n <= m for b in blocks for (a, n), m in zip(b, shape, strict=True))
    disjoint = all(
        any(a + n <= b or b + m <= a for (a, n), (b, m) in zip(p, q, strict=True))
        for p, q in itertools.combinations(blocks, 2)
    )
    return (
        within
        and disjoint
        and sum(math.prod(p.shape) for p in pieces) == math.prod(shape)
    )


def read_metadata(directory: Path) -> list[SplitTensor]:
    """Returns the tensors of a distributed checkpoint, in its order, their values not yet
    read. What is no tensor is left out. Raises MeasurementError for metadata that asks
    for anything but metadata (nothing is run), is missing or damaged, names a file
    elsewhere, or has no tensor."""
    path = directory / METADATA
    places: dict[object, tuple[str, int, int]] = {}  # file, offset and length
    tensors = []
    refuse_pointer(path)
    with (
        naming(path, "is not the metadata of a distributed checkpoint"),
        path.open("rb") as file,
    ):
        metadata = _Unpickler(path, file).load()
        for index, info in metadata.storage_data.items():
            name = str(info.relative_path)
            if Path(name).name != name:
                what = f"{path}: {name!r} is not the name of a file beside it"
                raise MeasurementError(what, hint=DISTRUST)
            offset, length = _checked_sizes((info.offset, info.length))
            key = str(index.fqn), _checked_sizes(getattr(index, "offset", None) or ())
            places[key] = (name, offset, length)
        keys = getattr(metadata, "planner_data", None) or {}
        for name, stored in metadata.state_dict_metadata.items():
            if type(stored).__name__ == "BytesStorageMetadata":
                continue
            if not isinstance(dtype := stored.properties.dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype")
            pieces = []
            for chunk in stored.chunks:
                start, shape = _checked_sizes(chunk.offsets), _checked_sizes(chunk.sizes)
                file_name, offset, length = (
                    places.get((str(name), start)) or places[str(name), ()]
                )
                piece = Piece(
                    file=file_name, offset=offset, length=length, start=start, shape=shape
                )
                pieces.append(piece)
            way = tuple(map(str, keys.get(name) or (name,)))
            tensor = SplitTensor(
                directory=directory,
                name=str(name),
                path=way,
                dtype=dtype,
                shape=_checked_sizes(stored.size),
                pieces=tuple(pieces),
            )
            tensors.append(tensor)
    if not tensors:
        raise MeasurementError(
            f"{directory}: holds no tensor", hint="save model.state_dict()"
        )
    return tensors


class _Record:
    """Stands for an object of torch's: holds what was stored of it, and does nothing."""

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, stored: dict[str, object] | tuple[object, ...]) -> None:
        # TensorProperties store a tuple, the dtype first.
        self.__dict__.update(stored if isinstance(stored, dict) else {"dtype": stored[0]})


class _Unpickler(pickle.Unpickler):
    """Reads a checkpoint's metadata. It builds a `_Record` in place of each of torch's
    objects, and refuses every name that metadata does not use. `path`: named in
    errors."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        super().__init__(file)
        self._path, self._records = path, dict[str, type[_Record]]()

    def find_class(self, module: str, name: str) -> object:
        """Returns the stand-in for a name that metadata may use; raises MeasurementError
        for every other."""
        if name in _RECORDS.get(module, ()):
            # Made for this file alone: an instruction that writes into a class spoils no
            # other.
            return self._records.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and isinstance(
            dtype := getattr(torch, name, None), torch.dtype
        ):
            return dtype
        what = f"asks for {module}.{name}, which is not part of a checkpoint's metadata"
        raise MeasurementError(
            f"{self._path}: {what}: it is not unpickled", hint=DISTRUST
        )


def _checked_sizes(values: Iterable[int]) -> tuple[int, ...]:
    """Returns the values as a tuple; raises ValueError unless all are ints and none
    negative."""
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{sizes!r} are not sizes")
    return sizes
