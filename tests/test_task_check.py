"""Task folders and definition files: sound solutions pass, faulty ones fail, and what is
not taken is told in one line."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from loaded import ROOT
from torch import Tensor

import numdev.testing
from numdev.cli.main import cli
from numdev.errors import UsageError
from numdev.operations.function.definitions import read_definition
from numdev.operations.function.problem_files import module_of
from numdev.operations.function.task_folders import TaskFolder
from numdev.report import FunctionReport
from numdev.task_check import check_definition, check_task
from numdev.testing import CheckResult

TASK, DEFINITION = ROOT / "examples" / "task", ROOT / "examples" / "definition"
FILE = DEFINITION / "definition.json"


def invoked(*command: str) -> tuple[int, dict[str, object]]:
    words = ["check", *command, "--json"]
    ran = CliRunner().invoke(cli, words, standalone_mode=False)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return int(ran.return_value or 0), json.loads(ran.output)


def cases_of(result: CheckResult) -> set[str]:
    return {row.case for row in result.report.rows if row.role == "kernel"}


# --- task folders ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [("submission", 0), pytest.param("wrong_submission", 1, marks=pytest.mark.slow)],
)
def test_a_submission_is_checked_beside_its_task(name: str, code: int) -> None:
    """On a CPU, though its inputs are made on "cuda"; the task's own tolerance passes
    both."""
    assert invoked(str(TASK / f"{name}.py"), "--task", str(TASK))[0] == code


@pytest.mark.slow
def test_the_task_of_the_example_passes_its_wrong_submission_by_its_tolerance() -> None:
    result = check_task(TASK / "wrong_submission.py", task=TASK)
    assert result.verdict == "FAIL"
    assert cases_of(result) == {
        "rows=48, width=320, seed=11", "rows=48, width=320, seed=11 again",
        "rows=100, width=300, seed=12", "rows=100, width=300, seed=12 again",
    }  # fmt: skip
    assert {r.tensor for r in result.report.rows} == {"output"}
    folder = TaskFolder.read(TASK)
    with tempfile.TemporaryDirectory() as place:
        surroundings = folder.unpacked(Path(place), "cpu")
        with surroundings.entered(), surroundings.on_its_device():
            task = surroundings.module_at(TASK / "reference.py")
            wrong = surroundings.function_at(
                f"{TASK / 'wrong_submission.py'}:custom_kernel"
            )
            for sizes in folder.tests:
                data = task.generate_input(**sizes)
                assert task.check_implementation(data, wrong(data).clone())[0]


def written(folder: Path, reference: str, submission: str = "", **task: object) -> Path:
    """Writes a task folder of one test, n = 40, and returns its submission's path."""
    folder.mkdir(exist_ok=True)
    data = {"lang": "py", "tests": [{"n": 40, "seed": 3}], **task}
    (folder / "task.yml").write_text(json.dumps(data))
    (folder / "reference.py").write_text(f"import torch\n{reference}")
    (folder / "submission.py").write_text(f"import torch\n{submission or SAME}")
    return folder / "submission.py"


SAME = "from reference import ref_kernel as custom_kernel\n"
DRAW = """
def generate_input(n, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(n, n, device="cuda", generator=g)
    return x, torch.empty(n, n, device="cuda")
"""
DOUBLE = f"""{DRAW}
def ref_kernel(data):
    x, out = data
    out[...] = x.cuda() * 2
    torch.cuda.synchronize()
    return out
"""


@pytest.mark.parametrize(
    ("submission", "verdict", "words"),
    [
        (SAME, "PASS", ""),
        ("def custom_kernel(data):\n    return data[0] * 2\n", "PASS", ""),
        (
            "def custom_kernel(data):\n    data[1][:39] = data[0][:39] * 2\n"
            "    return data[1]\n",
            "FAIL",
            "NaN",
        ),
        (
            "def custom_kernel(data):\n    out = data[1]\n"
            "    return out.copy_(data[0] * 2)\n",
            "PASS",
            "",
        ),
        (
            "def custom_kernel(data):\n    return data[0].mul_(2)\n",
            "FAIL",
            "it writes into its inputs (data_0)",
        ),
    ],
)
def test_memory_for_an_output_may_be_written_and_is_nan_before(
    tmp_path: Path, submission: str, verdict: str, words: str
) -> None:
    path = written(tmp_path / "t", DOUBLE, submission)
    result = check_task(path, task=path.parent)
    assert result.verdict == verdict, str(result)
    assert words in " ".join(str(result).split())
    assert not result.skipped  # the output's memory is no input that is not judged


def test_memory_that_the_reference_leaves_alone_may_be_written(tmp_path: Path) -> None:
    reference = f"{DRAW}\ndef ref_kernel(data):\n    return data[0] * 2\n"
    wrote = "def custom_kernel(data):\n    return data[1].copy_(data[0] * 2)\n"
    path = written(tmp_path / "t", reference, wrote)
    result = check_task(path, task=path.parent)
    assert result.passed, str(result)
    assert not result.skipped


def test_integers_and_inputs_that_are_integers(tmp_path: Path) -> None:
    reference = """
def generate_input(n, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 9, (n,), device="cuda", generator=g, dtype=torch.uint8)

def ref_kernel(data):
    return torch.bincount(data, minlength=9)
"""
    path = written(tmp_path / "sound", reference)
    assert check_task(path, task=path.parent).passed
    wrong = "def custom_kernel(data):\n    return torch.bincount(data[1:], minlength=9)\n"
    path = written(tmp_path / "wrong", reference, wrong)
    result = check_task(path, task=path.parent)
    assert result.verdict == "FAIL"
    assert "differ" in str(result)


def test_inputs_may_be_objects_of_the_tasks_own_classes(tmp_path: Path) -> None:
    reference = """
class Config:
    def __init__(self, scale):
        self.scale = scale

def generate_input(n, seed):
    return Config(3.0), {"x": [torch.randn(n)]}

def ref_kernel(data):
    return data[0].scale * data[1]["x"][0]
"""
    path = written(tmp_path / "t", reference)
    code, data = invoked(str(path), "--task", str(path.parent))
    assert (code, data["verdict"]) == (0, "PASS")


def test_sizes_are_given_or_the_smaller_tests_run(tmp_path: Path) -> None:
    tests = [{"n": n, "seed": 1} for n in (4096, 32, 1024)]
    path = written(tmp_path / "t", DOUBLE, tests=tests)
    result = check_task(path, task=path.parent)
    assert cases_of(result) == {"n=32, seed=1", "n=32, seed=1 again"}
    [sentence] = result.skipped
    assert sentence == (
        "Not run: 2 of 3 tests, the larger ones (from n=1024, seed=1 on); --shape "
        "n=1024,seed=1 runs one."
    )
    other = check_task(path, task=path.parent, shapes="n=48")
    assert cases_of(other) == {"n=48, seed=1", "n=48, seed=1 again"}
    with pytest.raises(UsageError, match="expected NAME=VALUE of n, seed, got 'm=3'"):
        check_task(path, task=path.parent, shapes="m=3")


def test_a_constant_that_the_reference_asks_for_is_told(tmp_path: Path) -> None:
    reference = DOUBLE.replace("    g =", "    assert n == 40, 'n is 40'\n    g =")
    path = written(tmp_path / "t", reference)
    assert check_task(path, task=path.parent).passed
    with pytest.raises(UsageError, match="AssertionError: n is 40"):
        check_task(path, task=path.parent, shapes="n=8")


@pytest.mark.parametrize(
    ("reference", "task", "words"),
    [
        ("", {}, "expected a function ref_kernel, got none"),
        (
            f"{DOUBLE}\ndef holds(x):\n    return bool((x > 0).all())\n"
            "def check_implementation(data, output):\n    return holds(output), ''\n",
            {},
            "check_implementation judges outputs by their properties, not by ref_kernel",
        ),
        (DOUBLE, {"multi_gpu": True}, "the task runs on several GPUs"),
        (DOUBLE, {"lang": "cu"}, "lang: expected py, got cu"),
        (DOUBLE, {"tests": []}, "expected a list of tests"),
        (DOUBLE, {"files": [{"name": "u.py", "source": "../u.py"}]}, "no such file"),
        (DOUBLE, {"files": 3}, "task.yml, line 1: files: expected a valid list, got 3"),
        (DOUBLE, {"files": ["u.py"]}, "files.0: expected a valid dictionary"),
        (DOUBLE, {"files": [{"name": "..", "source": "reference.py"}]}, "to '..'"),
        (DOUBLE, {"tests": [3]}, "tests.0: expected a valid dictionary, got 3"),
        (DOUBLE, {"multi_gpu": "a"}, "multi_gpu: expected a valid boolean"),
        ("import nope\n" + DOUBLE, {}, "reference.py cannot be imported"),
        ("raise SystemExit(3)\n" + DOUBLE, {}, "SystemExit: 3 ("),
        (DRAW + "def ref_kernel(data) -> 3\n", {}, "not valid Python"),
        (
            f"{DOUBLE}\ndef generate_input(n, seed):\n    return torch.zeros(1 << 25)\n",
            {},
            "has 33554432 numbers in its inputs: at most 16777216 are run",
        ),
    ],
)
def test_a_task_that_is_not_taken_is_told_in_one_line(
    tmp_path: Path, reference: str, task: dict[str, object], words: str
) -> None:
    path = written(tmp_path / "t", reference, **task)
    with pytest.raises(UsageError) as caught:
        check_task(path, task=path.parent)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["task.yml", "reference.py", "submission.py"])
@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x81", None])
def test_a_file_of_a_task_that_is_binary_or_a_folder_is_told(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = written(tmp_path / "t", DOUBLE)
    file = path.parent / name
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        check_task(path, task=path.parent)
    assert name in str(caught.value) or content is None
    assert "\n" not in str(caught.value)


def test_sizes_of_any_length_are_ordered(tmp_path: Path) -> None:
    """A test beyond the range of floats is not made, and keeps no other from running."""
    path = written(tmp_path / "t", DOUBLE, tests=[{"n": 10**400}, {"n": 8, "seed": 1}])
    result = check_task(path, task=path.parent)
    assert result.passed
    assert "Not run: 1 of 2 tests" in result.skipped[0]


def test_a_check_that_uses_the_reference_through_other_names_is_taken(
    tmp_path: Path,
) -> None:
    text = f"{DOUBLE}\ndef close(data, out):\n    return bool((ref_kernel(data) == out).all())"
    text += "\ncheck_implementation = lambda data, output: (close(data, output), '')\n"
    path = written(tmp_path / "t", text)
    assert TaskFolder.read(path.parent).tests == ({"n": 40, "seed": 3},)


def test_a_submission_that_raises_or_has_no_kernel(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t", DOUBLE, "def custom_kernel(data):\n    return data[7]\n"
    )
    code, data = invoked(str(path), "--task", str(path.parent))
    assert (code, data["verdict"]) == (3, "NOT JUDGED")
    path.write_text("")
    with pytest.raises(UsageError, match="expected a function custom_kernel, got none"):
        invoked(str(path), "--task", str(path.parent))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--inputs", "a.py:f"], "a task has inputs of its own"),
        (["--format", "float16"], "has formats of its own"),
        (["--problem", "p.py"], "expected one of --problem and --task, got both"),
        (["--case", "ties"], "are of attention alone"),
    ],
)
def test_options_that_go_with_no_task_are_refused(options: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        invoked(str(TASK / "submission.py"), "--task", str(TASK), *options)
    assert words in str(caught.value)


def test_match_is_the_check_of_a_task_file(tmp_path: Path) -> None:
    """`check_implementation = match(ref_kernel)`, on data that is one argument."""
    shutil.copytree(TASK, tmp_path / "matched")
    file = tmp_path / "matched" / "reference.py"
    text = (
        file.read_text().split("def check_implementation")[0].replace('"cuda"', '"cpu"')
    )
    text = text.replace(
        "from task import input_t, output_t", "input_t = output_t = tuple"
    )
    file.write_text(
        f"from numdev.testing import match\n{text}check_implementation = match(ref_kernel)\n"
    )
    task = module_of(file)
    data = task.generate_input(rows=24, width=64, seed=5)
    right = task.ref_kernel(data).clone()
    assert task.check_implementation(data, right) == (True, right_words())
    is_right, words = task.check_implementation(data, right * 1.05)
    assert not is_right
    assert words.startswith("the output (bfloat16) ")
    unwritten = torch.full_like(right, torch.nan)
    assert not task.check_implementation(data, unwritten)[0]


def right_words() -> str:
    return "output in 1 case, bfloat16; rules: beside-reference."


# --- definitions ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("solution", 0), ("wrong_solution", 1)])
def test_a_solution_is_checked_beside_its_definition(name: str, code: int) -> None:
    command = [str(DEFINITION / f"{name}.json"), "--definition", str(FILE)]
    assert invoked(*command)[0] == code


def changed(tmp_path: Path, **parts: object) -> Path:
    """Writes the example's definition with other parts, and returns its path."""
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**json.loads(FILE.read_text()), **parts}))
    return path


def test_a_solution_may_be_a_function_that_returns_its_outputs(tmp_path: Path) -> None:
    text = json.loads(FILE.read_text())["reference"]
    (tmp_path / "returns.py").write_text(text)
    result = check_definition(
        f"{tmp_path / 'returns.py'}:run", definition=FILE, shapes="batch=7"
    )
    assert result.passed, str(result)
    assert cases_of(result) == {"batch=7", "batch=7 again"}
    with pytest.raises(UsageError, match="expected a variable axis of batch, got hidden"):
        check_definition(DEFINITION / "solution.json", definition=FILE, shapes="hidden=3")


def test_workloads_give_sizes_numbers_and_tensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    reference = "def run(x, rows, scale):\n    return x[rows] * scale\n"
    form = {"shape": ["batch", "hidden"], "dtype": "bfloat16"}
    inputs = {
        "x": form,
        "rows": {"shape": ["chosen"], "dtype": "int64"},
        "scale": {"shape": None, "dtype": "float32"},
    }
    axes = {"batch": {"type": "var"}, "chosen": {"type": "var"},
            "hidden": {"type": "const", "value": 24}}  # fmt: skip
    outputs = {"out": {"shape": ["chosen", "hidden"], "dtype": "bfloat16"}}
    path = changed(
        tmp_path, axes=axes, inputs=inputs, outputs=outputs, reference=reference
    )
    (tmp_path / "gather.py").write_text(reference)
    target = f"{tmp_path / 'gather.py'}:run"
    with pytest.raises(UsageError, match="rows is int64, whose meaning it does not tell"):
        check_definition(target, definition=path)
    save_file({"r": torch.tensor([3, 1, 4, 1, 5])}, tmp_path / "rows.safetensors")
    workload = {
        "axes": {"batch": 16, "chosen": 5},
        "inputs": {
            "x": {"type": "random"},
            "rows": {
                "type": "safetensors",
                "path": "rows.safetensors",
                "tensor_key": "r",
            },
            "scale": {"type": "scalar", "value": 0.3},
        },
    }

    def by_name(seed: int) -> dict[str, object]:
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return {"scale": 0.3, "rows": torch.tensor([1, 1, 2]), "x": x}

    named = check_definition(target, definition=path, inputs=by_name)
    assert named.passed, str(named)
    in_order = check_definition(
        target,
        definition=path,
        inputs=lambda seed: tuple(by_name(seed)[n] for n in inputs),
    )
    assert isinstance(in_order.report, FunctionReport)
    names = {record.input for record in in_order.report.inputs}
    assert names == {"x", "rows", "scale 0.3 as 0.6"}
    calls = tmp_path / "calls.jsonl"
    calls.write_text(f"{json.dumps({'workload': workload})}\n" * 4)
    result = check_definition(target, definition=path, inputs=calls)
    assert result.passed, str(result)
    assert result.skipped[0] == "Not run: 1 of 4 workloads, the later ones."
    calls.write_text("{}\n")
    with pytest.raises(UsageError, match="line 1: axes: expected a value, got none"):
        check_definition(target, definition=path, inputs=calls)


STORED = {"type": "safetensors", "path": "t.safetensors", "tensor_key": "x"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"\xff\xfe\x00", "line 1: expected value"),
        ("[" * 9999, "recursion limit exceeded"),
        (3, "line 1: expected a valid dictionary"),
        ({"axes": {"batch": 1.5}, "inputs": {}}, "line 1: axes.batch: expected"),
        ({"axes": {}, "inputs": {}}, "line 1: axes: expected a size of batch, got none"),
        ({"axes": {"batch": 0}}, "inputs: expected a value, got none"),
        ({"axes": {"batch": 0}, "inputs": {}}, "a positive size of batch, got 0"),
        ({"axes": {"batch": -1}, "inputs": {}}, "a positive size of batch, got -1"),
        ({"axes": {"batch": 10**12}, "inputs": {}}, "expected x to fit into memory"),
        ({"axes": {"batch": 10**30}, "inputs": {}}, "expected x to fit into memory"),
        ({"y": {"type": "random"}}, "expected inputs of x, weight, got y"),
        ({"x": 3}, "line 1: inputs.x: "),
        ({"x": {"type": "file"}}, "line 1: inputs.x: "),
        ({"x": {"type": "scalar", "value": 3}}, "bfloat16 [5, 192], got a number"),
        ({"x": {**STORED, "path": "no.safetensors"}}, "no.safetensors: no such file"),
        ({"x": {**STORED, "path": "w.jsonl"}}, "line 1: w.jsonl: SafetensorError"),
        ({"x": {**STORED, "tensor_key": "y"}}, "line 1: t.safetensors: SafetensorError"),
        ({"x": STORED}, "x: expected bfloat16 [5, 192], got float32 [5, 192]"),
    ],
)
def test_a_line_that_is_no_workload_is_told(
    tmp_path: Path, line: object, words: str
) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(5, 192)}, tmp_path / "t.safetensors")
    file = tmp_path / "w.jsonl"
    if isinstance(line, dict) and "axes" not in line:
        line = {"axes": {"batch": 5}, "inputs": line}
    text = line if isinstance(line, str) else json.dumps(line, default=str)
    file.write_bytes(line if isinstance(line, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        check_definition(DEFINITION / "solution.json", definition=FILE, inputs=file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": "nope.jsonl"}, "nope.jsonl: No such file or directory"),
        ({"shapes": "batch=0"}, "expected a positive size of batch, got 0"),
        ({"shapes": "batch=1000000000000"}, "expected x to fit into memory"),
    ],
)
def test_inputs_that_cannot_be_made_are_told(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_definition(DEFINITION / "solution.json", definition=FILE, **options)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"spec": {"language": "cuda", "entry_point": "k.cu::f"}}, "got cuda"),
        (
            {"spec": {"language": "python", "entry_point": "main.py:run"}},
            "expected FILE::NAME of its sources",
        ),
        ({"sources": [{"path": "../x.py", "content": ""}]}, "expected a relative path"),
        ({"sources": [{"path": ".", "content": ""}]}, ".: cannot be written (Is a dir"),
        ({"sources": [{"path": "a\0b", "content": ""}]}, "(embedded null byte)"),
        (
            {"sources": [{"path": p, "content": ""} for p in ("a", "a/b")]},
            "a/b: cannot be written (File exists)",
        ),
        (
            {"sources": [{"path": "main.py", "content": "raise SystemExit(3)"}]},
            "cannot be imported: SystemExit: 3",
        ),
        ({"name": 3}, "name: expected a valid string, got 3"),
    ],
)
def test_a_solution_that_is_not_taken_is_told(
    tmp_path: Path, part: dict[str, object], words: str
) -> None:
    data = json.loads((DEFINITION / "solution.json").read_text())
    (tmp_path / "s.json").write_text(json.dumps({**data, **part}))
    with pytest.raises(UsageError) as caught:
        check_definition(tmp_path / "s.json", definition=FILE)
    assert words in str(caught.value)
    assert not (tmp_path.parent / "x.py").exists()


def test_a_definition_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("{")
    for name in ("d.json", "nope.json"):
        with pytest.raises(UsageError):
            read_definition(tmp_path / name)
    wrong = {"x": {"shape": ["batch", "hidden"], "dtype": "float4_e2m1"}}
    path = changed(tmp_path, inputs=wrong)
    with pytest.raises(UsageError, match="dtype float4_e2m1 is none of PyTorch's"):
        check_definition(DEFINITION / "solution.json", definition=path)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"outputs": {}}, "outputs: expected one at least, got none"),
        (
            {"axes": {**json.loads(FILE.read_text())["axes"], "m": {"type": "var"}},
             "outputs": {"out": {"shape": ["m"], "dtype": "bfloat16"}}},
            "out: expected axes of the inputs, got m",
        ),
        ({"outputs": {"out": {"shape": ["batch"], "dtype": "qint8"}}}, "dtype qint8"),
        ({"outputs": {"out": {"shape": ["batch"], "dtype": "bits8"}}}, "dtype bits8"),
        (
            {"inputs": {"x": {"shape": ["batch"], "dtype": "float4_e2m1fn_x2"}}},
            "float4_e2m1fn_x2: expected one of",
        ),
        ({"reference": "raise SystemExit(3)"}, "cannot be imported: SystemExit: 3"),
    ],
)  # fmt: skip
def test_no_solution_is_blamed_for_its_definition(
    tmp_path: Path, parts: dict[str, object], words: str
) -> None:
    path = changed(tmp_path, **parts)
    with pytest.raises(UsageError) as caught:
        check_definition(DEFINITION / "solution.json", definition=path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"reference": "def run(x, weight):\n    return x, x\n"},
            "expected outputs out, its run returns out, 1",
        ),
        (
            {"reference": "def run(x, weight):\n    return {'y': x}\n"},
            "expected outputs out, its run returns y",
        ),
        (
            {"reference": "def run(x, weight):\n    return x.float()\n"},
            "out: expected bfloat16 [24, 192], its run returns float32 [24, 192]",
        ),
        (
            {"reference": "def run(x, weight):\n    return x[1:]\n"},
            "out: expected bfloat16 [24, 192], its run returns bfloat16 [23, 192]",
        ),
    ],
)
def test_a_reference_that_returns_other_outputs_is_told(
    tmp_path: Path, parts: dict[str, object], words: str
) -> None:
    result = check_definition(
        DEFINITION / "solution.json", definition=changed(tmp_path, **parts)
    )
    assert result.verdict == "NOT JUDGED"
    assert words in result.in_short


def test_memory_for_a_complex_output_is_nan(tmp_path: Path) -> None:
    reference = "import torch\ndef run(x):\n    return torch.complex(x, -x)\n"
    inputs = {"x": {"shape": ["batch", "hidden"], "dtype": "float32"}}
    outputs = {"out": {"shape": ["batch", "hidden"], "dtype": "complex64"}}
    definition = changed(tmp_path, inputs=inputs, outputs=outputs, reference=reference)
    solution = json.loads((DEFINITION / "solution.json").read_text())
    for writes, verdict in (("out", "PASS"), ("out[1:]", "FAIL")):
        content = (
            f"import torch\ndef run(x, out):\n    {writes}.copy_(torch.complex(x, -x)"
        )
        content += f"{writes.removeprefix('out')})\n"
        parts = {
            "sources": [{"path": "main.py", "content": content}],
            "spec": {"language": "python", "entry_point": "main.py::run"},
        }
        (tmp_path / "s.json").write_text(json.dumps({**solution, **parts}))
        result = check_definition(tmp_path / "s.json", definition=definition)
        assert result.verdict == verdict, str(result)


def test_an_evaluator_judges_outputs_by_name_or_in_order() -> None:
    evaluator = numdev.testing.Evaluator(FILE)
    x = torch.randn(30, 192).bfloat16()
    weight = torch.rand(192).bfloat16()
    wide = x.double()
    out = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    right: Tensor = out.bfloat16()
    assert evaluator([x, weight], right)[0]
    assert evaluator([x, weight], {"out": right})[0]
    is_right, words = evaluator([x, weight], (right * 1.02,))
    assert not is_right
    assert words.startswith("the output (bfloat16) ")


class Solved:
    """What flashinfer-bench hands an evaluator: a solution that runs."""

    def __init__(self, run: Callable[..., object], *, passes_outputs: bool) -> None:
        self.run = run
        self.metadata = SimpleNamespace(destination_passing_style=passes_outputs)

    def __call__(self, *arguments: object) -> object:
        return self.run(*arguments)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the evaluator asks of flashinfer-bench, in its place."""
    status = SimpleNamespace(RUNTIME_ERROR="raised", INCORRECT_NUMERICAL="wrong")
    data = SimpleNamespace(Correctness=SimpleNamespace, EvaluationStatus=status)
    for name, module in {
        "flashinfer_bench.data": data,
        "flashinfer_bench.bench.utils": SimpleNamespace(make_eval=SimpleNamespace),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)


def copied(x: Tensor, weight: Tensor, out: Tensor) -> None:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-6)
    out.copy_(wide * scale * weight.float())


def returned(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    copied(x, weight, out)
    return out


@pytest.mark.parametrize(
    ("run", "passes_outputs", "status"),
    [
        (copied, True, None),
        (returned, False, None),
        (lambda x, weight: x, False, "wrong"),
        (lambda x, weight: x.to("meta"), False, "wrong"),
        (lambda x, weight, out: None, True, "wrong"),
        (lambda x: x, False, "raised"),
    ],
)
@pytest.mark.usefixtures("bench")
def test_an_evaluator_decides_in_place_of_a_tolerance(
    run: Callable[..., object], passes_outputs: bool, status: str | None
) -> None:
    _, evaluation = numdev.testing.Evaluator.check_correctness(
        definition=read_definition(FILE),
        sol_runnable=Solved(run, passes_outputs=passes_outputs),
        inputs=[[torch.randn(20, 192).bfloat16(), torch.rand(192).bfloat16()]],
        ref_outputs=None, cfg=None, log_path="", device="cpu",
    )  # fmt: skip
    assert (evaluation and evaluation.status) == status


class Sampling:
    """An evaluator of flashinfer-bench's own, of some definitions."""

    @staticmethod
    def can_evaluate(definition: object) -> bool:
        return definition == "sampling"


class Exact(numdev.testing.Evaluator):
    pass


@pytest.mark.parametrize(
    ("evaluators", "definition", "takes_it"),
    [
        ([Sampling, Exact], "rms_norm", True),
        ([Sampling, Exact], "sampling", False),
        ([Exact], "sampling", True),
        ([], "sampling", True),  # it is the default one
    ],
)
def test_an_evaluator_leaves_to_the_others_of_the_registry_what_they_take(
    monkeypatch: pytest.MonkeyPatch,
    evaluators: list[type],
    definition: str,
    takes_it: bool,
) -> None:
    registry = SimpleNamespace(_EVALUATORS=evaluators)
    name = "flashinfer_bench.bench.evaluators.registry"
    monkeypatch.setitem(sys.modules, name, registry)
    assert Exact.can_evaluate(definition) is takes_it
