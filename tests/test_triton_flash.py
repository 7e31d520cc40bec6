"""The kernel `triton-flash`, on a CPU: in Triton's interpreter, and what of it needs no triton.

What the device does is in `test_triton_flash_gpu.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import Refused, UsageError
from numdev.kernels import find
from numdev.kernels.emulation.kernel import emulated
from numdev.kernels.output import Output
from numdev.kernels.triton_flash.kernel import Call, tiles
from numdev.system import System

KERNEL = find("triton-flash")


def case(**changes: Any) -> AttentionCase:
    shapes = {"q": (1, 2, 6, 20), "k": (1, 1, 9, 20), "v": (1, 1, 9, 4)}
    dtype = changes.pop("dtype", torch.bfloat16)
    tensors = {name: torch.ones(*shape, dtype=dtype) for name, shape in shapes.items()}
    return AttentionCase(ref=CaseRef(case="small"), **{"scale": 0.5, **tensors, **changes})


def call(here: AttentionCase, **options: Any) -> Call:
    return Call.of(here, KERNEL.with_options(options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scores": "bfloat16"}, "scores"),
        ({"delta_from": "dP*P", "delta_o": "float32"}, "delta_o"),
        ({"softmax": "stable"}, "did you mean"),
        ({"block_q": 8}, "block_q"),
        ({"block_kv": 48}, "block_kv"),
        ({"block_kv": 64.0}, "block_kv"),
        ({"num_warps": 3}, "num_warps"),
        ({"num_stages": 0}, "from 1 on"),
        ({"softmax": "guarded", "beta": 2.0}, "of the stabilised softmax"),
        ({"tie_tolerance": 0.0}, "of the stabilised softmax"),
        ({"softmax": "stabilised", "beta": 0.5}, "from 1.0 on"),
        ({"softmax": "stabilised", "tie_tolerance": -1.0}, "from 0.0 on"),
        ({"softmax": "stabilised", "beta": math.nan}, "from 1.0 on"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], words: str) -> None:
    """Before anything runs, with the option's name and what it could be."""
    with pytest.raises(UsageError, match=words):
        KERNEL.with_options(options)


def test_the_claim_is_what_ran() -> None:
    """Every option in force is said, tiles included, and the claim is read off it; a case can be
    emulated under it. Which rows the stabilised softmax shifts hangs on the last bits of their
    scores, so nothing is claimed; the guarded one asks none."""

    def claim(**options: Any) -> Any:
        ran = Output(out=torch.zeros(1), did=call(case(), **options).options)
        return KERNEL.claims(case(), ran, System(device="cuda"))

    found = claim(scores="working", block_kv=16, kv_order="descending")
    expected = {"scores": "working", "block_kv": 16, "block_q": 128, "kv_order": "descending"}
    assert found.items() >= {**expected, "p": "working", "accumulator": "float32"}.items()
    emulated(case(), **found)
    assert claim(softmax="stabilised") is None
    assert (
        claim(softmax="guarded", dp="working").items()
        >= {"softmax": "guarded", "dp": "working"}.items()
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"softcap": 5.0}, "soft cap"),
        ({"dtype": torch.float64}, "not float64"),
        ({"mask": torch.zeros(9, dtype=torch.float64)}, "mask is in float64"),
        ({"v": torch.ones(1, 1, 9, 257, dtype=torch.bfloat16)}, "at most 256 features"),
    ],
)
def test_what_it_cannot_do_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    """A case it cannot run is declined in words; the rest is not."""
    with pytest.raises(Refused, match=reason):
        KERNEL.attend(case(**changes))
    KERNEL.accept(case(sinks=torch.zeros(2), dtype=torch.float32))


def test_heads_are_padded_to_powers_of_two() -> None:
    """20 features take 32 places, 4 take 16, which is the least. fp32 products have small tiles,
    also where only P is fp32, and what is asked for is taken."""
    plan = call(case()).plan
    assert (plan.head_dim, plan.wide, plan.v_dim, plan.v_wide) == (20, 32, 4, 16)
    wide = call(case(v=torch.ones(1, 1, 9, 129, dtype=torch.bfloat16))).plan
    assert tiles("of_queries", wide, torch.bfloat16)[:2] == (64, 32)
    assert tiles("of_keys", plan, torch.float32)[:2] == (32, 32)
    assert tiles("of_keys", plan, torch.bfloat16)[:2] == (64, 128)

    def sizes(**options: Any) -> tuple[int, int]:
        chosen = call(case(), **options).options
        return chosen["block_q"], chosen["block_kv"]

    assert sizes() == (128, 64)
    assert sizes(p="float32") == (32, 32)
    assert sizes(block_q=16) == (16, 64)
