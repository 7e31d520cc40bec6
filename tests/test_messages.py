"""Mistakes that people make on the command line, one or more for every command: each is
told in one line that says what is wrong, what was expected and got, and what to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ran, unstarted
from safetensors.torch import save_file

from numdev.cli import file_kinds
from numdev.cli.file_kinds import ACCEPTS, USES, accepted_by, expect_file, kind_of_path
from numdev.errors import UsageError, similar_file
from numdev.gate.rules import Rules
from numdev.studies.training.config import TrainConfig

ROOT = Path(__file__).parent.parent
REPORTS = Path(__file__).parent / "data" / "reports"
TEXTS = {
    "mine.py": "NUMBER = 3\n\ndef attend(q, k, v, *, causal=False):\n    return v\n\n"
    "def norm(x):\n    return x\n\ndef _private(x):\n    return x\n",
    "syntax.py": "import torch\n\ndef attend(q, k, v)\n    return v\n",
    "raises.py": "import torch\nraise ValueError('no such thing')\n",
    "lacks.py": "import nowhere_at_all\n",
    "empty.py": "",
    "a.b.py": "def attend(q, k, v):\n    return v\n",
    "__main__.py": "def attend(q, k, v):\n    return v\n",
    "late.py": "def __getattr__(name):\n    raise ImportError(f'no {name} here')\n",
    "cases.yaml": "cases:\n  - {name: tiny, heads: 2, seq_len: 8, head_dim: 8}\n",
    "audit.yaml": "cases:\n  - {name: tiny, heads: 2, seq_len: 8, head_dim: 8}\ncontrol: true\n",
    "typo.yaml": "cases:\n  - {name: tiny, hedas: 2, seq_len: 8, head_dim: 8}\n",
    "type.yaml": "cases:\n  - {name: tiny, heads: two, seq_len: 8, head_dim: 8}\n",
    "broken.yaml": "cases:\n  - {name: tiny, heads: 2\nkernels: [\n",
    "list.yaml": "- 1\n",
    "notes.txt": "hello",
    "page.html": "<html>",
    "other.json": "{}",
    "half.json": "{",
    "cut.jsonl": '{"token_ids": [1,2]\n',
    "some.jsonl": '{"a": 1}\n',
}
SHIPPED = {"sweep.yaml": "sweep/ci", "train.yaml": "train/tiny-ci", "rules.yaml": "gate/default",
           "invariance.yaml": "invariance/decode"}  # fmt: skip
SWEEP = "got a YAML file of numdev sweep; numdev sweep sweep.yaml takes it"
TRAIN = "got a YAML file of numdev train; numdev train train.yaml takes it"
HAS = "expected mine.py:FUNCTION, got no function; it has attend(q, k, v, *, causal), norm(x)"
LINE = "syntax.py, line 3: not valid Python (expected ':'): def attend(q, k, v)"
FP8 = "unknown format 'fp8'; give float8_e4m3fn or float8_e5m2"
HEADER = "need a header: give save_file the metadata {'numdev': '{\"version\": 1}'}"
NO_CUDA = "no CUDA device is available here; use --device cpu"
NO_DIRECTORY = "error: notes.txt: expected a directory for the results, got a file; choose another --output"
NORM = "check mine.py:norm --reference mine.py:norm"
MISTAKES = [
    ("aduit demo", 2, "no command 'aduit'; did you mean 'audit'?; see `numdev --help`"),
    ("mine.py", 2, "no command 'mine.py'; numdev check mine.py:FUNCTION takes a Python file"),
    ("mine.py:attend", 2, "no command 'mine.py:attend'; numdev check mine.py:attend"),
    ("sweep.yaml", 2, "no command 'sweep.yaml'; numdev sweep sweep.yaml takes"),
    ("demo", 2, "no command 'demo'; numdev audit demo"),
    ("audit --fast", 2, "no option '--fast'; did you mean '--format'"),
    ("audit demo --kernal x", 2, "no option '--kernal'; did you mean '--kernel'?; see `numdev audit"),
    ("audit runs/model.pt", 2, "runs/model.pt: no such file or directory; give a checkpoint"),
    ("audit folder/none", 2, "folder/none: no such file or directory; give a checkpoint"),
    ("audit org/none", 2, "org/none: no such file or directory; give a checkpoint"),
    ("audit bear.safetensors", 2, "bear.safetensors: no such file or directory; did you mean 'bare.saf"),
    ("audit mine.py", 2, "got a Python file; numdev check mine.py:FUNCTION takes it"),
    ("audit mine.py:attend", 2, "got a function; numdev check mine.py:attend"),
    ("audit sweep.yaml", 2, f"expected a checkpoint, captured tensors, or a YAML file of cases, {SWEEP}"),
    ("audit train.yaml", 2, TRAIN),
    ("audit rules.yaml", 2, "got a YAML file of thresholds; numdev gate REPORT --thresholds rules.yaml"),
    ("audit rep-audit", 2, "got a report; numdev report rep-audit takes it"),
    ("audit page.html", 2, "got a page in HTML; numdev report DIRECTORY takes it"),
    ("audit typo.yaml", 2, "typo.yaml, line 2: unknown key 'cases.0.hedas'; did you mean 'heads'?"),
    ("audit type.yaml", 2, "type.yaml, line 2: cases.0.heads: expected a valid integer, got 'two'"),
    ("audit broken.yaml", 2, "broken.yaml, line 3: not valid YAML: expected ',' or '}'"),
    ("audit list.yaml", 2, "list.yaml: expected a mapping; see examples in configs/"),
    ("audit none.yaml", 2, "none.yaml: cannot be read (no such file); give a YAML file"),
    ("audit weights.safetensors", 2, "weights alone need --model package.module:factory; or give the dir"),
    ("audit bare.safetensors", 2, HEADER),
    ("audit bare", 2, f"bare: has no config.json; captured tensors are named 0.q, 0.k, 0.v and {HEADER}"),
    ("audit notes.txt", 2, "expected .safetensors, .bin, .pt, .pth, .index.json or a distributed che"),
    ("audit demo --format fp8", 2, FP8),
    ("audit demo --format bf17", 2, "unknown format 'bf17'; did you mean 'bf16'?"),
    ("audit demo --format int9", 2, "unknown format 'int9'; known: float64, float32, tf32, bfloat16"),
    ("audit demo --layers 5-3", 2, "--layers: expected e.g. 0,3-5, got '5-3'"),
    ("audit demo --length 0", 2, "--length: expected a whole number of at least 1, got 0"),
    ("audit demo --time-limit nan", 2, "--time-limit: expected a number above 0, got nan"),
    ("audit demo --workers 0", 2, "--workers: expected a whole number of at least 1, got 0"),
    ("audit demo --device gpu", 2, "--device: expected auto or cpu or cuda, got 'gpu'; see `numdev audit"),
    ("audit demo --kernel sdpa-flsh", 2, "unknown kernel 'sdpa-flsh'; did you mean 'sdpa-flash'?"),
    ("audit demo --kernel mine.py", 2, HAS),
    ("audit demo --kernel syntax.py:attend", 2, LINE),
    ("audit demo --thresholds sweep.yaml", 2, f"expected a YAML file of thresholds, {SWEEP}"),
    ("audit demo --effects rep-audit", 2, "expected a report of effects, got one of audit"),
    ("audit demo --effects sweep.yaml", 2, f"--effects sweep.yaml: expected a report, {SWEEP}"),
    ("audit demo --junit folder", 2, "folder: cannot be written (Is a directory)"),
    ("audit demo --summary notes.txt/x", 2, "notes.txt/x: cannot be written (Not a directory)"),
    *((f"{line} -o {path}", 2, NO_DIRECTORY) for path in ("notes.txt", "notes.txt/a/b") for line in (
        "audit demo", "bounds none", "compare none none", "check mine.py:attend", "diagnose demo", NORM,
        "effects demo", "invariance demo", "logprobs a b", "sweep sweep.yaml", "train train.yaml",
        "weights demo demo")),
    ("audit demo -o rep-sweep", 2, "already holds the report of a different numdev sweep; give another"),
    ("check", 2, "expected TARGET, got none; see `numdev check --help`"),
    ("check mine.py", 2, HAS),
    ("check mine.py:", 2, HAS),
    ("check mine.py:nrom", 2, "mine has no function 'nrom'; did you mean 'norm'?"),
    ("check mine.py:NUMBER", 2, "mine.NUMBER: expected a function, got int"),
    ("check mine.py:norm", 2, "takes (x): q, k and v must be its first three arguments"),
    ("check mine", 2, "unknown kernel 'mine'; for a function of mine.py give mine.py:FUNCTION"),
    ("check none.py:attend", 2, "none.py: no such file"),
    ("check none.py", 2, "none.py: no such file"),
    ("check a.b.py:attend", 2, "a.b.py: expected a module's name without a dot, got 'a.b'; rename it"),
    ("check __main__.py:attend", 2, "__main__.py: the module name '__main__' is taken by"),
    ("check late.py:attend", 2, "ImportError: no attend here (late.py, line 2)"),
    ("check torch:add", 2, "kernel torch:add: cannot read the function's parameters; write"),
    ("check empty.py", 2, "expected empty.py:FUNCTION, got no function; it defines none"),
    ("check syntax.py", 2, LINE),
    ("check syntax.py:attend", 2, LINE),
    ("check raises.py:attend", 2, "ValueError: no such thing (raises.py, line 2)"),
    ("check lacks.py:attend", 2, "No module named 'nowhere_at_all' (lacks.py, line 1); is nowhere_at_all"),
    ("check mine.py:attend --case nocase", 2, "'nocase' is not a case, an input regime or a file; did"),
    ("check mine.py:attend --case sweep.yaml", 2, SWEEP),
    ("check mine.py:attend --claim preset", 2, "--claim: expected NAME=VALUE, got 'preset'"),
    ("check mine.py:attend --format fp8", 2, FP8),
    ("check mine.py:attend --thresholds train.yaml", 2, f"expected a YAML file of thresholds, {TRAIN}"),
    ("check mine.py:attend --seed x", 2, "--seed: expected a whole number of at least 0, got x"),
    ("check mine.py:norm --reference mine.py", 2, HAS),
    ("check mine.py:norm --reference syntax.py:norm --shape x=4", 2, LINE),
    (NORM, 2, "inputs: expected a function, a file or shapes, got none; --inputs ref.py:inputs, or --sh"),
    (f"{NORM} --shape 3", 2, "shape: expected NAME=AxBxC, got '3'"),
    (f"{NORM} --shape y=3", 2, "shape: the reference takes x, got 'y'; known: x"),
    (f"{NORM} --inputs none.safetensors", 2, "inputs: none.safetensors: no such file"),
    (f"{NORM} --shape x=4 --power abc", 2, "power: expected a tolerance, got 'abc'; --power 1e-2"),
    (f"{NORM} --problem mine.py", 2, "expected one of --reference and --problem, got both"),
    ("check mine.py:norm --inputs mine.py:norm", 2, "--inputs and --shape need a --reference"),
    ("check mine.py --problem empty.py", 2, "empty.py: expected Model, get_inputs, get_init_inputs, got"),
    ("check mine.py --problem syntax.py", 2, LINE),
    ("check mine.py --problem folder", 2, "folder: expected a file, got a folder"),
    ("check mine.py --problem none.py", 2, "none.py: no such file"),
    ("check mine.py --problem sweep.yaml", 2, f"expected a Python file, {SWEEP}"),
    ("check mine.py --task folder", 2, "folder: expected a folder with task.yml"),
    ("check mine.py --definition half.json", 2, "half.json: Invalid JSON: EOF while parsing"),
    ("check mine.py --definition other.json", 2, "other.json: name: expected a value, got none"),
    ("effects", 2, "expected CHECKPOINT, got none; see `numdev effects --help`"),
    ("effects audit.yaml", 2, "expected a checkpoint, got a YAML file of numdev audit; numdev audit audi"),
    ("effects rep-effects", 2, "expected a checkpoint, got a report; numdev report rep-effects takes it"),
    ("effects demo --generate 0", 2, "--generate: expected a whole number of at least 1, got 0"),
    ("invariance demo --axis bach", 2, "there is no axis 'bach'; did you mean 'batch'?"),
    ("invariance sweep.yaml", 2, SWEEP),
    ("sweep audit.yaml", 2, "expected a YAML file of numdev sweep, got a YAML file of numdev audit"),
    ("sweep train.yaml", 2, f"expected a YAML file of numdev sweep, {TRAIN}"),
    ("sweep invariance.yaml", 2, "got a YAML file of numdev invariance; numdev invariance invariance.ya"),
    ("sweep demo", 2, "demo: cannot be read (no such file); give a YAML file"),
    ("sweep mine.py", 2, "expected a YAML file of numdev sweep, got a Python file"),
    ("sweep sweep.yaml --format fp8", 2, FP8),
    ("train sweep.yaml", 2, f"expected a YAML file of numdev train, {SWEEP}"),
    ("train cases.yaml", 2, "got a YAML file of attention cases; numdev audit cases.yaml takes it"),
    ("train train.yaml --steps 0", 2, "--steps: expected a whole number of at least 1, got 0"),
    ("logprobs a b c", 2, "logprobs: expected one file or two, got 3"),
    ("logprobs none.jsonl", 2, "none.jsonl: no such file"),
    ("logprobs notes.txt", 2, "notes.txt: expected a file .jsonl, .ndjson, .json, .parquet"),
    ("logprobs audit.yaml", 2, "expected records of log-probabilities, got a YAML file of numdev audit"),
    ("logprobs some.jsonl", 3, "some.jsonl line 1: expected token_ids with logprobs, or a record of a p"),
    ("logprobs cut.jsonl", 3, "cut.jsonl line 1: expected a JSON object, got invalid JSON"),
    ("logprobs some.jsonl --top-p 2", 2, "top_p: expected less than or equal to 1, got 2.0"),
    ("gate none", 2, "none: cannot read a report there (No such file or directory); give a report.json"),
    ("gate rep-audot", 2, "cannot read a report there (No such file or directory); did you mean 'rep-audit'?"),
    ("gate audit.yaml", 2, "expected a report, got a YAML file of numdev audit; numdev audit audit.yaml"),
    ("gate page.html", 2, "expected a report, got a page in HTML; numdev report DIRECTORY takes it"),
    ("gate other.json", 3, "schema_version: expected 3, got None; give a report.json that numdev wrote"),
    ("gate nested", 2, "nested/report.json: cannot read a report there (Is a directory); give a report"),
    ("gate rep-audit --thresholds folder", 2, "folder: cannot be read (Is a directory); give a YAML file"),
    ("gate cut", 3, "cut/report.json: not a report this numdev can read: digest: the file was truncated"),
    ("gate rep-audit --thresholds sweep.yaml", 2, f"expected a YAML file of thresholds, {SWEEP}"),
    ("compare rep-audit", 2, "compare: expected two reports or more, got 1"),
    ("compare rep-audit rep-sweep", 2, "measure different things: kind (audit in A, sweep in B); repeat"),
    ("compare rep-audit sweep.yaml", 2, f"expected a report, {SWEEP}"),
    ("report rep-audit --format pdf", 2, "--format: expected terminal or html or markdown or csv or json, got 'pdf'"),
    ("bounds rep-audit", 2, "expected the report of a training run, got one of audit; give the directory"),
    ("bounds train.yaml", 2, f"expected a report, {TRAIN}"),
    ("weights weights.safetensors", 2, "weights: expected two sets or more to compare, got one"),
    ("weights audit.yaml demo", 2, "expected weights, got a YAML file of numdev audit"),
    ("diagnose demo --attention x", 2, "--attention: expected NAME=VALUE, got 'x'"),
    ("diagnose demo --preset nope", 2, "unknown preset 'nope'; known: eager, exact, fa2"),
    ("diagnose mine.py", 2, "expected a checkpoint or captured tensors, got a Python file"),
    ("kernels sdpa-math", 2, "Got unexpected extra argument (sdpa-math); see `numdev kernels --help`"),
    *(() if torch.cuda.is_available() else (
        ("audit demo --device cuda", 2, NO_CUDA), ("check mine.py:attend --device cuda", 2, NO_CUDA),
        ("train train.yaml --device cuda", 2, NO_CUDA))),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of every kind, whole and broken."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    for name, shipped in SHIPPED.items():
        shutil.copy(ROOT / "configs" / f"{shipped}.yaml", folder / name)
    for kind in ("audit", "sweep", "effects"):
        (folder / f"rep-{kind}").mkdir()
        shutil.copy(REPORTS / f"{kind}.json", folder / f"rep-{kind}" / "report.json")
    for name in ("folder", "bare", "cut"):
        (folder / name).mkdir()
    (folder / "nested" / "report.json").mkdir(parents=True)
    text = (REPORTS / "audit.json").read_bytes()
    (folder / "cut" / "report.json").write_bytes(text[:300])
    call = {name: torch.zeros(1, 2, 4, 8) for name in ("q", "k", "v")}
    save_file(call, folder / "bare.safetensors")
    save_file(call, folder / "bare" / "call.safetensors")
    save_file({"layers.0.weight": torch.zeros(4, 4)}, folder / "weights.safetensors")
    return folder


@pytest.mark.parametrize(
    ("line", "code", "words"), MISTAKES, ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_is_told_in_one_line(
    line: str, code: int, words: str, folder: Path, capsys: Any, monkeypatch: Any
) -> None:
    """What is wrong, and what to do; the right exit code; nothing on stdout, nothing
    measured, and never a bug of numdev."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("mine", "raises", "lacks", "syntax", "late"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]  # another test's now, and this one's afterwards
    got, out, err = ran(capsys, *line.split())
    message = unstarted(err)
    assert (got, out) == (code, ""), err
    assert message.startswith("numdev: error: ")
    assert message.count("\n") == 1
    assert words in message
    assert not any(part in message for part in ("Traceback", "a bug of numdev", "Errno"))
    assert ("hf download" in message) == (line == "audit org/none")
    shutil.rmtree(folder / "numdev-reports", ignore_errors=True)


def test_every_command_that_takes_a_file_is_told_of_every_other_kind(
    folder: Path, monkeypatch: Any
) -> None:
    """For all pairs of a kind of file and a command: it takes the file, or says which
    command does."""
    monkeypatch.chdir(folder)
    files = {
        "cases": "cases.yaml", "audit": "audit.yaml", "sweep": "sweep.yaml", "page": "page.html",
        "invariance": "invariance.yaml", "train": "train.yaml", "rules": "rules.yaml",
        "report": "rep-audit", "python": "mine.py", "logprobs": "some.jsonl",
        "tensors": "weights.safetensors",
    }  # fmt: skip
    for kind, file in files.items():
        for command in ACCEPTS:
            words, accepted = accepted_by(command)
            assert kind_of_path(Path(file), accepted) == kind
            if kind in accepted:
                expect_file(file, command)
                continue
            with pytest.raises(UsageError) as caught:
                expect_file(file, command)
            assert f"expected {words}, got {USES[kind].words}; " in str(caught.value)  # type: ignore[index]
    assert files.keys() | {"captured", "task", "definition"} == USES.keys()


def test_the_kinds_of_files_are_those_of_their_readers() -> None:
    """The keys of models that the command line does not import; and every file that
    numdev ships is of the kind whose folder it is in."""
    assert frozenset(TrainConfig.model_fields) == file_kinds.TRAIN_KEYS
    assert frozenset(Rules.model_fields) <= file_kinds.RULE_KEYS
    kinds = {"audit": "cases", "check": "cases", "gate": "rules"}
    for file in sorted((ROOT / "configs").glob("*/*.yaml")):
        name = file.parent.name
        assert kind_of_path(file, ("cases",)) == kinds.get(name, name), file


@pytest.mark.parametrize(("header", "kind"), [
    ("[]", None), ("null", None), ("5", None), ('"x"', None), ("{", None), ("\udcff", None),
    ('{"__metadata__":5}', None), ('{"__metadata__":["numdev"]}', None),
    ('{"__metadata__":"numdev"}', None), ("[" * 9999, None), ("{}", "tensors"),
    ('{"__metadata__":null}', "tensors"), ('{"__metadata__":{"numdev":"{}"}}', "captured"),
])  # fmt: skip
def test_a_header_of_another_json_type_has_no_kind(
    header: str, kind: str | None, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Its reader then says that the file is damaged, and nobody that numdev is."""
    monkeypatch.chdir(tmp_path)
    text, file = header.encode(errors="surrogateescape"), Path("x.safetensors")
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    assert kind_of_path(file) == kind
    code, _, err = ran(capsys, "audit", file)
    assert code == (2 if kind else 3)
    assert "bug" not in err
    assert kind or "x.safetensors: is not a whole safetensors file" in err


@pytest.mark.parametrize("command", ["logprobs {}", "weights {} {}"])
def test_a_tensor_of_a_dtype_that_torch_lacks(
    command: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """A whole file of safetensors' newest dtypes: the line names file and dtype."""
    monkeypatch.chdir(tmp_path)
    entry = {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}
    text, file = json.dumps({"w": entry}).encode(), Path("x.safetensors")
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    code, _, err = ran(capsys, *command.format(file, file).split())
    assert code == 3
    assert "bug" not in err
    assert "x.safetensors: cannot be read: " in err
    assert "F6_E2M3" in err


def test_a_similar_file_is_named_and_no_other(tmp_path: Path) -> None:
    """A slip of the pen, and not a file that shares its ending alone."""
    (tmp_path / "report-1.json").touch()
    assert similar_file(tmp_path / "reprot-1.json") == tmp_path / "report-1.json"
    assert similar_file(tmp_path / "x.json") is None
    assert similar_file(tmp_path / "report-1.json") is None
    assert similar_file(tmp_path / "none" / "report-1.json") is None
