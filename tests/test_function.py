"""A check of any function beside its reference: sound ones pass, faulty ones do not, and
what cannot be judged is no pass."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import function_examples as examples
import pytest
import torch
from click.testing import CliRunner
from loaded import ROOT
from safetensors.torch import save_file
from torch import Tensor

import numdev
from numdev.cli.main import cli
from numdev.errors import MeasurementError, UsageError
from numdev.formats import FORMATS, round_to
from numdev.function_check import check_problem, takes_one
from numdev.gate.compare import compare
from numdev.gate.judging import judge_report
from numdev.gate.rules import Threshold, default_rules_for_functions
from numdev.operations.function.causes import causes_of
from numdev.operations.function.problem_files import module_of, on_device
from numdev.operations.function.process import FunctionProcess, Work
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Arguments
from numdev.report import FunctionReport, Outcome, read, write
from numdev.report.document import Table
from numdev.report.number_text import three
from numdev.studies.audit import function_reports
from numdev.studies.audit.functions import served
from numdev.testing import CheckFailed, CheckResult, check_function, match

EXAMPLES = Path(examples.__file__)


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    examples.REUSED.clear()
    yield
    examples.REUSED.clear()


def checked(function: Callable[..., object], **options: object) -> CheckResult:
    same = {"reference": examples.rms_norm, "inputs": examples.inputs}
    return numdev.check(function, **{**same, **options})  # type: ignore[arg-type]


def rules_broken(result: CheckResult) -> set[str]:
    exceeded = (t for t in result.judgement.tests if t.standing == "exceeded")
    return {test.rule for test in exceeded}


@pytest.mark.parametrize("name", ["rms_norm", "fused", "split"])
@pytest.mark.parametrize("backward", [False, True])
def test_sound_functions_pass(name: str, backward: bool) -> None:
    result = checked(getattr(examples, name), backward=backward)
    assert result.passed, str(result)
    tensors = {row.tensor for row in result.report.rows if row.role == "kernel"}
    assert tensors == ({"output", "x_grad", "w_grad"} if backward else {"output"})


def test_what_is_rounded_once_is_as_exact_as_the_format_allows() -> None:
    verdict = checked(examples.fused).report.verdicts[0]
    assert (verdict.reason or "").startswith("as exact as the format allows; ")
    verdict = checked(examples.rms_norm).report.verdicts[0]
    assert (verdict.reason or "").startswith("as the reference; ")


@pytest.mark.slow
def test_what_passes_in_one_format_is_told_by_the_numbers_of_that_format() -> None:
    """In float32, where it fails, its error is hundreds of times what is explained."""

    def other_eps(x: Tensor, w: Tensor) -> Tensor:
        return examples.rms_norm(x, w, 1e-4)

    result = checked(other_eps, formats=["float32", "bfloat16"])
    verdicts = {verdict.format: verdict for verdict in result.report.verdicts}
    assert verdicts["float32"].outcome is Outcome.EXCEEDED
    assert verdicts["bfloat16"].outcome is Outcome.PASSED
    ratios = [
        row.beside_reference.reference_ratio
        for row in result.report.rows
        if row.role == "kernel" and row.format == "bfloat16" and row.beside_reference
    ]
    largest = three(max(x for x in ratios if x is not None))
    assert f"rms error up to {largest}× explained" in (verdicts["bfloat16"].reason or "")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("other_eps", "error"),
        ("scaled", "slope"),
        ("shifted", "shift"),
        ("cut", "error"),
        ("without_weight", "error"),
        ("stale_row", "slice"),
        ("one_nan", "finiteness"),
        ("unwritten", "slice"),
        ("remembered", "error"),
        ("other_shape", "form"),
        ("other_dtype", "form"),
        ("nothing", "form"),
        ("two", "form"),
        ("writes", "form"),
        ("alias", "form"),
        ("reused", "form"),
        ("column_major", "form"),
    ],
)
def test_faulty_functions_fail_by_a_rule(name: str, rule: str) -> None:
    result = checked(getattr(examples, name))
    assert result.verdict == "FAIL", str(result)
    broken = rules_broken(result)
    assert rule in broken or (name == "unwritten" and "finiteness" in broken), broken


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other_shape", "it has the shape [1, 32, 256], not [32, 256]"),
        ("other_dtype", "it is float32, not bfloat16"),
        ("nothing", "it is missing; what is returned: None"),
        ("two", "it is missing; what is returned: output_0, output_1"),
        ("writes", "it writes into its inputs (x)"),
        ("alias", "it returns memory of its input x"),
        ("reused", "it writes a later call's result into an earlier one's (output)"),
        ("column_major", "its strides are [1, 32], not [256, 1]: it is not contiguous"),
    ],
)
def test_another_form_is_told_in_words(name: str, words: str) -> None:
    tests = checked(getattr(examples, name)).judgement.tests
    [test] = [t for t in tests if t.rule == "form"]
    assert words in str(test.observed)


@pytest.mark.parametrize("name", ["writes", "writes_after"])
def test_inputs_that_are_written_fail_backward_too(name: str) -> None:
    """Autograd forbids to write into what requires a gradient, which is no reason not to
    judge."""
    result = checked(getattr(examples, name), backward=True)
    assert result.verdict == "FAIL", str(result)
    forms = [t for t in result.judgement.tests if t.rule == "form"]
    assert "it writes into its inputs (x)" in str(forms[0].observed)


def test_what_is_not_written_is_told() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x.mul_(2)

    same = {"reference": doubled, "inputs": examples.top_inputs}
    result = checked(lambda x: x * 2, **same)
    assert result.verdict == "FAIL"
    assert "x: it is not written into, as the reference does" in result.in_short


def test_a_tensor_returned_twice_is_two_outputs() -> None:
    """Both get a gradient back, in the exact run as in PyTorch's."""

    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * x
        return y, y

    def copied(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * x, x * x

    same = {"reference": twice, "inputs": examples.top_inputs}
    assert checked(copied, **same).passed
    result = checked(twice, **same, backward=True)
    assert result.passed, str(result)
    tensors = {r.tensor for r in result.report.rows}
    assert tensors == {"output_0", "output_1", "x_grad"}


def test_a_reference_that_writes_is_followed_backward() -> None:
    def doubled(x: Tensor) -> Tensor:
        x.mul_(2)
        return x * x

    same = {"reference": doubled, "inputs": examples.top_inputs, "backward": True}
    result = checked(doubled, **same)
    assert result.passed, str(result)
    assert {r.tensor for r in result.report.rows} == {"output", "x", "x_grad"}
    assert checked(lambda x: 4 * x * x, **same).verdict == "FAIL"


def test_other_strides_than_those_of_no_contiguous_reference_are_told() -> None:
    def transposed(x: Tensor) -> Tensor:
        return (x * 2).T

    same = {"reference": transposed, "inputs": examples.top_inputs}
    result = checked(lambda x: (x * 2).T.contiguous(), **same)
    assert result.passed
    assert any(
        note.startswith("output has the strides [32, 1], not [1, 64]: ")
        for note in result.notes
    )
    assert not any("strides" in note for note in checked(transposed, **same).notes)


def test_reasons_are_told_once_and_integers_are_no_other_format() -> None:
    same = {"reference": examples.top_but_last, "inputs": examples.top_inputs}
    notes = checked(examples.top_but_last, **same).notes
    [applied] = [note for note in notes if "Rules not applied" in note]
    assert applied.count("integers are not rounded") == 1
    assert "slope, shift, reference and compared (partly: integers " in applied
    assert not any("was requested" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other_eps", "eps is 0.1 in place of 1e-06"),
        ("scaled", "it is 1.01 times what it should be"),
        ("shifted", "0.01 is added to it"),
        ("cut", "sums leave out the last 1/4 of their terms"),
        ("without_weight", "w is taken for 1"),
        ("stale_row", "row 17 of axis 0 holds row 18"),
        ("remembered", "it is the result of an earlier call"),
        ("alias", "it is the argument x"),
    ],
)
def test_what_a_function_computes_instead_is_named(name: str, words: str) -> None:
    causes = {f.cause for f in checked(getattr(examples, name)).report.findings}
    assert causes == {words}


@pytest.mark.slow
def test_an_error_that_no_other_function_explains_has_no_name() -> None:
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        out = examples.rms_norm(x, w)
        return out * (1 + 0.1 * torch.randn(out.shape)).to(out.dtype)

    [finding] = checked(noisy).report.findings
    assert (finding.rule, finding.cause) == ("error", None)


def test_causes_are_told_of_truths_of_their_own() -> None:
    """Of matrices: the last terms of a product, an argument transposed, a narrower one."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(24, 24, generator=generator) for _ in range(2))
    reference = FunctionReference(
        function=torch.matmul, arguments=Arguments(positional=(x, y), names=("x", "y")),
        seed=0, backward=False,
    )  # fmt: skip
    wrong = {
        "sums leave out what fills no block of 16 terms": x[:, :16] @ y[:16],
        "y is read transposed": x @ y.T,
        "its last two axes are exchanged": (x @ y).T,
        "it is 0 everywhere": torch.zeros(24, 24),
        "x is read in tf32": round_to(x, FORMATS["tf32"]).double() @ y.double(),
        "it is -1 times what it should be": -(x @ y),
    }
    for words, output in wrong.items():
        assert causes_of(reference, {"output": output}, {})["output"].words == words
    sound = {"output": (x.double() @ y.double()).float()}
    assert causes_of(reference, sound, {}) == {}


def test_a_function_that_raises_is_not_judged() -> None:
    result = checked(examples.raises)
    assert result.verdict == "NOT JUDGED"
    sentence = result.report.findings[0].sentence
    assert "failed in 2 of 2 calls: ValueError: no such kernel" in sentence


def test_a_weight_of_1_is_judged_once_redrawn_and_told() -> None:
    result = checked(examples.without_weight)
    calls = {row.case for row in result.report.rows if row.role == "kernel"}
    assert calls == {"seed 0", "seed 0 again"}
    wrong = {f.place.case for f in result.report.findings if f.place is not None}
    assert wrong == {"seed 0 again"}
    assert any("All 0 or all 1 in the inputs" in note for note in result.notes)


def test_inputs_that_cannot_judge_are_no_pass() -> None:
    """A sum of a constant and very little: another seed moves it by less than rounding
    does."""

    def reference(x: Tensor) -> Tensor:
        return 1000 + x * 1e-3

    inputs = examples.top_inputs
    result = checked(reference, reference=reference, inputs=inputs, formats="bfloat16")
    assert result.verdict == "NOT JUDGED"
    assert "inputs of larger spread would judge" in str(result)
    wrong = checked(lambda x: 1100 + x, reference=reference, inputs=inputs)
    assert wrong.verdict == "FAIL"


@pytest.mark.slow
def test_a_scalar_is_judged_over_several_seeds() -> None:
    same = {"reference": examples.loss, "inputs": examples.loss_inputs}
    sound = checked(examples.loss, **same)
    assert sound.passed, str(sound)
    [record] = [c for c in sound.report.cases if c.case == "seed 0"]
    assert record.extents()["output"].width == 8
    wrong = checked(examples.smoothed_loss, formats="float32", **same)
    assert wrong.verdict == "FAIL"
    assert "error" in rules_broken(wrong)


def test_a_scalar_is_not_named_by_a_number_that_fits_it() -> None:
    """Any scalar is some number times another, also one that passes."""
    same = {"reference": examples.loss, "inputs": examples.loss_inputs}
    rows = checked(examples.smoothed_loss, formats="float32", **same).report.rows
    assert [row.suspicion for row in rows if row.role == "kernel"] == [None, None]


def test_integers_are_the_references() -> None:
    same = {"reference": examples.top, "inputs": examples.top_inputs}
    assert checked(examples.top, **same).passed
    result = checked(examples.top_but_last, **same)
    assert "integers" in rules_broken(result)
    assert "32 elements of output_1 differ" in str(result)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_formats_round_the_arguments(format: str) -> None:
    result = checked(examples.fused, formats=format, shapes="x=32x256,w=256", inputs=None)
    assert result.passed, str(result)
    assert {row.format for row in result.report.rows} == {format}
    assert {row.out_format for row in result.report.rows if row.role == "kernel"} == {
        format
    }


@pytest.mark.slow
def test_a_file_of_named_arguments(tmp_path: Path) -> None:
    x, w = examples.inputs(0)
    save_file({"x": x, "w": w}, tmp_path / "a.safetensors")
    assert checked(examples.fused, inputs=str(tmp_path / "a.safetensors")).passed
    assert not checked(examples.scaled, inputs=tmp_path / "a.safetensors").passed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": None}, "inputs: expected a function, a file or shapes, got none"),
        ({"inputs": None, "shapes": "x:3"}, "shape: expected NAME=AxBxC, got 'x:3'"),
        ({"inputs": "a.txt"}, "inputs: expected FILE.py:function or FILE.safetensors"),
        (
            {"inputs": lambda a, b: a},
            "inputs: expected a function of a seed, got one of a, b",
        ),
        ({"seeds": []}, "seeds: expected at least 1, got 0"),
        ({"cases": "ties"}, "reference: cases, claims and invariant are of attention"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        checked(examples.fused, **options)


def test_a_reference_without_an_exact_result_is_not_judged() -> None:
    def reference(x: Tensor) -> Tensor:
        return x.view(torch.int32).float()

    result = checked(reference, reference=reference, inputs=examples.top_inputs)
    assert result.verdict == "NOT JUDGED"
    sentence = result.report.findings[0].whole
    assert "aten.view.dtype" in sentence
    assert "return x.view(torch.int32).float()" in sentence


def test_a_reference_that_errs_more_than_its_operations_is_told() -> None:
    """On a CPU, the product of 24 numbers in bfloat16 is rounded after each factor."""

    def product(x: Tensor) -> Tensor:
        return x.prod(dim=-1)

    def inputs(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (torch.rand(256, 24, generator=generator) + 0.1).bfloat16()

    result = checked(product, reference=product, inputs=inputs)
    assert any(
        note.startswith("The reference errs in output by ") for note in result.notes
    )


def test_the_function_runs_before_anything_of_the_reference() -> None:
    order: list[str] = []

    def reference(x: Tensor, w: Tensor) -> Tensor:
        order.append("reference")
        return examples.rms_norm(x, w)

    def function(x: Tensor, w: Tensor) -> Tensor:
        order.append("function")
        return examples.fused(x, w)

    assert checked(function, reference=reference).passed
    assert order[:3] == ["function", "function", "reference"]
    assert "function" not in order[2:]


def test_what_the_reference_sets_for_all_of_pytorch_is_set_back() -> None:
    """Else the next call is drawn in another dtype, and has no gradients."""

    def setting(x: Tensor, w: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(torch.get_num_threads() + 1)  # it would wait in a fork
        return examples.rms_norm(x, w)

    def modes() -> tuple[object, ...]:
        return (torch.get_default_dtype(), torch.is_grad_enabled(),
                torch.get_float32_matmul_precision(), torch.get_num_threads())  # fmt: skip

    before = modes()
    result = checked(
        examples.fused, reference=setting, inputs=None, shapes="x=16x64,w=64",
        formats=["bfloat16", "float32"], backward=True,
    )  # fmt: skip
    assert modes() == before
    assert result.passed, str(result)
    assert {row.format for row in result.report.rows} == {"bfloat16", "float32"}
    assert "Gradients are not judged (float32)" in " ".join(result.skipped)


def test_gradients_that_the_reference_has_none_of_are_told() -> None:
    """A pass is of the output alone, and says so."""

    def detached(x: Tensor, w: Tensor) -> Tensor:
        return examples.rms_norm(x, w).detach()

    result = checked(examples.fused, reference=detached, backward=True)
    [sentence] = [text for text in result.skipped if "Gradients" in text]
    assert sentence == (
        "Gradients are not judged (bfloat16): the reference lets none back to its inputs."
    )
    assert not any("Gradients" in text for text in checked(examples.fused).skipped)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda x: x.to("meta"), "x, got a tensor that is on the device meta"),
        (Tensor.to_sparse, "x, got a tensor that is a sparse_coo tensor"),
    ],
)
def test_inputs_without_numbers_are_refused(
    changed: Callable[[Tensor], Tensor], words: str
) -> None:
    def make(seed: int) -> tuple[Tensor, Tensor]:
        x, w = examples.inputs(seed)
        return changed(x), w

    with pytest.raises(UsageError, match=words):
        checked(examples.fused, inputs=make)


def test_check_function_raises_and_match_judges_one_output() -> None:
    same = {"reference": examples.rms_norm, "inputs": examples.inputs}
    assert check_function(examples.fused, **same).passed
    with pytest.raises(CheckFailed) as failed:
        check_function(examples.scaled, **same)
    assert "FAIL function_examples:scaled" in str(failed.value)
    data = examples.inputs(5)
    judge = match(examples.rms_norm)
    assert judge(data, examples.fused(*data))[0]
    is_right, words = judge(data, examples.scaled(*data))
    assert not is_right
    assert words.startswith("the output (bfloat16) ")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda y: y.to("meta"), "output: expected a number .* is on the device meta"),
        (Tensor.to_sparse, "output: expected a number .* is a sparse_coo tensor"),
        (lambda y: torch.nested.nested_tensor([*y]), "output: expected .* is nested"),
        (lambda y: None, "what is returned: None"),
    ],
)
def test_match_takes_no_output_without_numbers(
    changed: Callable[[Tensor], object], words: str
) -> None:
    data = examples.inputs(5)
    is_right, verdict = match(examples.rms_norm)(data, changed(examples.fused(*data)))
    assert not is_right
    assert re.search(words, verdict)


def test_match_hands_a_tuple_over_whole_to_a_reference_of_one_argument() -> None:
    """One argument without a default, in order, whatever else may be named."""

    def of_pair(data: tuple[Tensor, Tensor], **options: object) -> Tensor:
        return examples.rms_norm(*data)

    one = (of_pair, lambda x: x, lambda x, y=1: x)
    more = (lambda x, y: x, lambda *x: x, lambda *, x: x, lambda x, *, y: x, lambda: 0)
    assert [*map(takes_one, (*one, *more))] == [True] * 3 + [False] * 5
    data = examples.inputs(5)
    assert match(of_pair)(data, examples.fused(*data))[0]


def test_a_report_is_written_read_gated_and_shown(tmp_path: Path) -> None:
    result = checked(examples.scaled)
    write(result.report, tmp_path)
    report = read(tmp_path)
    assert isinstance(report, FunctionReport)
    assert report == result.report
    assert judge_report(report).outcome == result.judgement.outcome
    gated = CliRunner().invoke(cli, ["gate", str(tmp_path)], standalone_mode=False)
    assert gated.return_value == 1
    page = ["report", str(tmp_path), "--format", "html"]
    shown = CliRunner().invoke(cli, page, standalone_mode=False)
    assert "error / explained" in shown.output


@pytest.mark.slow
def test_limits_grow_with_luck_and_leans_count_where_they_are_certain() -> None:
    rules = {t.name: t for t in default_rules_for_functions().thresholds}
    result = checked(examples.scaled)
    [row, _] = [r for r in result.report.rows if r.role == "kernel"]
    beside = row.beside_reference
    assert beside is not None
    luck = beside.reference_luck or 0
    assert rules["error"].raised_by_luck(row).at_most == pytest.approx(
        1.05 * luck, abs=1e-3
    )
    assert rules["slope"].is_certain(row)
    unsure = beside.model_copy(update={"slope_t": -9.9})
    assert not rules["slope"].is_certain(
        row.model_copy(update={"beside_reference": unsure})
    )
    with pytest.raises(ValueError, match="at_most, at_least and absent"):
        Threshold(name="both", metric="moved", at_most=1, at_least=1)


# --- in a process of its own ----------------------------------------------------------


def run_in_process(name: str, *, limit_s: float = 60) -> object:
    work = Work(
        target=f"function_examples:{name}", backward=True,
        draws=tuple((seed, Arguments(positional=examples.inputs(seed))) for seed in (0, 1)),
    )  # fmt: skip
    with FunctionProcess(run=served, limit_s=limit_s) as process:
        return process.answers(work)


@pytest.mark.parametrize("is_anew", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_answers_bit_for_bit(
    is_anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it goes on as a new interpreter, since CUDA was asked for before."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: is_anew)
    answers = run_in_process("fused")
    assert isinstance(answers, list)
    for seed, ran in enumerate(answers):
        assert ran.outputs["output"].equal(examples.fused(*examples.inputs(seed)))
        assert list(ran.gradients) == ["argument_0_grad", "argument_1_grad"]


def test_what_a_process_may_do_wrong_costs_its_answer() -> None:
    assert run_in_process("raises") == ["ValueError: no such kernel"] * 2
    with pytest.raises(MeasurementError, match="ended without an answer"):
        run_in_process("ends")
    with pytest.raises(MeasurementError, match=r"gave no answer within 0\.5 s"):
        run_in_process("hangs", limit_s=0.5)
    with pytest.raises(UsageError, match="has no function 'nope'"):
        run_in_process("nope")


def invoked(*arguments: str) -> tuple[int, str]:
    command = ["check", *arguments, "--reference", f"{EXAMPLES}:rms_norm"]
    result = CliRunner().invoke(cli, command, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return int(result.return_value or 0), " ".join(result.output.split())


@pytest.mark.slow
def test_the_command_line_checks_a_function_by_name(tmp_path: Path) -> None:
    inputs = ("--inputs", f"{EXAMPLES}:inputs")
    code, out = invoked(f"{EXAMPLES}:fused", *inputs)
    assert (code, "as exact as the format allows" in out) == (0, True)
    code, out = invoked(
        f"{EXAMPLES}:scaled", *inputs, "--json", "-o", str(tmp_path / "o")
    )
    data = json.loads(out)
    assert (code, data["verdict"]) == (1, "FAIL")
    assert data["findings"][0]["cause"] == "it is 1.01 times what it should be"
    assert isinstance(read(tmp_path / "o"), FunctionReport)
    code, out = invoked(f"{EXAMPLES}:fused", "--shape", "x=32x256,w=256", "--backward")
    assert code == 0
    with pytest.raises(UsageError, match="are of attention alone"):
        invoked(f"{EXAMPLES}:fused", *inputs, "--case", "ties")


# --- problem files --------------------------------------------------------------------

PROBLEM = ROOT / "examples" / "problem"


def solved(name: str, *options: str) -> tuple[int, dict[str, object]]:
    command = ["check", str(PROBLEM / name), "--problem", str(PROBLEM / "problem.py")]
    result = CliRunner().invoke(
        cli, [*command, "--json", *options], standalone_mode=False
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return int(result.return_value or 0), json.loads(result.output)


@pytest.mark.parametrize(
    ("name", "how"), [("ends", "(exit status 3)"), ("crashes", "(signal SIGKILL)")]
)
def test_a_process_that_ends_has_a_row_with_the_reason(name: str, how: str) -> None:
    code, out = invoked(f"{EXAMPLES}:{name}", "--inputs", f"{EXAMPLES}:inputs", "--json")
    data = json.loads(out)
    assert (code, data["verdict"]) == (3, "NOT JUDGED")
    sentence = data["findings"][0]["sentence"]
    words = (
        f"failed in 2 of 2 calls: the function's process ended without an answer {how}"
    )
    assert words in sentence
    rows = [r for r in data["report"]["rows"] if r["role"] == "kernel"]
    assert [row["status"] for row in rows] == ["failed"] * 2


def test_a_solution_that_ends_its_process_has_a_row(tmp_path: Path) -> None:
    text = "import os\nclass ModelNew:\n    def __init__(self, *a): os._exit(4)\n"
    (tmp_path / "ending.py").write_text(text)
    code, data = solved(str(tmp_path / "ending.py"))
    assert (code, data["verdict"]) == (3, "NOT JUDGED")
    assert "(exit status 4)" in json.dumps(data["findings"])


def test_a_solution_is_checked_beside_its_problem() -> None:
    code, data = solved("solution.py")
    assert (code, data["verdict"]) == (0, "PASS")


@pytest.mark.slow
def test_a_bias_that_is_0_at_first_is_redrawn_and_its_absence_named() -> None:
    code, data = solved("wrong_solution.py")
    findings = data["findings"]
    assert isinstance(findings, list)
    assert (code, findings[0]["cause"]) == (1, "norm.bias is taken for 0")


def test_a_problem_without_its_names_is_told(tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("Model = print\n")
    with pytest.raises(UsageError, match="got no get_inputs"):
        check_problem(PROBLEM / "solution.py", problem=tmp_path / "lacking.py")


def test_other_names_of_parameters_start_from_the_same_seed(tmp_path: Path) -> None:
    """Then they are no arguments, and keep what they were made with, which is said."""
    text = (PROBLEM / "solution.py").read_text().replace("self.up", "self.linear")
    (tmp_path / "renamed.py").write_text(text)
    result = check_problem(tmp_path / "renamed.py", problem=PROBLEM / "problem.py")
    assert result.passed
    assert any("parameters of other names" in line for line in result.skipped)


def test_a_reference_of_another_state_is_copied_for_each_run(tmp_path: Path) -> None:
    """As a module it is: runs of a bound method would write into its running statistics,
    by which the next run errs."""
    problem = (
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.NORM = torch.nn.BatchNorm1d(8, momentum=0.9)\n"
        "    def forward(self, x):\n"
        "        self.NORM(x)\n"
        "        return x + self.NORM.running_mean\n"
        "get_inputs = lambda: [torch.randn(16, 8) + 3]\n"
        "get_init_inputs = lambda: []\n"
    )
    (tmp_path / "problem.py").write_text(problem.replace("NORM", "norm"))
    solution = problem.replace("NORM", "other").replace("Model", "ModelNew")
    fresh = solution.replace("        self.other(x)\n", "        self.other.reset_running_stats()\n        self.other(x)\n")  # fmt: skip
    (tmp_path / "copied_solution.py").write_text(fresh)
    result = check_problem(
        tmp_path / "copied_solution.py", problem=tmp_path / "problem.py"
    )
    assert result.passed, str(result)


def test_cuda_in_a_generator_of_inputs_is_the_device_at_hand() -> None:
    with on_device("cpu"):
        generator = torch.Generator(device="cuda").manual_seed(1)
        x = torch.randn(3, device="cuda", generator=generator)
        assert x.cuda().device.type == x.to("cuda").device.type == "cpu"
    assert isinstance(torch.Generator(), torch.Generator)


@pytest.mark.slow
def test_a_check_loads_no_compiler_and_no_distributed_tensors() -> None:
    """They cost seconds, more than the check."""
    code = (
        "import sys, numdev, function_examples as e\n"
        "assert numdev.check(e.fused, reference=e.rms_norm, inputs=e.inputs).passed\n"
        "heavy = {'sympy', 'torch._dynamo', 'torch.distributed.tensor', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    folders = os.pathsep.join([str(ROOT), str(EXAMPLES.parent)])
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": folders},
    )  # fmt: skip
    assert ran.stdout.strip() == "[]"


def test_two_reports_are_compared() -> None:
    """The same function twice has not moved; another one in its place is told of."""

    def fused(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return examples.fused(x, weight, eps) * 1.03

    def report(function: Callable[..., object]) -> FunctionReport:
        result = checked(function).report
        assert isinstance(result, FunctionReport)
        return result

    before = report(examples.fused)
    same = compare(before, report(examples.fused))
    assert (same.passed, same.moves) == (True, ())
    assert not compare(before, report(fused)).passed


@pytest.mark.parametrize(
    "answer",
    [
        {"outputs": 3},
        {"outputs": [["output", "float32"]]},
        {"outputs": [["output", "qint8", [2]]]},
        {"outputs": [["output", "float33", [2]]]},
        {"outputs": [["output", "float32", [-1]]]},
        {"outputs": [["output", "float32", "two"]]},
        {"outputs": [["output", "float32", [10**30]]]},
        [],
        3,
    ],
)
def test_an_answer_that_is_nonsense_is_one_error(answer: object) -> None:
    """Whatever the process of a function sends: MeasurementError, and no crash."""
    ours, theirs = os.pipe()
    asked, to = os.pipe()
    text = json.dumps([answer]).encode()
    os.write(theirs, struct.pack("<q", len(text)) + text + bytes(64))
    os.close(theirs)
    process = FunctionProcess(run=served, limit_s=5.0)
    process._back, process._to = ours, to
    with pytest.raises(MeasurementError, match="the function's process"):
        process.answers(Work(target="mine:f", draws=[], backward=False))
    for end in (ours, asked, to):
        os.close(end)


def test_a_problem_is_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "problem.txt").write_text("")
    with pytest.raises(UsageError, match=r"expected a Python file, got \.txt"):
        module_of(tmp_path / "problem.txt")


def test_inputs_that_take_two_numbers_are_refused_once() -> None:
    with pytest.raises(UsageError) as refused:
        checked(examples.fused, inputs=lambda first, second: None)
    assert str(refused.value).startswith("inputs: expected a function of a seed")


def test_a_product_over_a_single_number_has_an_exact_result() -> None:
    """Of a scalar there is no last axis."""

    def product(x: Tensor) -> Tensor:
        return x.prod() * 3

    result = checked(
        product, reference=product, inputs=lambda seed: (torch.tensor(1.5 + seed / 8),)
    )
    assert result.verdict != "FAIL"
    assert [row.status for row in result.report.rows if row.role == "kernel"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "x=4x8,x=8x8"], "shape: expected one of x, got two"),
        (
            ["--shape", "x=4x8", "--inputs", f"{EXAMPLES}:inputs"],
            "inputs: expected a function, a file or shapes, got two of these",
        ),
    ],
)
def test_no_option_is_passed_over(options: list[str], words: str) -> None:
    target = [f"{EXAMPLES}:fused", "--reference", f"{EXAMPLES}:rms_norm"]
    result = CliRunner().invoke(cli, ["check", *target, *options])
    assert isinstance(result.exception, UsageError) or result.exit_code == 2
    assert words in str(result.exception) + result.output


@pytest.mark.slow  # it loads PyTorch's compiler
@pytest.mark.parametrize("compiled", ["function", "reference"])
def test_a_compiled_module_has_the_names_of_the_module(compiled: str) -> None:
    """On either side; else the gradients of its parameters would be others."""
    layer = torch.nn.Linear(16, 8)
    other = torch.compile(layer, backend="eager")
    function, reference = (other, layer) if compiled == "function" else (layer, other)
    result = numdev.check(
        function, reference=reference, backward=True, device="cpu",
        inputs=lambda seed: torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)),
    )  # fmt: skip
    assert result.passed, result.words
    tensors = {row.tensor for row in result.report.rows if row.role == "kernel"}
    assert tensors >= {"output", "weight_grad", "bias_grad"}


def test_each_format_has_a_table() -> None:
    result = numdev.check(
        torch.sigmoid, reference=torch.sigmoid, shapes="x=4x32",
        formats=("bfloat16", "float16"),
    )  # fmt: skip
    tables = [x for x in function_reports.blocks(result.report) if isinstance(x, Table)]
    assert [table.title.rpartition(", ")[2] for table in tables] == [
        "bfloat16", "float16", "bfloat16", "float16"
    ]  # fmt: skip
    calls = [[row.cells[0].text for row in table.rows] for table in tables]
    assert calls == [["seed 0", "seed 0 again"]] * 4
