"""Sequences of which one item is in memory at a time: computed, or read from a temporary
file, whenever it is asked for. So memory does not grow with the number of tokens.

The file is of this process alone: only its user may open it, and it has no name, so that
it is gone when the process ends, however that ends. What is small stays in memory."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from os import SEEK_END
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Generic, NamedTuple, Protocol, TypeVar, overload

T = TypeVar("T")
MOST_IN_MEMORY = 1 << 22  # bytes of items up to which there is no file on the disk


class Mapped(Sequence[T]):
    """What a function makes of the items of sequences of one length, one of each, anew
    whenever it is asked for. It must give the same each time."""

    def __init__(self, function: Callable[..., T], *of: Sequence[object]) -> None:
        self._function, self._of = function, of
        if len({len(items) for items in of}) != 1:
            raise ValueError("expected sequences of one length")

    def __len__(self) -> int:
        """Returns the number of items."""
        return len(self._of[0])

    @overload
    def __getitem__(self, at: int) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...

    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        """Returns an item; those of a slice are computed when they are asked for."""
        if isinstance(at, slice):
            return Mapped(self._function, *(items[at] for items in self._of))
        return self._function(*(items[at] for items in self._of))


class ItemPlace(NamedTuple):
    """Where an item lies in its file, in bytes."""

    start: int
    size: int


class ItemFile(Generic[T]):
    """A temporary file of items, which are read by the place that writing one returns.
    Raises OSError, with the folder, where the disk is full. Only what this process wrote
    is unpickled."""

    def __init__(self) -> None:
        self._file = SpooledTemporaryFile(MOST_IN_MEMORY)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._last: tuple[ItemPlace, T] | None = None

    def write(self, item: T) -> ItemPlace:
        """Appends an item, pickled, and returns its place. Raises OSError, with the
        folder of temporary files, where the disk is full."""
        content = pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        place = ItemPlace(self._file.seek(0, SEEK_END), len(content))
        try:
            self._file.write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, gettempdir()) from error
        return place

    def read(self, place: ItemPlace) -> T:
        """Returns the item at a place: a copy, or the object that the last call returned,
        where that was for an equal place, as two sequences need it that are made of
        one."""
        if self._last is None or self._last[0] != place:
            self._file.seek(place.start)
            self._last = place, pickle.loads(self._file.read(place.size))
        return self._last[1]


class Storing(Protocol):
    """How items are stored: `list`, in memory, or `in_file`."""

    def __call__(self, items: Iterable[T], /) -> Sequence[T]:
        """Returns the items as a sequence."""
        ...


def in_file(items: Iterable[T]) -> Sequence[T]:
    """Returns items as a sequence whose items are in a temporary file, each read when it
    is asked for: a copy, but the same object where one is asked for twice in a row. All
    items are written at once. Raises OSError where the disk is full."""
    file = ItemFile[T]()
    return Mapped(file.read, [file.write(item) for item in items])
