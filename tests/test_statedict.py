"""Weights and a factory, and torch.distributed checkpoints: the model is the user's, the weights
are all of it, or it is said why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories
import models
import pytest
import stored
import torch

from numdev.cli.main import main
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.statedict import open_state_dict

NANO = {"vocab_size": 96, "block_size": 24, "n_layer": 2, "n_head": 2, "n_embd": 16}
KERNELS = ("--kernel", "sdpa-math", "--kernel", "sdpa-flash")
SMALL = (*KERNELS, "--length", 16, "--sequences", 2)
GPT = ("--model", "factories:gpt")


def state() -> dict[str, torch.Tensor]:
    return dict(factories.saved_gpt().state_dict())


UNTIED = sorted(state().keys() - {"lm_head.weight"})


def load(path: Path, factory: str = "gpt") -> Any:
    opened = open_state_dict(path, f"factories:{factory}")
    return opened.load_model(dtype=torch.float32, device="cpu")


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def run(*arguments: object) -> int:
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def report(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return content


# --- every way of storing ------------------------------------------------------------------------

WAYS: dict[str, Callable[[Path], Path]] = {
    "whole": lambda path: saved(path / "w.pt", state()),
    "compiled": lambda path: saved(
        path / "w.pt", {f"module._orig_mod.{n}": x for n, x in state().items()}
    ),
    "sharded": lambda path: stored.sharded(path, {n: state()[n] for n in UNTIED}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_storing_gives_the_same_model(tmp_path: Path, way: str) -> None:
    """And the stored weights once, under the model's names, without prefix; tied ones once."""
    path = WAYS[way](tmp_path)
    model = load(path)
    assert not model.training
    assert all(torch.equal(x, state()[n]) for n, x in model.state_dict().items())
    tensors = dict(open_state_dict(path, "factories:gpt").tensors())
    assert sorted(tensors) == UNTIED
    assert all(torch.equal(x, state()[n]) for n, x in tensors.items())


def test_weights_are_not_rounded_to_the_factorys_format(tmp_path: Path) -> None:
    """The factory builds in bfloat16, the weights are fp32, and fp32 is asked for."""
    model = load(WAYS["whole"](tmp_path), "half_gpt")
    assert torch.equal(model.h[0].c_attn.weight, state()["h.0.c_attn.weight"])


def test_a_model_whose_own_names_have_the_prefix_keeps_it(tmp_path: Path) -> None:
    """A wrapper that calls its part `module`: nothing is to be taken off."""
    wrapped = {f"module.{n}": x for n, x in state().items()}
    opened = open_state_dict(saved(tmp_path / "w.pt", wrapped), "factories:gpt")
    holder = torch.nn.Module()
    holder.module = factories.gpt()
    object.__setattr__(opened, "build", lambda: holder)
    assert opened.load_model(dtype=torch.float32, device="cpu") is holder
    assert (opened.prefix, opened.fitted(holder).prefix) == ("module.", "")


def test_a_nanogpt_checkpoint_needs_a_two_line_factory(tmp_path: Path) -> None:
    """The file's model_args make the model; ids go to `idx`, no longer than the block size."""
    content = {
        "model": {f"_orig_mod.{n}": x for n, x in state().items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": NANO,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": "shakespeare", "batch_size": 12},
    }
    path = saved(tmp_path / "ckpt.pt", content)
    assert run("audit", path, "--model", "factories:nanogpt", *KERNELS, "-o", tmp_path / "o") == 0
    found = report(tmp_path / "o")
    source = found["provenance"]["source"]
    assert source["prompt"] == "8 x 24 token ids drawn with seed 0"
    assert (source["model"], source["prefix_removed"]) == ("factories:nanogpt", "_orig_mod.")
    assert [(c["case"], c["is_causal"], c["q_len"]) for c in found["cases"]] == [
        ("h.0#0", True, 24),
        ("h.1#0", True, 24),
    ]
    assert sorted({w["tensor"] for w in found["weights"]}) == UNTIED


def test_a_soft_cap_of_transformers_is_not_lost(tmp_path: Path) -> None:
    """Out of a factory Gemma 2 attends eagerly, or drops its cap; here it does neither. (No kernel
    here can run it, and the audit says so with its exit code.)"""
    directory = models.save(models.gemma2(), tmp_path / "gemma2")
    arguments = (directory / "model.safetensors", "--model", "factories:gemma2", *SMALL)
    assert run("audit", *arguments, "-o", tmp_path / "o", "-q") == 3
    assert [c["softcap"] for c in report(tmp_path / "o")["cases"]] == [0.5, 0.5]


# --- what is wrong is named ----------------------------------------------------------------------


def failure(action: Callable[[], Any], kind: type[NumdevError], *words: str) -> None:
    """It fails with this error, in one line that has these words and a hint."""
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ("factories:raises", MeasurementError, ("factories:raises", "KeyError", "no such")),
        ("factories:returns_nothing", UsageError, ("expected a torch.nn.Module, got NoneType",)),
        ("factories:nanogpt", UsageError, ("cannot be called", "'model_args'")),
        ("no_such_package:build", UsageError, ("no_such_package", "PYTHONPATH")),
        (None, UsageError, ("--model",)),
    ],
)
def test_a_factory_that_gives_no_model(
    tmp_path: Path, factory: str | None, kind: type[NumdevError], words: tuple[str, ...]
) -> None:
    path = WAYS["whole"](tmp_path)
    opened = lambda: open_state_dict(path, factory)  # noqa: E731
    failure(lambda: opened().load_model(dtype=torch.float32, device="cpu"), kind, *words)


def test_missing_left_over_and_misshapen_weights_are_named_together(tmp_path: Path) -> None:
    """What the model computes may be left over: an older file stores a buffer."""
    path = saved(tmp_path / "w.pt", {**state(), "steps": torch.zeros(24)})
    assert torch.equal(load(path).steps, torch.arange(24))
    changed = state()
    changed["h.7.extra"] = changed.pop("h.1.c_proj.bias")
    changed["wpe.weight"] = torch.zeros(5, 16)
    path = saved(tmp_path / "w.pt", changed)
    words = ("needs the weights h.1.c_proj.bias,", "has no place for h.7.extra")
    failure(lambda: load(path), MeasurementError, *words, "wpe.weight [5, 16] instead of [24, 16]")


# --- distributed checkpoints ---------------------------------------------------------------------


def nested() -> dict[str, Any]:
    """As training scripts save it, with the optimiser's state beside."""
    moments = {f"state.{n}.exp_avg": x.clone() for n, x in state().items()}
    return {"model": state(), "optim": moments, "step": 3}


@pytest.mark.parametrize(
    ("content", "prefix"),
    [
        (nested(), "model."),
        (
            {"state_dict": {f"module._orig_mod.{n}": x for n, x in state().items()}},
            "state_dict.module._orig_mod.",
        ),
    ],
    ids=["nested", "wrapped"],
)
def test_every_nesting_gives_the_same_model(
    tmp_path: Path, content: dict[str, Any], prefix: str
) -> None:
    """Bit for bit; what stood before the names is known, the rest left out."""
    opened = open_state_dict(stored.distributed(tmp_path / "d", content), "factories:gpt")
    model = opened.load_model(dtype=torch.float32, device="cpu")
    assert all(torch.equal(x, state()[n]) for n, x in model.state_dict().items())
    fitted = opened.fitted(model)
    assert fitted.describe().get("prefix_removed", "") == prefix
    assert set(dict(fitted.tensors())) == set(state())


def test_an_audit_gives_the_rows_of_the_state_dict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the directory as through torch.save's file, but for the source's name; and what was
    taken off is said. A save that did not end has no metadata, which are written last."""
    stored.distributed(tmp_path / "d", nested())
    saved(tmp_path / "d.pt", state())
    rows = []
    for target in ("d.pt", "d"):
        assert run("audit", tmp_path / target, *GPT, *SMALL, "-o", tmp_path / f"{target}-out") == 0
        found = report(tmp_path / f"{target}-out")
        rows.append([{**row, "source": ""} for row in found["rows"]])
    assert rows[0] == rows[1]
    assert found["provenance"]["source"]["prefix_removed"] == "model."
    assert "stored under names that begin with 'model.'" in capsys.readouterr().err
    (tmp_path / "d" / ".metadata").unlink()
    assert run("audit", tmp_path / "d", *GPT, *SMALL, "-o", tmp_path / "o") == 3
    assert ".metadata is missing" in capsys.readouterr().err


@pytest.mark.parametrize("nest", ["", "model", "state_dict"])
def test_a_config_beside_it_is_model_enough(tmp_path: Path, nest: str) -> None:
    """transformers builds the model, whose own names begin with `model.` here too."""
    model = models.llama()
    own = dict(model.state_dict())
    path = stored.distributed(tmp_path / "d", {nest: own} if nest else own)
    model.config.architectures = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    opened = open_checkpoint(path)
    found = opened.load_model(dtype=torch.float32, device="cpu")
    assert all(torch.equal(x, own[n]) for n, x in found.state_dict().items())
    assert opened.describe().get("prefix_removed", "") == (f"{nest}." if nest else "")
    assert dict(opened.tensors()).keys() == own.keys()
