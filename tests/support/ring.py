"""PyTorch's ring attention, called itself: `context-parallel` on a CPU, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from numdev.kernels.context_parallel import SEQUENCE


def ring(task: Mapping[str, Any], mesh: DeviceMesh, *tensors: Tensor) -> Sequence[Tensor]:
    """This rank's part of a call, and of its gradients."""
    from torch.distributed.tensor.experimental._context_parallel import (
        _attention as of_torch,
    )

    q, k, v, *grad_out = tensors
    aten, group = torch.ops.aten, mesh.get_group()
    how = {"is_causal": task["is_causal"], "dropout_p": 0.0, "scale": task["scale"]}
    forward: Any = of_torch._templated_ring_attention
    operator = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(group, SEQUENCE, operator, q, k, v, **how)
    if not grad_out:
        return [out]
    backward: Any = of_torch._templated_ring_attention_backward
    operator = aten._scaled_dot_product_flash_attention_for_cpu_backward
    passed = (grad_out[0], "grad_out", q, k, v, out, lse)
    return [out, *backward(group, SEQUENCE, operator, *passed, **how)[:3]]
