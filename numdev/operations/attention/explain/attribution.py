"""Which roundings explain a kernel's errors.

The *residual* |o - emulation| / |o - r| is 0 where the emulation makes the kernel's every
error and about 1.4 where it makes others of the same size. An emulation explains a kernel
when the residual is at most one half and clearly below that of every other preset; else
the answer is "unknown"."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.formats import FORMATS, Format
from numdev.kernels.emulation.kernel import SITE_OF, recipe_of
from numdev.kernels.emulation.recipe import BACKWARD, FORWARD, SITES, Recipe
from numdev.report import SiteShare

Claim = Mapping[str, object]
Emulate = Callable[[Claim], Tensor]  # the tensor in question, as an emulation has it

EXPLAINS = 0.5  # the largest residual of an explanation
CLEARLY = 0.8  # and it is at most this share of the next preset's
ENOUGH = 0.1  # with a residual below this no further variant of the preset is tried
PRESETS: Mapping[str, Claim] = {
    **{name: {"preset": name}
       for name in ("fa2", "fa2-consistent", "eager", "golden2024", "qiu2025")},
    "one cast": {"preset": "exact", **dict.fromkeys(SITE_OF.values(), "working")},
}  # fmt: skip
# Keys, tried with presets that have tiles
TILES = (16, 32, 64, 96, 128, 176, 256, 512, 1024)
ROWS = (32, 64, 128, 256, 512)  # tried where dk or dv is rounded after every tile of rows
SUMS: tuple[Claim, ...] = tuple(  # gradients that are summed in the working format
    {**dict.fromkeys(("dq", "dk", "dv"), "working"), "group_sum": group}
    for group in ("separate", "running")
)
# A group's gradients are summed before they are cast.
WHOLE: Claim = dict.fromkeys(("dk_partial", "dv_partial"), "exact")
# Other ways to have delta than from the O that is returned.
DELTAS: tuple[Claim, ...] = ({"delta_o": "exact"}, {"delta_from": "dP*P"})
FORWARD_VARIED = ("block_kv", "kv_order", "splits", "exponential", "rounding")
VARIED = (*FORWARD_VARIED, "block_q", *SUMS[0], *WHOLE, "delta_o", "delta_from")
SUMMED = ("fa2", "fa2-consistent")
TILED = (*SUMMED, "golden2024", "qiu2025")
WHOLLY: tuple[Claim, ...] = ({"exponential": "fexp_u20"}, {"rounding": "toward_zero"})


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How one set of roundings (`claim`, options of `emulated`, a variant of `preset`)
    fits a kernel."""

    preset: str
    claim: Claim
    residual: float
    ratio: float  # the kernel's error over the emulation's


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The best explanation and the next best. `why_not`: in words, why `best` does not
    explain the kernel, and `sites` is empty then; None: it does. `sites`: the share that
    each rounding site has, the largest first."""

    best: Fit
    next: Fit
    sites: tuple[SiteShare, ...] = ()
    why_not: str | None = None


def attribute(
    output: Tensor,
    exact: Tensor,
    scale: Tensor,
    fmt: Format,
    claim: Claim | None,
    emulate: Emulate,
    *,
    tensor: str = "out",
    group: int = 1,
) -> Attribution | None:
    """Returns which roundings explain the error of `output` [B, H, rows, d] against
    `exact`, or which come nearest and why they do not. Rows count in which both are
    finite and `scale` is at least the smallest normal number of `fmt`; None where the
    error of these is 0 or infinite. `scale` [B, H, rows]: norms of the rows' terms;
    `fmt`: the working format; `claim`: options of `emulated`, tried in place of the
    preset of PRESETS that they name (`fa2` without a name), or None; `emulate`: returns
    the tensor for such options; `tensor`: out, dq, dk or dv; `group`: query heads to a kv
    head. Raises UsageError for a claim with unknown names or values, and what `emulate`
    raises."""
    weight = row_weights(output, exact, scale, fmt)
    error = weighed(output.double() - exact, weight)
    size = float(error.norm())
    if size == 0 or not math.isfinite(size):
        return None

    def errors(tried: Claim) -> Tensor:
        """Returns the weighed errors of an emulation."""
        return weighed(emulate(tried).double() - exact, weight)

    def fit(name: str, tried: Claim) -> Fit:
        """Returns how options of a preset fit the kernel."""
        predicted = errors(tried)
        norm = float(predicted.norm())
        residual = float((error - predicted).norm()) / size
        ratio = size / norm if norm else math.inf
        return Fit(preset=name, claim=tried, residual=residual, ratio=ratio)

    best, other = _best_fits(claim, fit, tensor, group)[:2]
    why_not = None
    if best.residual > EXPLAINS:
        why_not = "no known way of rounding makes these errors"
    elif best.residual > CLEARLY * other.residual:
        why_not = (
            f"`{best.preset}` and `{other.preset}` fit these data equally well "
            "(residuals "
            f"{best.residual:.2f} and {other.residual:.2f})"
        )
    if why_not:
        return Attribution(best=best, next=other, why_not=why_not)
    base, shares = errors(best.claim), []
    for site, together in rounding_sites(best.claim, fmt, tensor, group).items():
        left = errors({**best.claim, **dict.fromkeys(together, "exact")})
        share = 1 - float(left.square().sum() / base.square().sum())
        residual = float((error - left).norm()) / size
        rounds = SITES[site].rounds
        shares.append(SiteShare(site=site, rounds=rounds, share=share, residual=residual))
    return Attribution(
        best=best, next=other, sites=tuple(sorted(shares, key=lambda s: -s.share))
    )


def row_weights(output: Tensor, exact: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    """Returns a weight for each row, [B, H, rows, 1]: 1 / scale, and 0 where the scale is
    below the format's smallest normal (one error there outweighs all others) or an
    element of `output` or `exact` is not finite. `scale` is [B, H, rows], the other
    tensors [B, H, rows, d]."""
    finite = output.double().isfinite().all(-1) & exact.isfinite().all(-1)
    usable = (scale >= fmt.smallest_normal) & finite
    return torch.where(usable, 1 / torch.where(usable, scale, 1.0), 0.0)[..., None]


def weighed(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x [B, H, rows, d] times the rows' weights [B, H, rows, 1], and 0 where the
    weight is 0, also for NaN and infinity."""
    return torch.where(weight > 0, x * weight, 0.0)


# --- what is tried --------------------------------------------------------------------


def _best_fits(
    claim: Claim | None, fit: Callable[[str, Claim], Fit], tensor: str, group: int
) -> list[Fit]:
    """Returns the best variant of each of PRESETS, the smallest residual first. Where no
    preset fits as it is (a residual of at most ENOUGH), gradient sums, tiles, orders,
    exponentials and rounding modes are tried. Then other presets with tiles are tried
    with the options of the one that fits best. `fit` computes the Fit of options under a
    preset's name; `claim` (or None) replaces the preset it names."""
    start = dict(PRESETS)  # a preset as it is, or as the kernel claims to be it
    for name, base in PRESETS.items():
        if claim is not None and claim.get("preset", "fa2") == base["preset"]:
            start[name] = {**base, **claim}
    best = {name: fit(name, start[name]) for name in PRESETS}

    residual = operator.attrgetter("residual")

    def better(name: str, tried: Claim) -> None:
        if best[name].residual > ENOUGH and dict(tried) != dict(best[name].claim):
            best[name] = min(best[name], fit(name, tried), key=residual)

    first = min(best.values(), key=residual)
    if first.residual > ENOUGH:
        for name in SUMMED:
            for variant in _sum_variants(start[name], tensor, group):
                better(name, variant)
        for name in TILED:
            for variant in _tile_variants(best[name].claim, tensor):
                better(name, variant)
        for name in PRESETS:
            # With its own tiles too: under another exp no tile fitted well
            for change in WHOLLY:
                better(name, {**start[name], **change})
                better(name, {**best[name].claim, **change})
        first = min(best.values(), key=residual)
    same = {k: v for k, v in first.claim.items() if k in VARIED}
    for name in TILED:
        better(name, {**best[name].claim, **same})
    return sorted(best.values(), key=residual)


def _sum_variants(claim: Claim, tensor: str, group: int) -> Iterator[Claim]:
    """Yields variants of a claim with other sums of the gradient and other sources of
    delta, with the tiles that matter then; nothing for the output. Sums over a group of
    heads vary for dk and dv alone, where `group` is above 1; sources of delta for dq and
    dk alone. Raises UsageError for a claim with unknown names or values."""
    if tensor == "out":
        return
    grouped = tensor != "dq" and group > 1
    for change in SUMS if grouped else SUMS[:1]:
        yield {**claim, **change}
        yield from _tile_variants({**claim, **change}, tensor)
    if grouped:
        yield {**claim, **WHOLE}
    for change in DELTAS if tensor != "dv" else ():
        yield {**claim, **change}


def _tile_variants(claim: Claim, tensor: str) -> Iterator[Claim]:
    """Yields variants of a claim with other tiles: for dq and the output tiles of keys in
    both orders, for dk and dv tiles of queries. For a gradient it yields nothing unless a
    tile's product or the running sum is rounded to the working format. Raises UsageError
    for a claim with unknown names or values."""
    recipe = recipe_of(claim)
    if tensor != "out" and all(
        recipe.sites[s] != "working" for s in _sum_sites(tensor)[:2]
    ):
        return
    if tensor in ("dk", "dv"):
        for rows in ROWS:
            yield {**claim, "block_q": rows}
        return
    untiled = {
        k: v
        for k, v in claim.items()
        if k not in ("memory", "block_kv", "kv_order", "splits")
    }
    for order in ("ascending", "descending"):
        for tile in TILES:
            yield {**untiled, "block_kv": tile, "kv_order": order}


# --- the sites of a tensor ------------------------------------------------------------

SCORES = ("scores", "scaled", "softcap", "bias")
DS = ("ds_softmax", "ds_softcap", "ds_scaled", "ds")


def rounding_sites(
    claim: Claim, fmt: Format, tensor: str = "out", group: int = 1
) -> dict[str, tuple[str, ...]]:
    """Returns the sites on the way to a tensor (out, dq, dk or dv) at which an emulation
    of inputs in `fmt` rounds to less than fp32. By name: `scores`, `ds`, the gradient's
    name for its sum, else the site's own; each with the sites that are made exact
    together with it, since they round one number in succession. Raises UsageError for a
    claim with unknown names or values."""
    recipe = recipe_of(claim)

    def narrow(site: str) -> bool:
        to = recipe.format_at(site, fmt)
        return to is not None and not to.contains(FORMATS["float32"])

    sites: dict[str, tuple[str, ...]] = {}
    for site in filter(narrow, _sites_before(tensor, recipe, group)):
        name, ends = site, _sum_sites(tensor)
        together: tuple[str, ...] = (site,)
        if tensor == "out":
            name, together = ("scores", SCORES) if site in SCORES else (name, together)
        elif site in (*SCORES, "s"):
            name, together = "scores", (*SCORES, "s")
        elif site in DS:
            name, together = "ds", DS
        elif site in ends and narrow(tensor):
            # A running sum in the format of its cast is cast already; a sum of several is
            # another number, and without several nothing is partial.
            ends = (
                ends[:-1]
                if _is_sum_of_parts(tensor, recipe, group)
                else (*ends[:2], ends[-1])
            )
            name, together = (tensor, ends) if site in ends else (name, together)
        sites[name] = together
    return sites


def _sites_before(tensor: str, recipe: Recipe, group: int) -> list[str]:
    """Returns the sites, those of both passes, that a tensor (out, dq, dk or dv) depends
    on under a recipe, in the order of the pass, its own cast among them. Whether they
    round is not looked at; what only some calls have (a soft cap, a mask, sinks) counts.
    `group`: query heads per kv head."""
    skipped = {
        "q_scaled": recipe.scale_in == "scores",
        "k_scaled": recipe.scale_again != "k_log2",
        "scaled": recipe.scale_in == "q",
        "state": recipe.loop_order != "kv",
        "merge": recipe.splits in (None, 1),
    }
    if tensor == "out":
        return [site for site in FORWARD if site != "lse" and not skipped.get(site)]
    from_o = tensor != "dv" and recipe.delta_from == "dO*O"
    only_o = () if from_o else ("pv", "accumulator", "normalised", "state", "merge")
    skipped |= {
        # Backward has O from before its cast, and a cast of its own: delta_o
        "out": True,
        "lse": recipe.p_from != "lse",
        "p": not from_o and recipe.l_from != "rounded",
        "delta_o": not from_o,
        "ds_scaled": recipe.ds_scale != "before",
        **dict.fromkeys(only_o, True),
        "dq_partial": recipe.splits in (None, 1),
        **dict.fromkeys(
            ("dk_partial", "dv_partial"), not _is_sum_of_parts("dk", recipe, group)
        ),
    }
    other_gradients = [name for name in ("dq", "dk", "dv") if name != tensor]
    others = {site for name in other_gradients for site in _sum_sites(name)}
    of_ds = BACKWARD[BACKWARD.index("dp") : BACKWARD.index("ds") + 1]
    others |= set(of_ds) if tensor == "dv" else {"p_for_dv"}
    sites = (*FORWARD, *(site for site in BACKWARD if site not in others))
    return [site for site in sites if not skipped.get(site)]


def _sum_sites(gradient: str) -> tuple[str, ...]:
    """Returns the four sites of a gradient's sum, in order: a tile's product, the running
    sum, a partial sum, the cast (`dq_product`, `dq`, `dq_partial`, `dq_out`)."""
    return (f"{gradient}_product", gradient, f"{gradient}_partial", f"{gradient}_out")


def _is_sum_of_parts(gradient: str, recipe: Recipe, group: int) -> bool:
    """Whether a gradient is a sum of several sums, each rounded: of splits of the keys
    (dq), of parts of the queries or of a group's heads (dk, dv)."""
    if gradient == "dq":
        return recipe.splits not in (None, 1)
    grouped = group > 1 and recipe.group_sum == "separate"
    return grouped or recipe.q_splits not in (None, 1)
