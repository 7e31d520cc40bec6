"""Arguments: where they come from, and others of the same shapes.

A source of inputs is a function of a seed; of a file or of shapes there are such
functions too. What cannot tell a right function from a wrong one is redrawn: a bias of 0,
a weight of 1."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from numdev.errors import UsageError, closest, one_line
from numdev.exact.result_dtypes import is_floating
from numdev.formats import Format, dtype_of, round_to
from numdev.metrics.bit_checksums import same
from numdev.operations.function.trees import (
    Arguments,
    Values,
    arguments_of,
    changed_in_memory,
    without_numbers,
)
from numdev.seeding import seeded

Make = Callable[[int], Sequence[Arguments]]  # the calls of a seed
SHAPE = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+(?:x\d+)*|)\s*")
TRIVIAL = (0.0, 1.0)  # numbers of which a tensor that is nothing else tells nothing


def calls_of(
    source: Callable[..., object] | Path | str | None,
    function: Callable[..., object],
    *,
    shapes: str = "",
) -> Make:
    """Returns a function that makes the calls of a seed. `source`: a function of inputs,
    which gets the seed and returns the arguments of one call (a tensor, a tuple or a
    mapping), or those of several calls in a list of tuples; or the path of a safetensors
    file of named arguments, which are the same single call for every seed; None: one call
    of normal numbers, in PyTorch's default dtype, in `shapes` (`x=256x1024,w=1024`),
    whose names must be parameters of `function`. A file's names are not checked.
    Positional arguments get the names of the parameters of `function`. Raises UsageError
    for a source and shapes together, another path, a file that cannot be read, and
    without a source for wrong or no shapes. The function that is returned raises
    UsageError for a function of inputs that raises, needs several arguments or returns no
    arguments, and for shapes beyond memory."""
    if source is not None and shapes:
        raise UsageError(
            "inputs: expected a function, a file or shapes, got two of these"
        )
    if source is None:
        sizes = parsed_shapes(shapes)
        _check_names(sizes, function)
        return lambda seed: [_drawn(sizes, seed)]
    if callable(source):
        make = source
        return lambda seed: _from_function(make, function, seed)
    path = Path(source)
    if path.suffix != ".safetensors":
        raise UsageError(
            f"inputs: expected FILE.py:function or FILE.safetensors, got {source}"
        )
    if not path.exists():
        raise UsageError(f"inputs: {path}: no such file")
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except Exception as error:
        raise UsageError(f"{path}: cannot be read: {one_line(error)}") from error
    return lambda seed: [Arguments(named=tensors)]


def _check_names(names: Iterable[str], function: Callable[..., object]) -> None:
    """Raises UsageError for the first name that is no parameter of a function. Every name
    passes where its signature cannot be read, or where it takes any (`**kwargs`)."""
    parameters = parameters_of(function)
    if parameters is None:
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            accepted = ", ".join(parameters) or "no argument"
            raise UsageError(
                f"shape: the reference takes {accepted}, got {name!r}",
                hint=closest(name, parameters),
            )


def parameters_of(
    function: Callable[..., object],
) -> Mapping[str, inspect.Parameter] | None:
    """Returns the parameters of a function by name, in order; None where its signature
    cannot be read, as that of some functions in C."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def parsed_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes by name in `x=256x1024,w=1024`; `x=` is the shape () of a single
    number, and a size may be 0. An empty part is passed over. Raises UsageError for a
    part of another form, for two shapes of one name, and where there is no shape."""
    sizes: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split(",")):
        match = SHAPE.fullmatch(part)
        if match is None:
            raise UsageError(f"shape: expected NAME=AxBxC, got {part!r}")
        if match[1] in sizes:
            raise UsageError(f"shape: expected one of {match[1]}, got two")
        sizes[match[1]] = tuple(int(n) for n in match[2].split("x") if n)
    if not sizes:
        raise UsageError(
            "inputs: expected a function, a file or shapes, got none",
            hint="--inputs ref.py:inputs, or --shape x=256x1024,w=1024",
        )
    return sizes


def _drawn(sizes: Mapping[str, tuple[int, ...]], seed: int) -> Arguments:
    """Returns the arguments of one call by name: normal numbers of a seed in these
    shapes, in PyTorch's default dtype on the CPU. Raises UsageError for a shape that
    memory cannot hold."""
    generator = torch.Generator().manual_seed(seed)
    return Arguments(
        named={name: normal_numbers(name, x, generator) for name, x in sizes.items()}
    )


def normal_numbers(name: str, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns a tensor of normal numbers, the next ones of a generator, in PyTorch's
    default dtype on the CPU. Raises UsageError, which names the tensor, for a shape that
    memory cannot hold. No size is below 0."""
    try:
        return torch.randn(tuple(shape), generator=generator, device="cpu")
    except (TypeError, RuntimeError, MemoryError) as error:
        of = "x".join(map(str, shape))
        raise UsageError(
            f"shape: expected {name} to fit into memory, got {of}"
        ) from error


def _from_function(
    make: Callable[..., object], function: Callable[..., object], seed: int
) -> list[Arguments]:
    """Returns the calls that a function of inputs gives for a seed: several for a list
    that has tuples alone, else one. The function gets the seed as its parameter `seed`,
    or as its only one without a default, or not at all where all have defaults. PyTorch's
    generators are seeded for it and restored afterwards, those of CUDA only where CUDA
    was in use. Raises UsageError where the function raises an exception or SystemExit,
    needs several arguments, or returns None, a text, bytes, an iterator, a coroutine or
    an empty list."""
    with seeded(seed):
        arguments = _seed_for(make, seed)
        try:
            data = make(**arguments)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"inputs: the function raised {one_line(error)}") from error
    if isinstance(data, Coroutine):
        data.close()  # nobody awaits it
    if data is None or isinstance(data, str | bytes | Iterator | Coroutine):
        raise UsageError(
            "inputs: expected a tensor, a tuple or mapping of arguments, or a list of "
            f"tuples, got {type(data).__name__}"
        )
    if isinstance(data, list) and not data:
        raise UsageError("inputs: expected at least one call, got an empty list")
    if isinstance(data, list) and all(isinstance(x, tuple) for x in data):
        return [arguments_of(x, function) for x in data]
    return [arguments_of(data, function)]


def _seed_for(make: Callable[..., object], seed: int) -> dict[str, int]:
    """Returns the keyword arguments that hand a seed to `make`: for its parameter `seed`,
    else for its only parameter without a default; parameters that take no keyword do not
    count. Empty where all parameters have a default, and where the signature cannot be
    read. Raises UsageError for several without a default, `seed` not among them."""
    parameters = parameters_of(make) or {}
    if "seed" in parameters:
        return {"seed": seed}
    needed = [n for n, p in parameters.items() if p.default is p.empty
              and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]  # fmt: skip
    if len(needed) > 1:
        raise UsageError(
            f"inputs: expected a function of a seed, got one of {', '.join(needed)}"
        )
    return {needed[0]: seed} if needed else {}


def prepared(arguments: Arguments, fmt: Format | None, device: str) -> Arguments:
    """Returns the arguments detached and on a device, with the strides that they have.
    Real floating-point tensors are correctly rounded to `fmt` and stored in its dtype;
    None leaves them as they are.
    Integers and complex tensors only move. Raises UsageError where PyTorch has no dtype
    of the format and an argument would be rounded, and for a tensor without a number for
    each element."""

    def move(name: str, x: Tensor) -> Tensor:
        """Returns a tensor detached, rounded where it is to be, on the device."""
        if kind := without_numbers(x):
            raise UsageError(
                f"inputs: expected a number for each element of {name}, got a tensor "
                f"that is {kind}"
            )
        return changed_in_memory(x.detach(), rounded)

    def rounded(memory: Tensor) -> Tensor:
        """Returns numbers on the device, rounded where they are to be."""
        if fmt is not None and memory.is_floating_point():
            memory = round_to(memory.double(), fmt).to(dtype_of(fmt))
        return memory.to(device)

    return arguments.mapped(move)


def trivial_names(arguments: Arguments) -> list[str]:
    """Returns the names of real floating-point tensors of at least two elements that are
    0 everywhere, or 1 everywhere."""
    return [
        name
        for name, x in arguments.leaves().items()
        if x.is_floating_point()
        and x.numel() > 1
        and any(bool((x == value).all()) for value in TRIVIAL)
    ]


def redrawn(arguments: Arguments, names: Sequence[str], seed: int) -> Arguments:
    """Returns the arguments with every element of the tensors in `names`, real
    floating-point ones, moved by a uniform number from -1/2 to 1/2, in the same dtype, on
    the same device and with the same strides; elements that share memory move together.
    The others are as they are."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, x: Tensor) -> Tensor:
        """Returns the moved tensor where it is one of `names`, else `x` itself."""
        if name not in names:
            return x
        return changed_in_memory(x.detach(), move)

    def move(memory: Tensor) -> Tensor:
        """Returns numbers moved at random, in their dtype and on their device."""
        drawn = torch.rand(memory.shape, generator=generator)
        return (memory.double().cpu() + drawn - 0.5).to(memory.dtype).to(memory.device)

    return arguments.mapped(draw)


def shuffled(arguments: Arguments, seed: int) -> Arguments:
    """Returns the arguments with the elements of each floating-point tensor, real or
    complex, in a random order of its own, in contiguous memory: other data of the same
    distribution, where the source knows no other. Integers, and tensors of fewer than two
    elements, are as they are."""
    generator = torch.Generator().manual_seed(seed)

    def shuffle(name: str, x: Tensor) -> Tensor:
        """Returns a floating-point tensor's elements in random order; any other tensor
        itself."""
        if not is_floating(x) or x.numel() < 2:
            return x
        order = torch.randperm(x.numel(), generator=generator).to(x.device)
        return x.flatten()[order].reshape(x.shape)

    return arguments.mapped(shuffle)


def reordered(x: Tensor, seed: int) -> Tensor:
    """Returns the elements of a tensor in a random order of all of them, the same for a
    seed on every device, in a contiguous tensor of the same shape."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(x.numel(), generator=generator).to(x.device)
    return x.flatten()[order].reshape(x.shape)


def differ_in_values(a: Arguments, b: Arguments) -> bool:
    """Whether the tensors of two calls have the same names, shapes and dtypes, and at
    least one tensor has other bits."""

    def forms(values: Values) -> dict[str, tuple[object, ...]]:
        """Returns shape and dtype of each tensor, by name."""
        return {name: (x.shape, x.dtype) for name, x in values.items()}

    first, second = a.leaves(), b.leaves()
    if forms(first) != forms(second):
        return False
    return any(not same(x, second[name]) for name, x in first.items())
