"""The reference as truth and as yardstick: one function, run exactly, rounded, and as
PyTorch runs it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from numdev.exact.evaluation import Cotangent, evaluate
from numdev.exact.rounded_results import Rounding, round_values, values_format
from numdev.exact.wide_tensors import UNROUNDED, Wide, widened
from numdev.operations.function.float32_error_model import Arithmetic
from numdev.operations.function.function_runs import (
    OF_COMPILED,
    Cotangents,
    FunctionRun,
    buffers_of,
    buffers_restored,
    called,
    cotangent_numbers,
    module_of_function,
    private,
    run,
)
from numdev.operations.function.operators_without_kernel import (
    MissingKernels,
    lacks_a_kernel,
)
from numdev.operations.function.trees import (
    Arguments,
    Values,
    as_real,
    gradient_name,
    opened,
    outputs_of,
)

RANDOM = 4  # runs that round stochastically, beside one that rounds to nearest
SOUND = 2  # more of them, which stand for sound kernels
CLOSER = 16  # more still, for a closer look at what exceeds a limit
RUNS = 64  # from the seed of a call's first run to that of the next call's


class _Spreaded(NamedTuple):
    """What a call came to: what it returned, the tree of arguments afterwards (None: they
    are as `evaluate` has them), and buffers afterwards by name."""

    output: object
    tree: object
    buffers: Values


class _Spread(nn.Module):
    """A module that calls a function with a tuple of positional arguments and a mapping
    of named ones. With `writes` the function gets copies of the tensors that require a
    gradient, since autograd lets code write into these. `state`: names of buffers of the
    function, a module, that it writes into."""

    def __init__(
        self, function: Callable[..., object], *, writes: bool, state: Sequence[str]
    ) -> None:
        super().__init__()
        self.module = module_of_function(function)  # whose parameters are copied so
        self.function, self.writes, self.state = function, writes, state

    def forward(
        self, positional: Sequence[object], named: Mapping[str, object]
    ) -> _Spreaded:
        """Returns what the function returns, with dataclasses opened; with `writes` the
        tree of arguments afterwards, else None; and the buffers in `state` afterwards, by
        name. The last two are detached. Raises what the function raises."""
        tree = (positional, named)
        if self.writes:
            tree = tree_map(_writable, tree)
        output = opened(called(self.function, *tree))
        after = tree_map(_detached, tree) if self.writes else None
        buffers = buffers_of(self.function) if self.state else {}
        return _Spreaded(output, after, {n: buffers[n].detach() for n in self.state})


def _writable(x: object) -> object:
    """Returns a copy of a tensor that requires a gradient; anything else as it is."""
    return x.clone() if isinstance(x, Tensor) and x.requires_grad else x


def _detached(x: object) -> object:
    """Returns a tensor apart from autograd; anything else as it is."""
    return x.detach() if isinstance(x, Tensor) else x


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionReference:
    """A reference on one call. Results are by name, in fp64 (integers as they are),
    complex ones as real [..., 2]. Each kind of run is made once, when it is first asked
    for."""

    function: Callable[..., object]
    arguments: Arguments
    seed: int
    backward: bool
    # Outputs that are float64 and that an implementation returns in another dtype: in
    # that; what the reference computes in float64 then errs as in float32
    returned_in: Mapping[str, torch.dtype] = field(default_factory=dict)
    # Buffers that an implementation lacks, or begins with otherwise: what is written into
    # them is no result
    lacking: frozenset[str] = frozenset()
    _kernels_taken: dict[str, None] = field(default_factory=dict, init=False, repr=False)

    @property
    def inputs(self) -> Values:
        """Returns the inputs of the call by name, as they were given: parameters and
        persistent buffers, then arguments (of these a tensor that comes twice once, by
        its first name); of a name that both have, the argument."""
        return {**parameters_of_module(self.function), **self.arguments.leaves()}

    @cached_property
    def cotangents(self) -> Cotangents | None:
        """Returns the gradients that come back into the outputs; None without
        `backward`."""
        return Cotangents(seed=self.seed) if self.backward else None

    @property
    def device(self) -> str:
        """Returns the device of the first argument that is a tensor, as text; `cpu`
        where none is."""
        return self.arguments.device

    @property
    def other_cotangents(self) -> Cotangents | None:
        """Returns other gradients that come back into the outputs, those of the next
        seed; None without `backward`."""
        return Cotangents(seed=self.seed + 1) if self.backward else None

    @cached_property
    def plain(self) -> FunctionRun:
        """Returns the call as PyTorch runs it here, with gradients where `backward`; a
        module is copied for it. Outputs in `returned_in` are in that dtype, and what was
        written into buffers in `lacking` is left out. An operator that PyTorch has no
        kernel for, in this format on this device, computes in float32. Raises what the
        reference raises."""
        ran = self.as_pytorch(self.arguments, self.cotangents).narrowed(self.returned_in)
        written = {n: x for n, x in ran.written.items() if n not in self.lacking}
        return replace(ran, written=written)

    @property
    def written_buffers(self) -> list[str]:
        """Returns the names of the buffers that `plain` wrote into, but for those in
        `lacking`; empty where the reference is no module. Raises what the reference
        raises."""
        arguments = self.arguments.leaves()
        return [name for name in self.plain.written if name not in arguments]

    def as_pytorch(
        self, arguments: Arguments, cotangents: Cotangents | None = None
    ) -> FunctionRun:
        """Returns a run of the reference on other arguments, as `plain` is one, without a
        change of dtypes. Gradients are computed only with `cotangents`. Raises what the
        reference raises."""

        def ran() -> FunctionRun:
            """Returns a run of the reference, of which a module is copied."""
            function = private(self.function)
            return run(function, arguments, seed=self.seed, cotangents=cotangents)

        try:
            return ran()
        except Exception as error:  # the reference is foreign
            if not lacks_a_kernel(error):
                raise
        with MissingKernels() as mode:
            return replace(ran(), in_float32=tuple(mode.names))

    def called_twice(self) -> FunctionRun:
        """Returns the second of two runs of one copy of the reference, a module whose
        buffers are put back in between; of another function just another run. No
        gradients are computed. Raises what the reference raises."""
        function = private(self.function)
        for _ in range(2):
            with buffers_restored(function):
                ran = run(function, self.arguments, seed=self.seed)
        return ran.narrowed(self.returned_in)

    @cached_property
    def truth(self) -> Values:
        """Returns the results of the reference by name, in fp64 without rounding. Raises
        what the reference raises, and Unsupported for what has no exact result."""
        return self.computed(UNROUNDED)

    @cached_property
    def rounded(self) -> list[Values]:
        """Returns the results, by name, of runs with every operation rounded: one to
        nearest, then RANDOM of them stochastically. Raises what the reference raises, and
        Unsupported for what has no exact result."""
        nearest = [self._rounded(noise=self.seed * RUNS)]
        return nearest + [self._at_random(seed) for seed in range(1, 1 + RANDOM)]

    @cached_property
    def sound(self) -> list[Values]:
        """Returns the results, by name, of SOUND further runs, rounded stochastically.
        They stand for sound kernels: what may be erred is made without them, what chance
        may add with them. Raises as `rounded`."""
        first = 1 + RANDOM
        return [self._at_random(seed) for seed in range(first, first + SOUND)]

    @cached_property
    def closer(self) -> list[Values]:
        """Returns the results, by name, of CLOSER further runs, rounded stochastically.
        Raises as `rounded`."""
        first = 1 + RANDOM + SOUND
        return [self._at_random(seed) for seed in range(first, first + CLOSER)]

    @cached_property
    def by_formula(self) -> Values | None:
        """Returns the results, by name, of a run with every operation rounded, in which
        none takes the steps of PyTorch's kernel in place of its formula's; None where
        none does in `rounded` either. Raises as `rounded`."""
        if not self.kernels_taken:
            return None
        return self._rounded(noise=self.seed * RUNS, as_kernels=False)

    @property
    def kernels_taken(self) -> Sequence[str]:
        """Returns the operators that take the steps of PyTorch's kernel, in place of
        their formula's, in `rounded`. Raises as `rounded`."""
        return list(self._kernels_taken) if self.rounded else []

    def _at_random(self, number: int) -> Values:
        """Returns the results, by name, of run `number` (below RUNS) of the call, rounded
        stochastically. No two runs of calls that are judged together share random
        numbers."""
        seed = self.seed * RUNS + number
        return self._rounded(noise=seed, seed=seed)

    def _rounded(
        self, *, noise: int, seed: int | None = None, as_kernels: bool = True
    ) -> Values:
        """Returns the results, by name, of a run with every operation rounded. `noise`:
        the seed of the errors that arithmetic makes before it rounds; `seed`: by which
        results are rounded up or down at random; None: they are rounded to nearest.
        `as_kernels`: see `EveryOperation`."""
        arithmetic = Arithmetic(
            noise=noise,
            seed=seed,
            is_narrow=bool(self.returned_in),
            as_kernels=as_kernels,
        )
        values = self.computed(arithmetic)
        self._kernels_taken.update(arithmetic.kernels_taken)
        for name, dtype in self.returned_in.items():
            values[name] = round_values(values[name], values_format(dtype))
        return values

    def computed_exactly(
        self,
        arguments: Arguments,
        cotangents: Cotangents | None = None,
        *,
        backward: bool | None = None,
    ) -> Values:
        """Returns the exact results, by name, of other arguments, and of other gradients
        that come back (None: the call's own); empty where the reference raises an
        exception. `backward`: whether gradients are among them; None: as in the call."""
        try:
            return self.computed(UNROUNDED, arguments, cotangents, backward=backward)
        except Exception:  # the reference is foreign, and these are not its data
            return {}

    def computed(
        self,
        rounding: Rounding,
        arguments: Arguments | None = None,
        cotangents: Cotangents | None = None,
        within: AbstractContextManager[object] | None = None,
        *,
        backward: bool | None = None,
    ) -> Values:
        """Returns the results of a run, rounded as `rounding` says, by name: outputs, the
        arguments that `plain` wrote into, and with `backward` those gradients that
        `plain` has. `arguments`, `cotangents`, `backward`: None takes the call's own.
        `within`: a context, such as a dispatch mode, in which the run's operations pass
        first. Raises what the reference raises, and Unsupported for what has no exact
        result."""
        backward = self.backward if backward is None else backward
        inputs = (arguments or self.arguments).copied(gradients=backward)
        cotangents = (cotangents or self.cotangents) if backward else None
        by_path = {f"[{i}]{path}": name for i, path, name in _paths(inputs)}
        state = self.written_buffers
        into = [name for name in self.plain.written if name not in state]
        done = evaluate(
            _Spread(self.function, writes=backward and bool(into), state=state),
            *inputs.tree,
            rounding=rounding,
            seed=self.seed,
            cotangent=None if cotangents is None else self._back(cotangents),
            within=within,
        )
        spread = cast(_Spreaded, done.output)
        tree = done.arguments if spread.tree is None else spread.tree
        values = outputs_of(spread.output)
        # The tree of arguments that `Arguments.tree` is.
        positional, named = cast(tuple[tuple[object, ...], Mapping[str, object]], tree)
        after = Arguments(positional=positional, named=named, names=inputs.names)
        ran = after.leaves()
        values |= {name: ran[name] for name in into} | spread.buffers
        for path, gradient in done.gradients.items():
            name = gradient_name(
                by_path.get(path, path.removeprefix("module.").replace(OF_COMPILED, ""))
            )
            if name in self.plain.gradients and gradient is not None:
                values[name] = gradient
        return {name: as_real(widened(x)).detach() for name, x in values.items()}

    def _back(self, cotangents: Cotangents) -> Cotangent:
        """Returns a function of the place of a floating-point output among these, and of
        the output: what comes back into it. Raises what the reference raises."""
        numbers = list(cotangent_numbers(self.plain.outputs).values())
        return lambda i, output: cotangents.of(numbers[i], output)


def parameters_of_module(function: Callable[..., object]) -> Values:
    """Returns the parameters and persistent buffers of a function's module by name; empty
    for a function without a module."""
    module = module_of_function(function)
    return {} if module is None else dict(module.state_dict())


def _paths(arguments: Arguments) -> list[tuple[int, str, str]]:
    """Returns one entry for each place where a tensor stands in the arguments: (0 for
    positional or 1 for named arguments, its path among them as PyTorch writes it, the
    tensor's name). A tensor that stands twice has two entries with one name."""
    names = {id(x): name for name, x in arguments.leaves().items()}
    placed: list[tuple[int, str, str]] = []
    for i, part in enumerate(arguments.tree):
        paths, _ = tree_flatten_with_path(part)
        placed += [
            (i, keystr(path), names[id(x)]) for path, x in paths if isinstance(x, Tensor)
        ]
    return placed


def moved_by_half_an_ulp(arguments: Arguments, seed: int) -> Arguments:
    """Returns the arguments with every real floating-point number moved at random by at
    most its dtype's unit roundoff times itself, in fp64 tensors that say that dtype: no
    kernel can know better than its inputs. Integers and complex numbers stay. `seed`: of
    these moves."""
    generator = torch.Generator().manual_seed(seed)

    def move(name: str, x: Tensor) -> Tensor:
        """Returns a real floating-point tensor moved; any other itself."""
        if not x.is_floating_point():
            return x
        drawn = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        step = torch.finfo(x.dtype).eps / 2 * (2 * drawn - 1)
        return Wide.of(x.detach().double() * (1 + step.to(x.device)), x.dtype)

    return arguments.mapped(move)
