"""Opens sets of weights and reads tensors by name, one at a time, wherever they are
stored; without a model.

A set of weights is a safetensors file, the index of a sharded one, a file that torch.save
wrote, a directory of either, a directory of `torch.distributed.checkpoint`, or `demo`.
Opening reads headers. A file that cannot be read does not stop the others: it is in
`damage`, which a comparison reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from numdev.errors import MeasurementError, UsageError
from numdev.request_models import demo_checkpoint
from numdev.sources import tensor_files as storage
from numdev.sources.checkpoint import WHOLE
from numdev.sources.containers import (
    INDEX,
    Container,
    StoredTensor,
    container_at,
    containers_at,
    is_weights,
)

ACCEPTED = (
    "a .safetensors, .pt, .pth or .bin file, the .index.json of a sharded one, a "
    "directory of weights, a torch.distributed.checkpoint directory, or `demo`"
)


@dataclass(kw_only=True)
class WeightSet:
    """An opened set of weights, its tensors in the order of the files. Tensors are read
    when they are asked for, one at a time."""

    name: str  # as the user named it
    # The files that exist, which `sources.files.identity` hashes
    files: tuple[Path, ...] = ()
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    # In a pickle, names that share the storage of another, by which `tensors` has it
    tied: dict[str, str] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)  # why files cannot be read

    def find(self, name: str) -> StoredTensor | None:
        """Returns the stored tensor of this name, also by a name in `tied`; None where
        the set has no such name. Nothing is read."""
        return self.tensors.get(self.tied.get(name, name))


def open_weights(target: str) -> WeightSet:
    """Returns the weights at a path, or the demo's (`demo`), opened: headers are read,
    tensors are not. A prefix that all names have is left out of them. What is wrong with
    a damaged file stands in `damage`, and there may be no tensor left. Raises UsageError
    where a path does not exist, has no weights or several sets, and for a name that two
    files have."""
    path = demo_checkpoint() if target == "demo" else Path(target)
    if not path.exists():
        raise UsageError(f"{target}: no such file or directory", hint=f"give {ACCEPTED}")
    weights = WeightSet(name=target)
    try:
        for container in _weight_containers(path):
            _add_container(weights, container)
    except MeasurementError as error:
        weights.damage.append(error.message)
    names = [*weights.tensors, *weights.tied]
    n = len(storage.common_prefix(names)) if names else 0
    weights.tensors = {name[n:]: x for name, x in weights.tensors.items()}
    weights.tied = {name[n:]: other[n:] for name, other in weights.tied.items()}
    return weights


def _weight_containers(path: Path) -> Sequence[Container]:
    """Returns the containers of weights at a path: that of a file, or of a directory
    which is one itself. In another directory it is the first file (or index) that
    transformers would read; else the only index; else all files of a kind that belongs
    together; else the only file of weights. Raises UsageError where there is none, or
    several."""
    if is_weights(path):
        return containers_at(path, lack=True)
    if path.is_file():
        raise UsageError(f"{path}: is not a file of weights", hint=f"give {ACCEPTED}")
    usual = [path / name for whole in WHOLE for name in (whole, f"{whole}{INDEX}")]
    chosen = [file for file in usual if file.is_file()][:1]
    chosen = chosen or sorted(path.glob(f"*{INDEX}"))
    files = [container_at(file) for file in sorted(path.iterdir()) if not file.is_dir()]
    inside = [container for container in files if container is not None]
    joined = [container for container in inside if container.is_joined]
    if not chosen and joined:
        return joined
    chosen = chosen or [container.path for container in inside]
    if len(chosen) != 1:
        has = "has no weights that numdev reads"
        if chosen:
            has = f"has {len(chosen)} sets of weights"
        raise UsageError(f"{path}: {has}", hint=f"give {ACCEPTED}")
    return containers_at(chosen[0], lack=True)


def _add_container(weights: WeightSet, container: Container) -> None:
    """Adds a container's tensors and files to the set, in place. Where the container is
    damaged or a file is missing, a sentence on it is added to `damage`; tensors before
    the damage stay. Raises UsageError for a name that another file has too."""
    first: dict[object, str] = {}  # of each tie, the name that is listed
    try:
        for file in container.files:
            if not file.is_file():
                raise MeasurementError(f"{file}: is missing")
        weights.files += container.files
        for stored in container.tensors():
            name, tie = stored.name, stored.tie
            if tie is not None and first.setdefault(tie, name) != name:
                weights.tied[name] = first[tie]
            elif name in weights.tensors:
                raise UsageError(
                    f"{container.path}: {name} is in another file too",
                    hint="give one of them",
                )
            else:
                weights.tensors[name] = stored
    except MeasurementError as error:
        weights.damage.append(error.message)
