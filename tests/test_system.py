"""What a machine says of itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from numdev import system

MODULES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root)\n"
    "GCC version:  gcc version 13.3.0\n": "580.159.04",
}


@pytest.mark.parametrize("text", MODULES)
def test_the_driver_is_what_its_module_says(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else is asked."""
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(system, "_VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(subprocess, "run", None)
    assert system._driver_version() == MODULES[text]


@pytest.mark.parametrize("text", [None, "", "something else entirely\n"])
@pytest.mark.parametrize(("answer", "version"), [("580.1\n580.1\n", "580.1"), ("\n", None)])
def test_where_it_says_nothing_the_tool_is_asked(
    text: str | None,
    answer: str,
    version: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(system, "_VERSION_FILE", tmp_path / "version")
    done = subprocess.CompletedProcess([], 0, stdout=answer)
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: done)
    assert system._driver_version() == version


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_both_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = system._driver_version()
    monkeypatch.setattr(system, "_VERSION_FILE", tmp_path / "none")
    assert said is not None
    assert system._driver_version() == said
