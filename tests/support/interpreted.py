"""Of Triton's interpreter: a process of its own, since TRITON_INTERPRET is read when
triton is imported, as nothing here does; and patches inside it."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


def prepare() -> None:
    """What every script does first: the interpreter as numpy 2.4 can take it, and
    quicker."""
    index_arrays_of_one_element()
    look_builtins_up_once()
    let_integers_wrap()


def let_integers_wrap() -> None:
    """As on a GPU: Triton 3.6 computes sums of integers again in 64 bits, only to
    complain."""
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_builtins_up_once() -> None:
    """Triton 3.6 looks all of its language up at every call of a function, a third of the
    time."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    result: dict[Any, list[tuple[str, Any]]] = {}

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in result:
            members = inspect.getmembers(package)
            result[package] = [(name, x) for name, x in members if is_builtin(x)]
        for name, member in result[package]:
            # Within a call all of them are patched
            if getattr(package, name) is not member:
                return
            interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def index_arrays_of_one_element() -> None:
    """Triton 3.6 takes int() of an array of one element as a bound; numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def multiply_bfloat16() -> None:
    """Triton 3.6 multiplies the bits of bfloat16 operands, as numbers, only if
    interpreted."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def in_fp32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, in_fp32(a), in_fp32(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def on_cuda(test: Any) -> Any:
    """A test of Triton kernels on a GPU."""
    has_triton = importlib.util.find_spec("triton") is not None
    for reason, is_missing in (
        ("triton", not has_triton),
        ("CUDA", not torch.cuda.is_available()),
    ):
        test = pytest.mark.skipif(is_missing, reason=f"needs {reason}")(test)
    return pytest.mark.gpu(test)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of Python that finds numdev and the tests' modules."""
    path = os.pathsep.join([str(ROOT), str(FOLDER), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
