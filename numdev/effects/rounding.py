"""A model's operations in fp64, rounded at chosen sites alone.

Its tensors say that they are in one format and hold their values in fp64 (`Wide`). So the model
runs as it does in that format: the same code, casts and masks. In a run (`Running`) every result is
rounded to the format it says it is in, but only at chosen sites: with none of them it is exact.

Sites are those of a transformer. An operation is placed (`Places`) by the module that runs it, by
where that stands, and by whether attention was met; what is none of them is `other`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from numdev.formats import Format, format_of, round_to
from numdev.sources.capture import QKV, attention_modules, followed

# The sites of attention itself are those of the first kernel's rounding model, in three groups.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "attention scores": (
        *("q_scaled", "scores", "scaled", "softcap", "bias", "max", "exponent", "exp"),
        *("tile_sum", "rescale", "row_sum"),
    ),
    "attention P": ("p",),
    "attention output": ("pv", "accumulator", "normalised", "state", "merge", "out"),
}
SITES = (  # docs/effects.md says what is rounded at each
    *("weights", "embedding", "norms", "q, k, v", "rotary", *ATTENTION, "output projection"),
    *("MLP", "activation", "residual", "logits", "other"),
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
# Operators of attention that a module computes by hand: products of activations, and the softmax.
SCORED, SOFTMAX = ("bmm", "baddbmm"), ("_softmax", "_safe_softmax")
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
    that is no wider than `format`. Parameters, whose site is `weights`, are rounded where they are
    used. `how`: further arguments of `round_to`."""

    def __init__(self, places: Places, fmt: Format, sites: Collection[str], **how: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places, self.format, self.sites, self.how = places, fmt, sites, how
        self.narrower: dict[str, str] = {}  # by site, the narrower format it was met in
        self.routes = False  # whether the model chooses among its parts, as a router of experts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.routes |= func.overloadpacket.__name__ in CHOOSES and isinstance(args[0], Wide)
        return _computed(func, args, kwargs or {}, self._input, self._output)

    def _input(self, x: Any) -> Any:
        rounds = isinstance(x, Wide) and x.is_weight and "weights" in self.sites
        return self._rounded(x.exact, format_of(x.dtype)) if rounds else widened(x)

    def _output(self, func: Any, args: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        if func.is_view or func.overloadpacket.__name__ in MOVES:
            return x
        fmt, site = format_of(dtype), self.places.site_of(func, args)
        if fmt.precision < self.format.precision and fmt.precision < SINGLE:
            self.narrower[site] = fmt.name
        return self._rounded(x, fmt) if site in self.sites else x

    def _rounded(self, x: Tensor, fmt: Format) -> Tensor:
        return x if fmt.precision > self.format.precision else round_to(x, fmt, **self.how)


def _computed(func: Any, args: Any, kwargs: Any, read: Callable[[Any], Any], out: Any) -> Any:
    """What an operation gives, computed in fp64: floating-point tensors as `Wide` of the dtype in
    which it would give them. One that writes into a tensor writes fp64 values into it."""
    if func is torch.ops.aten.detach.default and isinstance(x := args[0], Wide):
        return Wide.of(x.exact, x.dtype, is_weight=x.is_weight)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    floats, asked = [x for x in tensors if is_floating(x)], kwargs.get("dtype")
    dtypes = [x.dtype for x in floats if x.ndim] or [x.dtype for x in floats]
    dtype = reduce(torch.promote_types, dtypes or [torch.get_default_dtype()])
    wide, named = tree_map(read, (args, kwargs))
    if asked is not None and asked.is_floating_point:
        dtype = asked
        named = {**named, "dtype": torch.float64}
    result = func(*wide, **named)
    narrow = is_floating(result) and result.dtype != torch.float64
    if asked is None and narrow and not floats:
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


class Places:
    """Follows which modules run, and names the sites of operations."""

    def __init__(self, model: nn.Module) -> None:
        owners, layers = attention_modules(model), layers_of(model)
        named = {name: m for name, m in model.named_modules() if name}
        self.kinds = {m: _kind(name, m, owners, layers) for name, m in named.items()}
        self.layers, self.owners = ({named[name] for name in x} for x in (layers, owners))
        self.rotates = "rotary" in self.kinds.values()
        self.running: list[nn.Module] = []
        self.attended: set[nn.Module] = set()  # of the running owners, whose attention was met
        self.by_hand: dict[nn.Module, str] = {}  # of them, how far one is that attends by hand
        self.widths: dict[nn.Module, int] = {}  # of the residual stream, by the running layer
        self.begun = False  # whether a layer has run

    def following(self) -> AbstractContextManager[None]:
        """Run the model in here."""
        self.running, self.attended, self.begun = [], set(), False

        def enter(module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            self.running.append(module)
            self.attended.discard(module)
            self.by_hand.pop(module, None)
            if module in self.layers:
                self.begun = True
                states = next(filter(is_floating, (*args, *named.values())), None)
                self.widths[module] = 0 if states is None else states.shape[-1]

        def leave(module: nn.Module, *_: Any) -> None:
            if self.running and self.running[-1] is module:
                self.running.pop()

        return followed(self.kinds, enter, leave)

    def met(self) -> None:
        """The running module's attention was met."""
        self.attended.update(m for m in self.running if m in self.owners)

    def site_of(self, func: Any, args: Any) -> str:
        """The site of an operation of the module that runs."""
        module = self.running[-1] if self.running else None
        kind = self.kinds[module] if module is not None else "outside"
        name = func.overloadpacket.__name__
        if kind == "owner":
            assert module is not None
            if module not in self.attended and (site := self._by_hand(module, name)):
                return site
            if name in PRODUCTS:
                return "output projection" if module in self.attended else "q, k, v"
            return "rotary" if self.rotates and module not in self.attended else "other"
        if kind == "layer":
            if name in PRODUCTS:
                return "MLP"
            shapes = [x.shape for x in args if isinstance(x, Tensor)]
            alike = len(shapes) == 2 and shapes[0] == shapes[1]
            adds = name in ("add", "add_") and alike and self._streams(shapes[0])
            return "residual" if adds else "activation"
        if kind != "outside":
            return kind
        if not self.layers.isdisjoint(self.running):
            return "other"  # a helper that layers share
        return "logits" if self.begun else "embedding"

    def _streams(self, shape: torch.Size) -> bool:
        """Whether a sum of this shape may be one with the residual stream: it is as wide, and the
        module that makes it has parts, as a function of activation has none."""
        layer = next((m for m in reversed(self.running) if m in self.layers), None)
        width = self.widths.get(layer, 0) if layer is not None else 0
        has_parts = any(True for _ in self.running[-1].children())
        return has_parts and (not width or shape[-1:] == (width,))

    def _by_hand(self, module: nn.Module, name: str) -> str:
        """The site of an operation of attention that a module computes itself: scores up to the
        softmax, P from there, and the output; empty for any other."""
        stage = self.by_hand.get(module, "")
        if name in SOFTMAX:
            self.by_hand[module] = "attention P"
            return "attention scores"
        if name in SCORED and stage == "attention P":
            self.attended.add(module)
            return "attention output"
        if name in SCORED:
            self.by_hand[module] = stage = "attention scores"
        return stage


def layers_of(model: nn.Module) -> list[str]:
    """The names of the members of the outermost lists of modules that have parts."""
    layers: list[str] = []
    for name, m in model.named_modules():
        if isinstance(m, nn.ModuleList | nn.Sequential) and not _within(name, layers):
            members = dict(m.named_children())
            if all(any(True for _ in member.children()) for member in members.values()):
                layers += [f"{name}.{own}" for own in members]
    return layers


def _within(name: str, modules: Iterable[str]) -> str | None:
    """The one of these modules in which, or as which, a module of this name stands."""
    return next((m for m in modules if f"{name}.".startswith(f"{m}.")), None)


def _kind(name: str, module: nn.Module, owners: list[str], layers: list[str]) -> str:
    """The site that a module's operations have, or `owner` (of projections), `layer` or `outside`,
    where that depends on the operation."""
    leaf, layer = name.rpartition(".")[2].lower(), _within(name, layers)
    own = f"{leaf} {type(module).__name__.lower()}"
    if "norm" in own:
        return "norms"
    if "rotary" in own or "rope" in own:
        return "rotary"
    if name in owners:
        return "owner"
    if layer is None:
        return "embedding" if isinstance(module, nn.Embedding) else "outside"
    if getattr(module, "weight", None) is None:
        return "layer"
    if _within(name, owners):
        return "q, k, v" if any(role.search(leaf) for role in QKV) else "output projection"
    depth = layer.count(".") + 2  # of the parts of a layer, one of which holds the owner
    zones = {".".join(owner.split(".")[:depth]) for owner in owners if _within(owner, [layer])}
    return "output projection" if _within(name, zones) else "MLP"
