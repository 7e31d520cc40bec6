"""The other side of `numdev.audit.isolation`: a process that runs kernels and may die of it.

It is started by `isolation`, reads one task after another (a line of JSON that names a kernel and
a file with the case's tensors), and answers with a line of JSON and a file of tensors. Tensors are
safetensors files and everything else is JSON, in both directions, so that nothing that foreign code
left behind is ever unpickled.

`packed_case` to `unpacked_output` are the wire format, for both sides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from numdev.audit.attempt import Failure, attempt
from numdev.cases import AttentionCase, CaseRef
from numdev.errors import NumdevError
from numdev.formats import Format
from numdev.kernels import Output, find
from numdev.layouts import overlaps

Plain = dict[str, Any]
"""What JSON can say."""


def main(tasks: int, answers: int) -> None:
    """Serve the tasks read from one file descriptor on another, until nobody sends any more."""
    for descriptor in (tasks, answers):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError):  # Linux: when memory runs out, take this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    with os.fdopen(tasks) as lines, os.fdopen(answers, "w") as out:
        print(json.dumps({"task": 0}), file=out, flush=True)
        for line in lines:
            print(json.dumps(_answer(json.loads(line))), file=out, flush=True)


def _answer(task: Plain) -> Plain:
    """Run one task. Its output's tensors are in the file `to`, if it has an output."""
    set_torch(task["torch"])
    result = _result(task)
    told: Plain = {"task": task["task"]}
    if isinstance(result, Failure):
        return {**told, "status": result.status, "reason": result.reason}
    return {**told, "status": "ok", "plain": packed_output(result, Path(task["to"]))}


def _result(task: Plain) -> Output | Failure:
    case = unpacked_case(task["plain"], Path(task["case"]))
    try:
        kernel = find(task["kernel"])
    except NumdevError as error:
        return Failure("failed", f"not found in the isolated process: {error}")
    return attempt(kernel, case, task["options"], gradients=task["gradients"])


# --- the settings that change numbers ------------------------------------------------------------


def torch_settings() -> Plain:
    """The global switches of torch that a kernel's result depends on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "cudnn_tf32": cudnn.allow_tf32,
        "bf16_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "sdpa_math_reduction": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def set_torch(wanted: Mapping[str, Any]) -> None:
    """Set what differs from what `torch_settings` gave. (Setting a switch to what it is already is
    not always without effect.)"""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    setters: Mapping[str, Callable[[Any], object]] = {
        "threads": torch.set_num_threads,
        "float32_matmul": torch.set_float32_matmul_precision,
        "cudnn_tf32": lambda x: setattr(cudnn, "allow_tf32", x),
        "bf16_reduction": lambda x: setattr(matmul, "allow_bf16_reduced_precision_reduction", x),
        "fp16_reduction": lambda x: setattr(matmul, "allow_fp16_reduced_precision_reduction", x),
        "sdpa_math_reduction": torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        "deterministic": torch.use_deterministic_algorithms,
    }
    now = torch_settings()
    for name, set_to in setters.items():
        if now[name] != wanted[name]:
            set_to(wanted[name])


# --- the wire format -----------------------------------------------------------------------------


def packed_case(case: AttentionCase, file: Path) -> Plain:
    """Write the case's tensors to `file` as CPU copies; the rest of it is returned."""
    plain, tensors = parts_of(case)
    safetensors.torch.save_file(tensors, file)
    return plain


def parts_of(case: AttentionCase) -> tuple[Plain, dict[str, Tensor]]:
    """The case as plain data, and its tensors as contiguous CPU copies."""
    plain, copies = _parts(case)
    ref, working = dataclasses.asdict(case.ref), case.working
    layout = {
        name: list((torch.empty_like(x, device="meta") if overlaps(x) else x).stride())
        for name, x in _tensors(case).items()
    }
    plain |= {
        "ref": ref,
        "working": None if working is None else dataclasses.asdict(working),
        "layout": layout,
        "device": str(case.q.device),
    }
    return plain, copies


def unpacked_case(plain: Plain, file: Path) -> AttentionCase:
    """The case that was packed: every bit of it, its axes in the same order in memory."""
    return from_parts(plain, safetensors.torch.load_file(file))


def from_parts(plain: Plain, copies: Mapping[str, Tensor]) -> AttentionCase:
    """The case that `parts_of` took apart, as `unpacked_case` says."""
    fields = dict(plain)
    device, layout = fields.pop("device"), fields.pop("layout")
    tensors = {
        name: torch.empty_strided(x.shape, layout[name], dtype=x.dtype, device=device).copy_(x)
        for name, x in copies.items()
    }
    fields["ref"] = CaseRef(**fields["ref"])
    fields["working"] = None if fields["working"] is None else Format(**fields["working"])
    fields["window"] = None if fields["window"] is None else tuple(fields["window"])
    return AttentionCase(**{**fields, **tensors})


def packed_output(output: Output, file: Path) -> Plain:
    """Write the output's tensors to `file`; the rest of it is returned."""
    plain, tensors = _parts(output)
    safetensors.torch.save_file(tensors, file)
    return plain


def unpacked_output(plain: Plain, file: Path, device: torch.device) -> Output:
    """The output that was packed, on a device. Raises TypeError for one with unknown fields."""
    tensors = {n: x.to(device) for n, x in safetensors.torch.load_file(file).items()}
    return Output(**{**plain, **tensors})


def _parts(record: Any) -> tuple[Plain, dict[str, Tensor]]:
    tensors = _tensors(record)
    copies: dict[str, Tensor] = {}
    for name, x in tensors.items():
        y = x.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory.
        shared = any(
            y.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()
            for z in copies.values()
        )
        copies[name] = y.clone() if shared else y
    names = (f.name for f in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names if name not in tensors}, copies


def _tensors(record: Any) -> dict[str, Tensor]:
    values = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return {name: x for name, x in values.items() if isinstance(x, Tensor)}
