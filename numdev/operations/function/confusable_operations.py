"""Operations that are taken for one another: GELU by tanh and by erf, a LayerNorm for an
RMSNorm, a softmax along another axis, a logarithm of another base.

A twin is a change of `substituted_operations`, with the words that name it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from numdev.operations.function.substituted_operations import (
    NORMS,
    SOFTMAXES,
    Change,
    OperatorCall,
    aten,
    normalised,
    with_argument,
)

LN_2 = math.log(2.0)
OF_TANH = math.sqrt(2 / math.pi)
CUBIC = 0.044715
QUICK = 1.702  # of the sigmoid that stands for a GELU
STEPS = 12  # of Newton's method, for the number of which a cubic is given
ALONG = SOFTMAXES | {"cumsum", "cumprod"}
# Not `training`: without running statistics PyTorch crashes.
FLAGS = frozenset(  # arguments that change what is computed and not its shape
    ("count_include_pad", "align_corners", "largest", "descending", "upper")
)
COMPARED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
EXCHANGED = {"add": "sub", "sub": "add", "mul": "div", "div": "mul"}
CLAUSES = {"sub": "subtracts", "add": "adds", "mul": "multiplies", "div": "divides"}


def by_tanh(x: Tensor) -> Tensor:
    """Returns the normal distribution function of x, 0.5 (1 + tanh(sqrt(2 / pi) (x +
    0.044715 x^3))), as GELU by tanh has it."""
    return 0.5 * (1 + torch.tanh(OF_TANH * (x + CUBIC * x**3)))


def by_erf(x: Tensor) -> Tensor:
    """Returns the normal distribution function of x, 0.5 (1 + erf(x / sqrt(2)))."""
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_by_tanh(x: Tensor) -> Tensor:
    """Returns GELU of x, with the normal distribution function by tanh."""
    return x * by_tanh(x)


def gelu_by_erf(x: Tensor) -> Tensor:
    """Returns GELU of x, with the normal distribution function by erf."""
    return x * by_erf(x)


def quick_gelu(x: Tensor) -> Tensor:
    """Returns x times a sigmoid of 1.702 x, which stands for GELU."""
    return x * torch.sigmoid(QUICK * x)


def silu(x: Tensor) -> Tensor:
    """Returns SiLU of x, x times its sigmoid."""
    return x * torch.sigmoid(x)


def relu(x: Tensor) -> Tensor:
    """Returns the positive part of x."""
    return x.clamp_min(0)


def leaky(x: Tensor) -> Tensor:
    """Returns x where it is positive, a hundredth of it elsewhere."""
    return torch.where(x > 0, x, 0.01 * x)


def cut_at_six(x: Tensor) -> Tensor:
    """Returns x, with 0 where it is below 0 and 6 where it is above 6."""
    return x.clamp(0, 6)


def quick_sigmoid(x: Tensor) -> Tensor:
    """Returns the sigmoid of 1.702 x."""
    return torch.sigmoid(QUICK * x)


def plain_softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)), infinite where exp(x) overflows."""
    return torch.log1p(torch.exp(x))


def erf_by_tanh(x: Tensor) -> Tensor:
    """Returns the approximation of erf that GELU by tanh is made of."""
    return 2 * by_tanh(x * math.sqrt(2)) - 1


def erf_for_tanh(x: Tensor) -> Tensor:
    """Returns the erf that stands in GELU by erf where GELU by tanh has tanh(x)."""
    return 2 * by_erf(_before_cubic(x)) - 1


def base_two_of_one_more(x: Tensor) -> Tensor:
    """Returns the logarithm of 1 + x to base 2."""
    return torch.log1p(x) / LN_2


# What stands for what, for operators that are a function of each number
Table = Mapping[str, Mapping[str, Callable[[Tensor], Tensor]]]
GELUS = {
    "GELU by tanh": gelu_by_tanh,
    "GELU by erf": gelu_by_erf,
    "GELU by a sigmoid of 1.702 x": quick_gelu,
}
ACTIVATIONS: Table = {
    "gelu": {**GELUS, "SiLU": silu, "ReLU": relu},
    "silu": {**GELUS, "a sigmoid": torch.sigmoid, "ReLU": relu},
    "relu": {"SiLU": silu, "leaky ReLU": leaky, "ReLU cut at 6": cut_at_six, **GELUS},
}
RARER_ACTIVATIONS: Table = {
    "mish": {"SiLU": silu, "softplus": F.softplus, **GELUS},
    "softplus": {"ReLU": relu, "SiLU": silu, "log(1 + exp(x))": plain_softplus},
    "elu": {"ReLU": relu, "SELU": F.selu},
}
OF_PARTS: Table = {
    "erf": {"the tanh of GELU by tanh": erf_by_tanh, "tanh": torch.tanh},
    "tanh": {"the erf of GELU by erf": erf_for_tanh, "erf": torch.erf},
    "sigmoid": {
        "a sigmoid of 1.702 x": quick_sigmoid,
        "the normal distribution function": by_erf,
        "a hard sigmoid": F.hardsigmoid,
        "tanh": torch.tanh,
        "softplus": F.softplus,
    },
}
ELEMENTARY: Table = {
    "log": {"log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p},
    "log2": {"log": torch.log},
    "log10": {"log": torch.log},
    "log1p": {"log": torch.log, "log2 of 1 + x": base_two_of_one_more},
    "exp": {"exp2": torch.exp2, "expm1": torch.expm1},
    "exp2": {"exp": torch.exp},
    "expm1": {"exp": torch.exp},
}
ROOTS_AND_ANGLES: Table = {
    "rsqrt": {"reciprocal": torch.reciprocal, "sqrt": torch.sqrt},
    "sqrt": {"rsqrt": torch.rsqrt},
    "sin": {"cos": torch.cos},
    "cos": {"sin": torch.sin},
}
OF_ACTIVATIONS = {**ACTIVATIONS, **RARER_ACTIVATIONS, **OF_PARTS}
UNARY = {**OF_ACTIVATIONS, **ELEMENTARY, **ROOTS_AND_ANGLES}


def _before_cubic(inner: Tensor) -> Tensor:
    """Returns the x for which sqrt(2 / pi) (x + 0.044715 x^3) is `inner`, element by
    element, by Newton's method."""
    wanted = inner / OF_TANH
    x = wanted / (1 + CUBIC * wanted.square()).sqrt()
    for _ in range(STEPS):
        x = x - (x + CUBIC * x**3 - wanted) / (1 + 3 * CUBIC * x.square())
    return x


def twins(calls: Mapping[str, int]) -> Iterator[tuple[str, Change]]:
    """Yields (words, change) for each twin of the operators in `calls`, in their order. A
    change is of all calls of an operator at once; an addition, subtraction, product or
    quotient has a twin only where it is called once. Then, whatever is in `calls`, comes
    the change of comparisons, then other axes for the softmaxes, running sums and running
    products in `calls`, then, whatever is in `calls`, each flag; such a change does
    nothing where no call has it. `calls`: how often each operator is called, by name."""
    for name in calls:
        for other, function in UNARY.get(name, {}).items():
            words = f"it computes {other} in place of {name}"
            yield words, partial(_unary, name=name, function=function)
        if name in NORMS:
            yield (
                f"{name} does not take the mean away, as RMSNorm",
                partial(normalised, centred=False),
            )
            yield (
                f"{name} adds eps to the root, not under it",
                partial(normalised, outside=True),
            )
        if name == "logsumexp":
            yield "it computes the maximum in place of logsumexp", _maximum
        if name in ("cumsum", "cumprod"):
            yield f"{name} goes backwards", partial(_backwards, name=name)
            yield f"{name} leaves out the place itself", partial(_before, name=name)
        if name in ("triu", "tril"):
            for step in (1, -1):
                yield (
                    f"{name} is cut {step:+d} diagonal farther",
                    partial(_diagonal, name=name, step=step),
                )
        if name in EXCHANGED and calls[name] == 1:
            clause = f"{CLAUSES[EXCHANGED[name]]} where it should {_infinitive(name)}"
            yield f"it {clause}", partial(exchanged, name=name)
    yield "it compares with < for <=, or > for >=, or the reverse", _compared
    yield from _along_other_axes(calls)
    for flag in sorted(FLAGS):
        yield f"{flag} is the other way round", partial(_flipped, flag=flag)


def _infinitive(name: str) -> str:
    """Returns the verb of an operator, as in `where it should add`: `add`, `subtract`,
    `multiply` or `divide`. `name`: add, sub, mul or div; KeyError for another."""
    return {"sub": "subtract", "add": "add", "mul": "multiply", "div": "divide"}[name]


def _along_other_axes(calls: Mapping[str, int]) -> Iterator[tuple[str, Change]]:
    """Yields (words, change) for the softmaxes, running sums and running products in
    `calls` along each of the axes 0 to 4."""
    for name in calls:
        for axis in range(5) if name in ALONG else ():
            what = name.removeprefix("_")
            yield f"{what} goes along axis {axis}", partial(_along, name=name, axis=axis)


def _unary(
    operation: OperatorCall, name: str, function: Callable[[Tensor], Tensor]
) -> object:
    """Returns `function` of the operator's input in place of its result; written into the
    input where the operator writes there. NotImplemented for another operator than
    `name`, and for an activation of complex numbers, which most functions do not take."""
    if operation.name != name:
        return NotImplemented
    x = operation.tensor(0)
    if x.is_complex() and name in OF_ACTIVATIONS:
        return NotImplemented
    result = function(x)
    if operation.func._schema.is_mutable:
        return x.copy_(result)
    return result.to(cast(Tensor, operation.result()).dtype)


def _along(operation: OperatorCall, name: str, axis: int) -> object:
    """Returns an operator's result along another axis. NotImplemented for another
    operator than `name`, where it goes along that axis already, and where the tensor has
    no such axis."""
    if operation.name != name:
        return NotImplemented
    x, dim = operation.tensor(0), cast(int, operation.args[1])
    if axis >= x.ndim or dim % x.ndim == axis:
        return NotImplemented
    return operation.on(x, axis)


def to_base_two(operation: OperatorCall) -> object:
    """Returns a natural logarithm's result over ln 2, so that it is to base 2; the powers
    of e in it stay. NotImplemented for any operator but log, log1p, logsumexp and
    log_softmax."""
    if operation.name not in ("log", "log1p", "logsumexp", "_log_softmax"):
        return NotImplemented
    return cast(Tensor, operation.result()) / LN_2


def _maximum(operation: OperatorCall) -> object:
    """Returns the maximum in place of logsumexp; NotImplemented for another operator, and
    for complex numbers, which have none."""
    if operation.name != "logsumexp" or operation.tensor(0).is_complex():
        return NotImplemented
    return aten.amax.default(*operation.args, **operation.kwargs)


def _backwards(operation: OperatorCall, name: str) -> object:
    """Returns a running sum or product from the other end; NotImplemented for another
    operator than `name`."""
    if operation.name != name:
        return NotImplemented
    x, dim = operation.tensor(0), cast(int, operation.args[1])
    return cast(Tensor, operation.on(x.flip(dim))).flip(dim)


def _before(operation: OperatorCall, name: str) -> object:
    """Returns a running sum or product of what comes before each place, 0 or 1 at the
    first; NotImplemented for another operator than `name`."""
    if operation.name != name:
        return NotImplemented
    x, dim = operation.tensor(0), cast(int, operation.args[1])
    first = torch.full_like(x.narrow(dim, 0, 1), 0.0 if name == "cumsum" else 1.0)
    return operation.on(torch.cat((first, x.narrow(dim, 0, x.shape[dim] - 1)), dim))


def _diagonal(operation: OperatorCall, name: str, step: int) -> object:
    """Returns a triangle that is cut `step` diagonals farther; NotImplemented for another
    operator than `name`."""
    if operation.name != name:
        return NotImplemented
    diagonal = cast(int, operation.argument("diagonal"))
    return operation.func(operation.args[0], diagonal + step)


def _compared(operation: OperatorCall) -> object:
    """Returns a comparison in which equal numbers count the other way: < for <=, >= for
    >, or the reverse. NotImplemented for another operator, and for one that writes into
    its input."""
    other = COMPARED.get(operation.name)
    if other is None or operation.func._schema.is_mutable:
        return NotImplemented
    packet = getattr(aten, other)
    return getattr(packet, operation.func._overloadname)(*operation.args)


def exchanged(operation: OperatorCall, name: str) -> object:
    """Returns a difference in place of a sum, a quotient in place of a product, or the
    reverse. NotImplemented for another operator than `name`, and for one that writes."""
    if operation.name != name or len(operation.args) < 2:
        return NotImplemented
    if operation.func._schema.is_mutable:
        return NotImplemented
    function = getattr(torch, EXCHANGED[name])
    return function(*operation.args[:2], **operation.kwargs)


def _flipped(operation: OperatorCall, flag: str) -> object:
    """Returns an operator's result with a bool argument, `flag`, negated; NotImplemented
    for an operator without this argument."""
    for parameter in operation.func._schema.arguments:
        if parameter.name == flag and str(parameter.type) == "bool":
            value = not operation.argument(flag)
            return with_argument(operation, operation.name, flag, value)
    return NotImplemented


class EpsOutside:
    """Adds the number that was added under a root to the root instead: x / (sqrt(m) +
    eps) for x / sqrt(m + eps). It remembers the sums of a run: make a new one for each
    run."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Tensor, Tensor, float]] = {}

    def __call__(self, operation: OperatorCall) -> object:
        """Returns the root of what a float was added to, plus the float, or its
        reciprocal for rsqrt; for a sum with a float its usual result. NotImplemented for
        a root of anything else, and for other operators."""
        if operation.name == "add" and isinstance(operation.args[1], float):
            before = operation.tensor(0).clone()
            result = cast(Tensor, operation.result())
            self.sums[id(result)] = (result, before, operation.args[1])
            return result
        if operation.name not in ("rsqrt", "sqrt"):
            return NotImplemented
        if id(operation.args[0]) not in self.sums:
            return NotImplemented
        _, before, eps = self.sums[id(operation.args[0])]
        root = before.sqrt() + eps
        return root.reciprocal() if operation.name == "rsqrt" else root
