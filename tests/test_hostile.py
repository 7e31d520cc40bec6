"""Kernels that mean harm to numdev, and what is odd about the exceptions of others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles import make_case
from planted.hostile import OwnBase

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError
from numdev.kernels import find
from numdev.sources.tensor_files import naming
from numdev.studies.audit.isolation import Failure, attempt

FOLDER = Path(__file__).parent


@pytest.fixture
def case() -> AttentionCase:
    return make_case(dtype=torch.bfloat16, heads=2, q_len=5, kv_len=7, head_dim=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "marked", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)]
)
def test_hostile_kernels_cost_their_own_rows(marked: str) -> None:
    """The quick part of the table, in a process with one thread."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run(
        [*command, "-m", f"not slow and {marked}", str(FOLDER / "support" / "hostile_table.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=FOLDER.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "[100%]" in done.stdout


def test_foreign_code_of_a_model_that_ends_the_program_is_one_line() -> None:
    """Of any kind but an interrupt, which may be the user's, and the end of a
    generator."""
    for error in (
        SystemExit(0),
        OwnBase("of its own"),
        asyncio.CancelledError(),
    ):
        with (
            pytest.raises(
                MeasurementError, match=f"^model: does not run: {type(error).__name__}"
            ),
            naming("model", "does not run"),
        ):
            raise error
    for passing in (KeyboardInterrupt, GeneratorExit):
        with pytest.raises(passing), naming("model", "does not run"):
            raise passing


NAMED = {
    "raises_base": "OwnBase: of its own",
    "raises_interrupt": "KeyboardInterrupt: by itself",
    "raises_exit": "SystemExit: leaving",
    "raises_exit_none": "ended the program (exit code None)",
    "raises_generator_exit": "GeneratorExit: GeneratorExit()",
    "raises_base_group": "BaseExceptionGroup: both (2 sub-exceptions)",
    "raises_unspeakable": "Unspeakable: its message raised ValueError",
    "raises_unstoppable": "Unstoppable: its message raised KeyboardInterrupt",
    "raises_leaving": "Leaving: its message raised SystemExit",
    "raises_wordless": "Wordless: ",
    "raises_not_text": "NotText: its message raised TypeError",
    "raises_binary": "Binary: ?\x00\x1b[2J",
}


@pytest.mark.parametrize("name", NAMED)
def test_any_exception_is_a_failed_row_in_process_too(
    case: AttentionCase, name: str
) -> None:
    """One line names it, whatever its own words do."""
    failure = attempt(find(f"planted:{name}"), case, {})
    assert failure == Failure("failed", NAMED[name])
