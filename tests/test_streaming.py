"""A streamed model computes what the whole one does, bit for bit, with two layers in
memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import models
import pytest
import torch
from torch import nn

from numdev import report
from numdev.cli.main import main
from numdev.errors import MeasurementError
from numdev.sources import checkpoint
from numdev.sources.checkpoint import Deferred, Streamed, open_checkpoint, read_to_device

SMALL = ("--kernel", "sdpa-math", "--sequences", "2", "--length", "12", "--device", "cpu")
IDS = {"input_ids": torch.arange(3, 27).reshape(2, 12)}


def streamed(directory: Path, dtype: torch.dtype = torch.float32) -> Streamed:
    return Streamed(open_checkpoint(directory).deferred_model(dtype=dtype), device="cpu")


def audit(target: Path, name: str, *flags: str) -> report.AuditReport:
    output = target.parent / name
    main(["audit", str(target), *SMALL, *flags, "--output", str(output), "-q"])
    return report.read(output)


def same_numbers(a: report.AuditReport, b: report.AuditReport) -> bool:
    """Whether two reports say the same, to the last bit, but for how they came about."""
    others = {"provenance", "request", "timings"}
    return a.model_dump_json(exclude=others) == b.model_dump_json(exclude=others)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_report_is_that_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Rows, cases, weights, findings and summary; only the report of the streamed one
    says so."""
    target = models.saved(name, tmp_path)
    a, b = audit(target, "a", "--stream"), audit(target, "b")
    assert same_numbers(a, b)
    assert any(row.role == "kernel" and row.status == "ok" for row in a.rows)
    sources = [x.provenance.source for x in (a, b)]
    assert sources[0].pop("streamed") == "layer by layer"
    assert sources[0] == sources[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gpt_oss", "gemma2", "gpt_neox", "mixtral"]
)
def test_logits_are_those_of_the_whole_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In every format of the model, renamed, converted and tied weights too: bit for bit,
    twice."""
    directory = models.saved(name, tmp_path, tie_word_embeddings=name == "llama")
    ours = streamed(directory, dtype)
    whole = open_checkpoint(directory).load_model(dtype=dtype, device="cpu")
    with torch.no_grad():
        wanted = whole(**IDS).logits
        for _ in range(2):
            with ours.running():
                assert torch.equal(ours.model(**IDS).logits, wanted)


def values_of(model: nn.Module) -> set[str]:
    """The parameters that have values at this moment."""
    return {name for name, x in model.named_parameters() if not isinstance(x, Deferred)}


def test_one_layer_has_values_at_a_time(tmp_path: Path) -> None:
    """While a layer runs it alone is filled, and afterwards nothing is."""
    ours = streamed(models.saved("llama", tmp_path))
    assert not values_of(ours.model)
    seen, filled = [], lambda: {name.split(".")[2] for name in values_of(ours.model)}
    for i, layer in enumerate(ours.model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, i=i: seen.append((i, filled())))
    with torch.no_grad(), ours.running():
        ours.model(**IDS)
    assert seen == [(0, {"0"}), (1, {"1"})]
    assert not values_of(ours.model)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_later_layers_are_never_read(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """With --layers 0 the run ends after layer 0: neither the next one nor the head is
    read."""
    noting = Mock(side_effect=read_to_device)
    monkeypatch.setattr(checkpoint, "read_to_device", noting)
    target = models.saved(name, tmp_path)
    ours = audit(target, "a", "--stream", "--layers", "0")
    read = {call.args[0].name for call in noting.call_args_list}
    assert set(re.findall(r"layers?\.(\d+)\.", " ".join(read))) == {"0"}
    assert not any("lm_head" in n or "cls." in n or "norm.weight" in n[:18] for n in read)
    assert same_numbers(ours, audit(target, "b", "--layers", "0"))
    assert {row.layer for row in ours.rows} == {0}


def test_a_layer_that_runs_more_than_once_is_not_the_last(tmp_path: Path) -> None:
    """ALBERT's one layer runs twice: asking for it alone stops nothing."""
    target = models.saved("albert", tmp_path)
    ours = audit(target, "a", "--stream", "--layers", "0")
    assert len({case.case for case in ours.cases}) == 2
    assert same_numbers(ours, audit(target, "b", "--layers", "0"))


def test_weights_used_while_their_layer_does_not_run_are_found_out(
    tmp_path: Path,
) -> None:
    """They have no values then, and nothing is made up for them."""
    ours = streamed(models.saved("llama", tmp_path))
    with (
        ours.running(),
        pytest.raises(MeasurementError, match=r"layers\.1\.mlp\.up_proj\.weight"),
    ):
        ours.model.model.layers[1].mlp.up_proj.weight.sum()


@pytest.mark.gpu
def test_a_streamed_model_on_a_gpu_is_the_whole_one(tmp_path: Path) -> None:
    """Bit for bit there too, though its weights are cast on the device."""
    directory = models.saved("llama", tmp_path)
    checkpoint = open_checkpoint(directory)
    for dtype in (torch.float32, torch.bfloat16):
        ours = Streamed(checkpoint.deferred_model(dtype=dtype), device="cuda")
        whole = checkpoint.load_model(dtype=dtype, device="cuda")
        inputs = {name: x.cuda() for name, x in IDS.items()}
        with torch.no_grad(), ours.running():
            assert torch.equal(ours.model(**inputs).logits, whole(**inputs).logits)
