"""Write attention calls as captured-tensor files, for `numdev.sources.tensorfile` to read.

Tensors are stored as they are, unrounded, each with its axes in the order they have in memory: what
kernels choose by is then the same after reading. Many calls make a directory with one file each, so
that no more than one is in memory.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

import numdev
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError
from numdev.sources.files import one_line
from numdev.sources.tensorfile import INDEX, OPTIONAL, REQUIRED
from numdev.sources.tensorheader import AXES, KEY, MASK_AXES, VERSION, Header


def write(
    path: Path,
    cases: Sequence[AttentionCase],
    axes: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Write cases to one captured-tensor file, whole or not at all; their tensors are all needed.

    Tensors are stored as they are, unrounded. `axes`: every case's place on a grid.
    """
    tensors, calls = {}, []
    for index, case in enumerate(cases):
        call, stored = _call_of(case)
        calls.append({**call, "axes": dict(axes[index]) if axes else {}})
        tensors.update({f"{index}.{name}": x for name, x in stored.items()})
    header = Header.model_validate({"version": VERSION, "versions": _versions(), "calls": calls})
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        save_file(tensors, partial, metadata={KEY: header.model_dump_json()})
        partial.replace(path)
    except SafetensorError as error:
        raise MeasurementError(
            f"{path}: cannot be written: {one_line(error)}", hint="is there room?"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


class Writer:
    """Writes cases one at a time into a directory, which appears, whole, when all are written.

    Use as a context manager; one that is left by an exception, or without a case, leaves nothing.
    """

    def __init__(self, directory: Path, *, overwrite: bool = False) -> None:
        """Raises UsageError where the directory exists, or cannot be made; with `overwrite` an
        existing one is replaced if it holds saved cases."""
        self.directory, self.names = directory, list[str]()
        replaceable = overwrite and (directory / INDEX).is_file()
        if directory.exists() and not replaceable:
            raise UsageError(
                f"{directory}: exists", hint="choose another --save-cases, or remove it first"
            )
        self.partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")

    def __enter__(self) -> Writer:
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"{self.directory}: cannot write cases there ({error.strerror})",
                hint="choose another --save-cases",
            ) from error
        return self

    def add(self, case: AttentionCase, axes: Mapping[str, Any] | None = None) -> None:
        """Write one more case; it is not kept."""
        name = f"{len(self.names):05d}.safetensors"
        write(self.partial / name, [case], [axes or {}])
        self.names.append(name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.names:
                index = json.dumps({"version": VERSION, "files": self.names}, indent=1)
                (self.partial / INDEX).write_text(index + "\n", encoding="utf-8")
                if self.directory.exists():
                    shutil.rmtree(self.directory)
                self.partial.replace(self.directory)
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)


def _call_of(case: AttentionCase) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A case as a header's entry and the tensors to store, each with its axes in storage order."""
    stored, layout = {}, {}
    for name in (*REQUIRED, *OPTIONAL):
        tensor = getattr(case, name)
        if tensor is None:
            continue
        order = storage_order(tensor)
        if name != "sinks":
            letters = MASK_AXES[-tensor.ndim :] if name == "mask" else AXES
            layout[name] = "".join(letters[axis] for axis in order)
        stored[name] = (
            tensor.detach().permute(order).cpu().clone(memory_format=torch.contiguous_format)
        )
    ref, mask = case.ref, case.mask
    call = {
        "case": ref.case,
        "module": ref.module,
        "layer": ref.layer,
        "call": ref.call,
        "seed": ref.seed,
        "source": ref.source,
        "phase": ref.phase,
        "step": ref.step,
        "attends": ref.attends,
        "mask": "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive",
        "scale": case.scale,
        "is_causal": case.is_causal,
        "causal_offset": case.causal_offset,
        "window": case.window,
        "softcap": case.softcap,
        "grad_out": case.grad_out_from,
        "layout": layout,
    }
    return call, stored


def storage_order(tensor: Tensor) -> list[int]:
    """The axes from the slowest to the fastest, as a dense copy of the tensor has them.

    PyTorch's own rule is asked: it is what kernels meet, for they are given dense copies.
    """
    strides = torch.empty_like(tensor, device="meta").stride()
    return sorted(range(tensor.ndim), key=lambda axis: (-strides[axis], axis))


def _versions() -> dict[str, str]:
    found = {"numdev": numdev.__version__, "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    return found
