"""Bad files of log-probabilities end in one clear line: nothing is run, and a small file
cannot fill the memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hostile_logprobs import LEAST, hostile_files, packed_files, write_good

from numdev.errors import MeasurementError, NumdevError, UsageError
from numdev.studies.logprobs.readers import read_sides

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
