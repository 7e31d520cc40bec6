"""Which training variants break, when, and does a recorded signal warn of it?

    python benchmarks/instability.py RUN... [--golden VARIANT] [--fixed-on 0 1 2]

RUN is the report of a `numdev train` of configs/train/unstable.yaml or one like it, or
its directory; seeds may be spread over several. Prints Markdown: per variant its loss,
how far above the golden run of the same seed it ended and when it broke; and per recorded
signal whether a threshold, fixed on some seeds, warned on the others.

A run and its golden run meet the same batch at every step, so their difference is free of
what a batch does to a loss and is not smoothed. A variant is judged against the golden
variant; at other optimiser settings, against the variant that differs from the golden one
in the optimiser alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from numdev.metrics.statistics import interval
from numdev.report import read
from numdev.studies.training.report import TrainReport

BROKEN_BY = 0.2  # nats above the golden run; runs that trained ended within 0.03 of it
# Steps for which it must stay there: shorter spikes are met by runs that train, too
HOLD = 50
LATE = 100  # last steps over which losses are averaged
SIGNALS = ("grad_norm", "max_logit", "spectral_norm")
TRAIL = 30  # steps of a signal's running median, so that a single odd row does not alarm


def recorded(report: TrainReport, golden: str | None = None) -> pd.DataFrame:
    """All recorded steps but step 0, with `excess` over the golden run; not finite losses
    count as infinite."""
    golden = golden or next(v.name for v in report.variants if v.role == "golden")
    optimisers = {v["name"]: v["optimiser"] for v in report.request["variants"]}
    attention = {
        v.name: (v.kernel, str(v.options), v.format, v.attention_format, set(v.differs))
        for v in report.variants
    }
    kernel = attention[golden][:4]
    judged_by = {}  # by variant: the golden attention at the variant's optimiser settings
    for name, optimiser in optimisers.items():
        same = [
            n
            for n, o in optimisers.items()
            if o == optimiser and attention[n][:4] == kernel
        ]
        judged_by[name] = next(
            (n for n in same if attention[n][4] <= {"optimiser"}), None
        )
    rows = pd.DataFrame([r.model_dump() for r in report.rows if r.step > 0])
    rows["rate"] = rows["variant"].map(lambda name: optimisers[name]["lr"])
    rows["warmup"] = rows["variant"].map(lambda name: optimisers[name]["warmup"])
    columns = ["loss", *SIGNALS]
    rows[columns] = rows[columns].astype(float).fillna(np.inf)
    rows["judged_by"] = rows["variant"].map(judged_by)
    ideal = rows[["seed", "variant", "step", "loss"]].rename(
        columns={"variant": "judged_by", "loss": "ideal"}
    )
    rows = rows.merge(ideal, on=["seed", "judged_by", "step"])
    rows["excess"] = rows["loss"] - rows["ideal"].where(np.isfinite(rows["ideal"]))
    return rows


def broke_at(excess: pd.Series) -> int | None:
    """The first step from which on the excess stays above BROKEN_BY for HOLD steps, at
    every recorded one; None for none. `excess` is by step. NaN, where the golden run has
    no loss, and the end of the run end a stretch."""
    steps, above = excess.index.to_numpy(), excess.to_numpy() > BROKEN_BY
    ends = np.searchsorted(steps, steps + HOLD)
    for start, end in enumerate(ends):
        if end < len(steps) and above[start : end + 1].all():
            return int(steps[start])
    return None


def runs_of(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each rate, variant and seed: mean loss and excess of the last LATE
    steps, and the step at which it broke (NaN: never)."""
    runs = []
    for (rate, variant, seed), run in rows.groupby(
        ["rate", "variant", "seed"], sort=False
    ):
        run = run.set_index("step").sort_index()
        late = run[run.index > run.index[-1] - LATE]
        runs.append(
            {
                "rate": rate,
                "variant": variant,
                "seed": seed,
                "golden": variant == run["judged_by"].iloc[0],
                "loss": late["loss"].mean(),
                "excess": late["excess"].mean(),
                "broke": broke_at(run["excess"]),
            }
        )
    return pd.DataFrame(runs).astype({"broke": float})


def alarm_at(run: pd.DataFrame, signal: str, threshold: float) -> int | None:
    """The first step after the warm-up at which a signal's running median passes the
    threshold."""
    above = running(run, signal) > threshold
    return int(above.index[above][0]) if above.any() else None


def running(run: pd.DataFrame, signal: str) -> pd.Series:
    """The median of a signal over the last TRAIL steps, from the end of the warm-up
    on."""
    series = run.set_index("step")[signal].sort_index()
    # A lower median by rank: pandas' rolling median takes infinity for a missing value.
    values = [
        np.quantile(
            series[(series.index > s - TRAIL) & (series.index <= s)], 0.5, method="lower"
        )
        for s in series.index
    ]
    medians = pd.Series(values, index=series.index)
    return medians[medians.index >= run["warmup"].iloc[0]]


def warnings(
    rows: pd.DataFrame, runs: pd.DataFrame, fixed_on: Sequence[int]
) -> pd.DataFrame:
    """For each rate and signal: the threshold no unbroken run of the seeds `fixed_on`
    passes, and how it does on the other seeds."""
    broke = runs.set_index(["rate", "variant", "seed"])["broke"]
    lines = []
    for rate, at_rate in rows.groupby("rate", sort=False):
        every = dict(list(at_rate.groupby(["variant", "seed"], sort=False)))
        broken = {key: broke[(rate, *key)] for key in every}
        for signal in SIGNALS:
            calm = [
                running(run, signal).max()
                for key, run in every.items()
                if key[1] in fixed_on and np.isnan(broken[key])
            ]
            if not calm:
                continue
            threshold, warned, false, leads = max(calm), 0, 0, []
            others = [key for key in every if key[1] not in fixed_on]
            for key in others:
                at = alarm_at(every[key], signal, threshold)
                if np.isnan(broken[key]):
                    false += at is not None
                elif at is not None and at < broken[key]:
                    warned += 1
                    leads.append(broken[key] - at)
            trouble = sum(not np.isnan(broken[key]) for key in others)
            lines.append(
                {
                    "rate": rate,
                    "signal": signal,
                    "threshold": threshold,
                    "warned": f"{warned} of {trouble}",
                    "false": f"{false} of {len(others) - trouble}",
                    "lead, steps": np.median(leads) if leads else np.nan,
                }
            )
    return pd.DataFrame(lines)


def by_variant(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each rate and variant over seeds."""
    lines = []
    for (rate, variant), of_variant in runs.groupby(["rate", "variant"], sort=False):
        finite = of_variant["excess"][np.isfinite(of_variant["excess"])]
        mean, low, high = interval(list(finite)) if len(finite) else (np.nan, None, None)
        steps = of_variant["broke"].dropna()
        lines.append(
            {
                "rate": rate,
                "variant": variant,
                "loss by seed": " / ".join(f"{x:.3f}" for x in of_variant["loss"]),
                "above golden": f"{mean:.3f}"
                + ("" if low is None else f" [{low:.3f}, {high:.3f}]"),
                "broke": ""
                if of_variant["golden"].all()
                else f"{len(steps)} of {len(of_variant)}",
                "at step": " / ".join(f"{x:.0f}" for x in steps),
            }
        )
    return pd.DataFrame(lines)


def markdown(table: pd.DataFrame) -> str:
    """A data frame as a Markdown table."""
    lines = [list(table.columns), ["---"] * len(table.columns)]
    lines += [
        [f"{x:.4g}" if isinstance(x, float) else str(x) for x in row]
        for row in table.values
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="reports of numdev train")
    parser.add_argument("--golden", help="judge by this variant, not by the golden one")
    parser.add_argument(
        "--fixed-on", nargs="+", type=int, default=[0, 1, 2], metavar="SEED"
    )
    options = parser.parse_args()
    tables = []
    for path in options.runs:
        report = read(path)
        if not isinstance(report, TrainReport):
            raise SystemExit(
                f"{path}: expected a report of numdev train, got {report.kind}"
            )
        tables.append(recorded(report, options.golden))
    rows = pd.concat(tables, ignore_index=True)
    rows = rows.drop_duplicates(["rate", "variant", "seed", "step"])
    runs = runs_of(rows)
    print(
        f"Broke: {BROKEN_BY} nats above its golden run for {HOLD} steps. Intervals "
        "are 95 %.\n"
    )
    print(markdown(by_variant(runs)))
    print(f"\nThresholds fixed on seeds {options.fixed_on}, tested on the others.\n")
    print(markdown(warnings(rows, runs, options.fixed_on)))


if __name__ == "__main__":
    main()
