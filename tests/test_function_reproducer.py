"""A failed check of a function writes a script that shows the failure by itself, on
smaller inputs, and that shows nothing for a sound function in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import function_examples as examples
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from numdev.cli.main import cli
from numdev.function_check import check_beside
from numdev.operations.function.trees import Arguments
from numdev.studies.audit.function_reproducer import sizes_to_cut
from numdev.testing import CheckResult

EXAMPLES = Path(examples.__file__)


def inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 32, generator=generator).bfloat16().T  # not contiguous
    return {"x": x, "w": (1 + torch.rand(256, generator=generator)).bfloat16()}


def checked(name: str, tmp_path: Path, **options: object) -> CheckResult:
    same = {"reference": examples.rms_norm, "inputs": inputs, "reproducers": tmp_path}
    return check_beside(f"{EXAMPLES}:{name}", **{**same, **options})  # type: ignore[arg-type]


def ran(script: Path, *, instead: str = "") -> tuple[int, str]:
    """Runs a script without numdev; `instead`: another function of the examples."""
    if instead:
        text = script.read_text()
        name = next(line for line in text.splitlines() if "import_module(" in line)
        wrong = name.rsplit('"', 2)[1]
        script = script.with_name("other.py")
        script.write_text(text.replace(f'"{wrong}")', f'"{instead}")'))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "scaled",
            "rms error over what the reference's own rounding explains",
            marks=pytest.mark.slow,
        ),
        ("other_eps", "rms error over what the reference's own rounding explains"),
        pytest.param(
            "stale_row",
            "rms error over what the reference's own rounding explains",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "cut",
            "rms error over what the reference's own rounding explains",
            marks=pytest.mark.slow,
        ),
        ("one_nan", "elements that are finite or not against the exact result"),
        pytest.param(
            "other_dtype", "expected [1, 1], torch.bfloat16", marks=pytest.mark.slow
        ),
        ("raises", "ValueError: no such kernel"),
    ],
)
def test_a_script_shows_the_failure_alone(name: str, words: str, tmp_path: Path) -> None:
    script = checked(name, tmp_path).reproducer
    assert script is not None
    assert "numdev" not in script.read_text().replace("numdev-", "").split("import ")[1:]
    code, out = ran(script)
    assert code == 1, out
    assert words in out
    code, out = ran(script, instead="fused")
    assert code == 0, out


@pytest.mark.slow
def test_a_script_shows_a_wrong_gradient(tmp_path: Path) -> None:
    """The output is right, and what comes back is twice as large."""
    script = checked("twice_back", tmp_path, backward=True).reproducer
    assert script is not None
    code, out = ran(script)
    assert code == 1, out
    assert ran(script, instead="fused")[0] == 0


def test_a_script_is_smaller_and_keeps_equal_sizes_equal(tmp_path: Path) -> None:
    script = checked("scaled", tmp_path).reproducer
    assert script is not None
    stored = load_file(script.with_name("tensors.safetensors"))
    x, w = stored["0.in.x"], stored["0.in.w"]
    assert x.numel() < 32 * 256
    assert x.shape[-1] == w.shape[0]


def test_a_size_that_an_argument_says_is_not_cut() -> None:
    x = torch.zeros(64, 12, 32)
    assert sizes_to_cut(Arguments(positional=(x, torch.zeros(12)))) == [64, 32, 12]
    assert sizes_to_cut(Arguments(positional=(x,), named={"groups": 32})) == [64, 12]


def test_what_no_script_can_import_is_said(tmp_path: Path) -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return examples.scaled(x, w)

    result = check_beside(
        wrong, reference=examples.rms_norm, inputs=inputs, reproducers=tmp_path
    )
    assert result.reproducer is None
    assert result.notes[-1].startswith("No reproducer: a script cannot import wrong")


def test_a_sound_function_and_a_reference_that_raises_have_no_script(
    tmp_path: Path,
) -> None:
    assert checked("fused", tmp_path).reproducer is None
    result = checked("fused", tmp_path, reference=examples.raises)
    assert result.reproducer is None
    assert not any("reproducer" in note for note in result.notes)
    assert not list(tmp_path.iterdir())


def test_the_command_line_says_where_the_script_is(tmp_path: Path) -> None:
    command = ["check", f"{EXAMPLES}:scaled", "--reference", f"{EXAMPLES}:rms_norm",
               "--inputs", f"{EXAMPLES}:inputs", "--json", "-o", str(tmp_path)]  # fmt: skip
    data = json.loads(CliRunner().invoke(cli, command, standalone_mode=False).output)
    assert ran(Path(data["reproducer"]))[0] == 1


@pytest.mark.slow
def test_a_scalar_is_shown_over_its_draws(tmp_path: Path) -> None:
    result = checked(
        "smoothed_loss", tmp_path, reference=examples.loss,
        inputs=examples.loss_inputs, formats="float32",
    )  # fmt: skip
    assert result.reproducer is not None
    stored = load_file(result.reproducer.with_name("tensors.safetensors"))
    assert sum(name.endswith("in.target") for name in stored) == 8
    assert ran(result.reproducer)[0] == 1
    assert ran(result.reproducer, instead="loss")[0] == 0
