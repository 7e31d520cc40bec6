"""Bad files of log-probabilities end in one clear line: nothing is run, and a small file
cannot fill the memory."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_logprobs import LEAST, hostile_files, packed_files, write_good
from logprob_files import (
    Sample,
    samples,
    write_chat,
    write_completions,
    write_lines,
    write_prime_rl,
    write_prompt_logprobs,
    write_slime_rollout,
)

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.studies.logprobs.readers import LAYOUTS, read_sides
from numdev.studies.logprobs.record_fields import FileRecord, ReadBudget
from numdev.studies.logprobs.record_files import read_records

ROOT = Path(__file__).parent.parent
LONGEST = 300  # characters of a message, beside the folder


@pytest.mark.slow
def test_every_bad_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """Each names the file, says what was expected and is no other error; no pickle with
    code was run."""
    count = 0
    for path in hostile_files(tmp_path):
        count += 1
        with pytest.raises(MeasurementError) as caught:
            read_sides(path)
        message = str(caught.value)
        assert message.startswith(str(path)), message
        assert len(message.splitlines()) == 1, message
        assert len(message) < LONGEST + len(str(tmp_path)), message
        assert not (tmp_path / "ran").exists(), path.name
        path.unlink()
    assert count >= LEAST


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read there")
def test_a_small_file_cannot_fill_the_memory(tmp_path: Path) -> None:
    """Files of at most half a megabyte that unpack to tens or hundreds of them are left
    with less than 700 MB in use: 34 MB of content, as Python's objects."""
    paths = []
    for name, write in packed_files():
        if name.startswith("bomb"):
            write(tmp_path / name)
            paths.append(tmp_path / name)
    assert len(paths) >= 5
    assert max(path.stat().st_size for path in paths) < 500_000
    code = (
        "import re, sys\n"
        "from numdev.errors import MeasurementError\n"
        "from numdev.studies.logprobs.readers import read_sides\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        read_sides(path)\n"
        "    except MeasurementError as error:\n"
        "        assert 'expected content of at most' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError(path)\n"
        "assert 'torch' not in sys.modules\n"
        "status = open('/proc/self/status').read()\n"
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', status)[1])\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) < 700_000


def test_changed_files_are_read_or_refused(tmp_path: Path) -> None:
    """Bytes of good files, changed, doubled or cut at random: whatever comes of it is a
    side or one line."""
    rng = np.random.default_rng(51)
    messages, whole = [], 0
    for path in write_good(tmp_path):
        content = path.read_bytes()
        for _ in range(60):
            changed = bytearray(content)
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(len(changed)))
                kind = rng.integers(3)
                if kind == 0:
                    changed[at] = int(rng.integers(256))
                elif kind == 1:
                    changed[at:at] = changed[at : at + int(rng.integers(1, 40))]
                elif len(changed) > 1:
                    del changed[at : at + int(rng.integers(1, 40))]
            path.write_bytes(bytes(changed))
            try:
                sides = read_sides(path)
            except NumdevError as error:
                messages.append(str(error))
                continue
            whole += 1
            for side in sides:
                for sequence in side.sequences:
                    n = len(sequence)
                    assert sequence.logprobs.shape == sequence.mask.shape == (n,)
                    assert sequence.token_ids.min() >= 0
                    assert not np.isposinf(sequence.logprobs).any()
    assert len(messages) > 100
    assert whole > 10
    assert [x for x in messages if len(x.splitlines()) != 1] == []


SENTENCE = re.compile(r"a\.jsonl line 1.*: expected .*, got .*")
WRONG = (None, True, {}, [], [[1]], "x", 10**30, -1, math.nan)
Place = tuple[str | int, ...]
SUFFIX = {write_slime_rollout: ".pt"}


def write_rectangle(path: Path, some: list[Sample]) -> Path:
    """Rows of one length, in one record of numdev's."""
    rows = {"token_ids": [[1, 2], [3, 4]], "logprobs": [[-1, -2], [-3, -4]]}
    return write_lines(path, [rows])


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Where values stand in lists and objects, of a list the first two."""
    if above:
        yield above
    inner = (
        value if isinstance(value, dict) else range(2) if isinstance(value, list) else ()
    )
    for part in inner:
        if isinstance(value, dict) or part < len(value):
            yield from places(value[part], (*above, part))


def with_value(value: Any, place: Place, new: Any) -> Any:
    """A copy with another value at a place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    inner = value.get(place[0]) if isinstance(value, dict) else value[int(place[0])]
    copy[place[0]] = with_value(inner, place[1:], new)
    return copy


def sequences(record: FileRecord, fields: dict[str, object]) -> list[Any]:
    """What a record with these fields has, by the layout that it is then of."""
    changed = FileRecord(
        fields, "a.jsonl line 1", ReadBudget(record.budget.path, 1 << 25)
    )
    layout = next((layout for layout in LAYOUTS if layout.fits(changed)), None)
    return [] if layout is None else list(layout.sequences(changed))


def test_every_field_of_another_type_is_read_or_refused(tmp_path: Path) -> None:
    """A list, object, text, null, bool, huge number or NaN at every place of every
    layout."""
    some = samples(1, k=2)
    messages = []
    for path in (
        *write_good(tmp_path), write_chat(tmp_path / "chat.jsonl", some),
        write_prompt_logprobs(tmp_path / "prompt.jsonl", some),
        write_slime_rollout(tmp_path / "rollout.pt", some),
        *sorted(write_prime_rl(tmp_path / "prime", some).rglob("rank_0.jsonl")),
    ):  # fmt: skip
        record = next(iter(read_records(path)))
        for place, new in itertools.product(places(dict(record.fields)), WRONG):
            try:
                sequences(record, with_value(record.fields, place, new))
            except NumdevError as error:
                messages.append(str(error))
    assert len(messages) > 500
    assert [x for x in messages if not SENTENCE.fullmatch(x) or "None" in x] == []


CHOICE = ("choices", 0)
CONTENT = (*CHOICE, "logprobs", "content", 0)


@pytest.mark.parametrize(
    ("write", "place", "new", "says"),
    [
        (write_chat, ("prompt_token_ids",), "x", "prompt_token_ids: expected a list of numbers, got 'x'"),
        (write_chat, (*CHOICE, "token_ids"), {}, "token_ids: expected a list of numbers, got an object"),
        (write_chat, (*CONTENT, "top_logprobs"), 3, "top_logprobs: expected a list of objects, got 3"),
        (write_chat, (*CONTENT, "top_logprobs", 0), "x", r"top_logprobs\[0\]: expected an object, got 'x'"),
        (write_chat, (*CONTENT, "top_logprobs", 0, "token"), ["x"], "token: expected a text or null, got a"),
        (write_completions, (*CHOICE, "logprobs", "top_logprobs", 0), [], "expected an object or null"),
        (write_prompt_logprobs, (*CHOICE, "prompt_token_ids", 1), [3], r"_ids\[1\]: expected whole numbers"),
        (write_slime_rollout, ("samples", 0, "remove_sample"), "yes", "expected true, false or null, got"),
        (write_rectangle, ("token_ids", 1), 3, r"token_ids\[1\]: expected a list of tokens, got 3"),
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_not_left_out(
    tmp_path: Path, write: Any, place: Place, new: object, says: str
) -> None:
    """It is no missing field, which might mean that a prompt or alternatives were not
    recorded."""
    record = next(
        iter(
            read_records(
                write(tmp_path / f"a{SUFFIX.get(write, '.jsonl')}", samples(2, k=2))
            )
        )
    )
    with pytest.raises(MeasurementError, match=says):
        sequences(record, with_value(record.fields, place, new))


@pytest.mark.parametrize("rows", [np.array([[0.5, 1.7]]), torch.tensor([[True]])])
def test_arrays_within_a_list_are_of_the_numbers_that_are_wanted(rows: Any) -> None:
    """Fractions are not cut off, and true is no number, as where the array is the value
    itself."""
    record = FileRecord({}, "a.pt", ReadBudget(Path("a.pt"), 1 << 25))
    says = r"a\.pt: routed_experts\[0\]: expected whole numbers, got an array of "
    with pytest.raises(MeasurementError, match=says + "(float64|bool)"):
        record.integers_of("routed_experts", [rows], 1, depth=3)
    if rows.dtype == torch.bool:
        with pytest.raises(MeasurementError, match="expected numbers, got an array of b"):
            record.numbers_of("top_logprobs", [rows[0]], 1, depth=2)
    whole = record.integers_of(
        "routed_experts", [np.array([[3, 4]], np.uint8)], 1, depth=3
    )
    assert whole.tolist() == [[[3, 4]]]


@pytest.mark.parametrize("package", ["pyarrow", "backports.zstd"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Without the package that a file needs, the message says which, and how to get it."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "backports", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    path = tmp_path / ("a.parquet" if package == "pyarrow" else "a.jsonl.zst")
    path.write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=f"needs the package {package}; pip install"):
        read_sides(path)
