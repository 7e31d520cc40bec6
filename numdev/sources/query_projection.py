"""The linear layer that makes a call's queries, W_Q: what it reads, and the way back to
it.

An error of the gradient at q is one of dW_Q only after it has gone back through what
stands between: rotary embeddings, a norm of the heads. The module that made the call is
run again in fp64, up to the call, the outputs of its linear layers cut off from what made
them: the one that q depends on is W_Q (of GPT-2's `c_attn` a part), and the graph between
the two is the way back. Where the queries are not those of the call, or no or several
layers make them, there is no projection."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, one_line
from numdev.sources.capture import Frame, first_call


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """The linear layer that makes a call's queries, in fp64. dW_Q of head h is the sum
    over batch and tokens of pull(dQ)[b, t, h] outer x[b, t]."""

    x: Tensor  # What the layer reads: [batch, q_len, width]
    # W_Q as `nn.Linear` stores it, head by head: [heads * head_dim, width]
    weight: Tensor
    pull: Callable[[Tensor], Tensor]
    """Takes a gradient at q, [batch, heads, q_len, head_dim], to the gradient at the
    layer's output, [batch, q_len, heads, head_dim]."""


class Projections:
    """Records what the modules of a running model were called with, until a call's
    projection is asked for."""

    def __init__(self) -> None:
        self.frames: dict[str, list[Frame]] = {}

    def record_call(self, ref: CaseRef, running: Sequence[Frame]) -> None:
        """Records that the call `ref` is made while the modules `running` run, the
        innermost last, in place of an earlier call of its name. It belongs to the modules
        for which it is the first call. Counts the call in the frames `running`, in
        place."""
        new = [frame for frame in reversed(running) if not frame.calls]
        self.frames[ref.case] = [_detached_frame(frame) for frame in new]
        for frame in running:
            frame.calls += 1

    def take(self, case: AttentionCase) -> Projection:
        """Returns the linear layer that makes the queries of a call (W_Q), and forgets
        what was recorded for the call, which is looked up by its name. Runs a copy of its
        module again in fp64. Raises MeasurementError where that fails or makes other
        queries; where no layer or several make them; where heads are not parts of the
        layer's output; and where the call was not recorded as the first of a module with
        a linear layer."""
        for frame in self.frames.pop(case.ref.case, ()):
            if any(map(_is_linear, frame.module.modules())):
                return _projection_of_frame(frame, case)
        raise _no_projection(
            case, "no module with a linear layer makes this call, or it makes several"
        )


def _no_projection(case: AttentionCase, why: str) -> MeasurementError:
    """Returns (does not raise) the error that a call has no projection. `why`: the
    reason, as a clause."""
    return MeasurementError(
        f"{case.ref.case}: {why}", hint="dW_Q is not measured for this call"
    )


# A linear layer that ran: its name, itself, its input, and its output cut off from there
Run = tuple[str, nn.Module, Tensor, Tensor]


def _run_again(frame: Frame, case: AttentionCase) -> tuple[Tensor, list[Run]]:
    """Runs a copy of the frame's module in fp64, without its hooks, up to the attention
    call. Returns the queries of that call and the linear layers that ran. Raises
    MeasurementError where the module fails in fp64, makes no call, or makes queries of
    another shape or that differ from the case's by more than 100 roundings of the
    largest. Where a NaN is in them their values are not compared."""
    ran: list[Run] = []
    kind = type(frame.module).__name__
    arguments, named = _map_tensors(
        lambda x: x.double() if x.is_floating_point() else x, frame
    )

    def cut(name: str, layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Records the run of a linear layer and returns its output, cut off from its
        graph."""
        leaf = out.detach().requires_grad_()
        ran.append((name, layer, args[0].detach(), leaf))
        # A leaf that requires gradients must not be overwritten
        return leaf.view_as(leaf)

    try:
        twin = copy.deepcopy(frame.module).double().requires_grad_(False)
        for name, part in twin.named_modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
            if _is_linear(part):
                part.register_forward_hook(partial(cut, name))
        with torch.enable_grad():
            again = first_call(lambda: twin(*arguments, **named))
    except Exception as error:  # a module's own code: whatever it raises is a reason
        raise _no_projection(
            case, f"{kind} does not run again in fp64: {one_line(error)}"
        ) from error
    if again is None:
        raise _no_projection(case, f"{kind} makes no call when it is run again")
    q = again.q
    # The same but for a hundred roundings of the largest, in the format the model runs
    # in.
    allowed = 100 * torch.finfo(case.q.dtype).eps * case.q.abs().max().double()
    if q.shape != case.q.shape or bool(
        (q.detach() - case.q.double()).abs().max() > allowed
    ):
        raise _no_projection(case, f"{kind} makes other queries when it is run again")
    return q, ran


def _projection_of_frame(frame: Frame, case: AttentionCase) -> Projection:
    """Returns the projection of the one linear layer that makes the call's queries.
    Raises MeasurementError where none or several do, where heads are not parts of its
    output, and where the module does not make the same queries again in fp64."""
    q, ran = _run_again(frame, case)
    # The gradient that shows on which q depends has no pattern, so that no sum of it is
    # zero.
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(q.shape, generator=generator, dtype=q.dtype).to(q.device) + 0.5
    grads = _vjp(q, [out for *_, out in ran], spread)
    linears = [
        (*layer, grad) for layer, grad in zip(ran, grads, strict=True) if grad is not None
    ]
    if len(linears) != 1:
        names = ", ".join(name for name, *_ in linears) or "none"
        raise _no_projection(
            case, f"q is made by {len(linears)} linear layers ({names}), not by one"
        )
    name, layer, x, out, grad = linears[0]
    features = _features_by_head(q, out, spread, _nonzero_features(grad))
    batch, heads, length, head_dim = q.shape
    if features is None or x.numel() != batch * length * x.shape[-1]:
        raise _no_projection(case, f"the heads are not parts of the output of {name}")

    def pull(dq: Tensor) -> Tensor:
        """Returns the gradient at the layer's output, [batch, q_len, heads, head_dim],
        for one at q."""
        back = cast(Tensor, _vjp(q, [out], dq.to(q.device, q.dtype))[0])
        return back[..., features].reshape(batch, length, heads, head_dim)

    weight = cast(Tensor, layer.weight)
    weight = (weight.mT if _is_conv1d(layer) else weight)[features]
    return Projection(x=x.reshape(batch, length, -1), weight=weight, pull=pull)


def _features_by_head(
    q: Tensor, out: Tensor, spread: Tensor, touched: Tensor
) -> Tensor | None:
    """Returns the indices of the features of the layer's output that make q, head by
    head, int64 [heads * head_dim]. Where every head depends on all of them (a norm over
    heads) they are in ascending order. None where these are not heads * head_dim
    features, or where heads share some, unless every head has all. `spread`: a gradient
    at q; `touched`: the features on which all of q depends."""
    if touched.numel() != q.shape[1] * q.shape[3]:
        return None
    each = []
    for head in range(q.shape[1]):
        alone = torch.zeros_like(spread)
        alone[:, head] = spread[:, head]
        each.append(_nonzero_features(cast(Tensor, _vjp(q, [out], alone)[0])))
    if all(torch.equal(features, touched) for features in each):
        return touched
    joined = torch.cat(each)
    return joined if torch.equal(joined.sort().values, touched) else None


def _vjp(q: Tensor, outputs: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradient of each of `outputs` for the gradient `grad` at q; None for
    one that q does not depend on. The graph is kept."""
    if not q.requires_grad:
        return (None,) * len(outputs)
    return torch.autograd.grad(q, outputs, grad, retain_graph=True, allow_unused=True)


def _nonzero_features(grad: Tensor) -> Tensor:
    """Returns the indices of the last axis at which a gradient is not zero everywhere,
    int64, ascending."""
    return grad.flatten(0, -2).ne(0).any(dim=0).nonzero().flatten()


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: `nn.Linear`, or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, a linear layer with its weight
    transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _detached_frame(frame: Frame) -> Frame:
    """Returns the frame with its tensors cut off from their graph, None in place of
    caches, and without its count of calls."""
    arguments, named = _map_tensors(Tensor.detach, frame)
    return Frame(module=frame.module, arguments=arguments, named=named)


def _map_tensors(
    change: Callable[[Tensor], Tensor], frame: Frame
) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """Returns a frame's arguments and keywords with `change` applied to every tensor in
    them, also inside tuples, lists and dicts. Caches become None, since the model has
    changed them by now."""

    def is_cache(x: object) -> bool:
        """Whether x is a key-value cache of transformers."""
        return hasattr(x, "get_seq_length")

    def leaf(x: object) -> object:
        """Returns a tensor changed, None for a cache, and anything else as it is."""
        return change(x) if isinstance(x, Tensor) else None if is_cache(x) else x

    arguments = tree_map(leaf, frame.arguments, is_leaf=is_cache)
    return arguments, tree_map(leaf, frame.named, is_leaf=is_cache)
