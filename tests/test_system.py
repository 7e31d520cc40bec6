"""What a machine says of itself."""

from __future__ import annotations

from pathlib import Path

import torch

from numdev import system

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
            settings = system.System.here("cpu").settings
            assert settings["float32_matmul_precision"] == precision
    finally:
        torch.set_float32_matmul_precision(before)
