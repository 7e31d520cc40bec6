"""Which roundings explain a kernel's errors, all its calls together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from numdev.grouping import grouped
from numdev.report import AttributionRow, Explanation, SiteShare

# PyTorch's own choice, which is one of the others: not said twice
DEFAULT = "sdpa-default"
SMALL = 0.005  # a site's share of the squared error that is not worth naming


def explanations(rows: Sequence[AttributionRow]) -> tuple[Explanation, ...]:
    """Returns one explanation for each kernel, options, format and tensor, in the order
    of the rows, from all its calls. That of `sdpa-default` is left out where another
    kernel has the same, to the last number."""
    groups = grouped(rows, lambda r: (r.kernel, str(r.options), r.format, r.tensor))
    every = [_explain_tensor(of_tensor) for of_tensor in groups.values()]
    others = [each for each in every if each.kernel != DEFAULT]

    def is_repeated(each: Explanation) -> bool:
        """Whether another kernel has the explanation of `sdpa-default`."""
        same = {"kernel": each.kernel, "options": each.options}
        return each in [other.model_copy(update=same) for other in others]

    return tuple(x for x in every if x.kernel != DEFAULT or not is_repeated(x))


def _explain_tensor(rows: Sequence[AttributionRow]) -> Explanation:
    """Returns the explanation of one tensor of a kernel in one format, from the rows of
    all its calls (at least one). It is identified where at least half of the rows that
    were compared are explained, and at least one. Else it has the rounding model that
    most of the other rows come nearest to. Where no row was compared it has only the
    first reason. Numbers are medians over the rows that share the model."""
    first, compared = rows[0], [row for row in rows if row.residual is not None]
    explained = [row for row in compared if row.explained_by]
    is_known = bool(explained) and 2 * len(explained) >= len(compared)
    alike = [row for row in compared if bool(row.explained_by) == is_known]
    name = next(
        (name for name, _ in Counter(map(_nearest_in_words, alike)).most_common(1)), None
    )
    same = [
        row for row in alike if _nearest_in_words(row) == name
    ]  # what most of them have
    sites = tuple(_median_sites(same)) if is_known else ()
    residual, following = (
        _median_of_field(same, name) for name in ("residual", "next_residual")
    )
    reason = None if compared else next((row.reason for row in rows if row.reason), None)
    return Explanation(
        kernel=first.kernel,
        options=first.options,
        format=first.format,
        tensor=first.tensor,
        is_identified=is_known,
        nearest=name,
        residual=residual if same else None,
        next_preset=same[0].next_preset if same else None,
        next_residual=following if same else None,
        explained=len(explained),
        calls=len(compared),
        reason=reason,
        sites=sites,
    )


def _median_of_field(rows: Sequence[AttributionRow], field: str) -> float:
    """Returns the median of a field over rows, in which None counts as 0; 0 without
    rows."""
    return median([float(getattr(row, field) or 0.0) for row in rows] or [0.0])


def _median_sites(rows: Sequence[AttributionRow]) -> list[SiteShare]:
    """Returns for each site the medians of its share and residual over the rows that have
    it, the largest share first. A site whose median share is below SMALL is left out."""
    shares = []
    for of_calls in grouped(
        (s for row in rows for s in row.sites), lambda s: s.site
    ).values():
        new = {n: median(getattr(s, n) for s in of_calls) for n in ("share", "residual")}
        shares += [of_calls[-1].model_copy(update=new)] * (new["share"] >= SMALL)
    return sorted(shares, key=lambda s: -s.share)


def _nearest_in_words(row: AttributionRow) -> str:
    """Returns the nearest preset in words, with options that the row's recipe has, if
    any: `` `fa2` with 64 keys a tile``, or `` `fa2` `` alone. Of the sums of gradients
    those of the row's tensor alone are named."""
    recipe, tensor = row.recipe, row.tensor
    details: list[str] = []
    if tensor != "out" and recipe.get(tensor) == "working":
        details.append(f"{tensor} summed in the working format")
        if tensor != "dq":
            details += (
                [f"{recipe['block_q']} rows a tile"] if recipe.get("block_q") else []
            )
            details += (
                ["accumulated across a group"]
                if recipe.get("group_sum") == "running"
                else []
            )
    elif recipe.get(f"{tensor}_partial") == "exact":
        details.append(f"{tensor} summed over the group before rounding")
    if tensor in ("dq", "dk") and "delta_from" in recipe:
        details.append("delta computed as rowsum(dP ∘ P)")
    elif tensor in ("dq", "dk") and recipe.get("delta_o") == "exact":
        details.append("delta computed from the unrounded O")
    if recipe.get("block_kv"):
        order = " in descending order" if recipe.get("kv_order") == "descending" else ""
        details.append(f"{recipe['block_kv']} keys a tile{order}")
    if (recipe.get("splits") or 1) > 1:
        details.append(f"{recipe['splits']} splits of the keys")
    if recipe.get("exponential", "exact") != "exact":
        details.append(f"exponential {recipe['exponential']}")
    if recipe.get("rounding", "nearest") != "nearest":
        details.append("rounding toward zero")
    variant = f" with {', '.join(details)}" if details else ""
    return f"`{row.nearest}`{variant}"
