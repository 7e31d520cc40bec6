"""Runs of a function as PyTorch runs it: what it returns, writes and differentiates to.

A function under test is foreign code. It gets copies; what it returns is copied away
before anything else runs; memory that it may be given for its output was filled with NaN.
What it does besides computing is in `FunctionRun.misdeeds`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from numdev.cases import may_overlap, strided_as
from numdev.errors import MeasurementError, one_line
from numdev.exact.result_dtypes import is_floating
from numdev.metrics.bit_checksums import checksums, same
from numdev.operations.function.trees import (
    Arguments,
    Values,
    as_real,
    gradient_name,
    looks_unwritten,
    others_of,
    outputs_of,
    without_numbers,
)
from numdev.seeding import seeded

OF_COMPILED = "_orig_mod."  # torch.compile puts it before names of a module's parameters
POISONED = 4  # blocks of an output's size that are filled with NaN and given back


@dataclass(frozen=True, kw_only=True, eq=False)
class FunctionRun:
    """What one call of a function came to, by name, in tensors of their own."""

    outputs: Values  # detached, strided as they came
    gradients: Values = field(default_factory=dict)
    # Arguments that it wrote into, and buffers of the module that it is
    written: Values = field(default_factory=dict)
    raw: Values = field(default_factory=dict)  # the outputs in the memory they came in
    differentiable: tuple[str, ...] = ()  # outputs that gradients went back into
    alias: str | None = None  # an input in whose memory an output lies
    overwritten: tuple[str, ...] = ()  # outputs that a later call wrote into
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of outputs
    devices: Mapping[str, str] = field(default_factory=dict)  # of outputs, their types
    # Why gradients could not be computed of a call that wrote into its inputs
    backward_error: str | None = None
    buffers: tuple[str, ...] = ()  # arguments that are memory for an output
    # Checksums of a module's buffers before the call, by name
    state: Mapping[str, str] = field(default_factory=dict)
    in_float32: tuple[str, ...] = ()  # operators that have no kernel of their dtype here
    # What was returned where that holds no tensor: `None`, `a value of type float`
    in_place_of_tensors: str | None = None
    beside_tensors: tuple[str, ...] = ()  # what else was returned: `output_1 (float)`
    # How many tensors a gradient goes back to that are no inputs and no parameters
    unnamed_leaves: int = 0

    @property
    def tensors(self) -> Values:
        """Returns all that came of the call, by name: outputs, arguments written into,
        gradients."""
        return {**self.outputs, **self.written, **self.gradients}

    def moved_to(self, device: str) -> FunctionRun:
        """Returns the run with outputs, gradients and written arguments on a device; all
        else, such as `devices`, stays."""
        outputs, gradients, written = (
            {name: x.to(device) for name, x in group.items()}
            for group in (self.outputs, self.gradients, self.written)
        )
        return dataclasses.replace(
            self, outputs=outputs, gradients=gradients, written=written
        )

    def misdeeds(self, like: FunctionRun) -> list[str]:
        """Returns clauses on what the run did that `like`, the reference's run, did not:
        `writes into its inputs (x)` (but for memory for an output, and for buffers of a
        module that the reference has none of), `returns memory of its input x`, `lets no
        gradient back from output`. Outputs that a later call wrote into are named
        whatever the reference did: `writes a later call's result into an earlier one's
        (output)`. Empty where there is nothing."""
        wrong = self.wrongly_written(like)
        clauses = [f"writes into its inputs ({', '.join(wrong)})"] if wrong else []
        may_be_written = {*like.written, *like.buffers}
        if self.alias and not like.alias and self.alias not in may_be_written:
            clauses.append(f"returns memory of its input {self.alias}")
        lacking = [n for n in like.differentiable if n not in self.differentiable]
        if like.gradients and lacking:
            clauses.append(f"lets no gradient back from {', '.join(lacking)}")
        if self.overwritten:
            names = ", ".join(self.overwritten)
            clauses.append(
                f"writes a later call's result into an earlier one's ({names})"
            )
        return clauses

    def wrongly_written(self, like: FunctionRun) -> list[str]:
        """Returns the names of arguments and buffers that the run wrote into and `like`,
        the reference's run, did not. Memory for an output may be written into, and so may
        buffers that the reference has none of, or with other numbers before the call."""
        may_be_written = {*like.written, *like.buffers, *self.other_buffers(like)}
        return [name for name in self.written if name not in may_be_written]

    def other_buffers(self, like: FunctionRun) -> set[str]:
        """Returns the names of the module's buffers that `like`, another run, has none
        of, or that held other numbers before that."""
        return {name for name, of in self.state.items() if like.state.get(name) != of}

    def narrowed(self, dtypes: Mapping[str, torch.dtype]) -> FunctionRun:
        """Returns the run with the outputs named in `dtypes` cast to these dtypes; names
        of no output are passed over."""
        outputs = {n: x.to(dtypes.get(n, x.dtype)) for n, x in self.outputs.items()}
        return dataclasses.replace(self, outputs=outputs)

    def finished(self) -> FunctionRun:
        """Returns the run after all calls were made: `overwritten` names the outputs
        whose memory has changed since this call, and `raw` is empty."""
        pairs = ((name, x, self.outputs[name]) for name, x in self.raw.items())
        changed = [n for n, x, y in pairs if not same(as_real(x), as_real(y))]
        return dataclasses.replace(self, raw={}, overwritten=tuple(changed))


@dataclass(frozen=True, kw_only=True, eq=False)
class Cotangents:
    """The gradients that come back into a call's outputs: normal numbers of a seed, the
    same for every implementation."""

    seed: int

    def of(self, i: int, output: Tensor) -> Tensor:
        """Returns the gradient that comes back into an output, a floating-point one, that
        has number i (`cotangent_numbers`): normal numbers of its shape, on its device, in
        float64 or complex128 (imaginary part 0). They are rounded to float32 for an
        output of 32 bits or more, else to bfloat16, whose values every format has but
        those of 8 bits and float16. Numbers of few bits would add up in float32 without a
        rounding, or with the same one each time."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + i)
        real = torch.float64
        drawn = torch.randn(output.shape, generator=generator, dtype=real)
        is_wide = output.dtype.itemsize // (1 + output.is_complex()) >= 4
        dtype = torch.float32 if is_wide else torch.bfloat16
        values = drawn.to(dtype).to(real).to(output.device)
        return values.to(torch.complex128) if output.is_complex() else values


def _kind_of(returned: object) -> str:
    """Returns what a function returned that holds no tensor, in words: `None`, or `a
    value of type float`. A coroutine is closed."""
    if returned is None:
        return "None"
    if isinstance(returned, Coroutine):
        returned.close()  # nobody awaits it
    return f"a value of type {type(returned).__name__}"


def run(
    function: Callable[..., object],
    arguments: Arguments,
    *,
    seed: int,
    cotangents: Cotangents | None = None,
) -> FunctionRun:
    """Calls a function once, with copies of the arguments, and returns what came of it.
    `seed`: of PyTorch's generators, which are as before afterwards, on CUDA only where it
    was in use. With `cotangents` autograd computes the gradients of floating-point
    arguments, and of parameters that require one, from the outputs that do; without,
    gradients are off. Where autograd fails after the function wrote into its inputs,
    `backward_error` says why, and there are no gradients. A module is not copied. Raises
    what the function and, unless it wrote, what autograd raises; MeasurementError where
    the function ends the program, and for an output whose numbers cannot be read."""
    roots = arguments.copied(gradients=cotangents is not None)
    buffers = {n: x.detach().clone() for n, x in buffers_of(function).items()}
    with seeded(seed), torch.set_grad_enabled(cotangents is not None):
        # Autograd lets nobody write into a tensor that requires a gradient itself
        inputs = roots if cotangents is None else roots.mapped(_child)
        leaves = inputs.leaves()
        returned = called(function, inputs.positional, inputs.named)
        _wait(leaves)
        outputs = outputs_of(returned)
        _check_numbers(outputs)
        written = _written(arguments.leaves(), leaves, buffers, buffers_of(function))
        gradients: Values = {}
        through: tuple[str, ...] = ()
        unnamed = 0
        why: str | None = None
        if cotangents is not None:
            through = _through(outputs)
            every = {**roots.leaves(), **_parameters(function)}
            unnamed = _count_leaves(outputs, every)
            try:
                gradients = _gradients(outputs, every, cotangents)
            except Exception as error:
                if not written:
                    raise
                why = one_line(error)
    taken = FunctionRun(
        outputs=_taken(outputs),
        gradients=_taken(gradients),
        written=_taken(written),
        differentiable=through,
        alias=_alias(outputs, leaves),
        backward_error=why,
        buffers=_buffers(arguments.leaves()),
        state={name: _checksum(x) for name, x in buffers.items()},
        in_place_of_tensors=None if outputs else _kind_of(returned),
        beside_tensors=tuple(others_of(returned)),
        unnamed_leaves=unnamed,
    )
    return dataclasses.replace(
        taken,
        raw={name: x.detach() for name, x in outputs.items()},
        strides={name: x.stride() for name, x in outputs.items()},
        devices={name: x.device.type for name, x in outputs.items()},
    )


def called(
    function: Callable[..., object],
    positional: Sequence[object],
    named: Mapping[str, object],
) -> object:
    """Returns what a function, which is foreign code, returns of these arguments.
    PyTorch's modes are as before afterwards. Raises what it raises, and MeasurementError
    where it raises SystemExit: numdev's exit code is its verdict."""
    try:
        with _modes_restored():
            return function(*positional, **dict(named))
    except SystemExit as error:
        why = f"ended the program (exit code {error.code})"
        raise MeasurementError(why) from error


@contextlib.contextmanager
def _modes_restored() -> Iterator[None]:
    """Returns a context at whose end PyTorch's modes are as at its start: the default
    dtype, whether gradients are on, deterministic algorithms, the precision of products
    in float32 and the number of threads. What one call sets would change the numbers of
    the next."""
    dtype, is_on = torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(is_on)
        now = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        if now != (deterministic, warns):  # which loads PyTorch's compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        if torch.get_float32_matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _check_numbers(outputs: Values) -> None:
    """Raises MeasurementError for an output without a number for each element in memory:
    on the device meta, sparse, nested or quantized."""
    for name, x in outputs.items():
        if kind := without_numbers(x):
            raise MeasurementError(
                f"{name}: expected a number for each element, got a tensor that is {kind}"
            )


def _buffers(values: Values) -> tuple[str, ...]:
    """Returns the names of tensors that are memory for an output: those of which
    `looks_unwritten` holds."""
    return tuple(name for name, x in values.items() if looks_unwritten(x))


def _child(name: str, x: Tensor) -> Tensor:
    """Returns a copy of a tensor that requires a gradient, laid out alike; code may write
    into the copy, and its gradient goes back to the tensor. Where two of its elements may
    share memory, into which PyTorch lets nobody write, it is a view in place of a copy. A
    tensor that requires none is returned as it is. `name` is not used."""
    if not x.requires_grad:
        return x
    if may_overlap(x.shape, x.stride()):
        return x.view_as(x)
    return strided_as(x.clone(), x)


def private(function: Callable[..., object]) -> Callable[..., object]:
    """Returns a module, or a function of one (`module_of_function`), as a deep copy that
    a run may change; any other function as it is. Raises MeasurementError for a module
    that cannot be copied, as one that makes its parameters in its first call."""
    module = module_of_function(function)
    if module is None:
        return function
    try:
        return copy.deepcopy(function)
    except Exception as error:  # of foreign classes
        what = f"{type(module).__name__} cannot be copied"
        raise MeasurementError(f"{what}: {one_line(error)}") from error


def module_of_function(function: Callable[..., object]) -> nn.Module | None:
    """Returns the module that a function is, or whose method it is, such as `forward`,
    also where some arguments are set already (`functools.partial`); None for any other
    function."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else None


def _written(
    arguments: Values, arguments_after: Values, buffers: Values, buffers_after: Values
) -> Values:
    """Returns the arguments that a call wrote into, and the buffers, as they are
    afterwards, by name; of a name that both have, the argument. A buffer that has another
    shape or dtype afterwards was replaced, and does not count."""
    names = [n for n in buffers if n in buffers_after and n not in arguments]
    alike = [n for n in names if _form(buffers[n]) == _form(buffers_after[n])]
    before = {**arguments, **{n: buffers[n] for n in alike}}
    after = {**arguments_after, **{n: buffers_after[n].detach() for n in alike}}
    return {
        n: after[n] for n in before if not same(as_real(after[n]), as_real(before[n]))
    }


def _checksum(x: Tensor) -> str:
    """Returns a checksum of a tensor's dtype, shape and bits."""
    [digits] = checksums(as_real(x).reshape(1, 1, 1, -1))
    return f"{x.dtype} {list(x.shape)} {digits}"


def _form(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Returns a tensor's shape and dtype."""
    return x.shape, x.dtype


def buffers_of(function: Callable[..., object]) -> Values:
    """Returns the buffers of a function's module by name, without the `_orig_mod.` of a
    compiled module, and without those that have no number for each element in memory;
    empty for a function without a module."""
    module = module_of_function(function)
    if module is None:
        return {}
    named = ((n.replace(OF_COMPILED, ""), x) for n, x in module.named_buffers())
    return {name: x for name, x in named if without_numbers(x) is None}


@contextlib.contextmanager
def buffers_restored(function: Callable[..., object]) -> Iterator[None]:
    """Returns a context at whose end the buffers of a function's module hold what they do
    at the start, in the tensors of the start. A buffer that has another shape or dtype by
    then stays: it was not updated but replaced, as by weights that the first call packs.
    Does nothing for a function without a module."""
    owner = module_of_function(function)
    modules = [] if owner is None else list(owner.modules())
    # Not of `_buffers`, which is no dict in a scripted module
    every = [(m, name) for m in modules for name, _ in m.named_buffers(recurse=False)]
    places = [
        (module, name, x, x.detach().clone())
        for module, name in every
        if without_numbers(x := getattr(module, name)) is None
    ]
    try:
        yield
    finally:
        for module, name, x, before in places:
            _put_back(module, name, x, before)


def _put_back(module: nn.Module, name: str, buffer: Tensor, values: Tensor) -> None:
    """Makes a tensor the buffer `name` of a module again, apart from autograd, and writes
    the values into it where it has others. Does nothing where the module has none of that
    name, or the one that it has, or the tensor, is not of the values' shape and dtype."""
    now = dict(module.named_buffers(recurse=False)).get(name)
    if now is None or not _form(now) == _form(buffer) == _form(values):
        return
    if now is not buffer:
        setattr(module, name, buffer)
    if buffer.grad_fn is not None:
        buffer.detach_()
    if not same(as_real(buffer), as_real(values)):
        with torch.no_grad():
            buffer.copy_(values)


def poison(like: Sequence[Tensor]) -> None:
    """Fills POISONED new blocks of the size of each of these tensors with NaN (of
    integers with 1), and frees them, so that an output in such memory that is not written
    is seen. The tensors themselves are not changed. A dtype that cannot be filled is
    passed over."""
    for x in like:
        blocks = [torch.empty_like(x) for _ in range(POISONED)]
        for block in blocks:
            with contextlib.suppress(RuntimeError):  # a dtype that cannot be filled
                block.fill_(torch.nan if is_floating(x) else 1)
        del blocks


def _through(outputs: Values) -> tuple[str, ...]:
    """Returns the names of the floating-point outputs that require a gradient."""
    return tuple(n for n, x in outputs.items() if is_floating(x) and x.requires_grad)


def _parameters(function: Callable[..., object]) -> Values:
    """Returns the parameters of a function's module by name, without the `_orig_mod.` of
    a compiled module; empty for a function without a module."""
    module = module_of_function(function)
    named = () if module is None else module.named_parameters()
    return {n.replace(OF_COMPILED, ""): x for n, x in named}


def cotangent_numbers(outputs: Values) -> dict[str, int]:
    """Returns by the name of each floating-point output, in the order of `outputs`, the
    number of the gradient that comes back into it. They are numbered by their names, so
    that an output gets the same gradient where another one requires none, and where a
    mapping has them in another order."""
    names = [name for name, x in outputs.items() if is_floating(x)]
    numbers = {name: i for i, name in enumerate(sorted(names))}
    return {name: numbers[name] for name in names}


def _with_gaps(x: Tensor) -> Tensor:
    """Returns the same numbers in memory of their own where 0 stands behind each, so that
    the tensor is not contiguous, unless it has a single number."""
    gaps = torch.zeros((*x.shape, 2), dtype=x.dtype, device=x.device)
    return gaps[..., 0].copy_(x)


def _gradients(outputs: Values, leaves: Values, cotangents: Cotangents) -> Values:
    """Returns the gradients by name (`x_grad`), of those leaves that require one and that
    an output depends on; empty without leaves or outputs that require one. What comes
    back into an output is contiguous for an even seed and not for an odd one: of the two
    calls of a seed one has each, since autograd promises no layout. Raises what autograd
    raises."""
    leaves = {name: x for name, x in leaves.items() if x.requires_grad}
    numbers = cotangent_numbers(outputs)
    numbered = [(i, outputs[n]) for n, i in numbers.items() if outputs[n].requires_grad]
    if not numbered or not leaves:
        return {}
    back = [cotangents.of(i, x).to(x.dtype) for i, x in numbered]
    if cotangents.seed % 2:
        back = [_with_gaps(x) for x in back]
    gradients = torch.autograd.grad(
        [x for _, x in numbered], list(leaves.values()), back, allow_unused=True
    )
    pairs = zip(leaves, gradients, strict=True)
    return {gradient_name(name): x for name, x in pairs if x is not None}


def _count_leaves(outputs: Values, named: Values) -> int:
    """Returns how many tensors that autograd computes gradients for, from these outputs,
    are none of `named`: parameters that a function reads from elsewhere."""
    ours = {id(x) for x in named.values()}
    pending = [x.grad_fn for x in outputs.values()]
    seen: set[object] = set()
    leaves: set[int] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that ends the graph
        if isinstance(variable, Tensor) and id(variable) not in ours:
            leaves.add(id(variable))
        pending += [following for following, _ in node.next_functions]
    return len(leaves)


def _alias(outputs: Values, leaves: Values) -> str | None:
    """Returns the name of the input in whose memory an output lies, for the first such
    output; of inputs that share this memory the last. None where no output does. Empty
    tensors do not count."""
    where = {x.untyped_storage().data_ptr(): n for n, x in leaves.items() if x.numel()}
    for x in outputs.values():
        if x.numel() and x.untyped_storage().data_ptr() in where:
            return where[x.untyped_storage().data_ptr()]
    return None


def _taken(values: Values) -> Values:
    """Returns detached copies by name, in memory of their own, with the strides of the
    originals where no two elements of these share memory."""
    plain = {n: x.detach().resolve_conj().resolve_neg() for n, x in values.items()}
    return {name: strided_as(x.clone(), x) for name, x in plain.items()}


def _wait(leaves: Values) -> None:
    """Waits for all streams of the current CUDA device, side streams too; does nothing
    where no tensor is on CUDA."""
    if any(x.is_cuda for x in leaves.values()):
        torch.cuda.synchronize()
