"""`numdev diagnose` around the chain: what is opened, handed on, kept, and said of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from commands import ran
from safetensors.torch import load_file, save_file

from numdev.cli.diagnose import attention_options
from numdev.errors import MeasurementError, UsageError
from numdev.report import write
from numdev.report.io import with_digest
from numdev.request_models import DiagnoseRequest
from numdev.studies.diagnose import study
from numdev.studies.diagnose.bias_chain import Diagnosis
from numdev.studies.diagnose.diagnosis_targets import Stage, find_stages
from numdev.studies.diagnose.training_text import write_training_text
from numdev.studies.training.config import TrainConfig, resolve
from numdev.studies.training.study import train
from numdev.studies.training.weights.run_checkpoints import training_step

FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> list[Diagnosis]:
    """What went through the chain, call by call."""
    seen: list[Diagnosis] = []
    real = study.diagnose_call
    monkeypatch.setattr(
        study, "diagnose_call", lambda *a, **b: seen.append(real(*a, **b)) or seen[-1]
    )
    return seen


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of one model."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (10, 20, 30):
        models.save(models.llama(), directory / f"m-step{step}")
    return directory


def asked(*targets: object, **changes: Any) -> DiagnoseRequest:
    created: dict[str, Any] = {
        "target": "t", "targets": tuple(map(str, targets)), "length": 12, "sequences": 2,
        "attention": attention_options(None, ()), "device": "cpu",
    }  # fmt: skip
    return DiagnoseRequest.model_validate({**created, **changes})


def captured(path: Path, length: int, *names: str) -> None:
    tensors = {
        f"0.{name}": torch.randn(1, 2, length, 8) for name in ("q", "k", "v", *names)
    }
    save_file(tensors, path, metadata={"numdev": '{"version": 1}'})


def test_every_checkpoint_and_no_cures(checkpoints: Path, tmp_path: Path) -> None:
    """What is asked for of cures and real kernels, and of layers; one that cannot run is
    named."""
    kernels = ({"name": "sdpa-cudnn"}, {"name": "baseline"})
    changes = {
        "every_checkpoint": True,
        "cures": False,
        "layers": (1,),
        "kernels": kernels,
    }
    result = study.diagnose(asked(checkpoints, **changes), tmp_path / "out")
    assert {h.layer for h in result.heads} == {1}
    assert (result.cures, result.costs) == ((), {})
    assert {(k.step, k.kernel) for k in result.kernels} == {
        (s, "baseline") for s in (10, 20, 30)
    }
    assert any(
        n.startswith("sdpa-cudnn was left out: needs CUDA") for n in result.summary.notes
    )
    with pytest.raises(UsageError, match=r"no attention call in layers 7;"):
        study.diagnose(asked(checkpoints, layers=(7,)), tmp_path / "other")


@pytest.mark.slow
def test_what_is_finished_survives_an_interrupt(
    chain: list[Diagnosis],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what is left is computed, the report is the same, and another request is
    refused."""
    request = asked(checkpoints, cures=False)
    whole = study.diagnose(request, tmp_path / "whole")
    counting, before = study.diagnose_call, len(chain)

    def stops(*arguments: Any, **named: Any) -> Diagnosis:
        if len(chain) == before + 3:
            raise KeyboardInterrupt
        return counting(*arguments, **named)

    monkeypatch.setattr(study, "diagnose_call", stops)
    with pytest.raises(KeyboardInterrupt):
        study.diagnose(request, tmp_path / "out")
    monkeypatch.setattr(study, "diagnose_call", counting)
    result = study.diagnose(request, tmp_path / "out")
    assert len(chain) == before + 6
    same = {"provenance", "timings"}
    assert result.model_dump(exclude=same) == whole.model_dump(exclude=same)
    other = asked(checkpoints, cures=False, seed=1)
    with pytest.raises(UsageError, match="different request"):
        study.diagnose(other, tmp_path / "out")
    study.diagnose(other, tmp_path / "out", overwrite=True)


def test_captured_tensors(chain: list[Diagnosis], tmp_path: Path) -> None:
    """W_Q is not known there, and a note says so; without grad_out they are refused."""
    path = tmp_path / "calls.safetensors"
    captured(path, 6, "grad_out")
    result = study.diagnose(asked(path), tmp_path / "out")
    assert [x.truth.projection for x in chain] == [None]
    notes = " ".join(result.summary.notes)
    assert "W_Q not known, the call does not come out of a model: 1 calls" in notes
    captured(path, 6)
    with pytest.raises(
        UsageError, match=r"calls.safetensors: stores no grad_out for calls#0"
    ):
        study.diagnose(asked(path), tmp_path / "other")


def test_a_configuration_draws_its_cases(tmp_path: Path) -> None:
    """With dO of the regime; any other key of the file would be ignored, and is
    refused."""
    path = tmp_path / "cases.yaml"
    cases = "cases: [{name: a, heads: 2, seq_len: 8, head_dim: 4}]\n"
    path.write_text(cases)
    result = study.diagnose(asked(path), tmp_path / "out")
    assert [h.case for h in result.heads] == ["a", "a"]
    path.write_text(cases + "repeats: 3\n")
    with pytest.raises(UsageError, match=r"nothing but `cases`.*'repeats'"):
        study.diagnose(asked(path), tmp_path / "other")


@pytest.fixture
def key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[DiagnoseRequest], Any]:
    """What a request's journal is opened with: what a run that it continues must have
    been."""

    def opened(directory: Path, header: Any, *, overwrite: bool) -> None:
        raise _Opened(json.loads(json.dumps(header)))

    def read(request: DiagnoseRequest) -> Any:
        with pytest.raises(_Opened) as raised:
            study.diagnose(request, tmp_path / "never")
        return raised.value.args[0]

    monkeypatch.setattr(study, "Journal", SimpleNamespace(open=opened))
    # The targets are no whole checkpoints
    monkeypatch.setattr(study, "_checked_readings", lambda *of: [])
    return read


class _Opened(Exception):
    pass


CHANGED: dict[str, Any] = {
    "target": "other", "targets": "another", "attention": {"preset": "eager"},
    "format": "float16", "kernels": ({"name": "baseline"},), "cures": False,
    "every_checkpoint": True, "model": "factory:build", "model_dtype": "float64",
    "text": "text", "tokenizer": "tokenizer", "inputs": "inputs", "length": 7, "sequences": 3,
    "layers": (0,), "seed": 1, "device": "auto",
}  # fmt: skip
"""Of every field of a request another value; a word where it is a file's."""


def test_every_field_of_a_request_is_in_the_key(
    key: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whatever is asked for otherwise is another run; the same request is the same."""
    assert CHANGED.keys() == DiagnoseRequest.model_fields.keys()
    path = checkpoint(tmp_path / "target")
    (tmp_path / "factory.py").write_text("def build(): return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    files = {name: tmp_path / f"{name}.txt" for name in ("text", "inputs")}
    for file in files.values():
        file.write_text("words")
    passed = {
        **CHANGED,
        "targets": (str(checkpoint(tmp_path / "another")),),
        "text": (str(files["text"]),),
        "inputs": str(files["inputs"]),
        "tokenizer": str(path),
    }
    first = key(asked(path))
    assert key(asked(path)) == first
    for name, value in passed.items():
        other = key(asked(path, **{name: value}))
        assert other["request"] != first["request"], name


def byte_model(directory: Path, text: Path) -> Path:
    """The one checkpoint of a small model that learned bytes of a text."""
    variants = [
        {"name": "golden", "role": "golden", "kernel": "baseline", "format": "float32"}
    ]
    config = TrainConfig.model_validate({
        "model": {"kind": "gpt2", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"source": "text", "files": [str(text)]}, "batch": 2, "steps": 1,
        "variants": variants, "checkpoints": {"steps": [1]},
    })  # fmt: skip
    train(resolve(config, "t", device="cpu"), directory)
    [path] = (directory / "checkpoints").iterdir()
    return path


def test_another_text_of_the_training_is_another_source(key: Any, tmp_path: Path) -> None:
    """What a byte model reads is no file of the request: the bytes themselves are in the
    key, and so is their absence."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 40)
    path = byte_model(tmp_path / "run", text)
    keys = [key(asked(path)), key(asked(path))]
    text.write_text("ABCDEFGH" * 40)
    keys.append(key(asked(path)))
    text.unlink()
    keys.append(key(asked(path)))
    texts = [k["source"].pop("training_text")["golden-seed0-step1"] for k in keys]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] is None
    assert keys[0] == keys[1] == keys[2] == keys[3]


def test_the_prompt_of_the_demo_is_in_the_key() -> None:
    [stage], _ = find_stages(["demo"])
    assert [file.name for file in stage.files] == ["config.json", "prompt.txt"]


FILES = (
    "captured",
    "cases",
    "config.json",
    "weights",
    "step",
    "inputs",
    "text",
    "tokenizer",
    "model",
)


@pytest.mark.parametrize("what", FILES)
def test_a_changed_file_at_the_same_path_is_another_source(
    tmp_path: Path, what: str, key: Any
) -> None:
    """Captured tensors, a configuration, a checkpoint's own or what its model is built by
    or reads: a finished run of the old one is not taken for one of the new."""

    def written(number: int) -> Any:
        path, text = tmp_path / "target", tmp_path / f"{what}.txt"
        if what == "captured":
            torch.manual_seed(number)
            captured(path.with_suffix(".safetensors"), 6, "grad_out")
            return {"targets": (str(path.with_suffix(".safetensors")),)}
        if what == "cases":
            case = f"{{name: a, heads: 1, seq_len: {8 + number}, head_dim: 4}}"
            path.with_suffix(".yaml").write_text(f"cases: [{case}]\n")
            return {"targets": (str(path.with_suffix(".yaml")),)}
        if not path.exists():
            checkpoint(path)
        if what == "config.json":
            (path / what).write_text(f'{{"number": {number}}}')
            return {"targets": (str(path),)}
        if what == "weights":
            save_file(
                {"a.weight": torch.full((4, 2), 1.0 + number)}, path / "model.safetensors"
            )
            return {"targets": (str(path),)}
        if what == "step":
            (path / "training.json").write_text(f'{{"step": {number}}}')
            return {"targets": (str(path),)}
        text.write_text(f"def build(): return {number}\n")
        named = {"inputs": str(text), "text": (str(text),), "model": f"{text}:build"}
        if what == "model":
            text.rename(module := tmp_path / f"factory_{tmp_path.name}.py")
            named["model"] = f"{module}:build"
        if what == "tokenizer":
            (path / "tokenizer.json").write_text(f'{{"number": {number}}}')
            return {
                "targets": (str(path),),
                "text": (str(text.with_name("config.json")),),
            }
        return {"targets": (str(path),), what: named[what]}

    origins = [key(asked(**written(number)))["source"] for number in (0, 0, 1)]
    assert origins[0] == origins[1] != origins[2]


def test_a_changed_target_does_not_continue(tmp_path: Path) -> None:
    path = tmp_path / "calls.safetensors"
    captured(path, 6, "grad_out")
    study.diagnose(asked(path), tmp_path / "out")
    captured(path, 6, "grad_out")
    with pytest.raises(UsageError, match="holds a run with a different source"):
        study.diagnose(asked(path), tmp_path / "out")


@pytest.mark.parametrize(("preset", "passed", "says"), [
    ("qui2025", (), "unknown preset 'qui2025'; did you mean 'qiu2025'?"),
    (None, ("pvv=bfloat16",), "has no option 'pvv'; did you mean 'pv'?"),
    (None, ("pv=bfloat1",), "bfloat1"), (None, ("pv",), "expected NAME=VALUE, got 'pv'"),
    (None, ("=3",), "expected NAME=VALUE, got '=3'"),
    (None, ("pv=[1]",), "expected NAME=VALUE, got 'pv=[1]'"),
    ("fa2", ("preset=eager",), "preset is given twice (fa2 and eager)"),
])  # fmt: skip
def test_an_attention_that_is_none(
    tmp_path: Path, preset: Any, passed: Any, says: str
) -> None:
    """Refused before anything is opened, with the closest that there is."""
    with pytest.raises(UsageError) as raised:
        study.diagnose(
            asked("demo", attention=attention_options(preset, passed)), tmp_path / "out"
        )
    assert says in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_the_attention_that_is_diagnosed(
    chain: Any, checkpoints: Path, tmp_path: Path
) -> None:
    """Preset, sites and fields reach the recipe, and the report."""
    options = attention_options(
        "qiu2025", ("block_kv=64", "delta_from=dP*P", "dp=float32")
    )
    request = asked(checkpoints / "m-step10", attention=options, cures=False, layers=(0,))
    result = study.diagnose(request, tmp_path / "out")
    (recipe,) = (x.rounded.recipe for x in chain)
    assert (recipe.preset, recipe.block_kv, recipe.delta_from) == ("qiu2025", 64, "dP*P")
    assert recipe.sites["dp"] == "float32"
    assert result.attention == options


@pytest.fixture
def run(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> Callable[..., tuple[int, str, str]]:
    """`numdev diagnose ARGUMENTS` in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    short = ("--length", "12", "--sequences", "2", "--device", "cpu", "-o", "out")
    return lambda *arguments: ran(capsys, "diagnose", *arguments, *short)


def test_nothing_to_measure(run: Any) -> None:
    """Tokens that see nothing but themselves have no chain: the report is there, exit
    code 3."""
    captured(Path("calls.safetensors"), 1, "grad_out")
    code, out, err = run("calls.safetensors")
    assert code == 3
    assert "could be measured: no query sees more than one key" in err
    assert " ".join(out.split()).startswith("NOT JUDGED: 2 of 2 heads, ")
    assert Path("out/report.json").exists()


def checkpoint(path: Path, *, fill: float = 1.0) -> Path:
    """A directory that looks like one of Hugging Face's."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a.weight": torch.full((4, 2), fill)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("name", "in_file", "step"),
    [("flash-seed0-step500", "", 500), ("checkpoint-20", "", 20), ("iter_0007", "", 7),
     ("model", "", None), ("step5-final", "", None), ("x-step5", '{"step": 7}', 7),
     ("x-step5", '{"step": "7"}', 5), ("x-step5", "{", 5), ("x-step5", '{"step": true}', 5),
     ("x-step5", "[" * 100_000, 5)],
)  # fmt: skip
def test_the_step_is_told_or_in_the_name(
    tmp_path: Path, name: str, in_file: str, step: Any
) -> None:
    """By training.json, which may be damaged or say nothing; else at the end of the
    name."""
    path = checkpoint(tmp_path / name)
    (path / "training.json").write_text(in_file)
    assert training_step(path) == step


def test_a_checkpoint_that_broke_is_left_out(tmp_path: Path) -> None:
    """With its name, its tensor and how many elements; alone it is an error."""
    good = checkpoint(tmp_path / "m-step1")
    bad = checkpoint(tmp_path / "m-step2", fill=float("nan"))
    stages, left_out = find_stages([str(good), str(bad)])
    assert [stage.step for stage in stages] == [1]
    assert left_out == ("m-step2: a.weight holds 8 NaN or infinite elements; left out.",)
    with pytest.raises(MeasurementError, match=r"m-step2: a.weight holds 8 NaN"):
        find_stages([str(bad)])


def test_weights_of_every_dtype_are_tested_for_nan(tmp_path: Path) -> None:
    """Formats of 8 bits, integers and bools too; what PyTorch does not compute with is
    told by name."""
    path = checkpoint(tmp_path / "m-step1")
    for dtype in (*FLOATS, torch.int8, torch.uint16, torch.bool, torch.complex64):
        save_file({"a.weight": torch.ones(2).to(dtype)}, path / "model.safetensors")
        [[stage], left_out] = find_stages([str(path)])
        assert (stage.step, left_out) == (1, ())
    for dtype in FLOATS:
        x = torch.tensor([1.0, math.nan]).to(dtype)
        save_file({"a.weight": x}, path / "model.safetensors")
        with pytest.raises(MeasurementError, match=r"a\.weight holds 1 NaN or infinite"):
            find_stages([str(path)])
    torch.save({"a.weight": torch.eye(2).to_sparse()}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(
        MeasurementError, match=r"a\.weight: torch\.float32, torch\.sparse"
    ):
        find_stages([str(path)])


def test_every_target_is_refused_before_one_is_measured(tmp_path: Path) -> None:
    """A YAML file with other keys than cases, captured tensors without gradients, and a
    factory for a checkpoint that names its model, each behind a target that is sound."""
    good = tmp_path / "good.safetensors"
    captured(good, 6, "grad_out")
    captured(tmp_path / "lacks.safetensors", 6)
    (tmp_path / "keys.yaml").write_text(
        "seed: 3\ncases: [{name: a, heads: 1, seq_len: 4, head_dim: 4}]"
    )
    for name, says in (
        ("keys.yaml", "takes nothing but `cases`, got 'seed'"),
        ("lacks.safetensors", "stores no grad_out for"),
    ):
        with pytest.raises(UsageError, match=says):
            study.diagnose(asked(good, tmp_path / name), tmp_path / "out")
    sound, bare = checkpoint(tmp_path / "whole"), tmp_path / "bare.pt"
    torch.save({"a.weight": torch.ones(2)}, bare)
    with pytest.raises(UsageError, match="whole: says itself which model it is"):
        study.diagnose(asked(bare, sound, model="json:loads"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_byte_model_reads_the_text_of_its_training(tmp_path: Path) -> None:
    """Windows of the text that training.json names; random bytes, and a note, where it is
    gone; and what the request names."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 40)
    path = byte_model(tmp_path / "run", text)
    stage = Stage(target=str(path), name="golden-seed0-step1")
    ids_file = tmp_path / "ids.safetensors"
    file, origin = write_training_text(asked(path), stage, ids_file)
    assert origin == (
        "golden-seed0-step1 reads 2 × 12 bytes of what it was trained on, 320 "
        "bytes of text.txt."
    )
    ids = load_file(file)["input_ids"]
    assert all(bytes(row).decode() in text.read_text() for row in ids.tolist())
    result = study.diagnose(asked(path, cures=False, kernels=()), tmp_path / "out")
    assert origin in result.summary.notes
    assert write_training_text(asked(path, text=(str(text),)), stage, ids_file) == (
        None,
        None,
    )
    text.write_text("ABCDEFGH" * 40)
    assert (
        "which are not those of its training"
        in write_training_text(asked(path), stage, ids_file)[1]
    )
    about = json.loads((path / "training.json").read_text())
    for data in (None, 3):
        (path / "training.json").write_text(json.dumps({**about, "data": data}))
        _, origin = write_training_text(asked(path), stage, ids_file)
        assert (
            "text.txt as they are here; training.json does not say which they were"
            in origin
        )
    for asked_for in (None, 3, {"model": None}):
        (path / "training.json").write_text(json.dumps({"request": asked_for}))
        file, origin = write_training_text(asked(path), stage, ids_file)
        assert file is None
        assert origin.endswith(
            "training.json does not say what it learned; give --text or --inputs."
        )
    (path / "training.json").write_text(json.dumps(about))
    text.unlink()
    file, origin = write_training_text(asked(path), stage, ids_file)
    assert file is None
    assert origin.startswith("golden-seed0-step1 reads random bytes: ")


def test_what_is_no_series(tmp_path: Path) -> None:
    """Two series in one directory; nothing there; a text file; one checkpoint twice."""
    for variant in ("bf16-seed0", "fa2-seed0"):
        checkpoint(tmp_path / f"both/{variant}-step5")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "text.txt").write_text("words")
    for targets, says in (
        ([tmp_path / "both"], r"2 checkpoints are from step 5.*name one series"),
        ([tmp_path / "nothing"], "no such file or directory"),
        ([empty], r"holds no checkpoint.*a training keeps them with `checkpoints:`"),
        ([empty / "text.txt"], r"text\.txt"),
        (["demo", "demo"], "is given twice"),
        ([], "diagnose: expected a target, got none"),
    ):
        with pytest.raises(UsageError, match=says):
            find_stages([str(target) for target in targets])


def test_a_report_that_contradicts_itself_is_not_shown(
    tmp_path: Path, capsys: Any
) -> None:
    """A ranked head that no row is of: exit code 3, and the line says which."""
    path = tmp_path / "calls.safetensors"
    captured(path, 6, "grad_out")
    write(study.diagnose(asked(path), tmp_path / "out"), tmp_path)
    data = json.loads((tmp_path / "report.json").read_text())
    del data["digest"]
    assert ran(capsys, "report", tmp_path)[0] == 0
    data["summary"]["ranking"][0]["case"] = "another"
    text = json.dumps(data, separators=(",", ":"))
    (tmp_path / "report.json").write_bytes(with_digest(text.encode()))
    code, out, err = ran(capsys, "report", tmp_path)
    assert (code, out) == (3, "")
    assert "summary.ranking: expected heads of the report, got calls#0 H" in err
