"""A training step recorded once and replayed: CUDA graphs.

The step of a small network is a thousand short launches, and the host takes longer to ask for them
than the device to run them. Recorded as a graph they are asked for at once; the results are the
same bits (tests/test_training_gpu.py). Only what asks the host nothing can be recorded. A recording
keeps the memory of its step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from numdev.training.models import Batch

RECORDABLE = frozenset({"baseline", "sdpa-flash", "triton-flash", "emulated"})
"""Kernels that never wait for the device, as tests/test_training_gpu.py has seen."""
FIRST = 3
"""Steps that run as they are: they make the optimiser's state, and compile what is compiled."""
Run = Callable[[Batch], tuple[Tensor, Tensor]]


class Replay:
    """A function of a batch that gives two scalars on the device, run as it is at first and
    replayed from then on. It is the same at every call, and given with each, since what it belongs
    to holds this: a cycle would keep the memory of both. Shapes of batches must not change, and
    neither may the addresses of what it reads and writes."""

    def __init__(self, device: torch.device, noise: torch.Generator | None) -> None:
        self.device, self.noise, self.ran = device, noise, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._batch: dict[str, Tensor] = {}
        self._results: tuple[Tensor, Tensor] | None = None

    def __call__(self, run: Run, batch: Batch, *, plain: bool) -> tuple[Tensor, Tensor]:
        """What `run` gives; `plain`: by running it, whatever was recorded."""
        self.ran += 1
        if plain or self.ran <= FIRST:
            return run(batch)
        if self.graph is None:
            self.graph = self._recorded(run, batch)
        assert self._results is not None
        for name, x in batch.items():
            self._batch[name].copy_(x)
        self.graph.replay()
        return self._results

    def _recorded(self, run: Run, batch: Batch) -> torch.cuda.CUDAGraph:
        """Record a run without running it. Raises what the run raises."""
        self._batch = {name: x.clone() for name, x in batch.items()}
        graph = torch.cuda.CUDAGraph()
        if self.noise is not None:
            graph.register_generator_state(self.noise)
        torch.cuda.synchronize(self.device)
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        before = default.get_state()
        failed: BaseException | None = None
        try:
            with torch.cuda.graph(graph):
                try:
                    self._results = run(self._batch)
                except BaseException as error:
                    failed = error
        except RuntimeError as error:  # a recording that failed cannot be ended either
            failed = failed or error
        if failed is not None:
            # It would go on believing that a graph is recorded, and draw no number ever again.
            fresh = torch.Generator(default.device)
            fresh.set_state(before)
            default.graphsafe_set_state(fresh.graphsafe_get_state())
            raise failed
        return graph
