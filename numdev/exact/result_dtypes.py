"""Which dtype PyTorch gives a result, told from the dtypes that the inputs say.

It is computed, and not asked of PyTorch's meta tensors: these take two seconds to
load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload

from numdev.exact.operator_arguments import leaves_of, operator_argument, parameters_of

COMPLEX = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
REAL = {c: real for real, c in COMPLEX.items() if real != torch.bfloat16}
STATISTICS = "statistics"
# Arguments that set the dtype of a result; an operator has one of them at most
REQUESTS = frozenset(("dtype", "out_dtype", "input_dtype", "half_to_float"))
# Of norms, whose weights may be of a wider dtype: by output, the input whose dtype it
# has.
NORMS: Mapping[str, Sequence[str]] = {
    "native_layer_norm": ("input", STATISTICS, STATISTICS),
    "native_layer_norm_backward": ("input", "weight", "bias"),
    "native_batch_norm": ("input", STATISTICS, STATISTICS),
    "native_batch_norm_backward": ("input", "weight", "weight"),
    "native_group_norm": ("input", STATISTICS, STATISTICS),
    "native_group_norm_backward": ("input", "weight", "weight"),
    "_fused_rms_norm_backward": ("input", "weight"),
}


def is_floating(x: object) -> TypeGuard[Tensor]:
    """Whether x is a tensor of real or complex floating-point numbers; False for anything
    else."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def is_floating_dtype(x: object) -> TypeGuard[torch.dtype]:
    """Whether x is a dtype of real or complex floating-point numbers; False for anything
    else."""
    return isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values of this dtype are computed: complex128 for a
    complex one, float64 for a real floating-point one, and integers and bools
    unchanged."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def promoted_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the dtype that PyTorch promotes these tensors to; non-floating ones are
    ignored. A tensor without dimensions counts only where no other tensor does. Complex
    dtypes count as their real ones. Without any floating-point tensor it is PyTorch's
    default dtype. Raises RuntimeError for two dtypes that PyTorch does not promote, such
    as float8 and bfloat16."""
    floats = [x for x in tensors if is_floating(x)]
    dtypes = [x.dtype for x in floats if x.ndim] or [x.dtype for x in floats]
    real = [REAL.get(dtype, dtype) for dtype in dtypes]
    return reduce(torch.promote_types, real or [torch.get_default_dtype()])


def requested_dtype(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> torch.dtype | None:
    """Returns the floating-point dtype that a call's arguments (`dtype`, `out_dtype`,
    `input_dtype` or `half_to_float`) set for its result; None where they set none."""
    for name in filter(REQUESTS.__contains__, parameters_of(func)):
        dtype = operator_argument(func, args, kwargs, name)
        if name == "half_to_float" and dtype is True:
            return torch.float32
        if is_floating_dtype(dtype):
            return dtype
    return None


def result_dtypes(
    func: OpOverload,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    results: Sequence[object],
) -> list[torch.dtype]:
    """Returns the dtype that PyTorch would give each of a call's new `results`, in their
    order. The entry means nothing for a result that is no floating-point tensor, or that
    the call wrote into (in place, `out=`). Norms follow `NORMS`; every other operator
    gives the dtype that is asked for, else the promoted one. The second result of
    `_fused_rms_norm` has at least float32."""
    name = func.overloadpacket.__name__
    common = requested_dtype(func, args, kwargs) or promoted_dtype(
        _tensor_arguments(args, kwargs)
    )
    common = REAL.get(common, common)
    if name == "_fused_rms_norm":  # its second result is 1 / rms
        dtypes = [common, torch.promote_types(common, torch.float32)]
    elif name in NORMS:
        dtypes = [_norm_dtype(func, args, kwargs, role, common) for role in NORMS[name]]
    else:
        dtypes = [common] * len(results)
    return [
        COMPLEX[dtype] if isinstance(x, Tensor) and x.is_complex() else dtype
        for dtype, x in zip(dtypes, results, strict=True)
    ]


def _norm_dtype(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], role: str,
    common: torch.dtype,
) -> torch.dtype:  # fmt: skip
    """Returns the dtype of one result of a norm. `role`: the input whose dtype it has, or
    STATISTICS; `common`: the dtype where that input is None. On a CPU, and for group norm
    on a GPU, statistics have the common dtype; otherwise at least float32."""
    if role == STATISTICS:
        x = operator_argument(func, args, kwargs, "input")
        assert isinstance(x, Tensor)
        on_cpu = (
            x.device.type == "cpu" or func.overloadpacket.__name__ == "native_group_norm"
        )
        return common if on_cpu else torch.promote_types(x.dtype, torch.float32)
    x = operator_argument(func, args, kwargs, role)
    return x.dtype if isinstance(x, Tensor) else common


def _tensor_arguments(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> list[Tensor]:
    """Returns all tensors among a call's arguments, also those in lists, tuples and
    dicts."""
    return [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
