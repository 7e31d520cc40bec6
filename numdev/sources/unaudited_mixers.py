"""Modules that let tokens act on each other without a softmax: state spaces, short
convolutions, linear and recurrent attention. No kernel of softmax attention stands in for
them, so an audit leaves them out, and says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from torch import nn

from numdev.grouping import grouped

# Parts of their classes' names, after that of the family (KimiLinearAttention is no
# linear one).
KINDS = re.compile(
    "Mamba|SSM|Delta|KDA|Kda|Lightning|LinearAtt|Recurrent|RGLRU|Rglru|Retention|RWKV"
    "|Rwkv|ShortConv|Hyena|LSTM"
)
STATES = ("A_log", "dt_bias")  # what a state space has, whatever it is called
PROJECTIONS = (nn.Linear, nn.Conv1d)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module mixes tokens without a softmax. True for an RNN of PyTorch
    (`nn.RNNBase`). True too for a module with a Linear or Conv1d among its children, no
    ModuleList inside, and one of these signs: a class name of KINDS; a child that is a
    depthwise Conv1d or has `conv1d` in its name; a child or a parameter of its own with a
    name of STATES."""
    if isinstance(module, nn.RNNBase):
        return True
    children = dict(module.named_children())
    if not any(isinstance(child, PROJECTIONS) for child in children.values()):
        return False
    if any(isinstance(part, nn.ModuleList) for part in module.modules()):
        return False
    convolves = any(
        "conv1d" in name.lower() or _is_depthwise(m) for name, m in children.items()
    )
    names = {*children, *dict(module.named_parameters(recurse=False))}
    return (
        convolves
        or not names.isdisjoint(STATES)
        or bool(KINDS.search(_class_name(module)))
    )


def _is_depthwise(module: nn.Module) -> bool:
    """Whether a module is a Conv1d that filters each of several channels by itself."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1


def _class_name(module: nn.Module) -> str:
    """Returns the name of a module's class without the name of its transformers family at
    the beginning, in any case. The family is what its file `modeling_FAMILY`, which is in
    a package, has, without underscores; a class of any other module has none."""
    name = type(module).__name__
    family = type(module).__module__.partition(".modeling_")[2].replace("_", "")
    return name[len(family) :] if name.lower().startswith(family) else name


def outermost_mixers(
    model: nn.Module, attends: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) of the outermost mixers, in the model's order. What is inside
    a mixer, or inside a module for which `attends` is true, is left out; but what is
    inside the model itself is looked at, whatever the model is."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{other}.") for other in outer if other):
            continue
        if mixes := is_mixer(module):
            yield name, module
        if mixes or attends(module):
            outer.append(name)


def mixers_in_words(mixers: Iterator[tuple[int | None, str, nn.Module]]) -> str:
    """Returns `layers 0, 1, 2 (MambaMixer) and ...`, by class, for (layer, name, module)
    of each mixer. Where a mixer of a class has no layer (None), all of this class are
    told by their names. Empty without mixers."""
    parts = []
    for kind, members in grouped(mixers, lambda of: type(of[2]).__name__).items():
        numbers = [layer for layer, _, _ in members]
        if None in numbers:
            where = ", ".join(name for _, name, _ in members)
        else:
            where = f"layer{'s' * (len(members) > 1)} {', '.join(map(str, numbers))}"
        parts.append(f"{where} ({kind})")
    return " and ".join(parts)
