"""Diffusers pipelines as a source: how they are opened, run and captured, and what is
said."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pipelines
import pytest
import torch
from commands import refusal
from safetensors.torch import load_file, save_file

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.request_models import AuditRequest, Choice
from numdev.sources.case_sources import open_source
from numdev.sources.diffusers_pipeline import Painter
from numdev.system import System

BLOCKS = 4  # of the UNet: down, middle, two in up; each with self and cross attention
OWN_CODE = "takes classes of diffusers and transformers alone"


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.stable_diffusion(tmp_path_factory.mktemp("sd"))


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.dit(tmp_path_factory.mktemp("dit"))


def request(path: Path, **passed: Any) -> AuditRequest:
    passed = {"sequences": 2, "denoise": 2, "device": "cpu", **passed}
    passed["kernels"] = (Choice(name="sdpa-math"),)
    return AuditRequest(target=path.name, checkpoint=str(path), **passed)


def captured(path: Path, **passed: Any) -> list[AttentionCase]:
    """Every case that the pipeline's source hands over."""
    return [x.load() for x in open_source(request(path, **passed), System.probe("cpu"))]


def edited(path: Path, to: Path, **changes: Any) -> Path:
    """A copy of a pipeline's directory with other entries in its index."""
    to.mkdir()
    for part in path.iterdir():
        if part.is_dir():
            (to / part.name).symlink_to(part)
    index = json.loads((path / "model_index.json").read_text())
    (to / "model_index.json").write_text(json.dumps(index | changes))
    return to


@pytest.mark.slow
def test_every_call_of_the_unet_at_every_step(unet: Path) -> None:
    """Four blocks with self and cross attention, twice; none of the text encoder or the
    VAE."""
    cases = captured(unet)
    assert [c.ref.step for c in cases] == [0] * 2 * BLOCKS + [1] * 2 * BLOCKS
    assert [c.ref.attends for c in cases] == ["self", "cross"] * BLOCKS * 2
    second = {c.ref.case for c in cases if c.ref.step == 1}
    assert second == {f"{c.ref.module}#1/step1" for c in cases}
    assert all(c.kv_len == (c.q_len if c.ref.attends == "self" else 12) for c in cases)
    assert all(c.ref.attends != "self" or ".attn1" in c.ref.module for c in cases)
    # Two images, each with and without its prompt
    assert {c.q.shape[0] for c in cases} == {4}


def test_the_captured_run_is_the_pipelines_own(unet: Path) -> None:
    """The denoiser is given, and answers, the very bits of an unwatched run with these
    arguments; in the wrong order of steps the comparison fails."""
    source: Any = open_source(request(unet), System.probe("cpu"))
    answers: list[torch.Tensor] = []
    source.denoiser.register_forward_hook(
        lambda m, a, out: answers.append(out[0].clone())
    )
    list(source)
    watched, answers[:] = list(answers), []
    how = {"generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    source.pipeline(**source.arguments, num_inference_steps=2, **how)
    assert len(watched) == len(answers) == 2
    assert all(torch.equal(a, b) for a, b in zip(watched, answers, strict=True))
    assert not torch.equal(watched[0], answers[1])


def test_a_scheduler_that_evaluates_twice_has_more_steps(tmp_path: Path) -> None:
    """Heun: three steps are five evaluations, and each is one of the calls' steps."""
    path = pipelines.stable_diffusion(
        tmp_path, diffusers.HeunDiscreteScheduler(steps_offset=1)
    )
    assert {c.ref.step for c in captured(path, denoise=3)} == {0, 1, 2, 3, 4}


def test_gradients_are_drawn(dit: Path) -> None:
    """A pipeline has no loss: each case carries a drawn dO, and says so."""
    cases = captured(dit, backward=True)
    assert all(c.grad_out is not None and c.grad_out_from for c in cases)


def test_prompts_from_a_file(unet: Path, tmp_path: Path) -> None:
    """A line is a prompt; fewer lines than images are used again; the text changes the
    keys."""
    (tmp_path / "p.txt").write_text("a red cat\n\n  a small house \n")
    passed = {"sequences": 3, "denoise": 1, "text": (str(tmp_path / "p.txt"),)}
    source: Any = open_source(request(unet, **passed), System.probe("cpu"))
    assert source.arguments == {"prompt": ["a red cat", "a small house", "a red cat"]}
    assert source.describe()["prompt"] == "3 images, prompts: 2 of p.txt"
    cross = [c for c in captured(unet, **passed) if c.ref.attends == "cross"]
    other = [
        c for c in captured(unet, sequences=3, denoise=1) if c.ref.attends == "cross"
    ]
    assert not torch.equal(cross[0].k, other[0].k)


@pytest.mark.parametrize(("entry", "value", "code", "says"), [
    ("_class_name", ["my_pipeline", "MyPipeline"], 2, OWN_CODE),
    ("unet", ["my_unet", "MyUNet"], 2, OWN_CODE),
    ("../unet", ["diffusers", "UNet2DConditionModel"], 2, OWN_CODE),
    ("_class_name", "NoSuchPipeline", 3, "has no NoSuchPipeline"),
    ("unet", ["diffusers", "DiffusionPipeline"], 3, "has no DiffusionPipeline"),
    ("extra", ["diffusers", "AutoencoderKL"], 3, "is missing"),
])  # fmt: skip
def test_names_that_are_no_parts(
    unet: Path, tmp_path: Path, capsys: Any, entry: str, value: Any, code: int, says: str
) -> None:
    """A custom pipeline, a part of another library, a path for a name, a class that is no
    part of a pipeline: none is built, and no code run."""
    path = edited(unet, tmp_path / "p", **{entry: value})
    for name in ("my_pipeline.py", "my_unet.py", "pipeline.py"):
        (path / name).write_text("raise SystemExit('code ran')")
    assert says in refusal(capsys, code, path)


def denoiser_alone(dit: Path, path: Path) -> Path:
    """A copy of the pipeline whose denoiser has its configuration and no weights."""
    part = edited(dit, path) / "transformer"
    part.unlink()
    part.mkdir()
    (part / "config.json").write_bytes((dit / "transformer" / "config.json").read_bytes())
    return part


def test_a_pickle_is_not_read(dit: Path, tmp_path: Path, capsys: Any) -> None:
    """Weights as .bin alone: the file is named, and is not opened."""
    part = denoiser_alone(dit, tmp_path / "p")
    (part / "diffusion_pytorch_model.bin").write_bytes(b"no pickle")
    assert "no weights that numdev reads" in refusal(capsys, 2, part.parent)


def test_weights_that_are_missing_are_named(
    dit: Path, tmp_path: Path, capsys: Any
) -> None:
    """A tensor short: no layer is left as it was drawn."""
    part, name = (
        denoiser_alone(dit, tmp_path / "p"),
        "diffusion_pytorch_model.safetensors",
    )
    tensors = load_file(dit / "transformer" / name)
    del tensors["transformer_blocks.1.attn1.to_q.weight"]
    save_file(tensors, part / name)
    assert "transformer_blocks.1.attn1.to_q.weight" in refusal(capsys, 3, part.parent)


@pytest.mark.parametrize(("steps", "lacks"), [(1, "image"), (0, "image or latents")])
def test_a_pipeline_that_ends_without_decoding_is_one_line(
    steps: int, lacks: str
) -> None:
    """As one does whose last part is another model than its VAE."""
    scheduler = SimpleNamespace(
        step=lambda: (torch.ones(1),), set_timesteps=lambda n: None
    )
    vae = SimpleNamespace(decode=lambda x: (x,), dtype=torch.float32)

    class Pipeline(SimpleNamespace):
        def __call__(self, **arguments: Any) -> None:
            for _ in range(steps):
                self.scheduler.step()

    source: Any = SimpleNamespace(
        pipeline=Pipeline(components={}, scheduler=scheduler, vae=vae), arguments={},
        kind="Made", steps=1, chatter=diffusers.utils.logging, request=SimpleNamespace(seed=0),
    )  # fmt: skip
    with pytest.raises(
        MeasurementError, match=f"^Made: the pipeline ended without {lacks};"
    ):
        Painter(source)(torch.tensor([0]))


def test_options_that_do_not_fit_are_refused(dit: Path, capsys: Any) -> None:
    words = refusal(capsys, 2, dit, "--steps", "0,4")
    assert "--steps: expected steps below 4, got 4" in words
    assert "is a diffusers pipeline" in refusal(capsys, 2, dit, "--generate", "2")
