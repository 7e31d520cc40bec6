"""What comes back bit for bit as another kernel's did is measured once, and nothing else is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_profile import drawn

from numdev.audit.bench import Bench
from numdev.audit.journal import Task
from numdev.audit.task import run_task
from numdev.cases import AttentionCase
from numdev.kernels import Kernel, Output, find
from numdev.metrics import deviation
from numdev.report import DeviationRow
from numdev.system import System

HERE = System.here("cpu")


class Counting:
    """How often an output was held to a yardstick, and a log-sum-exp to the exact one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.along = self.plain = 0
        along, plain = deviation.measured, deviation.measured_plain

        def counted_along(*given: Any, **more: Any) -> Any:
            self.along += 1
            return along(*given, **more)

        def counted_plain(*given: Any, **more: Any) -> Any:
            self.plain += 1
            return plain(*given, **more)

        monkeypatch.setattr(deviation, "measured", counted_along)
        monkeypatch.setattr(deviation, "measured_plain", counted_plain)


def kernel(name: str, change: Any = None, **more: Any) -> Kernel:
    """PyTorch's flash by another name, with its output changed."""

    def run(case: AttentionCase) -> Output:
        output = find("sdpa-flash").attend(case)
        return output if change is None else dataclasses.replace(output, **change(output))

    return Kernel(name=name, function=run, **more)


def rows(bench: Bench, which: Kernel, role: str = "kernel") -> list[DeviationRow]:
    task = Task(case=bench.ref, role=role, kernel=which.name, format="bfloat16", repeats=1)
    return run_task(task, which, bench, HERE)


def outputs(found: list[DeviationRow]) -> list[DeviationRow]:
    return [row for row in found if row.tensor == "out"]


def numbers(found: list[DeviationRow]) -> list[dict[str, Any]]:
    return [row.model_dump(exclude={"kernel", "ran"}) for row in found]


def moved(output: Output) -> dict[str, Any]:
    """One element of the last head by one unit in its last place."""
    out = output.out.clone()
    out.view(torch.int16)[-1, -1, -1, -1] += 1
    return {"out": out}


def test_the_same_bits_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn()
    bench, counts = Bench(case.ref, lambda: case), Counting(monkeypatch)
    first = rows(bench, kernel("a"))
    assert (counts.along, counts.plain) == (1, 1)
    again = rows(bench, kernel("b"))
    assert (counts.along, counts.plain) == (1, 1)
    assert numbers(first) == numbers(again)
    assert numbers(rows(Bench(case.ref, lambda: case), kernel("b"))) == numbers(again)


def test_one_element_that_differs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn()
    bench, counts = Bench(case.ref, lambda: case), Counting(monkeypatch)
    plain = outputs(rows(bench, kernel("a")))
    other = outputs(rows(bench, kernel("b", moved)))
    assert counts.along == 2
    assert [a.bits == b.bits for a, b in zip(plain, other, strict=True)] == [True] * 3 + [False]
    assert numbers(plain)[:-1] == numbers(other)[:-1]
    assert plain[-1].rms != other[-1].rms


@pytest.mark.parametrize("role", ["baseline", "control"])
def test_only_kernels_under_audit_share(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn()
    bench, counts = Bench(case.ref, lambda: case), Counting(monkeypatch)
    rows(bench, kernel("a"))
    rows(bench, kernel("a"), role)
    assert counts.along == 2


def test_another_claim_or_format_is_held_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as fp32 are no bf16 output, and what is expected of a kernel follows from
    what it claims."""
    case = drawn()
    bench, counts = Bench(case.ref, lambda: case), Counting(monkeypatch)
    rows(bench, kernel("a"))
    wide = outputs(rows(bench, kernel("wide", lambda output: {"out": output.out.float()})))
    assert counts.along == 2
    assert {row.out_format for row in wide} == {"float32"}
    claims = kernel("claims", claims=lambda *_: {"preset": "golden2024"})
    found = outputs(rows(bench, claims))
    assert counts.along == 3
    assert {row.claim for row in found} == {"golden2024"}
