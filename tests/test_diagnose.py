"""`numdev diagnose` around the chain: what is opened, handed on, kept, and said of it.

The numbers are made up (`fake_chain`); that they are right is `test_chain`'s matter. The last test
runs the real chain, once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fake_chain import GUILTY, FakeChain
from safetensors.torch import save_file

from numdev.cli.main import main
from numdev.diagnose import study
from numdev.diagnose.cures import CURES
from numdev.diagnose.report import DiagnoseReport
from numdev.diagnose.request import DiagnoseRequest, attention_options
from numdev.errors import MeasurementError, UsageError
from numdev.report import read


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> FakeChain:
    """In place of the real one."""
    fake = FakeChain()
    for name in ("diagnosed", "cured", "seen_from_outside"):
        monkeypatch.setattr(study, name, getattr(fake, name))
    return fake


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of one model."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (10, 20, 30):
        models.save(models.llama(), directory / f"m-step{step}")
    return directory


def asked(*targets: object, **changes: Any) -> DiagnoseRequest:
    made = {
        "target": "t",
        "targets": tuple(map(str, targets)),
        "attention": attention_options(None, ()),
        "length": 12,
        "sequences": 2,
        "device": "cpu",
    }
    return DiagnoseRequest.model_validate({**made, **changes})


def diagnosed(request: DiagnoseRequest, directory: Path, **options: Any) -> DiagnoseReport:
    return study.diagnose(request, directory, **options)


def test_every_call_of_every_checkpoint(
    chain: FakeChain, checkpoints: Path, tmp_path: Path
) -> None:
    """In the order of steps and calls, rounded to the format, with dO and its projection."""
    found = diagnosed(asked(checkpoints, format="float16"), tmp_path / "out")
    calls = [f"model.layers.{layer}.self_attn#0" for layer in (0, 1)]
    assert chain.asked == [(f"m-step{s}", call) for s in (10, 20, 30) for call in calls]
    assert {case.q.dtype for case in chain.cases} == {torch.float16}
    assert all(case.grad_out is not None and case.grad_out.any() for case in chain.cases)
    assert all(p is not None and p.weight.shape == (32, 32) for p in chain.projections)
    assert len(found.heads) == 3 * 2 * 8
    assert [c.step for c in found.checkpoints] == [10, 20, 30]
    assert all(c.sha256 for c in found.checkpoints)


def test_the_head_at_fault_is_named_first(
    chain: FakeChain, checkpoints: Path, tmp_path: Path
) -> None:
    """The answer, the ranking of the last checkpoint alone, cures, costs and running sums."""
    found = diagnosed(asked(checkpoints), tmp_path / "out")
    first = found.summary.ranking[0]
    assert (first.layer, first.head) == GUILTY
    assert len(found.summary.ranking) == 16
    assert {r.step for r in found.summary.ranking} == {30}
    assert found.summary.answer[0].startswith("Layer 1, head 2 is alone in this: rounding shifts")
    assert first.cured_by == tuple(CURES)[:4]
    assert found.costs.keys() == CURES.keys()
    assert {c.step for c in found.cures} == {k.step for k in found.kernels} == {30}
    assert len(found.running) == 2 * study.DRAWN_RUNS
    assert (found.running[0].layer, found.running[0].head) == GUILTY
    assert {f.metric for f in found.figures} >= {"tied", "delta_run", "spectral_norm"}
    assert found.summary.axis is not None


def test_every_checkpoint_and_no_cures(chain: FakeChain, checkpoints: Path, tmp_path: Path) -> None:
    """What is asked for of cures and real kernels, and of layers."""
    request = asked(checkpoints, every_checkpoint=True, cures=False, layers=(1,))
    found = diagnosed(request, tmp_path / "out")
    assert {h.layer for h in found.heads} == {1}
    assert found.cures == ()
    assert found.costs == {}
    assert {k.step for k in found.kernels} == {10, 20, 30}


def test_what_is_finished_survives_an_interrupt(
    chain: FakeChain, checkpoints: Path, tmp_path: Path
) -> None:
    """Continued, only what is left is computed, and the report is that of a run without."""
    whole = diagnosed(asked(checkpoints), tmp_path / "whole")
    before = len(chain.asked)
    chain.stops_at = before + 3
    with pytest.raises(KeyboardInterrupt):
        diagnosed(asked(checkpoints), tmp_path / "out")
    chain.stops_at = None
    found = diagnosed(asked(checkpoints), tmp_path / "out")
    assert len(chain.asked) == before + 6
    same = {"provenance", "timings"}
    assert found.model_dump(exclude=same) == whole.model_dump(exclude=same)


def test_another_request_into_the_directory_is_refused(
    chain: FakeChain, checkpoints: Path, tmp_path: Path
) -> None:
    """And with overwrite it starts anew."""
    diagnosed(asked(checkpoints), tmp_path / "out")
    with pytest.raises(UsageError, match="different request"):
        diagnosed(asked(checkpoints, seed=1), tmp_path / "out")
    diagnosed(asked(checkpoints, seed=1), tmp_path / "out", overwrite=True)


def test_captured_tensors(chain: FakeChain, tmp_path: Path) -> None:
    """W_Q is not known there, and a note says so; without grad_out they are refused."""
    tensors = {f"0.{name}": torch.randn(1, 2, 6, 8) for name in ("q", "k", "v", "grad_out")}
    save_file(tensors, tmp_path / "calls.safetensors", metadata={"numdev": '{"version": 1}'})
    found = diagnosed(asked(tmp_path / "calls.safetensors"), tmp_path / "out")
    assert chain.projections == [None]
    assert "W_Q is not known in 1 call" in " ".join(found.summary.notes)
    del tensors["0.grad_out"]
    save_file(tensors, tmp_path / "calls.safetensors", metadata={"numdev": '{"version": 1}'})
    with pytest.raises(UsageError, match=r"calls.safetensors: stores no grad_out for calls#0"):
        diagnosed(asked(tmp_path / "calls.safetensors"), tmp_path / "other")


def test_a_configuration_draws_its_cases(chain: FakeChain, tmp_path: Path) -> None:
    """With dO of the regime; any other key of the file would be ignored, and is refused."""
    path = tmp_path / "cases.yaml"
    cases = "cases: [{name: a, heads: 2, seq_len: 8, head_dim: 4}]\n"
    path.write_text(cases)
    found = diagnosed(asked(path), tmp_path / "out")
    assert [h.case for h in found.heads] == ["a", "a"]
    path.write_text(cases + "repeats: 3\n")
    with pytest.raises(UsageError, match=r"nothing but `cases`.*'repeats'"):
        diagnosed(asked(path), tmp_path / "other")


def test_kernels_that_cannot_run(chain: FakeChain, checkpoints: Path, tmp_path: Path) -> None:
    """One that was named and cannot run here is left out with its reason."""
    request = asked(
        checkpoints / "m-step10", kernels=({"name": "sdpa-cudnn"}, {"name": "baseline"})
    )
    found = diagnosed(request, tmp_path / "out")
    assert {k.kernel for k in found.kernels} == {"baseline"}
    assert any(n.startswith("sdpa-cudnn was left out: needs CUDA") for n in found.summary.notes)


def test_a_selection_of_nothing(chain: FakeChain, checkpoints: Path, tmp_path: Path) -> None:
    """Exit code 3, as in an audit."""
    with pytest.raises(MeasurementError, match=r"no attention call in layer 7; .*; check --layers"):
        diagnosed(asked(checkpoints, layers=(7,)), tmp_path / "out")


@pytest.mark.parametrize(
    ("preset", "given", "says"),
    [
        ("qui2025", (), "unknown preset 'qui2025'; did you mean 'qiu2025'?"),
        (None, ("pvv=bfloat16",), "has no option 'pvv'; did you mean 'pv'?"),
        (None, ("pv=bfloat1",), "bfloat1"),
        (None, ("pv",), "is no NAME=VALUE; write --attention block_kv=64"),
        (None, ("pv=[1]",), "its value is no number and no word"),
        (None, ("block_kv=0",), "block_kv is 0; expected a positive number"),
    ],
)
def test_an_attention_that_is_none(
    checkpoints: Path, tmp_path: Path, preset: str | None, given: tuple[str, ...], says: str
) -> None:
    """Refused before anything is opened, with the closest that there is."""
    with pytest.raises(UsageError) as raised:
        diagnosed(asked(checkpoints, attention=attention_options(preset, given)), tmp_path / "out")
    assert says in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_attention_that_is_diagnosed(
    chain: FakeChain, checkpoints: Path, tmp_path: Path
) -> None:
    """Preset, sites and fields reach the recipe, and the report."""
    options = attention_options("qiu2025", ("block_kv=64", "delta_from=dP*P", "dp=float32"))
    found = diagnosed(asked(checkpoints / "m-step10", attention=options), tmp_path / "out")
    (made,) = {id(r): r for r in chain.recipes}.values()
    assert (made.preset, made.block_kv, made.delta_from) == ("qiu2025", 64, "dP*P")
    assert made.sites["dp"] == "float32"
    assert found.attention == options


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """`numdev diagnose ARGUMENTS` in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["numdev", "diagnose", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


SHORT = ("--length", "12", "--sequences", "2", "--device", "cpu", "-o", "out")


def test_the_command(chain: FakeChain, checkpoints: Path, run: Any) -> None:
    """Writes report, tables and page, and shows the answer first."""
    code, out, err = run(str(checkpoints), *SHORT, "--preset", "qiu2025")
    assert code == 0, err
    assert out.strip().startswith("Layer 1, head 2 is alone in this")
    for name in ("report.json", "report.html", "heads.csv", "cures.csv", "kernels.csv"):
        assert (Path("out") / name).exists(), name
    found = read(Path("out"))
    assert isinstance(found, DiagnoseReport)
    assert found.request["attention"] == {"preset": "qiu2025"}
    assert "stable" not in " ".join(found.summary.answer).lower()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nowhere",), 2, "nowhere: no such file or directory"),
        (("demo", "--preset", "fa3"), 2, "unknown preset 'fa3'"),
        (("demo", "--format", "bf17"), 2, "bf17"),
        (("demo", "--kernel", "flashy"), 2, "flashy"),
        (("demo", "--layers", "x"), 2, "cannot read 'x'"),
        ((), 2, "Missing argument"),
    ],
)
def test_bad_input_is_one_line(run: Any, arguments: tuple[str, ...], code: int, says: str) -> None:
    """With the right exit code, and nothing on stdout."""
    got, out, err = run(*arguments, *SHORT)
    assert got == code
    assert out == ""
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_the_whole_way(checkpoints: Path, run: Any) -> None:
    """With the real chain: every head of the model has its numbers, W_Q's among them."""
    code, _, err = run(str(checkpoints / "m-step10"), *SHORT, "--layers", "0", "--quiet")
    assert code == 0, err
    found = read(Path("out"))
    assert isinstance(found, DiagnoseReport)
    assert len(found.heads) == len(found.summary.ranking) == 8
    assert all(h.dw_q_error and h.delta and h.delta[0].dw_q for h in found.heads)
    assert {c.cure for c in found.cures} == {"none", *CURES}
    assert {k.kernel for k in found.kernels if k.status == "ok"} >= {"baseline"}


def test_nothing_to_measure(run: Any, tmp_path: Path) -> None:
    """Tokens that see nothing but themselves have no chain: the report is there, exit code 3."""
    tensors = {f"0.{name}": torch.randn(1, 2, 1, 8) for name in ("q", "k", "v", "grad_out")}
    save_file(tensors, tmp_path / "calls.safetensors", metadata={"numdev": '{"version": 1}'})
    code, out, err = run("calls.safetensors", "-o", "out", "--device", "cpu")
    assert code == 3
    assert "could be measured: no query sees more than one key" in err
    assert " ".join(out.split()).startswith("Whether delta's error has one sign is not known in 2")
    assert Path("out/report.json").exists()
