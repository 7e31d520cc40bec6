"""One training step of a model, for the gradient of its loss at every attention's output.

Calls are held during the forward pass and their gradients asked of autograd in one go, from the
places in the graph (edges) where the outputs were made. That is what a hook on each output would be
given, and it stays right where the model overwrites an output. Calls are then handed over in the
order they were made and dropped one by one. Measuring inside hooks instead would keep the graph of
all earlier layers in memory while a layer is measured, would run kernels' own backward passes
inside a backward pass, and on a GPU outside the main thread, where an interrupt does not arrive.

What is in memory is one training step without the gradients of its parameters: while it runs, what
autograd saves; while calls are measured, the q, k, v and dO of those that are left.

Parameters take no gradients meanwhile. The graph begins at the first attention's output, so that
nothing below it is kept.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.sources.loss import Upstream

TENSORS = ("q", "k", "v", "mask", "sinks")


@dataclass(kw_only=True, eq=False)
class _Held:
    """A call that waits for its gradient."""

    case: AttentionCase
    edge: GradientEdge | None
    """Where in the graph its output was made; None for a call made without gradients."""
    versions: tuple[int, ...]
    grad_out: Tensor | None = None


class TrainingStep:
    """The calls of one forward pass until their gradients are there."""

    def __init__(self, upstream: Upstream) -> None:
        assert upstream.loss is not None
        self.upstream, self.loss = upstream, upstream.loss
        self.held: deque[_Held] = deque()

    def hold(self, case: AttentionCase, out: Tensor) -> Tensor:
        """Keep the call; the same output for the model to go on with, which has a gradient."""
        edge = None
        if torch.is_grad_enabled():
            if not out.requires_grad:  # cloned, for a leaf must not be overwritten
                out = out.detach().requires_grad_().clone()
            edge = get_gradient_edge(out)
        case = dataclasses.replace(
            case, **{n: x.detach() for n in TENSORS if (x := getattr(case, n)) is not None}
        )
        self.held.append(_Held(case=case, edge=edge, versions=_versions(case)))
        return out

    def differentiate(self, loss: Tensor | None) -> None:
        """The gradient of `loss` for every call; the graph is gone afterwards.

        Raises MeasurementError where the model has since overwritten what it attended over.
        """
        for call in self.held:
            if call.versions != _versions(call.case):
                raise MeasurementError(
                    f"{call.case.ref.module}: the model overwrites what it attended over",
                    hint="its gradients cannot be audited; its forward pass can",
                )
        reached = [call for call in self.held if call.edge is not None]
        edges = [call.edge for call in reached if call.edge is not None]
        if loss is not None and loss.requires_grad and edges:
            found = torch.autograd.grad(loss, edges, allow_unused=True)
            for call, grad in zip(reached, found, strict=True):
                call.grad_out = grad
        for call in self.held:
            call.edge = None

    def hand_over(self, on_call: Callable[[AttentionCase], None]) -> tuple[str, ...]:
        """Every call with its gradient, in the order they were made; none is kept.

        Where the loss has no gradient for a call, or only zeros, or one that is not finite, it is
        drawn. Returns the names of these.
        """
        drawn = []
        while self.held:
            case = self._with_gradient(self.held.popleft())
            if case.grad_out_from != self.loss:
                drawn.append(case.ref.case)
            on_call(case)
        return tuple(drawn)

    def _with_gradient(self, call: _Held) -> AttentionCase:
        case, grad = call.case, call.grad_out
        if grad is None or not bool(grad.isfinite().all()) or not bool(grad.any()):
            return self.upstream.draw(case)
        grad = grad.reshape(*case.q.shape[:3], case.v.shape[3])
        if 0 in grad.stride():  # the gradient of a sum is one number, expanded
            grad = grad.contiguous()
        return dataclasses.replace(case, grad_out=grad, grad_out_from=self.loss)


@contextmanager
def tracing(model: nn.Module, step: TrainingStep | None) -> Iterator[None]:
    """Run the model for this training step, with gradients but for its parameters; without a step,
    without gradients."""
    learning = [p for p in model.parameters() if p.requires_grad and step is not None]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with torch.set_grad_enabled(step is not None):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _versions(case: AttentionCase) -> tuple[int, ...]:
    """How often each tensor was written to. PyTorch counts over all views of one memory."""
    tensors = (x for n in TENSORS if (x := getattr(case, n)) is not None)
    return tuple(0 if x.is_inference() else x._version for x in tensors)
