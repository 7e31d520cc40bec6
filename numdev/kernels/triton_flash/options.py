"""The options of `triton-flash`: which there are, what goes together, and what `emulated` calls it.

Nothing here computes attention or needs triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numdev.cases import AttentionCase
from numdev.errors import UsageError, closest
from numdev.kernels import Output, options_of
from numdev.kernels.emulation import stabilised
from numdev.system import System

FORMATS = ("working", "float32")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "loop_order": ("q", "kv"),
    "kv_order": ("ascending", "descending"),
    "scores": FORMATS,
    "p": FORMATS,
    "accumulator": FORMATS,
    "row_sum": FORMATS,
    "l_from": ("unrounded", "rounded"),
    "delta_from": ("dO*O", "dP*P"),
    "delta_o": FORMATS,
    "dp": FORMATS,
    "exponential": ("exp2", "exp"),
    "softmax": ("plain", "stabilised", "guarded"),
}
"""Options that are one of several words."""
EMULATED = (
    "block_q", "block_kv", "loop_order", "kv_order", "scores", "p", "accumulator", "row_sum",
    "l_from", "delta_from", "delta_o", "dp", "softmax",
)  # fmt: skip
"""Options that `emulated` has too, by the same name and with the same values. exp and exp2 differ
in their last bits alone, which no emulation knows of."""
SMALLEST = {"block_q": 16, "block_kv": 16, "num_warps": 1, "num_stages": 1}
"""Of sizes; 16 is what Triton's matrix products need."""


def check(options: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that means nothing, or would mean nothing beside the rest."""
    for name, choices in CHOICES.items():
        if options[name] not in choices:
            raise UsageError(
                f"{name} is {options[name]!r}", hint=closest(str(options[name]), choices)
            )
    for name, smallest in SMALLEST.items():
        _check_size(name, options[name], smallest)
    if options["delta_o"] != "working" and options["delta_from"] != "dO*O":
        raise UsageError("delta_o is of delta from dO*O", hint="leave out one of the two")
    stabilised.check(options)


def _check_size(name: str, value: Any, smallest: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise UsageError(f"{name} is {value!r}", hint=f"expected a whole number from {smallest} on")
    if name != "num_stages" and value & (value - 1):
        raise UsageError(f"{name} is {value}", hint="Triton needs a power of two")


def in_force(given: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """All options of the kernel's function, as given or as it has them. Raises as `check` does."""
    options = {**options_of(function), **given}
    check(options)
    for name, value in stabilised.DEFAULTS.items():
        options[name] = value if options[name] is None else options[name]
    return options


def described(options: Mapping[str, Any]) -> str:
    """Options in force as `name=value` words."""
    return " ".join(f"{name}={value}" for name, value in options.items())


def claims(case: AttentionCase, output: Output, system: System) -> Mapping[str, Any] | None:
    """What `emulated` calls the options in force. None with the stabilised softmax: which rows it
    shifts is decided by the last bits of their scores, which no emulation has. (The guarded one
    asks no score.)

    A group's dK and dV are kept in fp32 until they are summed.
    """
    given = dict(word.split("=", 1) for word in (output.ran or "").split())
    if given["softmax"] == "stabilised":
        return None
    named: dict[str, Any] = {name: given[name] for name in EMULATED}
    sizes = {name: int(named[name]) for name in ("block_q", "block_kv")}
    return {"preset": "fa2", **named, **sizes, "dk_partial": "float32", "dv_partial": "float32"}
