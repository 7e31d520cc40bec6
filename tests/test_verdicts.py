"""What must not pass, each beside a sound twin that does: from the command line, run and
gate."""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import gate_rows
import models
import pytest
import torch
import transformers
import yaml
from loaded import ROOT, load
from planted import CATALOGUE, verdicts
from safetensors.torch import load_file, save_file
from test_effects import plant_eager_scale
from transformers.models.llama import modeling_llama as llama
from verdict_runs import Ran, called, gated, having, measured

import numdev
from numdev.errors import UsageError
from numdev.gate import rules as rule_book
from numdev.gate.rules import Rules, Threshold, read_rules
from numdev.metrics import metrics_by_name
from numdev.metrics.metrics_by_name import ESTIMATED, MAXIMA, METRICS, TESTED, WHOLE
from numdev.report.io import with_digest

sys.path.insert(0, str(ROOT / "scripts"))  # where altered_reports finds its neighbour
altered_reports = load("scripts/altered_reports.py")

AUDIT = ("audit", "demo", "--layers", "0", "--length", "32", "--sequences", "2")
INVARIANCE = ("invariance", "demo", "--layers", "0", "--length", "32", "--no-logits")
KINDS = ("audit", "effects", "invariance")


def kernels(*names: str) -> list[str]:
    """`--kernel` for each of these of the catalogue."""
    return [word for name in names for word in ("--kernel", CATALOGUE[name].kernel.name)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return models.saved("llama", tmp_path_factory.mktemp("models"))


def effects(target: Path, folder: Path, *more: object, sequences: int = 3) -> Ran:
    flags = ("--length", "16", "--sequences", sequences, "--no-sites", "--gate")
    return measured(folder, "effects", target, *flags, *more)


def command(kind: str, target: Path) -> tuple[object, ...]:
    """A small run of a kind."""
    if kind == "effects":
        return ("effects", target, "--length", "16", "--sequences", "3", "--no-sites")
    return {"audit": AUDIT, "invariance": INVARIANCE}[kind]


def rules_in(folder: Path, **content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", **content}))
    return file


# --- estimates without an interval ----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_sampled_rows_decide_nothing(rows: int, tmp_path: Path) -> None:
    """A kernel whose error is 2.05 times the predicted one is NOT JUDGED, with what was
    measured."""
    ran = measured(tmp_path, *AUDIT, *kernels("twice"), "--rows", rows, "--gate")
    assert ran.code == 3
    assert "NOT JUDGED" in ran.out
    code, verdict = gated(tmp_path)
    assert (code, verdict["outcome"]) == (3, "unmeasured")
    [error] = having(verdict, rule="error")
    assert error["standing"] == "undecided"
    assert error["observed"] == pytest.approx(2.05, rel=1e-3)
    assert error["interval"] is None


@pytest.mark.parametrize(
    ("kernel", "flags", "code"),
    [("twice", (), 1), ("in-float32", (), 0),
     ("twice", ("--rows", "32", "--length", "64"), 1),
     ("in-float32", ("--rows", "32", "--length", "64"), 0)],
)  # fmt: skip
@pytest.mark.one_in(2)
def test_all_rows_or_enough_of_them_decide(
    kernel: str, flags: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    """The same kernel fails, and the same roundings once pass, by the numbers and by
    their intervals."""
    ran = measured(tmp_path, *AUDIT, *kernels(kernel), *flags, "--gate")
    assert ran.code == code
    [error] = having(gated(tmp_path)[1], rule="error")
    assert (error["interval"] is not None) == bool(flags)
    assert error["observed"] == pytest.approx(2.05 if code else 1.0, rel=1e-2)


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_few_sequences_decide_nothing(
    sequences: int, target: Path, tmp_path: Path
) -> None:
    """Of one and two sequences a cost of 8 times the predicted one (limit 1.5) is NOT
    JUDGED, and shown as it is: the geometric mean of the rows' ratios. Of three it
    fails."""
    options = kernels("six-times", "sdpa-math")
    ran = effects(target, tmp_path, *options, sequences=sequences)
    costs = {
        kind: [
            row.cost
            for row in ran.report.rows
            if (row.kind, row.kernel) == (kind, "planted:six_times")
        ]
        for kind in ("attention", "predicted")
    }
    assert len(costs["predicted"]) == sequences
    ratios = [a / b for a, b in zip(*costs.values(), strict=True)]
    _, verdict = gated(tmp_path)
    name = {"rule": "own share", "kernel": "planted:six_times"}
    [share] = having(verdict, **name)
    assert share["observed"] == pytest.approx(statistics.geometric_mean(ratios))
    assert 1.5 < share["observed"] < 15
    [sound] = having(verdict, rule="own share", kernel="sdpa-math")
    few = sequences < 3
    assert [share["standing"], sound["standing"]] == (
        ["undecided", "undecided"] if few else ["exceeded", "held"]
    )
    assert (share["interval"] is None) == few
    assert ran.code == (3 if few else 1)
    assert numdev.report.number_text.three(share["observed"]) in ran.words


def test_a_single_sequence_decides_what_is_certain(target: Path, tmp_path: Path) -> None:
    """A cost of 1,000 times the predicted one, without an interval."""
    ran = effects(target, tmp_path, *kernels("a-hundred-times"), sequences=1)
    assert ran.code == gated(tmp_path)[0] == 1


# --- metrics under sampling -----------------------------------------------------------

CLASSES = (WHOLE, MAXIMA, ESTIMATED, TESTED)


def test_every_metric_is_in_exactly_one_class() -> None:
    """What sampled rows tell of it was decided for each, and the classes name no
    other."""
    assert {
        name: sum(name in each for each in CLASSES) for name in METRICS
    } == dict.fromkeys(METRICS, 1)
    assert frozenset().union(*CLASSES) == METRICS


@pytest.mark.parametrize(
    ("classified", "sampled", "code"),
    [(False, True, 3), (True, True, 0), (False, False, 0)],
)
def test_a_metric_in_no_class_is_not_judged_where_rows_are_sampled(
    classified: bool, sampled: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that somebody adds and forgets; where it is said to be exact, or all rows are
    there, it is judged."""
    monkeypatch.setitem(metrics_by_name.DERIVED, "newest", lambda row: row.rms)
    monkeypatch.setattr(rule_book, "METRICS", METRICS | {"newest"})
    if classified:
        monkeypatch.setattr(numdev.gate.row_tests, "WHOLE", WHOLE | {"newest"})
    rules = Rules(thresholds=(Threshold(name="new", metric="newest", at_most=1e9),))
    about = {"rows_measured": 50, "interval": {"rms": (9e-4, 1.1e-3)}} if sampled else {}
    judged = gate_rows.judge([gate_rows.row(sampled=sampled, **about)], rules)
    assert judged.exit_code == code
    [test] = gate_rows.rule_tests(judged)
    assert test.observed == 1e-3


# --- the model's own checks -----------------------------------------------------------


def raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("none today")


def plant_no_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "compile", raises)


def plant_no_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformers.cache_utils.DynamicLayer, "update", raises)


def plant_no_eager(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama, "eager_attention_forward", raises)


UNTRIED = {
    "compiled": (plant_no_compiler, ("--compile",)),
    "cache": (plant_no_cache, ("--generate", "4")),
    "eager": (plant_no_eager, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTRIED)
def test_a_check_that_could_not_be_tried_is_no_pass(
    name: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for, and what it needs raises: NOT JUDGED, with its name and the
    reason."""
    plant, flags = UNTRIED[name]
    plant(monkeypatch)
    ran = effects(target, tmp_path, *kernels("sdpa-math"), *flags)
    assert ran.code == 3
    code, verdict = gated(tmp_path)
    assert code == 3
    [check] = having(verdict, rule=name)
    assert (check["standing"], check["reasons"]) == (
        "undecided",
        ["RuntimeError: none today"],
    )
    assert f"{name} could not be judged of model" in ran.words
    [model] = [v for v in ran.report.verdicts if v.kernel == "model"]
    assert model.outcome == "unmeasured"


EVERY = (
    "repeat, eager, sdpa, causality, cache, mask, batch, compiled, compiled "
    "eager and format hold; not tested: kernels beside a cache (they run in `numdev audit "
    "--generate`)"
)
NO_COMPILER = "compiled and compiled eager (not asked for: --compile)"
ASKED = f"cache (not asked for: --generate); {NO_COMPILER}"
ONE = "the model has one implementation of attention"
SENTENCES = {
    "decoder, all": ("llama", ("--generate", "4", "--compile"), EVERY),
    "decoder": (
        "llama", (),
        ("repeat, eager, sdpa, causality, mask, batch and format hold; not tested: ") + ASKED,
    ),
    "encoder": (
        "bert", (),
        "repeat, eager, sdpa, mask, batch and format hold; not tested: causality (the model is "
        f"no decoder); {ASKED}",
    ),
    "sees only the future": (
        "backwards", (),
        f"repeat, batch and format hold; not tested: eager and sdpa ({ONE}); causality (the "
        "model is no decoder); cache (not asked for: --generate); mask (no attention mask); "
        + NO_COMPILER,
    ),
}  # fmt: skip


def stored(name: str, folder: Path) -> tuple[Any, ...]:
    """A model as a target, of tests/models.py or a module of it, and the options it
    needs."""
    if name in models.MODELS:
        return (models.saved(name, folder),)
    file = folder / f"{name}.safetensors"
    save_file(getattr(models, name)().state_dict(), file)
    return file, "--model", f"models:{name}"


@pytest.mark.slow
@pytest.mark.parametrize("case", SENTENCES)
def test_the_models_sentence_is_what_was_tested(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What held, and what was not tested and why; nothing more. (A compiler that changes
    nothing stands for one that takes minutes.)"""
    name, flags, sentence = SENTENCES[case]
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    path, *more = stored(name, tmp_path)
    ran = effects(path, tmp_path / "out", *more, *kernels("sdpa-math"), *flags)
    assert ran.code == 0, ran.words
    [model] = [v for v in ran.report.verdicts if v.kernel == "model"]
    tested, _, untested = sentence.partition("; not tested: ")
    assert model.reason == tested
    assert model.details == (f"Not tested: {untested}." if untested else "")
    assert tested in ran.words
    assert model.details in ran.words


@pytest.mark.slow
def test_of_a_model_that_does_not_repeat_itself_nothing_else_is_said(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other check, and no kernel, holds or fails, the faulty one too."""
    original = llama.LlamaMLP.forward
    monkeypatch.setattr(
        llama.LlamaMLP, "forward", lambda m, x: torch.dropout(original(m, x), 0.1, True)
    )
    ran = effects(target, tmp_path, *kernels("a-hundred-times", "sdpa-math"))
    assert ran.code == 1
    assert [f.rule for f in ran.report.findings] == ["repeat"]
    _, verdict = gated(tmp_path)
    decided = [t for t in verdict["tests"] if t["standing"] in ("held", "exceeded")]
    assert {t["rule"] for t in decided if t["observed"] is not None} == {"repeat"}


# --- rule files -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def declined(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """By kind, a report of a sound kernel and of one that declines every call, by its
    rules."""
    folder = tmp_path_factory.mktemp("declined")
    both = kernels("sdpa-math", "declines")
    rules = rules_in(folder, skipped="allow")
    return {
        kind: measured(
            folder / kind, *command(kind, target), *both, "--thresholds", rules
        )
        for kind in KINDS
    }


OTHER = "planted:declines"
RULE_FILES = [
    ({"skipped": "allow"}, 0),
    ({"skipped": "refused-only"}, 3),  # it was asked for by name
    ({"skipped": "never"}, 3),
    ({"skipped": "allow", "required": ["sdpa-*"]}, 0),
    ({"skipped": "allow", "required": [OTHER]}, 3),
    ({"skipped": "allow", "required": ["absent"]}, 3),
    ({"skipped": "allow", "holds_for": {"cpu_capability": "*"}}, 0),
    ({"skipped": "allow", "holds_for": {"cpu_capability": "none"}}, 3),
    ({"skipped": "allow", "holds_for": {"no such key": "*"}}, 3),
    ({"skipped": "allow", "catches": {"mask-leak": 1.0}}, 3),  # nothing was planted
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("content", "code"), RULE_FILES, ids=lambda x: str(x))
def test_a_rule_file_means_the_same_for_every_kind(
    content: dict[str, Any],
    code: int,
    kind: str,
    declined: dict[str, Ran],
    tmp_path: Path,
) -> None:
    """`holds_for`, `required`, `catches` and `skipped`, by the gate."""
    rules = rules_in(tmp_path, **content)
    assert gated(declined[kind].folder, "--thresholds", rules)[0] == code


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_file_is_the_runs_own(kind: str, declined: dict[str, Ran]) -> None:
    """The run that was given the rules ends as the gate does with them, and its report
    says so."""
    ran = declined[kind]
    assert Rules.model_validate(ran.report.rules) == read_rules(
        ran.folder.parent / "rules.yaml"
    )
    assert (ran.code, ran.report.outcome) == (0, "passed")
    assert called("gate", ran.folder)[0] == 3  # by the default rules


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_asked_for_by_name_was(
    kind: str, declined: dict[str, Ran], tmp_path: Path
) -> None:
    """A plan that says that its kernels were not named, beside a request that names them,
    does not excuse the one that declined."""
    data = json.loads(declined[kind].report.model_dump_json())
    assert data["plan"]["named"]
    data["plan"]["named"] = False
    again = altered_reports.concluded_again(data)
    (tmp_path / "report.json").write_bytes(with_digest(json.dumps(again).encode()))
    assert gated(tmp_path)[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", [{"required": ["absent"]}, {"holds_for": {"gpu": "absent"}}]
)
def test_a_run_by_rules_that_cannot_be_met_is_no_pass(
    content: dict[str, Any], kind: str, target: Path, tmp_path: Path
) -> None:
    """A kernel that is required and not there; another machine, which is told before
    anything is measured."""
    rules = rules_in(tmp_path, **content)
    flags = (*kernels("sdpa-math"), "--thresholds", rules)
    ran = measured(tmp_path / "out", *command(kind, target), *flags)
    assert ran.code == 3
    assert (tmp_path / "out" / "report.json").exists() == ("required" in content)


def test_a_fault_that_was_planted_and_is_caught_passes(tmp_path: Path) -> None:
    """`catches` in an audit with planted faults; not from a dose below those that are
    caught."""
    audit = (*AUDIT, *kernels("sdpa-math"), "--control", "--gate")
    assert measured(tmp_path / "out", *audit).code == 0
    power = {p["fault"]: p for p in gated(tmp_path / "out")[1]["power"]}
    fault = next(name for name, p in power.items() if p["caught_from"])
    dose = power[fault]["caught_from"]
    for at, expected in ((dose, 0), (dose / 2, 3)):
        rules = rules_in(tmp_path, catches={fault: at})
        assert gated(tmp_path / "out", "--thresholds", rules)[0] == expected


# --- axes and yardsticks --------------------------------------------------------------


def test_memory_that_runs_out_for_all_but_one_shape_is_no_excuse(tmp_path: Path) -> None:
    """An axis along which a kernel ran in no call is NOT JUDGED, those that must keep
    bits among them."""
    verdicts.FIRST.clear()
    ran = measured(tmp_path, *INVARIANCE, *kernels("raises-elsewhere"), "--gate")
    assert ran.code == 3
    code, verdict = gated(tmp_path)
    assert code == 3
    missing = {t["rule"] for t in having(verdict, standing="missing")}
    assert {"batch", "neighbours", "decode", "hidden"} <= missing
    assert having(verdict, rule="repeat bitwise", standing="held")


def test_an_error_that_speaks_of_memory_is_a_failure(tmp_path: Path) -> None:
    """An excuse is no substring of a message."""
    axes = ("--axis", "repeat", "--axis", "batch")
    ran = measured(tmp_path, *INVARIANCE, *axes, *kernels("speaks-of-memory"), "--gate")
    assert ran.code == gated(tmp_path)[0] == 3
    assert {row.excuse for row in ran.report.rows if row.status == "failed"} == {""}


@pytest.mark.parametrize(("name", "code"), [("moving", 1), ("still", 0)])
def test_a_models_output_is_held_to_what_roundings_explain(
    name: str, code: int, tmp_path: Path
) -> None:
    """One that moves with its neighbours in the batch fails, its kernel does not; its
    twin that is told which dimension is the batch passes."""
    path, *more = stored(name, tmp_path)
    flags = ("--length", "24", "--axis", "batch", "--gate", *kernels("sdpa-math"))
    ran = measured(tmp_path / "out", "invariance", path, *more, *flags)
    assert ran.code == code
    outcomes = {v.kernel: v.outcome for v in ran.report.verdicts}
    assert outcomes == {"model": "exceeded" if code else "passed", "sdpa-math": "passed"}
    [model] = ran.report.models
    [test] = having(gated(tmp_path / "out")[1], kernel="model")
    assert test["observed"] == pytest.approx(model.difference / model.explained)


def test_a_models_output_that_could_not_be_compared_is_no_pass(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along an axis that was asked for, the model's cache raises; without that it
    passes."""
    flags = ("--length", "24", "--axis", "decode", "--gate", *kernels("sdpa-math"))
    assert measured(tmp_path / "sound", "invariance", target, *flags).code == 0
    plant_no_cache(monkeypatch)
    ran = measured(tmp_path / "out", "invariance", target, *flags)
    assert {row.reason for row in ran.report.models} == {"RuntimeError: none today"}
    assert ran.code == gated(tmp_path / "out")[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_yardstick_that_was_asked_for_has_a_verdict(
    kind: str, target: Path, tmp_path: Path
) -> None:
    """`--kernel baseline` alone."""
    ran = measured(tmp_path, *command(kind, target), *kernels("baseline"), "--gate")
    assert ran.code == gated(tmp_path)[0] == 0
    assert ("baseline", "passed") in [(v.kernel, v.outcome) for v in ran.report.verdicts]


# --- what is not finite ---------------------------------------------------------------

WEIGHT = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Llama with one NaN in a weight of its second layer."""
    path = models.saved("llama", tmp_path_factory.mktemp("poisoned"))
    weights = load_file(path / "model.safetensors")
    weights[f"{WEIGHT}.weight"][3, 5] = math.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


SMALL = ("--length", "24", "--sequences", "3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_is_nan_is_named_and_no_pass(
    kind: str, poisoned: Path, target: Path, tmp_path: Path
) -> None:
    """By the run, its report and the gate; the same without it passes."""
    more = {"effects": ("--no-sites",), "invariance": ("--axis", "batch")}.get(kind, ())
    flags = (*SMALL, *more, *kernels("sdpa-math"), "--gate")
    assert measured(tmp_path / "sound", kind, target, *flags).code == 0
    ran = measured(tmp_path / "out", kind, poisoned, *flags)
    code, verdict = gated(tmp_path / "out")
    assert (ran.code, code, verdict["outcome"]) == (3, 3, "unmeasured")
    assert WEIGHT in ran.words
    lacking = [why for t in having(verdict, standing="undecided") for why in t["reasons"]]
    assert any(WEIGHT in why for why in lacking)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_where_every_run_overflows_run_and_gate_agree(
    planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel gives a number: NOT JUDGED, with the layer; with a check that fails
    beside it, FAIL, of both."""
    path = models.saved("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    weight = weights["model.layers.0.mlp.up_proj.weight"]
    weight *= 6e4 / weight.abs().max()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    if planted:
        plant_eager_scale(monkeypatch)
    ran = effects(path, tmp_path / "out", *kernels("sdpa-math"), "--format", "float16")
    assert not any(row.cost for row in ran.report.rows if row.kind == "whole")
    assert "first in model.layers.0.mlp.up_proj" in ran.words
    assert gated(tmp_path / "out")[0] == ran.code == (1 if planted else 3)


@pytest.mark.parametrize("kind", ["audit", "effects"])
def test_a_kernel_that_gives_nan_fails(kind: str, target: Path, tmp_path: Path) -> None:
    """Where the exact result, or the model with another kernel, is finite."""
    ran = measured(tmp_path, *command(kind, target), *kernels("always-nan"), "--gate")
    assert ran.code == gated(tmp_path)[0] == 1


# --- what was read --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("text", "code"), [("abc", 3), ("the quick brown fox " * 99, 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_a_text_that_is_too_short_is_no_pass(
    kind: str, text: str, code: int, tmp_path: Path
) -> None:
    """How much was read and asked for stands beside the verdict; of a longer one
    nothing."""
    (tmp_path / "text.txt").write_text(text)
    more = ("--no-sites",) if kind == "effects" else ("--layers", "0")
    asked = ("--length", "16", "--sequences", "3", *more, *kernels("sdpa-math"))
    if kind == "invariance":  # whose file names a text
        config = f"checkpoint: demo\ntext: [{tmp_path / 'text.txt'}]\n"
        (tmp_path / "of.yaml").write_text(config)
        command = (kind, tmp_path / "of.yaml", *asked)
    else:
        command = (kind, "demo", "--text", tmp_path / "text.txt", *asked)
    ran = measured(tmp_path / "out", *command, "--gate")
    assert ran.code == gated(tmp_path / "out")[0] == code
    words = "1 x 2 tokens were read where 3 x 16 tokens were asked for"
    assert (words in ran.words) == bool(code)
    assert (words in ran.page) == bool(code)
    shown = measured(tmp_path / "out", *command)
    assert shown.code == 0  # nobody asked for the verdict's
    assert (words in shown.words) == bool(code)
    assert ("NOT JUDGED" in shown.words) == bool(code)


# --- arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_target_is_not_the_demo(name: str) -> None:
    with pytest.raises(UsageError):
        numdev.audit(name)
    assert called("audit", name)[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "code"), [("short-lse", 3), ("whole-lse", 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_a_log_sum_exp_of_a_wrong_shape_is_not_dropped(
    kind: str, kernel: str, code: int, target: Path, tmp_path: Path
) -> None:
    """It is named, with both shapes, and no pass."""
    ran = measured(tmp_path, *command(kind, target), *kernels(kernel), "--gate")
    assert ran.code == gated(tmp_path)[0] == code
    words = "log-sum-exp: expected a floating-point tensor of shape"
    assert (words in ran.words) == bool(code)


# --- float32 in effects ---------------------------------------------------------------


@pytest.mark.slow
def test_a_column_is_called_what_it_holds(target: Path, tmp_path: Path) -> None:
    """In float32 nothing is predicted: the ratio is to eager attention, which is not
    judged against itself; in bfloat16 to the prediction, which eager attention has
    too."""
    options = kernels("sdpa-math")
    float32 = effects(target, tmp_path / "f", *options, "--format", "float32")
    bfloat16 = effects(target, tmp_path / "b", *options)
    for ran, fmt, column, other in (
        (float32, "float32", "attention / eager", "attention / expected"),
        (bfloat16, "bfloat16", "attention / expected", "attention / eager"),
    ):
        assert ran.code == 0
        table = ran.page.partition(f"{fmt} beside fp64")[2].partition("</table>")[0]
        assert (column in table, other in table) == (True, False)
        run = next(
            r
            for r in ran.report.summary.runs
            if (r.kind, r.kernel) == ("attention", "sdpa-math") and r.layer is None
        )
        kind, kernel = (
            ("attention", "baseline") if fmt == "float32" else ("predicted", "sdpa-math")
        )
        costs = {
            (r.kind, r.kernel, r.sequence): r.cost
            for r in ran.report.rows
            if r.layer is None
        }
        ratios = [
            costs["attention", "sdpa-math", i] / costs[kind, kernel, i] for i in range(3)
        ]  # fmt: skip
        assert run.over.mean == pytest.approx(statistics.geometric_mean(ratios))
    shares = {}
    for ran in (float32, bfloat16):
        [test] = having(gated(ran.folder)[1], rule="own share", kernel="baseline")
        shares[test["format"]] = test["standing"]
    assert shares == {"float32": "not applicable", "bfloat16": "held"}


def test_eager_attention_is_not_judged_against_itself(
    target: Path, tmp_path: Path
) -> None:
    """A kernel that is far worse than it fails in float32, where it is the yardstick."""
    options = kernels("a-hundred-times")
    ran = effects(target, tmp_path, *options, "--format", "float32")
    [test] = having(
        gated(tmp_path)[1], rule="own share", kernel="planted:a_hundred_times"
    )
    assert (ran.code, test["standing"]) == (1, "exceeded")
