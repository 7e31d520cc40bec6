"""`benchmarks/instability.py` on series with a known answer."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from loaded import ROOT, load

from numdev.report import read

bench = load("benchmarks/instability.py")


@pytest.mark.parametrize(("excess", "step"), [
    ([0.0] * 5 + [0.3] * 6 + [0.0] * 5, 60),  # from a row to the one 50 steps later
    ([0.0] * 5 + [0.3] * 5 + [0.0] * 5, None),  # a spike
    # It came back in between
    ([0.0] * 5 + [0.9] * 3 + [0.1] + [0.9] * 3 + [0.0] * 9, None),
    ([0.0] * 5 + [math.inf] * 5, None),  # too near the end to tell
])  # fmt: skip
def test_when_a_run_broke(excess: list[float], step: int | None) -> None:
    """It broke where it stays 0.2 nats above its golden run for 50 steps."""
    index = [10 * (i + 1) for i in range(len(excess))]
    assert bench.broke_at(pd.Series(excess, index=index)) == step


def test_a_report_of_train_becomes_tables() -> None:
    """The golden run is nothing above itself. A signal that rises 100 steps before a run
    of a seed it was not fixed on breaks has warned of it; one that is flat never does."""
    table = bench.recorded(read(ROOT / "tests/data/reports/train.json"))
    assert set(table.loc[table["variant"] == table["judged_by"], "excess"]) == {0.0}
    rows = pd.DataFrame(
        {"rate": 0.01, "warmup": 20, "seed": seed, "variant": name, "judged_by": "good",
         "step": step, "loss": 2.0, "excess": 0.5 if bad and step >= 200 else 0.0,
         "grad_norm": 9.0 if bad and step >= 100 else 1.0, "max_logit": 1.0, "spectral_norm": 2.0}
        for seed in range(5) for step in range(10, 410, 10)
        for name, bad in (("good", False), ("bad", True))
    )  # fmt: skip
    result = bench.warnings(rows, bench.runs_of(rows), [0, 1, 2]).set_index("signal")
    shares = result[["warned", "false"]].T.to_dict("list")
    assert shares["grad_norm"] == ["2 of 2", "0 of 2"]
    assert shares["max_logit"] == ["0 of 2", "0 of 2"]
    # A median over 30 steps: one row later
    assert result.loc["grad_norm", "lead, steps"] == 90
