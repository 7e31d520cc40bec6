"""Files that hold tensors, read lazily and safely: safetensors, what torch.save writes,
and `torch.distributed.checkpoint` directories.

Such a file is foreign data: pickles are read with `weights_only=True` alone, safetensors
checks a header against its file's length, and a shard must lie beside the index that
names it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from numdev.errors import MeasurementError, NumdevError, one_line
from numdev.sources.unsupported_files import refuse_pointer

PIECE = 1 << 26  # bytes of a file that are hashed by one thread
CHUNK = 1 << 20  # bytes of them that are read at once
FETCH = "download or resave it"
DISTRUST = "do not use this checkpoint unless you know why"
# Where scripts put a state dict
NESTED = ("model", "state_dict", "model_state_dict", "module")
PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and DistributedDataParallel


def read_json(
    path: Path, made_of: Callable[[dict[str, object]], object] | None = None
) -> dict[str, Any]:
    """Returns the JSON object in a file. `made_of` replaces each object in it, the
    innermost first. Raises MeasurementError for a file that is missing or cannot be read,
    invalid JSON, another value than an object, and a pointer of git-lfs."""
    refuse_pointer(path)
    with naming(path, "is not valid JSON"):
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=made_of)
    if not isinstance(content, dict):
        raise MeasurementError(f"{path}: holds no JSON object", hint=FETCH)
    return content


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file for a context, with its tensors on the CPU. Raises
    MeasurementError where it is missing or cannot be read, its header is damaged or does
    not match the file's length, and where a tensor that is asked for is not there, or has
    a dtype that PyTorch lacks."""
    refuse_pointer(path)
    with naming(path, "is not a whole safetensors file"):
        opened = safe_open(path, framework="pt")
    try:
        with opened as file:
            yield file
    except SafetensorError as error:
        raise MeasurementError(f"{path}: cannot be read: {one_line(error)}") from error


def read_pickle(path: Path) -> dict[Any, Any]:
    """Returns the dict that torch.save wrote, of tensors and plain values, mapped where
    the file is a zip archive; empty for another value. Raises MeasurementError for any
    other object in it, and for a missing, damaged or compressed file."""
    state = unpickled(path)
    return state if isinstance(state, dict) else {}


def unpickled(path: Path) -> object:
    """Returns what torch.save wrote, of tensors and plain values, mapped where the file
    is a zip archive. Nothing else is unpickled: raises MeasurementError for any other
    object, and for a missing, damaged or compressed file."""
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
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # its message would advise to run the code of the file
        what = (
            "is damaged or holds Python objects other than tensors: numdev does "
            "not unpickle it"
        )
        hint = "convert it to safetensors with a tool you trust"
        raise MeasurementError(f"{path}: {what}", hint=hint) from error


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is a dense array of its values: not sparse, nested, quantised or
    on the meta device."""
    return not (
        x.layout is not torch.strided or x.is_nested or x.is_quantized or x.is_meta
    )


def checked_tensor(path: Path, name: str, x: Tensor) -> Tensor:
    """Returns the stored tensor x unchanged. Raises MeasurementError unless it is a dense
    array, for a name ending in `weight` that holds no floating-point numbers, and for a
    complex bias. Other integers pass: old files call masks `bias`. `path` is for the
    message."""
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
    """Returns the prefix that all names have and that is made of those in PREFIXES, in
    any order: `_orig_mod.module.`; empty where they have none. `names`: at least one."""
    taken = ""
    while prefix := next(
        (p for p in PREFIXES if all(n.startswith(taken + p) for n in names)), None
    ):
        taken += prefix
    return taken


def identity(files: Iterable[Path]) -> str:
    """Returns 64 hex digits: SHA-256 over the names of the files (without folders) and
    the SHA-256 of their pieces of 64 MiB, in the order of `files`. Raises OSError for a
    file that cannot be read."""
    return start_identity(files)()


def start_identity(files: Iterable[Path]) -> Callable[[], str]:
    """Begins to hash these files in threads. Returns a function that waits for the
    result, the string that `identity` returns; it may be called again. A file that cannot
    be read raises OSError only there."""
    sizes = {path: path.stat().st_size if path.exists() else 0 for path in files}
    pieces = [
        (path, start)
        for path, size in sizes.items()
        for start in range(0, max(size, 1), PIECE)
    ]
    # Its threads end with the program, should nobody ask any more.
    pool = ThreadPool(min(len(pieces), os.cpu_count() or 1) or 1)
    hashed = pool.starmap_async(_piece_digest, pieces, chunksize=1)
    pool.close()

    def done() -> str:
        """Returns the hash, as soon as all pieces are hashed."""
        return hashlib.sha256("".join(hashed.get()).encode()).hexdigest()

    return done


def _piece_digest(path: Path, start: int) -> str:
    """Returns the name of a file and the SHA-256 of 64 MiB of it from byte `start` on, as
    a line."""
    digest, left = hashlib.sha256(), PIECE
    with path.open("rb") as file:
        file.seek(start)
        while left and (read := file.read(min(left, CHUNK))):
            digest.update(read)
            left -= len(read)
    return f"{path.name} {digest.hexdigest()}\n"


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, 64 hex digits. Raises OSError where it
    cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_misfits(
    path: Path,
    model: str,
    missing: Collection[str],
    unused: Collection[str],
    misshapen: Iterable[tuple[str, Sequence[int], Sequence[int]]],
) -> None:
    """Raises MeasurementError where weights at `path` do not fit their model, and names
    the first of each kind, sorted: `missing` are the model's that are not stored,
    `unused` the stored ones that it lacks, `misshapen` has a weight's name, its stored
    shape and the model's. Returns where all three are empty."""
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
    """Enters a context that turns whatever is raised in it, even what is no `Exception`,
    into a MeasurementError `of: what: the error in one line`. `hint`: the error's hint;
    None: no hint. numdev's errors (NumdevError), those of the type `passing`,
    KeyboardInterrupt and GeneratorExit pass unchanged."""
    try:
        yield
    except (NumdevError, passing, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise MeasurementError(f"{of}: {what}: {one_line(error)}", hint=hint) from error


def blaming(path: Path, what: str) -> AbstractContextManager[None]:
    """Returns a context in which any error of a library becomes a MeasurementError `path:
    cannot what: ...`; numdev's own errors and interrupts pass unchanged."""
    hint = "is the checkpoint complete, and made for the installed versions?"
    return naming(path, f"cannot {what}", hint)


@contextmanager
def quiet(*others: ModuleType) -> Iterator[None]:
    """Enters a context without Python's log lines and warnings, and without progress bars
    of transformers, huggingface_hub and `others`, modules with transformers' logging
    functions. At the end each is again as it was."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import progress_bar_states

    with warnings.catch_warnings(), ExitStack() as stack:
        # The switches below warn where an environment variable decides instead
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        # Those of transformers switch all of the hub's as well
        stack.callback(progress_bar_states.update, dict(progress_bar_states))
        stack.callback(progress_bar_states.clear)
        for chatter in (transformers.utils.logging, *others):
            if chatter.is_progress_bar_enabled():
                stack.callback(chatter.enable_progress_bar)
            chatter.disable_progress_bar()
        yield


def some(names: Sequence[str], shown: int = 4) -> str:
    """Returns the first `shown` names, and how many more there are: `a, b, c, d and 7
    more`. Empty for no name."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
