"""What torch.distributed.checkpoint wrote into `.metadata`, as plain data.

That file is a pickle, and a pickle is a program. So it is read by an unpickler that knows the few
names such metadata is made of and refuses every other. What those names stand for is not built
either: in place of torch's classes come empty records made for the occasion, which no pickle can
use to reach anything else. What is then found is checked like any foreign data.

The tensors themselves are read by `numdev.sources.dcp`.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from numdev.errors import MeasurementError
from numdev.sources.files import FETCH, one_line

METADATA = ".metadata"
_HERE = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_HERE}.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_HERE}.filesystem": {"_StorageInfo", "_StoragePrefix"},
}
_VALUES: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    # Where the checkpoint was saved to: only a word here.
    **{
        (module, name): lambda *parts: "/".join(map(str, parts))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Bytes of a file beside `.metadata`, which torch.save wrote for one piece of a tensor."""

    file: str
    offset: int
    length: int
    transformed: bool
    """Whether they were compressed, or changed in another way, before they were written."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a tensor: where it begins, its shape, and where it is stored (None: unsaid)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    place: Place | None


@dataclass(frozen=True, kw_only=True)
class Described:
    """One tensor, as the metadata describes it."""

    name: str
    path: tuple[str, ...]
    """The keys that lead to it in the saved dict; the name alone where nothing is said of them."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def read_metadata(directory: Path) -> list[Described]:
    """The tensors of a distributed checkpoint, in its order.

    Raises MeasurementError for a file that asks for anything but metadata, is damaged, or names a
    file elsewhere; nothing of it is ever run.
    """
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            content = _Unpickler(file).load()
        return _described(content)
    except _Foreign as error:
        raise MeasurementError(
            f"{path}: asks for {error}, which is no part of a checkpoint's metadata, and numdev "
            "does not unpickle it",
            hint="do not use this checkpoint unless you know why",
        ) from error
    except Exception as error:  # a parser on foreign bytes: anything may come out of it
        raise MeasurementError(
            f"{path}: is not the metadata of a distributed checkpoint: "
            f"{type(error).__name__}: {one_line(error)}",
            hint=FETCH,
        ) from error


class _Foreign(pickle.UnpicklingError):
    """A name that metadata has no use for."""


class _Record:
    """Stands for an object of torch's: keeps what was stored of it, and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.stored: Any = {}

    def __setstate__(self, stored: Any) -> None:
        self.stored = stored


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._made: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name that metadata may use; raises for every other."""
        if name in _RECORDS.get(module, ()):
            # Made for this file alone: an instruction that writes into a class spoils no other.
            return self._made.setdefault((module, name), type(name, (_Record,), {}))
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise _Foreign(f"{module}.{name}")


def _described(content: Any) -> list[Described]:
    metadata = _fields(content, "Metadata")
    places: dict[tuple[str, tuple[int, ...]], Place] = {}
    for index, info in (metadata.get("storage_data") or {}).items():
        key = _fields(index, "MetadataIndex")
        places[str(key["fqn"]), _sizes(key.get("offset") or ())] = _place(info)
    paths = metadata.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    return [
        _tensor(str(name), _fields(entry, "TensorStorageMetadata"), paths.get(name), places)
        for name, entry in metadata["state_dict_metadata"].items()
        if type(entry).__name__ != "BytesStorageMetadata"
    ]


def _tensor(name: str, entry: dict[str, Any], path: Any, places: dict[Any, Place]) -> Described:
    properties = entry["properties"].stored
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    pieces = []
    for chunk in entry["chunks"]:
        fields = _fields(chunk, "ChunkStorageMetadata")
        start, shape = _sizes(fields["offsets"]), _sizes(fields["sizes"])
        place = places.get((name, start)) or places.get((name, ()))
        pieces.append(Piece(start=start, shape=shape, place=place))
    return Described(
        name=name,
        path=tuple(map(str, path)) if isinstance(path, tuple | list) else (name,),
        dtype=dtype,
        shape=_sizes(entry["size"]),
        pieces=tuple(pieces),
    )


def _place(info: Any) -> Place:
    fields = _fields(info, "_StorageInfo")
    file = str(fields["relative_path"])
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file beside it")
    (offset, length) = _sizes((fields["offset"], fields["length"]))
    transformed = bool(fields.get("transform_descriptors"))
    return Place(file=file, offset=offset, length=length, transformed=transformed)


def _fields(record: Any, name: str) -> dict[str, Any]:
    """What was stored of an object of this class."""
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"expected a {name}, found a {type(record).__name__}")
    return dict(record.stored)


def _sizes(values: Any) -> tuple[int, ...]:
    """Whole numbers, none of them negative."""
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{sizes!r} are no sizes")
    return sizes
