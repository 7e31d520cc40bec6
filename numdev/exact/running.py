"""Runs of functions and modules on `Wide` tensors, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from numdev.errors import UsageError
from numdev.exact.copies import wide_arguments, wide_module
from numdev.exact.dtypes import is_floating
from numdev.exact.refusals import translated
from numdev.exact.rounding import EveryOperation, Rounding
from numdev.exact.wide import UNROUNDED, Wide, check_readable, compute, widened

aten = torch.ops.aten
# Of an output that has a gradient, by its number and itself: the gradient that comes back
# into it.
Cotangent = Callable[[int, Tensor], Tensor]
T = TypeVar("T")


class Computing(TorchDispatchMode):
    """Every operation in here is computed in fp64 and rounded as `rounding` says. Raises
    Unsupported, also for a draw of random numbers where `draws` says that nobody set a
    seed."""

    def __init__(self, rounding: Rounding = UNROUNDED, *, draws: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding, self.draws = rounding, draws

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would load its compiler to keep it out of here, for three seconds;
        `computing` switches it off where it is loaded already."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> object:
        if func is aten.logsumexp.default and isinstance(self.rounding, EveryOperation):
            with self:
                return _logsumexp(*args, **(kwargs or {}))
        return compute(func, args, kwargs or {}, self.rounding, draws=self.draws)


@contextmanager
def computing(
    rounding: Rounding = UNROUNDED, *, seed: int | None = None
) -> Iterator[Computing]:
    """What runs in here is computed in fp64, and rounded as `rounding` says.

    PyTorch takes no path that hides operations: attention is its own formula, and oneDNN,
    cuDNN, the fast path of multi-head attention and compilation are off. `seed` sets the
    generators of PyTorch, which are as before afterwards; without one a draw raises
    Unsupported."""
    mode = Computing(rounding, draws=seed is not None)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_hidden_paths_off())
        # Nothing is compiled otherwise, and it is slow to load
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if seed is not None:
            stack.enter_context(
                torch.random.fork_rng(devices=range(torch.cuda.device_count()))
            )
            torch.manual_seed(seed)
        yield stack.enter_context(mode)


class Evaluation(NamedTuple, Generic[T]):
    """What a function gave: floating-point tensors as `Wide`."""

    output: T
    arguments: tuple[object, ...]  # after the run, as it may have written into them
    gradients: Mapping[str, Tensor | None]  # fp64; None: the output does not depend on it


def evaluate(
    function: Callable[..., T], *arguments: object, rounding: Rounding = UNROUNDED,
    seed: int | None = None, cotangent: Cotangent | None = None,
) -> Evaluation[T]:  # fmt: skip
    """What a function, or a module, gives on these arguments, any tree of tensors and
    other objects, computed in fp64 and rounded as `rounding` says. Arguments and module
    are copied, not changed.

    With a `cotangent` its gradients are taken by autograd, for arguments and parameters
    that require one: by name, as `[0]`, `[1]['x']` or `layer.weight`. They are rounded as
    the run is.

    Raises Unsupported, see `computing`, UsageError where `cotangent` gives another shape,
    and what the function raises."""
    inputs = wide_arguments(arguments)
    if isinstance(function, nn.Module):
        function = wide_module(function)
    with computing(rounding, seed=seed):
        leaves = _differentiable(function, inputs)
        with torch.set_grad_enabled(cotangent is not None or torch.is_grad_enabled()):
            try:
                output = function(*inputs)
            except RuntimeError as error:
                raise translated("an operator", error) from error.__cause__
            check_readable(output)
            gradients = (
                _gradients(output, leaves, cotangent) if cotangent is not None else {}
            )
    return Evaluation(output, inputs, gradients)


def _differentiable(
    function: Callable[..., object], inputs: tuple[object, ...]
) -> dict[str, Tensor]:
    """The tensors that get gradients, by name."""
    paths, _ = tree_flatten_with_path(inputs)
    named = [(keystr(path), x) for path, x in paths]
    if isinstance(function, nn.Module):
        named += list(function.named_parameters())
    return {name: x for name, x in named if isinstance(x, Tensor) and x.requires_grad}


def _gradients(
    output: object, leaves: Mapping[str, Tensor], cotangent: Cotangent
) -> dict[str, Tensor | None]:
    outputs = [x for x in tree_leaves(output) if is_floating(x) and x.requires_grad]
    if not outputs or not leaves:
        return dict.fromkeys(leaves)
    back = [_cotangent(cotangent, i, x) for i, x in enumerate(outputs)]
    gradients = torch.autograd.grad(
        outputs, list(leaves.values()), back, allow_unused=True
    )
    values = tree_map(widened, gradients)
    return dict(zip(leaves, values, strict=True))


def _cotangent(cotangent: Cotangent, i: int, output: Tensor) -> Tensor:
    with _disable_current_modes():
        values = widened(cotangent(i, output))
    if values.shape != output.shape:
        expected, got = list(output.shape), list(values.shape)
        raise UsageError(
            f"cotangent of output {i}: expected the shape {expected}, got {got}"
        )
    return Wide.of(values, output.dtype)


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """PyTorch's own formula: its operator computes it in the format, one step after
    another."""
    largest = x.amax(dim, keepdim=True)
    largest = torch.where(largest.abs() == torch.inf, torch.zeros_like(largest), largest)
    total = (x - largest).exp().sum(dim, keepdim=keepdim)
    return total.log() + (largest if keepdim else largest.squeeze(dim))


@contextmanager
def _hidden_paths_off() -> Iterator[None]:
    """A context in which oneDNN, cuDNN and the fast path of multi-head attention are
    off."""
    switches = (
        (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
        (
            torch.backends.mha.get_fastpath_enabled,
            torch.backends.mha.set_fastpath_enabled,
        ),
    )
    with ExitStack() as stack:
        for is_on, switch in switches:
            stack.callback(switch, is_on())
            switch(False)
        yield
