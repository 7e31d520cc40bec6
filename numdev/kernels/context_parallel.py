"""PyTorch's context parallelism as a kernel: one attention call over several GPUs.

`torch.distributed.tensor.experimental.context_parallel` turns an SDPA call into ring
attention over the ranks of a process group: a process for each, kept from call to call,
which is handed the whole call. On a CPU PyTorch has no operator for that: tests call its
ring themselves, over gloo. What it computes, and claims, is `sharded`.

A rank that waits for another which is gone waits for ever: where one dies, raises or says
nothing in time, all are ended, and that is one failed row. Names that begin with an
underscore are PyTorch's, which has no others for these options."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.util import Finalize
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessException, spawn

from numdev import temporary_files
from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, one_line
from numdev.kernels import Output, Refused, Requirement, kernel
from numdev.kernels.key_shards import claims, describe_shards
from numdev.kernels.output import refuse, upstream, why_not
from numdev.kernels.sdpa import FUSED, OPERATORS, REFUSALS, forced_backend

VALUES: Mapping[str, Sequence[object]] = {
    "inner": ("sdpa-flash", "sdpa-efficient", "sdpa-cudnn"),
    "convert_to_f32": (True, False),
}
"""Options beside `world`, their defaults first."""
NAMES = ("out", "dq", "dk", "dv")
SEQUENCE = 2  # the axis that is divided
START_S = 180.0  # for ranks to import torch and to find each other
# For an answer; `--isolate` has a limit of its own, of which this knows nothing
LIMIT_S = 300.0


class RankTask(TypedDict):
    """One call, as every rank gets it."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: NotRequired[Tensor]
    attend: Callable[..., Sequence[Tensor]]  # as `_ring_attention`
    operator: str
    scale: float
    is_causal: bool
    convert_to_f32: bool


def _unsupported(case: AttentionCase) -> str | None:
    """Returns why PyTorch's context parallelism cannot run the case; None where it
    can."""
    masked = case.mask is not None or case.window is not None or case.causal_offset
    unlike = case.is_causal and case.q_len != case.kv_len
    return why_not(
        (case.softcap is not None or case.sinks is not None, "no soft cap and no sinks"),
        (masked, "only causality from the top left, no masks"),
        (unlike, "a causal call needs as many queries as keys"),
    )


@kernel(
    "context-parallel",
    options={"world": 2, **{name: values[0] for name, values in VALUES.items()}},
    values={"world": 2, **VALUES},
    requires=Requirement(device="cuda", devices=2),
    supports=_unsupported,
    claims=claims,
    backward=lambda case, **options: _run_on_ranks(
        case, options, upstream(case).to(case.q.dtype)
    ),
)
def context_parallel(case: AttentionCase, **options: object) -> Output:
    """PyTorch's context parallelism: one call over several GPUs, as ring attention.

    Options: `world`, the number of processes, and VALUES. Returns out alone, the whole of
    it on the case's device. Raises Refused for too few GPUs, lengths that do not divide,
    and what PyTorch refuses; MeasurementError where a process fails, dies or does not
    answer."""
    return _run_on_ranks(case, options, None)


def _run_on_ranks(
    case: AttentionCase, options: Mapping[str, Any], grad_out: Tensor | None
) -> Output:
    """Runs the call on `world` processes and returns its output, with dq, dk and dv where
    `grad_out` is not None; the log-sum-exp is None. `options` are all of the kernel's.
    Raises Refused for too few GPUs, an `inner` that the device does not have, lengths
    that do not divide, and what PyTorch refuses; MeasurementError as `Ranks.ask`; OSError
    where no process can be started."""
    world, inner, device = options["world"], options["inner"], case.q.device.type
    # Causal calls are balanced, and no others
    parts = 2 * world if case.is_causal else world
    lacking = device == "cuda" and torch.cuda.device_count() < world
    odd = case.q_len % parts or case.kv_len % parts
    refuse(
        (lacking, f"needs {world} CUDA devices, found {torch.cuda.device_count()}"),
        (inner not in OPERATORS[device], f"{inner} is not there on a CPU"),
        (odd, f"the lengths {case.q_len} and {case.kv_len} are not multiples of {parts}"),
    )
    task: RankTask = {
        "q": _to_host(case.q),
        "k": _to_host(case.k),
        "v": _to_host(case.v),
        "attend": _ring_attention,
        "operator": OPERATORS[device][inner],
        "scale": case.scale,
        "is_causal": case.is_causal,
        "convert_to_f32": options["convert_to_f32"],
    }
    if grad_out is not None:
        task["grad_out"] = _to_host(grad_out)
    answer = together(world, device).ask(task)
    if "refused" in answer:
        raise Refused(str(answer["refused"]))
    did = {
        "shards": world,
        "order": "zigzag" if case.is_causal else "ring",
        "merge_format": "float32" if options["convert_to_f32"] else "promoted",
        "partial_format": "working",
        # The one that PyTorch was left to choose from
        "each": {"operator": task["operator"]},
    }
    ran = f"context parallelism: {describe_shards(did, task['operator'])}"
    whole = {name: x.to(case.q.device) for name, x in answer.items()}
    return Output(
        out=whole["out"],
        dq=whole.get("dq"),
        dk=whole.get("dk"),
        dv=whole.get("dv"),
        ran=ran,
        ran_backward=None if grad_out is None else ran,
        did=did,
    )


def _to_host(x: Tensor) -> Tensor:
    """Returns a tensor without its graph, on the CPU and contiguous, as a pipe takes
    it."""
    return x.detach().cpu().contiguous()


# --- the ranks, from here -------------------------------------------------------------


class Ranks:
    """A group of `world` processes that wait for tasks, started when this is made; each
    has a device of its own where `device` is `cuda`. Raises MeasurementError where they
    do not start within START_S seconds, OSError where no process can be started. They end
    with this process."""

    def __init__(self, world: int, device: str) -> None:
        self.world = world
        self._ends = contextlib.ExitStack()
        atexit.register(self._ends.close)
        folder = self._ends.enter_context(
            temporary_files.temporary_folder(prefix="numdev-ranks-")
        )
        self._pipes, theirs = zip(*(Pipe() for _ in range(world)), strict=True)
        place = (world, device, f"{folder}/store", theirs)
        self.ranks: Any = spawn(run_rank, place, nprocs=world, join=False, daemon=True)
        self.ask(None, START_S)

    def ask(self, task: RankTask | None, limit_s: float = LIMIT_S) -> Any:
        """Sends a task to every process and returns rank 0's answer, a dict: `out` and,
        for a task with `grad_out`, `dq`, `dk` and `dv`, on the CPU; or `refused` alone,
        with PyTorch's reason. With None it sends nothing, waits until all have started,
        and returns an empty dict. An exception ends the processes, as `close`; raises
        MeasurementError where one fails or dies, or rank 0 does not answer within
        `limit_s` seconds."""
        try:
            with contextlib.suppress(OSError):  # it is gone, and so it will be found
                for pipe in self._pipes if task is not None else ():
                    pipe.send_bytes(pickle.dumps(task))
            if wait([self._pipes[0], *self.ranks.sentinels], limit_s) == [self._pipes[0]]:
                with contextlib.suppress(EOFError, OSError):
                    return pickle.loads(self._pipes[0].recv_bytes())
            self.ranks.join(1.0, grace_period=1.0)
            raise MeasurementError(
                f"{self.world} ranks did not answer within {limit_s:g} s"
            )
        except BaseException as error:
            self.close()
            if not isinstance(error, ProcessException):
                raise
            why = str(error).strip().splitlines()[-1]
            raise MeasurementError(
                f"rank {error.error_index} of {self.world}: {why}"
            ) from None

    def close(self) -> None:
        """Kills every process and removes their common folder. This object cannot be used
        again. `together` forgets all of its groups, so that its next call starts new
        processes."""
        together.cache_clear()
        for process in self.ranks.processes:
            process.kill()
            process.join(10)  # in the driver, nothing ends it
        for pipe in self._pipes:
            pipe.close()
        self._ends.close()


together = functools.cache(Ranks)  # started when first asked for


# --- one rank, in its own process -----------------------------------------------------


def run_rank(
    number: int, world: int, device: str, store: str, pipes: Sequence[Connection]
) -> None:
    """Runs one process of the group, number `number` of `world`, on a `device` of this
    type (`cuda` or `cpu`): computes the tasks that it reads from its end of `pipes` until
    the other end is closed. Rank 0 sends an empty answer when it is ready, then each
    task's answer. `store`: a file through which the processes find each other. What
    stderr gets is dropped. An exception ends the process."""
    # Groups are not taken apart: others may be gone
    Finalize(None, os._exit, (1,), exitpriority=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if device == "cuda":
        torch.cuda.set_device(number)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=LIMIT_S),
    )
    mesh, answer = init_device_mesh(device, (world,)), dict[str, object]()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            if number == 0:
                pipes[0].send_bytes(pickle.dumps(answer))
            answer = _answer_of_rank(pickle.loads(pipes[number].recv_bytes()), mesh)


def _answer_of_rank(task: RankTask, mesh: DeviceMesh) -> dict[str, object]:
    """Computes this rank's part of a call and returns the whole result, on the CPU: `out`
    and, where the task has a `grad_out`, `dq`, `dk` and `dv`. Returns `{"refused":
    reason}` where PyTorch has no kernel for the call; any other exception passes. Every
    rank must call it."""
    from torch.distributed.tensor.experimental import _attention as cp

    cp._cp_options.enable_load_balance = task["is_causal"]
    cp._cp_options.convert_to_f32 = task["convert_to_f32"]
    device = torch.device(mesh.device_type)  # on CUDA the current one: this rank's
    tensors = [x.to(device) for x in (task["q"], task["k"], task["v"])]
    if "grad_out" in task:
        tensors.append(task["grad_out"].to(device))
    axes = [SEQUENCE] * len(tensors)
    try:
        with cp.context_parallel(
            mesh, buffers=tensors, buffer_seq_dims=axes, no_restore_buffers=set(tensors)
        ):
            parts = [
                x.detach().contiguous() for x in task["attend"](task, mesh, *tensors)
            ]
            whole = cp.context_parallel_unshard(mesh, parts, [SEQUENCE] * len(parts))
        # On the host, where a fault on the device comes out.
        return dict(zip(NAMES, (x.cpu() for x in whole), strict=False))
    except Exception as error:
        if not any(words in str(error).lower() for words in REFUSALS):
            raise
        return {"refused": one_line(error)}


def _ring_attention(
    task: RankTask, mesh: DeviceMesh, *tensors: Tensor
) -> Sequence[Tensor]:
    """Returns this rank's part of the output of an SDPA call, which PyTorch turns into
    its ring, followed by its parts of dq, dk and dv where `tensors` holds dO behind q, k
    and v."""
    q, k, v = (x.detach().requires_grad_(len(tensors) > 3) for x in tensors[:3])
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=task["is_causal"],
        scale=task["scale"],
    )
    if q.shape[1] > k.shape[1]:
        attend = functools.partial(attend, enable_gqa=True)
    with forced_backend(FUSED[task["operator"]]):
        out = attend(q, k, v)
        return [
            out,
            *(torch.autograd.grad(out, [q, k, v], tensors[3]) if tensors[3:] else ()),
        ]
