"""A failed check of a function writes a script that shows the failure by itself, on
smaller inputs, and that shows nothing for a sound function in its place."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import function_examples as examples
import pytest
import torch
from click.testing import CliRunner
from loaded import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from numdev.cli.main import cli
from numdev.errors import MeasurementError, UsageError
from numdev.function_check import check_beside, check_problem
from numdev.metrics.bit_checksums import same
from numdev.operations.function.judged_call import FunctionCall
from numdev.operations.function.reference import FunctionReference
from numdev.operations.function.trees import Arguments
from numdev.studies.audit.function_for_script import _unwritten_text
from numdev.studies.audit.function_reproducer import (
    SAFETENSORS,
    _cut_call,
    _import_of,
    _spelled_call,
    _written,
    sizes_to_cut,
)
from numdev.task_check import check_definition, check_task
from numdev.testing import CheckResult

EXAMPLES = Path(examples.__file__)


def inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 32, generator=generator).bfloat16().T  # not contiguous
    return {"x": x, "w": (1 + torch.rand(256, generator=generator)).bfloat16()}


def checked(name: str, tmp_path: Path, **options: object) -> CheckResult:
    same = {"reference": examples.rms_norm, "inputs": inputs, "reproducers": tmp_path}
    return check_beside(f"{EXAMPLES}:{name}", **{**same, **options})  # type: ignore[arg-type]


def ran(script: Path, *, instead: str = "") -> tuple[int, str]:
    """Runs a script without numdev; `instead`: another function of the examples."""
    if instead:
        text = script.read_text()
        name = next(line for line in text.splitlines() if "import_module(" in line)
        wrong = name.rsplit('"', 2)[1]
        script = script.with_name("other.py")
        script.write_text(text.replace(f'"{wrong}")', f'"{instead}")'))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "scaled",
            "rms error over what the reference's own rounding explains",
            marks=pytest.mark.slow,
        ),
        ("other_eps", "rms error over what the reference's own rounding explains"),
        pytest.param(
            "stale_row",
            "rms error over what the reference's own rounding explains",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "cut",
            "rms error over what the reference's own rounding explains",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "one_nan",
            "elements that are finite or not against the exact result",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "other_dtype", "expected [1, 1], torch.bfloat16", marks=pytest.mark.slow
        ),
        pytest.param("raises", "ValueError: no such kernel", marks=pytest.mark.slow),
    ],
)
def test_a_script_shows_the_failure_alone(name: str, words: str, tmp_path: Path) -> None:
    script = checked(name, tmp_path).reproducer
    assert script is not None
    assert "numdev" not in script.read_text().replace("numdev-", "").split("import ")[1:]
    code, out = ran(script)
    assert code == 1, out
    assert words in out
    code, out = ran(script, instead="fused")
    assert code == 0, out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("writes", "x is written into"),
        pytest.param("alias", "output is memory of x", marks=pytest.mark.slow),
        pytest.param(
            "nothing",
            "no tensor is returned, expected output",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "two", "output_0, output_1 is returned, expected", marks=pytest.mark.thorough
        ),
        pytest.param(
            "column_major", "output is not contiguous", marks=pytest.mark.thorough
        ),
        pytest.param(
            "without_gradient",
            "no gradient goes back from output",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_script_shows_another_form(name: str, words: str, tmp_path: Path) -> None:
    """Also where the shape and the dtype are the reference's."""
    options: dict[str, object] = {"inputs": examples.inputs, "backward": False}
    if name == "without_gradient":
        options["backward"] = True
    script = checked(name, tmp_path, **options).reproducer
    assert script is not None
    code, out = ran(script)
    assert (code, words in out) == (1, True), out
    code, out = ran(script, instead="fused")
    assert code == 0, out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["scaled_record", pytest.param("scaled_twice", marks=pytest.mark.thorough)],
)
def test_a_script_finds_its_tensor_in_what_is_returned(name: str, tmp_path: Path) -> None:
    """In a dataclass, and by its place where a tensor is returned twice."""
    sound = name.replace("scaled", "sound")
    options = {"reference": getattr(examples, sound), "inputs": examples.inputs}
    script = checked(name, tmp_path, **options).reproducer
    assert script is not None
    code, out = ran(script)
    assert code == 1, out
    assert ran(script, instead=sound)[0] == 0


@pytest.mark.slow
def test_a_script_shows_a_wrong_gradient(tmp_path: Path) -> None:
    """The output is right, and what comes back is twice as large."""
    script = checked("twice_back", tmp_path, backward=True).reproducer
    assert script is not None
    code, out = ran(script)
    assert code == 1, out
    assert ran(script, instead="fused")[0] == 0


@pytest.mark.slow
def test_a_script_makes_a_call_before_where_one_is_remembered(tmp_path: Path) -> None:
    script = checked("remembered", tmp_path).reproducer
    assert script is not None
    code, out = ran(script)
    assert code == 1, out
    assert "an earlier call" in script.read_text().replace("\n# ", " ")
    assert ran(script, instead="fused")[0] == 0


@pytest.mark.slow
def test_a_script_is_smaller_and_keeps_equal_sizes_equal(tmp_path: Path) -> None:
    script = checked("scaled", tmp_path).reproducer
    assert script is not None
    stored = load_file(script.with_name("tensors.safetensors"))
    x, w = stored["0.in.x"], stored["0.in.w"]
    assert x.numel() < 32 * 256
    assert x.shape[-1] == w.shape[0]


def test_a_size_that_an_argument_says_is_not_cut() -> None:
    x = torch.zeros(64, 12, 32)
    assert sizes_to_cut(Arguments(positional=(x, torch.zeros(12)))) == [64, 32, 12]
    assert sizes_to_cut(Arguments(positional=(x,), named={"groups": 32})) == [64, 12]


def test_a_call_is_spelled_with_empty_and_nested_arguments() -> None:
    x, w = torch.zeros(2), torch.ones(3)
    positional = ((), [x, (w,)], {"a": (x, ())})
    arguments = Arguments(positional=positional, named={"s": [], "y": w})
    leaves = arguments.leaves()
    call = eval(
        f"as_called({_spelled_call(arguments, leaves)})",
        {"inputs": leaves, "as_called": lambda *args, **named: (args, named)},
    )
    same = tree_map(lambda a, b: a is b if isinstance(a, Tensor) else a == b,
                    call, arguments.tree)  # fmt: skip
    assert all(tree_leaves(same))


def test_a_tensor_where_no_name_reaches_has_no_spelling() -> None:
    hidden = Arguments(positional=(MappingProxyType({"x": torch.zeros(2, 2)}),))
    with pytest.raises(UsageError, match="a script cannot spell the value tensor"):
        _spelled_call(hidden, hidden.leaves())


def test_a_smaller_call_is_judged_by_the_same_rules() -> None:
    x = torch.zeros(4, 6)
    draw = FunctionReference(
        function=torch.relu, arguments=Arguments(positional=(x,)), seed=3, backward=False
    )
    whole = FunctionCall(
        name="a", draws=[draw], others=[Arguments(positional=(x,))], outputs_only=True
    )
    small = _cut_call(whole, 6, 2)
    [of_draw, of_other] = [
        each.leaves()["argument_0"].shape
        for each in (small.draws[0].arguments, small.others[0])
    ]
    assert (of_draw, of_other) == ((4, 2), (4, 2))
    changed = {"draws": whole.draws, "others": whole.others, "looks_closer": True}
    assert vars(dataclasses.replace(small, **changed)) == vars(whole)


@pytest.mark.parametrize(
    ("target", "folder"),
    [
        ("sys:f", None),  # built in
        ("zipimport:f", None),  # frozen into the interpreter
        ("json.decoder:f", str(Path(json.__file__).parents[1])),
        ("json:f", str(Path(json.__file__).parents[1])),
    ],
)
def test_a_module_is_imported_from_the_folder_of_its_file(
    target: str, folder: str | None
) -> None:
    assert _import_of(target) == (*target.split(":"), folder)


@pytest.mark.parametrize("name", ["reproduce.py", "tensors.safetensors"])
def test_a_folder_in_a_files_place_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(MeasurementError, match=f"{tmp_path}: cannot be written"):
        _written(tmp_path, "", {"x": torch.zeros(2)})


def test_a_script_reads_every_dtype_that_its_file_may_have(tmp_path: Path) -> None:
    def can_be_saved(dtype: torch.dtype) -> bool:
        try:
            save_file({"x": torch.empty(2, dtype=dtype)}, tmp_path / "x")
        except Exception:  # neither memory nor a file has it
            return False
        return True

    dtypes = {x for x in vars(torch).values() if isinstance(x, torch.dtype)}
    dtypes.remove(torch.float4_e2m1fn_x2)  # two in a byte: no check takes it
    assert {x for x in dtypes if can_be_saved(x)} <= set(SAFETENSORS.values())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.bool, True),
        (torch.int16, 32767),
        (torch.bfloat16, math.nan),
        (torch.complex64, complex(math.nan, math.nan)),
    ],
)
def test_a_script_makes_memory_for_an_output(dtype: torch.dtype, value: object) -> None:
    text = _unwritten_text(torch.zeros(2, 3, dtype=dtype))
    memory = eval(text, {"torch": torch, "DEVICE": "cpu"})
    expected = torch.full((2, 3), value, dtype=dtype)  # type: ignore[call-overload]
    assert memory.dtype == dtype
    assert same(memory, expected)


@pytest.mark.slow
def test_what_no_script_can_import_is_said(tmp_path: Path) -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return examples.scaled(x, w)

    result = check_beside(
        wrong, reference=examples.rms_norm, inputs=inputs, reproducers=tmp_path
    )
    assert result.reproducer is None
    assert result.notes[-1].startswith("No reproducer: a script cannot import wrong")


def test_a_sound_function_and_a_reference_that_raises_have_no_script(
    tmp_path: Path,
) -> None:
    assert checked("fused", tmp_path).reproducer is None
    result = checked("fused", tmp_path, reference=examples.raises)
    assert result.reproducer is None
    assert not any("reproducer" in note for note in result.notes)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_line_says_where_the_script_is(tmp_path: Path) -> None:
    command = ["check", f"{EXAMPLES}:scaled", "--reference", f"{EXAMPLES}:rms_norm",
               "--inputs", f"{EXAMPLES}:inputs", "--json", "-o", str(tmp_path)]  # fmt: skip
    data = json.loads(CliRunner().invoke(cli, command, standalone_mode=False).output)
    assert ran(Path(data["reproducer"]))[0] == 1


@pytest.mark.slow
def test_a_scalar_is_shown_over_its_draws(tmp_path: Path) -> None:
    result = checked(
        "smoothed_loss", tmp_path, reference=examples.loss,
        inputs=examples.loss_inputs, formats="float32",
    )  # fmt: skip
    assert result.reproducer is not None
    stored = load_file(result.reproducer.with_name("tensors.safetensors"))
    assert sum(name.endswith("in.target") for name in stored) == 8
    assert ran(result.reproducer)[0] == 1
    assert ran(result.reproducer, instead="loss")[0] == 0


DOORS = ROOT / "examples"


def with_sound_code(script: Path, wrong: str, sound: str) -> int:
    """What a script returns where other code stands in the place of the wrong one."""
    other = script.with_name("other.py")
    other.write_text(script.read_text().replace(wrong, sound))
    return ran(other)[0]


def never(x: Tensor) -> Tensor:
    raise AssertionError("it is not run")


CHECKS = {
    "function": lambda **options: check_beside(
        never, reference=never, inputs=never, **options
    ),
    "problem": lambda **options: check_problem("no.py", problem="no.py", **options),
    "task": lambda **options: check_task("no.py", task="no", **options),
    "definition": lambda **options: check_definition(
        "no.py:run", definition="no.json", **options
    ),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_file_for_scripts_is_refused_before_anything_runs(
    check: Any, tmp_path: Path
) -> None:
    """Also above the folder, and in the place of the folder in it that gets the script;
    wrong rules too."""
    (tmp_path / "file").touch()
    (tmp_path / "reproducers").touch()
    words = "/{}: expected a directory for the results, got a file; choose another repro"
    for folder, name in (
        ("file", "file"), ("file/sub", "file"), (".", "reproducers"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words.format(name)):
            check(reproducers=tmp_path / folder, device="cpu")
    with pytest.raises(UsageError, match="thresholds: unknown key 'limit'"):
        check(thresholds={"limit": {}}, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_a_script_makes_the_module_of_a_problem(backward: bool, tmp_path: Path) -> None:
    """Of its class, with the state that the check gave it."""
    folder = DOORS / "problem"
    result = check_problem(
        folder / "wrong_solution.py", problem=folder / "problem.py", backward=backward,
        device="cpu", reproducers=tmp_path,
    )  # fmt: skip
    assert result.reproducer is not None, result.notes
    code, out = ran(result.reproducer)
    assert code == 1, out
    assert with_sound_code(result.reproducer, "wrong_solution.py", "solution.py") == 0


@pytest.mark.slow
def test_a_script_has_the_files_of_a_task_beside_it(tmp_path: Path) -> None:
    folder = DOORS / "task"
    result = check_task(
        folder / "wrong_submission.py", task=folder, device="cpu", power="1e-2",
        reproducers=tmp_path,
    )  # fmt: skip
    assert result.reproducer is not None, result.notes
    assert (result.reproducer.parent / "files" / "task.py").is_file()
    assert ran(result.reproducer)[0] == 1
    wrong, sound = "wrong_submission.py", "submission.py"
    assert with_sound_code(result.reproducer, wrong, sound) == 0
    assert any("tolerance 0.01 passes 4 of 14" in note for note in result.notes)


@pytest.mark.slow
def test_a_script_has_the_sources_and_the_memory_of_a_definition(tmp_path: Path) -> None:
    folder = DOORS / "definition"
    result = check_definition(
        folder / "wrong_solution.json", definition=folder / "definition.json",
        device="cpu", power="1e-2", reproducers=tmp_path,
    )  # fmt: skip
    script = result.reproducer
    assert script is not None, result.notes
    assert "# def run(x, weight):" in script.read_text()
    assert ran(script)[0] == 1
    sound = json.loads((folder / "solution.json").read_text())["sources"]
    for source in sound:
        (script.parent / "files" / source["path"]).write_text(source["content"])
    assert ran(script)[0] == 0
    assert any("passes 0 of 14" in note for note in result.notes)


@pytest.mark.slow
def test_no_script_takes_a_cpu_for_a_gpu(tmp_path: Path) -> None:
    """The check may; the script alone would ask for CUDA."""
    folder = DOORS / "problem"
    solution = tmp_path / "asks.py"
    text = (folder / "wrong_solution.py").read_text()
    solution.write_text(text.replace("import torch\n", 'import torch\nON = "cuda"\n', 1))
    result = check_problem(
        solution, problem=folder / "problem.py", device="cpu", reproducers=tmp_path / "o"
    )
    assert result.verdict == "FAIL"
    assert result.reproducer is None
    assert "No reproducer: the function's file asks for CUDA" in result.notes[-1]


@pytest.mark.slow
def test_a_script_expands_what_was_expanded(tmp_path: Path) -> None:
    """A function that fails on an expanded argument alone fails in its script too."""

    def expanded(seed: int) -> dict[str, Tensor]:
        x = inputs(seed)
        return {**x, "w": x["w"][:1].expand(256)}

    result = checked("takes_w_for_contiguous", tmp_path, inputs=expanded)
    assert result.verdict == "FAIL"
    script = result.reproducer
    assert script is not None
    assert ran(script)[0] == 1
    assert ran(script, instead="rms_norm")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_a_script_finds_its_tensor_in_a_mapping_of_another_order(
    backward: bool, tmp_path: Path
) -> None:
    options = {"reference": examples.sound_mapping, "inputs": examples.inputs}
    result = checked("scaled_mapping", tmp_path, backward=backward, **options)
    script = result.reproducer
    assert script is not None
    assert ran(script)[0] == 1
    for sound in ("sound_mapping", "reversed_mapping"):
        assert ran(script, instead=sound)[0] == 0
