"""Triton's interpreter: a float32 that is cast to bfloat16 is truncated.

Compiled code rounds to nearest: a kernel errs twice as much in the interpreter, and
always toward zero.

Needs Triton. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    print("expected triton, got none")
    sys.exit(3)


@triton.jit
def cast(x, y, n: tl.constexpr):
    """y = x in y's format."""
    at = tl.arange(0, n)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16))


def main() -> int:
    torch.manual_seed(0)
    x = torch.randn(4096)
    y = torch.empty(4096, dtype=torch.bfloat16)
    cast[(1,)](x, y, 4096)
    nearest = x.to(torch.bfloat16)
    bits = (x.view(torch.int32) & -65536).view(torch.float32)
    print(f"triton {triton.__version__}, torch {torch.__version__}")
    print(f"{(y != nearest).sum().item()} of 4096 values are not the nearest")
    print(f"{(y.float() != bits).sum().item()} of 4096 values are not truncated")
    return int((y != nearest).any())


if __name__ == "__main__":
    sys.exit(main())
