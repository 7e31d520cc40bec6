"""PyTorch on a CPU: the gradient of a transposed convolution's bias in float32.

It is the sum of the output's gradient over batch and places. Where its terms are equal or
of one sign, adding them one by one errs in proportion to their number; `sum` adds them
pairwise and errs by one rounding or two.

Needs PyTorch. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import sys

import torch

LIMIT = 10.0


def main() -> int:
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose2d(4, 8, 3)
    x = torch.randn(8, 4, 126, 126)
    out = layer(x)
    g = torch.full_like(out, 0.1)  # as of a mean
    [grad] = torch.autograd.grad(out, [layer.bias], g)
    exact = g.double().sum((0, 2, 3))
    error = ((grad.double() - exact) / exact).abs().max().item()
    pairwise = ((g.sum((0, 2, 3)).double() - exact) / exact).abs().max().item()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"{g[:, 0].numel()} equal terms, relative error of their sum:")
    print(f"the bias's gradient: {error:.2e}")
    print(f"of g.sum(): {pairwise:.2e}; half a unit in the last place: {2**-24:.2e}")
    return int(error > LIMIT * 2**-24)


if __name__ == "__main__":
    sys.exit(main())
