"""A training step recorded once and replayed: CUDA graphs.

The step of a small network is a thousand short launches, and the host takes longer to ask for them
than the device to run them. Recorded as a graph they are asked for at once. The launches are the
same ones, so are the results, bit for bit (tests/test_training_gpu.py).

Only what asks the host nothing can be recorded: no GradScaler, and kernels known to be so
(`RECORDABLE`). Steps on which attention is watched are not replayed. A recording keeps the memory
of its step for as long as it is there.
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
    """A function of a batch, run as it is at first and replayed from then on.

    It gives two scalars on the device. It is the same at every call, and given with each, since
    what it belongs to holds this: a cycle would keep the memory of both. Shapes of batches must not
    change, and neither may the addresses of what it reads and writes.
    """

    def __init__(self, device: torch.device, noise: torch.Generator | None) -> None:
        self.device, self.noise, self.ran = device, noise, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self._batch: dict[str, Tensor] = {}
        self._found: tuple[Tensor, Tensor] | None = None

    def __call__(self, run: Run, batch: Batch, *, plain: bool) -> tuple[Tensor, Tensor]:
        """What `run` gives; `plain`: by running it, whatever was recorded."""
        self.ran += 1
        if plain or self.ran <= FIRST:
            return run(batch)
        if self.graph is None:
            self._record(run, batch)
        assert self.graph is not None
        assert self._found is not None
        for name, x in batch.items():
            self._batch[name].copy_(x)
        self.graph.replay()
        return self._found

    def _record(self, run: Run, batch: Batch) -> None:
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
                    self._found = run(self._batch)
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
        self.graph = graph
