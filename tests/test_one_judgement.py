"""One judgement: whatever the rules, all that shows a verdict shows the same one;
whatever is taken out of a report, or goes by another name, it is passed no more."""

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
from small_reports import KINDS, drawn_rules, reports_of_commands, written_rules
from verdict_runs import called

from numdev.errors import MeasurementError
from numdev.gate.judging import check_system, judged, judgement_of
from numdev.gate.rules import Rules, read_rules
from numdev.metrics.statistics import BIAS_SEQUENCES
from numdev.report import Outcome, Report, Standing, worst, write
from numdev.report.io import with_digest
from numdev.report.renderers import html, terminal
from numdev.report_kinds import kind_of

sys.path.insert(0, str(ROOT / "scripts"))  # where altered_reports finds its neighbour
altered_reports = load("scripts/altered_reports.py")

DRAWS, MANY = range(10), range(10, 110)  # rule files of a kind


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return reports_of_commands(tmp_path_factory.mktemp("reports"))


# --- judged once ----------------------------------------------------------------------


def refused(report: Report, rules: Rules) -> str:
    """Why a run by these rules would measure nothing; empty where it would."""
    try:
        check_system(report.provenance.system, rules)
    except MeasurementError as error:
        return str(error)
    return ""


def agree(kind: str, report: Report, number: int, folder: Path) -> Outcome | None:
    """What a report comes to by the rule file of a number, by run, gate, JSON and JUnit;
    None where the rules hold for another system. Raises AssertionError where two
    differ."""
    content = drawn_rules(kind, random.Random(f"{kind} {number}"))
    file = written_rules(folder, content)
    rules = read_rules(file)
    options = ("--thresholds", file, "--junit", folder / "junit.xml")
    if refusal := refused(report, rules):
        write(report, folder)
        assert called("gate", folder, *options) == (3, "", f"numdev: error: {refusal}\n")
        return None
    done = judged(report, rules)
    write(done, folder)
    code, out, err = called("gate", folder, *options, "--json")
    assert out, err
    verdict = json.loads(out)
    assert verdict["outcome"] == done.outcome, content
    assert code == verdict["exit_code"] == done.outcome.exit_code
    assert verdict["findings"] == [f.model_dump(mode="json") for f in done.findings]
    judgement = judgement_of(done, rules)
    assert verdict["tests"] == [t.model_dump(mode="json") for t in judgement.tests]
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
    """The run's outcome and findings, the gate's exit code, JSON, page and JUnit, by ten
    drawn rule files, which come to more than one outcome."""
    came_to = {agree(kind, reports[kind], number, tmp_path) for number in DRAWS}
    assert len(came_to - {None}) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_every_verdict_is_of_one_judgement_by_a_hundred_rule_files(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    """And all outcomes are among them."""
    came_to = {agree(kind, reports[kind], number, tmp_path) for number in MANY}
    assert came_to >= set(Outcome)


WORDS = re.compile(r"(?<![\w`])(FAIL|NOT JUDGED|CRASHED|PASS)(?![\w`])")
OUTCOMES = {
    "FAIL": "FAIL",
    "CRASHED": "NOT JUDGED",
    "NOT JUDGED": "NOT JUDGED",
    "PASS": "PASS",
}


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
        text = (tmp_path / "report.html").read_text()
        page = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", text, flags=re.DOTALL)
        shown = {"terminal": gravest(out.getvalue()), "page": gravest(page)}
        if set(shown.values()) != {done.outcome.word}:
            wrong[str(content)] = (done.outcome.word, shown)
    assert not wrong


# --- complete -------------------------------------------------------------------------

Place = tuple[str, Any, Any]  # of what kind it is, its container, and its key there

SHOWN = (  # of a row; the default rules judge other numbers
    "source|layer|ran|rows_measured|empty_rows|rel|row_rel|max_ulp|floor_ratio|baseline_ratio|fa_rule"
    "|(from_baseline|precision|low_precision)_rms|flash_vs_(low_)?precision|claim|bits|nulls.*"
    "|bias|bias_sign|bias_feature|bias_of|bias_t|suspicion_(cut|format|share|of.*)|imprecision.*"
    "|suspects|log_perplexity|from_against"
    r"|rms_rows|error_rows|interval\.(?!expected_ratio|rms_ratio).*"
)
# What may be done to which fields, and why no judgement changes by it
CHANGES_NOTHING = {
    r"\.provenance\.(?!source\.).*": (
        "where it was made; rules may ask for it by `holds_for`"
    ),
    r"\.provenance\.source\.(?!.*(read|asked|nonfinite)).*": (
        "what was read, by name and hash"
    ),
    r"\.timings.*": "seconds",
    r"\.rules.*": "by which it was judged first: the gate has its own",
    r"\.request\.(?!formats\b|kernels\b|against\b).*": (
        "how to read; what was measured is planned"
    ),
    r"\.request\.(formats|kernels): (gone|renamed)": "a request may be partial",
    r"\.request\.against: gone": "so too",
    r"\.request\.(kernels|formats)\[\]: twice": (
        "what is asked for twice is measured once"
    ),
    r"\.request\.kernels\[\]\.options.*": "the plan has them, completed by the kernel",
    r"\.plan\.repeats: gone": "it excuses a noise that lacks, and none does",
    r"\.plan\.named: gone": "it tells what may be declined, and nothing was",
    r"\.(tokens|weights|profiles|cells|figures|attributions)\b.*": (
        "shown, or for scripts"
    ),
    r"\.cases\[\]\.(source_format|grad_out|threads|axes).*": "shown",
    r"\.checks\[\]\.reason: .*": "words",
    r"\.rows\[(precision|control)( of few)?\]\.reason: renamed": (
        "so too, of what nobody judges"
    ),
    rf"\.rows\[kernel( of few)?\]\.({SHOWN}): .*": "shown",
    r"\.rows\[kernel of few\]\.(bias_p|bias_size).*": (
        "of gradients, and of few sequences"
    ),
    r"\.rows\[(floor|baseline|precision|control)( of few)?\]\..*: gone": "nobody judges them",
    (
        r"\.rows\[(floor|baseline|precision|control)( of "
        rf"few)?\]\.({SHOWN}|interval.*): .*"
    ): "so too",
    r"\.rows\[(?!whole|repeat|moved)\w+\]\.unexplained: gone": (
        "flips of the whole are judged"
    ),
    rf"\.rows\[\w+\]\.({SHOWN}): .*": "shown",
}


def places(data: Any, pattern: str = "") -> list[Place]:
    """Every field and every element of a list, by a pattern without numbers; of rows with
    their role, or the kind of their run."""
    alterable: list[Place] = []
    if isinstance(data, dict):
        for key, value in data.items():
            alterable += [
                (f"{pattern}.{key}", data, key),
                *places(value, f"{pattern}.{key}"),
            ]
    elif isinstance(data, list):
        for number, value in enumerate(data):
            of = f"{pattern}[{_what(value) if pattern == '.rows' else ''}]"
            alterable += [(of, data, number), *places(value, of)]
    return alterable


def _what(row: dict[str, Any]) -> str:
    """Its role or kind; of few, where no bias of it is judged."""
    few = "role" in row and "sequences" in row
    few = few and (row["tensor"] != "out" or (row["sequences"] or 0) < BIAS_SEQUENCES)
    return str(row.get("kind") or row.get("role")) + " of few" * few


def alter(place: Place, how: str) -> bool:
    """Whether it could be done there: `gone`, `twice`, or `renamed`, by its key or its
    text."""
    _, container, key = place
    value = container[key]
    if how == "gone":
        del container[key]
    elif how == "twice" and isinstance(container, list):
        container.insert(key, value)
    elif how == "renamed" and isinstance(value, str):
        container[key] = f"{value}x"
    elif how == "renamed" and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    else:
        return False
    return True


def no_pass(report: Report, rng: random.Random, folder: Path) -> str:
    """What was altered where, in a report that passes all the same; empty where it does
    not, where the alteration changes nothing that is read, or no judgement."""
    data = json.loads(report.model_dump_json())
    every = places(data)
    pattern = rng.choice(sorted({place[0] for place in every}))
    place = rng.choice([each for each in every if each[0] == pattern])
    how = rng.choice(("gone", "twice", "renamed"))
    name = f"{pattern}: {how}"
    if place[2] == "noise" and place[1].get("tensor") == "lse":
        return ""  # shown: no rule asks that a log-sum-exp repeats
    if not alter(place, how) or any(
        re.fullmatch(harmless, name) for harmless in CHANGES_NOTHING
    ):
        return ""
    if rng.random() < 0.5:
        data = altered_reports.concluded_again(data)
    with contextlib.suppress(ValueError):
        read_again = kind_of(report.kind).report.model_validate_json(
            json.dumps(data), strict=True
        )
        if read_again == report:
            return ""
    (folder / "report.json").write_bytes(with_digest(json.dumps(data).encode()))
    code, out, err = called("gate", folder)
    broke = "a bug of numdev" in err or (not out and err.count("\n") != 1)
    return f"{name}: exit code {code} {err}" if broke or code not in (1, 3) else ""


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_taken_out_or_renamed_is_no_pass(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    """Any field, row or other record of a report that passes, gone, there twice, or by
    another name; sealed again, as it is or with the conclusions that follow."""
    rng = random.Random(kind)
    passed = dict.fromkeys(no_pass(reports[kind], rng, tmp_path) for _ in range(50))
    assert [*filter(None, passed)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_of_two_thousand_is_taken_out_or_renamed_is_no_pass(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    rng = random.Random(f"many of {kind}")
    passed = dict.fromkeys(no_pass(reports[kind], rng, tmp_path) for _ in range(2000))
    assert [*filter(None, passed)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_alterations_reach_what_is_judged(
    kind: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    """Rows, plan and their names are altered, which no line of the table excuses; a
    report that is not altered passes."""
    data = json.loads(reports[kind].model_dump_json())
    patterns = {pattern for pattern, *_ in places(data)}
    for pattern in (
        f".rows[{_what(data['rows'][0])}].format",
        ".plan.kernels[]",
        ".plan.formats[]",
    ):
        assert pattern in patterns
        for how in ("twice", "renamed"):
            assert not any(
                re.fullmatch(harmless, f"{pattern}: {how}")
                for harmless in CHANGES_NOTHING
            )
    (tmp_path / "report.json").write_bytes(with_digest(json.dumps(data).encode()))
    assert called("gate", tmp_path)[0] == 0


# --- closed ---------------------------------------------------------------------------


def test_only_what_held_passes() -> None:
    """Of all outcomes one ends with 0 and is called PASS, and any other is graver, so
    that it stands before PASSED; of all standings only HELD comes to it. The page on the
    gate has each with its exit code."""
    assert [x for x in Outcome if x.exit_code == 0] == [Outcome.PASSED]
    assert [x for x in Outcome if x.word == "PASS"] == [Outcome.PASSED]
    assert all(worst([Outcome.PASSED, x]) is x for x in Outcome)
    assert [x for x in Standing if x.outcome is Outcome.PASSED] == [Standing.HELD]
    page = (ROOT / "docs/gate.md").read_text()
    assert [x for x in Outcome if f"`{x.value}` {x.exit_code}" not in page] == []


@pytest.mark.thorough
def test_a_new_outcome_is_an_error_of_types_wherever_one_decides(tmp_path: Path) -> None:
    """mypy, with a member more in `Outcome`: an error at every `assert_never` that
    decides by one; as it is, none."""
    outcomes = "numdev/report/records/judgement_outcomes.py"
    text = (ROOT / outcomes).read_text()
    last = '    PASSED = "passed"\n'
    assert text.count(last) == 1
    shadow = tmp_path / "outcomes.py"
    python = [
        path
        for path in (ROOT / "numdev").rglob("*.py")
        if "assert_never" in path.read_text()
    ]
    files = {
        *python,
        ROOT / "numdev/report/__init__.py",
        *(ROOT / outcomes).parent.glob("*.py"),
    }
    counts = []
    for more in ("", '    NEWEST = "newest"\n'):
        shadow.write_text(text.replace(last, last + more))
        command = (
            sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "--follow-imports",
            "skip", "--shadow-file", outcomes, shadow, *sorted(files),
        )  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert "Found" in done.stdout or "Success" in done.stdout, (
            done.stdout + done.stderr
        )
        counts.append(
            sum('to "assert_never"' in line for line in done.stdout.splitlines())
        )
    assert counts[0] == 0
    assert counts[1] >= 5
