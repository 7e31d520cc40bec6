"""Weights by name, one tensor at a time, wherever they are stored; without a model.

A set of weights is a safetensors file, the index of a sharded one, what torch.save wrote,
a directory of either, a directory of `torch.distributed.checkpoint`, or `demo`. Opening
reads headers. A file that cannot be read does not stop the rest: it is in `damage`, which
a comparison reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from numdev.config import demo_checkpoint
from numdev.errors import MeasurementError, UsageError
from numdev.sources import files as storage
from numdev.sources.checkpoint import INDEX, SUFFIXES, WHOLE, read_on
from numdev.sources.files import is_distributed, open_distributed

ACCEPTED = (
    "a .safetensors, .pt, .pth or .bin file, the .index.json of a sharded one, a "
    "directory of "
    "weights, a torch.distributed.checkpoint directory, or `demo`"
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor's shape, and how to read it, as it is stored, on the CPU. Reading raises
    MeasurementError, naming the file."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(kw_only=True)
class Weights:
    """An opened set of weights, its tensors in the order of the files."""

    name: str  # as the user named it
    # Those that are there, which `sources.files.identity` hashes
    files: tuple[Path, ...] = ()
    tensors: dict[str, Stored] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """Names in a pickle that share the storage of another, which is the one in
    `tensors`."""
    damage: list[str] = field(default_factory=list)  # why files cannot be read

    def find(self, name: str) -> Stored | None:
        """The tensor of this name, by whichever of its names it is listed."""
        return self.tensors.get(self.tied.get(name, name))


def open_weights(target: str) -> Weights:
    """Open the weights at a path, or the demo's; prefixes common to all names are left
    out. Damaged files are no error here, and there may be no tensor left. Raises
    UsageError where there are none, or not clear which are meant."""
    path = demo_checkpoint() if target == "demo" else Path(target)
    if not path.exists():
        raise UsageError(f"{target}: no such file or directory", hint=f"give {ACCEPTED}")
    weights = Weights(name=target)
    try:
        if is_distributed(path):
            _, split, weights.files = open_distributed(path)
            weights.tensors = {
                n: Stored(shape=x.shape, read=x.read) for n, x in split.items()
            }
        else:
            for file in _files(path):
                _add(weights, file)
    except MeasurementError as error:
        weights.damage.append(error.message)
    names = [*weights.tensors, *weights.tied]
    n = len(storage.common_prefix(names)) if names else 0
    weights.tensors = {name[n:]: x for name, x in weights.tensors.items()}
    weights.tied = {name[n:]: other[n:] for name, other in weights.tied.items()}
    return weights


def _files(path: Path) -> list[Path]:
    """The files meant by a path. Of a directory: what transformers reads; else its only
    index, all its safetensors files, or its only pickle."""
    if path.name.endswith(INDEX):
        return list(storage.shards(path, lack=True))
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UsageError(f"{path}: is not a file of weights", hint=f"give {ACCEPTED}")
        return [path]
    usual = [path / name for whole in WHOLE for name in (whole, f"{whole}{INDEX}")]
    indexes, safe = sorted(path.glob(f"*{INDEX}")), sorted(path.glob("*.safetensors"))
    pickles = sorted(p for p in path.iterdir() if p.suffix in storage.PICKLES)
    chosen = [file for file in usual if file.is_file()][:1] or indexes
    if not chosen and safe:
        return safe
    chosen = chosen or pickles
    if len(chosen) != 1:
        has = (
            f"has {len(chosen)} sets of weights"
            if chosen
            else "has no weights that numdev reads"
        )
        raise UsageError(f"{path}: {has}", hint=f"give {ACCEPTED}")
    return _files(chosen[0])


def _add(weights: Weights, file: Path) -> None:
    """List a file's tensors, or what is wrong with it."""
    places: dict[object, str] = {}
    try:
        if not file.is_file():
            raise MeasurementError(f"{file}: is missing")
        weights.files += (file,)
        for name, stored, place in _listed(file):
            if place is not None and places.setdefault(place, name) != name:
                weights.tied[name] = places[place]
            elif name in weights.tensors:
                raise UsageError(
                    f"{file}: {name} is in another file too", hint="give one of them"
                )
            else:
                weights.tensors[name] = stored
    except MeasurementError as error:
        weights.damage.append(error.message)


def _listed(file: Path) -> Iterator[tuple[str, Stored, object]]:
    """Name, shape and reader of each tensor, and in a pickle where its values are."""
    if file.suffix in storage.PICKLES:
        for name, x in storage.read(file):
            # A nested tensor has no shape, and is refused when it is compared.
            shape = () if x.is_nested else tuple(x.shape)
            yield name, Stored(shape=shape, read=x.detach), storage.held_at(x)
        return
    with storage.open_safetensors(file) as handle:
        for name in handle.offset_keys():
            shape = tuple(handle.get_slice(name).get_shape())
            yield name, Stored(shape=shape, read=partial(read_on, file, name)), None
