"""PyTorch on a GPU: a group norm's mean and deviation are rounded to bfloat16.

The kernel keeps both in the format of its input before it applies them, so that all
numbers of a group have one error in common: their mean, which is that of the bias in
exact arithmetic, is not.

Needs PyTorch and CUDA. Exit code 1: it shows; 0: it does not; 3: it could not be
measured."""

import sys

import torch

GROUPS, EPS = 8, 1e-5


def main() -> int:
    if not torch.cuda.is_available():
        print("needs a GPU")
        return 3
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    x = torch.randn(8, 32, 64, 64).bfloat16()
    out = torch.nn.functional.group_norm(x.cuda(), GROUPS, eps=EPS).cpu()
    groups = x.double().view(8, GROUPS, -1)
    mean = groups.mean(-1, keepdim=True)
    scale = (groups.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    equal = {}
    for name, statistics in {
        "exact": (mean, scale),
        "rounded": (mean.bfloat16().double(), scale.bfloat16().double()),
    }.items():
        result = ((groups - statistics[0]) * statistics[1]).view_as(x)
        equal[name] = (result.bfloat16() == out).double().mean().item()
        print(
            f"equal to the result with {name} statistics: {equal[name]:.4f} of elements"
        )
    return int(equal["rounded"] > equal["exact"])


if __name__ == "__main__":
    sys.exit(main())
