"""PyTorch's context parallelism as a kernel: one attention call over several GPUs.

`torch.distributed.tensor.experimental.context_parallel` turns an SDPA call into ring attention over
the ranks of a process group: a process for each, kept from call to call, which is handed the whole
call. On a CPU, where PyTorch has no operator for that, the ring is called itself, over gloo, which
tests do and no audit. What it computes, and claims, is `sharded`.

A rank that waits for another which is gone waits for ever: where one dies, raises or says nothing
in time, all are ended, and that is one failed row. They are plain subprocesses, since
`multiprocessing` would import the caller's main module again. Names that begin with an underscore
are PyTorch's, which has no others for these options."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, one_line
from numdev.kernels import Output, Refused, Requirement, kernel
from numdev.kernels.output import refuse, upstream, why_not
from numdev.kernels.sdpa import FUSED, OPERATORS, REFUSALS, forced
from numdev.kernels.sharded import claims, described

VALUES: Mapping[str, Sequence[Any]] = {
    "inner": ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn"),
    "convert_to_f32": (True, False),
}
"""Options beside `world`, their defaults first."""
NAMES = ("out", "dq", "dk", "dv")
SEQUENCE = 2  # the axis that is divided
START_S = 180.0  # for ranks to import torch and to find each other
LIMIT_S = 300.0  # for an answer; `--isolate` has a limit of its own, of which this knows nothing
GRACE_S = 1.0  # where a rank reports a failure, for another that died to show why
BOOT = """
import json, sys
sys.path[:], *place = json.loads(sys.argv[1])
from numdev.kernels.context_parallel import rank
rank(*place)
"""
Answer = dict[str, Any]


def _unsupported(case: AttentionCase) -> str | None:
    masked = case.mask is not None or case.window is not None or case.causal_offset
    unlike = case.is_causal and case.q_len != case.kv_len
    return why_not(
        (case.softcap is not None or case.sinks is not None, "it has no soft cap and no sinks"),
        (masked, "it has causality from the top left, and no masks"),
        (unlike, "it takes causal calls with as many queries as keys alone"),
    )


@kernel(
    "context-parallel",
    options={"world": 2, **{name: values[0] for name, values in VALUES.items()}},
    values={"world": 2, **VALUES},
    requires=Requirement(device="cuda", devices=2),
    supports=_unsupported,
    claims=claims,
    backward=lambda case, **options: _computed(
        case, options, {"grad_out": upstream(case).to(case.q.dtype)}
    ),
)
def context_parallel(case: AttentionCase, **options: Any) -> Output:
    """PyTorch's context parallelism: one call over several GPUs, as ring attention."""
    return _computed(case, options, {})


def _computed(
    case: AttentionCase, options: Mapping[str, Any], upstream: Mapping[str, Tensor]
) -> Output:
    world, inner, device = options["world"], options["inner"], case.q.device.type
    parts = 2 * world if case.is_causal else world  # causal calls are balanced, and no others
    lacking = device == "cuda" and torch.cuda.device_count() < world
    odd = case.q_len % parts or case.kv_len % parts
    refuse(
        (lacking, f"needs {world} CUDA devices, found {torch.cuda.device_count()}"),
        (inner not in OPERATORS[device], f"{inner} is not there on a CPU"),
        (odd, f"the lengths {case.q_len} and {case.kv_len} are no multiples of {parts}"),
    )
    tensors = {"q": case.q, "k": case.k, "v": case.v, **upstream}
    task = {
        **{name: x.detach().cpu().contiguous() for name, x in tensors.items()},
        "operator": OPERATORS[device][inner],
        "scale": case.scale,
        "is_causal": case.is_causal,
        "convert_to_f32": options["convert_to_f32"],
    }
    answer = together(world, device).ask(task)[0]
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    did = {
        "shards": world,
        "order": "zigzag" if case.is_causal else "ring",
        "merge_format": "float32" if options["convert_to_f32"] else "promoted",
        "partial_format": "working",
        "each": {"operator": task["operator"]},  # the one that PyTorch was left to choose from
    }
    ran = f"context parallelism: {described(did, task['operator'])}"
    whole = {name: x.to(case.q.device) for name, x in answer.items()}
    return Output(**whole, ran=ran, ran_backward=ran if upstream else None, did=did)


# --- the ranks, from here ------------------------------------------------------------------------

_running: dict[tuple[int, str], Ranks] = {}


def together(world: int, device: str) -> Ranks:
    """The ranks of this process for so many devices of one kind, started when first asked for."""
    ranks = _running.get((world, device))
    if ranks is None or ranks.ended:
        ranks = _running[world, device] = Ranks(world, device)
    return ranks


@atexit.register
def end_all() -> None:
    """End the ranks that `together` started."""
    while _running:
        _running.popitem()[1].close()


class Ranks:
    """So many processes, each with a device of its own where devices are CUDA's. Raises
    MeasurementError where they cannot be started."""

    def __init__(self, world: int, device: str) -> None:
        self.world, self.ended = world, False
        self._folder = tempfile.TemporaryDirectory(prefix="numdev-ranks-")
        self._pipes: list[Connection[Any, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []  # by rank
        closed: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            for number in range(world):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                place = [number, world, device, f"{self._folder.name}/store", theirs.fileno()]
                command = [sys.executable, "-c", BOOT, json.dumps([sys.path, *place])]
                process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), **closed)
                self.processes.append(process)
                theirs.close()
            self.ask(None, START_S)
        except BaseException:
            self.close()
            raise

    def ask(self, task: Mapping[str, Any] | None, limit_s: float = LIMIT_S) -> list[Answer]:
        """Every rank's answer, in order; to no task, that it is there. Any exception ends them;
        raises MeasurementError where one fails, dies, or does not answer in time."""
        try:
            for pipe in self._pipes if task is not None else ():
                with contextlib.suppress(OSError):  # it is gone, and so it will be found
                    pipe.send_bytes(pickle.dumps(dict(task or {})))
            deadline, answers = time.monotonic() + limit_s, dict[int, Answer]()
            while len(answers) < self.world:
                silent = [n for n in range(self.world) if n not in answers]
                left = max(deadline - time.monotonic(), 0)
                ready = wait([self._pipes[n] for n in silent], timeout=left)
                if not ready:
                    who = f"rank {', '.join(map(str, silent))} of {self.world}"
                    raise MeasurementError(f"{who} did not answer within {limit_s:g} s")
                answers |= {n: self._answer(n) for n in silent if self._pipes[n] in ready}
            return [answers[n] for n in range(self.world)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every rank and remove what they shared."""
        self.ended = True
        for process in self.processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, nothing ends it
                process.wait(timeout=10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _answer(self, number: int) -> Answer:
        try:
            answer: Answer = pickle.loads(self._pipes[number].recv_bytes())
        except (EOFError, OSError):
            answer = {"error": "it closed its pipe"}
        if "error" in answer:
            why = f"rank {number} of {self.world}: {answer['error']}"
            raise MeasurementError(self._fate() or why)
        return answer

    def _fate(self) -> str | None:
        """How a rank died: what others report is then a consequence. None if all live."""
        time.sleep(GRACE_S)
        for number, process in enumerate(self.processes):
            if (code := process.poll()) is not None:
                killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
                return f"rank {number} of {self.world} {killed or f'ended with exit code {code}'}"
        return None


# --- one rank, in its own process ----------------------------------------------------------------


def rank(number: int, world: int, device: str, store: str, pipe: int) -> None:
    """Answer the tasks read from a pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the ranks ends them
    tasks: Connection[Any, Any] = Connection(pipe)
    try:
        if device == "cuda":
            torch.cuda.set_device(number)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // world))
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=number,
            world_size=world, timeout=timedelta(seconds=LIMIT_S),
        )  # fmt: skip
        mesh = init_device_mesh(device, (world,))
        tasks.send_bytes(pickle.dumps({}))
        while True:
            answer = _of_rank(pickle.loads(tasks.recv_bytes()), mesh)
            small = {name: x for name, x in answer.items() if number == 0 or name not in NAMES}
            tasks.send_bytes(pickle.dumps(small))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # groups of processes are not taken apart while others may be gone
    except Exception as error:
        with contextlib.suppress(OSError):
            tasks.send_bytes(pickle.dumps({"error": one_line(error)}))
        time.sleep(2 * GRACE_S)  # until it is ended: what it says is the reason, not its death
        os._exit(1)


def _of_rank(task: Mapping[str, Any], mesh: DeviceMesh) -> Answer:
    """The output, and the gradients where the task has an upstream one, all of them whole."""
    from torch.distributed.tensor.experimental import _attention as cp

    cp._cp_options.enable_load_balance = task["is_causal"]
    cp._cp_options.convert_to_f32 = task["convert_to_f32"]
    device = torch.device(mesh.device_type)  # on CUDA the current one: this rank's
    tensors = [task[name].to(device) for name in ("q", "k", "v", "grad_out") if name in task]
    axes = [SEQUENCE] * len(tensors)
    attend = _dispatched if mesh.device_type == "cuda" else _ring
    buffers: Any = {"buffers": tensors, "no_restore_buffers": set(tensors)}
    try:
        with cp.context_parallel(mesh, buffer_seq_dims=axes, **buffers):
            parts = [x.detach().contiguous() for x in attend(task, mesh, *tensors)]
            whole = cp.context_parallel_unshard(mesh, parts, [SEQUENCE] * len(parts))
        # On the host, where a fault on the device comes out.
        return dict(zip(NAMES, (x.cpu() for x in whole), strict=False))
    except Exception as error:
        refused = any(words in str(error).lower() for words in REFUSALS)
        return {"refused" if refused else "error": one_line(error)}


def _dispatched(task: Mapping[str, Any], mesh: DeviceMesh, *tensors: Tensor) -> Sequence[Tensor]:
    """This rank's part of an SDPA call that PyTorch turns into its ring, and of its gradients."""
    q, k, v = (x.detach().requires_grad_(len(tensors) > 3) for x in tensors[:3])
    how: dict[str, Any] = {"is_causal": task["is_causal"], "scale": task["scale"]}
    how |= {"enable_gqa": True} if q.shape[1] > k.shape[1] else {}
    with forced(FUSED[task["operator"]]):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)
        return [out, *(torch.autograd.grad(out, [q, k, v], tensors[3]) if tensors[3:] else ())]


def _ring(task: Mapping[str, Any], mesh: DeviceMesh, *tensors: Tensor) -> Sequence[Tensor]:
    """The same with PyTorch's ring called itself."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    q, k, v, *grad_out = tensors
    aten, group = torch.ops.aten, mesh.get_group()
    how = {"is_causal": task["is_causal"], "dropout_p": 0.0, "scale": task["scale"]}
    forward: Any = ring._templated_ring_attention
    operator = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(group, SEQUENCE, operator, q, k, v, **how)
    if not grad_out:
        return [out]
    backward: Any = ring._templated_ring_attention_backward
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = (grad_out[0], "grad_out", q, k, v, out, lse)
    return [out, *backward(group, SEQUENCE, operator, *given, **how)[:3]]
