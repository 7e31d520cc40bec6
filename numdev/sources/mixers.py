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
    "Mamba|SSM|Delta|KDA|Kda|Lightning|LinearAtt|Recurrent|RGLRU|Rglru|Retention|RWKV|Rwkv|ShortConv"
    "|Hyena|LSTM"
)
STATES = ("A_log", "dt_bias")  # what a state space has, whatever it is called
PROJECTIONS = (nn.Linear, nn.Conv1d)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module mixes tokens without a softmax: by the name of its class, or since
    it holds a convolution along the sequence or the decay of a state. What holds layers
    is none."""
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
        convolves or not names.isdisjoint(STATES) or bool(KINDS.search(_own_name(module)))
    )


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1


def _own_name(module: nn.Module) -> str:
    """The name of its class without that of a family of transformers, which its file is
    named after."""
    name, family = (
        type(module).__name__,
        type(module).__module__.rpartition(".modeling_")[2],
    )
    family = family.replace("_", "")
    return name[len(family) :] if name.lower().startswith(family) else name


def mixers(
    model: nn.Module, attends: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost of them, with their names, in the model's order; what is part of a
    module that `attends` is its own affair."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{other}.") for other in outer if other):
            continue
        if mixes := is_mixer(module):
            yield name, module
        if mixes or attends(module):
            outer.append(name)


def in_words(mixers: Iterator[tuple[int | None, str, nn.Module]]) -> str:
    """`layers 0, 1, 2 (MambaMixer)`: the layers of mixers, each with its name, by their
    kinds."""
    parts = []
    for kind, members in grouped(mixers, lambda of: type(of[2]).__name__).items():
        numbers = [layer for layer, _, _ in members]
        if None in numbers:
            where = ", ".join(name for _, name, _ in members)
        else:
            where = f"layer{'s' * (len(members) > 1)} {', '.join(map(str, numbers))}"
        parts.append(f"{where} ({kind})")
    return " and ".join(parts)
