"""PyTorch on a CPU: native_batch_norm in evaluation without running statistics ends the
process. `torch.nn.functional.batch_norm` refuses it; the operator does not look.

Needs PyTorch. Exit code 1: it shows; 0: it does not; 3: it could not be measured."""

import subprocess
import sys

import torch

CALL = """
import torch
x = torch.randn(4, 3, 8, 8)
torch.native_batch_norm(x, None, None, None, None, False, 0.1, 1e-5)
"""


def main() -> int:
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    print(f"torch {torch.__version__}")
    print(f"exit code {done.returncode} (negative: ended by a signal): {last[0]}")
    return int(done.returncode < 0)


if __name__ == "__main__":
    sys.exit(main())
