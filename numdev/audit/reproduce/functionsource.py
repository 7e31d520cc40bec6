"""Where a function comes from: how another process gets hold of the same one.

A function that its module has under its own name is imported. One defined inside another function,
as tests often do, is defined again from its source, in a copy of its module's names and with the
plain values that it closes over.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numdev.errors import UsageError

PLAIN = (bool, int, float, str, type(None))  # what a closed-over value may be to be spelled out


def name_of(function: Callable[..., Any]) -> str:
    """`module:name` where the module has the function under that name; else its own name alone."""
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(sys.modules.get(module), name, None) is function and module != "__main__":
        return f"{module}:{name}"
    return str(name).rpartition("<locals>.")[2]


def folder_of(function: Callable[..., Any]) -> Path | None:
    """The folder from which its module is imported; None where it comes from no file."""
    module = getattr(function, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    return path.parents[module.count(".") + (path.name == "__init__.py")]


def defined_again(function: Callable[..., Any]) -> tuple[str, str, tuple[str, ...]]:
    """The module, the name, and the lines that define in another process a function that cannot be
    imported. Raises UsageError, with the reason, where lines cannot do it."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")

    def unreachable(why: str) -> UsageError:
        return UsageError(
            f"a script of its own cannot get hold of {name or type(function).__name__}: {why}",
            hint="define it with `def` at the top of a module",
        )

    if not inspect.isfunction(function) or name == "<lambda>":
        raise unreachable("it is no function made with `def`")
    if module in ("__main__", "builtins") or folder_of(function) is None:
        raise unreachable("it is in no module that can be imported")
    closed_over = inspect.getclosurevars(function).nonlocals
    for variable, value in closed_over.items():
        if not isinstance(value, PLAIN):
            raise unreachable(f"it closes over {variable}, which is no plain value")
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise unreachable("its source cannot be read") from error
    if not source.startswith("def "):
        raise unreachable("it is decorated")
    values = "".join(f", {n}={x!r}" for n, x in closed_over.items())
    lines = (
        "import importlib",
        f'namespace = dict(vars(importlib.import_module("{module}")){values})',
        "source = [",
        *(f"    {line!r}," for line in source.splitlines()),
        "]",
        'exec("\\n".join(source), namespace)',
        f'{name} = namespace["{name}"]',
    )
    return module, name, lines
