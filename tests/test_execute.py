"""The journal: what is finished is kept, whatever happens, and never mixed with anything else."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from numdev.audit.journal import JOURNAL, Journal
from numdev.audit.plan import Task, digest
from numdev.cases import CaseRef
from numdev.errors import UsageError

HEADER: dict[str, Any] = {
    "request": {"target": "demo", "seed": 0, "formats": ["bfloat16"]},
    "environment": {"torch": "2.13", "cpu_capability": "AVX512"},
}
TASKS = [f"task{i}" for i in range(4)]


def rows_of(key: str) -> list[dict[str, Any]]:
    return [{"key": key, "head": h, "rms": 0.1 + 0.2, "note": "µ\n\u2028"} for h in range(2)]


def run(directory: Path, header: dict[str, Any] | None = None, *, stop_after: int = 99) -> Any:
    """A study in small. Returns all rows, and how many tasks had to be computed."""
    computed = 0
    with Journal.open(directory, header or HEADER, overwrite=False) as journal:
        for key in TASKS:
            if not journal.visit(key):
                if computed == stop_after:
                    break
                journal.append(key, {"row": rows_of(key)})
                computed += 1
        return list(journal.rows("row")), computed


ALL = [row for key in TASKS for row in rows_of(key)]


@pytest.fixture
def finished(tmp_path: Path) -> bytes:
    """The bytes of a whole journal."""
    run(tmp_path / "whole")
    return (tmp_path / "whole" / JOURNAL).read_bytes()


def test_cut_off_at_any_byte_it_continues_to_the_same_rows(tmp_path: Path, finished: bytes) -> None:
    """Only the task being written is computed again, and the file ends up the same."""
    ends = [i + 1 for i, byte in enumerate(finished) if byte == ord("\n")]
    for length in range(len(finished) + 1):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / JOURNAL).write_bytes(finished[:length])
        kept = sum(end <= length for end in ends[1:])
        assert run(directory) == (ALL, 4 - kept), length
        assert (directory / JOURNAL).read_bytes() == finished, length


def test_garbage_after_the_good_lines_is_dropped(tmp_path: Path, finished: bytes) -> None:
    """Zero bytes, or a damaged line with good ones behind it: what stands before counts."""
    middle = finished.index(b"task1") - len('{"task":"')
    good, rest = finished[:middle], finished[middle:]
    lines = (b"{}\n", b"null\n", b'{"task":"x"}\n', b"\xff\xfe\n", b"\n" + rest)
    for garbage in (b"\0" * 4096, *lines):
        for behind in (b"", rest):
            (tmp_path / JOURNAL).write_bytes(good + garbage + behind)
            assert run(tmp_path) == (ALL, 3), garbage
            assert (tmp_path / JOURNAL).read_bytes() == finished


def refused(directory: Path, header: dict[str, Any] | None = None, **kwargs: Any) -> str:
    """The message with which opening is refused; nothing in the directory may change."""
    before = contents(directory)
    with pytest.raises(UsageError) as caught:
        Journal.open(directory, header or HEADER, **{"overwrite": False, **kwargs})
    assert contents(directory) == before
    assert caught.value.hint
    return str(caught.value)


def contents(directory: Path) -> dict[str, bytes | None]:
    paths = directory.rglob("*") if directory.is_dir() else []
    return {str(p): None if p.is_dir() else p.read_bytes() for p in paths}


def test_another_run_is_refused_and_the_first_difference_named(tmp_path: Path) -> None:
    """Another request or environment; also a setting that only one of the runs has."""
    run(tmp_path)
    for part, name, value, said in (
        ("request", "seed", 1, "different request: seed was 0, now 1"),
        ("request", "rows", 9, "different request: rows was None, now 9"),
        ("environment", "torch", "2.14", "different environment: torch was '2.13', now"),
    ):
        other = {**HEADER, part: {**HEADER[part], name: value}}
        message = refused(tmp_path, other)
        assert said in message
        assert "--overwrite" in message
    run(tmp_path / "more", other)
    assert "torch was '2.14', now '2.13'" in refused(tmp_path / "more")


def test_a_run_that_failed_before_its_first_row_is_no_other_run(tmp_path: Path) -> None:
    """The corrected request starts anew in its directory; what a case is called is no row."""
    for name, rows in (("failed", {"case": [{}]}), ("empty", {}), ("measured", {"row": [{}]})):
        other = {**HEADER, "request": {"target": "demmo"}}
        with Journal.open(tmp_path / name, other, overwrite=False) as journal:
            journal.append("case a", rows)
    assert [run(tmp_path / name) for name in ("failed", "empty")] == [(ALL, 4)] * 2
    assert run(tmp_path / "failed") == (ALL, 0)
    refused(tmp_path / "measured")


FOREIGN = ("1,2,3\n", "\n", "[]\n", '{"rows":[]}\n')


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_somebody_elses_is_refused(tmp_path: Path, overwrite: bool) -> None:
    """Foreign files are left alone, with --overwrite too; a header's beginning is ours."""
    for index, (name, text) in enumerate([("thesis.tex", "x"), *((JOURNAL, x) for x in FOREIGN)]):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / name).write_text(text)
        assert f"holds other files ({name})" in refused(directory, overwrite=overwrite)
    for text in ('{"head', '{"header'):
        (tmp_path / text[1:]).mkdir()
        (tmp_path / text[1:] / JOURNAL).write_text(text)
        assert run(tmp_path / text[1:]) == (ALL, 4)


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """A file where the directory should be, and a directory where the journal should be."""
    (tmp_path / "file").write_text("")
    assert "cannot write results there" in refused(tmp_path / "file")
    assert "cannot write results there" in refused(tmp_path / "file" / "below")
    (tmp_path / "dir" / JOURNAL).mkdir(parents=True)
    assert "cannot write results there" in refused(tmp_path / "dir")


TASK: dict[str, Any] = {
    "case": CaseRef(case="layers.0#0", source="demo", module="layers.0", layer=0, call=0, seed=1),
    "role": "kernel", "kernel": "mine", "options": {"block": 64, "exact": True},
    "format": "bfloat16",
}  # fmt: skip
OTHERS: dict[str, Sequence[Any]] = {
    "case": [dataclasses.replace(TASK["case"], **x) for x in ({"case": "b"}, {"seed": 2})],
    "options": [{"block": 128, "exact": True}, *({"x": x} for x in (1, 1.0, True, "1", None))],
    "role": ("baseline",), "kernel": ("other",), "format": ("float16",), "heads": ((0,),),
}  # fmt: skip


def test_the_same_task_has_the_same_key() -> None:
    """Also with options in another order, after pickling, and in another process (no hash seed)."""
    task = Task(**TASK)
    again = Task(**{**TASK, "options": {"exact": True, "block": 64}})
    assert task.key == again.key == pickle.loads(pickle.dumps(task)).key
    assert digest({"a": 1}) == "015abd7f5cc57a2d"


def test_every_field_is_in_the_key() -> None:
    """Two tasks that differ in any field are two tasks; 1, 1.0, True and "1" are four options."""
    tasks = [Task(**{**TASK, name: x}) for name, values in OTHERS.items() for x in values]
    assert len({task.key for task in (Task(**TASK), *tasks)}) == 1 + len(tasks)
