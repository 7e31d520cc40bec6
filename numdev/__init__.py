"""numdev: numeric-deviation audits of attention and of other functions. `import numdev`
imports neither torch nor numpy. A public name below is imported when it is first used;
docs/api.md describes all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numdev.api import audit as audit
    from numdev.api import capture as capture
    from numdev.api import compare as compare
    from numdev.api import effects as effects
    from numdev.api import invariance as invariance
    from numdev.api import logprobs as logprobs
    from numdev.api import measure as measure
    from numdev.kernels import kernel as kernel
    from numdev.sources.captured_calls import save_cases as save_cases
    from numdev.sources.captured_calls import varlen_cases as varlen_cases
    from numdev.studies.logprobs.dump import dump_logprobs as dump_logprobs
    from numdev.testing import CheckFailed as CheckFailed
    from numdev.testing import check as check
    from numdev.testing import check_attention as check_attention
    from numdev.training_watch import watch as watch

__version__ = "0.1.0"
_HOMES = {
    "CheckFailed": "testing",
    "audit": "api",
    "capture": "api",
    "check": "testing",
    "check_attention": "testing",
    "compare": "api",
    "effects": "api",
    "invariance": "api",
    "dump_logprobs": "studies.logprobs.dump",
    "kernel": "kernels",
    "logprobs": "api",
    "measure": "api",
    "save_cases": "sources.captured_calls",
    "varlen_cases": "sources.captured_calls",
    "watch": "training_watch",
}
__all__ = tuple(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'numdev' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"numdev.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
