"""Which checkpoints a diagnosis is asked for, and which are no series."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from numdev.diagnose.series import series, step_of
from numdev.errors import MeasurementError, UsageError


def checkpoint(path: Path, *, fill: float = 1.0) -> Path:
    """A directory that looks like one of Hugging Face's."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a.weight": torch.full((4, 2), fill)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "told", "step"),
    [("flash-seed0-step500", "", 500), ("checkpoint-20", "", 20), ("iter_0007", "", 7),
     ("model", "", None), ("step5-final", "", None), ("x-step5", '{"step": 7}', 7),
     ("x-step5", '{"step": "7"}', 5), ("x-step5", "{", 5)],
)  # fmt: skip
def test_the_step_is_told_or_in_the_name(
    tmp_path: Path, name: str, told: str, step: int | None
) -> None:
    """By training.json, which may be damaged or say nothing; else at the end of the name."""
    path = checkpoint(tmp_path / name)
    (path / "training.json").write_text(told)
    assert step_of(path) == step


def test_a_checkpoint_that_broke_is_left_out(tmp_path: Path) -> None:
    """With its name, its tensor and how many elements; alone it is an error."""
    good = checkpoint(tmp_path / "m-step1")
    bad = checkpoint(tmp_path / "m-step2", fill=float("nan"))
    stages, left_out = series([str(good), str(bad)])
    assert [stage.step for stage in stages] == [1]
    assert left_out == ("m-step2: a.weight holds 8 NaN or infinite elements; left out.",)
    with pytest.raises(MeasurementError, match=r"m-step2: a.weight holds 8 NaN"):
        series([str(bad)])


def test_what_is_no_series(tmp_path: Path) -> None:
    """Two series in one directory; nothing there; a text file; one checkpoint twice."""
    for variant in ("bf16-seed0", "fa2-seed0"):
        checkpoint(tmp_path / f"both/{variant}-step5")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "text.txt").write_text("words")
    for targets, says in (
        ([tmp_path / "both"], r"2 checkpoints are of step 5.*name one series"),
        ([tmp_path / "nothing"], "no such file or directory"),
        ([empty], r"holds no checkpoint.*a training keeps them with `checkpoints:`"),
        ([empty / "text.txt"], r"text\.txt"),
        (["demo", "demo"], "is given twice"),
    ):
        with pytest.raises(UsageError, match=says):
            series([str(target) for target in targets])
