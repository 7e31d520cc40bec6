"""The kernel `triton-flash`, on a CPU: in Triton's interpreter, and what of it needs no triton.

The interpreter runs once, in a process of its own (`triton_flash_cases.py`, which derives the
bounds). What the device does is in `test_triton_flash_gpu.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from interpreted import results_of

from numdev.cases import AttentionCase, CaseRef, visible
from numdev.errors import UsageError
from numdev.formats import FORMATS, round_to
from numdev.kernels import find
from numdev.kernels.emulation.kernel import emulated
from numdev.kernels.emulation.recipe import recipe
from numdev.kernels.output import Output
from numdev.kernels.triton_flash.plan import (
    CHOICES,
    EMULATED,
    backward_tiles,
    forward_tiles,
    in_force,
    plan_of,
    size_of,
)
from numdev.system import System

KERNEL = find("triton-flash")
SYSTEM = System(device="cuda")


def case(**changes: Any) -> AttentionCase:
    shapes = {"q": (1, 2, 6, 20), "k": (1, 1, 9, 20), "v": (1, 1, 9, 4)}
    dtype = changes.pop("dtype", torch.bfloat16)
    tensors = {name: torch.ones(*shape, dtype=dtype) for name, shape in shapes.items()}
    return AttentionCase(ref=CaseRef(case="small"), **{"scale": 0.5, **tensors, **changes})


# --- in the interpreter --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def interpreted() -> dict[str, list[dict[str, Any]]]:
    """What `triton_flash_cases.py` found."""
    return results_of("triton_flash_cases.py")


@pytest.mark.slow
def test_every_case_is_within_its_bound(interpreted: dict[str, Any]) -> None:
    """Output, log-sum-exp and gradients err by less than roundings can add up to: masks, windows,
    grouped heads, sinks, odd shapes and layouts, in fp16 and fp32."""
    assert len(interpreted["accuracy"]) == 2 * 19
    for found in interpreted["accuracy"]:
        for tensor, share in found["shares"].items():
            assert share <= 1.0, (found["case"], tensor, share)


@pytest.mark.slow
def test_rows_without_keys_are_zero(interpreted: dict[str, Any]) -> None:
    """They have out = 0 and dq = 0, whether position or a mask empties them."""
    empty = {found["case"]: found["empty"] for found in interpreted["accuracy"]}
    for name in ("causal, rows without keys", "bool mask", "lowest everywhere"):
        assert empty[f"{name}, torch.float16"] > 0
    assert all(found["in empty rows"] == 0.0 for found in interpreted["accuracy"])


@pytest.mark.slow
def test_the_bounds_reject_a_wrong_scale(interpreted: dict[str, Any]) -> None:
    """A scale 1 % off is beyond the bound of every tensor, wherever the scale decides something."""
    indifferent = ("one key", "no scale", "lowest everywhere")
    for found in interpreted["accuracy"]:
        if not found["case"].startswith(indifferent):
            assert min(found["off"].values()) > 1.0, (found["case"], found["off"])


def met(found: dict[str, Any]) -> list[list[bool]]:
    """By place on the other axis, whether each line meets it."""
    start, stop, total, first, last = found["given"]
    return [
        [
            (not found["LEFT"] or place >= line + first)
            and (not found["RIGHT"] or place <= line + last)
            for line in range(start, stop)
        ]
        for place in range(total)
    ]


@pytest.mark.slow
def test_ranges_of_tiles_are_exact(interpreted: dict[str, Any]) -> None:
    """The tiles visited are those that some line meets, and those taken for full are full: nothing
    is lost, and nothing is computed in vain at either end. Without a limit on a side the sweep
    that checks there is the other one's."""
    assert len(interpreted["ranges"]) == 400
    for found in interpreted["ranges"]:
        begin, full, rest, end = found["places"]
        block, lines = found["BLOCK"], met(found)
        assert 0 <= begin <= full <= rest, found
        assert begin % block == full % block == rest % block == 0, found
        assert found["LEFT"] or begin == full, found
        assert all(all(row) for row in lines[full:rest]), found
        assert rest == full or rest <= len(lines), found
        some = [place for place, row in enumerate(lines) if any(row)]
        if some:
            assert begin == some[0] // block * block, found
            assert end == some[-1] + 1, found
            whole = range(0, len(lines) // block * block, block)
            full_tiles = [t for t in whole if all(map(all, lines[t : t + block]))]
            assert list(range(full, rest, block)) == full_tiles, found


@pytest.mark.slow
def test_every_option_is_within_its_bound(interpreted: dict[str, Any]) -> None:
    """So are all options, in fp16, each with what it may add."""
    for found in interpreted["options"]:
        assert max(found["shares"].values()) <= 1.0, found


@pytest.mark.slow
def test_options_compute_what_they_claim(interpreted: dict[str, Any]) -> None:
    """Under its claim every option's rms error is as the emulation has it, to 3 %, and element by
    element less than 0.2 of it is left (of dk 0.25): a P whose last bits differ may fall on the
    other side of a boundary, and in float16 some do."""
    for found in interpreted["options"]:
        for tensor, (ratio, residual) in found["claimed"].items():
            assert abs(ratio - 1.0) < 0.03, (found["options"], tensor, ratio)
            assert residual < (0.25 if tensor == "dk" else 0.2), (
                found["options"],
                tensor,
                residual,
            )


@pytest.mark.slow
def test_the_guarded_softmax_is_within_the_bounds(interpreted: dict[str, Any]) -> None:
    """In every case, in fp16, and rows without keys are 0."""
    assert len(interpreted["guarded"]) == 19
    for found in interpreted["guarded"]:
        for tensor, share in found["shares"].items():
            assert share <= 1.0, (found["case"], tensor, share)
        assert found["in empty rows"] == 0.0


@pytest.mark.slow
def test_the_guarded_softmax_hears_nothing_of_a_shift(interpreted: dict[str, Any]) -> None:
    """Ties within and across tiles, and with a sink, under shifts of all scores from -200 to 200:
    the same bits (scores here are exact), right to 4 roundings of V, which is 3 at most, and its
    fp32 arithmetic to 8; the log-sum-exp to 4 roundings of numbers as large as the shift. In
    float16 `emulated` has the same bits."""
    assert len(interpreted["shifts"]) == 4 * 7
    for found in interpreted["shifts"]:
        assert found["equal"], found
        half = found["u"] > 2.0**-20
        assert found["error"] <= (4 if half else 8) * 3 * found["u"], found
        assert found["lse"] <= 4 * 2.0**-24 * max(2.0, abs(found["shift"])), found
        assert found["emulated"] == 0.0 or not half, found


def expected_of_ties(score: float, beta: float, dtype: str) -> tuple[float, bool]:
    """O of two tied scores with V = 1, and whether P is lost: P is the rounded exp of minus the
    shift, l the sum of those that are not rounded."""
    below = (beta - 1.0) * score if score > 0 else -score
    fmt = FORMATS[dtype]
    # In float32 there is nothing left to round.
    P = torch.tensor(math.exp(-below), dtype=torch.float32).double()
    O = float(round_to(round_to(P, fmt) / P, fmt))
    return O, (score > 0 and math.exp(-below) < fmt.smallest_normal) or math.isnan(O)


@pytest.mark.slow
def test_stabilised_softmax_of_ties(interpreted: dict[str, Any]) -> None:
    """Two tied scores with V = 1 are 1 exactly in plain softmax, whose P is 1. Stabilised, P is
    the rounded exp of the shift, and so the output is off by how that rounds; beyond the format's
    range the row is NaN, not a number; so it is far below 0, where even l is 0, with a log-sum-exp
    of -inf. Otherwise the log-sum-exp hears nothing of the shift."""
    assert any(found["stabilised"] < 1.0 for found in interpreted["stabilised"])
    assert any(math.isnan(found["stabilised"]) for found in interpreted["stabilised"])
    for found in interpreted["stabilised"]:
        O, lost = expected_of_ties(found["score"], found["beta"], found["dtype"])
        assert found["plain"] == 1.0
        assert found["claim"] is None
        if lost:
            assert math.isnan(found["stabilised"]), found
            assert math.isnan(found["lse"]) if found["score"] > 0 else found["lse"] == -math.inf
        else:
            assert found["stabilised"] == O, found
            # m is beta times the score and log l takes it back: 4 roundings of numbers that large.
            spread = 4 * 2.0**-24 * max(1.0, found["beta"] * abs(found["score"]))
            assert found["lse"] == pytest.approx(found["score"] + math.log(2.0), abs=spread)


@pytest.mark.slow
def test_the_stabilised_softmax_means_one_thing(interpreted: dict[str, Any]) -> None:
    """`emulated` with the same words has the same rows, lost ones included; and the same
    log-sum-exp, to the roundings of numbers as large as m."""
    for found in interpreted["stabilised"]:
        assert repr(found["emulated"]) == repr(found["stabilised"]), found
        spread = 8 * 2.0**-24 * max(1.0, found["beta"] * abs(found["score"]))
        assert found["lse"] == pytest.approx(found["emulated lse"], abs=spread, nan_ok=True)


# --- options and claims --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scores": "bfloat16"}, "scores"),
        ({"p": "exact"}, "p is"),
        ({"loop_order": "k"}, "loop_order"),
        ({"kv_order": "down"}, "kv_order"),
        ({"delta_from": "O"}, "delta_from"),
        ({"delta_from": "dP*P", "delta_o": "float32"}, "delta_o"),
        ({"dp": "exact"}, "dp is"),
        ({"softmax": "guarded", "beta": 2.0}, "of the stabilised softmax"),
        ({"exponential": "exact"}, "exponential"),
        ({"softmax": "stable"}, "did you mean"),
        ({"block_q": 8}, "from 16 on"),
        ({"block_kv": 48}, "power of two"),
        ({"block_kv": 64.0}, "whole number"),
        ({"num_warps": 3}, "power of two"),
        ({"num_stages": 0}, "from 1 on"),
        ({"beta": 2.0}, "of the stabilised softmax"),
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


@pytest.mark.parametrize("name", EMULATED)
def test_shared_options_are_those_of_the_emulation(name: str) -> None:
    """An option that `emulated` has too takes none but values that `emulated` takes."""
    from numdev.kernels.emulation.recipe import SITES

    for value in CHOICES.get(name, (64,)):
        given = {name: value}
        made = recipe(sites=given) if name in SITES else recipe(**given)
        assert (made.sites[name] if name in SITES else getattr(made, name)) == value


def claim(**options: Any) -> Any:
    """What it claims of a run with these options, from what such a run says of itself."""
    from numdev.kernels.triton_flash.kernel import _call

    did = _call(case(), options).options
    return KERNEL.claims(case(), Output(out=torch.zeros(1, 2, 6, 4), did=did), SYSTEM)


def test_the_claim_is_what_ran() -> None:
    """Every option in force is said, tiles included, and the claim is read off it; a case
    can be emulated under it."""
    found = claim(scores="working", block_kv=16, kv_order="descending")
    assert found["scores"] == "working"
    assert found["block_kv"] == 16
    assert found["block_q"] == 128
    assert found["kv_order"] == "descending"
    assert (found["p"], found["accumulator"]) == ("working", "float32")
    emulated(case(), **found)


def test_the_stabilised_softmax_claims_nothing() -> None:
    """Which rows it shifts hangs on the last bits of their scores. The guarded one asks none, and
    is part of the claim."""
    assert claim(softmax="stabilised") is None
    assert claim(softmax="guarded", dp="working")["softmax"] == "guarded"
    assert claim(softmax="guarded", dp="working")["dp"] == "working"


# --- what follows from a case --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"softcap": 5.0}, "soft cap"),
        ({"dtype": torch.float64}, "not float64"),
        ({"mask": torch.zeros(9, dtype=torch.float64)}, "mask is in float64"),
        ({"v": torch.ones(1, 1, 9, 257, dtype=torch.bfloat16)}, "at most 256 features"),
        ({"sinks": torch.zeros(2)}, None),
        ({"dtype": torch.float32}, None),
    ],
)
def test_what_it_cannot_do_has_a_reason(changes: dict[str, Any], reason: str | None) -> None:
    """A case it cannot run is declined in words; the rest is not."""
    found = KERNEL.supports(case(**changes))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "causal_offset": -2},
        {"window": (2, 1)},
        {"window": (None, 3), "causal_offset": 1},
        {"window": (1, None)},
        {"window": (3, 2), "is_causal": True, "causal_offset": 4},
        {"window": (10**12, 0)},
    ],
)
def test_positions_are_two_limits(changes: dict[str, Any]) -> None:
    """Causality, offset and window together are a first and a last key beside each row's own
    number, and show what `visible` shows."""
    here = case(**changes)
    plan, size = plan_of(here, in_force({}, KERNEL.function)), size_of(here)
    i, j = torch.arange(6)[:, None], torch.arange(9)[None, :]
    shown = torch.ones(6, 9, dtype=torch.bool)
    if plan.left:
        shown &= j >= i + size.first
    if plan.right:
        shown &= j <= i + size.last
    expected = visible(here, slice(0, 6), slice(0, 9))
    assert torch.equal(shown, torch.ones_like(shown) if expected is None else expected)
    assert abs(size.first) <= 1 << 30


def test_tiles_follow_the_widest_head_and_the_products() -> None:
    """fp32 products have small tiles, also where only P is fp32, and what is asked for is taken."""
    bf16 = case(v=torch.ones(1, 1, 9, 129, dtype=torch.bfloat16))

    def tiles(here: AttentionCase, **given: Any) -> Any:
        options = in_force(given, KERNEL.function)
        plan = plan_of(here, options)
        return forward_tiles(plan, here.q.dtype, options), *backward_tiles(plan, here.q.dtype)

    assert tiles(case())[0][:2] == (128, 64)
    assert tiles(bf16)[1][:2] == (64, 32)
    assert tiles(case(dtype=torch.float32))[2][:2] == (32, 32)
    assert tiles(case(), p="float32")[0][:2] == (32, 32)
    assert tiles(case(), p="float32")[1] == tiles(case())[1]
    assert tiles(case(), block_q=16, num_warps=2)[0][:3] == (16, 64, 2)


def test_heads_are_padded_to_powers_of_two() -> None:
    """20 features take 32 places, 4 take 16, which is the least."""
    plan = plan_of(case(), in_force({}, KERNEL.function))
    assert (plan.head_dim, plan.wide, plan.v_dim, plan.v_wide) == (20, 32, 4, 16)
