"""PyTorch's flash attention on a CPU: dq where q, k and v are not negative.

The backward pass takes delta = sum(dO * O) from the output that was rounded to 16 bits.
Where rows of dP are nearly equal, dP - delta cancels and that rounding is what is left.
The unfused path of the same PyTorch keeps P and delta in float32.

Needs PyTorch. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

LIMIT = 3.0


def gradient(x: list[torch.Tensor], g: torch.Tensor, backend: SDPBackend) -> torch.Tensor:
    """dq in float64."""
    leaves = [t.clone().requires_grad_() for t in x]
    with sdpa_kernel([backend]):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    return torch.autograd.grad(out, leaves[0], g.to(out.dtype))[0].double()


def main() -> int:
    torch.manual_seed(0)
    x = [torch.rand(2, 4, 128, 64).bfloat16() for _ in range(3)]
    g = torch.rand(2, 4, 128, 64).bfloat16()
    exact = gradient([t.double() for t in x], g.double(), SDPBackend.MATH)

    def error(backend: SDPBackend) -> float:
        return (gradient(x, g, backend) - exact).pow(2).mean().sqrt().item()

    flash, math = error(SDPBackend.FLASH_ATTENTION), error(SDPBackend.MATH)
    size = exact.pow(2).mean().sqrt().item()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(
        f"rms error of dq over its rms: flash {flash / size:.2e}, math {math / size:.2e}"
    )
    print(f"flash over math: {flash / math:.3g}")
    return int(flash > LIMIT * math)


if __name__ == "__main__":
    sys.exit(main())
