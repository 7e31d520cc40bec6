"""An RMSNorm, and a kernel of it with the eps of another model, 1e-5 in place of 1e-6.

    numdev check examples/rmsnorm.py:kernel --reference examples/rmsnorm.py:reference \\
        --shape x=256x1024,w=1024 --format float32

`torch.testing.assert_close` passes it with rtol and atol 1e-2."""

import torch
import torch.nn.functional as F


def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What is meant."""
    return F.rms_norm(x, (x.shape[-1],), w, eps=1e-6)


def kernel(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Wrong by its eps."""
    return normalised(x, 1e-5, w)


def sound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As exact as the format allows."""
    return normalised(x, 1e-6, w)


def normalised(x: torch.Tensor, eps: float, w: torch.Tensor) -> torch.Tensor:
    """Computed in float32, rounded once at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * w).to(x.dtype)
