"""PyTorch's context parallelism as a kernel: one attention call over several GPUs.

`torch.distributed.tensor.experimental.context_parallel` divides queries, keys and values over the
ranks of a process group, and turns an SDPA call into ring attention. Numdev starts a process for
each rank, kept from call to call, hands each the whole call and takes the whole result, in its
natural order; everything between is PyTorch's. It does so for no operator on a CPU: there the ring
is called itself, over gloo, with the CPU's flash operator. No audit takes that for the kernel,
whose requirement is CUDA devices, but it can be called.

What it computes is what `sharded` computes with as many shards, `order: zigzag` where the load is
balanced and `ring` where not, and `merge_format: promoted` without `convert_to_f32`; its claim is
the same.

A rank that waits for another which is gone waits for ever. So where one dies, raises or says
nothing in time, all are ended, and that is one failed row. A rank ends when its pipe is closed, as
the end of this process does. Plain subprocesses, since `multiprocessing` would import the caller's
main module again. The names that begin with an underscore are PyTorch's: its context parallelism is
experimental and has no others for its options.
"""

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
from torch.nn.attention import SDPBackend, sdpa_kernel

from numdev.cases import AttentionCase
from numdev.errors import MeasurementError, UsageError, closest
from numdev.kernels import Output, Refused, Requirement, kernel, options_of
from numdev.kernels.sdpa import FUSED, REFUSALS
from numdev.kernels.sharded import claims, described

OPERATORS = {
    "sdpa-flash": "_scaled_dot_product_flash_attention",
    "sdpa-efficient": "_scaled_dot_product_efficient_attention",
    "sdpa-cudnn": "_scaled_dot_product_cudnn_attention",
}
ROTATIONS = ("allgather", "alltoall")
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


def _unsupported(case: AttentionCase) -> str | None:
    if case.softcap is not None or case.sinks is not None:
        return "PyTorch's SDPA has no soft cap and no attention sinks"
    if case.mask is not None or case.window is not None or case.causal_offset:
        return "PyTorch's context parallelism has causality from the top left, and no masks"
    if case.is_causal and case.q_len != case.kv_len:
        return "PyTorch's context parallelism takes causal calls with as many queries as keys alone"
    return None


def _check(options: Mapping[str, Any]) -> None:
    world = options["world"]
    if not isinstance(world, int) or isinstance(world, bool) or world < 2:
        raise UsageError(f"world is {world!r}", hint="how many devices, from 2 on")
    for name, known in (("inner", tuple(OPERATORS)), ("rotate", ROTATIONS)):
        if options[name] not in known:
            hint = closest(str(options[name]), known)
            raise UsageError(f"context-parallel: {name} is {options[name]!r}", hint=hint)
    for name, allowed in (("convert_to_f32", bool), ("load_balance", bool | None)):
        if not isinstance(options[name], allowed):
            raise UsageError(f"{name} is {options[name]!r}", hint="true or false")


def gradients(case: AttentionCase, **options: Any) -> Output:
    """A training step, under the options of `context-parallel`."""
    assert case.grad_out is not None
    dO = {"grad_out": case.grad_out.to(case.q.dtype)}
    return _computed(case, {**options_of(context_parallel), **options}, dO)


@kernel(
    "context-parallel",
    requires=Requirement(device="cuda", devices=2),
    supports=_unsupported,
    validate=_check,
    claims=claims,
    backward=gradients,
)
def context_parallel(
    case: AttentionCase,
    *,
    world: int = 2,
    inner: str = "sdpa-flash",
    rotate: str = "allgather",
    convert_to_f32: bool = True,
    load_balance: bool | None = None,
) -> Output:
    """PyTorch's context parallelism: one call over several GPUs, as ring attention.

    `load_balance`: None balances causal calls, and no other can be.
    """
    given = locals()  # the arguments and nothing else: keep this the first line
    return _computed(case, {name: x for name, x in given.items() if name != "case"}, {})


def _computed(
    case: AttentionCase, options: Mapping[str, Any], upstream: Mapping[str, Tensor]
) -> Output:
    world, inner, balanced = options["world"], options["inner"], options["load_balance"]
    balanced = case.is_causal if balanced is None else balanced
    refusal = _refusal(case, world, inner, balanced)
    if refusal:
        raise Refused(refusal)
    tensors = {"q": case.q, "k": case.k, "v": case.v, **upstream}
    answers = together(world, case.q.device.type).ask(
        {
            **{name: x.detach().cpu().contiguous() for name, x in tensors.items()},
            **options,
            "scale": case.scale,
            "is_causal": case.is_causal,
            "load_balance": balanced,
        }
    )
    if "refused" in answers[0]:
        raise Refused(str(answers[0]["refused"]))
    found = {name: x.to(case.q.device) for name, x in answers[0].items()}
    if "out" not in found:
        raise MeasurementError("rank 0 returned no output")
    # The operator that PyTorch was left to choose from.
    operator = OPERATORS[inner] + ("" if case.q.is_cuda else "_for_cpu")
    did = {
        "shards": world,
        "order": "zigzag" if balanced else "ring",
        "merge_format": "float32" if options["convert_to_f32"] else "promoted",
        "partial_format": "working",
        "each": {"operator": operator},
    }
    says = f"context parallelism, {options['rotate']}: {described(did, operator)}"
    return Output(**found, ran=says, ran_backward=says if upstream else None, did=did)


def _refusal(case: AttentionCase, world: int, inner: str, balanced: bool) -> str | None:
    """What of the options does not go with this case here."""
    there = torch.cuda.device_count()
    if case.q.is_cuda and there < world:
        return f"needs {world} CUDA devices, found {there}"
    if not case.q.is_cuda and inner != "sdpa-flash":
        return f"{inner} is not there on a CPU"
    if balanced and not case.is_causal:
        return "PyTorch balances the load of causal calls alone"
    parts = 2 * world if balanced else world
    if case.q_len % parts or case.kv_len % parts:
        return f"the lengths {case.q_len} and {case.kv_len} are no multiples of {parts}"
    return None


# --- the ranks, from here ------------------------------------------------------------------------

_running: dict[tuple[int, str], Ranks] = {}


def together(world: int, device: str) -> Ranks:
    """The ranks of this process for so many devices of one kind, started when first asked for."""
    found = _running.get((world, device))
    if found is None or found.ended:
        found = _running[world, device] = Ranks(world, device)
    return found


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
        self._ranks: list[tuple[subprocess.Popen[bytes], Connection[Any, Any]]] = []
        try:
            for number in range(world):
                ours, theirs = Pipe()
                place = [number, world, device, f"{self._folder.name}/store", theirs.fileno()]
                process = subprocess.Popen(
                    [sys.executable, "-c", BOOT, json.dumps([sys.path, *place])],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
                theirs.close()
                self._ranks.append((process, ours))
            self._answers("start", START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [process.pid for process, _ in self._ranks]

    def ask(self, task: Mapping[str, Any], limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """Every rank's answer, in order. Raises MeasurementError, and ends all ranks, where one
        fails, dies, or does not answer in time; so does any exception, Ctrl-C included."""
        try:
            for _, pipe in self._ranks:
                with contextlib.suppress(OSError):  # it is gone, and so it will be found
                    pipe.send_bytes(pickle.dumps(dict(task)))
            return self._answers("answer", limit_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every rank and remove what they shared."""
        if self.ended:
            return
        self.ended = True
        for process, pipe in self._ranks:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, nothing ends it
                process.wait(timeout=10)
            pipe.close()
        self._folder.cleanup()

    def _answers(self, what: str, limit_s: float) -> list[dict[str, Any]]:
        deadline, answers = time.monotonic() + limit_s, dict[int, dict[str, Any]]()
        while len(answers) < self.world:
            waiting = {pipe: i for i, (_, pipe) in enumerate(self._ranks) if i not in answers}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                who = ", ".join(str(i) for i in sorted(waiting.values()))
                raise MeasurementError(
                    f"rank {who} of {self.world} did not {what} within {limit_s:g} s"
                )
            for number in (waiting[pipe] for pipe in ready):  # type: ignore[index]
                try:
                    answer = pickle.loads(self._ranks[number][1].recv_bytes())
                except (EOFError, OSError):
                    answer = {"error": "it closed its pipe"}
                if "error" in answer:
                    why = f"rank {number} of {self.world}: {answer['error']}"
                    raise MeasurementError(self._fate() or why)
                answers[number] = answer
        return [answers[i] for i in range(self.world)]

    def _fate(self) -> str | None:
        """How a rank died: what others report is then a consequence. None if all live."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            for number, (process, _) in enumerate(self._ranks):
                code = process.poll()
                if code is not None:
                    how = f"ended with exit code {code}"
                    if code < 0:
                        how = f"was killed by {signal.Signals(-code).name}"
                    return f"rank {number} of {self.world} {how}"
            time.sleep(0.02)
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
            task = pickle.loads(tasks.recv_bytes())
            tasks.send_bytes(pickle.dumps(_answer(task, number, mesh)))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # groups of processes are not taken apart while others may be gone
    except Exception as error:
        with contextlib.suppress(OSError):
            tasks.send_bytes(pickle.dumps({"error": _one_line(error)}))
        time.sleep(2 * GRACE_S)  # until it is ended: what it says is the reason, not its death
        os._exit(1)


def _answer(task: Mapping[str, Any], number: int, mesh: DeviceMesh) -> dict[str, Any]:
    """The whole results from rank 0, and from the others that they are done."""
    try:
        found = [x.cpu() for x in _step(task, mesh)]  # where a fault on the device comes out
    except Exception as error:
        why = _one_line(error)
        refused = any(words in why.lower() for words in REFUSALS)
        return {"refused" if refused else "error": why}
    return dict(zip(NAMES, found, strict=False)) if number == 0 else {}


def _step(task: Mapping[str, Any], mesh: DeviceMesh) -> list[Tensor]:
    """The output, and the gradients where the task has an upstream one, all of them whole."""
    from torch.distributed.tensor.experimental import _attention as cp

    cp.set_rotate_method(task["rotate"])
    cp._cp_options.enable_load_balance = task["load_balance"]
    cp._cp_options.convert_to_f32 = task["convert_to_f32"]
    device = torch.device(mesh.device_type)  # on CUDA the current one: this rank's
    given = [task[name].to(device) for name in ("q", "k", "v", "grad_out") if name in task]
    with cp.context_parallel(
        mesh,
        buffers=given,
        buffer_seq_dims=[SEQUENCE] * len(given),
        no_restore_buffers=set(given),
    ):
        attend = _dispatched if mesh.device_type == "cuda" else _ring
        parts = attend(task, mesh, given[:3], given[3] if len(given) > 3 else None)
        parts = [x.detach().contiguous() for x in parts]
        whole: list[Tensor] = cp.context_parallel_unshard(mesh, parts, [SEQUENCE] * len(parts))
    return whole


def _dispatched(
    task: Mapping[str, Any], mesh: DeviceMesh, qkv: Sequence[Tensor], grad_out: Tensor | None
) -> Sequence[Tensor]:
    """This rank's part of an SDPA call that PyTorch turns into its ring, and of its gradients."""
    q, k, v = (x.detach().requires_grad_(grad_out is not None) for x in qkv)
    backend: SDPBackend = FUSED[OPERATORS[task["inner"]]]
    with sdpa_kernel([backend]):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=task["is_causal"], scale=task["scale"],
            **({"enable_gqa": True} if q.shape[1] > k.shape[1] else {}),  # type: ignore[arg-type]
        )  # fmt: skip
        if grad_out is None:
            return [out]
        return [out, *torch.autograd.grad(out, [q, k, v], grad_out)]


def _ring(
    task: Mapping[str, Any], mesh: DeviceMesh, qkv: Sequence[Tensor], grad_out: Tensor | None
) -> Sequence[Tensor]:
    """The same with PyTorch's ring called itself."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten, group, (q, k, v) = torch.ops.aten, mesh.get_group(), qkv
    how = {"is_causal": task["is_causal"], "dropout_p": 0.0, "scale": task["scale"]}
    operator = aten._scaled_dot_product_flash_attention_for_cpu
    forward: Any = ring._templated_ring_attention
    out, lse = forward(group, SEQUENCE, operator, q, k, v, **how)
    if grad_out is None:
        return [out]
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward
    backward: Any = ring._templated_ring_attention_backward
    found = backward(group, SEQUENCE, operator, grad_out, "grad_out", q, k, v, out, lse, **how)
    return [out, *found[:3]]


def _one_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
