"""Messages between numdev and a process that runs foreign code.

A task goes there as torch pickles it. An answer is the task's token, the length of a JSON
header, the header, the bytes of the tensors it names, and the token; nothing in it is
unpickled. The process may write whatever it likes, at any speed: a message that is not
whole by its deadline is dropped, and the shapes it may have follow from the case, not
from what the message says."""

from __future__ import annotations

import json
import math
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from numdev.cases import AttentionCase, strided_as
from numdev.kernels import Output

LENGTH = struct.Struct(">Q")
TOKEN_BYTES = 16  # with which an answer begins and ends, and no other
MAX_HEADER = 1 << 20
MAX_TASK = 1 << 48  # what a worker believes, which nobody but numdev writes to
# How many times its own size a tensor may span in memory: q of a packed qkv spans 3
MAX_GAP = 16
TAIL_BYTES = 1 << 13  # of what a process writes to stderr, the end
TICK_S = 0.2  # how often it is looked whether the process lives
DTYPES = {
    str(x): x
    for x in vars(torch).values()
    if isinstance(x, torch.dtype) and x.is_floating_point
}
TEXTS = ("not_lse", "ran", "ran_backward")


class TensorLayout(TypedDict):
    """How a tensor lies in memory, as a worker's message says: none of it is certain."""

    dtype: str
    shape: list[int]
    stride: list[int]


class Ended(Exception):
    """The process at the other end has ended, or closed its pipe."""


class Late(Exception):
    """A message was not complete by its deadline."""


class Channel:
    """numdev's end of the connection: a socket, and the pipe of the process's stderr.
    Neither blocks. `has_ended` returns whether the process is gone: children that it
    leaves may keep the other end open."""

    def __init__(
        self, end: socket.socket, stderr: int, has_ended: Callable[[], bool]
    ) -> None:
        self.socket, self.stderr, self.has_ended = end, stderr, has_ended
        self.tail = b""
        end.setblocking(False)
        os.set_blocking(stderr, False)

    def close(self) -> None:
        """Closes the socket and the pipe of stderr."""
        self.socket.close()
        os.close(self.stderr)

    def is_clean(self) -> bool:
        """Whether no unread byte has come, and the other end is still open. Reads
        nothing, and does not wait."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def send(self, message: bytes, deadline: float) -> None:
        """Sends a message after its length (8 bytes). Raises Ended where the process ends
        before all is sent, and Late after the deadline (of `time.monotonic`)."""
        unsent = memoryview(LENGTH.pack(len(message)) + message)
        while unsent:
            self._wait_until_ready(selectors.EVENT_WRITE, deadline)
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended from error

    def read(self, size: int, deadline: float) -> bytearray:
        """Returns the next `size` bytes. Raises Ended where the process ends before they
        came, and Late where they have not come by the deadline (of `time.monotonic`)."""
        message = bytearray(size)
        self.fill(memoryview(message), deadline)
        return message

    def fill(self, missing: memoryview, deadline: float) -> None:
        """Fills all of the memory `missing` with the next bytes. Raises Ended where the
        process ends before they came, and Late where they have not come by the deadline
        (of `time.monotonic`)."""
        while missing:
            try:
                count = self.socket.recv_into(missing)
            except BlockingIOError:
                self._wait_until_ready(selectors.EVENT_READ, deadline)
                continue
            except OSError as error:
                raise Ended from error
            if count == 0:
                raise Ended
            missing = missing[count:]

    def last_line(self) -> str:
        """Returns the last line that the process wrote to stderr, stripped, of a long one
        the end; empty where it wrote no text since `forget`."""
        self._drain_stderr()
        lines = self.tail.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def forget(self) -> None:
        """Drops what the process wrote to stderr until now."""
        self._drain_stderr()
        self.tail = b""

    def _wait_until_ready(self, event: int, deadline: float) -> None:
        """Waits until the socket is ready for `event` (of `selectors`). Reads stderr
        meanwhile, so that a process that writes much does not wait for a reader. Raises
        Late after the deadline, and Ended once the process is gone and nothing is left to
        read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, event)
            selector.register(self.stderr, selectors.EVENT_READ)
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Late
                # First: what it sent before its end still counts
                ended = self.has_ended()
                ready = [
                    key.fd
                    for key, _ in selector.select(0 if ended else min(TICK_S, left))
                ]
                if self.socket.fileno() in ready:
                    return
                if ended:
                    raise Ended
                if self.stderr in ready and not self._drain_stderr():
                    selector.unregister(self.stderr)

    def _drain_stderr(self) -> bool:
        """Reads once from stderr, up to 64 KiB, and keeps the last TAIL_BYTES of all.
        Returns False where the pipe is closed."""
        try:
            text = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return True
        self.tail = (self.tail + text)[-TAIL_BYTES:]
        return bool(text)


# --- answers --------------------------------------------------------------------------


Part = bytes | memoryview


def failed_answer(status: Literal["skipped", "failed"], reason: str) -> list[Part]:
    """Returns the parts that are sent after the token for a kernel without an output.
    Raises ValueError for a reason that is too long for a header."""
    return _pack_header({"status": status, "reason": reason})


def output_answer(output: Output) -> list[Part]:
    """Returns the parts that are sent after the token for a kernel's output: the header,
    then the bytes of each tensor. Raises ValueError for a header of more than MAX_HEADER
    bytes, and TypeError for a tensor without elements."""
    tensors = {name: x for name, x in vars(output).items() if isinstance(x, Tensor)}
    layouts = {
        name: {"dtype": str(x.dtype), "shape": list(x.shape), "stride": list(x.stride())}
        for name, x in tensors.items()
    }
    texts = {name: getattr(output, name) for name in TEXTS}
    plain = (x.detach().cpu().resolve_neg().contiguous() for x in tensors.values())
    contents = (x.view(torch.uint8).numpy().data.cast("B") for x in plain)
    return [*_pack_header({"tensors": layouts, "did": output.did, **texts}), *contents]


def _pack_header(content: Mapping[str, object]) -> list[Part]:
    """Returns the length of a header (8 bytes), and the header as JSON. Raises ValueError
    for more than MAX_HEADER bytes."""
    text = json.dumps(content, default=str).encode()
    if len(text) > MAX_HEADER:
        raise ValueError(f"header: expected at most {MAX_HEADER} bytes, got {len(text)}")
    return [LENGTH.pack(len(text)), text]


def read_answer(
    channel: Channel, token: bytes, case: AttentionCase, deadline: float
) -> Output | tuple[Literal["skipped", "failed"], str]:
    """Returns the output that a worker sent for a case, on the CPU; or a status
    (`skipped`, `failed`) and its reason. `token`: what the answer must begin and end
    with. Raises Ended where the process ends before, and Late where the answer is not
    whole by the deadline (of `time.monotonic`). Any other bytes may raise any exception,
    as ValueError, KeyError or TypeError."""
    _expect_token(channel, token, deadline)
    answer = _read_answer_body(channel, case, deadline)
    _expect_token(channel, token, deadline)
    return answer


def _expect_token(channel: Channel, token: bytes, deadline: float) -> None:
    """Reads a token. Raises ValueError where other bytes come, Ended where the process
    ends before, and Late after the deadline."""
    if channel.read(TOKEN_BYTES, deadline) != token:
        raise ValueError("not an answer to this task")


def _read_answer_body(
    channel: Channel, case: AttentionCase, deadline: float
) -> Output | tuple[Literal["skipped", "failed"], str]:
    """Returns what an answer has between its tokens: an output of the case, on the CPU,
    or a status and its reason. Raises Ended where the process ends before, and Late after
    the deadline. What is neither may raise any exception, as ValueError, KeyError or
    TypeError."""
    (length,) = LENGTH.unpack(channel.read(LENGTH.size, deadline))
    if length > MAX_HEADER:
        raise ValueError(f"header: expected at most {MAX_HEADER} bytes, got {length}")
    header = json.loads(channel.read(length, deadline))
    if "status" in header:
        if (
            header["status"] not in ("skipped", "failed")
            or type(header["reason"]) is not str
        ):
            raise ValueError("status: expected skipped or failed, and a reason")
        return header["status"], header["reason"]
    shapes = shapes_of(case)
    fields: dict[str, Any] = {}
    for name, layout in header["tensors"].items():
        fields[name] = _read_tensor(channel, name, layout, shapes[name], deadline)
    for name in TEXTS:
        if type(header[name]) not in (str, type(None)):
            raise ValueError(f"{name}: expected text")
        fields[name] = header[name]
    if type(header["did"]) not in (dict, type(None)):
        raise ValueError("did: expected a mapping")
    return Output(did=header["did"], **fields)


def shapes_of(case: AttentionCase) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that an output of this case may have, by name:
    out, lse, dq, dk and dv."""
    rows = tuple(case.q.shape[:3])
    out = (*rows, case.v.shape[-1])
    inputs = {"dq": case.q, "dk": case.k, "dv": case.v}
    return {
        "out": out,
        "lse": rows,
        **{name: tuple(x.shape) for name, x in inputs.items()},
    }


def _read_tensor(
    channel: Channel,
    name: str,
    layout: TensorLayout,
    shape: tuple[int, ...],
    deadline: float,
) -> Tensor:
    """Returns the next tensor, with the strides of `layout`; contiguous where these span
    more than MAX_GAP times its size. Raises ValueError where its shape is not `shape`,
    and for strides that are negative or not as many; KeyError for an unknown dtype;
    TypeError for a layout of another form; Ended and Late as `Channel.fill`."""
    dtype, stride = DTYPES[layout["dtype"]], layout["stride"]
    if tuple(layout["shape"]) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {layout['shape']}")
    if len(stride) != len(shape) or any(type(n) is not int or n < 0 for n in stride):
        raise ValueError(f"{name}: expected strides of {len(shape)} axes, got {stride}")
    size = math.prod(shape)
    content = torch.empty(size * dtype.itemsize, dtype=torch.uint8)
    channel.fill(content.numpy().data, deadline)
    x = content.view(dtype).view(shape)
    span = 1 + sum(n * (length - 1) for n, length in zip(stride, shape, strict=True))
    if span > MAX_GAP * size:
        return x
    return strided_as(x, torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


# --- at the other end -----------------------------------------------------------------


def read_task(end: socket.socket) -> bytearray:
    """Returns the bytes of the next task; waits for them without a limit. Raises EOFError
    where numdev has closed the socket, and for a length beyond MAX_TASK; OSError where
    the connection breaks."""
    (length,) = LENGTH.unpack(_read_exactly(end, LENGTH.size))
    if length > MAX_TASK:
        raise EOFError
    return _read_exactly(end, length)


def _read_exactly(end: socket.socket, size: int) -> bytearray:
    """Returns the next `size` bytes; waits for them without a limit. Raises EOFError
    where the socket is closed before, and OSError where the connection breaks."""
    message = bytearray(size)
    missing = memoryview(message)
    while missing:
        count = end.recv_into(missing)
        if count == 0:
            raise EOFError
        missing = missing[count:]
    return message
