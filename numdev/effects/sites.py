"""The rounding sites of a transformer, and at which of them an operation stands: by the module that
runs it, where that is in the model, and whether attention was met already. What is none of them is
`other`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

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


class Places:
    """Follows which modules run, and names the sites of operations."""

    def __init__(self, model: nn.Module) -> None:
        owners, layers = attention_modules(model), _layers(model)
        named = {name: m for name, m in model.named_modules() if name}
        self.kinds = {m: _kind(name, m, owners, layers) for name, m in named.items()}
        self.layers, self.owners = ({named[name] for name in x} for x in (layers, owners))
        self.rotates = "rotary" in self.kinds.values()
        self.running: list[nn.Module] = []
        self.attended: set[nn.Module] = set()  # of the running owners, whose attention was met
        self.begun = False  # whether a layer has run

    def following(self) -> AbstractContextManager[None]:
        """Run the model in here."""
        self.running, self.attended, self.begun = [], set(), False

        def enter(module: nn.Module, *_: Any) -> None:
            self.running.append(module)
            self.attended.discard(module)
            self.begun |= module in self.layers

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
            if name in PRODUCTS:
                return "output projection" if module in self.attended else "q, k, v"
            return "rotary" if self.rotates and module not in self.attended else "other"
        if kind == "layer":
            if name in PRODUCTS:
                return "MLP"
            shapes = [x.shape for x in args if isinstance(x, Tensor)]
            alike = len(shapes) == 2 and shapes[0] == shapes[1]
            return "residual" if name in ("add", "add_") and alike else "activation"
        if kind != "outside":
            return kind
        if not self.layers.isdisjoint(self.running):
            return "other"  # a helper that layers share
        return "logits" if self.begun else "embedding"


def _layers(model: nn.Module) -> list[str]:
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
