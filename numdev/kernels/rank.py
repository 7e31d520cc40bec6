"""One rank of PyTorch's context parallelism: the other side of `numdev.kernels.ranks`.

PyTorch divides the tensors, rotates the keys, merges, and gathers the results in their natural
order; here stands only what a user's program would hold. On CUDA that is an SDPA call inside
`context_parallel`, which PyTorch turns into its ring. It does so for no operator on a CPU; there
the ring is called itself, with the CPU's flash operator.

The names that begin with an underscore are PyTorch's: its context parallelism is experimental and
has no others for its options.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from numdev.kernels.ranks import packed, unpacked
from numdev.kernels.sdpa import REFUSALS

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
NAMES = ("out", "dq", "dk", "dv")
SEQUENCE = 2
"""The axis that is divided."""
Task = Mapping[str, Any]


def main(rank: int, world: int, device: str, store: str, pipe: int, lifeline: int) -> None:
    """Answer the tasks read from a pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the ranks ends them
    threading.Thread(target=_die_with, args=(lifeline,), daemon=True).start()
    tasks = Connection(pipe)
    try:
        mesh = _mesh(rank, world, device, store)
        tasks.send_bytes(packed({}))
        while True:
            task = unpacked(tasks.recv_bytes())
            tasks.send_bytes(packed(_answer(task, rank, mesh)))
    except EOFError:
        os._exit(0)  # groups of processes are not taken apart while others may be gone
    except Exception as error:
        with contextlib.suppress(OSError):
            tasks.send_bytes(packed({"error": _one_line(error)}))
        os._exit(1)


def _die_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _mesh(rank: int, world: int, device: str, store: str) -> DeviceMesh:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    return init_device_mesh(device, (world,))


def _answer(task: Task, rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """The whole results from rank 0, and from the others that they are done."""
    try:
        found = [x.cpu() for x in _step(task, mesh)]  # where a fault on the device comes out
    except Exception as error:
        why = _one_line(error)
        refused = any(words in why.lower() for words in REFUSALS)
        return {"refused" if refused else "error": why}
    return dict(zip(NAMES, found, strict=False)) if rank == 0 else {}


def _step(task: Task, mesh: DeviceMesh) -> list[Tensor]:
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
        attend = _dispatched if _on_cuda(mesh) else _ring
        parts = attend(task, mesh, given[:3], given[3] if len(given) > 3 else None)
        parts = [x.detach().contiguous() for x in parts]
        whole: list[Tensor] = cp.context_parallel_unshard(mesh, parts, [SEQUENCE] * len(parts))
    return whole


def _dispatched(
    task: Task, mesh: DeviceMesh, qkv: Sequence[Tensor], grad_out: Tensor | None
) -> Sequence[Tensor]:
    """This rank's part of an SDPA call that PyTorch turns into its ring, and of its gradients."""
    q, k, v = (x.detach().requires_grad_(grad_out is not None) for x in qkv)
    with sdpa_kernel([BACKENDS[task["inner"]]]):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=task["is_causal"], scale=task["scale"],
            **({"enable_gqa": True} if q.shape[1] > k.shape[1] else {}),  # type: ignore[arg-type]
        )  # fmt: skip
        if grad_out is None:
            return [out]
        return [out, *torch.autograd.grad(out, [q, k, v], grad_out)]


def _ring(
    task: Task, mesh: DeviceMesh, qkv: Sequence[Tensor], grad_out: Tensor | None
) -> Sequence[Tensor]:
    """The same with PyTorch's ring called itself."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    operators = torch.ops.aten
    q, k, v = qkv
    how = {"is_causal": task["is_causal"], "dropout_p": 0.0, "scale": task["scale"]}
    forward: Callable[..., tuple[Tensor, ...]] = ring._templated_ring_attention
    out, lse = forward(
        mesh.get_group(), SEQUENCE, operators._scaled_dot_product_flash_attention_for_cpu, q, k, v,
        **how,
    )  # fmt: skip
    if grad_out is None:
        return [out]
    backward: Callable[..., tuple[Tensor, ...]] = ring._templated_ring_attention_backward
    operator = operators._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = backward(
        mesh.get_group(), SEQUENCE, operator, grad_out, "grad_out", q, k, v, out, lse, **how
    )
    return [out, *gradients[:3]]


def _on_cuda(mesh: DeviceMesh) -> bool:
    return mesh.device_type == "cuda"


def _one_line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
