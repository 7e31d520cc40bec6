"""What holds tensors on disk, behind one protocol, and the one place that tells the kinds
apart.

A set of weights is one container or several: a file alone, the files that an index names,
a directory. To read another kind, write a class that is a `Container`, and name it in
CONTAINERS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Protocol

from torch import Tensor

from numdev.errors import MeasurementError, UsageError
from numdev.sources.distributed_checkpoint import METADATA, SplitTensor, open_distributed
from numdev.sources.tensor_files import (
    DISTRUST,
    FETCH,
    NESTED,
    is_plain,
    open_safetensors,
    read_json,
    read_pickle,
    some,
)

INDEX = ".index.json"  # how the name of a file ends that names the shards of a set
SHARDS = (".safetensors", ".bin")  # what transformers names in an index


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a container: its name, its shape (empty for a nested one), and `read`,
    which returns it as it is stored, on the CPU. `read` may be called again; it raises
    MeasurementError, which names the file."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    # Tensors of one container whose values are the same ones have equal ties
    tie: tuple[object, ...] | None = None


class Container(Protocol):
    """Tensors by name, in a file or a directory. It is made from a path alone: nothing is
    opened before its tensors, its files or its nesting are asked for."""

    suffixes: ClassVar[tuple[str, ...]]
    """How the names of such files end; none of a directory."""
    is_lazy: ClassVar[bool]
    """Whether a tensor can be read by itself whenever it is needed, so that a model's
    weights may stay on disk."""
    is_joined: ClassVar[bool]
    """Whether all the files of this kind in a directory without an index are one set of
    weights; else each is a set."""
    has_more: ClassVar[bool]
    """Whether there may be more in it than a model's weights (an optimiser's state)."""

    def __init__(self, path: Path) -> None: ...
    @property
    def path(self) -> Path:
        """Returns the file or directory."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the files whose names and contents identify it (`files.identity`).
        Raises MeasurementError where it has to be opened for that and is damaged."""

    @property
    def nesting(self) -> str:
        """Returns the keys that stood before all names and were taken off, each with a
        dot (`app.model.`); empty where no key was. Raises MeasurementError where it has
        to be opened for that and is damaged."""

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Whether a path is of this kind, by its name, or of a directory by the names in
        it; nothing is opened."""

    def tensors(self) -> Iterator[StoredTensor]:
        """Yields every tensor of a model's weights, in the order in which they are
        stored. Raises MeasurementError for a container that is damaged."""

    def beside(self) -> Mapping[str, object] | None:
        """Returns whatever a file holds, by key, the tensors' dicts included: a training
        script's configuration is read from it. None for a kind of which nothing but
        tensors is read. Raises MeasurementError where it is opened for that and is
        damaged."""


@dataclass(frozen=True)
class _File:
    """A container that is a file, known by how its name ends."""

    path: Path
    suffixes: ClassVar[tuple[str, ...]]
    has_more: ClassVar[bool] = False

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the file itself."""
        return (self.path,)

    @property
    def nesting(self) -> str:
        """Returns an empty string: no keys are taken off."""
        return ""

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Whether the name ends as that of such a file; the file need not exist."""
        return path.suffix in cls.suffixes


@dataclass(frozen=True)
class SafetensorsFile(_File):
    """A safetensors file. Its tensors are mapped one by one: what was read through a map
    counts as the process's memory until it is gone."""

    suffixes: ClassVar[tuple[str, ...]] = (".safetensors",)
    is_lazy: ClassVar[bool] = True
    is_joined: ClassVar[bool] = True

    def tensors(self) -> Iterator[StoredTensor]:
        """Yields every tensor in the order of the file; its shape is read now, its values
        later. Raises MeasurementError for a damaged file."""
        with open_safetensors(self.path) as file:
            names = file.offset_keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        for name, shape in shapes.items():
            yield StoredTensor(
                name=name, shape=shape, read=partial(self._read_tensor, name)
            )

    def beside(self) -> Mapping[str, object] | None:
        """Returns None: nothing but tensors is stored."""
        return None

    def _read_tensor(self, name: str) -> Tensor:
        """Returns one tensor, mapped. Raises MeasurementError for a damaged file."""
        with open_safetensors(self.path) as file:
            value: Tensor = file.get_tensor(name)
            return value


@dataclass(frozen=True)
class TorchFile(_File):
    """A file that torch.save wrote: a state dict, itself or under a key of NESTED. It is
    read whole, mapped where it is a zip archive."""

    suffixes: ClassVar[tuple[str, ...]] = (".bin", ".pt", ".pth")
    is_lazy: ClassVar[bool] = False
    is_joined: ClassVar[bool] = False

    def tensors(self) -> Iterator[StoredTensor]:
        """Yields the tensors of the first dict with a tensor in it under a key of NESTED,
        in its order, else of the file's dict itself. Reads the whole file. Values that
        are no tensors are passed over. Raises MeasurementError for a damaged file, one
        with Python objects other than tensors and plain values, and one that holds no
        such dict."""
        content = read_pickle(self.path)
        for state in (*(content.get(key) for key in NESTED), content):
            named = state.items() if isinstance(state, dict) else ()
            if tensors := [(str(name), x) for name, x in named if isinstance(x, Tensor)]:
                for name, x in tensors:
                    shape = () if x.is_nested else tuple(x.shape)
                    yield StoredTensor(
                        name=name, shape=shape, read=x.detach, tie=_memory_key(x)
                    )
                return
        what = (
            f"{self.path}: holds no state dict (but "
            f"{some(list(map(repr, content))) or 'nothing'})"
        )
        hint = f"save model.state_dict(), itself or under one of: {', '.join(NESTED)}"
        raise MeasurementError(what, hint=hint)

    def beside(self) -> Mapping[str, object]:
        """Returns the whole dict that the file holds, tensors included; empty where it
        holds no dict. Raises MeasurementError for a damaged file."""
        return read_pickle(self.path)


def _memory_key(x: Tensor) -> tuple[object, ...] | None:
    """Returns a value that is equal for views of the same memory, shape, strides and
    dtype; None for an empty tensor and for one that is no plain array."""
    if not is_plain(x) or x.numel() == 0:
        return None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype)


@dataclass(frozen=True)
class DistributedCheckpoint:
    """A directory that `torch.distributed.checkpoint` wrote. Its metadata is the last
    file written: without it a save did not end."""

    path: Path
    suffixes: ClassVar[tuple[str, ...]] = ()
    is_lazy: ClassVar[bool] = False
    is_joined: ClassVar[bool] = False
    has_more: ClassVar[bool] = True

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns the metadata file, then the files of pieces. Raises MeasurementError
        for damaged metadata."""
        _, _, files = self._names_and_tensors
        return files

    @property
    def nesting(self) -> str:
        """Returns the keys before the names of the model's weights, as `app.model.`;
        empty for none. Raises MeasurementError for damaged or missing metadata."""
        nesting, _, _ = self._names_and_tensors
        return nesting

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Whether a directory has such a checkpoint's metadata file."""
        return (path / METADATA).is_file()

    def tensors(self) -> Iterator[StoredTensor]:
        """Yields every tensor of the model, its pieces not yet read. Raises
        MeasurementError for damaged metadata."""
        _, tensors, _ = self._names_and_tensors
        for name, x in tensors.items():
            yield StoredTensor(name=name, shape=x.shape, read=x.read)

    def beside(self) -> Mapping[str, object] | None:
        """Returns None: the other values that are stored are not read."""
        return None

    @cached_property
    def _names_and_tensors(self) -> tuple[str, dict[str, SplitTensor], tuple[Path, ...]]:
        """Returns the keys before all names, the tensors by name, and the files, read
        once. Raises MeasurementError for damaged metadata."""
        return open_distributed(self.path)


CONTAINERS: tuple[type[Container], ...] = (
    DistributedCheckpoint,
    SafetensorsFile,
    TorchFile,
)
SUFFIXES = tuple(suffix for kind in CONTAINERS for suffix in kind.suffixes)


def container_at(path: Path) -> Container | None:
    """Returns the container that a path is by its name, whether or not it exists; None
    for other names. A directory is one by its metadata file, never by its own name."""
    for kind in CONTAINERS:
        if kind.holds(path) and not (kind.suffixes and path.is_dir()):
            return kind(path)
    return None


def is_weights(path: Path) -> bool:
    """Whether a path is a container, or an index of several, by its name."""
    return container_at(path) is not None or path.name.endswith(INDEX)


def containers_at(path: Path, *, lack: bool = False) -> tuple[Container, ...]:
    """Returns the weights at a path that `is_weights`: the container itself, or those
    that an index names. Raises MeasurementError for a damaged index, and for a missing
    file of one; with `lack` a missing file passes."""
    container = container_at(path)
    return shards_of_index(path, lack=lack) if container is None else (container,)


def containers_of_model(
    directory: Path, names: Sequence[str], hint: str
) -> tuple[Container, ...]:
    """Returns the weights in a model's directory: the directory itself where it is a
    container, else the first file of `names` that exists, whole or as the shards of its
    index. Raises UsageError, with this hint, where there are none; MeasurementError for a
    damaged index, and for a file that it names and that is missing."""
    if container := container_at(directory):
        return (container,)
    for name in names:
        for file in (directory / name, directory / f"{name}{INDEX}"):
            if file.is_file():
                return containers_at(file)
    raise UsageError(f"{directory}: has no weights that numdev reads", hint=hint)


def shards_of_index(index: Path, *, lack: bool = False) -> tuple[Container, ...]:
    """Returns the files that an index names as containers, each once, sorted by name.
    Raises MeasurementError where the index is missing, is no JSON, has no weight_map, or
    names a file in another directory or without a suffix of SHARDS; and for a missing
    file, which passes with `lack`."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise MeasurementError(f"{index}: has no weight_map", hint=FETCH)
    for name in map(str, named.values()):
        if Path(name).name != name or Path(name).suffix not in SHARDS:
            what = f"{index}: {name!r} is not the name of a weight file beside it"
            raise MeasurementError(what, hint=DISTRUST)
    files = sorted({index.parent / name for name in named.values()})
    missing = [file.name for file in files if not lack and not file.is_file()]
    if missing:
        raise MeasurementError(
            f"{index}: the shard {some(missing)} is missing", hint=FETCH
        )
    return tuple(map(_file_container, files))


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of a file, in the file's order. A file of an unknown kind is
    read as safetensors. Raises MeasurementError for a damaged or missing file."""
    for stored in _file_container(path).tensors():
        yield stored.name, stored.read()


def _file_container(path: Path) -> Container:
    """Returns a file as a container; one of no known name is taken for safetensors."""
    return container_at(path) or SafetensorsFile(path)
