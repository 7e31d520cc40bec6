"""Files that hold tensors, read lazily and safely: safetensors, what torch.save writes,
and `torch.distributed.checkpoint` directories.

Such a file is foreign data: pickles are read with `weights_only=True` alone, safetensors
checks a header against its file's length, and a shard must lie beside the index that
names it."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import math
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, UsageError, one_line
from numdev.sources.foreign import refuse_pointer

PIECE = 1 << 26  # bytes of a file that are hashed by one thread
CHUNK = 1 << 20  # bytes of them that are read at once
FETCH = "download or resave it"
DISTRUST = "do not use this checkpoint unless you know why"
PICKLES = (".bin", ".pt", ".pth")
# Where scripts put a state dict
NESTED = ("model", "state_dict", "model_state_dict", "module")
PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and DistributedDataParallel


def name_of(directory: Path) -> str:
    """Its own, or what Hugging Face calls the model whose cache it is in."""
    whole = directory.resolve()
    model = whole.parents[1].name if whole.parent.name == "snapshots" else ""
    return model.partition("--")[2].replace("--", "/") or whole.name


def weight_files(directory: Path, names: Sequence[str], hint: str) -> tuple[Path, ...]:
    """The first of these files that is there, whole or sharded with an index."""
    for name in names:
        if (directory / name).is_file():
            return (directory / name,)
        if (index := directory / f"{name}.index.json").is_file():
            return shards(index)
    raise UsageError(f"{directory}: has no weights that numdev reads", hint=hint)


def shards(index: Path, *, lack: bool = False) -> tuple[Path, ...]:
    """The files an index names, all in its own directory, and present unless they may
    `lack`."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise MeasurementError(f"{index}: has no weight_map", hint=FETCH)
    for name in map(str, named.values()):
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            what = f"{index}: {name!r} is not the name of a weight file beside it"
            raise MeasurementError(what, hint=DISTRUST)
    files = tuple(sorted({index.parent / name for name in named.values()}))
    missing = [file.name for file in files if not lack and not file.is_file()]
    if missing:
        raise MeasurementError(
            f"{index}: the shard {some(missing)} is missing", hint=FETCH
        )
    return files


def read_json(
    path: Path, made_of: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """A file that holds one JSON object; `made_of`: what stands for each object in it."""
    refuse_pointer(path)
    with naming(path, "is not valid JSON"):
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=made_of)
    if not isinstance(content, dict):
        raise MeasurementError(f"{path}: holds no JSON object", hint=FETCH)
    return content


def read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file and their names, in the file's order. Those of safetensors
    are mapped one by one: what was read through a map counts as the process's memory
    until it is gone."""
    if path.suffix in PICKLES:
        content = read_pickle(path)
        for state in (*(content.get(key) for key in NESTED), content):
            named = state.items() if isinstance(state, dict) else ()
            if tensors := [(str(name), x) for name, x in named if isinstance(x, Tensor)]:
                yield from tensors
                return
        what = (
            f"{path}: holds no state dict (but "
            f"{some(list(map(repr, content))) or 'nothing'})"
        )
        hint = f"save model.state_dict(), itself or under one of: {', '.join(NESTED)}"
        raise MeasurementError(what, hint=hint)
    with open_safetensors(path) as file:
        names = file.offset_keys()
    for name in names:
        with open_safetensors(path) as file:
            yield name, file.get_tensor(name)


def open_safetensors(path: Path) -> Any:
    """The opened file; opening checks its header, and the header against the file's
    length."""
    refuse_pointer(path)
    with naming(path, "is not a whole safetensors file"):
        return safe_open(path, framework="pt")


def read_pickle(path: Path) -> dict[Any, Any]:
    """The dict that torch.save wrote; tensors and plain values, no other object is ever
    built."""
    refuse_pointer(path)
    try:  # Files from before torch 1.6 are no zip archives and cannot be memory-mapped.
        if mapped := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
            # torch compresses nothing: what is larger than its file could fill the
            # memory.
            larger = sum(m.file_size for m in members) > path.stat().st_size
            if larger or any(m.compress_type for m in members):
                raise ValueError("compressed")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # its message would advise to run the code of the file
        what = (
            "is damaged or holds Python objects other than tensors: numdev does "
            "not unpickle it"
        )
        hint = "convert it to safetensors with a tool you trust"
        raise MeasurementError(f"{path}: {what}", hint=hint) from error
    return state if isinstance(state, dict) else {}


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is an array of its values."""
    return not (
        x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta
    )


def plain(path: Path, name: str, x: Tensor) -> Tensor:
    """A stored tensor. Raises MeasurementError where it is no array, or a weight of no
    reals."""
    # Old files' masks are called bias
    real = ("bias", "weight") if x.is_complex() else "weight"
    if not is_plain(x) or (not x.is_floating_point() and name.endswith(real)):
        what = (
            f"{path}: {name}: expected real numbers, got {x.dtype}, {x.layout}, "
            f"{x.device}"
        )
        raise MeasurementError(what, hint="convert it, or use the file it was made from")
    return x


def common_prefix(names: Sequence[str]) -> str:
    """The known prefixes that all names have, in whichever order they stand."""
    taken = ""
    while prefix := next(
        (p for p in PREFIXES if all(n.startswith(taken + p) for n in names)), None
    ):
        taken += prefix
    return taken


def held_at(x: Tensor) -> tuple[Any, ...] | None:
    """What views of the same values have in common; None without elements or a plain
    array."""
    if not is_plain(x) or x.numel() == 0:
        return None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype)


def identity(files: Iterable[Path]) -> str:
    """SHA-256 over the names of files, and over the SHA-256 of their pieces of 64 MiB, in
    hexadecimal."""
    return identifying(files)()


def identifying(files: Iterable[Path]) -> Callable[[], str]:
    """`identity`, begun: pieces are hashed in threads, beside whatever is done until it
    is asked for. What cannot be read raises then."""
    sizes = {path: path.stat().st_size if path.exists() else 0 for path in files}
    pieces = [
        (path, start)
        for path, size in sizes.items()
        for start in range(0, max(size, 1), PIECE)
    ]
    # Its threads end with the program, should nobody ask any more.
    pool = ThreadPool(min(len(pieces), os.cpu_count() or 1) or 1)
    hashed = pool.starmap_async(_line_of, pieces, chunksize=1)
    pool.close()

    def done() -> str:
        return hashlib.sha256("".join(hashed.get()).encode()).hexdigest()

    return done


def _line_of(path: Path, start: int) -> str:
    """The name of a file and the SHA-256 of a piece of it, as a line."""
    digest, left = hashlib.sha256(), PIECE
    with path.open("rb") as file:
        file.seek(start)
        while left and (read := file.read(min(left, CHUNK))):
            digest.update(read)
            left -= len(read)
    return f"{path.name} {digest.hexdigest()}\n"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_misfits(
    path: Path,
    model: str,
    missing: Collection[str],
    unused: Collection[str],
    misshapen: Iterable[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Raises MeasurementError, which names them, where weights at `path` do not fit their
    model. `misshapen` has a weight's name, its stored shape and the model's."""
    problems = {
        "lacks weights": missing,
        "does not use": unused,
        "expects other shapes: stored": [
            f"{name} {list(old)} instead of {list(new)}" for name, old, new in misshapen
        ],
    }
    words = ", and ".join(
        f"{what} {some(sorted(of))}" for what, of in problems.items() if of
    )
    if words:
        raise MeasurementError(
            f"{path}: {model} {words}", hint="is it the model of these weights?"
        )


@contextmanager
def naming(
    of: object,
    what: str,
    hint: str | None = FETCH,
    *,
    passing: type[Exception] = NumdevError,
) -> Iterator[None]:
    """Whatever is raised on foreign data or by foreign code as one line that begins with
    its file or name, be it no `Exception`; numdev's own errors, those of `passing` and
    interrupts as they are."""
    try:
        yield
    except (NumdevError, passing, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise MeasurementError(f"{of}: {what}: {one_line(error)}", hint=hint) from error


def blaming(path: Path, what: str) -> AbstractContextManager[None]:
    """The same, of a library that is to make something of a checkpoint."""
    hint = "is the checkpoint complete, and made for the installed versions?"
    return naming(path, f"cannot {what}", hint)


@contextmanager
def quiet(*others: Any) -> Iterator[None]:
    """Without log lines, warnings and progress bars of transformers and `others`, for a
    while."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
    )

    with ExitStack() as stack, warnings.catch_warnings():
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        # Enabling transformers' switches the hub's on as well
        if are_progress_bars_disabled():
            stack.callback(disable_progress_bars)
        for chatter in (transformers.utils.logging, *others):
            if chatter.is_progress_bar_enabled():
                stack.callback(chatter.enable_progress_bar)
            chatter.disable_progress_bar()
        warnings.simplefilter("ignore")
        yield


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


# --- distributed checkpoints ----------------------------------------------------------
#
# A tensor is stored in pieces, each a byte range of a `__RANK_N.distcp` file that
# torch.save wrote, and the pickle `.metadata` says where. It is read by an unpickler that
# refuses every name such metadata is not made of, and builds empty records in place of
# torch's classes.

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
    """A tensor of a distributed checkpoint; its values are read when asked for."""

    directory: Path
    name: str
    # The keys that lead to it in the saved dict, else the name alone
    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self) -> Tensor:
        """The whole tensor, in its stored format. Raises MeasurementError, naming the
        file, where a piece is missing or damaged, and where the pieces do not make up the
        tensor."""
        if not _fills(self.shape, self.pieces):
            what = f"{self.directory}: {self.name}: its pieces do not make up the tensor"
            raise MeasurementError(what, hint=FETCH)
        parts = [self._read(piece) for piece in self.pieces]
        if len(parts) == 1:
            return parts[0]
        whole = torch.empty(self.shape, dtype=self.dtype)
        for piece, part in zip(self.pieces, parts, strict=True):
            block = zip(piece.start, piece.shape, strict=True)
            whole[tuple(slice(a, a + n) for a, n in block)] = part
        return whole

    def _read(self, piece: Piece) -> Tensor:
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


def is_distributed(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_distributed(
    directory: Path,
) -> tuple[str, dict[str, SplitTensor], tuple[Path, ...]]:
    """The tensors of a distributed checkpoint by name: those under the first key of
    NESTED that holds any, named as they are in it, after what stood before their names;
    else all. And its files, the metadata first."""
    stored = read_metadata(directory)
    keys = (*NESTED, "app")
    heads = (
        x.path[: x.path.index(k) + 1] for k in keys for x in stored if k in x.path[:-1]
    )
    head = next(heads, ())
    inside = [x for x in stored if x.path[: len(head)] == head]
    names = {".".join(x.path[len(head) :]) if head else x.name: x for x in inside}
    files = (directory / METADATA, *sorted(directory.glob("*.distcp")))
    return "".join(f"{key}." for key in head), names, files


def _fills(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
    """Whether the pieces are blocks within the shape that cover it exactly once."""
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
    """The tensors of a distributed checkpoint, in its order. Raises MeasurementError for
    a file that asks for anything but metadata (nothing is run), is damaged, or names one
    elsewhere."""
    path = directory / METADATA
    places: dict[Any, dict[str, Any]] = {}
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
            offset, length = _sizes((info.offset, info.length))
            key = str(index.fqn), _sizes(getattr(index, "offset", None) or ())
            places[key] = {"file": name, "offset": offset, "length": length}
        keys = getattr(metadata, "planner_data", None) or {}
        for name, stored in metadata.state_dict_metadata.items():
            if type(stored).__name__ == "BytesStorageMetadata":
                continue
            if not isinstance(dtype := stored.properties.dtype, torch.dtype):
                raise ValueError(f"{name} has no dtype")
            pieces = []
            for chunk in stored.chunks:
                start, shape = _sizes(chunk.offsets), _sizes(chunk.sizes)
                place = places.get((str(name), start)) or places[str(name), ()]
                pieces.append(Piece(start=start, shape=shape, **place))
            way = tuple(map(str, keys.get(name) or (name,)))
            fields: Any = {"path": way, "dtype": dtype, "shape": _sizes(stored.size)}
            tensor = SplitTensor(
                directory=directory, name=str(name), pieces=tuple(pieces), **fields
            )
            tensors.append(tensor)
    if not tensors:
        raise MeasurementError(
            f"{directory}: holds no tensor", hint="save model.state_dict()"
        )
    return tensors


class _Record:
    """Stands for an object of torch's: holds what was stored of it, and does nothing."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, stored: Any) -> None:
        # TensorProperties store a tuple, the dtype first.
        self.__dict__.update(stored if isinstance(stored, dict) else {"dtype": stored[0]})


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file)
        self._path, self._records = path, dict[str, type[_Record]]()

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name that metadata may use; raises for every other."""
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


def _sizes(values: Any) -> tuple[int, ...]:
    """Whole numbers, none of them negative."""
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{sizes!r} are not sizes")
    return sizes
