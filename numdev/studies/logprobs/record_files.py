"""The records of a file, one after the other: JSON, parquet, safetensors, torch.save.

A line of JSON is a record, and so is a row of parquet; the other two hold one record, or
a list of them. Lines are read one at a time, and nothing is unpickled but tensors and
plain values. What a record means is a matter of the layouts."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from numdev.errors import MeasurementError, NumdevError, UsageError, one_line
from numdev.sources.unsupported_files import refuse_pointer
from numdev.studies.logprobs.record_fields import FileRecord, ReadBudget, kind_of

LONGEST_LINE = 1 << 28  # bytes; a line is in memory several times
BYTES_PER_LINE = 100  # what a line costs beside its bytes: many may be empty
ROWS = 64  # of parquet that are read at once
EXTRA = "pip install 'numdev[logprobs]'"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".safetensors", ".pt", ".pth")
PACKED = (".gz", ".zst")


def read_records(path: Path) -> Iterator[FileRecord]:
    """Yields the records of a file in their order; of JSON lines and parquet only a few
    are in memory at once.

    Raises UsageError for another suffix, and where a package that reads the file is
    missing. Raises MeasurementError, with the file and the line or record, for a file
    that is missing, cannot be read or is damaged, and for one whose content is out of
    proportion to its size."""
    kind = suffix_of(path)
    refuse_pointer(path)
    with _reading(path):
        budget = ReadBudget.of(path)
    if kind == ".parquet":
        yield from _parquet_rows(path, budget)
    elif kind == ".safetensors":
        yield _safetensors_record(path, budget)
    elif kind in (".pt", ".pth"):
        yield from _saved_records(path, budget)
    else:
        yield from _json_records(path, kind == ".json", budget)


def suffix_of(path: Path) -> str:
    """Returns what kind of file a path names: one of SUFFIXES in small letters, without a
    `.gz` or `.zst` behind it, which JSON alone may have (`a.JSONL.gz` is `.jsonl`).
    Raises UsageError for another suffix. The file need not exist."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in PACKED
    kind = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    if kind not in SUFFIXES or (packed and kind not in SUFFIXES[:3]):
        wanted = f"{', '.join(SUFFIXES)}; JSON also with {' or '.join(PACKED)}"
        hint = "numdev.dump_logprobs writes one from the program that has the values"
        got = "".join(suffixes[-2:]) or "a name without a suffix"
        raise UsageError(f"{path}: expected a file {wanted}, got {got}", hint=hint)
    return kind


def _json_records(
    path: Path, is_document: bool, budget: ReadBudget
) -> Iterator[FileRecord]:
    """Yields the objects of a file of JSON as records. Each line is one object or a list
    of objects; where `is_document`, the file may also be one object or list over many
    lines. Raises MeasurementError for a file without content, for invalid JSON, for what
    is no object, and for a file that cannot be read; UsageError where Zstandard is not
    installed."""
    lines = _lines(path, budget)
    first = next(lines, None)
    if first is None:
        raise MeasurementError(f"{path}: expected records, got an empty file")
    number, line = first
    try:
        value = _parsed(path, number, line)
    except MeasurementError:
        if not is_document:
            raise
        whole = b"".join([line, *(line for _, line in lines)])
        value = _parsed(path, 0, whole)
    yield from _as_records(value, _place(path, number), budget)
    for number, line in lines:
        value = _parsed(path, number, line)
        yield from _as_records(value, _place(path, number), budget)


def _as_records(value: object, place: str, budget: ReadBudget) -> Iterator[FileRecord]:
    """Yields an object as a record, and each object of a list as one (`PLACE record 2`).
    Raises MeasurementError for anything else."""
    values = value if isinstance(value, list | tuple) else [value]
    for number, item in enumerate(values):
        where = f"{place} record {number + 1}" if value is values else place
        if not isinstance(item, Mapping):
            got = kind_of(item)
            raise MeasurementError(f"{where}: expected an object, got {got}")
        yield FileRecord(cast(Mapping[str, object], item), where, budget)


def _place(path: Path, number: int) -> str:
    """Returns where a line stands: `a.jsonl line 3`; for number 0, a whole document, the
    file alone."""
    return f"{path} line {number}" if number else str(path)


def _parsed(path: Path, number: int, line: bytes) -> object:
    """Returns the value of one line of JSON, NaN and Infinity allowed; `number` 0 means
    the whole file. Raises MeasurementError for invalid JSON and for what is nested too
    deep."""
    place = _place(path, number)
    with _without_collection():
        try:
            return _loads()(line)
        except (ValueError, RecursionError):
            pass  # json's messages are better, and it reads NaN and Infinity
        try:
            return json.loads(line)
        except RecursionError:
            got = "lists or objects in one another too deep to be read"
        except ValueError as error:
            got = one_line(error).partition(": ")[2]
    raise MeasurementError(f"{place}: expected a JSON object, got invalid JSON: {got}")


@contextmanager
def _without_collection() -> Iterator[None]:
    """Returns a context without Python's garbage collection, which would go through the
    new lists again and again: most of the time of a document of millions of small ones.
    Afterwards it is as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _loads() -> Callable[[bytes], object]:
    """Returns orjson's parser, six times as fast, where it is installed, else json's."""
    try:
        import orjson
    except ImportError:
        return json.loads
    return cast(Callable[[bytes], object], orjson.loads)


def _lines(path: Path, budget: ReadBudget) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a text file, which may be compressed, with their numbers from 1
    on; lines without content are left out. Raises MeasurementError for a file that cannot
    be read, for a line longer than LONGEST_LINE, and beyond the budget; UsageError where
    Zstandard is not installed."""
    number = 0
    with _reading(path), _opened(path) as file:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            budget.spend(len(line) + BYTES_PER_LINE)
            if len(line) > LONGEST_LINE:
                wanted = f"lines of at most {LONGEST_LINE >> 20} MiB"
                raise MeasurementError(
                    f"{path} line {number}: expected {wanted}, got more"
                )
            if line.strip():
                yield number, line


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Returns a context in which errors of the system, and whatever a damaged file
    raises, become MeasurementErrors that name the file; numdev's own errors pass
    unchanged."""
    try:
        yield
    except (NumdevError, GeneratorExit, KeyboardInterrupt):
        raise
    except OSError as error:  # also what gzip says of a file that is none
        what = error.strerror or one_line(error)
        raise MeasurementError(f"{path}: cannot be read: {what}") from error
    except Exception as error:  # zlib.error, EOFError, ZstdError
        got = one_line(error)
        raise MeasurementError(f"{path}: is damaged or cut: {got}") from error


def _opened(path: Path) -> IO[bytes]:
    """Returns a file opened for reading bytes, by its suffix plain, gzip or Zstandard.
    Raises OSError where it cannot be opened, UsageError where Zstandard is not
    installed."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix.lower() != ".zst":
        return path.open("rb")
    return cast(IO[bytes], zstandard(path).open(path, "rb"))


def zstandard(path: Path) -> ModuleType:
    """Returns the module that reads and writes Zstandard. Raises UsageError, which names
    the file, where it is not installed."""
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            from backports import zstd
        except ImportError:
            what = f"{path}: needs the package backports.zstd"
            raise UsageError(what, hint=f"{EXTRA}, or do not compress it") from None
    return cast(ModuleType, zstd)


def _parquet_rows(path: Path, budget: ReadBudget) -> Iterator[FileRecord]:
    """Yields the rows of a parquet file as records. Lists of numbers are arrays, with NaN
    for null; whole numbers are floats then. Raises UsageError without pyarrow,
    MeasurementError for a damaged file and beyond the budget."""
    try:
        from pyarrow import parquet
    except ImportError:
        hint = f"{EXTRA}, or write JSON lines"
        raise UsageError(f"{path}: needs the package pyarrow", hint=hint) from None
    number = 0
    with _reading(path), parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            columns = file.metadata.row_group(group)
            sizes = [columns.column(i).num_values for i in range(columns.num_columns)]
            budget.spend(sum(sizes))  # a byte a value at least
        for batch in file.iter_batches(batch_size=ROWS):
            names = batch.schema.names
            columns = [_column(batch.column(name)) for name in names]
            for row in range(batch.num_rows):
                number += 1
                fields = {
                    name: column[row] for name, column in zip(names, columns, strict=True)
                }
                yield FileRecord(fields, f"{path} row {number}", budget)


def _column(column: object) -> list[object]:
    """Returns the values of a column of Arrow, None for null. Lists of numbers are
    arrays, in which NaN stands for null and makes floats of whole numbers; all other
    values are Python's."""
    import pyarrow as arrow

    array = cast(arrow.Array, column)
    kind = array.type
    is_list = arrow.types.is_list(kind) or arrow.types.is_large_list(kind)
    is_number = is_list and (
        arrow.types.is_floating(kind.value_type)
        or arrow.types.is_integer(kind.value_type)
    )
    if not is_number:
        return cast(list[object], array.to_pylist())
    offsets = array.offsets.to_pylist()
    values = array.values.to_numpy(zero_copy_only=False)
    missing = array.is_null().to_pylist()
    return [
        None if missing[i] else values[offsets[i] : offsets[i + 1]]
        for i in range(len(missing))
    ]


def _safetensors_record(path: Path, budget: ReadBudget) -> FileRecord:
    """Returns the tensors of a safetensors file, and the texts of its metadata (numbers,
    NaN too, true and false where they are such), as one record; of equal names the
    tensor. The record spends `budget` as its fields are read. Raises MeasurementError for
    a file that is missing or damaged, or has a tensor in a dtype that PyTorch lacks."""
    from numdev.sources.tensor_files import open_safetensors

    with open_safetensors(path) as file:
        metadata = cast(dict[str, str], file.metadata() or {})
        fields = {name: _plain_value(text) for name, text in metadata.items()}
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            fields[name] = file.get_tensor(name)
    return FileRecord(fields, str(path), budget)


def _plain_value(text: str) -> object:
    """Returns the number, true or false that a text of metadata is; another text as it
    is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float) else text


def _saved_records(path: Path, budget: ReadBudget) -> Iterator[FileRecord]:
    """Yields the dict that torch.save wrote as a record, or each dict of a list. Raises
    MeasurementError for anything else. No code of the file runs."""
    from numdev.sources.tensor_files import unpickled

    yield from _as_records(unpickled(path), str(path), budget)
