"""Runs of functions and modules on `Wide` tensors, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from numdev.errors import UsageError
from numdev.exact.kernel_steps import Steps, kernel_steps, logsumexp
from numdev.exact.result_dtypes import is_floating
from numdev.exact.rounded_results import EveryOperation, Rounding
from numdev.exact.unsupported_operations import as_unsupported
from numdev.exact.wide_copies import wide_arguments, wide_module
from numdev.exact.wide_tensors import (
    UNROUNDED,
    Wide,
    check_readable,
    compute_operation,
    widened,
)
from numdev.seeding import seeded

aten = torch.ops.aten
# Of an output that has a gradient, by its number and itself: the gradient that comes back
# into it.
Cotangent = Callable[[int, Tensor], Tensor]
T = TypeVar("T")


class Computing(TorchDispatchMode):
    """A mode in which every PyTorch operation is computed in fp64 and rounded as
    `rounding` says. An operation raises Unsupported where it has no exact result, and for
    a draw of random numbers without a generator where `draws` is False."""

    def __init__(self, rounding: Rounding = UNROUNDED, *, draws: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounding, self.draws = rounding, draws
        self.uses_cudnn = torch._C._get_cudnn_enabled()  # as outside of the mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False. Otherwise PyTorch would load its compiler, which takes three
        seconds, to keep it out of here; `computing` switches the compiler off where it is
        loaded already."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> object:
        """Returns the result of an operation by `compute_operation`. Where every
        operation rounds, one that is computed in steps rounds after each."""
        if isinstance(self.rounding, EveryOperation):
            steps = self._steps_of(func, args, self.rounding)
            if steps is not None:
                with self:
                    return steps(func, args, kwargs or {})
        return compute_operation(
            func, args, kwargs or {}, self.rounding, draws=self.draws
        )

    def _steps_of(
        self, func: OpOverload, args: tuple[object, ...], rounding: EveryOperation
    ) -> Steps | None:
        """Returns what computes an operator in single steps, and notes the operator in
        `rounding` where these are a kernel's and not the formula's; None where it is one
        step."""
        if func is aten.logsumexp.default:
            return logsumexp
        if not rounding.as_kernels:
            return None
        steps = kernel_steps(func, args, uses_cudnn=self.uses_cudnn)
        if steps is not None:
            rounding.kernels_taken[func.overloadpacket.__name__] = None
        return steps


@contextmanager
def computing(
    rounding: Rounding = UNROUNDED, *, seed: int | None = None
) -> Iterator[Computing]:
    """Enters a context in which every operation is computed in fp64, and rounded as
    `rounding` says; yields the mode.

    PyTorch takes no path that hides operations: oneDNN, cuDNN, the fast path of
    multi-head attention and, where its module is loaded at the beginning, compilation are
    off. Attention is its own formula, but with an EveryOperation that rounds `as_kernels`
    the steps of the kernel that PyTorch takes. `seed` seeds PyTorch's generators, as
    `seeded`; without one a draw from these raises Unsupported."""
    mode = Computing(rounding, draws=seed is not None)
    with ExitStack() as stack:
        if not (isinstance(rounding, EveryOperation) and rounding.as_kernels):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_without_hidden_paths())
        # Nothing is compiled otherwise, and it is slow to load
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if seed is not None:
            stack.enter_context(seeded(seed))
        yield stack.enter_context(mode)


class Evaluation(NamedTuple, Generic[T]):
    """What a function gave: floating-point tensors as `Wide`."""

    output: T
    arguments: tuple[object, ...]  # after the run, as it may have written into them
    gradients: Mapping[str, Tensor | None]  # fp64; None: the output does not depend on it


def evaluate(
    function: Callable[..., T], *arguments: object, rounding: Rounding = UNROUNDED,
    seed: int | None = None, cotangent: Cotangent | None = None,
    within: AbstractContextManager[object] | None = None,
) -> Evaluation[T]:  # fmt: skip
    """Runs a function or module in fp64, rounded as `rounding` says, on these arguments:
    tensors, trees of them (tuples, lists, dicts) and other objects. Returns its output,
    the arguments afterwards and the gradients. Tensors and trees among the arguments, and
    a module, are copied, not changed; other objects are passed as they are.

    `cotangent(i, output)` returns the gradient with respect to the i-th floating-point
    output, of its shape; it is asked for those that require one. With it autograd
    computes the gradients of all arguments and parameters that require one, by name:
    `[0]`, `[1]['x']` or `layer.weight`; None for one that no output depends on. They are
    rounded as the run is. Without it there are none (empty). `seed`: see `computing`.
    `within`: a context of the run that meets its operations first, as a dispatch mode
    does; None: none.

    Raises Unsupported for what has no exact result, UsageError where `cotangent` returns
    another shape, and whatever the function or autograd raises."""
    inputs = wide_arguments(arguments)
    if isinstance(function, nn.Module):
        function = wide_module(function)
    with computing(rounding, seed=seed), within or nullcontext():
        leaves = _gradient_leaves(function, inputs)
        with torch.set_grad_enabled(cotangent is not None or torch.is_grad_enabled()):
            try:
                output = function(*inputs)
            except RuntimeError as error:
                raise as_unsupported("an operator", error) from error.__cause__
            check_readable(output)
            gradients = (
                _gradients(output, leaves, cotangent) if cotangent is not None else {}
            )
    return Evaluation(output, inputs, gradients)


def _gradient_leaves(
    function: Callable[..., object], inputs: tuple[object, ...]
) -> dict[str, Tensor]:
    """Returns the tensors that require a gradient, by name: arguments by their path in
    `inputs` (`[0]`, `[1]['x']`), and a module's parameters by their own names."""
    paths, _ = tree_flatten_with_path(inputs)
    named = [(keystr(path), x) for path, x in paths]
    if isinstance(function, nn.Module):
        named += list(function.named_parameters())
    return {name: x for name, x in named if isinstance(x, Tensor) and x.requires_grad}


def _gradients(
    output: object, leaves: Mapping[str, Tensor], cotangent: Cotangent
) -> dict[str, Tensor | None]:
    """Returns the fp64 gradient of each of `leaves` by name; None for one that no output
    depends on, and for all where no output requires a gradient. Raises UsageError where a
    cotangent has another shape than its output, and what autograd raises."""
    floats = [x for x in tree_leaves(output) if is_floating(x)]
    numbered = [(i, x) for i, x in enumerate(floats) if x.requires_grad]
    if not numbered or not leaves:
        return dict.fromkeys(leaves)
    back = [_wide_cotangent(cotangent, i, x) for i, x in numbered]
    gradients = torch.autograd.grad(
        [x for _, x in numbered], list(leaves.values()), back, allow_unused=True
    )
    values = tree_map(widened, gradients)
    return dict(zip(leaves, values, strict=True))


def _wide_cotangent(cotangent: Cotangent, i: int, output: Tensor) -> Tensor:
    """Returns what `cotangent` gives for output number `i`, the gradient with respect to
    it, as a `Wide` tensor of the output's dtype. Raises UsageError where its shape is not
    the output's."""
    with _disable_current_modes():
        values = widened(cotangent(i, output))
    if values.shape != output.shape:
        expected, got = list(output.shape), list(values.shape)
        raise UsageError(
            f"cotangent of output {i}: expected the shape {expected}, got {got}"
        )
    return Wide.of(values, output.dtype)


@contextmanager
def _without_hidden_paths() -> Iterator[None]:
    """Enters a context in which oneDNN, cuDNN and the fast path of multi-head attention
    are off; at its end they are as before."""
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
