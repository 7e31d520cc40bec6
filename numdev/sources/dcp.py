"""The tensors of a `torch.distributed.checkpoint` directory, one at a time.

A tensor is stored in pieces, one for each shard that a rank held, each a byte range of a
`__RANK_N.distcp` file that torch.save wrote. Nothing of torch.distributed is needed to read them,
no process group, and never more than one tensor and one of its pieces.
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.sources.dcp_metadata import METADATA, Described, Piece, Place, read_metadata
from numdev.sources.files import FETCH, one_line

NESTED = ("model", "state_dict", "model_state_dict", "module")
"""Where training scripts put the state dict in what they save."""
WRAPPERS = frozenset({*NESTED, "app", "_orig_mod"})
"""What may stand before the names of weights, the wrappers of torch among it."""


@dataclass(frozen=True, kw_only=True)
class SplitTensor:
    """A tensor of a distributed checkpoint; its values are read when asked for."""

    directory: Path
    described: Described

    @property
    def shape(self) -> tuple[int, ...]:
        return self.described.shape

    @property
    def files(self) -> set[Path]:
        """Where its pieces lie."""
        return {self.directory / p.place.file for p in self.described.pieces if p.place}

    def read(self) -> Tensor:
        """The whole tensor, in its stored format. Raises MeasurementError, naming the file, where a
        piece is missing or damaged, and where the pieces do not make up the tensor."""
        d = self.described
        if not _fills(d.shape, d.pieces):
            raise self._error("its pieces do not make up the tensor")
        if len(d.pieces) == 1:  # the pieces fill it, so this is all of it
            return self._piece(d.pieces[0])
        parts = [(piece, self._checked(piece)) for piece in d.pieces]  # before any memory is taken
        whole = torch.empty(d.shape, dtype=d.dtype)
        for piece, _ in parts:
            where = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
            whole[where] = self._piece(piece)
        return whole

    def _piece(self, piece: Piece) -> Tensor:
        place = self._checked(piece)
        path = self.directory / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                stored = io.BytesIO(file.read(place.length))
            tensor = torch.load(stored, map_location="cpu", weights_only=True)
        except Exception as error:  # a parser on foreign bytes: anything may come out of it
            raise self._error(f"{place.file} is damaged: {one_line(error)}") from error
        d = self.described
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (
            piece.shape,
            d.dtype,
        ):
            raise self._error(f"{place.file} holds something else where it should be")
        return tensor

    def _checked(self, piece: Piece) -> Place:
        """Where a piece lies, if the file reaches that far and what lies there can be a piece."""
        place = piece.place
        if place is None:
            raise self._error("the metadata does not say where it is stored")
        path = self.directory / place.file
        if not path.is_file():
            raise self._error(f"{place.file} is missing")
        if place.offset + place.length > path.stat().st_size:
            raise self._error(f"{place.file} is truncated")
        if place.transformed:
            raise self._error(f"{place.file} is compressed, which numdev does not read")
        if math.prod(piece.shape) * self.described.dtype.itemsize > place.length:
            raise self._error(f"{place.file} has too few bytes for it")
        return place

    def _error(self, what: str) -> MeasurementError:
        return MeasurementError(f"{self.directory}: {self.described.name}: {what}", hint=FETCH)


def open_distributed(directory: Path, nested: tuple[str, ...]) -> dict[str, SplitTensor]:
    """The tensors of a distributed checkpoint by name: those of the state dict under the first key
    of `nested` that holds any, named as they are in it; else all. Raises MeasurementError where the
    metadata cannot be read or holds no tensor."""
    found = read_metadata(directory)
    if not found:
        raise MeasurementError(f"{directory}: holds no tensor", hint="save model.state_dict()")
    head = next((h for key in nested for d in found if (h := _head(d.path, key))), ())
    named = [(".".join(d.path[len(head) :]) if head else d.name, d) for d in found]
    return {
        name: SplitTensor(directory=directory, described=d)
        for name, d in named
        if d.path[: len(head)] == head
    }


def files_of(directory: Path, tensors: Mapping[str, SplitTensor]) -> tuple[Path, ...]:
    """The metadata and the files that hold these tensors, as far as they are there."""
    files = set().union(*(tensor.files for tensor in tensors.values()))
    return (directory / METADATA, *sorted(f for f in files if f.is_file()))


def nested_under(names: Iterable[str], own: Iterable[str]) -> str:
    """What stands before most of a model's own names among the stored ones, of the keys that
    training scripts nest a state dict under: `model.`, `state_dict.model.`, or nothing."""
    wanted = set(own)
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        keys = itertools.takewhile(lambda part: part in WRAPPERS, parts[:-1])
        for depth in range(len(list(keys)) + 1):
            if ".".join(parts[depth:]) in wanted:
                counts["".join(f"{part}." for part in parts[:depth])] += 1
    return max(counts, key=lambda prefix: (counts[prefix], -len(prefix)), default="")


def under(prefix: str, tensors: Mapping[str, SplitTensor]) -> dict[str, SplitTensor]:
    """The tensors whose names begin so, named without it."""
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}


def taken_off(tensors: Mapping[str, SplitTensor]) -> str:
    """What stands before the names of these tensors in the metadata, and no longer here."""
    found = {x.described.name.removesuffix(n) for n, x in tensors.items()}
    return found.pop() if len(found) == 1 else ""


def _head(path: tuple[str, ...], key: str) -> tuple[str, ...]:
    """The keys down to this one, which must have something below it; else none."""
    return path[: path.index(key) + 1] if key in path[:-1] else ()


def _fills(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
    """Whether the pieces are blocks within the shape that cover it once."""
    if any(len(p.start) != len(shape) or len(p.shape) != len(shape) for p in pieces):
        return False
    within = all(
        a + n <= size for p in pieces for a, n, size in zip(p.start, p.shape, shape, strict=True)
    )
    enough = sum(math.prod(p.shape) for p in pieces) == math.prod(shape)
    apart = not any(_overlap(p, q) for p, q in itertools.combinations(pieces, 2))
    return bool(pieces) and within and enough and apart


def _overlap(p: Piece, q: Piece) -> bool:
    ends = zip(p.start, p.shape, q.start, q.shape, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in ends)
