"""The gate in CI: the examples of docs/ci.md are accepted, and our own gate decides."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import refused, run
from gate_rows import report, row
from loaded import load

from numdev.gate import judgement
from numdev.gate.rules import read_rules
from numdev.report import Finding, write

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ci.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
WORKFLOWS = [yaml.safe_load(block) for block in BLOCKS if "\njobs:" in block]
RULES = [block for block in BLOCKS if "\nthresholds:" in block]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def commands_in(step: dict[str, Any]) -> list[list[str]]:
    """The arguments of every `numdev` in a step, whose script bash runs with a stand-in
    for it."""
    script = step.get("run", "")
    if not re.search(r"^numdev ", script, re.MULTILINE):
        return []
    stand_in = 'numdev() { printf "%s\\n" "$@" ""; }\n'  # an empty line ends a command
    shell = ["bash", "-eo", "pipefail", "-c", stand_in + script]
    env = {"PATH": os.environ["PATH"], **step.get("env", {})}
    out = subprocess.run(
        shell, env=env, capture_output=True, text=True, check=True
    ).stdout
    return [command.split("\n") for command in out.split("\n\n")[:-1]]


def acted(passed: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of action.yml with these inputs, filled in as GitHub does."""
    assert passed.keys() <= ACTION["inputs"].keys()
    inputs = {k: v["default"] for k, v in ACTION["inputs"].items()} | passed

    def filled(texts: dict[str, str]) -> dict[str, str]:
        pattern = re.compile(r"\$\{\{ inputs\.(\w+) \}\}")
        return {k: pattern.sub(lambda m: str(inputs[m[1]]), v) for k, v in texts.items()}

    return [
        step | {part: filled(step[part]) for part in ("env", "with") if part in step}
        for step in ACTION["runs"]["steps"]
    ]


@pytest.mark.parametrize(
    "wrong",
    ["gte report", "gate", "gate report --rulez x", "gate a b", "audit demo --device tpu",
     "audit demo --rows 0", "audit --time-limit -1", "gate report --junit"],
)  # fmt: skip
def test_a_wrong_command_line_is_seen(wrong: str) -> None:
    """Of the check: it refuses unknown commands, options and values, and what is
    missing."""
    assert refused(wrong.split()) is not None


def steps(flow: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a workflow, those of our Action in its place."""
    all_steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    ours = [s.get("uses", "").startswith("OWNER/numdev@") for s in all_steps]
    return [s for step, is_ours in zip(all_steps, ours, strict=True)
            for s in (acted(step["with"]) if is_ours else [step])]  # fmt: skip


def test_every_command_of_a_workflow_is_accepted() -> None:
    """Each workflow audits and judges in one command, and keeps what it wrote, come what
    may."""
    for flow in WORKFLOWS:
        lines = [line for step in steps(flow) for line in commands_in(step)]
        for line in lines:
            assert refused(line) is None, line
        (audit,) = (line for line in lines if line[0] == "audit")
        assert "--gate" in audit
        (upload,) = (s for s in steps(flow) if "upload-artifact" in s.get("uses", ""))
        assert upload["if"] == "always()"
        written = {audit[audit.index(option) + 1] for option in ("--output", "--junit")}
        assert set(upload["with"]["path"].split()) == written


def test_inputs_of_the_action() -> None:
    """Every input reaches the command as it is, and none is run; its defaults are
    accepted."""
    passed = {"target": "my model", "kernel": "* b:c", "format": "float16", "backward": "true",
             "thresholds": "x y.yaml", "options": "--rows 256", "output": "$(touch o)"}  # fmt: skip
    (line,) = (line for step in acted(passed) for line in commands_in(step))
    assert refused(line) is None
    assert line[:2] == ["audit", "my model"]
    out = ["--output", "$(touch o)", "--overwrite", "--gate", "--github", "--junit"]
    assert line[2:] == [
        *out, "$(touch o).xml", "--kernel", "*", "--kernel", "b:c", "--format", "float16",
        "--backward", "--thresholds", "x y.yaml", "--rows", "256",
    ]  # fmt: skip
    (line,) = (line for step in acted({}) for line in commands_in(step))
    assert refused(line) is None
    assert "--backward" not in line


def outcome(passed: dict[str, Any]) -> tuple[int, str]:
    """The exit code of the Action with these inputs, and what its steps print, with a
    stand-in for numdev that prints its arguments."""
    (step,) = (
        s for s in acted(passed) if re.search(r"^numdev ", s.get("run", ""), re.MULTILINE)
    )
    shell = ["bash", "-eo", "pipefail", "-c", f'numdev() {{ echo "$@"; }}\n{step["run"]}']
    env = {"PATH": os.environ["PATH"], **step["env"]}
    done = subprocess.run(shell, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "asks"),
    [*((x, True) for x in ("true", "True", "TRUE", "yes", "on", "1", "Yes")),
     *((x, False) for x in ("false", "False", "FALSE", "no", "off", "0", ""))],
)  # fmt: skip
def test_a_truth_value_of_the_action(words: str, asks: bool) -> None:
    """As YAML and people write them."""
    code, out = outcome({"backward": words})
    assert code == 0
    assert ("--backward" in out) == asks


@pytest.mark.parametrize(
    ("passed", "words"),
    [({"backward": "maybe"}, "backward: expected true or false, got maybe"),
     ({"backward": "tru"}, "backward: expected true or false, got tru"),
     ({"target": "--help"}, "target: expected no option, got --help"),
     ({"target": "-h"}, "target: expected no option, got -h"),
     ({"target": ""}, "target: expected a path or a name, got nothing"),
     ({"output": ""}, "output: expected a path or a name, got nothing"),
     ({"output": "--help"}, "output: expected no option, got --help"),
     ({"kernel": "sdpa-math --help"}, "kernel: expected no option, got --help"),
     ({"format": "--version"}, "format: expected no option, got --version"),
     ({"thresholds": "--help"}, "thresholds: expected no option, got --help"),
     ({"options": "--rows 4 --help"}, "options: expected no --help, got --rows 4 --help"),
     ({"options": "-h"}, "options: expected no --help, got -h"),
     ({"options": "--dry-run --version"}, "options: expected no --help")],
)  # fmt: skip
def test_an_input_of_the_action_that_would_audit_nothing(
    passed: dict[str, Any], words: str
) -> None:
    """It is refused in one line: `--help` would end in success."""
    code, out = outcome(passed)
    assert code == 2
    assert words in out
    assert out.count("\n") == 1


@pytest.mark.parametrize("text", RULES, ids=range(len(RULES)))
def test_rule_files_are_read(text: str, tmp_path: Path) -> None:
    """Each example is a rule file, and requires kernels that its workflow audits."""
    file = tmp_path / "gate.yaml"
    file.write_text(text)
    rules = read_rules(file)
    own_steps = steps(WORKFLOWS[RULES.index(text)])
    audited = [w for s in own_steps for line in commands_in(s) for w in line]
    assert rules.required
    assert set(rules.required) <= set(audited)


def test_the_verdict_as_json_is_documented(tmp_path: Path, capsys: Any) -> None:
    """Every key that `--json` has, and no key that it has not, stands in docs/gate.md."""
    page = (ROOT / "docs" / "gate.md").read_text()
    (section,) = re.findall(
        r"^## The verdict as JSON\n(.*?)^## ", page, re.MULTILINE | re.DOTALL
    )
    documented = {name for line in re.findall(r"^(\|.*)", section, re.MULTILINE)
            for name in re.findall(r"`(\w+)`", line)}  # fmt: skip
    records = (
        judgement.Judgement,
        judgement.Test,
        judgement.Power,
        judgement.PlantedDose,
    )
    fields = [item for record in records for item in record.model_fields.items()]
    written = {name for name, field in fields if not field.exclude}
    outcomes = {
        "passed",
        "exceeded",
        "unmeasured",
        "held",
        "undecided",
        "missing",
        "caught",
        "missed",
    }
    assert documented - outcomes == written | {"exit_code", "findings"}
    write(report(row(expected_ratio=9.0)), tmp_path)
    assert run("gate", tmp_path, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == judgement.Judgement.model_fields.keys() | {
        "exit_code",
        "findings",
    }
    assert result["findings"][0].keys() == Finding.model_fields.keys()


gate_script = load("scripts/own_gate.py")


def verdict_of(tmp_path: Path, capsys: Any, **ratios: float) -> dict[str, Any]:
    """What `numdev gate --json` says of kernels with these errors."""
    kernels = {"planted:sound": ratios.get("sound"), "planted:p_truncated": ratios.get("faulty"),
               "sdpa-flash": ratios.get("flash")}  # fmt: skip
    write(
        report(*(row(kernel=k, expected_ratio=x) for k, x in kernels.items() if x)),
        tmp_path,
    )
    code = run("gate", tmp_path, "--json")
    return {**json.loads(capsys.readouterr().out), "returned": code}


def test_sound_kernels_have_to_pass(tmp_path: Path, capsys: Any) -> None:
    """And PyTorch's flash kernel has to be one of them."""
    assert gate_script.wrong_with_sound(verdict_of(tmp_path, capsys, flash=1.0)) is None
    assert "exit code 1" in gate_script.wrong_with_sound(
        verdict_of(tmp_path, capsys, flash=1.5)
    )
    assert "did not run" in gate_script.wrong_with_sound(
        verdict_of(tmp_path, capsys, sound=1.0)
    )


def test_the_planted_fault_has_to_fail(tmp_path: Path, capsys: Any) -> None:
    """With exit code 1 and its name in a message; and the kernel beside it has to be
    cleared."""
    assert (
        gate_script.wrong_with_planted(
            verdict_of(tmp_path, capsys, sound=1.0, faulty=1.5)
        )
        is None
    )
    assert "not caught" in gate_script.wrong_with_planted(
        verdict_of(tmp_path, capsys, sound=1.0, faulty=1.0)
    )
    assert "no message" in gate_script.wrong_with_planted(
        verdict_of(tmp_path, capsys, sound=1.0, flash=1.5)
    )
    assert "accused" in gate_script.wrong_with_planted(
        verdict_of(tmp_path, capsys, sound=1.3, faulty=1.5)
    )
    assert "not judged" in gate_script.wrong_with_planted(
        verdict_of(tmp_path, capsys, faulty=1.5)
    )
