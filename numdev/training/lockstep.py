"""The variants of one seed, side by side: the same batch for all at every step.

Saved states are plain tensors and numbers, loaded as such
(`weights_only=True`), and take their name only when they are complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from numdev.errors import MeasurementError
from numdev.training.config import TrainRequest
from numdev.training.data import Data
from numdev.training.lane import Lane
from numdev.training.measure import distances, row_of
from numdev.training.report import DistanceRow, TrainRow

STATE = "state.pt"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What was measured at one step."""

    step: int
    rows: list[TrainRow]
    distances: list[DistanceRow]


class Lockstep:
    """All lanes of a seed at one step, 0 to begin with."""

    def __init__(self, request: TrainRequest, data: Data, seed: int, device: torch.device) -> None:
        self.request, self.data, self.seed = request, data, seed
        self.step = 0
        self.whole = True
        """Whether all lanes are at this step: not within a step, nor after one that broke off."""
        self.lanes = [
            Lane(variant, request.model, data.vocabulary, seed, device)
            for variant in request.variants
        ]
        self.golden = next(lane for lane in self.lanes if lane.variant.role == "golden")

    def advance(self) -> None:
        """The next step of every lane. Where it is a recorded one, attention is watched."""
        step = self.step + 1
        watched = step in self.request.recorded
        self.whole = False
        orders = {lane.variant.data_order for lane in self.lanes}
        batches = {order: self.data.batch(self.seed + order, step) for order in orders}
        for lane in self.lanes:
            lane.attention.largest = [] if watched else None
            lane.step(batches[lane.variant.data_order], step, self.request.steps)
        self.step, self.whole = step, True

    def measured(self) -> Recorded:
        """The rows of this step, every variant's: its own, and its distances from the golden run's
        weights. At step 0 from its gradient too, for the first batch."""
        found: list[DistanceRow] = []
        golden = self.golden.weights()
        others = [lane for lane in self.lanes if lane is not self.golden]
        for lane in others:
            found += distances(
                lane.weights(),
                golden,
                seed=self.seed,
                variant=lane.variant.name,
                step=self.step,
                of="weights",
            )
        if self.step == 0:
            found += self._of_gradients(others)
        rows = [row_of(lane, self.seed, self.step) for lane in self.lanes]
        return Recorded(step=self.step, rows=rows, distances=found)

    def _of_gradients(self, others: list[Lane]) -> Iterator[DistanceRow]:
        golden = self._gradient(self.golden)
        for lane in others:
            ours, name = self._gradient(lane), lane.variant.name
            yield from distances(ours, golden, seed=self.seed, variant=name, step=0, of="gradient")

    def _gradient(self, lane: Lane) -> dict[str, torch.Tensor]:
        return lane.gradient(self.data.batch(self.seed + lane.variant.data_order, 1))

    def save(self, path: Path, run: str) -> None:
        """Write the state, for the run of this name; atomically. Raises MeasurementError where it
        cannot be written."""
        state = {
            "run": run,
            "seed": self.seed,
            "step": self.step,
            "lanes": {lane.variant.name: lane.state() for lane in self.lanes},
        }
        written = partly(path)
        try:
            torch.save(state, written)
            os.replace(written, path)
        except (OSError, RuntimeError) as error:  # RuntimeError is torch's for a full disk
            raise MeasurementError(
                f"{path}: the state cannot be saved", hint="is there room, and may you write there?"
            ) from error
        finally:
            written.unlink(missing_ok=True)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state of this run and seed."""
        for lane in self.lanes:
            lane.load(state["lanes"][lane.variant.name])
        self.step = state["step"]


def partly(path: Path) -> Path:
    """What a state is called until it is complete."""
    return path.with_name(f".{path.name}.partly")


def read_state(path: Path, run: str) -> dict[str, Any] | None:
    """The saved state of the run of this name; None where there is none that can be read."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception:  # a damaged file is no reason not to train: it begins again
        return None
    return state if isinstance(state, dict) and state.get("run") == run else None


class Saving:
    """When a state is to be saved: every so many seconds."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.last = every_s, time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self.last >= self.every_s

    def done(self) -> None:
        self.last = time.monotonic()
