"""What a kernel's errors should be: the emulation it claims to be, on the same inputs.

A kernel's claim is a set of options of `emulated`: where it rounds, to what, in which tiles, in
both passes (forward alone has no use for what is said of backward). The emulation's distance from
the reference is then the distance the kernel should have, head by head and on any inputs; a sound
kernel is within a few per cent of it, and one that rounds where it does not say so is not, however
much worse than both plain attention may be.

It is computed with many tiles at once where the recipe allows it, and is then that of the kernel
`emulated` up to fp32 rounding.

An emulation leaves out what a kernel's fp32 arithmetic errs. So it predicts no single error where
that is not small beside the rounding to the working format, or where the output keeps more bits
than fp32 sums have to give. In float32 a size of error is expected nevertheless (`unexpected`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format
from numdev.kernels.emulation.backward import gradients
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.recipe import Recipe, recipe

CASTS: Mapping[str, str] = {"out": "out", "dq": "dq_out", "dk": "dk_out", "dv": "dv_out"}
"""By tensor, the site at which it is rounded to the format in which it is returned."""
MOST_BITS = 12
"""The significant bits of the widest working format whose rounding outweighs fp32 arithmetic."""


def recipe_of(claim: Mapping[str, Any], **overrides: Any) -> Recipe:
    """The recipe a claim describes, in fp32 arithmetic; raises UsageError for a senseless claim."""
    return recipe(**{**claim, **overrides, "compute": "float32"})


def emulation(case: AttentionCase, claim: Mapping[str, Any]) -> Tensor:
    """The claim's output [B, H, q_len, v_dim], float32. Raises as `emulated` does; waits for the
    device once."""
    return attend(case, recipe_of(claim), at_once=True)[0]


def emulated_step(case: AttentionCase, claim: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the claim has of a training step, float32: `out`, as in `emulation`, and `dq`, `dk`,
    `dv`, each in the shape of its input. Raises as `backward.gradients` does."""
    out, _, dq, dk, dv = gradients(case, recipe_of(claim), at_once=True)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def unpredictable(claim: Mapping[str, Any] | None, working: Format, returned: Format) -> str | None:
    """Why nothing is expected of an output, as a clause; None where something is."""
    if claim is None:
        return "no emulation stands for this kernel"
    if working.precision > MOST_BITS or not FORMATS["float32"].contains(working):
        return f"an emulation leaves out arithmetic, which is not small in {working.name}"
    rounded = (s for s, value in recipe_of(claim).sites.items() if value == "working")
    if returned.precision > MOST_BITS and all(site in CASTS.values() for site in rounded):
        return f"it rounds nowhere, and {returned.name} shows its arithmetic"
    return None


def unexpected(claim: Mapping[str, Any] | None, working: Format, returned: Format) -> str | None:
    """Why no size of error is expected of an output, as a clause; None where one is.

    In float32 an emulation, which is in fp32 arithmetic itself, predicts no element; but together
    with what that arithmetic may err (`Yardstick.arithmetic`) it bounds the size.
    """
    if claim is not None and working == returned == FORMATS["float32"]:
        return None
    return unpredictable(claim, working, returned)


def returning(
    claim: Mapping[str, Any] | None, case: AttentionCase, returned: Format | Mapping[str, Format]
) -> Mapping[str, Any]:
    """The claim for a kernel that returned formats other than the case's.

    `returned` is the output's format, or a format for each tensor in `CASTS` that came back. What
    backward reads is the O that was returned, unless the claim says otherwise.
    """
    formats = {"out": returned} if isinstance(returned, Format) else returned
    changed = dict(claim or {})
    for tensor, fmt in formats.items():
        if fmt == case.format:
            continue
        value = "exact" if fmt.contains(FORMATS["float32"]) else fmt.name
        if tensor == "out" and recipe_of(changed).sites["delta_o"] == "working":
            changed["delta_o"] = value
        changed[CASTS[tensor]] = value
    return changed
