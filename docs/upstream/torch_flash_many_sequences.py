"""PyTorch, attention of more than 65,535 sequences in one call.

Flash attention fails with 65,536 and more (`CUDA error: invalid argument`), cuDNN's
backward pass too. 65,535 is the most that a grid has in its second and third dimension.

Needs PyTorch and CUDA. Exit code 1: it shows; 0: it does not; 3: it could not be
measured."""

import subprocess
import sys

import torch

CALL = """
import sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
x = torch.randn(3, int(sys.argv[2]), 1, 16, 64, device="cuda", dtype=torch.bfloat16)
q, k, v = (t.requires_grad_() for t in x)
with sdpa_kernel([SDPBackend[sys.argv[1]]]):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.cuda.synchronize()
print("forward", flush=True)
torch.autograd.grad(out.float().square().sum(), [q, k, v])
torch.cuda.synchronize()
print("backward")
"""


def main() -> int:
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, got none")
        return 3
    shows = False
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(torch.cuda.get_device_name())
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        for count in (65535, 65537):
            # In a process of its own: an error of the GPU ruins all that follows.
            command = [sys.executable, "-c", CALL, backend, str(count)]
            done = subprocess.run(command, capture_output=True, text=True)
            passed = done.stdout.split() or ["nothing"]
            last = (done.stderr.strip().splitlines() or [""])[-1]
            print(f"{backend}, {count:,} sequences: {', '.join(passed)} {last[:120]}")
            shows |= count > 65535 and "backward" not in passed
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
