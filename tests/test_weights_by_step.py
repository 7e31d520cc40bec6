"""`numdev weights` over the steps of a training: what is compared with what, by layer and
kind, and what is said to stand out; beside numpy's and scipy's arithmetic on the stored
tensors."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ran, unstarted
from safetensors.torch import load_file, save_file
from scipy.stats import gmean, wasserstein_distance

from numdev import report
from numdev.errors import UsageError
from numdev.report.io import with_digest
from numdev.studies.training.weights import view
from numdev.studies.training.weights.chance_comparison import (
    LIMITS,
    answer_sentences,
    chance_comparisons,
)
from numdev.studies.training.weights.distances_over_steps import (
    QUANTILES,
    layer_by_name,
    weights_over_steps,
)
from numdev.studies.training.weights.report import (
    ChanceComparison,
    RunRecord,
    WeightsCell,
    WeightsReport,
)
from numdev.studies.training.weights.run_checkpoints import (
    find_runs,
    has_runs,
    training_seed,
    training_step,
)
from numdev.studies.training.weights.study import weights

REPORTS = Path(__file__).parent / "data" / "reports"
NAMES = {
    "embed_tokens.weight": (20, 8),
    "layers.0.self_attn.q_proj.weight": (8, 8),
    "layers.0.self_attn.k_proj.weight": (4, 8),
    "layers.0.mlp.up_proj.weight": (16, 8),
    "layers.1.self_attn.q_proj.weight": (8, 8),
    "layers.1.mlp.up_proj.bias": (16,),
    "norm.weight": (8,),
}
RUNS = {
    "baseline": ("golden", None, 0.0), "flash": ("flash", None, 1.0),
    "fp32": ("low_precision", None, 1.2), "repeat": ("null_repeat", None, 0.0),
    "re-rounded 1": ("null_rounding", 1.0, 1.0), "re-rounded 2": ("null_rounding", 1.0, 0.9),
    "re-rounded at 16": ("null_rounding", 16.0, 9.0), "ulp": ("null_ulp", None, 0.8),
}  # fmt: skip
"""Role, dose, and the size of the difference from the baseline."""
SEEDS = (0, 1, 2)
PLACES = [(seed, step) for seed in SEEDS for step in (1, 4)]
MOVED = "layers.1.self_attn.q_proj.weight"
"""Where flash is ten times as far as chance, at step 4."""


def tensors(run: str, seed: int, step: int) -> dict[str, torch.Tensor]:
    """Normal weights, and a normal difference of the run's size times 1e-3; one bias of
    zeros."""
    same = torch.Generator().manual_seed(100 * seed + step)
    computed = torch.Generator().manual_seed(hash_of(run) + 100 * seed + step)
    created = {}
    for name, shape in NAMES.items():
        base, gap = (torch.randn(shape, generator=g) for g in (same, computed))
        size = RUNS[run][2] * (10 if (run, name, step) == ("flash", MOVED, 4) else 1)
        created[name] = (
            torch.zeros(shape) if name.endswith("bias") else base + 1e-3 * size * gap
        )
    return created


def hash_of(run: str) -> int:
    return 1000 * (1 + list(RUNS).index(run))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training that kept all runs of three seeds at two steps."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    for name, (role, times, _) in RUNS.items():
        for seed, step in PLACES:
            path = (
                directory
                / "checkpoints"
                / f"{name.replace(' ', '-')}-seed{seed}-step{step}"
            )
            path.mkdir(parents=True)
            save_file(tensors(name, seed, step), path / "model.safetensors")
            variant = {"name": name, "role": role, "times": times or 1.0}
            asked = {"variants": [{"name": run} for run in RUNS]}
            about = {"variant": variant, "seed": seed, "step": step, "request": asked}
            (path / "training.json").write_text(json.dumps(about))
    return directory


@pytest.fixture(scope="module")
def measured(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> WeightsReport:
    return weights_over_steps(
        [str(trained)], tmp_path_factory.mktemp("out"), device="cpu"
    )


def stored(trained: Path, run: str, seed: int, step: int) -> dict[str, np.ndarray]:
    folder = trained / "checkpoints" / f"{run.replace(' ', '-')}-seed{seed}-step{step}"
    read = load_file(folder / "model.safetensors")
    return {name: x.double().numpy().ravel() for name, x in read.items()}


KIND = {
    "embed_tokens": "embedding",
    "self_attn": "attention",
    "mlp": "mlp",
    "norm": "norm",
}


def chosen(layer: Any, kind: str) -> list[str]:
    """The tensors of a layer and kind, by a rule of its own."""
    names = []
    for name in NAMES:
        parts = name.split(".")
        computed = int(parts[1]) if parts[0] == "layers" else "none"
        what = next(kind for word, kind in KIND.items() if word in parts)
        if layer in ("all", computed) and kind in ("all", what):
            names.append(name)
    return names


def distances(trained: Path, c: Any, run: str, seed: int) -> dict[str, float]:
    a, b = (stored(trained, name, seed, c.step) for name in (run, "baseline"))
    names = chosen(c.layer, c.kind)
    gaps = np.concatenate([np.abs(a[n] - b[n]) for n in names])
    w1 = [wasserstein_distance(a[n], b[n]) for n in names]
    return {
        "mean_abs": gaps.mean(),
        "max_abs": gaps.max(),
        "mean_w1": np.average(w1, weights=[a[n].size for n in names]),
    }


def test_every_cell_is_numpys_and_scipys(measured: WeightsReport, trained: Path) -> None:
    """Of all runs, seeds and steps: everything, each layer, kind, and place; from the
    stored tensors. fp64 sums of some hundred terms: n u below 1e-13."""
    wheres = {(c.layer, c.kind) for c in measured.cells}
    assert len(wheres) == 1 + 3 + 4 + 6
    assert len(measured.cells) == 14 * len(PLACES) * (len(RUNS) - 1)
    for c in measured.cells:
        wanted = distances(trained, c, c.of, c.seed)
        for name, value in wanted.items():
            assert getattr(c, name) == pytest.approx(value, rel=1e-12), (
                c.of,
                c.layer,
                name,
            )
        assert c.mean_abs != pytest.approx(wanted["mean_abs"] + 1e-9, rel=1e-12)


def test_tensors_of_zeros_count_as_equal_nowhere(measured: WeightsReport) -> None:
    """The bias that is 0 in all sets is no evidence: alone it has no share of equal
    elements, and in the repeated run, whose weights are the baseline's, 6 of 7 tensors
    are identical."""
    at = {(c.of, c.seed, c.step, c.layer, c.kind): c for c in measured.cells}
    alone = at["repeat", 0, 1, 1, "mlp"]
    assert (alone.equal, alone.identical, alone.zeros) == (None, 0, 1)
    assert alone.nulls["equal"] == "0 in both"
    whole = at["repeat", 0, 1, "all", "all"]
    assert (whole.equal, whole.identical, whole.zeros) == (1.0, 6, 1)
    assert at["flash", 0, 1, "all", "all"].equal == 0.0
    words = "\n".join(measured.summary.answer)
    assert (
        "repeat has baseline's weights at every step: every element of the "
        "tensors that are not "
    )
    assert "0 in both (1 are)." in words


@pytest.mark.slow
def test_standings_are_numpys_and_scipys(measured: WeightsReport, trained: Path) -> None:
    """Values, those of the nulls at one floor, their ratio with its ends over seeds, and
    the margin over the farthest null of at most one floor, which the one of 16 floors is
    not."""
    assert {s.variant for s in measured.standings} == {"flash", "fp32"}
    for s in measured.standings:
        computed = [distances(trained, s, s.variant, seed)[s.metric] for seed in SEEDS]
        nulls = {
            name: [distances(trained, s, name, seed)[s.metric] for seed in SEEDS]
            for name in ("re-rounded 1", "re-rounded 2", "ulp")
        }
        if computed[0] == 0:
            assert (s.value, s.ratio, s.margin, s.stands_out) == (None, None, None, None)
            continue
        usual = [
            gmean(x)
            for x in zip(nulls["re-rounded 1"], nulls["re-rounded 2"], strict=True)
        ]
        ratios = [a / b for a, b in zip(computed, usual, strict=True)]
        margin = min(computed[i] / max(x[i] for x in nulls.values()) for i in SEEDS)
        assert (s.value, s.null) == pytest.approx((gmean(computed), gmean(usual)))
        assert (s.ratio, s.least, s.most) == pytest.approx(
            (gmean(ratios), min(ratios), max(ratios))
        )
        assert s.margin == pytest.approx(margin)
        is_place = "all" not in (s.layer, s.kind)
        assert s.stands_out == (margin > LIMITS[s.metric] if is_place else None)


def test_what_stands_out_is_the_first_sentence(measured: WeightsReport) -> None:
    """Flash's one place, planted at step 4; low precision, which is nowhere beyond
    chance; early ratios; and all that is shown of quantiles is of what stands out."""
    out = [s for s in measured.standings if s.stands_out]
    assert {(s.variant, s.step, s.layer, s.kind) for s in out} == {
        ("flash", 4, 1, "attention")
    }
    margin = next(s.margin for s in out if s.metric == "mean_abs")
    first = measured.summary.answer[0]
    assert first == (
        "flash stands out in layer 1 attention: at step 4 it is at least "
        f"{margin:.2f} times as "
        "far from baseline as the farthest null there, in the mean, in every seed; "
        "1 of 5 places "
        "(the tensors of one kind in one layer) stand out, at step 4."
    )
    assert measured.summary.answer[1] == (
        "fp32 stands out nowhere: in none of 5 places (the tensors of one kind in "
        "one layer) is it "
        "farther from baseline than chance by the rule, at steps 1 to 4."
    )
    assert {q.tensor for q in measured.quantiles} == {MOVED}


def test_quantiles_are_those_of_the_stored_values(
    measured: WeightsReport, trained: Path
) -> None:
    """By sorting: 64 values, of which quantile q is between the two at 63 q."""

    def level(run: str, q: float) -> float:
        ordered = sorted(stored(trained, run, 0, 4)[MOVED])
        low = int(63 * q)
        high = min(low + 1, 63)
        return ordered[low] + (63 * q - low) * (ordered[high] - ordered[low])

    assert [q.quantile for q in measured.quantiles] == list(QUANTILES)
    for q in measured.quantiles:
        base = level("baseline", q.quantile)
        nulls = [
            level(n, q.quantile) - base for n in ("re-rounded 1", "re-rounded 2", "ulp")
        ]
        assert q.against == pytest.approx(base)
        assert q.shift == pytest.approx(level("flash", q.quantile) - base)
        assert (q.null_least, q.null_most) == pytest.approx((min(nulls), max(nulls)))


def test_quantiles_of_the_first_seed_that_has_the_tensor(tmp_path: Path) -> None:
    """Where the tensor was not kept of the first seed, three others have it stand out."""
    for seed in (0, 1, 2, 3):
        for run in ("baseline", "flash", "re-rounded 1", "re-rounded 2"):
            stored_of = tensors(run, seed, 4)
            if (run, seed) == ("flash", 0):
                del stored_of[MOVED]
            path = tmp_path / "run" / "checkpoints" / f"{run}-seed{seed}"
            path.mkdir(parents=True)
            save_file(stored_of, path / "model.safetensors")
            role, times, _ = RUNS[run]
            about = {
                "variant": {"name": run, "role": role, "times": times},
                "seed": seed,
                "step": 4,
            }
            (path / "training.json").write_text(json.dumps(about))
    result = weights_over_steps([str(tmp_path / "run")], tmp_path / "out", device="cpu")
    assert {(q.variant, q.seed, q.tensor) for q in result.quantiles} == {
        ("flash", 1, MOVED)
    }


def test_one_metric_over_another_is_said_of_early_steps(
    measured: WeightsReport, trained: Path
) -> None:
    """Flash over low precision by place, geometric means over seeds and early steps,
    their ends."""
    assert measured.early == (1, 4)
    places = {(c.layer, c.kind) for c in measured.cells if "all" not in (c.layer, c.kind)}
    ratios = []
    for layer, kind in places - {(1, "mlp")}:
        each = []
        for seed, step in PLACES:
            c = CellLike(layer, kind, step)
            computed, other = (
                distances(trained, c, n, seed)["mean_w1"] for n in ("flash", "fp32")
            )
            each.append(computed / other)
        ratios.append(gmean(each))
    ends = f"{min(ratios):.2f} to {max(ratios):.2f} in mean W1"
    [sentence] = [s for s in measured.summary.answer if s.startswith("flash over fp32")]
    assert sentence.startswith("flash over fp32, at steps 1 to 4: ")
    assert ends in sentence
    assert sentence.endswith("over places, where both moved (3 seeds).")


class CellLike:
    def __init__(self, layer: Any, kind: str, step: int) -> None:
        self.layer, self.kind, self.step = layer, kind, step


def cells(values: dict[str, float], seeds: Iterable[int] = SEEDS) -> list[WeightsCell]:
    """One place, in which runs have these distances in every metric and seed."""
    numbers: dict[str, Any] = dict.fromkeys(WeightsCell.model_fields)
    same = {
        **numbers, "against": "baseline", "elements": 9, "nonfinite_of": 0, "identical": 0,
        "nonfinite_against": 0, "tensors": 1, "zeros": 0, "nulls": {}, "step": 1, "layer": 0,
        "kind": "mlp", "equal": 0.5,
    }  # fmt: skip
    return [
        WeightsCell(**{**same, "of": run, "seed": seed, **dict.fromkeys(LIMITS, x)})
        for run, x in values.items()
        for seed in seeds
    ]


def judged(
    nulls: dict[str, float], flash: float, roles: dict[str, str]
) -> list[ChanceComparison]:
    runs = [
        RunRecord(name="baseline", role="golden"),
        RunRecord(name="flash", role="flash"),
    ]
    runs += [RunRecord(name=name, role=roles[name]) for name in nulls]
    return list(chance_comparisons(runs, cells({"flash": flash, **nulls})))


@pytest.mark.parametrize(("flash", "names"), [
    (1.49, set()), (1.51, {"mean_abs", "mean_w1"}), (2.99, {"mean_abs", "mean_w1"}),
    (3.01, set(LIMITS)), (0.0, set()),
])  # fmt: skip
def test_the_rule(flash: float, names: set[str]) -> None:
    """More than 1.5 times the farthest null by the mean and W1, 3 times by the
    largest."""
    roles = {"a": "null_rounding", "b": "null_ulp"}
    result = judged({"a": 1.0, "b": 0.5}, flash, roles)
    assert {s.metric for s in result if s.stands_out} == names
    assert all(s.stands_out is not None for s in result)


def test_too_few_nulls_judge_nothing() -> None:
    """One null, or none: how far chance may go is not known, and nothing is said to stand
    out, nor to be within it."""
    one, none = (
        "1 null run of at most one floor moves",
        "0 null runs of at most one floor move",
    )
    for nulls, words in (({"a": 1.0}, one), ({}, none)):
        result = judged(nulls, 100.0, {"a": "null_ulp"})
        assert {s.stands_out for s in result} == {None}
        runs = [
            RunRecord(name="baseline", role="golden"),
            RunRecord(name="flash", role="flash"),
        ]
        first = next(
            answer_sentences(runs, cells({"flash": 100.0, **nulls}), result, (1,))
        )
        assert first == (
            f"flash: where it stands out is not judged: {words} it in a seed, and "
            "the rule needs 2."
        )


def test_what_chance_does_not_move_is_said_to_be_unjudged() -> None:
    """A place that flash moves and no null does has no margin; it is named, not passed
    over."""
    runs = [
        RunRecord(name="baseline", role="golden"),
        RunRecord(name="flash", role="flash"),
    ]
    runs += [RunRecord(name=name, role="null_ulp") for name in "ab"]
    rows = cells({"flash": 1.0, "a": 1.0, "b": 1.0})
    still = cells({"flash": 0.25, "a": 0.0, "b": 0.0})
    rows += [row.model_copy(update={"kind": "norm"}) for row in still]
    result = list(chance_comparisons(runs, rows))
    assert [s.stands_out for s in result if s.kind == "norm"] == [None] * 3
    assert list(answer_sentences(runs, rows, result, (1,)))[:2] == [
        "flash stands out nowhere: in none of 1 places (the tensors of one kind in "
        "one layer) is "
        "it farther from baseline than chance by the rule, at step 1.",
        (
            "flash moves layer 0 norm by at most 0.25, where fewer than 2 nulls do: not "
            "judged there."
        ),
    ]


def test_a_seed_within_chance_is_enough_not_to_stand_out() -> None:
    runs = [
        RunRecord(name="baseline", role="golden"), RunRecord(name="flash", role="flash"),
        RunRecord(name="a", role="null_ulp"), RunRecord(name="b", role="null_ulp"),
    ]  # fmt: skip
    rows = cells({"flash": 50.0, "a": 1.0, "b": 1.0}, seeds=(0, 1))
    assert {(s.stands_out, s.why) for s in chance_comparisons(runs, rows)} == {
        (None, "2 seeds, and the rule needs 3")
    }
    more = cells({"flash": 50.0, "a": 1.0, "b": 1.0}, seeds=(2,))
    assert all(s.stands_out for s in chance_comparisons(runs, rows + more))
    within = cells({"flash": 1.0, "a": 1.0, "b": 1.0}, seeds=(2,))
    assert {s.stands_out for s in chance_comparisons(runs, rows + within)} == {False}


def test_equal_runs_are_finite_on_both_sides() -> None:
    """A run that equals the first where both are finite does not equal it elsewhere."""
    runs = [
        RunRecord(name="baseline", role="golden"), RunRecord(name="a", role="null_repeat")
    ]  # fmt: skip
    about = {"layer": "all", "kind": "all", "equal": 1.0}
    equal = [row.model_copy(update=about) for row in cells({"a": 0.0})]
    assert "a has baseline's weights at every step" in "".join(
        answer_sentences(runs, equal, [], (1,))
    )
    for lost in ("nonfinite_of", "nonfinite_against"):
        rows = [*equal[:-1], equal[-1].model_copy(update={lost: 3})]
        assert list(answer_sentences(runs, rows, [], (1,))) == []


# --- which runs -----------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: ran(capsys, "weights", *map(str, arguments), "-o", "out")


def test_a_training_and_its_lists_are_the_same_numbers(
    run: Run, trained: Path, measured: WeightsReport
) -> None:
    """Checkpoints as a pattern, as a list, and as a directory of their own; nulls named
    by --null. Numbers are those of the training's own report."""
    folder = trained / "checkpoints"
    for path in folder.glob("re-rounded-1-seed*"):
        shutil.copytree(path, Path("null") / path.name)
    listed = ",".join(map(str, sorted(folder.glob("re-rounded-2-seed*"))))
    named = [folder / f"{name}-seed*" for name in ("baseline", "flash", "ulp")]
    code, out, _ = run(*named[:2], "--null", "null", "--null", listed, "--null", named[2])
    assert code == 0
    assert f"{named[1]} stands out in layer 1 attention: at step 4" in " ".join(
        out.split()
    )
    again = report.read(Path("out"))
    assert [r.null for r in again.runs] == [False, False, True, True, True]
    theirs = {
        (c.seed, c.step, c.layer, c.kind): c for c in measured.cells if c.of == "flash"
    }
    ours = {
        (c.seed, c.step, c.layer, c.kind): c for c in again.cells if c.of == str(named[1])
    }
    assert ours.keys() == theirs.keys()
    assert all(ours[at].mean_w1 == theirs[at].mean_w1 for at in ours)


def test_the_terminal_the_page_and_the_json(run: Run, trained: Path) -> None:
    """All three distances side by side with chance's; W1 by the name that says which it
    is."""
    code, out, _ = run(trained)
    assert code == 0
    words = " ".join(out.split())
    assert words.startswith("flash stands out in layer 1 attention")
    assert (
        "Quantiles of layers.1.self_attn.q_proj.weight, flash at step 4, seed 0" in words
    )
    page = Path("out/report.html").read_text()
    for text in (
        "flash, step 4",
        "mean W1",
        "Stands out (!)",
        "null: re-rounded at 16 floors",
    ):
        assert text in page
    assert (
        Path("out/standings.csv")
        .read_text()
        .startswith("variant,role,layer,kind,step,metric")
    )


def test_what_is_no_training_is_one_line(run: Run, trained: Path) -> None:
    """Nothing kept; two lists in one directory; one run; a set of weights beside a run;
    --null of sets of weights."""
    Path("empty/checkpoints").mkdir(parents=True)
    Path("empty/report.json").write_text("{}")
    torch.save({"w": torch.ones(2)}, "a.pt")
    pattern = trained / "checkpoints" / "flash-seed0-*"
    for arguments, words in (
        (("empty",), "keeps no checkpoints; a training keeps them with `checkpoints:`"),
        ((trained, pattern), "8 checkpoints are from step 1 of seed 0"),
        ((pattern, pattern), "is given twice"),
        ((pattern, "a.pt"), "a.pt: expected checkpoints by step"),
        (("a.pt", "a.pt", "--null", "a.pt"), "--null: expected runs of several steps"),
    ):
        code, out, err = run(*arguments)
        assert (code, out, unstarted(err).count("\n")) == (2, "", 1), arguments
        assert words in err


@pytest.mark.parametrize(
    "change",
    [
        {"request": None}, {"request": 3}, {"request": {"variants": None}},
        {"request": {"variants": [3, {"role": "golden"}]}}, {"request": {"variants": [{"name": []}]}},
    ],
)  # fmt: skip
def test_runs_whose_request_does_not_name_them(
    trained: Path, tmp_path: Path, change: Any
) -> None:
    """They are those of the checkpoints; the golden one first."""
    for checkpoint in (trained / "checkpoints").glob("*-seed0-step1"):
        copy = tmp_path / "checkpoints" / checkpoint.name
        copy.mkdir(parents=True)
        about = json.loads((checkpoint / "training.json").read_text())
        (copy / "training.json").write_text(json.dumps({**about, **change}))
    names = [run.name for run in find_runs([str(tmp_path)]).runs]
    assert (names[0], sorted(names)) == ("baseline", sorted(RUNS))
    (copy / "training.json").write_text(json.dumps({**about, "seed": math.inf}))
    with pytest.raises(UsageError, match="does not say of which variant, seed and step"):
        find_runs([str(tmp_path)])


def test_bounds_lead_to_their_runs_checkpoints(trained: Path, tmp_path: Path) -> None:
    """Whether they were made from the run's directory, or from the report in it."""
    bounds = json.loads((REPORTS / "bounds.json").read_text())
    for run in (trained, trained / "report.json"):
        bounds["request"]["run"] = str(run)
        bounds.pop("digest", None)
        text = with_digest(json.dumps(bounds, separators=(",", ":")).encode())
        (tmp_path / "report.json").write_bytes(text)
        (trained / "report.json").write_text("{}")
        assert len(find_runs([str(tmp_path)]).runs) == len(RUNS)
    (trained / "report.json").unlink()


def test_what_was_not_kept_is_named(trained: Path, tmp_path: Path) -> None:
    """A run that lacks a step is compared where it is; a step without the golden run
    nowhere."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "checkpoints" / "flash-seed1-step4")
    shutil.rmtree(copy / "checkpoints" / "baseline-seed0-step1")
    result = weights_over_steps([str(copy)], tmp_path / "out", device="cpu")
    assert {(c.seed, c.step) for c in result.cells} == {*PLACES} - {(0, 1)}
    flash = {(c.seed, c.step) for c in result.cells if c.of == "flash"}
    assert flash == {*PLACES} - {(0, 1), (1, 4)}
    missing = [r.words for r in result.remarks if r.what == "missing"]
    assert missing == [
        "step 1, seed 0: not kept of baseline",
        "step 4, seed 1: not kept of flash",
    ]
    titles = [getattr(node, "title", "") for node in view.blocks(result)]
    assert titles.count("What could not be compared, or needs a word") == 1
    assert any(
        line.startswith("Missing in copy: step 1, seed 0")
        for line in result.summary.answer
    )


def test_steps_and_layers_by_name(tmp_path: Path) -> None:
    assert [training_step(Path(name)) for name in ("x-step12.pt", "checkpoint-7", "model.pt")] == [
        12, 7, None,
    ]  # fmt: skip
    assert [training_seed(Path(name)) for name in ("x-seed3-step5", "step5")] == [3, 0]
    names = (
        "transformer.h.3.attn.c_attn.weight",
        "model.embed_tokens.weight",
        "0.weight",
    )
    assert [layer_by_name(name) for name in names] == [3, "none", 0]
    assert not has_runs(["demo", str(tmp_path)])
    for nulls in ((), ("a",)):
        with pytest.raises(UsageError, match="weights: expected a run, got none"):
            find_runs([], nulls)
    with pytest.raises(UsageError, match="weights: expected a set of weights, got none"):
        weights([], tmp_path / "out")
    with pytest.raises(UsageError, match="no such file or directory"):
        find_runs([str(tmp_path / "a-*"), "b,c"])
