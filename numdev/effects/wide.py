"""Tensors that say they are in one format and hold their values in fp64.

A model whose weights are `Wide` runs as it does in that format: the same code, the same casts, the
same masks. Within `Running` every operation is computed in fp64, and its result is rounded, to the
format it says it is in, at chosen sites alone. With none of them that is the exact result of the
model; with one, what this rounding alone does to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from numdev.formats import Format, format_of, round_to

# Operators that move values, or choose among them: what they give is as rounded as what they get.
MOVES = frozenset(
    """cat stack clone copy_ contiguous _unsafe_view embedding index index_select gather take where
    masked_fill masked_fill_ masked_scatter index_put index_put_ index_copy index_copy_ scatter tril
    scatter_ constant_pad_nd roll flip repeat repeat_interleave neg abs relu relu_ max min amax amin
    maximum minimum clamp sort topk max_pool2d_with_indices zeros_like ones_like full_like triu ones
    new_zeros new_ones new_empty new_full zeros full empty fill_ zero_ lift_fresh dropout empty_like
    lift_fresh_copy native_dropout scalar_tensor""".split()  # noqa: SIM905
)
# Operators that turn a small change of numbers into another choice, as a router's of experts.
CHOOSES = frozenset(("topk", "argmax", "argmin", "sort", "argsort", "round", "floor", "bucketize"))
SINGLE = 24  # significant bits of float32, in which sound models compute norms and rotary tables
RoundsAt = Callable[[Any, Any, Tensor, torch.dtype], Tensor]


class Wide(Tensor):
    """`exact`, an fp64 tensor, under the dtype of another format. It has no gradient."""

    exact: Tensor
    is_weight: bool

    @staticmethod
    def of(values: Tensor, dtype: torch.dtype, *, is_weight: bool = False) -> Any:
        layout: Any = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        says: Any = {"dtype": dtype, "device": values.device}
        x: Any = Tensor._make_wrapper_subclass(Wide, values.shape, **layout, **says)
        x.exact, x.is_weight = values, is_weight
        return x

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Outside of a run, as when a cache is put together: nothing is rounded."""
        return _computed(func, args, kwargs or {}, widened, lambda _f, _a, x, _dtype: x)


def widened(x: Any) -> Any:
    """A floating-point tensor's values in fp64; anything else as it is."""
    if isinstance(x, Wide):
        return x.exact
    return x.double() if is_floating(x) else x


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class Running(TorchDispatchMode):
    """Computes every operation in fp64, and rounds at `sites` to what tensors say they are, where
    that is no wider than `format`. `site_of` names an operation's site; `weights` is that of
    parameters, which are rounded where they are used. `how`: further arguments of `round_to`."""

    def __init__(
        self, site_of: Callable[[Any, Any], str], fmt: Format, sites: Collection[str], **how: Any
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.site_of, self.format, self.sites, self.how = site_of, fmt, frozenset(sites), how
        self.narrower: dict[str, str] = {}  # by site, the narrower format it was met in
        self.routes = False  # whether the model chooses among its parts, as a router of experts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.routes |= name in CHOOSES and isinstance(args[0], Wide)
        return _computed(func, args, kwargs or {}, self._input, self._output)

    def _input(self, x: Any) -> Any:
        rounds = isinstance(x, Wide) and x.is_weight and "weights" in self.sites
        return self._rounded(x.exact, format_of(x.dtype)) if rounds else widened(x)

    def _output(self, func: Any, args: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        if func.is_view or func.overloadpacket.__name__ in MOVES:
            return x
        fmt, site = format_of(dtype), self.site_of(func, args)
        if fmt.precision < self.format.precision and fmt.precision < SINGLE:
            self.narrower[site] = fmt.name
        return self._rounded(x, fmt) if site in self.sites else x

    def _rounded(self, x: Tensor, fmt: Format) -> Tensor:
        wider = fmt.precision > self.format.precision
        return x if wider else round_to(x, fmt, **self.how)


def _computed(func: Any, args: Any, kwargs: Any, read: Callable[[Any], Any], out: RoundsAt) -> Any:
    """What an operation gives, computed in fp64: floating-point tensors as `Wide` of the dtype in
    which it would give them. One that writes into a tensor writes fp64 values into it."""
    if func is torch.ops.aten.detach.default and isinstance(x := args[0], Wide):
        return Wide.of(x.exact, x.dtype, is_weight=x.is_weight)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    dtype, asked = _said(tensors), kwargs.get("dtype")
    wide, named = tree_map(read, (args, kwargs))
    if asked is not None and asked.is_floating_point:
        dtype = asked
        named = {**named, "dtype": torch.float64}
    result = func(*wide, **named)
    narrow = is_floating(result) and result.dtype != torch.float64
    if asked is None and narrow and not any(map(is_floating, tensors)):
        # A quotient of integers, or numbers out of nothing: PyTorch makes them in its default.
        wide, named = tree_map(lambda x: x.double() if isinstance(x, Tensor) else x, (wide, named))
        named = named if tensors else {**named, "dtype": torch.float64}
        result = func(*wide, **named)
    if func._schema.is_mutable:
        target = args[0]
        if isinstance(target, Wide):
            target.exact.copy_(out(func, args, target.exact, target.dtype))
        elif is_floating(target):
            target.copy_(result)
        return target
    return tree_map(
        lambda x: Wide.of(out(func, args, x, dtype), dtype) if is_floating(x) else x, result
    )


def _said(tensors: list[Tensor]) -> torch.dtype:
    """The dtype that an operation on these gives: of those with dimensions, where there are any."""
    floats = [x for x in tensors if x.is_floating_point()]
    dtypes = [x.dtype for x in floats if x.ndim] or [x.dtype for x in floats]
    return reduce(torch.promote_types, dtypes or [torch.get_default_dtype()])
