"""Runs of `numdev train` as series, beside the run they are judged by, and what became of them.

A run is judged by the golden one of its own setting (network and optimiser) and seed; at another
rate by the variant that differs from the golden run in the optimiser alone. Both met the same batch
at every step, so their difference is free of what a batch does to a loss, and is not smoothed: a
trailing mean would date every failure late, and lengthen every warning before it.

Two things can part two runs. Rounding, and chance: at some rates a network leaves the plateau, on
which it predicts each byte from the last one alone, or does not, and runs that differ by roundings
of any kind part here by a whole nat. So every comparison is also made among runs of one basin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from instability_sites import Sites, sites_behind, sites_of

from numdev.audit.journal import JOURNAL
from numdev.report import read
from numdev.training.config import TrainRequest
from numdev.training.report import TrainReport, TrainRow, VariantRecord
from numdev.training.study import record_of

BROKEN_BY = 0.2
"""Nats above the golden run. In the trials that this comes from, runs that trained ended within
0.03 of it, those that did not 0.36 to 0.66 above, and one between. `held` shows how near a run
came."""
HOLD = 50
"""Steps for which it must stay there, at every recorded one: spikes that are over by then are met
by runs that train, too."""
LATE = 100
"""The last steps, over which losses are averaged for effects."""
LEARNING = 2.2
"""Nats: a loss held below it is off the plateau. A byte of the standard library's source (8.8 MB of
it) has 2.42 nats given the one before it, and 1.76 given two, so no network gets here that does not
look further back."""
MEAN = 25
"""Steps: a run's own rise is that of its mean over so many, since batches differ by 0.1 nats."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """What a run without a report left in its journal."""

    request: dict[str, Any]
    variants: tuple[VariantRecord, ...]
    rows: tuple[TrainRow, ...]


Source = TrainReport | Stopped


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One variant with one seed."""

    setting: str
    variant: str
    seed: int
    golden: bool
    sites: Sites | None
    """None where they are not known."""
    crossed: bool
    """Whether its gradients are another kernel's."""
    behind: Sites | None
    """What that one rounds."""
    kernels: tuple[str, str]
    """Everything that says which kernels its output and its gradients are from."""
    loss: pd.Series
    """By step, NaN where it is not finite."""
    excess: pd.Series
    """Over the golden run's: infinite where this loss is not finite, NaN where that one is not."""
    golden_left: int | None
    """When the golden run left the plateau."""
    signals: dict[str, pd.Series]
    """What else was recorded, by step; infinite where it is not finite."""
    warmup: int

    @property
    def last(self) -> int:
        return int(self.loss.index[-1])

    @property
    def held(self) -> float:
        """The largest excess that it kept for HOLD steps."""
        return float(stretches(self.excess).max())

    @property
    def broke(self) -> int | None:
        """The first step of the first stretch that counts as broken."""
        return first(stretches(self.excess) > BROKEN_BY)

    @property
    def rose(self) -> int | None:
        """The same without a golden run: above the least that its own mean had been before."""
        return first(stretches(rise(self.loss)) > BROKEN_BY)

    @property
    def left(self) -> int | None:
        """The first step of the first stretch off the plateau."""
        return left(self.loss)

    @property
    def one_basin(self) -> bool:
        """Whether it and the golden run both left the plateau, or both stayed."""
        return (self.left is None) == (self.golden_left is None)

    @property
    def late(self) -> float:
        """The mean excess of the last LATE steps; infinite or NaN where one of them is."""
        return float(np.mean(self.excess[self.excess.index > self.last - LATE]))

    @property
    def ended(self) -> float:
        """The mean loss of the last LATE steps; infinite where one of them is not finite."""
        return float(np.mean(self.loss[self.loss.index > self.last - LATE].fillna(math.inf)))


def stretches(excess: pd.Series, hold: int = HOLD) -> pd.Series:
    """By the step at which it begins, the least excess of a stretch: from there to the first
    recorded step `hold` or more later. -inf where the run ends before, or the excess is NaN."""
    steps = excess.index.to_numpy()
    values = np.where(np.isnan(excess.to_numpy(float)), -math.inf, excess.to_numpy(float))
    ends = np.searchsorted(steps, steps + hold)
    least = [
        values[i : end + 1].min() if end < len(steps) else -math.inf for i, end in enumerate(ends)
    ]
    return pd.Series(least, index=excess.index, dtype=float)


def first(held: pd.Series) -> int | None:
    """The first step at which it is so."""
    steps = held.index[held]
    return int(steps[0]) if len(steps) else None


def left(loss: pd.Series) -> int | None:
    """When a loss left the plateau: the first step of the first stretch below LEARNING."""
    return first(stretches(LEARNING - loss) > 0)


def rise(loss: pd.Series) -> pd.Series:
    """The mean over the last MEAN steps, less the least such mean until then; infinite where a loss
    is not finite."""
    timed = loss.set_axis(pd.to_timedelta(loss.index, unit="s"))
    means = timed.rolling(f"{MEAN}s").mean().set_axis(loss.index)
    return (means - means.cummin()).where(loss.notna(), math.inf)


# --- which run is judged by which ----------------------------------------------------------------


def settings_of(source: Source, golden: str) -> dict[str, str]:
    """By variant: network and optimiser, in words."""
    model = source.request["model"]
    variants = {v["name"]: v["optimiser"] for v in source.request["variants"]}
    found = {}
    for name, optimiser in variants.items():
        others = [
            f", {key} {value}"
            for key, value in optimiser.items()
            if key != "lr" and value != variants[golden][key]
        ]
        words = f"{model['layers']} x {model['width']}, lr {optimiser['lr']:g}"
        found[name] = words + "".join(others)
    return found


def references_of(source: Source, golden: str) -> dict[str, str]:
    """By variant, the one it is judged by: with the golden run's attention and its own optimiser.
    A variant without one is left out."""
    ideal = next(v for v in source.variants if v.name == golden)
    settings = settings_of(source, golden)
    same = ("kernel", "options", "format", "attention_format")
    found = {
        settings[v.name]: v.name
        for v in reversed(source.variants)
        if v.role in ("golden", "variant")
        and all(getattr(v, name) == getattr(ideal, name) for name in same)
        and set(v.differs) <= {"optimiser"}
    }
    return {name: found[words] for name, words in settings.items() if words in found}


# --- from files to runs --------------------------------------------------------------------------


def source_of(path: Path) -> Source:
    """The report in a directory, or where the run was stopped before it had one, its journal."""
    if path.is_dir() and not (path / "report.json").exists():
        return _stopped(path / JOURNAL)
    found = read(path)
    if not isinstance(found, TrainReport):
        raise SystemExit(f"{path}: is no report of numdev train")
    return found


def _stopped(path: Path) -> Stopped:
    with path.open(encoding="utf-8") as file:
        asked = json.loads(file.readline())["header"]["request"]
        request = TrainRequest.model_validate({"title": None, "save_every": 1.0, **asked})
        rows = tuple(TrainRow(**row) for line in file for row in _rows(line) if "loss" in row)
    return Stopped(
        request=request.model_dump(mode="json"),
        variants=tuple(record_of(v, request.golden, None) for v in request.variants),
        rows=rows,
    )


def _rows(line: str) -> list[dict[str, Any]]:
    """Of one line of a journal; none of a last line that was not written to its end."""
    try:
        return list(json.loads(line)["rows"])
    except json.JSONDecodeError:
        return []


def runs_of(sources: Sequence[Source], golden: str | None = None) -> list[Run]:
    """All runs that can be judged, in the order of the sources, by their own golden run or by the
    one that is named. Where two have a run of one setting, name and seed, the first one's; raises
    ValueError if the two are not the same attention."""
    found: dict[tuple[str, str, int], tuple[Any, Run]] = {}
    for source in sources:
        for run in _runs(source, golden):
            key, is_ = (run.setting, run.variant, run.seed), run.kernels
            if found.setdefault(key, (is_, run))[0] != is_:
                raise ValueError(f"two reports have a variant {run.variant!r}, and not the same")
    return [run for _, run in found.values()]


def _runs(source: Source, golden: str | None) -> Iterator[Run]:
    ideal = golden or next(v.name for v in source.variants if v.role == "golden")
    if ideal not in {v.name for v in source.variants}:
        raise SystemExit(f"{source.request['target']}: has no variant {ideal!r} to judge by")
    settings, references = settings_of(source, ideal), references_of(source, ideal)
    optimisers = {v["name"]: v["optimiser"] for v in source.request["variants"]}
    records = {v.name: v for v in source.variants}
    rows: dict[tuple[str, int], list[TrainRow]] = {}
    for row in source.rows:
        rows.setdefault((row.variant, row.seed), []).append(row)
    for (variant, seed), own in rows.items():
        reference = references.get(variant)
        if reference is None:
            continue
        record = records[variant]
        loss, other = _loss(own), _loss(rows[reference, seed])
        yield Run(
            setting=settings[variant],
            variant=variant,
            seed=seed,
            golden=variant == reference,
            sites=sites_of(record),
            crossed="backward_kernel" in record.differs,
            behind=sites_behind(record),
            kernels=_kernels(record),
            loss=loss,
            excess=(loss.fillna(math.inf) - other).rename("excess"),
            golden_left=left(other),
            signals=signals_of(own),
            warmup=optimisers[variant]["warmup"],
        )


def _kernels(record: VariantRecord) -> tuple[str, str]:
    own: dict[str, Any] = {"name": record.kernel, "options": record.options}
    both = own, record.differs.get("backward_kernel", own)
    words = [f"{k['name']} {sorted(k['options'].items())} {record.attention_format}" for k in both]
    return words[0], words[1]


def _loss(rows: Sequence[TrainRow]) -> pd.Series:
    """By step; step 0 has none."""
    return _series((row.step, row.loss) for row in rows if row.step > 0)


def _series(pairs: Iterator[tuple[int, float | None]]) -> pd.Series:
    found = dict(pairs)
    return pd.Series(
        [math.nan if x is None else x for x in found.values()], index=list(found), dtype=float
    )


def signals_of(rows: Sequence[TrainRow]) -> dict[str, pd.Series]:
    """What was recorded besides the loss. What is not finite counts as infinite."""
    after = [row for row in rows if row.step > 0]
    recorded: Mapping[str, Iterator[tuple[int, float | None]]] = {
        "gradient norm": ((row.step, row.grad_norm) for row in after),
        "max logit": ((row.step, row.max_logit) for row in after),
        "spectral norm": ((row.step, row.spectral_norm) for row in after),
        "spectral ratio": ((row.step, _ratio(row)) for row in after),
    }
    return {name: _series(pairs).fillna(math.inf) for name, pairs in recorded.items()}


def _ratio(row: TrainRow) -> float | None:
    """The largest over layers of a head's spectral norm over the median of its layer's heads."""
    if not row.spectral_norms:
        return None
    return float(max(max(heads) / np.median(heads) for heads in row.spectral_norms))
