"""Files of thresholds fitted to a report: the same report passes, planted faults do
not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run
from gate_rows import control, lse, report, row

from numdev.errors import MeasurementError, UsageError
from numdev.gate import fitting, judging
from numdev.gate.fitting import fitted_thresholds, rounded_up
from numdev.gate.judging import judge_report
from numdev.gate.rules import Rules, default_rules
from numdev.report import AuditReport, DeviationRow, FunctionReport, write
from numdev.studies.audit import explanations


def read(text: str) -> Rules:
    return Rules.model_validate(yaml.safe_load(text))


def audited(*rows: DeviationRow) -> AuditReport:
    """Two kernels of eight heads, in two formats, and planted faults."""
    draw = random.Random(1)
    heads = [
        row(h, kernel=kernel, format=fmt, expected_ratio=draw.uniform(0.97, 1.03) * worse,
            worst_row=draw.uniform(1, 1.5))
        for kernel, worse in (("a", 1.0), ("b", 1.4))
        for fmt in ("bfloat16", "float16")
        for h in range(8)
    ]  # fmt: skip
    faults = [
        control("scale", d, 1 + 100 * d * (h < 2), head=h, format=fmt)
        for d in (0.001, 0.003, 0.01)
        for h in range(8)
        for fmt in ("bfloat16", "float16")
    ]
    return report(*heads, *(lse(h, kernel="a") for h in range(8)), *faults, *rows)


def test_the_same_report_passes_and_its_planted_faults_do_not() -> None:
    """1.3 and 2 are beyond 1.03 x 1.1 = 1.2 (rounded up), 1.1 is not."""
    result = audited()
    text = fitted_thresholds(result, "r")
    rules = read(text)
    judged = judge_report(result, rules)
    assert (judged.exit_code, {p.caught_from for p in judged.power}) == (0, {0.003})


def test_limits_are_what_was_measured_times_the_margin() -> None:
    """b errs 1.4 times as much and has its own limit; ten per cent beyond each limit is
    caught."""
    result = audited()
    rules = read(fitted_thresholds(result, "r"))
    (error,) = (t for t in rules.thresholds if t.name == "error")
    for kernel in "ab":
        of = [r for r in result.rows if r.kernel == kernel and r.tensor == "out"]
        for fmt in ("bfloat16", "float16"):
            these = [r for r in of if r.format == fmt]
            worst = max(r.expected_ratio or 0.0 for r in these)
            limit = error.for_row(these[0]).at_most or 0.0
            assert worst <= limit <= max(1.1, 1.1 * worst + 0.1)
            beyond = these[0].model_copy(update={"expected_ratio": 1.1 * limit})
            rows = tuple(beyond if r is these[0] else r for r in result.rows)
            assert (
                judging.judgement_of(
                    result.model_copy(update={"rows": rows}), rules
                ).exit_code
                == 1
            )


@pytest.mark.parametrize("seed", range(15))
def test_any_report_that_can_be_fitted_passes_its_own_file(seed: int) -> None:
    """Random numbers, some sampled or exact."""
    draw = random.Random(seed)
    rows = []
    heads = draw.choice((1, 8))
    for group in range(draw.randint(1, 6)):
        some = draw.random() < 0.3
        for h in range(heads):
            rms, size = draw.choice((0.0, 1.0)), 10 ** draw.uniform(-8, 3)
            interval = {"expected_ratio": (size / 2, size * 2), "rms_ratio": (1.0, 1.0),
                        "rms": (rms * size / 2, rms * size * 2)}  # fmt: skip
            sampled = (
                {"sampled": True, "interval": interval, "worst_row": 1.0} if some else {}
            )
            numbers = {"expected_ratio": size, "worst_row": size, "rms": rms * size,
                       "noise": rms * draw.choice((0, size)), "bias_size": 0.0, "max_abs": size,
                       "mean_abs": 0.0}  # fmt: skip
            rows.append(row(h, kernel=f"k{group}", **{**numbers, **sampled}))
    result = report(*rows)
    assert judge_report(result, read(fitted_thresholds(result, "r"))).exit_code == 0


def test_a_kernel_that_is_wrong_outright_sets_no_standard() -> None:
    """NaN, or another function: no file, and which kernel it is."""
    for wrong in (
        {"nonfinite": 3},
        {"suspicion": "the mask is ignored", "suspicion_cut": 20.0},
    ):
        with pytest.raises(MeasurementError, match="mine breaks the rule"):
            fitted_thresholds(report(row(**wrong)), "r")
    for rows in (
        [],
        [row(None, status="skipped", reason="x")],
        [control("scale", 1, 1.0)],
    ):
        with pytest.raises(MeasurementError, match="no kernel under audit"):
            fitted_thresholds(report(*rows), "r")
    with pytest.raises(MeasurementError, match="something was not measured"):
        fitted_thresholds(
            report(row(), row(None, case="d", status="failed", reason="x")), "r"
        )


def test_a_function_beside_its_reference_sets_no_standard() -> None:
    """The limits are of attention: of a function they would hold nothing."""
    of_function = FunctionReport(**vars(report(row())) | {"kind": "function"})
    with pytest.raises(
        UsageError, match="expected the report of an audit or a sweep, got"
    ):
        fitted_thresholds(of_function, "r")


HOSTILE = ("a: b", "- x", "{y}", "*", "no", "!x", "1e5", "'\"#", "a\nb", "\u2028\x85\x00",
           "\U0001f600")  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_elsewhere_stay_names(name: str) -> None:
    """YAML's own signs, patterns and line breaks in the names of kernels and of the
    report."""
    gradients = [
        row(kernel=kernel, tensor=tensor, expected_ratio=9.0)
        for kernel in (name, "z")
        for tensor in ("dq", "dk", "dv")
    ]
    result = report(row(kernel=name), row(kernel="z", expected_ratio=2.0), *gradients)
    text = fitted_thresholds(result, name)
    rules = read(text)
    assert len(rules.required) == 2
    assert judge_report(result, rules).exit_code == 0


def test_all_options_of_a_kernel_share_the_widest_limit() -> None:
    """Whichever comes last in the report."""
    rows = (
        row(options={"b": b}, expected_ratio=x) for b, x in enumerate((1.0, 1.4, 1.0))
    )
    result = report(*rows)
    assert judge_report(result, read(fitted_thresholds(result, "r"))).exit_code == 0


def test_a_limit_is_never_looser_than_the_default_that_a_report_passes() -> None:
    # Luck: it passes at 1.1
    rows = [row(h, expected_ratio=1.3, elements=64) for h in range(2)]
    (error,) = (
        t
        for t in read(fitted_thresholds(report(*rows), "r")).thresholds
        if t.name == "error"
    )
    assert error.for_row(rows[0]).at_most == 1.1


def test_default_rules_are_found_by_what_they_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, rules = fitted_thresholds(audited(), "r"), default_rules()
    named = (
        t.model_copy(update={"name": f"r{n}"}) for n, t in enumerate(rules.thresholds)
    )
    renamed = rules.model_copy(update={"thresholds": tuple(named)})
    for module in (fitting, explanations):
        monkeypatch.setattr(module, "default_rules", lambda: renamed)
    of = [
        [t.instead for t in read(x).thresholds]
        for x in (text, fitted_thresholds(audited(), "r"))
    ]
    assert of[0] == of[1]
    assert explanations.beyond([row(expected_ratio=3.0)]) == ("out",)


def test_rounding_never_goes_down() -> None:
    """Nor by more than a tenth, over all sizes."""
    draw = random.Random(0)
    for _ in range(2000):
        x = 10 ** draw.uniform(-300, 300)
        assert x <= rounded_up(x) <= 1.1 * x


def test_the_command_writes_a_file_and_never_over_one(
    tmp_path: Path, capsys: Any
) -> None:
    """Exit code 2 where there is one, unless --overwrite; the report passes the file."""
    write(audited(), tmp_path)
    path = tmp_path / "t.yaml"
    assert run("gate", "--init", str(tmp_path), "-o", str(path)) == 0
    text = path.read_text()
    path.write_text("mine")
    assert run("gate", str(tmp_path), "--init", "-o", str(path)) == 2
    assert path.read_text() == "mine"
    assert run("gate", str(tmp_path), "--init", "-o", str(path), "--overwrite") == 0
    assert path.read_text() == text
    assert run("gate", str(tmp_path), "--thresholds", str(path)) == 0
    capsys.readouterr()
    for wrong in (["-o", str(path)], ["--overwrite"], ["--init", "--json"]):
        assert run("gate", str(tmp_path), *wrong) == 2
