"""Where upstream gradients (dO) come from: the model's own loss, or a seed.

A language model of transformers is asked to predict what it reads, a model with two
towers for its contrastive loss, any other is run as it is. Calls are held during the
forward pass and their gradients asked of autograd in one go, at the edges of the graph
where the outputs were made: right also where the model overwrites an output, and no graph
is held while calls are measured."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from numdev.cases import AttentionCase, transposed
from numdev.errors import MeasurementError
from numdev.formats import round_to
from numdev.sources.input_regimes import Draws

LANGUAGE = "the model's language-model loss"
MODEL_LOSS = "the model's own loss"
IGNORED = -100  # the label of a position that has none, by PyTorch's default


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """Where the upstream gradients of one run come from."""

    seed: int
    # Which loss of the model's, in words; None: gradients are drawn
    loss: str | None = None
    # The model takes to return the loss
    arguments: Mapping[str, object] = field(default_factory=dict)
    why_not: str = ""  # Why the model's loss is not used, where it has one

    def describe(self) -> str:
        """Returns where the gradients come from in words: which loss, or the seed that
        they are drawn from and why there is no loss. Never empty."""
        return self.loss or drawn_origin(self.seed) + (
            f" ({self.why_not})" if self.why_not else ""
        )


def find_upstream(model: nn.Module, inputs: Mapping[str, Tensor], seed: int) -> Upstream:
    """Returns where this model's upstream gradients on these inputs come from; runs the
    model once to see. A loss that raises, or is not finite, is not used, and `why_not`
    says so. Without a usable loss the gradients are drawn from `seed`."""
    words, arguments = MODEL_LOSS, dict[str, object]()
    if hasattr(model, "get_output_embeddings"):  # a model of transformers
        asks = inspect.signature(model.forward).parameters.keys() - inputs.keys()
        encodes = cast(Any, model).config.is_encoder_decoder
        decoder = "decoder_" if encodes else ""
        labels, mask = (
            inputs.get(f"{decoder}input_ids"),
            inputs.get(f"{decoder}attention_mask"),
        )
        embeddings: Any = model.get_output_embeddings
        if labels is not None and "labels" in asks and embeddings() is not None:
            if mask is not None and mask.shape == labels.shape:
                labels = labels.masked_fill(mask == 0, IGNORED)
            # A causal model shifts labels itself; what a decoder reads beside an encoder
            # is shifted already, so its labels are what follows.
            if encodes:
                labels = torch.cat(
                    [labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1
                )
            words, arguments = LANGUAGE, {"labels": labels}
        elif "return_loss" in asks:
            arguments = {"return_loss": True}
    try:
        with torch.no_grad():
            loss = loss_of(model(**to_model_device(model, {**inputs, **arguments})))
        why_not = "" if loss is None or loss.isfinite() else f"{words} is {loss.item()}"
    except (
        Exception
    ) as error:  # on the inputs alone it may yet run; if not, the capture says so
        loss, why_not = None, f"{words} raised {type(error).__name__}"
    if loss is None or why_not:
        return Upstream(seed=seed, why_not=why_not)
    return Upstream(seed=seed, loss=words, arguments=arguments)


def loss_of(answer: object) -> Tensor | None:
    """Returns the loss in what a model returned, a floating-point tensor without
    dimensions: its `loss` where it has one (an attribute, or else a key of a dict), else
    the answer itself. Of a tuple or list it is the only element that is such a tensor.
    None where there is none, or several."""
    of_keys = answer.get("loss") if isinstance(answer, Mapping) else answer
    loss = getattr(answer, "loss", of_keys)
    parts = loss if isinstance(loss, tuple | list) else [loss]
    numbers = [
        x
        for x in parts
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 0
    ]
    return numbers[0] if len(numbers) == 1 else None


def drawn_origin(seed: int) -> str:
    """Returns a drawn gradient's origin in words: `random from N(0, 1), seed 0`."""
    return f"random from N(0, 1), seed {seed}"


def with_drawn_gradient(case: AttentionCase, seed: int | None) -> AttentionCase:
    """Returns the case with a drawn grad_out: N(0, 1) from `seed` and the case's name,
    rounded to its format; where q is not contiguous, a view of [batch, length, heads,
    dim]. Returns the case itself where `seed` is None or it has a grad_out."""
    if seed is None or case.grad_out is not None:
        return case
    shape = (*case.q.shape[:3], case.v.shape[3])
    drawn = Draws(seed, case.ref.case).normal("grad_out", shape)
    x = round_to(drawn, case.format).to(case.q.device, case.q.dtype)
    x = x if case.q.is_contiguous() else transposed(x)
    return replace(case, grad_out=x, grad_out_from=drawn_origin(seed))


def to_model_device(model: nn.Module, inputs: Mapping[str, object]) -> dict[str, Any]:
    """Returns a new dict of the inputs. Where the model has a floating-point parameter,
    tensors are on the device of the first, and floating-point ones in its dtype. What is
    no tensor is unchanged."""
    home = dict(inputs)
    if (
        weight := next((p for p in model.parameters() if p.is_floating_point()), None)
    ) is not None:
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                home[name] = x.to(
                    weight.device, weight.dtype if x.is_floating_point() else x.dtype
                )
    return home


class TrainingStep:
    """The attention calls of one forward pass, until their gradients are computed: `hold`
    each, then `differentiate` once, then `hand_over`."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        # With the edge of the graph at its output or None, later the gradient there; and
        # versions.
        self.waiting: deque[tuple[AttentionCase, Any, tuple[int, ...]]] = deque()

    def hold(self, case: AttentionCase, out: Tensor) -> Tensor:
        """Stores a call, and returns its output for the model to go on with: in grad mode
        one that requires a gradient, a copy where `out` did not; else `out` itself."""
        edge = None
        if torch.is_grad_enabled():
            if not out.requires_grad:  # cloned, for a leaf must not be overwritten
                out = out.detach().requires_grad_().clone()
            edge = get_gradient_edge(out)
        case = case.detached()
        self.waiting.append((case, edge, _write_counts(case)))
        return out

    def differentiate(self, loss: Tensor | None) -> None:
        """Computes the gradient of `loss` at the output of every call. There are none
        where `loss` is None or depends on no call. The graph is freed. Raises
        MeasurementError where the model has since overwritten what it attended over, and
        what autograd raises."""
        for case, _, versions in self.waiting:
            if versions != _write_counts(case):
                what = f"{case.ref.module}: the model overwrites what it attended over"
                raise MeasurementError(what, hint="its forward pass can be audited")
        edges = {
            i: edge for i, (_, edge, _) in enumerate(self.waiting) if edge is not None
        }
        grads: dict[int, Tensor] = {}
        if loss is not None and loss.requires_grad and edges:
            wanted = torch.autograd.grad(loss, list(edges.values()), allow_unused=True)
            grads = dict(zip(edges, wanted, strict=True))
        self.waiting = deque(
            (case, grads.get(i), ()) for i, (case, _, _) in enumerate(self.waiting)
        )

    def hand_over(self, on_call: Callable[[AttentionCase], object]) -> tuple[str, ...]:
        """Calls `on_call` with every call and its gradient, in the order in which they
        were made, and forgets each. Where the loss's gradient for a call is missing, 0
        everywhere, or not finite in some element, a drawn one takes its place. Returns
        the names of these cases."""
        drawn = []
        while self.waiting:
            case, grad, _ = self.waiting.popleft()
            if grad is None or not grad.isfinite().all() or not grad.any():
                drawn.append(case.ref.case)
                case = with_drawn_gradient(case, self.upstream.seed)
            else:
                grad = grad.reshape(*case.q.shape[:3], case.v.shape[3])
                if 0 in grad.stride():  # the gradient of a sum is one number, expanded
                    grad = grad.contiguous()
                case = replace(case, grad_out=grad, grad_out_from=self.upstream.loss)
            on_call(case)
        return tuple(drawn)


@contextmanager
def tracing_from_attention(model: nn.Module, step: TrainingStep | None) -> Iterator[None]:
    """Enters a context in which to run the model with gradients, except for its
    parameters: the graph begins at the first attention's output. Without a step,
    gradients are off. Parameters are as before at the end."""
    learning = [p for p in model.parameters() if p.requires_grad and step is not None]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with torch.set_grad_enabled(step is not None):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _write_counts(case: AttentionCase) -> tuple[int, ...]:
    """Returns how often each tensor of a case was written to, which PyTorch counts over
    all views of one memory. Tensors of inference mode are left out."""
    tensors = (case.q, case.k, case.v, case.mask, case.sinks)
    return tuple(x._version for x in tensors if x is not None and not x.is_inference())
