"""Things in groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items by `key(item)`: both keys and items in the order they first
    came."""
    groups: defaultdict[K, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)
