"""Which roundings explain a kernel's errors, in sentences: of one call, and of all together.

Pure functions of report rows; what is compared, and when it is an explanation, is decided in
`numdev.explain.attribution`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from numdev.report import AttributionRow, Explanation, SiteShare

DEFAULT = "sdpa-default"
"""PyTorch's own choice, which is one of the others: not said twice."""
SMALL = 0.005
"""A site's share of the squared error that is not worth naming."""


def sentence(row: AttributionRow) -> str:
    """What was found in one call."""
    return _sentence([row])


def explanations(rows: Sequence[AttributionRow]) -> tuple[Explanation, ...]:
    """One for each kernel, format and tensor, in the order of the rows: its calls together. That of
    PyTorch's own choice is left out where another kernel has the same."""
    groups: dict[str, list[AttributionRow]] = {}
    for row in rows:
        groups.setdefault(f"{row.kernel} {row.options} {row.format} {row.tensor}", []).append(row)
    found: list[Explanation] = []
    others: list[str] = []
    for group in groups.values():
        made, name = _explanation(group), group[0].kernel
        of_anybody = made.sentence.replace(f"{name} ", "", 1)
        if name != DEFAULT or of_anybody not in others:
            found.append(made)
        others.append(of_anybody)
    return tuple(found)


def _explanation(rows: Sequence[AttributionRow]) -> Explanation:
    compared = [row for row in rows if row.residual is not None]
    explained = [row for row in compared if row.explained_by]
    known = bool(explained) and 2 * len(explained) >= len(compared)
    same = _most(explained if known else [r for r in compared if not r.explained_by] or compared)
    return Explanation(
        kernel=rows[0].kernel,
        options=rows[0].options,
        format=rows[0].format,
        tensor=rows[0].tensor,
        known=known,
        nearest=_name(same[0]) if same else None,
        residual=_median(same, "residual") if same else None,
        next_preset=same[0].next_preset if same else None,
        next_residual=_median(same, "next_residual") if same else None,
        explained=len(explained),
        calls=len(compared),
        reason=None if compared else next((r.reason for r in rows if r.reason), None),
        sites=tuple(_sites(same)) if known else (),
        sentence=_sentence(rows),
    )


def _sentence(rows: Sequence[AttributionRow]) -> str:
    first = rows[0]
    kernel = f"{first.kernel} ({first.format})"
    if first.tensor != "out":
        kernel = f"{first.tensor} of {kernel}"
    compared = [row for row in rows if row.residual is not None]
    if not compared:
        why = next((row.reason for row in rows if row.reason), None)
        return f"{kernel}: unknown; {why}." if why else f"{kernel} makes no error."
    explained = [row for row in compared if row.explained_by]
    calls = f" in {len(explained)} of {len(compared)} calls" if len(compared) > 1 else ""
    if 2 * len(explained) < len(compared):
        why = Counter(row.reason for row in compared if row.reason).most_common(1)[0][0]
        near = _most([row for row in compared if not row.explained_by])
        others = f" ({len(explained)} of {len(compared)} calls are explained)" if calls else ""
        return (
            f"{kernel}: unknown{others}; {why}. Nearest is {_name(near[0])}: residual "
            f"{_median(near, 'residual'):.2f}, {_median(near, 'size'):.2f} x its size."
        )
    same = _most(explained)
    return (
        f"{kernel} makes the errors of {_name(same[0])}{calls}: residual "
        f"{_median(same, 'residual'):.2f}, next `{same[0].next_preset}` "
        f"{_median(same, 'next_residual'):.2f}. {_shares(same)}"
    )


def _most(rows: Sequence[AttributionRow]) -> list[AttributionRow]:
    """The rows of the explanation that most of them have."""
    if not rows:
        return []
    common = Counter(_name(row) for row in rows).most_common(1)[0][0]
    return [row for row in rows if _name(row) == common]


def _shares(rows: Sequence[AttributionRow]) -> str:
    parts = [f"{100 * s.share:.0f} % from `{s.site}` ({s.rounds})" for s in _sites(rows)]
    return f"The squared error comes {', '.join(parts)}." if parts else "It rounds nowhere."


def _sites(rows: Sequence[AttributionRow]) -> list[SiteShare]:
    """Medians over the calls, the largest share first, those that are too small left out."""
    named = {s.site: s.rounds for row in rows for s in row.sites}
    found = []
    for site, rounds in named.items():
        here = [s for row in rows for s in row.sites if s.site == site]
        share = median(s.share for s in here)
        if share >= SMALL:
            left = median(s.residual for s in here)
            found.append(SiteShare(site=site, rounds=rounds, share=share, residual=left))
    return sorted(found, key=lambda s: -s.share)


def _name(row: AttributionRow) -> str:
    return f"`{row.nearest}`{_variant(row.recipe, row.tensor)}"


def _variant(recipe: Mapping[str, Any], tensor: str) -> str:
    """What a recipe says beside its preset, in words, as far as it bears on the tensor."""
    said = []
    if tensor != "out" and recipe.get(tensor) == "working":
        said.append(f"{tensor} summed in the working format")
        if tensor != "dq":
            said += [f"{recipe['block_q']} rows a tile"] if recipe.get("block_q") else []
            said += ["on through a group"] if recipe.get("group_sum") == "running" else []
    elif recipe.get(f"{tensor}_partial") == "exact":
        said.append(f"{tensor} of a group summed before its cast")
    if tensor in ("dq", "dk") and "delta_from" in recipe:
        said.append("delta from dP ∘ P")
    elif tensor in ("dq", "dk") and recipe.get("delta_o") == "exact":
        said.append("delta from O before its cast")
    if recipe.get("block_kv"):
        order = ", the last first" if recipe.get("kv_order") == "descending" else ""
        said.append(f"{recipe['block_kv']} keys a tile{order}")
    if (recipe.get("splits") or 1) > 1:
        said.append(f"{recipe['splits']} splits of the keys")
    if recipe.get("exponential", "exact") != "exact":
        said.append(f"exp {recipe['exponential']}")
    if recipe.get("rounding", "nearest") != "nearest":
        said.append("rounding toward zero")
    return f" with {', '.join(said)}" if said else ""


def _median(rows: Sequence[AttributionRow], field: str) -> float:
    return median(float(getattr(row, field) or 0.0) for row in rows)
