"""Weights by name, one tensor at a time, wherever they are stored.

A set of weights is a safetensors file, a sharded one (its index), what torch.save wrote (a state
dict, itself or where training scripts put it), a directory of either, a directory of
`torch.distributed.checkpoint`, or `demo`. No configuration and no model class is needed. Opening
reads headers; a tensor's values are read when they are asked for.

What is damaged does not stop the rest: it is kept in words, with the names of the tensors that
were in it as far as anybody says, and whoever compares weights must report it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from numdev.config import demo_checkpoint
from numdev.errors import MeasurementError, UsageError
from numdev.sources import files as storage
from numdev.sources.checkpoint import WHOLE
from numdev.sources.dcp import METADATA, files_of, open_distributed
from numdev.sources.files import common_prefix, state_in
from numdev.sources.statedict import INDEX, SUFFIXES

ACCEPTED = (
    "a .safetensors, .pt, .pth or .bin file, the .index.json of a sharded one, a directory of "
    "weights, a torch.distributed.checkpoint directory, or `demo`"
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor that is there: its shape, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """In its stored format, on the CPU. Raises MeasurementError, naming the file."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A file of which nothing can be read, in words, and which tensors were in it."""

    words: str
    tensors: tuple[str, ...] = ()
    """Empty where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """An opened set of weights."""

    name: str
    """As the user named it."""
    files: tuple[Path, ...] = ()
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    """In the order of the files; what shares its storage in a pickle once."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The other names of such tensors, each with the name that is in `tensors`."""
    damage: tuple[Damage, ...] = ()
    prefix: str = ""
    """What was taken off all names."""

    def find(self, name: str) -> Stored | None:
        """The tensor of this name, by whichever of its names it is kept."""
        return self.tensors.get(self.tied.get(name, name))

    def is_lost(self, name: str) -> bool:
        """Whether the tensor is known to have been in a file that cannot be read."""
        return any(name in damage.tensors for damage in self.damage)

    def identity(self) -> str:
        """SHA-256 over the names and contents of the files that are there."""
        return storage.identity(self.files)


def open_weights(target: str) -> Weights:
    """Open the weights at a path, or the demo's.

    Raises UsageError where there are none, or where it is not clear which are meant. Damaged files
    are no error here: they are in `damage`, and there may be no tensor left.
    """
    path = demo_checkpoint() if target == "demo" else Path(target)
    if not path.exists():
        raise UsageError(f"{target}: no such file or directory", hint=f"give {ACCEPTED}")
    try:
        if (path / METADATA).is_file():
            found = open_distributed(path)
            tensors = {name: Stored(shape=x.shape, read=x.read) for name, x in found.items()}
            weights = Weights(name=target, files=files_of(path), tensors=tensors)
        else:
            weights = _gathered(target, _files(path))
    except MeasurementError as error:
        return Weights(name=target, damage=(Damage(words=error.message),))
    return _unprefixed(weights)


def _files(path: Path) -> dict[Path, tuple[str, ...]]:
    """The weight files meant by a path, and the names of the tensors in each where an index says.

    Of a directory: what transformers reads; else its only index, all its safetensors files, or
    its only pickle.
    """
    if path.name.endswith(INDEX):
        named: dict[Path, tuple[str, ...]] = {}
        for tensor, file in storage.weight_map(path).items():
            named[file] = (*named.get(file, ()), tensor)
        return dict(sorted(named.items()))
    if not path.is_dir():
        if path.suffix not in SUFFIXES:
            raise UsageError(f"{path}: is no file of weights", hint=f"give {ACCEPTED}")
        return {path: ()}
    usual = [path / name for whole in WHOLE for name in (whole, f"{whole}.index.json")]
    indexes = sorted(path.glob(f"*{INDEX}"))
    safe = sorted(path.glob("*.safetensors"))
    pickles = sorted(p for p in path.iterdir() if p.suffix in storage.PICKLES)
    meant = next((file for file in usual if file.is_file()), None)
    if meant or len(indexes) == 1:
        return _files(meant or indexes[0])
    if not indexes and safe:
        return dict.fromkeys(safe, ())
    if not indexes and len(pickles) == 1:
        return {pickles[0]: ()}
    several = storage.some([p.name for p in indexes or pickles])
    if several:
        raise UsageError(
            f"{path}: has several sets of weights ({several})", hint="give one of these files"
        )
    raise UsageError(f"{path}: has no weights that numdev reads", hint=f"give {ACCEPTED}")


def _gathered(target: str, files: Mapping[Path, tuple[str, ...]]) -> Weights:
    """The tensors of all files that can be read, and what is to be said of the others."""
    pickled = lru_cache(maxsize=1)(_state)  # unpickled once, one at a time

    def read(file: Path, name: str) -> Tensor:
        """A safetensors file is mapped anew for each: what was read counts as memory until then."""
        try:
            if file.suffix in storage.PICKLES:
                return pickled(file)[name]
            with storage.open_safetensors(file) as handle:
                found: Tensor = handle.get_tensor(name)
            return found
        except (SafetensorError, KeyError, AttributeError, RuntimeError) as error:
            raise MeasurementError(
                f"{file}: {name} cannot be read: {storage.one_line(error)}", hint=storage.FETCH
            ) from error

    tensors: dict[str, Stored] = {}
    holder: dict[str, Path] = {}
    tied: dict[str, str] = {}
    damage = []
    for file, expected in files.items():
        try:
            shapes, same = _listed(file)
        except MeasurementError as error:
            damage.append(Damage(words=error.message, tensors=expected))
            continue
        for name, shape in shapes.items():
            if name in holder:
                raise UsageError(
                    f"{holder[name]} and {file.name} both hold {name}", hint="give one of them"
                )
            holder[name] = file
            tensors[name] = Stored(shape=shape, read=partial(read, file, name))
        tied |= same
    there = tuple(file for file in files if file.is_file())
    return Weights(name=target, files=there, tensors=tensors, tied=tied, damage=tuple(damage))


def _listed(file: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of a file's tensors by name; and the other names of those that share storage."""
    if not file.is_file():
        raise MeasurementError(f"{file}: is missing", hint=storage.FETCH)
    if file.suffix not in storage.PICKLES:
        with storage.open_safetensors(file) as handle:
            names = handle.offset_keys()
            return {name: tuple(handle.get_slice(name).get_shape()) for name in names}, {}
    state = _state(file)
    first = dict(storage.distinct(file, state.items()))
    # distinct keeps the first of those that share: find which one for each it left out.
    places = {storage.held_at(x): name for name, x in reversed(first.items())}
    tied = {name: places[storage.held_at(x)] for name, x in state.items() if name not in first}
    # A nested tensor has no shape, and is refused when it is read.
    return {name: () if x.is_nested else tuple(x.shape) for name, x in first.items()}, tied


def _state(file: Path) -> dict[str, Tensor]:
    content = state_in(file, storage.read_pickle(file))
    return {str(name): x for name, x in content.items() if isinstance(x, Tensor)}


def _unprefixed(weights: Weights) -> Weights:
    """The same under names without the prefixes that all have."""
    lost = [name for damage in weights.damage for name in damage.tensors]
    names = [*weights.tensors, *weights.tied, *lost]
    prefix = common_prefix(names) if names else ""

    def bare(name: str) -> str:
        return name.removeprefix(prefix)

    return replace(
        weights,
        tensors={bare(name): x for name, x in weights.tensors.items()},
        tied={bare(name): bare(other) for name, other in weights.tied.items()},
        damage=tuple(replace(d, tensors=tuple(map(bare, d.tensors))) for d in weights.damage),
        prefix=prefix,
    )
