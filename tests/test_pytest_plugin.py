"""The pytest plugin: its fixture, marker and options, in test-suites of their own; and
that it costs nothing where it is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from numdev import report, testing
from numdev.kernels.baseline import baseline
from numdev.report.renderers import html
from numdev.testing import CheckFailed, check_attention

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent

KERNELS = """
from torch.nn.functional import scaled_dot_product_attention


def plain(q, k, v, is_causal=False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def half(q, k, v, is_causal=False):
    return plain(q, k, v, is_causal) / 2
"""
OPTIONS = 'formats="float16", backward=False'


@pytest.fixture(scope="module")
def warm() -> None:
    """What an inner test-suite in this process imports first is forgotten after it, and
    torch, numpy and scipy cannot be imported twice: so all of it is imported here."""
    with pytest.raises(CheckFailed) as caught:
        check_attention(
            lambda case: 2 * baseline(case).out, cases=["decode", "tied-maxima"]
        )
    html.page(caught.value.result.report)


@pytest.fixture
def suite(warm: None, pytester: pytest.Pytester, monkeypatch: Any) -> pytest.Pytester:
    """A test-suite beside a module of kernels, run under strict markers."""
    monkeypatch.setattr(testing, "SECONDS", 0.2)
    pytester.makepyfile(kernels_of_mine=KERNELS)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider")
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_inprocess("-p", "numdev.pytest_plugin", *arguments)


@pytest.mark.slow
def test_the_fixture_checks(suite: pytest.Pytester) -> None:
    """A sound kernel passes; a wrong one fails with the message, and is named in pytest's
    own summary; its script is in the test's directory."""
    suite.makepyfile(
        f"""
        from kernels_of_mine import half, plain

        def test_sound(attention_check):
            result = attention_check(plain, cases=["full", "causal"], {OPTIONS})
            assert result.judgement.outcome == "passed"

        def test_wrong(attention_check):
            attention_check(half, cases="full", {OPTIONS})
        """
    )
    result = run(suite, "-v")
    result.assert_outcomes(passed=1, failed=1)
    for line in (
        "E *kernels_of_mine:half fails *`function`*",
        (
            "E *python "
            "*/test_wrong0/numdev/kernels_of_mine-half-*/reproducers/*/reproduce.py"
        ),
        "FAILED *::test_wrong - numdev.testing.CheckFailed: *",
    ):
        result.stdout.fnmatch_lines(line)


def test_the_marker_gives_cases(suite: pytest.Pytester) -> None:
    """One test for each case it names; without any, for each default one; mappings by
    name."""
    suite.makepyfile(
        f"""
        import pytest
        from kernels_of_mine import plain

        @pytest.mark.numdev_cases("decode", {{"name": "short", "seq_len": 5}})
        def test_some(attention_check, numdev_case):
            attention_check(plain, cases=numdev_case, {OPTIONS})

        def test_each(numdev_case):
            assert isinstance(numdev_case, str)
        """
    )
    result = run(suite, "-v")
    result.stdout.fnmatch_lines(
        ["*::test_some[[]decode[]] PASSED*", "*::test_some[[]short[]] *"]
    )
    result.stdout.fnmatch_lines(
        ["*::test_each[[]full[]] *", "*::test_each[[]tied-maxima[]] *"]
    )


def test_the_marker_takes_no_case_by_name(suite: pytest.Pytester) -> None:
    """All default cases would run in place of those that were named."""
    suite.makepyfile(
        """
        import pytest

        @pytest.mark.numdev_cases(cases=["full"])
        def test_some(numdev_case):
            pass
        """
    )
    result = run(suite)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_some: expected cases without names, got cases"])


def test_thresholds_and_reports_by_option(suite: pytest.Pytester) -> None:
    """The gate file of the command line holds for a test that gives none; every check
    leaves a report that can be read, in a folder of its own."""
    suite.makepyfile(
        f"""
        from kernels_of_mine import plain

        def test_it(attention_check):
            attention_check(plain, cases="decode", thresholds=dict(OWN), {OPTIONS})
            attention_check(plain, cases="decode", {OPTIONS})

        OWN = {{"thresholds": [{{"name": "finite", "metric": "nonfinite", "at_most": 0}}]}}
        """
    )
    tight = (
        "name: nightly\nthresholds: [{name: tight, metric: floor_ratio, at_most: 0.1}]"
    )
    (suite.path / "tight.yaml").write_text(tight)
    result = run(suite, "--numdev-thresholds=tight.yaml", "--numdev-report=kept")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *fails `tight` (rules nightly)*"])
    folders = sorted((suite.path / "kept").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert report.read(folder).request["target"] == "kernels_of_mine:plain"
        assert (folder / "report.html").exists()


def test_a_file_for_reports_is_refused_at_the_beginning(suite: pytest.Pytester) -> None:
    result = run(suite, "--numdev-report=kernels_of_mine.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: kernels_of_mine.py: expected a directory for the results, got a file; "
         "choose another --numdev-report"]
    )  # fmt: skip


@pytest.mark.slow
def test_it_imports_nothing_for_others(suite: pytest.Pytester) -> None:
    """A run that uses none of it imports no torch, pydantic or yaml, and says nothing."""
    suite.makepyfile(
        """
        import sys

        def test_it():
            for name in ("torch", "pydantic", "numpy", "numdev.testing", "numdev.request_models"):
                assert name not in sys.modules
        """
    )
    result = suite.runpytest_subprocess("-p", "numdev.pytest_plugin")
    result.assert_outcomes(passed=1)
    assert {x.partition(":")[0] for x in result.outlines if "numdev" in x} <= {"plugins"}


def test_it_may_be_named_twice(suite: pytest.Pytester) -> None:
    """Its entry point has the module's own name, so that `-p` beside it loads it once."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {
        "numdev.pytest_plugin": "numdev.pytest_plugin"
    }
    suite.makepyfile("def test_it(): pass")
    run(suite, "-p", "numdev.pytest_plugin").assert_outcomes(passed=1)


@pytest.mark.slow
def test_the_page_is_true(suite: pytest.Pytester) -> None:
    """The test-suite of docs/api.md does what the page says."""
    text = (ROOT / "docs" / "api.md").read_text()
    suite.makepyfile(test_mine=text.split("```python\n")[1].split("```")[0])
    result = run(suite)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines("E *test_mine:my_attention fails `function`*")
    result.stdout.fnmatch_lines("E *is wrong: the causal mask is*")
