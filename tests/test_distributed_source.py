"""torch.distributed checkpoints as a source: with a factory, or with a config.json beside them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories
import models
import pytest
import torch
import torch.distributed.checkpoint as dcp

from numdev.cli.main import main
from numdev.errors import MeasurementError
from numdev.sources.checkpoint import open_checkpoint
from numdev.sources.statedict import open_state_dict

SMALL = ("--kernel", "sdpa-math", "--length", "12", "--sequences", "2", "--device", "cpu")


def state() -> dict[str, torch.Tensor]:
    return dict(factories.saved_gpt().state_dict())


def saved(directory: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        dcp.save(content, checkpoint_id=directory)
    return directory


def flat(path: Path) -> Path:
    return saved(path / "d", state())


def nested(path: Path) -> Path:
    """As training scripts save it, with the optimiser's state beside."""
    moments = {f"state.{n}.exp_avg": x.clone() for n, x in state().items()}
    return saved(path / "d", {"model": state(), "optim": moments, "step": 3})


def prefixed(path: Path) -> Path:
    """Names written out, as one string each, and a tensor that is none of the model's."""
    names = {f"model.{n}": x for n, x in state().items()}
    return saved(path / "d", {**names, "optim.lr": torch.ones(1)})


def wrapped(path: Path) -> Path:
    return saved(
        path / "d", {"state_dict": {f"module._orig_mod.{n}": x for n, x in state().items()}}
    )


@pytest.mark.parametrize(
    ("store", "prefix"),
    [
        (flat, ""),
        (nested, "model."),
        (prefixed, "model."),
        (wrapped, "state_dict.module._orig_mod."),
    ],
)
def test_every_nesting_gives_the_same_model(
    tmp_path: Path, store: Callable[[Path], Path], prefix: str
) -> None:
    """Bit for bit, in eval mode; what stood before the names is known, the rest left out."""
    opened = open_state_dict(store(tmp_path), "factories:gpt")
    model = opened.load_model(dtype=torch.float32, device="cpu")
    assert not model.training
    assert all(torch.equal(x, state()[n]) for n, x in model.state_dict().items())
    fitted = opened.fitted(model)
    assert fitted.describe().get("prefix_removed", "") == prefix
    assert set(dict(fitted.tensors())) == set(state())


def audited(capsys: pytest.CaptureFixture[str], target: Path, *flags: str) -> Any:
    output = target.parent / f"out{len(list(target.parent.iterdir()))}"
    main(["audit", str(target), *SMALL, *flags, "-o", str(output)])
    return json.loads((output / "report.json").read_text()), capsys.readouterr().err


def test_an_audit_gives_the_rows_of_the_state_dict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the directory as through torch.save's file, but for the source's name; and what was
    taken off is said."""
    torch.save(state(), tmp_path / "d.pt")
    factory = ("--model", "factories:gpt")
    plain, _ = audited(capsys, tmp_path / "d.pt", *factory)
    split, said = audited(capsys, nested(tmp_path), *factory)
    for found in (plain, split):
        for row in found["rows"]:
            row.pop("source")
    assert split["rows"] == plain["rows"]
    assert split["provenance"]["source"]["prefix_removed"] == "model."
    assert "stored under names that begin with 'model.'" in said


@pytest.mark.parametrize("nest", ["", "model", "state_dict"])
def test_a_config_beside_it_is_model_enough(tmp_path: Path, nest: str) -> None:
    """transformers builds the model, whose own names begin with `model.` here too."""
    model = models.llama()
    own = dict(model.state_dict())
    path = saved(tmp_path / "d", {nest: own} if nest else own)
    model.config.architectures = [type(model).__name__]
    (path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    opened = open_checkpoint(path)
    found = opened.load_model(dtype=torch.float32, device="cpu")
    assert all(torch.equal(x, own[n]) for n, x in found.state_dict().items())
    assert opened.fitted(found).prefix == (f"{nest}." if nest else "")


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    """A weight short is no model: it is named, and so is one left over."""
    content = state()
    content["stranger"] = content.pop("h.0.c_attn.weight")
    opened = open_state_dict(saved(tmp_path / "d", content), "factories:gpt")
    with pytest.raises(MeasurementError, match=r"needs h\.0\.c_attn\.weight.*no place for str"):
        opened.load_model(dtype=torch.float32, device="cpu")


def test_a_save_that_did_not_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its metadata are written last: without them there is no checkpoint."""
    (flat(tmp_path) / ".metadata").unlink()
    flags = (*SMALL, "--model", "factories:gpt", "-o", str(tmp_path / "o"))
    with pytest.raises(SystemExit) as left:
        main(["audit", str(tmp_path / "d"), *flags])
    assert left.value.code == 3
    assert ".metadata is missing" in capsys.readouterr().err
