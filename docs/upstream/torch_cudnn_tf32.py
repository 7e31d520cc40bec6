"""PyTorch, cuDNN: convolutions in float32 read their factors in TF32 by default.

`torch.backends.cudnn.allow_tf32` is on, where that of matrix products is off. Which
convolution and which of its gradients do depends on its shape.

Needs PyTorch, CUDA and a GPU that has TF32. Exit code 1: it shows; 0: it does not; 3: it
could not be measured."""

import sys

import torch

LIMIT = 100.0


def results(x: torch.Tensor, weight: torch.Tensor, back: torch.Tensor) -> list:
    """The output and the gradients of input and weight, in float64."""
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    out = torch.nn.functional.conv2d(*leaves)
    return [t.detach().double() for t in (out, *torch.autograd.grad(out, leaves, back))]


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        print("needs a GPU that has TF32")
        return 3
    torch.manual_seed(0)
    allowed = torch.backends.cudnn.allow_tf32
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, allow {allowed}")
    x, weight = torch.rand(16, 64, 64, 64).cuda(), torch.randn(128, 64, 3, 3).cuda()
    back = torch.randn(16, 128, 62, 62).cuda()
    exact = results(x.double(), weight.double(), back.double())
    found = {}
    for switch in (allowed, False):
        torch.backends.cudnn.allow_tf32 = switch
        found[switch] = results(x, weight, back)
    worst = 0.0
    for i, name in enumerate(("output", "gradient of x", "gradient of the weight")):
        error, off = ((found[s][i] - exact[i]).norm() for s in (allowed, False))
        size = exact[i].norm()
        worst = max(worst, (error / off).item())
        print(f"{name}: {error / size:.2e} of its size, without TF32 {off / size:.2e}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
