"""Lays a call out in memory and runs it in other ways, the values of its tensors as they
are.

These are functions of a case that can be pickled, for `numdev.studies.audit.isolation`:
they are entered where the kernel runs, after its inputs were copied."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from numdev.cases import AttentionCase, laid_out, transposed
from numdev.kernels import Kernel, Output
from numdev.kernels.output import refuse
from numdev.studies.audit.isolation import copied, threads

POISONS: Mapping[str, float] = {"NaN": math.nan, "large numbers": 1024.0}
"""Values of memory that must not matter: far above usual values, while their products
with these stay finite in float16."""
GUARD = 64  # rows of poison before and behind those of each head
TILINGS: Mapping[str, Sequence[object]] = {
    "block_kv": (32, 64, 128, 256), "block_n": (32, 64, 128), "splits": (2, 4),
    "kv_order": ("descending",), "num_splits": (2, 4), "page_size": (1, 16),
    "disable_split_kv": (True,),
}  # fmt: skip
FEATURES = ("q", "k", "v", "grad_out")


@contextlib.contextmanager
def with_changed_tensors(
    case: AttentionCase, *, by: Callable[[Tensor], Tensor], of: Sequence[str] = FEATURES
) -> Iterator[AttentionCase]:
    """Returns a context with the case in which each tensor of `of` (`q`, `k`, `v`,
    `grad_out`) is replaced by what `by` returns for it: the same values in another
    layout. A case without grad_out has none afterwards."""
    grad_out = case.grad_out
    yield dataclasses.replace(
        case,
        q=by(case.q) if "q" in of else case.q,
        k=by(case.k) if "k" in of else case.k,
        v=by(case.v) if "v" in of else case.v,
        grad_out=grad_out if grad_out is None or "grad_out" not in of else by(grad_out),
    )


@contextlib.contextmanager
def with_packed_tensors(case: AttentionCase) -> Iterator[AttentionCase]:
    """Returns a context with the case whose q, k and v are slices of one tensor [batch,
    length, heads, dim], along its heads. q, k and v need the same length and
    dimension."""
    q, k, v = laid_out("packed", case.q, case.k, case.v)
    yield dataclasses.replace(case, q=q, k=k, v=v)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Returns the values of `x` [batch, heads, length, dim] in the layout `transposed`,
    `strided` or `packed` of `numdev.cases.laid_out`; `packed` is a slice of three copies.
    `x` itself for `contiguous`; any other name counts as `transposed`."""
    return laid_out(layout, x, x, x)[0]


def share_first_sequence(x: Tensor) -> Tensor:
    """Returns the first sequence of `x` in place of every one: a view of the shape of
    `x`, with stride 0."""
    return x[:1].expand_as(x)


def gather_pages(x: Tensor, size: int) -> Tensor:
    """Returns the values of x [batch, heads, length, dim], floating-point, as a view of a
    tensor of whole pages of `size` tokens, [batch, tokens, heads, dim]. That tensor is a
    copy, gathered by index from pages in reversed order. Behind the last token its last
    page holds NaN."""
    b, h, n, d = x.shape
    pages = -(-n // size)
    whole = torch.full((b, pages * size, h, d), math.nan, dtype=x.dtype, device=x.device)
    whole[:, :n] = x.transpose(1, 2)
    places = torch.arange(b * pages, device=x.device).flip(0)
    pool = whole.view(b * pages, size, h, d)[places]
    table = places.argsort().view(b, pages)
    return pool[table].view(b, pages * size, h, d)[:, :n].transpose(1, 2)


def slice_of_larger(x: Tensor, value: float | None) -> Tensor:
    """Returns the values of `x` as a slice of a larger tensor, with heads and rows in
    memory in the order of `x`. Around them stand GUARD rows before and behind those of
    every head, and a sequence before and behind the batch. These hold `value`; where it
    is None, usual numbers of `x`."""
    b, h, n, d = x.shape
    shape = (b + 2, h, n + 2 * GUARD, d)
    if value is None:
        rows = torch.arange(shape[2], device=x.device) % n
        whole = x[:1].flip(2)[:, :, rows].repeat(b + 2, 1, 1, 1)
    else:
        whole = torch.full(shape, value, dtype=x.dtype, device=x.device)
    if x.stride(1) < x.stride(2):
        whole = transposed(whole)
    part = whole[1 : b + 1, :, GUARD : GUARD + n]
    return part.copy_(x)


@contextlib.contextmanager
def on_threads(case: AttentionCase, *, count: int) -> Iterator[AttentionCase]:
    """Returns a context with the case as it is, in which PyTorch runs on `count` CPU
    threads; afterwards on as many as before."""
    with threads(count):
        yield case


class _Filled(TorchDispatchMode):
    """In this context PyTorch's `empty` functions return floating-point tensors filled
    with `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Returns the operator's result. A floating-point result of an operator with
        `empty` in its name is filled."""
        result = func(*args, **(kwargs or {}))
        if "empty" in func.overloadpacket.__name__ and result.is_floating_point():
            result.fill_(self.value)
        return result


@contextlib.contextmanager
def fill_new_memory(case: AttentionCase, *, value: float) -> Iterator[AttentionCase]:
    """Returns a context with the case as it is, in which floating-point memory that a
    kernel allocates without a value holds `value`. Of what Python allocates this is sure;
    of what C++ allocates, only where the allocator gives back what was freed last."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    for dtype in (case.q.dtype, torch.float32):
        freed = [
            torch.full(shape, value, dtype=dtype, device=case.q.device) for _ in range(2)
        ]
        del freed
    with _Filled(value):
        yield case


def wrap_kernel(kernel: Kernel, wrap: str) -> Kernel:
    """Returns the kernel with its forward pass in a CUDA graph (`wrap`: `graph`) or
    compiled (`compiled`); its backward pass stays. Nothing is run yet. Raises KeyError
    for another `wrap`."""
    run = {"graph": _run_in_graph, "compiled": _run_compiled}[wrap]
    return dataclasses.replace(kernel, function=partial(run, kernel))


def _run_in_graph(kernel: Kernel, case: AttentionCase, **options: object) -> Output:
    """Returns a copy of the kernel's output from a CUDA graph, recorded after a first run
    and replayed once. Raises Refused on a CPU, and what the kernel raises."""
    refuse((not case.q.is_cuda, "needs CUDA, but this run is on CPU"))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernel.attend(case, **options)
    torch.cuda.current_stream().wait_stream(side)
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        output = kernel.attend(case, **options)
    whole.replay()
    torch.cuda.synchronize()
    return copied(output)  # type: ignore[no-any-return]


def _run_compiled(kernel: Kernel, case: AttentionCase, **options: object) -> object:
    """Returns the output of the compiled kernel, as one operation of autograd's graph
    where it has such a function: what watches a kernel while it is measured is then not
    compiled. The compiler's caches are emptied first."""
    torch.compiler.reset()
    return torch.compile(kernel.training or kernel.function, dynamic=False)(
        case, **options
    )
