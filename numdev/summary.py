"""From rows to what a reader wants first: the kernels ranked, the map of the worst one.

Pure functions of report rows. Medians and worst heads are shown rather than pooled errors, because
one head with large values would rule a pooled one. The sentences are made in `numdev.answer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from numdev.answer import answer
from numdev.explaining.words import explanations
from numdev.gating.rules import (
    BIAS_ALPHA,
    BIAS_FORMATS,
    BIAS_SEQUENCES,
    BIAS_ULP,
    holm,
    noise_ratio,
)
from numdev.profiles.summary import pooled, remark
from numdev.report import (
    AttributionRow,
    AuditSummary,
    DeviationRow,
    GradientSummary,
    HeadMap,
    KernelSummary,
    PartSummary,
    ProfileRow,
    WeightRow,
    WeightSummary,
    WorstRow,
)

KEY = ["kernel", "options", "role", "format"]
PART = ["phase", "step", "attends"]


def summarise(
    rows: Sequence[DeviationRow],
    weights: Sequence[WeightRow] = (),
    attributions: Sequence[AttributionRow] = (),
    worst: Sequence[WorstRow] = (),
    profiles: Sequence[ProfileRow] = (),
) -> AuditSummary:
    """The summary of an audit's rows; raises nothing on rows that are all skipped. Planted faults
    are the gate's business, and left out."""
    rows = [row for row in rows if row.role != "control"]
    table = pd.DataFrame([row.model_dump() for row in rows])
    table["options"] = [repr(sorted(o.items())) for o in table["options"]]
    table["place"] = _places(table)
    groups = table.groupby(KEY, sort=False)
    kernels = [_kernel(rows, group) for _, group in groups]
    ranked = [
        kernel
        for name in dict.fromkeys(row.format for row in rows)
        for kernel in sorted((k for k in kernels if k.format == name), key=_rank)
    ]
    sequences = table["sequences"].dropna()
    along = pooled(profiles)
    return AuditSummary(
        answer=answer(ranked),
        kernels=tuple(ranked),
        map=_map(table, ranked),
        weights=tuple(_weights(weights)),
        sequences=int(sequences.min()) if len(sequences) else None,
        explanations=explanations(attributions),
        worst_rows=tuple(worst),
        parts=tuple(_parts(table, ranked)),
        profiles=along,
        along=remark(along),
    )


def _places(table: pd.DataFrame) -> pd.Series[str]:
    """What to call where a row is: its layer, or the case where there is none.

    Encoder, decoder and cross attention of one model share their layers' numbers, so that there
    the words that tell their modules apart join it; the module's name where that is not enough. In
    a generation the phase is part of the place. In a diffusion pipeline it is what they attend to
    that tells calls apart.
    """
    modules = table.groupby("layer")["module"].transform("nunique")
    told = table["attends"].nunique() > 1
    kinds = [f" {x}" if told and x else "" for x in table["attends"]]
    numbers = [
        f"layer {int(n)}{x}" if pd.notna(n) else ""
        for n, x in zip(table["layer"], kinds, strict=True)
    ]
    roles = {} if told else _roles(table["module"].unique().tolist())
    layer = pd.Series(numbers, index=table.index)
    role = pd.Series(
        [n + roles.get(m, "") for n, m in zip(numbers, table["module"], strict=True)],
        index=table.index,
    )
    one_each = table.groupby([table["layer"], role])["module"].transform("nunique").eq(1).all()
    shared = role if one_each else table["module"]
    place = layer.where(modules.eq(1), shared).where(table["layer"].notna(), table["case"])
    return place.astype(str) + [f" {phase}" if phase else "" for phase in table["phase"]]


def _roles(modules: Sequence[str]) -> dict[str, str]:
    """What tells modules apart beside their numbers: ` decoder EncDecAttention` for
    `decoder.block.0.layer.1.EncDecAttention`, where some are not in a decoder."""
    parts = {module: module.split(".") for module in modules}
    common = set.intersection(*map(set, parts.values()))
    return {
        module: "".join(f" {part}" for part in own if part not in common and not part.isdigit())
        for module, own in parts.items()
    }


def _where(row: Any) -> str:
    step = f" step {int(row['step'])}" if pd.notna(row["step"]) else ""
    return f"{row['place']}{step} head {int(row['head'])}"


def _rank(kernel: KernelSummary) -> tuple[int, bool, float]:
    """The floor first, then by distance from the truth; what is not finite last.

    Distances are compared through the baseline's, which is the same for kernels that return
    another format than the others.
    """
    order = 0 if kernel.role == "floor" else 2 if kernel.role == "precision" else 1
    ratios = (kernel.baseline_ratio, kernel.floor_ratio)
    return (order, kernel.nonfinite > 0, next((r for r in ratios if r is not None), math.inf))


def _kernel(rows: Sequence[DeviationRow], group: pd.DataFrame) -> KernelSummary:
    first = rows[int(group.index.to_numpy()[0])]
    status = group["status"].value_counts()
    reasons = group.loc[group["status"] != "ok", "reason"].dropna().unique()
    ok = group[(group["status"] == "ok") & (group["tensor"] == "out")]
    base: dict[str, Any] = {
        "kernel": first.kernel,
        "options": first.options,
        "role": first.role,
        "format": first.format,
        "ok": len(ok),
        "skipped": int(status.get("skipped", 0)),
        "failed": int(status.get("failed", 0)),
        "reasons": tuple(str(r) for r in reasons),
        "ran": tuple(str(r) for r in group["ran"].dropna().unique()),
        "out_formats": tuple(str(r) for r in ok["out_format"].dropna().unique()),
    }
    if ok.empty:
        return KernelSummary(**base)
    return KernelSummary(
        **base,
        mean_abs=_pooled(ok, "mean_abs"),
        max_abs=_number(ok["max_abs"].astype(float).max()),
        rms=_pooled(ok, "rms", power=2),
        row_rel=_number(ok["row_rel"].astype(float).median()),
        w1=_number(ok["w1"].astype(float).median()),
        nonfinite=int(ok["nonfinite"].sum()),
        **_spread(ok, "floor_ratio", worst=True, where=True),
        **_spread(ok, "baseline_ratio", worst=True),
        **_spread(ok, "expected_ratio", worst=True, where=True),
        **_sampled(ok),
        **_worst_row(ok),
        **_noise(rows, group),
        gradients=tuple(_gradients(group)),
        **_spread(ok, "flash_vs_precision", worst=True, where=True),
        **_spread(ok, "flash_vs_precision_w1"),
        **_bounds(ok),
        fa_rule_heads=None if ok["fa_rule"].isna().all() else int(ok["fa_rule"].eq(True).sum()),
        **_bias(ok),
    )


def _parts(table: pd.DataFrame, ranked: Sequence[KernelSummary]) -> list[PartSummary]:
    """Every kernel's numbers for each phase or step, in the ranking's order; nothing where all
    calls are of one part."""
    measured = (table["status"] == "ok") & (table["tensor"] == "out")
    whole = table[measured & (table["role"] != "precision")]
    if len(whole[PART].drop_duplicates()) < 2:
        return []
    order: dict[Any, int] = {
        (k.kernel, repr(sorted(k.options.items())), k.role, k.format): i
        for i, k in enumerate(ranked)
    }
    groups = whole.groupby([*KEY, *PART], sort=False, dropna=False)
    found = [(order[key[: len(KEY)]], key[len(KEY) :], group) for key, group in groups]
    found.sort(key=lambda item: item[0])
    return [_part(ranked[i], part, group) for i, part, group in found]


def _part(kernel: KernelSummary, part: Sequence[Any], ok: pd.DataFrame) -> PartSummary:
    phase, step, attends = (None if pd.isna(x) else x for x in part)
    return PartSummary(
        kernel=kernel.kernel,
        options=kernel.options,
        role=kernel.role,
        format=kernel.format,
        phase=phase,
        step=None if step is None else int(step),
        attends=attends,
        calls=ok["case"].nunique(),
        ok=len(ok),
        **_spread(ok, "row_rel"),
        **_spread(ok, "floor_ratio", worst=True, where=True),
        **_spread(ok, "baseline_ratio"),
        **_spread(ok, "expected_ratio", worst=True),
    )


def _pooled(ok: pd.DataFrame, metric: str, *, power: int = 1) -> float | None:
    """The power mean of a metric over all elements; None when no head has a number."""
    ok = ok[ok[metric].notna()]
    if ok.empty:
        return None
    weight = ok["elements"].astype(float)
    mean = (ok[metric].astype(float) ** power * weight).sum() / weight.sum()
    return _number(mean ** (1 / power))


def _spread(
    ok: pd.DataFrame, metric: str, *, worst: bool = False, where: bool = False
) -> dict[str, Any]:
    """The median of a metric over heads, and on request its largest value and where that is."""
    ok = ok[ok[metric].notna()]
    values = ok[metric].astype(float)
    if values.empty:
        return {}
    found: dict[str, Any] = {metric: _number(values.median())}
    if worst:
        found[f"{metric}_worst"] = _number(values.max())
    if where:
        found[f"{metric}_where"] = _where(ok.iloc[int(values.to_numpy().argmax())])
    return found


def _bounds(ok: pd.DataFrame) -> dict[str, Any]:
    """How far a kernel is from the baseline, beside what a change of format does to the latter."""
    lower = ok["lower_format"].dropna()
    found = {} if lower.empty else {"lower_format": str(lower.iloc[0])}
    for metric in ("flash_vs_low_precision", "flash_vs_lower"):
        found |= _spread(ok, metric) | _spread(ok, f"{metric}_w1")
    return found


def _sampled(ok: pd.DataFrame) -> dict[str, Any]:
    """How many rows were measured at most, and how well the worst expected_ratio is known."""
    sampled = ok[ok["sampled"]]
    if sampled.empty:
        return {}
    found: dict[str, Any] = {"rows_measured": int(sampled["rows_measured"].max())}
    known = ok[ok["expected_ratio"].notna()]
    if len(known):
        worst = known.iloc[int(known["expected_ratio"].astype(float).to_numpy().argmax())]
        found["expected_ratio_interval"] = worst["interval"].get("expected_ratio")
    return found


def _gradients(group: pd.DataFrame) -> Iterator[GradientSummary]:
    for tensor in ("dq", "dk", "dv"):
        ok = group[(group["status"] == "ok") & (group["tensor"] == tensor)]
        if not ok.empty:
            yield GradientSummary(
                tensor=tensor,
                ok=len(ok),
                **_spread(ok, "floor_ratio", worst=True, where=True),
                **_spread(ok, "baseline_ratio"),
                **_spread(ok, "expected_ratio", worst=True, where=True),
                **_spread(ok, "row_rel"),
                **_spread(ok, "amplification"),
                nonfinite=int(ok["nonfinite"].sum()),
            )


def _noise(rows: Sequence[DeviationRow], group: pd.DataFrame) -> dict[str, Any]:
    """The largest noise over heads and tensors, and where; 0 if all were the same bits."""
    found = [(rows[i], noise_ratio(rows[i])) for i in group.index if rows[i].noise is not None]
    sized = [(value, row) for row, value in found if value is not None]
    if not sized:
        return {"noise": 0.0} if found else {}
    value, row = max(sized, key=lambda pair: pair[0])
    place = f"{row.tensor}, {row.module or row.case} head {row.head}" if value else None
    return {"noise": value, "noise_where": place}


def _worst_row(ok: pd.DataFrame) -> dict[str, Any]:
    found = _spread(ok, "worst_row", worst=True, where=True)
    if not found:
        return {}
    return {"worst_row": found["worst_row_worst"], "worst_row_where": found["worst_row_where"]}


def _bias(ok: pd.DataFrame) -> dict[str, Any]:
    """How many heads are biased, Holm-corrected over the heads of this kernel and format."""
    enough = ok["bias_p"].notna() & (ok["sequences"] >= BIAS_SEQUENCES)
    tested = ok[enough & ok["out_format"].isin(BIAS_FORMATS)]
    if tested.empty:
        return {}
    accused = tested[holm(tested["bias_p"].astype(float).tolist(), BIAS_ALPHA)]
    accused = accused[accused["bias_size"].abs() >= BIAS_ULP]
    found: dict[str, Any] = {"bias_testable": True, "biased_heads": len(accused)}
    if len(accused):
        worst = accused.iloc[int(accused["bias_size"].astype(float).abs().to_numpy().argmax())]
        found["biased_worst"] = float(worst["bias_size"])
        found["biased_where"] = f"{_where(worst)}, {worst['bias_of']}"
    return found


def _map(table: pd.DataFrame, ranked: Sequence[KernelSummary]) -> HeadMap | None:
    """Floor ratios, layer by head, of the kernel under audit that is farthest from the truth, in
    the first format audited (a wider format's floor is so low that it would always win)."""
    first = table["format"].iloc[0]
    measured = [
        k for k in ranked if k.role == "kernel" and k.format == first and k.floor_ratio is not None
    ]
    if not measured:
        return None
    worst = max(measured, key=lambda k: k.floor_ratio or 0.0)
    chosen = table[
        (table["kernel"] == worst.kernel)
        & (table["options"] == repr(sorted(worst.options.items())))
        & (table["format"] == worst.format)
        & (table["tensor"] == "out")
        & (table["status"] == "ok")
    ]
    chosen = chosen.assign(
        place=chosen["place"].str.removeprefix("layer "),
        floor_ratio=chosen["floor_ratio"].astype(float),
    )
    grid = chosen.pivot_table(
        index="place", columns="head", values="floor_ratio", aggfunc="max", sort=False
    )
    grid = grid[sorted(grid.columns)]
    return HeadMap(
        kernel=worst.kernel,
        format=worst.format,
        metric="floor_ratio",
        layers=tuple(grid.index),
        heads=tuple(int(h) for h in grid.columns),
        values=tuple(tuple(_number(v) for v in row) for row in grid.to_numpy().tolist()),
    )


def _weights(rows: Sequence[WeightRow]) -> list[WeightSummary]:
    summaries = []
    for name in dict.fromkeys(row.format for row in rows):
        here = [row for row in rows if row.format == name]
        elements = sum(row.elements for row in here)
        sized = [row for row in here if row.max_abs is not None]
        worst = max(sized, key=lambda row: row.max_abs or 0.0, default=None)
        held = sum(row.elements - row.nonfinite for row in sized)
        mean = sum((row.mean_abs or 0.0) * (row.elements - row.nonfinite) for row in sized)
        summaries.append(
            WeightSummary(
                format=name,
                tensors=len(here),
                elements=elements,
                nonfinite=sum(row.nonfinite for row in here),
                max_abs=worst.max_abs if worst else None,
                max_tensor=worst.tensor if worst else None,
                mean_abs=mean / held if held else None,
                w1=mean / held if held else None,
            )
        )
    return summaries


def _number(value: Any) -> float | None:
    """A float for JSON, None for NaN and infinity."""
    return None if value is None or not math.isfinite(value) else float(value)
