"""PyTorch's context parallelism as a kernel: the same numbers as `sharded`, and ranks that fail.

On a CPU its ranks are processes over gloo that call PyTorch's ring themselves; what stands before
the ring on CUDA is tested on two GPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_sharded import TENSORS, drawn, errors

from numdev.audit.isolation import Failure, attempt
from numdev.errors import MeasurementError, Refused
from numdev.kernels import Output, find
from numdev.kernels.context_parallel import end_all, together

PARALLEL, SHARDED = find("context-parallel"), find("sharded")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    end_all()


def explained(case: Any, **options: Any) -> tuple[Output, Output]:
    """Context parallelism, and the `sharded` that it should be."""
    real = PARALLEL.gradients(case, **PARALLEL.with_options(options))
    balanced = options.get("load_balance", case.is_causal)
    same = SHARDED.with_options(
        {
            "shards": options.get("world", 2),
            "order": "zigzag" if balanced else "ring",
            "merge_format": "float32" if options.get("convert_to_f32", True) else "promoted",
        }
    )
    return real, SHARDED.gradients(case, **same)


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("convert_to_f32", [True, False])
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balance", ["not causal", "plain", "balanced"])
def test_it_is_sharded_bit_by_bit(balance: str, rotate: str, convert_to_f32: bool) -> None:
    """Output and gradients of two ranks are those of `sharded` with two shards, every bit."""
    case = drawn(64, is_causal=balance != "not causal")
    real, same = explained(
        case,
        rotate=rotate,
        convert_to_f32=convert_to_f32,
        load_balance=balance == "balanced",
    )
    assert all(torch.equal(getattr(real, t), getattr(same, t)) for t in TENSORS)
    assert real.ran == f"context parallelism, {rotate}: {same.ran}"


# --- ranks that fail -----------------------------------------------------------------------------


def test_a_rank_that_dies_is_one_failed_row() -> None:
    """SIGKILL to a rank: the attempt fails and says so, no rank is left, and the next one runs."""
    case = drawn(64)
    PARALLEL.attend(case)
    pids = together(2, "cpu").pids
    os.kill(pids[1], signal.SIGKILL)
    failed = attempt(PARALLEL, case, {})
    assert isinstance(failed, Failure)
    assert failed.status == "failed"
    assert "rank 1 of 2 was killed by SIGKILL" in failed.reason
    assert not any(map(alive, pids))
    assert isinstance(attempt(PARALLEL, case, {}), Output)


def test_ranks_that_hang_are_ended() -> None:
    """Stopped ranks are not waited for beyond the limit, and no rank is left."""
    ranks = together(2, "cpu")
    for pid in ranks.pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MeasurementError, match="rank 0, 1 of 2 did not answer"):
        ranks.ask({"rotate": "allgather"}, limit_s=0.5)
    assert ranks.ended
    assert not any(map(alive, ranks.pids))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # an orphan that nobody waited for has ended too
        return stat.read().rpartition(")")[2].split()[0] != "Z"


# --- what it needs, and refuses ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        (drawn(64, softcap=1.0), {}, "no soft cap"),
        (drawn(64, mask=torch.ones(64, 64, dtype=torch.bool)), {}, "no masks"),
        (drawn(64, window=(2, 0)), {}, "no masks"),
        (drawn(64, is_causal=True, causal_offset=1), {}, "from the top left"),
        (drawn(32, 64, is_causal=True), {}, "as many queries as keys"),
        (drawn(62, is_causal=True), {}, "62 and 62 are no multiples of 4"),
        (drawn(64), {"load_balance": True}, "causal calls alone"),
    ],
)
def test_what_it_refuses(case: Any, options: dict[str, Any], reason: str) -> None:
    """Each in words, before a rank is asked."""
    with pytest.raises(Refused, match=reason):
        PARALLEL.attend(case, **options)


# --- on GPUs -------------------------------------------------------------------------------------


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("convert_to_f32", [True, False])
@pytest.mark.parametrize("balance", ["not causal", "plain", "balanced"])
def test_on_gpus_it_is_sharded(balance: str, convert_to_f32: bool) -> None:
    """Two GPUs give the output of `sharded` on one, every bit, and its gradients to 1 % of their
    errors' size (flash attention's backward adds up dq in no fixed order)."""
    case = on_cuda(drawn(1024, heads=4, kv_heads=4, head_dim=64, is_causal=balance != "not causal"))
    real, same = explained(case, convert_to_f32=convert_to_f32, load_balance=balance == "balanced")
    assert torch.equal(real.out, same.out)
    found, expected = errors(case, real), errors(case, same)
    for t in TENSORS:
        assert found[t] == pytest.approx(expected[t], rel=0.01), t


def on_cuda(case: Any) -> Any:
    import dataclasses

    moved = {t: getattr(case, t).cuda() for t in ("q", "k", "v", "grad_out")}
    return dataclasses.replace(case, **moved)
