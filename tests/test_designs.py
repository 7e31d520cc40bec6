"""The sound kernels of benchmarks/designs.py, which declare nothing, pass; docs/sites.md has each.

That planted faults stay caught is in test_undeclared.py and test_api.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from loaded import load
from torch import Tensor

from numdev.audit import check
from numdev.audit.explanations import designs
from numdev.kernels.emulation.recipe import recipe
from numdev.testing import CheckFailed, check_attention

written = load("benchmarks/designs.py")
LONG = {"name": "long", "heads": 2, "seq_len": 385, "inputs": {"name": "normal", "logits": 16.0}}
TOLD = ("causal", "grouped", LONG)
FA4 = "FlashAttention-4"
LAGGING = (FA4, "a lagging maximum alone", "a lagging maximum and a polynomial")


@pytest.fixture(autouse=True)
def _no_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "reproduce", lambda *_, **__: [])


def exceeded(failed: CheckFailed) -> set[str | None]:
    return {f.tensor for f in failed.result.report.findings if f.severity == "exceeded"}


def test_each_design_has_a_kernel_and_options() -> None:
    """Every design of the table but those that declare themselves; its options are a recipe."""
    for design in designs():
        for more in design.get("tried", ({},)):
            recipe(**design["claim"], **{k: v for k, v in more.items() if k not in design["claim"]})
    listed = {design["kernel"] for design in designs()}
    assert listed - set(written.DESIGNS) == {"Pallas splash", "llama.cpp"}


@pytest.mark.parametrize("name", written.DESIGNS)
def test_a_sound_design_is_not_accused(name: str) -> None:
    """In both formats and passes; a maximum that lags is told by that."""
    result = check_attention(written.kernel(name), cases=TOLD, seeds=0)
    said = {r.claim for r in result.report.rows if r.role == "kernel" and r.claim}
    assert (name in LAGGING) == any("FlashAttention-4" in claim for claim in said)


@pytest.mark.parametrize("claims", [{"preset": "fa2"}, {"preset": "fa4"}])
def test_a_lagging_maximum_is_beyond_fa2(claims: dict[str, Any]) -> None:
    """Held to `fa2` alone it is accused, in the output; held to `fa4` it is not."""
    accused = claims == {"preset": "fa2"}
    how: dict[str, Any] = {"cases": LONG, "claims": claims, "seeds": (0, 1)}
    try:
        check_attention(written.kernel(FA4), **how)
    except CheckFailed as failed:
        assert accused
        assert exceeded(failed) == {"out"}
    else:
        assert not accused


def test_the_output_is_not_accused_of_what_gradients_do() -> None:
    """A wrong dV does not take from the output the way that explains it."""

    def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        out: Tensor = written.kernel(FA4)(q, k, v, is_causal=is_causal)
        if v.requires_grad:
            v.register_hook(lambda grad: grad * 1.02)
        return out

    with pytest.raises(CheckFailed) as caught:
        check_attention(wrong, cases=LONG, seeds=0)
    assert exceeded(caught.value) == {"dv"}
