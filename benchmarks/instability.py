"""Which rounding breaks training, when, and does anything say so before the loss?

    python benchmarks/instability.py RUN... [--golden VARIANT] [--diagnose REPORT...]
        [--fixed-on 0 1 2] [--csv DIR]

RUN is the directory of a `numdev train` of configs/train/unstable.yaml or one like it; seeds may be
in several, and a run that was stopped before it had a report is read from its journal. Prints
Markdown: per variant what it rounds, its loss, whether it left the plateau and whether it broke
(`instability_runs` has the rules); a warning rule for each recorded signal, fixed on some seeds and
tested on the others (`instability_warnings`); the effects of the formats and of delta's formula
(`instability_effects`); and what the diagnoses of checkpoints say (`instability_diagnosis`). With
--csv the numbers behind it. Reads files alone, so it runs anywhere.

Intervals are 95 %: Student's t over seeds for means, Clopper and Pearson's for shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from instability_diagnosis import said
from instability_effects import Effect, effects
from instability_page import EVENTS, Rules, page
from instability_runs import Run, Source, Stopped, runs_of, source_of
from instability_warnings import Rule, rules, with_diagnosis

from numdev.diagnose.report import DiagnoseReport
from numdev.report import read

FIXED_ON = (0, 1, 2)
TROUBLE = ("broke", "rose")


def main() -> None:
    parser = argparse.ArgumentParser(description="which rounding breaks training, and when")
    parser.add_argument("runs", nargs="+", type=Path, help="directories of numdev train")
    parser.add_argument("--golden", help="judge by this variant, not by the golden one")
    parser.add_argument("--diagnose", nargs="*", type=Path, default=[], help="of numdev diagnose")
    parser.add_argument("--fixed-on", nargs="+", type=int, default=list(FIXED_ON), metavar="SEED")
    parser.add_argument("--csv", type=Path, metavar="DIR", help="write the tables there too")
    given = parser.parse_args()
    sources = [source_of(path) for path in given.runs]
    diagnosed = [_diagnosed(path) for path in given.diagnose]
    runs = with_diagnosis(runs_of(sources, given.golden), diagnosed)
    fixed = _rules(runs, given.fixed_on)
    found = effects(runs)
    print(page(runs, fixed, found, given.fixed_on, _stopped(given.runs, sources)))
    if diagnosed:
        print("\n## What diagnose says\n\n" + said(runs))
    if given.csv:
        written(given.csv, runs, fixed, found)


def _rules(runs: Sequence[Run], fixed_on: Sequence[int]) -> Rules:
    settings = dict.fromkeys(run.setting for run in runs)
    return {
        (s, event): rules([r for r in runs if r.setting == s], fixed_on, EVENTS[event])
        for s in settings
        for event in TROUBLE
    }


def _stopped(paths: Sequence[Path], sources: Sequence[Source]) -> list[str]:
    """Of each run without a report, how far it came."""
    return [
        f"Stopped: {path.name}, at step {max(row.step for row in source.rows)} of "
        f"{source.request['steps']}."
        for path, source in zip(paths, sources, strict=True)
        if isinstance(source, Stopped)
    ]


def written(directory: Path, runs: Sequence[Run], fixed: Rules, found: Sequence[Effect]) -> None:
    """The numbers behind the page, a table a file."""
    directory.mkdir(parents=True, exist_ok=True)
    tables = {
        "runs": (_run_record(run) for run in runs),
        "warnings": (_rule_record(*key, rule) for key, own in fixed.items() for rule in own),
        "effects": (_effect_record(effect) for effect in found),
    }
    for name, records in tables.items():
        pd.DataFrame(list(records)).to_csv(directory / f"{name}.csv", index=False)


def _run_record(run: Run) -> dict[str, object]:
    sites = {name: getattr(run.sites, name, None) for name in ("S", "O", "dP", "delta")}
    numbers = {"loss": run.ended, "excess": run.late, "held": run.held}
    steps = {"left_at": run.left, "broke_at": run.broke, "rose_at": run.rose, "last": run.last}
    about = {"setting": run.setting, "variant": run.variant, "seed": run.seed}
    return {**about, **sites, **numbers, **steps, "one_basin": run.one_basin}


def _rule_record(setting: str, event: str, rule: Rule) -> dict[str, object]:
    record: dict[str, object] = {
        "setting": setting, "of": event, "signal": rule.signal, "kind": rule.kind,
        "threshold": rule.threshold, "chosen": rule.chosen,
    }  # fmt: skip
    for name, found in (("fixed", rule.fixed), ("tested", rule.tested)):
        record |= {f"{name}_warned": found.warned.some, f"{name}_broke": found.warned.of}
        record |= {f"{name}_false": found.false.some, f"{name}_unbroken": found.false.of}
        record |= {f"{name}_lead": found.lead}
    return record


def _effect_record(effect: Effect) -> dict[str, object]:
    mean, low, high = effect.mean
    about = {"setting": effect.setting, "kind": effect.kind, "response": effect.response}
    numbers = {"mean": mean, "low": low, "high": high, "seeds": effect.seeds}
    return {**about, "effect": effect.name, **numbers}


def _diagnosed(path: Path) -> DiagnoseReport:
    found = read(path)
    if not isinstance(found, DiagnoseReport):
        raise SystemExit(f"{path}: is no report of numdev diagnose")
    return found


if __name__ == "__main__":
    main()
