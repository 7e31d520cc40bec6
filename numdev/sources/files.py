"""Files that hold tensors, read lazily and safely: safetensors, and what torch.save writes.

Such a file is foreign data: pickles are read with `weights_only=True` alone, safetensors checks a
header against its file's length, and a shard must lie beside the index that names it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, UsageError, one_line

FETCH = "fetch or write it again"
DISTRUST = "do not use this checkpoint unless you know why"
PICKLES = (".bin", ".pt", ".pth")
NESTED = ("model", "state_dict", "model_state_dict", "module")  # where scripts put a state dict
PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and DistributedDataParallel


def weight_files(directory: Path, names: Sequence[str], hint: str) -> tuple[Path, ...]:
    """The first of these files that is there, whole or sharded with an index."""
    for name in names:
        if (directory / name).is_file():
            return (directory / name,)
        if (index := directory / f"{name}.index.json").is_file():
            return shards(index)
    raise UsageError(f"{directory}: has no weights that numdev reads", hint=hint)


def shards(index: Path) -> tuple[Path, ...]:
    """The files an index names, all present and all in its own directory."""
    files = tuple(sorted(set(weight_map(index).values())))
    if missing := [file.name for file in files if not file.is_file()]:
        raise MeasurementError(f"{index}: the shard {some(missing)} is missing", hint=FETCH)
    return files


def weight_map(index: Path) -> dict[str, Path]:
    """The file of every tensor, as an index says: beside the index, though it may be missing."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise MeasurementError(f"{index}: has no weight_map", hint=FETCH)
    for name in map(str, named.values()):
        if Path(name).name != name or Path(name).suffix not in (".safetensors", ".bin"):
            what = f"{index}: {name!r} is not the name of a weight file beside it"
            raise MeasurementError(what, hint=DISTRUST)
    return {tensor: index.parent / name for tensor, name in named.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    with naming(path, "is not valid JSON"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise MeasurementError(f"{path}: holds no JSON object", hint=FETCH)
    return content


def read(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file and their names, in the file's order. Those of safetensors are mapped
    one by one: what was read through a map counts as the process's memory until it is gone."""
    if path.suffix in PICKLES:
        content = read_pickle(path)
        for state in (*(content.get(key) for key in NESTED), content):
            named = state.items() if isinstance(state, dict) else ()
            if tensors := [(str(name), x) for name, x in named if isinstance(x, Tensor)]:
                yield from tensors
                return
        what = f"{path}: holds no state dict (but {some(list(map(repr, content))) or 'nothing'})"
        hint = f"save model.state_dict(), itself or under one of: {', '.join(NESTED)}"
        raise MeasurementError(what, hint=hint)
    with open_safetensors(path) as file:
        names = file.offset_keys()
    for name in names:
        with open_safetensors(path) as file:
            yield name, file.get_tensor(name)


def open_safetensors(path: Path) -> Any:
    """The opened file; opening checks its header, and the header against the file's length."""
    with naming(path, "is not a whole safetensors file"):
        return safe_open(path, framework="pt")


def read_pickle(path: Path) -> dict[Any, Any]:
    """The dict that torch.save wrote; tensors and plain values, no other object is ever built."""
    try:  # Files from before torch 1.6 are no zip archives and cannot be memory-mapped.
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # its message would advise to run the code of the file
        what = "is damaged or holds Python objects other than tensors: numdev does not unpickle it"
        hint = "convert it to safetensors with a tool you trust"
        raise MeasurementError(f"{path}: {what}", hint=hint) from error
    return state if isinstance(state, dict) else {}


def common_prefix(names: Sequence[str]) -> str:
    """The known prefixes that all names have, in whichever order they stand."""
    taken = ""
    while found := next((p for p in PREFIXES if all(n.startswith(taken + p) for n in names)), None):
        taken += found
    return taken


def held_at(x: Tensor) -> tuple[Any, ...] | None:
    """What views of the same values have in common; None without elements or a plain array."""
    if x.is_nested or x.is_meta or x.layout is not torch.strided or x.numel() == 0:
        return None
    return (x.data_ptr(), x.shape, x.stride(), x.dtype)


def identity(files: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files, in hexadecimal."""
    lines = (f"{path.name} {sha256(path)}\n" for path in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


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
    """Raises MeasurementError, which names them, where weights at `path` do not fit their model.
    `misshapen` has a weight's name, its stored shape and the model's."""
    problems = {
        "needs the weights": missing,
        "has no place for": unused,
        "needs other shapes than the stored": [
            f"{name} {list(old)} instead of {list(new)}" for name, old, new in misshapen
        ],
    }
    said = ", and ".join(f"{what} {some(sorted(of))}" for what, of in problems.items() if of)
    if said:
        hint = "is it the model these weights were saved from?"
        raise MeasurementError(f"{path}: {model} {said}", hint=hint)


def refuse_code(path: Path) -> None:
    """Raises UsageError for a configuration that asks for code of its own."""
    if read_json(path).get("auto_map"):
        what = f"{path}: asks for Python code of its own (auto_map), which numdev does not run"
        hint = "if the library has this class too, delete auto_map from a copy of it"
        raise UsageError(what, hint=hint)


@contextmanager
def naming(
    of: object, what: str, hint: str | None = FETCH, *, passing: type[Exception] = NumdevError
) -> Iterator[None]:
    """Whatever is raised on foreign data or by foreign code as one line that begins with its file
    or name; numdev's own errors and those of `passing` as they are."""
    try:
        yield
    except (NumdevError, passing):
        raise
    except Exception as error:
        raise MeasurementError(f"{of}: {what}: {one_line(error)}", hint=hint) from error


def blaming(path: Path, what: str) -> AbstractContextManager[None]:
    """The same, of a library that is to make something of a checkpoint."""
    hint = "is the checkpoint complete, and made for the installed versions?"
    return naming(path, f"cannot {what}", hint)


@contextmanager
def quiet(*others: Any) -> Iterator[None]:
    """Without log lines, warnings and progress bars of transformers and `others`, for a while."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars

    with ExitStack() as stack, warnings.catch_warnings():
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        if are_progress_bars_disabled():  # enabling transformers' switches the hub's on as well
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
