"""Operators that PyTorch has no kernel for, in a dtype on a device: a reference that
calls one does not run there, though its exact and its rounded runs do.

Such an operator computes in float32 in its place, and its results are rounded once, as
PyTorch's own kernels of 16-bit formats do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

NARROW = (torch.bfloat16, torch.float16)
SAYS = "not implemented for '"  # what PyTorch says where it has no kernel of a dtype


def lacks_a_kernel(error: Exception) -> bool:
    """Whether an exception is a RuntimeError that says that PyTorch has no kernel for a
    dtype (its text has `not implemented for '`)."""
    return isinstance(error, RuntimeError) and SAYS in str(error)


class MissingKernels(TorchDispatchMode):
    """Within this mode an operator that has no kernel for its 16-bit dtype computes in
    float32, and its results are cast to that dtype. `names` has these operators as keys,
    in the order in which they first ran. An operator that writes into its arguments, or
    that has no float32 kernel either, raises PyTorch's RuntimeError."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = dict(kwargs or {})
        try:
            return func(*args, **named)
        except RuntimeError as error:
            dtype = _narrow_dtype(args)
            writes = func._schema.is_mutable
            if not lacks_a_kernel(error) or dtype is None or writes:
                raise
            wide = tree_map(_cast(NARROW, torch.float32), args)
            result: object = func(*wide, **named)
            self.names[func.overloadpacket.__name__] = None
            return tree_map(_cast((torch.float32,), dtype), result)


def _narrow_dtype(args: tuple[object, ...]) -> torch.dtype | None:
    """Returns the dtype of the first argument that is a tensor in bfloat16 or float16;
    None without one. Lists of tensors are not looked into."""
    tensors = (x for x in args if isinstance(x, Tensor))
    return next((x.dtype for x in tensors if x.dtype in NARROW), None)


def _cast(
    dtypes: tuple[torch.dtype, ...], dtype: torch.dtype
) -> Callable[[object], object]:
    """Returns a function that casts a tensor of one of `dtypes` to `dtype`, and returns
    anything else as it is."""
    return lambda x: x.to(dtype) if isinstance(x, Tensor) and x.dtype in dtypes else x
