"""Files of benchmarks/ and scripts/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load(file: str) -> Any:
    """A file of the repository as the module of its name, which numdev finds as
    `NAME:FUNCTION`."""
    path = ROOT / file
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]
