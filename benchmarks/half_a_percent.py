"""Three tests of two kernels on the demo model's own inputs: PyTorch's flash attention,
and the same with a scale half a percent too large. The README's table is what this
prints.

    PYTHONPATH=benchmarks python benchmarks/half_a_percent.py [--sequences 8 --length 256]

Each attention call of the model is tested as a kernel's own test-suite would, against
attention in fp32 on the same bfloat16 inputs: with `torch.testing.assert_close` at its
defaults and at 1e-2, and by flash-attention's rule, at most twice plain attention's
largest error. numdev judges every head.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import numdev

PASSED: dict[str, Counter[str]] = {"sound": Counter(), "scaled": Counter()}
TOLERANCES = {"defaults": {}, "1e-2": {"atol": 1e-2, "rtol": 1e-2}}


def sound(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return tested("sound", 1.0, q, k, v, is_causal)


def scaled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return tested("scaled", 1.005, q, k, v, is_causal)


def tested(
    name: str, factor: float, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> Tensor:
    """Attention with a scale `factor` times what it should be; tests that pass are
    counted."""
    attend = partial(scaled_dot_product_attention, is_causal=is_causal)
    out = attend(q, k, v, scale=factor * q.shape[-1] ** -0.5)
    expected = attend(q.float(), k.float(), v.float()).to(out.dtype)
    PASSED[name]["calls"] += 1
    for tolerance, options in TOLERANCES.items():
        try:
            torch.testing.assert_close(out, expected, **options)
        except AssertionError:
            continue
        PASSED[name][tolerance] += 1
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    asked = vars(parser.parse_args())
    kernels = [f"half_a_percent:{name}" for name in PASSED]
    report = numdev.audit("demo", kernels=kernels, **asked)
    import half_a_percent  # the module whose functions ran; this file is __main__

    for name, kernel in zip(PASSED, kernels, strict=True):
        passed = half_a_percent.PASSED[name]
        rows = [r for r in report.rows if r.kernel == kernel and r.tensor == "out"]
        rule = Counter(r.fa_rule for r in rows)
        wrong = [f.whole for f in report.findings if f.kernel == kernel]
        print(f"{name}:")
        for tolerance in TOLERANCES:
            print(
                f"  assert_close, {tolerance}: {passed[tolerance]} of "
                f"{passed['calls']} calls pass"
            )
        print(f"  flash-attention's 2x rule: {rule[True]} of {len(rows)} heads pass")
        print("  numdev:", *(wrong or ["no finding"]), sep="\n    ")


if __name__ == "__main__":
    main()
