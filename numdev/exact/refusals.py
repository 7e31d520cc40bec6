"""What cannot be computed exactly, and is refused with one line: the operator, where the user's
code calls it, and the reason."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from numdev.errors import MeasurementError

NO_FUNCTION = "its vectors are no function of the input: they are free in sign, order or rotation"
BITS = "it reads the bits of a format, and the values are held in fp64"
INSIDE = "it draws random numbers inside, which cannot be told from what it computes"
# By the operator; of a decomposition that gives values alone, `computes` is the flag that is off.
REASONS: Mapping[str, str] = {
    "linalg_eig": NO_FUNCTION,
    "_linalg_eigh": NO_FUNCTION,
    "_linalg_svd": NO_FUNCTION,
    "nextafter": BITS,
    "nextafter_": BITS,
    "rrelu_with_noise": INSIDE,
    "rrelu_with_noise_": INSIDE,
    "resize_": "it changes the storage of a tensor",
    "resize_as_": "it changes the storage of a tensor",
    "set_": "it changes the storage of a tensor",
}
VALUES_ALONE = {"_linalg_eigh": "compute_v", "_linalg_svd": "compute_uv"}
HERE, TORCH = (str(Path(path).parent) for path in (__file__, torch.__file__))


class Unsupported(MeasurementError):
    """An operation that has no exact result, or none that can be computed here."""


def check_supported(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise Unsupported where an operator is no function of its values."""
    name = func.overloadpacket.__name__
    if func is torch.ops.aten.view.dtype:
        raise unsupported(func, BITS)
    if (reason := REASONS.get(name)) is None:
        return
    if (flag := VALUES_ALONE.get(name)) and argument(func, args, kwargs, flag) is False:
        return
    raise unsupported(func, reason)


def argument(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> object:
    """The argument of this name that an operator is called with, else its default, else None."""
    for i, parameter in enumerate(func._schema.arguments):
        if parameter.name == name:
            return args[i] if i < len(args) else kwargs.get(name, parameter.default_value)
    return None


def unsupported(what: object, reason: str) -> Unsupported:
    """The error, with the line of the user's code that is running."""
    return Unsupported(f"{what}{place()}: {reason}")


def place() -> str:
    """Where the user's code stands, as ` at file:line (source)`: the innermost frame that is
    neither PyTorch's nor this package's. In a backward pass no line of it is running."""
    if torch._C._current_graph_task_id() != -1:
        return " in the backward pass"
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith((HERE, TORCH, "<frozen")) and path != contextlib_path():
            source = linecache.getline(path, frame.f_lineno).strip()
            return f" at {path}:{frame.f_lineno}" + (f" ({source})" if source else "")
    return ""


def contextlib_path() -> str:
    """The file of decorators such as `torch.no_grad`, which stand between the user and PyTorch."""
    return str(sys.modules["contextlib"].__file__)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
