"""Code of our own on a GPU: what becomes of it where it cannot be built."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from numdev.errors import Refused
from numdev.metrics import gpucode
from numdev.metrics.gpucode import if_possible, launch

CUDA = torch.device("cuda")


class Raising:
    """A kernel whose start ends so."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **options: Any) -> None:
            raise self.error

        return start


@pytest.fixture(autouse=True)
def nothing_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpucode, "_NOT_BUILT", {})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        RuntimeError("PassManager::run failed"),
        type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})("at 1:0"),
    ],
)
def test_what_cannot_be_built_is_refused(error: Exception) -> None:
    """By Triton, or by the C compiler that it needs; with the first line of what was said."""
    with pytest.raises(Refused, match="Triton cannot build it"):
        launch(Raising(error), (1,), torch.zeros(1))


def test_what_could_not_be_built_is_not_tried_again() -> None:
    """As it was asked for then: with other options or of another dtype it is another kernel."""
    tried: list[Any] = []

    class Counted(Raising):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            tried.append(grid)
            return super().__getitem__(grid)

    kernel, x = Counted(RuntimeError("PassManager::run failed")), torch.zeros(1)
    asked: list[tuple[Any, dict[str, int]]] = [(x, {}), (x, {"BLOCK": 1}), (x.double(), {})]
    for _ in range(2):
        for tensor, options in asked:
            with pytest.raises(Refused, match=r"cannot build it \(PassManager::run failed\)"):
                launch(kernel, (1,), tensor, **options)
    assert len(tried) == 3


def test_other_errors_are_the_kernels_own() -> None:
    """Memory, and what went wrong on the device before."""
    for error in (torch.OutOfMemoryError("no"), RuntimeError("device-side assert")):
        with pytest.raises(type(error)):
            launch(Raising(error), (1,), torch.zeros(1))


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be built is not tried again and again."""
    tried: list[bool] = []

    def refused() -> int:
        tried.append(True)
        raise Refused("no")

    monkeypatch.setattr(gpucode, "_REFUSED", [])
    monkeypatch.setattr(gpucode, "on_nvidia", lambda device: True)
    monkeypatch.setattr(gpucode, "_with_triton", lambda: True)
    assert if_possible(CUDA, lambda: 3) == 3
    assert if_possible(CUDA, refused) is None
    assert if_possible(CUDA, refused) is None
    assert if_possible(CUDA, lambda: 3) is None
    assert tried == [True]


@pytest.mark.parametrize("lacking", ["on_nvidia", "_with_triton"])
def test_elsewhere_nothing_is_computed(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpucode, "on_nvidia", lambda *given: lacking != "on_nvidia")
    monkeypatch.setattr(gpucode, "_with_triton", lambda: lacking != "_with_triton")
    assert if_possible(CUDA, lambda: 3) is None


def test_code_is_compiled_or_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch says where it cannot compile."""
    for error in (AttributeError("_compile_kernel"), ImportError("no"), RuntimeError("nvrtc")):

        def failing(*given: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(torch.cuda, "_compile_kernel", failing, raising=False)
        assert gpucode.compiled("", "name") is None
