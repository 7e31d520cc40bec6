"""What a tolerance lets through: wrong kernels made from a reference, judged by it and by
numdev's rules."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import function_examples as examples
import pytest
import torch
from click.testing import CliRunner
from loaded import ROOT
from torch import Tensor

from numdev.cli.main import cli
from numdev.errors import UsageError
from numdev.function_check import check_beside
from numdev.operations.function.trees import Arguments
from numdev.operations.function.wrong_kernels import COUNT, wrong_kernels
from numdev.report import FunctionReport, Outcome, TolerancePower, read, write
from numdev.studies.audit import tolerance_power
from numdev.studies.audit.tolerance_power import parsed_tolerance

EXAMPLES = str(examples.__file__)
ONES = [torch.ones(4), torch.ones(4)]


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 256, generator=generator)
    return x.bfloat16(), (1 + 0.2 * torch.randn(256, generator=generator)).bfloat16()


def power_of_report(tolerance: str, **options: object) -> TolerancePower:
    result = check_beside(
        examples.fused, reference=examples.rms_norm, inputs=inputs, power=tolerance,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(result.report, FunctionReport)
    assert result.report.power is not None
    return result.report.power


def passed(power: TolerancePower) -> tuple[set[str], set[str]]:
    kernels = power.formats[0].kernels
    by_tolerance = {k.words for k in kernels if k.tolerance is Outcome.PASSED}
    return by_tolerance, {k.words for k in kernels if k.rules is Outcome.PASSED}


@pytest.mark.parametrize("backward", [False, True])
def test_a_tolerance_passes_what_the_rules_do_not(backward: bool) -> None:
    by_tolerance, by_rules = passed(power_of_report("2e-2", backward=backward))
    assert by_tolerance == {"it is scaled by 1.01"}
    assert by_rules == set()


@pytest.mark.slow
def test_a_wide_tolerance_passes_everything_small_and_a_narrow_one_nothing() -> None:
    assert len(passed(power_of_report("1e3"))[0]) == COUNT
    assert passed(power_of_report("0"))[0] == set()
    assert passed(power_of_report("0,1e3"))[0] == passed(power_of_report("1e3"))[0]


def test_fourteen_kernels_are_wrong_and_named_apart() -> None:
    kernels = wrong_kernels(Arguments(positional=inputs(0), names=("x", "w")))
    assert len({kernel.words for kernel in kernels}) == COUNT == len(kernels)


def test_a_tolerance_passes_what_keeps_it_in_every_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tolerance_power, "_outcome", lambda *_: Outcome.EXCEEDED)
    draws = [SimpleNamespace(plain=SimpleNamespace(outputs={"o": x})) for x in ONES]
    call = SimpleNamespace(draws=draws, others=draws)
    for errors, outcome in (((0.01, 0.01), "PASSED"), ((0.01, 2.0), "EXCEEDED")):
        results = iter([{"o": x + error} for x, error in zip(ONES, errors, strict=True)])
        kernel: Any = SimpleNamespace(words="w", outputs=lambda *_, r=results: next(r))
        judge: Any = tolerance_power._judged
        record = judge(kernel, call, "float32", (0.0, 0.1), None)
        assert record.tolerance is Outcome[outcome]


def test_what_returns_the_references_bits_is_not_counted() -> None:
    """A weight of 1 is 1."""
    result = check_beside(
        examples.fused, reference=examples.rms_norm, inputs=examples.inputs, power="1e-2"
    )
    assert result.notes[0] == (
        "The tolerance 0.01 passes 1 of 13 wrong kernels on these inputs; numdev 0 "
        "(bfloat16)."
    )
    assert isinstance(result.report, FunctionReport)
    assert result.report.power is not None
    [one] = [k for k in result.report.power.formats[0].kernels if k.tolerance is None]
    assert (one.words, one.reason) == (
        "w is taken for 1",
        "it returns what the reference returns",
    )


@pytest.mark.slow
def test_a_scalar_is_judged_over_its_draws() -> None:
    result = check_beside(
        examples.loss, reference=examples.loss, inputs=examples.loss_inputs, power="5e-2"
    )
    assert isinstance(result.report, FunctionReport)
    assert result.report.power is not None
    by_tolerance, by_rules = passed(result.report.power)
    assert "it is scaled by 1.01" in by_tolerance
    assert "it is one half of it" not in by_tolerance | by_rules


@pytest.mark.parametrize("text", ["", "a", "1,2,3", "-1", "nan", "1e-2,"])
def test_no_tolerance_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="power: expected a tolerance"):
        parsed_tolerance(text)


def test_both_parts_of_a_tolerance() -> None:
    assert parsed_tolerance("1e-2") == (0.01, 0.01)
    assert parsed_tolerance("1e-3,1e-5") == (0.001, 1e-05)


@pytest.mark.slow
def test_terminal_page_and_json_have_the_table(tmp_path: Path) -> None:
    command = ["check", f"{EXAMPLES}:fused", "--reference", f"{EXAMPLES}:rms_norm",
               "--inputs", f"{EXAMPLES}:inputs", "--power", "1e-2"]  # fmt: skip
    shown = CliRunner().invoke(cli, command, standalone_mode=False).output
    words = "The tolerance 0.01 passes 1 of 13 wrong kernels on these inputs; numdev 0"
    assert words in " ".join(shown.split())
    assert "Wrong kernels, bfloat16, seed 0" in shown
    folder = ["--json", "-o", str(tmp_path / "o")]
    data = json.loads(
        CliRunner().invoke(cli, command + folder, standalone_mode=False).output
    )
    assert data["notes"][0].startswith(words)
    assert len(data["report"]["power"]["formats"][0]["kernels"]) == COUNT
    report = read(tmp_path / "o")
    (tmp_path / "again").mkdir()
    write(report, tmp_path / "again")
    assert read(tmp_path / "again") == report
    page = (tmp_path / "o" / "report.html").read_text()
    assert "its rows are shifted by one" in page


def test_a_problem_has_a_power_too() -> None:
    folder = ROOT / "examples" / "problem"
    command = ["check", str(folder / "solution.py"), "--problem",
               str(folder / "problem.py"), "--power", "1e-2", "--json"]  # fmt: skip
    data = json.loads(CliRunner().invoke(cli, command, standalone_mode=False).output)
    assert data["notes"][0].startswith("The tolerance 0.01 passes ")


def test_power_needs_a_reference() -> None:
    with pytest.raises(UsageError, match="--power needs a --reference"):
        CliRunner().invoke(
            cli, ["check", f"{EXAMPLES}:fused", "--power", "1"],
            standalone_mode=False, catch_exceptions=False,
        )  # fmt: skip
