"""Memory of `numdev logprobs` without a model: it goes by the longest record, not by how
many there are."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numdev
from numdev.studies.logprobs import lazy_sequences
from numdev.studies.logprobs.lazy_sequences import Mapped, in_file
from numdev.studies.logprobs.statistics import median

LENGTH = 8192  # tokens: many beside the rows of a report, which each sequence has


def files(folder: Path, count: int) -> list[Path]:
    """Files of two sound sides, of so many sequences each."""
    paths = []
    for name in ("rollout", "trainer"):
        rng = np.random.default_rng(0)
        records = []
        for i in range(count):
            ids, exact = rng.integers(0, 50_000, LENGTH), -rng.exponential(size=LENGTH)
            noise = rng.normal(0, 0.01 + (name == "trainer") / 1000, LENGTH)
            values = np.minimum(0, exact + noise).tolist()
            records.append({"uid": i, "token_ids": ids.tolist(), "logprobs": values})
        paths.append(folder / f"{name}{count}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, records)))
    return paths


def test_memory_does_not_grow_with_the_tokens_of_all_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each further token of a pair less than half of an fp64: only rows of the report
    grow. One list of errors in memory would be above that."""
    monkeypatch.setattr(lazy_sequences, "MOST_IN_MEMORY", 1)
    numdev.logprobs(*files(tmp_path, 1))  # what is imported is not counted
    peaks = {}
    for count in (2, 8):
        paths = files(tmp_path, count)
        tracemalloc.start()
        try:
            report = numdev.logprobs(*paths)
            peaks[count] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sum(row.tokens for row in report.pairs) == count * LENGTH
    assert peaks[8] - peaks[2] < 6 * LENGTH * 4


def test_items_in_a_file_are_read_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, beside others and in slices; the file has no name that anyone could
    open, or that a killed process would leave behind."""
    monkeypatch.setattr(lazy_sequences, "MOST_IN_MEMORY", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arrays = [np.arange(n) / 3 for n in range(5)]
    items = in_file(iter(arrays))
    assert list(tmp_path.iterdir()) == []
    for at in (4, 0, 3, 3, -1):
        assert np.array_equal(items[at], arrays[at])
    doubled = Mapped(np.add, items, items)
    assert [x.sum() for x in doubled[1:3]] == [2 * x.sum() for x in arrays[1:3]]
    assert len(in_file(())) == 0
    with pytest.raises(IndexError):
        items[5]
    with pytest.raises(ValueError, match="one length"):
        Mapped(np.add, items, arrays[:2])


def test_a_full_disk_is_told_with_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it: TMPDIR may be on another disk than the report."""

    class Full(io.BytesIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lazy_sequences, "SpooledTemporaryFile", lambda _size: Full())
    with pytest.raises(OSError, match="No space left on device") as raised:
        in_file([1])
    assert raised.value.filename == tempfile.gettempdir()


@settings(max_examples=50)
@given(
    st.lists(
        st.lists(
            st.sampled_from([0.0, 5e-324, 1.0, 1.01, 2.0, 1e300])
            | st.floats(0, allow_infinity=False)
        )
    )
)
def test_the_median_of_parts_is_that_of_all(parts: list[list[float]]) -> None:
    """To the last bit, with ties, subnormals and empty parts; None of nothing."""
    arrays = [np.array(part, dtype=np.float64) for part in parts]
    every = [x for part in parts for x in part]
    with np.errstate(over="ignore"):  # of the mean of two in the middle
        expected = float(np.median(every)) if every else None
        assert median(arrays) == expected
