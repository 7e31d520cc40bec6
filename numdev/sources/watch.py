"""Who calls: which modules of a model run, which of them attend, and whether every one was seen.

A `Watch` follows a model while it runs, by hooks. It names every attention call after the module
that makes it, tells the passes of a generation apart, and holds the calls it was told of against
those it expected: modules that own query, key and value projections and ran must have made one. A
module without such projections that computes attention by hand beside others that do not is not
noticed.

How a call is met is `numdev.sources.capture`'s business.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

from numdev.cases import CaseRef, Phase
from numdev.errors import MeasurementError


def attention_modules(model: nn.Module) -> list[str]:
    """The names of the modules that own query, key and value projections, in the model's order.

    They are known by the names of their children (`q_proj`, `to_k`, `value`, `c_attn`, `Wqkv`...),
    which is how they are named throughout transformers, diffusers and timm.
    """
    return [name for name, module in model.named_modules() if _owns_projections(module)]


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
    modules = dict(model.named_modules())
    found = {name: layer_of(modules[name], name) for name in attention_modules(model)}
    known = {name: number for name, number in found.items() if number is not None}
    return known if len(known) == len(found) else None


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
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.modules:
            self.handles += [
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.running.append(module)
        self.ran[module] += module in self.owners
        self.passes += module is self.model

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self.running and self.running[-1] is module:  # not where a hook before `_enter` raised
            self.running.pop()

    def next_call(self) -> CaseRef:
        """The name of the call being made; it counts for the module that owns its projections.

        That is the innermost running module with projections. Where they are in a module of their
        own that has already returned, it is the innermost one that such a module is a child of.
        """
        module = self.running[-1]
        name = self.modules[module]
        inside_out = self.running[::-1]
        owner = next((m for m in inside_out if m in self.owners), None)
        owner = owner or next((m for m in inside_out if self.wrappers[m]), module)
        self.seen[owner] += 1
        call = self.calls[name]
        self.calls[name] += 1
        phase, step = self._phase(), self.step() if self.step else None
        return CaseRef(
            case=f"{name}#{call}"
            + (f"/{phase}" if phase else "")
            + (f"/step{step}" if step is not None else "")
            + (f"@{self.prompt}" if self.prompt else ""),
            source=self.source,
            module=name,
            layer=self._layer(module, name),
            call=call,
            phase=phase,
            step=step,
        )

    def _layer(self, module: nn.Module, name: str) -> int:
        """Its number, or where it has none a running number."""
        layer = layer_of(module, name)
        return list(self.calls).index(name) if layer is None else layer

    def _phase(self) -> Phase | None:
        """The first pass of a generation is its prefill, as is an encoder's run before it."""
        if not self.generates:
            return None
        return "prefill" if self.passes <= 1 else "decode"

    def check_complete(self) -> None:
        """Raises MeasurementError unless every run of every owner of projections made a call."""
        missed = {m: n - self.seen[m] for m, n in self.ran.items() if n > self.seen[m]}
        for parent in self.modules:
            short = self.wrappers[parent] & missed.keys()
            if short and self.seen[parent] >= sum(missed[m] for m in short):
                missed = {m: n for m, n in missed.items() if m not in short}
        hint = "numdev sees calls of scaled_dot_product_attention and of transformers' interface"
        if missed:
            names = sorted(self.modules[m] for m in missed)
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise MeasurementError(
                f"attention ran but was not seen in {', '.join(names[:4])}{more}", hint=hint
            )
        if not self.calls:
            raise MeasurementError("the model made no attention call", hint=hint)


# The projections by their names, whole words between underscores: q_proj, to_k, linear_v, c_attn.
_WORD = r"(?:^|_)(?:{})(?:_|$)"
_ROLES = tuple(
    re.compile(_WORD.format(words))
    for words in ("q|wq|query", "k|kv|wk|wkv|key", "v|kv|wv|wkv|value")
)
_FUSED = re.compile(_WORD.format("qkv|wqkv|query_key_value|c_attn|att_proj"))


def _owns_projections(module: nn.Module) -> bool:
    """Whether the module's children are the projections of an attention.

    Linear attention has them too, with a short convolution behind them, and is no such attention.
    """
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = [name.lower() for name, _ in module.named_children()]
    if any("conv1d" in name for name in names):
        return False
    names = [name for name in names if "norm" not in name]
    return any(_FUSED.search(n) for n in names) or all(
        any(role.search(n) for n in names) for role in _ROLES
    )
