"""The linear layer that makes a call's queries, W_Q: what it reads, and the way back to it.

An error of the gradient at q is one of dW_Q only after it has gone back through what stands
between: rotary embeddings, a norm of the heads. The module that made the call is run again in fp64,
up to the call, the outputs of its linear layers cut off from what made them: the one that q depends
on is W_Q (of GPT-2's `c_attn` a part), and the graph between the two is the way back. Where the
queries are not those of the call, or no or several layers make them, there is no projection.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError
from numdev.sources.capture import first_call
from numdev.sources.watch import hooked

HINT = "dW_Q is not measured for this call"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_MARKS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """The linear layer that makes a call's queries, in fp64. dW_Q of head h is the sum over batch
    and tokens of pull(dQ)[b, t, h] outer x[b, t]."""

    x: Tensor  # What the layer reads: [batch, q_len, width]
    weight: Tensor  # W_Q as `nn.Linear` stores it, head by head: [heads * head_dim, width]
    pull: Callable[[Tensor], Tensor]
    """From a gradient at q, [batch, heads, q_len, head_dim], to the gradient at the layer's output,
    [batch, q_len, heads, head_dim]."""
    name: str = ""  # Of the layer, within the module that makes the call


@dataclass(kw_only=True, eq=False)
class _Frame:
    """A module while it runs: what it was called with, detached."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    calls: int = 0


class Projections:
    """What the modules of a running model are called with, until a call's projection is asked for.
    `met` is told of every call as it is made, inside `following(model)`."""

    def __init__(self) -> None:
        self.running: list[_Frame] = []
        self.frames: dict[str, tuple[_Frame, ...]] = {}

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Note what the modules of the model are called with."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments, named = _tensors(Tensor.detach, (args, kwargs))
            self.running.append(_Frame(module=module, arguments=arguments, named=named))

        def leave(*_: Any) -> None:
            self.running.pop()

        with hooked(model, enter, leave):
            yield

    def met(self, ref: CaseRef) -> None:
        """A call is made: by the innermost running module, for which it is the first one."""
        self.frames[ref.case] = tuple(f for f in reversed(self.running) if f.calls == 0)
        for frame in self.running:
            frame.calls += 1

    def of(self, case: AttentionCase) -> Projection:
        """The projection of a call that was met, which is forgotten. Raises MeasurementError, with
        the reason, where it cannot be found."""
        reason = "the model calls attention outside of any module, or more than once in one"
        for frame in self.frames.pop(case.ref.case, ()):
            if any(map(_linear, frame.module.modules())):
                return _replayed(frame, case)
            reason = f"{type(frame.module).__name__} has no linear layer"
        raise _none(case, reason)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ran:
    """A linear layer that ran: what it read, and its output without what made it."""

    name: str
    layer: nn.Module
    x: Tensor
    out: Tensor


def _none(case: AttentionCase, why: str) -> MeasurementError:
    return MeasurementError(f"{case.ref.case}: {why}", hint=HINT)


def _replayed(frame: _Frame, case: AttentionCase) -> Projection:
    """Run the frame's module again, in fp64, up to the call."""
    ran: list[_Ran] = []
    twin, kind = _twin(frame.module, {}), type(frame.module).__name__
    for name, layer in twin.named_modules():
        if _linear(layer):
            layer.register_forward_hook(_cutting(name, ran))
    arguments, named = _wide((frame.arguments, frame.named))
    try:
        with torch.enable_grad():
            again = first_call(lambda: twin(*arguments, **named))
    except Exception as error:  # a module's own code: whatever it raises is a reason
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise _none(case, f"{kind} does not run again in fp64: {words}") from error
    if again is None or not _same(again.q, case.q):
        what = "makes no call" if again is None else "makes other queries"
        raise _none(case, f"{kind} {what} when it is run again")
    return _found(again.q, ran, case)


def _found(q: Tensor, ran: list[_Ran], case: AttentionCase) -> Projection:
    """The projection among the layers that ran: the one on which q depends."""
    # A gradient without pattern, so that no sum of its elements is zero by chance.
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(q.shape, generator=generator, dtype=q.dtype).to(q.device) + 0.5
    made = [(r, g) for r, g in zip(ran, _vjp(q, ran, spread), strict=True) if g is not None]
    if len(made) != 1:
        names = ", ".join(r.name for r, _ in made) or "none"
        raise _none(case, f"q is made by {len(made)} linear layers ({names}), not by one")
    layer, grad = made[0]
    features = _by_head(q, layer, spread, _touched(grad))
    batch, heads, length, head_dim = q.shape
    if features is None or layer.x.numel() != batch * length * layer.x.shape[-1]:
        raise _none(case, f"the heads are no parts of the output of {layer.name}")

    def pull(dq: Tensor) -> Tensor:
        (back,) = _vjp(q, [layer], dq.to(q.device, q.dtype))
        assert back is not None
        return back[..., features].reshape(batch, length, heads, head_dim)

    weight = layer.layer.weight
    assert isinstance(weight, Tensor)
    return Projection(
        x=layer.x.detach().reshape(batch, length, -1),
        weight=(weight.mT if _is_conv1d(layer.layer) else weight)[features],
        pull=pull,
        name=layer.name,
    )


def _by_head(q: Tensor, layer: _Ran, spread: Tensor, touched: Tensor) -> Tensor | None:
    """The features of the layer's output that make q, head by head; None where they are not
    `head_dim` for each. Where every head depends on all (a norm over them), they are taken in
    order."""
    if touched.numel() != q.shape[1] * q.shape[3]:
        return None
    each = []
    for head in range(q.shape[1]):
        alone = torch.zeros_like(spread)
        alone[:, head] = spread[:, head]
        (grad,) = _vjp(q, [layer], alone)
        assert grad is not None
        each.append(_touched(grad))
    if all(torch.equal(features, touched) for features in each):
        return touched
    found = torch.cat(each)
    return found if torch.equal(found.sort().values, touched) else None


def _vjp(q: Tensor, ran: list[_Ran], grad: Tensor) -> tuple[Tensor | None, ...]:
    if not q.requires_grad:
        return (None,) * len(ran)
    outputs = [r.out for r in ran]
    return torch.autograd.grad(q, outputs, grad, retain_graph=True, allow_unused=True)


def _touched(grad: Tensor) -> Tensor:
    """The features at which a gradient is not zero throughout."""
    return grad.flatten(0, -2).ne(0).any(dim=0).nonzero().flatten()


def _same(again: Tensor, q: Tensor) -> bool:
    """Whether these are the same queries but for a hundred roundings, in the format the model runs
    in, of the largest."""
    if again.shape != q.shape:
        return False
    allowed = 100 * torch.finfo(q.dtype).eps * q.abs().max().double()
    return bool((again.detach() - q.double()).abs().max() <= allowed)


def _cutting(name: str, ran: list[_Ran]) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    """A hook that notes a run of a linear layer, and lets the module go on with its output alone"""

    def hook(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
        leaf = out.detach().requires_grad_()
        ran.append(_Ran(name=name, layer=layer, x=args[0].detach(), out=leaf))
        return leaf.view_as(leaf)  # a leaf that requires gradients must not be overwritten

    return hook


def _linear(module: nn.Module) -> bool:
    """`nn.Linear`, or transformers' `Conv1D`, which is the same with its weight transposed."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _twin(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """The same module in fp64, without hooks, its parameters detached copies; other attributes are
    shared."""
    if id(module) in known:
        return known[id(module)]
    twin: nn.Module = module.__new__(type(module))
    known[id(module)] = twin
    twin.__dict__.update(module.__dict__)
    for name in (*_HOOKS, *_HOOK_MARKS):
        twin.__dict__[name] = OrderedDict()
    for name in ("_parameters", "_buffers"):
        values = module.__dict__[name].items()
        twin.__dict__[name] = {n: None if x is None else _wide(x.detach()) for n, x in values}
    twin.__dict__["_modules"] = {
        n: None if child is None else _twin(child, known) for n, child in module._modules.items()
    }
    return twin


def _wide(value: Any) -> Any:
    """Floating-point tensors in fp64."""
    return _tensors(lambda x: x.double() if x.is_floating_point() else x, value)


def _tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same arguments with every tensor changed; caches of keys, which have changed since, left
    out."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_tensors(change, x) for x in value)
    if type(value) is dict:
        return {name: _tensors(change, x) for name, x in value.items()}
    return None if hasattr(value, "get_seq_length") else value
