"""PyTorch, cuDNN attention: one decode step, run again, gives other bits.

It is the default backend for this call on an H200. Flash attention gives the same bits in
every run.

Needs PyTorch and CUDA. Exit code 1: it shows; 0: it does not; 3: it could not be
measured."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, HEADS, KEYS, DIM, RUNS = 64, 8, 8192, 128, 300


def main() -> int:
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, got none")
        return 3
    shows = False
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(torch.cuda.get_device_name())
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        q = torch.randn(BATCH, HEADS, 1, DIM, device="cuda", dtype=dtype)
        k, v = torch.randn(2, BATCH, HEADS, KEYS, DIM, device="cuda", dtype=dtype)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel([backend]):
                runs = [
                    torch.nn.functional.scaled_dot_product_attention(q, k, v)
                    for _ in range(RUNS)
                ]
            other = [(run != runs[0]).sum().item() for run in runs[1:]]
            count = sum(n > 0 for n in other)
            print(
                f"{dtype}, {backend.name}: {count} of {RUNS - 1} runs differ from the "
                f"first, in at most {max(other)} of {q.numel()} elements"
            )
            shows |= backend is SDPBackend.CUDNN_ATTENTION and count > 0
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
