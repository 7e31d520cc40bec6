"""The journal: what is finished is kept, whatever happens, and never mixed with anything
else."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel
from recipes import drawn

import numdev
from numdev.cases import CaseRef
from numdev.errors import Refused, UsageError
from numdev.kernels import Kernel
from numdev.kernels.emulation.faults import CONTROLS
from numdev.metrics.row_samples import Sample
from numdev.request_models import AuditRequest, Choice
from numdev.studies.audit.journal import JOURNAL, Journal
from numdev.studies.audit.kernel_check import declining
from numdev.studies.audit.plan import (
    Plan,
    Planned,
    Task,
    digest,
    header,
    plan_controls,
    plan_kernels,
)
from numdev.system import System

HEADER: dict[str, Any] = {
    "request": {"target": "demo", "seed": 0, "formats": ["bfloat16"]},
    "environment": {"torch": "2.13", "cpu_capability": "AVX512"},
}
TASKS = [f"task{i}" for i in range(4)]


def rows_of(key: str) -> list[dict[str, Any]]:
    return [
        {"key": key, "head": h, "rms": 0.1 + 0.2, "note": "µ\n\u2028"} for h in range(2)
    ]


def run(
    directory: Path | None, head: dict[str, Any] | None = None, *, stop_after: int = 99
) -> Any:
    """A study in small. Returns all rows, and how many tasks had to be computed."""
    computed = 0
    with Journal.open(directory, head or HEADER, overwrite=False) as journal:
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


def test_without_a_directory_it_has_the_same_rows_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody keeps is in memory: rows come as from a file, each task is asked for
    once, and another journal knows nothing of them."""
    monkeypatch.chdir(tmp_path)
    assert run(None) == (ALL, 4)
    assert run(None) == (ALL, 4)
    with Journal.open(None, HEADER, overwrite=False) as journal:
        assert journal.append("task0", {"row": rows_of("task0")})
        assert journal.visit("task0")
        assert not journal.append("task0", {"row": []})
        assert journal.rows("row") == rows_of("task0")
    assert not [*tmp_path.iterdir()]


def test_cut_off_at_any_byte_it_continues_to_the_same_rows(
    tmp_path: Path, finished: bytes
) -> None:
    """Only the task being written is computed again, and the file ends up the same."""
    ends = [i + 1 for i, byte in enumerate(finished) if byte == ord("\n")]
    for length in range(len(finished) + 1):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / JOURNAL).write_bytes(finished[:length])
        whole_lines = sum(end <= length for end in ends[1:])
        assert run(directory) == (ALL, 4 - whole_lines), length
        assert (directory / JOURNAL).read_bytes() == finished, length


@pytest.mark.parametrize(
    "torn", [b"\0" * 4096, b"{}", b"null", b"\xff\xfe", b'{"task":"task1",']
)
def test_a_torn_last_line_is_dropped(
    tmp_path: Path, finished: bytes, torn: bytes
) -> None:
    """Without its end, whatever it holds: it belongs to a task that was not finished."""
    good = finished[: finished.index(b'{"task":"task1"')]
    (tmp_path / JOURNAL).write_bytes(good + torn)
    assert run(tmp_path) == (ALL, 3)
    assert (tmp_path / JOURNAL).read_bytes() == finished


def _without_digest(line: bytes) -> bytes:
    return line[: line.index(b',"digest"')] + b"}\n"


DAMAGED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "edited": lambda x: [*x[:2], x[2].replace(b"0.3", b"0.4", 1), *x[3:]],
    "edited last": lambda x: [*x[:4], x[4].replace(b"0.3", b"0.4", 1)],
    "cut in the middle": lambda x: [*x[:2], x[2][:20], *x[3:]],
    "a line end inside": lambda x: [*x[:2], x[2][:20] + b"\n" + x[2][20:], *x[3:]],
    "removed": lambda x: [*x[:2], *x[3:]],
    "without its header": lambda x: x[1:],
    "repeated": lambda x: [*x[:3], x[2], *x[3:]],
    "repeated at the end": lambda x: [*x, x[4]],
    "reordered": lambda x: [*x[:2], x[3], x[2], x[4]],
    "an edited header": lambda x: [x[0].replace(b"demo", b"emod"), *x[1:]],
    "without digests": lambda x: [_without_digest(line) for line in x],
    "an empty line": lambda x: [*x[:2], b"\n", *x[2:]],
    "zeros in the middle": lambda x: [*x[:2], b"\0" * len(x[2]), *x[3:]],
    "of another task": lambda x: [*x[:2], x[2].replace(b"task1", b"task9", 1), *x[3:]],
    **{
        f"{other!r}": lambda x, other=other: [*x, other + b"\n"]
        for other in (
            b"{}",
            b"null",
            b"[]",
            b'{"task":1}',
            b'{"task":"x","rows":null}',
            b"\xff",
        )
    },
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_journal_is_refused(tmp_path: Path, finished: bytes, name: str) -> None:
    """In one line that names the way out, which then is one."""
    lines = DAMAGED[name](finished.splitlines(keepends=True))
    (tmp_path / JOURNAL).write_bytes(b"".join(lines))
    message = refused(tmp_path)
    assert f"{JOURNAL}: line " in message
    assert "--overwrite" in message
    assert "\n" not in message
    with Journal.open(tmp_path, HEADER, overwrite=True) as journal:
        assert journal.finished == 0
    assert run(tmp_path) == (ALL, 4)


SHAPES: tuple[dict[str, Any], ...] = (
    {"header": [1]}, {"header": HEADER, "more": 1}, {"task": "x", "rows": [{}]},
    {"task": 1, "rows": {"row": [{}]}}, {"task": "x", "rows": {"row": {}}},
    {"task": "x", "rows": {"row": [1]}}, {"task": "x"},
)  # fmt: skip


@pytest.mark.parametrize("line", SHAPES, ids=str)
def test_sealed_lines_of_another_shape_are_refused_too(tmp_path: Path, line: Any) -> None:
    """Written by another hand that knew how to seal them."""
    with Journal.open(tmp_path, HEADER, overwrite=False) as journal:
        if "header" in line:
            (tmp_path / JOURNAL).write_bytes(b"")
            journal = Journal(tmp_path, HEADER)
            journal._file = (tmp_path / JOURNAL).open("wb")
        journal._write_line(line)
        assert journal._file is not None
        journal._file.close()
    assert "expected a finished task" in refused(tmp_path)


class _Row(BaseModel):
    key: str
    head: int
    rms: float
    note: str


def test_rows_that_are_no_records_are_refused(tmp_path: Path) -> None:
    """What an earlier run wrote, and this numdev does not take for such a record."""
    run(tmp_path)
    with Journal.open(tmp_path, HEADER, overwrite=False) as journal:
        for key in TASKS:
            journal.visit(key)
        assert [row.rms for row in journal.records("row", _Row)] == [0.1 + 0.2] * 8
        journal.append("more", {"row": [{**rows_of("more")[0], "head": "first"}]})
        with pytest.raises(UsageError, match=r"row: expected a _Row.*head.*--overwrite"):
            journal.records("row", _Row)


def refused(directory: Path, head: dict[str, Any] | None = None, **kwargs: Any) -> str:
    """The message with which opening is refused; nothing in the directory may change."""
    before = contents(directory)
    with pytest.raises(UsageError) as caught:
        Journal.open(directory, head or HEADER, **{"overwrite": False, **kwargs})
    assert contents(directory) == before
    assert caught.value.hint
    return str(caught.value)


def contents(directory: Path) -> dict[str, bytes | None]:
    paths = directory.rglob("*") if directory.is_dir() else []
    return {str(p): None if p.is_dir() else p.read_bytes() for p in paths}


def test_another_run_is_refused_and_the_first_difference_named(tmp_path: Path) -> None:
    """Another request or environment; also a setting that only one of the runs has."""
    run(tmp_path)
    for part, name, value, words in (
        ("request", "seed", 1, "different request: seed was 0, now 1"),
        ("request", "rows", 9, "different request: rows was None, now 9"),
        ("environment", "torch", "2.14", "different environment: torch was '2.13', now"),
    ):
        other = {**HEADER, part: {**HEADER[part], name: value}}
        message = refused(tmp_path, other)
        assert words in message
        assert "--overwrite" in message
    run(tmp_path / "more", other)
    assert "torch was '2.14', now '2.13'" in refused(tmp_path / "more")


def test_a_run_that_failed_before_its_first_row_is_no_other_run(tmp_path: Path) -> None:
    """The corrected request starts anew in its directory; what a case is called is no
    row."""
    for name, rows in (
        ("failed", {"case": [{}]}),
        ("empty", {}),
        ("measured", {"row": [{}]}),
    ):
        other = {**HEADER, "request": {"target": "demmo"}}
        with Journal.open(tmp_path / name, other, overwrite=False) as journal:
            journal.append("case a", rows)
    assert [run(tmp_path / name) for name in ("failed", "empty")] == [(ALL, 4)] * 2
    assert run(tmp_path / "failed") == (ALL, 0)
    refused(tmp_path / "measured")


FOREIGN = ("1,2,3\n", "\n", "[]\n", '{"rows":[]}\n')


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_somebody_elses_is_refused(tmp_path: Path, overwrite: bool) -> None:
    """Foreign files are left alone, with --overwrite too; a header's beginning is
    ours."""
    for index, (name, text) in enumerate(
        [("thesis.tex", "x"), *((JOURNAL, x) for x in FOREIGN)]
    ):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / name).write_text(text)
        assert f"holds other files ({name})" in refused(directory, overwrite=overwrite)
    for text in ('{"head', '{"header'):
        (tmp_path / text[1:]).mkdir()
        (tmp_path / text[1:] / JOURNAL).write_text(text)
        assert run(tmp_path / text[1:]) == (ALL, 4)


def test_a_place_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """A file where the directory should be, and a directory where the journal should
    be."""
    (tmp_path / "file").write_text("")
    assert "expected a directory for the results, got a file" in refused(
        tmp_path / "file"
    )
    below = refused(tmp_path / "file" / "below")
    assert (
        f"{tmp_path / 'file'}: expected a directory for the results, got a file" in below
    )
    (tmp_path / "dir" / JOURNAL).mkdir(parents=True)
    assert "cannot write results there" in refused(tmp_path / "dir")


TASK: dict[str, Any] = {
    "case": CaseRef(case="layers.0#0", source="demo", module="layers.0", layer=0, call=0, seed=1),
    "role": "kernel", "kernel": "mine", "options": {"block": 64, "exact": True},
    "format": "bfloat16",
}  # fmt: skip
OTHERS: dict[str, Sequence[Any]] = {
    "case": [dataclasses.replace(TASK["case"], **{name: value}) for name, value in (
        ("case", "b"), ("source", "other"), ("module", "layers.1"), ("layer", 1), ("call", 1),
        ("seed", 2), ("phase", "decode"), ("step", 0), ("attends", "self"),
    )],
    "role": ["baseline"], "kernel": ["other"],
    "options": [{"block": 128, "exact": True}, *({"x": x} for x in (1, 1.0, True, "1", None))],
    "format": ["float16"], "heads": [(0,), ()], "gradients": [True], "repeats": [2],
    "sample": [Sample(count=4), Sample(count=5), Sample(count=4, seed=1)],
}  # fmt: skip


def test_the_same_task_has_the_same_key() -> None:
    """Also with options in another order, after pickling, and in another process (no hash
    seed)."""
    task = Task(**TASK)
    again = Task(**{**TASK, "options": {"exact": True, "block": 64}})
    assert task.key == again.key == pickle.loads(pickle.dumps(task)).key
    assert digest({"a": 1}) == "015abd7f5cc57a2d"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Task)])
def test_every_field_is_in_the_key(name: str) -> None:
    """Two tasks that differ in any field are two tasks; 1, 1.0, True and "1" are four
    options."""
    tasks = [Task(**{**TASK, name: value}) for value in OTHERS[name]]
    assert len({task.key for task in (Task(**TASK), *tasks)}) == 1 + len(tasks)


def test_every_part_of_a_case_is_in_the_key() -> None:
    """As many as a case's name has, so that a new one asks for a case above."""
    refs = [vars(ref) for ref in OTHERS["case"]]
    changed = [
        name for ref in refs for name in ref if ref[name] != vars(TASK["case"])[name]
    ]
    assert changed == [field.name for field in dataclasses.fields(CaseRef)]


class _Machine(NamedTuple):
    """As much of a system as a journal's header asks for."""

    torch: str

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


PARTS: dict[str, dict[str, Any]] = {
    "request": {"request": {"seed": 1}},
    "environment": {"system": _Machine("2.14")},
    "kernels": {"kernels": [Planned(role="kernel", kernel=Kernel(
        name="mine", function=len, made_from="edited"), options={})]},
    "source": {"source": {"sha256": "edited"}},
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_run_with_another_part_is_refused(tmp_path: Path, part: str) -> None:
    """What is asked for, the machine, the source of a kernel, and what is read: it is
    named."""
    kernel = Kernel(name="mine", function=len, made_from="written")
    same: dict[str, Any] = {
        "request": {"seed": 0}, "system": _Machine("2.13"), "source": {"sha256": "written"},
        "kernels": [Planned(role="kernel", kernel=kernel, options={})],
    }  # fmt: skip
    run(tmp_path, header(**same))
    assert run(tmp_path, header(**same)) == (ALL, 0)
    assert f"holds a run with a different {part}: " in refused(
        tmp_path, header(**{**same, **PARTS[part]})
    )
    assert header(**same).keys() == PARTS.keys()


def test_how_a_source_is_read_decides_no_number() -> None:
    """A streamed model continues one that was read whole."""
    same: dict[str, Any] = {"request": {}, "system": _Machine("2.13"), "kernels": ()}
    whole, streamed = {"sha256": "a"}, {"sha256": "a", "streamed": "layer by layer"}
    assert header(**same, source=whole) == header(**same, source=streamed)


def test_a_kernel_is_planned_once_for_each_set_of_options() -> None:
    """Other options are another kernel, the same ones are not; a yardstick that is asked
    for is a kernel too; whether anybody asked by name is told."""
    chosen = [Choice(name="emulated", options={"block_kv": n}) for n in (32, 64, 32)]
    result = plan_kernels([*chosen, Choice(name="baseline")], under_audit=True)
    planned = [(p.role, p.kernel.name, p.options.get("block_kv")) for p in result]
    assert planned == [
        ("precision", "reference", None), ("floor", "floor", None), ("baseline", "baseline", None),
        ("kernel", "emulated", 32), ("kernel", "emulated", 64), ("kernel", "baseline", None),
    ]  # fmt: skip
    for asked, named in (({}, False), ({"kernels": (Choice(name="emulated"),)}, True)):
        request = AuditRequest(
            target="demo", checkpoint="demo", formats=("bfloat16",), **asked
        )
        assert Plan.of(request, System(device="cpu")).named == named


def test_the_version_of_a_run_knows_numdevs_source() -> None:
    """Its number and a hash: an edit that changes a number is another version."""
    same: dict[str, Any] = {"request": {}, "kernels": (), "source": {}}
    version = header(**same, system=_Machine("2.13"))["environment"]["numdev"]
    assert re.fullmatch(re.escape(numdev.__version__) + r"\+[0-9a-f]{12}", version)


def test_every_dose_of_every_fault_is_planned() -> None:
    """Those of the backward pass with gradients alone."""
    for gradients in (False, True):
        expected = [
            (f"control:{name}", dose)
            for name, control in CONTROLS.items()
            for dose in control.doses
            if gradients or not control.in_backward_only
        ]
        result = [
            (p.kernel.name, p.options["dose"]) for p in plan_controls(gradients=gradients)
        ]
        assert result == expected
    assert any(control.in_backward_only for control in CONTROLS.values())


def test_what_pytorch_refuses_is_no_failure() -> None:
    """A call that the chosen operator does not take, or one that is not implemented;
    another error is the kernel's own."""

    def raising(error: Exception) -> Any:
        def function(case: Any, **options: Any) -> Any:
            raise error

        return declining(Kernel(name="mine", function=function)).function

    case = drawn(8, head_dim=4)
    for error, kind in (
        (RuntimeError("No available kernel. Aborting execution."), Refused),
        (NotImplementedError("no windows"), Refused), (RuntimeError("out of luck"), RuntimeError),
    ):  # fmt: skip
        with pytest.raises(kind, match=str(error).split(maxsplit=1)[0]) as raised:
            raising(error)(case)
        assert isinstance(raised.value, Refused) == (kind is Refused)
