"""Captured-tensor files: attention calls on disk, written by numdev or by anybody else.

A file is a safetensors file. The tensors of call i are named `i.q`, `i.k`, `i.v` and, where the
call has them, `i.mask`, `i.sinks` and `i.grad_out`; what tensors cannot say stands in its header
(`numdev.sources.tensorheader`).

safetensors stores contiguous tensors alone, while kernels choose by strides, so a header names for
every tensor the order its axes are stored in (`layout`), and reading gives back a view. A model's
[batch, heads, length, dim] view of [batch, length, heads, dim] memory is thus kept, which is what a
case keeps itself: padding between rows does not survive its being rounded to a format.

A directory of such files is read as one; `numdev.sources.tensorwriter` makes them. Nothing is in
memory but the call that is loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.errors import MeasurementError, UsageError
from numdev.sources import files as storage
from numdev.sources.tensorheader import AXES, KEY, MASK_AXES, Call, Header, parse

INDEX = "cases.json"
"""In a directory of files: which ones belong to it."""
REQUIRED, OPTIONAL = ("q", "k", "v"), ("mask", "sinks", "grad_out")
AGAIN = "write the file again"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class StoredCase:
    """A case in a file. Plain data until it is loaded, so any worker can."""

    path: Path
    index: int
    call: Call
    """With the file's defaults filled in."""
    tensors: tuple[str, ...]
    device: str = "cpu"

    @property
    def ref(self) -> CaseRef:
        call = self.call
        named = f"{call.module}#{call.call}" if call.module else f"{self.path.stem}#{self.index}"
        case = call.case or named
        return CaseRef(
            case=case,
            source=call.source or self.path.name,
            module=call.module or case,
            layer=call.layer,
            call=call.call,
            seed=call.seed,
            phase=call.phase,
            step=call.step,
            attends=call.attends,
        )

    @property
    def axes(self) -> dict[str, Any]:
        return dict(self.call.axes)

    def load(self) -> AttentionCase:
        """Read the tensors. Raises MeasurementError where the file has changed since."""
        with storage.open_safetensors(self.path, hint=AGAIN) as file:
            try:
                read = {n: file.get_tensor(f"{self.index}.{n}") for n in self.tensors}
            except SafetensorError as error:
                raise MeasurementError(
                    f"{self.path}: cannot be read any more: {storage.one_line(error)}",
                    hint="was it changed during the audit?",
                ) from error
        return self.build({name: x.to(self.device) for name, x in read.items()})

    def build(self, stored: Mapping[str, Tensor]) -> AttentionCase:
        """The case of these tensors, which are as the file has them.

        Raises UsageError, naming file and call, where they do not fit together or the header.
        """
        x = {name: self._arranged(name, tensor) for name, tensor in stored.items()}
        call, q = self.call, x["q"]
        dim = q.shape[-1] if q.ndim else 1
        mask = x.get("mask")
        if mask is not None and mask.dtype == torch.uint8 and call.mask == "bool":
            mask = mask != 0
        try:
            case = AttentionCase(
                ref=self.ref,
                q=q,
                k=x["k"],
                v=x["v"],
                scale=max(dim, 1) ** -0.5 if call.scale is None else call.scale,
                mask=mask,
                is_causal=call.is_causal,
                causal_offset=call.causal_offset or 0,
                window=call.window,
                softcap=call.softcap,
                sinks=x.get("sinks"),
                grad_out=x.get("grad_out"),
                grad_out_from=call.grad_out,
            )
        except UsageError as error:
            raise self._problem(error.message, "check the tensors, and `layout`") from error
        kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
        if call.mask not in (None, kind):
            raise self._problem(
                f"its header says mask: {call.mask!r}, but its mask is {_described(mask)}",
                "make them agree",
            )
        if case.restricts_positions and case.q_len != case.kv_len and call.causal_offset is None:
            raise self._problem(
                f"has {case.q_len} queries, {case.kv_len} keys and a causal mask or window, and no "
                "causal_offset",
                "give 0 (top-left, as PyTorch aligns) or "
                f"{case.kv_len - case.q_len} (bottom-right, as flash-attention does)",
            )
        return case

    def _arranged(self, name: str, tensor: Tensor) -> Tensor:
        """A view with a case's axes of a tensor whose axes are in the order of its layout."""
        given = self.call.layout
        layout = given.get(name) if isinstance(given, dict) else given
        if layout is None or name == "sinks" or (name == "mask" and not isinstance(given, dict)):
            return tensor
        axes = MASK_AXES[-len(layout) :] if name == "mask" else AXES
        if tensor.ndim != len(layout):  # what is wrong with it is found out with the others
            return tensor
        return tensor.permute([layout.index(axis) for axis in axes])

    def _problem(self, what: str, hint: str) -> UsageError:
        return UsageError(f"{self.path}: call {self.index}: {what}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """An opened file, or directory of files, of captured tensors; all its headers are read."""

    path: Path
    files: tuple[Path, ...]
    cases: tuple[StoredCase, ...]
    versions: Mapping[str, str]
    """As the first file has them."""

    def identity(self) -> str:
        """SHA-256 of the file; of a directory, over the names and contents of its files."""
        return storage.sha256(self.path) if self.path.is_file() else storage.identity(self.files)


def holds_cases(path: Path) -> bool:
    """Whether this is a captured-tensor file (by its header), or a directory of such files."""
    if path.is_dir():
        if (path / "config.json").exists():
            return False
        return (path / INDEX).is_file() or any(map(holds_cases, path.glob("*.safetensors")))
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    with storage.open_safetensors(path, hint=AGAIN) as file:
        return KEY in (file.metadata() or {})


def open_cases(path: Path, *, device: str = "cpu") -> CaseFile:
    """Open a captured-tensor file or a directory of them, and check every call; loads no tensor.

    Raises UsageError, naming file and call, for a header or tensors that are not as docs/inputs.md
    has them, MeasurementError for a damaged file and for a version of the header it does not know.
    """
    files = _files(path) if path.is_dir() else (path,)
    opened = [_open_file(file, device) for file in files]
    cases = tuple(chain.from_iterable(found for _, found in opened))
    name, count = Counter(case.ref.case for case in cases).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{path}: {count} calls are called {name!r}", hint="name each differently")
    return CaseFile(path=path, files=files, cases=cases, versions=opened[0][0].versions)


def _files(directory: Path) -> tuple[Path, ...]:
    if not (directory / INDEX).is_file():
        return tuple(sorted(directory.glob("*.safetensors")))
    names = storage.read_json(directory / INDEX).get("files")
    if not isinstance(names, list) or not names:
        raise MeasurementError(f"{directory / INDEX}: names no files", hint=AGAIN)
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise MeasurementError(f"{directory / INDEX}: {name!r} is no file beside it")
        if not (directory / name).is_file():
            raise MeasurementError(f"{directory}: {name} is missing", hint="save the cases again")
    return tuple(directory / name for name in names)


def _open_file(path: Path, device: str) -> tuple[Header, list[StoredCase]]:
    with storage.open_safetensors(path, hint=AGAIN) as file:
        header = parse(path, (file.metadata() or {}).get(KEY))
        held = _held(path, file.keys())
        calls = header.calls
        if calls is None:
            calls = (Call(),) * len(held)
        if not calls:
            raise UsageError(f"{path}: holds no attention call", hint="name tensors 0.q, 0.k, 0.v")
        beyond = next((i for i in held if i >= len(calls)), None)
        if beyond is not None:
            raise UsageError(
                f"{path}: holds {beyond}.{held[beyond][0]}, but has no call {beyond}",
                hint="number the calls from 0, and give every one an entry in `calls`, or none",
            )
        found = []
        for index, call in enumerate(calls):
            call = call.model_copy(
                update={
                    "source": call.source or header.source,
                    "layout": header.layout if call.layout is None else call.layout,
                }
            )
            names = tuple(held.get(index, ()))
            case = StoredCase(path=path, index=index, call=call, tensors=names, device=device)
            _check(case, file)
            found.append(case)
        return header, found


def _held(path: Path, names: Sequence[str]) -> dict[int, list[str]]:
    """The tensors of every call by its index. Raises UsageError for one that belongs to none."""
    held: dict[int, list[str]] = {}
    for name in names:
        found = re.fullmatch(r"(\d{1,9})\.(\w+)", name, re.ASCII)
        if not found or found[2] not in (*REQUIRED, *OPTIONAL):
            raise UsageError(
                f"{path}: holds a tensor {name!r}, and numdev does not know what it is",
                hint=f"a call's tensors are INDEX.NAME, NAME of {', '.join(REQUIRED + OPTIONAL)}",
            )
        held.setdefault(int(found[1]), []).append(found[2])
    return dict(sorted(held.items()))


def _check(case: StoredCase, file: Any) -> None:
    """Build the case of tensors without values, which finds what does not fit."""
    for name in REQUIRED:
        if name not in case.tensors:
            raise UsageError(
                f"{case.path}: call {case.index}: has no tensor {case.index}.{name}",
                hint="q, k and v are needed",
            )
    empty = {}
    for name in case.tensors:
        stored = file.get_slice(f"{case.index}.{name}")
        dtype = DTYPES.get(stored.get_dtype())
        if dtype is None:
            raise UsageError(
                f"{case.path}: {case.index}.{name} is stored as {stored.get_dtype()}",
                hint=f"known: {', '.join(DTYPES)}",
            )
        empty[name] = torch.empty(stored.get_shape(), dtype=dtype, device="meta")
    case.build(empty)


def _described(mask: Tensor | None) -> str:
    return "missing" if mask is None else str(mask.dtype).removeprefix("torch.")
