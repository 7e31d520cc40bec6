"""Temporary files: none stays, even where their process was killed, and none is taken
from one that lives."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from oracles import make_case

from numdev import temporary_files
from numdev.report import io
from numdev.sources.captured_calls import writing_cases
from numdev.studies.audit.journal import JOURNAL, Journal

KILLED = """
import os, signal, sys
from pathlib import Path
from numdev import temporary_files
from numdev.report.io import replacing
place = Path(sys.argv[1])
folders = temporary_files.temporary_folder(), temporary_files.temporary_folder(place, ".saved.")
with folders[0] as a, folders[1] as b, replacing(place / "report.json") as file:
    (a / "file").touch()
    (b / "file").touch()
    file.write("half")
    file.flush()
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", flush=True)
    sys.stdin.read()
"""


def start(place: Path, scratch: Path, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place), what],
        env={"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(scratch)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory for results and one for temporary files."""
    for name in ("results", "scratch"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "results", tmp_path / "scratch"


def contents(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_what_a_killed_process_left_goes_at_the_next_start(
    places: tuple[Path, Path],
) -> None:
    """By a journal, a claim, a file or a folder in the same place."""
    results, scratch = places
    start(results, scratch, "kill").wait()
    assert len(contents(results)) == 2
    with Journal.open(results, {"request": 1}, overwrite=False):
        assert contents(results) == {JOURNAL}
    assert len(contents(scratch)) == 1
    with temporary_files.temporary_folder() as folder:
        assert contents(scratch) == {folder.name}
    assert contents(scratch) == set()
    (results / JOURNAL).unlink()
    start(results, scratch, "kill").wait()
    io.claim_directory(results, "weights", {}, overwrite=False)
    assert contents(results) == set()
    start(results, scratch, "kill").wait()
    with io.replacing(results / "other.csv") as file:
        file.write("whole")
    assert contents(results) == {"other.csv"}


def test_what_a_living_process_writes_stays(places: tuple[Path, Path]) -> None:
    """And takes its name in the end."""
    results, scratch = places
    process = start(results, scratch, "live")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    before = contents(results), contents(scratch)
    temporary_files.remove_stale(results)
    temporary_files.remove_stale(scratch, "numdev-")
    assert (contents(results), contents(scratch)) == before
    process.communicate("")
    assert (contents(results), contents(scratch)) == ({"report.json"}, set())
    assert (results / "report.json").read_text() == "half"


def test_only_what_is_temporary_is_removed(places: tuple[Path, Path]) -> None:
    """A user's files of similar names, and what a link of such a name leads to."""
    results, scratch = places
    names = {".report.json.bak", "report.json.unfinished", ".report.json.unfinished.tex"}
    for name in names:
        (results / name).touch()
    (scratch / "thesis.tex").touch()
    (results / ".link.unfinished").symlink_to(scratch / "thesis.tex")
    temporary_files.remove_stale(results)
    assert contents(results) == {*names, ".link.unfinished"}
    assert contents(scratch) == {"thesis.tex"}


def test_saved_cases_leave_no_half_folder(places: tuple[Path, Path]) -> None:
    """Of an earlier run that was killed while it saved cases there."""
    results, scratch = places
    start(results, scratch, "kill").wait()
    with writing_cases(results / "saved") as add:
        add(make_case(dtype=torch.float32, heads=1, q_len=2, kv_len=2, head_dim=2), {})
    assert {name for name in contents(results) if "saved" in name} == {"saved"}
    assert (results / "saved").stat().st_mode & 0o777 == 0o755
