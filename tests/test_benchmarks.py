"""Every file of benchmarks/ and scripts/ can be imported and run: each at its smallest,
in this process, or in the test that is named. A new file has to be in one of these
tables."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import ROOT, load

FILES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "scripts")
    for path in (ROOT / folder).glob("*.py")
)
# Arguments of the smallest run, in which {tmp} is a folder, and words that it prints.
QUICK = {
    "benchmarks/audit_time.py": (
        "--length 32 --heads 2 --head-dim 16 --layers 1 --device cpu",
        "all rows",
    ),
    "benchmarks/dose.py": (
        "planted --small --seeds 1 --steps 1 --device cpu",
        "| planted 30 |",
    ),
    "benchmarks/exact_predictions.py": (
        "--seeds 1 --only matmul",
        "| matmul | yes | 1.0",
    ),
    "benchmarks/function_names.py": ("--only mean", "| mean "),
    "benchmarks/functions.py": (
        "--seeds 1 --only mean --no-faults",
        "accused 0 of 10 sound runs",
    ),
    "benchmarks/gate_speed.py": ("--rows 100 --repeats 1", "| 100 |"),
    "benchmarks/heavy_tails.py": ("--length 100 --samples 2", "every 32nd"),
    "benchmarks/instability.py": ("tests/data/reports/train.json", "|"),
    "benchmarks/invariance_table.py": (
        "--device cpu --kernel sdpa-math --case decode-1024 --axis repeat --no-times",
        "same along repeat",
    ),
    "benchmarks/large_model.py": (
        "{tmp}/model --layers 1 --length 16 --width 128 --rows 8 --kernel sdpa-math",
        "the model's forward pass",
    ),
    "benchmarks/power.py": ("--one 0 --small --to {tmp}/units", ""),
    "benchmarks/public_problems.py": (
        "benchmarks/problems --every 10",
        "| problems/attention | 0 | 0.",
    ),
    "benchmarks/sampling_coverage.py": (
        "--length 300 --samples 2",
        "two bad rows, causal",
    ),
    "benchmarks/suspicion_rates.py": ("--small", "| sdpa-math | 1 |"),
    "benchmarks/wasserstein.py": ("--repeats 1 --count 1000", "0.001 M"),
    "scripts/limits.py": ("", "numdev/metrics"),
    "scripts/walk.py": ("", "functions"),
    "scripts/golden.py": (
        "compare tests/data/reports tests/data/reports",
        "0 differences",
    ),
    "scripts/models_table.py": ("LlamaForCausalLM", "| LlamaForCausalLM | audited: "),
    "scripts/mutate.py": ("--check rel-mean-over-sum", "1 "),
}
SLOW = {
    "benchmarks/narrow_sums.py": ("--only nothing", "0 rows"),
    "benchmarks/logprob_causes.py": (
        "--pairs 1 --sequences 3 --length 24 --model gpt2 --only late$",
        "gpt2: 2 planted, 2 decidable: 2 named",
    ),
    "benchmarks/logprobs_large.py": (
        "{tmp}/run --layers 1 --width 128 --sequences 3 --length 70",
        "rounded runs: first",
    ),
    "benchmarks/bias_calibration.py": (
        "--power --sequences 4 --length 16",
        "| 0.5; nothing |",
    ),
    "benchmarks/effects_large.py": (
        "{tmp}/model --layers 1 --length 16 --width 128",
        "numdev effects, sdpa-flash",
    ),
    "benchmarks/effects_models.py": ("--only LlamaForCausalLM", "LlamaForCausalLM"),
    "benchmarks/half_a_percent.py": ("--sequences 2 --length 32", "numdev"),
    "benchmarks/threads.py": ("--times 1 --threads 2 --small", "|"),
}
THOROUGH = {  # several runs of numdev
    "benchmarks/logprobs_engine.py": (
        "{tmp}/run --steps 2 --behind 2 --prompts 6 --tokens 40 --width 64 --layers 1",
        "as planted  step 2",
    ),
    "benchmarks/true_words.py": ("--only dk-unscaled", "sentences of 1 kernels: "),
    "benchmarks/scaling.py": (
        "--workers 2 --device cpu --length 128 --heads 2 --head-dim 16 --seeds 1",
        "The reports are the same.",
    ),
    "benchmarks/names.py": ("--only sound --doors check", "check, "),
    "benchmarks/gate_rates.py": ("--seeds 1 --small", "sdpa-math"),
    "benchmarks/false_alarms.py": (
        "--seeds 1 --only sdpa-math",
        "1 kernels: 0 of 2 accused",
    ),
}
RUNS = {**QUICK, **SLOW, **THOROUGH}
# What a run needs that a machine may lack, and its line then.
NEEDS = {
    "benchmarks/functions_gpu.py": (
        "",
        "functions_gpu.py: expected a CUDA GPU, got none",
    ),
    "benchmarks/reference.py": ("", "reference.py: expected a CUDA GPU, got none"),
    "scripts/screenshots.py": (
        "{tmp}/images {tmp}/report.html",
        "screenshots.py: expected chromium or google-chrome, got neither",
    ),
}
ELSEWHERE = {  # what runs it
    "benchmarks/judged_functions.py": "benchmarks/functions.py",
    "benchmarks/logprob_programs.py": "benchmarks/logprob_causes.py",
    "benchmarks/more_functions.py": "benchmarks/functions.py",
    "benchmarks/power_tables.py": "benchmarks/power.py",
    "benchmarks/small_functions.py": "tests/test_exact.py",
    "scripts/altered_comparisons.py": "tests/test_compare.py",
    "scripts/altered_reports.py": "tests/test_fuzz.py",
    "scripts/cli_reference.py": "tests/test_docs.py",
    "scripts/fuzz.py": "tests/test_fuzz.py",
    "scripts/kill_and_resume.py": "tests/test_sweep.py",
    "scripts/known_results.py": "tests/test_docs.py",
    "scripts/own_gate.py": "Makefile",
    "scripts/samples.py": "tests/test_docs.py",
    "scripts/site_hooks.py": "mkdocs.yml",
    "scripts/sites_page.py": "tests/test_docs.py",
    "scripts/try_release.py": "Makefile",
}


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Files find their neighbours, and the number of threads stays."""
    threads = torch.get_num_threads()
    for folder in ("benchmarks", "scripts", "tests"):
        monkeypatch.syspath_prepend(ROOT / folder)
    monkeypatch.chdir(ROOT)
    yield
    torch.set_num_threads(threads)


def run(
    file: str, arguments: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    monkeypatch.setattr(sys, "argv", [file, *arguments.format(tmp=tmp_path).split()])
    return load(file).main()


@pytest.mark.parametrize("file", FILES)
def test_every_file_is_imported_and_run_somewhere(file: str) -> None:
    load(file)
    tables = [
        table for table in (QUICK, SLOW, THOROUGH, NEEDS, ELSEWHERE) if file in table
    ]
    assert len(tables) == 1
    if file in ELSEWHERE:
        assert Path(file).stem in (ROOT / ELSEWHERE[file]).read_text(encoding="utf-8")


def test_no_table_names_a_file_that_is_gone() -> None:
    assert {*RUNS, *NEEDS, *ELSEWHERE} == set(FILES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "file",
    [
        *QUICK,
        *(pytest.param(file, marks=pytest.mark.slow) for file in SLOW),
        *(pytest.param(file, marks=pytest.mark.thorough) for file in THOROUGH),
    ],
)
def test_the_smallest_run(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    arguments, words = RUNS[file]
    code = run(file, arguments, monkeypatch, tmp_path)
    assert not code
    out, err = capsys.readouterr()
    assert words in out
    assert out or err


@pytest.mark.parametrize("file", NEEDS)
def test_what_a_machine_lacks_is_one_line(
    file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """And there is help all the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    arguments, words = NEEDS[file]
    (tmp_path / "report.html").write_text("<html></html>")
    with pytest.raises(SystemExit) as stop:
        run(file, arguments, monkeypatch, tmp_path)
    assert stop.value.code == words
    with pytest.raises(SystemExit) as stop:
        run(file, "--help", monkeypatch, tmp_path)
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out
