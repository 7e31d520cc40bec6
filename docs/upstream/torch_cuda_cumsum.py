"""PyTorch on a GPU: a running sum in bfloat16.

Rounded once from a float32 sum its error would be that of the format, whatever the
number of terms. The kernel keeps its partial sums in bfloat16: the error grows with them.

Needs PyTorch and CUDA. Exit code 1: it shows; 0: it does not; 3: it could not be
measured."""

import sys

import torch

LIMIT = 2.0


def main() -> int:
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 3
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    worst = 0.0
    for terms in (64, 1024, 16384):
        x = torch.rand(64, terms).bfloat16()
        exact = x.double().cumsum(1)
        floor = (exact.to(torch.bfloat16).double() - exact).pow(2).mean().sqrt()
        error = (x.cuda().cumsum(1).cpu().double() - exact).pow(2).mean().sqrt()
        worst = max(worst, ratio := (error / floor).item())
        print(f"{terms} terms: {ratio:.3g} times the error of one rounding")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
