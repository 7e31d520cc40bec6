"""One record of a file of log-probabilities, and its fields as checked arrays.

Files are foreign data. A field is read with the type, length and range that it must have,
or refused in one line: file, line or record, field, what was expected, what came. What
is read is held to a budget in proportion to the file's size, so that a small file cannot
fill the memory, be it compressed, repeated by reference or strided."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unicodedata import category

import numpy as np

from numdev.errors import MeasurementError, NumdevError
from numdev.studies.logprobs.records import Flags, Integers, Numbers

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_ID = 2**31 - 1  # of a token; no vocabulary is that large
LEAST_BUDGET = 1 << 25  # bytes that any file may come to
BYTES_PER_BYTE = 100  # and how many times its size a larger one may
LARGEST_VALUE = 1e100  # of a log-probability: its square must be a number too
BYTES_PER_SEQUENCE = 2000  # of Python's objects for one, beside its arrays
SHOWN = 40  # characters of a value in a message
REALS: frozenset[type] = frozenset([float, int, type(None)])
FLAGS: frozenset[type] = frozenset([bool, int, float])


@dataclass
class ReadBudget:
    """How many bytes reading a file may come to (`limit`), and has come to (`spent`)."""

    path: Path
    limit: int
    spent: int = 0

    @classmethod
    def of(cls, path: Path) -> ReadBudget:
        """Returns the budget of a file, by its size on the disk, of which nothing is
        spent. Raises OSError where there is no file."""
        return cls(path, max(LEAST_BUDGET, BYTES_PER_BYTE * path.stat().st_size))

    def spend(self, size: int) -> None:
        """Adds `size` bytes to those that are spent. Raises MeasurementError beyond the
        limit."""
        self.spent += size
        if self.spent > self.limit:
            what = (
                f"{self.path}: expected content of at most {self.limit >> 20} MiB, by "
                f"the file's {self.path.stat().st_size:,} bytes, got more"
            )
            raise MeasurementError(what, hint="is it what the program wrote?")


@dataclass
class FileRecord:
    """The fields of one record by their names, and its `place`, as `a.jsonl line 3`.

    `read` has the names of fields that were asked for: other fields are ignored, and the
    side's notes say so. A method that returns a checked field raises MeasurementError,
    with the place and the field, where the field has another type, length or range than
    is asked for."""

    fields: Mapping[str, object]
    place: str
    budget: ReadBudget
    read: set[str] = field(default_factory=set)

    def get(self, name: str) -> object:
        """Returns a field as the file has it, unchecked; None where it is missing. Adds
        its name to `read`."""
        self.read.add(name)
        return self.fields.get(name)

    def has(self, *names: str) -> bool:
        """Whether each of these fields is there, and not null. Their names are not added
        to `read`."""
        return all(self.fields.get(name) is not None for name in names)

    def error(self, name: str, expected: str, got: str) -> NumdevError:
        """Returns, without raising it, the error of a field that is not as it must be:
        `a.jsonl line 3: NAME: expected A, got B`."""
        return MeasurementError(f"{self.place}: {name}: expected {expected}, got {got}")

    def part(self, name: str, suffix: str = "") -> FileRecord:
        """Returns the object in a field as a record, whose place is this one's with
        `suffix` added. Raises MeasurementError where the field is missing or no
        object."""
        return self.record_of(self.get(name), name, suffix)

    def record_of(self, value: object, name: str, suffix: str = "") -> FileRecord:
        """Returns `value` as a record whose place is this one's with `suffix` added. Its
        `read` is a set of its own, and empty. Raises MeasurementError, which names the
        field `name`, where it is no object."""
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", kind_of(value))
        return FileRecord(value, self.place + suffix, self.budget)

    def parts(self, name: str) -> Iterator[FileRecord]:
        """Yields the objects of a list, in order, as records, each with its number in its
        place (`a.jsonl line 3 choices[0]`). Raises MeasurementError where the field is
        missing or no list, and for an element that is no object."""
        values = self.get(name)
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise self.error(name, "a list of objects", kind_of(values))
        for number, value in enumerate(values):
            yield self.record_of(value, f"{name}[{number}]", f" {name}[{number}]")

    def text(self, name: str) -> str | None:
        """Returns a text, or a whole number in digits (one of 200 bits or more as `a
        number of 300 bits`); None where the field is missing, null or empty. Raises
        MeasurementError for another type, and for a text with control codes or half of a
        surrogate pair."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            if value and any(category(x) in ("Cc", "Cs") for x in value):
                raise self.error(name, "a text without control codes", _shown(value))
            return value or None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "a text or a whole number", _shown(value))
        return _digits(value)

    def number(self, name: str, most: float = sys.float_info.max) -> float | None:
        """Returns a finite number from 0 to `most`, also from a list, array or tensor of
        one element; None where the field is missing or null. Raises MeasurementError for
        anything else, NaN and true among them."""
        value = _scalar(self.get(name))
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= cast(float, value) <= most:
            to = f"from 0 to {most:g}" if most < sys.float_info.max else "of at least 0"
            raise self.error(name, f"a number {to}", _shown(value))
        return float(cast(float, value))

    def whole(self, name: str, least: int = 0, most: int = 2**62) -> int | None:
        """Returns a whole number from `least` to `most`, also from a list, array or
        tensor of one element; None where the field is missing or null. Raises
        MeasurementError for anything else, 3.0 and true among them."""
        value = _scalar(self.get(name))
        if value is None:
            return None
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= cast(int, value) <= most:
            wanted = f"a whole number of at least {least}"
            raise self.error(name, wanted, _shown(value))
        return cast(int, value)

    def token_ids(self, name: str, length: int | None = None) -> Integers:
        """Returns the ids of tokens, int64 [n]; n is at least 1, and `length` where that
        is not None. Raises MeasurementError where the field is missing, empty or of
        another length, and for ids below 0 or above LARGEST_ID."""
        ids = self.integers(name, length)
        if ids is None or not len(ids):
            raise self.error(name, "at least one token", "none")
        return ids

    def integers(
        self,
        name: str,
        length: int | None = None,
        *,
        least: int = 0,
        most: int = LARGEST_ID,
    ) -> Integers | None:
        """Returns whole numbers from `least` to `most` as int64 [n]; n is `length` where
        that is not None. None where the field is missing or null. Raises MeasurementError
        for other values, 3.0 and true among them, and for another length."""
        value = self.get(name)
        return (
            None if value is None else self.integers_of(name, value, length, least, most)
        )

    def integers_of(
        self,
        name: str,
        value: object,
        length: int | None,
        least: int = 0,
        most: int = LARGEST_ID,
        depth: int = 1,
    ) -> Integers:
        """Returns `value`, a list, array or tensor that stands under `name`, as int64 of
        `depth` dimensions, of which the first has `length` (None: no matter). Raises
        MeasurementError for other shapes, for numbers below `least` or above `most`, and
        for what is no integer: 3.0, true and NaN. An array may be the value itself, not a
        copy."""
        if isinstance(value, list | tuple):
            x = self._array(name, value, np.int64, frozenset([int]), depth)
        else:
            x = self._numpy(name, value, depth)
            self._check_kind(name, x, np.int64)
        self._check_length(name, x, length)
        if x.size and not (least <= x.min() and x.max() <= most):
            at = int(np.argmax((x < least) | (x > most)))
            wanted = f"{least} to {most}" if most == LARGEST_ID else f"at least {least}"
            raise self.error(f"{name}[{at}]", wanted, str(x.reshape(-1)[at]))
        return x.astype(np.int64, copy=False)

    def numbers(
        self, name: str, length: int | None = None, depth: int = 1
    ) -> Numbers | None:
        """Returns the field as float64 of `depth` dimensions, of which the first has
        `length` (None: no matter), with NaN for null, and minus infinity where it was
        recorded. None where the field is missing or null. Raises MeasurementError for
        plus infinity, for sizes above LARGEST_VALUE, and for another shape."""
        value = self.get(name)
        return None if value is None else self.numbers_of(name, value, length, depth)

    def numbers_of(
        self, name: str, value: object, length: int | None, depth: int = 1
    ) -> Numbers:
        """Returns `value`, a list, array or tensor that stands under `name`, as float64
        of `depth` dimensions, of which the first has `length` (None: no matter). NaN
        stands for null. Raises MeasurementError for other shapes, for what is no number,
        such as a bool, for plus infinity, and for sizes above LARGEST_VALUE. An array may
        be the value itself, not a copy."""
        if isinstance(value, list | tuple):
            x = self._array(name, value, np.float64, REALS, depth)
        else:
            x = self._numpy(name, value, depth)
            self._check_kind(name, x, np.float64)
        self._check_length(name, x, length)
        x = x.astype(np.float64, copy=False)
        # The largest alone would be NaN where one value is.
        if x.size and np.isposinf(x).any():
            at = int(np.argmax(np.isposinf(x)))
            raise self.error(f"{name}[{at}]", "a finite number, -inf or null", "inf")
        is_large = np.isfinite(x) & (np.abs(x) > LARGEST_VALUE)
        if is_large.any():
            at = int(np.argmax(is_large))
            wanted = f"at most {LARGEST_VALUE:g} in size, -inf or null"
            raise self.error(f"{name}[{at}]", wanted, f"{x.reshape(-1)[at]:g}")
        return x

    def flags(self, name: str, length: int | None = None) -> Flags | None:
        """Returns bool [n] of true and false, or of 0 and 1; n is `length` where that is
        not None. None where the field is missing or null. Raises MeasurementError for
        other values and another length."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, list | tuple):
            x = self._array(name, value, np.float64, FLAGS, 1)
        else:
            x = self._numpy(name, value, 1)
        self._check_length(name, x, length)
        if wrong := np.flatnonzero((x != 0) & (x != 1)).tolist():
            raise self.error(f"{name}[{wrong[0]}]", "0 or 1", str(x[wrong[0]]))
        return x.astype(np.bool_)

    def _array(
        self,
        name: str,
        values: Sequence[object],
        dtype: type[np.generic],
        types: frozenset[type],
        depth: int,
    ) -> np.ndarray:
        """Returns nested lists as an array of `depth` dimensions; all lists of one depth
        must be as long. Raises MeasurementError for lists that are not, for elements that
        are of none of `types`, for whole numbers that `dtype` cannot hold, and beyond the
        budget."""
        self.budget.spend(8 * len(values))
        if depth > 1:
            return self._stacked(name, values, dtype, types, depth)
        if wrong := set(map(type, values)) - types:
            at = next(i for i, x in enumerate(values) if type(x) in wrong)
            expected = "whole numbers" if dtype is np.int64 else "numbers"
            raise self.error(f"{name}[{at}]", expected, _shown(values[at]))
        try:
            return np.array(values, dtype=dtype)
        except OverflowError:
            is_large = (isinstance(x, int) and abs(x) >= 2**63 for x in values)
            at = next(i for i, large in enumerate(is_large) if large)
            got = _shown(values[at])
            raise self.error(f"{name}[{at}]", "a number of 64 bits", got) from None

    def _stacked(
        self,
        name: str,
        values: Sequence[object],
        dtype: type[np.generic],
        types: frozenset[type],
        depth: int,
    ) -> np.ndarray:
        """Returns lists of lists, or arrays, as one array of `depth` (2 or more)
        dimensions. Lists come in `dtype`, and have elements of `types`; arrays, which
        have numbers of `dtype`'s kind, come in a dtype that holds all of theirs. An empty
        list gives an array without elements. Raises MeasurementError where the rows are
        not of one size or depth, for other elements, and beyond the budget."""
        if not values:
            return np.empty((0,) * depth, dtype)
        if not all(isinstance(row, list | tuple) for row in values):
            rows = [
                self._numpy(f"{name}[{i}]", x, depth - 1) for i, x in enumerate(values)
            ]
            for i, row in enumerate(rows):
                self._check_kind(f"{name}[{i}]", row, dtype)
            self._check_same(name, [list(row.shape) for row in rows])
            return np.stack(rows)
        lists = cast(Sequence[Sequence[object]], values)
        self._check_same(name, [len(row) for row in lists])
        self.budget.spend(8 * len(lists) * len(lists[0]))
        flat = self._array(
            name, list(chain.from_iterable(lists)), dtype, types, depth - 1
        )
        return flat.reshape(len(lists), len(lists[0]), *flat.shape[1:])

    def _check_kind(self, name: str, x: np.ndarray, dtype: type[np.generic]) -> None:
        """Raises MeasurementError unless the dtype of an array is of whole numbers, or,
        where `dtype` is not np.int64, of numbers; bools are neither. Nothing is raised
        for an array without elements."""
        wanted, kinds = "numbers", "fiu"
        if dtype is np.int64:
            wanted, kinds = "whole numbers", "iu"
        if x.size and x.dtype.kind not in kinds:
            has_nan = x.dtype.kind == "f" and np.isnan(x).any()
            got = "NaN or null" if has_nan else f"an array of {x.dtype}"
            raise self.error(name, wanted, got)

    def _check_same(self, name: str, sizes: Sequence[object]) -> None:
        """Raises MeasurementError for the first row of an array whose size is not that of
        row 0. `sizes`: of each row; empty: nothing is raised."""
        at = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
        if at is not None:
            wanted = f"{sizes[0]}, as many as in {name}[0]"
            raise self.error(f"{name}[{at}]", wanted, str(sizes[at]))

    def _numpy(self, name: str, value: object, depth: int) -> np.ndarray:
        """Returns a dense tensor or an array of numbers (or bools) as an array, without a
        copy where numpy has the dtype; a tensor's floats of fewer than 32 bits are
        widened. Raises MeasurementError for anything else, for another number of
        dimensions than `depth`, and beyond the budget. The size is counted before
        anything is copied: a stored tensor may be strided so that a few bytes stand for
        any number of values."""
        if isinstance(value, np.ndarray):
            x = value
        elif (tensor := _dense_tensor(value)) is not None:
            self.budget.spend(8 * tensor.numel())
            # numpy has no bfloat16
            is_wide = tensor.dtype.itemsize >= 4 or not tensor.is_floating_point()
            x = (tensor if is_wide else tensor.float()).numpy()
        else:
            raise self.error(name, _LISTS[depth], kind_of(value))
        self.budget.spend(8 * x.size)
        if x.dtype.kind not in "biuf":
            raise self.error(name, _LISTS[depth], f"an array of {x.dtype}")
        if x.ndim != depth:
            raise self.error(name, _LISTS[depth], f"an array of shape {list(x.shape)}")
        return x

    def _check_length(self, name: str, x: np.ndarray, length: int | None) -> None:
        """Raises MeasurementError unless an array has `length` rows. Nothing is raised
        for None."""
        if length is not None and len(x) != length:
            raise self.error(name, f"{length} values, one a token", str(len(x)))

    def unread(self) -> Iterable[str]:
        """Returns the names of fields that were not asked for, in the order of the
        file."""
        return [name for name in self.fields if name not in self.read]


_LISTS = {
    1: "a list of numbers",
    2: "a list of lists of numbers",
    3: "three nested lists of numbers",
}


def _dense_tensor(value: object) -> Tensor | None:
    """Returns a tensor of real numbers or bools, detached. None for anything else: other
    layouts, quantised, nested, complex and meta tensors, and a subclass, whose code would
    run."""
    import torch  # a second that reading JSON need not wait for

    if type(value) is not torch.Tensor or value.layout is not torch.strided:
        return None
    if value.is_nested or value.is_quantized or value.is_meta or value.is_complex():
        return None
    return value.detach()


def row_count(value: object) -> int | None:
    """Returns the number of rows of a list, tuple, array or dense tensor: its first
    dimension. None for anything else, and for an array without dimensions."""
    if isinstance(value, list | tuple):
        return len(value)
    if value is None or isinstance(value, int | float | str | Mapping):
        return None
    shape = value.shape if isinstance(value, np.ndarray) else None
    if shape is None and (tensor := _dense_tensor(value)) is not None:
        shape = tuple(tensor.shape)
    return shape[0] if shape else None


def _scalar(value: object) -> object:
    """Returns the number in a list, tensor or array of one element; anything else as it
    is, a tuple too."""
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    if value is None or isinstance(value, int | float | str | list | Mapping):
        return value
    x = value if isinstance(value, np.ndarray) else _dense_tensor(value)
    if isinstance(x, np.ndarray):
        return x.item() if x.size == 1 else value
    return x.item() if x is not None and x.numel() == 1 else value


def _digits(value: int) -> str:
    """Returns a whole number in digits; one of 200 bits or more as `a number of 300
    bits`."""
    return (
        str(value)
        if value.bit_length() < 200
        else f"a number of {value.bit_length()} bits"
    )


def _shown(value: object) -> str:
    """Returns a value as a message can show it, short and on one line: numbers, `true`,
    quoted texts (cut after SHOWN characters); of other values their kind, as
    `kind_of`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return _digits(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str):
        text = value.encode(errors="replace").decode()[:SHOWN]
        return repr(text + "…" if len(value) > SHOWN else text)
    return kind_of(value)


def kind_of(value: object) -> str:
    """Returns in words what a value is: `null`, `an object`, `a list of 3`; a number or
    quoted text itself, cut where it is long; for other values the name of their type."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return _shown(value) if isinstance(value, int | float | str) else type(value).__name__
