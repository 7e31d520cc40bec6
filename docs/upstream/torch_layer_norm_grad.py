"""PyTorch on a CPU: the gradients of a layer norm's weight and bias in bfloat16.

They are sums over rows. Rounded once from a float32 sum their error would be that of the
format, whatever the number of rows; the kernel's grows with it.

Needs PyTorch. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import sys

import torch

LIMIT = 2.0


def gradients(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> list:
    """Those of weight and bias, in float64."""
    leaves = [t.clone().requires_grad_() for t in (w, b)]
    out = torch.nn.functional.layer_norm(x, x.shape[-1:], *leaves)
    return [t.double() for t in torch.autograd.grad(out, leaves, g)]


def main() -> int:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    worst = 0.0
    for rows in (64, 512, 4096):
        x, g = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 256).bfloat16()
        w, b = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
        exact = gradients(*(t.double() for t in (x, w, b, g)))
        for name, value, truth in zip(
            ("weight", "bias"), gradients(x, w, b, g), exact, strict=True
        ):
            floor = (truth.to(torch.bfloat16).double() - truth).pow(2).mean().sqrt()
            ratio = ((value - truth).pow(2).mean().sqrt() / floor).item()
            worst = max(worst, ratio)
            print(f"{rows} rows, d{name}: {ratio:.3g} times the error of one rounding")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
