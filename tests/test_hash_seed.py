"""What is reported does not depend on PYTHONHASHSEED, by which Python orders its sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from loaded import ROOT

SCRIPT = """
import json, sys
from pathlib import Path

import torch

import numdev
from numdev import testing
from numdev.errors import UsageError
from numdev.operations.function.problem_files import module_of
from numdev.errors import MeasurementError
from numdev.studies.invariance.consistency import check_consistency


def places(x):
    return x.argmax(-1)


def of_other_form(x):
    return x.argmax(-1)[:-1]


out = {}
for function in (places, of_other_form):
    result = testing.check(function, reference=places, shapes="x=8x8", device="cpu")
    out[function.__name__] = [list(row.nulls) for row in result.report.rows]
q = torch.zeros(1, 1, 2, 4)
case = numdev.cases.AttentionCase(ref=numdev.cases.CaseRef(case="a"), q=q, k=q, v=q, scale=1)
try:
    numdev.audit(case, tokenizer="a", text=("b",), stream=True, generate=3, length=9)
except UsageError as error:
    out["refused"] = str(error)
report = numdev.report.read(Path(sys.argv[2]))
kernel = report.plan.kernels[0]
several = [kernel.model_copy(update={"kernel": name}) for name in "abcdefgh"]
plan = report.plan.model_copy(update={"kernels": several})
request = {**report.request, "kernels": [{"name": name} for name in "abcdefgh"]}
try:
    check_consistency(
        report.model_copy(update={"plan": plan, "request": request, "rows": ()})
    )
except MeasurementError as error:
    out["contradiction"] = str(error)
out["module"] = module_of(Path(sys.argv[1])).__name__
print(json.dumps(out))
"""


def printed(seed: int) -> object:
    """What the script prints in an interpreter of its own."""
    files = [
        ROOT / "examples" / "problem" / "problem.py",
        ROOT / "tests" / "data" / "reports" / "invariance.json",
    ]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    text = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, files)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=300,
    ).stdout  # fmt: skip
    return json.loads(text.splitlines()[-1])


@pytest.mark.slow
def test_no_order_of_a_set_reaches_what_is_reported() -> None:
    """Reasons why numbers are null, the first option that is refused, the first
    contradiction of a report, the name of a problem's module."""
    first = printed(1)
    assert printed(2) == first
