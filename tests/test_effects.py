"""`numdev effects`: what rounding does to a model's output, and what is no rounding."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import factories
import models
import numpy as np
import pipelines
import pytest
import torch
import torch.nn.functional as F
import transformers
from commands import ran, unstarted
from oracles import make_case
from safetensors.torch import load_file, save_file
from scipy.special import rel_entr
from torch import nn
from transformers.models.llama import modeling_llama as llama

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError
from numdev.exact.wide_tensors import Wide
from numdev.formats import FORMATS, format_of
from numdev.gate.compare import compare
from numdev.gate.judging import judge_report, judged
from numdev.gate.rules import Rules
from numdev.kernels import find, kernel_of_function
from numdev.report import read
from numdev.report.document import Details, Document, Figures, StackedBars, Table
from numdev.report.number_text import percent, si
from numdev.request_models import effects_request
from numdev.sources import capture, diffusers_pipeline
from numdev.sources.captured_calls import save_cases
from numdev.studies.audit.isolation import attempt
from numdev.studies.audit.plan import Planned
from numdev.studies.effects import verdict
from numdev.studies.effects.consistency import check_consistency
from numdev.studies.effects.model_properties import Checks, run_checks
from numdev.studies.effects.model_runs import _widen_model, _with_moved_embedding
from numdev.studies.effects.output_error import (
    Scored,
    main_output,
    outputs_by_name,
    score_sequences,
)
from numdev.studies.effects.report import (
    Check,
    EffectsReport,
    OutputRow,
    RunSummary,
    check_names,
)
from numdev.studies.effects.rounding_sites import CHOOSES, AtSites, Running, SiteTracker
from numdev.studies.effects.study import EffectsStudy
from numdev.studies.effects.summary import summarise
from numdev.studies.effects.view import blocks


def studied(capsys: Any, tmp_path: Path, target: object, *more: object) -> EffectsReport:
    code, _, err = ran(
        capsys,
        "effects",
        target,
        "--device",
        "cpu",
        "--length",
        "32",
        "-q",
        *more,
        "-o",
        tmp_path / "out",
    )
    assert code == 0, err
    result = read(tmp_path / "out")
    assert isinstance(result, EffectsReport)
    return result


def run_of(report: EffectsReport, kind: str, **which: Any) -> RunSummary:
    [chosen] = [
        run for run in report.summary.runs
        if run.kind == kind and all(getattr(run, name) == x for name, x in which.items())
    ]  # fmt: skip
    return chosen


def plant_late_keys(patch: pytest.MonkeyPatch) -> None:
    original = llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **how: Any) -> Any:
        if self.layer_idx == 1:
            how["attention_mask"], self.is_causal = None, False
        return original(self, hidden_states, *args, **how)

    patch.setattr(llama.LlamaAttention, "forward", forward)


def plant_no_mask(patch: pytest.MonkeyPatch) -> None:
    original = llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **how: Any) -> Any:
        how["attention_mask"] = None
        return original(self, hidden_states, *args, **how)

    patch.setattr(llama.LlamaAttention, "forward", forward)


def plant_eager_scale(patch: pytest.MonkeyPatch) -> None:
    original = llama.eager_attention_forward

    def forward(module: Any, query: Any, *args: Any, **how: Any) -> Any:
        if module.layer_idx == 1:
            factor = query.new_ones(1, query.shape[1], 1, 1)
            factor[:, 2] = 1.01
            query = query * factor
        return original(module, query, *args, **how)

    patch.setattr(llama, "eager_attention_forward", forward)


def plant_narrow(module: type[nn.Module]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = module.forward

        def forward(self: Any, x: Any, *args: Any, **how: Any) -> Any:
            out = original(self, x, *args, **how)
            if isinstance(out, tuple):
                return tuple(y.to(torch.bfloat16).to(y.dtype) for y in out)
            return out.to(torch.bfloat16).to(out.dtype) if out.shape[-1] == 96 else out

        patch.setattr(module, "forward", forward)

    return plant


def plant_lost_key(patch: pytest.MonkeyPatch) -> None:
    original = transformers.cache_utils.DynamicLayer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **how: Any) -> Any:
        keys, values = original(self, keys, values, *args, **how)
        if keys.shape[-2] > 30:
            values = values.clone()
            values[:, :, 5] = 0
        return keys, values

    patch.setattr(transformers.cache_utils.DynamicLayer, "update", update)


# The rules that find it, the first with these words. Without a mask a layer sees later
# keys too, and eager attention, to which nothing else says that it is causal, is another
# function.
PLANTED = {
    "late keys": (plant_late_keys, (), "causality mask", "layer 1 is the first"),
    "no mask": (plant_no_mask, (), "eager mask", ("eager attention computes another function")),
    "eager scale": (plant_eager_scale, (), "eager", "layer 1 is the first"),
    "logits": (plant_narrow(nn.Linear), ("--format", "float32"), "format", "at `logits`"),
    "rotary": (
        plant_narrow(llama.LlamaRotaryEmbedding), ("--format", "float32"), "format", "at `rotary`"
    ),
    "lost key": (plant_lost_key, ("--generate", "4"), "cache", "Decoding with a cache"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.one_in(2)
def test_what_is_no_rounding_is_found_and_named(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Each planted fault is the one finding, with its layer or site."""
    plant, flags, rules, words = PLANTED[fault]
    target = models.saved("llama", tmp_path)
    plant(monkeypatch)
    more = ("--sequences", "2", "--no-sites", "--kernel", "sdpa-math", *flags)
    report = studied(capsys, tmp_path, target, *more)
    assert {f.rule for f in report.findings} == set(rules.split())
    assert words in report.findings[0].whole
    assert report.outcome == "exceeded"
    assert not report.passed


def test_a_finding_has_a_script_that_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Without the planted fault the script exits with 0, with it with 1."""
    target = models.saved("llama", tmp_path)
    with monkeypatch.context() as patch:
        plant_eager_scale(patch)
        studied(
            capsys,
            tmp_path,
            target,
            "--sequences",
            "2",
            "--no-sites",
            "--kernel",
            "sdpa-math",
        )
        [script] = (tmp_path / "out").glob("reproducers/*/reproduce.py")
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(script))
        assert stop.value.code == 1
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script))
    assert stop.value.code == 0
    assert "largest difference" in capsys.readouterr().out


def independent(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a llama, computed from its weights in numpy."""
    w = {name: x.detach().double().numpy() for name, x in model.state_dict().items()}
    config, n = model.config, ids.shape[1]
    group, size = (
        config.num_attention_heads // config.num_key_value_heads,
        config.head_dim,
    )
    angles = np.outer(np.arange(n), model.model.rotary_emb.inv_freq.double().numpy())
    cos, sin = (np.concatenate([f(angles)] * 2, axis=-1) for f in (np.cos, np.sin))

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * w[name]

    def turned(x: Any) -> Any:
        one, two = np.split(x, 2, axis=-1)
        return x * cos + np.concatenate([-two, one], axis=-1) * sin

    x = w["model.embed_tokens.weight"][ids.numpy()]
    for layer in range(config.num_hidden_layers):
        of_layer = {
            name.split(".", 3)[3]: x
            for name, x in w.items()
            if f".layers.{layer}." in name
        }
        y = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (
            (y @ of_layer[f"self_attn.{p}_proj.weight"].T)
            .reshape(*ids.shape, -1, size)
            .swapaxes(1, 2)
            for p in "qkv"
        )
        k, v = turned(k).repeat(group, axis=1), v.repeat(group, axis=1)
        S = turned(q) @ k.swapaxes(2, 3) / np.sqrt(size)
        P = np.exp(
            np.where(
                np.tril(np.ones((n, n), bool)), S - S.max(-1, keepdims=True), -np.inf
            )
        )
        out = (P / P.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(*ids.shape, -1)
        x = x + out @ of_layer["self_attn.o_proj.weight"].T
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate, up = (y @ of_layer[f"mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + gate / (1 + np.exp(-gate)) * up @ of_layer["mlp.down_proj.weight"].T
    return torch.tensor(norm(x, "model.norm.weight") @ w["lm_head.weight"].T)


def opened(target: Path, **asked: Any) -> tuple[EffectsStudy, Any]:
    study = EffectsStudy(
        effects_request(str(target), {"length": 24, "device": "cpu", **asked}), attempt
    )
    return study, study.model_in(study.formats[0])


def test_the_truth_is_the_exact_model(tmp_path: Path) -> None:
    """Computed from the weights in numpy, to 1e-12 of the logits' size; and in float32
    the model is nearer to it than in bfloat16 by the ratio of their unit roundoffs,
    within a factor of 4."""
    target = models.saved("llama", tmp_path)
    study, subject = opened(target)
    inputs = study.chunks[0]
    truth = main_output(subject.run_exactly(inputs))
    expected = independent(study.source.model, inputs["input_ids"])
    assert float((truth - expected).abs().max() / expected.std()) < 1e-12
    errors = []
    for name in ("bfloat16", "float32"):
        _, narrow = opened(target, formats=(name,))
        real = main_output(
            narrow.run_as_used(
                inputs, partial(narrow.attention_of_kernel, study.against, None)
            )
        )
        errors.append(float((real - truth).norm()))
    assert 2**14 < errors[0] / errors[1] < 2**18


@pytest.mark.parametrize(
    ("name", "within"), [("gpt2", 1e-12), ("bert", 1e-12), ("t5_seq2seq", 1e-5)]
)
def test_the_truth_is_that_of_the_model_in_fp64(
    name: str, within: float, tmp_path: Path
) -> None:
    """The first two compute in fp64 throughout when they are loaded so, by eager
    attention; T5, whose masks are additive, has norms in fp32."""
    study, subject = opened(models.saved(name, tmp_path))
    model: Any = study.source.model
    truth = main_output(subject.run_exactly(study.chunks[0]))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**study.chunks[0]).logits
    assert float((truth - expected).abs().max() / expected.std()) < within


def test_all_sites_together_are_the_model_in_its_format(tmp_path: Path) -> None:
    """With sdpa-math, whose sums are fp32's, up to the order of sums: half of the logits
    lie within a tenth of what bfloat16 errs, as nothing that rounds elsewhere would."""
    study, subject = opened(models.saved("llama", tmp_path), kernels=("sdpa-math",))
    inputs, (_, emulated, *_) = study.chunks[0], study.runs
    whole = next(
        r for r in study.runs if r.kind == "whole" and r.planned is not study.against
    )
    truth, real, created = (
        main_output(x) for x in (
            subject.run_exactly(inputs),
            study._answer(subject, inputs, whole),
            study._answer(subject, inputs, emulated),
        )
    )  # fmt: skip
    first = slice(0, 2)  # where hardly anything was summed in another order yet
    distance = (real - created)[:, first].abs().median()
    assert float(distance) < 0.1 * float((real - truth)[:, first].abs().median())


def test_the_demo(capsys: Any, tmp_path: Path) -> None:
    """Its sites add up, every kernel costs what its rounding model says, attention is a
    small part and eager attention a larger one; repeats are equal, and all that must
    agree agrees."""
    report = studied(
        capsys, tmp_path, "demo", "--sequences", "4", "--length", "64", "--by-layer"
    )
    [budget] = report.summary.budgets
    assert budget.adds_up
    assert not report.findings
    assert report.outcome == "passed"
    assert all(check.holds for check in report.checks if check.applies)
    assert {c.name: c.reason for c in report.checks if not c.applies} == {
        "cache": "not asked for: --generate",
        "compiled": "not asked for: --compile",
        "compiled eager": "not asked for: --compile",
    }
    alone = {
        run.kernel: run for run in report.summary.runs
        if run.kind == "attention" and run.layer is None and run.cost
    }  # fmt: skip
    assert all(
        0.8 < alone[k].over.mean < 1.25 for k in ("baseline", "sdpa-math", "sdpa-flash")
    )
    assert alone["sdpa-flash"].share.mean < 1.2 * alone["floor"].share.mean < 0.15
    assert alone["baseline"].share.mean > 2 * alone["sdpa-flash"].share.mean
    assert run_of(report, "repeat").from_against == 0
    assert sum(run.layer is not None for run in report.summary.runs) == 4
    first, _, part, difference = report.summary.answer
    assert "bfloat16 with sdpa-default: KL " in first
    assert " of the error is from attention alone; largest sites: " in part
    assert ": sdpa-default and baseline differ by " in difference
    assert run_of(report, "whole", kernel="sdpa-math").unexplained == 0
    audit = (
        "audit",
        "demo",
        "--layers",
        "0",
        "--kernel",
        "sdpa-math",
        "-o",
        tmp_path / "audit",
    )
    code, out, _ = ran(capsys, *audit, "--effects", tmp_path / "out")
    assert code == 0
    assert "At the model's output: bfloat16 with sdpa-default: KL" in " ".join(
        out.split()
    )
    code, _, err = ran(capsys, *audit, "--effects", tmp_path / "audit")
    assert code == 2
    assert "expected a report of effects, got one of audit" in err


def test_a_kernel_a_hundredth_off_in_one_head_fails(capsys: Any, tmp_path: Path) -> None:
    """At the output, by its own share; and the gate says the same of the stored
    report."""
    flags = ("--no-sites", "--kernel", "planted:one_head_off", "--format", "float32")
    report = studied(capsys, tmp_path, "demo", "--sequences", "2", *flags)
    assert {(f.rule, f.kernel) for f in report.findings} == {
        ("own share", "planted:one_head_off"),
        ("model", "planted:one_head_off"),
    }
    code, out, _ = ran(capsys, "gate", tmp_path / "out")
    assert code == 1
    assert "float32 error of attention alone: " in " ".join(out.split())


@pytest.mark.parametrize("name", ["stable_diffusion", "sd3"])
@pytest.mark.thorough
def test_a_pipeline_is_compared_at_its_latents_and_its_image(
    name: str, capsys: Any, tmp_path: Path
) -> None:
    """All runs start from one noise: float32 is nearer to the truth than bfloat16 by the
    ratio of unit roundoffs, within a factor of 8, and attention costs what its rounding
    model makes. A head that is a hundredth off is found at both outputs."""
    off = "planted:one_head_off"
    flags = (
        "--sequences",
        "2",
        "--denoise",
        "2",
        "--kernel",
        "sdpa-math",
        "--kernel",
        off,
    )
    flags += ("--format", "bfloat16", "--format", "float32")
    report = studied(capsys, tmp_path, getattr(pipelines, name)(tmp_path), *flags)
    for at in ("latents", "image"):
        which: dict[str, Any] = {"kernel": "sdpa-math", "at": at}
        coarse, fine = (
            run_of(report, "whole", format=f, **which) for f in report.request["formats"]
        )
        assert 2**13 < coarse.error / fine.error < 2**19
        alone = run_of(report, "attention", format="bfloat16", **which)
        assert 0.9 < alone.over.mean < 1.1
        assert 0 < alone.share.mean < 0.1
        assert run_of(report, "repeat", format="bfloat16", at=at).from_against == 0
    assert {f.kernel for f in report.findings} == {off}
    assert all(
        any(at in f.sentence for f in report.findings) for at in ("latents", "image")
    )
    assert report.summary.notes == (
        "In a diffusers pipeline single rounding sites are not tried.",
    )
    labels = [(g.kernel, g.tensor, g.format) for g in compare(report, report).groups]
    assert len(labels) == len(set(labels)) > 0
    assert {label[1].split()[-1] for label in labels} == {"latents", "image"}


@pytest.mark.slow
def test_a_pipeline_that_fails_is_one_line_about_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such luck")

    path = pipelines.stable_diffusion(tmp_path)
    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", fails)
    code, _, err = ran(
        capsys, "effects", path, "--sequences", "1", "-q", "-o", tmp_path / "out"
    )
    assert code == 3
    assert err.splitlines()[-1] == (
        "numdev: error: StableDiffusionPipeline: the pipeline failed: RuntimeError: "
        "no such luck; "
        "does diffusers run it, with --denoise 4?"
    )


@pytest.mark.slow
def test_the_truth_of_a_pipeline_is_its_own_run_in_fp64(tmp_path: Path) -> None:
    """But for what diffusers computes in float32: tables of timesteps and positions. Each
    prompt has its own noise."""
    # Makes its tables with NumPy
    scheduler = diffusers.EulerDiscreteScheduler(steps_offset=1)
    path = pipelines.stable_diffusion(tmp_path, scheduler)
    study, subject = opened(path, sequences=2, denoise=2)
    images = []
    for inputs in study.chunks:
        with torch.no_grad():
            expected = outputs_by_name(study.source.model(**inputs))
        for at, x in outputs_by_name(subject.run_exactly(inputs)).items():
            assert float((x - expected[at]).norm() / expected[at].norm()) < 1e-5
        images.append(expected["image"])
    assert float((images[0] - images[1]).norm() / images[0].norm()) > 0.1


def test_what_is_no_model_and_what_means_nothing_is_refused(
    capsys: Any, tmp_path: Path
) -> None:
    x, calls, grid = (
        torch.ones(1, 1, 2, 2),
        tmp_path / "calls.safetensors",
        tmp_path / "grid.yaml",
    )
    save_cases(calls, [AttentionCase(ref=CaseRef(case="c"), q=x, k=x, v=x, scale=1.0)])
    grid.write_text("cases: []")
    pipeline = pipelines.dit(tmp_path)
    for arguments, words in {
        (
            pipeline,
            "--by-layer",
        ): "'by_layer' does not apply: pipeline is a diffusers pipeline",
        (pipeline, "--stream"): "'stream' does not apply",
        ("demo", "--denoise", "2"): "demo is not a diffusers pipeline",
        (calls,): "got captured tensors",
        (grid,): "got a YAML file of attention cases",
    }.items():
        capsys.readouterr()
        code, _, err = ran(capsys, "effects", *arguments, "-o", tmp_path / "out")
        assert (code, unstarted(err).count("\n")) == (2, 1)
        assert words in err


def test_an_operator_that_takes_functions_is_refused_by_its_line(
    capsys: Any, tmp_path: Path
) -> None:
    """FlexAttention does not run operator by operator, so that it has no fp64."""
    weights = tmp_path / "model.safetensors"
    save_file(factories.Flexible().state_dict(), weights)
    model = ("--model", "factories:Flexible", "--kernel", "sdpa-math")
    code, _, err = ran(capsys, "effects", weights, *model, "-o", tmp_path / "out")
    assert code == 3
    last = unstarted(err).splitlines()[-1]
    assert re.search(r"factories\.py:\d+ \(return .*flex_attention.*\): it takes", last)


def float32_alone(case: AttentionCase) -> Any:
    assert case.q.dtype == torch.float32
    return find("sdpa-math").attend(case)


@pytest.mark.parametrize(("fmt", "dtype"), [
    ("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16),
])  # fmt: skip
def test_a_kernel_gets_a_call_in_the_format_that_is_asked_for(
    fmt: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Not in that of the model: its own code may have made q, k and v wider."""
    seen = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((q.dtype, k.dtype, v.dtype))
        return v

    _, subject = opened(models.saved("llama", tmp_path), formats=("bfloat16",))
    mine = kernel_of_function("mine", kernel)
    planned = Planned(role="kernel", kernel=mine, options={})
    case = make_case(q_len=5, kv_len=5, dtype=torch.float64)
    out = subject.attention_of_kernel(planned, None, case, FORMATS[fmt])
    assert seen == [(dtype,) * 3]
    assert torch.equal(out, case.v.to(dtype))


def test_a_pipeline_starts_from_one_noise_in_every_format() -> None:
    """The same numbers, rounded; of another seed others."""
    exact, again, other = (drawn_noise(seed, torch.float64) for seed in (5, 5, 6))
    assert torch.equal(exact, again)
    assert not torch.equal(exact, other)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(drawn_noise(5, dtype), exact.to(dtype))


def drawn_noise(seed: int, dtype: torch.dtype) -> torch.Tensor:
    with diffusers_pipeline._Noise(seed):
        return torch.randn((3, 7), dtype=dtype, generator=torch.Generator())


@pytest.mark.slow
def test_a_call_is_answered_in_the_format_it_comes_in(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """A model that makes q, k and v float32 before it attends: so they stay, and
    attention costs next to nothing of what bfloat16 does."""
    original = capture._attention

    def upcast(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> Any:
        out, weights = original(module, q.float(), k.float(), v.float(), mask, **how)
        return out.to(q.dtype), weights

    monkeypatch.setattr(capture, "_attention", upcast)
    more = ("--sequences", "3", "--no-sites", "--kernel", "test_effects:float32_alone")
    report = studied(capsys, tmp_path, models.saved("llama", tmp_path), *more)
    assert (
        run_of(report, "attention", kernel="test_effects:float32_alone").share.mean < 1e-6
    )
    assert not report.findings


@pytest.mark.thorough
def test_compiled_textbook_attention_is_not_accused(capsys: Any, tmp_path: Path) -> None:
    """As many tokens as heads, where a compiler may take one for the other."""
    flags = (
        "--compile",
        "--no-sites",
        "--sequences",
        "3",
        "--kernel",
        "inductor",
        "--length",
        "8",
    )
    report = studied(capsys, tmp_path, models.saved("llama", tmp_path), *flags)
    checks = {c.name: c.holds for c in report.checks if c.format}
    assert checks == {"compiled": True, "compiled eager": True, "format": True}
    assert report.outcome == "passed"


def checked(path: Path, **asked: Any) -> dict[str, Check]:
    """The checks of a model in one format, by name."""
    study, subject = opened(path, sequences=2, **asked)
    checks = list(run_checks(subject, study.chunks[0], study.request))
    fmt = subject.format.name
    assert [(c.name, c.format) for c in checks] == check_names(study.request, [fmt])
    return {check.name: check for check in checks}


def states(checks: dict[str, Check]) -> dict[str, str]:
    """Of each, whether it holds, else why it was not tried; with (-) what does not
    apply."""
    return {
        name: c.reason + " (-)" * (not c.applies) if c.holds is None else str(c.holds)
        for name, c in checks.items()
    }


ONE, NO_TOKENS = (
    "the model has one implementation of attention (-)",
    "the model reads no token ids",
)
UNASKED = {
    "cache": "not asked for: --generate (-)",
    **dict.fromkeys(("compiled", "compiled eager"), "not asked for: --compile (-)"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "asked", "differing"), [
    ("llama", {"generate": 4}, {"cache": "True"}),
    ("llama", {"length": 8}, dict.fromkeys(("causality", "mask"), ("fewer than 9 tokens (-)"))),
    ("bert", {}, {"causality": "the model is no decoder (-)"}),
    ("t5_seq2seq", {}, {}),
    ("vit", {}, dict.fromkeys(("causality", "mask"), f"{NO_TOKENS} (-)")),
])  # fmt: skip
def test_every_check_is_told_of(
    name: str, asked: dict[str, Any], differing: dict[str, str], tmp_path: Path
) -> None:
    """Those that hold, that nobody asked for, and that mean nothing for the model."""
    every = dict.fromkeys(
        ("repeat", "eager", "sdpa", "causality", "mask", "batch", "format"), "True"
    )
    expected = {**every, **UNASKED, **differing}
    assert states(checked(models.saved(name, tmp_path), **asked)) == expected


def test_a_pipeline_is_checked_for_repeats_alone(tmp_path: Path) -> None:
    checks_of = states(checked(pipelines.dit(tmp_path), denoise=1, length=256))
    assert checks_of == {
        **UNASKED,
        **dict.fromkeys(("eager", "sdpa"), ONE),
        **dict.fromkeys(("repeat", "format"), "True"),
        "causality": f"{NO_TOKENS} (-)",
        "mask": "no attention mask (-)",
        "batch": "the model reads one sequence at a time (-)",
    }


UNSEEN = (
    "attention ran but was not seen in roformer.encoder.layer.0.attention.self, "
    "roformer.encoder.layer.1.attention.self"
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "why"), [
    ("roformer", UNSEEN), ("mamba2", "the model made no attention call"),
])  # fmt: skip
def test_a_model_whose_attention_no_kernel_can_answer_is_checked_as_a_whole(
    name: str, why: str, tmp_path: Path
) -> None:
    """By its own code; its caches, of keys or of states, too."""
    checks_of = states(checked(models.saved(name, tmp_path), generate=4, length=12))
    holding = ("repeat", "causality", "cache", "mask", "batch", "format")
    one = dict.fromkeys(("eager", "sdpa"), f"there is one implementation: {why} (-)")
    assert checks_of == {**UNASKED, **dict.fromkeys(holding, "True"), **one}


def test_a_model_that_attends_by_hand_and_sees_the_future_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Of which nothing else is judged, and every kernel says why."""
    attention = transformers.models.roformer.modeling_roformer.RoFormerSelfAttention
    original = attention.forward
    monkeypatch.setattr(
        attention,
        "forward",
        lambda self, x, attention_mask=None, **how: original(self, x, None, **how),
    )
    target = models.saved("roformer", tmp_path)
    flags = ("--sequences", "2", "--length", "12", "--no-sites", "--kernel", "sdpa-math")
    report = studied(capsys, tmp_path, target, *flags)
    assert [f.rule for f in report.findings if f.severity == "exceeded"] == [
        "causality",
        "mask",
    ]
    where = "layer 0 is the first whose attention differs"
    assert all(where in f.details for f in report.findings[:2])
    assert report.outcome == "exceeded"
    assert {(r.status, r.reason) for r in report.rows} == {("skipped", UNSEEN)}
    [kernel] = (f for f in report.findings if f.kernel == "sdpa-math")
    assert UNSEEN in kernel.details
    judge_report(report)


def test_the_layer_named_is_the_one_where_a_fault_arises(tmp_path: Path) -> None:
    """RecurrentGemma's recurrent blocks read padding, which the attention behind them
    hides."""
    check = checked(models.saved("recurrent_gemma", tmp_path), length=12)["mask"]
    assert check.holds is False
    where = "layer 0 is the first whose RecurrentGemmaRecurrentBlock differs"
    assert check.reason.endswith(where)


def test_a_sequence_that_depends_on_its_neighbours_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A norm over the batch in the second layer."""
    original = llama.LlamaMLP.forward
    monkeypatch.setattr(
        llama.LlamaMLP, "forward", lambda m, x: original(m, x - x.mean(0))
    )
    check = checked(models.saved("llama", tmp_path), length=12)["batch"]
    assert check.holds is False
    assert check.reason.startswith(
        "A sequence's output depends on the others in its batch: "
    )
    assert check.reason.endswith("; layer 0 is the first whose output differs")


def test_what_cannot_be_tried_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A compiler, a cache or an implementation that raises, in its format too; and a text
    of one token, which leaves nothing to change."""

    def raises(*_: Any, **__: Any) -> None:
        raise RuntimeError("none today")

    monkeypatch.setattr(torch, "compile", raises)
    monkeypatch.setattr(llama, "eager_attention_forward", raises)
    monkeypatch.setattr(transformers.cache_utils.DynamicLayer, "update", raises)
    ids = tmp_path / "ids.safetensors"
    save_file({"input_ids": torch.full((2, 12), 7)}, ids)
    asked = {"inputs": str(ids), "generate": 4, "compile": True}
    why, same = (
        "RuntimeError: none today",
        "no other token of the text can stand in the place of one",
    )
    assert states(checked(models.saved("llama", tmp_path), **asked)) == {
        **dict.fromkeys(("repeat", "sdpa", "batch", "format"), "True"),
        **dict.fromkeys(("eager", "cache", "compiled", "compiled eager"), why),
        **dict.fromkeys(("causality", "mask"), same),
    }


def test_a_narrower_format_is_told_of_where_nothing_ran_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a second format, when workers made the runs or an earlier process did."""
    plant_narrow(nn.Linear)(monkeypatch)
    study, subject = opened(models.saved("llama", tmp_path), formats=("float32",))
    before = [Check(name="repeat", holds=True)]
    *_, check = run_checks(subject, study.chunks[0], study.request, before)
    assert (check.name, check.holds) == ("format", False)
    assert "in bfloat16 at `logits`" in check.reason


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_a_models_own_autocast_is_no_fault_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, name: str
) -> None:
    """Its calls come in autocast's dtype. That is narrower than float32, which is the
    model's fault, and not than bfloat16."""
    model, autocast = transformers.LlamaForCausalLM, torch.autocast("cpu", torch.bfloat16)
    monkeypatch.setattr(model, "forward", autocast(model.forward))
    target = models.saved("llama", tmp_path / "llama")
    flags = ("--format", name, "--kernel", "sdpa-flash", "--no-sites")
    report = studied(capsys, tmp_path, target, "--sequences", "3", *flags)
    narrow = {("format", "model")} if name == "float32" else set()
    assert {(f.rule, f.kernel) for f in report.findings} == narrow
    alone = run_of(report, "attention", kernel="sdpa-flash")
    assert 0.8 < alone.over.mean < 1.25


@pytest.mark.slow
def test_with_dropout_nothing_else_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """In no format, and the one finding is about it."""
    original = llama.LlamaMLP.forward
    monkeypatch.setattr(
        llama.LlamaMLP, "forward", lambda m, x: nn.functional.dropout(original(m, x), 0.1)
    )
    flags = (
        "--no-sites",
        "--kernel",
        "sdpa-math",
        "--format",
        "bfloat16",
        "--format",
        "float32",
    )
    target = models.saved("llama", tmp_path)
    report = studied(capsys, tmp_path, target, "--sequences", "1", *flags)
    formats = ("bfloat16", "float32")
    assert [(c.name, c.format) for c in report.checks] == check_names(None, formats)
    repeat, *others = report.checks
    assert repeat.holds is False
    assert all(c.reason == f"not tried: {repeat.reason}" for c in others if c.applies)
    assert {c.holds for c in others} == {None}
    assert "repeat" in {f.rule for f in report.findings}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_a_weight_that_is_nan_is_named_and_nothing_else_accused(
    flags: tuple[str, ...], capsys: Any, tmp_path: Path
) -> None:
    """No kernel and no dropout: there is no truth, which is no result."""
    name = "model.layers.1.self_attn.q_proj"
    target = models.saved("llama", tmp_path)
    weights = load_file(target / "model.safetensors")
    weights[f"{name}.weight"][3, 5] = math.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    more = (
        "--sequences",
        "2",
        "--no-sites",
        "--kernel",
        "sdpa-math",
        "--length",
        "16",
        *flags,
    )
    out = tmp_path / "out"
    code, _, err = ran(
        capsys, "effects", target, "--device", "cpu", "-q", *more, "-o", out
    )
    count = models.build("llama").get_submodule(name).weight.numel()
    why = (
        f"NaN or infinity in the exact output (fp64), first in {name}, "
        f"whose weight has NaN or infinity at 1 of {count} places"
    )
    assert code == 3
    assert why in err
    report = read(out)
    assert isinstance(report, EffectsReport)
    assert not report.findings
    assert {(r.status, r.reason) for r in report.rows} == {("skipped", why)}
    repeat, *others = report.checks
    assert (repeat.holds, repeat.reason) == (None, why)
    assert {c.reason for c in others if c.applies} == {f"not tried: {why}"}


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.slow
@pytest.mark.parametrize(("largest", "words"), [
    (6e4, f"first in {UP}"),
    (7e4, (f"first in {UP}, whose weight (cast to float16) has NaN or " "infinity at 1 of 1536 places")),
])  # fmt: skip
def test_an_overflow_of_the_format_is_placed(
    largest: float, words: str, capsys: Any, tmp_path: Path
) -> None:
    """What overflows float16, whose largest number is 65504, is the first that is not
    finite. Exactly, and in bfloat16, all is well."""
    target = models.saved("llama", tmp_path)
    weights = load_file(target / "model.safetensors")
    weight = weights[f"{UP}.weight"]
    weight *= 6e4 / weight.abs().max()
    weight.view(-1)[weight.abs().argmax()] = largest
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    flags = ("--format", "float16", "--format", "bfloat16", "--kernel", "sdpa-math")
    report = studied(capsys, tmp_path, target, "--sequences", "1", "--no-sites", *flags)
    whole = [r for r in report.rows if r.kind == "whole"]
    assert {r.status for r in whole if r.format == "bfloat16"} == {"ok"}
    [reason] = {r.reason for r in whole if r.format == "float16"}
    assert reason.startswith("NaN or infinity in the output at ")
    assert reason.endswith(words)
    assert all(c.holds for c in report.checks if c.applies)


def test_nothing_compared_is_no_agreement(tmp_path: Path) -> None:
    """Other shapes, no position that counts, no finite truth; NaN beside numbers
    differs."""
    study, subject = opened(models.saved("llama", tmp_path), sequences=1, length=12)
    checks = Checks(subject, study.chunks[0], study.request)
    x, every = (
        torch.ones(1, 3, 2, dtype=torch.float64),
        torch.ones(1, 3, dtype=torch.bool),
    )
    lost = x.masked_fill(torch.arange(3)[:, None] == 1, math.nan)
    for one, other, counts, words in (
        (x, x[:, :2], every, "of shapes"),
        (x, x, ~every, "no position"),
        (lost, lost, every, "NaN or infinity in the exact output"),
    ):
        with pytest.raises(MeasurementError, match=words):
            checks.compare_runs("eager", (one, {}), (other, {}), counts)
    check = checks.compare_runs("eager", (x, {}), (lost, {}), every)
    assert check.holds is False
    assert check.reason.endswith("NaN or infinity at 1 of 3 positions")
    assert checks.compare_runs("eager", (x, {}), (x, {}), every).holds
    exact, counts = checks.exact_run[0], int(checks.exact_run[0].shape[1])
    assert checks.compare_with_compiled("compiled", exact + 1, exact + 1).holds
    assert checks.compare_with_compiled("compiled", exact + 1, exact + 3).holds is False
    check = checks.compare_with_compiled("compiled", exact + 1, exact * math.nan)
    assert check.reason.endswith(f"NaN or infinity at {counts} of {counts} positions")
    for eager, compiled in ((exact * math.nan, exact), (exact[:, 1:], exact[:, 1:])):
        with pytest.raises(MeasurementError):
            checks.compare_with_compiled("compiled", eager, compiled)


def nan_once(case: AttentionCase) -> Any:
    out = find("sdpa-math").attend(case).out
    out[0, 0, 0, 0] = torch.nan
    return out


@pytest.mark.slow
def test_a_sequence_without_a_number_is_no_pass(capsys: Any, tmp_path: Path) -> None:
    """NaN in one of four sequences fails the kernel, whatever the others cost."""
    flags = ("--no-sites", "--sequences", "4", "--kernel", "test_effects:nan_once")
    report = studied(capsys, tmp_path, models.saved("llama", tmp_path), *flags)
    assert [(f.rule, f.kernel) for f in report.findings] == [
        ("finite", "test_effects:nan_once")
    ]
    assert (
        "gives NaN or infinity where another kernel does not"
        in report.findings[0].sentence
    )
    [reason] = {
        r.reason for r in report.rows if r.status == "failed" and r.kind == "whole"
    }
    assert reason.endswith("first in the input of model.layers.0.self_attn.o_proj")


def test_what_chooses_is_not_judged_by_flips_and_what_has_no_places_not_by_causality() -> (
    None
):
    """A router by argmax; a classifier that pools, whose output has no positions."""
    assert {"topk", "argmax"} <= CHOOSES
    model = transformers.LlamaForSequenceClassification(models.build("llama").config)
    ids = torch.arange(1, 17)[None]
    how = Scored.from_answer(model, model(input_ids=ids), {"input_ids": ids})
    assert how.logits
    assert not (how.targets >= 0).any()


def test_final_states_are_compared_where_there_are_no_logits(
    capsys: Any, tmp_path: Path
) -> None:
    report = studied(
        capsys, tmp_path, models.saved("t5", tmp_path), "--no-sites", "--length", "16"
    )
    whole = run_of(report, "whole", kernel="sdpa-math")
    assert report.output == "states"
    assert whole.flips is None
    assert whole.cost.mean == pytest.approx(whole.error**2, rel=0.5)
    assert 0 < whole.angle < 5


@pytest.mark.thorough
def test_it_continues_and_workers_and_streams_find_the_same(
    capsys: Any, tmp_path: Path
) -> None:
    """Cut off after some runs, shared out, or with weights on disk: the same rows."""
    target, more = models.saved("llama", tmp_path), ("--sequences", "2", "--no-sites")
    whole = studied(capsys, tmp_path / "a", target, *more)
    for name, flags in {"b": ("--workers", "1"), "c": ("--stream",)}.items():
        assert (
            studied(capsys, tmp_path / name, target, *more, *flags).rows == whole.rows
        ), name
    journal = tmp_path / "a" / "out" / "rows.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:6]))
    (tmp_path / "a" / "out" / "report.json").unlink()
    assert studied(capsys, tmp_path / "a", target, *more).rows == whole.rows


def test_the_numbers_of_a_sequence() -> None:
    """KL(exact || x) by scipy's own, the log-probability of the token that follows, the
    margin of a flip beside the error that chance makes, and what is added to all logits
    alike changes nothing.
    """
    generator = torch.Generator().manual_seed(0)
    exact = 3 * torch.randn(1, 16, 5, generator=generator, dtype=torch.float64)
    x = exact + 2 * torch.randn(1, 16, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(5, (1, 16), generator=generator)
    targets = torch.cat([tokens[:, 1:], torch.tensor([[-1]])], dim=1)
    how = Scored(
        logits=True, counted=torch.ones(1, 16, dtype=torch.bool), targets=targets
    )
    chance = torch.full((1, 16), 1e-3, dtype=torch.float64)
    [row], [shifted] = (
        score_sequences(y, exact, how, chance, exact)
        for y in (x, x + torch.arange(16.0)[:, None])
    )
    P, Q = (y[0].softmax(-1).numpy() for y in (exact, x))
    cost = rel_entr(P, Q).sum(-1)
    change = np.log(Q / P)[np.arange(15), tokens[0, 1:]]
    best, first = P.argmax(-1), Q.argmax(-1)
    assert row["cost"] == pytest.approx(cost.mean(), rel=1e-12)
    assert row["cost_max"] == pytest.approx(cost.max(), rel=1e-12)
    assert row["growth"][3] == pytest.approx(cost[6:8].mean(), rel=1e-12)
    assert row["log_prob"] == pytest.approx(np.abs(change).mean(), rel=1e-12)
    assert row["log_prob_max"] == pytest.approx(np.abs(change).max(), rel=1e-12)
    assert row["log_perplexity"] == pytest.approx(-change.mean(), rel=1e-12)
    assert (row["flips"], row["first_flip"]) == (
        (best != first).sum(),
        (best != first).argmax(),
    )
    margin = np.log(P.max(-1) / P[np.arange(16), first])
    assert row["unexplained"] == (margin > 4e-3).sum() > 0
    assert row["from_against"] == row["error"] > 0
    assert {n: shifted[n] for n in ("flips", "unexplained")} == {
        n: row[n] for n in ("flips", "unexplained")
    }
    assert shifted["error"] == pytest.approx(row["error"], rel=1e-9)
    wide = score_sequences(x, exact, how, torch.full_like(chance, 100.0), None)
    assert wide[0]["unexplained"] == 0
    [broken] = score_sequences(torch.full_like(x, torch.nan), exact, how, chance, None)
    assert broken["reason"] == "NaN or infinity in the output at 16 of 16 positions"


@pytest.mark.parametrize(("name", "shift"), [("gpt2", 1), ("bert", 0)])
def test_a_position_is_scored_by_the_token_that_it_predicts(
    name: str, shift: int
) -> None:
    model, ids = models.build(name), torch.arange(1, 9)[None]
    how = Scored.from_answer(model, model(input_ids=ids), {"input_ids": ids})
    assert how.targets[0].tolist() == ids[0, shift:].tolist() + [-1] * shift


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("llama", ("self_attn.q_proj q, k, v; self_attn.o_proj output projection; mlp.up_proj MLP")),
        ("gpt2", ("attn.c_attn q, k, v; attn.c_proj output projection; mlp.c_fc MLP; ln_1 norms")),
        ("bert", "attention.self.key q, k, v; attention.output.dense output projection; "
         "intermediate.dense MLP; output.dense MLP; output.LayerNorm norms"),
        ("t5", ("layer.0.SelfAttention.q q, k, v; layer.0.SelfAttention.o output projection")),
        ("vit", "attention.q_proj q, k, v; mlp.fc1 MLP; layernorm_before norms"),
    ],
)  # fmt: skip
def test_operations_stand_where_their_module_does(name: str, sites: str) -> None:
    model = models.build(name)
    places = SiteTracker(model)
    kinds = {m: places.kinds[x] for m, x in model.named_modules() if m}
    for place in sites.split("; "):
        module, _, site = place.partition(" ")
        result = {kind for m, kind in kinds.items() if m.endswith(f".0.{module}")}
        assert result == {site}, (module, [m for m in kinds if ".0." in m])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moved_inputs_are_one_or_two_ulps_off(dtype: torch.dtype) -> None:
    """All normal numbers from 1/2 to 4; a subnormal one is by one at most, 0 not."""
    bits = [torch.tensor(x, dtype=dtype).view(torch.int16).item() for x in (0.5, 4.0)]
    numbers = torch.arange(*bits, dtype=torch.int16)
    small = torch.arange(3, dtype=torch.int16)  # 0 and two subnormal numbers
    values = torch.cat([small, numbers]).view(dtype)
    layer = nn.Embedding.from_pretrained(values[:, None])
    fmt = format_of(dtype)
    with _with_moved_embedding(layer, fmt, 0):
        moved = layer(torch.arange(len(values)))[:, 0]
    steps = (moved.view(torch.int16) - values.view(torch.int16)).abs()
    assert steps[0] == 0
    assert steps[1:3].max() <= 1
    assert set(steps[3:].tolist()) == {1, 2}


def test_a_model_may_be_the_list_of_its_layers() -> None:
    """Its layers' names are then numbers alone."""
    layers = [nn.TransformerEncoderLayer(4, 1, dim_feedforward=4) for _ in range(2)]
    places = SiteTracker(nn.Sequential(*layers))
    assert places.layers == set(layers)
    assert places.kinds[layers[1].linear1] == "MLP"
    assert places.kinds[layers[1].self_attn.out_proj] == "output projection"


def sites_of(
    subject: Any, inputs: Any, patch: pytest.MonkeyPatch, **how: Any
) -> list[Any]:
    """The operations of an exact run, each with its site."""
    met: list[Any] = []
    original = SiteTracker.site_of

    def site_of(self: Any, func: Any, args: Any) -> str:
        site = original(self, func, args)
        met.append((func.overloadpacket.__name__, site))
        return site

    patch.setattr(SiteTracker, "site_of", site_of)
    subject.run_exactly(inputs, **how)
    patch.setattr(SiteTracker, "site_of", original)
    return met


def test_a_sum_inside_an_activation_is_no_residual(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPT-2's GELU adds a cube to its input; two sums a layer are the residual
    stream's."""
    study, subject = opened(
        models.saved("gpt2", tmp_path, n_inner=32), sequences=1, length=12
    )
    met = sites_of(subject, study.chunks[0], monkeypatch)
    assert met.count(("add", "residual")) == 2 * 2
    assert met.count(("add", "activation")) == 2 * 2  # with the cube, and with 1


# In bfloat16
TENTH, TWO_THIRDS, ONE_THIRTIETH = 0.10009765625, 0.66796875, 0.033447265625
MOVING = {  # of two numbers, 1/3 and 1/30, that nothing has rounded yet
    "clamp": (lambda x: x.clamp(max=0.1), [TENTH, 1 / 30]),
    "where": (lambda x: torch.where(x > 0.1, 0.1, x), [TENTH, 1 / 30]),
    "masked_fill": (lambda x: x.masked_fill(x > 0.1, 0.1), [TENTH, 1 / 30]),
    "pad": (lambda x: F.pad(x, (0, 1), value=0.1), [1 / 3, 1 / 30, TENTH]),
    "full": (lambda x: torch.full((1,), 0.1, dtype=x.dtype), [TENTH]),
    "flip": (lambda x: x.flip(0), [1 / 30, 1 / 3]),
    "cat": (lambda x: torch.cat((x, x.clone())), [1 / 3, 1 / 30] * 2),
    "cast": (lambda x: x.clone().copy_(torch.full((2,), 0.1)), [TENTH] * 2),
    "with integers": (lambda x: torch.cat((x[:0], torch.tensor([1001]))), [1000.0]),
    "added up": (
        lambda x: x.index_put((torch.tensor([0]),), x[:1], accumulate=True),
        [TWO_THIRDS, ONE_THIRTIETH],
    ),
    "dropout": (lambda x: F.dropout(x[1:], 1e-9), [ONE_THIRTIETH]),
}


@pytest.mark.parametrize("name", MOVING)
def test_numbers_that_a_move_brings_in_are_rounded_at_its_site(name: str) -> None:
    """What it moves is as rounded as before; where it adds up or casts down, all is
    rounded."""
    function, expected = MOVING[name]
    fmt, places = (
        FORMATS["bfloat16"],
        SiteTracker(torch.nn.Sequential(torch.nn.Linear(2, 2))),
    )
    x = Wide.of(torch.tensor([1 / 3, 1 / 30], dtype=torch.float64), torch.bfloat16)
    with places.following(), Running(AtSites(places, fmt, ("embedding",))):
        output = function(x).exact
    assert output.tolist() == expected


class Turning(nn.Module):
    """A projection whose result a complex buffer turns, as Llama's first code did."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.tensor([0.1, 0.2])))

    def forward(self, x: Any) -> Any:
        turned = torch.view_as_complex(self.project(x).view(-1, 2, 2)) * self.turn
        return torch.view_as_real(turned)


def test_complex_buffers_are_exact_too() -> None:
    model, x = Turning(), torch.randn(3, 4)
    wide, twin = copy.deepcopy(model), copy.deepcopy(model).double()
    twin.turn = model.turn.to(torch.complex128)
    _widen_model(wide, model, "cpu")
    places = SiteTracker(wide)
    with (
        torch.no_grad(),
        places.following(),
        Running(AtSites(places, FORMATS["float32"], ())),
    ):
        output = wide(Wide.of(x.double(), torch.float32)).exact
    assert torch.equal(output, twin(x.double()))


def test_attention_by_hand_has_its_own_sites(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scores up to the softmax, and the output; a narrow softmax is told of there, and
    not at the rotary embedding."""

    def narrow(
        module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any
    ) -> Any:
        k, v = (llama.repeat_kv(x, module.num_key_value_groups) for x in (k, v))
        scores = q @ k.mT * scaling + (0 if mask is None else mask)
        P = scores.to(torch.bfloat16).softmax(-1).to(q.dtype)
        return (P @ v).transpose(1, 2).contiguous(), P

    monkeypatch.setattr(llama, "eager_attention_forward", narrow)
    target = models.saved("llama", tmp_path)
    study, subject = opened(target, sequences=1, length=12, formats=("float32",))
    with capture.attention_override(subject.wide, "eager"):
        met = sites_of(subject, study.chunks[0], monkeypatch, attention=None)
    assert met.count(("_softmax", "attention scores")) == 2
    assert (
        met.count(("bmm", "attention scores"))
        == met.count(("bmm", "attention output"))
        == 2
    )
    assert subject.narrower == {"attention scores": "bfloat16"}


def test_attentions_sites_are_of_the_kernel_that_is_used(tmp_path: Path) -> None:
    """What a model calls that asks for no backend, else the first; a report that says
    another is refused."""
    target = models.saved("llama", tmp_path)
    assert opened(target)[0].used_kernel.kernel.name == "sdpa-default"
    math_alone = opened(target, kernels=({"name": "sdpa-math"},))[0]
    assert math_alone.used_kernel.kernel.name == "sdpa-math"
    report = read(Path(__file__).parent / "data" / "reports" / "effects.json")
    assert isinstance(report, EffectsReport)
    assert report.plan.sites_of == "sdpa-math"
    other = report.plan.model_copy(update={"sites_of": "baseline"})
    with pytest.raises(MeasurementError, match="attention's sites of another kernel"):
        check_consistency(report.model_copy(update={"plan": other}))


def test_a_comparison_tells_a_moved_cost_from_scatter(
    capsys: Any, tmp_path: Path
) -> None:
    """Costs that scatter by a factor of 1.3 either way have not moved; all of a kernel's
    doubled beside that have, and theirs alone."""
    stored = read(Path(__file__).parent / "data" / "reports" / "effects.json")
    assert isinstance(stored, EffectsReport)
    scatter = np.random.default_rng(0)

    def drawn(factor: float) -> EffectsReport:
        rows = []
        count = 12 * stored.plan.sequences
        for at, row in itertools.product(
            range(0, count, stored.plan.sequences), stored.rows
        ):
            times = float(np.exp(0.2 * scatter.normal())) * (
                factor if row.kernel else 1.0
            )
            costs = {
                name: getattr(row, name) for name in ("cost", "cost_p999", "cost_max")
            }
            costs = {name: value and value * times for name, value in costs.items()}
            rows.append(row.model_copy(update={"sequence": at + row.sequence, **costs}))
        source = {
            **stored.provenance.source,
            "sequences_read": count,
            "sequences_asked": count,
        }
        return stored.model_copy(update={
            "rows": tuple(rows), "plan": stored.plan.model_copy(update={"sequences": count}),
            "provenance": stored.provenance.model_copy(update={"source": source}),
        })  # fmt: skip

    same, moved = (compare(drawn(1.0), drawn(factor)) for factor in (1.0, 2.0))
    assert (same.exit_code, same.moves) == (0, ())
    assert moved.exit_code == 1
    assert {(m.kernel == "model") for m in moved.moves} == {False}
    assert len(moved.moves) == sum(group.kernel != "model" for group in moved.groups)


def test_a_ratio_says_what_it_is_over() -> None:
    """A report that does not is none: its limit could not be chosen."""
    ratio = {"mean": 1.0}
    fields = {name: field.annotation for name, field in RunSummary.model_fields.items()
              if field.is_required()}  # fmt: skip
    passed: dict[str, Any] = {n: 1 if t is int else "x" for n, t in fields.items()}
    passed |= {"kind": "whole"} if "kind" in fields else {}
    assert RunSummary.model_validate({**passed, "over": ratio, "beside": "against"}).over
    with pytest.raises(
        ValueError, match="beside: expected what `over` is held against, got null"
    ):
        RunSummary.model_validate({**passed, "over": ratio})


def output(kind: str, costs: tuple[float, ...], **which: Any) -> list[OutputRow]:
    """One run by hand, on a sequence for each cost; only what a test needs is not
    usual."""
    usual: dict[str, Any] = {
        "format": "bfloat16",
        "positions": 32,
        "flips": 0,
        "unexplained": 0,
    }
    return [
        OutputRow(
            **{**usual, "kind": kind, "sequence": i, "cost": cost, "error": 0.1, **which}
        )
        for i, cost in enumerate(costs)
    ]


def test_a_run_over_its_sequences_is_what_its_formulas_say() -> None:
    """Means, sums, extremes; a ratio is taken sequence by sequence, its mean is
    geometric, and t(0.975, 2) = 4.302653 standard errors of its logarithm are its
    interval. Of two sequences there is none."""
    alone, predicted, whole = (2e-5, 6e-5, 8e-5), (1e-5, 2e-5, 2e-5), (1e-4, 4e-4, 2e-4)
    rows = output("whole", whole, kernel="k")
    extremes = [
        {"cost_max": 3e-3, "first_flip": 9, "flips": 5, "positions": 32, "error": 0.2},
        {"cost_max": 7e-3, "first_flip": 4, "flips": 2, "positions": 30, "error": 0.4},
        {"cost_max": 1e-3, "first_flip": 6, "flips": 1, "positions": 31, "error": 0.9},
    ]
    rows = [row.model_copy(update=x) for row, x in zip(rows, extremes, strict=True)]
    rows += output("attention", alone, kernel="k") + output(
        "predicted", predicted, kernel="k"
    )
    runs = {run.kind: run for run in summarise(rows, "baseline", logits=True).runs}
    ratios = np.log([2.0, 3.0, 4.0])
    half = 4.302653 * ratios.std(ddof=1) / math.sqrt(3)
    over, share = runs["attention"].over, runs["attention"].share
    assert over.mean == pytest.approx(24 ** (1 / 3))
    assert (over.low, over.high) == pytest.approx(
        (math.exp(ratios.mean() - half), math.exp(ratios.mean() + half)), rel=1e-6
    )
    assert runs["attention"].over_worst == pytest.approx(4.0)
    assert share.mean == pytest.approx((0.2 * 0.15 * 0.4) ** (1 / 3))
    summed = runs["whole"]
    assert summed.cost.mean == pytest.approx(7e-4 / 3)
    assert (summed.cost_max, summed.first_flip, summed.flips, summed.positions) == (
        7e-3,
        4,
        8,
        93,
    )
    assert summed.error == pytest.approx(0.5)
    two = [row for row in rows if row.sequence < 2]
    short = {run.kind: run for run in summarise(two, "baseline", logits=True).runs}
    assert (short["attention"].over.low, short["attention"].share.high) == (None, None)


def test_an_error_beside_none_is_no_ratio() -> None:
    """A sequence in which what is predicted is 0, or not there, is counted; one that
    failed too."""
    predicted = output("predicted", (0.0, 1e-5, 1e-5), kernel="k")
    alone = output("attention", (1e-5, 1e-5, 1e-5, 1e-5), kernel="k")
    broken = output(
        "attention", (None,), kernel="k", status="failed", reason="x", error=None
    )
    broken += output(
        "attention", (None,), kernel="k", status="skipped", reason="y", error=None
    )
    others = [row.model_copy(update={"sequence": 4 + i}) for i, row in enumerate(broken)]
    result = summarise([*alone, *others, *predicted], "baseline", logits=True).runs
    (run,) = (run for run in result if run.kind == "attention")
    assert (run.unmatched, run.failed, run.over.mean) == (2, 1, 1.0)


@pytest.mark.parametrize(("total", "adds_up"), [
    (0.89, False), (0.901, True), (1.099, True), (1.11, False), (2.0, False),
])  # fmt: skip
def test_sites_add_up_within_a_tenth_either_way(total: float, adds_up: bool) -> None:
    """The sum of their costs over that of the whole; the three largest are named, from
    the largest on, in per cent; a sum of any other multiple is told, and no share."""
    whole = (1e-3, 3e-3, 2e-3)
    shares = {"a": 0.1, "b": 0.4, "c": 0.05, "d": 0.3, "e": 0.15}
    rows = output("whole", whole, kernel="k")
    for site, share in shares.items():
        rows += output("site", tuple(total * share * cost for cost in whole), site=site)
    result = summarise(rows, "baseline", logits=True)
    (budget,) = result.budgets
    assert budget.adds_up == adds_up
    assert budget.parts.mean == pytest.approx(total)
    parts = "largest sites: " + ", ".join(
        f"{site} {percent(total * shares[site])}" for site in "bde"
    )
    assert (parts in result.answer[-1]) == adds_up
    assert bool(result.notes) != adds_up


def test_the_answers_numbers_are_their_own() -> None:
    """Attention's share, the distance to the other kernel over the error, the flips of
    both."""
    rows = output(
        "whole",
        (4e-4,) * 3,
        kernel="k",
        error=0.25,
        from_against=0.05,
        flips=3,
        unexplained=1,
        log_perplexity=0.01,
    )
    rows += output(
        "whole", (5e-4,) * 3, kernel="baseline", error=0.5, flips=2, from_against=0.0
    )
    rows += output("attention", (1e-4,) * 3, kernel="k")
    rows += output("moved", (9e-4,) * 3, kernel="baseline", from_against=0.1)
    assert summarise(rows, "baseline", logits=True).answer == (
        "bfloat16 with k: KL 4.0e-4 nats/token, loss +0.01 nats, perplexity +1 %.",
        "bfloat16 with k: changes the top token at 9 of 96 positions, 3 of them not near "
        "ties (6 with baseline).",
        "bfloat16 with k: 25 % of the error is from attention alone.",
        "bfloat16 with k: k and baseline differ by 0.200× the error (inputs 1 or 2 ulps "
        "off: 0.400×).",
    )


STORED = Path(__file__).parent / "data" / "reports" / "effects.json"
SIZES = {("attention", "sdpa-math"): "own", ("whole", "sdpa-math"): "model"}


def by_ratios(
    alone_ratios: tuple[float, ...],
    model: tuple[float, ...] | None = None,
    fmt: str = "bfloat16",
    **of_whole: Any,
) -> EffectsReport:
    """The stored report with other costs, a sequence for each ratio of sdpa-math's
    attention alone to its prediction, and of the model to its sites: 1e-5 and 1e-4 in
    every sequence."""
    stored = read(STORED)
    assert isinstance(stored, EffectsReport)
    ratios = {"own": alone_ratios, "model": model or (1.0,) * len(alone_ratios)}
    rows = []
    for i in range(len(alone_ratios)):
        for row in (r for r in stored.rows if r.sequence == 0):
            cost = {"predicted": 1e-5, "attention": 1e-5}.get(row.kind, 1e-4)
            name = SIZES.get((row.kind, row.kernel)) if row.layer is None else None
            changes: dict[str, Any] = {"sequence": i, "format": fmt}
            changes["cost"] = cost * (ratios[name][i] if name else 1.0)
            rows.append(
                row.model_copy(update=changes | (of_whole if name == "model" else {}))
            )
    plan = stored.plan.model_copy(
        update={"sequences": len(alone_ratios), "formats": (fmt,)}
    )
    return stored.model_copy(update={"rows": tuple(rows), "plan": plan})


def that_was_tested(report: EffectsReport, rule: str, **limits: float) -> Any:
    """The test of sdpa-math by this rule."""
    book = Rules.model_validate({"effects": limits} if limits else {})
    [test] = (
        t
        for t in verdict.tests(report, book)
        if (t.rule, t.kernel) == (rule, "sdpa-math")
    )
    return test


@pytest.mark.parametrize(("rule", "line"), [
    ("finite", "gives no NaN and no infinity"), ("own share", ""),
    ("model", "error of the whole model: 1.00× all sites together"),
])  # fmt: skip
def test_what_passes_of_an_output_that_flips_nothing(rule: str, line: str) -> None:
    """Of states, or a pipeline's image, nothing is said of a top token. Attention that
    errs as little as all it is held against, 0, does not reach the output: that is no
    pass."""
    report = by_ratios((0.0,) * 3)
    no_flips = {"flips": None, "unexplained": None, "first_flip": None}
    rows = tuple(
        row.model_copy(update=no_flips) for row in report.rows
        if row.kind != "predicted" and (row.kind != "attention" or row.kernel == "sdpa-math")
    )  # fmt: skip
    plan = report.plan.model_copy(update={"logits": False})
    report = report.model_copy(update={"rows": rows, "plan": plan})
    report = verdict.with_summary(report)
    test = that_was_tested(report, rule)
    statement = verdict.passing(report, [test])
    assert (test.standing, statement and statement.line) == (
        ("held", line) if line else ("undecided", None)
    )


def test_a_kernel_whose_answer_a_model_does_not_use_does_not_pass(
    capsys: Any, tmp_path: Path
) -> None:
    """One that returns zeros would pass with it."""
    torch.manual_seed(0)
    save_file(factories.WeightsAlone().state_dict(), tmp_path / "w.safetensors")
    flags = ("--model", "factories:WeightsAlone", "--sequences", "3", "--no-sites")
    chosen = ("--kernel", "sdpa-math")
    report = studied(capsys, tmp_path, tmp_path / "w.safetensors", *flags, *chosen)
    assert that_was_tested(report, "own share").standing == "undecided"


@pytest.mark.parametrize(("ratios", "standing", "observed"), [
    ((1.99,) * 3, "held", 1.99), ((2.01,) * 3, "exceeded", 2.01),
    ((1.0, 2.0, 3.0), "held", 6 ** (1 / 3)),  # its interval goes beyond
    ((1.5, 2.2, 3.2), "undecided", (1.5 * 2.2 * 3.2) ** (1 / 3)),  # and that from below
    ((0.0,) * 3, "held", 0.0), ((0.0, 0.0), "undecided", 0.0),  # of further ones unknown
    ((1.0, 1.0), "undecided", 1.0), ((2.5, 2.5), "undecided", 2.5),  # without an interval
    # Ten times the limit
    ((19.9, 19.9), "undecided", 19.9), ((20.1, 20.1), "exceeded", 20.1),
    ((1, 1, 1, 1, 19.9), "held", 19.9 ** 0.2), ((1, 1, 1, 1, 20.1), "exceeded", 20.1),
])  # fmt: skip
@pytest.mark.parametrize("rule", ["own share", "model"])
def test_a_ratio_on_both_sides_of_its_limit(
    ratios: tuple[float, ...], standing: str, observed: float, rule: str
) -> None:
    """2: beyond it the lower end of the interval decides, within it the ratio itself; a
    single sequence ten times as far is certain."""
    ones = (1.0,) * len(ratios)
    report = by_ratios(*((ratios, ones) if rule == "own share" else (ones, ratios)))
    limit = {"own share": "kernel_over_predicted", "model": "model_over_sites"}[rule]
    test = that_was_tested(report, rule, **{limit: 2.0})
    assert (test.standing, test.bound) == (standing, 2.0)
    assert test.observed == pytest.approx(observed)
    assert test.offending == (standing == "exceeded")
    assert bool(test.reasons) == (standing == "undecided")


def test_float32_has_a_limit_of_its_own() -> None:
    """For the model over its sites, where fp32's arithmetic is no rounding site."""
    limits = {"model_over_sites": 2.0, "model_over_sites_float32": 5.0}
    for fmt, bound in (("bfloat16", 2.0), ("float32", 5.0)):
        assert (
            that_was_tested(by_ratios((1.0,) * 3, fmt=fmt), "model", **limits).bound
            == bound
        )


def test_an_error_where_none_is_predicted_is_undecided() -> None:
    """In one sequence of four: the others' ratios say nothing of it."""
    report = by_ratios((1.0,) * 4)
    rows = [
        row.model_copy(update={"cost": 0.0})
        if (row.kind, row.kernel, row.sequence) == ("predicted", "sdpa-math", 2) else row
        for row in report.rows
    ]  # fmt: skip
    test = that_was_tested(report.model_copy(update={"rows": tuple(rows)}), "own share")
    assert test.standing == "undecided"
    assert "there is an error, and none in" in test.reasons[0]


@pytest.mark.parametrize(("flips", "standing"), [(2, "held"), (3, "exceeded")])
def test_flips_at_their_limit_are_within(flips: int, standing: str) -> None:
    """In all sequences together."""
    report = by_ratios((1.0,) * 3, flips=flips, unexplained=flips)
    test = that_was_tested(report, "flips", unexplained_flips=6.0)
    assert (test.standing, test.observed, test.bound) == (standing, 3.0 * flips, 6.0)


def test_nan_of_attention_alone_is_the_kernels_fault() -> None:
    """Though the whole model with it is finite, since another kernel's is too."""
    bare: dict[str, Any] = dict.fromkeys(
        ("cost", "error", "cost_p999", "cost_max", "log_prob", "log_prob_p999", "log_prob_max",
         "log_perplexity", "from_against", "flips", "unexplained", "first_flip")
    )  # fmt: skip
    bare |= {
        "status": "failed",
        "nonfinite": 1,
        "reason": "NaN",
        "positions": 0,
        "growth": (),
    }
    report = by_ratios((1.0,) * 3)
    rows = [
        row.model_copy(update=bare)
        if (row.kind, row.kernel, row.layer) == ("attention", "sdpa-math", None)
        and row.sequence == 1 else row
        for row in report.rows
    ]  # fmt: skip
    test = that_was_tested(report.model_copy(update={"rows": tuple(rows)}), "finite")
    assert (test.standing, test.observed) == ("exceeded", 1.0)


@pytest.mark.parametrize(
    ("applies", "standing"), [(True, "undecided"), (False, "not applicable")]
)
def test_a_check_without_an_answer_applies_or_not(applies: bool, standing: str) -> None:
    """One that was asked for and could not be tried is no pass."""
    report = by_ratios((1.0,) * 3)
    gone = report.checks[1].model_copy(
        update={"holds": None, "difference": None, "limit": None, "applies": applies,
                "reason": "none today"}
    )  # fmt: skip
    checks = (report.checks[0], gone, *report.checks[2:])
    result = verdict.tests(report.model_copy(update={"checks": checks}), Rules())
    assert [(t.standing, t.reasons) for t in result if t.rule == gone.name] == [
        (standing, ("none today",))
    ]


def test_a_finding_tells_ratio_limit_and_share_apart() -> None:
    """2.5 times what is predicted, beyond 2, which is a quarter of the whole error."""
    result = judged(by_ratios((2.5,) * 3), Rules.model_validate({"effects": {
        "kernel_over_predicted": 2.0, "model_over_sites": 9.0}}))  # fmt: skip
    [finding] = result.findings
    assert finding.sentence == (
        "sdpa-math (bfloat16) error of attention alone: 2.5× expected (limit 2×)."
    )
    assert finding.details == (
        "Errors as KL; limit 2×. Attention makes 25 % of the model's bfloat16 error."
    )
    assert (finding.observed, finding.limit) == (pytest.approx(2.5), 2.0)


def test_what_others_are_compared_with_has_its_name() -> None:
    """Where nothing is predicted, and `--against` names another kernel than eager
    attention: in sentence, column and legend."""
    report = by_ratios((0.01,) * 3)
    rows = tuple(row for row in report.rows if row.kind != "predicted")
    plan = report.plan.model_copy(update={"against": "sdpa-math"})
    request = report.request | {"against": "sdpa-math"}
    changes = {"rows": rows, "plan": plan, "request": request}
    result = judged(report.model_copy(update=changes))
    assert result.findings[0].sentence == (
        "baseline (bfloat16) error of attention alone: 100× sdpa-math (limit 16×)."
    )
    assert "eager" not in str(list(blocks(result.model_copy(update={"checks": ()}))))


@pytest.mark.parametrize("ratios", [(0.01, 20.1), (1.0, 1.0, 1.0, 1.0, 20.1)])
def test_a_ratio_of_one_sequence_says_so(ratios: tuple[float, ...]) -> None:
    """Whether the run has an interval or not."""
    limits = {"kernel_over_predicted": 2.0}
    report = judged(by_ratios(ratios), Rules.model_validate({"effects": limits}))
    assert report.findings[0].sentence == (
        "sdpa-math (bfloat16) error of attention alone: 20.1× expected in one sequence "
        "(limit 2×)."
    )


CONTRADICTIONS = {
    "more unexplained flips than flips": {"flips": 3, "unexplained": 4, "first_flip": 1},
    "a cost above its largest": {"cost_p999": 5e-2, "cost_max": 4e-2},
    "a log_prob above its largest": {"log_prob_p999": 5.0, "log_prob_max": 4.0},
}


@pytest.mark.parametrize("words", [*CONTRADICTIONS, "has no row, or several"])
def test_a_row_that_cannot_be_is_refused(words: str) -> None:
    """In one run of one sequence; and one that is there twice."""
    report = read(STORED)
    assert isinstance(report, EffectsReport)
    at = next(
        i for i, row in enumerate(report.rows) if row.kind == "whole" and row.kernel
    )
    changed = report.rows[at].model_copy(update=CONTRADICTIONS.get(words, {}))
    twice = (*report.rows, changed)
    rows = (
        (*report.rows[:at], changed, *report.rows[at + 1 :])
        if words in CONTRADICTIONS
        else twice
    )
    check_consistency(report)
    with pytest.raises(MeasurementError, match=words):
        check_consistency(report.model_copy(update={"rows": rows}))


def test_the_views_numbers_stand_in_their_columns() -> None:
    """Sites from the largest on, with their shares; a kernel's attention alone; of a
    check the difference and not the limit."""
    whole = (1e-3, 1e-3, 1e-3)
    shares = {"a": 0.1, "b": 0.5, "c": 0.4}
    rows = output("whole", whole, kernel="k", from_against=0.01, log_perplexity=0.02)
    rows += output("attention", (2e-4,) * 3, kernel="k")
    for site, share in shares.items():
        rows += output("site", tuple(share * cost for cost in whole), site=site)
    report = by_ratios((1.0,) * 3)
    report = report.model_copy(
        update={"summary": summarise(rows, "baseline", logits=True)}
    )
    shown = list(Document("", tuple(blocks(report))).shown_in("markdown"))
    tables = {node.title: node for node in shown if isinstance(node, Table)}
    [sites] = (
        table for title, table in tables.items() if title.startswith("Share of the error")
    )
    assert [[c.text for c in row.cells[:2]] for row in sites.rows] == [
        ["b", "50 %"], ["c", "40 %"], ["a", "10 %"]
    ]  # fmt: skip
    kernels = tables["bfloat16 beside fp64"]
    assert [c.title for c in kernels.columns][6] == "attention's share"
    assert kernels.rows[0].cells[6].text == "20 %"
    (bars,) = (node for node in blocks(report) if isinstance(node, StackedBars))
    assert bars.names == ["b", "c", "a"]
    assert bars.bars[0][1] == pytest.approx({"b": 0.5, "c": 0.4, "a": 0.1})
    checks = tables["Two ways to compute one thing"]
    assert [row.cells[2].text for row in checks.rows] == [
        si(c.difference) for c in report.checks
    ]
    assert checks.rows[1].cells[2].text == "5.9e-15"


def test_the_error_comes_first_as_loss_and_perplexity() -> None:
    """KL, then what became of the text's perplexity and loss, with their sign: a loss that
    grows by 0.01 nats a token is a perplexity 1.005 % higher; then the worst of the
    tokens. Red is only what the rules refuse: attention's ratio, not the model's."""
    rows = output(
        "whole", (1e-3,) * 3, kernel="k", log_perplexity=0.01, log_prob=0.02, flips=4
    )
    rows += output("whole", (1e-3,) * 3, kernel="l", log_perplexity=-0.01, flips=0)
    report = by_ratios((1.0,) * 3)
    summary = summarise(rows, "baseline", logits=True)
    shown = blocks(report.model_copy(update={"summary": summary}))
    kernels = next(node for node in shown if isinstance(node, Table))
    assert [c.title for c in kernels.columns[1:6]] == [
        "KL, nats/token", "perplexity change", "loss change", "|Δ logprob|", "tokens changed"
    ]  # fmt: skip
    assert [[c.text for c in row.cells[1:6]] for row in kernels.rows] == [
        ["1.0e-3", "+1 %", "+0.01", "0.02", "12"],
        ["1.0e-3", "-1 %", "-0.01", "–", "0"],
    ]
    for alone, model, style in ((1.0, 1.0, ""), (9.0, 1.0, "bad"), (1.0, 9.0, "")):
        created = judged(by_ratios((alone,) * 3, (model,) * 3))
        assert bool(created.findings) == (alone + model > 2)
        table = next(node for node in blocks(created) if isinstance(node, Table))
        at = [c.title for c in table.columns].index("attention / expected")
        cells = {row.cells[0].text: row.cells[at] for row in table.rows}
        assert (cells["sdpa-math"].style, cells["baseline"].style) == (style, "")


def test_positions_and_layers_are_lines_on_a_page() -> None:
    """With the costs of the runs as their points; in a terminal they stay tables."""
    report = read(STORED)
    figures = [node for node in blocks(report) if isinstance(node, Figures)]
    layer, position = (node.figures[0] for node in figures)
    runs = report.summary.runs
    assert [p.mean for p in layer.curves[0].points] == [
        run.cost.mean for run in runs if run.layer is not None
    ]
    grown = {run.kernel: run.growth for run in runs if run.kind == "whole"}
    drawn = {c.label: tuple(p.mean for p in c.points) for c in position.curves}
    assert all(drawn[f"{kernel} bfloat16"] == growth for kernel, growth in grown.items())
    document = Document("", tuple(blocks(report)))
    terminal = [n.title for n in document.shown_in("terminal") if isinstance(n, Table)]
    assert "KL, nats/token by position, in equal parts of the sequence" in terminal


def test_checks_are_in_the_way_only_where_one_fails() -> None:
    """On a page they are behind a line that counts them, while all that apply hold."""
    report = read(STORED)
    titles = [node.title for node in blocks(report) if isinstance(node, Details)]
    assert "The model's own checks: 8 agree" in titles
    for holds in (False, None):
        changed = report.checks[1].model_copy(update={"holds": holds})
        checks = (changed, *report.checks[2:])
        nodes = blocks(report.model_copy(update={"checks": checks}))
        assert any(
            getattr(n, "title", "") == "Two ways to compute one thing" for n in nodes
        )


def test_the_first_layer_that_parts_is_named(tmp_path: Path) -> None:
    """Of two that do; and what is lost is told of the positions that count."""
    study, subject = opened(models.saved("llama", tmp_path), sequences=1, length=12)
    checks = Checks(subject, study.chunks[0], study.request)
    x, counts = (
        torch.ones(1, 3, 2, dtype=torch.float64),
        torch.tensor([[True, True, False]]),
    )
    layers = [f"model.layers.{i}.self_attn" for i in (0, 1)]
    one, other = (dict.fromkeys(layers, x * factor) for factor in (1, 2))
    check = checks.compare_runs("eager", (x, one), (2 * x, other), counts)
    assert check.reason.endswith("layer 0 is the first whose attention differs")
    lost = x.masked_fill(torch.arange(3)[:, None] == 1, math.nan)
    check = checks.compare_runs("eager", (x, {}), (lost, {}), counts)
    assert check.reason.endswith("NaN or infinity at 1 of 2 positions")
    errors = torch.randn(
        checks.exact_run[0].shape, generator=torch.Generator().manual_seed(0)
    )
    for times, holds in ((1.99, True), (2.01, False)):
        exact = checks.exact_run[0]
        check = checks.compare_with_compiled(
            "compiled", exact + errors, exact + times * errors
        )
        assert (check.holds, check.difference) == (holds, pytest.approx(times))


LATER = torch.ones(6, 6).triu(1)
# The last also hides all keys of the first token of a sequence
CAUSAL: dict[str, dict[str, Any]] = {
    "flag": {"is_causal": True},
    "bool": {"mask": LATER == 0},
    "-inf": {"mask": torch.full((6, 6), -math.inf).triu(1)},
    "-1e9": {"mask": -1e9 * LATER},
    "lowest": {"mask": torch.finfo(torch.float32).min * LATER},
    "padded": {"mask": torch.finfo(torch.float32).min * LATER.index_fill(
        0, torch.tensor([0]), 1.0)},
}  # fmt: skip


@pytest.mark.parametrize("by", CAUSAL)
@pytest.mark.parametrize(("causal", "applies"), [(1, False), (2, True)])
def test_a_model_is_a_decoder_where_most_of_its_calls_hide_later_keys(
    causal: int, applies: bool, by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One causal call of three makes none; two do, however the mask hides."""
    study, subject = opened(models.saved("bert", tmp_path), sequences=1, length=12)
    checks = Checks(subject, study.chunks[0], study.request)
    x = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(0))
    call = AttentionCase(ref=CaseRef(case="c"), q=x, k=x, v=x, scale=0.5)
    cases = [
        dataclasses.replace(call, **({} if n >= causal else CAUSAL[by])) for n in range(3)
    ]
    whole = checks.exact_run

    def exact(inputs: Any, **how: Any) -> Any:
        for case in cases if "attention" in how else ():
            how["attention"](case, subject.format)
        return whole

    monkeypatch.setattr(checks, "run_exactly", exact)
    result = checks.check_causality("input_ids")
    assert isinstance(result, Check) == applies
    assert applies or result == "the model is no decoder"
