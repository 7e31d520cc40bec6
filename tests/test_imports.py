"""What must work without the heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "pandas", "scipy", "dask", "distributed", "triton")
TENSORS = ("torch", "transformers", "dask", "distributed", "triton")
COMMANDS = ["audit", "sweep", "train", "weights", "bounds", "compare", "diagnose", "gate", "report"]


def without(packages: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`numdev` where these packages cannot be imported."""
    code = (
        "import sys\n"
        f"for name in {packages!r}: sys.modules[name] = None\n"
        "from numdev.cli.main import main\n"
        f"main({list(arguments)!r})\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_needs_nothing_heavy(command: str | None) -> None:
    """`numdev --help`, and the help of every command with its example."""
    answer = without(HEAVY, *([] if command is None else [command]), "--help")
    assert answer.returncode == 0, answer.stderr
    assert ("Commands:" if command is None else "Example:") in answer.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an audit of one layer of the demo."""
    directory = tmp_path_factory.mktemp("audit") / "report"
    command = [sys.executable, "-m", "numdev", "audit", "demo", "--layers", "0", "--rows", "16"]
    subprocess.run([*command, "-q", "-o", str(directory)], check=True)
    return directory


@pytest.mark.parametrize("arguments", [["report"], ["report", "--json"], ["gate"]])
def test_reports_are_read_without_tensors(finished: Path, arguments: list[str]) -> None:
    """Showing a report and judging it need neither torch nor what comes with it."""
    answer = without(TENSORS, *arguments, str(finished))
    assert answer.returncode == 0, answer.stderr
    assert "sdpa-flash" in answer.stdout
