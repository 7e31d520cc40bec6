"""The tensors of a `torch.distributed.checkpoint` directory, one at a time.

A tensor is stored in pieces, each a byte range of a `__RANK_N.distcp` file that torch.save wrote,
and the pickle `.metadata` says where. A pickle is a program: this one is read by an unpickler that
refuses every name such metadata is not made of, and builds empty records in place of torch's
classes.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.sources import files as storage
from numdev.sources.files import FETCH, NESTED, one_line

METADATA = ".metadata"
WRAPPERS = frozenset({*NESTED, "app", "_orig_mod"})
"""What may stand before the names of weights, the wrappers of torch among it."""
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
    **{  # where the checkpoint was saved to: only a word here
        (module, name): lambda *parts: "/".join(map(str, parts))
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a tensor: where it begins, its shape, and the bytes of a file that hold it."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str | None = None  # Beside the metadata; None where that does not say
    offset: int = 0
    length: int = 0
    transformed: bool = False
    """Whether the bytes were compressed, or changed in another way, before they were written."""


@dataclass(frozen=True, kw_only=True)
class SplitTensor:
    """A tensor of a distributed checkpoint; its values are read when asked for."""

    directory: Path
    name: str
    path: tuple[str, ...]
    """The keys that lead to it in the saved dict; the name alone where nothing is said of them."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self) -> Tensor:
        """The whole tensor, in its stored format. Raises MeasurementError, naming the file, where a
        piece is missing or damaged, and where the pieces do not make up the tensor."""
        if not _fills(self.shape, self.pieces):
            raise self._error("its pieces do not make up the tensor")
        for piece in self.pieces:  # before any memory is taken
            self._check(piece)
        if len(self.pieces) == 1:  # the pieces fill it, so this is all of it
            return self._read(self.pieces[0])
        whole = torch.empty(self.shape, dtype=self.dtype)
        for p in self.pieces:
            where = tuple(slice(a, a + n) for a, n in zip(p.start, p.shape, strict=True))
            whole[where] = self._read(p)
        return whole

    def _read(self, piece: Piece) -> Tensor:
        try:
            with (self.directory / str(piece.file)).open("rb") as file:
                file.seek(piece.offset)
                stored = io.BytesIO(file.read(piece.length))
            tensor = torch.load(stored, map_location="cpu", weights_only=True)
        except Exception as error:  # a parser on foreign bytes: anything may come out of it
            raise self._error(f"{piece.file} is damaged: {one_line(error)}") from error
        expected = (piece.shape, self.dtype)
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
            raise self._error(f"{piece.file} holds something else where it should be")
        return tensor

    def _check(self, piece: Piece) -> None:
        """Raises unless the file reaches that far and what lies there can be the piece."""
        if piece.file is None:
            raise self._error("the metadata does not say where it is stored")
        path = self.directory / piece.file
        if not path.is_file():
            raise self._error(f"{piece.file} is missing")
        size = math.prod(piece.shape) * self.dtype.itemsize
        for wrong, what in (
            (piece.offset + piece.length > path.stat().st_size, "is truncated"),
            (piece.transformed, "is compressed, which numdev does not read"),
            (size > piece.length, "has too few bytes for it"),
        ):
            if wrong:
                raise self._error(f"{piece.file} {what}")

    def _error(self, what: str) -> MeasurementError:
        return MeasurementError(f"{self.directory}: {self.name}: {what}", hint=FETCH)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The stored weights of a model: its files, or the tensors of a distributed checkpoint."""

    path: Path
    name: str
    files: tuple[Path, ...]
    split: Mapping[str, SplitTensor] = field(default_factory=dict)
    prefix: str = ""  # What is taken off all names

    def identity(self) -> str:
        """SHA-256 over the names and contents of the files."""
        return storage.identity(self.files)

    def describe(self) -> dict[str, Any]:
        """What a report says of it beside its name and identity."""
        return {"prefix_removed": self.prefix} if self.prefix else {}

    def fitted(self, model: torch.nn.Module) -> Self:
        """The same; a distributed checkpoint without what its names nest this model's under."""
        if not self.split:
            return self
        prefix = nested_under(self.split, model.state_dict())
        own = {n.removeprefix(prefix): x for n, x in self.split.items() if n.startswith(prefix)}
        return replace(self, split=own, prefix=taken_off(own))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor with its name, one at a time in file order, in its stored format;
        tied ones of a pickle once."""
        if self.split:
            yield from ((name, x.read()) for name, x in self.split.items())
            return
        for path in self.files:
            for name, tensor in storage.distinct(path, storage.read(path)):
                yield name.removeprefix(self.prefix), tensor


def is_distributed(path: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this directory."""
    return (path / METADATA).is_file()


def open_distributed(directory: Path) -> dict[str, SplitTensor]:
    """The tensors of a distributed checkpoint by name: those under the first key of NESTED that
    holds any, named as they are in it; else all. Raises MeasurementError where there is none."""
    found = read_metadata(directory)
    if not found:
        raise MeasurementError(f"{directory}: holds no tensor", hint="save model.state_dict()")
    heads = (x.path[: x.path.index(k) + 1] for k in NESTED for x in found if k in x.path[:-1])
    head = next(heads, ())
    return {
        ".".join(x.path[len(head) :]) if head else x.name: x
        for x in found
        if x.path[: len(head)] == head
    }


def files_of(directory: Path, tensors: Mapping[str, SplitTensor]) -> tuple[Path, ...]:
    """The metadata and the files that hold these tensors, as far as they are there."""
    files = {directory / p.file for x in tensors.values() for p in x.pieces if p.file}
    return (directory / METADATA, *sorted(f for f in files if f.is_file()))


def nested_under(names: Iterable[str], own: Iterable[str]) -> str:
    """What stands before most of a model's own names among the stored ones, of the keys that a
    state dict is nested under: `model.`, `state_dict.model.`, or nothing."""
    wanted, counts = set(own), Counter[str]()
    for name in names:
        parts = name.split(".")
        keys = itertools.takewhile(lambda part: part in WRAPPERS, parts[:-1])
        for depth in range(len(list(keys)) + 1):
            if ".".join(parts[depth:]) in wanted:
                counts["".join(f"{part}." for part in parts[:depth])] += 1
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def taken_off(tensors: Mapping[str, SplitTensor]) -> str:
    """What stands before the names of these tensors in the metadata, and no longer here."""
    found = {x.name.removesuffix(n) for n, x in tensors.items()}
    return found.pop() if len(found) == 1 else ""


def _fills(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
    """Whether the pieces are blocks within the shape that cover it exactly once."""
    if any(len(p.start) != len(shape) or len(p.shape) != len(shape) for p in pieces):
        return False
    blocks = [list(zip(p.start, p.shape, strict=True)) for p in pieces]
    within = all(a + n <= m for b in blocks for (a, n), m in zip(b, shape, strict=True))
    overlap = any(
        all(max(a, b) < min(a + n, b + m) for (a, n), (b, m) in zip(p, q, strict=True))
        for p, q in itertools.combinations(blocks, 2)
    )
    enough = sum(math.prod(p.shape) for p in pieces) == math.prod(shape)
    return bool(pieces) and within and enough and not overlap


# --- the metadata -------------------------------------------------------------------------------


def read_metadata(directory: Path) -> list[SplitTensor]:
    """The tensors of a distributed checkpoint, in its order. Raises MeasurementError for a file
    that asks for anything but metadata, is damaged, or names a file elsewhere; nothing of it is
    run."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            return list(_described(directory, _Unpickler(file).load()))
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


def _described(directory: Path, content: Any) -> Iterator[SplitTensor]:
    metadata = _fields(content, "Metadata")
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for index, info in (metadata.get("storage_data") or {}).items():
        key = _fields(index, "MetadataIndex")
        places[str(key["fqn"]), _sizes(key.get("offset") or ())] = _place(info)
    paths = metadata.get("planner_data")
    for name, stored in metadata["state_dict_metadata"].items():
        if type(stored).__name__ == "BytesStorageMetadata":
            continue
        entry = _fields(stored, "TensorStorageMetadata")
        properties = entry["properties"].stored
        dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype")
        pieces = []
        for chunk in entry["chunks"]:
            block = _fields(chunk, "ChunkStorageMetadata")
            start, shape = _sizes(block["offsets"]), _sizes(block["sizes"])
            place = places.get((str(name), start)) or places.get((str(name), ())) or {}
            pieces.append(Piece(start=start, shape=shape, **place))
        path = paths.get(name) if isinstance(paths, dict) else None
        yield SplitTensor(
            directory=directory,
            name=str(name),
            path=tuple(map(str, path)) if isinstance(path, tuple | list) else (str(name),),
            dtype=dtype,
            shape=_sizes(entry["size"]),
            pieces=tuple(pieces),
        )


def _place(info: Any) -> dict[str, Any]:
    fields = _fields(info, "_StorageInfo")
    file = str(fields["relative_path"])
    if Path(file).name != file:
        raise ValueError(f"{file!r} is not the name of a file beside it")
    offset, length = _sizes((fields["offset"], fields["length"]))
    transformed = bool(fields.get("transform_descriptors"))
    return {"file": file, "offset": offset, "length": length, "transformed": transformed}


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
