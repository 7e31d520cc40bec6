"""Who calls: which modules of a model run, which of them attend, and whether every one was seen.

Modules that own query, key and value projections and ran must have made a call. One without such
projections that attends by hand beside others that do not is not noticed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from numdev.cases import CaseRef, Phase
from numdev.errors import MeasurementError
from numdev.sources.files import some

# The projections by their names, whole words between underscores: q_proj, to_k, linear_v, c_attn.
_WORD = r"(?:^|_)(?:{})(?:_|$)"
_ROLES = tuple(
    re.compile(_WORD.format(words))
    for words in ("q|wq|query", "k|kv|wk|wkv|key", "v|kv|wv|wkv|value")
)
_FUSED = re.compile(_WORD.format("qkv|wqkv|query_key_value|c_attn|att_proj"))


def attention_modules(model: nn.Module) -> list[str]:
    """The names of the modules that own query, key and value projections, in the model's order."""
    return [name for name, module in model.named_modules() if _owns_projections(module)]


def _owns_projections(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    children = [name.lower() for name, _ in module.named_children()]
    if any("conv1d" in name for name in children):  # a linear attention
        return False
    names = [name for name in children if "norm" not in name]
    return any(_FUSED.search(n) for n in names) or all(
        any(role.search(n) for n in names) for role in _ROLES
    )


def layer_of(module: nn.Module, name: str) -> int | None:
    """transformers' number of a module, else the one number in its name; None without one."""
    layer = getattr(module, "layer_idx", None)
    if isinstance(layer, int):
        return layer
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else None


@dataclass(kw_only=True, eq=False)
class Frame:
    """A module while it runs: what it was called with, and how many calls it has made."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    calls: int = 0


OnMet = Callable[[CaseRef, Sequence[Frame]], None]


class Watch:
    """Follows which modules run, names the calls they make, and notices attention without one."""

    def __init__(
        self,
        model: nn.Module,
        *,
        source: str,
        generates: bool = False,
        step: Callable[[], int | None] = lambda: None,
        on_met: OnMet | None = None,
    ) -> None:
        """`step`: asked at every call for the denoising step it belongs to, where there are any.
        `on_met`: told of every call as it is made, and of the modules that run."""
        self.model, self.source, self.generates = model, source, generates
        self.step, self.on_met = step, on_met
        self.modules = {m: name or type(m).__name__ for name, m in model.named_modules()}
        self.owners = {m for m in self.modules if _owns_projections(m)}
        self.running: list[Frame] = []
        self.passes = 0
        self.ran: Counter[nn.Module] = Counter()
        self.calls: Counter[str] = Counter()
        self.seen: Counter[nn.Module] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the model in here. Raises MeasurementError at the end unless every run of every owner
        of projections made a call."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.running.append(Frame(module=module, arguments=args, named=kwargs))
            self.ran[module] += module in self.owners
            self.passes += module is self.model

        def leave(module: nn.Module, *_: Any) -> None:
            if self.running and self.running[-1].module is module:  # not where a hook raised before
                self.running.pop()

        with ExitStack() as stack:
            for module in self.modules:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield
        self._check_complete()

    def next_call(self) -> CaseRef:
        """The name of the call being made, which counts for the innermost running module with
        projections."""
        inside_out = [frame.module for frame in reversed(self.running)]
        module, name = inside_out[0], self.modules[inside_out[0]]
        self.seen[next((m for m in inside_out if m in self.owners), module)] += 1
        call = self.calls[name]
        self.calls[name] += 1
        phase: Phase | None = None
        if self.generates:  # an encoder's run before the first pass is of the prefill too
            phase = "prefill" if self.passes <= 1 else "decode"
        step, layer = self.step(), layer_of(module, name)
        suffix = f"/{phase}" if phase else "" if step is None else f"/step{step}"
        ref = CaseRef(
            case=f"{name}#{call}{suffix}",
            source=self.source,
            module=name,
            layer=list(self.calls).index(name) if layer is None else layer,
            call=call,
            phase=phase,
            step=step,
        )
        if self.on_met:
            self.on_met(ref, self.running)
        return ref

    def _check_complete(self) -> None:
        missed = sorted(self.modules[m] for m, n in self.ran.items() if n > self.seen[m])
        if missed or not self.calls:
            what = f"attention ran but was not seen in {some(missed)}"
            what = what if missed else "the model made no attention call"
            hint = "numdev sees calls of scaled_dot_product_attention and transformers' interface"
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
        numbers = [str(layer) for layer in sorted(m for m in self.met if m is not None)]
        what = f"no attention call in layers {some(list(map(str, lacking)), 8)}"
        what += f"; there are calls in layers {some(numbers, 8)}" if numbers else ""
        if self.asked and self.met and self.met.isdisjoint(self.asked):
            raise MeasurementError(f"{target}: {what}", hint="check --layers")
        return (f"--layers: {what}.",)
