"""A few hundred of the fuzzer's inputs, and proof that it notices what it is there to
notice.

A whole run is `python scripts/fuzz.py`; its last results are in
benchmarks/results/fuzz.md."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import load

fuzz = load("scripts/fuzz.py")
altered = load("scripts/altered_reports.py")


@pytest.mark.parametrize("target", list(fuzz.TARGETS))
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_inputs(target: str, seed: int) -> None:
    """Never an unexpected error, a control character, an injection, a wrong pass."""
    with tempfile.TemporaryDirectory() as folder:
        fuzz.one(target, random.Random(seed), Path(folder))


@pytest.mark.parametrize(
    "field", ["formats", "kernels", "heads", "axes", "target", "checkpoint"]
)
@pytest.mark.parametrize("value", [True, 3, {"a": 1}, ["x", 4], [None]])
def test_a_request_of_another_shape_is_one_line(
    field: str, value: Any, tmp_path: Path
) -> None:
    """Seed 62915 of `gate` found `formats: true`, which was a traceback."""
    report = fuzz.sound()
    report["request"][field] = value
    (tmp_path / "report.json").write_bytes(
        fuzz.with_digest(fuzz.json.dumps(report).encode())
    )
    done = fuzz.call("gate", str(tmp_path))
    assert done.code == 3
    assert f"request.{field}" in done.err or "inconsistent report" in done.err


@pytest.mark.parametrize("number", range(30))
def test_an_altered_report_does_not_pass(number: int, tmp_path: Path) -> None:
    """Some of scripts/altered_reports.py."""
    name, raw = altered.altered(
        fuzz.with_digest(fuzz.json.dumps(fuzz.sound()).encode()), number
    )
    (tmp_path / "report.json").write_bytes(raw)
    assert fuzz.call("gate", str(tmp_path)).code in (1, 3), name


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(name=st.text(max_size=60), rule=st.text(max_size=20), seed=st.integers(0, 99))
def test_any_name_at_all(name: str, rule: str, seed: int) -> None:
    """Names that hypothesis thinks up, in a report shown in every form."""
    data = fuzz.report_of("audit")
    rng = random.Random(seed)
    for part in (rng.choice(data["summary"]["kernels"]), rng.choice(data["findings"])):
        part["kernel"] = name
    data["findings"][0]["rule"] = rule
    data["rows"][0]["module"] = name
    # JSON can spell half a surrogate pair; no text can hold it, so such a report is
    # refused.
    code = 3 if any(0xD800 <= ord(c) <= 0xDFFF for c in name + rule) else 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        path.write_bytes(fuzz.with_digest(fuzz.json.dumps(data).encode()))
        for form, is_safe in fuzz.SHOWN.items():
            done = fuzz.call("report", str(path), "--format", form)
            assert done.code == code
            is_safe(done.out)


@pytest.mark.parametrize(("check", "texts"), [
    (fuzz.page_is_safe, ("<p><script>x</script></p>", '<p onload="x">')),
    (fuzz.markdown_is_safe, ("a <img>", "\n# fuzz", "[a](b)", "\x1b[31m")),
    (fuzz.csv_is_safe, ("a,=1+1\n", 'a,"\t=1"\n')),
    (fuzz.text_is_safe, ("\x07", "\u202e")),
])  # fmt: skip
def test_an_injection_is_noticed(check: Any, texts: tuple[str, ...]) -> None:
    """In each form."""
    for text in texts:
        with pytest.raises(fuzz.Broken):
            check(text)


def test_the_sound_report_passes_the_gate(tmp_path: Path) -> None:
    """Else nothing that is made worse could be passed wrongly."""
    path = tmp_path / "report.json"
    path.write_bytes(fuzz.with_digest(fuzz.json.dumps(fuzz.sound()).encode()))
    assert fuzz.call("gate", str(path)).code == 0
    assert fuzz.call("gate", str(fuzz.REPORTS["audit"])).code == 1


@pytest.mark.parametrize("target", ["gate", "two"])
def test_a_gate_that_passes_everything_is_noticed(target: str, tmp_path: Path) -> None:
    """Within a few dozen inputs."""
    passed = mock.patch.object(fuzz, "call", return_value=fuzz.Done(0, "", ""))
    with passed, pytest.raises(fuzz.Broken, match="passed"):
        _ = [fuzz.one(target, random.Random(seed), tmp_path) for seed in range(100)]


def test_a_traceback_and_a_stray_file_are_noticed(tmp_path: Path) -> None:
    """An unexpected exception of a command; a file beside the directory that was
    given."""
    unread = mock.patch("numdev.report.read", side_effect=KeyError("x"))
    with unread, pytest.raises(fuzz.Broken, match="KeyError"):
        fuzz.call("report", str(tmp_path))

    def stray(rng: random.Random) -> int:
        Path("../stray").write_text("")
        return 0

    with (
        mock.patch.dict(fuzz.TARGETS, report=stray),
        pytest.raises(fuzz.Broken, match="stray"),
    ):
        fuzz.one("report", random.Random(0), tmp_path)
