"""The command line as a user meets it: exit codes, one-line errors, and both streams."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import click
import gate_rows
import pytest
from commands import STARTED, ran, unstarted

import numdev
from numdev import report
from numdev.cli import check, completion_candidates, version_line
from numdev.cli.gate import gated
from numdev.cli.main import COMMANDS, FOREIGN, cli
from numdev.cli.options import cluster_options
from numdev.cli.session import Session, raising_lost_interrupts
from numdev.formats import FORMATS
from numdev.gate import judging
from numdev.gate.rules import Rules
from numdev.kernels import all_kernels
from numdev.kernels.emulation.recipe import PRESETS
from numdev.request_models import demo_checkpoint
from numdev.studies.audit.journal import JOURNAL

ROOT = Path(numdev.__file__).parent.parent
TINY = """\
cases:
  - {name: tiny, batch: 2, seq_len: 8, head_dim: 8, causal: true,
     heads: 2}
kernels: [sdpa-math]
"""
MANY = """\
cases: [{name: many, heads: 2, head_dim: 4,
  seq_len: [3, 4, 5, 6, 7, 8, 9, 10]}]
kernels: ["slow_kernel:attend"]
"""
SLOW = """\
import time

def attend(q, k, v):
    time.sleep(0.06)
    return (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype) @ v
"""


class Ran(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Run a command in an empty directory with `tiny.yaml` and `many.yaml`."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "wrong.yaml").write_text(TINY.replace("heads", "hedas"))
    (tmp_path / "many.yaml").write_text(MANY)
    (tmp_path / "slow_kernel.py").write_text(SLOW)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "slow_kernel.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments: str) -> Ran:
        # What a report says of itself
        monkeypatch.setattr(sys, "argv", ["numdev", *arguments])
        return Ran(*ran(capsys, *arguments))

    yield command
    sys.modules.pop("slow_kernel", None)


def spawn(*arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    """`numdev ARGUMENTS` as a process of its own, with one thread as the tests have."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    command, pipe = [sys.executable, "-m", "numdev", *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe)


def lines_of(path: Path) -> int:
    """How many lines a file has; none where it is not there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_one_line(ran: Ran, code: int, *parts: str) -> None:
    """One line on stderr that names all `parts`, nothing on stdout, no traceback."""
    assert ran.code == code, ran.err
    assert ran.out == ""
    message = unstarted(ran.err)
    assert message.startswith("numdev: error: ")
    assert message.count("\n") == 1
    assert "Traceback" not in ran.err
    for part in parts:
        assert part in ran.err


USAGE = [
    ("audit no/where", "no/where: no such file", "give a checkpoint"),
    (
        "audit wrong.yaml",
        "wrong.yaml, line 3: unknown key 'cases.0.hedas'",
        "did you mean 'heads'",
    ),
    ("audit .", "has no config.json", "give"),
    (
        "audit tiny.yaml --kernel sdpa-flsh",
        "unknown kernel 'sdpa-flsh'",
        "did you mean 'sdpa-fl",
    ),
    ("audit tiny.yaml --kernel nowhere:attend", "cannot import 'nowhere'", "PYTHONPATH"),
    (
        "audit tiny.yaml --kernel slow_kernel:atend",
        "no function 'atend'",
        "did you mean 'attend'?",
    ),
    (
        "audit tiny.yaml --kernel os:getcwd",
        "os:getcwd",
        "a kernel is a function of q, k, v",
    ),
    ("audit tiny.yaml --format bf17", "unknown format 'bf17'", "did you mean 'bf16'?"),
    ("audit tiny.yaml --format float8_e4m3fn", "no kernel takes plain 8-bit", "float16"),
    ("audit tiny.yaml --format tf32", "format tf32: PyTorch has no dtype", "use float64"),
    ("audit demo --layers 5-3", "--layers: expected e.g. 0,3-5, got '5-3'", ""),
    ("audit demo --heads 3-", "--heads: expected e.g. 0,3-5", "got '3-'"),
    ("audit demo --heads \u00b2", "--heads: expected e.g. 0,3-5", "got '\u00b2'"),
    ("audit org/none", "org/none: no such file", "`hf download org/none`"),
    ("audit tiny.yaml --layers 0", "tiny.yaml", "leave"),
    ("audit demo --length 0", "--length: expected a whole number of at least 1", "got 0"),
    ("audit --fast", "--fast", "see `numdev audit --help`"),
    ("check none.py:attend", "none.py: no such file", ""),
    ("check other/slow_kernel.py:x", "name 'slow_kernel' is taken by", "rename the file"),
    ("check slow_kernel.py:atend", "no function 'atend'", "did you mean 'attend'?"),
    ("check sdpa-flash --claim preset", "--claim: expected NAME=VALUE", ""),
    ("aduit", "no command 'aduit'; did you mean 'audit'?", "see `numdev --help`"),
    ("report none", "none: cannot read a report", "give"),
    ("bounds", "expected RUN, got none", "numdev bounds --help"),
    ("gate out --init --json", "--init only writes rules", "-o"),
    ("audit \x1b[2Jevil", "[2Jevil: no such file", ""),  # no escape sequence is sent on
    *(
        (f"{name} ", "an argument is empty", "not set?")
        for name in ("diagnose", "audit", "gate")
    ),
]


@pytest.mark.parametrize(("line", "what", "hint"), USAGE)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    run: Any, line: str, what: str, hint: str
) -> None:
    """What is wrong and what to do, before anything is measured or any directory made."""
    ran = run(*line.split(" "))
    assert_one_line(ran, 2, what, hint)
    assert "\x1b" not in ran.err
    assert not Path("numdev-reports").exists()


@pytest.mark.parametrize(
    ("line", "code", "what"),
    [
        ("audit tiny.yaml --heads 7", 2, "no attention call was selected; "),
        ("check sdpa-cudnn --device cpu", 3, "sdpa-cudnn cannot run here: needs CUDA"),
        (
            "audit demo --layers 9 --device cpu",
            2,
            "no attention call in layers 9; there are",
        ),
        # Code that exits while it is imported does not pass for a success.
        ("audit tiny.yaml --kernel exits:attend", 2, "SystemExit: 0 (exits.py, line 1)"),
        # What it raises is no Ctrl-C that somebody pressed, and no traceback.
        (
            "audit tiny.yaml --kernel interrupts:attend",
            3,
            f"{FOREIGN} raised KeyboardInterrupt: x",
        ),
        (
            "audit tiny.yaml --kernel strange:attend",
            3,
            f"{FOREIGN} raised GeneratorExit: x",
        ),
    ],
)
def test_what_cannot_be_measured_is_exit_code_3(
    run: Any, line: str, code: int, what: str
) -> None:
    """The request is sound, and nothing could be measured; or it asks for what is not
    there."""
    Path("exits.py").write_text("raise SystemExit(0)\n")
    Path("interrupts.py").write_text("raise KeyboardInterrupt('x')\n")
    Path("strange.py").write_text("raise GeneratorExit('x')\n")
    assert_one_line(run(*line.split(" ")), code, what)


@pytest.mark.parametrize(("error", "says", "is_bug"), [
    (ZeroDivisionError("by\nzero \x1b[31m"), ("unexpected ZeroDivisionError: by zero"), True),
    (OSError(28, "No space left", "out/x"), "out/x: No space left; is the disk full or not writable?", False),
    (OSError(21, "Is a directory", "out/x"), "error: out/x: Is a directory\n", False),
])  # fmt: skip
def test_an_unexpected_error_is_one_line_and_exit_code_3(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str, is_bug: bool
) -> None:
    """Never Python's own 1, a failed gate's; --debug shows a bug's traceback."""
    monkeypatch.setattr("numdev.report.read", Mock(side_effect=error))
    ran = run("report", "x")
    assert_one_line(ran, 3, says)
    assert "\x1b" not in ran.err
    assert ("--debug" in ran.err) is is_bug
    if is_bug:
        with pytest.raises(ZeroDivisionError):
            run("--debug", "report", "x")


def test_the_result_is_on_stdout_and_the_rest_on_stderr(run: Any) -> None:
    """The table on stdout; where the report is, on stderr; three files in the
    directory."""
    ran = run("audit", "tiny.yaml", "-o", "out")
    assert ran.code == 0
    assert "sdpa-math" in ran.out
    assert ran.err == f"audit{STARTED}out\nReport: out/report.html\n"
    files = ["report.html", "report.json", "rows.csv", JOURNAL]
    assert sorted(p.name for p in Path("out").iterdir()) == files


def test_json_is_the_report_and_nothing_else(run: Any) -> None:
    """stdout parses as the report that was written, although a kernel prints."""
    Path("chatty_kernel.py").write_text(
        "print('imported')\n\ndef attend(q, k, v, is_causal=False):\n"
        "    print('hello')\n    return v * 1.0\n"
    )
    ran = run(
        "audit", "tiny.yaml", "-o", "out", "--json", "--kernel", "chatty_kernel:attend"
    )
    assert ran.code == 0
    assert ran.out.strip() == Path("out", "report.json").read_text()
    assert json.loads(ran.out)["request"]["target"] == "tiny.yaml"
    assert "hello" in ran.err


def test_a_model_that_was_downloaded_is_found_by_its_name(
    run: Any, monkeypatch: Any
) -> None:
    """In the cache of Hugging Face, as `hf download org/tiny` leaves it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "cache")
    model = Path("cache/models--org--tiny")
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("1" * 40)
    shutil.copytree(demo_checkpoint(), model / "snapshots" / ("1" * 40))
    ran = run(
        "audit", "org/tiny", "--layers", "0", "--kernel", "sdpa-math", "--length", "9"
    )
    assert (ran.code, "org/tiny, 8 x 9 random token ids" in ran.out) == (0, True)


def test_an_audit_judges_itself(run: Any) -> None:
    """With the gate's code, page and files; a wrong rule file costs no measurement."""
    Path("doubled.py").write_text(
        "def twice(q, k, v, is_causal=False):\n    return 2 * v\n"
    )
    wrong = ("--kernel", "doubled:twice", "--reproducers", "0")
    ran = run("audit", "tiny.yaml", "-o", "out", "--gate", "--junit", "files/out.xml")
    assert (ran.code, ran.out.strip()[:4], ran.err) == (
        0,
        "PASS",
        f"audit{STARTED}out\nReport: out/report.html\n",
    )
    assert ran.out == run("gate", "out").out
    assert "<testsuite" in Path("files/out.xml").read_text()
    ran = run("audit", "tiny.yaml", "-o", "bad", "--github", *wrong)
    assert (ran.code, "::error title=doubled" in ran.out) == (1, True)
    ran = run("audit", "tiny.yaml", "-o", "bad", "--gate", "--json", *wrong)
    assert (ran.code, json.loads(ran.out)["kind"]) == (1, "audit")
    assert run("audit", "tiny.yaml", "-o", "new", "--thresholds", "no.yaml").code == 2
    assert not Path("new").exists()


@pytest.mark.slow
def test_a_check_says_its_verdict_first(run: Any, tmp_path: Path) -> None:
    """A function in a file of a package: PASS, FAIL, or NOT JUDGED where gradients were
    asked for and there are none; the cause; the same as data; a script that runs from
    anywhere."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "mine.py").write_text(
        "import torch\n\n@torch.no_grad()\ndef right(q, k, v, scale=0.125):\n"
        "    return torch.softmax((q @ k.mT * scale).float(), -1).to(v.dtype) @ v\n\n"
        "def wrong(q, k, v):\n    return right(q, k, v, 0.1)\n"
    )
    small = ("--case", "full", "--case", "padding", "--claim", "preset=eager", "-o", "out",
             "--format", "bfloat16")  # fmt: skip
    judged = {
        "PASS": (0, "right"),
        "NOT JUDGED": (3, "right", "--backward"),
        "FAIL": (1, "wrong"),
    }
    for verdict, (code, name, *more) in judged.items():
        result = run("check", f"pkg/mine.py:{name}", *small, *more, "--json")
        data = json.loads(result.out)
        assert (result.code, data["verdict"], data["kernel"]) == (
            code,
            verdict,
            f"pkg.mine:{name}",
        )
        assert "no parameter for it: mask" in data["not_tested"][0]
    assert data["findings"][0]["cause"].startswith("the scale is 0.800 times")
    assert run("check", "pkg/mine.py:wrong", *small).out.split()[:2] == [
        "FAIL",
        "pkg.mine:wrong",
    ]
    wide = run("check", "pkg/mine.py:wrong", *small)
    for line in (wide.out + wide.err).splitlines():
        assert line == line.rstrip()
        assert len(line) <= 80 or " " not in line.strip(), line  # a path stays whole
    shown = subprocess.run([sys.executable, data["reproducer"]], capture_output=True)
    assert shown.returncode == 1, shown.stderr


def test_kernels_are_listed_with_reasons(run: Any) -> None:
    """Every built-in kernel: available, or why not, and what it is in a whole sentence;
    the same as JSON; its options where they are asked for."""
    ran = run("kernels", "--device", "cpu")
    assert (ran.code, ran.err) == (0, "")
    assert "sdpa-cudnn" in ran.out
    assert "Options:" not in ran.out
    assert "Options: " in run("kernels", "-v").out
    listed = json.loads(run("kernels", "--json").out)
    assert [k["summary"] for k in listed if not k["summary"].endswith(".")] == []
    table = {k["name"]: k["missing"] for k in listed}
    assert table["sdpa-math"] is None
    assert table["baseline"] is None


@pytest.mark.parametrize("command", [[], *([name] for name in sorted(COMMANDS))])
def test_every_help_ends_with_an_example_that_parses(
    run: Any, command: list[str]
) -> None:
    """The last line is an example; its command exists and accepts its options."""
    ran = run(*command, "--help")
    assert (ran.code, ran.err) == (0, "")
    last = ran.out.rstrip().splitlines()[-1].strip()
    assert last.startswith("Example:  numdev ")
    assert all(len(line) <= 100 for line in ran.out.splitlines())
    name, *arguments = last.removeprefix("Example:  numdev ").split()
    assert not command or name == command[0]
    cli.get_command(Mock(), name).make_context(name, list(arguments))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"]
)
@pytest.mark.one_in(3)
def test_stopped_at_any_moment_it_continues(
    run: Any, tmp_path: Path, number: int
) -> None:
    """SIGINT: exit code 130, one line, finished rows stay. The same command finishes a
    run that was stopped with the rows and the summary of the undisturbed one."""
    assert run("audit", "many.yaml", "-o", "whole", "-q").code == 0
    undisturbed, expected = (
        (tmp_path / "whole" / JOURNAL).read_bytes(),
        report.read(Path("whole")),
    )
    process, journal = (
        spawn("audit", "many.yaml", "-o", "cut", cwd=tmp_path),
        Path("cut") / JOURNAL,
    )
    while process.poll() is None and lines_of(journal) < 3:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert not Path("cut/report.json").exists()
    assert 1 < lines_of(journal) < undisturbed.count(b"\n")  # the first is the request
    if number == signal.SIGINT:
        assert (process.returncode, out) == (130, b""), err
        assert unstarted(err.decode()).strip() == (
            "numdev: error: interrupted; finished rows are kept; run the same "
            "command to resume"
        )
        assert undisturbed.startswith(journal.read_bytes())
    else:
        assert process.returncode == -signal.SIGKILL
    ran = run("audit", "many.yaml", "-o", "cut")
    assert (ran.code, "Continued an earlier run" in ran.err) == (0, True)
    result = report.read(Path("cut"))
    assert (result.rows, result.summary) == (expected.rows, expected.summary)
    assert journal.read_bytes() == undisturbed


def test_an_interrupt_that_was_swallowed_is_not_lost() -> None:
    """Where something eats the KeyboardInterrupt, the next look finds it; the handler is
    back."""
    before = signal.getsignal(signal.SIGINT)
    with raising_lost_interrupts() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("words", "at", "offered"),
    [("numdev au", 1, "plain,audit"), ("numdev report --format m", 3, "plain,markdown")],
)
def test_the_shell_gets_its_completions_and_nothing_else(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: str, at: int, offered: str
) -> None:
    """No error on the line being typed, and exit code 0; so too for a shell's start
    file."""
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(at))
    monkeypatch.setenv("_NUMDEV_COMPLETE", "bash_complete")
    result = run()
    assert (result.code, result.out, result.err) == (0, f"{offered}\n", "")
    monkeypatch.setenv("_NUMDEV_COMPLETE", "zsh_source")
    result = run()
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("#compdef numdev")


def completed(words: str, run: Any, monkeypatch: Any) -> list[str]:
    """What bash is offered for the last of these words."""
    monkeypatch.setenv("COMP_WORDS", f"numdev {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    monkeypatch.setenv("_NUMDEV_COMPLETE", "bash_complete")
    return [line.partition(",")[2] for line in run().out.splitlines()]


@pytest.mark.parametrize(("words", "offered"), [
    ("audit --kernel sdpa-f", ["sdpa-flash"]), ("check sdpa-m", ["sdpa-math"]),
    ("effects --against flashi", ["flashinfer"]), ("sweep --format bf", ["bfloat16"]),
    ("logprobs --format float8", ["float8_e4m3fn", "float8_e5m2"]), ("check --format tf", ["tf32"]),
    ("invariance --axis hidden", ["hidden", "hidden-nan"]), ("diagnose --preset go", ["golden2024"]),
    ("audit de", ["demo", "de"]), ("audit --kernel mine.py", ["mine.py"]),
])  # fmt: skip
def test_the_shell_is_offered_kernels_formats_and_axes(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: str, offered: list[str]
) -> None:
    """By every command that takes one; a file where no kernel's name begins so."""
    assert completed(words, run, monkeypatch) == offered


def test_what_the_shell_is_offered_is_what_there_is() -> None:
    """Every built-in kernel, format and preset, and none that is not."""
    ours = {
        k.name
        for k in all_kernels().values()
        if str(k.function.__module__).startswith("numdev.")
    }
    assert {*completion_candidates.KERNELS} == ours
    assert {*completion_candidates.FORMATS} == {*FORMATS}
    assert {*completion_candidates.PRESETS} == {*PRESETS}


def test_help_is_short_and_help_all_is_whole(run: Any) -> None:
    """A command with many options shows the common ones, says how many more there are,
    and shows each once with `--help-all`; one with few shows all."""
    assert "--help-all" not in run("kernels", "--help").out
    for name in (
        "audit",
        "check",
        "effects",
        "invariance",
        "sweep",
        "logprobs",
        "diagnose",
    ):
        short, whole = run(name, "--help").out, run(name, "--help-all").out
        command = cli.get_command(click.Context(cli), name)
        flags = [p.opts[0] for p in command.params if isinstance(p, click.Option)]
        shown = [f for f in flags if re.search(rf"^  (-\w, )?{f}\b", short, re.MULTILINE)]
        assert (
            f"\n{len(flags) - len(shown)} more options: numdev {name} --help-all\n"
            in short
        )
        assert 5 <= len(shown) < len(flags)
        assert "-h, --help" in short
        for flag in (*flags, "--help", "--help-all"):
            pattern = rf"^  (-\w, )?{flag}\b(?!-)"
            assert len(re.findall(pattern, whole, re.MULTILINE)) == 1, flag


def test_the_version_names_the_commit_and_torch(run: Any, monkeypatch: Any) -> None:
    """Of a source tree its commit, with a plus where files differ; of an installation
    from a repository the one that pip noted; else none. Nothing heavy is imported."""
    dist = SimpleNamespace(
        read_text=lambda name: '{"vcs_info": {"commit_id": "0123456789"}}'
    )
    line = re.compile(r"numdev \S+( \(commit \w+\+?\))?, torch \d\S+, Python \d\S+\n")
    assert line.fullmatch(run("--version").out)
    monkeypatch.setattr(
        version_line.importlib.metadata, "distribution", lambda name: dist
    )
    assert version_line.commit_of_install() == "01234567"
    dist.read_text = lambda name: None
    assert version_line.commit_of_install() == ""
    monkeypatch.setattr(version_line.numdev, "__file__", "/nowhere/numdev/__init__.py")
    assert version_line.commit_of_source() == ""
    assert "commit" not in run("--version").out


@pytest.mark.parametrize(("words", "workers", "scheduler"), [
    ([], None, None), (["--workers", "3"], 3, None),
    (["--workers", "tcp://10.0.0.1:8786"], None, "tcp://10.0.0.1:8786"),
])  # fmt: skip
def test_workers_are_a_number_or_an_address(
    words: list[str], workers: int | None, scheduler: str | None
) -> None:
    """Processes here, or those of a scheduler."""
    seen: list[Any] = []
    command = click.command()(
        cluster_options(lambda workers, scheduler: seen.append((workers, scheduler)))
    )
    command.main(words, standalone_mode=False)
    assert seen == [(workers, scheduler)]


def test_a_configuration_that_numdev_ships_is_found(run: Any) -> None:
    """Named as in the documentation, from a folder without it, the error says where it
    is."""
    result = run("sweep", "configs/sweep/ci.yaml")
    assert result.code == 2
    start, _, path = result.err.strip().partition("; numdev's own is ")
    assert start == "numdev: error: configs/sweep/ci.yaml: cannot be read (no such file)"
    assert Path(path).is_file()
    for other in ("configs/sweep/none.yaml", "configs/../../x.yaml"):
        assert "give a YAML file" in run("sweep", other).err


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_failure(run: Any, tmp_path: Path) -> None:
    """`numdev report ... | head -1`: exit code 0 and nothing on stderr, as text and as
    JSON."""
    assert run("audit", "tiny.yaml", "-o", "out", "-q").code == 0
    for option in ([], ["--format", "json"]):
        process = spawn("report", "out", *option, cwd=tmp_path)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_a_reader_that_leaves_numdevs_own_options(option: str, tmp_path: Path) -> None:
    """They print while click still reads the command line."""
    process = spawn(option, cwd=tmp_path)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("flag", ["--json", None])
def test_no_kernel_measured_is_exit_code_3(run: Any, flag: str | None) -> None:
    """Every kernel was skipped: its verdict, which comes first, says so. Beside one that
    ran: 0."""
    cuda = ("--device", "cpu", "--kernel", "sdpa-cudnn")
    ran = run("audit", "tiny.yaml", *cuda, "-o", "out", *([flag] if flag else []))
    assert ran.code == 3
    assert ran.err.splitlines()[-1] == (
        "numdev: error: no kernel under audit could be measured; out/report.json says why"
    )
    (verdict,) = report.read(Path("out")).verdicts
    assert (verdict.outcome, verdict.finding) == ("unmeasured", 0)
    if flag is None:
        verdict_said = " ".join(ran.out.split())
        assert verdict_said.startswith("NOT JUDGED sdpa-cudnn bfloat16 was requested,")
    assert (
        run("audit", "tiny.yaml", *cuda, "--kernel", "sdpa-math", "-o", "both").code == 0
    )
    assert run("audit", "tiny.yaml", "--kernel", "baseline", "-o", "plain").code == 0


HEAVY = ("torch", "transformers", "pandas", "scipy", "dask", "distributed", "triton")
TENSORS = ("torch", "transformers", "dask", "distributed", "triton")


def without(
    packages: tuple[str, ...], *lines: list[str]
) -> subprocess.CompletedProcess[str]:
    """One process in which these packages cannot be imported, `numdev` with each of the
    lines of arguments; it ends at the first that fails."""
    code = (
        "import sys\n"
        f"for name in {packages!r}: sys.modules[name] = None\n"
        "from numdev.cli.main import main\n"
        f"for line in {lines!r}:\n"
        "    try: main(line)\n"
        "    except SystemExit as stop:\n"
        "        if stop.code: raise\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_check_that_passes_imports_only_what_it_uses() -> None:
    """Half of its time is imports: it writes no script (jinja2), draws nothing
    (matplotlib), opens no model (transformers), and autograd has no need of sympy."""
    unused = ("jinja2", "matplotlib", "pandas", "transformers", "sympy", "dask")
    answer = without(unused, ["check", "baseline", "--case", "decode"])
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("PASS") == 2


def test_help_needs_nothing_heavy() -> None:
    """`numdev --help`, and the help of every command with its example."""
    answer = without(HEAVY, ["--help"], *([name, "--help"] for name in COMMANDS))
    assert answer.returncode == 0, answer.stderr
    assert "Judge:" in answer.stdout
    assert answer.stdout.count("Example:  numdev") == 1 + len(COMMANDS)


@pytest.mark.slow
def test_reports_are_read_without_tensors(run: Any) -> None:
    """Showing a report and judging it need neither torch nor what comes with it."""
    assert (
        run("audit", "demo", "--layers", "0", "--rows", "16", "-q", "-o", "out").code == 0
    )
    answer = without(
        TENSORS, ["report", "out"], ["report", "out", "--format", "json"], ["gate", "out"]
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.index("sdpa-flash") < answer.stdout.index("{")
    assert "PASS" in answer.stdout.rpartition("}")[2]


REFUSING = {
    "audit": ["demo"],
    "sweep": [str(ROOT / "configs" / "sweep" / "ci.yaml")],
    "effects": ["demo"],
    "invariance": ["demo"],
    "diagnose": ["demo"],
    "logprobs": ["rollout.jsonl", "trainer.jsonl"],
    "train": [str(ROOT / "configs" / "train" / "tiny-ci.yaml")],
    "weights": ["a", "b"],
}
"""Every command that writes a report of its own request, and what it is asked for."""


@pytest.mark.parametrize("name", REFUSING)
def test_a_report_of_another_command_is_not_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite replaces what the same command wrote, and nothing else."""
    other = "compare" if name == "audit" else "audit"
    (tmp_path / "report.json").write_text(
        f'{{"schema_version":2,"kind":"{other}","rows":['
    )
    (tmp_path / JOURNAL).write_text('{"header":{"request":{}}}\n')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, _, err = ran(capsys, name, *REFUSING[name], "-o", tmp_path, "--overwrite")
    last = err.splitlines()[-1]  # a sweep says its size first
    assert code == 2
    assert (
        f"error: {tmp_path}: already holds the report of a different numdev {other}"
        in last
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def checked(created: report.AuditReport) -> Any:
    """What a check of a kernel that fails hands to the command line."""
    return SimpleNamespace(
        report=created, kernel="mine", passed=False, verdict="FAIL", in_short="in short",
        skipped=("not tested",), notes=("a note",), reproducer=Path("r.py"),
    )  # fmt: skip


def test_a_checks_json_has_each_number_under_its_name() -> None:
    """The number and its limit; what was not tested and what else is to be known; of
    several heads and tensors the cause of the one that a finding is about."""
    wrong = {"suspicion": "the scale is 1", "suspicion_cut": 50.0}
    rows = gate_rows.together([
        gate_rows.row(0), gate_rows.row(1, expected_ratio=2.5),
        gate_rows.row(0, tensor="dq", **wrong), gate_rows.row(1, tensor="dq"),
        *(gate_rows.row(h, tensor=t) for t in ("dk", "dv") for h in (0, 1)),
    ])  # fmt: skip
    data = check.check_as_data(checked(gate_rows.report(*rows)))
    assert (data["not_tested"], data["notes"]) == (("not tested",), ("a note",))
    assert [(f["rule"], f["number"], f["limit"], f["place"], f["cause"])
            for f in data["findings"]] == [
        ("function", None, None, "layer 0 head 0", "the scale is 1"),
        ("error", 2.5, 1.1, "layer 0 head 1", None),
    ]  # fmt: skip
    assert check.CODES == {"PASS": 0, "FAIL": 1, "NOT JUDGED": 3}


def test_a_check_says_how_many_findings_it_does_not_show() -> None:
    """The verdict shows one, four are shown below it, and of two it is said that they are
    there."""
    rules = [("expected_ratio", 1.1), ("baseline_ratio", 2), ("worst_row", 5), ("row_rel", 1),
             ("rms", 1), ("mean_abs", 0.5), ("max_abs", 1)]  # fmt: skip
    book = Rules.model_validate({"thresholds": [
        {"name": name, "metric": name, "at_most": limit, "where": {"head": i}}
        for i, (name, limit) in enumerate(rules)
    ]})  # fmt: skip
    rows = [gate_rows.row(i, **{name: 9.0}) for i, (name, _) in enumerate(rules)]
    created = judging.judged(gate_rows.report(*rows), book)
    count = len(created.findings)
    document = check.check_document(checked(created))
    more = [item.text for node in document.blocks for item in getattr(node, "items", ())]
    assert more[-1] == f"And {count - 1 - check.SHOWN} more findings."
    assert count == 7


def test_each_request_has_a_directory_of_its_own() -> None:
    """By its name and all that it asks for; the same request goes where it went."""
    session = Session(
        output=None, overwrite=False, as_json=False, quiet=True, verbose=False
    )
    with click.Context(click.Command("audit"), info_name="audit"):
        one, same, other = (
            session.directory("demo", request)
            for request in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3})
        )
    assert one == same != other
    assert re.fullmatch(r"numdev-reports/demo-[0-9a-f]{8}", str(one))


def test_the_rules_of_a_verdict_go_into_the_run() -> None:
    """Those that were asked for; none where there is no verdict."""
    session = Session(
        output=None, overwrite=True, as_json=False, quiet=True, verbose=False
    )
    asked: Any = SimpleNamespace(limits="mine")
    for verdict, rules in ((asked, "mine"), (None, None)):
        passed = session.run_judged_study(
            verdict, lambda *args, **more: (args, more), "a"
        )
        assert passed[0] == ("a",)
        assert (passed[1]["rules"], passed[1]["overwrite"]) == (rules, True)


def test_a_reports_table_is_its_rows(tmp_path: Path, capsys: Any) -> None:
    """As CSV the first table that has any, not the last."""
    stored = report.read(ROOT / "tests" / "data" / "reports" / "invariance.json")
    report.write(stored, tmp_path)
    code, out, _ = ran(capsys, "report", tmp_path, "--format", "csv")
    assert (code, out) == (0, (tmp_path / "rows.csv").read_bytes().decode())


def test_a_gates_json_is_all_that_is_on_stdout(tmp_path: Path, capsys: Any) -> None:
    """With its exit code; annotations are on stderr then, and on stdout beside a page."""
    report.write(gate_rows.report(gate_rows.row(expected_ratio=9.0)), tmp_path)
    code, out, err = ran(capsys, "gate", tmp_path, "--json", "--github")
    assert (code, json.loads(out)["exit_code"]) == (1, 1)
    assert "::error " in err
    code, out, err = ran(capsys, "gate", tmp_path, "--github")
    assert "::error " in out
    assert not err


def test_an_option_of_the_verdict_asks_for_one() -> None:
    """`--junit`, `--summary`, `--github` and `--thresholds` imply `--gate`; without any
    there is none."""
    seen: list[Any] = []
    command = click.command()(gated(lambda verdict: seen.append(verdict), files=True))
    for words in (
        [],
        ["--gate"],
        ["--github"],
        ["--junit", "j.xml"],
        ["--summary", "s.md"],
    ):
        command.main(words, standalone_mode=False)
    assert [verdict is not None for verdict in seen] == [False, True, True, True, True]
