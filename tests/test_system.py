"""What a machine says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from numdev import system
from numdev.system import Requirement, System

SAYS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root)\n"
    "GCC version:  gcc version 13.3.0\n": "580.159.04",
    "something else entirely\n": None,
}


def test_the_driver_is_what_its_module_says(tmp_path: Path) -> None:
    """And none where there is no module."""
    path = tmp_path / "version"
    assert system._found(path, system._MODULE) is None
    for text, version in SAYS.items():
        path.write_text(text)
        assert system._found(path, system._MODULE) == version


def test_settings_are_those_of_torch_now() -> None:
    """Of the precision of products in fp32: results depend on it."""
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("medium", "highest"):
            torch.set_float32_matmul_precision(precision)
            settings = System.here("cpu").settings
            assert settings["float32_matmul_precision"] == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        ({"capability": (8, 0), "devices": 1, "device": "cuda"}, None),
        ({"capability": (9, 0)}, "needs compute capability 9.0 or newer; NVIDIA A100 has 8.0"),
        ({"devices": 2}, "needs 2 CUDA devices, found 1"),
        ({"device": "cpu"}, "needs CPU, and this audit runs on CUDA"),
        ({"package": "flash_attn"}, "needs the package flash_attn, which is not installed"),
    ],
)
def test_what_a_machine_lacks_is_said(needs: dict[str, Any], missing: str | None) -> None:
    """What is exactly enough is enough."""
    a100 = System(device="cuda", gpu="NVIDIA A100", capability=(8, 0), devices=1)
    assert Requirement(**needs).missing(a100) == missing
