"""PyTorch's generators, seeded for a while."""

from __future__ import annotations

import pytest
import torch

from numdev.seeding import seeded


def drawn() -> list[float]:
    return torch.rand(4, dtype=torch.float64).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**40, -3])
def test_draws_are_those_of_manual_seed(seed: int) -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        expected = drawn()
    with seeded(seed):
        assert drawn() == expected


def test_the_generator_is_afterwards_as_before() -> None:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        expected = drawn() + drawn()
        torch.manual_seed(5)
        before = drawn()
        with pytest.raises(ZeroDivisionError), seeded(7):
            drawn()[0] / 0
        assert before + drawn() == expected


def test_no_note_is_made_for_devices_that_are_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.manual_seed` makes one with the stack each time, for ever."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notes = len(torch.cuda._queued_calls)
    with seeded(1):
        drawn()
    assert len(torch.cuda._queued_calls) == notes


@pytest.mark.gpu
def test_draws_on_cuda_are_those_of_manual_seed_and_come_back() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(4)
    with seeded(3):
        assert torch.equal(torch.rand(4, device="cuda"), expected)
    after = torch.rand(4, device="cuda")
    torch.manual_seed(4)
    assert torch.equal(torch.rand(4, device="cuda"), after)
