"""numdev: numeric-deviation audits for attention. Importing it imports nothing heavy.

The public names below are imported when they are first asked for; docs/api.md describes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numdev.audit  # noqa: F401  # the package first, so that the function below has the name

del globals()["numdev"], globals()["audit"]

if TYPE_CHECKING:
    from numdev.api import audit, capture, measure
    from numdev.kernels import kernel
    from numdev.sources.serving import save_cases, varlen_cases
    from numdev.testing import CheckFailed, check_attention

__version__ = "0.1.0"
__all__ = [
    "CheckFailed",
    "audit",
    "capture",
    "check_attention",
    "kernel",
    "measure",
    "save_cases",
    "varlen_cases",
]

_HOMES = {
    "audit": "api",
    "capture": "api",
    "measure": "api",
    "kernel": "kernels",
    "check_attention": "testing",
    "CheckFailed": "testing",
    "save_cases": "sources.serving",
    "varlen_cases": "sources.serving",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'numdev' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"numdev.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
