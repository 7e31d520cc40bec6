"""`benchmarks/instability.py`: which runs broke and when, what warned of it, and which rounding did
it, on series with a known answer."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from numdev.report import Provenance, write
from numdev.training.config import TrainConfig, resolve
from numdev.training.report import TrainReport, TrainRow, TrainSummary, VariantRecord
from numdev.training.study import record_of
from numdev.yamlfile import read_yaml

ROOT = Path(__file__).parent.parent
STEPS = tuple(range(0, 401, 10))
FP32: dict[str, Any] = {"preset": "exact", "algorithm": "plain", "compute": "float32"}
Curve = Callable[[int, int], float | None]
"""Of a seed and a step."""


@pytest.fixture(scope="module")
def parts() -> Any:
    """The benchmark's modules, by the last word of their names."""
    names = ("", "_runs", "_sites", "_page", "_warnings", "_effects", "_diagnosis")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        yield {n.strip("_"): importlib.import_module(f"instability{n}") for n in names}


@pytest.fixture(scope="module")
def runs(parts: dict[str, ModuleType]) -> ModuleType:
    return parts["runs"]


def series(values: list[float], every: int = 10) -> pd.Series:
    return pd.Series(values, index=[every * (i + 1) for i in range(len(values))], dtype=float)


def report(
    losses: Mapping[str, Curve],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    rates: Mapping[str, float] | None = None,
    norms: Curve = lambda seed, step: 1.0,
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4),
) -> TrainReport:
    """A run whose first variant is golden. `norms` are every variant's gradient norms."""
    golden, *_ = losses
    rates = {name: (rates or {}).get(name, 0.015) for name in losses}
    optimisers = {name: {"lr": lr, "warmup": 20} for name, lr in rates.items()}
    variants = tuple(
        VariantRecord(
            name=name, role="golden" if name == golden else "variant", kernel="emulated",
            options={**FP32, **(options or {}).get(name, {})}, format="bfloat16",
            attention_format="bfloat16",
            differs={} if lr == rates[golden] else {"optimiser": {"lr": lr}},
        )
        for name, lr in rates.items()
    )  # fmt: skip
    rows = tuple(
        TrainRow(
            seed=seed, variant=name, step=step, loss=loss(seed, step) if step else None,
            grad_norm=norms(seed, step), lr=0.015, max_logit=1.0, spectral_norm=2.0,
            spectral_norms=((1.0, 1.0, 2.0), (1.0, 1.5, 2.0)),
        )
        for seed in seeds for step in STEPS for name, loss in losses.items()
    )  # fmt: skip
    return TrainReport(
        provenance=Provenance(
            numdev="0", command="numdev train", created="2026-01-01", system={}, source={}
        ),
        request={
            "model": {"layers": 4, "width": 256},
            "variants": [{"name": n, "optimiser": o} for n, o in optimisers.items()],
        },
        summary=TrainSummary(
            answer=("a",), steps=STEPS[-1], seeds=seeds, parameters=1, model="gpt2", data="d"
        ),
        variants=variants,
        rows=rows,
        distances=(),
    )  # fmt: skip


def smooth(seed: int, step: int) -> float:
    return 5.0 * 0.99**step + 2.0 + 0.1 * seed


def breaking(at: int, by: float = 0.5) -> Curve:
    """The loss that trains, and from a step on more by so much; later by 10 steps a seed."""
    return lambda seed, step: smooth(seed, step) + (by if step >= at + 10 * seed else 0.0)


# --- broken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("excess", "least"),
    [
        ([0.0] * 20, 0.0),
        ([0.0] * 5 + [0.3] * 6 + [0.0] * 5, 0.3),  # from a row to the one 50 steps later
        ([0.0] * 5 + [0.3] * 5 + [0.0] * 5, 0.0),  # a spike
        ([0.0] * 5 + [0.9] * 3 + [0.1] + [0.9] * 3 + [0.0] * 9, 0.1),  # it came back in between
        ([0.0] * 5 + [0.3] * 5, 0.0),  # too near the end to tell
        ([0.0] * 5 + [math.inf] * 6, math.inf),
        ([math.nan] * 20, -math.inf),
        ([0.3] * 3, -math.inf),
    ],
)
def test_what_a_run_held(runs: ModuleType, excess: list[float], least: float) -> None:
    """The largest excess that was never fallen short of for 50 steps."""
    assert runs.stretches(series(excess)).max() == least


def test_runs_are_judged_beside_their_fp32_run(runs: ModuleType) -> None:
    """What both suffer is no break, nor is a spike; a break is dated by its first row, and a loss
    that is not finite is one."""

    def hard(seed: int, step: int) -> float:
        return smooth(seed, step) + (1.0 if step > 200 else 0.0)

    def lost(seed: int, step: int) -> float | None:
        return None if step >= 130 else hard(seed, step)

    losses: dict[str, Curve] = {
        "fp32": hard,
        "same": hard,
        "spike": lambda seed, step: hard(seed, step) + (3.0 if 100 <= step < 150 else 0.0),
        "broken": lambda seed, step: hard(seed, step) + (0.21 if step >= 150 else 0.0),
        "nearly": lambda seed, step: hard(seed, step) + (0.19 if step >= 150 else 0.0),
        "lost": lost,
    }
    found = {run.variant: run for run in runs.runs_of([report(losses, seeds=(0,))])}
    broke = {name: run.broke for name, run in found.items()}
    assert broke == {
        "fp32": None, "same": None, "spike": None, "broken": 150, "nearly": None, "lost": 130,
    }  # fmt: skip
    assert found["nearly"].held == pytest.approx(0.19)
    assert found["broken"].late == pytest.approx(0.21)
    assert found["lost"].late == math.inf


@pytest.mark.parametrize(
    "name", ["unstable", "unstable-untiled", "unstable-rates", "unstable-larger"]
)
def test_the_names_of_the_configurations_say_what_is_rounded(parts: Any, name: str) -> None:
    """The columns read from each variant's options are those of its name, and nothing else
    differs from the golden run."""
    path = ROOT / "configs" / "train" / f"{name}.yaml"
    request = resolve(read_yaml(path, TrainConfig), path.name)
    golden = parts["sites"].sites_of(record_of(request.golden, request.golden, None))
    seen = 0
    for variant in request.variants:
        sites = parts["sites"].sites_of(record_of(variant, request.golden, None))
        if variant.kernel.name != request.golden.kernel.name or variant.role == "null_ulp":
            continue
        rounded, delta, *_ = [*variant.name.split(", "), "dO*O"]
        words = rounded.replace("PV", "O").split()
        told = {c: "bf16" if c in words else "fp32" for c in ("S", "O", "dP")}
        assert {c: getattr(sites, c) for c in told} == told, variant.name
        assert sites.delta == (delta if delta in ("dO*O", "dP*P") else "dO*O"), variant.name
        assert (sites.kernel, sites.rest) == (golden.kernel, golden.rest), variant.name
        seen += 1
    assert seen >= 5


# --- basins, and trouble without a golden run ----------------------------------------------------


# --- warnings ------------------------------------------------------------------------------------


def warned(parts: Any, norms: Curve, *, broken_at: int = 200) -> Any:
    """The rule of the gradient norm, fixed on seeds 0 to 2. Of each seed the variant `x` breaks;
    `norms` are its norms, and 1 + seed / 10 those of the fp32 run."""
    made = report({"fp32": smooth, "x": lambda s, t: breaking(broken_at)(0, t) + 0.1 * s})
    rows = tuple(
        row.model_copy(
            update={
                "grad_norm": norms(row.seed, row.step) if row.variant == "x" else 1 + row.seed / 10
            }
        )
        for row in made.rows
    )
    found = parts["runs"].runs_of([made.model_copy(update={"rows": rows})])
    rules = parts["warnings"].rules(found, (0, 1, 2), lambda run: run.broke)
    return next(rule for rule in rules if (rule.signal, rule.kind) == ("gradient norm", "none"))


def test_a_signal_that_rises_before_the_loss(parts: Any) -> None:
    """Above 1.2, the largest of seeds 0 to 2, from step 120 on: its median of three rows is there
    at 130, 70 steps before the break. Seeds 3 and 4 lie above that threshold without breaking, and
    are counted as false alarms."""
    rule = warned(parts, lambda seed, step: 9.0 if step >= 120 else 1.0)
    assert rule.threshold == pytest.approx(1.2)
    assert (rule.fixed.warned.some, rule.fixed.warned.of) == (3, 3)
    assert rule.fixed.leads == (70, 70, 70)
    assert rule.tested.lead == 70
    assert (rule.fixed.false.some, rule.tested.false.some, rule.tested.false.of) == (0, 2, 2)
    assert rule.chosen


# --- effects -------------------------------------------------------------------------------------


HIGH: dict[str, dict[str, Any]] = {
    "S": {"scores": "working"}, "PV": {"pv": "working"}, "dP": {"dp": "working"},
}  # fmt: skip


def test_effects_are_paired_by_seed(parts: Any) -> None:
    """Where dP in bf16 costs 0.4 with delta from O and nothing else costs anything, half of it is
    the effect of dP, half that of delta, and half their interaction; S in bf16 costs 0.3 alone.
    However seeds differ, the intervals have no width."""
    options, losses = {}, {"fp32": smooth}
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(("PV", "dP", "delta"), size) for size in range(4)
    ):
        name = "+".join(chosen) or "fp32"
        options[name] = {k: v for c in chosen for k, v in HIGH.get(c, {}).items()}
        options[name] |= {"delta_from": "dO*O" if "delta" in chosen else "dP*P"}
        cost = 0.4 if {"dP", "delta"} <= set(chosen) else 0.0
        losses[name] = lambda seed, step, cost=cost: smooth(seed, step) + cost * (step > 100)
    options["S"] = {**options["fp32"], **HIGH["S"]}
    losses["S"] = lambda seed, step: smooth(seed, step) + 0.3
    whole = parts["effects"].effects(parts["runs"].runs_of([report(losses, options=options)]))
    found = [e for e in whole if e.response == "loss, nats"]
    means = {e.name: e.mean[0] for e in found if e.kind == "mean of pairs"}
    assert means == pytest.approx({
        "S in bf16, mean of 1 pairs": 0.3, "O in bf16, mean of 4 pairs": 0.0,
        "dP in bf16, mean of 4 pairs": 0.2, "delta from O, mean of 4 pairs": 0.2,
        "dP in bf16 where delta is dO*O, mean of 2 pairs": 0.4,
        "dP in bf16 where delta is dP*P, mean of 2 pairs": 0.0,
        "delta from O where dP is bf16, mean of 2 pairs": 0.4,
        "delta from O where dP is fp32, mean of 2 pairs": 0.0,
    }, abs=1e-9)  # fmt: skip
    full = {e.factor: e.mean[0] for e in found if e.kind == "factorial"}
    expected = dict.fromkeys(full, 0.0) | dict.fromkeys(
        ("dP in bf16", "delta from O", "dP in bf16 x delta from O"), 0.2
    )
    assert full == pytest.approx(expected, abs=1e-9)
    assert len(full) == 7
    assert all(e.mean[2] - e.mean[1] < 1e-9 for e in found)
    tested = {s.name: s for s in parts["effects"].signs(found)}
    assert (tested["S in bf16"].above, tested["S in bf16"].of) == (5, 5)
    assert tested["S in bf16"].p == pytest.approx(2 / 2**5)


# --- the page ------------------------------------------------------------------------------------


def test_the_page(parts: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """From a report on disk: every table, and the numbers behind them as CSV."""
    losses = {"fp32": smooth, "dP, dO*O": breaking(100)}
    (tmp_path / "run").mkdir()
    write(report(losses, options={"dP, dO*O": {"dp": "working"}}), tmp_path / "run")
    arguments = ["instability.py", str(tmp_path / "run"), "--csv", str(tmp_path / "csv")]
    monkeypatch.setattr(sys, "argv", arguments)
    parts[""].main()
    page = capsys.readouterr().out
    assert "| dP, dO*O | fp32 | fp32 | bf16 | dO*O |" in page
    assert "5 of 5 [0.48, 1.00]" in page
    assert "| 100 / 110 / 120 / 130 / 140 | 120 |" in page
    found = pd.read_csv(tmp_path / "csv" / "runs.csv")
    assert list(found[found.variant == "dP, dO*O"].broke_at) == [100, 110, 120, 130, 140]
    assert {path.name for path in (tmp_path / "csv").iterdir()} == {
        "runs.csv", "warnings.csv", "effects.csv",
    }  # fmt: skip
