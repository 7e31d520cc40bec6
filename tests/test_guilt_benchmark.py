"""benchmarks/guilt.py: its cases are what it says, and curing a head is what it says."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from numdev.kernels import find
from numdev.kernels.emulation.recipe import recipe

pytest.importorskip("numdev.diagnose.call")
pytest.importorskip("numdev.diagnose.guilt")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def guilt() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("guilt")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_so_many_heads_are_guilty(guilt: Any, count: int) -> None:
    """Those have tied keys, V and dO of one sign; no other head has all three; q is X W_Q^T."""
    given = guilt.built(5, heads=8, guilty=count)
    case = given.case
    assert len(given.guilty) == count
    for h in range(8):
        tied = torch.equal(case.k[0, h, 0], case.k[0, h, 1])
        of_one_sign = bool((case.v[0, h, :2] < 0).all() and (case.grad_out[0, h] < 0).all())
        reached = bool((case.q[0, h, :, 0] != 0).all())
        assert (tied and of_one_sign and reached) == (h in given.guilty)
    q = given.projection.x @ given.projection.weight.T
    assert torch.equal(q.unflatten(-1, (8, -1)).transpose(1, 2), case.q.double())


def test_curing_a_head_alone_is_what_the_sum_says(guilt: Any) -> None:
    """Recomputed head by head: one exact, the others as the recipe has them, each by a call of its
    own; the error of dW_Q over all heads falls by as much as `gains` says."""
    given = guilt.built(1, heads=3, guilty=1)
    before = guilt.errors(given, recipe("fa2"))
    after = guilt.errors(given, recipe("exact"))
    said = guilt.gains(before, after)
    x = given.projection.x[0]

    def error(presets: list[str]) -> float:
        total = 0.0
        for h, preset in enumerate(presets):
            alone = given.case.select_heads([h])
            dq, exact = (find("emulated").gradients(alone, preset=p).dq for p in (preset, "exact"))
            assert dq is not None
            assert exact is not None
            total += float(((dq.double() - exact.double())[0, 0].T @ x).square().sum())
        return total**0.5

    whole = error(["fa2"] * 3)
    for h in range(3):
        cured = error(["exact" if i == h else "fa2" for i in range(3)])
        assert float(said[h]) == pytest.approx(whole - cured, rel=1e-6)


def test_rates(guilt: Any) -> None:
    """Wilson: as scipy has them."""
    for hits, of in ((0, 20), (10, 10), (7, 18), (1, 72)):
        low, high = binomtest(hits, of).proportion_ci(method="wilson")
        assert guilt.rate(hits, of) == f"{hits}/{of} [{low:.2f}, {high:.2f}]"
    assert guilt.rate(0, 0) == "–"
