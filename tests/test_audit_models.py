"""`numdev audit` from end to end: models that are no language models, and models that write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import save_file

from numdev import report
from numdev.cli.main import main
from numdev.config import AuditRequest
from numdev.sources.capture import capture
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.prompts import model_inputs

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


def test_an_encoder_decoder_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its three attentions are rows of their own in the map, under its layer and what it is."""
    found, shown = audit(capsys, saved("t5_seq2seq", tmp_path))
    assert len(kernel_rows(found)) == 6 * 4
    names = found.summary.map.layers
    assert len(names) == len(set(names)) == 6
    assert sum("encoder" in n and "SelfAttention" in n for n in names) == 2
    assert sum("decoder" in n and "EncDecAttention" in n for n in names) == 2
    assert "EncDecAttention" in shown
    assert {c.mask for c in found.cases} == {"additive"}
    assert "the same for the decoder" in found.provenance.source["prompt"]


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
    assert found.summary.map.layers == ("0 prefill", "1 prefill", "0 decode", "1 decode")
    assert "0 decode" in shown
    assert found.request["generate"] == 2
    csv = next(tmp_path.glob("out*/rows.csv")).read_text().splitlines()
    assert "phase" in csv[0].split(",")


@pytest.mark.parametrize(("name", "generate", "length"), [("gpt2", 60, 4), ("t5_seq2seq", 60, 99)])
def test_what_is_written_fits_after_what_is_read(
    name: str, generate: int, length: int, tmp_path: Path
) -> None:
    """A model of 64 positions that writes 60 tokens reads 4; an encoder is not so limited."""
    checkpoint = open_checkpoint(saved(name, tmp_path))
    model = checkpoint.load_model(dtype=torch.float32, device="cpu")
    how: dict[str, Any] = {"length": 99, "sequences": 1, "generate": generate}
    request = AuditRequest(target="", checkpoint="x", kernels=(), **how)
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
    name: str, flags: tuple[str, ...], words: str, tmp_path: Path, capsys: Any
) -> None:
    """In one line, before anything is measured."""
    assert words in refusal(capsys, 2, saved(name, tmp_path), *flags)
    assert not (tmp_path / "refused").exists()
