"""What a variant of `numdev train` rounds, read from its options.

Two kernels have their roundings as options, `emulated` and `triton-flash`. Of real code two are
read as the preset that they are (`numdev.kernels.emulation.recipe`): sdpa-flash as fa2, the
baseline as eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numdev.audit.records import recorded
from numdev.formats import Format, format_named
from numdev.kernels import find
from numdev.kernels.emulation.recipe import SITES, Recipe, recipe
from numdev.training.report import VariantRecord

COLUMNS = {"S": ("scores", "scaled"), "O": ("pv", "accumulator"), "dP": ("dp",)}
"""Of the tables, and the rounding sites that each shows."""
WITH_THEM = ("p",)
"""A site of `emulated` that goes with the column O without being shown: P as it meets V."""
IN_TRITON = {"S": "scores", "O": "accumulator", "dP": "dp"}
"""The options of triton-flash that the columns show."""
REAL = {"sdpa-flash": "fa2", "baseline": "eager"}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Sites:
    """What a kernel rounds. O is the running or finished P V, not the cast at the end, which all
    kernels make."""

    S: str
    O: str  # noqa: E741
    dP: str
    delta: str
    """dO*O from the O of that column, dO*cast O from an O that was cast, or dP*P."""
    kernel: str
    rest: str
    """Everything else that decides its numbers."""


def sites_of(record: VariantRecord) -> Sites | None:
    """Of the kernel that a variant's output is from; None where it is not known."""
    return _sites(record.kernel, record.options, record.attention_format)


def sites_behind(record: VariantRecord) -> Sites | None:
    """Of the kernel that its gradients are from, where that is another one, and is known."""
    other = record.differs.get("backward_kernel")
    return _sites(other["name"], other["options"], record.attention_format) if other else None


def _sites(kernel: str, options: Mapping[str, Any], attention: str) -> Sites | None:
    working = format_named(attention)
    if kernel == "emulated":
        return _of_emulated(options, working)
    if kernel == "triton-flash":
        return _of_triton(options, working)
    if kernel in REAL:
        made = recipe(REAL[kernel])
        return dataclasses.replace(_of_recipe(made, working), kernel=kernel, rest=attention)
    return None


def _of_emulated(options: Mapping[str, Any], working: Format) -> Sites:
    named = {k: v for k, v in options.items() if k in SITES}
    fields = {k: v for k, v in options.items() if k not in SITES and k != "preset"}
    return _of_recipe(recipe(options.get("preset", "fa2"), sites=named, **fields), working)


def _of_recipe(made: Recipe, working: Format) -> Sites:
    columns = {name: _coarsest(made, sites, working) for name, sites in COLUMNS.items()}
    read = made.format_at("delta_o", working)
    own = [made.format_at(site, working) for site in COLUMNS["O"]]
    bits = min((fmt.precision for fmt in own if fmt is not None), default=53)
    return Sites(
        **columns,
        delta=_delta(made.delta_from, cast=read is not None and read.precision < bits),
        kernel="emulated",
        rest=_rest(made, working),
    )


def _delta(formula: str, *, cast: bool) -> str:
    return "dO*cast O" if formula == "dO*O" and cast else formula


def _coarsest(made: Recipe, sites: Sequence[str], working: Format) -> str:
    """The format with the fewest bits at any of the sites."""
    found = [fmt for site in sites if (fmt := made.format_at(site, working)) is not None]
    if not found:
        return "fp32" if made.compute == "float32" else "fp64"
    name = min(found, key=lambda fmt: fmt.precision).name
    return SHORT.get(name, name)


def _rest(made: Recipe, working: Format) -> str:
    """A recipe without its preset's name and without what the columns say."""
    told = {*WITH_THEM, "delta_o", *(site for sites in COLUMNS.values() for site in sites)}
    formats = {s: made.format_at(s, working) for s in made.sites if s not in told}
    named = {site: None if fmt is None else fmt.name for site, fmt in formats.items()}
    fields = dataclasses.asdict(made) | {"sites": named, "preset": "", "delta_from": ""}
    return repr(sorted(fields.items(), key=lambda item: item[0]))


def _of_triton(options: Mapping[str, Any], working: Format) -> Sites:
    force = recorded(find("triton-flash").with_options(options))
    low = SHORT.get(working.name, working.name)
    columns = {c: low if force[name] == "working" else "fp32" for c, name in IN_TRITON.items()}
    rounded, read = force["accumulator"] == "working", force["delta_o"] == "working"
    told = {*IN_TRITON.values(), "delta_from", "delta_o"}
    rest = {name: value for name, value in force.items() if name not in told}
    if rounded and not read:  # else delta_o is in the column delta
        rest["delta_o"] = force["delta_o"]
    return Sites(
        **columns,
        delta=_delta(force["delta_from"], cast=read and not rounded),
        kernel="triton-flash",
        rest=repr(sorted(rest.items())),
    )
