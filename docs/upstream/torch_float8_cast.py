"""PyTorch: casting to float8_e4m3fn what the format cannot hold.

The OCP 8-bit specification has a saturating and a non-saturating conversion: 448 or NaN.
It matters which one a version, a device and `torch.compile` take.

Needs PyTorch. Exit code 1: it saturates; 0: NaN; 3: it could not be measured."""

import sys

import torch


def main() -> int:
    values = torch.tensor([448.0, 464.0, 466.0, 1e6, float("inf")])
    cast = values.to(torch.float8_e4m3fn).float()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for value, result in zip(values.tolist(), cast.tolist(), strict=True):
        print(f"{value:g} becomes {result:g}")
    return int(not cast[2:].isnan().all())


if __name__ == "__main__":
    sys.exit(main())
