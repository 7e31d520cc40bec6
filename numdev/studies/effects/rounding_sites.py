"""A model's operations in fp64 (see `numdev.exact`), rounded at chosen sites alone.

Sites are those of a transformer. `SiteTracker` derives the site of an operation from the
module that runs it, where that stands, and whether attention was called; what is at none
of them is at `other`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from numdev.exact.evaluation import Computing
from numdev.exact.result_dtypes import is_floating
from numdev.exact.rounded_results import round_number, round_values, values_format
from numdev.exact.wide_tensors import Wide
from numdev.formats import Format, dtype_of
from numdev.sources.capture import QKV, attention_modules, module_hooks

# The rounding sites inside attention, in three groups; their formats are those of the
# first kernel's rounding model.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "attention scores": (
        *("q_scaled", "scores", "scaled", "softcap", "bias", "max", "exponent", "exp"),
        *("tile_sum", "rescale", "row_sum"),
    ),
    "attention P": ("p",),
    "attention output": ("pv", "accumulator", "normalised", "state", "merge", "out"),
}
SITES = (  # docs/effects.md says what is rounded at each
    *(
        "weights",
        "embedding",
        "norms",
        "q, k, v",
        "rotary",
        *ATTENTION,
        "output projection",
    ),
    *("MLP", "activation", "residual", "logits", "other"),
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
# Operators of attention that a module computes by hand: products of activations, and the
# softmax.
SCORED, SOFTMAX = ("bmm", "baddbmm"), ("_softmax", "_safe_softmax")
# Operators that move values, or choose among them: their result is as rounded as their
# arguments, but for numbers that they bring in.
MOVES = frozenset(
    """cat stack clone copy_ contiguous _unsafe_view embedding index index_select gather
    take where masked_fill masked_fill_ masked_scatter index_put index_put_ index_copy
    index_copy_ scatter tril scatter_ constant_pad_nd roll flip repeat repeat_interleave
    neg abs relu relu_ max min amax amin maximum minimum clamp sort topk
    max_pool2d_with_indices zeros_like ones_like triu ones new_zeros new_ones new_empty
    zeros empty zero_ lift_fresh empty_like lift_fresh_copy""".split()  # noqa: SIM905
)
# The operators of MOVES that may put integers among floating-point values.
JOINS = frozenset(("cat", "stack", "copy_", "where", "maximum", "minimum"))
# Operators that turn a small change of numbers into another choice, as a router's of
# experts.
CHOOSES = frozenset(
    ("topk", "argmax", "argmin", "sort", "argsort", "round", "floor", "bucketize")
)
# Significant bits of float32, in which sound models compute norms and rotary tables
SINGLE = 24


class RoundedWeights:
    """A model's weights as formats round them to nearest, each rounded once, since a
    small model's run is mostly that. A weight that its format holds as it is, is not
    stored again; of any other the rounded values are stored, in the format's own
    dtype."""

    def __init__(self) -> None:
        # By where the values lie and the format: the values, which are not to be written
        # elsewhere meanwhile, how often they had been written to, and the rounded ones
        self._rounded: dict[tuple[object, ...], tuple[Tensor, int, Tensor | None]] = {}

    def rounded(self, values: Tensor, fmt: Format) -> Tensor:
        """Returns fp64 values of a weight rounded to a format, as `round_values` rounds
        them. The rounded values are stored until the weight is written to. The same
        tensor comes back where rounding changes nothing, unless it has NaN. Complex
        values are rounded anew each time."""
        if values.is_complex():
            return round_values(values, fmt)
        key = (values.data_ptr(), values.shape, values.stride(), fmt.name)
        stored = self._rounded.get(key)
        if stored is None or stored[1] != values._version:
            exact = round_values(values, fmt)
            narrow = None if torch.equal(exact, values) else exact.to(dtype_of(fmt))
            stored = self._rounded[key] = values, values._version, narrow
        narrow = stored[2]
        return values if narrow is None else narrow.to(values.dtype)


class AtSites:
    """Rounds what operations at `sites` compute to the dtype that their result says,
    unless that is more precise than `format`. Parameters and buffers, whose site is
    `weights`, are rounded where they are read. Rounding is to nearest, or with a
    `generator` up or down at random.

    An operator that only moves values returns them as they are, since they were rounded
    where they were computed. Only the numbers that it brings in (of a mask, a pad, a
    clamp) are rounded at its own site."""

    def __init__(
        self, places: SiteTracker, fmt: Format, sites: Collection[str],
        generator: torch.Generator | None = None, weights: RoundedWeights | None = None,
    ) -> None:  # fmt: skip
        """`weights`: those that further runs of the model read again; None where they
        are other tensors in each."""
        self.places, self.format, self.sites = places, fmt, sites
        self.generator, self.weights = generator, weights
        self.narrower: dict[str, str] = {}  # by site, the narrower format it computes in

    def read(self, values: Tensor, dtype: torch.dtype, *, is_weight: bool) -> Tensor:
        """Returns the values that an operation reads from a tensor of this dtype. A
        weight's, which may be a buffer, are rounded where `weights` is one of the sites
        and the dtype is no more precise than the model's format. All others are as they
        are. Raises UsageError for a weight whose dtype has no format."""
        if is_weight and "weights" in self.sites:
            fmt = values_format(dtype)
            is_nearest = self.generator is None and self._rounds_to(fmt)
            if self.weights is not None and is_nearest:
                return self.weights.rounded(values, fmt)
            return self._round_if_no_wider(values, fmt)
        return values

    def number(
        self, func: OpOverload, value: float, dtype: torch.dtype, device: torch.device
    ) -> float:
        """Returns `value`, a Python number that the operation `func` brings in. It is
        rounded to nearest where the operation only moves values, its site is chosen and
        `dtype` is no more precise than the model's format; else it is as it is. Raises
        UsageError for a dtype without a format."""
        fmt = values_format(dtype)
        if not only_moves_values(func) or fmt.precision > self.format.precision:
            return value
        is_rounded = self.places.site_of(func, ()) in self.sites
        return round_number(value, fmt) if is_rounded else value

    def arguments(
        self, func: OpOverload, args: tuple[object, ...], written: Sequence[Tensor]
    ) -> tuple[object, ...]:
        """Returns `args` as they are: `result` reads no values of theirs."""
        return args

    def result(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        values: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the values that an operation computed for a result of this dtype. They
        are rounded if the operation's site is chosen and the dtype is no more precise
        than the model's format. Values that an operation only moves are not rounded,
        unless it brings in other numbers. Notes in `narrower` a site that computes in
        less than the model's format and in less than SINGLE bits. Raises UsageError for a
        dtype without a format."""
        if only_moves_values(func) and not brings_other_numbers(func, args, dtype):
            return values
        fmt, site = values_format(dtype), self.places.site_of(func, args)
        if fmt.precision < self.format.precision and fmt.precision < SINGLE:
            self.narrower[site] = fmt.name
        return self._round_if_no_wider(values, fmt) if site in self.sites else values

    def _round_if_no_wider(self, values: Tensor, fmt: Format) -> Tensor:
        """Returns the values rounded to a format; the same tensor where that format is
        more precise than the model's."""
        return (
            round_values(values, fmt, self.generator) if self._rounds_to(fmt) else values
        )

    def _rounds_to(self, fmt: Format) -> bool:
        """Whether results in a format are rounded: it is no more precise than the
        model's."""
        return fmt.precision <= self.format.precision


class Running(Computing):
    """Computes every operation in fp64, and rounds as `AtSites`, its `rounding`, says."""

    def __init__(self, rounding: AtSites) -> None:
        super().__init__(rounding)
        # Whether the model chooses among its parts, as a router of experts
        self.routes = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.routes |= func.overloadpacket.__name__ in CHOOSES and isinstance(
            args[0], Wide
        )
        return super().__torch_dispatch__(func, types, args, kwargs)


def only_moves_values(func: OpOverload) -> bool:
    """Whether an operator only moves values or chooses among them: its name is in MOVES,
    and that of its overload does not say `reduce`."""
    return func.overloadpacket.__name__ in MOVES and "reduce" not in func._overloadname


def brings_other_numbers(
    func: OpOverload, args: tuple[object, ...], dtype: torch.dtype
) -> bool:
    """Whether an operator that moves values also makes new ones: `index_put` adds some up
    (its fourth argument); a tensor with axes that is wider than `dtype` is cast down; or
    an operator of JOINS puts integers, which bool are not, among floating-point
    values."""
    name = func.overloadpacket.__name__
    if name in ("index_put", "index_put_") and len(args) > 3 and args[3]:
        return True
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    floats = [values_format(x.dtype) for x in tensors if is_floating(x) and x.ndim]
    if not all(values_format(dtype).contains(fmt) for fmt in floats):
        return True
    integers = (x for x in tensors if not is_floating(x) and x.dtype != torch.bool)
    return name in JOINS and any(True for _ in integers)


class SiteTracker:
    """Follows which modules run, and names the sites of operations."""

    def __init__(self, model: nn.Module) -> None:
        owners, layers = attention_modules(model), layer_names(model)
        named = {name: m for name, m in model.named_modules() if name}
        self.kinds = {
            m: _site_of_module(name, m, owners, layers) for name, m in named.items()
        }
        self.layers, self.owners = ({named[name] for name in x} for x in (layers, owners))
        self.rotates = "rotary" in self.kinds.values()
        self.running: list[nn.Module] = []
        # The running owners whose attention has been called
        self.attended: set[nn.Module] = set()
        # For a running owner that attends by hand, the site that it has come to
        self.by_hand: dict[nn.Module, str] = {}
        # The width of the residual stream in each running layer
        self.widths: dict[nn.Module, int] = {}
        self.begun = False  # whether a layer has run

    def following(self) -> AbstractContextManager[None]:
        """Returns a context in which the model runs and its modules are followed. The
        call forgets at once what was followed before, but for `by_hand` and `widths` of
        modules, which stay until these run again."""
        self.running, self.attended, self.begun = [], set(), False

        def enter(
            module: nn.Module, args: tuple[object, ...], named: Mapping[str, object]
        ) -> None:
            """Puts a module on top of those that run; notes the width of the states that
            a layer reads."""
            self.running.append(module)
            self.attended.discard(module)
            self.by_hand.pop(module, None)
            if module in self.layers:
                self.begun = True
                states = next(filter(is_floating, (*args, *named.values())), None)
                self.widths[module] = 0 if states is None else states.shape[-1]

        def leave(module: nn.Module, *_: object) -> None:
            """Takes a module that ends off the top of those that run."""
            if self.running and self.running[-1] is module:
                self.running.pop()

        return module_hooks(self.kinds, enter, leave)

    def note_attention_call(self) -> None:
        """Notes that the attention of the running modules was called: what these compute
        from now on comes after it."""
        self.attended.update(m for m in self.running if m in self.owners)

    def site_of(self, func: OpOverload, args: tuple[object, ...]) -> str:
        """Returns the site, one of SITES, of an operation of the module that runs. Notes
        how far a module has come that computes attention itself. `args`: the operation's
        arguments, whose shapes tell a sum with the residual stream from one inside an
        activation."""
        module = self.running[-1] if self.running else None
        kind = self.kinds[module] if module is not None else "outside"
        name = func.overloadpacket.__name__
        if kind == "owner":
            assert module is not None
            if module not in self.attended and (
                site := self._site_in_attention(module, name)
            ):
                return site
            if name in PRODUCTS:
                return "output projection" if module in self.attended else "q, k, v"
            return "rotary" if self.rotates and module not in self.attended else "other"
        if kind == "layer":
            if name in PRODUCTS:
                return "MLP"
            shapes = [x.shape for x in args if isinstance(x, Tensor)]
            alike = len(shapes) == 2 and shapes[0] == shapes[1]
            adds = (
                name in ("add", "add_") and alike and self._may_add_to_residual(shapes[0])
            )
            return "residual" if adds else "activation"
        if kind != "outside":
            return kind
        if not self.layers.isdisjoint(self.running):
            return "other"  # a helper that layers share
        return "logits" if self.begun else "embedding"

    def _may_add_to_residual(self, shape: torch.Size) -> bool:
        """Whether a sum of this shape may be one with the residual stream: it is as wide
        as the layer's input, if that width is known, and the module that computes it has
        parts, which a function of activation has not."""
        layer = next((m for m in reversed(self.running) if m in self.layers), None)
        width = self.widths.get(layer, 0) if layer is not None else 0
        has_parts = any(True for _ in self.running[-1].children())
        return has_parts and (not width or shape[-1:] == (width,))

    def _site_in_attention(self, module: nn.Module, name: str) -> str:
        """Returns the site of an operator, by name, in a module that computes attention
        itself. It is `attention scores` from the first product (`bmm`, `baddbmm`) to the
        softmax, both included, and for any softmax; then `attention P`; `attention
        output` for the next product. Empty for another operator before the scores. Notes
        how far the module has come."""
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


def layer_names(model: nn.Module) -> list[str]:
    """Returns the dotted names of a model's layers, in the model's order: the members of
    each `ModuleList` or `Sequential` whose members all have submodules. Lists inside a
    layer do not count. Empty without such a list."""
    layers: list[str] = []
    for name, m in model.named_modules():
        if isinstance(m, nn.ModuleList | nn.Sequential) and not _enclosing_module(
            name, layers
        ):
            members = dict(m.named_children())
            if all(any(True for _ in member.children()) for member in members.values()):
                layers += [f"{name}.{child}".removeprefix(".") for child in members]
    return layers


def _enclosing_module(name: str, modules: Iterable[str]) -> str | None:
    """Returns the first of the names `modules` that is the module `name` or contains it;
    None without one."""
    return next((m for m in modules if f"{name}.".startswith(f"{m}.")), None)


def _site_of_module(
    name: str, module: nn.Module, owners: list[str], layers: list[str]
) -> str:
    """Returns the site that all operations of a module have. Where the site depends on
    the operation it returns `owner` (a module that has attention's projections), `layer`
    (one inside a layer without a weight) or `outside`. Norms and rotary embeddings are
    told by name or class wherever they stand. `owners`, `layers`: names of the modules
    with attention, and of layers."""
    leaf, layer = name.rpartition(".")[2].lower(), _enclosing_module(name, layers)
    described = f"{leaf} {type(module).__name__.lower()}"
    if "norm" in described:
        return "norms"
    if "rotary" in described or "rope" in described:
        return "rotary"
    if name in owners:
        return "owner"
    if layer is None:
        return "embedding" if isinstance(module, nn.Embedding) else "outside"
    if getattr(module, "weight", None) is None:
        return "layer"
    if _enclosing_module(name, owners):
        return (
            "q, k, v" if any(role.search(leaf) for role in QKV) else "output projection"
        )
    depth = layer.count(".") + 2  # of the parts of a layer, one of which holds the owner
    zones = {
        ".".join(owner.split(".")[:depth])
        for owner in owners
        if _enclosing_module(owner, [layer])
    }
    return "output projection" if _enclosing_module(name, zones) else "MLP"
