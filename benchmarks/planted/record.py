"""What the catalogue says of a kernel, and how kernels are put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numdev.cases import AttentionCase
from numdev.kernels import Kernel, find, kernel_of_function

FAMILIES = {
    "sound": "Right, each in its own design.",
    "function": "Another function: scale, keys, sums, soft caps, sinks, layouts.",
    "mask": "Another mask, window or causality.",
    "grouping": "Another kv head, query head or batch entry.",
    "place": "Wrong in some rows, heads or sizes alone.",
    "lse": "Another log-sum-exp beside a right output.",
    "gradient": "Another backward pass beside a right output.",
    "rounding": "Right, but for a step that loses digits.",
    "invariance": "Right or wrong by what else is in the call.",
    "verdict": "What a verdict must not mistake for a pass.",
    "process": "Ends, hangs or leaves its process, or raises.",
    "hostile": "Turns on the process that runs it.",
}
TENSORS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One kernel of the catalogue.

    `check` names default cases of `numdev check`: given these alone, in any one of
    `formats`, the check must fail a faulty kernel; () where it need not. Its findings'
    causes must then match the pattern `says`; where that is None no cause may be named,
    and `rule` is the rule that the first finding breaks, or `place` what its sentence
    must match. `calls` names calls of `function.CALLS` that show the fault in an audit."""

    name: str
    """In kebab-case; as a kernel `planted:NAME`, with underscores."""
    family: str
    what: str
    """What is wrong, or of a sound kernel its design, in a sentence."""
    function: Callable[..., Any] | Kernel | str
    """Of q, k and v or of a case; or the name of one of numdev's own kernels."""
    tensors: tuple[str, ...] = ()
    """Those in which it shows."""
    formats: tuple[str, ...] = ("bfloat16",)
    """In which it is so."""
    check: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    rule: str | None = None
    says: str | None = None
    is_named: bool = True
    """Whether a check says its cause too, and not an audit of `calls` alone."""
    place: str | None = None
    shows: Callable[[AttentionCase], bool] = lambda case: True
    """Whether a case can show it at all: of one without a mask none can be off."""

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def address(self) -> str:
        """By which a command finds it."""
        return f"planted:{self.attribute}"

    @property
    def kernel(self) -> Kernel:
        if isinstance(self.function, Kernel):
            return self.function
        if isinstance(self.function, str):
            return find(self.function)
        return kernel_of_function(self.address, self.function)


CATALOGUE: dict[str, Planted] = {}


def plant(
    name: str,
    family: str,
    what: str,
    function: Callable[..., Any] | Kernel | str,
    **fields: Any,
) -> Planted:
    """Puts a kernel into the catalogue. ValueError for a name that is taken, and for a
    family that is none."""
    if name in CATALOGUE or family not in FAMILIES:
        raise ValueError(f"{name} ({family}): expected a new name, and a family")
    if family == "sound":
        fields = {"formats": ("bfloat16", "float16"), **fields}
    entry = Planted(name=name, family=family, what=what, function=function, **fields)
    if not isinstance(function, Kernel | str):
        function.__module__ = "planted"
        function.__name__ = function.__qualname__ = entry.attribute
        function.__doc__ = function.__doc__ or what
    CATALOGUE[name] = entry
    return entry


def planted(family: str, what: str, **fields: Any) -> Callable[..., Any]:
    """The same as a decorator, by the function's own name."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        plant(function.__name__.replace("_", "-"), family, what, function, **fields)
        return function

    return register


def of_family(*families: str) -> list[Planted]:
    """All kernels of these families, in the catalogue's order."""
    return [entry for entry in CATALOGUE.values() if entry.family in families]
