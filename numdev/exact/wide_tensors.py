"""`Wide`, an fp64 tensor under the dtype of another format, and how an operation computes
on it.

Views share storage, as they do in PyTorch. In-place operations and `out=` write fp64
values. Random numbers are drawn in the dtype that a tensor says, so that a seed draws the
same as it does there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from numdev.errors import UsageError
from numdev.exact.lazy_conjugates import (
    computed_view,
    is_computed_view,
    update_views,
)
from numdev.exact.operator_arguments import (
    leaves_of,
    operator_argument,
    parameters_of,
    with_leaves,
)
from numdev.exact.result_dtypes import (
    compute_dtype,
    is_floating,
    is_floating_dtype,
    promoted_dtype,
    result_dtypes,
)
from numdev.exact.rounded_results import Rounding, Unrounded, round_values, values_format
from numdev.exact.unsupported_operations import (
    FREE,
    NUMPY,
    POINTER,
    STORAGE,
    VECTORS,
    Unsupported,
    as_unsupported,
    check_supported,
    unsupported_error,
)

aten = torch.ops.aten
UNROUNDED = Unrounded()
# Of a tensor class that overrides operations by `__torch_dispatch__` alone
NO_OVERRIDE = torch._C._disabled_torch_function_impl
# Operators whose results are draws. `native_dropout` (on a GPU) computes as well.
DRAWS = frozenset(
    """rand randn rand_like randn_like randint randint_like randperm random random_ normal
    normal_ uniform uniform_ bernoulli bernoulli_ exponential exponential_ geometric
    geometric_ log_normal log_normal_ cauchy cauchy_ multinomial poisson binomial
    _standard_gamma _sample_dirichlet native_dropout""".split()  # noqa: SIM905
)
# Operators that write running statistics in training, though their schema does not say
# so.
WRITES: Mapping[str, tuple[str, ...]] = {
    name: ("running_mean", "running_var")
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


class Wide(Tensor):
    """`exact`, a float64 tensor, under the dtype of another format; complex128 under a
    complex one.

    Shape, strides and device are those of `exact`, and a view's `exact` is a view.
    Autograd takes it as any tensor: gradients are `Wide` too. `is_weight`: a stored
    parameter, whose values may not be rounded yet. `refusal`: why it may not be read but
    in a backward pass, if so. Raises Unsupported where its values would leave PyTorch."""

    exact: Tensor
    is_weight: bool
    refusal: str = ""

    @staticmethod
    def of(values: Tensor, dtype: torch.dtype, *, is_weight: bool = False) -> Wide:
        """Returns a `Wide` tensor under `dtype` of float64 (or complex128) values of any
        shape, with which it shares storage. Lazy conjugates and negatives are computed,
        and follow what is written into it. `is_weight`: whether it is a stored parameter,
        which may not be rounded yet."""
        values = computed_view(values)
        wide: Wide = Tensor._make_wrapper_subclass(
            Wide,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=dtype,
            device=values.device,
        )
        wide.exact, wide.is_weight = values, is_weight
        return wide

    __torch_function__ = NO_OVERRIDE  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Returns the result of an operation outside of a run, as when a cache is put
        together: computed in fp64 and not rounded. Random numbers may be drawn."""
        return compute_operation(func, args, kwargs or {}, UNROUNDED)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Wide({self.dtype}, {self.exact})"

    def __format__(self, spec: str) -> str:
        return format(self.exact, spec)

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, object]) -> Wide:
        with _disable_current_modes():  # one of a run would make a `Wide` tensor of it
            values = self.exact.clone()
        copy = Wide.of(values, self.dtype, is_weight=self.is_weight)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    def _replace_values(self, other: Tensor) -> None:
        """Puts the values of `other` in place of this tensor's, as `x.data = y` does.
        Raises Unsupported unless `other` is a `Wide` tensor of the same shape and
        dtype."""
        if not isinstance(other, Wide) or (other.dtype, other.shape) != (
            self.dtype,
            self.shape,
        ):
            raise unsupported_error("Tensor.data", STORAGE)
        self.exact = other.exact

    data = property(Tensor.detach, _replace_values)

    def tolist(self) -> Any:
        """Returns the fp64 values as nested lists; of a tensor without dimensions its
        number."""
        return self.exact.tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raises Unsupported: what NumPy computes cannot be followed."""
        raise unsupported_error("Tensor.numpy", NUMPY)

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise unsupported_error("numpy.asarray", NUMPY)

    def __dlpack__(self, *_: object, **__: object) -> NoReturn:
        raise unsupported_error("Tensor.__dlpack__", POINTER)

    def data_ptr(self) -> NoReturn:
        """Raises Unsupported: what is read by address cannot be followed."""
        raise unsupported_error("Tensor.data_ptr", POINTER)


@overload
def widened(x: Tensor) -> Tensor:
    """Returns a tensor's values in float64, or complex128; one of integers or bools as it
    is."""


@overload
def widened(x: object) -> object:
    """Returns a floating-point tensor's values in float64, or complex128; anything else
    as it is."""


def widened(x: object) -> object:
    """Returns a floating-point tensor's values in float64, or complex128: for a `Wide`
    tensor the values it holds, not copied; for another a cast. Anything else is returned
    as it is."""
    if isinstance(x, Wide):
        return x.exact
    return x.to(compute_dtype(x.dtype)) if is_floating(x) else x


@overload
def narrowed(x: Tensor) -> Tensor:
    """Returns a `Wide` tensor in the dtype that it says, rounded to nearest; another
    tensor as it is."""


@overload
def narrowed(x: object) -> object:
    """Returns a `Wide` tensor in the dtype that it says, rounded to nearest; anything
    else as it is."""


def narrowed(x: object) -> object:
    """Returns a `Wide` tensor as an ordinary tensor of the dtype that it says, rounded
    once to nearest, without a gradient. Under float64 and complex128 it is `exact`
    itself, not a copy. Anything else is returned as it is. Raises UsageError for a dtype
    that numdev has no format for."""
    if not isinstance(x, Wide):
        return x
    return round_values(x.exact, values_format(x.dtype)).to(x.dtype)


def compute_operation(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    rounding: Rounding,
    *,
    draws: bool = True,
) -> object:
    """Returns the result of an operation, computed in fp64 and rounded as `rounding`
    says; its floating-point tensors are `Wide` tensors of the dtypes that PyTorch would
    give. In-place operations and `out=` write into their tensors. A view of ordinary
    tensors is an ordinary one, so that what is written into it reaches them.

    `draws`: whether random numbers may be drawn without a generator. Raises Unsupported
    for what has no exact result, for such a draw where `draws` is False, and where
    PyTorch has no fp64 kernel."""
    check_supported(func, args, kwargs)
    leaves = leaves_of((args, kwargs))
    if func is aten.detach.default and isinstance(x := args[0], Wide):
        detached = Wide.of(x.exact.detach(), x.dtype, is_weight=x.is_weight)
        detached.refusal = x.refusal
        return detached
    _check_readable(leaves)
    name = func.overloadpacket.__name__
    is_wide = any(isinstance(x, Wide) for x in leaves)
    if func.is_view and name != "lift_fresh" and not is_wide:
        # So that what is written into the view is written into it
        return func(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], Wide):
        return _reshape_in_place(func, args, kwargs)
    if name in DRAWS:
        if not draws and operator_argument(func, args, kwargs, "generator") is None:
            raise unsupported_error(func, "it draws random numbers, and no seed was set")
        return _draw_random(func, args, kwargs, rounding)
    return _Call(func, args, kwargs, rounding, leaves).run()


class _Call:
    """One operation that draws no random numbers: reads its arguments in fp64, runs it,
    and rounds what it returns or writes."""

    def __init__(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        rounding: Rounding,
        leaves: Sequence[object],
    ) -> None:
        self.func, self.args, self.kwargs, self.rounding = func, args, kwargs, rounding
        self.args_before = args  # as they are before the operation writes
        floats = [x for x in leaves if is_floating(x)]
        self.has_floats = bool(floats)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        self.device = tensors[0].device if tensors else None
        self.common = promoted_dtype(floats)
        self.targets = list(written_tensors(func, args, kwargs))
        # By the identity of the fp64 tensor that the operation writes into: the tensor
        # that it stands for; and the other way round.
        self.stands_for: dict[int, Tensor] = {}
        self.wide_targets: dict[int, Tensor] = {}

    def run(self) -> object:
        """Runs the operation once and returns its result, rounded, with floating-point
        tensors as `Wide`. Rounds what was written into arguments, in place. Results in
        `FREE` may then be read only in a backward pass. Raises Unsupported where the
        operator cannot compute in fp64."""
        for target in self.targets:
            _check_writable(self.func, target)
            values = widened(target)
            self.wide_targets[id(target)], self.stands_for[id(values)] = values, target
        if self.targets:
            written = list(self.wide_targets.values())
            self.args_before = self.rounding.arguments(self.func, self.args, written)
        args, kwargs = self._arguments_with_read_numbers()
        args = tuple(with_leaves(x, self._read_leaf) for x in args)
        kwargs = {n: with_leaves(x, self._read_leaf) for n, x in kwargs.items()}
        args, kwargs = _without_half_to_float(self.func, args, kwargs)
        try:
            with _float64_by_default(not self.has_floats):
                result = self.func(*args, **kwargs)
        except RuntimeError as error:
            raise as_unsupported(self.func, error) from error.__cause__
        for target in self.targets:
            self._round_written(target)
        for values in self.wide_targets.values():
            update_views(values)
        leaves, spec = tree_flatten(result)
        dtypes = result_dtypes(self.func, self.args, self.kwargs, leaves)
        outs = [
            self._wrap_result(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)
        ]
        for i in FREE.get(self.func.overloadpacket.__name__, ()):
            if isinstance(out := outs[i], Wide):
                out.refusal = unsupported_error(self.func, VECTORS).message
        return tree_unflatten(outs, spec)

    def _read_leaf(self, x: object) -> object:
        """Returns one leaf of the arguments as the fp64 operation gets it. Of a
        floating-point tensor that is its fp64 values: of a `Wide` one as the rounding
        reads them, unless the operation writes into it. Of a floating-point dtype it is
        the fp64 one; anything else is as it is."""
        if id(x) in self.wide_targets:
            return self.wide_targets[id(x)]
        if isinstance(x, Wide):
            return self.rounding.read(x.exact, x.dtype, is_weight=x.is_weight)
        if is_floating_dtype(x):
            return compute_dtype(x)
        return widened(x)

    def _arguments_with_read_numbers(
        self,
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Returns the positional and the named arguments, with Python numbers as the
        rounding reads them; unchanged where no argument is a tensor."""
        if self.device is None:
            return self.args, dict(self.kwargs)
        parameters = parameters_of(self.func)
        # Of which there may be fewer
        positional = zip(self.args, parameters.values(), strict=False)
        args = tuple(self._read_number(x, p.kind, self.device) for x, p in positional)
        named = {
            n: self._read_number(x, parameters[n].kind, self.device)
            for n, x in self.kwargs.items()
        }
        return args, named

    def _read_number(self, x: object, kind: str, device: torch.device) -> object:
        """Returns x as the rounding reads it if it is a float, or an int that meets
        floating-point values (`kind`, the argument's type in the schema, is no size or
        dimension); else x."""
        meets_values = (
            kind in ("Tensor", "number", "Optional[number]") and self.has_floats
        )
        if type(x) is float or (type(x) is int and meets_values):
            value = self.rounding.number(self.func, float(x), self.common, device)
            return value if value != x else x  # an integer that stays one
        return x

    def _round_written(self, target: Tensor) -> None:
        """Rounds what was written into `target` to its dtype, in place, and gives it the
        new shape where `out=` resized it. An ordinary tensor, not `Wide`, gets it rounded
        to nearest, whatever the rounding; one that is not floating-point stays as it was
        written."""
        values = self.wide_targets[id(target)]
        if not is_floating(target):
            return
        new = self._round(values, target.dtype)
        if not isinstance(target, Wide):
            target.copy_(round_values(values, values_format(target.dtype)))
            return
        if new is not values:
            values.copy_(new)
        if target.shape != values.shape:  # `out=` grew
            _replace_with_resized(target, values)

    def _wrap_result(self, x: object, dtype: torch.dtype) -> object:
        """Returns one result: the caller's own tensor where the operation wrote into it,
        a rounded `Wide` tensor of `dtype` for a new floating-point tensor, an unrounded
        one for a view, anything else as it is. Raises Unsupported for a sparse or nested
        tensor."""
        if id(x) in self.stands_for:
            return self.stands_for[id(x)]
        if not is_floating(x):
            return x
        if x._is_zerotensor():  # it has no memory to read
            x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        if x.layout != torch.strided or x.is_nested:
            layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise unsupported_error(
                self.func, f"it makes a tensor of the layout {layout}"
            )
        if self.func.is_view:
            return Wide.of(x, dtype)
        return Wide.of(self._round(x, dtype), dtype)

    def _round(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns `values` rounded to `dtype` as the run's rounding says. Raises
        Unsupported for a dtype that numdev has no format for."""
        try:
            return self.rounding.result(self.func, self.args_before, values, dtype)
        except UsageError as error:
            raise unsupported_error(
                self.func, f"numdev has no format for {dtype}"
            ) from error


def check_readable(tree: object) -> None:
    """Raises Unsupported if any tensor in the tree has a `refusal` (singular and
    eigenvectors), unless a backward pass is running."""
    _check_readable(tree_leaves(tree))


def _check_readable(leaves: Iterable[object]) -> None:
    """Raises Unsupported as `check_readable`, for the values of a tree."""
    for x in leaves:
        if isinstance(x, Wide) and x.refusal and torch._C._current_graph_task_id() == -1:
            raise Unsupported(x.refusal)


def written_tensors(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Iterator[Tensor]:
    """Yields the tensors that an operation writes into: by its schema, and the running
    statistics of a batch norm in training, which its schema does not name."""
    unsaid = WRITES.get(func.overloadpacket.__name__, ())
    if unsaid and operator_argument(func, args, kwargs, "training") is not True:
        unsaid = ()
    for name, parameter in parameters_of(func).items():
        if parameter.is_written or name in unsaid:
            value = operator_argument(func, args, kwargs, name)
            yield from (x for x in leaves_of(value) if isinstance(x, Tensor))


def _check_writable(func: OpOverload, target: Tensor) -> None:
    """Raises Unsupported where what an operation writes into `target` would not reach the
    tensor that it is a lazy conjugate or negative of."""
    if isinstance(target, Wide) and is_computed_view(target.exact):
        raise unsupported_error(func, "it writes into a lazy conjugate")


def _without_half_to_float(
    func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Returns the arguments with `half_to_float` set to False: a softmax that returns
    float32 for float16 has no fp64 form. Unchanged for an operator without that
    argument."""
    parameter = parameters_of(func).get("half_to_float")
    if parameter is None:
        return args, kwargs
    i = parameter.place
    if i < len(args):
        return (*args[:i], False, *args[i + 1 :]), kwargs
    return args, {**kwargs, "half_to_float": False}


@contextmanager
def _float64_by_default(wanted: bool) -> Iterator[None]:
    """Enters a context in which PyTorch's default dtype is float64, if `wanted`: new
    tensors without inputs, and quotients of integers, are made in it. Restored at the
    end."""
    default = torch.get_default_dtype()
    if not wanted or default == torch.float64:
        yield
        return
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _draw_random(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    rounding: Rounding,
) -> object:
    """Returns random numbers drawn in the dtypes that tensors say, widened, so that a
    seed draws what it draws there. An in-place draw writes into its tensor and returns
    it."""
    if func is aten.native_dropout.default:
        return _apply_dropout(func, args, kwargs, rounding)
    target = next(written_tensors(func, args, kwargs), None)  # one at most
    ordinary, named = tree_map(narrowed, (args, dict(kwargs)))
    result = func(*ordinary, **named)
    if isinstance(target, Wide):
        _check_writable(func, target)
        target.exact.copy_(result)
        update_views(target.exact)
    if target is not None:
        return target
    return tree_map(
        lambda x: Wide.of(widened(x), x.dtype) if is_floating(x) else x, result
    )


def _apply_dropout(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, object],
    rounding: Rounding,
) -> tuple[Wide, Tensor]:
    """Returns the output and the mask of `native_dropout`; the mask is drawn in the
    input's dtype. The output is exact values times mask / (1 - p), 0 for p = 1, then
    rounded. Where `train` is False, it is values times mask, then rounded; None counts as
    True, as in PyTorch's kernels."""
    x, p = args[0], float(args[1])
    ones = torch.ones_like(narrowed(x))
    _, mask = func(ones, *args[1:], **kwargs)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if operator_argument(func, args, kwargs, "train") is False:
        scale = 1.0
    values = widened(x) * widened(mask) * scale  # that of no numbers has their dtype
    return Wide.of(rounding.result(func, args, values, x.dtype), x.dtype), mask


def _reshape_in_place(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> Wide:
    """Returns the tensor, its shape and strides changed in place as the view operation
    (`x.t_()`) says; values are not copied."""
    wide: Wide = args[0]
    values = wide.exact.detach()  # another tensor may hold this very one
    func(values, *args[1:], **kwargs)
    wide.exact = values
    with _changing_metadata_only():
        func(*args, **kwargs)
    return wide


def _replace_with_resized(wide: Wide, values: Tensor) -> None:
    """Gives a tensor the values, and with them the shape, that an operation wrote for
    it."""
    wide.exact = values
    with _changing_metadata_only():
        aten.resize_.default(wide, list(values.shape))


@contextmanager
def _changing_metadata_only() -> Iterator[None]:
    """Enters a context in which operations change the shape and strides of a `Wide`
    tensor itself and leave its values alone."""
    guard = torch._C._DisableTorchDispatch()
    before = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(True)
    try:
        yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(before)
        del guard
