"""PyTorch's own multi-head attention: what `nn.MultiheadAttention` and `nn.Transformer` call.

`torch.nn.functional.multi_head_attention_forward` projects, and then calls SDPA by the name it has
in its own module, where a `TorchFunctionMode` that is handling the outer call sees nothing. So it
is run from a copy in which that name means a function given here: torch's own code and torch's own
masks (a bool mask of this module hides where it is True, unlike SDPA's; both become additive), and
no global is touched. When attention weights are asked for (`need_weights`, the default), it
multiplies by hand instead. Then the call is met in a run without weights, which computes the same
function, and the model gets the answer of its own run (with gradients the met call's answer, which
differs in rounding alone: gradients must pass through it).

The inference fast path is one operator for the whole layer, with no call inside to be met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F


def answer(
    sdpa: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    differentiable: bool = False,
) -> Any:
    """What `multi_head_attention_forward(*args, **kwargs)` returns; `sdpa` makes its SDPA call.

    Must be called where no torch function mode would see the call again. `differentiable`: the
    output is that of the SDPA call also where weights are asked for, so that gradients reach it.
    """
    original = cast(FunctionType, F.multi_head_attention_forward)
    namespace = {**original.__globals__, "scaled_dot_product_attention": sdpa}
    met = FunctionType(original.__code__, namespace, original.__name__, original.__defaults__)
    if not kwargs.get("need_weights", True):
        return met(*args, **kwargs)
    # Without weights `is_causal` would stand for the mask; with them the mask itself is applied.
    out, _ = met(*args, **{**kwargs, "need_weights": False, "is_causal": False})
    own, weights = original(*args, **kwargs)
    return (out if differentiable else own), weights


@contextmanager
def without_fast_path() -> Iterator[None]:
    """`nn.MultiheadAttention` and `nn.TransformerEncoderLayer` take their ordinary way."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
