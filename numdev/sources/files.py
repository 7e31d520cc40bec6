"""Files that hold tensors, read lazily and safely: safetensors, and what torch.save writes.

Such a file is foreign data and is not trusted. Pickles are read with `weights_only=True` alone, and
a shard must lie beside the index that names it. What the tensors mean is for others:
`numdev.sources.checkpoint` and `numdev.sources.statedict` make models of them,
`numdev.sources.tensorfile` attention calls."""

from __future__ import annotations

import hashlib
import json
import pickle
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from numdev.errors import MeasurementError

FETCH = "fetch the checkpoint again"
PICKLES = (".bin", ".pt", ".pth")
MAPPED_AT_ONCE = 1 << 28
"""Bytes. What was read through a memory map counts as the process's memory until the map is gone,
so a file is mapped anew after so many."""


def shards(index: Path) -> tuple[Path, ...]:
    """The files an index names, all present and all in its own directory."""
    files = tuple(sorted(set(weight_map(index).values())))
    for file in files:
        if not file.is_file():
            raise MeasurementError(f"{index}: the shard {file.name} is missing", hint=FETCH)
    return files


def weight_map(index: Path) -> dict[str, Path]:
    """The name of every tensor and the file that holds it, as an index says; a file may be
    missing, but none lies anywhere else than beside the index."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise MeasurementError(f"{index}: has no weight_map", hint=FETCH)
    for name in sorted({str(n) for n in named.values()}):
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            raise MeasurementError(
                f"{index}: {name!r} is not the name of a weight file beside it",
                hint="do not use this checkpoint unless you know why",
            )
    return {tensor: index.parent / str(name) for tensor, name in named.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MeasurementError(
            f"{path}: is not valid JSON: {one_line(error)}", hint=FETCH
        ) from error
    if not isinstance(content, dict):
        raise MeasurementError(f"{path}: holds no JSON object", hint=FETCH)
    return content


def read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file and their names, in the file's order."""
    if path.suffix not in PICKLES:
        return read_safetensors(path)
    return ((str(name), x) for name, x in read_pickle(path).items() if isinstance(x, Tensor))


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with open_safetensors(path) as file:
        names = deque(file.offset_keys())
    while names:
        with open_safetensors(path) as file:
            mapped = 0
            while names and mapped <= MAPPED_AT_ONCE:
                name = names.popleft()
                tensor = file.get_tensor(name)
                mapped += tensor.nbytes
                yield name, tensor
                del tensor  # else the old map would stay until the new one is there


def open_safetensors(path: Path, *, hint: str = FETCH) -> Any:
    """The opened file; opening checks its header, and the header against the file's length."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise MeasurementError(
            f"{path}: is not a whole safetensors file: {one_line(error)}", hint=hint
        ) from error


def read_pickle(path: Path) -> dict[Any, Any]:
    """The dict that torch.save wrote; tensors and plain values, no other object is ever built."""
    try:
        # Files from before torch 1.6 are no zip archives and cannot be memory-mapped.
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise MeasurementError(
            f"{path}: is damaged or holds Python objects other than tensors, and numdev does not "
            "unpickle those",
            hint="convert it to safetensors with a tool you trust",
        ) from error
    except Exception as error:  # a parser on foreign bytes: anything may come out of it
        raise MeasurementError(
            f"{path}: is not a whole PyTorch file: {one_line(error)}", hint=FETCH
        ) from error
    if not isinstance(state, dict):
        raise MeasurementError(f"{path}: holds no state dict", hint="save model.state_dict()")
    return state


def distinct(path: Path, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file without those that share the storage of an earlier one (tied weights).

    Only a pickle can hold such.
    """
    seen = set()
    for name, tensor in named:
        place = held_at(tensor)
        if place is None or path.suffix not in PICKLES or place not in seen:
            seen.add(place)
            yield name, tensor


def held_at(x: Tensor) -> tuple[Any, ...] | None:
    """What two tensors that are views of the same values have in common; None for one without
    elements, and for one that is no plain array (sparse, nested, without values)."""
    if x.is_nested or x.is_meta or x.layout is not torch.strided or x.numel() == 0:
        return None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype)


def identity(files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files. Several are read at a time, since a shard of 5
    GB takes seconds."""
    paths, whole = list(files), hashlib.sha256()
    with ThreadPoolExecutor() as pool:
        for path, content in zip(paths, pool.map(sha256, paths), strict=True):
            whole.update(f"{path.name} {content}\n".encode())
    return whole.hexdigest()


def sha256(path: Path) -> str:
    """Of the file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def one_line(error: BaseException) -> str:
    """An error's message on one line, and not a long one."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "..."
