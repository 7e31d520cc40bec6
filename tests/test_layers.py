"""Layers that were asked for, and those that a model has."""

from __future__ import annotations

from pathlib import Path

import pytest

from numdev.audit.run import audit
from numdev.config import AuditRequest, Choice
from numdev.sources.watch import Layers


@pytest.mark.parametrize(
    ("asked", "met", "said"),
    [
        (None, (0, 1), ""),
        ((1,), (0, 1), ""),
        ((1, 9), (0, 1), "no attention call in layer 9; calls were met in layers 0 and 1."),
        ((4, 7, 9), (4,), "no attention call in layers 7 and 9; calls were met in layer 4."),
        ((0, 7, 8, 9), (0, 1, 2), "in layers 7 to 9; calls were met in layers 0 to 2."),
        ((0, 9), (0, 2, 5), "calls were met in layers 0, 2 and 5."),
        ((0, 9), range(0, 40, 2), "in layers 0, 2, 4, 6, 8, 10, 12, 14 and 12 more."),
        ((9,), (), "no attention call in layer 9; no call has a number."),
    ],
)
def test_what_is_said_of_layers(
    asked: tuple[int, ...] | None, met: tuple[int | None, ...], said: str
) -> None:
    layers = Layers(asked)
    chosen = [layer for layer in met if layers.choose(layer)]
    assert chosen == [layer for layer in met if asked is None or layer in asked]
    assert " ".join(layers.notes("x")).endswith(said)
    assert bool(layers.notes("x")) == bool(said)


def test_a_layer_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    """`--layers 1,99` audits layer 1, and says that there is no layer 99."""
    demo = Path(__file__).parent.parent / "numdev" / "data" / "demo"
    request = AuditRequest(
        target="demo",
        checkpoint=str(demo),
        kernels=(Choice(name="sdpa-math"),),
        layers=(1, 99),
        length=16,
        sequences=1,
        device="cpu",
        reproducers=0,
    )
    said: list[str] = []
    found = audit(request, tmp_path, say=said.append)
    assert {row.layer for row in found.rows} == {1}
    lacking = "--layers: no attention call in layer 99; calls were met in layers 0 to 3."
    assert said.count(lacking) == 1
