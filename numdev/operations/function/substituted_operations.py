"""Other operations in place of those that a reference calls: what stands in its sums,
which function, in which format.

Each is a function of one call of an operator, in plain PyTorch on the tensors of an exact
run; the gradient of a changed operator is still that of the operator itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from numdev.exact.operator_arguments import operator_argument
from numdev.exact.result_dtypes import is_floating
from numdev.exact.wide_tensors import Wide, widened
from numdev.formats import FORMATS, Format, round_to

aten = torch.ops.aten
PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
# With the dimensions they go along as an argument
REDUCTIONS = frozenset(
    """sum mean nansum amax amin prod logsumexp var std
    linalg_vector_norm""".split()  # noqa: SIM905
)
SOFTMAXES = frozenset(("_softmax", "_log_softmax"))
NORMS = frozenset(("native_layer_norm", "native_group_norm", "native_batch_norm"))
SUMS = PRODUCTS | REDUCTIONS | SOFTMAXES | NORMS | {"convolution"}


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """One call of an operator: the operator with its overload, and the arguments by place
    and by name."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def name(self) -> str:
        """Returns the operator's name without its overload and without the `_` of an
        operator that writes: `add` for `aten.add_.Tensor`."""
        name: str = self.func.overloadpacket.__name__
        return name.rstrip("_")

    def argument(self, name: str) -> object:
        """Returns the value of an argument by its name, or its default where it was not
        passed; None where the operator has no argument of the name."""
        return operator_argument(self.func, self.args, self.kwargs, name)

    def tensor(self, i: int) -> Tensor:
        """Returns the i-th argument by place, which must be a tensor; that is not
        checked."""
        return cast(Tensor, self.args[i])

    def on(self, *first: object) -> object:
        """Returns what the operator returns for other first arguments; the further ones
        stay. An operator that writes into an argument writes at each call."""
        return self.func(*first, *self.args[len(first) :], **self.kwargs)

    def result(self) -> object:
        """Returns what the operator returns for its arguments. It runs once, at the first
        call of this method, and so it writes once."""
        return self._result

    @cached_property
    def _result(self) -> object:
        return self.on()

    @property
    def is_writer(self) -> bool:
        """Whether the operator writes into its first argument, passed by place, and
        returns that argument alone, as `add_` does."""
        schema = self.func._schema
        if not self.args or len(schema.returns) != 1:
            return False
        taken, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
        if taken is None or returned is None:
            return False
        return bool(taken.is_write) and taken.before_set == returned.before_set


Change = Callable[[OperatorCall], object]
"""Returns what comes in place of an operation's result; NotImplemented: nothing does."""


class OtherOperations(TorchDispatchMode):
    """A mode in which `change` may put something else in place of the result of each
    operation. For an operator that writes into its first argument the replacement is
    written there."""

    def __init__(self, change: Change) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.change = change

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, so that PyTorch does not load its compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        operation = OperatorCall(func, args, kwargs or {})
        other = self.change(operation)
        if other is NotImplemented:
            return operation.result()
        if operation.is_writer and other is not args[0]:
            # Its caller looks at the tensor that is written, not at what comes back
            return operation.tensor(0).copy_(cast(Tensor, other))
        return other


class Notes:
    """Changes nothing, and notes what is called. `calls`: by operator how often it was
    called, of calls that return one or several floating-point tensors and no view.
    `numbers`: by number the names of the arguments that it was passed or defaulted as (of
    `2 * x`: `other`). `defaults`: by operator and argument the floats that came by
    default."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.numbers: dict[float, set[str]] = {}
        self.defaults: dict[tuple[str, str], float] = {}

    def __call__(self, operation: OperatorCall) -> object:
        """Returns the operation's result, and notes it."""
        result = operation.result()
        for i, parameter in enumerate(operation.func._schema.arguments):
            name, value = parameter.name, operation.argument(parameter.name)
            if isinstance(value, bool) or not isinstance(value, float | int):
                continue
            self.numbers.setdefault(float(value), set()).add(name)
            came = i < len(operation.args) or name in operation.kwargs
            if not came and str(parameter.type) in ("float", "number"):
                self.defaults[operation.name, name] = float(value)
        first = result[0] if isinstance(result, tuple) and result else result
        if is_floating(first) and not operation.func.is_view:
            self.calls[operation.name] = self.calls.get(operation.name, 0) + 1
        return result


class OfCall:
    """Puts `change` in place of a single call of an operator, the `number`-th from 0. It
    counts calls: make a new one for each run."""

    def __init__(self, name: str, number: int, change: Change) -> None:
        self.name, self.number, self.change = name, number, change
        self.count = 0

    def __call__(self, operation: OperatorCall) -> object:
        """Returns what `change` returns for that call; NotImplemented for every other
        call."""
        if operation.name != self.name:
            return NotImplemented
        self.count += 1
        return self.change(operation) if self.count == self.number + 1 else NotImplemented


def with_argument(
    operation: OperatorCall, operator: str, name: str, value: object
) -> object:
    """Returns what an operator returns with another value of an argument; NotImplemented
    for another operator than `operator`, and where it has no argument `name`."""
    if operation.name != operator:
        return NotImplemented
    names = [parameter.name for parameter in operation.func._schema.arguments]
    if name not in names:
        return NotImplemented
    i, args = names.index(name), list(operation.args)
    if i < len(args):
        args[i] = value
        return operation.on(*args)
    return operation.func(*args, **{**operation.kwargs, name: value})


# --- left out -------------------------------------------------------------------------


def left_out(operation: OperatorCall, argument: int = 0) -> object:
    """Returns an argument, by its place, in place of an operation's result: a copy, cast
    to the result's dtype. For an operator that writes into its first argument it returns
    the argument itself. NotImplemented for a view, where there is no such argument or it
    is no floating-point tensor, where the result is none or is the argument itself, and
    where the result has another shape."""
    if operation.func.is_view or len(operation.args) <= argument:
        return NotImplemented
    x = operation.args[argument]
    if not is_floating(x):
        return NotImplemented
    if operation.is_writer:
        target = operation.tensor(0)
        return x if x.shape == target.shape else NotImplemented
    like = operation.result()
    if not is_floating(like) or like.shape != x.shape or like is x:
        return NotImplemented
    return x.to(like.dtype) if x.dtype != like.dtype else x.clone()


# --- sums without some terms ----------------------------------------------------------

Cut = Callable[[int], int]
"""Returns how many of n terms are left out; more than 0: the last, less: the first."""


def shorter(operation: OperatorCall, cut: Cut, *, counts: bool = True) -> object:
    """Returns what a matrix product, reduction, softmax, norm or convolution gives
    without some of its terms. NotImplemented for another operation, a transposed or
    grouped convolution, a batch norm that takes running statistics, and where none or all
    of the terms would go. `cut`: a function of the number of terms, which returns how
    many go: above 0 the last ones, below 0 the first ones. A softmax keeps its width,
    with the weight 0 for the terms that went. `counts`: whether the result of `mean` is
    divided by the number of those that stay; it has no effect on norms."""
    name = operation.name
    if name in PRODUCTS:
        return _shorter_product(operation, cut)
    if name in SOFTMAXES:
        x, dim = operation.tensor(0), cast(int, operation.args[1])
        hidden = _ends(x.shape[dim], cut)
        if hidden is None:
            return NotImplemented
        masked = x.clone()
        gone = x.shape[dim] - hidden[1]
        masked.narrow(dim, 0 if hidden[0] else hidden[1], gone).fill_(-math.inf)
        return operation.on(masked)
    if name in REDUCTIONS:
        return _shorter_reduction(operation, cut, counts=counts)
    if name in NORMS:
        return normalised(operation, cut=cut)
    if name == "convolution" and not operation.args[6] and operation.args[8] == 1:
        x, weight = operation.tensor(0), operation.tensor(1)
        ends = _ends(x.shape[1], cut)
        if ends is None:
            return NotImplemented
        return operation.on(x.narrow(1, *ends), weight.narrow(1, *ends))
    return NotImplemented


def _ends(count: int, cut: Cut) -> tuple[int, int] | None:
    """Returns where the terms that stay begin, and how many they are; None where all of
    them or none stay."""
    gone = cut(count)
    if not 0 < abs(gone) < count:
        return None
    return (0 if gone > 0 else -gone), count - abs(gone)


def _shorter_product(operation: OperatorCall, cut: Cut) -> object:
    """Returns a matrix product without some of the terms of its sums; NotImplemented
    where none or all of them would go."""
    first = 0 if operation.name in ("mm", "bmm") else 1
    x, y = operation.tensor(first), operation.tensor(first + 1)
    ends = _ends(x.shape[-1], cut)
    if ends is None:
        return NotImplemented
    factors = x.narrow(-1, *ends), y.narrow(-2, *ends)
    return operation.on(*operation.args[:first], *factors)


def _shorter_reduction(operation: OperatorCall, cut: Cut, *, counts: bool) -> object:
    """Returns a sum, mean, maximum or other reduction without some of its terms: along
    the last of its dimensions, or of the flattened tensor where it reduces all. `counts`:
    whether a mean is divided by the number of terms that stay; else by all.
    NotImplemented where none or all would go."""
    x, dims = operation.tensor(0), operation.argument("dim")
    if isinstance(dims, int):
        dims = [dims]
    if isinstance(dims, Sequence) and dims:
        ends = _ends(x.shape[dims[-1]], cut)
        part = x if ends is None else x.narrow(dims[-1], *ends)
    else:
        ends = _ends(x.numel(), cut)
        part = x if ends is None else x.reshape(-1).narrow(0, *ends)
    if ends is None:
        return NotImplemented
    result = cast(Tensor, operation.on(part))
    share = part.numel() / x.numel()
    return result * share if operation.name == "mean" and not counts else result


def divided_by_less(operation: OperatorCall) -> object:
    """Returns a mean of n numbers divided by n - 1; a norm whose variance divides by n -
    1 (at least 1); or a variance or deviation of the other kind, sample for population or
    the reverse. NotImplemented for another operation, for a batch norm that takes running
    statistics, and for a mean or variance of fewer than two numbers."""
    name = operation.name
    if name in NORMS:
        return normalised(operation, less=1)
    if name not in ("mean", "var", "std"):
        return NotImplemented
    result = cast(Tensor, operation.result())
    count = operation.tensor(0).numel() / max(1, result.numel())
    if count < 2:
        return NotImplemented
    if name == "mean":
        return result * (count / (count - 1))
    correction = operation.argument("correction")
    less = 1.0 if correction is None else float(cast(float, correction))
    factor = (count - less) / (count - (0.0 if less else 1.0))
    return result * (factor if name == "var" else math.sqrt(factor))


# --- norms ----------------------------------------------------------------------------


def normalised(
    operation: OperatorCall,
    *,
    cut: Cut | None = None,
    less: int = 0,
    centred: bool = True,
    outside: bool = False,
) -> object:
    """Returns the three results (output, mean, reciprocal of the deviation) of a layer,
    group or batch norm computed otherwise: with statistics of fewer places (`cut`), a
    variance of n - `less`, without taking the mean away (not `centred`), or eps added to
    the root instead of under it (`outside`). NotImplemented for another operation, for a
    batch norm that takes running statistics, and where `cut` would cut none or all.
    `centred` False keeps the mean in, and takes the mean square for the variance."""
    if operation.name not in NORMS:
        return NotImplemented
    x = operation.tensor(0)
    groups, shape, eps = _norm_groups(operation)
    if groups is None:
        return NotImplemented
    part = groups
    if cut is not None:
        ends = _ends(groups.shape[-1], cut)
        if ends is None:
            return NotImplemented
        part = groups.narrow(-1, *ends)
    mean = part.mean(-1, keepdim=True) if centred else torch.zeros_like(part[..., :1])
    count = part.shape[-1]
    variance = (part - mean).square().sum(-1, keepdim=True) / max(1, count - less)
    root = variance.sqrt() + eps if outside else (variance + eps).sqrt()
    out = _ungrouped((groups - mean) / root, operation, shape)
    weight, bias = (_affine(operation, name) for name in ("weight", "bias"))
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    like = cast(tuple[Tensor, Tensor, Tensor], operation.result())
    return (
        out.to(x.dtype),
        mean.reshape(like[1].shape).to(like[1].dtype),
        (1 / root).reshape(like[2].shape).to(like[2].dtype),
    )


def _norm_groups(operation: OperatorCall) -> tuple[Tensor | None, torch.Size, float]:
    """Returns three: the input of a norm as [groups, numbers of one statistic], its shape
    before that (of a batch norm with channels first), and eps. The first is None for a
    batch norm that takes running statistics."""
    x, eps = operation.tensor(0), cast(float, operation.argument("eps"))
    if operation.name == "native_layer_norm":
        size = math.prod(cast(Sequence[int], operation.args[1]))
        return x.reshape(-1, size), x.shape, eps
    if operation.name == "native_group_norm":
        groups = cast(int, operation.argument("group"))
        return x.reshape(x.shape[0] * groups, -1), x.shape, eps
    if not operation.argument("training"):
        return None, x.shape, eps
    moved = x.transpose(0, 1)
    return moved.reshape(x.shape[1], -1), moved.shape, eps


def _ungrouped(groups: Tensor, operation: OperatorCall, shape: torch.Size) -> Tensor:
    """Returns a tensor that `_norm_groups` grouped in the input's own shape. `shape`: the
    shape that `_norm_groups` returned."""
    x = groups.reshape(shape)
    return x.transpose(0, 1) if operation.name == "native_batch_norm" else x


def _affine(operation: OperatorCall, name: str) -> Tensor | None:
    """Returns the weight or bias of a norm, by `name`, in a shape that broadcasts against
    the input; None without one."""
    value = operation.argument(name)
    if not isinstance(value, Tensor):
        return None
    if operation.name == "native_layer_norm":
        return value
    return value.reshape(1, -1, *[1] * (operation.tensor(0).ndim - 2))


# --- narrower, and by blocks ----------------------------------------------------------


def rounded(x: Tensor, fmt: Format) -> Tensor:
    """Returns a real floating-point tensor of an exact run rounded once, to nearest, to a
    format, as a `Wide` tensor under its own dtype. Raises UsageError for a complex
    one."""
    with _disable_current_modes():  # rounding is no operation of the run
        return Wide.of(round_to(widened(x), fmt), x.dtype)


def truncated(x: Tensor, fmt: Format) -> Tensor:
    """Returns a real tensor of an exact run without the bits that a format has no room
    for, towards 0, under its own dtype, as tensor cores read float32 values in TF32.
    Infinities and NaN stay. The format must have the exponents of the values: its range
    is not looked at."""
    with _disable_current_modes():
        lost_bits = FORMATS["float64"].precision - fmt.precision
        bits = widened(x).contiguous().view(torch.int64)
        return Wide.of((bits >> lost_bits << lost_bits).view(torch.float64), x.dtype)


def narrow_factors(
    operation: OperatorCall,
    fmt: Format,
    which: Sequence[int],
    narrowed: Callable[[Tensor, Format], Tensor] = rounded,
) -> object:
    """Returns a matrix product or convolution whose factors in `which` (0: left, 1:
    right) are rounded to a format, or changed by `narrowed`. With both, the gradients of
    a convolution are computed so too: of the gradient that comes back, the input and the
    weight. NotImplemented for another operation, and for complex factors."""
    if operation.name == "convolution_backward" and len(which) == 2:
        which = (0, 1, 2)  # the output's gradient, input, weight
    elif operation.name not in PRODUCTS and operation.name != "convolution":
        return NotImplemented
    first = 1 if operation.name in ("addmm", "baddbmm") else 0
    args = list(operation.args)
    for i in which:
        factor = operation.tensor(first + i)
        if factor.is_complex():
            return NotImplemented
        args[first + i] = narrowed(factor, fmt)
    return operation.on(*args)


def rounded_result(operation: OperatorCall, fmt: Format) -> object:
    """Returns an operation's real floating-point result rounded to a format.
    NotImplemented for a view, for an operation that writes, and for any other result, as
    a complex one or several."""
    if operation.func.is_view or operation.func._schema.is_mutable:
        return NotImplemented
    result = operation.result()
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return NotImplemented
    return rounded(result, fmt)


MAX_STEPS = 256  # blocks of a sum, above which it is not computed block by block


def summed_in_blocks(operation: OperatorCall, fmt: Format, block: int) -> object:
    """Returns a sum, a mean or a matrix product whose terms are added up in blocks of
    `block` terms: the sum so far is rounded to a format after each block. NotImplemented
    for another operation, for a sum of integers or complex numbers, along several axes or
    all, and for fewer than two or more than MAX_STEPS blocks."""
    name = operation.name
    if name in PRODUCTS:
        first = 0 if name in ("mm", "bmm") else 1
        x, y = operation.tensor(first), operation.tensor(first + 1)
        pairs = zip(x.split(block, -1), y.split(block, -2), strict=True)
        if not 1 < math.ceil(x.shape[-1] / block) <= MAX_STEPS or x.is_complex():
            return NotImplemented
        total = _running_sum([a @ b for a, b in pairs], fmt)
        if not first:
            return total
        alpha = cast(float, operation.argument("alpha"))
        beta = cast(float, operation.argument("beta"))
        return alpha * total + beta * operation.tensor(0)
    dims = operation.argument("dim") if name in ("sum", "mean") else None
    if not isinstance(dims, Sequence) or len(dims) != 1:
        return NotImplemented
    x, dim = operation.tensor(0), dims[0]
    is_split = 1 < math.ceil(x.shape[dim] / block) <= MAX_STEPS
    if not is_split or not x.is_floating_point():
        return NotImplemented
    parts = [part.sum(dim, keepdim=True) for part in x.split(block, dim)]
    total = _running_sum(parts, fmt)
    total = total / x.shape[dim] if name == "mean" else total
    like = cast(Tensor, operation.result())
    return total.reshape(like.shape).to(like.dtype)


def _running_sum(parts: Sequence[Tensor], fmt: Format) -> Tensor:
    """Returns the sum of parts (at least one), added in order and rounded to a format
    after each."""
    total = rounded(parts[0], fmt)
    for part in parts[1:]:
        total = rounded(total + part, fmt)
    return total
