"""What cannot be computed exactly, and is refused with one line: the operator, where the
user's code calls it, and the reason."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
from torch._ops import OpOverload

from numdev.errors import MeasurementError
from numdev.exact.operator_arguments import operator_argument

VECTORS = (
    "its vectors are no function of the input: they are free in sign, order or rotation"
)
BITS = "it reads the bits of a format, and the values are held in fp64"
INSIDE = "it draws random numbers inside, which cannot be told from what it computes"
STORAGE = "it changes the storage of a tensor"
NUMPY = "it leaves PyTorch for NumPy, and what is computed there cannot be followed"
POINTER = "it reads memory by its address, and what is computed there cannot be followed"
NO_KERNEL = "PyTorch has no fp64 kernel of it here"
OF_FUNCTIONS = "it takes functions, which do not run operator by operator"
REASONS: Mapping[str, str] = {
    "nextafter": BITS,
    "nextafter_": BITS,
    "rrelu_with_noise": INSIDE,
    "rrelu_with_noise_": INSIDE,
    "resize_": STORAGE,
    "resize_as_": STORAGE,
    "set_": STORAGE,
}
# Of decompositions, the results that are vectors. PyTorch makes them for values alone
# too, of which a gradient is a function, so they are refused where they are used.
FREE: Mapping[str, tuple[int, ...]] = {
    "linalg_eig": (1,),
    "_linalg_eigh": (1,),
    "_linalg_svd": (0, 2),
}
# What PyTorch says where an operator, or what it is made of, cannot take a `Wide` tensor.
PHRASES = {
    "not implemented for": NO_KERNEL,
    "only works on Float": NO_KERNEL,
    "data is not allocated": POINTER,
    "no rule registered for HigherOrderOperator": OF_FUNCTIONS,
}
EXACT, TORCH = (Path(path).parent for path in (__file__, torch.__file__))
# What calls a user's function stands above it, what stands in for a GPU below
CALLERS = [EXACT.parent / at for at in ("operations/function", "sources", "studies")]
NOT_THE_USERS = ("<frozen", *(str(path) for path in (EXACT, TORCH, *CALLERS)))


class Unsupported(MeasurementError):
    """An operation that has no exact result, or none that can be computed here."""


def check_supported(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Raises Unsupported where a call has no exact result: it reads the bits of a format,
    draws random numbers inside, or changes storage (`REASONS`); any other passes. `rrelu`
    outside training passes."""
    name = func.overloadpacket.__name__
    if func is torch.ops.aten.view.dtype:
        raise unsupported_error(func, BITS)
    if (reason := REASONS.get(name)) is None:
        return
    if (
        name.startswith("rrelu")
        and operator_argument(func, args, kwargs, "training") is False
    ):
        return
    raise unsupported_error(func, reason)


def unsupported_error(
    what: object, reason: str, frames: Iterable[tuple[str, int]] | None = None
) -> Unsupported:
    """Returns (does not raise) the error `what at file:line (source): reason`; the place
    is as `source_location` says. `frames`: file and line of the frames to search for the
    user's code, from the innermost on; None: those that are running."""
    where = source_location(_running_lines() if frames is None else frames)
    return Unsupported(f"{what}{where}: {reason}")


def as_unsupported(what: object, error: RuntimeError) -> Exception:
    """Returns what to raise in place of PyTorch's `error`: Unsupported where its message
    has one of PHRASES, so that an operator cannot compute in fp64, else the error itself.
    `what`: the operator to name. The line that is named is from the error's own
    traceback, else from the running code."""
    reason = next((r for words, r in PHRASES.items() if words in str(error)), None)
    if reason is None:
        return error
    return unsupported_error(what, reason, _lines_of_error(error))


def source_location(frames: Iterable[tuple[str, int]]) -> str:
    """Returns ` at file:line (source)` for the innermost frame that is the user's, so in
    none of NOT_THE_USERS, nor in `contextlib`; without ` (source)` where the file cannot
    be read. While autograd runs it is ` in the backward pass`, since no line of the
    user's is running; empty where no frame is the user's."""
    if torch._C._current_graph_task_id() != -1:
        return " in the backward pass"
    for path, line in frames:
        if not path.startswith(NOT_THE_USERS) and path != contextlib.__file__:
            source = linecache.getline(path, line).strip()
            return f" at {path}:{line}" + (f" ({source})" if source else "")
    return ""


def _running_lines() -> Iterator[tuple[str, int]]:
    """Yields file and line of each running frame, from the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _lines_of_error(error: BaseException) -> list[tuple[str, int]]:
    """Returns file and line of each frame of an error's traceback, from the innermost
    outwards, followed by the frames that are running now."""
    frames = [
        (frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)
    ]
    return [*reversed(frames), *_running_lines()]
