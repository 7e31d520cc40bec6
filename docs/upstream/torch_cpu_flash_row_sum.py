"""PyTorch's flash attention on a CPU: where a row's scores tie, its sum is too small.

The kernel's exponential of 0 is 1 - 5e-5 with AVX-512 and with AVX2, so each key that has
the maximum adds too little to the row's sum, while its product with V uses the same
weights rounded to 16 bits. The log-sum-exp shows it at once.

Needs PyTorch. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import math
import sys

import torch

KEYS, LIMIT = 64, 1e-5  # float32 sums of 64 terms err by less than 1e-6


def main() -> int:
    torch.manual_seed(0)
    q = torch.zeros(1, 4, 64, 64, dtype=torch.float16)  # all scores are 0
    k = torch.randn(1, 4, KEYS, 64).half()
    v = (1 + torch.rand(1, 4, KEYS, 64)).half()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attention(q, k, v)[:2]
    exact = v.double().mean(-2, keepdim=True).expand_as(out)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    off = (lse.double() - math.log(KEYS)).mean().item()
    lean = ((out.double() - exact) / exact).mean().item()
    print(f"log-sum-exp: {off:.2e} from log {KEYS} on average (0 is exact)")
    print(f"output: {lean:+.2e} of its size on average (rounding alone averages to 0)")
    return int(abs(off) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
