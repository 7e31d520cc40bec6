"""Weights and a factory: the model is the user's, the weights are all of it, or it is said why."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories
import models
import pytest
import torch
from safetensors.torch import save_file

from numdev.cli.main import main
from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.sources.statedict import open_state_dict

NANO = {"vocab_size": 96, "block_size": 24, "n_layer": 2, "n_head": 2, "n_embd": 16}
KERNELS = ("--kernel", "sdpa-math", "--kernel", "sdpa-flash")
SMALL = (*KERNELS, "--length", 16, "--sequences", 2)


def state() -> dict[str, torch.Tensor]:
    return dict(factories.saved_gpt().state_dict())


def load(path: Path, factory: str, dtype: torch.dtype = torch.float32) -> Any:
    return open_state_dict(path, f"factories:{factory}").load_model(dtype=dtype, device="cpu")


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
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


def whole(path: Path) -> Path:
    return saved(path / "w.pt", state())


def old(path: Path) -> Path:
    torch.save(state(), path / "w.bin", _use_new_zipfile_serialization=False)
    return path / "w.bin"


def nested(path: Path) -> Path:
    return saved(path / "w.pth", {"state_dict": state(), "epoch": 3})


def compiled(path: Path) -> Path:
    return saved(path / "w.pt", {f"module._orig_mod.{n}": x for n, x in state().items()})


def safetensors(path: Path) -> Path:
    """Tied weights are stored once, as safetensors demands."""
    tensors = {n: x for n, x in state().items() if n != "lm_head.weight"}
    save_file(tensors, path / "w.safetensors")
    return path / "w.safetensors"


def sharded(path: Path) -> Path:
    tensors = {n: x for n, x in state().items() if n != "lm_head.weight"}
    weight_map = {n: f"part{i % 2}.safetensors" for i, n in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: x for n, x in tensors.items() if weight_map[n] == file}, path / file)
    index = path / "w.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


@pytest.mark.parametrize("store", [whole, old, nested, compiled, safetensors, sharded])
def test_every_way_of_storing_gives_the_same_model(
    tmp_path: Path, store: Callable[[Path], Path]
) -> None:
    model = load(store(tmp_path), "gpt")
    assert not model.training
    assert all(torch.equal(x, state()[n]) for n, x in model.state_dict().items())


@pytest.mark.parametrize("store", [whole, old, nested, compiled, safetensors, sharded])
def test_tensors_are_the_stored_weights_once(tmp_path: Path, store: Callable[[Path], Path]) -> None:
    """Under the model's names, without prefix; tied ones once."""
    tensors = dict(open_state_dict(store(tmp_path), "factories:gpt").tensors())
    assert sorted(tensors) == sorted(state().keys() - {"lm_head.weight"})
    assert all(torch.equal(x, state()[n]) for n, x in tensors.items())


def test_weights_are_not_rounded_to_the_factorys_format(tmp_path: Path) -> None:
    """The factory builds in bfloat16, the weights are fp32, and fp32 is asked for."""
    model = load(whole(tmp_path), "half_gpt")
    assert torch.equal(model.h[0].c_attn.weight, state()["h.0.c_attn.weight"])


def test_a_model_whose_own_names_have_the_prefix_keeps_it(tmp_path: Path) -> None:
    """A wrapper that calls its part `module`: nothing is to be taken off."""
    wrapped = {f"module.{n}": x for n, x in state().items()}
    opened = open_state_dict(saved(tmp_path / "w.pt", wrapped), "factories:gpt")
    holder = torch.nn.Module()
    holder.module = factories.gpt()
    object.__setattr__(opened, "build", lambda: holder)
    assert opened.load_model(dtype=torch.float32, device="cpu") is holder


def test_a_nanogpt_checkpoint_needs_a_two_line_factory(tmp_path: Path) -> None:
    """The file's model_args make the model; ids go to `idx`, no longer than the block size."""
    content = {
        "model": {f"_orig_mod.{n}": x for n, x in state().items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-3}]},
        "model_args": NANO,
        "iter_num": 5,
        "best_val_loss": torch.tensor(2.5),
        "config": {"dataset": "shakespeare", "batch_size": 12},
    }
    path = saved(tmp_path / "ckpt.pt", content)
    assert run("audit", path, "--model", "factories:nanogpt", *KERNELS, "-o", tmp_path / "o") == 0
    found = report(tmp_path / "o")
    source = found["provenance"]["source"]
    assert source["prompt"] == "8 x 24 token ids drawn with seed 0"
    assert source["model"] == "factories:nanogpt"
    assert [(c["case"], c["is_causal"], c["q_len"]) for c in found["cases"]] == [
        ("h.0#0", True, 24),
        ("h.1#0", True, 24),
    ]
    assert {w["tensor"] for w in found["weights"]} == state().keys() - {"lm_head.weight"}


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
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.hint
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ("factories:raises", MeasurementError, ("factories:raises", "KeyError", "no such")),
        ("factories:exits", MeasurementError, ("factories:exits", "SystemExit")),
        ("factories:returns_nothing", UsageError, ("returned nothing",)),
        ("factories:returns_a_class", UsageError, ("returned a type", "Module")),
        ("factories:needs_two", UsageError, ("needs 2 arguments (a, b)",)),
        ("factories:nanogpt", UsageError, ("takes 'model_args'", "stores no configuration")),
        ("factories:nanogtp", UsageError, ("no function 'nanogtp'", "'nanogpt'")),
        ("no_such_package:build", UsageError, ("no_such_package", "PYTHONPATH")),
        ("factories", UsageError, ("no factory", "package.module:factory")),
        (None, UsageError, ("says not of which model", "--model")),
    ],
)
def test_a_factory_that_gives_no_model(
    tmp_path: Path, factory: str | None, kind: type[NumdevError], words: tuple[str, ...]
) -> None:
    path = whole(tmp_path)
    failure(
        lambda: open_state_dict(path, factory).load_model(dtype=torch.float32, device="cpu"),
        kind,
        *words,
    )


def test_missing_left_over_and_misshapen_weights_are_named_together(tmp_path: Path) -> None:
    changed = state()
    changed["h.7.extra"] = changed.pop("h.1.c_proj.bias")
    changed["wpe.weight"] = torch.zeros(5, 16)
    path = saved(tmp_path / "w.pt", changed)
    failure(
        lambda: load(path, "gpt"),
        MeasurementError,
        "needs h.1.c_proj.bias,",
        "has no place for h.7.extra",
        "wpe.weight [5, 16] instead of [24, 16]",
    )


def test_what_the_model_computes_may_be_left_over(tmp_path: Path) -> None:
    """An older file stores a buffer that the model no longer does."""
    path = saved(tmp_path / "w.pt", {**state(), "steps": torch.zeros(24)})
    assert torch.equal(load(path, "gpt").steps, torch.arange(24))


class Payload:
    """Unpickled carelessly, it would create a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pt", {"model": state(), "x": Payload(tmp_path / "ran")})
    failure(lambda: load(path, "gpt"), MeasurementError, "does not unpickle")
    assert not (tmp_path / "ran").exists()
