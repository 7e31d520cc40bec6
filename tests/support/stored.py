"""State dicts stored as others store them: in shards with an index, by torch.distributed,
and as an attacker would."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor


def sharded(directory: Path, state: Mapping[str, Tensor]) -> Path:
    """The state's even and odd tensors, by name, in two files of safetensors; the
    index."""
    directory.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(state), {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: state[n] for n in part}, directory / shard)
        weight_map.update(dict.fromkeys(part, shard))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def distributed(directory: Path, state: dict[str, Any]) -> Path:
    """What torch.distributed.checkpoint writes from one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        dcp.save(state, checkpoint_id=directory)
    return directory


class Calls:
    """What a hostile pickle holds: unpickling it calls something."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]
