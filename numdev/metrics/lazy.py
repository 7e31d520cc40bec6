"""What is made when somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Later(Generic[T]):
    """What `make` returns, called when it is needed. When it has returned it is let go, and what it
    held with it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: list[T] = []

    @property
    def value(self) -> T:
        """Raises what `make` raises, every time."""
        make = self._make
        if make is not None:
            self._made = [make()]
            self._make = None
        return self._made[0]


class Lazy(Sequence[T]):
    """A list that `make` returns, called when it is needed. Copies and pickles as the list."""

    def __init__(self, make: Callable[[], list[T]]) -> None:
        self._later = Later(make)

    @property
    def _list(self) -> list[T]:
        return self._later.value

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[T]:
        return iter(self._list)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        return self._list[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._list == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self._list,)
