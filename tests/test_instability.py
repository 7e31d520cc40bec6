"""`benchmarks/instability.py`: which runs broke and when, what warned of it, and which rounding did
it, on series with a known answer."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from numdev.diagnose.report import Bias, DeltaError, DiagnoseReport, DiagnoseSummary, HeadRow
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


def test_stretches_are_what_a_search_finds(runs: ModuleType) -> None:
    """At uneven steps too: the least value from each step to the first one 50 later or more."""
    drawn = np.random.default_rng(0)
    for _ in range(20):
        steps = np.unique(drawn.integers(1, 400, 60))
        excess = pd.Series(drawn.normal(size=len(steps)), index=steps)
        for step, found in runs.stretches(excess).items():
            later = [s for s in steps if s >= step + 50]
            inside = [x for s, x in excess.items() if later and step <= s <= later[0]]
            assert found == (min(inside) if later else -math.inf)


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


def test_another_rate_has_an_fp32_run_of_its_own(runs: ModuleType) -> None:
    """A variant is compared at its own rate; one that has no fp32 run there is left out."""
    losses: dict[str, Curve] = {
        "fp32": smooth, "slow fp32": lambda seed, step: 6.0, "slow": lambda seed, step: 6.1,
        "alone": lambda seed, step: 6.1,
    }  # fmt: skip
    made = report(
        losses,
        options={"slow": {"dp": "working"}, "alone": {"dp": "working"}},
        rates={"slow fp32": 0.004, "slow": 0.004, "alone": 0.001},
    )
    found = {run.variant: run for run in runs.runs_of([made])}
    assert set(found) == {"fp32", "slow fp32", "slow"}
    assert found["slow"].late == pytest.approx(0.1)
    assert found["slow"].setting == "4 x 256, lr 0.004"


def test_seeds_may_be_in_several_reports(runs: ModuleType) -> None:
    """Together they are what one report would be; a name that stands for two things is refused."""
    losses = {"fp32": smooth, "x": breaking(100)}
    parts = [report(losses, seeds=s) for s in ((0, 1), (2, 3, 4), (1,))]
    whole = runs.runs_of([report(losses)])
    found = runs.runs_of(parts)
    assert {(r.variant, r.seed, r.broke) for r in found} == {
        (r.variant, r.seed, r.broke) for r in whole
    }
    assert len(found) == len(whole)
    other = report(losses, options={"x": {"dp": "working"}}, seeds=(0,))
    with pytest.raises(ValueError, match="'x', and not the same"):
        runs.runs_of([parts[0], other])


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


def record(
    kernel: str, differs: dict[str, Any] | None = None, attention: str = "bfloat16", **options: Any
) -> VariantRecord:
    return VariantRecord(
        name="x", role="variant", kernel=kernel, options=options, format="bfloat16",
        attention_format=attention, differs=differs or {},
    )  # fmt: skip


def test_what_a_variant_rounds(parts: Any) -> None:
    """Another rounding is another rest; P alone is no change of the column O; delta that reads an O
    in fewer bits than the column has is told apart; a kernel that is not known has no columns."""
    sites_of = parts["sites"].sites_of

    def emulated(**options: Any) -> Any:
        return sites_of(record("emulated", **FP32 | options))

    assert (emulated(scores="e8m9").S, emulated(scores="e8m9").rest) == ("e8m9", emulated().rest)
    assert emulated(rounding="stochastic").rest != emulated().rest
    fa2 = emulated(preset="fa2", algorithm="fa2")
    assert (fa2.O, fa2.dP, fa2.delta) == ("fp32", "fp32", "dO*cast O")
    assert fa2.rest != emulated().rest
    flash = sites_of(record("triton-flash"))
    assert (flash.S, flash.O, flash.dP, flash.delta) == ("fp32", "fp32", "fp32", "dO*cast O")
    rounded = sites_of(record("triton-flash", accumulator="working"))
    assert (rounded.O, rounded.delta, rounded.rest) == ("bf16", "dO*O", flash.rest)
    wide = sites_of(record("triton-flash", accumulator="working", delta_o="float32"))
    assert wide.rest != flash.rest
    assert sites_of(record("triton-flash", row_sum="working")).rest != flash.rest
    eager, fp32 = sites_of(record("baseline")), sites_of(record("baseline", attention="float32"))
    assert (eager.S, eager.dP, eager.delta) == ("bf16", "bf16", "dP*P")
    assert (fp32.S, fp32.dP, fp32.delta) == ("fp32", "fp32", "dP*P")
    assert sites_of(record("flex")) is None


def test_what_a_crossed_variant_rounds(parts: Any) -> None:
    """Each pass by its own kernel."""
    behind = {"backward_kernel": {"name": "triton-flash", "options": {"dp": "working"}}}
    crossed = record("triton-flash", behind, scores="working")
    assert parts["sites"].sites_of(crossed).S == "bf16"
    found = parts["sites"].sites_behind(crossed)
    assert (found.S, found.dP) == ("fp32", "bf16")
    assert parts["sites"].sites_behind(record("triton-flash")) is None


# --- basins, and trouble without a golden run ----------------------------------------------------


def test_what_leaves_the_plateau(runs: ModuleType) -> None:
    """A loss below 2.2 nats for 50 steps; a dip is none, and a run that comes back has left."""
    at = [2.5] * 10
    assert runs.left(series([*at, *[2.1] * 6, *at])) == 110
    assert runs.left(series([*at, *[2.1] * 5, *at])) is None
    assert runs.left(series([*at, *[2.2] * 30])) is None
    assert runs.left(series([*at, *[math.nan] * 9])) is None


@pytest.mark.parametrize(
    ("loss", "rose"),
    [
        ([2.5] * 10 + [2.85] * 9, 120),  # the mean over 25 steps is above by 0.2 from there on
        ([2.5] * 10 + [2.8] * 5 + [2.5] * 9, None),
        ([2.5] * 10 + [2.6] * 30, None),
        ([2.8] * 10 + [2.5] * 30, None),
        ([2.5] * 10 + [math.nan] * 9, 110),
    ],
)
def test_trouble_without_a_golden_run(
    runs: ModuleType, loss: list[float], rose: int | None
) -> None:
    """A mean over 25 steps, 0.2 nats above the least it had been, for 50 steps."""
    made = runs.first(runs.stretches(runs.rise(series(loss))) > runs.BROKEN_BY)
    assert made == rose


def test_basins(runs: ModuleType) -> None:
    """Whether a run and its golden run both left; the golden one is the role's, or who is named."""
    learns: Curve = lambda seed, step: 2.5 if step < 100 + 100 * seed else 1.5  # noqa: E731
    losses: dict[str, Curve] = {
        "fp32": learns, "stays": lambda seed, step: 2.5, "other": lambda seed, step: 2.4,
    }  # fmt: skip
    options = {"stays": {"dp": "working"}, "other": {"pv": "working"}}
    made = report(losses, options=options, seeds=(0, 9))
    found = {(r.variant, r.seed): r for r in runs.runs_of([made])}
    assert {key: r.left for key, r in found.items() if r.left} == {("fp32", 0): 100}
    assert {key for key, r in found.items() if not r.one_basin} == {("stays", 0), ("other", 0)}
    assert [key[0] for key, r in found.items() if r.golden] == ["fp32", "fp32"]
    named = {(r.variant, r.seed): r for r in runs.runs_of([made], "other")}
    assert named["stays", 0].late == pytest.approx(0.1)
    assert named["stays", 0].one_basin
    assert not named["fp32", 0].one_basin


def test_a_run_that_was_stopped(parts: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Its journal is read, up to a last line that was cut off, and the page says so."""
    path = ROOT / "configs" / "train" / "unstable.yaml"
    request = resolve(read_yaml(path, TrainConfig), path.name)
    names = ["none, dO*O", "dP, dO*O"]
    rows = [
        {**report({n: smooth}, seeds=(0,)).rows[i].model_dump(mode="json")}
        for n in names for i in range(30)
    ]  # fmt: skip
    lines = [{"header": {"request": request.measured()}}, {"task": "a", "rows": rows}]
    other = {"task": "b", "rows": [{"seed": 0, "variant": names[0], "of": "weights"}]}
    text = "\n".join(json.dumps(line) for line in [*lines, other])
    (tmp_path / "rows.jsonl").write_text(text + '\n{"task": "c", "rows": [{"se')
    source = parts["runs"].source_of(tmp_path)
    found = {run.variant: run for run in parts["runs"].runs_of([source])}
    assert set(found) == set(names)
    assert found["dP, dO*O"].sites.dP == "bf16"
    assert found["dP, dO*O"].last == 290
    monkeypatch.setattr(sys, "argv", ["instability.py", str(tmp_path)])
    parts[""].main()
    assert f"Stopped: {tmp_path.name}, at step 290 of 1000." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broke", "median"),
    [
        ((100, 120, 140, None, None), "140"),
        ((100, 120, None, None, None), "> 400"),
        ((None,) * 5, "> 400"),
        ((50,), "50"),
    ],
)
def test_the_median_step(parts: Any, broke: tuple[int | None, ...], median: str) -> None:
    """The middle one of five; where fewer than half broke, later than any was watched."""

    def loss(seed: int, step: int) -> float | None:
        at = broke[seed]
        return smooth(seed, step) + (1.0 if at is not None and step >= at else 0.0)

    made = report({"fp32": smooth, "x": loss}, seeds=tuple(range(len(broke))))
    found = [run for run in parts["runs"].runs_of([made]) if run.variant == "x"]
    assert parts["page"].median_step(found) == median


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


def test_a_signal_that_rises_with_the_loss_warns_of_nothing(parts: Any) -> None:
    """An alarm at the break or after is none, a single odd row is none, and the warm-up is not
    looked at."""
    for norms in (
        lambda seed, step: 9.0 if step >= 190 else 1.0,
        lambda seed, step: 9.0 if step == 100 else 1.0,
        lambda seed, step: 9.0 if step < 10 else 1.0,
    ):
        rule = warned(parts, norms)
        assert (rule.fixed.warned.some, rule.fixed.warned.of) == (0, 3)
        assert not rule.chosen


def test_a_norm_that_is_not_finite_alarms(parts: Any) -> None:
    """It is above every threshold."""
    rule = warned(parts, lambda seed, step: None if step >= 150 else 1.0)
    assert rule.fixed.leads == (50, 50, 50)


def test_a_threshold_that_lets_one_run_alarm(parts: Any) -> None:
    """An unbroken run of seed 2 has norms of 20, above all of those that break: no threshold above
    it warns of any run, and the best one is that of the other unbroken runs."""
    made = report({"fp32": smooth, "x": breaking(200)}, seeds=(0, 1, 2))
    rows = tuple(
        row.model_copy(update={"grad_norm": 5.0 if row.variant == "x" else 20.0 ** (row.seed == 2)})
        for row in made.rows
    )
    runs = parts["runs"].runs_of([made.model_copy(update={"rows": rows})])
    found = parts["warnings"].thresholds(runs, "gradient norm", lambda run: run.broke)
    assert found == {"none": 20.0, "best": 1.0}
    rules = parts["warnings"].rules(runs, (0, 1, 2), lambda run: run.broke)
    (best,) = (rule for rule in rules if rule.chosen)
    assert (best.signal, best.kind) == ("gradient norm", "best")
    assert (best.fixed.warned.some, best.fixed.false.some, best.fixed.false.of) == (3, 1, 3)
    assert best.fixed.index == pytest.approx(1 - 1 / 3)


def diagnosis(made: TrainReport, steps: tuple[int, ...] = (200, 100)) -> DiagnoseReport:
    """Of seed 0 of the variant `dP, dO*O`, and of a model that is no one's."""
    heads = [
        HeadRow(
            checkpoint=name, case="c", head=head, rows=8, pv=Bias(), out=Bias(),
            delta=(DeltaError(formula="dO*O", t=-float(head)),),
            ds_row_sum=step / 1000 + head, dw_q_error=0.5, dw_q_predicted=0.125 * head,
        )
        for step in steps for head in (0, 1, 4)
        for name in (f"runs/checkpoints/dP-dO-O-seed0-step{step}", "elsewhere/model")
    ]  # fmt: skip
    return DiagnoseReport(
        provenance=made.provenance, request={}, attention={}, checkpoints=(), heads=tuple(heads),
        summary=DiagnoseSummary(answer=(), ranking=()),
    )  # fmt: skip


def test_diagnose_gives_signals(parts: Any) -> None:
    """The largest over heads and the median, by the checkpoint's directory; other checkpoints are
    no one's, and a run of another setting has none."""
    losses: dict[str, Curve] = {"fp32": smooth, "dP, dO*O": breaking(200)}
    made = report(losses, seeds=(0,))
    runs = parts["runs"].runs_of([made, report(losses, seeds=(0,), rates=dict.fromkeys(losses, 1))])
    found = parts["warnings"].with_diagnosis(runs, [diagnosis(made)])
    signals = [run.signals for run in found if run.variant == "dP, dO*O"]
    assert signals[0]["diagnose: dS row sum"].to_dict() == {100: 4.1, 200: 4.2}
    assert signals[0]["diagnose: dS row sum, median head"].to_dict() == {100: 1.1, 200: 1.2}
    assert signals[0]["diagnose: delta's part of it, median head"].to_dict() == {
        100: 0.25,
        200: 0.25,
    }
    others = [signals[1], *(run.signals for run in found if run.variant == "fp32")]
    assert not any(name.startswith("diagnose") for own in others for name in own)


def test_what_diagnose_says(parts: Any) -> None:
    """The median head of each step beside what is rounded, and how many errors are of one sign."""
    losses: dict[str, Curve] = {"fp32": smooth, "dP, dO*O": breaking(200)}
    made = report(losses, options={"dP, dO*O": HIGH["dP"]}, seeds=(0,))
    runs = parts["warnings"].with_diagnosis(parts["runs"].runs_of([made]), [diagnosis(made)])
    text = parts["diagnosis"].said(runs)
    assert "| dP, dO*O | fp32 | fp32 | bf16 | dO*O | 1.1 | 1.2 | 200 |" in text
    assert "Of 2 checkpoints 2 have a head" in text
    assert "the largest |t| is 4.0" in text
    assert parts["diagnosis"].said(parts["runs"].runs_of([made])).startswith("No checkpoint")


# --- effects -------------------------------------------------------------------------------------


def test_a_factorial_is_a_regression(parts: Any) -> None:
    """Every effect is twice the coefficient that least squares gives its product of signs."""
    drawn = np.random.default_rng(1)
    levels = list(itertools.product((False, True), repeat=3))
    cells = {c: {seed: float(drawn.normal()) for seed in range(4)} for c in levels}
    found = parts["effects"].factorial(cells, ("a", "b", "c"))
    signs = np.array([[1 if x else -1 for x in c] for c in levels])
    names = [n for size in (1, 2, 3) for n in itertools.combinations(range(3), size)]
    design = np.column_stack([np.ones(8), *(signs[:, n].prod(axis=1) for n in names)])
    for seed in range(4):
        y = np.array([cells[c][seed] for c in levels])
        coefficients = np.linalg.lstsq(design, y, rcond=None)[0][1:]
        assert [v[seed] for v in found.values()] == pytest.approx(2 * coefficients)
    assert list(found) == ["a", "b", "c", "a x b", "a x c", "b x c", "a x b x c"]


def test_a_factorial_with_a_hole_is_none(parts: Any) -> None:
    """Effects of what is left would not be those of its factors."""
    with pytest.raises(ValueError, match="not full"):
        parts["effects"].factorial({(False,): {0: 1.0}}, ("a",))


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


def test_a_pair_needs_both_in_one_basin(parts: Any) -> None:
    """The loss of runs on the plateau pairs those that stayed, and of runs off it those that left;
    a run that is not finite is left out and counted."""
    losses: dict[str, Curve] = {
        "fp32": lambda seed, step: 1.5 if seed < 2 else 2.5,
        "S": lambda seed, step: 2.6 if seed else 1.7,
    }
    options = {"S": HIGH["S"]}
    made = parts["runs"].runs_of([report(losses, options=options, seeds=(0, 1, 2, 3))])
    found = {e.response: e for e in parts["effects"].effects(made) if e.kind == "pair"}
    off, on = found["loss, both off it"], found["loss, both on the plateau"]
    assert (off.by_seed, off.lost) == (((0, pytest.approx(0.2)),), 3)
    assert [seed for seed, _ in on.by_seed] == [2, 3]
    assert on.mean[0] == pytest.approx(0.1)
    assert found["left the plateau"].mean[0] == -0.25
    assert "broke" not in found  # the golden run is one of the pair
    losses["S"] = lambda seed, step: None if seed == 1 and step > 300 else 2.6
    made = parts["runs"].runs_of([report(losses, options=options, seeds=(0, 1, 2, 3))])
    pair = next(e for e in parts["effects"].effects(made) if e.response == "loss, nats")
    assert (pair.seeds, pair.lost) == (3, 1)


def test_passes_are_a_factorial(parts: Any) -> None:
    """Where only the second kernel's backward costs anything, and 0.4."""
    other = {"name": "emulated", "options": {**FP32, **HIGH["dP"]}}
    own = {"name": "emulated", "options": FP32}
    losses: dict[str, Curve] = {
        "fp32": smooth, "dP": breaking(50, 0.4), "a": breaking(50, 0.4), "b": smooth,
    }  # fmt: skip
    made = report(losses, options={"dP": HIGH["dP"], "b": HIGH["dP"]})
    behind = {"a": other, "b": own}
    variants = [
        v.model_copy(update={"differs": {"backward_kernel": behind[v.name]}})
        if v.name in behind else v
        for v in made.variants
    ]  # fmt: skip
    made = made.model_copy(update={"variants": tuple(variants)})
    found = parts["effects"].effects(parts["runs"].runs_of([made]))
    means = {e.factor: e.mean[0] for e in found if e.kind == "passes" and "nats" in e.response}
    assert means == pytest.approx(
        {"forward": 0.0, "backward": 0.4, "forward x backward": 0.0}, abs=1e-9
    )


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
