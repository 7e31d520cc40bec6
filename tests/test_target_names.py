"""What a target is called: in the cache of Hugging Face a file is stored under its hash,
and a folder under its revision; neither is a name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran
from logprob_files import samples, write_plain
from safetensors.torch import save_file

from numdev.errors import UsageError
from numdev.request_models import (
    audit_request,
    demo_checkpoint,
    effects_request,
    invariance_request,
    logprobs_request,
)
from numdev.studies.diagnose.diagnosis_targets import find_stages
from numdev.studies.logprobs.readers import read_sides
from numdev.studies.logprobs.truth import ExactModel
from numdev.target_names import name_of


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot of the model org/tiny in the cache: an empty folder."""
    model = tmp_path / "models--org--tiny"
    (model / "blobs").mkdir(parents=True)
    folder = model / "snapshots" / ("1" * 40)
    folder.mkdir(parents=True)
    return folder


def cached(snapshot: Path, file: Path) -> Path:
    """The link by which a snapshot has a file, which is moved to the blobs."""
    blob = snapshot.parents[1] / "blobs" / f"{file.name.partition('.')[0]}0abc"
    shutil.move(file, blob)
    link = snapshot / file.name
    link.symlink_to(f"../../blobs/{blob.name}")
    return link


def test_a_link_is_followed_but_into_the_cache(tmp_path: Path, snapshot: Path) -> None:
    (tmp_path / "model.pt").touch()
    link = cached(snapshot, tmp_path / "model.pt")
    (tmp_path / "step7.pt").touch()
    (tmp_path / "latest.pt").symlink_to("step7.pt")
    names = [name_of(x) for x in (link, snapshot, tmp_path / "latest.pt")]
    assert names == ["model.pt", "org/tiny", "step7.pt"]


@pytest.mark.parametrize(
    "request_of", [audit_request, invariance_request, effects_request]
)
def test_a_request_names_a_file_of_the_cache(
    tmp_path: Path, snapshot: Path, request_of: Any
) -> None:
    """And a folder of it."""
    (tmp_path / "model.safetensors").touch()
    link = cached(snapshot, tmp_path / "model.safetensors")
    names = [request_of(str(x), {}).target for x in (link, snapshot)]
    assert names == ["model.safetensors", "org/tiny"]


def test_a_side_of_log_probabilities_has_the_name_of_its_file(
    tmp_path: Path, snapshot: Path
) -> None:
    """Without its ending; the request and the model that was trained too."""
    link = cached(snapshot, write_plain(tmp_path / "a.jsonl", samples(), "rollout"))
    [side] = read_sides(link)
    assert side.name == "a"
    names = [logprobs_request([str(x)], {}).target for x in (link, snapshot)]
    assert names == ["a.jsonl", "org/tiny"]
    shutil.copytree(demo_checkpoint(), snapshot, dirs_exist_ok=True)
    assert ExactModel(str(snapshot)).name == "org/tiny"


def test_a_diagnosis_names_a_file_of_the_cache(
    tmp_path: Path,
    snapshot: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In its series of checkpoints, and in its request."""
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    link = cached(snapshot, tmp_path / "model.safetensors")
    [stage], _ = find_stages([str(link)])
    assert stage.name == "model.safetensors"

    def diagnose(request: Any, *_: object, **__: object) -> None:
        raise UsageError(f"target {request.target}")

    monkeypatch.setattr("numdev.studies.diagnose.study.diagnose", diagnose)
    code, _, err = ran(capsys, "diagnose", str(link), "-o", str(tmp_path / "out"))
    assert (code, err.splitlines()[-1]) == (2, "numdev: error: target model.safetensors")
