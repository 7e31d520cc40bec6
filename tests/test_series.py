"""Which checkpoints a diagnosis is asked for, and which are no series."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from numdev.diagnose.series import series, step_of
from numdev.errors import MeasurementError, UsageError


def checkpoint(path: Path, *, size: int = 4, fill: float = 1.0) -> Path:
    """A directory that looks like one of Hugging Face's."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a.weight": torch.full((size, 2), fill)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "step"),
    [("flash-seed0-step500", 500), ("checkpoint-20", 20), ("iter_0007", 7), ("STEP3", 3),
     ("model", None), ("step5-final", None)],
)  # fmt: skip
def test_the_step_is_in_the_name(tmp_path: Path, name: str, step: int | None) -> None:
    """At its end, as numdev train and others write it."""
    assert step_of(checkpoint(tmp_path / name)) == step


def test_what_training_json_says_comes_first(tmp_path: Path) -> None:
    """A file that says nothing of a step, or is damaged, is passed over."""
    path = checkpoint(tmp_path / "x-step5")
    for text, step in (('{"step": 7}', 7), ('{"step": "7"}', 5), ("[]", 5), ("{", 5)):
        (path / "training.json").write_text(text)
        assert step_of(path) == step


def test_a_training_run_is_its_checkpoints_by_step(tmp_path: Path) -> None:
    """By number, not by letter, whatever else is in the directory."""
    for step in (1000, 5, 200):
        checkpoint(tmp_path / "checkpoints" / f"fa2-seed0-step{step}")
    (tmp_path / "report.json").write_text('{"kind": "train"}')
    (tmp_path / "checkpoints" / "notes.txt").write_text("")
    for target in (tmp_path, tmp_path / "checkpoints"):
        found = series([str(target)])
        assert [stage.step for stage in found.stages] == [5, 200, 1000]
        assert len({stage.sha256 for stage in found.stages}) == 1
        assert found.left_out == ()


def test_several_targets_are_one_series(tmp_path: Path) -> None:
    """Without steps they stay in the order given, and of one name they go by their paths."""
    a, b = checkpoint(tmp_path / "a" / "model"), checkpoint(tmp_path / "b" / "model")
    found = series([str(b), str(a)])
    assert [stage.name for stage in found.stages] == [str(b), str(a)]
    assert [stage.step for stage in found.stages] == [None, None]


def test_a_checkpoint_that_broke_is_left_out(tmp_path: Path) -> None:
    """With its name, its tensor and how many elements; alone it is an error."""
    good = checkpoint(tmp_path / "m-step1")
    bad = checkpoint(tmp_path / "m-step2", fill=float("nan"))
    found = series([str(good), str(bad)])
    assert [stage.step for stage in found.stages] == [1]
    assert found.left_out == (
        "m-step2: a.weight holds 8 NaN or infinite elements; it was left out.",
    )
    with pytest.raises(MeasurementError, match=r"m-step2: a.weight holds 8 NaN") as raised:
        series([str(bad)])
    assert raised.value.exit_code == 3


def test_different_shapes_are_no_series(tmp_path: Path) -> None:
    """The message names both checkpoints and the tensor with its shapes."""
    a, b = checkpoint(tmp_path / "m-step1"), checkpoint(tmp_path / "m-step2", size=6)
    with pytest.raises(UsageError) as raised:
        series([str(a), str(b)])
    assert "m-step1 and m-step2 are no series: a.weight is [4, 2] and [6, 2]" in str(raised.value)


def test_two_series_in_one_directory(tmp_path: Path) -> None:
    """Which one is meant is not guessed; the hint names one."""
    for variant in ("bf16-seed0", "fa2-seed0"):
        checkpoint(tmp_path / f"{variant}-step5")
    with pytest.raises(UsageError) as raised:
        series([str(tmp_path)])
    assert "holds 2 series of checkpoints (bf16-seed0, fa2-seed0)" in str(raised.value)
    assert "bf16-seed0-*" in str(raised.value)
    both = [str(path) for path in tmp_path.iterdir()]
    with pytest.raises(UsageError, match="are both of step 5"):
        series(both)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"kind": "audit"}, "is the report of numdev audit; give the checkpoint itself"),
        ({"kind": "train"}, "it kept no checkpoints; train with `checkpoints:`"),
        (None, "holds no checkpoint"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, content: object, says: str) -> None:
    """A report in place of a checkpoint is called that."""
    if content is not None:
        (tmp_path / "report.json").write_text(json.dumps(content))
    with pytest.raises(UsageError) as raised:
        series([str(tmp_path)])
    assert says in str(raised.value)


def test_targets_that_are_not_there(tmp_path: Path) -> None:
    """Nothing there, a report by its file's name, a text file, the same thing twice."""
    with pytest.raises(UsageError, match="no such file or directory"):
        series([str(tmp_path / "nothing")])
    (tmp_path / "report.json").write_text('{"kind": "sweep"}')
    with pytest.raises(UsageError, match="is the report of numdev sweep"):
        series([str(tmp_path / "report.json")])
    (tmp_path / "text.txt").write_text("words")
    with pytest.raises(UsageError, match=r"text\.txt"):
        series([str(tmp_path / "text.txt")])
    with pytest.raises(UsageError, match="is given twice"):
        series(["demo", "demo"])
