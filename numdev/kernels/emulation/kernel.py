"""Attention with a format at every rounding site: what a kernel's choices cost, made
explicit.

`emulated` is the kernel: its options are a recipe (`numdev.kernels.emulation.recipe`,
docs/sites.md), computed by `forward` and `backward` beside it.

It is also what a kernel's errors should be: a kernel's claim is a set of these options,
and the emulation's distance from the reference is then the kernel's, head by head and on
any inputs, but for what fp32 arithmetic errs (`unpredictable`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from numdev.cases import AttentionCase
from numdev.formats import FORMATS, Format
from numdev.kernels import Output, kernel, no_claim
from numdev.kernels.emulation import backward
from numdev.kernels.emulation.forward import attend
from numdev.kernels.emulation.recipe import FIELDS, SITES, Recipe, recipe
from numdev.kernels.emulation.rounding import Rounder

OPTIONS: Mapping[str, object] = {"preset": "fa2", **dict.fromkeys((*FIELDS, *SITES))}
"""The kernel's options: a preset, fields of `Recipe` and sites. None: as the preset
says."""


def gradients(case: AttentionCase, **options: Any) -> Output:
    """Runs both passes of a training step under the options of `emulated` and returns
    out, lse, dq, dk and dv, each in a dtype that holds its site's format. Raises
    UsageError for an unknown name or value; Refused without grad_out, or where the case's
    format cannot do what the recipe asks."""
    rounding_model = recipe(**options)
    O, L, *dQKV = backward.gradients(case, rounding_model)
    r = Rounder(rounding_model, case)
    sites = zip(("out", *backward.CASTS), (O, *dQKV), strict=True)
    out, dq, dk, dv = (r.stored(site, x, case.q.dtype) for site, x in sites)
    lse, ran = r.stored("lse", L, torch.float32), _ran(r)
    return Output(out=out, lse=lse, dq=dq, dk=dk, dv=dv, ran=ran, ran_backward=ran)


@kernel(
    "emulated",
    options=OPTIONS,
    any_format=True,
    any_rows=True,
    validate=lambda options: recipe(**options),
    claims=no_claim,
    backward=gradients,
    training=lambda case, generator=None, **options: backward.attended(
        case, recipe(**options), generator
    ),
    draws=lambda options: recipe(**options).draws,
)
def emulated(case: AttentionCase, **options: Any) -> Output:
    """Attention with a format at every rounding site, as a preset or site by site.

    A site's value is `working`, `wide`, `exact` or a format's name. `out` comes in the
    case's dtype if that holds its site's format (`exact`: in that of `compute`), `lse` in
    float32 or wider. Rows that see no key are 0, with lse -inf or the sink. NaN and
    infinity propagate as the arithmetic has it; a format without infinity overflows to
    NaN. Raises UsageError for an unknown name, Refused where the case's format cannot do
    what the recipe asks."""
    rounding_model = recipe(**options)
    O, L = attend(case, rounding_model)
    r = Rounder(rounding_model, case)
    out, lse = r.stored("out", O, case.q.dtype), r.stored("lse", L, torch.float32)
    return Output(out=out, lse=lse, ran=_ran(r))


def _ran(r: Rounder) -> str:
    """Returns what ran in words: the preset and each field of the recipe that is not
    None, with the tiles that it chose: `fa2: algorithm=fa2 block_q=128 ...`."""
    options = {name: getattr(r.recipe, name) for name in FIELDS}
    options |= zip(("block_q", "block_kv"), r.tile, strict=True)
    words = (f"{name}={value}" for name, value in options.items() if value is not None)
    return f"{r.recipe.preset}: {' '.join(words)}"


# --- what a claim predicts ------------------------------------------------------------


SITE_OF: Mapping[str, str] = {
    "out": "out",
    "dq": "dq_out",
    "dk": "dk_out",
    "dv": "dv_out",
}
"""The site at which each tensor is rounded to the format in which it is returned."""
MOST_BITS = 12
"""The significant bits of the widest working format whose rounding outweighs fp32
arithmetic."""


def recipe_of(claim: Mapping[str, object], **overrides: Any) -> Recipe:
    """Returns the recipe that a claim describes, in fp32 arithmetic. `overrides`: fields
    or sites to replace. Raises UsageError for an unknown name or value."""
    return recipe(**{**claim, **overrides, "compute": "float32"})


def emulation(case: AttentionCase, claim: Mapping[str, object]) -> Tensor:
    """Returns the output that the claim predicts, [B, H, q_len, v_dim], float32. Raises
    UsageError for an unknown name or value in the claim, Refused where the case's format
    cannot do what it asks."""
    return attend(case, recipe_of(claim), at_once=True)[0]


def emulated_step(case: AttentionCase, claim: Mapping[str, object]) -> dict[str, Tensor]:
    """Returns what the claim predicts of a training step, float32: `out`, `dq`, `dk` and
    `dv`, each in the shape of `Output`. Raises UsageError for an unknown name or value in
    the claim, Refused without grad_out or where the case's format cannot do what the
    claim asks."""
    out, _, dq, dk, dv = backward.gradients(case, recipe_of(claim), at_once=True)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def unpredictable(
    claim: Mapping[str, object] | None,
    working: Format,
    returned: Format,
    *,
    of_size: bool = False,
) -> str | None:
    """Returns why an emulation does not predict the errors of an output element by
    element, as a clause; None where it does. A claim of None is never predicted. An
    emulation leaves out fp32 arithmetic, which must be small beside rounding. So the
    `working` format has at most MOST_BITS significant bits, and float32 contains it.
    Where the format `returned` has more bits than that, the recipe must round at a site
    before the results are cast.

    `of_size`: returns why not even the size of an error is predicted. In float32 it is
    bounded, by the emulation together with what fp32 arithmetic may err
    (`Yardstick.arithmetic`). Raises UsageError for an unknown name or value in a claim,
    where no other reason comes first."""
    if of_size and claim is not None and working == returned == FORMATS["float32"]:
        return None
    if claim is None:
        return "no emulation predicts this kernel"
    if working.precision > MOST_BITS or not FORMATS["float32"].contains(working):
        return f"an emulation leaves out arithmetic, which is not small in {working.name}"
    rounding_model, casts = recipe_of(claim), SITE_OF.values()
    formats = (rounding_model.format_at(x, working) for x in SITES if x not in casts)
    if returned.precision > MOST_BITS and all(
        fmt is None or fmt.contains(FORMATS["float32"]) for fmt in formats
    ):
        return f"it rounds nowhere, and {returned.name} shows its arithmetic"
    return None


def returning(
    claim: Mapping[str, object] | None,
    case: AttentionCase,
    returned: Format | Mapping[str, Format],
) -> Mapping[str, object]:
    """Returns a copy of the claim (None: the defaults), changed for a kernel that
    returned other formats than the case's. `returned`: the format of the output, or of
    each tensor by its name in `SITE_OF` (else KeyError). Where O came back in another
    format, backward is assumed to read it so, unless the claim says otherwise. Raises
    UsageError then for an unknown name or value in the claim."""
    formats = {"out": returned} if isinstance(returned, Format) else returned
    changed = dict(claim or {})
    for tensor, fmt in formats.items():
        if fmt == case.format:
            continue
        value = "exact" if fmt.contains(FORMATS["float32"]) else fmt.name
        if tensor == "out" and recipe_of(changed).sites["delta_o"] == "working":
            changed["delta_o"] = value
        changed[SITE_OF[tensor]] = value
    return changed
