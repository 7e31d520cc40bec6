"""What comparisons of studies share: rows that both reports have, and what one alone
has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from numdev.gate.compare_report import About, Presence
from numdev.gate.row_groups import Key
from numdev.report import Place, Who


class Tried(Protocol):
    """A row, which has numbers if its status is `ok`, and else a reason."""

    @property
    def status(self) -> str: ...
    @property
    def reason(self) -> str | None: ...


R = TypeVar("R", bound=Tried)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RowKeys(Generic[R]):
    """The keys by which rows of two reports are matched, and what is said of a row."""

    kernel: Callable[[R], Key]
    """What identifies the kernel and the format of a row."""
    call: Callable[[R], Key]
    """What identifies the call of it that a row is of."""
    part: Callable[[R], Key] = lambda row: ()
    """What of that call a row is, where a call has several rows."""
    is_backward: Callable[[R], bool] = lambda row: False
    """Whether a row is of the backward pass of its call."""
    lost: Callable[[R, R], list[str]]
    """The names of numbers that row A has and row B lacks."""
    about: Callable[[R], About]
    """The fields of a record that say which kernel and tensor a row is of."""
    place: Callable[[R], Place]
    """Where a row was measured."""

    def step(self, row: R) -> tuple[Key, Key, bool]:
        """Returns the key of the run that a row is of: its kernel, its call, and whether
        it is backward."""
        return self.kernel(row), self.call(row), self.is_backward(row)

    def row(self, row: R) -> Key:
        """Returns the key of a row: rows of A and B with equal keys are a pair."""
        return self.kernel(row), self.call(row), self.part(row)


def lost_numbers(a: object, b: object, names: Sequence[str]) -> list[str]:
    """Returns those of `names` (attributes of both) that are not None in A and None in
    B."""
    return [
        name
        for name in names
        if getattr(a, name) is not None and getattr(b, name) is None
    ]


def measured_pairs(
    keys: RowKeys[R], old: Iterable[R], new: Iterable[R]
) -> list[tuple[R, R]]:
    """Returns (row of A, row of B) for rows of equal keys (`keys.row`) that are both of
    status ok, in B's order. Of several rows with one key in a report the last counts."""
    before = {keys.row(row): row for row in old if row.status == "ok"}
    after = {keys.row(row): row for row in new if row.status == "ok"}
    return [(before[key], row) for key, row in after.items() if key in before]


def both_sides(
    old: Iterable[T], new: Iterable[T], key: Callable[[T], Key]
) -> Iterator[tuple[T | None, T | None]]:
    """Yields (of A, of B) for each key that either report has something under, A's order
    first; None stands for the one that lacks it. Of several under one key the last
    counts."""
    a, b = ({key(item): item for item in items} for items in (old, new))
    for each in dict.fromkeys((*a, *b)):
        yield a.get(each), b.get(each)


def numbers_in_both(
    rows: Iterable[tuple[object, object]], metric: str
) -> list[tuple[float, float]]:
    """Returns (value of A, value of B) of a metric for each pair of rows in which neither
    is None."""
    values = ((getattr(a, metric), getattr(b, metric)) for a, b in rows)
    return [(a, b) for a, b in values if a is not None and b is not None]


def place_without_call(name: str, layer: int | None = None) -> Place:
    """Returns a place that has `name` for its case and no module, head, phase or seed,
    and `layer`, if any: of something that belongs to no call, or to all calls of a
    case."""
    return Place(
        case=name, module="", layer=layer, call=0, head=None, phase=None, seed=None
    )


def presence_record(
    of: Who, place: Place, gone: bool, tensor: str, why: str, *lacks: str
) -> Presence:
    """Returns the record of one row or number that is gone from B (`gone`), or new in it.
    `of`: its kernel; `why`: the reason, `no number` if empty; `lacks`: names of the
    numbers, none where the row itself is gone."""
    return Presence(
        **of,
        tensors=(tensor,),
        place=place,
        what="gone" if gone else "new",
        rows=1,
        why=why or "no number",
        lacks=lacks,
    )
