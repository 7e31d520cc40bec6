"""`numdev bounds`: compares flash's distance in weights with low precision's, another
seed's and chance's, from the report of a training run. Needs neither torch nor a GPU.

The first answer is the first paper's question; distances are read as doses, and steps
chosen, by nulls that re-round at several strengths. A window, the steps over which ratios
are averaged, is decided by the paired mean |difference| of nulls alone, and is the same
for every metric: one that ended where the ratio asked about begins to scatter would be
chosen for its answer."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from numdev import report as reports
from numdev.errors import MeasurementError, UsageError
from numdev.grouping import grouped
from numdev.report import Figure, Provenance
from numdev.studies.training import figures
from numdev.studies.training.bounds import answer_sentences, rounding_doses
from numdev.studies.training.bounds import report as records
from numdev.studies.training.bounds.report import (
    FEWEST_SEEDS,
    METRICS,
    PAIRED,
    Comparison,
    Saturation,
    Window,
)
from numdev.studies.training.bounds.rounding_doses import (
    Windows,
    mean_over_seeds,
    merging_marks,
    strength_in_words,
)
from numdev.studies.training.report import TrainReport, VariantRecord, VariantRole
from numdev.target_names import name_of

# Runs that start as the golden one does and compute otherwise
PERTURBED: tuple[VariantRole, ...] = ("flash", "low_precision", "attention_precision")
# The label that all null runs of one kind and strength share
NULLS: Mapping[VariantRole, str] = {
    "null_rounding": "null: re-rounded",
    "null_ulp": "null: one ulp",
    "null_repeat": "null: repeat",
}
CHANCE: tuple[VariantRole, ...] = (*NULLS, "other_seed")
# By role the roles by whose distance its own is divided, in the order of a sentence
BESIDE: Mapping[VariantRole, tuple[VariantRole, ...]] = {
    "flash": ("low_precision", "attention_precision", *CHANCE),
    "attention_precision": ("low_precision", *CHANCE),
    "null_ulp": ("low_precision",),
    "low_precision": CHANCE,
}
Tables = Mapping[tuple[Hashable, ...], pd.DataFrame]  # by tensors and metric
COLUMNS = ("of", "metric", "role", "label", "times", "seed", "step", "value")


def bounds(path: Path, *, command: str = "") -> records.BoundsReport:
    """Returns the bounds of a training run, from its report.json, or a directory with
    one. Nothing is written. `command`: as the report states it.

    Raises UsageError where there is no report or it is another command's,
    MeasurementError where it cannot be read, or has no distance between weights."""
    run = _read_training_run(path)
    distances = distance_table(run)
    weights = distances[distances.of == "weights"]
    if weights.empty:
        hint = "did the run record a step with more than one variant?"
        raise MeasurementError(f"{path}: holds no distance between weights", hint=hint)
    file = path / "report.json" if path.is_dir() else path
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    roles = {run_label(v): v.role for v in run.variants}
    steps = sorted({int(step) for step in weights.step if step > 0})
    tables = {
        key: distances_by_label(part) for key, part in distances.groupby(["of", "metric"])
    }
    paired = distances[distances.metric == PAIRED]
    mark = merging_marks(paired[paired.of == "weights"])
    windows = _window_steps(mark)
    compared = tuple(_comparisons(tables, roles, mark, steps))
    unsaturated: Windows = {w: x for w, x in windows.items() if w != "saturated"}
    doses = tuple(rounding_doses.dose_readings(paired, roles, unsaturated))
    rungs = tuple(
        rounding_doses.ladder_rungs(paired, {w: x for w, x in windows.items() if x})
    )
    outputs = tuple(output_errors(run))
    answers = tuple(answer_sentences.paper_answers(compared))
    repeat = distances[distances.role == "null_repeat"]
    off, first = repeat.value.max(), float(repeat.step[repeat.value > 0].min())
    attention = {run_label(v): v.attention_format for v in run.variants}
    sentences = (
        *answer_sentences.warning_sentences(run, off, first, outputs),
        *answer_sentences.paper_sentences(answers, compared, attention, first),
        *answer_sentences.dose_sentences(doses, outputs),
        *answer_sentences.chance_sentences(compared, first),
    )
    axis = figures.step_axis(steps, all_named=True) if len(steps) > 1 else None
    summary = records.BoundsSummary(
        answer=sentences,
        seeds=tuple(sorted({row.seed for row in run.distances})),
        deterministic=None if pd.isna(off) else bool(off == 0),
        axis=axis,
    )
    source = {"config": str(path), "sha256": sha256, "run": run.provenance.source}
    return records.BoundsReport(
        provenance=Provenance.now(command, run.provenance.system, source),
        request={"run": str(path), "sha256": sha256, "target": name_of(path)},
        summary=summary,
        saturation=mark,
        answers=answers,
        comparisons=compared,
        ladder=rungs,
        doses=doses,
        outputs=outputs,
        figures=tuple(f for f in _figures(tables, roles) if f.curves) if axis else (),
    )


def _read_training_run(path: Path) -> TrainReport:
    """Returns the report of a training run at a path. Raises UsageError where there is no
    report, and for one of another command; MeasurementError where it cannot be read."""
    run = reports.read(path)
    if isinstance(run, TrainReport):
        return run
    what = f"{path}: expected the report of a training run, got one of {run.kind}"
    raise UsageError(what, hint="give the directory of a `numdev train`")


def run_label(v: VariantRecord) -> str:
    """Returns the label of a run: its name, but for null runs the name of their kind in
    NULLS, and behind it, where the strength is not 1, ` at 1/4`. Null runs of one kind
    and strength share a label."""
    times = "" if (v.times or 1.0) == 1.0 else f" at {strength_in_words(v.times or 1.0)}"
    return NULLS.get(v.role, v.name) + times


def output_errors(run: TrainReport) -> Iterator[records.AtOutput]:
    """Yields for each variant whose attention's output was measured its errors, means
    over seeds; a number is None where it is None in all seeds."""
    for v in run.variants:
        rows = [row for row in run.outputs if row.variant == v.name]
        nonfinite = sum(row.nonfinite for row in rows)
        if rows:
            yield records.AtOutput(
                variant=v.name,
                role=v.role,
                floors=_mean_of_present(row.floors for row in rows),
                from_golden=_mean_of_present(row.from_golden for row in rows),
                bias=_mean_of_present(row.bias for row in rows),
                slope=_mean_of_present(row.slope for row in rows),
                sharp=_mean_of_present(row.sharp for row in rows),
                nonfinite=nonfinite,
            )


def _mean_of_present(values: Iterable[float | None]) -> float | None:
    """Returns the arithmetic mean of the values that are not None; None where all are."""
    present = [x for x in values if x is not None]
    return statistics.fmean(present) if present else None


def distance_table(run: TrainReport) -> pd.DataFrame:
    """Returns the distances in METRICS of a training run's variants, but the golden one,
    that are not None. It is a table of the COLUMNS: one metric of one distance in a line.
    `times` is the strength in floors of a null that re-rounds, NaN for any other."""
    others = {v.name: v for v in run.variants if v.role != "golden"}
    lines = []
    for d in run.distances:
        v = others.get(d.variant)
        if v is None:
            continue
        times = (v.times or 1.0) if v.role == "null_rounding" else math.nan
        for metric in METRICS:
            value = getattr(d, metric)
            if value is not None:
                about = (v.role, run_label(v), times)
                lines.append((d.of, metric, *about, d.seed, d.step, value))
    return pd.DataFrame(lines, columns=list(COLUMNS))


def distances_by_label(distances: pd.DataFrame) -> pd.DataFrame:
    """Returns the distances of one metric in a table: a line for each seed and step,
    which are its index, a column for each label, sorted, with the mean over its runs; NaN
    where there is none."""
    return distances.pivot_table(index=["seed", "step"], columns="label", values="value")


# --- the ratios -----------------------------------------------------------------------


def ratios_by_seed(
    a: pd.Series[float], b: pd.Series[float], steps: Sequence[int]
) -> dict[int, float]:
    """Returns column a over column b of a table of distances by label (indexed by seed
    and step), by seed: the geometric mean over those of `steps` at which neither is 0. It
    is 0 where a is 0 at all steps at which b is not. A seed in which no step has both,
    with b above 0, is left out."""
    ratio = (a / b)[(b > 0) & b.index.isin(steps, level="step")].dropna()
    seeds = ratio.where(ratio > 0).groupby("seed").agg(_geometric_mean).fillna(0.0)
    return {int(seed): mean for seed, mean in zip(seeds.index, seeds, strict=True)}


def _geometric_mean(values: pd.Series[float]) -> float:
    """Returns the geometric mean of the values that are not NaN; NaN where all are."""
    present = values.dropna()
    return statistics.geometric_mean(present) if len(present) else math.nan


def _compared_labels(
    roles: Mapping[str, VariantRole], table: pd.DataFrame
) -> list[tuple[str, str]]:
    """Returns the pairs (a, b) of labels in a table of which the ratio a over b is taken,
    by their roles (BESIDE). Null runs re-rounded at a strength other than 1 take no
    part."""
    rungs = NULLS["null_rounding"] + " at "  # for doses alone
    labels = (label for label in roles if label in table and not label.startswith(rungs))
    by_role = grouped(labels, lambda label: roles[label])
    return [
        (a, b)
        for role, others in BESIDE.items()
        for a in by_role.get(role, ())
        for b in itertools.chain.from_iterable(by_role.get(other, ()) for other in others)
    ]


def _window_steps(mark: Saturation) -> Mapping[Window, tuple[int, ...]]:
    """Returns the steps of each window, which may be empty: `start` is step 0, `first`
    the first early step, `early` all early steps, `saturated` the steps at which curves
    have merged."""
    return {
        "start": (0,),
        "first": mark.early[:1],
        "early": mark.early,
        "saturated": mark.late,
    }


def _comparisons(
    tables: Tables,
    roles: Mapping[str, VariantRole],
    mark: Saturation,
    steps: Sequence[int],
) -> Iterator[Comparison]:
    """Yields the ratio of every pair of labels in every metric, window by window; None,
    with a reason, where no seed has both. `tables`: the distances by label for tensors
    and metric; `steps`: all recorded steps above 0, at least one."""
    merged = (
        mark.reason or f"curves are merged from step {mark.saturated}, the first recorded"
    )
    late = mark.reason or f"no curve has merged with the null by step {steps[-1]}"
    reasons: Mapping[Window, str] = {"start": "", "saturated": late}
    windows = _window_steps(mark).items()
    for (window, in_window), metric in itertools.product(windows, METRICS):
        why = reasons.get(window, merged)
        table = tables.get(
            (rounding_doses.tensors_of_window(window), metric), pd.DataFrame()
        )
        for a, b in _compared_labels(roles, table):
            by_seed = ratios_by_seed(table[a], table[b], in_window)
            mean, low, high = (
                mean_over_seeds(list(by_seed.values())) if by_seed else (None, None, None)
            )
            nulls = {}
            if mean is None:
                no_seed = "no seed has both, and more than 0 to divide by"
                nulls["ratio"] = no_seed if in_window else why
            elif len(by_seed) < FEWEST_SEEDS:
                nulls = dict.fromkeys(("low", "high"), f"fewer than {FEWEST_SEEDS} seeds")
            yield Comparison(
                metric=metric,
                variant=a,
                against=b,
                role=roles[a],
                against_role=roles[b],
                window=window,
                steps=in_window,
                ratio=mean,
                low=low,
                high=high,
                by_seed=by_seed,
                nulls=nulls,
            )


def _figures(tables: Tables, roles: Mapping[str, VariantRole]) -> Iterator[Figure]:
    """Yields one figure of distances by step for each metric, without zeros; then one of
    flash's distances over those of another format. A figure without distances has no
    curves. `tables`: has all METRICS of `weights`."""
    soft = {label for label, role in roles.items() if role.startswith("null")}
    for metric, name in METRICS.items():
        table = tables["weights", metric]
        title = f"Distance from the golden run, {name}, by step (all weights)"
        rows = list(_positive_distances(table))
        yield figures.figure_by_step(
            title, metric, name, roles, rows, mean_over_seeds, soft=soft
        )
    over = list(_flash_over_formats(tables["weights", PAIRED], roles))
    title = "Distance of flash over that of another format, by step (all weights)"
    name = "ratio of mean |difference|"
    pairs = dict.fromkeys(label for label, _, _ in over)
    yield figures.figure_by_step(
        title, PAIRED, name, pairs, over, mean_over_seeds, relative=True
    )


def _positive_distances(table: Any) -> Iterator[tuple[str, int, float]]:
    """Yields label, step and distance of each distance above 0 in a table of distances by
    label."""
    for label in table:
        for (_, step), distance in table[label].items():
            if distance > 0:
                yield label, step, distance


def _flash_over_formats(
    table: pd.DataFrame, roles: Mapping[str, VariantRole]
) -> Iterator[tuple[str, int, float]]:
    """Yields label (`flash over bf16`), step and the ratio of flash's distance over that
    of another format, for each seed in which the ratio is above 0."""
    for a, b in _compared_labels(roles, table):
        if roles[a] != "flash" or roles[b] not in PERTURBED:
            continue
        for step in table.index.unique("step"):
            for ratio in ratios_by_seed(table[a], table[b], (step,)).values():
                if ratio > 0:
                    yield f"{a} over {b}", step, ratio
