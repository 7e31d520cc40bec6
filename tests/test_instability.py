"""`benchmarks/instability.py` on series with a known answer."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from numdev.report import read

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("instability")


@pytest.mark.parametrize(
    ("excess", "step"),
    [
        ([0.0] * 20, None),
        ([0.0] * 5 + [0.3] * 6 + [0.0] * 5, 60),  # from a row to the one 50 steps later
        ([0.0] * 5 + [0.3] * 5 + [0.0] * 5, None),  # a spike
        ([0.0] * 5 + [0.9] * 3 + [0.1] + [0.9] * 3 + [0.0] * 9, None),  # it came back in between
        ([0.0] * 5 + [0.3] * 5, None),  # too near the end to tell
        ([0.0] * 5 + [math.inf] * 6, 60),
        ([math.nan] * 20, None),
    ],
)
def test_when_a_run_broke(bench: Any, excess: list[float], step: int | None) -> None:
    """It broke where it stays 0.2 nats above its golden run for 50 steps."""
    index = [10 * (i + 1) for i in range(len(excess))]
    assert bench.broke_at(pd.Series(excess, index=index)) == step


def rows(signal_at: int, broke_at: int, seeds: range) -> pd.DataFrame:
    """Two variants, of which `bad` breaks; its gradient norm rises from `signal_at` on."""
    return pd.DataFrame(
        {
            "rate": 0.01, "warmup": 20, "seed": seed, "variant": name, "judged_by": "good",
            "step": step, "loss": 2.0 + excess, "excess": excess,
            "grad_norm": 9.0 if name == "bad" and step >= signal_at else 1.0,
            "max_logit": 1.0, "spectral_norm": 2.0,
        }
        for seed in seeds for step in range(10, 410, 10) for name in ("good", "bad")
        for excess in (0.5 if name == "bad" and step >= broke_at else 0.0,)
    )  # fmt: skip


def test_a_signal_that_rises_before_the_loss_warns(bench: Any) -> None:
    """It warns on seeds it was not fixed on, by the steps between; one that is flat never does."""
    table = rows(signal_at=100, broke_at=200, seeds=range(5))
    runs = bench.runs_of(table)
    assert set(runs.loc[runs["variant"] == "bad", "broke"]) == {200.0}
    assert runs.loc[runs["variant"] == "good", "broke"].isna().all()
    found = bench.warnings(table, runs, [0, 1, 2]).set_index("signal")
    assert found.loc["grad_norm", "warned"] == "2 of 2"
    assert found.loc["grad_norm", "false"] == "0 of 2"
    assert found.loc["grad_norm", "lead, steps"] == 90  # a median over 30 steps: one row later
    assert found.loc["max_logit", "warned"] == "0 of 2"


def test_a_report_of_train_becomes_tables(bench: Any, capsys: Any, monkeypatch: Any) -> None:
    """Every variant with the golden attention's optimiser settings has a row; the golden run is
    nothing above itself."""
    path = ROOT / "tests/data/reports/train.json"
    table = bench.recorded(read(path))
    assert set(table.loc[table["variant"] == table["judged_by"], "excess"]) == {0.0}
    monkeypatch.setattr("sys.argv", ["instability.py", str(path)])
    bench.main()
    assert "| rate | variant | loss by seed | above golden | broke | at step |" in (
        capsys.readouterr().out
    )
