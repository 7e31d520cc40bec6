"""PyTorch, attention of more than 65,535 sequences in one call.

Flash attention fails with 65,536 and more (`CUDA error: invalid argument`), cuDNN's
backward pass too. 65,535 is the most that a grid has in its second and third dimension.

Needs PyTorch and CUDA. Exit code 1: it shows; 0: it does not; 3: it could not be
measured."""

import subprocess
import sys

import torch

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
CALL = """
import sys, torch
from torch.nn.attention import SDPBackend, sdpa_kernel
x = torch.randn(3, int(sys.argv[2]), 1, 16, 64, device="cuda", dtype=torch.bfloat16)
q, k, v = (t.requires_grad_() for t in x)
with sdpa_kernel([getattr(SDPBackend, sys.argv[1])]):
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
    passed = {}
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(torch.cuda.get_device_name())
    for backend in BACKENDS:
        for count in (65535, 65537):
            # In a process of its own: an error of the GPU ruins all that follows.
            command = [sys.executable, "-c", CALL, backend, str(count)]
            done = subprocess.run(command, capture_output=True, text=True)
            works = done.stdout.split()
            errors = [line for line in done.stderr.splitlines() if "Error:" in line]
            words = ", ".join(works) or "nothing"
            print(f"{backend}, {count:,} sequences: {words} {''.join(errors[-1:])[:120]}")
            passed[backend, count] = "backward" in works
    if not any(passed[backend, 65535] for backend in BACKENDS):
        print("expected 65,535 sequences to work in one backend, got none")
        return 3
    return int(any(passed[b, 65535] and not passed[b, 65537] for b in BACKENDS))


if __name__ == "__main__":
    sys.exit(main())
