"""Who calls: which modules of a model run, which of them attend, and whether every one was seen.

Modules that own query, key and value projections and ran must have made a call. One without such
projections that attends by hand beside others that do not is not noticed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import nn

from numdev.cases import CaseRef, Phase
from numdev.errors import MeasurementError

# The projections by their names, whole words between underscores: q_proj, to_k, linear_v, c_attn.
_WORD = r"(?:^|_)(?:{})(?:_|$)"
_ROLES = tuple(
    re.compile(_WORD.format(words))
    for words in ("q|wq|query", "k|kv|wk|wkv|key", "v|kv|wv|wkv|value")
)
_FUSED = re.compile(_WORD.format("qkv|wqkv|query_key_value|c_attn|att_proj"))
SHOWN = 8  # So many layers are named one by one


def attention_modules(model: nn.Module) -> list[str]:
    """The names of the modules that own query, key and value projections, in the model's order:
    known by the names of their children (`q_proj`, `to_k`, `value`, `c_attn`, `Wqkv`...), as
    throughout transformers, diffusers and timm."""
    return [name for name, module in model.named_modules() if _owns_projections(module)]


def _owns_projections(module: nn.Module) -> bool:
    """Whether the module's children are the projections of an attention. Those of a linear
    attention have a short convolution behind them, and are not."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = [name.lower() for name, _ in module.named_children() if "norm" not in name.lower()]
    if any("conv1d" in name for name, _ in module.named_children()):
        return False
    return any(_FUSED.search(n) for n in names) or all(
        any(role.search(n) for n in names) for role in _ROLES
    )


def layer_of(module: nn.Module, name: str) -> int | None:
    """What transformers numbers a module, else the one number in its name; None where it has
    none, or several."""
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int):
        return layer
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


def numbered(model: nn.Module) -> dict[str, int] | None:
    """The numbers of the modules that attend; None where one of them has none."""
    found = {n: layer_of(model.get_submodule(n), n) for n in attention_modules(model)}
    known = {name: number for name, number in found.items() if number is not None}
    return known if len(known) == len(found) else None


@contextmanager
def hooked(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Call `enter(module, args, kwargs)` before and `leave(module, ...)` after every module's run,
    also one that raises."""
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Watch:
    """Follows which modules run, names the calls they make, and notices attention without one."""

    def __init__(
        self,
        model: nn.Module,
        *,
        source: str,
        prompt: int = 0,
        generates: bool = False,
        step: Callable[[], int] | None = None,
    ) -> None:
        """`step`: asked at every call for the denoising step it belongs to, where there are any."""
        self.model, self.generates, self.step = model, generates, step
        self.modules = {m: name or type(m).__name__ for name, m in model.named_modules()}
        self.owners = {m for m in self.modules if _owns_projections(m)}
        self.wrappers = {m: set(m.children()) & self.owners for m in self.modules}
        self.source, self.prompt = source, prompt
        self.running: list[nn.Module] = []
        self.passes = 0
        self.ran: Counter[nn.Module] = Counter()
        self.calls: Counter[str] = Counter()
        self.seen: Counter[nn.Module] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the model in here. Raises MeasurementError at the end unless every run of every owner
        of projections made a call."""
        with hooked(self.model, self._enter, self._leave):
            yield
        self._check_complete()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self.running.append(module)
        self.ran[module] += module in self.owners
        self.passes += module is self.model

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self.running and self.running[-1] is module:  # not where a hook before `_enter` raised
            self.running.pop()

    def next_call(self) -> CaseRef:
        """The name of the call being made; it counts for the innermost running module with
        projections, or where these are in a module of their own that has returned, its parent."""
        module, inside_out = self.running[-1], self.running[::-1]
        name = self.modules[module]
        owner = next((m for m in inside_out if m in self.owners), None)
        owner = owner or next((m for m in inside_out if self.wrappers[m]), module)
        self.seen[owner] += 1
        call = self.calls[name]
        self.calls[name] += 1
        phase: Phase | None = None
        if self.generates:  # an encoder's run before the first pass is of the prefill too
            phase = "prefill" if self.passes <= 1 else "decode"
        step = self.step() if self.step else None
        layer = layer_of(module, name)
        return CaseRef(
            case=f"{name}#{call}"
            + (f"/{phase}" if phase else "")
            + (f"/step{step}" if step is not None else "")
            + (f"@{self.prompt}" if self.prompt else ""),
            source=self.source,
            module=name,
            layer=list(self.calls).index(name) if layer is None else layer,
            call=call,
            phase=phase,
            step=step,
        )

    def _check_complete(self) -> None:
        missed = {m: n - self.seen[m] for m, n in self.ran.items() if n > self.seen[m]}
        for parent in self.modules:
            short = self.wrappers[parent] & missed.keys()
            if short and self.seen[parent] >= sum(missed[m] for m in short):
                missed = {m: n for m, n in missed.items() if m not in short}
        what = "" if self.calls else "the model made no attention call"
        if missed:
            names = sorted(self.modules[m] for m in missed)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            what = f"attention ran but was not seen in {', '.join(names[:4])}{more}"
        if what:
            hint = (
                "numdev sees calls of scaled_dot_product_attention and of transformers' interface"
            )
            raise MeasurementError(what, hint=hint)


class Layers:
    """Chooses calls by their layer, and remembers whose were met. None: all are chosen."""

    def __init__(self, asked: Sequence[int] | None) -> None:
        self.asked = asked
        self.met: set[int | None] = set()

    def choose(self, layer: int | None) -> bool:
        self.met.add(layer)
        return self.asked is None or layer in self.asked

    def notes(self, target: str | None) -> tuple[str, ...]:
        """What to say when all calls were met: layers that were asked for, and have none. Raises
        MeasurementError where no call is in any of them."""
        lacking = sorted(set(self.asked or ()) - self.met)
        if not lacking:
            return ()
        there = sorted(layer for layer in self.met if layer is not None)
        known = f"calls were met in {_words(there)}" if there else "no call has a number"
        found = f"no attention call in {_words(lacking)}; {known}"
        if self.asked and self.met and self.met.isdisjoint(self.asked):
            raise MeasurementError(f"{target}: {found}", hint="check --layers")
        return (f"--layers: {found}.",)


def _words(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0, 4 and 5`, `layers 0 to 31`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and all(b - a == 1 for a, b in pairwise(layers)):
        return f"layers {layers[0]} to {layers[-1]}"
    first, more = layers[:SHOWN], len(layers) - SHOWN
    if more > 0:
        return f"layers {', '.join(map(str, first))} and {more} more"
    return f"layers {', '.join(map(str, first[:-1]))} and {first[-1]}"
