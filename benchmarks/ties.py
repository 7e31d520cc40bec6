"""What each softmax does to rows with tied maxima, where P V is rounded to bf16.

    python benchmarks/ties.py [--seeds 20]

A row has k keys of the same largest score beside 64 - k others with about 0.1 % of its weight; V is
negative. `same V`: the tied keys are the same ones in all of 1024 rows, as sinks are; `other V`:
other ones in each. Rounded to bf16: P and P V, everything else is exact. Printed, in ulps of O
before its cast: the mean error with its 95 % interval over seeds; the root mean square over
features of a feature's mean over rows, which is 0.008 where rows err independently; that of all
errors; and the mean error of delta = rowsum(dO o O), for a dO of one sign that sums to 1, with its
rms. `one weight` is the guarded softmax with 181/256 in every row. The largest score r is 2 or
drawn from [1, 3) for each row, on which the stabilised softmax alone depends.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from unittest.mock import patch

import torch
from scipy.special import stdtrit
from torch import Tensor

from numdev.cases import AttentionCase, CaseRef
from numdev.formats import FORMATS, ulp
from numdev.kernels import find
from numdev.kernels.emulation import guarded
from numdev.kernels.reference import attend as reference

ROWS, KEYS, FEATURES = 1024, 64, 64
ROUNDED = {"preset": "exact", "p": "bfloat16", "pv": "bfloat16"}
STABILISED = {"softmax": "stabilised", "tie_tolerance": 0.0}
VARIANTS = {
    "plain": {},
    "stabilised, r = 2": {**STABILISED, "beta": 2.0},
    "stabilised, r in [1, 3)": {**STABILISED, "beta": 2.0},
    "one weight": {"softmax": "guarded"},
    "guarded": {"softmax": "guarded"},
}


def case(ties: int, same: bool, spread: bool, seed: int) -> AttentionCase:
    """Scores are q itself, since K is the identity."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, KEYS, generator=made) - 11.0
    drawn = torch.rand(1 if same else ROWS, KEYS, generator=made).argsort(dim=1)[:, :ties]
    scores.scatter_(1, drawn.expand(ROWS, ties), 0.0)
    # Multiples of 1/64: a tied score is exact, also in bf16.
    scores += 1.0 + torch.randint(128, (ROWS, 1), generator=made) / 64 if spread else 2.0
    v = -2.0 - 0.5 * torch.rand(1, 1, KEYS, FEATURES, generator=made)
    q, k, v = (x.bfloat16() for x in (scores[None, None], torch.eye(KEYS)[None, None], v))
    return AttentionCase(ref=CaseRef(case="ties"), q=q, k=k, v=v, scale=1.0)


@contextlib.contextmanager
def weights_of(name: str) -> Iterator[None]:
    if name != "one weight":
        yield
        return
    constant = lambda case, dtype: torch.full((case.q_len,), 181 / 256, dtype=dtype)  # noqa: E731
    with patch.object(guarded, "weights", constant):
        yield


def measured(name: str, ties: int, same: bool, l_from: str, seed: int) -> Tensor:
    """The five numbers of one seed."""
    given = case(ties, same, name.endswith(")"), seed)
    with weights_of(name):
        out = find("emulated").attend(given, **ROUNDED, l_from=l_from, **VARIANTS[name]).out
    exact = reference(given).out
    error = ((out - exact) / ulp(exact, FORMATS["bfloat16"]))[0, 0]
    dO = 0.5 + torch.rand(ROWS, FEATURES, generator=torch.Generator().manual_seed(seed))
    delta = (error * dO / dO.sum(dim=1, keepdim=True)).sum(dim=1)
    of_features = error.mean(dim=0).square().mean().sqrt()
    rms = error.square().mean().sqrt()
    return torch.stack([error.mean(), of_features, rms, delta.mean(), delta.square().mean().sqrt()])


def main() -> None:
    parser = argparse.ArgumentParser(description="Tied maxima under each softmax")
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print("| l from P | tied keys | softmax | mean | of a feature | rms | delta: mean | rms |")
    print("|---|---|---|---|---|---|---|---|")
    for l_from in ("unrounded", "rounded"):
        for same, ties in ((True, 2), (True, 4), (True, 64), (False, 2), (False, 4)):
            for name in VARIANTS:
                each = [measured(name, ties, same, l_from, seed) for seed in range(seeds)]
                found = torch.stack(each)
                mean, half = found.mean(dim=0), float(found[:, 0].std()) / math.sqrt(seeds)
                half *= float(stdtrit(seeds - 1, 0.975))
                keys = f"{ties}, {'same' if same else 'other'} V"
                _, feature, rms, delta, delta_rms = mean.tolist()
                print(
                    f"| {l_from} | {keys} | {name} | {mean[0]:+.3f} ± {half:.3f} | {feature:.3f} "
                    f"| {rms:.3f} | {delta:+.3f} | {delta_rms:.3f} |"
                )


if __name__ == "__main__":
    main()
