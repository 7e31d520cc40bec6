"""Trains the variants of one seed side by side: the same batch for all at every step.

Saved states are plain tensors and numbers, loaded as such (`weights_only=True`), and take
their name only when they are complete."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch.utils._pytree import keystr, tree_flatten_with_path

from numdev.sources.checkpoint import digest_of
from numdev.sources.tensor_files import naming
from numdev.studies.training.config import TrainRequest
from numdev.studies.training.initial_attention_error import output_rows
from numdev.studies.training.measure import distance_row, train_row
from numdev.studies.training.token_batches import Tokens
from numdev.studies.training.variant_training import Lane

STATE, PARTLY = "state.pt", ".state.pt.partly"  # the latter until it is complete
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
COMPILED = "TORCHINDUCTOR_DETERMINISTIC"


class Ran(BaseModel):
    """A variant and what its kernel says that it ran, in words; None where it says
    nothing."""

    variant: str
    ran: str | None


class Lockstep:
    """The lanes (variants in training) of one seed, all at the step `step`, at first 0.
    `whole` is false from the beginning of a step until all lanes have made it. Making one
    builds all networks; it raises UsageError for a kernel or option that there is not,
    MeasurementError, which names the variant, for whatever else fails."""

    def __init__(
        self, request: TrainRequest, data: Tokens, seed: int, device: torch.device
    ) -> None:
        self.request, self.data, self.seed = request, data, seed
        self.step, self.whole = 0, True
        self.lanes = [
            Lane(variant, request.model, data.vocabulary, seed, device)
            for variant in request.variants
        ]
        self.golden = next(lane for lane in self.lanes if lane.variant.role == "golden")

    def advance(self) -> None:
        """Makes the next update of every lane, on the same batch. At a recorded step each
        attention call notes its largest score. Raises MeasurementError, which names the
        variant, where a lane fails; `whole` stays false then, and some lanes may be a
        step ahead."""
        step = self.step + 1
        watched = step in self.request.recorded
        self.whole = False
        batch = self.data.batch(self.seed, step)
        for lane in self.lanes:
            lane.attention.largest = [] if watched else None
            lane.take_step(batch, step, self.request.steps)
        self.step, self.whole = step, True

    def measure_step(self) -> dict[str, list[BaseModel]]:
        """Returns the rows of this step by kind. `row`: one of each variant; `distance`:
        one of each variant but the golden one, of the weights. At step 0 also a
        `distance` of the gradient of the first batch, `output` (errors of attention's
        output), and `variant` (what each kernel ran); the last two lists are empty at
        other steps. Weights and random numbers of the lanes are left as they were. Raises
        MeasurementError, which names the variant, where a kernel fails."""
        tables: dict[str, list[BaseModel]] = {
            "row": [],
            "distance": [],
            "variant": [],
            "output": [],
        }
        read: dict[
            Literal["weights", "gradient"], Callable[[Lane], dict[str, torch.Tensor]]
        ] = {"weights": Lane.weights}
        if self.step == 0:
            first = self.data.batch(self.seed, 1)
            read["gradient"] = lambda lane: lane.gradient(first)
            calls = self.golden.attention_calls(first)
            tables["output"] = list(
                output_rows(self.lanes, self.golden, calls, self.seed)
            )
        others = [lane for lane in self.lanes if lane is not self.golden]
        for of, tensors in read.items():
            golden = tensors(self.golden)
            for lane in others:
                row = distance_row(
                    tensors(lane),
                    golden,
                    of=of,
                    seed=self.seed,
                    variant=lane.variant.name,
                    step=self.step,
                )
                tables["distance"].append(row)
        for lane in self.lanes:
            tables["row"].append(train_row(lane, self.seed, self.step))
            if self.step == 0:
                ran = Ran(variant=lane.variant.name, ran=lane.attention.ran or None)
                tables["variant"].append(ran)
        return tables

    def save_state(self, path: Path, run: str) -> None:
        """Writes the state to `path`, whole or not at all, replacing a file of that name.
        `run`: the name of the run, which `read_state` asks for. Raises MeasurementError
        where it cannot be written."""
        lanes = {lane.variant.name: lane.state() for lane in self.lanes}
        written = path.with_name(PARTLY)
        state = {"run": run, "seed": self.seed, "step": self.step, "lanes": lanes}
        state["digest"] = _state_digest(state)
        hint = "is there room, and may you write there?"
        with naming(path, "the state cannot be saved", hint):
            try:
                torch.save(state, written)
                written.replace(path)
            finally:
                written.unlink(missing_ok=True)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues from a state that `save_state` wrote, of the same variants; its seed
        is not looked at."""
        for lane in self.lanes:
            lane.load_state(state["lanes"][lane.variant.name])
        self.step = state["step"]


def read_state(path: Path, run: str) -> dict[str, Any]:
    """Returns the saved state of the run named `run`: `run`, `seed`, `step`, `lanes`.
    Empty where there is no file, and where it is damaged, edited or another run's, so
    that training begins again."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return {}
    if not isinstance(state, dict) or state.get("run") != run:
        return {}
    digest = state.pop("digest", None)
    return state if digest == _state_digest(state) else {}


def _state_digest(state: Mapping[str, object]) -> str:
    """Returns the SHA-256, in hexadecimal, of all tensors, numbers and strings of a
    state, and of their places in it."""
    leaves, _ = tree_flatten_with_path(state)
    return digest_of({keystr(path): leaf for path, leaf in leaves})


@contextmanager
def deterministic(*, wanted: bool) -> Iterator[None]:
    """Returns a context in which PyTorch uses deterministic algorithms alone, and
    operators that have none raise an error; if not `wanted`, a context that changes
    nothing. Settings, and two environment variables, are restored afterwards.

    cuBLAS reads its setting when CUDA starts, so enter this before. Memory is not filled
    before its use, as PyTorch would: nothing here reads what it did not write. Inductor
    is told by a variable, which it reads when a kernel that is compiled imports it:
    torch.use_deterministic_algorithms would import it, three seconds of CPU."""
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    filled = memory.fill_uninitialized_memory
    environment = {name: os.environ.get(name) for name in (WORKSPACE, COMPILED)}
    compiled = _inductor_is_deterministic()
    try:
        if wanted:
            os.environ.setdefault(WORKSPACE, ":4096:8")
            os.environ[COMPILED] = "1"
            _set_inductor_deterministic(True)
            torch.set_deterministic_debug_mode("error")
            memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = filled
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _set_inductor_deterministic(compiled)


def _inductor_settings() -> Any:
    """Returns the module of settings of Inductor, PyTorch's compiler; None where nothing
    has imported it. It is not imported."""
    return sys.modules.get("torch._inductor.config")


def _inductor_is_deterministic() -> bool:
    """Whether Inductor is set to be deterministic: by its settings, or, before these are
    imported, by the environment variable COMPILED."""
    settings = _inductor_settings()
    if settings is None:
        return os.environ.get(COMPILED) == "1"
    return bool(settings.deterministic)


def _set_inductor_deterministic(wanted: bool) -> None:
    """Sets in Inductor's settings whether it is deterministic; does nothing where they
    are not imported, or have no such setting."""
    settings = _inductor_settings()
    if settings is not None and hasattr(settings, "deterministic"):
        settings.deterministic = wanted
