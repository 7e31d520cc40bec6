"""From a request to the model of its checkpoint: whole, or streamed from disk.

A directory or the demo is a checkpoint that says itself which model it is
(`numdev.sources.checkpoint`), a file or a bare distributed checkpoint a state dict with a factory
(`numdev.sources.statedict`). The first can be streamed (`numdev.sources.streaming`): where that is
asked for, and where its weights are too large to be loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from numdev.config import AuditRequest, demo_checkpoint
from numdev.errors import MeasurementError, UsageError
from numdev.formats import dtype_of, format_named
from numdev.sources.checkpoint import Checkpoint, open_checkpoint
from numdev.sources.statedict import StateDict, is_distributed, open_state_dict
from numdev.sources.streaming import Streamed
from numdev.system import System, free_memory

FILLED = 0.8
"""How much of the free memory a whole model may take; an audit needs some beside it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A model that can be run; if it is streamed, within `streamed.running`."""

    checkpoint: Checkpoint | StateDict
    model: nn.Module
    streamed: Streamed | None = None
    notes: tuple[str, ...] = ()
    """What a user should be told at once."""


def open_model(request: AuditRequest, system: System) -> Opened:
    """The request's model on the system's device.

    Raises UsageError for a request that cannot be met, MeasurementError for a damaged checkpoint,
    and for one that holds other weights than its model's.
    """
    checkpoint = open_weights(request)
    dtype = dtype_of(format_named(request.model_dtype))
    why = _why_streamed(request, checkpoint, dtype, system)
    if why is None or isinstance(checkpoint, StateDict):
        model = checkpoint.load_model(dtype=dtype, device=system.device)
        return Opened(checkpoint=checkpoint, model=model)
    streamed = Streamed(checkpoint.deferred_model(dtype=dtype), device=system.device)
    note = f"The model's weights are streamed from disk, layer by layer{why}."
    return Opened(checkpoint=checkpoint, model=streamed.model, streamed=streamed, notes=(note,))


def open_weights(request: AuditRequest) -> Checkpoint | StateDict:
    """Open the request's checkpoint or state dict without loading its weights. Raises as
    `open_model` does."""
    path = demo_checkpoint() if request.checkpoint == "demo" else Path(request.checkpoint or "")
    if path.is_dir() and not is_distributed(path) and any(path.glob("*.distcp")):
        raise MeasurementError(
            f"{path}: .metadata is missing, the last file of a distributed checkpoint",
            hint="fetch the checkpoint again, or take one whose save has ended",
        )
    distributed = is_distributed(path) and not (path / "config.json").is_file()
    if path.is_file() or distributed or (request.model and is_distributed(path)):
        return open_state_dict(path, request.model)
    if request.model:
        raise UsageError(
            f"{request.checkpoint}: says itself which model it is, so --model has no place",
            hint="leave it out, or give the weight file instead of the directory",
        )
    return open_checkpoint(path)


def _why_streamed(
    request: AuditRequest, checkpoint: Checkpoint | StateDict, dtype: torch.dtype, system: System
) -> str | None:
    """What a note adds on why the model is streamed; None where it is not."""
    if isinstance(checkpoint, StateDict):
        if request.stream:
            raise UsageError(
                f"--stream: the factory {checkpoint.factory} builds its model whole",
                hint="leave --stream out, or give a Hugging Face directory",
            )
        return None
    if request.stream is not None:
        return "" if request.stream else None
    why = _too_large(checkpoint.size_in(dtype), system)
    if why and request.gradients:
        raise UsageError(
            f"{checkpoint.path}: its weights cannot be loaded whole ({why}), as the gradients of a "
            "model's own loss need them",
            hint="numdev audit --stream draws upstream gradients; --no-stream loads all the same",
        )
    return f", since {why}" if why else None


def _too_large(size: int | None, system: System) -> str | None:
    """Why weights of so many bytes are not loaded whole; None where they can be, or nobody
    knows."""
    for place, free in free_memory(system.device).items():
        if size is not None and size > FILLED * free:
            return f"they take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of {place} are free"
    return None
