"""A search for causes that ends its process costs the name, and no verdict."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch import Tensor

from numdev.errors import MeasurementError
from numdev.function_check import check_beside
from numdev.operations.function import causes
from numdev.operations.function.causes import OtherFunction
from numdev.studies.audit import guarded_search
from numdev.studies.audit.guarded_search import RAISED, guarded

NAMED = {"output": OtherFunction(words="it is 0 everywhere", cut=1e300, share=1.0)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="searches in a fork")


def ends() -> dict[str, OtherFunction]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return NAMED


def raises() -> dict[str, OtherFunction]:
    raise RuntimeError("not with this option")


def waits() -> dict[str, OtherFunction]:
    time.sleep(60)
    return NAMED


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_search_names_what_it_finds_and_may_raise(device: str) -> None:
    assert guarded(lambda: NAMED, device) == (NAMED, None)
    assert guarded(raises, device) == ({}, RAISED)


@linux
def test_a_search_may_end_its_process_and_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    named, why = guarded(ends, "cpu")
    assert (named, why) == ({}, "the search ended its process (signal SIGSEGV)")
    monkeypatch.setattr(guarded_search, "LIMIT_S", 0.2)
    assert guarded(waits, "cpu") == ({}, "the search took more than 0.2 s")


@linux
def test_a_search_that_ends_early_says_so_itself() -> None:
    def ends_early() -> dict[str, OtherFunction]:
        raise MeasurementError("the search ended after 30 s of CPU")

    words = "the search ended after 30 s of CPU"
    assert guarded(ends_early, "cpu") == guarded(ends_early, "mps") == ({}, words)


def test_a_slow_reference_costs_the_name_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference does not run again when the time is over."""
    monkeypatch.setattr(causes, "SECONDS", 0.0)
    result = check_beside(
        lambda x: x.square() + torch.sin(37 * x),
        reference=torch.square,
        inputs=inputs,
        device="cpu",
    )
    assert result.verdict == "FAIL"
    [finding] = [x for x in result.report.findings if x.rule == "error"]
    assert "Cause unknown: the search ended after 0 s of CPU." in finding.whole


def inputs(seed: int) -> tuple[Tensor]:
    return (torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)),)


@linux
def test_a_crash_of_the_reference_with_another_number_costs_the_name_alone() -> None:
    """As a batch norm of PyTorch's does with an option that the module never has."""

    def reference(x: Tensor, eps: float = 1e-3) -> Tensor:
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if float(out.double().square().mean()) < 0.5:  # with a large eps
            os.kill(os.getpid(), signal.SIGSEGV)
        return out

    def wrong(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)

    result = check_beside(wrong, reference=reference, inputs=inputs, device="cpu")
    assert result.verdict == "FAIL"
    rows = [row for row in result.report.rows if row.role == "kernel"]
    words = "the search ended its process (signal SIGSEGV)"
    assert {row.nulls.get("suspicion") for row in rows} == {words}
    assert words in result.report.findings[0].whole
