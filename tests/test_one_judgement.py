"""One judgement: whatever the rules, all that shows a verdict shows the same one; whatever is taken
out of a report, or goes by another name, it is passed no more."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from loaded import ROOT, load
from small_reports import KINDS, drawn_rules, made, written_rules
from verdict_runs import called

from numdev.errors import MeasurementError
from numdev.gate.judging import check_system, judged, judgement_of
from numdev.gate.rules import read_rules
from numdev.report import Outcome, Report, write
from numdev.report.io import sealed
from numdev.report.renderers import html, terminal
from numdev.studies import judged_by, kind_of

sys.path.insert(0, str(ROOT / "scripts"))  # where altered_reports finds its neighbour
altered_reports = load("scripts/altered_reports.py")

DRAWS, MANY = range(25), range(25, 125)  # rule files of a kind


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return made(tmp_path_factory.mktemp("reports"))


# --- judged once ----------------------------------------------------------------------------------


def agree(kind: str, report: Report, number: int, folder: Path) -> Outcome | None:
    """What a report comes to by the rule file of a number, by run, gate, JSON and JUnit; None where
    the rules hold for another system. Raises AssertionError where two differ."""
    content = drawn_rules(kind, random.Random(f"{kind} {number}"))
    file = written_rules(folder, content)
    rules = read_rules(file)
    options = ("--thresholds", file, "--junit", folder / "junit.xml")
    try:
        check_system(report.provenance.system, rules)
    except MeasurementError as error:
        write(report, folder)
        assert called("gate", folder, *options) == (3, "", f"numdev: error: {error}\n")
        return None
    done = judged(report, rules)
    write(done, folder)
    code, out, err = called("gate", folder, *options, "--json")
    assert out, err
    verdict = json.loads(out)
    assert verdict["outcome"] == done.outcome, content
    assert code == verdict["exit_code"] == done.outcome.exit_code
    assert verdict["findings"] == [f.model_dump(mode="json") for f in done.findings]
    own = judgement_of(done, rules)
    assert verdict["tests"] == [t.model_dump(mode="json") for t in own.tests]
    root = ElementTree.parse(folder / "junit.xml").getroot()
    failures, errors = (int(root.get(name, "")) for name in ("failures", "errors"))
    assert (failures > 0) == (done.outcome is Outcome.EXCEEDED)
    assert (failures + errors > 0) == (code != 0)
    shown = called("gate", folder, *options)
    assert shown[0] == code
    assert f"{done.outcome.word} by the" in shown[1]
    return done.outcome


@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_of_one_judgement(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    """The run's outcome and findings, the gate's exit code, JSON, page and JUnit, by 25 drawn rule
    files, which come to more than one outcome."""
    came_to = {agree(kind, reports[kind], number, tmp_path) for number in DRAWS}
    assert len(came_to - {None}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_of_one_judgement_by_a_hundred_rule_files(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    """And all outcomes are among them."""
    came_to = {agree(kind, reports[kind], number, tmp_path) for number in MANY}
    assert came_to >= set(Outcome)


WORDS = re.compile(r"(?<![\w`])(FAIL|NOT JUDGED|CRASHED|PASS)(?![\w`])")
OUTCOMES = {"FAIL": "FAIL", "CRASHED": "NOT JUDGED", "NOT JUDGED": "NOT JUDGED", "PASS": "PASS"}


def gravest(text: str) -> str:
    """The gravest verdict that a text shows; of none, nothing."""
    shown = {OUTCOMES[word] for word in WORDS.findall(text)}
    return next((word for word in ("FAIL", "NOT JUDGED", "PASS") if word in shown), "")


@pytest.mark.parametrize(
    ("text", "word"),
    [("PASS a\nFAIL b", "FAIL"), ("CRASHED a\nPASS b", "NOT JUDGED"), ("PASS a", "PASS"), ("", ""),
     ("rule `PASS`, PASSED", "")],
)  # fmt: skip
def test_the_gravest_verdict_is_read(text: str, word: str) -> None:
    assert gravest(text) == word


@pytest.mark.parametrize("kind", KINDS)
def test_terminal_and_page_show_the_outcome(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    """The gravest verdict on each is the report's own, by drawn rule files."""
    wrong = {}
    for number in DRAWS:
        content = drawn_rules(kind, random.Random(f"{kind} {number}"))
        content.pop("holds_for", None)
        done = judged(reports[kind], read_rules(written_rules(tmp_path, content)))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            terminal.show(done)
        html.write(done, tmp_path)
        page = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", (tmp_path / "report.html").read_text(),
                      flags=re.DOTALL)  # fmt: skip
        said = {"terminal": gravest(out.getvalue()), "page": gravest(page)}
        if set(said.values()) != {done.outcome.word}:
            wrong[str(content)] = (done.outcome.word, said)
    assert not wrong
