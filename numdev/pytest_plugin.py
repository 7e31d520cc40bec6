"""The pytest plugin: the fixture `attention_check` and the marker `numdev_cases`. Loaded
with every pytest run where numdev is installed, so it imports nothing but pytest until a
test asks for it.

    def test_my_flash(attention_check):
        attention_check(my_flash)

    @pytest.mark.numdev_cases("causal", "ties")
    def test_my_flash_on(attention_check, numdev_case):
        attention_check(my_flash, cases=numdev_case)"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from numdev.testing import CheckResult

CASE = "numdev_case"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options --numdev-thresholds and --numdev-report."""
    group = parser.getgroup("numdev", "numeric deviation of attention kernels")
    rules = "gate file that attention_check judges by, unless a test gives thresholds"
    group.addoption("--numdev-thresholds", metavar="FILE", type=Path, help=rules)
    reports = (
        "write the report of every attention_check into a folder of DIR, "
        "named by its test"
    )
    group.addoption("--numdev-report", metavar="DIR", type=Path, help=reports)


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker `numdev_cases`. Raises pytest's UsageError where the reports of
    --numdev-report cannot be written there."""
    if (directory := config.getoption("--numdev-report")) is not None:
        from numdev.errors import UsageError
        from numdev.report.io import expect_directory

        try:
            expect_directory(directory, "--numdev-report")
        except UsageError as error:
            raise pytest.UsageError(str(error)) from error
    config.addinivalue_line(
        "markers",
        "numdev_cases(*cases): run the test once for each case, given as "
        "`numdev_case`: names from "
        "numdev's default set, input regimes, files, or mappings",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes one test for each case of the marker `numdev_cases`, or where it names none,
    or there is none, of the default set, of a test function that takes the argument
    `numdev_case`. The marker's values are passed on unchecked. Other test functions are
    left alone. Fails the collection where the marker has arguments by name."""
    if CASE not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("numdev_cases")
    if marker and marker.kwargs:
        where, keywords = metafunc.definition.nodeid, ", ".join(marker.kwargs)
        what = f"expected cases without names, got {keywords}"
        pytest.fail(f"numdev_cases of {where}: {what}", pytrace=False)
    cases: list[object] = list(marker.args) if marker else []
    if not cases:
        from numdev.studies.audit.kernel_check import default_cases

        cases = [case.name for case in default_cases()]
    names = (case.get("name") if isinstance(case, dict) else case for case in cases)
    ids = [
        str(x) if isinstance(x, str | Path) else f"case{i}" for i, x in enumerate(names)
    ]
    metafunc.parametrize(CASE, cases, ids=ids)


@pytest.fixture
def attention_check(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., CheckResult]:
    """Returns a function like `numdev.check_attention`. Its defaults: reproducers in the
    test's temporary directory, the gate file of --numdev-thresholds. With --numdev-report
    it also writes the report."""

    def check(function: Callable[..., object], **options: Any) -> CheckResult:
        """Returns the result of the check of a function. Raises CheckFailed unless it
        passed, and what `numdev.check` raises. `options`: those of `numdev.check`."""
        __tracebackhide__ = True
        from numdev.testing import CheckFailed
        from numdev.testing import check as checked

        options.setdefault("reproducers", tmp_path / "numdev")
        if options.get("thresholds") is None:
            options["thresholds"] = request.config.getoption("--numdev-thresholds")
        result = checked(function, **options)
        _write_report(result, request)
        if not result.passed:
            raise CheckFailed(result)
        return result

    return check


def _write_report(result: CheckResult, request: pytest.FixtureRequest) -> None:
    """Writes a check's report into a new folder in that of --numdev-report, which is
    made: the test's id, with `-` for odd characters, and a number (`test_a.py-test_x-1`).
    Writes nothing without that option."""
    parent = request.config.getoption("--numdev-report")
    if parent is None:
        return
    from numdev import report
    from numdev.report.renderers import html

    parent.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", request.node.nodeid)
    folder = (
        parent
        / f"{stem}-{sum(path.name.startswith(stem) for path in parent.iterdir()) + 1}"
    )
    folder.mkdir()
    report.write(result.report, folder)
    html.write(result.report, folder)
