"""Rounding sites and presets, as data: where `emulated` rounds, to what, and in which algorithm.

A *site* is a step of attention at which a real kernel rounds. A *recipe* gives every site a value
and fixes what else decides the numbers: the algorithm, the tiles, the order in which they come, the
probabilities that are summed. A *preset* is a recipe with a name, and stands for a piece of code or
for an assumption somebody published numbers under.

The value of a site is `working` (the format of the case), `exact` (not rounded beyond the
arithmetic itself), or the name of a format, any that `formats.format_named` knows.

Nothing here computes attention; that is `emulated`, which reads as the algorithm with these names
at each step. docs/sites.md is written from this file.

References: FlashAttention, arXiv 2205.14135 (`fa1`, Algorithm 1); FlashAttention-2, arXiv
2307.08691 (`fa2`, Algorithm 1); P1 = Golden et al., arXiv 2405.02803; P2 = Qiu & Yao, arXiv
2510.04212, with their published code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from numdev.errors import UsageError, closest
from numdev.formats import FORMATS, Format, RoundingMode, format_named

DeltaFrom = Literal["dO*O", "dP*P"]
WORKING, WIDE, EXACT = "working", "wide", "exact"
# wide: float32, or the working format where that is wider (a kernel for fp64 inputs does not round
# its sums down to fp32).
STABILISED: Mapping[str, float] = {"beta": 2.0, "tie_tolerance": 1e-3}
"""Options of the stabilised softmax as the authors' later runs have them."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A step at which a kernel rounds, and what is rounded there, in the papers' letters."""

    name: str
    rounds: str
    may_hide: bool = False
    """Whether it must be able to hold -inf: a hidden score, or the maximum of a row without keys.
    A format without infinity cannot stand there."""


# In the order of the pass. A row of steps that round alike in all code we know is one site.
_FORWARD = {
    "q_scaled": "scale · Q, where the scale is folded into Q",
    "scores": "S = Q Kᵀ, the finished sum",
    "scaled": "scale · S",
    "softcap": "S / cap, its tanh, and cap times that: each of the three",
    "bias": "S + additive mask",
    "max": "row maximum of a tile, and so the running m",
    "exponent": "S − m, and m_old − m",
    "exp": "exp(S − m)",
    "p": "P as it is multiplied with V",
    "tile_sum": "sum of a row of P within a tile",
    "rescale": "exp(m_old − m), and its product with l",
    "row_sum": "running l, after a tile is added",
    "pv": "P V of one tile, the finished sum",
    "accumulator": "running O, after it is rescaled and after P V is added",
    "normalised": "O / l (in `plain`, P / l)",
    "state": "O as stored after a tile, where kv is the outer loop",
    "merge": "O of one split of the keys as stored, and the merged O",
    "lse": "m + log l, as returned",
    "out": "O as returned",
}
_BACKWARD = {
    "s": "S as recomputed, through the forward's own sites",
    "lse_read": "L as backward reads it (or m and l)",
    "p_backward": "S − L and its exp, P (or S − m, its exp, and P = exp / l): each",
    "p_for_dv": "P as it is multiplied with dO",
    "dv_product": "Pᵀ dO of one tile, the finished sum",
    "dv": "running dV, after a tile is added",
    "dp": "dP = dO Vᵀ, the finished sum",
    "delta_o": "O as it is multiplied with dO, from before its cast",
    "delta_product": "dO ∘ O, or dP ∘ P",
    "delta": "δ, the finished sum of a row (with dP ∘ P, after every tile)",
    "dp_minus_delta": "dP − δ",
    "p_for_ds": "P as it is multiplied with dP − δ",
    "ds_softmax": "dS = P ∘ (dP − δ)",
    "ds_softcap": "cap · dS, its product with 1 − tanh², and / cap: each",
    "ds_scaled": "scale · dS, where it is scaled before the products",
    "ds": "dS as it is multiplied with K and Q",
    "dq_product": "(scale ·) dS K of one tile, the finished sum",
    "dq": "running dQ, after a tile is added",
    "dq_partial": "dQ from a split of the keys, before the splits' are summed",
    "dk_product": "(scale ·) dSᵀ Q of one tile, the finished sum",
    "dk": "running dK, after a tile is added",
    "dk_partial": "dK of a query head or a part of the queries, before a sum",
    "dv_partial": "dV of a query head or a part of the queries, before a sum",
    "dq_out": "dQ as returned",
    "dk_out": "dK as returned",
    "dv_out": "dV as returned",
}
_HIDING = ("bias", "max", "exponent", "lse", "s", "lse_read", "p_backward")
FORWARD, BACKWARD = tuple(_FORWARD), tuple(_BACKWARD)
SITES: Mapping[str, Site] = {
    name: Site(name=name, rounds=rounds, may_hide=name in _HIDING)
    for name, rounds in {**_FORWARD, **_BACKWARD}.items()
}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A rule for the tile's size: (head_dim, memory) to (block_q, block_kv), None for all keys."""

    text: str
    rule: Callable[[int, int], tuple[int, int | None]]


def _fa1_tile(head_dim: int, memory: int) -> tuple[int, int]:
    """Algorithm 1, line 1: q, k, v and o of a tile share the on-chip memory."""
    columns = -(-memory // (4 * head_dim))
    return min(columns, head_dim), columns


TILINGS: Mapping[str, Tiling] = {
    "fa1": Tiling(text="min(⌈M/4d⌉, d) × ⌈M/4d⌉", rule=_fa1_tile),
    "fa2": Tiling(
        text="128 × 128 for d ≤ 64, else 128 × 64",
        rule=lambda head_dim, memory: (128, 128 if head_dim <= 64 else 64),
    ),
    "qiu2025": Tiling(text="512 × 512", rule=lambda head_dim, memory: (512, 512)),
    "whole": Tiling(text="all keys at once", rule=lambda head_dim, memory: (1, None)),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the numbers of an emulation. Build one with `recipe`."""

    preset: str
    sites: Mapping[str, str]
    """Every site and its value."""
    algorithm: Literal["fa2", "fa1", "plain"] = "fa2"
    """`fa2` normalises at the end. `fa1` takes each tile's own maximum, and its output is
    normalised after every tile. `plain` normalises P before it meets V; it has a single tile."""
    l_from: Literal["unrounded", "rounded"] = "unrounded"
    """Whether l sums P as exp gave it, or as it is multiplied with V."""
    scale_in: Literal["scores", "q"] = "scores"
    """Whether the scores are multiplied by the scale, or Q is beforehand."""
    loop_order: Literal["q", "kv"] = "q"
    """The outer loop. With `kv` O is stored after every tile (site `state`); m and l are two
    numbers a row and are kept as `max` and `row_sum` left them."""
    kv_order: Literal["ascending", "descending"] = "ascending"
    """The order in which a row meets its tiles. FlashAttention-2's CUDA code begins with the last
    one, PyTorch's CPU kernel with the first."""
    splits: int | None = None
    """Into how many parts of whole tiles the keys are divided, each with an O and L of its own, as
    decoding kernels do to fill the GPU; they are merged by their L. None: one."""
    q_splits: int | None = None
    """Backward: into how many parts the queries are divided, as ring attention does: each has a dK
    and dV of its own (`dk_partial`, `dv_partial`), and these are summed. None: one."""
    exponential: Literal["exact", "fexp_u20"] = "exact"
    """How forward computes exp(S − m); exp in backward is exact. `fexp_u20` is what PyTorch's CPU
    kernel uses with AVX2 and AVX-512: relative error up to 1e-4, and exp(0) = 1 − 5.3e-5."""
    softmax: Literal["plain", "stabilised", "guarded"] = "plain"
    """By what a row of a tile is shifted: its maximum, or what the stabilised softmax takes instead
    of one that is met more than once (`forward.stabilised_shift`). `guarded` multiplies
    P with a number of the row's own (`forward.guarded_weights`)."""
    beta: float | None = None
    """Of the stabilised softmax, as the next; None with the plain one."""
    tie_tolerance: float | None = None
    p_from: Literal["lse", "m_and_l"] = "lse"
    """Backward: whether P is exp(S − L), or exp(S − m) / l as in forward: kept by autograd, or
    recomputed as FlashAttention's first version does (`fa1`, Algorithm 4, line 13)."""
    delta_from: DeltaFrom = "dO*O"
    """Backward: whether δ is rowsum(dO ∘ O), or rowsum(dP ∘ P) as autograd's softmax has it."""
    delta_sign: Literal["own", "random"] = "own"
    """Backward: with `random` the error of δ, against rowsum(dP ∘ P) of the same P and dP, has a
    sign drawn for each row: as large as ever, and without bias. A sham, to hold cures against."""
    ds_scale: Literal["before", "after"] = "after"
    """Backward: whether dS is multiplied by the scale before it is rounded for the products with K
    and Q, or the products are, tile by tile."""
    group_sum: Literal["separate", "running"] = "separate"
    """Backward: whether each query head of a group has its own dK and dV, which are summed at the
    end, or the running sums go on from one query head to the next."""
    tiling: str = "fa2"
    memory: int = 4096
    """M, on-chip memory in elements, for the tiling `fa1`. P1 does not say what it used; with 4096
    (16 keys a tile at head_dim 64) its tenfold max error appears at length 4096."""
    block_q: int | None = None
    """None, here and below: as the tiling says."""
    block_kv: int | None = None
    rounding: RoundingMode = "nearest"
    seed: int = 0
    """Of what is drawn, which is stochastic rounding and random signs."""
    compute: Literal["float64", "float32"] = "float64"

    @property
    def draws(self) -> bool:
        """Whether anything is random."""
        return self.rounding == "stochastic" or self.delta_sign == "random"

    def tile(self, head_dim: int, kv_len: int) -> tuple[int, int]:
        """block_q and block_kv for a case."""
        rows, columns = TILINGS[self.tiling].rule(head_dim, self.memory)
        columns = self.block_kv or columns or kv_len
        return self.block_q or rows, min(columns, kv_len)

    def format_at(self, site: str, working: Format) -> Format | None:
        """The format of a site where the case's is `working`; None where nothing is rounded."""
        value = self.sites[site]
        if value == EXACT:
            return None
        if value == WIDE:
            return working if working.contains(FORMATS["float32"]) else FORMATS["float32"]
        return working if value == WORKING else format_named(value)


def _everywhere(value: str, **others: str) -> dict[str, str]:
    """Every site with one value, but for `others`."""
    return {**dict.fromkeys(SITES, value), **others}


# q_scaled, state and ds_scaled are used only if scale_in, loop_order and ds_scale ask for them:
# then the first two are tensors like q and the output, the last a step in registers.
_FA2_SITES = _everywhere(
    WIDE,
    q_scaled=WORKING,
    p=WORKING,
    state=WORKING,
    out=WORKING,
    # Operands of matrix units, what is read from memory, what is written there: FlashAttention-2
    # writes dK and dV of every query head in the working format and sums the group afterwards.
    p_for_dv=WORKING,
    delta_o=WORKING,
    ds=WORKING,
    dk_partial=WORKING,
    dv_partial=WORKING,
    dq_out=WORKING,
    dk_out=WORKING,
    dv_out=WORKING,
)
# What autograd keeps of softmax is P in fp32. What flows back is in the format of what it belongs
# to: dP and dS are rounded, dS again wherever S was on its way. A sum over all rows is one product.
_EAGER_SITES = _everywhere(
    WORKING,
    **dict.fromkeys(
        ("max", "exponent", "exp", "tile_sum", "rescale", "row_sum", "pv", "accumulator"), WIDE
    ),
    **dict.fromkeys(("normalised", "lse", "lse_read", "p_backward"), WIDE),
    **dict.fromkeys(("delta_product", "delta", "dp_minus_delta", "p_for_ds"), WIDE),
    **dict.fromkeys(("dv_product", "dv", "dq_product", "dq", "dk_product", "dk"), WIDE),
)
# Under autocast, matrix products are in the working format and sums in fp32. L and what meets it
# (exp, dP − δ, dS) is in fp32 by promotion, and gradients are added up in tensors like q, k and v.
_QIU2025_SITES = _everywhere(
    WORKING,
    **dict.fromkeys(("exp", "tile_sum", "rescale", "lse"), WIDE),
    **dict.fromkeys(("lse_read", "p_backward", "delta", "dp_minus_delta"), WIDE),
    **dict.fromkeys(("p_for_ds", "ds_softmax", "ds_softcap", "ds_scaled"), WIDE),
)

PRESETS: Mapping[str, Recipe] = {
    made.preset: made
    for made in (
        Recipe(preset="fa2", sites=_FA2_SITES),
        Recipe(preset="fa2-consistent", sites=_FA2_SITES, l_from="rounded"),
        Recipe(
            preset="eager",
            sites=_EAGER_SITES,
            algorithm="plain",
            tiling="whole",
            p_from="m_and_l",
            delta_from="dP*P",
            ds_scale="before",
        ),
        Recipe(
            preset="golden2024",
            sites=_everywhere(WORKING),
            algorithm="fa1",
            loop_order="kv",
            tiling="fa1",
            p_from="m_and_l",
        ),
        Recipe(preset="qiu2025", sites=_QIU2025_SITES, tiling="qiu2025", ds_scale="before"),
        Recipe(preset="exact", sites=_everywhere(EXACT)),
    )
}

ABOUT: Mapping[str, str] = {
    "fa2": "A production kernel: everything in fp32, but P in the working format and one cast at "
    "the end. Backward: P and dS in the working format for their products, δ from the cast O, "
    "accumulators in fp32, and each query head's dK and dV cast before a group is summed.",
    "fa2-consistent": "The same with l from the rounded P, so that the weights sum to 1.",
    "eager": "Model code without tiles: S rounded, scaled and rounded again, softmax in fp32, P "
    "rounded, P V summed in fp32 and cast. Backward is autograd's: dP rounded, softmax's backward "
    "in fp32 from the P it kept, dS rounded, scaled and rounded again.",
    "golden2024": "Golden et al.: FlashAttention-1 with every step in the working format. They "
    "measured no gradients; backward is FlashAttention-1's Algorithm 4 under the same assumption.",
    "qiu2025": "Qiu & Yao's PyTorch code under autocast: products in the working format, exp and "
    "sums in fp32, and m, l, O kept in the working format between tiles. Backward the same, under "
    "autocast too: dP, dO ∘ O and the tiles' gradients are in the working format, and so is what "
    "they are added up in.",
    "exact": "No rounding at any site: attention in fp64, in tiles.",
}
"""What each preset stands for."""


def recipe(
    preset: str = "fa2", *, sites: Mapping[str, str | None] | None = None, **overrides: Any
) -> Recipe:
    """The preset with some of its parts replaced; a value of None leaves the preset's.

    `sites` gives sites other values, `overrides` are fields of `Recipe`. With `memory` the tiles
    follow FlashAttention-1's rule in every preset. Raises UsageError, naming the closest, for an
    unknown preset, site, format, field or choice, and for parts that contradict one another.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", hint=closest(str(preset), PRESETS))
    return changed(PRESETS[preset], sites=sites, **overrides)


def changed(
    start: Recipe, *, sites: Mapping[str, str | None] | None = None, **overrides: Any
) -> Recipe:
    """The recipe with some of its parts replaced; arguments and errors are those of `recipe`."""
    changes = {name: value for name, value in overrides.items() if value is not None}
    given = {name: value for name, value in (sites or {}).items() if value is not None}
    _check_fields(changes)
    _check_sites(given)
    if changes.get("algorithm") == "plain":
        changes["tiling"] = "whole"
    if "memory" in changes:
        changes["tiling"] = "fa1"
    if "softmax" in changes:
        of_it = STABILISED if changes["softmax"] == "stabilised" else {}
        changes = {**dict.fromkeys(STABILISED), **of_it, **changes}
    made = dataclasses.replace(start, **changes, sites={**start.sites, **given})
    _check_together(made, changes)
    return made


_CHOICES: Mapping[str, tuple[str, ...]] = {
    name: get_args(kind)
    for name, kind in get_type_hints(Recipe).items()
    if get_origin(kind) is Literal
}
_POSITIVE = ("block_q", "block_kv", "memory", "splits", "q_splits")
_FIELDS = (*_CHOICES, *_POSITIVE, *STABILISED, "seed")


def _check_fields(changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if name not in _FIELDS:
            raise UsageError(f"a recipe has no {name!r}", hint=closest(name, _FIELDS))
        if name in STABILISED:
            continue
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise UsageError(f"{name} is {value!r}", hint=closest(str(value), _CHOICES[name]))
        elif not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name} is {value!r}", hint="expected a whole number")
        elif name in _POSITIVE and value < 1:
            raise UsageError(f"{name} is {value}", hint="expected a positive number")


def _check_sites(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in SITES:
            raise UsageError(f"unknown rounding site {name!r}", hint=closest(name, SITES))
        if value in (WORKING, WIDE, EXACT):
            continue
        try:
            fmt = format_named(str(value))
        except UsageError as error:
            hint = closest(str(value), [WORKING, WIDE, EXACT, *FORMATS])
            raise UsageError(f"rounding site {name}: {error.message}", hint=hint) from error
        if SITES[name].may_hide and not fmt.has_infinity:
            raise UsageError(
                f"rounding site {name} must hold -inf, which {fmt.name} does not have",
                hint="give it a format with infinity",
            )


def check_stabilised(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a beta or a tie tolerance that is no such number, or is given beside
    another `softmax`. None is none given."""
    for name, least in (("beta", 1.0), ("tie_tolerance", 0.0)):
        value = options[name]
        if value is None:
            continue
        if options["softmax"] != "stabilised":
            raise UsageError(f"{name} is of the stabilised softmax", hint="softmax: stabilised")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and least <= value < math.inf):
            raise UsageError(f"{name} is {value!r}", hint=f"expected a number from {least} on")


def _check_together(made: Recipe, changes: Iterable[str]) -> None:
    """Refuse what would otherwise be ignored."""
    check_stabilised(vars(made))
    plain = made.algorithm == "plain"
    ignored = (
        (
            made.delta_sign == "random" and made.delta_from == "dP*P",
            "delta from dP*P has no error whose sign could be drawn",
            "leave out delta_sign, or take delta_from dO*O",
        ),
        (
            plain and (made.block_kv is not None or made.tiling != "whole"),
            f"preset {made.preset} with algorithm plain has a single tile of all keys",
            "leave out block_kv and memory, or take another algorithm",
        ),
        (
            plain and made.splits is not None,
            "algorithm plain has a single tile of all keys, which cannot be split",
            "leave out splits, or take another algorithm",
        ),
        (
            plain and made.softmax == "guarded",
            "algorithm plain divides P by l before P meets V: a guarded row would be as plain",
            "take another algorithm, or softmax plain",
        ),
        (
            plain and made.l_from == "rounded",
            "algorithm plain divides P by l before P is rounded, so l_from is unrounded",
            "leave out l_from, or take another algorithm",
        ),
        (
            "memory" in changes and made.block_kv is not None,
            "memory and block_kv both set the tile",
            "give one of them",
        ),
    )
    for wrong, message, hint in ignored:
        if wrong:
            raise UsageError(message, hint=hint)
