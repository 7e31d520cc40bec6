"""Which rounding sites contribute to a tensor of a training step.

out depends on the sites of forward; a gradient on those of its own sum, and on those of both passes
that lead to P, dP, delta and dS as far as it is made of them. Where several roundings follow one
another on the same number, the next takes over when one is left out: they are one site here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numdev.formats import FORMATS, Format
from numdev.kernels.emulation.predict import recipe_of
from numdev.kernels.emulation.recipe import BACKWARD, FORWARD, Recipe

SCORES = ("scores", "scaled", "softcap", "bias")
DS = ("ds_softmax", "ds_softcap", "ds_scaled", "ds")


def rounding_sites(
    claim: Mapping[str, Any], fmt: Format, tensor: str = "out", group: int = 1
) -> dict[str, tuple[str, ...]]:
    """The sites on the way to a tensor at which an emulation of inputs in `fmt` rounds to less than
    fp32, each with those that are made exact with it: where successive roundings are of one number,
    the next takes over when one is left out."""
    made = recipe_of(claim)
    rounded = [site for site in _leading_to(tensor, made, group) if _narrow(made, site, fmt)]
    found: dict[str, tuple[str, ...]] = {}
    for site in rounded:
        name, together = _one_rounding(site, tensor, made, fmt, group)
        found[name] = together
    return found


def _leading_to(tensor: str, made: Recipe, group: int) -> list[str]:
    """The sites a tensor depends on, in the order of the pass."""
    unused = {
        "q_scaled": made.scale_in != "q",
        "scaled": made.scale_in == "q",
        "state": made.loop_order != "kv",
        "merge": made.splits in (None, 1),
    }
    forward = [site for site in FORWARD if not unused.get(site)]
    if tensor == "out":
        return [site for site in forward if site != "lse"]
    from_o = tensor != "dv" and made.delta_from == "dO*O"
    only_o = () if from_o else ("pv", "accumulator", "normalised", "state", "merge")
    skipped = {
        "out": True,  # backward has O from before its cast, and a cast of its own: delta_o
        "lse": made.p_from != "lse",
        "p": not from_o and made.l_from != "rounded",
        "delta_o": not from_o,
        "ds_scaled": made.ds_scale != "before",
        **dict.fromkeys(only_o, True),
        "dq_partial": made.splits in (None, 1),
        **dict.fromkeys(("dk_partial", "dv_partial"), not _apart("dk", made, group)),
    }
    own = ends_of(tensor)
    others = {site for name in ("dq", "dk", "dv") if name != tensor for site in ends_of(name)}
    if tensor == "dv":
        others |= set(BACKWARD[BACKWARD.index("dp") : BACKWARD.index("ds") + 1])
    else:
        others.add("p_for_dv")
    backward = [site for site in BACKWARD if site in own or site not in others]
    return [site for site in (*forward, *backward) if not skipped.get(site)]


def ends_of(gradient: str) -> tuple[str, ...]:
    """The sites of a gradient's sum, from a tile's product to the cast."""
    return (f"{gradient}_product", gradient, f"{gradient}_partial", f"{gradient}_out")


def _apart(gradient: str, made: Recipe, group: int) -> bool:
    """Whether a gradient is a sum of several, each rounded: of splits of the keys, of parts of the
    queries, of a group's heads."""
    if gradient == "dq":
        return made.splits not in (None, 1)
    grouped = group > 1 and made.group_sum == "separate"
    return grouped or made.q_splits not in (None, 1)


def _narrow(made: Recipe, site: str, fmt: Format) -> bool:
    """Whether a recipe rounds to less than fp32 there."""
    to = made.format_at(site, fmt)
    return to is not None and not to.contains(FORMATS["float32"])


def _one_rounding(
    site: str, tensor: str, made: Recipe, fmt: Format, group: int
) -> tuple[str, tuple[str, ...]]:
    """The name under which a site is shared out, and the sites that round the same number."""
    if tensor == "out":
        return ("scores", SCORES) if site in SCORES else (site, (site,))
    if site in (*SCORES, "s"):
        return "scores", (*SCORES, "s")
    if site in DS:
        return "ds", DS
    ends = ends_of(tensor)
    if site in ends and _narrow(made, tensor, fmt):
        # A running sum in the format of its cast is cast already; a sum of several is another
        # number, and without several nothing is partial.
        apart = _apart(tensor, made, group)
        together = ends[:-1] if apart else (*ends[:2], ends[-1])
        return (tensor, together) if site in together else (site, (site,))
    return site, (site,)
