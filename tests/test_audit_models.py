"""`numdev audit` from end to end: models that are no language models, and models that write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import save_file

from numdev import report
from numdev.cli.main import main
from numdev.config import AuditRequest
from numdev.report.places import place_of, places_of
from numdev.sources.capture import capture
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.reading import model_inputs

SMALL = ("--kernel", "sdpa-math", "--sequences", "2", "--length", "6", "--device", "cpu")


def audit(
    capsys: pytest.CaptureFixture[str], target: Path, *flags: str
) -> tuple[report.AuditReport, str]:
    """The report of an audit, and what the terminal shows of it."""
    output = target.parent / f"out{len(list(target.parent.iterdir()))}"
    main(["audit", str(target), *SMALL, *flags, "--output", str(output)])
    return report.read(output), capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], code: int, target: Path, *flags: str) -> str:
    """The one line that refuses the request."""
    capsys.readouterr()  # saving the model shows a progress bar
    with pytest.raises(SystemExit) as stop:
        main(["audit", str(target), *SMALL, *flags, "--output", str(target.parent / "refused")])
    err = capsys.readouterr().err
    assert stop.value.code == code, err
    assert err.count("\n") == 1
    assert "unexpected" not in err
    return err


def saved(name: str, directory: Path) -> Path:
    return models.save(getattr(models, name)(), directory / name)


def kernel_rows(found: report.AuditReport) -> list[report.DeviationRow]:
    rows = [r for r in found.rows if r.role == "kernel" and r.tensor == "out"]
    assert all(r.status == "ok" and r.floor_ratio for r in rows)
    return rows


def row_in(module: str) -> report.DeviationRow:
    """A row of layer 0."""
    return report.DeviationRow(
        case=module,
        source="test",
        module=module,
        layer=0,
        call=0,
        seed=0,
        head=0,
        role="kernel",
        kernel="sdpa-math",
        format="bfloat16",
        tensor="out",
        status="ok",
    )


def test_a_vision_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of four heads, on images drawn with the seed."""
    found, shown = audit(capsys, saved("vit", tmp_path))
    assert len(kernel_rows(found)) == 8
    assert found.provenance.source["prompt"] == "2 images of 3 x 12 x 12 drawn with seed 0"
    assert "2 images of 3 x 12 x 12" in shown
    assert {(c.q_len, c.kv_len) for c in found.cases} == {(10, 10)}


def test_an_encoder_decoder_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its three attentions are rows of their own in the map, under its layer and what it is."""
    found, shown = audit(capsys, saved("t5_seq2seq", tmp_path))
    assert len(kernel_rows(found)) == 6 * 4
    assert found.summary.map is not None
    assert found.summary.map.layers == (
        "0 encoder SelfAttention",
        "1 encoder SelfAttention",
        "0 decoder SelfAttention",
        "0 decoder EncDecAttention",
        "1 decoder SelfAttention",
        "1 decoder EncDecAttention",
    )
    assert "0 decoder EncDecAttention" in shown
    assert {c.mask for c in found.cases} == {"additive"}
    assert "shifted right" in found.provenance.source["prompt"]


def test_two_towers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have a layer 0, and `--layers 0` is about both."""
    found, _ = audit(capsys, saved("clip", tmp_path), "--layers", "0")
    assert found.summary.map is not None
    assert found.summary.map.layers == ("0 vision_model", "0 text_model")


@pytest.mark.parametrize(
    ("modules", "places"),
    [
        (("encoder.0.a", "decoder.0.a"), ("layer 0 encoder", "layer 0 decoder")),
        (("stages.0.blocks.0", "stages.1.blocks.0"), ("stages.0.blocks.0", "stages.1.blocks.0")),
    ],
)
def test_places_that_share_a_layers_number(
    modules: tuple[str, ...], places: tuple[str, ...]
) -> None:
    """The words their names differ in are enough, or else the names stand whole."""
    rows = [row_in(module) for module in modules]
    named = places_of(rows)
    assert tuple(place_of(row, named) for row in rows) == places


def test_images_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors given are what the model reads, as many as there are; the rest is drawn."""
    target = saved("clip", tmp_path)
    given = tmp_path / "cats.safetensors"
    save_file({"pixel_values": torch.rand(3, 3, 12, 12)}, given)
    found, _ = audit(capsys, target, "--inputs", str(given))
    prompt = "pixel_values of cats.safetensors, 3 x 6 token ids drawn with seed 0"
    assert found.provenance.source["prompt"] == prompt
    assert {c.batch for c in found.cases} == {3}
    assert found.request["inputs"] == str(given)
    save_file({"pixel_values": torch.rand(3, 3, 12, 12)}, given)
    other, _ = audit(capsys, target, "--inputs", str(given))
    digests = [r.provenance.source["prompt_sha256"] for r in (found, other)]
    assert digests[0] != digests[1]


def test_a_model_that_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prefill and decode are told apart in rows, cases and the map."""
    found, shown = audit(capsys, saved("llama", tmp_path), "--generate", "2")
    rows = kernel_rows(found)
    assert [sum(r.phase == p for r in rows) for p in ("prefill", "decode")] == [16, 32]
    assert [(c.q_len, c.kv_len) for c in found.cases] == [(6, 6)] * 2 + [(1, 7)] * 2 + [(1, 8)] * 2
    assert found.summary.map is not None
    assert found.summary.map.layers == ("0 prefill", "1 prefill", "0 decode", "1 decode")
    assert "0 decode" in shown
    assert found.request["generate"] == 2
    csv = next(tmp_path.glob("out*/rows.csv")).read_text().splitlines()
    assert "phase" in csv[0].split(",")


def test_a_forward_pass_has_no_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = audit(capsys, saved("llama", tmp_path))
    assert {r.phase for r in found.rows} == {None}
    assert found.summary.map is not None
    assert found.summary.map.layers == ("0", "1")


@pytest.mark.parametrize(("name", "generate", "length"), [("gpt2", 60, 4), ("t5_seq2seq", 60, 99)])
def test_what_is_written_fits_after_what_is_read(
    name: str, generate: int, length: int, tmp_path: Path
) -> None:
    """A model of 64 positions that writes 60 tokens reads 4; an encoder is not so limited."""
    checkpoint = open_checkpoint(saved(name, tmp_path))
    model = checkpoint.load_model(dtype=torch.float32, device="cpu")
    request = AuditRequest(target="", kernels=(), length=99, sequences=1, generate=generate)
    prompt = model_inputs(request, checkpoint, model)
    assert prompt.inputs["input_ids"].shape == (1, length)
    capture(model, prompt.inputs, lambda case: None, source="", generate=generate)


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("vit", ("--generate", "1"), "ViTForImageClassification does not generate text"),
        ("vit", ("--text", "a.txt"), "ViTForImageClassification reads no text"),
        ("wav2vec2", (), "reads input_values, which numdev cannot draw"),
        ("vit", ("--inputs", "none.safetensors"), "none.safetensors: no such file"),
        ("gpt2", ("--generate", "64"), "has only 64 positions"),
    ],
)
def test_requests_that_cannot_be_met(
    name: str,
    flags: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, before anything is measured."""
    assert words in refusal(capsys, 2, saved(name, tmp_path), *flags)
    assert not (tmp_path / "refused").exists()


def test_inputs_that_the_model_fails_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of another size are the model's own complaint, in one line."""
    given = tmp_path / "big.safetensors"
    save_file({"pixel_values": torch.rand(1, 3, 16, 16)}, given)
    err = refusal(capsys, 3, saved("vit", tmp_path), "--inputs", str(given))
    assert "ViTForImageClassification failed on its inputs" in err


@pytest.mark.parametrize("key", ["inputs", "generate"])
def test_options_of_models_are_refused_for_drawn_cases(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: dict[str, Any] = {"cases": [{"name": "c", "heads": 1, "seq_len": 4, "head_dim": 4}]}
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(cases))
    assert f"{key!r} is for models; leave --{key} out" in refusal(
        capsys, 2, config, f"--{key}", "3"
    )
