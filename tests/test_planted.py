"""The catalogue of `benchmarks/planted`: its faulty kernels fail a check and are named, its
sound ones pass, and every entry is of use."""

from __future__ import annotations

import re
from pathlib import Path

import planted
import pytest
import torch
from planted import CATALOGUE, FAMILIES, Planted, of_family
from planted.record import plant

from numdev import testing
from numdev.kernels import find
from numdev.metrics.statistics import noise_ratio
from numdev.testing import CheckFailed, check, check_attention

ROOT = Path(__file__).parent.parent
CAUGHT = [entry for entry in CATALOGUE.values() if entry.check]
SIZES = ("kv-by-the-wrong-divisor", "four-heads-at-once", "as-many-queries-as-keys",
         "transposed-where-square")  # fmt: skip
DERIVED = {"out": ("dq", "dk"), "lse": ()}  # whose delta is made of a wrong output


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scripts, and the fault that draws its tiles' order is seeded."""
    monkeypatch.setattr(testing, "reproduce", lambda *_, **__: [])
    torch.manual_seed(0)


@pytest.mark.parametrize("entry", CAUGHT, ids=lambda entry: entry.name)
@pytest.mark.one_in(12)
def test_a_fault_is_caught_and_named(entry: Planted) -> None:
    """By the default cases that show it, as what it is, in a tensor it shows in; in lines
    that fit pytest's 80 columns."""
    cases = None if entry.check == ("default",) else entry.check
    for fmt in entry.formats:
        with pytest.raises(CheckFailed) as caught:
            check_attention(entry.function, cases=cases, formats=fmt, reproducers=None)
        assert all(len(line) + 8 <= 80 for line in str(caught.value).splitlines())
        result = caught.value.result
        assert result.in_short.removeprefix("planted:").startswith(f"{entry.attribute} ")
        findings = [f for f in result.report.findings if f.severity == "exceeded"]
        first, causes = findings[0], {f.cause for f in findings if f.cause}
        assert bool(causes) == (entry.says is not None and entry.is_named), causes
        assert all(re.search(str(entry.says), cause) for cause in causes), causes
        assert first.rule == (entry.rule or first.rule)
        assert re.search(entry.place or "", first.whole), first.whole
        may = {*entry.tensors}.union(*(DERIVED.get(x, ()) for x in entry.tensors))
        assert {f.tensor for f in findings} & may
        place = getattr(first.place, "case", None)
        assert place is None or cases is None or place in cases


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.one_in(4)
def test_the_default_cases_have_the_sizes_that_code_takes_for_one_another(
    name: str,
) -> None:
    """Wrong in these alone, and so caught by them alone."""
    entry = CATALOGUE[name]
    report = check(entry.function, formats="bfloat16", backward=False).report
    rows = [r for r in report.rows if r.role == "kernel"]
    assert len({r.case for r in rows}) > 25
    wrong = {r.case for r in rows if (r.expected_ratio or 0) > 3 or r.nonfinite}
    assert wrong == {*entry.check}


@pytest.mark.parametrize("entry", of_family("sound"), ids=lambda entry: entry.name)
@pytest.mark.one_in(13)
def test_a_sound_kernel_is_not_accused(entry: Planted) -> None:
    """In both formats and passes, in all default cases of several tiles or of heads in
    groups, and where a step would overflow."""
    cases = ("grouped", "cross", "padding", "tied-maxima", "high-scores", "large-values")
    result = check(entry.kernel, cases=cases, formats=entry.formats)
    assert [f.sentence for f in result.report.findings if f.severity == "exceeded"] == []
    assert {r.format for r in result.report.rows if r.rms} == {*entry.formats}


def test_the_function_that_faults_are_planted_in_passes_where_they_show() -> None:
    """In each default case that a fault of it is caught by."""
    cases = {case for entry in CAUGHT for case in entry.check} - {"default"}
    check_attention(planted.sound_by_autograd, cases=sorted(cases), formats="bfloat16")


def test_names_are_unique_and_of_one_form() -> None:
    """And each is a kernel that a command finds, of the function that it is."""
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), name
        assert entry.what.strip(), name
        if callable(entry.function):
            assert getattr(planted, entry.attribute) is entry.function
            assert entry.function.__module__ == "planted"
    assert find("planted:scale_off").name == "planted:scale_off"
    with pytest.raises(AttributeError):
        getattr(planted, "scale-off")
    for name, family in (("sound", "sound"), ("another", "none")):
        with pytest.raises(ValueError, match="expected a new name"):
            plant(name, family, "No kernel.", lambda q, k, v: q)


def test_every_kernel_and_family_is_used() -> None:
    """By a test here or benchmarks/names.py, or by its name, rule or family in a test,
    benchmark or script."""
    files = [p for folder in ("tests", "benchmarks", "scripts") for p in (ROOT / folder).rglob("*.py")
             if p.parent.name != "planted"]  # fmt: skip
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    words = set(re.findall(r"[\w-]+", text))
    selected = {family for family in FAMILIES if f'of_family("{family}"' in text}
    unused = [
        entry.name
        for entry in CATALOGUE.values()
        if not entry.check
        and not entry.calls
        and (entry.rule is None or f'"{entry.rule}"' not in text)
        and entry.family not in selected
        and not {entry.name, entry.attribute} & words
    ]
    assert unused == []
    assert {entry.family for entry in CATALOGUE.values()} == {*FAMILIES}


def test_the_worst_is_told_where_the_limit_is_0() -> None:
    """Any noise is infinitely many times a limit of 0; the sentence has the largest."""
    entry = CATALOGUE["not-reproducible"]
    report = check(entry.kernel, formats="bfloat16", backward=False).report
    noise = {(r.case, r.head): noise_ratio(r) for r in report.rows if r.role == "kernel"}
    worst = max(noise, key=lambda head: noise[head] or 0.0)
    finding = next(f for f in report.findings if f.rule == "reproducibility")
    assert finding.observed == noise[worst]
    assert f"worst at {worst[0]} head {worst[1]}" in finding.details
