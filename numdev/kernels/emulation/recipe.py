"""Rounding sites and presets, as data: where `emulated` rounds, to what, and in which
algorithm.

A *site* is a step of attention at which a real kernel rounds. A *recipe* gives every site
a value and fixes what else decides the numbers: the algorithm, the tiles, their order. A
*preset* is a recipe with a name: a piece of code, or an assumption somebody published
numbers under.

The value of a site is `working` (the format of the case), `wide` (float32, or the working
format where that is wider: a kernel for fp64 inputs does not round its sums down to
fp32), `exact` (not rounded beyond the arithmetic itself), or the name of a format.
docs/sites.md is written from here.

References: FlashAttention, arXiv 2205.14135 (`fa1`, Algorithm 1); FlashAttention-2, arXiv
2307.08691 (`fa2`, Algorithm 1); P1 = Golden et al., arXiv 2405.02803; P2 = Qiu & Yao,
arXiv 2510.04212, with their published code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from numdev.errors import UsageError, closest
from numdev.formats import FORMATS, Format, RoundingMode, format_named

WORKING, WIDE, EXACT = "working", "wide", "exact"
STABILISED: Mapping[str, float] = {"beta": 2.0, "tie_tolerance": 1e-3}
"""Options of the stabilised softmax as the authors' later runs have them."""


class Site(NamedTuple):
    """A step at which a kernel rounds."""

    presets: str  # its value in `fa2`, `eager` and `qiu2025`: w working, f wide
    rounds: str  # what is rounded there, in the papers' letters
    may_hide: bool = False
    """Whether it must be able to hold -inf: a hidden score, or the maximum of a row
    without keys. A format without infinity cannot stand there."""


# In the order of the pass. A row of steps that round alike in all code we know is one
# site.
#
# What presets stand for: docs/sites.md. q_scaled, k_scaled, state and ds_scaled are used
# only if an option asks for them: tensors like q, k and the output, and a step in
# registers.
_SCORES = {
    "q_scaled": Site("www", "scale · Q, or scale log₂e · Q, where Q has the scale"),
    "scores": Site("fww", "S = Q Kᵀ, the finished sum"),
    "scaled": Site("fww", "scale · S"),
    "softcap": Site("fww", "S / cap, its tanh, and cap times that: each of the three"),
    "bias": Site("fww", "S + additive mask", may_hide=True),
}
_SOFTMAX = {
    "max": Site("ffw", "row maximum of a tile, and so the running m", may_hide=True),
    "exponent": Site("ffw", "S − m, and m_old − m", may_hide=True),
    "exp": Site("fff", "exp(S − m)"),
    "p": Site("www", "P as it is multiplied with V"),
    "tile_sum": Site("fff", "sum of a row of P within a tile"),
    "rescale": Site("fff", "exp(m_old − m), and its product with l"),
    "row_sum": Site("ffw", "running l, after a tile is added"),
}
_OUTPUT = {
    "pv": Site("ffw", "P V of one tile, the finished sum"),
    "accumulator": Site("ffw", "running O, after it is rescaled and after P V is added"),
    "normalised": Site("ffw", "O / l (in `plain`, P / l)"),
    "state": Site("www", "O as stored after a tile, where kv is the outer loop"),
    "merge": Site("fww", "O of one split of the keys as stored, and the merged O"),
    "lse": Site("fff", "m + log l, as returned", may_hide=True),
    "out": Site("www", "O as returned"),
}
_RECOMPUTED = {  # in backward, from what forward saved
    "k_scaled": Site("www", "scale log₂e · K, where K has the scale in backward"),
    "s": Site("fww", "S as recomputed, through the forward's own sites", may_hide=True),
    "lse_read": Site("fff", "L as backward reads it (or m and l)", may_hide=True),
    "p_backward": Site(
        "fff",
        "S − L and its exp, P (or S − m, its exp, and P = exp / l): each",
        may_hide=True,
    ),
}
_DV = {
    "p_for_dv": Site("www", "P as it is multiplied with dO"),
    "dv_product": Site("ffw", "Pᵀ dO of one tile, the finished sum"),
    "dv": Site("ffw", "running dV, after a tile is added"),
}
_DS = {
    "dp": Site("fww", "dP = dO Vᵀ, the finished sum"),
    "delta_o": Site("www", "O as it is multiplied with dO, from before its cast"),
    "delta_product": Site("ffw", "dO ∘ O, or dP ∘ P"),
    "delta": Site("fff", "δ, the finished sum of a row (with dP ∘ P, after every tile)"),
    "dp_minus_delta": Site("fff", "dP − δ"),
    "p_for_ds": Site("fff", "P as it is multiplied with dP − δ"),
    "ds_softmax": Site("fwf", "dS = P ∘ (dP − δ)"),
    "ds_softcap": Site("fwf", "cap · dS, its product with 1 − tanh², and / cap: each"),
    "ds_scaled": Site("fwf", "scale · dS, where it is scaled before the products"),
    "ds": Site("www", "dS as it is multiplied with K and Q"),
}
_PRODUCTS = {  # dQ, dK, and all three as they are summed and returned
    "dq_product": Site("ffw", "(scale ·) dS K of one tile, the finished sum"),
    "dq": Site("ffw", "running dQ, after a tile is added"),
    "dq_partial": Site(
        "fww", "dQ from a split of the keys, before the splits' are summed"
    ),
    "dk_product": Site("ffw", "(scale ·) dSᵀ Q of one tile, the finished sum"),
    "dk": Site("ffw", "running dK, after a tile is added"),
    "dk_partial": Site(
        "www", "dK of a query head or a part of the queries, before a sum"
    ),
    "dv_partial": Site(
        "www", "dV of a query head or a part of the queries, before a sum"
    ),
    "dq_out": Site("www", "dQ as returned"),
    "dk_out": Site("www", "dK as returned"),
    "dv_out": Site("www", "dV as returned"),
}
FORWARD = (*_SCORES, *_SOFTMAX, *_OUTPUT)
BACKWARD = (*_RECOMPUTED, *_DV, *_DS, *_PRODUCTS)
SITES: Mapping[str, Site] = {
    **_SCORES, **_SOFTMAX, **_OUTPUT, **_RECOMPUTED, **_DV, **_DS, **_PRODUCTS,
}  # fmt: skip


def _fa1_tile(head_dim: int, memory: int) -> tuple[int, int]:
    """Returns (block_q, block_kv) by Algorithm 1, line 1: q, k, v and o of a tile share
    `memory` elements on the chip."""
    columns = -(-memory // (4 * head_dim))
    return min(columns, head_dim), columns


TILINGS: Mapping[str, tuple[str, Callable[[int, int], tuple[int, int | None]]]] = {
    "fa1": ("min(⌈M/4d⌉, d) × ⌈M/4d⌉", _fa1_tile),
    "fa2": (
        "128 × 128 for d ≤ 64, else 128 × 64",
        lambda d, memory: (128, 128 if d <= 64 else 64),
    ),
    "fa4": ("128 × 128", lambda d, memory: (128, 128)),
    "qiu2025": ("512 × 512", lambda d, memory: (512, 512)),
    "whole": ("all keys at once", lambda d, memory: (1, None)),
}
"""Rules for (block_q, block_kv), None for all keys: in words, and from (head_dim,
memory)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the numbers of an emulation. Build one with `recipe`. What
    choices compute, and whose they are: docs/sites.md."""

    preset: str
    sites: Mapping[str, str]  # every site and its value
    # O / l at the end, tile by tile, or P / l
    algorithm: Literal["fa2", "fa1", "plain"] = "fa2"
    tiling: str = "fa2"
    block_q: int | None = None  # None, here and below: as the tiling says
    block_kv: int | None = None
    memory: int = 4096
    """M of the tiling `fa1`, in elements. With 4096 (16 keys a tile at head_dim 64) the
    tenfold max error of P1, which does not say what it used, appears at length 4096."""
    loop_order: Literal["q", "kv"] = "q"  # the outer loop
    # In which a row meets its tiles
    kv_order: Literal["ascending", "descending"] = "ascending"
    splits: int | None = None  # parts of whole tiles, merged by their L; None: one
    # Backward: parts with a dK and dV of their own; None: one
    q_splits: int | None = None
    # The P that l sums, before or after `p`
    l_from: Literal["unrounded", "rounded"] = "unrounded"
    max_lag: int | None = (
        None  # growth, in log2, at which m does not move yet; None: it always does
    )
    # What is multiplied by the scale
    scale_in: Literal["scores", "q", "q_log2"] = "scores"
    scale_again: Literal["same", "scores", "k_log2"] = "same"  # and in backward
    # Exact in backward
    exponential: Literal[
        "exact", "fexp_u20", "fexp_u20x8", "fexp_u20x16", "cubic", "fa4"
    ] = "exact"
    softmax: Literal["plain", "stabilised", "guarded"] = "plain"
    # Of the stabilised softmax, as the next; None with the plain one
    beta: float | None = None
    tie_tolerance: float | None = None
    # Backward: P is exp(S − L), or exp(S − m) / l
    p_from: Literal["lse", "m_and_l"] = "lse"
    delta_from: Literal["dO*O", "dP*P"] = "dO*O"  # backward: what δ is a row's sum of
    # Backward: of the error of δ; `random` is a sham
    delta_sign: Literal["own", "random"] = "own"
    # Backward: whether dS has it, or its products
    ds_scale: Literal["before", "after"] = "after"
    # Backward: over heads of one kv head
    group_sum: Literal["separate", "running"] = "separate"
    rounding: RoundingMode = "nearest"
    seed: int = 0  # of what is drawn, which is stochastic rounding and random signs
    compute: Literal["float64", "float32"] = "float64"

    @property
    def draws(self) -> bool:
        """Whether anything in the emulation is random: stochastic rounding, or the random
        sign of delta's error."""
        return self.rounding == "stochastic" or self.delta_sign == "random"

    def tile(self, head_dim: int, kv_len: int) -> tuple[int, int]:
        """Returns (block_q, block_kv) for a case, the numbers of rows and keys of a tile,
        block_kv at most kv_len. A size that the recipe sets comes before the tiling's."""
        rows, columns = TILINGS[self.tiling][1](head_dim, self.memory)
        return self.block_q or rows, min(self.block_kv or columns or kv_len, kv_len)

    def format_at(self, site: str, working: Format) -> Format | None:
        """Returns the format that a site is rounded to where the case's format is
        `working`; None where nothing is rounded. `wide` is float32, or `working` where
        that is wider. Raises KeyError for another name than a site's."""
        value = self.sites[site]
        if value == EXACT:
            return None
        if value == WIDE:
            return working if working.contains(FORMATS["float32"]) else FORMATS["float32"]
        return working if value == WORKING else format_named(value)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    n: get_args(kind)
    for n, kind in get_type_hints(Recipe).items()
    if get_origin(kind) is Literal
}
FIELDS = tuple(
    n for n in get_type_hints(Recipe) if n not in ("preset", "sites", "tiling")
)
"""What may be changed in a recipe, beside its sites."""


def _column(place: int) -> dict[str, str]:
    """Returns every site's value, `working` or `wide`, in one preset of the table;
    `place`: 0 is `fa2`, 1 `eager`, 2 `qiu2025`."""
    return {
        name: WORKING if x.presets[place] == "w" else WIDE for name, x in SITES.items()
    }


FA2 = Recipe(preset="fa2", sites=_column(0))
FA2_CONSISTENT = Recipe(preset="fa2-consistent", sites=_column(0), l_from="rounded")
FA4 = Recipe(
    preset="fa4",
    sites={**_column(0), "dk_partial": WIDE, "dv_partial": WIDE},
    tiling="fa4",
    kv_order="descending",
    max_lag=8,
    exponential="fa4",
)
EAGER = Recipe(
    preset="eager",
    sites=_column(1),
    algorithm="plain",
    tiling="whole",
    p_from="m_and_l",
    delta_from="dP*P",
    ds_scale="before",
)
GOLDEN2024 = Recipe(
    preset="golden2024",
    sites=dict.fromkeys(SITES, WORKING),
    algorithm="fa1",
    loop_order="kv",
    tiling="fa1",
    p_from="m_and_l",
)
QIU2025 = Recipe(preset="qiu2025", sites=_column(2), tiling="qiu2025", ds_scale="before")
UNROUNDED = Recipe(preset="exact", sites=dict.fromkeys(SITES, EXACT))
_ALL = (FA2, FA2_CONSISTENT, FA4, EAGER, GOLDEN2024, QIU2025, UNROUNDED)
PRESETS: Mapping[str, Recipe] = {preset.preset: preset for preset in _ALL}


def recipe(preset: str = "fa2", **options: Any) -> Recipe:
    """Returns the preset with some of its parts replaced; a value of None leaves the
    preset's.

    `preset`: a key of PRESETS. `options`: fields of FIELDS and sites by name, or sites
    together as `sites`. With `memory` the tiles follow FlashAttention-1's rule. Raises
    UsageError for an unknown preset, option, format or choice, for a number that a field
    cannot have, and for parts that contradict one another."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", hint=closest(str(preset), PRESETS))
    return changed(PRESETS[preset], **options)


def changed(
    start: Recipe, *, sites: Mapping[str, str | None] | None = None, **options: Any
) -> Recipe:
    """Returns the recipe with some of its parts replaced: those in FIELDS by name, and
    sites by name or together as `sites` (the one by name wins); a value of None leaves
    what `start` has. `tiling` is no option: `algorithm: plain` sets it to all keys at
    once, `memory` to FlashAttention-1's. `softmax` sets `beta` and `tie_tolerance` to its
    defaults, if they are not options too. Raises UsageError for an unknown option, format
    or choice, for a number that a field cannot have, and for parts that contradict one
    another."""
    parts = {k: v for k, v in {**(sites or {}), **options}.items() if v is not None}
    for name, value in parts.items():
        _check(name, value)
    values = {name: parts.pop(name) for name in SITES if name in parts}
    if parts.get("algorithm") == "plain":
        parts["tiling"] = "whole"
    if "memory" in parts:
        parts["tiling"] = "fa1"
    if "softmax" in parts:
        of_it = STABILISED if parts["softmax"] == "stabilised" else {}
        parts = {**dict.fromkeys(STABILISED), **of_it, **parts}
    result = dataclasses.replace(start, **parts, sites={**start.sites, **values})
    check_stabilised(vars(result))
    for why, contradicts in _contradictions(result, parts).items():
        if contradicts:
            raise UsageError(why, hint="leave out one of them")
    return result


def _contradictions(result: Recipe, parts: Mapping[str, object]) -> dict[str, bool]:
    """Returns, by a description of options that exclude each other, whether the recipe
    `result` has them. `parts`: the options that were asked for, by name."""
    plain, width = result.algorithm == "plain", result.block_kv is not None
    cut = width or result.tiling != "whole" or result.splits is not None
    early = result.softmax == "guarded" or result.l_from == "rounded"
    no_error = result.delta_sign == "random" and result.delta_from == "dP*P"
    lags = bool(result.max_lag) and result.algorithm != "fa2"
    return {
        (
            "delta_sign with delta_from dP*P: delta has no error whose sign could be "
            "random"
        ): no_error,
        "max_lag with an algorithm other than fa2": lags,
        "block_kv, memory or splits with algorithm plain, which has a single tile": (
            plain and cut
        ),
        (
            "softmax guarded or l_from rounded with algorithm plain, which divides P by "
            "l before P is rounded and meets V"
        ): plain and early,
        "memory and block_kv both set the tile": "memory" in parts and width,
    }


def _check(name: str, value: object) -> None:
    """Raises UsageError for a name that is no site or field of a recipe, and for a value
    that this site or field cannot have, whatever the others have. `beta` and
    `tie_tolerance` are left to `check_stabilised`."""
    if name in SITES:
        try:
            fmt = None if value in (WORKING, WIDE, EXACT) else format_named(str(value))
        except UsageError as error:
            hint = closest(str(value), [WORKING, WIDE, EXACT, *FORMATS])
            raise UsageError(
                f"rounding site {name}: {error.message}", hint=hint
            ) from error
        if fmt and SITES[name].may_hide and not fmt.has_infinity:
            raise UsageError(
                f"rounding site {name} must hold -inf, which {fmt.name} does not have"
            )
    elif name not in FIELDS:
        raise UsageError(
            f"a recipe has no {name!r}", hint=closest(name, [*FIELDS, *SITES])
        )
    elif name in _CHOICES:
        if value not in _CHOICES[name]:
            raise UsageError(
                f"{name} is {value!r}", hint=closest(str(value), _CHOICES[name])
            )
    elif name not in STABILISED:
        positive = "" if name == "seed" else "positive "
        if type(value) is not int or (positive and value < 1):
            raise UsageError(
                f"{name} is {value!r}", hint=f"expected a {positive}whole number"
            )


def check_stabilised(options: Mapping[str, Any]) -> None:
    """Raises UsageError where `beta` is no finite number of at least 1, `tie_tolerance`
    none of at least 0, or one of the two is set while `softmax` is not `stabilised`. None
    is allowed. `options` must have these three keys."""
    for name, least in (("beta", 1.0), ("tie_tolerance", 0.0)):
        value = options[name]
        if value is None:
            continue
        if options["softmax"] != "stabilised":
            raise UsageError(
                f"{name} is of the stabilised softmax", hint="softmax: stabilised"
            )
        if type(value) not in (int, float) or not least <= value < math.inf:
            raise UsageError(
                f"{name}: expected a finite number, at least {least}, got {value!r}"
            )
